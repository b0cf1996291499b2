"""What figures and sentences are made of: experiment tables, checked, put in order and shaped for showing.

"rows" are experiment.load's table, "arms" experiment.summary's. Intervals are 95 % ones (bootstrap over prompts).
It does not know how results look or what is said about them.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from specdec_lab.errors import DataError
from specdec_lab.statistics import ARM as CELL
from specdec_lab.statistics import (
    MACHINE,
    SETTINGS,
    fronts,
    interval,
    prompt_sums,
    ratio_interval,
    resampled_sums,
)
from specdec_lab.theory import VerifyCurve

TASKS = ("json", "code", "prose")  # shown before others
PARTS = ("draft", "verify", "other")  # of a step's time
ARM = ["task", "draft", "draft_length"]


def _check(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The table, arms with a draft and the baseline alike; DataError unless it is one main model's with the columns."""
    if table.empty:
        raise DataError("there is nothing to plot: the table of results has no rows")
    lacking = [name for name in columns if name not in table]
    if lacking:
        raise DataError(f"the table of results has no column {', '.join(lacking)}; it has: {', '.join(table.columns)}")
    if table.main.nunique() > 1:
        raise DataError(f"a figure shows one main model, these results have {', '.join(sorted(set(table.main)))}")
    if (table.draft == "none").all():
        raise DataError("these results hold the plain loop alone; a figure needs a draft beside it")
    return table


def arms_of(arms: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Rows of experiment.summary with a draft, one per (task, draft, draft_length), large drafts first.

    Raises DataError for a table that is empty, lacks one of the columns or mixes settings.
    """
    table = _check(arms, [*ARM, *columns])
    table = table[table.draft != "none"]
    for arm, same in table.groupby(ARM):
        if len(same) > 1:
            mixed = [name for name in ("part", *SETTINGS, *MACHINE) if name in same and same[name].nunique() > 1]
            raise DataError(
                f"{', '.join(map(str, arm))} stands {len(same)} times in these results; a figure shows one setting: "
                f"pick one by {', '.join(mixed) or 'its rows'}"
            )
    return _by_draft(table, drafts_of(table))


def cells_of(arms: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Rows of tuning.standings with a draft, one per (task, round, arm); `kept`: it reached its task's last round.

    Raises DataError for a table that is empty, lacks a column, or mixes drafts or settings.
    """
    table = _check(arms, ["task", *CELL, "round", "reached", *columns])
    table = table[table.draft != "none"].reset_index(drop=True)
    if table.draft.nunique() > 1:
        raise DataError(f"a grid shows one draft, these results have {', '.join(drafts_of(table))}")
    twice = table[table.duplicated(["task", "round", *CELL])]
    if len(twice):
        raise DataError(f"{title(twice.iloc[0].task)}: {cell(twice.iloc[0])} stands several times in these results")
    return table.assign(kept=table.reached == table.groupby("task").reached.transform("max"))


def latest(table: pd.DataFrame) -> pd.DataFrame:
    """Of cells_of: each arm as its last round, the one with the most prompts, measured it."""
    return table[table["round"] == table.reached].reset_index(drop=True)


def front(table: pd.DataFrame, loss: str = "nll_delta") -> pd.Series:
    """Of one task's arms: whether no other is better in both speed-up and loss.

    A loss below 0 counts as none, as does whatever a lossless arm shows: a text that the main model finds likelier
    than its own is no better for that.
    """
    speed = table.speculative_speedup.fillna(0.0)
    lost = table[loss].clip(lower=0).where(table.acceptance_rule != "lossless", 0.0).fillna(np.inf)
    first = fronts(speed, lost)[0] if len(table) else []
    return pd.Series([at in first for at in range(len(table))], index=table.index, dtype=bool)


def rows_of(rows: pd.DataFrame, arm: Any) -> pd.DataFrame:
    """The rows behind one row of the summary."""
    same = rows.part == arm.part
    for name in (name for name in CELL if name in rows):
        value = getattr(arm, name)
        same &= rows[name].isna() if pd.isna(value) else rows[name] == value
    return rows[same]


def _by_draft(table: pd.DataFrame, drafts: list[str]) -> pd.DataFrame:
    return table.sort_values(["draft", "draft_length"], key=lambda x: x.map(drafts.index) if x.name == "draft" else x)


def tasks_of(table: pd.DataFrame) -> list[str]:
    """The tasks, known ones first."""
    there = list(dict.fromkeys(table.task))
    return [task for task in TASKS if task in there] + [task for task in there if task not in TASKS]


def drafts_of(table: pd.DataFrame) -> list[str]:
    """The drafts, the largest first; those without a model last."""
    sizes = table[table.draft != "none"].groupby("draft", sort=False).draft_parameters.first()
    return list(sizes.sort_values(ascending=False, kind="stable").index)


# ---- names


def short(name: str, most: int = 14) -> str:
    """A model's name without its folders, cut in the middle."""
    name = name.rstrip("/").rsplit("/", 1)[-1]
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def title(task: str) -> str:
    """A task's name, or its file's."""
    return short(task, 24)


def cell(arm: Any) -> str:
    """A setting of a grid, as "threshold 0.5, γ = 8, K = 4"."""
    own = "" if pd.isna(arm.acceptance_threshold) else f" {arm.acceptance_threshold:g}"
    length = "" if arm.acceptance_rule == "sequence" else f", γ = {arm.draft_length:.0f}"
    return f"{arm.acceptance_rule}{own}{length}, K = {arm.candidate_count:.0f}"


def brief(arm: Any) -> str:
    """The same beside its rule's marker, as "8×4, 0.5"."""
    count = f"×{arm.candidate_count:.0f}" if arm.candidate_count > 1 else ""
    own = "" if pd.isna(arm.acceptance_threshold) else f", {arm.acceptance_threshold:g}"
    return f"{'text' if arm.acceptance_rule == 'sequence' else f'{arm.draft_length:.0f}'}{count}{own}"


def size_ratio(main: float, draft: float) -> str:
    """How much smaller a draft is, as "1:2.7"; a dash for a draft without parameters."""
    if not draft or not main or not np.isfinite([main, draft]).all():
        return "–"
    times = main / draft
    return f"1:{times:.0f}" if times >= 10 else f"1:{times:.1f}".removesuffix(".0")


def size_ratios(table: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Per draft: its ratio to the main model in all parameters, and in those outside embedding and head."""
    first = table[table.draft != "none"].groupby("draft", sort=False).first()
    return {
        draft: (
            size_ratio(first.main_parameters[draft], first.draft_parameters[draft]),
            size_ratio(first.main_body_parameters[draft], first.draft_body_parameters[draft]),
        )
        for draft in drafts_of(table)
    }


def sizes(table: pd.DataFrame, in_all: str = "{}", without: str = "({})") -> dict[str, list[str]]:
    """Per draft, what its name does not say: its total ratio, and the one without embedding, in these formats."""
    return {
        draft: [
            *([] if total in (draft, "–") else [in_all.format(total)]),
            *([] if body == "–" else [without.format(body)]),
        ]
        for draft, (total, body) in size_ratios(table).items()
    }


# ---- shapes


def positions(rows: pd.DataFrame, over: str) -> pd.DataFrame:
    """Acceptance at positions 1, 2, … of each (task, draft): columns position, value, value_low, value_high.

    over: "drafted" or "tried". Taken from the longest drafts of each, whose positions reach furthest.
    """
    table = _check(rows, [*ARM, "prompt_id", f"{over}_at", "accepted_at"])
    out = []
    for (task, draft), group in table[table.draft != "none"].groupby(["task", "draft"], sort=False):
        group = group[group.draft_length == group.draft_length.max()]
        below, above = (  # [prompts, positions]
            pd.DataFrame(group[f"{name}_at"].tolist(), index=group.prompt_id).groupby(level=0).sum()
            for name in (over, "accepted")
        )
        for depth in below:
            sums = resampled_sums({"above": above.get(depth, 0 * below[depth]), "below": below[depth]})
            with np.errstate(divide="ignore", invalid="ignore"):
                got = interval(sums["above"] / sums["below"], len(below))
            out.append((task, draft, depth + 1, got.value, got.low, got.high))
    return pd.DataFrame(out, columns=["task", "draft", "position", "value", "value_low", "value_high"])


BINS = 8  # of entropy


def tried(rows: pd.DataFrame) -> pd.DataFrame:
    """A line per token that a lossless chain tried: task, draft, draft_length, prompt_id, entropy (nats), stays, depth.

    Of the arms that all tasks have, so that tasks differ in nothing else. entropy is that of the main model's
    distribution there; stays is 0 or 1.
    """
    lists = ["tried_entropy", "tried_stays", "tried_depth"]
    table = _check(rows, [*ARM, "prompt_id", "acceptance_rule", "candidate_count", *lists])
    table = table[(table.draft != "none") & (table.acceptance_rule == "lossless") & (table.candidate_count == 1)]
    everywhere = table.groupby(["draft", "draft_length"]).task.transform("nunique") == table.task.nunique()
    table = table[everywhere][[*ARM, "prompt_id", *lists]].explode(lists, ignore_index=True).dropna()
    table = table.rename(columns=lambda name: name.removeprefix("tried_"))
    return table.astype({"entropy": float, "stays": float, "depth": int})


Binned = tuple[np.ndarray, np.ndarray, list[int]]  # tried and accepted, each [1 + resamples, bins]; prompts of each


def _binned(rows: pd.DataFrame) -> tuple[list[float], dict[str, Binned]]:
    """The median entropy of each bin, and per task what was tried and accepted there; bins hold equally many tokens."""
    known = tried(rows)
    edges = np.quantile(known.entropy, np.linspace(0, 1, BINS + 1)[1:-1]) if len(known) else []
    known["bin"] = np.searchsorted(np.unique(edges), known.entropy)
    middles, found = known.groupby("bin").entropy.median(), {}
    for seed, task in enumerate(tasks_of(known)):
        own = known[known.task == task].groupby(["prompt_id", "bin"]).stays.agg(["size", "sum"])
        counts = {
            (what, at): own[what].unstack(fill_value=0).reindex(columns=middles.index, fill_value=0)[at]
            for what in ("size", "sum")
            for at in middles.index
        }
        sums = resampled_sums({f"{what} {at}": column for (what, at), column in counts.items()}, seed=seed)
        size, stays = (np.stack([sums[f"{what} {at}"] for at in middles.index], 1) for what in ("size", "sum"))
        found[task] = size, stays, [int((counts["size", at] > 0).sum()) for at in middles.index]
    return list(middles), found


def entropy_bins(rows: pd.DataFrame) -> pd.DataFrame:
    """Per task and bin of entropy: the bin's median, the share of the task's tried tokens, and which share stays.

    Of all lossless arms together. value: what stays, with value_low and value_high; NaN where a bin is empty. A bin
    that too few prompts reach has no interval.
    """
    middles, found = _binned(rows)
    out = []
    for task, (size, stays, prompts) in found.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            shares, rates = size / size.sum(1, keepdims=True), stays / size
        for at, entropy in enumerate(middles):
            got = interval(rates[:, at], prompts[at])
            out.append((task, entropy, shares[0, at], got.value, got.low, got.high))
    return pd.DataFrame(out, columns=["task", "entropy", "share", "value", "value_low", "value_high"])


def entropy_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """How two tasks' α differ: because their entropies are distributed differently, and at equal entropy.

    A line per pair: total, of_entropy and at_equal, each with _low and _high; total is their sum (Kitagawa's
    decomposition of a difference between rates, over bins of entropy, both tasks' weights averaged).
    """
    (_, found), out = _binned(rows), []
    prompts = tried(rows).groupby("task").prompt_id.nunique()
    for a, b in combinations(found, 2):
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = [size / size.sum(1, keepdims=True) for size, _, _ in (found[a], found[b])]
            rates = [stays / size for size, stays, _ in (found[a], found[b])]
        # a bin that one of them leaves empty holds no difference at equal entropy
        ours, theirs = (np.where(np.isnan(x), y, x) for x, y in (rates, rates[::-1]))
        of_entropy = np.nansum((weights[0] - weights[1]) * (ours + theirs) / 2, 1)
        at_equal = np.nansum((ours - theirs) * (weights[0] + weights[1]) / 2, 1)
        line: dict[str, Any] = {"task": a, "other": b}
        samples = {"total": of_entropy + at_equal, "of_entropy": of_entropy, "at_equal": at_equal}
        for name, values in samples.items():
            got = interval(values, min(prompts[a], prompts[b]))
            line |= {name: got.value, f"{name}_low": got.low, f"{name}_high": got.high}
        out.append(line)
    names = [f"{name}{end}" for name in ("total", "of_entropy", "at_equal") for end in ("", "_low", "_high")]
    return pd.DataFrame(out, columns=["task", "other", *names])


def entropy_positions(rows: pd.DataFrame) -> pd.DataFrame:
    """Per task and position of the longest drafts: the share of tried tokens that stays, and their mean entropy.

    Of all lossless arms of that length together; columns stays and entropy, each with _low and _high, over the prompts
    that reach the position.
    """
    known, out = tried(rows), []
    known = known[known.draft_length == known.groupby("draft").draft_length.transform("max")]
    for task in tasks_of(known):
        own = known[known.task == task]
        for depth, there in own.groupby("depth"):
            sums = there.groupby("prompt_id")[["stays", "entropy"]].agg(["size", "sum"])
            line = {"task": task, "position": depth}
            for name in ("stays", "entropy"):
                got = ratio_interval(sums[name]["sum"], sums[name]["size"])
                line |= {name: got.value, f"{name}_low": got.low, f"{name}_high": got.high}
            out.append(line)
    names = [f"{name}{end}" for name in ("stays", "entropy") for end in ("", "_low", "_high")]
    return pd.DataFrame(out, columns=["task", "position", *names])


def curves(rows: pd.DataFrame) -> pd.DataFrame:
    """T(k)/T(1) as each part measured it: index k, a column per part."""
    table = _check(rows, ["part", "verify_k", "verify_ratio"]).drop_duplicates("part")
    found = {row.part: pd.Series(row.verify_ratio, index=list(row.verify_k), dtype=float) for row in table.itertuples()}
    return pd.DataFrame(found).sort_index()


def split(rows: pd.DataFrame) -> pd.DataFrame:
    """Per arm, with intervals: a step's cost in plain steps, its tokens tau, and their ratio, the gain.

    The cost's parts are in draft_time, verify_time and other_time. Raises DataError where settings are mixed.
    """
    table = _check(rows, ["part", *ARM, "draft_s", "verify_s", "baseline_steps"])
    out = []
    for arm, group in table[table.draft != "none"].groupby(ARM, sort=False):
        if group.part.nunique() > 1:
            raise DataError(f"{', '.join(map(str, arm))}: several settings are mixed; pick one by the column `part`")
        per_prompt = prompt_sums(group)
        sums = resampled_sums({name: per_prompt[name] for name in per_prompt})
        with np.errstate(divide="ignore", invalid="ignore"):
            plain = sum(sums[f"baseline_{part}_s"] for part in PARTS) / sums["baseline_steps"]
            times = {part: sums[f"{part}_s"] / sums["steps"] / plain for part in PARTS}
            cost, tau = sum(times.values()), sums["emitted"] / sums["steps"]
            found = {"cost": cost, "tau": tau, "gain": tau / cost}
        line = dict(zip(ARM, arm, strict=True)) | {f"{part}_time": times[part][0] for part in PARTS}
        for name, samples in found.items():
            got = interval(samples, len(per_prompt))
            line |= {name: got.value, f"{name}_low": got.low, f"{name}_high": got.high}
        out.append(line)
    return _by_draft(pd.DataFrame(out), drafts_of(table))


def theory_of(rows: pd.DataFrame, arm: Any) -> tuple[float, float, VerifyCurve] | None:
    """α, c and the verify-cost curve of an arm of the summary; None where nothing was drafted."""
    first = rows[rows.part == arm.part].iloc[0]
    curve = VerifyCurve(tuple(first.verify_k), tuple(first.verify_ratio), tuple(first.verify_seconds))
    alpha, c = float(arm.acceptance_probability), float(arm.draft_cost_ratio)
    return (alpha, c, curve) if np.isfinite([alpha, c]).all() else None
