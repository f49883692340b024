"""The promise: llama.cpp finds in a GGUF file all that it looks for, passes over nothing, believes
what is true and drafts our chain; a file for another target is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import assert_drafts_our_chain
from emulators import Served
from emulators_llamacpp import LlamacppBlock, llamacpp
from gguf import GGUFReader, GGUFWriter, TokenType, dequantize
from plain_hydra import awake
from tiny_chat import llama
from tiny_heads import random_head
from tiny_targets import tiny_target
from trained_heads import CHOICES, forget, saved, trained

from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.formats.llamacpp import TargetFile
from draftheads.heads.layers import rotate
from draftheads.heads.target.model import Target
from draftheads.scripts.cli import main
from draftheads.scripts.convert import converted

NAMES = [name for name, (_, ways) in CHOICES.items() if "gguf" in ways]


def target_file(path: Path, target: Target, arch: str = "llama", **changes: Any) -> Path:
    """What llama.cpp's converter says of a target, without its weights."""
    config = target.config
    writer = GGUFWriter(path, arch)
    writer.add_block_count(changes.get("layers", config.num_hidden_layers))
    writer.add_context_length(128)
    writer.add_embedding_length(changes.get("hidden_size", config.hidden_size))
    tokens = changes.get("tokens") or [f"<{n}>" for n in range(config.vocab_size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-n) for n in range(len(tokens))])
    writer.add_token_types([TokenType.NORMAL] * len(tokens))
    writer.add_bos_token_id(1)
    writer.add_mask_token_id(3)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def exported(ours: Path, folder: Path, dtype: str = "auto", **choices: Any) -> Path:
    file = target_file(folder / "target.gguf", tiny_target(), **choices)
    target = TargetFile.open(file)
    return converted(ours, folder / "head.gguf", "gguf", target_file=target, dtype=dtype)


@pytest.mark.mend("convert --to gguf --dtype float16 wrote float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["eagle3-usual", "block-markov"])
def test_matrices_have_the_dtype_that_was_asked_for(tmp_path, name, dtype):
    ours = saved(name, tmp_path / "ours")
    file = GGUFReader(exported(ours, tmp_path, dtype))
    types = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    wide = [each for each in file.tensors if len(each.shape) > 1]
    assert wide and {each.tensor_type.name for each in wide} == {types[dtype]}
    assert {each.tensor_type.name for each in file.tensors} <= {types[dtype], "F32", "I64"}


@pytest.mark.parametrize(("quant", "steps"), [("q8_0", 254), ("q4_0", 15)])
@pytest.mark.parametrize("name", ["eagle3-usual", "block-markov"])
def test_matrices_are_quantised_where_their_rows_have_whole_blocks(tmp_path, name, quant, steps):
    """All but norms and those that are too narrow, to half a step of each block."""
    ours = saved(name, tmp_path / "ours")
    (tmp_path / "small").mkdir()
    whole, file = (
        GGUFReader(exported(ours, folder, dtype))
        for folder, dtype in ((tmp_path, "float32"), (tmp_path / "small", quant))
    )
    kinds = set()
    for right, found in zip(whole.tensors, file.tensors, strict=True):
        kinds.add(found.tensor_type.name)
        is_whole = len(right.shape) > 1 and right.shape[0] % 32 == 0 and right.name != "d2t"
        assert (found.tensor_type.name == quant.upper()) == is_whole, right.name
        if is_whole:
            blocks = right.data.reshape(-1, 32)
            error = abs(dequantize(found.data, found.tensor_type).reshape(-1, 32) - blocks)
            assert (error.max(1) <= 2.2 * abs(blocks).max(1) / steps).all(), right.name
    assert quant.upper() in kinds


def complete(head: Served) -> bool:
    return head.uninitialised == set() and head.dropped == set()


@pytest.mark.parametrize("name", NAMES)
def test_llamacpp_finds_all_and_believes_what_is_true(tmp_path, name):
    ours = saved(name, tmp_path / "ours")
    head, facts = load_head(ours, target=tiny_target()), {}
    found = llamacpp(exported(ours, tmp_path))
    assert complete(found)
    assert tuple(found.facts["aux"]) == head.feature_layers
    assert found.facts["ids"] == (None if head.token_map is None else head.token_map.tolist())
    assert found.facts["window"] == head.window
    half = head.design.shape.head_dim // 2
    powers = torch.arange(half) / half
    frequencies = head.rope.theta**-powers / found.facts["factors"]
    torch.testing.assert_close(frequencies, head.rope.frequencies[:half])
    assert found.facts["attention_factor"] == pytest.approx(head.rope.attention_factor)
    if head.kind == "eagle3":
        facts = {key: getattr(head.design, key) for key in found.facts["switches"]}
        assert found.facts["switches"] == facts
    else:
        design = head.design
        said = ("anchored", "slots", "mask", "causal")
        real = (design.sample_from_anchor, design.block_size, design.mask_token, False)
        assert tuple(found.facts[key] for key in said) == real


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("block")])
@torch.no_grad()
def test_it_drafts_our_chain(tmp_path, name):
    target = tiny_target()
    head = awake(trained(name)).eval()
    found = llamacpp(exported(save_head(head, tmp_path / "ours", target=target), tmp_path))
    embed_VD = target.model.get_input_embeddings().weight
    plain = LlamacppBlock(found, embed_VD, target.unembed_weight())
    assert_drafts_our_chain(plain, head, target)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("eagle3")])
@torch.no_grad()
def test_neighbours_are_rotated_as_our_halves_are(tmp_path, name):
    """And all other matrices are ours."""
    ours = saved(name, tmp_path / "ours")
    head, found = load_head(ours, target=tiny_target()), llamacpp(exported(ours, tmp_path))
    width = head.design.shape.head_dim
    turned = {}
    positions_1T = torch.arange(7)[None]
    for each in "qk":
        x_TI = torch.randn(7, 2 * head.design.shape.hidden_size, generator=torch.manual_seed(0))
        mine_HTW = getattr(head.midlayer.self_attn, f"{each}_proj")(x_TI).unflatten(1, (-1, width))
        mine = rotate(mine_HTW.transpose(0, 1)[None], head.rope(positions_1T))[0]
        weight = found.loaded.pop(f"layers.0.self_attn.{each}_proj.weight")
        pairs_HTW2 = (x_TI @ weight.T).unflatten(1, (-1, width // 2, 2)).transpose(0, 1)
        angles_TW = positions_1T[0, :, None] * head.rope.frequencies[: width // 2]
        turns = torch.polar(torch.ones_like(angles_TW), angles_TW) * head.rope.attention_factor
        theirs = torch.view_as_complex(pairs_HTW2.contiguous()) * turns
        turned[each] = mine, theirs
    groups = len(turned["q"][0]) // len(turned["k"][0])
    mine_HTT = turned["q"][0] @ turned["k"][0].repeat_interleave(groups, 0).mT
    keys = turned["k"][1].repeat_interleave(groups, 0)
    torch.testing.assert_close((turned["q"][1] @ keys.mH).real, mine_HTT, rtol=1e-4, atol=1e-4)
    state = {name.replace("midlayer", "layers.0"): each for name, each in head.state_dict().items()}
    assert all(torch.equal(state[name], each) for name, each in found.loaded.items())


def test_the_tokenizer_is_the_targets_but_for_the_mask(tmp_path):
    file = exported(saved("block-markov", tmp_path / "ours"), tmp_path)
    theirs, ours = (
        {
            name: field.contents()
            for name, field in GGUFReader(path).fields.items()
            if name.startswith("tokenizer.")
        }
        for path in (tmp_path / "target.gguf", file)
    )
    assert len(theirs) == 7
    assert ours == theirs | {"tokenizer.ggml.mask_token_id": 7}


def test_a_confidence_head_reads_a_code_that_it_passes_over(tmp_path):
    ours = saved("block-state", tmp_path / "ours")
    found = llamacpp(exported(ours, tmp_path))
    weight_1D = load_head(ours).confidence_head["proj"].weight
    read = found.loaded["confidence_head.proj.weight"]
    assert torch.equal(read[:, : weight_1D.shape[1]], weight_1D)
    assert read.shape[1] > weight_1D.shape[1]
    assert not read[:, weight_1D.shape[1] :].any()


def test_matrices_keep_their_dtype_and_norms_are_float32(tmp_path):
    for dtype, kind in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        folder = tmp_path / kind
        head = trained("eagle3", feature_layers=[2, 2, 2]).to(dtype)
        ours = save_head(head, folder / "ours", target=tiny_target())
        file = exported(ours, folder)
        kinds = {each.name: each.tensor_type.name for each in GGUFReader(file).tensors}
        assert {kinds["fc.weight"], kinds["output.weight"]} == {kind}
        assert kinds["output_norm.weight"] == "F32"
        assert torch.equal(llamacpp(file).loaded["fc.weight"], head.fc.weight.float())


def test_gemma_scales_what_it_embeds(tmp_path):
    ours = saved("block-markov", tmp_path / "ours")
    config = json.loads((ours / "config.json").read_text())
    config["draftheads"]["target"]["architecture"] = "Gemma4ForCausalLM"
    (ours / "config.json").write_text(json.dumps(config))
    file = exported(ours, tmp_path, arch="gemma4")
    assert llamacpp(file).facts["scale"] == pytest.approx(tiny_target().hidden_size ** 0.5)


def test_a_head_of_another_layout_takes_its_layers_from_the_file(tmp_path):
    theirs = converted(saved("eagle3-usual", tmp_path / "ours"), tmp_path / "theirs", "vllm")
    forget(theirs)
    assert complete(llamacpp(exported(theirs, tmp_path)))


def test_the_card_says_how_to_serve_it(tmp_path):
    card = (saved("eagle3-usual", tmp_path / "ours") / "README.md").read_text()
    assert "head.gguf --to gguf --target target.gguf" in card
    assert "--spec-type draft-eagle3 --spec-draft-n-max" in card
    assert "a chain of 3 took as long as 5.0 plain tokens on one core in Q4_1" in card


def test_another_target_is_refused_and_nothing_is_written(tmp_path):
    ours = saved("eagle3-usual", tmp_path / "ours")
    with pytest.raises(ValueError, match="got .17, .* pass the target this head was"):
        exported(ours, tmp_path, hidden_size=17)
    with pytest.raises(ValueError, match="19, 3.*got .*19, 9. in"):
        exported(ours, tmp_path, layers=9)
    with pytest.raises(ValueError, match="--to gguf needs --target FILE"):
        converted(ours, tmp_path / "head.gguf", "gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "target.gguf"}


@pytest.mark.mend("GGUF of another target")
@pytest.mark.parametrize(
    ("model", "arch", "is_other"),
    [
        ("LlamaForCausalLM", "llama", False),
        ("LlamaForCausalLM", "qwen3", True),
        ("Qwen3ForCausalLM", "llama", True),
        ("GptOssForCausalLM", "gpt-oss", False),
        ("Gemma3ForConditionalGeneration", "gemma3", False),
        ("GPT2LMHeadModel", "gpt2", False),
        ("MistralForCausalLM", "llama", False),  # llama.cpp has no name for it
        (None, "qwen3", False),  # a head of an earlier version
    ],
)
def test_a_target_of_equal_sizes_and_another_architecture_is_refused(
    tmp_path, model, arch, is_other
):
    ours = saved("eagle3-usual", tmp_path / "ours")
    config = json.loads((ours / "config.json").read_text())
    config["draftheads"]["target"]["architecture"] = model
    (ours / "config.json").write_text(json.dumps(config))
    if not is_other:
        assert exported(ours, tmp_path, arch=arch).is_file()
        return
    with pytest.raises(ValueError, match=f"expected a target of architecture .*, got {arch} in"):
        exported(ours, tmp_path, arch=arch)
    assert not (tmp_path / "head.gguf").exists()


@pytest.mark.mend("GGUF of another tokenizer")
def test_a_target_of_equal_sizes_and_other_tokens_is_refused(tmp_path):
    """Where the target that the head records is on this machine."""
    tiny = llama()
    tiny.model.save_pretrained(tmp_path / "target")
    tiny.tokenizer.save_pretrained(tmp_path / "target")
    target = Target.load(tmp_path / "target")
    head = random_head("eagle3", target, feature_layers=[1, 1, 1])
    ours = save_head(head, tmp_path / "ours", target=target)
    tokens = target.tokenizer.convert_ids_to_tokens(list(range(target.vocab_size)))
    known = [token or f"[PAD{place}]" for place, token in enumerate(tokens)]
    for name, words, is_other in (
        ("same", known, False),
        ("one rewritten", [*known[:-1], "<other>"], False),
        ("turned", known[::-1], True),
        ("another", [f"<{place}>" for place in range(len(known))], True),
    ):
        file = TargetFile.open(target_file(tmp_path / f"{name}.gguf", target, tokens=words))
        out = tmp_path / f"{name}-head.gguf"
        if is_other:
            with pytest.raises(
                ValueError, match=r"expected a target of tokens \[.*\] \(.*\), got \["
            ) as no:
                converted(ours, out, "gguf", target_file=file)
            assert "\n" not in str(no.value)
        else:
            converted(ours, out, "gguf", target_file=file)
        assert out.exists() != is_other


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    ours = saved("eagle3-usual", tmp_path / "ours")

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    file = TargetFile.open(target_file(tmp_path / "target.gguf", tiny_target()))
    monkeypatch.setattr(GGUFWriter, "write_tensors_to_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        converted(ours, tmp_path / "head.gguf", "gguf", target_file=file)
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "target.gguf"}


@pytest.mark.mend("a cut GGUF file of a target")
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("target.gguf", ""),
        ("ours/config.json", "config.json: expected a model"),
        ("cut.gguf", "cut.gguf is no whole GGUF file"),
        ("ours", "got a draft head; pass it as --head"),
    ],
)
def test_the_command_takes_the_targets_file(tmp_path, monkeypatch, capsys, target, said):
    ours, out = saved("eagle3-usual", tmp_path / "ours"), tmp_path / "head.gguf"
    target_file(tmp_path / "target.gguf", tiny_target())
    whole = (tmp_path / "target.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:24])
    place = ["--target", str(tmp_path / target)]
    monkeypatch.setattr(
        "sys.argv", ["draftheads", "convert", str(ours), str(out), "--to", "gguf", *place]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == (2 if said else 0)
    line = said or "next: the llama-server command in "
    assert line in printed.err and printed.err.count("\n") == 1
    assert (printed.out == f"{out}\n") == out.is_file() == (not said)
