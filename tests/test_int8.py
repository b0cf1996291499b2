"""int8 storage: sizes, rounding error, vectors untouched."""

import pytest
import torch

from specdec_lab.models import linear
from specdec_lab.models.int8 import dequantise, quantise
from specdec_lab.models.linear import Linear


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


@pytest.mark.parametrize("tokens", [1, 5, 40, 200])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (2800, 576), (576, 1400), (7, 33)])
def test_the_int8_layout_computes_the_rounded_product(rows: int, columns: int, tokens: int) -> None:
    """Sizes that are no multiple of the kernel's block, and more tokens than it is used for, are exact as well."""
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(rows, columns, generator=generator), torch.randn(1, tokens, columns, generator=generator)
    bias = torch.randn(rows, generator=generator)
    rounded = dequantise(quantise({"w": weight}))["w"]
    got = Linear(weight, bias, "int8")(x)
    expected = x @ rounded.t() + bias
    assert got.shape == expected.shape
    assert (got - expected).norm() < 0.01 * expected.norm()  # activations and result in bf16


def test_the_int8_layout_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "int8_works", lambda: False)
    assert Linear(torch.randn(8, 8), None, "int8").layout == "transposed"
