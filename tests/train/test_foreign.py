"""The promise: a folder that speculators or SpecForge wrote trains the head that our own features
would have trained, and one that is damaged, or does not fit, trains nothing.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import (
    VOCABULARY,
    assert_same,
    random_answers,
    recipe_of,
    tiny_config,
    tiny_recipe,
    weights,
    written,
)
from transformers import LlamaForCausalLM

from draftheads.heads.batch import Batch
from draftheads.heads.formats.hub import open_head
from draftheads.heads.target.model import Target
from draftheads.recipes import find_recipe
from draftheads.train import loop
from draftheads.train.advice.plan import make_plan
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer, read_answers
from draftheads.train.data.foreign import open_foreign
from draftheads.train.features.foreign import ForeignStates, file_features
from draftheads.train.features.states import StateChecks, StateLayout
from draftheads.train.medusa import fit
from draftheads.train.metrics import read_metrics

HIDDEN, LAYERS = 32, 8
CAPTURED = [2, 4, 5, 8]
"""What both toolkits capture of a target of eight layers."""
PYTHON = os.environ.get("DRAFTHEADS_SPECULATORS") or (
    sys.executable if find_spec("speculators") else ""
)
"""A Python with speculators."""


def deep_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(LAYERS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
        model.model.norm.weight.uniform_(0.5, 4.0)  # to apply it twice is not to apply it once
    return model.eval()


@cache
def answers() -> list[Answer]:
    """What the model wrote."""
    return written(deep_model(), random_answers(24))


def masks(answer: Answer) -> list[int]:
    learned = {place for start, stop in answer.learn for place in range(start, stop)}
    return [int(place in learned) for place in range(len(answer.tokens))]


@torch.no_grad()
def states_of(model: LlamaForCausalLM, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' own states (T, L, H): the last before the final norm; and after it (T, H)."""
    before = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    chosen = [out.hidden_states[layer][0] for layer in CAPTURED[:-1]]
    return torch.stack([*chosen, before[0][0]], dim=1), out.hidden_states[-1][0]


def write_arrow(folder: Path, answers: list[Answer]) -> None:
    """As `prepare-data` saves its rows, in two files."""
    datasets = pytest.importorskip("datasets")
    rows = [
        {"input_ids": a.tokens, "loss_mask": masks(a), "seq_len": len(a.tokens)} for a in answers
    ]
    table = datasets.Dataset.from_list(rows)
    table.set_format("torch")
    table.save_to_disk(folder, num_shards=2)


def write_hidden_states(folder: Path, model: LlamaForCausalLM) -> None:
    """As `generate-offline-data` leaves them, in the order in which `datasets` reads the rows."""
    datasets = pytest.importorskip("datasets")
    (folder / "hidden_states").mkdir()
    for row, line in enumerate(datasets.load_from_disk(folder)["input_ids"]):
        states, _ = states_of(model, line.tolist())
        content = {"token_ids": line, "hidden_states": states}
        save_file(content, folder / "hidden_states" / f"hs_{row}.safetensors")


def write_specforge(folder: Path, answers: list[Answer], model: LlamaForCausalLM) -> None:
    """Twelve files are in the first folder; every second is compressed."""
    for number, answer in enumerate(answers):
        states, last = states_of(model, answer.tokens)
        content = {
            "input_ids": torch.tensor(answer.tokens),
            "loss_mask": torch.tensor(masks(answer)),
            "aux_hidden_state": states[:, :-1].flatten(1)[None],
            "hidden_state": last[None],
        }
        part = folder / ("rows_0-12" if number < 12 else "rows_12-24")
        part.mkdir(parents=True, exist_ok=True)
        file = part / f"data_{number}.ckpt"
        torch.save(content, file)
        if number % 2:
            Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes()))
            file.unlink()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """`target`, and the same documents as `speculators` and `specforge`."""
    folder = tmp_path_factory.mktemp("foreign")
    model = deep_model()
    model.save_pretrained(folder / "target")
    write_arrow(folder / "speculators", answers())
    write_hidden_states(folder / "speculators", model)
    write_specforge(folder / "specforge", answers(), model)
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    """A folder of links, of which files can be replaced."""
    for path in folder.rglob("*"):
        if path.is_file():
            (to / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, to / path.relative_to(folder))
    return to


def recipe(made: Path, data: Path, output: Path, kind: str = "eagle3", **features: Any):
    values = tiny_recipe(made, kind, output=str(output), tokens_per_step=128)
    values["data"]["path"] = str(data)
    values["features"] = features
    return recipe_of(values)


def losses(*args: Any, **kwargs: Any) -> list[float]:
    choices = recipe(*args, **kwargs)
    fit(choices)
    return [line["loss"] for line in read_metrics(choices.run.output) if "loss" in line]


def forbid_forwards(monkeypatch) -> None:
    """But for the first tokens of one document, with which their states are compared."""
    real = Target.features

    def forward(target: Target, batch: Batch, layers: Sequence[int]) -> torch.Tensor:
        assert len(layers) == LAYERS + 1 and len(batch.tokens_BT) == 1, "the target ran"
        return real(target, batch, layers)

    monkeypatch.setattr(Target, "features", forward)


def line_of(made: Path, data: Path, output: Path, **features: Any) -> str:
    """The error of a run that must not take a step."""
    with pytest.raises(ValueError) as error:
        fit(recipe(made, data, output, **{"mode": "cached", **features}))
    assert not read_metrics(output)
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize("toolkit", ["speculators", "specforge"])
def test_the_documents_are_read_as_they_were_written(made, toolkit):
    assert list(read_answers(made / toolkit)) == answers()


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("toolkit", ["speculators", "specforge"])
def test_their_states_train_as_ours_do(made, tmp_path, monkeypatch, toolkit, kind):
    online = losses(made, made / toolkit, tmp_path / "online", kind)
    forbid_forwards(monkeypatch)
    cached = losses(made, made / toolkit, tmp_path / "cached", kind, mode="cached")
    assert len(online) == 6 and online[-1] < online[0]
    assert cached == pytest.approx(online, rel=1e-4)
    data = open_head(tmp_path / "cached").facts.training["data"]
    assert data["prompts"]["source"].lower() == f"{toolkit} folder {made / toolkit}".lower()


@pytest.mark.skipif(not PYTHON, reason="speculators is not installed: set DRAFTHEADS_SPECULATORS")
def test_a_folder_of_speculators_own_prepare_data(made, tmp_path, monkeypatch):
    lines = [{"input_ids": a.tokens, "loss_mask": masks(a)} for a in answers()]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = find_recipe("demo-medusa").parent / "demo-target"
    command = [PYTHON, "-m", "speculators", "prepare-data", "--model", str(tokenizer)]
    command += ["--data", str(rows), "--output", str(tmp_path / "data")]
    command += ["--num-preprocessing-workers", "1"]
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=os.environ | home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    documents = [answer.tokens for answer in read_answers(tmp_path / "data")]
    assert sorted(documents) == sorted(answer.tokens for answer in answers())
    assert documents != [answer.tokens for answer in answers()], "it shuffles"
    write_hidden_states(tmp_path / "data", deep_model())
    online = losses(made, tmp_path / "data", tmp_path / "online")
    forbid_forwards(monkeypatch)
    cached = losses(made, tmp_path / "data", tmp_path / "cached", mode="cached")
    assert cached == pytest.approx(online, rel=1e-4)


@pytest.mark.parametrize("toolkit", ["speculators", "specforge"])
def test_a_piece_of_a_long_document_has_the_states_of_the_document(tmp_path, toolkit):
    model = deep_model()
    long = Answer(random_answers(9)[8].tokens * 3, [(1, 20)])
    long = Answer(long.tokens, [(1, len(long.tokens))])
    answers = written(model, [long, *random_answers(3)])
    if toolkit == "speculators":
        write_arrow(tmp_path / "data", answers)
        write_hidden_states(tmp_path / "data", model)
    else:
        write_specforge(tmp_path / "data", answers, model)
    target = Target(model, name="deep")
    documents = Documents.open(tmp_path / "data", VOCABULARY, "deep")
    rows = Rows(documents, documents.spans, 16, pack=True, seed=0)
    assert rows.cut > 1
    folder = open_foreign(tmp_path / "data")
    sizes = [len(answer.tokens) for answer in answers]
    captured = StateLayout(target, CAPTURED, [2, -1], is_normed=toolkit == "specforge")
    place = folder.path / folder.place
    read = ForeignStates(folder, place, sizes, HIDDEN, StateChecks(captured))
    numbers = list(range(len(rows)))
    features_BTD = file_features(captured, rows, read)(numbers, rows.batch(numbers))
    before = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    for number in numbers:
        place = 0
        for start, stop in rows.pieces(number):
            [document] = documents.numbers(torch.tensor([start]).numpy()).tolist()
            states, last = states_of(model, answers[document].tokens)
            whole = torch.cat([states[:, 0], last], dim=-1)
            first = start - before[document]
            wanted = whole[first : first + stop - start - 1]
            piece = features_BTD[number, place : place + stop - start]
            assert not piece[0].any()
            torch.testing.assert_close(piece[1:], wanted, rtol=1e-5, atol=1e-5)
            place += stop - start


def test_a_run_resumes_bit_for_bit(made, tmp_path, monkeypatch):
    """After a step that was saved, with other features.path and order of reading."""
    data = made / "speculators"
    losses(made, data, tmp_path / "whole", mode="cached")
    real = loop.train_step

    def interrupt(run, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", interrupt)
        outcome = fit(recipe(made, data, tmp_path / "parts", mode="cached"))
    assert outcome.step == 3
    moved = copy_of(data / "hidden_states", tmp_path / "moved")
    losses(made, data, tmp_path / "parts", mode="cached", path=str(moved))
    assert_same(weights(tmp_path / "whole", 6), weights(tmp_path / "parts", 6))


def test_states_of_other_layers_are_not_resumed_with(made, tmp_path):
    fit(recipe(made, made / "speculators", tmp_path / "run", mode="cached"))
    line = line_of_resumed(made, made / "speculators", tmp_path / "run", layers=[2, 4, 6])
    assert "features.layers" in line


def line_of_resumed(made: Path, data: Path, output: Path, **features: Any) -> str:
    with pytest.raises(ValueError) as error:
        fit(recipe(made, data, output, mode="cached", **features))
    return str(error.value)


def test_missing_states_are_counted_before_the_first_step(made, tmp_path):
    data = copy_of(made / "speculators", tmp_path / "data")
    for row in (7, 11, 19):
        (data / "hidden_states" / f"hs_{row}.safetensors").unlink()
    line = line_of(made, data, tmp_path / "run")
    assert "24 documents, got none for 3, first hs_7.safetensors" in line
    assert "`speculators generate-offline-data`" in line
    line = line_of(made, made / "speculators", tmp_path / "run", path=str(tmp_path / "nowhere"))
    assert "got none for 24" in line
    line = line_of(made, made / "specforge", tmp_path / "run", path=str(tmp_path / "nowhere"))
    assert "first data_0.ckpt; run `scripts/prepare_hidden_states.py`" in line


def without(name: str):
    return lambda content: {key: value for key, value in content.items() if key != name}


def changed(name: str, change):
    return lambda content: content | {name: change(content[name]).contiguous()}


def poisoned(states: torch.Tensor) -> torch.Tensor:
    states = states.clone()
    states[..., -1, 0] = torch.nan
    return states


WRONG: dict[str, tuple[Any, str]] = {
    "other tokens": (changed("token_ids", lambda ids: (ids + 1) % 97), "token ids of another"),
    "fewer tokens": (changed("token_ids", lambda ids: ids[:-1]), "token ids of another"),
    "fewer states": (changed("hidden_states", lambda s: s[:-1]), r"states of \d+ tokens for \d+"),
    "more states": (changed("hidden_states", lambda s: torch.cat([s, s])), r"states of \d+ tokens"),
    "fewer layers": (
        changed("hidden_states", lambda s: s[:, 1:]),
        r"expected 4 states .* set features\.layers",
    ),
    "another width": (
        changed("hidden_states", lambda s: s[..., 1:]),
        r"of width 32 for \d+ tokens",
    ),
    "integers": (changed("hidden_states", lambda s: s.to(torch.int32)), r"torch\.int32"),
    "float8": (changed("hidden_states", lambda s: s.to(torch.float8_e4m3fn)), "float8_e4m3fn"),
    "NaN": (changed("hidden_states", poisoned), "NaN or infinity"),
    "no ids": (without("token_ids"), "token_ids"),
    "no states": (without("hidden_states"), "hidden_states"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_states_that_do_not_fit_are_refused(made, tmp_path, fault):
    change, reason = WRONG[fault]
    data = copy_of(made / "speculators", tmp_path / "data")
    for file in (data / "hidden_states").iterdir():
        content = change(load_file(file))
        file.unlink()
        save_file(content, file)
    line = line_of(made, data, tmp_path / "run")
    assert str(data / "hidden_states" / "hs_") in line
    assert "`speculators generate-offline-data`" in line
    with pytest.raises(ValueError, match=reason):
        raise ValueError(line)


LAST: dict[str, Any] = {
    "noise": lambda s: torch.randn_like(s) * s.std(),
    "nothing": torch.zeros_like,
    "of the next token": lambda s: torch.cat([s[:1], s[1:].roll(-1, 0)]),
}


@pytest.mark.parametrize("name", LAST)
def test_last_states_that_do_not_predict_the_answers_are_refused(made, tmp_path, name):
    torch.manual_seed(0)
    data = copy_of(made / "speculators", tmp_path / "data")
    for file in sorted((data / "hidden_states").iterdir()):
        if file.name != "hs_0.safetensors":  # which is compared with the target's own
            content = load_file(file)
            content["hidden_states"][:, -1] = LAST[name](content["hidden_states"][:, -1])
            file.unlink()
            save_file(content, file)
    # threads read the files, so documents that begin alike may be compared before
    found = r"hs_\d+\.safetensors: expected (last states that predict|the states that the same)"
    with pytest.raises(ValueError, match=found):
        fit(recipe(made, data, tmp_path / "run", mode="cached"))


def test_states_of_other_layers_are_refused(made, tmp_path):
    chosen = recipe(
        made, made / "speculators", tmp_path / "run", "medusa", mode="cached", layers=[2, 3, 5]
    )
    with pytest.raises(ValueError, match=r"hs_0\.safetensors: expected state 3 .*\(state 4: 0%\)"):
        fit(chosen)


def test_states_of_another_model_are_refused(made, tmp_path):
    data = copy_of(made / "speculators", tmp_path / "data")
    for file in (data / "hidden_states").iterdir():
        content = load_file(file)
        content["hidden_states"][:, 1] += content["hidden_states"][:, 1].roll(1, -1)
        file.unlink()
        save_file(content, file)
    assert "expected state 4" in line_of(made, data, tmp_path / "run")


@pytest.mark.parametrize("left", [0, 5, 200, -1])
def test_a_truncated_file_is_named(made, tmp_path, left):
    for toolkit, names in (("speculators", "hs_*"), ("specforge", "rows_*/data_*")):
        data = copy_of(made / toolkit, tmp_path / toolkit)
        folder = data / "hidden_states" if toolkit == "speculators" else data
        for file in folder.glob(names):
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(content[:left])
        line = line_of(made, data, tmp_path / "run")
        assert line.startswith(str(folder)) and "copy it again" in line


SPECFORGE: dict[str, tuple[Any, str]] = {
    "fewer layers": (changed("aux_hidden_state", lambda s: s[..., :-HIDDEN]), "layers"),
    "another width": (changed("aux_hidden_state", lambda s: s[..., 1:]), "invalid for input"),
    "fewer states": (changed("hidden_state", lambda s: s[:, 1:]), "must match"),
    "NaN": (changed("hidden_state", poisoned), "NaN"),
    "no aux": (without("aux_hidden_state"), "aux_hidden_state"),
    "no states": (without("hidden_state"), "hidden_state"),
    "no mask": (without("loss_mask"), "loss_mask"),
    "another mask": (changed("loss_mask", lambda mask: mask + 1), "zeros and ones"),
    "a longer mask": (changed("loss_mask", lambda mask: torch.cat([mask, mask])), "zeros and"),
    "no tensor": (lambda content: content | {"input_ids": [1, 2]}, "flatten"),
    "a list": (lambda content: list(content.values()), "list"),
}


@pytest.mark.parametrize("fault", SPECFORGE)
def test_files_of_specforge_that_do_not_fit_are_refused(made, tmp_path, fault):
    change, reason = SPECFORGE[fault]
    data = copy_of(made / "specforge", tmp_path / "data")
    for file in data.glob("rows_*/data_*.ckpt"):
        content = change(torch.load(file, weights_only=True))
        file.unlink()
        torch.save(content, file)
    line = line_of(made, data, tmp_path / "run")
    assert "data_" in line and reason in line


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(
    made, tmp_path, monkeypatch, compressed
):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    data = copy_of(made / "specforge", tmp_path / "data")
    file = data / "rows_0-12" / "data_4.ckpt"
    content = torch.load(file, weights_only=True) | {"bomb": Bomb()}
    file.unlink()
    torch.save(content, file)
    if compressed:
        Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    line = line_of(made, data, tmp_path / "run")
    assert "data_4.ckpt" in line and "more than tensors, which was not loaded" in line
    assert "weights_only" not in line, "no advice to run it"
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "token, reason",
    [(VOCABULARY, f"below {VOCABULARY}"), (-1, "token ids from -1"), (1 << 40, "token ids from")],
)
def test_ids_outside_the_vocabulary_are_refused(made, tmp_path, token, reason):
    write_arrow(tmp_path / "data", [*answers(), Answer([1, 2, token, 3], [(1, 4)])])
    assert reason in line_of(made, tmp_path / "data", tmp_path / "run")
    assert reason in line_of(made, tmp_path / "data", tmp_path / "run", mode="online")


FILES = '{"_data_files": %s}'


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", FILES % "[{}]", FILES % 1, FILES % '[{"filename": 5}]']
)
def test_a_damaged_list_of_files_is_named(made, tmp_path, content):
    data = copy_of(made / "speculators", tmp_path / "data")
    (data / "state.json").unlink()
    (data / "state.json").write_text(content)
    assert "state.json" in line_of(made, data, tmp_path / "run")


def test_a_damaged_data_set_is_named(made, tmp_path):
    data = copy_of(made / "speculators", tmp_path / "data")
    [first, second] = sorted(data.glob("*.arrow"))
    content = first.read_bytes()
    first.unlink()
    first.write_bytes(content[:1000])
    assert str(first) in line_of(made, data, tmp_path / "run")
    first.write_bytes(content)
    second.unlink()
    assert str(second) in line_of(made, data, tmp_path / "run")


def test_another_data_set_is_refused(made, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": "Hello"}]).save_to_disk(tmp_path / "data")
    assert "input_ids" in line_of(made, tmp_path / "data", tmp_path / "run")


@pytest.mark.parametrize(
    "layers, reason",
    [
        ([2, 4, 9], "from 0 to 8 of"),
        ([-1, 4, 5], "ascending, got [-1, 4, 5, 8]; set features.layers"),
        ([2, 4, 6], "got [2, 4, 6, 8]; capture [5], too"),
        ([2, 4, 5, 6], "expected 5 states [2, 4, 5, 6, 8] of width 32"),
    ],
)
def test_layers_that_do_not_fit_are_refused(made, tmp_path, layers, reason):
    assert reason in line_of(made, made / "speculators", tmp_path / "run", layers=layers)


def test_the_last_layer_is_named_or_not(made, tmp_path):
    for toolkit in ("speculators", "specforge"):
        runs = [
            losses(made, made / toolkit, tmp_path / f"{toolkit}{n}", mode="cached", layers=layers)
            for n, layers in enumerate([None, [2, 4, 5], [8, 5, 4, 2]])
        ]
        assert runs[0] == runs[1] == runs[2]


def test_a_run_says_what_its_data_are(made, tmp_path, capsys):
    losses(made, made / "speculators", tmp_path / "run", mode="cached")
    printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).split())
    assert f"data: a speculators folder {made / 'speculators'}" in text
    assert "cannot be checked" in text


@pytest.mark.parametrize("toolkit", ["speculators", "specforge"])
def test_a_plan_counts_no_features_to_write(made, tmp_path, toolkit):
    plan = make_plan(recipe(made, made / toolkit, tmp_path / "run", mode="cached"), probe=False)
    assert plan.work.rows and not plan.work.stores


def test_neither_data_set_nor_features_is_the_error_of_before(made, tmp_path):
    (tmp_path / "data").mkdir()
    assert "expected a distillation folder" in line_of(made, tmp_path / "data", tmp_path / "run")
