"""The benchmark: what runs, what is missing and why, which numbers come of it, and the table in README."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec_lab import bench, cli, metrics, peers, scoreboard
from specdec_lab.decoding import Decoder, Generation
from specdec_lab.errors import DataError, SettingError, SpecdecError, UnknownNameError
from specdec_lab.metrics import LOOP, loops, repeated_ngrams
from specdec_lab.models import zoo
from specdec_lab.profiles import Drafting, Profile
from specdec_lab.tasks import Prompt, load_prompts
from specdec_lab.trace import Step, Trace

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def main(tiny_folder: str) -> zoo.Main:
    return zoo.load_main(tiny_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reference(tiny_folder: str) -> Any:
    return zoo.read(Path(tiny_folder))[0]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows: list[dict[str, Any]] = [
        {"id": f"p{i}", "task": "prose", "prompt": f"Tell me of the sea, {i}."} for i in range(2)
    ]
    rows += [{"id": "j", "task": "json", "prompt": "An object.", "schema": SCHEMA}]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


# ---- loops


def test_an_output_that_repeats_itself_is_a_loop_and_plain_text_is_not() -> None:
    assert loops([1, 2, 3, 4, 5] * 6)
    assert not loops(list(range(64)))
    assert not loops([7, 7])  # too short to say
    text = "Two roads diverged in a yellow wood, and sorry I could not travel both and be one traveler, long I stood"
    assert not loops(list(text.encode()))


def test_the_bound_is_met_from_its_value_on() -> None:
    def repeating(copies: int, length: int = 103) -> list[int]:
        """100 4-grams, of which `copies` stood there before."""
        fresh = list(range(length - copies))
        return fresh + fresh[:copies]

    shares = {copies: repeated_ngrams(repeating(copies)) for copies in (32, 33)}
    assert shares[32] is not None
    assert shares[33] is not None
    assert shares[32] < LOOP <= shares[33]
    assert [loops(repeating(copies)) for copies in (32, 33)] == [False, True]


def test_evaluate_tells_the_numbers_without_loops(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, main: zoo.Main, prompts: str
) -> None:
    plain = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    made = [plain.generate(row.prompt, max_new_tokens=40) for row in load_prompts(prompts)]
    shares = sorted(repeated_ngrams(text.tokens) or 0.0 for text in made)
    assert shares[0] < shares[-1], "the test needs texts of both kinds"
    monkeypatch.setattr(metrics, "LOOP", shares[-1])  # so that the most repetitive text is a loop
    left = [share for share in shares if share < shares[-1]]
    words = ["evaluate", "--main", main.name, "--draft", "ngram", "--prompts", prompts, "--max_new_tokens", "40"]
    assert cli.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    got = json.loads(out.splitlines()[-1])
    assert got["loop_free"]["prompts"] == len(left)
    assert set(got["loop_free"]["by_task"]) == set(got["by_task"])
    assert got["metrics"]["repetition"] == pytest.approx(sum(shares) / 3)
    assert got["loop_free"]["metrics"]["repetition"] == pytest.approx(sum(left) / len(left))
    assert f"without the {3 - len(left)} prompts whose plain output loops" in err
    assert "repeated 4-grams" in err


# ---- other systems


def test_transformers_ways_give_the_plain_loops_tokens(main: zoo.Main, reference: Any, tiny_draft_folder: str) -> None:
    ids = list(b"Once upon a time")
    expected = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos).generate(ids, max_new_tokens=12).tokens
    names = ["generate", f"assisted-{tiny_draft_folder}", "lookup"]
    with peers.load_peers(names, main, reference, ids) as found:
        assert [peer.name for peer in found] == names
        for peer in found:
            assert peer.call, peer.missing
            assert peer.call(ids, 12) == expected, peer.name
        plain, assisted, lookup = (peer.nbytes for peer in found)
    assert plain == lookup == sum(p.numel() for p in reference.parameters()) * 4
    assert assisted > plain


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_flashspec_gives_the_plain_loops_tokens(
    main: zoo.Main, reference: Any, tiny_draft_folder: str, kind: str
) -> None:
    if importlib.util.find_spec("flashspec") is None:
        pytest.skip("the extra `bench` is not installed")
    ids = list(b"Once upon a time")
    expected = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos).generate(ids, max_new_tokens=12).tokens
    name = "flashspec-" + (kind if kind == "ngram" else tiny_draft_folder)
    with peers.load_peers([name], main, reference, ids) as (peer,):
        assert peer.call, peer.missing
        assert peer.call(ids, 12) == expected


def test_what_is_not_installed_is_said_with_what_to_do(
    main: zoo.Main, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("flashspec", "openvino_genai"):
        monkeypatch.setitem(sys.modules, package, None)
    with peers.load_peers(["flashspec-ngram", "openvino", "generate"], main, reference) as found:
        flash, vino, generate = found
    assert (flash.call, vino.call) == (None, None)
    assert "not installed" in flash.missing
    assert "specdec-lab[bench]" in flash.missing
    assert "not installed" in vino.missing
    assert generate.call is not None


def test_what_fails_in_its_trial_is_said_with_its_reason(
    main: zoo.Main, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **settings: Any) -> list[int]:
        raise AttributeError("no attribute 'crop'\nand more")

    monkeypatch.setattr(peers, "generate", broken)
    with peers.load_peers(["lookup"], main, reference) as (peer,):
        assert peer.call is None
        assert peer.missing == "cannot run: AttributeError: no attribute 'crop'"
    with peers.load_peers(["assisted-1:4"], main, reference) as (peer,):
        assert peer.call is None


def test_unknown_peers_are_refused(main: zoo.Main, reference: Any) -> None:
    for name in ("vllm", "assisted-1:9", "assisted-", "flashspec"):
        with pytest.raises(UnknownNameError, match="flashspec-ngram"):
            peers.check_name(name)


# ---- the plan


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--prompts", "0"], 2, "prompts = 0"),
        (["--max_new_tokens", "-3"], 2, "max_new_tokens = -3"),
        (["--temperature", "-1"], 2, "temperature = -1"),
        (["--top_p", "0"], 2, "top_p = 0"),
        (["--seed", "-1"], 2, "seed = -1"),
        (["--arms", "1:9"], 2, "no arm '1:9'"),
        (["--arms", str(Path(__file__).parent)], 2, "a draft's folder, with its config.json"),
        (["--arms", "ngram", "ngram"], 2, "all different"),
        (["--tasks", "json", "json"], 2, "all different"),
        (["--tasks", "poems"], 2, "poems"),
    ],
)
def test_bad_arguments_are_told_before_a_model_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, says: str
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(zoo, "load_main", never)
    got = cli.main(["bench", *words])
    assert (got, says in capsys.readouterr().err) == (code, True)


def test_a_plan_sorts_its_arms(tiny_draft_folder: str) -> None:
    plan = bench.Plan(arms=("generate", "1:4", tiny_draft_folder, "flashspec-ngram", "fastest"))
    assert plan.ours == ["1:4", tiny_draft_folder, "fastest"]
    assert plan.others == ["generate", "flashspec-ngram"]
    with pytest.raises(SettingError, match="arms"):
        bench.Plan(arms=())


def test_spec_bench_runs_by_category(main: zoo.Main) -> None:
    groups = bench.Arms(main, bench.Plan(("spec_bench",), ("ngram",), prompts=2))._grouped("spec_bench")
    assert len(groups) == 10
    assert {"writing", "math_reasoning", "qa"} <= set(groups)
    assert {len(rows) for rows in groups.values()} == {2}
    assert all(row.category == name for name, rows in groups.items() for row in rows)


def test_the_fastest_arm_drafts_as_its_profile_says(main: zoo.Main, monkeypatch: pytest.MonkeyPatch) -> None:
    by_task = {"code": Drafting("ngram", 5, {"longest": 2}), "other": Drafting("ngram", 3)}
    monkeypatch.setattr(bench, "load_profile", lambda name: Profile(name, "made up", by_task))
    loaded: dict[str, Any] = {}
    code, prose, again = (bench.decoder_of("fastest", main, task, loaded) for task in ("code", "prose", "json"))
    assert (code.draft_length, prose.draft_length) == (5, 3)
    assert code.drafter is not prose.drafter  # other options
    assert prose.drafter is again.drafter


def test_the_shipped_profile_and_every_arm_name_a_drafting() -> None:
    for name in (*bench.OURS, "plain"):
        for task in bench.TASKS:
            assert bench.drafting_of(name, task).draft


# ---- a whole run


@pytest.fixture
def result(
    main: zoo.Main, reference: Any, prompts: str, tiny_draft_folder: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    monkeypatch.setattr(bench, "process_memory", lambda main, arm: {"held": 2**20, "resident": 2**21, "peak": 2**21})
    monkeypatch.setattr(bench, "SAMPLED", ("ngram",))
    monkeypatch.setitem(sys.modules, "flashspec", None)
    arms = ("generate", "lookup", "flashspec-ngram", tiny_draft_folder, "ngram", "1:4")
    plan = bench.Plan((prompts,), arms, prompts=3, max_new_tokens=10)
    return bench.bench(main, reference, plan, lambda line: None)


def test_one_run_covers_every_arm_and_says_what_is_missing(result: dict[str, Any], tiny_draft_folder: str) -> None:
    result = json.loads(json.dumps(result))
    assert set(result["missing"]) == {"flashspec-ngram", "1:4"}
    assert "the draft" in result["missing"]["1:4"]  # it belongs to the bundled main model
    arms = {mode: {row["arm"] for row in result["rows"] if row["mode"] == mode} for mode in ("greedy", "sampled")}
    assert arms["greedy"] == {"plain", "generate", "lookup", tiny_draft_folder, "ngram"}
    assert arms["sampled"] == {"plain", "ngram"}
    for row in result["rows"]:
        assert row["prompts"] == {"prose": 2, "json": 1}[row["task"]]
        assert row["throughput"] > 0
        if row["mode"] == "greedy":
            assert row["same"] == row["prompts"], row["arm"]
        if row["arm"] == "plain":
            assert row["speedup"]["value"] == 1
            assert row["tau"]["value"] == 1
            assert row["alpha"]["value"] is None
        elif row["system"] == "other":
            assert "tau" not in row
        else:
            assert sum(row[f"{part}_share"] for part in ("draft", "verify", "other")) == pytest.approx(1)
            assert row["memory_bytes"] > 0
    assert result["plain_loop"]["prompts"] == 3
    assert result["verify_curves"]["k"][0] == 1
    assert {"before", "after"} == set(result["quiet"])
    assert result["machine"]["torch"]


def test_the_words_hold_the_numbers(result: dict[str, Any]) -> None:
    text = scoreboard.markdown(result)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == len(result["rows"]) + 2 * 2  # a head for each of two modes
    assert "* flashspec-ngram: not installed" in text
    assert "| ngram, γ = 8 |" in text
    assert "| plain |" in text
    assert "Temperature 0.2, top-p 0.9" in text
    details = scoreboard.details(result)
    assert "plain loop over transformers.generate" in details
    assert "memory with plain: held 1 MiB" in details


def test_a_system_that_fails_on_the_way_is_dropped_and_told(main: zoo.Main, prompts: str) -> None:
    calls = []

    def call(ids: Sequence[int], max_new_tokens: int) -> list[int]:
        calls.append(ids)
        if len(calls) > 2:
            raise RuntimeError("shapes differ")
        return [1]

    arms = bench.Arms(main, bench.Plan((prompts,), ("lookup", "ngram"), temperature=0.0))
    items = arms.items()
    arms.add_peers([peers.Peer("lookup", call)])
    runs = bench.measure(arms, items, 4)
    assert arms.missing == {"lookup": "cannot run: RuntimeError: shapes differ"}
    assert {run.arm for run in runs} == {"plain", "ngram"}
    assert len(runs) == 2 * 3


def test_the_order_of_arms_rotates(main: zoo.Main, prompts: str) -> None:
    arms = bench.Arms(main, bench.Plan((prompts,), ("ngram",), temperature=0.0))
    runs = bench.measure(arms, arms.items(), 4)
    assert [run.arm for run in runs] == ["plain", "ngram", "ngram", "plain", "plain", "ngram"]
    assert [run.item.task for run in runs] == ["prose"] * 4 + ["json"] * 2


def test_a_schema_is_kept_to_in_its_mode(
    main: zoo.Main, reference: Any, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(bench, "SCHEMA", ("ngram",))
    plan = bench.Plan((prompts,), ("ngram",), max_new_tokens=40, temperature=0.0)
    arms = bench.Arms(main, plan)
    items = arms.items()
    assert [item.prompt.id for item in items if item.mode == "schema"] == ["j"]
    rows = bench.summarise(bench.measure(arms, items, plan.max_new_tokens), {})
    constrained = [row for row in rows if row["mode"] == "schema"]
    assert [row["arm"] for row in constrained] == ["plain", "ngram"]
    for row in constrained:
        assert (row["same"], row["complete"], row["validates"]) == (1, 1, 1)
    text = scoreboard.markdown({"rows": rows, "plan": vars(plan), "missing": {}, "quiet": QUIET, "machine": MACHINE})
    assert "validate against their schema, json: 1 of 1." in text


def test_a_schema_that_cannot_be_a_constraint_is_told(main: zoo.Main, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"id": "x", "task": "json", "prompt": "Go.", "schema": {"type": "nonsense"}}) + "\n")
    arms = bench.Arms(main, bench.Plan((str(file),), ("grammar",), temperature=0.0))
    assert [item.mode for item in arms.items()] == ["greedy"]
    assert "schema of x" in arms.missing


# ---- numbers


QUIET = {"before": {"quiet": True}, "after": {"quiet": True}}
MACHINE = {"cpu": "a CPU", "gpu": "", "threads": 2, "torch": "2", "transformers": "5", "date": "2026-01-01T00:00"}


def run(arm: str, prompt: str, tokens: list[int], seconds: float, steps: int, mode: str = "greedy") -> bench.Run:
    """A text of `tokens` in `steps` steps that draft a token each; half of the time is drafting."""
    per_step = seconds / steps / 4
    made = [
        Step([1], [-1], [0.5], [1.0], [1.0], [0.5], [0.1], ["accepted"], 2, "bonus", 0.5, 0.5, 0.1, 1, 1,
             draft_s=2 * per_step, verify_s=per_step, other_s=per_step)
        for _ in range(steps)
    ]  # fmt: skip
    trace = Trace(3, steps=made, tokens=tokens, memory_bytes=7)
    item = bench.Item(mode, "prose", Prompt(prompt, "prose", "Go."), [1, 2])
    return bench.Run(item, arm, seconds, tokens, Generation("", tokens, trace))


def test_speedups_are_ratios_of_sums_with_and_without_loops() -> None:
    fresh, loop = list(range(20)), [1, 2, 3, 4] * 5
    texts = {f"p{i}": fresh for i in range(6)} | {"q": loop}
    runs = [run("plain", name, tokens, 2.0, 20) for name, tokens in texts.items()]
    runs += [run("1:4", name, tokens, 0.2 if name == "q" else 1.0, 10) for name, tokens in texts.items()]
    plain, drafted = bench.summarise(runs, {})
    assert drafted["speedup"]["value"] == pytest.approx(7 * 2 / 6.2)
    assert drafted["loop_free"]["value"] == pytest.approx(2)
    assert drafted["loop_free"]["prompts"] == 6
    assert drafted["loop_free"]["low"] == pytest.approx(2)  # every prompt the same
    assert drafted["speedup"]["low"] < drafted["speedup"]["value"] < drafted["speedup"]["high"]
    assert drafted["tau"]["value"] == 2
    assert drafted["alpha"]["value"] == 1
    assert [drafted[f"{part}_share"] for part in ("draft", "verify", "other")] == pytest.approx([0.5, 0.25, 0.25])
    # 6.2 s, half of it drafting 70 tokens, over plain steps: 14 s, a quarter of it for 140 forwards
    assert drafted["c"] == pytest.approx((3.1 / 70) / (14 / 4 / 140))
    assert plain["repetition"] == pytest.approx((repeated_ngrams(loop) or 0) / 7)
    assert drafted["same"] == 7


def test_loops_are_judged_by_the_greedy_text_of_the_mode() -> None:
    steady, loop = list(range(20)), [1] * 20
    runs = [run("plain", "p", loop, 1.0, 20), run("plain", "q", steady, 1.0, 20)]
    runs += [run("plain", name, steady, 1.0, 20, "sampled") for name in ("p", "q")]
    runs += [run("plain", "p", steady, 1.0, 20, "schema"), run("plain", "q", steady, 1.0, 20, "schema")]
    rows = bench.summarise(runs, {})
    assert {row["mode"]: row["loop_free"]["prompts"] for row in rows} == {"greedy": 1, "sampled": 1, "schema": 2}
    assert {row["mode"]: row["same"] for row in rows} == {"greedy": 2, "sampled": None, "schema": 2}


def test_where_all_outputs_loop_there_is_no_loop_free_number() -> None:
    (row,) = bench.summarise([run("plain", "p", [1] * 20, 1.0, 20)], {})
    assert row["loop_free"] == {"value": None, "low": None, "high": None, "prompts": 0}


# ---- README


def test_the_table_stands_between_its_marks(result: dict[str, Any], tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results" / "bench.json"
    readme.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n")
    scoreboard.publish(result, results, readme)
    once = readme.read_text()
    assert once == f"before\n<!-- bench -->\n{scoreboard.markdown(result)}\n<!-- /bench -->\nafter\n"
    assert scoreboard.markdown(json.loads(results.read_text())) == scoreboard.markdown(result)
    scoreboard.publish(result, results, readme)
    assert readme.read_text() == once


def test_a_readme_without_marks_is_left_alone(result: dict[str, Any], tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing\n")
    with pytest.raises(DataError, match="needs one line"):
        scoreboard.publish(result, tmp_path / "bench.json", readme)
    assert readme.read_text() == "nothing\n"
    assert not (tmp_path / "bench.json").exists()


def test_results_are_stored_before_the_readme(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results" / "bench.json"
    readme.write_text("<!-- bench -->\n<!-- /bench -->\n")

    def broken(result: Any) -> str:
        raise DataError("no table")

    monkeypatch.setattr(scoreboard, "markdown", broken)
    with pytest.raises(DataError, match="no table"):
        scoreboard.publish(result, results, readme)
    assert json.loads(results.read_text())["rows"]


def test_a_place_that_cannot_be_written_is_told_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench -->\n<!-- /bench -->\n")
    with pytest.raises(DataError, match="cannot be written"):
        scoreboard.require_place(readme / "bench.json", readme)
    assert list(tmp_path.iterdir()) == [readme]

    def refuse() -> None:
        raise DataError("no marks")

    def never(*args: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(scoreboard, "require_place", refuse)
    monkeypatch.setattr(zoo, "load_main", never)
    assert cli.main(["bench", "--readme"]) == 1
    assert "no marks" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_result_is_printed_before_it_is_published(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    main: zoo.Main,
    reference: Any,
    words: list[str],
) -> None:
    def broken(result: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(scoreboard, "require_place", lambda: "")
    monkeypatch.setattr(scoreboard, "publish", broken)
    monkeypatch.setattr(zoo, "load_main", lambda: main)
    monkeypatch.setattr(zoo, "fetch_bundled", lambda: None)
    monkeypatch.setattr(zoo, "read", lambda folder: (reference, None))
    monkeypatch.setattr(bench, "bench", lambda *args: {"rows": [1]})
    assert cli.main(["bench", "--readme", *words]) == 1
    out, err = capsys.readouterr()
    assert (out, "the disk is full" in err) == ('{"rows": [1]}\n', True)


def test_readme_shows_the_stored_result() -> None:
    text = scoreboard.README.read_text(encoding="utf-8")
    assert [text.count(mark) for mark in scoreboard.MARKS] == [1, 1]
    if scoreboard.RESULTS.exists():
        start, end = scoreboard.MARKS
        shown = text.partition(f"{start}\n")[2].partition(f"\n{end}")[0]
        assert shown == scoreboard.markdown(json.loads(scoreboard.RESULTS.read_text(encoding="utf-8")))


def test_a_fresh_process_tells_its_memory(tiny_folder: str) -> None:
    sizes = bench.process_memory(tiny_folder, "ngram")
    assert 0 < sizes["held"] < sizes["resident"] <= sizes["peak"]
    with pytest.raises(SpecdecError, match="the memory of nope could not be measured: .*no model 'nope'"):
        bench.process_memory(tiny_folder, "nope")
