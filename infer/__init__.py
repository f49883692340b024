"""Decoding: text in, text out, or token ids step by step.

    from draftheads.infer import load

    model = load("out/qwen")  # a head folder, a run, a Hub id
    answer = model.generate("Why is the sky blue?", max_new_tokens=200)
    print(answer, answer.tokens_per_step)

`load` and `TextGenerator` take prompts; `Speculator` is the loop, which takes token ids. Rules say
what is kept: `Greedy`, `Sampled`, `Typical`, or your own `Acceptance`. Other drafters: `NGram`,
`DraftModel`, `EarlyExit`, `Merged`. `speculative` is for transformers' own `generate`, `bench`
measures.

Names are imported when they are used, so that decoding never loads what only a benchmark needs.
"""

from importlib import import_module
from typing import Any

from draftheads.extras import extras

PUBLIC = {
    "Acceptance": "accept",
    "BenchOptions": "measure.bench",
    "BenchReport": "measure.bench",
    "ChatOptions": "chat.repl",
    "Completion": "pipeline.generator",
    "Costs": "measure.costs",
    "DraftModel": "drafters.draft_model",
    "EarlyExit": "drafters.draft_model",
    "Greedy": "accept",
    "Merged": "drafters.merged",
    "NGram": "drafters.ngram",
    "Sampled": "accept",
    "Session": "engine",
    "SpeculativeSampling": "drafters.draft_sampling",
    "Speculator": "engine",
    "Statistics": "engine",
    "Step": "engine",
    "TextGenerator": "pipeline.generator",
    "TextStream": "text",
    "Typical": "accept",
    "bench": "measure.bench",
    "encode_prompt": "prompt",
    "load": "pipeline.generator",
    "speculative": "generate",
}
__all__ = list(PUBLIC)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras():
        return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
