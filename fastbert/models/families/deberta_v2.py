"""DeBERTa-v2 and -v3."""

from __future__ import annotations

from fastbert.layers.form import LayerNames, StockLayer
from fastbert.models.families.bert import BERT_LM
from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, LMHead, StockModel

CONTEXT_CLASSIFIER = ClassifierHead(
    "pooler.dense",
    None,
    "classifier",
    act="pooler.activation",
    act_key="pooler_hidden_act",
    first_dropout=("pooler.dropout", "pooler_dropout"),
    dropout_key="cls_dropout",
)

FAMILIES = (
    Family(
        "deberta-v2",
        "deberta",
        "DebertaV2",
        layer=LayerNames("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
        disentangled=True,
        projection="embeddings.embed_proj",
        projects_first=True,
        unbiased=("embeddings.embed_proj",),
        may_be_causal=False,
        pooler=None,
        defaults=dict(
            vocab_size=128100,
            hidden_size=1536,
            num_hidden_layers=24,
            num_attention_heads=24,
            intermediate_size=6144,
            type_vocab_size=0,
            layer_norm_eps=1e-7,
            relative_attention=False,
            max_relative_positions=-1,
            position_buckets=-1,
            norm_rel_ebd="none",
            share_att_key=False,
            position_biased_input=True,
            pos_att_type=None,
            pooler_dropout=0.0,
            pooler_hidden_act="gelu",
            cls_dropout=None,
            legacy=True,
            conv_kernel_size=0,
            conv_act="tanh",
            conv_groups=1,
        ),
        lm_head=BERT_LM,
        classifier=CONTEXT_CLASSIFIER,
        choice=CONTEXT_CLASSIFIER,
        tokens=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
        new_lm_head=LMHead(
            "lm_predictions.lm_head.dense",
            "lm_predictions.lm_head.LayerNorm",
            "",
            "lm_predictions.lm_head.bias",
        ),
        own_heads=("lm_predictions", "mask_predictions"),
        positional={"": 5},
        stock_layer=StockLayer(
            positional=(
                "attention_mask",
                "query_states",
                "relative_pos",
                "rel_embeddings",
                "output_attentions",
            ),
            tuple_size=2,
            attention_drops_by_itself=False,
        ),
        stock_model=StockModel("BaseModelOutput"),
    ),
)
