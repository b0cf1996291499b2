"""Token trees from a draft model: where they branch; one draft forward per level, not per candidate.

Ways to branch, for K candidates:

* `dynamic`: the most probable nodes. K nodes of each level are read on, and the draft length bounds all nodes
  together (EAGLE-2, 2406.16858). Nothing is drawn, so q is one-hot.
* `top_k`: the K most probable first tokens, each going on by arg-max; one-hot.
* `chains`: K chains drawn independently (2305.09781). What is drawn twice is tried twice, but its continuations hang
  under the first of the two.
* `distinct`: K different first tokens drawn without replacement, each from what the ones before left of q
  (2402.12374), each going on as a chain.

`chains` and `distinct` are `top_k` when drafts are greedy; the draft length is that of each of their chains.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_lab.drafting.chain import draft_scores
from specdec_lab.drafting.protocol import Row, Tree
from specdec_lab.errors import UnknownNameError
from specdec_lab.models.protocol import Model
from specdec_lab.sampling import distribution, draw

BRANCHINGS = ("dynamic", "top_k", "chains", "distinct")
DRAWN = ("chains", "distinct")
DEPTH_COST = 1e-4  # taken off the log-probability at each level, at any scale: no child ties with its parent
# (tokens [rows, m], the hidden states before them [rows, m, hidden_size], parents [rows, behind + m] of all drafted
# tokens that are then in the draft's cache, `behind` of which are there already) -> the hidden states behind them
Read = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def known_branching(name: str) -> str:
    """The name itself; raises UnknownNameError for one that does not exist."""
    if name not in BRANCHINGS:
        raise UnknownNameError("branching", name, BRANCHINGS)
    return name


def draft_tree(
    branching: str,
    model: Model,
    rows: Sequence[Row],
    lengths: Sequence[int],
    vocab_size: int,
    state: Tensor,
    read: Read,
    confidence: float = 0.0,
) -> Tree:
    """A tree of row.candidates candidates for each row, grown as the head of this file says.

    state: the draft's hidden state [rows, hidden_size] behind the root. confidence: the least probability of a node
    of a dynamic tree; another candidate ends before the product of the draft's largest probabilities on its way
    falls below it, which the token about to be drawn has no say in.
    """
    grow = _Dynamic if branching == "dynamic" else _Chains
    return grow(model, rows, lengths, vocab_size, branching, confidence).tree(state, read)


class _Growth:
    """What both kinds of growth share: the rows, their widths and the scores of nodes."""

    def __init__(
        self,
        model: Model,
        rows: Sequence[Row],
        lengths: Sequence[int],
        vocab_size: int,
        branching: str,
        confidence: float,
    ) -> None:
        self.model, self.rows, self.vocab_size, self.confidence = model, rows, vocab_size, confidence
        self.sampling, self.branching = rows[0].sampling, branching
        self.width = max(row.candidates for row in rows)
        self.levels = max(lengths)
        self.device = model.device
        self.lengths = torch.tensor(lengths, device=self.device)
        self.counts = torch.tensor([row.candidates for row in rows], device=self.device)
        self.eos = torch.tensor(sorted(rows[0].eos), dtype=torch.long, device=self.device)

    def scores(self, hidden: Tensor, paths: Tensor) -> Tensor:
        """Scores [rows, m, vocab] behind nodes with states [rows, m, hidden_size] and paths [rows, m, depth]."""
        m, depth = paths.shape[1:]
        each = [row for row in self.rows for _ in range(m)]
        room = [length for length in self.lengths.tolist() for _ in range(m)]
        flat = draft_scores(
            self.model, hidden.flatten(0, 1), each, paths.reshape(len(each), depth), room, self.vocab_size
        )
        return flat.view(len(self.rows), m, self.vocab_size)


class _Chains(_Growth):
    """K chains side by side: node level · K + j is the token of chain j at that level."""

    def tree(self, state: Tensor, read: Read) -> Tree:
        rows, k = len(self.rows), self.width
        drawn = self.branching != "top_k" and not self.sampling.greedy
        u = self._uniforms() if drawn else None  # [rows, levels, k]
        hidden = state[:, None]
        paths = torch.zeros(rows, k, 0, dtype=torch.long, device=self.device)
        alive = (torch.arange(k, device=self.device) < self.counts[:, None]) & (self.lengths > 0)[:, None]
        sure = torch.ones(rows, k, device=self.device)
        above = torch.full((rows, k), -1, device=self.device)  # the node that each chain hangs on
        tokens, parents, kept, q = [], [], [], []
        for level in range(self.levels):
            scores = self.scores(hidden, paths[:, : hidden.shape[1]])  # [rows, 1 or k, vocab]
            own = distribution(scores, self.sampling) if drawn else None
            sure = sure * (scores.softmax(-1) if own is None else own).amax(-1)
            alive = alive & (level < self.lengths)[:, None] & (sure >= self.confidence)
            at = None if u is None else u[:, level]
            token, proposed, there = self._first(scores, own, at) if level == 0 else self._next(scores, own, at)
            alive = alive & there
            if not alive.any():
                break
            tokens.append(token)
            parents.append(above)
            kept.append(alive)
            if proposed is not None:
                q.append(proposed)
            above = level * k + self._first_alike(above, token, alive)
            paths = torch.cat([paths, token[..., None]], -1)
            alive = alive & ~torch.isin(token, self.eos)
            if level + 1 < self.levels and alive.any():
                before = hidden.expand(rows, k, -1)
                hidden = read(token, before, self._fed(level), level * k)
            elif not alive.any():
                break
        if not tokens:
            empty = torch.zeros(rows, 0, dtype=torch.long, device=self.device)
            return Tree(empty, empty, None)
        return compact(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(kept, 1), torch.cat(q, 1) if q else None)

    def _uniforms(self) -> Tensor:
        """[rows, levels, k]; each row draws as many as it has tokens to draw, whatever the others need."""
        u = torch.zeros(len(self.rows), self.levels, self.width)
        for index, (row, length) in enumerate(zip(self.rows, self.lengths.tolist(), strict=True)):
            u[index, :length, : row.candidates] = torch.rand(length, row.candidates, generator=row.generator)
        return u.to(self.device)

    def _first(self, scores: Tensor, own: Tensor | None, u: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """First tokens [rows, k], the q of each [rows, k, vocab], and whether there is one."""
        k = self.width
        if own is None or u is None:
            best = scores[:, 0].topk(k)
            return best.indices, None, best.values > -math.inf
        left, tokens, q, there = own[:, 0], [], [], []
        for j in range(k):
            mass = left.sum(-1, keepdim=True)
            there.append(mass[:, 0] > 0)
            q.append(torch.where(mass > 0, left / mass, own[:, 0]))
            tokens.append(draw(q[-1], u[:, j]))
            if self.branching == "distinct":
                left = left.scatter(1, tokens[-1][:, None], 0.0)
        return torch.stack(tokens, 1), torch.stack(q, 1), torch.stack(there, 1)

    def _next(self, scores: Tensor, own: Tensor | None, u: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """The next token of each chain, as _first."""
        everywhere = torch.ones(scores.shape[:2], dtype=torch.bool, device=self.device)
        if own is None or u is None:
            return scores.argmax(-1), None, everywhere
        return draw(own.flatten(0, 1), u.flatten()).view(u.shape), own, everywhere

    def _first_alike(self, above: Tensor, token: Tensor, alive: Tensor) -> Tensor:
        """For each chain the first one with the same path [rows, k]."""
        same = (above[:, :, None] == above[:, None]) & (token[:, :, None] == token[:, None]) & alive[:, None]
        return same.to(torch.uint8).argmax(-1)

    def _fed(self, level: int) -> Tensor:
        """Parents, among the fed tokens, of levels 0 … level."""
        k = self.width
        return (torch.arange((level + 1) * k, device=self.device) - k).clamp(min=-1).expand(len(self.rows), -1)


class _Dynamic(_Growth):
    """Levels of K nodes, for as long as one of them could be among the most probable."""

    def tree(self, state: Tensor, read: Read) -> Tree:
        k, most, rows = self.width, self.levels, len(self.rows)
        floor = math.log(self.confidence) if self.confidence else -math.inf
        narrow = torch.arange(k, device=self.device) >= self.counts[:, None]  # [rows, k] beyond a row's candidates
        tokens: list[Tensor] = []  # of the nodes found, level by level [rows, m]; numbered so
        parents, scores = list(tokens), list(tokens)
        at = torch.full((rows, 1), -1, device=self.device)  # the nodes being read: their numbers,
        hidden, reach = state[:, None], torch.zeros(at.shape, device=self.device)  # states, log-probabilities
        paths = torch.zeros(rows, 1, 0, dtype=torch.long, device=self.device)  # and tokens from the root
        fed = at[:, :0]  # parents of the nodes in the cache, [rows, behind]
        for level in range(most):
            score, token = self._top(hidden, paths)  # [rows, nodes read, k]
            score = reach[..., None] * (1 + DEPTH_COST) + score - DEPTH_COST
            score = score.masked_fill(narrow[:, None], -math.inf)
            first = sum(part.shape[1] for part in tokens)
            tokens.append(token.flatten(1))
            scores.append(score.flatten(1))
            parents.append(at.repeat_interleave(k, 1))
            best = scores[-1].topk(k)
            ranked = torch.cat(scores, 1).sort(-1, descending=True).values
            enough = ranked[:, most - 1] if ranked.shape[1] >= most else torch.full_like(ranked[:, 0], -math.inf)
            if level + 1 == most or not (best.values[:, 0] > enough.clamp(min=floor)).any():
                break
            source, behind = best.indices // k, fed.shape[1]
            fed = torch.cat([fed, torch.where(at.gather(1, source) < 0, -1, behind - k + source)], 1)
            ids = tokens[-1].gather(1, best.indices)
            before = hidden.gather(1, source[..., None].expand(-1, -1, hidden.shape[-1]))
            hidden = read(ids, before, fed, behind)
            way = paths.gather(1, source[..., None].expand(-1, -1, paths.shape[-1]))
            paths = torch.cat([way, ids[..., None]], -1)
            at, reach = first + best.indices, best.values.masked_fill(narrow | torch.isin(ids, self.eos), -math.inf)
        return self._most_probable(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), floor)

    def _top(self, hidden: Tensor, paths: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids [rows, nodes, k] of the most probable children; hidden: [rows, nodes, …]."""
        vocabulary = getattr(self.model, "vocabulary", None)
        if self.sampling.repetition_penalty != 1 or any(row.constraint for row in self.rows):
            logits, vocabulary = self.scores(hidden, paths), None
        else:  # a trimmed head stays as it is
            logits = self.model.logits(hidden)[..., : self.vocab_size]
        found, index = (logits / (self.sampling.temperature or 1.0)).log_softmax(-1).topk(self.width)
        return found.nan_to_num(-math.inf), index if vocabulary is None else vocabulary[index]

    def _most_probable(self, tokens: Tensor, parents: Tensor, scores: Tensor, floor: float) -> Tree:
        """The lengths[r] most probable nodes of each row, none below `floor`."""
        best = scores.topk(min(self.levels, tokens.shape[1]))
        rank = torch.arange(best.values.shape[1], device=self.device)
        inside = (rank < self.lengths[:, None]) & (best.values > max(floor, -1e30))
        kept = torch.zeros(tokens.shape, dtype=torch.bool, device=self.device).scatter(1, best.indices, inside)
        return compact(tokens, parents, kept, None)


def compact(tokens: Tensor, parents: Tensor, kept: Tensor, q: Tensor | None) -> Tree:
    """The kept nodes of each row in their order, padding behind them; each kept node's parent is kept, too.

    tokens, parents, kept: [rows, n]; q: [rows, n, vocab] or None.
    """
    place = kept.cumsum(1) - 1  # of each kept node in its row
    order = torch.argsort((~kept).to(torch.uint8), dim=1, stable=True)[:, : int(kept.sum(1).max())]
    there = kept.gather(1, order)
    above = parents.gather(1, order)
    inside = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))
    if q is not None:
        q = q.gather(1, order[..., None].expand(-1, -1, q.shape[-1]))
    return Tree(tokens.gather(1, order), torch.where(there, inside, -2), q)
