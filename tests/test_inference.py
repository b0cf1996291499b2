"""The articles' command line: how its flags are read, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec_lab import cli, inference
from specdec_lab.decoding import Decoder
from specdec_lab.experiment import Arm
from specdec_lab.models import zoo

ARTICLE = ["--enable_speculative_decoding", "--draft_length", "16", "--candidate_count", "4"]
ARTICLE += ["--acceptance_threshold", "0.7"]


def read(*words: str) -> dict[str, Any]:
    args = inference._parser().parse_args([cli._underscored(word) for word in [*words, "--prompt", "Hi"]])
    return inference._read(args)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = inference.main(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_articles_command_decodes_by_their_rule(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, tiny_draft_folder: str
) -> None:
    models = ["--model_path", tiny_folder, "--draft_model_path", tiny_draft_folder]
    words = [*models, *ARTICLE, "--prompt", "Hi", "--max_new_tokens", "24", "--seed", "3", "--json"]
    code, out, err = run(capsys, *words)
    main = zoo.load_main(tiny_folder, device="cpu")
    arm = Arm(tiny_draft_folder, 16, 4, "chains", "block", 0.7)
    own = arm.decoder(main, zoo.load_drafter(arm.draft, main, **arm.options))
    expected = own.generate("Hi", max_new_tokens=24, seed=3).tokens
    assert (code, json.loads(out.splitlines()[-1])["tokens"]) == (0, expected), err
    assert "read as draft " in err
    assert "candidate_count 4, branching chains, acceptance_rule block (keep a whole draft if its score" in err
    assert "acceptance_threshold 0.7, max_retries 2, draft_temperature 0.7" in err


def test_without_the_switch_decoding_is_plain(capsys: pytest.CaptureFixture[str], tiny_folder: str) -> None:
    words = ["--model-path", tiny_folder, "--prompt", "Hi", "--max-new-tokens", "12"]
    code, out, err = run(capsys, *words)
    main = zoo.load_main(tiny_folder, device="cpu")
    plain = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos).generate("Hi", max_new_tokens=12)
    assert (code, out) == (0, plain.text + "\n")
    assert "read as plain decoding" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("1:4", 4, 1, None, "lossless", None, None)),
        (["--candidate-count=4"], ("1:4", 4, 4, "chains", "lossless", None, None)),
        (["--initial_candidates", "4"], ("1:4", 4, 4, "chains", "lossless", None, None)),
        (["--adaptive_threshold", "0.7"], ("1:4", 4, 1, "chains", "lossless", None, None)),
        (["--acceptance_threshold", "0.6"], ("1:4", 4, 1, None, "block", 0.6, None)),
        (["--max_retries", "3"], ("1:4", 4, 1, None, "block", None, 3)),
        (["--draft_temperature", "1"], ("1:4", 4, 1, None, "block", None, None)),
        (["--acceptance_threshold=0.6", "--acceptance_rule", "typical"], ("1:4", 4, 1, None, "typical", 0.6, None)),
        (["--candidate_count", "2", "--branching", "dynamic"], ("1:4", 4, 2, "dynamic", "lossless", None, None)),
    ],
)
def test_how_flags_are_read(words: list[str], expected: tuple[Any, ...]) -> None:
    names = ("draft", "draft_length", "candidate_count", "branching", "acceptance_rule")
    got = read("--enable-speculative-decoding", *words)
    assert tuple(got[name] for name in (*names, "acceptance_threshold", "max_retries")) == expected


def config(tmp_path: Path, **settings: Any) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    return str(file)


def test_a_config_file_and_flags_that_win_over_it(tmp_path: Path) -> None:
    article = {"enable_speculative": True, "draft_model_path": "1:3", "initial_candidates": 3, "max_retries": 2}
    file = config(tmp_path, **article, adaptive_threshold=0.7)
    got = read("--config", file, "--draft_length", "16")
    assert (got["draft"], got["draft_length"], got["candidate_count"], got["branching"]) == ("1:3", 16, 3, "chains")
    assert (got["acceptance_rule"], got["max_retries"], got["adaptive_threshold"]) == ("block", 2, 0.7)
    words = ["--candidate_count", "5", "--max_retries", "0", "--draft_model_path", "1:2"]
    got = read("--config", file, *words)
    assert (got["draft"], got["candidate_count"], got["max_retries"]) == ("1:2", 5, 0)
    off = config(tmp_path, **article | {"enable_speculative": False})
    assert read("--config", off)["draft_length"] == 0
    assert read("--config", off, "--enable_speculative_decoding")["draft"] == "1:3"


def test_a_config_file_decodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_folder: str, tiny_draft_folder: str
) -> None:
    file = config(tmp_path, draft_model_path=tiny_draft_folder, initial_candidates=2, adaptive_threshold=0.5)
    words = ["--model_path", tiny_folder, "--prompt", "Hi", "--max_new_tokens", "12", "--json"]
    code, out, err = run(capsys, *words, "--config", file)
    assert code == 0, err
    assert "adaptive_threshold 0.5" in err
    plain = run(capsys, *words)[1]  # lossless and greedy: the same tokens
    assert json.loads(out.splitlines()[-1])["tokens"] == json.loads(plain.splitlines()[-1])["tokens"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--draft_length", "4"], 2, "draft_length = 4: allowed is none without --enable_speculative_decoding"),
        (["--draft_model_path", "1:3"], 2, "draft_model_path = '1:3': allowed is none without"),
        (["--acceptance_threshold", "0.7"], 2, "acceptance_threshold = 0.7: allowed is none without"),
        ([*ARTICLE, "--initial_candidates", "4"], 2, "initial_candidates = 4: allowed is none beside"),
        ([*ARTICLE, "--acceptance_threshold", "1.5"], 2, "acceptance_threshold = 1.5: allowed is 0 … 1"),
        ([*ARTICLE, "--candidate_count", "0"], 2, "candidate_count = 0"),
        ([*ARTICLE, "--max_retries", "-1"], 2, "max_retries = -1"),
        ([*ARTICLE, "--acceptance_rule", "lossless"], 2, "threshold = 0.7: allowed is none with the rule lossless"),
        ([*ARTICLE, "--acceptance_rule", "strict"], 2, "no acceptance rule 'strict'; there is: block, "),
        (
            ["--enable_speculative_decoding", "--branching", "chains"],
            2,
            "branching = 'chains': allowed is none without",
        ),
        ([*ARTICLE, "--acceptance_rule", "lenience"], 2, "temperature = 0.0: allowed is above 0 with the rule"),
        (["--config", "nowhere.json"], 1, "nowhere.json: cannot be read as JSON"),
    ],
)
def test_what_contradicts_itself_is_told_before_a_model_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, says: str
) -> None:
    monkeypatch.setattr(zoo, "load_main", lambda *_: pytest.fail("a model was loaded"))
    got, out, err = run(capsys, "--prompt", "Hi", *words)
    assert (got, out, says in err) == (code, "", True), err


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"max_tries": 2}, "no key of DecodingParams 'max_tries'; there is: adaptive_threshold, "),
        ({"initial_candidates": 12}, "initial_candidates = 12"),
    ],
)
def test_a_config_file_with_what_there_is_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stored: dict[str, Any], says: str
) -> None:
    code, _, err = run(capsys, "--prompt", "Hi", "--config", config(tmp_path, **stored))
    assert (code, says in err) == (2, True), err


def test_a_config_file_that_holds_no_dictionary(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text("[1]")
    code, _, err = run(capsys, "--prompt", "Hi", "--config", str(file))
    assert (code, "holds the dictionary decoding_params" in err) == (2, True), err


def test_python_m_explains_itself() -> None:
    words = [sys.executable, "-m", "specdec_lab.inference", "--help"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0
    assert "--enable_speculative_decoding" in done.stdout
    assert "mean the articles' rule `block`" in done.stdout
