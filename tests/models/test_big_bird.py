"""BigBird: texts of any length beside transformers' batches of one, random blocks, heads, configs."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

import fastbert
from fastbert.execution import cpu
from fastbert.execution.call import Call
from fastbert.layers import block_sparse
from fastbert.layers.batch import Blocks, PackedBatch
from fastbert.layers.taps import Taps
from tests.support.accelerated_models import same_gradients
from tests.support.hf_models import hf_model
from tests.support.model_pairs import NO_DROPOUT, close, kept_rows, native, ragged

LONG = {"num_hidden_layers": 2, "max_position_embeddings": 1040, "block_size": 16, "num_random_blocks": 2}
FORMS = {
    "two random blocks": LONG,
    "one random block": {**LONG, "block_size": 8, "num_random_blocks": 1},
    "three, plain": {**LONG, "block_size": 5, "num_random_blocks": 3, "use_bias": False},
    "scaled": {**LONG, "rescale_embeddings": True},
}
# Around the longest full text (144 with blocks of 16), around a whole number of blocks, and one token
LENGTHS = (144, 145, 159, 160, 161, 176, 1, 250)


@functools.cache
def both(form, auto=transformers.AutoModel, **config):
    """(transformers' model, ours) in float64 and in eval."""
    hf = hf_model("big_bird", auto, **{**FORMS[form], **NO_DROPOUT, **config})
    return hf.double(), native(hf).double()


def alone(hf, ids, **kwargs):
    """A text in a batch of one; a short one before has switched the model to full attention for ever."""
    hf.base_model.set_attention_type("block_sparse")
    return hf(ids[None], **kwargs)


def texts(inputs):
    return [ids[mask.bool()] for ids, mask in zip(*inputs.values(), strict=True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_each_text_equals_its_batch_of_one(form, training):
    """Padded and packed, beside shorter and longer texts."""
    hf, model = (copy.deepcopy(m).train(training) for m in both(form))
    inputs = ragged(LENGTHS)
    expected = torch.cat([alone(hf, ids).last_hidden_state[0] for ids in texts(inputs)])
    found = kept_rows(model, inputs)
    close(found, expected, 1e-9)
    packed = dict(cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int())
    close(model(torch.cat(texts(inputs)), **packed).last_hidden_state, found, 1e-12)
    # Left padding and holes move no block
    inputs["attention_mask"] *= torch.rand(8, 250, generator=torch.Generator().manual_seed(1)) > 0.2
    expected = torch.cat([model(ids[None]).last_hidden_state[0] for ids in texts(inputs)])
    at = inputs["attention_mask"].cumsum(1) - 1
    close(kept_rows(model, {**inputs, "position_ids": at.clamp_min(0)}), expected, 1e-12)


@pytest.mark.parametrize("lengths", [(145,), (200, 40), pytest.param((1024, 250), marks=pytest.mark.sweep)])
def test_gradients_in_training(lengths):
    """1024 tokens draw their random blocks in another way (transformers#16566)."""
    hf, model = (copy.deepcopy(m).train() for m in both("two random blocks"))
    inputs = ragged(lengths)
    sum(alone(hf, ids).last_hidden_state.sin().sum() for ids in texts(inputs)).backward()
    kept_rows(model, inputs).sin().sum().backward()
    same_gradients(model, hf, 1e-9)


@pytest.mark.parametrize(
    ("size", "random", "positions"), [(64, 3, 4096), (64, 2, 3072), (32, 1, 4096), (16, 2, 1040)]
)
def test_random_blocks_are_transformers_own(size, random, positions):
    sizes = dict(num_attention_heads=2, hidden_size=8, block_size=size, num_random_blocks=random)
    theirs = BigBirdBlockSparseAttention(
        transformers.BigBirdConfig(max_position_embeddings=positions, **sizes)
    )
    for seed, n in enumerate((1024, 3072, 4096, (6 + 2 * random) * size, (9 + 3 * random) * size)):
        np.random.seed(seed)
        if n > positions:
            continue
        if n in (1024, 3072, 4096):
            drawn = [
                theirs._bigbird_block_rand_mask(*(positions,) * 2, size, size, random, 1024) for _ in "12"
            ]
        else:
            plan = theirs._get_rand_attn_plan(n, size, random)
            drawn = theirs._bigbird_block_rand_mask_with_head(n, n, size, size, 2, *plan)
        before = np.random.get_state()[1].copy()
        ours = block_sparse.random_blocks(Blocks(size, random, seed, 2, positions), n // size)
        assert np.array_equal(ours, np.stack(drawn)[:, : n // size - 2])
        assert np.array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize("kind", ["whole model", "autocast", "as on a GPU"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_error_is_no_larger_than_transformers_own(dtype, kind, monkeypatch):
    if kind == "as on a GPU":
        monkeypatch.setattr(block_sparse, "_bias_dtype", lambda q: q.dtype)
    hf = hf_model("big_bird", **LONG).to(dtype)
    model = native(hf).to(dtype)
    exact, (ids,) = copy.deepcopy(hf).double(), ragged((250,))["input_ids"][None]
    truth = alone(exact, ids[0]).last_hidden_state
    expected = alone(hf, ids[0])
    # transformers' own model does not run under autocast
    with torch.autocast("cpu", dtype, enabled=kind == "autocast"):
        found = (model.float() if kind == "autocast" else model)(ids)
    mine, theirs = ((each.last_hidden_state.double() - truth).abs() for each in (found, expected))
    assert mine.mean() <= theirs.mean()
    assert mine.square().mean() <= theirs.square().mean()


def _hooked(model, inputs):
    """Every module is called, on the padded batch."""
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        return kept_rows(model, inputs)


def _dense(model, inputs):
    return model(**inputs, output_attentions=True).last_hidden_state[inputs["attention_mask"].bool()]


def _tapped(model, inputs):
    with fastbert.models.encoder.tapped(model, Taps()):
        return kept_rows(model, inputs)


def _compiled(model, inputs):
    torch._dynamo.reset()
    return kept_rows(torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager"), inputs)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", [_hooked, _dense, _tapped, pytest.param(_compiled, marks=pytest.mark.sweep)])
@torch.no_grad()
def test_every_way_through_the_layers_is_equal(way, training):
    model, inputs = copy.deepcopy(both("two random blocks")[1]).train(training), ragged((160, 144, 0, 197))
    if way is _compiled and training:
        with pytest.raises(Exception, match="training with random blocks is not compiled"):
            way(model, inputs)
        return
    close(way(model, inputs), kept_rows(model, inputs), 1e-10)


@torch.no_grad()
def test_probabilities():
    """Rows have the sum 1. transformers has one of the 1 + random equal shares of block 0."""
    hf, model = both("two random blocks")
    (ids,) = ragged((160,))["input_ids"]
    expected = alone(hf, ids, output_attentions=True).attentions
    found = model(ids[None], output_attentions=True).attentions
    for ours, theirs in zip(found, expected, strict=True):
        close(ours.sum(-1), torch.ones_like(ours[..., 0]), 1e-12)
        ours[:, :, 16:144, :16] /= 3
        close(ours, theirs, 1e-12)


def test_attention_drops_nothing_in_long_texts():
    model = copy.deepcopy(both("two random blocks")[1]).train()
    for layer in model.layer_list():
        layer.attention.get_submodule("self.dropout").p = 0.5
    long, short = ragged((160,)), ragged((144,))
    assert torch.equal(kept_rows(model, long), kept_rows(model, long))
    assert not torch.equal(kept_rows(model, short), kept_rows(model, short))


@torch.no_grad()
def test_head_mask_and_first_tokens_of_long_texts():
    model, inputs, gates = both("two random blocks")[1], ragged((160, 9)), torch.tensor([0.5, 1.0, 0.0])
    cut = copy.deepcopy(model)
    for layer in cut.layer_list():
        layer.attention.output.dense.weight.mul_(gates.repeat_interleave(16))
    found = model(**inputs, head_mask=gates).last_hidden_state
    close(found, cut(**inputs).last_hidden_state, 1e-12)
    first = model(**inputs, first_token_only=True).last_hidden_state
    close(first, model(**inputs).last_hidden_state[:, :1], 1e-12)


def test_executors_of_berts_layers_refuse_long_texts_alone():
    model = both("two random blocks")[1]
    assert not any(layer.form.kinds for layer in model.layer_list())
    x, refused = torch.randn(145, 48), "a text is long enough to attend by blocks"
    for n, reason in ((144, None), (145, refused)):
        batch = PackedBatch(torch.tensor([0, n], dtype=torch.int32), n)
        lengths = block_sparse.lengths_of(batch, model.layer_list()[0].form.blocks)
        with torch.no_grad():
            call = Call(replace(batch, lengths=lengths), 1)
        assert cpu.serves(x, call) == reason


@pytest.mark.parametrize("lengths", [None, (7, 3)])
@torch.no_grad()
def test_the_question_is_no_answer(lengths):
    hf, model = both("two random blocks", transformers.AutoModelForQuestionAnswering)
    ids = ragged((20, 180))["input_ids"].where(ragged((20, 180))["input_ids"] != 66, 67)
    ids[0, 5] = ids[0, 9] = 66  # the second text has no [SEP]
    given = {} if lengths is None else {"question_lengths": torch.tensor(lengths)[:, None]}
    found = model(ids, **given)
    hf.base_model.set_attention_type("block_sparse")
    expected = hf(ids, **given)
    packed = {key: t.reshape(-1) for key, t in given.items()}
    flat = model(ids.flatten(), cu_seqlens=torch.tensor([0, 180, 360], dtype=torch.int32), **packed)
    for key in ("start_logits", "end_logits"):
        close(found[key], expected[key], 1e-9)
        close(flat[key].view(2, 180), found[key], 1e-12)
    with pytest.raises(ValueError, match=r"question_lengths: expected shape \(2,\) or \(2, 1\), got \(3,\)"):
        model(ids, question_lengths=torch.ones(3, dtype=torch.long))


def test_words_alone_have_a_loss():
    hf, model = both("two random blocks", transformers.AutoModelForPreTraining)
    inputs = ragged((20, 9))
    labels = inputs["input_ids"].where(inputs["attention_mask"].bool(), -100)
    close(model(**inputs, labels=labels).loss, hf(**inputs, labels=labels).loss, 1e-9)
