"""How results look: the figures, and under each a sentence that says what this run's data show.

Figures take the tables of experiment.load ("rows") or experiment.summary ("arms"). One colour is one task, one
marker is one draft, in every figure; markers, hatches and shades tell things apart in grey print too. Error bars
are 95 % intervals (bootstrap over prompts). It does not know how results were made, and derives no metric.
"""

import io
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from specdec_lab.errors import DataError, require
from specdec_lab.metrics import METRICS
from specdec_lab.statistics import MACHINE, SETTINGS, Interval, compare, interval, prompt_sums, resampled_sums
from specdec_lab.theory import VerifyCurve, best_draft_length, break_even
from specdec_lab.theory import speedup as speedup_of
from specdec_lab.trace import Trace

WIDTH = 7.0  # inches, a page
RC = seaborn.axes_style("ticks") | {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize", "legend.fontsize"), 9.0),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8.0),
    **{"font.family": ["sans-serif"], "font.sans-serif": ["DejaVu Sans"], "axes.titleweight": "bold"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True},
    **{"grid.color": "0.9", "grid.linewidth": 0.6, "axes.linewidth": 0.8, "lines.linewidth": 1.2},
    **{"legend.frameon": False, "hatch.linewidth": 0.6, "figure.dpi": 100.0, "savefig.dpi": 200.0},
    **{"svg.hashsalt": "specdec_lab", "svg.fonttype": "path", "text.parse_math": False},
}
COLOURS = seaborn.color_palette("colorblind").as_hex()
TASKS = {"json": COLOURS[0], "code": COLOURS[1], "prose": COLOURS[2]}
MARKERS = {"1:2": "o", "1:3": "s", "1:4": "D", "ngram": "^"}
OTHERS = "vPX<>p*h"
PARTS = {"draft": ("0.45", "////"), "verify": ("0.78", ""), "other": ("0.1", "")}
FATES = {"accepted": "#cdeeda", "recovered": "#dd7a3c", "bonus": "#8ab8ea", "plain": "#ffffff"}  # four shades of grey
EDGES = dict.fromkeys(FATES, "white") | {"plain": "0.5"}


def style() -> Any:
    """The look of all figures, as a context (`with style(): …`) or a decorator; changes nothing outside of it."""
    return rc_context(RC)


@style()
def save(fig: Figure, name: str, folder: str | Path = "figures") -> list[Path]:
    """Write `name`.svg and `name`.png; the same figure gives the same bytes. Returns both paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    fig.savefig(paths[0], metadata={"Date": None, "Creator": None})
    fig.savefig(paths[1], metadata={"Software": None})
    return paths


@style()
def show(fig: Figure, sentence: str = "") -> None:
    """Display a figure in a notebook, whatever its backend, and under it a sentence of Markdown."""
    from IPython.display import Image, display

    image = io.BytesIO()
    fig.savefig(image, format="png")
    display(Image(image.getvalue(), retina=True))
    if sentence:
        tell(sentence)


def tell(markdown: str) -> None:
    """Display Markdown in a notebook."""
    from IPython.display import Markdown, display

    display(Markdown(markdown))


# ---- what is plotted


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


def _arms(arms: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Rows of experiment.summary with a draft, one per (task, draft, draft_length), large drafts first."""
    table = _check(arms, ["task", "draft", "draft_length", *columns])
    table = table[table.draft != "none"]
    for arm, same in table.groupby(["task", "draft", "draft_length"]):
        if len(same) > 1:
            mixed = [name for name in ("part", *SETTINGS, *MACHINE) if name in same and same[name].nunique() > 1]
            raise DataError(
                f"{', '.join(map(str, arm))} stands {len(same)} times in these results; a figure shows one setting: "
                f"pick one by {', '.join(mixed) or 'its rows'}"
            )
    order = {draft: index for index, draft in enumerate(drafts_of(table))}
    return table.sort_values(["draft", "draft_length"], key=lambda x: x.map(order) if x.name == "draft" else x)


def tasks_of(table: pd.DataFrame) -> list[str]:
    """The tasks, known ones first."""
    there = list(dict.fromkeys(table.task))
    return [task for task in TASKS if task in there] + [task for task in there if task not in TASKS]


def drafts_of(table: pd.DataFrame) -> list[str]:
    """The drafts, the largest first; those without a model last."""
    sizes = table[table.draft != "none"].groupby("draft", sort=False).draft_parameters.first()
    return list(sizes.sort_values(ascending=False, kind="stable").index)


def _colours(table: pd.DataFrame) -> dict[str, str]:
    others = iter(COLOURS[3:7] + COLOURS[8:] + COLOURS)
    return {task: TASKS.get(task) or next(others) for task in tasks_of(table)}


def _markers(table: pd.DataFrame) -> dict[str, str]:
    others = iter(OTHERS * 8)
    return {draft: MARKERS.get(draft) or next(others) for draft in drafts_of(table)}


def short(name: str, most: int = 14) -> str:
    """A model's name without its folders, cut in the middle."""
    name = name.rstrip("/").rsplit("/", 1)[-1]
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def _title(task: str) -> str:
    return short(task, 24)


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


def _named(table: pd.DataFrame) -> dict[str, str]:
    """Per draft: "1:3 (1:6.4 without embedding)"."""
    out = {}
    for draft, (total, body) in size_ratios(table).items():
        known = draft == total or total == "–"
        sizes = [*([] if known else [f"{total} in all"]), *([] if body == "–" else [f"{body} without embedding"])]
        out[draft] = short(draft, 24) + (f" ({', '.join(sizes)})" if sizes else "")
    return out


SIZES = "draft : main in all parameters (without embedding and head)"


def _keyed(table: pd.DataFrame) -> dict[str, str]:
    """Per draft, for the legend: "1:3 (1:6.4)"."""
    return {
        draft: " ".join([short(draft), *_sizes(draft, total, body)])
        for draft, (total, body) in size_ratios(table).items()
    }


def _sizes(draft: str, total: str, body: str) -> list[str]:
    """What a draft's name does not say: its total ratio, and the one without embedding in brackets."""
    return [*([] if total in (draft, "–") else [total]), *([] if body == "–" else [f"({body})"])]


def _panels(count: int, height: float, rows: int = 1, **shared: Any) -> tuple[Figure, np.ndarray]:
    """A figure with `count` panels side by side, wrapped after three: axes [rows × lines, columns]."""
    columns = min(count, 3)
    lines = -(-count // columns)
    fig = Figure(figsize=(WIDTH, height * lines + 0.55), layout="constrained")
    axes = fig.subplots(rows * lines, columns, squeeze=False, **shared)
    if rows == 1:
        for ax in axes.flat[count:]:
            ax.set_axis_off()
    return fig, axes


def _legend(fig: Figure, handles: Sequence[Any], title: str = "") -> None:
    """A legend above the panels, in as many columns as fit the page."""
    room = fig.get_figwidth() * 72  # points
    widths = [TextPath((0, 0), str(handle.get_label()), size=9).get_extents().width + 38 for handle in handles]
    for columns in range(len(handles), 0, -1):
        lines = -(-len(handles) // columns)
        if sum(max(widths[i : i + lines]) for i in range(0, len(handles), lines)) <= room:
            break
    look = {"handletextpad": 0.5, "columnspacing": 1.5, "borderaxespad": 0.1}
    fig.legend(handles=list(handles), loc="outside upper center", ncols=columns, title=title or None, **look)


def _errors(line: pd.DataFrame, name: str) -> np.ndarray:
    """Lengths of error bars [2, arms]; NaN, which draws nothing, where there is no interval."""
    value = line[name].to_numpy(float)
    low, high = (line[f"{name}_{end}"].to_numpy(float) for end in ("low", "high"))
    return np.clip([value - low, high - value], 0, None)


BAR: dict[str, Any] = {"linestyle": "none", "capsize": 2.0, "elinewidth": 0.9, "capthick": 0.9, "markersize": 5.5}


def _key(marker: str, label: str, **look: Any) -> Line2D:
    return Line2D([], [], **{"color": "0.25", "marker": marker, "linestyle": "none", "label": label, **look})


# ---- the figures


@style()
def throughput(arms: pd.DataFrame) -> Figure:
    """Tokens per second against α, a panel per task: a point per draft and draft length (the number beside it).

    The lines are the plain loop, measured beside each draft. arms: experiment.summary's table.
    Raises DataError for a table that is empty or mixes settings.
    """
    table = _arms(arms, "acceptance_probability", "throughput")
    fig, axes = _panels(len(tasks_of(table)), 3.0, sharex=True, sharey=True)
    colours, markers = _colours(table), _markers(table)
    for ax, task in zip(axes.flat, tasks_of(table), strict=False):
        for plain in arms[(arms.draft == "none") & (arms.task == task)].itertuples():
            ax.axhline(plain.throughput, color="0.35", linewidth=0.9, linestyle="--", zorder=1)
            if np.isfinite([plain.throughput_low, plain.throughput_high]).all():
                ax.axhspan(plain.throughput_low, plain.throughput_high, color="0.5", alpha=0.13, linewidth=0, zorder=0)
        for draft, line in table[table.task == task].groupby("draft", sort=False):
            x, y = line.acceptance_probability.to_numpy(float), line.throughput.to_numpy(float)
            bars = {"xerr": _errors(line, "acceptance_probability"), "yerr": _errors(line, "throughput")}
            look = {"color": colours[task], "marker": markers[draft], "markeredgecolor": "white", "zorder": 3}
            ax.plot(x, y, color=colours[task], linewidth=0.8, alpha=0.6, zorder=2)
            ax.errorbar(x, y, **bars, **{**BAR, "markersize": 6.5}, **look, label=draft)
        ax.set(title=_title(task), xlabel="acceptance probability α")
        ax.margins(0.12)
        low, high = ax.get_xlim()
        if high - low < 0.1:
            ax.set_xlim(low - 0.05, high + 0.05)
        ax.xaxis.set_major_locator(MaxNLocator(5))
    for row in axes:
        row[0].set_ylabel("throughput (tokens/s)")
    plain_line = Line2D([], [], color="0.35", linestyle="--", linewidth=0.9, label="plain loop, 95 % interval")
    number = _key("", "number: draft length")
    names = _keyed(table)
    _legend(fig, [*(_key(markers[draft], names[draft]) for draft in names), plain_line, number], SIZES)
    for ax, task in zip(axes.flat, tasks_of(table), strict=False):
        _label_points(fig, ax, table[table.task == task])
    return fig


def _label_points(fig: Figure, ax: Axes, line: pd.DataFrame) -> None:
    """Write draft lengths beside their points, each where it covers no point and no other label."""
    fig.draw_without_rendering()  # fixes the layout, so that places on the page are known
    places = line[["acceptance_probability", "throughput"]].to_numpy(float)
    known = np.isfinite(places).all(1)
    unit = fig.dpi / 72  # pixels of a point
    points = ax.transData.transform(places[known]).reshape(-1, 2)
    taken = [Bbox.from_bounds(x - 4 * unit, y - 4 * unit, 8 * unit, 8 * unit) for x, y in points]
    frame = ax.get_window_extent()
    halo = [withStroke(linewidth=2, foreground="white")]
    for point, place, length in zip(points, places[known], line.draft_length[known], strict=True):
        size = (5.2 * len(str(length)) + 1) * unit, 8 * unit
        boxes = _around(point, size, unit)
        free = (b for b in boxes if _holds(frame, b) and not any(map(b.overlaps, taken)))
        box = next(free, boxes[0])
        taken.append(box)
        middle = np.array([box.x0 + box.x1, box.y0 + box.y1]) / 2
        look: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "center", "path_effects": halo}
        ax.annotate(
            str(length), place, tuple((middle - point) / unit), textcoords="offset points", **look
        ).set_in_layout(False)


def _holds(frame: Bbox, box: Bbox) -> bool:
    return box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1


def _around(point: np.ndarray, size: tuple[float, float], unit: float) -> list[Bbox]:
    """Places for a label of that size, nearest first, those at the right before others; all in pixels."""
    boxes = []
    for distance in (6, 9, 13, 18):  # points
        for angle in np.deg2rad([0, 180, 45, -45, 135, -135, 90, -90]):
            x, y = point + distance * unit * np.array([np.cos(angle), np.sin(angle)])
            left = x - size[0] / 2 * (1 - np.cos(angle))
            boxes.append(Bbox.from_bounds(left, y - size[1] / 2, *size))
    return boxes


@style()
def speedup(arms: pd.DataFrame) -> Figure:
    """Speed-up over the plain loop by draft and draft length, a panel per task: measured, and predicted beside it.

    arms: experiment.summary's table. Raises DataError for a table that is empty or mixes settings.
    """
    table = _arms(arms, "speculative_speedup", "predicted_speedup")
    drafts, lengths = drafts_of(table), sorted(set(table.draft_length))
    fig, axes = _panels(len(tasks_of(table)), 2.9, sharey=True)
    colours, markers, ratios = _colours(table), _markers(table), size_ratios(table)
    place = {
        (draft, length): i * (len(lengths) + 1) + j
        for i, draft in enumerate(drafts)
        for j, length in enumerate(lengths)
    }
    for ax, task in zip(axes.flat, tasks_of(table), strict=False):
        line = table[table.task == task]
        x = np.array([place[arm] for arm in zip(line.draft, line.draft_length, strict=True)], float)
        errors = _errors(line, "speculative_speedup")
        for draft in drafts:
            at = (line.draft == draft).to_numpy()
            look = {"color": colours[task], "marker": markers[draft], "zorder": 3}
            ax.errorbar(x[at] - 0.14, line.speculative_speedup[at], errors[:, at], **BAR, **look)
        ax.plot(x + 0.24, line.predicted_speedup, color="black", marker="x", linestyle="none", markersize=4.5, zorder=4)
        ax.axhline(1, color="0.2", linewidth=0.9, linestyle="--", zorder=1)
        ax.set_xticks(list(place.values()), [str(length) for _, length in place])
        for i, draft in enumerate(drafts):
            lines = [short(draft, 10), *_sizes(draft, *ratios[draft])]
            middle = i * (len(lengths) + 1) + (len(lengths) - 1) / 2
            ax.annotate("\n".join(lines), (middle, 0), (0, -19), xycoords=("data", "axes fraction"),
                        textcoords="offset points", ha="center", va="top", fontsize=8)  # fmt: skip
        ax.set(title=_title(task), xlim=(-0.8, len(drafts) * (len(lengths) + 1) - 1.2))
        ax.grid(axis="x", visible=False)
        ax.tick_params(axis="x", length=2)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    for row in axes:
        row[0].set_ylabel("speed-up over the plain loop")
    fig.supxlabel(f"draft length; {SIZES}", fontsize=9)
    keys = [
        _key("o", "measured, 95 % interval"),
        _key("x", "predicted from α, c and T(k)", color="black", markersize=4.5),
        Line2D([], [], color="0.2", linestyle="--", linewidth=0.9, label="plain loop (1×)"),
    ]
    _legend(fig, keys)
    return fig


def _positions(rows: pd.DataFrame, over: str) -> pd.DataFrame:
    """Acceptance at positions 1, 2, … of each (task, draft): columns position, value, low, high.

    over: "drafted" or "tried". Taken from the longest drafts of each, whose positions reach furthest.
    """
    table = _check(rows, ["task", "draft", "draft_length", "prompt_id", f"{over}_at", "accepted_at"])
    out = []
    for (task, draft), group in table[table.draft != "none"].groupby(["task", "draft"], sort=False):
        group = group[group.draft_length == group.draft_length.max()]
        deepest = max((len(counts) for counts in group[f"{over}_at"]), default=0)
        for depth in range(deepest):
            at = {
                name: group[f"{name}_at"]
                .map(lambda c, d=depth: c[d] if len(c) > d else 0)
                .groupby(group.prompt_id)
                .sum()
                for name in (over, "accepted")
            }
            sums = resampled_sums(at)
            with np.errstate(divide="ignore", invalid="ignore"):
                got = interval(sums["accepted"] / sums[over], len(at[over]))
            out.append((task, draft, int(group.draft_length.max()), depth + 1, got.value, got.low, got.high))
    return pd.DataFrame(out, columns=["task", "draft", "draft_length", "position", "value", "value_low", "value_high"])


@style()
def acceptance_by_position(rows: pd.DataFrame) -> Figure:
    """Share of drafted tokens that stay, by position: of all drafted there (above), and of those tried (below).

    rows: experiment.load's table; the longest draft length of each draft is shown. Raises DataError.
    """
    kinds = {"of all drafted": _positions(rows, "drafted"), "of those tried": _positions(rows, "tried")}
    tasks, drafts = tasks_of(rows), drafts_of(rows)
    fig = Figure(figsize=(WIDTH, 4.3), layout="constrained")
    axes = fig.subplots(2, len(tasks), sharex=True, sharey=True, squeeze=False)
    colours, markers = _colours(rows), _markers(rows)
    for row, (kind, table) in zip(axes, kinds.items(), strict=True):
        for ax, task in zip(row, tasks, strict=True):
            shown = table[(table.task == task)]
            for index, draft in enumerate(drafts):
                line = shown[shown.draft == draft]
                x = line.position.to_numpy(float) + 0.12 * (index - (len(drafts) - 1) / 2)
                look = {**BAR, "linestyle": "-", "linewidth": 0.8, "markersize": 4.5, "alpha": 0.9}
                shade = {"color": colours[task], "markerfacecolor": ("white", colours[task])[index % 2 == 0]}
                ax.errorbar(x, line.value, _errors(line, "value"), **look, **shade, marker=markers[draft])
            if shown.value.notna().sum() == 0:
                ax.text(0.5, 0.5, "nothing was drafted", transform=ax.transAxes, ha="center", fontsize=8)
            ax.set_ylim(-0.04, 1.04)
            ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        row[0].set_ylabel(f"accepted, share\n{kind}")
    for ax, task in zip(axes[0], tasks, strict=True):
        ax.set_title(_title(task))
    for ax in axes[-1]:
        ax.set_xlabel("position in the draft")
    names = _keyed(rows)
    hollow = {draft: {"markerfacecolor": "white"} if i % 2 else {} for i, draft in enumerate(names)}
    _legend(fig, [_key(markers[draft], names[draft], **hollow[draft]) for draft in names], SIZES)
    return fig


def _curves(rows: pd.DataFrame) -> pd.DataFrame:
    """T(k)/T(1) as each part measured it: index k, a column per part."""
    table = _check(rows, ["part", "verify_k", "verify_ratio"]).drop_duplicates("part")
    curves = {
        part.part: pd.Series(part.verify_ratio, index=list(part.verify_k), dtype=float) for part in table.itertuples()
    }
    return pd.DataFrame(curves).sort_index()


@style()
def verify_cost(rows: pd.DataFrame) -> Figure:
    """What a main forward over k tokens costs, T(k)/T(1): every measurement of the run, and their median.

    rows: experiment.load's table. Raises DataError.
    """
    curves = _curves(rows)
    fig = Figure(figsize=(4.6, 3.0), layout="constrained")
    ax = fig.subplots()
    k = curves.index.to_numpy(float)
    for part in curves:
        ax.plot(k, curves[part], color="0.6", marker=".", markersize=4, linestyle="none", zorder=2)
    ax.plot(k, curves.median(axis=1), color=COLOURS[0], marker="o", markersize=4, zorder=3)
    ax.plot(k, k, color="0.2", linestyle=":", zorder=1)
    ax.set(xlabel="tokens verified in one forward, k", ylabel="T(k) / T(1)", xlim=(0, k.max() * 1.04))
    ax.set_ylim(0, max(2.0, float(np.nanmax(curves.to_numpy())) * 1.15))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    keys = [
        Line2D([], [], color=COLOURS[0], marker="o", markersize=4, label="median"),
        _key(".", "each measurement", color="0.6"),
        Line2D([], [], color="0.2", linestyle=":", label="k forwards of one token"),
    ]
    ax.legend(handles=keys, loc="upper right" if k.max() < 4 else "lower right")
    return fig


def _split(rows: pd.DataFrame) -> pd.DataFrame:
    """Per arm: a step's parts in plain steps (draft, verify, other), its cost and its tokens τ, with intervals."""
    table = _check(rows, ["part", "task", "draft", "draft_length", "draft_s", "verify_s", "baseline_steps"])
    out = []
    for (task, draft, length), group in table[table.draft != "none"].groupby(
        ["task", "draft", "draft_length"], sort=False
    ):
        if group.part.nunique() > 1:
            raise DataError(f"{task}, {draft}, {length}: several settings are mixed; pick one by the column `part`")
        per_prompt = prompt_sums(group)
        sums = resampled_sums({name: per_prompt[name] for name in per_prompt})
        with np.errstate(divide="ignore", invalid="ignore"):
            plain = sum(sums[f"baseline_{part}_s"] for part in PARTS) / sums["baseline_steps"]
            split = {part: sums[f"{part}_s"] / sums["steps"] / plain for part in PARTS}
            cost = interval(sum(split.values()), len(per_prompt))
            tokens = interval(sums["emitted"] / sums["steps"], len(per_prompt))
            gain = interval(sums["emitted"] / sums["steps"] / sum(split.values()), len(per_prompt))
        ends = {"cost": cost.value, "cost_low": cost.low, "cost_high": cost.high}
        ends |= {"tau": tokens.value, "tau_low": tokens.low, "tau_high": tokens.high}
        ends |= {"gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}
        out.append(
            {
                "task": task,
                "draft": draft,
                "draft_length": length,
                **{f"{part}_time": each[0] for part, each in split.items()},
                **ends,
            }
        )
    order = {draft: index for index, draft in enumerate(drafts_of(table))}
    return pd.DataFrame(out).sort_values(
        ["draft", "draft_length"], key=lambda x: x.map(order) if x.name == "draft" else x
    )


@style()
def time_split(rows: pd.DataFrame) -> Figure:
    """Where a step's time goes, in plain steps, beside the tokens it emits: τ to the right of the bar is faster.

    rows: experiment.load's table. Raises DataError.
    """
    table = _split(rows)
    tasks, colours, markers = tasks_of(table), _colours(table), _markers(rows)
    arms = list(dict.fromkeys(zip(table.draft, table.draft_length, strict=True)))
    place = {arm: index + 0.5 * drafts_of(rows).index(arm[0]) for index, arm in enumerate(arms)}
    fig, axes = _panels(len(tasks), max(1.6, 0.24 * (max(place.values()) + 1) + 0.85), sharex=True, sharey=True)
    for ax, task in zip(axes.flat, tasks, strict=False):
        line = table[table.task == task]
        y = np.array([place[arm] for arm in zip(line.draft, line.draft_length, strict=True)], float)
        left = np.zeros(len(line))
        for part, (shade, hatch) in PARTS.items():
            width = line[f"{part}_time"].fillna(0).to_numpy(float)
            ax.barh(y, width, 0.72, left, color=shade, hatch=hatch, edgecolor="white", linewidth=0.4, zorder=2)
            left += width
        ax.errorbar(line.cost, y, xerr=_errors(line, "cost"), **{**BAR, "marker": ""}, ecolor="black", zorder=3)
        for draft in drafts_of(rows):
            at = (line.draft == draft).to_numpy()
            look = {"color": colours[task], "markeredgecolor": "white", "marker": markers[draft], "zorder": 4}
            ax.errorbar(line.tau[at], y[at], xerr=_errors(line[at], "tau"), **{**BAR, "markersize": 6.5}, **look)
        ax.axvline(1, color="0.2", linewidth=0.9, linestyle="--", zorder=1)
        ax.set(title=_title(task), xlim=(0, None))
        ax.grid(axis="y", visible=False)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0, 0].set_yticks(list(place.values()), [f"{short(draft, 12)}, {length}" for draft, length in arms])
    room = max(0.6, 1.5 - max(place.values()) / 2)
    axes[0, 0].set_ylim(max(place.values()) + room, -room)
    for row in axes:
        row[0].set_ylabel("draft, draft length")
    fig.supxlabel("time of a step in steps of the plain loop, and tokens per step τ (95 % intervals)", fontsize=9)
    bars = [
        Patch(facecolor=shade, hatch=hatch, edgecolor="white", label=part) for part, (shade, hatch) in PARTS.items()
    ]
    keys = [
        *bars,
        _key("o", "τ; right of its bar: faster"),
        Line2D([], [], color="0.2", linestyle="--", linewidth=0.9, label="plain step"),
    ]
    _legend(fig, keys)
    return fig


def _theory(rows: pd.DataFrame, arm: Any) -> tuple[float, float, VerifyCurve] | None:
    """α, c and the verify-cost curve of an arm of the summary; None where nothing was drafted."""
    first = rows[rows.part == arm.part].iloc[0]
    curve = VerifyCurve(tuple(first.verify_k), tuple(first.verify_ratio), tuple(first.verify_seconds))
    alpha, c = float(arm.acceptance_probability), float(arm.draft_cost_ratio)
    return (alpha, c, curve) if np.isfinite([alpha, c]).all() else None


@style()
def prediction(rows: pd.DataFrame, arms: pd.DataFrame, most: int = 16) -> Figure:
    """Speed-up that theory expects at every draft length of 0 … most, from an arm's α, c and T(k); its measured one.

    A panel per task; each arm's curve goes through its own measured draft length. Raises DataError.
    """
    table = _arms(arms, "acceptance_probability", "draft_cost_ratio", "speculative_speedup")
    fig, axes = _panels(len(tasks_of(table)), 2.7, sharey=True, sharex=True)
    colours, markers = _colours(table), _markers(table)
    for ax, task in zip(axes.flat, tasks_of(table), strict=False):
        for arm in table[table.task == task].itertuples():
            known = _theory(rows, arm)
            if known is None:
                ax.text(0.5, 0.1, "nothing was drafted", transform=ax.transAxes, ha="center", fontsize=8)
                continue
            alpha, c, curve = known
            lengths = np.arange(max(most, arm.draft_length) + 1)
            ax.plot(lengths, [speedup_of(alpha, int(n), c, curve) for n in lengths], color="black", linewidth=0.9)
            error = _errors(table.loc[[arm.Index]], "speculative_speedup")
            look = {"color": colours[task], "marker": markers[arm.draft], "zorder": 3}
            ax.errorbar([arm.draft_length], [arm.speculative_speedup], error, **BAR, **look)
        ax.axhline(1, color="0.2", linewidth=0.9, linestyle="--", zorder=1)
        ax.set(title=_title(task), xlabel="draft length γ")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    for row in axes:
        row[0].set_ylabel("speed-up over the plain loop")
    names = _keyed(table)
    keys = [
        *(_key(markers[draft], f"{names[draft]}, measured") for draft in names),
        Line2D([], [], color="black", linewidth=0.9, label="predicted"),
        Line2D([], [], color="0.2", linestyle="--", linewidth=0.9, label="plain loop (1×)"),
    ]
    _legend(fig, keys)
    return fig


@style()
def trace_strip(trace: Trace, decode: Callable[[int], str], lines: int = 14) -> Figure:
    """The text of one generation, a box per token, coloured by what became of it; ticks part the steps.

    decode: the text of a token id. Cut after so many lines. Raises DataError for a trace without tokens.
    """
    require("lines", lines, lines >= 1, "an integer >= 1")
    boxes, full = _boxes(trace, decode, lines)
    if not boxes:
        raise DataError("there is nothing to plot: the trace has no tokens")
    count = boxes[-1][1] + 1
    fig = Figure(figsize=(WIDTH, 0.21 * count + 0.42), layout="constrained")
    ax = fig.subplots()
    ax.set(xlim=(-PAD, COLUMNS), ylim=(count - 0.1, -0.15))
    ax.set_axis_off()
    for left, row, text, kind, first in boxes:
        ax.barh(row + 0.4, len(text) + PAD, 0.72, left, color=FATES[kind], edgecolor=EDGES[kind], linewidth=0.8)
        ax.text(
            left + (len(text) + PAD) / 2, row + 0.42, text, fontsize=8, family="monospace", ha="center", va="center"
        )
        if first:
            ax.plot([left - PAD / 2] * 2, [row, row + 0.8], color="black", linewidth=1.0)
    keys: list[Any] = [Patch(facecolor=FATES[kind], edgecolor=EDGES[kind], label=kind) for kind in FATES]
    keys.append(_key("|", "a step begins" if full else "a step begins (cut here)", color="black", markersize=9))
    _legend(fig, keys)
    return fig


COLUMNS, PAD = 97, 0.6  # characters of 8 pt monospace across a page, and those around a token


def _boxes(
    trace: Trace, decode: Callable[[int], str], lines: int
) -> tuple[list[tuple[float, int, str, str, bool]], bool]:
    """(left, line, text, kind, whether a step begins) of each token, and whether all fitted."""
    boxes: list[tuple[float, int, str, str, bool]] = []
    left, row = 0.0, 0
    for step in trace.steps:
        kinds = ["accepted"] * len(step.accepted) + [step.next_kind]
        tokens = [*step.accepted, step.next_token][: step.emitted]
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
            text = _printable(decode(token))
            left += PAD if index == 0 and left else 0
            if left + len(text) + PAD > COLUMNS:
                left, row = 0.0, row + 1
            if row == lines:
                return boxes, False
            boxes.append((left, row, text, kind, index == 0))
            left += len(text) + PAD
    return boxes, True


def _printable(text: str, most: int = 24) -> str:
    """A token's text as monospace glyphs the font has: spaces and line ends shown, the rest as boxes."""
    glyphs = get_font(findfont(FontProperties(family="monospace"))).get_charmap()
    text = text.replace(" ", "␣" if not text.strip(" ") else " ").replace("\n", "⏎").replace("\t", "→")
    known = (c if ord(c) in glyphs and not unicodedata.category(c).startswith(("C", "M")) else "□" for c in text)
    return "".join(known)[:most] or "□"


@style()
def training(history: Sequence[tuple[int, int, float]]) -> Figure:
    """Cross-entropy to the main model over the tokens trained on. history: distill's (step, tokens seen, loss)."""
    fig = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    ax = fig.subplots()
    ax.plot([seen / 1e6 for _, seen, _ in history], [loss for *_, loss in history], color=COLOURS[0])
    if not history:
        ax.text(0.5, 0.5, "nothing was trained in this call", transform=ax.transAxes, ha="center", fontsize=8)
    ax.set(xlabel="training tokens (millions)", ylabel="cross-entropy (nats per token)")
    return fig


@style()
def greedy_match(matches: Mapping[str, Interval]) -> Figure:
    """Per task, how often a draft's arg-max is the main model's greedy token, with its 95 % interval."""
    if not matches:
        raise DataError("there is nothing to plot: no task was measured")
    table = pd.DataFrame([{"task": task} | vars(match) for task, match in matches.items()])
    colours = _colours(table)
    fig = Figure(figsize=(WIDTH, 0.4 * len(table) + 0.9), layout="constrained")
    ax = fig.subplots()
    for place, line in enumerate(table.itertuples()):
        error = np.clip([[line.value - line.low], [line.high - line.value]], 0, None)
        ax.errorbar([line.value], [place], xerr=error, **BAR, marker="o", color=colours[line.task])
    ax.set_yticks(range(len(table)), [_title(task) for task in table.task])
    ax.set(xlim=(0, 1), ylim=(len(table) - 0.4, -0.6), xlabel="greedy match, share of tokens (95 % interval)")
    ax.grid(axis="y", visible=False)
    return fig


# ---- the sentences and tables


def number(value: float, digits: int = 2) -> str:
    """A value in words; "undefined" for NaN."""
    return f"{value:.{digits}f}" if np.isfinite(value) else "undefined"


def with_interval(row: Any, name: str, digits: int = 2, unit: str = "") -> str:
    """A metric of a summary's row, as "1.42× (1.35 … 1.50)"."""
    value, low, high = (float(getattr(row, key)) for key in (name, f"{name}_low", f"{name}_high"))
    if not np.isfinite(value):
        return "undefined"
    bounds = f"{low:.{digits}f} … {high:.{digits}f}" if np.isfinite([low, high]).all() else "no interval"
    return f"{value:.{digits}f}{unit} ({bounds})"


def _arm(row: Any) -> str:
    return f"{short(row.draft)} with γ = {row.draft_length}"


def _best(line: pd.DataFrame, name: str) -> Any:
    """The row with the highest value; None where it is undefined everywhere."""
    known = line[np.isfinite(line[name].to_numpy(float))]
    return None if known.empty else next(known.sort_values(name, ascending=False, kind="stable").itertuples())


def reading_throughput(arms: pd.DataFrame) -> str:
    """What `throughput` shows."""
    table, said = _arms(arms, "acceptance_probability", "throughput"), []
    for task in tasks_of(table):
        line = table[table.task == task]
        fastest, closest = _best(line, "throughput"), _best(line, "acceptance_probability")
        if fastest is None:
            said.append(f"**{_title(task)}**: nothing was decoded")
            continue
        plain = arms[(arms.task == task) & (arms.draft == "none")].throughput.dropna()
        beside = f" against {plain.min():.1f} … {plain.max():.1f} of the plain loop" if len(plain) > 1 else ""
        beside = f" against {plain.iloc[0]:.1f} of the plain loop" if len(plain) == 1 else beside
        speed = with_interval(fastest, "throughput", 1)
        text = f"**{_title(task)}**: {_arm(fastest)} is fastest with {speed} tokens/s{beside}"
        if closest is not None:
            same = (closest.draft, closest.draft_length) == (fastest.draft, fastest.draft_length)
            alpha = with_interval(closest, "acceptance_probability")
            text += f", and has the highest α, {alpha}" if same else (
                f", at α = {number(fastest.acceptance_probability)}; the highest α, {alpha}, is that of "
                f"{_arm(closest)}, which is not the fastest"
            )  # fmt: skip
        said.append(text)
    return ". ".join(said) + "."


def _decided(line: pd.DataFrame) -> tuple[int, int, int]:
    """How many arms are faster than the plain loop, slower, and undecided."""
    low, high = (line[f"speculative_speedup_{end}"].to_numpy(float) for end in ("low", "high"))
    faster, slower = int((low > 1).sum()), int((high < 1).sum())
    return faster, slower, len(line) - faster - slower


def reading_speedup(arms: pd.DataFrame) -> str:
    """What `speedup` shows, and whether prediction and measurement agree."""
    table = _arms(arms, "speculative_speedup", "predicted_speedup")
    faster, slower, undecided = _decided(table)
    said = [
        f"Of {len(table)} settings {faster} are faster than the plain loop, {slower} slower and {undecided} undecided "
        "(the 95 % interval holds 1×, or there are too few prompts for one)"
    ]
    for task in tasks_of(table):
        best = _best(table[table.task == task], "speculative_speedup")
        if best is not None:
            said.append(
                f"**{_title(task)}**: best is {_arm(best)}, {with_interval(best, 'speculative_speedup', unit='×')}"
            )
    return ". ".join([*said, reading_prediction(arms)])


def reading_prediction(arms: pd.DataFrame) -> str:
    """Whether theory.speedup of the measured α, c and T(k) agrees with the measured speed-up."""
    table = _arms(arms, "speculative_speedup", "predicted_speedup")
    known = table[np.isfinite(table[["speculative_speedup", "predicted_speedup"]].to_numpy(float)).all(1)]
    if known.empty:
        return "There is no prediction, since nothing was drafted."
    off = known.predicted_speedup / known.speculative_speedup - 1
    worst = known.loc[off.abs().idxmax()]
    inside = known.predicted_speedup.between(known.speculative_speedup_low, known.speculative_speedup_high)
    agrees = f"lies inside the measured interval in {int(inside.sum())} of {len(known)} settings and "
    agrees = agrees if known.speculative_speedup_low.notna().any() else ""
    return (
        f"The prediction {agrees}is off by {off.abs().median():.0%} in the median, at most by {off[worst.name]:+.0%} "
        f"({_title(worst.task)}, {_arm(worst)})."
    )


def reading_break_even(rows: pd.DataFrame, arms: pd.DataFrame) -> str:
    """What `prediction` shows: from which α an arm pays, and which draft length theory calls best."""
    said = []
    for arm in _arms(arms, "acceptance_probability", "draft_cost_ratio").itertuples():
        known = _theory(rows, arm)
        if known is None:
            said.append(f"**{_title(arm.task)}**: {_arm(arm)} drafted nothing, so there is no prediction.")
            continue
        alpha, c, curve = known
        from_alpha = break_even(int(arm.draft_length), c, curve)
        pays = "at no α" if from_alpha is None else f"above α = {from_alpha:.2f}"
        best = best_draft_length(alpha, c, curve)
        said.append(
            f"**{_title(arm.task)}**: {_arm(arm)} pays {pays}; α is {with_interval(arm, 'acceptance_probability')} "
            f"and c {c:.3f}. Theory expects {number(arm.predicted_speedup)}×, measured is "
            f"{with_interval(arm, 'speculative_speedup', unit='×')}; it calls γ = {best} best, with "
            f"{speedup_of(alpha, best, c, curve):.2f}×."
        )
    return " ".join(said)


def reading_positions(rows: pd.DataFrame) -> str:
    """What `acceptance_by_position` shows."""
    tried, said = _positions(rows, "tried"), []
    for task in tasks_of(rows):
        line = tried[(tried.task == task) & tried.value.notna()]
        if line.empty:
            said.append(f"**{_title(task)}**: nothing was drafted")
            continue
        goes = []
        for draft, values in line.groupby("draft", sort=False):
            first, last = values.iloc[0], values.iloc[-1]
            change = (
                "falls" if last.value_high < first.value_low else "rises" if last.value_low > first.value_high else ""
            )
            change = f"clearly {change}" if change else "no clear change"
            goes.append(f"{short(str(draft))} {first.value:.2f} → {last.value:.2f} ({change})")
        said.append(f"**{_title(task)}**: {', '.join(goes)}")
    return (
        f"Of the tokens tried at a position, this share stays, at the first → at the last one: {'; '.join(said)}. "
        "Where it stays level, one α describes all positions."
    )


def reading_verify(rows: pd.DataFrame) -> str:
    """What `verify_cost` shows."""
    curves = _curves(rows)
    median, spread = curves.median(axis=1), (curves.max(axis=1) - curves.min(axis=1)).max()
    told = [k for k in (3, 5, 9) if k in median.index] or list(median.index[-1:])
    costs = ", ".join(f"{k} tokens cost {median[k]:.2f}×" for k in told)
    times = curves.shape[1]
    measured = "measured once" if times == 1 else f"median of {times} measurements, up to {spread:.2f} apart"
    return (
        f"In one forward {costs} what one token costs ({measured}); a draft pays only when its step brings more tokens "
        "than that and its own time together."
    )


def reading_time_split(rows: pd.DataFrame) -> str:
    """What `time_split` shows: why the best arm of each task is, or is not, faster."""
    table, said = _split(rows), []
    for task in tasks_of(table):
        best = _best(table[table.task == task], "gain")
        if best is None:
            said.append(f"**{_title(task)}**: nothing was decoded")
            continue
        verb = "faster" if best.gain_low > 1 else "slower" if best.gain_high < 1 else "undecided"
        parts = ", ".join(f"{part} {getattr(best, f'{part}_time'):.2f}" for part in PARTS)
        said.append(
            f"**{_title(task)}**: a step of {_arm(best)}, its best, takes {best.cost:.2f} plain steps of time "
            f"({parts}) and emits {best.tau:.2f} tokens: {with_interval(best, 'gain', unit='×')}, {verb}"
        )
    return ". ".join(said) + "."


def reading_trace(trace: Trace) -> str:
    """What `trace_strip` shows."""
    kinds = [step.next_kind for step in trace.steps]
    accepted = sum(step.fate.count("accepted") for step in trace.steps)
    drafted = sum(len(step.drafted) for step in trace.steps)
    return (
        f"{len(trace.tokens)} tokens in {len(trace.steps)} main forwards: of {drafted} drafted tokens {accepted} were "
        f"accepted; {kinds.count('recovered')} steps ended with a recovered token after a rejection, "
        f"{kinds.count('bonus')} with a bonus token after a whole draft, {kinds.count('plain')} drafted nothing. "
        f"Ended by: {trace.finish or 'the caller'}."
    )


def reading_training(history: Sequence[tuple[int, int, float]]) -> str:
    """What `training` shows."""
    if not history:
        return "Nothing was trained in this call: the draft was done before, or training was left out."
    (_, first, start), (step, last, end) = history[0], history[-1]
    return (
        f"From {first:,} to {last:,} training tokens ({step:,} steps) the cross-entropy to the main model went from "
        f"{start:.3f} to {end:.3f} nats a token (running mean; it cannot fall below the main model's own entropy)."
    )


def reading_match(matches: Mapping[str, Interval]) -> str:
    """What `greedy_match` shows."""
    said = [
        f"**{_title(task)}** {match.value:.2f}"
        + (f" ({match.low:.2f} … {match.high:.2f})" if match.known else " (no interval)")
        for task, match in matches.items()
    ]
    return f"The draft's first choice is the main model's next token in this share of places: {', '.join(said)}."


def sweep_table(arms: pd.DataFrame) -> pd.DataFrame:
    """One line per task, draft and draft length, ready to print: speed-up, interval, prediction, α, τ, c."""
    table = _arms(arms, "speculative_speedup", "acceptance_probability", "tokens_per_main_forward", "draft_cost_ratio")
    order = {task: index for index, task in enumerate(tasks_of(table))}
    table = table.sort_values("task", key=lambda x: x.map(order), kind="stable")
    return pd.DataFrame(
        {
            "task": [_title(task) for task in table.task],
            "draft": table.draft.map(short),
            "length": table.draft_length,
            "speed-up (95 % interval)": [
                with_interval(row, "speculative_speedup", unit="×") for row in table.itertuples()
            ],
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
    """Markdown: per task, whether `draft` is the best one, by paired comparison with every other draft.

    Each draft stands at its fastest draft length. Speed-ups are compared, so that each counts against the plain
    loop measured beside it. Undecided where an interval holds 1. A draft that is not there gives way to the
    fastest of all.
    """
    table, names, lines = _arms(arms, "speculative_speedup"), _named(arms), []
    for task in tasks_of(table):
        line = table[table.task == task]
        best = {name: _best(line[line.draft == name], "speculative_speedup") for name in drafts_of(line)}
        best = {name: row for name, row in best.items() if row is not None}
        if not best:
            lines.append(f"* **{_title(task)}**: undecided, nothing was measured.")
            continue
        ours = best.get(draft) or max(best.values(), key=lambda row: row.speculative_speedup)
        found = {
            name: compare(_rows_of(rows, ours), _rows_of(rows, other), "speculative_speedup")
            for name, other in best.items()
            if name != ours.draft
        }
        against = {got.verdict for got in found.values()}
        judged = "not best" if "lower" in against else "undecided" if "undecided" in against else "best"
        said = [
            f"{got.ratio:.2f} ({number(got.low)} … {number(got.high)}) times {_arm(best[name])}"
            for name, got in found.items()
        ]
        over = with_interval(ours, "speculative_speedup", unit="×")
        faster, slower, _ = _decided(line.loc[[ours.Index]])
        plain = "faster" if faster else "slower" if slower else "neither faster nor slower for certain"
        lines.append(
            f"* **{_title(task)}**: {_arm(ours)} is **{judged if found else 'alone'}**. "
            + f"It is {plain} than the plain loop, {over}"
            + (f", and {', '.join(said)}." if said else ".")
        )
    head = f"Drafts, each at its fastest length: {'; '.join(names.values())}. Undecided: an interval holds 1."
    return "\n".join([head, "", *lines, "", reading_prediction(arms)])


def _rows_of(rows: pd.DataFrame, arm: Any) -> pd.DataFrame:
    """The rows behind one row of the summary."""
    return rows[(rows.part == arm.part) & (rows.draft == arm.draft) & (rows.draft_length == arm.draft_length)]
