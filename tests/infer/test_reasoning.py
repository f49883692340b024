"""The promise: where special tokens mark reasoning, it never runs into the answer: not in what is
shown, not in the history of the next turn, not in what is learned.
"""

from __future__ import annotations

import re
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from reciting import reciting_model
from rich.console import Console
from starlette.testclient import TestClient
from tiny_chat import llama, stand_in
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from draftheads.heads.target.model import Target
from draftheads.infer import Speculator, TextGenerator
from draftheads.infer.chat.conversation import History
from draftheads.infer.chat.repl import ChatOptions, chat
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.grammar import Grammar
from draftheads.infer.prompt import PromptRenderer, encode_prompt
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
UNMARKED = (  # without a token for any mark
    EACH
    + "<|{{ m.role }}|>{{ m.content.split('<' + '/think>')[-1] }}<|end|>{% if false %}</th"
    + "ink>{% endif %}"
    + ASK
    + "<|assistant|>{% if opens %}<th{{ 'ink>' }}\n{% endif %}{% endif %}"
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


@pytest.mark.mend("reasoning that special tokens mark was glued to the answer in the next turn")
@pytest.mark.parametrize("case", CASES)
def test_the_next_turn_has_the_answer_as_the_template_writes_it(case):
    template, written, text, shown = CASES[case]
    target = target_of(stand_in(template))
    ids = target.tokenizer(written, add_special_tokens=False)["input_ids"]
    renderer = PromptRenderer(target, {})
    answer = renderer.answer_text(ids)
    assert answer == text
    stream = TextStream(target.tokenizer, marks=renderer.marks)
    pieces = [stream.feed([token]) for token in ids]
    assert "".join([*pieces, stream.flush()]) == text and sum(map(bool, pieces)) > 1
    history = History(target, None, 1)
    first, _ = history.prompt("A")
    history.add("A", answer)
    second, _ = history.prompt("B")
    start = target.tokenizer.decode(first).removesuffix("<|think|>")
    start = start.removesuffix("<|channel>thought\n<channel|>")
    assert target.tokenizer.decode(second).startswith(start + shown)


@pytest.mark.mend(
    "gpt-oss, Seed-OSS, Ministral, Gemma 4 and Command-R7B answered behind "
    '"analysis...assistantfinal..."'
)
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
    target = reciting(tokenizer.chat_template, "")
    prompt = encode_prompt(target, asked[:1], {"enable_thinking": True})
    written = written.removesuffix("<|END_RESPONSE|>")
    assert fits(target, prompt, written), "a grammar begins after it"
    assert not fits(target, prompt, written.replace("ok", "no"))


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


@pytest.mark.mend("a history's <think> was text to templates that take reasoning in a key")
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


@pytest.mark.mend("--reasoning drop did nothing where special tokens mark reasoning")
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


@pytest.mark.mend("<think> was learned as text by targets with other marks")
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


@pytest.mark.mend("a served answer began with its reasoning, without a mark between them")
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


def reciting(template: str, written: str) -> Target:
    """A target that writes this after `<|assistant|>`, whatever is asked."""
    tokenizer = stand_in(template)
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size + size % 2,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    ids = tokenizer(f"<|assistant|>{written}<|end|>", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(*model.lm_head.weight.shape))
        model.lm_head.weight.zero_()
        for token, follower in pairwise(ids):
            model.lm_head.weight[follower, token] = 1.0
    model.generation_config = GenerationConfig(eos_token_id=ids[-1])
    return Target(model, tokenizer, name="reciting")


CONSTRAINED = {  # template, its variables, what an answer of "ok" alone may be, and what it may not
    "channels": (CHANNELS, {}, [ANALYSIS, "<|channel|>final<|message|>ok", "ok"], ["<|end|>ok"]),
    "parts": (PARTS, {}, ["[THINK]hm[/THINK]ok", "[THINK][/THINK]\n\nok", "ok"], ["[/THINK]ok"]),
    "opened": (OPENED, {}, ["hm<|thought|>ok", "hm<|user|>\n<|thought|>\nok"], ["hm<|end|>"]),
    "closed": (CLOSED, {}, ["ok"], ["<|channel>thought\nhm<channel|>ok"]),
    "not closed": (
        CLOSED,
        {"enable_thinking": True},
        ["<|channel>thought\nhm\n<channel|>ok", "ok"],
        ["<channel|>ok"],
    ),
    "tags": (TAGS, {}, ["<think>\nhm\n</think>\n\nok", "ok"], ["hm</think>ok"]),
    "unmarked": (UNMARKED, {}, ["<think>a </thin k</think>ok", "ok"], ["<thin ok"]),
    "unmarked, opened": (UNMARKED, {"opens": True}, ["hm\n</think>\nok"], ["</thinkok"]),
    "none": (
        EACH + "<|{{ m.role }}|>{{ m.content }}<|end|>" + ASK + "{% endif %}",
        {},
        ["ok"],
        ["<t"],
    ),
}


def fits(target: Target, prompt: list[int], written: str) -> bool:
    """Whether an answer of "ok" may be written so, and ends there."""
    grammar = Grammar(target, "regex", "ok").row(0, prompt)
    ids = [*target.tokenizer(written, add_special_tokens=False)["input_ids"], *target.eos_ids]
    free_V = torch.zeros(target.vocab_size)
    return all(grammar.after(ids[:n], (), free_V)[token] == 0 for n, token in enumerate(ids))


@pytest.mark.mend("a grammar forbade the reasoning that a target opens itself")
@pytest.mark.parametrize("case", CONSTRAINED)
def test_a_grammar_begins_after_reasoning(case):
    """Which the prompt has opened, or which the target opens; and never in texts of other kinds."""
    template, variables, may, may_not = CONSTRAINED[case]
    target = reciting(template, "")
    asked = [{"role": "user", "content": "Say <think>"}]
    prompt = encode_prompt(target, asked, variables)
    for written in may:
        assert fits(target, prompt, written), written
    for written in (*may_not, *(each.replace("ok", "no") for each in may)):
        assert not fits(target, prompt, written), written
    plain = target.tokenizer("Say <think> or")["input_ids"]
    assert [fits(target, plain, each) for each in ("ok", *may)] == [
        True,
        *(each == "ok" for each in may),
    ]


@pytest.mark.mend(
    "a schema was refused by the server, and held from the first token in Python and chats, where "
    "a prompt opens reasoning"
)
@pytest.mark.parametrize(
    ("template", "written"), [(PARTS, "[THINK]hm[/THINK]yes"), (OPENED, "hm<|thought|>yes")]
)
def test_a_schema_begins_after_reasoning_wherever_it_is_asked_for(
    template, written, tmp_path, monkeypatch
):
    """In Python, in a chat and on a server, whose client reads the answer alone."""
    target = reciting(template, written)
    if template is OPENED:  # the prompt ends with the mark
        [mark] = target.tokenizer("<|think|>")["input_ids"]
        first = target.tokenizer("h")["input_ids"]
        with torch.no_grad():
            target.model.lm_head.weight[first, mark] = 1.0
    engine = Speculator(target, NGram())
    thought = PromptRenderer(target, {}).answer_text(target.tokenizer(written)["input_ids"])
    thought = thought.removesuffix("yes")
    schema = {"const": 7}
    answer = TextGenerator(engine).generate("ask", schema=schema)
    assert str(answer) == f"{thought}7"
    out = StringIO()
    lines = iter(["ask"])
    chat(
        engine,
        ChatOptions(constraint=Grammar(target, "json_schema", schema)),
        read=lambda _: next(lines, "/quit"),
        console=Console(file=out),
    )
    assert f"{thought}7\n" in out.getvalue()
    asked = {
        "messages": [{"role": "user", "content": "ask"}],
        "structured_outputs": {"json": schema},
    }
    with TestClient(create_app(engine, ServeOptions("t"))) as client:
        said = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
    assert (said["reasoning_content"], said["content"]) == ("hm", "7")
