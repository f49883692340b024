"""Tool calls and results stay in prompts on request; conversations keep their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import CONTEXT, END, byte_tokenizer
from transformers import AutoTokenizer

from draftheads.train.data.conversation import Conversation, Renderer, TextSide
from draftheads.train.data.prompts import Prompt, check_tools, read_conversations, read_prompts

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data folder at {DATA}")

CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
SHAREGPT = [
    {"from": "human", "value": "1 + 2?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "3"},
    {"from": "gpt", "value": "<think>easy</think>It is 3."},
    {"from": "human", "value": "Thanks."},
]
OPENAI = [
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": CALL | {"arguments": json.dumps(CALL["arguments"])},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"},
    {"role": "assistant", "content": "<think>easy</think>It is 3."},
    {"role": "user", "content": "Thanks."},
]
KEPT = (
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": CALL}],
    },
    {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00000"},
)
THANKS = {"role": "user", "content": "Thanks."}


def write(folder: Path, turns: Any) -> Path:
    path = folder / "p.jsonl"
    path.write_text(json.dumps({"conversations": turns}) + "\n")
    return path


@pytest.mark.parametrize("turns", [SHAREGPT, OPENAI], ids=["sharegpt", "openai"])
def test_tool_turns_are_kept_or_dropped(tmp_path: Path, turns: Any) -> None:
    path = write(tmp_path, turns)
    assert read_prompts(path, tools="keep") == [Prompt(0, messages=(*KEPT, THANKS))]
    assert read_prompts(path, tools="drop") == [Prompt(0, messages=(KEPT[0], THANKS))]
    assert read_prompts(path) == read_prompts(path, tools="drop")


@pytest.mark.parametrize("turns", [SHAREGPT, OPENAI], ids=["sharegpt", "openai"])
def test_conversations_keep_answers_up_to_the_last(tmp_path: Path, turns: Any) -> None:
    path = write(tmp_path, turns)
    said = {"role": "assistant", "content": "<think>easy</think>It is 3."}
    assert read_conversations(path) == [(*KEPT, said)]
    brief = {"role": "assistant", "content": "It is 3."}
    assert read_conversations(path, tools="drop", reasoning="drop") == [(KEPT[0], brief)]


def test_target_answers_behind_the_results(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    check_tools(tokenizer, {})
    [prompt] = read_prompts(write(tmp_path, SHAREGPT), tools="keep")
    side = TextSide("tiny", tokenizer, (END,))
    conversation = Conversation(prompt, Renderer(side, {}), CONTEXT)
    for answer in ("three", "welcome"):
        assert conversation.ask()
        conversation.answer([*tokenizer(answer)["input_ids"], END])
    assert not conversation.ask()
    assert tokenizer.decode(conversation.tokens) == (
        "[user]1 + 2?<|im_end|>[assistant]add<|im_end|>[tool]3<|im_end|>[assistant]three<|im_end|>"
        "[user]Thanks.<|im_end|>[assistant]welcome<|im_end|>"
    )


@needs_data
def test_real_tool_conversations() -> None:
    path = DATA / "conversations/glaive_toolcall_en_demo.json"
    prompts = read_prompts(path, tools="keep")
    roles = [message["role"] for prompt in prompts for message in prompt.messages or ()]
    assert (len(prompts), roles.count("assistant"), roles.count("tool")) == (300, 211, 211)
    conversations = read_conversations(path)
    answers = [m for talk in conversations for m in talk if m["role"] == "assistant"]
    assert len(answers) == 211 + 746


@needs_data
@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("trl/qwen2_5", None),
        ("trl/qwen3", None),
        ("llama.cpp/mistralai-Mistral-Nemo-Instruct-2407", None),
        ("llama.cpp/meta-llama-Llama-3.1-8B-Instruct", None),
        ("llama.cpp/google-gemma-2-2b-it", "refuses them"),
        ("trl/phi3", "drops them"),
        (None, "is missing"),
    ],
)
def test_template_is_asked_whether_it_shows_tools(
    template: str | None, complaint: str | None
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizers/qwen2.5")
    tokenizer.bos_token = "<|endoftext|>"
    folder = DATA / "chat-templates"
    tokenizer.chat_template = (folder / f"{template}.jinja").read_text() if template else None
    if complaint is None:
        check_tools(tokenizer, {})
        return
    with pytest.raises(ValueError, match=f"{complaint}.*; leave them out with --tools drop"):
        check_tools(tokenizer, {})


@pytest.mark.parametrize("value", ["add(1, 2)", json.dumps({"arguments": {}}), "[1]"])
def test_broken_tool_call_is_named(tmp_path: Path, value: str) -> None:
    turns = [SHAREGPT[0], {"from": "function_call", "value": value}, SHAREGPT[2]]
    path = write(tmp_path, turns)
    with pytest.raises(ValueError, match=r"line 1, conversations, turn 2: expected a tool call"):
        read_prompts(path, tools="keep")
    assert len(read_prompts(path, tools="drop")) == 1


def test_text_is_no_conversation(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a story")
    with pytest.raises(ValueError, match="expected a conversation, got plain text"):
        read_conversations(tmp_path / "p.txt")
    with pytest.raises(ValueError, match="expected at least one answer in a conversation"):
        read_conversations(write(tmp_path, SHAREGPT[:1]))
