"""BERT's task heads, one file per task: signatures, parameter names, outputs and losses are HuggingFace's.

Start with `task_model.py`: what all heads share. Each head serves every family that has it: `BertForMaskedLM`
holds the code, and `RobertaForMaskedLM`, `DistilBertForMaskedLM`, … are subclasses under the family's name,
in the family's file (`models/roberta.py`, …). What differs between families (names, dropouts, activations,
whether a head reads the pooler) is data in `models/families/`.

Heads work on packed tokens: the logits of masked tokens are never computed. For masked tokens transformers
returns numbers without a meaning, and these heads return zeros (question answering: half the lowest finite
number, so that no softmax or argmax picks them). So a label on a masked token is an error, and so is a
classifier's batch in which position 0 of a sequence is masked (left padding). Labels of -100 do not count; if
none counts, the loss is 0, with zero gradients. For a head that reads only position 0, the last layer
computes only that token, also in training (`BertModel.forward`, first_token_only).
"""

from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.next_sentence import BertForNextSentencePrediction
from fastbert.models.heads.pretraining import BertForPreTraining
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification

__all__ = [
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
]
