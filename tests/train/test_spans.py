"""Of a given conversation just what the assistant wrote is learned, under every real template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import byte_tokenizer
from tokenizers import processors
from transformers import AutoTokenizer, GPT2TokenizerFast

from draftheads.scripts.benchmarks.template_table import TALK, conversation, row
from draftheads.train.data.imports import Spans

DATA = Path(__file__).parents[3] / "shared" / "data"
TEMPLATES = sorted((DATA / "chat-templates").rglob("*.jinja"))
needs_data = pytest.mark.skipif(not TEMPLATES, reason=f"no chat templates below {DATA}")

TOOLS, PARTS = r"chat template refuses", r"chat template refuses|found something else"
REFUSED = {
    "CohereForAI-c4ai-command-r-plus-tool_use": TOOLS,  # wants the tools' definitions
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": TOOLS,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": TOOLS,
    "fireworks-ai-llama-3-firefunction-v2": TOOLS,
    "MiroThinker": TOOLS,  # assigns to what jinja does not let it
    "idefics3": PARTS,  # of vision models: want lists of parts
    "idefics3_training": PARTS,
    "llava_next": PARTS,
    "llava_next_training": PARTS,
}


@pytest.fixture(scope="module", params=["qwen2.5", "gpt2", "minimind-6400"])
def tokenizer(request: Any) -> Any:
    folder = DATA / "tokenizers" / request.param
    return (GPT2TokenizerFast if request.param == "gpt2" else AutoTokenizer).from_pretrained(folder)


@pytest.fixture
def qwen() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizers/qwen2.5")
    tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


def use(tokenizer: Any, name: str) -> Any:
    tokenizer.chat_template = (DATA / f"chat-templates/{name}.jinja").read_text()
    return tokenizer


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return [*([{"role": "system", "content": system}] if system else []), *messages]


def learned(tokenizer: Any, documents: Any) -> list[str]:
    return [
        tokenizer.decode(document.tokens[slice(*span)])
        for document in documents
        for span in document.learn
    ]


# ---------------------------------------------------------------- every template


@needs_data
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_answers_and_their_ends_are_learned_and_nothing_else(path: Path, tokenizer: Any) -> None:
    found = row(path, tokenizer, conversation(), {})
    if path.stem in REFUSED:
        assert re.search(REFUSED[path.stem], found.error)
        return
    assert found.error == ""
    assert len(found.learned) == len(TALK)
    ends = [
        text.lstrip().removeprefix(answer.strip()).strip()
        for text, (_, answer) in zip(found.learned, TALK, strict=True)
    ]
    specials = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens, ""}
    assert set(ends) <= specials
    assert len(set(ends) - {""}) <= 1, "one token ends all answers"


# ---------------------------------------------------------------- traps, one by one


@needs_data
@pytest.mark.parametrize(
    ("name", "masked", "ours"),
    [
        ("trl/qwen2_5_training", "\nYes.<|im_end|>\n", "Yes.<|im_end|>"),
        ("trl/phi3_training", "Yes.<|end|>\n<|im_end|>", "Yes.<|end|>"),
    ],
)
def test_what_a_generation_mask_holds_too_much(
    qwen: Any, name: str, masked: str, ours: str
) -> None:
    qwen.add_tokens(["<|end|>"], special_tokens=True)
    tokenizer, messages = use(qwen, name), talk("Is it?", "Yes.")
    marked = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, one in pairs if one]) == masked
    [document] = Spans(tokenizer).documents(messages)
    assert (document.method, document.ended) == ("generation", True)
    assert learned(tokenizer, [document]) == [ours]


@needs_data
def test_system_message_that_the_template_adds_is_there_and_not_learned(qwen: Any) -> None:
    [document] = Spans(use(qwen, "trl/qwen2_5")).documents(talk("a", "b"))
    assert "You are Qwen" in qwen.decode(document.tokens)
    assert learned(qwen, [document]) == ["b<|im_end|>"]


@needs_data
def test_empty_thinking_block_is_context(qwen: Any) -> None:
    for name in ("trl/qwen3", "trl/qwen3_training", "llama.cpp/Qwen3.5-4B"):
        [document] = Spans(use(qwen, name)).documents(talk("a", "b"))
        assert "<think>\n\n</think>" in qwen.decode(document.tokens)
        assert learned(qwen, [document]) == ["b<|im_end|>"]


@needs_data
@pytest.mark.parametrize(
    ("name", "opened"),  # by the generation prompt
    [
        ("trl/qwen3", ""),
        ("trl/qwen3_5_think", "<think>\n"),
        ("llama.cpp/Qwen-QwQ-32B", "<think>\n"),
    ],
)
def test_dropped_thinking_makes_each_answer_a_document(qwen: Any, name: str, opened: str) -> None:
    tokenizer = use(qwen, name)
    messages = talk("a", "<think>\none\n</think>\n\nA", "b", "<think>\ntwo\n</think>\n\nB")
    thinking = {"enable_thinking": True}
    documents = Spans(tokenizer, template_args=thinking).documents(messages)
    assert [document.method for document in documents] == ["turns", "turns"]
    for document, place in zip(documents, (1, 3), strict=True):
        asked = tokenizer.apply_chat_template(
            messages[:place], add_generation_prompt=True, **thinking
        )
        start = document.learn[0][0]
        assert document.tokens[:start] == asked["input_ids"], "behind just what the target saw"
        said = messages[place]["content"].removeprefix(opened)
        assert learned(tokenizer, [document]) == [f"{said}<|im_end|>"]
    assert "one" not in tokenizer.decode(documents[1].tokens)


@needs_data
def test_prompt_that_opens_the_thinking_wants_reasoning(qwen: Any) -> None:
    tokenizer = use(qwen, "trl/qwen3_5_think")
    messages = talk("a", "A", "b", "<think>\ntwo\n</think>\n\nB", "c", "C")
    with pytest.raises(ValueError, match=r"turn 2: expected reasoning, .* template arguments"):
        Spans(tokenizer).documents(messages)


@needs_data
def test_prompt_that_closes_the_thinking_wants_none(qwen: Any) -> None:
    tokenizer = use(qwen, "llama.cpp/Qwen-QwQ-32B")  # unless enable_thinking is true
    messages = talk("a", "<think>\none\n</think>\n\nA", "b", "<think>\ntwo\n</think>\n\nB")
    with pytest.raises(ValueError, match=r"turn 2: expected no reasoning, .* drop the reasoning"):
        Spans(tokenizer).documents(messages)


@needs_data
@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("trl/gemma", talk("a", "b", system="be kind")),
        ("trl/gemma", [*talk("a"), *talk("a", "b")]),
        ("chujiezheng/vicuna", [*talk("a"), *talk("a", "b")]),
    ],
)
def test_refusal_of_the_template_is_said(qwen: Any, name: str, messages: Any) -> None:
    with pytest.raises(ValueError, match="template refuses the messages: .*(support|alternate)"):
        Spans(use(qwen, name)).documents(messages)


@needs_data
def test_beginning_token_stands_once(qwen: Any) -> None:
    bos = qwen.convert_tokens_to_ids("<|endoftext|>")
    qwen.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    assert qwen("a")["input_ids"][0] == bos
    for name in ("trl/llama3", "trl/llama3_training", "chujiezheng/chatml"):
        [document] = Spans(use(qwen, name)).documents(talk("a", "b", "c", "d"))
        assert document.tokens.count(bos) == 1


@needs_data
def test_end_that_the_target_does_not_write_is_not_learned(qwen: Any) -> None:
    ends = ["<|end|>", "<|return|>"]
    qwen.add_tokens([*ends, "<|start|>", "<|message|>", "<|channel|>"], special_tokens=True)
    tokenizer = use(qwen, "trl/gptoss")
    eos_ids = [tokenizer.convert_tokens_to_ids("<|return|>")]
    documents = Spans(tokenizer, eos_ids).documents(talk("a", "b", "c", "d"))
    assert learned(tokenizer, documents) == ["b", "d<|return|>"]


@needs_data
def test_token_over_the_edge_is_cut(tokenizer: Any) -> None:
    """Byte-pair tokenizers join the header's last blank with the answer's first letters."""
    header, answer = "A: ", "the cat"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' }}"
        "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    )
    whole = tokenizer(header + answer, add_special_tokens=False)["input_ids"]
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (header, answer)]
    assert whole != parts[0] + parts[1], "the trap is there"
    [document] = Spans(tokenizer).documents(talk("a dog?", answer, "a dog?", answer))
    assert learned(tokenizer, [document]) == [answer + tokenizer.eos_token] * 2
    for start, _ in document.learn:
        assert document.tokens[:start][-len(parts[0]) :] == parts[0]


@needs_data
def test_tokenizer_that_joins_blanks_with_words_gets_no_second_one() -> None:
    """SentencePiece's way: a text begins with a blank that decoding hides."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "stories260K")
    for name in ("chujiezheng/vicuna", "trl/llama3", "trl/deepseekv3", "llama.cpp/Reka-Edge"):
        path = DATA / f"chat-templates/{name}.jinja"
        found = row(path, tokenizer, conversation(), {})
        assert found.error == ""
        said = [re.split("<[|｜/s]", text)[0].strip() for text in found.learned]
        assert said == [answer.strip() for _, answer in TALK]
        [document] = found.documents
        text = tokenizer.apply_chat_template(conversation(), tokenize=False)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert document.tokens == whole[: len(document.tokens)]


@needs_data
@pytest.mark.parametrize("name", ["trl/qwen2_5", "trl/qwen2_5_training", "trl/qwen3"])
def test_tool_calls_are_the_assistants_and_results_are_not(qwen: Any, name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    tokenizer = use(qwen, name)
    documents = Spans(tokenizer).documents(messages)
    called, said = learned(tokenizer, documents)
    assert json.loads(called.split("<tool_call>")[1].split("</tool_call>")[0]) == call["function"]
    assert called.endswith("</tool_call><|im_end|>")
    assert "think" not in called
    assert said == "It is 3.<|im_end|>"


# ---------------------------------------------------------------- without the real data


def test_answers_that_repeat_each_other_and_the_question() -> None:
    tokenizer = byte_tokenizer()
    messages = talk("yes", "yes", "assistant", "yes", "yes", "assistant")
    [document] = Spans(tokenizer).documents(messages)
    places = [tokenizer.decode(document.tokens[:start]) for start, _ in document.learn]
    assert all(place.endswith("<|im_start|>assistant\n") for place in places)
    assert learned(tokenizer, [document]) == [
        f"{said}<|im_end|>" for said in ("yes", "yes", "assistant")
    ]


def test_silence_is_not_learned_and_an_open_question_is_left_out() -> None:
    tokenizer = byte_tokenizer()
    [document] = Spans(tokenizer).documents(talk("a", "", "b", "B", "c"))
    assert learned(tokenizer, [document]) == ["B<|im_end|>"]
    assert document.learn[-1][1] == len(document.tokens)


def test_template_that_writes_something_else_is_refused() -> None:
    shouting = byte_tokenizer("{% for m in messages %}<s>{{ m.content | lower }}{% endfor %}")
    with pytest.raises(ValueError, match=r"turn 2: expected the answer in what .* leave the conv"):
        Spans(shouting).documents(talk("a", "b"))


def test_nothing_to_learn_or_to_render_with() -> None:
    with pytest.raises(ValueError, match="expected an assistant turn that says something"):
        Spans(byte_tokenizer()).documents(talk("a"))
    with pytest.raises(ValueError, match="expected a chat template, found none"):
        Spans(byte_tokenizer(None))
