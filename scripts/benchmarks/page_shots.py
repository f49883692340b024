"""Screenshots of the page of a running server: idle, streaming, answered, race, phone, dark.

draftheads serve --head out/demo/sequential --target recipes/demo-target --port 8000
python scripts/benchmarks/page_shots.py http://127.0.0.1:8000 shots
"""

from __future__ import annotations

import shutil
from pathlib import Path

import typer
from playwright.sync_api import Page, sync_playwright

QUESTION = "What does os.path.join do?"


def ask(page: Page, question: str, mode: str = "chat") -> None:
    """Send a question in a mode."""
    page.locator(f"[name=mode][value={mode}]").check(force=True)
    page.get_by_label("Message", exact=True).fill(question)
    page.keyboard.press("Enter")


def finished(page: Page) -> None:
    """Wait for the end of the answers."""
    page.locator("#log[aria-busy=false]").wait_for()


def main(url: str, folder: Path, chromium: str = "chromium") -> None:
    """Write PNG files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which(chromium))
        for name, size, scheme in [
            ("desktop", (1100, 760), "light"),
            ("dark", (1100, 760), "dark"),
            ("phone", (360, 740), "light"),
        ]:
            page = browser.new_page(
                viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
            )
            page.goto(url)
            page.locator("#model:not(:empty)").wait_for()
            page.screenshot(path=folder / f"{name}-idle.png")
            ask(page, QUESTION)
            page.locator("#steps").wait_for()
            page.screenshot(path=folder / f"{name}-streaming.png")
            finished(page)
            page.screenshot(path=folder / f"{name}-answered.png")
            ask(page, "What does json.dumps do?", "race")
            page.wait_for_timeout(250)
            page.screenshot(path=folder / f"{name}-racing.png")
            page.locator(".verdict").wait_for()
            page.screenshot(path=folder / f"{name}-race.png")
        browser.close()


if __name__ == "__main__":
    typer.run(main)
