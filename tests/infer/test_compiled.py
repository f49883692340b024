"""The promise: compiled steps write what the others write, for every kind of head, in batches of
unequal rows; they are traced once, whole, whatever the lengths; and what cannot be compiled decodes
all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import decoding_modes
import pytest
import torch
from recorder import tensors
from tiny_heads import VARIANTS, random_head
from tiny_targets import (
    CONFIGS,
    UNEVEN,
    generated,
    greedy,
    one_layer_target,
    random_model,
    some_prompts,
    tiny_target,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
)

from draftheads.heads.cpu import linear as cpu_linear
from draftheads.heads.cpu.linear import can_pack, has_int8
from draftheads.heads.drafting import Committed
from draftheads.heads.formats.hub import HEADS
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree
from draftheads.infer.accept import Acceptance, Greedy, Sampled
from draftheads.infer.continuous import checked
from draftheads.infer.drafters.draft_model import DraftModel
from draftheads.infer.drafters.merged import Merged
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed import steps as compiled
from draftheads.infer.generate import Processed, speculative
from draftheads.infer.lossy import Typical
from draftheads.infer.measure.bench import BenchOptions, bench

NEW = 24
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))
DYNAMIC = DynamicTree(9, 3, 3)
written = partial(decoding_modes.written, max_new_tokens=NEW)
APART = "gemma4"
"""The architecture whose attention differs most from Llama's: windows, shared keys, more inputs."""


@pytest.fixture
def traced(monkeypatch) -> list[torch.fx.GraphModule]:
    """The graphs that torch traces, which then run as they are: no code is generated."""
    graphs: list[torch.fx.GraphModule] = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", note)
    return graphs


ALIKE = ("eagle", "mtp")
"""Kinds whose drafts are searched for as EAGLE-3's."""


def drafts_of(name: str, target: Target) -> Any:
    """A head, another drafter or none."""
    others = {
        "none": lambda: None,
        "ngram": lambda: NGram(shortest=1),
        "model": lambda: DraftModel(target),
        "merged": lambda: Merged([random_head("sequential", target), NGram(shortest=1)]),
    }
    return others[name]() if name in others else random_head(name, target)


TRACED = [
    *(pytest.param(name, (9, 5), id=name) for name in ("none", "ngram", "merged")),
    pytest.param("model", (9, 5), id="model", marks=pytest.mark.thorough),
    *(
        pytest.param(
            *(kind, (13, 4, 8)),
            id=f"{kind}-ragged",
            marks=[pytest.mark.thorough] * (kind in ALIKE)
            + [pytest.mark.slow] * (kind in ("sequential", "block")),
        )
        for kind in HEADS
    ),
    pytest.param("sequential", (9,), id="sequential-one"),
    *(
        pytest.param(kind, (13, 4, 8), id=f"{kind}-ragged", marks=pytest.mark.thorough)
        for kind in VARIANTS
        if kind not in HEADS
    ),
]
"""A trace takes seconds, and each layer of the target more: several layers for one kind."""


@pytest.mark.parametrize(("kind", "lengths"), TRACED)
def test_compiled_steps_write_the_same_and_are_traced_once(traced, kind, lengths):
    target = tiny_target() if kind == "medusa" else one_layer_target()
    tree = TREE if kind == "medusa" else DYNAMIC if kind in VARIANTS else None
    speculator = Speculator(target, drafts_of(kind, target), tree=tree, compile=True)
    for seed in (0, 1):  # another text, other lengths, the same graph
        prompts = some_prompts(*(length + 7 * seed for length in lengths), seed=seed)
        expected = [greedy(target, prompt, NEW) for prompt in prompts]
        assert written(speculator, prompts) == expected
    on_host = kind in ("ngram", "model", "merged")  # these have steps without drafts, too
    assert 1 <= len(traced) <= 1 + on_host


@pytest.mark.mend("one random number for ever in compiled steps")
@pytest.mark.parametrize("rule", [Sampled(0.8, top_k=5), Typical(), checked(1.5, 1.0, 0)], ids=repr)
def test_rules_draw_as_they_do_without_compilation(traced, rule):
    target, prompts = one_layer_target(), some_prompts(9, 6)
    head, outputs = random_head("medusa", target), []
    for compile in (False, True):
        rule.seed(3)
        speculator = Speculator(target, head, tree=TREE, compile=compile)
        outputs.append(written(speculator, prompts, sampling=rule))
    assert outputs[0] == outputs[1]
    assert len(traced) == 1 and len({*outputs[0][0]}) > 4


@dataclass(frozen=True)
class Without(Acceptance):
    """The most probable token but for some."""

    banned: tuple[int, ...] | list[int] = field(repr=False)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor(self.banned), float("-inf")).argmax(-1)


@pytest.mark.mend("a rule decoded with the compiled steps of another one")
def test_a_rule_has_steps_of_its_own_by_value(traced):
    """Whatever its repr says: one rule's steps wrote tokens that another one bans."""
    target, [prompt] = one_layer_target(), some_prompts(9)
    plain, decode = Speculator(target), Speculator(target, compile=True)
    banned = tuple(written(plain, [prompt])[0])
    for rule in (Without((1,)), Without(banned), Without((1,))):
        expected = written(plain, [prompt], sampling=rule)
        assert written(decode, [prompt], sampling=rule) == expected
    assert len(traced) == 2
    with pytest.warns(UserWarning, match="decoding Without.* without compilation: unhashable type"):
        rows = written(decode, [prompt], sampling=Without([*banned]))
    assert rows == written(plain, [prompt], sampling=Without(banned))


def test_processors_have_steps_of_their_own_by_value():
    """Also where they are too long to be shown."""
    decode = Speculator(one_layer_target(), compile=True)

    def steps(banned: int, *more: LogitsProcessor) -> object:
        words = torch.zeros(2000)
        words[1000] = banned
        processors = [SuppressTokensLogitsProcessor(words, device="cpu"), *more]
        return decode.maker.function(1, Processed(LogitsProcessorList(processors), sample=False))

    assert steps(3) is steps(3)
    assert len({steps(3), steps(5), steps(3, InfNanRemoveLogitsProcessor())}) == 3


ARCHITECTURES = [
    pytest.param(name, marks=pytest.mark.slow if name == APART else pytest.mark.thorough)
    for name in [*CONFIGS, *UNEVEN]
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_writes_the_same(traced, name, recwarn):
    target = tiny_target(name)
    head, prompts = random_head("medusa", target), some_prompts(11, 5)  # the quickest to trace
    expected = [greedy(target, prompt, NEW) for prompt in prompts]
    assert written(Speculator(target, head, tree=TREE, compile=True), prompts) == expected
    assert len(traced) == 1 or "without compilation" in str(recwarn[0].message)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [pytest.param(None, marks=pytest.mark.thorough), 8])
def test_packed_weights_are_multiplied_in_compiled_steps(traced, bits, monkeypatch):
    """By an operator that the compiler does not look into."""
    if not (has_int8() if bits else can_pack(torch.device("cpu"), torch.float32)):
        pytest.skip("torch has no such products for this CPU")
    monkeypatch.setattr(cpu_linear, "LEAST", 0)
    target, prompts = Target(random_model("llama")), some_prompts(9, 5)
    target.pack(bits, "torch" if bits else None)
    head = random_head("eagle3", target).pack(target)
    expected = [generated(target, prompt, NEW) for prompt in prompts]
    assert written(Speculator(target, head, tree=TREE, compile=True), prompts) == expected
    [graph] = traced
    operators = [str(node.target) for node in graph.graph.nodes]
    assert operators.count("draftheads.packed_product") > 20


def test_compiled_steps_count_what_was_drafted_on_the_host(traced):
    """Also where nothing was, and in trees that are padded."""
    target, (prompt,) = tiny_target(), some_prompts(9)
    plain, fixed = (Speculator(target, NGram(), compile=compile) for compile in (False, True))
    seen = [
        [(step.tokens, step.drafted) for step in engine.generate(prompt, max_new_tokens=60)]
        for engine in (plain, fixed)
    ]
    assert seen[0] == seen[1] and traced
    assert len({drafted for _, drafted in seen[0]}) > 1


def test_trees_of_the_host_are_compiled_in_few_sizes(traced):
    target, prompts = tiny_target(), some_prompts(13, 8, 5)
    ngram = NGram(DynamicTree(6, 4, 3), longest=2, shortest=1)
    sizes: set[int] = set()
    engine = Speculator(target, ngram, compile=True)
    for prompt in prompts:
        steps = [*engine.generate(prompt, max_new_tokens=60)]
        assert [token for step in steps for token in step.tokens] == greedy(target, prompt, 60)
        sizes |= {step.drafted + 1 for step in steps[2:]}
    padded = {min(1 << (size - 1).bit_length(), 7) for size in sizes}
    assert len(traced) == len(padded) < len(sizes)


@pytest.mark.parametrize("kind", ["medusa", "merged"])
def test_what_torch_cannot_compile_decodes_without_compilation(kind, monkeypatch):
    """A drafter on the host has read the tokens of that step: it must not read them twice."""

    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    torch._dynamo.reset()
    target, prompts = tiny_target(), some_prompts(9, 5)
    plain, engine = (
        Speculator(target, drafts_of(kind, target), compile=compile) for compile in (False, True)
    )
    with pytest.warns(UserWarning, match="^decoding without compilation: .*"):
        steps = [*engine.generate_batch(prompts, max_new_tokens=NEW)]
    for row, expected in zip(steps, plain.generate_batch(prompts, max_new_tokens=NEW), strict=True):
        shown = [
            [each and (each.tokens, each.drafted) for each in both] for both in (row, expected)
        ]
        assert shown[0] == shown[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("medusa", marks=pytest.mark.slow),  # the least code
        pytest.param("sequential", marks=pytest.mark.thorough),
        pytest.param("block", marks=pytest.mark.thorough),
    ],
)
def test_generated_code_writes_the_same(kind):
    target = one_layer_target()
    tree = StaticTree(TREE.paths[:4]) if kind == "medusa" else DynamicTree(5, 2, 2)
    head, prompts = random_head(kind, target), some_prompts(9, 5)
    expected = [greedy(target, prompt, NEW) for prompt in prompts]
    assert written(Speculator(target, head, tree=tree, compile=True), prompts) == expected


@pytest.mark.slow
def test_generate_can_be_sped_up_by_compiled_heads(traced):
    """Two calls, one compilation; sampling arguments become a rule whose values are compiled in."""
    model = random_model("llama")
    head = random_head("medusa", Target(model))
    decoding = speculative(head, compile=True)
    for prompt in some_prompts(9, 14):
        inputs = {"input_ids": torch.tensor([prompt]), "max_new_tokens": NEW, "do_sample": False}
        expected = model.generate(**inputs)
        assert torch.equal(model.generate(**inputs, custom_generate=decoding), expected)
    assert len(traced) == 1
    for temperature in (0.5, 0.5, 2.0):
        drawn = {**inputs, "do_sample": True, "temperature": temperature}
        model.generate(**drawn, custom_generate=decoding)
    assert len(traced) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_bench_measures_every_candidate_once_more(traced):
    target = one_layer_target()
    options = BenchOptions(max_new_tokens=8, compile=True)
    heads = {"head": (random_head("medusa", target), TREE)}
    report = bench(target, heads, some_prompts(9, 5), options)
    names = ["generate compiled", "plain compiled", "head", "head compiled"]
    assert [result.name for result in report.heads] == names
    assert [result.lossless for result in report.heads] == [True] * 4
    baselines = [report.plain, *report.heads[:2]]
    speeds = [result.tokens_per_second for result in baselines]
    best = max(report.plain.baseline_tokens_per_second, *speeds)
    assert report.result("head").speedup_over_best == pytest.approx(
        report.result("head").tokens_per_second / best
    )


@pytest.fixture
def as_they_are(monkeypatch) -> None:
    """Fixed steps run as they are."""
    monkeypatch.setattr("draftheads.infer.fixed.maker.compiled", lambda: compiled.advance)


@pytest.mark.parametrize("rule", [Sampled(0.9), Typical()], ids=repr)
def test_generations_that_share_a_rule_draw_what_they_draw_one_by_one(as_they_are, rule):
    """One of them used what the other had drawn."""
    target = tiny_target()
    engine = Speculator(target, random_head("sequential", target), tree=TREE, compile=True)
    texts = []
    for together in (False, True):
        rule.seed(3)
        pair = [
            engine.generate(prompt, sampling=rule, max_new_tokens=30)
            for prompt in some_prompts(9, 6)
        ]
        steps = (
            [list(one) for one in pair] if not together else zip(*zip_longest(*pair), strict=True)
        )
        texts.append([[t for step in own if step for t in step.tokens] for own in steps])
    assert texts[0] == texts[1]


class HostTensors(TorchDispatchMode):
    """Operators that take or return a tensor of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(tensor.device.type == "cpu" for tensor in tensors((args, kwargs, out))):
            self.found.append(str(func))
        return out


@torch.inference_mode()
@pytest.mark.parametrize("kind", VARIANTS)
def test_a_step_asks_nothing_of_the_host(kind, monkeypatch):
    """On meta tensors, which have a shape and no numbers: to read one is an error."""
    monkeypatch.setattr("draftheads.heads.layers._checksums", lambda parameters: [])
    target = Target(random_model("llama"))
    head = random_head(kind, target).to("meta")
    target.model.to("meta")
    tree = TREE if kind == "medusa" else DYNAMIC
    drafter = head.drafter(target, tree)
    cache = target.new_cache(2, 64)
    features = target.prefill([[1, 2, 3], [4, 5]], cache, drafter.feature_layers).features_BND
    width = 0 if features is None else features.shape[2]
    device = torch.device("meta")

    def committed(tokens: int) -> tuple[torch.Tensor, ...]:
        tokens_BC = torch.zeros(2, tokens, dtype=torch.long, device=device)
        return tokens_BC, torch.zeros(2, tokens, width, device=device), tokens_BC[:, 0]

    drafter.propose(Committed(*committed(4), [4, 3]))
    steps = compiled.FixedSteps(compiled.advance, target, drafter, tree, cache, Greedy())
    for slots, room in steps.slots:
        compiled._fix(slots, room, 16)
    running_B = torch.ones(2, dtype=torch.bool, device=device)
    with HostTensors() as host:
        made = compiled.advance(steps, *committed(tree.depth + 1), running_B)
    assert host.found == []
    assert [each.shape for each in made[:3]] == [t.shape for t in committed(tree.depth + 1)]
    assert made[3].shape == (2, tree.depth + 2)
