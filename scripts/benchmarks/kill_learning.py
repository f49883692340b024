"""Is a server that learns whole after each of many kills? Nothing that it answered may be lost.

    python scripts/benchmarks/kill_learning.py --head out/use/head --out out/kills --kills 30

The head is that of learning_from_use.py, which has not seen the topic of these questions. `serve
--learn` is started, asked, and killed (SIGKILL) while it answers, stores, trains or swaps; then
again. After each start the head must load and the answers be those of the first start. At the end
every answer that came back must be in the store.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub.utils import httpx
from learning_from_use import questions_of
from transformers import AutoTokenizer

from draftheads.train.learn.texts import Texts
from draftheads.train.learn.versions import Versions

RECIPES = Path(str(files("draftheads.recipes")))
PORT = 8765
NEW_TOKENS = 96


class Server:
    """`serve --learn` as a process."""

    def __init__(self, options: argparse.Namespace) -> None:
        command = ["serve", "--head", options.head, "--learn", "--port", str(PORT)]
        command += ["--learn-folder", str(options.out), "--learn-mb", str(options.mb)]
        log = (options.out / "server.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "draftheads.scripts.cli", *command], stdout=log, stderr=log
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60)
        for _ in range(600):
            try:
                self.client.get("/health")
                return
            except httpx.TransportError:
                if self.process.poll() is not None:
                    raise SystemExit(f"the server ended; see {log.name}") from None
                time.sleep(0.1)

    def ask(self, question: str) -> str:
        """The answer."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
        body |= {"model": "demo-target", "max_tokens": NEW_TOKENS, "temperature": 0}
        text: str = self.client.post("/v1/chat/completions", json=body).json()["choices"][0][
            "message"
        ]["content"]
        return text

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--head", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--questions", type=int, default=12, help="between two kills, at most")
    parser.add_argument("--seconds", type=float, default=12, help="until a kill, at most")
    parser.add_argument("--mb", type=float, default=2.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    questions = questions_of(RECIPES / "demo-prompts.jsonl")["files"]
    chance = random.Random(0)
    expected: dict[str, str] = {}
    wrong = asked = 0
    for _ in range(options.kills + 1):
        server = Server(options)
        for _ in range(chance.randint(1, options.questions)):
            question = chance.choice(questions)
            answer = server.ask(question)
            wrong += answer != expected.setdefault(question, answer)
            asked += 1
        time.sleep(chance.uniform(0, options.seconds))  # trains and swaps meanwhile
        server.kill()
    [place] = [path for path in options.out.iterdir() if path.is_dir()]
    texts = Texts(place / "texts", most_bytes=int(options.mb * 1e6), keep_days=1)
    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "demo-target")
    stored = {
        tokenizer.decode(talk.tokens[start:stop], skip_special_tokens=True)
        for talk in texts.conversations
        for start, stop in talk.answers
    }
    lost = [question for question, answer in expected.items() if answer not in stored]
    versions = Versions(place / "heads")
    temporary = [path.name for path in place.rglob(".v*")]
    print(f"{options.kills} kills, {asked} answers, {wrong} that differ, {len(lost)} lost")
    print(
        f"{len(versions.state.points)} rounds, version {versions.state.newest}; {texts.size:,} "
        f"bytes of texts; left over: {temporary or 'nothing'}"
    )
    sys.exit(bool(wrong or lost))


if __name__ == "__main__":
    main()
