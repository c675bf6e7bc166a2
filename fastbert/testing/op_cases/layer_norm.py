"""Cases of `layer_norm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops import layer_norm as op
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.layer_norm import NARROW
from fastbert.testing.error_rule import Case, Outputs, draws


def steepness(z: torch.Tensor, norm: str = "layer_norm") -> float:
    """What x_hat multiplies a rounding of `z` by: the largest 1 / std of a narrow row, and 1 of wide ones.

    Rows without deviation do not count: there the subtraction of the mean is exact. RMSNorm's
    deviation is that from 0; NoNorm divides by none.
    """
    if z.shape[-1] > NARROW or norm == "no_norm":
        return 1.0
    std = z.double().square().mean(-1).sqrt() if norm == "rms_norm" else z.double().std(-1, correction=0)
    return max([1.0, *(1.0 / std[std > 0]).tolist()])


def largest_x_hat(z: torch.Tensor, norm: str = "layer_norm") -> float:
    """The largest |x_hat| of rows that deviate, at least 1."""
    z = z.double()
    if norm == "no_norm":
        return max(1.0, z.abs().max().item())
    std, centred = z.std(-1, correction=0, keepdim=True), z - z.mean(-1, keepdim=True)
    sizes = torch.where(std > 0, centred / std, 0.0).abs().nan_to_num(nan=1.0, posinf=1.0)
    return max(1.0, sizes.max().item())


@dataclass(frozen=True, repr=False)
class LayerNormCase(Case):
    """`rows` x `hidden`, with the op's options.

    `half_x`: where all else is float32, `x` is in bfloat16. `norm`: the op's kind.
    """

    rows: int
    hidden: int
    residual: bool = False
    x_bias: bool = False
    dropout_p: float = 0.0
    bias: bool = True
    half_x: bool = False
    rounded: bool = False
    norm: str = "layer_norm"
    return_sum: bool = False

    op = "layer_norm"
    shape = "{0.rows}x{0.hidden}"
    marks = "residual x_bias dropout_p=dropout bias=no_bias half_x rounded norm={} return_sum=sum"
    options = ("dropout_p", "eps")
    grad_inputs = ("x", "weight", "bias", "residual", "x_bias")

    @property
    def eps(self) -> float:
        """Large for RMSNorm, of which no row is constant: an eps that is forgotten shows."""
        return 0.01 if self.norm == "rms_norm" else 1e-12

    @property
    def output_names(self) -> tuple[str, ...]:
        return "y", *(("rounded",) if self.rounded else ()), *(("sum",) if self.return_sum else ())

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        shape = (self.rows, self.hidden)
        return {
            "x": randn(*shape).to(torch.bfloat16 if self.half_x and dtype == torch.float32 else dtype),
            "weight": 1 + 0.1 * randn(self.hidden),
            "bias": 0.1 * randn(self.hidden) if self.bias and self.norm != "rms_norm" else None,
            "residual": randn(*shape) if self.residual else None,
            "x_bias": 0.1 * randn(self.hidden) if self.x_bias else None,
            "seed": torch.tensor([1234 + seed], device=device) if self.dropout_p else None,
        }

    def call(self, bias: Tensor | None = None, **inputs: Any) -> Outputs:
        inputs |= {"offset": 3, "rounded": self.rounded, "return_sum": self.return_sum}
        inputs |= {} if self.norm == "rms_norm" else {"bias": bias}
        inputs |= {} if self.norm == "no_norm" else {"eps": self.eps}
        return getattr(op, self.norm)(**inputs, dropout_p=self.dropout_p)

    def _keep(self, x, seed):
        return keep_mask_2d(seed, 3, *x.shape, dropout_p=self.dropout_p) if self.dropout_p else None

    def _sum(self, x, residual, x_bias, seed):
        if x_bias is not None:
            x = x + x_bias
        if self.dropout_p:
            x = x * self._keep(x, seed) / (1 - self.dropout_p)
        if residual is not None:
            x = x + residual
        return x

    def eager(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        x_bias: Tensor | None,
        seed: TensorOrNone,
    ) -> Outputs:
        z = self._sum(x, residual, x_bias, seed)
        if self.norm == "rms_norm":
            y = F.rms_norm(z, (self.hidden,), weight, self.eps)
        elif self.norm == "no_norm":  # as transformers' NoNorm
            y = z * weight if bias is None else z * weight + bias
        else:
            y = F.layer_norm(z, (self.hidden,), weight, bias, self.eps)
        return self._outputs(y, y.to(x.dtype), z)

    def oracle(self, x: Tensor, seed: TensorOrNone, **inputs: Any) -> Outputs:
        y: Any = super().oracle(x=x, **inputs, keep_mask=self._keep(x, seed), kind=self.norm)
        return self._outputs(y, y, self._sum(x, inputs["residual"], inputs["x_bias"], seed))

    def _outputs(self, y: Tensor, rounded: Tensor, z: Tensor) -> Outputs:
        outputs = y, *((rounded,) if self.rounded else ()), *((z,) if self.return_sum else ())
        return outputs if len(outputs) > 1 else y

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        eps = torch.finfo(torch.float32).eps
        z = self._sum(*(inputs[n] for n in ("x", "residual", "x_bias", "seed")))
        # twice for rstd * x_hat
        times = {"dx": 2, "dresidual": 2, "dx_bias": 2, "y": 1, "dweight": 1}
        eps *= steepness(z, self.norm) ** times.get(name, 0)
        if name in ("dweight", "dbias", "dx_bias"):
            # sums over rows: a few roundings of their largest partial sum; dweight's terms have x_hat's size
            eps *= largest_x_hat(z, self.norm) if name == "dweight" else 1.0
            return 4 * eps * max(1.0, self.rows**0.5)
        return 4 * eps / (1 - self.dropout_p)

    def flops(self) -> int:
        return 8 * self.rows * self.hidden

    def bytes(self, dtype: torch.dtype) -> int:
        return ((2 + self.residual + self.return_sum) * self.rows + 2) * self.hidden * dtype.itemsize


SMALL = [
    LayerNormCase(5, 96),
    LayerNormCase(3, 100, residual=True, x_bias=True, dropout_p=0.25),
    # layers that normalise first
    LayerNormCase(4, 96, residual=True, bias=False, return_sum=True),
    LayerNormCase(5, 100, residual=True, x_bias=True, dropout_p=0.25, norm="rms_norm", return_sum=True),
    LayerNormCase(4, 72, residual=True, half_x=True, rounded=True, norm="rms_norm", return_sum=True),
    LayerNormCase(5, 100, residual=True, x_bias=True, dropout_p=0.25, norm="no_norm", return_sum=True),
    LayerNormCase(4, 72, residual=True, half_x=True, rounded=True, norm="no_norm"),
    # training under autocast: after the feed-forward, after attention
    LayerNormCase(4, 72, residual=True, x_bias=True, half_x=True),
    LayerNormCase(4, 72, residual=True, x_bias=True, dropout_p=0.1, half_x=True, rounded=True),
]
ON_GPU = [  # the blocks of base and large
    LayerNormCase(33, 768, residual=True, x_bias=True, dropout_p=0.1),
    LayerNormCase(33, 768, residual=True, x_bias=True, dropout_p=0.1, half_x=True),
    LayerNormCase(33, 768, residual=True, x_bias=True, dropout_p=0.1, half_x=True, rounded=True),
    LayerNormCase(33, 768, residual=True, bias=False, return_sum=True),  # ModernBERT
    LayerNormCase(33, 768, residual=True, dropout_p=0.1, norm="rms_norm", return_sum=True),
    LayerNormCase(33, 512, residual=True, norm="no_norm"),  # MobileBERT
]
CASES = [
    *SMALL,
    LayerNormCase(1, 1),  # variance 0: rstd = 1/sqrt(eps)
    LayerNormCase(9, 1, residual=True, x_bias=True, dropout_p=0.25),
    LayerNormCase(9, 2, residual=True),  # rounded, the two are no longer mean ± deviation
    LayerNormCase(20, 2, residual=True, x_bias=True),
    LayerNormCase(16, 3, residual=True, x_bias=True, dropout_p=0.25),
    LayerNormCase(33, 3, residual=True),
    LayerNormCase(7, 384, residual=True),  # MiniLM
    LayerNormCase(64, 768, residual=True, x_bias=True),  # BERT-base, as the encoder calls it
    LayerNormCase(64, 768, residual=True, x_bias=True, dropout_p=0.1),  # … in training
    LayerNormCase(33, 1024, residual=True, bias=False),
    LayerNormCase(130, 31, x_bias=True),  # no multiple of a vector
    LayerNormCase(3, 4099),  # beyond one block of most kernels
    LayerNormCase(64, 768, residual=True, x_bias=True, dropout_p=0.1, half_x=True),
    LayerNormCase(9, 33, residual=True, x_bias=True, dropout_p=0.25, half_x=True),
    LayerNormCase(64, 768, residual=True, x_bias=True, half_x=True, rounded=True),
    LayerNormCase(3, 4099, residual=True, half_x=True, rounded=True),
    LayerNormCase(64, 768, residual=True, bias=False, return_sum=True),
    LayerNormCase(9, 33, x_bias=True, dropout_p=0.25, return_sum=True),
    LayerNormCase(20, 2, residual=True, x_bias=True, return_sum=True),
    LayerNormCase(3, 9001, residual=True, return_sum=True),
    LayerNormCase(130, 31, norm="rms_norm", return_sum=True),  # the sum is x
    LayerNormCase(9, 1, residual=True, norm="rms_norm"),
    LayerNormCase(16, 3, residual=True, x_bias=True, dropout_p=0.25, norm="rms_norm", return_sum=True),
    LayerNormCase(64, 768, residual=True, x_bias=True, norm="rms_norm", return_sum=True),
    LayerNormCase(9, 1152, residual=True, dropout_p=0.1, half_x=True, norm="rms_norm", return_sum=True),
    LayerNormCase(3, 4099, residual=True, norm="rms_norm", return_sum=True),
    LayerNormCase(3, 9001, x_bias=True, norm="rms_norm"),
    LayerNormCase(64, 128, norm="no_norm"),
    LayerNormCase(64, 128, residual=True, norm="no_norm"),
    LayerNormCase(9, 1, residual=True, x_bias=True, dropout_p=0.25, norm="no_norm"),
    LayerNormCase(16, 3, residual=True, bias=False, norm="no_norm", return_sum=True),
    LayerNormCase(9, 1152, residual=True, dropout_p=0.1, half_x=True, norm="no_norm", return_sum=True),
    LayerNormCase(3, 9001, residual=True, x_bias=True, norm="no_norm"),
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    tokens = sum(lengths)
    return [LayerNormCase(tokens, 768), LayerNormCase(tokens, 768, residual=True, x_bias=True)]


def training(lengths: tuple[int, ...]) -> list[Case]:
    return [LayerNormCase(sum(lengths), 768, residual=True, x_bias=True, dropout_p=0.1)]
