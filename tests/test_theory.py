"""Expected tokens against simulation, the speed-up formula, and the measured cost of verifying."""

import numpy as np
import pytest

from specdec_lab import theory
from specdec_lab.errors import SettingError
from specdec_lab.models import zoo
from specdec_lab.theory import (
    VerifyCurve,
    alpha_of,
    best_draft_length,
    break_even,
    expected_tokens,
    measure_verify_curve,
    most_tokens,
    speedup,
)

CURVE = VerifyCurve((1, 2, 4, 8), (1.0, 1.2, 1.6, 3.2), (0.01, 0.012, 0.016, 0.032))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("draft_length", [0, 1, 4, 8])
def test_expected_tokens_is_what_simulated_chains_emit(alpha: float, draft_length: int) -> None:
    """100,000 chains; the standard error of their mean is below 0.01, and 5 of them are allowed."""
    stays = np.random.default_rng(0).random((100_000, draft_length)) < alpha
    emitted = 1 + np.cumprod(stays, axis=1).sum(1)
    assert expected_tokens(alpha, draft_length) == pytest.approx(emitted.mean(), abs=0.05)


def test_expected_tokens_in_closed_form() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert expected_tokens(1.0, 4) == 5


@pytest.mark.parametrize("candidates", [1, 4])
def test_no_step_emits_more_than_alpha_allows_however_positions_differ(candidates: int) -> None:
    """Each step tries its candidates' places in turn, with rates of its own; the best case reaches the bound."""
    rng = np.random.default_rng(0)
    for rejects in (None, candidates):  # what random steps reject, and as much as they can
        rejected = rng.integers(0, candidates + 1, 1000) if rejects is None else np.full(1000, rejects)
        accepted = rng.integers(0, 9, 1000)
        alpha, tau = accepted.sum() / (accepted.sum() + rejected.sum()), 1 + accepted.mean()
        bound = most_tokens(alpha, candidates)
        assert tau <= bound + 1e-9
        assert (tau == pytest.approx(bound)) == (rejects is not None)
    assert most_tokens(0.5) == 2 == pytest.approx(expected_tokens(0.5, 60))
    assert most_tokens(1.0) == float("inf")


def test_the_alpha_behind_a_share_of_drafted_tokens() -> None:
    for alpha in (0.2, 0.74, 0.99):
        rate = (expected_tokens(alpha, 16) - 1) / 16
        assert alpha_of(rate, 16) == pytest.approx(alpha, abs=1e-9)
    with pytest.raises(SettingError, match="rate"):
        alpha_of(1.2, 16)


def test_the_curve_between_and_beyond_what_was_measured() -> None:
    assert CURVE(1) == 1
    assert CURVE(3) == pytest.approx(1.4)
    assert CURVE(6) == pytest.approx(2.4)
    assert CURVE(10) == pytest.approx(3.2 + 2 * 0.4)
    assert VerifyCurve((1,), (1.0,), (0.01,))(5) == 1


def test_speedup() -> None:
    assert speedup(0.8, 0, 0.3) == 1
    assert speedup(1.0, 4, 0.0) == 5
    assert speedup(0.8, 3, 0.1, CURVE) == pytest.approx(expected_tokens(0.8, 3) / (0.3 + 1.6))


def test_high_acceptance_may_still_be_slower() -> None:
    """CASES 1, 2: α = 0.9 does not help when drafting is dear, or when verifying is."""
    assert speedup(0.9, 4, 1.0) < 1
    dear = VerifyCurve((1, 5), (1.0, 5.0), (0.01, 0.05))
    assert speedup(0.9, 4, 0.0, dear) < 1 < speedup(0.9, 4, 0.0)


@pytest.mark.parametrize(("draft_length", "c"), [(1, 0.1), (4, 0.2), (8, 0.05)])
def test_break_even(draft_length: int, c: float) -> None:
    alpha = break_even(draft_length, c, CURVE)
    assert alpha is not None
    assert 0 < alpha < 1
    assert speedup(alpha, draft_length, c, CURVE) == pytest.approx(1)
    assert speedup(alpha + 0.01, draft_length, c, CURVE) > 1 > speedup(alpha - 0.01, draft_length, c, CURVE)


def test_no_break_even() -> None:
    assert break_even(4, 1.2) is None
    assert break_even(0, 0.1) is None
    assert break_even(4, 0.0) == pytest.approx(0)


def test_best_draft_length() -> None:
    assert best_draft_length(0.5, 1.5) == 0  # nothing pays
    assert best_draft_length(0.999, 0.001, most=12) == 12
    best = best_draft_length(0.8, 0.1, CURVE)
    assert all(speedup(0.8, best, 0.1, CURVE) >= speedup(0.8, other, 0.1, CURVE) for other in range(33))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.2, 4), r"alpha = 1\.2: allowed is 0 … 1"),
        (lambda: expected_tokens(float("nan"), 4), r"alpha = nan: allowed is 0 … 1"),
        (lambda: expected_tokens(0.5, -1), r"draft_length = -1: allowed is an integer >= 0"),
        (lambda: speedup(0.5, -1, 0.1), r"draft_length = -1: allowed is an integer >= 0"),
        (lambda: speedup(0.5, 4, -0.1), r"c = -0\.1: allowed is a number >= 0"),
    ],
)
def test_out_of_range(call: object, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        call()  # type: ignore[operator]


def test_the_measured_curve(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances with the tokens fed stands in for time, so that medians and order are exact."""
    model = zoo.load_main(tiny_folder, device="cpu", dtype="float32").model
    clock, fed = [0.0], []
    forward = model.forward

    def counted(tokens, cache, parents=None):
        clock[0] += 2 + tokens.shape[1]
        fed.append((tokens.shape[1], cache.lengths[0]))
        return forward(tokens, cache, parents)

    monkeypatch.setattr(model, "forward", counted)
    monkeypatch.setattr(theory, "now", lambda device: clock[0])
    curve = measure_verify_curve(model, ks=(4, 2, 9), context=16, repeats=3)
    assert curve.ks == (1, 2, 4, 9)
    assert curve.seconds == (3, 4, 6, 11)
    assert curve.ratio == pytest.approx((1, 4 / 3, 2, 11 / 3))
    assert fed == [(16, 0)] + [(1, 16), (2, 16), (4, 16), (9, 16)] * 4


def test_the_curve_stays_within_the_context(tiny_folder: str) -> None:
    model = zoo.load_main(tiny_folder, device="cpu", dtype="float32").model
    assert measure_verify_curve(model, ks=(1, 2, 64), context=500, repeats=1).ks == (1, 2)
    with pytest.raises(SettingError, match=r"context = 512: allowed is 1 … 511"):
        measure_verify_curve(model, context=512)
