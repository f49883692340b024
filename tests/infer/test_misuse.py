"""The promise: what a Python caller gets wrong is one line (expected, got, next step), before
anything runs. The same for commands: tests/cli; for requests: `test_server`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_laws import six_words
from reciting import reciting_model
from tiny_chat import byte_tokenizer, llama, saved
from tiny_heads import random_head
from tiny_targets import CONTEXT, VOCABULARY, random_model, some_prompts, tiny_target
from transformers import LogitsProcessorList

from draftheads.heads.formats.hub import HEADS, save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer import NGram, Sampled, Speculator, TextGenerator, load
from draftheads.infer.accept import Greedy
from draftheads.infer.continuous import answer_all
from draftheads.infer.costs import NONE, fitted_costs
from draftheads.infer.drafters.draft_model import DraftModel
from draftheads.infer.drafters.merged import Merged
from draftheads.infer.generate import Processed, speculative
from draftheads.infer.lossy import Lenient, Typical
from draftheads.infer.measure.bench import BenchOptions, bench
from draftheads.infer.measure.tune import TuneOptions, tune
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.rows import Step
from draftheads.infer.turns import TimedRun
from draftheads.scripts.options import parsed_template_args
from draftheads.train import fit

CHAIN = StaticTree.from_widths((1, 1, 1, 1))
NAN, INFINITE = float("nan"), float("inf")
Row = tuple[Callable[[], Any], str]


@cache
def engine() -> Speculator:
    return Speculator(tiny_target())


@cache
def model() -> TextGenerator:
    target = llama()
    return TextGenerator(Speculator(target, random_head("sequential", target)))


def generate(prompt: Any = (3,), **options: Any) -> Callable[[], Any]:
    return lambda: engine().generate(prompt, **{"max_new_tokens": 4, **options})


def answer(prompt: Any = "Why?", **options: Any) -> Callable[[], Any]:
    return lambda: model().generate(prompt, **options)


def question(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def bytes_target(*more: str) -> Target:
    """With another vocabulary, if it has more words."""
    model, tokenizer = random_model("llama"), byte_tokenizer()
    model.resize_token_embeddings(259, mean_resizing=False)
    tokenizer.add_tokens([*more])
    return Target(model, tokenizer, name="-".join(["bytes", *more]))


def decode_with_a_head_of(kind: str, **sizes: int) -> None:
    """Of another target; it was never in a folder."""
    head = random_head(kind, tiny_target("gpt2"))
    vars(head).update(sizes)
    next(Speculator(tiny_target(), head).generate([3], max_new_tokens=4))


def decode_with_a_head_on_meta(kind: str) -> None:
    head = random_head(kind, tiny_target()).to("meta")
    next(Speculator(tiny_target(), head).generate([3], max_new_tokens=4))


def bench_of(*lengths: int, heads: Any = (), **choices: Any) -> Callable[[], Any]:
    options = BenchOptions(max_new_tokens=9, **choices)
    return lambda: bench(tiny_target(), dict(heads), some_prompts(*lengths), options)


def tune_with_one_prompt() -> None:
    options = TuneOptions(max_new_tokens=12, nodes=8)
    tune(tiny_target(), random_head("medusa", tiny_target()), some_prompts(5), options)


def encode(tokenizer: Any, prompt: Any) -> Callable[[], Any]:
    target = Target(tiny_target().model, tokenizer)
    return lambda: encode_prompt(target, prompt)


def each(call: Callable[[Any], Any], values: Iterable[Any], words: str) -> list[Row]:
    """A row for each wrong value of one call; {} in the words: the value."""
    return [(partial(call, value), words.format(value)) for value in values]


IDS = f"expected token ids from 0 to {VOCABULARY - 1}, got "
STOP = "stop: expected a list of non-empty strings, got "
NO_TARGET = "^expected a Target, got .*Target.load"
NO_HEADS = "^expected draft heads.*got .*load"
NO_LISTS = [
    *[b"abc", bytearray(b"a"), "abc", {3: 4}, {3}, None, 3, iter([3]), (i for i in (3, 4))],
    *[[True], [[3]], torch.tensor([[3]])],
]
CLASSES = (NGram, DraftModel, MedusaHead)
ROWS: dict[str, list[Row]] = {
    "prompts": [
        (generate([], max_new_tokens=5), f"has 0 tokens, expected 1 to {CONTEXT - 1}"),
        (generate([3] * CONTEXT), f"has {CONTEXT} tokens, expected 1 to {CONTEXT - 1} .*tiny-llam"),
        *(
            (generate([3, strange, 4]), f"ids from 0 to {VOCABULARY - 1}, got {strange!r}")
            for strange in (-1, VOCABULARY, 1 << 70, 2.5, None, "3")
        ),
        *((generate(strange), IDS) for strange in NO_LISTS),
        *each(lambda strange: engine().generate_batch([[3], strange]), NO_LISTS, IDS),
        (lambda: engine().generate_batch([]), "^prompts: expected at least one, got none$"),
        *(
            (answer(prompt), "expected a text, messages, token ids, or a list")
            for prompt in (3, [True, False], b"abc", bytearray(b"abc"))
        ),
        (answer(["Why?", question("Why?"), 7]), "expected a text, messages, token ids"),
        (answer(["Why?", "x" * 1000]), "the prompt has .* tokens, expected 1 to"),
        (answer([[]]), "the prompt has 0 tokens, expected 1 to"),
        (lambda: model().stream(["What is it?", "Why?"]), "stream: expected one prompt"),
        (encode(None, "Hi"), "expected a tokenizer next to the model, .* or pass token ids"),
        (encode(byte_tokenizer(), ""), "prompt is empty"),
        (encode(byte_tokenizer(template=None), question("")), "prompt is empty"),
    ],
    "lengths": [
        (generate([3] * (CONTEXT - 9), max_new_tokens=10), "expected 1 to 9, got 10"),
        (generate([3] * 5, max_new_tokens=0), f"expected 1 to {CONTEXT - 5}, got 0"),
        *(
            (generate(max_new_tokens=new), "max_new_tokens: expected 1 to")
            for new in (-1, 2.5, NAN, "5", True)
        ),
        (answer(max_new_tokens=0), "max_new_tokens: expected 1 to"),
        (answer(max_new_tokens=True), "max_new_tokens: expected an integer, got True"),
        (answer(max_new_tokens=1.5), "max_new_tokens: expected an integer, got 1.5"),
    ],
    "stop strings": [
        *((answer(stop=stop), STOP) for stop in ("", True, [5], ["a", ""], [None])),
        (generate(stop=["x"]), "^stop strings need a tokenizer, this target has none; leave"),
        *each(
            lambda stop: model().engine.generate([3], stop=stop), ("word", ["a", ""], [None]), STOP
        ),
    ],
    "rules": [
        (generate(sampling=Sampled), r"^sampling: expected a rule, such as Greedy\(\)"),
        (generate(sampling=0.7), r"^sampling: expected a rule, such as Greedy\(\)"),
        *each(lambda rule: rule(temperature=0.0), (Sampled, Typical), "the rule Greedy in Python"),
        *each(Sampled, (-1.0, 1e-44, NAN, INFINITE), "temperature {}.*expected"),
        *each(
            lambda heat: Typical(temperature=heat),
            (-1.0, 1e-44, NAN, INFINITE),
            "temperature {}.*expected",
        ),
        *each(lambda p: Sampled(top_p=p), (7, -0.1, NAN, INFINITE), "top_p {}.*expected"),
        *each(lambda k: Sampled(top_k=k), (-5, 2.5, NAN), "top_k {}.*expected"),
        *each(lambda epsilon: Typical(epsilon=epsilon), (-0.1, 2.0, NAN), "epsilon {}.*expected"),
        *each(lambda delta: Typical(delta=delta), (-0.1, NAN, INFINITE), "delta {}.*expected"),
        *each(
            lambda values: Lenient(**values),
            ({}, {"top": -1}, {"gap": -0.5}, {"surprise": NAN}),
            "lenient: expected top of 1 or more, or gap",
        ),
        (lambda: Sampled("1"), "^temperature '1': expected above 0"),
        (lambda: Sampled(1.0, None), "^top_p None: expected 0 to 1"),
        (answer(temperature=-1), "temperature -1: expected above 0"),
        (answer(temperature=1.0, top_p=2), "top_p 2: expected 0 to 1"),
        (answer(temperature=1.0, sampling=Sampled()), "expected sampling or temperature, got both"),
        (answer(temperature=True), "temperature: expected a number, got True"),
        (answer(temperature="1"), "temperature: expected a number, got '1'"),
        (answer(temperature=1.0, top_k=True), "top_k: expected an integer, got True"),
        (answer(temperature=1.0, top_p=True), "top_p: expected a number, got True"),
        (answer(temperature=1.0, seed=True), "seed: expected an integer, got True"),
    ],
    "engines": [
        *each(Speculator, (random_model("llama"), "llama"), NO_TARGET),
        *each(DraftModel, (random_model("llama"), "llama"), NO_TARGET),
        (
            lambda: Speculator(tiny_target(), NGram(), tree="4,2"),
            "^tree: expected one of parse_tree or none, got '4,2'",
        ),
        (
            lambda: TextGenerator(tiny_target()),
            "^expected a Speculator, got Target.*TextGenerator.Speculator",
        ),
        *each(
            lambda size: TextGenerator(model().engine, batch_size=size),
            ("2", 0),
            "^batch_size: expected 1 or more, got '?{}",
        ),
        (answer(max_tokens=3), "got max_tokens"),
        (lambda: fit("recipe.yaml"), "^expected a Recipe, as of load_recipe, got 'recipe.yaml'"),
    ],
    "drafts": [
        *each(lambda kind: Speculator(tiny_target(), kind), CLASSES, NO_HEADS),
        *each(lambda kind: Merged([NGram(), kind]), CLASSES, NO_HEADS),
        *each(speculative, CLASSES, NO_HEADS),
        (lambda: Merged([]), r"^expected draft heads and other .*, got \(\)"),
        *each(
            speculative,
            (3, None, "", [], b"out/heads"),
            "^expected draft heads, .* got .*; give a head folder",
        ),
        *each(
            lambda no: Speculator(tiny_target(), no),
            (3, "out/heads", []),
            "^expected draft heads, .*; load_head and load_pair",
        ),
        *each(
            lambda kind: decode_with_a_head_of(kind, hidden_size=48),
            HEADS,
            "^head expects .* 48 .*target has .*; pass the",
        ),
        *each(
            lambda kind: decode_with_a_head_of(kind, vocab_size=23),
            HEADS,
            "^head expects .* 23 .*target has .*; pass the",
        ),
        *each(
            decode_with_a_head_on_meta,
            ("medusa", "eagle3"),
            "expected heads on cpu, .*, got meta; use",
        ),
        (lambda: NGram(longest=1), "expected 1 <= shortest <= longest, got 2 and 1"),
        (lambda: Speculator(tiny_target(), NGram(), tree=CHAIN), "got a fixed tree; use one like"),
        (lambda: Speculator(tiny_target(), Merged([NGram()]), tree=CHAIN), "got a fixed tree"),
        (
            lambda: DraftModel(tiny_target()).check_tree(StaticTree.from_widths((VOCABULARY + 1,))),
            "knows only 19",
        ),
        (
            lambda: DraftModel(six_words("gpt2")).drafter(tiny_target()),
            "expected the vocabulary of tiny-llama, got another",
        ),
        (
            lambda: DraftModel(bytes_target("more")).drafter(bytes_target()),
            "draft model bytes-more: expected the vocabulary of bytes, got another",
        ),
        (
            lambda: next(answer_all(Speculator(tiny_target(), NGram()), Greedy(), 4, list)),
            "expected draft heads or none, got other drafts",
        ),
    ],
    "measurements": [
        (bench_of(CONTEXT), "shorter than the context"),
        (bench_of(), "shorter than the context"),
        (bench_of(3, heads={"plain": None}), "reserved for a baseline; rename"),
        (bench_of(3, sampling=Processed(LogitsProcessorList(), False)), "as_generate"),
        (tune_with_one_prompt, "two or more prompts"),
        (
            lambda: fitted_costs({NONE: [TimedRun([Step([1], -1, "eos", 0.0, 1.0)], 1.0)]}),
            "answers of several tokens",
        ),
    ],
    "template variables": [
        (partial(parsed_template_args, ""), "^--template-args: .*expected a JSON object, got ''"),
        (partial(parsed_template_args, "[1]"), "^--template-args: .*expected a JSON object"),
        (partial(parsed_template_args, '{"messages": []}'), "got messages, which is always set"),
        (
            partial(parsed_template_args, '{"return_tensors": "pt", "padding": true}'),
            "got padding, return_tensors, which is",
        ),
        (
            partial(parsed_template_args, '{"continue_final_message": true}'),
            "^--template-args: .*continue_final_message",
        ),
    ],
}


@pytest.mark.mend("truth values, bytes and generators as token ids")
@pytest.mark.mend("tracebacks for no prompts, the class of a rule, a model in place of a Target")
@pytest.mark.mend("NGram in place of NGram()")
@pytest.mark.mend("IndexError for a head of another target")
@pytest.mark.mend("a head on the CPU and its target on a GPU failed somewhere inside torch")
@pytest.mark.mend("True and words as numbers")
@pytest.mark.mend(
    'TextGenerator(target), fit("recipe.yaml"), tree="4,2", bench without repetitions: errors '
    "of attributes and divisions"
)
@pytest.mark.parametrize("journey", ROWS)
def test_a_mistake_is_one_line_before_anything_runs(journey):
    for call, words in ROWS[journey]:
        with pytest.raises((TypeError, ValueError), match=words) as refusal:
            call()
        assert "\n" not in str(refusal.value), words


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target and a head for it."""
    folder, target = tmp_path_factory.mktemp("named"), llama()
    saved(target, folder / "target")
    reciting_model(40).save_pretrained(folder / "either")
    save_head(random_head("medusa", target), folder / "head", target=target)
    return folder


@pytest.mark.mend('dtype="fp16" was answered with: download it again; bits="8" was ignored')
@pytest.mark.mend("load(MODEL) named an option that Python has not")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected a head or a target, got neither"),
        ({"head": lambda: Path("nothing"), "target": "target"}, "nothing"),
        ({"head": "target"}, "expected a head, got a whole model; pass it as --target"),
        ({"head": "either"}, r"pass it \(target=NAME, .*; if this is a model, it is"),
        ({"head": lambda: engine().target}, r"TextGenerator\(Speculator"),
        ({"dtype": "fp16"}, "dtype: expected auto, float32, bfloat16, float16, got 'fp16'"),
        ({"bits": "8"}, "bits: expected 4 or 8, got '8'"),
        ({"bits": True}, "bits: expected 4 or 8, got True"),
        ({"threads": True}, "threads: expected 1 or more, got True"),
        ({"threads": "2"}, "threads: expected 1 or more, got '2'"),
        ({"threads": 0}, "threads: expected 1 or more, got 0"),
    ],
)
def test_what_cannot_be_loaded_is_named(folder, given, message):
    if given and not {"head", "target"} & {*given}:
        given = {"target": "target", "threads": 1, **given}
    for name in {"head", "target"} & {*given}:
        place = given[name]
        given = {**given, name: place() if callable(place) else folder / place}
    with pytest.raises((FileNotFoundError, TypeError, ValueError), match=message) as refused:
        load(**given)
    assert "download" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mtp:two", "expected a number of tokens, .* got 'two'"),
        ("model:{}/target", "expected the vocabulary of .*, got another; "),
        ("nothing+ngram", "head nothing: expected a head, got nothing"),
        ("ngrams", "head ngrams: expected a head, got nothing"),
    ],
)
def test_bad_names_of_drafts_are_refused_inside_generate(name, message, folder):
    decoding = speculative(name.format(folder))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refusal:
        random_model("llama").generate(
            torch.tensor([[3]]), max_new_tokens=4, custom_generate=decoding
        )
    assert "\n" not in str(refusal.value)
