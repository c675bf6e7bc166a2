"""Training: every way to run a step, against transformers, against eager, or against the plain step."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call

from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.encoder_layer import EncoderLayer
from fastbert.layers.form import SITES
from fastbert.models.config import EncoderConfig
from fastbert.runtime import dispatch
from fastbert.runtime.namespaces import has_backward
from tests.support import launchers, ranks, training_workers
from tests.support.accelerated_models import worst_gradient
from tests.support.model_pairs import CASES, build, inputs_for, labels_for
from tests.support.numbered_text import relative_error

NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
DROPOUT = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
HALF = (torch.bfloat16, torch.float16)


def trained(task: str, name: str = "bert", **config) -> torch.nn.Module:
    """Our model in training mode, with the same weights at every call."""
    return build(name, task, **{"num_hidden_layers": 2, **DROPOUT, **config})[1].train()


def example(model: torch.nn.Module, task: str, seed: int = 0, **sizes) -> dict[str, torch.Tensor]:
    """A padded batch with its labels."""
    inputs = inputs_for(model.config.model_type, task, seed=seed, **sizes)
    return inputs | labels_for(model, inputs, seed)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy all gradients by name, and clear them."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def step(model: torch.nn.Module, inputs: dict, seed: int = 3, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The gradients of one batch; `seed` decides the dropout."""
    torch.manual_seed(seed)
    (model(**inputs).loss * scale).backward()
    return gradients(model)


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, bit-equal gradients."""
    assert actual.keys() == expected.keys()
    assert [name for name, g in expected.items() if not torch.equal(actual[name], g)] == []


def a_layer(dtype: torch.dtype = torch.float32, **config) -> EncoderLayer:
    """One layer at unit scale, in training, with dropout."""
    sizes = dict(hidden_size=24, num_attention_heads=3, intermediate_size=40) | DROPOUT | config
    torch.manual_seed(0)
    layer = EncoderLayer(EncoderConfig(model_type="bert", **sizes)).to(dtype).train()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.2, 1.5 / parameter.shape[-1] ** 0.5)
    return layer


def some_tokens(width: int = 24, dtype: torch.dtype = torch.float32, seed: int = 5, **more):
    """(hidden (14, width), PackedBatch of lengths 5, 0 and 9)."""
    hidden = torch.randn(14, width, generator=torch.Generator().manual_seed(1), dtype=dtype)
    ends = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    return hidden, PackedBatch(ends, 9, seed=torch.tensor([seed]), **more)


# -- autocast ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("dtype", HALF)
def test_autocast_gradients_are_no_worse_than_transformers_own(task, dtype):
    hf, model = build("bert", task, **NO_DROPOUT)
    mine, theirs = [], []
    for seed in range(4):
        inputs = example(model, task, seed)
        truth = step(copy.deepcopy(hf).double(), inputs)
        found = []
        for module in (model, hf):
            with torch.autocast("cpu", dtype):
                loss = module.train()(**inputs).loss
            assert loss.dtype == torch.float32
            (loss * 1024).backward()  # as a GradScaler does
            found.append({name: g / 1024 for name, g in gradients(module).items()})
        assert all(g.dtype == torch.float32 for g in found[0].values())
        mine.append(relative_error(found[0], truth))
        theirs.append(relative_error(found[1], truth))
    assert sum(mine) <= 1.1 * sum(theirs), f"{mine} against {theirs}"


# -- torch.compile -------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_compiled_layer_trains_with_the_masks_of_eager():
    torch._dynamo.reset()
    layer, counter = a_layer(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    hidden, sequences = some_tokens()
    hidden.requires_grad_()
    outputs = []
    for seed in (5, 6, -(2**40)):  # the content of a tensor: a recorded step then draws another mask
        sequences.seed.fill_(seed)
        found = []
        for module in (compiled, layer):
            out = module(hidden, sequences)[0]
            found.append([out, *torch.autograd.grad(out.square().sum(), [hidden, *layer.parameters()])])
        for actual, expected in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5 * expected.abs().max().item())
        outputs.append(found[0][0])
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])
    assert counter.frame_count == 1


@pytest.mark.sweep
def test_a_compiled_model_draws_a_new_mask_at_every_call():
    torch._dynamo.reset()
    model = trained("ForSequenceClassification", num_hidden_layers=1, classifier_dropout=0.0)
    inputs = example(model, "ForSequenceClassification")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected, actual = [model(**inputs).loss for _ in range(2)], []
        grads = [torch.autograd.grad(loss, model.parameters()) for loss in expected]
        torch.manual_seed(seed)
        for i in range(2):
            loss = compiled(**inputs).loss
            actual.append(loss.item())
            for a, e in zip(torch.autograd.grad(loss, model.parameters()), grads[i], strict=True):
                torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
        assert actual == pytest.approx([loss.item() for loss in expected], rel=1e-5)
        losses += actual
    assert len(set(losses)) == 4


# -- the graph -----------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_gradcheck_of_a_layer():
    sizes = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 5}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.25)
    layer = a_layer(torch.float64, **sizes, **dropout)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(5, 4, dtype=torch.float64, generator=g).requires_grad_()
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, generator=g).requires_grad_()
    gate = torch.rand(2, dtype=torch.float64, generator=g).requires_grad_()
    ends, seed = torch.tensor([0, 3, 3, 5], dtype=torch.int32), torch.tensor([9])

    def run(hidden, bias, gate, *values):
        arguments = (hidden, PackedBatch(ends, 3, bias=bias, seed=seed), Asked(gate))
        return functional_call(layer, dict(zip(names, values, strict=True)), arguments)[0]

    with dispatch.use_backend("reference"):
        assert torch.autograd.gradcheck(run, (hidden, bias, gate, *parameters))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_called_twice_in_one_graph(checkpointing):
    """As in training on sentence pairs: two calls, two masks, one backward."""
    model = trained("ForSequenceClassification")
    if checkpointing:
        model.gradient_checkpointing_enable()
    pair = [example(model, "ForSequenceClassification", seed, seqlen=12 + seed) for seed in range(2)]
    torch.manual_seed(0)
    sum(model(**inputs).loss for inputs in pair).backward()
    together = gradients(model)
    torch.manual_seed(0)
    for inputs in pair:
        model(**inputs).loss.backward()
    same(together, gradients(model))


@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
def test_micro_batches_add_up(task):
    hf, model = build("bert", task, **NO_DROPOUT)
    parts = [example(model, task, seed, batch_size=3 + seed, seqlen=10 + 3 * seed) for seed in range(3)]
    apart = [step(model.train(), inputs) for inputs in parts]
    total = {name: apart[0][name] + apart[1][name] + apart[2][name] for name in apart[0]}
    for module in (model, hf.train()):
        for inputs in parts:
            module(**inputs).loss.backward()
    accumulated = gradients(model)
    same(accumulated, total)
    assert worst_gradient(accumulated, gradients(hf))[0] <= 1e-4


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "task"),
    [
        *(("bert", task) for task in ("ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering")),
        ("modernbert", "ForMaskedLM"),
    ],
)
@pytest.mark.parametrize("dtype", [None, *HALF])
def test_checkpointing_changes_no_bit(name, task, dtype):
    model = trained(task, name, **({"mlp_dropout": 0.3} if name == "modernbert" else {}))
    inputs = example(model, task)
    found = []
    for every in (0, 1, 2):
        if every:
            model.gradient_checkpointing_enable(every_n_layers=every)
        assert model.is_gradient_checkpointing is bool(every)
        torch.manual_seed(8)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(**inputs).loss
        torch.rand(3)  # random numbers drawn between forward and backward must not change the masks
        loss.backward()
        found.append(gradients(model))
    same(found[0], found[1])
    same(found[0], found[2])
    assert not any(torch.equal(g, step(model, inputs, 9)[name]) for name, g in found[0].items() if g.any())


# -- what is not trained -------------------------------------------------------------------------------------


@pytest.fixture
def launches(noted):
    """(function, arguments) of every launch, in order."""
    return noted(dispatch, "call", lambda name, key, *args: (name.split()[0], launchers.flat(args)))


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_every_dropout_of_a_step_has_a_call_site_of_its_own(launches, name):
    """Also in a shared layer. Backward uses the bits of forward."""
    model = trained("ForTokenClassification", name, classifier_dropout_prob=0.0)
    model(**example(model, "ForTokenClassification")).loss.backward()
    forward = {"embedding_fwd": 13, "attention_fwd": 12, "layer_norm_fwd": 8}  # where an op has its offset
    backward = {"embedding_bwd": 14, "attention_bwd": 13, "layer_norm_bwd": 7}
    taken, asked = (
        [(op[:-4], args[where[op]]) for op, args in launches if op in where] for where in (forward, backward)
    )
    assert sorted(offset for _, offset in taken) == list(range(1 + 2 * SITES))
    assert sorted(asked) == sorted(taken)
    seeds = {a.item() for op, args in launches if op in forward | backward for a in args if is_seed(a)}
    assert len(seeds) == 1


def is_seed(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.shape == (1,)


def freeze(model: torch.nn.Module, what: str) -> None:
    for name, parameter in model.named_parameters():
        frozen = {
            "encoder": name.startswith("bert."),
            "lower half": name.startswith(("bert.embeddings.", "bert.encoder.layer.0.")),
            "all but biases": not name.endswith("bias"),
            "word table": "word_embeddings" in name,
            "all": True,
            "nothing": False,
        }[what]
        parameter.requires_grad_(not frozen)


def test_only_the_gradients_that_are_wanted_are_computed(launches):
    """Of one projection, of biases alone, of all tables but the words'; a frozen model has no graph."""

    def launched(name: str, trained_name: str, backward: bool = True) -> list[tuple]:
        model = trained("ForSequenceClassification")
        freeze(model, name)
        if trained_name:
            getattr(model.bert.encoder.layer[0].attention.self, trained_name).weight.requires_grad_()
        del launches[:]
        loss = model(**example(model, "ForSequenceClassification")).loss
        assert loss.requires_grad is backward
        if backward:
            loss.backward()
        return list(launches)

    for key in ("query", "key", "value"):
        needs = [args[-6:-3] for name, args in launched("all", key) if name == "attention_bwd"]
        assert needs == [(True,) * 3, tuple(name == key for name in ("query", "key", "value"))]
    biases = launched("all but biases", "")
    needs = [args[6:9] for name, args in biases if name == "linear_bwd"]
    assert len(needs) == 2 * 6 + 2
    assert not any(need_dweight for _, need_dweight, _ in needs)
    assert all(args[1] is None for name, args in biases if name == "linear_bwd")  # x was not kept
    for what, sizes in (
        ("all but biases", (0, 0, 0)),
        ("word table", (0, 72, 2)),
    ):  # of the tables' gradients
        (args,) = [args for name, args in launched(what, "") if name == "embedding_bwd"]
        assert args[8:11] == sizes
    launched("all", "", backward=False)


@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("what", ["encoder", "lower half", "all but biases", "word table"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_freezing_changes_no_bit_of_the_other_gradients(task, what, checkpointing):
    model = trained(task, tie_word_embeddings=False)
    inputs = example(model, task)
    expected = step(model, inputs)
    if checkpointing:
        model.gradient_checkpointing_enable()
    freeze(model, what)
    actual = step(model, inputs)
    # transformers has a bias beside the decoder's that an untied model does not read
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert actual.keys() == trainable - {"cls.predictions.bias"}
    same(actual, {name: expected[name] for name in actual})


# -- labels --------------------------------------------------------------------------------------------------


# ELECTRA's discriminator counts every kept token
IGNORING = [c for c in CASES if c[1] != "ForPreTraining" or not c[0].startswith("electra")]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("name", "task"), IGNORING)
def test_no_label_counts(name, task, training):
    model = trained(task, name).train(training)
    inputs = inputs_for(name, task)
    labels = {k: torch.full_like(v, -100) for k, v in labels_for(model, inputs).items()}
    if task == "ForQuestionAnswering":
        labels = {k: torch.full_like(v, 18) for k, v in labels.items()}
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(**inputs, **labels).loss
        assert loss.item() == 0.0
        loss.backward()
        assert not any(g.ne(0).any() for g in gradients(model).values())  # NaN is not 0 either


# -- repeats, backends, processes ----------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_hundred_steps_repeated_are_bit_equal():
    def run() -> tuple[list[float], list[torch.Tensor]]:
        model = trained("ForMaskedLM")
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        torch.manual_seed(0)
        losses = []
        for i in range(100):
            optimizer.zero_grad()
            loss = model(**example(model, "ForMaskedLM", i % 3, seqlen=9 + i % 4)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach() for p in model.parameters()]

    (losses, weights), (again, same_weights) = run(), run()
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(weights, same_weights, strict=True))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def pins(backend: str) -> dict[str, str]:
    """The ops for which the backend has forward and backward here."""
    return {
        op: backend
        for op in dispatch.OPS
        if dispatch.unsupported_reason(backend, op, "cpu", torch.float32) is None
        and has_backward(backend, op)
    }


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aten", "cpu", "triton"])
def test_every_backend_trains_with_the_masks_of_the_reference(backend):
    """All backends draw the same dropout bits, so a whole step with dropout can be compared."""
    chosen = pins(backend)
    if not chosen:
        pytest.skip(f"{backend} does not run here")
    model = trained("ForMaskedLM", num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    inputs = example(model, "ForMaskedLM", batch_size=3, seqlen=11)
    with dispatch.use_backend("reference"):
        expected, other = step(model, inputs), step(model, inputs, seed=4)
    with dispatch.use_backend(**chosen):
        actual = step(model, inputs)
    assert relative_error(actual, expected) <= 2e-6
    assert relative_error(other, expected) > 0.05


@pytest.fixture(scope="module")
def two_processes():
    """Results of two processes that train a native model together: by rank, by wrapper."""
    return ranks.in_a_group(2, training_workers.results)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "wrapper",
    ["ddp", "ddp, micro-batches", "ddp, checkpointing", "fsdp2", "fsdp2, inside", "fsdp2, checkpointing"],
)
def test_data_parallel_training_equals_transformers_in_one_process(two_processes, wrapper):
    for found in (rank[wrapper] for rank in two_processes):
        assert found["compared"] == 3 * 41
        assert found["loss"] <= 1e-5
        assert found["gradient"][0] <= 1e-5, found["gradient"]
        assert max(found["logits"]) <= 1e-5


@pytest.mark.sweep
def test_fsdp2_in_bfloat16_is_no_worse_than_transformers_own(two_processes):
    for rank in two_processes:
        found, theirs = rank["fsdp2, bf16"], rank["transformers, fsdp2, bf16"]
        assert found["compared"] == theirs["compared"] == 3 * 41
        assert 1e-4 < found["gradients"] <= 1.5 * theirs["gradients"]
        assert max(found["logits"]) <= 1.5 * max(theirs["logits"])
        assert found["loss"] <= 0.03


def test_weights_that_nobody_gathers_are_refused(two_processes):
    for rank in two_processes:
        assert re.fullmatch(
            "weight: expected a torch.Tensor with elements of its own, got a DTensor; .*", rank["refused"]
        )
