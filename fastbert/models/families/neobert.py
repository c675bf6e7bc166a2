"""NeoBERT."""

from __future__ import annotations

from fastbert.layers.form import LayerNames, StockLayer
from fastbert.layers.head_major_layer import inner_size
from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, LMHead, StockModel

NEO_LAYER = LayerNames("qkv", "qkv", "qkv", "wo", "attention_norm", "ffn.w12", "ffn.w3", "ffn_norm")

FAMILIES = (
    Family(
        "neobert",
        "model",
        "NeoBert",
        layer=NEO_LAYER,
        layers="transformer_encoder",
        embeddings="encoder",
        word_table="encoder",
        final_norm="layer_norm",
        rotary=True,
        pre_norm=True,
        rms_norm=True,
        unbiased=NEO_LAYER.linears,
        inner=inner_size,
        # Another way to train, whose layers are other ones
        refused=("ngpt",),
        aliases=dict(
            norm_eps="layer_norm_eps",
            max_length="max_position_embeddings",
            dim_head="head_dim",
            classifier_init_range="initializer_range",
        ),
        defaults=dict(
            vocab_size=30522,
            num_hidden_layers=28,
            hidden_act="silu",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=4096,
            layer_norm_eps=1e-5,
            classifier_dropout=0.1,
            embedding_init_range=0.02,
            decoder_init_range=0.02,
            tie_word_embeddings=False,
            head_dim=None,
            rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
        ),
        may_be_causal=False,
        segments=False,
        pooler=None,
        lm_head=LMHead(None, None, "decoder", None),
        classifier=ClassifierHead("dense", "tanh", "classifier", dropout_first=True),
        # The hub's own code has two heads
        lacks=("ForMultipleChoice", "ForTokenClassification", "ForQuestionAnswering"),
        # transformers has no class of it
        accelerated=False,
        positional={"": 1},
        stock_layer=StockLayer(containers=("ffn",), dropouts=(None, None, None), activation="ffn.act"),
        stock_model=StockModel("BaseModelOutput", embeds_by_name=False, dropout=None),
    ),
)
