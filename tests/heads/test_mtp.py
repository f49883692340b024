"""The promise: multi-token prediction is the target's own layer. Its step is that of transformers,
its weights are those of the checkpoint, what it drafts is lossless, and what it cannot be is said.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hybrid_targets import FAMILIES, hybrid_model, load_mtp_target, reference, write_mtp_target
from safetensors.torch import load_file, save_file
from tiny_heads import committed, decode, drafts_of, make_head, written_by
from tiny_targets import generated, some_prompts, tiny_target
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel
from typed_commands import failed

from draftheads.heads.batch import Batch
from draftheads.heads.drafting import DraftCache
from draftheads.heads.formats.hub import load_head, open_head, save_head
from draftheads.heads.formats.mtp import write_target
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.mtp.checkpoint import native_head, native_shape
from draftheads.heads.mtp.head import MtpChoices, MtpDesign, MtpHead
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.drafters.named import named_drafts

NEW = 16
CHAIN = StaticTree.from_widths((1, 1, 1))


@pytest.fixture(params=FAMILIES, scope="module")
def family(request, tmp_path_factory):
    """A target of a family, its MTP head, and the head's tensors as they were drawn."""
    folder = tmp_path_factory.mktemp("family")
    truth = write_mtp_target(folder, request.param)
    target = load_mtp_target(folder)
    return target, native_head(target), truth


def assert_same(left, right):
    assert left and left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_the_weights_are_those_of_the_checkpoint(family):
    target, head, truth = family
    assert_same(head.state_dict(), truth)
    shape = native_shape(target)
    assert {name: x.shape for name, x in shape.state_dict().items()} == {
        name: x.shape for name, x in truth.items()
    }


def in_double(target, head):
    """Both in float64, for which only one implementation of experts is made."""
    double, head = copy.copy(target), copy.deepcopy(head).double()
    double.model = copy.deepcopy(target.model).double()
    for module in (double.model, head.mtp_block):
        use(module, _experts_implementation="eager")
    return double, head


def use(module, **options):
    """Choose implementations of a model's code, in a config of its own."""
    for part in module.modules():
        if hasattr(part, "config"):
            part.config = copy.copy(part.config)
            for name, value in options.items():
                setattr(part.config, name, value)


@pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="transformers is too old")
@torch.no_grad()
def test_a_step_is_that_of_transformers(family):
    """States after a text, and after three further tokens from its own output, in float64."""
    target, head = in_double(*family[:2])
    (tokens,) = some_prompts(12)
    tokens_1T = torch.tensor([tokens])
    batch = Batch(tokens_1T, tokens_1T >= 0, torch.arange(12)[None], torch.zeros_like(tokens_1T))
    features_1TD = target.features(batch, (-1,))
    drafts = [tokens_1T[:, [4]], tokens_1T[:, [7]], tokens_1T[:, [1]]]

    model = reference(target, head)
    cache = MtpCache(config=model.config)
    positions_1T = torch.arange(1, 12)[None]  # the first token has no feature
    state = model.forward_layer(
        0, features_1TD[:, 1:], positions_1T, cache, input_ids=tokens_1T[:, 1:]
    )
    expected, last = [state], state[:, -1:]
    for step, token_11 in enumerate(drafts):
        place_11 = torch.tensor([[12 + step]])
        last = model.forward_layer(0, last, place_11, cache, input_ids=token_11)
        expected.append(last)

    def read(tokens_BQ, features_BQD, angles):
        return head.advance(target.embed(tokens_BQ), features_BQD, angles, ours.memories)

    ours = DraftCache(1, head.rope, head.window, read, target.device)
    got = [ours.commit(committed([tokens], features_1TD))]
    for token_11 in drafts:
        ours.extend(torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long))
        got.append(read(token_11, got[-1], ours.angles(1)))
        ours.table.advance([1])
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs[:, -1:]).abs().max() <= 1e-6 * theirs.abs().max()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", [None, CHAIN], ids=["tree", "chain"])
def test_what_it_drafts_is_lossless(family, tree, rows):
    target, head, _ = family
    prompts = some_prompts(17, 9, 4)[:rows]
    written, _ = decode(target, head, prompts, tree=tree, max_new_tokens=NEW)
    assert written == [generated(target, prompt, NEW) for prompt in prompts]


def reduced(target, head, more=()):
    """The head with a draft vocabulary of every second token, and more."""
    ids = set(range(1, target.vocab_size, 2)) | set(more)
    other = copy.deepcopy(head)
    other.limit_to(torch.tensor(sorted(ids)))
    return other


@pytest.mark.slow
def test_a_draft_vocabulary_is_rows_of_the_lm_head(family, tmp_path):
    target, native, _ = family
    head = reduced(target, native)
    (prompt,) = some_prompts(9)
    trees = [tokens for rows, _ in drafts_of(head, target, [prompt], NEW) for tokens in rows]
    drafts = {token for tokens in trees for token in tokens[1:]}
    assert len(trees) > 1 and drafts and drafts <= set(head.token_map.tolist())
    written, _ = decode(target, head, [prompt], max_new_tokens=NEW)
    assert written == [generated(target, prompt, NEW)]
    save_head(head, tmp_path / "head", target=target)
    assert_same(load_head(tmp_path / "head").state_dict(), head.state_dict())
    write_target(head, target, tmp_path / "out")  # where engines draft from all tokens
    assert_same(native_head(load_mtp_target(tmp_path / "out")).state_dict(), native.state_dict())


def test_its_name_is_a_drafter(family):
    target, head, _ = family
    drafts = named_drafts("mtp").load(target)
    assert isinstance(drafts, MtpHead) and drafts.design == head.design
    assert_same(drafts.state_dict(), head.state_dict())


def test_its_name_with_a_number_drafts_from_the_first_tokens(family):
    target, native, _ = family
    ending = copy.copy(target)
    ending.eos_ids = (15,)
    head = named_drafts("mtp:9").load(ending)
    assert head.token_map.tolist() == [*range(9), 15]
    assert_same(head.layer_tensors(), native.state_dict())
    (prompt,) = some_prompts(9)
    written, _ = decode(target, head, [prompt], max_new_tokens=NEW)
    assert written == [generated(target, prompt, NEW)]
    assert named_drafts("mtp:4000").load(target).token_map is None
    for name in ("mtp:", "mtp:0", "mtp:few"):
        with pytest.raises(ValueError, match="expected a number of tokens, as in mtp:32768, got"):
            named_drafts(name)


def test_a_folder_needs_no_target_to_be_read(family, tmp_path):
    target, head, _ = family
    save_head(head, tmp_path / "head", target=target)
    shape, _ = open_head(tmp_path / "head").read()
    assert {parameter.is_meta for parameter in shape.parameters()} == {True}
    loaded = load_head(tmp_path / "head")
    assert loaded.design == head.design
    assert_same(loaded.state_dict(), head.state_dict())


def test_a_card_says_which_engines_load_it_in_its_target(family, tmp_path):
    target, head, _ = family
    save_head(head, tmp_path / "head", target=target)
    card = (tmp_path / "head" / "README.md").read_text()
    is_listed = target.config.model_type not in ("qwen2", "qwen3")
    for words in ("--to mtp --target", '{"method": "mtp"', "--spec-type draft-mtp", "NEXTN"):
        assert (words in card) == is_listed, words
    assert ("No serving engine supports" in card) != is_listed


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("tokens", ["all", "half"])
def test_loss_and_gradients_are_those_of_a_plain_restatement(family, tokens, labels):
    """In float64, document by document and root by root: transformers' own layer code with its own
    attention, over the text up to a root and then over its own output.
    """
    batch = written_by(family[0], some_prompts(5, 5), 4)
    target, head = family[:2]
    if tokens == "half":
        head = reduced(target, head, batch.tokens_BT[batch.loss_mask_BT].tolist()[::3])
    target, head = in_double(target, head)
    head.train_with(MtpChoices(labels=labels, steps=3, decay=0.6))
    features_BTD = target.features(batch, head.training_layers)
    loss = head(batch, features_BTD, target).loss
    loss.backward()
    plain = copy.deepcopy(head)
    plain.zero_grad()
    expected = plain_loss(plain, batch, features_BTD, target)
    expected.backward()
    assert torch.allclose(loss.double(), expected, rtol=1e-6)
    for (name, mine), theirs in zip(head.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:  # of an expert that no token chose
            assert mine.grad is None or not mine.grad.any(), name
            continue
        difference = (mine.grad - theirs.grad).abs().max()  # norms and routers round to float32
        assert difference <= 1e-5 * theirs.grad.abs().max() + 1e-9, name


def plain_loss(head, batch, features_BTD, target):
    """The loss of `MtpHead.forward`, one root after the other."""
    use(head.mtp_block, _attn_implementation="eager")
    lm_head_VD, steps = target.unembed_weight(), head.choices.steps
    ids_v = torch.arange(len(lm_head_VD)) if head.token_map is None else head.token_map
    weight_vD = lm_head_VD[ids_v]
    weights = [head.choices.decay**k for k in range(steps)]
    loss = torch.zeros((), dtype=torch.float64)
    for tokens_T, learned_T, features_TD in zip(
        batch.tokens_BT, batch.loss_mask_BT, features_BTD, strict=True
    ):
        last = len(tokens_T) - 1
        for root in range(last):
            states, here = features_TD[1 : root + 1], learned_T[root]
            for k in range(min(steps, last - root)):
                here = here & learned_T[root + k + 1]
                if not here:
                    break
                out_TD = plain_step(head, target, tokens_T[1 : root + k + 1], states)
                logits_v = out_TD[-1] @ weight_vD.T
                label = tokens_T[root + k + 1]
                if head.has_soft_labels:
                    truth_V = features_TD[root + k + 1] @ lm_head_VD.T
                    label, labels = truth_V.argmax(), truth_V[ids_v].softmax(0)
                else:
                    labels = (ids_v == label).double()
                if label in ids_v:
                    loss = loss + weights[k] / sum(weights) * F.cross_entropy(logits_v, labels)
                states = torch.cat([states, out_TD[-1:]])
    return loss


def plain_step(head, target, tokens_T, states_TD):
    """One step over a whole text, with the layer's own attention."""
    inputs = [head.enorm(target.embed(tokens_T)), head.hnorm(states_TD)]
    if head.design.states_first:
        inputs.reverse()
    hidden_1TD = head.eh_proj(torch.cat(inputs, dim=-1))[None]
    size = len(tokens_T)
    mask = torch.full((size, size), -torch.inf, dtype=torch.float64).triu_(1)[None, None]
    positions_1T = torch.arange(1, size + 1)[None]
    out = head.mtp_block(
        hidden_1TD,
        attention_mask=mask,
        position_ids=positions_1T,
        position_embeddings=head.layer_rope.embedding(hidden_1TD, positions_1T),
    )
    return head.post_norm(out)[0]


def test_any_target_may_get_one_and_it_begins_as_its_last_layer():
    target = tiny_target()
    head = make_head(MtpHead, target)
    last = target.model.model.layers[-1].state_dict()
    assert_same(head.mtp_block.state_dict(), last)


@pytest.mark.mend(
    "an infinity in a config was kept as an object, or a layer's kind was not passed on: no MTP "
    "head for Granite 4, Bamba and Nemotron-H"
)
@pytest.mark.filterwarnings("ignore")  # of kernels that are not installed
@pytest.mark.parametrize("name", ["granite4", "bamba", "nemotron-h"])
def test_a_hybrid_whose_config_has_an_infinity_gets_one(tmp_path, name):
    target = Target(hybrid_model(name))
    save_head(make_head(MtpHead, target), tmp_path / "head", target=target)
    head = load_head(tmp_path / "head", target=target)
    layer = target.model.model.layers[head.design.origin.number].state_dict()
    assert_same(head.mtp_block.state_dict(), layer)
    prompts = some_prompts(9)
    written, _ = decode(target, head, prompts, max_new_tokens=NEW)
    assert written == [generated(target, prompts[0], NEW)]


UNCOPIED = "expected a last layer whose weights can be copied"
WITHOUT = {
    "quantised": UNCOPIED,
    "not in memory": UNCOPIED,
    "gemma2-window": "lm_head(hidden state) is not this model's logits",
    "gpt-oss": "its attention has s_aux",
    "gemma4": "its layers cannot draft",
    "falcon": "its layers cannot draft",
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_target_whose_layers_cannot_draft_is_refused_in_one_line(name):
    target = copy.copy(tiny_target("llama" if WITHOUT[name] == UNCOPIED else name))
    if WITHOUT[name] == UNCOPIED:
        target.unembed_weight()  # tried while it runs, as a target with layers on a disk does
        target.model = copy.deepcopy(target.model)
        projection = target.model.model.layers[-1].self_attn.q_proj
        if name == "quantised":
            projection.register_buffer("weight_scale_inv", torch.ones(1))
        else:
            projection.to("meta")
    with pytest.raises(ValueError) as refusal:
        make_head(MtpHead, target)
    assert WITHOUT[name] in str(refusal.value) and "\n" not in str(refusal.value)


def changed(folder, change):
    """A target of DeepSeek's family whose tensors were changed. Its config tells of two layers."""
    write_mtp_target(folder, "deepseek-v3", num_nextn_predict_layers=2)
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file(tensors, file, metadata={"format": "pt"})
    return load_mtp_target(folder)


def without(pattern):
    return lambda tensors: {n: x for n, x in tensors.items() if not re.search(pattern, n)}


def second(tensors):
    more = {n.replace("layers.3.", "layers.4."): x.clone() for n, x in tensors.items()}
    return more | tensors


def other(name, change):
    return lambda tensors: {**tensors, name: change(tensors[name])}


HEAD = "model.layers.3.shared_head.head.weight"
FAULTS = {
    "none": (without(r"layers\.3\."), "found none of the layouts"),
    "partial": (without(r"layers\.3\.enorm"), "enorm.weight: expected numbers (32,), got none"),
    "no attention": (without(r"layers\.3\.self_attn\.o"), "self_attn.o_proj.weight: expected"),
    "several": (second, "expected one MTP layer, got 2"),
    "wide": (
        other("model.layers.3.eh_proj.weight", lambda x: x[:, :-1].contiguous()),
        "got numbers (32, 63)",
    ),
    "fp8": (
        other("model.layers.3.eh_proj.weight", lambda x: x.to(torch.float8_e4m3fn)),
        "expected model.layers.3.eh_proj.weight in floating point of 16",
    ),
    "own lm_head": (other(HEAD, lambda x: x + 1), "one with its own, which is not supported"),
    "not finite": (other(HEAD, lambda x: x / 0), "expected finite numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_checkpoint_lacks_is_said_in_one_line(fault, tmp_path):
    change, reason = FAULTS[fault]
    target = changed(tmp_path, change)
    with pytest.raises(ValueError) as refusal:
        native_head(target)
    assert reason in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_cut_file_is_said_in_one_line(tmp_path):
    target = changed(tmp_path, lambda tensors: tensors)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    layer = {name: tensors.pop(name) for name in list(tensors) if "layers.3." in name}
    save_file(tensors, file, metadata={"format": "pt"})
    other = tmp_path / "mtp.safetensors"
    save_file(layer, other)
    places = dict.fromkeys(tensors, file.name) | dict.fromkeys(layer, other.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    native_head(target)
    other.write_bytes(other.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"target {tmp_path}: ") as refusal:
        native_head(target)
    assert "\n" not in str(refusal.value)


@pytest.mark.mend("the config of an MTP head with 30,000 layers")
def test_a_damaged_config_is_refused_in_one_line(tmp_path):
    target = tiny_target()
    save_head(make_head(MtpHead, target), tmp_path / "head", target=target)
    file = tmp_path / "head" / "config.json"
    config = json.loads(file.read_text())
    layer = config["mtp_layer"]["config"]
    deep, nothing = {**layer, "num_hidden_layers": 30_000}, {"model_type": "nothing"}
    for key, value in (("number", 7), ("config", nothing), ("config", deep)):
        changed = {**config, "mtp_layer": {**config["mtp_layer"], key: value}}
        file.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="expected the config of a model"):
            load_head(tmp_path / "head")


def moved(head):
    """The same head after some training, as it were."""
    other = copy.deepcopy(head)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return other


def test_a_head_is_put_back_into_its_checkpoint(family, tmp_path):
    target, native, truth = family
    source, out = Path(target.name), tmp_path / "out"
    before, head = load_file(source / "model.safetensors"), moved(native)
    write_target(head, target, out)
    assert_same(native_head(load_mtp_target(out)).state_dict(), head.state_dict())
    after = load_file(out / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and changed.isdisjoint(target.model.state_dict())
    assert_same(native_head(target).state_dict(), truth)


UNLISTED = ("states-first", "transformers")
"""Families that are written here as types of which no engine expects an MTP layer."""
COUNTS = {
    "deepseek-v3": "num_nextn_predict_layers",
    "glm4-moe": "num_nextn_predict_layers",
    "qwen3-next": "num_nextn_predict_layers",
    "qwen3.5": "mtp_num_hidden_layers",
    "qwen3.5-moe": "mtp_num_hidden_layers",
}
"""Keys of config.json that tell vLLM how many layers there are."""
SHARDED = ("deepseek-v3", "qwen3.5")
"""Families that are written here as several files."""


@pytest.mark.slow
def test_a_checkpoint_whose_layer_was_dropped_gets_it_again(family, tmp_path):
    target, native, _ = family
    name = next(name for name, (kind, *_) in FAMILIES.items() if kind == target.config.model_type)
    size = "40KB" if name in SHARDED else "1GB"
    target.model.save_pretrained(tmp_path / "bare", max_shard_size=size)
    bare = load_mtp_target(tmp_path / "bare")
    files = {path.name: path.read_bytes() for path in (tmp_path / "bare").iterdir()}
    with pytest.raises(ValueError, match="expected an MTP layer in its checkpoint"):
        native_head(bare)
    if name in UNLISTED:
        with pytest.raises(ValueError, match="expected a target whose MTP layer engines know"):
            write_target(native, bare, tmp_path / "out")
        return
    write_target(make_head(MtpHead, bare), bare, tmp_path / "new")
    write_target(native, bare, tmp_path / "out")
    whole = load_mtp_target(tmp_path / "out")
    assert_same(native_head(whole).state_dict(), native.state_dict())
    assert json.loads((tmp_path / "out" / "config.json").read_text())[COUNTS[name]] == 1
    (prompt,) = some_prompts(9)
    assert generated(whole, prompt, NEW) == generated(target, prompt, NEW)
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "bare").iterdir()}


def test_what_cannot_be_put_back(family, tmp_path):
    target, native, _ = family
    quantised, design = copy.copy(target), native.design
    quantised.bits = 8
    turned = MtpHead(replace(design, states_first=not design.states_first))
    of_another = MtpHead(MtpDesign.of(tiny_target("phi3")))
    for head, into, said in (
        (turned, target, "expected a head like the MTP layer"),
        (of_another, target, "expected a head like the MTP layer"),
        (native, quantised, "expected a target that is not quantised"),
    ):
        with pytest.raises(ValueError, match=said) as refusal:
            write_target(head, into, tmp_path / "out")
        assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("single", [True, False])
def test_a_part_of_a_layer_is_made_whole(tmp_path, single):
    target = changed(tmp_path / "target", lambda tensors: tensors)
    head, folder = moved(native_head(target)), tmp_path / "part"
    part = changed(folder, without(r"layers\.3\.(enorm|eh_proj)"))
    if not single:
        place = folder / "model.safetensors"
        names = dict.fromkeys(load_file(place), "other.safetensors")
        place.rename(folder / "other.safetensors")
        index = {"metadata": {"total_size": 100}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_target(head, part, tmp_path / "out")
    whole = load_mtp_target(tmp_path / "out")
    assert_same(native_head(whole).state_dict(), head.state_dict())
    (prompt,) = some_prompts(9)
    assert generated(whole, prompt, NEW) == generated(target, prompt, NEW)


def test_what_a_layer_has_beyond_the_head_is_refused(tmp_path):
    scale = "model.layers.3.eh_proj.weight_scale_inv"
    target = changed(tmp_path / "target", lambda tensors: tensors)
    head = native_head(target)
    scaled = changed(tmp_path / "scaled", lambda tensors: {**tensors, scale: torch.ones(1)})
    with pytest.raises(ValueError, match="eh_proj.weight_scale_inv: in the checkpoint alone"):
        write_target(head, scaled, tmp_path / "out")


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_transformers_drafts_what_we_draft_from_the_folder(name, tmp_path, monkeypatch):
    """By its `use_mtp`, which takes neither recurrent targets nor types that it does not list."""
    write_mtp_target(tmp_path / "target", name)
    target = load_mtp_target(tmp_path / "target")
    head = moved(native_head(target))
    write_target(head, target, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    # it lists the layers of the published models, such as 61
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]
    drafted = []
    candidates = MTPCandidateGenerator.get_candidates

    def noted(self, input_ids, *arguments, **options):
        out = candidates(self, input_ids, *arguments, **options)
        drafted.append(out[0][0, input_ids.shape[1] :].tolist())
        return out

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    (prompt,) = some_prompts(9)
    ids = torch.tensor([prompt])
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False, use_mtp=True)[0, 9:].tolist()
    assert text == generated(target, prompt, NEW)
    ours = drafts_of(head, target, [prompt], NEW, tree=StaticTree.from_widths((1,)))
    mine = [tokens[0][-1:] for tokens, _ in ours]
    assert mine[: len(drafted) - 1] == drafted[1 : len(mine) + 1] and len(drafted) > 8


def test_the_command_that_puts_it_back(run, tmp_path):
    write_mtp_target(tmp_path / "target", "states-first")
    target = load_mtp_target(tmp_path / "target")
    save_head(native_head(target).bfloat16(), tmp_path / "head", target=target)
    save_head(make_head(MedusaHead, target), tmp_path / "medusa", target=target)
    out = ["--to", "mtp", "--target", tmp_path / "target"]
    failed(run("convert", tmp_path / "head", tmp_path / "out", "--to", "mtp"), "needs --target")
    failed(run("convert", tmp_path / "medusa", tmp_path / "out", *out), "kind mtp, got medusa")
    code, said, _ = run("convert", tmp_path / "head", tmp_path / "out", *out)
    assert code == 0 and str(tmp_path / "out") in said
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = {tensors[n].dtype for n in tensors if "mtp.layers" in n}
    assert layer == {torch.bfloat16}  # as the head was saved, though the target is in float32
    failed(run("convert", tmp_path / "head", tmp_path / "out", *out), "out already exists")
    (tmp_path / "head" / "adapter").mkdir()
    failed(run("convert", tmp_path / "head", tmp_path / "other", *out), "without an adapter")
