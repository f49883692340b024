"""The promise: a file or folder in the wrong place is named for what it is, and where it belongs,
in one line with exit code 2, before torch is loaded; the right one passes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftheads.arguments import (
    ADAPTER,
    ANSWERS,
    EMPTY,
    FILE,
    GGUF,
    HEAD,
    JSON,
    MODEL,
    NOTHING,
    PART,
    PROMPTS,
    RECIPE,
    USES,
    kind_of,
)
from draftheads.recipes import FOLDER

WORKER = Path(__file__).parents[1] / "helpers" / "without_torch.py"

INPUTS = {
    "prompts.jsonl": PROMPTS,
    "prompts.csv": PROMPTS,
    "recipe.yaml": RECIPE,
    "llm": MODEL,
    "head": HEAD,
    "run": HEAD,
    "answers": ANSWERS,
    "adapter": ADAPTER,
    "chat.gguf": GGUF,
    "CHAT.GGUF": GGUF,
    "sha256-70f2": GGUF,
    "folder-with-one": GGUF,
    "table.json": JSON,
    "llm/model.safetensors": PART,
    "notes.pdf": FILE,
    "empty": EMPTY,
    "nowhere": NOTHING,
    "./nowhere": NOTHING,
    "x.gguff": NOTHING,
}

TARGETS, TEXTS = {MODEL, GGUF}, {PROMPTS, RECIPE, JSON, FILE}
SLOTS = {
    "questions --target X --out new.jsonl": TARGETS,
    "distill --target X --prompts prompts.jsonl --out new": TARGETS,
    "distill --target llm --prompts X --out new": {PROMPTS, JSON},
    "distill --target llm --prompts prompts.jsonl --out new --head X": {HEAD},
    "distill --target llm --prompts prompts.jsonl --out new --adapter X": {ADAPTER},
    "import-answers X --target llm --out new": {PROMPTS, JSON},
    "import-answers prompts.jsonl --target X --out new": TARGETS,
    "data-preview X": {ANSWERS},
    "data-preview answers --target X": TARGETS,
    "init --target X --out new.yaml": TARGETS,
    "init --target llm --data X --out new.yaml": {ANSWERS, EMPTY, NOTHING},
    "plan X": {RECIPE},
    "plan recipe.yaml target=X": TARGETS,
    "train X": {RECIPE},
    "train/medusa.py X": {RECIPE},
    "train/eagle.py recipe.yaml data.path=X": {ANSWERS},
    "train recipe.yaml head.from=X": {HEAD},
    "train recipe.yaml target=X": TARGETS,
    "train recipe.yaml data.path=X": {ANSWERS},
    "train recipe.yaml target_adapter=X": {ADAPTER},
    "bench --target X --head head --prompts prompts.jsonl": TARGETS,
    "bench --target llm --head X --prompts prompts.jsonl": {HEAD},
    "bench --target llm --head head --prompts X": {PROMPTS, JSON},
    "tune --head X --prompts prompts.jsonl": {HEAD},
    "chat --target X": TARGETS,
    "chat --head ngram+X --target llm": {HEAD},
    "chat --target llm --head model:X": TARGETS,
    "chat --target llm --head retrieve:X": TEXTS,
    "chat --target llm --schema X": {JSON},
    "serve --target X": TARGETS,
    "serve --head X": {HEAD},
    "rollback --head X": {HEAD},
    "forget --head X": {HEAD},
    "doctor --target X --head head": TARGETS,
    "doctor --target llm --head head --data X": {ANSWERS},
    "report X": {HEAD},
    "report head --target X --sample hello": TARGETS,
    "merge X new": {HEAD},
    "merge head new --target X": TARGETS,
    "convert X new --to vllm": {HEAD},
    "convert head new --to vllm --target X": TARGETS,
    "publish X me/heads": {HEAD},
}
"""Command lines -> the kinds that may stand at X."""

NO_KEYS = ["error: table.json: expected `key: value` lines, got list"]
NO_YAML = ["error: notes.pdf: not YAML in UTF-8"]
NO_PROMPTS = ["expected a file, a folder or a Hub data set, found none"]
SAID: dict[str, dict[str, list[str]]] = {
    **{slot: {JSON: NO_KEYS, FILE: NO_YAML} for slot in ("plan X", "train X", "train/medusa.py X")},
    **{slot: {NOTHING: NO_PROMPTS} for slot in SLOTS if PROMPTS in SLOTS[slot]},
    "chat --target llm --head retrieve:X": {},
    "chat --target llm --schema X": {kind: [kind] for kind in USES},
}
"""What is said at a place instead of the kind, and where it belongs."""

LINES = {
    "chat": "expected --head or --target, got neither; pass one",
    "serve": "expected --head or --target, got neither; pass one",
    "bench --target llm --head ngram --prompts prompts.jsonl --json notes.pdf/a.json": "notes.pdf/",
    "convert me/heads notes.pdf --to vllm": "notes.pdf already exists",
    "demo --out notes.pdf/out": "--out: expected a folder that can be written",
    "distill --target llm --prompts prompts.jsonl --out notes.pdf/out": "--out: expected a folder",
    "chat --target part-00001-of-00003.gguf": "got a part of one; join its parts: llama-gguf-split",
    "chat --target parts": "expected one GGUF file, got a part of one; join its parts",
    "chat --target several": "expected one GGUF file, got a.gguf, b.gguf; pass one of them",
    "chat --target lllm": "got nothing; pass a model folder, a GGUF file or a Hub id (did you ",
    "chat --head demo-target": "expected a head, got a whole model; pass it as --target",
    "chat --target llm --adapter ${SCRATCH}/a": "--adapter: expected a value, got ${SCRATCH}, ",
    "train recipe.yaml data.path=${SCRATCH}/a": "got ${SCRATCH}, which your shell did not replace",
    "plan scratch.yaml": "expected a value, got ${SCRATCH}, which nothing replaces in a recipe",
    "train list.yaml": "list.yaml: expected `key: value` lines, got list",
    "distill --target llm --prompts prompts.jsonl --out head": "expected a folder for answers",
    "distill --target llm --prompts no-prompts --out new": "expected a folder with .json, ",
}
"""Command lines -> a part of the line that answers."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(FOLDER / "demo-target", folder / "llm")
    head = '{"architectures": ["MedusaModel"], "draftheads": {"kind": "medusa"}}'
    files = {
        "prompts.jsonl": '{"prompt": "a"}\n{"prompt": "b"}\n',
        "prompts.csv": "prompt\na\n",
        "recipe.yaml": "target: llm\ndata: {path: answers}\nrun: {output: new, steps: 1}\n",
        "scratch.yaml": "target: llm  # ${HOME}\ndata: {path: '${SCRATCH}/answers'}\n",
        "list.yaml": "- target\n",
        "table.json": "[]",
        "notes.pdf": "%PDF",
        "head/config.json": head,
        "model/config.json": head,
        "run/step-000002/config.json": head,
        "answers/manifest.json": "{}",
        "adapter/adapter_config.json": "{}",
        "no-prompts/README.md": "about",
        **dict.fromkeys(("chat.gguf", "CHAT.GGUF", "sha256-70f2"), "GGUF"),
        **dict.fromkeys(("folder-with-one/it.gguf", "several/a.gguf", "several/b.gguf"), "GGUF"),
        **dict.fromkeys(("part-00001-of-00003.gguf", "parts/x-00001-of-00002.gguf"), "GGUF"),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    (folder / "empty").mkdir()
    return folder


def answers(folder: Path, lines: list[str]) -> list[tuple[int, list[str]] | None]:
    """Exit code and error lines of each command line, None where torch was needed."""
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        input=json.dumps([line.split() for line in lines]),
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert not done.stderr
    result: list[tuple[int, list[str]] | None] = json.loads(done.stdout)
    return result


@pytest.mark.mend("a head in a folder named model was read as the drafter of that name")
def test_each_input_is_of_its_kind(inputs):
    assert {name: kind_of(inputs / name) for name in INPUTS} == INPUTS
    assert answers(inputs, ["chat --head model"]) == [None], "a folder, though a drafter's name"


@pytest.mark.mend("wrong paths within 0.3 s of CPU, not 6")
@pytest.mark.mend(
    "a file of another kind was read as something else, or refused after torch was loaded, as by "
    "scripts of accelerate launch"
)
@pytest.mark.slow
def test_whatever_is_in_the_wrong_place_is_named_before_torch_is_loaded(inputs):
    """At each place one input of each kind, in turns."""
    cells = []
    for number, slot in enumerate(SLOTS):
        for kind in dict.fromkeys(INPUTS.values()):
            names = [name for name, each in INPUTS.items() if each == kind]
            cells.append((slot, kind, names[number % len(names)]))
    got = answers(inputs, [slot.replace("X", name) for slot, _, name in cells])
    wrong = []
    for (slot, kind, name), answer in zip(cells, got, strict=True):
        code, lines = answer or (None, [])
        said = SAID.get(slot, {}).get(kind) or [kind, USES.get(kind, "; ")]
        is_named = code == 2 and len(lines) == 1 and all(each in lines[0] for each in said)
        if (answer is not None) if kind in SLOTS[slot] else not is_named:
            wrong.append((slot.replace("X", name), answer))
    assert not wrong
    assert not [path.name for path in inputs.iterdir() if path.name.startswith("new")]


@pytest.mark.mend(
    "parts of a GGUF, a misspelt target, and a variable that no shell replaced ended late, or "
    "made a folder of that name"
)
def test_names_that_are_not_quite_right_are_one_line(inputs):
    got = answers(inputs, list(LINES))
    for said, answer in zip(LINES.values(), got, strict=True):
        assert answer is not None and answer[0] == 2
        [line] = answer[1]
        assert line.startswith("error: ") and said in line
