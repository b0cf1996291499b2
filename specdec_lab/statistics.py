"""Intervals for ratios of sums: a paired bootstrap over prompts. Knows numbers; not what they measure.

Prompts are resampled with replacement, all columns of a prompt together, so that what a prompt does to both
sides of a ratio cancels. Percentile intervals are too narrow for a dozen prompts; the percentiles are widened
as Hesterberg proposes (1411.5279, "expanded percentile interval").
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from specdec_lab import metrics, theory
from specdec_lab.errors import DataError, UnknownNameError, require
from specdec_lab.metrics import METRICS, Totals
from specdec_lab.trace import Trace

Formula = Callable[[Totals, Totals], float | None]  # of an arm and its baseline
RESAMPLES = 2000
HOLDS_BACK = 0.9  # coverage below which a drafter's length is not its draft length, and theory has no prediction
LEAST = 5  # prompts; fewer say too little about how prompts vary


@dataclass(frozen=True)
class Interval:
    """A value over all prompts and its interval; low and high are NaN below LEAST prompts, value where undefined."""

    value: float
    low: float
    high: float
    prompts: int

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))


def resampled_sums(
    columns: Mapping[str, ArrayLike], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, NDArray[np.float64]]:
    """Sums over prompts of each column [prompts]: [1 + resamples], the plain sum first, then the resampled ones.

    Every column is resampled by the same draws. NaN counts as nothing. Raises SettingError for columns of
    different lengths or without prompts, and for resamples < 1.
    """
    names = list(columns)
    values = [np.nan_to_num(np.asarray(columns[name], dtype=np.float64)) for name in names]
    counts = sorted({column.size for column in values})
    require("columns", counts, len(counts) == 1 and counts[0] > 0, "columns of one length, with a prompt at least")
    require("resamples", resamples, resamples >= 1, "an integer >= 1")
    prompts = counts[0]
    times = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), resamples)
    weights = np.vstack([np.ones((1, prompts)), times.astype(np.float64)])  # [1 + resamples, prompts]
    sums = weights @ np.stack(values, 1)  # [1 + resamples, columns]
    return {name: sums[:, index] for index, name in enumerate(names)}


def interval(samples: ArrayLike, prompts: int, level: float = 0.95) -> Interval:
    """The interval of a formula's samples [1 + resamples], as `resampled_sums` orders them; NaN is undefined."""
    require("level", level, 0 < level < 1, "0 < level < 1")
    nan, values = float("nan"), np.asarray(samples, dtype=np.float64)
    resampled = values[1:][np.isfinite(values[1:])]
    if prompts < LEAST or not np.isfinite(values[0]) or not resampled.size:
        return Interval(float(values[0]), nan, nan, prompts)
    tail = _tail(prompts, level)
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(float(values[0]), float(low), float(high), prompts)


def ratio_interval(
    numerators: ArrayLike,
    denominators: ArrayLike,
    baseline_numerators: ArrayLike | None = None,
    baseline_denominators: ArrayLike | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """(Σ numerators / Σ denominators), over the same of a baseline where one is given; each [prompts], paired."""
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    columns: dict[str, ArrayLike] = {"a": top, "b": bottom}
    columns["c"] = np.ones_like(top) if baseline_numerators is None else baseline_numerators
    columns["d"] = np.ones_like(top) if baseline_denominators is None else baseline_denominators
    sums = resampled_sums(columns, resamples, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval(sums["a"] / sums["b"] / (sums["c"] / sums["d"]), top.size, level)


def _tail(prompts: int, level: float) -> float:
    """The share to cut off on each side: Φ(−√(n/(n − 1)) t), t the quantile of Student's t at n − 1 degrees."""
    z, nu = NormalDist().inv_cdf(0.5 + level / 2), prompts - 1
    # Cornish-Fisher expansion of the t quantile (Abramowitz & Stegun 26.7.5)
    terms = (
        (z**3 + z) / (4 * nu),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3),
    )
    return NormalDist().cdf(-((prompts / nu) ** 0.5) * (z + sum(terms)))


def fronts(gain: ArrayLike, loss: ArrayLike) -> list[list[int]]:
    """Pareto fronts: what no other beats in both gain (higher is better) and loss (lower); then so of the rest, ….

    gain, loss: [n], free of NaN. Returns places in them; equals share a front.
    """
    gains, losses = np.asarray(gain, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    left, found = list(range(gains.size)), []
    while left:
        g, h = gains[left], losses[left]
        no_worse = (g[None] >= g[:, None]) & (h[None] <= h[:, None])  # [i, j]: j is no worse than i in either
        beaten = set(np.flatnonzero((no_worse & ~no_worse.T).any(1)).tolist())
        found.append([at for index, at in enumerate(left) if index not in beaten])
        left = [at for index, at in enumerate(left) if index in beaten]
    return found


# ---- tables of results (rows as experiment.load gives them)


def _alone(formula: Callable[[Totals], float | None]) -> Formula:
    return lambda t, plain: formula(t)


ARM = (  # fields of experiment.Arm
    "draft", "draft_length", "candidate_count", "branching", "acceptance_rule", "acceptance_threshold", "max_retries",
    "draft_temperature", "adaptive_threshold",
)  # fmt: skip
CONTEXT = ("part", "main", "task")
SIZES = ("main_parameters", "main_body_parameters", "draft_parameters", "draft_body_parameters")
SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "device")
MACHINE = ("dtype", "threads", "cpu", "gpu", "commit")
TEXT = ("quality", "nll", "repetition")  # what is said of a text as it stands
PROMPT = ["task", "prompt_id", "prompt_sha"]
TOTALS = tuple(field.name for field in fields(Totals))
ALONE = (
    metrics.throughput,
    metrics.end_to_end_throughput,
    metrics.time_to_first_token,
    metrics.tokens_per_main_forward,
    metrics.draft_acceptance_rate,
    metrics.acceptance_probability,
    metrics.expected_acceptance,
    metrics.coverage,
    metrics.fallback_ratio,
    metrics.refusal_ratio,
    metrics.overhead_share,
)
AGAINST = (metrics.speculative_speedup, metrics.end_to_end_speedup, metrics.draft_cost_ratio)
FORMULAS: dict[str, Formula] = {
    **{formula.__name__: formula for formula in AGAINST},
    **{formula.__name__: _alone(formula) for formula in ALONE},
}


def _arm(table: pd.DataFrame) -> list[str]:
    return [name for name in ARM if name in table]


def prompt_sums(rows: pd.DataFrame) -> pd.DataFrame:
    """Sums over repeats of every column of Totals, and of the baseline's: one row per (task, id, text's hash)."""
    columns = [*TOTALS, *(f"baseline_{name}" for name in TOTALS)]
    return rows.groupby(PROMPT)[columns].sum().astype(float)


def _resampled_totals(sums: pd.DataFrame, resamples: int, seed: int) -> list[tuple[Totals, Totals]]:
    """(arm, baseline) of all prompts, then of each resample."""
    drawn = resampled_sums({name: sums[name] for name in sums}, resamples, seed)
    ours, plain = (
        [Totals(*values) for values in np.stack([drawn[prefix + name] for name in TOTALS], 1).tolist()]
        for prefix in ("", "baseline_")
    )
    return list(zip(ours, plain, strict=True))


def _apply(formula: Formula, pairs: Sequence[tuple[Totals, Totals]]) -> NDArray[np.float64]:
    return np.array([formula(t, plain) for t, plain in pairs], dtype=np.float64)  # None becomes NaN


def quality_change(rows: pd.DataFrame, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Interval]:
    """quality_delta, nll_delta and repetition_delta of one arm's rows, as metrics.METRICS has them; positive is worse.

    Each row is held against the main model's own output on the same prompt and seed, in baseline_quality and so
    on; pairs where either has no value are left out, and an interval's `prompts` are those that are left. Exactly 0
    where all texts are the same. quality_delta is NaN where quality_better is not one of "higher" and "lower".
    """
    better = set(rows.quality_better)
    scored = rows if better in ({"higher"}, {"lower"}) else rows.iloc[:0]
    names = {"quality": scored, "nll": rows, "repetition": rows}
    drops = {"quality"} if better == {"higher"} else set()
    relative = {"quality", "nll"} - drops
    return {
        f"{name}_delta": _change(table, name, name in drops, name in relative, resamples, seed)
        for name, table in names.items()
    }


def _change(rows: pd.DataFrame, name: str, drop: bool, relative: bool, resamples: int, seed: int) -> Interval:
    """Mean rise (drop) of a column over the baseline's; relative: Σ of it over Σ of the baseline's.

    From differences, so that equal texts give 0 and not what rounding leaves of a quotient.
    """
    pairs = rows[[*PROMPT, name, f"baseline_{name}"]].dropna()
    if pairs.empty:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    now, before = (pairs[column].astype(float) for column in (name, f"baseline_{name}"))
    pairs = pairs[PROMPT].assign(change=before - now if drop else now - before, over=before if relative else 1.0)
    sums = pairs.groupby(PROMPT)[["change", "over"]].sum()  # over repeats
    return ratio_interval(sums["change"], sums["over"], resamples=resamples, seed=seed)


def summary(rows: pd.DataFrame, resamples: int = RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """One row per part and arm, the baseline among them: each metric, and its 95 % interval in _low and _high.

    Parts are never pooled, so a row stands for one setting on one machine; a setting that differs between parts
    is a column. quality_prompts: how many prompts quality_delta compares. same_as_baseline: share of greedy replies
    equal to the baseline's, token for token. predicted_speedup: theory.speedup of the measured α, c and verify-cost
    curve. NaN where undefined.
    """
    differing = [name for name in (*SETTINGS, *MACHINE) if name in rows and rows[name].nunique(dropna=False) > 1]
    return pd.DataFrame(
        _line(group, [*CONTEXT, *_arm(rows), *differing, *SIZES], resamples, seed)
        for _, group in rows.groupby(["part", *_arm(rows)], sort=False, dropna=False)
    )


def _line(rows: pd.DataFrame, context: Sequence[str], resamples: int, seed: int) -> dict[str, Any]:
    first, sums = rows.iloc[0], prompt_sums(rows)
    line = {name: first[name] for name in context} | {"prompts": len(sums)}
    pairs = _resampled_totals(sums, resamples, seed)
    found = {name: interval(_apply(formula, pairs), len(sums)) for name, formula in FORMULAS.items()}
    for name in ("quality", "repetition"):  # means over texts
        known = rows.groupby("prompt_id")[name].agg(["sum", "count"])  # a reply without a value counts as none
        found[name] = ratio_interval(known["sum"], known["count"], resamples=resamples, seed=seed)
    found |= quality_change(rows, resamples, seed)
    line["quality_prompts"] = found["quality_delta"].prompts
    for name, got in found.items():
        line |= {name: got.value, f"{name}_low": got.low, f"{name}_high": got.high}
    line |= _by_position(rows)
    traces, plain = ([Trace(0, memory_bytes=m) for m in rows[c]] for c in ("memory_bytes", "baseline_memory_bytes"))
    line |= {name: METRICS[name].of(traces, plain) for name in ("peak_memory", "memory_growth")}
    same = rows.same_as_baseline.dropna()
    line["same_as_baseline"] = float(same.astype(float).mean()) if len(same) else float("nan")
    return line | {"predicted_speedup": _predicted(first, line)}


def _by_position(rows: pd.DataFrame) -> dict[str, list[float]]:
    """Acceptance by position over all rows; their columns hold a list each."""
    names = ("drafted", "tried", "accepted")
    counts = {name: pd.DataFrame(rows[f"{name}_at"].tolist()).sum().tolist() for name in names}
    return {
        "acceptance_by_position": metrics.acceptance_by_position(counts),
        "acceptance_by_position_conditional": metrics.acceptance_by_position(counts, conditional=True),
    }


def _predicted(first: pd.Series, line: dict[str, Any]) -> float:
    """Of lossless chains that are as long as planned; theory knows no others."""
    alpha, c = line["acceptance_probability"], line["draft_cost_ratio"]
    one = first.get("candidate_count", 1) == 1 and pd.isna(first.get("adaptive_threshold"))
    chain = one and first.get("acceptance_rule", "lossless") == "lossless"
    if not chain or not np.isfinite([alpha, c]).all() or line["coverage"] < HOLDS_BACK:
        return float("nan")
    curve = theory.VerifyCurve(*(tuple(first[f"verify_{name}"]) for name in ("k", "ratio", "seconds")))
    return theory.speedup(alpha, int(first.draft_length), c, curve)


@dataclass(frozen=True)
class Comparison:
    """a over b: ratio of a metric and its interval."""

    metric: str
    ratio: float
    low: float
    high: float
    prompts: int

    @property
    def verdict(self) -> str:
        """ "higher" or "lower", speaking of a; "undecided" when the interval holds 1 or does not exist."""
        return "higher" if self.low > 1 else "lower" if self.high < 1 else "undecided"

    def __str__(self) -> str:
        words = {"throughput": {"higher": "a is faster", "lower": "a is slower"}}.get(self.metric, {})
        says = words.get(self.verdict, self.verdict if self.verdict == "undecided" else f"a is {self.verdict}")
        bounds = f"95 % interval {self.low:.3f} … {self.high:.3f}, {self.prompts} prompts"
        return f"{self.metric} of a over b: {self.ratio:.3f} ({bounds}): {says}"


def compare(
    a: pd.DataFrame, b: pd.DataFrame, value: str = "throughput", *, resamples: int = RESAMPLES, seed: int = 0
) -> Comparison:
    """Is a faster than b? The ratio of a metric between two arms, by a bootstrap over prompts, paired.

    a, b: rows of one arm each, e.g. rows[rows.draft == "1:3"]; value: a metric of FORMULAS. Arms of one part ran
    side by side; for parts measured at different times "speculative_speedup" takes each over its own baseline.
    Raises UnknownNameError for the metric, DataError when a or b holds several arms or the prompts differ.
    """
    if value not in FORMULAS:
        raise UnknownNameError("metric to compare", value, FORMULAS)
    for name, rows in (("a", a), ("b", b)):
        arms = rows[["main", *_arm(rows)]].drop_duplicates()
        if len(arms) != 1:
            told = [c for c in arms if c in ("main", "draft", "draft_length") or arms[c].nunique(dropna=False) > 1]
            held = list(arms[told].itertuples(index=False, name=None))
            raise DataError(f"{name} holds {len(arms)} arms, compare takes one: {held[:8]}")
        if rows.groupby("task").part.nunique().max() > 1:
            raise DataError(f"{name} mixes parts with different settings; pick one by the column `part`")
    left, right = prompt_sums(a), prompt_sums(b)
    if set(left.index) != set(right.index):
        only = ((n, sorted(x.index.difference(y.index))) for n, x, y in (("a", left, right), ("b", right, left)))
        lacking = "; ".join(f"only in {n}: {', '.join(_names(x))}" for n, x in only if x)
        raise DataError(f"a and b hold different prompts and cannot be paired; {lacking}")
    ours, theirs = (  # the same seed draws the same prompts for both
        _apply(FORMULAS[value], _resampled_totals(sums.loc[left.index], resamples, seed)) for sums in (left, right)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        got = interval(ours / theirs, len(left))
    return Comparison(value, got.value, got.low, got.high, got.prompts)


def _names(index: Sequence[tuple[str, str, str]]) -> list[str]:
    shown = [f"{prompt} ({task}, text {sha[:6]})" for task, prompt, sha in index[:12]]
    return shown + [f"and {len(index) - 12} more"] if len(index) > 12 else shown
