"""The promise: `bench --server` tells of a real vLLM what our own `bench` tells of the same chain:
acceptance at each position, steps, and the same text as vLLM without drafts. Opt-in:
`pytest -m engines`, with DRAFTHEADS_VLLM as for test_vllm.py.
"""

from __future__ import annotations

import json

import pytest
from real_engines import place_of
from vllm_server import serving

from draftheads.heads.formats.hub import load_head
from draftheads.heads.tree import parse_tree
from draftheads.infer.measure.bench import BenchOptions, bench
from draftheads.recipes import FOLDER as RECIPES
from draftheads.scripts.openings import opening_ids

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]
PYTHON = place_of("vllm")
PROMPTS, NEW = 6, 32
USUAL = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8")
PAGE = RECIPES / "demo-heldout.jsonl"


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_served_chain_is_measured_as_our_own(run, trained, demo_target, tmp_path, concurrency):
    head = trained("eagle3") / "best"
    drafting = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    speculative = ("--speculative-config", json.dumps(drafting))
    out = tmp_path / "figures.json"
    with (
        serving(PYTHON, demo_target.name, tmp_path / "head.log", *USUAL, *speculative) as one,
        serving(PYTHON, demo_target.name, tmp_path / "plain.log", *USUAL) as other,
    ):
        drafted, plain = one.url, other.url
        code, table, errors = run(
            "bench", "--server", drafted, "--server-plain", plain, "--prompts", PAGE,
            "--limit", PROMPTS, "--max-new-tokens", NEW, "--repetitions", 1,
            "--concurrency", concurrency, "--json", out,
        )  # fmt: skip
        swapped = run("bench", "--server", plain, "--server-plain", drafted, "--prompts", PAGE)
    assert (code, errors) == (0, [])
    print(table)
    figures = json.loads(out.read_text())
    ids = opening_ids(demo_target, str(PAGE), PROMPTS)
    entries = {"head": (load_head(str(head), target=demo_target), parse_tree("1,1,1"))}
    [own] = bench(demo_target, entries, ids, BenchOptions(max_new_tokens=NEW)).heads
    assert figures["drafts"] == own.steps
    assert figures["acceptance_by_depth"] == pytest.approx(own.acceptance_by_depth)
    # the counters include what was accepted beyond an answer's end
    assert 0 <= figures["tokens_per_step"] - own.tokens_per_step <= 3 * PROMPTS / own.steps
    assert figures["different_texts"] == 0 and figures["tokens"] == own.tokens
    assert figures["foreign_tokens"] == 0
    assert swapped[0] == 2 and "--speculative-config" in swapped[2][0]
