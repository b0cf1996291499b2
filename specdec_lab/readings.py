"""What a run's results say: under each figure a sentence, a table or two, and the verdict on the drafts.

Sentences are named as the figures of plots are, and take the same tables. Everything is Markdown, and claims only
what the intervals bear out. It derives no metric and draws nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specdec_lab import tables, theory
from specdec_lab.claims import RANGES, Ceiling, Example
from specdec_lab.metrics import METRICS
from specdec_lab.statistics import Interval, compare
from specdec_lab.tables import PARTS, arms_of, drafts_of, short, tasks_of, title
from specdec_lab.trace import Trace

TOLERANCE = 0.05  # loss of NLL or task score that still counts as equal quality


def number(value: float, digits: int = 2) -> str:
    """A value in words; "undefined" for NaN."""
    return f"{value:.{digits}f}" if np.isfinite(value) else "undefined"


def with_interval(row: Any, name: str, digits: int = 2, unit: str = "") -> str:
    """A metric of a summary's row, as "1.42× (1.35 … 1.50)"."""
    return bounded([float(getattr(row, key)) for key in (name, f"{name}_low", f"{name}_high")], digits, unit)


def bounded(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """The same of a value, its lower and its upper bound."""
    value, low, high = values
    if not np.isfinite(value):
        return "undefined"
    bounds = f"{low:.{digits}f} … {high:.{digits}f}" if np.isfinite([low, high]).all() else "no interval"
    return f"{value:.{digits}f}{unit} ({bounds})"


def _task(task: str) -> str:
    return f"**{title(task)}**"


def _arm(row: Any) -> str:
    return f"{short(row.draft)} with γ = {row.draft_length}"


def highest(line: pd.DataFrame, name: str) -> Any:
    """The row with the highest value; None where it is undefined everywhere."""
    known = line[np.isfinite(line[name].to_numpy(float))]
    return None if known.empty else next(known.sort_values(name, ascending=False, kind="stable").itertuples())


def _judged(row: Any, name: str = "speculative_speedup") -> str:
    """Whether an arm is "faster" than the plain loop, "slower" or "undecided"."""
    return (
        "faster" if getattr(row, f"{name}_low") > 1 else "slower" if getattr(row, f"{name}_high") < 1 else "undecided"
    )


# ---- sentences


def throughput(arms: pd.DataFrame) -> str:
    """Which arm is fastest, and whether it is the one with the highest α."""
    table, said = arms_of(arms, "acceptance_probability", "throughput"), []
    for task in tasks_of(table):
        line = table[table.task == task]
        fastest, closest = highest(line, "throughput"), highest(line, "acceptance_probability")
        if fastest is None:
            said.append(f"{_task(task)}: nothing was decoded")
            continue
        plain = arms[(arms.task == task) & (arms.draft == "none")].throughput.dropna()
        ends = [f"{value:.1f}" for value in ([plain.min(), plain.max()] if len(plain) > 1 else plain)]
        beside = f" against {' … '.join(ends)} of the plain loop" if ends else ""
        speed = with_interval(fastest, "throughput", 1)
        text = f"{_task(task)}: {_arm(fastest)} is fastest with {speed} tokens/s{beside}"
        if closest is not None:
            alpha = with_interval(closest, "acceptance_probability")
            same = (closest.draft, closest.draft_length) == (fastest.draft, fastest.draft_length)
            text += f", and has the highest α, {alpha}" if same else (
                f", at α = {number(fastest.acceptance_probability)}; the highest α, {alpha}, is that of "
                f"{_arm(closest)}, which is not the fastest"
            )  # fmt: skip
        said.append(text)
    return ". ".join(said) + "."


def speedup(arms: pd.DataFrame) -> str:
    """How many arms are faster than the plain loop, the best ones, and whether theory agrees."""
    table = arms_of(arms, "speculative_speedup", "predicted_speedup")
    sides = [_judged(row) for row in table.itertuples()]
    said = [
        f"Of {len(table)} settings {sides.count('faster')} are faster than the plain loop, {sides.count('slower')} "
        f"slower and {sides.count('undecided')} undecided "
        "(the 95 % interval holds 1×, or there are too few prompts for one)"
    ]
    for task in tasks_of(table):
        best = highest(table[table.task == task], "speculative_speedup")
        if best is not None:
            said.append(f"{_task(task)}: best is {_arm(best)}, {with_interval(best, 'speculative_speedup', unit='×')}")
    return ". ".join([*said, prediction(arms)])


def prediction(arms: pd.DataFrame) -> str:
    """Whether theory.speedup of the measured α, c and T(k) agrees with the measured speed-up."""
    table = arms_of(arms, "speculative_speedup", "predicted_speedup")
    known = table[np.isfinite(table[["speculative_speedup", "predicted_speedup"]].to_numpy(float)).all(1)]
    if known.empty:
        return "There is no prediction, since nothing was drafted."
    off = known.predicted_speedup / known.speculative_speedup - 1
    worst = known.loc[off.abs().idxmax()]
    inside = known.predicted_speedup.between(known.speculative_speedup_low, known.speculative_speedup_high)
    agrees = f"lies inside the measured interval in {int(inside.sum())} of {len(known)} settings and "
    return (
        f"The prediction {agrees if known.speculative_speedup_low.notna().any() else ''}is off by "
        f"{off.abs().median():.0%} in the median, at most by {off[worst.name]:+.0%} "
        f"({title(worst.task)}, {_arm(worst)})."
    )


def break_even(rows: pd.DataFrame, arms: pd.DataFrame) -> str:
    """Under plots.prediction: from which α an arm pays, and which draft length theory calls best."""
    said = []
    for arm in arms_of(arms, "acceptance_probability", "draft_cost_ratio").itertuples():
        known = tables.theory_of(rows, arm)
        if known is None:
            said.append(f"{_task(arm.task)}: {_arm(arm)} drafted nothing, so there is no prediction.")
            continue
        alpha, c, curve = known
        from_alpha = theory.break_even(int(arm.draft_length), c, curve)
        pays = "at no α" if from_alpha is None else f"above α = {from_alpha:.2f}"
        best = theory.best_draft_length(alpha, c, curve)
        said.append(
            f"{_task(arm.task)}: {_arm(arm)} pays {pays}; α is {with_interval(arm, 'acceptance_probability')} "
            f"and c {c:.3f}. Theory expects {number(arm.predicted_speedup)}×, measured is "
            f"{with_interval(arm, 'speculative_speedup', unit='×')}; it calls γ = {best} best, with "
            f"{theory.speedup(alpha, best, c, curve):.2f}×."
        )
    return " ".join(said)


def positions(rows: pd.DataFrame) -> str:
    """Under plots.acceptance_by_position: whether a tried token stays as often at the last position as at the first."""
    tried, said = tables.positions(rows, "tried"), []
    for task in tasks_of(rows):
        line = tried[(tried.task == task) & tried.value.notna()]
        goes = []
        for draft, values in line.groupby("draft", sort=False):
            first, last = values.iloc[0], values.iloc[-1]
            falls, rises = last.value_high < first.value_low, last.value_low > first.value_high
            change = "clearly falls" if falls else "clearly rises" if rises else "no clear change"
            goes.append(f"{short(str(draft))} {first.value:.2f} → {last.value:.2f} ({change})")
        said.append(f"{_task(task)}: {', '.join(goes) or 'nothing was drafted'}")
    return (
        f"Of the tokens tried at a position, this share stays, at the first → at the last one: {'; '.join(said)}. "
        "Where it stays level, one α describes all positions."
    )


def verify(rows: pd.DataFrame) -> str:
    """Under plots.verify_cost: what a few tokens in one forward cost."""
    curves = tables.curves(rows)
    median, spread = curves.median(axis=1), (curves.max(axis=1) - curves.min(axis=1)).max()
    told = [k for k in (3, 5, 9) if k in median.index] or list(median.index[-1:])
    costs = ", ".join(f"{k} tokens cost {median[k]:.2f}×" for k in told)
    times = curves.shape[1]
    measured = "measured once" if times == 1 else f"median of {times} measurements, up to {spread:.2f} apart"
    return (
        f"In one forward {costs} what one token costs ({measured}); a draft pays only when its step brings more tokens "
        "than that and its own time together."
    )


def time_split(rows: pd.DataFrame) -> str:
    """Why the best arm of each task is, or is not, faster."""
    table, said = tables.split(rows), []
    for task in tasks_of(table):
        best = highest(table[table.task == task], "gain")
        if best is None:
            said.append(f"{_task(task)}: nothing was decoded")
            continue
        parts = ", ".join(f"{part} {getattr(best, f'{part}_time'):.2f}" for part in PARTS)
        said.append(
            f"{_task(task)}: a step of {_arm(best)}, its best, takes {best.cost:.2f} plain steps of time ({parts}) and "
            f"emits {best.tau:.2f} tokens: {with_interval(best, 'gain', unit='×')}, {_judged(best, 'gain')}"
        )
    return ". ".join(said) + "."


def trace(trace: Trace) -> str:
    """Under plots.trace_strip: what became of the drafted tokens."""
    kinds = [step.next_kind for step in trace.steps]
    accepted = sum(step.fate.count("accepted") for step in trace.steps)
    drafted = sum(len(step.drafted) for step in trace.steps)
    refused = kinds.count("refused")
    again = f", {refused} refused the draft, which was drawn anew" if refused else ""
    return (
        f"{len(trace.tokens)} tokens in {len(trace.steps)} main forwards: of {drafted} drafted tokens {accepted} were "
        f"accepted; {kinds.count('recovered')} steps ended with a recovered token after a rejection, "
        f"{kinds.count('bonus')} with a bonus token after a whole draft, {kinds.count('plain')} drafted nothing"
        f"{again}. Ended by: {trace.finish or 'the caller'}."
    )


def training(history: Sequence[tuple[int, int, float]]) -> str:
    """How far the loss fell."""
    if not history:
        return "Nothing was trained in this call: the draft was done before, or training was left out."
    (_, first, start), (step, last, end) = history[0], history[-1]
    return (
        f"From {first:,} to {last:,} training tokens ({step:,} steps) the cross-entropy to the main model went from "
        f"{start:.3f} to {end:.3f} nats a token (running mean; it cannot fall below the main model's own entropy)."
    )


def match(matches: Mapping[str, Interval]) -> str:
    """Under plots.greedy_match: the shares and their intervals."""
    said = [
        f"{_task(task)} {got.value:.2f} ({f'{got.low:.2f} … {got.high:.2f}' if got.known else 'no interval'})"
        for task, got in matches.items()
    ]
    return f"The draft's first choice is the main model's next token in this share of places: {', '.join(said)}."


# ---- a grid of settings (arms: tuning.standings)


def threshold_heat(arms: pd.DataFrame) -> str:
    """Under plots.threshold_heat: the fastest setting of each rule in the first round."""
    table, said = tables.cells_of(arms, "speculative_speedup"), []
    table = table[table["round"] == 1]
    for task in tasks_of(table):
        line = table[table.task == task]
        rules = dict.fromkeys(line.acceptance_rule)
        best = [highest(line[line.acceptance_rule == rule], "speculative_speedup") for rule in rules]
        told = [f"{tables.cell(row)}: {row.speculative_speedup:.2f}×" for row in best if row is not None]
        said.append(f"{_task(task)}: {'; '.join(told) or 'nothing was measured'}")
    count = int(table.prompts.max())
    share = f"{count} prompt{'s' if count > 1 else ''} a task"
    return f"The fastest setting of each rule, of {len(table) // len(said)}, on {share}. {'. '.join(said)}."


def optimum(rows: pd.DataFrame, arms: pd.DataFrame) -> str:
    """Under plots.pareto: per task the best setting, and whether a lossy rule beats lossless ones at equal quality.

    Of the last round. Faster: the interval of the paired ratio lies above 1. Equal: the intervals of nll_delta and,
    where it has one, of quality_delta end below TOLERANCE. Worse: one of them begins above 0.
    """
    table = tables.latest(tables.cells_of(arms, "speculative_speedup", "nll_delta", "quality_delta"))
    lines = [f"* {_task(task)}: {_optimum(rows, table[(table.task == task) & table.kept])}" for task in tasks_of(table)]
    head = f"Equal quality: NLL and task score are at most {TOLERANCE:.0%} worse, by the ends of their intervals."
    return "\n".join([head, "", *lines])


def _optimum(rows: pd.DataFrame, line: pd.DataFrame) -> str:
    best = highest(line[line.acceptance_rule == "lossless"], "speculative_speedup")
    lossy = line[line.acceptance_rule != "lossless"].sort_values("speculative_speedup", ascending=False)
    if best is None:
        return "no lossless setting was measured."
    said = [f"best without loss is {tables.cell(best)}, {with_interval(best, 'speculative_speedup', unit='×')}"]
    judged: dict[str, list[str]] = {"equal": [], "worse": [], "undecided": []}
    for row in lossy.itertuples():
        got = compare(tables.rows_of(rows, row), tables.rows_of(rows, best), "speculative_speedup")
        if got.verdict == "higher":
            over = f"{got.ratio:.2f} ({number(got.low)} … {number(got.high)}) times as fast"
            judged[_quality(row)].append(f"{tables.cell(row)} is {over}, NLL {rise(row)}")
    if judged["equal"]:
        said.append(f"at equal quality a lossy rule beats it: {judged['equal'][0]}")
    else:
        said.append("no lossy rule beats it at equal quality, as far as intervals tell")
    if judged["worse"]:
        said.append(f"speed for quality: {judged['worse'][0]}")
    if judged["undecided"]:
        said.append(f"faster, with its quality undecided: {judged['undecided'][0]}")
    return "; ".join(said) + "."


def _quality(row: Any) -> str:
    """Whether an arm's quality is "equal" to the main model's, "worse" or "undecided"."""
    ends = [[getattr(row, f"{name}_{end}") for end in ("low", "high")] for name in ("nll_delta", "quality_delta")]
    known = [pair for pair in ends if np.isfinite(pair).all()]
    if any(low > 0 for low, _ in known) and any(high > TOLERANCE for _, high in known):
        return "worse"
    told = known and np.isfinite(ends[0]).all()
    return "equal" if told and all(high <= TOLERANCE for _, high in known) else "undecided"


def rise(row: Any) -> str:
    """What a lossy arm does to the NLL, as "+3 % (-1 % … +8 %)"."""
    values = [getattr(row, f"nll_delta{end}") for end in ("", "_low", "_high")]
    told = [f"{value:+.0%}" if np.isfinite(value) else "undefined" for value in values]
    return f"{told[0]} ({told[1]} … {told[2]})" if np.isfinite(values).all() else told[0]


def grid_table(arms: pd.DataFrame) -> pd.DataFrame:
    """One line per task and setting of the last round, fastest first, ready to print."""
    table = tables.latest(tables.cells_of(arms, "speculative_speedup", "nll_delta", "quality_delta", "fallback_ratio"))
    table = table[table.kept].sort_values("speculative_speedup", ascending=False, kind="stable")
    table = table.sort_values("task", key=lambda x: x.map(tasks_of(table).index), kind="stable")
    fronts = pd.concat([tables.front(line) for _, line in table.groupby("task", sort=False)])
    return pd.DataFrame(
        {
            "task": table.task.map(title),
            "setting": [tables.cell(row) for row in table.itertuples()],
            "speed-up (95 % interval)": [with_interval(r, "speculative_speedup", unit="×") for r in table.itertuples()],
            "NLL": [rise(row) for row in table.itertuples()],
            "score lost": [_lost(row) for row in table.itertuples()],
            "repetition": table.repetition_delta.map(lambda x: f"{x:+.2f}"),
            "fallback": table.fallback_ratio.map(number),
            "prompts": table.prompts,
            "on the front": ["yes" if on else "" for on in fronts],
        }
    ).reset_index(drop=True)


def _lost(row: Any) -> str:
    """quality_delta with its number of prompts; JSON and code that a length limit cut have no score."""
    return f"{row.quality_delta:+.2f}, n = {row.quality_prompts:.0f}" if np.isfinite(row.quality_delta) else "–"


# ---- tables and verdict


def sweep_table(arms: pd.DataFrame) -> pd.DataFrame:
    """One line per task, draft and draft length, ready to print: speed-up, interval, prediction, α, τ, c."""
    table = arms_of(
        arms, "speculative_speedup", "acceptance_probability", "tokens_per_main_forward", "draft_cost_ratio"
    )
    table = table.sort_values("task", key=lambda x: x.map(tasks_of(table).index), kind="stable")
    speedups = [with_interval(row, "speculative_speedup", unit="×") for row in table.itertuples()]
    return pd.DataFrame(
        {
            "task": table.task.map(title),
            "draft": table.draft.map(short),
            "length": table.draft_length,
            "speed-up (95 % interval)": speedups,
            "predicted": [f"{number(value)}×" for value in table.predicted_speedup],
            "α": table.acceptance_probability.map(number),
            "τ": table.tokens_per_main_forward.map(number),
            "c": table.draft_cost_ratio.map(number),
            "tokens/s": [number(value, 1) for value in table.throughput],
            "same tokens": table.same_as_baseline.map(lambda x: f"{x:.0%}" if np.isfinite(x) else "–"),
        }
    ).reset_index(drop=True)


def metrics_table(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Every metric of METRICS that a summary's row has: name, value, 95 % interval, unit, formula."""
    out = []
    for name, spec in METRICS.items():
        if name in summary:
            values = np.atleast_1d(np.asarray(summary[name], dtype=float))
            low, high = (float(summary.get(f"{name}_{end}", np.nan)) for end in ("low", "high"))
            bounds = f"{low:.4g} … {high:.4g}" if np.isfinite([low, high]).all() else "–"
            shown = " ".join(f"{value:.4g}" if np.isfinite(value) else "undefined" for value in values)
            out.append((name, shown or "undefined", bounds, spec.unit, spec.formula))
    return pd.DataFrame(out, columns=["metric", "value", "95 % interval", "unit", "formula"])


def as_markdown(table: pd.DataFrame) -> str:
    """A table of texts as Markdown, nothing cut off."""
    lines = [list(table.columns), ["---"] * table.shape[1], *table.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def verdict(rows: pd.DataFrame, arms: pd.DataFrame, draft: str = "1:3") -> str:
    """Per task, whether `draft` is the best one, by paired comparison with every other draft.

    Each draft stands at its fastest draft length. Speed-ups are compared, so that each counts against the plain
    loop measured beside it. Undecided where an interval holds 1. A draft that is not there gives way to the
    fastest of all.
    """
    table, lines = arms_of(arms, "speculative_speedup"), []
    for task in tasks_of(table):
        line = table[table.task == task]
        found = {name: highest(line[line.draft == name], "speculative_speedup") for name in drafts_of(line)}
        best = {name: row for name, row in found.items() if row is not None}
        if not best:
            lines.append(f"* {_task(task)}: undecided, nothing was measured.")
            continue
        ours = best.get(draft) or max(best.values(), key=lambda row: row.speculative_speedup)
        over = with_interval(ours, "speculative_speedup", unit="×")
        plain = _judged(ours).replace("undecided", "neither faster nor slower for certain")
        against, said = set(), [f"It is {plain} than the plain loop, {over}"]
        for other in best.values():
            if other.draft != ours.draft:
                got = compare(tables.rows_of(rows, ours), tables.rows_of(rows, other), "speculative_speedup")
                against.add(got.verdict)
                said.append(f"{got.ratio:.2f} ({number(got.low)} … {number(got.high)}) times {_arm(other)}")
        judged = "not best" if "lower" in against else "undecided" if "undecided" in against else "best"
        text = ", ".join([said[0], *([f"and {said[1]}", *said[2:]] if against else [])])
        lines.append(f"* {_task(task)}: {_arm(ours)} is **{judged if against else 'alone'}**. {text}.")
    sizes = tables.sizes(arms, "{} in all", "{} without embedding")
    names = [short(name, 24) + (f" ({', '.join(said)})" if said else "") for name, said in sizes.items()]
    head = f"Drafts, each at its fastest length: {'; '.join(names)}. Undecided: an interval holds 1."
    return "\n".join([head, "", *lines, "", prediction(arms)])


# ---- the report


SYMBOLS = {"draft_length": "γ", "candidate_count": "K", "acceptance_threshold": "threshold"}


def possible(found: Sequence[Ceiling], how: Example) -> str:
    """Under plots.ceilings: which claims can be under which meaning, and the α that accepted / drafted stands for."""
    lines = []
    for claim in dict.fromkeys(ceiling.claim for ceiling in found):
        said = "; ".join(allowed([ceiling for ceiling in found if ceiling.claim == claim]))
        alpha = theory.alpha_of(claim.acceptance, how.draft_length)
        lines.append(
            f"* {_task(claim.task)}, {claim.speedup}×: {said}. As accepted / drafted at γ = {how.draft_length}, "
            f"{claim.acceptance:.1%} would be α = {alpha:.2f}, were all positions alike."
        )
    head = "Stars: the claims; hatched: what no single candidate reaches, whatever it costs."
    return "\n".join([head, "", *lines])


def allowed(found: Sequence[Ceiling]) -> list[str]:
    """Of one claim: each verdict and the meanings it holds under, as "possible if the rate is …"."""
    verdicts: dict[str, list[str]] = {}
    for ceiling in found:
        verdicts.setdefault(ceiling.verdict, []).append(ceiling.meaning.name)
    return [f"{verdict} if the rate is {' or '.join(names)}" for verdict, names in verdicts.items()]


def settings(arms: pd.DataFrame) -> str:
    """Under plots.settings: whether higher acceptance means more speed, and where the fastest setting lies."""
    table, said = arms[arms.draft != "none"], []
    known = table[table.speculative_speedup_low.notna()]
    for task in tasks_of(table):
        own, told = table[table.task == task], known[known.task == task]
        fastest = highest(told if len(told) else own, "speculative_speedup")
        if fastest is None:
            said.append(f"* {_task(task)}: nothing was decoded.")
            continue
        rank = own[["acceptance_probability", "throughput"]].rank().corr().iloc[0, 1]
        asked = dict(RANGES)
        if fastest.acceptance_rule not in ("block", "sequence"):  # which the articles' thresholds are of
            del asked["acceptance_threshold"]
        out = [f"{SYMBOLS[name]} {getattr(fastest, name):g}" for name, (low, high) in asked.items()
               if not pd.isna(getattr(fastest, name)) and not low <= getattr(fastest, name) <= high]  # fmt: skip
        price = "" if fastest.acceptance_rule == "lossless" else f", lossy, NLL {rise(fastest)}"
        where = f"outside the articles' ranges ({', '.join(out)})" if out else "inside the articles' ranges"
        said.append(
            f"* {_task(task)}: of {len(own)} settings the fastest is {short(fastest.draft)}, {tables.cell(fastest)}, "
            f"with {with_interval(fastest, 'speculative_speedup', unit='×')}{price}, {where}; rank correlation of α "
            f"and throughput {number(rank)}."
        )
    head = "Fastest of those with an interval, where any has one. Small points have none, on too few prompts for it."
    return "\n".join([head, "", *said])


def entropy(rows: pd.DataFrame) -> str:
    """Under plots.entropy: how much of the tasks' differences in α their entropies explain, and what is left."""
    known, said = tables.tried(rows), []
    halves = [
        f"{_task(task)} {own.entropy.median():.2f} ({own.stays.mean():.2f} of its tried tokens stay)"
        for task in tasks_of(known)
        for own in [known[known.task == task]]
    ]
    for pair in tables.entropy_parts(rows).itertuples():
        total, of_entropy, at_equal = (with_interval(pair, name) for name in ("total", "of_entropy", "at_equal"))
        text = f"{_task(pair.task)} − {_task(pair.other)}: {total}, of it {of_entropy} as entropies differ"
        apart = pair.total_low > 0 or pair.total_high < 0
        share = f" ({pair.of_entropy / pair.total:.0%})" if apart else ""
        left = "no clear difference" if not (pair.at_equal_low > 0 or pair.at_equal_high < 0) else (
            f"a clear difference, {title(pair.task if pair.at_equal > 0 else pair.other)} accepting more"
        )  # fmt: skip
        said.append(f"* {text}{share}, and {at_equal} at equal entropy: {left}.")
    head = (
        f"Median entropy in nats of what was tried: {', '.join(halves)}. Differences in α between tasks, split in two:"
    )
    return "\n".join([head, "", *said]) if said else head.removesuffix(" Differences in α between tasks, split in two:")


def entropy_positions(rows: pd.DataFrame) -> str:
    """Under plots.entropy_positions: how both change from the first position to the last one with an interval."""
    table, said = tables.entropy_positions(rows), []
    for task in tasks_of(table):
        line = table[(table.task == task) & table.stays_low.notna()]
        if len(line) < 2:
            said.append(f"* {_task(task)}: too few prompts or positions to tell.")
            continue
        first, last = (next(line.iloc[[at]].itertuples()) for at in (0, -1))
        told = []
        for name, what in (("stays", "acceptance"), ("entropy", "mean entropy")):
            a, b = (getattr(row, name) for row in (first, last))
            falls = getattr(last, f"{name}_high") < getattr(first, f"{name}_low")
            rises = getattr(last, f"{name}_low") > getattr(first, f"{name}_high")
            change = "clearly falls" if falls else "clearly rises" if rises else "no clear change"
            told.append(f"{what} {a:.2f} → {b:.2f} ({change})")
        said.append(f"* {_task(task)}, position {first.position} → {last.position}: {', '.join(told)}.")
    head = (
        "Only places behind accepted tokens are tried, so that later positions stand for the parts of a text on which "
        "draft and main model agree."
    )
    return "\n".join([head, "", *said])
