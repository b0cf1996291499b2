"""Every metric against numbers worked out by hand (CASES 3, 4, 5, 6)."""

import re
from typing import Any

import pytest

from specdec_lab.metrics import (
    METRICS,
    acceptance_by_position,
    position_counts,
    repeated_ngrams,
    summarise,
    totals,
    tried,
)
from specdec_lab.trace import Step, Trace

FATES = {"a": "accepted", "r": "rejected", "u": "untried"}


def step(fates: str = "", overlap: tuple[float, ...] = (), parents: list[int] | None = None, **rest: Any) -> Step:
    """A step whose drafted tokens had these fates; seconds and counts as given."""
    n = len(fates)
    some = [0.5] * n
    kind = "recovered" if "r" in fates else "bonus" if n else "plain"
    settings: dict[str, Any] = {"planned": n, "emitted": fates.count("a") + 1, "next_kind": kind, "active": 1}
    settings |= {"draft_s": 0.0, "verify_s": 0.0, "other_s": 0.0}
    return Step(
        drafted=[7] * n,
        parents=list(range(-1, n - 1)) if parents is None else parents,
        p=some,
        q=some,
        overlap=list(overlap) or some,
        largest_p=some,
        entropy=some,
        fate=[FATES[letter] for letter in fates],
        next_token=7,
        next_p=0.5,
        next_largest_p=0.5,
        next_entropy=0.5,
        **settings | rest,
    )


# Two of four stay; then two of two, and the bonus token lies behind an EOS that cut the step: 5 tokens emitted.
FIRST = Trace(
    prompt_tokens=5,
    prefill_s=1.0,
    draft_prefill_s=0.5,
    steps=[
        step("aaru", (0.9, 0.8, 0.3, 0.5), draft_s=0.4, verify_s=0.2, other_s=0.02),
        step("aa", (1.0, 0.6), planned=4, emitted=2, draft_s=0.2, verify_s=0.2, other_s=0.03),
    ],
    tokens=[9, 9, 9, 9, 9],
    finish="eos",
    memory_bytes=300,
)
# A step whose drafter found nothing, shared with another row of the batch; then one whose only token is rejected.
SECOND = Trace(
    prompt_tokens=3,
    prefill_s=0.5,
    steps=[
        step(draft_s=0.06, verify_s=0.1, other_s=0.05, active=2),
        step("r", (0.5,), draft_s=0.1, verify_s=0.2),
    ],
    tokens=[4, 5],
    finish="length",
    memory_bytes=250,
)
PLAIN = Trace(
    prompt_tokens=8,
    prefill_s=1.0,
    steps=[step(verify_s=0.25, other_s=0.01) for _ in range(7)],
    tokens=[1, 2, 3, 4, 5, 6, 7],
    finish="length",
    memory_bytes=200,
)
DRAFT_S = 0.4 + 0.2 + 0.06 / 2 + 0.1
DECODE_S = DRAFT_S + (0.2 + 0.2 + 0.1 / 2 + 0.2) + (0.02 + 0.03 + 0.05 / 2)
PREFILL_S = 1.5 + 0.5 / 2  # SECOND's was shared by two rows
EXPECTED: dict[str, Any] = {
    "draft_acceptance_rate": 4 / 7,
    "acceptance_probability": 4 / 6,  # the untried token is no trial
    "expected_acceptance": 4.6 / 7,
    "acceptance_by_position": [2 / 3, 1, 0, 0],
    "acceptance_by_position_conditional": [2 / 3, 1, 0],
    "tokens_per_main_forward": 7 / 4,  # 4 accepted + 4 next tokens would be 8: one lies past EOS
    "coverage": 7 / 9,
    "fallback_ratio": 1 / 3,  # of three drafts, SECOND's; the step without a draft is none
    "refusal_ratio": 0,
    "throughput": 7 / DECODE_S,
    "time_to_first_token": ((1.5 + 0.62) + (0.5 + 0.21)) / 2,  # each user waits for the whole shared step
    "overhead_share": 0.075 / DECODE_S,
    "speculative_speedup": (7 / DECODE_S) / (7 / (7 * 0.26)),
    "end_to_end_speedup": (7 / (DECODE_S + PREFILL_S)) / (7 / (7 * 0.26 + 1.0)),
    "draft_cost_ratio": (DRAFT_S / 7) / 0.25,
    "repetition": 0.5,  # FIRST has two 4-grams, equal; SECOND is too short to have any
    **dict.fromkeys(("quality_delta", "nll_delta", "repetition_delta")),  # traces do not tell
    "peak_memory": 300,
    "memory_growth": 0.5,
}


def test_every_metric_has_an_expected_value() -> None:
    assert set(EXPECTED) == set(METRICS)


@pytest.mark.parametrize("name", METRICS)
def test_metric(name: str) -> None:
    assert summarise([FIRST, SECOND], [PLAIN])[name] == pytest.approx(EXPECTED[name])


def test_without_a_baseline_comparisons_are_none() -> None:
    values = summarise([FIRST, SECOND])
    compared = {"speculative_speedup", "end_to_end_speedup", "draft_cost_ratio", "memory_growth"}
    compared |= {"quality_delta", "nll_delta", "repetition_delta"}
    assert {name for name, value in values.items() if value is None} == compared


def test_without_a_draft_its_metrics_are_none() -> None:
    undrafted = Trace(prompt_tokens=3, steps=[step(verify_s=0.1)], tokens=[1], memory_bytes=1)
    values = summarise([undrafted], [PLAIN])
    for name in (
        "draft_acceptance_rate",
        "acceptance_probability",
        "expected_acceptance",
        "coverage",
        "fallback_ratio",
        "refusal_ratio",
        "draft_cost_ratio",
        "repetition",
    ):
        assert values[name] is None
    assert values["acceptance_by_position"] == []
    assert values["tokens_per_main_forward"] == 1


def refused() -> Step:
    """A draft of three that is refused as a whole: nothing is emitted, another one is drawn."""
    return step("rrr", next_kind="refused", planned=4, emitted=0, draft_s=0.3, verify_s=0.2, other_s=0.1)


def whole(kept: bool) -> Step:
    """A draft of three that is kept, or given up for one token of the main model."""
    return step("aaa" if kept else "rrr", planned=4, draft_s=0.3, verify_s=0.2, other_s=0.1)


def test_a_refused_draft_costs_a_main_forward_and_emits_nothing() -> None:
    """Given up after two retries, the next draft kept, then a step without a draft: 1 + 4 + 1 tokens."""
    steps = [refused(), refused(), whole(kept=False), whole(kept=True), step(verify_s=0.2)]
    trace = Trace(prompt_tokens=3, prefill_s=1.0, steps=steps, tokens=[1, 2, 3, 4, 5, 6])
    t = totals([trace])
    assert (t.settled, t.fallbacks, t.refusals) == (2, 1, 2)
    expected: dict[str, Any] = {
        "fallback_ratio": 1 / 2,  # 3 / 4 with the refused ones
        "refusal_ratio": 2 / 4,
        "tokens_per_main_forward": 6 / 5,
        "draft_acceptance_rate": 3 / 12,
        "acceptance_probability": 3 / 12,
        "coverage": 12 / 16,
        "acceptance_by_position": [1 / 4, 1 / 4, 1 / 4],
        "throughput": 6 / (4 * 0.6 + 0.2),
        "time_to_first_token": 1.0 + 3 * 0.6,  # there is none before the third step
        "overhead_share": 4 * 0.1 / (4 * 0.6 + 0.2),
    }
    found = summarise([trace])
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name


def test_a_text_given_up_is_one_fallback_however_long_it_goes_on() -> None:
    given_up = [refused(), whole(kept=False), *[step() for _ in range(9)]]
    texts = [Trace(3, steps=steps, tokens=[1]) for steps in (given_up, [whole(kept=True)], [refused(), whole(True)])]
    assert summarise(texts)["fallback_ratio"] == pytest.approx(1 / 3)


def test_nothing_settled() -> None:
    found = summarise([Trace(3, prefill_s=1.0, steps=[refused()], tokens=[])])
    assert (found["fallback_ratio"], found["refusal_ratio"], found["tokens_per_main_forward"]) == (None, 1, 0)


def test_nothing_decoded() -> None:
    for traces in ([], [Trace(prompt_tokens=3, prefill_s=1.0)]):
        values = summarise(traces, traces)
        assert values["throughput"] is None
        assert values["speculative_speedup"] is None
        assert values["tokens_per_main_forward"] is None


def test_totals_add_up() -> None:
    assert totals([FIRST, SECOND]) == totals([FIRST]) + totals([SECOND])


def test_the_plain_loop_is_as_fast_as_itself() -> None:
    """CASES 5: both sides of a ratio count tokens alike."""
    values = summarise([PLAIN], [PLAIN])
    assert values["speculative_speedup"] == values["end_to_end_speedup"] == 1
    assert values["memory_growth"] == 0


def test_positions_in_a_tree_are_depths() -> None:
    tree = Trace(prompt_tokens=1, steps=[step("raua", parents=[-1, -1, 0, 1])], tokens=[1, 2, 3])
    counts = position_counts([tree])
    assert acceptance_by_position(counts) == [1 / 2, 1 / 2]
    assert acceptance_by_position(counts, conditional=True) == [1 / 2, 1]


def test_tried_tokens_of_a_tree_have_entropy_fate_and_depth() -> None:
    tree = step("raru", parents=[-1, -1, 1, 1])
    tree.entropy = [0.1, 0.2, 0.3, 0.4]
    assert tried([Trace(1, steps=[tree, step("a")])]) == {
        "entropy": [0.1, 0.2, 0.3, 0.5],
        "stays": [False, True, False, True],
        "depth": [1, 1, 2, 1],
    }


def test_repeated_ngrams() -> None:
    assert repeated_ngrams([1, 2, 3]) is None
    assert repeated_ngrams([1, 2, 3, 4]) == 0
    assert repeated_ngrams([1, 2, 3, 4] * 3) == pytest.approx(5 / 9)


def test_specs_are_complete() -> None:
    for name, spec in METRICS.items():
        assert spec.name == name
        assert spec.better in ("higher", "lower", "neither")
        assert spec.formula
        assert spec.unit
        assert re.fullmatch(r"specdec_lab(, after the articles)?|arXiv \d{4}\.\d{5}", spec.source)
