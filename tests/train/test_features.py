"""The promise: features on disk are the target's, whoever wrote them and whatever interrupted it,
and never those of something else.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from launching import exit_code_of_a_fork
from safetensors import safe_open
from safetensors.torch import save
from tiny_heads import make_head
from tiny_training import (
    HEAD_SECTIONS,
    VOCABULARY,
    random_answers,
    recipe_of,
    tiny_model,
    tiny_recipe,
    tiny_target,
)

from draftheads.heads.formats.hub import HEADS
from draftheads.heads.target.model import Target
from draftheads.train import batches, evaluate, launch
from draftheads.train.batches import Documents, Rows, heldout_rows
from draftheads.train.evaluate import Share, heldout_ranks
from draftheads.train.features import sources as store_module
from draftheads.train.features.sources import (
    MemoryFeatures,
    OnlineFeatures,
    StoredFeatures,
    make_features,
    write_missing,
)

LAYERS = (1, -1)
HIDDEN = 32
ROW_BYTES = 64 * 2 * HIDDEN * 4
"""Of a full row in fp32."""


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Three full rows of fp32 in a shard."""
    monkeypatch.setattr(store_module, "SHARD_BYTES", 3 * ROW_BYTES + store_module.HEADER_BYTES)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def rows_of(count: int = 60, *, length: int = 64, seed: int = 0) -> Rows:
    documents = Documents.read(random_answers(count))
    return Rows(documents, documents.spans, length, pack=True, seed=seed)


def store_of(
    folder: Path,
    target: Target,
    rows: Rows | None = None,
    layers: Sequence[int] = LAYERS,
    bits: int | None = None,
) -> StoredFeatures:
    rows = rows or rows_of()
    online = OnlineFeatures(target, layers)
    return StoredFeatures(folder / "train", online, rows, len(rows), bits)


def place(rank: int = 0, world: int = 1) -> Any:
    """An accelerator of one process among `world`."""
    return SimpleNamespace(process_index=rank, num_processes=world, is_main_process=rank == 0)


def gathering_threads(world: int) -> Callable[[list[Any]], list[Any]]:
    """`gather_object` of threads that stand for processes."""
    barrier = threading.Barrier(world, timeout=60)
    parts: list[Any] = []

    def gather(mine: list[Any]) -> list[Any]:
        parts.extend(mine)
        barrier.wait()
        everyone = list(parts)
        if barrier.wait() == 0:
            parts.clear()
        barrier.wait()
        return everyone

    return gather


def fill(store: StoredFeatures, *, at: Any = None) -> StoredFeatures:
    write_missing([store], at or place())
    return store


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def counted(monkeypatch, target: Target) -> Counter[int]:
    """How many forwards each thread runs from now on."""
    forwards: Counter[int] = Counter()
    original = Target.features

    def count(self, batch, layers):
        forwards[threading.get_ident()] += 1
        return original(self, batch, layers)

    monkeypatch.setattr(Target, "features", count)
    return forwards


def losses(source, rows: Rows, target: Target, kind: str) -> list[float]:
    """Of some steps of training on two batches of two rows."""
    torch.manual_seed(0)
    choices = HEAD_SECTIONS[kind]
    vocabulary = {"vocabulary": range(VOCABULARY)} if "vocabulary" in choices else {}
    head = make_head(HEADS[kind], target, **{**choices, **vocabulary})
    optimizer = torch.optim.AdamW((p for p in head.parameters() if p.requires_grad), lr=3e-3)
    found = []
    for step in range(8):
        numbers = [2 * (step % 2), 2 * (step % 2) + 1]
        batch = rows.batch(numbers)
        loss = head(batch, source(numbers, batch), target).loss / int(batch.loss_mask_BT.sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_stored_features_are_those_of_rows_computed_alone(tmp_path, target):
    store = fill(store_of(tmp_path, target))
    rows, source = store.rows, store
    assert len(store.shards) > 2 < len(rows) / len(store.shards)
    for numbers in ([3], [len(rows) - 1, 0, 3]):
        batch = rows.batch(numbers)
        features_BTD = source(numbers, batch)
        assert features_BTD.shape == (*batch.tokens_BT.shape, 2 * HIDDEN)
        for number, features_TD in zip(numbers, features_BTD, strict=True):
            alone_BTD = OnlineFeatures(target, LAYERS)([number], rows.batch([number]))
            assert torch.equal(features_TD[: rows.sizes[number]], alone_BTD[0])


def test_memory_for_one_row_gives_the_features_of_memory_for_all(target):
    rows, numbers = rows_of(), [0, 2, 1]
    batch = rows.batch(numbers)
    online_BTD = OnlineFeatures(target, LAYERS)(numbers, batch)
    inside_BT = batch.documents_BT >= 0
    found = []
    for gb in (1.0, rows.sizes[0] * 2 * HIDDEN * 4 / 1e9):
        source = MemoryFeatures(OnlineFeatures(target, LAYERS), rows, gb)
        found += [source(numbers, batch), source(numbers, batch)]
    assert [torch.equal(features_BTD, found[0]) for features_BTD in found] == [True] * 4
    torch.testing.assert_close(found[0][inside_BT], online_BTD[inside_BT], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_training_on_stored_features(tmp_path, target, kind):
    layers = make_head(
        HEADS[kind],
        target,
        **{**HEAD_SECTIONS[kind], **({"vocabulary": range(60)} if kind == "eagle3" else {})},
    ).training_layers
    rows = rows_of()
    stored = losses(fill(store_of(tmp_path, target, rows, layers)), rows, target, kind)
    assert losses(store_of(tmp_path, target, rows, layers), rows, target, kind) == stored
    memory = MemoryFeatures(OnlineFeatures(target, layers), rows, gb=1)
    assert losses(memory, rows, target, kind) == stored
    online = losses(OnlineFeatures(target, layers), rows, target, kind)
    assert online[-2] < online[0]
    assert stored == pytest.approx(online, rel=1e-4)


def test_three_processes_write_the_bytes_of_one_with_equally_many_forwards(
    tmp_path, target, monkeypatch
):
    one = fill(store_of(tmp_path / "one", target))
    assert len(one.shards) % 3, "the shares must differ for this to mean anything"
    forwards = counted(monkeypatch, target)
    monkeypatch.setattr(launch, "gather_object", gathering_threads(3))
    three = [store_of(tmp_path / "three", target) for _ in range(3)]
    threads = [
        threading.Thread(target=fill, args=(three[rank],), kwargs={"at": place(rank, 3)})
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files(three[0].folder) == files(one.folder)
    assert len(forwards) == 3
    assert len(set(forwards.values())) == 1


def killed_in_the_third_shard(folder: Path) -> None:
    """Run in a fork."""
    small, written = 3 * ROW_BYTES + store_module.HEADER_BYTES, []

    def fsync(file: int) -> None:
        written.append(file)
        if len(written) == 4:  # the manifest is the first
            os.kill(os.getpid(), signal.SIGKILL)

    store_module.SHARD_BYTES, os.fsync = small, fsync
    target = tiny_target()
    fill(store_of(folder, target))


@pytest.mark.slow
def test_a_killed_writer_is_continued(tmp_path, target, monkeypatch):
    code = exit_code_of_a_fork(killed_in_the_third_shard, tmp_path / "killed")
    assert code == -signal.SIGKILL
    store = store_of(tmp_path / "killed", target)
    names = sorted(files(store.folder))
    assert names[0].startswith(".shard-000002."), "a part is left behind"
    assert names[1:] == ["manifest.json", "shard-000000.safetensors", "shard-000001.safetensors"]
    whole = fill(store_of(tmp_path / "whole", target))
    forwards = counted(monkeypatch, target)
    fill(store)
    assert files(store.folder) == files(whole.folder)
    assert forwards.total() == len(whole.rows) - 6
    fill(store_of(tmp_path / "killed", target))
    assert forwards.total() == len(whole.rows) - 6, "a whole store needs no target"


def rewritten(path: Path, change: Callable) -> None:
    """A shard with other features, and the checksums that it had."""
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {"features": file.get_tensor("features").clone()}, file.metadata()
    path.write_bytes(save(change(tensors), metadata))


OTHER: dict[str, Callable] = {
    "shuffled": lambda t: {"features": t["features"].flip(0).contiguous()},
    "tripled": lambda t: {"features": 3 * t["features"]},
    "one number": lambda t: {"features": t["features"].index_fill(1, torch.tensor([5]), 0.5)},
    "NaN": lambda t: {"features": t["features"] * torch.nan},
}


@pytest.mark.mend("stored features that were shuffled, tripled or NaN were learned")
@pytest.mark.parametrize("name", OTHER)
def test_stored_features_that_were_changed_are_not_learned(tmp_path, target, name):
    store = fill(store_of(tmp_path, target))
    rewritten(store.folder / "shard-000001.safetensors", OTHER[name])
    again = fill(store_of(tmp_path, target))
    again([0], again.rows.batch([0]))
    with pytest.raises(ValueError, match=r"shard-000001.*: expected row 4 as it was written, got"):
        again([4], again.rows.batch([4]))


def test_shards_that_have_changed_places_are_not_learned(tmp_path, target):
    rows = rows_of(length=16)  # a few of equally many tokens
    store = fill(store_of(tmp_path, target, rows))
    sizes = store.shard_tokens
    one, other = next((n, m) for n in range(len(sizes)) for m in range(n) if sizes[n] == sizes[m])
    paths = [store.folder / f"shard-{shard:06d}.safetensors" for shard in (one, other)]
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second), paths[1].write_bytes(first)
    again = store_of(tmp_path, target, rows)
    with pytest.raises(ValueError, match="as it was written, got other numbers"):
        again([store.shards[one][0]], rows.batch([store.shards[one][0]]))


DAMAGES: dict[str, Callable[[Path], object]] = {
    **{
        f"{left} bytes": lambda path, left=left: path.write_bytes(path.read_bytes()[:left])
        for left in (0, 5, 100, -1)
    },
    "float64": lambda path: rewritten(path, lambda t: {"features": t["features"].double()}),
    "narrow": lambda path: rewritten(
        path, lambda t: {"features": t["features"][:, 1:].contiguous()}
    ),
}


@pytest.mark.mend("stored features in float64 or of another width were learned")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_shard_is_named_and_written_again(tmp_path, target, name):
    store = fill(store_of(tmp_path, target))
    before = files(store.folder)
    DAMAGES[name](store.folder / "shard-000001.safetensors")
    again = store_of(tmp_path, target)
    with pytest.raises(ValueError, match=r"shard-000001\.safetensors: .*damaged .*; run again"):
        again([4], store.rows.batch([4]))
    fill(again)
    assert files(store.folder) == before


@pytest.mark.mend("stored features that were cut ended the process with SIGBUS")
def test_a_shard_that_is_cut_while_it_is_read_is_named(tmp_path, target):
    store = fill(store_of(tmp_path, target))
    store([3], store.rows.batch([3]))
    os.truncate(store.folder / "shard-000001.safetensors", 4096)
    with pytest.raises(ValueError, match=r"shard-000001.*got one that was cut since"):
        store([4], store.rows.batch([4]))


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[1]", b"[" * 200_000, bytes(50)])
def test_a_damaged_manifest_is_named(tmp_path, target, content):
    store = fill(store_of(tmp_path, target))
    (store.folder / "manifest.json").write_bytes(content)
    before = files(store.folder)
    with pytest.raises(ValueError, match=r"manifest\.json: .* format 2, got None; use another"):
        fill(store_of(tmp_path, target))
    assert files(store.folder) == before


def of_other_weights() -> Target:
    other = tiny_model()
    other.model.norm.weight.data += 0.5
    return Target(other, name="tiny")


CHANGES: dict[str, dict[str, Any]] = {
    "target ": {"target": of_other_weights},
    "target_bits ": {"bits": 8},
    "layers ": {"layers": (0, -1)},
    "rows ": {"rows": lambda: rows_of(50)},
    "rows_sha256 ": {"rows": lambda: shuffled()},
    "sequence_length ": {"rows": lambda: rows_of(length=48)},
}


def shuffled() -> Rows:
    other = rows_of()
    pieces, swapped = other.pieces, {0: 1, 1: 0}
    other.pieces = lambda row: pieces(swapped.get(row, row))
    other.sizes[0], other.sizes[1] = other.sizes[1], other.sizes[0]
    return other


@pytest.mark.parametrize("key", CHANGES)
def test_features_of_something_else_are_refused(tmp_path, target, key):
    store = fill(store_of(tmp_path, target))
    before = files(store.folder)
    change = {name: made() if callable(made) else made for name, made in CHANGES[key].items()}
    with pytest.raises(ValueError, match=f"with {key}.*, got .*; use another features.path"):
        fill(store_of(tmp_path, **{"target": target, **change}))
    assert files(store.folder) == before


def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path, target, monkeypatch
):
    store = store_of(tmp_path / "features", target)
    needed = sum(store.shard_bytes)
    forwards = counted(monkeypatch, target)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
        with pytest.raises(ValueError, match="free on that disk.*mode=online"):
            fill(store)
    assert not (tmp_path / "features").exists()
    assert not forwards
    fill(store)
    assert sum(map(len, files(store.folder).values())) <= needed


def test_a_full_disk_is_one_line_and_leaves_what_was_written(tmp_path, target, monkeypatch):
    store = store_of(tmp_path, target)
    calls: list[int] = []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) == 4:  # the manifest is the first
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="shard-000002.*No space left.*run again to resume"):
            fill(store)
    expected = {"manifest.json", "shard-000000.safetensors", "shard-000001.safetensors"}
    assert set(files(store.folder)) == expected
    fill(store)
    store([0], store.rows.batch([0]))


def cached_recipe(folder: Path):
    values = tiny_recipe(folder)
    return recipe_of({**values, "features": {"mode": "cached"}})


def test_a_cached_run_needs_no_forward_of_the_target(tmp_path, target, monkeypatch):
    rows = rows_of(), rows_of(20, seed=1)
    monkeypatch.setattr(batches, "HELDOUT_TOKENS", 3 * 64)  # not all rows held out
    accelerator = Accelerator(cpu=True)
    head = make_head(HEADS["medusa"], target, **HEAD_SECTIONS["medusa"])
    layers = head.training_layers
    count = heldout_rows(rows[1])
    assert sum(rows[1].sizes[: count - 1]) < batches.HELDOUT_TOKENS <= sum(rows[1].sizes[:count])
    share = Share(rows[1], 2, accelerator)
    online_MK = heldout_ranks(head, target, share, OnlineFeatures(target, layers))
    recipe = cached_recipe(tmp_path)
    make_features(recipe, target, rows, layers, accelerator)
    folder = tmp_path / "data-features"
    assert {path.name for path in folder.iterdir()} == {"train", "heldout"}
    forwards = counted(monkeypatch, target)
    train, apart = make_features(recipe, target, rows, layers, accelerator)
    assert len(losses(train, rows[0], target, "medusa")) == 8
    ranks_MK = heldout_ranks(head, target, share, apart)
    assert not forwards
    assert torch.equal(ranks_MK, online_MK)


def test_a_process_without_a_held_out_batch_runs_one_all_the_same(target, monkeypatch):
    rows = rows_of()
    head = make_head(HEADS["medusa"], target, **HEAD_SECTIONS["medusa"])
    monkeypatch.setattr(evaluate, "gather_object", lambda mine: mine)
    world = 3
    sizes = range(1, len(rows))
    size = next(n for n in sizes if -(-len(rows) // n) > world and -(-len(rows) // n) % world)
    real, source = Accelerator(cpu=True), OnlineFeatures(target, head.training_layers)
    forwards, parts = [], []
    for rank in range(world):
        one = SimpleNamespace(
            process_index=rank, num_processes=world, device=real.device, autocast=real.autocast
        )
        with monkeypatch.context() as patch:
            calls = counted(patch, target)
            parts.append(heldout_ranks(head, target, Share(rows, size, one), source))
        forwards.append(calls.total())
    assert len(set(forwards)) == 1
    assert sum(forwards) > -(-len(rows) // size)
    assert sum(map(len, parts)) == len(heldout_ranks(head, target, Share(rows, size, real), source))
