"""How results look: the figures. readings says in words what they show.

Figures take the tables of experiment.load ("rows") or experiment.summary ("arms"), and raise DataError for one that
is empty, lacks a column or mixes settings. One colour is one task, one marker is one draft, in every figure that
compares drafts; figures of a grid give colour and marker to acceptance rules. Markers, hatches and shades tell things
apart in grey print too. Error bars are 95 % intervals (bootstrap over prompts). It
does not know how results were made, and derives no metric.
"""

import io
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import Bbox

from specdec_lab import tables, theory
from specdec_lab.claims import CLAIMS, Example
from specdec_lab.errors import DataError, require
from specdec_lab.statistics import Interval
from specdec_lab.tables import PARTS, arms_of, drafts_of, short, tasks_of, title
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
TASKS = dict(zip(tables.TASKS, COLOURS, strict=False))
MARKERS = {"1:2": "o", "1:3": "s", "1:4": "D", "ngram": "^"}
OTHERS = "vPX<>p*h"
SHADES = dict(zip(PARTS, (("0.45", "////"), ("0.78", ""), ("0.1", "")), strict=True))  # grey, hatch
FATES = {"accepted": "#cdeeda", "recovered": "#dd7a3c", "bonus": "#8ab8ea", "plain": "#ffffff"}  # four shades of grey
RULES = {  # marker, colour
    **{"lossless": ("o", "black"), "threshold": ("s", COLOURS[1]), "typical": ("^", COLOURS[2])},
    **{"lenience": ("v", COLOURS[4]), "block": ("D", COLOURS[0]), "sequence": ("P", COLOURS[7])},
}
EDGES = dict.fromkeys(FATES, "white") | {"plain": "0.5"}

LOSSES = {"nll_delta": "rise of the NLL over the main model's own output", "quality_delta": "loss of the task's score"}
BAR: dict[str, Any] = {"linestyle": "none", "capsize": 2.0, "elinewidth": 0.9, "capthick": 0.9, "markersize": 5.5}
PLAIN: dict[str, Any] = {"color": "0.2", "linewidth": 0.9, "linestyle": "--"}  # the plain loop
RATIOS = "draft : main in all parameters (without embedding and head)"


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


# ---- parts of figures


def _colours(table: pd.DataFrame) -> dict[str, str]:
    others = iter(COLOURS[3:7] + COLOURS[8:] + COLOURS)
    return {task: TASKS.get(task) or next(others) for task in tasks_of(table)}


def _markers(table: pd.DataFrame) -> dict[str, str]:
    others = iter(OTHERS * 8)
    return {draft: MARKERS.get(draft) or next(others) for draft in drafts_of(table)}


def _panels(tasks: Sequence[str], height: float, ylabel: str, **shared: Any) -> tuple[Figure, dict[str, Any]]:
    """A figure with a panel per task side by side, wrapped after three; heights in inches."""
    columns = min(len(tasks), 3)
    lines = -(-len(tasks) // columns)
    fig = Figure(figsize=(WIDTH, height * lines + 0.55), layout="constrained")
    axes = fig.subplots(lines, columns, squeeze=False, **shared)
    for ax in axes.flat[len(tasks) :]:
        ax.set_axis_off()
    for row in axes:
        row[0].set_ylabel(ylabel)
    panels = dict(zip(tasks, axes.flat, strict=False))
    for task, ax in panels.items():
        ax.set_title(title(task))
    return fig, panels


def _single(width: float, height: float) -> tuple[Figure, Axes]:
    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, fig.subplots()


def _legend(fig: Figure, handles: Sequence[Any], title: str = "") -> None:
    """A legend above the panels, in as many columns as fit the page."""
    room = fig.get_figwidth() * 72  # points
    widths = [TextPath((0, 0), str(handle.get_label()), size=9).get_extents().width + 38 for handle in handles]
    for columns in range(len(handles), 0, -1):
        if sum(map(max, np.array_split(widths, columns))) <= room:  # as matplotlib fills columns
            break
    look = {"handletextpad": 0.5, "columnspacing": 1.5, "borderaxespad": 0.1}
    fig.legend(handles=list(handles), loc="outside upper center", ncols=columns, title=title or None, **look)


def _errors(line: pd.DataFrame, name: str) -> np.ndarray:
    """Lengths of error bars [2, arms]; NaN, which draws nothing, where there is no interval."""
    value = line[name].to_numpy(float)
    low, high = (line[f"{name}_{end}"].to_numpy(float) for end in ("low", "high"))
    return np.clip([value - low, high - value], 0, None)


def _key(marker: str, label: str, **look: Any) -> Line2D:
    return Line2D([], [], **{"color": "0.25", "marker": marker, "linestyle": "none", "label": label, **look})


def _draft_keys(table: pd.DataFrame, said: str = "") -> list[Line2D]:
    """A key per draft, as "1:3 (1:6.4)", and what is said of it."""
    markers = _markers(table)
    return [
        _key(markers[name], " ".join([short(name), *ratios]) + said) for name, ratios in tables.sizes(table).items()
    ]


def _note(ax: Axes, text: str, height: float = 0.5) -> None:
    ax.text(0.5, height, text, transform=ax.transAxes, ha="center", fontsize=8)


# ---- the figures


@style()
def throughput(arms: pd.DataFrame) -> Figure:
    """Tokens per second against α, a panel per task: a point per draft and draft length (the number beside it).

    The lines are the plain loop, measured beside each draft.
    """
    table = arms_of(arms, "acceptance_probability", "throughput")
    fig, axes = _panels(tasks_of(table), 3.0, "throughput (tokens/s)", sharex=True, sharey=True)
    colours, markers, loop = _colours(table), _markers(table), PLAIN | {"color": "0.35"}
    for task, ax in axes.items():
        for plain in arms[(arms.draft == "none") & (arms.task == task)].itertuples():
            ax.axhline(plain.throughput, **loop, zorder=1)
            if np.isfinite([plain.throughput_low, plain.throughput_high]).all():
                ax.axhspan(plain.throughput_low, plain.throughput_high, color="0.5", alpha=0.13, linewidth=0, zorder=0)
        for draft, line in table[table.task == task].groupby("draft", sort=False):
            x, y = line.acceptance_probability.to_numpy(float), line.throughput.to_numpy(float)
            bars = {"xerr": _errors(line, "acceptance_probability"), "yerr": _errors(line, "throughput")}
            look = {"color": colours[task], "marker": markers[draft], "markeredgecolor": "white", "zorder": 3}
            ax.plot(x, y, color=colours[task], linewidth=0.8, alpha=0.6, zorder=2)
            ax.errorbar(x, y, **bars, **{**BAR, "markersize": 6.5}, **look)
        ax.set_xlabel("acceptance probability α")
        ax.margins(0.12)
        low, high = ax.get_xlim()
        if high - low < 0.1:
            ax.set_xlim(low - 0.05, high + 0.05)
        ax.xaxis.set_major_locator(MaxNLocator(5))
    plain_line = _key("", "plain loop, 95 % interval", **loop)
    _legend(fig, [*_draft_keys(table), plain_line], f"{RATIOS}; number: draft length")
    for task, ax in axes.items():
        line = table[table.task == task]
        _label_points(fig, ax, line[["acceptance_probability", "throughput"]], map(str, line.draft_length))
    return fig


def _label_points(
    fig: Figure, ax: Axes, points_at: pd.DataFrame, labels: Iterable[str], around: "Around | None" = None
) -> None:
    """Write labels beside their points (x, y), each where it covers no point and no other label; "" is none.

    around: where a label may be, the best places first; default _around.
    """
    fig.draw_without_rendering()  # fixes the layout, so that places on the page are known
    places, texts = points_at.to_numpy(float), np.array(list(labels), dtype=object)
    known = np.isfinite(places).all(1)
    unit = fig.dpi / 72  # pixels of a point
    points = ax.transData.transform(places[known]).reshape(-1, 2)
    taken = [Bbox.from_bounds(x - 4 * unit, y - 4 * unit, 8 * unit, 8 * unit) for x, y in points]
    frame = ax.get_window_extent()
    halo = [withStroke(linewidth=2, foreground="white")]
    for point, place, label in zip(points, places[known], texts[known], strict=True):
        if not label:
            continue
        size = (5.2 * len(label) + 1) * unit, 8 * unit
        boxes = (around or _around)(point, size, unit)
        inside = (b for b in boxes if frame.contains(b.x0, b.y0) and frame.contains(b.x1, b.y1))
        free = (b for b in inside if not any(map(b.overlaps, taken)))
        box = next(free, boxes[0])
        taken.append(box)
        middle = np.array([box.x0 + box.x1, box.y0 + box.y1]) / 2
        look: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "center", "path_effects": halo, "zorder": 6}
        look |= {"arrowprops": {"arrowstyle": "-", "color": "0.4", "linewidth": 0.6, "shrinkA": 0}} if around else {}
        where = tuple((middle - point) / unit)
        ax.annotate(label, place, where, textcoords="offset points", **look).set_in_layout(False)


def _around(point: np.ndarray, size: tuple[float, float], unit: float) -> list[Bbox]:
    """Places for a label of that size, nearest first, those at the right before others; all in pixels."""
    boxes = []
    for distance in (6, 9, 13, 18):  # points
        for angle in np.deg2rad([0, 180, 45, -45, 135, -135, 90, -90]):
            x, y = point + distance * unit * np.array([np.cos(angle), np.sin(angle)])
            left = x - size[0] / 2 * (1 - np.cos(angle))
            boxes.append(Bbox.from_bounds(left, y - size[1] / 2, *size))
    return boxes


def _corners(point: np.ndarray, size: tuple[float, float], unit: float) -> list[Bbox]:
    """The same, but clear of error bars both ways; labels get a line to their point."""
    boxes = []
    for distance in (3, 8, 14):  # points
        for right, above in ((True, True), (True, False), (False, True), (False, False)):
            left = point[0] + distance * unit if right else point[0] - distance * unit - size[0]
            bottom = point[1] + distance * unit if above else point[1] - distance * unit - size[1]
            boxes.append(Bbox.from_bounds(left, bottom, *size))
    return boxes


Around = Callable[[np.ndarray, tuple[float, float], float], list[Bbox]]


@style()
def speedup(arms: pd.DataFrame) -> Figure:
    """Speed-up over the plain loop by draft and draft length, a panel per task: measured, and predicted beside it."""
    table = arms_of(arms, "speculative_speedup", "predicted_speedup")
    drafts, lengths = drafts_of(table), sorted(set(table.draft_length))
    fig, axes = _panels(tasks_of(table), 2.9, "speed-up over the plain loop", sharey=True)
    colours, markers, ratios = _colours(table), _markers(table), tables.sizes(table)
    width = len(lengths) + 1  # of a draft's group
    place = {(draft, n): i * width + j for i, draft in enumerate(drafts) for j, n in enumerate(lengths)}
    for task, ax in axes.items():
        line = table[table.task == task]
        x = np.array([place[arm] for arm in zip(line.draft, line.draft_length, strict=True)], float)
        errors = _errors(line, "speculative_speedup")
        for draft in drafts:
            at = (line.draft == draft).to_numpy()
            look = {"color": colours[task], "marker": markers[draft], "zorder": 3}
            ax.errorbar(x[at] - 0.14, line.speculative_speedup[at], errors[:, at], **BAR, **look)
        ax.plot(x + 0.24, line.predicted_speedup, color="black", marker="x", linestyle="none", markersize=4.5, zorder=4)
        ax.axhline(1, **PLAIN, zorder=1)
        ax.set_xticks(list(place.values()), [str(length) for _, length in place])
        for i, draft in enumerate(drafts):
            ax.annotate("\n".join([short(draft, 10), *ratios[draft]]), (i * width + width / 2 - 1, 0), (0, -19),
                        xycoords=("data", "axes fraction"), textcoords="offset points", ha="center", va="top",
                        fontsize=8)  # fmt: skip
        ax.set_xlim(-0.8, len(drafts) * width - 1.2)
        ax.grid(axis="x", visible=False)
        ax.tick_params(axis="x", length=2)
        ax.yaxis.set_major_formatter("{x:g}×")
    fig.supxlabel(f"draft length; {RATIOS}", fontsize=9)
    predicted = _key("x", "predicted from α, c and T(k)", color="black", markersize=4.5)
    _legend(fig, [_key("o", "measured, 95 % interval"), predicted, _key("", "plain loop (1×)", **PLAIN)])
    return fig


@style()
def acceptance_by_position(rows: pd.DataFrame) -> Figure:
    """Share of drafted tokens that stay, by position: of all drafted there (above), and of those tried (below).

    The longest draft length of each draft is shown.
    """
    kinds = {"of all drafted": tables.positions(rows, "drafted"), "of those tried": tables.positions(rows, "tried")}
    tasks, drafts = tasks_of(rows), drafts_of(rows)
    fig = Figure(figsize=(WIDTH, 4.3), layout="constrained")
    axes = fig.subplots(2, len(tasks), sharex=True, sharey=True, squeeze=False)
    colours, markers = _colours(rows), _markers(rows)
    for row, (kind, table) in zip(axes, kinds.items(), strict=True):
        for ax, task in zip(row, tasks, strict=True):
            shown = table[table.task == task]
            for index, draft in enumerate(drafts):
                line = shown[shown.draft == draft]
                x = line.position.to_numpy(float) + 0.12 * (index - (len(drafts) - 1) / 2)
                look = {**BAR, "linestyle": "-", "linewidth": 0.8, "markersize": 4.5, "alpha": 0.9}
                shade = {"color": colours[task], "markerfacecolor": "white" if index % 2 else colours[task]}
                ax.errorbar(x, line.value, _errors(line, "value"), **look, **shade, marker=markers[draft])
            if shown.value.notna().sum() == 0:
                _note(ax, "nothing was drafted")
            ax.set_ylim(-0.04, 1.04)
            ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        row[0].set_ylabel(f"accepted, share\n{kind}")
    for above, below, task in zip(*axes, tasks, strict=True):
        above.set_title(title(task))
        below.set_xlabel("position in the draft")
    keys = _draft_keys(rows)
    for key in keys[1::2]:
        key.set_markerfacecolor("white")
    _legend(fig, keys, RATIOS)
    return fig


@style()
def verify_cost(rows: pd.DataFrame) -> Figure:
    """What a main forward over k tokens costs, T(k)/T(1): every measurement of the run, and their median."""
    curves = tables.curves(rows)
    fig, ax = _single(4.6, 3.0)
    k = curves.index.to_numpy(float)
    for part in curves:
        ax.plot(k, curves[part], color="0.6", marker=".", markersize=4, linestyle="none", zorder=2)
    ax.plot(k, curves.median(axis=1), color=COLOURS[0], marker="o", markersize=4, zorder=3)
    ax.plot(k, k, color="0.2", linestyle=":", zorder=1)
    ax.set(xlabel="tokens verified in one forward, k", ylabel="T(k) / T(1)", xlim=(0, k.max() * 1.04))
    ax.set_ylim(0, max(2.0, float(np.nanmax(curves.to_numpy())) * 1.15))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    keys = [
        _key("o", "median", color=COLOURS[0], markersize=4, linestyle="-"),
        _key(".", "each measurement", color="0.6"),
        _key("", "k forwards of one token", color="0.2", linestyle=":"),
    ]
    ax.legend(handles=keys, loc="upper right" if k.max() < 4 else "lower right")
    return fig


@style()
def time_split(rows: pd.DataFrame) -> Figure:
    """Where a step's time goes, in plain steps, beside the tokens it emits: τ to the right of the bar is faster."""
    table, drafts = tables.split(rows), drafts_of(rows)
    colours, markers = _colours(table), _markers(rows)
    arms = list(dict.fromkeys(zip(table.draft, table.draft_length, strict=True)))
    place = {arm: index + 0.5 * drafts.index(arm[0]) for index, arm in enumerate(arms)}
    last = max(place.values())
    height = max(1.6, 0.24 * (last + 1) + 0.85)
    fig, axes = _panels(tasks_of(table), height, "draft, draft length", sharex=True, sharey=True)
    for task, ax in axes.items():
        line = table[table.task == task]
        y = np.array([place[arm] for arm in zip(line.draft, line.draft_length, strict=True)], float)
        left = np.zeros(len(line))
        for part, (shade, hatch) in SHADES.items():
            width = line[f"{part}_time"].fillna(0).to_numpy(float)
            ax.barh(y, width, 0.72, left, color=shade, hatch=hatch, edgecolor="white", linewidth=0.4, zorder=2)
            left += width
        ax.errorbar(line.cost, y, xerr=_errors(line, "cost"), **{**BAR, "marker": ""}, ecolor="black", zorder=3)
        for draft in drafts:
            at = (line.draft == draft).to_numpy()
            look = {"color": colours[task], "markeredgecolor": "white", "marker": markers[draft], "zorder": 4}
            ax.errorbar(line.tau[at], y[at], xerr=_errors(line[at], "tau"), **{**BAR, "markersize": 6.5}, **look)
        ax.axvline(1, **PLAIN, zorder=1)
        ax.set_xlim(0, None)
        ax.grid(axis="y", visible=False)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    first, room = next(iter(axes.values())), max(0.6, 1.5 - last / 2)
    first.set_yticks(list(place.values()), [f"{short(draft, 12)}, {length}" for draft, length in arms])
    first.set_ylim(last + room, -room)
    fig.supxlabel("time of a step in steps of the plain loop, and tokens per step τ (95 % intervals)", fontsize=9)
    bars = [Patch(facecolor=shade, hatch=hatch, edgecolor="white", label=k) for k, (shade, hatch) in SHADES.items()]
    _legend(fig, [*bars, _key("o", "τ; right of its bar: faster"), _key("", "plain step", **PLAIN)])
    return fig


@style()
def prediction(rows: pd.DataFrame, arms: pd.DataFrame, most: int = 16) -> Figure:
    """Speed-up that theory expects at every draft length of 0 … most, from an arm's α, c and T(k); its measured one.

    A panel per task; each arm's curve goes through its own measured draft length.
    """
    table = arms_of(arms, "acceptance_probability", "draft_cost_ratio", "speculative_speedup")
    fig, axes = _panels(tasks_of(table), 2.7, "speed-up over the plain loop", sharey=True, sharex=True)
    colours, markers = _colours(table), _markers(table)
    for task, ax in axes.items():
        for arm in table[table.task == task].itertuples():
            known = tables.theory_of(rows, arm)
            if known is None:
                _note(ax, "nothing was drafted", 0.1)
                continue
            alpha, c, curve = known
            lengths = range(max(most, arm.draft_length) + 1)
            ax.plot(lengths, [theory.speedup(alpha, n, c, curve) for n in lengths], color="black", linewidth=0.9)
            error = _errors(table.loc[[arm.Index]], "speculative_speedup")
            look = {"color": colours[task], "marker": markers[arm.draft], "zorder": 3}
            ax.errorbar([arm.draft_length], [arm.speculative_speedup], error, **BAR, **look)
        ax.axhline(1, **PLAIN, zorder=1)
        ax.set_xlabel("draft length γ")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter("{x:g}×")
    predicted = _key("", "predicted", color="black", linewidth=0.9, linestyle="-")
    _legend(fig, [*_draft_keys(table, ", measured"), predicted, _key("", "plain loop (1×)", **PLAIN)])
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
    fig, ax = _single(WIDTH, 0.21 * count + 0.42)
    ax.set(xlim=(-PAD, COLUMNS), ylim=(count - 0.1, -0.15))
    ax.set_axis_off()
    for left, row, text, kind, first in boxes:
        ax.barh(row + 0.4, len(text) + PAD, 0.72, left, color=FATES[kind], edgecolor=EDGES[kind], linewidth=0.8)
        look: dict[str, Any] = {"fontsize": 8, "family": "monospace", "ha": "center", "va": "center"}
        ax.text(left + (len(text) + PAD) / 2, row + 0.42, text, **look)
        if first:
            ax.plot([left - PAD / 2] * 2, [row, row + 0.8], color="black", linewidth=1.0)
    keys: list[Any] = [Patch(facecolor=FATES[kind], edgecolor=EDGES[kind], label=kind) for kind in FATES]
    keys.append(_key("|", "a step begins" if full else "a step begins (cut here)", color="black", markersize=9))
    _legend(fig, keys)
    return fig


@style()
def pareto(arms: pd.DataFrame, loss: str = "nll_delta") -> Figure:
    """Speed-up against what it costs in quality, a panel per task, with 95 % intervals. arms: tuning.standings.

    Large: settings of the last round; the step line is their front, whose settings are named. Small: those dropped
    before, on fewer prompts. loss: nll_delta or quality_delta. Raises SettingError for another.
    """
    require("loss", loss, loss in LOSSES, ", ".join(LOSSES))
    table = tables.latest(tables.cells_of(arms, "speculative_speedup", loss))
    tasks = tasks_of(table)
    fig, axes = _panels(tasks, 3.1, "speed-up over the plain loop", sharey=True)
    for task, ax in axes.items():
        line = table[table.task == task]
        final, dropped = line[line.kept], line[~line.kept]
        for rule, own in dropped.groupby("acceptance_rule"):
            marker, colour = RULES[str(rule)]
            look = {"marker": marker, "color": colour, "markerfacecolor": "none", "linestyle": "none"}
            ax.plot(own[loss], own.speculative_speedup, markersize=3, alpha=0.55, zorder=2, **look)
        for rule, own in final.groupby("acceptance_rule"):
            marker, colour = RULES[str(rule)]
            bars = {"xerr": _errors(own, loss), "yerr": _errors(own, "speculative_speedup")}
            look = {"marker": marker, "color": colour, "ecolor": (colour, 0.6), "markeredgecolor": "white", "zorder": 4}
            ax.errorbar(own[loss], own.speculative_speedup, **bars, **{**BAR, "markersize": 6.5}, **look)
        best = final[tables.front(final, loss)].sort_values(loss)
        ax.step(best[loss].clip(lower=0), best.speculative_speedup, where="post", color="0.5", linewidth=1.0, zorder=1)
        ax.axhline(1, **PLAIN, zorder=1)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(PercentFormatter(1.0, None))
        ax.yaxis.set_major_formatter("{x:g}×")
        ax.margins(0.2, 0.12)
    fig.supxlabel(f"{LOSSES[loss]} (right is worse)", fontsize=9)
    used = [rule for rule in RULES if rule in set(table.acceptance_rule)]
    keys = [_key(RULES[rule][0], rule, color=RULES[rule][1]) for rule in used]
    keys += [_key("", "front", color="0.5", linestyle="-"), _key("", "plain loop (1×)", **PLAIN)]
    _legend(
        fig,
        keys,
        f"draft {short(table.draft[0])}; beside a point: γ × K, threshold; small: dropped in an earlier round",
    )
    for task, ax in axes.items():
        final = table[(table.task == task) & table.kept]
        on = tables.front(final, loss)
        texts = [tables.brief(row) if named else "" for row, named in zip(final.itertuples(), on, strict=True)]
        _label_points(fig, ax, final[[loss, "speculative_speedup"]], texts, _corners)
    return fig


@style()
def threshold_heat(arms: pd.DataFrame) -> Figure:
    """Speed-up of every setting of a grid, a line of panels per task and a panel per rule. arms: tuning.standings.

    Columns are draft lengths; lines are candidate counts for the lossless rule, thresholds for the others, where a
    field shows its fastest candidate count. All fields of a task are from the first round, on the same prompts; framed
    are settings that reached the last of several rounds.
    """
    table = tables.cells_of(arms, "speculative_speedup")
    table = table[table["round"] == 1]
    tasks, lengths = tasks_of(table), table.groupby("acceptance_rule", sort=False).draft_length.nunique()
    lines = max(table.candidate_count.nunique(), table.acceptance_threshold.nunique())
    fig = Figure(figsize=(WIDTH, len(tasks) * (0.34 * lines + 0.12) + 1.05), layout="constrained")
    axes = fig.subplots(len(tasks), len(lengths), squeeze=False, width_ratios=list(lengths), sharex="col")
    values = np.append(table.speculative_speedup.dropna().to_numpy(float), [0.8, 1.25])
    scale = ScalarMappable(TwoSlopeNorm(1.0, values.min(), values.max()), "RdBu")
    for row, task in zip(axes, tasks, strict=True):
        last: list[str] = []
        for ax, rule in zip(row, lengths.index, strict=True):
            ticks = _heat(ax, table[(table.task == task) & (table.acceptance_rule == rule)], scale)
            ax.set_title(rule if task == tasks[0] else "")
            ax.tick_params(labelleft=ticks != last, labelbottom=task == tasks[-1])
            last = ticks
        row[0].annotate(title(task), (0, 0.5), (-36, 0), xycoords="axes fraction", textcoords="offset points",
                        rotation=90, ha="center", va="center", fontweight="bold", fontsize=9)  # fmt: skip
    notes = ["draft length γ (K > 1: nodes of a tree; drawn chains: of each); rows: K or threshold; ×: the fastest K"]
    notes += ["framed: in the last round"] if table.reached.max() > 1 else []
    fig.supxlabel("\n".join(notes), fontsize=9)
    bar = fig.colorbar(scale, ax=axes, aspect=30, pad=0.01, label="speed-up", format="{x:g}×")
    bar.set_ticks([tick for tick in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6) if values.min() <= tick <= values.max()])
    return fig


def _heat(ax: Axes, cells: pd.DataFrame, scale: ScalarMappable) -> list[str]:
    """One rule's settings on one task; the names of its lines."""
    plain = cells.acceptance_threshold.isna().all()
    by = "candidate_count" if plain else "acceptance_threshold"
    lengths, lines = sorted(set(cells.draft_length)), sorted(set(cells[by]))
    shown = cells.sort_values("speculative_speedup", na_position="first").groupby([by, "draft_length"]).tail(1)
    several, whole = cells.candidate_count.nunique() > 1 and not plain, set(cells.acceptance_rule) == {"sequence"}
    for one in shown.itertuples():
        x, y, value = lengths.index(one.draft_length), lines.index(getattr(one, by)), one.speculative_speedup
        known = bool(np.isfinite(value))
        colour = scale.to_rgba(value) if known else (1.0, 1.0, 1.0, 1.0)
        ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.8))
        if one.kept and one.reached > 1:
            ax.add_patch(Rectangle((x - 0.45, y - 0.43), 0.9, 0.86, fill=False, edgecolor="black", linewidth=1.2))
        text = (f"{value:.2f}" if known else "–") + (f"\n×{one.candidate_count:.0f}" if several else "")
        dark = np.dot(colour[:3], (0.299, 0.587, 0.114)) < 0.5
        ax.text(x, y, text, ha="center", va="center", fontsize=7, linespacing=1.05, color="white" if dark else "black")
    ax.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(len(lines) - 0.5, -0.5))
    ax.set_xticks(range(len(lengths)), ["text" if whole else f"{n:g}" for n in lengths])
    names = [f"K = {n:g}" if plain else f"{n:g}" for n in lines]
    ax.set_yticks(range(len(lines)), names)
    ax.tick_params(length=0, pad=2)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    return names


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


def _printable(text: str) -> str:
    """A token's text as monospace glyphs the font has: spaces and line ends shown, the rest as boxes."""
    glyphs = get_font(findfont(FontProperties(family="monospace"))).get_charmap()
    text = text.replace(" ", "␣" if not text.strip(" ") else " ").replace("\n", "⏎").replace("\t", "→")
    known = (c if ord(c) in glyphs and not unicodedata.category(c).startswith(("C", "M")) else "□" for c in text)
    return "".join(known)[:24] or "□"


@style()
def training(history: Sequence[tuple[int, int, float]]) -> Figure:
    """Cross-entropy to the main model over the tokens trained on. history: distill's (step, tokens seen, loss)."""
    fig, ax = _single(WIDTH, 2.6)
    ax.plot([seen / 1e6 for _, seen, _ in history], [loss for *_, loss in history], color=COLOURS[0])
    if not history:
        _note(ax, "nothing was trained in this call")
    ax.set(xlabel="training tokens (millions)", ylabel="cross-entropy (nats per token)")
    return fig


@style()
def greedy_match(matches: Mapping[str, Interval]) -> Figure:
    """Per task, how often a draft's arg-max is the main model's greedy token, with its 95 % interval."""
    if not matches:
        raise DataError("there is nothing to plot: no task was measured")
    table = pd.DataFrame([{"task": task} | vars(match) for task, match in matches.items()])
    colours = _colours(table)
    fig, ax = _single(WIDTH, 0.4 * len(table) + 0.9)
    for place, line in enumerate(table.itertuples()):
        error = np.clip([[line.value - line.low], [line.high - line.value]], 0, None)
        ax.errorbar([line.value], [place], xerr=error, **BAR, marker="o", color=colours[line.task])
    ax.set_yticks(range(len(table)), [title(task) for task in table.task])
    ax.set(xlim=(0, 1), ylim=(len(table) - 0.4, -0.6), xlabel="greedy match, share of tokens (95 % interval)")
    ax.grid(axis="y", visible=False)
    return fig


@style()
def by_place(table: pd.DataFrame, xlabel: str, doubling: bool = False) -> Figure:
    """Speed-up (above) and α (below) over a place, a column per task: studies.table, whose x the label names.

    doubling: x grows by factors. Drafts are set apart sideways, so that their intervals don't hide each other.
    """
    if table.empty:
        raise DataError("there is nothing to plot: the study has no rows")
    tasks, drafts, colours, markers = tasks_of(table), drafts_of(table), _colours(table), _markers(table)
    fig = Figure(figsize=(WIDTH, 4.3), layout="constrained")
    axes = fig.subplots(2, len(tasks), sharex=True, sharey="row", squeeze=False)
    places = np.array(sorted(set(table.x)), float)
    at = dict(zip(places, np.log2(places) if doubling else places, strict=True))
    apart = 0.16 * float(np.diff(list(at.values())).min()) if len(at) > 1 else 0.1
    for row, name in zip(axes, ("speedup", "alpha"), strict=True):
        for ax, task in zip(row, tasks, strict=True):
            for index, draft in enumerate(drafts):
                line = table[(table.task == task) & (table.draft == draft)].sort_values("x")
                x = line.x.map(at).to_numpy(float) + apart * (index - (len(drafts) - 1) / 2)
                look = {**BAR, "linestyle": "-", "linewidth": 0.8, "markersize": 4.5, "alpha": 0.9}
                shade = {"color": colours[task], "markerfacecolor": "white" if index % 2 else colours[task]}
                ax.errorbar(x, line[name], _errors(line, name), **look, **shade, marker=markers[draft])
            if name == "speedup":
                ax.axhline(1, **PLAIN, zorder=1)
                ax.yaxis.set_major_formatter("{x:g}×")
            if doubling:
                ax.set_xticks(list(at.values()), [f"{x:g}" for x in places], rotation=45)
            else:
                ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes[0][0].set_ylabel("speed-up over\nthe plain loop")
    axes[1][0].set(ylabel="acceptance\nprobability α", ylim=(-0.04, 1.04))
    for ax, task in zip(axes[0], tasks, strict=True):
        ax.set_title(title(task))
    fig.supxlabel(xlabel, fontsize=9)
    keys = [_key(markers[draft], short(draft), markerfacecolor="white" if i % 2 else "0.25")
            for i, draft in enumerate(drafts)]  # fmt: skip
    _legend(fig, [*keys, _key("", "plain loop (1×)", **PLAIN)], "95 % intervals")
    return fig


# ---- the report


LOSS = {True: ("o", "lossless"), False: ("s", "lossy")}  # marker, name
LEAST = 1e-3  # nats; what is lower is drawn there


@style()
def settings(arms: pd.DataFrame) -> Figure:
    """Tokens per second against α of every setting, a panel per task; hollow squares are lossy ones.

    arms: rows of summaries, of several sweeps too. Small: on too few prompts for an interval. The band holds the plain
    loops measured beside them.
    """
    table = arms[arms.draft != "none"].assign(lossless=lambda x: x.acceptance_rule == "lossless")
    if table.empty:
        raise DataError("there is nothing to plot: no setting with a draft")
    fig, axes = _panels(tasks_of(table), 3.0, "throughput (tokens/s)", sharex=True, sharey=True)
    colours = _colours(table)
    for task, ax in axes.items():
        plain = arms[(arms.task == task) & (arms.draft == "none")].throughput.dropna()
        if len(plain):
            ax.axhspan(plain.min(), plain.max(), color="0.5", alpha=0.25, linewidth=0, zorder=0)
            ax.axhline(plain.median(), **PLAIN, zorder=1)
        own = table[table.task == task]
        known = own.throughput_low.notna()
        for (lossless, told), line in own.groupby([own.lossless, known]):
            x, y = line.acceptance_probability.to_numpy(float), line.throughput.to_numpy(float)
            bars = {"xerr": _errors(line, "acceptance_probability"), "yerr": _errors(line, "throughput")}
            look: dict[str, Any] = {"color": colours[task], "markerfacecolor": colours[task] if lossless else "white"}
            look |= {"marker": LOSS[bool(lossless)][0], "ecolor": (colours[task], 0.3), "zorder": 4 if lossless else 3}
            ax.errorbar(x, y, **bars, **{**BAR, "capsize": 0.0, "markersize": 4.5 if told else 2.5}, **look)
        ax.set(xlabel="acceptance probability α", xlim=(-0.04, 1.04))
        ax.set_ylim(bottom=0)
    keys = [_key(marker, f"{name}, {(table.lossless == lossless).sum()} points",
                 markerfacecolor="0.25" if lossless else "white")
            for lossless, (marker, name) in LOSS.items() if (table.lossless == lossless).any()]  # fmt: skip
    _legend(fig, [*keys, _key("", "plain loop", **PLAIN)])
    return fig


@style()
def ceilings(arms: pd.DataFrame | None, how: Example) -> Figure:
    """Claimed speed-ups (stars) against their rates, once read as α and once as accepted / drafted.

    What is hatched no chain can reach whatever it costs; on the right, none of how.draft_length tokens. Dots: measured
    lossless chains (arms: rows of summaries).
    """
    fig = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = fig.subplots(1, 2, sharey=True)
    readings = {
        "acceptance_probability": ("if it is α, accepted / tried", theory.most_tokens),
        "draft_acceptance_rate": (
            f"if it is accepted / drafted, at γ = {how.draft_length}",
            lambda x: 1 + how.draft_length * x,
        ),
    }
    highest = 0.0 if arms is None else float(arms.speculative_speedup.max())
    top, colours = max(5.0, 1.1 * highest), {claim.task: TASKS[claim.task] for claim in CLAIMS}
    for ax, (name, (said, most)) in zip(axes, readings.items(), strict=True):
        x = np.linspace(0, 0.999, 400)
        y = np.array([most(value) for value in x])
        ax.plot(x, y, color="black", linewidth=1.0, zorder=2)
        ax.fill_between(x, y, top, where=y < top, facecolor="none", hatch="///", edgecolor="0.8", linewidth=0, zorder=1)
        for claim in CLAIMS:
            look: dict[str, Any] = {
                "marker": "*",
                "markersize": 13,
                "color": colours[claim.task],
                "markeredgecolor": "black",
            }
            ax.plot([claim.acceptance], [claim.speedup], **look, linestyle="none", zorder=5)
        if arms is not None:
            chains = arms[(arms.draft != "none") & (arms.acceptance_rule == "lossless") & (arms.candidate_count == 1)]
            for task, line in chains.groupby("task"):
                look = {"color": colours.get(str(task), "0.5"), "marker": "o", "markersize": 4, "linestyle": "none"}
                ax.plot(line[name], line.speculative_speedup, **look, markeredgecolor="white", zorder=4)
        ax.axhline(1, **PLAIN, zorder=1)
        ax.set(xlim=(0, 1), ylim=(0, top), title=said, xlabel="acceptance rate")
        ax.yaxis.set_major_formatter("{x:g}×")
    axes[0].set_ylabel("speed-up over the plain loop")
    keys: list[Any] = [_key("*", f"{claim.task}, claimed", color=colours[claim.task], markersize=11,
                            markeredgecolor="black") for claim in CLAIMS]  # fmt: skip
    keys += [_key("o", "measured, a lossless chain", markersize=4)] if arms is not None else []
    keys += [Patch(facecolor="none", hatch="///", edgecolor="0.7", label="impossible for one candidate")]
    _legend(fig, [*keys, _key("", "plain loop (1×)", **PLAIN)])
    return fig


@style()
def entropy(rows: pd.DataFrame) -> Figure:
    """Acceptance of tried tokens against the main model's entropy, a line per task; beside it how entropies spread."""
    table, known = tables.entropy_bins(rows), tables.tried(rows)
    fig = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    left, right = fig.subplots(1, 2, sharex=True)
    tasks, colours, markers = tasks_of(known), _colours(known), dict(zip(tasks_of(known), "osD" + OTHERS, strict=False))
    for index, task in enumerate(tasks):
        line = table[table.task == task]
        look = {**BAR, "linestyle": "-", "linewidth": 0.9, "markersize": 4.5, "marker": markers[task]}
        x = line.entropy.clip(lower=LEAST) * 1.12 ** (index - (len(tasks) - 1) / 2)
        left.errorbar(x, line.value, _errors(line, "value"), **look, color=colours[task])
        values = np.sort(known[known.task == task].entropy).clip(LEAST)
        right.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=colours[task])
        at = np.linspace(0.1, 0.9, 5)  # markers tell the lines apart in grey
        right.plot(np.quantile(values, at), at, color=colours[task], marker=markers[task], markersize=4.5, linestyle="")
    for ax in (left, right):
        ax.set(xscale="log", xlabel="main model's entropy (nats)", ylim=(-0.04, 1.04))
        ax.xaxis.set_major_formatter("{x:g}")
    left.set_ylabel("accepted, share of those tried")
    right.set_ylabel("share of tried tokens below it")
    _legend(fig, [_key(markers[task], title(task), color=colours[task], linestyle="-") for task in tasks])
    return fig


@style()
def entropy_positions(rows: pd.DataFrame) -> Figure:
    """By position in the draft, a line per task: how often a tried token stays, and the main model's entropy there."""
    table = tables.entropy_positions(rows)
    fig = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    axes = fig.subplots(1, 2, sharex=True)
    tasks, colours, markers = tasks_of(table), _colours(table), dict(zip(tasks_of(table), "osD" + OTHERS, strict=False))
    names = {"stays": "accepted, share of those tried", "entropy": "main model's entropy (nats, mean)"}
    for ax, (name, said) in zip(axes, names.items(), strict=True):
        for index, task in enumerate(tasks):
            line = table[table.task == task]
            look = {**BAR, "linestyle": "-", "linewidth": 0.9, "markersize": 4.5, "marker": markers[task]}
            x = line.position + 0.14 * (index - (len(tasks) - 1) / 2)
            ax.errorbar(x, line[name], _errors(line, name), **look, color=colours[task])
        ax.set(xlabel="position in the draft", ylabel=said)
        ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes[0].set_ylim(-0.04, 1.04)
    axes[1].set_ylim(bottom=0)
    _legend(fig, [_key(markers[task], title(task), color=colours[task], linestyle="-") for task in tasks])
    return fig
