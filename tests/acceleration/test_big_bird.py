"""Accelerated BigBird: texts of any length beside the stock batches of one, and switched attention."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import fastbert
from tests.models.test_big_bird import alone, texts
from tests.support.accelerated_models import MODEL, calls, close, same_gradients, same_outputs, stock
from tests.support.model_pairs import half_errors, ragged

LAYERS = 2
LONG = {"num_hidden_layers": LAYERS, "max_position_embeddings": 1040, "block_size": 16}
FORMS = {
    "two random blocks": {**LONG, "num_random_blocks": 2},
    "one random block": {**LONG, "block_size": 8, "num_random_blocks": 1},
    "as published": {**LONG, "block_size": 64, "num_random_blocks": 3},
    "scaled, plain": {**LONG, "num_random_blocks": 2, "rescale_embeddings": True, "use_bias": False},
}
# Around the longest full texts, 144 tokens of two random blocks and 704 as published, and of whole blocks
LENGTHS = {"as published": (704, 705, 30, 768)}
SHORTER = (144, 145, 160, 161, 1, 250)


def models(form: str = "two random blocks", auto: type = MODEL, **config):
    """(the stock model, which attends by blocks, the same accelerated), in float64."""
    slow = stock("big_bird", auto, **FORMS[form], **config).double()
    return slow, fastbert.accelerate(copy.deepcopy(slow))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_each_text_equals_its_batch_of_one(form, training):
    """Outputs and gradients, beside shorter and longer texts; random blocks are drawn in training."""
    slow, fast = (model.train(training) for model in models(form))
    inputs = ragged(LENGTHS.get(form, SHORTER))
    before = {key: t.clone() for key, t in fast.state_dict().items()}
    with calls(fast, packed=1, padded=0, fused=LAYERS, stock=0):
        found = fast(**inputs)
    expected = [alone(slow, ids) for ids in texts(inputs)]
    whole = torch.cat([each.last_hidden_state[0] for each in expected])
    kept = found.last_hidden_state[inputs["attention_mask"].bool()]
    close(kept, whole, 1e-9)
    close(found.pooler_output, torch.cat([each.pooler_output for each in expected]), 1e-9)
    for rows, pooled in ((kept, found.pooler_output), (whole, torch.cat([e[1] for e in expected]))):
        (rows.sin().sum() + pooled.sum()).backward()
    same_gradients(fast, slow, 1e-9)
    assert fast.attention_type == "block_sparse"
    assert {key: t.tolist() for key, t in before.items()} == {
        key: t.tolist() for key, t in fast.state_dict().items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_in_half_precision_is_no_larger_than_the_stock_models(dtype):
    """The short text comes last, as it switches the stock model to full attention."""
    mine, theirs = half_errors(models()[::-1], dtype, (ragged((n,)) for n in (250, 145, 144)))
    assert mine.square().mean() <= 1.02 * theirs.square().mean()
    assert mine.max() <= 2 * theirs.max()


@torch.no_grad()
def test_what_attention_is_set_to():
    """A packed call switches nothing. A padded call is the stock model's, and so may switch for good."""
    slow, fast = models()
    short, long = ({"input_ids": ids[None]} for ids in texts(ragged((100, 250))))
    by_blocks = alone(slow, long["input_ids"][0])
    for model in (slow, fast):
        model.set_attention_type("original_full")
    fully = slow(**long)
    assert (fully[0] - by_blocks[0]).abs().max() > 0.1
    every = torch.ones(1, 250).bool()
    with calls(fast, packed=2, stock=0):
        same_outputs(fast(**long), fully, every, 1e-9)
        fast.set_attention_type("block_sparse")
        same_outputs(fast(**long), by_blocks, every, 1e-9)
    fast.encoder.layer[0].register_forward_hook(lambda *_: None)
    with calls(fast, packed=0, padded=2):
        same_outputs(fast(**long), by_blocks, every, 1e-9)
        fast(**short)
    assert fast.attention_type == "original_full"
    fast.encoder.layer[0]._forward_hooks.clear()
    with calls(fast, packed=1, fused=LAYERS):
        same_outputs(fast(**long), fully, every, 1e-9)


@torch.no_grad()
def test_blocks_that_have_changed():
    slow, fast = models()
    (ids,) = texts(ragged((250,)))
    alone(slow, ids)
    for model in (slow, fast):
        for layer in model.encoder.layer:
            layer.attention.get_submodule("self").num_random_blocks = 1
    with calls(fast, packed=1, fused=LAYERS):
        close(fast(ids[None])[0], alone(slow, ids)[0], 1e-9)
    fast.encoder.layer[1].attention.get_submodule("self").num_attention_heads = 2
    assert fastbert.explain(fast).layers[1].reason == "attention.self has other heads"


@torch.no_grad()
def test_dropout():
    """Of the embeddings before their norm; of attention in short texts alone, by the config."""
    slow, fast = models()
    long, short = (ids[None] for ids in texts(ragged((250, 100))))
    for model in (slow, fast):
        model.embeddings.dropout.p = 0.5
        model.embeddings.train()
    torch.manual_seed(0)
    expected = alone(slow, long[0])[0]
    torch.manual_seed(0)
    with calls(fast, packed=1, fused=LAYERS):
        close(fast(long)[0], expected, 1e-9)
    fast.eval()
    fast.config.attention_probs_dropout_prob = 0.5
    assert torch.equal(fast(short)[0], fast(short)[0])
    for layer in fast.encoder.layer:
        layer.attention.get_submodule("self").train()
    with calls(fast, packed=4, fused=4 * LAYERS):
        assert torch.equal(fast(long)[0], fast(long)[0])
        assert (fast(short)[0] - fast(short)[0]).abs().amax(2).min() > 1e-3
    fast.config.attention_probs_dropout_prob = 1.0
    assert "dropout_prob" in fastbert.explain(fast).layers[0].reason


@pytest.mark.parametrize("asked", ["first token", "attentions", "unpad", "hook", "strict"])
@torch.no_grad()
def test_what_runs_as_stock(asked):
    slow, fast = models()
    inputs = ragged((256, 200))
    if asked == "first token":
        inputs["attention_mask"][0, 0] = 0
    given = {"output_attentions": True} if asked == "attentions" else {}
    if asked == "unpad":
        fastbert.accelerate(fast, unpad=False)
    if asked == "hook":
        for model in (slow, fast):
            model.encoder.layer[0].attention.get_submodule("self").query.register_forward_hook(
                lambda _, __, y: 2 * y
            )
    if asked == "strict":
        fastbert.accelerate(fast, unpad=False, strict=True)
        with pytest.raises(RuntimeError, match="only the stock layer attends by blocks of a padded batch"):
            fast(**inputs)
        return
    with calls(fast, packed=0, padded=1, fused=0, stock=LAYERS):
        actual = fast(**inputs, **given)
    same_outputs(actual, slow(**inputs, **given), inputs["attention_mask"].bool(), 1e-12)


@torch.no_grad()
def test_hidden_states_of_a_long_text():
    slow, fast = models()
    (ids,) = texts(ragged((161,)))
    with calls(fast, packed=1, fused=LAYERS):
        actual = fast(ids[None], output_hidden_states=True)
    expected = alone(slow, ids, output_hidden_states=True)
    assert len(actual.hidden_states) == len(expected.hidden_states)
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        close(ours, theirs[:, :161], 1e-9)  # theirs are padded to whole blocks


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(reentrant):
    slow, fast = (model.train() for model in models())
    fast.gradient_checkpointing_enable({"use_reentrant": reentrant})
    (ids,) = texts(ragged((161,)))
    for output in (fast(ids[None]), alone(slow, ids)):
        output.last_hidden_state.sin().sum().backward()
    same_gradients(fast, slow, 1e-9)


@pytest.mark.parametrize("lengths", [None, (7, 3)])
@torch.no_grad()
def test_the_question_is_no_answer(lengths):
    slow, fast = models(auto=transformers.AutoModelForQuestionAnswering)
    inputs = ragged((180, 160))
    inputs["input_ids"][:, 5] = 66
    given = {} if lengths is None else {"question_lengths": torch.tensor(lengths)[:, None]}
    with calls(fast, packed=1, fused=LAYERS):
        found = fast(**inputs, **given)
    for row, ids in enumerate(texts(inputs)):
        own = {key: value[row : row + 1] for key, value in given.items()}
        expected = alone(slow, ids, **own)
        for key in ("start_logits", "end_logits"):
            close(found[key][row, : len(ids)], expected[key][0], 1e-9)
            assert found[key][row].softmax(0)[len(ids) :].sum() == 0  # masked tokens


@torch.no_grad()
def test_a_folder_of_transformers_and_the_way_back(tmp_path):
    slow, fast = models()
    (ids,) = texts(ragged((250,)))
    expected = alone(slow, ids)
    slow.save_pretrained(tmp_path)
    loaded = fastbert.accelerate(transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float64))
    with calls(loaded, packed=1, fused=LAYERS):
        close(loaded(ids[None])[0], expected[0], 1e-9)
    fastbert.restore(fast)
    assert [type(m) for m in fast.modules()] == [type(m) for m in slow.modules()]
    assert torch.equal(fast(ids[None])[0], expected[0])
