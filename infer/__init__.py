"""Decoding: text in, text out, or token ids step by step.

    from draftheads.infer import load

    model = load("out/qwen")  # a head folder, a run, a Hub id
    answer = model.generate("Why is the sky blue?", max_new_tokens=200)
    print(answer, answer.tokens_per_step)

`load` and `TextGenerator` take prompts; `Speculator` is the loop, which takes token ids. Rules say
what is kept: `Greedy`, `Sampled`, the lossy `Typical` and `Lenient`, or your own `Acceptance`.
A `Grammar` constrains answers. Other drafters: `NGram`, `DraftModel`,
`Merged`. `speculative` is for transformers' own `generate`, `bench` measures.

Names are imported when they are used, so that decoding never loads what only a benchmark needs.
"""

from typing import TYPE_CHECKING

from draftheads.extras import lazy

__all__ = [
    "Acceptance",
    "BenchOptions",
    "BenchReport",
    "ChatOptions",
    "Completion",
    "Costs",
    "DraftModel",
    "Grammar",
    "Greedy",
    "Lenient",
    "Merged",
    "NGram",
    "Sampled",
    "Session",
    "Speculator",
    "Statistics",
    "Step",
    "TextGenerator",
    "TextStream",
    "Typical",
    "bench",
    "encode_prompt",
    "load",
    "speculative",
]

if TYPE_CHECKING:
    from draftheads.infer.accept import Acceptance, Greedy, Sampled
    from draftheads.infer.chat.repl import ChatOptions
    from draftheads.infer.costs import Costs
    from draftheads.infer.drafters.draft_model import DraftModel
    from draftheads.infer.drafters.merged import Merged
    from draftheads.infer.drafters.ngram import NGram
    from draftheads.infer.engine import Speculator
    from draftheads.infer.generate import speculative
    from draftheads.infer.grammar import Grammar
    from draftheads.infer.lossy import Lenient, Typical
    from draftheads.infer.measure.bench import BenchOptions, BenchReport, bench
    from draftheads.infer.pipeline.generator import Completion, TextGenerator, load
    from draftheads.infer.prompt import encode_prompt
    from draftheads.infer.reading import Session
    from draftheads.infer.rows import Statistics, Step
    from draftheads.infer.text import TextStream
else:
    __getattr__, __dir__ = lazy(__name__, __file__)
