"""Drafts that read the main model's hidden states: one small model, fed by what the main model knows already."""

import math
from collections.abc import Sequence
from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.drafting.chain import draft_chain
from specdec_lab.drafting.protocol import Drafter, Row, Tree
from specdec_lab.errors import require, whole
from specdec_lab.models.cache import KVCache
from specdec_lab.models.feed import CHUNK
from specdec_lab.models.llama import FeatureModel

MAX_LEVELS = 64  # of a tree
DEPTH_COST = 1e-4  # taken off the log-probability at each level, at any scale: no child ties with its parent


class FeatureDraft(Drafter):
    """Drafts from (token, main model's hidden state before it); see models.llama.FeatureModel.

    Each entry stands for the hidden state after its token. Entries of committed tokens are made of the main model's
    own states; a drafted token takes the draft's output instead (EAGLE, 2401.15077), or, where the model has
    placeholders, all of them are read from one forward (P-EAGLE, 2602.01469). The cache holds the entries of
    committed tokens only.

    branches: 1 drafts a chain, drawn from q when sampling; more grow a tree level by level, keeping the `branches`
    most probable nodes of each, and propose its most probable part (EAGLE-2, 2406.16858). Those candidates are not
    drawn, so their q is one-hot. confidence: of a chain, see draft_chain; of a tree, the least probability of a node.
    """

    reads_hidden = True
    model: FeatureModel

    def __init__(self, model: FeatureModel, vocab_size: int, branches: int = 1, confidence: float = 0.0) -> None:
        require("branches", branches, whole(branches) and 1 <= branches <= 16, "1 … 16")
        require("branches", branches, branches == 1 or model.placeholders is None, "1 for a draft of one forward")
        require("confidence", confidence, isinstance(confidence, Real) and 0 <= confidence < 1, "0 (off) … 1")
        self.model, self.name, self.vocab_size = model, model.name, vocab_size
        self.branches, self.confidence = branches, confidence
        self.context_length = model.context_length
        self.cache: KVCache | None = None
        self._pending: list[Tensor] = []  # per row the hidden states [m, hidden_size] before its last m tokens

    def start(self, rows: Sequence[Row], max_len: int, hidden: Sequence[Tensor] = ()) -> None:
        """Prefill the entries of all prompt tokens but the last."""
        self.cache = None  # let go of the old one first
        self.cache = self.model.new_cache(len(rows), max_len + MAX_LEVELS * self.branches)
        self._pending = list(hidden)
        while max(len(states) for states in self._pending) > 1:
            self._read(rows, [min(CHUNK, max(0, len(states) - 1)) for states in self._pending])

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        """Draft up to lengths[r] tokens for each row; none for a row without any hidden state yet."""
        lengths = [length if len(states) else 0 for length, states in zip(lengths, self._pending, strict=True)]
        if max(lengths) == 0:
            return super().propose(rows, lengths)
        if self.branches > 1:
            return self._tree(rows, self._catch_up(rows, 0)[:, 0], lengths)
        ahead = 0 if self.model.placeholders is None else min(max(lengths) - 1, len(self.model.placeholders))
        return self._chain(rows, self._catch_up(rows, ahead), lengths)

    def observe(self, rows: Sequence[Row], paths: Sequence[Sequence[int]], hidden: Tensor) -> None:
        """Keep the main model's states of the root and the accepted nodes, each of which has a token behind it."""
        for index, path in enumerate(paths):
            new = hidden[index, [0, *(node + 1 for node in path)]]
            old = self._pending[index]
            self._pending[index] = torch.cat([old, new]) if len(old) else new

    def drop(self, row: int) -> None:
        """Row `row` has finished; the last row takes its index."""
        assert self.cache is not None
        self.cache.drop(row)
        self._pending[row] = self._pending[-1]
        self._pending.pop()

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
            state = self._step(tokens[:, None], state[:, None])[:, 0]
            cache.advance([1] * len(rows))
            return state

        if self.model.placeholders is not None:
            lengths = [min(length, hidden.shape[1]) for length in lengths]
        tree = draft_chain(self.model, rows, lengths, self.vocab_size, state, follow, self.confidence)
        cache.rollback(committed)
        return tree

    def _step(self, tokens: Tensor, states: Tensor, parents: Tensor | None = None, behind: int = 0) -> Tensor:
        """One forward over drafted tokens [rows, n] and the states [rows, n, hidden_size] before them."""
        assert self.cache is not None
        return self.model.run(self.model.inputs(tokens, states), self.cache, parents, behind)

    def _tree(self, rows: Sequence[Row], state: Tensor, lengths: Sequence[int]) -> Tree:
        """Grow levels of `branches` nodes for as long as one of them could be among the most probable.

        state: [rows, hidden_size], which the root's children follow from. Nodes are numbered as they are found.
        """
        k, most = self.branches, max(lengths)
        floor = math.log(self.confidence) if self.confidence else -math.inf
        tokens: list[Tensor] = []  # of the nodes found, level by level [rows, m]
        parents, scores = list(tokens), list(tokens)
        at = torch.full((len(rows), 1), -1, device=state.device)  # the nodes being read: their numbers,
        hidden, reach = state[:, None], torch.zeros(at.shape, device=state.device)  # states, log-probabilities
        paths: list[list[list[int]]] = [[[]] for _ in rows]  # and tokens from the root
        fed = at[:, :0]  # parents of the nodes in the cache, [rows, behind]
        for level in range(min(most, MAX_LEVELS)):
            score, token = self._top(rows, hidden, paths)  # [rows, nodes read, k]
            score = reach[..., None] * (1 + DEPTH_COST) + score - DEPTH_COST
            first = sum(part.shape[1] for part in tokens)
            tokens.append(token.flatten(1))
            scores.append(score.flatten(1))
            parents.append(at.repeat_interleave(k, 1))
            best = scores[-1].topk(k)
            ranked = torch.cat(scores, 1).sort(-1, descending=True).values
            enough = ranked[:, min(most, ranked.shape[1]) - 1] if ranked.shape[1] >= most else best.values[:, -1]
            if level + 1 == most or not (best.values[:, 0] > enough.clamp(min=floor)).any():
                break
            source, behind = best.indices // k, fed.shape[1]
            fed = torch.cat([fed, torch.where(at.gather(1, source) < 0, -1, behind - k + source)], 1)
            ids = tokens[-1].gather(1, best.indices)
            before = hidden.gather(1, source[..., None].expand(-1, -1, hidden.shape[-1]))
            hidden = self._step(ids, before, fed, behind)
            paths = [
                [[*path[s], t] for s, t in zip(sources, new, strict=True)]
                for path, sources, new in zip(paths, source.tolist(), ids.tolist(), strict=True)
            ]
            at, reach = first + best.indices, best.values
        return _most_probable(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), lengths, floor)

    def _top(self, rows: Sequence[Row], hidden: Tensor, paths: Sequence[Sequence[list[int]]]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids [rows, nodes, branches] of the most probable children; hidden: [rows, nodes, …]."""
        logits = self.model.logits(hidden).clone()  # what comes of a forward must not be written to
        vocabulary = self.model.vocabulary
        for row, scores, known in zip(rows, logits, paths, strict=True):
            if row.constraint:
                allowed = torch.stack([row.constraint.allowed(path) for path in known])  # [nodes, vocab]
                scores.masked_fill_(~(allowed if vocabulary is None else allowed[:, vocabulary]), -math.inf)
        found, index = (logits / (rows[0].sampling.temperature or 1.0)).log_softmax(-1).topk(self.branches)
        return found.nan_to_num(-math.inf), index if vocabulary is None else vocabulary[index]


def _most_probable(tokens: Tensor, parents: Tensor, scores: Tensor, lengths: Sequence[int], floor: float) -> Tree:
    """The lengths[r] most probable nodes of each row, none below `floor`, in the order they were found."""
    n = min(max(lengths), tokens.shape[1])
    best = scores.topk(n)
    rank = torch.arange(n, device=tokens.device)
    kept = (rank < torch.tensor(lengths, device=tokens.device)[:, None]) & (best.values > max(floor, -1e30))
    absent = tokens.shape[1]  # sorts behind every node
    number = torch.where(kept, best.indices, absent).sort(-1).values  # [rows, n]
    there = number < absent
    index = number.clamp(max=absent - 1)
    place = torch.full((len(tokens), absent + 1), -1, device=tokens.device)  # of each node in the tree
    place.scatter_(1, torch.where(there, number, absent), rank.expand_as(number))
    parent = parents.gather(1, index)
    inside = torch.where(parent < 0, -1, place.gather(1, parent.clamp(min=0)))
    used = int(there.sum(1).max())
    return Tree(tokens.gather(1, index)[:, :used], torch.where(there, inside, -2)[:, :used], None)
