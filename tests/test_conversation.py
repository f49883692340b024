"""A later turn adds what the chat template puts between answers, and never rewrites an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_chat import (
    CONTEXT,
    END,
    TEMPLATE,
    byte_tokenizer,
    llama,
    prompts,
)
from tokenizers import processors
from transformers import AutoTokenizer

from draftheads.heads.target import Target
from draftheads.train.data.conversation import REWRITTEN, Conversation, Renderer
from draftheads.train.data.prompts import Prompt

DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="module")
def target() -> Target:
    return llama()


def test_turns_stand_together_as_the_template_writes_them(target: Target) -> None:
    renderer = Renderer(target, {})
    asked = ({"role": "system", "content": "S"}, {"role": "user", "content": "A"})
    asked += ({"role": "user", "content": "B"},)
    conversation = Conversation(Prompt(0, messages=asked), renderer, CONTEXT, None)
    answers = [[*target.tokenizer("yes")["input_ids"], END], target.tokenizer("no")["input_ids"]]
    for ids in answers:  # the first one ended by itself, the second one was cut
        assert conversation.ask()
        conversation.answer(ids)
    assert not conversation.ask()
    assert target.tokenizer.decode(conversation.tokens) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\nno"
    )


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data folder at {DATA}")
@pytest.mark.parametrize(
    ("template", "turns"),
    [
        ("trl/qwen2_5", 2),
        ("trl/qwen3", 2),
        ("trl/qwen3_5_think", 1),
        ("llama.cpp/Qwen-QwQ-32B", 1),
        ("chujiezheng/chatml", 1),  # rendered raw it inserts blank lines
    ],
)
def test_real_templates(target: Target, template: str, turns: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizers/qwen2.5")
    tokenizer.chat_template = (DATA / f"chat-templates/{template}.jinja").read_text()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    asking = Target(target.model, tokenizer, name="qwen")
    asking.eos_ids = (end,)
    messages = tuple({"role": "user", "content": content} for content in ("Hello.", "And now?"))
    conversation = Conversation(Prompt(0, messages=messages), Renderer(asking, {}), 10_000, None)
    while conversation.ask():
        conversation.answer([*tokenizer("Fine.")["input_ids"], end])
    record = conversation.record((end,))
    assert record["turns"] == turns
    if turns == 1:
        assert record["stopped"] == REWRITTEN
        return
    answer = {"role": "assistant", "content": "Fine."}
    whole = tokenizer.apply_chat_template(
        [messages[0], answer, messages[1]], add_generation_prompt=True
    )["input_ids"]
    assert record["tokens"][: record["learn"][-1][0]] == whole


def test_answer_that_the_template_would_rewrite_stops_the_conversation(target: Target) -> None:
    stripping = TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]")
    thinking = TEMPLATE.replace("assistant\n", "assistant\n<think>\n")  # in the open turn only
    for template, answer, kept in (
        (stripping, "plain", True),
        (stripping, "<think>hm</think>so", False),
        (thinking, "plain", False),
    ):
        asking = Target(target.model, byte_tokenizer(template), name="t")
        conversation = Conversation(prompts(1, turns=2)[0], Renderer(asking, {}), CONTEXT, None)
        assert conversation.ask()
        conversation.answer([*target.tokenizer(answer)["input_ids"], END])
        assert conversation.ask() is kept
        assert (conversation.outcome == {"stopped": REWRITTEN}) is not kept


def test_without_chat_template_contents_are_joined_by_newlines() -> None:
    target = llama(template=None)
    messages = tuple({"role": role, "content": role} for role in ("system", "user", "user"))
    conversation = Conversation(Prompt(0, messages=messages), Renderer(target, {}), CONTEXT, None)
    assert conversation.ask()
    assert target.tokenizer.decode(conversation.tokens) == "system\nuser"
    conversation.answer(target.tokenizer("yes")["input_ids"])
    assert conversation.ask()
    assert target.tokenizer.decode(conversation.tokens) == "system\nuseryes\nuser"


def test_end_token_that_the_tokenizer_adds_is_left_out() -> None:
    target = llama(template=None)
    backend = target.tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 256), ("<|im_end|>", END)]
    )
    for text in ("some text", "ends with an end token: <|im_end|>"):
        conversation = Conversation(Prompt(0, text=text), Renderer(target, {}), CONTEXT, None)
        assert conversation.ask()
        assert target.tokenizer.decode(conversation.tokens) == "<s>" + text
