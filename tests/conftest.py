"""Shared fixtures. Nothing here, and no test, reaches a network."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_DISABLE_XET"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing by more
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # tests/gpu says how to run those of a GPU

import pytest
import reach
import transformers
from accelerate.state import AcceleratorState, GradientState
from local_hub import LocalHub
from tiny_training import random_answers, write_answers, write_target

from draftheads.scripts import cli

transformers.logging.disable_progress_bar()

DATA = Path(__file__).parent.parent.parent / "shared" / "data"


LONGEST = (
    *("test_conformance", "test_engines", "test_compiled", "test_page", "test_training"),
    *("test_hybrid", "test_launch", "test_served", "test_mtp", "test_minutes", "test_evaluate"),
    *("test_contract", "test_acceptance", "test_interrupt", "test_doctor", "test_install"),
    *("test_damaged", "test_distill_server", "test_entry", "test_continuous", "test_convert"),
)
"""Modules that begin first, so that no process works alone at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    what = (
        "run the files of tests that what changed since COMMIT can reach (tests/helpers/reach.py)"
    )
    parser.addoption("--since", metavar="COMMIT", help=what)


def pytest_configure(config: pytest.Config) -> None:
    """Once: the processes of xdist get the options of the first."""
    if not config.option.since or hasattr(config.option, "reached"):
        return
    try:
        changed = reach.changes(config.option.since)
    except subprocess.CalledProcessError as error:
        raise pytest.UsageError(f"--since: expected a commit, got {config.option.since}") from error
    config.option.reached = [str(test) for test in reach.reached(changed)]


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.since:
        count = len(config.option.reached)
        return (
            f"since {config.option.since}: changes reach {count} of {len(reach.TEST_FILES)} files"
        )
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.name.startswith("test_")
    if config.option.since and is_test and str(collection_path) not in config.option.reached:
        return True
    return None


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: many tests wait for processes and servers."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """What was imported stays, and no collection of garbage looks at it again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def disks_are_not_waited_for():
    """What survives a power cut is not tested, and to wait for it takes longer than most tests."""
    fsync = os.fsync
    os.fsync = lambda file: None
    yield
    os.fsync = fsync


@pytest.fixture(scope="session", autouse=True)
def caches_are_their_own(tmp_path_factory):
    """What tests keep of GGUF files is not in the user's cache; what DeepSpeed compiles stays
    there.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    with pytest.MonkeyPatch.context() as patch:
        if "TORCH_EXTENSIONS_DIR" not in os.environ:
            patch.setenv("TORCH_EXTENSIONS_DIR", str(cache / "torch_extensions" / "tests"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps its state for the life of a process; each test is a run of its own."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def ctrl_c_is_heeded():
    """Also where tests run in the background of a script, which makes processes ignore Ctrl-C: so
    would the programs that are tested.
    """
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


@pytest.fixture
def hang_ups_are_heeded():
    """Also under nohup. Only for tests of SIGHUP: a hang-up ends the others as little as before."""
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, old)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a tiny target in `target` and answers to train on in `data`."""
    folder = tmp_path_factory.mktemp("made")
    write_target(folder / "target")
    write_answers(folder / "data", random_answers(60))
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A local Hub that huggingface_hub talks to; it reads HF_ENDPOINT once, at import, hence the
    patches.
    """
    import huggingface_hub.constants as constants
    from huggingface_hub import close_session, hf_api

    local = LocalHub()
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(constants, "ENDPOINT", local.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        local.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(hf_api.api, "endpoint", local.url)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # made once, with the endpoint
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    yield local
    close_session()  # its connections would be collected during other tests
    local.close()


@pytest.fixture
def stories() -> Path:
    """A real pretrained 260k-parameter model, where this checkout has the shared data beside it."""
    folder = DATA / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"real test model not found at {folder}")
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """Type a command; gives (exit code, output, error lines)."""

    def typed(*words: object) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["draftheads", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("error:")]
        return int(stopped.value.code or 0), captured.out, errors

    return typed


@pytest.fixture
def modules_cache(monkeypatch, tmp_path):
    """Where transformers copies remote code to."""
    from transformers import dynamic_module_utils as dynamic
    from transformers.utils import hub

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(hub, "HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
