"""The model card of a head folder, generated from its config.json."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from draftheads.heads.shape import DynamicTree, tree_from_json

LIBRARY = "draftheads"
PAPERS = {
    "medusa": ("Medusa", "https://arxiv.org/abs/2401.10774"),
    "sequential": ("Sequential Medusa", "https://arxiv.org/abs/2402.05109"),
    "eagle": ("EAGLE", "https://arxiv.org/abs/2401.15077"),
    "eagle3": ("EAGLE-3", "https://arxiv.org/abs/2503.01840"),
}
"""What each kind is called, and where it is described."""


def render_card(config: dict[str, Any]) -> str:
    """The card: what the head is, how to use it, how it was trained, what was measured."""
    facts = config["draftheads"]
    target = facts["target"]["name"] or "an unnamed target"
    name, paper = PAPERS[facts["kind"]]
    is_hub_id = target.count("/") == 1 and not target.startswith((".", "/", "~"))
    data = ModelCardData(
        library_name=LIBRARY,
        pipeline_tag="text-generation",
        base_model=target if is_hub_id else None,
        tags=["speculative-decoding", "draft-head", facts["kind"]],
    )
    sections = [
        f"# {name} draft head for `{target}`",
        f"{name} ([paper]({paper})), trained with {LIBRARY} on the frozen "
        "target. It proposes a tree of tokens; the target verifies it in one forward pass, so "
        "greedy and sampled output stay the target's own.",
        _use(target),
        "## Shape\n\n" + _table(_shape(config)),
        "## Training\n\n" + (_table(facts["training"]) or "Not trained yet."),
        "## Measured\n\n" + _measured(facts["measured"]),
    ]
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections))
    return str(card)


def _use(target: str) -> str:
    return (
        "## Use\n\n```python\n"
        "from draftheads.heads.hub import load_head\n"
        "from draftheads.heads.target import Target\n"
        "from draftheads.infer.engine import Speculator\n\n"
        f'target = Target.load("{target}")\n'
        'head = load_head("THIS_FOLDER_OR_REPO", target=target)\n'
        'prompt = target.tokenizer("Once upon a time")["input_ids"]\n'
        "for step in Speculator(target, head).generate(prompt, max_new_tokens=100):\n"
        '    print(target.tokenizer.decode(step.tokens), end="")\n```'
    )


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    facts = config["draftheads"]
    shape = {key: value for key, value in config.items() if not isinstance(value, dict | list)}
    tree = tree_from_json(facts["tree"])
    kind = "chosen anew in each step" if isinstance(tree, DynamicTree) else "fixed"
    return {**shape, "tree": f"{tree.draft_nodes} draft nodes, {tree.depth} deep, {kind}"}


def _table(values: dict[str, Any]) -> str:
    if not values:
        return ""
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
