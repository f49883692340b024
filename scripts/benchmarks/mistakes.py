"""What does a new user read after each of sixty mistakes?

    python scripts/benchmarks/mistakes.py [--only WORD] [--markdown FILE]

Each mistake is typed in a process of its own, in a folder with a few prompts, answers, a head that
was not trained, and damaged copies of them. The network is out of reach. A fault of ours is

* an exit code other than 2,
* anything but one line that begins with "error:",
* a line without the word that the user needs.

Prints the line for each, with the seconds until it came; the exit code is 1 if there is a fault.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

MISTAKES = """
draftheads chta                                           | Did you mean
draftheads chat --haed ngram                              | --head
draftheads chat                                           | --target
draftheads chat --target                                  | --target
draftheads chat --target ""                               | expected a value
draftheads chat --target nowhere                          | cannot be reached
draftheads chat --target ./nowhere                        | config.json
draftheads chat --target out/modle                        | did you mean out/model?
draftheads chat --target model.gguf                       | GGUF
draftheads chat --target head                             | --head
draftheads chat --target Qwen/Qwen3-0.6B --head ngram     | cannot be reached
draftheads chat --target empty                            | config.json
draftheads chat --target torn                             | fix the file
draftheads chat --target cut                              | download it again
draftheads chat --target out/model --head n-gram          | did you mean ngram
draftheads chat --target out/model --head head,ngram      | did you mean head+ngram
draftheads chat --target out/model --head out/model       | --target
draftheads chat --target out/model --head gpt2            | user/name
draftheads chat --target out/model --head me/head         | cannot be reached
draftheads chat --target out/model --head empty           | step-
draftheads chat --target out/model --head early-exit:99   | early exit
draftheads chat --target out/model --head early-exit:two  | number of layers
draftheads chat --target out/model --head model:nowhere   | cannot be reached
draftheads chat --target out/model --head half            | download
draftheads chat --target out/model --head narrow          | hidden size
draftheads chat --target out/model --head head --tree 4,2,x    | widths like 4,2,1
draftheads chat --target out/model --head head --tree 9,9,9,9,9 | tree
draftheads chat --target out/model --head ngram --device cuda:7 | cuda
draftheads chat --target out/model --temperature -1       | --temperature
draftheads chat --target out/model --threads 0            | --threads
draftheads chat --target out/model --dtype fp16           | float16
draftheads distill --target out/model --prompts nothing.jsonl --out new | nothing.jsonl
draftheads distill --target out/model --prompts spec-bnech --out new    | spec-bench
draftheads distill --target out/model --prompts torn.jsonl --out new    | line 2
draftheads distill --target out/model --prompts none.jsonl --out new    | none.jsonl
draftheads distill --target out/model --prompts prompts.jsonl --out answers --seed 9 | another --out
draftheads distill --target out/model --prompts prompts.jsonl --out prompts.jsonl | folder
draftheads distill --target out/model --prompts prompts.jsonl --out new --server localhost | http
draftheads distill --target out/model --prompts prompts.jsonl --out new --template-args x=1 | JSON
draftheads train                                          | recipe
draftheads train nothing.yaml                             | nothing.yaml
draftheads train qwen3-06b-sequential                     | qwen3-0.6b-sequential
draftheads train demo-sequential head.kind=eagle4         | did you mean 'eagle'
draftheads train demo-sequential head.kindd=eagle3        | head.kind
draftheads train demo-sequential data.path=nowhere        | distill
draftheads train demo-sequential data.path=answers run.steps=ten | run.steps
draftheads train demo-sequential data.path=answers run.steps     | key.path=value
draftheads train demo-sequential data.path=answers run.minutes=0 | run.minutes
draftheads train demo-sequential data.path=answers optimizer.lr=fast | did you mean 'optim'
draftheads train tabs.yaml                                | tabs.yaml
draftheads plan demo-sequential target=nowhere            | cannot be reached
draftheads init --target out/model --out prompts.jsonl    | already exists
draftheads init --target out/model --out new.yaml --kind eagel3 | eagle3
draftheads keys haed                                      | head
draftheads recipes qwen                                   | recipe
draftheads bench --target out/model --head head --prompts nothing.jsonl | nothing.jsonl
draftheads bench --target out/model --head head --prompts prompts.jsonl --nodes many | --nodes
draftheads tune --target out/model --head ngram --prompts prompts.jsonl | head folder
draftheads doctor --target out/model --head head          | --prompts
draftheads convert head new --to vlm                      | vllm
draftheads convert head answers --to vllm                 | already exists
draftheads publish head mine                              | user/name
draftheads publish answers me/head                        | head folder
draftheads serve --target out/model --port 99999          | --port
"""
"""What is typed | what the line must say."""
COMMAND = [sys.executable, "-m", "draftheads"]
OFFLINE = {"HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


def prepare(folder: Path) -> None:
    """Make the files that the mistakes are made with."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftheads.heads import MedusaHead, Target, save_head
    from draftheads.recipes import packaged

    model = folder / "out" / "model"
    shutil.copytree(str(packaged("demo-target", "")), model)
    target = Target.load(model)
    torch.manual_seed(0)
    head = MedusaHead.create(target, MedusaHead.Choices(kind="medusa"))
    for name in ("head", "half"):
        save_head(head, folder / name, target=target)
    weights = folder / "half" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(num_hidden_layers=1, vocab_size=target.vocab_size, **sizes)
    other = Target(LlamaForCausalLM(config), name="another-model")
    head = MedusaHead.create(other, MedusaHead.Choices(kind="medusa"))
    save_head(head, folder / "narrow", target=other)
    for name in ("torn", "cut"):
        shutil.copytree(model, folder / name)
    (folder / "torn" / "config.json").write_text('{"model_type": "llama", ')
    cut = next((folder / "cut").glob("*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:5000])
    (folder / "empty").mkdir()
    prompts = [json.dumps({"prompt": f"Count to {number}."}) for number in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (folder / "torn.jsonl").write_text(prompts[0] + "\n" + prompts[1][:9] + "\n")
    (folder / "none.jsonl").write_text("")
    (folder / "tabs.yaml").write_text("target: out/model\nrun:\n\tsteps: 3\n")
    words = ["distill", "--target", "out/model", "--prompts", "prompts.jsonl", "--out", "answers"]
    subprocess.run([*COMMAND, *words, "--max-new-tokens", "8"], cwd=folder, check=True)


def fault_of(done: subprocess.CompletedProcess[str], needed: str) -> str:
    """What is wrong with what a mistake got; empty if nothing is."""
    lines = done.stderr.strip().splitlines()
    if done.returncode != 2:
        return f"exit code {done.returncode}"
    if len(lines) != 1 or not lines[0].startswith("error:"):
        return f"{len(lines)} lines"
    return "" if needed in lines[0] else f"nothing about {needed!r}"


def main(
    only: Annotated[str, Option(help="mistakes with this word alone")] = "",
    markdown: Annotated[Path | None, Option(help="write the table here as well")] = None,
) -> None:
    """Make the mistakes, one after the other."""
    rows = []
    faults = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        environment = os.environ | OFFLINE | {"HF_HOME": str(folder / "cache")}
        for row in MISTAKES.strip().splitlines():
            line, _, needed = (part.strip() for part in row.rpartition("|"))
            if only not in line:
                continue
            started = time.monotonic()
            done = subprocess.run(
                [*COMMAND, *shlex.split(line)[1:]],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
            seconds = time.monotonic() - started
            said = " ".join(done.stderr.split()).replace(place, "…") or "nothing"
            fault = fault_of(done, needed)
            faults += bool(fault)
            rows.append(f"| `{line}` | {said} | {seconds:.1f} |")
            typer.echo(f"{line}\n    {seconds:.1f} s  {said[:400]}")
            if fault:
                typer.echo(f"    FAULT: {fault}")
    if markdown:
        markdown.write_text("| typed | said | s |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    typer.echo(f"{len(rows)} mistakes, {faults} faults")
    raise typer.Exit(faults > 0)


if __name__ == "__main__":
    typer.run(main)
