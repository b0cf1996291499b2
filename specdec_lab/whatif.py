"""What one recorded run says about other draft lengths and thresholds, without running a model.

Every drafted token has a chance to stay under each rule, from the p, q and entropy in its trace. A step of γ' tokens
is taken to begin where the run's own steps began: exact at the run's own setting, but for the cut at the end of the
text, and an estimate elsewhere. It knows chains and rules that judge token by token; no trees, no whole drafts.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specdec_lab.acceptance import RULES
from specdec_lab.errors import SettingError, require, share
from specdec_lab.metrics import draft_cost_ratio, totals
from specdec_lab.theory import VerifyCurve
from specdec_lab.trace import Trace

Floats = NDArray[np.float64]
BY_TOKEN = ("lossless", "threshold", "typical", "lenience")
LONGEST = 32  # tokens that are asked about


@dataclass(frozen=True)
class WhatIf:
    """A chain's records, [steps, γ] each and NaN where a step drafted less, and what its steps cost.

    held: bool [steps], where the draft had no more to offer than it drafted. c, overhead and plain_overhead: mean
    seconds of a drafted token, of a step outside both models, and of that of the plain loop, in units of the plain
    loop's main forward; a draft that costs by the step (n-gram, parallel) is told too dear beyond the length it had
    and too cheap before. greedy: whether the run was. lift: share of what a chance lacks to 1 that is added to it.
    """

    p: Floats
    q: Floats
    largest_p: Floats
    entropy: Floats
    overlap: Floats
    held: NDArray[np.bool_]
    greedy: bool
    c: float
    overhead: float
    plain_overhead: float
    curve: VerifyCurve
    lift: float = 0.0

    @classmethod
    def of(cls, trace: Trace, plain: Trace, curve: VerifyCurve, greedy: bool) -> "WhatIf":
        """From a run and the plain loop's; raises SettingError for trees, refused drafts, no drafts."""
        steps = [step for step in trace.steps if step.planned]
        drafted = any(step.drafted for step in steps)
        require("trace", "a trace without drafts", drafted, "one of a run that drafted")
        chains = all(step.parents == list(range(-1, len(step.parents) - 1)) for step in steps)
        require("trace", "a tree", chains and all(step.candidates == 1 for step in steps), "chains")
        whole = any(step.next_kind == "refused" for step in trace.steps)
        require("trace", "refused drafts", not whole, f"rules that judge token by token: {', '.join(BY_TOKEN)}")
        width = max(len(step.drafted) for step in steps)

        def padded(name: str) -> Floats:
            return np.array([[*getattr(step, name), *[np.nan] * (width - len(step.drafted))] for step in steps])

        ours, theirs = totals([trace]), totals([plain])
        forward = theirs.verify_s / theirs.steps
        return cls(
            p=padded("p"),
            q=padded("q"),
            largest_p=padded("largest_p"),
            entropy=padded("entropy"),
            overlap=padded("overlap"),
            held=np.array([len(step.drafted) < step.planned for step in steps]),
            greedy=greedy,
            c=draft_cost_ratio(ours, theirs) or 0.0,
            overhead=ours.other_s / ours.steps / forward,
            plain_overhead=theirs.other_s / theirs.steps / forward,
            curve=curve,
        )

    def chances(self, rule: str = "lossless", threshold: float = 1.0) -> Floats:
        """The chance of every drafted token to stay once those before it do: [steps, γ], NaN where nothing is drafted.

        Raises SettingError for a rule that does not judge token by token, and for lenience when decoding is greedy.
        """
        require("acceptance_rule", rule, rule in RULES and rule in BY_TOKEN, ", ".join(BY_TOKEN))
        require("acceptance_threshold", threshold, share(threshold), "0 … 1")
        if rule == "lenience" and self.greedy:
            raise SettingError("acceptance_rule", rule, "threshold, as decoding is greedy")
        if rule == "threshold":
            stays = ((self.p > 0) & (self.p >= threshold * self.largest_p)).astype(float)
        elif rule == "typical":
            bar = np.minimum(threshold, np.sqrt(threshold) * np.exp(-self.entropy))
            stays = ((self.p > 0) & (self.p >= bar)).astype(float)
        elif self.greedy:
            stays = self.overlap
        else:
            scale = threshold if rule == "lenience" else 1.0
            with np.errstate(divide="ignore", invalid="ignore"):
                stays = np.where(self.p > 0, np.minimum(1.0, self.p / (scale * self.q)), 0.0)
        return np.where(np.isnan(self.p), np.nan, stays + self.lift * (1 - stays))

    def alpha(self, rule: str = "lossless", threshold: float = 1.0) -> float:
        """Expected share of the tried tokens that stay."""
        stays = self.chances(rule, threshold)
        reach = np.cumprod(stays, 1)  # [steps, γ] chance that all up to here stay
        tried = np.hstack([np.ones((len(stays), 1)), reach[:, :-1]])[~np.isnan(stays)].sum()
        return float(np.nansum(reach) / tried) if tried else 0.0

    def kept(self, draft_length: int, rule: str = "lossless", threshold: float = 1.0) -> Floats:
        """Share of steps that keep 1, 2, … draft_length tokens or more: [draft_length].

        Behind what was drafted, a token stays as often as those at all places did on the whole; where the draft held
        back there is none.
        """
        require("draft_length", draft_length, 1 <= draft_length <= LONGEST, f"an integer 1 … {LONGEST}")
        stays = self.chances(rule, threshold)
        behind = np.where(self.held, 0.0, self.alpha(rule, threshold))[:, None]
        filled = np.repeat(behind, max(draft_length, stays.shape[1]), 1)
        filled[:, : stays.shape[1]] = np.where(np.isnan(stays), behind, stays)
        return np.cumprod(filled, 1).mean(0)[:draft_length]

    def cost(self, draft_length: int) -> float:
        """Of a step on the average, in steps of the plain loop."""
        own = (~np.isnan(self.p)).sum(1)  # [steps]
        drafted = np.where(self.held, np.minimum(own, draft_length), draft_length)
        lengths, times = np.unique(drafted, return_counts=True)
        models = np.average([n * self.c + self.curve(n + 1) for n in lengths.tolist()], weights=times)
        return float(models + self.overhead) / (1 + self.plain_overhead)

    def speedup(self, draft_length: int, rule: str = "lossless", threshold: float = 1.0) -> float:
        """Expected tokens of a step over its cost."""
        return float(1 + self.kept(draft_length, rule, threshold).sum()) / self.cost(draft_length)

    def foreign(self, draft_length: int, rule: str, threshold: float) -> float:
        """Share of the tokens of a step, its last one included, that are kept and not the main model's first choice.

        What a rule costs in quality when decoding is greedy; 0 for a lossless one. Within what was drafted.
        """
        stays = self.chances(rule, threshold)[:, :draft_length]
        reach = np.nan_to_num(np.cumprod(stays, 1))
        other = np.nan_to_num(self.overlap[:, :draft_length], nan=1.0) < 1 if self.greedy else np.zeros_like(reach)
        return float((reach * other).sum() / (reach.sum() + len(reach)))

    def levers(self, draft_length: int, rule: str = "lossless", threshold: float = 1.0) -> list["Lever"]:
        """What would help most, best first: another length, or half of what a better draft, step or forward lacks."""

        def lever(name: str, change: str, known: "WhatIf") -> Lever:
            return Lever(name, change, known.speedup(draft_length, rule, threshold))

        alpha, k = self.alpha(rule, threshold), draft_length + 1
        flat = replace(self.curve, ratio=tuple(1 + (r - 1) / 2 for r in self.curve.ratio))
        found = [
            lever("better draft", f"α {alpha:.2f} → {(1 + alpha) / 2:.2f}", replace(self, lift=0.5)),
            lever("cheaper draft", f"c {self.c:.3f} → {self.c / 2:.3f}", replace(self, c=self.c / 2)),
            lever("flatter verification", f"T({k}) {self.curve(k):.2f} → {flat(k):.2f}", replace(self, curve=flat)),
        ]
        known = {0: 1.0} | {n: self.speedup(n, rule, threshold) for n in range(1, LONGEST + 1)}
        best = max(known, key=known.__getitem__)
        if best != draft_length:
            name = "no draft" if not best else "longer draft" if best > draft_length else "shorter draft"
            found.append(Lever(name, f"γ {draft_length} → {best}", known[best]))
        return sorted(found, key=lambda each: -each.speedup)


@dataclass(frozen=True)
class Lever:
    """Something that could change, and the speed-up that is expected then."""

    name: str
    change: str
    speedup: float
