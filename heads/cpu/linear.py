"""Products with large weights on a CPU, for decoding: weights in the layout that oneDNN multiplies,
or in int8.

torch's own `linear` reorders a weight at every call, and that takes longer than the product of the
few tokens of a step. In int8, each token has a scale of its own and sums are integers, so that its
result does not depend on the tokens beside it. Where inputs are known to differ in size, large ones
are divided and their weights multiplied (SmoothQuant, arXiv:2211.10438, formula 4, alpha 0.5).

Legend: R rows, I input width, O output width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import cache
from itertools import count
from typing import Any, Literal, cast
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

PackedBits = Literal[8]
"""What a CPU quantises weights to."""
LEAST = 1 << 18
"""Smaller weights stay as they are: they lie in the caches of the CPU."""
FEW = 4
"""Fewer rows are padded to so many, with which oneDNN takes less time than with one."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of transformers that read the same states."""
STEPS = 127
"""Of int8 to either side of zero."""
ROUNDED_ROWS = 4096
"""Rows of a weight that are rounded together: this takes 17 bytes a number for a while."""
TINY = torch.finfo(torch.float32).tiny
"""The least scale: that of a row of zeros."""

_weights: WeakValueDictionary[int, PackedWeight] = WeakValueDictionary()
_keys = count()
_packed: MutableMapping[Tensor, PackedWeight] = WeakTensorKeyDictionary()
"""Weights that stay beside their packed form -> that form."""


class PackedWeight:
    """A frozen weight (O, I) as this CPU multiplies it fastest. bits: 8, or None: its own dtype.
    sizes_I: of the inputs, the largest to be expected, for int8.

    Raises ValueError for int8 on a CPU for which torch has no kernels.
    """

    def __init__(
        self, weight_OI: Tensor, bits: PackedBits | None = None, sizes_I: Tensor | None = None
    ) -> None:
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
                self._inverse_I = torch.ones(()) if sizes_I is None else inverse(sizes_I, weight_OI)
                self._int8 = pack_int8(weight_OI / self._inverse_I, in_pairs=saturates())
            else:
                weight_OI = weight_OI.detach().contiguous()
                self._own = torch.ops.mkldnn._reorder_linear_weight(weight_OI, FEW)

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T: (..., I) to (..., O), in the dtype of x."""
        x_RI = x.flatten(0, -2)
        if self.bits:
            x_RI32 = x_RI.float() * self._inverse_I
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
            int8_OI: Tensor = torch.ops.quantized.linear_unpack(self._int8)[0]
            return int8_OI.dequantize() * self._inverse_I
        return cast(Tensor, self._own.to_dense())

    def _product(self, x_RI: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            product_RO: Tensor = torch.ops.draftheads.packed_product(x_RI, self.key, self.shape[0])
            return product_RO
        return self.multiply(x_RI)

    def multiply(self, x_RI: Tensor) -> Tensor:
        """What compilers do not see of a product."""
        if self.bits:
            return multiply_int8(x_RI, self._int8)
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

    Whoever multiplies a tensor first computes all products; the others find theirs if they come
    with the same tensor, and the last one frees them.
    """

    def __init__(
        self, weights: Sequence[Tensor], bits: PackedBits | None, sizes_I: Tensor | None = None
    ) -> None:
        self.packed = PackedWeight(torch.cat([*weights]), bits, sizes_I)
        self.sizes = [len(weight_OI) for weight_OI in weights]
        self._states: Tensor | None = None
        self._products: dict[int, Tensor] = {}  # of these states, by weight, until they are taken

    def product(self, x: Tensor, index: int) -> Tensor:
        """That of one of the weights."""
        if self._states is not x or index not in self._products:
            self._states = x
            self._products = dict(enumerate(torch.split(self.packed(x), self.sizes, dim=-1)))
        product = self._products.pop(index)
        if not self._products:
            self._states = None
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
            assert isinstance(packed, PackedWeight)  # nothing that is kept is fused
            _packed[linear.weight] = packed
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
    return _packed.get(weight, weight)


def pack_like(other: Tensor, weight: Tensor) -> Tensor:
    """The same weight, packed as another one was, if that was."""
    packed = operand(other)
    if isinstance(packed, PackedWeight):
        _packed[weight] = PackedWeight(weight, packed.bits)
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


@cache
def saturates() -> bool:
    """Whether int8 products of this CPU, one without VNNI, add pairs of products in 16 bits, where
    2 * 255 * 127 does not fit.
    """
    ones_1I = torch.ones(1, 64)
    return bool(multiply_int8(ones_1I, pack_int8(ones_1I)) < 63)


def multiply_int8(x_RI: Tensor, int8: torch.ScriptObject) -> Tensor:
    """The product of numbers from -1 to 1, in 255 steps, with a weight of `pack_int8`."""
    # not by the name of all overloads, which looks through its arguments at each call
    op = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    product_RO: Tensor = op(x_RI, 1 / STEPS, STEPS + 1, int8)
    return product_RO


def pack_int8(weight_OI: Tensor, *, in_pairs: bool = False) -> torch.ScriptObject:
    """A weight in 8 bits, as torch multiplies it; see `to_int8`."""
    int8_OI, scales_O = to_int8(weight_OI, in_pairs=in_pairs)
    zeros_O = torch.zeros_like(scales_O, dtype=torch.long)
    with warnings.catch_warnings(action="ignore"):  # of a future torch without it
        quantised_OI = torch._make_per_channel_quantized_tensor(
            int8_OI, scales_O.double(), zeros_O, 0
        )
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"  # oneDNN's product takes 1.4 times as long per step
    try:
        packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantised_OI, None)
    finally:
        torch.backends.quantized.engine = engine
    return packed


def to_int8(weight_OI: Tensor, *, in_pairs: bool = False) -> tuple[Tensor, Tensor]:
    """A weight in 8 bits, symmetric, and a scale for each output. in_pairs: two neighbours have at
    most 128 steps together: 255 * 128 < 2^15.
    """
    weights = []
    scales = []
    for part_OI in torch.split(weight_OI.detach(), ROUNDED_ROWS):
        part_OI = part_OI.float()
        sizes_OI = part_OI.abs()
        if in_pairs:
            odd = sizes_OI.shape[1] % 2
            sizes_OI = F.pad(sizes_OI, (0, odd)).reshape(len(sizes_OI), -1, 2).sum(2)
        scales_O = (sizes_OI.amax(1) / STEPS).clamp(min=TINY)
        weights.append((part_OI / scales_O[:, None]).round().to(torch.int8))
        scales.append(scales_O)
    return torch.cat(weights), torch.cat(scales)


def inverse(sizes_I: Tensor, weight_OI: Tensor) -> Tensor:
    """What inputs are multiplied by, and columns of the weight divided by, before they are rounded:
    then both have the same range, the geometric mean of what they have.
    """
    columns_I = weight_OI.detach().float().abs().amax(0)
    is_used_I = (sizes_I > 0) & (columns_I > 0)
    return torch.where(is_used_I, (columns_I / sizes_I).sqrt(), 1.0)


def input_sizes(run: Callable[[], Any], module: nn.Module) -> dict[nn.Module, Tensor]:
    """The largest size of each input (I,) of the linear layers of a module while it runs."""
    sizes: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        x_RI = inputs[0].detach().float().flatten(0, -2).abs()
        before_I = sizes.get(layer, torch.zeros(x_RI.shape[1]))
        sizes[layer] = torch.cat([x_RI, before_I[None]]).amax(0)

    layers = [layer for layer in module.modules() if type(layer) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    run()
    for hook in hooks:
        hook.remove()
    return sizes


def pack_layers(
    module: nn.Module,
    bits: PackedBits | None,
    *,
    small: bool = False,
    keep: Collection[nn.Module] = (),
    sizes: Mapping[nn.Module, Tensor] | None = None,
) -> None:
    """Pack the large linear layers of a module, and with `small` all of them; free their weights
    unless `keep` has the layer. sizes: of their inputs, if known.
    """
    sizes = sizes or {}
    least = 0 if small else LEAST
    for parent in list(module.modules()):
        children = parent.named_children()
        linear = {name: child for name, child in children if type(child) is nn.Linear}
        for names in FUSED:
            layers = [linear[name] for name in names if name in linear and linear[name] not in keep]
            numbers = sum(layer.weight.numel() for layer in layers)
            if len(layers) == len(names) and numbers >= least:
                weights = [layer.weight for layer in layers]
                fused = FusedWeight(weights, bits, sizes.get(layers[0]))
                for index, name in enumerate(names):
                    setattr(parent, name, PackedLinear(linear.pop(name), FusedPart(fused, index)))
        for name, child in linear.items():
            if child.weight.numel() >= least:
                packed = PackedWeight(child.weight, bits, sizes.get(child))
                setattr(parent, name, PackedLinear(child, packed, keep=child in keep))


def pack_head(head: nn.Module, device: torch.device) -> None:
    """Pack the large layers of a draft head, on a CPU, for drafting: in int8, of which torch has
    kernels for most CPUs, or as oneDNN lays them out. Drafts change by rounding, output does not.
    """
    bits: PackedBits | None = 8 if has_int8() else None
    dtype = next(head.parameters()).dtype
    if device.type == "cpu" and (bits or can_pack(device, dtype)):
        pack_layers(head, bits, keep=list(head.modules()))
