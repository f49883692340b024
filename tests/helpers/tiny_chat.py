"""A tiny chat target, questions for it, and eyes on what `distill` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from draftheads.heads.target.model import Decoded, Target
from draftheads.train.data.answers import columns, journals, read_ids, read_manifest
from draftheads.train.data.distill import DistillOptions
from draftheads.train.data.prompts import Prompt
from draftheads.train.data.shards import Shard, read_batch

CONTEXT = 256
END = 258
WORDS = ["once", "upon", "a", "time", "the", "end", "was", "abcdef"]  # the last for stop strings
EOS = (
    END,
    *range(0, 256, 9),
)  # so many end tokens that answers of a random model have many lengths
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = re.compile(r"<\|\w+\|?>|<\w+\|>|</?seed:\w+>|\[/?\w+\]|</?think>")


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, and the three tokens of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.chat_template = template
    return wrapped


def stand_in(template: str) -> PreTrainedTokenizerFast:
    """A token for each byte, and one for each of the template's marks."""
    tokenizer = byte_tokenizer(template)
    names = sorted({name for name in SPECIAL.findall(template) if name != "[loop]"})
    tokenizer.backend_tokenizer.add_special_tokens([*names, "<|user|>", "<|assistant|>"])
    tokenizer.bos_token = "<s>"
    return tokenizer


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: a word has its space in front, and decoding drops the first one."""
    words = ["<unk>", *(f"▁{word}" for word in WORDS), *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def llama(eos: tuple[int, ...] = EOS, template: str | None = TEMPLATE) -> Target:
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    model.generation_config = GenerationConfig(eos_token_id=list(eos) or None)
    return Target(model, byte_tokenizer(template), name="tiny-llama")


def saved(target: Target, folder: Path) -> Path:
    """Write a target to a folder."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def prompts(count: int, turns: int = 1) -> list[Prompt]:
    """Questions of many lengths, every third one plain text."""
    made = []
    for index in range(count):
        content = f"question {index}" * (1 + index % 4)
        if index % 3 == 2:
            made.append(Prompt(index, text=content))
        else:
            messages = [{"role": "user", "content": f"{content}, {t}"} for t in range(turns)]
            made.append(Prompt(index, messages=tuple(messages)))
    return made


def options(out: Path, **changes: Any) -> DistillOptions:
    chosen = {"out": out, "temperature": 1.0, "max_new_tokens": 12, "batch_size": 4}
    return DistillOptions(**chosen | changes)


def on_call(target: Target, act: Callable[[int, int], None]) -> list[int]:
    """Run `act(call number, prompts)` before prompts are read; returns the growing list of their
    numbers.
    """
    calls: list[int] = []

    def prefill_chunks(
        prompts: Sequence[Sequence[int]], *more: Any
    ) -> Iterator[tuple[int, Decoded]]:
        calls.append(len(prompts))
        act(len(calls) - 1, len(prompts))
        return type(target).prefill_chunks(target, prompts, *more)

    target.__dict__["prefill_chunks"] = prefill_chunks
    return calls


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of all prompts that are asked, in order; ids as the places of the prompts. A line
    that was cut is left out.
    """
    lines = [x for path in journals(folder) for x in path.read_bytes().splitlines(keepends=True)]
    found = [json.loads(line) for line in lines if line.endswith(b"\n")]
    for row in (row for path in columns(folder) for row in read_batch(path).to_pylist()):
        document = {key: row[key] for key in ("tokens", "learn", "turns", "finish")}
        if row["follows"]:
            last = found[-1]
            first = {key: last.pop(key) for key in document if key in last}
            last["documents"] = [*last.get("documents", [first]), document]
            continue
        record = {"id": row["id"]} | (document if row["turns"] else {})
        record |= [row["reason"].split(": ", 1)] if row["reason"] else []
        record |= {"retokenized": row["retokenized"]} if row["retokenized"] else {}
        found.append(record)
    if found and isinstance(found[0]["id"], str):
        places = {name: place for place, name in enumerate(read_ids(folder, read_manifest(folder)))}
        known = [record for record in found if record["id"] in places]
        found = [record | {"id": places[record["id"]]} for record in known]
    return sorted(found, key=lambda record: record["id"])


def shuffled(path: Path) -> None:
    """Other token ids, all in the vocabulary, in a file of the same size."""
    content = bytearray(path.read_bytes())
    tokens = Shard(read_batch(path)).tokens_N.copy()
    at = bytes(content).index(tokens.tobytes())
    content[at : at + tokens.nbytes] = np.random.default_rng(0).permutation(tokens).tobytes()
    path.write_bytes(content)
