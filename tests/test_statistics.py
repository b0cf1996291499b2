"""Intervals cover what they claim and no more; comparisons pair prompts, or refuse to."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from specdec_lab.errors import DataError, SettingError, UnknownNameError
from specdec_lab.statistics import (
    LEAST,
    Comparison,
    compare,
    interval,
    quality_change,
    ratio_interval,
    resampled_sums,
    summary,
)

SPREAD = 0.25  # of the log of a prompt's speed-up


def experiment(prompts: int, speedup: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, seconds, baseline seconds) per prompt, whose ratio of expected times is `speedup`."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(20, 65, prompts).astype(float)
    baseline = tokens * 0.03 * rng.lognormal(0, 0.5, prompts)
    each = rng.lognormal(np.log(speedup) + SPREAD**2 / 2, SPREAD, prompts)  # E[1 / each] = 1 / speedup
    return tokens, baseline / each, baseline


def coverage(prompts: int, claimed: float, tries: int = 300, speedup: float = 1.4) -> float:
    """Share of experiments whose interval holds `claimed`."""
    hits = 0
    for seed in range(tries):
        tokens, seconds, baseline = experiment(prompts, speedup, seed)
        got = ratio_interval(tokens, seconds, tokens, baseline, seed=seed, resamples=1000)
        hits += got.low <= claimed <= got.high
    return hits / tries


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    assert 0.91 <= coverage(12, claimed=1.4) <= 0.98


def test_the_interval_misses_a_wrong_ratio() -> None:
    """Negative control: the same check fails for a ratio that is 15 % off."""
    assert coverage(12, claimed=1.4 * 1.15) < 0.75
    assert coverage(48, claimed=1.4 * 1.15) < 0.1


def test_unpaired_resampling_would_be_far_wider() -> None:
    """Prompts differ tenfold in time; what both sides share must cancel."""
    tokens, seconds, baseline = experiment(12, 1.4, seed=0)
    paired = ratio_interval(tokens, seconds, tokens, baseline)
    one_side = interval(1 / resampled_sums({"x": seconds})["x"] * seconds.sum() * paired.value, 12)
    assert paired.high - paired.low < 0.7 * (one_side.high - one_side.low)


def test_a_constant_ratio_has_no_width() -> None:
    tokens, seconds, _ = experiment(12, 1.4, seed=1)
    got = ratio_interval(tokens, seconds, tokens, seconds * 1.25)
    assert (got.value, got.low, got.high) == pytest.approx((1.25, 1.25, 1.25))


def test_it_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    got = ratio_interval([10, 90], [10, 30])
    assert got.value == pytest.approx(100 / 40)
    assert got.value != pytest.approx(np.mean([10 / 10, 90 / 30]))


def test_the_same_seed_gives_the_same_interval() -> None:
    tokens, seconds, baseline = experiment(12, 1.4, seed=2)
    first, again, other = (ratio_interval(tokens, seconds, tokens, baseline, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_too_few_prompts_have_no_interval() -> None:
    few, enough = ratio_interval([1.0] * (LEAST - 1), [1.0] * (LEAST - 1)), ratio_interval([1.0] * LEAST, [1.0] * LEAST)
    assert few.value == 1
    assert not few.known
    assert enough.known


def test_undefined_stays_undefined() -> None:
    got = ratio_interval([0.0] * 12, [0.0] * 12)
    assert np.isnan([got.value, got.low, got.high]).all()


@pytest.mark.parametrize(
    ("columns", "settings", "field"),
    [
        ({"a": [1, 2], "b": [1]}, {}, "columns"),
        ({"a": []}, {}, "columns"),
        ({"a": [1]}, {"resamples": 0}, "resamples"),
    ],
)
def test_bad_columns_are_refused(columns: dict[str, list[float]], settings: dict[str, int], field: str) -> None:
    with pytest.raises(SettingError, match=field):
        resampled_sums(columns, **settings)


# ---- compare and summary, on made-up rows

Rows = Callable[..., pd.DataFrame]
TEXTS = {"quality": 1.0, "nll": 1.5, "repetition": 0.1}


def rows(draft: str = "1:4", speedup: float = 1.4, prompts: int = 12, seed: int = 0, **changed: Any) -> pd.DataFrame:
    """Rows of one arm as experiment.load gives them; every second drafted token is accepted."""
    tokens, seconds, baseline = experiment(prompts, speedup, seed)
    plain = draft == "none"
    drafted = 0 * tokens if plain else 2 * tokens
    time = baseline if plain else seconds
    sums = {
        **{"emitted": tokens, "steps": tokens if plain else tokens // 2, "drafted": drafted, "planned": drafted},
        **{"accepted": drafted / 2, "rejected": drafted / 4, "overlap": drafted * 0.6},
        **{"draft_s": drafted * 0.002, "verify_s": time * 0.9 - drafted * 0.002, "other_s": time * 0.1},
        **{"prefill_s": 0.5, "first_s": 0.6, "texts": 1, "decode_s": time, "settled": drafted / 4},
        **{"fallbacks": drafted / 16, "refusals": 0},
    }
    undrafted = ("drafted", "planned", "accepted", "rejected", "overlap", "draft_s", "settled", "fallbacks")
    zero = dict.fromkeys(undrafted, 0)
    other = {"emitted": tokens, "steps": tokens, "verify_s": baseline * 0.9, "other_s": baseline * 0.1}
    base = {**sums, **zero, **other, "decode_s": baseline}
    columns = {
        **{"part": "p0", "main": "m", "task": "json", "draft": draft, "draft_length": 0 if plain else 4},
        **{"main_parameters": 100, "main_body_parameters": 60, "draft_parameters": 25, "draft_body_parameters": 3},
        **{"prompt_id": [f"json-{i}" for i in range(prompts)], "prompt_sha": "0" * 16, "repeat": 0},
        **{**sums, "memory_bytes": 1000, "quality_better": "higher"},
        **{f"{prefix}{name}": value for name, value in TEXTS.items() for prefix in ("", "baseline_")},
        **{"same_as_baseline": None if plain else True, "baseline_memory_bytes": 800},
        **{f"baseline_{name}": values for name, values in base.items()},
    }
    frame = pd.DataFrame(columns).assign(**changed)
    lists = {"verify_k": [1, 4, 9], "verify_ratio": [1.0, 1.3, 1.8], "verify_seconds": [0.1, 0.13, 0.18]}
    lists |= {"drafted_at": [4, 4], "tried_at": [4, 2], "accepted_at": [3, 1]}
    return frame.assign(**{name: [value] * prompts for name, value in lists.items()})


def test_compare_says_which_is_faster() -> None:
    fast, slow = rows(speedup=1.8), rows("1:2", speedup=1.1)
    got = compare(fast, slow)
    assert got.verdict == "higher"
    assert got.prompts == 12
    assert "a is faster" in str(got)
    assert compare(slow, fast).verdict == "lower"
    assert compare(slow, fast).ratio == pytest.approx(1 / got.ratio)


def test_compare_is_undecided_when_the_interval_holds_one() -> None:
    got = compare(rows(speedup=1.3, seed=3), rows("1:2", speedup=1.3, seed=4))
    assert got.low < 1 < got.high
    assert got.verdict == "undecided"
    assert "undecided" in str(got)
    assert Comparison("throughput", 2.0, float("nan"), float("nan"), 2).verdict == "undecided"


def test_an_arm_against_itself_is_rarely_decided() -> None:
    decided = 0
    for seed in range(60):
        a, b = rows(speedup=1.3, seed=seed), rows("1:2", speedup=1.3, seed=1000 + seed)
        decided += compare(a, b, value="speculative_speedup", resamples=300).verdict != "undecided"
    assert decided <= 8


def test_compare_ignores_the_order_of_rows() -> None:
    a, b = rows(speedup=1.8), rows("1:2", speedup=1.1)
    assert compare(a, b.iloc[::-1]) == compare(a, b)


def test_compare_refuses_different_prompts_and_names_them() -> None:
    a, b = rows(prompts=12), rows("1:2", prompts=12)
    with pytest.raises(DataError, match=r"only in a: json-3 \(json.*; only in b: mine-1") as caught:
        compare(a, b.assign(prompt_id=b.prompt_id.replace("json-3", "mine-1")))
    assert "json-4" not in str(caught.value)
    with pytest.raises(DataError, match="only in b: json-11"):
        compare(a.iloc[:-1], b)
    with pytest.raises(DataError, match="different prompts"):  # the same ids, other texts
        compare(a, b.assign(prompt_sha="f" * 16))


def test_compare_takes_one_arm_of_one_setting_and_a_known_metric() -> None:
    a, b = rows(), rows("1:2")
    with pytest.raises(DataError, match="a holds 2 arms"):
        compare(pd.concat([a, b]), b)
    with pytest.raises(DataError, match="b mixes parts"):
        compare(a, pd.concat([b, b.assign(part="p1")]))
    with pytest.raises(DataError, match="a holds 0 arms"):
        compare(a.iloc[:0], b)
    with pytest.raises(UnknownNameError, match="speculative_speedup"):
        compare(a, b, value="speed")


def test_summary_has_each_metric_with_its_interval() -> None:
    table = summary(pd.concat([rows("none"), rows("1:4")])).set_index("draft")
    arm, plain = table.loc["1:4"], table.loc["none"]
    made = rows("1:4")
    expected = {
        "speculative_speedup": made.baseline_decode_s.sum() / made.decode_s.sum(),
        "throughput": made.emitted.sum() / made.decode_s.sum(),
        "draft_acceptance_rate": 0.5,
        "acceptance_probability": 0.5 / 0.75,
        "expected_acceptance": 0.6,
        "fallback_ratio": 0.25,
        "refusal_ratio": 0,
        "quality_delta": 0,
        "quality": 1.0,
        "repetition": 0.1,
        "same_as_baseline": 1.0,
        "memory_growth": 0.25,
        "acceptance_by_position": [0.75, 0.25],
        "acceptance_by_position_conditional": [0.75, 0.5],
        "prompts": 12,
    }
    for name, value in expected.items():
        assert arm[name] == pytest.approx(value), name
    for name in ("speculative_speedup", "end_to_end_speedup", "throughput", "tokens_per_main_forward"):
        assert arm[f"{name}_low"] <= arm[name] <= arm[f"{name}_high"], name
    assert plain.speculative_speedup == 1
    assert np.isnan(plain.draft_acceptance_rate)
    assert np.isnan(plain.predicted_speedup)
    assert arm.predicted_speedup > 0


def test_summary_never_pools_different_settings() -> None:
    table = summary(pd.concat([rows(), rows(part="p1", temperature=1.0, seed=5)]))
    assert len(table) == 2
    assert "temperature" in table


# ---- quality against the main model's own output


def texts(better: str = "higher", **columns: Sequence[float | None]) -> pd.DataFrame:
    """Rows of one arm, a prompt each; what is not given is the same on both sides."""
    count = len(next(iter(columns.values())))
    same = {f"{prefix}{name}": [value] * count for name, value in TEXTS.items() for prefix in ("", "baseline_")}
    about = {"task": "t", "prompt_id": [f"t-{i}" for i in range(count)], "prompt_sha": "0", "quality_better": better}
    return pd.DataFrame({**about, **same, **columns}).astype(dict.fromkeys(same, float))


def test_quality_delta_is_the_paired_drop_of_the_score() -> None:
    """Pairs without a score on either side are left out: 1.0 would be the drop if None counted as failed."""
    made = texts(quality=[1, 0, 0, 1, None, 1, 0], baseline_quality=[1, 1, 1, 0, 1, None, 1])
    got = quality_change(made)
    assert got["quality_delta"].value == pytest.approx((0 + 1 + 1 - 1 + 1) / 5)
    assert got["quality_delta"].prompts == 5
    assert got["quality_delta"].low < got["quality_delta"].value < got["quality_delta"].high
    better = texts(quality=[1, 1, 1, 1, 1], baseline_quality=[0, 0, 1, 1, 1])
    assert quality_change(better)["quality_delta"].value == pytest.approx(-0.4)


def test_quality_delta_of_a_likelihood_is_its_relative_rise() -> None:
    nll, before = [2.0, 1.0, 3.0, 1.5, 0.5], [1.0, 1.0, 2.0, 1.5, 0.5]
    got = quality_change(texts("lower", quality=nll, baseline_quality=before, nll=nll, baseline_nll=before))
    assert got["quality_delta"].value == got["nll_delta"].value == pytest.approx(8 / 6 - 1)
    assert got["nll_delta"].value != pytest.approx(np.mean(np.divide(nll, before)) - 1)  # no mean of ratios
    assert got["repetition_delta"].value == 0


def test_repetition_delta_is_a_rise_of_shares() -> None:
    made = texts(repetition=[0.5, 0.25, None, 0.25, 0.0, 0.5], baseline_repetition=[0.25, 0.25, 0.0, 0.0, 0.0, 0.25])
    got = quality_change(made)["repetition_delta"]
    assert (got.value, got.prompts) == (pytest.approx(0.75 / 5), 5)


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_equal_texts_change_exactly_nothing(better: str) -> None:
    scores = list(np.random.default_rng(0).random(11))
    names = [f"{prefix}{name}" for name in TEXTS for prefix in ("", "baseline_")]
    for got in quality_change(texts(better, **dict.fromkeys(names, scores))).values():
        assert (got.value, got.low, got.high) == (0, 0, 0)
        assert not np.signbit(got.value)


def test_repeats_are_paired_and_prompts_are_counted_once() -> None:
    once = texts(quality=[1.0] * 5, baseline_quality=[1.0] * 5)
    again = texts(quality=[0.0] * 5, baseline_quality=[1.0, 1.0, 1.0, 1.0, 0.0])
    got = quality_change(pd.concat([once, again]))["quality_delta"]
    assert (got.value, got.prompts) == (pytest.approx(4 / 10), 5)


def test_pairing_narrows_the_interval() -> None:
    """Prompts whose NLL differs tenfold: what both sides share cancels, and does not in another order."""
    rng = np.random.default_rng(3)
    before = rng.lognormal(0, 1, 24)
    nll = before * rng.normal(1.1, 0.02, 24)
    paired = quality_change(texts(nll=list(nll), baseline_nll=list(before)))["nll_delta"]
    shuffled = quality_change(texts(nll=list(nll), baseline_nll=list(rng.permutation(before))))["nll_delta"]
    assert 0.08 < paired.low < 0.1 < paired.high < 0.12
    assert shuffled.low < 0 < shuffled.high


@pytest.mark.parametrize("better", [["neither"] * 6, ["higher"] * 3 + ["lower"] * 3])
def test_scores_without_a_common_direction_are_not_compared(better: list[str]) -> None:
    made = texts(quality=[0.0] * 6, nll=[3.0] * 6).assign(quality_better=better)
    got = quality_change(made)
    assert np.isnan(got["quality_delta"].value)
    assert got["quality_delta"].prompts == 0
    assert got["nll_delta"].value == pytest.approx(1.0)


def test_summary_says_how_many_prompts_were_compared() -> None:
    made = rows(quality=[None, 0.0, 0.5] + [1.0] * 9, nll=3.0, baseline_repetition=0.05)
    (line,) = summary(made).itertuples()
    assert (line.prompts, line.quality_prompts) == (12, 11)
    assert line.quality_delta == pytest.approx(1.5 / 11)
    assert (line.nll_delta, line.nll_delta_low, line.nll_delta_high) == pytest.approx((1, 1, 1))
    assert line.repetition_delta == pytest.approx(0.05)
    assert line.fallback_ratio_low <= line.fallback_ratio <= line.fallback_ratio_high
    few = summary(made.iloc[: LEAST - 1]).iloc[0]
    assert few.quality_delta == pytest.approx(1.5 / 3)
    assert np.isnan([few.quality_delta_low, few.quality_delta_high]).all()
