"""Products with large weights on a CPU, for decoding: weights in the layout that oneDNN multiplies,
or in int8.

torch's own `linear` reorders a weight at every call, and that takes longer than the product of the
few tokens of a step. In int8, each token has a scale of its own and sums are integers, so that its
result does not depend on the tokens beside it.

Legend: R rows, I input width, O output width.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from itertools import count
from typing import Any, Literal, cast
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PackedBits = Literal[8]
"""What a CPU quantises weights to."""
LEAST = 1 << 18
"""Smaller weights stay as they are: they lie in the caches of the CPU."""
FEW = 4
"""Fewer rows are padded to so many, with which oneDNN takes less time than with one."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of transformers that read the same states."""
TINY = torch.finfo(torch.float32).tiny
"""The least scale: that of a row of zeros."""

_weights: WeakValueDictionary[int, PackedWeight] = WeakValueDictionary()
_keys = count()


class PackedWeight:
    """A frozen weight (O, I) as this CPU multiplies it fastest. bits: 8, or None: its own dtype.

    Raises ValueError for int8 on a CPU for which torch has no kernels.
    """

    def __init__(self, weight_OI: Tensor, bits: PackedBits | None = None) -> None:
        self.bits, self.shape, self.dtype = bits, weight_OI.shape, weight_OI.dtype
        self.key = next(_keys)
        _weights[self.key] = self
        # compilers do not see what this holds: they call the operator below
        with torch.inference_mode(False), torch.no_grad():
            if bits:
                if not has_int8():
                    raise ValueError(
                        "bits=8: expected a CPU with AVX2, for which torch has int8 products, got "
                        "another; leave bits out, or convert the heads for llama.cpp"
                    )
                self._steps = 127 if torch.cpu._is_vnni_supported() else 63
                self._int8 = pack_int8(weight_OI)
            else:
                weight_OI = weight_OI.detach().contiguous()
                self._own = torch.ops.mkldnn._reorder_linear_weight(weight_OI, FEW)

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T: (..., I) to (..., O), in the dtype of x."""
        x_RI = x.flatten(0, -2)
        if self.bits:
            x_RI32 = x_RI.float()
            largest_R1 = x_RI32.abs().amax(-1, keepdim=True).clamp(min=TINY)
            product_RO = (self._product(x_RI32 / largest_R1) * largest_R1).to(x.dtype)
        else:
            rows = len(x_RI)
            if rows < FEW:
                x_RI = F.pad(x_RI, (0, 0, 0, FEW - rows))
            product_RO = self._product(x_RI)[:rows]
        return product_RO.view(*x.shape[:-1], self.shape[0])

    def __deepcopy__(self, memo: Any) -> PackedWeight:
        """The same, as it is frozen, and torch cannot copy what it holds."""
        return self

    @property
    def nbytes(self) -> int:
        """Memory that a product reads."""
        return self.shape.numel() * (1 if self.bits else self.dtype.itemsize)

    def dense(self) -> Tensor:
        """The weight (O, I) again; in int8, rounded, in float32."""
        if self.bits:
            return cast(Tensor, torch.ops.quantized.linear_unpack(self._int8)[0].dequantize())
        return cast(Tensor, self._own.to_dense())

    def _product(self, x_RI: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            product_RO: Tensor = torch.ops.draftheads.packed_product(x_RI, self.key, self.shape[0])
            return product_RO
        return self.multiply(x_RI)

    def multiply(self, x_RI: Tensor) -> Tensor:
        """What compilers do not see of a product."""
        if self.bits:
            # not by the name of all overloads, which looks through its arguments at each call
            op = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
            sums_RO: Tensor = op(x_RI, 1 / self._steps, self._steps + 1, self._int8)
            return sums_RO
        product_RO: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x_RI, self._own, None, "none", [], ""
        )
        return product_RO


@torch.library.custom_op("draftheads::packed_product", mutates_args=())
def _packed_product(x_RI: Tensor, key: int, width: int) -> Tensor:
    return _weights[key].multiply(x_RI)


@_packed_product.register_fake
def _(x_RI: Tensor, key: int, width: int) -> Tensor:
    return x_RI.new_empty(len(x_RI), width)


class FusedWeight:
    """Weights that multiply the same states, one after another: one product of all takes less time.

    What is multiplied first asks for all products, which the others find here.
    """

    def __init__(self, weights: Sequence[Tensor], bits: PackedBits | None) -> None:
        self.packed = PackedWeight(torch.cat([*weights]), bits)
        self.sizes = [len(weight_OI) for weight_OI in weights]
        self._last: tuple[Tensor | None, dict[int, Tensor]] = (None, {})

    def product(self, x: Tensor, index: int) -> Tensor:
        """That of one of the weights."""
        states, products = self._last
        if states is not x or index not in products:
            products = dict(enumerate(torch.split(self.packed(x), self.sizes, dim=-1)))
            self._last = (x, products)
        product = products.pop(index)
        if not products:
            self._last = (None, {})
        return product

    def __deepcopy__(self, memo: Any) -> FusedWeight:
        """The same, as it is frozen."""
        return self


class FusedPart:
    """One weight of several that are multiplied together; stands for a `PackedWeight`."""

    def __init__(self, fused: FusedWeight, index: int) -> None:
        self._fused = fused
        self._index = index
        self.bits = fused.packed.bits
        self.dtype = fused.packed.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T: (..., I) to (..., O), in the dtype of x."""
        return self._fused.product(x, self._index)

    def dense(self) -> Tensor:
        """As of `PackedWeight`."""
        return torch.split(self._fused.packed.dense(), self._fused.sizes)[self._index]


class PackedLinear(nn.Module):
    """Takes the place of a linear layer. keep: its weight stays, for those that read it."""

    def __init__(
        self, linear: nn.Linear, packed: PackedWeight | FusedPart, *, keep: bool = False
    ) -> None:
        super().__init__()
        self.packed = packed
        if keep:
            # not by name: `__getattr__` has one already; before the bias, as in linear layers
            self._parameters["weight"] = cast(nn.Parameter, linear.weight)
            vars(linear.weight)["packed"] = self.packed
        self.bias = linear.bias

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "weight" not in self._parameters:  # a model's own code reads it
            return self.packed.dense()
        return super().__getattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Raise ValueError where a packed weight cannot follow."""
        moved = fn(torch.empty(0, dtype=self.packed.dtype))
        dtype = self.packed.dtype
        if moved.device.type != "cpu" or (moved.dtype != dtype and not self.packed.bits):
            raise ValueError(
                f"packed weights: expected to stay on the CPU in {dtype}, got {moved.device} and "
                f"{moved.dtype}; load the target there, and pack it last"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        product = self.packed(x)
        return product if self.bias is None else product + self.bias


def operand(weight: Tensor) -> Tensor | PackedWeight:
    """The packed form of a weight, if it has one, else the weight: what decoding multiplies by."""
    packed: Tensor | PackedWeight = getattr(weight, "packed", weight)
    return packed


def pack_like(other: Tensor, weight: Tensor) -> Tensor:
    """The same weight, packed as another one was, if that was."""
    packed = operand(other)
    if isinstance(packed, PackedWeight):
        vars(weight)["packed"] = PackedWeight(weight, packed.bits)
    return weight


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has its own layout for matrices of this dtype."""
    supported: dict[torch.dtype, bool] = {}
    if device.type == "cpu" and torch._C._has_mkldnn:
        supported = {
            torch.float32: True,
            torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        }
    return supported.get(dtype, False)


def has_int8() -> bool:
    """Whether torch has int8 products for this CPU."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def pack_int8(weight_OI: Tensor) -> torch.ScriptObject:
    """A weight in 8 bits, symmetric, with a scale for each output."""
    weight_OI = weight_OI.detach().float()
    scales_O = (weight_OI.abs().amax(1) / 127).clamp(min=TINY).double()
    zeros_O = torch.zeros_like(scales_O, dtype=torch.long)
    with warnings.catch_warnings(action="ignore"):  # of a future torch without it
        int8_OI = torch.quantize_per_channel(weight_OI, scales_O, zeros_O, 0, torch.qint8)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"  # oneDNN's product takes 1.4 times as long per step
    try:
        packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(int8_OI, None)
    finally:
        torch.backends.quantized.engine = engine
    return packed


def pack_layers(
    module: nn.Module,
    bits: PackedBits | None,
    *,
    small: bool = False,
    keep: Collection[nn.Module] = (),
) -> None:
    """Pack the large linear layers of a module, and with `small` all of them; free their weights
    unless `keep` has the layer.
    """
    least = 0 if small else LEAST
    for parent in list(module.modules()):
        children = parent.named_children()
        linear = {name: child for name, child in children if type(child) is nn.Linear}
        for names in FUSED:
            layers = [linear[name] for name in names if name in linear and linear[name] not in keep]
            numbers = sum(layer.weight.numel() for layer in layers)
            if len(layers) == len(names) and numbers >= least:
                fused = FusedWeight([layer.weight for layer in layers], bits)
                for index, name in enumerate(names):
                    setattr(parent, name, PackedLinear(linear.pop(name), FusedPart(fused, index)))
        for name, child in linear.items():
            if child.weight.numel() >= least:
                packed = PackedWeight(child.weight, bits)
                setattr(parent, name, PackedLinear(child, packed, keep=child in keep))
