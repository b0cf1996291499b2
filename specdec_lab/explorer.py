"""The explorer: controls, a run in the background, and what it says. Widgets only.

session runs, whatif predicts, traceview and panels write the HTML. A run lives in a thread of its own, so that the
kernel goes on answering; it is asked to stop between two steps.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import ipywidgets as widgets
from traitlets import TraitError

from specdec_lab import panels, traceview
from specdec_lab.acceptance import RULES
from specdec_lab.control import MAX_CANDIDATES
from specdec_lab.errors import SpecdecError, UnknownNameError, require
from specdec_lab.models.zoo import BUNDLED, RATIOS
from specdec_lab.places import from_root
from specdec_lab.session import Outcome, Progress, Session, Setting, repeat
from specdec_lab.tables import TASKS
from specdec_lab.tasks import load_prompts
from specdec_lab.whatif import BY_TOKEN, LONGEST

OWN = "own"
DRAFTS = {
    **{f"{ratio} of the main model": ratio for ratio in RATIOS},
    **{"feature: reads hidden states": "feature", "n-gram: looks up the text": "ngram"},
    **{"n-gram, then feature": "ngram+feature", "none: plain decoding": "none", "own model": OWN},
}
PROMPTS = 20  # of each task, to choose from
KEPT = 30  # runs in the history
EVERY = 0.25  # seconds between two looks at a text that grows
SCRATCH = "build/explorer"  # prompts of runs that are repeated in batch


class Worker:
    """Runs the latest setting it was given, in a thread; one that comes while another runs takes its place.

    show: called with all that the session yields. told: called with whether something runs, whenever that changes,
    and a message for people, empty for none; never at the same time from two threads.
    """

    def __init__(
        self, session: Session, show: Callable[[Progress | Outcome], None], told: Callable[[bool, str], None]
    ) -> None:
        self.session, self._show, self._told = session, show, told
        self._waiting: Setting | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.busy = False

    def run(self, setting: Setting) -> None:
        """Start it; what runs now is stopped."""
        with self._lock:
            self._waiting = setting
            self._stopped.set()
            if not self.busy:
                self.busy = True
                threading.Thread(target=self._work, daemon=True).start()
                self._told(True, "")

    def stop(self) -> None:
        """Stop what runs after the step it is in."""
        with self._lock:
            self._waiting = None
            self._stopped.set()

    def _work(self) -> None:
        said = ""
        while (setting := self._next(said)) is not None:
            said = ""
            try:
                self._follow(self.session.run(setting))
            except SpecdecError as error:
                said = str(error)
            except Exception as error:  # a thread that dies would leave the page without a word
                said = f"{type(error).__name__}: {error}"

    def _next(self, said: str) -> Setting | None:
        with self._lock:
            setting, self._waiting = self._waiting, None
            if setting is None:
                self.busy = False
                self._told(False, said)
            else:
                self._stopped.clear()
            return setting

    def _follow(self, progress: Iterator[Progress | Outcome]) -> None:
        shown, now = 0.0, None
        for now in progress:
            stopped = self._stopped.is_set()
            growing = isinstance(now, Progress) and now.made is not None
            if stopped or not growing or time.monotonic() - shown >= EVERY:
                self._show(now)
                shown = time.monotonic()
            if stopped:
                return


class Explorer:
    """The page. `page` is what a notebook displays; controls: values to begin with, by the names of Setting."""

    def __init__(self, session: Session | None = None, **controls: Any) -> None:
        self.outcomes: list[Outcome] = []
        self._filling = False
        self._picked: set[str] = set()  # menus of runs that the user has set
        self.controls = _controls()
        for name in controls:
            if name not in self.controls:
                raise UnknownNameError("control", name, self.controls)
        self.run_button = widgets.Button(description="Run", button_style="primary", icon="play")
        self.stop_button = widgets.Button(description="Stop", icon="stop", disabled=True)
        self.live = widgets.Checkbox(description="live: run when a control is released", indent=False)
        self.status, self.numbers, self.text = _html(), _html(), _html()
        self.step_slider = widgets.IntSlider(description="step", min=1, max=1, layout=widgets.Layout(width="auto"))
        self.step_view, self.reasons, self.predicted, self.runs, self.sides = (_html() for _ in range(5))
        self.saved, self.command = _html(), _html()
        self.command_button = widgets.Button(description="command for papermill", layout=widgets.Layout(width="auto"))
        self.what_length = widgets.IntSlider(4, 1, 16, description="length γ", style=_LABEL, layout=_wide())
        self.what_threshold = widgets.FloatSlider(0.3, min=0, max=1, step=0.01, description="threshold", style=_LABEL)
        self.what_rule = widgets.Dropdown(options=[r for r in BY_TOKEN if r != "lossless"], description="rule")
        self._menus = {name: widgets.Dropdown(description=name) for name in ("run", "beside")}
        self.page = self._laid_out()
        self._worker = Worker(session or Session(), self._show, self._told)
        self._listen()
        self._begin_with({name: value for name, value in controls.items() if value not in (None, "")})
        self._show_whatif()

    # ---- controls

    @property
    def setting(self) -> Setting:
        """What the controls say."""
        at = {name: control.value for name, control in self.controls.items()}
        main = at["own_main"].strip() if at["main"] == OWN else at["main"]
        draft = at["own_draft"].strip() if at["draft"] == OWN else at["draft"]
        names = ("draft_length", "candidate_count", "acceptance_rule", "acceptance_threshold", "temperature", "seed")
        task = at["task"] if at["task"] in TASKS else "prose"
        rest = {name: at[name] for name in (*names, "max_new_tokens")}
        return Setting(at["prompt"], task, main, draft, **rest)

    def run(self) -> None:
        """Run what the controls say."""
        if problem := self._problem():
            self._say(problem, "error")
            return
        self._worker.run(self.setting)

    def stop(self) -> None:
        """Stop the run; what there is of its text stays."""
        self._worker.stop()

    def close(self) -> None:
        """Take it off the page, and let go of its models once nothing runs."""
        self.stop()
        _close(self.page)

    def _begin_with(self, values: dict[str, Any]) -> None:
        """As if a user had set them from top to bottom: a task fills in a prompt, a rule its threshold."""
        self._changed("task")
        for name in ("main", "draft"):
            known = self.controls[name].options
            if name in values and values[name] not in dict(known).values():
                self.controls[f"own_{name}"].value, values[name] = values[name], OWN
        for name in (name for name in self.controls if name in values):
            control, value = self.controls[name], values[name]
            with suppress(TraitError):  # where it does not clamp it
                control.value = value
            require(name, value, control.value == value, _allowed(control))

    def _fill_prompts(self) -> None:
        """The shipped prompts of the task, to choose from; none for own text."""
        task, example = self.controls["task"].value, self.controls["example"]
        rows = load_prompts(task, PROMPTS) if task in TASKS else []
        example.options = [
            (f"{place}: {' '.join(row.prompt.split())[:70]}", row.prompt) for place, row in enumerate(rows, 1)
        ]
        example.value = rows[0].prompt if rows else None

    def _problem(self) -> str:
        """Why what the controls say cannot run; empty where it can, as far as that shows without a model."""
        for name in ("own_main", "own_draft"):
            if self._asked(name) and not self.controls[name].value.strip():
                return f"{_LABELS[name.removeprefix('own_')]}: name a folder, a GGUF file or a hub id"
        try:
            _ = self.setting.arm
        except SpecdecError as error:
            return str(error)
        return ""

    def _asked(self, name: str) -> bool:
        return bool(self.controls[name.removeprefix("own_")].value == OWN)

    def _listen(self) -> None:
        self.run_button.on_click(lambda _: self.run())
        self.stop_button.on_click(lambda _: self.stop())
        for name, control in self.controls.items():
            control.observe(lambda change, name=name: self._changed(name), "value")
        self.live.observe(lambda change: self._run_live(), "value")
        self.step_slider.observe(lambda change: self._show_step(), "value")
        for control in (self.what_length, self.what_threshold, self.what_rule):
            control.observe(lambda change: self._show_whatif(), "value")
        for name, menu in self._menus.items():
            menu.observe(lambda change, name=name: self._pick(name), "value")
        self.command_button.on_click(lambda _: self._show_command())

    def _changed(self, name: str) -> None:
        if self._filling:
            return
        self._filling = True
        try:
            self._follow_up(name)
        finally:
            self._filling = False
        self._refresh()
        self._run_live()

    def _follow_up(self, name: str) -> None:
        """Set what goes with a control."""
        at = self.controls
        if name == "task":
            self._fill_prompts()
        if name in ("task", "example") and at["example"].value is not None:
            at["prompt"].value = at["example"].value
        if name == "prompt" and at["prompt"].value != at["example"].value:
            at["example"].value = None  # the text is the user's now
        if name == "acceptance_rule":
            at["acceptance_threshold"].value = RULES[at["acceptance_rule"].value].threshold or 0.0

    def _run_live(self) -> None:
        if self.live.value:
            self.run()

    def _refresh(self) -> None:
        """Disable what makes no difference and say why; show only the fields that are asked for."""
        idle = self.setting.idle
        for name, control in self.controls.items():
            control.disabled = name in idle
            control.tooltip = idle.get(name, "")
            if name.startswith("own_"):
                control.layout.display = "" if self._asked(name) else "none"
        if self._worker.busy:
            return
        if problem := self._problem():
            self._say(problem, "error")
        else:
            self._say("Ready. " + "; ".join(f"{_LABELS[n]}: {why}" for n, why in idle.items()))

    # ---- what the worker tells; called in its thread

    def _show(self, now: Progress | Outcome) -> None:
        if now.made is not None:
            self.text.value = panels.chips(now)
        if isinstance(now, Progress):
            self._stale(now.made is not None and (not self.outcomes or self.outcomes[-1].made is not now.made))
            self._say(now.doing + " …")
            return
        if self.outcomes and self.outcomes[-1].made is now.made:
            self.outcomes[-1] = now  # the same run, with its prediction
        else:
            self.outcomes = [*self.outcomes, now][-KEPT:]
        self._stale(False)
        self.numbers.value, self.reasons.value = panels.headline(now), panels.why(now)
        self.step_slider.max = max(1, len(now.trace.steps))
        self._show_step()
        self._show_whatif()
        self._show_runs()

    def _stale(self, stale: bool) -> None:
        """Whether numbers and tabs belong to another run than the text: they are greyed then."""
        for part in (self.numbers, self.tabs):
            (part.add_class if stale else part.remove_class)("sl-stale")

    def _told(self, busy: bool, said: str) -> None:
        self.stop_button.disabled = not busy
        if not busy:
            self._refresh()
        if said:
            self._say(said, "error")

    def _say(self, text: str, kind: str = "info") -> None:
        self.status.value = panels.note(text, kind)

    def _show_step(self) -> None:
        if self.outcomes:
            last = self.outcomes[-1]
            at = min(self.step_slider.value, len(last.trace.steps)) - 1
            self.step_view.value = traceview.step(last.trace, at, last.token)

    def _show_whatif(self) -> None:
        known = self.outcomes[-1].whatif if self.outcomes else None
        if known is None:
            why = self.outcomes[-1].unexplained if self.outcomes else ""
            self.predicted.value = panels.note(f"No prediction{': ' + why if why else ' yet'}.")
            return
        rule = self.what_rule.value
        if rule == "lenience" and known.greedy:
            self.predicted.value = panels.note("lenience needs a temperature above 0; its greedy form is threshold.")
            return
        self.predicted.value = panels.what_if(known, self.what_length.value, rule, self.what_threshold.value)

    def _show_runs(self) -> None:
        """The history, and two runs of it side by side: the last two, until the user picks others."""
        self.runs.value, self.saved.value = panels.history(self.outcomes), panels.download(self.outcomes)
        self._filling = True
        try:
            labels = [f"{i}: {panels.describe(each.setting)}" for i, each in enumerate(self.outcomes, 1)]
            for (name, menu), place in zip(self._menus.items(), (-2, -1), strict=True):
                made = menu.value.made if name in self._picked and menu.value else None
                kept = [each for each in self.outcomes if each.made is made]
                menu.options = list(zip(labels, self.outcomes, strict=True))
                menu.value = kept[0] if kept else self.outcomes[max(place, -len(self.outcomes))]
        finally:
            self._filling = False
        self._show_sides()

    def _pick(self, name: str) -> None:
        if not self._filling:
            self._picked.add(name)
            self._show_sides()

    def _show_sides(self) -> None:
        first, second = (menu.value for menu in self._menus.values())
        self.sides.value = "" if first is second else panels.comparison(first, second)
        self.command.value = ""

    def _show_command(self) -> None:
        if not self.outcomes:
            return
        chosen, machine = self._menus["beside"].value.setting, self._worker.session.machine
        try:
            self.command.value = panels.code(repeat(chosen, from_root(SCRATCH), machine))
        except SpecdecError as error:
            self.command.value = panels.note(str(error), "error")

    # ---- layout

    def _laid_out(self) -> widgets.Widget:
        sheet = _html(panels.style() + traceview.style())
        buttons = widgets.HBox([self.run_button, self.stop_button])
        fields = widgets.Box(list(self.controls.values()), layout=widgets.Layout(flex_flow="row wrap"))
        left = widgets.VBox([fields, buttons, self.live], layout=widgets.Layout(flex="1 1 290px", min_width="0"))
        compare = widgets.HBox(list(self._menus.values()), layout=widgets.Layout(flex_flow="row wrap"))
        export = widgets.HBox([self.saved, self.command_button], layout=widgets.Layout(flex_flow="row wrap"))
        sliders = widgets.HBox(
            [self.what_length, self.what_rule, self.what_threshold], layout=widgets.Layout(flex_flow="row wrap")
        )
        self.tabs = widgets.Tab(
            [
                widgets.VBox([self.step_slider, self.step_view]),
                self.reasons,
                widgets.VBox([sliders, self.predicted]),
                widgets.VBox([self.runs, export, self.command, compare, self.sides]),
            ],
            titles=("Step by step", "Why", "What if", "History"),
        )
        legend = _html(traceview.legend())
        right = widgets.VBox(
            [self.status, self.numbers, legend, self.text, self.tabs],
            layout=widgets.Layout(flex="4 1 430px", min_width="0"),
        )
        page = widgets.Box([sheet, left, right], layout=widgets.Layout(flex_flow="row wrap", align_items="flex-start"))
        page.add_class("sl-explorer")
        return page


_LABELS = {
    **{"task": "task", "example": "example", "prompt": "prompt", "main": "main model", "own_main": "its place"},
    **{"draft": "draft", "own_draft": "its place", "draft_length": "draft length", "candidate_count": "candidates"},
    **{"acceptance_rule": "acceptance", "acceptance_threshold": "threshold", "temperature": "temperature"},
    **{"seed": "seed", "max_new_tokens": "max tokens"},
}
_LABEL = {"description_width": "88px"}


def _controls() -> dict[str, Any]:
    """A widget for every field of Setting, and those that fill some of them in."""
    place = "folder, .gguf or hub id"
    made: dict[str, Any] = {
        "task": widgets.Dropdown(options=[*((task, task) for task in TASKS), ("own text", OWN)], value=TASKS[0]),
        "example": widgets.Dropdown(options=[]),
        "prompt": widgets.Textarea(rows=5, continuous_update=False),
        "main": widgets.Dropdown(options=[("SmolLM2-135M (bundled)", BUNDLED), ("own model", OWN)]),
        "own_main": widgets.Text(placeholder=place, continuous_update=False),
        "draft": widgets.Dropdown(options=list(DRAFTS.items()), value="1:4"),
        "own_draft": widgets.Text(placeholder=place, continuous_update=False),
        "draft_length": widgets.IntSlider(4, 1, LONGEST),
        "candidate_count": widgets.IntSlider(1, 1, MAX_CANDIDATES),
        "acceptance_rule": widgets.Dropdown(options=[(rule, rule) for rule in RULES]),
        "acceptance_threshold": widgets.FloatSlider(0.0, min=0, max=1, step=0.01),
        "temperature": widgets.FloatSlider(0.0, min=0, max=2, step=0.1),
        "seed": widgets.BoundedIntText(0, min=0, max=2**31 - 1),
        "max_new_tokens": widgets.IntSlider(64, 8, 256, step=8),
    }
    for name, control in made.items():
        control.description, control.style.description_width = _LABELS[name], _LABEL["description_width"]
        control.layout = _wide()
        if hasattr(control, "continuous_update"):
            control.continuous_update = False
    return made


def _allowed(control: Any) -> str:
    if hasattr(control, "options"):
        return ", ".join(value for _, value in control.options)
    return f"{control.min} … {control.max}" if hasattr(control, "min") else "a text"


def _close(widget: Any) -> None:
    parts = (*getattr(widget, "children", ()), getattr(widget, "style", None), getattr(widget, "layout", None))
    for part in filter(None, parts):
        _close(part)
    widget.close()


def _wide() -> widgets.Layout:
    return widgets.Layout(flex="1 1 260px", width="auto", min_width="0")


def _html(value: str = "") -> widgets.HTML:
    return widgets.HTML(value, layout=widgets.Layout(width="auto", min_width="0"))


def explore(
    device: str | None = None, dtype: str | None = None, threads: int | None = None, **controls: Any
) -> Explorer:
    """Display the explorer and run its first setting.

    device, dtype, threads: as Session takes them; controls: values to begin with, by the names of Setting.
    Raises UnknownNameError for a control that does not exist, SettingError for a value out of range.
    """
    from IPython.display import display

    explorer = Explorer(Session(device, dtype, threads), **controls)
    display(explorer.page)
    explorer.run()
    return explorer
