"""Does every wrong call of every command end in one clear line?

    python scripts/checks/bad_calls.py [--calls 400] [--seed 0] [--only COMMAND] [--verbose]

A small target, answers and heads are made first. Each call is then a good call of a command with
one fault in it, drawn with the seed: a strange value of an option, a missing or an unknown
argument, a recipe's key, or a damaged input file. It runs in a fork of a process that has imported
everything, in a folder of its own. A fault of ours is

* a traceback, an exit code other than 0, 1, 2 and 130, or death by a signal,
* exit code 2 without exactly one line that begins with "error",
* terminal escape sequences in what is printed,
* a call that does not end, or takes much memory,
* a changed input, or a staging folder that is left over.

Prints a table of commands and every fault; the exit code is 1 if there are any.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from draftheads.scripts.benchmarks.house import modules
from draftheads.scripts.cli import app, main

RECIPES = Path(__file__).parents[2] / "recipes"
STRANGE = (
    *("", " ", "-1", "0", "1e400", "nan", "-0.5", "1.5", "99999999999999999999", "1_000", "٣"),
    *("None", "true", "[]", "{}", "[[0],[0,0", "nowhere", "no/such/place", "user/none@main"),
    *("../..", "~nobody/x", "/dev/null", "/proc/self/mem", "a" * 5000, "\x1b]52;c;aGk=\x07"),
    *("\u202ereversed", "a\nb", "%s%n", "'; --", "ngram+", "model:", "4,2,"),
    *("nodes=0", "9,9,9,9,9", "cuda:99", "http://127.0.0.1:9/v1", "http://", "1,2,3@x"),
)
"""Values for any option."""
JUNK: tuple[Any, ...] = (
    *(None, True, "", "x", -1, 0, 1.5, 1e308, 10**30, [], {}, [[]], {"a": 1}, "\x1b[31m"),
    *(["a"], [-1], [None], "9" * 400, 2**31, 30_000, 10**9, [10**9], {"__float__": "Infinity"}),
    *("((.*)*)*x", ["((.*)*)*x"], {"((.*)*)*x": 4}, "a/b", "[" * 500, float("inf"), float("nan")),
    *("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",),
)
"""Values for anything in a JSON file."""
OVERRIDES = (
    *("run.steps=-1", "run.steps=1e9999", "run.seed=x", "optim.lr=nan", "optim.lr=-1", "optim.lr="),
    *("head.rank=1000000", "head.heads=0", "head.heads=100000", "head.kind=nothing", "head=3"),
    *("data.path=/no/where", "data.path=", "data.cache_gb=1e308", "data.sequence_length=1"),
    *("data.sequence_length=999999999", "run.tokens_per_step=0", "run.output=/dev/null/x"),
    *("target=nowhere", "target=", "no.such=1", "run.save_every=0", "eval.every=-5", "=", "run"),
    *("run.steps=[1]", "optim.betas=[2,3]", "run.precision=float7", "features.mode=stored"),
    *(
        "run.tokens_per_step=99999999999999",
        "head.tree=4,2",
        "run.output=",
        "a=b=c",
        "head.layers=0",
    ),
)
LARGE = 2**20
"""Bytes of a file that is compared by its size and time, not by its content."""
UNREAD = {"custom_generate", "README.md", ".lock", "step-000001"}
"""Files and folders that few commands read."""
WORKS = {"serve": b"http://", "demo": b"The target:"}
"""What commands that take long print when they begin; they are ended then."""
LIMIT_S, LIMIT_MB = 120, 2500
STAGED = re.compile(r"^\.|\.(tmp|gone|part)$|staging")


@dataclass
class Call:
    """One call: its command, what is wrong with it, and what came of it."""

    command: str
    fault: str
    arguments: list[str]
    folder: Path
    damaged: str | None = None
    code: int = 0
    output: str = ""
    errors: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0
    complaints: list[str] = field(default_factory=list)


class Workshop:
    """A folder with inputs of every kind, from which each call gets a copy."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "base"
        self.base.mkdir(parents=True)
        shutil.copytree(RECIPES / "demo-target", self.base / "target", ignore=_no_build)
        prompts = (RECIPES / "demo-prompts.jsonl").read_text().splitlines()[:12]
        (self.base / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
        talk = {"messages": [{"role": "user", "content": "Hi"}]}
        talk["messages"].append({"role": "assistant", "content": "Hello, what is it?"})
        (self.base / "talks.jsonl").write_text(json.dumps(talk) + "\n")
        (self.base / "text.txt").write_text("not ours\n")
        (self.base / "README.md").write_text("not ours\n")
        for kind in ("medusa", "sequential", "eagle3", "block"):
            shutil.copy(RECIPES / f"demo-{kind}.yaml", self.base / f"{kind}.yaml")
        write_lora(self.base / "target", self.base / "lora")
        made = [[*good("distill"), "--limit", "8"]]
        made += [["train", f"{kind}.yaml", *SMALL, f"run.output={kind}"] for kind in KINDS]
        for arguments in made:
            call = run(Call(arguments[0], "none", arguments, self.base))
            assert call.code == 0, (arguments, call.code, call.errors[-2000:])

    def copy(self, folder: Path) -> Path:
        """All inputs; large files are hard links."""
        shutil.copytree(self.base, folder, copy_function=_copy, symlinks=True)
        return folder


def write_lora(target: Path, folder: Path) -> None:
    """A LoRA that changes nothing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder)


def _copy(source: str, destination: str) -> None:
    if os.stat(source).st_size < LARGE:
        shutil.copy2(source, destination)
    else:
        os.link(source, destination)


KINDS = ("medusa", "sequential", "eagle3", "block")
SMALL = [
    *("target=target", "data.path=data", "run.steps=2", "run.epochs=null", "run.save_every=1"),
    *("data.sequence_length=128", "run.tokens_per_step=256", "eval.every=0"),
]


def good(command: str) -> list[str]:
    """A call of a command that works in a copy of the workshop, and takes a second or two."""
    return [command, *good_calls()[command]]


def good_calls() -> dict[str, list[str]]:
    """The words after each command."""
    decode = ["--target", "target", "--max-new-tokens", "8", "--limit", "2"]
    ask = ["--prompts", "prompts.jsonl"]
    return {
        "questions": ["--target", "target", "--out", "asked.jsonl", "--count", "2"],
        "distill": [*decode[:4], *ask, "--out", "data"],
        "import-answers": ["talks.jsonl", "--target", "target", "--out", "imported"],
        "data-preview": ["data", "-n", "1"],
        "plan": ["sequential.yaml", "--no-probe", *SMALL, "run.output=planned"],
        "train": ["sequential.yaml", *SMALL, "run.steps=3", "run.output=sequential"],
        "init": ["--target", "target", "--data", "data", "--out", "made.yaml"],
        "recipes": ["qwen3-0.6b-medusa"],
        "keys": ["run"],
        "prompts": [],
        "bench": [*decode, *ask, "--head", "sequential", "--nodes", "4"],
        "tune": [*ask, "--head", "medusa", "--nodes", "4", "--limit", "2"],
        "chat": [*decode[:4], "--head", "eagle3", "--nodes", "4", "--adapter", "lora"],
        "serve": ["--head", "sequential", "--port", "0", "--nodes", "4"],
        "doctor": ["--target", "target", "--head", "sequential", *ask],
        "report": ["sequential", *ask, "--limit", "1", "--max-new-tokens", "8"],
        "merge": ["sequential", "merged"],
        "convert": ["eagle3", "converted", "--to", "vllm"],
        "publish": ["sequential", "me/heads", "--dry-run"],
        "demo": ["--out", "README.md"],
        "rollback": ["--head", "sequential"],
        "forget": ["--head", "sequential"],
    }


def _no_build(folder: str, names: list[str]) -> set[str]:
    return {"build"} & set(names)


def options_of(command: str) -> list[str]:
    """The options of a command that take a value."""
    group: Any = typer.main.get_command(app)
    takes = [each for each in group.commands[command].params if not getattr(each, "is_flag", True)]
    return [each.opts[0] for each in takes if each.opts[0].startswith("-")]


def strange_option(call: Call, draw: random.Random) -> None:
    """Give an option a strange value, in place of the one it had, if any."""
    options = options_of(call.command)
    if not options:
        return unknown_argument(call, draw)
    option, value = draw.choice(options), draw.choice(STRANGE)
    if option in call.arguments:
        call.arguments[call.arguments.index(option) + 1] = value
    else:
        call.arguments += [option, value]
    call.fault = f"{option} {value[:30]!r}"
    return None


def strange_argument(call: Call, draw: random.Random) -> None:
    """Put a strange value in the place of any word of the call."""
    if len(call.arguments) < 2:
        return unknown_argument(call, draw)
    place = draw.randrange(1, len(call.arguments))
    value = draw.choice(STRANGE)
    call.fault = f"{call.arguments[place]} -> {value[:30]!r}"
    call.arguments[place] = value
    return None


def missing_argument(call: Call, draw: random.Random) -> None:
    """Leave a word out."""
    if len(call.arguments) < 2:
        return unknown_argument(call, draw)
    call.fault = "without " + call.arguments.pop(draw.randrange(1, len(call.arguments)))
    return None


def unknown_argument(call: Call, draw: random.Random) -> None:
    """Add a word that means nothing."""
    word = draw.choice(["--nothing", "--nothing=1", "-z", "nothing", "--", "--out"])
    call.arguments.append(word)
    call.fault = f"with {word}"


def strange_override(call: Call, draw: random.Random) -> None:
    """Set a recipe's key to a value it cannot have."""
    if call.command not in ("train", "plan"):
        return strange_option(call, draw)
    call.arguments.append(draw.choice(OVERRIDES))
    call.fault = call.arguments[-1]
    return None


def damaged_file(call: Call, draw: random.Random) -> None:
    """Damage a file that the call reads."""
    roots = [call.folder / word for word in call.arguments if (call.folder / word).exists()]
    roots.append(call.folder / "target")
    files = {file for root in roots for file in [root, *root.rglob("*")] if file.is_file()}
    read = {file for file in files if not UNREAD.intersection(file.parts)}
    file = draw.choice(sorted(read if draw.random() < 0.9 else files))
    content = file.read_bytes()
    file.unlink()  # it may be a hard link to the workshop's
    how = _damage(file, content, draw)
    call.damaged = str(file.relative_to(call.folder))
    call.fault = f"{call.damaged}: {how}"


def _damage(file: Path, content: bytes, draw: random.Random) -> str:
    ways: list[Callable[[], str]] = [
        lambda: _write(file, b"", "empty"),
        lambda: _write(file, content[: draw.randrange(len(content) or 1)], "cut"),
        lambda: _write(file, draw.randbytes(len(content) or 64), "noise"),
        lambda: _write(file, _flipped(content, draw), "a byte changed"),
        lambda: "missing",
        lambda: file.mkdir() or "a folder",  # type: ignore[func-returns-value]
        lambda: file.symlink_to(file.name) or "a link to itself",  # type: ignore[func-returns-value]
    ]
    if file.suffix in (".json", ".jsonl"):
        ways += [lambda: _changed_json(file, content, draw)] * 10
    return draw.choice(ways)()


def _write(file: Path, content: bytes, how: str) -> str:
    file.write_bytes(content)
    return how


def _flipped(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) or 1)
    return content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]


def _changed_json(file: Path, content: bytes, draw: random.Random) -> str:
    """Replace or remove one value, anywhere in it; of several lines, in the first."""
    first, *rest = content.splitlines() if file.suffix == ".jsonl" else [content]
    document = json.loads(first)
    place: Any = document
    trail = []
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw.choice(keys)
        trail.append(str(key))
        if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.3:
            break
        place = place[key]
    if not trail:
        return _write(file, b"[]", "another JSON value")
    value = draw.choice((*JUNK, "removed"))
    if value == "removed":
        del place[key]
    else:
        place[key] = value
    file.write_bytes(b"\n".join([json.dumps(document).encode(), *rest]))
    return f"{'.'.join(trail)[:60]} = {str(value)[:20]!r}"


FAULTS = (
    *(strange_option, strange_option, strange_argument, missing_argument, unknown_argument),
    *(strange_override, damaged_file, damaged_file, damaged_file, damaged_file),
)


def run(call: Call) -> Call:
    """Run a call in a fork of this process, and note what it printed and took."""
    captured = {name: Path(f"{call.folder}.{name}") for name in ("out", "err")}
    for path in captured.values():
        path.touch()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(call, captured)
    works = WORKS.get(call.command)
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        took = time.monotonic() - began
        if works and works in captured["out"].read_bytes():
            os.kill(child, signal.SIGTERM)
            works = None
        if took > LIMIT_S and not call.complaints:
            call.complaints.append(f"did not end in {LIMIT_S} s")
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    call.seconds, call.megabytes = time.monotonic() - began, usage.ru_maxrss / 1024
    call.code = os.waitstatus_to_exitcode(status)
    call.output, call.errors = (
        captured[name].read_bytes().decode(errors="replace") for name in ("out", "err")
    )
    for path in captured.values():
        path.unlink()
    return call


def _become(call: Call, captured: dict[str, Path]) -> None:
    """In the child: the command, as a shell would start it. Never returns."""
    code = 70
    try:
        os.setsid()
        for number, path in enumerate(captured.values(), start=1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        entrance, exit_ = os.pipe()
        os.write(exit_, b"Hello\n/stats\n/set\n/quit\n")
        os.close(exit_)
        os.dup2(entrance, 0)
        os.chdir(call.folder)
        sys.argv = ["draftheads", *call.arguments]
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def judge(call: Call, inputs: dict[str, str]) -> None:
    """Note what a call must not do. inputs: digests before it."""
    text = call.output + call.errors
    lines = [line for line in call.errors.splitlines() if line.startswith("error")]
    wrong = {
        "a traceback": "Traceback (most recent call last)" in text,
        f"exit code {call.code}": call.code not in (0, 1, 2, 130),
        f"{len(lines)} error lines": call.code == 2 and len(lines) != 1,
        "a long error line": any(len(line) > 1000 for line in lines),
        "terminal escape sequences": "\x1b]" in text or "\u202e" in text,
        f"{call.megabytes:.0f} MB": call.megabytes > LIMIT_MB,
    }
    call.complaints += [what for what, is_so in wrong.items() if is_so]
    for name, digest in digests(call.folder).items():
        if name in inputs and digest != inputs[name] and call.code == 2:
            call.complaints.append(f"changed {name}")
    left = [path for path in call.folder.rglob("*") if STAGED.search(path.name)]
    left = [path for path in left if str(path.relative_to(call.folder)) not in inputs]
    if left and call.code == 2:
        call.complaints.append(f"left {left[0].relative_to(call.folder)}")


def digests(folder: Path) -> dict[str, str]:
    """Name -> digest of every file below a folder; of a large one, its size and time."""
    return {
        str(path.relative_to(folder)): _digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _digest(path: Path) -> str:
    about = path.stat()
    if about.st_size >= LARGE:
        return f"{about.st_size} {about.st_mtime_ns}"
    return hashlib.md5(path.read_bytes()).hexdigest()


def import_everything() -> None:
    """What commands import when they run, so that forks need not."""
    import importlib

    for module in modules(Path(__file__).parents[2]):
        if module.rpartition(".")[2] not in ("__init__", "__main__"):
            importlib.import_module(f"draftheads.{module}")


def bad_calls(
    calls: Annotated[int, Option(min=1)] = 400,
    seed: int = 0,
    only: Annotated[str | None, Option(help="one command")] = None,
    verbose: Annotated[bool, Option("--verbose", help="print every call's last line")] = False,
) -> None:
    """Call every command wrongly."""
    import_everything()
    draw = random.Random(seed)
    commands = [only] if only else [name for name in _weights() for _ in range(_weights()[name])]
    counts: Counter[tuple[str, str]] = Counter()
    faulty = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        workshop = Workshop(Path(scratch))
        for number in range(calls):
            command = draw.choice(commands)
            folder = workshop.copy(Path(scratch) / f"call-{number}")
            call = Call(command, "", good(command), folder)
            draw.choice(FAULTS)(call, draw)
            before = digests(folder)
            judge(run(call), before)
            counts[command, {0: "accepted", 2: "refused"}.get(call.code, "other")] += 1
            if call.complaints:
                faulty.append(call)
                counts[command, "faults"] += 1
            if verbose or call.complaints:
                last = (call.errors.strip().splitlines() or [""])[-1][:300]
                shown = (
                    f"{number} {command} [{call.fault}] {call.code} {call.seconds:.1f} s: {last!r}"
                )
                print(shown, *call.complaints, sep="  !! ", flush=True)
            shutil.rmtree(folder)
    show(counts, calls, seed)
    raise typer.Exit(bool(faulty))


def _weights() -> dict[str, int]:
    """How often each command is called."""
    group: Any = typer.main.get_command(app)
    rarely = {"keys", "demo", "merge", "prompts", "recipes", "rollback", "forget"}
    return {name: 1 if name in rarely else 4 for name in group.commands}


def show(counts: Counter[tuple[str, str]], calls: int, seed: int) -> None:
    """Print the table."""
    columns = ("refused", "accepted", "other", "faults")
    print(f"\n{calls} calls, seed {seed}\n| command | " + " | ".join(columns) + " |")
    print("| --- " * (len(columns) + 1) + "|")
    for command in _weights():
        print(f"| {command} | " + " | ".join(str(counts[command, each]) for each in columns) + " |")
    totals = {each: sum(counts[command, each] for command in _weights()) for each in columns}
    print("| total | " + " | ".join(map(str, totals.values())) + " |")


if __name__ == "__main__":
    typer.run(bad_calls)
