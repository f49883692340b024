"""A target that recites words, whose tokens are not pieces of text."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftheads.heads.target.model import Target

WORDS = ["▁Once", "▁upon", "▁a", "▁time", "▁there", "▁was", "▁", ",", "Lily"]
CHARACTERS = "é世😀"


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: words with a space in front, bytes for other characters, and a decoder that
    drops the first space.
    """
    pieces = ["<unk>", "<s>", *WORDS, *(f"<0x{byte:02X}>" for byte in CHARACTERS.encode())]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def reciting_model(vocabulary: int, layers: int = 1) -> LlamaForCausalLM:
    """After each token comes the one of the next id: words, then characters byte by byte."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, 32))
        model.lm_head.weight.copy_(20.0 * torch.eye(vocabulary, 32).roll(1, dims=0))
    model.generation_config = GenerationConfig()
    return model.eval()


def saved_target(folder: Path, layers: int = 1) -> Target:
    """A target that recites, whose tokens are not pieces of text, written to a folder."""
    tokenizer = sentencepiece_tokenizer()
    reciting_model(len(tokenizer), layers=layers).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target.load(folder)
