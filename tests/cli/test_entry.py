"""The promise: each training script runs recipes of any kind, and decides the kind only where the
recipe leaves it open.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from draftheads.scripts.cli import app
from draftheads.train import eagle, medusa
from draftheads.train.entry import mistakes_in_one_line, one_line
from draftheads.train.metrics import Outcome
from draftheads.train.recipe import Recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A recipe whose target and data, beside it, look like such and are empty."""
    monkeypatch.chdir(tmp_path)
    for name in ("t/config.json", "d/manifest.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    path = tmp_path / "recipe.yaml"
    values = {"target": "t", "data": {"path": "d"}, "run": {"output": "out", "steps": 10}}
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def fitted(monkeypatch, tmp_path) -> list[Recipe]:
    """The recipes that would have been trained."""
    recipes: list[Recipe] = []

    def fit(recipe: Recipe) -> Outcome:
        recipes.append(recipe)
        return Outcome(step=10, steps=10, checkpoint=tmp_path / "step-000010", trained=True)

    monkeypatch.setattr(medusa, "fit", fit)
    return recipes


@pytest.mark.parametrize(("script", "kind"), [(medusa, "medusa"), (eagle, "eagle3")])
def test_a_script_decides_the_kind_that_a_recipe_leaves_open(path, fitted, script, kind):
    assert script.main([str(path)]) == 0
    assert script.main([str(path), "head.kind=eagle"]) == 0
    assert [recipe.head.kind for recipe in fitted] == [kind, "eagle"]


@pytest.mark.mend("--local_rank=0 was read as the recipe")
@pytest.mark.parametrize("word", ["--local_rank=0", "--local-rank=1"])
def test_the_word_that_launchers_add_is_none_of_the_recipes(path, fitted, word):
    """deepspeed puts it before the recipe, torch.distributed.launch as well."""
    assert medusa.main([word, str(path), "run.steps=2"]) == 0
    assert [recipe.run.steps for recipe in fitted] == [2]


@pytest.mark.parametrize(("script", "other"), [(medusa, "eagle"), (eagle, "medusa")])
def test_help_is_the_scripts_own(capsys, script, other):
    name = script.__name__.rpartition(".")[2]
    assert script.main(["--help"]) == 0
    assert script.main([]) == 2
    text = capsys.readouterr().out
    assert text.count(f"usage: train/{name}.py RECIPE.yaml [key.path=value ...]") == 2
    assert f"train/{other}.py" not in text


def test_the_help_of_the_command_names_both_scripts():
    text = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    assert "train/medusa.py" in text
    assert "train/eagle.py" in text


def test_only_the_first_process_speaks(path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert eagle.main([str(path), "head.stepz=1"]) == 2
    assert eagle.main([]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    monkeypatch.setenv("LOCAL_RANK", "0")  # of another machine, which may miss a file
    assert eagle.main([str(path.parent / "none.yaml")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error on process 1: recipe {path.parent / 'none.yaml'}: expected a YAML"
    )


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("1", 0)])
def test_a_warning_is_said_once_for_all_processes(path, fitted, monkeypatch, caplog, rank, said):
    monkeypatch.setenv("RANK", rank)
    for _ in range(2):
        assert (
            eagle.main([str(path), "head.steps=3", "head.feature_layers=[1]", "head.kind=medusa"])
            == 0
        )
    assert len(caplog.messages) == 2 * said
    monkeypatch.setenv("RANK", "0")
    assert eagle.main([str(path), "head.steps=3", "head.kind=medusa"]) == 0
    assert len(caplog.messages) == 2 * said + 1


@pytest.mark.usefixtures("hang_ups_are_heeded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_ends_with_130(path, monkeypatch, capsys, number):
    monkeypatch.setattr(medusa, "fit", lambda recipe: os.kill(os.getpid(), number))
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = eagle.main([str(path)])
    except SystemExit as ended:
        code = ended.code
    assert code == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("interrupted by ")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.mend("the suite where SIGINT is ignored")
@pytest.mark.slow
def test_tests_of_signals_pass_in_the_background():
    """A script's background job inherits that Ctrl-C is ignored, nohup's that hang-ups are."""

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    chosen = [
        "-k",
        "signal_before or ctrl_c_stops_the_answer",
        __file__,
        "tests/infer/test_chat.py",
    ]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "", *chosen],
        cwd=ROOT,
        preexec_fn=ignore,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:]


LAUNCHES = {
    "script": [str(ROOT / "train" / "medusa.py"), "RECIPE"],
    "train": ["-m", "draftheads.scripts.cli", "train", "RECIPE"],
    "bench": ["-m", "draftheads.scripts.cli", "bench", "--target", "t", "--head", "ngram"]
    + ["--prompts", "RECIPE"],
    "distill": ["-m", "draftheads.scripts.cli", "distill", "--target", "t", "--out", "o"]
    + ["--prompts", "RECIPE"],
}


@pytest.mark.usefixtures("hang_ups_are_heeded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_signal_while_libraries_load_ends_with_130(path, tmp_path, launch, number):
    """torch takes seconds to import; this one takes a minute."""
    stub = tmp_path / "slow" / "torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    prompts = path.with_suffix(".txt")
    prompts.write_text("hi")
    source = prompts if "--prompts" in LAUNCHES[launch] else path
    process = subprocess.Popen(
        [sys.executable, *(str(source) if x == "RECIPE" else x for x in LAUNCHES[launch])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(stub.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    by = "Ctrl-C" if number == signal.SIGINT else number.name
    advice = "" if launch == "bench" else "; run the same command again to resume"
    assert errors == f"interrupted by {by}{advice}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "key"),
    [
        ("eagle", "head.steps"),
        pytest.param("medusa", "head.depth", marks=pytest.mark.thorough),  # test_launch.py runs it
    ],
)
def test_a_script_runs_by_path(path, tmp_path, script, key):
    """train/ is then first on sys.path, and the working directory is not the repository."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "train" / f"{script}.py"), str(path), f"{key}z=1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert result.stderr == (f"error: command line: {key}z: unknown key; did you mean '{key}'?\n")


INSTALL = "expected an installed package, got: No module named {!r}; {}"
FSSPEC = 'HTTPFileSystem requires "requests" and "aiohttp" to be installed'  # so spec-bench failed
MISSING = [
    *(
        (ModuleNotFoundError(f"No module named {name!r}", name=name), INSTALL.format(name, advice))
        for name, advice in {
            "pyarrow": "pip install 'draftheads[train]'",
            "datasets.exceptions": "pip install 'draftheads[train]'",
            "peft": "pip install 'draftheads[medusa2]'",
            "prometheus_client": "pip install prometheus_client",
            "gguf": "pip install gguf",
            "wandb": "pip install wandb",
        }.items()
    ),
    (ImportError(FSSPEC), "; pip install 'draftheads[train]'"),
    (  # a message of our own stays
        ImportError("these heads need draftheads:\nan installation"),
        "error: these heads need draftheads: an installation",
    ),
]


@pytest.mark.mend("a missing extra")
@pytest.mark.mend("spec-bench without aiohttp")
@pytest.mark.parametrize(("error", "said"), MISSING, ids=str)
def test_a_missing_package_is_one_line_that_says_how_to_install_it(capsys, error, said):
    with pytest.raises(SystemExit) as ended, mistakes_in_one_line():
        raise error
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("error: ") and line.endswith(said)


def test_a_module_of_ours_that_is_missing_is_our_mistake() -> None:
    error = ModuleNotFoundError("No module named 'draftheads.x'", name="draftheads.x")
    with pytest.raises(ModuleNotFoundError), mistakes_in_one_line():
        raise error


@pytest.mark.slow
def test_a_command_without_what_its_extra_brings_is_one_line() -> None:
    words = ["draftheads", "distill", "--target", "demo-target", "--prompts", "demo-prompts"]
    words += ["--out", "o"]
    code = f"import sys; sys.modules['filelock'] = None; sys.argv = {words}; "
    code += "from draftheads.scripts.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.endswith("pip install 'draftheads[train]'")


def test_a_very_long_value_is_cut_out_of_its_error_line():
    """Its beginning says what was expected, its end what to do."""
    line = one_line(ValueError(f"--out: expected a folder, got {'a' * 5000}; choose another one"))
    assert line.startswith("--out: expected a folder, got aaa") and len(line) < 1000
    assert line.endswith("aaa; choose another one")


@pytest.mark.mend("a missing extra was named only once torch was loaded")
@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["distill", "--target", "demo-target"], "pyarrow"),
        (["train", "demo-medusa"], "ruamel.yaml"),
    ],
)
def test_a_missing_extra_is_named_before_torch_is_loaded(run, monkeypatch, words, package):
    def loads(*_: object) -> None:
        raise AssertionError("the command has begun")

    monkeypatch.setattr("draftheads.scripts.cli.app", loads)
    monkeypatch.setitem(sys.modules, package, None)
    code, _, [line] = run(*words)
    assert code == 2 and re.search(r"; pip install 'draftheads\[\w+\]'$", line)
    monkeypatch.setattr("draftheads.scripts.cli.app", lambda *_, **__: 0)
    assert run(*words, "--help")[0] == 0
