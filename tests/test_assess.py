"""Suitability: the arithmetic of the prediction, what is said of it, and how it is held against measurements."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import noisy_copy, save_model

from specdec_lab import assess as module
from specdec_lab import cli, decoding, theory
from specdec_lab.assess import (
    Plan,
    Prediction,
    Probe,
    Scored,
    Suitability,
    assess,
    break_even,
    exclusions,
    lines,
    load_drafts,
    replay,
    score_lines,
    score_predictions,
    split,
    tally,
    to_dict,
)
from specdec_lab.decoding import Decoder
from specdec_lab.drafting import Drafter, NGram, Row, Tree
from specdec_lab.errors import ArchitectureError, DataError, ModelError, SettingError, UnknownNameError
from specdec_lab.metrics import speculative_speedup, totals
from specdec_lab.models import zoo
from specdec_lab.sampling import Sampling
from specdec_lab.statistics import Interval
from specdec_lab.tasks import Prompt
from specdec_lab.theory import VerifyCurve
from specdec_lab.trace import Step, Trace

CURVE = VerifyCurve((1, 2, 5, 9), (1.0, 1.1, 1.3, 1.9), (0.01, 0.011, 0.013, 0.019))
FORWARD = 0.01  # seconds


def made(
    stays: Sequence[bool],
    draft_length: int,
    *,
    c: float = 0.1,
    loop: float = 0.0,
    off_curve: float = 0.0,
    idle: Sequence[int] = (),
) -> Trace:
    """A text of len(stays) tokens, decoded in steps of draft_length; stays[i]: whether a draft of token i stays.

    Times: c main forwards a drafted token; the curve, and off_curve more a drafted token; loop seconds a step, more
    with every drafted token. idle: tokens at which the drafter finds nothing.
    """
    trace, at, limit = Trace(prompt_tokens=4, finish="length"), 0, len(stays)
    while at < limit:
        planned = min(draft_length, limit - at - 1)
        n = 0 if at in idle else planned
        kept = next((i for i in range(n) if not stays[at + i]), n)
        fate = ["accepted"] * kept + ["rejected"] * (kept < n) + ["untried"] * (n - kept - 1)
        zeros = [0.0] * n
        step = Step(
            [1] * n, list(range(-1, n - 1)), zeros, zeros, zeros, zeros, zeros, fate, 1, "", 0.0, 0.0, 0.0, 0, 1
        )
        step.next_kind = "recovered" if kept < n else "bonus" if n else "plain"
        step.planned, step.emitted = planned, kept + 1
        step.draft_s, step.other_s = n * c * FORWARD, loop * (1 + n / 4)
        step.verify_s = FORWARD * (CURVE(n + 1) + off_curve * n)
        trace.steps.append(step)
        at += kept + 1
    trace.tokens = [1] * limit
    return trace


def texts(alpha: float, count: int = 8, length: int = 60, seed: int = 0) -> list[list[bool]]:
    return (np.random.default_rng(seed).random((count, length)) < alpha).tolist()


def probe_of(stays: Sequence[Sequence[bool]], draft_length: int, **about: Any) -> Probe:
    plain = [made(text, 0, loop=about.get("loop", 0.0)) for text in stays]
    return Probe("d", draft_length, plain, [made(text, draft_length, **about) for text in stays], CURVE, len(stays[0]))


def measured(stays: Sequence[Sequence[bool]], draft_length: int, **about: Any) -> float:
    plain = [made(text, 0, loop=about.get("loop", 0.0)) for text in stays]
    found = speculative_speedup(totals(made(text, draft_length, **about) for text in stays), totals(plain))
    assert found is not None
    return found


# ---- the arithmetic


@pytest.mark.parametrize("draft_length", [1, 2, 3, 5, 8])
def test_a_probe_of_another_length_gives_the_speed_up_of_the_same_text(draft_length: int) -> None:
    """Exact but for bonus tokens of the probe, which were never drafted; there are none with α = 0.5 and 30 tokens."""
    stays = texts(0.5)
    probe = probe_of(stays, 30)
    assert all(step.next_kind != "bonus" or len(step.drafted) < 30 for trace in probe.traces for step in trace.steps)
    got = probe.predict(draft_length)
    steps = [step for text in stays for step in made(text, draft_length).steps]
    drafted = sum(len(step.drafted) for step in steps)
    assert got.tau == pytest.approx(sum(map(len, stays)) / len(steps), rel=0.02)
    assert got.drafted == pytest.approx(drafted / len(steps), rel=0.02)
    assert got.speedup.value == pytest.approx(measured(stays, draft_length), rel=0.02)
    assert got.speedup.low < got.speedup.value < got.speedup.high


def test_no_bonus_token_makes_it_exact() -> None:
    stays = [([True] * 3 + [False]) * 15, ([True] + [False]) * 30]
    for draft_length in range(1, 9):
        got = probe_of(stays, 8).predict(draft_length)
        assert got.speedup.value == pytest.approx(measured(stays, draft_length), rel=1e-12)


@pytest.mark.parametrize("draft_length", [1, 2, 4, 8])
def test_it_is_theory_where_every_token_stays_with_the_same_chance(draft_length: int) -> None:
    """2211.17192's formula, with the measured curve; ends of texts, where less is drafted, are the difference."""
    got = probe_of(texts(0.7, count=40, length=400), 8).predict(draft_length)
    assert got.speedup.value == pytest.approx(theory.speedup(0.7, draft_length, 0.1, CURVE), rel=0.03)
    assert got.break_even == pytest.approx(theory.break_even(draft_length, 0.1, CURVE), abs=0.02)


def test_one_alpha_would_not_do() -> None:
    """Half a text that always stays and half that never does: what a step brings depends on where it begins."""
    stays = [[True] * 200 + [False] * 200]
    probe, got = probe_of(stays, 8), {}
    for draft_length in (2, 4):
        truth = measured(stays, draft_length)
        assert probe.predict(draft_length).speedup.value == pytest.approx(truth, rel=0.02)
        got[draft_length] = theory.speedup(probe.alpha.value, draft_length, 0.1, CURVE) / truth
    assert min(abs(error - 1) for error in got.values()) > 0.1


def test_at_its_own_length_it_is_the_probes_own_speed_up() -> None:
    about = {"c": 0.07, "loop": 0.002, "off_curve": 0.03, "idle": range(0, 60, 3)}
    probe = probe_of(texts(0.6), 6, **about)
    ours, plain = probe.sums
    assert probe.predict(6).speedup.value == pytest.approx(speculative_speedup(ours, plain), rel=1e-12)


def test_loop_and_what_the_curve_lacks_count_by_drafted_token() -> None:
    stays = [([True] * 3 + [False]) * 15]
    about = {"loop": 0.002, "off_curve": 0.05}
    for draft_length in (1, 2, 4):
        got = probe_of(stays, 8, **about).predict(draft_length)
        assert got.speedup.value == pytest.approx(measured(stays, draft_length, **about), rel=1e-9)
    assert got.speedup.value < probe_of(stays, 8).predict(4).speedup.value


def test_a_draft_that_holds_back_holds_back_at_other_lengths() -> None:
    stays = [([True] * 2 + [False]) * 20]
    idle = range(0, 60, 6)  # every second step
    probe = probe_of(stays, 8, idle=idle)
    steps = replay(probe.traces[0], 2, 60, 0.5)
    assert steps[0] == pytest.approx(sum(not step.drafted for step in made(stays[0], 2, idle=idle).steps))
    nothing = probe_of(stays, 8, idle=range(60)).predict(2)
    assert (nothing.drafted, nothing.tau, nothing.speedup.value) == (0, 1, pytest.approx(1))


def test_replay_at_the_probes_own_length_takes_its_steps(drafter: Drafter, main: zoo.Main) -> None:
    for one in (drafter, NGram()):
        for trace in decoded(main, one, 6):
            counts = np.bincount([len(step.drafted) for step in trace.steps], minlength=7)
            assert replay(trace, 6, TOKENS, 0.3).tolist() == pytest.approx(counts.tolist())


def test_break_even() -> None:
    assert break_even([0, 0, 1.0], 1.75) == pytest.approx(0.5)  # 1 + α + α² = 1.75
    assert break_even([0.5, 0.5], 1.25) == pytest.approx(0.5)  # half the steps draft nothing
    assert break_even([0, 1.0], 2.0) is None


def test_the_bound_is_what_would_gain_most() -> None:
    good = [([True] * 19 + [False]) * 3] * 6
    assert probe_of(texts(0.3), 8).predict(4).bound == "alpha"
    assert probe_of(good, 8, c=1.5).predict(4).bound == "c"
    assert probe_of(good, 8, c=0.01, off_curve=1.5).predict(4).bound == "verify"
    free = probe_of(texts(0.5), 8).predict(4)
    assert free.ideal["c"] == pytest.approx(probe_of(texts(0.5), 8, c=0.0).predict(4).speedup.value)
    assert all(value > free.speedup.value for value in free.ideal.values())


# ---- real loops of tiny models, on a clock that only the models move

TOKENS = 24
PROMPTS = [
    Prompt(f"p{i}", "json", text) for i, text in enumerate(("One", "abcabc", "Sea.", "{}", "def f", "x=1", "Hi"))
]


@pytest.fixture(scope="module")
def main(tiny_folder: str) -> zoo.Main:
    return zoo.load_main(tiny_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def noisy(tiny_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the main model with noise on its weights: it agrees with it now and then."""
    return noisy_copy(tiny_folder, tmp_path_factory.mktemp("noisy"))


@pytest.fixture(scope="module")
def drafter(main: zoo.Main, noisy: str) -> Drafter:
    return zoo.load_drafter(noisy, main)


@pytest.fixture
def clock(main: zoo.Main, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds that only forwards take: the main model's 1 + 0.05 a token, the draft's 0.2."""
    seconds = [0.0]
    for model, cost in ((main.model, lambda k: 0.95 + 0.05 * k), (drafter.model, lambda k: 0.2)):

        def timed(tokens: Any, *rest: Any, forward: Any = model.forward, cost: Any = cost) -> Any:
            seconds[0] += cost(tokens.shape[1])
            return forward(tokens, *rest)

        monkeypatch.setattr(model, "forward", timed)
    for where in (decoding, theory):
        monkeypatch.setattr(where, "now", lambda device: seconds[0])


def decoded(main: zoo.Main, one: Drafter, draft_length: int, **settings: Any) -> list[Trace]:
    decoder = Decoder(main.model, one, draft_length, main.tokenizer, eos=main.eos)
    return [decoder.generate(prompt.prompt, max_new_tokens=TOKENS, **settings).trace for prompt in PROMPTS]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7)])
def test_the_prediction_is_what_the_loop_then_does(
    main: zoo.Main, noisy: str, drafter: Drafter, clock: None, sampling: Sampling
) -> None:
    """Greedy, the same prompts at another length; sampled, the text is another one."""
    plan = Plan((noisy,), (2, 3, 8), TOKENS, sampling=sampling)
    found = assess(main, PROMPTS, plan, drafters=({noisy: drafter}, {}))
    settings = {"temperature": sampling.temperature}
    for draft_length in (2, 3, 8):
        sides = (totals(decoded(main, one, draft_length, **settings)) for one in (drafter, Drafter()))
        truth, got = speculative_speedup(*sides), found.prediction(noisy, draft_length)
        assert truth == pytest.approx(got.speedup.value, rel=0.05 if sampling.greedy else 0.2)
        assert got.speedup.known
    (only,) = found.drafts
    assert only.c == pytest.approx(0.2, rel=0.05)
    assert 0 < only.alpha.value < 1
    assert only.overhead == pytest.approx(0)
    assert only.coverage is not None
    assert only.coverage > 0.9  # nothing is drafted behind an end of sequence


def test_predictions_are_scored_on_prompts_and_lengths_of_their_own(
    main: zoo.Main, noisy: str, drafter: Drafter, clock: None
) -> None:
    plan, loaded = Plan((noisy, "ngram"), (2, 3, 8), TOKENS), {noisy: drafter, "ngram": NGram()}
    found = assess(main, PROMPTS[:5], plan, name="mine", drafters=(loaded, {}))
    scored = score_predictions(main, found, PROMPTS[5:], (2, 3), drafters=loaded)
    assert [(each.draft, each.draft_length) for each in scored] == [(d, n) for d in (noisy, "ngram") for n in (2, 3)]
    sides = (totals(decoded(main, one, 3)[5:]) for one in (drafter, Drafter()))
    assert scored[1].measured.value == pytest.approx(speculative_speedup(*sides))
    assert scored[1].predicted == found.prediction(noisy, 3).speedup


def test_a_wrong_prediction_is_told_as_wrong() -> None:
    """Negative control: a draft that is predicted to double the speed and halves it."""
    yes, no = Interval(2.0, 1.8, 2.2, 6), Interval(0.5, 0.4, 0.6, 6)
    wrong, right, low = (
        Scored("json", "d", 2, yes, no),
        Scored("json", "d", 4, yes, yes),
        Scored("json", "d", 6, no, yes),
    )
    assert (wrong.error, wrong.right, right.error, right.right) == (3.0, False, 0.0, True)
    assert (low.error, low.right) == (-0.75, False)
    assert tally([wrong, right, low]) == {"settings": 3, "median_error": 0.75, "right": 1}
    said = "\n".join(score_lines([wrong, right, low]))
    assert said.count("WRONG") == 2
    assert said.endswith("median absolute error 75.0%, verdict right in 1 of 3 settings")


# ---- what is said


def prediction(value: float, low: float = math.nan, high: float = math.nan, **about: Any) -> Prediction:
    ideal = {"alpha": 3.0, "c": 1.5, "verify": 1.2}
    known = Prediction(4, Interval(value, low, high, 6), 2.0, 4.0, 1.5, 1.1, 0.4, ideal)
    return replace(known, **about)


ALPHA = Interval(0.6, 0.5, 0.7, 6)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            prediction(1.5, 1.2, 1.8),
            r"^use 1:4: 1\.50× \(1\.20 … 1\.80\) with 4 tokens a step\. α 0\.60 \(0\.50 … 0\.70\)",
        ),
        (
            prediction(1.5, 1.2, 1.8),
            r"break-even α 0\.40 at c 0\.050 and T\(k\) 1\.10\. α bounds it most: 3\.00× if every",
        ),
        (prediction(0.8, 0.7, 0.9), r"^don't use 1:4: at best 0\.80×"),
        (prediction(1.1, 0.9, 1.3), r"a step, but not surely: the interval holds 1"),
        (prediction(1.1), r"^use 1:4: 1\.10× with 4 tokens a step, but not surely: too few prompts to tell"),
        (prediction(0.6, 0.5, 0.7, break_even=None), r"even α = 1 would not pay"),
        (prediction(0.6, 0.5, 0.7, ideal={"alpha": 0.8, "c": 1.6, "verify": 0.7}), r"\. c bounds it most"),
        (prediction(0.6, 0.5, 0.7, ideal={"alpha": 0.8, "c": 0.7, "verify": 1.6}), r"\. T\(k\) bounds it most"),
    ],
)
def test_the_verdict_and_its_reason(found: Prediction, says: str) -> None:
    one = Suitability("1:4", (prediction(0.1), found), ALPHA, c=0.05, overhead=0.02, coverage=1.0)
    assert one.best is found
    assert one.pays == (found.speedup.value > 1)
    assert re.search(says, one.reason()), one.reason()


def test_the_reason_tells_of_drafts_that_hold_back_or_draft_nothing() -> None:
    held = Suitability("ngram", (prediction(1.5, 1.2, 1.8),), ALPHA, 0.01, 0.02, coverage=0.5)
    assert "it drafts 50% of what it is asked for" in held.reason()
    idle = Suitability("ngram", (prediction(0.99),), ALPHA, None, 0.02, coverage=0.0)
    assert idle.reason().endswith("It drafted nothing in the probe")


def test_the_articles_exclusions_are_named_when_they_apply() -> None:
    prose, code = Prompt("a", "prose", "A poem."), Prompt("b", "code", "f")
    assert exclusions([code], Plan()) == ()
    (creative,) = exclusions([code, prose], Plan())
    assert creative.startswith("creative text at full fidelity (prose): the articles do not recommend drafting for it")
    assert exclusions([code], Plan(output_tokens=1024)) == ()
    (long,) = exclusions([code], Plan(output_tokens=1025))
    assert long.startswith("outputs of 1025 tokens, beyond 1,024: the articles do not recommend drafting for them")
    assert len(exclusions([prose], Plan(max_new_tokens=2000))) == 2


def mamba(folder: Path) -> str:
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=2, state_size=4, eos_token_id=257)
    return save_model(config, folder, seed=0)


def test_an_architecture_that_cannot_roll_back_is_the_third(
    main: zoo.Main, tmp_path: Path, tiny_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = mamba(tmp_path / "mamba")
    loaded, refused = load_drafts([folder, "ngram"], main)
    assert list(loaded) == ["ngram"]
    plan = Plan((folder, "ngram"), (2, 4), 6)
    first, second = assess(main, PROMPTS[:1], plan, drafters=(loaded, refused), curve=CURVE).drafts
    assert (first.pays, first.best, len(second.predictions)) == (False, None, 2)
    assert "don't use" in first.reason()
    assert "MambaForCausalLM cannot be used here: it keeps a recurrent state" in first.reason()
    assert "The articles do not recommend it either" in first.reason()
    assert cli.main(["assess", "--main", folder, "--prompts", "json", "--limit", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"don't use drafting with {folder}: an architecture that drafting cannot roll back" in err
    assert json.loads(out.splitlines()[-1])["assessments"] == []


def test_what_is_merely_missing_is_an_error(main: zoo.Main) -> None:
    with pytest.raises(ModelError, match="no model '5:7'") as caught:
        load_drafts(["5:7"], main)
    assert not isinstance(caught.value, ArchitectureError)


def test_lines_and_json_of_an_assessment(main: zoo.Main, noisy: str, drafter: Drafter) -> None:
    plan = Plan((noisy,), (1, 4), 8, output_tokens=4000)
    found = assess(main, PROMPTS[:2], plan, name="mine", drafters=({noisy: drafter}, {}), curve=CURVE)
    head, columns, speeds, reason, note = lines(found)
    assert head == "mine: 2 prompts, 8 tokens each, probed at 4 drafted a step"
    assert columns.split() == ["draft", "1", "4"]
    assert speeds.count("×") == 2
    assert reason == found.drafts[0].reason()
    assert note.startswith("note: outputs of 4000 tokens")
    got = json.loads(json.dumps(to_dict(found), allow_nan=False))
    assert [p["draft_length"] for p in got["drafts"][0]["predictions"]] == [1, 4]
    assert got["drafts"][0]["predictions"][0]["speedup"]["low"] is None  # of two prompts
    assert got["exclusions"] == [note.removeprefix("note: ")]
    with pytest.raises(UnknownNameError, match=r"no prediction for draft and length 'x, 9'; there is: .*, 1, "):
        found.prediction("x", 9)


# ---- bad input


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"drafts": ()}, r"drafts = \(\): allowed is one or more names"),
        ({"drafts": ("none",)}, r"drafts = .*none of them none"),
        ({"drafts": ("1:4", "1:4")}, r"drafts = .*all different"),
        ({"draft_lengths": (0, 4)}, r"draft_lengths = \(0, 4\): allowed is different integers 1 … 64"),
        ({"draft_lengths": (65,)}, r"draft_lengths = \(65,\)"),
        ({"draft_lengths": ()}, r"draft_lengths = \(\)"),
        ({"max_new_tokens": 1}, r"max_new_tokens = 1: allowed is an integer >= 2"),
        ({"output_tokens": 0}, r"output_tokens = 0: allowed is an integer >= 1"),
        ({"seed": -1}, r"seed = -1"),
    ],
)
def test_a_plan_says_what_is_wrong(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        Plan(**settings)


def test_predictions_end_at_the_probed_length() -> None:
    with pytest.raises(SettingError, match=r"draft_length = 9: allowed is an integer 1 … 8, which is the length"):
        probe_of(texts(0.5), 8).predict(9)


class Fork(Drafter):
    """Two candidates for the next token."""

    name = "fork"

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        return Tree(torch.tensor([[1, 2]] * len(rows)), torch.tensor([[-1, -1]] * len(rows)), None)


def test_trees_are_refused(main: zoo.Main) -> None:
    with pytest.raises(SettingError, match="trace = 'a tree': allowed is chains"):
        assess(main, PROMPTS[:1], Plan(("fork",), (2,), 8), drafters=({"fork": Fork()}, {}), curve=CURVE)


def test_scoring_refuses_what_the_probe_saw(main: zoo.Main) -> None:
    plan, loaded = Plan(("ngram",), (2, 4), 6), {"ngram": NGram()}
    found = assess(main, PROMPTS[:2], plan, drafters=(loaded, {}), curve=CURVE)
    again = [replace(PROMPTS[1], id="another")]
    with pytest.raises(SettingError, match="prompts = 'another': allowed is prompts that the probe has not seen"):
        score_predictions(main, found, again, (2,), drafters=loaded)
    for length in (3, 4):
        with pytest.raises(SettingError, match=rf"draft_lengths = \[{length}\]: .*\[2\]: predicted, and shorter"):
            score_predictions(main, found, PROMPTS[3:], (length,), drafters=loaded)
    with pytest.raises(SettingError, match="prompts = 'none'"):
        score_predictions(main, found, [], (2,), drafters=loaded)
    with pytest.raises(SettingError, match="prompts = 'none'"):
        assess(main, [], plan)


def test_split_keeps_the_probes_prompts_apart() -> None:
    probed, others = split([*PROMPTS, replace(PROMPTS[0], id="again")], 3)
    assert (len(probed), len(others)) == (3, 3)
    assert not {prompt.prompt for prompt in probed} & {prompt.prompt for prompt in others}
    with pytest.raises(DataError, match="7 prompts leave none to check the predictions on"):
        split(PROMPTS, 7)
    with pytest.raises(SettingError, match="limit = 0"):
        split(PROMPTS, 0)


# ---- from a shell


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"task": p.task, "prompt": p.prompt}) + "\n" for p in PROMPTS))
    return str(path)


def test_assess_and_its_check_from_a_shell(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, noisy: str, file: str
) -> None:
    other = Path(file).with_name("poems.jsonl")
    other.write_text("".join(json.dumps({"prompt": f"A poem, {i}."}) + "\n" for i in range(4)))  # prose by default
    words = ["assess", "--main", tiny_folder, "--drafts", noisy, "ngram", "--prompts", file, str(other), "--limit", "2"]
    words += ["--draft-lengths", "1", "4", "--max-new-tokens", "6", "--check", "2", "--threads", "1"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "use ngram: " in out
    assert "note: creative text at full fidelity (prose)" in out
    assert out.count("right") + out.count("WRONG") == 5  # four settings, and the tally
    assert cli.main([*words, "--json"]) == 0
    got = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [found["name"] for found in got["assessments"]] == [file, str(other)]
    assert got["check"]["settings"] == len(got["check"]["scored"]) == 4
    assert {line["draft_length"] for line in got["check"]["scored"]} == {2}
    assert [p["draft_length"] for p in got["assessments"][0]["drafts"][0]["predictions"]] == [1, 2, 4]
    probed = {tuple(found["prompts"]) for found in got["assessments"]}
    assert len(probed) == 2


def test_another_main_models_default_draft_needs_no_model(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, file: str
) -> None:
    words = ["assess", "--main", tiny_folder, "--prompts", file, "--limit", "1", "--max_new_tokens", "4", "--json"]
    assert cli.main(words) == 0
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["assessments"]
    assert [each["draft"] for each in found["drafts"]] == ["ngram"]
    assert "check" not in found


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--prompts", "nope"], 2, "no prompts file or task 'nope'"),
        (["--prompts", "json", "json"], 2, "prompts = ['json', 'json']"),
        (["--limit", "0"], 2, "limit = 0"),
        (["--max_new_tokens", "1"], 2, "max_new_tokens = 1"),
        (["--output_tokens", "0"], 2, "output_tokens = 0"),
        (["--temperature", "-1"], 2, "temperature = -1.0"),
        (["--draft_lengths", "0"], 2, "draft_lengths = (0,)"),
        (["--draft_lengths", "4", "--check", "4"], 2, "draft_lengths = [4]"),
        (["--check", "0"], 2, "draft_lengths = (0, "),
        (["--drafts", "none"], 2, "drafts = ('none',)"),
        (["--main", "nope"], 1, "no model 'nope'"),
        (["--drafts", "5:7"], 1, "no model '5:7'"),
        (["--prompts", "json"], 1, "allowed is 1 … 511 tokens"),  # before anything is decoded
        (["--prompts", "prose", "--limit", "1000", "--check"], 1, "185 prompts leave none"),
    ],
)
def test_bad_arguments(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, file: str, words: list[str], code: int, says: str
) -> None:
    got = cli.main(["assess", "--main", tiny_folder, "--prompts", file, "--limit", "1", *words])
    assert (got, says in (err := capsys.readouterr().err)) == (code, True), err


def test_the_check_covers_what_was_asked_of_it() -> None:
    """Its defaults: 12 settings or more with three tasks, at lengths that were not probed."""
    plan = Plan()
    assert 3 * len(plan.drafts) * len(module.CHECKED) >= 12
    assert set(module.CHECKED) <= set(plan.draft_lengths) - {plan.probed}
