"""HTML of runs: what it says, and that no text becomes markup."""

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from conftest import random_llama

from specdec_lab import panels
from specdec_lab.decoding import Decoder
from specdec_lab.drafting import DraftModel
from specdec_lab.metrics import summarise
from specdec_lab.session import Outcome, Progress, Setting
from specdec_lab.theory import VerifyCurve

CURVE = VerifyCurve((1, 9), (1.0, 2.0), (1.0, 2.0))
EVIL = "<script>alert(\"x\")</script>&amp;'\"><b onload='y'>"


class Page(HTMLParser):
    """Tags, texts and attributes of a piece of HTML; fails where tags do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.values: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.values += [value or "" for _, value in attrs]
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def text(html: str) -> str:
    return Page(html).text


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    main = random_llama(0, layers=2)
    made = Decoder(main, DraftModel(random_llama(3, layers=1))).generate([1, 2, 3], max_new_tokens=24)
    plain = Decoder(main).generate([1, 2, 3], max_new_tokens=24)
    setting = Setting("A prompt", max_new_tokens=24)
    return Outcome(setting, made, plain, summarise([made.trace], [plain.trace]), str, CURVE)


def at(outcome: Outcome, speedup: float | None = None, tokens: Any = None, **changes: Any) -> Outcome:
    """The outcome with another setting, speed-up, or tokens of the plain loop."""
    metrics = outcome.metrics | ({} if speedup is None else {"speculative_speedup": speedup})
    plain = outcome.plain if tokens is None else replace(outcome.plain, tokens=tokens)
    return replace(outcome, setting=replace(outcome.setting, **changes), metrics=metrics, plain=plain)


EVERYTHING: dict[str, Callable[[Outcome], str]] = {
    "chips": panels.chips,
    "growing": lambda each: panels.chips(Progress(EVIL, each.made, each.decode)),
    "headline": panels.headline,
    "why": panels.why,
    "history": lambda each: panels.history([each, each]),
    "comparison": lambda each: panels.comparison(each, each),
    "note": lambda each: panels.note(each.setting.prompt),
    "code": lambda each: panels.code(each.setting.prompt),
    "chart": lambda each: panels.chart([(EVIL, "sl-a", [0, 1], [1, 2])], EVIL, 0.5),
    "download": lambda each: panels.download([each]),
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_no_text_becomes_markup(name: str, outcome: Outcome) -> None:
    odd: dict[str, Any] = {"main": EVIL, "draft": EVIL, "acceptance_rule": EVIL, "acceptance_threshold": 0.5}
    evil = replace(at(outcome, prompt=EVIL, **odd), decode=lambda ids: EVIL)
    page = Page(EVERYTHING[name](evil))
    assert not page.tags & {"script", "b onload"}
    assert not page.attributes & {"onload", "onclick"}
    if name != "download":
        assert any("alert(" in value for value in [*page.texts, *page.values]), "it is shown, as text"


def test_style_and_what_there_is_not() -> None:
    assert "sl-tiles" in panels.style()
    assert panels.style().count("</style>") == 1
    assert [panels.number(value) for value in (None, float("nan"), float("inf"), 0, 1.005)] == [
        *["–"] * 3,
        "0.00",
        "1.00",
    ]
    assert panels.number(0.254, "{:.0%}") == "25%"
    assert panels.chips(Progress("loading")) == ""
    assert "Runs appear here" in panels.history([])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "1:4, γ 4"),
        ({"draft": "none", "acceptance_rule": "block"}, "plain"),
        ({"candidate_count": 4, "draft_length": 6}, "1:4, γ 6, K 4"),
        ({"candidate_count": 4, "draft": "ngram"}, "ngram, γ 4"),
        ({"acceptance_rule": "threshold", "acceptance_threshold": 0.25}, "1:4, γ 4, threshold 0.25"),
        ({"acceptance_rule": "sequence"}, "1:4, sequence, seed 0"),
        ({"temperature": 0.5, "seed": 3, "draft": "/a/b/my-draft"}, "my-draft, γ 4, T 0.5, seed 3"),
    ],
)
def test_a_setting_in_a_few_words(changes: dict[str, Any], said: str) -> None:
    assert panels.describe(Setting("x", **changes)) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speedup": 1.5}, "1.50× faster than plain decoding"),
        ({"speedup": 0.62}, "0.62× slower than plain decoding"),
        ({"draft": "none"}, "this is the plain loop"),
    ],
)
def test_the_headline_says_whether_drafting_paid(changes: dict[str, Any], said: str, outcome: Outcome) -> None:
    shown = at(outcome, **changes)
    html = panels.headline(shown).replace("</b>", "</b> ").replace("</span>", "</span> ")
    assert said in text(html)
    assert f"α (of tried) {shown.metrics['acceptance_probability']:.1%}" in text(html)
    assert f"tokens/s {shown.metrics['throughput']:.1f} plain: " in text(html)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Lossless: all 24 tokens are the plain loop's."),
        ({"other": True}, "Token 4 differs from the plain loop's. In low precision ties turn"),
        ({"temperature": 0.5}, "Lossless: the text follows the main model's own distribution; another draw than"),
        ({"acceptance_rule": "typical"}, "Lossy (typical): the text is the plain loop's all the same."),
        ({"acceptance_rule": "typical", "other": True}, "Lossy (typical): token 4 is the first that differs."),
        ({"acceptance_rule": "typical", "temperature": 0.5}, "Lossy: the text follows another distribution than the"),
        ({"draft": "none"}, "24 tokens, one by one."),
    ],
)
def test_whether_the_text_is_the_plain_loops(changes: dict[str, Any], said: str, outcome: Outcome) -> None:
    tokens = outcome.made.tokens[:3] + [7 - outcome.made.tokens[3]] + outcome.made.tokens[4:]
    changes = dict(changes)
    shown = at(outcome, tokens=tokens if changes.pop("other", False) else None, **changes)
    assert said in text(panels.headline(shown))


def test_why_shows_time_positions_theory_and_levers(outcome: Outcome) -> None:
    said = text(panels.why(outcome).replace("</b>", "</b> ").replace("</span>", "</span> "))
    kept = [step.fate[0] == "accepted" for step in outcome.trace.steps if step.fate]
    assert f"1 {sum(kept)} of {len(kept)}" in said
    assert f"measured {outcome.metrics['speculative_speedup']:.2f}× predicted {outcome.prediction:.2f}×" in said
    places = [said.index(f"{lever.name}, {lever.change} {lever.speedup:.2f}×") for lever in outcome.levers]
    assert places == sorted(places)
    assert f"A drafted token costs c = {outcome.metrics['draft_cost_ratio']:.3f} plain forwards." in said
    steps = outcome.plain.trace.steps
    whole = sum(step.draft_s + step.verify_s + step.other_s for step in steps) / len(outcome.plain.tokens)
    assert f"plain {1e3 * whole:.1f} ms" in said
    assert "the cost of verification is not measured yet" in panels.why(replace(outcome, curve=None))
    holding = replace(outcome, metrics=outcome.metrics | {"coverage": 0.4})
    assert "predicted –" in text(panels.why(holding).replace("</span>", "</span> "))
    assert "The draft holds back" in panels.why(holding)
    assert "No prediction: theory here is of rules" in panels.why(at(outcome, acceptance_rule="block"))


def test_a_plain_run_has_no_positions(outcome: Outcome) -> None:
    alone = replace(at(outcome, draft="none"), made=outcome.plain, metrics=summarise([outcome.plain.trace]))
    assert "Nothing was drafted." in panels.why(alone)


def test_runs_side_by_side(outcome: Outcome) -> None:
    a, b = at(outcome, speedup=2.0), at(outcome, speedup=1.0, draft="ngram", task="json", seed=5)
    assert "The second is 0.50 times as fast as the first (one run each)." in text(panels.comparison(a, b))
    assert "2.00 times" in panels.comparison(b, a)
    assert "ngram, γ 4" in panels.comparison(a, b)
    for changes in ({"prompt": "B"}, {"main": "m"}, {"temperature": 1.0}, {"max_new_tokens": 8}):
        said = text(panels.comparison(a, at(b, **changes)))
        assert "not like with like" in said, changes
        assert "times as fast" not in said


def test_the_history_is_a_table_with_the_latest_first(outcome: Outcome) -> None:
    html = panels.history([outcome, at(outcome, speedup=3.21, draft="ngram")])
    head, *rows = [[cell.text for cell in row] for row in ElementTree.fromstring(html).iter("tr")]
    assert head[:3] == ["run", "setting", "speed-up"]
    assert [row[:2] for row in rows] == [["2", "ngram, γ 4"], ["1", "1:4, γ 4"]]
    assert rows[0][2] == "3.21×"
    assert rows[1][5] == f"{outcome.metrics['acceptance_probability']:.1%}"
    link = next(value for value in Page(panels.download([outcome])).values if value.startswith("data:text/csv;base64,"))
    saved = pd.read_csv(io.BytesIO(base64.b64decode(link.partition(",")[2])))
    assert saved["throughput"][0] == pytest.approx(outcome.metrics["throughput"])


def points(html: str) -> dict[str, np.ndarray]:
    """The lines of a chart by class, in the units of its axes, which are read off its ticks: [n, 2]."""
    svg = ElementTree.fromstring(html).find("svg")
    assert svg is not None
    words = [(float(w.text or ""), float(w.get("x") or 0), float(w.get("y") or 0), w.get("text-anchor"))
             for w in svg.iter("text") if (w.text or "").replace(".", "").isdigit()]  # fmt: skip
    over = np.array([(x, value) for value, x, _, anchor in words if anchor == "middle"])
    up = np.array([(y - 4, value) for value, _, y, anchor in words if anchor == "end"])
    ticks = min(y for _, _, y, anchor in words if anchor == "middle")
    (ax, bx), (ay, by) = (np.polyfit(each[:, 0], each[:, 1], 1) for each in (over, up))
    found = {}
    for line in [*svg.iter("polyline"), *svg.iter("line")]:
        ends = [[line.get(f"{axis}{i}", "") for axis in "xy"] for i in (1, 2)]
        raw = [pair.split(",") for pair in (line.get("points") or "").split()] or ends
        assert all(0 <= float(x) <= 310 and 0 <= float(y) < ticks - 9 for x, y in raw), "above the ticks' words"
        found[line.get("class") or ""] = np.array(raw, float) * [ax, ay] + [bx, by]
    return found


@pytest.mark.parametrize("high", [1.3, 4.0, 40.0])
def test_a_chart_draws_what_it_is_given(high: float) -> None:
    lengths = list(range(1, 17))
    a, b = np.linspace(1, high, 16), np.linspace(1.2, 0.1, 16)
    got = points(
        panels.chart([("one", "sl-a", lengths, a.tolist()), ("two", "sl-b", lengths, b.tolist())], "length", mark=5)
    )
    for name, ys in (("sl-line sl-a", a), ("sl-line sl-b", b)):
        assert got[name][:, 0] == pytest.approx(lengths, abs=0.01)
        assert got[name][:, 1] == pytest.approx(ys, abs=high / 500)
    assert got["sl-one"][:, 1] == pytest.approx([1, 1], abs=high / 500)
    assert got["sl-mark"][:, 0] == pytest.approx([5, 5], abs=0.01)


def test_what_if_draws_predictions_and_says_the_price(outcome: Outcome) -> None:
    known = outcome.whatif
    assert known is not None
    html = panels.what_if(known, 6, "threshold", 0.1)
    figures = ElementTree.fromstring(f"<x>{html}</x>").findall(".//figure")
    over_length, over_threshold = (points(ElementTree.tostring(each, encoding="unicode")) for each in figures)
    lengths = range(1, 17)
    top = max(known.speedup(n, "threshold", 0.0) for n in lengths)
    for line, of in (("a", ()), ("b", ("threshold", 0.1))):
        expected = [known.speedup(n, *of) for n in lengths]
        assert over_length[f"sl-line sl-{line}"][:, 1] == pytest.approx(expected, abs=top / 100)
    grid = [known.speedup(6, "threshold", step / 20) for step in range(21)]
    assert over_threshold["sl-line sl-b"][:, 1] == pytest.approx(grid, abs=top / 100)
    assert over_threshold["sl-mark"][0, 0] == pytest.approx(0.1, abs=0.01)
    said = text(html)
    lossless, lossy = known.speedup(6), known.speedup(6, "threshold", 0.1)
    foreign = known.foreign(6, "threshold", 0.1)
    assert f"γ 6: lossless {lossless:.2f}×, threshold 0.1 {lossy:.2f}×; {foreign:.0%} of its tokens are not" in said
    assert "Beyond 4 tokens, which this run drafted" in said
    assert "Beyond" not in panels.what_if(known, 4, "threshold", 0.1)
    assert "first choice" not in panels.what_if(replace(known, greedy=False), 4, "lenience", 0.1)
