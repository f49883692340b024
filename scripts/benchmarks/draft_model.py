"""A draft model that learns from its target (DistillSpec, arXiv 2310.08461): what it is worth
before and after, and which divergence is best.

The student is the target's first layers as a model of its own. TRL's DistillationTrainer lets it
write on its own and compares it with the target, by reverse KL (beta 1), forward KL (0) or between.

    pip install trl
    python draft_model.py --target demo-target --prompts demo-prompts --out DIR
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer

from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import decoder_layers
from draftheads.heads.tree import parse_tree
from draftheads.infer.drafters.draft_model import DraftModel
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import encode_prompt
from draftheads.train.data.prompts import read_prompts


def student_of(target: Target, layers: int, folder: Path) -> None:
    """Save the first layers as a model."""
    model = target.model
    config = model.config
    kept = decoder_layers(model)
    whole = list(kept)
    before = config.num_hidden_layers
    del kept[layers:]
    config.num_hidden_layers = layers
    types = getattr(config, "layer_types", None)
    if types:
        config.layer_types = types[:layers]
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    kept.extend(whole[layers:])
    config.num_hidden_layers = before
    if types:
        config.layer_types = types


def tokens_per_step(
    target: Target, folder: Path, prompts: list[list[int]], tree: str
) -> tuple[float, bool]:
    """With this draft model, and whether all is as without."""
    drafts = DraftModel(Target.load(str(folder), dtype="float32"), parse_tree(tree))
    written = []
    for engine in (Speculator(target), Speculator(target, drafts)):
        steps = [
            [step.tokens for step in engine.generate(prompt, max_new_tokens=96)]
            for prompt in prompts
        ]
        written.append(steps)
    plain, drafted = ([sum(steps, []) for steps in each] for each in written)
    return sum(map(len, drafted)) / sum(map(len, written[1])), plain == drafted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--prompts", default="demo-prompts")
    parser.add_argument("--heldout", default="demo-heldout")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--tree", default="1,1,1,1")
    parser.add_argument("--beta", type=float, nargs="*", default=[0.0, 0.5, 1.0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(options.target, dtype="float32")
    untrained = options.out / "untrained"
    student_of(target, options.layers, untrained)
    prompts = [encode_prompt(target, each.messages) for each in read_prompts(options.heldout)][:24]
    tau, same = tokens_per_step(target, untrained, prompts, options.tree)
    print(json.dumps({"beta": None, "tau": tau, "lossless": same}), flush=True)
    rows = [{"prompt": list(each.messages)} for each in read_prompts(options.prompts)]
    for beta in options.beta:
        folder = options.out / f"beta-{beta:g}"
        config = DistillationConfig(
            output_dir=str(folder),
            beta=beta,
            max_steps=options.steps,
            per_device_train_batch_size=options.rows,
            max_completion_length=96,
            learning_rate=options.lr,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=50,
        )
        student = AutoModelForCausalLM.from_pretrained(untrained, dtype=torch.float32)
        trainer = DistillationTrainer(
            model=student,
            teacher_model=target.model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=target.tokenizer,
        )
        began = time.process_time()
        trainer.train()
        seconds = time.process_time() - began
        trainer.save_model(str(folder))
        target.tokenizer.save_pretrained(folder)
        tau, same = tokens_per_step(target, folder, prompts, options.tree)
        print(
            json.dumps({"beta": beta, "tau": tau, "lossless": same, "cpu_s": seconds}), flush=True
        )


if __name__ == "__main__":
    main()
