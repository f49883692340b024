"""The promise: a mistake gets one clear line (expected, got, next step) and exit code 2, and
nothing is written. The lines of a file in the wrong place: `test_wrong_inputs`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from tiny_chat import llama
from tiny_heads import make_head
from tiny_targets import random_model
from typed_commands import failed, questions

from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
from draftheads.scripts import cli

DISTILL = "distill --target target --out data"
BENCH = "bench --target target --prompts prompts.jsonl"
CHAT = "chat --target target"
LENIENT = f"{CHAT} --head model:target --max-new-tokens 11 --lenient"
DTYPE = "--dtype: expected auto, float32, bfloat16 or float16, got 'fp32'"
DEVICE = "device: expected one of this machine, got '{}'; try "

ROWS: dict[str, list[tuple[str, ...]]] = {
    "a command line": [
        ("frobnicate", "No such command 'frobnicate'; see `draftheads --help`"),
        ("distil", "Did you mean 'distill'?"),
        ("distill --temprature 1", "No such option: --temprature (Possible options: "),
        ("distill --target me/x", "Missing option '--prompts'; see `draftheads distill --help`"),
        ("chat --system", "Option '--system' requires an argument"),
        ("keys optim all", "Got unexpected extra argument(s) (all); see `draftheads keys --help`"),
        ("distill --tools maybe", "--tools: expected keep, drop or a JSON file of definitions, "),
        ("distill --reasoning x", "--reasoning: expected keep, drop or only, got 'x'; see `draft"),
        ("bench --dtype fp", "--dtype: expected auto, float32, bfloat16 or float16, got 'fp'"),
        ("bench --nodes 4,x", "--nodes: expected numbers such as 4,8,16, got '4,x'"),
        ("distill --limit 0", "--limit: expected greater than or equal to 1, got '0'; see "),
        ("distill --limit few", "--limit: expected a valid integer, got 'few'; see `draftheads"),
        ("tune --prompts me/p", "Missing option '--head'"),
        ("tune --head head", "Missing option '--prompts'"),
        # as from `--head $UNSET`: the plain model chatted
        *((f"chat --target me/x {option}", option) for option in ("--head", "--nodes")),
        ("chat --target me/x --head --learn", "--learn"),
        ("chat --target me/x --nodes --learn", "--learn"),
    ],
    "prompts": [
        (f"{DISTILL} --prompts broken.jsonl", "broken.jsonl", "17"),
        (f"{DISTILL} --prompts empty.jsonl", "empty.jsonl", "empty"),
        (f"{DISTILL} --prompts promts.jsonl", "promts.jsonl", "did you mean", "prompts.jsonl"),
        (
            "bench --target target --prompts promts.jsonl --head head",
            "promts.jsonl",
            "did you mean",
            "prompts.jsonl",
        ),
        (
            "bench --target target --prompts long.jsonl --head head",
            "context",
            "256",
            "shorter prompts",
        ),
        (
            f"{DISTILL} --prompts calls.jsonl --tools keep",
            "drops them",
            "leave them out with --tools drop",
        ),
        (
            f"{DISTILL} --prompts calls.jsonl --tools some",
            "--tools: expected keep, drop or a JSON file",
        ),
        (
            f"{DISTILL} --prompts calls.jsonl --reasoning some",
            "--reasoning: expected keep, drop or only, got 'some'",
        ),
        # these made every prompt of a distillation "skipped", and its exit code 0
        *(
            (f"{DISTILL} --prompts prompts.jsonl --template-args {text}", said)
            for text, said in {
                "{": "--template-args: expected a JSON object",
                "[]": "--template-args: expected a JSON object",
                "[" * 100_000: "--template-args: expected a JSON object",
                '{"tokenize":true}': "got tokenize, which is always set",
                '{"messages":[]}': "got messages, which is always set",
                '{"add_generation_prompt":false}': "got add_generation_prompt, which is always set",
            }.items()
        ),
    ],
    "a target": [
        (
            "bench --target other --head head --prompts prompts.jsonl",
            "vocabulary 259",
            "19",
            "pass the target this head was trained for",
        ),
        (
            "distill --target mamba --prompts prompts.jsonl --out data",
            "no position_ids, which tree nodes need",
        ),
        *(
            (f"{command} {option}", said)
            for command in (
                f"{DISTILL} --prompts prompts.jsonl",
                f"{BENCH} --head head",
                f"{CHAT} --head head",
                "doctor --target target --head head --prompts prompts.jsonl",
            )
            for option, said in {
                "--dtype fp32": DTYPE,
                "--device cuda:99": DEVICE.format("cuda:99").split(";")[0],
            }.items()
        ),
        *(
            (f"{DISTILL} --prompts prompts.jsonl --device {device}", DEVICE.format(device))
            for device in ("gpu", "cpu:x", "mps:7")
        ),
        (
            "convert head vllm --to vllm --target target --dtype fp32",
            "--dtype: expected auto, float32, bfloat16, float16, q8_0 or q4_0, got 'fp32'",
        ),
        (
            "convert head vllm --to vllm --target target --device cuda:99",
            DEVICE.format("cuda:99").split(";")[0],
        ),
        ("doctor --target target --head head --server-model x", "expected --engine, too"),
        ("convert head vllm --to vllm --dtype q8_0", "--dtype q8_0", "--to gguf", "--to vllm"),
        # `Path.expanduser` raises RuntimeError for them
        ("chat --target ~nobody-of-that-name/x", "~nobody-of-that-name/x"),
        ("chat --head ~nobody-of-that-name/x", "~nobody-of-that-name/x"),
        (
            "distill --target ~nobody-of-that-name/x --prompts prompts.jsonl --out data",
            "~nobody-of-that-name/x",
        ),
    ],
    "a recipe": [
        ("train misspelt.yaml", "save_evry", "run.save_every"),
        ("train recipe.yaml head.from=", "head.from", "an empty one"),
        ("train recipe.yaml optim.lrr=1", "lrr", "optim.lr"),
        ("train recip.yaml", "recip.yaml"),
        ("train recipe.yaml target=./nowhere", "nowhere", "config.json"),
    ],
    "what cannot be written": [
        (
            f"distill --target target --prompts prompts.jsonl --out {place}",
            "--out: expected a folder that can be written",
            place,
            "give",
        )
        for place in ("file/below", "/proc/draftheads")
    ]
    + [
        (f"{BENCH} --head me/heads --json {place}", *said)
        for place, said in {
            "file/a.json": ("a.json", "can be written"),
            "/proc/a.json": ("/proc/a.json", "can be written"),  # not by root
            "target": ("expected a file to write, got a folder",),
            "fifo": ("fifo: expected a file to write, got a",),  # a file would stand in its place
            "link": ("link: expected a file to write, got a",),
            "-": ("expected a file to write, got -, and stdout has the table",),
        }.items()
    ]
    + [("report head --out target", "target: expected a file to write, got a folder")],
    "a head": [
        ("chat --head nothing", "nothing: expected a head, got nothing"),
        ("publish empty me/heads", "expected a head, got an empty folder"),
        *(
            (f"{CHAT} --head {name}", "expected a", "got the empty name ''; pass a")
            for name in ("ngram+", "+", "model:")
        ),
        ("chat --head ngram", "ngram does not say which target", "pass --target"),
        (f"{BENCH} --head mtp:two", "expected a number of tokens", "got 'two'"),
        (f"{BENCH} --head retrieve:none", "expected a file or folder of texts, got nothing"),
        (f"{BENCH} --head retrieve:", "expected a file or folder of texts, got nothing"),
        (f"{BENCH} --head head+nothing", "head nothing: expected a head, got nothing"),
        ("tune --head me/heads --prompts me/p", "--head: expected a head folder"),
        ("tune --head theirs --prompts me/p", "own layout", "draftheads convert"),
        ("report ngram", "expected a head"),
    ],
    "trees and rules": [
        (f"{BENCH} --head head --tree 1,1,1", "3 deep, the head predicts only 2"),
        (f"{BENCH} --head head --tree 4;2", "expected widths like 4,2,1"),
        (
            f"{BENCH} --head head --tree nodes=3,depth=2,top_k=2",
            "fixed tree",
            "nodes=3,depth=2,top_k=2",
            "4,2,1",
        ),
        (f"{BENCH} --head ngram --tree 2,1", "got a fixed tree"),
        (f"{BENCH} --head head --tree 2,1 --nodes 4", "--nodes: expected a head without a --tree"),
        (f"{BENCH} --head me/heads --seed {2**63}", "--seed"),
        (f"{LENIENT} top=2 --typical", "expected greedy decoding by one rule"),
        (f"{LENIENT} top=2 --temperature 1", "got it with --temperature"),
        *(
            (f"{LENIENT} {value}", f"gap and surprise, got '{value}'")
            for value in ("none=1", "top", "gap=x", "2", "top=1.5", "top=inf")
        ),
        (f"{LENIENT} top=0", "lenient: expected top of 1 or more"),
    ],
    "a server": [
        ("serve --target target --api-key-env NO_SUCH", "environment variable"),
        ("serve --target target --temperature -1", "--temperature"),
        ("serve --target target --host 256.1.1.1", "expected a free address"),
        ("serve --target target --root-path model", "expected a path such as /m"),
        *(
            (f"doctor --target target --head head --prompts prompts.jsonl --engine {url}", *said)
            for url, said in {
                "localhost:8000": ("expected http://HOST:PORT", "got 'localhost:8000'", "give"),
                "ftp://host": ("expected http://HOST:PORT", "got 'ftp://host'"),
                "http://me:secret@host": ("expected no password", "--api-key-env"),
                "http://127.0.0.1:9": ("expected an OpenAI-compatible server", "start it"),
            }.items()
        ),
    ],
}
"""Journey -> command lines, and the words of the line that answers each."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, target) -> Path:
    """A folder with what the lines above name."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(target, folder / "target")
    random_model("llama").save_pretrained(folder / "other")
    random_model("mamba").save_pretrained(folder / "mamba")
    save_head(make_head(MedusaHead, llama(), depth=2), folder / "head", target=llama())
    (folder / "theirs").mkdir()
    (folder / "theirs" / "config.json").write_text("{}")
    (folder / "answers" / "theirs").mkdir(parents=True)
    (folder / "empty").mkdir()
    questions(folder)
    lines = [json.dumps({"prompt": f"question {n}"}) for n in range(20)]
    lines[16] = '{"prompt": "question'
    call = {"function": {"name": "add", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    recipe = {
        "target": "target",
        "data": {"path": "answers", "sequence_length": 64, "rows_per_batch": 2},
        "head": {"kind": "medusa", "depth": 2, "nodes": 6},
        "run": {"output": "run", "steps": 2, "tokens_per_step": 128, "save_every": 2},
    }
    misspelt = {**recipe, "run": {**recipe["run"], "save_evry": 3}}
    texts = {
        "broken.jsonl": "\n".join(lines),
        "empty.jsonl": json.dumps({"prompt": "  "}),
        "long.jsonl": json.dumps({"prompt": "long " * 200}),
        "calls.jsonl": json.dumps({"messages": talk}),
        "recipe.yaml": yaml.safe_dump(recipe),
        "misspelt.yaml": yaml.safe_dump(misspelt),
        "file": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/dev/null")
    return folder


@pytest.fixture(autouse=True)
def nothing_is_written(place, monkeypatch):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    yield
    assert sorted(place.rglob("*")) == before


@pytest.mark.mend("figures for a place that takes no files were lost after measuring")
@pytest.mark.mend("bench --nodes beside --tree was ignored")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param(line, said, id=f"{journey}: {line[:80]}")
        for journey, rows in ROWS.items()
        for line, *said in rows
    ],
)
def test_a_mistake_is_one_line(run, line, said):
    failed(run(*line.split(" ")), *said)


def test_without_a_package_it_is_named(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "draftheads.infer.serve.app", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    failed(run("serve", "--target", "target"), "fastapi", "pip install")


EMPTY = [
    *("chat --head|", "chat --head=", "chat --target x --head|"),
    *("bench --target|  --head x --prompts y", "bench --target x --head y|  --prompts z"),
    *("bench --target x --head y --prompts|", "bench --target x --head y --prompts z --json|"),
    *("tune --head x --prompts|", "serve --target x --name|", "report|", "publish| user/name"),
    *("distill --target x --prompts y --out|", "distill --target x --prompts y --out= "),
    *("distill --target x --prompts y --out o --server|", "plan|", "train|", "train x.yaml|"),
    *("distill --target x --prompts y --out o --device|", "doctor --target x --head y --data|"),
    *("doctor --target x --head y --engine|", "doctor --target x --head y --engine="),
    *("convert x| --to vllm", "merge| x", "import-answers| --target x --out y", "data-preview|"),
]


@pytest.mark.mend('--head ""')
@pytest.mark.parametrize("line", EMPTY)
def test_an_empty_name_is_refused_and_never_read_as_the_working_directory(run, line, monkeypatch):
    """As from `--head "$UNSET"`; | stands for an empty argument. The folder is full of files that
    the commands could take.
    """
    monkeypatch.chdir("head")
    words = [word.replace("|", "") for word in line.replace("|", " | ").split()]
    code, out, errors = run(*words)
    option = words[words.index("") - 1] if "" in words else line.split()[-1].rstrip("=")
    named = option if option.startswith("--") else "an argument"
    assert (code, out) == (2, "")
    assert errors == [f"error: {named}: expected a value, got an empty one; {cli.NO_VALUE}"]


@pytest.mark.parametrize("value", [" ", ""])
def test_the_library_refuses_empty_names(value, monkeypatch):
    monkeypatch.chdir("head")
    for load, kind in ((load_head, "head"), (Target.load, "target")):
        with pytest.raises(FileNotFoundError, match=f"expected a {kind}, got the empty name"):
            load(value)
