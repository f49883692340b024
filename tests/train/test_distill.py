"""What the target answers is stored exactly as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chat import (
    CONTEXT,
    END,
    EOS,
    TEMPLATE,
    byte_tokenizer,
    files,
    llama,
    on_call,
    options,
    prompts,
    records,
)
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from draftheads.heads.target import Target
from draftheads.infer.accept import filtered_logits
from draftheads.train.data.answers import read_answers, read_manifest
from draftheads.train.data.conversation import TOO_LONG
from draftheads.train.data.distill import Sampling, distill, generate
from draftheads.train.data.prompts import Prompt


@pytest.fixture(scope="module")
def shared_target() -> Target:
    return llama()


@pytest.fixture
def target(shared_target: Target) -> Iterator[Target]:
    """The shared target; whatever a test does to its `generate` is undone."""
    yield shared_target
    shared_target.model.__dict__.pop("generate", None)


# ---------------------------------------------------------------- what is stored


def test_greedy_answers_equal_generate_alone(target: Target, tmp_path: Path) -> None:
    asked = prompts(9)
    report = distill(target, asked, options(tmp_path / "o", temperature=0))
    assert (report.counts.done, report.complete) == (9, True)
    for prompt, answer in zip(asked, read_answers(tmp_path / "o"), strict=True):
        [(start, end)] = answer.learn
        head = torch.tensor([answer.tokens[:start]])
        alone = target.model.generate(
            head, max_new_tokens=12, do_sample=False, pad_token_id=0, attention_mask=head >= 0
        )
        assert answer.tokens == alone[0].tolist()
        assert end == len(answer.tokens)
        text = target.tokenizer.decode(answer.tokens[:start])
        expected = prompt.text or f"<|im_start|>user\n{prompt.messages[0]['content']}<|im_end|>\n"
        assert text == (expected if prompt.text else expected + "<|im_start|>assistant\n")


def test_sampling_follows_temperature_top_k_and_top_p(target: Target) -> None:
    question = [target.tokenizer("one question")["input_ids"]] * 64
    seeds = [str(row) for row in range(64)]
    drawn = generate(target, question, Sampling(temperature=1, max_new_tokens=1), seeds)
    assert len({ids[0] for ids in drawn}) > 4
    greedy = generate(target, question, Sampling(temperature=0, max_new_tokens=1), seeds)
    for choice in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        settings = Sampling(**{"temperature": 1, "max_new_tokens": 1} | choice)
        assert generate(target, question, settings, seeds) == greedy


@pytest.mark.parametrize(
    "choice",
    [{"temperature": 1}, {"temperature": 2, "top_k": 9}, {"temperature": 1.5, "top_p": 0.8}],
)
def test_draws_follow_the_targets_distribution(target: Target, choice: dict[str, Any]) -> None:
    number = 4000
    question = target.tokenizer("one question")["input_ids"]
    with torch.no_grad():
        logits_1V = target.model(torch.tensor([question])).logits[:, -1]
    chosen = {"top_p": 1.0, "top_k": 0} | choice
    expected_V = filtered_logits(logits_1V, **chosen).softmax(-1)[0] * number
    settings = Sampling(**chosen, max_new_tokens=1)
    drawn = generate(target, [question] * number, settings, [f"{n}" for n in range(number)])
    found_V = torch.bincount(torch.tensor([ids[0] for ids in drawn]), minlength=259)
    assert not found_V[expected_V == 0].any()
    assert ((found_V - expected_V).abs() <= 5 * expected_V.sqrt() + 1).all()


def test_draws_of_a_prompt_do_not_depend_on_the_others(target: Target) -> None:
    questions = [target.tokenizer(f"question {n}" * (1 + n % 3))["input_ids"] for n in range(6)]
    seeds = [f"seed {n}" for n in range(6)]
    settings = Sampling(temperature=1, max_new_tokens=12)
    together = generate(target, questions, settings, seeds)
    alone = [generate(target, [questions[n]], settings, [seeds[n]])[0] for n in range(6)]
    assert together == alone
    assert generate(target, questions[:1], settings, ["another"])[0] != together[0]


def test_logits_that_are_no_numbers_draw_nothing(target: Target) -> None:
    head = target.model.lm_head
    hook = head.register_forward_hook(lambda *call: call[-1].fill_(torch.nan))
    question = target.tokenizer("one question")["input_ids"]
    try:
        with pytest.raises(RuntimeError, match="not finite"):
            generate(target, [question], Sampling(temperature=1), ["any"])
    finally:
        hook.remove()


def test_model_defaults_and_callers_randomness_stay_out(tmp_path: Path) -> None:
    plain, spoiled = llama(), llama()
    spoiled.model.generation_config = own = GenerationConfig(
        eos_token_id=list(EOS), repetition_penalty=9.0, suppress_tokens=list(range(100)), top_k=1
    )
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    distill(plain, prompts(6), options(tmp_path / "a"))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(6)
    distill(spoiled, prompts(6), options(tmp_path / "b"))
    assert records(tmp_path / "a") == records(tmp_path / "b")
    assert spoiled.model.generation_config is own


def test_learned_spans_are_exactly_what_the_target_wrote(target: Target, tmp_path: Path) -> None:
    written: dict[tuple[int, ...], list[int]] = {}
    original = type(target.model).generate

    def generate(tokens_BT: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out_BT = original(target.model, tokens_BT, **kwargs)
        for row, mask in zip(out_BT.tolist(), kwargs["attention_mask"], strict=True):
            pad = int((mask == 0).sum())
            width = tokens_BT.shape[1]
            new = row[width:]
            ends = [place for place, token in enumerate(new) if token in EOS]
            written[tuple(row[pad:width])] = new[: ends[0] + 1] if ends else new
        return out_BT

    target.model.generate = generate
    distill(target, prompts(7, turns=3), options(tmp_path / "o"))
    stored = records(tmp_path / "o")
    assert {record["turns"] for record in stored} == {1, 3}
    for record in stored:
        for start, end in record["learn"]:
            assert start > 0
            assert record["tokens"][start:end] == written.pop(tuple(record["tokens"][:start]))
        assert record["finish"] == ("eos" if record["tokens"][-1] in EOS else "length")
        assert record["learn"][-1][1] == len(record["tokens"])  # no padding
    assert not written


def test_max_turns_and_template_args(target: Target, tmp_path: Path) -> None:
    distill(target, prompts(1, turns=3), options(tmp_path / "o", max_turns=2))
    assert records(tmp_path / "o")[0]["turns"] == 2
    asking = llama(template="{{ mood }}:" + TEMPLATE)
    distill(asking, prompts(1), options(tmp_path / "p", template_args={"mood": "calm"}))
    [answer] = read_answers(tmp_path / "p")
    assert asking.tokenizer.decode(answer.tokens).startswith("calm:<|im_start|>")


# ---------------------------------------------------------------- what does not fit


def test_context_is_never_left(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=259,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT,
            bos_token_id=256,
            eos_token_id=END,
        )
    )
    model.generation_config = GenerationConfig()
    # learned positions: to go beyond is a crash
    target = Target(model, byte_tokenizer(), name="tiny-gpt2")
    asked = [Prompt(i, text="x" * n) for i, n in enumerate((5, 250, CONTEXT - 1, CONTEXT, 300))]
    report = distill(target, asked, options(tmp_path / "o", max_new_tokens=999))
    lengths = {record["id"]: len(record.get("tokens", [])) for record in records(tmp_path / "o")}
    assert lengths[2] == CONTEXT and lengths[3] == lengths[4] == 0
    assert lengths[0] > CONTEXT // 2  # long neighbours in its batch do not cut it short
    assert (report.counts.done, report.counts.skipped) == (3, 2)
    assert report.counts.reasons == {f"skipped: {TOO_LONG}": 2}
    assert [len(answer.tokens) for answer in read_answers(tmp_path / "o")] == [
        lengths[index] for index in (0, 1, 2)
    ]


def test_later_turn_that_does_not_fit_ends_the_conversation(target: Target, tmp_path: Path) -> None:
    messages = tuple({"role": "user", "content": c} for c in ("short", "x" * CONTEXT))
    distill(target, [Prompt(0, messages=messages)], options(tmp_path / "o"))
    [record] = records(tmp_path / "o")
    assert (record["turns"], record["stopped"]) == (1, TOO_LONG)
    assert record["learn"][-1][1] == len(record["tokens"])


def test_messages_that_the_template_refuses_are_skipped_with_its_reason(tmp_path: Path) -> None:
    no_system = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    target = llama(template=no_system + TEMPLATE)
    system = {"role": "system", "content": "S"}
    asked = prompts(2)
    asked[0] = Prompt(0, messages=(system, *(asked[0].messages or ())))
    report = distill(target, asked, options(tmp_path / "o"))
    assert (report.counts.done, report.counts.skipped) == (1, 1)
    assert [reason.split(": ")[-1] for reason in report.counts.reasons] == ["no system"]
    target = llama(template="{% for tool in tools %}{{ tool }}{% endfor %}" + TEMPLATE)
    report = distill(target, prompts(3), options(tmp_path / "p"))  # the third one is plain text
    assert (report.counts.done, report.counts.skipped) == (1, 2)


# ---------------------------------------------------------------- errors while generating


def test_prompt_that_fails_twice_is_counted_and_the_others_are_answered(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(call: int, rows: int) -> None:
        if call in (0, 2):  # the first batch, then its second prompt alone
            raise torch.OutOfMemoryError("no room\nfor it")

    calls = on_call(target, fail)
    report = distill(target, prompts(6), options(tmp_path / "o"))
    assert calls == [4, 1, 1, 1, 1, 2]
    assert (report.counts.done, report.counts.failed) == (5, 1)
    assert records(tmp_path / "o")[1] == {"id": 1, "failed": "OutOfMemoryError: no room"}
    assert "6 prompts = 5 done + 0 skipped + 1 failed" in capsys.readouterr().out
    assert read_manifest(tmp_path / "o")["counts"]["failed"] == 1


def test_cause_that_is_not_the_prompts_stops_the_run(target: Target, tmp_path: Path) -> None:
    distill(target, prompts(20), options(tmp_path / "whole"))

    def fail(call: int, rows: int) -> None:
        if call > 0:
            raise RuntimeError("device-side assert")

    on_call(target, fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        distill(target, prompts(20), options(tmp_path / "o"))
    assert len(records(tmp_path / "o")) == 4  # nobody is called failed for it
    target.model.__dict__.pop("generate")
    distill(target, prompts(20), options(tmp_path / "o"))
    assert files(tmp_path / "o") == files(tmp_path / "whole")


def test_many_cut_answers_are_reported(tmp_path: Path) -> None:
    endless = llama(eos=())
    report = distill(endless, prompts(3), options(tmp_path / "o"))
    assert report.counts.cut == 3
    assert "3 of 3 documents were cut and teach no ending; raise --max-new-tokens" in str(report)
