"""Real engines: where they are, a server of vLLM for CPUs, and targets for them, the demo target's
weights as models of other architectures, which need no training: where their layers are Llama's but
for biases, or for norms of queries and keys, their text is much like its. A GLM-4 MoE's text is the
same: its last layer has experts that add nothing.

Legend: N attention heads, H width of one, X = N H.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import httpx
from launching import free_port
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from draftheads.heads.target.model import Target
from draftheads.scripts.benchmarks.engines import VARIABLES


def place_of(engine: str) -> str:
    """Where an engine is; skips the module if no variable says."""
    place = os.environ.get(VARIABLES[engine])
    if not place:
        pytest.skip(f"{VARIABLES[engine]} is not set", allow_module_level=True)
    return place


SEED = 0
PROBE = "What does os.path.join do, and which arguments has it?"
OF_LLAMA = ("architectures", "attention_bias", "mlp_bias", "model_type", "pretraining_tp")
"""Keys of a Llama's config that others do not have, or mean otherwise."""
SPARSE = "glm4_moe"
EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1}
OWN = ("bias", "_norm.weight", ".mlp.gate.weight", ".experts.gate_up_proj", ".experts.down_proj")
"""Weights that a Llama lacks."""


def write_relative(original: Target, model_type: str, folder: Path) -> Path:
    """Save the model, with the original's tokenizer. Raises ValueError where its weights are
    neither the original's, nor biases, nor norms of queries and keys, nor experts.
    """
    config = original.model.config.to_dict()
    shared = {key: value for key, value in config.items() if key not in OF_LLAMA}
    weights = original.model.state_dict()
    if model_type == SPARSE:
        last = config["num_hidden_layers"] - 1
        shared |= {**EXPERTS, "first_k_dense_replace": last, "tie_word_embeddings": False}
        shared["moe_intermediate_size"] = config["intermediate_size"]
        shared["rope_parameters"]["partial_rotary_factor"] = 1.0
        dense = f"layers.{last}.mlp."
        weights = {name.replace(dense, f"{dense}shared_experts."): x for name, x in weights.items()}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**shared)).float().eval()
    loaded = model.load_state_dict(weights, strict=False)
    own = [name for name in loaded.missing_keys if not name.endswith(OWN)]
    if own or loaded.unexpected_keys:
        raise ValueError(f"{model_type} has other weights than Llama: {own[:3]}")
    _fill_own(model, original)
    model.generation_config = original.model.generation_config
    model.save_pretrained(folder)
    original.tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def _fill_own(model: PreTrainedModel, original: Target) -> None:
    """Small biases; norms of queries and keys that leave them as large as they are, on average;
    experts that give 0.
    """
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.tensor([original.tokenizer.encode(PROBE)])
    states = original.model(ids, output_hidden_states=True).hidden_states
    layers = zip(model.model.layers, original.model.model.layers, states[:-1], strict=True)
    for layer, source, state_BTD in layers:
        normed_BTD = source.input_layernorm(state_BTD)
        for name in ("q", "k", "v"):
            projection = getattr(layer.self_attn, f"{name}_proj")
            if projection.bias is not None:
                projection.bias.normal_(std=0.05, generator=generator)
            norm = getattr(layer.self_attn, f"{name}_norm", None)
            if norm is not None:
                vectors_BTX = getattr(source.self_attn, f"{name}_proj")(normed_BTD)
                norm.weight.normal_(1, 0.1, generator=generator)
                norm.weight.mul_(_size_of_heads(vectors_BTX, len(norm.weight)))
        if hasattr(layer.mlp, "experts"):
            for weight in (layer.mlp.gate.weight, layer.mlp.experts.gate_up_proj):
                weight.normal_(std=0.02, generator=generator)
            layer.mlp.experts.down_proj.zero_()


def _size_of_heads(vectors_BTX: Tensor, width: int) -> Tensor:
    """Mean over tokens and heads of the root mean square of each head's vector."""
    per_head_BTNH = vectors_BTX.unflatten(-1, (-1, width))
    return per_head_BTNH.square().mean(-1).sqrt().mean()


SECONDS = 180
"""Until it answers."""
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
CPU |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Serving:
    """A server."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """With all its processes, as kill -9 does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(
    python: str, target: str, log: Path, *words: str, **environment: str
) -> Iterator[Serving]:
    """A server of the vLLM of this Python, killed at the end."""
    port = str(free_port())
    command = [str(Path(python).with_name("vllm")), "serve", target, "--port", port]
    command += ["--host", "127.0.0.1", "--enforce-eager", *words]
    own = {key: each for key, each in os.environ.items() if key != "PYTHONPATH"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env={**own, **CPU, **environment},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    server = Serving(f"http://127.0.0.1:{port}", process)
    try:
        _wait_for(server, log)
        yield server
    finally:
        server.kill()


def _wait_for(server: Serving, log: Path) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.process.poll() is None:
        try:
            if httpx.get(f"{server.url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])
