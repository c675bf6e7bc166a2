"""Left-to-right language modelling: labels, what a token sees, transformers' losses and models."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from fastbert.models.auto import AutoModelForMaskedLM
from fastbert.pretraining.formats import DocSentences, FullSentences, SegmentPairs
from fastbert.pretraining.masking import IGNORED, Masking
from fastbert.pretraining.objectives import masked
from fastbert.pretraining.objectives.left_to_right import LeftToRight, RightToLeft
from fastbert.pretraining.objectives.masked import Objective
from tests.support.objectives import (
    CLS,
    SEP,
    assert_as_stock,
    assert_work,
    batch_of,
    built,
    logits_of,
    numbered,
    pieces,
    tensors,
    tiny,
)


def objective(form=DocSentences, length: int = 40) -> LeftToRight:
    return LeftToRight(form(numbered(), length, 0))


@pytest.mark.parametrize("form", [DocSentences, FullSentences])
def test_every_token_is_told_by_the_one_before(form):
    batch = batch_of(objective(form), 20)
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    inner = 0
    for rows in pieces(batch):
        seen, told = ids[rows].tolist(), labels[rows].tolist()
        assert seen[0] == CLS
        assert seen[-1] == SEP
        assert told[-1] == IGNORED
        assert CLS not in told
        assert told[-2] == SEP  # a separator is predicted like any token
        for i in range(len(seen) - 1):
            assert told[i] == seen[i + 1]
            if seen[i] > SEP and seen[i + 1] > SEP:
                assert told[i] == seen[i] + 1  # the text is numbered
                inner += 1
            if seen[i] == SEP and seen[i + 1] != SEP:
                assert told[i] > SEP
    assert inner > 400
    assert batch.counts == {"left_to_right": len(ids) - 20}
    assert batch.inputs["labelled"] == (labels != IGNORED).sum() == len(ids) - 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_leak_from_later_tokens_or_other_sequences(dtype):
    ours = objective()
    batch, losses = batch_of(ours, 3), built(ours, dtype)
    inputs = tensors(batch)
    before = logits_of(losses, inputs)
    ends = batch.inputs["cu_seqlens"].tolist()
    for at in (0, 1, 7, ends[1] - 1, ends[1] + 5, ends[3] - 1):
        changed = inputs["input_ids"].clone()
        changed[at] = 50
        same = (logits_of(losses, {**inputs, "input_ids": changed}) == before).all(1)
        end = next(e for e in ends if e > at)
        assert same[:at].all()
        assert not same[at:end].any()  # itself and all later ones of its sequence
        assert same[end:].all()


def stock_loss(hf, batch) -> torch.Tensor:
    """The mean of all next-token losses, sequence by sequence."""
    inputs, total = tensors(batch), 0.0
    for rows in pieces(batch):
        ids, types = inputs["input_ids"][rows][None], inputs["token_type_ids"][rows][None]
        logits = hf(ids, token_type_ids=types).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    return total / batch.counts["left_to_right"]


def test_losses_and_gradients_are_transformers():
    ours = objective(FullSentences)
    batch, model = batch_of(ours, 4), transformers.BertLMHeadModel
    assert_as_stock(ours, batch, "left_to_right", lambda hf: stock_loss(hf, batch), model)


def test_right_predictions_are_counted_piece_by_piece(monkeypatch):
    ours, batch = objective(), batch_of(objective(), 4)
    losses, inputs = built(ours), tensors(batch)
    # about every third label is what the model says
    best = logits_of(losses, inputs).argmax(-1)
    said = (torch.arange(len(best)) % 3 == 0) & (inputs["labels"] != IGNORED)
    inputs["labels"] = torch.where(said, best, inputs["labels"])
    for rows in (1 << 12, 16, 1):
        monkeypatch.setattr(masked, "_ROWS", rows)
        assert losses(inputs, True)[1]["left_to_right"] == said.sum() > 16


def test_it_is_saved_as_a_decoder(tmp_path):
    losses = built(objective(), torch.float32)
    assert set(losses.exports) == {"model"}
    losses.exports["model"].save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["is_decoder"] is True
    ids = tensors(batch_of(objective(), 1))["input_ids"][None]
    expected = logits_of(losses, tensors(batch_of(objective(), 1)))
    for cls in (transformers.BertLMHeadModel, transformers.BertForMaskedLM, AutoModelForMaskedLM):
        with torch.no_grad():
            again = cls.from_pretrained(tmp_path).eval()(ids).logits[0]
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)
    encoder = transformers.AutoModel.from_pretrained(tmp_path).eval()  # stays causal in fine-tuning
    with torch.no_grad():
        first = encoder(ids).last_hidden_state[0, :5]
        again = encoder(ids[:, :5]).last_hidden_state[0]
    torch.testing.assert_close(first, again)


def test_a_model_that_was_not_causal_becomes_so():
    ours = objective()
    plain = Objective(ours.format).model(tiny(numbered().vocab_size))
    assert not plain.config.is_decoder
    config = tiny(numbered().vocab_size)
    assert ours.model(config).config.is_decoder
    assert not config.is_decoder  # the caller's stays as it is
    assert ours.losses(plain).model.config.is_decoder is True
    never = Objective(ours.format).model(tiny(numbered().vocab_size, "albert", embedding_size=16))
    for call in (lambda: ours.losses(never), lambda: ours.model(never.config)):
        with pytest.raises(ValueError, match="is_decoder: True is not supported; transformers' albert"):
            call()
    assert not never.config.is_decoder


def test_right_to_left_reverses_each_sequence(tmp_path):
    forward, form = batch_of(objective(), 20), DocSentences(numbered(), 40, 0)
    ours = RightToLeft(form)
    backward = batch_of(ours, 20)
    assert backward.counts == {"right_to_left": forward.counts["left_to_right"]}
    for rows in pieces(forward):
        for name in ("input_ids", "token_type_ids"):
            assert (backward.inputs[name][rows] == forward.inputs[name][rows][::-1]).all()
        assert (backward.inputs["labels"][rows][:-1] == forward.inputs["input_ids"][rows][::-1][1:]).all()
        assert backward.inputs["labels"][rows][-1] == IGNORED
    built(ours, torch.float32).exports["model"].save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["is_decoder"], content["right_to_left"]) == (True, True)
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).config.right_to_left
    assert not AutoModelForMaskedLM.from_config(tiny(50)).config.right_to_left
    assert ours.hash != objective().hash


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="format: expected one without classes of pairs"):
        objective(SegmentPairs)
    with pytest.raises(ValueError, match="masking: nothing is masked left to right"):
        LeftToRight(DocSentences(numbered(), 40, 0), Masking("word"))


def test_work_is_that_of_a_triangle():
    ours, batch = objective(), batch_of(objective(), 3)
    pairs = sum(i + 1 for n in batch.lengths.tolist() for i in range(n))
    assert_work(ours, batch, "left_to_right", int(batch.lengths.sum()), pairs)
