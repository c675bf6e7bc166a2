"""What people do to the modules of a model: our models and accelerated ones do what transformers' do then.

`docs/differences.md` has the table. Each case is compared with transformers' model under the same change, in
float64, or is an error that names the module; none is ignored.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
import types
import warnings
from collections.abc import Sequence

import pytest
import torch
import transformers
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn.utils import parametrizations, prune, weight_norm
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.pytorch_utils import prune_linear_layer

import fastbert
from fastbert.layers.parts import Activation
from fastbert.layers.taps import Taps
from fastbert.models.encoder import tapped
from fastbert.models.fixed_heads import fix_heads
from fastbert.ops import checks
from fastbert.ops.cross_entropy import cross_entropy
from fastbert.ops.derivatives import plain_torch
from tests.support.accelerated_models import calls, first_kept, padded
from tests.support.hf_models import batch
from tests.support.model_pairs import CASES, SEQUENCE_TASKS, build, inputs_for, labels_for

LAYOUTS = ("bert", "distilbert", "electra", "albert-groups", "mpnet", "modernbert", "deberta-v2")
LAYOUTS += ("longformer", "big_bird", "mobilebert", "gte")
# Modules of heads, and ALBERT's groups, that have no code of their own here
REFUSED = ("cls", "cls.predictions", "cls.predictions.transform", "lm_head", "classifier", "predictions")
REFUSED += (
    "generator_predictions",
    "discriminator_predictions",
    "sequence_summary",
    "sop_classifier",
    "head",
    "qa_classifier",
    "qa_classifier.intermediate",
    "qa_classifier.output",
)
# Modules of transformers that fastbert's models lack: nothing ever happens in them, or only the loss, or they
# have no parameters (`rotary_emb`)
MISSING = ("sequence_summary.first_dropout", "mlm_loss_fct", "rotary_emb")


def pair(name: str, task: str = "Model", **config) -> tuple[nn.Module, nn.Module]:
    """(transformers' model, ours with its weights), in eval and in float64."""
    if task == "Model":
        hf, model = build(name, "ForTokenClassification", **config)
        return hf.base_model.double(), model.base_model.double()
    return tuple(m.double() for m in build(name, task, **config))


def trio(name: str, task: str = "Model", **config) -> tuple[nn.Module, nn.Module, nn.Module]:
    """(transformers' model, ours, transformers' model accelerated), with the same weights, in float64."""
    stock, own = pair(name, task, **config)
    return stock, own, fastbert.accelerate(copy.deepcopy(stock))


SEEN = []  # the shapes and the names that hooks saw


def scaled(found: object, factor: float) -> object:
    """The first floating-point tensor of arguments or outputs, scaled."""
    if found is None or isinstance(found, torch.Tensor):
        if found is None or not found.is_floating_point():
            return found
        SEEN.append(found.shape)
        return found * factor
    if isinstance(found, (tuple, list)):
        return (scaled(found[0], factor), *found[1:]) if found else found
    found = copy.copy(found)
    for key, value in found.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found[key] = value * factor
            break
    return found


def _with_kwargs(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    SEEN.append(sorted(key for key, value in kwargs.items() if value is not None))
    return (scaled(args, 1.25), kwargs) if args else (args, scaled(kwargs, 1.25))


class OwnForward:
    """Gives a module a `forward` of its own, as a hook is registered."""

    def __init__(self, module: nn.Module):
        self.module, old = module, module.forward
        module.forward = lambda *args, **kwargs: scaled(old(*args, **kwargs), 1.25)

    def remove(self) -> None:
        del self.module.forward


HOOKS = {
    "own forward": OwnForward,
    "forward": lambda m: m.register_forward_hook(lambda m, args, out: scaled(out, 1.25)),
    "pre": lambda m: m.register_forward_pre_hook(lambda m, args: scaled(args, 1.25)),
    "pre, kwargs": lambda m: m.register_forward_pre_hook(_with_kwargs, with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(lambda m, given, made: scaled(given, 1.25)),
    "backward, pre": lambda m: m.register_full_backward_pre_hook(lambda m, grads: scaled(grads, 1.25)),
}


def results(model: nn.Module, inputs: dict, backward: bool) -> list[torch.Tensor]:
    """Outputs at kept tokens, and with `backward` all gradients."""
    kept = inputs["attention_mask"].bool()
    with torch.set_grad_enabled(backward):
        out = model(**inputs)
    tensors = [t for t in out.to_tuple() if isinstance(t, torch.Tensor)]
    tensors = [t[kept] if t.shape[:2] == kept.shape else t for t in tensors]
    if backward:
        sum(t.square().sum() for t in tensors).backward()
        grads = [p.grad for _, p in sorted(model.named_parameters())]
        tensors += [torch.zeros(()) if g is None else g.to_dense() for g in grads]
        model.zero_grad(set_to_none=True)
    return [t.detach() for t in tensors]


def assert_same(models: Sequence[nn.Module], inputs: dict, what: str, backward: bool = False) -> None:
    """All models give what the first one gives."""
    theirs = results(models[0], inputs, backward)
    for model in models[1:]:
        for a, b in zip(results(model, inputs, backward), theirs, strict=True):
            assert (a - b).abs().max() <= 1e-9 * (1 + b.abs().max()), what


def paths(model: nn.Module, task: str) -> list[str]:
    """The modules that may be called, of one layer only; of a head those outside its encoder."""
    seen = [n for n, m in model.named_modules() if not isinstance(m, nn.ModuleList)]
    seen = [n for n in seen if not any(part.isdigit() and int(part) > 0 for part in n.split("."))]
    if task == "Model":
        return seen
    return [n for n in seen if n and not n.startswith(f"{model.base_model_prefix}.")]


def inputs_of(name: str, task: str) -> dict:
    inputs = batch(name) if task == "Model" else inputs_for(name, task)
    # Our heads refuse to read a masked token; BigBird has a pooler below every head
    if task in SEQUENCE_TASKS or name == "big_bird":
        inputs["attention_mask"][..., 0] = 1
    return inputs


HOOKED = [(name, "Model", kind) for name in LAYOUTS for kind in HOOKS]
HEADS = [(name, task) for name, task in CASES if name in (*LAYOUTS, "roberta")]
HOOKED += [(*head, kind) for head in HEADS for kind in ("forward", "own forward")]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "task", "kind"), HOOKED)
def test_hooks_on_every_module(name, task, kind, monkeypatch):
    """They change what they change in transformers' model; in an accelerated one they see the same, too."""
    models = trio(name, task, num_hidden_layers=2)
    monkeypatch.setattr(checks, "has_values", lambda t: False)  # as on a device
    inputs, refused = inputs_of(name, task), []
    for path in paths(models[0], task):
        if path in MISSING or path.endswith("albert_layers.0.dropout"):
            continue
        if (name, path) == ("deberta-v2", "encoder"):  # transformers does not read what it returns
            continue
        # transformers divides it in place
        if name == "longformer" and kind.startswith("backward") and path.endswith("self.query"):
            continue
        handles = [HOOKS[kind](model.get_submodule(path)) for model in models]
        seen = []
        for model in (models[0], models[2], models[1]):
            SEEN.clear()
            try:
                seen.append((results(model, inputs, kind.startswith("backward")), list(SEEN)))
            except TypeError as error:
                if model is not models[1] or not str(error).startswith(f"model: {path} has hooks"):
                    raise
                refused.append(path)
        assert seen[1][1] == seen[0][1], path
        for found, _ in seen[1:]:
            for a, b in zip(found, seen[0][0], strict=True):
                assert (a - b).abs().max() <= 1e-9 * (1 + b.abs().max()), path
        for handle in handles:
            handle.remove()
    own = {"pooler"} if name == "deberta-v2" else set()  # part of the head
    assert set(refused) <= {*REFUSED, *own, "encoder.albert_layer_groups.0"}
    with torch.no_grad(), calls(models[2], stock=0):
        assert_same(models, inputs, "without hooks")


# --- everything else that people do -------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Calls a module with whatever it gets, and scales the first output."""

    def __init__(self, inner: nn.Module, factor: float = 1.25):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, *args, **kwargs):
        return scaled(self.inner(*args, **kwargs), self.factor)


class Mixes(nn.Module):
    """A linear layer that also looks at the whole sequence, which no row without its padding could."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        assert x.dim() == 3
        return self.inner(x) + self.inner(x[:, :1])


class MixesItself(nn.Linear):
    """The same as a subclass of nn.Linear, with the old one's weights."""

    def __init__(self, old: nn.Linear):
        super().__init__(old.in_features, old.out_features)
        self.weight, self.bias = old.weight, old.bias

    def forward(self, x):
        return super().forward(x) + super().forward(x[:, :1])


class OwnLayer(nn.Module):
    """A layer that looks at the whole sequence, whatever else it is given."""

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states + hidden_states[:, :1]


class Container(nn.Module):
    """Has the parts of the module whose place it takes, and code of its own."""

    def __init__(self, old: nn.Module):
        super().__init__()
        self._modules.update(old._modules)

    def forward(self, x, *args, **kwargs):
        return x


class Summed(Container):
    """A head that looks at the whole sequence."""

    def forward(self, x, **kwargs):
        return self.out_proj(self.dense(x[:, 0] + x[:, 1]))


class OwnPooler(nn.Module):
    def forward(self, hidden_states):
        return hidden_states[:, 0].tanh() * hidden_states.shape[1]


class OwnAttention(nn.Module):
    """A user's own self-attention, called as transformers calls it."""

    def __init__(self, old: nn.Module):
        super().__init__()
        self.query, self.key, self.value = old.query, old.key, old.value

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        scores = self.query(hidden_states) @ self.key(hidden_states).transpose(1, 2)
        if attention_mask is not None:
            keep = attention_mask if attention_mask.dtype == torch.bool else attention_mask > -1
            scores = scores.masked_fill(~keep[:, 0], torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ self.value(hidden_states), None


CHANGED = {"layer": 1}  # the layer that a test changes


def layer(model: nn.Module, i: int | None = None) -> nn.Module:
    return model.bert.encoder.layer[CHANGED["layer"] if i is None else i]


def put(path: str, make) -> object:
    """A change: the module at a path of a layer, or of the model after a colon, is made another one."""

    def change(model):
        root = model if path.startswith(":") else layer(model)
        above, _, name = path.removeprefix(":").rpartition(".")
        owner = root.get_submodule(above)
        setattr(owner, name, make(getattr(owner, name)))

    return change


def patched(path: str) -> object:
    """A change: the instance's own `forward` scales what the class's returns."""

    def change(model):
        root = model if ":" in path else layer(model)
        module = root.get_submodule(path.removeprefix(":"))
        old = module.forward
        module.forward = types.MethodType(
            lambda self, *args, **kwargs: scaled(old(*args, **kwargs), 1.25), module
        )

    return change


def dropouts(p: float, **modes: bool) -> object:
    """A change: all dropouts get `p` (with 1, both draw alike), and those whose names end so a mode."""

    def change(model):
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.p = p
                for end, mode in modes.items():
                    if name.replace(".", "_").endswith(end):
                        module.train(mode)

    return change


def _training(p: float) -> object:
    return lambda model: (model.train(), dropouts(p)(model))


def _no_config_dropout(model: nn.Module) -> None:
    _training(1.0)(model)
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0


def _weights(model: nn.Module) -> None:
    dense = layer(model).output.dense
    dense.weight = nn.Parameter(dense.weight * 1.5)
    layer(model).attention.self.query.weight.data.mul_(0.5)


def _layers(change) -> object:
    def apply(model):
        model.bert.encoder.layer = change(model.bert.encoder.layer)

    return apply


class Sum(nn.Module):
    def __init__(self, *parts: nn.Module):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return sum(part(x) for part in self.parts)


def low_rank(old: nn.Linear) -> nn.Module:
    torch.manual_seed(3)
    lora = nn.Sequential(nn.Linear(old.in_features, 4), nn.Linear(4, old.out_features)).double()
    return Sum(old, lora)


def scaled_table(old: nn.Embedding) -> nn.Embedding:
    new = nn.Embedding(old.num_embeddings, old.embedding_dim, old.padding_idx, max_norm=0.1).double()
    new.load_state_dict(old.state_dict())
    return new


def _fewer_heads(model: nn.Module) -> None:
    """As people prune: smaller layers, and the new number beside them."""
    attention = layer(model).attention
    for name in ("query", "key", "value"):
        smaller = prune_linear_layer(getattr(attention.self, name), torch.arange(32))
        setattr(attention.self, name, smaller.double())
    attention.output.dense = prune_linear_layer(attention.output.dense, torch.arange(32), 1).double()
    attention.self.num_attention_heads = 2


def test_pruned_heads_without_their_number_are_named():
    _, model = pair("bert", "ForSequenceClassification")
    _fewer_heads(model)
    layer(model).attention.self.num_attention_heads = model.config.num_attention_heads
    model.train()
    words = r"query, key, value: expected 48, 48 and 48 outputs, .* set num_attention_"
    with pytest.raises(ValueError, match=words):
        model(**batch("bert"))


def _hook_in_lora(model: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["query"], r=4, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model).double()
    inside = layer(model).attention.self.query.lora_A["default"]
    inside.register_forward_hook(lambda m, args, out: out + out[:, :1])


def _twice(model: nn.Module) -> None:
    once = model.bert.encoder.forward
    model.bert.encoder.forward = lambda x, **kwargs: once(once(x, **kwargs)[0], **kwargs)


def _frozen(model: nn.Module) -> None:
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    layer(model).output.LayerNorm.requires_grad_(False)
    layer(model).attention.self.key.requires_grad_(False)
    layer(model, 2).intermediate.dense.bias.requires_grad_(False)


def _no_biases(model: nn.Module) -> None:
    for path in ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"):
        layer(model).get_submodule(path).bias = None


def _norm(path: str, **options) -> object:
    return put(path, lambda _: nn.LayerNorm(48, **options).double())


def _word_table(name: str, value: object) -> object:
    return lambda model: setattr(model.bert.embeddings.word_embeddings, name, value)


CHANGES = {
    "another activation": put("intermediate.intermediate_act_fn", lambda _: nn.ReLU()),
    "an activation of ours": put("intermediate.intermediate_act_fn", lambda _: Activation("relu")),
    "no dropout in training": _training(0.0),
    "all dropped in training": _training(1.0),
    "config dropout set to 0 afterwards": _no_config_dropout,
    "MC dropout": dropouts(1.0, dropout=True),
    "MC dropout of outputs": dropouts(1.0, output_dropout=True),
    "MC dropout of the classifier": lambda m: (setattr(m.dropout, "p", 1.0), m.dropout.train()),
    "attention alone in training": lambda m: (dropouts(1.0)(m), layer(m).attention.self.train()),
    "attention in training without its dropout": lambda m: (
        dropouts(1.0)(m),
        layer(m).attention.self.train(),
        layer(m).attention.self.dropout.eval(),
    ),
    "dropout replaced": lambda m: (
        m.train(),
        dropouts(0.0)(m),
        put("output.dropout", lambda _: nn.Identity())(m),
    ),
    "weight_norm": put("output.dense", parametrizations.weight_norm),
    "weight_norm, old": lambda m: (
        put("output.dense", weight_norm)(m),
        layer(m).output.dense.weight_g.data.mul_(2),
    ),
    "orthogonal": put("attention.output.dense", parametrizations.orthogonal),
    "pruned": lambda m: prune.l1_unstructured(layer(m).intermediate.dense, "weight", 0.5),
    "LoRA by hand": put("attention.self.query", low_rank),
    "a linear layer in a sequence": put("output.dense", lambda old: nn.Sequential(old, nn.Tanh())),
    "a layer that mixes tokens": put("attention.self.value", Mixes),
    "a linear layer of one's own that mixes tokens": put("output.dense", lambda old: MixesItself(old)),
    "a hook inside PEFT's layer": _hook_in_lora,
    "no norm": put("output.LayerNorm", lambda _: nn.Identity()),
    "RMSNorm": put("attention.output.LayerNorm", lambda _: nn.RMSNorm(48).double()),
    "attention.self wrapped": put("attention.self", Wrapped),
    "attention.self replaced": put("attention.self", OwnAttention),
    "attention wrapped": put("attention", Wrapped),
    "attention.output wrapped": put("attention.output", Wrapped),
    "intermediate wrapped": put("intermediate", Wrapped),
    "output wrapped": put("output", Wrapped),
    "pooler wrapped": put(":bert.pooler", Wrapped),
    "pooler replaced": put(":bert.pooler", lambda _: OwnPooler()),
    "pooler's activation replaced": put(":bert.pooler.activation", lambda _: nn.ReLU()),
    "classifier replaced": put(":classifier", lambda old: nn.Sequential(nn.GELU(), old)),
    "embeddings wrapped": put(":bert.embeddings", Wrapped),
    "a table with max_norm": put(":bert.embeddings.word_embeddings", scaled_table),
    "a table wrapped": put(":bert.embeddings.token_type_embeddings", Wrapped),
    "a layer less": _layers(lambda old: old[:2]),
    "layers in another order": _layers(lambda old: nn.ModuleList([old[2], old[0], old[1]])),
    "a layer twice": _layers(lambda old: nn.ModuleList([old[0], old[1], old[0]])),
    "forward of a layer": patched(""),
    "forward of attention.self": patched("attention.self"),
    "forward of a linear layer": patched("output.dense"),
    "forward of another linear layer": lambda m: setattr(
        layer(m).output.dense, "forward", layer(m, 0).output.dense.forward
    ),
    "a hook before backward, after a call": lambda m: HOOKS["backward, pre"](layer(m).output),
    "forward of embeddings": patched(":bert.embeddings"),
    "forward of the stack": patched(":bert.encoder"),
    "forward of the encoder": patched(":bert"),
    "the stack twice": _twice,
    "a stack that calls no layer": lambda m: setattr(
        m.bert.encoder, "forward", lambda x, **kwargs: BaseModelOutputWithPastAndCrossAttentions(x * 1.25)
    ),
    "a pre-hook of the encoder that changes ids": lambda m: m.bert.register_forward_pre_hook(
        lambda m, args: (args[0].roll(1, 1), *args[1:])
    ),
    "a layer of one's own": _layers(lambda old: nn.ModuleList([old[0], OwnLayer(), old[2]])),
    "another feed_forward_chunk": lambda m: setattr(layer(m), "feed_forward_chunk", lambda x: x * 1.25),
    "heads pruned by hand": _fewer_heads,
    "heads of another size": lambda m: setattr(layer(m).attention.self, "attention_head_size", 8),
    "another scaling": lambda m: setattr(layer(m).attention.self, "scaling", 0.1),
    "attention's dropout replaced": put("attention.self.dropout", lambda _: nn.Identity()),
    "a norm without weight": put("output.LayerNorm", lambda _: nn.LayerNorm(48, elementwise_affine=False)),
    "weights replaced and written": _weights,
    "a norm without bias": _norm("output.LayerNorm", bias=False),
    "a norm of another eps": _norm("output.LayerNorm", eps=0.1),
    "no biases": _no_biases,
    "dropout replaced by something else": put("attention.output.dropout", lambda _: nn.Hardtanh()),
    "the norm of the embeddings": _norm(":bert.embeddings.LayerNorm", bias=False),
    "another eps of the embeddings": _norm(":bert.embeddings.LayerNorm", eps=0.1),
    "no dropout of the embeddings": put(":bert.embeddings.dropout", lambda _: nn.Identity()),
    "gradients by frequency": _word_table("scale_grad_by_freq", True),
    "sparse gradients": _word_table("sparse", True),
    "frozen": _frozen,
    "recomputed, with a hook": lambda m: (
        m.gradient_checkpointing_enable(),
        _training(0.0)(m),
        HOOKS["forward"](layer(m).output),
    ),
    "hooked and unhooked": lambda m: HOOKS["forward"](layer(m).output).remove(),
}


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_model_is_what_transformers_is(what, at, monkeypatch):
    """Of the last layer our models compute the first tokens alone, where they may. Then as on a device."""
    monkeypatch.setitem(CHANGED, "layer", at)
    monkeypatch.setattr(checks, "has_values", lambda t: at == 1)
    models = list(trio("bert", "ForSequenceClassification", classifier_dropout=0.1))
    inputs = inputs_of("bert", "ForSequenceClassification")
    if what == "gradients by frequency":  # our own models take masked tokens for padding
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 0)
    # what this call derives must not serve the next
    before = [results(model, inputs, False)[0] for model in models]
    for model in models:
        CHANGES[what](model)
    models.append(pair("bert", "ForSequenceClassification", classifier_dropout=0.1)[0])
    CHANGES[what](models[-1])
    fastbert.accelerate(models[-1])
    assert_same(models, inputs, what)
    assert_same(models, inputs, what, backward="max_norm" not in what and "orthogonal" not in what)
    if what in ("hooked and unhooked", "frozen"):
        for old, model in zip(before, models, strict=False):
            assert torch.equal(old, results(model, inputs, False)[0])
        assert "3 of 3 layers run fused" in str(models[1])
        assert all(layer.fused for layer in fastbert.explain(models[2]).layers)


@pytest.mark.parametrize("path", ["output.dense", "attention.self", "intermediate.intermediate_act_fn"])
def test_only_the_changed_layer_of_an_accelerated_model_is_the_stock_one(path):
    model = trio("bert", "ForSequenceClassification")[2]
    inputs = inputs_of("bert", "ForSequenceClassification")
    patched(path)(model)
    with calls(model, fused=2, stock=1):
        model(**inputs)


ASKED = {
    "attentions": dict(output_attentions=True),
    "states": dict(output_hidden_states=True),
    "4-D mask": dict(
        attention_mask=torch.randn(4, 1, 40, 40, generator=torch.Generator().manual_seed(1)).double()
    ),
}


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("where", ["encoder.layer.1.attention", "encoder.layer.0", "encoder"])
def test_what_is_asked_for_beside_a_hook(where, what):
    models, inputs = trio("bert"), batch("bert") | ASKED[what]
    kept = torch.ones(4, 40, dtype=torch.bool) if "mask" in what else batch("bert")["attention_mask"].bool()
    found = []
    for model in models:
        HOOKS["forward"](model.get_submodule(where))
        with torch.no_grad():
            out = model(**inputs)
        rows = [out[0], *(out.get("hidden_states") or ())]
        rows += [t.transpose(1, 2) for t in out.get("attentions") or ()]
        found.append([t[kept] for t in rows])
    for ours in found[1:]:
        for a, b in zip(ours, found[0], strict=True):
            assert (a - b).abs().max() <= 1e-9 * (1 + b.abs().max())


def test_a_sequence_without_tokens_spoils_no_gradient_beside_a_hook():
    both, inputs = trio("bert"), batch("bert")
    inputs["attention_mask"][3] = 0
    for model in both:
        HOOKS["forward"](model.encoder.layer[1].output)
    assert_same(both, inputs, "an empty sequence", backward=True)


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet"])
def test_packed_tokens_head_masks_and_causal_calls_beside_a_hook(name):
    """What transformers does not have is compared with the model without a hook."""
    own, inputs = pair(name)[1], batch(name)
    hooked = copy.deepcopy(own)
    hooked.layer_list()[1].register_forward_hook(lambda *_: None)
    mask = inputs["attention_mask"].bool()
    ends = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    calls = [inputs | {"head_mask": torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)}]
    calls += [{"input_ids": inputs["input_ids"][mask], "cu_seqlens": ends, "output_attentions": True}]
    calls += [inputs | ASKED["4-D mask"]]
    calls += [c | {"causal": True} for c in calls] if name != "mpnet" else []
    for call in calls:
        with torch.no_grad():
            a, b = hooked(**call), own(**call)
        assert (a[0] - b[0]).abs().max() <= 1e-9
        for x, y in zip(a.attentions or (), b.attentions or (), strict=True):
            assert (x - y).abs().max() <= 1e-9


@pytest.mark.sweep
def test_every_module_of_transformers_is_there():
    for name, task in CASES:
        stock, own = build(name, task)
        missing = {n for n, _ in stock.named_modules()} - {n for n, _ in own.named_modules()}
        known = (*(f".{path}" for path in MISSING), "albert_layers.0.dropout", "albert_layers.1.dropout")
        assert all(f".{n}".endswith(known) for n in missing), (name, missing)


@pytest.mark.parametrize(("name", "task"), [("bert", "ForSequenceClassification"), ("roberta", "Model")])
def test_modules_may_be_called_by_themselves(name, task):
    stock, own = (m.base_model for m in pair(name, task))
    ids = batch(name)["input_ids"]
    with torch.no_grad():
        a, b = (m.embeddings(input_ids=ids) for m in (own, stock))
        assert (a - b).abs().max() <= 1e-12
        a, b = (m.encoder.layer[0](b, None) for m in (own, stock))
        assert (a - b).abs().max() <= 1e-12
        if own.has_pooler:
            assert (own.pooler(a) - stock.pooler(a)).abs().max() <= 1e-12


@pytest.mark.sweep
@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering"])
def test_transforms_and_derivatives_are_transformers(task):
    both = trio("bert", task, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    inputs = inputs_of("bert", task)
    key = "bert.encoder.layer.1.output.LayerNorm.bias"
    found = []
    for model in both:
        given = {name: p.detach() for name, p in model.named_parameters()}

        def loss(bias, model=model, given=given):
            out = functional_call(model, given | {key: bias}, (), kwargs=inputs)
            kept = inputs["attention_mask"].bool()
            return sum((t[kept] if t.shape[:2] == kept.shape else t).square().sum() for t in out.to_tuple())

        bias = given[key]
        rows = [loss(bias * 2), grad(loss)(bias), jvp(loss, (bias,), (torch.ones_like(bias),))[1]]
        rows += [vmap(loss)(torch.stack([bias, bias * 2]))]
        if task == "ForSequenceClassification":
            rows.append(hessian(loss)(bias))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(bias, torch.ones_like(bias))
            rows.append(forward_ad.unpack_dual(loss(dual)).tangent)
        found.append(rows)
    for theirs, *ours in zip(*found, strict=True):
        for a in ours:
            assert (a - theirs).abs().max() <= 1e-9 * (1 + theirs.abs().max())
    with torch.no_grad(), calls(both[2], stock=0):
        both[2](**inputs)


def test_double_backward_on_request():
    both = pair("bert", "ForSequenceClassification")
    inputs, found = inputs_of("bert", "ForSequenceClassification"), []
    for model in both:
        with fastbert.double_backward():
            parameters = list(model.parameters())
            loss = model(**inputs, labels=torch.tensor([0, 1, 1, 0])).loss
            grads = torch.autograd.grad(loss, parameters, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), parameters))
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-9 * (1 + b.abs().max())
    loss = both[1](**inputs, labels=torch.tensor([0, 1, 1, 0])).loss
    grads = torch.autograd.grad(loss, parameters, create_graph=True)
    with pytest.raises(RuntimeError, match=r"fastbert\.double_backward"):
        torch.autograd.grad(grads, parameters, [torch.ones_like(g) for g in grads])


def test_double_backward_holds_in_its_block_and_thread():
    seen, logits, labels = [], torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 4, 2])
    expected = cross_entropy(logits, labels, label_smoothing=0.1)
    with fastbert.double_backward():
        with fastbert.double_backward():
            pass
        assert plain_torch()
        assert (cross_entropy(logits, labels, label_smoothing=0.1) - expected).abs() < 1e-12
        thread = threading.Thread(target=lambda: seen.append(plain_torch()))
        thread.start()
        thread.join()
    with contextlib.suppress(ZeroDivisionError), fastbert.double_backward():
        raise ZeroDivisionError
    assert seen == [plain_torch()] == [None]


def test_a_hooked_encoder_refuses_a_masked_first_token_too():
    model, inputs = pair("bert", "ForSequenceClassification")[1], batch("bert")
    model.bert.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="attention_mask: position 0 of sequence 1"):
        model(**inputs)


@pytest.mark.parametrize("kinds", [("Linear", "LayerNorm"), ("BertModel",)])
def test_global_hooks_see_every_module(kinds):
    both, inputs, seen = trio("bert", "ForTokenClassification"), batch("bert"), []

    def hook(module, args, out):
        seen.append(type(module).__name__)
        # of an encoder transformers' hooks get an output with names
        return scaled(out, 1.01) if seen[-1] in kinds and type(out) is not tuple else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert_same(both, inputs, "global")
        seen.clear()
        results(both[0], inputs, False)
        theirs, seen[:] = list(seen), []
        results(both[2], inputs, False)
        assert seen == theirs
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout])
def test_a_patched_class_of_pytorch_counts(kind, monkeypatch):
    both, inputs, old = pair("bert"), batch("bert"), kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: old(self, x) * 1.25)
    monkeypatch.setattr(checks, "has_values", lambda t: False)  # as on a device
    assert_same(both, inputs, kind.__name__)


@pytest.mark.parametrize("path", ["", ".output", ".output.dense"])
def test_another_class_of_a_module_counts(path):
    both, inputs = trio("bert"), batch("bert")
    for model in both:
        results(model, inputs, backward=False)  # what this call keeps must not serve the next
        module = model.get_submodule(f"encoder.layer.1{path}")
        old = type(module)

        def forward(self, *args, _old=old, **kwargs):
            return scaled(_old.forward(self, *args, **kwargs), 1.25)

        module.__class__ = type("Louder", (old,), {"forward": forward})
    assert_same(both, inputs, path)


HEADS = [
    ("bert", "ForTokenClassification", "dropout"),
    ("distilbert", "ForQuestionAnswering", "dropout"),
    ("bert", "ForMaskedLM", "cls.predictions.transform.transform_act_fn"),
    ("electra", "ForMaskedLM", "generator_predictions.activation"),
    ("roberta", "ForMaskedLM", "lm_head.decoder"),
]


@pytest.mark.parametrize(("name", "task", "path"), HEADS)
def test_hooks_of_a_head_see_the_padded_batch_once(name, task, path):
    both, inputs, seen = pair(name, task), inputs_for(name, task), []
    labels = {} if "Question" in task else labels_for(both[1], inputs)
    for model in both:
        dropouts(0.0)(model.train())
        model.get_submodule(path).register_forward_hook(lambda m, args, out: seen.append(out.shape))
    assert_same(both, inputs | labels, path, backward=True)
    assert len(seen) == 2
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("name", "path"), [("bert", "cls.predictions"), ("roberta", "lm_head")])
def test_a_decoder_of_any_class_trains(name, path):
    both, inputs = trio(name, "ForMaskedLM"), inputs_for(name, "ForMaskedLM")
    for model in both:
        dropouts(0.0)(model.train())
        head = model.get_submodule(path)
        head.decoder = Wrapped(head.decoder)
    given = inputs | labels_for(both[1], inputs)
    assert_same(both, given, path, backward=True)
    alone = both[1](**given, output_logits=False).loss
    assert (alone - both[0](**given).loss).abs() <= 1e-9


REPLACED = [
    ("electra", "ForMultipleChoice", "sequence_summary"),
    ("bert", "ForMaskedLM", "cls.predictions.transform"),
    ("roberta", "ForMaskedLM", "lm_head"),
    ("albert", "ForPreTraining", "sop_classifier"),
    ("albert", "Model", "encoder.albert_layer_groups.0"),
    ("bert", "Model", "encoder"),
]


@pytest.mark.parametrize(("name", "task", "path"), REPLACED)
def test_code_around_parts_is_never_passed_over(name, task, path):
    model, inputs = pair(name, task)[1], inputs_of(name, task)
    above, _, last = path.rpartition(".")
    owner = model.get_submodule(above)
    owner._modules[last] = Container(owner._modules[last])
    with pytest.raises(TypeError, match=rf"model: {re.escape(path)} .*was replaced"):
        model(**inputs)


@pytest.mark.parametrize("name", ["roberta", "electra", "mpnet"])
@pytest.mark.parametrize("how", ["wrapped", "own", "hooked", "PEFT"])
def test_a_head_of_the_first_token_may_be_replaced(name, how):
    both, inputs = trio(name, "ForSequenceClassification"), inputs_of(name, "ForSequenceClassification")
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    for model in both:
        if how == "hooked":
            HOOKS["forward"](model.classifier)
        elif how == "PEFT":
            peft = pytest.importorskip("peft")
            old = model.classifier
            model.classifier = peft.utils.ModulesToSaveWrapper(old, "default")
        else:
            model.classifier = {"wrapped": Wrapped, "own": Summed}[how](model.classifier)
    assert_same(both, inputs, how, backward=True)


@pytest.mark.parametrize("name", ["bert", "albert", "distilbert"])
def test_embeddings_get_their_ids_as_in_transformers(name):
    both, inputs = trio(name), batch(name)

    def other_ids(module, args, kwargs):
        if name == "bert":
            return args, kwargs | {"input_ids": kwargs["input_ids"].roll(1, 0)}
        return (args[0].roll(1, 0), *args[1:]), kwargs

    for model in both:
        model.embeddings.register_forward_pre_hook(other_ids, with_kwargs=True)
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    assert_same(both, inputs, name)


@pytest.mark.parametrize("change", [type(None), OwnPooler])
@pytest.mark.parametrize("task", ["ForNextSentencePrediction", "ForTokenClassification"])
def test_a_pooler_may_come_and_go(task, change):
    both = tuple(m.base_model for m in trio("bert", task))
    inputs = inputs_of("bert", "ForSequenceClassification")
    for model in both:
        model.pooler = change()
    assert_same(both, inputs, task)


@pytest.mark.sweep
def test_compiled_with_a_hook(fresh_dynamo):
    own, inputs = pair("bert")[1], batch("bert")
    HOOKS["forward"](own.encoder.layer[1].output)
    with torch.no_grad():
        expected = own(**inputs)[0]
        found = torch.compile(own, backend="eager", fullgraph=True)(**inputs)[0]
        assert (found - expected).abs().max() < 1e-12


ERRORS = {
    "fixed heads": (
        lambda m: HOOKS["forward"](layer(m).output),
        "model: layers with fixed heads (config fixed_heads) cannot be called module by module, but output",
    ),
    "stack": (
        lambda m: setattr(m.bert, "encoder", nn.Identity()),
        "model: encoder was replaced by a Identity",
    ),
    "encoder": (put(":bert", Wrapped), "model: bert was replaced by a Wrapped"),
    "mapped ids": (lambda m: None, "input_ids: is mapped by torch.func.vmap"),
    "taps": (lambda m: HOOKS["forward"](layer(m)), "model: layer 1 shows nothing of what it computes inside"),
    "no ids": (
        put(":bert.embeddings.word_embeddings", lambda _: nn.Identity()),
        "input_ids: expected int64 or int32, got torch.float64",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_cannot_be_done_is_refused_by_name(what):
    change, message = ERRORS[what]
    model = pair("bert", "ForSequenceClassification")[1]
    inputs = inputs_of("bert", "ForSequenceClassification")
    if what == "fixed heads":
        model = fix_heads(model, ["learned", "previous", "next"])
    change(model)
    calls = {
        "mapped ids": lambda: vmap(lambda ids: model(ids[None]).logits)(inputs["input_ids"]),
        # what captum's interpretable embedding passes
        "no ids": lambda: model(torch.randn(4, 40, 48, dtype=torch.float64)),
    }
    taps = tapped(model.base_model, Taps()) if what == "taps" else contextlib.nullcontext()
    with taps, pytest.raises((TypeError, ValueError), match=re.escape(message)):
        calls.get(what, lambda: model(**inputs))()


# --- accelerated models alone -------------------------------------------------------------------------------


def test_replaced_group_of_layers_runs():
    models, inputs = trio("albert")[::2], first_kept("albert")
    for model in models:
        (group,) = model.encoder.albert_layer_groups

        class Residual(type(group)):
            def forward(self, hidden_states, *args, **kwargs):
                return hidden_states + super().forward(hidden_states, *args, **kwargs)

        group.__class__ = Residual
    with calls(models[1], packed=0, padded=1, stock=0):
        assert_same(models, inputs, "group")


def test_classes_made_from_a_stock_class():
    class Named(transformers.BertModel):
        def size(self):
            return self.config.hidden_size

    class Doubled(transformers.BertModel):
        def forward(self, *args, **kwargs):
            return scaled(super().forward(*args, **kwargs), 2)

    for cls in (Named, Doubled):
        slow = pair("bert")[0]
        slow.__class__ = cls
        fast = copy.deepcopy(slow)
        # how it handles Doubled is not tested, only that the result is right
        with warnings.catch_warnings(action="ignore"):
            fastbert.accelerate(fast)
        assert isinstance(fast, cls)
        assert type(fast).__qualname__ == cls.__qualname__ != cls.__name__
        assert_same((slow, fast), first_kept("bert"), cls.__name__)
    fast = pair("bert")[0]
    fast.__class__ = Named
    fastbert.accelerate(fast, strict=True)
    assert fast.size() == 48
    with torch.no_grad(), calls(fast, packed=1, stock=0):
        fast(**padded())
    assert type(fastbert.restore(fast)) is Named


def test_a_layer_that_is_not_accelerated_may_be_added():
    slow, _, fast = trio("bert")
    extra, inputs = slow.encoder.layer[0], first_kept("bert")
    for model in (slow, fast):
        model.encoder.layer.append(copy.deepcopy(extra))
    assert_same((slow, fast), inputs, "stock")
    fastbert.accelerate(fast)
    with calls(fast, packed=1, fused=4, stock=0):
        assert_same((slow, fast), inputs, "accelerated")
