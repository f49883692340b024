"""The promise: data sets are learned in the shapes that people have: just the answers, behind all
that stands beside the question; and a known key that is not read is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import END, TEMPLATE, byte_tokenizer, llama, options

from draftheads.infer.prompt import PromptRenderer
from draftheads.scripts.data import import_answers
from draftheads.scripts.options import PromptSet
from draftheads.train.data.answers import read_answers, read_manifest
from draftheads.train.data.conversation import NOTHING, check_tools
from draftheads.train.data.distill import _identify, distill
from draftheads.train.data.imports import replay
from draftheads.train.data.prompts import SETS, Prompt, read_conversations, read_prompts
from draftheads.train.data.shards import documents_of
from draftheads.train.data.text_side import TextSide

TOOLED = (  # as Hermes and Qwen
    "{% if tools %}T{{ tools | map(attribute='function.name') | join(',') }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REASONED = TOOLED.replace(
    "{% else %}",
    "{% else %}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}",
)
THINKING = TEMPLATE.replace(  # as Qwen 3: reasoning in a key, an empty block without
    "{{ m['content'] }}",
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m['content'] }}",
)
SHORT = {"<|im_start|>user\n": "U:", "<|im_start|>assistant\n": "A:", "<|im_end|>": "|"}
SHORT |= {"<|im_start|>system\n": "S:", "<|im_start|>tool\n": "R:", "|\n": "|"}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def learned(path: Path, template: str = TEMPLATE, **options: Any) -> list[str]:
    """The documents of the conversations in a file, with [[ and ]] around what is learned."""
    reasoning = options.pop("reasoning", "keep")
    tokenizer = byte_tokenizer(template)
    renderer = PromptRenderer(TextSide("t", tokenizer, (END,)), {})
    texts = []
    for talk in read_conversations(path, **options):
        given = renderer.with_variables(talk.template_args)
        record = replay(given, 0, talk.messages or (), reasoning)
        for document in documents_of(record) or [{"tokens": [], "learn": []}]:
            text = record.get("skipped", "")
            at = 0
            for start, stop in document["learn"]:
                text += tokenizer.decode(document["tokens"][at:start])
                text += f"[[{tokenizer.decode(document['tokens'][start:stop])}]]"
                at = stop
            for long, short in SHORT.items():
                text = text.replace(long, short)
            texts.append(text)
    return texts


def said(*turns: str) -> list[dict[str, Any]]:
    names = {"U": "user", "A": "assistant", "S": "system", "T": "tool"}
    return [{"role": names[turn[0]], "content": turn[2:]} for turn in turns]


def spelt_out(value: Any) -> Any:
    """A value of shapes.json: turns are written there as "U:question"."""
    if isinstance(value, dict) and "turn" in value:
        [turn] = said(value["turn"])
        return turn | {key: each for key, each in value.items() if key != "turn"}
    if isinstance(value, dict):
        return {key: spelt_out(each) for key, each in value.items()}
    if isinstance(value, list):
        parts = [said(each) if is_turn(each) else [spelt_out(each)] for each in value]
        return [each for part in parts for each in part]
    return value


def is_turn(value: Any) -> bool:
    return isinstance(value, str) and value[:2] in ("U:", "A:", "S:", "T:")


def table(name: str) -> Any:
    rows = json.loads(Path(__file__).with_name("shapes.json").read_text())[name]
    return pytest.mark.parametrize(("record", "expected"), rows)


@pytest.mark.mend("contexts, choices and answers of common data sets were left out in silence")
@pytest.mark.mend("answers of weight 0 were learned")
@pytest.mark.mend("marks that are texts, loss_mask and trainable were not seen")
@pytest.mark.mend("marks of a record, and KTO's rejected answers, were learned")
@pytest.mark.mend(
    "an empty answer vanished between two questions, a cut answer had an end token, reasoning of "
    "a record was left out or stood twice"
)
@table("learned")
def test_a_shape_is_learned(tmp_path, record, expected):
    """Answers without weight are context; without any other, there is nothing to learn."""
    path = write(tmp_path / "p.jsonl", spelt_out(record))
    assert learned(path) == [NOTHING if expected is None else expected]


@table("prompts")
def test_of_the_same_shapes_prompts_are_read_without_answers(tmp_path, record, expected):
    path = write(tmp_path / "p.jsonl", spelt_out(record))
    assert read_prompts(path) == [Prompt(0, messages=tuple(said(*expected)))]


def assert_refused(tmp_path: Path, record: Any, complaint: str, read: Callable[..., Any]) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "fine", "completion": "a"}, spelt_out(record))
    words = ".*".join(map(re.escape, complaint.split(".*")))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} line 2.*{words}"):
        read(path)


@pytest.mark.mend("an unreadable mark was silence")
@pytest.mark.mend(
    "a history as JSON text was a turn a character; labels of choices were replaced, the 27th "
    "choice vanished"
)
@table("refused conversations")
def test_a_conversation_that_cannot_be_read_is_one_line(tmp_path, record, expected):
    assert_refused(tmp_path, record, expected, read_conversations)


@pytest.mark.mend("a rendered chat in `text` was gone on with")
@table("refused prompts")
def test_a_prompt_that_cannot_be_read_is_one_line(tmp_path, record, expected):
    assert_refused(tmp_path, record, expected, partial(read_prompts, tools="keep"))


SYSTEM = {"messages": said("S:s", "U:q", "A:a"), "input": "q", "system": "t", "solution": ""}
PARTLY = [said("A:a")[0] | {"train_detail": [{"begin_offset": 0, "end_offset": 0, "train": False}]}]
TWO = {"messages": said("U:q", "A:a", "U:r", "A:b")}
UNREAD: list[tuple[Callable[..., Any], list[dict[str, Any]], str]] = [
    (
        read_conversations,
        [SYSTEM, SYSTEM, {"prompt": "q", "answer": "a", "output": "b"}],
        "2 input beside messages, 2 system beside messages, 1 answer beside prompt",
    ),
    (
        read_prompts,
        [{"prompt": "q", "answer": "a", "tools": [{"name": "f"}]}],
        "1 tools beside prompt",
    ),
    (
        read_conversations,
        [{"conversations": said("U:q", "A:a", "U:r"), "chosen": said("A:b")[0]}],
        "1 chosen beside conversations",
    ),
    (
        read_conversations,
        [{"messages": said("U:q", "A:", "U:r") + PARTLY, "label": 3}],
        "1 empty answers, 1 train_detail of a turn, 1 label beside messages",
    ),
    (read_conversations, [TWO | {"label": False}], "1 answers with label false"),
    (read_conversations, [TWO | {"kto_tag": "False"}], "1 answers with kto_tag false"),
]


@pytest.mark.mend("of two known keys the first was read, and the other not mentioned")
@pytest.mark.parametrize(("read", "records", "left_out"), UNREAD)
def test_known_keys_that_are_not_read_are_said(tmp_path, caplog, read, records, left_out):
    read(write(tmp_path / "p.jsonl", *records))
    assert caplog.messages == [f"left out: {left_out}"]


@pytest.mark.mend("chat_template_kwargs and documents of a record were not read")
def test_variables_of_a_record_reach_its_template(tmp_path):
    template = "{{ mood }}{% for d in documents or [] %}[{{ d.title }}]{% endfor %}" + TEMPLATE
    talk = {"messages": said("U:q", "A:a"), "documents": [{"title": "t"}]}
    mood = {"chat_template_kwargs": {"mood": "!"}}
    path = write(tmp_path / "p.jsonl", talk | mood, {"prompt": "q", "completion": "a"})
    assert learned(path, template) == ["![t]U:q|A:[[a|]]", "U:q|A:[[a|]]"]


def test_the_last_answer_alone_is_learned(tmp_path):
    path = write(tmp_path / "p.jsonl", {"messages": said("U:q", "A:a", "U:r", "A:b", "U:s")})
    assert learned(path, learn="last") == ["U:q|A:a|U:r|A:[[b|]]"]


# ---------------------------------------------------------------- tools


def call(name: str, number: str | None = None, **arguments: Any) -> dict[str, Any]:
    return {"id": number, "function": {"name": name, "arguments": arguments}}


CALLED = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize("wrap", [lambda tool: [tool], lambda tool: json.dumps([tool]), json.dumps])
def test_a_column_of_tools_reaches_the_template(tmp_path, wrap):
    turns = [*said("U:q"), {"role": "assistant", "tool_calls": [call("f", x=1)]}]
    turns += said("T:r", "A:a")
    path = write(tmp_path / "p.jsonl", {"tools": wrap({"name": "f"}), "messages": turns})
    result = "R:<tool_response>\nr\n</tool_response>|"
    shown = f"Tf\nU:q|A:[[<tool_call>{CALLED}</tool_call>|]]\n{result}A:[[a|]]"
    assert learned(path, TOOLED) == [shown]
    [prompt] = read_prompts(path, tools="keep")
    other = Prompt(0, prompt.messages, template_args={"tools": [{"function": {"name": "g"}}]})
    assert _identify([prompt])[0] != _identify([other])[0], "other tools, another prompt"


def test_a_target_is_asked_with_the_tools_of_the_prompt(tmp_path):
    path = write(tmp_path / "p.jsonl", {"tools": [{"name": "f"}], "prompt": "q"}, {"prompt": "q"})
    distill(llama(template=TOOLED), read_prompts(path, tools="keep"), options(tmp_path / "o"))
    starts = ["Tf\n<|im_start|>user\nq", "<|im_start|>user\nq"]
    texts = [byte_tokenizer().decode(answer.tokens) for answer in read_answers(tmp_path / "o")]
    assert [text.startswith(start) for text, start in zip(texts, starts, strict=True)] == [True] * 2


def test_tools_that_a_template_does_not_show_are_said(caplog):
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    for template, lines in ((TOOLED, 0), (TEMPLATE, 1)):
        renderer = PromptRenderer(TextSide("t", byte_tokenizer(template), (END,)), {})
        check_tools(renderer, [Prompt(0, tuple(said("U:q")), template_args=tools)])
        assert len(caplog.messages) == lines


def test_tools_of_a_file_are_recorded_as_a_template_variable(tmp_path):
    byte_tokenizer(TOOLED).save_pretrained(tmp_path / "target")
    path = write(tmp_path / "p.jsonl", {"messages": said("U:q", "A:a")})
    tools = write(tmp_path / "tools.json", [{"name": "f"}])
    import_answers(
        str(path), str(tmp_path / "target"), tmp_path / "out", PromptSet(tools=str(tools))
    )
    kept = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    assert read_manifest(tmp_path / "out").sampling.template_args == kept
    for wrong, got in (
        ("kepe", "a JSON file of definitions, got 'kepe'"),
        (str(path), "got keys me"),
        (str(write(tmp_path / "wrong.json", {"function": 5})), "got keys function"),
    ):
        with pytest.raises(ValueError, match=got):
            PromptSet(tools=wrong).template_args("{}")


@pytest.mark.mend("calls in Parquet files were learned with the arguments of all tools, null")
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_nulls_that_arrow_adds_are_no_arguments(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    from pyarrow import parquet

    asked = [call("f", "1", x=1), call("g", "2", y="z")]
    turns = [*said("U:q"), {"role": "assistant", "content": "", "tool_calls": asked}, *said("A:a")]
    table = pyarrow.Table.from_pylist([{"messages": turns}])
    path = tmp_path / f"p.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    [talk] = read_conversations(path)
    calls = (talk.messages or ())[1]["tool_calls"]
    assert [each["function"]["arguments"] for each in calls] == [{"x": 1}, {"y": "z"}]


@pytest.mark.mend("<tool_response> stood twice around Hermes's results")
def test_results_in_hermes_layout_are_not_wrapped_twice(tmp_path):
    wrapped = f"<tool_call>{CALLED}</tool_call>"
    both = "<tool_response>\nr\n</tool_response>\n<tool_response>\ns\n</tool_response>"
    turns = said("U:q", f"A:{wrapped}", f"T:{both}", "A:a")
    path = write(tmp_path / "p.jsonl", {"messages": turns})
    shown = f"U:q|A:[[{wrapped}|]]\nR:{both}|A:[[a|]]"
    assert learned(path, TOOLED) == [shown]
    assert learned(path, tools="drop") == ["U:q|A:[[a|]]"]


def test_parallel_calls_are_one_answer_and_their_results_find_them(tmp_path):
    calls = [call("f", "1", x=1), call("g", "2")]
    results = said("T:s", "T:r")
    for result, number in zip(results, "21", strict=True):
        result["tool_call_id"] = number
    asked = {"role": "assistant", "content": None, "tool_calls": calls}
    path = write(tmp_path / "p.jsonl", {"messages": [*said("U:q"), asked, *results, *said("A:a")]})
    [shown] = learned(path, TOOLED)
    other = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert shown.startswith(f"U:q|A:[[<tool_call>{CALLED}</tool_call>{other}|]]")
    [talk] = read_conversations(path)
    assert [message["name"] for message in (talk.messages or ())[2:4]] == ["g", "f"]


# ---------------------------------------------------------------- reasoning


def test_all_marked_calls_of_a_turn_are_read(tmp_path):
    """Also where one of them is a list."""
    first = '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>'
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": f'{first}<tool_call>{{"name": "h"}}</tool_call>'},
    ]
    [talk] = read_conversations(write(tmp_path / "a.jsonl", {"conversations": turns}))
    calls = (talk.messages or ())[1]["tool_calls"]
    assert [each["function"]["name"] for each in calls] == ["f", "g", "h"]


@pytest.mark.mend("records with arguments encoded twice, or with marks of calls inside")
@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (json.dumps({"x": 1}), {"x": 1}),
        (json.dumps(json.dumps(json.dumps({"x": 1}))), {"x": 1}),
        *((empty, {}) for empty in ("", " ", None, "null", '""', {})),
        ({"x": "</tool_call> and <tool_call>"}, {"x": "</tool_call> and <tool_call>"}),
        ("heron", {"input": "heron"}),
    ],
)
@pytest.mark.parametrize("key", ["arguments", "parameters", "input"])
def test_arguments_are_decoded_until_they_are_an_object(tmp_path, key, given, arguments):
    """In calls as objects, and in marked ones."""
    asked = {"name": "f", key: given}
    marked = f"<tool_call>{json.dumps(asked)}</tool_call>"
    for turn in (
        {"role": "assistant", "tool_calls": [{"function": asked}], "content": f"See. {marked}"},
        {"from": "function_call", "value": f"{marked}{marked}"},
    ):
        path = write(tmp_path / "a.jsonl", {"messages": [*said("U:q"), turn]})
        [talk] = read_conversations(path)
        _, answer = talk.messages or ()
        assert answer["content"].strip() in ("See.", "")
        for each in answer["tool_calls"]:
            assert each["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.mend("reasoning in keys was dropped, and an answer learned without it")
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "turn", "channel"])
def test_reasoning_in_its_own_place_is_learned(tmp_path, key):
    turns = said("U:q", "A:a")
    if key == "turn":
        turns.insert(1, {"role": "thinking", "content": "hm"})
    elif key == "channel":
        turns.insert(1, {"role": "assistant", "channel": "analysis", "content": "hm"})
    else:
        turns[1][key] = "hm"
    path = write(tmp_path / "p.jsonl", {"messages": turns})
    thought = "<think>\nhm\n</think>"
    for template in (THINKING, TEMPLATE):  # the second one has no place for it but the text
        assert learned(path, template) == [f"U:q|A:[[{thought}\n\na|]]"]
        assert learned(path, template, reasoning="drop") == [f"U:q|A:{thought}[[\n\na|]]"]
        assert learned(path, template, reasoning="only") == [f"U:q|A:[[{thought}]]"]


PARTS = [
    [  # as LLaMA-Factory has them
        {"role": "user", "content": [{"type": "text", "value": "q"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "reasoning", "value": "hm"},
                {"type": "text", "value": "a"},
                {"type": "tool_call", "value": CALLED},
            ],
        },
        {"role": "tool", "content": [{"type": "text", "value": "r"}]},
    ],
    [  # as Anthropic's interface has them
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
    ],
    [  # as Mistral's has them
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                {"type": "text", "text": "a"},
            ],
            "tool_calls": [json.loads(CALLED)],
        },
        {"role": "tool", "content": "r"},
    ],
]


@pytest.mark.mend(
    'conversations whose contents have parts under "value" were empty, and reasoning and calls '
    "in parts were left out"
)
@pytest.mark.parametrize("turns", PARTS)
def test_reasoning_calls_and_results_may_be_parts_of_a_content(turns, tmp_path):
    path = write(tmp_path / "p.jsonl", {"messages": [*turns, *said("A:b")]})
    [talk] = read_conversations(path)
    user, asked, result, last = talk.messages or ()
    assert [each["content"] for each in (user, asked, result, last)] == ["q", "a", "r", "b"]
    assert asked["reasoning_content"] == "hm"
    [made] = asked["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": {"x": 1}}
    assert result["tool_call_id"] == made["id"] and result["name"] == "f"
    assert [each.messages for each in read_prompts(path, tools="drop")] == [
        ({"role": "user", "content": "q"},)
    ]


def test_a_question_may_stand_behind_a_result(tmp_path, caplog):
    turns = json.loads(json.dumps(PARTS[1]))
    turns[2]["content"] += [{"type": "text", "text": "and?"}, {"type": "image", "source": {}}]
    path = write(tmp_path / "p.jsonl", {"messages": [*turns, *said("A:b")]})
    [talk] = read_conversations(path)
    assert [each["role"] for each in talk.messages or ()][2:] == ["tool", "user", "assistant"]
    assert (talk.messages or ())[3]["content"] == "and?"
    assert "1 image" in caplog.text


def test_an_empty_block_is_learned_if_the_target_wrote_it(tmp_path):
    block = "<think>\n\n</think>\n\n"
    path = write(tmp_path / "p.jsonl", {"messages": said("U:q", "A:a")})
    assert learned(path, THINKING) == [f"U:q|A:{block}[[a|]]"]
    assert learned(path, THINKING, reasoning="only") == [NOTHING]
    write(path, {"messages": said("U:q", f"A:{block}a")})
    assert learned(path, THINKING) == [f"U:q|A:[[{block}a|]]"]


def test_reasoning_that_the_prompt_has_ended_is_left_out_of_answers(tmp_path):
    ended = TEMPLATE.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n")
    path = write(tmp_path / "p.jsonl", {"messages": said("U:q", "A:<think>hm</think>a")})
    assert "expected no reasoning" in learned(path, ended)[0]
    assert learned(path, ended, reasoning="drop") == ["U:q|A:<think>\n\n</think>\n\n[[a|]]"]


# ---------------------------------------------------------------- agents


@table("sessions")
def test_a_session_of_an_agent_is_learned_like_a_conversation(tmp_path, record, expected):
    """Answers of other models are context; so is what was said before a history was compacted."""
    path = tmp_path / "session.traj"
    path.write_text(json.dumps(record))
    if isinstance(record, list):  # an event a line; the agent was stopped in the last one
        path = write(tmp_path / "session.jsonl", *record)
        path.write_text(path.read_text() + '{"type": "user", "mess')
    assert learned(path, REASONED, model="org/Tiny") == expected


def session(model: str) -> list[dict[str, Any]]:
    user, answer = said("U:q", "A:a")
    return [
        {"type": "user", "parentUuid": None, "uuid": "1", "message": user},
        {"type": "assistant", "parentUuid": "1", "message": answer | {"model": model}},
    ]


def test_sessions_of_other_models_are_left_out_and_counted(tmp_path, caplog):
    days = tmp_path / "sessions" / "2026" / "01"
    for name, model in (("a", "tiny"), ("b", "gpt-5"), ("c", "gpt-5"), ("d", "opus")):
        (days / name).mkdir(parents=True)
        write(days / name / "rollout.jsonl", *session(model))
    (days / "MEMORY.md").write_text("a note")
    (days / "agent.meta.json").write_text('{"agentType": "explore"}')
    assert learned(tmp_path, model="org/Tiny-2026-01-02") == ["U:q|A:[[a|]]"]
    hint = "without an answer of tiny"
    counts = f"1 plain texts, 2 sessions of gpt-5 {hint}, 1 sessions of opus {hint}"
    assert caplog.messages == [f"left out: {counts}"]
    assert len(learned(tmp_path, model="gpt-5")) == 2
    assert len(learned(tmp_path)) == 4, "no model is asked for"
    with pytest.raises(ValueError, match="expected at least one answer.*--model NAME"):
        read_conversations(tmp_path, model="other")


def test_a_session_is_imported_under_the_name_of_the_target(tmp_path, caplog):
    """Tools are called in it that it does not define."""
    byte_tokenizer(TOOLED).save_pretrained(tmp_path / "tiny")
    events = session("tiny")
    asked = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    events[1]["message"]["content"] = [asked]
    path = write(tmp_path / "p.jsonl", *events)
    import_answers(str(path), str(tmp_path / "tiny"), tmp_path / "out")
    assert len(list(read_answers(tmp_path / "out"))) == 1
    [line] = caplog.messages
    assert line.startswith("calls without definitions of tools")
    with pytest.raises(ValueError, match="expected at least one answer"):
        import_answers(str(path), str(tmp_path / "tiny"), tmp_path / "new", model="other")
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------- files


def test_files_are_unpacked_and_tables_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    line = json.dumps({"prompt": "q", "completion": "a"}).encode() + b"\n"
    for name in ("p.jsonl.zst", "p.jsonl.gz", "p.JSONL.bz2"):
        with pyarrow.output_stream(str(tmp_path / name)) as file:
            file.write(line)
    (tmp_path / "p.csv").write_text('prompt,completion,text\n"q",a,\n')
    for path in sorted(tmp_path.iterdir()):
        assert learned(path) == ["U:q|A:[[a|]]"], path
    assert len(read_prompts(tmp_path)) == 4


FIELDS = ["02108", "3.10", "true", "FALSE", "None", "NA", "null", "nan", "1e3", " x "]


@pytest.mark.mend('"02108" in a CSV was learned as 2108.0, "None" and "NA" vanished')
@pytest.mark.parametrize("name", ["p.csv", "p.tsv", "p.csv.gz", "p.csv.zst", "hub"])
def test_fields_of_tables_are_text(tmp_path, monkeypatch, name):
    pyarrow = pytest.importorskip("pyarrow")
    mark = "\t" if name == "p.tsv" else ","
    rows = [f"q{mark}{field}{mark}0" for field in FIELDS]
    content = "\n".join([f"question{mark}answer{mark}n", *rows, ""]).encode()
    source = tmp_path / name
    if name == "hub":  # `datasets` reads them from a folder named like that of the Hub
        pytest.importorskip("datasets")
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setitem(SETS, "gsm8k", {"path": str(source), "split": "train"})
        source.mkdir()
        (source / "train.csv").write_bytes(content)
        source = Path("gsm8k")
    else:
        with pyarrow.output_stream(str(source)) as file:
            file.write(content)
    assert [(talk.messages or ())[1]["content"] for talk in read_conversations(source)] == FIELDS
