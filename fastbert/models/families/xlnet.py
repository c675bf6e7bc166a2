"""XLNet."""

from __future__ import annotations

from fastbert.layers.form import LayerNames, StockLayer
from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, LMHead, StockModel

_SUMMARY = ClassifierHead(
    "sequence_summary.summary",
    None,
    "logits_proj",
    act="sequence_summary.activation",
    act_key="summary_activation",
    dropout="sequence_summary.last_dropout",
    dropout_key="summary_last_dropout",
)

FAMILIES = (
    Family(
        "xlnet",
        "transformer",
        "XLNet",
        layer=LayerNames(
            *("", "", "", ""), "rel_attn.layer_norm", "ff.layer_1", "ff.layer_2", "ff.layer_norm"
        ),
        layers="layer",
        embeddings="word_embedding",
        word_table="word_embedding",
        two_streams=True,
        class_names={"ForMaskedLM": "LMHeadModel", "ForQuestionAnswering": "ForQuestionAnsweringSimple"},
        aliases=dict(
            d_model="hidden_size",
            n_layer="num_hidden_layers",
            n_head="num_attention_heads",
            d_inner="intermediate_size",
            d_head="head_dim",
            ff_activation="hidden_act",
            dropout="hidden_dropout_prob",
            summary_type="classifier_pooling",
        ),
        defaults=dict(
            vocab_size=32000,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            head_dim=None,
            # Two texts, [CLS] and padding, which the original files number 3 or 4
            type_vocab_size=5,
            pad_token_id=5,
            bos_token_id=1,
            eos_token_id=2,
            attn_type="bi",
            mem_len=512,
            reuse_len=None,
            use_mems_eval=True,
            use_mems_train=False,
            bi_data=False,
            clamp_len=-1,
            same_length=False,
            classifier_pooling="last",
            summary_use_proj=True,
            summary_activation="tanh",
            summary_last_dropout=0.1,
            start_n_top=5,
            end_n_top=5,
        ),
        may_be_causal=False,
        pooler=None,
        lm_head=LMHead(None, None, "lm_loss", None),
        classifier=_SUMMARY,
        choice=_SUMMARY,
        tokens=ClassifierHead(None, None, "classifier", dropout=""),
        own_heads=("start_logits", "end_logits", "answer_class"),
        positional={"": 2, "ForMultipleChoice": 1},
        stock_layer=StockLayer(
            containers=("rel_attn", "ff"),
            dropouts=("rel_attn.dropout", "rel_attn.dropout", "ff.dropout"),
            activation="ff.activation_function",
            feed_forward="ff_chunk",
        ),
        stock_model=StockModel("XLNetModelOutput", dropout=None),
    ),
)
