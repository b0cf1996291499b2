"""What to expect of a chain of γ drafted tokens, from α, γ, c and the measured cost of verifying.

α is the probability that a tried token stays, taken as equal for all (2211.17192); c is the cost of one draft
step and T(k) that of a main forward over k tokens, both in units of T(1).
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec_lab.errors import require
from specdec_lab.models.protocol import Model
from specdec_lab.trace import now

KS = (1, 2, 3, 4, 5, 8, 9, 12, 17, 25, 33)


@dataclass(frozen=True)
class VerifyCurve:
    """Cost of a main forward over k tokens. `ratio` is T(k) / T(1), `seconds` the medians behind it."""

    ks: tuple[int, ...]
    ratio: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, k: float) -> float:
        """T(k) / T(1), linear between measured k, and beyond the last one with its slope."""
        if k <= self.ks[-1] or len(self.ks) == 1:
            return float(np.interp(k, self.ks, self.ratio))
        slope = (self.ratio[-1] - self.ratio[-2]) / (self.ks[-1] - self.ks[-2])
        return self.ratio[-1] + slope * (k - self.ks[-1])


def measure_verify_curve(model: Model, ks: Sequence[int] = KS, context: int = 128, repeats: int = 7) -> VerifyCurve:
    """Time forward and head over k tokens behind `context` cached ones; the ks alternate, medians count."""
    require("context", context, 1 <= context < model.context_length, f"1 … {model.context_length - 1}")
    ks = tuple(k for k in sorted({1, *ks}) if context + k <= model.context_length)
    cache = model.new_cache(1, context + max(ks))
    ids = torch.arange(context) % model.vocab_size
    model.forward(ids[None].to(model.device), cache)
    cache.advance([context])
    times: dict[int, list[float]] = {k: [] for k in ks}
    for repeat in range(repeats + 1):
        for k in ks:
            tokens = (torch.arange(k) * 7 % model.vocab_size)[None].to(model.device)
            start = now(model.device)
            model.logits(model.forward(tokens, cache))
            if repeat:  # the first round warms up
                times[k].append(now(model.device) - start)
    seconds = [statistics.median(times[k]) for k in ks]
    return VerifyCurve(ks, tuple(s / seconds[0] for s in seconds), tuple(seconds))


def expected_tokens(alpha: float, draft_length: int) -> float:
    """τ of a chain: (1 − α^(γ+1)) / (1 − α), between 1 and γ + 1."""
    require("alpha", alpha, 0 <= alpha <= 1, "0 … 1")
    require("draft_length", draft_length, draft_length >= 0, "an integer >= 0")
    return sum(alpha**i for i in range(draft_length + 1))


def most_tokens(alpha: float, candidates: int = 1) -> float:
    """What no chain's τ exceeds at this α, however long it is and however positions differ: 1 / (1 − α).

    By counting: a step rejects one token at most, so accepted tokens per step are at most α / (1 − α), and one more is
    emitted. Several candidates are chains that may share their beginnings: each rejection ends one of them at least,
    so a step rejects `candidates` at most. Of rules that put one token after the other to the test.
    """
    require("alpha", alpha, 0 <= alpha <= 1, "0 … 1")
    require("candidates", candidates, candidates >= 1, "an integer >= 1")
    return 1 + candidates * alpha / (1 - alpha) if alpha < 1 else float("inf")


def alpha_of(rate: float, draft_length: int) -> float:
    """The α at which this share of a chain's γ drafted tokens is accepted: expected_tokens = 1 + γ · rate."""
    require("rate", rate, 0 <= rate <= 1, "0 … 1")
    require("draft_length", draft_length, draft_length >= 1, "an integer >= 1")
    return _least(lambda alpha: expected_tokens(alpha, draft_length) >= 1 + draft_length * rate)


def speedup(alpha: float, draft_length: int, c: float, curve: VerifyCurve | None = None) -> float:
    """Expected speed-up: τ / (γ c + T(γ + 1) / T(1)); without a curve, verification costs one forward."""
    require("c", c, c >= 0, "a number >= 0")
    verify = 1.0 if curve is None else curve(draft_length + 1)
    return expected_tokens(alpha, draft_length) / (draft_length * c + verify)


def break_even(draft_length: int, c: float, curve: VerifyCurve | None = None) -> float | None:
    """The α above which drafting pays; None when even α = 1 does not."""
    if speedup(1.0, draft_length, c, curve) <= 1:
        return None
    return _least(lambda alpha: speedup(alpha, draft_length, c, curve) >= 1)


def _least(holds: Callable[[float], bool]) -> float:
    """The least share from which on something holds, by bisection; it holds at 1."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def best_draft_length(alpha: float, c: float, curve: VerifyCurve | None = None, most: int = 32) -> int:
    """The γ from 0 to `most` with the highest expected speed-up."""
    return max(range(most + 1), key=lambda gamma: speedup(alpha, gamma, c, curve))
