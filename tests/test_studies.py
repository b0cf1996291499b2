"""Agreement of drafts with the main model; speed-up over prompt length and over the position in the output."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import noisy_copy
from torch import Tensor

from specdec_lab import cli, plots, studies, tasks
from specdec_lab.decoding import Decoder
from specdec_lab.distill import greedy_match
from specdec_lab.drafting import Drafter, NGram, Row, Tree, chains
from specdec_lab.errors import DataError, SettingError
from specdec_lab.models import zoo
from specdec_lab.tasks import Prompt
from specdec_lab.trace import Step, Trace

PROMPTS = [list(b"Once upon a time"), list(b"abcabcabc"), list(b"Sea."), list(b"{}"), list(b"def f(x):")]


@pytest.fixture(scope="module")
def main(tiny_folder: str) -> zoo.Main:
    return zoo.load_main(tiny_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def drafter(main: zoo.Main, tiny_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The main model with noise on its weights: agrees with it now and then."""
    return zoo.load_drafter(noisy_copy(tiny_folder, tmp_path_factory.mktemp("noisy")), main)


@pytest.fixture(scope="module")
def replies(main: zoo.Main) -> list[tuple[list[int], list[int]]]:
    plain = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    return [(prompt, plain.generate(prompt, max_new_tokens=20).tokens) for prompt in PROMPTS]


# ---- agreement


def test_match_and_overlap_are_those_of_forwards_over_the_greedy_replies(
    main: zoo.Main, drafter: Any, replies: list[tuple[list[int], list[int]]]
) -> None:
    """The last token of a reply at the length limit is no place to draft for, so it is left out on both sides."""
    got = studies.agreement(main, drafter, PROMPTS, 20)
    places = [(prompt, reply[:-1] if len(reply) == 20 else reply) for prompt, reply in replies]
    assert got.match.value == pytest.approx(greedy_match(drafter.model, places).value)
    assert 0 < got.match.value < 1  # says something
    overlaps = []
    for prompt, reply in places:
        block = torch.tensor([[*prompt, *reply[:-1]]])
        p, q = (
            model.logits(model.forward(block, model.new_cache(1, block.shape[1])))[0, len(prompt) - 1 :].softmax(-1)
            for model in (main.model, drafter.model)
        )
        overlaps += torch.minimum(p, q).sum(-1).tolist()
    assert got.overlap.value == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-4)
    assert got.match.prompts == got.overlap.prompts == got.alpha.prompts == len(PROMPTS)
    assert got.match.low < got.match.value < got.match.high


def test_the_main_model_agrees_with_itself(main: zoo.Main) -> None:
    got = studies.agreement(main, zoo.load_drafter(main.name, main), PROMPTS, 12)
    assert got.match.value == got.alpha.value == got.coverage == 1
    assert got.overlap.value == pytest.approx(1, abs=1e-4)


def test_the_path_is_the_plain_loops_whatever_is_drafted(
    main: zoo.Main, drafter: Any, replies: list[tuple[list[int], list[int]]]
) -> None:
    for temperature in (0.0, 1.0):
        found = studies.along_the_greedy_path(main, drafter, PROMPTS, 20, temperature)
        assert [t.emitted for t in found] == [len(reply) for _, reply in replies]
        assert all(t.steps == t.emitted and t.accepted == 0 for t in found)


def test_places_without_a_draft_are_misses(main: zoo.Main) -> None:
    got = studies.agreement(main, NGram(), PROMPTS, 20)
    assert 0 < got.coverage < 1
    assert 0 < got.match.value <= got.coverage


class Reader(Drafter):
    """Drafts the last token; fails unless it is given the hidden states that decoding gives."""

    name = "reader"
    reads_hidden = True

    def start(self, rows: Sequence[Row], max_len: int, hidden: Sequence[Tensor] = ()) -> None:
        assert [len(states) for states in hidden] == [len(row.tokens) - 1 for row in rows]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        width = max(lengths)
        return chains(torch.tensor([[row.tokens[-1]] * width for row in rows], dtype=torch.long), lengths)

    def observe(self, rows: Sequence[Row], paths: Sequence[Sequence[int] | None], hidden: Tensor) -> None:
        assert hidden.shape[0] == len(rows)


def test_drafters_that_read_hidden_states_are_measured(main: zoo.Main) -> None:
    got = studies.agreement(main, Reader(), PROMPTS, 12)
    assert got.coverage == 1
    line = studies.agreement_line(main.model, Reader(), got)
    assert (line["ratio"], line["ratio_without_embedding"]) == ("–", "–")


def test_ratios_are_told_in_all_and_without_embedding(main: zoo.Main, tiny_draft_folder: str) -> None:
    drafter: Any = zoo.load_drafter(tiny_draft_folder, main)
    line = studies.agreement_line(main.model, drafter, studies.agreement(main, drafter, PROMPTS, 6))
    whole = main.model.parameters / drafter.model.parameters
    assert line["ratio"] == f"1:{whole:.1f}"
    assert line["ratio_without_embedding"] == "1:2"  # two layers over one
    json.dumps(line)


def test_match_prints_a_line_per_draft_and_task(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, main: zoo.Main, tiny_draft_folder: str
) -> None:
    monkeypatch.setattr(zoo, "load_main", lambda: main)
    monkeypatch.setattr(tasks, "load_prompts", lambda task, limit: [Prompt("a", task, "Hello.")])
    words = ["match", "--prompts", "1", "--max_new_tokens", "4", "--json"]
    assert cli.main([*words, "--drafts", tiny_draft_folder, "ngram"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])["match"]
    assert [(line["draft"], line["task"]) for line in found][:2] == [(tiny_draft_folder, "json"), ("ngram", "json")]
    assert len(found) == 2 * 3
    assert "greedy match" in err
    assert cli.main(words) == 0  # the bundled drafts belong to another main model
    out, err = capsys.readouterr()
    assert {line["draft"] for line in json.loads(out.splitlines()[-1])["match"]} == {"ngram"}
    assert "1:4 is left out: the draft" in err
    assert cli.main([*words, "--drafts", "1:4"]) == 1


def test_what_is_undefined_is_null_and_a_dash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, main: zoo.Main
) -> None:
    monkeypatch.setattr(zoo, "load_main", lambda: main)
    monkeypatch.setattr(tasks, "load_prompts", lambda task, limit: [Prompt("a", task, "Hello.")])
    words = ["match", "--prompts", "1", "--max_new_tokens", "2", "--drafts", "grammar", "none", "--json"]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(out.splitlines()[-1], parse_constant=refuse)["match"]
    assert {line["draft"]: (line["alpha"], line["alpha_low"]) for line in found} == dict.fromkeys(
        ("grammar", "none"), (None, None)
    )
    assert "α – (– … –)" in err
    assert "nan" not in err


@pytest.mark.parametrize("words", [["--prompts", "0"], ["--max_new_tokens", "1"], ["--draft_length", "0"]])
def test_match_refuses_bad_arguments(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(["match", *words]) == 2
    assert f"{words[0][2:]} = {words[1]}" in capsys.readouterr().err


# ---- spans


def step(fates: list[str], seconds: float, active: int = 1) -> Step:
    n, one = len(fates), [0.5] * len(fates)
    emitted = fates.count("accepted") + 1
    return Step([1] * n, list(range(-1, n - 1)), one, one, one, one, one, fates, 2, "bonus", 0.5, 0.5, 0.1, n, active,
                emitted, seconds / 2, seconds / 4, seconds / 4)  # fmt: skip


def test_a_step_counts_where_it_begins() -> None:
    steps = [step(["accepted", "accepted", "rejected"], 1.0), step(["rejected", "untried"], 2.0), step([], 4.0, 2)]
    spans = studies.by_span([Trace(5, steps=steps)], 4)
    assert spans == {
        0: {"emitted": 4, "seconds": 3.0, "accepted": 2, "tried": 4},
        4: {"emitted": 1, "seconds": 2.0, "accepted": 0, "tried": 0},
    }
    whole = studies.by_span([Trace(5, steps=steps)], None)
    assert whole == {0: {"emitted": 5, "seconds": 5.0, "accepted": 2, "tried": 4}}


def test_the_table_is_a_ratio_of_sums_over_the_plain_loops() -> None:
    sums = {"emitted": 8, "seconds": 1.0, "accepted": 3, "tried": 4, "plain_emitted": 8, "plain_seconds": 2.0}
    rows = [{"task": "json", "draft": "1:4", "prompt_id": i, "draft_parameters": 1, "x": 16, **sums} for i in range(6)]
    (line,) = studies.table(pd.DataFrame(rows)).to_dict("records")
    assert (line["speedup"], line["alpha"], line["prompts"]) == (2.0, 0.75, 6)
    assert line["speedup_low"] == line["speedup_high"] == 2.0


# ---- prompts of a length


@pytest.mark.parametrize("task", ["json", "prose"])
def test_prompts_have_the_length_and_end_alike(main: zoo.Main, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    monkeypatch.setattr(main.model, "context_length", 10**6)  # prompts are long in bytes
    short, long = (studies.prompts_of_length(decoder, task, length, 3) for length in (64, 4096))
    assert [len(ids) for ids in (*short, *long)] == [64] * 3 + [4096] * 3
    assert [ids[-64:] for ids in long] == short
    assert len({tuple(ids[:64]) for ids in long}) == 3  # different text before each
    with pytest.raises(SettingError, match="lengths"):
        studies.prompts_of_length(decoder, task, 10**7, 3)


# ---- studies


def test_lengths_are_run_drawn_and_stored(
    main: zoo.Main, tiny_draft_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "encode_all", lambda decoder, rows: [list(b"Tell me more.") for _ in rows])
    study = studies.Study("lengths", (tiny_draft_folder, "ngram"), ("prose",), 2, 12, (16, 32, 64))
    seen: list[int] = []
    rows = study.run(main, seen.append)
    assert sum(seen) == 3 * 2 * 3  # lengths, prompts, the plain loop and two drafts
    assert len(rows) == 3 * 2 * 2
    assert (rows.emitted == rows.plain_emitted).all()
    table = studies.table(rows)
    assert list(table.x.unique()) == [16, 32, 64]
    assert (table.speedup > 0).all()
    paths = studies.store(study, rows, tmp_path)
    assert [path.name for path in paths] == ["prompt_length.parquet", "prompt_length.json"]
    assert len(json.loads(paths[1].read_text())["table"]) == len(table)
    pd.testing.assert_frame_equal(pd.read_parquet(paths[0]), rows)
    fig = plots.by_place(table, "prompt length (tokens)", doubling=True)
    assert [label.get_text() for label in fig.axes[-1].get_xticklabels()] == ["16", "32", "64"]
    assert all(path.exists() for path in plots.save(fig, "prompt_length", tmp_path))


def test_positions_split_the_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, main: zoo.Main, tmp_path: Path
) -> None:
    monkeypatch.setattr(zoo, "load_main", lambda: main)
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Tell me of {i}."}) + "\n" for i in range(2)))
    words = ["study", "positions", "--drafts", "ngram", "--tasks", str(file), "--max_new_tokens", "40", "--width", "10"]
    words += ["--results", str(tmp_path / "r"), "--figures", str(tmp_path / "f"), "--json"]
    assert cli.main(words) == 0
    table = json.loads(capsys.readouterr().out.splitlines()[-1])["table"]
    assert {line["x"] for line in table} <= {0, 10, 20, 30}
    assert table[0]["x"] == 0
    names = {path.name for folder in ("r", "f") for path in (tmp_path / folder).iterdir()}
    assert names == {f"output_position.{ending}" for ending in ("parquet", "json", "svg", "png")}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["lengths", "--prompts", "0"], 2, "prompts = 0"),
        (["lengths", "--lengths", "1"], 2, "lengths = (1,)"),
        (["lengths", "--lengths", "64", "64"], 2, "all different"),
        (["positions", "--width", "0"], 2, "width = 0"),
        (["positions", "--tasks", "poems"], 2, "poems"),
        (["lengths", "--drafts", "5:7", "--lengths", "9"], 1, "no model '5:7'"),
        (["lengths", "--lengths", "9999"], 2, "lengths = (9999,)"),
        (["lengths", "--lengths", "64", "100", "--max_new_tokens", "100000"], 2, "max_new_tokens = 100000"),
        (["lengths", "--lengths", "64", "100", "--max_new_tokens", "100000"], 2, "for prompts of 100 tokens"),
        (["lengths", "--drafts", "5:7", "--results", f"{__file__}/r"], 1, "r/prompt_length.parquet: cannot be written"),
        (["positions", "--drafts", "5:7", "--figures", f"{__file__}/f"], 1, "output_position.svg: cannot be written"),
    ],
)
def test_bad_arguments_are_told(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    main: zoo.Main,
    tmp_path: Path,
    words: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # where other settings' results go
    monkeypatch.setattr(zoo, "load_main", lambda: main)
    got = cli.main(["study", *words])
    err = capsys.readouterr().err
    assert (got, says in err) == (code, True), err


def test_an_empty_study_has_no_figure() -> None:
    with pytest.raises(DataError, match="no rows"):
        plots.by_place(pd.DataFrame(), "x")
