"""A tiny target on disk, answers that it wrote, and recipes to train heads on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from draftheads.heads.target.model import Target
from draftheads.train.checkpoint import SEAL, write_state
from draftheads.train.data.answers import Answer, new_manifest, store_batch
from draftheads.train.data.shards import rows_of, to_batch
from draftheads.train.medusa import main
from draftheads.train.metrics import Progress
from draftheads.train.recipe import Recipe, load_recipe

VOCABULARY, HIDDEN, CONTEXT = 97, 32, 128


def tiny_config(layers: int = 2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )


def tiny_model() -> LlamaForCausalLM:
    """A random Llama whose greedy text does not fall into a loop at once."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model.eval()


def tiny_target() -> Target:
    return Target(tiny_model(), name="tiny")


def write_target(folder: Path) -> Path:
    tiny_model().save_pretrained(folder)
    return folder


def conversation(target: Target, prompt: Sequence[int], new_tokens: int) -> Answer:
    """A prompt and the target's greedy answer."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    return Answer(out[0].tolist(), [(len(prompt), len(prompt) + new_tokens)])


def random_answers(count: int, seed: int = 0) -> list[Answer]:
    """Documents of 5 to 40 random tokens, of which a random span is learned."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    answers = []
    for _ in range(count):
        length = draw(5, 40)
        start = draw(1, length - 2)
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        answers.append(Answer(tokens, [(start, draw(start + 1, length + 1))]))
    return answers


@torch.no_grad()
def written(model: LlamaForCausalLM, answers: Sequence[Answer]) -> list[Answer]:
    """The same documents with tokens that the model draws after the first one."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([answer.tokens[:1] for answer in answers])
    for _ in range(max(len(answer.tokens) for answer in answers) - 1):
        probabilities = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return [
        Answer(row[: len(answer.tokens)], answer.learn)
        for row, answer in zip(ids.tolist(), answers, strict=True)
    ]


def write_answers(folder: Path, answers: Sequence[Answer], fingerprint: str | None = None) -> Path:
    """A finished distillation folder."""
    folder.mkdir(parents=True)
    lines = [
        {"id": f"{n}", "tokens": a.tokens, "learn": a.learn, "turns": 1, "finish": "eos"}
        for n, a in enumerate(answers)
    ]
    prompts = {"source": "", "count": len(answers), "sha256": "0" * 12}
    manifest = new_manifest({"name": "tiny", "fingerprint": fingerprint}, {}, prompts)
    store_batch(folder, manifest, to_batch([row for line in lines for row in rows_of(line)]))
    return folder


HEAD_SECTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"depth": 3, "nodes": 7},
    "sequential": {"depth": 3, "nodes": 7, "rank": 8, "prefix": True},
    "eagle3": {"depth": 3, "nodes": 7, "top_k": 2, "steps": 3, "vocabulary": 60},
    "eagle": {"depth": 3, "nodes": 7, "top_k": 2, "steps": 2, "labels": "hard"},
    "block": {"block_size": 3, "nodes": 7, "top_k": 2, "rank": 8},
    "mtp": {"depth": 3, "nodes": 7, "top_k": 2, "steps": 2, "labels": "hard"},
}
"""A tiny head of each kind."""


def tiny_recipe(folder: Path, kind: str = "medusa", **run: Any) -> dict[str, Any]:
    """A recipe of seconds; the folder holds `target` and `data`."""
    return {
        "target": str(folder / "target"),
        "data": {
            "path": str(folder / "data"),
            "sequence_length": 64,
            "rows_per_batch": 2,
            "heldout": 0.1,
        },
        "head": {"kind": kind, **HEAD_SECTIONS[kind]},
        "optim": {"lr": 3e-3},
        "eval": {"every": 0},
        "run": {
            "output": str(folder / "run"),
            "steps": 6,
            "tokens_per_step": 256,
            "save_every": 100,
            "log_every": 1,
            **run,
        },
    }


def recipe_of(values: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(values)


def run(made: Path, output: Path, *overrides: str, kind: str = "medusa") -> int:
    """A training script in this process."""
    recipe = output.parent / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(made, kind, output=str(output))))
    return main([str(recipe), *overrides])


def in_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Call `act` while a step is counted."""
    original = Progress.step

    def step_and_act(self: Progress, number: int, *rest: Any) -> None:
        if number == step:
            act()
        original(self, number, *rest)

    monkeypatch.setattr(Progress, "step", step_and_act)


def weights(output: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(output / f"step-{step:06d}" / "model.safetensors")


def rewrite_state(step: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write the state of a checkpoint anew, as a run in that state would have."""
    values = json.loads((step / "trainer" / "state.json").read_text())
    write_state(step, change({key: value for key, value in values.items() if key != SEAL}))


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


MINIMAL = """\
target: some/model
data:
  path: answers
run:
  output: out
  steps: 10
"""
"""A recipe as short as can be."""


def error(path: Path, *overrides: str) -> str:
    """The line that a mistake in a recipe gets."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is the test
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message
