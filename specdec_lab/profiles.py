"""Profiles: what to draft with, and how far, for each task type, under one name. They live in profiles.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specdec_lab.decoding import MAX_DRAFT
from specdec_lab.errors import DataError, SpecdecError, UnknownNameError, require, whole
from specdec_lab.tasks import get_task

FILE = Path(__file__).with_name("profiles.toml")
OTHER = "other"


@dataclass(frozen=True)
class Drafting:
    """How to draft. draft: a name, and options: settings, that zoo.load_drafter takes; draft_length: tokens a step.

    Raises SettingError.
    """

    draft: str
    draft_length: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = isinstance(self.draft, str) and bool(self.draft.strip())
        require("draft", self.draft, named, "the name of a draft")
        fits = whole(self.draft_length) and 0 <= self.draft_length <= MAX_DRAFT
        require("draft_length", self.draft_length, fits, f"an integer, 0 (plain decoding) … {MAX_DRAFT}")
        require("options", self.options, isinstance(self.options, Mapping), "a table of settings")


@dataclass(frozen=True)
class Profile:
    """A named set of ways to draft. note: what it is and where its numbers were measured; by_task: with "other".

    Raises SettingError, and UnknownNameError for a task that does not exist.
    """

    name: str
    note: str
    by_task: Mapping[str, Drafting]

    def __post_init__(self) -> None:
        noted = isinstance(self.note, str) and bool(self.note.strip())
        require("note", self.note, noted, "where the numbers were measured")
        require(OTHER, None, OTHER in self.by_task, "an entry for tasks without one of their own")
        for task in self.by_task:
            if task != OTHER:
                get_task(task)

    def for_task(self, task: str | None = None) -> Drafting:
        """How to draft for a task type, or for what is none; raises UnknownNameError for one that does not exist."""
        if task is not None:
            get_task(task)
        return self.by_task.get(task or OTHER, self.by_task[OTHER])


def load_profile(name: str, file: Path = FILE) -> Profile:
    """The profile of that name; raises UnknownNameError listing the known ones, DataError for a broken file."""
    try:
        stored = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as TOML ({error})") from error
    if name not in stored:
        raise UnknownNameError("profile", name, stored)
    try:
        return _profile(name, stored[name])
    except (SpecdecError, ValueError) as error:
        raise DataError(f"{file}: profile {name}: {error}") from error


def _profile(name: str, stored: Any) -> Profile:
    entries = dict(_table(name, stored))
    note = entries.pop("note", "")
    by_task = {}
    for task, entry in entries.items():
        known = [each.name for each in fields(Drafting)]
        for key in _table(task, entry):
            require(f"{task}.{key}", entry[key], key in known, f"no such key; there is: {', '.join(known)}")
        for key in ("draft", "draft_length"):
            require(f"{task}.{key}", None, key in entry, "a value")
        by_task[task] = Drafting(**entry)
    return Profile(name, note, by_task)


def _table(field_name: str, value: Any) -> dict[str, Any]:
    require(field_name, value, isinstance(value, dict), "a table")
    return dict(value)
