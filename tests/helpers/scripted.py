"""A target that follows a script: a random Llama of one layer whose logits are the script's.

What was said so far is read from the cache: values of the layer are the bits of the token ids, and
the mask says which slots a node sees. A wrong slot, mask or draft therefore changes the text.

Legend: B batch, S cache slots, C columns of logits, D feature width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pydoc_data.topics import topics
from typing import Any

import torch
from calling import HERMES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftheads.heads.hybrid.states import cache_argument
from draftheads.heads.target.model import Target

CONTEXT = 1 << 16
VOCABULARY = 8192
WIDTH = 32
BITS = 13
START, END = "<|im_start|>", "<|im_end|>"
HEADER = f"{START}assistant\n"
RESULT = f"{START}tool\n"
CACHE = cache_argument(LlamaForCausalLM)
Script = Callable[[str], str]
"""The text of a conversation, up to the header of an answer -> the answer."""


def call(name: str, **arguments: Any) -> str:
    """A call of a tool, in the form of HERMES."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on what Python's help says: about three characters for a token."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    wrapped.chat_template = HERMES
    return wrapped


class ScriptedLlama(LlamaForCausalLM):
    """Logits are 1 for the script's next token, and 0 for all others."""

    tokenizer: Any
    script: Script

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: Any = 0,
        **options: Any,
    ) -> Any:
        cache = options.get(CACHE)
        before = cache.get_seq_length() if cache is not None else 0
        out = super().forward(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            logits_to_keep=logits_to_keep,
            **options,
        )
        if cache is None:
            return out
        nodes = input_ids.shape[1]
        columns_C = torch.arange(nodes)
        if isinstance(logits_to_keep, Tensor):
            columns_C = logits_to_keep
        slots_S = torch.arange(before + nodes)
        bits_BSD = cache.layers[0].values[:, 0, : len(slots_S), :BITS] > 0
        ids_BS = (bits_BSD << torch.arange(BITS)).sum(-1)
        out.logits.zero_()
        for row, ids_S in enumerate(ids_BS):
            for place, node in enumerate(columns_C.tolist()):
                is_seen_S = slots_S <= before + node
                if attention_mask is not None:
                    is_seen_S = attention_mask[row, 0, node] == 0
                next_token = self.next_token(ids_S[is_seen_S].tolist())
                out.logits[row, place, next_token] = 1.0
        return out

    def next_token(self, text: list[int]) -> int:
        """The script's token after a text; END if the text has left the script."""
        start, *header = self.tokenizer.encode(HEADER)
        end = self.tokenizer.eos_token_id
        if start not in text:
            return end
        place = len(text) - text[::-1].index(start) + len(header)
        answer = self.answer(tuple(text[:place]))
        said = text[place:]
        if answer[: len(said)] != said or len(said) == len(answer):
            return end
        return answer[len(said)]

    @lru_cache(maxsize=64)  # noqa: B019 - it lives as long as the test
    def answer(self, prompt: tuple[int, ...]) -> list[int]:
        """The script's answer to a prompt, as token ids."""
        ids: list[int] = self.tokenizer.encode(self.script(self.tokenizer.decode(prompt)))
        return ids


def scripted_target(script: Script) -> Target:
    """A target with `CONTEXT` tokens of context whose answers are the script's."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = ScriptedLlama(config)
    places_V1 = torch.arange(VOCABULARY)[:, None]
    bits_VD = places_V1 >> torch.arange(BITS) & 1
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings.fill_(1.0)
        # the norm before the layer leaves numbers of size 1 as they are
        embeddings[:, :BITS] = 2.0 * bits_VD - 1.0
        model.model.layers[0].self_attn.v_proj.weight.copy_(torch.eye(WIDTH))
    tokenizer = word_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.tokenizer, model.script = tokenizer, script
    return Target(model, tokenizer, name="scripted")
