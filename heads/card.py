"""How engines serve each kind of head: text for the model card.

Flags are those of vLLM 0.33, SGLang 0.5.23 and text-generation-inference. vLLM serves Medusa from
0.9.2 to 0.32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from draftheads.heads.formats.eagle import loss
from draftheads.heads.formats.stored import Stored
from draftheads.heads.tree import DynamicTree, Tree, tree_from_json

CHAIN = 3
"""vLLM verifies a chain, whose later tokens are seldom right: that long at most."""


def engine_commands(config: dict[str, Any], target: str, here: str) -> str:
    """Markdown: the commands for engines that serve this head, and the names of those that do not.

    config: of the head. here: its folder or repository.
    """
    kind, tree = config["draftheads"]["kind"], tree_from_json(config["draftheads"]["tree"])
    if kind == "medusa":
        return _medusa(config, target, here, tree)
    if kind not in ("eagle", "eagle3"):
        return "No engine knows heads of this kind; use them as above."
    folder, first = here, ""
    if kind == "eagle":
        folder, first = "for-vllm", f"draftheads convert {here} for-vllm --to vllm\n"
    commands = {
        "vllm": ("vLLM (0.33)", "a chain", first + vllm(target, folder, kind, tree)),
        "sglang": ("SGLang (0.5.23)", "a tree", sglang(target, here, kind.upper(), tree)),
    }
    said = []
    for engine, (name, drafts, command) in commands.items():
        reason = loss(engine, Stored(Path(), config, {}))
        served = f", which verifies {drafts}:\n\n```sh\n{command}\n```"
        said.append(
            name + (f" does not serve this head, as it has {reason}." if reason else served)
        )
    return "\n\n".join(said)


def vllm(target: str, head: str, method: str, tree: Tree) -> str:
    """A shell command."""
    settings = {
        "method": method,
        "model": head,
        "num_speculative_tokens": min(CHAIN, tree.depth),
    }
    return f"vllm serve {target} --speculative-config '{json.dumps(settings)}'"


def sglang(target: str, head: str, algorithm: str, tree: Tree) -> str:
    """A shell command. Its number of draft tokens counts the tree's root."""
    width = tree.top_k if isinstance(tree, DynamicTree) else tree.width
    return (
        f"python -m sglang.launch_server --model-path {target} "
        f"--speculative-algorithm {algorithm} \\\n"
        f"    --speculative-draft-model-path {head} --speculative-num-steps {tree.depth} \\\n"
        f"    --speculative-eagle-topk {width} --speculative-num-draft-tokens {tree.nodes}"
    )


def _medusa(config: dict[str, Any], target: str, here: str, tree: Tree) -> str:
    if config.get("truncated_vocab_size"):
        return (
            "No engine serves these heads, as they have a draft vocabulary: vLLM (0.9.2 to 0.32) "
            "stops at an assertion, text-generation-inference has none, SGLang serves no Medusa."
        )
    is_shared = config.get("original_lm_head")
    folder, first = here, ""
    if is_shared:
        folder = "for-vllm"
        first = f"draftheads convert {here} for-vllm --to vllm --target {target}\n"
    if is_shared and config["num_hidden_layers"] > 1:
        tgi = "text-generation-inference does not serve these heads, as it reads one block of each."
    else:
        tgi = (
            "text-generation-inference, likewise a chain:\n\n```sh\n"
            f"draftheads convert {here} for-tgi --to tgi\n"
            f"text-generation-launcher --model-id for-tgi --speculate {min(CHAIN, tree.depth)}\n```"
        )
    return (
        "vLLM 0.9.2 to 0.32 (0.33 serves no Medusa any more), which verify a chain:\n\n```sh\n"
        f"{first}{vllm(target, folder, 'medusa', tree)}\n```\n\n{tgi}\n\nSGLang serves no Medusa."
    )


# The two files that let transformers decode with a head folder or repository by its name:
#
#     model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True)
#
# transformers copies custom_generate/generate.py away from its folder before it runs it, so the
# file holds nothing of its own and everything stands in the installed draftheads. Where that is
# missing, the file says where to get it. It imports inside a `try`, and the requirements are a
# comment, as transformers would else advise `pip install draftheads`: no registry has it, so that
# would run whatever somebody has published under its name.


def install_command() -> str:
    """How to install this project: from the repository that its package names, else from a clone;
    never by its name alone, which no registry has.
    """
    urls = dict(each.split(", ", 1) for each in metadata("draftheads").get_all("Project-URL") or ())
    if "Repository" in urls:
        return f"pip install git+{urls['Repository']}"
    return "pip install ./draftheads  # a clone of its repository; no package registry has it"


GENERATE = '''"""Decode with these draft heads, on the model that they were trained for:

model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True)
"""


def generate(inputs=None, *, model, **arguments):
    """Called by transformers in place of its own `generate`, with all that it was given."""
    try:
        from draftheads.infer.generate import generate_from_repository
    except ImportError as error:
        if "No module named" not in str(error):
            raise
        raise ImportError("these heads need draftheads: {install}") from error
    return generate_from_repository(inputs, model=model, **arguments)
'''

REMOTE_CODE = {
    "custom_generate/generate.py": GENERATE.replace("{install}", install_command()),
    "custom_generate/requirements.txt": f"# draftheads: {install_command()}\n",
}
"""Path in a head folder -> text."""


def write_remote_code(folder: Path) -> None:
    """Write them into a head folder."""
    for name, text in REMOTE_CODE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


# The model card of a head folder, generated from its config.json.


LIBRARY = "draftheads"
PAPERS = {
    "medusa": ("Medusa", "https://arxiv.org/abs/2401.10774"),
    "sequential": ("Sequential Medusa", "https://arxiv.org/abs/2402.05109"),
    "eagle": ("EAGLE", "https://arxiv.org/abs/2401.15077"),
    "eagle3": ("EAGLE-3", "https://arxiv.org/abs/2503.01840"),
}
"""What each kind is called, and where it is described."""

HERE = "THIS_FOLDER_OR_REPO"
"""Stands for the head in commands, until it is published."""
SECTIONS = ("## Use", "## Use from transformers", "## Serve", "## Training", "## Measured")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
PLACES = re.compile(r"[a-z]\w+://\S+|(?<![\w.])(?:~?/|\.\.?/|[A-Za-z]:\\)[^\s\"'`,;]+")
"""Addresses and paths of one machine or network, in a text."""
FILES = (".json", ".jsonl", ".gz", ".parquet", ".txt", ".md")
"""Ends of the names of prompt files, which look like the Hub's otherwise."""
METADATA = ("library_name", "pipeline_tag", "tags")


def render_card(config: dict[str, Any]) -> str:
    """The card: what the head is, how to use and serve it, how it was trained, what was measured.

    Raises KeyError for a config without our own facts.
    """
    facts = config["draftheads"]
    target = facts["target"]["name"] or "an unnamed target"
    adapter = facts.get("adapter")
    elsewhere = ("adapted", "adapted/heads") if adapter else (target, HERE)
    name, paper = PAPERS[facts["kind"]]
    use, transformers, serve, training, measured = SECTIONS
    sections = [
        f"# {name} draft head for `{target}`",
        f"{name} ([paper]({paper})), trained with {LIBRARY}. It proposes a tree of tokens; the "
        f"target verifies it in one forward pass, so {_promise(adapter)}.",
        *_adapter(adapter),
        f"{use}\n\n{_use()}",
        f"{transformers}\n\n{_use_from_transformers(*elsewhere)}",
        f"{serve}\n\n{engine_commands(config, *elsewhere)}",
        "## Shape\n\n" + _table(_shape(config)),
        f"{training}\n\n{_training(facts.get('training') or {})}",
        f"{measured}\n\n{_measured(facts.get('measured') or [])}",
    ]
    card = ModelCard(f"---\n{_metadata(facts).to_yaml()}\n---\n\n" + "\n\n".join(sections))
    return str(card)


def for_repository(card: str, repo_id: str, licence: str | None) -> str:
    """A folder's card as it is published: commands name the repository. licence: a Hub identifier,
    e.g. apache-2.0; None says nothing new of it.
    """
    made = ModelCard(card.replace(HERE, repo_id))
    if licence:
        made.data["license"] = licence
    return str(made)


def card_faults(card: str) -> list[str]:
    """What a published card needs and this one lacks."""
    try:  # the card may have been edited by hand
        data = ModelCard(card).data
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = str(error).strip().splitlines()[0]
        return [f"README.md does not begin with metadata in YAML ({reason})"]
    lacking = [f"README.md lacks {key} in its metadata" for key in METADATA if not data.get(key)]
    return lacking + [
        f"README.md lacks its section {title.removeprefix('## ')!r} (draftheads bench --card "
        "writes it anew)"
        for title in SECTIONS
        if f"\n{title}\n" not in card
    ]


def is_hub_id(name: str | None) -> bool:
    """Whether this names a repository or data set on the Hub, and nothing on this machine."""
    is_file = bool(name) and Path(str(name)).suffix in FILES
    return bool(name and HUB_ID.fullmatch(name) and not is_file and not Path(name).exists())


def private_names(config: dict[str, Any]) -> dict[str, str]:
    """What a config says of this machine and its network -> what is published in its place: of
    addresses nothing, of absolute paths, a local target and local prompts the last part.
    """
    facts = config["draftheads"]
    data = facts.get("training", {}).get("data") or {}
    local = {facts["target"].get("name"), (data.get("prompts") or {}).get("source")}
    found = {name for name in local if name and "/" in name and not is_hub_id(name)}
    for text in _texts(config):
        found |= {match[0] for match in PLACES.finditer(text)}
    return {
        name: "" if "://" in name else re.split(r"[/\\]", name.rstrip("/\\"))[-1]
        for name in sorted(found, key=len, reverse=True)  # a path before the paths that begin it
    }


def without(value: Any, private: dict[str, str]) -> Any:
    """A text or JSON value without what `private_names` has found."""
    if isinstance(value, dict):
        return {key: without(each, private) for key, each in value.items()}
    if isinstance(value, list):
        return [without(each, private) for each in value]
    if isinstance(value, str):
        for name, public in private.items():
            whole = rf"(?<![\w/.-]){re.escape(name)}(?![\w/-])"
            value = re.sub(whole, public, value)
    return value


def _texts(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _metadata(facts: dict[str, Any]) -> ModelCardData:
    target = facts["target"]["name"]
    data = facts.get("training", {}).get("data") or {}
    source = (data.get("prompts") or {}).get("source")
    known = is_hub_id(target)
    return ModelCardData(
        library_name=LIBRARY,
        pipeline_tag="text-generation",
        base_model=target if known else None,
        base_model_relation="adapter" if known else None,
        datasets=[str(source)] if is_hub_id(source) else None,
        tags=["speculative-decoding", "draft-head", facts["kind"]],
    )


def _promise(adapter: dict[str, Any] | None) -> str:
    if adapter is None:
        return "greedy and sampled output stay the target's own"
    return "greedy and sampled output are exactly those of the target *with this adapter on*"


def _adapter(adapter: dict[str, Any] | None) -> list[str]:
    if adapter is None:
        return []
    drift = adapter.get("drift")
    moved = (
        f"On {drift['tokens']:,} held-out tokens its first choice is the untouched target's at "
        f"{drift['agreement']:.2%}, and its distribution is {drift['kl']:.4f} nats per token from "
        "it (KL)."
        if drift
        else "How far it has moved was not measured."
    )
    return [
        "## Adapter\n\nThese heads were trained jointly with a LoRA adapter of the target "
        f"(rank {adapter['rank']}, alpha {_cell(adapter['alpha'])}), which stands in `adapter/` in "
        "PEFT's format. What is verified, and so what you get, is the output of the *adapted* "
        f"target, not of the untouched one. {moved}\n\nThe commands of this project put it on by "
        "themselves. For transformers and engines, write the adapted target as a model, with the "
        f"heads in `adapted/heads`:\n\n```sh\ndraftheads merge {HERE} adapted\n```"
    ]


def _use() -> str:
    return (
        f"```sh\n{install_command()}\ndraftheads chat --head {HERE}\n```\n\n```python\n"
        "from draftheads.heads.hub import load_pair\n"
        "from draftheads.infer.engine import Speculator\n\n"
        f'target, head = load_pair("{HERE}")\n'
        'prompt = target.tokenizer("Once upon a time")["input_ids"]\n'
        "for step in Speculator(target, head).generate(prompt, max_new_tokens=100):\n"
        '    print(target.tokenizer.decode(step.tokens), end="")\n```'
    )


def _use_from_transformers(target: str, head: str) -> str:
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{target}")\n'
        f'model = AutoModelForCausalLM.from_pretrained("{target}")\n'
        'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        f'model.generate(**inputs, custom_generate="{head}", trust_remote_code=True, '
        "max_new_tokens=100)\n```\n\n"
        "The same without remote code:\n\n```python\n"
        "from draftheads.infer.generate import speculative\n\n"
        f'model.generate(**inputs, custom_generate=speculative("{head}"), max_new_tokens=100)\n```'
    )


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    facts = config["draftheads"]
    shape = {key: value for key, value in config.items() if not isinstance(value, dict | list)}
    tree = tree_from_json(facts["tree"])
    kind = "chosen anew in each step" if isinstance(tree, DynamicTree) else "fixed"
    return {**shape, "tree": f"{tree.draft_nodes} draft nodes, {tree.depth} deep, {kind}"}


def _training(facts: dict[str, Any]) -> str:
    """The recipe as it was run goes last, as a recipe."""
    if not facts:
        return "Not trained yet."
    table = _table(dict(_flat({key: facts[key] for key in facts if key != "recipe"})))
    if "recipe" not in facts:
        return table
    return f"{table}\n\n```yaml\n{yaml.safe_dump(facts['recipe'], sort_keys=False)}```"


def _flat(values: dict[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """What was given, nested keys joined: "data.target.name"."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{name}{key}.")
        elif value not in (None, "", []):
            yield f"{name}{key}", value


def _table(values: dict[str, Any]) -> str:
    rows = [f"| {key} | {_cell(value)} |" for key, value in values.items()]
    return "\n".join(["| | |", "| --- | --- |", *rows])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|")


def _measured(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "Not measured yet: run `draftheads bench`."
    lines = [
        "Tokens per step count the target's own token; speedup is over `generate` in one process.",
        "",
        "| nodes | tokens per step | speedup | 95 % interval | lossless | machine |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, high = row["speedup_ci95"]
        lines.append(
            f"| {row['nodes']} | {row['tokens_per_step']:.2f} | {row['speedup']:.2f} "
            f"| {low:.2f} to {high:.2f} | {row['lossless']} | {_cell(row.get('machine', ''))} |"
        )
    return "\n".join(lines)
