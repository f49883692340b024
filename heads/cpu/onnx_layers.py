"""The decoder layers of a target as one ONNX graph, in int8.

A layer is about sixty operators, of which four are products with weights and fifteen attention.
States are scaled to 255 steps, row by row; a product of integers has a scale for each output. Sums
of integers are exact, sums of attention are computed in float64, and everything else works on
single numbers, so that a token's states do not depend on the tokens beside it, nor on where in a
tree its ancestors stand.

Keys and values of earlier tokens are inputs, those of new ones are outputs. Wide heads have their
keys in parts: ONNX Runtime sums more than 128 products in an order that depends on their number.

Legend: B batch, N new tokens, S cache slots, D hidden size, H query heads, G key heads, P query
heads per key head, W head width, R rotated width, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from draftheads.heads.cpu.linear import STEPS, TINY, inverse, saturates, to_int8
from draftheads.heads.cpu.onnx_graph import MICROSOFT, Graph

WIDEST = 128
"""Products that ONNX Runtime adds up in one order, whatever the number of rows and columns."""
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("QuickGelu", {"domain": MICROSOFT, "alpha": 1.0}),
    "gelu_pytorch_tanh": ("Gelu", {"approximate": "tanh"}),
}
"""Names of transformers -> an operator and its attributes."""
FUSED_NAMES = ("qkv_proj", "gate_up_proj")
"""Of layers in which a model (Phi-3) keeps those that read the same states."""
Sizes = Mapping[nn.Module, Tensor]
"""Linear layers -> the largest sizes of their inputs (I,)."""


class LayersGraph(Graph):
    """The graph of a model's decoder layers and final norm.

    Inputs: "states" (B, N, D); for each type of layers "cos.TYPE", "sin.TYPE" (B N, R / 2) and
    "mask.TYPE" (B, 1, P N, S + N), which is added, and "slots.TYPE", S and N; "tokens" (B, N), the
    number of each token; "keys.LAYER", "values.LAYER" (see `Shapes`). Outputs: "states.LAYER"
    (B, N, D) after each layer, the last one after the norm; "new_keys.LAYER", "new_values.LAYER".

    layers, norm: of the model. types: of the layers. sizes: of the inputs of linear layers.
    """

    def __init__(
        self, layers: nn.ModuleList, norm: nn.Module, config: Any, types: list[str], sizes: Sizes
    ) -> None:
        super().__init__()
        self.shapes = Shapes.of(config)
        self._sizes = sizes
        self._activation = ACTIVATIONS[activation(config)]
        self._steps = self.constant(1 / STEPS, np.float32)
        self._zero = self.constant(STEPS + 1, np.uint8)
        self._tiny = self.constant(TINY, np.float32)
        self._last = self.shape(-1)
        self.input("states", ["B", "N", config.hidden_size])
        self.input("tokens", ["B", "N"], torch.int64)
        for kind in dict.fromkeys(types):
            for name in ("cos", "sin"):
                self.input(f"{name}.{kind}", ["T", self.shapes.rotated // 2])
            self.input(f"mask.{kind}", ["B", 1, "PN", f"SN.{kind}"])
            self.input(f"slots.{kind}", [2], torch.int64)
        x = "states"
        for number, (layer, kind) in enumerate(zip(layers, types, strict=True), 1):
            x = self._layer(layer, kind, number, x)
            states = self._norm(norm, x) if number == len(layers) else x
            shape = ["B", "N", config.hidden_size]
            self.output(states, f"states.{number}", shape)

    def _layer(self, layer: Any, kind: str, number: int, x: str) -> str:
        has_four_norms = hasattr(layer, "pre_feedforward_layernorm")
        before_mlp = layer.post_attention_layernorm
        out = self._attention(layer, kind, number, x)
        if has_four_norms:
            out = self._norm(layer.post_attention_layernorm, out)
            before_mlp = layer.pre_feedforward_layernorm
        x = self("Add", x, out)
        out = self._mlp(layer.mlp, before_mlp, x)
        if has_four_norms:
            out = self._norm(layer.post_feedforward_layernorm, out)
        return str(self("Add", x, out))

    def _attention(self, layer: Any, kind: str, number: int, x: str) -> str:
        attention, shapes = layer.self_attn, self.shapes
        q, k, v = self._queries_keys_values(layer, kind, x)
        width = shapes.width // shapes.parts
        parts, slots = shapes.groups * shapes.parts, f"S.{kind}"
        past_k = self.input(f"keys.{number}", ("B", parts, slots, width))
        past_v = self.input(
            f"values.{number}", ("B", shapes.groups, slots, shapes.width), torch.float64
        )
        self.output(k, f"new_keys.{number}", ("B", parts, "N", width))
        self.output(
            v, f"new_values.{number}", ("B", shapes.groups, "N", shapes.width), torch.float64
        )
        scores = [self._scores(q, each, attention.scaling) for each in (past_k, k)]
        both = self("Add", self("Concat", *scores, axis=3), f"mask.{kind}")
        largest = self("ReduceMax", both, self._last, keepdims=1)
        shares = self("Exp", self("Sub", both, largest))
        shares = self("Cast", shares, to=TensorProto.DOUBLE)
        total = self("ReduceSum", shares, self._last, keepdims=1)
        earlier, new = self("Split", shares, f"slots.{kind}", axis=3, outputs=2)
        out = self("Add", self("MatMul", earlier, past_v), self("MatMul", new, v))
        out = self("Cast", self("Div", out, total), to=TensorProto.FLOAT)
        out = self("Reshape", out, self.shape(0, shapes.heads, -1, shapes.width))
        out = self("Transpose", out, perm=[0, 2, 1, 3])
        out = self("Reshape", out, self.shape(0, 0, -1))
        return self._product(out, attention.o_proj.weight, attention.o_proj.bias)

    def _queries_keys_values(self, layer: Any, kind: str, x: str) -> tuple[str, str, str]:
        """(B, G, P N, W), or in parts (B, G parts, P N, W / parts); (B, G, N, W), or in parts; and
        (B, G, N, W) in float64.
        """
        attention, shapes = layer.self_attn, self.shapes
        weight_OI, bias_O = joint_weights(attention, "q_proj", "k_proj", "v_proj")
        linear = getattr(attention, "qkv_proj", None) or attention.q_proj
        qkv = self._normed_product(layer.input_layernorm, x, weight_OI, bias_O, linear)
        qkv = self("Reshape", qkv, self.shape(0, 0, -1, shapes.width))
        qkv = self("Transpose", qkv, perm=[0, 2, 1, 3])
        sizes = self.shape(shapes.heads, shapes.groups, shapes.groups)
        q, k, v = self("Split", qkv, sizes, axis=1, outputs=3)
        if hasattr(attention, "q_norm"):
            q, k = self._norm(attention.q_norm, q), self._norm(attention.k_norm, k)
        if getattr(attention, "use_rope", True):
            q, k = self._rotated(q, kind), self._rotated(k, kind)
        q = self("Reshape", q, self.shape(0, shapes.groups, -1, shapes.width))
        if shapes.parts > 1:
            q, k = self._divided(q), self._divided(k)
        return q, k, self("Cast", v, to=TensorProto.DOUBLE)

    def _scores(self, q: str, k: str, scaling: float) -> str:
        scores = self("FusedMatMul", q, k, domain=MICROSOFT, transB=1, alpha=scaling)
        groups, parts = self.shapes.groups, self.shapes.parts
        if parts > 1:
            # (B, G parts, P N, S): the sum over the parts of a head
            slots = self("Shape", scores, start=2)
            shape = self("Concat", self.shape(-1, groups, parts), slots, axis=0)
            scores = self("Reshape", scores, shape)
            scores = self("ReduceSum", scores, self.shape(2), keepdims=0)
        return str(scores)

    def _divided(self, x: str) -> str:
        """(B, G, M, W) to (B, G parts, M, W / parts)."""
        groups, parts, inner = self.shapes.groups, self.shapes.parts, self.shapes.width
        inner //= parts
        x = self("Reshape", x, self.shape(0, groups, -1, parts, inner))
        x = self("Transpose", x, perm=[0, 1, 3, 2, 4])
        return str(self("Reshape", x, self.shape(0, groups * parts, -1, inner)))

    def _rotated(self, x: str, kind: str) -> str:
        partial = {}
        if self.shapes.rotated < self.shapes.width:
            # num_heads is read only together with it
            partial = {"rotary_embedding_dim": self.shapes.rotated, "num_heads": 1}
        cos, sin = f"cos.{kind}", f"sin.{kind}"
        operator = "RotaryEmbedding"
        return str(self(operator, x, "tokens", cos, sin, domain=MICROSOFT, **partial))

    def _mlp(self, mlp: Any, norm: nn.Module, x: str) -> str:
        down = mlp.down_proj
        inverse_I = self._inverse(down, down.weight)
        weight_OI, bias_O = joint_weights(mlp, "gate_proj", "up_proj")
        weight_OI[len(inverse_I) :] *= inverse_I[:, None]
        if bias_O is not None:
            bias_O[len(inverse_I) :] *= inverse_I
        linear = getattr(mlp, "gate_up_proj", None) or mlp.gate_proj
        both = self._normed_product(norm, x, weight_OI, bias_O, linear)
        gate, up = self("Split", both, axis=2, num_outputs=2, outputs=2)
        operator, attributes = self._activation
        out = self("Mul", self(operator, gate, **attributes), up)
        return self._product(out, down.weight / inverse_I, down.bias)

    def _norm(self, norm: Any, x: str, inverse_I: Tensor | None = None) -> str:
        weight_I = norm.weight.float()
        if type(norm).__name__.startswith("Gemma"):
            weight_I = 1 + weight_I
        if inverse_I is not None:
            weight_I = weight_I * inverse_I
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        operator = "SimplifiedLayerNormalization"
        return str(self(operator, x, self.weight(weight_I), axis=-1, epsilon=eps))

    def _normed_product(
        self, norm: nn.Module, x: str, weight_OI: Tensor, bias_O: Tensor | None, layer: nn.Module
    ) -> str:
        """A product with what a norm returns. layer: the linear one that reads it."""
        inverse_I = self._inverse(layer, weight_OI)
        return self._product(self._norm(norm, x, inverse_I), weight_OI / inverse_I, bias_O)

    def _product(self, x: str, weight_OI: Tensor, bias_O: Tensor | None) -> str:
        int8_OI, scales_O = to_int8(weight_OI, in_pairs=saturates())
        largest = self("ReduceMax", self("Abs", x), self._last, keepdims=1)
        largest = self("Max", largest, self._tiny)
        steps = self("QuantizeLinear", self("Div", x, largest), self._steps, self._zero)
        weight, scales = self.weight(int8_OI.t()), self.weight(scales_O)
        product = self(
            "MatMulIntegerToFloat", steps, weight, self._steps, scales, self._zero, domain=MICROSOFT
        )
        product = self("Mul", product, largest)
        return product if bias_O is None else str(self("Add", product, self.weight(bias_O.float())))

    def _inverse(self, layer: nn.Module, weight_OI: Tensor) -> Tensor:
        """The factors of a layer's inputs (I,); see `inverse`."""
        if layer not in self._sizes:
            return torch.ones(weight_OI.shape[1])
        return inverse(self._sizes[layer], weight_OI)


def joint_weights(module: Any, *names: str) -> tuple[Tensor, Tensor | None]:
    """Weights (O, I) and biases (O,) of layers that read the same states, one after another."""
    if hasattr(module, names[0]):
        layers = [getattr(module, name) for name in names]
    else:
        layers = [next(child for name, child in module.named_children() if name in FUSED_NAMES)]
    weight_OI = torch.cat([layer.weight.float() for layer in layers])
    biases = [layer.bias for layer in layers]
    if biases[0] is None:
        return weight_OI, None
    return weight_OI, torch.cat([bias.float() for bias in biases])


def activation(config: Any) -> str:
    """The name of a model's activation."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model's attention. parts: into how many a head's keys are divided.

    Keys are (B, G parts, S, W / parts), values (B, G, S, W) in float64.
    """

    heads: int
    groups: int
    width: int
    rotated: int
    parts: int

    @classmethod
    def of(cls, config: Any) -> Shapes:
        """Read them from a config."""
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        parameters = getattr(config, "rope_parameters", None) or {}
        rotated = int(width * parameters.get("partial_rotary_factor", 1.0))
        parts = next(n for n in range(1, width + 1) if width % n == 0 and width // n <= WIDEST)
        return cls(heads, config.num_key_value_heads, width, rotated, parts)

    def empty(self, batch: int, slots: int) -> tuple[Tensor, Tensor]:
        """Room for keys and values, not initialised."""
        keys = torch.empty(batch, self.groups * self.parts, slots, self.width // self.parts)
        return keys, torch.empty(batch, self.groups, slots, self.width, dtype=torch.float64)
