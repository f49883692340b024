"""How engines serve each kind of head: text for the model card.

Flags are those of vLLM 0.33, SGLang 0.5.23 and text-generation-inference. That vLLM serves Medusa
is documented from 0.9.2 to 0.22. Nothing of it was run here.
"""

from __future__ import annotations

import json
from typing import Any

from draftheads.heads.shape import DynamicTree, Tree, tree_from_json

CHAIN = 3
"""vLLM verifies a chain, whose later tokens are seldom right: that long at most."""


def engine_commands(config: dict[str, Any], target: str, here: str) -> str:
    """Markdown: the commands for engines that serve this head, and the names of those that do not.

    config: of the head. here: its folder or repository.
    """
    facts = config["draftheads"]
    tree = tree_from_json(facts["tree"])
    if facts["kind"] == "eagle3":
        return _commands(vllm(target, here, "eagle3", tree), sglang(target, here, "EAGLE3", tree))
    if facts["kind"] == "eagle":
        return _commands(
            f"draftheads convert {here} for-vllm --to vllm\n"
            + vllm(target, "for-vllm", "eagle", tree),
            sglang(target, here, "EAGLE", tree),
        )
    if facts["kind"] == "medusa":
        return _medusa(config, target, here, tree)
    return "No engine knows heads of this kind; use them as above."


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


def _commands(for_vllm: str, for_sglang: str) -> str:
    return (
        f"vLLM (0.33), which verifies a chain:\n\n```sh\n{for_vllm}\n```\n\n"
        f"SGLang (0.5.23), which verifies a tree:\n\n```sh\n{for_sglang}\n```\n\n"
        "`draftheads convert` with `--to vllm` or `--to sglang` says so where an engine cannot be "
        "told all of a head."
    )


def _medusa(config: dict[str, Any], target: str, here: str, tree: Tree) -> str:
    folder, first = here, ""
    if config.get("original_lm_head"):
        folder, first = "for-vllm", f"draftheads convert {here} for-vllm --to vllm\n"
    return (
        "vLLM 0.9.2 to 0.22 (0.33 serves no Medusa any more), which verify a chain:\n\n```sh\n"
        f"{first}{vllm(target, folder, 'medusa', tree)}\n```\n\n"
        "text-generation-inference, likewise a chain:\n\n```sh\n"
        f"draftheads convert {here} for-tgi --to tgi\n"
        f"text-generation-launcher --model-id for-tgi --speculate {min(CHAIN, tree.depth)}\n```"
        "\n\nSGLang serves no Medusa."
    )
