"""The promise: targets whose RoPE factors depend on the length of the text write what `generate`
writes, and no text grows over the limit of their short factors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tiny_heads import decode, random_head
from tiny_targets import VOCABULARY, greedy, scaled_up, some_prompts
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftheads.heads.target import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.engine import Oracle, Speculator

LIMIT, NEW = 32, 20
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
    "phimoe": {
        "rope_parameters": {**ROPE, "short_mscale": 1.1, "long_mscale": 1.3},
        "original_max_position_embeddings": LIMIT,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "llama": {"rope_parameters": ROPE},
}
TREE = StaticTree.from_widths((2, 1, 1, 1))


@cache
def long_target(kind: str) -> Target:
    config = CONFIG_MAPPING[kind](
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=VOCABULARY, max_position_embeddings=128, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, **KINDS[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    model = scaled_up(AutoModelForCausalLM.from_config(config))
    with pytest.warns(UserWarning, match=f"texts are limited to {LIMIT} of 128 tokens, .*longrope"):
        return Target(model, name=f"long-{kind}")


def oracle(truth: list[list[int]], noise: float = 0.2) -> Any:
    longer = [row + [0] * TREE.depth for row in truth]
    return lambda: Oracle(TREE, longer, vocab_size=VOCABULARY, noise=noise)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_up_to_the_limit_are_those_of_generate(kind):
    target, prompts = long_target(kind), some_prompts(LIMIT - NEW, 5)
    truth = [greedy(target, prompt, NEW) for prompt in prompts]
    assert decode(target, oracle(truth), prompts, max_new_tokens=NEW)[0] == truth
    head = random_head("eagle3", target)
    assert decode(target, head, prompts, max_new_tokens=NEW)[0] == truth


@pytest.mark.parametrize("kind", KINDS)
def test_longer_texts_are_refused(kind):
    (prompt,) = some_prompts(LIMIT - NEW + 1)
    with pytest.raises(ValueError, match=r"exceed the context of long-.* \(32\)"):
        Speculator(long_target(kind)).generate(prompt, max_new_tokens=NEW)


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
