"""The promise: of a given conversation just what the assistant wrote is learned, under every real
template.
"""

from __future__ import annotations

import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import END, byte_tokenizer
from tokenizers import processors
from transformers import AutoTokenizer, GPT2TokenizerFast

from draftheads.infer.prompt import PromptRenderer
from draftheads.train.data.answers import Record
from draftheads.train.data.conversation import check_tools
from draftheads.train.data.imports import import_answers, replay
from draftheads.train.data.prompts import Prompt
from draftheads.train.data.shards import documents_of
from draftheads.train.data.text_side import TextSide

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[3] / "shared" / "data"
TEMPLATES = sorted((DATA / "chat-templates").rglob("*.jinja"))
needs_data = pytest.mark.skipif(not TEMPLATES, reason=f"no chat templates below {DATA}")

TALK = (("Hello there.", "Hi."), ("And 2 + 2?", " It is four.\n"), ("Bye.", "Good *bye*!"))
SPECIAL = re.compile(r"<\|?[A-Za-z][\w▁|:-]*\|?>|<｜[^｜<>]+｜>|</s>|\[/?[A-Z_]+\]")
TEXTUAL = re.compile(r"</?(think|tool|function|parameter|result|arg|name|desc|param|type|b)\w*>")

REFUSED = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "not iterable",  # wants the tools' definitions
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "not iterable",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "not iterable",
    "fireworks-ai-llama-3-firefunction-v2": "is undefined",
    "MiroThinker": "cannot assign",
    "idefics3": "leaves out the last message",  # of vision models: want lists of parts
    "idefics3_training": "leaves out the last message",
    "llava_next": "leaves out the last message",
    "llava_next_training": "leaves out the last message",
}
THINKING = {  # their generation prompts open the thinking
    "GLM-4.7-Flash",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "llama-cpp-deepseek-r1",
    "deepseekv3",
    "deepseekv3_training",
    "nemotron_3_nano",
    "nemotron_3_nano_training",
    "nemotron_3_super",
    "nemotron_3_super_training",
    "nemotron_3_ultra",
    "nemotron_3_ultra_training",
}
WITH_THOUGHT = tuple((asked, f"<think>hm</think>{said}") for asked, said in TALK)


SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        "qwen2.5",
        pytest.param("gpt2", marks=SLOW),
        pytest.param("minimind-6400", marks=SLOW),
    ],
)
def tokenizer(request):
    folder = DATA / "tokenizers" / request.param
    return (GPT2TokenizerFast if request.param == "gpt2" else AutoTokenizer).from_pretrained(folder)


def qwen_tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizers/qwen2.5")
    tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


@pytest.fixture
def qwen():
    return qwen_tokenizer()


@pytest.fixture(scope="module")
def shared_qwen():
    """To load it takes longer than to use it; as of `tokenizer`, special tokens are only added."""
    return qwen_tokenizer()


def use(tokenizer: Any, name: str) -> Any:
    """The tokenizer with this template and the special tokens that it names."""
    template = (DATA / f"chat-templates/{name}.jinja").read_text()
    found = {match.group() for match in SPECIAL.finditer(template)}
    names = sorted(name for name in found if not TEXTUAL.fullmatch(name))
    tokenizer.chat_template = template
    tokenizer.bos_token = tokenizer.bos_token or "<s>"
    tokenizer.add_special_tokens(
        {"extra_special_tokens": names}, replace_extra_special_tokens=False
    )
    return tokenizer


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return [*([{"role": "system", "content": system}] if system else []), *messages]


def told(tokenizer: Any, messages: Any, eos: Any = None, **template_args: Any) -> Record:
    """The record of a conversation; by default all special tokens may end an answer."""
    specials = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    ends = tuple(tokenizer.convert_tokens_to_ids(sorted(specials) if eos is None else eos))
    renderer = PromptRenderer(TextSide("t", tokenizer, ends), template_args)
    return replay(renderer, 0, tuple(messages))


def reason(record: Record) -> str:
    return record.get("skipped") or record.get("stopped") or ""


def learned(tokenizer: Any, record: Record) -> list[str]:
    return [
        tokenizer.decode(document["tokens"][slice(*span)], clean_up_tokenization_spaces=False)
        for document in documents_of(record)
        for span in document["learn"]
    ]


# ---------------------------------------------------------------- every template


@needs_data
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_answers_and_their_ends_are_learned_and_nothing_else(path, tokenizer):
    use(tokenizer, f"{path.parent.name}/{path.stem}")
    messages = talk(*[text for turn in TALK for text in turn])
    record = told(tokenizer, messages)
    if path.stem in REFUSED:
        assert REFUSED[path.stem] in reason(record) and not documents_of(record)
        return
    opened = ""
    if path.stem in THINKING:
        assert "expected reasoning" in reason(record) and not documents_of(record)
        record = told(tokenizer, talk(*[text for turn in WITH_THOUGHT for text in turn]))
        opened = "hm</think>"
    assert reason(record) == ""
    found = learned(tokenizer, record)
    assert len(found) == len(TALK)
    ends = [
        text.lstrip().removeprefix(opened).lstrip().removeprefix(answer.lstrip())
        for text, (_, answer) in zip(found, TALK, strict=True)
    ]
    specials = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens, ""}
    assert set(ends) <= specials
    assert len(set(ends)) == 1, "one token ends all answers"


@needs_data
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_target_sees_what_a_chat_would_show_it(path, shared_qwen):
    """Before each answer stands the conversation with its generation prompt, and no more than what
    the template itself writes before an answer.
    """
    qwen = shared_qwen
    use(qwen, f"{path.parent.name}/{path.stem}")
    turns = WITH_THOUGHT if path.stem in THINKING else TALK
    messages = talk(*[text.strip() for turn in turns for text in turn])
    record = told(qwen, messages)
    if path.stem in REFUSED:
        return
    place = 1
    for document in documents_of(record):
        for start, _ in document["learn"]:
            seen = qwen.decode(document["tokens"][:start])
            seen = seen.replace("<|return|><|end|>", "<|end|>")  # gpt-oss: it writes one of them
            chat = qwen.apply_chat_template(
                messages[:place], tokenize=False, add_generation_prompt=True
            )
            assert "".join(seen.split()).startswith("".join(chat.split()))
            place += 2


# ---------------------------------------------------------------- traces of agents

TOOL = {"type": "function", "function": {"name": "run", "description": "Runs."}}
TOOL["function"] |= {"parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}


WITHOUT_TRACES = THINKING | {  # of others, a call does not stand behind the generation prompt
    "Apertus-8B-Instruct",
    "Apriel-1.6-15b-Thinker-fixed",
    "Cohere2MoE",
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
}


def trace(thought: str | None) -> list[dict[str, Any]]:
    """Two calls with their results, and an answer."""
    messages = talk("Mend it.")
    for number in range(3):
        said: dict[str, Any] = {"role": "assistant", "content": "" if number < 2 else "It is done."}
        if thought:
            said["reasoning_content"] = f"{thought} {number}"
        messages.append(said)
        if number < 2:
            call = {"name": "run", "arguments": {"cmd": f"ls {number}"}}
            said["tool_calls"] = [{"id": f"call0000{number}", "type": "function", "function": call}]
            result = {"role": "tool", "name": "run", "tool_call_id": f"call0000{number}"}
            messages.append({**result, "content": f"file {number}"})
    return messages


def without_blanks(text: str) -> str:
    return "".join(text.split())


@pytest.mark.mend("each answer after a call was a document with all of the history again")
@needs_data
@pytest.mark.parametrize("thought", [None, "hm"])
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_trace_is_one_document_where_the_template_keeps_earlier_turns(path, thought, shared_qwen):
    tokenizer = use(shared_qwen, f"{path.parent.name}/{path.stem}")
    messages = trace(thought)
    specials = sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()})
    ends = tuple(tokenizer.convert_tokens_to_ids(specials))
    renderer = PromptRenderer(TextSide("t", tokenizer, ends), {"tools": [TOOL]})
    try:
        check_tools(renderer, [Prompt(0, tuple(messages))])
    except ValueError:
        pytest.skip("the template shows no calls")
    record = replay(renderer, 0, tuple(messages))
    found = learned(tokenizer, record)
    assert len(found) == 3 or reason(record).startswith("turn ")
    if not thought:
        assert (len(found) < 3) == (path.stem in WITHOUT_TRACES)
    for number, text in enumerate(found[:2]):
        assert "run" in text and f"ls {number}" in text and "file" not in text
    place = 1
    documents = documents_of(record)
    for document, after in zip_longest(documents, documents[1:]):
        for start, _ in document["learn"]:
            chat = without_blanks(renderer.text(messages[:place]))
            seen = without_blanks(tokenizer.decode(document["tokens"][:start]))
            assert seen.startswith(chat), "what a chat shows the target, and what it inserts"
            place += 2
        if after:
            shown = without_blanks(tokenizer.decode(after["tokens"]))
            written = without_blanks(tokenizer.decode(document["tokens"]))
            assert not shown.startswith(written), "a document ends where the template rewrites it"


# ---------------------------------------------------------------- traps, one by one


@needs_data
def test_system_message_that_the_template_adds_is_there_and_not_learned(qwen):
    record = told(use(qwen, "trl/qwen2_5"), talk("a", "b"))
    assert "You are Qwen" in qwen.decode(record["tokens"])
    assert learned(qwen, record) == ["b<|im_end|>"]


@needs_data
def test_empty_thinking_block_is_context(qwen):
    for name in ("trl/qwen3", "trl/qwen3_training", "llama.cpp/Qwen3.5-4B"):
        record = told(use(qwen, name), talk("a", "b"))
        assert "<think>\n\n</think>" in qwen.decode(record["tokens"])
        assert learned(qwen, record) == ["b<|im_end|>"]


@needs_data
@pytest.mark.parametrize(
    ("name", "opened"),  # by the generation prompt
    [
        ("trl/qwen3", ""),
        ("trl/qwen3_5_think", "<think>\n"),
        ("llama.cpp/Qwen-QwQ-32B", "<think>\n"),
    ],
)
def test_dropped_thinking_makes_each_answer_a_document(qwen, name, opened):
    tokenizer = use(qwen, name)
    messages = talk("a", "<think>\none\n</think>\n\nA", "b", "<think>\ntwo\n</think>\n\nB")
    record = told(tokenizer, messages, enable_thinking=True)
    for document, place in zip(record["documents"], (1, 3), strict=True):
        asked = tokenizer.apply_chat_template(
            messages[:place], add_generation_prompt=True, enable_thinking=True
        )
        start = document["learn"][0][0]
        assert document["tokens"][:start] == asked["input_ids"], "after just what the target saw"
        said = messages[place]["content"].removeprefix(opened)
        assert learned(tokenizer, document) == [f"{said}<|im_end|>"]
    assert "one" not in tokenizer.decode(record["documents"][1]["tokens"])


@needs_data
def test_thinking_and_generation_prompt_must_fit(qwen):
    tokenizer = use(qwen, "llama.cpp/Qwen-QwQ-32B")  # it thinks if enable_thinking is true
    messages = talk("a", "A", "b", "<think>\ntwo\n</think>\n\nB")
    record = told(tokenizer, messages)
    assert learned(tokenizer, record) == ["A<|im_end|>"]
    assert re.match("turn 2: expected no reasoning, .* --reasoning drop", record["stopped"])
    record = told(use(qwen, "trl/deepseekv3"), messages)
    assert re.match("turn 1: expected reasoning, .* --template-args", record["skipped"])


@needs_data
@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("trl/gemma", talk("a", "b", system="be kind")),
        ("trl/gemma", [*talk("a"), *talk("a", "b")]),
        ("chujiezheng/vicuna", [*talk("a"), *talk("a", "b")]),
    ],
)
def test_refusal_of_the_template_is_said(qwen, name, messages):
    record = told(use(qwen, name), messages)
    assert re.match("chat template refuses the messages: .*(support|alternate)", reason(record))


@needs_data
def test_beginning_token_stands_once(qwen):
    bos = qwen.convert_tokens_to_ids("<|endoftext|>")
    qwen.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    assert qwen("a")["input_ids"][0] == bos
    for name in ("trl/llama3", "trl/llama3_training", "chujiezheng/chatml"):
        record = told(use(qwen, name), talk("a", "b", "c", "d"))
        for document in documents_of(record):
            assert document["tokens"].count(bos) == 1


@needs_data
def test_end_that_the_target_writes_is_learned(qwen):
    """gpt-oss ends answers with <|return|>, which its template replaces in later turns."""
    record = told(use(qwen, "trl/gptoss"), talk("a", "b", "c", "d"), eos=["<|return|>"])
    assert learned(qwen, record) == ["b<|return|>", "d<|return|>"]


@needs_data
def test_no_token_reaches_over_the_edge(tokenizer):
    """Byte-pair tokenizers join the header's last blank with the answer's first letters."""
    header, answer = "A: ", "the cat"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' }}"
        "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    )
    whole = tokenizer(header + answer, add_special_tokens=False)["input_ids"]
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (header, answer)]
    assert whole != parts[0] + parts[1], "the trap is there"
    record = told(tokenizer, talk("a dog?", answer, "a dog?", answer))
    assert learned(tokenizer, record) == [answer + tokenizer.eos_token] * 2
    for start, _ in record["learn"]:
        assert record["tokens"][:start][-len(parts[0]) :] == parts[0]


@needs_data
def test_tokenizer_that_joins_blanks_with_words_gets_no_second_one():
    """SentencePiece's way: a text begins with a blank that decoding hides."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "stories260K")
    for name in ("chujiezheng/vicuna", "trl/llama3", "llama.cpp/Reka-Edge"):
        use(tokenizer, name)
        record = told(tokenizer, talk(*[text for turn in TALK for text in turn]))
        assert reason(record) == ""
        said = [re.split("<[|｜/s]", text)[0] for text in learned(tokenizer, record)]
        assert [text.strip() for text in said] == [answer.strip() for _, answer in TALK]
        for start, _ in record.get("learn", []):
            assert not tokenizer.decode(record["tokens"][start - 1 :]).startswith("  ")


@needs_data
@pytest.mark.parametrize("name", ["trl/qwen2_5", "trl/qwen2_5_training", "trl/qwen3"])
def test_tool_calls_are_the_assistants_and_results_are_not(qwen, name):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    tokenizer = use(qwen, name)
    called, said = learned(tokenizer, told(tokenizer, messages))
    assert json.loads(called.split("<tool_call>")[1].split("</tool_call>")[0]) == call["function"]
    assert called.endswith("</tool_call><|im_end|>")
    assert "think" not in called
    assert said == "It is 3.<|im_end|>"


# ---------------------------------------------------------------- without the real data


def test_answers_that_repeat_each_other_and_the_question():
    tokenizer = byte_tokenizer()
    record = told(tokenizer, talk("yes", "yes", "assistant", "yes", "yes", "assistant"))
    places = [tokenizer.decode(record["tokens"][:start]) for start, _ in record["learn"]]
    assert all(place.endswith("<|im_start|>assistant\n") for place in places)
    assert learned(tokenizer, record) == [
        f"{said}<|im_end|>" for said in ("yes", "yes", "assistant")
    ]


def test_silence_is_not_learned_and_an_open_question_is_left_out():
    tokenizer = byte_tokenizer()
    record = told(tokenizer, talk("a", "", "b", "B", "c"))
    assert learned(tokenizer, record) == ["B<|im_end|>"]
    assert record["learn"][-1][1] == len(record["tokens"])


def test_template_that_writes_something_else_is_refused():
    shouting = byte_tokenizer("{% for m in messages %}<s>{{ m.content | lower }}{% endfor %}")
    assert "expected the answer in the rendered" in told(shouting, talk("a", "b"))["skipped"]


def test_nothing_to_learn_or_to_render_with(tmp_path):
    assert "expected an assistant turn with text" in told(byte_tokenizer(), talk("a"))["skipped"]
    side = TextSide("t", byte_tokenizer(None), (END,))
    with pytest.raises(ValueError, match="expected a chat template .*, found none"):
        import_answers(
            side,
            [Prompt(0, tuple(talk("a", "b")))],
            tmp_path / "o",
            template_args={},
            source="chats",
        )
