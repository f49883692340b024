"""How much τ do heads lose when their target changes, and how soon does `head.from` regain it?

    python scripts/benchmarks/recovery.py --target T --prompts P --head RUN [--head RUN ...] \
        (--modules MODULE ... | --text FILE) --out OUT

The target is changed twice: by a LoRA, which is trained here on questions about documented modules
(as the demo target was on the standard library's) or on passages of a text, and by rounding the
matrices of its layers to Q4_0. Each changed target answers prompts, as the old one did in the data
of the heads. On these answers heads are trained with shares of the steps that RUN had: continued,
and from nothing. τ is decoded on held-out prompts. The same command resumes: what is in OUT stays.
"""

from __future__ import annotations

import importlib
import json
import random
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftheads.heads.files import staged, write_text
from draftheads.heads.target.model import Target
from draftheads.train.batches import Documents
from draftheads.train.checkpoint import RunState, newest, read_state
from draftheads.train.data.answers import read_manifest
from draftheads.train.data.distill import DistillOptions, distill
from draftheads.train.data.prompts import read_prompts
from draftheads.train.entry import mistakes_in_one_line
from draftheads.train.medusa import fit
from draftheads.train.recipe import Recipe

BUILD = Path(__file__).parents[2] / "recipes/demo-target/build"
IGNORED = -100
"""Label of a token without a loss, in transformers."""
LONGEST = 192
"""Tokens of a document that a LoRA is trained on."""
PASSAGE = 40
"""Words."""
Q4_0 = GGMLQuantizationType.Q4_0
BLOCK = 32
"""Weights with one scale in Q4_0."""
COMPARED = 64
"""Answers on which the tokens of the old and the changed target are compared."""
EVAL = {"prompts": 48, "new_tokens": 64, "best": None}

Document = tuple[list[int], list[int]]
"""Token ids, and whether each has a loss."""


@dataclass(frozen=True)
class Changed:
    """A target and its answers. lora: a folder, if that is the change."""

    name: str
    target: Path
    lora: Path | None
    answers: Path

    def load(self) -> Target:
        """In float32."""
        return Target.load(self.target, dtype="float32", lora=self.lora)


def chats(modules: Sequence[str], tokenizer: Any, prompts: Path) -> Iterator[Document]:
    """Endless conversations about modules, and a file of questions about them."""
    sys.path.insert(0, str(BUILD))
    corpus, talk = importlib.import_module("corpus"), importlib.import_module("chats")
    corpus.MODULES[:] = modules
    corpus.CLASSES.clear()
    entries = corpus.gather()
    questions, _ = talk.prompt_sets(entries, seed=0, held_out=0)
    records = [{"messages": [{"role": "user", "content": each}]} for each in questions]
    write_text(prompts, "".join(f"{json.dumps(record)}\n" for record in records))
    for messages in talk.epochs(entries, random.Random(0)):
        row = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        yield row["input_ids"], row["assistant_masks"]


def passages(source: Path, tokenizer: Any, prompts: Path) -> Iterator[Document]:
    """Endless passages of a text, and a file of them."""
    texts = []
    for prompt in read_prompts(source):
        turns = [str(turn["content"]) for turn in prompt.messages or ()]
        words = (prompt.text or " ".join(turns)).split()
        texts += [" ".join(words[i : i + PASSAGE]) for i in range(0, len(words), PASSAGE)]
    whole = [text for text in dict.fromkeys(texts) if len(text.split()) == PASSAGE]
    random.Random(0).shuffle(whole)
    write_text(prompts, "".join(f"{json.dumps({'text': text})}\n" for text in whole))
    while True:
        for text in whole:
            ids = tokenizer(text).input_ids
            yield ids, [1] * len(ids)


def train_lora(chosen: Namespace, documents: Iterator[Document], folder: Path) -> None:
    """A LoRA of all linear layers, in PEFT's format."""
    torch.manual_seed(0)
    config = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")
    model: Any = AutoModelForCausalLM.from_pretrained(chosen.target, dtype=torch.float32)
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.lora_steps)
    for step in range(chosen.lora_steps):
        rows = [torch.tensor(each)[:, :LONGEST] for each in islice(documents, 8)]
        tokens_BT = pad_sequence([ids for ids, _ in rows], batch_first=True)
        learn_BT = pad_sequence([learn for _, learn in rows], batch_first=True)
        labels_BT = tokens_BT.masked_fill(learn_BT == 0, IGNORED)
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == chosen.lora_steps - 1:
            print(f"LoRA, step {step}: loss {loss.item():.3f}", file=sys.stderr)
    model.save_pretrained(folder)


def write_rounded(target: Path, folder: Path) -> None:
    """A copy whose layers' matrices went through Q4_0; rows that its blocks do not divide stay."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for layer in model.get_decoder().modules():
        if isinstance(layer, nn.Linear) and layer.in_features % BLOCK == 0:
            weight = layer.weight.detach().numpy()
            layer.weight.data = torch.from_numpy(dequantize(quantize(weight, Q4_0), Q4_0))
    shutil.copytree(target, folder, dirs_exist_ok=True)
    model.save_pretrained(folder)


def changes(chosen: Namespace, data: Path) -> Iterator[Changed]:
    """The target with a LoRA and in Q4_0, each with its answers. data: those of the old target."""
    out, target = chosen.out, chosen.target
    lora, copy = Changed("LoRA", target, out / "lora", out / "lora-answers"), out / "q4_0"
    topic = out / "topic.jsonl"
    if lora.lora and not lora.lora.exists():
        tokenizer = AutoTokenizer.from_pretrained(target)
        about = chats(chosen.modules, tokenizer, topic)
        if chosen.text:
            about = passages(chosen.text, tokenizer, topic)
        with staged(lora.lora) as folder:
            train_lora(chosen, about, folder)
    if not copy.exists():
        with staged(copy) as folder:
            write_rounded(target, folder)
    for change, source in (
        (lora, topic),
        (Changed("Q4_0", copy, None, out / "q4_0-answers"), chosen.prompts),
    ):
        words = None if source == topic and not chosen.text else chosen.prompt_words
        prompts = read_prompts(source, limit=chosen.limit, prompt_words=words)
        sampling = read_manifest(data)["sampling"]
        options = DistillOptions(out=change.answers, batch_size=chosen.batch_size, **sampling)
        distill(change.load(), prompts, options)
        yield change


@torch.no_grad()
def other_tokens(before: Target, change: Changed) -> float:
    """Share of the changed target's answers in which the old one's first choice is another."""
    after = change.load()
    documents = Documents.open(change.answers, after.vocab_size, change.name)
    different: list[torch.Tensor] = []
    for start, stop in documents.spans[:COMPARED].tolist():
        ids_1T = torch.from_numpy(documents.tokens(start, stop)).long()[None]
        written_T = torch.from_numpy(documents.mask(start, stop))[1:]
        old_T, new_T = (each.model(ids_1T).logits[0, :-1].argmax(-1) for each in (before, after))
        different.append((old_T != new_T)[written_T])
    return float(torch.cat(different).float().mean())


def train(old: RunState, change: Changed, output: Path, steps: int, **keys: Any) -> RunState:
    """The state at the end of a run: the old head's recipe on the changed target. keys: those that
    differ; sections are merged.
    """
    values = old.recipe.model_dump(mode="json")
    values["target"] = str(change.target)
    values["target_adapter"] = str(change.lora) if change.lora else None
    values["data"]["path"] = change.answers
    length = {"steps": steps, "epochs": None, "minutes": None, "save_every": steps}
    values["run"] |= {**length, "output": output}
    values["eval"] |= {**EVAL, "every": steps}
    for section, choices in keys.items():
        values[section] |= choices
    return read_state(fit(Recipe.model_validate(values)).checkpoint)


def origin_tau(old: RunState, head: Path, change: Changed, output: Path) -> float:
    """τ of the old head, with its own draft vocabulary."""
    choices: dict[str, Any] = {"from": str(head)}
    if old.recipe.head.draft_vocabulary:
        choices["vocabulary"] = None
    origin = train(old, change, output, 1, head=choices).origin
    assert origin is not None and origin.tokens_per_step is not None
    return origin.tokens_per_step


def row(head: Path, change: Changed, before: Changed, chosen: Namespace) -> list[str]:
    """τ of one head on one changed target. before: the old target."""
    old, runs = state_of(head), chosen.out / f"{head.name}-{change.name}"

    def tau(name: str, share: float, **keys: Any) -> float:
        state = train(old, change, runs / f"{name}-{share:g}", round(share * old.step), **keys)
        assert state.measured is not None
        return float(state.measured["tokens_per_step"])

    optim = {"lr": chosen.lr * old.recipe.optim.lr}
    best = origin_tau(old, head, before, chosen.out / f"{head.name}-before")
    lost = origin_tau(old, head, change, runs / "old")
    name, source = f"continued-{chosen.lr:g}", {"from": str(head)}
    taus = [tau(name, share, head=source, optim=optim) for share in chosen.shares]
    new = [tau("new", share) for share in chosen.shares]
    whole = tau("new", 1)
    pairs = [
        f"{mine:.2f} / {other:.2f} ({(mine - lost) / (whole - lost):.0%})"
        for mine, other in zip(taus, new, strict=True)
    ]
    tokens = f"{old.tokens / 1000:,.0f}"
    changed = f"{other_tokens(before.load(), change):.0%}"
    kind = old.recipe.head.kind
    return [
        kind,
        change.name,
        changed,
        tokens,
        f"{best:.2f}",
        f"{lost:.2f}",
        *pairs,
        f"{whole:.2f}",
    ]


def state_of(head: Path) -> RunState:
    """Of the newest checkpoint."""
    saved, _ = newest(head)
    if saved is None:
        raise FileNotFoundError(f"{head}: expected the folder of a run, found no checkpoint")
    return saved.state


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, train, print."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="its folder")
    parser.add_argument("--prompts", required=True, help="of the heads' data")
    parser.add_argument("--prompt-words", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--head", type=Path, action="append", required=True, help="a run's folder")
    topic = parser.add_mutually_exclusive_group(required=True)
    topic.add_argument("--modules", nargs="+")
    topic.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lora-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.02, 0.05, 0.1])
    parser.add_argument("--lr", type=float, default=1.0, help="of continuing, times the old run's")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    data = state_of(chosen.head[0]).recipe.data.path
    before = Changed("none", chosen.target, None, data)
    shares = [f"{share:.0%}: continued / new (regained)" for share in chosen.shares]
    columns = ["head", "change", "other tokens", "k tokens", "τ before", "old head", *shares, "new"]
    rows = [
        row(head, change, before, chosen)
        for change in changes(chosen, data)
        for head in chosen.head
    ]
    for cells in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
