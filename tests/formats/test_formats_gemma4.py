"""The promise: a head of DeepSpec with Gemma 4's layers drafts and learns as transformers' layers
of Gemma 4, assembled as DeepSpec assembles them, and what is not as there is refused by its key.

Sources: deepspec/modeling/dspark/gemma4 of deepseek-ai/DeepSpec; modeling_gemma4.py of transformers
5.23.

Legend: C places of the context, S slots, D width, X fused features, v vocabulary.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from converted_heads import same
from layouts import folder_of, refusal
from layouts_block import block, block_of
from plain_drafting import committed_steps, two_texts
from tiny_heads import decode, drafts_of
from tiny_targets import VOCABULARY, greedy, random_model, scaled_up, some_prompts, tiny_target
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
    Gemma4TextScaledWordEmbedding,
)

from draftheads.heads.batch import Batch
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.layers import Gemma4Layer
from draftheads.heads.losses import RANKS
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree
from draftheads.heads.tree_drafting import TreeBuilder, tree_builder
from draftheads.scripts.convert import converted

WIDTH, SLOTS, RANK, CAP = 32, 5, 6, 2.0
ROPES: dict[str, Any] = {
    "full_attention": {
        "partial_rotary_factor": 0.5, "rope_theta": 50.0, "rope_type": "proportional"
    },
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "hidden_size": WIDTH,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "global_head_dim": 16, "num_key_value_heads": 2, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "attention_bias": False, "final_logit_softcapping": CAP,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
    "enable_moe_block": False, "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY,
    "max_position_embeddings": 128, "sliding_window": 1024, "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": False, "block_size": SLOTS, "mask_token_id": 4, "num_anchors": 512,
    "num_target_layers": 3, "target_layer_ids": [0, 1], "markov_rank": RANK,
    "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "pad_token_id": 0,
    # as published: with two keys beside the types of layers
    "rope_parameters": {**ROPES, "rope_theta": None, "rope_type": "default"},
}  # fmt: skip
VALUES: dict[str, Any] = {"attention_k_eq_v": False, "final_logit_softcapping": None}
BARE: dict[str, Any] = {"markov_rank": 0, "enable_confidence_head": False}
KINDS: dict[str, dict[str, Any]] = {
    "published": {},
    "values": VALUES,
    "dflash": {**BARE},  # DeepSpec's name for one without heads, of the same architecture
    "values-capped": {"attention_k_eq_v": False},
}


class Reader(nn.Module):
    """Attention of transformers to a context and a block, of which the block's outputs are left."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.context_1CD: Tensor

    def forward(self, hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        both = torch.cat([self.context_1CD, hidden_states], dim=1)
        out, _ = self.attention(hidden_states=both, **named)
        return out[:, self.context_1CD.shape[1] :], None


class Assembled(nn.Module):
    """DeepSpec's model of layers of transformers; its state has the names of checkpoints."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        said = {**CONFIG, **config, "rope_parameters": ROPES}
        self.config = Gemma4TextConfig(**said)
        self.config._attn_implementation = "eager"
        self.said = {**CONFIG, **config}
        eps = self.config.rms_norm_eps
        self.embed_tokens = Gemma4TextScaledWordEmbedding(VOCABULARY, WIDTH, 0, WIDTH**0.5)
        layers = range(self.config.num_hidden_layers)
        self.layers = nn.ModuleList(Gemma4TextDecoderLayer(self.config, i) for i in layers)
        self.norm, self.hidden_norm = (Gemma4RMSNorm(WIDTH, eps=eps) for _ in range(2))
        self.fc = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if said["markov_rank"]:
            w1, w2 = nn.Embedding(VOCABULARY, RANK), nn.Linear(RANK, VOCABULARY, bias=False)
            self.markov_head = nn.ModuleDict({"markov_w1": w1, "markov_w2": w2})
        if said["enable_confidence_head"]:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(WIDTH + RANK, 1)})
        torch.manual_seed(5)
        for name, each in (*self.named_parameters(), *self.named_buffers()):
            if "embed_scale" not in name:
                near = 1.0 if name.endswith(("norm.weight", "layer_scalar")) else 0.0
                nn.init.normal_(each, near, 0.3)
        self.rope = Gemma4TextRotaryEmbedding(self.config)
        self.tensors = {name: each.detach().clone() for name, each in self.state_dict().items()}
        for layer in self.layers:
            layer.self_attn = Reader(layer.self_attn)

    def states(self, features_CX: Tensor, anchor: int) -> Tensor:
        """(S, D) of the block whose anchor is the token at position C."""
        context_1CD = self.hidden_norm(self.fc(features_CX))[None]
        positions = torch.arange(len(features_CX) + SLOTS)[None]
        x_1SD = self.embed_tokens(torch.tensor([[anchor] + [self.said["mask_token_id"]] * 4]))
        angles = self.rope(x_1SD, positions, "full_attention")
        for layer in self.layers:
            layer.self_attn.context_1CD = context_1CD
            x_1SD = layer(x_1SD, position_embeddings=angles, shared_kv_states={})
        return self.norm(x_1SD)[0]

    def logits(self, states_SD: Tensor, before_S: Tensor) -> Tensor:
        """(S, v), after these tokens."""
        logits_Sv = self.lm_head(states_SD)
        cap = self.said["final_logit_softcapping"]
        if cap is not None:
            logits_Sv = torch.tanh(logits_Sv / cap) * cap
        if self.said["markov_rank"]:
            codes_Sr = self.markov_head["markov_w1"](before_S)
            logits_Sv = logits_Sv + self.markov_head["markov_w2"](codes_Sr)
        return logits_Sv

    def confidence(self, states_SD: Tensor, before_S: Tensor) -> Tensor:
        codes_Sr = self.markov_head["markov_w1"](before_S)
        return self.confidence_head["proj"](torch.cat([states_SD, codes_Sr], dim=-1))[:, 0]


@cache
def gemma_target() -> Target:
    """Dense, with tied embeddings and a cap, as the target of the published head."""
    torch.manual_seed(0)
    said = {"num_hidden_layers": 3, "tie_word_embeddings": True, "sliding_window": 8}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma4TextConfig(**{**CONFIG, **said, "layer_types": kinds, "rope_parameters": ROPES})
    return Target(scaled_up(AutoModelForCausalLM.from_config(config)), name="tiny-gemma")


def published(path: Any, model: Assembled, **changes: Any) -> Any:
    said = {**model.said, **changes}
    return folder_of(path / "theirs", "model.safetensors", model.tensors, said)


@pytest.fixture
def noted(monkeypatch) -> list[Tensor]:
    """The logits of the levels that drafters grow, as long as a test runs."""
    logits = []

    def build(*arguments: Any) -> TreeBuilder:
        builder = tree_builder(*arguments)
        add = builder.add

        def add_and_note(logits_BFv: Tensor) -> bool:
            logits.append(logits_BFv)
            return add(logits_BFv)

        builder.add = add_and_note  # type: ignore[method-assign]
        return builder

    monkeypatch.setattr("draftheads.heads.base.tree_builder", build)
    return logits


def with_matrices(model: Assembled, target: Target) -> Assembled:
    """With embeddings and lm_head that are copies of the target's, as DeepSpec trains them."""
    weights = (target.model.get_input_embeddings(), target.model.get_output_embeddings())
    for name, theirs in zip(("embed_tokens", "lm_head"), weights, strict=True):
        getattr(model, name).weight.data.copy_(theirs.weight)
        model.tensors[f"{name}.weight"] = theirs.weight.detach().clone()
    return model


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_drafts_have_the_logits_of_transformers_layers(tmp_path, noted, kind, shared):
    model, target = Assembled(**KINDS[kind]), gemma_target()
    if shared:
        with_matrices(model, target)
    head = load_head(published(tmp_path, model), target=target)
    assert head.design.own_lm_head == head.design.own_embeddings == (not shared)
    tokens_BT, _ = two_texts()
    features_BTX = torch.randn(2, 13, 2 * WIDTH)
    drafter = head.drafter(target, StaticTree.from_widths([1] * SLOTS))
    lengths = [0, 0]
    for committed in committed_steps(tokens_BT, features_BTX):
        noted.clear()
        tree = drafter.propose(committed)
        drafted_BKv = torch.cat(noted, dim=1)
        for row, count in enumerate(committed.count_B.tolist()):
            lengths[row] += count
            anchor = lengths[row] - 1
            states_SD = model.states(features_BTX[row, 1 : anchor + 1], tokens_BT[row, anchor])
            expected_Sv = model.logits(states_SD, tree.tokens_BN[row, :-1])
            torch.testing.assert_close(drafted_BKv[row], expected_Sv, rtol=1e-5, atol=1e-5)
    assert expected_Sv.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_with_the_loss_and_gradients_of_transformers_layers(tmp_path, kind):
    model, target = Assembled(**KINDS[kind]), gemma_target()
    head = load_head(published(tmp_path, model), target=target).train()
    tokens_T = torch.tensor(some_prompts(9, seed=3)[0])
    features_TX = torch.randn(9, 2 * WIDTH)
    learned_1T, positions_1T = torch.ones(1, 9).bool(), torch.arange(9)[None]
    batch = Batch(tokens_T[None], learned_1T, positions_1T, torch.zeros(1, 9).long())
    got = head(batch, features_TX[None], target)
    got.loss.backward()

    weights_S = torch.exp(-torch.arange(SLOTS) / head.choices.decay_tokens)
    weights_S = weights_S / weights_S.sum()
    loss, ranks_AS = torch.zeros(()), torch.full((8, SLOTS), -1)
    for anchor in range(8):
        states_SD = model.states(features_TX[1 : anchor + 1], int(tokens_T[anchor]))
        labels = tokens_T[anchor + 1 : anchor + 1 + SLOTS]
        real = len(labels)
        before = tokens_T[anchor : anchor + real]
        logits_Sv = model.logits(states_SD[:real], before)
        ranks_AS[anchor, :real] = (logits_Sv > logits_Sv.gather(1, labels[:, None])).sum(1)
        losses = F.cross_entropy(logits_Sv, labels, reduction="none")
        if model.said["enable_confidence_head"]:
            confidence = model.confidence(states_SD[:real], before)
            accepted = torch.exp(-losses.detach())
            losses = losses + F.binary_cross_entropy_with_logits(
                confidence, accepted, reduction="none"
            )
        loss = loss + losses @ weights_S[:real]
    loss.backward()
    torch.testing.assert_close(got.loss, loss, rtol=1e-5, atol=1e-5)
    found_AS = head.token_ranks(batch, features_TX[None], target)[:8]
    assert found_AS.tolist() == ranks_AS.where(ranks_AS < RANKS, -1).tolist()
    kept_AS = ranks_AS.clamp(max=RANKS).where(ranks_AS >= 0, RANKS + 1)
    counts_SR = F.one_hot(kept_AS, RANKS + 2).sum(0)[:, : RANKS + 1]
    assert got.ranks_KR.tolist() == counts_SR.tolist()
    wanted = {name.replace(".attention.", "."): p.grad for name, p in model.named_parameters()}
    found = {name: p.grad for name, p in head.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("tree", [StaticTree.from_widths([2, 2, 1]), DynamicTree(9, 5, 3)])
@pytest.mark.parametrize("name", ["dense", "per-layer inputs"])
def test_decoding_writes_what_generate_writes(tmp_path, name, tree):
    """Also where the text is longer than the target's window."""
    target = gemma_target() if name == "dense" else tiny_target("gemma4")
    head = load_head(published(tmp_path, Assembled()), target=target)
    prompts = some_prompts(11, 5)
    rows, _ = decode(target, head, prompts, tree=tree, max_new_tokens=24)
    assert rows == [greedy(target, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_in_our_layout_it_is_the_same_head(tmp_path, kind, shared):
    model, target = Assembled(**KINDS[kind]), gemma_target()
    if shared:
        with_matrices(model, target)
    head = load_head(published(tmp_path, model), target=target)
    ours = save_head(head, tmp_path / "ours", target=target)
    again = load_head(ours, target=target)
    assert same(again.state_dict(), head.state_dict())
    assert {**vars(again.design), "rope": 0} == {**vars(head.design), "rope": 0}
    assert (again.rope.theta, again.rope.scaling) == (head.rope.theta, head.rope.scaling)
    assert (
        json.loads((ours / "config.json").read_text())["architectures"] == CONFIG["architectures"]
    )
    assert isinstance(again.layers[0], Gemma4Layer)
    assert not torch.equal(again.layers[0].layer_scalar, torch.ones(1))
    tree, prompts = DynamicTree(9, 5, 3), some_prompts(11, 6)
    expected = drafts_of(head, target, prompts, 12, tree)
    assert drafts_of(again, target, prompts, 12, tree) == expected


@pytest.mark.parametrize("to", ["vllm", "sglang", "gguf", "openvino", "mlx", "speculators"])
def test_no_engine_gets_a_head_with_gemma_4s_layers(tmp_path, to):
    target = gemma_target()
    ours = save_head(
        load_head(published(tmp_path, Assembled()), target=target), tmp_path / "a", target=target
    )
    with pytest.raises(ValueError, match=f"{to} does not support .*: it has Gemma 4's layers"):
        converted(ours, tmp_path / "b", to, target)
    assert not (tmp_path / "b").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sliding": ({"layer_types": ["sliding_attention"] * 2, "is_causal": False}, "layer_types: fu"),
    "mixed": ({"layer_types": ["sliding_attention", "full_attention"]}, "all have a window"),
    "silu": ({"hidden_activation": "silu"}, "hidden_activation: absent, gelu_pytorch_tanh; got"),
    "gelu": ({"hidden_act": "gelu"}, "expected hidden_act: absent, gelu_pytorch_tanh; got 'gelu'"),
    "experts": ({"enable_moe_block": True}, "expected enable_moe_block: absent, False; got True"),
    "inputs": ({"hidden_size_per_layer_input": 8}, "expected hidden_size_per_layer_input: absent"),
    "bias": ({"attention_bias": True}, "expected attention_bias: absent, False; got True"),
    "scores": ({"attn_logit_softcapping": 50.0}, "expected attn_logit_softcapping: absent, 0"),
    "causal": ({"is_causal": True}, "whose slots see each other both ways"),
    "quantised": ({"quantization_config": {"bits": 4}}, "expected quantization_config: absent"),
    "cap": ({"final_logit_softcapping": -1.0}, "final_logit_softcapping: expected greater"),
    "keys": ({"attention_k_eq_v": "yes"}, "attention_k_eq_v: expected a valid boolean"),
    "values": ({"attention_k_eq_v": False}, "layers.0.self_attn.v_proj.weight: expected numbers"),
    "scaling": ({"rope_scaling": ROPES["full_attention"]}, "expected rope_scaling: absent; got"),
    "no-rope": ({"rope_parameters": None, "rope_theta": 50.0}, "expected full_attention in config"),
    "flat": ({"rope_parameters": ROPES["full_attention"]}, "expected full_attention in config"),
    "no-theta": (
        {"rope_parameters": {**ROPES, "full_attention": {"rope_type": "default"}}},
        "expected rope_theta in config.json",
    ),
    "part": (
        {"rope_parameters": {"full_attention": {"rope_theta": 5.0, "partial_rotary_factor": 2}}},
        "rope_parameters.full_attention.partial_rotary_factor: expected less than",
    ),
    "dynamic": (
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 50.0}}},
        "rope_scaling 'dynamic': expected one of default, linear, llama3, yarn, proportional",
    ),
    "eagle": ({"architectures": ["Gemma4Eagle3Model"]}, "Gemma 4's layers, which only"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_deepspecs_layers_do_not_have_is_refused_by_its_key(tmp_path, changes, reason):
    assert reason in refusal(published(tmp_path, Assembled(), **changes))


@pytest.mark.parametrize("missing", ["embed_tokens.weight", "lm_head.weight"])
def test_a_head_without_its_matrices_is_incomplete(tmp_path, missing):
    """No other program takes them of the target."""
    model = Assembled()
    del model.tensors[missing]
    message = refusal(published(tmp_path, model), gemma_target())
    assert f"expected a matrix {missing}, got none; the file is incomplete" in message


def test_values_in_the_file_of_a_head_whose_keys_are_its_values_are_refused(tmp_path):
    model = Assembled(attention_k_eq_v=False, num_global_key_value_heads=2)
    message = refusal(published(tmp_path, model, attention_k_eq_v=True))
    assert "layers.0.self_attn.v_proj.weight: expected none, got numbers" in message


def test_embeddings_are_shared_only_where_the_target_scales_them_the_same_way(tmp_path):
    """Else a head would read rows that are sqrt(D) times too large or too small, in silence."""
    llama, gemma3 = tiny_target(), tiny_target("gemma3-window")
    model = with_matrices(Assembled(), llama)
    head = load_head(published(tmp_path, model), target=llama)
    assert head.design.own_embeddings and not head.design.own_lm_head
    qwens, name = block(), "embed_tokens.weight"
    for target, is_scaled in ((llama, False), (gemma3, True)):
        rows_VD = target.model.get_input_embeddings().weight.detach().clone()
        folder = block_of(tmp_path, {**qwens.state_dict(), name: rows_VD})
        assert load_head(folder, target=target).design.own_embeddings == is_scaled


def test_a_head_in_bfloat16_drafts(tmp_path):
    model = with_matrices(Assembled(), gemma_target())
    target = Target(random_model("gemma4").to(torch.bfloat16), name="tiny")
    for of in (target, gemma_target()):
        head = load_head(published(tmp_path, model), target=of, dtype=torch.bfloat16)
        prompts = some_prompts(7)
        assert drafts_of(head, of, prompts, 6, DynamicTree(9, 5, 3))
