"""Processors against transformers' own, their limits, and drawing by inverse CDF."""

import math
from typing import Any

import pytest
import torch
from scipy import stats

from specdec_lab.errors import SettingError
from specdec_lab.sampling import Sampling, distribution, draw, penalise, uniforms

VOCAB = 50


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed))


def theirs(scores: torch.Tensor, how: Sampling) -> torch.Tensor:
    """The distribution [rows, vocab] that transformers' generate draws from."""
    from transformers import generation as g

    steps: list[Any] = [g.TemperatureLogitsWarper(float(how.temperature))]
    steps += [g.TopKLogitsWarper(how.top_k)] if how.top_k else []
    steps += [g.TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    steps += [g.MinPLogitsWarper(how.min_p)] if how.min_p else []
    for step in steps:
        scores = step(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_k=7),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_k=10_000),
        Sampling(temperature=1.3, top_p=0.85),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=1.0, min_p=0.05),
        Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_distribution_is_that_of_transformers(how: Sampling) -> None:
    scores = logits(64)
    torch.testing.assert_close(distribution(scores, how), theirs(scores.clone(), how), atol=1e-6, rtol=1e-5)


def test_greedy_is_one_hot() -> None:
    scores = logits(5, 3)
    p = distribution(scores, Sampling())
    assert p.sum(-1).eq(1).all()
    assert (p.argmax(-1) == scores.argmax(-1)).all()
    assert p.amax() == 1


@pytest.mark.parametrize("temperature", [1e-2, 1e-10, 1e-38, 1e-45, 1e-300, 5e-324])
def test_temperature_tends_to_greedy(temperature: float) -> None:
    """CASES 22: no NaN, however small the temperature; also beyond what single precision can write."""
    scores = logits(20)
    p = distribution(scores, Sampling(temperature=temperature, top_k=5, top_p=0.9, min_p=0.1))
    torch.testing.assert_close(p, distribution(scores, Sampling()), atol=1e-4, rtol=0)


def test_a_logit_of_minus_infinity_has_probability_zero() -> None:
    """A draft's distribution over the padded vocabulary of its main model."""
    scores = logits(4)
    scores[:, 40:] = -math.inf
    p = distribution(scores, Sampling(temperature=0.5, top_k=45, top_p=0.99, min_p=1e-6))
    assert p.isfinite().all()
    assert (p[:, 40:] == 0).all()


def test_penalty_is_that_of_transformers() -> None:
    from transformers.generation import RepetitionPenaltyLogitsProcessor

    scores, seen = logits(3), [[1, 2, 2, 3], [7], [0, 49, 7, 7, 1]]
    before = scores.clone()
    ours = penalise(scores, seen, 1.3)
    for row, tokens in enumerate(seen):
        expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), scores[row : row + 1].clone())
        torch.testing.assert_close(ours[row : row + 1], expected)
    assert torch.equal(scores, before)
    assert penalise(scores, seen, 1.0) is scores


def test_draws_follow_p() -> None:
    """200,000 draws, χ² over 50 cells at 1e-4: a total variation of 0.0125 is found with a power above 0.99."""
    assert stats.ncx2.sf(stats.chi2.isf(1e-4, VOCAB - 1), VOCAB - 1, 4 * 200_000 * 0.0125**2) > 0.99
    p = logits().softmax(-1)
    u = torch.rand(200_000, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(draw(3.7 * p.expand(200_000, -1), u), minlength=VOCAB)  # any scale
    assert stats.chisquare(counts.numpy(), p.double().numpy() * 200_000 / p.double().sum().item()).pvalue > 1e-4


def test_draws_never_give_an_impossible_token() -> None:
    p = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0]])
    for u in (0.0, 0.3, 0.2999999, 0.3000001, 1 - 2**-24):
        assert p[0, draw(p, torch.tensor([u]))[0]] > 0
    assert draw(p, torch.tensor([1.0])).tolist() == [4]  # u rounded up


def test_uniforms_of_a_row_do_not_depend_on_the_others() -> None:
    """CASES 18: each row's numbers come from its own generator."""

    def numbers(seeds: list[int], counts: list[int]) -> torch.Tensor:
        return uniforms([torch.Generator().manual_seed(s) for s in seeds], counts, torch.device("cpu"))

    alone, together = numbers([5], [3])[0], numbers([9, 5, 1], [7, 3, 0])
    assert torch.equal(together[1, :3], alone)
    assert not torch.equal(together[0, :3], alone)
    assert together.shape == (3, 7)
    assert uniforms([], [], torch.device("cpu")).shape == (0, 0)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1, -1e-9, math.nan, math.inf]),
        ("top_k", [-1, 2.5]),
        ("top_p", [0, -0.1, 1.01, math.nan]),
        ("min_p", [1, -0.1, math.nan]),
        ("repetition_penalty", [0, -1, math.nan, math.inf]),
    ],
)
def test_out_of_range(field: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(SettingError, match=rf"^{field} = {value!r}: allowed is .*\d") as caught:
            Sampling(**{field: value})  # type: ignore[arg-type]
        assert caught.value.field == field
