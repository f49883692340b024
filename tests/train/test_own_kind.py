"""The promise: a kind of head that stands outside this package, as one class, its choices and its
drafter, is trained, saved, loaded, measured, published and converted like those inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import tiny_training
import torch
from pydantic import Field
from tiny_targets import some_prompts
from tiny_training import MINIMAL, error
from torch import Tensor, nn

from draftheads.heads.base import DraftHead, HeadLoss
from draftheads.heads.batch import Batch, at_places
from draftheads.heads.choices import HeadChoices
from draftheads.heads.drafting import Committed
from draftheads.heads.formats.hub import load_head, open_head
from draftheads.heads.kinds import HEADS, register
from draftheads.heads.losses import RANKS, chunked_ranks, histogram, linear_cross_entropy
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree, TokenTree, Tree, check_fits
from draftheads.infer.measure.bench import BenchOptions, bench
from draftheads.scripts.convert import converted
from draftheads.scripts.publish import prepare
from draftheads.train.metrics import read_metrics
from draftheads.train.recipe import key_table, load_recipe


class MatrixChoices(HeadChoices):
    kind: Literal["matrix"] = Field("matrix", description="one matrix")
    scale: float = Field(1.0, gt=0, description="of the loss")
    nodes: int = Field(4, ge=1, le=64, description="draft tokens in the tree")


class MatrixHead(DraftHead):
    """One matrix from the target's state to the logits of the token after the root."""

    kind, architecture = "matrix", "MatrixModel"
    title, paper = "Matrix", "https://matrix.example/paper"
    Choices = MatrixChoices
    choices: MatrixChoices
    feature_layers, depth, needs_unembed = (-1,), 1, False

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = width, vocab_size
        self.tree = StaticTree.unfitted(1)
        self.matrix = nn.Linear(width, vocab_size, bias=False)

    @classmethod
    def create(
        cls,
        target: Target,
        choices: MatrixChoices | None = None,
        vocabulary: Sequence[int] | None = None,
    ) -> MatrixHead:
        head = cls(target.hidden_size, target.vocab_size)
        head.choices = choices or MatrixChoices()
        return head

    def config(self) -> dict[str, Any]:
        return {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> MatrixHead:
        return cls(config["hidden_size"], config["vocab_size"])

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        (roots_M,) = batch.roots(1)
        loss, ranks_M, _ = linear_cross_entropy(*self.factors(batch, features_BTD, roots_M))
        return HeadLoss(self.choices.scale * loss, histogram(ranks_M, RANKS + 1)[None])

    def token_ranks(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        (roots_M,) = batch.roots(1)
        ranks_M = chunked_ranks(*self.factors(batch, features_BTD, roots_M))
        ranks_P1 = ranks_M.new_full((batch.tokens_BT.numel(), 1), -1)
        ranks_P1[roots_M, 0] = torch.where(ranks_M < RANKS, ranks_M, -1)
        return ranks_P1[batch.loss_mask_BT.flatten()]

    def factors(self, batch: Batch, features_BTD: Tensor, roots_M: Tensor) -> tuple[Tensor, ...]:
        labels_M = batch.tokens_BT.flatten()[roots_M + 1]
        return at_places(features_BTD, roots_M), self.matrix.weight, labels_M

    def check_tree(self, tree: Tree) -> None:
        check_fits(tree, self.vocab_size, self.depth)

    def drafter(self, target: Target, tree: Tree | None = None) -> MatrixDrafter:
        return MatrixDrafter(self, target, tree or self.tree)


class MatrixDrafter:
    cache = None  # has no layers of its own

    def __init__(self, head: MatrixHead, target: Target, tree: Tree) -> None:
        assert isinstance(tree, StaticTree)
        self.head, self.width = head, tree.width
        self.ranks = [path[-1] for path in tree.paths]
        self.feature_layers = head.feature_layers
        self.topology = tree.topology(target.device)

    def propose(self, committed: Committed) -> TokenTree:
        logits_Bv = self.head.matrix(committed.last_features_BD())
        drafts_BN = logits_Bv.topk(self.width).indices[:, self.ranks]
        tokens_BN = torch.cat([committed.last_tokens_B()[:, None], drafts_BN], dim=1)
        return TokenTree(tokens_BN, self.topology)

    def rewind(self, length: int) -> None:
        pass


@pytest.fixture(autouse=True)
def matrix_heads(monkeypatch) -> Iterator[None]:
    monkeypatch.setitem(tiny_training.HEAD_SECTIONS, "matrix", {"nodes": 3})
    register(MatrixHead)
    yield
    del HEADS["matrix"]


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A finished run."""
    output = tmp_path / "run"
    more = ["run.steps=30", "optim.lr=3e-2", "head.scale=2"]
    assert tiny_training.run(made, output, *more, kind="matrix") == 0
    return output


def test_a_recipe_takes_its_choices_and_nothing_else(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{MINIMAL}head:\n  kind: matrix\n")
    assert load_recipe(path, ["head.scale=2"]).head == MatrixChoices(scale=2.0)
    message = error(path, "head.scales=2")
    assert message == "command line: head.scales: unknown key; did you mean 'head.scale'?"
    assert "expected one of medusa, " in error(path, "head.kind=other")
    assert ", matrix, got 'other'" in error(path, "head.kind=other")
    assert ("head.scale (matrix)", "float", "1.0", "of the loss") in key_table()


def test_what_it_learned_is_saved_loaded_and_measured(made, run):
    folder = open_head(run)
    training = folder.facts.training
    assert training["recipe"]["head"] == {"kind": "matrix", "scale": 2.0, "nodes": 3}
    target = Target.load(made / "target")
    head = load_head(run, target=target)
    assert isinstance(head, MatrixHead) and head.tree.draft_nodes <= 3
    losses = [line["loss"] for line in read_metrics(run) if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    options = BenchOptions(max_new_tokens=12)
    result = bench(target, {"matrix": head}, some_prompts(4, 9, 97), options).result("matrix")
    assert result.lossless and len(result.acceptance_by_depth) == 1


def test_it_is_published_under_its_own_name(run):
    upload = prepare(run, "me/matrix")
    assert "# Matrix draft head for" in upload.card
    assert "([paper](https://matrix.example/paper))" in upload.card
    assert "No serving engine supports heads of this kind" in upload.card
    assert b'"scale": 2.0' in upload.files["config.json"]


def test_it_is_converted_to_our_own_layout_alone(run, tmp_path):
    ours = converted(run, tmp_path / "ours", "draftheads")
    before, after = load_head(run).state_dict(), load_head(ours).state_dict()
    assert torch.equal(before["matrix.weight"], after["matrix.weight"])
    reason = "medusa or eagle or eagle3 or block for vllm, got matrix; use --to draftheads$"
    with pytest.raises(ValueError, match=f"expected a head of kind {reason}"):
        converted(run, tmp_path / "theirs", "vllm")
    assert not (tmp_path / "theirs").exists()


def test_a_kind_that_is_not_registered_is_one_line_that_lists_the_others(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delitem(HEADS, "matrix")
        with pytest.raises(ValueError, match="of kind medusa, .*, got 'matrix'") as refused:
            load_head(run)
    assert "\n" not in str(refused.value)


def test_a_name_that_is_taken_or_that_differs_is_refused():
    class Other(MatrixHead):
        kind = "other"

    with pytest.raises(ValueError, match="expected MatrixChoices with this kind, got 'matrix'"):
        register(Other)
    Other.kind = "medusa"
    with pytest.raises(ValueError, match="expected a new name, got that of MedusaHead"):
        register(Other)
    assert "other" not in HEADS and HEADS["medusa"] is not Other
    assert register(MatrixHead) is MatrixHead, "once more is no mistake"
