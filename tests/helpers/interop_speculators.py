"""Run by the Python that has `speculators`: load a folder with its classes and say what they find.

    python interop_speculators.py FOLDER INPUTS.safetensors OUTPUTS.safetensors

EAGLE-3: inputs are features (T, 3 D) and tokens (T), outputs are logits (steps, T, v) of three
steps; a step reads the token that came and the state of the step before. DSpark and DFlash: inputs
are features (N, T, m D), tokens (N, T) and anchors (N), outputs are logits (N, slots, v) of the
blocks after N texts. Prints, as JSON, the tensors that were missing and unexpected.

    python interop_speculators.py make FOLDER TARGET MODEL_TYPE

saves a random EAGLE-3 head for a target with layers of that type, as that library does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import core as dflash
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dspark import core as dspark
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

STEPS = 3


BLOCKS: dict[str, Any] = {
    "dflash": (dflash, DFlashSpeculatorConfig, dflash.DFlashDraftModel),
    "dspark": (dspark, DSparkSpeculatorConfig, dspark.DSparkDraftModel),
}


def main(folder: str, inputs: str, outputs: str) -> None:
    kind = json.loads((Path(folder) / "config.json").read_text())["speculators_model_type"]
    given = load_file(inputs)
    logits, found = blocks(kind, folder, given) if kind in BLOCKS else eagle3(folder, given)
    save_file({"logits": logits.contiguous()}, outputs)
    print(json.dumps({name: sorted(map(str, found[name])) for name in sorted(found)}))


def blocks(kind: str, folder: str, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """One text at a time, whose only anchor is the given one."""
    module, config_class, model_class = BLOCKS[kind]
    config = config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model, found = model_class.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True
    )
    model.load_verifier_weights()
    logits: list[torch.Tensor] = []

    def keep(scores: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        logits.append(scores.view(config.block_size, -1))
        return torch.zeros(()), {}

    module.compute_metrics = keep
    texts = zip(given["features"], given["tokens"], given["anchors"].tolist(), strict=True)
    for features, tokens, anchor in texts:
        mask = torch.zeros(1, len(tokens))
        mask[0, anchor] = 1
        last = torch.zeros(1, len(tokens), config.transformer_layer_config.hidden_size)
        documents = torch.zeros(1, len(tokens), dtype=torch.long)
        with torch.no_grad():
            model.eval()(features[None], tokens[None], mask, last, documents, max_anchors=1)
    return torch.stack(logits), found


def eagle3(folder: str, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    config: Any = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32)
    _, found = super(Eagle3DraftModel, Eagle3DraftModel).from_pretrained(
        folder, config=config, output_loading_info=True
    )
    model.load_verifier_weights()
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0]))
    with torch.no_grad():
        model.eval()(
            given["features"][None],
            given["tokens"][None],
            torch.zeros_like(given["tokens"])[None],
            ttt_steps=STEPS,
        )
    return torch.stack(logits), found


def make(folder: str, target: str, model_type: str) -> None:
    words = AutoConfig.from_pretrained(target)
    layer = AutoConfig.for_model(
        model_type,
        vocab_size=words.vocab_size,
        hidden_size=words.hidden_size,
        intermediate_size=96,
        num_hidden_layers=1,
        head_dim=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
    )
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    about = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[proposal],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=target, architectures=words.architectures),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=300,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[1, 3, 5],
        speculators_config=about,
    )
    torch.manual_seed(0)
    model, places = Eagle3DraftModel(config), torch.arange(300)
    known = torch.zeros(words.vocab_size, dtype=torch.bool)
    known[5 + 3 * places] = True
    model.load_vocab_mappings(known, 5 + 2 * places)
    model.load_verifier_weights()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        elif "embed" not in name and "verifier" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
