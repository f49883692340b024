"""The promise: each kind of head has the choices that make sense for it, and a mistake in them is
one line that says what to do.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from annotated_types import Le
from tiny_training import MINIMAL, error

from draftheads.heads.formats.config import TYPES
from draftheads.heads.formats.hub import HEADS
from draftheads.train.recipe import Recipe, differences, load_recipe, recipe_keys

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


def test_the_kind_is_the_entry_points_where_the_recipe_leaves_it_open(path):
    assert load_recipe(path, kind="eagle3").head.kind == "eagle3"
    assert load_recipe(path, ["head.layers=2"], kind="eagle").head.kind == "eagle"
    path.write_text(MINIMAL + "head:\n")
    assert load_recipe(path, kind="eagle3").head.kind == "eagle3"
    path.write_text(MINIMAL + "head:\n  kind: eagle\n")
    assert load_recipe(path, kind="eagle3").head.kind == "eagle"
    assert load_recipe(path, ["head.kind=medusa"], kind="eagle3").head.kind == "medusa"


def test_every_kind_of_head_has_a_section():
    assert [HEADS[kind].Choices().kind for kind in HEADS] == list(HEADS)


@pytest.mark.mend("a kind of head that does not exist")
def test_a_wrong_kind_lists_the_kinds(path):
    said = "head.kind: expected one of medusa, sequential, eagle3, eagle, block, mtp, got 'eagle4'"
    assert error(path, "head.kind=eagle4") == f"command line: {said}; did you mean 'eagle'?"
    path.write_text(MINIMAL + "head:\n  kind: [eagle]\n")
    assert f"{path}: head.kind: expected one of medusa" in error(path)


@pytest.mark.parametrize(
    ("kind", "key", "meant"),
    [
        ("eagle3", "head.stepz", "head.steps"),
        ("eagle3", "head.topk", "head.top_k"),
        ("eagle3", "head.heads_kv", "head.heads"),
        ("block", "head.ancors", "head.anchors"),
        ("medusa", "head.lm_heads", "head.lm_head"),
        ("sequential", "head.conditoning", "head.conditioning"),
        ("sequential", "head.ranks", "head.rank"),
        ("eagle3", "optim.lrr", "optim.lr"),
    ],
)
def test_an_unknown_key_is_compared_with_the_keys_of_its_kind(path, kind, key, meant):
    assert error(path, f"head.kind={kind}", f"{key}=1") == (
        f"command line: {key}: unknown key; did you mean {meant!r}?"
    )


EAGLE3 = """\
head:
  kind: eagle3
  feature_layers: [1, 3, 5]
  vocabulary: 1024
  steps: 4
  labels: hard
"""


def test_another_kind_leaves_out_what_it_does_not_have(path, caplog):
    path.write_text(MINIMAL + EAGLE3)
    head = load_recipe(path, ["head.kind=eagle"]).head
    assert (head.kind, head.steps, head.labels) == ("eagle", 4, "hard")
    (said,) = caplog.messages
    assert said == "head.kind=eagle: dropped keys of eagle3: feature_layers, vocabulary"
    caplog.clear()
    assert load_recipe(path, ["head.kind=eagle3"]).head.vocabulary == 1024
    assert not caplog.messages
    message = error(path, "head.kind=eagle", "head.vocabulary=9")  # asked for after the kind
    assert "head.vocabulary: unknown key; it belongs to head.kind medusa" in message
    path.write_text(MINIMAL + EAGLE3.replace("steps", "stepz"))
    assert "unknown key; did you mean 'head.steps'" in error(path, "head.kind=eagle")


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*-eagle3.yaml")), ids=lambda file: file.stem)
def test_the_readmes_way_to_an_eagle_head(file):
    assert load_recipe(file, ["head.kind=eagle"], kind="eagle3").head.kind == "eagle"


def test_no_key_of_another_kind_is_suggested(path):
    """`anchors` is a block's, `lm_head` is Medusa's."""
    assert "head.anchors" not in error(path, "head.kind=eagle3", "head.anchros=1")
    assert "lm_head" not in error(path, "head.kind=eagle", "head.lm_haed=own")


def test_a_key_of_another_kind_says_whose_it_is(path):
    assert error(path, "head.steps=3").endswith("; it belongs to head.kind eagle3 or eagle or mtp")
    assert error(path, "head.prefix=true").endswith("; it belongs to head.kind sequential")
    for key in ("conditioning=hydra", "rank=4"):
        assert error(path, f"head.{key}").endswith("; it belongs to head.kind sequential or block")


def test_a_faulty_head_key_is_named_as_the_user_wrote_it(path):
    path.write_text(MINIMAL + "head:\n  kind: eagle3\n  steps: many\n")
    assert error(path).startswith(f"{path}: head.steps: expected a valid integer")
    path.write_text(MINIMAL + "head:\n  kind: eagle3\n  feature_layers: [2, -1]\n")
    assert error(path).startswith(f"{path}: head.feature_layers.1: expected greater than")
    assert error(path, "head.feature_layers=[]").startswith("command line: head.feature_layers: ")
    assert error(path, "head.feature_layers=[x]").startswith(
        "command line: head.feature_layers.0: expected a valid integer"
    )


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "sequential"])
def test_a_tree_has_no_more_nodes_than_candidates(path, kind):
    tree = [f"head.kind={kind}", "head.depth=3", "head.top_k=4"]
    assert load_recipe(path, [*tree, "head.nodes=36"]).head.nodes == 36
    assert "36 candidates, got 37" in error(path, *tree, "head.nodes=37")
    single = [*tree[:1], "head.depth=1", "head.top_k=10", "head.nodes=10"]
    assert load_recipe(path, single).head.depth == 1


def test_switches_that_exclude_one_another(path):
    norms = ["head.fc_norm=true", "head.norm_before_fc=true"]
    assert "fc_norm and norm_before_fc exclude each other" in error(
        path, "head.kind=eagle3", *norms
    )
    for norm in norms:
        load_recipe(path, ["head.kind=eagle3", norm])


def test_the_candidates_of_a_fixed_tree_are_not_bounded(path):
    tree = ["head.kind=sequential", "head.depth=3", "head.nodes=37"]
    assert load_recipe(path, tree).head.top_k is None


@pytest.mark.mend("absurd numbers in recipes")
@pytest.mark.parametrize("kind", HEADS)
def test_an_absurd_number_is_refused_before_anything_is_loaded(path, kind):
    """No key, present or to come, takes one that only memory or time would refuse."""
    numbers = [
        key
        for key, field in recipe_keys(kind)
        if re.search(r"\b(int|float)\b", str(field.annotation)) and "[" not in str(field.annotation)
    ]
    assert len(numbers) > 20
    for key in numbers:
        for value in ("1" + "0" * 30, "1e30"):
            message = error(path, f"head.kind={kind}", f"{key}={value}")
            assert message.startswith(f"command line: {key}: "), message


@pytest.mark.parametrize(
    ("override", "most"),
    [
        ("data.cache_gb=1e308", "8.8e+12"),
        ("head.kind=sequential head.rank=1000000", "32768"),
        ("head.kind=block head.rank=1000000", "32768"),
        ("adapter.rank=1000000", "32768"),
        ("head.nodes=4096", "1024"),
        ("head.kind=eagle head.heads=1000000", "4096"),
        ("head.kind=eagle head.head_dim=1000000", "4096"),
        ("head.kind=eagle head.intermediate_size=1000000", "262144"),
    ],
)
def test_the_most_that_a_number_may_be_is_said(path, override, most):
    *_, last = overrides = override.split()
    message = error(path, *overrides)
    assert message.startswith(f"command line: {last.partition('=')[0]}: ")
    assert most in message


@pytest.mark.parametrize("kind", HEADS)
def test_what_a_recipe_takes_a_saved_head_may_have(kind):
    """Else a run would end in a checkpoint that nothing reads."""
    for key, field in recipe_keys(kind):
        limits = [limit.le for limit in field.metadata if isinstance(limit, Le)]
        name = {"head.nodes": "draft_nodes"}.get(key, key.removeprefix("head."))
        if key.startswith("head.") and limits and name in TYPES:
            TYPES[name].validate_python(limits[0], strict=True)


def test_hydra_has_no_rank(path):
    sequential = ["head.kind=sequential", "head.rank=8"]
    message = error(path, *sequential, "head.conditioning=hydra")
    assert "rank should be null with conditioning: hydra; remove rank" in message
    assert load_recipe(path, [*sequential, "head.conditioning=recurrent"]).head.rank == 8
    assert "'recurrent' or 'hydra', got 'medusa'" in error(
        path, "head.kind=sequential", "head.conditioning=medusa"
    )


@pytest.mark.parametrize(("from_anchor", "most"), [("true", 36), ("false", 20)])
def test_a_tree_of_a_block_head_is_as_deep_as_its_drafts(path, from_anchor, most):
    block = ["head.kind=block", "head.block_size=3", "head.top_k=4"]
    block.append(f"head.sample_from_anchor={from_anchor}")
    assert load_recipe(path, [*block, f"head.nodes={most}"]).head.nodes == most
    assert f"{most} candidates, got 99" in error(path, *block, "head.nodes=99")


@pytest.mark.parametrize(("mask", "read"), [("3", 3), ("auto", "auto"), ("learned", "learned")])
def test_a_mask_is_an_id_or_a_word(path, mask, read):
    assert load_recipe(path, ["head.kind=block", f"head.mask={mask}"]).head.mask == read
    for wrong in ("-1", "none", "1.5"):
        assert error(path, "head.kind=block", f"head.mask={wrong}") == (
            f"command line: head.mask: expected a token id, auto or learned, got {wrong!r}"
        )


@pytest.mark.parametrize(
    "size",
    ["heads=4", "kv_heads=2", "head_dim=8", "intermediate_size=16", "rope_theta=1e4",
     "rope_scaling={rope_type: linear, factor: 2.0}"],
)  # fmt: skip
def test_sizes_of_a_layer_need_the_layer(path, size):
    sequential, name = ["head.kind=sequential", f"head.{size}"], size.partition("=")[0]
    assert f"{name} is a size of the prefix layer; set prefix: true" in error(path, *sequential)
    assert getattr(load_recipe(path, [*sequential, "head.prefix=true"]).head, name)


@pytest.mark.parametrize(
    ("kind", "decoding", "trained"),
    [
        ("medusa", ["head.nodes=9"], "head.depth=3"),
        ("sequential", ["head.nodes=9", "head.top_k=4"], "head.depth=3"),
        ("sequential", ["head.nodes=9"], "head.conditioning=hydra"),
        ("eagle3", ["head.nodes=9", "head.depth=3", "head.top_k=4"], "head.steps=3"),
        ("eagle", ["head.nodes=9", "head.depth=3", "head.top_k=4"], "head.steps=3"),
        ("block", ["head.nodes=9", "head.top_k=3"], "head.anchors=9"),
    ],
)
def test_a_continued_run_may_change_what_only_decoding_reads(path, kind, decoding, trained):
    def dump(*overrides: str):
        return load_recipe(path, overrides, kind)

    assert differences(dump(), dump(*decoding)) == []
    (line,) = differences(dump(), dump(*decoding, trained))
    assert line.startswith(f"{trained.partition('=')[0]}: ")


def test_a_dumped_recipe_is_a_recipe(path):
    for kind in HEADS:
        recipe = load_recipe(path, kind=kind)
        assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_another_kind_of_head_is_another_run(path):
    old, new = (load_recipe(path, kind=kind) for kind in ("eagle3", "eagle"))
    assert "head.kind: eagle3 -> eagle" in differences(old, new)
