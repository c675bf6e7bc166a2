"""The task heads against transformers, for every family."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import pytest
import torch
import transformers
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastbert
from fastbert.models.auto import AutoModel
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.models.deferred import DeferredTensor
from fastbert.models.families import FAMILIES
from fastbert.ops import linear_cross_entropy
from fastbert.ops.cross_entropy import cross_entropy as ops_cross_entropy
from tests.support.hf_models import FAMILY_NAMES
from tests.support.model_pairs import CASES, TASKS, build, inputs_for, labels_for, pair, token_level


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert a.shape == b.shape
    error = (a - b).abs().max().item() if a.numel() else 0.0
    assert error <= tolerance, f"max error {error:.3g}"


# -- against transformers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "task"), CASES)
def test_names_outputs_and_loss_equal_transformers(name, task):
    hf, model = pair(name, task)
    assert type(model).__name__ == type(hf).__name__
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in hf.state_dict().items()
    }

    inputs = inputs_for(name, task)
    if task == "ForQuestionAnswering":  # the loss of a padded batch has its own test
        del inputs["attention_mask"]
        inputs["input_ids"].masked_fill_(inputs["input_ids"] == 1, 8)
    kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    labels = labels_for(hf, {**inputs, "attention_mask": kept})
    with torch.no_grad():
        expected = hf(**inputs, **labels, output_hidden_states=True, output_attentions=True)
        actual = model(**inputs, **labels, output_hidden_states=True, output_attentions=True)
    assert list(actual.keys()) == list(expected.keys())
    close(actual.loss, expected.loss, 1e-5)
    for key in actual:
        if "logits" not in key:
            continue
        if token_level(expected[key], kept):
            close(actual[key][kept], expected[key][kept])
            assert actual[key][~kept].eq(0).all()
        else:
            close(actual[key], expected[key])
    flat = kept.reshape(-1, kept.shape[-1])
    assert len(actual.hidden_states) == len(expected.hidden_states)
    for a, e in zip(actual.hidden_states, expected.hidden_states, strict=True):
        close(a[flat], e[flat])
    pairs = (flat[:, None, :, None] & flat[:, None, None, :]).expand(
        -1, model.config.num_attention_heads, -1, -1
    )
    assert len(actual.attentions) == len(expected.attentions)
    for a, e in zip(actual.attentions, expected.attentions, strict=True):
        close(a[pairs], e[pairs])


@pytest.mark.parametrize(
    ("name", "task", "dtype", "tolerance"),
    # deep ALBERT's gradients are so ill-conditioned that transformers' own float32 ones are off by 4e-4
    [(*case, torch.float64, 1e-9) for case in CASES]
    + [(*case, torch.float32, 1e-4) for case in CASES if case[0] in ("bert", "distilbert", "mpnet")],
)
def test_gradients_equal_transformers(name, task, dtype, tolerance):
    hf, model = (copy.deepcopy(m).to(dtype) for m in pair(name, task))
    inputs = inputs_for(name, task, seed=1)
    if task == "ForQuestionAnswering":
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        inputs["input_ids"].masked_fill_(inputs["input_ids"] == 1, 8)
    labels = labels_for(hf, inputs, seed=1)
    for m in (hf, model):
        m.zero_grad(set_to_none=True)
        m(**inputs, **labels).loss.backward()
    reference = {k: p.grad for k, p in hf.named_parameters(remove_duplicate=False)}
    largest = max(g.abs().max().item() for g in reference.values() if g is not None)
    for key, parameter in model.named_parameters():
        expected = reference[key]
        if expected is None:
            assert parameter.grad is None, key
            continue
        # a key's bias has no gradient at all: what stands there is the rounding of terms as large as the rest
        close(parameter.grad, expected, tolerance * (expected.abs().max().item() + 1e-2 * largest))


@pytest.mark.parametrize(
    ("name", "task"), [c for c in CASES if c[0] in ("bert", "distilbert", "albert", "electra")]
)
def test_saved_by_either_loads_into_the_other(name, task, tmp_path):
    hf, model = pair(name, task)
    hf.save_pretrained(tmp_path / "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = getattr(fastbert, "AutoModel" + task).from_pretrained(tmp_path / "hf")
    assert type(loaded) is type(model)
    for key, value in hf.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    model.save_pretrained(tmp_path / "ours")
    back, info = type(hf).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, value in back.state_dict().items():
        assert torch.equal(value, hf.state_dict()[key]), key
    again = type(model).from_pretrained(tmp_path / "ours")
    inputs = inputs_for(name, task)
    with torch.no_grad():
        assert torch.equal(again(**inputs)[0], model(**inputs)[0])


def test_head_over_an_encoders_checkpoint_is_initialised_with_one_warning(tmp_path):
    encoder = BertModel(EncoderConfig.from_hf(pair("bert", "ForMaskedLM")[0].config))
    encoder.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"classifier\.weight") as caught:
        model = fastbert.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=40)
    assert len(caught) == 1
    assert model.classifier.weight.shape == (40, 48)
    assert 0.015 < model.classifier.weight.std() < 0.025
    assert model.classifier.bias.eq(0).all()
    assert torch.equal(
        model.bert.encoder.layer[1].output.dense.weight, encoder.encoder.layer[1].output.dense.weight
    )
    with pytest.warns(UserWarning, match="cls.predictions"):
        lm = fastbert.BertForMaskedLM.from_pretrained(tmp_path)
    assert lm.cls.predictions.decoder.weight is lm.bert.embeddings.word_embeddings.weight
    assert lm.cls.predictions.transform.LayerNorm.weight.eq(1).all()


# -- arguments and outputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_tuples(task):
    hf, model = pair("bert", task)
    inputs = inputs_for("bert", task)
    if task == "ForQuestionAnswering":
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    with torch.no_grad():
        for extra in ({}, labels_for(hf, inputs), {"output_hidden_states": True}):
            expected = hf(**inputs, **extra, return_dict=False)
            actual = model(**inputs, **extra, return_dict=False)
            assert isinstance(actual, tuple)
            assert [type(a) for a in actual] == [type(e) for e in expected]
            for a, e in zip(actual, expected, strict=True):
                assert len(a) == len(e) if isinstance(a, tuple) else a.shape == e.shape
            named = model(**inputs, **extra)
            assert torch.equal(named[0], actual[0])
    model.config.return_dict = False
    try:
        assert isinstance(model(**inputs), tuple)
    finally:
        model.config.return_dict = True


@pytest.mark.parametrize("task", TASKS)
def test_positional_arguments_stand_where_transformers_has_them(task):
    for name in ("bert", "albert"):
        hf, model = pair(
            name, "ForMaskedLM" if name == "albert" and task == "ForNextSentencePrediction" else task
        )
        decoder_only = ("encoder_hidden_states", "encoder_attention_mask")
        theirs = [
            k for k in inspect.signature(type(hf).forward).parameters if k not in (*decoder_only, "kwargs")
        ]
        assert list(inspect.signature(type(model).forward).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize(
    ("name", "task", "count"),
    [
        ("distilbert", "ForTokenClassification", 2),
        ("mpnet", "ForMaskedLM", 2),
        ("ernie", "ForMaskedLM", 3),
        ("roberta", "ForMultipleChoice", 1),
    ],
)
def test_arguments_that_stand_elsewhere_in_transformers_must_be_named(name, task, count):
    hf, model = pair(name, task)
    theirs, mine = (list(inspect.signature(type(m).forward).parameters)[1:] for m in (hf, model))
    assert mine[:count] == theirs[:count]
    assert mine[count] != theirs[count]
    inputs = inputs_for(name, task)
    given = [inputs[k] for k in mine[:count]]
    with torch.no_grad():
        assert torch.equal(model(*given)[0], model(**dict(zip(mine, given, strict=False)))[0])
    with pytest.raises(
        TypeError, match=f"at most {count} positional arguments, got {count + 1}; give {mine[count]} by"
    ):
        model(*given, given[0])


def test_head_mask_reaches_the_encoder():
    _, model = pair("bert", "ForTokenClassification")
    inputs = inputs_for("bert", "ForTokenClassification")
    with torch.no_grad():
        whole = model(**inputs).logits
        assert torch.equal(model(**inputs, head_mask=torch.ones(3)).logits, whole)
        gated = model(**inputs, head_mask=torch.tensor([1.0, 0.0, 1.0]))
        hidden = model.bert(**inputs, head_mask=torch.tensor([1.0, 0.0, 1.0])).last_hidden_state
    kept = inputs["attention_mask"].bool()
    assert not torch.allclose(gated.logits, whole)
    close(gated.logits[kept], (hidden @ model.classifier.weight.T + model.classifier.bias)[kept])


@pytest.mark.parametrize(
    ("name", "task"), [(n, t) for n, t in CASES if n in ("bert", "mpnet") and t != "ForMultipleChoice"]
)
def test_masks_of_keys_alone(name, task):
    hf, model = pair(name, task)
    inputs = inputs_for(name, task)
    keys = inputs.pop("attention_mask")[:, None, None, :].bool()
    additive = torch.zeros(keys.shape).masked_fill(~keys, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = hf(**inputs, attention_mask=additive.expand(-1, -1, keys.shape[-1], -1)).to_tuple()
        for mask in (keys, additive):
            for ours, theirs in zip(model(**inputs, attention_mask=mask).to_tuple(), expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_inputs_embeds_and_no_mask():
    for task in ("ForMaskedLM", "ForMultipleChoice"):
        hf, model = pair("bert", task)
        inputs = inputs_for("bert", task)
        embeds = hf.bert.embeddings.word_embeddings(inputs["input_ids"])
        with torch.no_grad():
            close(model(inputs_embeds=embeds).logits, hf(inputs_embeds=embeds).logits)


def test_forward_hooks_of_the_encoder_run():
    _, model = pair("bert", "ForTokenClassification")
    seen = []
    handle = model.bert.register_forward_hook(lambda *_: seen.append(1))
    model(**inputs_for("bert", "ForTokenClassification"))
    handle.remove()
    assert seen == [1]


# -- losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        (None, 1, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        (None, 1, torch.tensor([[0.5], [-1.0], [2.0], [0.0]])),
        ("regression", 3, torch.linspace(-1, 1, 12).reshape(4, 3)),
        (None, 3, torch.tensor([0, 2, 1, 1])),
        (None, 3, torch.tensor([0, -100, 1, 1])),
        (None, 3, torch.tensor([[0.0, 1.0, 1.0]] * 4)),
        ("multi_label_classification", 3, torch.tensor([[0.0, 1.0, 0.3]] * 4)),
        ("single_label_classification", 3, torch.tensor([0, 2, 1, 1])),
    ],
)
@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta"])
def test_problem_types(name, problem, num_labels, labels):
    hf, model = build(name, "ForSequenceClassification", num_labels=num_labels, problem_type=problem)
    inputs = inputs_for(name, "ForSequenceClassification")
    with torch.no_grad():
        expected, actual = hf(**inputs, labels=labels), model(**inputs, labels=labels)
    close(actual.loss, expected.loss, 1e-5)
    close(actual.logits, expected.logits)
    assert model.config.problem_type == problem  # asking for a loss changes no config


def test_problem_type_takes_integers_where_it_must():
    _, model = build("bert", "ForSequenceClassification", num_labels=1)
    inputs = inputs_for("bert", "ForSequenceClassification")
    ones = model(**inputs, labels=torch.ones(4, dtype=torch.long))
    close(ones.loss, model(**inputs, labels=torch.ones(4)).loss)
    _, model = build(
        "bert", "ForSequenceClassification", num_labels=3, problem_type="multi_label_classification"
    )
    labels = torch.tensor([[0, 1, 1]] * 4)
    close(model(**inputs, labels=labels).loss, model(**inputs, labels=labels.float()).loss)


@pytest.mark.parametrize("task", [t for t in TASKS if t != "ForPreTraining"])
def test_no_label_counts(task):
    _, model = pair("bert", task)
    model.zero_grad()
    inputs = inputs_for("bert", task)
    labels = {k: torch.full_like(v, -100) for k, v in labels_for(model, inputs).items()}
    if task == "ForQuestionAnswering":
        labels = {k: torch.full_like(v, 18) for k, v in labels.items()}
    loss = model(**inputs, **labels).loss
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())


def test_pretraining_has_a_loss_only_with_both_labels():
    for name in ("bert", "albert"):
        _, model = pair(name, "ForPreTraining")
        inputs = inputs_for(name, "ForPreTraining")
        labels = labels_for(model, inputs)
        for key, value in labels.items():
            assert model(**inputs, **{key: value}).loss is None
        assert model(**inputs, **labels).loss.isfinite()


def test_question_answering_loss_of_a_padded_batch_is_over_the_kept_tokens():
    hf, model = pair("bert", "ForQuestionAnswering")
    inputs = inputs_for("bert", "ForQuestionAnswering")
    kept = inputs["attention_mask"].bool()
    first = kept.long().argmax(1)
    with torch.no_grad():
        expected = hf(**inputs)
        actual = model(**inputs, start_positions=first, end_positions=first)
    losses = []
    for key in ("start_logits", "end_logits"):
        close(actual[key][kept], expected[key][kept])
        assert actual[key].isfinite().all()
        assert actual[key].softmax(-1)[~kept].eq(0).all()
        losses.append(F.cross_entropy(expected[key].masked_fill(~kept, float("-inf")), first))
    close(actual.loss, (losses[0] + losses[1]) / 2, 1e-5)


def test_question_answering_positions_are_clamped():
    hf, model = pair("distilbert", "ForQuestionAnswering")
    inputs = inputs_for("distilbert", "ForQuestionAnswering")
    del inputs["attention_mask"]
    for shape in ((4,), (4, 1)):
        start = torch.tensor([-3, 17, 18, 500]).reshape(shape)
        end = torch.tensor([2, 18, 500, 17]).reshape(shape)
        with torch.no_grad():
            close(
                model(**inputs, start_positions=start, end_positions=end).loss,
                hf(**inputs, start_positions=start, end_positions=end).loss,
                1e-5,
            )
    assert model(**inputs, start_positions=start).loss is None


def test_electra_discriminator_counts_kept_tokens_only():
    hf, model = pair("electra", "ForPreTraining")
    inputs = inputs_for("electra", "ForMaskedLM")
    kept = inputs["attention_mask"].bool()
    labels = torch.ones(4, 18, dtype=torch.long).where(kept, -100)
    labels[:, 9] = 0
    with torch.no_grad():
        close(model(**inputs, labels=labels).loss, hf(**inputs, labels=labels).loss, 1e-5)
        assert model(inputs["input_ids"], torch.zeros(4, 18), labels=labels).loss == 0.0
    with pytest.raises(ValueError, match="labels: expected 0 or 1, got -100"):
        model(inputs["input_ids"], labels=labels)


# -- bad arguments -------------------------------------------------------------------------------------------


def _bad(task, what, match, error=ValueError, name="bert", **change):
    return pytest.param(name, task, change, error, match, id=f"{task}-{what}")


@pytest.mark.parametrize(
    ("name", "task", "change", "error", "match"),
    [
        _bad("ForMaskedLM", "range", r"labels: 120 at \(0, 1\)", labels=lambda b: _at(b, (0, 1), 120)),
        _bad("ForMaskedLM", "negative", r"labels: -1 at \(0, 1\)", labels=lambda b: _at(b, (0, 1), -1)),
        _bad(
            "ForMaskedLM",
            "masked",
            r"labels: 7 at \(1, 0\), where attention_mask",
            labels=lambda b: _at(b, (1, 0), 7),
        ),
        _bad("ForMaskedLM", "shape", "labels: expected shape", labels=lambda b: _at(b, (0, 1), 7)[:, 1:]),
        _bad("ForMaskedLM", "dtype", "labels: expected int64", TypeError, labels=lambda b: torch.ones(4, 18)),
        _bad("ForMaskedLM", "type", "labels: expected a torch.Tensor", TypeError, labels=lambda b: [[1]]),
        _bad("ForTokenClassification", "range", "labels: 5 at", labels=lambda b: _at(b, (0, 1), 5)),
        _bad("ForTokenClassification", "masked", "where attention_mask", labels=lambda b: _at(b, (1, 0), 1)),
        _bad(
            "ForSequenceClassification", "range", "labels: 5 at", labels=lambda b: torch.tensor([0, 1, 5, 2])
        ),
        _bad(
            "ForSequenceClassification",
            "shape",
            r"labels: expected shape \(4,\)",
            labels=lambda b: torch.zeros(3).long(),
        ),
        _bad(
            "ForSequenceClassification",
            "multi",
            r"labels: expected shape \(4, 5\)",
            labels=lambda b: torch.zeros(4),
        ),
        _bad(
            "ForSequenceClassification",
            "left",
            "attention_mask: position 0 of sequence 2",
            attention_mask=lambda b: _at(b, (2, 0), 0, "attention_mask"),
        ),
        _bad(
            "ForNextSentencePrediction", "range", "labels: 2 at", labels=lambda b: torch.tensor([0, 1, 2, 1])
        ),
        _bad(
            "ForPreTraining",
            "range",
            "next_sentence_label: 2 at",
            next_sentence_label=lambda b: torch.tensor([0, 1, 2, 1]),
        ),
        _bad(
            "ForPreTraining",
            "order",
            "sentence_order_label: 3 at",
            name="albert",
            sentence_order_label=lambda b: torch.tensor([0, 1, 3, 1]),
        ),
        _bad("ForMultipleChoice", "range", "labels: 2 at", labels=lambda b: torch.tensor([0, 2])),
        _bad(
            "ForMultipleChoice",
            "flat",
            r"input_ids: expected shape \(batch, choices",
            input_ids=lambda b: b["input_ids"][0],
        ),
        _bad(
            "ForMultipleChoice",
            "mask",
            "attention_mask: expected shape",
            attention_mask=lambda b: b["attention_mask"][0],
        ),
        _bad(
            "ForMultipleChoice",
            "neither",
            "input_ids, inputs_embeds: expected exactly one",
            input_ids=lambda b: None,
        ),
        _bad(
            "ForQuestionAnswering",
            "dtype",
            "start_positions: expected int64",
            TypeError,
            start_positions=lambda b: torch.zeros(4),
        ),
        _bad(
            "ForQuestionAnswering",
            "shape",
            r"end_positions: expected shape \(4,\)",
            end_positions=lambda b: torch.zeros(5).long(),
        ),
        _bad(
            "ForQuestionAnswering",
            "masked",
            "start_positions: 0 in sequence 1 is a masked token",
            start_positions=lambda b: torch.zeros(4).long(),
        ),
    ],
)
def test_bad_arguments(name, task, change, error, match):
    _, model = pair(name, task)
    inputs = inputs_for(name, task)
    inputs.update({k: make(inputs) for k, make in change.items()})
    with pytest.raises(error, match=match):
        model(**inputs)


def _at(inputs, where, value, name="labels"):
    t = inputs[name].clone() if name in inputs else torch.full_like(inputs["input_ids"], -100)
    t[where] = value
    return t


def test_families_without_a_head_are_refused_by_name():
    config = {
        m: EncoderConfig(m, hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
        for m in FAMILIES
    }
    with pytest.raises(ValueError, match=r"'roberta' has no head 'ForNextSentencePrediction'.*bert, ernie"):
        fastbert.AutoModelForNextSentencePrediction.from_config(config["roberta"])
    with pytest.raises(ValueError, match="'distilbert' has no head 'ForPreTraining'"):
        fastbert.BertForPreTraining(config["distilbert"])
    with pytest.raises(ValueError, match="RobertaForMaskedLM is for 'roberta', got 'bert'"):
        fastbert.RobertaForMaskedLM(config["bert"])
    with pytest.raises(TypeError, match="from_pretrained"):
        fastbert.AutoModelForMaskedLM(config["bert"])
    with pytest.raises(ValueError, match="num_labels: expected 2"):
        fastbert.BertForQuestionAnswering(EncoderConfig(hidden_size=24, num_labels=3))
    with pytest.raises(ValueError, match="num_labels: expected 2"):
        fastbert.AlbertForPreTraining(
            EncoderConfig("albert", hidden_size=32, num_attention_heads=2, intermediate_size=8, num_labels=3)
        )
    config["electra"].summary_type = "mean"
    with pytest.raises(ValueError, match="summary_type: only 'first'"):
        fastbert.ElectraForMultipleChoice(config["electra"])


def test_a_wholly_masked_sequence_is_finite():
    for name, task in (
        ("bert", "ForSequenceClassification"),
        ("roberta", "ForTokenClassification"),
        ("bert", "ForQuestionAnswering"),
    ):
        _, model = pair(name, task)
        inputs = inputs_for(name, task)
        inputs["attention_mask"][:] = 0
        assert all(t.isfinite().all() for t in model(**inputs).values())


# -- weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_decoder_is_tied(name):
    hf, model = pair(name, "ForMaskedLM")
    assert model.tied_weights() == dict(hf._tied_weights_keys)
    decoder = model.get_output_embeddings()
    assert decoder.weight is model.get_input_embeddings().weight
    for target, source in model.tied_weights().items():
        assert model.get_parameter(target) is model.get_parameter(source)
    # the table's gradient has both parts: the rows looked up, and all rows through the decoder
    inputs = inputs_for(name, "ForMaskedLM")
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[0, 0] = 100
    model.zero_grad()
    model(**inputs, labels=labels).loss.backward()
    assert decoder.weight.grad.abs().sum(1).gt(0).sum() > inputs["input_ids"].unique().numel()


@pytest.mark.parametrize("name", ["bert", "electra", "roberta"])
def test_untied_decoder(name):
    hf, model = build(name, "ForMaskedLM", tie_word_embeddings=False)
    assert model.tied_weights() == {}
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    inputs = inputs_for(name, "ForMaskedLM")
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        close(model(**inputs).logits[kept], hf(**inputs).logits[kept])


def test_set_output_embeddings():
    _, model = build("bert", "ForMaskedLM")
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        model.set_output_embeddings(torch.nn.Linear(48, 120))
    _, model = build("bert", "ForMaskedLM", tie_word_embeddings=False)
    decoder = torch.nn.Linear(48, 120)
    model.set_output_embeddings(decoder)
    assert model.get_output_embeddings() is decoder
    assert model.cls.predictions.bias is decoder.bias
    assert pair("bert", "ForTokenClassification")[1].get_output_embeddings() is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["bert", "electra", "albert", "distilbert", "mpnet"])
def test_resize_token_embeddings(name, tied, tmp_path):
    _, model = build(name, "ForMaskedLM", tie_word_embeddings=tied)
    inputs = inputs_for(name, "ForMaskedLM")
    before = model(**inputs).logits
    table = model.resize_token_embeddings(130)
    assert table is model.get_input_embeddings()
    assert (table.num_embeddings, model.get_output_embeddings().out_features, model.config.vocab_size) == (
        130,
    ) * 3
    assert 0 < table.weight[120:].std() < 0.04
    after = model(**inputs).logits
    assert after.shape[-1] == 130
    close(after[..., :120], before, 1e-6)
    inputs["input_ids"][3, 3] = 129
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[3, 3] = 128
    model(**inputs, labels=labels).loss.backward()
    assert table.weight.grad[129].abs().max() > 0
    model.save_pretrained(tmp_path)
    again = fastbert.AutoModelForMaskedLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    model.resize_token_embeddings(100, pad_to_multiple_of=64)
    assert table.num_embeddings == 128
    model.resize_token_embeddings(100)
    with pytest.raises(ValueError, match="input_ids: token id"):
        model(**inputs)
    for name_, args in (("new_num_tokens", (0,)), ("pad_to_multiple_of", (8, 0)), ("pad_token_id", (1,))):
        if name_ != "pad_token_id" or model.config.pad_token_id == 1:
            with pytest.raises(ValueError, match=name_):
                model.resize_token_embeddings(*args)
    assert table.num_embeddings == 100


def test_resize_of_a_model_without_decoder():
    config = EncoderConfig.from_hf(pair("bert", "ForMaskedLM")[0].config)
    for model in (AutoModel.from_config(config), fastbert.BertForTokenClassification(config)):
        size = config.vocab_size
        assert model.resize_token_embeddings() is model.get_input_embeddings()
        assert model.resize_token_embeddings(size + 3).weight.shape == (size + 3, 48)
        assert model(torch.tensor([[size + 2]]))[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "task"), [c for c in CASES if c[0] in ("bert", "xlm-roberta", "mpnet", "albert")]
)
def test_copies(name, task):
    _, model = pair(name, task)
    inputs = inputs_for(name, task)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
        assert len(list(twin.parameters())) == len(list(model.parameters()))  # tied ones are still one
        with torch.no_grad():
            assert torch.equal(twin(**inputs)[0], model(**inputs)[0])


def test_fresh_heads_are_initialised():
    torch.manual_seed(0)
    config = EncoderConfig.from_hf(pair("albert", "ForPreTraining")[0].config)
    config.initializer_range = 0.5
    model = fastbert.AlbertForPreTraining(config)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            assert 0.4 < parameter.std() < 0.6, key
        else:
            assert parameter.eq(
                1.0 if key.endswith("norm.weight") or "LayerNorm.weight" in key else 0.0
            ).all(), key


# -- the loss over the vocabulary, without logits ------------------------------------------------------------

VOCABULARY_TASKS = [
    (n, t)
    for n, t in CASES
    if t == "ForMaskedLM" or (t == "ForPreTraining" and n in ("bert", "albert", "ernie"))
]
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0, "attention_dropout": 0.0,
    "classifier_dropout_prob": 0.0, "classifier_dropout": 0.0,
}  # fmt: skip


class Vocabulary(TorchDispatchMode):
    """Row counts of all tensors made that have a number for each class."""

    def __init__(self, classes):
        super().__init__()
        self.classes, self.rows = classes, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            of_classes = isinstance(t, torch.Tensor) and t.dim() > 1 and t.shape[-1] == self.classes
            if of_classes and t.is_contiguous():  # which a transposed weight is not
                self.rows.append(t.numel() // self.classes)
        return out


@pytest.mark.parametrize(
    ("name", "task", "chunk_rows"),
    [(*c, rows) for c in VOCABULARY_TASKS for rows in (1000, 5) if rows == 1000 or c[0] == "bert"],
)
def test_training_computes_only_the_labelled_tokens(monkeypatch, name, task, chunk_rows):
    """A chunk of them at a time; loss and gradients are those of all logits."""
    monkeypatch.setitem(linear_cross_entropy.CHUNK_BYTES, "cpu", 2 * chunk_rows * 333 * 8)
    _, model = build(name, task, vocab_size=333, **NO_DROPOUT)
    model.double().train()
    inputs = inputs_for(name, task)
    labels = labels_for(model, inputs)
    labelled = int((labels["labels"] != -100).sum())
    assert 0 < labelled < inputs["attention_mask"].sum()
    results, logits = [], []
    for asked in (None, True):
        model.zero_grad(set_to_none=True)
        with Vocabulary(333) as seen:
            output = model(**inputs, **labels, output_logits=asked)
            output.loss.backward()
        results.append([output.loss, *(p.grad for p in model.parameters() if p.grad is not None)])
        logits.append(output.get("logits", output.get("prediction_logits")))
        if asked:
            assert max(seen.rows) == inputs["input_ids"].numel()
        else:
            assert max(seen.rows) == labelled if chunk_rows > labelled else max(seen.rows) <= 5
    assert isinstance(logits[0], DeferredTensor)
    assert not logits[0].is_computed
    assert torch.equal(logits[0], logits[1])
    assert logits[1].shape == (*inputs["input_ids"].shape, 333)
    for a, e in zip(*results, strict=True):
        close(a, e, 1e-12 + 1e-10 * e.abs().max().item())


@pytest.mark.parametrize("task", ["ForMaskedLM", "ForPreTraining"])
def test_when_logits_are_given(task):
    _, model = build("bert", task, **NO_DROPOUT)
    inputs = inputs_for("bert", task)
    labels = labels_for(model, inputs)
    key = {"ForMaskedLM": "logits", "ForPreTraining": "prediction_logits"}[task]
    others = [] if task == "ForMaskedLM" else ["seq_relationship_logits"]
    losses = []
    for training in (False, True):
        model.train(training)
        for given in ({}, labels):
            for asked in (None, True, False):
                if asked is False and not given:
                    with pytest.raises(ValueError, match="output_logits: False leaves only the loss"):
                        model(**inputs, output_logits=False)
                    continue
                output = model(**inputs, **given, output_logits=asked)
                wanted = asked is not False
                assert list(output) == ["loss"] * bool(given) + [key] * wanted + others
                assert output[key] is not None if wanted else getattr(output, key) is None
                if wanted:
                    deferred = asked is None and training and bool(given)
                    assert isinstance(output[key], DeferredTensor) is deferred
                if given:
                    losses.append(output.loss.item())
                tuples = model(**inputs, **given, output_logits=asked, return_dict=False)
                assert len(tuples) == len(output)
    assert max(losses) - min(losses) < 1e-5
    with pytest.raises(TypeError, match="output_logits: expected True, False or None, got 1"):
        model(**inputs, **labels, output_logits=1)
    if task == "ForPreTraining":  # no loss without both labels
        only = {"labels": labels["labels"]}
        assert model(**inputs, **only).prediction_logits is not None
        with pytest.raises(ValueError, match=r"output_logits: .* none without all labels"):
            model(**inputs, **only, output_logits=False)


def masked_lm(**config):
    """A masked-LM model in training, a padded batch with labels, and its logits computed in forward."""
    _, model = build("bert", "ForMaskedLM", **{"num_hidden_layers": 1, **NO_DROPOUT, **config})
    model.train()
    inputs = inputs_for("bert", "ForMaskedLM")
    inputs |= labels_for(model, inputs)
    return model, inputs, model(**inputs, output_logits=True).logits


def test_deferred_logits_say_what_they_are_without_being_computed():
    model, inputs, expected = masked_lm()
    logits = model(**inputs).logits
    for ask in (
        lambda t: t.shape, lambda t: t.dtype, lambda t: t.device, lambda t: t.ndim, lambda t: t.size(-1),
        lambda t: t.dim(), lambda t: t.numel(), len, lambda t: t.requires_grad, torch.is_floating_point,
    ):  # fmt: skip
        assert ask(logits) == ask(expected)
    assert logits.grad_fn is None
    assert isinstance(logits, torch.Tensor)
    assert not logits.is_computed
    tuples = model(**inputs, return_dict=False)
    assert len(tuples) == len(model(**inputs, output_logits=True, return_dict=False)) == 2
    assert not tuples[1].is_computed
    with torch.no_grad():
        assert not model(**inputs).logits.requires_grad


def test_deferred_logits_are_those_of_the_forward_however_they_are_touched():
    model, inputs, expected = masked_lm()
    labels, flat = inputs["labels"], expected.detach().flatten(0, 1)
    for touch in (
        lambda t: t.argmax(-1), lambda t: torch.softmax(t, -1), lambda t: t[0, 1], lambda t: t + 1,
        lambda t: 2 * t, lambda t: t.detach().numpy(), lambda t: t.tolist(), lambda t: torch.cat([t, t]),
        lambda t: torch.stack((t, t), dim=0), repr, lambda t: pickle.loads(pickle.dumps(t.detach())),
        lambda t: F.cross_entropy(t.flatten(0, 1), labels.flatten()), lambda t: t.view(-1, 120)[3],
        lambda t: ops_cross_entropy(t.flatten(0, 1), labels.flatten()), lambda t: t.mT, lambda t: t.data,
        lambda t: torch.compile(lambda x: x.argmax(-1), backend="eager")(t), lambda t: t.is_leaf,
    ):  # fmt: skip
        for mode in (torch.enable_grad, torch.no_grad):
            deferred = model(**inputs).logits
            with mode():
                a, e = touch(deferred), touch(expected)
            if isinstance(e, torch.Tensor):
                assert type(a) is torch.Tensor
                assert torch.equal(a, e)
                assert a.requires_grad == e.requires_grad
            elif not isinstance(e, (str, bool)):
                assert (torch.as_tensor(a) == torch.as_tensor(e)).all()
            else:
                assert a == e
            assert deferred.is_computed
            assert deferred.computed() is deferred.computed()
    with torch.inference_mode():
        inside = model(**inputs).logits
    assert torch.equal(inside.argmax(-1), flat.argmax(-1).view(labels.shape))


def test_deferred_logits_have_a_gradient():
    model, inputs, expected = masked_lm()
    weights = torch.randn(expected.shape, dtype=expected.dtype)
    expected.mul(weights).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert "bert.embeddings.word_embeddings.weight" in grads
    model.zero_grad()
    with torch.no_grad():  # the forward's grad mode counts, not that of the first touch
        logits = (output := model(**inputs)).logits
        assert not logits.requires_grad
        assert output.logits.argmax(-1).shape == inputs["labels"].shape
    output = model(**inputs)
    with torch.no_grad():
        output.logits.argmax(-1)
    output.logits.mul(weights).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in grads)
        assert parameter.grad is None or torch.equal(parameter.grad, grads[name]), name


def test_deferred_logits_know_the_autocast_of_the_forward():
    model, inputs, _ = masked_lm()
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = model(**inputs), model(**inputs, output_logits=True).logits
    assert output.logits.dtype == expected.dtype == torch.bfloat16
    wide, copied = output.logits.float(), output.logits.clone()
    assert isinstance(wide, DeferredTensor)
    assert isinstance(copied, DeferredTensor)
    assert wide.dtype == torch.float32
    assert not output.logits.is_computed
    assert torch.equal(wide, expected.float())
    assert torch.equal(output.logits, expected)
    assert torch.equal(copied, expected)
    assert copied.computed() is not output.logits.computed()
    assert type(output.logits.clone()) is type(output.logits.float()) is torch.Tensor
    model.double()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**inputs).logits.computed().dtype == torch.float64


def test_deferred_logits_are_refused_once_the_weights_have_changed():
    for change in (
        lambda model: torch.optim.SGD(model.parameters(), 0.1).step(),
        lambda model: model.half(),
        *(
            lambda model, name=name: torch.nn.init.zeros_(model.get_submodule(f"cls.predictions.{name}").bias)
            for name in ("transform.dense", "transform.LayerNorm", "decoder")
        ),
    ):
        model, inputs, expected = masked_lm()
        early, late = model(**inputs), model(**inputs)
        (early.loss + late.loss).backward(retain_graph=True)
        assert torch.equal(early.logits, expected)
        change(model)
        assert torch.equal(early.logits, expected)
        with pytest.raises(
            RuntimeError, match=r"^logits: the head's weights have changed .* output_logits=True"
        ):
            late.logits.argmax(-1)


def test_deferred_logits_where_they_cannot_be():
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            return grad

    model, inputs, expected = masked_lm()
    others = {name: p.detach() * 2 for name, p in model.named_parameters()}
    output = torch.func.functional_call(model, others, (), inputs)
    with pytest.raises(RuntimeError, match=r"^logits: the head's weights have changed"):
        output.logits.sum()
    eager = torch.func.functional_call(model, others, (), {**inputs, "output_logits": True})
    assert not torch.allclose(eager.logits, expected)
    taken = Exp.apply(model(**inputs).logits)
    assert torch.equal(taken, expected.exp())
    with pytest.raises(RuntimeError, match=r"^logits: an autograd.Function took .* output_logits=True"):
        taken.sum().backward()
    usual, wider = model.get_output_embeddings(), torch.nn.Linear(48, 130)
    model.cls.predictions.decoder = torch.nn.Sequential(wider)
    model.cls.predictions.decoder.weight = usual.weight
    with pytest.raises(RuntimeError, match=r"^logits: expected torch.float32 of shape \(4, 18, 120\)"):
        model(**inputs).logits.sum()
    model.cls.predictions.decoder = usual
    usual._is_fsdp_managed_module = True
    with pytest.raises(RuntimeError, match=r"^logits: their weights are gathered by FSDP"):
        model(**inputs).logits.sum()


@pytest.mark.parametrize("name", ["bert", "albert"])
@pytest.mark.parametrize("every", [False, True])
def test_training_with_no_label_or_with_all(name, every):
    hf, model = build(name, "ForMaskedLM", **NO_DROPOUT)
    model.train()
    inputs = inputs_for(name, "ForMaskedLM")
    labels = inputs["input_ids"].where(inputs["attention_mask"].bool(), -100)
    if every:
        with torch.no_grad():
            close(model(**inputs, labels=labels).loss, hf(**inputs, labels=labels).loss, 1e-5)
        return
    loss = model(**inputs, labels=torch.full_like(labels, -100)).loss
    assert loss.item() == 0.0
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert any(g is not None for g in grads)
    assert all(g is None or g.eq(0).all() for g in grads)


def test_training_with_a_decoder_of_another_kind():
    """A subclass, or one with a hook, is called: for the labelled tokens."""

    class Other(torch.nn.Linear):
        def forward(self, x):
            seen.append(x.shape[0])
            return super().forward(x) * 1.5

    _, model = build("bert", "ForMaskedLM", tie_word_embeddings=False, **NO_DROPOUT)
    inputs = inputs_for("bert", "ForMaskedLM")
    inputs |= labels_for(model, inputs)
    usual, seen = model.get_output_embeddings(), []
    other = Other(48, 120)
    other.load_state_dict(usual.state_dict())
    model.set_output_embeddings(other)
    expected = model(**inputs).loss
    actual = model.train()(**inputs).loss
    close(actual, expected, 1e-5)
    assert seen == [int(inputs["attention_mask"].sum()), int((inputs["labels"] != -100).sum())]
    model.set_output_embeddings(usual)
    handle = usual.register_forward_hook(lambda module, args, out: seen.append("hook") or out * 1.5)
    close(model(**inputs).loss, expected, 1e-5)
    handle.remove()
    assert seen[2:] == ["hook"]


def test_bad_labels_in_training():
    _, model = build("bert", "ForMaskedLM")
    model.train()
    inputs = inputs_for("bert", "ForMaskedLM")
    labels = labels_for(model, inputs)["labels"]
    with pytest.raises(ValueError, match="labels: expected shape"):
        model(**inputs, labels=labels[:, 1:])
    with pytest.raises(ValueError, match="labels: 120 at"):
        model(**inputs, labels=labels.where(labels == -100, 120))


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_the_trainer_of_transformers_trains_and_evaluates(name, tmp_path):
    """It asks for the loss in training, for logits in evaluation; label smoothing takes the labels out."""
    hf, model = build(name, "ForMaskedLM")
    inputs = inputs_for(name, "ForMaskedLM", batch_size=8)
    inputs |= labels_for(model, inputs)
    rows = [{k: v[i] for k, v in inputs.items()} for i in range(8)]
    for options in ({}, {"exclude_embeddings": True}, {"exclude_embeddings": True, "only_trainable": True}):
        assert model.num_parameters(**options) == hf.num_parameters(**options)
    before = model.get_input_embeddings().weight.detach().clone()
    for smoothing in (0.0, 0.1):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            label_smoothing_factor=smoothing, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        assert trainer.train().training_loss > 0
        predicted = trainer.predict(rows)
        assert predicted.predictions.shape == (8, 18, 120)
        assert predicted.metrics["test_loss"] > 0
    assert not torch.equal(model.get_input_embeddings().weight, before)


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "task"), CASES)
def test_head_dropout_is_transformers_own(name, task):
    """Only the head drops out here, drawing from torch's generator in transformers' order and shapes."""
    keys = {
        "albert": ["classifier_dropout_prob"],
        "albert-groups": ["classifier_dropout_prob"],
        "distilbert": ["seq_classif_dropout", "qa_dropout"],
        "electra": ["classifier_dropout", "summary_last_dropout"],
    }.get(name, ["classifier_dropout"])
    encoder = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    inputs = inputs_for(name, task)
    del inputs["attention_mask"]
    for probabilities in (dict.fromkeys(keys, 0.3), {}):
        hf, model = (m.train() for m in build(name, task, **encoder, **probabilities))
        outputs = []
        for m in (hf, model):
            torch.manual_seed(11)
            outputs.append(m(**inputs))
        for key in outputs[1]:
            close(outputs[1][key], outputs[0][key])


def test_dropout_probability_of_the_head():
    _, model = build(
        "bert",
        "ForTokenClassification",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout=0.25,
    )
    model.train()
    torch.manual_seed(0)
    x = model.dropout(torch.ones(100_000), model.family.token_dropout_key)
    assert abs((x == 0).float().mean() - 0.25) < 0.01
    assert x.max() == pytest.approx(1 / 0.75)


def test_gradient_checkpointing_changes_no_bit():
    _, model = build("bert", "ForTokenClassification", hidden_dropout_prob=0.1)
    inputs = inputs_for("bert", "ForTokenClassification")
    inputs |= labels_for(model, inputs)
    model.train()
    grads = []
    for every in (0, 1, 2):
        if every:
            model.gradient_checkpointing_enable(every_n_layers=every)
            assert model.is_gradient_checkpointing
        torch.manual_seed(7)
        model.zero_grad()
        model(**inputs).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*grads, strict=True))


def test_which_layers_are_recomputed(monkeypatch):
    from fastbert.models import encoder

    _, model = build("bert", "ForTokenClassification", num_hidden_layers=5)
    inputs = inputs_for("bert", "ForTokenClassification")
    seen = []

    def recompute(layer, *args, use_reentrant, **kwargs):
        assert use_reentrant is False
        seen.append(model.bert.layers().index(layer))
        return layer(*args, **kwargs)

    monkeypatch.setattr(encoder, "recompute", recompute)
    model.train()
    for every, expected in ((1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3])):
        seen.clear()
        model.activation_checkpointing_enable({"use_reentrant": False}, every)
        model(**inputs)
        assert seen == expected
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing
    model(**inputs)
    assert seen == expected
    for arguments, error in (
        (({"use_reentrant": True},), "use_reentrant=True is not supported"),
        (({"early_stop": False},), "'early_stop' is not supported"),
        ((None, 0), "every_n_layers: expected an integer >= 1, got 0"),
        ((None, True), "every_n_layers: expected an integer >= 1, got True"),
        ((None, 1, True), "offload: True is not supported"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            model.activation_checkpointing_enable(*arguments)
    assert not model.is_gradient_checkpointing


def test_training_with_dropout_learns_a_batch():
    _, model = build("bert", "ForSequenceClassification", num_hidden_layers=1)
    inputs = inputs_for("bert", "ForSequenceClassification")
    inputs |= labels_for(model, inputs)
    before = model(**inputs).loss.item()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    torch.manual_seed(0)
    for _ in range(15):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    assert model.eval()(**inputs).loss.item() < 0.3 * before


@pytest.mark.parametrize(
    ("name", "task", "training"),
    [
        ("bert", "ForMaskedLM", False),
        ("bert", "ForPreTraining", True),
        ("bert", "ForQuestionAnswering", False),
        ("roberta", "ForMultipleChoice", False),
        ("electra", "ForPreTraining", False),
    ],
)
def test_compiled_in_one_graph(name, task, training):
    _, model = build(name, task, num_hidden_layers=1, **(NO_DROPOUT if training else {}))
    inputs = inputs_for(name, task)
    labels = labels_for(model, inputs)
    if task == "ForQuestionAnswering":
        labels = {k: inputs["attention_mask"].argmax(1) for k in labels}
    inputs |= labels
    torch._dynamo.reset()
    if training:
        model.train()
    compiled = torch.compile(model, backend="eager", fullgraph=True)(**inputs)
    grads = []
    for output in (compiled, model(**inputs)):
        model.zero_grad()
        output.loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for key, value in model(**inputs).items():
        if isinstance(value, DeferredTensor):
            for touch in (lambda t: t.argmax(-1), lambda t: torch.argmax(t, -1)):
                with pytest.raises(
                    (AttributeError, TypeError), match=f"^{key}: not computed .*output_logits"
                ):
                    touch(compiled[key])
        else:
            close(compiled[key], value, 1e-6)
    assert ("prediction_logits" in compiled) == (task == "ForPreTraining" and name == "bert")
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    for task in TASKS:
        _, model = build("bert", task)
        model.to(dtype)
        inputs = inputs_for("bert", task)
        labels = labels_for(model, inputs)
        if task == "ForQuestionAnswering":
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        output = model(**inputs, **labels)
        assert output[1].dtype == dtype
        assert output.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        output.loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_autocast():
    for task in ("ForMaskedLM", "ForSequenceClassification"):
        _, model = pair("bert", task)
        inputs = inputs_for("bert", task)
        inputs |= labels_for(model, inputs)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            half = model(**inputs)
        with torch.no_grad():
            full = model(**inputs)
        assert half.logits.dtype == torch.bfloat16
        close(half.loss, full.loss, 0.05 * full.loss.item())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_config_defaults_are_transformers_own(model_type):
    theirs, mine = (
        transformers.AutoConfig.for_model(model_type).to_dict(),
        EncoderConfig(model_type).to_dict(),
    )
    shared = (mine.keys() & theirs.keys()) - {"id2label"}
    assert {k: mine[k] for k in shared} == {k: theirs[k] for k in shared}
    dropouts = {k for k in theirs if "dropout" in k}
    assert dropouts <= mine.keys()
