"""Matrix products in the layout that is fastest for one to some dozen tokens.

On CPU in fp32, `F.linear` re-reads the weights when four or more tokens come at once. Two layouts avoid that:
a transposed copy for `torch.mm`, and oneDNN's own packed blocks. The packed product is a private operation of
torch, so it is tried once and left alone where it is missing.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x Wᵀ + b for x [..., in_features]; `layout` is "plain", "transposed" or "packed"."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, layout: str = "plain") -> None:
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            layout = "plain"
        if layout == "packed" and not packing_works():
            layout = "transposed"
        self.layout, self.bias = layout, bias
        self.out_features, self.in_features = weight.shape
        if layout == "transposed":
            self.weight = weight.t().contiguous()
        elif layout == "packed":
            self.weight = _pack(weight)
        else:
            self.weight = weight.contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as stored."""
        return self.out_features * self.in_features * self.weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        if self.layout == "plain":
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, self.in_features)
        if self.layout == "packed":
            y = torch.ops.mkldnn._linear_pointwise(flat, self.weight, self.bias, "none", [], "")
        elif self.bias is None:
            y = torch.mm(flat, self.weight)
        else:
            y = torch.addmm(self.bias, flat, self.weight)
        return y.view(*x.shape[:-1], self.out_features)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)


@cache
def packing_works() -> bool:
    """Whether this build of torch has oneDNN's packed product and it computes the right thing."""
    weight, x = torch.linspace(-1, 1, 64 * 48).view(64, 48), torch.linspace(-1, 1, 5 * 48).view(5, 48)
    try:
        y = torch.ops.mkldnn._linear_pointwise(x, _pack(weight), None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(y, x @ weight.t(), atol=1e-4)
