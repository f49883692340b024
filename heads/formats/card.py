"""The model card of a head folder, rendered from its config.json, and the code with which
transformers decodes with the folder.
"""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from jinja2 import Environment

from draftheads.arguments import HUB_ID
from draftheads.heads.formats import block
from draftheads.heads.formats.facts import HeadFacts
from draftheads.heads.formats.llamacpp import server_options
from draftheads.heads.formats.stored import MERGED, Stored
from draftheads.heads.formats.table import WRITERS, loss
from draftheads.heads.kinds import HEADS
from draftheads.heads.mtp.families import family_of
from draftheads.heads.tables import flat, markdown_table
from draftheads.recipes import packaged

ENGINES = {
    "vllm": "vLLM (0.33; for Medusa 0.9.2 to 0.32)",
    "sglang": "SGLang (0.5.23)",
    "gguf": "llama.cpp",
    "openvino": "OpenVINO GenAI (2026.4)",
    "mlx": "mlx-vlm (0.7.10), for targets whose caches it can roll back",
    "lmdeploy": "LMDeploy (0.18)",
}
CHAIN = 3
"""Longest chain in a command for heads that are not made for a block: later tokens are rarely
accepted.
"""
HERE = "THIS_FOLDER_OR_REPO"
"""Placeholder for the head in commands, until it is published."""
DATA_FILES = (".json", ".jsonl", ".gz", ".parquet", ".txt", ".md")
TEMPLATE = Path(__file__).with_name("card.jinja")
ENVIRONMENT = Environment(trim_blocks=True, lstrip_blocks=True)
ENVIRONMENT.globals.update(here=HERE, merged=MERGED)


def render_card(config: dict[str, Any], to: str = "draftheads") -> str:
    """The card: what the head is, how to use and serve it, how it was trained.

    to: the program for which its folder was converted; config: always in our own layout. Raises
    KeyError for a config without our own metadata.
    """
    facts = HeadFacts(config["draftheads"])
    kind = facts.kind
    target = facts.target.name
    tree = facts.tree
    training = dict(facts.training)
    recipe = training.pop("recipe", None)
    lora = facts.target.lora
    bases = [name.partition("@")[0] for name in (target, lora) if name]
    on_hub = bool(target) and all(map(is_hub_id, bases))
    data = _card_data(kind, (bases if lora else target) if on_hub else None, flat(training))
    layer = config.get("mtp_layer")  # engines load it from its target's folder: `convert --to mtp`
    return ENVIRONMENT.from_string(TEMPLATE.read_text()).render(
        card_data=data.to_yaml(),
        head=HEADS[kind],
        kind=kind,
        target=target or "an unnamed target",
        on_hub=on_hub,
        lora=lora,
        to=to,
        dtype=" --dtype float32" if facts.target.dtype == "float32" else "",
        config=config,
        quantised=facts.target.quantisation,
        adapter=markdown_table(("", ""), flat(facts.adapter or {}).items()),
        install=install_command(),
        engines=[_engine(each, config, to) for each in _engines(to) if kind in WRITERS[each]],
        llamacpp=" ".join(["", *server_options(kind, facts.target.eos_ids)]),
        chain=block.chain(config) if kind == "block" else max(1, min(CHAIN, tree.depth)),
        method=method(kind, config),
        in_target=layer is not None and family_of(layer["config"]["model_type"]) is not None,
        tree=tree,
        decoding=training.get("decoding"),
        training=markdown_table(("", ""), flat(training).items()),
        recipe=yaml.safe_dump(recipe, sort_keys=False) if recipe else "",
    )


def _card_data(kind: str, base: Any, training: dict[str, Any]) -> ModelCardData:
    """The metadata that the Hub reads of a card. base: the target, and its LoRA if it has one, on
    the Hub; None: they are not there.
    """
    source = training.get("data.prompts.source")
    return ModelCardData(
        library_name="draftheads",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation="adapter" if base else None,
        datasets=[str(source)] if is_hub_id(source) else None,
        tags=["speculative-decoding", "draft-head", kind],
    )


def merge_sections(edited: str, old: str, new: str) -> str:
    """A card with the sections of a new one in place of those that are as they were in an old one;
    what people wrote stays.
    """
    before, after, now = (re.split("^(?=## )", card, flags=re.M) for card in (old, new, edited))
    sections = {each.partition("\n")[0]: each for each in after}
    return "".join(
        sections.get(each.partition("\n")[0], "") if each in before else each for each in now
    )


def _engines(to: str) -> list[str]:
    """The engines that a card tells about."""
    if to == "draftheads":  # after a conversion, too; two read too few to be named
        return [engine for engine in ENGINES if engine not in ("mlx", "lmdeploy")]
    return ["vllm" if to == "speculators" else to]  # whose layout it reads, too


def _engine(to: str, config: dict[str, Any], layout: str) -> dict[str, Any]:
    """The card's entry of an engine. convert: whether the folder is in our layout and the engine
    needs another; with_target: which takes matrices of the target.
    """
    kind = HeadFacts(config["draftheads"]).kind
    is_shared = kind == "medusa" and config["original_lm_head"]
    is_bare = method(kind, config) == "dspark" and not config["markov_rank"]
    converts = {
        "vllm": is_bare or kind == "eagle" or is_shared,
        "sglang": is_bare,
        "openvino": True,
        "mlx": True,
        "lmdeploy": True,
        "gguf": False,  # it always is, for a file of the target
    }[to]
    return {
        "to": to,
        "name": ENGINES[to],
        "loss": loss(to, Stored(config, {})),
        "convert": converts and layout == "draftheads",
        "with_target": is_shared,
    }


def method(kind: str, config: dict[str, Any]) -> str:
    """Engines' name of the way to draft: the kind, or the one of two that a block head is."""
    if kind != "block":
        return kind
    return "dflash" if "dflash_config" in config else "dspark"


def is_hub_id(name: Any) -> bool:
    """True if this names a repository or data set on the Hub, and nothing on this machine."""
    return bool(
        isinstance(name, str)
        and HUB_ID.fullmatch(name)
        and not name.endswith(DATA_FILES)
        and not Path(name).exists()
        and not packaged(name, "")
    )


def install_command() -> str:
    """The command that installs this project: from its repository if the package names one, else
    from a clone. Never by its name alone, which is in no registry.
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
# transformers copies this file out of its folder, so it is self-contained. The import is in a
# `try`, and the requirements are a comment: otherwise transformers would advise `pip install
# draftheads`, and run whatever somebody publishes under that name.

REMOTE_CODE = {
    "custom_generate/generate.py": GENERATE.replace("{install}", install_command()),
    "custom_generate/requirements.txt": f"# draftheads: {install_command()}\n",
}
"""Path in a head folder -> text."""


def write_remote_code(folder: Path) -> None:
    """Write the files of `model.generate(custom_generate=folder)`."""
    for name, text in REMOTE_CODE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
