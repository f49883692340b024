"""The promise: a recipe means what it says, each kind of head has the choices that make sense for
it, and a mistake is one line that says what to do.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from annotated_types import Le
from tiny_training import MINIMAL, error

from draftheads.heads.formats.config import TYPES
from draftheads.heads.formats.hub import HEADS
from draftheads.train.recipe import Recipe, differences, load_recipe, recipe_keys

RECIPES = Path(__file__).parents[2] / "recipes"


def named(pattern: str) -> list:
    return [pytest.param(file, id=file.stem) for file in sorted(RECIPES.glob(pattern))]


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


def test_a_short_recipe_is_enough(path):
    recipe = load_recipe(path)
    assert (recipe.head.kind, recipe.run.steps) == ("medusa", 10)
    assert recipe.data.path == Path("answers")


@pytest.mark.parametrize("file", [file for kind in HEADS for file in named(f"*-{kind}.yaml")])
def test_shipped_recipes_are_valid(file):
    recipe = load_recipe(file)
    assert file.stem.endswith(f"-{recipe.head.kind}")
    assert file.read_text().startswith("#"), "launch line, hardware, wall time, result on top"
    if recipe.head.kind == "eagle3":  # the README's way to an EAGLE head
        assert load_recipe(file, ["head.kind=eagle"], kind="eagle3").head.kind == "eagle"


@pytest.mark.parametrize(
    "file", [file for file in named("*-block.yaml") if "vllm serve" in file.values[0].read_text()]
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


# what values mean

SEQUENTIAL, BLOCK = "head.kind=sequential", "head.kind=block head.block_size=3 head.top_k=4"
LAYER = {
    "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate_size": 16, "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip
MEANT = [
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
    ("target=a=b", "a=b"),
    ("target_revision=1234e56", "1234e56"),
    ("target_revision=0123456", "0123456"),
    ("target_revision='null'", "null"),
    ("target_revision=null", None),
    ("target_revision=~", None),
    ("target_bits=4", 4),
    ("eval.best=~", None),
    ("run.steps=2e3", 2000),
    ("run.seed=010", 10),
    ("run.seed=1_000", 1000),
    ("run.seed=0x10", 16),
    ("run.seed=2e3", 2000),
    ("run.seed=5 # five", 5),
    ("run.gradient_checkpointing=true", True),
    ("run.trackers=tensorboard", ["tensorboard"]),
    ("run.trackers=[tensorboard]", ["tensorboard"]),
    ("data.pack=no", False),
    ("data.pack=False", False),
    ("optim.lr=1e-3", 1e-3),
    ("optim.betas=[0.5, 5e-1]", (0.5, 0.5)),
    ("adapter.modules=[q_proj, v_proj]", ["q_proj", "v_proj"]),
    ("head.vocabulary=null", None),
    ("data.cache_gb=1", 1.0, "target_placement=sharded features.mode=cached"),
    (  # `rope_scaling` takes what a model's config has
        "head.rope_scaling={rope_type: yarn, truncate: false, when: 2026-11-22, factor: 8.0}",
        {"rope_type": "yarn", "truncate": False, "when": "2026-11-22", "factor": 8.0},
        "head.kind=eagle3",
    ),
    *(
        ("head.nodes=36", 36, f"head.kind={kind} head.depth=3 head.top_k=4")
        for kind in ("eagle3", "eagle", "sequential")
    ),
    ("head.nodes=10", 10, "head.kind=eagle head.depth=1 head.top_k=10"),
    ("head.top_k=null", None, f"{SEQUENTIAL} head.depth=3 head.nodes=37"),  # a fixed tree
    ("head.nodes=36", 36, f"{BLOCK} head.sample_from_anchor=true"),
    ("head.nodes=20", 20, f"{BLOCK} head.sample_from_anchor=false"),
    *((f"head.{norm}=true", True, "head.kind=eagle3") for norm in ("fc_norm", "norm_before_fc")),
    ("head.rank=8", 8, f"{SEQUENTIAL} head.conditioning=recurrent"),
    *((f"head.mask={each}", each, "head.kind=block") for each in (3, "auto", "learned")),
    *(
        (f"head.{name}={value}", value, f"{SEQUENTIAL} head.prefix=true")
        for name, value in LAYER.items()
    ),
]
"""An override, what it means, and overrides before it."""


@pytest.mark.parametrize(("override", "meant", "before"), [(*row, "")[:3] for row in MEANT])
def test_an_override_is_yaml_and_a_text_where_the_key_takes_one(path, override, meant, before):
    others = ["features.path=x", "target_revision=main", *before.split()]
    value = load_recipe(path, [*others, override])
    for name in override.partition("=")[0].split("."):
        value = getattr(value, name)
    assert (str(value) if isinstance(value, Path) else value) == meant


def test_a_section_of_which_all_is_commented_out_has_its_defaults(path):
    path.write_text(MINIMAL + "optim:\n  # lr: 1e-3\nadapter:\n")
    assert load_recipe(path) == load_recipe(path, ["optim.lr=1e-3"])
    path.write_text(MINIMAL + "optim:\n  lr: 2e-3\n")
    assert load_recipe(path).optim.lr == 2e-3


def test_one_length_replaces_the_other(path):
    """Of an override: nobody who asks for ten steps wants to unset the recipe's epochs first."""
    run = load_recipe(path, ["run.epochs=3"]).run
    assert (run.epochs, run.steps) == (3, None)
    run = load_recipe(path, ["run.epochs=3", "run.steps=null"]).run
    assert (run.epochs, run.steps) == (3, None), "null replaces nothing"
    run = load_recipe(path, ["run.minutes=20"]).run
    assert (run.epochs, run.steps, run.minutes) == (None, None, 20)


def test_the_kind_is_the_entry_points_where_the_recipe_leaves_it_open(path):
    assert [HEADS[kind].Choices().kind for kind in HEADS] == list(HEADS)
    assert load_recipe(path, kind="eagle3").head.kind == "eagle3"
    assert load_recipe(path, ["head.layers=2"], kind="eagle").head.kind == "eagle"
    path.write_text(MINIMAL + "head:\n")
    assert load_recipe(path, kind="eagle3").head.kind == "eagle3"
    path.write_text(MINIMAL + "head:\n  kind: eagle\n")
    assert load_recipe(path, kind="eagle3").head.kind == "eagle"
    assert load_recipe(path, ["head.kind=medusa"], kind="eagle3").head.kind == "medusa"


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
    with pytest.raises(FileNotFoundError, match=r"recipes\.yaml: expected a YAML file or a"):
        load_recipe("recipes.yaml")
    Path("demo-sequential").write_text(MINIMAL)
    assert load_recipe("demo-sequential").head.kind == "medusa"


# mistakes

LENGTHS = "exactly one of steps, epochs and minutes"
FILES: list[tuple[str | bytes, str]] = [
    ("target: caf\xe9".encode("latin1"), "not YAML in UTF-8: 'utf-8' codec can't decode"),
    (MINIMAL.encode("utf-16"), "not YAML in UTF-8"),
    (MINIMAL + "\0", "not YAML in UTF-8"),
    ("target: [a\nrun: {\n", "not YAML"),
    ("just words", "expected `key: value` lines, got str"),
    (MINIMAL.replace("output: out", "output: ''"), "run: output is empty; set it"),
    (MINIMAL + "  steps: 99\n", 'found duplicate key "steps" with value "99"'),
    (MINIMAL + "run:\n  steps: 3\n", 'found duplicate key "run"'),
    (MINIMAL + "optim: {lr: 1, lr: 2}\n", '(original value: "1"), line 7'),
    (MINIMAL + "head: " + "[" * 5000 + "]" * 5000, "not YAML in UTF-8: maximum recursion"),
    (MINIMAL + "optim:\n  lr: " + "9" * 5000, "not YAML in UTF-8: Exceeds the limit"),
    (MINIMAL + "optim:\n  lr: .inf\n", "optim.lr: expected a finite number, got inf"),
    (MINIMAL + "optim:\n  lr: 1e400\n", "optim.lr: expected a finite number, got inf"),
    (MINIMAL + "optim:\n  lr: .nan\n", "optim.lr: expected a finite number, got nan"),
    (MINIMAL + "optim:\n  lr: 2026-11-22\n", "optim.lr: expected a valid number"),
    (MINIMAL + "optim:\n  clip: .inf\n", "optim.clip: expected a finite number, got inf"),
    (MINIMAL + "optim:\n  betas: [1, 2, 3]\n", "optim.betas: Tuple should have at most 2"),
    (MINIMAL + "optim:\n  betas: [0.9]\n", "optim.betas.1: Field required, got [0.9]"),
    (MINIMAL + "optim:\n  betas: [0.9, 1.5]\n", "optim.betas.1: expected less than 1"),
    (MINIMAL + "optim: [1]\n", "optim: expected a valid dictionary or instance of OptimChoices"),
    (MINIMAL + f"  seed: {10**13}\n", "run.seed: expected less than"),
    (MINIMAL.replace("10", "1e400"), "run.steps: expected a finite number, got inf"),
    (MINIMAL.replace("10", "1:30"), "run.steps: expected a valid integer"),
    (MINIMAL.replace("10", "yes"), "run.steps: expected a valid integer"),
    (MINIMAL.replace("output: out", "output: 12"), "run.output: Input is not a valid path"),
    (MINIMAL.replace("some/model", "12"), "target: expected a valid string, got 12"),
    (MINIMAL.replace("target: some/model", "target:"), "target: Field required"),
    (MINIMAL.replace("  path: answers\n", "  pack: true\n"), "data.path: Field required"),
    (MINIMAL.replace("steps: 10", "steps: 10\n  epochs: 2"), LENGTHS),
    (MINIMAL + "  sed: 1\n", "run.sed: unknown key; did you mean 'run.seed'?"),
    (MINIMAL + "optimizer:\n  lr: 1e-3\n", "optimizer: unknown key; did you mean 'optim'?"),
    (MINIMAL + "head:\n  kind: [eagle]\n", "head.kind: expected one of medusa"),
    (MINIMAL + "head:\n  kind: eagle3\n  steps: x\n", "head.steps: expected a valid integer"),
    (
        MINIMAL + "head:\n  kind: eagle3\n  feature_layers: [2, -1]\n",
        "head.feature_layers.1: expected greater than",
    ),
]


@pytest.mark.parametrize(("text", "complaint"), FILES)
def test_a_fault_in_the_file_is_one_line_with_its_name(path, text, complaint):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = error(path)
    assert message.startswith(f"{path}: ")
    assert complaint in message
    assert len(message) < 300 + len(str(path))


NEAREST = {
    "optim.lrr": "optim.lr",
    "head.dpeth": "head.depth",
    "run.tokens_per_stp": "run.tokens_per_step",
    "sequence_length": "data.sequence_length",
    "head.kind=eagle3 head.stepz": "head.steps",
    "head.kind=eagle3 head.topk": "head.top_k",
    "head.kind=eagle3 head.heads_kv": "head.heads",
    "head.kind=eagle3 optim.lrr": "optim.lr",
    "head.kind=block head.ancors": "head.anchors",
    "head.kind=medusa head.lm_heads": "head.lm_head",
    "head.kind=sequential head.conditoning": "head.conditioning",
    "head.kind=sequential head.ranks": "head.rank",
}
"""A key that is unknown to its kind, and the one that is meant."""
MOST = {
    "data.cache_gb=1e308": "8.8e+12",
    f"{SEQUENTIAL} head.rank=1000000": "32768",
    "head.kind=block head.rank=1000000": "32768",
    "adapter.rank=1000000": "32768",
    "head.nodes=4096": "1024",
    "head.kind=eagle head.heads=1000000": "4096",
    "head.kind=eagle head.head_dim=1000000": "4096",
    "head.kind=eagle head.intermediate_size=1000000": "262144",
}
OVERRIDES: list[tuple[str, ...]] = [
    *((f"{key}=", "") for key in ("run.output", "head.from", "run.epochs")),
    *((override, "") for override in ("run.output=~", "optim.lr=1e400", "optim=null")),
    *((override, f"{most}") for override, most in MOST.items()),
    *((f"{key}=1", f"unknown key; did you mean {meant!r}?") for key, meant in NEAREST.items()),
    ("head.zzzzzzzz=1", "`draftheads keys` lists all"),
    ("head.steps=3", "; it belongs to head.kind eagle3 or eagle or mtp"),
    ("head.prefix=true", "; it belongs to head.kind sequential"),
    ("head.conditioning=hydra", "; it belongs to head.kind sequential or block"),
    ("head.rank=4", "; it belongs to head.kind sequential or block"),
    ("optim.lr=fast", "expected a valid number, got 'fast'"),
    ("head.lm_head=mine", "expected 'own' or 'shared', got 'mine'"),
    ("data.heldout=2", "expected less than"),
    ("head.kind=eagle3 head.feature_layers=[]", ""),
    (f"{SEQUENTIAL} head.conditioning=medusa", "'recurrent' or 'hydra', got 'medusa'"),
    *(
        (f"head.kind=block head.mask={wrong}", f"a token id, auto or learned, got {wrong!r}")
        for wrong in ("-1", "none", "1.5")
    ),
    (
        "head.kind=eagle4",
        "expected one of medusa, sequential, eagle3, eagle, block, mtp, got 'eagle4'; did you "
        "mean 'eagle'?",
    ),
]
"""Overrides, and what is said of the last one's key."""


@pytest.mark.mend("an empty head.from= trained a new head")
@pytest.mark.mend("a kind of head that does not exist")
@pytest.mark.parametrize(("overrides", "said"), OVERRIDES)
def test_a_fault_in_an_override_names_the_command_line_and_the_key(path, overrides, said):
    message = error(path, *overrides.split())
    key = overrides.split()[-1].partition("=")[0]
    assert message.startswith(f"command line: {key}: ") and said in message


TREES = [
    *(f"head.kind={kind} head.depth=3 head.top_k=4" for kind in ("eagle3", "eagle", "sequential")),
    f"{BLOCK} head.sample_from_anchor=true",
]
WHOLE: list[tuple[str, ...]] = [
    ("optimizer.lr=1e-3", "command line: optimizer: unknown key; did you mean 'optim'?"),
    ("run.steps", "override 'run.steps': expected key.path=value"),
    ("head=medusa", "head: expected"),
    *(
        (f"{key}=true", f"{key.rpartition('.')[2]}: expected a number or a text, got true")
        for key in ("run.steps", "optim.lr", "target_bits", "head.depth")
    ),
    ("head.kind=eagle3 head.feature_layers=[x]", "head.feature_layers.0: expected a valid integer"),
    ("run.steps=null", LENGTHS),
    # although either would replace that of the file
    *(
        (overrides, f"{LENGTHS}, the others null, got {other} and steps")
        for other, value in (("minutes", 3), ("epochs", 2))
        for overrides in (f"run.steps=5 run.{other}={value}", f"run.{other}={value} run.steps=5")
    ),
    (
        "target_placement=sharded data.cache_gb=1",
        "data.cache_gb should be 0 with target_placement=sharded, got 1.0",
        "set features.mode=cached",
    ),
    *((f"{tree} head.nodes=37", "36 candidates, got 37") for tree in TREES),
    (f"{BLOCK} head.sample_from_anchor=false head.nodes=99", "20 candidates, got 99"),
    (
        "head.kind=eagle3 head.fc_norm=true head.norm_before_fc=true",
        "fc_norm and norm_before_fc exclude each other",
    ),
    (
        f"{SEQUENTIAL} head.rank=8 head.conditioning=hydra",
        "rank should be null with conditioning: hydra; remove rank",
    ),
    *(
        (
            f'{SEQUENTIAL} "head.{name}={value}"',
            f"{name} is a size of the prefix layer; set prefix: true",
        )
        for name, value in LAYER.items()
    ),
]
"""Overrides, and what is said of several keys or of a section."""


@pytest.mark.mend("run.steps beside run.minutes: one was ignored")
@pytest.mark.mend("run.steps=true was one step")
@pytest.mark.parametrize(("overrides", "said"), [(row[0], row[1:]) for row in WHOLE])
def test_overrides_that_do_not_go_together_are_one_line(path, overrides, said):
    message = error(path, *shlex.split(overrides))
    assert [words for words in said if words not in message] == []


def test_no_key_of_another_kind_is_suggested_and_a_long_value_is_cut(path):
    """`anchors` is a block's, `lm_head` is Medusa's."""
    assert "head.anchors" not in error(path, "head.kind=eagle3", "head.anchros=1")
    assert "lm_head" not in error(path, "head.kind=eagle", "head.lm_haed=own")
    assert len(error(path, f"optim.lr={[[9] * 99] * 99}")) < 250


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


@pytest.mark.parametrize("kind", HEADS)
def test_what_a_recipe_takes_a_saved_head_may_have(path, kind):
    """Else a run would end in a checkpoint that nothing reads."""
    for key, field in recipe_keys(kind):
        limits = [limit.le for limit in field.metadata if isinstance(limit, Le)]
        name = {"head.nodes": "draft_nodes"}.get(key, key.removeprefix("head."))
        if key.startswith("head.") and limits and name in TYPES:
            TYPES[name].validate_python(limits[0], strict=True)
    recipe = load_recipe(path, kind=kind)
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


# which recipes are of one run

SAME = ["run.steps=99", "run.keep=7", "data.rows_per_batch=1", "run.log_every=3", "run.output=x"]


@pytest.mark.parametrize(
    ("kind", "decoding", "trained"),
    [
        ("medusa", SAME, "optim.lr=1"),
        ("medusa", ["head.nodes=9"], "head.depth=3"),
        ("sequential", ["head.nodes=9", "head.top_k=4"], "head.depth=3"),
        ("sequential", ["head.nodes=9"], "head.conditioning=hydra"),
        ("eagle3", ["head.nodes=9", "head.depth=3", "head.top_k=4"], "head.steps=3"),
        ("eagle3", [], "head.kind=eagle"),
        ("eagle", ["head.nodes=9", "head.depth=3", "head.top_k=4"], "head.steps=3"),
        ("block", ["head.nodes=9", "head.top_k=3"], "head.anchors=9"),
    ],
)
def test_a_continued_run_may_change_what_training_does_not_read(path, kind, decoding, trained):
    def dump(*overrides: str):
        return load_recipe(path, overrides, kind)

    assert differences(dump(), dump(*decoding)) == []
    key, _, value = trained.partition("=")
    line = next(x for x in differences(dump(), dump(*decoding, trained)) if x.startswith(key))
    assert line.startswith(f"{key}: ") and line.partition(" -> ")[2].startswith(value)
