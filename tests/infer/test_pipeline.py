"""The promise: text in, text out: answers are those of the engine, whole or streamed, alone or in a
batch, and their statistics are true.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from reciting import CHARACTERS, saved_target
from tiny_chat import llama
from tiny_heads import new_head, random_head

import draftheads
from draftheads.heads import Target, save_head
from draftheads.infer import (
    NGram,
    Sampled,
    Speculator,
    TextGenerator,
    encode_prompt,
    load,
)

QUESTIONS = ["What is it?", "Why?", "And how does one do that?"]
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def target() -> Target:
    """A chat model with one token per byte."""
    return llama()


@pytest.fixture(scope="module")
def model(target) -> TextGenerator:
    return TextGenerator(Speculator(target, random_head("sequential", target)))


def expected(target: Target, prompt, **options) -> tuple[list[int], str]:
    """Tokens and text of the plain model, as the engine's own loop and decoder have them."""
    ids = encode_prompt(target, prompt)
    steps = list(Speculator(target).generate(ids, max_new_tokens=NEW_TOKENS, **options))
    tokens = [token for step in steps for token in step.tokens]
    text = tokens[:-1] if tokens[-1] in target.eos_ids else tokens
    return tokens, target.tokenizer.decode(text, skip_special_tokens=True)


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_as_in_a_chat(model, target, question):
    tokens, text = expected(target, chat(question))
    for prompt in (question, chat(question), encode_prompt(target, chat(question))):
        answer = model.generate(prompt, max_new_tokens=NEW_TOKENS)
        assert answer.token_ids == tokens
        assert str(answer) == answer.text == text


def test_a_text_is_continued_raw_and_where_there_is_no_template(model, target):
    tokens, _ = expected(target, "Why?")
    assert model.generate("Why?", raw=True, max_new_tokens=NEW_TOKENS).token_ids == tokens
    plain = TextGenerator(Speculator(llama(template=None)))
    assert plain.generate("Why?", max_new_tokens=NEW_TOKENS).token_ids == tokens


def test_a_stream_is_the_answer_in_pieces(model):
    answer = model.generate("Why?", max_new_tokens=NEW_TOKENS)
    stream = model.stream("Why?", max_new_tokens=NEW_TOKENS)
    pieces = list(stream)
    assert len(pieces) > 1 and "".join(pieces) == answer.text
    assert stream.completion.token_ids == answer.token_ids


def test_a_list_of_prompts_is_a_list_of_answers(target):
    """In any size of batch, greedy and sampled with a seed."""
    alone = TextGenerator(Speculator(target), batch_size=1)
    together = TextGenerator(Speculator(target, random_head("medusa", target)), batch_size=2)
    for options in ({}, {"temperature": 0.9, "seed": 3}):
        texts = [str(a) for a in alone.generate(QUESTIONS, max_new_tokens=NEW_TOKENS, **options)]
        assert texts == [
            str(a) for a in together.generate(QUESTIONS, max_new_tokens=NEW_TOKENS, **options)
        ]
    same = alone.generate(["Why?"] * 3, temperature=1.0, seed=1, max_new_tokens=NEW_TOKENS)
    assert len({answer.text for answer in same}) == 3, "each has draws of its own"
    assert alone.generate([]) == []


@pytest.mark.mend("answers of a list were cut by its longest prompt")
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_an_answer_is_cut_by_its_own_prompt_alone(options):
    """Not by the longest beside it."""
    target = llama(template=None)
    target.eos_ids = ()
    model, long = TextGenerator(Speculator(target)), [65] * (target.context - 3)
    alone = model.generate([66], **options)
    both = model.generate([[66], long], **options)
    assert [answer.tokens for answer in both] == [target.context - 1, 3]
    assert both[0].token_ids == alone.token_ids


def test_a_seed_decides_whatever_drafts_and_torchs_seed_does_without_one(model, target):
    options = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "top_k": 50}
    engines = (Speculator(target), Speculator(target, NGram()), model.engine)
    texts = {TextGenerator(each).generate("Why?", seed=5, **options).text for each in engines}
    assert len(texts) == 1
    assert model.generate("Why?", seed=6, **options).text not in texts
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append([model.generate("Why?", **options).text for _ in range(2)])
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


def test_one_token_to_keep_is_the_greedy_one(model):
    greedy = model.generate("Why?", max_new_tokens=NEW_TOKENS).token_ids
    for options in ({"top_k": 1}, {"top_p": 0.0}):
        answer = model.generate("Why?", temperature=1.0, max_new_tokens=NEW_TOKENS, **options)
        assert answer.token_ids == greedy


def test_statistics_add_up(model):
    answer = model.generate("Why?", max_new_tokens=NEW_TOKENS)
    assert answer.tokens == len(answer.token_ids) <= NEW_TOKENS
    assert answer.finish in ("eos", "length")
    drafted = sum(max(step.accepted, 0) for step in answer.steps)
    assert answer.draft_share == pytest.approx(drafted / answer.tokens)
    assert 1 <= answer.tokens_per_step == answer.statistics.tokens_per_step
    assert answer.tokens_per_second == pytest.approx(answer.tokens / answer.seconds)


def test_a_rule_of_ones_own(model, target):
    """Its seed repeats an answer, as that of its numbers does; also beside another prompt."""
    rule, options = Sampled(temperature=0.8), {"seed": 5, "max_new_tokens": NEW_TOKENS}
    texts = {model.generate("Why?", sampling=rule, **options).text for _ in range(2)}
    other, answer = model.generate(["When?", "Why?"], sampling=rule, **options)
    assert texts == {answer.text} != {other.text}
    assert texts == {model.generate("Why?", temperature=0.8, **options).text}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A head and its target, whose tokens are not pieces of text, on disk."""
    target = saved_target(tmp_path / "target")
    save_head(random_head("medusa", target, depth=2), tmp_path / "head", target=target)
    return tmp_path


@pytest.mark.parametrize("head", ["head", "ngram", None])
def test_by_name_it_is_what_the_command_line_loads(folder, head):
    """Spaces and characters of several bytes stay whole, in pieces, too."""
    name = str(folder / "head") if head == "head" else head
    model = draftheads.load(name, folder / "target")
    decode = partial(model.target.tokenizer.decode, skip_special_tokens=True)
    inputs = model.target.tokenizer("Once upon a time", return_tensors="pt")
    ids = model.target.model.generate(**inputs, max_new_tokens=30, do_sample=False)
    answer = model.generate("Once upon a time", max_new_tokens=30)
    assert decode(inputs["input_ids"][0]) + answer.text == decode(ids[0])
    assert "".join(model.stream("Once upon a time", max_new_tokens=30)) == answer.text


def test_characters_of_several_tokens_come_whole_and_a_stop_string_not_at_all(folder):
    """Token ids, for a tokenizer that makes no words of a text: Once upon a time."""
    model, once = load(folder / "head"), [2, 3, 4, 5]
    stream = model.stream(once, max_new_tokens=60)
    pieces = list(stream)
    recital = f" there was ,Lily{CHARACTERS}"
    assert "".join(pieces) == stream.completion.text and stream.completion.text.startswith(recital)
    assert all(pieces) and not any("\N{REPLACEMENT CHARACTER}" in each for each in pieces[:-1])
    for stop in ("Lily", ["never", "Lily"]):
        answers = model.generate([once, once[:2]], stop=stop, max_new_tokens=60)
        assert [each.text for each in answers] == [" there was ,", " a time there was ,"]
        assert {each.finish for each in answers} == {"stop"}
        assert "".join(model.stream(once, stop=stop, max_new_tokens=60)) == " there was ,"


def test_a_default_length_fits_the_context(folder):
    model = load(target=folder / "target")
    answer = model.generate([2, 3])
    assert len(answer.prompt_ids) + answer.tokens == model.target.context


def test_a_target_that_fails_says_so(monkeypatch):
    model = TextGenerator(Speculator(llama()))
    weight = model.target.model.lm_head.weight
    monkeypatch.setattr(weight, "data", torch.full_like(weight, torch.nan))
    with pytest.raises(RuntimeError, match="logits are not finite"):
        model.generate("Why?")


def test_the_heads_target_is_the_default(folder):
    assert (
        load(folder / "head").target.fingerprint()
        == load(target=folder / "target").target.fingerprint()
    )


@pytest.mark.mend("None for an option, or template variables that are none, ended in a TypeError")
def test_options_that_are_none_are_left_out(model):
    options = ("stop", "seed", "temperature", "sampling", "template_args", "max_new_tokens")
    answer = model.generate("Why?", **dict.fromkeys(options))
    assert answer.token_ids == model.generate("Why?").token_ids
    for variables in ([1], {"tokenize": True}, {"messages": []}):
        with pytest.raises(ValueError, match="expected (a JSON object|variables of the chat)"):
            model.generate("Why?", template_args=variables)


def test_facades_show_what_they_offer():
    """dir() and help() begin with an example."""
    assert {"load", "heads", "infer", "train"} <= {*dir(draftheads)}
    for part in (draftheads.heads, draftheads.infer, draftheads.train):
        assert "from draftheads." in (part.__doc__ or "")
        assert dir(part) == sorted(part.__all__)
        for name in part.__all__:
            assert getattr(part, name) is not None


@pytest.mark.mend("a target or an engine was printed as an address, a head in 40 lines")
@pytest.mark.parametrize("kind", draftheads.heads.HEADS)
def test_what_is_printed_says_target_head_and_tree_in_one_line(target, kind):
    engine = Speculator(target, new_head(kind, target))
    shown = repr(TextGenerator(engine))
    assert "\n" not in shown
    for part in ("'tiny-llama', 2 layers, hidden size 32, float32, cpu", "Head(", "Tree("):
        assert part in shown
    assert "8 draft nodes, depth 2" in shown or "draft_nodes=8, depth=8" in shown
    assert "Linear(" in str(engine.drafts)  # print shows its layers, as of any module
