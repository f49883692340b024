"""The promise: heads that others have published load strictly and draft as their papers say.

Sources: medusa.md, section 1.2; names as in github.com/zankner/Hydra; for EAGLE-4, NeMo AutoModel's
documentation of its export.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import (
    EAGLE4,
    HYDRA_CONFIG,
    LAYERS,
    PREFIX,
    WIDTH,
    last_matrix,
    places,
    published_eagle4,
    published_hydra,
    refusal,
)
from plain_drafting import DEPTH, TREES, drafts_of, plain_drafts, two_texts
from plain_eagle import PlainEagle3, PlainHead
from plain_hydra import silu
from safetensors.torch import save_file
from tiny_heads import decode
from tiny_targets import VOCABULARY, greedy, some_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from draftheads.heads.formats.hub import load_head, open_head, save_head
from draftheads.heads.target.model import Target

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "rms_norm_eps": 1e-2, "pad_token_id": None, "initializer_range": 0.5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40, "rope_theta": 20.0,
}  # fmt: skip
ARCHITECTURES = ["mlp", "prefix-mlp"]


def new_target(**sizes: Any) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, **sizes}, rope_parameters=LLAMA3)
    return Target(LlamaForCausalLM(config), name="base/model")


@pytest.fixture(scope="module")
def target() -> Target:
    return new_target()


class PublishedHydra(PlainHead):
    """Hydra restated on its own tensor names, as `plain_drafts` wants it."""

    def __init__(self, architecture: str, tensors: dict[str, torch.Tensor], target: Target) -> None:
        self.architecture = architecture
        self.weights = {name: tensor.double() for name, tensor in tensors.items()}
        rope = SimpleNamespace(theta=LLAMA3["rope_theta"], scaling=LLAMA3)
        self.head = SimpleNamespace(kind="hydra", rope=rope, window=None)
        self.shape = SimpleNamespace(head_dim=8, kv_heads=2, eps=1e-2)
        self.embeddings_VD = target.model.get_input_embeddings().weight.double()
        self.vocabulary = list(range(VOCABULARY))

    def inputs(self, features_TD: torch.Tensor) -> list[Any]:
        features, memory = features_TD.double(), []
        if self.architecture == "mlp":
            return list(features)
        layer = f"{PREFIX}.layers.0"
        states = [self.layer(layer, x_D, n, memory) for n, x_D in enumerate(features[1:])]
        return [None, *(self.norm(f"{PREFIX}.norm", state_D) for state_D in states)]

    def logits(self, input_D: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
        k = len(path) - 1
        x = torch.cat([input_D, *(self.embeddings_VD[token] for token in path)])
        for j, place in enumerate(places(self.architecture)):
            block = f"hydra_mlp.{k}.{place}"
            kept = self.linear(f"{block}.res_connection", x) if j == 0 else x
            x = kept + silu(self.linear(f"{block}.linear", x))
        return self.linear(last_matrix(self.architecture, k), x)


def folder_of(path: Path, tensors: Any, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**HYDRA_CONFIG, **config}))
    torch.save(tensors, path / "hydra_lm_head.pt")
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_a_published_hydra_drafts_as_its_restatement(tmp_path, target, architecture, dtype):
    tensors = {name: each.to(dtype) for name, each in published_hydra(architecture).items()}
    folder = folder_of(tmp_path / "hydra", tensors, hydra_head_arch=architecture)
    head = load_head(folder, target=target)
    assert (head.depth, head.layers, head.normed) == (DEPTH, LAYERS, False)
    expected = plain_drafts(PublishedHydra(architecture, tensors, target), *two_texts())
    assert drafts_of(head, target, *two_texts()) == expected
    save_head(head, tmp_path / "ours", target=target)
    assert drafts_of(load_head(tmp_path / "ours"), target, *two_texts()) == expected


def test_a_published_hydra_is_loaded_by_its_id(hub, tmp_path, target):
    tensors = published_hydra("prefix-mlp")
    folder = folder_of(tmp_path / "hydra", tensors, hydra_head_arch="prefix-mlp")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    files["training_args.bin"] = b"not wanted"
    hub.repos["them/hydra"] = {"private": False, "files": files}
    assert open_head("them/hydra").target == ("base/model", None)
    state = load_head("them/hydra", target=target).state_dict()
    expected = load_head(folder, target=target).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


LEFT_OVER = [f"{PREFIX}.embed_tokens.weight", f"{PREFIX}.layers.0.self_attn.rotary_emb.inv_freq"]
UNKNOWN = ["hydra_mlp.0.0.scale", "hydra_lm_head.weight", f"{PREFIX}.layers.0.bias", "fc.weight"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_name_must_be_there_and_no_other(tmp_path, target, architecture):
    def file(tensors: dict[str, torch.Tensor]) -> Path:
        return folder_of(tmp_path / "head", tensors, hydra_head_arch=architecture)

    whole = published_hydra(architecture)
    whole = {name: tensor for name, tensor in whole.items() if name not in LEFT_OVER}
    load_head(file(whole), target=target)
    for name in whole:
        tensors = {other: tensor for other, tensor in whole.items() if other != name}
        assert "does not match its head" in refusal(file(tensors), target)
    for name in UNKNOWN if architecture == "prefix-mlp" else [*UNKNOWN[:2], UNKNOWN[3]]:
        message = refusal(file({**whole, name: torch.ones(1)}), target)
        assert "expected none, got" in message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hydra_head_arch", "cross-attn", "absent, mlp, prefix-mlp"),
        ("hydra_head_arch", "eagle-attn", "absent, mlp, prefix-mlp"),
        ("grounded_heads", False, "absent, True"),
        ("hidden_state_offset", 1, "absent, 0"),
    ],
)
def test_other_designs_are_refused(tmp_path, target, key, value, expected):
    folder = folder_of(tmp_path / "head", published_hydra("mlp"), **{key: value})
    line = f"expected {key}: {expected}; got {value!r}"
    assert line in refusal(folder, target)


def test_a_prefix_layer_needs_the_target_it_was_made_for(tmp_path, target):
    folder = folder_of(tmp_path / "head", published_hydra("prefix-mlp"))
    assert "the sizes of base/model), got none; pass it: load_head(..., target=target)" in refusal(
        folder
    )
    message = refusal(folder, new_target(num_key_value_heads=4))
    assert "k_proj.weight: expected numbers (32, 32), got numbers (16, 32)" in message
    with pytest.raises(ValueError, match=r"hidden size 32 \(base/model\), target has 64"):
        load_head(folder, target=new_target(hidden_size=64))


def test_without_a_prefix_layer_no_target_is_needed(tmp_path):
    head = load_head(folder_of(tmp_path / "head", published_hydra("mlp")))
    assert (head.hidden_size, head.vocab_size, head.depth) == (WIDTH, VOCABULARY, DEPTH)


class Code:
    """Something that leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_file_that_is_no_state_dict_is_refused_and_not_run(tmp_path):
    trap = tmp_path / "trap"
    for content in (Code(trap), {"weight": Code(trap)}, torch.nn.Linear(2, 2)):
        message = refusal(folder_of(tmp_path / "head", content))
        assert "damaged, or a pickle that contains code" in message
    assert not trap.exists()
    for content in ({"state_dict": published_hydra("mlp")}, {"weight": torch.ones(1), "step": 3}):
        message = refusal(folder_of(tmp_path / "head", content))
        assert f"state dict of tensors, got {sorted(content)}" in message
    assert "got list" in refusal(folder_of(tmp_path / "head", [torch.ones(1)]))
    folder = folder_of(tmp_path / "head", {})
    (folder / "hydra_lm_head.pt").write_text("no pickle at all")
    assert "bytes that are damaged" in refusal(folder)


def test_a_folder_without_weights_says_which_are_missing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYDRA_CONFIG))
    with pytest.raises(
        FileNotFoundError, match=r"model\.safetensors, .* hydra_lm_head\.pt, found none"
    ):
        load_head(tmp_path)


class PublishedEagle4(PlainEagle3):
    """EAGLE-4 restated without its candidate head, as `plain_drafts` wants it."""

    def __init__(self, tensors: dict[str, torch.Tensor], text_T: torch.Tensor) -> None:
        ours = {name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()}
        switches = {"fc_norm": True, "norm_output": True}
        switches |= {"norm_before_fc": False, "norm_before_residual": False}
        shape = SimpleNamespace(hidden_size=WIDTH, head_dim=8, kv_heads=2, eps=1e-5)
        super().__init__(
            SimpleNamespace(
                kind="eagle4", window=5, rope=SimpleNamespace(theta=1e4, scaling=None),
                design=SimpleNamespace(shape=shape, layers=1, **switches),
                named_parameters=ours.items,
            )
        )  # fmt: skip
        self.vocabulary, self.texts_BT = list(range(VOCABULARY)), iter(text_T)

    def embedded(self, token: int) -> torch.Tensor:
        return self.weights["embed_tokens.weight"][token]

    def inputs(self, features_TD: torch.Tensor) -> list[Any]:
        """Of each position behind the first: the head's output, and what it has read until then."""
        states: list[Any] = [None]
        memory: list[Any] = []
        for position, token in enumerate(next(self.texts_BT).tolist()[1:], start=1):
            fused = self.fuse(features_TD[position].double())
            hidden = self.advance(self.embedded(token), fused, position, [memory])
            states.append((hidden, list(memory)))
        return states

    def logits(self, state: Any, path: tuple[int, ...]) -> torch.Tensor:
        hidden, memory = state
        own = [list(memory)]
        for token in path[1:]:
            hidden = self.advance(self.embedded(token), hidden, own[0][-1][0] + 1, own)
        return self.linear("lm_head", self.state(hidden))


@torch.no_grad()
def test_a_published_eagle4_drafts_as_its_restatement_and_changes_no_text(tmp_path):
    target = new_target(num_hidden_layers=8)
    tensors = published_eagle4(target.model.get_input_embeddings().weight.detach())
    (tmp_path / "config.json").write_text(json.dumps(EAGLE4))
    save_file(tensors, tmp_path / "model.safetensors")
    head = load_head(tmp_path, target=target)
    assert head.feature_layers == (2, 4, 5)
    tokens_BT, _ = two_texts()
    features_BTD = torch.randn(*tokens_BT.shape, 3 * WIDTH)
    expected = plain_drafts(PublishedEagle4(tensors, tokens_BT), tokens_BT, features_BTD)
    assert drafts_of(head, target, tokens_BT, features_BTD) == expected
    prompts = some_prompts(19, 11, 5)
    texts = [greedy(target, prompt, 15) for prompt in prompts]
    for tree in TREES:
        for rows in (1, 3):
            written, _ = decode(target, head, prompts[:rows], tree=tree, max_new_tokens=15)
            assert written == texts[:rows]
