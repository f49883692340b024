"""The promise: a later turn adds what the template puts between answers. Each answer is learned as
it was written, once, behind what a chat shows the target; tool calls and results stay on
request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_server import Json, LocalServer
from tiny_chat import CONTEXT, END, TEMPLATE, byte_tokenizer, llama, options, records
from tokenizers import processors
from transformers import AutoTokenizer

from draftheads.heads.target.model import Target
from draftheads.infer.chat.repl import History
from draftheads.infer.continuous import Request
from draftheads.infer.prompt import PromptRenderer
from draftheads.infer.remote import ServerOptions
from draftheads.scripts.data import data_preview
from draftheads.train.data.answers import read_answers, read_manifest
from draftheads.train.data.conversation import NOTHING, Conversation, check_tools
from draftheads.train.data.distill import Answerer, distill
from draftheads.train.data.prompts import Prompt, read_conversations, read_prompts
from draftheads.train.data.server import ServedTarget
from draftheads.train.data.shards import documents_of
from draftheads.train.data.text_side import TextSide

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data folder at {DATA}")


# ---------------------------------------------------------------- turn by turn


def test_turns_stand_together_as_the_template_writes_them(target):
    renderer = PromptRenderer(target, {})
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


@needs_data
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
def test_real_templates(target, template, answer, documents):
    """The second answer stands behind what a chat sends."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizers/qwen2.5")
    tokenizer.chat_template = (DATA / f"chat-templates/{template}.jinja").read_text()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    asking = Target(target.model, tokenizer, name="qwen")
    asking.eos_ids = (end,)
    messages = tuple({"role": "user", "content": content} for content in ("Hello.", "And now?"))
    conversation = Conversation(Prompt(0, messages=messages), PromptRenderer(asking, {}), 10_000)
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
    conversation = Conversation(asking, PromptRenderer(side, {}), 10_000, **choices)
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


def test_answer_behind_rewritten_turns_stands_in_a_document_of_its_own():
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


def test_history_that_changes_later_is_not_gone_on_with():
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


def test_thoughts_are_learned_or_stay_as_context():
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
    assert record == {"id": 0, "skipped": NOTHING}


def test_without_chat_template_contents_are_joined_by_newlines():
    target = llama(template=None)
    messages = tuple({"role": role, "content": role} for role in ("system", "user", "user"))
    conversation = Conversation(Prompt(0, messages=messages), PromptRenderer(target, {}), CONTEXT)
    assert conversation.ask()
    assert target.tokenizer.decode(conversation.tokens) == "system\nuser"
    conversation.answer(target.tokenizer("yes")["input_ids"])
    assert conversation.ask()
    assert target.tokenizer.decode(conversation.tokens) == "system\nuseryes\nuser"


def test_end_token_that_the_tokenizer_adds_is_left_out():
    target = llama(template=None)
    backend = target.tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 256), ("<|im_end|>", END)]
    )
    for text in ("some text", "ends with an end token: <|im_end|>"):
        conversation = Conversation(Prompt(0, text=text), PromptRenderer(target, {}), CONTEXT)
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
def test_a_tokenizer_alone_has_the_end_tokens_of_its_target(tmp_path, generation):
    folder = saved(tmp_path, llama(), generation)
    assert TextSide.load(str(folder)).eos_ids == Target.load(folder).eos_ids != ()


@pytest.mark.parametrize(
    "generation", ["{", "[]", '{"eos_token_id": ["a"]}', '{"eos_token_id": -1}']
)
def test_damaged_end_tokens_are_refused_alike_with_and_without_weights(tmp_path, generation):
    folder = saved(tmp_path, llama(), generation)
    faults = []
    for load in (TextSide.load, Target.load):
        with pytest.raises(ValueError, match=f"^target {folder}: .*generation_config.json") as one:
            load(str(folder))
        faults.append(str(one.value))
    known = f"token ids from 0 to {llama().vocab_size - 1}"  # weights say how many there are
    assert faults[0] == faults[1].replace(known, "token ids from 0 on")
    assert "\n" not in faults[0]


# ---------------------------------------------------------------- templates that rewrite turns


TURNS = 3
CHOSEN = {"max_new_tokens": 40, "batch_size": 2}


def talks(count: int = 5) -> list[Prompt]:
    """Conversations of three turns; the third prompt does not fit into the context."""
    texts = [[f"{n}, {turn}?" for turn in range(TURNS)] for n in range(count)]
    texts[2:3] = [["x" * CONTEXT]] * (count > 2)
    messages = [tuple({"role": "user", "content": text} for text in talk) for talk in texts]
    return [Prompt(n, messages=talk) for n, talk in enumerate(messages)]


def thought(tokens: list[int]) -> list[int]:
    """What the thinking target says behind these tokens; no thoughts in every fifth case."""
    drawn = sum(tokens) % 97
    text = f"<think>hm {drawn}</think>so {drawn}" if drawn % 5 else f"so {drawn}"
    return [*llama().tokenizer(text)["input_ids"], END]


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory):
    target = llama(eos=(END,), template=STRIPPING)
    made = tmp_path_factory.mktemp("forgetful")
    target.model.save_pretrained(made)
    target.tokenizer.save_pretrained(made)
    return made


def think(
    engine: Any, rule: Any, most: int, take: Callable[[], Request | None]
) -> Iterator[tuple[Request, list[int], None]]:
    """Takes the place of the engine, and answers one request after the other."""
    while (request := take()) is not None:
        yield request, thought(list(request.prompt)), None


@pytest.fixture
def thinking(monkeypatch):
    """It thinks, and its template forgets the thoughts of earlier turns."""
    monkeypatch.setattr("draftheads.train.data.distill.answer_all", think)
    return llama(eos=(END,), template=STRIPPING)


def log(request: Json) -> Json:
    """A server's answer."""
    return {"text": "", "token_ids": thought(request["prompt"]), "finish_reason": "stop"}


@pytest.mark.parametrize("place", ["here", "server"])
def test_target_sees_in_training_what_it_sees_in_a_chat(place, thinking, forgetful, tmp_path):
    server = LocalServer(log)
    answering: Target | Answerer = thinking
    if place == "server":
        answering = ServedTarget(str(forgetful), ServerOptions(urls=[server.url]))
    report = distill(answering, talks(), options(tmp_path / "o", **CHOSEN))
    server.close()
    assert (report.counts.done, report.counts.skipped, report.complete) == (4, 1, True)
    for prompt, record in zip(talks(), records(tmp_path / "o"), strict=True):
        learned = [
            (document["tokens"][:start], document["tokens"][start:stop])
            for document in documents_of(record)
            for start, stop in document["learn"]
        ]
        if prompt.index == 2:
            assert not learned and "skipped" in record
            continue
        chat = History(thinking, None, 1)
        assert len(learned) == TURNS
        for message, (seen, said) in zip(prompt.messages or (), learned, strict=True):
            tokens, forgotten = chat.prompt(message["content"])
            assert (seen, forgotten) == (tokens, 0)
            assert said == thought(tokens)
            text = thinking.tokenizer.decode(said, skip_special_tokens=True)
            chat.add(message["content"], text)


def test_documents_conversations_and_prompts_add_up(thinking, tmp_path, capsys):
    report = distill(thinking, talks(), options(tmp_path / "o", **CHOSEN))
    documents = list(read_answers(tmp_path / "o"))
    counts = read_manifest(tmp_path / "o").counts
    assert (report.prompts, counts.done, counts.skipped, counts.turns) == (5, 4, 1, 12)
    assert counts.documents == len(documents) > counts.done
    assert counts.tokens == sum(len(document.tokens) for document in documents)
    said = f"4 conversations became {len(documents)} documents, because the chat template rewrites"
    assert said in capsys.readouterr().out


def test_thoughts_that_are_dropped_are_seen_and_not_learned(thinking, forgetful, tmp_path, capsys):
    distill(thinking, talks(2), options(tmp_path / "o", reasoning="drop", **CHOSEN))
    data_preview(tmp_path / "o", target=str(forgetful), count=99)
    shown = capsys.readouterr().out
    assert shown.count("</think>[[so ") == shown.count("</think>") > 0
    assert "[[<think>" not in shown


# ---------------------------------------------------------------- tools


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
TWICE = json.loads(json.dumps(OPENAI))
TWICE[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(json.dumps(CALL["arguments"]))
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


@pytest.mark.mend("arguments that were encoded twice were the text of an input")
@pytest.mark.parametrize("turns", [SHAREGPT, OPENAI, TWICE], ids=["sharegpt", "openai", "twice"])
def test_tool_turns_are_kept_or_dropped_and_answers_up_to_the_last_kept(tmp_path, turns):
    path = write(tmp_path, turns)
    assert read_prompts(path, tools="keep") == [Prompt(0, messages=(*KEPT, THANKS))]
    assert read_prompts(path, tools="drop") == [Prompt(0, messages=(KEPT[0], THANKS))]
    assert read_prompts(path) == read_prompts(path, tools="drop")
    said = {"role": "assistant", "content": "<think>easy</think>It is 3."}
    assert read_conversations(path) == [Prompt(0, (*KEPT, said))]
    assert read_conversations(path, tools="drop") == [Prompt(0, (KEPT[0], said))]


def test_target_answers_behind_the_results(tmp_path):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    [prompt] = read_prompts(write(tmp_path, SHAREGPT), tools="keep")
    renderer = PromptRenderer(TextSide("tiny", tokenizer, (END,)), {})
    check_tools(renderer, [prompt])
    conversation = Conversation(prompt, renderer, CONTEXT)
    for answer in ("three", "welcome"):
        assert conversation.ask()
        conversation.answer([*tokenizer(answer)["input_ids"], END])
    assert not conversation.ask()
    assert tokenizer.decode(conversation.tokens) == (
        "[user]1 + 2?<|im_end|>[assistant]add<|im_end|>[tool]3<|im_end|>[assistant]three<|im_end|>"
        "[user]Thanks.<|im_end|>[assistant]welcome<|im_end|>"
    )


@needs_data
def test_real_tool_conversations():
    path = DATA / "conversations/glaive_toolcall_en_demo.json"
    prompts = read_prompts(path, tools="keep")
    roles = [message["role"] for prompt in prompts for message in prompt.messages or ()]
    assert (len(prompts), roles.count("assistant"), roles.count("tool")) == (300, 211, 211)
    conversations = read_conversations(path)
    answers = [m for talk in conversations for m in talk.messages or () if m["role"] == "assistant"]
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
def test_template_is_asked_whether_it_shows_tools(template, complaint):
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizers/qwen2.5")
    tokenizer.bos_token = "<|endoftext|>"
    folder = DATA / "chat-templates"
    tokenizer.chat_template = (folder / f"{template}.jinja").read_text() if template else None
    renderer = PromptRenderer(TextSide("qwen", tokenizer, ()), {})
    check_tools(
        renderer, [Prompt(0, text="a"), Prompt(1, (THANKS,))]
    )  # without tools it is never asked
    if complaint is None:
        check_tools(renderer, [Prompt(0, (THANKS,)), Prompt(1, KEPT)])
        return
    with pytest.raises(ValueError, match=f"{complaint}.*; leave them out with --tools drop"):
        check_tools(renderer, [Prompt(0, (THANKS,)), Prompt(1, KEPT)])


@pytest.mark.parametrize("value", ["add(1, 2)", json.dumps({"arguments": {}}), "[1]"])
def test_broken_tool_call_is_named(tmp_path, value):
    turns = [SHAREGPT[0], {"from": "function_call", "value": value}, SHAREGPT[2]]
    path = write(tmp_path, turns)
    with pytest.raises(ValueError, match=r"line 1, conversations, turn 2: expected a tool call"):
        read_prompts(path, tools="keep")
    assert len(read_prompts(path, tools="drop")) == 1


def test_text_is_no_conversation(tmp_path, caplog):
    (tmp_path / "p.txt").write_text("a story")
    with pytest.raises(ValueError, match="expected at least one answer in a conversation"):
        read_conversations(tmp_path / "p.txt")
    assert caplog.messages == ["left out: 1 plain texts"]
    with pytest.raises(ValueError, match="expected at least one answer in a conversation"):
        read_conversations(write(tmp_path, SHAREGPT[:1]))
