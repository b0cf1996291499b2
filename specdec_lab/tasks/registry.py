"""The task types: their name, what their quality score is, and where their prompts are. Knows no decoding.

A further task type is one `register(TaskSpec(...))`; its prompts may stay in a file of the user's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_lab.errors import DataError, UnknownNameError, require

if TYPE_CHECKING:
    from specdec_lab.tasks.prompts import Prompt

BETTER = ("higher", "lower", "neither")


@dataclass(frozen=True)
class Score:
    """The quality of one reply. `value` is None where it cannot be scored; `detail` says why or how."""

    value: float | None
    detail: dict[str, Any] = field(default_factory=dict)


Scorer = Callable[["Prompt", str, float | None, Sequence[int] | None], Score]


@dataclass(frozen=True)
class TaskSpec:
    """One task type.

    quality: name of the score's value; better: "higher", "lower" or "neither".
    file: file name in data/prompts, or "" where the prompts always come from the user.
    select: (field, value) a row must have, for a task that is a part of its file.
    Raises SettingError for an empty name or an unknown `better`.
    """

    name: str
    description: str
    quality: str
    better: str
    scorer: Scorer
    file: str = ""
    select: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        require("name", self.name, bool(self.name.strip()), "a non-empty text")
        require("better", self.better, self.better in BETTER, " or ".join(BETTER))


_TASKS: dict[str, TaskSpec] = {}


def register(spec: TaskSpec) -> TaskSpec:
    """Add a task type; raises DataError when the name is taken."""
    if spec.name in _TASKS:
        raise DataError(f"task {spec.name!r} is registered already ({_TASKS[spec.name].description})")
    _TASKS[spec.name] = spec
    return spec


def tasks() -> dict[str, TaskSpec]:
    """All task types by name, a copy."""
    return dict(_TASKS)


def get_task(name: str) -> TaskSpec:
    """The task type of that name; raises UnknownNameError, which lists what exists."""
    if name not in _TASKS:
        raise UnknownNameError("task", name, _TASKS)
    return _TASKS[name]
