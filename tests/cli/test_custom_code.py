"""The promise: code in a target's repository is never run, and nobody is asked to run it."""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from pathlib import Path

import pytest
from tiny_chat import llama
from tiny_heads import make_head

from draftheads.heads.formats.hub import save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.scripts import cli
from draftheads.scripts.benchmarks.house import modules

ROOT = Path(__file__).parents[2]
CODE = """from pathlib import Path
Path(__file__).with_name("RAN").touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model
from transformers import PreTrainedTokenizerFast as Tokenizer
"""
RECIPE = """target: {target}
data: {{path: data, sequence_length: 64, rows_per_batch: 2}}
head: {{kind: medusa, depth: 2, nodes: 6}}
run: {{output: run, steps: 2, tokens_per_step: 128}}
"""
READING = r"(\w+)\.from_pretrained|(Auto\w+)\.from_config"
COMMANDS = {
    "chat": "chat --target TARGET",
    "chat with a head that names it": "chat --head HEAD",
    "serve": "serve --target TARGET --port 0",
    "bench": "bench --target TARGET --head HEAD --prompts PROMPTS",
    "tune": "tune --target TARGET --head HEAD --prompts PROMPTS --dry-run",
    "doctor": "doctor --target TARGET --head HEAD --prompts PROMPTS",
    "report": "report HEAD --target TARGET --prompts PROMPTS",
    "distill": "distill --target TARGET --prompts PROMPTS --out out",
    "import-answers": "import-answers CONVERSATIONS --target TARGET --out out",
    "plan": "plan RECIPE --no-probe",
    "draft model": "chat --target TARGET --head model:TARGET",
}


@pytest.fixture(scope="module", params=["model and tokenizer", "tokenizer"])
def folder(request, tmp_path_factory) -> Path:
    """A target that transformers could only read by running code beside it, and a head for it."""
    folder = tmp_path_factory.mktemp("custom")
    tiny = llama()
    save_head(make_head(MedusaHead, tiny, depth=1), folder / "HEAD", target=tiny)
    target = folder / "TARGET"
    tiny.model.save_pretrained(target)
    tiny.tokenizer.save_pretrained(target)
    (target / "code.py").write_text(CODE)
    references = {
        "config.json": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["code.Tokenizer", None]},
    }
    for name, reference in references.items():
        if name == "config.json" and request.param == "tokenizer":
            continue
        config = json.loads((target / name).read_text())
        config |= {"auto_map": reference, "model_type": "unheard-of"}
        config |= {"tokenizer_class": "UnheardOf"} if name == "tokenizer_config.json" else {}
        (target / name).write_text(json.dumps(config))
    head = json.loads((folder / "HEAD" / "config.json").read_text())
    head["draftheads"]["target"]["name"] = str(target)
    (folder / "HEAD" / "config.json").write_text(json.dumps(head))
    (folder / "PROMPTS").with_suffix(".jsonl").write_text('{"prompt": "hello"}\n')
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "CONVERSATIONS.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    (folder / "RECIPE.yaml").write_text(RECIPE.format(target=target))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_target_with_code_of_its_own_is_refused_without_a_question(
    folder, command, tmp_path, monkeypatch, capsys
):
    def asked(question: str = "") -> str:
        raise AssertionError(question)

    def place(word: str) -> str:
        path = next((p for p in folder.iterdir() if p.stem == word.removeprefix("model:")), None)
        return word.replace(path.stem, str(path)) if path else word

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.setattr(sys, "argv", ["draftheads", *map(place, COMMANDS[command].split())])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    reads_it = command != "plan" or "auto_map" in (folder / "TARGET" / "config.json").read_text()
    assert ended.value.code == (2 if reads_it else None)
    assert ["custom code in its repository, which is never run" in line for line in errors] == (
        [True] if reads_it else []
    )
    assert not (folder / "TARGET" / "RAN").exists()


def test_every_call_that_could_run_code_of_a_repository_forbids_it():
    """transformers asks where this is left out. Our heads' own `from_config` takes no such thing,
    and PEFT reads weights and JSON alone.
    """
    found = 0
    for name, path in modules(ROOT).items():
        for call in ast.walk(ast.parse(path.read_text())):
            words = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            read = re.fullmatch(READING, words)
            if read and read[1] not in ("PeftModel", "PeftConfig"):
                chosen = {word.arg: ast.unparse(word.value) for word in call.keywords}
                forbids = chosen.get("trust_remote_code") == "False"
                assert forbids, f"{name}: {ast.unparse(call)}"
                found += 1
    assert found > 5
