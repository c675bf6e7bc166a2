"""jina-embeddings-v2: BERT's model_type, with ALiBi and a gated feed-forward block."""

from __future__ import annotations

from fastbert.layers.form import LayerNames, StockLayer
from fastbert.models.families.bert import BERT_LM
from fastbert.models.families.family import Family

FAMILIES = (
    Family(
        "jina_bert",
        "bert",
        "JinaBert",
        layer=LayerNames(intermediate="mlp.gated_layers", output="mlp.wo", output_norm="mlp.layernorm"),
        alibi=True,
        variant_of=("bert", "position_embedding_type", "alibi"),
        unbiased=("mlp.gated_layers",),
        defaults=dict(
            vocab_size=30528,
            max_position_embeddings=8192,
            position_embedding_type="alibi",
            feed_forward_type="geglu",
        ),
        may_be_causal=False,
        lm_head=BERT_LM,
        # transformers has no class of it
        accelerated=False,
        stock_layer=StockLayer(
            containers=("attention", "attention.self", "attention.output", "mlp"),
            dropouts=("attention.self.dropout", "attention.output.dropout", None, "mlp.dropout"),
            activation="mlp.act",
        ),
    ),
)
