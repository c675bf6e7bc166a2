"""The two functions that transformers' attention interface asks for: attention, and its mask.

In transformers, a model's attention modules look up two functions by name: one computes

    out = dropout(softmax(scaling * q kᵀ + mask)) v

and one makes the mask. `register` adds both under the name "fastbert".

The mask comes from sdpa's mask function. Attention runs in `fastbert.ops.attention`, with the mask as an
additive bias. If a module's `Site` allows it, the mask only marks padding, and much is padding, then q, k and
v are packed instead. There rows of padded queries are 0, and all other rows are the same. Calls that we do
not compute (`_unfit` has the list) run in sdpa's own function, and the module's `Site` counts them by reason.

`register` imports transformers; nothing else here does.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.jit._trace import is_tracing
from torch.utils.weak import WeakTensorKeyDictionary

from fastbert.layers.packing import Packing, from_mask
from fastbert.ops import checks
from fastbert.ops.attention import attention

NAME = "fastbert"
# Where an attention module keeps its `Site`
SITE = "_fastbert_interface"

# Packing copies q, k, v and the output. It is worth it if it saves this share of all (query, key) pairs.
SAVED = 0.25

# Arguments that sdpa's function ignores too, because the mask covers them or they change no result
_NO_EFFECT = frozenset(
    (
        "cache_position",
        "deterministic",
        "num_items_in_batch",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    )
)

# transformers' own functions; `register` sets them
_sdpa: Any = None
_sdpa_mask: Any = None
_key_padding: Any = None


@dataclass
class Site:
    """What `interface.apply` stores on an attention module, and counts of its calls.

    Attributes:
        name: the module's name within the model.
        packs: whether q, k and v may be packed by a padding mask.
        strict: whether a call that our attention cannot compute raises RuntimeError.
        fused: the number of calls of our attention. Calls under torch.compile are not counted.
        packed: the number of these calls that were packed.
        stock: reason -> calls of sdpa's own function.
    """

    name: str
    packs: bool = False
    strict: bool = False
    fused: int = 0
    packed: int = 0
    stock: Counter[str] = field(default_factory=Counter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A process that loads a pickled model may not have registered "fastbert" yet
        register()


class _Padding:
    """A mask of padded keys, made by `mask_function`: `keep` (batch, seqlen) bool, and its packing."""

    def __init__(self, keep: Tensor):
        self.keep = keep

    @functools.cached_property
    def packing(self) -> Packing | None:
        """The packing; None if it is not worth it, or if a first token, which heads read, is padding."""
        # The host waits for a GPU once per mask
        counts = torch.cat((self.keep.sum(1), self.keep[:, 0])).tolist()
        lengths, firsts = counts[: len(self.keep)], counts[len(self.keep) :]
        pairs = self.keep.shape[0] * self.keep.shape[1] ** 2
        worth = all(firsts) and sum(n * n for n in lengths) <= (1 - SAVED) * pairs
        return from_mask(self.keep, lengths) if worth else None


# Mask -> _Padding
_paddings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Mask -> (its version, bias)
_biases: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def mask_function(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' sdpa mask for the same arguments: bool (batch, 1, S, S), True = seen, or None = all.

    If it only marks padded keys, it is a view of one row for all queries, which `attention_function`
    recognises.
    """
    mask = _sdpa_mask(*args, **kwargs)
    keep = kwargs.get("attention_mask")
    if (
        mask is None
        or torch.compiler.is_compiling()
        or is_tracing()
        or type(mask) is not Tensor
        or kwargs.get("mask_function") is not _key_padding
        or not isinstance(keep, Tensor)
        or mask.dim() != 4
        or mask.shape[1] != 1
        or keep.shape != (mask.shape[0], mask.shape[3])
        or mask.shape[2] != mask.shape[3]
        or mask.shape[2] == 0
    ):
        return mask
    # A copy that no other code writes to; PyTorch refuses writes to the expanded view
    rows = mask[:, :, :1].clone()
    mask = rows.expand(mask.shape)
    _paddings[mask] = _Padding(rows[:, 0, 0])
    return mask


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' sdpa function computes, by `fastbert.ops.attention`.

    Args:
        module: the attention module, whose `num_key_value_groups`, `is_causal` and `Site` are read.
        query: (batch, nheads, S, headdim).
        key, value: (batch, nheads // num_key_value_groups, S, headdim).
        attention_mask: bool (True = seen) or additive float, (batch, nheads, S, S); any size but the last may
            be 1. None = all tokens are seen, or causal if `is_causal`.
        dropout: probability of dropping an attention probability; drawn from PyTorch's generator of the
            device.
        scaling: factor of the scores; None is headdim ** -0.5.
        is_causal: used if the mask is None. None is the module's `is_causal`, or True if it has none.
        kwargs: further arguments. If any has an effect and is not None, sdpa's function runs instead.

    Returns:
        (batch, S, nheads, headdim), and None for the probabilities.

    Raises:
        RuntimeError: the module's site is strict, and our attention cannot compute the call.

    Source: Vaswani et al. 2017, "Attention Is All You Need", eq. 1.
    """
    compiling = torch.compiler.is_compiling()
    site = None if compiling else module.__dict__.get(SITE)
    reason = _unfit(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    if reason is not None:
        if site is not None:
            site.stock[reason] += 1
            if site.strict:
                raise RuntimeError(f"{site.name}: attention takes the stock path (strict=True): {reason}")
        return _sdpa(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )

    groups = getattr(module, "num_key_value_groups", 1)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options: dict[str, Any] = {"softmax_scale": scaling, "causal": bool(is_causal) and attention_mask is None}
    if dropout > 0:
        seed = torch.randint(2**62, (1,), dtype=torch.int64, device=query.device)
        options.update(dropout_p=dropout, seed=seed)
    q, k, v = query.transpose(1, 2), _repeat(key, groups), _repeat(value, groups)

    packing = None
    if site is not None:
        site.fused += 1
        if site.packs and attention_mask is not None:
            padding = _paddings.get(attention_mask)
            packing = None if padding is None else padding.packing
            site.packed += packing is not None
    if packing is not None:
        q, k, v = (packing.pack(t) for t in (q, k, v))
        out = attention(q, k, v, packing.cu_seqlens, packing.max_seqlen, **options)
        return packing.unpack(cast(Tensor, out)), None
    bias = None if attention_mask is None else _bias(attention_mask, query, compiling)
    return cast(Tensor, attention(q, k, v, bias=bias, **options)), None


def _unfit(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> str | None:
    """Why sdpa's own function must compute this call; None if ours can."""
    for name, given in kwargs.items():
        if given is not None and name not in _NO_EFFECT and not (name == "output_attentions" and not given):
            return f"argument {name}"
    # Under dynamo `is_exporting` of PyTorch < 2.14 is always true
    dynamo = torch.compiler.is_dynamo_compiling()
    if is_tracing() or (torch.compiler.is_exporting() and not dynamo):
        return "export"
    if not dynamo:
        if torch._C._are_functorch_transforms_active():
            return "a torch.func transform"
        for t in (query, key, value):
            if type(t) not in (Tensor, nn.Parameter):
                return f"a tensor of class {type(t).__name__}"
    if query.device.type not in ("cpu", "cuda"):
        return f"device {query.device.type}"
    dtypes = {query.dtype, key.dtype, value.dtype}
    mixed = len(dtypes) > 1 and (checks.autocast_dtype(query) is None or torch.float64 in dtypes)
    if mixed or not dtypes <= set(checks.FLOATS):
        return f"dtypes {query.dtype}, {key.dtype}, {value.dtype} of query, key, value"
    if query.dim() != 4 or key.dim() != 4:
        return "query or key not 4-D"
    if query.shape[2] != key.shape[2]:
        return "as many queries as keys are needed"
    batch, nheads, seqlen, headdim = query.shape
    groups = getattr(module, "num_key_value_groups", 1)
    if key.shape[1] * groups != nheads or key.shape[0] != batch or key.shape[3] != headdim:
        return "key of another shape than query"
    if value.shape != key.shape:
        return "value of another shape than key"
    if not isinstance(dropout, (int, float)) or dropout >= 1:
        return "dropout is not a number below 1"
    if scaling is not None and not isinstance(scaling, (int, float, torch.SymFloat)):
        return "scaling is not a number"
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return "mask not 4-D"
    if mask.dtype != torch.bool and mask.dtype not in checks.FLOATS:
        return f"mask of {mask.dtype}"
    if mask.device != query.device:
        return "mask on another device"
    sizes = zip(mask.shape, (batch, nheads, seqlen, seqlen), strict=True)
    if any(size not in (1, full) for size, full in sizes):
        return "mask of another size"
    return None


def _repeat(t: Tensor, groups: int) -> Tensor:
    """(batch, heads, S, headdim) -> (batch, S, heads * groups, headdim): each head `groups` times."""
    t = t.transpose(1, 2)
    if groups == 1:
        return t
    batch, seqlen, heads, headdim = t.shape
    return t.unsqueeze(3).expand(batch, seqlen, heads, groups, headdim).reshape(batch, seqlen, -1, headdim)


def _bias(mask: Tensor, query: Tensor, compiling: bool) -> Tensor:
    """The mask as a bias to add to the scores. A model's layers share their mask and its bias."""
    if mask.dtype != torch.bool:
        return mask
    # CPU kernels read float32
    dtype = torch.float32 if query.device.type == "cpu" else query.dtype
    # The version shows changes in place. Inference tensors have none, but ours never change.
    cached = not compiling and (mask in _paddings or not mask.is_inference())
    version = 0 if not cached or mask.is_inference() else mask._version
    if cached and mask in _biases:
        known, bias = _biases[mask]
        # Autograd may refuse a bias that was made in inference mode, or outside it
        same_mode = bias.is_inference() == torch.is_inference_mode_enabled()
        if known == version and bias.dtype == dtype and same_mode:
            return bias
    rows = mask
    if not compiling:
        # An expanded row is converted and read once
        for dim in range(3):
            if rows.stride(dim) == 0 and rows.shape[dim] > 1:
                rows = rows.narrow(dim, 0, 1)
    bias = torch.zeros(rows.shape, dtype=dtype, device=mask.device).masked_fill(~rows, -torch.inf)
    if cached:
        _biases[mask] = version, bias
    return bias


def register() -> None:
    """Make "fastbert" an attention implementation of transformers, as in
    `AutoModel.from_pretrained(…, attn_implementation="fastbert")`. Another call changes nothing.

    Raises:
        ImportError: transformers is not installed.
    """
    global _sdpa, _sdpa_mask, _key_padding
    if _sdpa is not None:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function

    _sdpa_mask, _key_padding = AttentionMaskInterface()["sdpa"], bidirectional_mask_function
    _sdpa = AttentionInterface()["sdpa"]
    # Without a mask function of the same name, the attention function would get no padding mask, and
    # transformers would not warn.
    AttentionMaskInterface.register(NAME, mask_function)
    AttentionInterface.register(NAME, attention_function)
