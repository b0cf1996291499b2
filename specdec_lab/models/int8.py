"""Weights stored as int8 with a scale per row: a quarter of the size, rounding error at most scale / 2."""

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ".scale"


def quantise(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices become int8 and gain a `<name>.scale` [out_features] in fp32; vectors stay as they are."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            stored[name] = weight.detach().float().contiguous()
            continue
        scale = weight.detach().float().abs().amax(1).clamp(min=1e-12) / 127  # [out_features]
        stored[name] = (weight.detach().float() / scale[:, None]).round().to(torch.int8)
        stored[name + SCALE] = scale
    return stored


def dequantise(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fp32 weights that `quantise` stored."""
    return {
        name: weight.float() * stored[name + SCALE][:, None] if name + SCALE in stored else weight.float()
        for name, weight in stored.items()
        if not name.endswith(SCALE)
    }
