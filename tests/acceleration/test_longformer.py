"""Accelerated Longformer: windows' edges, global tokens, arguments, padded calls, heads, dropout."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import fastbert
from tests.models.test_longformer import GLOBALS, LENGTHS, MORE, ragged
from tests.support.accelerated_models import (
    LAYERS,
    MODEL,
    calls,
    close,
    first_kept,
    same_gradients,
    same_outputs,
    stock,
)
from tests.support.model_pairs import no_larger_errors


def both(windows=(8, 16), auto=MODEL, **config):
    """(the stock model, the same model accelerated) in float64."""
    sizes = {"num_hidden_layers": len(windows), "attention_window": list(windows)}
    slow = stock("longformer", auto, **{**sizes, **config}).double()
    return slow, fastbert.accelerate(copy.deepcopy(slow))


def assert_same(slow, fast, inputs, packed=1, **given):
    kept = inputs["attention_mask"].bool()
    depth = slow.config.num_hidden_layers
    with calls(fast, packed=packed, padded=1 - packed, fused=depth, stock=0):
        actual = fast(**inputs, **given)
    same_outputs(actual, slow(**inputs, **given), kept, 1e-9)


@pytest.mark.parametrize(
    ("windows", "lengths", "which"),
    [*(((8, 16), LENGTHS, w) for w in GLOBALS), pytest.param((128,), MORE, "first", marks=pytest.mark.sweep)],
    ids=str,
)
@torch.no_grad()
def test_ragged_lengths_and_global_tokens(windows, lengths, which):
    slow, fast = both(windows, max_position_embeddings=1024)
    inputs = ragged(lengths, which)
    assert_same(slow, fast, inputs, output_hidden_states=True)
    ids, kept, flags = inputs.values()
    assert_same(slow, fast, {"input_ids": ids, "attention_mask": kept * (1 + flags)})
    holes = torch.rand(kept.shape, generator=torch.Generator().manual_seed(1)) > 0.3
    holes[:, 0] = True
    assert_same(slow, fast, inputs | {"attention_mask": kept * holes})


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("which", ["none", "first", "some", "all"])
def test_gradients(which, layout):
    slow, fast = both()
    inputs = ragged((9, 1, 20, 8, 9, 17, 18, 70), which)
    if layout == "padded":
        inputs["attention_mask"][0, 0] = 0
    packed, kept = int(layout == "packed"), inputs["attention_mask"].bool()
    for model in (slow, fast):
        with calls(model, **({"packed": packed, "padded": 1 - packed, "stock": 0} if model is fast else {})):
            rows = model(**inputs).last_hidden_state[kept]
        (rows * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    same_gradients(fast, slow, 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_no_larger_than_the_stock_models(dtype):
    slow, fast = (model.float() for model in both((64, 64)))
    no_larger_errors((fast, slow), dtype, [ragged((70, 64, 65, 70, 33, 70, 66, 70), "some")])


@torch.no_grad()
def test_arguments():
    slow, fast = both()
    inputs = ragged(which="some")
    ids, kept, flags = inputs.values()
    for given in (
        {"attention_mask": kept, "position_ids": torch.randint(2, 70, (1, 70))},
        {"attention_mask": kept, "position_ids": torch.randint(2, 70, (8, 70)), "token_type_ids": ids % 2},
        {"attention_mask": kept.float(), "global_attention_mask": flags.bool()},
        {"attention_mask": kept, "global_attention_mask": flags.int()},
        # Neither 4 nor 3 is global
        {"attention_mask": kept * (1 + flags), "global_attention_mask": flags},
        {"attention_mask": kept, "global_attention_mask": 2 * flags},
        {"global_attention_mask": flags},
        {},
    ):
        with calls(fast, packed=1):
            same_outputs(fast(ids, **given), slow(ids, **given), given.get("attention_mask", kept) > 0, 1e-9)
    with calls(fast, packed=1):  # by position
        close(fast(ids, kept, flags)[0][kept > 0], slow(ids, kept, flags)[0][kept > 0], 1e-9)
    for wrong in (flags[:, :5], flags[:1, :, None]):
        for model in (slow, fast):
            with pytest.raises((RuntimeError, IndexError, ValueError)):
                model(ids, kept, wrong)


def test_padded_calls_run_the_stock_attention():
    slow, fast = both()
    inputs = ragged(which="some")
    with torch.no_grad():
        for options in ({"unpad": False}, {"attention": False}):
            assert_same(slow, fastbert.accelerate(fast, **options), inputs, packed=0)
        fast = fastbert.accelerate(stock("longformer"), dtype="int8", unpad=False)
        with calls(fast, packed=0, padded=1, fused=0, stock=LAYERS):
            fast(**first_kept("longformer"))


@torch.no_grad()
def test_compiled_code_calls_the_model():
    """transformers' own code for global tokens cannot be compiled."""
    slow, fast = both()
    inputs = ragged(which="some")
    compiled, kept = torch.compile(fast, backend="eager"), inputs["attention_mask"].bool()
    with calls(fast, packed=1, fused=2):
        close(compiled(**inputs).last_hidden_state[kept], slow(**inputs).last_hidden_state[kept], 1e-9)


@pytest.mark.parametrize("task", ["SequenceClassification", "QuestionAnswering", "MultipleChoice"])
@torch.no_grad()
def test_heads_choose_their_global_tokens(task, tmp_path):
    """From files of transformers, and after `restore`."""
    slow, _ = both(auto=getattr(transformers, f"AutoModelFor{task}"))
    slow.save_pretrained(tmp_path)
    fast = fastbert.accelerate(type(slow).from_pretrained(tmp_path).eval())
    ids = torch.tensor([[7, 8, 9, 10, 2, 2, 11, 12, 2, 13, 14, 15]])
    ids = ids[None] if task == "MultipleChoice" else ids
    with calls(fast, packed=1, fused=2):
        close(fast(input_ids=ids)[0], slow(input_ids=ids)[0], 1e-9)
    assert all(torch.equal(t, fast.state_dict()[key]) for key, t in slow.state_dict().items())
    fastbert.restore(fast)
    close(fast(input_ids=ids)[0], slow(input_ids=ids)[0], 1e-12)
    assert all(type(a) is type(b) for a, b in zip(fast.modules(), slow.modules(), strict=True))


@torch.no_grad()
def test_tuples_of_a_head_without_a_pooler():
    slow, fast = both(auto=transformers.AutoModelForTokenClassification)
    inputs, found = ragged(which="some"), []
    for model in (slow, fast):
        found.append(model(**inputs, return_dict=False, output_hidden_states=True))
    kept = inputs["attention_mask"].bool()
    assert len(found[0]) == len(found[1]) == 2
    for theirs, ours in zip(*(states for _, states in found), strict=True):
        close(ours[kept], theirs[kept], 1e-9)


def test_dropout_of_probabilities_is_drawn_by_the_attention_modules_mode():
    _, fast = both(attention_probs_dropout_prob=0.4)
    inputs, layer = ragged(which="some"), fast.encoder.layer[0]
    layer.attention.self.train()
    assert layer.dropout_rates() == (0.4, 0.0, 0.0)
    with torch.no_grad(), calls(fast, packed=2, fused=4):
        assert not torch.equal(fast(**inputs)[0], fast(**inputs)[0])
    assert fast.encoder.layer[1].dropout_rates() == (0.0, 0.0, 0.0)
