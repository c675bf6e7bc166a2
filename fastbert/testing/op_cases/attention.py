"""Cases of `attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops.attention_grid import keep_mask
from fastbert.ops.attention_relative import RelativeScores
from fastbert.ops.checks import TensorOrNone
from fastbert.testing.error_rule import Case, Outputs, draws, ends_of

# Columns of scores of distances
_COLUMNS = 41


@dataclass(frozen=True, repr=False)
class AttentionCase(Case):
    """Sequences of `lengths`, `nheads` x `headdim`, with the op's options.

    Attributes:
        padded: (batch, seqlen, …) layout; the lengths must be equal.
        capacity: rows past cu_seqlens[-1].
        kv_heads: heads of k and v; 0 means `nheads`.
        slack: how much max_seqlen exceeds the longest length.
        bias: "" or its shape: "shared" (nheads, S, S), "sequence" (batch, nheads, S, S) or "keys"
            (batch, 1, 1, S).
        relative: "" or which scores of distances there are: q of queries, k of keys, b alone; p: positions.
        masked: a quarter of the bias is -inf, and if it has rows, one whole row.
        packed_qkv: q, k, v are views of one tensor.
        sharpness: a factor of q. If it is large, a query sees about one key, so dS is nearly 0.
        lse, probs: also compare lse, probs.
    """

    lengths: tuple[int, ...]
    nheads: int
    headdim: int
    padded: bool = False
    capacity: int = 0
    slack: int = 0
    causal: bool = False
    window: tuple[int, int] | None = None
    kv_heads: int = 0
    bias: str = ""
    relative: str = ""
    masked: bool = False
    gate: bool = False
    dropout_p: float = 0.0
    packed_qkv: bool = False
    sharpness: float = 1.0
    lse: bool = False
    probs: bool = False

    op = "attention"
    marks = (
        "padded causal masked gate packed_qkv lse probs window=window{} kv_heads=kv{} "
        "bias=bias_{} relative=relative_{} capacity=capacity{} slack=slack{} dropout_p=dropout "
        "sharpness=sharp{:g}"
    )
    options = ("causal", "window", "dropout_p")
    grad_inputs = ("q", "k", "v", "qkv", "bias", "query", "key", "distance", "gate")

    @property
    def shape(self) -> str:
        lengths = self.lengths
        uniform = len(set(lengths)) == 1 < len(lengths)
        text = f"{len(lengths)}x{lengths[0]}" if uniform else "_".join(map(str, lengths))
        return f"{text}x{self.nheads}x{self.headdim}"

    @property
    def output_names(self) -> tuple[str, ...]:
        return self._pick("out", "lse", "probs")

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths) + self.slack

    @property
    def total(self) -> int:
        return sum(self.lengths) + self.capacity

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        g, randn = draws(seed, dtype, device)
        rows = (len(self.lengths), self.lengths[0]) if self.padded else (self.total,)
        if self.packed_qkv:
            tensors = {"qkv": randn(*rows, sum(self._heads), self.headdim)}
        else:
            tensors = {
                name: randn(*rows, heads, self.headdim)
                for name, heads in zip("qkv", self._heads, strict=True)
            }
            tensors["q"] *= self.sharpness
        scores = {"q": ("query", *rows), "k": ("key", *rows), "b": ("distance",)}
        for name, *shape in (scores[letter] for letter in self.relative if letter != "p"):
            tensors[name] = randn(*shape, self.nheads, _COLUMNS)
        if "p" in self.relative:
            shape = len(self.lengths), self.max_seqlen
            tensors["positions"] = torch.randint(2 * self.max_seqlen, shape, generator=g).to(device)
        return {
            **tensors,
            "cu_seqlens": None if self.padded else ends_of(self.lengths, device),
            "bias": self._bias(randn, g),
            "gate": 1 + 0.5 * randn(self.nheads) if self.gate else None,
            "seed": torch.tensor([1234 + seed], device=device) if self.dropout_p else None,
        } | ({"columns": self._columns(g).to(device)} if self.relative else {})

    def _columns(self, g):
        """A column per distance: each near one has its own, far ones share any."""
        reach = self.max_seqlen + 2
        distance = torch.arange(-reach, reach + 1)
        any_of_them = torch.randint(_COLUMNS, distance.shape, generator=g)
        near = distance.abs() <= _COLUMNS // 2
        return torch.where(near, _COLUMNS // 2 + distance, any_of_them).to(torch.int32)

    @property
    def _heads(self) -> tuple[int, int, int]:
        """The numbers of heads of q, k and v."""
        kv_heads = self.kv_heads or self.nheads
        return self.nheads, kv_heads, kv_heads

    def _bias(self, randn, g):
        if not self.bias:
            return None
        batch, grid = len(self.lengths), (self.nheads, self.max_seqlen, self.max_seqlen)
        shapes = {"shared": grid, "sequence": (batch, *grid), "keys": (batch, 1, 1, self.max_seqlen)}
        shape = shapes[self.bias]
        bias = randn(*shape)
        if self.masked:
            bias[(torch.rand(shape, generator=g) < 0.25).to(bias.device)] = -math.inf
            if shape[-2] > 1:
                bias[..., 0, 1, :] = -math.inf
        return bias

    def _apart(self, qkv=None, query=None, key=None, distance=None, columns=None, positions=None, **inputs):
        """Arguments of the op: q, k and v apart, scores of distances together."""
        if columns is not None:
            inputs["relative"] = RelativeScores(columns, query, key, distance, positions)
        inputs["max_seqlen"] = None if self.padded else self.max_seqlen
        return inputs if qkv is None else inputs | dict(zip("qkv", qkv.split(self._heads, -2), strict=True))

    def _pick(self, out, lse, probs):
        return (out, *((lse,) if self.lse else ()), *((probs,) if self.probs else ()))

    def call(self, **inputs: Any) -> Outputs:
        more = {"offset": 5, "return_lse": self.lse, "return_probs": self.probs}
        return super().call(**self._apart(**inputs), **more)

    def _keep(self, seed):
        """Dropout bits of every sequence, (batch, nheads, S, S)."""
        if not self.dropout_p:
            return None
        starts = ends_of(self.lengths, seed.device)[:-1].long()
        return keep_mask(seed, 5, starts, self.nheads, self.max_seqlen, self.dropout_p)

    def eager(
        self,
        cu_seqlens: TensorOrNone,
        bias: Tensor | None,
        gate: Tensor | None,
        seed: TensorOrNone,
        columns: TensorOrNone = None,
        query: TensorOrNone = None,
        key: TensorOrNone = None,
        distance: TensorOrNone = None,
        positions: TensorOrNone = None,
        **qkv: Any,
    ) -> Outputs:
        (q, k, v), keep = (self._apart(**qkv)[name] for name in "qkv"), self._keep(seed)
        if columns is not None:
            found = self._eager_scores(columns, query, key, distance, positions)
            bias = found if bias is None else bias + found
        if self.padded:
            return self._pick(*self._eager_batch(q, k, v, bias, gate, keep))
        rows = (t[: sum(self.lengths)].unsqueeze(0).split(self.lengths, 1) for t in (q, k, v))
        results = []
        for b, (n, q, k, v) in enumerate(zip(self.lengths, *rows, strict=True)):
            part = None if bias is None else (bias if bias.dim() == 3 else bias[b])[:, :n, :n]
            kept = None if keep is None else keep[b, :, :n, :n]
            out, lse, probs = self._eager_batch(q, k, v, part, gate, kept)
            results.append((out[0], lse[0], F.pad(probs[0], (0, self.max_seqlen - n) * 2)))
        outs, lses, probs = zip(*results, strict=True)
        out = F.pad(torch.cat(outs), (0, 0, 0, 0, 0, self.capacity))
        return self._pick(out, F.pad(torch.cat(lses, 1), (0, self.capacity)), torch.stack(probs))

    def _eager_scores(self, columns, query, key, distance, positions):
        """Scores of distances (batch, nheads, S, S), as models add them."""
        size, reach, first, found = self.max_seqlen, columns.shape[0] // 2, 0, []
        if positions is None:
            positions = torch.arange(size, device=columns.device).expand(len(self.lengths), size)
        for n, position in zip(self.lengths, positions, strict=True):
            index = columns.long()[reach + (position - position[:, None]).clamp(-reach, reach)]
            index = index.expand(self.nheads, size, size)
            own = [
                None if t is None else (t.flatten(0, 1) if self.padded else t)[first : first + n]
                for t in (query, key)
            ]
            own = [None if t is None else F.pad(t.transpose(0, 1), (0, 0, 0, size - n)) for t in own]
            terms = [] if own[0] is None else [own[0].gather(-1, index)]
            if own[1] is not None:
                terms.append(own[1].gather(-1, index.mT).mT)
            if distance is not None:
                terms.append(distance.unsqueeze(1).expand(-1, size, -1).gather(-1, index))
            found.append(sum(terms[1:], terms[0]))
            first += n
        return torch.stack(found)

    def _eager_batch(self, q, k, v, bias, gate, keep):
        """What an eager Transformers model runs, on (batch, seqlen, nheads, headdim)."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.headdim**-0.5
        if bias is not None:
            scores = scores + bias
        distance = torch.arange(scores.shape[-1], device=q.device)
        distance = distance - distance[:, None]  # from the query to the key
        left, right = self.window or (-1, -1)
        if self.causal or right >= 0:
            scores = scores.masked_fill(distance > (0 if self.causal else right), -math.inf)
        if left >= 0:
            scores = scores.masked_fill(distance < -left, -math.inf)
        lse = torch.logsumexp(scores.detach().float(), -1)
        empty = scores.isneginf().all(-1, keepdim=True)  # eager's NaN would be no yardstick
        probs = torch.softmax(scores.masked_fill(empty, 0.0), -1, dtype=torch.float32).to(q.dtype)
        probs = probs.masked_fill(empty, 0.0)
        dropped = probs if keep is None else probs * keep / (1 - self.dropout_p)
        out = torch.matmul(dropped, v).transpose(1, 2)
        if gate is not None:
            out = out * gate.unsqueeze(-1)
        return out, lse, probs

    def oracle(self, seed: TensorOrNone, **inputs: Any) -> Outputs:
        return self._pick(*super().oracle(**self._apart(**inputs), keep_mask=self._keep(seed)))

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        # A score of size s carries s roundings into exp; dS then multiplies by ‖dout‖‖v‖ and by ‖q‖ or ‖k‖.
        apart = self._apart(**inputs)
        q, k, v = (apart[name].detach().double().norm(dim=-1).max().item() for name in "qkv")
        scale, longest, total = self.headdim**-0.5, max(self.lengths), sum(self.lengths)
        dout = self.headdim**0.5 + 3.0  # norm of a row of randn
        base = 4 * torch.finfo(torch.float32).eps * (1 + q * k * scale) / (1.0 - self.dropout_p)
        ds = base * dout * v
        summed = longest * (self.nheads // self._heads[1])  # over the queries of all heads
        floors = {
            "out": base * v,
            "lse": base,
            "probs": base,
            "dq": ds * scale * k,
            "dk": ds * scale * q * summed**0.5,
            "dv": base * dout * summed**0.5,
            "dbias": ds * len(self.lengths) ** 0.5,
            "dgate": base * dout * v * total**0.5,
            "dquery": ds * longest**0.5,
            "dkey": ds * longest**0.5,
            "ddistance": ds * (total * longest) ** 0.5,
        }
        floors["dqkv"] = max(floors["dq"], floors["dk"], floors["dv"])
        return floors[name]

    def flops(self) -> int:
        left, right = self.window or (-1, -1)
        right = 0 if self.causal else right
        pairs = 0
        for n in self.lengths:
            pairs += n * n
            # keys that no query sees on a side with a limit: 1 + 2 + ... of them
            pairs -= sum((n - 1 - side) * (n - side) // 2 for side in (left, right) if 0 <= side < n)
        return 4 * pairs * self.nheads * self.headdim

    def bytes(self, dtype: torch.dtype) -> int:
        batch, size = len(self.lengths), self.max_seqlen
        grid = self.nheads * size * size
        of_bias = {"": 0, "keys": batch * size, "shared": grid, "sequence": batch * grid}[self.bias]
        elements = 4 * sum(self.lengths) * self.nheads * self.headdim + of_bias
        elements += batch * grid if self.probs else 0
        elements += len(self.relative.strip("bp")) * sum(self.lengths) * self.nheads * _COLUMNS
        return elements * dtype.itemsize + (4 * self.nheads * self.total if self.lse else 0)


SMALL = [
    AttentionCase((17, 0, 5), 2, 64, capacity=3, lse=True),
    AttentionCase((19, 6), 1, 32, relative="qkb", lse=True),
    AttentionCase((18, 5), 1, 16, relative="qkp"),
    AttentionCase((7, 33), 2, 32, bias="sequence", masked=True, dropout_p=0.25, packed_qkv=True),
]
ON_GPU = [  # enough tiles of 128 queries, and of 64, for every GPU
    AttentionCase((512, 300, 500, 257), 12, 64, packed_qkv=True, lse=True),
    AttentionCase((64, 50, 64, 33) * 4, 12, 64, packed_qkv=True, lse=True),
    # training's, with the tiles that real lengths take, and a few rows for the low ones
    AttentionCase((512, 300, 500, 257), 12, 64, packed_qkv=True, dropout_p=0.1),
    AttentionCase((512, 300), 12, 64, packed_qkv=True, dropout_p=0.1, bias="keys"),
    AttentionCase((70, 19), 2, 64, packed_qkv=True, dropout_p=0.1),
    # ModernBERT's window, one with a loop for whole tiles, and shared heads
    AttentionCase((512, 300, 500, 257), 12, 64, packed_qkv=True, window=(64, 64), lse=True),
    AttentionCase((512, 300), 12, 64, packed_qkv=True, window=(64, 64), dropout_p=0.1),
    AttentionCase((1100,), 12, 64, packed_qkv=True, window=(256, 256), lse=True),
    AttentionCase((512, 300, 257), 12, 64, packed_qkv=True, kv_heads=4, lse=True),
    # left to right
    AttentionCase((512, 300, 500, 257), 12, 64, packed_qkv=True, causal=True, lse=True),
    # MiniLM's heads
    AttentionCase((512, 300, 500, 257) * 2, 12, 32, packed_qkv=True, lse=True),
    # DeBERTa's
    AttentionCase((512, 300), 12, 64, packed_qkv=True, relative="qk", dropout_p=0.1),
]
CASES = [
    *SMALL,
    AttentionCase((1,), 1, 16),
    AttentionCase((64, 1, 31, 16), 3, 16, packed_qkv=True, lse=True),
    AttentionCase((40, 128, 97), 12, 64, packed_qkv=True),  # BERT-base, ragged
    AttentionCase((65, 2), 2, 128, slack=9),
    AttentionCase((48, 48, 48), 4, 32, padded=True, lse=True),
    AttentionCase((33, 33), 2, 64, padded=True, packed_qkv=True, bias="keys", masked=True),
    AttentionCase((20, 20, 20, 7, 7), 2, 64),  # runs of equal length
    AttentionCase((50, 3, 29), 2, 64, causal=True, lse=True),
    AttentionCase((24, 24), 2, 32, padded=True, causal=True, bias="shared", masked=True),
    AttentionCase((150, 9, 90), 2, 64, window=(16, 16), packed_qkv=True, lse=True),
    AttentionCase((40, 23), 2, 32, window=(5, -1), bias="keys", masked=True, dropout_p=0.25, gate=True),
    AttentionCase((70, 33), 2, 16, window=(9, 30), causal=True, bias="sequence", probs=True, lse=True),
    AttentionCase((19, 19), 1, 64, padded=True, window=(0, 3)),
    AttentionCase((200, 65), 6, 64, kv_heads=2, packed_qkv=True, lse=True),
    AttentionCase((90, 11), 4, 32, kv_heads=1, window=(20, 12), bias="sequence", gate=True, dropout_p=0.1),
    AttentionCase((37, 12), 3, 32, bias="shared", slack=3, lse=True),  # relative positions
    AttentionCase((37, 12, 37), 3, 64, bias="sequence", masked=True, lse=True),
    AttentionCase((30, 11), 4, 64, gate=True),
    AttentionCase((30, 11), 2, 64, gate=True, dropout_p=0.1, causal=True, bias="keys"),
    AttentionCase((70, 19), 2, 64, dropout_p=0.1, packed_qkv=True, capacity=5),
    AttentionCase((26, 26), 2, 32, padded=True, dropout_p=0.5),
    AttentionCase((0, 21, 0, 0, 1), 2, 32, capacity=6, bias="sequence"),
    AttentionCase((18, 9), 2, 64, probs=True, lse=True, dropout_p=0.1, slack=2),
    AttentionCase((511, 512), 1, 64, packed_qkv=True),
    AttentionCase((33, 20), 2, 32, sharpness=8.0),
    AttentionCase((40, 9), 2, 64, sharpness=16.0, dropout_p=0.5),
    AttentionCase((90, 1, 37), 3, 64, relative="qk", packed_qkv=True, lse=True),  # DeBERTa
    AttentionCase((150, 40), 2, 32, relative="qkb", bias="keys", masked=True, dropout_p=0.25, gate=True),
    AttentionCase((33, 0, 70), 2, 64, relative="b", slack=3, capacity=2, lse=True),
    AttentionCase((33, 0, 70), 2, 64, relative="qbp", bias="keys", slack=3, capacity=2, dropout_p=0.1),
    AttentionCase((29, 29), 4, 16, relative="kb", padded=True, window=(9, 4), kv_heads=2, probs=True),
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [AttentionCase(lengths, 12, 64, packed_qkv=True)]


def training(lengths: tuple[int, ...]) -> list[Case]:
    plain = AttentionCase(lengths, 12, 64, packed_qkv=True, dropout_p=0.1)
    return [plain, replace(plain, bias="keys")]
