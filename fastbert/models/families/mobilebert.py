"""MobileBERT."""

from __future__ import annotations

from dataclasses import replace

from fastbert.layers.form import StockLayer
from fastbert.models.families.bert import BERT_LM
from fastbert.models.families.family import Family
from fastbert.models.paths import StockModel

FAMILIES = (
    Family(
        "mobilebert",
        "mobilebert",
        "MobileBert",
        bottleneck=True,
        projection="embeddings.embedding_transformation",
        projects_first=True,
        projection_always=True,
        may_be_causal=False,
        # A boolean here, the name of an activation elsewhere
        aliases=dict(classifier_activation="pooler_dense"),
        defaults=dict(
            hidden_size=512,
            num_hidden_layers=24,
            num_attention_heads=4,
            intermediate_size=512,
            hidden_act="relu",
            hidden_dropout_prob=0.0,
            embedding_size=128,
            trigram_input=True,
            use_bottleneck=True,
            intra_bottleneck_size=128,
            use_bottleneck_attention=False,
            key_query_shared_bottleneck=True,
            num_feedforward_networks=4,
            normalization_type="no_norm",
            pooler_dense=True,
        ),
        lm_head=replace(BERT_LM, more="cls.predictions.dense"),
        next_sentence="cls.seq_relationship",
        positional={"": 6, "Model": 5, "ForPreTraining": 7, "ForQuestionAnswering": 7},
        stock_layer=StockLayer(positional=("attention_mask",)),
        stock_model=StockModel("BaseModelOutputWithPooling"),
    ),
)
