"""Acceptance rules: which drafted tokens stay, and which token comes next.

p is the main model's distribution, q the one a drafted token was drawn from. A drafted token is *accepted* when
it stays. After a rejection the next token is *recovered*; when every token on the path stays it is a *bonus* token
from p; without any draft it is *plain*. Rules see a whole batch of token trees; a chain is a tree without branches.
They know neither models nor caches.

The lossless rules emit what the main model alone would. The lossy ones buy speed with quality, by a threshold from 0
(keep everything) to 1 (the strictest): README says what each means.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.errors import SettingError, UnknownNameError, require, share, whole
from specdec_lab.sampling import Sampling, draw

DRAFT_TEMPERATURE = 0.7  # of drafts that are kept or refused as a whole


@dataclass(frozen=True)
class Verdict:
    """What a rule decided, for `rows` trees of up to n nodes."""

    accepted: Tensor  # bool [rows, n] nodes that stay; they form one path from the root
    tried: Tensor  # bool [rows, n] nodes that were put to the test
    last: Tensor  # long [rows] the deepest accepted node, -1 for none
    next_token: Tensor  # long [rows]
    residual: Tensor | None = None  # [rows, vocab] what next_token was drawn from (any scale); None when it is p


def greedy_match(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, u: Tensor | None) -> Verdict:
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


def speculative_sampling(
    tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, u: Tensor, scale: Tensor | None = None
) -> Verdict:
    """Keep x with probability min(1, p(x) / q(x)), else go on with the residual: what is emitted follows p.

    For a chain this is speculative sampling (2211.17192, 2302.01318). Siblings are tried in turn, each against the
    residual the one before left: drawn independently from the same q (2305.09781), or without replacement, each from
    its own q, which is what the ones before left of it (2402.12374). Candidates that were not drawn have one-hot q:
    one of them stays with the probability that p gives it.
    tokens, parents, p: as in `greedy_match`, p being probabilities. q: [rows, n, vocab] the distribution each
    token was drawn from, fixed before the draw; None = one-hot, a token that was not drawn at random.
    u: [rows, n + 1] uniform numbers in [0, 1), the last of each row for the token after the path. scale [rows]: what
    q is multiplied by, which lenience makes less than 1.
    """
    rows, n = tokens.shape
    scale = torch.ones_like(u[:, 0]) if scale is None else scale
    last = torch.full((rows,), -1, dtype=torch.long, device=tokens.device)
    accepted = torch.zeros(rows, n, dtype=torch.bool, device=tokens.device)
    tried = torch.zeros_like(accepted)
    residual = p[:, 0]  # [rows, vocab] what the next token must follow, up to a factor, given the tests so far
    for i in range(n):
        token = tokens[:, i : i + 1]
        tried[:, i] = parents[:, i] == last
        target = residual.gather(1, token)[:, 0] / residual.sum(-1)
        proposed = scale if q is None else scale * q[:, i].gather(1, token)[:, 0]
        accepted[:, i] = tried[:, i] & (u[:, i] * proposed < target)
        last = torch.where(accepted[:, i], i, last)
        residual = torch.where(accepted[:, i, None], p[:, i + 1], residual)
        rejected = tried[:, i] & ~accepted[:, i]
        if rejected.any():
            left = _subtract(residual, token, None if q is None else scale[:, None] * q[:, i])
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


# ---- lossy rules. Each takes what the lossless ones take, u being None when decoding is greedy, and the threshold
# [rows] of each row; p holds probabilities, at temperature 1 when decoding is greedy.


def token_threshold(
    tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, u: Tensor | None, threshold: Tensor
) -> Verdict:
    """Keep x while p(x) ≥ threshold · max p: the greedy lenience of 2211.17192 (its A.5)."""
    return _walk(tokens, parents, p, u, threshold[:, None] * p.amax(-1))


def typical_acceptance(
    tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, u: Tensor | None, threshold: Tensor
) -> Verdict:
    """Keep x while p(x) ≥ min(ε, √ε · exp(−H(p))), ε being the threshold (Medusa, 2401.10774)."""
    entropy = torch.special.entr(p).sum(-1)  # [rows, n + 1], nats
    epsilon = threshold[:, None]
    return _walk(tokens, parents, p, u, torch.minimum(epsilon, epsilon.sqrt() * torch.exp(-entropy)))


def lenience(
    tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, u: Tensor | None, threshold: Tensor
) -> Verdict:
    """Keep x with probability min(1, p(x) / (threshold · q(x))); no token gets more than p / threshold.

    2211.17192 (its A.5) and 2310.08461; at 1 it is speculative sampling.
    """
    assert u is not None, "lenience is refused for greedy decoding"
    return speculative_sampling(tokens, parents, p, q, u, threshold)


def whole_block(
    tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, u: Tensor | None, threshold: Tensor
) -> Verdict:
    """Keep a whole candidate, the best of the tree, if its score exceeds the threshold; else nothing.

    A candidate is the path to a leaf, its score the geometric mean of the main model's probabilities of its tokens.
    What was drawn twice goes on under the first of the two: the copy is no leaf.
    """
    own = _own(tokens, parents, p)  # [rows, n]
    ancestors, depth = _ancestors(parents)
    total = (ancestors.to(p.dtype) @ own.clamp(min=torch.finfo(p.dtype).tiny).log()[..., None])[..., 0]
    impossible = (ancestors & (own <= 0)[:, None]).any(-1)
    index = torch.arange(tokens.shape[1], device=tokens.device)
    goes_on = (parents[:, None, :] == index[None, :, None]).any(-1)
    twins = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    leaf = (parents >= -1) & ~goes_on & ~twins.tril(-1).any(-1)
    score = torch.where(leaf, (total / depth.clamp(min=1)).exp().masked_fill(impossible, 0.0), -1.0)  # [rows, n]
    best, where = F.pad(score, (0, 1), value=-1.0).max(-1)
    last = torch.where(best > threshold, where, -1)
    candidate = _path(ancestors, torch.where(best >= 0, where, -1))
    return _verdict(candidate & (last >= 0)[:, None], candidate, last, p, u)


def _walk(tokens: Tensor, parents: Tensor, p: Tensor, u: Tensor | None, floor: Tensor) -> Verdict:
    """Keep the longest path of possible tokens whose p is no lower than `floor` [rows, n + 1] at their place."""
    own = _own(tokens, parents, p)
    fits = (own > 0) & (own >= floor.gather(1, (parents + 1).clamp(min=0)))
    ancestors, depth = _ancestors(parents)
    stands = (parents >= -1) & ~(ancestors & ~fits[:, None]).any(-1)  # it and all its ancestors fit
    reach = torch.where(stands, depth, 0)
    deepest, where = F.pad(reach, (0, 1)).max(-1)  # for a row without nodes
    last = torch.where(deepest > 0, where, -1)
    accepted = _path(ancestors, last)
    above = F.pad(accepted, (0, 1), value=True)  # the root is on every path
    root = torch.full_like(parents, parents.shape[1])
    tried = accepted | ((parents >= -1) & above.gather(1, torch.where(parents < 0, root, parents)) & ~fits)
    return _verdict(accepted, tried, last, p, u)


def _verdict(accepted: Tensor, tried: Tensor, last: Tensor, p: Tensor, u: Tensor | None) -> Verdict:
    """With the next token from p behind the path: drawn, or the arg-max when decoding is greedy."""
    after = p[torch.arange(len(p), device=p.device), last + 1]
    return Verdict(accepted, tried, last, after.argmax(-1) if u is None else draw(after, u[:, -1]))


def _own(tokens: Tensor, parents: Tensor, p: Tensor) -> Tensor:
    """p of each node's token at its place [rows, n]."""
    rows = torch.arange(len(tokens), device=p.device)[:, None]
    return p[rows, (parents + 1).clamp(min=0), tokens]


def _ancestors(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Which nodes lead to each node, itself included: bool [rows, n, n]; and its depth [rows, n], 1 below the root."""
    rows, n = parents.shape
    seen = torch.eye(n, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    row = torch.arange(rows, device=parents.device)
    for i in range(n):
        above = parents[:, i].clamp(min=0)
        seen[:, i] |= seen[row, above] & (parents[:, i] >= 0)[:, None]
    return seen, seen.sum(-1)


def _path(ancestors: Tensor, last: Tensor) -> Tensor:
    """The nodes on the way to `last` [rows], none for -1: bool [rows, n]."""
    row = torch.arange(len(last), device=last.device)
    return F.pad(ancestors, (0, 0, 0, 1))[row, last]  # −1 is the row that was added


def _warmth(value: object) -> bool:
    try:
        return Sampling(temperature=value) is not None  # type: ignore[arg-type]
    except SettingError:
        return False


# ---- rules by name


@dataclass(frozen=True)
class Rule:
    """An acceptance rule: what it needs, and what its threshold is where none is given.

    judge: as the lossy rules above; None for the lossless rule, which is greedy_match or speculative_sampling.
    """

    source: str
    about: str
    judge: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], Verdict] | None = None
    threshold: float | None = None
    retries: int | None = None  # default of max_retries, for rules that keep or refuse a draft as a whole
    samples: bool = False  # refused at temperature 0


RULES = {
    "lossless": Rule("2211.17192, 2302.01318", "exactly what the main model alone would emit"),
    "threshold": Rule("2211.17192", "keep a token while p ≥ threshold · max p", token_threshold, 0.5),
    "typical": Rule(
        "2401.10774", "keep a token while p ≥ min(ε, √ε · exp(−H)), ε = threshold", typical_acceptance, 0.09
    ),
    "lenience": Rule(
        "2211.17192, 2310.08461", "keep a token with min(1, p / (threshold · q))", lenience, 0.5, samples=True
    ),
    "block": Rule("the articles", "keep a whole draft if its score > threshold", whole_block, 0.7, retries=2),
    "sequence": Rule(
        "the articles", "draft the whole text, keep it if its score > threshold", whole_block, 0.7, retries=2
    ),
}


@dataclass(frozen=True)
class Acceptance:
    """Which rule, and its settings; None stands for the rule's default.

    threshold: 0 … 1, of every rule but lossless. block and sequence alone have max_retries, how often a refused
    draft is drawn anew before the main model goes on alone (for one token; in sequence for the rest of the text), and
    draft_temperature, which drafts are drawn at. Raises SettingError, and UnknownNameError for another rule.
    """

    rule: str = "lossless"
    threshold: float | None = None
    max_retries: int | None = None
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UnknownNameError("acceptance rule", self.rule, RULES)
        what = RULES[self.rule]
        usual = {"threshold": what.threshold, "max_retries": what.retries, "draft_temperature": None}
        if what.retries is not None:
            usual["draft_temperature"] = DRAFT_TEMPERATURE
            if self.draft_temperature == 0:
                usual["max_retries"] = 0  # a draft would come again
        for name, default in usual.items():
            value = getattr(self, name)
            if default is None and value is not None:
                called = "acceptance_threshold" if name == "threshold" else name
                raise SettingError(called, value, f"none with the rule {self.rule}; it has no such setting")
            object.__setattr__(self, name, default if value is None else value)
        if self.threshold is not None:
            require("acceptance_threshold", self.threshold, share(self.threshold), "0 … 1")
        retries, temperature = self.max_retries, self.draft_temperature
        if retries is not None and temperature is not None:
            require("max_retries", retries, whole(retries) and 0 <= retries <= 16, "0 … 16")
            require("draft_temperature", temperature, _warmth(temperature), "a number >= 0")
            again = temperature > 0 or retries == 0
            require("max_retries", retries, again, "0 at draft_temperature 0, where a draft would come again")

    @property
    def lossless(self) -> bool:
        """Whether what is emitted is what the main model alone would emit."""
        return self.rule == "lossless"

    @property
    def retries(self) -> bool:
        """Whether it keeps or refuses a draft as a whole, and may ask for another."""
        return RULES[self.rule].retries is not None

    def require_temperature(self, temperature: float) -> None:
        """Raise SettingError where rule and temperature exclude each other."""
        allowed = "above 0 with the rule lenience; for greedy decoding the rule threshold is the same thing"
        require("temperature", temperature, temperature > 0 or not RULES[self.rule].samples, allowed)

    def judge(
        self,
        tokens: Tensor,
        parents: Tensor,
        p: Tensor,
        q: Tensor | None,
        u: Tensor | None,
        threshold: Tensor,
    ) -> Verdict:
        """Apply the rule; u is None when decoding is greedy, threshold [rows] holds each row's own."""
        how = RULES[self.rule].judge
        if how is not None:
            return how(tokens, parents, p, q, u, threshold)
        return greedy_match(tokens, parents, p, q, u) if u is None else speculative_sampling(tokens, parents, p, q, u)
