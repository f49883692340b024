"""What does a training step on one long row hold?

    python scripts/benchmarks/long_rows.py [--lengths 4096 8192 16384 32768] [--python OTHER]

Trains each kind of head for one step on one row of a small random target, in a process of its own,
and prints by how much its peak of memory exceeds what it held before: with one document as long as
the row ("1"), and with documents of 512 tokens ("n"). OTHER: the interpreter of another checkout.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

KINDS = {
    "medusa": ("medusa", {}),
    "sequential, prefix": ("sequential", {"prefix": True}),
    "eagle3, 7 steps": ("eagle3", {"steps": 7, "labels": "hard"}),
    "block": ("block", {}),
}
DOCUMENT = 512


def held(name: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def one_step(name: str, length: int, documents: str) -> int:
    """Bytes that a step needs at most, beyond those held before."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftheads.heads import HEADS, Batch, Target

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
    )
    target = Target(LlamaForCausalLM(config))
    kind, choices = KINDS[name]
    head = HEADS[kind].create(target, HEADS[kind].Choices(**choices)).train()
    tokens_BT = torch.randint(3, 512, (1, length))
    places_BT = torch.arange(length)[None]
    size = length if documents == "1" else DOCUMENT
    positions_BT, documents_BT = places_BT % size, places_BT // size
    batch = Batch(tokens_BT, positions_BT > size // 4, positions_BT, documents_BT)
    before = held("VmRSS")
    features_BTD = target.features(batch, head.training_layers)
    head(batch, features_BTD, target).loss.backward()
    return held("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        name, length, documents = options.child
        print(one_step(name, int(length), documents))
        return
    print("MB " + " " * 22 + "".join(f"{length:>14}" for length in options.lengths))
    for name in options.kinds:
        for documents in ("1", "n"):
            cells = []
            for length in options.lengths:
                child = [options.python, __file__, "--child", name, str(length), documents]
                done = subprocess.run(child, capture_output=True, text=True)
                size = done.stdout.strip().rpartition("\n")[2]
                cells.append(f"{int(size) / 1e6:14.0f}" if size.isdigit() else f"{'failed':>14}")
            print(f"{name:22} {documents} " + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
