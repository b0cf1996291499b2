"""Suitability: does drafting pay for these prompts, with which draft, how long a draft, and what bounds it?

A short probe decodes a few prompts by the plain loop and, in turn, with each draft at one long draft length. Other
lengths are predicted from it: whether a token stays does not hang on where its draft began (with a greedy draft
model; by its law, when sampling), so the probe's text is walked through again in shorter steps. A step costs the
plain loop's, what the measured curve of verifying adds, and seconds per drafted token. Nothing is fitted to measured
speed-ups; `score_predictions` holds the predictions against them, on other prompts and at other lengths.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specdec_lab import metrics
from specdec_lab.decoding import MAX_DRAFT, Decoder
from specdec_lab.drafting import Drafter
from specdec_lab.errors import ArchitectureError, DataError, UnknownNameError, require, whole
from specdec_lab.experiment import alternate, encode_all
from specdec_lab.metrics import Totals, totals
from specdec_lab.models import zoo
from specdec_lab.sampling import Sampling
from specdec_lab.statistics import HOLDS_BACK, Interval, interval, ratio_interval, resampled_sums
from specdec_lab.tasks import Prompt
from specdec_lab.tasks.prompts import spread
from specdec_lab.theory import VerifyCurve, expected_tokens, measure_verify_curve
from specdec_lab.trace import Trace

LONG = 1024  # tokens of output beyond which the articles do not recommend drafting
CREATIVE = ("prose", "writing", "roleplay", "train_prose", "train_writing")  # task types of creative text
CHECKED = (2, 4)  # draft lengths that predictions are held against
BOUNDS = {
    "alpha": ("α", "if every drafted token stayed"),
    "c": ("c", "if drafting were free"),
    "verify": ("T(k)", "if verifying cost one forward"),
}
SECONDS = ("decode_s", "draft_s", "verify_s")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """What is probed, and what for.

    drafts: names that zoo.load_drafter takes; draft_lengths: those predicted, the longest is probed. max_new_tokens:
    of each probed text; output_tokens: as many as the user means to generate, None for the same. Raises SettingError.
    """

    drafts: tuple[str, ...] = ("1:2", "1:4", "ngram", "feature")
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)
    max_new_tokens: int = 40
    output_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0

    def __post_init__(self) -> None:
        named = all(isinstance(name, str) and name.strip() not in ("", "none") for name in self.drafts)
        different = 0 < len(set(self.drafts)) == len(self.drafts)
        require("drafts", self.drafts, named and different, "one or more names, all different, none of them none")
        _require_lengths("draft_lengths", self.draft_lengths, MAX_DRAFT)
        enough = whole(self.max_new_tokens) and self.max_new_tokens >= 2
        require("max_new_tokens", self.max_new_tokens, enough, "an integer >= 2, as the last token is not drafted for")
        meant = self.output_tokens is None or (whole(self.output_tokens) and self.output_tokens >= 1)
        require("output_tokens", self.output_tokens, meant, "an integer >= 1")
        require("seed", self.seed, whole(self.seed) and 0 <= self.seed < 2**62, "an integer 0 … 2⁶² − 1")

    @property
    def probed(self) -> int:
        """The draft length of the probe."""
        return max(self.draft_lengths)

    @property
    def settings(self) -> dict[str, Any]:
        """How the probe decodes, as Decoder.stream takes it."""
        return {**asdict(self.sampling), "max_new_tokens": self.max_new_tokens, "seed": self.seed}


def _require_lengths(name: str, lengths: Sequence[int], most: int) -> None:
    fits = all(whole(length) and 1 <= length <= most for length in lengths)
    require(name, lengths, fits and 0 < len(set(lengths)) == len(lengths), f"different integers 1 … {most}")


# ---- from one draft length to others


def replay(trace: Trace, draft_length: int, limit: int, unknown: float) -> Floats:
    """Expected number of steps that draft 0 … draft_length tokens [draft_length + 1], on the text of a longer probe.

    An accepted token stays again, a recovered one does not; a bonus token was never drafted, `unknown` is its chance.
    A step that drafted less than it was asked for drafts no more now. limit: max_new_tokens of the probe. At the
    probe's own draft length these are the steps it took. Raises SettingError for a trace of trees.
    """
    stays: list[float] = []  # of each emitted token, the chance that it stays when it is drafted,
    most: list[int] = []  # and how many tokens a draft that begins there may have
    for step in trace.steps:
        chain = step.parents == list(range(-1, len(step.parents) - 1))
        require("trace", "a tree", chain, "chains; what a shorter tree would be cannot be told from a longer one")
        chances = [1.0] * len(step.accepted) + [0.0 if step.next_kind == "recovered" else unknown]
        stays += chances[: step.emitted]
        held_back = len(step.drafted) < step.planned
        most += [min(draft_length, len(step.drafted)) if held_back else draft_length] * step.emitted
    end = len(stays) if trace.finish == "context" else limit
    steps, begins = np.zeros(draft_length + 1), np.zeros(len(stays) + 1)  # begins: chance that a step begins there
    begins[0] = 1.0
    for start in range(len(stays)):
        drafted, weight = min(most[start], end - start - 1), begins[start]
        steps[drafted] += weight
        for at in range(start, min(start + drafted, len(stays))):  # the token there is rejected
            begins[at + 1] += weight * (1 - stays[at])
            weight *= stays[at]
        begins[min(start + drafted + 1, len(stays))] += weight
    return steps


def break_even(shares: Sequence[float] | Floats, cost: float) -> float | None:
    """The α at which steps bring what they cost; None where even α = 1 does not.

    shares[n]: of the steps, those that draft n tokens; cost: of a step, in plain steps.
    """

    def tau(alpha: float) -> float:
        return sum(share * expected_tokens(alpha, n) for n, share in enumerate(shares))

    if tau(1.0) <= cost:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tau(middle) < cost else (low, middle)
    return high


@dataclass(frozen=True)
class Prediction:
    """What is expected of one draft at one draft length.

    speedup: after prefill, over the plain loop; its interval is over prompts. tau: emitted tokens a step. drafted:
    tokens a step, less than draft_length for a draft that holds back. cost: a step's time in plain steps. verify:
    T(n + 1)/T(1), mean over steps. break_even: the α at which drafting costs what it brings, None where even α = 1
    does not. ideal: the speed-up if every drafted token stayed ("alpha"), if drafting were free ("c"), if verifying
    cost one forward ("verify").
    """

    draft_length: int
    speedup: Interval
    tau: float
    drafted: float
    cost: float
    verify: float
    break_even: float | None
    ideal: Mapping[str, float]

    @property
    def pays(self) -> bool:
        """The verdict: whether drafting is expected to be faster than the plain loop."""
        return self.speedup.value > 1

    @property
    def sure(self) -> bool:
        """Whether the whole interval is on the verdict's side."""
        return self.speedup.known and (self.speedup.low > 1 or self.speedup.high < 1)

    @property
    def bound(self) -> str:
        """Which of α, c and T(k) holds the speed-up down the most: a key of BOUNDS."""
        return max(self.ideal, key=lambda name: self.ideal[name])


@dataclass(frozen=True)
class Probe:
    """What one draft did at `draft_length`, and the plain loop on the same prompts. limit: max_new_tokens."""

    draft: str
    draft_length: int
    plain: Sequence[Trace]
    traces: Sequence[Trace]
    curve: VerifyCurve
    limit: int

    @cached_property
    def sums(self) -> tuple[Totals, Totals]:
        """Of the draft's traces and of the plain loop's."""
        return totals(self.traces), totals(self.plain)

    @cached_property
    def alpha(self) -> Interval:
        """α: accepted of tried tokens, with its interval over prompts."""
        each = [totals([trace]) for trace in self.traces]
        return ratio_interval([t.accepted for t in each], [t.accepted + t.rejected for t in each])

    def predict(self, draft_length: int) -> Prediction:
        """What to expect at that length; at the probe's own it is the probe's own speed-up.

        The seconds per drafted token are what a step of the probe took beyond the plain loop's and the curve:
        drafting, the loop, and what verification took beyond the curve. They are taken as equal at all lengths; a
        draft that makes all its tokens in one forward costs more at short ones than this says.
        Raises SettingError for a length beyond the probe's, and for trees.
        """
        most = self.draft_length
        fits = whole(draft_length) and 1 <= draft_length <= most
        require("draft_length", draft_length, fits, f"an integer 1 … {most}, which is the length that was probed")
        steps, verify = self._steps(draft_length), self._verify(draft_length)
        shares = steps.sum(0) / steps.sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            tau, cost, ideal = self._expected(steps, verify)
        return Prediction(
            draft_length=draft_length,
            speedup=interval(tau / cost, len(self.traces)),
            tau=float(tau[0]),
            drafted=float(shares @ np.arange(draft_length + 1)),
            cost=float(cost[0]),
            verify=float(shares @ verify),
            break_even=break_even(shares, float(cost[0])),
            ideal=ideal,
        )

    def _steps(self, draft_length: int) -> Floats:
        """Expected steps of each text that draft 0 … draft_length tokens [prompts, draft_length + 1]."""
        unknown = metrics.acceptance_probability(self.sums[0]) or 0.0
        return np.stack([replay(trace, draft_length, self.limit, unknown) for trace in self.traces])

    def _verify(self, draft_length: int) -> Floats:
        """T(n + 1)/T(1) behind n = 0 … draft_length drafted tokens."""
        return np.array([self.curve(n + 1) for n in range(draft_length + 1)])

    def _expected(self, steps: Floats, verify: Floats) -> tuple[Floats, Floats, dict[str, float]]:
        """τ and a step's cost in plain steps, resampled [1 + resamples], and Prediction.ideal."""
        s = self._resampled(steps, verify)
        plain, forward = s["plain_decode_s"] / s["plain_steps"], s["plain_verify_s"] / s["plain_steps"]
        # what is drafted at this length, of what the probe drafted; or of its steps, where it drafted nothing
        scale = np.where(s["probe_drafted"] > 0, s["drafted"] / s["probe_drafted"], s["steps"] / s["probe_steps"])
        beyond = s["decode_s"] - s["probe_steps"] * plain - s["probe_extra"] * forward
        seconds = s["steps"] * plain + s["extra"] * forward + beyond * scale
        off_curve = s["verify_s"] - (s["probe_steps"] + s["probe_extra"]) * forward
        verifying = s["extra"] * forward + off_curve * scale  # seconds beyond one forward a step
        ideal = {
            "alpha": (s["steps"] + s["drafted"]) * plain / seconds,
            "c": s["emitted"] * plain / (seconds - s["draft_s"] * scale),
            "verify": s["emitted"] * plain / (seconds - verifying),
        }
        return s["emitted"] / s["steps"], seconds / s["steps"] / plain, {name: float(v[0]) for name, v in ideal.items()}

    def _resampled(self, steps: Floats, verify: Floats) -> dict[str, Floats]:
        """Sums over resampled prompts [1 + resamples] of what the two loops took, and of expected and probed steps.

        extra: Σ T(n + 1)/T(1) − 1 over steps.
        """
        ours, plain = ([totals([trace]) for trace in traces] for traces in (self.traces, self.plain))
        columns: dict[str, ArrayLike] = {name: [getattr(t, name) for t in ours] for name in ("emitted", *SECONDS)}
        columns |= {f"plain_{name}": [getattr(t, name) for t in plain] for name in ("steps", *SECONDS)}
        probed = self._steps(self.draft_length), self._verify(self.draft_length)
        for side, n, ratio in (("", steps, verify), ("probe_", *probed)):
            columns[f"{side}steps"] = n.sum(1)
            columns[f"{side}drafted"] = n @ np.arange(n.shape[1])
            columns[f"{side}extra"] = n @ (ratio - 1)
        return resampled_sums(columns)


# ---- the assessment


@dataclass(frozen=True)
class Suitability:
    """Whether one draft pays, at which of the predicted lengths, and why.

    alpha: of the probe, pooled; c: seconds per drafted token over a plain main forward, None when nothing was
    drafted; overhead: share of the probe's time outside drafting and main forwards; coverage: drafted of asked for.
    refusal: why the draft cannot be used at all; it has no predictions then.
    """

    draft: str
    predictions: tuple[Prediction, ...] = ()
    alpha: Interval = field(default_factory=lambda: Interval(float("nan"), float("nan"), float("nan"), 0))
    c: float | None = None
    overhead: float | None = None
    coverage: float | None = None
    refusal: str = ""

    @property
    def best(self) -> Prediction | None:
        """The prediction with the highest speed-up; None for a draft that cannot be used."""
        return max(self.predictions, key=lambda found: found.speedup.value, default=None)

    @property
    def pays(self) -> bool:
        """Whether to use it."""
        return self.best is not None and self.best.pays

    def reason(self) -> str:
        """The verdict and what it rests on, in a sentence or two."""
        best = self.best
        if best is None:
            return f"don't use {self.draft}: {self.refusal}"
        speed = f"{best.speedup.value:.2f}×{_between(best.speedup)} with {_tokens(best.draft_length)} a step"
        said = f"use {self.draft}: {speed}" if best.pays else f"don't use {self.draft}: at best {speed}"
        if not best.sure:
            said += ", but not surely: " + ("the interval holds 1" if best.speedup.known else "too few prompts to tell")
        if self.c is None:
            return f"{said}. It drafted nothing in the probe"
        needed = "even α = 1 would not pay" if best.break_even is None else f"break-even α {best.break_even:.2f}"
        facts = f"α {self.alpha.value:.2f}{_between(self.alpha)}, {needed} at c {self.c:.3f} and T(k) {best.verify:.2f}"
        if self.coverage is not None and self.coverage < HOLDS_BACK:
            facts += f"; it drafts {self.coverage:.0%} of what it is asked for"
        ideals = ", ".join(f"{best.ideal[name]:.2f}× {words}" for name, (_, words) in BOUNDS.items())
        return f"{said}. {facts}. {BOUNDS[best.bound][0]} bounds it most: {ideals}"


def _between(found: Interval) -> str:
    return f" ({found.low:.2f} … {found.high:.2f})" if found.known else ""


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


@dataclass(frozen=True)
class Assessment:
    """What was found for one set of prompts. name: of the set; prompts: those of the probe.

    exclusions: which of the cases that the articles do not recommend drafting for this is, and what that means here.
    """

    name: str
    plan: Plan
    prompts: tuple[Prompt, ...]
    drafts: tuple[Suitability, ...]
    exclusions: tuple[str, ...]

    def prediction(self, draft: str, draft_length: int) -> Prediction:
        """That of a draft at a length; raises UnknownNameError for a draft or length that was not predicted."""
        found = {(s.draft, p.draft_length): p for s in self.drafts for p in s.predictions}
        if (draft, draft_length) not in found:
            known = [f"{name}, {length}" for name, length in found]
            raise UnknownNameError("prediction for draft and length", f"{draft}, {draft_length}", known)
        return found[draft, draft_length]


def exclusions(prompts: Sequence[Prompt], plan: Plan) -> tuple[str, ...]:
    """The articles' "not recommended for" that prompts and plan fall under, with what the probe can say of them."""
    found = []
    creative = sorted({prompt.task for prompt in prompts if prompt.task in CREATIVE})
    if creative:
        found.append(
            f"creative text at full fidelity ({', '.join(creative)}): the articles do not recommend drafting for it. "
            "The probe's rule is lossless, so only speed is at stake here, never the text; lossy rules are not for it"
        )
    meant = plan.output_tokens or plan.max_new_tokens
    if meant > LONG:
        found.append(
            f"outputs of {meant} tokens, beyond {LONG:,}: the articles do not recommend drafting for them. The probe "
            f"saw the first {plan.max_new_tokens} tokens and says nothing of what lies beyond {LONG:,}"
        )
    return tuple(found)


def unsuitable(error: ArchitectureError) -> str:
    """The articles' third exclusion, for a model that was refused."""
    return f"an architecture that drafting cannot roll back: {error}. The articles do not recommend it either"


def load_drafts(names: Sequence[str], main: zoo.Main) -> tuple[dict[str, Drafter], dict[str, str]]:
    """Drafters by name, and why those with an unsuitable architecture were refused; raises ModelError for others."""
    loaded, refused = {}, {}
    for name in names:
        try:
            loaded[name] = zoo.load_drafter(name, main)
        except ArchitectureError as error:
            refused[name] = unsuitable(error)
    return loaded, refused


def assess(
    main: zoo.Main,
    prompts: Sequence[Prompt],
    plan: Plan | None = None,
    *,
    name: str = "",
    drafters: tuple[Mapping[str, Drafter], Mapping[str, str]] | None = None,
    curve: VerifyCurve | None = None,
    tick: Callable[[int], object] = lambda count: None,
) -> Assessment:
    """Probe every draft of the plan on these prompts, and predict its speed-up at every length.

    drafters: of `load_drafts`, and curve: of theory.measure_verify_curve, where they are there already. tick: called
    with 1 after each text. Raises SettingError without prompts, DataError for a prompt that does not fit the model,
    ModelError for a draft that cannot be loaded.
    """
    plan = plan or Plan()
    require("prompts", "none", len(prompts) > 0, "one or more")
    loaded, refused = drafters or load_drafts(plan.drafts, main)
    curve = curve or measure_verify_curve(main.model, context=min(128, main.model.context_length // 2))
    names = [draft for draft in plan.drafts if draft in loaded]
    ways = [(draft, plan.probed) for draft in names]
    plain, *sides = _traces(main, prompts, plan, ways, loaded, tick)
    found = {
        draft: _suitability(Probe(draft, plan.probed, plain, traces, curve, plan.max_new_tokens), plan.draft_lengths)
        for draft, traces in zip(names, sides, strict=True)
    }
    found |= {draft: Suitability(draft, refusal=refused[draft]) for draft in plan.drafts if draft in refused}
    ordered = tuple(found[draft] for draft in plan.drafts)
    return Assessment(name, plan, tuple(prompts), ordered, exclusions(prompts, plan))


def _traces(
    main: zoo.Main,
    prompts: Sequence[Prompt],
    plan: Plan,
    ways: Sequence[tuple[str, int]],
    drafters: Mapping[str, Drafter],
    tick: Callable[[int], object],
) -> list[list[Trace]]:
    """Traces of the plain loop and of each (draft, draft length), on every prompt in turn."""
    decoders = [Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)]
    for draft, length in ways:
        decoders.append(Decoder(main.model, drafters[draft], length, main.tokenizer, eos=main.eos))
    runs = alternate(decoders, encode_all(decoders[0], prompts), tick=tick, **plan.settings)
    return [list(side) for side in zip(*([made.trace for _, made in sides] for sides in runs), strict=True)]


def _suitability(probe: Probe, draft_lengths: Sequence[int]) -> Suitability:
    ours, plain = probe.sums
    return Suitability(
        draft=probe.draft,
        predictions=tuple(probe.predict(length) for length in sorted(draft_lengths)),
        alpha=probe.alpha,
        c=metrics.draft_cost_ratio(ours, plain),
        overhead=metrics.overhead_share(ours),
        coverage=metrics.coverage(ours),
    )


# ---- scoring the predictions


def split(prompts: Sequence[Prompt], limit: int) -> tuple[list[Prompt], list[Prompt]]:
    """Up to `limit` prompts for the probe and as many others to score it on, both spread evenly.

    Raises SettingError for a limit below 1, DataError where the probe leaves none.
    """
    require("limit", limit, whole(limit) and limit >= 1, "an integer >= 1")
    probed = spread(list(prompts), limit)
    texts = {prompt.prompt for prompt in probed}
    others = [prompt for prompt in prompts if prompt.prompt not in texts]
    if not others:
        raise DataError(f"{len(prompts)} prompts leave none to check the predictions on; give more, or a lower limit")
    return probed, spread(others, limit)


def require_unprobed(plan: Plan, draft_lengths: Sequence[int]) -> None:
    """Raise SettingError for draft lengths that predictions cannot be checked at."""
    usable = sorted(length for length in plan.draft_lengths if length < plan.probed)
    fits = 0 < len(set(draft_lengths)) == len(draft_lengths) and set(draft_lengths) <= set(usable)
    allowed = f"different ones of {usable}: predicted, and shorter than the probe's {plan.probed}"
    require("draft_lengths", list(draft_lengths), fits, allowed)


@dataclass(frozen=True)
class Scored:
    """One prediction beside what was measured: `speculative_speedup`, on prompts that the probe had not seen."""

    name: str
    draft: str
    draft_length: int
    predicted: Interval
    measured: Interval

    @property
    def error(self) -> float:
        """Of the speed-up, relative: 0.1 when the prediction is 10 % too high."""
        return self.predicted.value / self.measured.value - 1

    @property
    def right(self) -> bool:
        """Whether prediction and measurement are on the same side of 1."""
        return (self.predicted.value > 1) == (self.measured.value > 1)


def score_predictions(
    main: zoo.Main,
    assessment: Assessment,
    prompts: Sequence[Prompt],
    draft_lengths: Sequence[int] = CHECKED,
    *,
    drafters: Mapping[str, Drafter] | None = None,
    tick: Callable[[int], object] = lambda count: None,
) -> tuple[Scored, ...]:
    """Measure every draft of an assessment at these lengths, beside the plain loop, and compare.

    Raises SettingError for a prompt that the probe saw and a length that it ran at or did not predict.
    """
    plan = assessment.plan
    require("prompts", "none", len(prompts) > 0, "one or more")
    seen = {prompt.prompt for prompt in assessment.prompts}
    known = next((prompt.id for prompt in prompts if prompt.prompt in seen), None)
    require("prompts", known, known is None, "prompts that the probe has not seen")
    require_unprobed(plan, draft_lengths)
    names = [found.draft for found in assessment.drafts if found.predictions]
    ways = [(draft, length) for draft in names for length in draft_lengths]
    loaded = load_drafts(names, main)[0] if drafters is None else drafters
    plain, *sides = ([totals([t]) for t in side] for side in _traces(main, prompts, plan, ways, loaded, tick))
    return tuple(
        Scored(assessment.name, *way, assessment.prediction(*way).speedup, _speedup(side, plain))
        for way, side in zip(ways, sides, strict=True)
    )


def _speedup(ours: Sequence[Totals], plain: Sequence[Totals]) -> Interval:
    sides = [[getattr(t, name) for t in side] for side in (ours, plain) for name in ("emitted", "decode_s")]
    return ratio_interval(*sides)


def tally(scored: Sequence[Scored]) -> dict[str, float]:
    """Of all settings: how many, the median absolute error of the speed-up, and how many verdicts were right."""
    require("scored", "nothing", len(scored) > 0, "one setting or more")
    errors = [abs(each.error) for each in scored]
    return {
        "settings": len(scored),
        "median_error": statistics.median(errors),
        "right": sum(each.right for each in scored),
    }


# ---- how it reads


def lines(found: Assessment) -> list[str]:
    """The predicted speed-ups by draft and length, then each verdict with its reason, then the exclusions."""
    plan, lengths = found.plan, sorted(found.plan.draft_lengths)
    probe = f"{len(found.prompts)} prompts, {_tokens(plan.max_new_tokens)} each, probed at {plan.probed} drafted a step"
    out = [f"{found.name}: {probe}", f"{'draft':14}" + "".join(f"{length:>8}" for length in lengths)]
    for each in found.drafts:
        out.append(f"{each.draft:14}" + "".join(f"{p.speedup.value:7.2f}×" for p in each.predictions))
    return [*out, *(each.reason() for each in found.drafts), *(f"note: {each}" for each in found.exclusions)]


def score_lines(scored: Sequence[Scored]) -> list[str]:
    """A line for each setting, then the tally."""
    out = [f"{'prompts':14}{'draft':14}{'length':>6}  {'predicted':22}{'measured':22}{'error':>7}  verdict"]
    for each in scored:
        sides = "".join(f"{f'{s.value:.2f}×{_between(s)}':22}" for s in (each.predicted, each.measured))
        verdict = "right" if each.right else "WRONG"
        out.append(f"{each.name:14}{each.draft:14}{each.draft_length:6}  {sides}{each.error:+7.1%}  {verdict}")
    got = tally(scored)
    right = f"verdict right in {got['right']} of {got['settings']} settings"
    return [*out, f"median absolute error {got['median_error']:.1%}, {right}"]


def to_dict(found: Assessment) -> dict[str, Any]:
    """JSON-able; what is undefined is None."""
    drafts = []
    for each in found.drafts:
        line = {"draft": each.draft, "pays": each.pays, "reason": each.reason(), "alpha": _bounds(each.alpha)}
        line |= {name: getattr(each, name) for name in ("c", "overhead", "coverage")}
        line["draft_length"] = each.best and each.best.draft_length
        line["predictions"] = [
            {**asdict(p), "speedup": _bounds(p.speedup), "pays": p.pays, "sure": p.sure, "bound": BOUNDS[p.bound][0]}
            for p in each.predictions
        ]
        drafts.append(line)
    about = {"name": found.name, "prompts": [prompt.id for prompt in found.prompts], "plan": asdict(found.plan)}
    return {**about, "drafts": drafts, "exclusions": list(found.exclusions)}


def score_dict(scored: Sequence[Scored]) -> dict[str, Any]:
    """JSON-able: the tally and its settings."""
    settings = []
    for each in scored:
        about = {name: getattr(each, name) for name in ("name", "draft", "draft_length", "error", "right")}
        settings.append({**about, "predicted": _bounds(each.predicted), "measured": _bounds(each.measured)})
    return {**tally(scored), "scored": settings}


def _bounds(found: Interval) -> dict[str, float | None]:
    sides = {name: getattr(found, name) for name in ("value", "low", "high")}
    return {name: value if math.isfinite(value) else None for name, value in sides.items()}
