"""A serving engine as vLLM is one, around our own decoding, in which faults can be planted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from local_server import Fault, Json, LocalServer, _send

from draftheads.heads.base import DraftHead
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.accept import Greedy, Sampled
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import encode_prompt


@dataclass
class Planted:
    """What an engine runs. head: None decodes without drafts. chain: draft tokens per step.
    tokenizer: renders chats; bos: ids before each of them. context: longer texts are refused.
    counts: False shows no counters. ids: False answers with text alone.
    """

    target: Target
    head: DraftHead | None
    chain: int
    tokenizer: Any = None
    temperature: float = 0.0
    bos: Sequence[int] = ()
    context: int = 1 << 30
    counts: bool = True
    ids: bool = True
    prefix: str = "vllm"
    counted: Counter[str] = field(default_factory=Counter)


class PlantedEngine(LocalServer):
    """Serves it, one request at a time."""

    def __init__(self, planted: Planted) -> None:
        super().__init__(self._complete)
        self.planted = planted
        self.fault = self._refusal

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """Answer one request."""
        if handler.path == "/v1/chat/completions":
            return _send(handler, 200, self._chat(json.loads(body)))
        self.metrics = self._page().encode()
        return super().answer(handler, body)

    def _refusal(self, number: int, request: Json) -> Fault | None:
        if len(request["prompt"]) + request["max_tokens"] <= self.planted.context:
            return None
        message = f"the maximum context length is {self.planted.context} tokens"
        return 400, {}, json.dumps({"error": {"message": message}}).encode()

    def _complete(self, request: Json) -> Json:
        planted = self.planted
        rule = Sampled(planted.temperature) if planted.temperature else Greedy()
        rule.seed(request["seed"])
        tree = StaticTree.from_widths([1] * planted.chain) if planted.head else None
        engine = Speculator(planted.target, planted.head, tree=tree)
        limit = request["max_tokens"]
        ids: list[int] = []
        for step in engine.generate(request["prompt"], sampling=rule, max_new_tokens=limit):
            ids += step.tokens
            if planted.head is not None and step.accepted >= 0:
                planted.counted["drafts"] += 1
                planted.counted["draft_tokens"] += step.drafted
                for position in range(planted.chain):
                    is_right = step.accepted > position
                    planted.counted[f"accepted_tokens_per_pos/{position}"] += is_right
        ended = ids[-1] in planted.target.eos_ids
        text = planted.target.tokenizer.decode(ids[:-1] if ended else ids)
        reason = "stop" if ended else "length"
        return {"text": text, "finish_reason": reason} | ({"token_ids": ids} if planted.ids else {})

    def _chat(self, request: Json) -> Json:
        planted = self.planted
        target = planted.target
        own, target.tokenizer = target.tokenizer, planted.tokenizer or target.tokenizer
        ids = [*planted.bos, *encode_prompt(target, request["messages"])]
        target.tokenizer = own
        reply: Json = {"choices": [], "usage": {"prompt_tokens": len(ids)}}
        return reply | ({"prompt_token_ids": ids} if planted.ids else {})

    def _page(self) -> str:
        """The counters, of two engines behind one server."""
        planted = self.planted
        if not planted.counts:
            return ""
        lines = [f'{planted.prefix}:generation_tokens_total{{engine="0"}} {len(self.asked)}.0']
        for name, count in planted.counted.items():
            name, _, position = name.partition("/")
            labels = 'model_name="tiny"' + (f',position="{position}"' if position else "")
            for engine in (0, 1):
                part = count - count // 3 if engine else count // 3
                label = f'{{engine="{engine}",{labels}}}'
                lines.append(f"{planted.prefix}:spec_decode_num_{name}_total{label} {part}.0")
        return "\n".join(["# TYPE vllm:generation_tokens_total counter", *lines, ""])
