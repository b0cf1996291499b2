"""A draft model: a smaller causal LM with a KV cache of its own."""

from collections.abc import Sequence
from numbers import Real

from torch import Tensor

from specdec_lab.drafting.chain import draft_chain
from specdec_lab.drafting.protocol import Drafter, Row, Tree
from specdec_lab.drafting.tree import draft_tree, known_branching
from specdec_lab.errors import require
from specdec_lab.models.cache import KVCache
from specdec_lab.models.feed import feed
from specdec_lab.models.protocol import Model


class DraftModel(Drafter):
    """Drafts token by token, under the same processors as the main model; for several candidates, level by level.

    Sampling draws each token from q, the draft's distribution after every processor; greedy takes the arg-max,
    whose q is one-hot. The cache holds a prefix of the committed tokens after every step. See draft_chain and
    draft_tree.
    """

    model: Model
    branches = True

    def __init__(
        self, model: Model, vocab_size: int | None = None, branching: str = "dynamic", confidence: float = 0.0
    ) -> None:
        """vocab_size: the main model's, where padding makes it differ from the draft's."""
        require("confidence", confidence, isinstance(confidence, Real) and 0 <= confidence < 1, "0 (off) … 1")
        self.branching, self.confidence = known_branching(branching), confidence
        self.model, self.name = model, model.name
        self.vocab_size = vocab_size or model.vocab_size
        self.context_length = model.context_length
        self.cache: KVCache | None = None
        self._before: list[int] = []  # committed tokens of each row when its draft began
        self._chain = True  # whether the cache holds the drafted tokens in the order of their nodes

    def start(self, rows: Sequence[Row], max_len: int, hidden: Sequence[Tensor] = ()) -> None:
        """Prefill all but the last token of each row that fits the draft's context."""
        self.cache = None  # let go of the old one first
        self.cache = self.model.new_cache(len(rows), max_len)
        feed(self.model, self.cache, [self._known(row.tokens[: self.model.context_length][:-1]) for row in rows])

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        """Draft up to lengths[r] tokens for each row, of each of its candidates."""
        self._before = [len(row.tokens) for row in rows]
        if max(lengths) == 0:
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
        self._chain = not rows[0].tree
        if not self._chain:
            return draft_tree(
                self.branching, self.model, rows, lengths, self.vocab_size, hidden, self._read, self.confidence
            )

        def follow(tokens: Tensor, i: int) -> Tensor:
            hidden = self.model.forward(tokens[:, None].clamp(max=self.model.vocab_size - 1), cache)[:, 0]
            cache.advance([int(i + 1 < length) for length in lengths])  # the others' is scratch
            return hidden

        return draft_chain(self.model, rows, lengths, self.vocab_size, hidden, follow, self.confidence)

    def _read(self, tokens: Tensor, before: Tensor, parents: Tensor, behind: int) -> Tensor:
        """One forward over drafted tokens [rows, m]; see draft_tree."""
        assert self.cache is not None
        return self.model.forward(tokens.clamp(max=self.model.vocab_size - 1), self.cache, parents, behind)

    def observe(self, rows: Sequence[Row], paths: Sequence[Sequence[int] | None], hidden: Tensor) -> None:
        """Roll the cache back to the committed prefix; the last drafted token was never written.

        Of a tree nothing was kept beyond its root, and to draft again the root is read again.
        """
        assert self.cache is not None
        kept = []
        for before, path in zip(self._before, paths, strict=True):
            kept.append(before - 1 if path is None else before + (len(path) if self._chain else 0))
        self.cache.rollback([min(pair) for pair in zip(self.cache.lengths, kept, strict=True)])

    def drop(self, row: int) -> None:
        """Row `row` has finished; the last row takes its index."""
        assert self.cache is not None
        self.cache.drop(row)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens to feed: a padding id that the draft has no embedding for becomes its last one."""
        return [min(token, self.model.vocab_size - 1) for token in tokens]
