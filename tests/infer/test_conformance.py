"""The promise: whatever decodes, whatever drafts and however its steps are run, each row is what
the target writes token by token, by the same rule and the same numbers.

A case is a combination of five factors. In the gate each mode with each kind of steps meets every
drafter, target and rule, and these meet each other; `-m thorough` has the whole product, with steps
that are traced. `tests/helpers/decoding_modes.py` has an adapter for each mode. The reference has
no loop, cache, tree or mask in common with the engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import cycle, pairwise, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from covering import covering
from decoding_modes import MODES, STEPS, Answers, Manner, Question, row_seeds
from hybrid_targets import HYBRIDS, hybrid_model
from plain_decoding import Place, chosen, until_the_end
from tiny_heads import OF_OTHERS, VARIANTS, random_head
from tiny_targets import (
    CONFIGS,
    MASKLESS,
    OTHER_LOGITS,
    UNEVEN,
    VOCABULARY,
    random_model,
    scaled_up,
    some_prompts,
    tiny_target,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftheads.heads.cpu import linear
from draftheads.heads.cpu.linear import has_int8
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree
from draftheads.infer.accept import Acceptance, Greedy, Sampled
from draftheads.infer.constraint import Constraint
from draftheads.infer.drafters.draft_model import DraftModel
from draftheads.infer.drafters.merged import Merged
from draftheads.infer.drafters.named import named_drafts
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.lossy import Lenient, Typical
from draftheads.infer.paths import TokenPath

LIMIT = 32
"""Tokens up to which LongRoPE has its short factors: some rows begin over it, some cross it."""
COMMONEST = 16
"""The token that the tiny Llama writes most."""
END = 16
"""The token that ends an answer, which some rows write before their limit."""
NEW = 20
SLACK = 1e-3
"""Logits of one forward and of many differ by rounding."""
LAST = 13
"""The token at the end of each prompt: stop strings of transformers may begin there, and ours do
not begin with it.
"""
LIMITS = (NEW, 9, 17, 1, NEW, 1)


@cache
def questions(target: str) -> list[Question]:
    """Rows of several lengths and limits, two of one token; one goes on where the first has
    ended.
    """
    prompts = [(*prompt[:-1], LAST) for prompt in some_prompts(19, 11, 1, 4, 7)]
    first = plain_text(target, "greedy", prompts[0], "")
    prompts.insert(4, (*prompts[0], *first[:5], LAST))
    return [
        Question(prompt, new, number)
        for number, (prompt, new) in enumerate(zip(prompts, LIMITS, strict=True), start=5)
    ]


# targets


def letters() -> PreTrainedTokenizerFast:
    """A token for each letter, for stop strings."""
    alphabet = {chr(ord("a") + token): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [8.0, 30.0, 4.0, 25.0],
    "original_max_position_embeddings": LIMIT,
}


def drawn(name: str, seed: int, **changes: Any) -> Any:
    """A random model of `CONFIGS`, of a seed with which its text does not run in circles."""
    kind, options = CONFIGS[name]
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**{**options, **changes})
    return scaled_up(AutoModelForCausalLM.from_config(config))


def zeros_model() -> Any:
    """A model whose commonest token is 0, with which Medusa pads short paths."""
    model = random_model("llama")
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[[0, COMMONEST]] = weight[[COMMONEST, 0]]
    return model


def with_eager_attention(model: Any) -> Any:
    """The same model with transformers' plainest attention."""
    model.set_attn_implementation("eager")
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: random_model("llama"),
    "window": partial(drawn, "mistral-window", 13),
    "positions": partial(drawn, "gpt2", 12),
    "deep": partial(drawn, "qwen3", 1, num_hidden_layers=6),
    "hybrid": lambda: hybrid_model("qwen3.5"),
    "longrope": partial(
        drawn, "phi3", 11, rope_parameters=LONG_ROPE, original_max_position_embeddings=LIMIT
    ),
    "int8": lambda: random_model("llama"),
    "int8-window": lambda: random_model("gemma3-window"),
    "int8-in-torch": lambda: random_model("llama"),
    "zeros": lambda: zeros_model(),
    "eager-attention": lambda: with_eager_attention(drawn("mistral-window", 13)),
}
OTHER_MODELS: dict[str, Callable[[], Any]] = {
    **{name: partial(random_model, name) for name in {**CONFIGS, **UNEVEN, **MASKLESS}},
    **{name: partial(hybrid_model, name) for name in HYBRIDS},
}
"""The other architectures, each in a few cases."""
BY_LEVEL = ("jamba", "zamba", "kimi-linear", "bailing-hybrid")
"""Their recurrent layers run over a tree level by level."""


@cache
def target_of(name: str) -> Target:
    """A target with an end token and letters."""
    model = {**OTHER_MODELS, **MODELS}[name]()
    model.generation_config.eos_token_id = END
    target = Target(model, letters(), name=name)
    if name.startswith("int8"):
        with mock.patch.object(linear, "LEAST", 0):
            target.pack(8, "torch" if name == "int8-in-torch" else "onnx")
    return target


@cache
def plain_model(name: str) -> Any:
    """The model of a target, as it is without ours; int8 products are ours."""
    if name.startswith("int8"):
        return target_of(name).model
    return {**OTHER_MODELS, **MODELS}[name]().eval()


# drafters

SHORT = NGram(DynamicTree(6, 4, 3), longest=2, shortest=1)


def head(name: str, target: Target) -> Any:
    """A random head, in int8 for such a target."""
    own = {"lm_head": "own"} if target.name in OTHER_LOGITS else {}
    made = random_head(name, target, **own)
    return made.pack(target) if target.bits else made


def nearly(target: Target) -> Target:
    """A model that writes nearly the same; one without recurrent layers for a hybrid."""
    if target.is_hybrid:
        return tiny_target("qwen2")
    model = {**OTHER_MODELS, **MODELS}[target.name]()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.abs().mean(), alpha=0.1)
    return Target(model)


def retrieved(target: Target) -> Any:
    """What the target writes stands in a file, among other things."""
    texts = [
        plain_text(target.name, "greedy", each.prompt, "")[3:]
        for each in questions(target.name)[:3:2]
    ]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text").write_text(target.tokenizer.decode([5, *texts[0], 6, *texts[1]]))
        return named_drafts(f"retrieve:{folder}").load(target)


DRAFTERS: dict[str, Callable[[Target], Any]] = {
    "none": lambda _: None,
    **{kind: partial(head, kind) for kind in ("medusa", "sequential", "eagle3", "block")},
    "ngram": lambda _: SHORT,
    "retrieve": retrieved,
    "merged": lambda target: Merged([head("eagle3", target), SHORT]),
    "model": lambda target: DraftModel(nearly(target), StaticTree.from_widths((2, 2, 1))),
}
OTHER_DRAFTERS: dict[str, Callable[[Target], Any]] = {
    **{name: partial(head, name) for name in [*VARIANTS, *OF_OTHERS] if name not in DRAFTERS},
    "itself": lambda target: DraftModel(target, StaticTree.from_widths((3, 2, 1))),
    "four": lambda target: Merged(
        [
            head("eagle3", target),
            SHORT,
            head("medusa", target),
            DraftModel(tiny_target("qwen2"), StaticTree.from_widths((1, 1, 1, 1))),
        ]
    ),
}
"""Other kinds of these, each in a few cases."""
ON_HOST = ("ngram", "retrieve", "merged", "model", "itself", "four")


@cache
def drafts_of(name: str, target: str) -> Any:
    return {**OTHER_DRAFTERS, **DRAFTERS}[name](target_of(target))


# manners


class Turning(Constraint):
    """Answers in which a token and the next never sum to a multiple of three."""

    def __init__(self, last: int = 0) -> None:
        self.last = last  # token of the prompt

    def row(self, number: int, prompt: Sequence[int]) -> Turning:
        return Turning(prompt[-1])

    def allowed(self, last: int) -> list[int]:
        """The tokens that may follow another."""
        return [token for token in range(VOCABULARY) if (token + last) % 3]

    def after(self, answer: list[int], path: TokenPath, logits_V: torch.Tensor) -> torch.Tensor:
        text = [self.last, *answer, *path]
        assert all(two in self.allowed(one) for one, two in pairwise(text)), "of allowed texts"
        is_forbidden_V = torch.ones_like(logits_V, dtype=torch.bool)
        is_forbidden_V[self.allowed(text[-1])] = False
        return logits_V.masked_fill(is_forbidden_V, -torch.inf)


RULES: dict[str, Callable[[], Acceptance]] = {
    "greedy": Greedy,
    "sampled": lambda: Sampled(0.9, top_p=0.95),
    "typical": lambda: Typical(delta=0.9, temperature=2.0),
    "lenient": lambda: Lenient(gap=2.0),
    "constrained": Greedy,
    "constrained-sampled": lambda: Sampled(1.2, top_k=9),
    "stopped": Greedy,
}
LOSSY = ("typical", "lenient")


def manner_of(rule: str, target: str) -> Manner:
    """A rule with its constraint or stop strings."""
    constraint = Turning() if rule.startswith("constrained") else None
    stop: list[str] = []
    if rule == "stopped":
        for each, least in zip(questions(target)[:3:2], (4, 8), strict=True):
            text = plain_text(target, "greedy", each.prompt, "")
            place = next(n for n in range(least, NEW) if text[n] != LAST)
            stop.append(target_of(target).tokenizer.decode([*text[place : place + 2]]))
    return Manner(RULES[rule], constraint, stop)


# the reference


@cache
def next_logits(target: str, text: tuple[int, ...]) -> Tensor:
    """float32 logits (V,) of the token after a text, of one forward over all of it."""
    with torch.inference_mode():
        out = plain_model(target)(torch.tensor([text]), use_cache=False)
    return out.logits[0, -1].float()


@cache
def plain_text(target: str, rule: str, prompt: tuple[int, ...], seed: str) -> tuple[int, ...]:
    """What a target writes token by token, over its ends."""
    constraint = Turning(prompt[-1]) if rule.startswith("constrained") else None
    answer: tuple[int, ...] = ()
    while len(answer) < NEW:
        logits_V = next_logits(target, (*prompt, *answer))
        if constraint is not None:
            logits_V = constraint.after([*answer], (), logits_V)
        answer = (*answer, chosen(RULES[rule](), logits_V, Place(seed, len(answer))))
    return answer


def plain_answers(case: Case) -> Answers:
    """Those texts as far as their ends."""
    target, manner = target_of(case.target), manner_of(case.rule, case.target)
    rows = questions(case.target)
    return [
        until_the_end(
            plain_text(case.target, case.rule, each.prompt, seed),
            each.new,
            target.eos_ids,
            target.tokenizer,
            manner.stop,
        )
        for each, seed in zip(rows, row_seeds(case.mode, rows), strict=True)
    ]


def answers_alone(case: Case) -> Answers:
    """What a lossy rule writes depends on what is drafted: each row alone, with the same drafts."""
    engine = Speculator(target_of(case.target), drafts_of(case.drafter, case.target))
    rule, rows = RULES[case.rule](), questions(case.target)
    answers = []
    for each, seed in zip(rows, row_seeds(case.mode, rows), strict=True):
        steps = engine.generate_batch(
            [each.prompt], max_new_tokens=each.new, sampling=rule, seeds=[seed]
        )
        answers.append([token for [step] in steps if step for token in step.tokens])
    return answers


def is_near(rule: str, logits_V: Tensor, token: int) -> bool:
    """Whether a lossy rule may keep a token, by the formula of its paper."""
    if rule == "lenient":
        logp_V = logits_V.log_softmax(-1)
        return bool(logp_V[token] >= logp_V.max() - 2.0 - SLACK)
    p_V = (logits_V / 2.0).softmax(-1)
    entropy = -(p_V * p_V.log()).sum()
    least = min(0.09, 0.9 * float((-entropy).exp()))
    return bool(p_V[token] > least - SLACK or p_V[token] == p_V.max())


# cases


class Case(NamedTuple):
    """A value of each factor."""

    steps: str
    mode: str
    target: str
    drafter: str
    rule: str

    @property
    def is_lossy(self) -> bool:
        """Whether its text depends on its drafts."""
        return self.rule in LOSSY and self.drafter != "none"

    @property
    def is_bare(self) -> bool:
        """Whether its requests have neither stop strings nor a constraint."""
        return self.rule != "stopped" and not self.rule.startswith("constrained")


IMPOSSIBLE: dict[str, Callable[[Case], bool]] = {
    "continuous batches take heads or no drafts, as other drafters cannot forget a row": (
        lambda case: case.mode == "continuous" and case.drafter in ON_HOST
    ),
    "requests of continuous batches have neither stop strings nor constraints": (
        lambda case: case.mode == "continuous" and not case.is_bare
    ),
    "without drafts, transformers' generate is its own": (
        lambda case: case.mode == "transformers" and case.drafter == "none"
    ),
    "nothing is compiled for a batch that changes": (
        lambda case: case.mode == "continuous" and case.steps == "traced"
    ),
    "steps of LongRoPE are neither compiled nor replayed, as a warning says": (
        lambda case: case.target == "longrope" and case.steps != "eager"
    ),
    "neither are recurrent layers that run over a tree level by level": (
        lambda case: case.target in BY_LEVEL and case.steps != "eager"
    ),
    "nor layers in ONNX Runtime": (
        lambda case: case.target in ("int8", "int8-window") and case.steps != "eager"
    ),
    "torch has no int8 products for this CPU": (
        lambda case: case.target.startswith("int8") and not has_int8()
    ),
}


def is_possible(values: Sequence[str]) -> bool:
    """Whether a combination is none of the impossible ones."""
    case = Case(*values)
    return not any(is_one(case) for is_one in IMPOSSIBLE.values())


def check(case: Case) -> None:
    """Decode a case, and compare it with the reference."""
    rows = questions(case.target)
    with STEPS[case.steps]() as compiles:
        engine = Speculator(
            target_of(case.target), drafts_of(case.drafter, case.target), compile=compiles
        )
        answers = MODES[case.mode](engine, rows, manner_of(case.rule, case.target))
    if not case.is_lossy:
        assert answers == plain_answers(case), case
        return
    assert answers == answers_alone(case), case
    for question, answer in zip(rows, answers, strict=True):
        for place, token in enumerate(answer):
            logits_V = next_logits(case.target, (*question.prompt, *answer[:place]))
            assert is_near(case.rule, logits_V, token), case


WAYS = [
    *product(("eager", "replayed"), MODES),
    *product(("fixed",), ("generate", "batch", "session")),
]
"""Those of the gate. Tracing takes seconds: test_compiled.py has what is traced there."""


TOGETHER = ("batch", "continuous", "served", "transformers")
"""Modes in which rows are decoded beside others."""


def few(drafters: Sequence[str]) -> Iterator[Case]:
    """Each other architecture in a batch with one of these drafters, in turns as on a CPU and as on
    a GPU; the rest is drawn.
    """
    pairs = zip(OTHER_MODELS, cycle(drafters), strict=False)
    return drawn_cases([*pairs, *product(("llama", "window"), OTHER_DRAFTERS)])


def drawn_cases(pairs: Sequence[tuple[str, str]]) -> Iterator[Case]:
    """A case for each target and drafter."""
    draw = Random(0)
    rules = [rule for rule in RULES if rule != "stopped"]
    for number, pair in enumerate(pairs):
        for steps in (("eager", "replayed")[number % 2], "eager"):
            cases = [Case(steps, mode, *pair, rule) for mode, rule in product(TOGETHER, rules)]
            if possible := [*filter(is_possible, cases)]:
                yield draw.choice(possible)
                break


GATE = [
    *(
        Case(*way, *rest)
        for way, *rest in covering(
            (WAYS, MODELS, DRAFTERS, RULES), lambda values: is_possible((*values[0], *values[1:]))
        )
    ),
    *few(("medusa", "eagle3", "medusa")),
    Case("eager", "transformers", "opt", "medusa", "greedy"),
    Case("eager", "batch", "longrope", "model", "typical"),
    Case("eager", "transformers", "gemma3-window", "medusa", "greedy"),
]


def is_inside(case: Case) -> bool:
    """Whether newer releases of transformers may break it first."""
    return case.mode == "transformers" or case.target in HYBRIDS


@pytest.mark.mend("merged drafters answered a seed differently once a session was reused")
@pytest.mark.mend("a draft model with LongRoPE drafted by the longest row of a batch alone")
@pytest.mark.mend(
    "lossy rules and merged drafters wrote other texts beside other rows, and when recorded"
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(case), marks=[pytest.mark.inside] * is_inside(case))
        for case in GATE
    ],
)
def test_every_row_is_what_the_target_writes_token_by_token(case):
    check(case)


@pytest.mark.parametrize("name", {**DRAFTERS, **OTHER_DRAFTERS})
def test_some_drafts_are_kept_and_others_refused(name):
    """Otherwise the table would say nothing of what is kept."""
    engine = Speculator(target_of("llama"), drafts_of(name, "llama"))
    steps = [
        step
        for row in questions("llama")
        for step in engine.generate(row.prompt, max_new_tokens=row.new)
    ]
    drafted = sum(step.drafted for step in steps)
    kept = sum(max(step.accepted, 0) for step in steps)
    assert (kept == drafted == 0) if name == "none" else (0 < kept < drafted)


@pytest.mark.thorough
@pytest.mark.parametrize("target", MODELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", STEPS)
def test_the_whole_product(steps, mode, target):
    failed = []
    for rest in product(DRAFTERS, RULES):
        if is_possible((steps, mode, target, *rest)):
            try:
                check(Case(steps, mode, target, *rest))
            except AssertionError:
                failed.append(rest)
    assert not failed


@pytest.mark.thorough
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_other_architectures_with_each_drafter(drafter):
    for case in few((drafter,)):
        check(case)
