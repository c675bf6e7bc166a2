"""Usual calls, which the extension checks, packs and watches in two calls (`GraphedModel._quickly`)."""

from __future__ import annotations

import operator
from unittest import mock

import pytest
import torch

from fastbert.execution import cpu
from fastbert.graphs import model as graphs
from fastbert.graphs import staging
from fastbert.graphs.staging import rows_in, words
from fastbert.models import inputs
from fastbert.models.inputs import check_inputs, packed_on_host
from fastbert.ops import checks
from fastbert.runtime import dispatch, model_state
from fastbert.runtime.table import TABLE
from tests.support.graphed_models import Graphed, fresh, lengths_batch, same, shared

CPU = torch.device("cpu")
ONES = torch.ones(4, 9).long()
PADDED = lengths_batch([5, 9, 3, 1])
HOLES = {**PADDED, "attention_mask": PADDED["attention_mask"] * (torch.arange(9) % 3 < 2)}
TYPES = torch.arange(36).view(4, 9) % 2

USUAL = {
    "ids": {"input_ids": PADDED["input_ids"]},
    "a mask of ones": {"input_ids": PADDED["input_ids"], "attention_mask": ONES},
    "a mask": PADDED,
    "a mask with holes": HOLES,
    "types": {**PADDED, "token_type_ids": TYPES},
    "types without a mask": {"input_ids": PADDED["input_ids"], "token_type_ids": TYPES},
    "an empty sequence": lengths_batch([5, 0, 3]),
    "first tokens": {**PADDED, "first_token_only": True},
    "a tuple": {**PADDED, "return_dict": False},
    "int32": {k: v.int() for k, v in PADDED.items()},
    "a mask of booleans": {**PADDED, "attention_mask": PADDED["attention_mask"].bool()},
    "a mask of bytes": {**PADDED, "attention_mask": PADDED["attention_mask"].byte()},
    "a mask of floats": {**PADDED, "attention_mask": PADDED["attention_mask"].float() / 2},
    "strides": {k: v.t().contiguous().t() for k, v in PADDED.items()},
    "views": {"input_ids": PADDED["input_ids"][1:3, 2:7], "attention_mask": torch.ones(2, 9).long()[:, ::2]},
    "one expanded": {"input_ids": PADDED["input_ids"][:1].expand(4, 9)},
}
NO_TYPES = [name for name in USUAL if "types" not in name]


class Refused(AssertionError):
    """The call was not a quick one."""


def called(family="bert", dtype=None, times=2, **given):
    """A graphed model that may be changed, after some calls."""
    g = Graphed(fresh(family, dtype) if dtype else shared(family))
    for _ in range(times):
        g.check(**given or PADDED)
    return g


@pytest.mark.parametrize("which", ["input_ids", "attention_mask", "token_type_ids"])
@pytest.mark.parametrize("rows", [slice(0, 4), slice(1, 5)])  # a view's address is its offset
def test_zeros_without_memory(rows, which):
    given = {
        **PADDED,
        "token_type_ids": TYPES,
        which: torch._efficientzerotensor((5, 9), dtype=torch.long)[rows],
    }
    g = called()
    g.check(**given, reason="there are no tokens" if which == "attention_mask" else None)


def test_the_extension_refuses_zeros_without_memory():
    packer, zeros = inputs.packer_of(shared().config), torch._efficientzerotensor((4, 9), dtype=torch.long)
    assert packer.measure(PADDED["input_ids"], None, None) == (4, 9, 36)
    for given in ((zeros, None, None), (TYPES, zeros, None), (TYPES, None, zeros)):
        assert packer.measure(*given) is None


def only_quick(monkeypatch):
    monkeypatch.setattr(graphs, "check_inputs", mock.Mock(side_effect=Refused))


def on_a_device(monkeypatch, *on_host, tells=True):
    """All tensors but these count as a GPU's, where the kernel that reads the ids may tell of bad ones."""
    monkeypatch.setattr(staging, "is_on_host", lambda t: any(t is other for other in on_host))
    monkeypatch.setattr(staging.Stage, "_kernel_tells", lambda stage: tells)


@pytest.mark.parametrize(
    ("name", "lane"),
    # integers and floats are not copied from a device together
    [
        (name, lane)
        for name in USUAL
        for lane in ("host", "device")
        if (name, lane) != ("a mask of floats", "device")
    ],
)
def test_usual_calls(name, lane, monkeypatch):
    """The first one records; the second is quick, and its result the model's."""
    g = Graphed(shared())
    g.check(**USUAL[name])
    if lane == "device":
        on_a_device(monkeypatch)
    only_quick(monkeypatch)
    g.check(**USUAL[name])
    assert g.graphed.replays == 2


@pytest.mark.parametrize("family", ["roberta", "distilbert", "albert", "electra"])
@pytest.mark.parametrize("name", NO_TYPES)
def test_other_families(family, name, monkeypatch):
    """RoBERTa counts positions over ids that are not padding; DistilBERT has no types."""
    g = Graphed(shared(family))
    given = dict(USUAL[name])
    given["input_ids"] = given["input_ids"].clone()
    given["input_ids"][0, 2] = given["input_ids"][-1, 0] = g.model.config.pad_token_id
    g.check(**given)
    only_quick(monkeypatch)
    g.check(**given)


@pytest.mark.parametrize("types", [None, TYPES])
@pytest.mark.parametrize("mask", [None, ONES])
def test_ids_on_a_device_and_the_lengths_on_the_host(mask, types, monkeypatch):
    """The ids are not copied to the host."""
    given = {"input_ids": PADDED["input_ids"], "attention_mask": mask, "token_type_ids": types}
    g = called(**given, times=1)
    only_quick(monkeypatch)
    on_a_device(monkeypatch, mask)
    monkeypatch.setattr(staging, "to_host", None)
    g.check(**given)
    assert g.graphed.replays == 2


def test_only_the_ids_are_copied_again(monkeypatch):
    """What the host packs beside ids on a device lies there from call to call, until anything else does."""
    g = Graphed(shared())
    ids = PADDED["input_ids"]
    calls = {
        "whole": {"input_ids": ids},
        "other ids": {"input_ids": ids.flip(0)},
        "typed": {"input_ids": ids, "token_type_ids": TYPES},
        "other types": {"input_ids": ids, "token_type_ids": 1 - TYPES},
        "other shape": {"input_ids": ids[:2, :7]},
        "same tokens": {"input_ids": ids.view(6, 6)},
        "first": {"input_ids": ids, "first_token_only": True},
        "padded": PADDED,
        "packed": {"input_ids": ids, "position_ids": torch.arange(9).flip(0)[None]},
    }
    for given in [*calls.values()] * 2:
        g.check(**given)
    packs, pack = [], staging.Stage.pack
    monkeypatch.setattr(staging.Stage, "pack", lambda *args: packs.append(args) or pack(*args))
    on_a_device(monkeypatch)

    def packed(*names):
        packs.clear()
        for name in names:
            g.check(**calls[name])
        return len(packs)

    assert packed("whole", "whole", "other ids", "whole") == 1
    assert packed("typed", "other types", "typed") == 1
    for name in ("other shape", "same tokens", "first", "padded", "typed"):
        packed("whole")
        assert packed(name, "whole", "other ids") == 2
    # by `_replay`
    assert packed("packed", "other ids") == 1
    g.graphed._blank()
    assert packed("whole", "whole") == 1
    g.graphed.clear()
    assert packed("whole") == 0
    assert packed("whole", "whole") == 1


@pytest.mark.parametrize("mask", [None, ONES])
def test_bad_ids_on_a_device_and_the_lengths_on_the_host(mask, monkeypatch):
    """What no kernel looks at is checked on the host; what cannot be ids is refused."""
    given = {"input_ids": PADDED["input_ids"], "attention_mask": mask}
    distil, g = called("distilbert", times=1, **given), called(times=1, **given)
    on_a_device(monkeypatch, mask, tells=False)
    g.check(**given)
    with pytest.raises(ValueError, match="token id 200 is outside"), torch.no_grad():
        g.graphed(**given | {"input_ids": torch.full((4, 9), 200)})
    on_a_device(monkeypatch, mask)
    for graphed, wrong, error in (
        (g, {"token_type_ids": torch.zeros(4, 9)}, "token_type_ids"),
        (g, {"token_type_ids": torch.zeros(4, 8).long()}, "token_type_ids"),
        (g, {"token_type_ids": [0]}, "token_type_ids"),
        (g, {"input_ids": torch.full((4, 9), 5.0)}, "input_ids"),
        (g, {"input_ids": torch.full((4, 9), 5)[0]}, "input_ids"),
        (distil, {"token_type_ids": TYPES}, "token_type_ids: distilbert has no segment"),
    ):
        with pytest.raises((TypeError, ValueError), match=error), torch.no_grad():
            graphed.graphed(**given | wrong)


def test_which_kernels_tell_of_bad_ids(monkeypatch):
    stage = staging.Stage(shared().config, CPU, torch.float32)
    assert not stage._kernel_tells()
    monkeypatch.setitem(TABLE["cpu"], "embedding", ("triton", "aten", "reference"))
    triton = dispatch.backend_module("triton")
    monkeypatch.setattr(triton, "available", lambda device_type: None)
    with dispatch.use_backend(embedding="triton"):
        assert stage._kernel_tells()
    with dispatch.use_backend("aten"):
        assert not stage._kernel_tells()


UNUSUAL = {
    "position_ids": {"position_ids": torch.arange(9).flip(0)[None]},
    "a masked first token": {"attention_mask": torch.arange(9).expand(4, 9)},
    "packed": {"packed": True},
    "float64": {"attention_mask": torch.ones(4, 9).double()},
    "strange kinds of tensors": {"input_ids": torch.nn.Parameter(PADDED["input_ids"], requires_grad=False)},
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_calls_are_left_to_check_inputs(name, monkeypatch):
    g = called(times=1)
    given = {**PADDED, **UNUSUAL[name]}
    if name == "packed":
        same(g.graphed(**given)[0], g.model(**given)[0])
    else:
        g.check(**given)
    only_quick(monkeypatch)
    with pytest.raises(Refused), torch.no_grad():
        g.graphed(**given)


BAD_ROW = torch.full((4, 9), 5)
BAD = {
    "a large id": {"input_ids": BAD_ROW + torch.eye(4, 9).long() * 200},
    "a large id that is masked": {"input_ids": torch.full((4, 9), 5).index_fill(1, torch.tensor([8]), 120)},
    "an id below zero": {"input_ids": BAD_ROW - torch.eye(4, 9).long() * 6},
    "a large type": {"token_type_ids": torch.eye(4, 9).long() * 2},
    "a type below zero": {"token_type_ids": -torch.eye(4, 9).long()},
    "types of another shape": {"token_type_ids": torch.zeros(4, 8).long()},
    "a mask of another shape": {"attention_mask": torch.ones(4, 8).long()},
    "a mask of one sequence": {"attention_mask": torch.ones(9).long()},
    "a complex mask": {"attention_mask": torch.ones(4, 9, dtype=torch.complex64)},
    "float ids": {"input_ids": BAD_ROW.float()},
    "float types": {"token_type_ids": torch.zeros(4, 9)},
    "ids of one sequence": {"input_ids": BAD_ROW[0]},
    "a sequence too long": {"input_ids": torch.full((1, 73), 5), "attention_mask": None},
    "no ids": {"input_ids": None},
    "a list": {"input_ids": [[5]]},
}


@pytest.mark.parametrize("lane", ["host", "device"])
@pytest.mark.parametrize("name", BAD)
def test_bad_inputs_are_told_as_the_model_tells_them(name, lane, monkeypatch):
    g = Graphed(shared())
    given = {"input_ids": BAD_ROW, "attention_mask": PADDED["attention_mask"], **BAD[name]}
    g.check(**PADDED)
    with torch.no_grad():
        with pytest.raises((TypeError, ValueError)) as expected:
            g.model(**given)
        if lane == "device":
            on_a_device(monkeypatch)
        with pytest.raises(type(expected.value)) as raised:
            g.graphed(**given)
    assert str(raised.value) == str(expected.value)


def test_a_smaller_vocabulary_is_noticed():
    """The rules of ids are those of the config when recording began."""
    g = Graphed(fresh())
    g.check(**PADDED)
    largest = int(PADDED["input_ids"].max())
    g.model.resize_token_embeddings(largest)
    with torch.no_grad(), pytest.raises(ValueError, match=f"token id {largest} is outside"):
        g.graphed(**PADDED)


@pytest.mark.parametrize("missing", [[inputs], [inputs, model_state]])
def test_without_the_extension(missing, monkeypatch):
    for module in missing:
        monkeypatch.setattr(module, "extension", None)
    g = called(dtype=torch.float64)
    with torch.no_grad():
        g.model.embeddings.LayerNorm.weight.mul_(2)
        g.model.encoder.layer[0].output.dense.weight.data.mul_(2)
    g.check(**PADDED)
    assert g.graphed.replays == 3


def test_a_plan_made_in_one_mode_serves_in_others(monkeypatch):
    """What is made in inference mode cannot be written to outside it."""
    g = Graphed(fresh())
    g.model.requires_grad_(False)
    with torch.inference_mode():
        for _ in range(2):
            g.graphed(**PADDED)
    only_quick(monkeypatch)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            output = g.graphed(**PADDED)
        assert output.last_hidden_state.is_inference() == (mode is torch.inference_mode)
        same(output.last_hidden_state.detach(), g.model(**PADDED).last_hidden_state)
    assert g.graphed.replays == 5


def test_pins_have_their_own_recording(monkeypatch):
    g = called(dtype=torch.float64, times=1)
    for _ in range(2):
        with dispatch.use_backend("aten"):
            g.check(**PADDED)
        only_quick(monkeypatch)
    g.check(**PADDED)
    assert g.recorded == 2


def test_plans_do_not_outlive_their_recordings(monkeypatch):
    """With room for one graph, each call replaces the other's."""
    monkeypatch.setattr(graphs, "_PLANS", 2)
    g = Graphed(shared(), max_graphs=1)
    for lengths in ([3, 4], [60, 40], [3, 4], [3, 4], [4, 3], [2, 2, 2], [60, 40], [60, 40]):
        g.check(**lengths_batch(lengths))
        assert {plan.bucket for plan in g.graphed._plans.values()} <= set(g.graphed.graphs)
        assert len(g.graphed._plans) <= 2
    assert g.recorded == 4
    for lengths in ([3, 4], [3, 4], [3, 5], [2, 6], [7, 1], [1, 1, 1]):  # one graph serves all
        g.check(**lengths_batch(lengths))
        assert len(g.graphed._plans) <= 2
    assert g.recorded == 5


def test_the_graph_used_last_stays():
    """A quick call counts as use."""
    g = Graphed(shared(), max_graphs=2)
    for lengths in ([3, 4], [60, 40], [3, 4], [3, 4], [60, 60, 60]):
        g.check(**lengths_batch(lengths))
    assert [b.tokens for b in g.graphed.graphs] == [32, 192]


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("seed", range(6))
def test_packed_rows_are_those_of_check_inputs(family, seed, monkeypatch):
    """All rows of the memory, those behind the tokens and sequences included."""
    model = shared(family)
    g = torch.Generator().manual_seed(seed)
    size, seqlen = (int(torch.randint(1, 9, (), generator=g)) for _ in range(2))
    ids = torch.randint(0, 120, (size, seqlen), generator=g)
    mask = torch.randint(0, 4, (size, seqlen), generator=g) > 0
    mask[:, 0] |= mask.any(1)
    types = torch.randint(0, 2, (size, seqlen), generator=g) if model.family.segments else None
    if seed == 0:
        mask = None
    stage = staging.Stage(model.config, CPU, torch.float32)
    made = stage.batch(ids, mask, types)
    expected = check_inputs(model.config, CPU, ids, mask, types, None, None)
    total, packing = len(expected.input_ids), expected.packing
    here = packed_on_host(model.config, CPU, ids, mask, types)
    monkeypatch.setattr(checks, "has_values", lambda t: False)  # as on a device
    there = packed_on_host(model.config, CPU, ids, mask, types)
    monkeypatch.setattr(inputs, "to_host", None)
    for other in (torch.ones(size, seqlen), torch.ones(size, seqlen, dtype=torch.int64, device="meta")):
        assert packed_on_host(model.config, CPU, ids, other, types) is None
    pairs = ((here, expected), (here.packing, packing), (there, expected), (there.packing, packing))
    for mine, theirs in pairs:
        for name, value in vars(theirs).items():
            own, same_values = getattr(mine, name), torch.equal if torch.is_tensor(value) else operator.eq
            assert name == "packing" or same_values(own, value)
    assert made.shape == (size, seqlen, total)
    tokens, room = total + seed, size + seed
    dense = total == size * seqlen
    memory = torch.full((words(tokens, room),), -7)
    assert stage.pack(made, tokens, room, not dense, memory)
    whole, rows, ends, indices = rows_in(memory, tokens, room)
    assert torch.equal(whole, memory)
    assert torch.equal(rows[0, :total], expected.input_ids)
    assert torch.equal(rows[1, :total], expected.position_ids)
    if types is not None:
        assert torch.equal(rows[2, :total], expected.token_type_ids)
    assert not rows[:, total:].any()
    assert torch.equal(ends[: size + 1], packing.cu_seqlens)
    assert ends[size:].eq(total).all()
    assert indices.eq(-7).all() if dense else torch.equal(indices[:total], packing.indices)


@pytest.mark.parametrize("assign", [True, False])
def test_plans_end_with_the_weights_that_they_were_made_for(assign):
    g = called(dtype=torch.float64)
    for factor in (0.9, 0.8):
        g.model.load_state_dict({k: v * factor for k, v in g.model.state_dict().items()}, assign=assign)
        for _ in range(2):
            g.check(**PADDED)
    assert g.recorded == (3 if assign else 1)


def test_weights_derived_by_a_later_recording_are_watched(monkeypatch):
    """The first recording derives nothing, the second one panels of the weights."""
    monkeypatch.setattr(cpu, "serves", lambda *_: "off")
    g = Graphed(fresh("bert", torch.float32))
    for _ in range(2):
        with dispatch.use_backend("aten"):
            g.check(**PADDED)
    for _ in range(2):
        g.check(**PADDED)
    for parameter in g.model.parameters():
        parameter.data.mul_(0.9)  # without the version counter
    for _ in range(2):
        g.check(**PADDED)


def test_writes_that_samples_alone_show(monkeypatch):
    """A weight in NumPy's memory has no mark. Once it is derived again, calls are quick again."""
    monkeypatch.setattr(cpu, "serves", lambda *_: "off")
    g = Graphed(fresh("bert", torch.float32))
    weight = g.model.encoder.layer[1].attention.self.key.weight
    memory = weight.detach().numpy().copy()
    weight.data = torch.from_numpy(memory)
    for _ in range(2):
        g.check(**PADDED)
    memory *= 0.5
    for _ in range(2):
        g.check(**PADDED)
    only_quick(monkeypatch)
    g.check(**PADDED)
    assert g.recorded == 1


def test_what_is_in_the_way_of_quick_calls():
    g = called(dtype=torch.float32)
    assert g.graphed(**PADDED).last_hidden_state.requires_grad
    assert g.graphed.last_fallback.startswith("gradients are on")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        g.graphed(**PADDED)
    assert g.graphed.last_fallback == "autocast is on"
    g.check(**lengths_batch([1] * 65), reason="there are more than 64 sequences")
    g.check(**lengths_batch([60] * 9), reason="there are more than 512 tokens")
    for name in ("output_attentions", "output_hidden_states"):
        setattr(g.model.config, name, True)
        g.check(**PADDED, reason=f"{name} is asked for")
        setattr(g.model.config, name, False)
    g.model.encoder.layer[0].register_forward_hook(lambda *_: None)
    g.check(**PADDED, reason="layer 0: it has hooks or another forward")


def scaling(module, args, output):
    return output * 2


CHANGES = {
    "a hook": (
        lambda m: m.encoder.layer[1].output.dense.register_forward_hook(scaling),
        "layer 1: output.dense has hooks or another forward",
    ),
    "a hook before": (
        lambda m: m.encoder.layer[1].output.dense.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
        "layer 1: output.dense has hooks or another forward",
    ),
    "a part in training": (
        lambda m: m.embeddings.LayerNorm.train(),
        "a part of the model is in training mode",
    ),
    # the mark of its storage shows it; samples look at other elements
    "a write of one element through data": (
        lambda m: m.encoder.layer[1].attention.self.key.weight.data[5, 3].add_(10.0),
        None,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_right_after_a_quick_call(change, monkeypatch):
    """Nothing runs between them that would make the next call look for changes."""
    monkeypatch.setattr(cpu, "serves", lambda *_: "off")
    g = called(dtype=torch.float32, times=3)
    with torch.no_grad():
        g.graphed(**PADDED)
    assert g.graphed._weights.untouched()
    make, reason = CHANGES[change]
    make(g.model)
    g.check(**PADDED, reason=reason)


def test_ids_on_a_device_that_the_host_has_to_see(monkeypatch):
    """RoBERTa's positions count them, though its mask would do for others; and which are padding decides."""
    given = {"input_ids": PADDED["input_ids"].clone(), "attention_mask": ONES}
    given["input_ids"][0, 2] = given["input_ids"][2, 4] = shared("roberta").config.pad_token_id
    roberta, g = called("roberta", **given), called()
    on_a_device(monkeypatch, ONES, PADDED["attention_mask"])
    roberta.check(**given)
    g.check(**PADDED)
    only_quick(monkeypatch)
    with pytest.raises(Refused), torch.no_grad():
        g.graphed(**PADDED)


def test_holes_where_the_bias_follows_positions():
    """MPNet's attention bias depends on the distance of two tokens, which packing would change."""
    whole = {**HOLES, "attention_mask": (torch.arange(9) < HOLES["attention_mask"].sum(1)[:, None]).long()}
    assert whole["attention_mask"].sum() == HOLES["attention_mask"].sum()
    g = called("mpnet", **whole)
    reason = "the mask has holes, which this family's attention depends on"
    g.check(**HOLES, reason=reason)


@pytest.mark.parametrize("given", [PADDED, {"input_ids": PADDED["input_ids"], "first_token_only": True}])
def test_the_caller_owns_what_a_quick_call_returned(given, monkeypatch):
    """The next replay does not write there."""
    other = given | {"input_ids": given["input_ids"].flip(0) + 1}
    g = called(**given, times=1)
    g.check(**other)
    only_quick(monkeypatch)
    with torch.no_grad():
        output = g.graphed(**given)
        kept = [t.clone() for t in output.values()]
        g.graphed(**other)
    assert len(kept) == 2
    assert all(map(torch.equal, output.values(), kept))


def test_a_write_while_the_state_is_found_right():
    """It belongs to the next call. Nothing is derived from this bias: its version alone shows the write."""
    g = called(dtype=torch.float32, times=1)
    settle, bias = g.graphed._settle, g.model.embeddings.LayerNorm.bias

    def settle_and_write():
        found = settle()
        with torch.no_grad():
            bias.add_(1)
        return found

    g.graphed._weights.state = None
    g.graphed._settle = settle_and_write
    with torch.no_grad():
        g.graphed(**PADDED)
    g.graphed._settle = settle
    assert not g.graphed._weights.untouched()
    g.check(**PADDED)
