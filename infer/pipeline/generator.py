"""Text in, text out.

from draftheads.infer import load

model = load("out/qwen")
answer = model.generate("Why is the sky blue?", max_new_tokens=200)
print(answer, answer.tokens_per_step)
for text in model.stream("And at night?", temperature=0.7):
    print(text, end="", flush=True)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from time import perf_counter
from typing import Any, TypedDict, Unpack, overload

from draftheads.heads.target.load import Engine
from draftheads.heads.target.model import Target
from draftheads.heads.target.placement import Bits
from draftheads.heads.tree import Tree, parse_tree
from draftheads.infer.accept import Acceptance
from draftheads.infer.continuous import checked
from draftheads.infer.engine import Speculator
from draftheads.infer.grammar import Grammar
from draftheads.infer.pipeline.loading import Place, load_parts
from draftheads.infer.prompt import Messages, PromptRenderer, encode_prompt
from draftheads.infer.rows import Row, Statistics, Step, is_whole
from draftheads.infer.text import AnswerText, TextStream

NEW_TOKENS = 512
"""Default limit of new tokens per answer."""

Prompt = str | Messages | Sequence[int]
"""A text, a conversation ({"role", "content"} messages), or token ids."""


class GenerateOptions(TypedDict, total=False):
    """Options of `TextGenerator.generate` and `stream`."""

    max_new_tokens: int  # default: 512, or what is left of the context
    stop: str | Sequence[str]  # strings before which the text ends
    temperature: float  # default: 0, greedy
    top_p: float  # probability mass to keep; default: 1, all
    top_k: int  # tokens to keep; default: 0, all
    seed: int  # of all draws; default: drawn from torch's random numbers
    sampling: Acceptance  # a rule, in place of temperature, top_p and top_k
    raw: bool  # continue a text as it is, without the chat template
    template_args: Mapping[str, Any]  # variables of the chat template, beside the target's own
    schema: Any  # JSON schema of the answer, or its text


class PlaceOptions(TypedDict, total=False):
    """Options of `load`: where and how the target is loaded."""

    dtype: str  # as of `Target.load`; default on a CPU: the faster of float32 and its own
    device: str | None  # default: CUDA if available
    threads: int | None  # of the CPU; default: the fastest number
    bits: Bits | None  # quantise the target: 8 to int8 on a CPU; 8 or 4 with bitsandbytes on a GPU
    engine: Engine | None  # what runs int8 layers on a CPU; default: ONNX Runtime where it can
    lora: str | Path | None  # a LoRA of the target in PEFT's format, to be merged into it


NUMBERS = {
    **dict.fromkeys(("max_new_tokens", "top_k", "seed"), (Integral, "an integer")),
    **dict.fromkeys(("temperature", "top_p"), (Real, "a number")),
}
"""Options that must be numbers, for which True does not count as one."""
RULE = ("temperature", "top_p", "top_k")
"""Options that a rule replaces."""


@dataclass
class Completion:
    """The text that answers a prompt, with its statistics. `str(completion)` is the text.

    finish: "eos", "stop" (a stop string), "length", or "" before the end. seconds: until the end of
    this answer, prompt included.
    """

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # end token included
    steps: list[Step] = field(default_factory=list, repr=False)
    finish: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return self.text

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return len(self.token_ids)

    @property
    def statistics(self) -> Statistics:
        """Sums over its steps."""
        return Statistics.of(self.steps)

    @property
    def tokens_per_step(self) -> float:
        """Acceptance length tau, the target's own token included, the prefill excluded."""
        return self.statistics.tokens_per_step

    @property
    def draft_share(self) -> float:
        """Share of the new tokens that came from drafts, 0 to 1."""
        drafts = sum(step.from_drafts for step in self.steps)
        return drafts / max(1, self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this answer per second, prefill included; in a batch, the other answers do not
        count.
        """
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Growth:
    """A completion while its steps arrive."""

    completion: Completion
    content: AnswerText
    start: float = field(default_factory=perf_counter)

    def add(self, step: Step) -> str:
        """Add a step. Returns the text that is final after it."""
        completion = self.completion
        completion.steps.append(step)
        completion.token_ids += step.tokens
        completion.finish = step.finish or ""
        completion.seconds = perf_counter() - self.start
        self.content.add(step.visible, step.accepted, is_last=step.finish is not None)
        shown = len(completion.text)
        completion.text = self.content.text[: self.content.settled]
        return completion.text[shown:]


class Stream(Iterator[str]):
    """Yields the text of an answer in pieces, which join to the whole text. `completion` grows with
    it, and has all statistics at the end.
    """

    def __init__(self, growth: Growth, steps: Iterator[list[Step | None]]) -> None:
        self.completion = growth.completion
        self._pieces = filter(None, (growth.add(step) for [step] in steps if step is not None))

    def __next__(self) -> str:
        return next(self._pieces)


class TextGenerator:
    """Answers prompts with a target and its drafts; `load` makes one by name.

    A target with a chat template answers a text as a question, as in `draftheads chat`, unless
    raw=True; other targets continue it. batch_size: prompts of a list that are decoded together.
    """

    def __init__(self, engine: Speculator, *, batch_size: int = 8) -> None:
        if not isinstance(engine, Speculator):
            raise TypeError(
                f"expected a Speculator, got {engine!r:.80}; TextGenerator(Speculator(target, "
                "head)), or load by name"
            )
        if engine.target.tokenizer is None:
            raise ValueError(
                f"{engine.target.name}: expected a tokenizer next to the model, found none; add "
                "its files, or decode token ids with Speculator"
            )
        if not (is_whole(batch_size) and batch_size >= 1):
            raise ValueError(f"batch_size: expected 1 or more, got {batch_size!r}")
        self.engine = engine
        self.batch_size = batch_size

    def __repr__(self) -> str:
        return f"TextGenerator({self.engine!r})"

    @property
    def target(self) -> Target:
        """The frozen model, with its `tokenizer` and `context`."""
        return self.engine.target

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[Messages] | list[list[int]],
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]: ...

    def generate(self, prompt: Any, **options: Unpack[GenerateOptions]) -> Any:
        """Answer a prompt, or each of a list of prompts, in order. options: `GenerateOptions`.

        With a seed, an answer depends neither on the prompts beside it nor on the drafts, and equal
        prompts of a list have different answers. A lossy rule's answers depend on the drafts.
        Raises ValueError, before any computation, for prompts that do not fit the context or that
        template or tokenizer reject.
        """
        is_batch = _is_batch(prompt)
        completions = []
        for growing, batch in self._batches(prompt if is_batch else [prompt], options):
            for steps in batch:
                for growth, step in zip(growing, steps, strict=True):
                    if step is not None:
                        growth.add(step)
            completions += [growth.completion for growth in growing]
        return completions if is_batch else completions[0]

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """`generate` for one prompt: yields pieces of text after each step."""
        if _is_batch(prompt):
            raise ValueError(
                "stream: expected one prompt, got a list of them; stream each, or use generate"
            )
        [growth], steps = next(self._batches([prompt], options))
        return Stream(growth, steps)

    def _batches(
        self, prompts: Sequence[Prompt], options: GenerateOptions
    ) -> Iterator[tuple[list[Growth], Iterator[list[Step | None]]]]:
        """The completions of each batch, and the steps that make them."""
        options = _given(options)
        encoded = [self._encoded(prompt, options) for prompt in prompts]
        stop = options.get("stop", ())
        if isinstance(stop, str):
            stop = (stop,)
        limit = options.get("max_new_tokens")
        # so that a mistake in the last prompt is reported before the first answer
        ids = [Row(self.target, prompt, limit, stop).text for prompt, _ in encoded]
        room = self.target.context
        limits = [min(NEW_TOKENS, room - len(prompt)) if limit is None else limit for prompt in ids]
        rule = self._rule(options)
        schema = options.get("schema")
        constraint = None if schema is None else Grammar(self.target, "json_schema", schema)
        marks = PromptRenderer(self.target, self.target.template_args).marks
        seeds = _row_seeds(rule.draws.new_seed(), ids)
        for start in range(0, len(ids), self.batch_size):
            part = slice(start, start + self.batch_size)
            growing = []
            for prompt, (_, after) in zip(ids[part], encoded[part], strict=True):
                stream = TextStream(  # the continuation of a text has no reasoning
                    self.target.tokenizer, after=after, marks=None if after else marks
                )
                growing.append(Growth(Completion(prompt), AnswerText(stream, stop)))
            steps = self.engine.generate_batch(
                ids[part],
                sampling=rule,
                max_new_tokens=limits[part],
                stop=stop,
                seeds=seeds[part],
                constraint=constraint,
            )
            yield growing, steps

    def _encoded(self, prompt: Prompt, options: GenerateOptions) -> tuple[list[int], Sequence[int]]:
        """Token ids of a prompt, and those whose text the answer continues: none after a chat
        template.
        """
        is_chat = bool(getattr(self.target.tokenizer, "chat_template", None))
        if isinstance(prompt, str):
            is_chat = is_chat and not options.get("raw")
            if is_chat:
                prompt = [{"role": "user", "content": prompt}]
        elif not any(isinstance(each, Mapping) for each in prompt):
            return [*prompt], prompt  # type: ignore[return-value]
        ids = encode_prompt(self.target, prompt, options.get("template_args"))  # type: ignore[arg-type]
        return ids, () if is_chat else ids

    def _rule(self, options: GenerateOptions) -> Acceptance:
        rule = options.get("sampling")
        numbers = [name for name in RULE if name in options]
        if rule is None:
            rule = checked(
                options.get("temperature", 0.0), options.get("top_p", 1.0), options.get("top_k", 0)
            )
        elif numbers:
            raise ValueError(
                f"expected sampling or {', '.join(numbers)}, got both; set the rule's own numbers"
            )
        if "seed" in options:
            rule.seed(options["seed"])
        return rule


def load(
    head: str | Path | None = None,
    target: str | Path | None = None,
    *,
    tree: Tree | str | None = None,
    compile: bool = False,
    **place: Unpack[PlaceOptions],
) -> TextGenerator:
    """Load a target and its drafts by name, as `draftheads chat` does.

    head: a head folder, the folder of a training run, a Hub id, or the name of another drafter
    ("ngram"; all: docs/drafters.md); None: no drafts. target: default: the one that the head
    records, with its LoRA. tree: in place of the head's own, as `--tree` takes it. compile: as of
    `Speculator`. place: `PlaceOptions`.

    Raises ValueError or FileNotFoundError for what cannot be loaded. For loaded parts:
    `TextGenerator(Speculator(target, head))`.
    """
    if head is None and target is None:
        raise ValueError(
            "expected a head or a target, got neither; load('out/qwen') or load(target='MODEL')"
        )
    for part in (head, target):
        if not isinstance(part, str | Path | None):
            raise TypeError(
                f"expected the names of head and target, got {type(part).__name__}; for loaded "
                "parts: TextGenerator(Speculator(target, head))"
            )
    name = None if target is None else str(target)
    model, drafts = load_parts(head, name, Place(**place))
    shape = parse_tree(tree) if isinstance(tree, str) else tree
    return TextGenerator(Speculator(model, drafts, tree=shape, compile=compile))


def _given(options: GenerateOptions) -> GenerateOptions:
    """Options without those that are None. Raises TypeError for unknown ones, ValueError for
    numbers that are none.
    """
    if unknown := options.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(
            f"expected {', '.join(GenerateOptions.__annotations__)}, got "
            f"{', '.join(sorted(unknown))}; leave it out"
        )
    options = {key: value for key, value in options.items() if value is not None}  # type: ignore[assignment]
    for key, (kind, expected) in NUMBERS.items():
        value = options.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{key}: expected {expected}, got {value!r:.40}; or leave it out")
    return options


def _is_batch(prompt: Any) -> bool:
    """Tells a list of prompts from a single prompt. Raises ValueError for anything else."""
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        if all(isinstance(each, str | list | tuple) for each in prompt):
            return True
        if all(isinstance(each, Mapping) or is_whole(each) for each in prompt):
            return False
    raise ValueError(
        "expected a text, messages, token ids, or a list of such, got "
        f"{prompt!r:.80}; messages are {{'role': ..., 'content': ...}}"
    )


def _row_seeds(seed: int, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The seed of each prompt's own random numbers. Equal prompts are counted, so that their seeds
    differ.
    """
    earlier: Counter[str] = Counter()
    seeds = []
    for prompt in prompts:
        digest = hashlib.sha256(repr(prompt).encode()).hexdigest()
        seeds.append(f"{seed}/{digest}/{earlier[digest]}")
        earlier[digest] += 1
    return seeds
