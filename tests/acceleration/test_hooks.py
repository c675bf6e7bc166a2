"""Hooks on, and changed parts of, layers of other kinds than BERT's: as in the stock model, and named.

Hooks on every module of a model, and changes of BERT, are in tests/models/test_modules.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import fastbert
from tests.models.test_mobilebert import FORMS
from tests.support.accelerated_models import (
    LAYERS,
    Twice,
    build,
    calls,
    close,
    first_kept,
    same_outputs,
    stock,
)

CONFIGS = {
    "deberta-v2": {"share_att_key": False, "conv_kernel_size": 3},
    "mobilebert": FORMS["published"],
}
# family -> a layer, and paths in it
LAYER = {
    "modernbert": ("layers.1", "attn", "attn.Wqkv", "attn_norm"),
    "gte": ("layers.1", "mlp.gate_proj"),
    "eurobert": ("layers.1", "input_layernorm"),
    "deberta-v2": ("encoder.layer.1", "attention.self.pos_key_proj"),
    "mobilebert": (
        "encoder.layer.1",
        "bottleneck",
        "bottleneck.input",
        "bottleneck.attention.dense",
        "bottleneck.input.LayerNorm",
        "ffn.1",
        "ffn.0.intermediate.dense",
        "ffn.1.output.LayerNorm",
        "output.bottleneck",
        "output.bottleneck.LayerNorm",
    ),
    "longformer": (
        "encoder.layer.1",
        *("attention.self", "attention.self.query_global", "attention.self.value_global", "output.dense"),
    ),
    "xlnet": ("layer.1", "rel_attn", "ff.layer_1", "rel_attn.layer_norm"),
}
HOOKS = [
    (name, f"{layer}.{path}", f"{path} has hooks")
    for name, (layer, *paths) in LAYER.items()
    for path in paths
]
HOOKS += [
    ("modernbert", "rotary_emb", "rotary_emb has hooks"),
    ("eurobert", "embed_tokens", "embed_tokens has hooks"),
    ("eurobert", "norm", "norm has hooks"),
    ("deberta-v2", "encoder.rel_embeddings", "encoder.rel_embeddings has hooks"),
    ("deberta-v2", "encoder.LayerNorm", "encoder.LayerNorm has hooks"),
    ("deberta-v2", "encoder.conv.conv", "encoder.conv has hooks"),
    ("deberta-v2", "encoder.layer.1.attention.self.pos_dropout", "pos_dropout is not a plain dropout"),
    ("mobilebert", "encoder.layer.1.ffn.1.intermediate.intermediate_act_fn", "the activation has hooks"),
    ("xlnet", "dropout", "dropout "),
]


def called_twice(name: str, fast: nn.Module) -> dict[str, torch.Tensor]:
    """The inputs of two calls, the second of which keeps what it has looked at."""
    inputs = first_kept(name)
    if name == "longformer":
        inputs["global_attention_mask"] = torch.zeros(4, 40).long().index_fill(1, torch.tensor([0, 5]), 1)
    for _ in range(2):
        fast(**inputs)
    return inputs


@pytest.mark.parametrize(("name", "path", "said"), HOOKS)
@torch.no_grad()
def test_hooks_see_what_they_see_in_the_stock_model(name, path, said):
    slow, fast = (model.double() for model in build(name, **CONFIGS.get(name, {})))
    inputs, seen = called_twice(name, fast), []
    for model in (slow, fast):
        model.get_submodule(path).register_forward_hook(lambda _, __, y: seen.append(y))
    slowly = LAYERS if name == "xlnet" else int(".1." in path)
    with calls(fast, packed=0, padded=1, fused=LAYERS - slowly, stock=slowly):
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool(), 1e-9)
    values = [y[0] if isinstance(y, tuple) else y for y in seen]
    assert values or path == "encoder.rel_embeddings"  # whose weight alone is read
    for ours, theirs in zip(values[: len(seen) // 2], values[len(seen) // 2 :], strict=True):
        assert ours.shape == theirs.shape
        if len(ours) == 4:  # the last text has no padding
            close(ours[3], theirs[3], 1e-9)
    assert said in str(fastbert.explain(fast))


def put(path: str, module: nn.Module):
    """A change: another module is at a path of a layer."""

    def change(layer: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(layer.get_submodule(owner), name, module.double())

    return change


def of(path: str, **values):
    """A change: attributes of the module at a path of a layer."""
    return lambda layer: vars(layer.get_submodule(path)).update(values)


def fewer_heads(layer: nn.Module) -> None:
    put("attn.Wqkv", nn.Linear(48, 96))(layer)
    put("attn.Wo", nn.Linear(32, 48))(layer)


def doubled(layer: nn.Module) -> None:
    kind = type(layer.input_layernorm)
    forward = {"forward": lambda self, x: 2 * kind.forward(self, x)}
    layer.input_layernorm.__class__ = type(kind.__name__, (kind,), forward)


def as_many_keys(layer: nn.Module) -> None:
    wide = nn.Linear(48, 48)
    layer.self_attn.num_key_value_groups = 1
    put("self_attn.k_proj", wide)(layer)
    put("self_attn.v_proj", wide)(layer)


# (family, the change, the reason for which its layer runs as stock)
CHANGES = [
    ("modernbert", put("mlp.Wo", Twice(80, 48, bias=False)), "Twice"),
    ("modernbert", fewer_heads, "attn.Wqkv has other heads"),
    ("modernbert", of("attn", attention_dropout=1.0), "attention_dropout"),
    ("modernbert", of("attn", sliding_window=4), "other heads"),
    ("eurobert", doubled, "input_layernorm is a"),
    ("eurobert", as_many_keys, "self_attn has other heads"),
    ("eurobert", put("input_layernorm", nn.LayerNorm(48, bias=False)), None),  # is one of ours
    ("mobilebert", put("ffn.0.output.LayerNorm", nn.BatchNorm1d(40).eval()), "LayerNorm is a BatchNorm1d"),
    ("mobilebert", put("ffn.1.intermediate.intermediate_act_fn", nn.Tanh()), "have the activation"),
    ("mobilebert", put("output.bottleneck.dropout", nn.Dropout1d(0.5).eval()), "not a plain dropout"),
    ("longformer", put("attention.self.key_global", Twice(48, 48)), "key_global is a Twice"),
    ("longformer", of("attention.self", one_sided_attn_window_size=2), "other heads"),
    ("longformer", of("", ff_chunk=lambda x: 2 * x), "another feed-forward block"),
    ("longformer", of("", chunk_size_feed_forward=8), "chunk_size_feed_forward"),
    ("xlnet", put("rel_attn", stock("xlnet").layer[0].rel_attn), "rel_attn was replaced"),
    ("xlnet", lambda m: register_parametrization(m.rel_attn, "k", nn.Tanh()), "rel_attn.k has no weight"),
    ("xlnet", put("ff.layer_2", Twice(80, 48)), "ff.layer_2 is a Twice"),
    ("xlnet", of("rel_attn.dropout", p=1.0), "rel_attn.dropout is not a plain dropout"),
    ("xlnet", of("", chunk_size_feed_forward=2), "chunk_size_feed_forward is set"),
]


@pytest.mark.parametrize(
    ("name", "change", "said"), CHANGES, ids=lambda value: str(value) * (not callable(value))
)
@torch.no_grad()
def test_changed_parts_run_as_stock(name, change, said):
    slow, fast = (model.double() for model in build(name, **CONFIGS.get(name, {})))
    inputs = called_twice(name, fast)
    for model in (slow, fast):
        torch.manual_seed(0)  # of new layers
        change(model.get_submodule(LAYER[name][0]))
    slowly = (LAYERS if name == "xlnet" else 1) * (said is not None)
    with calls(fast, padded=int(slowly > 0), fused=LAYERS - slowly, stock=slowly):
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool(), 1e-9)
    layers = fastbert.explain(fast).layers
    assert [layer.fused for layer in layers] == [True, said is None, True]
    assert (said or "") in (layers[1].reason or "")
