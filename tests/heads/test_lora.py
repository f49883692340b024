"""The promise: a target with a LoRA is one of its own. Its text is that of the adapted model;
heads, answers and cards record both parts; what cannot be merged is refused in one line.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_chat import llama
from tiny_heads import random_head
from tiny_targets import generated, random_model, some_prompts
from tiny_training import recipe_of, tiny_recipe
from tiny_training import run as train
from transformers import AutoModelForCausalLM
from typed_commands import failed, questions

from draftheads.heads.cpu.linear import has_int8
from draftheads.heads.formats.hub import load_pair, open_head, save_head
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import same_weights
from draftheads.infer.engine import Speculator
from draftheads.infer.pipeline.generator import load
from draftheads.infer.pipeline.loading import Place, load_parts
from draftheads.scripts.convert import converted, merged
from draftheads.scripts.publish import prepare
from draftheads.train.advice.plan import make_plan
from draftheads.train.data.answers import read_manifest

TIED: list[tuple[bool, dict[str, Any]]] = [
    (False, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    (False, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    (True, {}),
    (True, {"target_modules": ["q_proj", "lm_head"]}),
    (True, {"target_modules": ["q_proj", "embed_tokens"]}),
    (True, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    (True, {"modules_to_save": ["lm_head"]}),
    (True, {"modules_to_save": ["embed_tokens"]}),
]
"""Whether a target's embeddings are tied, and what a LoRA of it changes."""

Tensors = dict[str, torch.Tensor]
ENDLESS = "((.*)*)*x"
"""A regular expression that takes for ever where it does not match."""
SIZE = 0.3
"""Of what is added to its matrices, so that texts change."""


def loaded(base: Path, lora: Path) -> Any:
    """A model with a LoRA beside its matrices: what was trained."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    with warnings.catch_warnings(action="ignore"):  # PEFT's, about ties and what transformers calls
        return PeftModel.from_pretrained(model, lora).eval()


def merged_by_peft(base: Path, lora: Path) -> Any:
    """As PEFT merges both."""
    with warnings.catch_warnings(action="ignore"):
        return loaded(base, lora).merge_and_unload()


def write_lora(folder: Path, base: Path, seed: int = 1, **choices: Any) -> Path:
    """A LoRA of the model in `base`. choices: of `LoraConfig`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    torch.manual_seed(seed)
    choices = {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8.0} | choices
    with warnings.catch_warnings(action="ignore"):
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **choices))
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data += SIZE * torch.randn_like(parameter)
        wrapped.save_pretrained(folder)
    return folder


def saved(folder: Path, name: str = "llama", **config: Any) -> Path:
    model = random_model(name)
    if config:
        torch.manual_seed(0)
        model = type(model)(type(model.config)(**{**model.config.to_dict(), **config}))
    model.save_pretrained(folder)
    return folder


def tokens_of(engine: Speculator, prompt: list[int], new: int) -> list[int]:
    return [token for step in engine.generate(prompt, max_new_tokens=new) for token in step.tokens]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A chat target in a folder."""
    folder, tiny = tmp_path_factory.mktemp("base") / "target", llama()
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(base) -> Path:
    return write_lora(base.parent / "lora", base)


@pytest.fixture
def head(base, lora, tmp_path) -> Path:
    """Heads of the adapted target."""
    target = Target.load(base, lora=lora)
    return save_head(random_head("medusa", target), tmp_path / "head", target=target)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("llama", {"use_dora": True}),
        ("gpt2", {"target_modules": ["c_attn"]}),
        ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    ],
    ids=["llama-dora", "gpt2", "mixtral-experts"],
)
def test_text_is_that_of_pefts_merged_model(tmp_path, name, choices):
    folder = saved(tmp_path / "base", name)
    lora = write_lora(tmp_path / "lora", folder, **choices)
    target = Target.load(folder, lora=lora)
    theirs = Target(merged_by_peft(folder, lora))
    for prompt in some_prompts(3, 9):
        tokens = generated(theirs, prompt, 24)
        assert tokens_of(Speculator(target), prompt, 24) == tokens
        assert tokens != generated(Target.load(folder), prompt, 24)


@pytest.mark.parametrize(("is_tied", "choices"), TIED)
def test_embeddings_and_lm_head_change_as_they_were_trained(tmp_path, is_tied, choices):
    """PEFT itself adds to both of tied ones what changes one of them."""
    folder = saved(tmp_path / "base", tie_word_embeddings=is_tied)
    lora = write_lora(tmp_path / "lora", folder, **choices)
    model = Target.load(folder, lora=lora).model
    ids = torch.tensor(some_prompts(20))
    with torch.no_grad():
        expected, got = loaded(folder, lora)(ids).logits, model(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    is_one = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_one == (is_tied and (not choices or "ensure_weight_tying" in choices))
    assert model.config.tie_word_embeddings == is_one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_tells_base_and_adapter_apart_in_every_dtype(tmp_path, dtype):
    random_model("llama").to(dtype).save_pretrained(tmp_path / "base")
    first, second = (write_lora(tmp_path / f"{n}", tmp_path / "base", seed=n) for n in (1, 2))
    plain = Target.load(tmp_path / "base").fingerprint()
    prints = {
        Target.load(tmp_path / "base", lora=first, dtype=name).fingerprint()
        for name in ("float32", "bfloat16")
    }
    assert len(prints) == 1
    assert not same_weights(plain, *prints)
    assert not same_weights(Target.load(tmp_path / "base", lora=second).fingerprint(), *prints)


def test_the_sum_is_rounded_once(tmp_path):
    """PEFT rounds what it adds, too."""
    random_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    lora = write_lora(tmp_path / "lora", tmp_path / "base")
    place = "model.layers.1.self_attn.q_proj"
    tensors = load_file(lora / "adapter_model.safetensors")
    down, up = (tensors[f"base_model.model.{place}.lora_{side}.weight"] for side in "AB")
    base = load_file(tmp_path / "base" / "model.safetensors")[f"{place}.weight"]
    expected = (base.double() + 8 / 4 * up.double() @ down.double()).bfloat16()
    for dtype in ("float32", "bfloat16"):
        model = Target.load(tmp_path / "base", lora=lora, dtype=dtype).model
        assert model.get_parameter(f"{place}.weight").dtype == getattr(torch, dtype)
        assert torch.equal(model.get_parameter(f"{place}.weight").bfloat16(), expected)


def test_a_lora_for_the_norms_alone_is_told_apart(tmp_path, base, lora):
    """Their numbers are hashed by other digits than the matrices'."""
    norms = write_lora(tmp_path / "lora", base, modules_to_save=["input_layernorm"])
    prints = [Target.load(base, lora=each).fingerprint() for each in (None, lora, norms)]
    assert len({each[:16] for each in prints}) == 2
    assert len(set(prints)) == 3


def test_its_tokenizer_replaces_the_targets(tmp_path, base, lora):
    folder = shutil.copytree(lora, tmp_path / "lora")
    tokenizer = llama(template="{{ messages[0]['content'] }}!").tokenizer
    tokenizer.save_pretrained(folder)
    assert Target.load(base, lora=lora).tokenizer.chat_template.startswith("{% for")
    assert Target.load(base, lora=folder).tokenizer.chat_template.endswith("!")


def test_a_lora_of_the_hub_is_recorded_with_its_commit(hub, base, lora):
    files = {path.name: path.read_bytes() for path in lora.iterdir()}
    hub.repos["me/lora"] = {"private": False, "files": files, "branches": {}}
    target = Target.load(base, lora="me/lora")
    assert target.lora.startswith("me/lora@") and len(target.lora) == len("me/lora@") + 40
    hub.repos["me/lora"]["files"] = {}
    again = Target.load(base, lora=target.lora)
    assert (again.lora, again.fingerprint()) == (target.lora, target.fingerprint())
    failed_at = "adapter me/other: expected a folder here or a repository"
    with pytest.raises(FileNotFoundError, match=failed_at):
        Target.load(base, lora="me/other")


def test_heads_are_trained_and_loaded_by_name_alone(made, tmp_path):
    lora = write_lora(tmp_path / "lora", made / "target")
    assert train(made, tmp_path / "run", f"target_adapter={lora}", "run.steps=2") == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # heads of other weights would warn
        target, head = load_pair(tmp_path / "run")
        again, drafts = load_parts(str(tmp_path / "run"), None, Place(threads=1))
    assert (target.lora, head.kind) == (str(lora), "medusa")
    adapted = Target(merged_by_peft(made / "target", lora))
    assert target.fingerprint() == Target.load(made / "target", lora=lora).fingerprint()
    [prompt] = some_prompts(7)
    tokens = generated(adapted, prompt, 20)
    assert tokens_of(Speculator(target, head), prompt, 20) == tokens
    assert tokens_of(Speculator(again, drafts), prompt, 20) == tokens


def test_answers_record_it_and_train_no_heads_of_the_base(run, base, lora, tmp_path, caplog):
    data = tmp_path / "data"
    words = ["--prompts", questions(tmp_path, 8), "--out", data, "--max-new-tokens", 8]
    assert run("distill", "--target", base, "--adapter", lora, *words)[0] == 0
    target = Target.load(base, lora=lora)
    recorded = read_manifest(data).target
    assert (recorded.name, recorded.lora) == (str(base), str(lora))
    assert recorded.fingerprint == target.fingerprint()
    recipe = tmp_path / "recipe.yaml"
    values = tiny_recipe(tmp_path, output=str(tmp_path / "run"), steps=1)
    recipe.write_text(json.dumps(values | {"target": str(base)}))
    failed(
        run("train", recipe),
        f"got answers of {base} with adapter {lora}",
        f"or set target={base} target_adapter={lora}",
    )
    assert run("train", recipe, f"target_adapter={lora}")[0] == 0
    facts = open_head(tmp_path / "run").facts.target
    assert (facts.name, facts.lora, facts.title) == (
        str(base),
        str(lora),
        f"{base} with adapter {lora}",
    )


@pytest.mark.filterwarnings("ignore:this head was trained on other weights")
def test_a_bench_compares_heads_of_base_and_adapter(run, base, lora, head, tmp_path):
    """Both decode with the adapted target, so that its owner sees what the old heads still give."""
    plain = Target.load(base)
    old = save_head(random_head("medusa", plain), tmp_path / "old", target=plain)
    out = tmp_path / "bench.json"
    sizes = ["--max-new-tokens", 6, "--limit", 2, "--threads", 1]
    heads = ["--head", old, "--head", head, "--prompts", questions(tmp_path, 2), "--json", out]
    assert run("bench", "--target", base, "--adapter", lora, *heads, *sizes)[0] == 0
    figures = json.loads(out.read_text())
    assert [row["lossless"] for row in figures["heads"]] == [True, True]
    assert {row["name"] for row in figures["heads"]} == {"old", "head"}
    assert str(lora) in figures["settings"]["target"]


def test_a_head_says_which_of_both_it_was_trained_on(base, lora, head):
    said = f"other weights \\({base} with adapter {lora}\\) than {base} has now"
    with pytest.warns(UserWarning, match=said):
        load(head, base, threads=1)


def test_a_chat_by_head_alone_has_it(run, monkeypatch, head, lora):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, _ = run("chat", "--head", head, "--threads", 1)
    assert code == 0 and f"with adapter {lora}" in out


def test_card_and_conversions_name_both(base, lora, head, tmp_path):
    card = (head / "README.md").read_text()
    assert f"`{base}` with the LoRA `{lora}`" in card
    assert "--target TARGET_FOLDER --adapter ADAPTER_FOLDER" in card
    assert "draftheads merge THIS_FOLDER_OR_REPO adapted" in card
    assert 'from_pretrained("adapted")' in card
    folder = converted(head, tmp_path / "vllm", "vllm")
    assert open_head(folder).facts.target.lora == lora.name
    assert f"with the LoRA `{lora.name}`" in (folder / "README.md").read_text()
    upload = prepare(head, "me/heads")
    facts = json.loads(upload.files["config.json"])["draftheads"]["target"]
    assert facts["lora"] == lora.name and str(lora) not in upload.card
    assert any("LoRA is not on the Hub" in note for note in upload.notes)


def test_a_card_of_hub_names_links_both(base, lora, tmp_path):
    target = Target.load(base, lora=lora)
    target.name, target.lora = "them/model", "me/lora@0123"
    folder = save_head(random_head("medusa", target), tmp_path / "head", target=target)
    card = (folder / "README.md").read_text()
    assert "base_model:\n- them/model\n- me/lora\n" in card
    assert "ADAPTER_FOLDER" not in card
    facts = json.loads(prepare(folder, "me/heads").files["config.json"])["draftheads"]["target"]
    assert facts["lora"] == "me/lora@0123"


def test_merge_writes_the_adapted_target(base, lora, head, tmp_path):
    heads = merged(str(head), tmp_path / "adapted", None, "auto")
    target = Target.load(base, lora=lora)
    plain, _ = load_pair(heads)
    assert plain.lora is None and same_weights(plain.fingerprint(), target.fingerprint())


def test_a_plan_needs_the_lora(made, tmp_path):
    lora = write_lora(tmp_path / "lora", made / "target")
    recipe = recipe_of({**tiny_recipe(made), "target_adapter": str(lora)})
    assert make_plan(recipe, probe=False).peak > 0
    (lora / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="found no adapter_model.safetensors"):
        make_plan(recipe, probe=False)


def test_init_writes_it_into_the_recipe(run, base, lora, tmp_path):
    out = tmp_path / "recipe.yaml"
    assert run("init", "--target", base, "--adapter", lora, "--out", out)[0] == 0
    text = out.read_text()
    assert f"target_adapter: {lora}\n" in text


def change_settings(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def with_settings(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: change_settings(folder, **changes)


def with_tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)

    return edit


def of_four_layers(tensors: Tensors) -> Tensors:
    more = {name.replace("layers.0", "layers.3"): each.clone() for name, each in tensors.items()}
    return {**tensors, **more}


MODEL = "base_model.model.model.layers"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (
        lambda folder: os.truncate(folder / "adapter_model.safetensors", 100),
        "expected complete weights, got",
    ),
    "four layers": (with_tensors(of_four_layers), f"4 tensors differ, such as {MODEL}.3"),
    "other shapes": (
        with_tensors(lambda tensors: {name: x.repeat(1, 2) for name, x in tensors.items()}),
        f"size mismatch for {MODEL}.0.self_attn.q_proj",
    ),
    "a tensor is gone": (
        with_tensors(lambda tensors: {name: tensors[name] for name in sorted(tensors)[1:]}),
        f"1 tensors differ, such as {MODEL}.0",
    ),
    "not finite": (
        with_tensors(lambda tensors: {name: x * torch.nan for name, x in tensors.items()}),
        "NaNs detected",
    ),
    "other names": (
        with_settings(target_modules=["c_attn"]),
        "Target modules {'c_attn'} not found in the base model",
    ),
    "prefix": (
        with_settings(peft_type="PREFIX_TUNING"),
        "expected a LoRA, got an adapter of type PREFIX_TUNING; merge it with PEFT",
    ),
    "repeated layers": (with_settings(layer_replication=[[0, 2], [1, 2]]), "it repeats layers"),
    "a large rank": (
        with_settings(r=10**6), "expected a rank of at most 64, as its matrices have, got 1000000"
    ),
    "a large rank in one place": (
        with_settings(rank_pattern={"q_proj": 10**6}), "expected a rank of at most 64"
    ),
    "matching for ever": (
        with_settings(alpha_pattern={ENDLESS: 8}),
        f"expected names of modules, got the expression {ENDLESS!r}",
    ),
    "begun by tokens": (
        with_settings(alora_invocation_tokens=[1, 2]),
        "got an adapter of type aLoRA (alora_invocation_tokens), which",
    ),
    "no JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        "expected a JSON object, got invalid JSON"
    ),
    "no settings": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        "expected a PEFT adapter, got a folder of other files",
    ),
    "nothing": (shutil.rmtree, "expected a PEFT adapter, got nothing"),
}  # fmt: skip


@pytest.mark.mend("a rank of a million took gigabytes before a tensor was compared")
@pytest.mark.mend("an aLoRA was merged, as if it were always on")
@pytest.mark.parametrize("name", FAULTS)
def test_a_lora_that_does_not_fit_is_refused(run, base, lora, tmp_path, name):
    change, said = FAULTS[name]
    folder = shutil.copytree(lora, tmp_path / "lora")
    change(folder)
    failed(run("chat", "--target", base, "--adapter", folder), f"{folder}", said)


@pytest.mark.mend("a regular expression of a LoRA that never ended")
@pytest.mark.parametrize("modules", [r".*\.(q|v)_proj", ENDLESS])
def test_its_matrices_say_which_modules_an_expression_means(base, lora, tmp_path, modules):
    """Matching a regular expression may take for ever."""
    folder = shutil.copytree(lora, tmp_path / "lora")
    change_settings(folder, target_modules=modules, exclude_modules=ENDLESS)
    expected = Target.load(base, lora=lora).fingerprint()
    assert Target.load(base, lora=folder).fingerprint() == expected


@pytest.mark.parametrize(
    ("got", "options"),
    [
        ("placement {'': 'cpu'}", {"placement": {"": "cpu"}}),
        ("placement skeleton", {"placement": "skeleton"}),
        ("quantisation gptq", {}),
        ("quantisation gguf", {}),  # whose fingerprint would be that of the base
    ],
)
def test_a_target_that_is_not_whole_takes_none(base, lora, tmp_path, got, options):
    target = shutil.copytree(base, tmp_path / "target")
    if "gptq" in got:
        change = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        config = json.loads((target / "config.json").read_text()) | change
        (target / "config.json").write_text(json.dumps(config))
    if "gguf" in got:
        target = tmp_path / "x.gguf"
        target.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="to merge it into, got .*; merge it with PEFT") as refused:
        Target.load(target, lora=lora, **options)
    assert got in str(refused.value)


@pytest.mark.skipif(not has_int8(), reason="torch has no int8 products for this CPU")
def test_int8_weights_of_a_cpu_are_made_after_the_merge(base, lora):
    generator = load(target=base, lora=lora, bits=8, threads=1)
    expected = Target.load(base, lora=lora).fingerprint()
    assert generator.target.bits == 8 and generator.target.fingerprint() == expected


@pytest.mark.parametrize(
    "other", [{"target_bits": 4}, {"target_placement": "sharded"}], ids=["bits", "sharded"]
)
def test_a_recipe_with_other_placements_is_refused(made, other):
    with pytest.raises(ValueError, match="target_adapter needs target_bits null"):
        recipe_of({**tiny_recipe(made), "target_adapter": "me/lora", **other})


def test_a_server_answers_with_its_own_adapter(run, base, lora, tmp_path):
    words = ["--prompts", questions(tmp_path), "--out", tmp_path / "data", "--server", "http://x"]
    failed(
        run("distill", "--target", base, "--adapter", lora, *words),
        "--adapter: omit these with --server, the server decodes",
    )


def test_without_peft_its_extra_is_named(run, monkeypatch, base, lora):
    monkeypatch.setitem(sys.modules, "peft", None)
    failed(run("chat", "--target", base, "--adapter", lora), "pip install 'draftheads[medusa2]'")
