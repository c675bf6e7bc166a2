"""Models without heads, neurons or layers, against whole models with zeros or gates in their place."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import fastbert
from fastbert.compression import shrink
from fastbert.layers.modules import part
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.model_pairs import build, native

WHOLE = ("albert", "albert-groups", "mobilebert")
CUT = [name for name in FAMILY_NAMES if name not in WHOLE]
GONE = {0: [1], 1: [0, 1, 2]}
NEURONS = {0: [0, 3, 79], 2: range(80)}
CLOSE = dict(rtol=1e-10, atol=1e-10)


def inputs_of(name):
    """Token ids and their padding on the right."""
    inputs = batch(name)
    inputs["attention_mask"] = (torch.arange(40) < torch.tensor([[40], [23], [9], [1]])).long()
    return inputs


def gone_heads(model):
    """Heads to remove; none if heads share keys and values."""
    return GONE if model.config.kv_heads is None else {}


@torch.no_grad()
def zeroed(model, heads, neurons):
    """A copy whose output layers have zeros in the columns of these heads and neurons."""
    found = copy.deepcopy(model)
    for i, layer in enumerate(found.base_model.layer_list()):
        names, size = layer.form.names, layer.form.head_dim
        for head in heads.get(i, ()):
            part(layer, names.attention_output).weight[:, head * size : (head + 1) * size] = 0
        for neuron in neurons.get(i, ()):
            part(layer, names.output).weight[:, neuron] = 0
    return found


@pytest.mark.parametrize("name", CUT)
@torch.no_grad()
def test_cut_models_are_whole_models_with_zeros(name, tmp_path):
    theirs, ours = build(name, "ForSequenceClassification")
    ours, inputs, heads = ours.double(), inputs_of(name), gone_heads(ours)
    small = shrink.without(ours, heads=heads, neurons=NEURONS)
    expected = zeroed(ours, heads, NEURONS)(**inputs).logits
    torch.testing.assert_close(small(**inputs).logits, expected, **CLOSE)
    assert small.num_parameters() < ours.num_parameters()
    assert small.dtype == torch.float64
    # Files have the smaller shapes and load as they are
    small.save_pretrained(tmp_path / "small")
    again = type(small).from_pretrained(tmp_path / "small", dtype="auto").eval()
    assert torch.equal(again(**inputs).logits, small(**inputs).logits)
    with pytest.raises(
        fastbert.CheckpointError, match=r"^(?!.*hidden_size).*\. A pruned model needs its own"
    ):
        type(small).from_pretrained(tmp_path / "small", pruned_heads=None, intermediate_sizes=None)
    # With zeros put back it is stock
    whole = shrink.dense(small)
    torch.testing.assert_close(whole(**inputs).logits, expected, **CLOSE)
    assert whole.num_parameters() == ours.num_parameters()
    whole.save_pretrained(tmp_path / "whole")
    stock = type(theirs).from_pretrained(tmp_path / "whole", dtype="auto").eval()
    assert all(torch.equal(t, stock.state_dict()[key]) for key, t in whole.state_dict().items())
    if name != "longformer":
        close = CLOSE if name in ("bert", "roberta", "distilbert") else dict(rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(stock(**inputs).logits, expected, **close)


@pytest.mark.parametrize("name", ["bert", "modernbert", "longformer", "mpnet"])
@torch.no_grad()
def test_layers(name):
    """A kept layer keeps its own window, angles and sizes."""
    ours, inputs = build(name, "ForMaskedLM", num_hidden_layers=3)[1].double(), inputs_of(name)
    small = shrink.without(shrink.without(ours, heads={2: [0, 1, 2]}), layers=[0, 2], neurons={2: [5]})
    del part(ours.base_model, ours.family.layers)[1]
    expected = zeroed(ours, {1: [0, 1, 2]}, {1: [5]})(**inputs).logits
    torch.testing.assert_close(small(**inputs).logits, expected, **CLOSE)
    # Module by module too
    small.base_model.layer_list()[1].register_forward_hook(lambda *_: None)
    torch.testing.assert_close(small(**inputs).logits, expected, **CLOSE)
    assert small.config.num_hidden_layers == 2
    assert small.config.pruned_heads == {1: [0, 1, 2]}
    assert small.config.intermediate_sizes == [80, 79]


@torch.no_grad()
def test_cuts_of_cuts():
    """Heads are numbered in the layer as it is, and named in the config as in the whole model."""
    ours, inputs = build("bert", "ForSequenceClassification")[1].double(), inputs_of("bert")
    once = shrink.without(ours, heads={0: [0]}, neurons={0: [0]})
    twice = shrink.without(once, heads={0: [1]}, neurons={0: [0]})
    assert twice.config.pruned_heads == {0: [0, 2]}
    expected = zeroed(ours, {0: [0, 2]}, {0: [0, 1]})(**inputs).logits
    torch.testing.assert_close(twice(**inputs).logits, expected, **CLOSE)
    torch.testing.assert_close(shrink.dense(twice)(**inputs).logits, expected, **CLOSE)
    # The layers that are left are whole
    rest = shrink.without(twice, layers=[1, 2]).config
    assert (rest.pruned_heads, rest.intermediate_sizes) == (None, None)


def test_nothing_is_shared_or_changed():
    ours = build("bert", "ForMaskedLM")[1].train()
    ours.requires_grad_(False).base_model.embeddings.requires_grad_(True)
    before = {key: t.clone() for key, t in ours.state_dict().items()}
    same = shrink.without(ours)
    assert same.training
    assert same.config.pruned_heads is None
    assert same.config.intermediate_sizes is None
    for key, parameter in same.named_parameters():
        assert parameter.requires_grad == ("embeddings" in key), key
        parameter.data.fill_(7.0)
    assert all(torch.equal(t, before[key]) for key, t in ours.state_dict().items())
    # Tied weights stay tied
    assert same.get_output_embeddings().weight is same.get_input_embeddings().weight


@torch.no_grad()
def test_heads_beside_fixed_ones_stay():
    ours, inputs = build("bert", "ForSequenceClassification", num_hidden_layers=3)[1], inputs_of("bert")
    config = fastbert.EncoderConfig.from_dict(
        {**ours.config.to_dict(), "fixed_heads": ["previous", "learned", "learned"]}
    )
    ours = type(ours)(config).double().eval()
    small = shrink.without(ours, neurons=NEURONS)
    torch.testing.assert_close(small(**inputs).logits, zeroed(ours, {}, NEURONS)(**inputs).logits, **CLOSE)
    short = shrink.without(ours, layers=[0, 2]).config
    assert (short.num_hidden_layers, short.fixed_heads) == (2, ["previous", "learned", "learned"])
    with pytest.raises(ValueError, match="heads: expected none, as some heads of the model are fixed"):
        shrink.without(ours, heads={0: [1]})


@pytest.mark.parametrize("more", [{}, {"activations": "static"}, {"smooth": 0.5}])
@torch.no_grad()
def test_cut_models_quantise_and_train(more):
    ours, inputs = build("bert", "ForSequenceClassification")[1], inputs_of("bert")
    more |= {"calibrate": [inputs]} if more else {}
    small = shrink.without(ours, heads=GONE, neurons=NEURONS)
    with torch.enable_grad():
        small(**inputs, labels=torch.zeros(len(inputs["input_ids"]), dtype=torch.int64)).loss.backward()
    assert all(p.grad is not None for p in small.parameters() if p.numel())
    report = fastbert.quantization_report(small, **more, run=lambda: small(**inputs))
    assert len(report) == 18 - 4 - 2  # but those of the layer without heads, and of the one without neurons
    expected = zeroed(ours, GONE, NEURONS)(**inputs).logits
    found = small.quantize("int8", **more)(**inputs).logits
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heads": {3: [0]}}, "heads: expected numbers of 3 layers as keys, got 3"),
        ({"heads": {0: [3]}}, r"heads\[0\]: expected numbers below 3, got 3"),
        ({"heads": {0: [True]}}, r"heads\[0\]: expected numbers below 3, got True"),
        ({"neurons": {1: [-1]}}, r"neurons\[1\]: expected numbers below 80, got -1"),
        ({"layers": [1, 0]}, r"layers: expected ascending numbers of 3 layers, got \[1, 0\]"),
        ({"layers": [0, 3]}, r"layers: expected ascending numbers of 3 layers, got \[0, 3\]"),
        ({"layers": [0, 0]}, r"layers: expected ascending"),
    ],
)
def test_bad_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        shrink.without(build("bert", "ForMaskedLM")[1], **given)


def test_models_that_cannot_be_cut():
    for name in WHOLE:
        with pytest.raises(ValueError, match=r"model: .*, which cannot be cut"):
            shrink.without(build(name, "ForMaskedLM")[1])
    with pytest.raises(TypeError, match="model: expected a model of fastbert, got BertModel"):
        shrink.without(transformers.BertModel(transformers.BertConfig(num_hidden_layers=0)))
    quantised = build("bert", "ForSequenceClassification")[1].quantize("int8")
    with pytest.raises(
        ValueError, match=r"expected plain linear layers, but .* of layer 0 is QuantizedLinear"
    ):
        shrink.without(quantised)
    with pytest.raises(ValueError, match="layers: expected layer 0 among those to keep"):
        shrink.without(build("modernbert", "ForMaskedLM")[1], layers=[1, 2])
    with pytest.raises(ValueError, match="heads: expected none, as heads of the model share keys"):
        shrink.without(build("eurobert", "ForMaskedLM")[1], heads={0: [0]})


def test_a_model_without_layers():
    config = fastbert.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=0, vocab_size=9)
    assert shrink.without(fastbert.BertModel(config)).config.num_hidden_layers == 0
    some = native(transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, vocab_size=9)))
    assert shrink.without(some, layers=[]).config.num_hidden_layers == 0
