"""Keys name what decides a result; parts are whole or not there; a sweep survives whatever stops it."""

import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from specdec_lab import experiment
from specdec_lab.errors import DataError, ModelError, SettingError, SpecdecError, UnknownNameError
from specdec_lab.experiment import Arm, Block, grid, load, mean_nll, read_part, run_block, summary, sweep
from specdec_lab.models import zoo

IDS = ["part", "draft", "draft_length", "prompt_id", "repeat"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts, one of them json, in a file of the user's own."""
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "Tell me a story."}, {"prompt": "List the months of the year, please."}]
    rows.append({"id": "j", "task": "json", "prompt": "A JSON object.", "schema": {"type": "object"}})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def blocks(tiny_folder: str, tiny_draft_folder: str, prompts: Path) -> list[Block]:
    """Four blocks of 3 prompts x 3 sides x 2 repeats."""
    common: dict[str, Any] = {"max_new_tokens": 10, "repeats": 2, "threads": 1}
    pair = [tiny_folder], [tiny_draft_folder, "ngram"]
    return [b for t in (0.0, 0.8) for b in grid(*pair, [str(prompts)], [2, 5], temperature=t, **common)]


@pytest.fixture(scope="module")
def undisturbed(blocks: list[Block], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sweep(blocks, folder, progress=False)
    return folder


@pytest.fixture
def part(undisturbed: Path, blocks: list[Block], tmp_path: Path) -> Path:
    """A copy of the first block's part in a folder of its own."""
    return Path(shutil.copy(undisturbed / f"{blocks[0].key}.parquet", tmp_path))


def assert_same_rows(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """The same runs, each once, with the same tokens."""
    found, expected = (rows.sort_values(IDS).reset_index(drop=True) for rows in (found, expected))
    pd.testing.assert_frame_equal(found[IDS], expected[IDS])
    assert not found.duplicated(IDS).any()
    for a, b in zip(found.tokens, expected.tokens, strict=True):
        assert list(a) == list(b)


# ---- descriptions


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        ({"task": "jsn"}, UnknownNameError, "jsn.*json"),
        ({"main": ""}, SettingError, "main"),
        ({"arms": ("1:4",)}, SettingError, "arms"),
        ({"arms": (Arm(), Arm())}, SettingError, "arms"),
        ({"prompts": 0}, SettingError, "prompts = 0"),
        ({"max_new_tokens": 0}, SettingError, "max_new_tokens = 0.*>= 1"),
        ({"max_new_tokens": 2.5}, SettingError, "max_new_tokens"),
        ({"temperature": -0.1}, SettingError, "temperature"),
        ({"temperature": float("nan")}, SettingError, "temperature"),
        ({"temperature": "hot"}, SettingError, "temperature"),
        ({"top_p": 0}, SettingError, "top_p"),
        ({"top_k": -1}, SettingError, "top_k"),
        ({"seed": -1}, SettingError, "seed"),
        ({"repeats": 0}, SettingError, "repeats"),
        ({"device": "gpu7"}, SettingError, "device = 'gpu7'"),
        ({"dtype": "int4"}, SettingError, "dtype.*bfloat16"),
        ({"threads": 0}, SettingError, "threads"),
    ],
)
def test_a_block_refuses_what_is_out_of_range(setting: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Block(**setting)


@pytest.mark.parametrize(("draft", "length"), [("", 4), ("none", 4), ("1:4", -1), ("1:4", 65), ("1:4", 2.0)])
def test_an_arm_refuses_what_is_out_of_range(draft: str, length: Any) -> None:
    with pytest.raises(SettingError, match="draft"):
        Arm(draft, length)


def test_descriptions_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Block().seed = 1  # type: ignore[misc]


def test_a_grid_has_a_block_per_task_and_draft_with_its_lengths_side_by_side() -> None:
    made = grid(drafts=["1:2", "none"], tasks=["json", "code"], draft_lengths=[2, 4], seed=3)
    assert [(block.task, [arm.draft_length for arm in block.arms]) for block in made] == [
        ("json", [2, 4]),
        ("json", []),
        ("code", [2, 4]),
        ("code", []),
    ]
    assert {block.seed for block in made} == {3}
    assert made[0].runs == 12 * 3
    with pytest.raises(SettingError, match="temprature.*temperature"):
        grid(temprature=1.0)
    with pytest.raises(SettingError, match="drafts"):
        grid(drafts="1:2")


def test_the_key_is_that_of_the_description(blocks: list[Block]) -> None:
    block = blocks[0]
    assert len(block.key) == 16
    assert replace(block).key == block.key
    assert replace(block, temperature=0).key == block.key  # 0 and 0.0 are one setting
    assert len({block.key for block in blocks}) == len(blocks)


@pytest.mark.parametrize(
    "changed",
    [
        *({name: value} for name, value in {"prompts": 2, "max_new_tokens": 11, "temperature": 0.1}.items()),
        *({name: value} for name, value in {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1}.items()),
        *({name: value} for name, value in {"repeats": 1, "dtype": "bfloat16"}.items()),
        *({name: value} for name, value in {"threads": 2, "repetition_penalty": 1.1, "task": "json"}.items()),
        *({"arms": arms} for arms in ((), (Arm("ngram", 2),), (Arm("ngram", 5), Arm("ngram", 2)))),
    ],
    ids=str,
)
def test_every_setting_changes_the_key(blocks: list[Block], changed: dict[str, Any]) -> None:
    assert replace(blocks[1], **changed).key != blocks[1].key


def test_prompts_and_weights_change_the_key(
    tiny_folder: str, tiny_draft_folder: str, prompts: Path, tmp_path: Path
) -> None:
    main, draft, mine = tmp_path / "main", tmp_path / "draft", tmp_path / "mine.jsonl"
    shutil.copytree(tiny_folder, main)
    shutil.copytree(tiny_draft_folder, draft)

    def key() -> str:
        return Block(str(main), str(mine), (Arm(str(draft), 2),)).key

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    mine.write_text(prompts.read_text())
    keys = [key()]
    for change in (
        lambda: mine.write_text(prompts.read_text().replace("story", "tale")),
        lambda: flip(main / "model.safetensors"),
        lambda: flip(draft / "model.safetensors"),
    ):
        change()
        keys.append(key())
    assert len(set(keys)) == 4
    os.utime(main / "model.safetensors")  # touched, not changed
    assert key() == keys[-1]


def test_a_missing_model_is_named_before_anything_runs(prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        sweep([Block(str(tmp_path / "nowhere"), str(prompts), ())], tmp_path / "results", progress=False)


# ---- rows


def test_each_run_is_a_row_and_counts_add_up(undisturbed: Path, blocks: list[Block]) -> None:
    rows = load(undisturbed)
    assert len(rows) == sum(block.runs for block in blocks) == 72
    assert not rows.duplicated(IDS).any()
    assert (rows.accepted + rows.rejected + rows.untried == rows.drafted).all()
    assert (rows.emitted == rows.tokens.map(len)).all()
    assert (rows.emitted <= 10).all()
    for name in ("drafted", "accepted"):
        assert (rows[name] == rows[f"{name}_at"].map(sum)).all(), name
    assert np.allclose(rows.decode_s, rows.draft_s + rows.verify_s + rows.other_s)
    plain = rows[rows.draft == "none"]
    assert (plain.drafted == 0).all()
    assert (plain.steps == plain.emitted).all()
    assert (plain.baseline_decode_s == plain.decode_s).all()
    assert (rows.drafted > 0).sum() > 24
    assert (rows.settled + rows.refusals <= rows.steps).all()
    assert rows.fallbacks.between(1, rows.settled - 1).any()  # some drafts of n-grams stay
    assert (rows.settled - rows.fallbacks <= rows.accepted).all()
    assert rows.threads.eq(1).all()


def test_greedy_arms_equal_their_baseline(undisturbed: Path) -> None:
    rows = load(undisturbed)
    greedy = rows[(rows.temperature == 0) & (rows.draft != "none")]
    assert greedy.same_as_baseline.all()
    assert (greedy.first_divergence == -1).all()
    assert rows[(rows.temperature > 0) | (rows.draft == "none")].same_as_baseline.isna().all()


def test_a_divergence_is_located_and_its_margin_measured(tiny_folder: str) -> None:
    model = zoo.load_main(tiny_folder, device="cpu").model
    same = partial(experiment._sameness, model, [65, 66])
    assert same([1, 2], [1, 2]) == {"same_as_baseline": True, "first_divergence": -1}
    found = same([1, 3, 4], [1, 2, 4])
    assert found["first_divergence"] == 1
    logits = model.logits(model.forward(torch.tensor([[65, 66, 1]]), model.new_cache(1, 3)))[0, -1]
    top = logits.topk(2).values
    assert found["divergence_margin"] == pytest.approx(float(top[0] - top[1]), abs=1e-5)
    assert same([1, 2], [1, 2, 3])["first_divergence"] == 2


def test_arms_alternate_and_the_order_rotates(undisturbed: Path, blocks: list[Block]) -> None:
    rows = load(undisturbed, [blocks[0]])
    assert rows.groupby(["prompt_id", "repeat"]).order.apply(lambda order: sorted(order) == [0, 1, 2]).all()
    first = rows[rows.order == 0]
    assert set(first.draft_length) == {0, 2, 5}  # each side comes first now and then


def test_sampling_repeats_differ_and_greedy_ones_do_not(undisturbed: Path, blocks: list[Block]) -> None:
    for block, differ in ((blocks[0], False), (blocks[2], True)):
        rows = load(undisturbed, [block])
        rows = rows[rows.draft == "none"].assign(tokens=rows.tokens.map(tuple))
        distinct = rows.groupby("prompt_id").tokens.nunique()
        assert (distinct > 1).any() == differ


def test_every_row_carries_its_provenance(undisturbed: Path, blocks: list[Block], tiny_folder: str) -> None:
    rows = load(undisturbed, blocks[:1])
    for name in ("specdec_lab", "python", "torch", "transformers", "cpu", "cores", "load_average", "date", "seed"):
        assert rows[name].notna().all(), name
    assert rows.main.eq(tiny_folder).all()
    assert rows["dtype"].eq("float32").all()
    with_draft = rows[rows.draft != "none"]
    assert (with_draft.draft_parameters < with_draft.main_parameters).all()
    assert (with_draft.draft_body_parameters < with_draft.draft_parameters).all()
    assert (rows[rows.draft == "none"].draft_parameters == 0).all()
    _, metadata = read_part(undisturbed / f"{blocks[0].key}.parquet")
    assert len(metadata["main"]["fingerprint"]) == 64
    assert metadata["verify_curve"]["ratio"][0] == 1
    assert os.uname().nodename not in json.dumps(metadata).split('"')


def test_summary_has_a_line_per_arm(undisturbed: Path) -> None:
    table = summary(load(undisturbed), resamples=50)
    assert len(table) == 4 * 3
    assert "temperature" in table
    assert table[table.draft == "none"].speculative_speedup.eq(1).all()
    holds_back = table.coverage < 0.9  # as n-gram drafts do where nothing matches
    assert table[(table.draft != "none") & ~holds_back].predicted_speedup.gt(0).all()
    assert holds_back.any()
    assert table[holds_back].predicted_speedup.isna().all()
    assert table.prompts.eq(3).all()


def test_prose_is_scored_by_the_main_models_likelihood(tiny_folder: str, undisturbed: Path) -> None:
    from transformers import AutoModelForCausalLM

    from specdec_lab.models.zoo import load_main

    prompt, reply = [256, 65, 66, 67], list(range(40, 60))
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(tiny_folder)(torch.tensor([prompt + reply])).logits[0]
    expected = torch.nn.functional.cross_entropy(reference[3:-1], torch.tensor(reply)).item()
    model = load_main(tiny_folder, "cpu").model
    assert mean_nll(model, prompt, reply) == pytest.approx(expected, rel=1e-4)
    assert mean_nll(model, prompt, []) is None
    rows = load(undisturbed).set_index("prompt_id")
    cut = rows.loc["j"].finish == "length"  # half an object is no wrong object
    assert rows.quality["j"][cut].isna().all()
    assert set(rows.quality["j"][~cut]) <= {0.0, 1.0}
    assert (rows.quality.drop("j") > 0).all()


RULES = [("lossless", None), ("threshold", 0.0), ("block", 0.0), ("block", 1.0), ("sequence", 0.0), ("sequence", 1.0)]


@pytest.fixture(scope="module")
def ruled(tiny_folder: str, tiny_draft_folder: str, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Rows of a random draft under RULES, on six prompts of prose: 0 keeps all of its tokens, 1 none."""
    folder = tmp_path_factory.mktemp("ruled")
    (folder / "mine.jsonl").write_text("\n".join(json.dumps({"prompt": f"Tell me of {x}."}) for x in "abcdef"))
    arms = tuple(Arm(tiny_draft_folder, 4, acceptance_rule=r, acceptance_threshold=t) for r, t in RULES)
    block = Block(tiny_folder, str(folder / "mine.jsonl"), arms, max_new_tokens=16, threads=1)
    return sweep([block], folder / "results", progress=False)


@pytest.fixture(scope="module")
def costs(ruled: pd.DataFrame) -> dict[Any, Any]:
    """Line of the summary by (rule, threshold)."""
    lines = summary(ruled[ruled.draft != "none"], resamples=200).itertuples()
    return dict(zip(RULES, lines, strict=True))


DELTAS = [f"{name}_delta{bound}" for name in ("quality", "nll", "repetition") for bound in ("", "_low", "_high")]


@pytest.mark.parametrize("rule", [("lossless", None), ("block", 1.0), ("sequence", 1.0)])
def test_the_main_models_own_text_costs_exactly_nothing(costs: dict[Any, Any], rule: Any) -> None:
    """Greedy, and so too where every draft is refused and the main model goes on alone."""
    assert costs[rule].same_as_baseline == 1
    assert {getattr(costs[rule], name) for name in DELTAS} == {0}
    assert costs[rule].quality_prompts == 6


@pytest.mark.parametrize("rule", [("threshold", 0.0), ("block", 0.0), ("sequence", 0.0)])
def test_keeping_all_of_a_random_draft_costs_likelihood(costs: dict[Any, Any], rule: Any) -> None:
    got = costs[rule]
    assert got.draft_acceptance_rate == 1
    assert got.same_as_baseline == 0
    assert 0 < got.nll_delta_low < got.nll_delta
    assert got.quality_delta == got.nll_delta  # prose


def test_fallbacks_are_of_steps_and_in_sequence_of_texts(costs: dict[Any, Any], ruled: pd.DataFrame) -> None:
    assert costs["lossless", None].fallback_ratio == 1  # models without a guess in common
    for rule in RULES[1:]:
        expected = 1.0 if rule[1] == 1 else 0.0
        assert costs[rule].fallback_ratio == expected, rule
        assert costs[rule].refusal_ratio == pytest.approx(expected * 2 / 3), rule  # max_retries is 2
    sequence = ruled[ruled.acceptance_rule == "sequence"]
    assert (sequence.settled == 1).all()
    assert (sequence.refusals + sequence.settled + (sequence.emitted - 1) * sequence.fallbacks == sequence.steps).all()
    assert (ruled[ruled.draft == "none"][["settled", "fallbacks", "refusals"]] == 0).all(axis=None)


def test_every_row_has_its_and_the_baselines_scores(ruled: pd.DataFrame, undisturbed: Path) -> None:
    assert ruled.nll.gt(0).all()
    assert (ruled.quality == ruled.nll).all()  # prose
    assert ruled.quality_better.eq("lower").all()
    plain = ruled[ruled.draft == "none"].set_index("prompt_id")
    for name in ("quality", "nll", "repetition"):
        assert (ruled[f"baseline_{name}"] == ruled.prompt_id.map(plain[name])).all(), name
    rows = load(undisturbed)
    assert rows.nll.gt(0).all()
    assert rows.quality_better.eq(rows.prompt_id.map(lambda name: "higher" if name == "j" else "lower")).all()
    sampled = rows[rows.temperature > 0]
    assert (sampled.nll != sampled.baseline_nll).any()  # held against the plain arm's own sample
    mixed = summary(rows[rows.temperature > 0], resamples=50)
    assert mixed.quality_delta.isna().all()
    assert mixed[mixed.draft != "none"].nll_delta.ne(0).any()


def test_equal_replies_are_read_once(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_lab.decoding import Generation
    from specdec_lab.tasks import Prompt
    from specdec_lab.trace import Trace

    read: list[Any] = []

    def counted(model: Any, *what: Any) -> float:
        read.append(what)
        return float(len(read))

    monkeypatch.setattr(experiment, "mean_nll", counted)
    scorer = experiment.Scorer(zoo.load_main(tiny_folder, "cpu").model)
    prompts = [Prompt("a", "prose", "One."), Prompt("b", "prose", "Two.")]
    asked = [(0, [1, 2]), (0, [1, 2]), (0, [1, 3]), (1, [1, 2])]
    texts = [(prompts[i], [65 + i], Generation("text", ids, Trace(1, finish="length"))) for i, ids in asked]
    found = [scorer.judge(*text) for text in texts]
    assert [each["nll"] for each in found] == [each["quality"] for each in found] == [1, 1, 2, 3]
    assert read == [([65], [1, 2]), ([65], [1, 3]), ([66], [1, 2])]


def test_a_prompt_that_does_not_fit_is_refused_and_nothing_is_written(tiny_folder: str, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x" * 600}))
    block = Block(tiny_folder, str(long), (Arm("ngram", 2),), max_new_tokens=4)
    with pytest.raises(DataError, match="prompt long-1: .*tokens"):
        sweep([block], tmp_path / "results", progress=False)
    assert not list((tmp_path / "results").glob("*.parquet"))


# ---- part files


def test_a_sweep_skips_what_is_there(undisturbed: Path, blocks: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "run_block", lambda *_: pytest.fail("ran again"))
    assert_same_rows(sweep([*blocks, blocks[0]], undisturbed, progress=False), load(undisturbed))
    assert {path.suffix for path in undisturbed.iterdir()} == {".parquet"}  # no lock, no temp file stays


def _truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(data: bytes) -> bytes:
    """One bit of the last value of the first column."""
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
    at = column.dictionary_page_offset + column.total_compressed_size - 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [_truncate, _flip, lambda data: b"", lambda data: b"no parquet", lambda data: data[:-1], lambda data: b"\0" * 999],
    ids=["half", "bit", "empty", "text", "tail", "zeros"],
)
def test_a_broken_part_is_named_reported_and_run_again(
    part: Path, blocks: list[Block], undisturbed: Path, damage: Callable[[bytes], bytes]
) -> None:
    part.write_bytes(damage(part.read_bytes()))
    with pytest.raises(DataError, match=part.name):
        load(part.parent)
    with pytest.warns(UserWarning, match=f"{part.name}.*run again"):
        rows = sweep(blocks[:1], part.parent, progress=False)
    assert_same_rows(rows, load(undisturbed, blocks[:1]))


def test_a_foreign_or_renamed_file_is_no_part(part: Path, tmp_path: Path) -> None:
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "foreign.parquet")
    with pytest.raises(DataError, match=r"foreign\.parquet"):
        load(tmp_path)
    (tmp_path / "foreign.parquet").unlink()
    part.rename(tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"other\.parquet"):
        load(tmp_path)


def test_loading_nothing_is_an_error(tmp_path: Path, blocks: list[Block]) -> None:
    with pytest.raises(DataError, match="no results"):
        load(tmp_path / "nowhere")
    with pytest.raises(DataError, match=blocks[0].key):
        load(tmp_path, blocks[:1])


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path, blocks: list[Block]) -> None:
    (tmp_path / "results").write_text("")
    for folder in (tmp_path / "results", tmp_path / "results" / "below"):
        with pytest.raises(SpecdecError, match=f"cannot write to the results folder {folder}"):
            sweep(blocks, folder, progress=False)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_named_and_loses_nothing(
    part: Path, blocks: list[Block], undisturbed: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = part.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(experiment.os, call, full)
        with pytest.raises(SpecdecError, match=f"{part.parent}.*No space left"):
            sweep(blocks[:2], part.parent, progress=False)
    assert [path.name for path in part.parent.iterdir()] == [part.name]
    assert part.read_bytes() == before
    assert_same_rows(sweep(blocks[:2], part.parent, progress=False), load(undisturbed, blocks[:2]))


# ---- interruptions and company


@pytest.mark.parametrize("moment", [0, 7])
def test_ctrl_c_keeps_complete_parts(
    blocks: list[Block], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Interrupted after some runs of the second block, the first one's part stays."""
    counts, runs = experiment._counts, iter(range(10**6))

    def interrupted(made: Any) -> dict[str, Any]:
        if next(runs) == blocks[0].runs + moment:
            raise KeyboardInterrupt
        return counts(made)

    with monkeypatch.context() as pressed:
        pressed.setattr(experiment, "_counts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep(blocks[:3], tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [f"{blocks[0].key}.parquet"]
    assert_same_rows(sweep(blocks[:3], tmp_path, progress=False), load(undisturbed, blocks[:3]))


def test_the_bar_is_on_standard_error(
    blocks: list[Block], undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(undisturbed / f"{blocks[0].key}.parquet", tmp_path)
    sweep(blocks[:2], tmp_path)
    out, err = capsys.readouterr()
    assert out == ""
    assert "36/36" in err
    assert "18/36" in err  # what was there is counted, not timed


def test_a_claim_is_held_by_one_and_freed(tmp_path: Path) -> None:
    with experiment._claim(tmp_path, "k") as first, experiment._claim(tmp_path, "k") as second:
        assert (first, second) == (True, False)
    (tmp_path / ".k.lock").touch()  # of a worker that was killed
    (tmp_path / ".k.0.tmp").touch()
    with experiment._claim(tmp_path, "k") as again:
        assert again
    assert not list(tmp_path.iterdir())


def test_without_locks_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(experiment.fcntl, "flock", refuse)
    with experiment._claim(tmp_path, "k") as mine:
        assert mine


def test_a_block_that_another_worker_holds_is_waited_for(
    blocks: list[Block], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "POLL", 0.01)
    monkeypatch.setattr(experiment, "run_block", lambda *_: pytest.fail("ran what another worker holds"))
    key, held = blocks[0].key, threading.Event()

    def other_worker() -> None:
        with experiment._claim(tmp_path, key):
            held.set()
            time.sleep(0.2)
            shutil.copy(undisturbed / f"{key}.parquet", tmp_path)

    thread = threading.Thread(target=other_worker)
    thread.start()
    held.wait()
    rows = sweep(blocks[:1], tmp_path, progress=False)
    thread.join()
    assert_same_rows(rows, load(undisturbed, blocks[:1]))


WORKER = """
import json, os, signal, sys
from specdec_lab import experiment
from specdec_lab.models import zoo
from specdec_lab.experiment import Arm, Block

folder, descriptions, dies_at = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
blocks = [Block(arms=tuple(Arm(*arm) for arm in arms), **settings) for arms, settings in descriptions]
run, replace = experiment.run_block, os.replace

def counted(block, *rest):
    print(block.key, flush=True)
    return run(block, *rest)

def dying(*paths):
    global dies_at
    dies_at -= str(paths[1]).endswith(".parquet")
    if dies_at == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)

experiment.run_block, os.replace = counted, dying
experiment.sweep(blocks, folder, progress=False)
"""


def start_worker(folder: Path, blocks: list[Block], dies_at: int = 0) -> "subprocess.Popen[str]":
    """A worker in a process of its own; dies_at n: by SIGKILL, with its n-th part written but not in place."""
    described = [([(arm.draft, arm.draft_length) for arm in block.arms], block.settings) for block in blocks]
    command = [sys.executable, "-c", WORKER, str(folder), json.dumps(described), str(dies_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])


@pytest.mark.slow
def test_a_sweep_killed_at_any_moment_ends_with_the_same_rows(
    blocks: list[Block], undisturbed: Path, tmp_path: Path
) -> None:
    """Killed once between writing a part and putting it in place, then twice at random while it runs blocks."""
    worker = start_worker(tmp_path, blocks, dies_at=1)
    worker.communicate()
    assert worker.returncode == -signal.SIGKILL
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock", ".tmp"]
    dice = random.Random(0)
    for _ in range(2):
        worker = start_worker(tmp_path, blocks)
        assert worker.stdout
        worker.stdout.readline()  # a block has begun
        time.sleep(dice.uniform(0, 0.6))
        worker.kill()
        worker.communicate()
    assert_same_rows(sweep(blocks, tmp_path, progress=False), load(undisturbed))
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet"}


@pytest.mark.slow
def test_two_workers_share_a_sweep(blocks: list[Block], undisturbed: Path, tmp_path: Path) -> None:
    workers = [start_worker(tmp_path, blocks) for _ in range(2)]
    ran = [worker.communicate()[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert sorted(ran[0] + ran[1]) == sorted(block.key for block in blocks)  # each block by one of them
    assert_same_rows(load(tmp_path), load(undisturbed))


def test_run_block_alone_writes_the_part(blocks: list[Block], undisturbed: Path, tmp_path: Path) -> None:
    ticks: list[int] = []
    path = run_block(blocks[0], tmp_path / "new" / "folder", ticks.append)
    assert path.name == f"{blocks[0].key}.parquet"
    assert sum(ticks) == blocks[0].runs
    assert_same_rows(load(path.parent), load(undisturbed, blocks[:1]))


# ---- arms


def test_arms_that_decode_alike_are_one() -> None:
    assert Arm("1:4", 4, branching="chains") == Arm("1:4", 4)
    assert Arm("1:4", 4, 2, acceptance_rule="block").branching == "chains"
    assert Arm("1:4", 4, 2).branching == "dynamic"
    assert repr(Arm("1:4", 4, adaptive_threshold=1)) == repr(Arm("1:4", 4, adaptive_threshold=1.0))
    assert Arm("ngram", 4, acceptance_rule="block").max_retries == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": "ngram", "candidate_count": 2}, "candidate_count = 2: allowed is 1 for ngram, which cannot branch"),
        (
            {"draft": "ngram+parallel", "adaptive_threshold": 0.5},
            "adaptive_threshold = 0.5: allowed is none for ngram.parallel",
        ),
        (
            {"acceptance_rule": "block", "max_retries": 1, "draft": "ngram"},
            "max_retries = 1: allowed is 0: ngram draws",
        ),
        (
            {"acceptance_rule": "block", "max_retries": 1, "candidate_count": 2, "branching": "top_k"},
            "max_retries = 1: allowed is 0: branching top_k draws nothing",
        ),
        (
            {"draft_length": 0, "acceptance_rule": "typical"},
            "allowed is lossless, as draft_length 0 drafts",
        ),
        (
            {"acceptance_rule": "sequence", "candidate_count": 2, "branching": "dynamic"},
            "branching = 'dynamic': allowed is chains, distinct or top_k",
        ),
        ({"draft_length": 0, "candidate_count": 3}, "draft_length = 0: allowed is 1 or more with several candidates"),
        ({"candidate_count": 0}, "candidate_count = 0: allowed is an integer 1 … 8"),
        ({"acceptance_rule": "block", "acceptance_threshold": 2}, "acceptance_threshold = 2: allowed is 0 … 1"),
    ],
)
def test_arms_that_contradict_themselves(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Arm(**settings)


def test_whole_texts_that_no_tree_has_room_for() -> None:
    arm = Arm("1:4", 4, 8, acceptance_rule="sequence")
    with pytest.raises(SettingError, match="tree = '1600 nodes, from max_new_tokens and candidates'"):
        Block(arms=(arm,), max_new_tokens=200)
