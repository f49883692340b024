"""The promise: heads learn from a server's states what they learn from the target itself, and
nothing from anything else.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from time import sleep

import numpy as np
import pytest
import torch
import yaml
from launching import ROOT, exit_code_of_a_fork, outputs_of_two_forks, two_forks
from local_server import StatesServer
from placement_worker import random_batch
from tiny_training import (
    HEAD_SECTIONS,
    assert_same,
    random_answers,
    recipe_of,
    run,
    tiny_model,
    tiny_recipe,
    weights,
    write_answers,
    write_target,
    written,
)
from transformers import LlamaForCausalLM

from draftheads.heads.target.model import Target
from draftheads.infer.engine import Speculator
from draftheads.train.advice.plan import make_plan
from draftheads.train.checkpoint import read_state
from draftheads.train.features import served
from draftheads.train.features.states import StateLayout

LAYERS = 2
ALL = [*range(LAYERS + 1)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_target(folder / "target")
    write_answers(folder / "data", written(tiny_model(), random_answers(40)))
    return folder


@pytest.fixture
def server(tmp_path) -> Iterator[StatesServer]:
    server = StatesServer(tiny_model(), tmp_path / "exchange", ALL)
    yield server
    server.close()


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A run that nothing disturbs, and the documents that it asked for."""
    folder = tmp_path_factory.mktemp("whole")
    server = StatesServer(tiny_model(), folder / "exchange", ALL)
    assert run(made, folder / "run", *options(server)) == 0
    server.close()
    return folder / "run", [request["prompt"] for request in server.asked]


def options(server: StatesServer, *more: str, mode: str = "online") -> list[str]:
    return [
        f"features.mode={mode}",
        f"features.server=[{server.url}]",
        f"features.exchange={server.folder}",
        f"features.layers={server.captured}",
        *more,
    ]


def write_recipe(made: Path, folder: Path) -> None:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe(made)))


def losses(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_a_head_that_is_like_a_layer_of_the_target_needs_one(made, server, tmp_path, capsys):
    assert run(made, tmp_path / "run", *options(server), kind="mtp") == 2
    assert "not in memory; load the target whole" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in HEAD_SECTIONS if kind != "mtp"])
def test_heads_learn_the_same_as_online(made, server, tmp_path, kind):
    server.held = 0.02
    assert run(made, tmp_path / "online", kind=kind) == 0
    assert run(made, tmp_path / "served", *options(server), kind=kind) == 0
    online, from_server = losses(tmp_path / "online"), losses(tmp_path / "served")
    assert len(online) == 6
    assert from_server == pytest.approx(online, rel=1e-4)
    assert not list(server.folder.iterdir()), "what was read is deleted"


def test_a_step_without_layers_is_that_of_the_whole_target(made, server, tmp_path):
    """With the same stored features: bit for bit, soft labels and final norm included."""
    for kind in ("eagle3", "medusa"):
        data = f"data.path={made / 'data'}"
        stored = f"features.path={tmp_path / f'features-{kind}'}"
        chosen = options(server, stored, data, mode="cached")
        assert run(made, tmp_path / f"served-{kind}", *chosen, kind=kind) == 0
        asked = len(server.asked)
        whole = ["features.mode=cached", stored, data]
        assert run(made, tmp_path / f"whole-{kind}", *whole, kind=kind) == 0
        assert len(server.asked) == asked
        assert_same(weights(tmp_path / f"served-{kind}", 6), weights(tmp_path / f"whole-{kind}", 6))


def refused(
    made: Path, server: StatesServer, output: Path, capsys, *more: str, is_learned: bool = False
) -> str:
    """The line of a run that is refused; nothing is left of it in memory, on disk or in a head.
    is_learned: but for steps before the fault.
    """
    code = run(made, output, *options(server, "features.timeout=5", *more))
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2, lines
    assert is_learned or not list(output.glob("step-*/model.safetensors"))
    assert not [path for path in server.folder.glob("*") if path.name.startswith("cmpl")]
    return lines[-1]


def only(number: int, change: Callable) -> Callable:
    """A change of one document alone, after the probe and a few more."""
    return lambda n, value: change(value) if n == number else value


def as_dtype(dtype: torch.dtype) -> Callable:
    return lambda t: t | {"hidden_states": t["hidden_states"].to(dtype)}


CHANGES: dict[str, tuple[Callable, str]] = {
    "other-ids": (lambda t: t | {"token_ids": t["token_ids"] + 1}, "tokens that were sent, got"),
    "cached-prefix": (
        lambda t: {key: each[2:] for key, each in t.items()},
        "is a prefix cached",
    ),
    "fewer-states": (
        lambda t: t | {"hidden_states": t["hidden_states"][:, 1:].contiguous()},
        "set features.layers to those that were captured",
    ),
    "narrow": (
        lambda t: t | {"hidden_states": t["hidden_states"][..., 1:].contiguous()},
        "tokens, got shape",
    ),
    "not-finite": (lambda t: t | {"hidden_states": t["hidden_states"] / 0}, "expected finite"),
    "no-number-of-ids": (lambda t: t | {"token_ids": torch.tensor(5)}, "tokens that were sent"),
    "fp8-without-scales": (as_dtype(torch.float8_e4m3fn), "float8_e4m3fn"),
    "float64": (as_dtype(torch.float64), "float64"),
    "integers": (as_dtype(torch.int32), "int32"),
    "one-state": (lambda t: t | {"hidden_states": torch.ones(())}, "got shape ()"),
    "scales-of-others": (
        lambda t: t | {"hidden_states_scales": torch.ones(7)},
        "expected scales of tokens and states",
    ),
    "other-embeddings": (
        lambda t: t | {"hidden_states": t["hidden_states"].flip(1).contiguous()},
        "expected the embeddings of",
    ),
    "no-ids": (lambda t: {"hidden_states": t["hidden_states"]}, "expected tensors hidden_states"),
}


@pytest.mark.mend(
    "ids or scales of another shape, or fp8 without scales, ended a run with a traceback"
)
@pytest.mark.mend("state 0 was compared in the first document alone")
@pytest.mark.parametrize("number", [0, 9])
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_learned_from_other_states(made, server, tmp_path, capsys, name, number):
    change, words = CHANGES[name]
    server.change = only(number, change)
    line = refused(made, server, tmp_path / "run", capsys, is_learned=number > 0)
    assert words in line and server.url in line and "nothing was learned" in line


def noise(states_PLH: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(states_PLH) * states_PLH.std()


def changed_states(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """From the eleventh document on, all states but the embeddings and the last token's."""

    def of_document(number: int, tensors: dict) -> dict:
        states_PLH = tensors["hidden_states"].clone()
        if number > 10:
            states_PLH[:-1, 1:] = change(states_PLH)[:-1, 1:]
        return tensors | {"hidden_states": states_PLH}

    return of_document


OTHERS: dict[str, Callable] = {
    "noise": noise,
    "nothing": torch.zeros_like,
    "of the next tokens": lambda states_PLH: states_PLH.roll(-1, 0),
    "noise between first and last": lambda states_PLH: torch.cat(
        [states_PLH[:, :1], noise(states_PLH)[:, 1:2], states_PLH[:, 2:]], dim=1
    ),
}


@pytest.mark.mend(
    "noise, zeros and shifted states of servers were learned after the first document"
)
@pytest.mark.parametrize("name", OTHERS)
def test_each_document_is_checked_at_all_of_its_places(made, server, tmp_path, capsys, name):
    torch.manual_seed(0)
    server.change = changed_states(OTHERS[name])
    line = refused(made, server, tmp_path / "run", capsys, is_learned=True)
    assert server.url in line and "nothing was learned from it" in line
    expected = "same first" if "between" in name else "predict the learned tokens"
    assert expected in line or "same first" in line


def other_model() -> LlamaForCausalLM:
    """With the same embeddings, lm_head and norms, but other layers."""
    model = tiny_model()
    torch.manual_seed(1)
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.std() * torch.randn_like(parameter)
    return model


@pytest.mark.mend("states of another model were learned after a restart of the server")
def test_a_server_that_is_started_again_with_another_model(made, server, tmp_path, capsys):
    other = other_model()  # not in the server's thread: training draws from the same generator

    def restart(number: int, request: dict) -> None:
        if number == 15:
            server.model = other

    server.fault = restart
    line = refused(made, server, tmp_path / "run", capsys, is_learned=True)
    assert re.search("use one model for all|predict the learned tokens|serve the same", line)


@pytest.mark.mend("one of two servers with another model was not noticed")
def test_one_of_two_servers_with_another_model_is_named(made, server, tmp_path, capsys):
    other = StatesServer(other_model(), server.folder, ALL)
    urls = f"features.server=[{server.url},{other.url}]"
    line = refused(made, server, tmp_path / "run", capsys, urls)
    assert other.url in line and "use one model for all documents" in line
    other.close()


PLACES: dict[str, Callable[[Path], Path]] = {
    "elsewhere": lambda folder: folder.parent / "elsewhere.safetensors",
    "above": lambda folder: folder / ".." / "elsewhere.safetensors",
    "linked": lambda folder: folder / "link.safetensors",
    "a model's": lambda folder: folder / "model-00001-of-00002.safetensors",
    "below": lambda folder: folder / "sub" / "cmpl-1.safetensors",
}


@pytest.mark.mend("a server could have any file below the exchange folder deleted")
@pytest.mark.parametrize("name", PLACES)
def test_a_file_that_is_no_answer_is_neither_read_nor_deleted(made, server, tmp_path, capsys, name):
    path = PLACES[name](server.folder)
    mine = path
    if name == "linked":
        mine = tmp_path / "elsewhere.safetensors"
        path.symlink_to(mine)
    mine.parent.mkdir(exist_ok=True)
    mine.write_bytes(b"mine")
    server.path_of = lambda number: path
    server.change = lambda number, tensors: None
    line = refused(made, server, tmp_path / "run", capsys)
    assert "expected files cmpl-*.safetensors in" in line and "nothing was read" in line
    assert mine.read_bytes() == b"mine"


@pytest.mark.mend("a FIFO in the exchange folder froze training")
@pytest.mark.parametrize("is_lock", [False, True])
def test_a_pipe_is_not_waited_for(made, server, tmp_path, capsys, monkeypatch, is_lock):
    monkeypatch.setattr(served, "FILE_SECONDS", 0.3)
    path = server.folder / "cmpl-pipe.safetensors"
    os.mkfifo(f"{path}.lock" if is_lock else path)
    path.touch()
    server.path_of = lambda number: path
    server.change = lambda number, tensors: None
    code = run(made, tmp_path / "run", *options(server))
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and "is no regular file" in line


@pytest.mark.mend("a dangling link in the exchange folder stopped the start")
def test_links_in_the_exchange_folder_are_left_alone(made, server, tmp_path):
    (server.folder / "cmpl-1.safetensors").symlink_to(tmp_path / "nowhere")
    assert run(made, tmp_path / "run", *options(server)) == 0


def break_a_library(server, patch, heldout):
    real, calls = StateLayout.row, []

    def row(*args: object) -> torch.Tensor:
        calls.append(args)
        if len(calls) > 8:
            raise KeyError("of a library")
        return real(*args)

    patch.setattr(StateLayout, "row", row)


def die(server, patch, heldout):
    server.fault = lambda number, request: 404 if number > 30 else None


def refuse_heldout_rows(
    server: StatesServer, patch: pytest.MonkeyPatch, heldout: list[int]
) -> None:
    server.fault = lambda number, request: 404 if request["prompt"] == heldout else None


@pytest.mark.mend("a KeyError in features threw away the steps since the last save")
@pytest.mark.parametrize(
    ("breaks", "words", "steps"),
    [
        (
            break_a_library,
            "error: features: cannot be read (KeyError: 'of a library')",
            range(1, 6),
        ),
        (die, "HTTP 404", range(1, 6)),
        (refuse_heldout_rows, "HTTP 404", [6]),
    ],
)
def test_whatever_ends_features_what_was_learned_is_kept_and_goes_on(
    made, whole, server, tmp_path, capsys, breaks, words, steps
):
    chosen = options(server, "features.in_flight=1", "run.save_every=6")
    with pytest.MonkeyPatch.context() as patch:
        breaks(server, patch, whole[1][-1])
        assert run(made, tmp_path / "run", *chosen) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in line and ("HTTP" not in words or "again to resume" in line)
    [checkpoint] = (tmp_path / "run").glob("step-*")
    assert read_state(checkpoint).step in steps
    server.fault = lambda number, request: None
    assert run(made, tmp_path / "run", *chosen) == 0
    assert "resuming" in capsys.readouterr().out
    assert_same(weights(whole[0], 6), weights(tmp_path / "run", 6))


@pytest.mark.mend("a probe of a state server that failed in one process left the others waiting")
@pytest.mark.slow
def test_a_server_that_one_process_cannot_ask_ends_all_of_them(made, server, tmp_path):
    """Its first document is asked for before any step."""
    write_recipe(made, tmp_path)
    server.fault = lambda number, request: 404 if number == 1 else None  # of the second that comes
    script, recipe = str(ROOT / "train" / "medusa.py"), str(tmp_path / "recipe.yaml")
    two = [script, recipe, *options(server), f"run.output={tmp_path / 'two'}"]
    ended = two_forks(tmp_path, *two)
    assert [code for code, _ in ended] == [2, 2]
    assert "HTTP 404" in "".join(output for _, output in ended)
    assert not any("is gone or never came" in output for _, output in ended)


@pytest.mark.mend(
    "threads went on to read states after the end, and a fork could inherit their locks"
)
def test_closing_ends_what_was_asked_and_nothing_else(made, server):
    recipe = tiny_recipe(made)
    recipe["features"] = {"server": [server.url], "exchange": str(server.folder)}
    before = {*threading.enumerate()}
    asked = served.StateServers(Target.load(made / "target"), recipe_of(recipe).features, ALL, 8)
    reading = Event()
    asked._read = lambda *_: reading.wait(10) and sleep(0.1)  # type: ignore[method-assign]
    other = asyncio.run_coroutine_threadsafe(asyncio.sleep(60), asked._loop)
    document = asked.ask(([1, 2, 3], np.array([False, True, True])))
    document.add_done_callback(lambda _: None)
    reading.set()
    asked.close()
    assert document.done() and not other.cancelled()
    # but those of the server, which may still hold its connections
    left = {each.name.partition("_")[0] for each in threading.enumerate() if each not in before}
    assert not left & {"features", "asyncio"}, "no thread reads any more"


def test_a_file_that_never_comes_or_is_cut(made, server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(served, "FILE_SECONDS", 0.3)
    server.change = lambda number, tensors: None if number else tensors  # but for the probe
    line = refused(made, server, tmp_path / "run", capsys)
    assert "no file" in line and "is its disk full" in line and "run the same command again" in line

    first = len(server.asked)

    def cut(number: int, tensors: dict) -> dict | None:
        if number != first + 12:
            return tensors
        server.path_of(number).write_bytes(b"\x00\x01")
        return None

    server.change = cut
    assert "cannot be read" in refused(made, server, tmp_path / "run2", capsys, is_learned=True)


def test_a_server_that_was_started_otherwise(made, server, tmp_path, capsys):
    answer = server.choice
    server.change = lambda number, tensors: None
    server.choice = lambda request: answer(request) | {"kv_transfer_params": None}
    line = refused(made, server, tmp_path / "run", capsys)
    assert "expected hidden_states_path in kv_transfer_params" in line
    server.models = [{"id": "tiny", "max_model_len": 32}]
    line = refused(made, server, tmp_path / "run2", capsys)
    assert "expected a context above" in line and "--max-model-len" in line
    server.models = [{"id": "tiny"}, {"id": "other"}]
    assert "set features.server_model" in refused(made, server, tmp_path / "run3", capsys)
    line = refused(made, server, tmp_path / "run4", capsys, "features.exchange=nowhere")
    assert "features.exchange: expected the folder" in line


def test_faults_that_pass_are_retried(made, server, tmp_path):
    server.fault = lambda number, request: {3: 503, 7: 429, 8: -1}.get(number)
    assert run(made, tmp_path / "online") == 0
    assert run(made, tmp_path / "served", *options(server)) == 0
    assert losses(tmp_path / "served") == pytest.approx(losses(tmp_path / "online"), rel=1e-4)


def test_several_servers_share_the_documents_and_one_may_die(made, server, tmp_path, monkeypatch):
    other = StatesServer(tiny_model(), server.folder, ALL)
    urls = f"features.server=[{server.url},{other.url}]"
    assert run(made, tmp_path / "two", *options(server, urls)) == 0
    assert min(len(server.asked), len(other.asked)) > 5
    other.fault = lambda number, request: 404 if number > 10 else None
    assert run(made, tmp_path / "one", *options(server, urls)) == 0
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-6)
    other.close()


@pytest.mark.slow
def test_a_fault_of_one_process_ends_all_with_a_checkpoint(made, whole, server, tmp_path):
    refused = len(whole[1]) - 12  # of the last step, or nearly
    write_recipe(made, tmp_path)
    script, recipe = str(ROOT / "train" / "medusa.py"), str(tmp_path / "recipe.yaml")
    two = [script, recipe, *options(server, "run.save_every=6"), f"run.output={tmp_path / 'two'}"]
    server.fault = lambda number, request: 404 if number == refused else None
    ended = two_forks(tmp_path, *two)
    assert [code for code, _ in ended] == [2, 2]
    assert any("HTTP 404" in output for _, output in ended)
    server.fault = lambda number, request: None
    assert "resuming" in outputs_of_two_forks(tmp_path, *two)[0]
    assert losses(tmp_path / "two") == pytest.approx(losses(whole[0]), rel=1e-4)


def test_what_a_killed_run_left_is_deleted_and_nothing_else(made, server, tmp_path):
    old, new = server.folder / "cmpl-1.safetensors", server.folder / "cmpl-2.safetensors"
    mine = server.folder / "model-00001-of-00002.safetensors"
    for path in (old, new, mine):
        path.write_bytes(b"left")
    for path in (old, mine):
        os.utime(path, (1, 1))
    assert run(made, tmp_path / "run", *options(server)) == 0
    assert not old.exists()
    assert new.exists(), "a new one may be another trainer's"
    assert mine.exists(), "the folder may be one of models, by mistake"


def test_layers_mean_nothing_without_servers(made, tmp_path, capsys):
    for mode in ("online", "cached"):
        chosen = [f"features.mode={mode}", "features.layers=[0,1,2]"]
        assert run(made, tmp_path / "run", *chosen) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert "features.layers: expected features.server, got none; leave it out" in line


def test_recipes_that_cannot_work(made, server, tmp_path, capsys):
    def line(*more: str) -> str:
        assert run(made, tmp_path / "run", *options(server), *more) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "the layers of the target are not loaded" in line("target_placement=sharded")
    assert "features.server turn it off" in line("eval.best=tokens_per_step")
    assert "capture [1], too" in line("features.layers=[0,2]", "head.kind=eagle3")
    assert "expected states from 0 to 2" in line("features.layers=[2,0]")


def test_the_target_has_no_layers(made):
    skeleton = Target.load(made / "target", placement="skeleton")
    whole = Target.load(made / "target")
    bytes_of = [
        sum(p.nbytes for p in t.model.parameters() if not p.is_meta) for t in (skeleton, whole)
    ]
    assert bytes_of[0] < bytes_of[1]
    assert torch.equal(skeleton.unembed_weight(), whole.unembed_weight())
    batch = random_batch(97)
    for run_it in (
        lambda: skeleton.features(batch, [1]),
        lambda: skeleton.prefill([[1, 2]], skeleton.new_cache(1, 8), ()),
        lambda: next(Speculator(skeleton).generate([1, 2])),
        lambda: skeleton.attach(made),
    ):
        with pytest.raises(ValueError, match="load it whole to decode, or ask its server"):
            run_it()


def test_files_in_fp8_are_read(made, server, tmp_path):
    """As hs-connectors writes them: a scale for each token, over all its states."""

    def quantised(number: int, tensors: dict) -> dict:
        states_PLH = tensors["hidden_states"]
        scales = states_PLH.abs().amax((1, 2), keepdim=True) / 448
        whole = (states_PLH / scales).to(torch.float8_e4m3fn)
        return tensors | {"hidden_states": whole, "hidden_states_scales": scales}

    server.change = quantised
    assert run(made, tmp_path / "online") == 0
    assert run(made, tmp_path / "served", *options(server)) == 0
    online, got = losses(tmp_path / "online"), losses(tmp_path / "served")
    assert got != online and got == pytest.approx(online, rel=0.05)


def killed_at_document(made: Path, folder: Path, output: Path, number: int) -> None:
    """In a fork, with a server of its own: dies when it asks for that document."""
    server = StatesServer(tiny_model(), folder, ALL)

    def die(asked: int, request: dict) -> None:
        if asked == number:
            os.kill(os.getpid(), signal.SIGKILL)

    server.fault = die
    run(made, output, *options(server, "features.in_flight=2", "run.save_every=1"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 20, 45])
def test_a_killed_trainer_resumes(made, server, tmp_path, number):
    assert run(made, tmp_path / "whole", *options(server)) == 0
    code = exit_code_of_a_fork(killed_at_document, made, server.folder, tmp_path / "run", number)
    assert code == -signal.SIGKILL
    assert run(made, tmp_path / "run", *options(server, "run.save_every=1")) == 0
    assert_same(weights(tmp_path / "whole", 6), weights(tmp_path / "run", 6))


def test_stored_rows_are_fetched_once_and_resume(made, server, tmp_path, capsys):
    """A server that dies while they are written: complete shards stay, the rest comes later."""
    stored = [f"features.path={tmp_path / 'features'}"]
    server.fault = lambda number, request: 404 if number > 20 else None
    assert run(made, tmp_path / "run", *options(server, *stored, mode="cached")) == 2
    assert "again to resume" in capsys.readouterr().err
    server.fault = lambda number, request: None
    assert run(made, tmp_path / "run", *options(server, *stored, mode="cached")) == 0
    server.close()
    again = options(server, *stored, "run.steps=8", mode="cached")
    assert run(made, tmp_path / "run", *again) == 0, "no server is needed"


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(
    made, server, tmp_path, capsys, monkeypatch
):
    path = f"features.path={tmp_path / 'features'}"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert run(made, tmp_path / "run", *options(server, path, mode="cached")) == 2
    assert "free on that disk" in capsys.readouterr().err
    assert not server.asked


@pytest.mark.slow
def test_each_process_asks_for_its_own_rows(made, whole, server, tmp_path):
    write_recipe(made, tmp_path)
    chosen = [*options(server, "features.in_flight=2"), f"run.output={tmp_path / 'two'}"]
    script = str(ROOT / "train" / "medusa.py")
    outputs_of_two_forks(tmp_path, script, str(tmp_path / "recipe.yaml"), *chosen)
    assert losses(tmp_path / "two") == pytest.approx(losses(whole[0]), rel=1e-4)
    assert len(server.asked) <= len(whole[1]) + 8, "each document once, and the probes"


def test_plan_says_what_a_server_must_give(made, server, tmp_path):
    recipe = tiny_recipe(made, "eagle3")
    recipe["features"] = {"server": [server.url], "exchange": str(server.folder)}
    made_plan = make_plan(recipe_of(recipe))
    needs, start = made_plan.servers
    assert made_plan.time, made_plan.reason
    assert needs.startswith(f"server: 0.375 KiB per token (states {ALL})"), 3 * 32 * 4
    assert re.search(r"should give [1-9][\d,]* tokens per second, and gives [1-9]", needs)
    assert made_plan.memory["target"] == 2 * 97 * 32 * 4 + 32 * 4, "no layers"
    command = shlex.split(start.removeprefix("start it with: "))
    assert command[command.index("--dtype") + 1] == "float32", "vLLM's own choice is bfloat16"
    drafting = json.loads(command[command.index("--speculative-config") + 1])
    captured = drafting["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert captured == ALL and drafting["method"] == "extract_hidden_states"
    server.close()
    alone = make_plan(recipe_of(recipe))
    assert "expected an OpenAI-compatible server" in alone.reason and len(alone.servers) == 2
