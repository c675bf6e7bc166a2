"""Config keys that single families have."""

from __future__ import annotations

from typing import Any

from fastbert.models import config_rope, config_windows
from fastbert.models.config_values import MAX_SIZE, activations, booleans, integers, one_of, refused


def check(config: Any) -> None:
    """Check the keys of the config's family; those of bottlenecks are checked before (`check_bottleneck`).

    Raises:
        TypeError, ValueError: naming the key, what came and what was expected.
    """
    family = config.family
    if family.rotary:
        (config_windows if family.windows else config_rope).check(config)
    if family.disentangled:
        _check_relative(config)
    if family.block_sparse:
        _check_blocks(config)
    if family.global_tokens:
        _check_attention_window(config)
    if family.two_streams:
        _check_streams(config)


def check_bottleneck(config: Any) -> None:
    """See `fastbert.layers.bottleneck_layer`."""
    own, width = config.__dict__, config.block_width
    booleans(config, "use_bottleneck", "use_bottleneck_attention", "key_query_shared_bottleneck")
    booleans(config, "trigram_input", "pooler_dense")
    one_of(config, "normalization_type", ("no_norm", "layer_norm"))
    if own.get("true_hidden_size", width) not in (None, width):
        raise refused(config, "true_hidden_size", str(width))
    narrow = own["use_bottleneck_attention"] or own["key_query_shared_bottleneck"]
    if not narrow and width != config.hidden_size:
        raise refused(
            config,
            "intra_bottleneck_size",
            f"hidden_size {config.hidden_size} without use_bottleneck_attention and "
            "key_query_shared_bottleneck",
        )


def _check_relative(config: Any) -> None:
    """See `EncoderConfig.relative`."""
    own, width = config.__dict__, config.hidden_size
    booleans(config, "relative_attention", "position_biased_input", "share_att_key", "legacy")
    terms = own["pos_att_type"]
    if terms is not None and (not isinstance(terms, list) or not {*map(str, terms)} <= {"c2p", "p2c"}):
        raise refused(config, "pos_att_type", "names of c2p, p2c")
    if terms and not own["relative_attention"]:
        raise refused(config, "pos_att_type", "None without relative_attention")
    integers(config, {"max_relative_positions": -1, "position_buckets": -1, "conv_kernel_size": 0})
    farthest = own["max_relative_positions"]
    farthest = config.max_position_embeddings if farthest < 1 else farthest
    if own["position_buckets"] > 0 and not 4 <= own["position_buckets"] < 2 * (farthest - 1):
        most = f"an integer from 4 to {2 * farthest - 3} for distances up to {farthest}"
        raise refused(config, "position_buckets", f"-1, or {most}")
    one_of(config, "norm_rel_ebd", ("none", "layer_norm"))
    if not own["legacy"] and own.get("embedding_size") not in (None, width):
        raise refused(config, "embedding_size", f"hidden_size {width} with legacy False")
    sizes = {"attention_head_size": width // config.num_attention_heads, "pooler_hidden_size": width}
    for key, size in sizes.items():
        if own.get(key, size) not in (None, size):
            raise refused(config, key, str(size))
    activations(config, "pooler_hidden_act", "conv_act")
    if own["conv_kernel_size"] and own["conv_kernel_size"] % 2 == 0:
        raise refused(config, "conv_kernel_size", "0 or an odd integer")
    groups = own["conv_groups"]
    if type(groups) is not int or groups < 1 or width % groups:
        raise refused(config, "conv_groups", f"a divisor of hidden_size {width}")


def _check_blocks(config: Any) -> None:
    """See `EncoderConfig.blocks`."""
    one_of(config, "attention_type", ("block_sparse", "original_full"))
    booleans(config, "rescale_embeddings")
    if config.is_decoder and config.attention_type == "block_sparse":
        raise ValueError(
            "config is_decoder: True is not supported with attention_type 'block_sparse', whose tokens see "
            "later tokens"
        )


def _check_attention_window(config: Any) -> None:
    """See `EncoderConfig.window`."""
    given, layers = config.__dict__["attention_window"], config.num_hidden_layers
    each = given if isinstance(given, (list, tuple)) else [given] * layers
    if len(each) != layers or any(type(w) is not int or w < 2 or w % 2 or w > MAX_SIZE for w in each):
        least = f"an even integer >= 2, or {layers} of them, one per layer"
        raise refused(config, "attention_window", least)
    sep = config.__dict__["sep_token_id"]
    if sep is not None and (type(sep) is not int or not 0 <= sep < config.vocab_size):
        raise refused(config, "sep_token_id", f"None or an id below vocab_size {config.vocab_size}")


def _check_streams(config: Any) -> None:
    """XLNet's keys."""
    own = config.__dict__
    one_of(config, "attn_type", ("bi", "uni"))
    one_of(config, "classifier_pooling", ("last", "first", "mean", "cls_index"))
    booleans(config, "bi_data", "same_length", "use_mems_eval", "use_mems_train")
    least = {"clamp_len": -1, "mem_len": 0, "reuse_len": 0, "start_n_top": 1, "end_n_top": 1}
    integers(config, least, ("mem_len", "reuse_len"))
    size = config.hidden_size // config.num_attention_heads
    if own["head_dim"] not in (None, size):
        raise refused(config, "head_dim", f"d_model / n_head = {size}")
    activations(config, "summary_activation")
    # No published checkpoint has another value
    for key, only in (
        ("summary_use_proj", True),
        ("summary_proj_to_labels", False),
        ("summary_first_dropout", 0),
        ("pruned_heads", None),
        ("intermediate_sizes", None),
    ):
        if bool(own.get(key, only)) != bool(only):
            raise refused(config, key, repr(only))
