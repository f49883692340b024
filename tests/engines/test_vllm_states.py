"""The promise: heads learn from the hidden states of vLLM itself what they learn from the target in
this process, and vLLM drafts with them as we do. Opt-in: `pytest -m engines`.

DRAFTHEADS_VLLM: as in test_vllm.py. Its CPU build writes states by our connector
(scripts/benchmarks/engine_runs/connectors), as the stock one needs CUDA.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from local_server import states_of
from real_engines import Serving, place_of, serving

from draftheads.heads.target.model import Target
from draftheads.recipes import FOLDER as RECIPES
from draftheads.scripts.benchmarks import engines
from draftheads.scripts.benchmarks.engines import Job, ours, theirs
from draftheads.scripts.openings import opening_ids
from draftheads.train.features.served import StateServers
from draftheads.train.medusa import fit
from draftheads.train.recipe import FeatureChoices, load_recipe

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]
PLACE = place_of("vllm")
CONNECTORS = Path(engines.__file__).parent / "engine_runs" / "connectors"
CAPTURED = [0, 1, 3, 5, 6]


@contextmanager
def capturing(target: str, exchange: Path, dtype: str = "float32") -> Iterator[Serving]:
    """vLLM with a target, and states in files of a folder."""
    exchange.mkdir(parents=True, exist_ok=True)
    capture = {"hf_config": {"eagle_aux_hidden_state_layer_ids": CAPTURED}}
    drafting = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    transfer = {"kv_connector": "CpuStates", "kv_connector_module_path": "cpu_states"}
    transfer |= {"kv_role": "kv_producer"}
    extra = {"shared_storage_path": str(exchange)}
    words = ["--dtype", dtype, "--max-model-len", "320", "--max-num-seqs", "16"]
    words += ["--no-enable-prefix-caching", "--speculative-config"]
    words += [json.dumps({**drafting, "draft_model_config": capture}), "--kv-transfer-config"]
    words += [json.dumps({**transfer, "kv_connector_extra_config": extra})]
    log = exchange.with_suffix(".log")
    with serving(PLACE, target, log, *words, PYTHONPATH=str(CONNECTORS)) as server:
        yield server


def features(server: Serving, exchange: Path) -> list[str]:
    """Of a recipe."""
    return [
        f"features.server=[{server.url}]",
        f"features.exchange={exchange}",
        f"features.layers={CAPTURED}",
    ]


@pytest.fixture(scope="module")
def served(demo_target, tmp_path_factory) -> Iterator[list[str]]:
    """Keys of a recipe."""
    exchange = tmp_path_factory.mktemp("served") / "exchange"
    with capturing(demo_target.name, exchange) as server:
        yield features(server, exchange)


def differences(target: Target, url: str, exchange: Path, texts: list[list[int]]) -> list[float]:
    """Of each state: the largest distance from the target's own, over the largest number."""
    choices = FeatureChoices(server=[url], exchange=exchange)
    asked = StateServers(target, choices, CAPTURED, 256)
    found = [0.0] * len(CAPTURED)
    nothing_learned = [np.zeros(len(text), dtype=bool) for text in texts]
    futures = list(map(asked.ask, zip(texts, nothing_learned, strict=True)))
    for text, future in zip(texts, futures, strict=True):
        own_PNH, _ = states_of(target.model, text)
        for place, state in enumerate(CAPTURED):
            got, own = future.result()[:, place].float(), own_PNH[:, state].float()
            found[place] = max(found[place], float((got - own).abs().max() / own.abs().max()))
    asked.close()
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_all_states_are_those_of_transformers(demo_target, relative, tmp_path, name, dtype, most):
    folder = demo_target.name if name == "llama" else relative(name).name
    target = Target.load(folder, dtype=dtype)
    texts = opening_ids(target, str(RECIPES / "demo-prompts.jsonl"), 12)
    texts.append([*range(5, 205)])
    exchange = tmp_path / "exchange"
    with capturing(folder, exchange, dtype) as server:
        found = differences(target, server.url, exchange, texts)
    print(f"\n{name}, {dtype}: {found}")
    assert max(found) < most


KINDS = {
    "medusa": ("medusa",),
    "sequential": ("sequential",),
    "eagle3": ("eagle3",),
    "eagle3-soft": ("eagle3", "head.labels=soft"),
    "eagle": ("eagle3", "head.kind=eagle"),
    "block": ("block",),
}


@pytest.fixture(scope="module")
def data(trained) -> Path:
    """Answers of the demo target."""
    return trained("medusa", "run.epochs=null", "run.steps=1", "eval.every=0").parent / "data"


def train(kind: str, data: Path, output: Path, *overrides: str) -> Path:
    """The run folder of the demo's recipe for a kind of head."""
    places = [f"target={RECIPES / 'demo-target'}", f"data.path={data}", f"run.output={output}"]
    few = ["run.epochs=null", "run.log_every=1", "eval.every=0", "data.sequence_length=256"]
    fit(load_recipe(RECIPES / f"demo-{kind}.yaml", [*places, *few, *overrides]))
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_are_those_of_online_training(kind, data, served, tmp_path):
    name, *more = KINDS[kind]
    online = losses(train(name, data, tmp_path / "online", *more, "run.steps=20"))
    chosen = [*more, "run.steps=20", *served]
    got = losses(train(name, data, tmp_path / "served", *chosen))
    print(f"\n{kind}: {online[-1]} and {got[-1]}")
    assert len(online) == 20 and got == pytest.approx(online, rel=1e-4)


def losses(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_vllm_drafts_with_a_head_that_learned_from_it(data, served, demo_target, tmp_path):
    folder = train("eagle3", data, tmp_path / "run", "run.steps=200", *served) / "best"
    prompts = opening_ids(demo_target, str(RECIPES / "demo-prompts.jsonl"), 12)
    plain = Job(demo_target.name, prompts)
    job = Job(plain.target, prompts, str(folder), "eagle3", 3)
    expected, found = ours(job, demo_target), theirs("vllm", PLACE, job)
    print(f"\n{found.version}: {found.drafts} drafts, accepted {found.accepted}")
    assert found.answers == expected.answers == ours(plain, demo_target).answers
    assert (found.drafts, found.accepted) == (expected.drafts, expected.accepted)
    assert sum(found.accepted) > 0


def test_a_killed_server_ends_the_run_which_resumes_with_a_new_one(demo_target, data, tmp_path):
    often = ["run.steps=60", "run.save_every=5"]
    with capturing(demo_target.name, tmp_path / "one") as server:
        kill_it = f"kill -9 -- -{server.process.pid}"  # as soon as there is a checkpoint
        wait = f"until ls -d {tmp_path}/run/step-* 2>/dev/null; do sleep 0.1; done; {kill_it}"
        watcher = subprocess.Popen(["bash", "-c", wait])
        with pytest.raises(OSError, match="again to resume"):
            train("medusa", data, tmp_path / "run", *often, *features(server, tmp_path / "one"))
        watcher.wait()
    with capturing(demo_target.name, tmp_path / "two") as server:
        train("medusa", data, tmp_path / "run", *often, *features(server, tmp_path / "two"))
    assert (tmp_path / "run" / "step-000060").is_dir()
    assert losses(tmp_path / "run")
