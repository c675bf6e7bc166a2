"""Longformer against transformers: windows and global tokens, in inference, training and half precision."""

from __future__ import annotations

import copy
import functools
import json

import pytest
import torch
import transformers

import fastbert
from fastbert.analysis.walk import batches
from fastbert.layers import global_tokens
from fastbert.layers.taps import Taps
from fastbert.models.config import EncoderConfig
from fastbert.models.encoder import tapped
from fastbert.tasks.examples import Examples
from tests.support import model_pairs
from tests.support.accelerated_models import same_gradients
from tests.support.hf_models import hf_model
from tests.support.model_pairs import build, close, kept_rows, native, no_larger_errors, same_packed_and_alone

# Around the edges of windows of 4 and 8 tokens each side
LENGTHS = (1, 4, 5, 8, 9, 17, 18, 70)
MORE = (2, 63, 64, 65, 128, 129, 257, 600)
# Sequence -> its global tokens
GLOBALS = {
    "none": {},
    "first": {row: [0] for row in range(8)},
    "some": {2: [1, 4], 5: [16], 7: [0, 3, 9, 30, 69]},
    "one": {7: [35]},
    "all": {0: [0], 4: list(range(9)), 7: list(range(70))},
}


@functools.cache
def both(windows=(8, 16), **config):
    """(transformers' model, ours), in eval; shared between tests that change neither."""
    config = {"num_hidden_layers": len(windows), "attention_window": list(windows), **config}
    hf = hf_model("longformer", **config)
    return hf, native(hf)


# The config of `both`, for models with heads
TWO = {"num_hidden_layers": 2, "attention_window": [8, 16], "num_labels": 3}


def exact(*args, **config):
    return tuple(copy.deepcopy(m).double() for m in both(*args, **config))


def ragged(lengths=LENGTHS, which="first"):
    ids, mask = model_pairs.ragged(lengths).values()
    flags = torch.zeros_like(mask)
    for row, columns in GLOBALS[which].items():
        flags[row, columns] = 1
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask, "global_attention_mask": flags}


@pytest.mark.parametrize(
    ("windows", "lengths", "which"),
    [*(((8, 16), LENGTHS, w) for w in GLOBALS), pytest.param((128,), MORE, "first", marks=pytest.mark.sweep)],
    ids=str,
)
@torch.no_grad()
def test_ragged_lengths(windows, lengths, which, monkeypatch):
    """No padding to the window (allenai/longformer#102), packed, padded, with holes, and each text alone."""
    monkeypatch.setattr(global_tokens, "_dense", None)  # which scores all pairs of tokens
    hf, model = exact(windows, max_position_embeddings=1024)
    inputs = ragged(lengths, which)
    found = kept_rows(model, inputs)
    close(found, kept_rows(hf, inputs), 1e-9)
    same_packed_and_alone(model, inputs, found)
    mask = inputs["attention_mask"]
    mask *= torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) > 0.3
    found = kept_rows(model, inputs)
    close(found, kept_rows(hf, inputs), 1e-9)
    # 2 means global, and the mask of global tokens is not needed
    merged = inputs["attention_mask"] * (1 + inputs.pop("global_attention_mask"))
    close(kept_rows(model, {**inputs, "attention_mask": merged}), found, 1e-12)
    # Positions skip a hole of padding, distances do not
    inputs["attention_mask"][:, 0] = 1
    inputs["input_ids"] = inputs["input_ids"].where(inputs["attention_mask"].bool(), 1)
    close(kept_rows(model, inputs), kept_rows(hf, inputs), 1e-9)


@pytest.mark.parametrize("which", ["first", "some", "all"])
def test_gradients(which):
    hf, model = exact()
    inputs = ragged((1, 9, 20, 8, 9, 17, 18, 70), which)
    for m in (hf, model):
        rows = kept_rows(m, inputs)
        (rows * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    same_gradients(model, hf, 1e-9)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_scores_of_all_pairs_have_the_same_results_dropout_and_gradients(rate):
    """Those are used where probabilities are asked for, and under torch.compile."""
    models = [exact(attention_probs_dropout_prob=rate)[1].train() for _ in range(2)]
    inputs, found = ragged(which="some"), []
    inputs["attention_mask"][6, 3:5] = 0
    gates = torch.rand(2, 3, dtype=torch.float64)
    for model, asked in zip(models, (False, True), strict=True):
        torch.manual_seed(1)
        out = model(**inputs, head_mask=gates, output_attentions=asked)
        found.append(out.last_hidden_state[inputs["attention_mask"].bool()])
        (
            found[-1] * torch.randn(found[-1].shape, generator=torch.Generator().manual_seed(0))
        ).sum().backward()
    close(*found, 1e-11)
    same_gradients(*models, 1e-11)


@pytest.mark.sweep
@torch.no_grad()
def test_compiled():
    model, inputs = exact()[1], ragged(which="some")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(kept_rows(compiled, inputs), kept_rows(model, inputs), 1e-11)
    with pytest.raises(Exception, match="output_attentions: expected False under torch"):
        compiled(**inputs, output_attentions=True)


@pytest.mark.parametrize("called", [None, "encoder.layer.1.attention.self", "head", "encoder"])
@pytest.mark.parametrize("which", GLOBALS)
@torch.no_grad()
def test_bands_of_attention(which, called):
    """Those of transformers, also where modules are called; holes; packed; each text alone."""
    task = "ForTokenClassification" if called in ("head", "encoder") else ""
    hf, model = build("longformer", task, **TWO) if task else exact()
    hf, model = hf.double(), model.double()
    if called is not None:
        path = {"head": "classifier", "encoder": "longformer"}.get(called, called)
        model.get_submodule(path).register_forward_hook(lambda *_: None)
    inputs = ragged(which=which)
    flags, kept = inputs["global_attention_mask"].bool(), inputs["attention_mask"]
    for holes in (False, True):
        if holes:
            kept *= torch.rand(kept.shape, generator=torch.Generator().manual_seed(1)) > 0.3
            kept[:, 0] = 1
        found, wanted = (m(**inputs, output_attentions=True) for m in (model, hf))
        counts = (flags & kept.bool()).sum(1)
        for i, width in enumerate((9, 17)):
            close(found.attentions[i], wanted.attentions[i], 1e-9)
            assert found.attentions[i].shape[-1] == width + counts.max()
            for row, count in enumerate(counts) if counts.any() else ():
                own = found.global_attentions[i][row]
                # transformers' are as long as the padded batch
                close(own[..., :count], wanted.global_attentions[i][row, :, :70, :count], 1e-9)
                assert own[..., count:].eq(0).all()
        assert (found.get("global_attentions") is None) == (not counts.any())
    assert type(model(**inputs, output_attentions=True, return_dict=False)[-1]) is tuple
    kept = ragged()["attention_mask"].bool()
    found = model(**ragged(which=which), output_attentions=True)
    packed = {"cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).int(), "global_attention_mask": flags[kept]}
    alone = model(inputs["input_ids"][kept], **packed, output_attentions=True)
    for key in found.keys() & {"attentions", "global_attentions"}:
        for a, b in zip(alone[key], found[key], strict=True):
            close(a, b, 1e-11)


@torch.no_grad()
def test_projections_of_global_tokens_run_where_there_are_some(monkeypatch):
    model, apply_linear, seen = both()[1], global_tokens.apply_linear, []
    monkeypatch.setattr(
        global_tokens, "apply_linear", lambda m, x: (seen.append(len(x)), apply_linear(m, x))[1]
    )
    inputs = ragged((1, 18, 9), "none")
    model(**inputs)
    assert seen == []
    inputs["global_attention_mask"][1, [2, 3, 17]] = 1
    model(**inputs)
    assert seen == 2 * [3, 18, 18]  # queries, keys and values of each layer


@torch.no_grad()
def test_large_scores_of_one_part():
    """One global token, or one token of the window, has nearly all of the weight."""
    hf, model = exact()
    for m in (hf, model):
        for layer in m.encoder.layer:
            layer.attention.self.query.weight.mul_(60)
    inputs = ragged(which="some")
    close(kept_rows(model, inputs), kept_rows(hf, inputs), 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["first", "some"])
def test_error_is_no_larger_than_transformers_own(dtype, which):
    hf, model = both((64, 64))
    no_larger_errors((model, hf), dtype, [ragged((1, 64, 65, 70, 33, 70, 66, 70), which)])


@pytest.mark.parametrize(
    ("task", "first", "last"),
    [
        ("SequenceClassification", 0, 1),
        ("QuestionAnswering", 0, 4),
        ("MultipleChoice", 6, 9),
        ("MaskedLM", 0, 0),
    ],
)
@torch.no_grad()
def test_global_tokens_by_default(task, first, last):
    """A forgotten mask of global tokens (huggingface/transformers#12993) is that of transformers."""
    hf, model = build("longformer", f"For{task}")
    ids = torch.tensor([[7, 8, 9, 10, 2, 2, 11, 12, 2]])
    ids = ids[None] if task == "MultipleChoice" else ids
    flags = torch.zeros_like(ids)
    flags[..., first:last] = 1
    found = model(ids, global_attention_mask=flags)[0]
    close(found, hf(input_ids=ids, global_attention_mask=flags)[0])
    close(hf(input_ids=ids)[0], found)
    assert torch.equal(model(ids)[0], found)
    embeds = {"inputs_embeds": model.get_input_embeddings()(ids)}
    # Without ids nothing is known of separators
    separated = task in ("QuestionAnswering", "MultipleChoice")
    close(model(**embeds)[0], hf(**embeds)[0] if separated else found)


def test_files_and_windows(tmp_path):
    """One window for all layers, or one per layer, in files of either side."""
    hf, model = both()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert again.config.attention_window == [8, 16]
    assert all(torch.equal(t, again.state_dict()[key]) for key, t in hf.state_dict().items())
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_window": 8}))
    with pytest.raises(fastbert.CheckpointError, match="attention_window"):
        fastbert.AutoModel.from_pretrained(tmp_path)
    each = [EncoderConfig("longformer", attention_window=w, num_hidden_layers=2) for w in (10, [10, 10])]
    assert [config.window(1) for config in each] == [(5, 5), (5, 5)]
    assert each[0].mathematics() == each[1].mathematics()


def test_what_knows_no_global_tokens_refuses_them():
    model, ids = both()[1], torch.full((2, 9), 7)
    packed = {"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}
    with pytest.raises(ValueError, match="cu_seqlens: expected to rise from 0 to total = 9"):
        build("longformer", "ForQuestionAnswering")[1](ids[0], cu_seqlens=packed["cu_seqlens"] + 1)
    for message, given in {
        "causal: got True, but the call has global tokens": {"causal": True},
        "attention_mask: expected shape": {"attention_mask": torch.ones(2, 1, 9, 9, dtype=torch.bool)},
        "global_attention_mask: expected shape": {"global_attention_mask": torch.ones(2, 8)},
    }.items():
        with pytest.raises(ValueError, match=message):
            model(ids, **{"global_attention_mask": torch.eye(2, 9), **given})
    with pytest.raises(ValueError, match="attention_mask: expected 1, or 2 for a global token"):
        model(ids[0], attention_mask=torch.zeros(9), **packed)
    with pytest.raises(ValueError, match="is tapped"), tapped(model, Taps()):
        model(ids[0], global_attention_mask=ids[0] == 7, **packed)
    with pytest.raises(ValueError, match="no analysis knows"):
        next(batches(model, Examples))
    with pytest.raises(TypeError, match="at most 2 positional arguments, got 3; pass token_type_ids by name"):
        model(ids, ids, ids)
