"""Prompts: one JSON object a line, from data/prompts or from a file of the user's own."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specdec_lab.errors import DataError, SettingError, UnknownNameError, require
from specdec_lab.tasks.registry import tasks

FOLDER = Path(__file__).resolve().parents[2] / "data" / "prompts"
TEXTS = ("id", "task", "kind", "category", "source", "license")
OPTIONAL_TEXTS = ("tests", "entry_point", "raw_prompt")


@dataclass(frozen=True)
class Prompt:
    """One prompt and what its reply is scored with.

    task: a task type (json, code, prose) or a Spec-Bench task; decides the score.
    reference: a right answer; schema: JSON Schema of the reply; tests: Python source that raises on a wrong
    answer; entry_point and raw_prompt: the function's name and its head with docstring (HumanEval form).
    turns: all user turns of a conversation, the first equals `prompt`.
    Raises SettingError for a field of the wrong type, an empty id or an empty prompt.
    """

    id: str
    task: str
    prompt: str
    kind: str = ""
    category: str = ""
    reference: Any = None
    schema: dict[str, Any] | None = None
    tests: str | None = None
    entry_point: str | None = None
    raw_prompt: str | None = None
    turns: tuple[str, ...] = ()
    source: str = ""
    license: str = ""

    def __post_init__(self) -> None:
        _require_text("prompt", self.prompt)
        require("prompt", self.prompt, bool(self.prompt.strip()), "a text that is not empty")
        for name in TEXTS:
            _require_text(name, getattr(self, name))
        for name in OPTIONAL_TEXTS:
            if getattr(self, name) is not None:
                _require_text(name, getattr(self, name))
        require("id", self.id, bool(self.id.strip()), "a text that is not empty")
        require("schema", self.schema, self.schema is None or isinstance(self.schema, dict), "a JSON object")
        require("turns", self.turns, isinstance(self.turns, tuple), "a list of texts")
        for turn in self.turns:
            _require_text("turns", turn)


def _require_text(name: str, value: Any) -> None:
    require(name, value, isinstance(value, str), "a text")
    require(name, value, not any("\ud800" <= c <= "\udfff" for c in value), "text without lone surrogates")


def load_prompts(task_or_path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Prompts of a task type (see `tasks()`), of a training set, or of a .jsonl file.

    limit: at most so many, spread evenly over the file (its rows are grouped by source), always the same.
    In a file of one's own only `prompt` is required; `id` is "<file stem>-<line>" and `task` "prose" then.
    Raises UnknownNameError for a name that is neither, DataError (file and line) for a broken file,
    SettingError for a limit below 1.
    """
    require("limit", limit, limit is None or (isinstance(limit, int) and limit >= 1), "1 or more, or None")
    known = tasks()
    spec = known.get(str(task_or_path))
    if spec is not None and spec.file:
        if not FOLDER.is_dir():
            raise DataError(
                f"no shipped prompts in {FOLDER}: install from a clone with `pip install -e .`, "
                "or give the path of a .jsonl file"
            )
        rows = read_prompts(FOLDER / spec.file)
        if spec.select is not None:
            name, value = spec.select
            rows = [row for row in rows if getattr(row, name) == value]
    else:
        path = Path(task_or_path)
        if path.suffix != ".jsonl" and not path.is_file():
            shipped = [name for name, task in known.items() if task.file]
            raise UnknownNameError("prompts file or task", str(task_or_path), shipped)
        rows = read_prompts(path)
    return spread(rows, limit)


def spread(rows: list[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` rows, evenly spaced, in order."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[(2 * i + 1) * len(rows) // (2 * limit)] for i in range(limit)]


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a .jsonl file; raises DataError naming the file and, where there is one, the line."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    rows: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _parse(line, default_id=f"{path.stem}-{number}")
        except SettingError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        if row.id in seen:
            raise DataError(f"{path}, line {number}: id {row.id!r} is that of line {seen[row.id]} too")
        seen[row.id] = number
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: no prompts in it")
    return rows


def _parse(line: bytes, default_id: str) -> Prompt:
    try:
        data = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise SettingError("line", line[:60].decode(errors="replace"), f"one JSON object ({error})") from error
    require("line", line[:60].decode(errors="replace"), isinstance(data, dict), "one JSON object")
    names = [f.name for f in fields(Prompt)]
    for name in data:
        require("field", name, name in names, ", ".join(names))
    require("prompt", None, "prompt" in data, "a text; the line has none")
    if isinstance(data.get("turns"), list):
        data["turns"] = tuple(data["turns"])
    row = Prompt(**{"id": default_id, "task": "prose", **data})
    require("task", row.task, row.task in tasks(), ", ".join(tasks()))
    return row
