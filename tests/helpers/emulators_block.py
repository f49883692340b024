"""What serving engines make of a folder of a block head, restated from the facts of their loaders,
and the chain that they draft, in float64, one slot and one attention head at a time.

Source: qwen3_dspark.py, qwen3_dflash.py, qwen3_dflash2.py, dspark/speculator.py and
speculators/algos.py of vLLM 0.33; models/dspark.py, dflash.py and dflash_utils.py of SGLang 0.5.23;
Qwen3DFlash* in exporters/openvino/model_patcher.py of optimum-intel 2.2.0;
speculative/drafters/qwen3_dflash and dspark of mlx-vlm 0.7.10.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from emulators import Config, EngineError, Served, Shapes, read, under
from emulators_eagle import _ids, _leniently, _strictly, llama_layer, rope
from plain_eagle import PlainHead
from torch import Tensor

DSPARK, DFLASH, DFLASH2 = "Qwen3DSparkModel", "DFlashDraftModel", "DFlash2DraftModel"


def block_shapes(config: Config, features: int) -> Shapes:
    """The backbone, in which DSpark and DFlash agree."""
    width = config["hidden_size"]
    head_dim = config.get("head_dim") or width // config["num_attention_heads"]
    layer = llama_layer(config, width) | {"input_layernorm.weight": (width,)}
    layer |= {f"self_attn.{each}_norm.weight": (head_dim,) for each in "qk"}
    shapes: Shapes = {f"{name}.weight": (width,) for name in ("norm", "hidden_norm")}
    shapes["fc.weight"] = (width, features * width)
    for number in range(config["num_hidden_layers"]):
        shapes |= under(f"layers.{number}", layer)
    return shapes


def markov_shapes(config: Config, rank: int, kind: str = "vanilla") -> Shapes:
    width, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"markov_w1.weight": (vocab, rank)}
    shapes["markov_w2.weight"] = (config.get("draft_vocab_size") or vocab, rank)
    if kind == "rnn":
        shapes["joint_proj.weight"] = (3 * rank, 2 * rank + width)
        shapes["joint_proj.bias"] = (3 * rank,)
    return under("markov_head", shapes)


def confidence_shapes(config: Config) -> Shapes:
    wide = config["markov_rank"] if config.get("confidence_head_with_markov") else 0
    proj: Shapes = {"weight": (1, config["hidden_size"] + wide), "bias": (1,)}
    return under("confidence_head.proj", proj)


def domino_shapes(config: Config, section: Config) -> Shapes:
    """The correction of Domino, at the top of the file."""
    width, size, rank = config["hidden_size"], section["gru_hidden_dim"], section["emb_dim"]
    return {
        "prefix_gru.weight_ih_l0": (3 * size, width),
        "prefix_gru.weight_hh_l0": (3 * size, size),
        "embed_proj.0.weight": (rank, width + size),
        "embed_proj.2.weight": (config["vocab_size"], rank),
    }


def dflash2_shapes(config: Config, section: Config) -> Shapes:
    """Engines make both parts; llama.cpp and vLLM stop where one is missing."""
    sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    if not all(section.get(size) for size in sizes):
        raise EngineError("DFlash2 model is missing conv/selector metadata")
    taps, group, rank, _ = (section[size] for size in sizes)
    width, vocab = config["hidden_size"], config["vocab_size"]
    if width % group:
        raise EngineError("hidden size must be divisible by conv_group_size")
    shapes: Shapes = {"base_kernel": (2, taps, width)}
    shapes["kernel_projection.weight"] = (2 * taps * width // group, width)
    convolutions: Shapes = {}
    for number, name in product(range(config["num_hidden_layers"]), ("attention", "mlp")):
        convolutions |= under(f"layers.{number}.{name}_conv", shapes)
    codebooks: Shapes = {f"{name}_codebook": (vocab, rank) for name in ("predecessor", "successor")}
    selector = under("candidate_selector", {**codebooks, "hidden_projection.weight": (rank, width)})
    return convolutions | selector


def vllm_block(folder: Path, *, style: str = "plain") -> Served:
    """The Markov head is the vanilla one, whatever config.json says; the confidence head is left
    out where the file has none; embeddings and lm_head of the file are used where they differ. A
    block has a slot for each token that is to be drafted, whatever config.json says.
    style: "plain", or "speculators" for what that library, which knows all Markov heads, loads.
    """
    config, tensors = read(folder)
    if style == "speculators":
        config = _nested(config)
    if config["architectures"] not in ([DSPARK], [DFLASH], [DFLASH2]):
        raise EngineError(f"{config['architectures']} is not this")
    if config["model_type"] != "qwen3":
        raise EngineError(f"{config['model_type']} is not this")
    is_dspark, section = config["architectures"] == [DSPARK], config.get("dflash_config") or {}
    ids = section.get("target_layer_ids") or config.get("target_layer_ids")
    served = Served(block_shapes(config, len(ids)))
    draft, vocab = config.get("draft_vocab_size") or config["vocab_size"], config["vocab_size"]
    if is_dspark:
        if not config["markov_rank"]:
            raise EngineError("a table with rows of no numbers")
        kind = config["markov_head_type"] if style == "speculators" else "vanilla"
        served.parameters |= markov_shapes(config, config["markov_rank"], kind)
        if config.get("enable_confidence_head") and any("confidence" in name for name in tensors):
            served.parameters |= confidence_shapes(config)
    if config["architectures"] == [DFLASH2]:
        served.parameters |= dflash2_shapes(config, section)
    for name, rows in (("embed_tokens", vocab), ("lm_head", draft)):
        if f"{name}.weight" in tensors:
            served.parameters[f"{name}.weight"] = (rows, config["hidden_size"])
    if draft < vocab and not {"lm_head.weight", "d2t"} <= set(tensors):
        raise EngineError("a reduced vocabulary needs both")
    causal = config.get("is_causal")
    causal = section.get("causal") if causal is None else causal
    served.facts = {
        "aux": [layer + 1 for layer in ids],
        "anchored": is_dspark and config.get("sample_from_anchor", True),
        **_attention(config, section, causal),
        "mask": section.get("mask_token_id", config.get("mask_token_id")),
        "ids": _ids(tensors) if draft < vocab else None,
        "candidates": section.get("selector_top_k"),
        **_numbers(config),
    }
    if style == "speculators":  # else the command line says how many
        served.facts["slots"] = config["tokens"] + (not served.facts["anchored"])
    names = {name: name for name in tensors if name not in ("t2d", "d2t")}
    return _strictly(served, names, tensors)


def sglang_block(folder: Path) -> Served:
    """Reads three kinds of Markov heads, and Domino's correction, with which a block drafts one
    token less than it has slots; passes over lm_head, embeddings and, without ragged verification,
    the confidence head.
    """
    config, tensors = read(folder)
    section = config.get("dflash_config") or {}
    ids = section.get("target_layer_ids") or config.get("target_layer_ids")
    if min(ids) < 0 or max(ids) >= config["num_target_layers"]:
        raise EngineError(f"target_layer_ids out of range: {ids}")
    served = Served(block_shapes(config, len(ids)))
    is_dspark = config["architectures"] == [DSPARK]
    if is_dspark:
        rank, kind = config["markov_rank"], config["markov_head_type"]
        if not rank or kind not in ("vanilla", "rnn"):
            raise EngineError(f"DSpark requires markov_rank > 0, and not {kind}")
        served.parameters |= markov_shapes({**config, "draft_vocab_size": None}, rank, kind)
    elif config["architectures"] == [DFLASH2]:
        served.parameters |= dflash2_shapes(config, section)
    elif config["architectures"] != [DFLASH]:
        raise EngineError(f"{config['architectures']} is not known")
    anchored = is_dspark and config.get("sample_from_anchor", True)
    is_domino = section.get("projector_type") == "domino"
    if is_domino:
        anchored = section["shift_label"]
        if section["pure_draft_prefix_len"] != 1 or not isinstance(anchored, bool):
            raise EngineError("Domino requires pure_draft_prefix_len 1 and a bool shift_label")
        served.parameters |= domino_shapes(config, section)
    served.facts = {
        "aux": [layer + 1 for layer in ids],
        "anchored": anchored,
        "undrafted": int(is_domino and anchored),
        **_attention(config, {}, config.get("is_causal")),
        "mask": section.get("mask_token_id", config.get("mask_token_id")),
        "ids": None,
        "candidates": section.get("selector_top_k"),
        **_numbers(config),
    }
    served = _leniently(served, {name: name for name in tensors}, tensors)
    served.dropped -= {name for name in tensors if name.startswith("confidence_head.")}
    return served


def openvino_block(folder: Path) -> Served:
    """DFlash alone, as a model of its own; all that it does not make is passed over. Blocks are as
    long as the user says; layers and mask token are written into the exported model.
    """
    config, tensors = read(folder)
    if config["architectures"] != [DFLASH] or config["model_type"] != "qwen3":
        raise EngineError("exported as a plain model")
    section = config["dflash_config"]
    served = Served(block_shapes(config, len(section["target_layer_ids"])))
    is_windowed = set(config["layer_types"]) == {"sliding_attention"}
    served.facts = {
        "aux": [layer + 1 for layer in section["target_layer_ids"]],
        "anchored": False,
        "window": config["sliding_window"] if is_windowed else None,
        "causal": False,
        "mask": section["mask_token_id"],
        "ids": None,
        **_numbers(config),
    }
    return _leniently(served, {name: name for name in tensors}, tensors)


def mlx_block(folder: Path) -> Served:
    """DSpark is found by its section. Blocks have one slot more than config.json says, unless it
    says that the anchor's is among them, at most 8, unless it says how many, and get shorter as
    drafts are rejected, unless it says not; DFlash's get shorter unless the program says not.
    """
    config, tensors = read(folder)
    section = config.get("dflash_config")
    if section is None:
        raise EngineError("DSpark requires a dflash_config object")
    ids, is_dspark = section["target_layer_ids"], section.get("projector_type") == "dspark"
    if sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < config["num_target_layers"]:
        raise EngineError(f"target_layer_ids out of order or range: {ids}")
    served = Served(block_shapes(config, len(ids)))
    anchored, drafts = False, config["block_size"] - 1
    if is_dspark:
        rank, kind = config["markov_rank"], config["markov_head_type"]
        if not rank or kind != "vanilla":
            raise EngineError(f"DSpark requires markov_rank > 0, and vanilla, not {kind}")
        served.parameters |= markov_shapes({**config, "draft_vocab_size": None}, rank)
        if config.get("enable_confidence_head"):
            served.parameters |= confidence_shapes(config)
        anchored = config.get("sample_from_anchor", True)
        drafts = config["block_size"] - bool(config.get("dspark_bonus_anchor"))
        if not section.get("prefer_requested_block_size"):
            raise EngineError("blocks would get shorter")
        drafts = min(drafts, section.get("runtime_block_size", 8) - 1)
    served.facts = {
        "aux": [layer + 1 for layer in ids],
        "anchored": anchored,
        "window": None,
        "causal": config.get("is_causal", False),
        "mask": section["mask_token_id"],
        "ids": None,
        **_numbers(config),
        "slots": drafts + (not anchored),
    }
    return _strictly(served, {name: name for name in tensors}, tensors)


def _nested(config: Config) -> Config:
    """What vLLM keeps of a speculators config, with its own word for what is absent."""
    layer, kind = dict(config["transformer_layer_config"]), config["speculators_model_type"]
    _ = config["speculators_config"]["verifier"]["name_or_path"]
    ids = [layer - 1 for layer in config["aux_hidden_state_layer_ids"]]
    layer["draft_vocab_size"] = config["draft_vocab_size"]
    layer["tokens"] = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    if kind == "dflash":
        causal = not config.get("sliding_window_non_causal", True)
        section = {"target_layer_ids": ids, "mask_token_id": config["mask_token_id"]}
        return {
            **layer,
            "architectures": [DFLASH],
            "block_size": config["block_size"],
            "dflash_config": {**section, "causal": causal},
        }
    keys = ("mask_token_id", "markov_rank", "markov_head_type", "block_size")
    keys += ("enable_confidence_head", "confidence_head_with_markov")
    more = {key: config[key] for key in keys}
    anchored = config.get("sample_from_anchor", False)
    more |= {"architectures": [DSPARK], "target_layer_ids": ids, "sample_from_anchor": anchored}
    return {**layer, **more}


def _attention(config: Config, section: Config, causal: bool | None) -> dict[str, Any]:
    """Layers with a window are causal unless it is said otherwise."""
    kinds = set(config.get("layer_types") or ["full_attention"])
    windowed = kinds == {"sliding_attention"}
    window = section.get("swa_window_size", config.get("sliding_window")) if windowed else None
    return {"window": window, "causal": windowed if causal is None else causal}


def _numbers(config: Config) -> dict[str, Any]:
    return {
        "rope": rope(config),
        "eps": config["rms_norm_eps"],
        "heads": (config["head_dim"], config["num_key_value_heads"]),
        "slots": config["block_size"],
    }


class PlainBlock(PlainHead):
    """Drafts a greedy chain with what an engine has loaded and believes."""

    def __init__(self, served: Served, embed_VD: Tensor, unembed_VD: Tensor) -> None:
        facts, loaded = served.facts, served.loaded
        self.facts = facts
        self.weights = {name: tensor.double() for name, tensor in loaded.items()}
        theta, scaling = facts["rope"]
        rope = SimpleNamespace(theta=theta, scaling=scaling)
        self.head = SimpleNamespace(kind="block", rope=rope, window=facts["window"])
        head_dim, kv_heads = facts["heads"]
        self.shape = SimpleNamespace(head_dim=head_dim, kv_heads=kv_heads, eps=facts["eps"])
        self.embed_VD = self.weights.get("embed_tokens.weight", embed_VD.double())
        self.unembed_vD = self.weights.get("lm_head.weight", unembed_VD.double())
        self.layers = len({name.split(".")[1] for name in loaded if name.startswith("layers.")})

    def slots(self, states_TX: Tensor, anchor: int) -> list[Tensor]:
        """Final states of the block of a token at position T, after the target's T fused states."""
        start, count = len(states_TX), self.facts["slots"]
        context = [self.norm("hidden_norm", self.linear("fc", x.double())) for x in states_TX]
        tokens = [anchor] + [self.facts["mask"]] * (count - 1)
        block = [self.embed_VD[token] for token in tokens]
        for number in range(self.layers):
            name = f"layers.{number}"
            normed = [self.norm(f"{name}.input_layernorm", x_D) for x_D in block]
            kernels = self.kernels(f"{name}.attention_conv", normed)
            normed = self.convolved(f"{name}.attention_conv", normed, kernels, 0)
            read = [*enumerate(context), *enumerate(normed, start)]
            entries = [self.entry(f"{name}.self_attn", x_D, place) for place, x_D in read]
            attended = []
            for slot, x_D in enumerate(normed):
                seen = [e for e in entries if self.sees(start + slot, e[0], start)]
                attended.append(self.attend(f"{name}.self_attn", x_D, start + slot, seen))
            attended = self.convolved(f"{name}.attention_conv", attended, kernels, 1)
            block = [x_D + out_D for x_D, out_D in zip(block, attended, strict=True)]
            normed = [self.norm(f"{name}.post_attention_layernorm", x_D) for x_D in block]
            kernels = self.kernels(f"{name}.mlp_conv", normed)
            normed = self.convolved(f"{name}.mlp_conv", normed, kernels, 0)
            out = [self.mlp(f"{name}.mlp", x_D) for x_D in normed]
            out = self.convolved(f"{name}.mlp_conv", out, kernels, 1)
            block = [x_D + out_D for x_D, out_D in zip(block, out, strict=True)]
        return [self.norm("norm", x_D) for x_D in block]

    def kernels(self, name: str, block: list[Tensor]) -> list[Tensor]:
        """Of each slot: before or after the sub-layer, tap, channel."""
        if f"{name}.base_kernel" not in self.weights:
            return []
        base = self.weights[f"{name}.base_kernel"]
        changes = [self.linear(f"{name}.kernel_projection", x_D) for x_D in block]
        group = base[0].numel() * 2 // len(changes[0])
        return [base + change.repeat_interleave(group).view_as(base) for change in changes]

    def convolved(
        self, name: str, block: list[Tensor], kernels: list[Tensor], side: int
    ) -> list[Tensor]:
        out = []
        for slot, kernel in enumerate(kernels):
            taps = range(min(kernel.shape[1], slot + 1))
            terms = [kernel[side, tap] * block[slot - tap] for tap in taps]
            out.append(torch.stack(terms).sum(0))
        return out or block

    def sees(self, slot: int, place: int, start: int) -> bool:
        assert not self.facts["causal"]
        return place >= start or slot - place < (self.facts["window"] or math.inf)

    def entry(self, name: str, x_D: Tensor, place: int) -> tuple[int, list[Tensor], Any]:
        width = self.shape.head_dim
        keys = self.linear(f"{name}.k_proj", x_D).split(width)
        turned = [self.turned(self.norm(f"{name}.k_norm", k), place) for k in keys]
        return place, turned, self.linear(f"{name}.v_proj", x_D).split(width)

    def attend(self, name: str, x_D: Tensor, place: int, seen: list[Any]) -> Tensor:
        width, out = self.shape.head_dim, []
        queries = self.linear(f"{name}.q_proj", x_D).split(width)
        for number, query in enumerate(queries):
            group = number * self.shape.kv_heads // len(queries)
            query = self.turned(self.norm(f"{name}.q_norm", query), place)
            scores = torch.stack([query @ keys[group] for _, keys, _ in seen]) / width**0.5
            values = torch.stack([values[group] for *_, values in seen])
            out.append(scores.softmax(0) @ values)
        return self.linear(f"{name}.o_proj", torch.cat(out))

    def chain(self, states_TX: Tensor, anchor: int) -> tuple[list[int], Tensor]:
        """Its greedy tokens, the target's ids, and their logits (K, v)."""
        tokens, logits, state = [anchor], [], None
        slots = self.slots(states_TX, anchor)[0 if self.facts["anchored"] else 1 :]
        for x_D in slots[: len(slots) - self.facts.get("undrafted", 0)]:
            if self.facts.get("candidates"):
                logits_k, best = self.selected(x_D, tokens[-1])
                logits.append(logits_k)
                tokens.append(best)
                continue
            bias_v, state = self.bias(x_D, tokens[-1], state)
            logits.append(self.unembed_vD @ x_D + bias_v)
            best = int(logits[-1].argmax())
            tokens.append(self.facts["ids"][best] if self.facts["ids"] else best)
        return tokens[1:], torch.stack(logits)

    def selected(self, x_D: Tensor, token: int) -> tuple[Tensor, int]:
        """The scores of the candidates, by their own logits, and the best one."""
        logits_k, places_k = (self.unembed_vD @ x_D).sort(descending=True, stable=True)
        logits_k, places = logits_k[: self.facts["candidates"]], places_k.tolist()
        tokens = [self.facts["ids"][place] if self.facts["ids"] else place for place in places]
        name, gate_r = (
            "candidate_selector",
            self.linear("candidate_selector.hidden_projection", x_D),
        )
        code_r = self.weights[f"{name}.predecessor_codebook"][token] * gate_r
        successors_kr = self.weights[f"{name}.successor_codebook"][tokens[: len(logits_k)]]
        scores_k = logits_k + successors_kr @ code_r
        return scores_k, tokens[int(scores_k.argmax())]

    def bias(self, x_D: Tensor, token: int, state: Any) -> tuple[Any, Any]:
        weights = self.weights
        if "prefix_gru.weight_ih_l0" in weights:
            return self.bias_of_domino(x_D, token, state)
        if "markov_head.markov_w1.weight" not in weights:
            return 0.0, None
        code_r = weights["markov_head.markov_w1.weight"][token]
        if "markov_head.joint_proj.weight" in weights:
            state = torch.zeros_like(code_r) if state is None else state
            joint = self.linear("markov_head.joint_proj", torch.cat([state, code_r, x_D]))
            gate, candidate, output = joint.split(len(code_r))
            kept = 1 / (1 + (-gate).exp())
            state = kept * state + (1 - kept) * candidate.tanh()
            code_r = output.tanh()
        return weights["markov_head.markov_w2.weight"] @ code_r, state

    def bias_of_domino(self, x_D: Tensor, token: int, state: Any) -> tuple[Any, Any]:
        """The first token is the argmax of the lm_head alone; `torch.nn.GRUCell` reads it, too."""
        weight_ih, weight_hh = (
            self.weights[f"prefix_gru.weight_{name}_l0"] for name in ("ih", "hh")
        )
        cell = torch.nn.GRUCell(weight_ih.shape[1], weight_hh.shape[1], bias=False).double()
        cell.load_state_dict({"weight_ih": weight_ih, "weight_hh": weight_hh})
        new = cell(self.embed_VD[token][None], state)
        if state is None:
            return 0.0, new
        read = torch.cat([x_D, new[0]])
        code = torch.nn.functional.silu(self.linear("embed_proj.0", read))
        return self.linear("embed_proj.2", code), new
