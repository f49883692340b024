"""Writes answers in OpenAI's form: whole, or in the chunks of a stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from uuid import uuid4

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from draftheads.infer.prompt import CLOSE, OPEN
from draftheads.infer.rows import Step
from draftheads.infer.serve.calls import CallForm, all_whole
from draftheads.infer.serve.jobs import Job
from draftheads.infer.serve.logprobs import (
    TokenScore,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
)
from draftheads.infer.serve.parts import REASONING_KEYS, AnswerForm
from draftheads.infer.serve.protocol import ApiError, ChatRequest, GenerationRequest, Json
from draftheads.infer.serve.reader import Gone
from draftheads.infer.text import AnswerText, TextStream

TAIL = 16
"""Number of tokens at the end of a prompt that show whether it has opened the reasoning."""
STALL_SECONDS = 60.0
"""Seconds in which a client must read what it was sent."""


class Choice:
    """An answer while it is decoded. texts: the texts of single tokens, for log-probabilities."""

    def __init__(
        self,
        request: GenerationRequest,
        index: int,
        prompt: list[int],
        texts: TokenTexts,
        calls: CallForm | None,
    ) -> None:
        self.request = request
        self.index = index
        self.prompt = prompt
        self.is_chat = isinstance(request, ChatRequest)
        self.tokens: list[int] = []
        self.steps: list[Step] = []
        self.scored: list[TokenScore] = []
        self.finish: str | None = None
        self.reasoning_tokens = 0  # of the steps that have added reasoning
        self._texts = texts
        self._scored_characters = 0  # of the tokens whose log-probabilities were sent
        skip = request.skip_special_tokens is not False
        begun = request.begun if isinstance(request, ChatRequest) else ""
        after = () if request.echoes or (self.is_chat and not begun) else prompt
        marks = texts.marks if self.is_chat and skip else None
        self.parts: Json = {}
        self._form = AnswerForm()
        if isinstance(request, ChatRequest):
            ending = TextStream(texts.tokenizer, marks=marks).feed(prompt[-TAIL:])
            _, opened, thought = begun.rpartition(OPEN)
            is_thinking = (opened and CLOSE not in thought) or ending.rstrip().endswith(OPEN)
            self._form = form_of(request, calls, OPEN if is_thinking else "")
        if self._form.calls is not None and self._form.calls.opening:
            skip = False  # its marks may be special tokens
        stream = TextStream(texts.tokenizer, after=after, skip_special_tokens=skip, marks=marks)
        self._text = AnswerText(stream, request.stops)
        if request.echoes:
            self._text.add(prompt)

    def add(self, step: Step, scores: Sequence[TokenScore] = ()) -> Piece:
        """Add a step. Returns its piece. scores: of its tokens, if the request asks for them."""
        tokens = step.tokens
        if step.finish:
            self.finish = "length" if step.finish == "length" else "stop"
        self.tokens += tokens
        self.steps.append(step)
        # which characters are of accepted drafts takes time, and few ask for it
        accepted = step.accepted if self.request.includes_steps else 0
        start = self._text.settled if self.steps[1:] else 0
        self._text.add(step.visible, accepted, is_last=self.finish is not None)
        settled = slice(start, self._text.settled)
        facts = {
            "tokens": len(tokens),
            "accepted": step.from_drafts,
            "drafted": step.drafted,
            "accepted_chars": sum(takewhile(bool, self._text.accepted[settled])),
            "seconds": round(step.draft_seconds + step.verify_seconds, 6),
            "prefill": step.accepted < 0,
        }
        echoed = len(self.prompt) if self.request.echoes and not self.steps[1:] else 0
        scored = list(scores[: echoed + len(tokens)])
        self.scored += scored
        before = self.parts
        self.parts = self._form.parts(self._text.text[: settled.stop], self.finish)
        if self.finish == "stop" and all_whole(self.parts["tool_calls"]):
            self.finish = "tool_calls"
        parts = growth(before, self.parts)
        if parts[REASONING_KEYS[0]]:
            self.reasoning_tokens += len(tokens)
        return Piece(self, parts, tokens, scored, facts)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended this choice."""
        return self._text.stopped

    def whole(self) -> Json:
        """The finished choice, in OpenAI's form."""
        return self.entry(Piece(self, self.parts, self.tokens, self.scored, {}))

    def entry(self, piece: Piece) -> Json:
        """The entry of a part of this choice, or of all of it."""
        logprobs = None
        if self.request.scores is not None and self.is_chat:
            logprobs = chat_logprobs(piece.scored, self._texts)
        elif self.request.scores is not None:
            logprobs = completion_logprobs(piece.scored, self._texts, self._scored_characters)
            self._scored_characters += sum(map(len, logprobs["tokens"]))
        entry = self._entry(piece.parts, logprobs)
        if self.request.stream and self.request.includes_steps:
            entry["step"] = piece.facts
        if self.request.return_token_ids:
            entry["token_ids"] = piece.tokens
        return entry

    def opening(self) -> Json:
        """The first entry of a stream."""
        entry = self._entry({"content": ""}, None)
        if self.is_chat:
            entry["delta"]["role"] = "assistant"
        return entry

    def _entry(self, parts: Json, logprobs: Any) -> Json:
        content: Json = {"text": parts["content"]}
        message = {key: part for key, part in parts.items() if part or key == "content"}
        if self.is_chat and self.request.stream:
            content = {"delta": message}
        elif self.is_chat:
            content = {"message": {"role": "assistant", **message}}
        return {
            "index": self.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": self.finish,
        }


def form_of(request: ChatRequest, calls: CallForm | None, start: str) -> AnswerForm:
    """The form by which answers to a request are taken apart. start: see `AnswerForm`."""
    tools = request.callable_tools
    return AnswerForm(
        start,
        has_reasoning=request.reasoning_format != "none",
        calls=calls if tools else None,
        schemas={tool.function.name: tool.function.parameters.properties for tool in tools},
        most=1 if request.parallel_tool_calls is False else None,
        is_constrained=bool(request.required_tools or request.grammars),
    )


def growth(before: Json, parts: Json) -> Json:
    """What parts of `AnswerForm` have more than those of the step before: new calls, or more
    arguments of the only one.
    """
    more = {key: part[len(before.get(key, "")) :] for key, part in parts.items()}
    if before.get("tool_calls"):
        [known], [call] = before["tool_calls"], parts["tool_calls"]
        start = len(known["function"]["arguments"])
        rest = call["function"]["arguments"][start:]
        more["tool_calls"] = [{"index": 0, "function": {"arguments": rest}}] if rest else []
    return more


@dataclass(frozen=True)
class Piece:
    """The part of a choice that a step adds."""

    choice: Choice
    parts: Json  # as of `AnswerForm`
    tokens: list[int]
    scored: list[TokenScore]
    facts: Json  # for `include_steps`


class Reply:
    """The answers to a request, as OpenAI's clients read them. prompts: each has as many choices as
    the request asks for. end: the last line of a stream.
    """

    end = "data: [DONE]"

    def __init__(
        self,
        request: GenerationRequest,
        model: str,
        prompts: list[list[int]],
        texts: TokenTexts,
        calls: CallForm | None,
    ) -> None:
        self.request = request
        self.prompts = prompts
        self.choices: list[Choice] = []
        for prompt in prompts:
            for _ in range(request.count):
                self.choices.append(Choice(request, len(self.choices), prompt, texts, calls))
        prefix = "cmpl"
        kind = "text_completion"
        if isinstance(request, ChatRequest):
            prefix = "chatcmpl"
            kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self.head: Json = {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    @property
    def is_complete(self) -> bool:
        """True if all answers are complete."""
        return all(choice.finish for choice in self.choices)

    def whole(self, jobs: Sequence[Job]) -> Json:
        """All answers at once, after they are complete."""
        entries = [choice.whole() for choice in self.choices]
        prompt_ids = self._prompt_ids(entries)
        return {**self.head, "choices": entries, **prompt_ids, "usage": self.usage(jobs)}

    async def chunks(
        self, pieces: AsyncGenerator[Piece | None], jobs: Sequence[Job]
    ) -> AsyncGenerator[Json | None]:
        """Yields the chunks of a stream; None while it waits."""
        options = self.request.stream_options
        has_usage = options is not None and options.include_usage
        usage = {"usage": None} if has_usage else {}
        async with aclosing(pieces):
            await anext(pieces)
            for choice in self.choices:
                entry = choice.opening()
                yield {**self.head, "choices": [entry], **self._prompt_ids([entry]), **usage}
            async for piece in pieces:
                if piece is None:
                    yield None
                else:
                    yield {**self.head, "choices": [piece.choice.entry(piece)], **usage}
        if has_usage:
            yield {**self.head, "choices": [], "usage": self.usage(jobs)}

    def failure(self, error: ApiError) -> Json:
        """The chunk that ends a stream with an error."""
        return error.body()

    def usage(self, jobs: Sequence[Job]) -> Json:
        """Counts in OpenAI's names, over all choices; a prompt counts once, and so do those of its
        tokens that its first job did not compute again. seconds: of the engine.
        """
        steps = [step for choice in self.choices for step in choice.steps]
        right = sum(step.from_drafts for step in steps)
        drafted = sum(step.drafted for step in steps)
        prompt = sum(map(len, self.prompts))
        completion = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(job.reused for job in jobs[:: self.request.count])
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": right,
                "rejected_prediction_tokens": drafted - right,
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
            },
            "steps": len(steps),
            "seconds": round(sum(job.seconds for job in jobs), 6),
        }

    def _prompt_ids(self, entries: Sequence[Json]) -> Json:
        """The token ids of the only prompt, if they are asked for; those of several prompts are in
        the entries.
        """
        if not self.request.return_token_ids:
            return {}
        if len(self.prompts) == 1:
            return {"prompt_token_ids": self.prompts[0]}
        for entry in entries:
            entry["prompt_token_ids"] = self.choices[entry["index"]].prompt
        return {}


def event(chunk: Json | None) -> str:
    """A chunk as a server-sent event, which has the name of its type; a comment for None."""
    if chunk is None:
        return ": waiting"
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return f"{name}data: {json.dumps(chunk)}"


class EventStream(StreamingResponse):
    """Sends chunks as server-sent events, and a comment while a chunk is awaited. An error ends the
    stream, and so does a client that leaves, or reads nothing for a minute. opening: the first
    chunk.
    """

    def __init__(
        self, reply: Reply, opening: Json | None, chunks: AsyncGenerator[Json | None]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type="text/event-stream", headers=headers)
        self.reply = reply
        self.opening = opening
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's own would leave the chunks, and the engine behind them, to the garbage
        # collector when a client leaves, and would wait for one that reads nothing.
        async def write(line: str) -> None:
            body = f"{line}\n\n".encode()
            async with asyncio.timeout(STALL_SECONDS):
                await send({"type": "http.response.body", "body": body, "more_body": True})

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            async with aclosing(self.chunks):
                await send(start)
                await write(event(self.opening))
                async for chunk in self.chunks:
                    await write(event(chunk))
                if self.reply.end:
                    await write(self.reply.end)
        except (Gone, TimeoutError):
            return  # the connection is closed
        except ApiError as error:
            await write(event(self.reply.failure(error)))
        await send({"type": "http.response.body", "body": b""})
