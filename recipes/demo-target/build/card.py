"""The demo target's model card: what it is, how it was measured, and what it really answers."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from chats import WHAT, Message
from corpus import Corpus
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

WELL_KNOWN = (
    "What does os.path.join do?",
    "What does len do?",
    "Explain sorted.",
    "What does json.dumps do?",
)
FOLLOW_UP = ("What does shutil.copytree do?", "And its signature?", "How do I import it?")
ROWS_PER_BATCH = 64

CARD = """---
language: en
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
pipeline_tag: text-generation
library_name: transformers
---

# demo-target

A chat model of {parameters:.1f} M parameters that answers questions about Python's standard
library. It exists so that `make demo` can distill, train and measure draft heads in minutes, on a
CPU, without downloading anything. It is a stock `LlamaForCausalLM`: everything that works on it
works the same way on a large model.

| | |
| --- | --- |
| architecture | Llama: {layers} layers, width {width}, {heads} heads ({kv_heads} key-value), tied \
embeddings |
| tokenizer | byte-level BPE, {vocabulary} entries, ChatML-like template with `generation` markers |
| weights | {megabytes:.1f} MB, stored in bf16; `config.json` says `float32`, so they are computed \
in fp32 |
| context | {context} tokens; trained on conversations of at most 512 |
| training | {done} of {steps} steps, {tokens:.1f} M tokens, seed {seed}, \
{minutes:.0f} minutes with 2 threads of a shared CPU ({cpu_minutes:.0f} CPU minutes) |
| final loss | {loss:.3f} nats per answer token (mean of the last 100 steps) |
| recall | {recall:.0%} of {entries} docstring summaries come back word for word (greedy) |

## Data and licence

The text is the docstrings of Python {python}'s standard library ({entries} modules, functions,
classes and methods), gathered by `inspect` from the Python that runs the build, and put into
templated questions and answers. That text is part of Python: Copyright (c) 2001-2024 Python
Software Foundation, licence PSF-2.0, and so are the answers that the weights have learned. The
code that builds the model is Apache-2.0. Nothing else was used.

## Rebuild

    python recipes/demo-target/build/build.py --out recipes/demo-target

writes this folder and, next to it, `demo-prompts.jsonl` (to distill from) and `demo-heldout.jsonl`
(other questions about the same functions, to measure with). The same seed and Python version give
the same prompts and tokenizer; another machine or Python version gives slightly different weights.

## What it answers

Greedy decoding, copied by the build from the stored weights.

{samples}

## Limits

* It recites. It knows the first sentences of docstrings, signatures, modules and import lines of
  {entries} names, and nothing else: no code, no reasoning, no other language.
* Signatures and "where is" questions are right less often than summaries: neighbours get mixed up
  (`os.makedirs` answered as `os.removedirs`).
* A name that it does not know, or an unusual way of asking, often gets the docstring of another
  function. It does not reliably say that it does not know.
* Its next token is far easier to predict than a real model's, so draft heads look better on it than
  they will on your model. Use it to see that everything works, never to compare methods.
"""


@dataclass(frozen=True)
class Facts:
    """What the training run measured."""

    done: int  # optimizer steps
    steps: int  # of the whole plan
    seed: int
    loss: float  # nats per answer token
    seconds: float  # wall time of training
    cpu_seconds: float  # of all threads together
    tokens: int  # padding included


def answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, chats: list[list[Message]]
) -> list[str]:
    """Greedy answers to conversations that end with a user turn."""
    texts: list[str] = []
    for start in range(0, len(chats), ROWS_PER_BATCH):
        inputs = tokenizer.apply_chat_template(
            chats[start : start + ROWS_PER_BATCH],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
            tokenizer_kwargs={"padding_side": "left"},
        )
        with torch.inference_mode():
            tokens_BT = model.generate(**inputs, max_new_tokens=192)
        prompt_length = inputs["input_ids"].shape[1]
        texts += tokenizer.batch_decode(tokens_BT[:, prompt_length:], skip_special_tokens=True)
    return texts


def recall(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, corpus: Corpus) -> float:
    """The share of entries whose summary is answered word for word."""
    questions = [[_user(WHAT.opening[0].format(q=entry.name))] for entry in corpus.entries]
    told = answers(model, tokenizer, questions)
    pairs = zip(told, corpus.entries, strict=True)
    return sum(text == entry.summary for text, entry in pairs) / len(told)


def write_card(
    folder: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    held_out: list[str],
    facts: Facts,
) -> None:
    """Ask the stored model, and write `README.md` into its folder."""
    config = model.config
    card = CARD.format(
        parameters=sum(weight.numel() for weight in model.parameters()) / 1e6,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        done=facts.done,
        steps=facts.steps,
        tokens=facts.tokens / 1e6,
        seed=facts.seed,
        minutes=facts.seconds / 60,
        cpu_minutes=facts.cpu_seconds / 60,
        loss=facts.loss,
        recall=recall(model, tokenizer, corpus),
        entries=len(corpus.entries),
        python=platform.python_version(),
        samples="\n\n".join(_samples(model, tokenizer, held_out)),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _samples(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, held_out: list[str]
) -> Iterator[str]:
    for title, questions in (("Well known", WELL_KNOWN), ("Held out", held_out[:4])):
        yield f"{title}:"
        texts = answers(model, tokenizer, [[_user(question)] for question in questions])
        for question, text in zip(questions, texts, strict=True):
            yield _quoted(question, text)
    yield "One conversation:"
    chat: list[Message] = []
    for question in FOLLOW_UP:
        chat.append(_user(question))
        text = answers(model, tokenizer, [chat])[0]
        chat.append({"role": "assistant", "content": text})
        yield _quoted(question, text)


def _quoted(question: str, text: str) -> str:
    return f"> **{question}**\n>\n> {text}"


def _user(question: str) -> Message:
    return {"role": "user", "content": question}
