"""ModernBERT against transformers: windows, rotary positions, heads, dropout."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
import transformers

import fastbert
from fastbert.execution import launchers
from fastbert.execution.call import Call
from fastbert.execution.plan import explain, survey
from fastbert.layers import positions
from fastbert.layers.batch import PackedBatch
from fastbert.models.config import EncoderConfig
from fastbert.models.inputs import check_inputs, packed_on_host
from fastbert.runtime.loader import extension
from tests.support.accelerated_models import same_gradients
from tests.support.hf_models import batch, hf_config, hf_model
from tests.support.model_pairs import (
    build,
    close,
    inputs_for,
    kept_rows,
    labels_for,
    native,
    ragged,
    same_packed_and_alone,
    token_level,
)

# Around the window's edges: 64 tokens each side
LENGTHS = (1, 64, 65, 129, 130, 131)
MORE = (2, 63, 66, 128, 257, 600)


@functools.cache
def both(**config):
    """(transformers' model, ours), in float32 and in eval; shared between tests that change neither."""
    hf = hf_model("modernbert", num_hidden_layers=4, **config)
    return hf, native(hf)


@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param(MORE, marks=pytest.mark.sweep)], ids=str)
@torch.no_grad()
def test_lengths_around_the_window(lengths):
    """Off by one, or twice as wide (huggingface/transformers#40163); no window or mask in some layers
    (sgl-project/sglang#39298); other numbers in a batch (huggingface/sentence-transformers#2312, #3109).

    Some are longer than the positions of the config: no table limits them.
    """
    hf, model = (copy.deepcopy(m).double() for m in both(local_attention=128))
    inputs = ragged(lengths)
    found = kept_rows(model, inputs)
    close(found, kept_rows(hf, inputs), 1e-9)
    same_packed_and_alone(model, inputs, found)
    first = model(**inputs, first_token_only=True).last_hidden_state[:, 0]
    close(first, model(**inputs).last_hidden_state[:, 0], 1e-12)


# --- forms of the layers ------------------------------------------------------------------------------------

BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("ForMaskedLM", {**BIASES, "decoder_bias": False, "hidden_act": "silu"}),
        ("ForSequenceClassification", {"classifier_pooling": "mean", "classifier_activation": "silu"}),
        ("ForMultipleChoice", {"classifier_pooling": "mean"}),
        ("ForTokenClassification", {**BIASES, "num_hidden_layers": 1}),
        ("ForMaskedLM", {"sparse_prediction": True, "tie_word_embeddings": False}),
    ],
)
def test_forms_and_heads_equal_transformers(task, config, tmp_path):
    hf, model = (m.double() for m in build("modernbert", task, **config))
    inputs = inputs_for("modernbert", task)
    inputs["attention_mask"][..., 0] = 1
    labels = labels_for(hf, inputs)
    found, wanted = model(**inputs, **labels), hf(**inputs, **labels)
    for out in (found, wanted):
        out.loss.backward()
    same_gradients(model, hf, 1e-9)
    kept = inputs["attention_mask"].bool()
    same = token_level(found.logits, kept)
    close(found.logits[kept] if same else found.logits, wanted.logits[kept] if same else wanted.logits, 1e-9)
    model.save_pretrained(tmp_path)
    again = type(hf).from_pretrained(tmp_path)
    assert all(torch.equal(t, again.state_dict()[k]) for k, t in hf.state_dict().items())


@pytest.mark.parametrize("task", ["MaskedLM", "TokenClassification"])
def test_first_weights_are_drawn_as_transformers_draws_them(task):
    config = hf_config("modernbert", hidden_size=96, num_labels=64, vocab_size=2000)
    theirs = getattr(transformers, f"ModernBertFor{task}")(config)
    model = getattr(fastbert, f"ModernBertFor{task}")(EncoderConfig.from_hf(config))
    for key, value in model.state_dict().items():
        expected = theirs.state_dict()[key]
        assert value.std().item() == pytest.approx(expected.std().item(), rel=0.1, abs=1e-9), key
        assert value.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.1), key


@torch.no_grad()
def test_the_dropout_inside_the_feed_forward_block():
    """The last sum is linear in what it drops, so that the mean over masks is the sum without dropout."""
    model, states = native(hf_model("modernbert", num_hidden_layers=1, mlp_dropout=0.5)), []
    model.final_norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    ids = torch.randint(5, 120, (1, 20), generator=torch.Generator().manual_seed(0)).repeat(400, 1)
    model.eval()(ids[:1])
    model.train()(ids)
    plain, dropped = states
    error = (dropped.mean(0) - plain[0]) / (dropped.std(0) / 20)
    assert dropped.std(0).mean() > 0.1
    assert error.abs().mean() < 1.0
    assert error.abs().max() < 6.0


@torch.no_grad()
def test_position_ids():
    """They rotate and move no window; larger ones than the config's make the table longer."""
    hf, model = (copy.deepcopy(m).double() for m in both(local_attention=16))
    inputs = batch("modernbert")
    given = torch.randint(0, 3000, (4, 40), generator=torch.Generator().manual_seed(1))
    close(
        kept_rows(model, {**inputs, "position_ids": given}),
        kept_rows(hf, {**inputs, "position_ids": given}),
        1e-9,
    )
    with pytest.raises(ValueError, match=r"position_ids: position -.* is outside"):
        model(**inputs, position_ids=given - 3000)


def test_holes_are_found_where_the_extension_packs():
    config, served = EncoderConfig.from_hf(hf_config("modernbert")), set()
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        mask = torch.arange(6) < torch.randint(0, 7, (3, 1), generator=g)
        mask &= (torch.rand(3, 6, generator=g) > (seed % 3) / 8) | (torch.arange(6) == 0)
        given = torch.full((3, 6), 7), mask, None
        found = packed_on_host(config, torch.device("cpu"), *given)
        if found is not None:
            wanted = check_inputs(config, torch.device("cpu"), *given, None, None)
            assert found.holes == wanted.holes
            assert torch.equal(found.position_ids, wanted.position_ids)
            served.add(found.holes)
    assert served == ({True, False} if extension else set())


@torch.no_grad()
def test_tables_grow_and_serve_both_modes():
    def lengths():
        return {tuple(len(cos) for cos, _ in tables) for tables in positions._tables.values()}

    positions._tables.clear()
    model = native(hf_model("modernbert"))
    with torch.inference_mode():
        model(torch.full((1, 600), 7))
    assert lengths() == {(1024,)}
    with torch.enable_grad():
        model(torch.full((1, 5), 7)).last_hidden_state.sum().backward()
    model(torch.full((1, 1025), 7))
    assert lengths() == {(1024, 2048)}


def test_executors_take_the_layers_or_refuse_them_by_name():
    _, model = both()
    steps, x = survey(model.layer_list()), torch.randn(5, 48)
    call = Call(PackedBatch(torch.tensor([0, 5], dtype=torch.int32), 5), 3)
    words = "it does not know layers with gated, packed, pre_norm, rotary, window"
    assert launchers.takes(steps[1], x, call) == words
    call.inference = True
    if extension:
        assert [served[:3] for served in explain(steps, x, call)] == [(0, 3, "cpu")]
    call.batch = dataclasses.replace(call.batch, columns=torch.arange(5)[None])
    words = "kept tokens are not adjacent, and layers count columns"
    for served in explain(steps, x, call):
        assert served.executor == "eager"
        assert served.refused["cpu"] == words


@torch.no_grad()
def test_fewer_heads_and_inner_columns():
    """Against the whole model with a head mask, and zeros in place of the columns that are gone."""
    whole = native(hf_model("modernbert")).double()
    gone, inner = {0: [1], 2: [0, 2]}, [80, 33, 50]
    values = whole.config.to_dict()
    small = EncoderConfig.from_dict(values, pruned_heads=gone, intermediate_sizes=inner)
    small = fastbert.ModernBertModel(small).double().eval()
    gates = torch.ones(3, 3)
    for number, (a, b) in enumerate(zip(small.layer_list(), whole.layer_list(), strict=True)):
        gates[number, gone.get(number, [])] = 0
        rows = gates[number].bool().repeat_interleave(16)
        kept = torch.arange(80) < inner[number]
        b.mlp.Wo.weight[:, ~kept] = 0
        a.attn.Wqkv.weight.copy_(b.attn.Wqkv.weight[rows.repeat(3)])
        a.attn.Wo.weight.copy_(b.attn.Wo.weight[:, rows])
        a.mlp.Wi.weight.copy_(b.mlp.Wi.weight[kept.repeat(2)])
        a.mlp.Wo.weight.copy_(b.mlp.Wo.weight[:, kept])
    rest = {k: v for k, v in whole.state_dict().items() if ".attn." not in k and ".mlp." not in k}
    small.load_state_dict(rest, strict=False)
    inputs = batch("modernbert")
    close(kept_rows(small, inputs), kept_rows(whole, {**inputs, "head_mask": gates}), 1e-9)
    for layer in small.layer_list():
        layer.register_forward_hook(lambda *_: None)
    close(kept_rows(small, inputs), kept_rows(whole, {**inputs, "head_mask": gates}), 1e-9)


@torch.no_grad()
def test_a_norm_that_is_called_itself():
    """The sum before it is the feed-forward block's residual all the same."""

    def as_fsdp(*_): ...

    as_fsdp.__module__ = "torch.distributed.fsdp"  # a hook that leaves the tokens packed
    model, inputs = native(hf_model("modernbert")).double(), batch("modernbert")
    expected = kept_rows(model, inputs)
    for layer in model.layer_list():
        layer.mlp_norm.register_forward_hook(as_fsdp)
    assert model.gap() is None
    close(kept_rows(model, inputs), expected, 1e-9)
