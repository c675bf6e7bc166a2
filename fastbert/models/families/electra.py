"""ELECTRA."""

from __future__ import annotations

from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, LMHead, StockModel

FAMILIES = (
    Family(
        "electra",
        "electra",
        "Electra",
        pooler=None,
        projection="embeddings_project",
        defaults=dict(
            embedding_size=128,
            hidden_size=256,
            num_attention_heads=4,
            intermediate_size=1024,
            summary_last_dropout=0.1,
        ),
        lm_head=LMHead(
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head",
            None,
            "generator_predictions.activation",
            "gelu",
        ),
        classifier=ClassifierHead(
            "classifier.dense",
            "gelu",
            "classifier.out_proj",
            act="classifier.activation",
            dropout="classifier.dropout",
            dropout_first=True,
        ),
        choice=ClassifierHead(
            "sequence_summary.summary",
            "gelu",
            "classifier",
            act="sequence_summary.activation",
            dropout="sequence_summary.last_dropout",
            dropout_key="summary_last_dropout",
            fixed=dict(
                summary_type="first",
                summary_use_proj=True,
                summary_activation="gelu",
                summary_first_dropout=0.0,
                summary_proj_to_labels=False,
            ),
        ),
        own_heads=("discriminator_predictions",),
        stock_model=StockModel("BaseModelOutputWithPastAndCrossAttentions"),
    ),
)
