"""LoRA on a target, by PEFT, for heads that are trained jointly with it (Medusa-2). Saved folders
are in PEFT's own format, so other tools load them too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftheads.extras import extras
from draftheads.heads.files import read_json
from draftheads.heads.target.pretrained import decoder_layers, hash_tensor, name_in, same_weights
from draftheads.heads.tensors import check_finite, opened

if TYPE_CHECKING:  # slow to import, and rarely needed
    from peft import PeftModel

FOLDER, WEIGHTS, CONFIG = "adapter", "adapter_model.safetensors", "adapter_config.json"
FILES = (f"{FOLDER}/{CONFIG}", f"{FOLDER}/{WEIGHTS}")
"""The adapter's files in a head folder."""

FREE = {
    "task_type",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "peft_version",
}
"""PEFT's settings that may have any value."""


class Settings(BaseModel):
    """PEFT's settings that `Adapter.create` chooses."""

    peft_type: Literal["LORA"]
    r: int = Field(gt=0)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    target_modules: list[str] = Field(min_length=1)
    layers_to_transform: list[int]
    layers_pattern: str


class Adapter:
    """Low-rank updates of a target's matrices: W + (alpha / rank) B A. A plain object, as the
    target is.

    base: fingerprint of the target without it. drift: how far it moves the target's output, as last
    measured.
    """

    drift: dict[str, Any] | None = None

    def __init__(self, wrapped: PeftModel, base: str) -> None:
        self.wrapped = wrapped
        self.base = base
        self.config: dict[str, Any] = wrapped.peft_config["default"].to_dict()
        self._merged: dict[str, Tensor] | None = None

    @classmethod
    def create(
        cls,
        model: PreTrainedModel,
        base: str,
        *,
        rank: int,
        alpha: float,
        layers: int | None = None,
        modules: Sequence[str] | None = None,
    ) -> Adapter:
        """A new adapter, which changes nothing until it is trained; its parameters are float32.

        layers: how many, counted from the last; None: all. modules: the last parts of the names of
        matrices in them; None: all. Raises ValueError for layers or modules that do not exist.
        """
        with extras():
            from peft import LoraConfig, get_peft_model

        stack = decoder_layers(model)
        first = 0 if layers is None else len(stack) - layers
        if first < 0:
            raise ValueError(f"adapter.layers: expected {len(stack)} or fewer, got {layers}")
        linear = [name for name, each in stack.named_modules() if isinstance(each, nn.Linear)]
        names = sorted({name.rpartition(".")[2] for name in linear})
        missing = sorted(set(modules or ()) - set(names))
        if missing or not names:
            raise ValueError(
                f"adapter.modules: expected some of {', '.join(names) or 'none'}, got "
                f"{', '.join(missing) or 'none'}; list matrices of the target's layers"
            )
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=names if modules is None else sorted(modules),
            layers_to_transform=list(range(first, len(stack))),
            layers_pattern=name_in(model, stack).rpartition(".")[2],
            task_type="CAUSAL_LM",
        )
        with _quiet():
            return cls(get_peft_model(model, config).eval(), base)

    @classmethod
    def load(cls, model: PreTrainedModel, base: str, folder: Path) -> Adapter:
        """A saved adapter. Raises ValueError if it is damaged or was trained on weights other than
        `base`, FileNotFoundError for missing files.
        """
        with extras():
            from peft import PeftModel

        check_files(folder, str(folder))
        names = check_weights(folder / WEIGHTS, read_settings(folder)["r"])
        with opened(folder / WEIGHTS) as file:
            trained_on = (file.metadata() or {}).get("target")
        if not same_weights(trained_on, base):
            raise ValueError(
                f"adapter {folder}: expected a target with fingerprint {trained_on}, got {base}; "
                "pass the target that it was trained on, before any merge"
            )
        try:
            with _quiet():
                adapter = cls(PeftModel.from_pretrained(model, folder).eval(), base)
            expected = set(adapter.state())
        except Exception as error:  # a damaged file may raise anything, without its name
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"adapter {folder}: expected a LoRA adapter of {type(model).__name__}, PEFT cannot "
                f"load this one ({type(error).__name__}: {reason}); get the folder again"
            ) from error
        if names != expected:  # PEFT does not compare them
            raise ValueError(
                f"adapter {folder / WEIGHTS}: missing tensors {sorted(expected - names)[:2]}, "
                f"unexpected {sorted(names - expected)[:2]}; get the folder again"
            )
        return adapter

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters, under PEFT's names."""
        named = self.wrapped.named_parameters()
        return {name: each for name, each in named if each.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """All tensors, as PEFT stores them."""
        from peft import get_peft_model_state_dict

        if self._merged is not None:
            return self._merged
        state: dict[str, Tensor] = get_peft_model_state_dict(
            self.wrapped,
            save_embedding_layers=False,  # "auto" queries the Hub
        )
        return {name: tensor.detach().contiguous() for name, tensor in state.items()}

    def on_host(self) -> Adapter:
        """A copy of its weights in host memory, to save while it is trained."""
        copied = copy.copy(self)
        copied._merged = {name: each.to("cpu", copy=True) for name, each in self.state().items()}
        return copied

    def restore(self, folder: Path) -> None:
        """Load the weights of a saved adapter of the same shape."""
        from peft import set_peft_model_state_dict

        with opened(folder / WEIGHTS) as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        result = set_peft_model_state_dict(self.wrapped, state)
        assert not result.unexpected_keys, result.unexpected_keys

    def save(self, folder: Path, name: str) -> None:
        """Write PEFT's files into a new folder; name: of the target, for those who load them."""
        folder.mkdir()
        config = {**self.config, "base_model_name_or_path": name, "inference_mode": True}
        config["target_modules"] = sorted(config["target_modules"])
        save_file(self.state(), folder / WEIGHTS, {"format": "pt", "target": self.base})
        (folder / CONFIG).write_text(json.dumps(config, indent=2, default=str) + "\n")

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the target is the original one. Not for a merged adapter."""
        assert self._merged is None, "a merged adapter cannot be switched off"
        self.wrapped.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            self.wrapped.base_model.enable_adapter_layers()

    def merge(self) -> None:
        """Add it to the matrices, irreversibly: the model is then as fast as one without it."""
        self._merged = self.state()
        self.wrapped.merge_and_unload()

    def fingerprint(self) -> str:
        """16 hex digits that identify its weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state().items()):
            digest.update(name.encode())
            hash_tensor(digest, tensor)
        return digest.hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        """Its entry in a head's config.json."""
        return {
            "fingerprint": self.fingerprint(),
            "rank": self.config["r"],
            "alpha": self.config["lora_alpha"],
            "modules": sorted(self.config["target_modules"]),
            "layers": len(self.config["layers_to_transform"]),
            "parameters": sum(tensor.numel() for tensor in self.state().values()),
            "drift": self.drift,
        }


def check_files(folder: Path, name: str) -> None:
    """Raise FileNotFoundError unless a folder has PEFT's files; name: of the adapter."""
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise FileNotFoundError(
                f"adapter {name}: expected {CONFIG} and {WEIGHTS}, as PEFT saves a LoRA, found "
                f"no {file}; get the folder again"
            )


def read_settings(folder: Path) -> dict[str, Any]:
    """PEFT's settings of a saved adapter, without keys that PEFT does not know.

    Raises ValueError unless they are those of a LoRA as `Adapter.create` makes it: PEFT's other
    options replace modules of the target, or need more memory than the saved tensors.
    """
    with extras():
        from peft import LoraConfig

    path = folder / CONFIG
    values = read_json(path)
    try:
        chosen = Settings.model_validate(values, strict=True).model_dump()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        raise ValueError(
            f"{path}: expected the settings of a LoRA adapter, got {values.get(key)!r:.60} as "
            f"{key} ({first['msg']}); get the folder again"
        ) from error
    defaults = json.loads(json.dumps(LoraConfig().to_dict(), default=str))
    others = [
        key
        for key, value in values.items()
        if key not in FREE | chosen.keys() and value not in (defaults.get(key), None, False, {}, [])
    ]
    if others:
        raise ValueError(
            f"{path}: expected a plain LoRA adapter, got {others[0]}: {values[others[0]]!r:.60}; "
            "merge it into the target with PEFT instead"
        )
    return {key: values[key] for key in defaults if key in values}


def check_weights(file: Path, rank: int) -> set[str]:
    """The names of an adapter's tensors. Raises ValueError for tensors of another rank or with
    numbers that are not finite, before PEFT allocates what the settings ask for.
    """
    with opened(file) as stored:
        names = set(stored.keys())
        for name in sorted(names):
            shape = stored.get_slice(name).get_shape()
            dimension = 0 if ".lora_A." in name else 1
            if len(shape) != 2 or shape[dimension] != rank:
                raise ValueError(
                    f"adapter {file}: expected matrices of rank {rank}, as {CONFIG} says, got "
                    f"{name} of shape {shape}; get the folder again"
                )
        check_finite(file, ((name, stored.get_tensor(name)) for name in sorted(names)))
    if not names:
        raise ValueError(f"adapter {file}: expected matrices, got none; get the folder again")
    return names


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT reads a deprecated attribute of transformers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield
