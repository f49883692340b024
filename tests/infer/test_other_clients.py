"""The promise: other clients than OpenAI's own work with the server as they are. Opt-in:
`pytest -m interop`; each needs its package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from calling import CALLS, HISTORY, QUESTION, TOOLS, Calls, use
from served import running

from draftheads.heads.target.model import Target
from draftheads.infer.engine import Speculator
from draftheads.infer.serve.service import ServeOptions
from draftheads.recipes import FOLDER as RECIPES

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
SEEN = [("tool_calls", "I look."), ("stop", "A bird; 2.")]


@pytest.fixture
def calls() -> Iterator[tuple[Calls, str]]:
    engine = Calls()
    with running(engine) as (url, _):
        yield engine, f"{url}/v1"


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_calls_tools(calls, stream, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    engine, url = calls
    messages: list[Any] = [QUESTION]
    seen = []
    for _ in range(2):
        asked = {"messages": messages, "tools": TOOLS, "stream": stream}
        said = litellm.completion("openai/tiny", api_base=url, api_key="none", **asked)
        if stream:
            said = litellm.stream_chunk_builder(list(said), messages=messages)
        [choice] = said.choices
        seen.append((choice.finish_reason, choice.message.content))
        assert choice.message.reasoning_content in ("Both tools.", "Done.")
        messages.append(choice.message.model_dump())
        for call in choice.message.tool_calls or ():
            result = use(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert seen == SEEN
    assert engine.asked[-1].endswith(HISTORY)


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_calls_tools(calls, stream):
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import ToolMessage

    engine, url = calls
    model = langchain.ChatOpenAI(model="tiny", base_url=url, api_key="none", max_retries=0)
    model = model.bind_tools(TOOLS)
    messages: list[Any] = [("user", QUESTION["content"])]
    seen = []
    for _ in range(2):
        if stream:
            first, *more = model.stream(messages)
            said = sum(more, first)
        else:
            said = model.invoke(messages)
        seen.append((said.response_metadata["finish_reason"], said.content))
        given = [(call["name"], call["args"]) for call in said.tool_calls]
        assert given in (CALLS, []) and not said.invalid_tool_calls
        messages.append(said)
        for call in said.tool_calls:
            messages.append(ToolMessage(use(call["name"], call["args"]), tool_call_id=call["id"]))
    assert seen == SEEN
    assert engine.asked[-1].endswith(HISTORY)


TASKS = {
    "openings": """output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "endings": """output_type: multiple_choice
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
}


@pytest.fixture
def scored(tmp_path, monkeypatch) -> Callable[..., Any]:
    """What lm-eval finds of a task with these records."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def evaluate(task: str, records: list[Any], url: str, path: str, arguments: str) -> Any:
        data = tmp_path / "data.jsonl"
        data.write_text("\n".join(map(json.dumps, records)))
        (tmp_path / "task.yaml").write_text(
            f"task: {task}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f'doc_to_text: "{{{{question}}}}"\n{TASKS[task]}'
        )
        return lm_eval.simple_evaluate(
            "local-completions" if path == "completions" else "local-chat-completions",
            model_args=f"model=demo,base_url={url}/v1/{path},max_retries=1,{arguments}",
            tasks=[task],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            apply_chat_template=path != "completions",
            bootstrap_iters=0,
        )

    return evaluate


def test_lm_eval_compares_log_probabilities(scored):
    """The target's own answers are more likely than nonsense."""
    demo = RECIPES / "demo-target"
    target = Target.load(demo, dtype="float32")
    engine = Speculator(target)
    records = []
    for question in ("Return the", "If the file", "A list of"):
        steps = engine.generate(target.tokenizer(question)["input_ids"], max_new_tokens=5)
        answer = target.tokenizer.decode([token for step in steps for token in step.tokens])
        records.append({"question": question, "choices": [answer, " heron heron"]})
    with running(engine, ServeOptions("demo")) as (url, _):
        arguments = f"tokenizer={demo},tokenizer_backend=huggingface"
        results = scored("endings", records, url, "completions", arguments)
    assert results["results"]["endings"]["acc,none"] == 1.0
    first, *_ = results["samples"]["endings"]
    assert [is_greedy for [[_, is_greedy]] in first["resps"]] == [True, False]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_lm_eval_scores_the_demo_target(path, scored):
    """All of its answers are those that it has given before."""
    requests = pytest.importorskip("requests")
    is_chat = path != "completions"
    target = Target.load(RECIPES / "demo-target", dtype="float32")
    with running(Speculator(target), ServeOptions("demo")) as (url, _):
        records = []
        for question in ("Once upon a time", "Lily saw", "The heron"):
            messages = {"messages": [{"role": "user", "content": question}]}
            asked = messages if is_chat else {"prompt": question}
            body = {"max_tokens": 12, "stop": ".", **asked}
            [choice] = requests.post(f"{url}/v1/{path}", json=body, timeout=60).json()["choices"]
            answer = choice["message"]["content"] if is_chat else choice["text"]
            records.append({"question": question, "answer": answer})
        arguments = "tokenizer_backend=None,tokenized_requests=False"
        results = scored("openings", records, url, path, arguments)
    assert results["results"]["openings"]["exact_match,none"] == 1.0
