"""Training of accelerated models, against the untouched model.

Gradients, checkpointing, autocast and dropout.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastbert
from fastbert.models.config import EncoderConfig
from tests.support.accelerated_models import (
    HEAD,
    LAYERS,
    build,
    calls,
    close,
    first_kept,
    pair,
    same_gradients,
    same_outputs,
    submodule,
)
from tests.support.hf_models import ACCELERATED
from tests.support.model_pairs import native

# -- training ------------------------------------------------------------------------------------------------


# transformers' Longformer returns parts of its hidden states, without the padding to a window
@pytest.mark.parametrize("name", [name for name in ACCELERATED if name != "longformer"])
def test_hidden_states_keep_their_gradients(name):
    slow, fast = (copy.deepcopy(m).double().train() for m in pair(name))
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    grads = []
    for model in (slow, fast):
        out = model(**inputs, output_hidden_states=True)
        for hidden in out.hidden_states:
            hidden.retain_grad()
        out.last_hidden_state[kept].square().sum().backward()
        assert all(hidden.grad is not None for hidden in out.hidden_states)
        grads.append([hidden.grad[kept] for hidden in out.hidden_states])
    for theirs, ours in zip(*grads, strict=True):
        close(ours, theirs, 1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("bert", "roberta", "distilbert", "electra", "ernie", "modernbert", "nomic_bert"),
        "mobilebert",
        "longformer",
    ],
)
def test_activation_checkpointing(name, reentrant):
    slow, fast = (m.double().train() for m in build(name, HEAD))
    inputs = first_kept(name)
    for model in (slow, fast):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    labels = torch.tensor([0, 1, 0, 1])
    expected = slow(**inputs, labels=labels)
    with calls(fast, packed=1, fused=LAYERS, stock=0):  # whichever hook transformers put on the embeddings
        actual = fast(**inputs, labels=labels)
    close(actual.loss, expected.loss, 1e-12)
    expected.loss.backward()
    with calls(fast, fused=LAYERS, stock=0):  # each layer once more
        actual.loss.backward()
    same_gradients(fast, slow, 1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_over_frozen_embeddings(reentrant):
    slow, fast = (m.double().train() for m in build("bert", HEAD))
    inputs = first_kept("bert")
    for model in (slow, fast):
        model.bert.embeddings.requires_grad_(False)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with calls(fast, packed=int(model is fast)):
            model(**inputs, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        model.disable_input_require_grads()
    same_gradients(fast, slow, 1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "longformer"])
def test_checkpointed_layers_drop_the_same_elements_again(name, reentrant):
    """Compare the gradient with differences of losses of the same seed: other masks would disagree."""
    _, fast = build(name, HEAD, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    fast = fast.double().train()
    fast.activation_checkpointing_enable({"use_reentrant": reentrant})
    inputs = first_kept(name)

    def loss():
        torch.manual_seed(5)
        return fast(**inputs, labels=torch.tensor([0, 1, 0, 1])).loss

    loss().backward()
    parameters = [p for p in fast.parameters() if p.grad is not None]
    directions = [torch.randn_like(p) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions, strict=True)).item()
    ends = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(step * direction)
            ends.append(loss().item())
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True])
def test_autocast(train):
    """Errors of all gradients, or of the hidden states, are no larger than the stock model's."""
    slow, fast = build("bert", HEAD)
    models = {"stock": slow, "accelerated": fast, "native": native(slow)}
    truth_model, labels = copy.deepcopy(slow).double().train(train), torch.tensor([0, 1, 0, 1])
    errors, dtypes = {name: [] for name in models}, set()
    for seed in range(6):
        inputs = first_kept("bert", seed=seed)
        kept = inputs["attention_mask"].bool()
        truth_model.zero_grad()
        truth_model(**inputs, labels=labels).loss.backward()
        truths = {name: p.grad for name, p in truth_model.named_parameters() if p.grad.norm() > 1e-6}
        with torch.no_grad():
            truth = truth_model.bert(**inputs).last_hidden_state[kept]
        for name, model in models.items():
            model.train(train)
            model.zero_grad()
            if train:
                with torch.autocast("cpu", torch.bfloat16):
                    model(**inputs, labels=labels).loss.backward()
                assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
                grads = {key: p.grad for key, p in model.named_parameters()}
                errors[name] += [(grads[key] - t).flatten() / t.norm() for key, t in truths.items()]
                continue
            # all tokens, because the errors of a few logits differ by half their size from draw to draw
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                out = model.bert(**inputs)
            errors[name].append((out.last_hidden_state[kept] - truth).flatten())
            dtypes.add((out.last_hidden_state.dtype, out.pooler_output.dtype))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        fast.bert(**inputs)
    assert len(dtypes) == (not train)
    of_stock = torch.cat(errors.pop("stock")).square().mean()
    for name, found in errors.items():
        assert torch.cat(found).square().mean() <= 1.1 * of_stock, name


# -- dropout -------------------------------------------------------------------------------------------------

COPIES = 600


def same_distribution(fast: nn.Module, slow: nn.Module, name: str) -> None:
    """Mean and variance of every output element over many draws equal the stock model's."""
    row = {k: v[3:] for k, v in first_kept(name, seqlen=6, seed=3).items()}
    row["attention_mask"][0, 5] = 0
    inputs = {k: v.expand(COPIES, -1) for k, v in row.items()}
    samples = []
    for seed, model in enumerate((fast, slow)):
        torch.manual_seed(seed)
        with torch.no_grad():
            samples.append(model(**inputs).last_hidden_state[:, :5].double())
    ours, theirs = samples
    assert theirs.std(0).max() > 0.01
    for statistic in (lambda x: x, lambda x: (x - x.mean(0)).square()):
        a, b = statistic(ours), statistic(theirs)
        error = (a.var(0) / COPIES + b.var(0) / COPIES).sqrt()
        z = (a.mean(0) - b.mean(0)) / error.clamp_min(1e-9)
        # 240 elements, far from independent
        assert z.abs().max() < 5.5, z.abs().max()
        assert z.square().mean() < 4.0, z.square().mean()


@pytest.mark.parametrize(
    ("name", "part", "unpad"),
    [
        (n, p, True)
        for n in ("bert", "distilbert", "albert", "electra", "mpnet", "modernbert", "gte", "big_bird")
        for p in ("hidden", "attention")
    ]
    + [("bert", "hidden", False), ("bert", "attention", False), ("mpnet", "hidden", False)]
    + [("modernbert", "attention", False)],
)
def test_dropout_in_training_is_distributed_as_the_stock_models(name, part, unpad):
    probability = {f"{k}_dropout_prob": 0.2 * (k.startswith(part)) for k in ("hidden", "attention_probs")}
    slow, fast = (m.train() for m in build(name, num_hidden_layers=2, **probability))
    fastbert.accelerate(fast, unpad=unpad)
    with calls(fast, packed=int(unpad), padded=int(not unpad), fused=2, stock=0):
        same_distribution(fast, slow, name)


MONTE_CARLO = {
    "bert": (
        "embeddings.dropout",
        # transformers reads the mode of the attention, not of this module
        "encoder.layer.0.attention.self.dropout",
        "encoder.layer.0.attention.self",
        "encoder.layer.0.attention.output.dropout",
        "encoder.layer.0.output.dropout",
        "encoder.layer.1",
    ),
    "mpnet": ("encoder.layer.0.attention.attn.dropout", "encoder.layer.0.attention.dropout"),
    "distilbert": ("transformer.layer.0.ffn.dropout", "transformer.layer.0.attention"),
    "big_bird": ("embeddings.dropout", "encoder.layer.0.attention.self.dropout"),
    "xlnet": ("layer.0.rel_attn.dropout", "layer.1.ff.dropout"),
    "modernbert": ("layers.0.attn", "layers.0.attn.out_drop", "layers.1.mlp.drop"),
    "albert": (
        "encoder.albert_layer_groups.0.albert_layers.0.attention.output_dropout",
        "encoder.albert_layer_groups.0.albert_layers.0.attention.attention_dropout",
        "encoder.albert_layer_groups.0.albert_layers.0.dropout",  # the stock layer never calls it
    ),
}


@pytest.mark.parametrize(("name", "path"), [(n, p) for n, paths in MONTE_CARLO.items() for p in paths])
def test_dropout_of_one_module_in_an_eval_model(name, path):
    rates = {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.25}
    # Only XLNet reads the last key
    slow, fast = build(name, num_hidden_layers=2, **rates, use_mems_eval=False)
    inputs = first_kept(name)
    with torch.no_grad():
        for model in (slow, fast):
            model(**inputs)
            submodule(model, path).train()
        random = [not torch.equal(m(**inputs)[0], m(**inputs)[0]) for m in (slow, fast)]
        assert random[0] == random[1]
        if random[0]:
            same_distribution(fast, slow, name)
        else:
            same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())
        for model in (slow, fast):
            model.eval()
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())


# -- the gradient of a gradient ------------------------------------------------------------------------------


def _penalty(model, embeds):
    out = model(inputs_embeds=embeds)[0]
    (slope,) = torch.autograd.grad(out.square().sum(), embeds, create_graph=True)
    return slope.square().sum()


def test_gradient_penalty_names_the_way_out():
    slow, fast = build("bert", attention="eager")
    own = fastbert.BertModel(EncoderConfig.from_hf(slow.config)).eval()
    embeds = torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for model in (fast, own):
        with pytest.raises(RuntimeError, match=r"gradient of a gradient .*fastbert\.restore"):
            _penalty(model, embeds).backward()
    expected, actual = (_penalty(m, embeds) for m in (slow, fastbert.restore(fast)))
    assert torch.equal(actual, expected)
    actual.backward()
    assert embeds.grad.isfinite().all()
