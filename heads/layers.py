"""The modules that draft heads consist of, and the maps of their draft vocabularies.

Legend: B batch, Q query positions, M tokens, K heads, D width, E input width of a layer, H query
heads, G key/value heads, W head width, V vocabulary, v draft vocabulary, N blocks of S slots, t
taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftheads.heads.choices import LayerSizes
from draftheads.heads.cpu.linear import PackedWeight
from draftheads.heads.target.model import Target
from draftheads.heads.tensors import needed

T = TypeVar("T")
Angles = tuple[Tensor, ...]
"""Cosines and signed sines, float32 (B, 1, Q, W) each. A target's own layer has positions instead,
int64 (B, 1, Q, 1).
"""
Positional = Callable[[Tensor], Angles]
"""Angles of positions_BQ."""

KEYS = {
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "eps": "rms_norm_eps",
    "context": "max_position_embeddings",
}
"""The fields of `LayerShape` by their names in a Llama config."""
TAPS = 2
"""Slots that a convolution reads: its own and the one before."""
GROUP = 16
"""Channels of a convolution's input that have the same correction of their kernels."""
STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""RoPE scalings whose angles do not depend on the length of the text."""


class Cached(Generic[T]):
    """A value computed from parameters, and computed again when one of them has changed.

    `get` compares storages and version counters, which a write through `.data` leaves unchanged.
    `refresh`, called once per generation by `begin_drafting`, therefore compares checksums.
    """

    def __init__(self) -> None:
        self._parameters: tuple[Tensor, ...] = ()
        self._versions: list[tuple[int, int]] | None = None
        self._checksums: list[int] = []
        self._value: T

    def get(
        self, parameters: Iterable[Tensor], make: Callable[[], T], frozen: Iterable[Tensor] = ()
    ) -> T:
        """The result of `make` for these parameters; frozen: others, compared without checksums."""
        if torch.compiler.is_compiling() and self._versions is not None:  # after an eager step
            return self._value
        self._parameters = tuple(parameters)
        read = (*self._parameters, *frozen)
        versions = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in read]
        if self._versions != versions:
            with torch.inference_mode(False), torch.no_grad():  # training may use it, too
                self._value = make()
                self._checksums = _checksums(self._parameters)
            self._versions = versions
        return self._value

    def refresh(self) -> None:
        """Discard the value if a parameter has changed."""
        if self._versions is not None and _checksums(self._parameters) != self._checksums:
            self._versions = None


def _checksums(tensors: Sequence[Tensor]) -> list[int]:
    """A hash of the bits of each tensor: the sum of its rows, weighted by odd numbers."""
    sums = []
    for tensor in tensors:
        bits = tensor.detach().reshape(len(tensor), -1).view(torch.uint8)
        if bits.shape[1] % 8 == 0:
            bits = bits.view(torch.int64)  # eight times as fast
        odd = torch.arange(1, 2 * len(bits), 2, device=bits.device)
        sums.append((bits.sum(1, dtype=torch.int64) * odd).sum())
    return torch.stack(sums).tolist()


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), repeated with `layers` different W and b, which are zero at first: a new
    block is the identity.

    in_width: width of a wider input, as in Hydra. The first layer then narrows it, and x in the sum
    is a linear map of it, at first its leading `width` numbers. The tensor names
    `layers.{j}.weight` and `layers.{j}.bias` are those that vLLM loads.
    """

    def __init__(self, width: int, layers: int, in_width: int | None = None) -> None:
        super().__init__()
        widths = [in_width or width] + [width] * (layers - 1)
        self.layers = nn.ModuleList(nn.Linear(each, width) for each in widths)
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)
        self.residual: nn.Module = nn.Identity()
        if in_width is not None:
            self.residual = wide = nn.Linear(in_width, width)
            nn.init.zeros_(wide.bias)
            nn.init.eye_(wide.weight)

    def forward(self, x_MD: Tensor) -> Tensor:
        first, *others = self.layers
        x_MD = self.residual(x_MD) + F.silu(first(x_MD))
        for layer in others:
            x_MD = x_MD + F.silu(layer(x_MD))
        return x_MD


def project(states: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of states (..., D) and a weight (v, D): (..., v), by one product of two matrices.

    For states that are a slice, `F.linear` makes a batched product with the weight, which a CPU
    copies for every row: in bfloat16 that takes seconds for the lm_head of a large vocabulary.
    """
    rows = states.flatten(0, -2)
    if isinstance(weight, PackedWeight):
        products = weight(rows)
        if bias is not None:
            products = products + bias
    else:
        products = F.linear(rows, weight, bias)
    return products.view(*states.shape[:-1], products.shape[-1])


def linear(layers: nn.ModuleList, number: int) -> nn.Linear:
    """One layer, typed."""
    return cast(nn.Linear, layers[number])


class Memory(Protocol):
    """Attention of one layer. Training and decoding keep different keys and values."""

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        """Store these keys and values; returns the attention's output (B, H, Q, W)."""
        ...


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a decoder layer. context: the target's, which serving engines need."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    context: int

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim) < 1 or (
            self.heads % self.kv_heads or self.head_dim % 2
        ):
            raise ValueError(
                "expected heads to be a multiple of kv_heads and head_dim to be even, got "
                f"{self.heads}, {self.kv_heads} and {self.head_dim}; set head.heads, "
                "head.kv_heads and head.head_dim"
            )

    @classmethod
    def of(cls, target: Target, choices: LayerSizes) -> LayerShape:
        """The recipe's sizes; by default those of the target's first layer."""
        config = target.config.per_layer_config[0]
        width = target.hidden_size

        def size(choice: str, default: int) -> int:
            return int(getattr(choices, choice) or getattr(config, KEYS[choice], None) or default)

        heads = size("heads", 1)
        kv_heads = size("kv_heads", heads)
        return cls(
            width,
            heads,
            kv_heads if choices.kv_heads or heads % kv_heads == 0 else heads,
            size("head_dim", width // heads),
            size("intermediate_size", 4 * width),
            getattr(config, "rms_norm_eps", None) or 1e-5,
            target.context,
        )

    @classmethod
    def read(cls, config: dict[str, Any]) -> LayerShape:
        """The shape in a head's config.json."""
        width, heads, _ = needed(config, "hidden_size", "num_attention_heads", "intermediate_size")
        default = {"kv_heads": heads, "head_dim": width // heads, "eps": 1e-6, "context": 2048}
        return cls(**{name: config.get(key) or default[name] for name, key in KEYS.items()})

    def config(self) -> dict[str, Any]:
        sizes = {key: getattr(self, name) for name, key in KEYS.items()}
        return {**sizes, "hidden_act": "silu", "attention_bias": False}


class Rope:
    """Rotary position embedding. Not a module: its angles stay float32 when the head is cast.

    theta: base. scaling: `rope_scaling` of a config, or None. Raises ValueError for a scaling that
    is not one of `STATIC_ROPES` or lacks keys.
    """

    def __init__(self, head_dim: int, theta: float, scaling: dict[str, Any] | None) -> None:
        # a second base in the scaling would be read by engines before ours
        own = {key: value for key, value in (scaling or {}).items() if key != "rope_theta"}
        self.theta = float(theta)
        self.scaling = own or None
        values = {key: value for key, value in own.items() if value is not None}
        kind = values.pop("type", None) or values.get("rope_type", "default")
        if kind not in STATIC_ROPES:
            raise ValueError(
                f"rope_scaling {kind!r}: expected one of {', '.join(STATIC_ROPES)}; others change "
                "with the length of the text, which a draft head's cache does not support"
            )
        if values.get("partial_rotary_factor", 1) != 1:
            raise ValueError(
                f"rope_scaling {own}: expected RoPE that turns whole heads, got a "
                "partial_rotary_factor; remove it"
            )
        if kind == "default":
            powers_W = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            frequencies = self.theta**-powers_W
            self.attention_factor = 1.0
        else:
            parameters = {**values, "rope_type": kind, "rope_theta": self.theta}
            try:
                context = values.get("original_max_position_embeddings", 1) * values.get(
                    "factor", 1
                )
                config = LlamaConfig(
                    hidden_size=head_dim,
                    num_attention_heads=1,
                    rope_parameters=parameters,
                    max_position_embeddings=math.ceil(context),  # else it warns of another factor
                )
                frequencies, self.attention_factor = ROPE_INIT_FUNCTIONS[kind](config, None)
            except Exception as error:  # whatever transformers raises for missing keys
                reason = " ".join(str(error.args[0] if error.args else error).split())
                raise ValueError(f"rope_scaling {parameters}: {reason}") from error
        self.frequencies = torch.cat([frequencies, frequencies])

    @classmethod
    def of(cls, target: Target, choices: LayerSizes, head_dim: int) -> Rope:
        """The recipe's RoPE; the base is the target's by default."""
        parameters = getattr(target.config, "rope_parameters", None) or {}
        parameters = parameters.get("full_attention") or parameters  # one set per layer type
        scaling = choices.rope_scaling or {}
        theta = choices.rope_theta or scaling.get("rope_theta")
        return cls(head_dim, theta or parameters.get("rope_theta") or 10000.0, scaling)

    @classmethod
    def read(cls, config: dict[str, Any], head_dim: int) -> Rope:
        """The RoPE in a head's config.json, with the precedence of transformers: a base among the
        parameters, which may be those of a type of layers, is before one beside them.
        """
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = "sliding_attention" if config.get("sliding_window") else "full_attention"
        scaling = scaling.get(kind) or scaling
        theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
        is_plain = (scaling.get("rope_type") or scaling.get("type") or "default") == "default"
        return cls(head_dim, theta, None if is_plain else scaling)

    def __call__(self, positions_BQ: Tensor) -> Angles:
        if self.frequencies.device != positions_BQ.device:
            self.frequencies = self.frequencies.to(positions_BQ.device)
        angles = positions_BQ[:, None, :, None].float() * self.frequencies
        cos = angles.cos() * self.attention_factor
        sin = angles.sin() * self.attention_factor
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos, sin


def rotate(x_BHQW: Tensor, angles: Angles) -> Tensor:
    """Apply RoPE, in the half-split form of Llama."""
    cos, signed_sin = angles
    swapped = x_BHQW.roll(x_BHQW.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BHQW * cos, swapped, signed_sin)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm with the weight cast to the input's dtype, for which it has fast kernels."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention; its input may be wider than its output.

    qk_norm: the queries and keys of each head are normed, as in Qwen3.
    """

    def __init__(self, shape: LayerShape, in_width: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.shape = shape
        wide = shape.heads * shape.head_dim
        narrow = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(in_width, wide, bias=False)
        self.k_proj = nn.Linear(in_width, narrow, bias=False)
        self.v_proj = nn.Linear(in_width, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x_BQE: Tensor, angles: Angles, memory: Memory) -> Tensor:
        heads = self.shape.heads
        turned = self.shape.heads + self.shape.kv_heads
        layers = [self.q_proj, self.k_proj, self.v_proj]
        qkv_BQE = torch.cat([layer(x_BQE) for layer in layers], dim=-1)
        qkv = qkv_BQE.view(*qkv_BQE.shape[:2], -1, self.shape.head_dim).transpose(1, 2)
        qk = self.turned(qkv[:, :turned], self._scale(), angles)
        out_BHQW = memory.attend(qk[:, :heads], qk[:, heads:], qkv[:, turned:])
        out_BQD: Tensor = self.o_proj(out_BHQW.transpose(1, 2).flatten(2))
        return out_BQD

    def _scale(self) -> Tensor | None:
        """The norms of all query and key heads, (H + G, 1, W)."""
        if not self.qk_norm:
            return None
        each = ((self.q_norm.weight, self.shape.heads), (self.k_norm.weight, self.shape.kv_heads))
        return torch.cat([norm_W.expand(heads, 1, -1) for norm_W, heads in each])

    def turned(self, x_BHQW: Tensor, scale_H1W: Tensor | None, angles: Angles) -> Tensor:
        """Queries or keys, normed and scaled if there is a scale, with their RoPE."""
        normed = x_BHQW
        if scale_H1W is not None:
            normed = F.rms_norm(x_BHQW, x_BHQW.shape[-1:], eps=self.shape.eps) * scale_H1W
        return rotate(normed, angles).to(x_BHQW.dtype)  # angles are float32


class GatedMlp(nn.Module):
    """SwiGLU: W_down (SiLU(W_gate x) * W_up x)."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BQD: Tensor) -> Tensor:
        gate_BQI = F.silu(self.gate_proj(x_BQD))
        out_BQD: Tensor = self.down_proj(gate_BQI * self.up_proj(x_BQD))
        return out_BQD


class Convolution(nn.Module):
    """The convolutions over the slots of a block before and after a sub-layer (DFlash 2):

        y[s] = kernel[s, 0] * x[s] + kernel[s, 1] * x[s - 1], with zeros before the first slot

    The kernels are learned, and corrected by a linear map of the sub-layer's input. Source, with
    these names of tensors: draft_qwen3_dflash2.py of NVIDIA-NeMo/Automodel (Apache-2.0).
    """

    def __init__(self, width: int, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.base_kernel = nn.Parameter(torch.zeros(2, TAPS, width))
        self.kernel_projection = nn.Linear(width, 2 * TAPS * (width // GROUP), bias=False)

    def forward(self, x_BQD: Tensor, layer: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """layer: the sub-layer, called with the convolved input and these arguments."""
        corrections = self.kernel_projection(x_BQD).repeat_interleave(GROUP, dim=-1)
        kernels = self.base_kernel + corrections.view(*x_BQD.shape[:2], *self.base_kernel.shape)
        before_BQtD, after_BQtD = kernels.unbind(2)
        out_BQD = layer(self._convolve(x_BQD, before_BQtD), *arguments)
        return self._convolve(out_BQD, after_BQtD)

    def _convolve(self, x_BQD: Tensor, kernel_BQtD: Tensor) -> Tensor:
        x_NSD = x_BQD.view(-1, self.slots, x_BQD.shape[-1])
        previous_BQD = F.pad(x_NSD, (0, 0, 1, -1)).view_as(x_BQD)
        return kernel_BQtD[:, :, 0] * x_BQD + kernel_BQtD[:, :, 1] * previous_BQD


class DecoderLayer(nn.Module):
    """A pre-norm Llama layer. input_norm: False for EAGLE-1's first layer, which has none. qk_norm:
    as in Qwen3. slots: of the blocks in which convolutions are around attention and MLP; 0: none.
    """

    def __init__(
        self, shape: LayerShape, *, input_norm: bool = True, qk_norm: bool = False, slots: int = 0
    ) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_size, qk_norm=qk_norm)
        self.mlp = GatedMlp(shape)
        if input_norm:
            self.input_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.input_norm = input_norm
        self.slots = slots
        if slots:
            self.attention_conv = Convolution(shape.hidden_size, slots)
            self.mlp_conv = Convolution(shape.hidden_size, slots)

    def forward(self, hidden_BQD: Tensor, angles: Angles, memory: Memory) -> Tensor:
        x = self.input_layernorm(hidden_BQD) if self.input_norm else hidden_BQD
        if self.slots:
            hidden_BQD = hidden_BQD + self.attention_conv(x, self.self_attn, angles, memory)
            out_BQD: Tensor = self.mlp_conv(self.post_attention_layernorm(hidden_BQD), self.mlp)
        else:
            hidden_BQD = hidden_BQD + self.self_attn(x, angles, memory)
            out_BQD = self.mlp(self.post_attention_layernorm(hidden_BQD))
        return hidden_BQD + out_BQD


class FusingLayer(nn.Module):
    """EAGLE-3's first layer: attention reads the embedded token and the hidden state, each with its
    own norm, and its output is added to the hidden state.

    norm_before_residual: the output is added to the normed hidden state instead. qk_norm: as in
    Qwen3.
    """

    def __init__(
        self, shape: LayerShape, *, norm_before_residual: bool = False, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.self_attn = Attention(shape, 2 * shape.hidden_size, qk_norm=qk_norm)
        self.mlp = GatedMlp(shape)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.norm_before_residual = norm_before_residual

    def forward(
        self, embedded_BQD: Tensor, hidden_BQD: Tensor, angles: Angles, memory: Memory
    ) -> Tensor:
        normed_BQD = self.hidden_norm(hidden_BQD)
        x_BQE = torch.cat([self.input_layernorm(embedded_BQD), normed_BQD], dim=-1)
        residual_BQD = normed_BQD if self.norm_before_residual else hidden_BQD
        hidden_BQD = residual_BQD + self.self_attn(x_BQE, angles, memory)
        out_BQD: Tensor = hidden_BQD + self.mlp(self.post_attention_layernorm(hidden_BQD))
        return out_BQD


def check_features(layers: Sequence[int], target: Target) -> None:
    """Raise ValueError for hidden states that the target does not have."""
    if not all(0 <= layer <= target.layers for layer in layers):
        raise ValueError(
            f"head.feature_layers: expected indices from 0 (embeddings) to {target.layers} "
            f"(the last state of {target.name}), got {list(layers)}"
        )


def check_embeddings(target: Target) -> None:
    """Raise ValueError if embedded tokens and hidden states differ in width."""
    width = target.model.get_input_embeddings().weight.shape[1]
    if width != target.hidden_size:
        raise ValueError(
            f"{target.name} embeds tokens in {width} dimensions and has hidden states of "
            f"{target.hidden_size}; heads that read tokens need equal widths, use Medusa heads"
        )
