"""The keys of a config that this package acts on: BERT's defaults, and the checks."""

from __future__ import annotations

from typing import Any

from fastbert.models import config_families, config_layers
from fastbert.models.config_values import activations, booleans, brief, integers, numbers, one_of, refused
from fastbert.models.families import FAMILIES, Family, family_of

# BERT's defaults; families override some (families/)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "classifier_dropout": None,
    "problem_type": None,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "chunk_size_feed_forward": 0,
    "output_hidden_states": False,
    "output_attentions": False,
    "return_dict": True,
}

# Sizes and counts -> the smallest valid value
_COUNTS = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 1,
    "type_vocab_size": 0,
    "embedding_size": 1,
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "head_dim": 1,
    "relative_attention_num_buckets": 1,
    "intra_bottleneck_size": 1,
    "num_feedforward_networks": 1,
    "block_size": 1,
    "num_random_blocks": 0,
}
_PROBABILITIES = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "classifier_dropout_prob",
    "qa_dropout",
    "mlp_dropout",
    "seq_classif_dropout",
    "summary_last_dropout",
    "pooler_dropout",
    "cls_dropout",
)
# Keys that have one value, if they are there. transformers computes 32 buckets, whatever the key says; the
# last two come from NeoBERT's training code.
_ONLY = {"feed_forward_type": "geglu", "relative_attention_num_buckets": 32, "rope": True, "rms_norm": True}
# Most labels: each has a name in memory
MAX_LABELS = 2**20
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


class Keys:
    """The keys that every config has; `EncoderConfig.__getattr__` finds others, and families' spellings."""

    model_type: str
    id2label: dict[int, str]
    label2id: dict[str, int]
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    hidden_dropout_prob: float
    attention_probs_dropout_prob: float
    max_position_embeddings: int
    type_vocab_size: int
    initializer_range: float
    layer_norm_eps: float
    pad_token_id: int | None
    classifier_dropout: float | None
    problem_type: str | None
    is_decoder: bool
    add_cross_attention: bool
    tie_word_embeddings: bool
    chunk_size_feed_forward: int
    fixed_heads: list[str] | list[list[str]] | None
    pruned_heads: dict[int, list[int]] | None
    right_to_left: bool
    intermediate_sizes: list[int] | None
    token_schedule: list[float] | None
    word_embedding_rank: int | None
    layer_groups: list[int] | None
    output_hidden_states: bool
    output_attentions: bool
    return_dict: bool

    @property
    def family(self) -> Family:
        """What this model type changes against BERT."""
        # A variant's own model_type is in the table too
        return FAMILIES.get(self.model_type) or family_of(self.model_type)

    @property
    def block_width(self) -> int:
        """The width in which a layer's blocks compute: that of its bottlenecks, or the hidden size."""
        own = self.__dict__
        if self.family.bottleneck and own["use_bottleneck"]:
            return own["intra_bottleneck_size"]
        return self.hidden_size

    @property
    def has_positions(self) -> bool:
        """Whether the embeddings have a table of positions, whose size limits the texts."""
        family = self.family
        if family.unlimited or family.alibi:
            return False
        return not family.disentangled or self.__dict__["position_biased_input"]

    @property
    def has_segments(self) -> bool:
        """Whether the embeddings have a table of token types; without one given types are ignored."""
        return self.family.segments and self.type_vocab_size > 0

    @property
    def max_tokens(self) -> int:
        """Longest sequence in tokens: the rows of the position table, less those that RoBERTa never uses.

        Without such a table it is the length that the model is made for, and longer sequences are computed.
        """
        return self.max_position_embeddings - self.first_position

    @property
    def first_position(self) -> int:
        """Position of a sequence's first token: 0, or pad_token_id + 1 if the family counts from there."""
        if not self.family.pad_positions:
            return 0
        pad = self.pad_token_id if self.family.counts_from is None else self.family.counts_from
        if pad is None:
            raise ValueError(f"config pad_token_id: {self.model_type} counts positions from it, got None")
        return pad + 1


def check_config(config: Keys) -> None:
    """Check every key that this package acts on; see `EncoderConfig.validate`."""
    own, family = config.__dict__, config.family
    required = DEFAULTS.keys() | family.defaults.keys()
    integers(config, _COUNTS, (_COUNTS.keys() - required) | {"embedding_size", "head_dim"})
    for key in _PROBABILITIES:
        value = own.get(key)
        if value is None and DEFAULTS.get(key) is None:
            continue
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise refused(config, key, "a probability in [0, 1)")
    numbers(config, "layer_norm_eps", "initializer_range")
    if family.bottleneck:
        config_families.check_bottleneck(config)
    if config.block_width % config.num_attention_heads:
        key = "hidden_size" if config.block_width == config.hidden_size else "intra_bottleneck_size"
        raise ValueError(
            f"config num_attention_heads: {config.num_attention_heads} heads do not divide "
            f"{key} {config.block_width}"
        )
    activations(config, "hidden_act")
    if own.get("classifier_activation") is not None:
        activations(config, "classifier_activation")
    booleans(config, *(key for key in ("norm_bias", *family.biases.values()) if key in own))
    pad = config.pad_token_id
    if pad is not None and (not isinstance(pad, int) or not 0 <= pad < config.vocab_size):
        raise refused(config, "pad_token_id", f"an id below vocab_size {config.vocab_size}")
    if family.pad_positions and (pad is None or config.max_tokens < 1):
        raise ValueError(
            f"config max_position_embeddings: {config.max_position_embeddings} leaves no position after "
            f"pad_token_id {pad!r}, from which {config.model_type} counts"
        )
    if config.problem_type is not None:
        one_of(config, "problem_type", PROBLEM_TYPES)
    named = own.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise refused(config, "architectures", "a list of class names", TypeError)
    _refuse_other_mathematics(config)
    _check_rank(config)
    config_families.check(config)
    config_layers.check(config)


def _check_rank(config: Keys) -> None:
    rank, family = config.word_embedding_rank, config.family
    if rank is None:
        return
    width = config.__dict__.get("embedding_size") or config.hidden_size
    if type(rank) is not int or not 1 <= rank <= width:
        raise refused(config, "word_embedding_rank", f"None or an integer from 1 to {width}")
    if family.bottleneck or family.embeddings == family.word_table:
        why = (
            "reads neighbours" if family.bottleneck else "has nothing but a table of words before its layers"
        )
        raise ValueError(f"config word_embedding_rank: expected None, as {config.model_type} {why}")


def _refuse_other_mathematics(config: Keys) -> None:
    own, family = config.__dict__, config.family
    # ModernBERT's files say "sans_pos" or "absolute" and mean nothing by it
    known = ("alibi",) if family.alibi else ("absolute", None)
    if (position := own.get("position_embedding_type", "absolute")) not in known and not family.windows:
        raise ValueError(
            f"config position_embedding_type: {brief(position)} is not supported; only {known[0]!r} is"
        )
    for key in ("add_cross_attention", "is_encoder_decoder", "use_task_id"):
        if own.get(key):
            raise ValueError(f"config {key}: True is not supported; this is an encoder without that part")
    booleans(config, "right_to_left")
    if config.is_decoder is not None:
        booleans(config, "is_decoder")
    if config.is_decoder and not family.may_be_causal:
        raise ValueError(
            f"config is_decoder: True is not supported; transformers' {config.model_type} is never causal"
        )
    for key, value in own.items():
        if key.startswith(family.refused) and value not in (None, False):
            raise ValueError(f"config {key}: {brief(value)} is not supported; expected no such key")
    for key, only in _ONLY.items():
        if (value := own.get(key)) is not None and value != only:
            raise refused(config, key, repr(only))
    if own.get("sinusoidal_pos_embds") is not None:
        booleans(config, "sinusoidal_pos_embds")
    if family.shared_layers:
        layers, groups = config.num_hidden_layers, own["num_hidden_groups"]
        if layers and groups > layers:
            raise ValueError(f"config num_hidden_groups: {groups} groups for {layers} layers")
