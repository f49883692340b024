"""The promise: targets and heads that are packed for a CPU decode what they decoded before. In
int8, what is computed for a token does not depend on the tokens beside it, bit for bit. What cannot
be packed is refused or left as it is.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hybrid_targets import hybrid_model
from onnx_models import ONNX_MODELS
from tiny_heads import KINDS, decode, drafts_of, overfitted, random_head, written_by
from tiny_targets import UNEVEN, generated, is_packed, random_model, some_prompts, tiny_target
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftheads.heads.cpu import attention as grouped_attention
from draftheads.heads.cpu import linear as cpu_linear
from draftheads.heads.cpu.attention import IMPLEMENTATION, attend
from draftheads.heads.cpu.linear import (
    ROUNDED_ROWS,
    PackedLinear,
    PackedWeight,
    can_pack,
    has_int8,
    input_sizes,
    operand,
    pack_int8,
    pack_layers,
    to_int8,
)
from draftheads.heads.layers import project
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree, TokenTree

CPU = torch.device("cpu")
NEW = 24
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))
needs_int8 = pytest.mark.skipif(not has_int8(), reason="torch has no int8 products for this CPU")
needs_packing = pytest.mark.skipif(
    not can_pack(CPU, torch.float32), reason="torch was built without oneDNN"
)


def packed(name: str = "llama", bits: int | None = None) -> Target:
    engine = "torch" if bits else None
    return Target(random_model(name), name=f"packed-{name}").pack(bits, engine)  # type: ignore[arg-type]


@pytest.fixture
def all_sizes(monkeypatch):
    """Layers of tiny models count as large ones."""
    monkeypatch.setattr(cpu_linear, "LEAST", 0)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 17])
def test_a_packed_product_is_that_of_linear(dtype, rows):
    if not can_pack(CPU, dtype):
        pytest.skip(f"oneDNN does not multiply {dtype} here")
    weight_OI, x = torch.randn(40, 64).to(dtype), torch.randn(2, rows, 64).to(dtype)
    expected = F.linear(x.double(), weight_OI.double())
    product = PackedWeight(weight_OI)(x)
    assert product.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=tolerance / 10)
    assert torch.equal(PackedWeight(weight_OI).dense(), weight_OI)


@pytest.mark.mend("packed weights moved to another dtype failed somewhere inside torch")
@needs_packing
def test_a_packed_target_is_not_moved(all_sizes):
    """Its weights could not follow, and products failed somewhere inside torch."""
    target = packed()
    target.model.to("cpu", torch.float32)
    with pytest.raises(
        ValueError, match=r"expected to stay .* in torch.float32, got .*float64; load"
    ):
        target.model.to(torch.float64)


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_product_depends_on_its_own_row_alone(dtype):
    """Bit for bit, whatever stands beside it, and however large that is."""
    torch.manual_seed(0)
    weight, x_RI = PackedWeight(torch.randn(48, 64), 8), torch.randn(33, 64).to(dtype)
    x_RI[3] = 0.0
    x_RI[4] *= 1e4
    x_RI[5] *= 1e-20
    together_RO = weight(x_RI)
    assert together_RO.dtype == dtype and together_RO.isfinite().all()
    assert not together_RO[3].any()
    for rows in ([0], [3], [4, 5], [32, 1, 7], range(9)):
        assert torch.equal(weight(x_RI[list(rows)]), together_RO[list(rows)])


@needs_int8
def test_an_int8_product_is_off_by_a_hundredth():
    """Of a product's usual size: 8 bits for the weight, as many for the states of each token."""
    torch.manual_seed(0)
    weight_OI, x_RI = torch.randn(256, 512), torch.randn(64, 512)
    weight_OI *= torch.logspace(-3, 3, 256)[:, None]  # each output has a scale of its own
    x_RI *= torch.logspace(-3, 3, 64)[:, None]
    expected_RO = F.linear(x_RI, weight_OI)
    sizes_RO = x_RI.norm(dim=1)[:, None] * weight_OI.norm(dim=1)
    error_RO = (PackedWeight(weight_OI, 8)(x_RI) - expected_RO) / sizes_RO * 512**0.5
    assert error_RO.pow(2).mean().sqrt() < 0.02 and error_RO.abs().max() < 0.1


@needs_packing
def test_a_packed_layer_is_read_and_saved_like_a_linear_one():
    """A model's own code may read the weight; heads read it often, so there it stays."""
    layer = nn.Linear(24, 12)
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 24)
    for bits in (None, 8) if has_int8() else (None,):
        kept, lean = (
            PackedLinear(layer, PackedWeight(layer.weight, bits), keep=keep)
            for keep in (True, False)
        )
        torch.testing.assert_close(kept(x), layer(x), atol=0.05, rtol=0.0)
        assert [*kept.state_dict()] == ["weight", "bias"] and [*lean.state_dict()] == ["bias"]
        assert kept.weight is layer.weight and operand(layer.weight) is kept.packed
        torch.testing.assert_close(lean.weight, layer.weight.data, atol=0.01, rtol=0.0)
        with pytest.raises(AttributeError, match="scale"):
            _ = lean.scale


@needs_packing
def test_layers_that_read_the_same_states_are_multiplied_together():
    """Each with its own bias; other states, and a layer that is asked twice, are not mixed up."""
    for bits in (None, 8) if has_int8() else (None,):
        plain = nn.ModuleDict({name: nn.Linear(24, 12) for name in ("gate_proj", "up_proj")})
        plain.requires_grad_(False)
        packed = copy.deepcopy(plain)
        pack_layers(packed, bits, small=True)
        assert packed["gate_proj"].packed._fused is packed["up_proj"].packed._fused
        x, other = torch.randn(2, 3, 24)
        asked = [("gate_proj", x), ("gate_proj", x), ("up_proj", other), ("up_proj", x)]
        for name, states in [*asked, *asked]:
            error = packed[name](states) - plain[name](states)
            assert error.abs().max() < (0.05 if bits else 1e-5)
        for name, layer in plain.items():
            torch.testing.assert_close(packed[name].weight, layer.weight, atol=0.01, rtol=0.0)


@needs_packing
@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("masked", [None, "added", "seen"])
def test_grouped_attention_is_attention(shared, masked):
    q_BHQW = torch.randn(2, 2 * shared, 5, 8)
    k_BGSW, v_BGSW = torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    mask = None
    if masked:
        mask = torch.rand(2, 1, 5, 11) < 0.7
        mask[..., 0] = True
        if masked == "added":
            mask = torch.zeros(mask.shape).masked_fill(~mask, -1e30)
    expected = F.scaled_dot_product_attention(
        q_BHQW,
        k_BGSW.repeat_interleave(shared, 1),
        v_BGSW.repeat_interleave(shared, 1),
        attn_mask=mask,
        scale=0.3,
    )
    torch.testing.assert_close(attend(q_BHQW, k_BGSW, v_BGSW, mask, 0.3), expected)


@needs_packing
@pytest.mark.inside
@pytest.mark.parametrize("name", ["llama", "gemma3-window", "gemma2-window", "mixtral", *UNEVEN])
def test_a_packed_target_writes_what_it_wrote(name, all_sizes):
    """Chains after rows of one length and of several, trees, and `generate`; what uses attention of
    its own keeps that.
    """
    model = random_model(name)
    prompts = some_prompts(17, 9, 17)
    before = [generated(tiny_target(name), prompt, NEW) for prompt in prompts]
    target = Target(model, name=name).pack()
    is_grouped = target.config._attn_implementation == IMPLEMENTATION
    assert is_grouped == (tiny_target(name).config._attn_implementation == "sdpa")
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert target.fingerprint() == tiny_target(name).fingerprint()
    assert [generated(target, prompt, NEW) for prompt in prompts] == before
    head = random_head("medusa", target).pack(target)
    assert decode(target, head, prompts, tree=TREE, max_new_tokens=NEW)[0] == before
    assert decode(target, None, prompts, max_new_tokens=NEW)[0] == before


@pytest.mark.mend("a traceback of tune for a packed block head")
@needs_packing
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=needs_int8)])
def test_packed_heads_draft_what_they_drafted(name, int8, all_sizes, monkeypatch):
    """As oneDNN lays weights out, the same trees; in int8, about as many right tokens; the output
    is the target's either way.
    """
    monkeypatch.setattr(cpu_linear, "has_int8", lambda: int8)
    target, prompts = tiny_target(), some_prompts(13, 13)
    head = random_head(name, target)
    before = drafts_of(head, target, prompts, NEW, TREE)
    batch = written_by(target, prompts, NEW)
    ranks_MK = head.token_ranks(batch, target.features(batch, head.training_layers), target)
    head.pack(target)
    packed_layers = [m for m in head.modules() if isinstance(m, PackedLinear)]
    assert packed_layers and {layer.packed.bits for layer in packed_layers} == {8 if int8 else None}
    if not int8:
        assert drafts_of(head, target, prompts, NEW, TREE) == before
        features_BTD = target.features(batch, head.training_layers)
        assert torch.equal(head.token_ranks(batch, features_BTD, target), ranks_MK), "as tune asks"
    expected = [generated(target, prompt, NEW) for prompt in prompts]
    assert decode(target, head, prompts, tree=TREE, max_new_tokens=NEW)[0] == expected


@needs_int8
def test_an_int8_head_keeps_its_acceptance_length(all_sizes):
    target, prompts = tiny_target(), some_prompts(8, 8)
    head = overfitted("sequential", target, written_by(target, prompts, NEW))
    _, before = decode(target, head, prompts, max_new_tokens=NEW)
    _, after = decode(target, head.pack(target), prompts, max_new_tokens=NEW)
    assert sum(each.steps for each in before) < NEW  # it drafts
    assert sum(each.steps for each in after) <= 1.1 * sum(each.steps for each in before)


def after(target: Target, text: list[int], length: int, *beside: list[int]) -> list[torch.Tensor]:
    """Logits after each token of a text from `length` on, read in one tree of several branches if
    there are other texts beside it, else one by one.
    """
    rows = [text, *beside]
    cache = target.new_cache(len(rows), len(text) + 8)
    target.prefill([row[: length - 5 * number] for number, row in enumerate(rows)], cache, ())
    if not beside:
        logits = []
        for token in text[length:]:
            root = TokenTree(torch.tensor([[token]]), StaticTree(()).topology(CPU))
            logits.append(target.verify(root, cache, ()).logits_BNV[0, 0])
            cache.keep(torch.zeros(1, 1, dtype=torch.long), [1], in_place=True)
        return logits
    known = [number for number, path in enumerate(((), *TREE.paths)) if not any(path)]
    tokens_BN = torch.randint(3, target.vocab_size, (len(rows), 1 + TREE.draft_nodes))
    tokens_BN[0, known] = torch.tensor(text[length:])
    tree = TokenTree(tokens_BN, TREE.topology(CPU))
    return [*target.verify(tree, cache, ()).logits_BNV[0, known]]


# as many as a vector register has places: torch computes the exponentials of fewer in other ways
MANY = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}


@pytest.mark.mend("in int8, text with drafts differed from text without")
@needs_int8
@pytest.mark.parametrize(
    ("name", "make", "engine"),
    [
        ("llama", partial(random_model, "llama"), "torch"),
        ("gemma3-window", partial(random_model, "gemma3-window"), "torch"),
        ("qwen3.5", partial(hybrid_model, "qwen3.5", **MANY), "torch"),
        ("olmo-hybrid", partial(hybrid_model, "olmo-hybrid", **MANY), "torch"),
        ("lfm2", partial(hybrid_model, "lfm2"), "torch"),
        *((name, make, "onnx") for name, make in ONNX_MODELS.items()),
    ],
)
@torch.inference_mode()
def test_an_int8_row_is_computed_alike_whatever_is_beside_it(name, make, engine):
    """Bit for bit: one token alone, as a node of a tree, in a batch, after a prompt in parts. One
    other last bit, and int8 products round to another step.
    """
    target = Target(make(), name=name).pack(8, engine)
    assert target.engine == engine
    torch.manual_seed(0)
    for text in some_prompts(*[45] * 6):
        alone = torch.stack(after(target, text, 40))
        beside = some_prompts(45, 45, seed=1)
        assert torch.equal(torch.stack(after(target, text, 40, *beside[:1])), alone)
        assert torch.equal(torch.stack(after(target, text, 40, *beside)), alone)
        if not target.is_hybrid:  # whose recurrence over a prompt is one of chunks
            whole, parts = (
                [*target.prefill_chunks([text], target.new_cache(1, 45), (), chunk)][-1][1]
                for chunk in (45, 7)
            )
            assert torch.equal(whole.logits_BNV, parts.logits_BNV)
            assert torch.equal(whole.logits_BNV[0, 0], alone[-1])


@pytest.mark.mend("activations had 7 bits on CPUs without VNNI: KL divergence 0.145 nats")
@needs_int8
def test_int8_products_are_exact_where_pairs_are_added_in_16_bits():
    """As on a CPU without VNNI, which this variable makes of any: 255 * 128 < 2^15."""
    for width in (37, 64):
        weight_OI = torch.randn(96, width)
        weight_OI[:48] = 1.0  # as large as its neighbours
        int8_OI = torch.ops.quantized.linear_unpack(pack_int8(weight_OI, in_pairs=True))[0]
        steps_OI = F.pad(int8_OI.int_repr().int().abs(), (0, width % 2))
        assert 120 < steps_OI.unflatten(1, (-1, 2)).sum(2).max() <= 128
    code = """if True:
        import torch
        from draftheads.heads.cpu.linear import PackedWeight, saturates
        assert saturates()
        weight = PackedWeight(torch.rand(96, 576), 8)
        x_RI = torch.rand(5, 576) * torch.tensor([[1.0], [-1.0], [2.0], [1e-3], [9.0]])
        steps_RI = (x_RI / x_RI.abs().amax(1, keepdim=True) * 127).round() / 127
        expected_RO = steps_RI.double() @ weight.dense().double().T
        expected_RO *= x_RI.abs().amax(1, keepdim=True)
        torch.testing.assert_close(weight(x_RI).double(), expected_RO, rtol=1e-5, atol=0.0)
    """
    variables = {**os.environ, "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"}
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)


@pytest.mark.mend("a few large inputs of a token took the steps of int8 from the others")
@needs_int8
def test_inputs_that_are_known_to_be_large_cost_the_others_less():
    """In int8 all inputs of a token share one scale, and all weights of an output."""
    torch.manual_seed(0)
    weight_OI = torch.randn(64, 256)
    x_RI = torch.randn(9, 256)
    x_RI[:, 7] *= 100.0
    weight_OI[:, 9] = 0.0
    sizes_I = x_RI.abs().amax(0)
    sizes_I[11] = 0.0  # never seen
    expected_RO = F.linear(x_RI, weight_OI)
    errors = []
    for packed in (PackedWeight(weight_OI, 8), PackedWeight(weight_OI, 8, sizes_I)):
        torch.testing.assert_close(packed.dense(), weight_OI, atol=0.2, rtol=0.0)
        errors.append((packed(x_RI) - expected_RO).norm())
    assert errors[1] < 0.3 * errors[0]


@needs_int8
def test_a_target_reads_a_text_before_its_inputs_are_scaled():
    """Each linear layer that ran, once or several times."""
    target = tiny_target()
    seen = input_sizes(
        lambda: [target.model(torch.tensor([ids])) for ids in ([3], [4, 5])], target.model
    )
    assert {*seen} == {m for m in target.model.modules() if type(m) is nn.Linear}
    assert not any(layer._forward_pre_hooks for layer in seen)
    states = target.model(torch.tensor([[4, 5]]), output_hidden_states=True).hidden_states[-1]
    other = target.model(torch.tensor([[3]]), output_hidden_states=True).hidden_states[-1]
    expected_I = torch.cat([states[0], other[0]]).abs().amax(0)
    torch.testing.assert_close(seen[target.model.get_output_embeddings()], expected_I)
    layer = packed(bits=8).model.get_submodule("model.layers.0.mlp.down_proj")
    assert layer.packed._inverse_I.shape == layer.packed.shape[1:]


@needs_int8
def test_a_shared_lm_head_is_multiplied_as_the_target_packed_it():
    target = packed(bits=8)
    vocabulary = list(range(0, target.vocab_size, 2))
    head = random_head("medusa", target, lm_head="shared", vocabulary=vocabulary)
    weight = operand(head.unembed_weights(target)[0])  # type: ignore[operator]
    assert isinstance(weight, PackedWeight) and weight.bits == 8
    states = torch.randn(3, target.hidden_size)
    expected = project(states, target.unembed_weight()[vocabulary])
    torch.testing.assert_close(project(states, weight), expected, atol=0.5, rtol=0.0)


@needs_packing
def test_layers_whose_weights_a_model_reads_itself(all_sizes):
    """Mamba 1 multiplies by the weight of one of its linear layers."""
    prompts = some_prompts(11)
    before = [generated(Target(hybrid_model("jamba")), prompt, 8) for prompt in prompts]
    target = Target(hybrid_model("jamba"), name="jamba").pack()
    assert isinstance(target.model.get_submodule("model.layers.0.mamba.dt_proj"), PackedLinear)
    assert decode(target, None, prompts, max_new_tokens=8)[0] == before


@needs_packing
def test_what_grouped_attention_does_not_know_is_left_to_transformers(monkeypatch):
    """A bias of positions, for example, is not dropped."""
    calls: list[dict] = []

    def theirs(module, query, key, value, attention_mask, **options):
        calls.append(options)
        return query.transpose(1, 2), None

    monkeypatch.setattr(grouped_attention, "sdpa_attention_forward", theirs)
    attend_as = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
    parts = [torch.randn(1, 2, 1, 8) for _ in range(3)]
    attend_as(nn.Module(), *parts, None, dropout=0.0, scaling=1.0)
    assert calls == []
    attend_as(nn.Module(), *parts, None, position_bias=torch.zeros(1, 2, 1, 1))
    chain = [torch.randn(1, 2, 3, 8) for _ in range(3)]
    attend_as(nn.Module(), *chain, None)  # causal
    assert len(calls) == 2 and "position_bias" in calls[0]


def test_int8_is_refused_where_it_cannot_be(monkeypatch):
    mixture = Target(random_model("mixtral"), name="experts")
    with pytest.raises(ValueError, match=r"expected linear layers, got others \(such as experts\)"):
        mixture.pack(8)
    assert not is_packed(mixture.model) and mixture.precision == "float32"
    target = Target(random_model("llama"), name="tiny")
    target.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="bits=8: expected weights as they were trained, got"):
        target.pack(8)
    monkeypatch.setattr(cpu_linear, "has_int8", lambda: False)
    with pytest.raises(ValueError, match="expected a CPU with AVX2, .* leave bits out"):
        packed(bits=8)


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_matrix_is_rounded_as_each_of_its_rows(in_pairs, dtype):
    """It is rounded by parts of 4,096 rows; the number of inputs is odd."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(2 * ROUNDED_ROWS + 3, 5, generator=generator).to(dtype)
    rounded_OI, scales_O = to_int8(weight_OI, in_pairs=in_pairs)
    assert rounded_OI.dtype == torch.int8 and scales_O.dtype == torch.float32
    for row in (0, ROUNDED_ROWS - 1, ROUNDED_ROWS, 2 * ROUNDED_ROWS, len(weight_OI) - 1):
        alone_1I, scale_1 = to_int8(weight_OI[row : row + 1], in_pairs=in_pairs)
        assert torch.equal(rounded_OI[row], alone_1I[0]) and scales_O[row] == scale_1
    error_OI = (rounded_OI * scales_O[:, None] - weight_OI.float()).abs()
    assert (error_OI <= scales_O[:, None] * 0.501).all()
