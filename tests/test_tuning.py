"""Search: the grid holds what was asked for, rounds keep what could be best, a search resumes with the same choice."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from specdec_lab import experiment, tuning
from specdec_lab.errors import DataError, SettingError, UnknownNameError
from specdec_lab.experiment import Arm, summary
from specdec_lab.statistics import fronts
from specdec_lab.tuning import ARTICLES, RUNS, Search, arm_of, grid_arms, standings, survivors

# ---- the grid


def test_the_grid_is_every_combination_that_is_a_setting_of_its_own() -> None:
    arms = grid_arms("1:4", ("lossless", "threshold", "block"), (4, 8), (2, 4), (0.5, 0.7, 0.9), max_retries=1)
    assert len(arms) == len(set(arms)) == 2 * 3 + 2 * (2 * 2 * 3)
    by = {rule: [arm for arm in arms if arm.acceptance_rule == rule] for rule in ("lossless", "threshold", "block")}
    assert {arm.acceptance_threshold for arm in by["lossless"]} == {None}
    assert {arm.candidate_count for arm in by["lossless"]} == {1, 2, 4}, "the chain that others are held against"
    assert {arm.candidate_count for arm in by["threshold"]} == {2, 4}
    assert {arm.branching for arm in by["threshold"]} == {"dynamic"}
    assert {(arm.branching, arm.max_retries) for arm in by["block"]} == {("chains", 1)}, "where drafts are drawn"


def test_a_chain_has_one_key_whatever_its_rule() -> None:
    assert {arm.branching for arm in grid_arms("1:4", ("lossless", "block"), (4,), (1,), (0.5,))} == {Arm().branching}


def test_a_whole_text_has_no_draft_length() -> None:
    arms = grid_arms("1:4", ("sequence",), (4, 8), (1,), (0.5, 0.7))
    assert [(arm.draft_length, arm.acceptance_threshold) for arm in arms] == [(4, 0.5), (4, 0.7)]


def test_the_default_is_coarse_and_full_is_the_articles_grid() -> None:
    assert len(Search().arms) <= 50
    full = Search(full=True)
    lossy = [arm for arm in full.arms if arm.acceptance_rule != "lossless"]
    assert {arm.draft_length for arm in full.arms} == set(ARTICLES["draft_lengths"]) == {8, 16, 24, 32}
    assert {arm.candidate_count for arm in lossy} == {2, 4, 8}
    assert {arm.acceptance_threshold for arm in lossy} == {0.5, 0.6, 0.7, 0.8, 0.9}
    assert full.rounds == Search().prompts[-1:], "every cell on the prompts of the last round"


def test_a_block_is_about_as_long_as_a_killed_search_may_lose() -> None:
    search = Search(full=True)
    blocks = search.blocks(0, {"json": search.arms})
    assert sorted(map(str, (arm for block in blocks for arm in block.arms))) == sorted(map(str, search.arms))
    assert all(block.runs <= RUNS + 2 * search.rounds[0] for block in blocks)
    (one,) = Search().blocks(0, {"json": Search().arms})
    assert one.arms == Search().arms, "in the first round all arms share one baseline"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompts": (6, 2), "keep": (4,)}, "more from round to round"),
        ({"prompts": (2, 6), "keep": ()}, "keep = .*list of 1 integers"),
        ({"prompts": (2, 6), "keep": (0,)}, "keep"),
        ({"prompts": (2, 4, 6), "keep": (3, 5)}, "ever smaller"),
        ({"prompts": (0,), "keep": ()}, "prompts"),
        ({"prompts": 4}, "prompts = 4"),
        ({"draft_lengths": ()}, "draft_lengths"),
        ({"draft_lengths": (4, 4)}, "different"),
        ({"draft_lengths": (65,)}, "draft_length"),
        ({"candidate_counts": (9,)}, "candidate_count = 9.*1 … 8"),
        ({"thresholds": (1.5,)}, "acceptance_threshold = 1.5"),
        ({"rules": ("lossless", "lenience")}, "temperature = 0.0.*lenience"),
        ({"full": True, "draft_lengths": (5,)}, "draft_lengths = .*beside full"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_bad_searches_are_refused_before_a_model_loads(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        Search(**given)


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownNameError, match="lossless"):
        Search(rules=("exact",))
    with pytest.raises(UnknownNameError, match="prose"):
        Search(tasks=("poetry",))
    assert any(arm.acceptance_rule == "lenience" for arm in Search(rules=("lenience",), temperature=0.8).arms)


# ---- who survives


def table(*lines: tuple[str, float, float]) -> pd.DataFrame:
    """A summary of (rule, speed-up, nll_delta); arm i has draft length i + 1. The plain loop comes first."""
    usual = {"lossless": None}
    arms = [
        asdict(Arm("1:4", index + 1, acceptance_rule=rule, acceptance_threshold=usual.get(rule, 0.5)))
        for index, (rule, _, _) in enumerate(lines)
    ]
    own = [{"speculative_speedup": speed, "nll_delta": loss} for _, speed, loss in lines]
    plain = {**asdict(Arm()), "draft": "none", "speculative_speedup": 9.0, "nll_delta": 0.0}
    return pd.DataFrame([plain, *({**arm, **line} for arm, line in zip(arms, own, strict=True))])


def kept(arms: pd.DataFrame, keep: int) -> list[int]:
    return [arm.draft_length - 1 for arm in survivors(arms, keep)]


def test_what_could_be_on_the_front_survives_not_the_fastest_alone() -> None:
    arms = table(
        ("lossless", 1.2, 0.0), ("lossless", 1.5, 0.0), ("threshold", 2.0, 0.5), ("threshold", 1.9, 0.6),
        ("threshold", 1.7, 0.1), ("typical", 1.6, 0.02), ("typical", 1.9, 0.9),
    )  # fmt: skip
    assert kept(arms, 4) == [1, 2, 4, 5], "3 and 6 are faster, and beaten in both"
    assert kept(arms, 5) == [1, 2, 3, 4, 5], "then the next front"
    assert kept(arms, 6) == [0, 1, 2, 3, 4, 5], "and a second place for lossless ones"
    assert kept(arms, 99) == list(range(7))


def test_the_fastest_lossless_arms_survive_whatever_beats_them() -> None:
    arms = table(("lossless", 1.1, 0.0), ("lossless", 1.3, 0.0), *[("threshold", 2.0 + i, 0.1 * i) for i in range(8)])
    assert kept(arms, 3)[0] == 1
    assert kept(arms, 1) == [1]
    assert kept(arms, 6)[:2] == [0, 1]


def test_a_text_likelier_than_the_main_models_own_is_no_better_for_it() -> None:
    arms = table(("lossless", 1.5, 0.0), ("typical", 1.2, -0.4), ("threshold", 1.4, 0.0), ("block", 1.6, 0.3))
    assert kept(arms, 2) == [0, 3], "the first lossy two are no faster, and nothing is won by the third's likelihood"


def test_unknown_values_come_last() -> None:
    nan = float("nan")
    arms = table(("lossless", nan, nan), ("threshold", 1.4, 0.1), ("threshold", nan, 0.0), ("block", 1.2, nan))
    assert kept(arms, 2) == [0, 1]
    assert kept(arms, 4) == [0, 1, 2, 3]


def test_the_choice_does_not_depend_on_the_order_of_rows() -> None:
    rng = np.random.default_rng(0)
    rules = [str(rule) for rule in rng.choice(["lossless", "threshold", "block"], 30)]
    arms = table(*zip(rules, rng.random(30) + 1, rng.random(30), strict=True))
    mixed = arms.sample(frac=1, random_state=1)
    assert sorted(kept(arms, 9)) == sorted(kept(mixed, 9))


def test_fronts_are_what_nothing_beats() -> None:
    rng = np.random.default_rng(0)
    gain, loss = rng.integers(0, 6, 40), rng.integers(0, 6, 40)  # with ties

    def beats(a: int, b: int) -> bool:
        return bool(gain[a] >= gain[b] and loss[a] <= loss[b] and (gain[a] > gain[b] or loss[a] < loss[b]))

    found = fronts(gain, loss)
    assert sorted(at for front in found for at in front) == list(range(40))
    for index, front in enumerate(found):
        inside = [at for later in found[index:] for at in later]
        assert front == sorted(at for at in inside if not any(beats(other, at) for other in inside))
    assert fronts([], []) == []


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_a_bad_number_of_survivors_is_refused(keep: Any) -> None:
    with pytest.raises(SettingError, match="keep"):
        survivors(table(("lossless", 1.0, 0.0)), keep)


# ---- running


@pytest.fixture(scope="module")
def search(tiny_folder: str, tiny_draft_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Search:
    """Two tasks, 12 cells each, two rounds on tiny models."""
    folder = tmp_path_factory.mktemp("prompts")
    for name in ("one", "two"):
        lines = [json.dumps({"prompt": f"Say {n} things about {name} {n * 7}."}) for n in range(9)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    tasks = tuple(str(folder / f"{name}.jsonl") for name in ("one", "two"))
    how: dict[str, Any] = {"draft_lengths": (2, 3), "candidate_counts": (1, 2), "thresholds": (0.1,)}
    how |= {"rules": ("lossless", "typical", "block"), "prompts": (1, 3), "keep": (4,), "max_new_tokens": 6}
    return Search(tiny_folder, tiny_draft_folder, tasks, **how, threads=1)


@pytest.fixture(scope="module")
def folder(search: Search, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a search that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    search.run(folder, progress=False)
    return folder


def texts(rows: pd.DataFrame) -> list[tuple[Any, ...]]:
    named = rows[["task", "round", "prompt_id", "draft", "draft_length", "acceptance_rule", "candidate_count", "text"]]
    return sorted(named.itertuples(index=False, name=None))


def test_later_rounds_have_fewer_arms_and_hold_the_prompts_before(search: Search, folder: Path) -> None:
    rows = search.run(folder, progress=False)
    assert len(search.arms) == 12
    for task, line in rows.groupby("task"):
        first, last = line[line["round"] == 1], line[line["round"] == 2]
        assert len(first) == 1 * (12 + 1)
        assert len(last) == 3 * (4 + 1)
        assert set(first.prompt_id) < set(last.prompt_id)
        chosen = survivors(summary(first), 4)
        arms = {arm_of(row) for _, row in last[last.draft != "none"].iterrows()}
        assert arms == set(chosen), task
        assert any(arm.acceptance_rule == "lossless" for arm in arms)


def test_a_finished_search_runs_nothing(search: Search, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setattr(experiment, "run_block", lambda *args: pytest.fail("it ran again"))
    rows = search.run(folder, progress=False)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert rows["round"].max() == 2


@pytest.mark.parametrize("survived", [0, 1, 2, 3])
def test_a_search_that_stopped_goes_on(
    search: Search, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    real = experiment.run_block
    ran: list[Any] = []

    def run_block(*args: Any) -> Path:
        if len(ran) == survived:
            raise KeyboardInterrupt
        ran.append(args)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "run_block", run_block)
        with pytest.raises(KeyboardInterrupt):
            search.run(tmp_path, progress=False)
    assert len(list(tmp_path.glob("*.parquet"))) == survived
    first = {path.stem for path in tmp_path.glob("*.parquet")}
    rows = search.run(tmp_path, progress=False)
    assert first <= set(rows.part), "what was finished is not measured again"
    expected = [line for line in texts(search.run(folder, progress=False)) if line[1] == 1]
    assert [line for line in texts(rows) if line[1] == 1] == expected


def test_full_measures_every_cell_once(search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"draft_lengths": (2,), "candidate_counts": (2,), "thresholds": (0.5,)}
    monkeypatch.setattr(tuning, "ARTICLES", small)
    usual: dict[str, Any] = {"draft_lengths": (4, 8, 16), "candidate_counts": (1, 4), "thresholds": (0.3, 0.7)}
    rows = replace(search, full=True, **usual).run(tmp_path, progress=False)
    assert set(rows["round"]) == {1}
    assert len(rows) == 2 * 3 * (1 + 2 + 1 + 1)


def test_standings_know_how_far_each_arm_came(search: Search, folder: Path) -> None:
    rows = search.run(folder, progress=False)
    arms = standings(rows)
    drafting = arms[arms.draft != "none"]
    assert len(drafting) == 2 * (12 + 4)
    assert (drafting[drafting["round"] == 2].reached == 2).all()
    assert (drafting[drafting["round"] == 1].reached == 2).sum() == 2 * 4
    assert {"nll_delta_low", "quality_delta_high", "fallback_ratio", "quality_prompts"} <= set(arms)
    with pytest.raises(DataError, match="round"):
        standings(rows.drop(columns="round"))


def test_arms_are_read_back_as_they_were(search: Search, folder: Path) -> None:
    rows = search.run(folder, progress=False)
    first = rows[(rows["round"] == 1) & (rows.draft != "none")]
    assert {arm_of(row) for _, row in first.iterrows()} == set(search.arms)


def test_a_draft_that_does_not_branch_is_refused(search: Search) -> None:
    """Before anything runs."""
    with pytest.raises(SettingError, match="candidate_count = 2: allowed is 1 for ngram, which cannot branch"):
        replace(search, draft="ngram")
