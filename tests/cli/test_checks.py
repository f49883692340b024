"""The promise: the script that kills commands notices one that does not survive it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftheads.scripts.checks.kill_test import Options, compare, kill_test

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


def killed(tmp_path: Path, script: str):
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path), "{out}"]
    return kill_test(Options(command, ["lines"], 4, "work:", 0.3, 0, tmp_path / "work"))


@pytest.mark.slow
@pytest.mark.parametrize(("script", "differing"), [(SURVIVES, []), (FORGETS, ["lines"])])
def test_a_command_that_starts_over_is_found_out(tmp_path, script, differing):
    report = killed(tmp_path, script)
    assert (report.differing, report.launches) == (differing, 5)
    assert report.ended < 4, "some launches were killed"


def test_what_cannot_be_compared_is_told(tmp_path):
    for side in ("left", "right"):
        (tmp_path / side).mkdir()
    (tmp_path / "left" / "a").write_text("x")
    assert compare(tmp_path / "left", tmp_path / "right", ["*"]) == ["a"], "it is missing there"
    with pytest.raises(ValueError, match="expected files like b"):
        compare(tmp_path / "left", tmp_path / "right", ["b"])
    with pytest.raises(ValueError, match="ended by itself with exit code 3: no"):
        killed(tmp_path, "print('no'); raise SystemExit(3)")
