"""The command line: what it prints, what it returns, what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec_lab import cli
from specdec_lab.metrics import METRICS


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jsonl"
    rows = [
        {"id": "a", "task": "prose", "prompt": "Tell me of the sea."},
        {"id": "b", "task": "json", "prompt": "An object, please.", "schema": {"type": "object"}},
        {"id": "c", "task": "prose", "prompt": "And of the hills."},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_generate_prints_one_json_object_as_the_last_line(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, tiny_draft_folder: str
) -> None:
    words = ["generate", "--main", tiny_folder, "--draft", tiny_draft_folder, "--prompt", "Hi", "--json"]
    code, out, _ = run(capsys, *words, "--max_new_tokens", "9", "--draft-length=3")
    got = json.loads(out.splitlines()[-1])
    assert code == 0
    assert set(got) == {"text", "tokens", "metrics"}
    assert set(got["metrics"]) == set(METRICS)
    plain = json.loads(run(capsys, *words, "--max-new-tokens", "9", "--draft", "none")[1].splitlines()[-1])
    assert got["tokens"] == plain["tokens"]
    assert 1 <= len(got["tokens"]) <= 9


def test_generate_streams_the_same_text(capsys: pytest.CaptureFixture[str], tiny_folder: str) -> None:
    words = ["generate", "--main", tiny_folder, "--draft", "ngram", "--prompt", "Hi", "--max_new_tokens", "12"]
    text = json.loads(run(capsys, *words, "--json")[1].splitlines()[-1])["text"]
    code, out, err = run(capsys, *words)
    assert (code, out) == (0, text + "\n")
    assert "tokens/s" in err


def test_evaluate_reports_every_metric_per_task_and_saves_tokens(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, tiny_draft_folder: str, prompts: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "tokens.jsonl"
    words = ["evaluate", "--main", tiny_folder, "--draft", tiny_draft_folder, "--prompts", str(prompts), "--json"]
    code, out, _ = run(capsys, *words, "--max_new_tokens", "8", "--save-tokens", str(saved), "--seed", "3")
    got = json.loads(out.splitlines()[-1])
    assert code == 0
    assert set(got) == {"settings", "prompts", "metrics", "by_task", "loop_free", "skipped"}
    assert got["prompts"] == 3
    assert got["settings"]["seed"] == 3
    assert set(got["by_task"]) == {"prose", "json"}
    compared = ("speculative_speedup", "quality_delta", "nll_delta", "repetition_delta")
    bounds = {f"{name}_{end}" for name in compared for end in ("low", "high")}
    assert set(got["metrics"]) == {*METRICS, *bounds, "quality", "scored", "quality_prompts", "valid_share"}
    assert got["metrics"]["speculative_speedup"] > 0
    assert {got["metrics"][bound] for bound in bounds} == {None}  # of three prompts
    assert got["metrics"]["quality"] is None  # of two tasks
    assert got["by_task"]["prose"]["scored"] == 2
    assert got["by_task"]["prose"]["quality"] > 0  # mean negative log-likelihood
    assert got["by_task"]["json"]["scored"] == 0  # cut at eight tokens
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["a", "b", "c"]
    assert all(1 <= len(line["tokens"]) <= 8 for line in lines)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--draft_length", "-1"], 2, "draft_length = -1"),
        (["--temperature", "nan"], 2, "temperature = nan"),
        (["--max_new_tokens", "0"], 2, "max_new_tokens = 0"),
        (["--top_p", "1.5"], 2, "top_p = 1.5"),
        (["--threads", "0"], 2, "threads = 0"),
        (["--prompt", ""], 2, "prompt = ''"),
        (["--main", "nope"], 1, "no model 'nope'"),
        (["--draft", "5:7"], 1, "no model '5:7'"),
    ],
)
def test_bad_arguments_say_field_value_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, words: list[str], code: int, says: str
) -> None:
    base = ["generate", "--main", tiny_folder, "--draft", "ngram", "--prompt", "Hi"]
    got, _, err = run(capsys, *base, *words)
    assert (got, says in err) == (code, True), err


KINDS: dict[str, Any] = {"type": "object", "properties": {"kind": {"enum": ["sea", "hill"]}}, "required": ["kind"]}
KINDS |= {"additionalProperties": False}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(KINDS))
    return file


def test_generate_under_a_constraint(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, schema: Path, tmp_path: Path
) -> None:
    lark = tmp_path / "mine.lark"
    lark.write_text('start: "x" ("y" | "z")')
    words = ["generate", "--main", tiny_folder, "--draft", "grammar", "--prompt", "Hi", "--json"]
    wanted = {
        ("--json_schema", str(schema)): {'{"kind": "sea"}', '{"kind": "hill"}'},
        ("--regex", "[ab]{2}c"): {"aac", "abc", "bac", "bbc"},
        ("--grammar", str(lark)): {"xy", "xz"},
    }
    for option, texts in wanted.items():
        code, out, err = run(capsys, *words, *option)
        got = json.loads(out.splitlines()[-1])
        assert (code, got["valid"]) == (0, True), err
        assert got["text"] in texts
        assert got["metrics"]["draft_acceptance_rate"] in (1.0, None)
    _, out, err = run(capsys, *words, "--json_schema", str(schema), "--max_new_tokens", "12")
    assert json.loads(out.splitlines()[-1])["valid"] is False
    assert f"the output ends at max_new_tokens = 12, before {schema} is satisfied" in err


def test_evaluate_gives_an_interval_over_prompts(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, tiny_draft_folder: str
) -> None:
    words = ["evaluate", "--main", tiny_folder, "--draft", tiny_draft_folder, "--prompts", "code", "--limit", "6"]
    got = json.loads(run(capsys, *words, "--max_new_tokens", "6", "--json")[1].splitlines()[-1])["metrics"]
    low, high = got["speculative_speedup_low"], got["speculative_speedup_high"]
    assert 0 < low < got["speculative_speedup"] < high


@pytest.mark.parametrize(
    ("rule", "costs"),
    [(["lossless"], False), (["threshold", "0"], True), (["block", "0"], True), (["block", "1"], False)],
)
def test_evaluate_tells_what_a_lossy_rule_costs(
    capsys: pytest.CaptureFixture[str],
    tiny_folder: str,
    tiny_draft_folder: str,
    tmp_path: Path,
    rule: list[str],
    costs: bool,
) -> None:
    file = tmp_path / "mine.jsonl"
    rows = [{"id": x, "task": "prose", "prompt": f"Tell me of {x}."} for x in "abcdef"]
    rows.append({"id": "j", "task": "json", "prompt": "An object."})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["evaluate", "--main", tiny_folder, "--draft", tiny_draft_folder, "--prompts", str(file), "--json"]
    words += ["--max_new_tokens", "12", "--acceptance_rule", rule[0]]
    words += ["--acceptance_threshold", rule[1]] if rule[1:] else []
    _, out, err = run(capsys, *words)
    got = json.loads(out.splitlines()[-1])
    prose, everything = got["by_task"]["prose"], got["metrics"]
    assert got["settings"]["acceptance_rule"] == rule[0]
    assert prose["quality_prompts"] == 6
    for name in ("quality_delta", "nll_delta"):
        assert (prose[f"{name}_low"] > 0, prose[name] > 0) == (costs, costs), name
        assert (prose[name] == prose[f"{name}_high"] == 0) == (not costs), name
    assert everything["quality_delta"] is None  # of two tasks
    assert (everything["nll_delta"] > 0) == costs
    assert (everything["quality_prompts"], got["by_task"]["json"]["quality_prompts"]) == (0, 0)  # cut at twelve tokens
    if rule[0] == "block":
        assert prose["fallback_ratio"] == float(rule[1])
    told = next(line for line in err.splitlines() if line.startswith("prose"))
    for word in (
        "quality_delta +",
        "nll_delta +",
        "repetition_delta ",
        "fallback_ratio ",
        "quality compared on 6 prompts",
    ):
        assert (word in told) == (rule[0] != "lossless"), told


def test_evaluate_with_each_rows_own_schema(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    schemas = {"a": KINDS, "b": {"type": "array", "uniqueItems": True}, "c": {"enum": [[1, 2], [3]]}}
    rows = [{"id": name, "task": "json", "prompt": "An object.", "schema": schema} for name, schema in schemas.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["evaluate", "--main", tiny_folder, "--draft", "grammar", "--prompts", str(file), "--json"]
    code, out, err = run(capsys, *words, "--json-schema", "auto")
    got = json.loads(out.splitlines()[-1])
    assert (code, got["prompts"]) == (0, 2), err
    assert list(got["skipped"]) == ["b"]
    assert "skipped: prompt b: " in err
    assert "uniqueItems" in err
    assert got["metrics"]["valid_share"] == got["metrics"]["quality"] == 1.0
    assert got["settings"]["json_schema"] == "auto"
    free = json.loads(run(capsys, *words, "--max_new_tokens", "8")[1].splitlines()[-1])
    assert (free["prompts"], free["skipped"], free["metrics"]["valid_share"]) == (3, {}, 0.0)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--json_schema", "auto"], 2, "json_schema = 'auto': allowed is FILE or any; only the rows that `evaluate`"),
        (["--json_schema", "nowhere.json"], 1, "nowhere.json: cannot be read (No such file or directory)"),
        (["--grammar", "nowhere.lark"], 1, "nowhere.lark: cannot be read"),
        (["--regex", "(a"], 2, "regex = '(a': allowed is a regular expression"),
        (["--regex", "a{30}", "--max_new_tokens", "20"], 2, "max_new_tokens = 20: allowed is 30 or more"),
    ],
)
def test_constraints_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, words: list[str], code: int, says: str
) -> None:
    got, out, err = run(capsys, "generate", "--main", tiny_folder, "--draft", "ngram", "--prompt", "Hi", *words)
    assert (got, out, says in err) == (code, "", True), err


def test_constraints_exclude_each_other() -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "--prompt", "Hi", "--regex", "a", "--json_schema", "any"])
    assert stop.value.code == 2


def test_unknown_task_lists_what_there_is(capsys: pytest.CaptureFixture[str], tiny_folder: str) -> None:
    code, _, err = run(capsys, "evaluate", "--main", tiny_folder, "--draft", "ngram", "--prompts", "poems")
    assert code != 0
    assert "poems" in err
    assert "prose" in err


def test_a_broken_prompts_file_names_file_and_line(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, prompts: Path
) -> None:
    prompts.write_text(prompts.read_text() + "{broken\n")
    code, _, err = run(capsys, "evaluate", "--main", tiny_folder, "--prompts", str(prompts))
    assert code == 1
    assert f"{prompts}, line 4" in err


def test_unknown_option_is_bad_usage() -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "--prompt", "Hi", "--draught", "1:4"])
    assert stop.value.code == 2


def test_ctrl_c_is_130_and_keeps_saved_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_folder: str, prompts: Path, tmp_path: Path
) -> None:
    from specdec_lab import experiment

    real = experiment.alternate

    def interrupted(*args: Any, **settings: Any) -> Any:
        yield next(real(*args, **settings))
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "alternate", interrupted)
    saved = tmp_path / "tokens.jsonl"
    words = ["evaluate", "--main", tiny_folder, "--draft", "ngram", "--prompts", str(prompts), "--max_new_tokens", "4"]
    code, _, err = run(capsys, *words, "--save_tokens", str(saved))
    assert code == 130
    assert f"interrupted; the numbers are of the 1 prompts that were finished, whose tokens are in {saved}" in err
    assert [json.loads(line)["id"] for line in saved.read_text().splitlines()] == ["a"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench"], "interrupted; nothing is kept"),
        (["match"], "interrupted; nothing is kept"),
        (["grid"], "interrupted; the parts that were finished are kept"),
        (["sweep"], "interrupted; the parts that were finished are kept"),
        (["distill", "--ratio", "1:4"], "interrupted; hidden states and checkpoints so far are kept"),
        (["models"], "interrupted"),
    ],
)
def test_ctrl_c_says_what_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    def stop(args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, f"_{words[0]}", stop)
    code, _, err = run(capsys, *words)
    assert (code, err.startswith(says), "kept" in err) == (130, True, "kept" in says), err


def test_tokens_of_an_earlier_run_stay_until_there_are_new_ones(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, prompts: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "tokens.jsonl"
    saved.write_text("earlier\n")
    words = ["evaluate", "--main", tiny_folder, "--prompts", str(prompts), "--max_new_tokens", "4", "--save_tokens"]
    assert run(capsys, *words, str(saved), "--draft", "5:7")[0] == 1
    assert run(capsys, *words, str(saved), "--draft", "ngram", "--top_p", "2")[0] == 2
    assert saved.read_text() == "earlier\n"
    assert run(capsys, *words, str(saved), "--draft", "ngram")[0] == 0
    assert len([json.loads(line) for line in saved.read_text().splitlines()]) == 3
    code, _, err = run(capsys, *words, str(saved / "under_a_file"), "--draft", "5:7")
    assert (code, "cannot be written" in err) == (1, True), err


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^\\p{L}+$", "maxLength": 3},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"enum": [1]}]}}},
    ],
)
def test_a_schema_that_jsonschema_cannot_use_leaves_the_other_numbers(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, tmp_path: Path, schema: dict[str, Any]
) -> None:
    file, prompts = tmp_path / "schema.json", tmp_path / "mine.jsonl"
    file.write_text(json.dumps(schema))
    row = {"id": "a", "task": "json", "prompt": "Go.", "schema": schema}
    prompts.write_text(json.dumps(row) + "\n")
    words = ["evaluate", "--main", tiny_folder, "--draft", "ngram", "--prompts", str(prompts), "--json"]
    code, out, err = run(capsys, *words, "--json_schema", str(file), "--max_new_tokens", "40")
    assert (code, "not scored: prompt 'a': its schema cannot be used" in err) == (0, True), err
    got = json.loads(out.splitlines()[-1])
    assert (got["prompts"], got["metrics"]["valid_share"], got["metrics"]["quality"]) == (1, None, None)


def test_distill_names_the_tokens_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "distill", "--ratio", "1:4", "--tokens", "10")
    assert (code, "tokens = 10: allowed is an integer >= 2048" in err) == (2, True), err


def test_tasks_and_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "tasks", "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["json"]["prompts"] == 305
    code, out, _ = run(capsys, "models")
    assert code == 0
    assert all(name in out for name in ("bundled", "1:2", "1:3", "1:4", "ngram", "none"))


def test_python_m_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "specdec_lab", "models"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "bundled" in done.stdout
