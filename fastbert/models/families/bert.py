"""BERT, and the families with its layers: ERNIE, RoBERTa, XLM-RoBERTa and CamemBERT."""

from __future__ import annotations

from typing import Any

from fastbert.models.families.family import Family
from fastbert.models.paths import ClassifierHead, LMHead

BERT_LM = LMHead(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
    "cls.predictions.transform.transform_act_fn",
)
ROBERTA_LM = LMHead(
    "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation="gelu"
)
ROBERTA_CLASSIFIER = ClassifierHead(
    "classifier.dense", "tanh", "classifier.out_proj", dropout="classifier.dropout", dropout_first=True
)
ROBERTA_DEFAULTS = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2)
ROBERTA: dict[str, Any] = dict(
    pad_positions=True,
    position_padding_idx=True,
    lm_head=ROBERTA_LM,
    classifier=ROBERTA_CLASSIFIER,
    choice=ClassifierHead(None, None, "classifier", dropout_key="hidden_dropout_prob"),
    positional={"ForMultipleChoice": 1},
)

FAMILIES = (
    Family("bert", "bert", "Bert", lm_head=BERT_LM, next_sentence="cls.seq_relationship"),
    Family(
        "ernie",
        "ernie",
        "Ernie",
        lm_head=BERT_LM,
        next_sentence="cls.seq_relationship",
        defaults=dict(task_type_vocab_size=3, use_task_id=False),
        positional={"": 3},
    ),
    Family("roberta", "roberta", "Roberta", defaults=dict(ROBERTA_DEFAULTS, vocab_size=50265), **ROBERTA),
    Family("xlm-roberta", "roberta", "XLMRoberta", defaults=ROBERTA_DEFAULTS, **ROBERTA),
    Family("camembert", "roberta", "Camembert", defaults=ROBERTA_DEFAULTS, **ROBERTA),
)
