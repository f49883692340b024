"""The promise: layers in ONNX Runtime compute what torch computes, but for the rounding of int8,
for all callers of a model. What they cannot run stays in torch and says why, or is refused.

That their rows are independent is in test_packed, that drafts change no text in test_conformance.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from onnx_models import ONNX_MODELS
from tiny_heads import decode, random_head, written_by
from tiny_targets import generated, random_model, some_prompts

from draftheads.heads.cpu.linear import has_int8
from draftheads.heads.target import onnx_decoder
from draftheads.heads.target.model import Target
from draftheads.infer.pipeline.loading import Place

pytestmark = pytest.mark.skipif(not has_int8(), reason="torch has no int8 products for this CPU")


def in_onnx(name: str = "llama", dtype: torch.dtype = torch.float32) -> Target:
    return Target(ONNX_MODELS[name]().to(dtype), name=name).pack(8, "onnx")


HALF = ("llama", "qwen2", "biases", "gemma3-window")
"""Models that are packed in bfloat16, too, as they are stored."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ONNX_MODELS),
        *((name, torch.bfloat16) for name in HALF),
    ],
)
@torch.no_grad()
def test_layers_compute_what_they_computed(name, dtype):
    """All states of a text, and its logits, in float32."""
    before = ONNX_MODELS[name]().to(dtype).float().eval()
    target = in_onnx(name, dtype)
    assert target.engine == "onnx" and target.precision == "int8"
    tokens = torch.tensor(some_prompts(30, 30))
    expected, got = (
        model(tokens, use_cache=False, output_hidden_states=True)
        for model in (before, target.model)
    )
    pairs = zip(expected.hidden_states, got.hidden_states, strict=True)
    for right, states in [*pairs, (expected.logits, got.logits)]:
        assert (states - right).norm() < 0.06 * right.norm()
    assert torch.equal(got.hidden_states[0], expected.hidden_states[0])
    some = target.model(tokens, use_cache=False, output_hidden_states=[1, -1]).hidden_states
    assert all(torch.equal(some[number], got.hidden_states[number]) for number in (1, -1))


@pytest.mark.parametrize("name", ["llama", "gemma3-window", "gemma3-wide"])
def test_generate_of_transformers_reads_them_with_its_own_cache(name):
    """Beyond the window, and in one pass over the text as token by token."""
    target = in_onnx(name)
    for prompt in some_prompts(5, 17):
        text = generated(target, prompt, 20)
        assert decode(target, None, [prompt], max_new_tokens=20)[0] == [text]
        logits_TV = target.model(torch.tensor([prompt + text]), use_cache=False).logits[0]
        assert logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist() == text


def test_padding_is_refused():
    target = in_onnx()
    with pytest.raises(ValueError, match="expected texts without padding"):
        target.model(torch.tensor([[3, 4]]), attention_mask=torch.tensor([[0, 1]]))


def test_threads_are_settled_after_a_choice():
    """The texts stay the same, and so do those of copies; layers of torch are gone."""
    target = in_onnx()
    prompt = some_prompts(9)[0]
    text = generated(target, prompt, 12)
    threads = torch.get_num_threads()
    try:
        for count in (2, 3):
            torch.set_num_threads(count)
            assert generated(target, prompt, 12) == text
            target.settle_threads()
            assert generated(target, prompt, 12) == text
    finally:
        torch.set_num_threads(threads)
    other = Target(copy.deepcopy(target.model))
    assert other.engine == "onnx" and not other.is_skeleton
    assert decode(other, None, [prompt], max_new_tokens=12)[0] == [text]
    names = [name for name, _ in target.model.named_parameters()]
    assert names and not any("layers" in name for name in names)


def test_heads_find_the_states_that_they_learned_from():
    """Features of middle layers, and lm_head(state), which is no part of these layers."""
    target = in_onnx("qwen3")
    prompts = some_prompts(12, 7)
    plain = decode(target, None, prompts, max_new_tokens=12)[0]
    for kind in ("medusa", "eagle3"):
        head = random_head(kind, target).pack(target)
        assert decode(target, head, prompts, max_new_tokens=12)[0] == plain
    for again in (target, Target(target.model, name="again")):
        assert decode(again.pack(8), None, prompts, max_new_tokens=12)[0] == plain
    assert target.unembed(torch.zeros(1, target.hidden_size)).shape == (1, target.vocab_size)


def test_what_cannot_run_there_says_why(monkeypatch, caplog):
    """It stays in torch, unless it was asked for."""
    target = Target(random_model("olmo2"), name="olmo2")
    with pytest.raises(ValueError, match="engine=onnx: expected one of gemma3_text, .* got olmo2;"):
        target.pack(8, "onnx")
    with caplog.at_level(logging.WARNING, "draftheads"):
        assert target.pack(8).engine == "torch" and target.bits == 8
    assert "run in torch, not in ONNX Runtime: expected one of" in caplog.text
    relu = random_model("llama")
    relu.config.hidden_act = "relu"
    assert "expected the activation silu or" in str(onnx_decoder.why_not(relu))


def test_layers_that_compute_something_else_are_not_used(monkeypatch, caplog):
    """A trial with a text compares their states with those of torch."""
    own = onnx_decoder.OnnxDecoder._spread

    def without_a_mask(*arguments):
        return torch.zeros_like(own(*arguments))

    monkeypatch.setattr(onnx_decoder.OnnxDecoder, "_spread", without_a_mask)
    with caplog.at_level(logging.WARNING, "draftheads"):
        target = Target(random_model("llama"), name="all-seeing").pack(8)
    assert target.engine == "torch"
    assert "expected the same states but for rounding, got others by" in caplog.text


def test_an_engine_is_for_int8_on_a_cpu():
    for options, fault in (
        ({"engine": "onnx"}, "engine=onnx: expected bits=8, got None; add it, or leave"),
        ({"engine": "tensorrt", "bits": 8}, "engine: expected onnx or torch, got 'tensorrt'"),
    ):
        with pytest.raises(ValueError, match=fault):
            Place(**options)  # type: ignore[arg-type]


def test_training_reads_the_features_that_decoding_has():
    """As learning from use does: those of token i at i + 1."""
    target = in_onnx("qwen3")
    batch = written_by(target, some_prompts(9, 9), 6)
    features_BTD = target.features(batch, [1, -1])
    cache = target.new_cache(2, 16)
    read_BTD = target.prefill(batch.tokens_BT.tolist(), cache, [1, -1]).features_BND
    assert torch.equal(features_BTD[:, 1:], read_BTD[:, :-1])
