"""The names of drafters, as --head options give them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftheads.arguments import text_files
from draftheads.heads.formats.hub import HeadFolder, open_head
from draftheads.heads.mtp.checkpoint import native_head
from draftheads.heads.target.model import Target
from draftheads.heads.tensors import dtype_name
from draftheads.infer.drafters.draft_model import DraftModel
from draftheads.infer.drafters.merged import Merged
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.drafters.retrieve import read_files
from draftheads.infer.sources import DrafterSource


@dataclass(frozen=True)
class NamedDrafts:
    """The drafts that a --head option names. Only the config.json of its heads has been read so
    far.
    """

    name: str
    load: Callable[[Target], DrafterSource]
    folders: Sequence[HeadFolder] = ()

    @property
    def target(self) -> tuple[str, str | None]:
        """Name and revision of the target that its heads record. Raises ValueError if none does."""
        if not self.folders:
            raise ValueError(
                f"--head {self.name} does not say which target it is for; pass --target"
            )
        return self.folders[0].target


def open_drafts(sources: Sequence[str]) -> dict[str, NamedDrafts]:
    """Find the drafts that each --head option names, under the shortest names that differ. Raises
    the errors of `open_head`, and ValueError for mtp: without a number.
    """
    drafts = list(map(named_drafts, sources))
    names = [each.name for each in drafts]
    if len(set(names)) < len(names):
        names = list(sources)
    return dict(zip(names, drafts, strict=True))


def named_drafts(source: str | Path) -> NamedDrafts:
    """Find the drafts that one --head option names. + joins parts, unless it belongs to the name of
    a folder. Raises as `open_drafts`.
    """
    if isinstance(source, Path):  # a path never names another drafter
        source = os.path.abspath(os.path.expanduser(source))
    if os.path.isdir(os.path.expanduser(source)) or "+" not in source:
        return _part(source)
    parts = [_part(text) for text in source.split("+")]
    return NamedDrafts(
        "+".join(part.name for part in parts),
        lambda target: Merged([part.load(target) for part in parts]),
        [folder for part in parts for folder in part.folders],
    )


def _part(text: str) -> NamedDrafts:
    kind, colon, value = text.partition(":")
    if text == "ngram":
        return NamedDrafts(text, lambda _: NGram())
    if kind == "retrieve":
        path = text_files(text)
        name = f"retrieve:{path.name}"
        return NamedDrafts(name, lambda target: NGram(memory=read_files(path, target)))
    if kind == "mtp":
        if colon and not (value.isdecimal() and int(value)):
            raise ValueError(
                f"head {text}: expected a number of tokens, as in mtp:32768, got {value!r}"
            )
        tokens = int(value) if colon else None
        return NamedDrafts(text, lambda target: native_head(target, tokens).pack(target))
    if kind == "model":
        return NamedDrafts(f"model:{Path(value).name}", lambda target: _draft_model(value, target))
    folder = open_head(text)
    return NamedDrafts(Path(text).name, lambda target: folder.load(target).pack(target), [folder])


def _draft_model(path: str, target: Target) -> DrafterSource:
    dtype = dtype_name(target.dtype)
    model = Target.load(path, dtype=dtype, device=str(target.device))
    drafts = DraftModel(model.pack(target.bits))
    drafts.drafter(target)  # raises ValueError for a target that it cannot draft for
    return drafts
