"""What a head folder holds, and how its files are read: safetensors, or pickles whose code is never
run.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftheads.heads.formats.config import CONFIG, read_json

WEIGHT_FILES = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "pytorch_model.bin",
    "hydra_lm_head.pt",
)
"""Where a folder's tensors may be; the first is our own."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""What lists the parts where there are several."""
POINTER = b"version https://git-lfs.github.com/spec/"
INSIDE = "medusa_head."
"""Names of heads that stand in one file with their whole target."""


@dataclass(frozen=True)
class Stored:
    """What a head folder holds. file: where the tensors were read from."""

    file: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def facts(self) -> dict[str, Any]:
        """What we said of the head, where it is one of ours or was one once."""
        facts: dict[str, Any] = self.config.get("draftheads") or {}
        return facts

    def having(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> Stored:
        """The same folder in other words."""
        return replace(self, config=config, tensors=tensors)

    def refuse(self, problem: str) -> ValueError:
        """An error of one line that names the folder."""
        return ValueError(f"{self.file.parent}: {' '.join(problem.splitlines())}")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Inside, every ValueError names the folder."""
        try:
            yield
        except ValueError as error:
            if str(self.file.parent) in str(error):
                raise
            raise self.refuse(str(error)) from error

    def check_names(self, expected: set[str]) -> None:
        """Raise ValueError, naming them, where tensors are missing or too many."""
        got = set(self.tensors)
        if expected != got:
            raise ValueError(
                f"{self.file}: missing tensors {sorted(expected - got)[:4]}, "
                f"unexpected {sorted(got - expected)[:4]}; the file does not match its own head"
            )

    def check_shapes(self, expected: dict[str, Tensor]) -> None:
        """Raise ValueError for a tensor of another shape, or one that is wrongly of integers."""
        for name, tensor in expected.items():
            stored = self.tensors[name]
            wanted, got = tuple(tensor.shape), tuple(stored.shape)
            if wanted != got:
                raise ValueError(
                    f"{self.file}: expected {name} of shape {wanted}, got {got}; "
                    "was the head made for another target?"
                )
            if tensor.is_floating_point() != stored.is_floating_point():
                raise ValueError(
                    f"{self.file}: expected {name} in {tensor.dtype}, got {stored.dtype}; the file "
                    "does not match its own head"
                )


@dataclass(frozen=True)
class Written:
    """A folder in others' words: config.json, and the tensors of each file. with_tokenizer: whether
    its readers look there for the target's tokenizer too.
    """

    config: dict[str, Any]
    files: dict[str, dict[str, Tensor]]
    with_tokenizer: bool = False

    def save(self, folder: Path) -> None:
        """Write the files into a folder that is there."""
        for name, tensors in self.files.items():
            if name.endswith(".safetensors"):
                save_file(tensors, folder / name, metadata={"format": "pt"})
            else:
                torch.save(tensors, folder / name)
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")


def read_files(folder: Path, config: dict[str, Any]) -> Stored:
    """Config and tensors as they stand in the folder; heads that stand in one file with a whole
    model are read alone.

    Raises FileNotFoundError where there are no weights, ValueError for what cannot be read.
    """
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return Stored(folder / name, config, _tensors(folder / name))
    for name in INDEXES:
        if (folder / name).is_file():
            tensors: dict[str, Tensor] = {}
            for part in parts_of(folder / name):
                tensors |= _tensors(folder / part)
            return Stored(folder / name, config, tensors)
    raise FileNotFoundError(
        f"{folder}: expected {', '.join(WEIGHT_FILES[:-1])} or {WEIGHT_FILES[-1]} beside its "
        "config, found none of them"
    )


def parts_of(index: Path) -> list[str]:
    """The files, of those that an index lists, that hold a head. Raises ValueError for an index
    that lists none, or files that are not beside it.
    """
    places = read_json(index).get("weight_map")
    if not places or not isinstance(places, dict):
        raise ValueError(f"{index}: expected a weight_map of tensors to files, got {places!r:.60}")
    inside = {file for name, file in places.items() if name.startswith(INSIDE)}
    files = inside or set(places.values())
    for file in files:
        if not isinstance(file, str) or not re.fullmatch(r"\w[\w.-]*", file):
            raise ValueError(
                f"{index}: expected names of files beside it, got {file!r:.60}; get the head again"
            )
    return sorted(files)


def count_of(names: Iterable[str], pattern: str) -> int:
    """How many different numbers stand in names that begin with `pattern`, which has one group.
    Never the largest number, which would make one name a thousand layers.
    """
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def matrix(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A tensor whose two sizes tell those of the head. Raises ValueError where it is none."""
    tensor = tensors.get(name)
    if tensor is None or tensor.ndim != 2 or not tensor.numel():
        got = "none" if tensor is None else f"shape {tuple(tensor.shape)}"
        raise ValueError(f"expected a matrix {name}, got {got}; the file is not whole")
    return tensor


def integers(tensors: dict[str, Tensor], name: str) -> Tensor | None:
    """A list of integers or booleans, or None. Raises ValueError for any other tensor."""
    tensor = tensors.get(name)
    if tensor is None:
        return None
    if tensor.dtype not in (torch.int64, torch.int32, torch.uint8, torch.bool) or (
        tensor.ndim != 1 or not len(tensor)
    ):
        raise ValueError(
            f"expected {name} as a list of integers, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}; the file does not match its own head"
        )
    return tensor


def target_name(config: dict[str, Any]) -> str | None:
    """The target that a head's config.json names, in any of the words for it."""
    ours = (config.get("draftheads") or {}).get("target") or {}
    served = (config.get("speculators_config") or {}).get("verifier") or {}
    name = ours.get("name") or config.get("base_model_name_or_path") or served.get("name_or_path")
    return str(name) if name else None


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        tensors = _unpickled(file)
        inside = {name: each for name, each in tensors.items() if name.startswith(INSIDE)}
        return inside or tensors
    with opened(file) as stored:
        names = list(stored.keys())
        inside_names = [name for name in names if name.startswith(INSIDE)]
        return {name: stored.get_tensor(name) for name in inside_names or names}


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file. Raises ValueError, naming it, where it is none or not whole."""
    _check_fetched(file)
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise ValueError(
            f"{file}: expected whole safetensors, got {file.stat().st_size:,} bytes that are not "
            f"({str(error).splitlines()[0]}); download or copy the file again"
        ) from error


def _check_fetched(file: Path) -> None:
    with file.open("rb") as content:
        if content.read(len(POINTER)) == POINTER:
            raise ValueError(
                f"{file}: expected weights, got the pointer that git-lfs leaves in their place; "
                "fetch them with `git lfs pull`, or download the file again"
            )


def _unpickled(file: Path) -> dict[str, Tensor]:
    """A state dict that torch saved; no code in it is run."""
    _check_fetched(file)
    hint = "it must come from torch.save(head.state_dict(), ...)"
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its many lines advise to run the code in the file
        raise ValueError(
            f"{file}: expected a plain state dict, got a file that holds code, or no pickle; {hint}"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything, and none names the file
        reason = str(error).partition(".")[0].partition("\n")[0] or "end of file"
        raise ValueError(
            f"{file}: expected a whole state dict, torch cannot read it ({reason}); if it was cut "
            "short, download it again"
        ) from error
    if not isinstance(tensors, dict) or not all(map(_is_plain, tensors.values())):
        got = sorted(map(str, tensors))[:4] if isinstance(tensors, dict) else type(tensors).__name__
        raise ValueError(f"{file}: expected a plain state dict of tensors, got {got}; {hint}")
    return {str(name): tensor for name, tensor in tensors.items()}


def _is_plain(value: Any) -> bool:
    """Whether this is a tensor with all its numbers in the file: one may say that it has more."""
    if not torch.is_tensor(value) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


# Published draft models that this project cannot run, by what their config says.


Config = dict[str, Any]


def _scaling(config: Config) -> Config:
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _architecture(config: Config) -> str:
    return str((config.get("architectures") or [""])[0])


LLAMA_LIKE = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
)
"""Architectures of EAGLE heads whose layers are Llama's."""

DESIGNS: list[tuple[str, Callable[[Config], bool]]] = [
    (
        "a block-diffusion drafter (DFlash, DSpark, Domino)",
        lambda config: (
            "dflash_config" in config
            or _architecture(config).startswith(("DFlash", "DSpark", "Domino"))
        ),
    ),
    (
        "a parallel drafter (P-EAGLE)",
        lambda config: (
            _architecture(config).startswith("PEagle") or bool(config.get("parallel_drafting"))
        ),
    ),
    (
        "one with multi-head latent attention (MLA)",
        lambda config: "kv_lora_rank" in config,
    ),
    (
        "one with positions in three dimensions (mrope)",
        lambda config: "mrope_section" in _scaling(config),
    ),
    (
        "one with norms of queries and keys",
        lambda config: (
            bool(config.get("use_qk_norm")) or _architecture(config) == "Eagle3Qwen3ForCausalLM"
        ),
    ),
    (
        "one with biases in its attention",
        lambda config: bool(config.get("qkv_bias") or config.get("attention_bias")),
    ),
    (
        "one with another activation than SiLU",
        lambda config: config.get("hidden_act", "silu") not in ("silu", "swish"),
    ),
]
"""What a draft model may be that ours are not."""


def check_design(stored: Stored) -> None:
    """Raise ValueError, with what it has that ours have not, for a head that cannot be read."""
    for what, has in DESIGNS:
        if has(stored.config):
            raise stored.refuse(
                f"expected a Medusa, Hydra or EAGLE head, got {what}; this project does not run "
                "such heads, train one with it instead"
            )
    architecture = _architecture(stored.config)
    is_eagle = any("self_attn.q_proj" in name for name in stored.tensors)
    if is_eagle and architecture and architecture not in LLAMA_LIKE:
        raise stored.refuse(
            f"expected a head of one of the architectures {', '.join(LLAMA_LIKE)}, got "
            f"{architecture}; such heads are not read, train one here instead"
        )
