"""A draft model: a smaller causal LM with a KV cache of its own."""

from collections.abc import Sequence
from numbers import Real

from torch import Tensor

from specdec_lab.drafting.chain import draft_chain
from specdec_lab.drafting.protocol import Drafter, Row, Tree
from specdec_lab.errors import require
from specdec_lab.models.cache import KVCache
from specdec_lab.models.feed import feed
from specdec_lab.models.protocol import Model


class DraftModel(Drafter):
    """Drafts a chain token by token, under the same processors as the main model.

    Sampling draws each token from q, the draft's distribution after every processor; greedy takes the arg-max,
    whose q is one-hot. The cache holds a prefix of the committed tokens after every step.
    """

    model: Model

    def __init__(self, model: Model, vocab_size: int | None = None, confidence: float = 0.0) -> None:
        """vocab_size: the main model's, where padding makes it differ from the draft's. confidence: see draft_chain."""
        require("confidence", confidence, isinstance(confidence, Real) and 0 <= confidence < 1, "0 (off) … 1")
        self.confidence = confidence
        self.model, self.name = model, model.name
        self.vocab_size = vocab_size or model.vocab_size
        self.context_length = model.context_length
        self.cache: KVCache | None = None
        self._before: list[int] = []  # committed tokens of each row when its draft began

    def start(self, rows: Sequence[Row], max_len: int, hidden: Sequence[Tensor] = ()) -> None:
        """Prefill all but the last token of each row that fits the draft's context."""
        self.cache = None  # let go of the old one first
        self.cache = self.model.new_cache(len(rows), max_len)
        feed(self.model, self.cache, [self._known(row.tokens[: self.model.context_length][:-1]) for row in rows])

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        """Draft a chain of up to lengths[r] tokens for each row."""
        width = max(lengths)
        self._before = [len(row.tokens) for row in rows]
        if width == 0:
            return super().propose(rows, lengths)
        assert self.cache is not None, "start() comes first"
        behind = [
            self._known(row.tokens[cached:])
            if length
            else []  # what the cache lacks: the root, and what it never drafted
            for row, cached, length in zip(rows, self.cache.lengths, lengths, strict=True)
        ]
        hidden = feed(self.model, self.cache, behind)
        assert hidden is not None
        cache = self.cache

        def follow(tokens: Tensor, i: int) -> Tensor:
            hidden = self.model.forward(tokens[:, None], cache)[:, 0]
            cache.advance([int(i + 1 < length) for length in lengths])  # the others' is scratch
            return hidden

        return draft_chain(self.model, rows, lengths, self.vocab_size, hidden, follow, self.confidence)

    def observe(self, rows: Sequence[Row], paths: Sequence[Sequence[int]], hidden: Tensor) -> None:
        """Roll the cache back to the committed prefix; the last drafted token was never written."""
        assert self.cache is not None
        kept = [before + len(path) for before, path in zip(self._before, paths, strict=True)]
        self.cache.rollback([min(pair) for pair in zip(self.cache.lengths, kept, strict=True)])

    def drop(self, row: int) -> None:
        """Row `row` has finished; the last row takes its index."""
        assert self.cache is not None
        self.cache.drop(row)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens to feed: a padding id that the draft has no embedding for becomes its last one."""
        return [min(token, self.model.vocab_size - 1) for token in tokens]
