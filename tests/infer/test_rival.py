"""The promise: llama.cpp, with and without our head, is measured on the same prompts, found where
it is, named when it is the faster one; and a sentence says whether the head pays there.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import psutil
import pytest
from gguf_files import DEMO, write_gguf
from tiny_heads import random_head
from tiny_targets import some_prompts, tiny_target

from draftheads.heads.formats.hub import save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
from draftheads.infer.measure.bench import BenchOptions, bench
from draftheads.infer.measure.llamacpp import PLACE, LlamaServer, find_server, rivals_of
from draftheads.infer.measure.report import best, cautions, results_grid, verdict

NEW = 9


@pytest.fixture
def stub():
    """A server that answers as llama.cpp's, and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            tokens = [3] * asked[-1]["n_predict"]
            timings = {"predicted_ms": 2.5 * (len(tokens) - 1)}
            if self.path.startswith("/drafts"):
                timings = {"predicted_ms": 40.0, "draft_n": 9, "draft_n_accepted": 6}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"tokens": tokens, "timings": timings}).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield LlamaServer(f"http://127.0.0.1:{server.server_port}", psutil.Process()), asked
    server.shutdown()
    server.server_close()


@pytest.fixture
def report(stub):
    target = tiny_target()
    drafts = replace(stub[0], url=f"{stub[0].url}/drafts")
    rivals = {"llama.cpp": stub[0], "llama.cpp head@3": drafts}
    options = BenchOptions(max_new_tokens=NEW, rivals=rivals)
    return bench(target, {"medusa": MedusaHead.create(target)}, some_prompts(5, 7), options)


def test_it_decodes_the_same_prompts_greedily(report, stub):
    asked = stub[1][2:]  # the first two warm up
    assert sorted(len(each["prompt"]) for each in asked) == [5, 5, 7, 7]
    for each in asked:
        assert each["n_predict"] == NEW and each["temperature"] == 0
        assert each["cache_prompt"] is False


def test_its_row_claims_nothing_of_its_text(report):
    rival, drafts = report.rivals
    assert (rival.tokens, rival.tokens_per_step, rival.lossless) == (2 * NEW, 1.0, None)
    assert rival.first_divergence is None and rival.verify_seconds == pytest.approx(2.5e-3)
    assert drafts.tokens_per_step == 8 / 2 and drafts.verify_seconds == pytest.approx(20e-3)
    assert drafts.tokens == 2 * NEW and drafts.lossless is None
    rows = results_grid(report).rows[-2:]
    assert [(row[0], row[-1]) for row in rows] == [
        ("llama.cpp", "n/a"),
        ("llama.cpp head@3", "n/a"),
    ]
    assert any("its own clock" in line for line in cautions(report))
    assert [each.name for each in report.heads] == ["medusa"]


@pytest.mark.parametrize(("speed", "is_named"), [(1e9, True), (1e-9, False)])
def test_the_sentence_names_it_where_it_is_faster_than_all(report, speed, is_named):
    rival = replace(report.rivals[0], tokens_per_second=speed)
    changed = replace(report, rivals=[rival, *report.rivals[1:]])
    assert ("llama.cpp without drafts is faster than all" in verdict(changed)) == is_named
    assert best(changed) == best(report)


@pytest.mark.parametrize(
    ("interval", "found"),
    [
        ([1.1, 1.3], "drafts pay here: llama.cpp head@3 is 1.2 times (1.1 to 1.3)"),
        ([0.9, 1.3], "drafts may pay here or not: llama.cpp head@3 is 1.2 times (0.9 to 1.3)"),
        ([0.5, 0.9], "drafts do not pay here: llama.cpp head@3 is 1.2 times (0.5 to 0.9)"),
    ],
)
def test_a_sentence_says_whether_a_head_pays_in_it(report, interval, found):
    changed = replace(report, over_rival={"llama.cpp head@3": (1.2, interval)})
    [line] = [line for line in cautions(changed) if line.startswith("In llama.cpp")]
    assert found in line
    assert "τ 4.00, and a step takes as long as 8.00 tokens without drafts" in line


def program(folder):
    file = folder / "llama-server"
    file.parent.mkdir(parents=True)
    file.write_text("#!/bin/sh\nexit 3\n")
    file.chmod(0o755)
    return file


def test_the_program_is_found_by_environment_and_path(tmp_path, monkeypatch):
    monkeypatch.delenv(PLACE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() is None
    path = program(tmp_path / "path")
    monkeypatch.setenv("PATH", str(path.parent))
    assert find_server() == path
    own = program(tmp_path / "own")
    monkeypatch.setenv(PLACE, str(own.parent))
    assert find_server() == own


def test_a_program_that_does_not_start_is_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(PLACE, str(program(tmp_path / "own").parent))
    file = tmp_path / "target.gguf"
    file.write_bytes(b"GGUF")
    with rivals_of(str(file), 9, {}) as rivals:
        assert rivals == {}
    assert "without llama.cpp" in caplog.text
    with rivals_of(str(tmp_path), 9, {}) as rivals:
        assert rivals == {}


ANSWERING = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

options = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(options) + "\\n")
if {broken!r} in options:
    sys.exit("it cannot load this")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        accepted = body["n_predict"] // 2 if "-md" in options else 0
        timings = {{"predicted_ms": 5.0, "draft_n_accepted": accepted}}
        self.send_response(200)
        self.end_headers()
        answer = {{"tokens": [5] * body["n_predict"], "timings": timings}}
        self.wfile.write(json.dumps(answer).encode())


HTTPServer(("127.0.0.1", int(options[options.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.mend("llama.cpp that crashes at its first token, or answers something else")
@pytest.mark.parametrize("answer", ["", "[]", '{"tokens": []}', '{"timings": {}}', "crash"])
def test_a_server_that_answers_otherwise_costs_its_rows_alone(run, tmp_path, monkeypatch, answer):
    """The bench of our own goes on, and one token per answer is enough for it."""
    write_gguf(Target.load(DEMO, device="cpu"), tmp_path / "target.gguf")
    server = program(tmp_path / "llama")
    said = "os._exit(1)" if answer == "crash" else f"answer = {answer!r}"
    text = ANSWERING.format(python=sys.executable, log=str(tmp_path / "log"), broken="none")
    text = text.replace("import json, sys", "import json, os, sys")
    text = text.replace("self.wfile.write(json.dumps(answer)", f"{said}; self.wfile.write((answer)")
    server.write_text(text)
    monkeypatch.setenv(PLACE, str(server.parent))
    words = ["--target", tmp_path / "target.gguf", "--prompts", DEMO.parent / "demo-heldout.jsonl"]
    words += ["--head", "ngram", "--limit", 1, "--max-new-tokens", 1, "--json", tmp_path / "b.json"]
    code, _, errors = run("bench", *words)
    assert code == 0, errors
    assert json.loads((tmp_path / "b.json").read_text())["rivals"] == []


@pytest.mark.mend("a bench of one token")
def test_answers_of_one_token_have_no_steps_to_compare(stub):
    drafts = replace(stub[0], url=f"{stub[0].url}/drafts")
    rivals = {"llama.cpp": stub[0], "llama.cpp head@3": drafts}
    options = BenchOptions(max_new_tokens=1, rivals=rivals)
    target = tiny_target()
    report = bench(target, {"medusa": MedusaHead.create(target)}, some_prompts(5), options)
    [line] = [line for line in cautions(report) if line.startswith("In llama.cpp")]
    assert line.endswith("as fast as without.")


@pytest.mark.mend("work of less than a tick of another process's clock")
@pytest.mark.parametrize("broken", ["nothing", "draft-dspark"])
def test_bench_gives_it_the_heads_that_it_has(run, tmp_path, monkeypatch, caplog, broken):
    """A head that it does not load costs that row alone."""
    write_gguf(Target.load(DEMO, device="cpu"), tmp_path / "target.gguf")
    target = Target.load(str(tmp_path / "target.gguf"), device="cpu")
    heads = {
        "three": random_head("eagle3", target),
        "slots": random_head("block", target, conditioning="markov", mask=1, block_size=4),
        "dflash": random_head(
            "block", target, conditioning="none", sample_from_anchor=False, mask=1, block_size=5
        ),
        "rnn": random_head("block", target, conditioning="rnn", mask=1),
        "medusa": random_head("medusa", target),
    }
    for name, head in heads.items():
        save_head(head, tmp_path / name, target=target)
    server = program(tmp_path / "llama")
    log = tmp_path / "log.jsonl"
    server.write_text(ANSWERING.format(python=sys.executable, log=str(log), broken=broken))
    monkeypatch.setenv(PLACE, str(server.parent))
    monkeypatch.setattr(logging.getLogger("draftheads"), "handlers", [caplog.handler])
    words = ["--target", tmp_path / "target.gguf", "--prompts", DEMO.parent / "demo-heldout.jsonl"]
    words += [word for name in heads for word in ("--head", tmp_path / name)]
    words += ["--limit", 1, "--max-new-tokens", 4, "--nodes", "2,3", "--json", tmp_path / "b.json"]
    code, said, errors = run("bench", *words)
    assert code == 0, errors
    results = json.loads((tmp_path / "b.json").read_text())
    own = ["three@2", "three@3", *(["slots@4"] if broken == "nothing" else []), "dflash@4"]
    assert [each["name"] for each in results["rivals"]] == [
        "llama.cpp",
        *(f"llama.cpp {name}" for name in own),
    ]
    assert [*results["over_rival"]] == [f"llama.cpp {name}" for name in own]
    assert "In llama.cpp, drafts" in said.replace("\n", " ")
    assert "without rnn in llama.cpp" in caplog.text
    assert ("without llama.cpp slots@4" in caplog.text) == (broken != "nothing")
    started = list(map(json.loads, log.read_text().splitlines()))
    lengths = [each[each.index("--spec-draft-n-max") + 1] for each in started if "-md" in each]
    assert lengths == ["2", "3", "4", "4"] and "-md" not in started[0]
    methods = [each[each.index("--spec-type") + 1] for each in started if "-md" in each]
    assert methods == ["draft-eagle3", "draft-eagle3", "draft-dspark", "draft-dflash"]
