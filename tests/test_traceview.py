"""The trace as HTML: what is shown, where, and that nothing of it is markup but our own."""

import re
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import random_llama

from specdec_lab import plots, traceview
from specdec_lab.acceptance import Acceptance
from specdec_lab.decoding import Decoder
from specdec_lab.drafting import DraftModel
from specdec_lab.errors import SettingError
from specdec_lab.trace import Step, Trace

# What the tokens of the random models say: markup, quotes, entities, spaces, lines.
WORDS = ["<script>alert(1)</script>", '"q"', "it's", "&amp;", "  the", "\n\n", "if:\n\t", "<b"]
START = [3, 1, 4, 3, 1]
RETRY = Acceptance("block", 0.6, max_retries=2)
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "sampled": ({}, {"temperature": 1.0}),
    "tree": ({"candidate_count": 4}, {}),
    "chains": ({"candidate_count": 4, "branching": "chains"}, {"temperature": 1.0}),
    "block": ({"acceptance": RETRY}, {"temperature": 1.0}),
    "eos": ({}, {"temperature": 1.0, "eos": [2]}),
    "plain": ({"drafts": False}, {}),
}


def decode(token: int) -> str:
    return WORDS[token]


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trace]]:
    main, made = random_llama(0, layers=2), {}
    for name, (own, how) in SETTINGS.items():
        own = dict(own)
        draft = DraftModel(random_llama(3, layers=1), branching=own.pop("branching", "dynamic"))
        decoder = Decoder(main, draft if own.pop("drafts", True) else None, 3, **own)
        prompts = [START, [2, 7, 2, 7], [5, 6, 1]]
        made[name] = [made.trace for made in decoder.generate_batch(prompts, max_new_tokens=20, **how)]
    return made


def parsed(html: str) -> ElementTree.Element:
    """What we write is well-formed, so that an XML parser reads it as browsers do."""
    return ElementTree.fromstring(html)


def has(element: ElementTree.Element, name: str) -> bool:
    return f"sd-{name}" in element.get("class", "").split()


def find(element: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [one for one in element.iter() if has(one, name)]


def words(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def own(chip: ElementTree.Element) -> str:
    """A chip's text, without its card: that of its boxes and the line breaks behind them."""
    return "".join(words(part) + (part.tail or "") for part in chip if part.tag == "samp")


def kind(chip: ElementTree.Element) -> str:
    return next(name for name in traceview.MEANING if has(chip, name))


def groups(html: str) -> list[list[ElementTree.Element]]:
    """The chips of each step in a text."""
    steps = find(parsed(html), "step")
    assert [step.get("data-step") for step in steps] == [str(index) for index in range(len(steps))]
    return [list(step) for step in steps]


def every(traces: dict[str, list[Trace]]) -> Iterator[Trace]:
    for some in traces.values():
        yield from some


def fixed(drafted: list[int], accepted: int, next_kind: str, emitted: int, **more: object) -> Step:
    """A step of a chain; p is 0.1, 0.2, … and q 0.01, 0.02, …"""
    n = len(drafted)
    fate = ["accepted"] * accepted + ["rejected"] * (accepted < n) + ["untried"] * (n - accepted - 1)
    p, q = [(i + 1) / 10 for i in range(n)], [(i + 1) / 100 for i in range(n)]
    step = Step(
        drafted, list(range(-1, n - 1)), p, q, q, [0.75] * n, [1.25] * n, fate, 4, next_kind, 0.33, 0.44, 2.5, n, 1
    )
    step.emitted = emitted
    for name, value in more.items():
        setattr(step, name, value)
    return step


def trace(*steps: Step, finish: str = "length") -> Trace:
    made = Trace(3, steps=list(steps), finish=finish)
    made.tokens = [t for step in steps for t in [*step.accepted, step.next_token][: step.emitted]]
    return made


# ---- text


def test_the_traces_hold_what_is_to_be_shown(traces: dict[str, list[Trace]]) -> None:
    """Or the tests below would say nothing."""
    kinds = {name: {step.next_kind for trace in some for step in trace.steps} for name, some in traces.items()}
    assert kinds["greedy"] >= {"recovered"}
    assert kinds["sampled"] >= {"recovered", "bonus"}
    assert kinds["block"] >= {"recovered", "refused"}
    assert kinds["plain"] == {"plain"}
    steps = [step for trace in traces["tree"] + traces["chains"] for step in trace.steps]
    assert any(len(set(step.parents)) < len(step.parents) for step in steps), "siblings"
    assert {fate for step in steps for fate in step.fate} == {"accepted", "rejected", "untried"}
    assert any(len(step.accepted) + 1 > step.emitted for trace in traces["eos"] for step in trace.steps), "a cut step"
    assert {token for trace in every(traces) for token in trace.tokens} == set(range(8))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_chip_is_an_emitted_token_of_its_kind(name: str, traces: dict[str, list[Trace]]) -> None:
    for made in traces[name]:
        shown = groups(traceview.text(made, decode))
        assert len(shown) == len(made.steps)
        for step, chips in zip(made.steps, shown, strict=True):
            expected = [*["accepted"] * len(step.accepted), step.next_kind][: step.emitted] or ["refused"]
            assert [kind(chip) for chip in chips] == expected
        tokens = [own(chip) for chips in shown for chip in chips if kind(chip) != "refused"]
        assert tokens == [decode(token) for token in made.tokens]
        assert "".join(own(chip) for chips in shown for chip in chips) == "".join(map(decode, made.tokens))


def test_a_text_can_be_shown_while_it_grows() -> None:
    decoder = Decoder(random_llama(0, layers=2), DraftModel(random_llama(3, layers=1)), 3)
    seen = 0
    for made in decoder.stream(START, max_new_tokens=20):
        html = traceview.text(made.trace, decode)
        assert sum(map(len, groups(html))) == len(made.tokens) > seen
        assert len(find(parsed(html), "caret")) == (made.trace.finish == "")
        seen = len(made.tokens)
    assert groups(traceview.text(Trace(3), decode)) == []


def test_nothing_but_our_own_markup_comes_through(traces: dict[str, list[Trace]]) -> None:
    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.tags: set[str] = set()
            self.names: set[str] = set()

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.tags.add(tag)
            self.names |= {name for name, _ in attrs}

    reader = Reader()
    for made in every(traces):
        reader.feed(traceview.text(made, decode, join=lambda ids: "".join(map(decode, ids))))
        for index in range(len(made.steps)):
            reader.feed(traceview.step(made, index, decode))
    odd = trace(fixed([0], 1, "bonus", 1), finish="<script>")
    reader.feed(traceview.text(odd, decode) + traceview.step(odd, 0, decode) + traceview.legend())
    lists, tables = (
        {"div", "p", "span", "samp", "b", "i", "ul", "li"},
        {"details", "summary", "table", "tr", "td", "th"},
    )
    assert reader.tags == lists | tables
    assert reader.names == {"class", "style", "title", "data-step"}


def test_a_card_holds_the_numbers_of_its_token() -> None:
    made = trace(fixed([0, 1, 2], 1, "recovered", 2))
    ((first, last),) = groups(traceview.text(made, decode))
    (said,) = map(words, find(first, "card"))
    assert said == "acceptedstep 1p 0.10q 0.01largest p 0.75entropy 1.25 nats"
    (said,) = map(words, find(last, "card"))
    assert said == "recoveredstep 1p 0.33largest p 0.44entropy 2.50 nats" + '"q"p 0.20q 0.02' + "1 untried"
    assert [own(chip) for chip in find(last, "rejected")] == [decode(1)]
    greedy = trace(fixed([0, 1], 1, "recovered", 2, q=[1.0, 1.0]))
    assert "q 1" not in "".join(map(words, find(parsed(traceview.text(greedy, decode)), "card")))


def test_a_card_lists_some_of_many_lost_drafts() -> None:
    many = fixed([0] * 20, 0, "recovered", 1, fate=["rejected"] * 20, parents=[-1] * 20)
    ((chip,),) = groups(traceview.text(trace(many), decode))
    assert len(find(chip, "lost")) == traceview.LISTED
    assert "14 more" in words(chip)


def test_a_refused_draft_is_a_mark_that_shows_it() -> None:
    made = trace(fixed([0, 1, 2], 0, "refused", 0), fixed([3], 1, "bonus", 2))
    (mark,), chips = groups(traceview.text(made, decode))
    assert kind(mark) == "refused"
    assert own(mark) == ""
    assert [own(chip) for chip in find(mark, "rejected")] == [decode(0), decode(1), decode(2)]
    assert "untried" not in words(mark)
    assert len(chips) == 2


def test_a_token_that_ends_the_text_is_dim_and_named() -> None:
    def special(made: Trace, names: list[str]) -> list[bool]:
        return [has(chip, "special") for chips in groups(traceview.text(made, names.__getitem__)) for chip in chips]

    made = trace(fixed([0, 1, 2], 2, "recovered", 2), finish="eos")
    assert special(made, ["a", "</s>", "b", "c", "d"]) == [False, True]
    made.finish = "length"
    assert special(made, ["a", "</s>", "b", "c", "d"]) == [False, False]
    assert special(made, ["<|im_end|>", "<| x", "b", "c", "d"]) == [True, False]


def test_parts_of_a_character_are_joined(byte_tokenizer: Any) -> None:
    said = "é漢🙂a"
    ids = list(said.encode())
    steps = [fixed(ids[i : i + 3], 3, "bonus", 4, next_token=ids[i + 3]) for i in (0, 4)]
    steps.append(fixed(ids[8:], 2, "bonus", 2))
    made = trace(*steps)
    assert made.tokens == ids

    def shown(**how: Any) -> list[ElementTree.Element]:
        html = traceview.text(made, lambda token: byte_tokenizer.decode([token]), **how)
        assert traceview.BROKEN not in html
        return [chip for chips in groups(html) for chip in chips]

    joined = shown(join=byte_tokenizer.decode)
    assert [own(chip) for chip in joined] == ["é", "", "漢", "", "", "🙂", "", "", "", "a"]
    assert [len(find(chip, "rest")) for chip in joined] == [0, 1, 0, 1, 1, 0, 1, 1, 1, 0]
    assert not any(find(chip, "part") for chip in joined)
    alone = shown()
    assert [len(find(chip, "part")) for chip in alone] == [1] * 9 + [0]
    assert "".join(map(own, alone)) == "a"
    made.tokens, made.steps = ids[:4], made.steps[:1]  # the text as it grows: 漢 is not whole yet
    assert [own(chip) for chip in shown(join=byte_tokenizer.decode)] == ["é", "", "", ""]


def test_what_cannot_be_seen_has_a_sign() -> None:
    made = trace(fixed([0], 1, "bonus", 1))
    ((chip,),) = groups(traceview.text(made, lambda token: "a\x00\x1b\r\x7f\tb"))
    assert own(chip) == "a␀␛␍␡\tb"
    ((chip,),) = groups(traceview.text(made, lambda token: "a\n\nb"))
    assert len(find(chip, "return")) == 2
    assert own(chip) == "a\n\nb"


# ---- step


def drawn(html: str) -> list[tuple[str, str, int, str]]:
    """Text, kind, parent's place in this list (-1: the root) and numbers of a tree's nodes, depth first."""
    (tree,) = find(parsed(html), "tree")
    found: list[tuple[str, str, int, str]] = []

    def walk(item: ElementTree.Element, parent: int) -> None:
        node, *below = item
        if not has(node[0], "root"):
            chip, *numbers = node
            found.append((own(chip), kind(chip), parent, "".join(map(words, numbers))))
        here = len(found) - 1
        for child in below[0] if below else ():
            walk(child, here)

    (root,) = tree[0]
    walk(root, -1)
    return found


def expected(step: Step) -> list[tuple[str, str, int, str]]:
    """The same from the record; the next token is the last child of the last accepted node."""
    found: list[tuple[str, str, int, str]] = []
    last = max((i for i, fate in enumerate(step.fate) if fate == "accepted"), default=-1)

    def share(p: float) -> str:
        return "< 0.01" if 0 < p < 0.005 else f"{p:.2f}"

    def walk(node: int, place: int) -> None:
        for child in (i for i, parent in enumerate(step.parents) if parent == node):
            q = "" if set(step.q) == {1} else f"q {share(step.q[child])}"
            found.append((decode(step.drafted[child]), step.fate[child], place, f"p {share(step.p[child])}{q}"))
            walk(child, len(found) - 1)
        if node == last and step.next_kind != "refused":
            found.append((decode(step.next_token), step.next_kind, place, f"p {share(step.next_p)}"))

    walk(-1, -1)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tree_is_that_of_the_step(name: str, traces: dict[str, list[Trace]]) -> None:
    for made in traces[name]:
        for index, step in enumerate(made.steps):
            html = traceview.step(made, index, decode)
            assert drawn(html) == expected(step)
            lines = parsed(html).findall(".//tr")[1:]
            kinds = step.fate + [step.next_kind] * (step.next_kind != "refused")
            assert [words(line[1]) for line in lines] == kinds
            assert all(len(line) == 7 for line in lines)


def test_the_step_is_told_in_words() -> None:
    made = trace(
        fixed([0, 1, 2], 1, "recovered", 2),
        fixed([0, 1], 0, "refused", 0),
        fixed([], 0, "plain", 1),
        fixed([0, 1, 2], 2, "recovered", 2, candidates=4),
        finish="stop",
    )
    said = [words(parsed(traceview.step(made, index, decode))[0]) for index in range(4)]
    assert said == [
        "Step 1 of 4: drafted 3, accepted 1, then recovered",
        "Step 2 of 4: drafted 2, accepted 0, refused, so drawn anew",
        "Step 3 of 4: nothing drafted, plain",
        "Step 4 of 4: drafted 3, accepted 2, then recovered; 4 candidates; "
        "2 of 3 emitted, as the text ends there (stop)",
    ]
    for q, said_so in (([1.0, 1.0], True), ([1.0, 0.5], False)):
        made = trace(fixed([0, 1], 1, "recovered", 2, q=q))
        assert ("q is 1" in words(parsed(traceview.step(made, 0, decode))[0])) == said_so


def test_tokens_that_the_text_does_not_hold_are_marked(traces: dict[str, list[Trace]]) -> None:
    cut = find(parsed(traceview.step(trace(fixed([0, 1, 2], 3, "bonus", 2)), 0, decode)), "cut")
    assert [own(node[0]) for node in cut] == [decode(2), decode(4)]
    for made in every(traces):
        for index, step in enumerate(made.steps):
            cut = find(parsed(traceview.step(made, index, decode)), "cut")
            held = 0 if step.next_kind == "refused" else len(step.accepted) + 1
            assert len(cut) == held - step.emitted


def test_the_root_is_the_token_before_the_step() -> None:
    refused = fixed([2], 0, "refused", 0)
    made = trace(refused, fixed([0, 1], 2, "bonus", 3), refused, fixed([3], 1, "bonus", 2))
    roots = [own(find(parsed(traceview.step(made, index, decode)), "root")[0]) for index in range(4)]
    assert roots == ["prompt", "prompt", decode(4), decode(4)]


def test_times_are_told_with_their_shares() -> None:
    own = fixed([0], 1, "bonus", 2, draft_s=0.001, verify_s=0.0065, other_s=0.0025, active=3)
    panel = parsed(traceview.step(trace(own), 0, decode))
    said = words(find(panel, "keys")[0])
    assert said == "draft 1.0 ms, 10%verify 6.5 ms, 65%other 2.5 ms, 25%shared by 3 rows"
    assert [part.get("style") for part in find(panel, "bar")[0]] == [f"flex-grow:{s:.4f}" for s in (0.1, 0.65, 0.25)]


@pytest.mark.parametrize("index", [-1, 2, 1.0, True])
def test_a_step_that_is_not_there_is_refused(index: int) -> None:
    made = trace(fixed([0], 1, "bonus", 2), fixed([0], 1, "bonus", 2))
    with pytest.raises(SettingError, match=rf"step = {index}: allowed is an integer 0 … 1"):
        traceview.step(made, index, decode)
    with pytest.raises(SettingError, match="no step"):
        traceview.step(Trace(3), 0, decode)


# ---- style


def test_the_legend_names_every_chip() -> None:
    keys = parsed(traceview.legend())
    assert [kind(chip) for chip in find(keys, "chip")] == list(traceview.MEANING)
    assert all(name in words(keys) and said in words(keys) for name, said in traceview.MEANING.items())


def test_every_class_has_a_style(traces: dict[str, list[Trace]]) -> None:
    css = traceview.style()
    assert css.startswith("<style>")
    assert css.endswith("</style>")
    html = traceview.legend()
    for made in every(traces):
        html += traceview.text(made, decode)
        html += "".join(traceview.step(made, index, decode) for index in range(len(made.steps)))
    used = {name for names in re.findall(r'class="([^"]*)"', html) for name in names.split()}
    assert {name for name in used if not re.search(rf"\.{name}\b(?!-)", css)} == set()
    styled = set(re.findall(r"\.(sd[\w-]*)", css)) - {"sd-special", "sd-part", "sd-rest", "sd-caret"}
    assert styled - used == set(), "styled, and used nowhere"


def test_colours_are_those_of_the_figure_and_legible() -> None:
    """Contrast of text to its ground: 4.5 at least (WCAG 2.2, AA), in both themes."""
    pairs = {name: (light, dark) for name, light, dark in re.findall(
        r"--sd-([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", traceview.FILE.read_text(encoding="utf-8"))}  # fmt: skip
    for name in ("accepted", "recovered", "bonus"):
        assert pairs[name][0] == plots.FATES[name]

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    grounds = {"ink": ("accepted", "recovered", "bonus", "page"), "dim": ("page",), "rejected": ("page",)}
    for text, under in grounds.items():
        for ground in under:
            for theme in (0, 1):
                low, high = sorted(luminance(pairs[name][theme]) for name in (text, ground))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground, theme)


def test_the_style_sheet_is_part_of_the_package() -> None:
    project = tomllib.loads((traceview.FILE.parents[1] / "pyproject.toml").read_text())
    assert traceview.FILE.name in project["tool"]["setuptools"]["package-data"]["specdec_lab"]
