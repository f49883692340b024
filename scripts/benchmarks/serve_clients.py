"""Tokens per second, latency and fairness of servers, by the number of clients.

    draftheads serve --target T --head H --port 8001 &
    transformers serve T --continuous-batching --port 8002 &
    python scripts/benchmarks/serve_clients.py ours=http://127.0.0.1:8001 \\
        hf=http://127.0.0.1:8002 --prompts valid.txt --clients 1 --clients 8

Each client streams one completion after the other, greedy, from its own share of the prompts. All
servers run all the time, and one of them is asked at a time, in turns. Every answer is compared
with the one that the same server gives to a client alone.

--long WORDS: beside the clients, one more asks for one token after so many words, again and again;
the longest pause between two chunks of the other answers says how long they wait for that.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub.utils import httpx
from typer import Argument, Option


@dataclass
class Answer:
    """A streamed completion. times: seconds from the request to each chunk with text."""

    text: str = ""
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Measured:
    """Answers of one server to so many clients."""

    rates: list[float] = field(default_factory=list)  # tokens per second of each round
    fairness: list[float] = field(default_factory=list)  # slowest client over fastest
    answers: list[Answer] = field(default_factory=list)
    different: int = 0


@dataclass
class Server:
    """A server under test."""

    name: str
    client: Any
    model: str = ""
    alone: dict[str, str] = field(default_factory=dict)  # prompt -> the unloaded answer

    async def ask(self, prompt: str, tokens: int) -> Answer:
        """Raises ValueError for anything but a whole answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer, start, finish = Answer(), time.perf_counter(), None
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"{self.name}: {response.status_code} {await response.aread()!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "choices" not in chunk:
                    raise ValueError(f"{self.name}: {chunk!r:.200}")
                for choice in chunk["choices"]:
                    finish = choice.get("finish_reason") or finish
                    if choice["text"]:
                        answer.text += choice["text"]
                        answer.times.append(time.perf_counter() - start)
                if chunk.get("usage"):
                    answer.tokens = chunk["usage"]["completion_tokens"]
        if finish is None:
            raise ValueError(f"{self.name}: a stream without an end after {answer.text[-40:]!r}")
        answer.seconds = time.perf_counter() - start
        return answer


async def one_client(server: Server, prompts: Sequence[str], tokens: int) -> list[Answer]:
    """Ask one after the other."""
    return [await server.ask(prompt, tokens) for prompt in prompts]


async def repeat(server: Server, prompt: str) -> None:
    """Ask for one token after a long prompt, until cancelled. Each time it begins otherwise, so
    that nothing can be reused.
    """
    for number in range(10**6):
        await server.ask(f"{number} {prompt}", 1)


async def measure(
    server: Server, shares: Sequence[Sequence[str]], tokens: int, long: str, into: Measured
) -> None:
    """One round of a server: all clients at once."""
    beside = asyncio.create_task(repeat(server, long)) if long else None
    start = time.perf_counter()
    answered = await asyncio.gather(*(one_client(server, share, tokens) for share in shares))
    seconds = time.perf_counter() - start
    if beside is not None:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    into.rates.append(sum(each.tokens for share in answered for each in share) / seconds)
    paces = [sum(a.tokens for a in share) / sum(a.seconds for a in share) for share in answered]
    into.fairness.append(min(paces) / max(paces))
    for share, answers in zip(shares, answered, strict=True):
        for prompt, answer in zip(share, answers, strict=True):
            into.different += answer.text != server.alone[prompt]
            into.answers.append(answer)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def row(name: str, clients: int, measured: Measured, base: float) -> str:
    """A row of the table. base: tokens per second of the first server with as many clients."""
    waits = [answer.seconds for answer in measured.answers]
    first = [answer.times[0] for answer in measured.answers if answer.times]
    gaps = [
        after - before
        for answer in measured.answers
        for before, after in zip(answer.times, answer.times[1:], strict=False)
    ]
    rate = statistics.median(measured.rates)
    cells = [
        f"{rate:.0f}",
        f"{rate / base:.2f}",
        f"{min(measured.rates):.0f} to {max(measured.rates):.0f}",
        f"{percentile(waits, 0.5):.2f} / {percentile(waits, 0.95):.2f}",
        f"{percentile(first, 0.5) * 1e3:.0f} / {percentile(first, 0.95) * 1e3:.0f}",
        f"{max(gaps, default=0) * 1e3:.0f}",
        f"{statistics.median(measured.fairness):.2f}",
        f"{len(waits) - measured.different} of {len(waits)}",
    ]
    return f"| {clients} | {name} | {' | '.join(cells)} |"


async def drive(
    servers: list[Server], texts: list[str], counts: list[int], options: dict[str, int], long: str
) -> bool:
    """All of it; returns whether all answers were those of a client alone."""
    tokens = options["tokens"]
    for server in servers:
        if not server.model:
            server.model = (await server.client.get("/v1/models")).json()["data"][0]["id"]
        for text in texts:
            server.alone[text] = (await server.ask(text, tokens)).text
    print("| clients | server | tokens/s | ratio | least to most | answer, s: 50 % / 95 % ", end="")
    print("| first text, ms: 50 % / 95 % | longest pause, ms | fairness | as alone |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    same = True
    for clients in counts:
        each = max(1, options["answers"] // clients)
        numbers = [range(client * each, client * each + each) for client in range(clients)]
        shares = [[texts[number % len(texts)] for number in own] for own in numbers]
        results = {server.name: Measured() for server in servers}
        for turn in range(options["rounds"]):
            for place in range(len(servers)):
                server = servers[(turn + place) % len(servers)]
                await measure(server, shares, tokens, long, results[server.name])
        base = statistics.median(results[servers[0].name].rates)
        for server in servers:
            print(row(server.name, clients, results[server.name], base), flush=True)
            same &= results[server.name].different == 0
    return same


async def connected(
    addresses: list[str], texts: list[str], counts: list[int], options: dict[str, int], long: str
) -> bool:
    """`drive` with a connection to each server. addresses: NAME=URL or NAME=URL=MODEL."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    servers = []
    for address in addresses:
        name, url, *model = address.split("=")
        client = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)
        servers.append(Server(name, client, "".join(model)))
    try:
        return await drive(servers, texts, counts, options, long)
    finally:
        for server in servers:
            await server.client.aclose()


def main(
    servers: Annotated[list[str], Argument(help="NAME=URL, or NAME=URL=MODEL")],
    prompts: Annotated[Path, Option(help="a text, one prompt a line")],
    words: Annotated[int, Option(help="of each line")] = 10,
    count: Annotated[int, Option(help="prompts")] = 32,
    clients: Annotated[list[int] | None, Option(help="repeat for several")] = None,
    answers: Annotated[int, Option(help="of a round, over all clients")] = 32,
    tokens: Annotated[int, Option(help="new tokens of an answer at most")] = 150,
    rounds: int = 3,
    long: Annotated[int, Option(help="words of a long prompt, asked beside the others")] = 0,
) -> None:
    """Print a table; the exit code is 1 if an answer differs from the unloaded one."""
    lines = [line.split() for line in prompts.read_text().splitlines()]
    texts = [" ".join(line[:words]) for line in lines if len(line) > words]
    distinct = list(dict.fromkeys(texts))[:count]
    options = {"tokens": tokens, "rounds": rounds, "answers": answers}
    every = " ".join(word for line in lines for word in line[:40])
    beside = " ".join(every.split()[:long])
    counts = clients or [1, 2, 4, 8, 16]
    same = asyncio.run(connected(servers, distinct, counts, options, beside))
    raise typer.Exit(not same)


if __name__ == "__main__":
    typer.run(main)
