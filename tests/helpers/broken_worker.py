"""On several processes: each loads a broken folder, sharded, and prints its refusal.

broken_worker.py FOLDER
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from draftheads.heads.target.model import Target

if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        Target.load(sys.argv[1], placement="sharded")
    except ValueError as error:
        print(error, flush=True)
    dist.destroy_process_group()
