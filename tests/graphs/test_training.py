"""Training by replays: losses, gradients and random numbers are those of the model itself."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fastbert
from fastbert.graphs import training
from fastbert.graphs.recorder import EagerRecorder, Recording
from fastbert.graphs.training import graph_training
from fastbert.layers import attention as attention_of_layers
from fastbert.layers.taps import Taps
from fastbert.models.encoder import tapped
from tests.support.graphed_models import SIZES, fresh, lengths_batch, pruned
from tests.support.model_pairs import build, inputs_for, labels_for

NEW = "the model is new, or has changed"
TASKS = (
    ("bert", "ForPreTraining"),
    ("roberta", "ForMaskedLM"),
    ("albert", "ForSequenceClassification"),
    ("electra", "ForPreTraining"),
    ("distilbert", "ForTokenClassification"),
    ("modernbert", "ForMaskedLM"),
    ("gte", "ForSequenceClassification"),
    ("jina_embeddings_v3", "ForMaskedLM"),
    ("eurobert", "ForTokenClassification"),
    ("deberta-v2", "ForTokenClassification"),
    ("mobilebert", "ForMaskedLM"),
    ("big_bird", "ForSequenceClassification"),
)


class Poisoned(EagerRecorder):
    """A replay overwrites what other graphs have returned, because graphs may share memory."""

    def record_pair(self, forward, backward):
        first, second = super().record_pair(forward, backward)

        def replay():
            for made in self._made:
                made.outputs[0].fill_(torch.nan)
            first.replay()

        recording = Recording(first.outputs, replay)
        self._made.add(recording)
        return recording, second


def twins(name: str, task: str, dtype: torch.dtype = torch.float64, **options):
    """(the model, its twin, the twin's replays), in training."""
    _, model = build(name, task)
    _, twin = build(name, task)
    model, twin = (m.to(dtype).train() for m in (model, twin))
    return model, twin, graph_training(twin, recorder=Poisoned, **{**SIZES, **options})


def encoder_twins(name: str = "bert", **options):
    model, twin = (fresh(name, num_hidden_layers=2).train() for _ in range(2))
    return model, twin, graph_training(twin, recorder=Poisoned, **{**SIZES, **options})


def loss(call, lengths=(5, 9), seed: int = 0, **more) -> torch.Tensor:
    """A sum of all outputs of an encoder, with dropout drawn from `seed`."""
    torch.manual_seed(seed)
    output = call(**lengths_batch(lengths, seed=seed), **more)
    return output.last_hidden_state.square().sum() + output.pooler_output.sum()


def both_backward(model, twin, graphed, **more) -> None:
    """Gradients of `loss` of both, which had none."""
    for m, call in ((model, model), (twin, graphed)):
        m.zero_grad()
        loss(call, **more).backward()


def same_gradients(model, twin) -> None:
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize(("name", "task"), TASKS)
def test_a_run_is_the_models_own(name, task):
    model, twin, graphed = twins(name, task)
    runs = [
        (m, call, torch.optim.AdamW(m.parameters(), 1e-2)) for m, call in ((model, model), (twin, graphed))
    ]
    for step, size in enumerate((18, 18, 18, 12, 40)):
        inputs = inputs_for(name, task, seed=step, seqlen=size)
        if model.family.counts_columns:
            inputs = lengths_batch([size, 5, 1, 9], seed=step)
        losses, after = [], []
        for m, call, _ in runs:
            torch.manual_seed(step)
            losses.append(call(**inputs, **labels_for(m, inputs, seed=step)).loss)
            losses[-1].backward()
            after.append(torch.rand(()))
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-11, atol=1e-12)
        assert after[0] == after[1], "another number of random numbers was drawn"
        same_gradients(model, twin)
        for _, _, adam in runs:
            adam.step()
            adam.zero_grad()
    assert graphed.replays == 4
    assert dict(graphed.encoder.fallbacks) == {NEW: 1}
    assert len(graphed.encoder.graphs) > 1


def test_layers_without_some_heads_and_neurons():
    model, twin = (pruned(fresh()).train() for _ in range(2))
    graphed = graph_training(twin, recorder=Poisoned, **SIZES)
    for seed in range(3):
        both_backward(model, twin, graphed, seed=seed)
        same_gradients(model, twin)
    assert graphed.replays == 2


def test_bits_of_a_batch_that_fills_its_bucket():
    model, twin, graphed = twins("bert", "ForMaskedLM", torch.float32, buckets=[15])
    inputs = lengths_batch([7, 8])
    labels = inputs["input_ids"].where(inputs["attention_mask"].bool(), -100)
    for _ in range(3):
        for m, call in ((model, model), (twin, graphed)):
            m.zero_grad()
            torch.manual_seed(1)
            call(**inputs, labels=labels).loss.backward()
        assert all(
            torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
        )
    assert graphed.replays == 2


def test_a_call_has_the_same_bits_before_and_after_it_is_recorded():
    # or a resumed run would have other bits
    found = []
    for calls in (1, 2):
        _, twin, graphed = encoder_twins()
        twin.float()
        for _ in range(calls):
            twin.zero_grad()
            loss(graphed).backward()
        found.append([p.grad for p in twin.parameters() if p.grad is not None])
        assert graphed.replays == calls - 1
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_gradients_accumulate_and_belong_to_the_caller(name):
    model, twin, graphed = encoder_twins(name)
    loss(graphed)
    for seed in range(3):
        loss(model, seed=seed).backward()
        loss(graphed, seed=seed).backward()
        same_gradients(model, twin)
    assert graphed.replays == 3
    found = torch.autograd.grad(loss(graphed), [twin.embeddings.LayerNorm.weight])
    wanted = torch.autograd.grad(loss(model), [model.embeddings.LayerNorm.weight])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_a_hidden_state_belongs_to_the_caller():
    _, _, graphed = encoder_twins()
    loss(graphed)
    given = torch.arange(5, 14), torch.tensor([0, 4, 9], dtype=torch.int32), 5
    found = graphed.forward_packed(*given).detach()
    copied = found.clone()
    loss(graphed)
    assert graphed.replays == 2
    assert torch.equal(found, copied)


def test_one_forward_at_a_time_waits_for_its_backward():
    model, twin, graphed = encoder_twins()
    loss(graphed)
    (loss(model, seed=1) + loss(model, (3, 4), seed=2)).backward()
    (loss(graphed, seed=1) + loss(graphed, (3, 4), seed=2)).backward()
    assert graphed.last_fallback == "another forward waits for its backward"
    same_gradients(model, twin)
    # a forward whose loss is gone waits for nothing
    loss(graphed)
    loss(graphed)
    assert graphed.last_fallback is None


def test_what_a_recorded_backward_cannot_do_is_an_error():
    _, twin, graphed = encoder_twins()
    loss(graphed)
    value = loss(graphed)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a recorded step has one backward"):
        value.backward()
    value = loss(graphed)
    with torch.no_grad():
        twin.embeddings.LayerNorm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="a parameter was changed in place"):
        value.backward()
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        torch.autograd.grad(loss(graphed), twin.embeddings.LayerNorm.weight, create_graph=True)[
            0
        ].sum().backward()


def halved(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5


def frozen(model):
    model.embeddings.requires_grad_(False)


def replaced(model):
    torch.manual_seed(3)
    norm = model.encoder.layer[0].output.LayerNorm
    norm.weight = torch.nn.Parameter(torch.rand_like(norm.weight))


def in_half(model):
    model.bfloat16().double()


@pytest.mark.parametrize("change", [halved, frozen, replaced, in_half])
def test_a_changed_model_is_recorded_again(change):
    model, twin, graphed = encoder_twins()
    for times in range(3):
        both_backward(model, twin, graphed)
        assert graphed.last_fallback == (None if times else NEW)
    change(model)
    change(twin)
    for reason in (NEW, None, None):
        both_backward(model, twin, graphed)
        assert graphed.last_fallback == reason
        same_gradients(model, twin)


def test_an_evaluation_between_steps_changes_nothing():
    _, twin, graphed = encoder_twins()
    loss(graphed)
    loss(graphed).backward()
    twin.eval()
    loss(graphed).backward()
    assert graphed.last_fallback == "the model is not in training mode"
    twin.train()
    loss(graphed).backward()
    assert graphed.last_fallback is None


@contextlib.contextmanager
def hooked(model):
    handle = model.encoder.layer[0].register_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextlib.contextmanager
def recomputing(model):
    model.gradient_checkpointing_enable()
    yield
    model.gradient_checkpointing_disable()


@contextlib.contextmanager
def skipping(model):
    model.layerdrop = 0.5
    torch.manual_seed(1)
    yield
    model.layerdrop = 0.0


CONTEXTS = {
    "gradients are off": lambda model: torch.no_grad(),
    "taps are set": lambda model: tapped(model, Taps()),
    "autograd looks at what is saved": lambda model: torch.autograd.graph.save_on_cpu(),
    "autograd looks": lambda model: torch.autograd.detect_anomaly(check_nan=False),
    "layers are computed again in backward": recomputing,
    "layers are skipped at random": skipping,
    "layer 0: ": hooked,
    "fastbert.double_backward is on": lambda model: fastbert.double_backward(),
}


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("reason", CONTEXTS)
def test_what_is_not_replayed_the_model_computes(reason):
    model, twin, graphed = encoder_twins()
    loss(graphed)
    with CONTEXTS[reason](model):
        wanted = loss(model)
    with CONTEXTS[reason](twin):
        found = loss(graphed)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    assert graphed.last_fallback.startswith(reason)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"head_mask": torch.tensor([1.0, 0.0, 1.0])}, "head_mask is given"),
        ({"output_hidden_states": True}, "output_hidden_states is asked for"),
        ({"output_attentions": True}, "output_attentions is asked for"),
    ],
)
def test_arguments_that_are_not_replayed(given, reason):
    model, _, graphed = encoder_twins()
    loss(graphed)
    torch.testing.assert_close(loss(graphed, **given), loss(model, **given), rtol=1e-11, atol=1e-12)
    assert graphed.last_fallback == reason


@pytest.mark.parametrize("given", [{"causal": True}, {"first_token_only": True}])
def test_options_have_recordings_of_their_own(given):
    model, twin, graphed = encoder_twins()
    loss(graphed)
    for more in ({}, given, {}, given):
        both_backward(model, twin, graphed, **more)
        same_gradients(model, twin)
        assert graphed.last_fallback is None
    assert len(graphed.graphs) == 2


def test_autocast_has_recordings_of_its_own():
    model, twin, graphed = encoder_twins()
    model, twin = model.float(), twin.float()
    loss(graphed)
    for enabled in (False, True, True, False):
        for m, call in ((model, model), (twin, graphed)):
            m.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                value = loss(call)
            value.backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(
                    q.grad, p.grad, rtol=0.05 if enabled else 1e-4, atol=0.2 if enabled else 1e-3
                )
    assert len(graphed.graphs) == 2


def test_packed_sequences():
    model, twin, graphed = encoder_twins()
    ends = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    for step in range(3):
        ids = torch.randint(5, 100, (12,), generator=torch.Generator().manual_seed(step))
        for m, call in ((model, model), (twin, graphed)):
            m.zero_grad()
            torch.manual_seed(step)
            call(input_ids=ids, cu_seqlens=ends).last_hidden_state.square().sum().backward()
        same_gradients(model, twin)
    assert graphed.replays == 2


def test_the_least_recently_used_is_forgotten_and_all_can_be():
    _, twin, graphed = encoder_twins(max_graphs=2)
    loss(graphed)
    for lengths in ((20, 12), (30, 30), (20, 12), (60, 60)):
        loss(graphed, lengths).backward()
    assert [bucket.tokens for bucket in graphed.graphs] == [32, 128]
    assert graphed.bytes_held > sum(p.nbytes for p in twin.parameters() if p.grad is not None)
    graphed.clear()
    assert graphed.graphs == []
    assert graphed.bytes_held == 0
    loss(graphed).backward()
    assert graphed.last_fallback == NEW


def test_too_large_batches_and_no_tokens_run_the_model():
    model, _, graphed = encoder_twins(max_tokens=40, max_batch=3)
    loss(graphed)
    for lengths in ((30, 30), (2, 2, 2, 2), (8, 8, 8)):
        torch.testing.assert_close(loss(graphed, lengths), loss(model, lengths), rtol=1e-11, atol=1e-12)
        assert "there are more than 40 tokens or 3 sequences" in graphed.last_fallback
    loss(graphed, (8, 8))
    assert graphed.last_fallback is None


def test_every_row_is_a_token_of_a_sequence(monkeypatch):
    """Attention's result elsewhere has no meaning, and may be NaN."""
    model, twin, graphed = encoder_twins(max_tokens=256, buckets=[200])

    def attention(q, k, v, cu_seqlens, *args, **options):
        found = usual(q, k, v, cu_seqlens, *args, **options)
        return torch.where(torch.arange(len(found))[:, None, None] < cu_seqlens[-1], found, torch.nan)

    usual = attention_of_layers.attention
    monkeypatch.setattr(attention_of_layers, "attention", attention)
    loss(graphed)
    for call in (model, graphed):
        loss(call).backward()
    same_gradients(model, twin)


def test_weights_that_are_derived_in_training_are_not_recorded():
    model, twin, graphed = encoder_twins()
    for m in (model.float(), twin.float()):
        m.encoder.layer[0].eval()
    loss(graphed)
    for _ in range(2):
        with torch.no_grad():
            for m in (model, twin):
                m.encoder.layer[0].output.dense.weight.neg_()
        torch.testing.assert_close(loss(graphed), loss(model), rtol=1e-4, atol=1e-4)
    assert graphed.last_fallback == "weights are derived from parameters"


class Fails(EagerRecorder):
    def record_pair(self, forward, backward):
        raise RuntimeError("no memory\nat all")


def test_a_recording_that_fails_is_told_once_and_the_model_computes():
    model, _, _ = encoder_twins()
    graphed = graph_training(model, recorder=Fails, **SIZES)
    loss(graphed)
    with pytest.warns(RuntimeWarning, match="has no graph: recording failed: RuntimeError: no memory"):
        first = loss(graphed)
    torch.testing.assert_close(loss(graphed), first, rtol=0, atol=0)
    assert graphed.last_fallback == "recording failed: RuntimeError: no memory"


class Wrong(EagerRecorder):
    """Graphs that compute something else: `wrong` says which one."""

    wrong = "forward"

    def record_pair(self, forward, backward):
        first, second = super().record_pair(forward, backward)

        def replay():
            first.replay()
            first.outputs[0][0, 0] = torch.nan

        if self.wrong == "forward":
            return Recording(first.outputs, replay), second
        return first, Recording((), lambda: None)


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_a_recording_that_computes_something_else_does_not_serve(wrong, monkeypatch):
    monkeypatch.setattr(Wrong, "wrong", wrong)
    model, twin, _ = encoder_twins()
    graphed = graph_training(twin, recorder=Wrong, **SIZES)
    loss(graphed)
    loss(model).backward()
    with pytest.warns(RuntimeWarning, match="a replay computes something else than the model"):
        value = loss(graphed)
    value.backward()
    same_gradients(model, twin)
    assert graphed.replays == 0


class Full(EagerRecorder):
    def record_pair(self, forward, backward):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_full_device_gets_its_memory_back():
    model, twin, _ = encoder_twins()
    graphed = graph_training(twin, recorder=Full, **SIZES)
    loss(graphed)
    with pytest.warns(RuntimeWarning, match="recording failed: OutOfMemoryError"):
        torch.testing.assert_close(loss(graphed), loss(model), rtol=1e-11, atol=1e-12)
    assert graphed.bytes_held == 0


def test_without_graphs_or_gradients_the_model_computes():
    _, twin, _ = encoder_twins()
    graphed = graph_training(twin, **SIZES)
    loss(graphed).backward()
    assert graphed.last_fallback == "the model is on cpu, where there are no graphs"
    assert training.encoders_of(twin) == []
    twin.requires_grad_(False)
    graphed = graph_training(twin, recorder=Poisoned, **SIZES)
    loss(graphed)
    assert graphed.last_fallback == "no parameter needs a gradient"


def test_arguments():
    with pytest.raises(TypeError, match="model: expected a model of fastbert, got torch"):
        graph_training(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="max_tokens: expected an integer >= 1, got 0"):
        graph_training(fresh(), max_tokens=0)
    assert fastbert.graph_training is graph_training
