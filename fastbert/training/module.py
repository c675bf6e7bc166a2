"""What is trained: a module whose `forward` returns losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fastbert.models.base import PreTrainedModel
from fastbert.training.stream import Batch

# (loss -> mean, loss -> number of right predictions)
Results = tuple[dict[str, Tensor], dict[str, Tensor]]


class Losses(nn.Module):
    """The module that is trained. Its `forward` returns a mean for each loss, and how many were right.

    Attributes:
        exports: folder -> model; a checkpoint has each model as a HuggingFace directory. All other parameters
            are heads of the objective, which only checkpoints have.
        weights: loss -> its weight in the sum; 1 for a loss that is not named.
        passes: number of forwards and backwards per micro-batch; see `rounds`.
    """

    exports: Mapping[str, PreTrainedModel]
    weights: Mapping[str, float]
    passes: int = 1

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """(loss -> mean, loss -> number of right predictions if `measure`).

        The second dict may have more names: numbers of tokens or sequences, which are logged as a share of
        the batch's count of the same name.

        Args:
            inputs: inputs of a `Batch`, as tensors on the device; `cu_seqlens` stays on the host.
            measure: whether to count right predictions.
        """
        raise NotImplementedError

    def rounds(
        self, call: Callable[..., Results], inputs: dict[str, Any], measure: bool
    ) -> Iterator[Results]:
        """The results of the `passes` of a micro-batch, whose losses add up.

        Each pass begins with the same seed, and the loop takes its backward before the next one begins.

        Args:
            call: `forward`, with the exchange between processes around it.
            inputs, measure: see `forward`.
        """
        yield call(inputs, measure)

    def optimized(self, optimizer: Optimizer) -> None:
        """Called with each optimizer that the loop makes for this module, such as to hook its steps."""

    def exported(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The values by which a checkpoint writes `exports`, from those of all parameters by name.

        A checkpoint has a trained value that is not exported beside the heads.
        """
        return state

    def work(self, batch: Batch) -> float:
        """Floating-point operations of a training step on a micro-batch (training/work.py); 0 if unknown."""
        return 0.0
