"""Figures on made-up results: they draw without a warning, show what the data hold, and say it in words."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from specdec_lab import plots, readings, tables
from specdec_lab.errors import DataError, SettingError
from specdec_lab.metrics import Totals
from specdec_lab.statistics import Interval, summary
from specdec_lab.trace import Step, Trace
from specdec_lab.tuning import standings

pytestmark = pytest.mark.filterwarnings("error")

KS = (1, 2, 3, 5, 9, 17)
TASKS = {"json": 0.85, "code": 0.7, "prose": 0.5}
DRAFTS = {"1:2": (0.08, 0.36, 67_000_000, 38_900_000), "1:4": (-0.1, 0.06, 33_700_000, 5_300_000)}


def run(alpha: float, length: int, cost: float, tokens: int, rng: np.random.Generator) -> dict[str, Any]:
    """Counts and times of one reply whose tried tokens stay with probability `alpha`; a plain step takes 25 ms."""
    drafted, tried, accepted, steps, emitted = np.zeros(length, int), np.zeros(length, int), np.zeros(length, int), 0, 0
    while emitted < tokens:
        room = min(length, tokens - emitted - 1)
        stay = int((rng.random(room) < alpha).cumprod().sum())
        drafted[:room] += 1
        tried[: min(stay + 1, room)] += 1
        accepted[:stay] += 1
        steps, emitted = steps + 1, emitted + stay + 1
    sums = Totals(
        drafted=int(drafted.sum()),
        accepted=int(accepted.sum()),
        rejected=int((tried - accepted).sum()),
        steps=steps,
        planned=int(drafted.sum()),
        emitted=emitted,
        overlap=float(accepted.sum()),
        draft_s=0.024 * cost * drafted.sum() * rng.normal(1, 0.02),
        verify_s=0.024 * steps * (1 + 0.08 * length) * rng.normal(1, 0.02),
        other_s=0.001 * steps,
        prefill_s=0.3,
        first_s=0.4,
        texts=1,
    )
    at = {"drafted_at": drafted.tolist(), "tried_at": tried.tolist(), "accepted_at": accepted.tolist()}
    return {**vars(sums), "decode_s": sums.decode_s, **at}


def results(
    tasks: dict[str, float] = TASKS, drafts: Any = DRAFTS, lengths: tuple[int, ...] = (2, 8), prompts: int = 8
) -> pd.DataFrame:
    """Rows as experiment.load gives them: a part per task and draft, its baseline among its arms."""
    rng, out = np.random.default_rng(0), []
    for task, alpha in tasks.items():
        for draft, (better, cost, parameters, body) in drafts.items():
            curve = [1 + 0.08 * (k - 1) for k in KS]
            part: dict[str, Any] = {"part": f"{task} {draft}", "main": "m", "task": task, "device": "cpu"}
            part |= {"verify_k": list(KS), "verify_ratio": curve, "verify_seconds": [0.024 * x for x in curve]}
            part |= {"main_parameters": 134_500_000, "main_body_parameters": 106_200_000}
            for prompt in range(prompts):
                plain = run(0.0, 0, 0.0, 48, rng)
                beside = {f"baseline_{f.name}": plain[f.name] for f in fields(Totals)} | {"baseline_memory_bytes": 800}
                about = {"prompt_id": f"{task}-{prompt}", "prompt_sha": "0" * 16, "repeat": 0, "memory_bytes": 1000}
                texts = {"quality": 1.0, "nll": 1.5, "repetition": 0.1}
                about |= {f"baseline_{name}": value for name, value in texts.items()}
                about |= {**texts, "quality_better": "higher", **part, **beside}
                mine = {"draft": "none", "draft_length": 0, "draft_parameters": 0, "draft_body_parameters": 0}
                out.append({**about, **mine, **plain, "same_as_baseline": None})
                for length in lengths:
                    mine = {"draft": draft, "draft_length": length}
                    mine |= {"draft_parameters": parameters, "draft_body_parameters": body, "same_as_baseline": True}
                    stay = float(np.clip(alpha + better + rng.normal(0, 0.05), 0, 1))
                    out.append({**about, **mine, **run(stay, length, cost, 48, rng)})
    return pd.DataFrame(out)


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return results()


@pytest.fixture(scope="module")
def arms(rows: pd.DataFrame) -> pd.DataFrame:
    return summary(rows, resamples=60)


@pytest.fixture(scope="module")
def nothing() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows and summary of an arm that never drafted, on too few prompts for intervals."""
    rows = results({"json": 0.5}, {"ngram": (0, 0.0, 0, 0)}, lengths=(0,), prompts=2)
    rows.loc[rows.same_as_baseline.notna(), ["draft", "draft_length"]] = ["ngram", 4]
    rows.loc[rows.draft == "none", "draft_length"] = 0
    return rows, summary(rows, resamples=20)


FIGURES: dict[str, Callable[[pd.DataFrame, pd.DataFrame], Figure]] = {
    "throughput": lambda rows, arms: plots.throughput(arms),
    "speedup": lambda rows, arms: plots.speedup(arms),
    "acceptance_by_position": lambda rows, arms: plots.acceptance_by_position(rows),
    "verify_cost": lambda rows, arms: plots.verify_cost(rows),
    "time_split": lambda rows, arms: plots.time_split(rows),
    "prediction": lambda rows, arms: plots.prediction(rows, arms),
}
READINGS: dict[str, Callable[[pd.DataFrame, pd.DataFrame], str]] = {
    "throughput": lambda rows, arms: readings.throughput(arms),
    "speedup": lambda rows, arms: readings.speedup(arms),
    "acceptance_by_position": lambda rows, arms: readings.positions(rows),
    "verify_cost": lambda rows, arms: readings.verify(rows),
    "time_split": lambda rows, arms: readings.time_split(rows),
    "prediction": lambda rows, arms: readings.break_even(rows, arms),
    "verdict": lambda rows, arms: readings.verdict(rows, arms, "1:4"),
}


def panels(fig: Figure) -> list[Axes]:
    return [ax for ax in fig.axes if ax.axison]


def bars(fig: Figure) -> list[ErrorbarContainer]:
    return [c for ax in panels(fig) for c in ax.containers if isinstance(c, ErrorbarContainer)]


def heights(container: ErrorbarContainer) -> np.ndarray:
    return np.asarray(container.lines[0].get_ydata(), dtype=float)


def bar_lengths(fig: Figure) -> Iterator[float]:
    """Lengths of all error bars that are drawn, in data units."""
    for container in bars(fig):
        for line in container.lines[2]:
            for segment in line.get_segments():
                yield float(np.abs(np.diff(segment, axis=0)).max()) if len(segment) > 1 else 0.0


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_written_named_and_whole(name: str, rows: pd.DataFrame, arms: pd.DataFrame, tmp_path: Path) -> None:
    fig = FIGURES[name](rows, arms)
    paths = plots.save(fig, name, tmp_path / "new")
    assert [path.name for path in paths] == [f"{name}.svg", f"{name}.png"]
    assert all(path.stat().st_size > 5000 for path in paths)
    assert paths[1].read_bytes()[:4] == b"\x89PNG"
    named = [label for ax in fig.axes for label in (ax.get_xlabel(), ax.get_ylabel())]
    assert any(named[1::2]), "a y axis has its name"
    assert any(named[::2]) or fig.get_supxlabel(), "and an x axis"
    assert fig.get_figwidth() <= plots.WIDTH
    assert min(float(text.get_fontsize()) for text in fig.findobj(Text)) >= 8
    assert outside(fig) == []
    assert overlaps(fig) == []


def texts(fig: Figure) -> list[tuple[str, Bbox]]:
    """Every text that is drawn, with its place in pixels."""
    fig.draw_without_rendering()
    ticks = [(tick, axis) for ax in panels(fig) for axis in (ax.xaxis, ax.yaxis) for tick in axis.get_major_ticks()]
    undrawn = {
        id(tick.label1)
        for tick, axis in ticks
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    out = []
    for ax in [fig, *panels(fig)]:
        for text in ax.findobj(Text):
            if text.get_visible() and text.get_text().strip() and id(text) not in undrawn:
                out.append((text.get_text(), text.get_window_extent()))
    return list({(label, *box.extents): (label, box) for label, box in out}.values())


def outside(fig: Figure) -> list[str]:
    frame = fig.bbox
    return [
        label
        for label, box in texts(fig)
        if not (frame.x0 - 1 <= box.x0 and box.x1 <= frame.x1 + 1 and frame.y0 - 1 <= box.y0 and box.y1 <= frame.y1 + 1)
    ]


def overlaps(fig: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other by more than a pixel; ticks outside of their axis are not drawn."""
    shown = [(label, box.padded(-1)) for label, box in texts(fig) if box.width > 2 and box.height > 2]
    return [
        (a, b) for i, (a, one) in enumerate(shown) for b, two in shown[i + 1 :] if one.overlaps(two) and one.height > 0
    ]


def test_the_checks_of_layout_find_faults() -> None:
    """Negative control of `outside` and `overlaps`."""
    fig = Figure(figsize=(2, 2))
    fig.text(0.5, 0.5, "one")
    fig.text(0.52, 0.5, "two")
    fig.text(0.95, 0.1, "beyond the edge")
    assert overlaps(fig) == [("one", "two")]
    assert outside(fig) == ["beyond the edge"]


def test_every_arm_is_a_point_with_intervals_both_ways(arms: pd.DataFrame) -> None:
    fig = plots.throughput(arms)
    assert [ax.get_title() for ax in panels(fig)] == list(TASKS)
    assert len(bars(fig)) == len(TASKS) * len(DRAFTS)
    points = sum(len(heights(container)) for container in bars(fig))
    assert points == sum(arms.draft != "none")
    lengths = list(bar_lengths(fig))
    assert len(lengths) == 2 * points
    assert min(lengths) > 0
    numbers = [text.get_text() for ax in panels(fig) for text in ax.texts]
    assert sorted(numbers) == sorted(str(n) for n in arms[arms.draft != "none"].draft_length)
    dashed = [line for ax in panels(fig) for line in ax.lines if line.get_linestyle() == "--"]
    assert len(dashed) == (arms.draft == "none").sum(), "the plain loop of every part"


def test_measured_and_predicted_speedups_stand_beside_each_other(arms: pd.DataFrame) -> None:
    fig = plots.speedup(arms)
    for ax, task in zip(panels(fig), TASKS, strict=True):
        table = arms[(arms.task == task) & (arms.draft != "none")]
        crosses = next(line for line in ax.lines if line.get_marker() == "x")
        assert sorted(np.asarray(crosses.get_ydata(), dtype=float)) == pytest.approx(sorted(table.predicted_speedup))
        measured = np.concatenate([heights(c) for c in bars(fig) if c.lines[0].axes is ax])
        assert sorted(measured) == pytest.approx(sorted(table.speculative_speedup))
    assert all(length > 0 for length in bar_lengths(fig))


def test_ratios_are_computed_with_and_without_embedding(rows: pd.DataFrame, arms: pd.DataFrame) -> None:
    assert tables.size_ratios(arms) == {"1:2": ("1:2", "1:2.7"), "1:4": ("1:4", "1:20")}
    written = " ".join(text.get_text() for text in panels(plots.speedup(arms))[0].texts)
    assert "1:2\n(1:2.7)" in written
    assert "1:4\n(1:20)" in written
    assert "1:4 (1:20 without embedding)" in readings.verdict(rows, arms, "1:4")


def test_bars_end_at_the_cost_of_a_step(rows: pd.DataFrame, arms: pd.DataFrame) -> None:
    """Tokens per step over its cost in plain steps is the speed-up: the figure explains it without a remainder."""
    ax = panels(plots.time_split(rows))[0]
    ends: dict[float, float] = {}
    for patch in ax.patches:
        x, y = patch.get_x() + patch.get_width(), patch.get_y()  # type: ignore[attr-defined]
        ends[y] = max(ends.get(y, 0.0), x)
    table = arms[(arms.task == "json") & (arms.draft != "none")]
    expected = table.tokens_per_main_forward / table.speculative_speedup
    assert sorted(ends.values()) == pytest.approx(sorted(expected))


def test_positions_show_both_shares(rows: pd.DataFrame) -> None:
    fig = plots.acceptance_by_position(rows)
    assert len(panels(fig)) == 2 * len(TASKS)
    of_drafted, of_tried = heights(bars(fig)[0]), heights(bars(fig)[len(TASKS) * len(DRAFTS)])
    assert len(of_drafted) == 8
    assert of_drafted[0] == of_tried[0], "at the first position every token is tried"
    assert (of_drafted <= of_tried + 1e-12).all()


def test_a_task_keeps_its_colour_and_a_draft_its_marker(rows: pd.DataFrame, arms: pd.DataFrame) -> None:
    looks = set()
    for fig in (plots.throughput(arms), plots.speedup(arms), plots.prediction(rows, arms)):
        for ax in panels(fig):
            for container in ax.containers:
                if isinstance(container, ErrorbarContainer):
                    looks.add((ax.get_title(), container.lines[0].get_color()))
    assert len(looks) == len(TASKS)
    assert len({colour for _, colour in looks}) == len(TASKS)
    alone = plots.throughput(arms[arms.task == "prose"])
    assert bars(alone)[0].lines[0].get_color() == plots.TASKS["prose"]


def test_own_tasks_and_models_have_colours_markers_and_short_names() -> None:
    drafts = {"/models/a/very-long-name-of-a-model": (0, 0.2, 50_000_000, 30_000_000), "ngram": (-0.2, 0.01, 0, 0)}
    rows = results({f"/data/own-{n}.jsonl": 0.6 for n in range(4)}, drafts, prompts=5)
    arms = summary(rows, resamples=20)
    for name, make in FIGURES.items():
        fig = make(rows, arms)
        assert outside(fig) == [], name
        assert overlaps(fig) == [], name
        assert not any("/data" in label or "/models" in label for label, _ in texts(fig)), name
    assert len(set(plots._markers(rows).values())) == 2
    assert len(set(plots._colours(rows).values())) == 4


@pytest.mark.parametrize("name", FIGURES)
def test_undefined_values_are_drawn_as_gaps(name: str, nothing: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    fig = FIGURES[name](*nothing)
    fig.draw_without_rendering()
    if name in ("throughput", "speedup"):
        assert list(bar_lengths(fig)) == [] or max(bar_lengths(fig)) == 0 or np.isnan(list(bar_lengths(fig))).all()


@pytest.mark.parametrize("name", READINGS)
def test_sentences_survive_undefined_values(name: str, nothing: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    said = READINGS[name](*nothing)
    assert said
    assert "nan" not in said.lower()


@pytest.mark.parametrize("name", FIGURES)
def test_bad_tables_are_refused(name: str, rows: pd.DataFrame, arms: pd.DataFrame) -> None:
    draw = FIGURES[name]
    with pytest.raises(DataError, match="no rows"):
        draw(rows.iloc[:0], arms.iloc[:0])
    with pytest.raises(DataError, match="no column"):
        draw(rows.drop(columns=["verify_k", "draft_length"]), arms.drop(columns="draft_length"))
    with pytest.raises(DataError, match="the plain loop alone"):
        draw(rows[rows.draft == "none"], arms[arms.draft == "none"])
    with pytest.raises(DataError, match="one main model.*m, other"):
        draw(pd.concat([rows, rows.assign(main="other")]), pd.concat([arms, arms.assign(main="other")]))


def test_mixed_settings_are_refused_with_what_differs(rows: pd.DataFrame, arms: pd.DataFrame) -> None:
    mixed = pd.concat([arms.assign(temperature=0.0), arms.assign(temperature=1.0, part="other")])
    with pytest.raises(DataError, match="temperature"):
        plots.throughput(mixed)
    with pytest.raises(DataError, match="several settings"):
        plots.time_split(pd.concat([rows, rows.assign(part="other")]))


def test_svg_files_do_not_change_between_runs(arms: pd.DataFrame, tmp_path: Path) -> None:
    first, second = (plots.save(plots.speedup(arms), "same", tmp_path / name) for name in ("a", "b"))
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()
    assert b"<dc:date>" not in first[0].read_bytes()


def test_figures_leave_the_users_style_alone(arms: pd.DataFrame) -> None:
    before = dict(matplotlib.rcParams)
    plots.speedup(arms)
    assert dict(matplotlib.rcParams) == before


# ---- the trace of one text


def step(drafted: list[int], accepted: int, kind: str, emitted: int) -> Step:
    n = len(drafted)
    fate = ["accepted"] * accepted + ["rejected"] * (accepted < n) + ["untried"] * (n - accepted - 1)
    ones = [1.0] * n
    per_node = (drafted, list(range(-1, n - 1)), ones, ones, ones, ones, ones, fate)
    return Step(*per_node, 9, kind, 1.0, 1.0, 0.0, planned=n, active=1, emitted=emitted)


def trace(*steps: Step) -> Trace:
    return Trace(3, steps=list(steps), tokens=[0] * sum(s.emitted for s in steps), finish="length")


def test_the_strip_shows_every_emitted_token_in_its_colour() -> None:
    made = trace(step([1, 2, 3], 2, "recovered", 3), step([4, 5], 2, "bonus", 3), step([], 0, "plain", 1))
    fig = plots.trace_strip(made, lambda token: f" t{token}")
    (ax,) = fig.axes
    assert [text.get_text().strip() for text in ax.texts] == ["t1", "t2", "t9", "t4", "t5", "t9", "t9"]
    colours = [plots.FATES[k] for k in ("accepted", "accepted", "recovered", "accepted", "accepted", "bonus", "plain")]
    assert [to_hex(patch.get_facecolor()) for patch in ax.patches] == colours
    assert len(ax.lines) == 3, "a tick where a step begins"
    assert "7 tokens in 3 main forwards: of 5 drafted tokens 4" in readings.trace(made)


def test_the_strip_shows_no_token_the_user_did_not_get() -> None:
    fig = plots.trace_strip(trace(step([1, 2, 3], 3, "bonus", 2)), str)
    assert [text.get_text() for text in fig.axes[0].texts] == ["1", "2"]


@pytest.mark.parametrize(
    "text", ["$x_1$ $", "漢字", "🙂", "\n\n", "\x00\x1b", "\ufffd", "e\u0301", "", "tab\t", "w" * 300]
)
def test_the_strip_takes_any_text(text: str) -> None:
    plots.trace_strip(trace(*[step([1, 2], 1, "recovered", 2)] * 30), lambda token: text).draw_without_rendering()


def test_refused_drafts_leave_no_token_in_the_strip_and_are_told() -> None:
    made = trace(step([1, 2], 0, "refused", 0), step([3, 4], 2, "bonus", 3))
    assert [text.get_text() for text in plots.trace_strip(made, str).axes[0].texts] == ["3", "4", "9"]
    assert "3 tokens in 2 main forwards: of 4 drafted tokens 2" in readings.trace(made)
    assert "1 refused the draft" in readings.trace(made)
    assert "refused" not in readings.trace(trace(step([3, 4], 2, "bonus", 3)))


def test_a_long_trace_is_cut_and_says_so() -> None:
    made = trace(*[step([1, 2], 2, "bonus", 3)] * 200)
    fig = plots.trace_strip(made, lambda token: "word ", lines=4)
    assert len(fig.axes[0].texts) < 200
    assert "cut here" in fig.legends[0].get_texts()[-1].get_text()
    with pytest.raises(DataError, match="no tokens"):
        plots.trace_strip(Trace(3), str)


# ---- sentences, tables, verdict


def test_sentences_hold_the_numbers_of_the_data(rows: pd.DataFrame, arms: pd.DataFrame) -> None:
    json = arms[(arms.task == "json") & (arms.draft != "none")]
    best = json.loc[json.throughput.idxmax()]
    assert f"{best.draft} with γ = {best.draft_length} is fastest with {best.throughput:.1f}" in (
        readings.throughput(arms)
    )
    said = readings.speedup(arms)
    table = arms[arms.draft != "none"]
    assert f"Of {len(table)} settings {(table.speculative_speedup_low > 1).sum()} are faster" in said
    assert f"{(table.speculative_speedup_high < 1).sum()} slower" in said
    assert "5 tokens cost 1.32×" in readings.verify(rows)


def test_a_slow_draft_is_said_to_be_slow() -> None:
    rows = results({"json": 0.3}, {"1:2": (0, 0.6, 67_000_000, 38_900_000)}, lengths=(8,))
    arms = summary(rows, resamples=60)
    assert "0 are faster than the plain loop, 1 slower" in readings.speedup(arms)
    assert "It is slower than the plain loop" in readings.verdict(rows, arms, "1:2")
    assert "slower" in readings.time_split(rows)


@pytest.mark.parametrize(
    ("alphas", "expected"),
    [((0.05, 0.6, 0.05), "best"), ((0.9, 0.3, 0.3), "not best"), ((0.62, 0.6, 0.3), "undecided")],
)
def test_the_verdict_follows_paired_intervals(alphas: tuple[float, float, float], expected: str) -> None:
    drafts = {f"1:{n}": (alpha, 0.1, 10**8 // n, 10**7 // n) for n, alpha in zip((2, 3, 4), alphas, strict=True)}
    rows = results({"code": 0.0}, drafts, lengths=(4,))
    assert f"**code**: 1:3 with γ = 4 is **{expected}**" in readings.verdict(rows, summary(rows, resamples=60), "1:3")


def test_without_the_asked_draft_the_fastest_is_judged(rows: pd.DataFrame, arms: pd.DataFrame) -> None:
    said = readings.verdict(rows, arms, "1:3")
    assert "1:3" not in said.replace("1:3.", "")
    assert said.count("is **") == len(TASKS)


def test_the_table_has_a_line_per_arm(arms: pd.DataFrame) -> None:
    table = readings.sweep_table(arms)
    assert len(table) == (arms.draft != "none").sum()
    assert list(table.task.drop_duplicates()) == list(TASKS)
    assert readings.as_markdown(table).count("\n") == len(table) + 1


def test_the_metrics_table_reads_values_lists_and_gaps(
    arms: pd.DataFrame, nothing: tuple[pd.DataFrame, pd.DataFrame]
) -> None:
    table = readings.metrics_table(arms[arms.draft == "1:2"].iloc[0]).set_index("metric")
    assert float(table.value["throughput"]) == pytest.approx(arms[arms.draft == "1:2"].iloc[0].throughput, rel=1e-3)
    assert len(table.value["acceptance_by_position"].split()) == 2
    empty = readings.metrics_table(nothing[1][nothing[1].draft == "ngram"].iloc[0]).set_index("metric")
    assert empty.value["acceptance_probability"] == "undefined"
    assert empty["95 % interval"]["throughput"] == "–"


# ---- a grid of settings


def grid_rows(
    rules: dict[str, tuple[float, float]], tasks: Sequence[str] = tuple(TASKS), rounds: Sequence[int] = (2, 8),
    lengths: Sequence[int] = (4, 8, 16), counts: Sequence[int] = (1, 4), thresholds: Sequence[float] = (0.5, 0.9),
) -> pd.DataFrame:  # fmt: skip
    """Rows as tuning.Search.run gives them: α and the rise of the NLL of each rule; the last round has γ = 4 alone."""
    rng, out = np.random.default_rng(0), []
    plain = run(0.0, 0, 0.0, 48, rng) | {"quality": 1.0, "nll": 1.5, "repetition": 0.1}
    beside = {f"baseline_{name}": value for name, value in plain.items()} | {"baseline_memory_bytes": 800}
    sizes = {"main_parameters": 134e6, "main_body_parameters": 106e6}
    sizes |= {"draft_parameters": 34e6, "draft_body_parameters": 5e6}
    curve = {"verify_k": [1, 2], "verify_ratio": [1.0, 1.1], "verify_seconds": [0.1, 0.11]}
    for index, (task, prompts) in enumerate([(task, n) for task in tasks for n in rounds]):
        about: dict[str, Any] = {"part": f"part {index}", "main": "m", "task": task, "memory_bytes": 1000, "repeat": 0}
        about |= {"round": rounds.index(prompts) + 1, "quality_better": "higher", "same_as_baseline": None} | sizes
        for prompt in range(prompts):
            about |= {"prompt_id": f"{task}-{prompt}", "prompt_sha": "0" * 16, **beside, **curve}
            out.append({**about, **plain, "draft": "none", "draft_length": 0, "candidate_count": 1})
            for rule, length, count in [
                (r, n, k) for r in rules for n in lengths[: 1 if prompts > 2 else 9] for k in counts
            ]:
                alpha, rise = rules[rule]
                for threshold in [None] if rule == "lossless" else thresholds:
                    mine = {"draft": "1:4", "draft_length": length, "candidate_count": count, "acceptance_rule": rule}
                    mine |= {"acceptance_threshold": threshold, "quality": 1.0 - (rise > 0.2) * (prompt % 2)}
                    mine |= {"nll": 1.5 * (1 + rise * rng.uniform(0.8, 1.2)), "repetition": 0.1}
                    stay = alpha - 0.02 * count - 0.1 * (threshold or 0) + rng.normal(0, 0.02)
                    out.append({**about, **run(float(np.clip(stay, 0, 1)), length, 0.06, 48, rng), **mine})
    return pd.DataFrame(out)


RULES = {"lossless": (0.7, 0.0), "threshold": (0.95, 0.4), "typical": (0.85, 0.01), "block": (0.4, 0.2)}


def grid_arms(rows: pd.DataFrame) -> pd.DataFrame:
    rest = {"branching": "dynamic", "max_retries": None, "draft_temperature": None, "adaptive_threshold": None}
    return standings(rows.assign(**rest), resamples=60)


@pytest.fixture(scope="module")
def grid() -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = grid_rows(RULES)
    return rows, grid_arms(rows)


def test_every_setting_of_the_grid_is_a_field(grid: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    """Thresholds show their fastest candidate count; what reached the last round is framed."""
    _, arms = grid
    fig = plots.threshold_heat(arms)
    shown = [ax for ax in panels(fig) if ax.get_label() != "<colorbar>"]  # the panels of json come first
    assert len(shown) == len(TASKS) * len(RULES)
    first = arms[(arms.task == "json") & (arms["round"] == 1) & (arms.draft != "none")]
    for ax, rule in zip(shown, RULES, strict=False):
        cells = first[first.acceptance_rule == rule]
        by = "candidate_count" if rule == "lossless" else "acceptance_threshold"
        best = cells.groupby([by, "draft_length"]).speculative_speedup.max()
        written = [text.get_text().split("\n")[0] for text in ax.texts if text.get_text() != "json"]
        assert sorted(written) == sorted(f"{value:.2f}" for value in best)
        assert len({text.get_position() for text in ax.texts if text.get_text() != "json"}) == len(best)
        framed = [patch for patch in ax.patches if not patch.get_fill()]
        assert len(framed) == 2, "both lines at γ = 4"
    for check in (outside, overlaps):
        assert check(fig) == []


def test_the_whole_grid_of_the_articles_fits_the_page() -> None:
    lists: dict[str, Any] = {"lengths": (8, 16, 24, 32), "counts": (1, 8), "thresholds": (0.5, 0.6, 0.7, 0.8, 0.9)}
    rows = grid_rows(RULES | {"sequence": (0.1, 0.5)}, ["json"], rounds=(1,), **lists)
    arms = grid_arms(rows[(rows.acceptance_rule != "sequence") | (rows.draft_length == 8)])
    fig = plots.threshold_heat(arms)
    for check in (outside, overlaps):
        assert check(fig) == []
    assert not [patch for ax in panels(fig) for patch in ax.patches if not patch.get_fill()], "one round: no frames"


def test_the_front_shows_both_intervals_and_marks_rules(grid: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    _, arms = grid
    fig = plots.pareto(arms)
    last = arms[(arms["round"] == 2) & (arms.draft != "none")]
    points = {ax.get_title(): [c for c in bars(fig) if c.lines[0].axes is ax] for ax in panels(fig)}
    for task, containers in points.items():
        heights_of = np.concatenate([heights(c) for c in containers])
        assert sorted(heights_of) == pytest.approx(sorted(last[last.task == task].speculative_speedup))
        looks = {(c.lines[0].get_marker(), c.lines[0].get_color()) for c in containers}
        assert len(looks) == len({m for m, _ in looks}) == len({c for _, c in looks}) == len(RULES)
    named = [text.get_text() for text in panels(fig)[0].texts]
    best = last[last.task == "json"].sort_values("speculative_speedup").iloc[-1]
    assert tables.brief(best) in named
    assert outside(fig) == []
    with pytest.raises(SettingError, match="nll_delta, quality_delta"):
        plots.pareto(arms, "speed")
    plots.pareto(arms, "quality_delta").draw_without_rendering()


def test_the_step_line_is_the_front(grid: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    _, arms = grid
    (ax, *_) = panels(plots.pareto(arms))
    line = next(line for line in ax.lines if line.get_drawstyle() == "steps-post")
    x, y = (np.asarray(values, float) for values in (line.get_xdata(), line.get_ydata()))
    assert (np.diff(x) >= 0).all()
    assert (np.diff(y) > 0).all()
    last = arms[(arms["round"] == 2) & (arms.task == "json") & (arms.draft != "none")]
    assert y[0] == last[last.acceptance_rule == "lossless"].speculative_speedup.max() or x[0] > 0
    assert y[-1] == last.speculative_speedup.max()


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"typical": (0.95, 0.01)}, ["at equal quality a lossy rule beats it: typical 0.5, γ = 4, K = 1 is 1."]),
        ({"threshold": (0.95, 0.5)}, ["no lossy rule beats it", "speed for quality: threshold 0.5"]),
        ({"block": (0.3, 0.0)}, ["no lossy rule beats it at equal quality, as far as intervals tell."]),
    ],
)
def test_lossy_rules_are_judged_by_intervals(rules: dict[str, tuple[float, float]], says: list[str]) -> None:
    rows = grid_rows({"lossless": (0.6, 0.0), **rules}, ["code"])
    said = readings.optimum(rows, grid_arms(rows))
    assert "* **code**: best without loss is lossless, γ = 4, K = 1, 1." in said
    for words in says:
        assert words in said


def test_nothing_is_claimed_on_too_few_prompts() -> None:
    """Without intervals a rule that is twice as fast is not said to be faster."""
    rows = grid_rows({"lossless": (0.3, 0.0), "typical": (0.99, 0.0)}, ["code"], rounds=(2,))
    arms = grid_arms(rows)
    said = readings.optimum(rows, arms)
    assert "no lossy rule beats it at equal quality, as far as intervals tell." in said
    assert "nan" not in said.lower() + readings.threshold_heat(arms).lower()
    for fig in (plots.pareto(arms), plots.threshold_heat(arms)):
        assert outside(fig) == []


def test_the_grid_table_has_a_line_per_setting_of_the_last_round(grid: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    table = readings.grid_table(grid[1])
    assert len(table) == len(TASKS) * (2 + 3 * 4)
    assert list(table.task.drop_duplicates()) == list(TASKS)
    lossless = table[table.setting.str.startswith("lossless")]
    assert set(lossless["NLL"]) == {"+0% (+0% … +0%)"}
    assert set(table.prompts) == {8}
    best = readings.threshold_heat(grid[1])
    assert f"of {2 * 3 + 3 * 12}, on 2 prompts a task" in best


def test_a_grid_of_two_drafts_is_refused(grid: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    _, arms = grid
    other = arms.assign(draft=arms.draft.replace("1:4", "1:2"))
    with pytest.raises(DataError, match="one draft, these results have"):
        plots.threshold_heat(pd.concat([arms, other]))
    with pytest.raises(DataError, match="several times"):
        plots.pareto(pd.concat([arms, arms]))
    with pytest.raises(DataError, match="no column round"):
        plots.pareto(arms.drop(columns="round"))


# ---- distillation


def test_training_and_match_are_drawn() -> None:
    history = [(50, 100_000, 4.0), (100, 200_000, 3.0)]
    (line,) = plots.training(history).axes[0].lines
    assert list(line.get_ydata()) == [4.0, 3.0]
    assert "from 4.000 to 3.000" in readings.training(history).replace("went from 4.000", "from 4.000")
    plots.training([]).draw_without_rendering()
    assert "Nothing was trained" in readings.training([])
    nan = float("nan")
    matches = {"json": Interval(0.6, 0.5, 0.7, 20), "prose": Interval(0.4, nan, nan, 3)}
    fig = plots.greedy_match(matches)
    assert overlaps(fig) == outside(fig) == []
    assert readings.match(matches).endswith("**json** 0.60 (0.50 … 0.70), **prose** 0.40 (no interval).")
    with pytest.raises(DataError, match="no task"):
        plots.greedy_match({})


@pytest.mark.parametrize(("xs", "doubling"), [((64, 128, 256, 512, 1024, 2048), True), (range(0, 256, 16), False)])
def test_places_are_drawn_whole_with_intervals(xs: Sequence[int], doubling: bool, tmp_path: Path) -> None:
    """Speed-up above, α below; every draft a line in every panel."""
    value = {"speedup": 2.0, "speedup_low": 1.5, "speedup_high": 2.5, "alpha": 0.6, "alpha_low": 0.5, "alpha_high": 0.7}
    sizes = {"1:4": 34e6, "ngram": 0.0, "fastest": 0.0}
    lines = [
        {"task": task, "draft": draft, "x": x, "draft_parameters": size, **value}
        for task in ("json", "code", "prose")
        for draft, size in sizes.items()
        for x in xs
    ]
    fig = plots.by_place(pd.DataFrame(lines), "prompt length (tokens)", doubling)
    assert len(bars(fig)) == 2 * 3 * 3
    assert {round(length, 6) for length in bar_lengths(fig)} == {1.0, 0.2}
    for path in plots.save(fig, "places", tmp_path):
        assert path.stat().st_size > 5000
    assert outside(fig) == []
    assert overlaps(fig) == []
