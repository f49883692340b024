"""The promise: on a CPU, commands that show or measure speed load a target in the faster of float32
and its checkpoint's own dtype, by a short measurement, and say so; whatever learns or writes data
keeps a fixed dtype, so that no result depends on timing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tiny_chat import llama
from tiny_heads import new_head
from transformers import LlamaConfig
from typed_commands import questions

from draftheads.heads import terminal
from draftheads.heads.base import DraftHead
from draftheads.heads.cpu.linear import has_int8
from draftheads.heads.formats.hub import save_head
from draftheads.infer import load
from draftheads.infer.engine import Speculator
from draftheads.infer.measure import precision
from draftheads.infer.measure.precision import LARGEST, matrices, measured_pace, own_dtype

BFLOAT16 = "bfloat16"
needs_int8 = pytest.mark.skipif(not has_int8(), reason="torch has no int8 products for this CPU")


def config(dtype: torch.dtype | None = torch.bfloat16, **options: int) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, **options}
    return LlamaConfig(num_attention_heads=4, dtype=dtype, **sizes)


@pytest.fixture
def pace(monkeypatch):
    """Sets the seconds of each dtype; gives the dtypes that were measured."""
    asked: list[torch.dtype] = []

    def of(float32: float, other: float) -> list[torch.dtype]:
        def seconds(weights):
            asked.append(weights[0].dtype)
            return float32 if asked[-1] == torch.float32 else other

        monkeypatch.setattr(precision, "pass_seconds", seconds)
        return asked

    return of


@pytest.fixture
def stored(tmp_path) -> tuple[Path, Path]:
    """A chat target whose checkpoint is in bfloat16, and a head for it."""
    tiny, folder = llama(), tmp_path / "target"
    head = save_head(new_head("medusa", tiny, depth=2), tmp_path / "head", target=tiny)
    tiny.model.to(torch.bfloat16).save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder, head


@pytest.mark.parametrize(
    "other, dtype, line",
    [
        (0.5, BFLOAT16, "bfloat16: measured 2.0x faster than float32 here; --dtype float32 for"),
        (0.95, "float32", "float32: bfloat16 measured 1.1x as fast here; --dtype bfloat16"),
        (2.0, "float32", "float32: bfloat16 measured 0.5x as fast here; --dtype bfloat16"),
    ],
)
def test_the_faster_dtype_is_chosen_and_named(pace, other, dtype, line):
    """What is hardly faster is not worth another rounding."""
    asked = pace(1.0, other)
    found = measured_pace(config())
    assert (found.dtype, set(asked)) == (dtype, {torch.float32, torch.bfloat16})
    assert str(found).startswith(line) and "\n" not in str(found)


def test_weights_in_float32_are_rounded_only_by_choice(pace):
    pace(1.0, 0.5)
    for each in (config(torch.float32), config(None)):
        assert own_dtype(each) == torch.float32
        assert str(measured_pace(each)).startswith("float32: bfloat16 measured 2.0x as fast here")
        assert measured_pace(each, is_exact=False).dtype == BFLOAT16, "a GGUF file's are rounded"
    assert own_dtype(config()) == torch.bfloat16


def test_products_are_those_of_the_target_and_few():
    shapes = {tuple(weight.shape) for weight in matrices(config(), torch.bfloat16)}
    assert shapes == {(96, 64), (64, 96)}
    for width, inner in ((1024, 3072), (8192, 28672)):
        large = config(hidden_size=width, intermediate_size=inner, num_hidden_layers=99)
        total = sum(weight.shape.numel() for weight in matrices(large, torch.bfloat16))
        assert 0.8 * LARGEST < total <= LARGEST
    assert measured_pace(config()).gain > 0  # as it is


def test_commands_that_show_speed_choose(pace, stored, run, tmp_path, capsys, monkeypatch):
    asked = pace(1.0, 0.4)
    target, head = stored
    prompts = questions(tmp_path, 4)
    seen: list[torch.dtype] = []
    module = import_module("draftheads.infer.chat.repl")
    monkeypatch.setattr(module, "chat", lambda engine, *_, **__: seen.append(engine.target.dtype))
    assert run("chat", "--target", target)[0] == 0
    assert run("chat", "--target", target, "--dtype", "float32")[0] == 0
    assert seen == [torch.bfloat16, torch.float32]
    few = ["--max-new-tokens", 4, "--limit", 2]
    figures = tmp_path / "bench.json"
    command = ["bench", "--target", target, "--head", head, "--prompts", prompts, *few]
    code, out, _ = run(*command, "--json", figures)
    report = json.loads(figures.read_text())
    assert code == 0 and report["machine"]["dtype"] == BFLOAT16
    assert report["plain"]["lossless"] is None and "--dtype float32" in " ".join(out.split())
    doctor = ["doctor", "--target", target, "--head", head, "--prompts", prompts]
    asked.clear()
    assert run(*doctor, "--max-new-tokens", 4)[0] < 2 and asked, "it prices steps as bench does"


@pytest.mark.mend("the start of a bench said nothing for half a minute")
def test_a_bench_whose_start_takes_long_says_what_it_does(pace, stored, run, tmp_path, monkeypatch):
    pace(1.0, 0.4)
    target, head = stored
    said: list[str] = []
    with terminal.said_if_long("quick", said.append):
        pass

    class AtOnce:
        """A timer whose time has come when it starts: each block takes long."""

        def __init__(self, seconds: float, say: Callable[[str], object], words: list[str]) -> None:
            said.extend(words)
            self.start = partial(say, *words)

        def cancel(self) -> None: ...

    monkeypatch.setattr(terminal, "Timer", AtOnce)
    command = ["bench", "--target", target, "--head", head, "--limit", 2, "--max-new-tokens", 4]
    assert run(*command, "--prompts", questions(tmp_path, 4))[0] == 0
    assert said == [
        f"measuring which dtype is faster here; then {target} is loaded",
        f"loading {target}",
        "warming up; then 6 timed runs, with the time that is left",
    ]


def test_commands_that_write_data_never_measure(pace, stored, run, tmp_path):
    asked = pace(1.0, 0.1)
    target, _ = stored
    prompts = questions(tmp_path, 2)
    few = ["--max-new-tokens", 4]
    out = tmp_path / "answers"
    assert run("distill", "--target", target, "--prompts", prompts, "--out", out, *few)[0] == 0
    assert json.loads((out / "manifest.json").read_text())["target"]["dtype"] == "float32"
    assert asked == []


def test_the_measured_dtype_decodes(stored):
    """A head loaded with a target in bfloat16 drafts in it."""
    from draftheads.heads.formats.hub import load_head
    from draftheads.heads.target.model import Target

    target = Target.load(stored[0], dtype=BFLOAT16)
    head = load_head(stored[1], target=target)
    steps = list(Speculator(target, head).generate([5, 6, 7], max_new_tokens=8))
    assert next(head.parameters()).dtype == torch.bfloat16 and steps


@needs_int8
def test_bits_8_decodes_an_int8_target_in_every_command(stored, run, tmp_path, monkeypatch):
    """With float32 activations, and reports say so; 4 bits and other numbers are refused."""
    target, head = stored
    seen: list[str] = []
    module = import_module("draftheads.infer.chat.repl")
    monkeypatch.setattr(
        module, "chat", lambda engine, *_, **__: seen.append(engine.target.precision)
    )
    assert run("chat", "--target", target, "--head", head, "--bits", 8)[0] == 0
    assert seen == ["int8"]
    figures, prompts = tmp_path / "bench.json", questions(tmp_path, 4)
    few = ["--max-new-tokens", 4, "--limit", 4, "--bits", 8]
    command = ["--target", target, "--head", head, "--prompts", prompts, *few, "--json", figures]
    assert run("bench", *command)[0] == 0
    report = json.loads(figures.read_text())
    assert report["machine"]["dtype"] == "int8" and report["plain"]["lossless"] is True
    packed = DraftHead.pack
    heads: list[DraftHead] = []
    monkeypatch.setattr(DraftHead, "pack", lambda *each: heads.append(each[0]) or packed(*each))
    assert run("tune", *command, "--dry-run")[0] == 0
    assert len(heads) == 1, "tune times the head as chat decodes with it"
    assert json.loads(figures.read_text())["machine"]["dtype"] == "int8"
    for bits, line in ((4, "bits=4: expected a GPU, got a CPU"), (3, "got '3'")):
        code, _, err = run("chat", "--target", target, "--bits", bits)
        assert code == 2 and len(err) == 1 and line in err[0]


@needs_int8
def test_the_library_loads_an_int8_target(stored):
    target, head = stored
    model = load(head, target, bits=8)
    assert model.target.precision == "int8" and model.target.dtype == torch.float32
    assert model.generate("Why?", max_new_tokens=5).tokens == 5
