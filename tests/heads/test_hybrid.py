"""The promise: a target with recurrent layers decodes what `generate` decodes, with any tree, in
any batch, whatever part of a text is read again; its states are those of the kept tokens.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from exact_laws import WORDS, small_head, surely_below, whole_engine_statistic
from hybrid_targets import HYBRIDS, hybrid_model
from recorder import recorded
from tiny_heads import in_turns, random_head
from tiny_targets import generated, some_prompts

from draftheads.heads.batch import Batch
from draftheads.heads.hybrid.states import States
from draftheads.heads.hybrid.trees import Branches
from draftheads.heads.target.model import Target
from draftheads.heads.target.trial import Ways
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Topology
from draftheads.infer.drafters.draft_model import DraftModel
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed import steps as compiled
from draftheads.infer.fixed.recorded import RECORDERS
from draftheads.infer.reading import Session

NEW = 16
TREE = StaticTree.from_widths((3, 1, 1))
PROMPTS = some_prompts(9, 5, 14)
QUICK = ("qwen3.5", "lfm2", "bamba")
"""One of each recurrence: gated delta nets, short convolutions, Mamba."""


@cache
def hybrid(name: str) -> Target:
    return Target(hybrid_model(name), name=name)


@cache
def expected(name: str, number: int) -> list[int]:
    return generated(hybrid(name), PROMPTS[number], NEW)


def engine(name: str) -> Speculator:
    """Heads that are right now and then: they draft what the target often writes."""
    target = hybrid(name)
    return Speculator(target, random_head("medusa", target, depth=3), tree=TREE)


def written(steps: Any) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("name", HYBRIDS)
def test_right_drafts_are_accepted(name):
    """And the states that are kept are those of the accepted nodes."""
    target, prompt, text = hybrid(name), PROMPTS[0], expected(name, 0)
    cache = target.new_cache(1, 64)
    target.prefill([prompt], cache, ())
    wrong = (text[1] + 1) % target.vocab_size
    tokens = torch.tensor([[text[0], wrong, text[1], wrong, text[2]]])
    tree = TokenTree(tokens, Topology(torch.tensor([[-1, 0, 0, 1, 2]])))
    logits_BNV = target.verify(tree, cache, ()).logits_BNV
    assert logits_BNV[0, [0, 2, 4]].argmax(-1).tolist() == text[1:4]
    cache.keep(torch.tensor([[0, 2, 4]]), [3])
    one = TokenTree(torch.tensor([[text[3]]]), Topology(torch.tensor([[-1]])))
    kept_BND = target.verify(one, cache, (-1,)).features_BND
    ids = torch.tensor([prompt + text[:4]])
    plain = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(kept_BND[0, 0], plain[0, -1], atol=1e-4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_is_read_in_parts(name):
    steps = in_turns(engine(name), PROMPTS[2], NEW, 3)
    assert written(filter(None, steps)) == expected(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.thorough] * (each not in QUICK)) for each in HYBRIDS],
)
def test_in_bfloat16_it_decodes_within_rounding(name):
    """The trial of a new target compares its tree with plain text; a text goes to its end."""
    target = Target(hybrid_model(name).to(torch.bfloat16))
    head = random_head("medusa", target, depth=3)
    for prompt in PROMPTS:
        steps = Speculator(target, head).generate(prompt, max_new_tokens=NEW)
        text = written(steps)
        assert len(text) == NEW or text[-1] in target.eos_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param("qwen3.5", "medusa", marks=pytest.mark.thorough), ("bamba", "eagle3")],
)
def test_sampled_output_has_the_targets_law(name, kind):
    model = hybrid_model(name)
    model.resize_token_embeddings(WORDS, mean_resizing=False)
    target = Target(model, name="six-words")
    head, fixed = small_head(kind, target), StaticTree.from_widths((3, 2))
    for tree in [fixed, head.tree] if isinstance(head.tree, DynamicTree) else [fixed]:
        statistic, freedom = whole_engine_statistic(target, head, tree)
        assert statistic < surely_below(freedom)


EDITED = [
    pytest.param(name, edits, marks=marks)
    for name in ("qwen3.5", "lfm2", "bamba", "jamba")
    for edits, marks in (
        (12, ()),
        (50, pytest.mark.slow if name == "lfm2" else pytest.mark.thorough),
    )
]


@pytest.mark.parametrize(("name", "edits"), EDITED)
def test_texts_that_are_edited_are_those_of_their_own(name, edits):
    """A session's states at the end of a shared beginning are kept, or computed again."""
    target, decode, session = hybrid(name), engine(name), Session()
    generator = torch.Generator().manual_seed(edits)
    text = PROMPTS[0]
    reused = 0
    for _ in range(edits):
        steps = decode.generate(text, max_new_tokens=6, session=session)
        answer = written(steps)
        assert answer == generated(target, text, 6)
        reused += session.reused > 0
        cut, more = torch.randint(0, 9, (2,), generator=generator).tolist()
        text = (text + answer)[: max(3, len(text) + 6 - cut)] + some_prompts(more)[0]
        text = text[:90] if len(text) < 90 else PROMPTS[1]
    assert reused >= edits / 2


BY_LEVEL = {"jamba", "zamba", "kimi-linear", "bailing-hybrid"}
"""One for each kind of mixer that runs over a tree in one call."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [QUICK[0], *(pytest.param(each, marks=pytest.mark.thorough) for each in QUICK[1:])]
)
def test_compiled_steps_write_the_same(monkeypatch, name):
    """They are traced whole, once for a tree, and leave a session its states."""
    graphs = []
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", lambda graph, _: graphs.append(graph) or graph.forward)
    target, session, text = hybrid(name), Session(), PROMPTS[0]
    decode = Speculator(target, random_head("medusa", target, depth=3), compile=True)
    reused = []
    for more in some_prompts(3, 4, 5, seed=2):
        answer = written(decode.generate(text, max_new_tokens=NEW, session=session))
        assert answer == generated(target, text, NEW)
        reused.append(session.reused)
        text = text + answer + more
    assert reused[1] > len(PROMPTS[0]) + NEW - 6
    for steps in decode.generate_batch(PROMPTS[1:], max_new_tokens=NEW):
        assert steps
    assert len(graphs) == 2, "one for each number of rows"


@pytest.mark.inside
@pytest.mark.parametrize("name", HYBRIDS)
def test_known_layers_take_a_tree_in_one_call(name):
    """A fault in these would only make decoding slow, as a trial falls back to levels."""
    assert hybrid(name).mixes_by_level == (name in BY_LEVEL)


@pytest.mark.parametrize(("name", "mixing"), [("qwen3.5", "tree"), ("jamba", "tokens")])
def test_a_trial_finds_how_recurrent_layers_run(name, mixing):
    """Jamba's forget their state when they are given several tokens."""
    assert hybrid(name).ways == Ways(mixing, "alone")


@pytest.mark.parametrize("name", sorted(BY_LEVEL & HYBRIDS.keys()))
def test_what_runs_level_by_level_is_not_compiled(name):
    with pytest.warns(UserWarning, match="recurrent layers run over a tree level by level"):
        Speculator(hybrid(name), compile=True)


def test_what_is_kept_is_tried_too(monkeypatch):
    """A new target whose layers go on from another node than was kept runs them level by level."""
    right = Branches.after

    def wrong(tree_pass, last_B):
        return right(tree_pass, last_B.clamp(max=0))

    monkeypatch.setattr(Branches, "after", wrong)
    target = Target(hybrid_model("qwen3.5"))
    assert target.mixes_by_level
    decode = Speculator(target, random_head("medusa", target, depth=3))
    assert written(decode.generate(PROMPTS[0], max_new_tokens=NEW)) == expected("qwen3.5", 0)


@pytest.mark.mend("wrong texts of gated-delta hybrids with deep trees")
@pytest.mark.parametrize("name", ["olmo-hybrid", *QUICK])
def test_nodes_of_a_deep_tree_of_equal_tokens_are_exact(name):
    target, prompt, depth = hybrid(name), [5, 9, 8], 64
    cache = target.new_cache(1, 128)
    target.prefill([prompt], cache, ())
    tree = TokenTree(torch.tensor([[9] * depth]), Topology(torch.arange(-1, depth - 1)[None]))
    nodes_BND = target.verify(tree, cache, (-1,)).features_BND
    ids = torch.tensor([prompt + [9] * depth])
    plain = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(nodes_BND, plain[:, len(prompt) :], atol=1e-3)


@pytest.mark.mend("a recurrence over a tree whose errors grow as 3^N")
def test_the_delta_rule_over_a_tree_is_that_of_each_path_alone():
    """With repeated keys whose values are replaced twice over, as OLMo's layers may."""
    torch.manual_seed(0)
    depth, heads, width = 64, 2, 8
    tree_pass = Branches(Mock(code=lambda: None))
    state = torch.randn(1, heads, width, width)
    parents = torch.tensor([[*range(-1, depth - 1), *range(depth // 2, depth)]])  # two branches
    tree_pass.start({("recurrent", 0): state}, Topology(parents))
    nodes = parents.shape[1]
    query, value = torch.randn(2, 1, nodes, heads, width)
    key = F.normalize(torch.randn(1, 1, heads, width), dim=-1).expand(-1, nodes, -1, -1)
    ones = torch.ones(1, nodes, heads)
    out, _ = tree_pass._gated_delta_rule(
        query, key, value, g=-0.001 * ones, beta=2 * ones, initial_state=state
    )
    states = [state[0].double()]  # that before the root, then those of the nodes
    for node, parent in enumerate(parents[0].tolist()):
        before = states[parent + 1] * torch.tensor(-0.001).double().exp()
        key_HQ, value_HV, query_HQ = (x[0, node].double() for x in (key, value, query))
        news_HV = 2 * (value_HV - torch.einsum("hq,hqv->hv", key_HQ, before))
        states.append(before + key_HQ[:, :, None] * news_HV[:, None])
        read_HV = torch.einsum("hq,hqv->hv", query_HQ, states[-1]) * width**-0.5
        assert torch.allclose(out[0, node].double(), read_HV, atol=1e-4)
    after = tree_pass.after(torch.tensor([nodes - 1]))
    assert torch.allclose(after["recurrent", 0][0].double(), states[-1], atol=1e-4)


@pytest.mark.mend("a trial of a hybrid that sees shallow trees alone")
def test_a_trial_goes_as_deep_as_trees(monkeypatch):
    """A recurrence whose errors grow with depth runs level by level."""

    def powers(read: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        power = -read.tril(-1)
        for _ in range(read.shape[-1].bit_length()):
            value, power = value + power @ value, power @ power
        return value

    monkeypatch.setattr(torch.linalg, "solve_triangular", powers)
    assert Target(hybrid_model("olmo-hybrid")).mixes_by_level


def test_states_and_rope_that_both_depend_on_the_text_are_refused():
    model = hybrid_model("lfm2")
    model.config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    }
    rope = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rope
    with pytest.raises(ValueError, match="recurrent layers and RoPE that depends on the length"):
        Target(model)


def test_a_hybrid_cannot_draft():
    """Its states of nodes would have to outlive a pass."""
    target = hybrid("lfm2")
    with pytest.raises(ValueError, match="expected attention layers alone, got recurrent ones"):
        list(Speculator(target, DraftModel(target)).generate(PROMPTS[0], max_new_tokens=2))


@pytest.mark.inside
@pytest.mark.parametrize("name", HYBRIDS)
def test_documents_of_a_row_do_not_see_each_other(name):
    target = hybrid(name)
    parts = some_prompts(7, 4, 6, 3)
    rows = [parts[0] + parts[1], parts[2] + parts[3] + [0, 0]]
    documents = torch.tensor([[0] * 7 + [1] * 4, [0] * 6 + [1] * 3 + [-1] * 2])
    positions = torch.tensor([[*range(7), *range(4)], [*range(6), *range(3), 0, 0]])
    tokens = torch.tensor(rows)
    batch = Batch(tokens, documents >= 0, positions, documents)
    got = target.features(batch, (1, -1))
    for row, start, part in [(0, 0, 0), (0, 7, 1), (1, 0, 2), (1, 6, 3)]:
        out = target.model(torch.tensor([parts[part]]), output_hidden_states=True)
        alone = torch.cat([out.hidden_states[1], out.hidden_states[-1]], dim=-1)[0, :-1]
        length = len(parts[part])
        assert torch.allclose(got[row, start + 1 : start + length], alone, atol=1e-4)
        assert not got[row, start].any(), "no state predicts a document's first token"


def test_states_are_as_large_whatever_the_length():
    target = hybrid("qwen3.5")
    sizes = set()
    for length in (5, 50):
        cache = target.new_cache(1, 64)
        target.prefill(some_prompts(length), cache, ())
        states = cache.states.committed.values()
        sizes.add(sum(state.nbytes for kinds in states for state in kinds.values()))
    assert len(sizes) == 1


def test_a_copy_of_the_model_runs_its_own_weights():
    model = hybrid("qwen3.5").model
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.7)
    target = Target(other)
    assert written(Speculator(target).generate(PROMPTS[0], max_new_tokens=NEW)) == generated(
        target, PROMPTS[0], NEW
    )


def test_the_model_works_as_ever_with_other_caches():
    """Also in training, where there is none."""
    alone = hybrid_model("qwen3.5")
    ids = torch.tensor([PROMPTS[0]])
    before = alone(ids, use_cache=False).logits
    Target(alone)
    assert torch.equal(alone(ids, use_cache=False).logits, before)
    assert torch.equal(alone.generate(ids, max_new_tokens=5), alone.generate(ids, max_new_tokens=5))


@pytest.mark.parametrize("recorder", [None, recorded])
def test_an_interrupted_step_leaves_a_session_its_text(monkeypatch, recorder):
    """Whatever it had written: states that may not be those of the text are computed again."""
    monkeypatch.setitem(RECORDERS, "cpu", recorder)
    target, session, text = hybrid("qwen3.5"), Session(), PROMPTS[0]
    decode = Speculator(target, random_head("medusa", target, depth=3))
    steps = decode.generate(text, max_new_tokens=NEW, session=session)
    answer = [token for _ in range(4) for token in next(steps).tokens]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(States, "note", Mock(side_effect=KeyboardInterrupt))
        next(steps)
    text = text + answer
    after = decode.generate(text, max_new_tokens=NEW, session=session)
    assert written(after) == generated(target, text, NEW)
    assert session.reused


def test_an_interrupted_pass_leaves_the_committed_states():
    """Whatever of its layers it had come to."""
    states = States(1, [])
    one, two = torch.ones(1, 2), torch.full((1, 2), 2.0)
    states.length, states.committed = 3, {0: {("recurrent", 0): one}}

    class Mixer:
        layer_idx = 0

        def plain(self, hidden_RTD: torch.Tensor, window: Any, _: Any) -> torch.Tensor:
            window.update_recurrent_state(two, 0)
            return hidden_RTD

    mixer: Any = Mixer()
    states.read([2])
    states.mix(mixer, torch.zeros(1, 2, 4), {})
    assert states.rewind(3) == 3 and torch.equal(states.committed[0]["recurrent", 0], one)
    states.read([2])
    states.mix(mixer, torch.zeros(1, 2, 4), {})
    states.commit()
    assert states.length == 5 and torch.equal(states.committed[0]["recurrent", 0], two)
    assert states.rewind(4) == 3 and torch.equal(states.committed[0]["recurrent", 0], one)
    assert states.rewind(2) == 0 and states.committed == {}
