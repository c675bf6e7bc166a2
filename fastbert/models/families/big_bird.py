"""BigBird."""

from __future__ import annotations

from fastbert.layers.form import StockLayer
from fastbert.models.families.bert import BERT_LM
from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, StockModel

FAMILIES = (
    Family(
        "big_bird",
        "bert",
        "BigBird",
        lm_head=BERT_LM,
        next_sentence="cls.seq_relationship",
        block_sparse=True,
        pooler="pooler",
        biases=dict.fromkeys(
            ("attention.self.query", "attention.self.key", "attention.self.value"), "use_bias"
        ),
        defaults=dict(
            vocab_size=50358,
            hidden_act="gelu_new",
            max_position_embeddings=4096,
            bos_token_id=1,
            eos_token_id=2,
            sep_token_id=66,
            attention_type="block_sparse",
            use_bias=True,
            rescale_embeddings=False,
            block_size=64,
            num_random_blocks=3,
        ),
        classifier=ClassifierHead(
            "classifier.dense",
            None,
            "classifier.out_proj",
            dropout="classifier.dropout",
            dropout_first=True,
            act_key="hidden_act",
        ),
        choice=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
        spans=ClassifierHead(
            None,
            None,
            "qa_classifier.qa_outputs",
            dropout="qa_classifier.dropout",
            dropout_key="hidden_dropout_prob",
        ),
        positional={"": 5},
        stock_layer=StockLayer(
            positional=(
                "attention_mask",
                "encoder_hidden_states",
                "encoder_attention_mask",
                "band_mask",
                "from_mask",
                "to_mask",
                "blocked_encoder_mask",
                "cache",
            ),
            attention_drops_by_itself=False,
        ),
        stock_model=StockModel(pooler_activation="activation"),
    ),
)
