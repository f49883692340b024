"""The promise: a recipe means what it says; a mistake in it is one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from minimal_recipe import MINIMAL, error

from draftheads.heads.hub import HEADS
from draftheads.train.recipe import differences, load_recipe

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


def test_a_short_recipe_is_enough(path):
    recipe = load_recipe(path)
    assert recipe.head.kind == "medusa"
    assert recipe.run.steps == 10
    assert recipe.data.path == Path("answers")


@pytest.mark.parametrize(
    "file",
    sorted(file for kind in HEADS for file in RECIPES.glob(f"*-{kind}.yaml")),
    ids=lambda file: file.stem,
)
def test_shipped_recipes_are_valid(file):
    recipe = load_recipe(file)
    assert file.stem.endswith(f"-{recipe.head.kind}")
    assert file.read_text().startswith("#"), "launch line, hardware, wall time, result on top"


def test_overrides_are_yaml_values(path):
    recipe = load_recipe(
        path,
        [
            "optim.lr=1e-3",
            "run.steps=2e3",
            "run.trackers=[tensorboard]",
            "head.vocabulary=null",
            "data.pack=false",
            "target=a=b",
        ],
    )
    assert recipe.optim.lr == 1e-3
    assert recipe.run.steps == 2000
    assert recipe.run.trackers == ["tensorboard"]
    assert recipe.head.vocabulary is None
    assert recipe.data.pack is False
    assert recipe.target == "a=b"


def test_numbers_in_the_file_may_be_written_1e_3(path):
    path.write_text(MINIMAL + "optim:\n  lr: 2e-3\n")
    assert load_recipe(path).optim.lr == 2e-3


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.lrr", "optim.lr"),
        ("head.dpeth", "head.depth"),
        ("optm.lr", "optim.lr"),
        ("run.tokens_per_stp", "run.tokens_per_step"),
        ("learning_rate_decay.steps", "run.steps"),
        ("sequence_length", "data.sequence_length"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(path, key, meant):
    message = error(path, f"{key}=1")
    assert f"'{meant}'" in message
    assert "command line" in message


def test_an_unknown_key_in_the_file_names_the_file(path):
    path.write_text(MINIMAL.replace("steps: 10", "steps: 10\n  sed: 1"))
    assert error(path) == f"{path}: unknown key 'run.sed'; did you mean 'run.seed'?"


def test_an_unheard_of_key_lists_the_known_ones(path):
    assert "known keys: " in error(path, "head.zzzzzzzz=1")


def test_a_wrong_type_says_key_expected_and_got(path):
    assert error(path, "optim.lr=fast").endswith(
        "optim.lr: expected a valid number, unable to parse string as a number, got 'fast'"
    )
    assert "head.lm_head: expected 'own' or 'shared', got 'mine'" in error(
        path, "head.lm_head=mine"
    )
    assert "data.heldout" in error(path, "data.heldout=2")


def test_a_section_given_as_a_value_is_refused(path):
    assert "head: expected" in error(path, "head=medusa")


def test_a_missing_key_is_named(path):
    path.write_text(MINIMAL.replace("  path: answers\n", "  pack: true\n"))
    assert error(path) == f"{path}: key 'data.path' is missing; add it, or pass data.path=..."


def test_exactly_one_of_steps_and_epochs(path):
    assert "exactly one of steps and epochs" in error(path, "run.epochs=2")
    assert load_recipe(path, ["run.epochs=2", "run.steps=null"]).run.epochs == 2


def test_an_override_needs_an_equals_sign(path):
    assert "override 'run.steps': expected key.path=value" in error(path, "run.steps")


def test_a_missing_file_names_near_ones(path):
    with pytest.raises(FileNotFoundError, match=r"did you mean .*recipe\.yaml\?"):
        load_recipe(path.with_name("recipes.yaml"))


def test_near_files_are_recipes(path):
    """Launch configurations and the settings of tools are YAML too."""
    path.with_name("recipe-ddp.yaml").write_text("num_processes: 2\n")
    path.with_name(".recip.yaml").write_text("target: x\n")
    with pytest.raises(FileNotFoundError) as caught:
        load_recipe(path.with_name("recip.yaml"))
    assert str(caught.value).endswith(f"did you mean {path}?")


def test_a_file_that_is_not_yaml_is_one_line(path):
    path.write_text("target: [a\nrun: {\n")
    assert "not YAML" in error(path)
    path.write_text("just words")
    assert "expected `key: value` lines, got str" in error(path)


def test_only_choices_that_change_the_training_count_as_differences(path):
    def dump(*overrides: str):
        return load_recipe(path, overrides).model_dump(mode="json")

    same = [
        "run.steps=99",
        "run.keep=7",
        "data.rows_per_batch=1",
        "run.log_every=3",
        "run.output=elsewhere",
    ]
    assert differences(dump(), dump(*same)) == []
    assert differences(dump(), dump("optim.lr=1", "run.seed=4")) == [
        "optim.lr: 0.001 -> 1.0",
        "run.seed: 0 -> 4",
    ]
