"""Build the embedded demo target: a 3 M parameter chat model that knows Python's docstrings.

    python recipes/demo-target/build/build.py --out recipes/demo-target

One command gathers the text from the running Python, trains the tokenizer and the model, and
writes the model folder and the two prompt files next to it. Where other work runs on the same
cores, set OMP_WAIT_POLICY=PASSIVE: threads that spin at barriers waste half the time there.
Shapes: B conversations, T tokens, D model width, N learned tokens, V vocabulary.
"""

import argparse
import copy
import itertools
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from card import Facts, write_card
from chats import Message, epochs, prompt_sets
from corpus import Corpus, gather
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

VOCABULARY = 4096
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
HELD_OUT_PROMPTS = 64
CHATS_PER_POOL = 256  # encoded together and sorted by length, so that padding is small

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Plan:
    """The choices of one run; the defaults built the model in `recipes/demo-target`."""

    out: Path
    steps: int = 4800
    seed: int = 0
    lr: float = 3e-3
    warmup_steps: int = 200
    tokens_per_step: int = 1024  # padding included
    max_tokens: int = 512  # of one conversation; longer ones are cut
    save_every: int = 2000
    threads: int = 2


def train_tokenizer(corpus: Corpus, seed: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer learned from conversations, with the chat template inside."""
    chats = itertools.islice(epochs(corpus, random.Random(seed)), 10 * len(corpus.entries))
    texts = (text for chat in chats for message in chat for text in message.values())
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """An untrained Llama of 3.1 M parameters with tied embeddings."""
    pad, end = tokenizer.convert_tokens_to_ids([PAD, END])
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=pad,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=pad, eos_token_id=[end, pad], pad_token_id=pad, do_sample=False
    )
    return model


def batches(
    chats: Iterator[list[Message]], tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless right-padded (tokens_BT, learn_BT): int64 ids and bool, true on assistant tokens.

    Causal attention never looks right, so right padding needs no attention mask.
    """
    rng = random.Random(plan.seed)
    while True:
        pool = [
            tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
            for chat in itertools.islice(chats, CHATS_PER_POOL)
        ]
        rows = [
            (row["input_ids"][: plan.max_tokens], row["assistant_masks"][: plan.max_tokens])
            for row in sorted(pool, key=lambda row: len(row["input_ids"]))
        ]
        groups = _grouped_by_length(rows, plan.tokens_per_step)
        rng.shuffle(groups)
        for group in groups:
            longest = max(len(ids) for ids, _ in group)
            tokens_BT = torch.zeros(len(group), longest, dtype=torch.int64)
            loss_mask_BT = torch.zeros(len(group), longest, dtype=torch.bool)
            for b, (ids, mask) in enumerate(group):
                tokens_BT[b, : len(ids)] = torch.tensor(ids)
                loss_mask_BT[b, : len(ids)] = torch.tensor(mask, dtype=torch.bool)
            yield tokens_BT, loss_mask_BT


def _grouped_by_length(
    rows: list[tuple[list[int], list[int]]], budget: int
) -> list[list[tuple[list[int], list[int]]]]:
    """Cut rows sorted by length into groups of at most `budget` tokens once padded."""
    groups: list[list[tuple[list[int], list[int]]]] = [[]]
    for row in rows:
        if groups[-1] and (len(groups[-1]) + 1) * len(row[0]) > budget:
            groups.append([])
        groups[-1].append(row)
    return groups


def answer_loss(model: LlamaForCausalLM, tokens_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the tokens that the assistant wrote."""
    states_BTD = model.model(input_ids=tokens_BT, use_cache=False).last_hidden_state
    learn_next_BT = loss_mask_BT[:, 1:]
    logits_NV = model.lm_head(states_BTD[:, :-1][learn_next_BT])
    return functional.cross_entropy(logits_NV, tokens_BT[:, 1:][learn_next_BT])


def learning_rate(step: int, plan: Plan) -> float:
    """Linear warm-up, then a cosine to zero at the last step."""
    if step < plan.warmup_steps:
        return plan.lr * (step + 1) / plan.warmup_steps
    progress = (step - plan.warmup_steps) / max(1, plan.steps - plan.warmup_steps)
    return plan.lr * 0.5 * (1 + math.cos(math.pi * progress))


def train(plan: Plan) -> None:
    """Run the whole plan; every `save_every` steps `plan.out` is a usable folder."""
    torch.manual_seed(plan.seed)
    torch.set_num_threads(plan.threads)
    corpus = gather()
    tokenizer = train_tokenizer(corpus, plan.seed)
    model = new_model(tokenizer)
    prompts, held_out = prompt_sets(corpus, plan.seed, HELD_OUT_PROMPTS)
    write_prompts(plan.out.parent / "demo-prompts.jsonl", prompts)
    write_prompts(plan.out.parent / "demo-heldout.jsonl", held_out)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    stream = batches(epochs(corpus, random.Random(plan.seed + 1)), tokenizer, plan)
    started, tokens_seen = time.monotonic(), 0
    recent_losses: list[float] = []
    for step, (tokens_BT, loss_mask_BT) in enumerate(itertools.islice(stream, plan.steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, plan)
        loss = answer_loss(model, tokens_BT, loss_mask_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        tokens_seen += tokens_BT.numel()
        recent_losses = [*recent_losses[-99:], loss.item()]
        done = step + 1
        must_save = done % plan.save_every == 0 or done == plan.steps
        if done % 100 and not must_save:
            continue
        mean_loss, seconds = sum(recent_losses) / len(recent_losses), time.monotonic() - started
        rate = f"{tokens_seen / seconds:.0f} tokens/s"
        print(f"step {done}  loss {mean_loss:.4f}  {rate}  {seconds:.0f} s", flush=True)
        if must_save:
            spent = (seconds, time.process_time())
            facts = Facts(done, plan.steps, plan.seed, mean_loss, *spent, tokens_seen)
            save(model, tokenizer, corpus, held_out, facts, plan.out)


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    held_out: list[str],
    facts: Facts,
    out: Path,
) -> None:
    """Write the folder with weights in bf16 and replace `out` by it in one rename."""
    fresh, stale = out.with_name(out.name + ".fresh"), out.with_name(out.name + ".stale")
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    # Stored in bf16 to stay small, computed in fp32: greedy decoding is then exactly repeatable.
    edit_json(fresh / "config.json", {"dtype": "float32"}, drop=())
    # Written so that transformers 4 and the serving engines built on it read it too.
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    edit_json(fresh / "tokenizer_config.json", plain, drop=("backend", "extra_special_tokens"))
    stored = LlamaForCausalLM.from_pretrained(fresh)
    write_card(fresh, stored, tokenizer, corpus, held_out, facts)
    if out.exists():
        os.replace(out, stale)
    os.replace(fresh, out)
    shutil.rmtree(stale, ignore_errors=True)


def edit_json(path: Path, changes: dict[str, str], drop: tuple[str, ...]) -> None:
    """Change some keys of a JSON object on disk and drop others."""
    content = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in content.items() if key not in drop}
    path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def write_prompts(path: Path, prompts: list[str]) -> None:
    """One `{"messages": [...]}` line per prompt."""
    lines = [
        json.dumps({"messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False)
        for prompt in prompts
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("recipes/demo-target"))
    for name in ("steps", "seed", "threads", "save-every"):
        default = getattr(Plan, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=Plan.lr, help="default: %(default)s")
    train(Plan(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
