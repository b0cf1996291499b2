"""The explorer without a page: what its controls mean, and what its worker does when runs overlap, stop and fail."""

import json
import queue
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pytest
from test_session import CURVE, PROMPT, curves, generated, last

from specdec_lab import explorer as module
from specdec_lab import panels, session
from specdec_lab.acceptance import RULES
from specdec_lab.errors import ModelError, SettingError, UnknownNameError
from specdec_lab.explorer import KEPT, OWN, PROMPTS, TASKS, Explorer, Worker
from specdec_lab.session import Outcome, Progress, Session, Setting
from specdec_lab.tasks import load_prompts

__all__ = ["curves"]
SOON = 30  # seconds; no test waits so long unless it fails


class Run:
    """A run of a Steered session: yields what it is told to, raises it, or ends on None."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.told, self.closed = setting, queue.Queue[Any](), threading.Event()

    def tell(self, *what: Any) -> None:
        for each in what:
            self.told.put(each)


class Steered(Session):
    """A session without models, whose runs the test steers."""

    machine: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.begun = queue.Queue[Run]()

    def run(self, setting: Setting) -> Iterator[Progress | Outcome]:
        mine = Run(setting)
        self.begun.put(mine)
        try:
            while (what := mine.told.get(timeout=SOON)) is not None:
                if isinstance(what, BaseException):
                    raise what
                yield what
        finally:
            mine.closed.set()

    def next(self) -> Run:
        return self.begun.get(timeout=SOON)


@pytest.fixture
def steered() -> Steered:
    return Steered()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    """What explorers were told at the end of their runs."""
    ended, told = queue.Queue[str](), Explorer._told

    def watched(self: Explorer, busy: bool, said: str) -> None:
        told(self, busy, said)
        assert self.stop_button.disabled is not busy
        if not busy:
            ended.put(said)

    monkeypatch.setattr(Explorer, "_told", watched)
    return ended


@pytest.fixture(scope="module")
def shared() -> Session:
    return Session()


@pytest.fixture
def tiny(tiny_folder: str, noisy_folder: str) -> dict[str, Any]:
    return {"prompt": PROMPT, "main": tiny_folder, "draft": noisy_folder, "max_new_tokens": 24}


@pytest.fixture
def outcome(shared: Session, tiny: dict[str, Any], curves: list[str]) -> Outcome:
    return last(shared, Setting(**tiny))


def said(page: Explorer) -> str:
    return re.sub("<[^>]+>", "", page.status.value)


# ---- the worker


class Watched:
    """A worker and what it told."""

    def __init__(self, session: Session) -> None:
        self.shown: queue.Queue[Any] = queue.Queue()
        self.done: queue.Queue[str] = queue.Queue()
        self.begun: queue.Queue[str] = queue.Queue()
        self.worker = Worker(session, self.shown.put, lambda busy, said: (self.begun if busy else self.done).put(said))

    def end(self) -> str:
        return self.done.get(timeout=SOON)


def test_the_latest_run_wins(steered: Steered) -> None:
    watched = Watched(steered)
    watched.worker.run(Setting("a"))
    assert watched.begun.get_nowait() == ""
    first = steered.next()
    watched.worker.run(Setting("b"))
    watched.worker.run(Setting("c"))
    first.tell(Progress("late"), Progress("never"))
    second = steered.next()
    assert second.setting.prompt == "c"
    assert first.closed.is_set()
    assert first.told.qsize() == 1
    assert watched.worker.busy
    assert watched.done.empty(), "something still runs"
    second.tell(None)
    assert watched.end() == ""
    assert not watched.worker.busy
    assert steered.begun.empty()


def test_stopping_shows_what_there_is_of_the_text(
    steered: Steered, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY", 1e9)
    watched = Watched(steered)
    watched.worker.run(Setting("a"))
    run = steered.next()
    growing = [Progress(f"decoding {i}", outcome.made) for i in range(4)]
    run.tell(Progress("loading"), *growing[:3], Progress("measuring"))
    assert [watched.shown.get(timeout=SOON).doing for _ in range(2)] == ["loading", "measuring"]
    watched.worker.stop()
    run.tell(growing[3])
    assert watched.end() == ""
    assert watched.shown.get_nowait() is growing[3]
    assert run.closed.is_set()


def test_a_run_stopped_before_it_began_does_not_begin(steered: Steered) -> None:
    watched = Watched(steered)
    watched.worker.run(Setting("a"))
    first = steered.next()
    watched.worker.run(Setting("b"))
    watched.worker.stop()
    first.tell(Progress("late"))
    assert watched.end() == ""
    assert not watched.worker.busy
    assert steered.begun.empty()


@pytest.mark.parametrize(
    ("error", "message"), [(ModelError("no such model"), "no such model"), (KeyError("k"), "KeyError: 'k'")]
)
def test_no_error_ends_the_worker(error: Exception, message: str, steered: Steered) -> None:
    watched = Watched(steered)
    for _ in range(2):
        watched.worker.run(Setting("a"))
        steered.next().tell(Progress("loading"), error)
        assert watched.end() == message
    watched.worker.run(Setting("b"))
    steered.next().tell(None)
    assert watched.end() == ""


def test_an_error_of_the_page_does_not_end_it_either(steered: Steered) -> None:
    def fails(now: Any) -> None:
        raise ZeroDivisionError("of the page")

    done = queue.Queue[str]()
    worker = Worker(steered, fails, lambda busy, said: None if busy else done.put(said))
    for _ in range(2):
        worker.run(Setting("a"))
        run = steered.next()
        run.tell(Progress("loading"))
        assert done.get(timeout=SOON) == "ZeroDivisionError: of the page"
        assert run.closed.wait(SOON)


# ---- controls


def test_there_is_a_control_for_every_field(steered: Steered) -> None:
    page = Explorer(steered)
    assert {field.name for field in fields(Setting)} <= page.controls.keys()
    given: dict[str, Any] = {
        **{"prompt": "My own.", "task": "code", "main": "/m", "draft": "/d", "draft_length": 7, "candidate_count": 3},
        **{"acceptance_rule": "typical", "acceptance_threshold": 0.25, "temperature": 0.5, "seed": 11},
        "max_new_tokens": 40,
    }
    assert asdict(Explorer(steered, **given).setting) == given
    usual = asdict(page.setting)
    for name, value in given.items():
        changed = asdict(Explorer(steered, **{name: value}).setting)
        coupled = {"task": {"prompt"}, "acceptance_rule": {"acceptance_threshold"}}.get(name, set())
        assert {other for other in usual if changed[other] != usual[other]} == {name} | coupled, name
    everything = [page.page]
    for widget in everything:
        everything += getattr(widget, "children", ())
    assert all(control in everything for control in page.controls.values())


def test_it_begins_as_if_a_user_had_set_the_controls(steered: Steered) -> None:
    prose = load_prompts("prose", PROMPTS)
    page = Explorer(steered, acceptance_rule="block", task="prose")
    assert page.setting.prompt == page.controls["example"].value == prose[0].prompt
    assert page.setting.acceptance_threshold == RULES["block"].threshold
    assert "Ready" in said(page)
    page = Explorer(steered, prompt="Mine", task="prose", acceptance_threshold=None, acceptance_rule="typical")
    assert (page.setting.prompt, page.controls["example"].value) == ("Mine", None)
    assert page.setting.acceptance_threshold == RULES["typical"].threshold


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("draft_length", 99, "1 … 32"),
        ("temperature", -1.0, "0.0 … 2.0"),
        ("task", "poetry", "json, code, prose, own"),
        ("acceptance_rule", "best", "lossless, threshold"),
        ("seed", "x", "0 … "),
        ("prompt", 3, "a text"),
    ],
)
def test_what_a_control_cannot_show_is_refused(name: str, value: Any, allowed: str, steered: Steered) -> None:
    with pytest.raises(SettingError, match=f"{name} = {value!r}: allowed is {allowed}"):
        Explorer(steered, **{name: value})


def test_a_control_that_does_not_exist_is_refused(steered: Steered) -> None:
    with pytest.raises(UnknownNameError, match="no control 'gamma'; there is: .*draft_length"):
        Explorer(steered, gamma=3)


def test_a_task_fills_in_its_prompts(steered: Steered) -> None:
    page = Explorer(steered)
    at = page.controls
    for task in reversed(TASKS):
        at["task"].value = task
        prompts = [row.prompt for row in load_prompts(task, PROMPTS)]
        assert [prompt for _, prompt in at["example"].options] == prompts
        assert at["prompt"].value == at["example"].value == prompts[0]
    at["example"].value = prompts[2]
    assert page.setting.prompt == prompts[2]
    at["prompt"].value = "Edited."
    assert at["example"].value is None
    assert page.setting.prompt == "Edited."
    at["example"].value = prompts[2]
    assert at["prompt"].value == prompts[2]
    at["task"].value = OWN
    assert (at["example"].options, at["prompt"].value, page.setting.task) == ((), prompts[2], "prose")


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"temperature": 0.7}, {"draft": "none"}, {"draft": "ngram"}, {"acceptance_rule": "sequence"}),
        *({"acceptance_rule": "threshold"}, {"acceptance_rule": "block"}, {"draft": "ngram+feature"}),
    ],
)
def test_controls_that_make_no_difference_are_disabled(changes: dict[str, Any], steered: Steered) -> None:
    page = Explorer(steered, draft="none" if "draft" not in changes else "1:4")
    page.controls["draft"].value = "1:4"
    for name, value in changes.items():
        page.controls[name].value = value
    idle = page.setting.idle
    assert {name: control.tooltip for name, control in page.controls.items() if control.disabled} == idle
    assert all(why in said(page) for why in idle.values())


def test_a_rule_sets_its_usual_threshold(steered: Steered) -> None:
    page = Explorer(steered)
    for rule, about in RULES.items():
        page.controls["acceptance_rule"].value = rule
        assert page.setting.acceptance_threshold == (about.threshold or 0.0)
    page.controls["acceptance_rule"].value = "lenience"
    assert "above 0 with the rule lenience" in said(page)
    page.run()
    assert "sl-error" in page.status.value
    assert steered.begun.empty()


@pytest.mark.parametrize(("name", "label"), [("main", "main model"), ("draft", "draft")])
def test_an_own_model_is_asked_for(name: str, label: str, steered: Steered) -> None:
    page = Explorer(steered)
    field = page.controls[f"own_{name}"]
    assert field.layout.display == "none"
    page.controls[name].value = OWN
    assert field.layout.display == ""
    field.value = "  "
    page.run()
    assert said(page) == f"{label}: name a folder, a GGUF file or a hub id"
    assert steered.begun.empty()
    field.value = " /some/where "
    page.run()
    run = steered.next()
    assert getattr(run.setting, name) == "/some/where"
    run.tell(None)


# ---- runs


def test_a_run_shows_the_numbers_of_generate(
    tiny: dict[str, Any], shared: Session, ends: queue.Queue[str], curves: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = Explorer(shared, **tiny, temperature=0.8, seed=3)
    page.run()
    assert not page.stop_button.disabled or not ends.empty()
    assert ends.get(timeout=SOON) == ""
    (outcome,) = page.outcomes
    expected = generated(capsys, page.setting)
    assert (outcome.made.tokens, outcome.curve) == (expected["tokens"], CURVE)
    for name in ("tokens_per_main_forward", "acceptance_probability", "draft_acceptance_rate"):
        label, form = panels.NUMBERS[name]
        assert f"<span>{label}</span><b>{form.format(expected['metrics'][name])}</b>" in page.numbers.value
    assert page.numbers.value == panels.headline(outcome)
    assert page.reasons.value == panels.why(outcome)
    assert page.step_slider.max == len(outcome.trace.steps)
    page.step_slider.value = 3
    assert 'data-step="2"' in page.step_view.value
    assert outcome.whatif is not None
    page.what_length.value, page.what_rule.value, page.what_threshold.value = 6, "lenience", 0.4
    assert page.predicted.value == panels.what_if(outcome.whatif, 6, "lenience", 0.4)
    assert page.stop_button.disabled
    assert said(page).startswith("Ready")


def test_what_theory_says_nothing_of_is_told(tiny: dict[str, Any], steered: Steered, outcome: Outcome) -> None:
    page = Explorer(steered)
    assert "No prediction yet." in page.predicted.value
    page._show(replace(outcome, setting=replace(outcome.setting, acceptance_rule="block")))
    assert "No prediction: theory here is of rules" in page.predicted.value
    page._show(replace(outcome, made=replace(outcome.made)))
    assert "sl-charts" in page.predicted.value
    page.what_rule.value = "lenience"
    assert "its greedy form is threshold" in page.predicted.value


def test_stopping_keeps_the_text_and_the_page_goes_on(
    steered: Steered, outcome: Outcome, ends: queue.Queue[str]
) -> None:
    page = Explorer(steered)
    page.run()
    run = steered.next()
    assert not page.stop_button.disabled
    page.stop_button.click()
    run.tell(Progress("decoding", outcome.made, outcome.decode))
    assert ends.get(timeout=SOON) == ""
    assert page.text.value == panels.chips(outcome)
    assert (page.outcomes, page.stop_button.disabled, page.run_button.disabled) == ([], True, False)
    page.run_button.click()
    steered.next().tell(outcome, None)
    assert ends.get(timeout=SOON) == ""
    assert page.outcomes == [outcome]


def test_a_newer_run_takes_the_place_of_one_that_runs(
    steered: Steered, outcome: Outcome, ends: queue.Queue[str]
) -> None:
    page = Explorer(steered)
    page.run()
    first = steered.next()
    page.controls["prompt"].value = "Newer."
    page.run()
    first.tell(Progress("decoding", outcome.made))
    second = steered.next()
    assert second.setting.prompt == "Newer."
    second.tell(outcome, replace(outcome, curve=None), None)
    ends.get(timeout=SOON)
    assert len(page.outcomes) == 1, "the same run twice"
    assert page.outcomes[0].curve is None


def test_errors_become_notes_and_the_next_run_works(
    tiny: dict[str, Any], shared: Session, ends: queue.Queue[str], curves: list[str], tmp_path: Path
) -> None:
    page = Explorer(shared, **tiny | {"main": str(tmp_path)})
    page.run()
    assert "has no config.json" in ends.get(timeout=SOON)
    assert "sl-error" in page.status.value
    assert "has no config.json; it holds: nothing" in said(page)
    assert page.stop_button.disabled
    page.controls["own_main"].value = tiny["main"]
    page.run()
    assert ends.get(timeout=SOON) == ""
    assert len(page.outcomes) == 1


def test_live_mode_runs_on_every_change(steered: Steered, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Explorer(steered)
    asked: list[Setting] = []
    monkeypatch.setattr(page._worker, "run", asked.append)
    page.controls["draft_length"].value = 5
    assert asked == []
    page.live.value = True
    assert asked.pop() == page.setting
    for name, value in (("draft_length", 6), ("task", "code"), ("acceptance_rule", "threshold"), ("prompt", "Own.")):
        page.controls[name].value = value
        assert asked == [page.setting], "a change that brings others with it is one run"
        assert getattr(asked.pop(), name) == value
    page.live.value = False
    page.controls["draft_length"].value = 7
    assert asked == []


def test_the_history_keeps_the_last_runs(steered: Steered, outcome: Outcome) -> None:
    page = Explorer(steered)
    for length in range(1, KEPT + 3):
        made, setting = replace(outcome.made), replace(outcome.setting, draft_length=length)
        page._show(replace(outcome, made=made, setting=setting, curve=None))
        page._show(replace(outcome, made=made, setting=setting))
        kept = [each.setting.draft_length for each in page.outcomes]
        assert kept == list(range(max(1, length - KEPT + 1), length + 1))
        assert all(each.curve for each in page.outcomes)
        first, second = page._menus.values()
        for menu in (first, second):
            assert [panels.describe(each.setting) in label for each, (label, _) in
                    zip(page.outcomes, menu.options, strict=True)] == [True] * len(kept)  # fmt: skip
        assert [first.value, second.value] == [page.outcomes[-min(2, len(kept))], page.outcomes[-1]]
        assert (page.sides.value == "") == (length == 1)
    chosen = first.value = page.outcomes[3]
    assert page.sides.value == panels.comparison(chosen, page.outcomes[-1])
    page._show(replace(outcome, made=replace(outcome.made)))
    assert [first.value, second.value] == [chosen, page.outcomes[-1]], "what was chosen stays, the other is the latest"
    assert page.sides.value == panels.comparison(chosen, page.outcomes[-1])
    assert page.runs.value == panels.history(page.outcomes)
    assert page.saved.value == panels.download(page.outcomes)


def test_the_command_of_a_run(
    steered: Steered, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (module, session):
        monkeypatch.setattr(place, "from_root", lambda path: tmp_path / path)
    page = Explorer(steered)
    page.command_button.click()
    assert page.command.value == ""
    page._show(outcome)
    page.command_button.click()
    assert f"papermill {tmp_path}/notebooks/02_experiment.ipynb" in page.command.value
    (file,) = (tmp_path / "build" / "explorer").iterdir()
    assert json.loads(file.read_text())["prompt"] == PROMPT
    page._show(replace(outcome, made=replace(outcome.made), setting=outcome.setting.plain))
    assert page.command.value == ""
    page.command_button.click()
    assert "the plain loop runs beside every one of them" in page.command.value


def test_numbers_of_another_run_are_greyed(steered: Steered, outcome: Outcome) -> None:
    """While a text grows, and after it was stopped, what stands below is that of the run before."""
    page = Explorer(steered)
    parts = (page.numbers, page.tabs)
    page._show(outcome)
    assert not any("sl-stale" in part._dom_classes for part in parts)
    page._show(Progress("measuring", outcome.made))
    assert not any("sl-stale" in part._dom_classes for part in parts)
    page._show(Progress("decoding", replace(outcome.made)))
    assert all("sl-stale" in part._dom_classes for part in parts)
    page._show(replace(outcome, made=replace(outcome.made)))
    assert not any("sl-stale" in part._dom_classes for part in parts)


def test_a_closed_page_lets_go_of_its_widgets(steered: Steered) -> None:
    before = set(widgets.Widget.get_manager_state()["state"])
    page = Explorer(steered)
    assert len(widgets.Widget.get_manager_state()["state"]) > len(before)
    page.close()
    left = widgets.Widget.get_manager_state()["state"]
    assert {left[model]["model_name"] for model in left.keys() - before} <= {"LayoutModel"}


def test_explore_displays_the_page_and_runs(monkeypatch: pytest.MonkeyPatch, steered: Steered) -> None:
    shown: list[widgets.Widget] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    given: list[Any] = []

    def make(*machine: Any) -> Session:
        given.append(machine)
        return steered

    monkeypatch.setattr(module, "Session", make)
    page = module.explore("cpu", "float32", 2, prompt="Hello")
    assert (shown, given) == ([page.page], [("cpu", "float32", 2)])
    run = steered.next()
    assert run.setting.prompt == "Hello"
    run.tell(None)
