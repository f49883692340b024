"""The promise: nothing that interrupts or divides the work, or becomes of prompts and files,
changes a single byte of the answers, and no prompt is asked twice.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
from launching import CPU, become_one_of_a_launch, fork, free_port, place
from local_server import HANG, Fault, Json, LocalServer
from tiny_chat import (
    CONTEXT,
    END,
    EOS,
    TEMPLATE,
    files,
    llama,
    on_call,
    options,
    prompts,
    records,
    saved,
    shuffled,
)
from tokenizers import processors

from draftheads.heads.target.model import Target
from draftheads.infer.remote import ServerError, ServerOptions
from draftheads.scripts import cli
from draftheads.train.data import answers, shards
from draftheads.train.data import distill as distill_module
from draftheads.train.data.answers import (
    MANIFEST,
    Journal,
    check,
    count,
    read_answers,
    read_ids,
    read_manifest,
)
from draftheads.train.data.distill import DistillReport, _identify, distill
from draftheads.train.data.prompts import Prompt
from draftheads.train.data.server import ServedTarget

Prompts = list[Prompt]
BEFORE = prompts(10, turns=2)


@pytest.fixture(autouse=True)
def several_shards(monkeypatch):
    monkeypatch.setattr(answers, "SHARD_TOKENS", 250)


# ---------------------------------------------------------------- who answers


class Here:
    """The target in this process. asked: turns so far; stop: called before more is asked."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.asked = 0
        self.stop: Callable[[int], object] = lambda asked: None
        on_call(target, self._ask)

    def _ask(self, call: int, rows: int) -> None:
        self.stop(self.asked)
        self.asked += rows

    def interrupt(self, at: int) -> None:
        """Press Ctrl-C when so many turns more are asked."""
        end = self.asked + at

        def stop(asked: int) -> None:
            if asked >= end:
                raise KeyboardInterrupt

        self.stop = stop


class There:
    """The same, of a server."""

    def __init__(self, folder: Path, server: LocalServer) -> None:
        chosen = ServerOptions(urls=[server.url], pause=0.01, tries=1, concurrency=1)
        self.target = ServedTarget(str(folder), chosen)
        self.server = server
        self.faults = 0
        self.stop: Callable[[int], object] = lambda asked: None
        server.fault = self._fault

    def _fault(self, number: int, request: Json) -> Fault | None:
        fault = self.stop(self.asked - 1)
        self.faults += fault is not None
        return fault

    @property
    def asked(self) -> int:
        return len(self.server.asked) - self.faults

    def interrupt(self, at: int) -> None:
        end = self.asked + at

        def stop(asked: int) -> int | None:
            if asked < end:
                return None
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return HANG

        self.stop = stop


Source = Here | There
Run = Callable[..., DistillReport]


@pytest.fixture
def source(request):
    """By name."""

    def found(name: str) -> Source:
        if name == "here":
            return Here(request.getfixturevalue("target"))
        start = request.getfixturevalue("start")
        return There(request.getfixturevalue("one_end"), start())

    return found


# ---------------------------------------------------------------- what happens


def to_the_end(source: Source, run: Run, out: Path, patch: pytest.MonkeyPatch) -> None:
    assert run().complete


def at_once(source: Source, run: Run, out: Path, patch: pytest.MonkeyPatch) -> None:
    source.interrupt(0)
    with pytest.raises(KeyboardInterrupt):
        run()


def later(source: Source, run: Run, out: Path, patch: pytest.MonkeyPatch) -> None:
    source.interrupt(7)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not read_manifest(out).complete


def killed(share: float) -> Callable[..., None]:
    """While it writes; this share of the lines is on the disk."""

    def kill(source: Source, run: Run, out: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(distill_module, "finish", count)
        run()
        [journal] = out.glob("answers-*.jsonl")
        content = journal.read_bytes()
        journal.write_bytes(content[: int(share * len(content))])

    return kill


def full_at(holder: Any, name: str, after: int) -> Callable[..., None]:
    """The disk has room for so many writes more."""

    def full(source: Source, run: Run, out: Path, patch: pytest.MonkeyPatch) -> None:
        original, left = getattr(holder, name), iter(range(after))

        def write(*arguments: Any) -> Any:
            if next(left, None) is None:
                raise OSError(28, "No space left on device")
            return original(*arguments)

        patch.setattr(holder, name, write)
        with pytest.raises(OSError, match="No space left on device"):
            run()

    return full


def one_of_two(source: Source, run: Run, out: Path, patch: pytest.MonkeyPatch) -> None:
    """The second process answers its share and is killed in its last line; no first one comes."""
    patch.setenv("WORLD_SIZE", "2")
    patch.setenv("RANK", "1")
    assert not run().complete
    journal = out / "answers-00001-of-00002.jsonl"
    journal.write_bytes(journal.read_bytes()[:-30])


def two(source: Source, run: Run, out: Path, patch: pytest.MonkeyPatch) -> None:
    """One after the other."""
    patch.setenv("WORLD_SIZE", "2")
    for rank, complete in ((1, False), (0, True)):
        patch.setenv("RANK", str(rank))
        assert run().complete is complete is read_manifest(out).complete


def failing(source: There, run: Run, out: Path, patch: pytest.MonkeyPatch) -> None:
    """For all that is asked from some turn on; each is asked once."""
    first = source.asked
    source.stop = lambda asked: 500 if asked >= first + 5 else None
    assert not run().complete


def denying(source: There, run: Run, out: Path, patch: pytest.MonkeyPatch) -> None:
    first = source.asked
    source.stop = lambda asked: 401 if asked >= first + 5 else None
    with pytest.raises(ServerError, match="HTTP 401.* again to resume"):
        run()


def failing_at_times(source: There, run: Run, out: Path, patch: pytest.MonkeyPatch) -> None:
    """Also on a second turn."""
    told = iter([None, None, None, 503, None, 503])
    source.stop = lambda asked: next(told, None)
    assert run().missing == 2


HAPPENS: dict[str, Callable[..., None]] = {
    "to the end": to_the_end,
    "Ctrl-C at once": at_once,
    "Ctrl-C later": later,
    "killed in the first line": killed(0.01),
    "killed in the middle": killed(0.5),
    "killed in the last line": killed(0.999),
    "no room for a file": full_at(os, "replace", 0),
    "no room for answers": full_at(Journal, "append", 3),
    "one of two": one_of_two,
    "two": two,
    "server fails": failing,
    "server denies": denying,
    "server fails at times": failing_at_times,
}


def with_numbers(becomes: Callable[[Prompts], Prompts]) -> Callable[[], Prompts]:
    return lambda: [replace(each, index=n) for n, each in enumerate(becomes(BEFORE))]


NEW, MENDED = Prompt(0, text="new"), Prompt(0, text="mended")
BECOMES: dict[str, Callable[[], Prompts]] = {
    "as they were": with_numbers(lambda old: old),
    "added at the end": with_numbers(lambda old: [*old, NEW]),
    "added in front": with_numbers(lambda old: [NEW, *old]),
    "mended": with_numbers(lambda old: [*old[:5], MENDED, *old[6:]]),
    "removed": with_numbers(lambda old: old[3:]),
    "moved": with_numbers(lambda old: old[::-1]),
    "fewer": with_numbers(lambda old: old[:4]),
    "repeated": with_numbers(lambda old: [*old, old[0], old[0]]),
    "all at once": with_numbers(lambda old: [NEW, *old[:4:-1], MENDED]),
}


DAMAGES: dict[str, Callable[[Path], object]] = {
    "shuffled": shuffled,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "deleted": Path.unlink,
}


def by_name(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of the prompts that were asked last, by id."""
    if not (folder / MANIFEST).is_file():
        return {}
    ids = read_ids(folder, read_manifest(folder))
    return {ids[record["id"]]: record | {"id": ids[record["id"]]} for record in records(folder)}


def without_address(folder: Path) -> dict[str, bytes]:
    """The files; a server may have moved."""
    found = files(folder)
    return found | {MANIFEST: re.sub(rb"http://[^/]+", b"", found[MANIFEST])}


@pytest.fixture
def whole(source, tmp_path):
    """What runs that nothing interrupts make: of BEFORE in a folder, and of each prompt by name."""

    def made(who: str) -> dict[str, Any]:
        if who not in WHOLE:
            target = source(who).target
            distill(target, BEFORE, options(tmp_path / "whole"))
            every = [*BEFORE, NEW, MENDED, BEFORE[0], BEFORE[0]]
            every = [replace(each, index=n) for n, each in enumerate(every)]
            distill(target, every, options(tmp_path / "every"))
            named = by_name(tmp_path / "every")
            WHOLE[who] = {"files": without_address(tmp_path / "whole"), "named": named}
        return WHOLE[who]

    return made


WHOLE: dict[str, dict[str, Any]] = {}
SERVED = ["Ctrl-C later", "killed in the middle", *(x for x in HAPPENS if x.startswith("server"))]
WAYS = [("here", name) for name in HAPPENS if not name.startswith("server")]
WAYS += [("there", name) for name in SERVED]
"""Who answers, and what happens first."""


def some_changes(number: int) -> list[str]:
    """What becomes of the prompts then: all in turn, three for each way."""
    return [[*BECOMES][(3 * number + step) % len(BECOMES)] for step in range(3)]


@pytest.mark.mend(
    "a run killed in its first line refused its own prompts as others when one was added"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "changes"),
    [
        *((way, some_changes(number)) for number, way in enumerate(WAYS)),
        *(pytest.param(way, BECOMES, marks=pytest.mark.thorough) for way in WAYS),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, tuple) else f"{len(value)} changes",
)
def test_whatever_happens_the_answers_are_those_of_runs_that_nothing_happened_to(
    source, whole, tmp_path, way, changes, caplog
):
    who, happens = way
    expected, asked, out = whole(who), source(who), tmp_path / "o"

    def run(wanted: Prompts = BEFORE, folder: Path = out, size: int = 4) -> DistillReport:
        return distill(asked.target, wanted, options(folder, batch_size=size))

    def finish(wanted: Prompts, folder: Path, known: set[str], size: int = 4) -> set[str]:
        """Ask for the rest alone; returns the names that are answered then."""
        before, ids = asked.asked, _identify(wanted)[0]
        if known and known.isdisjoint(ids):
            kept = files(folder)
            with pytest.raises(ValueError, match=f"of the 10 prompts .*, got {len(wanted)} others"):
                run(wanted, folder)
            assert files(folder) == kept
            return known
        report = run(wanted, folder, size)
        assert report.complete and report.prompts == report.counts.done == len(wanted)
        found = by_name(folder)
        assert found == {name: expected["named"][name] for name in ids}
        assert asked.asked - before == sum(found[name]["turns"] for name in {*ids} - known)
        tokens = [answer.tokens for answer in read_answers(folder)]
        assert tokens == [found[name]["tokens"] for name in ids]
        return known | {*ids}

    with pytest.MonkeyPatch.context() as patch:
        HAPPENS[happens](asked, run, out, patch)
    asked.stop = lambda asked: None
    known = by_name(out)
    if happens.startswith("Ctrl-C"):
        assert "run the same command again to resume" in caplog.text
        caplog.clear()
        assert len(list(read_answers(out))) == len(known)
        assert f"{len(known)} of 10 prompts" in caplog.text
    assert known == {name: expected["named"][name] for name in known}
    for number, becomes in enumerate(changes):
        folder = tmp_path / f"{number}"
        if out.is_dir():
            shutil.copytree(out, folder)
        answered = finish(BECOMES[becomes](), folder, {*known}, size=3)
        finish(BEFORE, folder, answered)  # what was removed comes back
    finish(BEFORE, out, {*known})
    assert without_address(out) == expected["files"]


# ---------------------------------------------------------------- files that are damaged


@pytest.mark.mend("damaged answers are answered again")
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_prompts_of_a_damaged_shard_are_answered_again(target, tmp_path, caplog, damage):
    here, out = Here(target), tmp_path / "o"
    distill(target, BEFORE, options(out))
    whole = files(out)
    path = sorted(out.glob("answers-*.arrow"))[1]
    held = sum(row["turns"] for row in shards.read_batch(path).to_pylist())
    DAMAGES[damage](path)
    damaged = path.read_bytes() if path.is_file() else None
    before = here.asked
    with caplog.at_level(logging.WARNING):
        assert distill(target, BEFORE, options(out)).complete
    assert here.asked - before == held and check(out).done == len(BEFORE)
    left = files(out)
    if damaged is not None:
        assert left.pop(f"{path.name}.damaged") == damaged, "a person may still want it"
        assert "set aside, its prompts are answered again" in caplog.text
    assert left == whole
    assert distill(target, BEFORE, options(out)).complete and here.asked - before == held


def test_damage_is_found_before_prompts_are_added(target, tmp_path):
    distill(target, prompts(5), options(tmp_path / "o"))
    shuffled(next((tmp_path / "o").glob("answers-*.arrow")))
    distill(target, prompts(8), options(tmp_path / "o"))
    distill(target, prompts(8), options(tmp_path / "whole"))
    assert list(read_answers(tmp_path / "o")) == list(read_answers(tmp_path / "whole"))


def test_a_damaged_line_is_refused_and_a_lost_one_answered_again(target, tmp_path, monkeypatch):
    out = tmp_path / "o"
    with monkeypatch.context() as patch:
        patch.setattr(distill_module, "finish", count)
        distill(target, BEFORE, options(out))
    [journal] = out.glob("answers-*.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"\0\0\n", *lines[3:]]))
    with pytest.raises(ValueError, match=r"line 3: expected an answer as JSON, got .*delete this"):
        list(read_answers(out))
    journal.write_bytes(b"".join([lines[0], *lines[2:]]))
    distill(target, BEFORE, options(out))
    distill(target, BEFORE, options(tmp_path / "whole"))
    assert files(out) == files(tmp_path / "whole")


# ---------------------------------------------------------------- what is not ours


@pytest.mark.mend("distill --out in a folder with a README")
@pytest.mark.mend("an edited data card")
def test_what_is_not_ours_is_kept(target, tmp_path):
    """Files that were there, and a card that was edited."""
    mine = {
        "README.md": b"# My project\n\xff",
        "part-of-mine.arrow": b"mine",
        "answers-to-life-of-all.jsonl": b"42\n",
    }
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    assert distill(target, prompts(3), options(tmp_path)).complete
    assert files(tmp_path) | mine == files(tmp_path)
    path = tmp_path / "o" / "README.md"
    distill(target, prompts(3), options(tmp_path / "o"))
    card = path.read_text()
    assert "data_files: answers-*.arrow" in card and "# Answers of" in card
    edited = card.replace("tags:", "license: cc0-1.0\ntags:") + "\nAsk me.\n"
    path.write_text(edited)
    distill(target, prompts(5), options(tmp_path / "o"))
    assert path.read_text() == edited


# ---------------------------------------------------------------- what is refused


@pytest.mark.mend("one folder of answers has one template and tokenizer")
def test_other_options_are_refused_naming_each_difference(target, tmp_path):
    """Also for other prompts: one folder used to get the texts of two templates."""
    out = tmp_path / "o"
    distill(target, prompts(3), options(out))
    before = files(out)

    def assert_refused(complaint: str, other: Target = target, **changes: Any) -> None:
        for number in (3, 4):
            with pytest.raises(ValueError, match=f"{complaint}.*Use another --out, or the same"):
                distill(other, prompts(number), options(out, **changes))
        assert files(out) == before

    def around(eos: tuple[int, ...] = EOS) -> Any:
        """The same weights, with something else around them."""
        other = llama(eos=eos)
        return other, other.tokenizer

    assert_refused("seed: .* 0, got 1; top_k: expected 0, got 2", seed=1, top_k=2)
    assert_refused("temperature: expected 1.0, got 0.5", temperature=0.5)
    assert_refused(r"template_args: expected \{\}, got \{'a': 1\}", template_args={"a": 1})
    assert_refused("end tokens: expected '.*', got '.*", around((*EOS, 5))[0])
    other, tokenizer = around()
    tokenizer.chat_template = TEMPLATE.replace("user", "User").replace("\n", " ")
    assert_refused("chat template: expected '.*', got '.*", other)
    other, tokenizer = around()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert_refused("chat template: expected '.*', got '.*", other)
    other, tokenizer = around()
    tokenizer.add_tokens(["question"])
    assert_refused("tokenizer: expected '.*', got '.*", other)
    other, tokenizer = around()
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.backend_tokenizer.post_processor = begin
    assert_refused("tokenizer: expected '.*', got '.*", other)
    other, _ = around()
    other.model.get_input_embeddings().weight.data.add_(1.0)
    assert_refused("target fingerprint: expected '", other)


def test_other_source_of_answers_is_refused(one_end, start, tmp_path):
    def served(server: LocalServer) -> ServedTarget:
        return ServedTarget(str(one_end), ServerOptions(urls=[server.url], pause=0.01))

    local, moved = llama(eos=(END,)), start()
    distill(served(start()), prompts(3), options(tmp_path / "o"))
    with pytest.raises(ValueError, match=r"from: expected 'a server with model tiny.*'this proc"):
        distill(local, prompts(3), options(tmp_path / "o"))
    distill(served(moved), prompts(3), options(tmp_path / "o"))  # at another address
    assert moved.asked == []
    other = start(models=({"id": "huge", "max_model_len": CONTEXT},))
    with pytest.raises(ValueError, match=r"model tiny.*got 'a server with model huge"):
        distill(served(other), prompts(3), options(tmp_path / "o"))
    distill(local, prompts(3), options(tmp_path / "p"))
    with pytest.raises(ValueError, match=r"expected 'this process', got 'a server with model tiny"):
        distill(served(moved), prompts(3), options(tmp_path / "p"))


@pytest.mark.mend("--temperature 1e-40")
@pytest.mark.mend("distill --out wrote its manifest beside another toolkit's data")
def test_folders_and_choices_that_cannot_be_used_are_refused_before_generation(target, tmp_path):
    calls = on_call(target, lambda call, rows: None)
    (tmp_path / "file").touch()
    bare = Target(target.model, None, name="bare")
    for other, asked, folder, complaint in (
        (target, BEFORE, "file/o", "Not a directory.*file/o"),
        (bare, BEFORE, "o", "bare: expected a tokenizer next to the model, found"),
        (target, [], "o", "prompts: expected at least one, got none"),
    ):
        with pytest.raises((ValueError, OSError), match=complaint):
            distill(other, asked, options(tmp_path / folder))
    for temperature in (1e-40, 1e-6, float("inf"), float("nan"), -0.1, -1):
        with pytest.raises(ValueError, match="temperature"):
            options(tmp_path / "o", temperature=temperature)
    assert not calls and [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["", " "])
def test_out_without_a_name_is_refused(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    code, _, [line] = run("distill", "--target", "t", "--prompts", "p", "--out", name)
    assert code == 2 and "--out: expected a value, got an empty one" in line
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- several processes


def test_equal_prompts_are_drawn_apart(target, tmp_path):
    distill(target, [Prompt(n, text="the same") for n in range(6)], options(tmp_path / "o"))
    drawn = [record["tokens"] for record in records(tmp_path / "o")]
    assert len(drawn) == 6 and len({tuple(tokens) for tokens in drawn}) > 3


def test_second_launch_into_a_folder_is_refused(target, tmp_path):
    out = tmp_path / "o"
    out.mkdir()
    calls = on_call(target, lambda call, rows: None)
    with (
        Journal(out, 0, 1),
        pytest.raises(ValueError, match="o: expected to be the only launch .*; wait for"),
    ):
        distill(target, prompts(4), options(out))
    assert not calls and not (out / MANIFEST).exists()
    assert distill(target, prompts(4), options(out)).complete


def test_the_last_process_reports(target, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with Journal(tmp_path / "o", 1, 2):
        report = distill(target, BEFORE, options(tmp_path / "o"))
    assert report.others == 1 and "1 still answer theirs; the last one reports" in str(report)
    assert not report.complete and "prompts =" not in str(report)
    monkeypatch.setenv("RANK", "1")
    report = distill(target, BEFORE, options(tmp_path / "o"))
    assert report.complete and "10 prompts = 10 done" in str(report)


WORDS = ["distill", "--target", "t", "--prompts", "p.jsonl", "--out", "o"]
WORDS += ["--max-new-tokens", "12", "--temperature", "1.0", "--batch-size"]


def ask_in(folder: Path, target: Target, count: int) -> Prompts:
    """Write what `WORDS` name into a folder."""
    saved(target, folder / "t")
    asked = [Prompt(n, text=f"question {n}") for n in range(count)]
    lines = [json.dumps({"text": prompt.text}) + "\n" for prompt in asked]
    (folder / "p.jsonl").write_text("".join(lines))
    return asked


def distill_in_a_fork(folder: Path, told: dict[str, str], output: str, *words: str) -> None:
    os.chdir(folder)
    become_one_of_a_launch(told, folder / output)
    sys.argv = ["draftheads", *WORDS, *words]
    cli.main()


def two_forks(folder: Path, batch_size: int) -> list[ForkProcess]:
    port = free_port()
    told = [place(rank, port) | CPU for rank in range(2)]
    return [
        fork(distill_in_a_fork, folder, told[rank], f"output-{rank}", str(batch_size))
        for rank in range(2)
    ]


@pytest.mark.mend("summaries of several processes that contradict")
@pytest.mark.slow
def test_two_processes_divide_the_work_and_one_reports(target, tmp_path):
    asked = ask_in(tmp_path, target, 10)
    for process in two_forks(tmp_path, 4):
        process.join(timeout=120)
        assert process.exitcode == 0
    said = "".join((tmp_path / f"output-{rank}").read_text() for rank in (0, 1))
    assert said.count("10 prompts = 10 done") == 1
    assert said.count("next: draftheads init") == 1
    distill(target, asked, options(tmp_path / "whole"))
    assert records(tmp_path / "o") == records(tmp_path / "whole")
    assert read_manifest(tmp_path / "o").complete
    assert files(tmp_path / "o").keys() == files(tmp_path / "whole").keys()


def test_a_launcher_that_starts_one_process_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    ask_in(tmp_path, llama(), 1)
    code, _, [line] = run(*WORDS, "4")
    assert code == 2 and "accelerate launch started only one of the --num_processes" in line
    assert not (tmp_path / "o").exists()


@pytest.mark.mend("distilling processes, one killed")
@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_process_that_is_killed_is_not_waited_for(target, tmp_path, killed):
    """Without torchrun nobody ends the others: the one that is left answers its share and says what
    is missing, and the next launch has all answers.
    """
    asked = ask_in(tmp_path, target, 200)
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
    assert "200 prompts = " in said and "not answered yet" in said
    assert "next: draftheads init" not in said
    report = distill(target, asked, options(tmp_path / "o", batch_size=8))
    assert report.complete and report.counts.done == 200
