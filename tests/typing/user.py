"""What a user writes. Type checkers in strict mode must find nothing here; the file is never run."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import torch
from torch import Tensor

import fastbert
from fastbert.acceleration import Explanation
from fastbert.models.outputs import BaseModelOutputWithPooling, LogitsOutput, QuestionAnsweringOutput
from fastbert.testing.serving import Choice


def from_pretrained_gives_its_own_class(path: str) -> None:
    assert_type(fastbert.BertModel.from_pretrained(path), fastbert.BertModel)
    assert_type(fastbert.BertForMaskedLM.from_pretrained(path, dtype="auto"), fastbert.BertForMaskedLM)
    assert_type(fastbert.RobertaModel.from_pretrained(path), fastbert.RobertaModel)
    assert_type(fastbert.XLMRobertaModel.from_pretrained(path), fastbert.XLMRobertaModel)
    assert_type(
        fastbert.DistilBertForSequenceClassification.from_pretrained(path, num_labels=3, device="cpu"),
        fastbert.DistilBertForSequenceClassification,
    )
    loaded = fastbert.BertForMaskedLM.from_pretrained(path, torch_dtype="auto", output_loading_info=True)
    assert_type(loaded, tuple[fastbert.BertForMaskedLM, dict[str, Any]])
    assert_type(fastbert.ErnieModel.from_pretrained(path, output_loading_info=False), fastbert.ErnieModel)
    assert_type(fastbert.AutoConfig.from_pretrained(path), fastbert.EncoderConfig)
    config = fastbert.EncoderConfig(model_type="mpnet", hidden_size=32, num_attention_heads=2)
    assert_type(fastbert.MPNetModel.from_config(config).eval(), fastbert.MPNetModel)
    assert_type(fastbert.ErnieModel(config).train().quantize(), fastbert.ErnieModel)


def auto_classes_are_the_class_all_families_extend(path: str) -> fastbert.BertForMaskedLM:
    encoder: fastbert.BertModel = fastbert.AutoModel.from_pretrained(path)
    classifier: fastbert.BertForSequenceClassification
    classifier = fastbert.AutoModelForSequenceClassification.from_pretrained(path, num_labels=5)
    classifier.resize_token_embeddings(100)
    encoder.save_pretrained(path)
    return fastbert.AutoModelForMaskedLM.from_pretrained(path)


def outputs(path: str, batch: dict[str, Tensor], labels: Tensor) -> Tensor:
    encoder = fastbert.AutoModel.from_pretrained(path)
    out = encoder(**batch)
    assert_type(out, BaseModelOutputWithPooling)
    mean = out.last_hidden_state.mean(1)
    if out.pooler_output is not None:
        mean = mean + out.pooler_output
    if out.hidden_states is not None:
        mean = mean + out.hidden_states[-1][:, 0]

    classifier = fastbert.BertForSequenceClassification.from_pretrained(path)
    answer = classifier(batch["input_ids"], batch["attention_mask"], labels=labels)
    assert_type(answer, LogitsOutput)
    assert answer.loss is not None
    first: Tensor = answer[0]
    named: Tensor = answer["logits"]
    best = answer.logits.argmax(-1) + first + named

    span = fastbert.AutoModelForQuestionAnswering.from_pretrained(path)(**batch)
    assert_type(span, QuestionAnsweringOutput)
    best = best + span.start_logits.argmax(-1) + span.end_logits.argmax(-1)

    pretraining = fastbert.BertForPreTraining.from_pretrained(path)
    both = pretraining(batch["input_ids"], labels=labels, next_sentence_label=labels, output_logits=True)
    best = best + both.prediction_logits.sum() + both.seq_relationship_logits.sum()
    albert = fastbert.AlbertForPreTraining.from_pretrained(path)
    order = albert(batch["input_ids"], sentence_order_label=labels)
    best = best + order.sop_logits.sum()

    _, logits = classifier(**batch, labels=labels, return_dict=False)
    classes: Tensor = logits.argmax(-1)
    return mean + best + classes


def config_keys(model: fastbert.RobertaModel) -> float:
    config = model.config
    names: list[str] = [config.id2label[i] for i in range(config.num_labels)]
    assert_type(config.hidden_size // config.num_attention_heads, int)
    keys = fastbert.BertConfig.from_pretrained("folder").to_dict()
    return config.hidden_dropout_prob + len(names) + len(keys) + config.max_tokens


def explained(model: fastbert.BertModel) -> list[str]:
    rows = fastbert.explain()
    assert_type(rows, list[Choice])
    assert_type(fastbert.explain(torch.device("cuda")), list[Choice])
    found = fastbert.explain(model)
    assert_type(found, Explanation)
    slow = [layer.name for layer in found.layers if not layer.fused]
    return slow + [f"{row.op} {row.backend}" for row in rows]


def others(stock: torch.nn.Linear) -> None:
    assert_type(fastbert.accelerate(stock, strict=True), torch.nn.Linear)
    assert_type(fastbert.restore(stock), torch.nn.Linear)
    with fastbert.use_backend("reference", layer_norm="aten"):
        stock(torch.zeros(1, 1))


def sentences(path: str, texts: list[str]) -> Tensor:
    vectors = fastbert.encode(path, texts, normalize=True)
    encoder = fastbert.SentenceEncoder.from_pretrained(path, pooling="mean").quantize()
    assert_type(encoder, fastbert.SentenceEncoder)
    more = encoder.encode(texts, batch_size=64, show_progress_bar=False)
    encoder.save_pretrained(path)
    width: int = encoder.get_embedding_dimension()
    assert np.concatenate([vectors, more]).shape[1] == width
    try:
        encoder.encode(texts, on_long="error")
    except fastbert.EncodingError as error:
        print(error.index, error.problem)
    return encoder.similarity(vectors, more)
