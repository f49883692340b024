"""The promise: prompts are known by what they say: whatever becomes of the others, an answer is
kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
from launching import CPU, become_one_of_a_launch, fork, free_port, launch_environment, place
from tiny_chat import files, on_call, options, prompts, records

from draftheads.heads import files as files_module
from draftheads.heads.target.model import Target
from draftheads.scripts import cli
from draftheads.train.data.answers import MANIFEST, Journal, read_answers, read_manifest
from draftheads.train.data.distill import distill
from draftheads.train.data.prompts import Prompt, read_conversations, read_prompts

Texts = list[str]
BEFORE = [f"question {n}" for n in range(10)]


def asked(texts: Texts) -> list[Prompt]:
    return [Prompt(index, text=text) for index, text in enumerate(texts)]


def answered(target: Target, folder: Path, texts: Texts) -> dict[str, list[list[int]]]:
    """The answers to each text."""
    found: dict[str, list[list[int]]] = {}
    for record in records(folder):
        found.setdefault(texts[record["id"]], []).append(record["tokens"])
    for text, tokens in found.items():
        assert all(target.tokenizer.decode(ids).startswith(text) for ids in tokens)
    return found


CHANGES: dict[str, tuple[Callable[[Texts], Texts], int]] = {
    # what becomes of the prompts, and how many of them are answered then
    "added at the end": (lambda old: [*old, "new"], 1),
    "added in front": (lambda old: ["new", *old], 1),
    "mended": (lambda old: [*old[:5], "mended", *old[6:]], 1),
    "removed": (lambda old: old[3:], 0),
    "moved": (lambda old: old[::-1], 0),
    "fewer": (lambda old: old[:2], 0),
    "repeated": (lambda old: [*old, old[0]], 1),
    "all at once": (lambda old: ["new", *old[:4:-1], "mended"], 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_answers_are_kept_when_prompts_change(target: Target, tmp_path: Path, change: str) -> None:
    becomes, number = CHANGES[change]
    after = becomes(BEFORE)
    distill(target, asked(BEFORE), options(tmp_path / "o"))
    old = answered(target, tmp_path / "o", BEFORE)
    calls = on_call(target, lambda call, rows: None)
    report = distill(target, asked(after), options(tmp_path / "o"))
    assert sum(calls) == number and report.complete
    assert report.prompts == report.counts.done == len(after)
    new = answered(target, tmp_path / "o", after)
    assert all(new[text][0] == old[text][0] for text in set(BEFORE) & set(after))
    read = [answer.tokens for answer in read_answers(tmp_path / "o")]
    assert read == [record["tokens"] for record in records(tmp_path / "o")]
    assert len(read) == len(after)
    distill(target, asked(BEFORE), options(tmp_path / "o"))  # as it was: nothing was lost
    assert sum(calls) == number and answered(target, tmp_path / "o", BEFORE) == old


def test_equal_prompts_are_drawn_apart(target: Target, tmp_path: Path) -> None:
    distill(target, asked(["the same"] * 6), options(tmp_path / "o"))
    [drawn] = answered(target, tmp_path / "o", ["the same"] * 6).values()
    assert len(drawn) == 6 and len({tuple(tokens) for tokens in drawn}) > 3


def test_batch_size_may_change(target: Target, tmp_path: Path) -> None:
    """After an out-of-memory, for one."""

    def interrupt(call: int, rows: int) -> None:
        if call == 1:
            raise KeyboardInterrupt

    on_call(target, interrupt)
    with pytest.raises(KeyboardInterrupt):
        distill(target, asked(BEFORE), options(tmp_path / "o"))
    kept = len(records(tmp_path / "o"))
    calls = on_call(target, lambda call, rows: None)
    assert distill(target, asked(BEFORE), options(tmp_path / "o", batch_size=3)).complete
    assert sum(calls) == 10 - kept < 10


def test_other_prompts_are_refused_and_nothing_is_touched(target: Target, tmp_path: Path) -> None:
    distill(target, asked(BEFORE), options(tmp_path / "o"))
    before = files(tmp_path / "o")
    with pytest.raises(ValueError, match="expected some of the 10 prompts .*, got 2 others; use"):
        distill(target, asked(["who?", "why?"]), options(tmp_path / "o"))
    assert files(tmp_path / "o") == before


# ---------------------------------------------------------------- records that are no text


@pytest.mark.parametrize(
    "record",
    [
        {"text": "a\ud83d"},
        {"prompt": "\udc00"},
        {"messages": [{"role": "system", "content": "\ud83d"}, {"role": "user", "content": "a"}]},
        {"system": "\ud83d", "prompt": "a"},
    ],
)
def test_half_a_character_is_refused_with_its_line(
    shared_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record: dict[str, Any],
) -> None:
    shared_target.model.save_pretrained(tmp_path / "t")
    shared_target.tokenizer.save_pretrained(tmp_path / "t")
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "whole \U0001f600"}) + "\n" + json.dumps(record) + "\n")
    words = ["--target", tmp_path / "t", "--prompts", path, "--out", tmp_path / "o"]
    monkeypatch.setattr(sys, "argv", ["draftheads", "distill", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    [line] = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and "p.jsonl line 2: expected text in Unicode, got" in line
    assert "fix or remove the record" in line and not (tmp_path / "o").exists()


def test_half_a_character_in_an_answer_is_refused_with_its_line(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\udfff"}]
    (tmp_path / "p.json").write_text(json.dumps([{"messages": turns}]))
    with pytest.raises(ValueError, match="expected text in Unicode, got .*surrogates not allowed"):
        read_conversations(tmp_path / "p.json")
    assert len(read_prompts(tmp_path / "p.json")) == 1  # which leaves the answer out


# ---------------------------------------------------------------- one launch at a time


def test_second_launch_into_a_folder_is_refused(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "o"
    distill(target, prompts(4), options(tmp_path / "whole"))
    out.mkdir()
    calls = on_call(target, lambda call, rows: None)
    with (
        Journal(out, 0, 1),
        pytest.raises(ValueError, match="o: expected to be the only launch .*; wait for"),
    ):
        distill(target, prompts(4), options(out))
    assert not calls and not (out / MANIFEST).exists()
    assert distill(target, prompts(4), options(out)).complete
    assert records(out) == records(tmp_path / "whole")


def test_full_disk_leaves_no_half_written_manifest(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    distill(target, prompts(4), options(tmp_path / "o"))
    before = files(tmp_path / "o")
    with monkeypatch.context() as patch:
        patch.setattr(files_module.os, "replace", full)
        with pytest.raises(OSError, match="No space left on device"):
            distill(target, prompts(5), options(tmp_path / "o"))
    empty = {"answers-00000-of-00001.jsonl": b""}
    assert files(tmp_path / "o") == before | empty
    distill(target, prompts(5), options(tmp_path / "o"))
    assert len(records(tmp_path / "o")) == 5


# ---------------------------------------------------------------- several processes


WORDS = ["distill", "--target", "t", "--prompts", "p.jsonl", "--out", "o"]
WORDS += ["--max-new-tokens", "12", "--temperature", "1.0", "--batch-size"]


def ask_in(folder: Path, target: Target, texts: Texts) -> None:
    """Write what `WORDS` name into a folder."""
    target.model.save_pretrained(folder / "t")
    target.tokenizer.save_pretrained(folder / "t")
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "p.jsonl").write_text("".join(lines))


def distill_in_a_fork(folder: Path, rank: int, port: int, batch_size: int) -> None:
    os.chdir(folder)
    become_one_of_a_launch(place(rank, port) | CPU, folder / f"output-{rank}")
    sys.argv = ["draftheads", *WORDS, str(batch_size)]
    cli.main()


def two_forks(folder: Path, batch_size: int) -> list[ForkProcess]:
    port = free_port()
    return [fork(distill_in_a_fork, folder, rank, port, batch_size) for rank in range(2)]


@pytest.mark.slow
def test_two_processes_divide_the_work_and_one_reports(target: Target, tmp_path: Path) -> None:
    ask_in(tmp_path, target, BEFORE)
    for process in two_forks(tmp_path, 4):
        process.join(timeout=120)
        assert process.exitcode == 0
    said = "".join((tmp_path / f"output-{rank}").read_text() for rank in (0, 1))
    assert said.count(f"{len(BEFORE)} prompts = {len(BEFORE)} done") == 1
    assert said.count("next: draftheads init") == 1
    distill(target, asked(BEFORE), options(tmp_path / "whole"))
    assert records(tmp_path / "o") == records(tmp_path / "whole")
    assert read_manifest(tmp_path / "o").complete
    assert files(tmp_path / "o").keys() == files(tmp_path / "whole").keys()


def test_the_last_process_reports(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with Journal(tmp_path / "o", 1, 2):
        report = distill(target, asked(BEFORE), options(tmp_path / "o"))
    assert report.others == 1 and "1 still answer theirs; the last one reports" in str(report)
    assert not report.complete and "prompts =" not in str(report)
    monkeypatch.setenv("RANK", "1")
    report = distill(target, asked(BEFORE), options(tmp_path / "o"))
    assert report.complete and "10 prompts = 10 done" in str(report)


@pytest.mark.slow
def test_launcher_that_starts_one_process_is_refused(target: Target, tmp_path: Path) -> None:
    ask_in(tmp_path, target, BEFORE)
    launcher = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "draftheads.scripts.cli", *WORDS, "4"],
        **{"cwd": tmp_path, "env": launch_environment(cpu=True), "timeout": 300},
        capture_output=True,
        text=True,
    )
    assert done.returncode and "Traceback" not in done.stderr.split("error:")[0]
    assert "accelerate launch started only one of the --num_processes" in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_is_not_waited_for(
    shared_target: Target, tmp_path: Path, killed: int
) -> None:
    """Without torchrun nobody ends the others: the one that is left answers its share and says what
    is missing, and the next launch has all answers.
    """
    texts = [f"question {n}" for n in range(400)]
    ask_in(tmp_path, shared_target, texts)
    processes = two_forks(tmp_path, 1)
    try:
        journal = tmp_path / "o" / f"answers-0000{killed}-of-00002.jsonl"
        while not (journal.is_file() and journal.stat().st_size):
            assert processes[killed].is_alive()
            time.sleep(0.01)
        processes[killed].kill()
        processes[1 - killed].join(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.join()
    said = (tmp_path / f"output-{1 - killed}").read_text()
    assert processes[1 - killed].exitcode == 0
    assert "400 prompts = " in said and "not answered yet" in said
    assert "next: draftheads init" not in said
    chosen = options(tmp_path / "o", batch_size=8)
    report = distill(shared_target, asked(texts), chosen)
    assert report.complete and report.counts.done == 400
