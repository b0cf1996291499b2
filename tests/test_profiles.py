"""Profiles: what they say for a task, what is refused, and that the command line drafts by them."""

import json
from pathlib import Path

import pytest
from test_cli import run

from specdec_lab import profiles
from specdec_lab.errors import DataError, SettingError, UnknownNameError
from specdec_lab.profiles import Drafting, load_profile
from specdec_lab.tasks import tasks

GOOD = """
[mine]
note = "measured nowhere"
json = { draft = "ngram", draft_length = 5, options = { longest = 3 } }
other = { draft = "none", draft_length = 0 }

[second]
note = "nor this"
other = { draft = "ngram", draft_length = 2 }
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "profiles.toml"
    path.write_text(GOOD)
    monkeypatch.setattr(load_profile, "__defaults__", (path,))
    return path


def test_fastest_has_an_entry_for_each_task_type_and_the_rest() -> None:
    fastest = load_profile("fastest")
    assert set(fastest.by_task) == {"json", "code", "prose", "other"}
    assert "Lossless" in fastest.note
    for task in tasks():
        chosen = fastest.for_task(task)
        assert chosen == fastest.by_task.get(task, fastest.by_task["other"])
        assert chosen.draft != "none"
        assert chosen.draft_length > 0
    assert fastest.for_task() == fastest.by_task["other"]


def test_every_profile_that_ships_loads() -> None:
    import tomllib

    for name in tomllib.loads(profiles.FILE.read_text(encoding="utf-8")):
        assert load_profile(name).name == name


def test_what_a_file_says(file: Path) -> None:
    mine = load_profile("mine")
    assert mine.for_task("json") == Drafting("ngram", 5, {"longest": 3})
    assert mine.for_task("prose") == Drafting("none", 0)
    with pytest.raises(UnknownNameError, match="no profile 'yours'; there is: mine, second"):
        load_profile("yours")
    with pytest.raises(UnknownNameError, match=r"no task 'jsn'; there is: .*json"):
        mine.for_task("jsn")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[mine]", "[mine", "cannot be read as TOML"),
        ("draft_length = 5", "draft_length = 65", r"profile mine: draft_length = 65: allowed is .* 64"),
        ("draft_length = 5", "draft_length = true", "draft_length = True"),
        ('draft = "ngram"', "draft = 3", "draft = 3"),
        ('draft = "ngram"', 'drafter = "ngram"', r"json.drafter = 'ngram': .*there is: draft, draft_length, options"),
        (", draft_length = 5", "", "json.draft_length = None: allowed is a value"),
        ("options = { longest = 3 }", "options = 3", "options = 3"),
        ("json = ", "poems = ", "no task 'poems'; there is: .*json"),
        ('note = "measured nowhere"', "", "note = ''"),
        ('other = { draft = "none", draft_length = 0 }', "", "other = None"),
        ('json = { draft = "ngram", draft_length = 5, options = { longest = 3 } }', "json = 3", "json = 3: .* a table"),
    ],
)
def test_a_broken_profile_names_file_profile_and_field(before: str, after: str, message: str, file: Path) -> None:
    assert GOOD.count(before) >= 1
    file.write_text(GOOD.replace(before, after, 1))
    with pytest.raises(DataError, match=message) as caught:
        load_profile("mine")
    assert str(file) in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.toml: cannot be read"):
        load_profile("mine", tmp_path / "nothing.toml")


def test_the_file_is_part_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((profiles.FILE.parents[1] / "pyproject.toml").read_text())
    assert profiles.FILE.name in project["tool"]["setuptools"]["package-data"]["specdec_lab"]


def test_evaluate_drafts_by_the_profile_of_each_row(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, file: Path, tmp_path: Path
) -> None:
    prompts, saved = tmp_path / "mine.jsonl", tmp_path / "tokens.jsonl"
    rows = [("a", "prose"), ("b", "json"), ("c", "prose"), ("d", "json")]
    prompts.write_text("".join(json.dumps({"id": i, "task": t, "prompt": "aaaa" + i}) + "\n" for i, t in rows))
    words = ["evaluate", "--main", tiny_folder, "--prompts", str(prompts), "--max_new_tokens", "12", "--json"]
    code, out, err = run(capsys, *words, "--profile", "mine", "--save_tokens", str(saved))
    assert code == 0, err
    got = json.loads(out.splitlines()[-1])
    assert got["settings"]["profile"] == "mine"
    assert got["settings"]["drafting"] == {
        "prose": {"draft": "none", "draft_length": 0, "options": {}},
        "json": {"draft": "ngram", "draft_length": 5, "options": {"longest": 3}},
    }
    assert (got["by_task"]["prose"]["coverage"] or 0) == 0
    assert got["by_task"]["json"]["coverage"] > 0
    assert [json.loads(line)["id"] for line in saved.read_text().splitlines()] == ["a", "b", "c", "d"]
    plain = tmp_path / "plain.jsonl"
    run(capsys, *words, "--draft", "none", "--save_tokens", str(plain))
    assert saved.read_text() == plain.read_text()


def test_generate_drafts_by_the_profile_of_its_task(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, file: Path
) -> None:
    words = ["generate", "--main", tiny_folder, "--prompt", "abababab", "--max_new_tokens", "12", "--json"]
    found = {}
    for task in ((), ("--task", "json"), ("--task", "code")):
        code, out, err = run(capsys, *words, "--profile", "mine", *task)
        assert code == 0, err
        found[task] = json.loads(out.splitlines()[-1])
    assert len({tuple(got["tokens"]) for got in found.values()}) == 1
    drafts = [(got["metrics"]["coverage"] or 0) > 0 for got in found.values()]
    assert drafts == [False, True, False]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--profile", "mine", "--draft", "ngram"], "profile = 'mine': allowed is none beside --draft"),
        (["--profile", "mine", "--draft-length", "4"], "profile = 'mine': allowed is none beside --draft"),
        (["--profile", "yours"], "no profile 'yours'; there is: mine, second"),
        (["--profile", "mine", "--task", "jsn"], "no task 'jsn'"),
        (["--task", "json"], "task = 'json': allowed is none without --profile"),
    ],
)
def test_what_the_command_line_refuses(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tiny_folder: str, file: Path
) -> None:
    code, _, err = run(capsys, "generate", "--main", tiny_folder, "--prompt", "Hi", *words)
    assert (code, says in err) == (2, True), err


def test_settings_are_checked_where_they_are_made() -> None:
    with pytest.raises(SettingError, match="draft = ' '"):
        Drafting(" ", 4)
