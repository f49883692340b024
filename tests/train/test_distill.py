"""The promise: what the target answers is stored exactly as it was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_chat import (
    CONTEXT,
    END,
    EOS,
    TEMPLATE,
    byte_tokenizer,
    llama,
    on_call,
    options,
    prompts,
    records,
)
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from draftheads.heads.target.model import Decoded, Target
from draftheads.heads.terminal import progress_bar
from draftheads.infer.accept import filtered_logits
from draftheads.infer.continuous import Request, answer_all, checked
from draftheads.infer.engine import Speculator
from draftheads.infer.rows import NOT_FINITE
from draftheads.train.data import distill as distill_module
from draftheads.train.data.answers import read_answers, read_manifest
from draftheads.train.data.conversation import TOO_LONG
from draftheads.train.data.distill import distill
from draftheads.train.data.prompts import Prompt

# ---------------------------------------------------------------- what is stored


def drawn(
    target: Target, prompts: Sequence[list[int]], limit: int = 1, **sampling: Any
) -> list[list[int]]:
    """Answers to prompts, decoded together."""
    accept = checked(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0} | sampling)
    requests = iter([Request(ids, limit, f"{n}") for n, ids in enumerate(prompts)])
    outcomes = answer_all(Speculator(target), accept, 64, lambda: next(requests, None))
    found = {request.seed: ids for request, ids, _ in outcomes}
    return [found[f"{n}"] for n in range(len(prompts))]


@pytest.mark.parametrize(
    "choice",
    [{"temperature": 1.0}, {"temperature": 2.0, "top_k": 9}, {"temperature": 1.5, "top_p": 0.8}],
)
def test_draws_follow_the_targets_distribution(target, choice):
    number = 4000
    question = target.tokenizer("one question")["input_ids"]
    with torch.no_grad():
        logits_1V = target.model(torch.tensor([question])).logits[:, -1]
    expected_V = filtered_logits(logits_1V, **{"top_p": 1.0, "top_k": 0} | choice)
    expected_V = expected_V.softmax(-1)[0] * number
    found = drawn(target, [question] * number, **choice)
    found_V = torch.bincount(torch.tensor([ids[0] for ids in found]), minlength=259)
    assert not found_V[expected_V == 0].any()
    assert ((found_V - expected_V).abs() <= 5 * expected_V.sqrt() + 1).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_prompt_alone(target, tmp_path, temperature):
    """The place of the failed one is given to others, whose answers are as ever."""
    asked = [Prompt(n, text=f"question {n}") for n in range(12)]
    poison = target.tokenizer("question 5")["input_ids"][-1]
    distill(target, asked, options(tmp_path / "whole", temperature=temperature, batch_size=2))
    layer = target.model.model.layers[0]

    def spoil(module: Any, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
        positions_BT = kwargs["position_ids"]
        ids_BT = spoiled["ids"]
        bad_BT = (ids_BT == poison) & (positions_BT == len("question 5") - 1)
        return out.masked_fill(bad_BT[:, :, None], torch.nan)

    spoiled: dict[str, torch.Tensor] = {}
    hooks = [
        target.model.get_input_embeddings().register_forward_pre_hook(
            lambda module, args: spoiled.update(ids=args[0])
        ),
        layer.register_forward_hook(spoil, with_kwargs=True),
    ]
    try:
        report = distill(
            target, asked, options(tmp_path / "o", temperature=temperature, batch_size=2)
        )
    finally:
        for hook in hooks:
            hook.remove()
    assert report.counts.reasons == {f"failed: RuntimeError: {NOT_FINITE}": 1}
    whole, found = records(tmp_path / "whole"), records(tmp_path / "o")
    assert [a["id"] for a, b in zip(whole, found, strict=True) if a != b] == [5]


def test_model_defaults_and_callers_randomness_stay_out(tmp_path):
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


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_learned_spans_are_exactly_what_the_target_wrote(target, tmp_path, greedy):
    distill(target, prompts(7, turns=3), options(tmp_path / "o", **greedy))
    stored = records(tmp_path / "o")
    assert {record["turns"] for record in stored} == {1, 3}
    for record in stored:
        for start, end in record["learn"]:
            assert start > 0
            before = torch.tensor([record["tokens"][:start]])
            config = GenerationConfig(max_new_tokens=12, eos_token_id=list(EOS), pad_token_id=0)
            mask = torch.ones_like(before)
            alone = target.model.generate(before, generation_config=config, attention_mask=mask)
            assert record["tokens"][:end] == alone[0].tolist()
        assert record["finish"] == ("eos" if record["tokens"][-1] in EOS else "length")
        assert record["learn"][-1][1] == len(record["tokens"])  # no padding


def test_template_args(tmp_path):
    asking = llama(template="{{ mood }}:" + TEMPLATE)
    distill(asking, prompts(1), options(tmp_path / "p", template_args={"mood": "calm"}))
    [answer] = read_answers(tmp_path / "p")
    assert asking.tokenizer.decode(answer.tokens).startswith("calm:<|im_start|>")


# ---------------------------------------------------------------- what does not fit


def test_context_is_never_left(tmp_path):
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
    report = distill(target, asked, options(tmp_path / "o", max_new_tokens=10**18))
    lengths = {record["id"]: len(record.get("tokens", [])) for record in records(tmp_path / "o")}
    assert lengths[2] == CONTEXT and lengths[3] == lengths[4] == 0
    assert lengths[0] > CONTEXT // 2  # long neighbours in its batch do not cut it short
    assert (report.counts.done, report.counts.skipped) == (3, 2)
    assert report.counts.reasons == {f"skipped: {TOO_LONG}": 2}
    assert [len(answer.tokens) for answer in read_answers(tmp_path / "o")] == [
        lengths[index] for index in (0, 1, 2)
    ]


def test_later_turn_that_does_not_fit_ends_the_conversation(target, tmp_path):
    messages = tuple({"role": "user", "content": c} for c in ("short", "x" * CONTEXT))
    distill(target, [Prompt(0, messages=messages)], options(tmp_path / "o"))
    [record] = records(tmp_path / "o")
    assert (record["turns"], record["stopped"]) == (1, TOO_LONG)
    assert record["learn"][-1][1] == len(record["tokens"])


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
SYSTEM = {"role": "system", "content": "S"}


def test_messages_that_the_template_refuses_are_skipped_with_its_reason(tmp_path):
    asked = prompts(2)
    asked[0] = Prompt(0, messages=(SYSTEM, *(asked[0].messages or ())))
    report = distill(llama(template=NO_SYSTEM + TEMPLATE), asked, options(tmp_path / "o"))
    assert (report.counts.done, report.counts.skipped) == (1, 1)
    assert [reason.split(": ")[-1] for reason in report.counts.reasons] == ["no system"]


@pytest.mark.mend("a broken template skips no prompt for ever")
@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for tool in tools %}{{ tool }}{% endfor %}" + TEMPLATE, "is not iterable"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ 1 / 0 }}" + TEMPLATE, "division by zero"),
        ("{{ raise_exception('not today') }}", "not today"),
        (NO_SYSTEM + TEMPLATE, "no system"),
    ],
)
def test_a_template_that_renders_nothing_is_named_and_may_be_mended(tmp_path, template, complaint):
    """No prompt is skipped for ever."""
    broken = llama(template=template)
    asked = [Prompt(n, messages=(SYSTEM, {"role": "user", "content": f"{n}"})) for n in range(3)]
    for _ in range(2):
        report = distill(broken, asked, options(tmp_path / "o"))
        assert (report.counts.done, report.counts.skipped) == (0, 3) and complaint in str(report)
    plain = [Prompt(0, text="no conversation")]
    assert distill(broken, plain, options(tmp_path / "plain")).counts.done == 1
    for _ in range(2):
        report = distill(llama(), asked, options(tmp_path / "o"))
        assert (report.counts.done, report.counts.skipped) == (3, 0)


# ---------------------------------------------------------------- errors while generating


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_prompt_that_fails_alone_is_counted_and_the_others_are_answered(
    target, tmp_path, capsys, error
):
    asked = [Prompt(n, text="x" * (90 if n == 4 else 10 + n)) for n in range(12)]
    distill(target, asked, options(tmp_path / "whole"))

    def fail(prompts: Sequence[Sequence[int]], *more: Any) -> Decoded:
        if any(len(prompt) == 90 for prompt in prompts):
            raise error("no room\nfor it")
        return Target.prefill_chunks(target, prompts, *more)

    target.__dict__["prefill_chunks"] = fail
    report = distill(target, asked, options(tmp_path / "o"))
    assert (report.counts.done, report.counts.failed) == (11, 1)
    whole, found = records(tmp_path / "whole"), records(tmp_path / "o")
    assert found[4] == {"id": 4, "failed": f"{error.__name__}: no room"}
    assert [a for a in whole if a["id"] != 4] == [b for b in found if b["id"] != 4]
    assert "12 prompts = 11 done + 0 skipped + 1 failed" in capsys.readouterr().out
    assert read_manifest(tmp_path / "o").counts.failed == 1


def test_cause_that_is_not_the_prompts_stops_the_run(target, tmp_path):
    distill(target, prompts(20), options(tmp_path / "whole"))

    def fail(call: int, rows: int) -> None:
        if call > 1:
            raise RuntimeError("device-side assert")

    on_call(target, fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        distill(target, prompts(20), options(tmp_path / "o"))
    kept = records(tmp_path / "o")
    assert kept and not any("failed" in record for record in kept)
    target.__dict__.pop("prefill_chunks")
    assert distill(target, prompts(20), options(tmp_path / "o")).complete
    assert records(tmp_path / "o") == records(tmp_path / "whole")


def test_many_cut_answers_are_reported(tmp_path):
    endless = llama(eos=())
    report = distill(endless, prompts(3), options(tmp_path / "o"))
    assert report.counts.cut == 3
    assert "3 of 3 documents were cut and teach no ending; raise --max-new-tokens" in str(report)


def test_the_bar_counts_prompts(target, tmp_path, monkeypatch):
    bars: list[Any] = []

    def kept(**options: Any) -> Any:
        bars.append(progress_bar(**options))
        return bars[-1]

    monkeypatch.setattr(distill_module, "progress_bar", kept)
    distill(target, prompts(9), options(tmp_path / "o", temperature=0))
    assert [(bar.n, bar.total) for bar in bars] == [(9, 9)]
