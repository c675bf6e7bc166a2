"""DeBERTa-v2 and v3: scores of distances, at the edges of buckets and in half precision; configs; files."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

import fastbert
from fastbert.layers import disentangled
from fastbert.layers.form import INNER_SITE, SITES
from fastbert.ops.attention_relative import dense_scores
from tests.support.accelerated_models import same_gradients
from tests.support.hf_models import hf_model
from tests.support.model_pairs import (
    build,
    close,
    drops_as_its_module,
    kept_rows,
    native,
    no_larger_errors,
    ragged,
    same_packed_and_alone,
)

# With the buckets of the published models
V3 = {"position_buckets": 256, "max_position_embeddings": 512}
FORMS = {
    "v3": V3,
    "own projections": {**V3, "share_att_key": False, "position_biased_input": True, "type_vocab_size": 2},
    "c2p": {**V3, "pos_att_type": ["c2p"], "norm_rel_ebd": "none"},
    "p2c": {**V3, "pos_att_type": "p2c"},
    "content alone": {**V3, "pos_att_type": None},
    "convolution": {**V3, "conv_kernel_size": 3},
    "convolution in groups": {**V3, "conv_kernel_size": 3, "conv_groups": 2},
    "wide convolution": {"conv_kernel_size": 5, "conv_act": "gelu"},
    "narrow embeddings": {"embedding_size": 24, "type_vocab_size": 2, "position_biased_input": True, **V3},
    "few buckets": {"position_buckets": 16, "max_relative_positions": 40},
    "no buckets": {"position_buckets": -1, "max_relative_positions": 50},
    "no distances": {**V3, "relative_attention": False, "pos_att_type": None, "position_biased_input": True},
}
SOME, EDGES = (1, 129, 258, 40), (1, 2, 127, 128, 129, 130, 255, 256, 257, 258, 600)


def both(form, task=None, **config):
    """(transformers' model, ours) in float64 and in eval."""
    config = {"num_hidden_layers": 2, **FORMS[form], **config}
    if task is not None:
        return tuple(model.double() for model in build("deberta-v2", task, **config))
    hf = hf_model("deberta-v2", **config)
    return copy.deepcopy(hf).double(), native(hf).double()


@pytest.mark.parametrize(
    ("form", "lengths"),
    [*((form, SOME) for form in FORMS), pytest.param("v3", EDGES, marks=pytest.mark.sweep)],
    ids=str,
)
@torch.no_grad()
def test_ragged_lengths(form, lengths):
    """Packed, padded and alone, and longer than the config's positions where no table limits them."""
    hf, model = both(form)
    inputs = ragged(lengths)
    kept = inputs["attention_mask"].bool()
    found = kept_rows(model, inputs)
    close(found, kept_rows(hf, inputs), 1e-9)
    same_packed_and_alone(model, inputs, found)
    inputs["attention_mask"] *= torch.rand(kept.shape, generator=torch.Generator().manual_seed(1)) > 0.3
    close(kept_rows(model, inputs), kept_rows(hf, inputs), 1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    task = "ForSequenceClassification" if form != "narrow embeddings" else "ForMaskedLM"
    hf, model = both(form, task)
    inputs, labels = ragged((3, 40, 72)), torch.tensor([1, 0, 3])
    if task == "ForMaskedLM":
        labels = inputs["input_ids"].where(inputs["attention_mask"].bool(), -100)
    for m in (hf, model):
        m(**inputs, labels=labels).loss.backward()
    same_gradients(model, hf, 1e-9)


@pytest.mark.parametrize(("buckets", "farthest"), [(256, 512), (16, 40), (0, 50)])
def test_buckets_are_transformers_own(buckets, farthest):
    n, span = 1500, buckets or farthest
    relative = disentangled.Relative(span, buckets, farthest, ("c2p", "p2c"), True)
    theirs = build_relative_position(torch.empty(n, 1), torch.empty(n, 1), buckets or -1, farthest)[0]
    position = torch.arange(n)
    ours = disentangled.buckets(position[:, None] - position, relative)
    assert torch.equal(ours, (theirs + span).clamp(0, 2 * span - 1))
    for seqlen in (1, 2, span // 2 + 1, span // 2 + 2, n):
        q = torch.zeros(1, 1, 4)
        table = torch.arange(2.0 * span).reshape(-1, 1, 1).expand(-1, 1, 4)
        scores = disentangled.scores(relative, [table, table], q, q, seqlen)
        columns, reach = scores.columns.long(), scores.columns.shape[0] // 2
        backward = torch.arange(seqlen - 1, -seqlen, -1)  # query - key
        rows = 2 * span - 1 - disentangled.buckets(backward, relative)  # tables are in rising order
        first = 2 * span - 1 - int(disentangled.buckets(torch.tensor([reach]), relative))
        assert torch.equal(columns[reach - seqlen + 1 : reach + seqlen] + first, rows)


@pytest.mark.parametrize(("term", "row"), [("c2p", 0), ("p2c", 1)])
def test_each_term_by_hand(term, row):
    """The sign of the distance: query - key in both terms (nntrainer#3982)."""
    form = both("c2p", pos_att_type=[term])[1].layer_list()[0].form
    assert form.relative is not None
    q, k = torch.randn(2, 1, 5, 3, 16, dtype=torch.float64)
    table = torch.randn(512, 48, dtype=torch.float64)
    scaled = disentangled.scaled(form, table, q)
    tables = [scaled, None] if term == "c2p" else [None, scaled]
    found = dense_scores(disentangled.scores(form.relative, tables, q, k, 5), None, 5, q)
    for i in range(5):
        for j in range(5):
            at = table[256 + i - j].view(3, 16)
            expected = ((q, k)[row][0, (i, j)[row]] * at).sum(1) / 32**0.5
            close(found[0, :, i, j], expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_no_larger_than_transformers_own(dtype):
    hf = hf_model("deberta-v2", num_hidden_layers=2, **V3)
    no_larger_errors((native(hf), hf), dtype, [ragged((1, 129, 257, 300))])


@torch.no_grad()
def test_large_queries_do_not_overflow_in_half_precision():
    """Products of 1e5 exceed float16 before they are scaled (microsoft/DeBERTa#77, transformers#24116)."""
    model = both("v3", num_hidden_layers=1)[1].float()
    for path in ("query_proj", "key_proj"):
        getattr(model.layer_list()[0].attention.self, path).weight.mul_(70)
    exact = kept_rows(model, ragged((40,)))
    found = kept_rows(model.half(), ragged((40,)))
    assert found.isfinite().all()
    assert ((found.float() - exact).abs().mean(1) < 0.1).float().mean() > 0.8


@torch.no_grad()
def test_a_convolution_between_layers_of_berts_form():
    """From the third call on by a kept plan, all of whose layers might run in one call."""
    plain = {"relative_attention": False, "pos_att_type": None, "share_att_key": False}
    hf, model = (m.float() for m in both("convolution", **plain, norm_rel_ebd="none"))
    ids = ragged((9, 9))["input_ids"]
    for _ in range(4):
        close(model(ids)[0], hf(ids)[0], 1e-4)
    for m in (hf, model):
        m.encoder.conv.conv.weight.mul_(-1)
    close(model(ids)[0], hf(ids)[0], 1e-4)


@pytest.mark.parametrize("path", ["conv", "conv.conv", "conv.LayerNorm", "conv.dropout"])
@torch.no_grad()
def test_hooks_of_the_convolution(path):
    hf, model = both("convolution")
    for m in (hf, model):
        m.encoder.get_submodule(path).register_forward_hook(lambda module, given, output: 1.25 * output)
    inputs = ragged((1, 40, 17))
    close(kept_rows(model, inputs), kept_rows(hf, inputs), 1e-9)


@torch.no_grad()
def test_pieces_of_sequences_change_nothing(monkeypatch):
    model, inputs = both("v3")[1], ragged((9, 40, 1, 3))
    whole = kept_rows(model, inputs)
    monkeypatch.setattr(disentangled, "_MOST", 13 * 3 * 80 * 8)  # 13 rows
    pieces, found = disentangled.pieces, []
    monkeypatch.setattr(disentangled, "pieces", lambda *args: found.append(pieces(*args)) or found[-1])
    close(kept_rows(model, inputs), whole, 1e-13)
    ends = [piece.cu_seqlens.tolist() for piece in found[0]]
    assert ends == [[0, 9], [0, 40], [0, 1, 4]]


@torch.no_grad()
@pytest.mark.parametrize("change", [{}, {"norm_rel_ebd": "none"}], ids=["normed", "plain"])
def test_tables_are_derived_once_and_again_after_a_change(monkeypatch, change):
    hf, model = (m.float() for m in both("v3", **change))
    inputs, built, scaled = ragged((3, 40)), [], disentangled.scaled
    monkeypatch.setattr(disentangled, "scaled", lambda *args: built.append(1) or scaled(*args))
    first = kept_rows(model, inputs)
    assert len(built) == 4  # Kr and Qr of two layers
    assert torch.equal(kept_rows(model, inputs), first)
    assert len(built) == 4
    for m in (hf, model):
        m.encoder.rel_embeddings.weight.mul_(-1)
    close(kept_rows(model, inputs), kept_rows(hf, inputs), 1e-5)
    assert len(built) == 8


@torch.no_grad()
@pytest.mark.parametrize(
    ("path", "site"),
    [
        ("encoder.layer.1.attention.self.pos_dropout", 1 + SITES + INNER_SITE),
        ("encoder.conv.dropout", INNER_SITE),
    ],
)
def test_dropout_of_the_table_of_distances_and_of_the_convolution(path, site):
    model = copy.deepcopy(both("few buckets", conv_kernel_size=3)[1])
    drops_as_its_module(model, ragged((9, 9))["input_ids"], path, site)


def test_types_of_tokens_are_ignored_without_a_table():
    """As the tokenizer of v3 passes them."""
    hf, model = both("v3")
    inputs = {**ragged((3, 9)), "token_type_ids": torch.ones(2, 9, dtype=torch.long)}
    with torch.no_grad():
        close(kept_rows(model, inputs), kept_rows(hf, inputs), 1e-9)


def test_classifier_has_the_keys_of_its_own():
    config = {"cls_dropout": 0.3, "pooler_dropout": 0.2, "pooler_hidden_act": "tanh"}
    hf, model = both("v3", "ForSequenceClassification", **config)
    for path, p in (("dropout", 0.3), ("pooler.dropout", 0.2)):
        assert model.get_submodule(path).p == hf.get_submodule(path).p == p
    inputs = ragged((3, 40))
    close(model(**inputs).logits, hf(**inputs).logits, 1e-9)


def test_masked_lm_head_of_the_third_version(tmp_path):
    """Its decoder is the table of words (config legacy False)."""
    hf, model = both("v3", "ForMaskedLM", legacy=False)
    inputs = ragged((3, 40))
    kept = inputs["attention_mask"].bool()
    labels = inputs["input_ids"].where(kept, -100)
    for m in (hf, model):
        found = m(**inputs, labels=labels)
        found.loss.backward()
    close(found.logits[kept], hf(**inputs).logits[kept], 1e-9)
    same_gradients(model, hf, 1e-9)
    model.zero_grad()
    model.train()(**inputs, labels=labels).logits.sum()
    model.eval()(**inputs, labels=labels, output_logits=False).loss.backward()
    same_gradients(model, hf, 1e-9)
    assert model.get_output_embeddings() is model.get_input_embeddings()
    assert {*model.vocabulary_parameters()} == {
        "deberta.embeddings.word_embeddings.weight",
        "lm_predictions.lm_head.bias",
    }
    model.save_pretrained(tmp_path)
    for cls in (transformers.AutoModelForMaskedLM, fastbert.AutoModelForMaskedLM):
        again = cls.from_pretrained(tmp_path, dtype=torch.float64).eval()
        close(again(**inputs).logits[kept], found.logits[kept], 1e-9)
    model.resize_token_embeddings(130)
    assert model.eval()(**inputs).logits.shape[2] == 130


def test_file_with_the_heads_of_the_pretraining(tmp_path):
    """v3's files have heads that transformers' classes ignore."""
    hf = hf_model("deberta-v2")
    hf.save_pretrained(tmp_path)
    weights = {f"deberta.{key}": t for key, t in load_file(tmp_path / "model.safetensors").items()}
    weights["lm_predictions.lm_head.dense.weight"] = torch.zeros(48, 48)
    weights["mask_predictions.dense.weight"] = torch.zeros(48, 48)
    save_file(weights, tmp_path / "model.safetensors")
    model = fastbert.AutoModel.from_pretrained(tmp_path)
    inputs = ragged((3, 40))
    with torch.no_grad():
        close(kept_rows(model, inputs), kept_rows(hf, inputs))
    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModel.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(t, again.state_dict()[key]) for key, t in model.state_dict().items())


def test_the_discriminator(tmp_path):
    """Padded, packed, compiled and from a file; its head reads each token beside the sequence's first."""
    torch.manual_seed(0)
    model = fastbert.DebertaV2ForReplacedTokens(native(hf_model("deberta-v2")).config).double().eval()
    inputs, lengths = ragged((3, 40, 1)), [3, 40, 1]
    kept = inputs["attention_mask"].bool()
    labels = inputs["input_ids"] % 2
    found = model(**inputs, labels=labels)
    head, states = model.mask_predictions, model.deberta(**inputs).last_hidden_state
    x = torch.nn.functional.gelu(head.dense(head.LayerNorm(states + states[:, :1])))
    close(found.logits, head.classifier(x).squeeze(2) * kept, 1e-12)
    packed = model(inputs["input_ids"][kept], cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int())
    close(packed.logits, found.logits[kept], 1e-12)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(packed.logits, labels[kept].double())
    close(found.loss, expected, 1e-12)
    compiled = torch.compile(model, backend="eager", fullgraph=True)(**inputs, labels=labels)
    close(compiled.loss, found.loss, 1e-12)
    close(compiled.logits, found.logits, 1e-12)
    model.save_pretrained(tmp_path)
    again = fastbert.DebertaV2ForReplacedTokens.from_pretrained(tmp_path, dtype=torch.float64).eval()
    close(again(**inputs).logits, found.logits, 1e-12)
    inputs["attention_mask"][1, 0] = 0
    with pytest.raises(ValueError, match="attention_mask: position 0 of sequence 1"):
        model(**inputs)
