"""Run by the Python that has `speculators`: load a folder with its classes and say what they find.

    python interop_speculators.py FOLDER INPUTS.safetensors OUTPUTS.safetensors

inputs: features (T, 3 D) and tokens (T). outputs: logits (steps, T, v) of three steps; a step reads
the token that came and the state of the step before. Prints, as JSON, the tensors that were missing
and unexpected.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel

STEPS = 3


def main(folder: str, inputs: str, outputs: str) -> None:
    config: Any = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32)
    _, found = super(Eagle3DraftModel, Eagle3DraftModel).from_pretrained(
        folder, config=config, output_loading_info=True
    )
    model.load_verifier_weights()
    given = load_file(inputs)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0]))
    with torch.no_grad():
        model.eval()(
            given["features"][None],
            given["tokens"][None],
            torch.zeros_like(given["tokens"])[None],
            ttt_steps=STEPS,
        )
    save_file({"logits": torch.stack(logits)}, outputs)
    print(json.dumps({name: sorted(map(str, found[name])) for name in sorted(found)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
