"""The promise: a recipe means what it says; a mistake in it is one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_training import MINIMAL, error

from draftheads.heads.formats.hub import HEADS
from draftheads.train.recipe import differences, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


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


@pytest.mark.parametrize(
    "file",
    [file for file in RECIPES.glob("*-block.yaml") if "vllm serve" in file.read_text()],
    ids=lambda file: file.stem,
)
def test_block_heads_with_serve_commands_are_those_that_engines_load(file):
    """vLLM and llama.cpp: the vanilla conditioning, a mask with a row in the target's embeddings,
    and a chain as long as the block.
    """
    recipe, text = load_recipe(file), file.read_text()
    head, output = recipe.head, recipe.run.output
    assert head.conditioning == "markov"
    assert isinstance(head.mask, int)
    assert head.sample_from_anchor
    assert head.lm_head == head.embeddings == "shared"
    assert f'"model": "{output}/best", "num_speculative_tokens": {head.block_size}}}' in text
    assert f"--speculative-draft-model-path {output}/best" in text


def test_overrides_are_yaml_values(path):
    recipe = load_recipe(
        path,
        [
            "optim.lr=1e-3",
            "run.steps=2e3",
            "target_bits=4",
            "run.trackers=[tensorboard]",
            "head.vocabulary=null",
            "data.pack=false",
            "target=a=b",
        ],
    )
    assert recipe.optim.lr == 1e-3
    assert recipe.run.steps == 2000
    assert recipe.target_bits == 4
    assert recipe.run.trackers == ["tensorboard"]
    assert recipe.head.vocabulary is None
    assert recipe.data.pack is False
    assert recipe.target == "a=b"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("run.output=out/run #2", "out/run #2"),
        ("run.output=2026-11-22", "2026-11-22"),
        ("run.output=0123", "0123"),
        ("run.output=1e3", "1e3"),
        ("run.output=yes", "yes"),
        ("run.output=a: b", "a: b"),
        ("run.output=*star &and %c @at !not", "*star &and %c @at !not"),
        ("run.output='a b'", "a b"),
        ("run.output='[1]'", "[1]"),
        ("run.output=~/runs/a", str(Path.home() / "runs/a")),
        ("features.path=a #b", "a #b"),
        ("features.path=null", None),
        ("target=123", "123"),
        ("target_revision=1234e56", "1234e56"),
        ("target_revision=0123456", "0123456"),
        ("target_revision='null'", "null"),
        ("target_revision=null", None),
        ("target_revision=~", None),
        ("eval.best=~", None),
        ("run.seed=010", 10),
        ("run.seed=1_000", 1000),
        ("run.seed=0x10", 16),
        ("run.seed=2e3", 2000),
        ("run.seed=5 # five", 5),
        ("data.pack=no", False),
        ("data.pack=False", False),
        ("optim.betas=[0.5, 5e-1]", (0.5, 0.5)),
        ("adapter.modules=[q_proj, v_proj]", ["q_proj", "v_proj"]),
    ],
)
def test_an_override_is_a_text_where_the_key_takes_one(path, override, meant):
    value = load_recipe(path, ["features.path=x", "target_revision=main", override])
    for name in override.partition("=")[0].split("."):
        value = getattr(value, name)
    assert (str(value) if isinstance(value, Path) else value) == meant


def test_true_and_false_are_not_numbers_in_extra_keys(path):
    """`rope_scaling` takes what a model's config has."""
    scaling = "head.rope_scaling={rope_type: yarn, truncate: false, when: 2026-11-22, factor: 8.0}"
    head = load_recipe(path, ["head.kind=eagle3", scaling]).head
    expected = {"rope_type": "yarn", "truncate": False, "when": "2026-11-22", "factor": 8.0}
    assert head.rope_scaling == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("target: caf\xe9".encode("latin1"), "not YAML in UTF-8: 'utf-8' codec can't decode"),
        (MINIMAL.encode("utf-16"), "not YAML in UTF-8"),
        (MINIMAL.replace("output: out", "output: ''"), "run: output is empty; set it"),
        (MINIMAL + "\0", "not YAML in UTF-8"),
        (MINIMAL + "  steps: 99\n", 'found duplicate key "steps" with value "99"'),
        (MINIMAL + "run:\n  steps: 3\n", 'found duplicate key "run"'),
        (MINIMAL + "optim: {lr: 1, lr: 2}\n", '(original value: "1"), line 7'),
        (MINIMAL + "head: " + "[" * 5000 + "]" * 5000, "not YAML in UTF-8: maximum recursion"),
        (MINIMAL + "optim:\n  lr: " + "9" * 5000, "not YAML in UTF-8: Exceeds the limit"),
        (MINIMAL + "optim:\n  lr: .inf\n", "optim.lr: expected a finite number, got inf"),
        (MINIMAL + "optim:\n  lr: 1e400\n", "optim.lr: expected a finite number, got inf"),
        (MINIMAL + "optim:\n  lr: .nan\n", "optim.lr: expected a finite number, got nan"),
        (MINIMAL + "optim:\n  lr: 2026-11-22\n", "optim.lr: expected a valid number"),
        (
            MINIMAL + "optim:\n  clip: .inf\n",
            "optim.clip: expected a finite number, got inf",
        ),
        (MINIMAL + "optim:\n  betas: [1, 2, 3]\n", "optim.betas: Tuple should have at most 2"),
        (MINIMAL + "optim:\n  betas: [0.9]\n", "optim.betas.1: Field required, got [0.9]"),
        (MINIMAL + "optim:\n  betas: [0.9, 1.5]\n", "optim.betas.1: expected less than 1"),
        (
            MINIMAL + "optim: [1]\n",
            "optim: expected a valid dictionary or instance of OptimChoices, got [1]",
        ),
        (MINIMAL + "optim:\n  clip: .inf\n", "optim.clip: expected a finite"),
        (MINIMAL + f"  seed: {10**13}\n", "run.seed: expected less than"),
        (MINIMAL.replace("10", "1e400"), "run.steps: expected a finite number, got inf"),
        (MINIMAL.replace("10", "1:30"), "run.steps: expected a valid integer"),
        (MINIMAL.replace("10", "yes"), "run.steps: expected a valid integer"),
        (MINIMAL.replace("output: out", "output: 12"), "run.output: Input is not a valid path"),
        (MINIMAL.replace("some/model", "12"), "target: expected a valid string, got 12"),
        (MINIMAL.replace("target: some/model", "target:"), "target: Field required"),
    ],
)
def test_a_fault_in_the_file_is_one_line_with_its_name(path, text, complaint):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = error(path)
    assert message.startswith(f"{path}: ")
    assert complaint in message
    assert len(message) < 300 + len(str(path))


@pytest.mark.mend("an empty head.from= trained a new head")
@pytest.mark.parametrize(
    "override",
    ["run.output=", "head.from=", "run.epochs=", "run.output=~", "optim.lr=1e400", "optim=null"],
)
def test_a_fault_in_an_override_names_the_command_line(path, override):
    assert error(path, override).startswith(f"command line: {override.partition('=')[0]}: ")


def test_a_misspelt_section_is_of_whoever_wrote_it(path):
    said = "optimizer: unknown key; did you mean 'optim'?"
    assert error(path, "optimizer.lr=1e-3") == f"command line: {said}"
    path.write_text(MINIMAL + "optimizer:\n  lr: 1e-3\n")
    assert error(path, "optim.lr=1e-3") == f"{path}: {said}"


def test_processes_that_share_a_target_remember_nothing_alone(path):
    shared = ["target_placement=sharded", "data.cache_gb=1"]
    message = error(path, *shared)
    assert "data.cache_gb should be 0 with target_placement=sharded, got 1.0" in message
    assert "set features.mode=cached" in message
    assert load_recipe(path, [*shared, "features.mode=cached"]).data.cache_gb == 1


def test_a_section_of_which_all_is_commented_out_has_its_defaults(path):
    path.write_text(MINIMAL + "optim:\n  # lr: 1e-3\nadapter:\n")
    assert load_recipe(path) == load_recipe(path, ["optim.lr=1e-3"])


def test_a_long_value_is_cut_in_its_line(path):
    assert len(error(path, f"optim.lr={[[9] * 99] * 99}")) < 250


def test_numbers_in_the_file_may_be_written_1e_3(path):
    path.write_text(MINIMAL + "optim:\n  lr: 2e-3\n")
    assert load_recipe(path).optim.lr == 2e-3


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.lrr", "optim.lr"),
        ("head.dpeth", "head.depth"),
        ("run.tokens_per_stp", "run.tokens_per_step"),
        ("sequence_length", "data.sequence_length"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(path, key, meant):
    message = error(path, f"{key}=1")
    assert f"'{meant}'" in message
    assert "command line" in message


def test_an_unknown_key_in_the_file_names_the_file(path):
    path.write_text(MINIMAL.replace("steps: 10", "steps: 10\n  sed: 1"))
    assert error(path) == (f"{path}: run.sed: unknown key; did you mean 'run.seed'?")


def test_an_unheard_of_key_names_the_command_that_lists_them(path):
    assert "`draftheads keys` lists all" in error(path, "head.zzzzzzzz=1")


def test_a_wrong_type_says_key_expected_and_got(path):
    assert error(path, "optim.lr=fast").endswith("optim.lr: expected a valid number, got 'fast'")
    assert "head.lm_head: expected 'own' or 'shared', got 'mine'" in error(
        path, "head.lm_head=mine"
    )
    assert "data.heldout" in error(path, "data.heldout=2")


@pytest.mark.mend("run.steps=true was one step")
@pytest.mark.parametrize("key", ["run.steps", "optim.lr", "target_bits", "head.depth"])
def test_true_is_no_number(path, key):
    said = error(path, f"{key}=true")
    assert said.endswith(f"{key.rpartition('.')[2]}: expected a number or a text, got true")
    assert load_recipe(path, ["run.gradient_checkpointing=true"]).run.gradient_checkpointing


def test_a_section_given_as_a_value_is_refused(path):
    assert "head: expected" in error(path, "head=medusa")


def test_a_missing_key_is_named(path):
    path.write_text(MINIMAL.replace("  path: answers\n", "  pack: true\n"))
    assert error(path) == f"{path}: data.path: Field required"


def test_exactly_one_of_steps_epochs_and_minutes(path):
    assert "exactly one of steps, epochs and minutes" in error(path, "run.steps=null")
    path.write_text(path.read_text().replace("steps: 10", "steps: 10\n  epochs: 2"))
    assert "exactly one of steps, epochs and minutes" in error(path)


def test_one_length_replaces_the_other(path):
    """Of an override: nobody who asks for ten steps wants to unset the recipe's epochs first."""
    run = load_recipe(path, ["run.epochs=3"]).run
    assert (run.epochs, run.steps) == (3, None)
    run = load_recipe(path, ["run.epochs=3", "run.steps=null"]).run
    assert (run.epochs, run.steps) == (3, None), "null replaces nothing"
    run = load_recipe(path, ["run.minutes=20"]).run
    assert (run.epochs, run.steps, run.minutes) == (None, None, 20)


@pytest.mark.mend("run.steps beside run.minutes: one was ignored")
@pytest.mark.parametrize("other", ["run.minutes=3", "run.epochs=2"])
def test_two_lengths_are_not_one(path, other):
    """Although either would replace that of the file."""
    line = f"exactly one of steps, epochs and minutes, the others null, got {other[4:-2]} and steps"
    assert line in error(path, "run.steps=5", other)
    assert line in error(path, other, "run.steps=5")


@pytest.mark.parametrize("value", ["tensorboard", "[tensorboard]"])
def test_a_list_of_one_needs_no_brackets(path, value):
    assert load_recipe(path, [f"run.trackers={value}"]).run.trackers == ["tensorboard"]


@pytest.mark.mend("a recipe of another model was suggested")
def test_recipes_of_the_package_are_found_by_name(tmp_path, monkeypatch):
    """Wherever the package is installed; a file of the same name comes first."""
    monkeypatch.chdir(tmp_path)
    assert load_recipe("demo-sequential").head.kind == "sequential"
    with pytest.raises(FileNotFoundError, match="did you mean demo-sequential\\?"):
        load_recipe("demo-sequental")
    qwen = "did you mean qwen3-0.6b-block or qwen3-0.6b-eagle3 or .*qwen3-0.6b-sequential\\?"
    with pytest.raises(FileNotFoundError, match=qwen):  # the nearest one is of another model
        load_recipe("qwen3-0.6b")
    Path("demo-sequential").write_text(MINIMAL)
    assert load_recipe("demo-sequential").head.kind == "medusa"


def test_an_override_needs_an_equals_sign(path):
    assert "override 'run.steps': expected key.path=value" in error(path, "run.steps")


def test_a_missing_file_is_one_line(path):
    with pytest.raises(FileNotFoundError, match=r"recipes\.yaml: expected a YAML file or a"):
        load_recipe(path.with_name("recipes.yaml"))


def test_a_file_that_is_not_yaml_is_one_line(path):
    path.write_text("target: [a\nrun: {\n")
    assert "not YAML" in error(path)
    path.write_text("just words")
    assert "expected `key: value` lines, got str" in error(path)


def test_only_choices_that_change_the_training_count_as_differences(path):
    same = [
        "run.steps=99",
        "run.keep=7",
        "data.rows_per_batch=1",
        "run.log_every=3",
        "run.output=elsewhere",
    ]
    assert differences(load_recipe(path), load_recipe(path, same)) == []
    assert differences(load_recipe(path), load_recipe(path, ["optim.lr=1", "run.seed=4"])) == [
        "optim.lr: 0.001 -> 1.0",
        "run.seed: 0 -> 4",
    ]
