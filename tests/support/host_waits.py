"""How often the host waits for the GPU in one call: once, and never if the lengths are given on the host.

The device is tests/support/fake_gpu.py: the host's code takes the path of a GPU.
tests/triton/test_host_waits.py runs this in a process of its own.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch

import fastbert
from fastbert.backends import triton
from fastbert.compression.early_exit import EarlyExit
from fastbert.graphs import model as graphs
from fastbert.graphs.recorder import EagerRecorder
from fastbert.layers import first_token, float8, packing
from fastbert.models.inputs import check_inputs
from fastbert.ops.first_attention import first_attention, pays
from fastbert.runtime import dispatch
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import TokenBatch
from fastbert.testing.op_cases.first_attention import FirstAttentionCase
from fastbert.training import work
from fastbert.training.loop import Trainer
from fastbert.training.parallel import Parallel
from tests.support import fake_gpu, tiny_training
from tests.support.fake_gpu import fake, real, waits
from tests.support.hf_models import batch
from tests.support.model_pairs import build, model_of

# families that differ on the host: positions, segments, projection, shared layers, relative bias
FAMILIES = ("bert", "roberta", "distilbert", "electra", "albert-groups", "mpnet")


@functools.cache
def pair(name: str = "bert"):
    """(model on the CPU, the same on the device)."""
    model = model_of(name)
    return model, fake_gpu.move(copy.deepcopy(model))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(real(actual), expected, rtol=0, atol=5e-5)


def close_outputs(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        close(value, expected[key])


def packed_batch(name: str):
    """(ids, cu_seqlens, longest, types) of three sequences, one of them empty."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 120, (47,), generator=g)
    types = None if name in ("distilbert", "mpnet") else torch.randint(0, 2, (47,), generator=g)
    return ids, torch.tensor([0, 30, 30, 47], dtype=torch.int32), 30, types


def test_the_device_counts_what_would_wait():
    """Each operation that waits is counted, and no other."""
    with waits() as seen:
        x = torch.arange(6, device=fake_gpu.DEVICE)
        y = (x + 1).reshape(2, 3).sum(0)[:2].clone()
        y.index_select(0, y.clamp_max(1)).cumsum(0).copy_(torch.ones(2, dtype=torch.long), non_blocking=True)
        torch.ones(3).to(fake_gpu.DEVICE, non_blocking=True)
        torch.repeat_interleave(x[:2], x[1:3], output_size=3)
        torch.nonzero_static(x > 2, size=3)
        assert seen == []
        for wait in (
            lambda: x.sum().item(),
            lambda: int(x[0]),
            lambda: bool((x > 3).any()),
            lambda: x.tolist(),
            lambda: x.cpu(),
            lambda: x.to("cpu", non_blocking=True),
            lambda: (x > 2).nonzero(),
            lambda: x[x > 2],
            lambda: x.masked_select(x > 2),
            lambda: torch.ones(3).to(fake_gpu.DEVICE),
            lambda: x.copy_(torch.ones(6)),
            lambda: torch.unique(x),
            lambda: torch.equal(x, x),
            lambda: torch.repeat_interleave(x[:2], x[1:3]),
        ):
            del seen[:]
            wait()
            assert len(seen) >= 1
    with waits(), pytest.raises(RuntimeError, match="tensors on fakegpu:0 and on cpu"):
        x + torch.ones(6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("where", ["device", "no mask", "host", "mask on the host"])
@pytest.mark.parametrize("first_only", [False, True])
@torch.no_grad()
def test_a_padded_batch_waits_once_unless_the_host_has_the_lengths(name, where, first_only):
    host, device = pair(name)
    inputs = batch(name)
    if where == "no mask":
        del inputs["attention_mask"]
    given = inputs if where == "host" else {k: fake(v) for k, v in inputs.items()}
    if where == "mask on the host":
        given["attention_mask"] = inputs["attention_mask"]
    with waits() as seen:
        out = device(**given, first_token_only=first_only)
        assert len(seen) == (0 if "host" in where else 1)
    close_outputs(out, host(**inputs, first_token_only=first_only))


@pytest.mark.parametrize("every", [1, 2])
def test_early_exit_waits_once_per_branch(every):
    model = build("bert", "ForSequenceClassification", num_hidden_layers=5)[1]
    exits, inputs = EarlyExit(model, every=every).eval(), batch("bert")
    inputs["attention_mask"] = (torch.arange(40) < torch.tensor([[40], [23], [9], [1]])).long()
    for branch in exits.branches:
        branch.classifier.weight.data.mul_(40)
    threshold = exits.uncertainty(exits(**inputs, threshold=2.0).logits).sort().values[1].item() + 1e-3
    expected = exits(**inputs, threshold=threshold)
    assert len(expected.layers.unique()) > 1
    device, last = copy.deepcopy(exits), expected.layers.max()
    fake_gpu.move(device)
    with waits() as seen:
        out = device(**{k: fake(v) for k, v in inputs.items()}, threshold=threshold)
        # And once for the batch
        assert len(seen) == 1 + sum(depth <= last for depth in exits.exits)
    close(out.logits, expected.logits)
    assert torch.equal(out.layers, expected.layers)


def test_attention_of_first_tokens_waits_only_for_a_longest_length(monkeypatch):
    """The op, by `aten`; and `pays`, by a backend that decides from what the host knows."""
    for options in ({}, {"bias": "full", "gate": True, "tail": 3}, {"bias": "shared", "value_bias": False}):
        case = FirstAttentionCase((30, 0, 17), **options)
        made = case.inputs(torch.float32, "cpu") | {"softmax_scale": case.softmax_scale}
        expected = first_attention(**made)
        on_device = {k: fake(v) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
        with waits() as seen:
            out = first_attention(**on_device, max_seqlen=40 if not options else 30)
            assert seen == []
            first_attention(**on_device)
            assert len(seen) == 1
        close(out, expected)
    with waits() as seen:
        for dtype in (torch.float32, torch.bfloat16):
            assert not pays(fake(torch.zeros(64, 8, dtype=dtype)), 2)
        monkeypatch.setattr(dispatch, "serving_function", lambda *_: triton.first_attention_pays)
        assert pays(fake(torch.zeros(64, 8, dtype=torch.bfloat16)), 2)
        assert not pays(fake(torch.zeros(64, 1025, dtype=torch.bfloat16)), 2)
        assert seen == []


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_no_wait_where_the_last_layer_attends_to_first_tokens(name, monkeypatch, noted):
    """Nor in the graphs of first tokens, which call the op on their capacity."""
    host, device = pair(name)
    inputs = batch(name)
    expected = host(**inputs, first_token_only=True)
    monkeypatch.setattr(first_token, "pays", lambda x, batch: True)
    calls = noted(first_token, "first_attention", lambda *args, **options: options["max_seqlen"])
    longest = int(inputs["attention_mask"].sum(1).max())
    graphed = graphs.graph(device, recorder=EagerRecorder, max_tokens=512)
    for run, bound in ((device, longest), (graphed, None), (graphed, None)):
        del calls[:]
        with waits() as seen:
            out = run(**inputs, first_token_only=True)
            assert seen == []
        assert len(calls) >= 1
        assert min(calls) >= longest
        assert bound is None or calls == [bound]
        close_outputs(out, expected)
    # MPNet has no graph for a mask with holes
    assert (graphed.last_fallback is None) == (name != "mpnet")


@torch.no_grad()
def test_states_attentions_and_embeddings_wait_no_more():
    host, device = pair()
    inputs = batch("bert")
    embeds = torch.randn(*inputs["input_ids"].shape, 48)
    asked = {"output_hidden_states": True, "output_attentions": True, "head_mask": torch.rand(3, 3)}
    for given in (inputs, {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}):
        expected = host(**given, **asked)
        on_device = {**asked, "head_mask": fake(asked["head_mask"])}
        for count, form in ((1, {k: fake(v) for k, v in given.items()}), (0, given)):
            with waits() as seen:
                out = device(**form, **on_device)
                assert len(seen) == count
            for mine, theirs in zip(
                out.attentions + out.hidden_states, expected.attentions + expected.hidden_states, strict=True
            ):
                close(mine, theirs)


@torch.no_grad()
def test_a_4d_mask_waits_once_with_ids_on_the_device():
    host, device = pair()
    ids = batch("bert")["input_ids"]
    mask = torch.rand(4, 1, 40, 40) > 0.3
    with waits() as seen:
        out = device(fake(ids), fake(mask))
        assert len(seen) == 1  # to check the ids
        out_host = device(ids, mask)
        assert len(seen) == 1
    close(out.last_hidden_state, host(ids, mask).last_hidden_state)
    assert torch.equal(real(out.last_hidden_state), real(out_host.last_hidden_state))


@pytest.mark.parametrize("weights", ["int8", "fp8"])
@torch.no_grad()
def test_models_of_8_bits_wait_no_more(weights, monkeypatch):
    """Moved to the device after they were quantised, and in graphs of the device."""
    monkeypatch.setattr(float8, "gap", lambda device: None)
    model = copy.deepcopy(pair()[0])
    host = model.bfloat16().quantize("fp8") if weights == "fp8" else model.quantize(embeddings="int8")
    device, inputs = fake_gpu.move(copy.deepcopy(host)), batch("bert")
    with dispatch.use_backend("aten"):
        expected = host(**inputs).last_hidden_state
    with waits() as seen:
        graphed = graphs.graph(device, recorder=EagerRecorder, max_tokens=512)
        device(**inputs)  # whether the device has a product of 8 bits is looked at once
        for run in (device, graphed, device, graphed):
            del seen[:]
            out = run(**inputs).last_hidden_state
            assert seen == []
            close(out, expected)
    assert graphed.last_fallback is None


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("first_only", [False, True])
@torch.no_grad()
def test_packed_sequences(name, first_only):
    host, device = pair(name)
    ids, cu_seqlens, longest, types = packed_batch(name)
    expected = host.forward_packed(ids, cu_seqlens, longest, types, first_token_only=first_only)
    on_device = [None if t is None else fake(t) for t in (ids, cu_seqlens, types)]
    for count, (a, b, c) in (
        (1, on_device),
        (0, (ids, cu_seqlens, types)),
        (0, (on_device[0], cu_seqlens, on_device[2])),
    ):
        with waits() as seen:
            out = device.forward_packed(a, b, longest, c, first_token_only=first_only)
            assert len(seen) == count
        close(out, expected)


def test_training_waits_once():
    """Dropout draws its seed on the device."""
    device = copy.deepcopy(pair()[0]).train()
    fake_gpu.move(device)
    inputs = {k: fake(v) for k, v in batch("bert").items()}
    with waits() as seen:
        device(**inputs)
        assert len(seen) == 1


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_the_sentence_encoder_waits_for_its_result_alone(pooling):
    host, device = pair()
    ids, cu_seqlens, _, _ = packed_batch("bert")
    starts = cu_seqlens.numpy().astype(np.int64)
    tokens = TokenBatch(ids.numpy(), starts, np.diff(starts))
    encoders = [SentenceEncoder.__new__(SentenceEncoder) for _ in range(2)]
    for encoder, model in zip(encoders, (host, device), strict=True):
        encoder.model, encoder.pooling, encoder.normalize = model, pooling, True
    expected = encoders[0]._forward(tokens)
    with waits() as seen:
        rows = encoders[1]._forward(tokens)
        assert len(seen) == 1
    np.testing.assert_allclose(rows, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "adamw-google"])
def test_a_step_of_the_training_loop_waits_only_where_it_is_logged(kind, tmp_path):
    """Forward, backward, clipping, the optimizer; of a batch that comes from the host."""
    counts = {}

    class Watched(Trainer):
        def _step(self, *args):
            del seen[:]
            found = super()._step(*args)
            counts[self.step + 1] = list(seen)
            return found

        def _save(self, logs):
            return self.output

    def build():
        return fake_gpu.move(tiny_training.Classes()).requires_grad_()

    parallel = Parallel("none", "cpu")
    parallel.device, parallel.waits = fake_gpu.DEVICE, True
    stages = tiny_training.stages(6, clip=0.5, options={"kind": kind})
    stages[0].build = build
    options = {"log_every": 3, "tensorboard": False, "progress": False}
    with waits() as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "roof", lambda device, dtype: 1e12)
        patch.setattr(work, "peak", lambda device, dtype: None)
        Watched(stages, tmp_path, parallel=parallel, **options).run()
    assert [counts[step] for step in (1, 2, 4, 5)] == [[]] * 4
    assert all(counts[step] for step in (3, 6))


# -- what is checked, and where ------------------------------------------------------------------------------


def test_ids_on_the_host_are_checked():
    _, device = pair()
    inputs = batch("bert")
    ids, cu_seqlens, longest, _ = packed_batch("bert")
    packed = device.forward_packed
    with waits() as seen:
        for message, call in (
            (r"input_ids: token id \d+ is outside \[0, 120\)", lambda: device(inputs["input_ids"] + 100)),
            (r"token_type_ids: token type 7 is", lambda: device(ids[None], token_type_ids=ids[None] * 0 + 7)),
            (r"input_ids: token id -3 is outside", lambda: packed(ids * 0 - 3, cu_seqlens, longest)),
            (r"max_seqlen: 29 is below the longest sequence, 30", lambda: packed(fake(ids), cu_seqlens, 29)),
            (r"cu_seqlens: expected to rise from 0 to .* 47", lambda: packed(fake(ids), cu_seqlens + 1, 30)),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        assert seen == []
        with pytest.raises(ValueError, match=r"input_ids: token id -3 is outside"):  # on the device: one wait
            packed(fake(ids * 0 - 3), fake(cu_seqlens), longest)
        assert len(seen) == 1


def test_other_mixtures_of_devices_are_refused():
    _, device = pair()
    inputs = batch("bert")
    padded, mask, segments = (inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids"))
    ids, cu_seqlens, longest, types = packed_batch("bert")
    on_device, packed = r"expected a tensor on fakegpu:0.*got one on cpu", device.forward_packed
    on_host = "expected a tensor on cpu.*fakegpu:0"
    for message, call in (
        (f"token_type_ids: {on_device}", lambda: device(fake(padded), token_type_ids=segments)),
        (f"attention_mask: {on_host}", lambda: device(padded, fake(mask))),
        (f"attention_mask: {on_device}", lambda: device(fake(padded), torch.zeros(4, 1, 40, 40))),
        (f"cu_seqlens: {on_host}", lambda: packed(ids, fake(cu_seqlens), longest)),
        (f"token_type_ids: {on_device}", lambda: packed(fake(ids), fake(cu_seqlens), longest, types)),
    ):
        with waits(), pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"input_ids: expected a tensor on meta"):
        model_of("bert").to("meta")(padded)


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_the_facts_are_the_same_wherever_the_mask_is(name):
    """Lengths, the first sequence whose first token is masked, holes, and positions of the kept tokens."""
    config = model_of(name).config
    mask = torch.ones(4, 9, dtype=torch.long)
    for change in (
        lambda: None,
        lambda: mask[1].fill_(0),
        lambda: mask[2, 0].fill_(0),
        lambda: mask[3, 4].fill_(0),
    ):
        change()
        given = {"token_type_ids": None, "position_ids": None, "inputs_embeds": None}
        ids = torch.arange(36).reshape(4, 9)
        on_cpu = check_inputs(config, torch.device("cpu"), ids, mask, **given)
        with waits():
            mixed = check_inputs(config, fake_gpu.DEVICE, fake(ids), mask, **given)
            moved = check_inputs(config, fake_gpu.DEVICE, ids, mask, **given).to(fake_gpu.DEVICE)
        runs = packing.runs(mask.bool()).tolist()
        assert runs == [sum(a and not b for a, b in zip(r, [0, *r], strict=False)) for r in mask.tolist()]
        assert on_cpu.holes == (name == "mpnet" and max(runs) > 1)
        for other in (mixed, moved):
            assert (other.holes, other.first_masked) == (on_cpu.holes, on_cpu.first_masked)
            assert other.packing.max_seqlen == on_cpu.packing.max_seqlen
            assert torch.equal(real(other.packing.cu_seqlens), on_cpu.packing.cu_seqlens)
            assert torch.equal(real(other.input_ids), on_cpu.input_ids)
            assert torch.equal(real(other.position_ids), on_cpu.position_ids)
            indices = on_cpu.packing.indices
            assert (
                indices is None
                if other.packing.indices is None
                else torch.equal(real(other.packing.indices), indices)
            )


# -- graphs --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_graphed_model_waits_no_more():
    host, device = pair()
    inputs = batch("bert")
    moved = {k: fake(v) for k, v in inputs.items()}
    with waits() as seen:
        graphed = graphs.graph(device, recorder=EagerRecorder, max_tokens=512)
        mixed = {**moved, "attention_mask": inputs["attention_mask"]}
        for given, count in ((moved, 1), (inputs, 0), (mixed, 0)):
            for extra in ({}, {"first_token_only": True}):
                for _ in range(2):
                    del seen[:]
                    out = graphed(**given, **extra)
                    assert graphed.last_fallback is None
                    assert len(seen) == count
                close_outputs(out, host(**inputs, **extra))


@pytest.mark.parametrize("masked", [True, False])
def test_training_on_masked_words_waits_for_ids_and_labels(masked):
    """Once each, before the encoder; neither the loss nor its backward waits."""
    config = copy.deepcopy(pair()[0].config)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    host = fastbert.AutoModelForMaskedLM.from_config(config).train()
    device = fake_gpu.move(copy.deepcopy(host)).requires_grad_()
    inputs = batch("bert")
    if not masked:
        inputs["attention_mask"][:] = 1
    labels = inputs["input_ids"].where((torch.rand(4, 40) < 0.3) & (inputs["attention_mask"] > 0), -100)
    with waits() as seen:
        loss = device(**{k: fake(v) for k, v in inputs.items()}, labels=fake(labels)).loss
        assert len(seen) == 2
        loss.backward()
        assert len(seen) == 2
    expected = host(**inputs, labels=labels).loss
    close(loss.detach(), expected.detach())
