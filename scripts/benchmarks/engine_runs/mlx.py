"""Run a job of `engines.py` in MLX, with the Python that has mlx-lm and mlx-vlm:
python -P mlx.py JOB.json OUT.json

The drafters and their loops are mlx-vlm's, and so is a target whose rejected drafts it can take
back (hybrids: Qwen3.5, LFM2, Nemotron-H). Another one, such as a plain Llama or Qwen, is mlx-lm's,
which here also tells its layers' outputs and takes back what was rejected.
Sources: speculative/eagle3.py and dflash.py of mlx-vlm 0.7.10; models of mlx-lm 0.32.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SPARE = 64
"""Tokens beyond the last wanted one: mlx-vlm shortens drafts at the end of an answer."""


class Told:
    """A target of mlx-lm in the form that mlx-vlm's loops use."""

    def __init__(self, model: Any) -> None:
        self.whole, self.model, self.config = model, model.model, model.args
        if "lm_head" in model:
            self.lm_head = model.lm_head

    def make_cache(self) -> Any:
        return self.whole.make_cache()

    def __call__(
        self, inputs: Any, cache: Any, capture_layer_ids: Any = (), **_: Any
    ) -> SimpleNamespace:
        from mlx_lm.models.base import create_attention_mask

        inner, hidden = self.model, self.model.embed_tokens(inputs)
        mask, told = create_attention_mask(hidden, cache[0]), []
        for number, (layer, entry) in enumerate(zip(inner.layers, cache, strict=True)):
            hidden = layer(hidden, mask, cache=entry)
            if number in capture_layer_ids:
                told.append(hidden)
        unembed = getattr(self, "lm_head", None) or inner.embed_tokens.as_linear
        return SimpleNamespace(
            logits=unembed(inner.norm(hidden)), hidden_states=told, gdn_states=None
        )

    def rollback_speculative_cache(self, cache: Any, _: Any, accepted: Any, size: int) -> None:
        for entry in cache:
            entry.trim(size - int(accepted) - 1)


def load_target(folder: Path) -> Any:
    """The target in the form that mlx-vlm's loops use."""
    import mlx_lm.utils
    import mlx_vlm.utils

    own = mlx_vlm.utils.load_model(folder).language_model
    if hasattr(own, "rollback_speculative_cache"):
        return own
    return Told(mlx_lm.utils.load_model(folder)[0])


def answer(target: Any, drafter: Any, prompt: list[int], job: dict[str, Any]) -> list[int]:
    """The greedy answer to a prompt; the drafter keeps how many drafts were accepted."""
    import mlx.core as mx
    from mlx_vlm.speculative.dflash import _dflash_rounds
    from mlx_vlm.speculative.eagle3 import _eagle3_rounds

    def greedy(logits: Any) -> Any:
        return mx.argmax(logits, axis=-1)

    is_eagle, count = job["method"] == "eagle3", job["new_tokens"]
    cache, tokens = target.make_cache(), mx.array([prompt])
    layers = getattr(drafter.config, "capture_layer_ids", drafter.config.target_layer_ids)
    told = target(tokens, cache=cache, capture_layer_ids=layers)
    first = int(greedy(told.logits[:, -1]).item())
    rounds = (_eagle3_rounds if is_eagle else _dflash_rounds)(
        target,
        drafter,
        cache,
        mx.concatenate(told.hidden_states, axis=-1),
        first_bonus=first,
        max_tokens=count + SPARE,
        sampler=greedy,
        draft_block_size=job["draft_tokens"] + 1,
        greedy_sampling=True,
        **({"prompt_tokens": tokens} if is_eagle else {}),
    )
    ids, eos = [first], job["eos"]
    while ids[-1] not in eos and len(ids) < count:
        ids.append(int(next(rounds)[0]))
    return ids


def plain_answer(target: Any, prompt: list[int], job: dict[str, Any]) -> list[int]:
    import mlx.core as mx

    cache, ids, tokens = target.make_cache(), [], mx.array([prompt])
    while len(ids) < job["new_tokens"] and not (ids and ids[-1] in job["eos"]):
        ids.append(int(mx.argmax(target(tokens, cache=cache).logits[0, -1]).item()))
        tokens = mx.array([ids[-1:]])
    return ids


def run(job: dict[str, Any]) -> dict[str, Any]:
    """What `engines.Outcome` holds."""
    from mlx_vlm.speculative.drafters import load_drafter

    target = load_target(Path(job["target"]))
    drafter = load_drafter(job["head"])[0] if job["head"] else None
    answers, steps, began = [], [], time.perf_counter()
    for prompt in job["prompts"]:
        if drafter is None:
            answers.append(plain_answer(target, prompt, job))
            continue
        drafter.prefer_requested_block_size = True  # of DFlash; it would shorten rejected blocks
        answers.append(answer(target, drafter, prompt, job))
        steps += drafter.accept_lens
    places = range(1, job["draft_tokens"] + 1)
    return {
        "version": f"mlx-vlm {version('mlx-vlm')}",
        "answers": answers,
        "drafts": len(steps),
        "accepted": [sum(count >= place for count in steps) for place in places],
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    job, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(run(json.loads(job.read_text()))))
