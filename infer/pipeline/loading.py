"""Loads the target and the drafts that a command or `load` names. Heavy imports are delayed, so
that `--help` is fast.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from draftheads.infer.threads import choose_threads, set_threads

if TYPE_CHECKING:
    from pathlib import Path

    from draftheads.heads.formats.hub import HeadFolder
    from draftheads.heads.target.load import Engine
    from draftheads.heads.target.model import Target
    from draftheads.heads.target.placement import Bits
    from draftheads.infer.sources import DrafterSource

logger = logging.getLogger("draftheads")


@dataclass(frozen=True)
class Place:
    """Where and how a target is loaded. dtype, device: as of `Target.load`. threads: of the CPU;
    None: the fastest number. bits: quantise it, on a CPU to int8. engine: as of `Target.pack`.
    lora: as of `Target.load`.
    report: called with a choice that was made, to be shown.
    """

    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None
    bits: Bits | None = None
    engine: Engine | None = None
    lora: str | Path | None = None
    report: Callable[[object], None] = logger.info

    def __post_init__(self) -> None:
        if self.threads is not None and not (type(self.threads) is int and self.threads > 0):
            raise ValueError(f"threads: expected 1 or more, got {self.threads!r}; or leave it out")
        if self.bits not in (None, 4, 8):
            raise ValueError(f"bits: expected 4 or 8, got {self.bits!r}; or leave it out")
        if self.engine not in (None, "onnx", "torch"):
            raise ValueError(f"engine: expected onnx or torch, got {self.engine!r}")
        if self.engine and self.bits != 8:
            raise ValueError(
                f"engine={self.engine}: expected bits=8, got {self.bits}; add it, or leave the "
                "engine out"
            )

    def recorded(self, head: HeadFolder) -> Self:
        """The same, with the target's LoRA that the head records, unless another one is given."""
        return replace(self, lora=self.lora or head.facts.target.lora)


def load_target(
    name: str,
    place: Place,
    revision: str | None = None,
    heads: Sequence[HeadFolder] = (),
    template_args: Mapping[str, Any] | None = None,
) -> Target:
    """Load the target, with the adapter that `heads` were trained with, if any, and the chat
    template variables of their data, or `template_args`. Raises ValueError for a device that this
    machine does not have.
    """
    import torch

    from draftheads.heads.formats.hub import shared_adapter, shared_template_args
    from draftheads.heads.target.model import Target
    from draftheads.heads.target.placement import default_device

    if place.device is not None:
        try:
            torch.empty(0, device=place.device)
        except (AssertionError, RuntimeError) as error:  # several lines that name no option
            usable = default_device()
            hint = "; torch finds no usable GPU" if usable == "cpu" else ""
            raise ValueError(
                f"device: expected one of this machine, got {place.device!r}; try {usable}{hint}"
            ) from error
    adapter = shared_adapter(heads)
    if template_args is None:
        template_args = shared_template_args(heads)
    target = Target.load(
        name,
        dtype=place.dtype,
        device=place.device,
        revision=revision,
        bits=place.bits,
        lora=place.lora,
    )
    target.template_args = dict(template_args)
    return target.attach(adapter) if adapter else target


def load_fast_target(
    name: str,
    place: Place,
    revision: str | None,
    heads: Sequence[HeadFolder],
    template_args: Mapping[str, Any] | None,
) -> Target:
    """`load_target`, tuned for speed: picks the number of threads and, on a CPU, packs the weights,
    quantises them to int8 if `bits` is 8, and takes the faster dtype for "auto" by a measurement.
    Do not use it to train or to write data, because results would depend on timing.
    """
    from draftheads.heads.target.placement import default_device
    from draftheads.heads.terminal import said_if_long

    set_threads(place.threads)
    device = place.device or default_device()
    if device != "cpu":
        if place.engine:
            raise ValueError(f"engine={place.engine}: expected a CPU, got {device}; leave it out")
        return load_target(name, place, revision, heads, template_args)
    bits = place.bits
    if bits == 4:  # saves memory, but no time
        raise ValueError(
            "bits=4: expected a GPU, got a CPU, where products with 4-bit weights take longer "
            "than with int8 as soon as drafts are verified; use bits=8"
        )
    if place.dtype == "auto":
        next_step = f"measuring which dtype is faster here; then {name} is loaded"
        with said_if_long(next_step, place.report):
            place = replace(place, dtype=faster_dtype(name, revision, place))
    target = load_target(
        name, replace(place, bits=None, engine=None), revision, heads, template_args
    )
    target.pack(bits, place.engine)
    choose_threads(place.threads, target)
    target.settle_threads()
    return target


def faster_dtype(name: str, revision: str | None, place: Place) -> str:
    """The dtype in which to load a target on this CPU: the faster of float32 and a half precision,
    unless that would round the checkpoint's weights. The choice is reported. Weights that become
    int8 are loaded in their own dtype.
    """
    import torch

    from draftheads.heads.target.load import NATIVE_WIDTH
    from draftheads.heads.target.placement import is_gguf, quantised_by, read_config
    from draftheads.heads.tensors import dtype_name
    from draftheads.infer.measure.precision import measured_pace, own_dtype

    config = read_config(name, revision)
    is_exact = not is_gguf(name)
    is_small = config.get_text_config(decoder=True).hidden_size < NATIVE_WIDTH
    own = own_dtype(config)
    if quantised_by(config) or (is_exact and is_small and own == torch.float32):
        return "auto"
    if place.bits:
        return dtype_name(own)
    pace = measured_pace(config, is_exact=is_exact)
    place.report(pace)
    return pace.dtype


def load_parts(
    head: str | Path | None,
    target: str | None,
    place: Place,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[Target, DrafterSource | None]:
    """Load a target, and the drafts that `head` names (see `open_drafts`), if any. target: default:
    the one that the head records, with its LoRA. Raises ValueError for drafts that record no
    target.
    """
    from draftheads.infer.drafters.named import named_drafts

    if not head:
        assert target, "callers name a head or a target"
        return load_fast_target(target, place, None, (), template_args), None
    drafts = named_drafts(head)
    revision = None
    if not target:
        target, revision = drafts.target
        place = place.recorded(drafts.folders[0])
    model = load_fast_target(target, place, revision, drafts.folders, template_args)
    return model, drafts.load(model)
