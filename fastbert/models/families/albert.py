"""ALBERT."""

from __future__ import annotations

from fastbert.layers.form import LayerNames, StockLayer
from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, LMHead, StockModel

FAMILIES = (
    Family(
        "albert",
        "albert",
        "Albert",
        layer=LayerNames(
            *("attention.query", "attention.key", "attention.value", "attention.dense"),
            *("attention.LayerNorm", "ffn", "ffn_output", "full_layer_layer_norm"),
        ),
        layers="encoder.albert_layer_groups",
        group_layers="albert_layers",
        may_be_causal=False,
        pooler="pooler",
        projection="encoder.embedding_hidden_mapping_in",
        projection_always=True,
        defaults=dict(
            vocab_size=30000,
            embedding_size=128,
            hidden_size=4096,
            num_attention_heads=64,
            intermediate_size=16384,
            hidden_act="gelu_new",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_hidden_groups=1,
            inner_group_num=1,
            classifier_dropout_prob=0.1,
            bos_token_id=2,
            eos_token_id=3,
        ),
        lm_head=LMHead(
            "predictions.dense",
            "predictions.LayerNorm",
            "predictions.decoder",
            "predictions.bias",
            "predictions.activation",
        ),
        classifier=ClassifierHead(None, None, "classifier", dropout_key="classifier_dropout_prob"),
        choice=ClassifierHead(None, None, "classifier", dropout_key="classifier_dropout_prob"),
        next_sentence="sop_classifier.classifier",
        next_sentence_dropout=("sop_classifier.dropout", "classifier_dropout_prob"),
        tokens=ClassifierHead(None, None, "classifier", dropout_key="classifier_dropout_prob"),
        stock_layer=StockLayer(
            containers=("attention",),
            dropouts=("attention.attention_dropout", "attention.output_dropout", None),
            activation="activation",
            positional=("attention_mask",),
            feed_forward="ff_chunk",
        ),
        stock_model=StockModel(
            "BaseModelOutputWithPooling", pooler_activation="pooler_activation", embeds_by_name=False
        ),
    ),
)
