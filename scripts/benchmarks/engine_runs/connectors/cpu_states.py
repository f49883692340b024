"""vLLM's connector that writes hidden states, for its CPU build, where the stock one needs CUDA.

The folder of this file belongs on PYTHONPATH; `--kv-transfer-config` of `vllm serve` names
"kv_connector": "CpuStates" and "kv_connector_module_path": "cpu_states".

Source: v1/example_hidden_states_connector.py of vLLM 0.32.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock


class CpuStates(stock.ExampleHiddenStatesConnector):
    """Writes a file in the step after its request, before that is reported as sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._written: set[str] = set()

    def _submit_async_write(self, pending: stock.PendingSave) -> None:
        blocks, size = torch.tensor(pending.block_ids), self._block_size
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()
        count = len(pending.token_ids)
        states = stock.extract_from_kv_cache(self._kv_cache, slots, count).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids}
        save_file(tensors, f"{pending.filename}.part")
        os.replace(f"{pending.filename}.part", pending.filename)
        self._written.add(pending.req_id)
        self._unlock(pending.req_id)

    def _unlock(self, request: str) -> None:
        lock = self._lock_fds.pop(request, None)
        if lock is not None:
            os.close(lock)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        """Writes what has been finished; returns what was written and finished."""
        if self.has_connector_metadata():
            for pending in getattr(self._get_connector_metadata(), "pending_saves", []):
                self._submit_async_write(pending)
        self._accumulated_finished_req_ids.update(finished_req_ids)
        for request in self._accumulated_finished_req_ids - self._written:
            self._unlock(request)  # cancelled
        done = self._accumulated_finished_req_ids & self._written
        self._written -= done
        self._accumulated_finished_req_ids.clear()
        return done or None, None
