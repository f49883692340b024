"""Does a command that is killed again and again come to the same files as one that is left alone?

    python scripts/checks/kill_test.py --kills 50 --compare 'step-*/model.safetensors' \
        --compare 'step-*/trainer/*.safetensors' -- \
        python train/medusa.py recipes/demo-medusa.yaml run.output={out} run.save_every=5

The command is run once to its end with {out} a fresh folder, then in another one it is started over
and over and killed (SIGKILL) at random moments; after the last kill it may end. Moments are drawn
from the time that a launch may take, a part of them from before its first sign of work. With
several processes, either all are killed, or one of them at random.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shlex
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from draftheads.train.entry import mistakes_in_one_line

EARLY = 0.2
"""Share of kills that may come before the first sign of work."""


@dataclass
class Options:
    """command: with {out}. compare: patterns of files that must come out the same, under {out}.
    sign: what the command prints when its work begins. span: seconds after it in which it is
    killed. work: where folders are made.
    """

    command: list[str]
    compare: list[str]
    kills: int
    sign: str
    span: float
    seed: int
    work: Path


@dataclass
class Report:
    """What happened to the killed run. early: kills before the first sign of work. single: kills of
    one process of several. ended: launches that came to their end before they were killed.
    """

    launches: int = 0
    early: int = 0
    single: int = 0
    ended: int = 0
    differing: list[str] = field(default_factory=list)


class Launch:
    """A command, its output read as it comes."""

    def __init__(self, command: list[str], out: Path, sign: str) -> None:
        words = [word.replace("{out}", str(out)) for word in command]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.said = b""
        self.working = threading.Event()
        self._sign = sign.encode()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def end(self) -> int:
        """Wait for it; its exit code."""
        code = self.process.wait()
        self._reader.join()
        return code

    def kill(self, one: psutil.Process | None = None) -> None:
        """SIGKILL one process; then, when its launcher is done about it, all that are left."""
        everyone = [*self.workers(), psutil.Process(self.process.pid)]
        if one is not None:
            _kill([one])
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=20)
        _kill(everyone)
        self.end()

    def workers(self) -> list[psutil.Process]:
        """What the command has started in turn."""
        started: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return started

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            while block := os.read(output.fileno(), 1 << 16):
                self.said = (self.said + block)[-(1 << 16) :]
                if self._sign in self.said:
                    self.working.set()


def kill_test(options: Options) -> Report:
    """Run, kill, compare. Raises ValueError when the command fails by itself."""
    draw, report = random.Random(options.seed), Report()
    alone, killed = options.work / "alone", options.work / "killed"
    for folder in (alone, killed):
        shutil.rmtree(folder, ignore_errors=True)
    options.work.mkdir(parents=True, exist_ok=True)
    startup = _to_the_end(options, alone)
    for number in range(options.kills):
        launch = Launch(options.command, killed, options.sign)
        report.launches += 1
        early = draw.random() < EARLY
        if early:
            time.sleep(draw.uniform(0, startup))
        else:
            _wait(launch)
            time.sleep(draw.uniform(0, options.span))
        if launch.process.poll() is not None:
            report.ended += 1
            _check(launch)
            continue
        early = not launch.working.is_set()
        workers = launch.workers()
        single = bool(workers) and draw.random() < 0.5
        launch.kill(draw.choice(workers) if single else None)
        report.early += early
        report.single += single
        moment = "before its work" if early else "at work"
        print(f"kill {number + 1} of {options.kills}: {moment}{', one process' * single}")
    _to_the_end(options, killed)
    report.launches += 1
    report.differing = compare(alone, killed, options.compare)
    return report


def compare(left: Path, right: Path, patterns: list[str]) -> list[str]:
    """Names of files under both folders that differ or are missing in one. Raises ValueError when
    a pattern finds nothing.
    """
    names = {
        pattern: {path.relative_to(side) for side in (left, right) for path in side.glob(pattern)}
        for pattern in patterns
    }
    if empty := [pattern for pattern, found in names.items() if not found]:
        raise ValueError(f"expected files like {empty[0]} in {left}, found none; check --compare")
    every = sorted(set().union(*names.values()))
    return [str(name) for name in every if _digest(left / name) != _digest(right / name)]


def _to_the_end(options: Options, out: Path) -> float:
    """Run the command; seconds to its first sign of work."""
    started = time.monotonic()
    launch = Launch(options.command, out, options.sign)
    _wait(launch)
    startup = time.monotonic() - started
    launch.end()
    _check(launch)
    if not launch.working.is_set():
        raise ValueError(f"expected the command to print {options.sign!r}, it did not; give --sign")
    return startup


def _wait(launch: Launch) -> None:
    while not launch.working.wait(0.02) and launch.process.poll() is None:
        pass


def _check(launch: Launch) -> None:
    code = launch.end()
    if code:
        last = launch.said.decode(errors="replace").strip().splitlines()[-8:]
        raise ValueError(f"the command ended by itself with exit code {code}: {' | '.join(last)}")


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def main() -> int:
    """0 when all files are the same, 1 when they are not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--compare", action="append", required=True, help="glob under {out}")
    parser.add_argument("--sign", default="train:", help="what is printed when work begins")
    parser.add_argument("--span", type=float, default=3.0, help="seconds of work per launch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("out/kill-test"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = vars(parser.parse_args())
    arguments["command"] = [word for word in arguments["command"] if word != "--"]
    options = Options(**arguments)
    with mistakes_in_one_line():
        report = kill_test(options)
    print(
        f"{options.kills} kills in {report.launches} launches of `{shlex.join(options.command)}`: "
        f"{report.early} before work began, {report.single} of one process alone, "
        f"{report.ended} launches ended before their kill; "
        f"{'files differ: ' + ', '.join(report.differing) if report.differing else 'same files'}"
    )
    return 1 if report.differing else 0


if __name__ == "__main__":
    sys.exit(main())
