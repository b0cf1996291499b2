"""int8 storage: sizes, rounding error, vectors untouched."""

import torch

from specdec_lab.models.int8 import dequantise, quantise


def weights() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    matrix = torch.randn(16, 32, generator=rng) * torch.logspace(-3, 2, 16)[:, None]  # rows of unlike scale
    matrix[3] = 0
    return {"a.weight": matrix, "norm.weight": torch.randn(32, generator=rng).bfloat16()}


def test_what_is_stored() -> None:
    stored = quantise(weights())
    assert set(stored) == {"a.weight", "a.weight.scale", "norm.weight"}
    assert stored["a.weight"].dtype == torch.int8
    assert stored["a.weight.scale"].shape == (16,)
    assert stored["a.weight"].abs().amax(1).tolist() == [127 if row != 3 else 0 for row in range(16)]


def test_the_error_is_at_most_half_a_scale() -> None:
    before, stored = weights(), quantise(weights())
    after = dequantise(stored)
    assert set(after) == set(before)
    error = (after["a.weight"] - before["a.weight"]).abs()
    assert (error <= stored["a.weight.scale"][:, None] * 0.5001).all()
    assert (after["a.weight"][3] == 0).all()
    assert torch.equal(after["norm.weight"], before["norm.weight"].float())


def test_storing_again_changes_nothing() -> None:
    once = dequantise(quantise(weights()))
    twice = dequantise(quantise(once))
    torch.testing.assert_close(twice["a.weight"], once["a.weight"])
