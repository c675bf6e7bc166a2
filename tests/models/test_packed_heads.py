"""Heads on packed tokens, and causal models: against the padded call, and against transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import fastbert
from fastbert.layers import packing
from fastbert.models.config import EncoderConfig
from tests.support.hf_models import BERT_LAYERS
from tests.support.model_pairs import CASES, build, close, inputs_for, labels_for, pair

NEVER_CAUSAL = ("distilbert", "albert", "mpnet")
CAUSAL = [name for name in BERT_LAYERS if name.split("-")[0] not in NEVER_CAUSAL]


def right_padded(name: str, task: str) -> dict[str, torch.Tensor]:
    """A batch whose kept tokens begin at position 0; the last sequence keeps one token."""
    inputs = inputs_for(name, task)
    mask = inputs["attention_mask"]
    lengths = mask.sum(-1, keepdim=True)
    lengths.view(-1)[-1] = 1
    keep = torch.arange(mask.shape[-1]) < lengths
    ids = torch.where(keep, inputs["input_ids"].clamp_min(5), 1 if name in ("roberta", "mpnet") else 0)
    return {**inputs, "input_ids": ids, "attention_mask": keep.long()}


def packed(inputs: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(the same batch without padding, the mask)."""
    keep = inputs["attention_mask"].flatten(0, -2).bool()
    rows = {k: v.flatten(0, -2)[keep] for k, v in inputs.items() if k != "attention_mask"}
    ends = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int()
    return {**rows, "cu_seqlens": ends}, keep


@pytest.mark.parametrize(("name", "task"), CASES)
def test_heads_unpack_nothing_but_logits_of_tokens(name, task, monkeypatch):
    _, model = pair(name, task)
    shapes, unpack = [], packing.unpack
    monkeypatch.setattr(packing, "unpack", lambda x, *args: shapes.append(x.shape[1:]) or unpack(x, *args))
    with torch.no_grad():
        model(**right_padded(name, task))
    tokens = {"ForTokenClassification": (5,), "ForQuestionAnswering": (2,), "ForMaskedLM": (120,)}
    tokens["ForPreTraining"] = () if name.startswith("electra") else (120,)
    assert shapes == ([tokens[task]] if task in tokens else [])


def packed_labels(labels: dict[str, torch.Tensor], keep: torch.Tensor) -> dict[str, torch.Tensor]:
    return {k: v[keep] if v.shape == keep.shape else v for k, v in labels.items()}


@pytest.mark.parametrize(("name", "task"), CASES)
def test_packed_equals_padded(name, task):
    _, model = pair(name, task)
    inputs = right_padded(name, task)
    rows, keep = packed(inputs)
    if task == "ForMultipleChoice":
        rows["choices"] = 2
    labels = labels_for(model, inputs)
    if task == "ForQuestionAnswering":
        lengths = keep.sum(1)
        labels = {k: torch.minimum(v, lengths - 1) for k, v in labels.items()}
    whole = {"output_hidden_states": True, "output_attentions": True}
    results = []
    for given, targets in ((inputs, labels), (rows, packed_labels(labels, keep))):
        model.zero_grad(set_to_none=True)
        output = model(**given, **targets, **whole)
        output.loss.backward()
        grads = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        results.append((output, grads))
    model.zero_grad(set_to_none=True)
    (padded, expected), (flat, actual) = results
    assert list(padded.keys()) == list(flat.keys())
    close(flat.loss, padded.loss, 1e-6)
    for key in flat:
        if "logits" in key:
            whole = padded[key]
            torch.testing.assert_close(flat[key], whole[keep] if whole.shape[:2] == keep.shape else whole)
    for ours, theirs in zip(flat.hidden_states, padded.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs[keep])
    for ours, theirs in zip(flat.attentions, padded.attentions, strict=True):
        longest = int(keep.sum(1).max())
        # Longformer's are bands
        columns = None if name == "longformer" else longest
        torch.testing.assert_close(ours, theirs[:, :, :longest, :columns])
    assert expected.keys() == actual.keys()
    for key, grad in actual.items():
        torch.testing.assert_close(grad, expected[key], rtol=1e-4, atol=1e-6, msg=key)


def test_the_encoders_packed_call():
    _, head = pair("bert", "ForSequenceClassification")
    model, inputs = head.base_model, right_padded("bert", "ForSequenceClassification")
    rows, keep = packed(inputs)
    with torch.no_grad():
        padded, flat = model(**inputs), model(**rows, max_seqlen=40)
        first = model(**rows, first_token_only=True)
        embeds = model.embeddings.word_embeddings(rows.pop("input_ids"))
        embedded = model(inputs_embeds=embeds, **rows)
    torch.testing.assert_close(flat.last_hidden_state, padded.last_hidden_state[keep])
    torch.testing.assert_close(embedded.last_hidden_state, flat.last_hidden_state)
    torch.testing.assert_close(first.last_hidden_state, padded.last_hidden_state[:, 0])
    for output in (flat, first, embedded):
        torch.testing.assert_close(output.pooler_output, padded.pooler_output)


def test_a_neighbour_changes_no_bit():
    """Logits and gradients of the labelled sequence, with other tokens before and after it."""
    _, model = pair("bert", "ForMaskedLM")
    ends = torch.tensor([0, 7, 18, 18, 23], dtype=torch.int32)
    ids = torch.randint(5, 120, (23,), generator=torch.Generator().manual_seed(0))
    labels = torch.full((23,), -100)
    labels[9], labels[14] = 3, 4
    other = ids.flip(0)
    other[7:18] = ids[7:18]
    found = []
    for tokens in (ids, other):
        model.zero_grad(set_to_none=True)
        output = model(tokens, cu_seqlens=ends, labels=labels)
        output.loss.backward()
        layers = [p.grad.clone() for k, p in model.named_parameters() if ".layer." in k]
        found.append((output.logits[7:18].detach(), layers))
    model.zero_grad(set_to_none=True)
    assert torch.equal(found[0][0], found[1][0])
    assert all(map(torch.equal, found[0][1], found[1][1]))
    alone = model(ids[7:18][None]).logits[0]
    close(found[0][0], alone, 1e-5)


def test_a_position_past_the_sequence_is_not_counted():
    _, model = pair("bert", "ForQuestionAnswering")
    ids, ends = torch.arange(5, 20), torch.tensor([0, 10, 15], dtype=torch.int32)
    with torch.no_grad():
        both = model(
            ids, cu_seqlens=ends, start_positions=torch.tensor([3, 7]), end_positions=torch.tensor([-4, 5])
        )
        alone = model(
            ids[:10], cu_seqlens=ends[:2], start_positions=torch.tensor([3]), end_positions=torch.tensor([0])
        )
    close(both.loss, alone.loss, 1e-6)


# --- causal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("name", CAUSAL)
def test_is_decoder_equals_transformers(name, task):
    hf, model = build(name, task, is_decoder=True)
    hf, model = hf.double(), model.double()
    inputs = right_padded(name, task)
    kept = inputs["attention_mask"].bool()
    labels = labels_for(hf, inputs)
    for m in (hf, model):
        m.zero_grad(set_to_none=True)
    expected, actual = hf(**inputs, **labels), model(**inputs, **labels)
    close(actual.loss, expected.loss, 1e-9)
    if task == "ForMaskedLM":
        close(actual.logits[kept], expected.logits[kept], 1e-9)
    else:
        close(actual.logits, expected.logits, 1e-9)
    actual.loss.backward(), expected.loss.backward()
    reference = {k: p.grad for k, p in hf.named_parameters(remove_duplicate=False)}
    for key, parameter in model.named_parameters():
        if reference[key] is not None:
            close(parameter.grad, reference[key], 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_changes_what_later_tokens_do(dtype):
    """In inference (fused layers elsewhere), packed and padded, whole and first tokens alone."""
    _, head = pair("bert", "ForSequenceClassification")
    model = copy.deepcopy(head.base_model).to(dtype)
    ids = torch.randint(5, 120, (2, 64), generator=torch.Generator().manual_seed(1))
    later = ids.clone()
    later[:, 40:] = 9
    ends = torch.tensor([0, 64, 128], dtype=torch.int32)
    with torch.no_grad():
        for call in (
            lambda x, causal: model(x, causal=causal).last_hidden_state,
            lambda x, causal: model.forward_packed(x.flatten(), ends, 64, causal=causal).reshape(2, 64, -1),
            lambda x, causal: model(x.flatten(), cu_seqlens=ends, causal=causal)[0].reshape(2, 64, -1),
        ):
            assert torch.equal(call(ids, True)[:, :40], call(later, True)[:, :40])
            assert not torch.equal(call(ids, False)[:, :40], call(later, False)[:, :40])
            assert torch.equal(call(ids, None), call(ids, False))
        first = [model(x, causal=True, first_token_only=True)[0] for x in (ids, later)]
        assert torch.equal(*first)
        torch.testing.assert_close(first[0][:, 0], model(ids, causal=True)[0][:, 0])
        inferred = model(ids, causal=True)[0]
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    close(model(ids, causal=True)[0].float(), inferred.float(), tolerance)


def test_a_saved_causal_model_stays_causal(tmp_path):
    _, model = build("bert", "ForMaskedLM", is_decoder=True)
    model.save_pretrained(tmp_path)
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    again = fastbert.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(again(ids).logits, expected)
        close(back(ids).logits, expected)
        assert not torch.equal(again(ids, causal=False).logits, expected)


def test_is_decoder_may_be_null():
    config = EncoderConfig("bert", is_decoder=None)
    assert config.is_decoder is None
    assert config.mathematics()["is_decoder"] is False
