"""Parts of an accelerated model replaced, wrapped or watched: what runs, and which layers stay fused.

For acceleration/layer.py, each against the untouched model.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations, prune

import fastbert
from tests.support.accelerated_models import (
    LAST,
    LAYERS,
    PROBE,
    Twice,
    build,
    calls,
    first_kept,
    padded,
    same_gradients,
    same_outputs,
    stock,
    submodule,
)


class _TwiceNorm(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class _RootMeanSquare(nn.Module):
    def forward(self, x):
        return x / x.square().mean(-1, keepdim=True).sqrt()


def _wrap_forward(module: nn.Module) -> None:
    """Give the instance its own forward, as accelerate's hooks and many recipes do."""
    original = module.forward

    def forward(self, *args, **kwargs):
        out = original(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    module.forward = types.MethodType(forward, module)


def _fewer_heads(layer: nn.Module) -> None:
    """Attention with two heads in place of three, as after pruning."""
    attention = layer.attention.self
    attention.num_attention_heads, attention.all_head_size = 2, 32
    for key in ("query", "key", "value"):
        setattr(attention, key, nn.Linear(48, 32))
    layer.attention.output.dense = nn.Linear(32, 48)


def _other_attention(layer: nn.Module) -> None:
    class Halved(type(layer.attention.self)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return 0.5 * out[0], *out[1:]

    layer.attention.self.__class__ = Halved


def _other_block(layer: nn.Module) -> None:
    class Negated(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.dense, self.intermediate_act_fn = block.dense, block.intermediate_act_fn

        def forward(self, hidden_states):
            return -self.intermediate_act_fn(self.dense(hidden_states))

    layer.intermediate = Negated(layer.intermediate)


def _plain_norm(layer: nn.Module, **kwargs) -> None:
    layer.output.LayerNorm = nn.LayerNorm(48, **kwargs)


def _no_bias(layer: nn.Module) -> None:
    for owner, key in (
        (layer.attention.self, "query"),
        (layer.attention.self, "value"),
        (layer.attention.output, "dense"),
        (layer.intermediate, "dense"),
        (layer.output, "dense"),
    ):
        old = getattr(owner, key)
        setattr(owner, key, nn.Linear(old.in_features, old.out_features, bias=False))


REPLACEMENTS = {  # a change of a layer, and whether the stock layer must run then
    "subclassed-linear": (lambda layer: setattr(layer.output, "dense", Twice(80, 48)), True),
    "subclassed-key": (lambda layer: setattr(layer.attention.self, "key", Twice(48, 48)), True),
    "sequential": (
        lambda layer: setattr(layer.intermediate, "dense", nn.Sequential(nn.Linear(48, 80), nn.Tanh())),
        True,
    ),
    "other-norm": (lambda layer: setattr(layer.attention.output, "LayerNorm", _RootMeanSquare()), True),
    "subclassed-norm": (lambda layer: setattr(layer.output, "LayerNorm", _TwiceNorm(48)), True),
    "activation": (lambda layer: setattr(layer.intermediate, "intermediate_act_fn", nn.Tanh()), None),
    "parametrized": (lambda layer: parametrizations.weight_norm(layer.attention.self.value), True),
    "pruned": (lambda layer: prune.l1_unstructured(layer.output.dense, "weight", 0.5), True),
    "forward-of-a-linear": (lambda layer: _wrap_forward(layer.attention.output.dense), True),
    "forward-of-attention": (lambda layer: _wrap_forward(layer.attention.self), True),
    "forward-of-the-layer": (_wrap_forward, None),
    "fewer-heads": (_fewer_heads, None),
    "norm-without-bias": (lambda layer: _plain_norm(layer, bias=False), None),
    "norm-without-weights": (lambda layer: _plain_norm(layer, elementwise_affine=False), None),
    "norm-of-another-eps": (lambda layer: _plain_norm(layer, eps=0.1), None),
    "linear-without-bias": (_no_bias, None),
    "scaling": (lambda layer: setattr(layer.attention.self, "scaling", 0.1), True),
    "no-dropout-module": (lambda layer: setattr(layer.output, "dropout", nn.Identity()), True),
    "another-dropout": (lambda layer: setattr(layer.attention.output, "dropout", nn.Hardtanh()), True),
    "subclassed-attention": (_other_attention, True),
    "module-of-another-class": (_other_block, True),
    "frozen": (lambda layer: layer.requires_grad_(False), None),
}


def changed(change, when: str, inputs: dict) -> tuple[nn.Module, nn.Module]:
    """(stock, accelerated), both changed; the latter before `accelerate`, or after it and a call."""
    slow = stock("bert")
    fast = copy.deepcopy(slow)
    if when == "after":
        with torch.no_grad():
            fastbert.accelerate(fast)(**inputs)
    for model in (slow, fast):
        torch.manual_seed(4)
        change(model)
    return slow, fast if when == "after" else fastbert.accelerate(fast)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", REPLACEMENTS)
def test_replaced_parts_run(what, when):
    change, unfused = REPLACEMENTS[what]
    inputs = first_kept("bert")
    slow, fast = changed(lambda model: change(submodule(model, LAST)), when, inputs)
    kept = inputs["attention_mask"].bool()
    expected = slow(**inputs)
    fused = [layer.fused for layer in fastbert.explain(fast).layers]
    assert fused[::2] == [True, True]
    assert fused[1] is not unfused
    # a layer that already had its own forward runs that one, and none of ours
    own = what == "forward-of-the-layer" and when == "before"
    with calls(fast, fused=LAYERS - (own or not fused[1]), stock=int(not fused[1])):
        actual = fast(**inputs)
    same_outputs(actual, expected, kept, 2e-5)
    for out in (actual, expected):
        out.last_hidden_state[kept].square().sum().backward()
    same_gradients(fast, slow, 2e-4)


class _Shifted(nn.Module):
    """Embeddings, or a table of them, of another class."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs) + 0.5


class _MeanPooler(nn.Module):
    def forward(self, hidden_states):
        return hidden_states[:, :6].mean(1)  # tokens kept in every row


def _early_exit(model: nn.Module) -> None:
    class Early(type(model.encoder)):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            out = super().forward(hidden_states, attention_mask, **kwargs)
            out.last_hidden_state = out.last_hidden_state - hidden_states
            return out

    model.encoder.__class__ = Early


def _other_embedding_class(model: nn.Module) -> None:
    class Scaled(type(model.embeddings)):
        def forward(self, *args, **kwargs):
            return 3 * super().forward(*args, **kwargs)

    model.embeddings.__class__ = Scaled


MODEL_REPLACEMENTS = {
    "embeddings": lambda model: setattr(model, "embeddings", _Shifted(model.embeddings)),
    "class-of-embeddings": _other_embedding_class,
    "table": lambda model: setattr(
        model.embeddings, "position_embeddings", _Shifted(model.embeddings.position_embeddings)
    ),
    "words": lambda model: model.set_input_embeddings(_Shifted(model.get_input_embeddings())),
    "max-norm": lambda model: setattr(model.embeddings.word_embeddings, "max_norm", 0.5),
    "frequency": lambda model: setattr(model.embeddings.word_embeddings, "scale_grad_by_freq", True),
    "sparse": lambda model: setattr(model.embeddings.word_embeddings, "sparse", True),
    "norm": lambda model: setattr(model.embeddings, "LayerNorm", _RootMeanSquare()),
    "norm-without-bias": lambda model: setattr(model.embeddings, "LayerNorm", nn.LayerNorm(48, bias=False)),
    "no-dropout-module": lambda model: setattr(model.embeddings, "dropout", nn.Identity()),
    "pooler": lambda model: setattr(model, "pooler", _MeanPooler()),
    "no-pooler": lambda model: setattr(model, "pooler", None),
    "encoder": _early_exit,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", MODEL_REPLACEMENTS)
def test_replaced_parts_around_the_layers_run(what, when):
    inputs = first_kept("bert")
    inputs["attention_mask"][:, :6] = 1
    kept = inputs["attention_mask"].bool()
    slow, fast = changed(MODEL_REPLACEMENTS[what], when, inputs)
    expected = slow(**inputs)
    with calls(fast, fused=LAYERS, stock=0):
        actual = fast(**inputs)
    actual.cross_attentions = expected.cross_attentions = None
    if what == "no-pooler":
        assert actual.pooler_output is expected.pooler_output is None
    same_outputs(actual, expected, kept)
    for out in (actual, expected):
        out.last_hidden_state[kept].square().sum().backward()
    if what == "sparse":
        table, other = (m.embeddings.word_embeddings.weight for m in (fast, slow))
        assert table.grad.is_sparse
        assert other.grad.is_sparse
        table.grad, other.grad = table.grad.to_dense(), other.grad.to_dense()
    same_gradients(fast, slow, 1e-4)


def test_replaced_group_of_layers_runs():
    slow, fast = build("albert")
    inputs = first_kept("albert")
    for model in (slow, fast):
        (group,) = model.encoder.albert_layer_groups

        class Residual(type(group)):
            def forward(self, hidden_states, *args, **kwargs):
                return hidden_states + super().forward(hidden_states, *args, **kwargs)

        group.__class__ = Residual
    with torch.no_grad(), calls(fast, packed=0, padded=1, fused=LAYERS, stock=0):
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())


def test_classes_made_from_a_stock_class():
    class Named(transformers.BertModel):
        def size(self):
            return self.config.hidden_size

    class Doubled(transformers.BertModel):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.last_hidden_state = 2 * out.last_hidden_state
            return out

    inputs = first_kept("bert")
    for cls in (Named, Doubled):
        slow = stock("bert")
        slow.__class__ = cls
        fast = copy.deepcopy(slow)
        with warnings.catch_warnings():
            # how it handles Doubled is not tested, only that the result is right
            warnings.simplefilter("ignore")
            fastbert.accelerate(fast)
        assert isinstance(fast, cls)
        assert type(fast).__qualname__ == cls.__qualname__ != cls.__name__
        with torch.no_grad():
            same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())
    fast = stock("bert")
    fast.__class__ = Named
    fastbert.accelerate(fast, strict=True)
    assert fast.size() == 48
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS):
        fast(**padded())
    assert type(fastbert.restore(fast)) is Named


def test_layers_may_be_dropped_added_and_shared():
    slow, fast = build("bert")
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    extra = copy.deepcopy(slow.encoder.layer[0])
    with torch.no_grad():
        for model in (slow, fast):
            model.encoder.layer = model.encoder.layer[:2]
        with calls(fast, packed=1, fused=2, stock=0):
            same_outputs(fast(**inputs), slow(**inputs), kept)
        for model in (slow, fast):
            model.encoder.layer.append(model.encoder.layer[0])
        with calls(fast, packed=1, fused=3, stock=0):
            same_outputs(fast(**inputs), slow(**inputs), kept)
        for model in (slow, fast):  # a layer that is not accelerated
            model.encoder.layer.append(extra)
        same_outputs(fast(**inputs), slow(**inputs), kept)
        fastbert.accelerate(fast)
        with calls(fast, packed=1, fused=4, stock=0):
            same_outputs(fast(**inputs), copy.deepcopy(fastbert.restore(copy.deepcopy(fast)))(**inputs), kept)


HOOKED = (
    "embeddings",
    "embeddings.word_embeddings",
    "embeddings.LayerNorm",
    "encoder",
    "encoder.layer.1",
    "encoder.layer.1.attention",
    PROBE,
    "encoder.layer.1.attention.self.query",
    "encoder.layer.1.attention.output.LayerNorm",
    "encoder.layer.1.intermediate.dense",
    "encoder.layer.1.intermediate.intermediate_act_fn",
    "encoder.layer.1.output.dropout",
    "encoder.layer.2.output",
    "pooler",
    "",
)


@pytest.mark.parametrize("path", HOOKED)
@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
def test_hooks_see_and_change_what_they_do_in_the_stock_model(path, kind):
    slow, fast = build("bert")
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    seen = {id(slow): [], id(fast): []}

    def shapes(values):
        values = values if isinstance(values, (tuple, list)) else (values,)
        return [v.shape for v in values if isinstance(v, torch.Tensor)]

    def forward(model, module, args, output):
        seen[id(model)].append(shapes(output))
        if isinstance(output, torch.Tensor):
            return 1.5 * output
        return None

    def pre(model, module, args, kwargs):
        seen[id(model)].append((shapes(args), sorted(k for k, v in kwargs.items() if v is not None)))
        if args and args[0].is_floating_point():
            return (1.5 * args[0], *args[1:]), kwargs
        return None

    def backward(model, module, given, taken):
        seen[id(model)].append((shapes(given), shapes(taken)))

    handles = []
    with torch.no_grad():
        fast(**inputs)
    for model in (slow, fast):
        module = submodule(model, path) if path else model
        if kind == "forward":
            handle = module.register_forward_hook(functools.partial(forward, model))
        elif kind == "pre":
            handle = module.register_forward_pre_hook(functools.partial(pre, model), with_kwargs=True)
        else:
            handle = module.register_full_backward_hook(functools.partial(backward, model))
        handles.append(handle)
    expected, actual = slow(**inputs), fast(**inputs)
    same_outputs(actual, expected, kept, 2e-5)
    for out in (actual, expected):
        (out.last_hidden_state[kept].square().sum() + out.pooler_output.sum()).backward()
    same_gradients(fast, slow, 2e-4)
    assert seen[id(slow)] or (kind == "backward" and path in ("encoder", ""))  # which give no tensors
    assert seen[id(fast)] == seen[id(slow)]
    for handle in handles:
        handle.remove()
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        same_outputs(fast(**inputs), slow(**inputs), kept)


def test_hooks_of_all_modules_see_all_modules():
    """Profilers and operation counters watch all modules at once."""
    slow, fast = build("bert")
    inputs = first_kept("bert")
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(type(module).__name__)
    )
    try:
        with torch.no_grad():
            slow(**inputs)
            expected, seen[:] = list(seen), []
            fast(**inputs)
    finally:
        handle.remove()
    assert seen == expected
