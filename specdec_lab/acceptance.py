"""Acceptance rules: which drafted tokens stay, and which token comes next.

p is the main model's distribution, q the one a drafted token was drawn from. A drafted token is *accepted* when
it stays. After a rejection the next token is *recovered* from the residual max(0, p - q); when every token on
the path stays it is a *bonus* token from p; without any draft it is *plain*. Rules see a whole batch of token
trees; a chain is a tree without branches. They know neither models nor caches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_lab.errors import UnknownNameError
from specdec_lab.sampling import draw


@dataclass(frozen=True)
class Verdict:
    """What a rule decided, for `rows` trees of up to n nodes."""

    accepted: Tensor  # bool [rows, n] nodes that stay; they form one path from the root
    tried: Tensor  # bool [rows, n] nodes that were put to the test
    last: Tensor  # long [rows] the deepest accepted node, -1 for none
    next_token: Tensor  # long [rows]
    residual: Tensor | None = None  # [rows, vocab] what next_token was drawn from (any scale); None when greedy


def greedy_match(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, u: Tensor) -> Verdict:
    """Keep the longest path that equals the main model's own arg-max choices.

    tokens, parents: long [rows, n] in topological order, parent -1 = root, -2 = padding. p: [rows, n + 1,
    vocab] scores or probabilities, p[:, 0] after the root, p[:, i + 1] after node i. q and u are not needed.
    """
    rows, n = tokens.shape
    choice = p.argmax(-1)  # [rows, n + 1]
    last = torch.full((rows,), -1, dtype=torch.long, device=tokens.device)
    accepted = torch.zeros(rows, n, dtype=torch.bool, device=tokens.device)
    tried = torch.zeros_like(accepted)
    row = torch.arange(rows, device=tokens.device)
    for i in range(n):
        tried[:, i] = parents[:, i] == last
        accepted[:, i] = tried[:, i] & (tokens[:, i] == choice[row, last + 1])
        last = torch.where(accepted[:, i], i, last)
    return Verdict(accepted, tried, last, choice[row, last + 1])


def speculative_sampling(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, u: Tensor) -> Verdict:
    """Keep x with probability min(1, p(x) / q(x)), else go on with the residual: what is emitted follows p.

    For a chain this is speculative sampling (2211.17192, 2302.01318); siblings drawn independently from the
    same q are tried in turn, each against the residual the one before left (2305.09781).
    tokens, parents, p: as in `greedy_match`, p being probabilities. q: [rows, n, vocab] the distribution each
    token was drawn from, fixed before the draw; None = one-hot, a token that was not drawn at random.
    u: [rows, n + 1] uniform numbers in [0, 1), the last of each row for the token after the path.
    """
    rows, n = tokens.shape
    last = torch.full((rows,), -1, dtype=torch.long, device=tokens.device)
    accepted = torch.zeros(rows, n, dtype=torch.bool, device=tokens.device)
    tried = torch.zeros_like(accepted)
    residual = p[:, 0]  # [rows, vocab] what the next token must follow, up to a factor, given the tests so far
    for i in range(n):
        token = tokens[:, i : i + 1]
        tried[:, i] = parents[:, i] == last
        target = residual.gather(1, token)[:, 0] / residual.sum(-1)
        proposed = torch.ones_like(target) if q is None else q[:, i].gather(1, token)[:, 0]
        accepted[:, i] = tried[:, i] & (u[:, i] * proposed < target)
        last = torch.where(accepted[:, i], i, last)
        residual = torch.where(accepted[:, i, None], p[:, i + 1], residual)
        rejected = tried[:, i] & ~accepted[:, i]
        if rejected.any():
            left = _subtract(residual, token, None if q is None else q[:, i])
            residual = torch.where(rejected[:, None], left, residual)
    return Verdict(accepted, tried, last, draw(residual, u[:, -1]), residual)


def _subtract(residual: Tensor, token: Tensor, q: Tensor | None) -> Tensor:
    """max(0, r - q) of the normalised residual r; for a one-hot q, r without the token.

    Where rounding leaves nothing of it (p equals q), r itself stands.
    """
    if q is None:
        left = residual.scatter(1, token, 0.0)
    else:
        left = (residual / residual.sum(-1, keepdim=True) - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, residual)


Rule = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Verdict]

RULES: dict[str, Rule] = {"greedy": greedy_match, "sampling": speculative_sampling}


def rule(name: str) -> Rule:
    """The rule of that name; raises UnknownNameError listing the known ones."""
    if name not in RULES:
        raise UnknownNameError("acceptance rule", name, RULES)
    return RULES[name]
