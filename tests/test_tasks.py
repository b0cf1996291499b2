"""Prompts load or say which line is broken; scores accept every shipped reference and refuse wrong ones."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec_lab import tasks as package
from specdec_lab.errors import DataError, SettingError, UnknownNameError
from specdec_lab.tasks import Prompt, TaskSpec, load_prompts, prompts, register, score, tasks
from specdec_lab.tasks.prompts import FOLDER
from specdec_lab.tasks.scores import extract_code

ROWS = {
    **{"json": 305, "code": 303, "prose": 185, "spec_bench": 240},
    **{"train_json": 5069, "train_code": 2971, "train_prose": 2809, "train_writing": 3000},
    **{"multi_turn": 80, "qa": 80, "math_reasoning": 80},
    **dict.fromkeys(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"), 10),
    **{"humanities": 10},
}
WriteLines = Callable[..., Path]


@pytest.fixture
def lines(tmp_path: Path) -> WriteLines:
    def write(*rows: str | bytes | dict[str, Any]) -> Path:
        path = tmp_path / "mine.jsonl"
        raw = [json.dumps(row) if isinstance(row, dict) else row for row in rows]
        path.write_bytes(b"\n".join(row if isinstance(row, bytes) else row.encode() for row in raw))
        return path

    return write


# ---- prompts


def test_every_shipped_task_loads_in_full() -> None:
    assert {name: len(load_prompts(name)) for name, spec in tasks().items() if spec.file} == ROWS


def test_every_shipped_source_is_credited() -> None:
    """What a row names as its source stands in SOURCES.md, and every row names a licence."""
    credits = (FOLDER / "SOURCES.md").read_text()
    for name in ("json", "code", "prose", "spec_bench", "train_json", "train_code", "train_prose", "train_writing"):
        for row in load_prompts(name):
            assert row.license, row.id
            assert row.source.split(":")[0].split(" ")[0] in credits, row.source
    for text in (FOLDER / "texts").glob("*.txt"):
        assert text.name in (FOLDER / "texts" / "SOURCES.md").read_text()


def test_training_and_evaluation_share_no_prompt() -> None:
    for name in ("json", "code", "prose"):
        assert not {p.prompt for p in load_prompts(name)} & {p.prompt for p in load_prompts(f"train_{name}")}
    written = {p.prompt.lower() for p in load_prompts("train_writing")}
    assert not written & {p.prompt.lower() for task in ("prose", "spec_bench") for p in load_prompts(task)}


def test_a_limit_is_spread_over_the_sources_and_always_the_same() -> None:
    rows = load_prompts("json", limit=12)
    assert [r.id for r in rows] == [r.id for r in load_prompts("json", limit=12)]
    assert len({r.id for r in rows}) == 12
    assert {r.kind for r in rows} == {"function_call", "extraction", "schema", "sql"}
    assert Counter(r.kind for r in load_prompts("code", limit=12)) == {"mbpp": 7, "humaneval": 5}
    assert len(load_prompts("code", limit=1)) == 1
    assert load_prompts("prose", limit=10**6) == load_prompts("prose")


@pytest.mark.parametrize("limit", [0, -1, 1.5])
def test_a_limit_below_one_is_refused(limit: Any) -> None:
    with pytest.raises(SettingError, match="limit = .*allowed is 1 or more"):
        load_prompts("json", limit=limit)


def test_an_unknown_task_lists_what_exists() -> None:
    with pytest.raises(UnknownNameError, match=r"no prompts file or task 'poetry'.*code.*json.*prose.*qa"):
        load_prompts("poetry")


def test_a_file_of_ones_own_needs_prompts_only(lines: WriteLines) -> None:
    rows = load_prompts(str(lines({"prompt": "Say hi"}, "", {"prompt": "1", "task": "json", "id": "a"})))
    assert [(r.id, r.task, r.prompt) for r in rows] == [("mine-1", "prose", "Say hi"), ("a", "json", "1")]


def test_a_byte_order_mark_and_windows_lines_are_read(lines: WriteLines) -> None:
    assert load_prompts(lines(b'\xef\xbb\xbf{"prompt": "\xc3\xa9"}\r', b'{"prompt": "b"}\r'))[0].prompt == "é"


BROKEN = {
    "cut": ('{"prompt": "a', "one JSON object"),
    "no object": ("[1]", "one JSON object"),
    "deep": ("[" * 100_000, "one JSON object"),
    "no UTF-8": (b'{"prompt": "\xff"}', "one JSON object"),
    "no prompt": ({"id": "x"}, "the line has none"),
    "empty prompt": ({"prompt": " \n"}, "prompt = .*not empty"),
    "number": ({"prompt": 3}, "prompt = 3: allowed is a text"),
    "surrogate": ('{"prompt": "\\ud800"}', "surrogates"),
    "empty id": ({"prompt": "a", "id": ""}, "id = ''"),
    "number as id": ({"prompt": "a", "id": 7}, "id = 7"),
    "unknown field": ({"prompt": "a", "test": "assert 1"}, "field = 'test': allowed is .*tests"),
    "unknown task": ({"prompt": "a", "task": "poetry"}, "task = 'poetry': allowed is json, code, prose"),
    "schema": ({"prompt": "a", "schema": "object"}, "schema = 'object': allowed is a JSON object"),
    "turns": ({"prompt": "a", "turns": ["a", 2]}, "turns = 2"),
    "same id": ({"prompt": "a", "id": "first"}, "id 'first' is that of line 1 too"),
}


@pytest.mark.parametrize(("line", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_line_is_named(lines: WriteLines, line: Any, reason: str) -> None:
    path = lines({"prompt": "good", "id": "first"}, "", line)
    with pytest.raises(DataError, match=f"mine.jsonl, line 3: .*{reason}"):
        load_prompts(path)


def test_an_empty_a_missing_and_an_unreadable_file_are_refused(lines: WriteLines, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prompts in it"):
        load_prompts(lines("", " "))
    with pytest.raises(DataError, match="none.jsonl: cannot be read"):
        load_prompts(tmp_path / "none.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="folder.jsonl: cannot be read"):
        load_prompts(tmp_path / "folder.jsonl")


def test_without_the_data_folder_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prompts, "FOLDER", tmp_path / "gone")
    with pytest.raises(DataError, match=r"pip install -e \..*\.jsonl"):
        load_prompts("json")


# ---- registry


def test_registered_tasks_are_unique_and_say_which_way_is_better() -> None:
    with pytest.raises(DataError, match="'json' is registered already"):
        register(tasks()["json"])
    with pytest.raises(SettingError, match="better = 'up': allowed is higher or lower or neither"):
        replace(tasks()["json"], better="up")
    assert {(s.quality, s.better) for s in tasks().values()} == {
        ("json_valid", "higher"),
        ("tests_passed", "higher"),
        ("mean_nll", "lower"),
    }


def test_a_task_of_ones_own_is_scored_by_its_scorer(lines: WriteLines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package.registry, "_TASKS", tasks())
    register(TaskSpec("short", "short replies", "characters", "lower", lambda p, t, n, k: package.Score(len(t))))
    (row,) = load_prompts(lines({"prompt": "a", "task": "short"}))
    assert score(row, "four").value == 4
    with pytest.raises(UnknownNameError, match="poetry"):
        score(replace(row, task="poetry"), "x")


def test_importing_tasks_loads_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'jsonschema'}"
    script = f"import sys, specdec_lab.tasks; print(sorted({heavy} & set(sys.modules)))"
    root = Path(prompts.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- json


def test_every_json_reference_scores_one_and_a_wrong_one_zero() -> None:
    for row in load_prompts("json"):
        assert score(row, json.dumps(row.reference)).value == 1.0, row.id
    for row in load_prompts("json", limit=24):
        assert score(row, json.dumps([row.reference])).value == 0.0, row.id


ROW = Prompt("a", "json", "x", schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


@pytest.mark.parametrize(
    ("text", "value", "parses", "validates", "fenced"),
    [
        ('{"n": 1}', 1.0, True, True, False),
        (' \n{"n": 1}\n', 1.0, True, True, False),
        ('```json\n{"n": 1}\n```', 1.0, True, True, True),
        ('```\n{"n":\n1}\n```\n', 1.0, True, True, True),
        ('{"n": "1"}', 0.0, True, False, False),
        ("{}", 0.0, True, False, False),
        ('Sure: {"n": 1}', 0.0, False, None, False),
        ('Sure:\n```json\n{"n": 1}\n```', 0.0, False, None, False),
        ('```json\n{"n": 1}', 0.0, False, None, False),
        ('{"n": 1} {"n": 1}', 0.0, False, None, False),
        ('{"n": NaN}', 0.0, False, None, False),
        ("[" * 100_000, 0.0, False, None, False),
        ("9" * 10_000, 0.0, False, None, False),
        ("", 0.0, False, None, False),
    ],
)
def test_json_is_scored_as_the_reply_stands(
    text: str, value: float, parses: bool, validates: bool | None, fenced: bool
) -> None:
    result = score(ROW, text)
    assert (result.value, result.detail["parses"]) == (value, parses)
    assert (result.detail["validates"], result.detail["fenced"]) == (validates, fenced)
    assert bool(result.detail["error"]) == (value == 0.0)


def test_json_without_a_schema_only_has_to_parse() -> None:
    assert score(replace(ROW, schema=None), "[1]").detail["validates"] is None
    assert score(replace(ROW, schema=None), "[1]").value == 1.0


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "thing"},
        {"properties": {"n": {"pattern": "("}}},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:9/schema"},
    ],
)
def test_a_broken_schema_is_an_error_not_a_low_score(schema: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="prompt 'a': its schema cannot be used"):
        score(replace(ROW, schema=schema), '{"n": "1"}')


# ---- code


def scored(rows: list[Prompt], reply: Callable[[Prompt], str]) -> dict[str, Any]:
    results = {row.id: score(row, reply(row)) for row in rows}
    return {name: result.detail for name, result in results.items() if result.value != 1.0}


def test_sampled_code_references_pass_as_body_function_and_fenced() -> None:
    rows = load_prompts("code", limit=12)
    assert scored(rows, lambda p: p.reference) == {}
    assert scored(rows, lambda p: f"Here:\n```python\n{p.raw_prompt or ''}{p.reference}\n```\nIt works.") == {}
    assert len(scored(rows, lambda p: "pass")) == len(rows)


@pytest.mark.slow
def test_all_code_references_pass() -> None:
    rows = load_prompts("code")
    assert len(rows) == 303
    assert scored(rows, lambda p: p.reference) == {}


HEAD = 'def twice(x):\n    """Double x."""\n'
BODY = Prompt("b", "code", "x", tests="assert twice(2) == 4", entry_point="twice", raw_prompt=HEAD)


@pytest.mark.parametrize(
    "text",
    [
        "    y = x\n    return 2 * y",
        "y = x\n    return 2 * y",
        "y = x\nreturn 2 * y",
        "if x:\n    return 2 * x\nreturn 0",
        "if x:\n        return 2 * x\n    return 0",
        "def twice(x):\n    return 2 * x",
        "import math\ndef twice(x):\n    return math.floor(2 * x)",
        "```python\ndef twice(x):\n    return 2 * x\n```",
        "So:\n```sh\npip list\n```\nand\n```python\ndef twice(x):\n    return 2 * x\n```\n```\ntwice(0)\n```",
        "```python\ndef twice(x):\n    return 2 * x\n",
    ],
)
def test_bodies_and_functions_are_understood(text: str) -> None:
    assert score(BODY, text).detail == {"passed": True, "error": "", "timeout": False}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("    return x", "AssertionError"),
        ("", "AssertionError"),
        ("Certainly! Double it.", "SyntaxError"),
        ("def other(x):\n    return 2 * x", "AssertionError"),
        ("    raise SystemExit", "SystemExit"),
        ("    return open('/etc/passwd')", "refuses open"),
    ],
)
def test_wrong_code_scores_zero_and_says_why(text: str, error: str) -> None:
    result = score(BODY, text)
    assert result.value == 0.0
    assert error in result.detail["error"]


def test_code_that_does_not_end_is_reported_as_timeout() -> None:
    detail = score(BODY, "    while True: pass").detail
    assert (detail["passed"], detail["timeout"]) == (False, True)


def test_code_without_tests_has_no_score() -> None:
    assert score(replace(BODY, tests=None), "pass").value is None


def test_code_in_the_middle_of_a_line_is_no_fence() -> None:
    assert extract_code("x = '```'\n") == "x = '```'\n"
    assert extract_code("```\n```") == ""


# ---- prose


def test_prose_is_scored_by_the_main_models_likelihood_with_repetition_beside() -> None:
    row = Prompt("p", "prose", "x")
    assert score(row, "text", nll=2.5, tokens=[1, 2, 3, 4] * 8).value == 2.5
    loop, plain = (score(row, "t", nll=1.0, tokens=t).detail["repetition"] for t in ([7] * 50, list(range(50))))
    assert plain == 0.0 < 0.5 < loop
    assert score(row, "text") == package.Score(None, {"repetition": None})
