"""A model under the names of another family: BERT as DistilBERT, and DistilBERT as BERT.

Both have one encoder's mathematics, but DistilBERT has no token types. Token type 0 is added to the
positions, so a single text has the same vectors; the second text of a pair, of type 1, does not. Heads of
tokens, spans and masked words compute the same. A classifier of texts begins with the same weights, but its
inner layer has relu in DistilBERT and tanh in BERT, so its scores differ until it is trained. A factored
table of words, shared layers and pruned heads become plain ones: transformers' DistilBERT has nothing else.

Source: Sanh et al. 2019, "DistilBERT", sec. 2: a student without token types begins as layers of its teacher.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from fastbert.compression import shrink
from fastbert.models.base import class_of
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES, Family

# The families with a name for each part of the other
BOTH = ("bert", "distilbert")
_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
    "pad_token_id",
    "id2label",
    "label2id",
    "problem_type",
    "tie_word_embeddings",
)
_POSITIONS, _TYPES = "embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"


def in_family(model: Any, model_type: str) -> Any:
    """A copy of a model in another family; see the module. The model itself is not changed.

    Args:
        model: an encoder, or a model with a head of masked words, texts, tokens or spans.
        model_type: "bert" or "distilbert".

    Raises:
        ValueError: naming `student_family`, what came and what was expected.
    """
    config = model.config
    if model_type not in BOTH or config.model_type not in BOTH:
        came = f"{model_type!r} from layers of {config.model_type}"
        raise ValueError(
            f"student_family: expected {' or '.join(BOTH)}, from layers of the other, got {came}"
        )
    family = FAMILIES[model_type]
    for key in ("is_decoder", "right_to_left", "fixed_heads", "token_schedule"):
        if config.get(key):
            raise ValueError(
                f"student_family: expected a teacher without config {key}, got {config.get(key)!r}"
            )
    if family.norm_eps not in (None, config.norm_eps):
        raise ValueError(
            f"student_family: norms of {model_type} have eps {family.norm_eps}, the teacher's have "
            f"{config.norm_eps}"
        )
    model = shrink.dense(model)
    values = {key: getattr(model.config, key) for key in _KEYS}
    made_config = EncoderConfig(model_type, layer_norm_eps=config.norm_eps, **values)
    cls: Any = class_of(family, model.task)
    options = {"add_pooling_layer": False} if model is model.base_model and family.pooler else {}
    with torch.device("meta"):
        made = cls(made_config, **options)
    state, own = model.state_dict(), {}
    for role, path in _paths(model).items():
        to = _paths(made)[role]
        own |= {to + key.removeprefix(path): t for key, t in state.items() if key.startswith(f"{path}.")}
    _segments(own, made)
    head = made_config.lm_head
    if head.bias in made.state_dict():
        # BERT has the decoder's bias under two names
        own[head.bias] = own[f"{head.decoder}.bias"]
    made.load_state_dict({key: t.clone() for key, t in own.items()}, assign=True)
    made.tie_weights()
    return made.requires_grad_(True).train(model.training)


def _inside(model: Any) -> str:
    """What the names of the encoder begin with."""
    return "" if model is model.base_model else f"{model.base_model_prefix}."


def _paths(model: Any) -> dict[str, str]:
    """What a part is -> its path in the model."""
    family: Family = model.config.family
    inside, head = _inside(model), model.config.lm_head
    found: dict[str, str | None] = {"embeddings": f"{inside}{family.embeddings}"}
    for i in range(model.config.num_hidden_layers):
        names = {part: path for part, path in asdict(family.layer).items() if path}
        found |= {f"{i} {part}": f"{inside}{family.layers}.{i}.{path}" for part, path in names.items()}
    of_task: dict[str, dict[str, str | None]] = {
        "ForMaskedLM": {"dense": head.dense, "norm": head.norm, "out": head.decoder},
        "ForSequenceClassification": {
            "dense": family.classifier.dense or f"{inside}{family.pooler}",
            "out": family.classifier.out,
        },
        "ForTokenClassification": {"out": family.tokens.out},
        "ForQuestionAnswering": {"out": family.spans.out},
    }
    found |= of_task.get(model.task, {})
    return {part: path for part, path in found.items() if path}


def _segments(own: dict[str, torch.Tensor], made: nn.Module) -> None:
    """Add token type 0 to the positions of a model without types, or zeros as types to one that has them."""
    positions, types = f"{_inside(made)}{_POSITIONS}", f"{_inside(made)}{_TYPES}"
    if types in own:
        table = own.pop(types)
        own[positions] = own[positions] + table[:1].sum(0)
    else:
        own[types] = own[positions].new_zeros(dict(made.state_dict())[types].shape)
