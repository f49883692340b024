"""The promise: a name inside another library that has changed makes no difference, or one loud
line. Each private name that this project reads has a test that fails when it goes.
"""

from __future__ import annotations

import inspect
import logging
from functools import wraps
from typing import Any

import accelerate
import pytest
import torch
import transformers
from hybrid_targets import HYBRIDS, hybrid_model
from tiny_heads import decode, random_head
from tiny_targets import VOCABULARY, generated, random_model, some_prompts, tiny_target
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationMixin, masking_utils

from draftheads.heads.batch import Batch
from draftheads.heads.cpu.linear import FEW, PackedWeight, can_pack
from draftheads.heads.hybrid import states as recurrent
from draftheads.heads.hybrid.states import cache_argument, is_mixer, tree_mixer
from draftheads.heads.target import masks, placement
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import decoder
from draftheads.infer.generate import speculative

pytestmark = pytest.mark.inside

CPU, NEW = torch.device("cpu"), 12
PROMPTS = some_prompts(9, 5)
NAMES = ("cache", "past_key_values")


def renamed(kind: Any, name: str, *, method: str = "forward", swallows: bool) -> Any:
    """A class as remote code may be: its argument for the cache has this name. swallows: a cache by
    the name of transformers vanishes among its options; else it is taken, too.
    """
    code, theirs = getattr(kind, method), cache_argument(kind, method)

    @wraps(code)
    def other(self: Any, *arguments: Any, **options: Any) -> Any:
        if name in options:
            options[theirs] = options.pop(name)
        elif swallows and name != theirs:
            options.pop(theirs, None)
        return code(self, *arguments, **options)

    del other.__wrapped__
    signature = inspect.signature(code)
    parameters = [
        each.replace(name=name if each.name == theirs else each.name)
        for each in signature.parameters.values()
    ]
    other.__signature__ = signature.replace(parameters=parameters)
    return type(kind.__name__, (kind,), {method: other})


@pytest.mark.mend("a renamed argument of transformers' forwards")
@pytest.mark.parametrize("name", NAMES)
def test_a_model_may_call_its_cache_by_an_old_name_or_a_new_one(name):
    model = random_model("llama")
    expected = [generated(tiny_target(), prompt, NEW) for prompt in PROMPTS]
    model.__class__ = renamed(type(model), name, swallows=True)
    target = Target(model)
    assert decode(target, random_head("medusa", target), PROMPTS, max_new_tokens=NEW)[0] == expected


@pytest.mark.mend("hybrids with a renamed argument ended in StopIteration")
@pytest.mark.parametrize("name", [*NAMES, "cache_params"])
@pytest.mark.parametrize("family", ["qwen3.5", "lfm2", "bamba"])
def test_a_mixer_may_call_its_cache_by_another_name_than_its_layer_does(family, name):
    model = hybrid_model(family)
    expected = [generated(Target(hybrid_model(family)), prompt, NEW) for prompt in PROMPTS]
    for module in list(model.modules()):
        if is_mixer(module):
            module.__class__ = renamed(type(module), name, swallows=False)
    target = Target(model)
    assert decode(target, random_head("medusa", target), PROMPTS, max_new_tokens=NEW)[0] == expected


@pytest.fixture
def unknown_names(monkeypatch):
    """As if transformers gave the cache a name that nobody knew."""
    monkeypatch.setattr(recurrent, "CACHE", ("slots", "memory"))


@pytest.mark.mend("a cache that vanishes among options")
def test_a_cache_by_an_unknown_name_is_refused_in_one_line(unknown_names):
    with pytest.raises(ValueError, match="LlamaForCausalLM: expected forward with an arg") as error:
        Target(random_model("llama"))
    assert "slots or memory" in str(error.value) and "\n" not in str(error.value)


def long_model() -> Any:
    """A tiny Phi-3 whose RoPE factors change beyond eight tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0, 30.0, 4.0, 25.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    config = CONFIG_MAPPING["phi3"](
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        vocab_size=VOCABULARY, max_position_embeddings=64, original_max_position_embeddings=8,
        rope_parameters={**rope, **factors, "factor": 4.0}, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.mend("rotary modules by another attribute")
def test_long_rope_in_a_config_alone_is_refused_in_one_line():
    model = long_model()
    for module in model.modules():
        vars(module).pop("rope_type", None)
    with pytest.raises(ValueError, match="expected LongRoPE in its config and .* 8 and 0 modules"):
        Target(model)


@pytest.mark.mend("RoPE parameters by another attribute")
def test_long_rope_in_modules_alone_is_refused_in_one_line():
    model = long_model()
    model.config.rope_parameters = None
    with pytest.raises(ValueError, match="expected LongRoPE in its config and .* 0 and 1 modules"):
        Target(model)


@pytest.mark.mend("a name of generate's that is gone, in silence")
def test_long_rope_of_a_model_that_loses_its_cache_is_refused_in_one_line():
    model, method = long_model(), "prepare_inputs_for_generation"
    model.__class__ = renamed(type(model), "slots", method=method, swallows=True)
    with pytest.raises(ValueError, match=f"expected {method} to hand on the cache"):
        Target(model)


@pytest.mark.mend("LongRoPE targets wrote other texts than generate, in silence")
def test_a_long_rope_target_knows_that_generate_drops_its_cache():
    assert Target(long_model()).longrope.crossing == 8


@pytest.mark.mend("a deprecation printed by each command")
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3.5"])
def test_no_name_that_transformers_wants_to_drop_is_used(family):
    transformers.utils.logging.warning_once.cache_clear()  # what others heard is said again
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(handler)
    try:
        model = hybrid_model(family) if family in HYBRIDS else random_model(family)
        target = Target(model)
        decode(target, random_head("medusa", target), PROMPTS, max_new_tokens=NEW)
        random_head("mtp", target) if family in HYBRIDS else random_head("eagle3", target)
        model.generate(
            torch.tensor(PROMPTS[:1]), attention_mask=torch.ones(1, 9), max_new_tokens=NEW,
            custom_generate=speculative(random_head("medusa", target)), do_sample=False,
        )  # fmt: skip
    finally:
        logger.removeHandler(handler)
    assert not [each for each in said if "deprecated" in each]


@pytest.mark.parametrize("family", HYBRIDS)
def test_mixers_have_the_parameters_that_are_read(family):
    mixers = [module for module in hybrid_model(family).modules() if is_mixer(module)]
    assert mixers
    for mixer in mixers:
        kind = tree_mixer(type(mixer))
        assert kind.names[0] == "hidden_states" and kind.cache_name in kind.names


def packed_rows() -> Batch:
    positions_BT = torch.tensor([[*range(7), *range(6)]])
    documents_BT = torch.tensor([[0] * 7 + [1] * 6])
    tokens_BT = torch.tensor([sum(some_prompts(7, 6), [])])
    return Batch(tokens_BT, tokens_BT >= 0, positions_BT, documents_BT)


def test_transformers_asks_for_packed_documents_by_the_name_that_is_patched(monkeypatch):
    asked: list[int] = []
    answer = getattr(masking_utils, masks.ASKED)
    monkeypatch.setattr(
        masking_utils, masks.ASKED, lambda *given: asked.append(1) or answer(*given)
    )
    target, batch = tiny_target(), packed_rows()
    target.model(batch.tokens_BT, position_ids=batch.positions_BT, use_cache=False)
    assert asked
    asked.clear()
    target.features(batch, [-1])
    assert not asked, "the host has answered"


def test_a_sharded_model_records_hidden_states(monkeypatch):
    """transformers looks them up by class, and fully_shard changes that."""

    def shard(module: nn.Module, **_: Any) -> None:
        kind = type(module)
        module.__class__ = type(f"FSDP{kind.__name__}", (kind,), {})

    monkeypatch.setattr(placement, "fully_shard", shard)
    monkeypatch.setattr(placement, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(placement.dist, "get_world_size", lambda: 1)
    target, batch = Target(random_model("llama")), packed_rows()
    expected = target.features(batch, [1, -1])
    placement._shard(target.model, CPU)
    assert type(decoder(target.model)).__name__.startswith("FSDP")
    assert torch.equal(target.features(batch, [1, -1]), expected)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
def test_torch_multiplies_by_packed_matrices_under_the_names_that_are_called():
    assert can_pack(CPU, torch.float32)
    weight_OI, x_RI = torch.randn(24, 16), torch.randn(FEW, 16)
    torch.testing.assert_close(PackedWeight(weight_OI)(x_RI), x_RI @ weight_OI.T)


def zero_sources() -> dict[str, str]:
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    return {"1 and 2": inspect.getsource(stage_1_and_2), "3": inspect.getsource(stage3)}


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("1 and 2", "self.single_partition_of_fp32_groups ="),
        ("1 and 2", "def _lazy_init_hp_params_optimizer_state(self"),
        ("1 and 2", "self.overflow ="),
        ("3", "self.fp32_partitioned_groups_flat ="),
        ("3", "self.overflow ="),
    ],
)
def test_zero_keeps_its_partitions_where_they_are_read(stage, name):
    pytest.importorskip("deepspeed")
    assert name in zero_sources()[stage]


def test_deepspeed_has_the_functions_that_gather_a_parameter():
    utils = pytest.importorskip("deepspeed").utils
    from deepspeed.runtime.zero import partition_parameters

    assert partition_parameters.register_external_parameter
    assert utils.safe_get_full_fp32_param and utils.safe_get_full_optimizer_state
    assert utils.safe_set_full_optimizer_state
    assert hasattr(transformers.integrations.deepspeed, "_hf_deepspeed_config_weak_ref")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (accelerate.hooks, "module._old_forward ="),  # a mixer's own, behind accelerate's
        (transformers.PreTrainedModel, "_commit_hash"),  # a target's revision
        (transformers.PreTrainedModel, "_supports_sdpa"),
        (transformers.PreTrainedModel, "def _initialize_weights"),
        (GenerationMixin, "_is_user_defined = True"),  # a cache that the caller has given
        (GenerationMixin, "_pad_token_tensor ="),
        (GenerationMixin, "_compile_all_devices"),  # bench's rival on a CPU
        (GenerationMixin.generate, "streamer:"),
        (GenerationMixin.generate, "assistant_model:"),
        (GenerationMixin.generate, "custom_generate:"),
    ],
)
def test_names_that_are_read_with_a_default_are_there(place, name):
    """Without these, something would be left out, and nobody told."""
    assert name in inspect.getsource(inspect.unwrap(place))
