"""The promise: the tool that kills commands notices one that does not survive it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftheads.scripts.checks.kill_test import Options, compare, kill_test

pytestmark = pytest.mark.slow

SURVIVES = """
import sys, time
from pathlib import Path
out = Path(sys.argv[1]); out.mkdir(exist_ok=True); path = out / "lines"
done = path.read_text().count("\\n") if path.exists() else 0
print("work:", flush=True)
for number in range(done, 30):
    time.sleep(0.02)
    with path.open("a") as file:
        file.write(f"{number}\\n")
"""
FORGETS = SURVIVES.replace("range(done, 30)", "range(30)")


def options(tmp_path: Path, script: str, kills: int = 4) -> Options:
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path), "{out}"]
    return Options(command, ["lines"], kills, "work:", 0.3, 0, tmp_path / "work")


def test_a_command_that_survives_comes_to_the_same_files(tmp_path):
    report = kill_test(options(tmp_path, SURVIVES))
    assert report.differing == []
    assert report.launches == 5
    assert report.ended < 4, "some launches were killed"


def test_a_command_that_starts_over_is_found_out(tmp_path):
    assert kill_test(options(tmp_path, FORGETS)).differing == ["lines"]


def test_a_command_that_fails_by_itself_is_not_taken_for_killed(tmp_path):
    with pytest.raises(ValueError, match="ended by itself with exit code 3: no"):
        kill_test(options(tmp_path, "print('no'); raise SystemExit(3)"))


def test_files_missing_on_one_side_differ_and_patterns_must_find_some(tmp_path):
    for side in ("left", "right"):
        (tmp_path / side).mkdir()
    (tmp_path / "left" / "a").write_text("x")
    assert compare(tmp_path / "left", tmp_path / "right", ["*"]) == ["a"]
    with pytest.raises(ValueError, match="expected files like b"):
        compare(tmp_path / "left", tmp_path / "right", ["b"])
