"""transformers' pipelines on accelerated and on native models answer as on the stock model."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils import _pytree

import fastbert
from tests.support.accelerated_models import TEXTS, assert_fused, tiny
from tests.support.model_pairs import native


class SpanPipeline(transformers.Pipeline):
    """Question answering: the best span of the context. transformers 5.23 has no such pipeline."""

    def _sanitize_parameters(self, **settings):
        return {}, {}, {}

    def preprocess(self, inputs):
        encoded = self.tokenizer(inputs["question"], inputs["context"], return_tensors="pt")
        return dict(encoded) | {"words": encoded["input_ids"]}

    def _forward(self, inputs):
        words = inputs.pop("words")
        out = self.model(**inputs)
        inside = (inputs["token_type_ids"] == 1) & inputs["attention_mask"].bool()
        return {"start": out.start_logits, "end": out.end_logits, "words": words, "inside": inside}

    def postprocess(self, outputs):
        inside = outputs["inside"][0]
        start = outputs["start"][0].masked_fill(~inside, -torch.inf).softmax(-1)
        end = outputs["end"][0].masked_fill(~inside, -torch.inf).softmax(-1)
        spans = (start[:, None] * end[None, :]).triu()
        best = int(spans.argmax())
        first, last = divmod(best, len(start))
        answer = self.tokenizer.decode(outputs["words"][0, first : last + 1])
        return {"answer": answer, "score": spans.max().item()}


MASKED = [
    "paris is the [MASK] of france",
    "some rows are [MASK] while others are very very long",
    "the [MASK]",
]
PIPELINES = {  # name -> (class of the model, what is asked, options, arguments of the call)
    "feature-extraction": ("AutoModel", TEXTS, {}, {}),
    "fill-mask": ("AutoModelForMaskedLM", MASKED, {"top_k": 4}, {}),
    "text-classification": ("AutoModelForSequenceClassification", TEXTS, {"top_k": None}, {}),
    "token-classification": ("AutoModelForTokenClassification", TEXTS, {"ignore_labels": []}, {}),
    "zero-shot-classification": (
        "AutoModelForSequenceClassification",
        TEXTS,
        {},
        {"candidate_labels": ["france", "words rows"], "hypothesis_template": "when {}"},
    ),
    "question-answering": (
        "AutoModelForQuestionAnswering",
        [
            {"question": "where is the capital of france", "context": TEXTS[1]},
            {"question": "when", "context": TEXTS[0]},
        ],
        {},
        {},
    ),
}


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", ["native", "accelerated"])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_answer_as_on_the_stock_model(tokenizer, name, kind, batch_size, caplog):
    auto, texts, options, call = PIPELINES[name]
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    sizes = (
        {}
        if name == "question-answering"
        else {"id2label": labels, "label2id": {v: k for k, v in labels.items()}}
    )
    stock = tiny(getattr(transformers, auto), **sizes)

    def pipeline(model):
        if name == "question-answering":
            return SpanPipeline(model=model, tokenizer=tokenizer)
        return transformers.pipeline(name, model=model, tokenizer=tokenizer, device="cpu", **options)

    with caplog.at_level("ERROR"):
        pipe = pipeline(stock)
        expected = pipe(texts, batch_size=batch_size, **call)
        if kind == "native":
            pipe = pipeline(native(stock))
            assert type(stock).__name__ in repr(pipe)
        else:
            assert fastbert.accelerate(pipe) is pipe
        found = pipe(texts, batch_size=batch_size, **call)
    assert "is not supported" not in caplog.text
    if kind == "accelerated":
        assert_fused(pipe)
        assert_fused(pipe.model)
    if name == "feature-extraction":  # the stock model's padded rows are not 0
        lengths = [len(text.split()) + 2 for text in texts]
        assert not any(torch.tensor(f)[0, n:].any() for f, n in zip(found, lengths, strict=True))
        expected, found = (
            [rows[0][:n] for rows, n in zip(each, lengths, strict=True)] for each in (expected, found)
        )
    (expected, spec), (found, own) = (_pytree.tree_flatten(each) for each in (expected, found))
    assert own == spec
    assert len({float(value) for value in expected if not isinstance(value, (int, str))}) > 1
    for a, e in zip(found, expected, strict=True):
        assert a == (e if isinstance(e, (int, str)) else pytest.approx(e, rel=1e-5, abs=1e-5))
