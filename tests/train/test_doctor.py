"""The promise: `draftheads doctor` names the fault that was planted first, and calls a healthy head
healthy.

The faults are planted in heads that know their target's answers by heart, in their folders, in the
data or in the target.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Planted, PlantedEngine
from safetensors.torch import load_file, save_file
from served import running
from tiny_chat import TEMPLATE, byte_tokenizer, llama
from tiny_heads import overfitted, random_head, written_by
from tiny_targets import is_packed
from tiny_training import write_answers

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.formats.facts import HeadFacts
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.layers import Rope
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree
from draftheads.infer.engine import Speculator
from draftheads.infer.remote import ServerOptions
from draftheads.infer.serve.service import ServeOptions
from draftheads.scripts import cli
from draftheads.train.advice.bounds import bounds, by_context
from draftheads.train.advice.doctor import Evidence, Finding
from draftheads.train.advice.engine import first_difference
from draftheads.train.data.answers import Answer
from draftheads.train.data.server import ServedTarget
from draftheads.train.evaluate import calibrate

pytestmark = pytest.mark.slow

QUESTIONS = ["apples 1", "bees, 22", "a cat? 3", "dogs: 44", "eels = 5", "6 flies!"]
NEW, DEPTH = 50, 4
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"depth": DEPTH, "nodes": 16},
    "sequential": {"depth": DEPTH, "nodes": 8, "rank": 32, "prefix": True, "lm_head": "shared"},
    "eagle3": {"depth": DEPTH, "nodes": 16, "top_k": 3, "steps": 5, "feature_layers": [0, 2]},
    "eagle": {"depth": DEPTH, "nodes": 16, "top_k": 3, "steps": 5},
    "block": {"block_size": DEPTH, "nodes": 16, "feature_layers": [0, 1], "mask": 256},
}
UPDATES = {"medusa": 60, "sequential": 40, "eagle3": 50, "eagle": 100, "block": 40}


@dataclass(frozen=True)
class Bench:
    """What lies ready: a target, in memory and in its folder, and what it answers."""

    folder: Path
    target: Target
    texts: Batch

    @property
    def prompts(self) -> list[list[int]]:
        """The questions, as token ids."""
        rows = zip(self.texts.tokens_BT, self.texts.loss_mask_BT, strict=True)
        return [tokens_T[: int(mask_T.nonzero()[0])].tolist() for tokens_T, mask_T in rows]

    @property
    def words(self) -> list[int]:
        """All tokens of the answers."""
        return sorted(set(self.texts.tokens_BT[self.texts.loss_mask_BT].tolist()))


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    folder = tmp_path_factory.mktemp("doctor")
    target = llama(eos=())
    save_target(target, folder / "target")
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [
        target.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for messages in asked
    ]
    bench = Bench(folder, target, written_by(target, prompts, NEW))
    write_data(bench, bench.texts, folder / "data")
    return bench


def save_target(target: Target, folder: Path) -> Path:
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def write_data(bench: Bench, texts: Batch, folder: Path) -> Path:
    """A distillation folder of these rows; their first learned token may be anywhere."""
    answers = []
    for tokens, learn in zip(texts.tokens_BT, texts.loss_mask_BT, strict=True):
        places = learn.nonzero().flatten().tolist()
        spans = [(places[0], places[-1] + 1)] if places else []
        answers.append(Answer(tokens.tolist(), spans))
    return write_answers(folder, answers, bench.target.fingerprint())


def by_heart(bench: Bench, kind: str, texts: Batch | None = None, **choices: Any) -> DraftHead:
    chosen = {"updates": UPDATES[kind], **KINDS[kind], **choices}
    return overfitted(kind, bench.target, texts or bench.texts, **chosen)


def save(
    bench: Bench, drafts: DraftHead, folder: Path, *, fit_tree: bool = True, **recipe: Any
) -> Path:
    """The head with the facts that training would have recorded."""
    with torch.no_grad():
        features = bench.target.features(bench.texts, drafts.feature_layers)
        ranks_MK = drafts.token_ranks(bench.texts, features, bench.target)
    found = calibrate(ranks_MK, drafts.tree.draft_nodes, drafts.tree)
    drafts.tree = found.tree if fit_tree else drafts.tree
    facts = {
        "predicted_tokens_per_step": found.tokens_per_step,
        "heldout_top1": found.top1,
        "recipe": {"data": {"path": str(bench.folder / "data")}, **recipe},
    }
    return save_head(drafts, folder, target=bench.target, training=facts)


@pytest.fixture(scope="module")
def good(bench) -> dict[str, Path]:
    """A head of each kind that knows the answers by heart."""
    more = {
        "eagle3": {"vocabulary": bench.words, "rope_theta": 500000.0},
        "block": {"vocabulary": bench.words},
    }
    return {
        kind: save(bench, by_heart(bench, kind, **more.get(kind, {})), bench.folder / kind)
        for kind in KINDS
    }


@pytest.fixture
def examine(bench, tmp_path, monkeypatch, capsys):
    """Type the command; gives (exit code, what --json wrote, what was printed)."""

    # how fast this machine is belongs to tests of their own
    monkeypatch.setattr(Evidence, "break_even", 1.0)

    def typed(head: Path, *options: object, **changed: object) -> tuple[int, Any, str]:
        out = tmp_path / "found.json"
        words = {"--target": bench.folder / "target", "--head": head, "--json": out}
        words["--max-new-tokens"] = 24
        words |= {f"--{name}": value for name, value in changed.items()}
        line = [str(word) for pair in words.items() for word in pair if pair[1] is not None]
        monkeypatch.setattr(sys, "argv", ["draftheads", "doctor", *line, *map(str, options)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        found = json.loads(out.read_text()) if out.exists() else None
        return int(stopped.value.code or 0), found, captured.out + captured.err

    return typed


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_head_is_called_healthy(examine, good, kind):
    code, found, printed = examine(good[kind])
    assert found["findings"] == [], printed
    assert code == 0 and found["healthy"] and "healthy" in printed
    assert "next: draftheads chat --target" in printed
    assert found["measured"] > 3


def test_bounds_are_those_of_a_head_in_which_one_thing_is_better():
    """After ten roots, depth 1 is right seven times and depth 2 three times of these. Depth 2 would
    be right once more as often as depth 1 is there, and three tokens more are out of vocabulary.
    """
    ranks_TK = torch.tensor([[0, 0], [0, -1], [-1, -1]] * 4)
    ranks_TK[0, 1] = -1
    unknown_TK = torch.tensor([[False, False], [False, True], [False, False]] * 4)
    texts, unknown = [ranks_TK, ranks_TK[:2]], [unknown_TK, unknown_TK[:2]]
    found = bounds(StaticTree(((0,), (0, 0))), texts, unknown)
    assert (found.nodes, found.tokens, found.oracle) == (2, 10, 3.0)
    assert found.tree == pytest.approx(1 + (7 + 3) / 10)
    assert found.vocabulary == pytest.approx(1 + (7 + 6) / 10)
    assert found.depths == pytest.approx(1 + (7 + 4) / 10)


def test_context_is_divided_where_there_are_steps():
    contexts = [10] * 40 + [300] * 31 + [2000] * 50
    assert by_context(contexts, [2] * 71 + [1] * 50) == {256: 3.0, 4096: 2.0}


@pytest.mark.mend("doctor from another folder")
def test_the_training_data_is_found_from_any_folder(examine, bench, good, monkeypatch, tmp_path):
    """A recipe's path is relative to the folder of the training, which is one above the run's."""
    monkeypatch.chdir(tmp_path)
    copy = bench.folder / "out" / "run" / "best"
    shutil.copytree(good["medusa"], copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    config["draftheads"]["training"]["recipe"]["data"]["path"] = "data"
    (copy / "config.json").write_text(json.dumps(config))
    code, found, printed = examine(copy)
    assert code == 0 and found["healthy"], printed
    config["draftheads"]["training"]["recipe"]["data"]["path"] = "moved"
    (copy / "config.json").write_text(json.dumps(config))
    code, _, printed = examine(copy)
    assert code == 2 and f"moved, is neither here nor in a folder above {copy}; give" in printed


@pytest.mark.mend("doctor and speed")
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_head_slower_than_none_is_not_healthy(examine, good, monkeypatch, kind):
    """However right its drafts are: the verdict counts what a step costs."""
    monkeypatch.setattr(Evidence, "break_even", 9.0)
    code, found, printed = examine(good[kind], **{"max-new-tokens": 48})
    assert code == 1 and not found["healthy"] and found["break_even"] == 9.0
    assert [finding["check"] for finding in found["findings"]] == ["speed"]
    assert "speed: slower than without drafts" in printed
    assert "a step costs 9.00 plain ones" in printed and "draftheads tune" in printed


def test_what_a_step_costs_is_measured(bench, good):
    target = bench.target
    head = load_head(good["medusa"], target=target)
    evidence = Evidence(target, head, HeadFacts({}), [[5, 6, 7], [8, 9]], new_tokens=24)
    assert evidence.break_even > 0.0
    assert len(evidence.decoded.seconds) == len(evidence.decoded.accepted)
    plain = evidence.decode(evidence.openings, drafts=False)
    assert plain.tokens_per_step == 1.0 and plain.answers == evidence.decoded.answers


def test_a_head_that_training_left_too_early_is_not_healthy(examine, bench, tmp_path):
    """Although it is as good as training recorded."""
    drafts = by_heart(bench, "medusa", updates=12, depth=2, nodes=4)
    code, found, printed = examine(save(bench, drafts, tmp_path / "head"))
    assert found["expected"] < 2.0, found["expected"]
    assert code == 1 and [each["check"] for each in found["findings"]] == ["undertrained"], printed
    assert "train longer" in printed


@pytest.mark.mend("heads of little training called trained on shifted pairs")
@pytest.mark.parametrize("kind", ["medusa", "sequential"])
def test_little_training_is_no_shift(examine, bench, tmp_path, kind):
    """Such heads are near the target's lm_head, and the next state holds the answer."""
    folder = save(bench, by_heart(bench, kind, updates=2), tmp_path / "head")
    code, found, printed = examine(folder)
    assert code == 1 and "shifted" not in printed
    assert first((code, found, printed)) in ("undertrained", "weights")


@pytest.mark.mend("doctor priced steps of unpacked weights")
def test_a_step_is_priced_as_decoding_takes_it(examine, good, monkeypatch):
    """With the packed weights and the threads of bench and chat."""
    seen = []

    def priced(evidence: Evidence) -> float:
        seen[:] = [is_packed(evidence.target.model), is_packed(evidence.head)]
        return 1.0

    monkeypatch.setattr("draftheads.heads.cpu.linear.LEAST", 0)
    monkeypatch.setattr(Evidence, "break_even", property(priced))
    examine(good["medusa"])
    assert seen == [True, True]


def first(result: tuple[int, Any, str]) -> str:
    """The first finding; it must be printed, and the exit code must say so."""
    code, found, printed = result
    assert code == 1, printed
    finding = found["findings"][0]
    assert f"{finding['check']}: " in printed and "next: " in printed
    return str(finding["check"])


def plant_layers(config, layers) -> None:
    config["draftheads"]["feature_layers"] = layers


def features_swapped(config, tensors) -> None:
    plant_layers(config, [2, 0])


def a_matrix_left_at_zero(config, tensors) -> None:
    tensors["fc.weight"].zero_()


def another_mask(config, tensors) -> None:
    config["mask_token_id"] = 65


SHORT = {"unexplained"}
IN_THE_FOLDER = [
    ("eagle3", features_swapped, SHORT, "feature layers"),
    ("eagle3", a_matrix_left_at_zero, {"weights"}, "use an earlier checkpoint"),
    ("block", another_mask, SHORT, "mask_token_id"),
]


@pytest.mark.parametrize(
    ("kind", "fault", "checks", "advice"), IN_THE_FOLDER, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_fault_in_the_folder_is_named_first(examine, good, tmp_path, kind, fault, checks, advice):
    folder = Path(shutil.copytree(good[kind], tmp_path / "head"))
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    fault(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    _, found, _ = result = examine(folder)
    assert first(result) in checks
    assert advice in found["findings"][0]["advice"]


def test_other_weights_of_the_target_are_named_first(examine, good, tmp_path):
    other = llama(eos=())
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))
    code, found, printed = result = examine(
        good["medusa"], target=save_target(other, tmp_path / "target")
    )
    assert first(result) == "target"


@pytest.mark.parametrize("form", ["{% set _ = 1 %}You are kind.\n", "<s>"])
def test_another_template_is_named_first(examine, bench, good, tmp_path, form):
    """A system prompt that the data has not, and a BOS that it has not."""
    folder = Path(shutil.copytree(bench.folder / "target", tmp_path / "target"))
    template = form + bench.target.tokenizer.chat_template
    byte_tokenizer(template).save_pretrained(folder)
    assert first(examine(good["medusa"], target=folder)) == "template"


@pytest.mark.parametrize(("kind", "check"), [("medusa", "weights"), ("eagle", "undertrained")])
def test_an_untrained_head_is_named_first(examine, bench, tmp_path, kind, check):
    head = random_head(kind, bench.target)
    if kind == "medusa":
        for parameter in head.blocks.parameters():
            parameter.data.zero_()
    assert (
        first(
            examine(
                save_head(head, tmp_path / "head", target=bench.target), data=bench.folder / "data"
            )
        )
        == check
    )


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_small_draft_vocabulary_is_named_first(examine, bench, tmp_path, kind):
    head = by_heart(bench, kind, vocabulary=bench.words[::2])
    _, found, printed = result = examine(save(bench, head, tmp_path / "head"))
    assert first(result) == "draft vocabulary"
    assert found["bounds"]["vocabulary"] > found["bounds"]["tree"] + 0.5
    assert f"{found['bounds']['vocabulary']:5.2f}  and no token outside" in printed


def test_prompts_of_another_kind_are_named_first(examine, good, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n * n} {n}"}) + "\n" for n in range(9)))
    assert first(examine(good["medusa"], prompts=prompts)) == "use"


def test_a_mistake_gets_one_line(examine, bench, tmp_path):
    head = random_head("medusa", bench.target)
    folder = save_head(head, tmp_path / "head", target=bench.target)
    code, found, printed = examine(folder)
    assert code == 2 and found is None
    assert "give --prompts or --data" in printed and len(printed.splitlines()) == 1


# ---------------------------------------------------------------- a serving engine beside ours


@pytest.fixture
def compare(bench):
    """compare(head, **planted): the first finding of an engine with these faults, beside this
    head, if any.
    """

    def compared(own: DraftHead, **planted: Any) -> Finding | None:
        evidence = Evidence(bench.target, own, HeadFacts({}), bench.prompts, new_tokens=NEW)
        faults = {"target": bench.target, "head": own, "chain": own.depth} | planted
        server = PlantedEngine(Planted(**faults))
        try:
            served = ServedTarget(str(bench.folder / "target"), ServerOptions(urls=[server.url]))
            return first_difference(evidence, served)
        finally:
            server.close()

    return compared


@pytest.mark.parametrize("kind", [*KINDS, "mtp"])
def test_a_head_that_an_engine_runs_as_we_do_is_healthy(compare, bench, good, kind):
    choices = {"depth": DEPTH, "nodes": 16, "top_k": 3, "steps": 5, "updates": 60}
    if kind == "mtp":
        head = overfitted(kind, bench.target, bench.texts, **choices)
    else:
        head = load_head(good[kind], target=bench.target)
    assert compare(head) is None


@pytest.mark.parametrize("planted", [{"ids": False}, {"prefix": "llamacpp", "context": 256}])
def test_other_engines_are_healthy_too(compare, bench, good, planted):
    """Those that return no token ids, and llama.cpp."""
    assert compare(load_head(good["eagle3"], target=bench.target), **planted) is None


CHAIN = StaticTree.from_widths([1] * (DEPTH - 1))


@pytest.mark.mend("a tuned tree that is a chain was called too short")
@pytest.mark.parametrize(
    ("kind", "fault", "check"),
    [
        ("medusa", {}, None),
        ("eagle3", {}, None),
        ("eagle3", {"head": None}, "speculation"),
        ("eagle3", {"tree": DynamicTree(6, DEPTH, 2)}, "draft length"),
        ("medusa", {"swap": True}, "acceptance"),
        ("medusa", {"tree": CHAIN, "own": CHAIN}, None),  # tuned to a chain shorter than the head
        ("medusa", {"tree": CHAIN}, "draft length"),
    ],
)
def test_our_own_server_is_examined_with_its_trees(bench, good, kind, fault, check):
    own, other = (load_head(good[kind], target=bench.target) for _ in range(2))
    if fault.get("swap"):
        later_blocks_swapped(bench, other)
    engine = Speculator(bench.target, fault.get("head", other), tree=fault.get("tree"))
    own.tree = fault.get("own", own.tree)
    evidence = Evidence(bench.target, own, HeadFacts({}), bench.prompts, new_tokens=NEW)
    with running(engine, ServeOptions("served")) as (url, _):
        served = ServedTarget(str(bench.folder / "target"), ServerOptions(urls=[url]))
        found = first_difference(evidence, served)
    assert check == (found and found.check), found


def changed(bench: Bench, change: Callable[[torch.Tensor], torch.Tensor]) -> Target:
    """The target with other matrices."""
    model = copy.deepcopy(bench.target.model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(change(parameter))
    return Target(model, bench.target.tokenizer, name="other")


def in_four_bits(weight_XY: torch.Tensor) -> torch.Tensor:
    step_X1 = weight_XY.abs().amax(1, keepdim=True) / 7
    return (weight_XY / step_X1).round() * step_X1


def noisy(weight_XY: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return weight_XY + weight_XY.std() * torch.randn(weight_XY.shape, generator=generator)


def swapped_layers(bench: Bench, head: Any) -> dict[str, Any]:
    head.feature_layers = head.feature_layers[::-1]
    return {"head": head}


def other_theta(bench: Bench, head: Any) -> dict[str, Any]:
    head.rope = Rope(8, 5.0, None)
    return {"head": head}


def ignored_map(bench: Bench, head: Any) -> dict[str, Any]:
    head.token_map = torch.arange(len(head.token_map))
    return {"head": head}


def later_blocks_swapped(bench: Bench, head: Any) -> dict[str, Any]:
    first, *later = head.blocks
    head.blocks = torch.nn.ModuleList([first, *later[::-1]])
    return {"head": head}


def other_mask(bench: Bench, head: Any) -> dict[str, Any]:
    head.design = replace(head.design, mask_token=65)
    return {"head": head}


def with_template(form: str) -> Any:
    return lambda bench, head: {"tokenizer": byte_tokenizer(form)}


def with_target(change: Any) -> Any:
    return lambda bench, head: {"target": changed(bench, change)}


def with_values(**planted: Any) -> Any:
    return lambda bench, head: planted


ENGINE_FAULTS: dict[str, tuple[str, Any, str, str]] = {
    "temperature": ("medusa", with_values(temperature=2.0), "sampling", "at temperature 0"),
    "other weights": ("medusa", with_target(noisy), "text", "own target"),
    "four bits": ("eagle3", with_target(in_four_bits), "text", "quantisation"),
    "cut context": ("medusa", with_values(context=70), "context", "--max-model-len"),
    "system prompt": ("medusa", with_template("You are kind.\n" + TEMPLATE), "template", "system"),
    "thinking": ("medusa", with_template(TEMPLATE + "<think>"), "template", "enable_thinking"),
    "BOS twice": ("medusa", with_values(bos=[256]), "template", "one BOS"),
    "BOS twice, counted": ("block", with_values(bos=[256], ids=False), "template", "one BOS"),
    "no head": ("eagle3", with_values(head=None), "speculation", "--speculative-config"),
    "no counters": ("eagle3", with_values(counts=False), "counters", "--metrics"),
    "part of a block": ("block", with_values(chain=2), "draft length", "num_speculative_tokens"),
    "short chain": ("medusa", with_values(chain=2), "draft length", "num_speculative_tokens"),
    "layers": ("eagle3", swapped_layers, "acceptance", "feature layers"),
    "rope theta": ("eagle3", other_theta, "acceptance", "rope_theta"),
    "vocabulary": ("eagle3", ignored_map, "acceptance", "d2t"),
    "mask token": ("block", other_mask, "acceptance", "mask token"),
    "later drafts": ("medusa", later_blocks_swapped, "acceptance", "position 1 is right"),
}
"""Kind of head, what is planted, the check that names it, and a part of its advice."""


@pytest.mark.parametrize("fault", ENGINE_FAULTS)
def test_a_fault_of_an_engine_is_named_first(compare, bench, good, fault):
    kind, plant, check, advice = ENGINE_FAULTS[fault]
    own, other = (load_head(good[kind], target=bench.target) for _ in range(2))
    found = compare(own, **plant(bench, other))
    assert found is not None and found.check == check, found
    assert advice in found.advice


def test_the_command_names_the_difference_of_an_engine(examine, bench, good):
    """And says that a server which runs the head as we do is healthy."""
    head = load_head(good["medusa"], target=bench.target)
    server = PlantedEngine(Planted(bench.target, head, DEPTH))
    code, found, printed = examine(good["medusa"], engine=server.url)
    assert code == 0 and found["healthy"], printed
    assert f"{server.url} answers and drafts as we do here" in printed
    server.planted.head = None
    assert first(examine(good["medusa"], engine=server.url)) == "speculation"
    server.fault = lambda number, request: 404
    code, _, printed = examine(good["medusa"], engine=server.url)
    server.close()
    assert code == 2 and printed.count("error:") == 1 and server.url in printed
