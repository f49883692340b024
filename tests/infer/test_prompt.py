"""The promise: a prompt has the same token ids wherever it is rendered, in the data that a head
learns from and in whatever decodes with the head.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from tiny_chat import CONTEXT, TEMPLATE, byte_tokenizer, llama, saved
from tiny_heads import random_head
from tokenizers import processors
from typer.testing import CliRunner

from draftheads.heads import load_pair, save_head
from draftheads.heads.formats.hub import open_head
from draftheads.heads.target.model import Target
from draftheads.infer import prompt
from draftheads.infer.chat.conversation import History
from draftheads.infer.pipeline import loading
from draftheads.infer.prompt import PromptRenderer, encode_prompt
from draftheads.infer.serve.protocol import ChatRequest, CompletionRequest
from draftheads.infer.serve.reader import Reader
from draftheads.scripts.cli import app
from draftheads.scripts.openings import opening_ids
from draftheads.scripts.options import parsed_template_args
from draftheads.train.data.conversation import Conversation
from draftheads.train.data.prompts import Prompt

QWEN3 = Path(__file__).parents[3] / "shared" / "data" / "chat-templates" / "trl" / "qwen3.jinja"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
SWITCHED = TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif",
    "<|im_start|>assistant\n{% if not enable_thinking | default(true) %}<think></think>{% endif %}"
    "{% endif",
)
"""As Qwen3's: a variable puts an empty reasoning block in front of the answer."""
QUIET = {"enable_thinking": False}
DECODING = ("bench", "tune", "chat", "serve", "doctor")


@dataclass
class Side:
    """The text side of a target."""

    tokenizer: Any
    template_args: dict[str, Any] = field(default_factory=dict)
    name: str = "tiny"
    eos_ids: tuple[int, ...] = ()


def template(name: str) -> str:
    if name == "own":
        return SWITCHED
    if not QWEN3.is_file():
        pytest.skip(f"no template at {QWEN3}")
    return QWEN3.read_text()


def closing_tokenizer(chat_template: str | None = None) -> Any:
    """Appends its end token to every text, as T5's does."""
    tokenizer = byte_tokenizer(template=chat_template)
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {end}",
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", end)],
    )
    return tokenizer


def everywhere(target: Target, prompt: Prompt, folder: Path) -> dict[str, list[int]]:
    """The ids of a prompt in distillation, in benchmarks and their like, in a chat, at a server."""
    conversation = Conversation(prompt, PromptRenderer(target, target.template_args), CONTEXT)
    assert conversation.ask()
    record = {"text": prompt.text} if prompt.text else {"messages": prompt.messages}
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps(record))
    if prompt.messages is None:
        question, system = prompt.text or "", None
        [asked] = CompletionRequest(prompt=question).prompts
    else:
        system, question = (message["content"] for message in prompt.messages)
        asked = ChatRequest(messages=list(prompt.messages))
    return {
        "distill": conversation.tokens,
        "bench, tune, doctor": opening_ids(target, str(file), None)[0],
        "chat": History(target, system, None).prompt(question)[0],
        "serve": Reader(target, "tiny", 1).encoded(asked),
        "Python": encode_prompt(target, prompt.text or list(prompt.messages or ())),
    }


@pytest.mark.parametrize("name", ["own", "qwen3"])
def test_a_template_with_its_variables_is_rendered_alike_everywhere(name, tmp_path):
    target = llama(template=template(name))
    target.template_args = QUIET
    found = everywhere(target, Prompt(0, messages=tuple(MESSAGES)), tmp_path)
    quiet = target.tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True, **QUIET
    )
    assert quiet.rstrip().endswith("</think>")
    assert {place: target.tokenizer.decode(ids) for place, ids in found.items()} == dict.fromkeys(
        found, quiet
    )
    assert len({tuple(ids) for ids in found.values()}) == 1


def test_an_appended_end_token_is_left_out_everywhere(tmp_path):
    """A prompt that ends is not continued but answered by an empty text."""
    target = llama(template=None)
    target.tokenizer = closing_tokenizer()
    assert target.tokenizer.decode(target.tokenizer("Once")["input_ids"]) == "<s>Once<|im_end|>"
    found = everywhere(target, Prompt(0, text="Once"), tmp_path)
    assert {target.tokenizer.decode(ids) for ids in found.values()} == {"<s>Once"}


def test_an_end_token_of_the_prompts_own_stays():
    target = llama(template=None)
    assert target.tokenizer.decode(encode_prompt(target, "a<|im_end|>")) == "a<|im_end|>"
    target.tokenizer = closing_tokenizer()
    assert target.tokenizer.decode(encode_prompt(target, "a<|im_end|>")) == "<s>a<|im_end|>"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A head folder, with its target beside it, whose data was distilled with QUIET."""
    folder = tmp_path_factory.mktemp("trained")
    target = llama(template=SWITCHED)
    saved(target, folder / "target")
    target.name = str(folder / "target")
    for name, variables in {"head": QUIET, "other": {}, "damaged": {"tokenize": True}}.items():
        training = {"data": {"sampling": {"template_args": variables}}}
        head = random_head("medusa", target, depth=2)
        save_head(head, folder / name, target=target, training=training)
    return folder


def test_a_heads_own_variables_are_used_with_it(trained):
    target, _ = load_pair(trained / "head")
    assert target.tokenizer.decode(encode_prompt(target, MESSAGES)).endswith("<think></think>")
    target = loading.load_target(target.name, loading.Place(), None, [open_head(trained / "head")])
    assert target.template_args == QUIET
    assert encode_prompt(target, MESSAGES, {"enable_thinking": True}) == encode_prompt(
        Side(target.tokenizer), MESSAGES
    )
    assert load_pair(trained / "other")[0].template_args == {}


def test_variables_on_the_command_line_replace_the_heads_own(trained):
    heads = [open_head(trained / "head")]
    name, own = str(trained / "target"), parsed_template_args("{}")
    target = loading.load_target(name, loading.Place(), None, heads, own)
    assert target.template_args == {}


def test_heads_of_different_variables_are_not_compared_on_one_prompt(trained):
    heads = [open_head(trained / name) for name in ("head", "other")]
    with pytest.raises(ValueError, match=r"the same chat template variables, .*--template-args"):
        loading.load_target(str(trained / "target"), loading.Place(), None, heads)
    assert loading.load_target(str(trained / "target"), loading.Place(), None, heads, {})


def test_a_damaged_record_of_variables_is_one_line(trained):
    with pytest.raises(ValueError, match=r"config.json: expected variables .* got tokenize"):
        _ = open_head(trained / "damaged").template_args


@pytest.mark.parametrize("command", DECODING)
def test_every_command_that_decodes_takes_template_args(command, trained, monkeypatch):
    """What they load is theirs: see the tests above."""
    given: list[Any] = []

    def load(*arguments: Any, **more: Any) -> Target:
        bound = inspect.signature(real_load).bind(*arguments, **more).arguments
        given.append(bound.get("template_args"))
        raise ValueError("seen")

    real_load = loading.load_target
    monkeypatch.setattr(loading, "load_target", load)
    options = ["--head", trained / "head", "--template-args", '{"mood": "calm"}']
    if command != "chat":
        options += ["--target", trained / "target"]
    if command in ("bench", "tune", "doctor"):
        options += ["--prompts", "spec-bench"]
    answer = CliRunner().invoke(app, [command, *map(str, options)])
    assert given == [{"mood": "calm"}], answer.output


def test_variables_that_the_template_itself_has_are_taken():
    assert parsed_template_args('{"tools": [], "mood": "calm"}')


UNTAKEN = {
    "half a pair": (byte_tokenizer(), "a \ud83d", ""),
    "half a pair in a chat": (byte_tokenizer(), [{"role": "user", "content": "\ud83d"}], ""),
    "nothing to join": (byte_tokenizer(template=None), [{"role": "user", "content": None}], ""),
    "refused": (
        byte_tokenizer("{{ raise_exception('Roles must alternate') }}"),
        MESSAGES,
        "Roles must alternate",
    ),
    "template in error": (byte_tokenizer("{% for m in messages %}"), MESSAGES, ""),
    "sum": (byte_tokenizer("{{ messages[0]['content'] + 1 }}"), MESSAGES, ""),
    "division": (byte_tokenizer("{{ 1 / (messages | length - 2) }}"), MESSAGES, "by zero"),
    "range": (byte_tokenizer("{{ range(10 ** 9) }}"), MESSAGES, "Range too big"),
    "missing": (byte_tokenizer("{{ messages[0].content.count() }}"), MESSAGES, ""),
    "memory": (byte_tokenizer("{{ 'a' * 10 ** 16 }}"), MESSAGES, "MemoryError"),
    "recursion": (
        byte_tokenizer("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        MESSAGES,
        "recursion depth",
    ),
}


@pytest.mark.mend("a bare MemoryError or RecursionError of a chat template")
@pytest.mark.parametrize("case", UNTAKEN)
def test_what_template_and_tokenizer_do_not_take_is_named_in_one_line(case):
    tokenizer, prompt, reason = UNTAKEN[case]
    message = f"chat template and tokenizer accept, got .*{reason}"
    with pytest.raises(ValueError, match=message) as refusal:
        encode_prompt(Side(tokenizer), prompt)
    assert "\n" not in str(refusal.value)
    str(refusal.value).encode()  # can be printed


ENDLESS = {
    "loops": "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
    "doubles a text": "{% set n = namespace(x='a') %}{% for _ in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
}


@pytest.mark.mend("chat templates that loop or double a text")
@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_that_does_not_end_is_ended(case, monkeypatch):
    monkeypatch.setattr(prompt, "LOOK_S", 0.01)
    monkeypatch.setattr(prompt, "LOOKS", 1 if case == "loops" else 10**6)
    monkeypatch.setattr(prompt, "MOST_BYTES", 1 << 26)
    with pytest.raises(ValueError, match="got .*it takes over .* s, or 64 MB"):
        encode_prompt(Side(byte_tokenizer(ENDLESS[case])), MESSAGES)
    assert encode_prompt(Side(byte_tokenizer()), MESSAGES)


@pytest.mark.parametrize("case", ["division", "range", "sum"])
def test_errors_of_a_template_are_those_that_distillation_skips(case):
    tokenizer, messages, _ = UNTAKEN[case]
    with pytest.raises(TemplateError):
        PromptRenderer(Side(tokenizer), {}).prompt_ids(messages)
    prompt = Prompt(0, messages=tuple(messages))
    conversation = Conversation(prompt, PromptRenderer(Side(tokenizer), {}), CONTEXT)
    assert not conversation.ask()
    assert "refuses the messages" in conversation.record()["skipped"]


def test_a_conversation_is_rendered_ready_for_the_answer():
    tokenizer = byte_tokenizer()
    text = tokenizer.decode(encode_prompt(Side(tokenizer), MESSAGES))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_template_messages_are_joined_and_text_is_taken_as_it_is():
    side = Side(byte_tokenizer(template=None))
    assert side.tokenizer.decode(encode_prompt(side, MESSAGES)) == "Be brief.\nHi"
    assert side.tokenizer.decode(encode_prompt(side, "a  b")) == "a  b"


KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
"""As Qwen's and DeepSeek's: what has another role is left out."""


@pytest.mark.mend("most templates left out a message of OpenAI's role developer in silence")
def test_a_developers_message_is_the_systems():
    """OpenAI's newer name, which most templates leave out."""
    side = Side(byte_tokenizer(KNOWN_ROLES))
    developer = [{**MESSAGES[0], "role": "developer"}, MESSAGES[1]]
    assert encode_prompt(side, developer) == encode_prompt(side, MESSAGES)
    assert developer[0]["role"] == "developer"


@pytest.mark.mend(
    "a question of a role that the template does not know was left out, and something else answered"
)
def test_a_question_that_the_template_leaves_out_is_refused():
    side = Side(byte_tokenizer(KNOWN_ROLES))
    for role in ("human", "User", ""):
        with pytest.raises(ValueError, match="leaves out the last message; its role is expected"):
            encode_prompt(side, [MESSAGES[0], {"role": role, "content": "Hi"}])
    collapsed = Side(
        byte_tokenizer("{% for m in messages %}{{ m.content.split() | join(' ') }}{% endfor %}")
    )
    assert encode_prompt(collapsed, [{"role": "user", "content": " a\n\n\nb "}])
