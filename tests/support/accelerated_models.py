"""Stock models of transformers, the same models accelerated, and checks that both compute the same."""

from __future__ import annotations

import contextlib
import copy
import functools

import torch
import transformers
from torch import nn

import fastbert
from tests.support.hf_models import PAD_POSITIONS, batch, hf_model
from tests.support.model_pairs import token_level

LAYERS = 3
MODEL, HEAD = transformers.AutoModel, transformers.AutoModelForSequenceClassification
LAST, PROBE = "encoder.layer.1", "encoder.layer.1.attention.self"


def stock(name: str = "bert", auto: type = MODEL, attention: str = "sdpa", **config) -> nn.Module:
    """A model of transformers, in eval, without dropout unless `config` says otherwise."""
    head = {"distilbert": "seq_classif_dropout", "albert": "classifier_dropout_prob"}.get(name)
    config = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **config}
    if head:
        config[head] = 0.0
    model = hf_model(name, auto, **config)
    if name != "mpnet":
        model.set_attn_implementation(attention)
    return model


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


def same_outputs(actual, expected, kept: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Two outputs of a model have the same class and keys, and are equal at the tokens of `kept`."""
    assert type(actual) is type(expected)
    assert list(actual.keys()) == list(expected.keys())
    flat = kept.reshape(-1, kept.shape[-1])
    for key in expected:
        a, e = actual[key], expected[key]
        if isinstance(e, tuple):
            assert len(a) == len(e)
            for one, other in zip(a, e, strict=True):
                if key == "hidden_states":
                    close(one[flat], other[flat], tolerance)
                else:
                    pairs = (flat[:, None, :, None] & flat[:, None, None, :]).expand_as(other)
                    close(one[pairs], other[pairs], tolerance)
        elif token_level(e, kept):
            close(a[kept], e[kept], tolerance)
        else:
            close(a, e, tolerance)


def same_gradients(fast: nn.Module, slow: nn.Module, tolerance: float) -> None:
    """Every parameter has the gradient of its twin, up to `tolerance` of the gradient's largest element.

    The gradient of a key's bias is only the rounding of terms as large as the others'.
    """
    reference = {k: p.grad for k, p in slow.named_parameters()}
    largest = max(g.abs().max().item() for g in reference.values() if g is not None)
    for key, parameter in fast.named_parameters():
        expected = reference[key]
        assert (parameter.grad is None) == (expected is None), key
        if expected is not None:
            error = (parameter.grad - expected).abs().max().item()
            assert error <= tolerance * (expected.abs().max().item() + 1e-2 * largest), (key, error)


def first_kept(name: str, **kwargs) -> dict[str, torch.Tensor]:
    """A batch with right padding, holes and a full row, the first token of every row kept."""
    inputs = batch(name, **kwargs)
    inputs["attention_mask"][:, 0] = 1
    inputs["input_ids"][:, 0] = 7
    return inputs


def padded(name: str = "bert") -> dict[str, torch.Tensor]:
    """`first_kept` with padding at every masked place, as strict models demand."""
    inputs = first_kept(name)
    inputs["input_ids"].masked_fill_(inputs["attention_mask"] == 0, 1 if name in PAD_POSITIONS else 0)
    return inputs


def submodule(model: nn.Module, path: str) -> nn.Module:
    return functools.reduce(getattr, path.split("."), model)


class Twice(nn.Linear):
    """A linear layer of another kind."""

    def forward(self, x):
        return 2 * super().forward(x)
