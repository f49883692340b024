"""The promise: the embedded demo target loads, is small, ends its answers, and knows what it was
taught.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FOLDER = RECIPES / "demo-target"
MAX_BYTES = 8_000_000

TELLING_WORDS = [
    ("What does os.path.join do?", ["pathname", "components", "inserting"]),
    ("What does len do?", ["number of items", "container"]),
    ("Explain sorted.", ["`sorted`", "new list", "ascending"]),
    ("What does json.dumps do?", ["Serialize", "JSON", "str"]),
    ("What does str.upper do?", ["copy of the string", "uppercase"]),
    ("What is the signature of os.path.join?", ["os.path.join(a, *p)"]),
    ("How do I import itertools.chain?", ["from itertools import chain"]),
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def greedy_tokens(model, tokenizer, questions):
    """The answer's token ids to the last of `questions`, each earlier one answered in turn."""
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.inference_mode():
            tokens_BT = model.generate(**inputs, max_new_tokens=160)
        answer_T = tokens_BT[0, inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(answer_T, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
    return answer_T.tolist()


def prompts(name):
    lines = (RECIPES / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def test_weights_are_small_and_compute_in_fp32(model):
    assert (FOLDER / "model.safetensors").stat().st_size <= MAX_BYTES
    assert model.dtype == torch.float32
    assert 2_000_000 < sum(weight.numel() for weight in model.parameters()) < 4_000_000


def test_tokenizer_and_model_agree(model, tokenizer):
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    text = "naïve `os.path.join`\n\té ☃"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_template_renders_and_marks_what_the_assistant_wrote(tokenizer):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert rendered == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n")
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt)
    row = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    marked = [
        token for token, mine in zip(row["input_ids"], row["assistant_masks"], strict=True) if mine
    ]
    assert tokenizer.decode(marked) == "Hello!<|im_end|>"


@pytest.mark.parametrize(("question", "words"), TELLING_WORDS)
def test_answers_well_known_questions_and_stops(model, tokenizer, question, words):
    answer_T = greedy_tokens(model, tokenizer, [question])
    assert answer_T[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(answer_T, skip_special_tokens=True)
    assert all(word in text for word in words), text


def test_follows_up_in_a_second_turn(model, tokenizer):
    answer_T = greedy_tokens(
        model, tokenizer, ["What does textwrap.shorten do?", "And its signature?"]
    )
    assert "textwrap.shorten(text, width" in tokenizer.decode(answer_T)


def test_held_out_questions_are_not_among_the_prompts():
    asked, held_out = prompts("demo-prompts.jsonl"), prompts("demo-heldout.jsonl")
    assert 2000 <= len(asked) <= 3000
    assert len(held_out) == 64
    assert all([message["role"] for message in chat] == ["user"] for chat in asked + held_out)
    assert not [chat for chat in held_out if chat in asked]
