"""The promise: a head folder that is damaged, foreign or made to harm is refused in one line that
names it, before anything is allocated, run or fetched from elsewhere.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from layouts import (
    DEEPSPEC,
    HEADLESS,
    HYDRA_CONFIG,
    LLAMA,
    PLAIN,
    SPECULATORS,
    V01,
    VLLM,
    ZLAB,
    eagle3,
    folder_of,
    head_of,
    numbered,
    published_hydra,
    renamed,
    tensors_of,
)
from safetensors.torch import load_file, save_file
from tiny_chat import llama
from tiny_heads import make_head
from tiny_targets import tiny_target
from tiny_training import write_target
from torch import Tensor
from trained_heads import FEW, saved, trained

from draftheads.heads import medusa
from draftheads.heads.formats.hub import load_head, load_pair, open_head, record_tuned, save_head
from draftheads.heads.target.model import Target
from draftheads.infer.costs import NONE
from draftheads.scripts.convert import converted
from draftheads.scripts.measuring import check_writable_head
from draftheads.scripts.publish import prepare

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ROW = {"nodes": 4, "tokens_per_step": 2.0, "speedup": 1.5, "speedup_ci95": [1, 2], "lossless": True}
RECORDED = {"data": {"prompts": {"source": "them/x"}}, "recipe": {"data": {"path": "data"}}}
SCALING = {"rope_scaling": {"type": "linear", "factor": 2.0}}
FOREIGN: dict[str, Callable[[Path], Path]] = {
    "v0.1": lambda path: folder_of(
        path, "medusa_lm_head.pt", numbered(trained("medusa", depth=2), 1), V01
    ),
    "vllm": lambda path: folder_of(
        path, "model.safetensors",
        dict(trained("medusa", depth=2).state_dict()),
        VLLM,
    ),
    "hydra": lambda path: folder_of(path, "hydra_lm_head.pt", published_hydra("mlp"), HYDRA_CONFIG),
    "eagle": lambda path: folder_of(
        path, "pytorch_model.bin", dict(trained("eagle").state_dict()), {**LLAMA, **SCALING}
    ),
    "eagle3": lambda path: folder_of(
        path, "model.safetensors", dict(eagle3(vocabulary=FEW).state_dict()),
        {**LLAMA, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
    ),
    "speculators": lambda path: folder_of(
        path, "model.safetensors",
        renamed(eagle3(norm_before_residual=True, vocabulary=FEW), "midlayer.", "layers.0."),
        SPECULATORS,
    ),
    "dspark": lambda path: folder_of(
        path, "model.safetensors", tensors_of(head_of({"confidence": True})), DEEPSPEC
    ),
    "dflash": lambda path: folder_of(path, "model.safetensors", tensors_of(head_of(PLAIN)), ZLAB),
}  # fmt: skip
OURS = ["medusa-own", "sequential-prefix", "eagle3-reduced", "eagle-scaled", "block"]


def ours(name: str, path: Path) -> Path:
    save_head(trained(name), path, target=tiny_target(), training=RECORDED)
    record_tuned(path, load_head(path, target=tiny_target()).tree, ROW)
    return path


@pytest.fixture(params=[*OURS, *FOREIGN])
def folder(request, tmp_path) -> Path:
    make = FOREIGN.get(request.param, lambda path: ours(request.param, path))
    return make(tmp_path / "head")


def outcome(use: Callable[[], Any], *names: Path) -> str:
    """The line with which it is refused, or ""; any other exception is one of this test's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use()
    except (ValueError, OSError) as error:
        line = str(error)
        assert "\n" not in line and len(line) < 900, line
        assert any(str(name) in line for name in names), line
        return line
    return ""


DROPPED = object()
VALUES = (DROPPED, None, True, -1, 0, 10**30, 3 * 10**9, 1.5, "x\ny", "", [], {}, [[1]], [None],
          {"a": {"b": [1]}}, float("nan"))  # fmt: skip


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of a JSON value, and the first items of its lists."""
    keys = value if isinstance(value, dict) else range(min(len(value), 2))
    for key in keys:
        yield (*before, key)
        if isinstance(value[key], dict | list):
            yield from places(value[key], (*before, key))


def mutated(config: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    if value is DROPPED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


@pytest.mark.slow
def test_a_config_with_any_value_anywhere_loads_or_is_refused(folder, tmp_path):
    """A quarter of the values at each place; those left out are tried at the next places."""
    config, turn, refused = json.loads((folder / "config.json").read_text()), count(), 0
    for place in places(config):
        for value in VALUES[next(turn) % 4 :: 4]:
            (folder / "config.json").write_text(json.dumps(mutated(config, place, value)))
            line = outcome(lambda: load_head(folder, target=tiny_target()), folder)
            refused += bool(line)
            outcome(lambda: open_head(folder).target, folder)
            if not line and next(turn) % 5 == 0:
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
                outcome(
                    lambda: converted(folder, tmp_path / "out", "draftheads", tiny_target()), folder
                )
                outcome(lambda: prepare(folder, "me/heads"), folder)
    assert refused
    (folder / "config.json").write_text(json.dumps(config))
    assert not outcome(lambda: load_head(folder, target=tiny_target()))


NO_CONFIGS = {
    "empty": (b"", "got invalid JSON"),
    "list": (b"[]", "expected a JSON object, got '[]'"),
    "null": (b"null", "expected a JSON object"),
    "utf-16": ('{"kind": 1}'.encode("utf-16"), "got invalid JSON"),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "got invalid JSON"),
    "cut": (b'{"a":\n 1', "line 2 column"),
    "digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "got invalid JSON"),
    "several": (
        b'{"hidden_size": "a", "vocab_size": -1}',
        "hidden_size: expected a valid integer, got 'a'; vocab_size: expected",
    ),
}


@pytest.mark.parametrize("name", NO_CONFIGS)
def test_a_config_that_is_none_is_named(tmp_path, name):
    content, reason = NO_CONFIGS[name]
    folder = ours("medusa-own", tmp_path / "head")
    (folder / "config.json").write_bytes(content)
    for use in (
        load_head,
        lambda path: open_head(path).target,
        lambda path: prepare(path, "me/heads"),
    ):
        assert reason in outcome(lambda use=use: use(folder), folder)
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(VLLM).encode())
    assert "missing tensors" not in outcome(lambda: load_head(folder)), "a BOM changes nothing"


def weights_of(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt", ".bin"))


def write(file: Path, tensors: dict[str, Tensor]) -> None:
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    if file.suffix == ".safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file)


SPOILED: list[Callable[[Tensor], Tensor | None]] = [
    lambda _: None,
    lambda _: torch.tensor(1.0),
    lambda each: each.new_zeros(0),
    lambda each: each[None],
    lambda each: each.flatten()[: len(each) - 1],
    lambda each: torch.cat([each, each]),
    lambda each: torch.ones(each.shape, dtype=torch.int64),
    lambda each: torch.ones(each.shape, dtype=torch.complex64),
]
EXTRA = ["x", "blocks.20000.layers.0.weight", "blocks.x", "layers.20000.mlp.x", "d2t", "t2d",
         "lm_heads.99999999999.weight", "hydra_lm_head.7777777777.weight", "token_map", "fc.bias",
         "hydra_mlp.0.999999999.linear.weight", "99999999999.0.linear.weight", "lm_head.weight",
         "embed_tokens.weight", "down.0.weight", "markov_head.joint_proj.weight", "mask_embedding",
         "markov_head.markov_w1.weight", "confidence_head.proj.weight",
         "prefix.norm.weight"]  # fmt: skip


@pytest.mark.slow
def test_a_tensor_with_any_shape_loads_or_is_refused(folder):
    file = weights_of(folder)
    tensors = dict(load_file(file) if file.suffix == ".safetensors" else torch.load(file))
    for number, (name, tensor) in enumerate(tensors.items()):
        for spoil in SPOILED[number % 4 :: 4]:
            changed = {**tensors, name: spoil(tensor)}
            write(file, {key: each for key, each in changed.items() if each is not None})
            outcome(lambda: load_head(folder, target=tiny_target()), folder)
    for name in EXTRA:
        for tensor in (torch.ones(1), torch.ones(2, 2), torch.tensor(1.0)):
            write(file, {**tensors, name: tensor})
            outcome(lambda: load_head(folder, target=tiny_target()), folder)
            outcome(lambda: load_head(folder), folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "complete"),
        (POINTER, "got a git-lfs pointer"),
        (bytes(1000), "complete"),
        ("half", "complete"),
        ("short", "complete"),
    ],
)
def test_weights_that_are_not_there_are_named(folder, content, reason):
    file = weights_of(folder)
    whole = file.read_bytes()
    cut = {"half": whole[: len(whole) // 2], "short": whole[:-1]}
    file.write_bytes(cut[content] if isinstance(content, str) else content)
    line = outcome(lambda: load_head(folder, target=tiny_target()), file)
    assert reason in line


@pytest.mark.mend("weights without permission to read them were said to be missing")
def test_weights_that_may_not_be_read_are_not_called_missing(tmp_path):
    write_target(tmp_path / "target")
    head = ours("medusa-own", tmp_path / "head")
    open_any = Path.open

    def open_others(path: Path, *mode: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return open_any(path, *mode, **options)

    with mock.patch.object(Path, "open", open_others):
        for folder, load in ((head, load_head), (tmp_path / "target", Target.load)):
            line = outcome(partial(load, folder), folder / "model.safetensors")
            assert "Permission denied" in line


def test_a_name_with_a_great_number_makes_no_layers(tmp_path, monkeypatch):
    """11 KB that said blocks.20000 once took 25 seconds and 421 MB."""
    made = []
    original = medusa.ResidualBlock
    monkeypatch.setattr(medusa, "ResidualBlock", lambda *a: made.append(1) or original(*a))
    folder = saved("medusa-own", tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    for number in (20000, 10**9):
        name = f"blocks.{number}.layers.0.weight"
        save_file({**tensors, name: torch.ones(32, 32)}, folder / "model.safetensors")
        assert f"{name}: expected none" in outcome(lambda: load_head(folder), folder)
    assert len(made) < 20
    size = json.loads((folder / "config.json").read_text()) | {"vocab_size": 1 << 30}
    shared = saved("medusa-shared", tmp_path / "shared")
    (shared / "config.json").write_text(json.dumps(size))
    assert "target has 19" in outcome(lambda: load_head(shared, target=tiny_target()), shared)


def test_sizes_are_compared_before_anything_is_allocated(tmp_path, monkeypatch):
    folder = saved("eagle-plain", tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 1 << 19}))
    real = torch.empty  # what every matrix is made of

    def small(*sizes: Any, **options: Any) -> Tensor:
        tensor = real(*sizes, **options)
        assert tensor.is_meta or tensor.numel() < 1 << 19
        return tensor

    monkeypatch.setattr(torch, "empty", small)
    assert "expected numbers (524288, 32), got numbers (48, 32)" in outcome(
        lambda: load_head(folder), folder
    )


def test_a_pickle_that_says_it_is_larger_than_it_is(tmp_path):
    tensors = numbered(trained("medusa", depth=2), 1)
    folder = folder_of(tmp_path / "head", "medusa_lm_head.pt", tensors, V01)
    tensors["0.1.weight"] = torch.ones(1).expand(1 << 40, 32)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    assert "plain state dict" in outcome(lambda: load_head(folder), folder)


@pytest.mark.parametrize("file", ["../secret.bin", "/etc/passwd", "*", "a/b", "..", "", 3, None])
def test_an_index_names_files_beside_it_alone(hub, tmp_path, file):
    (tmp_path / "secret.bin").write_bytes(b"")
    folder = folder_of(tmp_path / "head", "part.safetensors", {"medusa_head.x": torch.ones(1)}, V01)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    assert "expected names of files next to it" in outcome(lambda: load_head(folder), index)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repos["them/whole"] = {"private": False, "files": files}
    with pytest.raises(ValueError, match="expected names of files next to it"):
        load_head("them/whole")
    for text in ('{"weight_map": []}', "{}", "[]", "x"):
        index.write_text(text)
        assert outcome(lambda: load_head(folder), index)


@pytest.mark.parametrize("layers", [[40], [-2], [0, 4]])
def test_layers_that_the_target_has_not_are_refused(tmp_path, layers):
    tensors = dict(trained("eagle3", feature_layers=[1] * len(layers)).state_dict())
    config = {**LLAMA, **HEADLESS, "eagle_aux_hidden_state_layer_ids": layers}
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, config)
    line = outcome(lambda: load_head(folder, target=tiny_target()), folder)
    if min(layers) < 0:
        assert "greater than or equal to -1" in line
    else:
        assert f"head reads states {layers} (its target)" in line


def test_the_newest_step_is_that_of_the_greatest_number(tmp_path):
    """Not the last name of a list, and no copy that somebody has kept beside it."""
    head = ours("medusa-own", tmp_path / "head")
    for name in ("step-999999", "step-1000000", "step-000004-backup", "step-9999999.part"):
        shutil.copytree(head, tmp_path / "run" / name)
    assert open_head(tmp_path / "run").path.name == "step-1000000"


def test_no_home_of_that_name_is_no_head():
    with pytest.raises(FileNotFoundError, match="head ~nobody-here/x: expected a head"):
        open_head("~nobody-here/x")


def test_a_card_that_cannot_be_written_is_refused_before_the_race(folder):
    line = outcome(lambda: check_writable_head(str(folder)), folder)
    if (folder / "README.md").is_file():
        assert not line
        config = json.loads((folder / "config.json").read_text())
        del config["draftheads"]["training"]
        (folder / "config.json").write_text(json.dumps(config))
        record_tuned(folder, NONE, ROW)
        assert "0 draft nodes" in (folder / "README.md").read_text()
    else:
        assert "layout" in line and f"draftheads convert {folder} DIR --to draftheads" in line


# adapters


@pytest.fixture(scope="module")
def joint(tmp_path_factory) -> Path:
    """A head folder with an adapter, and its target."""
    pytest.importorskip("peft")
    base = tmp_path_factory.mktemp("joint")
    llama().model.save_pretrained(base / "target")
    target = Target.load(base / "target")
    target.adapt(rank=2, alpha=4.0)
    return save_head(trained_on(target), base / "head", target=target)


def trained_on(target: Target) -> Any:
    return make_head(medusa.MedusaHead, target, depth=2)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def without_one(file: Path) -> None:
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)


def wider(file: Path) -> None:
    save_file({name: torch.cat([t, t], 1) for name, t in load_file(file).items()}, file)


ADAPTERS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "cut": ("adapter_model.safetensors", cut, "expected complete weights"),
    "pointer": ("adapter_model.safetensors", lambda f: f.write_bytes(POINTER), "git-lfs"),
    "empty": ("adapter_model.safetensors", lambda f: f.write_bytes(b""), "got 0 bytes"),
    "fewer": ("adapter_model.safetensors", without_one, "missing tensors ['base_model"),
    "wider": ("adapter_model.safetensors", wider, "expected matrices of rank 2"),
    "no-json": ("adapter_config.json", lambda f: f.write_text("{"), "got invalid JSON"),
    "no-type": ("adapter_config.json", lambda f: f.write_text("{}"), "None as peft_type"),
    "rank": (
        "adapter_config.json",
        lambda f: f.write_text(f.read_text().replace('"r": 2', '"r": "x"')),
        "got 'x' as r (",
    ),
    "gone": ("adapter_config.json", lambda f: f.unlink(), "found no adapter_config.json"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_damaged_adapter_is_named(joint, tmp_path, name):
    file, spoil, reason = ADAPTERS[name]
    folder = tmp_path / "head"
    shutil.copytree(joint, folder)
    spoil(folder / "adapter" / file)
    line = outcome(lambda: load_pair(folder), folder / "adapter")
    assert reason in line
    if name != "fewer":  # what the target must be there for
        assert "adapter" in outcome(lambda: prepare(folder, "me/heads"), folder)
