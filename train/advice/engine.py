"""Finds out why an engine accepts fewer draft tokens than we do: a running server answers the same
prompts, and its answers and counters are compared with our own decoding.

Legend: B batch, V vocabulary, S steps of our own decoding.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from os.path import commonprefix

from draftheads.heads.tree import StaticTree
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.remote import PromptRefused, ServerError
from draftheads.train.advice.doctor import SENTINEL, Evidence, Finding, is_above
from draftheads.train.data.answers import Answer
from draftheads.train.data.distill import AnswerSampling
from draftheads.train.data.server import ServedTarget

NEAR = 0.25
"""Nats between the two best tokens up to which other kernels and dtypes may swap them."""
POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
"""A counter's name before the position, from 0."""
UNSURE = " \ufffd"
"""What servers without token ids may drop: a first space, and the start of a cut character."""
FEATURES = """compare what the first draft needs with the head's own config: feature layers and
their alignment, norms, rope_theta, the map (d2t) of a reduced draft vocabulary; and the target's
quantisation there with that here"""
POSITIONS = """position 1 is right, so compare what later drafts need: their positions, rope_theta,
the head's own states in place of the target's and, of a block head, mask token and block size"""


def first_difference(evidence: Evidence, served: ServedTarget) -> Finding | None:
    """What a server does otherwise than our own decoding; a cause rather than what it explains.
    Raises ServerError.
    """
    [server] = served.servers
    before = server.counters()
    try:
        for own in evidence.decoded.answers:
            finding = other_answer(evidence, served, own)
            if finding:
                return finding
    except PromptRefused as error:
        return Finding(
            "context",
            f"what fits into our context ({evidence.target.context} tokens) is refused: {error}",
            "serve with the context that prompts and answers need (--max-model-len, -c)",
        )
    except ServerError as error:
        raise server.explained(error) from None
    after = server.counters()
    positions = sum(name.startswith(POSITION) for name in after)
    return other_chat(evidence, served) or other_drafts(evidence, after - before, positions)


async def ask(served: ServedTarget, prompt: list[int], limit: int, seed: str) -> list[int]:
    """The greedy answer to a prompt, on which the seed should have no effect."""
    [server] = served.servers
    request = served.request(prompt, AnswerSampling(temperature=0), seed)
    async with server.client() as client:
        completion = await server.complete(client, {**request, "max_tokens": limit})
    ids = completion.token_ids
    if ids is None:  # as of SGLang and llama.cpp
        ids = served.side.tokenizer(completion.text, add_special_tokens=False)["input_ids"]
    return served.ended(ids, completion)


def other_answer(evidence: Evidence, served: ServedTarget, own: Answer) -> Finding | None:
    """An answer that differs from our own where rounding does not explain it."""
    target = evidence.target
    decode = target.tokenizer.decode
    start = own.learn[0][0]
    prompt = own.tokens[:start]
    ours = own.tokens[start:]
    theirs = asyncio.run(ask(served, prompt, len(ours), "0"))
    if decode(theirs).strip(UNSURE) == decode(ours).strip(UNSURE):
        return None
    read = [*prompt, *commonprefix([ours, theirs])]
    logits_B1V = target.prefill([read], target.new_cache(1, len(read)), ()).logits_BNV
    first, second = logits_B1V.flatten().topk(2).values.tolist()
    if first - second < NEAR:
        return None
    again = asyncio.run(ask(served, prompt, len(ours), "1"))
    if again != theirs:
        return Finding(
            "sampling",
            f"two greedy answers to a prompt differ: {decode(theirs)!r} and {decode(again)!r}",
            "decode at temperature 0; some servers replace or truncate it, or add penalties",
        )
    return Finding(
        "text",
        f"{decode(theirs)!r} differs from {decode(ours)!r} from token {len(read) - start + 1} on, "
        f"where our best token is {first - second:.2f} nats ahead of the next",
        "serve the head's own target, adapter and tokenizer; differences late in an answer and of "
        "few nats are those of quantisation, and an answer that ends early those of a context",
    )


def other_chat(evidence: Evidence, served: ServedTarget) -> Finding | None:
    """A chat that the server renders otherwise, or refuses."""
    tokenizer = served.side.tokenizer
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": SENTINEL}]
    ours = encode_prompt(evidence.target, messages)
    body = {"model": served.model, "messages": messages, "max_tokens": 1}
    page = served.servers[0].fetch("POST", "/chat/completions", body)
    theirs = json.loads(page or "{}").get("usage", {}).get("prompt_tokens")
    if theirs != len(ours):
        return Finding(
            "template",
            f"a chat has {theirs or 'no'} tokens there, {len(ours)} here: "
            f"{tokenizer.decode(ours)!r}",
            "serve the chat template and the variables of the head's data (--chat-template, "
            "enable_thinking), with one BOS and without another system prompt",
        )
    return None


def other_drafts(evidence: Evidence, counts: Counter[str], positions: int) -> Finding | None:
    """Drafts that are fewer or less often right than ours. positions: of the server's drafts. With
    more tokens than positions they are trees, as only our own server has them; those of the head's
    own tree may be a chain.
    """
    if not counts:
        return Finding(
            "counters",
            "texts are equal, but this server shows no counters of drafts",
            "start llama-server with --metrics; of other engines, compare their logs with bench",
        )
    steps = counts["spec_decode_num_drafts_total"]
    if not steps:
        return Finding(
            "speculation",
            "the server verifies no drafts",
            "check --speculative-config, or -md and --spec-type, its log, and limits of the batch",
        )
    chain = math.ceil(counts["spec_decode_num_draft_tokens_total"] / steps)
    own, decoded = evidence.head.tree, evidence.decoded
    depth, most = own.depth, own.draft_nodes
    if chain <= positions and (chain, positions) != (most, depth):
        most = evidence.head.depth
        depth = min(chain, most)
        tree = StaticTree.from_widths([1] * depth)
        decoded = evidence.decode(evidence.openings, tree=tree)
    last = len(decoded.answers) / len(decoded.accepted)  # last steps are counted in other ways
    for position in range(depth):
        right_S = (decoded.accepted > position).float()
        share = counts[f"{POSITION}{position}"] / steps
        if is_above(right_S, share) and right_S.mean() > share + last:
            return Finding(
                "acceptance",
                f"{share:.1%} of steps accept {position + 1} of {chain} draft tokens, here "
                f"{right_S.mean():.1%} of {len(right_S)}",
                POSITIONS if position else FEATURES,
            )
    if chain != most:
        return Finding(
            "draft length",
            f"{chain} draft tokens per step, as right as here; the head drafts {most}",
            "set num_speculative_tokens or --spec-draft-n-max to it, or bench with such a chain",
        )
    return None
