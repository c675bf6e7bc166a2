"""Longformer."""

from __future__ import annotations

from dataclasses import replace

from fastbert.layers.form import StockLayer
from fastbert.models.families.bert import ROBERTA, ROBERTA_CLASSIFIER, ROBERTA_DEFAULTS
from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, StockModel

FAMILIES = (
    Family(
        "longformer",
        "longformer",
        "Longformer",
        **{
            **ROBERTA,
            "classifier": replace(ROBERTA_CLASSIFIER, dropout_key="hidden_dropout_prob"),
            "positional": {"": 2},
        },
        global_tokens=True,
        # Keys of the paper's own code
        refused=("attention_dilation", "autoregressive"),
        may_be_causal=False,
        tokens=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
        defaults=dict(ROBERTA_DEFAULTS, sep_token_id=2, attention_window=512, onnx_export=False),
        stock_layer=StockLayer(
            positional=(
                "attention_mask",
                "is_index_masked",
                "is_index_global_attn",
                "is_global_attn",
                "output_attentions",
            ),
            tuple_size=1,
        ),
        stock_model=StockModel("LongformerBaseModelOutputWithPooling", tuple_keeps_none=True),
    ),
)
