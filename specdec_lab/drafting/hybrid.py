"""Two drafters in one: prompt lookup where the text repeats itself, a model's draft everywhere else."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_lab.drafting.ngram import Match, NGram
from specdec_lab.drafting.protocol import Drafter, Row, Tree
from specdec_lab.errors import require

# How often a tried token stays, before anything is known of a text: by the length of its match (1, 2, 3 …, the last
# for all longer ones) as found in 512 replies of the bundled main model, greedy and sampled; and for a model's draft.
FREE_PRIOR = (0.4, 0.65, 0.78, 0.78, 0.78, 0.78, 0.78, 0.93)
MODEL_PRIOR = 0.6
WEIGHT = 6  # tried tokens that a prior counts for


@dataclass
class Survival:
    """The chance that a tried token stays: a Beta prior, counted on by what became of each draft."""

    prior: float
    stayed: int = 0
    tried: int = 0

    def add(self, stayed: int, tried: int) -> None:
        """Count one draft."""
        self.stayed += stayed
        self.tried += tried

    def expected(self, length: int) -> float:
        """How many of `length` tokens in a chain are expected to stay (2211.17192, its α taken as equal for all)."""
        alpha = (WEIGHT * self.prior + self.stayed) / (WEIGHT + self.tried)
        return sum(alpha**i for i in range(1, length + 1))


@dataclass
class _Known:
    """What has been learned of one row, and what its next tree hangs on. Rows do not learn from each other."""

    free: dict[int, Survival] = field(default_factory=dict)  # by length of match
    model: Survival = field(default_factory=lambda: Survival(MODEL_PRIOR))
    depth: int = 0  # levels of the deepest tree the model has drafted
    match: Match = Match(0, ())
    before: int = 0  # committed tokens when the draft began
    parents: tuple[int, ...] = ()  # of the nodes the model has drafted; none where the free draft was taken

    def free_survival(self) -> Survival:
        n = self.match.length
        return self.free.setdefault(n, Survival(FREE_PRIOR[min(n, len(FREE_PRIOR)) - 1]))


class Hybrid(Drafter):
    """Takes, for each row and step, whichever draft promises more tokens for its time.

    free: costs nothing; its survival is learned by match length, and from every step, as what was committed shows
    whether its draft would have stayed. model: any other drafter; it drafts nothing for the rows that take the free
    draft, and hears what those have accepted all the same. step_cost: time of one token of the model's draft, in
    units of a main step over one token; a fixed number, so that a choice never hangs on a clock.
    The choice is made on committed tokens alone, before anything is drawn, so that every q stays what it was.
    """

    def __init__(self, free: NGram, model: Drafter, step_cost: float = 0.03) -> None:
        require("step_cost", step_cost, 0 <= step_cost <= 10, "0 … 10")
        self.free, self.partner, self.step_cost = free, model, step_cost
        self.model = model.model
        self.name = f"{free.name}+{model.name}"
        self.reads_hidden, self.branches, self.branching = model.reads_hidden, model.branches, model.branching
        self._known: list[_Known] = []  # of each row

    @property
    def nbytes(self) -> int:
        """Bytes of weights it adds to the main model's."""
        return self.partner.nbytes

    @property
    def cache_nbytes(self) -> int:
        """Bytes of its KV cache."""
        return self.partner.cache_nbytes

    def start(self, rows: Sequence[Row], max_len: int, hidden: Sequence[Tensor] = ()) -> None:
        """New sequences; what was learned of the old ones is forgotten."""
        self.free.start(rows, max_len, hidden)
        self.partner.start(rows, max_len, hidden)
        self._known = [_Known() for _ in rows]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        """Draft up to lengths[r] tokens for each row; beyond the model's context, the free ones alone."""
        assert len(self._known) == len(rows), "start() comes first"
        asked = []
        for row, known, match, length in zip(rows, self._known, self.free.matches(rows, lengths), lengths, strict=True):
            limit = self.partner.context_length
            room = length if limit is None else max(0, min(length, limit - len(row.tokens)))
            known.match, known.before = match, len(row.tokens)
            asked.append(0 if self._prefers_free(known, room) else room)
        tree = self.partner.propose(rows, asked)
        for known, parents in zip(self._known, tree.parents.tolist(), strict=True):
            known.parents = tuple(parent for parent in parents if parent >= -1)
            known.depth = max(known.depth, _depth(known.parents))
        return _merge(tree, [() if known.parents else known.match.draft for known in self._known])

    def _prefers_free(self, known: _Known, room: int) -> bool:
        """Whether the free draft promises more tokens a main step than a draft of up to `room` from the model."""
        if not known.match.draft:
            return False
        free = 1 + known.free_survival().expected(len(known.match.draft))
        levels = min(room, known.depth or room)
        return free >= (1 + known.model.expected(levels)) / (1 + self.step_cost * levels)

    def observe(self, rows: Sequence[Row], paths: Sequence[Sequence[int] | None], hidden: Tensor) -> None:
        """Learn how far each draft got, and pass on to the model what was committed."""
        for row, known, path in zip(rows, self._known, paths, strict=True):
            if path is None:  # nothing follows yet
                continue
            if known.match.draft:
                known.free_survival().add(*_agreement(known.match.draft, row.tokens[known.before :]))
            if known.parents:
                at = path[-1] if path else -1
                known.model.add(len(path), len(path) + (at in known.parents))  # a child of `at` was tried in vain
        self.partner.observe(rows, paths, hidden)

    def drop(self, row: int) -> None:
        """Row `row` has finished; the last row takes its index."""
        self.free.drop(row)
        self.partner.drop(row)
        self._known[row] = self._known[-1]
        self._known.pop()


def _agreement(draft: Sequence[int], committed: Sequence[int]) -> tuple[int, int]:
    """(tokens of the draft that stood or would have stood, tokens that were or would have been tried)."""
    for i, (ours, theirs) in enumerate(zip(draft, committed, strict=False)):
        if ours != theirs:
            return i, i + 1
    known = min(len(draft), len(committed))
    return known, known


def _depth(parents: Sequence[int]) -> int:
    """Levels of a tree."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 + (levels[parent] if parent >= 0 else 0))
    return max(levels, default=0)


def _merge(tree: Tree, drafts: Sequence[Sequence[int]]) -> Tree:
    """The tree with a chain of its own in each row that has a draft; a row has one or the other.

    Where the tree's tokens were drawn, the tokens of a draft have one-hot q.
    """
    n = max(tree.size, max(map(len, drafts)))
    rows, device = len(drafts), tree.tokens.device
    tokens = torch.zeros(rows, n, dtype=torch.long, device=device)
    parents = torch.full((rows, n), -2, device=device)
    tokens[:, : tree.size], parents[:, : tree.size] = tree.tokens, tree.parents
    q = None if tree.q is None else tree.q.new_zeros(rows, n, tree.q.shape[-1])  # [rows, n, vocab]
    if q is not None and tree.q is not None:
        q[:, : tree.size] = tree.q
    for row, draft in enumerate(drafts):
        if draft:
            ids = torch.tensor(draft, device=device)
            tokens[row, : len(ids)], parents[row, : len(ids)] = ids, torch.arange(-1, len(ids) - 1, device=device)
            if q is not None:
                q[row] = 0
                q[row, torch.arange(len(ids), device=device), ids] = 1
    return Tree(tokens, parents, q)
