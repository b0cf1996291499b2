"""Matrix products in the layout that is fastest for one to some dozen tokens.

On CPU in fp32, `F.linear` re-reads the weights when four or more tokens come at once. Two layouts avoid that:
a transposed copy for `torch.mm`, and oneDNN's own packed blocks. The packed product is a private operation of
torch, so it is tried once and left alone where it is missing. Drafts may read int8 weights instead: a quarter of the
bytes, and rounding that costs acceptance, never correctness. "packed_bf16" rounds weights and inputs to bfloat16 in
oneDNN's blocks: faster for a few tokens, but logits move by some tenths, so that it has to be asked for.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.errors import ModelError
from specdec_lab.models.int8 import SCALE, quantise

LAYOUTS = ("plain", "transposed", "packed", "int8", "packed_bf16")
INT8_TOKENS = 128  # most tokens of an int8 product
INT8_BLOCK = 64  # rows and columns of its weights come in multiples of this


class Linear:
    """y = x Wᵀ + b for x [..., in_features]; `layout` is one of LAYOUTS, "plain" off the CPU and for half precision.

    Raises ModelError where "packed_bf16" is asked for and this build of torch lacks it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, layout: str = "plain") -> None:
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            layout = "plain"
        if (layout == "packed" and not packing_works()) or (layout == "int8" and not int8_works()):
            layout = "transposed"
        if layout == "packed_bf16" and not bf16_packing_works():
            raise ModelError("this build of torch has no packed bfloat16 product on this CPU; use dtype float32")
        self.layout, self.bias = layout, bias
        self.out_features, self.in_features = weight.shape
        if layout == "transposed":
            self.weight = weight.t().contiguous()
        elif layout == "packed":
            self.weight = _pack(weight)
        elif layout == "packed_bf16":
            self.weight = _pack(weight.bfloat16())
        elif layout == "int8":
            # the product reads whole blocks: sizes that are no multiples of one are padded with zeros
            padded = F.pad(weight, (0, -self.in_features % INT8_BLOCK, 0, -self.out_features % INT8_BLOCK))
            stored = quantise({"weight": padded})
            self.weight, self.scale = stored["weight"], stored["weight" + SCALE].bfloat16()
        else:
            self.weight = weight.contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as stored, padding and scales of an int8 one included."""
        if self.layout == "int8":
            return self.weight.nbytes + self.scale.nbytes
        return self.out_features * self.in_features * self.weight.element_size()

    def nbytes_beside(self, other: Tensor) -> int:
        """As `nbytes`, but for what is `other` itself."""
        return 0 if self.weight is other else self.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.layout == "plain":
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, self.in_features)
        if self.layout == "int8":
            y = self._int8(flat)
        elif self.layout == "packed":
            y = _packed_product(flat, self.weight, self.bias)
        elif self.layout == "packed_bf16":
            y = _packed_product(flat.bfloat16(), self.weight, None).float()
            y = y if self.bias is None else y + self.bias
        elif self.bias is None:
            y = torch.mm(flat, self.weight)
        else:
            y = torch.addmm(self.bias, flat, self.weight)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _int8(self, x: Tensor) -> Tensor:
        """x [n, in_features]; the int8 product is made for few tokens, many are cheaper with the weights expanded."""
        x = F.pad(x, (0, self.weight.shape[1] - self.in_features))
        if len(x) <= INT8_TOKENS:
            y = torch._weight_int8pack_mm(x.bfloat16(), self.weight, self.scale).float()
        else:
            y = x @ (self.weight.float() * self.scale.float()[:, None]).t()
        y = y[:, : self.out_features]
        return y if self.bias is None else y + self.bias


class Switched:
    """A Linear in two layouts: `few` for fewer than `switch` tokens, `many` for as many and more."""

    def __init__(self, few: Linear, many: Linear, switch: int) -> None:
        self.few, self.many, self.switch = few, many, switch

    @property
    def layout(self) -> str:
        """Both layouts and where they change, as "plain, packed from 4"."""
        return f"{self.few.layout}, {self.many.layout} from {self.switch}"

    @property
    def nbytes(self) -> int:
        """Bytes of the weight in both layouts."""
        return self.few.nbytes + self.many.nbytes

    def nbytes_beside(self, other: Tensor) -> int:
        """As `nbytes`, but for what is `other` itself."""
        return self.few.nbytes_beside(other) + self.many.nbytes_beside(other)

    def __call__(self, x: Tensor) -> Tensor:
        tokens = x.numel() // self.few.in_features
        return (self.few if tokens < self.switch else self.many)(x)


def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)


@cache
def int8_works() -> bool:
    """Whether this build of torch has the weight-only int8 product and it computes the right thing."""
    weight, x = torch.linspace(-1, 1, 64 * 64).view(64, 64), torch.linspace(-1, 1, 5 * 64).view(5, 64)
    stored = quantise({"weight": weight})
    try:
        y = torch._weight_int8pack_mm(x.bfloat16(), stored["weight"], stored["weight" + SCALE].bfloat16())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(y.float(), x @ weight.t(), atol=0.3)


@cache
def packing_works() -> bool:
    """Whether this build of torch has oneDNN's packed product and it computes the right thing."""
    weight, x = torch.linspace(-1, 1, 64 * 48).view(64, 48), torch.linspace(-1, 1, 5 * 48).view(5, 48)
    try:
        y = _packed_product(x, _pack(weight), None)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(y, x @ weight.t(), atol=1e-4)


@cache
def bf16_packing_works() -> bool:
    """Whether this build of torch has the packed product in bfloat16 and it computes the right thing."""
    weight, x = torch.linspace(-1, 1, 64 * 48).view(64, 48), torch.linspace(-1, 1, 5 * 48).view(5, 48)
    try:
        y = _packed_product(x.bfloat16(), _pack(weight.bfloat16()), None)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(y.float(), x @ weight.t(), atol=0.3)
