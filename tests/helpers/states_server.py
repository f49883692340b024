"""A server on this machine that gives hidden states as vLLM's `extract_hidden_states` does."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from local_server import Json, LocalServer
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from draftheads.heads.target.pretrained import decoder_layers

Tensors = dict[str, Tensor]


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[Tensor, int]:
    """All states (P, n + 1, H) of a document, the last one before the final norm, and the likeliest
    next token.
    """
    left: list[Tensor] = []

    def note(module: Any, args: Any, out: Any) -> None:
        left.append(out if isinstance(out, Tensor) else out[0])

    hook = decoder_layers(model)[-1].register_forward_hook(note)
    ids = torch.tensor([list(tokens)])
    out = model(ids, use_cache=False, output_hidden_states=True)
    hook.remove()
    states = [each[0] for each in out.hidden_states[:-1]] + [left[0].reshape(len(tokens), -1)]
    return torch.stack(states, dim=1), int(out.logits[0, -1].argmax())


class StatesServer(LocalServer):
    """`captured`: the states in its files; `folder`: where these are. `change(number, tensors)`
    may give other tensors for the number-th document; `held`: seconds for which its lock is held
    while it is written; `path_of(number)`: where it says that the file is.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, captured: Sequence[int]) -> None:
        self.model, self.folder, self.captured = model, folder, list(captured)
        self.change: Callable[[int, Tensors], Tensors | None] = lambda number, tensors: tensors
        self.path_of: Callable[[int], Path] = lambda n: folder / f"cmpl-{id(self)}-{n}.safetensors"
        self.held = 0.0
        self._forwards = threading.Lock()
        self._count = 0
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(self._answer)

    def _answer(self, request: Json) -> Json:
        tokens: list[int] = request["prompt"]
        assert request["max_tokens"] == 1 and request["temperature"] == 0
        with self._forwards:
            number, self._count = self._count, self._count + 1
            states_PNH, token = states_of(self.model, tokens)
        tensors: Tensors | None = {
            "hidden_states": states_PNH[:, self.captured].contiguous(),
            "token_ids": torch.tensor(tokens),
        }
        assert tensors is not None
        tensors, path = self.change(number, tensors), self.path_of(number)
        if tensors is not None:
            self._write(path, tensors)
        return {
            "text": "",
            "token_ids": [token],
            "prompt_token_ids": tokens,
            "finish_reason": "length",
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }

    def _write(self, path: Path, tensors: Tensors) -> None:
        """With a lock beside it, which is released when the file is whole."""
        lock = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            if self.held:
                path.write_bytes(b"half")
                time.sleep(self.held)
            save_file(tensors, path)
            lock.close()

        threading.Thread(target=write, daemon=True).start()
