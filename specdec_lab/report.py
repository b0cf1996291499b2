"""The report: what was measured, beside what the articles claim. Each function gives the pieces under one heading.

What the claims allow is in claims, how results are read in results, what figures look like in plots.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specdec_lab import plots, readings, tables
from specdec_lab.claims import (
    BEST_RATIO,
    CLAIMS,
    HARDWARE,
    MEANINGS,
    MEMORY,
    UNMEASURED,
    Ceiling,
    Claim,
    Example,
    ceilings,
)
from specdec_lab.models.zoo import RATIOS
from specdec_lab.page import Picture, Piece
from specdec_lab.readings import with_interval
from specdec_lab.results import Results
from specdec_lab.tables import title
from specdec_lab.theory import VerifyCurve

SHOWN = {"acceptance_probability": "α", "draft_acceptance_rate": "accepted / drafted"}


def sources(results: Results) -> list[Piece]:
    """What was read, on which machine, and what is missing."""
    said = []
    for name, rows in (("Sweep", results.sweep), ("Grid", results.grid)):
        if rows is not None:
            first, dates = rows.iloc[0], sorted(rows.date.str[:10])
            how = "greedy" if first.temperature == 0 else f"temperature {first.temperature:g}"
            counts = sorted(set(rows.groupby("part").prompt_id.nunique()))
            said.append(
                f"{name}: main model {tables.short(first.main)} ({first.main_parameters / 1e6:.1f} M parameters), "
                f"{how}, up to {first.max_new_tokens:.0f} new tokens, {' … '.join(map(str, counts))} prompts a task; "
                f"{_machine(first)}, {first['dtype']}; {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}."
            )
    if results.bench is not None:
        plan, machine = results.bench["plan"], results.bench["machine"]
        said.append(
            f"Benchmark: profile `fastest`, greedy, {plan['max_new_tokens']} new tokens, {plan['prompts']} prompts a "
            f"task; {_machine(machine)}; {machine['date'][:10]}."
        )
    return ["\n".join(f"* {line}" for line in [*said, *results.notes])]


def _machine(row: Mapping[str, Any] | pd.Series) -> str:
    many = "" if row["threads"] == 1 else "s"
    return f"{row['gpu'] or row['cpu']}, {row['threads']:.0f} thread{many}"


def measured(results: Results, how: Example) -> list[Piece]:
    """The articles' two tables with our rows beside them, and a verdict on each claim."""
    ours = {claim.task: _ours(results, claim.task, how) for claim in CLAIMS}
    lines = [line for claim in CLAIMS for line in [*_claimed(claim), *(line for line, _ in ours[claim.task])]]
    text = (
        "Speed-ups of the articles stand as claimed; they give no intervals, and do not say what their rate is a share "
        "of (hence ?). Ours are decoding alone, prefill left out, over the plain loop beside it, with 95 % intervals "
        "(bootstrap over prompts). *Lossless*: by the rule; greedy replies are then the main model's own, but for ties "
        "that low precision turns. The best of many settings is a little less good than it looks, as its prompts had a "
        "say in the picking."
    )
    verdicts = [f"* {_verdict(claim, ours[claim.task], how)}" for claim in CLAIMS]
    return [text, pd.DataFrame(lines), "\n".join(verdicts)]


def _claimed(claim: Claim) -> list[dict[str, str]]:
    first = {"task": title(claim.task), "row": "article 1", "setting": "not said", "text": "“acceptable impact”"}
    first |= {"speed-up (95 %)": f"{claim.speedup}×", "tokens/s, plain → drafting": "–"}
    rate = f"{claim.acceptance:.1%}?"
    first |= {"α": rate, "accepted / drafted": rate, "prompts": "–", "hardware": HARDWARE["article 1"]}
    second = {"row": "article 2", "text": "“preserving output quality”", "hardware": HARDWARE["article 2"]}
    second |= {"tokens/s, plain → drafting": f"{claim.plain:,.0f} → {claim.drafting:,.0f}"}
    return [first, first | second]


Line = tuple[dict[str, str], tuple[float, float, float] | None]  # ready to print; speed-up, low and high if lossless


def _ours(results: Results, task: str, how: Example) -> list[Line]:
    """Our rows of one task: ratios, best lossless, fastest lossy, the articles' setting, the fastest profile."""
    out: list[Line] = []
    if results.arms is not None:
        arms = results.arms[(results.arms.task == task) & (results.arms.draft != "none")]
        arms = arms[np.isfinite(arms.speculative_speedup.to_numpy(float))]
        known = arms[arms.speculative_speedup_low.notna()]
        arms = arms if known.empty else known  # what has no interval only where nothing has one
        lossless, lossy = (arms[(arms.acceptance_rule == "lossless") == side] for side in (True, False))
        swept = lossless[lossless.part.isin(set(() if results.sweep is None else results.sweep.part))]
        for ratio in RATIOS:
            out += _line(results, swept[swept.draft == ratio], f"{ratio}, its best length")
        out += _line(results, lossless, "best without loss")
        out += _line(results, lossy, "fastest with loss")
        blocks = results.arms[(results.arms.task == task) & (results.arms.acceptance_rule == "block")]
        out += _line(results, _nearest(blocks, how), "nearest to the articles' example")
    return out + _bench_line(results, task)


def _line(results: Results, arms: pd.DataFrame, row: str) -> list[Line]:
    """The fastest of some arms as a line of the table; nothing where there is none."""
    best = readings.highest(arms, "speculative_speedup")
    if best is None:
        return []
    lossless, speed = best.acceptance_rule == "lossless", float(best.throughput)
    bounds = best.speculative_speedup, best.speculative_speedup_low, best.speculative_speedup_high
    same = f", {best.same_as_baseline:.0%} same" if lossless and best.same_as_baseline < 1 else ""
    line = {
        "task": title(best.task),
        "row": row,
        "setting": f"{tables.short(best.draft)}, {tables.cell(best).removeprefix('lossless, ')}",
        "text": f"lossless{same}" if lossless else f"lossy, NLL {readings.rise(best)}",
        "speed-up (95 %)": with_interval(best, "speculative_speedup", unit="×"),
        "tokens/s, plain → drafting": f"{speed / best.speculative_speedup:.1f} → {speed:.1f}",
        **{name: with_interval(best, column) for column, name in SHOWN.items()},
        "prompts": f"{best.prompts:.0f}",
        "hardware": _machine(results.parts.loc[best.part]),
    }
    return [(line, bounds if lossless else None)]


def _nearest(blocks: pd.DataFrame, how: Example) -> pd.DataFrame:
    """The arms of the block rule at the example's threshold, length and candidates, or as near as there are."""
    if blocks.empty:
        return blocks
    far = pd.DataFrame(
        {
            "threshold": (blocks.acceptance_threshold - how.threshold).abs().round(6),
            "length": np.log2(blocks.draft_length / how.draft_length).abs(),
            "candidates": np.log2(blocks.candidate_count / how.candidate_count).abs(),
        }
    )
    nearest = far.sort_values(list(far)).iloc[0]
    return blocks[(far == nearest).all(axis=1)]


def _bench_line(results: Results, task: str) -> list[Line]:
    """The profile `fastest` in the benchmark, prefill left out as in the other rows."""
    bench = results.bench or {"rows": ()}
    found = {row["arm"]: row for row in bench["rows"] if row["task"] == task and row.get("decode_speedup")}
    if {"plain", "fastest"} - set(found):
        return []
    row, machine = found["fastest"], bench["machine"]
    value, low, high = _values(row["decode_speedup"])
    alpha, told = _values(row["alpha"]), readings.bounded([value, low, high], unit="×")
    same = "lossless" if row["same"] == row["prompts"] else f"lossless, {row['same']} of {row['prompts']} same"
    plain, ours = found["plain"]["decode_throughput"], row["decode_throughput"]
    line = {"task": title(task), "row": "profile `fastest` (benchmark)", "setting": f"γ ≤ {row['draft_length']}"}
    line |= {"text": same, "speed-up (95 %)": told, "tokens/s, plain → drafting": f"{plain:.1f} → {ours:.1f}"}
    line |= {"α": readings.bounded(alpha), "accepted / drafted": "–", "prompts": str(row["prompts"])}
    line |= {"hardware": _machine(machine)}
    return [(line, (value, low, high))]


def _values(found: Mapping[str, Any]) -> list[float]:
    """Value, low and high of an interval in JSON, NaN where there is none."""
    return [float("nan" if found[key] is None else found[key]) for key in ("value", "low", "high")]


def _verdict(claim: Claim, ours: Sequence[Line], how: Example) -> str:
    """Whether the claimed speed-up was reproduced without loss, by the interval of the best row; and can be at all."""
    own = [ceiling for ceiling in ceilings(how) if ceiling.claim == claim]
    can = "".join(f"; {said}" for said in readings.allowed(own) if said.startswith("impossible"))
    head = f"**{title(claim.task)}**, {claim.speedup}× at {claim.acceptance:.1%}: "
    rows = [(line, bounds) for line, bounds in ours if bounds]
    if not rows:
        return f"{head}**not measured yet**{can}."
    line, (_, low, high) = max(rows, key=lambda row: row[1][0])
    judged = "reproduced" if low >= claim.least else "not reproduced" if high < claim.least else "undecided"
    return f"{head}**{judged}**: {line['row']} reaches {line['speed-up (95 %)']} without loss, at α {line['α']}{can}."


def costs(results: Results) -> dict[str, tuple[float, VerifyCurve]]:
    """Per task the c of the cheapest draft of the sweep, and the median of the sweep's verify-cost curves."""
    if results.sweep is None or results.sweep_arms is None:
        return {}
    median = tables.curves(results.sweep).dropna().median(axis=1)
    curve = VerifyCurve(tuple(median.index), tuple(median), tuple(median))
    arms = results.sweep_arms[results.sweep_arms.draft != "none"]
    cheapest = arms.groupby("task").draft_cost_ratio.min().dropna()
    return {str(task): (float(c), curve) for task, c in cheapest.items()}


def possible(results: Results, how: Example) -> list[Piece]:
    """What each meaning of "acceptance rate" allows each claim, whatever it costs and at the measured costs."""
    known = costs(results)
    found = list(ceilings(how, known))
    means = "\n".join(f"* **{meaning.name}**: {meaning.why}." for meaning in MEANINGS)
    head = (
        "A step is never cheaper than a plain one, so the speed-up is at most the tokens per main forward. How many "
        f"those can be depends on what the rate is a share of (γ = {how.draft_length}, K = {how.candidate_count}, "
        f"{how.tries} tries are the articles' examples):"
    )
    lines = [_ceiling_line(ceiling) for ceiling in found]
    said = readings.possible(found, how)
    at = "; ".join(f"{title(task)} c = {c:.3f}" for task, (c, _) in known.items())
    about = (
        f"Our costs: those of the cheapest draft of the sweep ({at}) and the median of its verify-cost curves, "
        "positions being alike; other hardware has others. "
    ) * bool(at)
    table = pd.DataFrame(lines)
    picture = Picture("ceilings", plots.ceilings(results.arms, how), said)
    return [head, means, table, about + "Rounding counts in a claim's favour.", picture]


def _ceiling_line(ceiling: Ceiling) -> dict[str, str]:
    claim = ceiling.claim
    shown = [f"{x:.2f}×" if np.isfinite(x) else "no limit" for x in (ceiling.alone, ceiling.several)]
    return {
        "task": title(claim.task),
        "claim": f"{claim.speedup}× at {claim.acceptance:.1%}",
        "if the rate is": ceiling.meaning.name,
        "at most, one candidate": shown[0],
        "several (tries)": shown[1],
        "one, at our costs": "–" if ceiling.costing is None else f"{ceiling.costing:.2f}×",
        "verdict": ceiling.verdict,
    }


def ratios(results: Results) -> list[Piece]:
    """Whether 1:3 is best."""
    if results.sweep is None or results.sweep_arms is None:
        return [f"The articles find {BEST_RATIO} best in most scenarios. Not measured yet."]
    table = readings.sweep_table(results.sweep_arms)
    said = readings.verdict(results.sweep, results.sweep_arms, BEST_RATIO)
    return [table, Picture("speedup_by_ratio", plots.speedup(results.sweep_arms), said)]


def everything(results: Results) -> list[Piece]:
    """Throughput against acceptance of every setting."""
    if results.arms is None:
        return ["Nothing is measured yet."]
    return [Picture("all_settings", plots.settings(results.arms), readings.settings(results.arms))]


def why(results: Results) -> list[Piece]:
    """Acceptance against the main model's own entropy, and both by position in the draft."""
    if results.sweep is None or tables.tried(results.sweep).empty:
        return ["The articles explain acceptance by “constraint strength”. Not measured yet: no sweep tried a token."]
    rows = results.sweep
    return [
        Picture("entropy", plots.entropy(rows), readings.entropy(rows)),
        Picture("entropy_positions", plots.entropy_positions(rows), readings.entropy_positions(rows)),
    ]


def others(results: Results) -> list[Piece]:
    """The articles' claims beside speed: memory, and what no sweep measures."""
    low, high = MEMORY
    said = f"{low:.0%} … {high:.0%} more memory: "
    if results.sweep_arms is None:
        return ["\n".join([f"* {said}not measured yet.", f"* Not measured yet: {'; '.join(UNMEASURED)}."])]
    arms = results.sweep_arms[results.sweep_arms.draft != "none"]
    growth = arms.groupby("draft", sort=False).memory_growth.max().dropna()
    inside = sum(low <= value <= high for value in growth)
    told = ", ".join(f"{tables.short(str(draft))} {value:+.0%}" for draft, value in growth.items())
    said += f"{told or 'not measured'} over the plain loop (weights and caches; on CUDA the allocator's peak)"
    said += f": {inside} of {len(growth)} drafts inside the claimed range." if len(growth) else "."
    return ["\n".join([f"* {said}", f"* Not measured yet: {'; '.join(UNMEASURED)}."])]
