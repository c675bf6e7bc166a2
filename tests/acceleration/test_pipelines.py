"""transformers' pipelines on accelerated models."""

from __future__ import annotations

import pytest
import torch
import transformers

import fastbert
from tests.support.stock_models import TEXTS, assert_close, assert_fused, tiny


def before_and_after(make, texts, **settings):
    """The answers of a pipeline before and after `accelerate`."""
    pipe = make()
    before = pipe(texts, **settings)
    assert fastbert.accelerate(pipe) is pipe
    after = pipe(texts, **settings)
    assert_fused(pipe)
    assert_fused(pipe.model)
    return before, after


def test_feature_extraction(tokenizer):
    def make():
        return transformers.pipeline(
            "feature-extraction", model=tiny(transformers.AutoModel), tokenizer=tokenizer
        )

    before, after = before_and_after(make, TEXTS)
    for b, a in zip(before, after, strict=True):
        assert_close(torch.tensor(a), torch.tensor(b))
    before, after = before_and_after(make, TEXTS, batch_size=4, return_tensors=True)
    for text, b, a in zip(TEXTS, before, after, strict=True):
        length = len(text.split()) + 2
        assert a.shape == b.shape == (1, 24, 48)
        assert_close(a[0, :length], b[0, :length])
        assert not a[0, length:].any()


@pytest.mark.parametrize("batch_size", (1, 3))
def test_fill_mask(tokenizer, batch_size):
    def make():
        model = tiny(transformers.AutoModelForMaskedLM)
        return transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=4)

    texts = ["paris is the [MASK] of france", "some rows are [MASK] while others go on and on", "the [MASK]"]
    before, after = before_and_after(make, texts, batch_size=batch_size)
    for b, a in zip(before, after, strict=True):
        assert [x["sequence"] for x in a] == [x["sequence"] for x in b]
        assert_close(torch.tensor([x["score"] for x in a]), torch.tensor([x["score"] for x in b]))


@pytest.mark.parametrize("batch_size", (1, 4))
def test_text_classification(tokenizer, batch_size):
    def make():
        model = tiny(num_labels=3)
        return transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)

    before, after = before_and_after(make, TEXTS, batch_size=batch_size)
    for b, a in zip(before, after, strict=True):
        assert [x["label"] for x in a] == [x["label"] for x in b]
        assert_close(torch.tensor([x["score"] for x in a]), torch.tensor([x["score"] for x in b]))
    assert len({x["label"]: x["score"] for x in after[0]}) == 3


def test_token_classification(tokenizer):
    def make():
        model = tiny(transformers.AutoModelForTokenClassification, num_labels=3)
        return transformers.pipeline(
            "token-classification", model=model, tokenizer=tokenizer, ignore_labels=[]
        )

    before, after = before_and_after(make, TEXTS, batch_size=4)
    for text, b, a in zip(TEXTS, before, after, strict=True):
        assert [x["word"] for x in a] == [x["word"] for x in b] == text.split()
        assert [x["entity"] for x in a] == [x["entity"] for x in b]
        assert_close(torch.tensor([x["score"] for x in a]), torch.tensor([x["score"] for x in b]))


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


@pytest.mark.parametrize("batch_size", (1, 2))
def test_question_answering(tokenizer, batch_size):
    def make():
        return SpanPipeline(model=tiny(transformers.AutoModelForQuestionAnswering), tokenizer=tokenizer)

    asked = [
        {"question": "where is the capital of france", "context": TEXTS[1]},
        {"question": "when", "context": TEXTS[0]},
    ]
    before, after = before_and_after(make, asked, batch_size=batch_size)
    assert [x["answer"] for x in after] == [x["answer"] for x in before]
    assert all(x["answer"] for x in after)
    assert_close(torch.tensor([x["score"] for x in after]), torch.tensor([x["score"] for x in before]))
