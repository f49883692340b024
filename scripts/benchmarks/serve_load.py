"""Many clients at a time against a running server: is every answer whole, and the one that a client
alone gets?

    draftheads serve --head out/demo/sequential --target recipes/demo-target --port 8000
    python scripts/benchmarks/serve_load.py http://127.0.0.1:8000 --pid PID

Each client streams one answer after the other; one that is refused with 429 retries as it is told.
Anything else than a whole answer or such a refusal is a failure, and the exit code 1. Afterwards,
`--vanish` clients leave in the middle of an answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from huggingface_hub.utils import httpx
from typer import Option


@dataclass
class Load:
    """What happened so far."""

    expected: dict[str, str] = field(default_factory=dict)  # prompt -> the unloaded answer
    outcomes: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)  # seconds of whole answers, retries included
    memory: list[int] = field(default_factory=list)  # of the server, each second


async def answer(client: Any, prompt: str) -> tuple[int, str]:
    """Status and text. Raises ValueError for a stream without a proper end."""
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 128}
    text, finish, ended = "", None, False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            if response.status_code == 429:
                assert response.json()["error"]["code"] == "queue_full", response.text
                return 429, response.headers["retry-after"]
            raise ValueError(f"{response.status_code}: {response.text[:200]}")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"]["content"]
                finish = choice["finish_reason"] or finish
    if not (ended and finish):
        raise ValueError(f"a stream without an end after {text[-40:]!r}")
    return 200, text


async def one_client(client: Any, load: Load, until: float, seed: int) -> None:
    """Ask until the time is over."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        prompt, start = draw.choice(list(load.expected)), time.monotonic()
        while True:
            try:
                status, said = await answer(client, prompt)
            except (ValueError, KeyError, AssertionError, httpx.HTTPError) as error:
                load.outcomes[f"FAILED {type(error).__name__} {error}"] += 1
                break
            if status == 200:
                same = said == load.expected[prompt]
                load.outcomes["whole answers" if same else f"FAILED other text {said!r}"] += 1
                load.waits.append(time.monotonic() - start)
                break
            load.outcomes["clean 429"] += 1
            if time.monotonic() > until:
                break
            await asyncio.sleep(float(said) * draw.uniform(1, 2))


async def watch(load: Load, pid: int | None, until: float) -> None:
    """Note the server's memory."""
    while pid and time.monotonic() < until:
        load.memory.append(psutil.Process(pid).memory_info().rss)
        await asyncio.sleep(1)


async def active(client: Any) -> float:
    """Requests being decoded or waiting, by /metrics."""
    text = (await client.get("/metrics")).text
    return sum(map(float, re.findall(r"(?m)^draftheads_(?:active|waiting)_requests (\S+)", text)))


async def vanish(client: Any, load: Load, count: int) -> float:
    """Clients leave at once in the middle of their answers, or while they wait; returns the seconds
    until the engine is idle.
    """
    prompts = random.Random(0).choices(list(load.expected), k=count)
    asking = [asyncio.create_task(answer(client, prompt)) for prompt in prompts]
    await asyncio.sleep(0.5)
    assert await active(client), "answered already; use more clients"
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    start = time.monotonic()
    while await active(client):
        await asyncio.sleep(0.02)
    return time.monotonic() - start


async def drive(
    url: str, prompts: list[str], sizes: tuple[int, float, int], pid: int | None
) -> Load:
    """All of it. sizes: clients, seconds, and clients that vanish."""
    clients, seconds, leaving = sizes
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    load = Load()
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        for prompt in prompts:
            load.expected[prompt] = (await answer(client, prompt))[1]
        until = time.monotonic() + seconds
        asking = [one_client(client, load, until, seed) for seed in range(clients)]
        await asyncio.gather(watch(load, pid, until), *asking)
        if leaving:
            print(f"{leaving} clients left: idle after {await vanish(client, load, leaving):.2f} s")
    return load


def main(
    url: str,
    clients: int = 200,
    seconds: float = 60.0,
    vanishing: Annotated[int, Option("--vanish")] = 50,
    prompts: Path = Path("recipes/demo-heldout.jsonl"),
    count: Annotated[int, Option(help="prompts")] = 24,
    pid: Annotated[int | None, Option(help="of the server, to watch its memory")] = None,
) -> None:
    """Print how the requests ended."""
    lines = prompts.read_text().splitlines()[:count]
    texts = [json.loads(line)["messages"][0]["content"] for line in lines]
    load = asyncio.run(drive(url, texts, (clients, seconds, vanishing), pid))
    for outcome, number in load.outcomes.most_common():
        print(f"{number:6} {outcome}")
    waits = sorted(load.waits)
    print(f"answers took {waits[len(waits) // 2]:.1f} s in the middle, {waits[-1]:.1f} s at most")
    if third := len(load.memory) // 3:
        parts = load.memory[third : 2 * third], load.memory[-third:]
        middle, last = (sum(part) / third / 1e6 for part in parts)
        print(f"memory: {middle:.0f} MB in the second third, {last:.0f} MB in the last")
    raise typer.Exit(any(outcome.startswith("FAILED") for outcome in load.outcomes))


if __name__ == "__main__":
    typer.run(main)
