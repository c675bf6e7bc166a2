"""Results of accelerated and of native models for every argument and mask, against the untouched model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastbert
from tests.models import test_deberta_v2, test_mobilebert
from tests.support.accelerated_models import (
    HEAD,
    LAYERS,
    build,
    calls,
    close,
    first_kept,
    layer_calls,
    pair,
    same_gradients,
    same_outputs,
    stock,
)
from tests.support.hf_models import ACCELERATED
from tests.support.model_pairs import half_errors, native

native_of = functools.cache(lambda *args, **config: native(pair(*args, **config)[0]))
MASKS = ("right", "holes", "left", "ones", "none", "empty-row")

# -- every family, every head --------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ACCELERATED)
def test_families_give_the_stock_outputs(name, mask):
    slow, fast = pair(name)
    inputs = first_kept(name)
    kept = inputs["attention_mask"]
    if mask in ("right", "left"):
        lengths = torch.tensor([40, 1, 17, 28])
        kept[:] = torch.arange(40)[None] < lengths[:, None]
        if mask == "left":
            kept[:] = kept.flip(1)
    elif mask == "ones":
        kept[:] = 1
    elif mask == "empty-row":
        kept[3] = 0
    if mask == "none":
        inputs.pop("attention_mask")
        kept = torch.ones_like(inputs["input_ids"])
    kept = kept.bool()
    packed = int(mask != "left")
    asked = {"output_hidden_states": True} if mask == "holes" else {}
    with torch.no_grad(), calls(fast, packed=packed, padded=1 - packed, fused=layer_calls(name), stock=0):
        actual = fast(**inputs, **asked)
    with torch.no_grad():
        expected = slow(**inputs, **asked)
    if mask == "empty-row":  # the result for a sequence without tokens is undefined, but finite
        assert all(value.isfinite().all() for value in actual.values())
        kept, actual, expected = kept[:3], _rows(actual, 3), _rows(expected, 3)
    same_outputs(actual, expected, kept)
    if packed:
        for hidden in (actual.last_hidden_state, *(actual.get("hidden_states") or ())):
            assert hidden[~kept].eq(0).all()
    if asked:
        assert actual.hidden_states[-1] is actual.last_hidden_state


def _rows(output, count: int):
    return type(output)(**{key: value[:count] for key, value in output.items()})


@pytest.mark.parametrize(
    "name",
    [
        *("bert", "roberta", "albert", "distilbert", "electra", "mpnet", "modernbert", "gte", "eurobert"),
        *("deberta-v2", "mobilebert", "longformer", "xlnet"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_no_larger_than_the_stock_models(name, dtype):
    slow, fast = pair(name)
    mine, theirs = half_errors((fast, slow), dtype, (first_kept(name, seed=seed) for seed in range(6)))
    assert mine.square().mean() <= 1.02 * theirs.square().mean()
    assert mine.max() <= 2 * theirs.max()


FORMS = {"deberta-v2": test_deberta_v2.FORMS, "mobilebert": test_mobilebert.FORMS}


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS.items() for form in forms])
def test_forms_of_layers(name, form, layout):
    """Outputs and gradients of the stock model. MobileBERT's reads the masked neighbour after a sequence."""
    slow = stock(name, HEAD, **FORMS[name][form]).double()
    slow.get_input_embeddings().weight.data[0] = 1.0  # of [PAD]
    fast = fastbert.accelerate(copy.deepcopy(slow))
    inputs, labels = first_kept(name), torch.tensor([1, 0, 1, 1])
    if layout == "padded":
        inputs["attention_mask"][1, 0] = 0
    inputs["input_ids"][0, 20] = 9
    packed = int(layout == "packed")
    with calls(fast, packed=packed, padded=1 - packed, fused=LAYERS, stock=0):
        actual = fast(**inputs, labels=labels)
    expected = slow(**inputs, labels=labels)
    close(actual.logits, expected.logits, 1e-9)
    for output in (actual, expected):
        output.loss.backward()
    same_gradients(fast, slow, 1e-9)


@pytest.mark.parametrize(
    ("name", "config"),
    [("bert", {"hidden_act": act}) for act in ("gelu_new", "relu", "silu", "tanh", "mish")]
    + [("ernie", {"use_task_id": True})],
    ids=str,
)
def test_configs(name, config):
    """Also an activation that our ops lack, and ERNIE's table of tasks."""
    slow, fast = build(name, **config)
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    for more in ({}, {"task_type_ids": torch.randint(0, 3, (4, 40))}) if name == "ernie" else ({},):
        with torch.no_grad():
            same_outputs(fast(**inputs, **more), slow(**inputs, **more), kept)


def test_chunked_feed_forward():
    slow, fast = build("bert", chunk_size_feed_forward=5)
    inputs = first_kept("bert")
    with torch.no_grad(), calls(fast, packed=0, padded=1, fused=0, stock=LAYERS):  # it saves memory there
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACCELERATED)
def test_inputs_embeds_and_their_gradient(name):
    slow, fast, own = (copy.deepcopy(m).double() for m in (*pair(name), native(pair(name)[0])))
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    theirs = slow.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    expected = slow(inputs_embeds=theirs, **inputs)
    expected.last_hidden_state[kept].square().sum().backward()
    for model in (fast, own):
        mine = theirs.detach().clone().requires_grad_()
        with calls(model, **({"packed": 1, "fused": layer_calls(name)} if model is fast else {})):
            actual = model(inputs_embeds=mine, **inputs)
        same_outputs(actual, expected, kept, 1e-12, types=model is fast)
        actual.last_hidden_state[kept].square().sum().backward()
        # Our own MobileBERT does not read masked neighbours
        same = kept if model is own and name == "mobilebert" else torch.ones_like(kept)
        close(mine.grad[same], theirs.grad[same], 1e-9)
        gradient, mine.grad = mine.grad, None
        model.requires_grad_(False)  # as attributions and adversarial examples have it
        model(inputs_embeds=mine, **inputs).last_hidden_state[kept].square().sum().backward()
        close(mine.grad, gradient, 1e-12)


@pytest.mark.parametrize(
    "name", [*("bert", "roberta", "distilbert", "albert", "mpnet", "modernbert", "nomic_bert"), "mobilebert"]
)
def test_positions_and_types_given_by_hand(name):
    slow, fast = pair(name)
    inputs, own = first_kept(name), native(slow)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        for positions in (torch.randint(2, 70, (1, 40)), torch.randint(2, 70, (4, 40))):
            given = inputs | {"position_ids": positions}
            same_outputs(fast(**given), slow(**given), kept)
            same_outputs(own(**given), slow(**given), kept, types=False)
            if "token_type_ids" in given:  # by position
                same_outputs(fast(*given.values()), slow(*given.values()), kept)
        inputs = {k: v.int() for k, v in inputs.items() if k != "token_type_ids"}
        with calls(fast, packed=1):
            same_outputs(fast(**inputs), slow(**inputs), kept)


def test_an_embedding_without_a_weight_takes_embeddings():
    """captum's InterpretableEmbeddingBase, which returns what comes in place of ids."""

    class Interpretable(torch.nn.Module):
        def forward(self, *inputs, **kwargs):
            return inputs[0] if inputs else next(iter(kwargs.values()))

    models, outputs = build("bert"), []
    x = models[0].embeddings.word_embeddings(first_kept("bert")["input_ids"]).detach()
    for model in models:
        model.embeddings.word_embeddings = Interpretable()
        given = x.clone().requires_grad_()
        out = model(inputs_embeds=given).last_hidden_state
        outputs.append((out, *torch.autograd.grad(out[..., 0].sum(), given)))
    for want, got in zip(*outputs, strict=True):
        close(got, want)


def test_roberta_counts_positions_by_ids_not_by_the_mask():
    slow, fast = pair("roberta")
    inputs = first_kept("roberta")
    ids = torch.randint(5, 120, (4, 40))
    ids[0, 3] = ids[2, 7:9] = 1  # pads that are attended to; and masked tokens that are none
    inputs["input_ids"] = ids
    with torch.no_grad():
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())


@pytest.mark.parametrize(
    "name",
    [*("bert", "distilbert", "albert", "mpnet", "modernbert", "nomic_bert"), "mobilebert", "longformer"],
)
def test_tuples(name):
    slow, fast = pair(name)
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        for extra in ({}, {"output_hidden_states": True}):
            expected = slow(**inputs, **extra, return_dict=False)
            actual = fast(**inputs, **extra, return_dict=False)
            assert type(actual) is type(expected) is tuple
            assert [type(a) for a in actual] == [type(e) for e in expected]
            assert len(actual[-1]) == len(expected[-1])
            close(actual[0][kept], expected[0][kept])


def test_outputs_asked_for_by_the_config():
    slow, fast = build("bert")
    inputs = first_kept("bert")
    for model in (slow, fast):
        model.config.output_hidden_states = True
    with torch.no_grad():
        expected, actual = slow(**inputs), fast(**inputs)
        same_outputs(actual, expected, inputs["attention_mask"].bool())
        assert len(actual.hidden_states) == LAYERS + 1
        for model in (slow, fast):
            model.config.return_dict = False
        assert [type(v) for v in fast(**inputs)] == [type(v) for v in slow(**inputs)]


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert"])
def test_attentions_asked_for_by_the_config(name):
    slow, fast = build(name, attention="eager")
    inputs = first_kept(name)
    for model in (slow, fast):
        model.config.output_attentions = True
    with torch.no_grad(), calls(fast, packed=0, padded=1, fused=0, stock=LAYERS):
        actual, expected = fast(**inputs), slow(**inputs)
    same_outputs(actual, expected, inputs["attention_mask"].bool())
    assert len(actual.attentions) == LAYERS


def test_some_hidden_states_only():
    slow, fast = pair("bert")
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    for selected in (1, [0, -1], [-2]):
        with torch.no_grad():
            expected, actual = (
                m(**inputs, output_hidden_states=selected).hidden_states for m in (slow, fast)
            )
        assert [a is None for a in actual] == [e is None for e in expected]
        assert any(e is None for e in expected)
        for a, e in zip(actual, expected, strict=True):
            assert e is None or close(a[kept], e[kept]) is None


@pytest.mark.parametrize("name", ACCELERATED)
def test_attention_probabilities_come_from_the_stock_layers(name):
    slow, fast = build(name, attention="eager")
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = slow(**inputs, output_attentions=True, output_hidden_states=True)
        with calls(fast, packed=0, padded=1, fused=0, stock=layer_calls(name)):
            actual = fast(**inputs, output_attentions=True, output_hidden_states=True)
        same_outputs(actual, expected, kept)
        assert len(actual.attentions) == layer_calls(name)
        # Longformer's first window has 4 tokens besides the token's own
        assert actual.attentions[0].shape == (4, 3, 40, 5 if name == "longformer" else 40)
        # the stock model never removes its hooks from the layers; they must not matter
        with calls(fast, packed=1, fused=layer_calls(name), stock=0):
            close(fast(**inputs)[0][kept], expected[0][kept])


@pytest.mark.parametrize(
    ("name", "attention", "kind"),
    [
        ("bert", "sdpa", "bool"),
        ("bert", "eager", "additive"),
        ("bert", "sdpa", "per-head"),
        ("roberta", "sdpa", "bool"),
        ("distilbert", "sdpa", "additive"),
        ("electra", "sdpa", "per-head"),
        ("albert", "sdpa", "additive"),
        ("mpnet", "eager", "additive"),
        ("nomic_bert", "sdpa", "bool"),
        ("mpnet", "eager", "per-head"),
        ("mobilebert", "sdpa", "bool"),
    ],
)
def test_four_dimensional_masks(name, attention, kind):
    slow, fast = build(name, attention=attention)
    slow, fast = slow.double(), fast.double()
    ids = first_kept(name)["input_ids"]
    allowed = (torch.rand(4, 1, 40, 40) > 0.3) | torch.eye(40, dtype=torch.bool)
    if kind == "bool":
        mask = allowed
    elif kind == "additive":
        mask = torch.zeros(4, 1, 40, 40, dtype=torch.float64).masked_fill(~allowed, -1e30)
    else:
        mask = torch.randn(4, 3, 40, 40, dtype=torch.float64)
    expected = slow(ids, attention_mask=mask)
    expected.last_hidden_state.square().sum().backward()
    for model in (fast, native(slow).double()):
        with calls(model, **({"packed": 0, "padded": 1, "fused": LAYERS} if model is fast else {})):
            actual = model(ids, attention_mask=mask)
        same_outputs(actual, expected, torch.ones_like(ids).bool(), 1e-12, types=model is fast)
        actual.last_hidden_state.square().sum().backward()
        same_gradients(model, slow, 1e-9)


def test_masks_of_every_dtype():
    slow, fast = pair("bert")
    inputs = first_kept("bert")
    for model in (fast, native(slow)):
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
            for dtype in (torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16):
                given = inputs | {"attention_mask": inputs["attention_mask"].to(dtype)}
                assert torch.equal(model(**given).last_hidden_state, expected)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("shape", [(1, 40), (4, 41), (4, 39)])
def test_masks_of_other_shapes_do_what_they_do_in_the_stock_model(shape, padding):
    slow, fast = pair("bert")
    ids = first_kept("bert")["input_ids"]
    mask = torch.ones(shape, dtype=torch.long)
    if padding:
        mask[:, 20:30] = 0
    outputs = []
    for model in (slow, fast):
        try:
            with torch.no_grad():
                outputs.append(model(ids, mask).last_hidden_state)
        except (ValueError, RuntimeError, IndexError) as error:
            outputs.append(type(error))
    # without any, transformers silently drops the mask
    assert isinstance(outputs[0], torch.Tensor) or padding
    if isinstance(outputs[0], torch.Tensor):
        close(outputs[1], outputs[0])
    else:
        assert isinstance(outputs[1], type)


def test_arguments_of_the_attention_function_reach_it():
    slow, fast = pair("bert")
    ids = first_kept("bert")["input_ids"]
    with torch.no_grad():
        expected = slow(ids, is_causal=True)
        with calls(fast, packed=0, padded=1, fused=0, stock=LAYERS):
            same_outputs(fast(ids, is_causal=True), expected, torch.ones_like(ids).bool())
        assert not torch.allclose(expected[0], slow(ids)[0], atol=0.1)


@pytest.mark.sweep
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_mask(data):
    slow, fast = pair("bert", num_hidden_layers=2)
    own = native_of("bert", num_hidden_layers=2)
    size, seqlen = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    rows = st.lists(st.booleans(), min_size=seqlen, max_size=seqlen)
    mask = torch.tensor(data.draw(st.lists(rows, min_size=size, max_size=size)))
    ids = torch.randint(5, 120, (size, seqlen), generator=torch.Generator().manual_seed(seqlen))
    with torch.no_grad():
        expected, *found = (model(ids, mask) for model in (slow, fast, own))
    assert found[1].last_hidden_state[~mask].eq(0).all()
    rows = mask.any(1)
    for actual in found:
        assert all(value.isfinite().all() for value in actual.values())
        first = rows & (mask[:, 0] if actual is found[1] else True)  # our pooler reads no masked token
        for key, kept in (("last_hidden_state", mask), ("pooler_output", first)):
            close(actual[key][kept], expected[key][kept])


def test_errors_of_the_caller_stay_errors():
    slow, fast = pair("bert")
    ids = torch.randint(5, 120, (2, 9))
    long = torch.full_like(ids, 7)
    long[1, 3] = 120
    wrong = [
        dict(),
        dict(input_ids=ids, inputs_embeds=torch.randn(2, 9, 48)),
        dict(input_ids=torch.randint(5, 120, (2, 73))),
        dict(input_ids=long),
        dict(input_ids=-ids),
        dict(input_ids=ids, token_type_ids=torch.full_like(ids, 2)),
        dict(input_ids=ids, position_ids=torch.full_like(ids, 72)),
        dict(input_ids=ids, token_type_ids=ids[:, :5] * 0),
        dict(inputs_embeds=torch.randn(2, 9, 47)),
    ]
    for arguments in wrong:
        for model in (slow, fast):
            with pytest.raises((ValueError, IndexError, RuntimeError)), torch.no_grad():
                model(**arguments)
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS):  # and later calls are not affected
        close(fast(ids)[0], slow(ids)[0])
