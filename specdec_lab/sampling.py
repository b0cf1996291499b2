"""From logits to the distribution that tokens are drawn from, for p and q alike.

Every processor depends on the committed prefix and the path to a token alone, so it holds at each verified
position. Temperature 0 is arg-max, never a division.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from specdec_lab.errors import require, whole


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: penalty, then temperature, top-k, top-p (1904.09751), min-p (2407.01082).

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 (1909.05858) are off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, ok, allowed in (
            ("temperature", lambda x: math.isfinite(x) and x >= 0, "a number >= 0 (0 is greedy)"),
            ("top_k", lambda x: whole(x) and x >= 0, "an integer >= 0 (0 is off)"),
            ("top_p", lambda x: 0 < x <= 1, "0 < top_p <= 1 (1 is off)"),
            ("min_p", lambda x: 0 <= x < 1, "0 <= min_p < 1 (0 is off)"),
            ("repetition_penalty", lambda x: 0.01 <= x <= 100, "0.01 … 100 (1 is off)"),
        ):
            value = getattr(self, name)
            require(name, value, isinstance(value, Real) and ok(value), allowed)

    @property
    def greedy(self) -> bool:
        """Whether every draw is the arg-max."""
        return self.temperature == 0


def penalise(logits: Tensor, seen: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Repetition penalty: logits [n, vocab], `seen[i]` the tokens of the path to position i; a new tensor."""
    if penalty == 1.0:
        return logits
    logits = logits.clone()
    for row, tokens in zip(logits, seen, strict=True):
        index = torch.tensor(sorted(set(tokens)), device=logits.device)
        score = row[index]
        row[index] = torch.where(score < 0, score * penalty, score / penalty)
    return logits


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [..., vocab] that a token is drawn from, after temperature, top-k, top-p and min-p.

    Greedy gives the one-hot of the arg-max.
    """
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits - logits.amax(-1, keepdim=True)
    # a temperature that single precision rounds to 0 would give 0 / 0
    logits = logits / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    if 0 < sampling.top_k < logits.shape[-1]:
        floor = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        p = _nucleus(p, sampling.top_p)
    if sampling.min_p > 0:
        p = _renormalise(p, p >= sampling.min_p * p.amax(-1, keepdim=True))
    return p


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches top_p.

    Tokens below (1 − top_p) / vocab weigh less than 1 − top_p together, so none of them is in it: ranking the others
    is enough.
    """
    count = int((p >= (1 - top_p) / p.shape[-1]).sum(-1).max())
    ranked, order = p.topk(count, dim=-1)
    before = ranked.cumsum(-1) - ranked  # mass in front of each token; the first one always stays
    ranked = ranked.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(p).scatter_(-1, order, ranked / ranked.sum(-1, keepdim=True))


def _renormalise(p: Tensor, keep: Tensor) -> Tensor:
    p = p.masked_fill(~keep, 0.0)
    return p / p.sum(-1, keepdim=True)


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Tokens [rows] drawn from p [rows, vocab] (any positive scale) by inverse CDF at u [rows] in [0, 1)."""
    cdf = p.double().cumsum(-1)
    target = u.double()[:, None] * cdf[:, -1:]
    token = torch.searchsorted(cdf, target, right=True)[:, 0]
    last = p.shape[-1] - 1 - (p > 0).flip(-1).to(torch.uint8).argmax(-1)  # guards u rounding up to the total mass
    return torch.minimum(token, last)


def uniforms(generators: Sequence[torch.Generator], counts: Sequence[int], device: torch.device) -> Tensor:
    """[rows, max(counts)] uniform numbers; each row's come from its own generator, whatever the others need."""
    u = torch.zeros(len(counts), max(counts, default=0))
    for row, (generator, count) in enumerate(zip(generators, counts, strict=True)):
        u[row, :count] = torch.rand(count, generator=generator)
    return u.to(device)
