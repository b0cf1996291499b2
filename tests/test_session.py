"""Runs beside the plain loop: the numbers of `generate`, what is decoded and loaded once, what is refused."""

import gc
import io
import json
import shlex
import shutil
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import papermill.cli
import pytest

from specdec_lab import cli, session, theory
from specdec_lab.decoding import Decoder, Generation
from specdec_lab.errors import ModelError, SettingError, SpecdecError, UnknownNameError
from specdec_lab.experiment import load
from specdec_lab.metrics import METRICS
from specdec_lab.models import zoo
from specdec_lab.models.zoo import Main
from specdec_lab.notebooks import project_root, run_notebook
from specdec_lab.session import Outcome, Progress, Session, Setting, repeat, table
from specdec_lab.theory import VerifyCurve

PROMPT = "Tell me of the sea."
CURVE = VerifyCurve((1, 33), (1.0, 3.0), (1.0, 3.0))
CLOCK = {"throughput", "time_to_first_token", "overhead_share"}
BESIDE = {"speculative_speedup", "end_to_end_speedup", "draft_cost_ratio", "memory_growth"}  # `generate` runs no plain
NUMBERS = [name for name in METRICS if name not in CLOCK | BESIDE]


@pytest.fixture
def tiny(tiny_folder: str, noisy_folder: str) -> Setting:
    return Setting(PROMPT, main=tiny_folder, draft=noisy_folder, max_new_tokens=24)


@pytest.fixture(scope="module")
def shared() -> Session:
    return Session()


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The main models whose curve was asked for; it is not measured."""
    asked: list[str] = []

    def told(model: Any, *_: Any, **__: Any) -> VerifyCurve:
        asked.append(model.name)
        return CURVE

    monkeypatch.setattr(session, "measure_verify_curve", told)
    return asked


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What decoded, in order: "plain" or the draft's name; whether it came to its end, and that it is over."""
    order: list[str] = []
    stream = Decoder.stream

    def watched(self: Decoder, *args: Any, **settings: Any) -> Iterator[Generation]:
        name = "draft" if self.draft_length else "plain"
        order.append(name)
        try:
            yield from stream(self, *args, **settings)
            order.append(f"{name} whole")
        finally:
            order.append(f"{name} over")

    monkeypatch.setattr(Decoder, "stream", watched)
    return order


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that were loaded."""
    names: list[str] = []

    def counted(load: Any, name: str, *args: Any, **options: Any) -> Any:
        names.append(name)
        return load(name, *args, **options)

    for each in ("load_main", "load_drafter"):
        monkeypatch.setattr(zoo, each, partial(counted, getattr(zoo, each)))
    return names


def last(what: Session, setting: Setting) -> Outcome:
    outcome = list(what.run(setting))[-1]
    assert isinstance(outcome, Outcome)
    return outcome


def generated(capsys: pytest.CaptureFixture[str], setting: Setting) -> dict[str, Any]:
    """What `specdec-lab generate --json` says of a setting."""
    words = ["generate", "--json", "--prompt", setting.prompt, "--main", setting.main, "--draft", setting.draft]
    names = ["draft_length", "candidate_count", "acceptance_rule", "acceptance_threshold", "temperature", "seed"]
    for name in [*names, "max_new_tokens"]:
        if getattr(setting, name) is not None and name not in setting.idle:
            words += [f"--{name}", str(getattr(setting, name))]
    assert cli.main(words) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "tree": {"candidate_count": 4, "draft_length": 6},
    "threshold": {"acceptance_rule": "threshold", "acceptance_threshold": 0.3},
    "block": {"acceptance_rule": "block", "acceptance_threshold": 0.01, "temperature": 0.9, "seed": 2},
    "lookup": {"draft": "ngram", "max_new_tokens": 64},
    "plain": {"draft": "none", "temperature": 0.9, "seed": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_those_of_generate(
    way: str, tiny: Setting, shared: Session, capsys: pytest.CaptureFixture[str], curves: list[str]
) -> None:
    setting = replace(tiny, **WAYS[way])
    outcome, expected = last(shared, setting), generated(capsys, setting)
    assert outcome.made.tokens == expected["tokens"]
    assert outcome.made.text == expected["text"]
    assert {n: outcome.metrics[n] for n in NUMBERS} == {n: expected["metrics"][n] for n in NUMBERS}


def test_numbers_are_those_of_generate_for_the_bundled_pair(bundled: Main, capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting("Name three rivers of Europe.", max_new_tokens=16)
    outcome = next(now for now in Session("cpu", "float32").run(setting) if isinstance(now, Outcome))
    expected = generated(capsys, setting)
    assert (outcome.made.tokens, outcome.made.text) == (expected["tokens"], expected["text"])
    assert {n: outcome.metrics[n] for n in NUMBERS} == {n: expected["metrics"][n] for n in NUMBERS}
    assert outcome.metrics["tokens_per_main_forward"] > 1
    assert outcome.differs_at is None


# ---- a session


def test_an_outcome_comes_beside_the_plain_loop_and_again_with_the_curve(tiny: Setting, curves: list[str]) -> None:
    mine = Session()
    seen = list(mine.run(tiny))
    outcomes = [now for now in seen if isinstance(now, Outcome)]
    assert [outcome.curve for outcome in outcomes] == [None, CURVE]
    assert outcomes[0].made is outcomes[1].made
    assert outcomes[0].differs_at is None
    assert (outcomes[0].prediction, outcomes[0].levers, outcomes[0].whatif) == (None, [], None)
    found = outcomes[1].metrics
    expected = theory.speedup(found["acceptance_probability"], 4, found["draft_cost_ratio"], CURVE)
    assert outcomes[1].prediction == expected
    assert len(outcomes[1].levers) >= 3
    assert outcomes[1].whatif is not None
    doing = [now.doing for now in seen if isinstance(now, Progress)]
    assert doing[:3] == [f"loading the main model {tiny.main}", f"loading the draft {tiny.draft}", "reading the prompt"]
    assert "measuring what verification costs" in doing
    for way, whole in (("decoding: ", outcomes[0].made), ("decoding without", outcomes[0].plain)):
        now = [now for now in seen if isinstance(now, Progress) and now.doing.startswith(way)]
        growing = [len(each.made.tokens) for each in now if each.made]
        assert growing == sorted(growing)
        assert growing[0] < growing[-1] == len(whole.tokens)
    again = list(mine.run(tiny))
    assert [now.curve for now in again if isinstance(now, Outcome)] == [CURVE]
    assert len(curves) == 1


def test_the_plain_loop_answers_a_prompt_once(tiny: Setting, decoded: list[str], curves: list[str]) -> None:
    mine = Session()

    def began(**changes: Any) -> list[str]:
        decoded.clear()
        list(mine.run(replace(tiny, **changes)))
        return [name for name in decoded if " " not in name]

    assert began() == ["draft", "plain"]
    assert began(draft="ngram", draft_length=2) == ["draft"]
    assert began(acceptance_rule="threshold", candidate_count=3) == ["draft"]
    assert began(task="json", seed=4) == ["draft"], "neither makes a difference to greedy decoding"
    for changes in ({"prompt": "Other."}, {"max_new_tokens": 8}, {"temperature": 0.5}, {"temperature": 0.5, "seed": 1}):
        assert began(**changes) == ["draft", "plain"], changes
        assert began(**changes, draft="ngram") == ["draft"], changes
    assert began(draft="none", prompt="Third.") == ["plain"]
    assert began(prompt="Third.") == ["draft"]


def test_sampled_replies_are_compared_with_the_same_seed(tiny: Setting, shared: Session, curves: list[str]) -> None:
    warm = replace(tiny, temperature=0.8, seed=3)
    expected = last(Session(), replace(warm, draft="none")).made.tokens
    assert last(shared, warm).plain.tokens == expected
    assert last(shared, replace(warm, seed=4)).plain.tokens != expected


def test_a_model_is_loaded_once(tiny: Setting, loaded: list[str], curves: list[str]) -> None:
    mine = Session()
    for changes in ({}, {"draft_length": 2}, {"acceptance_rule": "threshold"}, {"prompt": "Other."}, {"draft": "none"}):
        last(mine, replace(tiny, **changes))
    assert loaded == [tiny.main, tiny.draft]


def test_the_plain_loop_alone(tiny: Setting, loaded: list[str], curves: list[str]) -> None:
    seen = list(Session().run(replace(tiny, draft="none")))
    outcome = seen[-1]
    assert isinstance(outcome, Outcome)
    assert outcome.plain is outcome.made
    assert outcome.metrics["speculative_speedup"] == 1
    assert outcome.unexplained == "nothing was drafted"
    assert (outcome.differs_at, outcome.prediction, outcome.levers, outcome.whatif) == (None, None, [], None)
    assert loaded == [tiny.main]
    assert not any("draft" in now.doing for now in seen if isinstance(now, Progress))


def test_another_main_model_takes_the_place_of_the_old_one(
    tiny: Setting, loaded: list[str], decoded: list[str], curves: list[str]
) -> None:
    mine = Session()
    last(mine, tiny)
    old = weakref.ref(mine._main.model)  # type: ignore[union-attr]
    swapped = replace(tiny, main=tiny.draft, draft=tiny.main)
    outcome = last(mine, swapped)
    gc.collect()
    assert old() is None
    assert outcome.made.tokens == last(Session(), swapped).made.tokens
    loaded.clear()
    decoded.clear()
    last(mine, tiny)
    assert loaded == [tiny.main, tiny.draft]
    assert "plain" in decoded


@pytest.mark.parametrize("during", ["draft", "plain"])
def test_closing_stops_decoding(during: str, tiny: Setting, decoded: list[str], curves: list[str]) -> None:
    mine = Session()
    running = mine.run(tiny)
    for _ in running:
        if during in decoded:
            break
    running.close()  # type: ignore[attr-defined]
    assert decoded[-1] == f"{during} over"
    assert f"{during} whole" not in decoded
    assert last(mine, tiny).differs_at is None
    assert decoded[-1] == "plain over", "what was cut short is not kept as the plain loop's reply"
    assert decoded[-2] == "plain whole"


def test_what_cannot_run_is_told_and_the_session_goes_on(
    tiny: Setting, tmp_path: Path, tiny_draft_folder: str, curves: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    odd = Path(shutil.copytree(tiny_draft_folder, tmp_path / "odd"))
    file = odd / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"\\u2603"'))
    cases: list[tuple[dict[str, Any], type[SpecdecError], str]] = [
        ({"prompt": "  \n"}, SettingError, "prompt = .*: allowed is text or token ids that are not empty"),
        ({"prompt": "x" * 600}, SettingError, "tokens': allowed is 1 … 511 tokens, the model's context less one"),
        ({"draft": str(tmp_path / "none here")}, ModelError, "there is no such file or folder; .* holds: "),
        ({"draft": "none/here/at/all"}, ModelError, "a hub id reads owner/name; there is: bundled"),
        ({"draft": str(odd)}, ModelError, "differ in vocabulary: token 97 is '☃' there and 'a' here"),
        ({"draft": "1:4"}, ModelError, "bundled"),
        ({"main": str(tmp_path / "empty")}, ModelError, "has no config.json; it holds: nothing"),
        ({"main": str(tmp_path / "broken")}, ModelError, "cannot load a causal language model from .*broken"),
        ({"main": ""}, ModelError, "has no config.json"),
    ]
    mine = Session()
    for changes, kind, said in cases:
        with pytest.raises(kind, match=said):
            list(mine.run(replace(tiny, **changes)))
        assert last(mine, tiny).differs_at is None, changes


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"threads": 0}, "threads"),
        ({"threads": 1.5}, "threads"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "i"}, "dtype"),
    ],
)
def test_a_machine_that_is_not_there(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingError) as error:
        Session(**settings)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"draft": "none"}, "nothing was drafted"),
        ({"candidate_count": 3}, "this is a tree"),
        ({"acceptance_rule": "block", "acceptance_threshold": 0.0}, "and block does not"),
        ({"acceptance_rule": "sequence"}, "and sequence does not"),
    ],
)
def test_what_theory_says_nothing_of(
    changes: dict[str, Any], why: str, tiny: Setting, shared: Session, curves: list[str]
) -> None:
    outcome = last(shared, replace(tiny, **changes))
    assert why in outcome.unexplained
    assert (outcome.prediction, outcome.levers, outcome.whatif) == (None, [], None)


def test_theory_says_nothing_of_a_draft_that_holds_back(tiny: Setting, shared: Session, curves: list[str]) -> None:
    outcome = last(shared, replace(tiny, draft="ngram", draft_length=8, max_new_tokens=64))
    assert 0 < outcome.metrics["coverage"] < 0.8
    assert outcome.prediction is None
    assert outcome.whatif is not None
    assert outcome.levers == outcome.whatif.levers(8)


def test_a_token_keeps_the_space_before_it() -> None:
    """SentencePiece drops the space of the first token it decodes."""
    pieces = {1: "\u2581like", 2: "s", 3: "\ufffd"}

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces[i] for i in ids).replace("\u2581", " ").removeprefix(" ")

    assert [Progress("", decode=decode).token(i) for i in (1, 2, 3)] == [" like", "s", "\ufffd"]


# ---- settings

CHAIN, SEED = {"draft_length", "candidate_count", "acceptance_rule", "acceptance_threshold"}, {"seed"}
FORM, LEVEL = {"candidate_count"}, {"acceptance_threshold"}
WARM = {"temperature": 0.5}
IDLE: list[tuple[dict[str, Any], set[str]]] = [
    ({}, LEVEL | SEED),
    (WARM, LEVEL),
    ({"draft": "none"}, CHAIN | SEED),
    ({"draft": "none", "acceptance_rule": "block"}, CHAIN | SEED),
    ({"draft": "none", **WARM}, CHAIN),
    ({"draft": "ngram"}, FORM | LEVEL | SEED),
    ({"draft": "grammar", **WARM}, FORM | LEVEL),
    ({"draft": "ngram+parallel", **WARM}, FORM | LEVEL),
    ({"draft": "ngram+feature", **WARM}, LEVEL),
    ({"acceptance_rule": "threshold"}, SEED),
    ({"acceptance_rule": "lenience", **WARM}, set()),
    ({"acceptance_rule": "block"}, set()),
    ({"acceptance_rule": "block", "draft": "ngram"}, FORM | SEED),
    ({"acceptance_rule": "sequence"}, {"draft_length"}),
    ({"acceptance_rule": "sequence", **WARM}, {"draft_length"}),
]


@pytest.mark.parametrize(("changes", "names"), IDLE)
def test_what_is_idle_makes_no_difference(changes: dict[str, Any], names: set[str]) -> None:
    setting = Setting(PROMPT, **changes)
    assert set(setting.idle) == names
    assert all(setting.idle.values())
    usual: dict[str, Any] = {
        "draft_length": 4,
        "candidate_count": 1,
        "acceptance_rule": "lossless",
        "acceptance_threshold": None,
    }
    odd: dict[str, Any] = {
        "draft_length": 999,
        "candidate_count": 999,
        "acceptance_rule": "nonsense",
        "acceptance_threshold": 999.0,
    }
    assert replace(setting, **{n: odd[n] for n in names & usual.keys()}).arm == setting.arm
    for name in usual.keys() - names:
        with pytest.raises(SpecdecError):
            _ = replace(setting, **{name: odd[name]}).arm


def test_an_idle_seed_draws_nothing_and_another_does(tiny: Setting, shared: Session, curves: list[str]) -> None:
    block = {"acceptance_rule": "block", "acceptance_threshold": 0.0}

    def drafted(**changes: Any) -> list[list[int]]:
        return [step.drafted for step in last(shared, replace(tiny, **changes)).trace.steps]

    for changes in ({}, {"draft": "ngram", **block}, {"acceptance_rule": "typical"}):
        assert "seed" in replace(tiny, **changes).idle
        assert drafted(**changes, seed=1) == drafted(**changes, seed=2)
    assert drafted(**block, seed=1) != drafted(**block, seed=2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"draft": ""}, "draft"),
        ({"draft_length": 65}, "draft_length"),
        ({"draft_length": -1}, "draft_length"),
        ({"candidate_count": 9}, "candidate_count"),
        ({"acceptance_rule": "threshold", "acceptance_threshold": 1.5}, "acceptance_threshold"),
        ({"acceptance_rule": "lenience"}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": 1.0, "seed": -1}, "seed"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], field: str, tiny: Setting) -> None:
    with pytest.raises(SettingError) as error:
        list(Session().run(replace(tiny, **changes)))
    assert error.value.field == field


def test_a_rule_that_does_not_exist_is_refused_before_a_model_loads(tiny: Setting, loaded: list[str]) -> None:
    with pytest.raises(UnknownNameError, match="no acceptance rule 'best'; there is: block"):
        list(Session().run(replace(tiny, acceptance_rule="best")))
    assert loaded == []


# ---- runs that were kept


def parsed(command: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What papermill's command line makes of a command."""
    got: dict[str, Any] = {}
    program, *words = shlex.split(command)
    assert program == "papermill"
    monkeypatch.setattr(papermill.cli, "execute_notebook", lambda **given: got.update(given))
    papermill.cli.papermill.main(words, standalone_mode=False)
    return got


NASTY = 'It\'s "$HOME", `id` & $(ls);\n\ttwo – lines \\n <b>☃</b> {x: 1} # end'


@pytest.mark.slow
def test_the_command_repeats_a_run_in_batch(
    tiny: Setting, tmp_path: Path, curves: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy: dict[str, Any] = {"acceptance_rule": "threshold", "acceptance_threshold": 0.05, "candidate_count": 2}
    setting = replace(tiny, prompt=NASTY, temperature=0.7, seed=3, max_new_tokens=16, **lossy)
    outcome = last(Session(), setting)
    got = parsed(repeat(setting, tmp_path / "it's a $folder"), monkeypatch)
    monkeypatch.undo()
    assert got["input_path"] == str(project_root() / "notebooks" / "02_experiment.ipynb")
    folders = {name: str(tmp_path / name) for name in ("results", "figures")}
    run_notebook("02_experiment", got["parameters"] | folders, tmp_path / "out.ipynb", quiet=True)
    rows = load(tmp_path / "results").set_index("draft")
    assert list(rows.loc[setting.draft, "tokens"]) == outcome.made.tokens
    assert list(rows.loc["none", "tokens"]) == outcome.plain.tokens != outcome.made.tokens
    assert rows.loc[setting.draft, "candidate_count"] == 2


def test_the_command_names_every_setting(
    tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: str
) -> None:
    given = parsed(repeat(Setting(NASTY, task="json", seed=7, max_new_tokens=9), tmp_path), monkeypatch)["parameters"]
    (file,) = tmp_path.glob("*.jsonl")
    assert json.loads(file.read_text()) == {"id": "explorer", "task": "json", "prompt": NASTY}
    expected = {
        "main": "bundled",
        "draft": "1:4",
        "draft_length": 4,
        "candidate_count": 1,
        "temperature": 0.0,
        "seed": 7,
    }
    assert given == {**expected, "task": str(file.resolve()), "prompts": 1, "max_new_tokens": 9}
    monkeypatch.chdir(Path(tiny_folder).parent)
    near = replace(tiny, main=Path(tiny_folder).name, acceptance_rule="typical", candidate_count=5, draft="ngram")
    machine = Session("cpu", "float32", 1).machine
    given = parsed(repeat(near, tmp_path, machine), monkeypatch)["parameters"]
    assert {name: given[name] for name in machine} == {"device": "cpu", "dtype": "float32", "threads": 1}
    assert given["main"] == tiny_folder
    assert (given["acceptance_rule"], given["acceptance_threshold"], given["candidate_count"]) == ("typical", 0.09, 1)
    assert parsed(repeat(replace(near, main="7"), tmp_path), monkeypatch)["parameters"]["main"] == "7", "a name"
    with pytest.raises(SettingError, match="the plain loop runs beside every one of them"):
        repeat(replace(tiny, draft="none"), tmp_path)


def test_a_table_has_a_row_for_each_run(tiny: Setting, shared: Session, curves: list[str]) -> None:
    import pandas as pd

    runs = [last(shared, replace(tiny, prompt=NASTY, **WAYS[way])) for way in ("greedy", "tree", "threshold", "plain")]
    rows = table(runs)
    assert list(rows["run"]) == [1, 2, 3, 4]
    again = pd.read_csv(io.StringIO(rows.to_csv(index=False)))
    assert list(again["prompt"]) == [NASTY] * 4
    for (_, row), each in zip(again.iterrows(), runs, strict=True):
        for name in METRICS:
            if not name.startswith("acceptance_by_position"):
                value = each.metrics[name]
                assert pd.isna(row[name]) if value is None else row[name] == pytest.approx(value, rel=1e-12), name
        assert row["same_as_plain"] == (each.made.tokens == each.plain.tokens)
    assert list(again["same_as_plain"]) == [True, True, False, True]
    assert again["predicted_speedup"][0] == pytest.approx(runs[0].prediction)
    assert list(again["predicted_speedup"].isna()) == [False, True, False, True]
    assert list(rows["candidate_count"].fillna(0)) == [1, 4, 1, 0], "what makes no difference stays empty"
    assert list(again["acceptance_threshold"].isna()) == [True, True, False, True]
    assert list(rows["text"]) == [each.made.text for each in runs]
