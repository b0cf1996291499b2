"""What a drafter is: it proposes a token tree and hears what was accepted. It never decides what stays."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_lab.constrain import Constraint
from specdec_lab.models.cache import KVCache
from specdec_lab.models.protocol import Model
from specdec_lab.sampling import Sampling


@dataclass
class Row:
    """What a drafter sees of one sequence."""

    tokens: list[int]  # prompt and committed tokens; the last one is the root of the next tree
    sampling: Sampling  # how drafts are drawn
    generator: torch.Generator
    # by keyword: subclasses have fields behind them
    eos: frozenset[int] = field(default=frozenset(), kw_only=True)  # nothing needs drafting behind these
    candidates: int = field(default=1, kw_only=True)  # how many the next tree is to hold
    tree: bool = field(default=False, kw_only=True)  # whether there may be several, now or later
    # a drafter that draws masks q by it, too; None = anything may follow
    constraint: Constraint | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Tree:
    """Drafted tokens of `rows` sequences, up to n nodes each, in topological order, padding last."""

    tokens: Tensor  # long [rows, n]
    parents: Tensor  # long [rows, n]; -1 = the root (the last committed token), -2 = padding
    q: Tensor | None  # float [rows, n, vocab], fixed before each draw; None = one-hot, nothing was drawn

    def to(self, device: torch.device) -> "Tree":
        """The same tree on another device."""
        q = None if self.q is None else self.q.to(device)
        return Tree(self.tokens.to(device), self.parents.to(device), q)

    @property
    def size(self) -> int:
        """n, the most nodes of a row."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """Whether no row branches; padding, which comes last, may stand behind a shorter chain."""
        chain = torch.arange(-1, self.size - 1, device=self.parents.device)
        return bool(((self.parents == chain) | (self.parents == -2)).all())


def chains(tokens: Tensor, lengths: Sequence[int], q: Tensor | None = None) -> Tree:
    """A tree of unbranched rows: tokens long [rows, n], of which row r uses the first lengths[r]."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    used = index < torch.tensor(lengths, device=tokens.device)[:, None]
    return Tree(tokens, torch.where(used, index - 1, -2), q)


class Drafter:
    """Base of all drafters. One that keeps no state overrides `propose` alone."""

    name = "none"
    context_length: int | None = None  # most tokens it can look at; None = any number
    model: Model | None = None  # the model it drafts with, if any
    cache: KVCache | None = None  # of that model
    reads_hidden = False  # whether start and observe need the main model's hidden states
    branches = False  # whether its trees can hold more than one candidate
    branching = "dynamic"  # how they part; see drafting.tree

    @property
    def nbytes(self) -> int:
        """Bytes of weights it adds to the main model's."""
        return self.model.nbytes if self.model else 0

    @property
    def cache_nbytes(self) -> int:
        """Bytes of its KV cache."""
        return self.cache.nbytes if self.cache else 0

    def nodes(self, length: int, candidates: int) -> int:
        """Most nodes of a tree; `length` bounds each candidate, but all of them together where that is dynamic."""
        return length if self.branching == "dynamic" else length * candidates

    def start(self, rows: Sequence[Row], max_len: int, hidden: Sequence[Tensor] = ()) -> None:
        """New sequences of up to max_len tokens each; forget the old ones.

        hidden[r]: the main model's final hidden states [len(tokens) - 1, hidden_size] of all tokens but the last,
        for a drafter that reads them.
        """

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        """Draft up to lengths[r] tokens for each row. Here: nothing, which makes decoding autoregressive."""
        return chains(torch.zeros(len(rows), 0, dtype=torch.long), [0] * len(rows))

    def observe(self, rows: Sequence[Row], paths: Sequence[Sequence[int] | None], hidden: Tensor) -> None:
        """Hear which drafted nodes of each row stayed, from the root down; None: nothing follows, draft again.

        `rows[r].tokens` holds them and the token after them, but for a row that has just ended: its tokens are cut.
        hidden: the main model's final hidden states [rows, 1 + n, hidden_size] of the root and every node.
        """

    def drop(self, row: int) -> None:
        """Row `row` has finished; the last row takes its index."""
