"""Which calls a graph can serve; the model computes all other calls."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from fastbert.graphs.weights import HOOKED
from fastbert.layers import disentangled
from fastbert.layers.modules import is_hooked
from fastbert.ops.attention_relative import RelativeScores
from fastbert.runtime import dispatch
from fastbert.runtime.table import HALF

if TYPE_CHECKING:
    from fastbert.graphs.buckets import Bucket
    from fastbert.models.bert import BertModel
    from fastbert.models.config import EncoderConfig
    from fastbert.models.inputs import Inputs

# Arguments of calls that need no more than two calls of the extension (`GraphedModel._quickly`), and of all
# calls that a graph can serve; with any other argument the model itself runs
_USUAL = frozenset(("input_ids", "attention_mask", "token_type_ids", "return_dict", "first_token_only"))
RECORDED = _USUAL | {"position_ids", "packed", "cu_seqlens", "max_seqlen"}
# The most scores of distances of a layer that a graph holds: 64 MiB in float32
_MOST_SCORES = 1 << 24


def is_usual(model: BertModel, device: torch.device, given: dict[str, Any]) -> bool:
    """Whether usual arguments ask for hidden states and the pooler's output alone, and a graph may run.

    Hooks and modes of the modules are not checked.
    """
    config = model.config
    return (
        given.keys() <= _USUAL
        and not (config.output_attentions or config.output_hidden_states)
        and _unfit_around(model, device) is None
    )


def unfit(model: BertModel) -> str | None:
    """Why no graph can serve a model now, whatever the arguments; None if one can."""
    if model.training:
        return "the model is in training mode"
    return _unfit_around(model, model.device) or (HOOKED if is_hooked(model) else model.gap())


def _unfit_around(model: BertModel, device: torch.device) -> str | None:
    if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        return "gradients are on: call under torch.inference_mode() or torch.no_grad()"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if _has_any_global_hook():
        return HOOKED
    if "forward" in vars(model):
        return "the model's forward was replaced"
    if (reason := unknown(model.config)) is not None:
        return reason
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the caller is capturing a graph"
    if model.taps is not None:
        return "taps are set"
    return None


def unknown(config: EncoderConfig) -> str | None:
    """Why graphs do not have a model's layers; None if they may."""
    if disentangled.unpacks(config):
        return "a convolution of more than three tokens, or with groups, follows its first layer"
    if config.get("token_schedule"):
        return "tokens leave between its layers (config token_schedule), which graphs do not know"
    return config.family.unknown_to_graphs


def longest_text(config: EncoderConfig) -> int:
    """The most tokens of a text in a graph. BigBird's longer texts attend by blocks, unknown to graphs."""
    blocks = config.blocks(0)
    return config.max_tokens if blocks is None else min(config.max_tokens, blocks.full)


def unfit_inputs(config: EncoderConfig, inputs: Inputs) -> str | None:
    """Why no graph can serve a packed batch, whatever the size of its bucket; None if one can."""
    total, most = inputs.position_ids.shape[0], longest_text(config)
    if total == 0:
        return "there are no tokens"
    if inputs.inputs_embeds is not None:
        return "the embeddings are given"
    if inputs.holes:
        return "the mask has holes, which this family's attention depends on"
    if min(inputs.packing.max_seqlen, total) > most:
        return f"a sequence may have more than {most} tokens"
    # A graph's tables of rotary positions have so many rows
    if inputs.table_rows > most and config.family.rotary:
        return f"a position may be beyond {most - 1}"
    return None


def reads_distances(model: BertModel) -> bool:
    """Whether the backend of attention reads scores of distances; else it gets them as a dense bias."""
    op = "attention relative training" if model.training else "attention relative"
    reads = dispatch.serving_function("reads_relative", (op,), model.device, model.dtype)
    own = RelativeScores(torch.empty(0)), model.config.head_dim, model.training
    return reads is not None and reads(*own)


def dense_scores(model: BertModel, bucket: Bucket) -> str | None:
    """Why the scores of distances would take too much memory in a graph; None if they would not.

    A backend that does not read them gets one matrix per head, and per sequence where DeBERTa scores them, of
    the size that the bucket has room for.
    """
    config, family = model.config, model.family
    relative, shared = config.relative(), family.alibi or family.relative_bias is not None
    if model.device.type != "cuda" or not (shared or (relative is not None and relative.terms)):
        return None
    matrices = config.num_attention_heads * (1 if shared else bucket.sequences)
    if matrices * min(bucket.tokens, longest_text(config)) ** 2 <= _MOST_SCORES or reads_distances(model):
        return None
    return "attention does not read scores of distances, which would fill a matrix for all the graph's room"


def raise_bad_ids(device: torch.device) -> None:
    """Raise an IndexError if a replay on `device` has read an id that its table does not have.

    The kernel that finds a bad id reports it to the host, which does not wait (kernels/bad_ids.py).
    """
    # If it was never imported, no kernel has run
    kernels = sys.modules.get("fastbert.kernels.bad_ids")
    if kernels is not None:
        kernels.bad_ids(device).check()


def unfit_arguments(config: EncoderConfig, given: dict[str, Any], served: frozenset[str]) -> str | None:
    """Why no graph can serve these arguments of `BertModel.forward`; None if all are `served`."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    for name in ("output_attentions", "output_hidden_states"):
        if given.get(name) or (given.get(name) is None and getattr(config, name)):
            return f"{name} is asked for"
    for name, value in given.items():
        # causal=False overrides the config
        if value is not None and (value is not False or name == "causal") and name not in served:
            return f"{name} is given"
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return "attention_mask has four dimensions"
    # With position_ids a sequence may be longer than graphs are recorded for
    if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > config.max_tokens:
        return f"input_ids are more than {config.max_tokens} per sequence"
    return None


def by_grid(model: BertModel) -> str | None:
    """Why the cost of attention would follow a bucket's room, not the tokens in it; None if it would not."""
    # Attention on a CPU reads the lengths
    if model.device.type != "cuda":
        return None
    name = dispatch.serving_backend("attention_fwd", model.device, model.dtype)
    head_dim = model.config.head_dim
    if name == "cuda":
        from fastbert.backends.cuda.attention import HEADDIMS

        common = not model.family.windows and model.config.kv_heads is None
        if head_dim in HEADDIMS and (common or model.dtype in HALF):
            return None
        following = dispatch.next_function("cuda", "attention_fwd", model.device, model.dtype)
        name = following.__module__.split(".")[2]
    if name == "triton":
        from fastbert.kernels.attention import MAX_HEADDIM  # imports Triton

        if head_dim <= MAX_HEADDIM:
            return None
        name = "aten"
    return f"attention is served by {name}, on a grid of all sequences that a graph has room for"
