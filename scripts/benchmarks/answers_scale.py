"""Time to open a folder of answers, and the memory of each process that has it open.

    python scripts/benchmarks/answers_scale.py /tmp/answers --documents 2000000 --processes 1 4

Writes a synthetic folder of about 200 tokens per document if it is not there yet. A process imports
the libraries, opens the folder as training does and makes the first batch. Memory is read from
smaps_rollup once all processes have it open; what the imports took is shown apart. RSS counts
shared pages in each process, PSS divides them; anon is what is on no page of a file. Tokens come
from the system's page cache, which it takes back when it needs room.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from draftheads.train.data import answers, shards

MEAN, LENGTH, HELDOUT, VOCABULARY = 200, 2048, 0.02, 32_000
DOCUMENTS = 100_000
"""Written at once."""


def synthetic(first: int, count: int, generator: np.random.Generator) -> pa.RecordBatch:
    """Documents of a question and an answer, tokens from a long-tailed law."""
    sizes = np.clip(generator.lognormal(np.log(MEAN) - 0.18, 0.6, count), 8, LENGTH).astype(
        np.int32
    )
    ends = sizes.cumsum()
    tokens = (VOCABULARY * generator.random(ends[-1]) ** 3).astype(np.int32)
    learn = np.stack([sizes // 4, sizes], axis=1).ravel()
    parts = np.split(tokens, ends[:-1])
    offsets = pa.array(np.append(0, ends), pa.int32())
    spans = pa.ListArray.from_arrays(pa.array(np.arange(count + 1) * 2, pa.int32()), learn)
    columns = {
        "id": [hashlib.sha256(b"%d" % n).hexdigest()[:32] for n in range(first, first + count)],
        "tokens": pa.ListArray.from_arrays(offsets, tokens),
        "learn": pa.ListArray.from_arrays(pa.array(np.arange(count + 1), pa.int32()), spans),
        "turns": np.ones(count, np.int32),
        "finish": ["eos"] * count,
        "follows": np.zeros(count, np.bool_),
        "hash": [shards.content_hash(part) for part in parts],
        "reason": [None] * count,
        "retokenized": np.zeros(count, np.int32),
    }
    arrays = [pa.array(columns[field.name], field.type) for field in shards.SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=shards.SCHEMA)


def write(folder: Path, count: int) -> None:
    """A complete folder, as `distill` leaves it, and the seconds for it."""
    folder.mkdir(parents=True)
    generator, started = np.random.default_rng(0), time.perf_counter()
    batches = [
        synthetic(first, min(DOCUMENTS, count - first), generator)
        for first in range(0, count, DOCUMENTS)
    ]
    names = [name for batch in batches for name in batch["id"].to_pylist()]
    sha256 = hashlib.sha256("".join(names).encode()).hexdigest()
    prompts = {"source": "synthetic", "count": count, "sha256": sha256}
    manifest = answers.new_manifest({"name": "synthetic", "fingerprint": None}, {}, prompts)
    answers.ids_file(folder, manifest).write_text("".join(f"{name}\n" for name in names))
    for number, batch in enumerate(batches):
        shards.write_batch(folder / f"part-00000-of-00001-{number:05d}.arrow", batch)
    del batches
    written = time.perf_counter()
    answers.finish(folder, manifest)
    now = time.perf_counter()
    print(f"{folder}: {count:,} documents; made {written - started:.1f} s, ", end="")
    print(f"merged by `finish` {now - written:.1f} s")


def memory() -> dict[str, float]:
    """MB of this process: RSS, PSS, and what it shares with no other process."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, number, *_ = line.split()
        found[name.rstrip(":")] = int(number) / 1024
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {
        "RSS": found["Rss"],
        "PSS": found["Pss"],
        "private": private,
        "anon": found["Anonymous"],
    }


def open_once(folder: Path, ready: Barrier, results: Any) -> None:
    """What a training process does with the folder."""
    started = time.perf_counter()
    from draftheads.train.batches import Documents, Order, Rows, heldout_rows, release

    imported, empty = time.perf_counter() - started, memory()
    ready.wait()
    start, cpu = time.perf_counter(), time.process_time()
    documents = Documents.open(folder, VOCABULARY, "synthetic")
    opened = time.perf_counter()
    spans, apart = documents.split(HELDOUT)
    split = time.perf_counter()
    rows = Rows(documents, spans, LENGTH, pack=True, seed=0)
    heldout = Rows(documents, apart, LENGTH, pack=True, seed=0)
    release()
    packed = time.perf_counter()
    heldout_rows(heldout)
    rows.batch(Order(len(rows), 8, 0).step(0))
    end = time.perf_counter()
    used = time.process_time() - cpu
    ready.wait()
    full = memory()
    ready.wait()
    times = {"open": opened - start, "split": split - opened, "rows": packed - split}
    times |= {"first batch": end - packed, "total": end - start, "CPU": used}
    batch = min(_timed(lambda n=n: rows.batch(Order(len(rows), 8, 0).step(n))) for n in range(20))
    sizes = {"tokens": documents.size, "count": len(rows), "batch": 1000 * batch}
    results.put({"imports": imported, **times, **sizes, "empty": empty, "full": full})


def _timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    if not options.folder.exists():
        writer = context.Process(target=write, args=(options.folder, options.documents))
        writer.start()
        writer.join()
    for count in options.processes:
        ready, results = context.Barrier(count), context.Queue()
        arguments = (options.folder, ready, results)
        children = [context.Process(target=open_once, args=arguments) for _ in range(count)]
        for child in children:
            child.start()
        found = [results.get() for _ in children]
        for child in children:
            child.join()
        print(f"\n{count} processes; {found[0]['tokens']:,} tokens, {found[0]['count']:,} rows")
        for key in ("imports", "open", "split", "rows", "first batch", "total", "CPU"):
            print(f"  {key:12} {max(one[key] for one in found):7.2f} s")
        print(f"  {'a batch of 8':12} {max(one['batch'] for one in found):7.2f} ms")
        for key in ("RSS", "PSS", "private", "anon"):
            before = max(one["empty"][key] for one in found)
            after = max(one["full"][key] for one in found)
            print(f"  {key:12} {before:7.0f} MB of imports, {after - before:7.0f} MB of data")


if __name__ == "__main__":
    main()
