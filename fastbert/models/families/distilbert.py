"""DistilBERT."""

from __future__ import annotations

from fastbert.layers.form import LayerNames, StockLayer
from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, LMHead, StockModel

FAMILIES = (
    Family(
        "distilbert",
        "distilbert",
        "DistilBert",
        layer=LayerNames(
            *("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm"),
            *("ffn.lin1", "ffn.lin2", "output_layer_norm"),
        ),
        layers="transformer.layer",
        aliases=dict(
            dim="hidden_size",
            n_layers="num_hidden_layers",
            n_heads="num_attention_heads",
            hidden_dim="intermediate_size",
            dropout="hidden_dropout_prob",
            attention_dropout="attention_probs_dropout_prob",
            activation="hidden_act",
        ),
        defaults=dict(
            num_hidden_layers=6, qa_dropout=0.1, seq_classif_dropout=0.2, sinusoidal_pos_embds=False
        ),
        may_be_causal=False,
        segments=False,
        pooler=None,
        norm_eps=1e-12,
        lm_head=LMHead("vocab_transform", "vocab_layer_norm", "vocab_projector", None, "activation"),
        classifier=ClassifierHead("pre_classifier", "relu", "classifier", dropout_key="seq_classif_dropout"),
        choice=ClassifierHead("pre_classifier", "relu", "classifier", dropout_key="seq_classif_dropout"),
        tokens=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
        spans=ClassifierHead(None, None, "qa_outputs", dropout_key="qa_dropout"),
        positional={"": 2},
        stock_layer=StockLayer(
            name="TransformerBlock",
            containers=("attention", "ffn"),
            dropouts=("attention.dropout", None, "ffn.dropout"),
            activation="ffn.activation",
            positional=("attention_mask",),
            feed_forward="ffn",
            norms_attention=True,
        ),
        stock_model=StockModel("BaseModelOutput", stack_by_name=True, embeds_by_name=False),
    ),
)
