"""Drafts that read the main model's hidden states: one small model, fed by what the main model knows already."""

from collections.abc import Sequence
from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.drafting.chain import draft_chain
from specdec_lab.drafting.protocol import Drafter, Row, Tree
from specdec_lab.drafting.tree import draft_tree, known_branching
from specdec_lab.errors import require
from specdec_lab.models.cache import KVCache
from specdec_lab.models.feed import CHUNK
from specdec_lab.models.llama import FeatureModel


class FeatureDraft(Drafter):
    """Drafts from (token, main model's hidden state before it); see models.llama.FeatureModel.

    Each entry stands for the hidden state after its token. Entries of committed tokens are made of the main model's
    own states; a drafted token takes the draft's output instead (EAGLE, 2401.15077), or, where the model has
    placeholders, all of them are read from one forward (P-EAGLE, 2602.01469). The cache holds the entries of
    committed tokens only.

    For several candidates it drafts level by level, unless it has placeholders. See draft_chain and draft_tree.
    """

    reads_hidden = True
    model: FeatureModel

    def __init__(
        self, model: FeatureModel, vocab_size: int, branching: str = "dynamic", confidence: float = 0.0
    ) -> None:
        require("confidence", confidence, isinstance(confidence, Real) and 0 <= confidence < 1, "0 (off) … 1")
        self.model, self.name, self.vocab_size = model, model.name, vocab_size
        self.branching, self.confidence = known_branching(branching), confidence
        self.branches = model.placeholders is None
        self.context_length = model.context_length
        self.cache: KVCache | None = None
        self._pending: list[Tensor] = []  # per row the hidden states [m, hidden_size] before its last m tokens
        self._root: list[Tensor] = []  # per row the last of them that was read, [1, hidden_size]

    def start(self, rows: Sequence[Row], max_len: int, hidden: Sequence[Tensor] = ()) -> None:
        """Prefill the entries of all prompt tokens but the last."""
        self.cache = None  # let go of the old one first
        self.cache = self.model.new_cache(len(rows), max_len)
        self._pending = list(hidden)
        self._root = [states[-1:] for states in hidden]
        while max(len(states) for states in self._pending) > 1:
            self._read(rows, [min(CHUNK, max(0, len(states) - 1)) for states in self._pending])

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        """Draft up to lengths[r] tokens for each row, of each of its candidates; none before any hidden state."""
        lengths = [length if len(states) else 0 for length, states in zip(lengths, self._pending, strict=True)]
        if max(lengths) == 0:
            return super().propose(rows, lengths)
        self._root = [
            states[-1:] if len(states) else old for states, old in zip(self._pending, self._root, strict=True)
        ]
        if rows[0].tree:
            state, size = self._catch_up(rows, 0)[:, 0], self.vocab_size
            return draft_tree(self.branching, self.model, rows, lengths, size, state, self._step, self.confidence)
        ahead = 0 if self.model.placeholders is None else min(max(lengths) - 1, len(self.model.placeholders))
        return self._chain(rows, self._catch_up(rows, ahead), lengths)

    def observe(self, rows: Sequence[Row], paths: Sequence[Sequence[int] | None], hidden: Tensor) -> None:
        """Keep the main model's states of the root and the accepted nodes, each of which has a token behind it.

        To draft again, the entry of the root is read again.
        """
        assert self.cache is not None
        kept = list(self.cache.lengths)
        for index, path in enumerate(paths):
            old = self._pending[index]
            if path is not None:
                new = hidden[index, [0, *(node + 1 for node in path)]]
                self._pending[index] = torch.cat([old, new]) if len(old) else new
            elif len(old) == 0:
                self._pending[index] = self._root[index]
                kept[index] -= len(self._root[index])
        self.cache.rollback(kept)

    def drop(self, row: int) -> None:
        """Row `row` has finished; the last row takes its index."""
        assert self.cache is not None
        self.cache.drop(row)
        for states in (self._pending, self._root):
            states[row] = states[-1]
            states.pop()

    def _catch_up(self, rows: Sequence[Row], ahead: int) -> Tensor:
        """Read the entries of tokens committed since, and `ahead` placeholders behind them.

        Returns the hidden states [rows, 1 + ahead, hidden_size] of each row's last token and the placeholders.
        """
        assert self.cache is not None, "start() comes first"
        # a block takes as many slots of every row: beside a long row, one that is far behind catches up in parts
        room = max(1, min(CHUNK, self.cache.max_len - max(self.cache.lengths) - ahead))
        while max(map(len, self._pending)) > room:
            self._read(rows, [min(room, max(0, len(states) - room)) for states in self._pending])
        counts = [len(states) for states in self._pending]
        ends = torch.tensor([[max(n - 1, 0)] for n in counts]) + torch.arange(1 + ahead)  # [rows, 1 + ahead]
        hidden = self._read(rows, counts, ahead)
        return hidden[torch.arange(len(rows))[:, None], ends]

    def _read(self, rows: Sequence[Row], counts: Sequence[int], ahead: int = 0) -> Tensor:
        """One forward over the next counts[r] pending entries of each row, and `ahead` placeholders behind them."""
        assert self.cache is not None
        begins = [len(row.tokens) - len(states) for row, states in zip(rows, self._pending, strict=True)]
        tokens = [row.tokens[b : b + n] for row, b, n in zip(rows, begins, counts, strict=True)]
        x = self._inputs(tokens, [states[:n] for states, n in zip(self._pending, counts, strict=True)])
        if ahead:
            assert self.model.placeholders is not None
            x = F.pad(x, (0, 0, 0, ahead))
            index = torch.tensor(counts)[:, None] + torch.arange(ahead)  # [rows, ahead]
            x[torch.arange(len(rows))[:, None], index] = self.model.placeholders[:ahead]
        hidden = self.model.run(x, self.cache)
        self.cache.advance(counts)
        self._pending = [states[n:] for states, n in zip(self._pending, counts, strict=True)]
        return hidden

    def _inputs(self, tokens: Sequence[Sequence[int]], states: Sequence[Tensor]) -> Tensor:
        """Entries [rows, n, hidden_size], shorter rows padded behind."""
        width = max(map(len, tokens))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens], device=self.model.device)
        features = torch.zeros(*ids.shape, self.model.hidden_size, dtype=self.model.dtype, device=self.model.device)
        for row, known in enumerate(states):
            features[row, : len(known)] = known
        return self.model.inputs(ids, features)

    def _chain(self, rows: Sequence[Row], hidden: Tensor, lengths: Sequence[int]) -> Tree:
        """hidden [rows, m, hidden_size]: one state for each token to draft, or one for the first of them."""
        assert self.cache is not None
        cache, committed, state = self.cache, list(self.cache.lengths), hidden[:, 0]

        def follow(tokens: Tensor, i: int) -> Tensor:
            nonlocal state
            if self.model.placeholders is not None:
                return hidden[:, i + 1]
            state = self._step(tokens[:, None], state[:, None], None)[:, 0]
            cache.advance([1] * len(rows))
            return state

        if self.model.placeholders is not None:
            lengths = [min(length, hidden.shape[1]) for length in lengths]
        tree = draft_chain(self.model, rows, lengths, self.vocab_size, state, follow, self.confidence)
        cache.rollback(committed)
        return tree

    def _step(self, tokens: Tensor, states: Tensor, parents: Tensor | None, behind: int = 0) -> Tensor:
        """One forward over drafted tokens [rows, n] and the states [rows, n, hidden_size] before them."""
        assert self.cache is not None
        return self.model.run(self.model.inputs(tokens, states), self.cache, parents, behind)
