"""How engines serve each kind of head: text for the model card.

Flags are those of vLLM 0.33, SGLang 0.5.23 and text-generation-inference. vLLM serves Medusa from
0.9.2 to 0.32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftheads.heads.formats.eagle_writers import loss
from draftheads.heads.formats.stored import Stored
from draftheads.heads.shape import DynamicTree, Tree, tree_from_json

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
