"""Write a random model of a real model's shape, which distils, trains and decodes at its speed.

    python scripts/benchmarks/random_target.py qwen3.5-0.8b out/random [--device cuda] [--mtp]

It has the demo target's tokenizer. Drafts of it are hardly ever accepted, as its texts have no law
to learn; times and memory do not depend on that.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights
from typer import Argument, Option

from draftheads.heads.formats.mtp import write_target
from draftheads.heads.mtp.head import MtpHead
from draftheads.heads.target.model import Target
from draftheads.recipes import packaged

QWEN = {"tie_word_embeddings": True, "max_position_embeddings": 4096}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "qwen3",
        {
            **QWEN,
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "qwen3.5-0.8b": (
        "qwen3_5_text",
        {
            **QWEN,
            "vocab_size": 248_320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
        },
    ),
    "tiny": (
        "qwen3_5_text",
        {
            **QWEN,
            "vocab_size": 5000,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
}


def main(
    shape: Annotated[str, Argument(help=", ".join(SHAPES))],
    out: Annotated[Path, Argument(help="a new folder")],
    device: Annotated[str, Option(help="where the numbers are drawn")] = "cpu",
    mtp: Annotated[bool, Option(help="with an MTP layer")] = False,
) -> None:
    """Write config, weights in bfloat16, and tokenizer."""
    kind, options = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[kind](**options), dtype=torch.bfloat16
        )
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.05)
        if parameter.ndim == 1:
            parameter.data.add_(0.0 if "A_log" in name else 1.0)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder if mtp else out)
        if mtp:
            target = Target.load(folder, dtype="bfloat16", device=device)
            write_target(MtpHead.create(target), target, out)
    AutoTokenizer.from_pretrained(packaged("demo-target", "")).save_pretrained(out)


if __name__ == "__main__":
    typer.run(main)
