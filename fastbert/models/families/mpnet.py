"""MPNet."""

from __future__ import annotations

from fastbert.layers.form import LayerNames, StockLayer
from fastbert.models.families.bert import ROBERTA_DEFAULTS, ROBERTA_LM
from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, StockModel

FAMILIES = (
    Family(
        "mpnet",
        "mpnet",
        "MPNet",
        layer=LayerNames(
            *("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o"),
            "attention.LayerNorm",
        ),
        pad_positions=True,
        counts_from=1,
        position_padding_idx=True,
        may_be_causal=False,
        segments=False,
        relative_bias="encoder.relative_attention_bias",
        defaults=dict(ROBERTA_DEFAULTS, vocab_size=30527, relative_attention_num_buckets=32),
        lm_head=ROBERTA_LM,
        classifier=ClassifierHead(
            "classifier.dense",
            "tanh",
            "classifier.out_proj",
            dropout="classifier.dropout",
            dropout_first=True,
            dropout_key="hidden_dropout_prob",
        ),
        choice=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
        tokens=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
        positional={"": 2},
        stock_layer=StockLayer(
            containers=("attention", "attention.attn", "intermediate", "output"),
            dropouts=("attention.attn.dropout", "attention.dropout", "output.dropout"),
            positional=("attention_mask", "position_bias", "output_attentions"),
            tuple_size=1,
            attention_drops_by_itself=False,
        ),
        stock_model=StockModel("BaseModelOutputWithPooling", tuple_keeps_none=True),
    ),
)
