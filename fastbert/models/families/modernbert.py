"""ModernBERT."""

from __future__ import annotations

from fastbert.layers.form import LayerNames, StockLayer
from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, LMHead, StockModel

MODERN_CLASSIFIER = ClassifierHead(
    "head.dense", None, "classifier", act="head.act", dropout="drop", norm="head.norm"
)

FAMILIES = (
    Family(
        "modernbert",
        "model",
        "ModernBert",
        layer=LayerNames(
            *("attn.Wqkv", "attn.Wqkv", "attn.Wqkv", "attn.Wo"), "attn_norm", "mlp.Wi", "mlp.Wo", "mlp_norm"
        ),
        layers="layers",
        word_table="embeddings.tok_embeddings",
        final_norm="final_norm",
        rotary=True,
        windows=True,
        biases={
            "attn.Wqkv": "attention_bias",
            "attn.Wo": "attention_bias",
            "mlp.Wi": "mlp_bias",
            "mlp.Wo": "mlp_bias",
            "head.dense": "classifier_bias",
            "decoder": "decoder_bias",
        },
        out_layers=("attn.Wo", "mlp.Wo", "head.dense", "decoder"),
        aliases=dict(
            hidden_activation="hidden_act",
            norm_eps="layer_norm_eps",
            embedding_dropout="hidden_dropout_prob",
            attention_dropout="attention_probs_dropout_prob",
        ),
        defaults=dict(
            vocab_size=50368,
            num_hidden_layers=22,
            intermediate_size=1152,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            mlp_dropout=0.0,
            classifier_dropout=0.0,
            max_position_embeddings=8192,
            layer_norm_eps=1e-5,
            pad_token_id=50283,
            bos_token_id=50281,
            eos_token_id=50282,
            cls_token_id=50281,
            sep_token_id=50282,
            norm_bias=False,
            attention_bias=False,
            mlp_bias=False,
            decoder_bias=True,
            classifier_bias=False,
            classifier_pooling="cls",
            classifier_activation="gelu",
            local_attention=128,
            global_attn_every_n_layers=3,
            global_rope_theta=160_000.0,
            local_rope_theta=10_000.0,
            initializer_cutoff_factor=2.0,
            # transformers' choices of kernels, which mean nothing here
            deterministic_flash_attn=False,
            reference_compile=None,
            repad_logits_with_grad=False,
            sparse_prediction=False,
            sparse_pred_ignore_index=-100,
        ),
        may_be_causal=False,
        segments=False,
        pooler=None,
        lm_head=LMHead("head.dense", "head.norm", "decoder", None, "head.act"),
        classifier=MODERN_CLASSIFIER,
        choice=MODERN_CLASSIFIER,
        tokens=MODERN_CLASSIFIER,
        spans=MODERN_CLASSIFIER,
        positional={"": 2},
        stock_layer=StockLayer(
            name="ModernBertEncoderLayer",
            containers=("attn", "mlp"),
            dropouts=("attn.attention_dropout", "attn.out_drop", "mlp.drop"),
            activation="mlp.act",
            positional=("attention_mask", "position_embeddings"),
        ),
        stock_model=StockModel("BaseModelOutput", dropout="drop"),
    ),
)
