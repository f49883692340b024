"""What HTTP costs: time to first token and tokens per second through the server and its client, and
of the engine alone, on the same prompts in turns, in one run.

    python scripts/benchmarks/serve_speed.py --head out/demo/sequential --target recipes/demo-target
"""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
import uvicorn
from typer import Option

from draftheads.heads.formats.hub import open_head
from draftheads.heads.target import Target
from draftheads.infer.engine import Speculator
from draftheads.infer.serve.app import create_app
from draftheads.infer.serve.gate import TimedProtocol
from draftheads.infer.serve.service import ServeOptions


@dataclass(frozen=True)
class Taken:
    """Seconds to the first token, from it to the last, and the number of tokens."""

    first: float
    rest: float
    tokens: int


def client(port: int, limit: int, pipe: Connection) -> None:
    """Answers prompts through the official client, in a process of its own."""
    from openai import OpenAI

    api = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    while (prompt := pipe.recv()) is not None:
        start, first, tokens = time.perf_counter(), 0.0, 0
        stream = api.completions.create(
            model="m",
            prompt=prompt,
            max_tokens=limit,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices and not first:
                first = time.perf_counter()
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        pipe.send(Taken(first - start, time.perf_counter() - first, tokens))


def alone(engine: Speculator, prompt: list[int], limit: int) -> Taken:
    """The engine's own."""
    start, first, tokens = time.perf_counter(), 0.0, 0
    for step in engine.generate(prompt, max_new_tokens=limit):
        first = first or time.perf_counter()
        tokens += len(step.tokens)
    return Taken(first - start, time.perf_counter() - first, tokens)


def main(
    head: Annotated[str, Option()],
    target: Annotated[str, Option()],
    prompts: Annotated[str, Option(help="JSON lines with messages")] = "recipes/demo-heldout.jsonl",
    count: int = 16,
    repetitions: int = 3,
    nodes: int = 8,
    threads: int = 1,
    max_new_tokens: int = 256,
) -> None:
    """Print medians over prompts, and their ratios with a 95 % bootstrap interval."""
    torch.set_num_threads(threads)
    model = Target.load(target)
    drafts = open_head(head).load(model)
    engine = Speculator(model, drafts, tree=drafts.tree.resized(nodes))
    lines = Path(prompts).read_text().splitlines()[:count]
    ids = []
    for line in lines:
        messages = json.loads(line)["messages"][:1]
        encoded = model.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        ids.append([len(ids) + 3, *encoded])  # no two begin alike: nothing is reused
    config = uvicorn.Config(
        create_app(engine, ServeOptions("m")), port=0, http=TimedProtocol, log_level="warning"
    )
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=client, args=(port, max_new_tokens, theirs)
    )
    process.start()
    pairs: list[tuple[Taken, Taken]] = []
    for turn in range(repetitions + 1):
        for prompt in ids:
            mine = alone(engine, prompt, max_new_tokens)
            ours.send(prompt)
            got = ours.recv()
            assert got.tokens == mine.tokens, (got, mine)
            if turn:  # the first is a warm-up
                pairs.append((mine, got))
    ours.send(None)
    process.join()

    def ratio(of, chosen) -> float:
        return sum(of(b) for _, b in chosen) / sum(of(a) for a, _ in chosen)

    for name, of in {
        "time to first token": lambda t: t.first,
        "time per answer after it": lambda t: t.rest,
    }.items():
        draws = sorted(ratio(of, random.choices(pairs, k=len(pairs))) for _ in range(2000))
        a, b = (1e3 * median(of(t) for t in each) for each in zip(*pairs, strict=True))
        print(
            f"{name}: engine {a:.2f} ms, HTTP {b:.2f} ms, ratio {ratio(of, pairs):.3f} "
            f"({draws[50]:.3f} to {draws[-50]:.3f})"
        )
    rates = [
        sum(t.tokens for t in each) / sum(t.rest for t in each) for each in zip(*pairs, strict=True)
    ]
    print(f"tokens/s: engine {rates[0]:.0f}, HTTP {rates[1]:.0f}")
    server.should_exit = True


if __name__ == "__main__":
    typer.run(main)
