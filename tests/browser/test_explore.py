"""01_explore as people use it: JupyterLab and Voila in a real Chromium, moved by keyboard."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from driving import Lab, copy_notebook, free_port, isolated_environment, run_all, take_shot, tracebacks, wait_for
from playwright.sync_api import Locator, Page, expect

from specdec_lab.session import Outcome, Session, Setting

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PROMPT = "Tell me three things."
TOKENS = 24
HTML = '<script>window.ran = 1</script><img src=x onerror="window.ran = 1"> & "quotes"'


class Explorer:
    """The explorer on the page: its controls by their labels, and what it shows."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.root = page.locator(".sl-explorer")

    def slider(self, label: str) -> Locator:
        return self._row(label, ".widget-slider").get_by_role("slider")

    def press(self, label: str, key: str, times: int) -> None:
        """Move a slider by keyboard, as releasing it at its new place would."""
        handle = self.slider(label)
        handle.focus()
        for _ in range(times):
            handle.press(key)

    def choose(self, label: str, option: str) -> None:
        self._row(label, ".widget-dropdown").locator("select").select_option(label=option)

    def write(self, label: str, text: str, kind: str = ".widget-text") -> None:
        box = self.box(label, kind)
        box.fill(text)
        box.blur()

    def box(self, label: str, kind: str = ".widget-text") -> Locator:
        return self._row(label, kind).locator("input, textarea").locator("visible=true").first

    def write_prompt(self, text: str) -> None:
        self.write("prompt", text, ".widget-textarea")

    def button(self, name: str) -> Locator:
        return self.root.locator("button", has_text=re.compile(rf"^\W*{name}$"))

    def run(self) -> None:
        self.button("Run").click()

    def open(self, tab: str) -> None:
        self.root.get_by_role("tab", name=tab).click()

    def expect_ready(self, runs: int) -> None:
        """Wait until so many runs are in the history and nothing runs."""
        expect(self.root.locator(".sl-table tr")).to_have_count(runs + 1)
        expect(self.button("Stop")).to_be_disabled()

    def expect_note(self, text: str | re.Pattern[str]) -> None:
        expect(self.root.locator(".sl-note").filter(has_text=text).first).to_be_visible()

    def shown(self) -> dict[str, int]:
        """What the chips say: groups, and chips of each kind."""
        chips = self.root.locator(".sd-flow").first
        kinds = ("accepted", "recovered", "bonus", "plain")
        return {"steps": chips.locator(".sd-step").count()} | {
            kind: chips.locator(f".sd-step > .sd-{kind}").count() for kind in kinds
        }

    def _row(self, label: str, kind: str) -> Locator:
        return self.root.locator(kind, has=self.page.get_by_text(label, exact=True))


def expected(setting: Setting) -> Outcome:
    """What the page must show: the same setting, run here."""
    *_, last = Session("cpu", "float32").run(setting)
    assert isinstance(last, Outcome)
    return last


def counts(outcome: Outcome) -> dict[str, int]:
    """As Explorer.shown has them."""
    steps = outcome.trace.steps
    tails = [step for step in steps if step.emitted > len(step.accepted)]
    kept = sum(min(step.emitted, len(step.accepted)) for step in steps)
    ends = {kind: sum(step.next_kind == kind for step in tails) for kind in ("recovered", "bonus", "plain")}
    return {"steps": len(steps), "accepted": kept, **ends}


@pytest.fixture
def quiet(page: Page) -> Iterator[Page]:
    """The page, failing the test for what is logged as an error."""
    logged: list[str] = []

    def note(message: object) -> None:
        if getattr(message, "type", "") == "error":
            logged.append(getattr(message, "text", ""))

    page.on("console", note)
    yield page
    page.remove_listener("console", note)
    assert logged == []


@pytest.fixture
def tiny(quiet: Page, lab: Lab, tiny_folder: str, tiny_draft_folder: str) -> Iterator[tuple[Explorer, Setting]]:
    """The explorer after Run All, on tiny models; and the setting it ran."""
    setting = Setting(PROMPT, "json", tiny_folder, tiny_draft_folder, max_new_tokens=TOKENS)
    name = copy_notebook(
        "01_explore.ipynb",
        lab.folder,
        main=tiny_folder,
        draft=tiny_draft_folder,
        prompt=PROMPT,
        max_new_tokens=TOKENS,
        device="cpu",
        dtype="float32",
    )
    run_all(quiet, lab, name)
    explorer = Explorer(quiet)
    explorer.expect_ready(1)
    yield explorer, setting
    assert tracebacks(quiet).count() == 0
    assert quiet.evaluate("window.ran") is None


Tiny = tuple[Explorer, Setting]


def test_first_run_and_sliders_by_keyboard(tiny: Tiny) -> None:
    """The first text comes by itself; a released slider changes it to what that setting decodes to."""
    explorer, setting = tiny
    assert explorer.shown() == counts(expected(setting))
    explorer.root.get_by_label("live: run when a control is released").check()
    explorer.expect_ready(2)
    explorer.press("draft length", "ArrowRight", 3)
    expect(explorer.root.locator(".sl-table tr").nth(1)).to_contain_text("γ 7")
    expect(explorer.button("Stop")).to_be_disabled()
    assert explorer.shown() == counts(expected(_with(setting, draft_length=7)))
    explorer.choose("acceptance", "threshold")
    explorer.press("threshold", "Home", 1)
    expect(explorer.root.locator(".sl-table tr").nth(1)).to_contain_text("threshold 0")
    expect(explorer.button("Stop")).to_be_disabled()
    lossy = expected(_with(setting, draft_length=7, acceptance_rule="threshold", acceptance_threshold=0.0))
    assert explorer.shown() == counts(lossy)
    assert counts(lossy) != counts(expected(_with(setting, draft_length=7)))  # the slider made a difference
    take_shot(explorer.page, "explore_tiny")


def _with(setting: Setting, **changes: object) -> Setting:
    return replace(setting, **changes)  # type: ignore[arg-type]


def test_steps_and_history(tiny: Tiny) -> None:
    explorer, setting = tiny
    outcome = expected(setting)
    explorer.press("step", "ArrowRight", 2)
    step = outcome.trace.steps[2]
    about = f"drafted {len(step.drafted)}, accepted {len(step.accepted)}"
    expect(explorer.root.get_by_text(f"Step 3 of {len(outcome.trace.steps)}")).to_be_visible()
    expect(explorer.root.locator(".sd").filter(has_text=about).first).to_be_visible()
    explorer.press("candidates", "ArrowRight", 3)
    explorer.run()
    explorer.expect_ready(2)
    explorer.open("History")
    expect(explorer.root.locator(".sl-two section")).to_have_count(2)
    explorer.button("command for papermill").click()
    expect(explorer.root.locator(".sl-code")).to_contain_text("-p candidate_count 4")
    with explorer.page.expect_download() as saved:
        explorer.root.get_by_text("Save as CSV").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0].startswith("run,prompt,task,main,draft")
    assert len(lines) == 3


def test_what_if_answers_at_once(tiny: Tiny) -> None:
    explorer, _ = tiny
    explorer.open("What if")
    expect(explorer.root.locator(".sl-charts svg")).to_have_count(2)
    explorer.press("length γ", "ArrowRight", 3)
    explorer.expect_note(re.compile(r"^γ 7: lossless \d"))
    explorer.expect_ready(1)  # no model ran


def test_html_is_shown_as_text(tiny: Tiny) -> None:
    explorer, _ = tiny
    explorer.write_prompt(HTML)
    explorer.run()
    explorer.expect_ready(2)
    explorer.open("History")
    expect(explorer.root.locator(".sl-table tr").nth(1)).to_have_attribute("title", HTML)
    assert explorer.root.locator("script, img").count() == 0


def test_bad_input_is_explained_and_the_page_goes_on(tiny: Tiny, tmp_path: Path) -> None:
    explorer, _ = tiny
    explorer.write_prompt("   ")
    explorer.run()
    explorer.expect_note("prompt = '   ': allowed is text or token ids that are not empty")
    explorer.write_prompt("x" * 600)
    explorer.run()
    explorer.expect_note(re.compile(r"prompt = '6\d\d tokens': allowed is 1 … 511 tokens"))
    explorer.write_prompt(PROMPT)
    explorer.choose("acceptance", "lenience")
    explorer.expect_note("above 0 with the rule lenience")
    explorer.choose("acceptance", "lossless")
    main = explorer.box("its place").input_value()  # the main model's comes first
    explorer.write("its place", "")
    explorer.run()
    explorer.expect_note("main model: name a folder, a GGUF file or a hub id")
    explorer.write("its place", str(tmp_path))
    explorer.run()
    explorer.expect_note(re.compile(rf"{re.escape(str(tmp_path))}.*config.json"))
    explorer.write("its place", main)
    explorer.run()
    explorer.expect_ready(2)


def test_stop_and_themes_on_the_bundled_pair(quiet: Page, lab: Lab, bundled: object) -> None:
    """A run is stopped half-way while other widgets answer; both themes are kept as screenshots."""
    name = copy_notebook("01_explore.ipynb", lab.folder, device="cpu", dtype="float32", max_new_tokens=32)
    run_all(quiet, lab, name)
    explorer = Explorer(quiet)
    explorer.expect_ready(1)
    explorer.expect_note("Lossless: all")
    explorer.choose("task", "prose")
    explorer.press("max tokens", "End", 1)
    explorer.run()
    expect(explorer.button("Stop")).to_be_enabled()
    explorer.expect_note(re.compile(r"^decoding: [1-9]"))
    explorer.open("What if")
    explorer.press("length γ", "ArrowRight", 1)
    explorer.expect_note(re.compile(r"^γ 5: lossless"))
    expect(explorer.button("Stop")).to_be_enabled()  # the kernel answered while the run went on
    explorer.button("Stop").click()
    expect(explorer.button("Stop")).to_be_disabled()
    explorer.expect_ready(1)
    shown = explorer.shown()
    assert 0 < shown["steps"] < 256
    explorer.press("max tokens", "Home", 1)
    explorer.press("candidates", "ArrowRight", 3)
    explorer.run()
    explorer.expect_ready(2)
    explorer.open("Step by step")
    for theme in ("Light", "Dark"):
        quiet.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", f"JupyterLab {theme}"
        )
        expect(quiet.locator("body")).to_have_attribute("data-jp-theme-light", str(theme == "Light").lower())
        for width in (1400, 1000):
            quiet.set_viewport_size({"width": width, "height": 1600})
            take_shot(quiet, f"explore_{theme.lower()}_{width}")
            over = explorer.root.evaluate("root => root.scrollWidth - root.clientWidth")
            assert over <= 1, "something is wider than the page"
    quiet.set_viewport_size({"width": 1400, "height": 1600})
    assert tracebacks(quiet).count() == 0


def test_voila_serves_it(page: Page, tmp_path: Path, tiny_folder: str, tiny_draft_folder: str) -> None:
    """What `make app` starts. Its own page asks for fonts that are elsewhere, which the browser logs."""
    parameters = {"main": tiny_folder, "draft": tiny_draft_folder, "prompt": PROMPT, "max_new_tokens": TOKENS}
    name = copy_notebook("01_explore.ipynb", tmp_path, **parameters, device="cpu", dtype="float32")
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-m", "voila", str(tmp_path / name), "--no-browser", f"--port={port}"]
    log = tmp_path / "voila.log"
    with log.open("w") as sink:
        server = subprocess.Popen(command, env=isolated_environment(tmp_path), stdout=sink, stderr=sink)
    try:
        wait_for(url, server, log)
        page.goto(url)
        explorer = Explorer(page)
        explorer.expect_ready(1)
        explorer.press("draft length", "ArrowRight", 1)
        explorer.run()
        explorer.expect_ready(2)
        expect(explorer.root.locator(".sl-table tr").nth(1)).to_contain_text("γ 5")
        take_shot(page, "explore_voila")
    finally:
        server.terminate()
        server.wait(20)
