"""Train a small hybrid target on real text, as no public one is small enough for a CPU.

    python scripts/benchmarks/made_hybrids.py {qwen3.5|lfm2} --text train.txt --tokenizer FOLDER \
        --out out/made/qwen3.5 [--minutes 18]

A Qwen3.5-type model has three gated delta nets to one attention layer, an LFM2-type one three short
convolutions. Both have fewer than a million parameters. Nothing here is ours: model, loss and
optimiser are those of transformers and torch. Prints the loss, in nats per token, of windows of the
text that it learns from.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer
from typer import Argument, Option

COMMON = {
    "hidden_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": (
        "qwen3_5_text",
        {
            **COMMON,
            "head_dim": 16,
            "intermediate_size": 192,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            **COMMON,
            "intermediate_size": 256,
            "layer_types": ["conv", "conv", "conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
        },
    ),
}
WINDOW, ROWS, WARM_UP, PEAK = 256, 16, 100, 4e-3


def main(
    kind: Annotated[str, Argument(help=" or ".join(KINDS))],
    text: Annotated[Path, Option(help="what it learns to write")],
    tokenizer: Annotated[Path, Option(help="folder of a tokenizer")],
    out: Annotated[Path, Option(help="folder for the model")],
    minutes: Annotated[float, Option(help="of training, CPU time")] = 18,
    seed: Annotated[int, Option(help="of weights and windows")] = 0,
) -> None:
    """Train it, and save it with its tokenizer."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    words = AutoTokenizer.from_pretrained(tokenizer)
    name, options = KINDS[kind]
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": None}
    config = CONFIG_MAPPING[name](vocab_size=len(words), **ends, **options)
    model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    ids_T = torch.tensor(words(text.read_text(), add_special_tokens=False)["input_ids"])
    typer.echo(f"{type(model).__name__}: {count:,} parameters, {len(ids_T):,} tokens of text")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    started, spent, step, mean = time.process_time(), 0.0, 0, 0.0
    while spent < 1:
        rate = PEAK * min(1, (step + 1) / WARM_UP) * (1 - spent)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts_R = torch.randint(len(ids_T) - WINDOW, (ROWS,))
        rows_RT = ids_T[starts_R[:, None] + torch.arange(WINDOW)]
        rows_RT[:, 0] = config.bos_token_id
        loss = model(rows_RT, labels=rows_RT, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        spent = (time.process_time() - started) / 60 / minutes
        step += 1
        if step % 100 == 0:
            typer.echo(f"step {step:5}  loss {mean:.3f}  {spent:.0%} of {minutes:g} minutes")
    model.eval().save_pretrained(out)
    words.save_pretrained(out)
    typer.echo(f"wrote {out}: {step} steps of {ROWS * WINDOW} tokens, loss {mean:.3f}")


if __name__ == "__main__":
    typer.run(main)
