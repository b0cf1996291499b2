"""The report: claims bounded exactly, results read whatever their state, verdicts from intervals, a page on its own."""

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from specdec_lab import plots, readings, report, tables
from specdec_lab.claims import CLAIMS, MEANINGS, Claim, Example, ceilings
from specdec_lab.errors import DataError, SettingError
from specdec_lab.experiment import grid, sweep
from specdec_lab.notebooks import project_root
from specdec_lab.page import Page, Picture
from specdec_lab.results import FOLDERS, Results, _latest, command_of, read
from specdec_lab.theory import VerifyCurve
from specdec_lab.tuning import Search

pytestmark = pytest.mark.filterwarnings("error")
TASKS = ["json", "code", "prose"]
NONE = Path("/nowhere")


# ---- what the claims allow


def test_every_meaning_bounds_every_claim() -> None:
    found = {(c.claim.task, c.meaning.name.split()[0]): c for c in ceilings(Example())}
    alone = {key: round(c.alone, 2) for key, c in found.items()}
    assert alone["code", "α"] == alone["code", "texts"] == 2.65
    assert alone["prose", "α"] == 1.21
    assert alone["prose", "accepted"] == alone["prose", "drafts"] == alone["prose", "Σ"] == 3.82  # 1 + 16 · 0.176
    several = {key: round(c.several, 3) for key, c in found.items()}
    assert several["prose", "α"] == round(1 + 4 * 0.176 / 0.824, 3)
    assert several["prose", "texts"] == round(1 / 0.824**3, 3)
    assert several["json", "accepted"] == 17  # a draft has no more than its 16 tokens
    verdicts = {key: c.verdict for key, c in found.items()}
    assert {task for (task, name), verdict in verdicts.items() if name == "α" and verdict != "possible"} == {
        "code",
        "prose",
    }
    assert {verdicts[task, "accepted"] for task in TASKS} == {"possible"}
    one = {(c.claim.task, c.meaning.name[0]): c.verdict for c in ceilings(Example(candidate_count=1, tries=1))}
    assert one["code", "α"] == one["prose", "α"] == one["prose", "t"] == "impossible"


def test_measured_costs_bound_further() -> None:
    flat = VerifyCurve((1, 33), (1.0, 1.0), (1.0, 1.0))
    dear = VerifyCurve((1, 33), (1.0, 17.0), (1.0, 17.0))
    for costs, verdict in (((0.0, flat), "possible"), ((0.2, dear), "not at our costs with one candidate")):
        found = [c for c in ceilings(Example(), {"json": costs}) if c.claim.task == "json"]
        assert {c.verdict for c in found} == {verdict}
        assert all(c.costing is not None and c.costing <= c.alone + 1e-9 for c in found)
    assert all(c.costing is None for c in ceilings(Example()))


def test_a_claim_counts_as_rounded() -> None:
    assert [claim.drafting / claim.plain for claim in CLAIMS] == [claim.speedup for claim in CLAIMS]
    rates = {0.62: "impossible", 0.67: "possible"}  # 1 / (1 − rate) = 2.63 and 3.03; 2.95 would round to 3.0
    for rate, verdict in rates.items():
        claim = replace(CLAIMS[1], acceptance=rate)
        alone = MEANINGS[0].alone(rate, Example())
        assert (alone < claim.least) == (verdict == "impossible")


@pytest.mark.parametrize(
    "setting", [{"draft_length": 0}, {"candidate_count": 2.5}, {"tries": True}, {"threshold": 1.5}]
)
def test_an_example_out_of_range_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(setting))):
        Example(**setting)


# ---- why: entropy


def tokens(task: str, spread: dict[float, int], stays: dict[float, float], prompts: int = 12) -> pd.DataFrame:
    """Rows of a lossless arm that tried so many tokens of each entropy a prompt, of which a share stays."""
    out = []
    for prompt in range(prompts):
        entropies = [entropy for entropy, count in spread.items() for _ in range(count)]
        fates = [index < round(stays[entropy] * count) for entropy, count in spread.items() for index in range(count)]
        line = {"task": task, "draft": "1:4", "draft_length": 2, "prompt_id": f"{task}-{prompt}", "main": "m"}
        line |= {"acceptance_rule": "lossless", "candidate_count": 1, "tried_entropy": entropies, "tried_stays": fates}
        out.append({**line, "tried_depth": [1 + index % 2 for index in range(len(entropies))]})
    return pd.DataFrame(out)


def test_a_difference_is_split_into_entropy_and_what_is_left() -> None:
    same = {0.1: 0.9, 3.0: 0.3}
    rows = pd.concat([tokens("json", {0.1: 30, 3.0: 10}, same), tokens("prose", {0.1: 10, 3.0: 30}, same)])
    (pair,) = tables.entropy_parts(rows).itertuples()
    assert (pair.task, pair.other) == ("json", "prose")
    assert pair.total == pytest.approx(0.75 - 0.45)
    assert pair.of_entropy == pytest.approx(pair.total)
    assert pair.at_equal == pytest.approx(0)
    assert "no clear difference" in readings.entropy(rows)
    spread = {0.1: 20, 3.0: 20}
    rows = pd.concat([tokens("json", spread, {0.1: 1.0, 3.0: 0.5}), tokens("prose", spread, {0.1: 0.8, 3.0: 0.3})])
    (pair,) = tables.entropy_parts(rows).itertuples()
    assert pair.of_entropy == pytest.approx(0)
    assert pair.at_equal == pytest.approx(pair.total) == pytest.approx(0.2)
    assert "json accepting more" in readings.entropy(rows)
    ours, theirs = tokens("json", {0.1: 30, 3.0: 10}, same), tokens("prose", {0.1: 10, 3.0: 30}, {0.1: 0.5, 3.0: 0.1})
    (pair,) = tables.entropy_parts(pd.concat([ours, theirs])).itertuples()
    assert pair.of_entropy == pytest.approx(0.5 * (0.7 - 0.2)), "both tasks' rates averaged"
    assert pair.at_equal == pytest.approx(0.5 * 0.4 + 0.5 * 0.2), "both tasks' weights averaged"
    assert pair.total == pytest.approx(0.75 - 0.2)


def test_bins_hold_what_was_tried_there() -> None:
    rows = tokens("json", {0.1: 30, 1.0: 20, 3.0: 10}, {0.1: 0.9, 1.0: 0.5, 3.0: 0.2})
    bins = tables.entropy_bins(rows).set_index("entropy")
    assert bins.share.sum() == pytest.approx(1)
    assert bins.value.to_dict() == {0.1: pytest.approx(0.9), 1.0: pytest.approx(0.5), 3.0: pytest.approx(0.2)}
    lossy = rows.assign(acceptance_rule="typical", tried_stays=[[True] * 60] * len(rows))
    assert tables.entropy_bins(pd.concat([rows, lossy])).equals(tables.entropy_bins(rows)), "lossy rules say nothing"
    few = rows.assign(tried_entropy=[x if i < 3 else [0.1] * 60 for i, x in enumerate(rows.tried_entropy)])
    unknown = tables.entropy_bins(few).set_index("entropy").value_low.isna()
    assert unknown.to_dict() == {0.1: False, 1.0: True}, "three prompts are too few for an interval"
    places = tables.entropy_positions(rows)
    assert list(places.position) == [1, 2]
    assert places.entropy.mean() == pytest.approx((30 * 0.1 + 20 * 1.0 + 10 * 3.0) / 60)


# ---- results of tiny models


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A file of short prompts, by the task it stands for."""
    folder = tmp_path_factory.mktemp("prompts")
    lines = [json.dumps({"prompt": f"Say {n} things about {n * 7}."}) for n in range(5)]
    for task in TASKS:
        (folder / f"{task}.jsonl").write_text("\n".join(lines))
    return {str(folder / f"{task}.jsonl"): task for task in TASKS}


@pytest.fixture(scope="module")
def folders(
    files: dict[str, str], tiny_folder: str, tiny_draft_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A small sweep and a grid of two rounds."""
    swept, searched = (tmp_path_factory.mktemp(name) for name in ("swept", "searched"))
    common: dict[str, Any] = {"max_new_tokens": 8, "threads": 1}
    drafts = [tiny_draft_folder, "ngram"]
    sweep(grid([tiny_folder], drafts, list(files), [1, 2], prompts=5, **common), swept, progress=False)
    what: dict[str, Any] = {"draft_lengths": (2,), "candidate_counts": (1, 2), "thresholds": (0.2, 0.7)}
    what |= {"rules": ("lossless", "block"), "prompts": (1, 5), "keep": (4,)}
    Search(tiny_folder, tiny_draft_folder, tuple(files), **what, **common).run(searched, progress=False)
    return swept, searched


@pytest.fixture(scope="module")
def results(folders: tuple[Path, Path], files: dict[str, str], tiny_draft_folder: str) -> Results:
    """As if they were of the articles' tasks, with a draft of the bundled family in the sweep."""
    found = read(*folders, NONE / "bench.json")
    assert found.sweep is not None
    assert found.grid is not None
    swept = found.sweep.replace({"draft": {tiny_draft_folder: "1:3"}, "task": files})
    return replace(found, sweep=swept, grid=found.grid.replace({"task": files}))


def test_rows_hold_every_tried_token(results: Results) -> None:
    assert results.sweep is not None
    drafted = results.sweep[results.sweep.draft == "1:3"]
    assert len(tables.tried(results.sweep)) == int(results.sweep.accepted.sum() + results.sweep.rejected.sum())
    for row in drafted.itertuples():
        assert sum(row.tried_stays) == row.accepted
        depths = np.bincount(row.tried_depth, minlength=len(row.tried_at) + 1)[1:]
        assert list(depths) == list(row.tried_at)
        assert all(0 <= entropy <= np.log(259) + 1e-4 for entropy in row.tried_entropy)


def test_all_sections_stand_on_results(results: Results) -> None:
    how = Example()
    (sources,) = report.sources(results)
    assert "5 prompts a task" in str(sources)
    assert "1 … 5 prompts a task" in str(sources), "the grid's rounds"
    assert "specdec-lab bench --readme" in str(sources)
    _, table, verdicts = report.measured(results, how)
    assert isinstance(table, pd.DataFrame)
    for task in TASKS:
        own = table[table.task == task].set_index("row")
        assert list(own.index) == ["article 1", "article 2", "1:3, its best length", "best without loss",
                                   "fastest with loss", "nearest to the articles' example"]  # fmt: skip
        assert own.setting["nearest to the articles' example"].endswith("block 0.7, γ = 2, K = 2")
        assert own.text["best without loss"] == "lossless"
        assert own.text["fastest with loss"].startswith("lossy, NLL ")
    assert "1,200 → 4,560" in set(table["tokens/s, plain → drafting"])
    assert str(verdicts).count("**not reproduced**") == 3
    lines = report.possible(results, how)[2]
    assert isinstance(lines, pd.DataFrame)
    assert len(lines) == len(CLAIMS) * len(MEANINGS)
    assert "–" not in set(lines["one, at our costs"])
    assert "0 of 2 drafts inside" in str(report.others(results)[0])
    pictures = [p for f in (report.ratios, report.everything, report.why) for p in f(results) if isinstance(p, Picture)]
    assert [picture.name for picture in pictures] == [
        "speedup_by_ratio",
        "all_settings",
        "entropy",
        "entropy_positions",
    ]
    assert all(picture.said for picture in pictures)
    assert "* **json**: 1:3 with γ = " in pictures[0].said
    assert pictures[1].said.count("outside the articles' ranges (γ ") == 3


def test_lossy_settings_are_hollow_squares(results: Results) -> None:
    assert results.arms is not None
    fig = plots.settings(results.arms)
    looks = {(line.get_marker(), line.get_markerfacecolor() == "white") for ax in fig.axes for line in ax.lines}
    assert {("o", False), ("s", True)} <= looks
    assert ("o", True) not in looks
    counts = [text.get_text() for text in fig.legends[0].texts]
    drafted = results.arms[results.arms.draft != "none"]
    assert f"lossy, {(drafted.acceptance_rule != 'lossless').sum()} points" in counts


def test_without_results_the_claims_are_left() -> None:
    nothing, how = read(NONE / "a", NONE / "b", NONE / "c.json"), Example()
    said = str(report.sources(nothing)[0])
    assert "`specdec-lab sweep --results /nowhere/a` makes them" in said
    assert "`specdec-lab grid --results /nowhere/b` makes them" in said
    assert str(report.measured(nothing, how)[2]).count("**not measured yet**") == 3
    assert len(report.possible(nothing, how)) == 5
    for section in (report.ratios, report.everything, report.why, report.others):
        assert "ot measured yet" in str(section(nothing)[0]) or "Nothing is measured yet" in str(section(nothing)[0])


def test_the_folders_of_the_commands_are_not_named() -> None:
    for name, folder in FOLDERS.items():
        assert command_of(name, project_root() / folder) == f"specdec-lab {name}"


def test_a_broken_part_is_told_and_the_others_count(folders: tuple[Path, Path], tmp_path: Path) -> None:
    swept = Path(shutil.copytree(folders[0], tmp_path / "swept"))
    broken, *whole = sorted(swept.glob("*.parquet"))
    broken.write_bytes(broken.read_bytes()[:1000])
    found = read(swept, NONE, NONE)
    assert found.sweep is not None
    assert set(found.sweep.part) == {path.stem for path in whole}
    (note,) = [note for note in found.notes if "Left out" in note]
    assert f"{broken.name} is not a whole part file" in note
    assert f"specdec-lab sweep --results {swept}" in note
    assert "delete it" in note


def test_parts_of_other_settings_are_left_out_and_told(
    folders: tuple[Path, Path], files: dict[str, str], tiny_folder: str, tmp_path: Path
) -> None:
    swept = Path(shutil.copytree(folders[0], tmp_path / "swept"))
    before = read(swept, NONE, NONE)
    other: dict[str, Any] = {"prompts": 2, "max_new_tokens": 4, "threads": 1}
    sweep(grid([tiny_folder], ["ngram"], list(files)[:1], [1], **other), swept, progress=False)
    after = read(swept, NONE, NONE)
    assert after.sweep is not None
    assert before.sweep is not None
    assert len(after.sweep) == len(before.sweep)
    assert "1 of 7 parts" in " ".join(after.notes)


def test_what_was_measured_twice_counts_once(results: Results) -> None:
    assert results.sweep is not None
    again = results.sweep.assign(part=results.sweep.part + "x", date="2999", throughput_marker=1)
    kept = _latest(pd.concat([again, results.sweep], ignore_index=True))
    assert len(kept) == len(results.sweep)
    assert set(kept.date) == {"2999"}


def test_the_benchmark_is_read_or_told(tmp_path: Path, results: Results) -> None:
    found = read(NONE, NONE, project_root() / "data/results/bench.json")
    assert found.bench is not None
    line, bounds = report._bench_line(found, "json")[0]
    assert bounds is not None
    value, low, high = bounds
    assert low < value < high
    assert line["speed-up (95 %)"].startswith(f"{value:.2f}×")
    for text in ("{", "[]", '{"rows": [{}]}'):
        (tmp_path / "bench.json").write_text(text)
        notes = read(NONE, NONE, tmp_path / "bench.json").notes
        assert "makes it anew" in notes[-1]


@pytest.mark.parametrize(
    ("low", "high", "judged"), [(3.76, 4.2, "reproduced"), (2.9, 3.7, "not reproduced"), (3.0, 3.9, "undecided")]
)
def test_verdicts_follow_intervals(low: float, high: float, judged: str) -> None:
    line = {"row": "best without loss", "speed-up (95 %)": "x", "α": "y"}
    lossy: report.Line = ({"row": "lossy", "speed-up (95 %)": "9×"}, None)
    said = report._verdict(CLAIMS[0], [(line, ((low + high) / 2, low, high)), lossy], Example())
    assert f"**{judged}**: best without loss reaches x without loss, at α y" in said
    assert "impossible" not in said
    unknown = Claim("x", 3.0, 0.623, 1, 3)
    assert "**not measured yet**" in report._verdict(unknown, [lossy], Example())


# ---- the page


class Tags(HTMLParser):
    """What a page opens, closes and points to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.targets: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.targets += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.open += [] if tag in ("meta", "img", "br") else [tag]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "img", "br"):
            assert self.open.pop() == tag


def test_a_page_stands_alone_and_escapes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "<script>alert(1)</script> & <img src=http://x.org/a.png> [x](http://x.org) ![y](http://x.org/y.png)"
    page = Page(f"Title {evil}", tmp_path / "figures")
    table = pd.DataFrame([{"task": evil, "with | bar": "a|b"}])
    page.add(f"Heading {evil}", evil, table, Picture("bounds", plots.ceilings(None, Example()), f"* {evil}"))
    path = page.write(tmp_path / "deep" / "page.html")
    text = path.read_text(encoding="utf-8")
    tags = Tags(text)
    assert tags.open == []
    assert {"script", "link", "iframe", "object"} & set(tags.names) == set()
    assert [target[:22] for target in tags.targets] == ["data:image/png;base64,"]
    assert "<td>a|b</td>" in text
    assert "default-src 'none'" in text
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["bounds.png", "bounds.svg"]


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/page\.html: cannot be written"):
        Page("x", tmp_path).write(tmp_path / "file" / "page.html")
