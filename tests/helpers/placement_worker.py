"""On several processes: compares a target divided over processes with a whole one in every process,
then trains as each recipe says. Leaves what it found beside the first recipe.

    placement_worker.py TIED UNTIED RECIPE...        folders of targets, recipes
    placement_worker.py FOLDER                       prints why this target is refused
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_heads import decode
from torch.distributed.tensor import DTensor

from draftheads.heads.batch import Batch
from draftheads.heads.target import packing
from draftheads.heads.target.model import Target
from draftheads.train.launch import make_accelerator
from draftheads.train.medusa import fit
from draftheads.train.recipe import load_recipe


def random_batch(vocabulary: int, seed: int = 0) -> Batch:
    """Two rows of nine random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(0, vocabulary, (2, 9), generator=generator)
    positions_BT = torch.arange(9).expand(2, 9)
    return Batch(tokens_BT, tokens_BT >= 0, positions_BT, torch.zeros_like(tokens_BT))


def own_bytes(target: Target) -> dict[str, int]:
    """Of the parameters in layers and outside them, on this process."""
    sizes = {"layers": 0, "others": 0}
    for name, parameter in target.model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sizes["layers" if ".layers." in name else "others"] += local.numel() * local.element_size()
    return sizes


def compare(folder: str) -> dict[str, Any]:
    """What is equal between the two placements, and how large they are."""
    whole, sharded = Target.load(folder), Target.load(folder, placement="sharded")
    rank = dist.get_rank()
    batch = random_batch(whole.vocab_size, seed=rank)  # each process has rows of its own
    tokens_BT = batch.tokens_BT
    hidden_BTD = whole.features(batch, [2])
    found: dict[str, Any] = {
        "features": torch.equal(
            whole.features(batch, [0, 1, 2]), sharded.features(batch, [0, 1, 2])
        ),
        "features again": torch.equal(whole.features(batch, [1]), sharded.features(batch, [1])),
        "embed": torch.equal(whole.embed(tokens_BT), sharded.embed(tokens_BT)),
        "unembed": torch.equal(whole.unembed(hidden_BTD), sharded.unembed(hidden_BTD)),
        "unembed_weight": torch.equal(whole.unembed_weight(), sharded.unembed_weight()),
        "sizes": [own_bytes(whole), own_bytes(sharded)],
        "fingerprints": [whole.fingerprint(), sharded.fingerprint() if rank == 0 else None],
    }
    with mock.patch.object(packing, "PIECE", 4):  # rank 1 has one more document
        documents_BT = torch.tensor([[0] * 5 + [1] * 4, [0] * 3 + [1] * (6 - rank) + [2] * rank])
        starts_BT = F.pad(documents_BT.diff(), (1, 0))
        positions_BT = torch.arange(9) - (torch.arange(9) * starts_BT).cummax(1).values
        long = Batch(batch.tokens_BT, batch.loss_mask_BT, positions_BT, documents_BT)
        pieces, rows = (each.features(long, [1])[positions_BT > 0] for each in (whole, sharded))
        found["features of long rows"] = torch.allclose(pieces, rows, atol=1e-5)
    prompts = [[5, 9, 3], [4, 8]]  # of as many forwards in every process
    found["tokens"] = [
        decode(target, None, prompts, max_new_tokens=6)[0] for target in (whole, sharded)
    ]
    storage = next(
        p.to_local().untyped_storage() for p in sharded.model.parameters() if isinstance(p, DTensor)
    )
    found["released"] = sharded.release(layers=True)
    found["left in a storage"] = storage.nbytes()
    found["fingerprints"].append(sharded.fingerprint())
    found["unembed after release"] = torch.equal(
        whole.unembed(hidden_BTD), sharded.unembed(hidden_BTD)
    )
    return found


def refuse(folder: str) -> None:
    dist.init_process_group("gloo")
    try:
        Target.load(folder, placement="sharded")
    except ValueError as error:
        print(error, flush=True)
    dist.destroy_process_group()


def main(tied: str, untied: str, *recipes: str) -> None:
    accelerator = make_accelerator(load_recipe(recipes[0]))
    out = {"tied": compare(tied), "untied": compare(untied)}
    left = Path(recipes[0]).with_name(f"rank-{accelerator.process_index}.json")
    left.write_text(json.dumps(out))
    for path in recipes:
        accelerator = make_accelerator(recipe := load_recipe(path))
        fit(recipe, accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    (main if sys.argv[2:] else refuse)(*sys.argv[1:])
