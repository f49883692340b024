"""A later turn adds what the template puts between answers; each is learned as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_chat import (
    CONTEXT,
    END,
    TEMPLATE,
    byte_tokenizer,
    llama,
)
from tokenizers import processors
from transformers import AutoTokenizer

from draftheads.heads.target import Target
from draftheads.train.data.conversation import ONLY_REASONING, Conversation, Renderer, TextSide
from draftheads.train.data.prompts import Prompt
from draftheads.train.data.shards import documents_of

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def target() -> Target:
    return llama()


def test_turns_stand_together_as_the_template_writes_them(target: Target) -> None:
    renderer = Renderer(target, {})
    asked = ({"role": "system", "content": "S"}, {"role": "user", "content": "A"})
    asked += ({"role": "user", "content": "B"},)
    conversation = Conversation(Prompt(0, messages=asked), renderer, CONTEXT)
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
    ("template", "answer", "documents"),
    [
        ("trl/qwen2_5", "Fine.", 1),
        ("trl/qwen3", "Fine.", 1),
        ("trl/qwen3", "<think>\nHm.\n</think>\n\nFine.", 2),
        ("trl/qwen3_5_think", "Hm.\n</think>\n\nFine.", 2),
        ("llama.cpp/Qwen-QwQ-32B", "Hm.\n</think>\n\nFine.", 2),
        ("chujiezheng/chatml", "Fine.", 2),  # rendered raw it inserts blank lines
    ],
)
def test_real_templates(target: Target, template: str, answer: str, documents: int) -> None:
    """The second answer stands behind what a chat sends."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizers/qwen2.5")
    tokenizer.chat_template = (DATA / f"chat-templates/{template}.jinja").read_text()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    asking = Target(target.model, tokenizer, name="qwen")
    asking.eos_ids = (end,)
    messages = tuple({"role": "user", "content": content} for content in ("Hello.", "And now?"))
    conversation = Conversation(Prompt(0, messages=messages), Renderer(asking, {}), 10_000)
    while conversation.ask():
        conversation.answer([*tokenizer(answer)["input_ids"], end])
    record = conversation.record()
    found = documents_of(record)
    assert len(found) == documents and sum(document["turns"] for document in found) == 2
    said = {"role": "assistant", "content": answer}
    chat = [messages[0], said, messages[1]]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert found[-1]["tokens"][: found[-1]["learn"][-1][0]] == whole


STRIPPING = TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]")
OPENING = STRIPPING.replace("assistant\n", "assistant\n<think>")  # in the open turn only


def told(template: str, *answers: str, **choices: Any) -> tuple[dict[str, Any], list[list[str]]]:
    """The record of a conversation with these answers, and what is learned from each document,
    with the text before it.
    """
    side = TextSide("t", byte_tokenizer(template), (END,))
    messages = tuple({"role": "user", "content": f"Q{n}"} for n in range(len(answers)))
    asking = Prompt(0, messages=messages)
    conversation = Conversation(asking, Renderer(side, {}), 10_000, **choices)
    for answer in answers:
        assert conversation.ask()
        conversation.answer([*side.tokenizer(answer)["input_ids"], END])
    assert not conversation.ask() and not conversation.outcome
    record = conversation.record()
    texts = []
    for document in documents_of(record):
        at, pieces = 0, []
        for start, stop in document["learn"]:
            pieces += [document["tokens"][at:start], document["tokens"][start:stop]]
            at = stop
        assert at == len(document["tokens"])
        texts.append([side.tokenizer.decode(piece).replace("<|im_end|>", "|") for piece in pieces])
    short = {"<|im_start|>user\n": "U:", "<|im_start|>assistant\n": "A:", "|\n": "|"}
    for old, new in short.items():
        texts = [[text.replace(old, new) for text in document] for document in texts]
    return record, texts


def test_answer_behind_rewritten_turns_stands_in_a_document_of_its_own() -> None:
    record, texts = told(STRIPPING, "a", "<think>hm</think>b", "c", "d", "<think>hm</think>e")
    assert texts == [
        ["U:Q0|A:", "a|", "\nU:Q1|A:", "<think>hm</think>b|"],
        ["U:Q0|A:a|U:Q1|A:b|U:Q2|A:", "c|", "\nU:Q3|A:", "d|", "\nU:Q4|A:", "<think>hm</think>e|"],
    ]
    assert [document["turns"] for document in record["documents"]] == [2, 3]
    assert set(record) == {"id", "documents"}
    _, texts = told(OPENING, "hm</think>a", "hm</think>b", "c")
    assert texts == [
        ["U:Q0|A:<think>", "hm</think>a|"],
        ["U:Q0|A:a|U:Q1|A:<think>", "hm</think>b|"],
        ["U:Q0|A:a|U:Q1|A:b|U:Q2|A:<think>", "c|"],
    ]


def test_history_that_changes_later_is_not_gone_on_with() -> None:
    """The thoughts of the last answer alone stand in brackets."""
    brackets = "m['content'].replace('<think>', '(').replace('</think>', ')')"
    last = (
        f"{brackets} if loop.index0 == messages|length - 2 else m['content'].split('</think>')[-1]"
    )
    _, texts = told(TEMPLATE.replace("m['content']", last), "<think>hm</think>a", "b", "c", "d")
    assert texts == [
        ["U:Q0|A:", "<think>hm</think>a|"],
        ["U:Q0|A:(hm)a|U:Q1|A:", "b|"],
        ["U:Q0|A:a|U:Q1|A:b|U:Q2|A:", "c|", "\nU:Q3|A:", "d|"],
    ]


def test_thoughts_are_learned_or_stay_as_context() -> None:
    answers = ["<think>hm</think>a", "b</think>", "<think>endless"]
    assert told(TEMPLATE, *answers)[1] == [
        [
            "U:Q0|A:",
            "<think>hm</think>a|",
            "\nU:Q1|A:",
            "b</think>|",
            "\nU:Q2|A:",
            "<think>endless|",
        ]
    ]
    record, texts = told(TEMPLATE, *answers, reasoning="drop")
    assert texts == [["U:Q0|A:<think>hm</think>", "a|", "\nU:Q1|A:", "b</think>|"]]
    assert record["turns"] == 2, "the answers that are learned"
    _, texts = told(OPENING, "hm</think>a", "endless", reasoning="drop")
    assert texts == [["U:Q0|A:<think>hm</think>", "a|"]]
    record, _ = told(STRIPPING, "<think>endless", reasoning="drop")
    assert record == {"id": 0, "skipped": ONLY_REASONING}


def test_without_chat_template_contents_are_joined_by_newlines() -> None:
    target = llama(template=None)
    messages = tuple({"role": role, "content": role} for role in ("system", "user", "user"))
    conversation = Conversation(Prompt(0, messages=messages), Renderer(target, {}), CONTEXT)
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
        conversation = Conversation(Prompt(0, text=text), Renderer(target, {}), CONTEXT)
        assert conversation.ask()
        assert target.tokenizer.decode(conversation.tokens) == "<s>" + text


def saved(folder: Path, target: Target, generation: str | None) -> Path:
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(generation)
    return folder


@pytest.mark.parametrize("generation", ['{"eos_token_id": [258, 9]}', '{"eos_token_id": 9}', None])
def test_a_tokenizer_alone_has_the_end_tokens_of_its_target(tmp_path: Path, generation: Any):
    folder = saved(tmp_path, llama(), generation)
    assert TextSide.load(str(folder)).eos_ids == Target.load(folder).eos_ids != ()


@pytest.mark.parametrize(
    "generation", ["{", "[]", '{"eos_token_id": ["a"]}', '{"eos_token_id": -1}']
)
def test_damaged_end_tokens_are_refused_alike_with_and_without_weights(
    tmp_path: Path, generation: str
):
    folder = saved(tmp_path, llama(), generation)
    faults = []
    for load in (TextSide.load, Target.load):
        with pytest.raises(ValueError, match=f"^target {folder}: .*generation_config.json") as one:
            load(str(folder))
        faults.append(str(one.value))
    known = f"token ids from 0 to {llama().vocab_size - 1}"  # weights say how many there are
    assert faults[0] == faults[1].replace(known, "token ids from 0 on")
    assert "\n" not in faults[0]
