"""Layers of one model that differ in heads and inner widths, against the model with zeros in their place."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fastbert
from fastbert.execution import cpu
from fastbert.execution.call import Call
from fastbert.execution.plan import explain, survey
from fastbert.layers.batch import PackedBatch
from fastbert.layers.encoder_layer import EncoderLayer
from fastbert.layers.form import LayerForm
from fastbert.layers.modules import part
from fastbert.models.auto import AutoModel
from fastbert.runtime import dispatch

SIZES = dict(hidden_size=48, num_attention_heads=3, num_hidden_layers=4, intermediate_size=80, vocab_size=60)
GONE, INNER = {0: [1], 1: [0, 1, 2], 3: [0, 2]}, [80, 33, 0, 1]
FAMILIES = ["bert", "roberta", "distilbert", "electra", "mpnet"]
LENGTHS = (11, 1, 7)


def pair(name, dtype=torch.float32, dropout=0.0):
    """(a model with fewer heads and inner columns, the whole one with zeros in their place)."""
    torch.manual_seed(0)
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = fastbert.EncoderConfig(model_type=name, max_position_embeddings=40, **SIZES, **rates)
    whole = AutoModel.from_config(config).to(dtype).eval()
    small = fastbert.EncoderConfig.from_dict(config.to_dict(), pruned_heads=GONE, intermediate_sizes=INNER)
    small = AutoModel.from_config(small).to(dtype).eval()
    own = dict(small.named_parameters())
    with torch.no_grad():
        for key, p in whole.named_parameters():
            p.copy_(torch.randn(p.shape) * (0.5 if p.dim() == 1 else 0.15))
            keep = tuple(slice(size) for size in own[key].shape)
            if own[key].shape != p.shape:
                axis = next(i for i, (a, b) in enumerate(zip(own[key].shape, p.shape, strict=True)) if a != b)
                layer = next(int(word) for word in key.split(".") if word.isdigit())
                heads = torch.tensor([head not in GONE.get(layer, []) for head in range(3)])
                kept = heads.repeat_interleave(16)
                if p.shape[axis] == SIZES["intermediate_size"]:
                    kept = torch.arange(80) < INNER[layer]
                p.index_fill_(axis, (~kept).nonzero()[:, 0], 0)
                keep = (slice(None),) * axis + (kept,)
            own[key].copy_(p[keep])
    return small, whole


def batch():
    ids = torch.randint(5, 60, (3, 11), generator=torch.Generator().manual_seed(1))
    return ids, (torch.arange(11) < torch.tensor(LENGTHS)[:, None]).long()


CALLS = {
    "plain": {},
    "first": {"first_token_only": True},
    "gates": {"head_mask": torch.rand(4, 3, generator=torch.Generator().manual_seed(2))},
    "bias": {"attention_mask": torch.randn(3, 3, 11, 11, generator=torch.Generator().manual_seed(3))},
    "probabilities": {"output_attentions": True, "output_hidden_states": True},
}


@pytest.mark.parametrize("how", ["cpu", "op by op", "module by module"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_outputs(name, how):
    small, whole = pair(name)
    ids, mask = batch()
    if how == "module by module":
        for layer in small.layer_list():
            layer.register_forward_hook(lambda *_: None)
    for options in CALLS.values():
        with dispatch.use_backend(**({"attention": "aten"} if how == "op by op" else {})):
            given = {"attention_mask": mask, **options}
            found, wanted = small(ids, **given), whole(ids, **given)
        close = dict(rtol=0, atol=2e-5)
        torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, **close)
        for layer, (mine, all_heads) in enumerate(
            zip(found.attentions or (), wanted.attentions or (), strict=True)
        ):
            kept = [head for head in range(3) if head not in GONE.get(layer, [])]
            torch.testing.assert_close(mine, all_heads[:, kept], **close)


def test_gradients():
    small, whole = pair("bert", torch.float64)
    for model in (small, whole):
        model(*batch()).last_hidden_state.square().sum().backward()
    for (key, p), q in zip(small.named_parameters(), whole.parameters(), strict=True):
        if p.shape == q.shape and "pooler" not in key and ".key.bias" not in key:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9, msg=key)


def test_training_with_dropout_and_recomputing():
    small = pair("bert", dropout=0.3)[0].train()
    grads = []
    for every in (0, 1):
        if every:
            small.gradient_checkpointing_enable()
        torch.manual_seed(3)
        small.zero_grad()
        small(*batch()).last_hidden_state.square().sum().backward()
        grads.append([p.grad.clone() for p in small.parameters() if p.grad is not None])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("int8", [False, True])
def test_saved_and_loaded(tmp_path, int8):
    small, whole = pair("bert")
    models = [model.quantize("int8") if int8 else model for model in (small, whole)]
    small.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        found, wanted = (model(*batch()).last_hidden_state for model in models)
        assert torch.equal(loaded(*batch()).last_hidden_state, found)
    # 8 bits: the rows' ranges are those of the columns that are there
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.1 if int8 else 2e-5)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"pruned_heads"', '"other"'))
    words = r"query.weight: shape \(32, 48\), but the config makes it"
    with pytest.raises(fastbert.CheckpointError, match=words):
        AutoModel.from_pretrained(tmp_path)


def test_a_layer_without_heads_runs_op_by_op_and_says_why():
    small, _ = pair("bert")
    call = Call(PackedBatch(torch.tensor([0, 5], dtype=torch.int32), 5), 3)
    with torch.no_grad():
        call.inference = True
        found = explain(survey(small.layer_list()), torch.randn(5, 48), call)
    assert [served[:3] for served in found] == [(0, 0, "cpu"), (1, 2, "eager"), (3, 3, "cpu")]
    other = dataclasses.make_dataclass("Other", [("twisted", bool, True)], bases=(LayerForm,), frozen=True)
    form = other(
        *(getattr(small.layer_list()[0].form, name) for name in ("names", "stock", "nheads", "head_dim")),
        "gelu",
    )
    step = survey(small.layer_list())[0]._replace(form=dataclasses.replace(form, twisted=False))
    with torch.no_grad():
        assert cpu.takes(step, torch.randn(5, 48), call) == "it does not know layers with twisted"
    assert (
        found[1].refused["cpu"]
        == "a linear layer or a norm was replaced or has hooks, or there are no heads or inner columns"
    )
    assert part(small.layer_list()[1], "output.dense").in_features == 33


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pruned_heads", [0], "pruned_heads: expected lists of heads by layer"),
        ("pruned_heads", {4: [0]}, "pruned_heads: expected numbers of 4 layers as keys, got 4"),
        ("pruned_heads", {"a": [0]}, "pruned_heads: expected numbers of 4 layers"),
        ("pruned_heads", {0: [3]}, r"pruned_heads\[0\]: expected different heads below 3, got \[3\]"),
        ("pruned_heads", {"1": [0, 0]}, r"pruned_heads\[1\]: expected different heads"),
        ("intermediate_sizes", [1, 2], "intermediate_sizes: expected None or 4 integers from 0"),
        ("intermediate_sizes", [1, 2, 3, -1], "intermediate_sizes: expected None or 4"),
    ],
)
def test_bad_configs(key, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fastbert.EncoderConfig(model_type="bert", **SIZES, **{key: value})
    sizes = {"pruned_heads": {0: [1]}, "intermediate_sizes": [1] * 4}
    with pytest.raises(ValueError, match=r"expected (none|None), as albert shares its layers"):
        fastbert.EncoderConfig(model_type="albert", **SIZES, **{key: sizes[key]})


@torch.no_grad()
def test_a_layer_with_a_forward_of_its_own_is_called_for_all_rows():
    class Twice(EncoderLayer):
        def forward(self, hidden, batch, asked):
            y, probs = super().forward(hidden, batch, asked)
            return 2 * y, probs

    class Own(fastbert.BertModel):
        layer_class = Twice

    model = Own(fastbert.EncoderConfig(model_type="bert", max_position_embeddings=40, **SIZES)).eval()
    first, whole = (model(*batch(), first_token_only=only).last_hidden_state[:, 0] for only in (True, False))
    assert torch.equal(first, whole)
    assert (
        explain(survey(model.layer_list()), torch.randn(5, 48), Call(PackedBatch(None, 5), 3))[0][2]
        == "eager"
    )
