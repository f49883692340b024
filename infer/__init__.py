"""Decoding with draft heads and other drafters: the loop and its acceptance rules. Around them:
`drafters` (what else can draft), `measure` (how fast is it?), `chat`, `serve`, and `generate` (for
transformers' own `generate`).

Names are imported when they are used, so that decoding never loads what only a benchmark needs.
"""

from importlib import import_module
from typing import Any

from draftheads.extras import extras

PUBLIC = {
    "Adaptive": "drafters.adaptive",
    "BenchOptions": "measure.bench",
    "BenchReport": "measure.bench",
    "ChatOptions": "chat.repl",
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
    "TextStream": "text",
    "Typical": "accept",
    "bench": "measure.bench",
    "encode_prompt": "prompt",
    "speculative": "generate",
}
__all__ = list(PUBLIC)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras():
        return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
