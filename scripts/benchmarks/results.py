"""Write the results table of docs/results.md from the report of `bench --json`.

    draftheads demo --out out/demo && cp out/demo/bench.json docs/results.json
    python scripts/benchmarks/results.py docs/results.json docs/results.md

Each file has a place for the table, between two HTML comments.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from draftheads.heads.files import write_text

PLACE = r"(<!-- {0}:[^>]*-->\n).*?(<!-- end of {0} -->)"
TITLES = ("heads", "draft nodes", "τ", "speedup", "95 % interval", "equal to `generate`")


def table(report: dict[str, Any]) -> str:
    """One row per head and tree, then what it was measured on."""
    lines = ["| " + " | ".join(TITLES) + " |", "|" + " --- |" * len(TITLES)]
    for row in report["heads"]:
        low, high = row["speedup_ci95"]
        cells = (
            row["name"].partition("@")[0],
            str(row["nodes"]),
            f"{row['tokens_per_step']:.2f}",
            f"{row['speedup']:.2f}",
            f"{low:.2f} to {high:.2f}",
            "yes" if row["lossless"] else "no",
        )
        lines.append("| " + " | ".join(cells) + " |")
    machine, prompts = report["machine"], report["settings"]["prompts"]
    threads = machine["torch_threads"]
    measured = (
        f"The demo target, {prompts} questions, greedy, {machine['dtype']}; {machine['cpu']}, "
        f"{threads} {'thread' if threads == 1 else 'threads'}, torch {machine['torch']}, "
        f"{machine['date'][:10]} (`draftheads demo`)."
    )
    return "\n".join(lines) + f"\n\n{measured}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("pages", type=Path, nargs="+")
    chosen = parser.parse_args()
    made = table(json.loads(chosen.report.read_text()))
    for page in chosen.pages:
        write_table(page, "results", made)


def write_table(page: Path, name: str, table: str) -> None:
    """Put a table where the page says that the one of this name stands."""
    place = re.compile(PLACE.format(name), re.DOTALL)
    text, places = place.subn(lambda match: match[1] + table + match[2], page.read_text())
    if not places:
        raise SystemExit(f"{page}: expected a line <!-- {name}: ... -->, found none")
    write_text(page, text)


if __name__ == "__main__":
    main()
