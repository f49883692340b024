"""What serving engines make of a folder of an EAGLE head, restated from the facts of their loaders.

Source: eagle.md, sections 4.1, 4.4 and 4.6 to 4.8: vLLM 0.33, SGLang 0.5.23. OpenVINO: classes
LlamaEagle3* in exporters/openvino/model_patcher.py of optimum-intel 2.2.0, and
speculative_decoding/eagle3_model_transforms.cpp of OpenVINO GenAI 2026.4. MLX:
speculative/drafters/eagle3 of mlx-vlm 0.7.10. LMDeploy: pytorch/models/llama_eagle3.py and
configurations/llama.py of LMDeploy 0.18.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from emulators import Config, EngineError, Served, Shapes, read, under
from torch import Tensor

IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_OF_LLAMA = ("LlamaForCausalLM", "LlamaForCausalLMEagle3")
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def llama_layer(config: Config, wide: int) -> Shapes:
    """q, k and v apart, as they are in files. Either key means biases, in both engines."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    q, kv = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    shapes: Shapes = {
        "self_attn.q_proj.weight": (q, wide),
        "self_attn.k_proj.weight": (kv, wide),
        "self_attn.v_proj.weight": (kv, wide),
        "self_attn.o_proj.weight": (width, q),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "post_attention_layernorm.weight": (width,),
    }
    if config.get("attention_bias", False) or config.get("bias", False):
        shapes |= {
            f"self_attn.{p}_proj.bias": (n,) for p, n in zip("qkv", (q, kv, kv), strict=True)
        }
    return shapes


def eagle1_layers(config: Config) -> Shapes:
    width = config["hidden_size"]
    shapes: Shapes = {"fc.weight": (width, 2 * width)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= under(f"layers.{layer}", llama_layer(config, width))
        if layer:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (width,)
    return shapes


def vllm_eagle1(folder: Path) -> Served:
    """The engine's word goes in front of `architectures`, and that class must be known. fc has no
    bias; names that end in .bias are dropped without a word, others are errors.
    """
    config, tensors = read(folder)
    if "Eagle" + config["architectures"][0] != "EagleLlamaForCausalLM":
        raise EngineError(f"Eagle{config['architectures'][0]} is not registered")
    if config.get("layer_types"):
        raise EngineError("layer_types is read at the place of the target's layers")
    served = Served(eagle1_layers(config), facts={"rope": rope(config)})
    return _strictly(served, {name: name for name in tensors}, tensors)


def sglang_eagle1(folder: Path) -> Served:
    """fc always has a bias. Last matrix and embeddings are the target's."""
    config, tensors = read(folder)
    if config["architectures"] != ["LlamaForCausalLMEagle"]:
        raise EngineError(f"{config['architectures']} has no model class of its own here")
    served = Served(eagle1_layers(config), facts={"rope": rope(config), "window": None})
    served.parameters["fc.bias"] = (config["hidden_size"],)
    return _leniently(served, {name: name for name in tensors}, tensors)


def vllm_eagle3(folder: Path, *, style: str = "plain") -> Served:
    """style: "plain" reads the top level, "speculators" the nested config, as `vllm serve FOLDER`
    does. Later layers have hidden_norm too, which is not used.
    """
    config, tensors = read(folder)
    if style == "speculators":
        config = _nested(config)
    is_qwen3 = config["model_type"] == "qwen3"
    if style == "plain":
        known = ("Eagle3Qwen3ForCausalLM",) if is_qwen3 else EAGLE3_OF_LLAMA
        if config["architectures"][0] not in known:
            raise EngineError(f"{config['architectures'][0]} is not that of its model_type")
    nested = config.get("eagle_config") or {}
    switches = {name: bool(config.get(name, nested.get(name, False))) for name in SWITCHES}
    aux = config.get("eagle_aux_hidden_state_layer_ids")  # indices into the hidden states
    layers: int = config["num_hidden_layers"]
    draft = config.get("draft_vocab_size") or config["vocab_size"]
    served = Served(_eagle3(config, switches, len(aux or "123"), layers, draft))
    for layer in range(layers) if is_qwen3 else ():
        head_dim = (config["head_dim"],)
        norms: Shapes = {f"self_attn.{each}_norm.weight": head_dim for each in "qk"}
        served.parameters |= under(f"layers.{layer}", norms)
    kinds = config.get("layer_types") or []
    if is_qwen3 and not config["use_sliding_window"]:  # Qwen3Config then has no window
        config["sliding_window"] = None
    served.facts |= {
        "switches": switches,
        "aux": aux,
        "window": config["sliding_window"] if "sliding_attention" in kinds else None,
        "rope": rope(config),
        "ids": _ids(tensors) if draft < config["vocab_size"] else None,
    }
    if "embed_tokens.weight" in tensors:  # else the target's
        served.parameters["embed_tokens.weight"] = (config["vocab_size"], config["hidden_size"])
    names = {name: name.replace("midlayer.", "layers.0.") for name in tensors if name != "t2d"}
    if draft < config["vocab_size"]:
        names.pop("d2t", None)
    return _strictly(served, names, tensors)


def sglang_eagle3(folder: Path) -> Served:
    """Unknown names are passed over. Counts outputs of layers, in the nested list alone; adds to
    the state before the norm; looks at the window of its own command line, here the card's, which
    does not count the token itself.
    """
    config, tensors = read(folder)
    if config["architectures"] != ["LlamaForCausalLMEagle3"]:
        raise EngineError(f"{config['architectures']} has no model class of its own here")
    if "draft_vocab_size" not in config or config["tie_word_embeddings"]:
        raise EngineError("draft_vocab_size is read, and embeddings are not tied")
    nested = config.get("eagle_config") or {}
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    aux = [layer + 1 for layer in ids] if ids else None
    count = config.get("num_aux_hidden_states") or len(ids or "123")
    switches = {name: bool(config.get(name)) for name in SWITCHES}
    switches["norm_before_residual"] = False
    served = Served(_eagle3(config, switches, count, 1, config["draft_vocab_size"]))
    option = re.search(
        r"--speculative-draft-window-size (\d+)\n", (folder / "README.md").read_text()
    )
    window = int(option[1]) + 1 if option else None
    served.facts |= {"switches": switches, "aux": aux, "window": window, "rope": rope(config)}
    served.facts["ids"] = _ids(tensors) if "d2t" in tensors else None
    if count == 1:
        raise EngineError("fc is left out where a feature is as wide as an embedding")
    names = {name: name.replace("midlayer", "layers.0") for name in tensors}
    return _leniently(served, {a: b for a, b in names.items() if a not in ("d2t", "t2d")}, tensors)


def openvino_eagle3(folder: Path, layers: int, *, has_layers: bool = True) -> Served:
    """The exporter makes one layer and both maps, leaves what is missing as memory was and drops
    what it does not know. The engine puts the target's embeddings in and reads three different
    outputs of the target's `layers` layers. has_layers: whether the exported model was told which,
    as the card says.
    """
    config, tensors = read(folder)
    if config["architectures"][0] not in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"):
        raise EngineError(f"{config['architectures'][0]} is exported as a plain model")
    outputs = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    if not has_layers:
        if layers < 10:
            raise EngineError("num_decoder_layers must be at least 10")
        outputs = [2, layers // 2, layers - 3]
    if len(outputs) != 3 or len(set(outputs) & set(range(layers))) != 3:
        raise EngineError("the number of hidden states is not the requested one")
    words, draft = config["vocab_size"], config["draft_vocab_size"]
    served = Served(_eagle3(config, dict.fromkeys(SWITCHES, False), 3, 1, draft))
    served.parameters |= {"d2t": (draft,), "t2d": (words,)}
    served.parameters["embed_tokens.weight"] = (words, config["hidden_size"])
    served.facts |= {"aux": tuple(output + 1 for output in outputs), "rope": rope(config)}
    served.facts["ids"] = _ids(tensors)
    return _leniently(served, {a: a.replace("midlayer", "layers.0") for a in tensors}, tensors)


def lmdeploy_eagle3(folder: Path, layers: int) -> Served:
    """One layer under the authors' name and three features of a Llama target, whatever the config
    says; no other norm, no window. Places of the draft vocabulary without d2t are token 0.
    """
    config, tensors = read(folder)
    if "Eagle3" + config["architectures"][0] != "Eagle3LlamaForCausalLM":
        raise EngineError(f"Eagle3{config['architectures'][0]} has no model class")
    if config["num_hidden_layers"] != 1 or config["tie_word_embeddings"]:
        raise EngineError("one layer, and an lm_head that is loaded")
    draft = config["draft_vocab_size"]
    shapes = _eagle3(config, dict.fromkeys(SWITCHES, False), 3, 1, draft)
    served = Served({name.replace("layers.0", "midlayer"): each for name, each in shapes.items()})
    ids = _ids(tensors) if "d2t" in tensors else [0] * draft
    aux = sorted({2, layers // 2, layers - 3})
    served.facts |= {"aux": tuple(aux), "rope": rope(config), "ids": ids}
    names = [name for name in tensors if name not in ("d2t", "t2d")]
    return _strictly(served, {name: name for name in names}, tensors)


def mlx_eagle3(folder: Path) -> Served:
    """A speculators folder. Three features; RoPE without scaling; neither fc_norm nor norm_output
    nor a window. Gathers the outputs of the target's layers on its way through them. With a draft
    vocabulary, some targets compare drafts with the best of its tokens, which is not lossless.
    """
    config, tensors = read(folder)
    if config.get("model_type", config["speculators_model_type"]) != "eagle3":
        raise EngineError("the model_type is not that of a drafter")
    text, draft = config["transformer_layer_config"], config["draft_vocab_size"]
    switches = {name: bool(config[name]) for name in SWITCHES[:2]}
    shapes = {**dict.fromkeys(SWITCHES, False), **switches}
    served = Served(_eagle3(text, shapes, 3, text["num_hidden_layers"], draft))
    served.parameters["embed_tokens.weight"] = (text["vocab_size"], text["hidden_size"])
    if draft != text["vocab_size"]:
        raise EngineError("drafts would be compared with the draft vocabulary alone")
    outputs = {max(layer - 1, 0) for layer in config["eagle_aux_hidden_state_layer_ids"]}
    served.facts |= {
        "switches": shapes,
        "aux": tuple(output + 1 for output in sorted(outputs)),
        "rope": (text["rope_theta"], None),
    }
    names = [name for name in tensors if name != "t2d"]
    if not switches["norm_before_fc"] and "input_norm.weight" in names:
        names.remove("input_norm.weight")
    return _strictly(served, {name: name for name in names}, tensors)


def _eagle3(config: Config, switches: Config, count: int, layers: int, draft: int) -> Shapes:
    width = config["hidden_size"]
    wide = config.get("target_hidden_size") or width
    shapes: Shapes = {
        "fc.weight": (width, count * wide),
        "norm.weight": (width,),
        "lm_head.weight": (draft, width),
        "layers.0.hidden_norm.weight": (width,),
    }
    for layer in range(layers):
        shapes |= under(f"layers.{layer}", llama_layer(config, width if layer else 2 * width))
        shapes[f"layers.{layer}.input_layernorm.weight"] = (width,)
    if switches["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(count)}
    if switches["norm_before_fc"]:
        shapes["input_norm.weight"] = (count * wide,)
    return shapes


def _nested(config: Config) -> Config:
    """What vLLM keeps of a speculators config, with its own word for what is absent."""
    try:
        _ = config["speculators_config"]["verifier"]["name_or_path"]
        tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        layer = dict(config["transformer_layer_config"])
    except (KeyError, TypeError, IndexError) as error:
        raise EngineError(f"invalid speculators config: {error}") from error
    if config["speculators_model_type"] != "eagle3" or layer["model_type"] not in (
        "llama",
        "qwen3",
    ):
        raise EngineError("not supported")
    layer["norm_before_residual"] = config.get("norm_before_residual", True)
    for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *SWITCHES[1:]):
        layer[key] = config.get(key)
    if config.get("target_hidden_size") is not None:
        layer["target_hidden_size"] = config["target_hidden_size"]
    return {**layer, "num_lookahead_tokens": tokens}


def rope(config: Config) -> tuple[float, Any]:
    return config.get("rope_theta") or 10000.0, config.get("rope_scaling")


def _ids(tensors: dict[str, Tensor]) -> list[int]:
    """The target's ids: offsets are added to places."""
    if "d2t" not in tensors:
        return list(range(len(tensors["lm_head.weight"])))
    return (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()


def _strictly(served: Served, names: dict[str, str], tensors: dict[str, Tensor]) -> Served:
    for theirs, name in names.items():
        if name in served.parameters:
            served.put(name, tensors[theirs])
        elif name.endswith(".bias"):
            served.dropped.add(theirs)
        else:
            raise EngineError(f"no parameter is named {name}")
    return served


def _leniently(served: Served, names: dict[str, str], tensors: dict[str, Tensor]) -> Served:
    for theirs, name in names.items():
        if name in served.parameters:
            served.put(name, tensors[theirs])
        else:
            served.dropped.add(theirs)
    return served
