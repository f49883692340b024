"""The promise: targets whose RoPE factors depend on the length of the text write what `generate`
writes, over the limit too, and training sees each document with the factors that decoding uses.
"""

from __future__ import annotations

from functools import cache
from inspect import getsource
from typing import Any

import pytest
import torch
from tiny_heads import Oracle, decode, random_head
from tiny_targets import VOCABULARY, generated, scaled_up, some_prompts, tiny_target
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Phi3ForCausalLM

from draftheads.heads.batch import Batch
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.engine import Speculator
from draftheads.infer.reading import Session

LIMIT, NEW = 32, 25
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [8.0, 30.0, 4.0, 25.0],
    "original_max_position_embeddings": LIMIT,
}
KINDS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": ROPE, "original_max_position_embeddings": LIMIT},
    "phimoe": {  # these two drop what they have computed when a text crosses the limit
        "rope_parameters": {**ROPE, "short_mscale": 1.1, "long_mscale": 1.3},
        "original_max_position_embeddings": LIMIT,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "llama": {"rope_parameters": ROPE},  # this one does not
}
TREE = StaticTree.from_widths((2, 1, 1, 1))
OLD = "next_sequence_length" not in getsource(Phi3ForCausalLM.prepare_inputs_for_generation)
"""Whether `generate` drops a cache and then reads the newest token alone: its own fault."""


@cache
def long_target(kind: str) -> Target:
    config = CONFIG_MAPPING[kind](
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=VOCABULARY, max_position_embeddings=128, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, **KINDS[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    return Target(scaled_up(AutoModelForCausalLM.from_config(config)), name=f"long-{kind}")


def greedy(target: Target, prompt: list[int], new: int) -> list[int]:
    drops_its_cache = target.model.config.model_type != "llama"
    return generated(target, prompt, new, use_cache=not (OLD and drops_its_cache))


def oracle(truth: list[list[int]], noise: float = 0.2) -> Any:
    longer = [row + [0] * TREE.depth for row in truth]
    return lambda: Oracle(TREE, longer, vocab_size=VOCABULARY, noise=noise)


@pytest.mark.parametrize(
    ("length", "chunk"),
    [*((length, 1024) for length in (20, 29, 31, 32, 33, 50)), (29, 7), (32, 7), (50, 7)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_grows_over_the_limit_as_in_generate(monkeypatch, kind, length, chunk):
    monkeypatch.setattr("draftheads.heads.target.model.PREFILL_CHUNK", chunk)
    target, (prompt,) = long_target(kind), some_prompts(length)
    truth = [greedy(target, prompt, NEW)]
    assert decode(target, None, [prompt], max_new_tokens=NEW)[0] == truth
    assert decode(target, oracle(truth), [prompt], max_new_tokens=NEW)[0] == truth
    tokens, (statistics,) = decode(target, oracle(truth, 0.0), [prompt], max_new_tokens=NEW)
    assert tokens == truth
    assert statistics.steps <= -(-(NEW - 1) // 5) + 1, "one step may be cut at the limit, no more"


@pytest.mark.inside
@pytest.mark.parametrize("chunk", [1024, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_cross_at_times_of_their_own(monkeypatch, kind, chunk):
    monkeypatch.setattr("draftheads.heads.target.model.PREFILL_CHUNK", chunk)
    target, prompts = long_target(kind), some_prompts(20, 40, 31, 32, 5, 33)
    truth = [greedy(target, prompt, NEW) for prompt in prompts]
    assert decode(target, oracle(truth), prompts, max_new_tokens=NEW)[0] == truth
    head = random_head("eagle3", target)
    assert decode(target, head, prompts, max_new_tokens=NEW)[0] == truth


def test_a_row_that_has_ended_at_the_limit_stays_as_it_is(monkeypatch):
    target, prompts = long_target("phi3"), some_prompts(LIMIT - 4, 9)
    truth = [greedy(target, prompt, NEW) for prompt in prompts]
    monkeypatch.setattr(target, "eos_ids", (truth[0][4],))  # its last position is the limit's
    ends = [row.index(truth[0][4]) + 1 if truth[0][4] in row else NEW for row in truth]
    expected = [row[:end] for row, end in zip(truth, ends, strict=True)]
    assert decode(target, oracle(truth), prompts, max_new_tokens=NEW)[0] == expected


@pytest.mark.inside
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_have_the_features_that_they_have_alone(kind):
    target, documents = long_target(kind), some_prompts(12, 40, 9)
    packed = features(target, documents)
    for place, document in enumerate(documents):
        start = sum(map(len, documents[:place]))
        alone = features(target, [document])
        torch.testing.assert_close(packed[1 + start : start + len(document)], alone[1:])


def features(target: Target, documents: list[list[int]]) -> torch.Tensor:
    tokens_BT = torch.tensor([sum(documents, [])])
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    learn = torch.ones_like(tokens_BT, dtype=torch.bool)
    batch = Batch(tokens_BT, learn, positions, torch.zeros_like(tokens_BT))
    return target.features(batch, [1, -1])[0]


def test_dynamic_ntk_factors_do_not_change_within_the_context():
    """They change beyond max_position_embeddings alone, where nothing is decoded."""
    config = CONFIG_MAPPING["llama"](
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        vocab_size=VOCABULARY, max_position_embeddings=48,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    target = Target(scaled_up(AutoModelForCausalLM.from_config(config)))
    prompts = some_prompts(23, 30)
    truth = [greedy(target, prompts[0], 25), greedy(target, prompts[1], 18)]
    greedy(target, prompts[1], 40)  # leaves other factors in the model, until a short text resets
    for prompt, expected in zip(prompts, truth, strict=True):
        assert decode(target, oracle([expected]), [prompt])[0] == [expected]
    with pytest.raises(ValueError, match="exceed the context"):
        Speculator(target).generate(prompts[1], max_new_tokens=19)


def test_it_is_not_compiled():
    target, prompts = long_target("phi3"), some_prompts(LIMIT - 5)
    with pytest.warns(UserWarning, match="without compilation: its RoPE factors change with"):
        steps = Speculator(target, compile=True).generate(prompts[0], max_new_tokens=NEW)
    tokens = [token for step in steps for token in step.tokens]
    assert tokens == greedy(target, prompts[0], NEW)


@pytest.mark.mend("sessions and LongRoPE")
def test_a_session_that_another_target_has_used_reuses_nothing_that_is_not_there():
    """Its length was that of the other text, which the session does not hold: the drafter's cache
    was cut back to pairs that it never had.
    """
    session, [prompt] = Session(), some_prompts(9)
    target = tiny_target()
    engine = Speculator(target, random_head("eagle3", target))
    steps = engine.generate(prompt, max_new_tokens=12, session=session)
    written = [token for step in steps for token in step.tokens]
    longer = [*prompt, *written, 5, 6]
    list(Speculator(long_target("llama")).generate(prompt, max_new_tokens=60, session=session))
    steps = engine.generate(longer, max_new_tokens=12, session=session)
    written = [token for step in steps for token in step.tokens]
    assert session.reused == 0 and written == greedy(target, longer, 12)
