"""The promise: where special tokens mark reasoning, it never runs into the answer: not in what is
shown, not in the history of the next turn, not in what is learned.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from reciting import reciting_model
from starlette.testclient import TestClient
from tiny_chat import llama, stand_in
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftheads.heads.target.model import Target
from draftheads.infer import Speculator, TextGenerator
from draftheads.infer.chat.conversation import History
from draftheads.infer.prompt import PromptRenderer
from draftheads.infer.serve.app import create_app
from draftheads.infer.serve.service import ServeOptions
from draftheads.infer.text import THOUGHTS, TextStream
from draftheads.train.data.conversation import Conversation
from draftheads.train.data.imports import replay
from draftheads.train.data.prompts import Prompt
from draftheads.train.data.shards import documents_of
from draftheads.train.data.text_side import TextSide

TEMPLATES = Path(__file__).parents[3] / "shared" / "data" / "chat-templates"
EACH = "{% for m in messages %}"
ASK = "{% endfor %}{% if add_generation_prompt %}"
CHANNELS = (  # as gpt-oss: earlier reasoning is left out, and an answer has a header of its own
    EACH + "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>"
    "{% if m.thinking and loop.last and not add_generation_prompt %}"
    "analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant<|channel|>{% endif %}"
    "final{% endif %}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    + ASK
    + "<|start|>assistant{% endif %}"
)
PARTS = (  # as Ministral
    EACH + "<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|end|>"
    + ASK
    + "<|assistant|>{% endif %}"
)
OPENED = (  # the generation prompt opens it; earlier reasoning is kept
    EACH + "<|{{ m.role }}|>{% if m.reasoning_content %}<|think|>{{ m.reasoning_content }}"
    "<|thought|>{% endif %}{{ m.content }}<|end|>" + ASK + "<|assistant|><|think|>{% endif %}"
)
CLOSED = (  # as Gemma 4: an empty block in the generation prompt, reasoning before calls alone
    EACH + "<|{{ m.role }}|>{% if m.reasoning and m.tool_calls %}<|channel>thought\n"
    "{{ m.reasoning }}\n<channel|>{{ m.tool_calls[0].function.name }}{% endif %}{{ m.content }}"
    "<|end|>" + ASK + "<|assistant|>"
    "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}"
    "{% endif %}"
)
TAGS = (  # special tokens in the content itself
    EACH + "<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% if false %}<think></think>{% endif %}" + ASK + "<|assistant|>{% endif %}"
)
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>ok"
CASES = {  # template, what the target writes, its text, and the answer in the next prompt
    "channels": (CHANNELS, ANALYSIS, "<think>hm</think>ok", "<|channel|>final<|message|>ok<|end|>"),
    "channels, no reasoning": (
        CHANNELS,
        "<|channel|>final<|message|>ok",
        "ok",
        "<|channel|>final<|message|>ok<|end|>",
    ),
    "channels, cut": (
        CHANNELS,
        "<|channel|>analysis<|message|>hm",
        "<think>hm",
        "<|channel|>final<|message|><|end|>",
    ),
    "parts": (PARTS, "[THINK]hm[/THINK]ok", "<think>hm</think>ok", "[THINK]hm[/THINK]ok<|end|>"),
    "opened": (OPENED, "hm<|thought|>ok", "hm</think>ok", "<|think|>hm<|thought|>ok<|end|>"),
    "closed": (
        CLOSED,
        "<|channel>thought\nhm\n<channel|>ok",
        "<think>\nhm\n</think>ok",
        "ok<|end|>",
    ),
    "tags": (TAGS, "<think>hm</think>ok", "<think>hm</think>ok", "ok<|end|>"),
}
REAL = {  # what the target writes, and its text; keys of the parsed message
    "llama.cpp/openai-gpt-oss-120b": (ANALYSIS, "<think>hm</think>ok", "thinking"),
    "llama.cpp/ByteDance-Seed-OSS": (
        "\n<seed:think>hm</seed:think>ok",
        "\n<think>hm</think>ok",
        "reasoning_content",
    ),
    "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512": (
        "[THINK]hm[/THINK]ok",
        "<think>hm</think>ok",
        "",
    ),
    "llama.cpp/google-gemma-4-31B-it": (
        "<|channel>thought\nhm\n<channel|>ok",
        "<think>\nhm\n</think>ok",
        "reasoning",
    ),
    "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>ok<|END_RESPONSE|>",
        "<think>hm</think>ok",
        "reasoning_content",
    ),
}


def target_of(tokenizer: PreTrainedTokenizerFast) -> Target:
    target = llama()
    target.tokenizer, target.context = tokenizer, 10_000
    return target


def side_of(template: str) -> TextSide:
    tokenizer = stand_in(template)
    end = "<|return|>" if "<|return|>" in template else "<|end|>"
    return TextSide("t", tokenizer, (tokenizer.convert_tokens_to_ids(end),))


@pytest.mark.parametrize("case", CASES)
def test_the_next_turn_has_the_answer_as_the_template_writes_it(case):
    template, written, text, shown = CASES[case]
    target = target_of(stand_in(template))
    ids = target.tokenizer(written, add_special_tokens=False)["input_ids"]
    answer = PromptRenderer(target, {}).answer_text(ids)
    assert answer == text
    history = History(target, None, 1)
    first, _ = history.prompt("A")
    history.add("A", answer)
    second, _ = history.prompt("B")
    start = target.tokenizer.decode(first).removesuffix("<|think|>")
    start = start.removesuffix("<|channel>thought\n<channel|>")
    assert target.tokenizer.decode(second).startswith(start + shown)


@pytest.mark.parametrize("case", CASES)
def test_a_text_grows_token_by_token(case):
    template, written, text, _ = CASES[case]
    tokenizer = stand_in(template)
    stream = TextStream(tokenizer, marks=PromptRenderer(TextSide("t", tokenizer, ()), {}).marks)
    pieces = [stream.feed([token]) for token in tokenizer(written)["input_ids"]]
    assert "".join([*pieces, stream.flush()]) == text
    assert sum(map(bool, pieces)) > 1


@pytest.mark.parametrize("name", REAL)
def test_real_templates(name):
    if not TEMPLATES.is_dir():
        pytest.skip(f"no chat templates at {TEMPLATES}")
    written, text, key = REAL[name]
    tokenizer = stand_in((TEMPLATES / f"{name}.jinja").read_text())
    target = target_of(tokenizer)
    answer = PromptRenderer(target, {}).answer_text(tokenizer(written)["input_ids"])
    assert answer == text
    history = History(target, None, 1)
    history.add("A", answer)
    found, _ = history.prompt("B")
    parsed: dict[str, Any] = {"role": "assistant", "content": "ok", key: "hm"}
    if not key:
        thought = {"type": "thinking", "thinking": "hm"}
        parsed = {"role": "assistant", "content": [thought, {"type": "text", "text": "ok"}]}
    asked = [{"role": "user", "content": content} for content in "AB"]
    whole = tokenizer.apply_chat_template(
        [asked[0], parsed, asked[1]], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(found) == whole
    assert "assistantfinal" not in whole and whole.count("ok") >= 1


THOUGHT, ANSWER = "Thinking of herons.", "Herons wade."
IN_TEXT = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}
KEYED = [{"role": "assistant", "content": ANSWER, key: THOUGHT} for key in THOUGHTS]


def parsed_message(show: Any) -> dict[str, Any]:
    """The message in whose place for reasoning a template shows it; a text, if it has none."""
    parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
    for message in (*KEYED, {"role": "assistant", "content": parts}):
        for more in ({}, {"content": "", "tool_calls": [call]}):
            try:
                shown = show([message | more])
            except Exception:  # whatever templates raise for messages that they do not know
                continue
            is_listing = "'type'" in shown or '"type": "thinking"' in shown
            if THOUGHT in shown and (more or ANSWER in shown) and not is_listing:
                return message
    return IN_TEXT


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(TEMPLATES.rglob("*.jinja")), ids=lambda path: path.stem)
def test_each_template_shows_reasoning_in_its_own_way(path: Path) -> None:
    """However it comes: in one of three keys, in the text, or as the target wrote it."""
    tokenizer = stand_in(path.read_text())
    asked = [{"role": "user", "content": content} for content in ("First?", "Second?")]

    def show(messages: Any, ask: bool = False) -> str:
        shown: str = tokenizer.apply_chat_template(
            [asked[0], *messages], tokenize=False, add_generation_prompt=ask
        )
        return shown

    try:
        prompt = show([], ask=True)
        show([KEYED[0] | {THOUGHTS[0]: ""}, asked[1]])
    except Exception:
        pytest.skip("it refuses such a conversation")
    parsed = parsed_message(show)
    renderer = PromptRenderer(target_of(tokenizer), {})
    ways = [*KEYED, IN_TEXT]
    whole = show([parsed])
    if parsed is not IN_TEXT and whole.startswith(prompt) and THOUGHT in whole:
        written = whole[len(prompt) :].partition(ANSWER)[0] + ANSWER
        ids = tokenizer(written, add_special_tokens=False)["input_ids"]
        ways.append({"role": "assistant", "content": renderer.answer_text(ids)})
    for way in ways:
        assert renderer.text([asked[0], way, asked[1]]) == show([parsed, asked[1]], ask=True)


@pytest.mark.parametrize("template", [CHANNELS, PARTS, OPENED, CLOSED, TAGS])
def test_texts_without_reasoning_stay_as_they_are(template):
    renderer = PromptRenderer(side_of(template), {})
    for content in ("ok", " ok </thinking>", "It is <think> that opens."):
        message = {"role": "assistant", "content": content}
        assert renderer.template_message(message) == message
        ids = renderer.tokenizer(content)["input_ids"]
        assert template == TAGS or renderer.answer_text(ids) == content


def learned(template: str, written: str, reasoning: Any) -> list[list[str]]:
    """What is learned of two such answers, with what stands before it."""
    side = side_of(template)
    asked = tuple({"role": "user", "content": content} for content in "AB")
    talk = Conversation(
        Prompt(0, messages=asked), PromptRenderer(side, {}), 10_000, reasoning=reasoning
    )
    while talk.ask():
        talk.answer([*side.tokenizer(written)["input_ids"], *side.eos_ids])
    pieces = []
    for document in documents_of(talk.record()):
        at = 0
        for start, stop in document["learn"]:
            tokens = document["tokens"]
            pieces += [side.tokenizer.decode(ids) for ids in (tokens[at:start], tokens[start:stop])]
            at = stop
    return pieces


def test_reasoning_is_learned_or_stays_as_context():
    ask_a, ask_b = "<|start|>user<|message|>A<|end|><|start|>assistant", "user<|message|>B<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>ok"
    second = f"{ask_a}<|channel|>final<|message|>ok<|end|><|start|>{ask_b}<|start|>assistant"
    assert learned(CHANNELS, ANALYSIS, "keep") == [
        ask_a,
        f"{ANALYSIS}<|return|>",
        second,
        f"{ANALYSIS}<|return|>",
    ]
    thought = "<|channel|>analysis<|message|>hm<|end|>"
    assert learned(CHANNELS, ANALYSIS, "drop") == [
        ask_a + thought,
        f"{final}<|return|>",
        second + thought,
        f"{final}<|return|>",
    ]
    assert learned(CHANNELS, ANALYSIS, "only")[:2] == [
        ask_a,
        thought,
    ]
    assert learned(OPENED, "hm<|thought|>ok", "drop")[:2] == [
        "<|user|>A<|end|><|assistant|><|think|>hm<|thought|>",
        "ok<|end|>",
    ]
    assert learned(PARTS, "[THINK]hm", "drop") == []


@pytest.mark.parametrize(
    ("template", "written"),
    [(CHANNELS, f"{ANALYSIS}<|return|>"), (PARTS, "[THINK]hm[/THINK]ok<|end|>")],
)
def test_imported_reasoning_is_learned_with_the_templates_own_marks(template, written):
    side = side_of(template)
    given = (
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "<think>hm</think>ok"},
    )
    record = replay(PromptRenderer(side, {}), 0, given)
    [document] = documents_of(record)
    [(start, stop)] = document["learn"]
    assert side.tokenizer.decode(document["tokens"][start:stop]) == written


@pytest.fixture(scope="module")
def thinking() -> Target:
    """It answers [THINK] hm [/THINK] yes, whatever is asked."""
    words = ["<unk>", "<|user|>", "ask", "<|end|>", "<|assistant|>", "[THINK]", "hm", "[/THINK]"]
    words += ["yes", "<|return|>"]
    model = models.WordLevel({word: place for place, word in enumerate(words)}, "<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([word for word in words if not word.isalpha()])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    wrapped.chat_template = PARTS
    target = Target(reciting_model(len(words)), wrapped, name="thinking")
    target.eos_ids = (words.index("<|return|>"),)
    return target


@pytest.mark.parametrize("stream", [False, True])
def test_servers_and_generators_tell_reasoning_from_the_answer(thinking, stream):
    """And their own history, sent back, is the one that the template writes."""
    generator = TextGenerator(Speculator(thinking))
    answer = str(generator.generate("ask"))
    assert answer == "<think>hm</think>yes"
    body = {"messages": [{"role": "user", "content": "ask"}], "stream": stream}
    body["reasoning_format"] = "none"
    with TestClient(create_app(Speculator(thinking), ServeOptions("t"))) as client:
        said = client.post("/v1/chat/completions", json=body)
        if stream:
            text = "".join(re.findall(r'"content": "([^"]*)"', said.text))
        else:
            text = said.json()["choices"][0]["message"]["content"]
        assert text == answer
        messages = [*body["messages"], {"role": "assistant", "content": text}, *body["messages"]]
        again = {"messages": messages, "return_token_ids": True}
        ids = client.post("/v1/chat/completions", json=again).json()["prompt_token_ids"]
    shown = "<|user|> ask <|end|> <|assistant|> [THINK] hm [/THINK] yes <|end|> <|user|> ask"
    assert thinking.tokenizer.decode(ids).startswith(shown)
