"""The keys of a config that this package acts on: BERT's defaults, and the checks."""

from __future__ import annotations

import sys
from typing import Any

from fastbert.layers.patterns import BACKWARD, LEARNED, NAMES, SEPARATORS
from fastbert.models import config_rope, config_windows
from fastbert.models.families import Family, family_of
from fastbert.ops.activation import SPELLINGS

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

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "embedding_size",
    "num_hidden_groups",
    "inner_group_num",
    "head_dim",
    "relative_attention_num_buckets",
    "intra_bottleneck_size",
    "num_feedforward_networks",
    "block_size",
    "num_random_blocks",
)
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
_MAY_BE_ZERO = ("num_hidden_layers", "type_vocab_size", "num_random_blocks")
# Most of any one size: the product of two sizes and an element's bytes fits 64 bits
MAX_SIZE = 2**24
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
    output_hidden_states: bool
    output_attentions: bool
    return_dict: bool

    @property
    def family(self) -> Family:
        """What this model type changes against BERT."""
        return family_of(self.model_type)

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
        if self.pad_token_id is None:
            raise ValueError(f"config pad_token_id: {self.model_type} counts positions from it, got None")
        return self.pad_token_id + 1


def check_config(config: Keys) -> None:
    """Check every key that this package acts on; see `EncoderConfig.validate`."""
    for key in _COUNTS:
        value = config.__dict__.get(key)
        if value is None and (
            key in ("embedding_size", "head_dim") or key not in DEFAULTS | config.family.defaults
        ):
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"config {key}: expected an integer, got {value!r}")
        least = 0 if key in _MAY_BE_ZERO else 1
        if value < least:
            raise ValueError(f"config {key}: expected an integer >= {least}, got {brief(value)}")
        if value > MAX_SIZE:
            raise ValueError(f"config {key}: expected an integer <= {MAX_SIZE}, got {brief(value)}")
    for key in _PROBABILITIES:
        value = config.__dict__.get(key)
        if value is None and DEFAULTS.get(key) is None:
            continue
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise ValueError(f"config {key}: expected a probability in [0, 1), got {value!r}")
    for key in ("layer_norm_eps", "initializer_range"):
        value = config.__dict__[key]
        if not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
            raise ValueError(f"config {key}: expected a finite number >= 0, got {brief(value)}")
    if config.family.bottleneck:
        _check_bottleneck(config)
    if config.block_width % config.num_attention_heads:
        key = "hidden_size" if config.block_width == config.hidden_size else "intra_bottleneck_size"
        raise ValueError(
            f"config num_attention_heads: {config.num_attention_heads} heads do not divide "
            f"{key} {config.block_width}"
        )
    if not isinstance(config.hidden_act, str) or config.hidden_act not in SPELLINGS:
        raise ValueError(
            f"config hidden_act: unknown activation {config.hidden_act!r}; "
            f"expected one of {', '.join(SPELLINGS)}"
        )
    act = config.__dict__.get("classifier_activation")
    if act is not None and (not isinstance(act, str) or act not in SPELLINGS):
        raise ValueError(
            f"config classifier_activation: unknown activation {act!r}; "
            f"expected one of {', '.join(SPELLINGS)}"
        )
    for key in ("norm_bias", *config.family.biases.values()):
        if type(value := config.__dict__.get(key, True)) is not bool:
            raise TypeError(f"config {key}: expected a boolean, got {value!r}")
    pad = config.pad_token_id
    if pad is not None and (not isinstance(pad, int) or not 0 <= pad < config.vocab_size):
        raise ValueError(
            f"config pad_token_id: expected an id below vocab_size {config.vocab_size}, got {pad!r}"
        )
    if config.family.pad_positions and (pad is None or config.max_tokens < 1):
        raise ValueError(
            f"config max_position_embeddings: {config.max_position_embeddings} leaves no position after "
            f"pad_token_id {pad!r}, from which {config.model_type} counts"
        )
    if config.problem_type is not None and config.problem_type not in PROBLEM_TYPES:
        raise ValueError(
            f"config problem_type: expected one of {', '.join(PROBLEM_TYPES)}, got {config.problem_type!r}"
        )
    named = config.__dict__.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise TypeError(f"config architectures: expected a list of class names, got {brief(named)}")
    _refuse_other_mathematics(config)
    if config.family.rotary:
        (config_windows if config.family.windows else config_rope).check(config)
    if config.family.disentangled:
        _check_relative(config)
    if config.family.block_sparse:
        _check_blocks(config)
    if config.family.global_tokens:
        _check_attention_window(config)
    if config.family.two_streams:
        _check_streams(config)
    _check_fixed_heads(config)
    _check_pruned_heads(config)
    _check_inner_sizes(config)


def _check_bottleneck(config: Keys) -> None:
    """See `fastbert.layers.bottleneck_layer`."""
    own = config.__dict__
    switches = "use_bottleneck", "use_bottleneck_attention", "key_query_shared_bottleneck", "trigram_input"
    for key in (*switches, "pooler_dense"):
        if type(own[key]) is not bool:
            raise TypeError(f"config {config.family.spelt(key)}: expected a boolean, got {brief(own[key])}")
    if own["normalization_type"] not in ("no_norm", "layer_norm"):
        raise ValueError(
            f"config normalization_type: expected 'no_norm' or 'layer_norm', got "
            f"{brief(own['normalization_type'])}"
        )
    if own.get("true_hidden_size", config.block_width) not in (None, config.block_width):
        raise ValueError(
            f"config true_hidden_size: expected {config.block_width}, got {brief(own['true_hidden_size'])}"
        )
    narrow = own["use_bottleneck_attention"] or own["key_query_shared_bottleneck"]
    if not narrow and config.block_width != config.hidden_size:
        raise ValueError(
            f"config intra_bottleneck_size: expected hidden_size {config.hidden_size} without "
            f"use_bottleneck_attention and key_query_shared_bottleneck, got {config.block_width}"
        )


def _check_relative(config: Keys) -> None:
    """See `EncoderConfig.relative`."""
    own = config.__dict__
    for key in ("relative_attention", "position_biased_input", "share_att_key", "legacy"):
        if type(own[key]) is not bool:
            raise TypeError(f"config {key}: expected a boolean, got {own[key]!r}")
    terms = own["pos_att_type"]
    if terms is not None and (not isinstance(terms, list) or not {*map(str, terms)} <= {"c2p", "p2c"}):
        raise ValueError(f"config pos_att_type: expected names of c2p, p2c, got {brief(terms)}")
    if terms and not own["relative_attention"]:
        raise ValueError(f"config pos_att_type: expected None without relative_attention, got {brief(terms)}")
    for key in ("max_relative_positions", "position_buckets"):
        if type(own[key]) is not int or not -1 <= own[key] <= MAX_SIZE:
            raise ValueError(
                f"config {key}: expected an integer from -1 to {MAX_SIZE}, got {brief(own[key])}"
            )
    farthest = own["max_relative_positions"]
    farthest = config.max_position_embeddings if farthest < 1 else farthest
    if own["position_buckets"] > 0 and not 4 <= own["position_buckets"] < 2 * (farthest - 1):
        raise ValueError(
            f"config position_buckets: expected -1, or an integer from 4 to {2 * farthest - 3} for distances "
            f"up to {farthest}, got {own['position_buckets']}"
        )
    if own["norm_rel_ebd"] not in ("none", "layer_norm"):
        raise ValueError(
            f"config norm_rel_ebd: expected 'none' or 'layer_norm', got {brief(own['norm_rel_ebd'])}"
        )
    if not own["legacy"] and own.get("embedding_size") not in (None, config.hidden_size):
        raise ValueError(
            f"config embedding_size: expected hidden_size {config.hidden_size} with legacy False, got "
            f"{own['embedding_size']}"
        )
    for key, size in (
        ("attention_head_size", config.hidden_size // config.num_attention_heads),
        ("pooler_hidden_size", config.hidden_size),
    ):
        if own.get(key, size) not in (None, size):
            raise ValueError(f"config {key}: expected {size}, got {brief(own[key])}")
    for key in ("pooler_hidden_act", "conv_act"):
        if not isinstance(act := own[key], str) or act not in SPELLINGS:
            raise ValueError(
                f"config {key}: unknown activation {act!r}; expected one of {', '.join(SPELLINGS)}"
            )
    size, groups = own["conv_kernel_size"], own["conv_groups"]
    if type(size) is not int or not 0 <= size <= MAX_SIZE or (size and size % 2 == 0):
        raise ValueError(f"config conv_kernel_size: expected 0 or an odd integer, got {brief(size)}")
    if type(groups) is not int or groups < 1 or config.hidden_size % groups:
        raise ValueError(
            f"config conv_groups: expected a divisor of hidden_size {config.hidden_size}, got {brief(groups)}"
        )


def _check_blocks(config: Keys) -> None:
    """See `EncoderConfig.blocks`."""
    kind, rescales = (config.__dict__[key] for key in ("attention_type", "rescale_embeddings"))
    if kind not in ("block_sparse", "original_full"):
        raise ValueError(
            f"config attention_type: expected 'block_sparse' or 'original_full', got {brief(kind)}"
        )
    if type(rescales) is not bool:
        raise TypeError(f"config rescale_embeddings: expected a boolean, got {brief(rescales)}")
    if config.is_decoder and kind == "block_sparse":
        raise ValueError(
            "config is_decoder: True is not supported with attention_type 'block_sparse', whose tokens see "
            "later tokens"
        )


def _check_attention_window(config: Keys) -> None:
    """See `EncoderConfig.window`."""
    given, layers = config.__dict__["attention_window"], config.num_hidden_layers
    each = given if isinstance(given, (list, tuple)) else [given] * layers
    if len(each) != layers or any(type(w) is not int or w < 2 or w % 2 or w > MAX_SIZE for w in each):
        raise ValueError(
            f"config attention_window: expected an even integer >= 2, or {layers} of them, one per layer, "
            f"got {brief(given)}"
        )
    sep = config.__dict__["sep_token_id"]
    if sep is not None and (type(sep) is not int or not 0 <= sep < config.vocab_size):
        raise ValueError(
            f"config sep_token_id: expected None or an id below vocab_size {config.vocab_size}, got "
            f"{brief(sep)}"
        )


def _check_streams(config: Keys) -> None:
    """XLNet's keys."""
    own = config.__dict__
    if own["attn_type"] not in ("bi", "uni"):
        raise ValueError(f"config attn_type: expected 'bi' or 'uni', got {brief(own['attn_type'])}")
    if own["classifier_pooling"] not in (kinds := ("last", "first", "mean", "cls_index")):
        raise ValueError(
            f"config summary_type: expected one of {', '.join(kinds)}, got {brief(own['classifier_pooling'])}"
        )
    for key in ("bi_data", "same_length", "use_mems_eval", "use_mems_train"):
        if type(own[key]) is not bool:
            raise TypeError(f"config {key}: expected a boolean, got {brief(own[key])}")
    limits = {"clamp_len": -1, "mem_len": 0, "reuse_len": 0, "start_n_top": 1, "end_n_top": 1}
    for key, least in limits.items():
        value = own[key]
        if value is None and key in ("mem_len", "reuse_len"):
            continue
        if type(value) is not int or not least <= value <= MAX_SIZE:
            raise ValueError(
                f"config {key}: expected an integer from {least} to {MAX_SIZE}, got {brief(value)}"
            )
    size = config.hidden_size // config.num_attention_heads
    if own["head_dim"] not in (None, size):
        raise ValueError(f"config d_head: expected d_model / n_head = {size}, got {own['head_dim']}")
    act = own["summary_activation"]
    if not isinstance(act, str) or act not in SPELLINGS:
        raise ValueError(
            f"config summary_activation: unknown activation {brief(act)}; "
            f"expected one of {', '.join(SPELLINGS)}"
        )
    # No published checkpoint has another value
    for key, only in (
        ("summary_use_proj", True),
        ("summary_proj_to_labels", False),
        ("summary_first_dropout", 0),
        ("pruned_heads", None),
        ("intermediate_sizes", None),
    ):
        value = own.get(key, only)
        if bool(value) != bool(only):
            raise ValueError(f"config {key}: only {only!r} is supported, got {brief(value)}")


def _check_fixed_heads(config: Keys) -> None:
    """See `EncoderConfig.fixed_patterns`."""
    given, layers, heads = config.fixed_heads, config.num_hidden_layers, config.num_attention_heads
    if given is None:
        return
    family = config.family
    if family.unlimited or family.disentangled or family.block_sparse or family.global_tokens:
        what = (
            "attends by blocks of queries and keys" if family.block_sparse else "has global tokens' queries"
        )
        what = "scores distances by queries and keys" if family.disentangled or family.two_streams else what
        what = "rotates queries and keys" if family.rotary else what
        raise ValueError(
            f"config fixed_heads: expected None, as {config.model_type} {what}, which fixed heads do not have"
        )
    rows = [given] if isinstance(given, (list, tuple)) and given and isinstance(given[0], str) else given
    if (
        not isinstance(rows, (list, tuple))
        or len(rows) not in ({layers} if rows is given else {1})
        or any(not isinstance(row, (list, tuple)) or len(row) != heads for row in rows)
    ):
        raise ValueError(
            f"config fixed_heads: expected None, {heads} names for all layers or {layers} lists of {heads} "
            f"names, got {brief(given)}"
        )
    names = [name for name in NAMES if name != NAMES[SEPARATORS]]
    for layer, row in enumerate(rows):
        where = "config fixed_heads" if rows is not given else f"config fixed_heads[{layer}]"
        if unknown := [name for name in row if name not in names]:
            raise ValueError(f"{where}: expected names of {', '.join(names)}, got {brief(unknown[0])}")
        if NAMES[LEARNED] not in row:
            raise ValueError(f"{where}: expected at least one {NAMES[LEARNED]!r} head, got none")
        ahead = [name for name in row if NAMES.index(name) not in BACKWARD]
        if config.is_decoder and ahead:
            raise ValueError(
                f"{where}: {ahead[0]!r}, but with is_decoder True no token sees a later one; expected names "
                f"of {', '.join(NAMES[i] for i in BACKWARD)}"
            )
    if config.family.shared_layers and any(list(row) != list(rows[0]) for row in rows):
        raise ValueError(
            f"config fixed_heads: {config.model_type} shares its layers' weights, so all layers must be alike"
        )


def _check_pruned_heads(config: Keys) -> None:
    """See `EncoderConfig.kept_heads`."""
    given, layers, heads = config.pruned_heads, config.num_hidden_layers, config.num_attention_heads
    if not given:
        return
    if not isinstance(given, dict):
        raise TypeError(f"config pruned_heads: expected lists of heads by layer, got {brief(given)}")
    for layer, gone in given.items():
        if not (isinstance(layer, int) or (isinstance(layer, str) and layer.isdecimal())) or not (
            0 <= int(layer) < layers
        ):
            raise ValueError(
                f"config pruned_heads: expected numbers of {layers} layers as keys, got {brief(layer)}"
            )
        if (
            not isinstance(gone, (list, tuple))
            or any(type(head) is not int or not 0 <= head < heads for head in gone)
            or len(set(gone)) < len(gone)
        ):
            raise ValueError(
                f"config pruned_heads[{layer}]: expected different heads below {heads}, got {brief(gone)}"
            )
    if config.family.shared_layers or config.fixed_heads is not None:
        why = "shares its layers" if config.family.shared_layers else "has config fixed_heads"
        raise ValueError(f"config pruned_heads: expected none, as {config.model_type} {why}")


def _check_inner_sizes(config: Keys) -> None:
    given, layers = config.intermediate_sizes, config.num_hidden_layers
    if given is None:
        return
    if (
        not isinstance(given, (list, tuple))
        or len(given) != layers
        or any(type(size) is not int or not 0 <= size <= MAX_SIZE for size in given)
    ):
        raise ValueError(
            f"config intermediate_sizes: expected None or {layers} integers from 0 to {MAX_SIZE}, one per "
            f"layer, got {brief(given)}"
        )
    if config.family.shared_layers or config.family.bottleneck:
        why = (
            "shares its layers"
            if config.family.shared_layers
            else "has several feed-forward blocks per layer"
        )
        raise ValueError(f"config intermediate_sizes: expected None, as {config.model_type} {why}")


def _refuse_other_mathematics(config: Keys) -> None:
    position = config.__dict__.get("position_embedding_type", "absolute")
    # ModernBERT's files say "sans_pos" or "absolute" and mean nothing by it
    known = ("alibi",) if config.family.alibi else ("absolute", None)
    if position not in known and not config.family.windows:
        raise ValueError(
            f"config position_embedding_type: {position!r} is not supported; only {known[0]!r} is"
        )
    if (kind := config.__dict__.get("feed_forward_type", "geglu")) != "geglu":
        raise ValueError(f"config feed_forward_type: expected 'geglu', got {brief(kind)}")
    for key in ("add_cross_attention", "is_encoder_decoder", "use_task_id"):
        if config.__dict__.get(key):
            raise ValueError(f"config {key}: True is not supported; this is an encoder without that part")
    if config.is_decoder not in (None, False, True):
        raise TypeError(f"config is_decoder: expected a boolean, got {config.is_decoder!r}")
    if type(config.right_to_left) is not bool:
        raise TypeError(f"config right_to_left: expected a boolean, got {config.right_to_left!r}")
    if config.is_decoder and not config.family.may_be_causal:
        raise ValueError(
            f"config is_decoder: True is not supported; transformers' {config.model_type} is never causal"
        )
    # transformers computes 32 buckets, whatever the key says
    if (buckets := config.__dict__.get("relative_attention_num_buckets", 32)) != 32:
        raise ValueError(f"config relative_attention_num_buckets: expected 32, got {buckets}")
    refused = config.family.refused
    for key, value in config.__dict__.items():
        if key.startswith(refused) and value not in (None, False):
            raise ValueError(f"config {key}: {brief(value)} is not supported; expected no such key")
    # Keys of NeoBERT's training code
    for key in ("rope", "rms_norm"):
        if config.__dict__.get(key) not in (None, True):
            raise ValueError(f"config {key}: expected True, got {config.__dict__[key]!r}")
    if (sinusoidal := config.__dict__.get("sinusoidal_pos_embds")) not in (None, False, True):
        raise ValueError(f"config sinusoidal_pos_embds: expected a boolean, got {sinusoidal!r}")
    if config.family.shared_layers:
        layers, groups = config.num_hidden_layers, config.__dict__["num_hidden_groups"]
        if layers and groups > layers:
            raise ValueError(f"config num_hidden_groups: {groups} groups for {layers} layers")


def brief(value: object) -> str:
    """A value from a file as messages show it."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
