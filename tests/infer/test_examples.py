"""The promise: the Python code of the README and of every model card prints the text that the
target wrote. It is run here as it stands, on targets whose tokens are not pieces of text.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny_heads import random_head
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftheads.heads import Target, save_head
from draftheads.heads.formats.card import HERE

README = Path(__file__).parents[2] / "README.md"
WORDS = ["▁Once", "▁upon", "▁a", "▁time", "▁there", "▁was", "▁", ",", "Lily"]
CHARACTERS = "é世😀"
NEW_TOKENS = 100


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


def reciting_model(vocabulary: int) -> LlamaForCausalLM:
    """After each token comes the one of the next id: words, then characters byte by byte."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=8,
        num_hidden_layers=1,
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


@pytest.fixture(params=["own", "stories260K"])
def head(request, tmp_path) -> tuple[Path, Target]:
    """A head folder and its target, beside it."""
    if request.param == "own":
        tokenizer = sentencepiece_tokenizer()
        reciting_model(len(tokenizer)).save_pretrained(tmp_path / "target")
        tokenizer.save_pretrained(tmp_path / "target")
        target = Target.load(tmp_path / "target")
    else:
        target = Target.load(request.getfixturevalue("stories"))
    save_head(random_head("medusa", target, depth=2), tmp_path / "head", target=target)
    return tmp_path / "head", target


def python_blocks(text: str) -> list[str]:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"Sampled\(.*\)", "None", block) for block in blocks]  # to know its text


def written(target: Target) -> tuple[str, str]:
    """The example's prompt as it is decoded, and the text that `generate` writes after it."""
    inputs = target.tokenizer("Once upon a time", return_tensors="pt")
    out = target.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    [prompt], [whole] = (
        target.tokenizer.batch_decode(ids, skip_special_tokens=True)
        for ids in (inputs["input_ids"], out)
    )
    return prompt, whole[len(prompt) :]


def test_the_readmes_example_prints_what_the_target_wrote(head, capsys):
    folder, target = head
    [example] = python_blocks(README.read_text())
    assert "out/qwen" in example
    exec(example.replace("out/qwen", str(folder)), {})
    assert capsys.readouterr().out == written(target)[1]


def test_the_cards_examples_print_what_the_target_wrote(head, capsys):
    folder, target = head
    prompt, text = written(target)
    card = (folder / "README.md").read_text().replace(HERE, str(folder))
    ours, *transformers = python_blocks(card.replace("TARGET_FOLDER", str(target.name)))
    exec(ours, {})
    assert capsys.readouterr().out == text
    exec("\n".join(transformers), {})
    assert capsys.readouterr().out == f"{prompt}{text}\n" * 2


def test_what_the_examples_write_tells_right_from_wrong():
    """Decoded step by step, the text of the reciting target loses spaces and characters."""
    tokenizer = sentencepiece_tokenizer()
    ids = list(range(2, len(tokenizer)))
    whole = tokenizer.decode(ids)
    assert whole == f"Once upon a time there was ,Lily{CHARACTERS}"
    assert "".join(tokenizer.decode([token]) for token in ids) != whole
