"""The promise: llama.cpp without drafts is measured on the same prompts, found where it is, and
named when it is the faster one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import psutil
import pytest
from tiny_targets import some_prompts, tiny_target

from draftheads.heads.medusa import MedusaHead
from draftheads.infer.measure.bench import BenchOptions, bench
from draftheads.infer.measure.llamacpp import PLACE, LlamaServer, find_server, rival_of
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
            answer = {"tokens": tokens, "timings": {"predicted_per_token_ms": 2.5}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

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
    options = BenchOptions(max_new_tokens=NEW, rival=stub[0])
    return bench(target, {"medusa": MedusaHead.create(target)}, some_prompts(5, 7), options)


def test_it_decodes_the_same_prompts_greedily(report, stub):
    asked = stub[1][1:]  # the first warms up
    assert sorted(len(each["prompt"]) for each in asked) == [5, 7]
    for each in asked:
        assert each["n_predict"] == NEW and each["temperature"] == 0
        assert each["cache_prompt"] is False


def test_its_row_claims_nothing_of_its_text(report):
    rival = report.rival
    assert (rival.tokens, rival.tokens_per_step, rival.lossless) == (2 * NEW, 1.0, None)
    assert rival.first_divergence is None and rival.verify_seconds == pytest.approx(2.5e-3)
    row = results_grid(report).rows[-1]
    assert row[0] == "llama.cpp" and row[-1] == "n/a"
    assert any("its own clock" in line for line in cautions(report))
    assert [each.name for each in report.heads] == ["medusa"]


@pytest.mark.parametrize(("speed", "is_named"), [(1e9, True), (1e-9, False)])
def test_the_sentence_names_it_where_it_is_faster_than_all(report, speed, is_named):
    rival = replace(report.rival, tokens_per_second=speed)
    changed = replace(report, rival=rival)
    assert ("llama.cpp without drafts is faster than all" in verdict(changed)) == is_named
    assert best(changed) == best(report)


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
    with rival_of(str(file), 9) as rival:
        assert rival is None
    assert "without llama.cpp" in caplog.text
    with rival_of(str(tmp_path), 9) as rival:
        assert rival is None
