"""What a trace says about other lengths and thresholds, against decoders that really run so."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import random_llama

from specdec_lab.acceptance import Acceptance
from specdec_lab.decoding import Decoder
from specdec_lab.drafting import Drafter, DraftModel, NGram
from specdec_lab.errors import SettingError
from specdec_lab.models.llama import LlamaModel
from specdec_lab.theory import VerifyCurve
from specdec_lab.trace import Trace
from specdec_lab.whatif import LONGEST, WhatIf

CURVE = VerifyCurve((1, 3, 9), (1.0, 1.2, 2.4), (1.0, 1.2, 2.4))
PROMPTS = [[a, b, (a * b) % 8, b, a] for a in range(8) for b in range(4)]
LENGTH = 4


@pytest.fixture(scope="module")
def main() -> LlamaModel:
    return random_llama(0, layers=2)


@pytest.fixture(scope="module")
def draft() -> DraftModel:
    return DraftModel(random_llama(3, layers=1))


@pytest.fixture(scope="module")
def plain(main: LlamaModel) -> Trace:
    return Decoder(main).generate([1, 2], max_new_tokens=8).trace


def pooled(main: LlamaModel, drafter: Drafter, first: int | None = None, tokens: int = 20, **how: Any) -> Trace:
    """The steps of many texts that were not cut short, as one trace; first: of each text only so many."""
    rule = {name: how.pop(name) for name in ("acceptance", "candidate_count") if name in how}
    decoder = Decoder(main, drafter, LENGTH, **rule)
    made = decoder.generate_batch(how.pop("prompts", PROMPTS), max_new_tokens=tokens, **how)
    steps = [step for each in made for step in each.trace.steps[:first] if step.planned == LENGTH]
    for step in steps:
        step.active = 1  # a trace of one row, whose times are its own
    return Trace(0, steps=steps, tokens=[0] * sum(len(step.accepted) + 1 for step in steps))


@pytest.fixture(scope="module")
def greedy(main: LlamaModel, draft: DraftModel, plain: Trace) -> WhatIf:
    return WhatIf.of(pooled(main, draft), plain, CURVE, greedy=True)


def kept(trace: Trace) -> list[int]:
    return [len(step.accepted) for step in trace.steps]


@pytest.mark.parametrize("drafter", [NGram(), None])
def test_a_run_foretells_itself(drafter: Drafter | None, main: LlamaModel, draft: DraftModel, plain: Trace) -> None:
    """Exactly, tokens and costs, and for drafts that hold back too."""
    trace = pooled(main, drafter or draft)
    known = WhatIf.of(trace, plain, CURVE, greedy=True)
    shares = [np.mean([count >= place for count in kept(trace)]) for place in range(1, LENGTH + 1)]
    assert known.kept(LENGTH) == pytest.approx(shares, abs=1e-12)
    assert 0 < shares[0] < 1
    drafted = [len(step.drafted) for step in trace.steps]
    assert (min(drafted) == 0) == isinstance(drafter, NGram)
    forward = sum(step.verify_s for step in plain.steps) / len(plain.steps)
    other, theirs = (np.mean([step.other_s for step in each.steps]) / forward for each in (trace, plain))
    c = sum(step.draft_s for step in trace.steps) / sum(drafted) / forward
    cost = np.mean([n * c + CURVE(n + 1) for n in drafted]) + other
    assert known.cost(LENGTH) == pytest.approx(cost / (1 + theirs))
    assert known.speedup(LENGTH) == pytest.approx((1 + sum(shares)) / known.cost(LENGTH))


@pytest.mark.parametrize(("rule", "threshold"), [("lossless", None), ("lenience", 0.5)])
def test_sampled_runs_foretell_themselves_on_the_average(
    rule: str, threshold: float | None, main: LlamaModel, draft: DraftModel, plain: Trace
) -> None:
    """|z| of kept tokens less their expectation, over steps; the controls expect what another rule keeps."""
    trace = pooled(main, draft, acceptance=Acceptance(rule, threshold), prompts=PROMPTS * 4, temperature=0.8, seed=1)
    known = WhatIf.of(trace, plain, CURVE, greedy=False)

    def z(rule: str, threshold: float) -> float:
        expected = np.cumprod(known.chances(rule, threshold), 1).sum(1)
        assert known.kept(LENGTH, rule, threshold).sum() == pytest.approx(expected.mean())
        off = np.array(kept(trace)) - expected
        return float(abs(off.sum()) / (np.sqrt((off**2).sum()) + 1e-9))

    assert z(rule, threshold or 1.0) < 4
    for other, at in (("lossless", 1.0), ("lenience", 0.5), ("typical", 0.3)):
        assert other == rule or z(other, at) > 6, other


@pytest.mark.parametrize("rule", ["threshold", "typical"])
def test_a_threshold_keeps_what_was_foretold(rule: str, main: LlamaModel, draft: DraftModel, plain: Trace) -> None:
    """Of the first step of every prompt, which has the same prefix and draft whatever the rule."""
    known = WhatIf.of(pooled(main, draft, first=1, tokens=5), plain, CURVE, greedy=True)
    seen = []
    for threshold in (0.0, 0.05, 0.2, 0.5, 1.0):
        really = kept(pooled(main, draft, first=1, tokens=5, acceptance=Acceptance(rule, threshold)))
        assert np.cumprod(known.chances(rule, threshold), 1).sum(1).tolist() == really
        seen.append(sum(really))
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == LENGTH * len(PROMPTS) > seen[2] > seen[-1]


def test_the_strictest_threshold_is_lossless_when_greedy(greedy: WhatIf) -> None:
    assert np.array_equal(greedy.chances("threshold", 1.0), greedy.chances())
    assert greedy.speedup(3, "threshold", 1.0) == greedy.speedup(3)


def test_fewer_stay_further_on_and_under_stricter_rules(greedy: WhatIf) -> None:
    for rule in ("threshold", "typical"):
        of = [greedy.kept(12, rule, threshold) for threshold in np.linspace(0, 1, 11)]
        assert all((np.diff(each) <= 1e-12).all() for each in of)
        assert all((a >= b - 1e-12).all() for a, b in zip(of, of[1:], strict=False))
        assert of[0].sum() > of[3].sum() > of[-1].sum()
    assert greedy.kept(12)[:3] == pytest.approx(greedy.kept(3))


def test_beyond_what_was_drafted_alpha_goes_on(greedy: WhatIf, main: LlamaModel, draft: DraftModel) -> None:
    trace = pooled(main, draft)
    tried = sum(step.fate.count("accepted") + step.fate.count("rejected") for step in trace.steps)
    alpha = sum(kept(trace)) / tried
    beyond = greedy.kept(LENGTH + 3)
    assert beyond[LENGTH:] == pytest.approx(beyond[LENGTH - 1] * alpha ** np.arange(1, 4))


def test_speedups_by_length(greedy: WhatIf) -> None:
    for length in range(1, 10):
        tokens = 1 + greedy.kept(length, "threshold", 0.3).sum()
        assert greedy.speedup(length, "threshold", 0.3) == pytest.approx(tokens / greedy.cost(length))
    dear = replace(greedy, c=greedy.c + 1)
    assert dear.cost(3) - greedy.cost(3) == pytest.approx(3 / (1 + greedy.plain_overhead))


def test_the_share_of_tokens_that_are_not_the_main_models(greedy: WhatIf) -> None:
    shares = [greedy.foreign(LENGTH, "threshold", threshold) for threshold in (1.0, 0.6, 0.3, 0.1, 0.0)]
    assert shares[0] == greedy.foreign(LENGTH, "lossless", 1.0) == 0
    assert shares == sorted(shares)
    assert shares[1] < shares[2] < shares[-1]
    places = greedy.overlap.size
    assert shares[-1] == pytest.approx((greedy.overlap == 0).sum() / (places + len(greedy.overlap)))
    assert greedy.foreign(1, "threshold", 0.0) == pytest.approx((greedy.overlap[:, 0] == 0).mean() / 2)
    assert replace(greedy, greedy=False).foreign(LENGTH, "threshold", 0.0) == 0


def test_what_it_knows_nothing_of_is_refused(main: LlamaModel, draft: DraftModel, plain: Trace) -> None:
    def of(**how: Any) -> Callable[[], WhatIf]:
        return lambda: WhatIf.of(pooled(main, draft, **how), plain, CURVE, greedy=True)

    for make, said in (
        (of(candidate_count=3), "a tree.*allowed is chains"),
        (of(acceptance=Acceptance("block", 1.0)), "refused drafts.*allowed is rules that judge token by token"),
        (lambda: WhatIf.of(plain, plain, CURVE, greedy=True), "without drafts.*allowed is one of a run that drafted"),
    ):
        with pytest.raises(SettingError, match=said):
            make()


@pytest.mark.parametrize(
    ("length", "rule", "threshold", "field"),
    [
        (0, "lossless", 1.0, "draft_length"),
        (LONGEST + 1, "lossless", 1.0, "draft_length"),
        (4, "block", 1.0, "acceptance_rule"),
        (4, "best", 1.0, "acceptance_rule"),
        (4, "lenience", 0.5, "acceptance_rule"),
        (4, "threshold", 1.1, "acceptance_threshold"),
    ],
)
def test_questions_out_of_range_are_refused(
    length: int, rule: str, threshold: float, field: str, greedy: WhatIf
) -> None:
    with pytest.raises(SettingError) as error:
        greedy.speedup(length, rule, threshold)
    assert error.value.field == field


@pytest.mark.parametrize(("length", "c"), [(9, 0.05), (1, 0.01), (4, 3.0)])
def test_levers_change_one_thing_each_best_first(length: int, c: float, greedy: WhatIf) -> None:
    known = replace(greedy, c=c)
    found = known.levers(length, "threshold", 0.0)
    assert [lever.speedup for lever in found] == sorted((lever.speedup for lever in found), reverse=True)
    speedups = [1.0, *(known.speedup(n, "threshold", 0.0) for n in range(1, LONGEST + 1))]
    best = int(np.argmax(speedups))
    flat = VerifyCurve(CURVE.ks, (1.0, 1.1, 1.7), CURVE.seconds)
    way = "no draft" if best == 0 else "longer draft" if best > length else "shorter draft"
    stays = known.chances("threshold", 0.0)
    better = replace(known, lift=0.5)
    assert better.chances("threshold", 0.0) == pytest.approx((1 + stays) / 2)
    expected = {} if best == length else {way: speedups[best]}
    expected |= {
        "better draft": better.speedup(length, "threshold", 0.0),
        "cheaper draft": replace(known, c=c / 2).speedup(length, "threshold", 0.0),
        "flatter verification": replace(known, curve=flat).speedup(length, "threshold", 0.0),
    }
    assert {lever.name: lever.speedup for lever in found} == pytest.approx(expected)
    changes = {lever.name: lever.change for lever in found}
    assert best == length or changes[way] == f"γ {length} → {best}"
    assert changes["cheaper draft"] == f"c {c:.3f} → {c / 2:.3f}"
    assert (best == 0) == (c == 3.0)


def test_what_is_impossible_never_stays(greedy: WhatIf) -> None:
    """Lenience at threshold 0 keeps what the main model may say, and nothing else."""
    none = replace(greedy, greedy=False, p=np.zeros_like(greedy.p))
    assert none.chances("lenience", 0.0).max() == none.chances("threshold", 0.0).max() == 0
    assert replace(greedy, greedy=False).chances("lenience", 0.0).min() == 1
    assert none.speedup(4, "lenience", 0.0) == pytest.approx(1 / none.cost(4))
