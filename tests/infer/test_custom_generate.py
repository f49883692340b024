"""The promise: `model.generate(custom_generate=...)` with draft heads returns what `generate`
returns without them, and refuses what it cannot.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from exact_laws import WORDS, chi_square, surely_below
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from tiny_chat import byte_tokenizer
from tiny_chat import llama as chat_target
from tiny_heads import SMALL, overfitted, random_head, written_by
from tiny_targets import (
    CONTEXT,
    MULTIMODAL,
    VOCABULARY,
    random_model,
    random_multimodal,
    some_prompts,
)
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.card import install_command
from draftheads.heads.formats.hub import save_head
from draftheads.heads.hybrid.states import cache_argument
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.generate import speculative
from draftheads.scripts.publish import prepare, publish

NEW, PAD = 31, 0
ENDS = [7, 12]
LENGTHS = (19, 11, 5)


@cache
def taught(kind: str, name: str) -> DraftHead:
    """A head that guesses some of what the target writes."""
    target = Target(random_model(name), name=f"tiny-{name}")
    text = written_by(target, some_prompts(LENGTHS[0]), NEW)
    return overfitted(kind, target, text, updates=16, **{**SMALL, "steps": 2})


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Left-padded, as tokenizers do it."""
    width = max(map(len, prompts))
    rows = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def inputs(rows: int = 3) -> dict[str, torch.Tensor]:
    return padded(some_prompts(*LENGTHS[:rows]))


GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}


class Listener(BaseStreamer):
    """Notes what a streamer is given."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


@pytest.mark.inside
@pytest.mark.parametrize("rows", [1, 3])
def test_a_streamer_hears_the_same(rows):
    model, head = random_model("llama"), taught("medusa", "llama")
    asked = {**inputs(rows), **GREEDY, "eos_token_id": ENDS}
    theirs, ours = Listener(), Listener()
    model.generate(**asked, streamer=theirs)
    model.generate(**asked, streamer=ours, custom_generate=speculative(head))
    assert ours.heard == theirs.heard
    assert ours.heard[-1] == "end"


class ByRow(StoppingCriteria):
    """Ends each row at another token, and notes what it is shown."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        return input_ids[:, -1] == torch.tensor([16, 12, 11])


@pytest.mark.inside
@pytest.mark.parametrize("eos", [[4], None], ids=["eos", "no-eos"])
def test_stopping_criteria_see_the_same_and_end_the_same(eos):
    model, head = random_model("llama"), taught("eagle3", "llama")
    theirs, ours = ByRow(), ByRow()
    asked = {**inputs(), **GREEDY, "eos_token_id": eos}
    expected = model.generate(**asked, stopping_criteria=StoppingCriteriaList([theirs]))
    got = model.generate(
        **asked, stopping_criteria=StoppingCriteriaList([ours]), custom_generate=speculative(head)
    )
    assert torch.equal(got, expected)
    assert ours.seen == theirs.seen
    assert len(ours.seen) < NEW, "the criteria must have ended it"


@pytest.fixture
def named(tmp_path):
    """A folder that is a draft model, with a head in it."""
    target = Target(random_model("llama"))
    target.model.save_pretrained(tmp_path)
    save_head(taught("medusa", "llama"), tmp_path / "medusa", target=target)
    return tmp_path


@pytest.mark.parametrize("name", ["ngram", "model:{}", "{}/medusa+ngram"])
def test_other_drafters_have_the_names_of_chat_and_bench(name, named):
    model, asked = random_model("llama"), {**inputs(), **GREEDY, "eos_token_id": ENDS}
    decoding = speculative(name.format(named))
    got = model.generate(**asked, custom_generate=decoding, return_dict_in_generate=True)
    assert torch.equal(got.sequences, model.generate(**asked))
    assert max(got.tokens_per_step) > 1


def test_max_time_ends_it():
    model, head = random_model("llama"), taught("medusa", "llama")
    asked = {**inputs(1), **GREEDY, "custom_generate": speculative(head)}
    assert model.generate(**asked, max_time=1e-9).shape[1] == LENGTHS[0] + 1
    assert model.generate(**asked, max_time=600.0).shape[1] == LENGTHS[0] + NEW


def stopped_by_a_string() -> tuple[Target, dict[str, Any], torch.Tensor]:
    """A target, what `generate` is asked, and what it writes then."""
    target, tokenizer = chat_target(), byte_tokenizer()
    asked = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    asked |= tokenizer("Tell me more", return_tensors="pt")
    whole = target.model.generate(**asked)
    letters = [text for text in map(tokenizer.decode, whole[0, 20:].tolist()) if text.isascii()]
    asked["stop_strings"] = letters[:1]
    expected = target.model.generate(**asked, tokenizer=tokenizer)
    assert expected.shape[1] < whole.shape[1]
    return target, asked, expected


def test_max_length_and_defaults_of_the_models_generation_config_are_followed():
    model, head = random_model("llama"), taught("medusa", "llama")
    model.generation_config = GenerationConfig(max_length=29, eos_token_id=ENDS[1], pad_token_id=3)
    expected = model.generate(**inputs())
    assert torch.equal(model.generate(**inputs(), custom_generate=speculative(head)), expected)
    config = GenerationConfig(max_new_tokens=5, suppress_tokens=expected[0, -6:].tolist())
    expected = model.generate(**inputs(), generation_config=config)
    got = model.generate(**inputs(), generation_config=config, custom_generate=speculative(head))
    assert torch.equal(got, expected)


@pytest.fixture(scope="module")
def six_words() -> Any:
    model = random_model("llama")
    model.resize_token_embeddings(WORDS, mean_resizing=False)
    return model


def after_the_newest(number: int, text_T: torch.Tensor) -> list[int]:
    """A constraint by text and row: no token that is far from the newest one."""
    near = [(int(text_T[-1]) + step + number) % VOCABULARY for step in (1, 2, 5)]
    assert int(text_T[-1]) != 18, "never asked for what was forbidden before"
    return [token for token in near if token != 18] or [3]


READ = {
    "prefix": {"prefix_allowed_tokens_fn": after_the_newest},
    "penalty": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 2},
    "minimum": {"min_new_tokens": 9, "eos_token_id": ENDS},
    "words": {"bad_words_ids": [[3, 4], [5], [7, 8, 9]]},
    "bias": {"sequence_bias": {(4, 6): 5.0, (8,): -3.0}},
    "ends": {"forced_eos_token_id": 4, "begin_suppress_tokens": [5, 6]},
    "length": {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": ENDS},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [1]},
}


@pytest.mark.inside
def test_a_prefix_function_is_told_the_number_of_the_prompt(six_words):
    asked: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": PAD, "eos_token_id": None}
    asked |= {"do_sample": True, "num_return_sequences": 3}
    asked["prefix_allowed_tokens_fn"] = lambda number, text_T: [number + 2]
    decoding = speculative(random_head("medusa", Target(six_words)))
    out = six_words.generate(torch.tensor([[3, 1], [4, 1]]), **asked, custom_generate=decoding)
    assert out[:, 2:].tolist() == [[2] * 4] * 3 + [[3] * 4] * 3


@pytest.mark.inside
@pytest.mark.parametrize("drafts", ["medusa", "ngram"])
@pytest.mark.parametrize("name", READ)
def test_processors_that_read_the_text_are_followed_along_each_path(name, drafts):
    model = random_model("llama")
    head = taught("medusa", "llama") if drafts == "medusa" else "ngram"
    asked = {**inputs(3), "max_new_tokens": NEW, "pad_token_id": PAD, "eos_token_id": None}
    asked |= {"do_sample": False, **READ[name]}
    plain = model.generate(**asked)
    out = model.generate(**asked, custom_generate=speculative(head), return_dict_in_generate=True)
    assert out.sequences.tolist() == plain.tolist()


RUNS, TEXT = 2000, 3
SAMPLINGS = {
    "min-p": {"temperature": 4.0, "top_k": 0, "min_p": 0.2},
    "penalty": {"temperature": 2.0, "top_k": 4, "repetition_penalty": 1.5},
    "prefix": {
        "temperature": 3.0,
        "top_k": 0,
        "prefix_allowed_tokens_fn": lambda _, text_T: [0, 2, 3, int(text_T[-1]) // 2 + 3],
    },
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_output_has_the_law_of_generate(six_words, name):
    """All texts of three tokens, their probabilities under transformers' own processors."""
    head = random_head("eagle3", Target(six_words), depth=3, nodes=6, top_k=2)
    prompt, law = torch.tensor([[3, 1, 4, 1, 5]]), {"do_sample": True, **SAMPLINGS[name]}
    texts_MA = torch.tensor(list(product(range(WORDS), repeat=TEXT)))
    scores = []
    for length in range(TEXT):  # generate's own scores, after every prefix
        rows = torch.cat([prompt.expand(len(texts_MA), -1), texts_MA[:, :length]], dim=1)
        out = six_words.generate(
            rows, attention_mask=torch.ones_like(rows), max_new_tokens=1, **law, eos_token_id=None,
            return_dict_in_generate=True, output_scores=True, pad_token_id=PAD,
        )  # fmt: skip
        scores.append(torch.softmax(out.scores[0], -1).gather(1, texts_MA[:, length : length + 1]))
    expected = dict(
        zip(map(tuple, texts_MA.tolist()), torch.cat(scores, 1).prod(1).tolist(), strict=True)
    )
    torch.manual_seed(5)
    out = six_words.generate(
        prompt, max_new_tokens=TEXT, **law, num_return_sequences=RUNS, eos_token_id=None,
        custom_generate=speculative(head), pad_token_id=PAD, return_dict_in_generate=True,
    )  # fmt: skip
    assert max(out.tokens_per_step) > 1, "drafts must be accepted for this to prove anything"
    observed = Counter(map(tuple, out.sequences[:, -TEXT:].tolist()))
    statistic, freedom = chi_square(observed, expected)
    assert statistic < surely_below(freedom)


@pytest.mark.inside
def test_return_dict_says_how_many_drafts_were_kept():
    model, head = random_model("llama"), taught("medusa", "llama")
    asked = {**inputs(), **GREEDY, "eos_token_id": ENDS}
    got = model.generate(**asked, return_dict_in_generate=True, custom_generate=speculative(head))
    expected = model.generate(**asked)
    assert torch.equal(got.sequences, expected)
    assert PAD in expected[:, LENGTHS[0] :], "a row ends before the others"
    assert len(got.tokens_per_step) == 3 and 2 < got.tokens_per_step[0] <= 5
    narrow = speculative(head, tree=StaticTree.from_widths((1,)))
    got = model.generate(**asked, return_dict_in_generate=True, custom_generate=narrow)
    assert torch.equal(got.sequences, expected) and 1 < got.tokens_per_step[0] <= 2
    assert getattr(got, cache_argument(type(model))) is None and got.scores is None


class Counting(LogitsProcessor):
    """It remembers its calls, as matchers of grammars do."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores + self.calls


REFUSED = {
    "beams": ({"num_beams": 2}, "beam_search"),
    "watermark": ({"watermarking_config": WatermarkingConfig()}, "WatermarkLogitsProcessor"),
    "own": ({"logits_processor": LogitsProcessorList([Counting()])}, "Counting"),
    "assistant": ({"assistant_model": random_model("llama")}, "assisted_generation"),
    "strings": ({"stop_strings": ["a"], "tokenizer": byte_tokenizer()}, r"speculative\(head, tok"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "positions": ({"position_ids": torch.arange(4, 9)[None]}, "position_ids"),
    "right": ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "padding_side='left'"),
    "cold": ({"do_sample": True, "temperature": 1e-44}, "temperature 1e-44: expected"),
    "twos": ({"attention_mask": torch.full((1, 5), 2)}, "position_ids that count"),
    "short": ({"attention_mask": torch.ones(1, 4)}, "position_ids that count"),
    "long": ({"max_new_tokens": 500}, "context"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_one_line(name):
    model, head = random_model("llama"), random_head("medusa", Target(random_model("llama")))
    asked, word = REFUSED[name]
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, **asked}
    with pytest.raises(ValueError, match=word) as refusal:
        model.generate(torch.tensor([[3, 4, 5, 6, 8]]), **asked, custom_generate=speculative(head))
    assert "\n" not in str(refusal.value)


SEE = sorted(MULTIMODAL.keys() - {"paligemma"})
TYPES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids", "qwen2_vl": "mm_token_type_ids"}


@pytest.mark.inside
@pytest.mark.slow
@pytest.mark.parametrize("name", SEE)
def test_multimodal_models_decode_text_as_generate_does(name):
    model = random_multimodal(name)
    prompts = [
        [token % 12 + 1 for token in row] for row in some_prompts(*LENGTHS)
    ]  # no image in it
    asked = {**padded(prompts), **GREEDY}
    if name in TYPES:  # what their processors add to a text
        asked[TYPES[name]] = torch.zeros_like(asked["input_ids"])
    head = random_head("medusa", Target(model))
    got = model.generate(**asked, custom_generate=speculative(head))
    assert torch.equal(got, model.generate(**asked))


def test_images_are_refused_and_models_that_see_ahead():
    image = {"input_ids": torch.tensor([[5, 17, 18, 18, 18, 18, 16]]), "max_new_tokens": 5}
    image["pixel_values"] = torch.zeros(1, 3, 28, 28)
    model = random_multimodal("gemma3")
    with pytest.raises(ValueError, match="got (mm_encoder_outputs|pixel_values)"):
        model.generate(**image, custom_generate=speculative(random_head("medusa", Target(model))))
    with pytest.raises(ValueError, match="PaliGemmaForConditionalGeneration.* not causal"):
        Target(random_multimodal("paligemma"))


LEARNED: dict[str, tuple[Any, str]] = {
    "prompt tuning": (PromptTuningConfig(num_virtual_tokens=4), "got inputs_embeds"),
    "p-tuning": (
        PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8),
        "got inputs_emb",
    ),
    "prefix tuning": (PrefixTuningConfig(num_virtual_tokens=4), "got (cache|past_key_values)"),
}


@pytest.mark.inside
@pytest.mark.filterwarnings("ignore:`is_gradient", "ignore:Position ids are not supported")
@pytest.mark.parametrize("name", LEARNED)
def test_prompts_that_peft_learned_are_refused(name):
    config, word = LEARNED[name]
    config.task_type = "CAUSAL_LM"
    model, head = get_peft_model(random_model("llama"), config), taught("medusa", "llama")
    with pytest.raises(ValueError, match=f"draft heads.*{word}.*PEFT"):
        model.generate(**inputs(1), **GREEDY, custom_generate=speculative(head))


@pytest.mark.inside
@pytest.mark.filterwarnings("ignore:`is_gradient")
def test_adapters_of_peft_are_decoded_as_generate_does():
    lora = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    model, head = get_peft_model(random_model("llama"), lora), taught("medusa", "llama")
    expected = model.generate(**inputs(), **GREEDY)
    assert not torch.equal(expected, random_model("llama").generate(**inputs(), **GREEDY))
    got = model.generate(**inputs(), **GREEDY, custom_generate=speculative(head))
    assert torch.equal(got, expected)


class Forgetful(LlamaForCausalLM):
    """Reads no more than the last five tokens of a prompt."""

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(input_ids[:, -5:], **kwargs)


class Rewriting(LlamaForCausalLM):
    """Reads other tokens than those of the prompt."""

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(input_ids.flip(1), **kwargs)


@pytest.mark.parametrize("kind", [Forgetful, Rewriting])
def test_models_that_do_not_read_the_prompt_as_it_is_are_refused(kind):
    model, head = random_model("llama"), taught("medusa", "llama")
    model.__class__ = kind
    with pytest.raises(ValueError, match=f"whole rows and .* or from {kind.__name__}"):
        model.generate(**inputs(1), **GREEDY, custom_generate=speculative(head))


@pytest.mark.inside
def test_prompts_that_are_not_whole_rows_of_tokens_are_refused():
    model = random_model("llama")
    asked = {"max_new_tokens": 5, "custom_generate": speculative(taught("medusa", "llama"))}
    with pytest.raises(ValueError, match="got inputs_embeds"):
        model.generate(inputs_embeds=torch.zeros(1, 4, 32), **asked)
    tokens = torch.tensor([[3, 4, 5, 6]])
    name = cache_argument(type(model))
    read = {name: getattr(model(tokens[:, :3]), name)}
    with pytest.raises(ValueError, match=f"got {name}"):
        model.generate(tokens, **read, **asked)


def test_the_callers_model_is_used_without_dropout_and_given_back_as_it_was():
    model, head = random_model("gpt2"), taught("medusa", "gpt2")
    expected = model.generate(**inputs(1), **GREEDY)
    model.train()
    model.transformer.wpe.requires_grad_(False)
    decoding = speculative(head)
    for _ in range(2):
        got = model.generate(**inputs(1), **GREEDY, custom_generate=decoding)
        assert torch.equal(got, expected)
        assert all(module.training for module in model.modules())
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        assert frozen == ["transformer.wpe.weight"]
    assert decoding.speculator.target.model is model


def test_it_goes_up_to_the_last_position_of_the_context():
    model, head = random_model("gpt2"), taught("medusa", "gpt2")
    asked = {**padded(some_prompts(CONTEXT - 9, 4)), **GREEDY, "max_new_tokens": 9}
    expected = model.generate(**asked)
    assert torch.equal(model.generate(**asked, custom_generate=speculative(head)), expected)


@pytest.mark.parametrize("prompt", ["Once", [{"role": "user", "content": "Once"}]])
def test_transformers_own_pipeline_takes_it(prompt):
    """Texts and conversations: what it gives is what it gives without drafts."""
    target = chat_target()
    generator = pipeline("text-generation", model=target.model, tokenizer=target.tokenizer)
    custom = speculative(random_head("medusa", target), tokenizer=target.tokenizer)
    options = {"max_new_tokens": NEW, "do_sample": False}
    assert generator(prompt, **options, custom_generate=custom) == generator(prompt, **options)
    assert custom.speculator is not None and custom.speculator.drafts is custom.head


@pytest.fixture
def saved(tmp_path):
    return save_head(
        taught("medusa", "llama"), tmp_path / "head", target=Target(random_model("llama"))
    )


@pytest.mark.inside
def test_a_folder_by_name(saved, modules_cache):
    model, asked = random_model("llama"), {**inputs(), **GREEDY, "eos_token_id": ENDS}
    expected, ours = model.generate(**asked), Listener()
    named = {"custom_generate": str(saved), "trust_remote_code": True}
    assert torch.equal(model.generate(**asked, **named), expected)
    got = model.generate(**asked, **named, return_dict_in_generate=True)
    assert max(got.tokens_per_step) > 1
    ids = asked.pop("input_ids")
    assert torch.equal(model.generate(ids, **asked, **named), expected)
    model.generate(ids[:1], **GREEDY, streamer=ours, **named)
    assert ours.heard[0] == ids[:1].tolist() and ours.heard[-1] == "end"
    assert len(ours.heard) == 1 + NEW + 1


def test_a_folder_is_a_head_whatever_its_name(saved, modules_cache, monkeypatch):
    saved.rename(saved.with_name("ngram"))
    monkeypatch.chdir(saved.parent)
    monkeypatch.delattr("draftheads.infer.drafters.ngram.NGram.drafter")
    model, asked = random_model("llama"), {**inputs(), **GREEDY}
    named = {"custom_generate": "ngram", "trust_remote_code": True}
    assert torch.equal(model.generate(**asked, **named), model.generate(**asked))


def test_a_repository_by_id(saved, modules_cache, hub):
    publish(prepare(saved, "me/heads-1.0"))
    model, asked = random_model("llama"), {**inputs(), **GREEDY, "eos_token_id": ENDS}
    named = {"custom_generate": "me/heads-1.0", "trust_remote_code": True}
    got = model.generate(**asked, **named, return_dict_in_generate=True)
    assert torch.equal(got.sequences, model.generate(**asked))
    assert max(got.tokens_per_step) > 1


def test_stop_strings_of_a_folder_use_the_tokenizer_that_generate_was_given(
    tmp_path, modules_cache
):
    target, asked, expected = stopped_by_a_string()
    save_head(random_head("medusa", target), tmp_path / "head", target=target)
    got = target.model.generate(
        **asked,
        tokenizer=target.tokenizer,
        custom_generate=str(tmp_path / "head"),
        trust_remote_code=True,
    )
    assert torch.equal(got, expected)


WITHOUT = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "draftheads":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=19, hidden_size=8, intermediate_size=8,
    num_hidden_layers=1, num_attention_heads=1))
try:
    model.generate(torch.tensor([[1]]), custom_generate=sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_draftheads_the_error_says_where_to_get_it(saved, tmp_path):
    environment = {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(saved)], capture_output=True, text=True, env=environment
    )
    said = done.stdout.strip()
    assert said == f"these heads need draftheads: {install_command()}", done.stderr
    assert "pip install draftheads" not in said, "which would get whatever has that name"
    assert "\n" not in said
