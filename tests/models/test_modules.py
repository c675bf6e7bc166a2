"""What people do to the modules of a model: fastbert's own models do what transformers' models do then.

`docs/differences.md` has the table. Each case is compared with transformers' model under the same change, in
float64, or is an error that names the module; none is ignored.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import fastbert
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.model_pairs import CASES, build, inputs_for

LAYOUTS = ("bert", "distilbert", "electra", "albert-groups", "mpnet")
# Modules of heads, and ALBERT's groups, that have no code of their own here
REFUSED = ("cls", "cls.predictions", "cls.predictions.transform", "lm_head", "classifier", "predictions")
REFUSED += ("generator_predictions", "discriminator_predictions", "sequence_summary", "sop_classifier")
# Modules of transformers that fastbert's models lack: nothing ever happens in them, or only the loss
MISSING = ("sequence_summary.first_dropout", "mlm_loss_fct")


def pair(name: str, task: str = "Model", **config) -> tuple[nn.Module, nn.Module]:
    """(transformers' model, ours with its weights), in eval and in float64."""
    if task == "Model":
        hf, model = build(name, "ForTokenClassification", **config)
        return hf.base_model.double(), model.base_model.double()
    return tuple(m.double() for m in build(name, task, **config))


def scaled(found: object, factor: float) -> object:
    """The first floating-point tensor of arguments or outputs, scaled."""
    if found is None or isinstance(found, torch.Tensor):
        return found if found is None or not found.is_floating_point() else found * factor
    if isinstance(found, (tuple, list)):
        return (scaled(found[0], factor), *found[1:]) if found else found
    found = copy.copy(found)
    for key, value in found.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found[key] = value * factor
            break
    return found


def _backward(module: nn.Module, before: bool) -> None:
    if before:
        module.register_full_backward_pre_hook(lambda m, grads: scaled(grads, 1.25))
    else:
        module.register_full_backward_hook(lambda m, given, made: scaled(given, 1.25))


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, out: scaled(out, 1.25)),
    "forward, kwargs": lambda m: m.register_forward_hook(
        lambda m, args, kwargs, out: scaled(out, 1.25), with_kwargs=True
    ),
    "forward, always": lambda m: m.register_forward_hook(
        lambda m, args, out: scaled(out, 1.25), always_call=True
    ),
    "pre": lambda m: m.register_forward_pre_hook(lambda m, args: scaled(args, 1.25)),
    "pre, kwargs": lambda m: m.register_forward_pre_hook(
        lambda m, args, kwargs: (scaled(args, 1.25), kwargs) if args else (args, scaled(kwargs, 1.25)),
        with_kwargs=True,
    ),
    "backward": lambda m: _backward(m, before=False),
    "backward, pre": lambda m: _backward(m, before=True),
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
        tensors += [
            torch.zeros(()) if p.grad is None else p.grad for _, p in sorted(model.named_parameters())
        ]
    return [t.detach() for t in tensors]


def assert_same(pair: tuple[nn.Module, nn.Module], inputs: dict, what: str, backward: bool = False) -> None:
    theirs, ours = (results(m, inputs, backward) for m in pair)
    assert len(theirs) == len(ours), what
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-9 * (1 + b.abs().max()), what


def paths(model: nn.Module) -> list[str]:
    """The modules of a model that may be called, of one layer only."""
    seen = [n for n, m in model.named_modules() if n and not isinstance(m, nn.ModuleList)]
    return [n for n in seen if not any(part.isdigit() and int(part) > 0 for part in n.split("."))]


def inputs_of(name: str, task: str) -> dict:
    inputs = batch(name) if task == "Model" else inputs_for(name, task)
    if task in (
        "ForSequenceClassification",
        "ForMultipleChoice",
        "ForNextSentencePrediction",
        "ForPreTraining",
    ):
        inputs["attention_mask"][..., 0] = 1  # our heads refuse to read a masked token
    return inputs


def assert_hooks_alike(name: str, task: str, kinds: list[str]) -> None:
    stock, own = pair(name, task)
    inputs, refused = inputs_of(name, task), []
    for path in paths(stock):
        if path in MISSING or path.endswith("albert_layers.0.dropout"):
            continue
        for kind in kinds:
            both = copy.deepcopy(stock), copy.deepcopy(own)
            for model in both:
                HOOKS[kind](model.get_submodule(path))
            try:
                assert_same(both, inputs, f"{kind} on {path}", kind.startswith("backward"))
            except TypeError as error:
                assert str(error).startswith(f"model: {path} has hooks"), path
                refused.append(path)
    assert set(refused) <= {*REFUSED, "encoder.albert_layer_groups.0"}


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_forward_hooks_on_every_module_of_every_family(name):
    assert_hooks_alike(name, "Model", ["forward"])


@pytest.mark.parametrize("kind", [kind for kind in HOOKS if kind != "forward"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_of_hook_on_every_module(name, kind):
    assert_hooks_alike(name, "Model", [kind])


@pytest.mark.parametrize(("name", "task"), [case for case in CASES if case[0] in (*LAYOUTS, "roberta")])
def test_forward_hooks_on_every_module_of_a_head(name, task):
    stock, own = pair(name, task)
    inputs, prefix = inputs_of(name, task), own.base_model_prefix
    for path in paths(stock):
        if path.startswith(f"{prefix}.") or path in MISSING:
            continue
        both = copy.deepcopy(stock), copy.deepcopy(own)
        for model in both:
            HOOKS["forward"](model.get_submodule(path))
        try:
            assert_same(both, inputs, path)
        except TypeError as error:
            assert path in REFUSED, path
            assert str(error).startswith(f"model: {path} has hooks"), path
