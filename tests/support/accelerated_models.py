"""Stock models of transformers, the same models accelerated, and checks on what both compute and how."""

from __future__ import annotations

import contextlib
import copy
import functools

import torch
import transformers
from torch import nn

import fastbert
from tests.support.hf_models import batch, hf_config, hf_model
from tests.support.model_pairs import token_level

LAYERS = 3
MODEL, HEAD = transformers.AutoModel, transformers.AutoModelForSequenceClassification
LAST, PROBE = "encoder.layer.1", "encoder.layer.1.attention.self"


def stock(name: str = "bert", auto: type = MODEL, attention: str = "sdpa", **config) -> nn.Module:
    """A model of transformers, in eval, without dropout unless `config` says otherwise."""
    heads = {"distilbert": ("seq_classif_dropout", "qa_dropout"), "albert": ("classifier_dropout_prob",)}
    config = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **config}
    config |= dict.fromkeys(heads.get(name, ()), 0.0)
    model = hf_model(name, auto, **config)
    if name not in ("mpnet", "deberta-v2", "big_bird", "longformer", "xlnet"):  # which have one attention
        model.set_attn_implementation(attention)
    return model


def tiny(auto: type = HEAD, name: str = "bert", **config) -> nn.Module:
    """A stock model of two layers, by default a classifier."""
    return stock(name, auto, **{"num_hidden_layers": 2, **config})


def build(name: str = "bert", auto: type = MODEL, **config) -> tuple[nn.Module, nn.Module]:
    """(the stock model, the same model accelerated)."""
    model = stock(name, auto, **config)
    return model, fastbert.accelerate(copy.deepcopy(model))


pair = functools.lru_cache(maxsize=None)(build)  # shared between tests that change neither


def counts(model: nn.Module) -> dict[str, int]:
    report = fastbert.explain(model)
    return {
        "packed": sum(m.packed_calls for m in report.models),
        "padded": sum(m.padded_calls for m in report.models),
        "fused": sum(layer.fused_calls for layer in report.layers),
        "stock": sum(layer.stock_calls for layer in report.layers),
    }


@contextlib.contextmanager
def calls(model: nn.Module, **expected: int):
    """Check which path the calls inside took: models packed or padded, layers fused or stock."""
    before = counts(model)
    yield
    after = counts(model)
    assert {k: after[k] - before[k] for k in expected} == expected


def layer_calls(name: str) -> int:
    return 2 * LAYERS if name == "albert-groups" else LAYERS


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to `tolerance` times the largest element, or times 1 where all are smaller."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    error = (a - b).abs().max().item() if a.numel() else 0.0
    assert error <= tolerance * max(1.0, b.abs().max().item() if b.numel() else 0.0), f"max error {error:.3g}"


def same_outputs(actual, expected, kept: torch.Tensor, tolerance: float = 1e-5, types: bool = True) -> None:
    """Two outputs of a model have the same class and keys, and are equal at the tokens of `kept`."""
    assert not types or type(actual) is type(expected)
    assert list(actual.keys()) == list(expected.keys())
    flat = kept.reshape(-1, kept.shape[-1])
    for key in expected:
        a, e = actual[key], expected[key]
        if isinstance(e, tuple):
            assert len(a) == len(e)
            for one, other in zip(a, e, strict=True):
                if key == "hidden_states":
                    close(one[flat], other[flat], tolerance)
                elif key == "global_attentions":
                    # transformers fills the slots of missing tokens alike, and pads to the window
                    real = other.amax(2, True) > other.amin(2, True)
                    close(one * real, (other * real)[:, :, : one.shape[2]], tolerance)
                elif one.shape[-1] != one.shape[-2]:
                    close(one, other, tolerance)
                else:
                    pairs = (flat[:, None, :, None] & flat[:, None, None, :]).expand_as(other)
                    close(one[pairs], other[pairs], tolerance)
        elif token_level(e, kept):
            close(a[kept], e[kept], tolerance)
        else:
            close(a, e, tolerance)


def same_gradients(fast: nn.Module, slow: nn.Module, tolerance: float) -> None:
    """Every parameter has the gradient of its twin, up to `tolerance` of the gradient's largest element.

    The gradient of a key's bias is only the rounding of terms as large as other gradients'.
    """
    reference = {k: p.grad for k, p in slow.named_parameters(remove_duplicate=False)}
    largest = max(g.abs().max().item() for g in reference.values() if g is not None)
    for key, parameter in fast.named_parameters():
        expected = reference[key]
        assert (parameter.grad is None) == (expected is None), key
        if expected is not None:
            error = (parameter.grad - expected).abs().max().item()
            assert error <= tolerance * (expected.abs().max().item() + 1e-2 * largest), (key, error)


def first_kept(name: str, *sizes: int, **kwargs) -> dict[str, torch.Tensor]:
    """A batch with right padding, holes and a full row, the first token of every row kept."""
    inputs = batch(name, *sizes, **kwargs)
    inputs["attention_mask"][:, 0] = 1
    inputs["input_ids"][:, 0] = 7
    return inputs


def padded(name: str = "bert") -> dict[str, torch.Tensor]:
    """`first_kept` with padding at every masked place, as strict models demand."""
    inputs = first_kept(name)
    inputs["input_ids"].masked_fill_(inputs["attention_mask"] == 0, hf_config(name).pad_token_id)
    return inputs


def submodule(model: nn.Module, path: str) -> nn.Module:
    return functools.reduce(getattr, path.split("."), model)


class Twice(nn.Linear):
    """A linear layer of another kind."""

    def forward(self, x):
        return 2 * super().forward(x)


def worst_gradient(actual: dict, expected: dict) -> tuple[float, str]:
    """The largest relative error of a gradient, and its name. All must have one, or none.

    The bias of the keys shifts all scores of a query alike, so its gradient is only rounding: it is compared
    with the size of the largest gradient.
    """
    assert actual.keys() == expected.keys()
    largest = max(g.norm().item() for g in expected.values() if g is not None)
    errors = [(0.0, "")]
    for name, want in expected.items():
        assert (actual[name] is None) == (want is None), name
        if want is not None:
            is_of_keys = name.endswith(("key.bias", "k_lin.bias", "attn.k.bias"))
            size = largest if is_of_keys else max(want.norm().item(), 1e-3 * largest)
            errors.append(((full(actual[name]) - want).norm().item() / size, name))
    return max(errors)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_fused(model) -> None:
    """Every layer took the fused path in every call, and every call of the model was packed."""
    how = fastbert.explain(model)
    assert how.layers, str(how)
    assert how.models, str(how)
    for layer in how.layers:
        assert layer.fused, str(how)
        assert layer.reason is None, str(how)
        assert layer.fused_calls > 0, str(how)
        assert layer.stock_calls == 0, str(how)
    for part in how.models:
        assert part.unpads, str(how)
        assert part.packed_calls > 0, str(how)
        assert part.padded_calls == 0, str(how)


def assert_stock(model, names=lambda name: True) -> None:
    """Every layer with such a name took the stock path in every call, and reports a reason."""
    how = fastbert.explain(model)
    layers = [layer for layer in how.layers if names(layer.name)]
    assert layers, str(how)
    for layer in layers:
        assert not layer.fused, str(how)
        assert layer.reason, str(how)
        assert layer.fused_calls == 0, str(how)
        assert layer.stock_calls > 0, str(how)


def assert_same_training(model, stock, inputs: dict, tolerance: float = 1e-5) -> None:
    """Equal logits and gradients on the same inputs."""
    results = []
    for one in (model, stock):
        one.zero_grad(set_to_none=True)
        logits = one(**inputs).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        gradients = {name.removeprefix("_orig_mod."): p.grad for name, p in one.named_parameters()}
        results.append((logits, gradients))
    (logits, gradients), (stock_logits, stock_gradients) = results
    assert_close(logits, stock_logits, tolerance)
    assert gradients.keys() == stock_gradients.keys()
    error, name = worst_gradient(gradients, stock_gradients)
    assert error <= tolerance, name


TEXTS = [
    "the model reads many words and some rows are short while others last for quite a long time until they "
    "end",
    "paris is the capital of france",
    "some words",
    "when they end others last and last for a long long time",
]
