"""Attention alone, as a training step asks for it: forward and backward with dropout 0.1 over one batch.

Three candidates: ours as it serves; ours with the other choice of whether forward saves dropout's bits for
backward (this benchmark decides `fastbert.ops.dropout.SAVED_ON`); PyTorch's scaled_dot_product_attention on
the padded batch with its mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from bench.lib.roofs import Roofs
from bench.lib.timing import interleave
from bench.lib.workloads import Model
from fastbert.ops import attention as op
from fastbert.ops.attention_places import attention_places

DROPOUT = 0.1
CANDIDATES = ("fastbert", "fastbert_other_bits", "torch_sdpa")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# of measuring each candidate; so long, because the candidates are close
SECONDS = 1.5


def flops(lengths: tuple[int, ...], size: Model) -> float:
    """Two products of every pair of tokens and head in forward, five in backward."""
    return 7 * 2.0 * sum(n * n for n in lengths) * size.hidden


def saved_by_default(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether forward saves the bits here by default, by `fastbert.ops.dropout`."""
    return dtype in op.SAVED_ON.get(device.type, ())


@contextlib.contextmanager
def bits(saved: bool, device: torch.device) -> Iterator[None]:
    """Whether attention's forward saves the bits of dropout on this device."""
    before = op.SAVED_ON
    op.SAVED_ON = before | {device.type: tuple(DTYPES.values()) if saved else ()}
    try:
        yield
    finally:
        op.SAVED_ON = before


def calls(
    lengths: tuple[int, ...], size: Model, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Candidate -> forward and backward, each time with the same q, k, v and gradient of out."""
    heads, headdim = size.heads, size.hidden // size.heads
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    qkv = torch.randn(sum(lengths), 3, heads, headdim, device=device).to(dtype).requires_grad_()
    dout = torch.randn(sum(lengths), heads, headdim, device=device).to(dtype)
    seed = torch.tensor([1], device=device)
    longest = max(lengths)
    # made once for all layers of a step
    places = attention_places(ends, longest, sum(lengths), dtype)
    mask = None
    if min(lengths) < longest:
        real = torch.arange(longest, device=device) < ends.diff().unsqueeze(1)
        mask = real[:, None, None, :]
    padded_qkv, padded_dout = (
        pad_sequence(t.split(list(lengths)), batch_first=True) for t in (qkv.detach(), dout)
    )
    padded_qkv.requires_grad_()
    padded_dout = padded_dout.transpose(1, 2)

    def ours(saved: bool) -> None:
        with bits(saved, device):
            out = op.attention(*qkv.unbind(1), ends, longest, dropout_p=DROPOUT, seed=seed, places=places)
            torch.autograd.grad(out, qkv, dout)

    def sdpa() -> None:
        q, k, v = (t.transpose(1, 2) for t in padded_qkv.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=DROPOUT)
        torch.autograd.grad(out, padded_qkv, padded_dout)

    saved = saved_by_default(device, dtype)
    return dict(zip(CANDIDATES, (lambda: ours(saved), lambda: ours(not saved), sdpa), strict=True))


def rows(
    size: Model, workload: str, lengths: tuple[int, ...], tag: str, device: str, samples: int, roofs: Roofs
) -> Iterator[dict]:
    """A row for each candidate, interleaved; `tag`: "fp32" or "bf16"."""
    place = torch.device(device)
    found = calls(lengths, size, DTYPES[tag], place)
    timed = interleave(found, place, seconds=SECONDS, samples=(samples, 20 * samples))
    work, by_default = flops(lengths, size), saved_by_default(place, DTYPES[tag])
    for name, timing in timed.items():
        seconds = timing.median_ms * 1e-3
        yield {
            "step": "attention",
            "name": f"attention-{name}-{tag}-{size.name}-{workload}",
            "status": "ok",
            "model": size.name,
            "workload": workload,
            "head": "dropout",
            "candidate": f"{name}-{tag}",
            "saves_bits": name != "torch_sdpa" and by_default == (name == "fastbert"),
            "gflops": work / seconds * 1e-9,
            "of_floor": roofs.seconds(work, 0.0, tag) / seconds,
            **timing.facts(),
        }
