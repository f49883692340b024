"""The promise: quantised checkpoints are read, or the package that reads them is named."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import decode, random_head
from tiny_targets import random_model, some_prompts

from draftheads.heads.cpu.linear import has_int8
from draftheads.heads.target.model import Target

NEW = 12


def stored(folder: Path, method: dict[str, Any]) -> Path:
    """A checkpoint whose config names this method; its weights are not yet quantised."""
    random_model("llama").to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return folder


@pytest.fixture
def fp8(tmp_path) -> Path:
    """Layers in FP8, with a scale for each block of 16 by 16."""
    method = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    folder = stored(tmp_path / "fp8", method)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            blocks = tensor.float().unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
            scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            numbers = blocks / scales[:, None, :, None]
            tensors[name] = numbers.view(tensor.shape).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in FP8")
def test_fp8_is_dequantised_on_a_cpu(fp8):
    """To whatever dtype is asked for; and then it is a target like others."""
    plain = random_model("llama")
    prompts = some_prompts(9, 5)
    for dtype in ("auto", "bfloat16"):
        target = Target.load(fp8, dtype=dtype)
        assert target.precision == ("float32" if dtype == "auto" else dtype)
        for name, weight in target.model.named_parameters():
            error = (weight.float() - plain.get_parameter(name)).abs().max()
            assert error <= 0.07 * plain.get_parameter(name).abs().max()
    target = Target.load(fp8).pack(8 if has_int8() else None)
    expected = decode(target, None, prompts, max_new_tokens=NEW)[0]
    head = random_head("medusa", target)
    assert decode(target, head, prompts, max_new_tokens=NEW)[0] == expected


@pytest.mark.parametrize(
    "package, method",
    [
        ("optimum", {"quant_method": "gptq", "bits": 4, "group_size": 16}),
        ("gptqmodel", {"quant_method": "awq", "bits": 4, "group_size": 16}),
        ("compressed_tensors", {"quant_method": "compressed-tensors"}),
    ],
)
def test_the_package_that_reads_it_is_named(tmp_path, package, method):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(
        ValueError, match=r"expected the package that reads it, found none: .*pip install"
    ) as raised:
        Target.load(stored(tmp_path / "target", method))
    assert "damaged" not in str(raised.value) and "\n" not in str(raised.value)
