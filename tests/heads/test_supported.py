"""The promise: a model that cannot follow a token tree is refused when the target is made, with the
reason in one line, and no other is.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tiny_heads import Oracle, decode
from tiny_targets import (
    CONFIGS,
    MASKLESS,
    UNEVEN,
    VOCABULARY,
    greedy,
    random_model,
    some_prompts,
    tiny_target,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from draftheads.heads.target import trial
from draftheads.heads.target.model import Target
from draftheads.heads.target.trial import Ways
from draftheads.heads.tree import StaticTree

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
}
SPARSE = "layers of type (indexed|deepseek_sparse)_attention,"
BERT = {**SIZES, "embedding_size": 32}
GPT_NEO = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "vocab_size": VOCABULARY,
}
BY_SLOT = "attends by cache slot instead of position"

NAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt-neo": ("gpt_neo", GPT_NEO, BY_SLOT),
    "moshi": ("moshi", {**SIZES, "ffn_dim": 48}, BY_SLOT),
    "doge": ("doge", SIZES, BY_SLOT),
    "minimax": (
        "minimax",
        {**SIZES, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
        "layers of type linear_attention,",
    ),
    "recurrent-gemma": (
        "recurrent_gemma",
        {**SIZES, "lru_width": 32, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 8},
        "layers of type (linear_attention|recurrent),",
    ),
    "rwkv": (
        "rwkv",
        {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 19},
        "layers of type recurrent,",
    ),
    "xlstm": (
        "xlstm",
        {"hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2, "vocab_size": 19},
        "layers of type recurrent,",
    ),
    "mamba": (
        "mamba",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 19, "state_size": 8},
        "takes no position_ids",
    ),
    "mamba2": (
        "mamba2",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": 19,
            "state_size": 8,
            "num_heads": 4,
            "head_dim": 16,
        },
        "takes no position_ids",
    ),
    "deepseek-v3.2": ("deepseek_v32", LATENT, SPARSE),
    "glm-dsa": ("glm_moe_dsa", LATENT, SPARSE),
    "gemma3n": (
        "gemma3n_text",
        {**SIZES, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY},
        "several hidden states per token",
    ),
    "bart-decoder": ("bart", {"d_model": 32, "decoder_layers": 2}, "takes no position_ids"),
    "xlnet": (
        "xlnet",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        "no position_ids",
    ),
    "blt": ("blt", {}, "no lm_head over hidden states"),
    "openai-gpt": (
        "openai-gpt",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 128},
        "expected forward with an argument cache or past_key_values",
    ),
}
TRIED: dict[str, tuple[str, dict[str, Any], str]] = {
    "xlm": (
        "xlm",
        {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": VOCABULARY, "pad_index": 0},
        "its forward fails with AssertionError",
    ),
    "bert": ("bert", BERT, "not causal: later tokens change earlier states"),
    "roberta": ("roberta", BERT, "not causal"),
    "electra": ("electra", BERT, "not causal"),
    "gemma4-encoder": (
        "gemma4_text",
        {
            **SIZES,
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "all",
        },
        "not causal",
    ),
    "inkling": (
        "inkling_text",
        {**SIZES, **EXPERTS, "head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4},
        "nodes do not see their own path",
    ),
    "zaya": (
        "zaya",
        {
            **{key: SIZES[key] for key in SIZES if key != "intermediate_size"},
            "head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "router_hidden_size": 8,
        },
        "its forward fails with TypeError",
    ),
    "opt-350m": (
        "opt",
        {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16},
        r"last states are \(4, 7, 16\), expected texts x tokens x 32",
    ),
}


def model_of(kind: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options))


def refusal(model: Any) -> str:
    with pytest.raises(ValueError) as error:
        Target(model)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of what models print while they are refused
@pytest.mark.parametrize("name", NAMED)
def test_what_its_config_gives_away_is_refused_also_without_numbers(name):
    kind, options, reason = NAMED[name]
    with torch.device("meta"):
        model = model_of(kind, options)
    said = refusal(model)
    assert re.search(reason, said)
    assert type(model).__name__ in said
    assert "; use a causal LM" in said or "; load a causal LM" in said


def test_an_encoder_decoder_is_refused(tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    config = CONFIG_MAPPING["t5"](vocab_size=VOCABULARY, **sizes)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a causal LM, got a model of T5Config; use"):
        Target.load(tmp_path)


@pytest.mark.parametrize("name", TRIED)
def test_what_a_trial_shows_is_refused(name):
    kind, options, reason = TRIED[name]
    with pytest.raises(ValueError, match=f"cannot follow a token tree.*{reason}") as error:
        Target(model_of(kind, options))
    assert "\n" not in str(error.value)


class Deaf(LlamaForCausalLM):
    """Takes positions and masks, and does not listen to one of them."""

    ignored = "position_ids"

    def forward(self, input_ids: Any, position_ids: Any = None, **arguments: Any) -> Any:
        arguments["position_ids"] = position_ids
        return super().forward(input_ids, **{**arguments, self.ignored: None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask"])
def test_a_trial_shows_who_does_not_listen(ignored, dtype):
    """With weights as small as new ones, and in bfloat16 with states as different as trained
    ones.
    """
    torch.manual_seed(0)
    model = Deaf(LlamaConfig(**SIZES))
    model.ignored = ignored
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim >= 2 and dtype == torch.bfloat16 else 1.0)
    assert "nodes do not see their own path" in refusal(model.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted({**CONFIGS, **UNEVEN, **MASKLESS}))
def test_rounding_refuses_no_target(name, dtype):
    assert Target(random_model(name).to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("name", "ways"), [("llama", Ways("tree", "resets")), ("opt", Ways("tree", "mask"))]
)
def test_a_trial_finds_what_keeps_documents_apart(name, ways, monkeypatch):
    assert Target(random_model(name)).ways == Ways("tree", "alone")
    monkeypatch.setattr(trial, "ALONE", {"xpu"})
    assert Target(random_model(name)).ways == ways


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma4", "opt"])
def test_a_trial_draws_nothing_and_changes_nothing(name):
    model, prompt = random_model(name), torch.tensor([[5, 9, 3, 7]])
    before, state = model(prompt).logits, torch.get_rng_state()
    target = Target(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(target.model(prompt).logits, before)
    assert not any(p.requires_grad or p.is_inference() for p in model.parameters())


def test_a_full_device_is_not_the_model_s_fault(monkeypatch):
    model = random_model("llama")

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "forward", full)
    monkeypatch.setattr("draftheads.heads.target.model.refuse_unsupported", lambda model: None)
    with pytest.raises(torch.OutOfMemoryError):
        Target(model)


def test_states_that_are_not_finite_are_named():
    model = random_model("llama")
    model.model.norm.weight.data.fill_(float("inf"))
    assert "its states are not finite in torch.float32" in refusal(model)


@pytest.mark.parametrize(
    "attention", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"]
)
@pytest.mark.parametrize(("name", "instead"), [("llama", "sdpa"), ("gpt-oss", "eager")])
def test_attention_that_takes_no_mask_of_a_tree_is_refused(name, instead, attention):
    model = random_model(name)
    model.config._attn_implementation = attention  # the packages themselves are not installed
    said = refusal(model)
    assert attention in said
    assert f'call model.set_attn_implementation("{instead}") first' in said
    model.set_attn_implementation(instead)
    Target(model)


def test_a_model_without_lm_head_is_refused():
    model = AutoModel.from_config(CONFIG_MAPPING["llama"](**SIZES))
    assert "no lm_head" in refusal(model)


def test_a_compiled_model_is_unwrapped():
    model, (prompt,) = random_model("llama"), some_prompts(5)
    target = Target(torch.compile(model, backend="eager"))
    assert target.model is model
    assert decode(target, None, [prompt], max_new_tokens=4)[0] == [greedy(target, prompt, 4)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_peft_model_is_refused_with_what_to_do():
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(random_model("llama"), LoraConfig(target_modules=["q_proj"]))
    said = refusal(wrapped)
    assert "PeftModel" in said
    assert "merge_and_unload" in said
    assert "Target.attach" in said
    Target(wrapped.merge_and_unload())


def llama4(**changes: Any) -> Any:
    options = {
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0],
        "floor_scale": 1024 + 161,
        "attn_temperature_tuning": True,
    }
    model = model_of("llama4_text", {**SIZES, **options, **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim >= 2 else 1.0)
    model.generation_config.eos_token_id = None
    return model


def test_where_a_model_scales_attention_by_slots_texts_end_before_that():
    with pytest.warns(UserWarning, match="limited to 160 of 2048 tokens, as it scales attention"):
        target = Target(llama4(), name="llama4")
    assert target.context == 160
    prompts = some_prompts(140, 31)
    truth = [greedy(target, prompt, 20) for prompt in prompts]
    longer = [row + [0] * 5 for row in truth]
    for widths in ((3, 2, 2, 2), (32, 31)):
        tree = StaticTree.from_widths(widths)
        oracle = lambda: Oracle(tree, longer, vocab_size=VOCABULARY, noise=0.3)  # noqa: B023, E731
        assert decode(target, oracle, prompts, max_new_tokens=20)[0] == truth


def test_where_it_never_does_nothing_is_limited():
    assert Target(llama4(attn_temperature_tuning=False)).context == 2048


@pytest.mark.parametrize("name", MASKLESS)
def test_equal_rows_of_a_batch_decode_as_alone(name):
    """XGLM wants a mask for each row, also where all rows have the same."""
    target, prompts = tiny_target(name), some_prompts(9, 9)
    truth = [greedy(target, prompt, 12) for prompt in prompts]
    tree = StaticTree.from_widths((3, 2, 1))
    oracle = lambda: Oracle(tree, truth, vocab_size=VOCABULARY, noise=0.4)  # noqa: E731
    assert decode(target, oracle, prompts, max_new_tokens=12)[0] == truth
