"""MobileBERT: its kinds of layers, neighbours at borders, float16, the wide decoder; configs; files."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fastbert
from fastbert.layers.form import SITES
from fastbert.models.config import EncoderConfig
from fastbert.runtime import prepared
from tests.support import model_pairs
from tests.support.accelerated_models import same_gradients
from tests.support.hf_models import hf_model
from tests.support.model_pairs import build, close, drops_as_its_module, kept_rows, native, no_larger_errors

NARROW = {"intra_bottleneck_size": 24, "embedding_size": 16, "num_feedforward_networks": 3}
FORMS = {
    "published": NARROW,
    # Two norms of a layer, and the one of the embeddings, do not take eps from the config
    "LayerNorm": {**NARROW, "normalization_type": "layer_norm", "layer_norm_eps": 0.1},
    "one block": {**NARROW, "num_feedforward_networks": 1},
    "narrow attention": {**NARROW, "use_bottleneck_attention": True},
    "own bottleneck": {**NARROW, "use_bottleneck_attention": True, "key_query_shared_bottleneck": False},
    "wide keys": {**NARROW, "intra_bottleneck_size": 48, "key_query_shared_bottleneck": False},
    "no bottleneck": {**NARROW, "use_bottleneck": False},
    "no neighbours": {**NARROW, "trigram_input": False},
    "words alone": {**NARROW, "trigram_input": False, "embedding_size": 48},
    "first token": {**NARROW, "classifier_activation": False, "hidden_act": "gelu"},
}
LENGTHS = (1, 2, 3, 40, 72, 17)


def ragged(lengths=LENGTHS):
    ids, mask = model_pairs.ragged(lengths).values()
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": ids % 2}


def both(form="published", task=None, **config):
    """(transformers' model, ours) in float64 and in eval."""
    config = {"num_hidden_layers": 2, **FORMS[form], **config}
    if task is not None:
        return tuple(model.double() for model in build("mobilebert", task, **config))
    hf = hf_model("mobilebert", **config)
    return copy.deepcopy(hf).double(), native(hf).double()


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_each_sequence_as_transformers_without_padding(form):
    """transformers' last token reads the [PAD] row after it if the batch is padded; ours never does."""
    hf, model = both(form)
    for m in (hf, model):
        m.embeddings.word_embeddings.weight[0] = 1.0
    inputs = ragged()
    found, pooled = model(**inputs).last_hidden_state, model(**inputs).pooler_output
    for i, n in enumerate(LENGTHS):
        expected = hf(**{name: t[i : i + 1, :n] for name, t in inputs.items()})
        close(found[i, :n], expected.last_hidden_state[0], 1e-9)
        close(pooled[i], expected.pooler_output[0], 1e-9)
    kept = inputs["attention_mask"].bool()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = dict(cu_seqlens=ends, token_type_ids=inputs["token_type_ids"][kept])
    close(model(inputs["input_ids"][kept], **packed).last_hidden_state, found[kept], 1e-12)
    empty = dict(packed, cu_seqlens=torch.cat([ends[:1], ends, ends[-1:]]))
    close(model(inputs["input_ids"][kept], **empty).last_hidden_state, found[kept], 1e-12)


@torch.no_grad()
def test_other_sequences_and_masked_tokens_change_nothing():
    model, inputs = both()[1], ragged((9, 9, 9))
    inputs["attention_mask"][1, 4] = 0
    found = model(**inputs).last_hidden_state[1]
    inputs["input_ids"][[0, 2]] = 7
    inputs["input_ids"][1, 4] = 7
    assert torch.equal(model(**inputs).last_hidden_state[1], found)
    inputs["input_ids"][1, 3] = 7
    assert not torch.equal(model(**inputs).last_hidden_state[1], found)
    # Nothing is next to a hole, neither for our ops nor for modules that are called on the padded batch
    model.embeddings.register_forward_hook(lambda *_: None)
    inputs["input_ids"][1, 3] = ragged((9, 9, 9))["input_ids"][1, 3]
    model.embeddings.word_embeddings.weight[0] = 1.0
    close(model(**inputs).last_hidden_state[1], found, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    task = "ForMaskedLM" if form == "published" else "ForSequenceClassification"
    hf, model = both(form, task)
    inputs, labels = ragged((3, 40, 72)), torch.tensor([1, 0, 3])
    if task == "ForMaskedLM":
        labels = inputs["input_ids"].where(inputs["attention_mask"].bool(), -100)
    for m in (hf, model):
        m(**inputs, labels=labels).loss.backward()
    same_gradients(model, hf, 1e-9)


@pytest.mark.parametrize("form", ["published", "narrow attention", "no bottleneck", "LayerNorm"])
@torch.no_grad()
def test_hooks_on_every_module(form):
    hf, model = both(form)
    inputs = ragged((3, 40))

    def scaled(module, given, output):
        if isinstance(output, tuple):
            return (output[0] * 1.25, *output[1:])
        return output * 1.25 if isinstance(output, torch.Tensor) else None

    paths = [n for n, m in hf.named_modules() if n and not isinstance(m, torch.nn.ModuleList)]
    for path in (n for n in paths if not n.startswith("encoder.layer.1")):
        handles = [m.get_submodule(path).register_forward_hook(scaled) for m in (hf, model)]
        close(kept_rows(model, inputs), kept_rows(hf, inputs), 1e-9)
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("form", ["published", "LayerNorm"])
def test_error_is_no_larger_than_transformers_own(form):
    hf = hf_model("mobilebert", num_hidden_layers=3, **FORMS[form])
    no_larger_errors((native(hf), hf), torch.bfloat16, [ragged()])


def test_float16_is_refused():
    """transformers returns NaN for the published weights (transformers#11327)."""
    model, inputs = both()[1].float(), ragged()
    words = "model: expected float32, float64 or bfloat16, got float16"
    with pytest.raises(TypeError, match=words), torch.autocast("cpu", torch.float16):
        model(**inputs)
    with pytest.raises(TypeError, match=words):
        model.half()(**inputs)


@pytest.mark.parametrize(
    ("form", "path", "site"),
    [
        ("published", "output.bottleneck", 2),
        ("no bottleneck", "output", 2),
        ("no bottleneck", "attention.output", 1),
    ],
)
@torch.no_grad()
def test_dropout_of_packed_tokens(form, path, site):
    path = f"encoder.layer.1.{path}.dropout"
    drops_as_its_module(both(form)[1], ragged((9, 9))["input_ids"], path, 1 + SITES + site)


@torch.no_grad()
def test_wide_decoder_is_made_once_and_again_after_a_change():
    hf, model = both(task="ForMaskedLM")
    inputs = ragged((3, 40))
    kept = inputs["attention_mask"].bool()
    first = model(**inputs).logits
    decoder = model.get_output_embeddings()
    assert prepared.remembered(decoder) == ["whole"]
    assert torch.equal(model(**inputs).logits, first)
    for m in (hf, model):
        m.cls.predictions.dense.weight.mul_(-1)
    close(model(**inputs).logits[kept], hf(**inputs).logits[kept], 1e-9)


def test_resized_vocabulary(tmp_path):
    hf, model = both(task="ForMaskedLM")
    inputs = ragged((3, 40))
    before = model(**inputs).logits
    for m in (hf, model):
        m.resize_token_embeddings(130)
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in hf.state_dict().items()
    }
    close(model(**inputs).logits[..., :120], before, 1e-12)
    model.save_pretrained(tmp_path)
    for auto in (fastbert.AutoModelForMaskedLM, transformers.AutoModelForMaskedLM):
        again = auto.from_pretrained(tmp_path, dtype=torch.float64).eval()
        kept = inputs["attention_mask"].bool()
        close(again(**inputs).logits[kept], model(**inputs).logits[kept], 1e-9)
    model.resize_token_embeddings(100)
    assert model.cls.predictions.dense.weight.shape == (32, 100)


def test_files_with_and_without_the_layer_of_the_pooler(tmp_path):
    hf, _ = both(task="ForPreTraining")
    hf.config.classifier_activation = False
    hf.save_pretrained(tmp_path)
    model = fastbert.AutoModelForPreTraining.from_pretrained(tmp_path, dtype=torch.float64)
    assert model.config.to_dict()["classifier_activation"] is False
    model.save_pretrained(tmp_path / "ours")
    theirs = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    inputs = ragged((3, 40))
    with torch.no_grad():
        found, expected = model(**inputs), theirs(**inputs)
    close(found.seq_relationship_logits, expected.seq_relationship_logits, 1e-9)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "mobilebert.encoder.more.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(fastbert.CheckpointError, match=r"mobilebert\.encoder\.more\.weight"):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_norm_of_a_file_is_the_configs(tmp_path):
    """LayerNorm and NoNorm have the same parameters."""
    both()[1].save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"no_norm"', '"layer_norm"'))
    with pytest.raises(fastbert.CheckpointError, match="normalization_type"):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_narrow_embeddings_have_a_head():
    config = EncoderConfig("mobilebert", embedding_size=600, num_hidden_layers=1)
    with pytest.raises(ValueError, match="embedding_size: expected at most hidden_size 512, got 600"):
        fastbert.MobileBertForMaskedLM(config)
