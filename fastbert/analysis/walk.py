"""Examples through an encoder, batch by batch, with taps in its layers; only sums outlive a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fastbert.layers.packing import positions_of
from fastbert.layers.taps import Taps
from fastbert.models.base import PreTrainedModel, class_of
from fastbert.models.config import as_config
from fastbert.models.encoder import tapped
from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.models.inputs import Inputs
from fastbert.runtime import expected
from fastbert.sentences.tokenizer import pack_batches
from fastbert.tasks.examples import Examples

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Batch:
    """Some examples on the model's device.

    Attributes:
        numbers: (batch,) the examples' numbers.
        rows: (total,) the rows of their tokens in the arrays of `Examples`.
        inputs: what the encoder reads.
        sequence: (total,) int64, on the device: each token's example within the batch.
        position: (total,) int64, on the device: each token's place in its example.
    """

    numbers: np.ndarray
    rows: np.ndarray
    inputs: Inputs
    sequence: Tensor
    position: Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> Tensor:
        """(batch,) int64."""
        return self.inputs.packing.cu_seqlens.diff().long()

    def on_device(self, values: np.ndarray) -> Tensor:
        """The batch's rows of an array over all tokens, (total of all examples, …) -> (total, …)."""
        return torch.from_numpy(np.ascontiguousarray(values[self.rows])).to(self.sequence.device)

    def check(self, hidden: Tensor) -> None:
        """Raise a ValueError that names the first example with a number that is not finite."""
        wrong = ~torch.isfinite(hidden).flatten(1).all(1)
        if wrong.any():
            number = self.numbers[self.sequence[wrong].cpu().numpy()].min()
            raise ValueError(
                f"examples[{number}]: the model's numbers are not finite: its weights are not, or its dtype, "
                f"{str(hidden.dtype).removeprefix('torch.')}, is too narrow"
            )

    def sums(self, values: Tensor) -> Tensor:
        """Sums over each example's rows: (total, …) -> (batch, …)."""
        flat = values.reshape(len(values), -1)
        found = torch.segment_reduce(flat, "sum", lengths=self.lengths, unsafe=True)
        return found.reshape(len(self), *values.shape[1:])

    def means(self, values: Tensor) -> Tensor:
        """Means over each example's rows: (total, …) -> (batch, …)."""
        return self.sums(values) / self.lengths.view(-1, *(1,) * (values.dim() - 1))


def batches(
    model: PreTrainedModel, examples: Examples, batch_tokens: int = BATCH_TOKENS, in_a_row: int = 1
) -> Iterator[Batch]:
    """All examples, the longest first.

    Args:
        model: the model whose encoder will read them.
        examples: the examples; they are checked against the model.
        batch_tokens: most tokens of a batch; a longer example is a batch of its own.
        in_a_row: number of consecutive examples that stay together; it divides the number of examples.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    expected.integers(1, batch_tokens=batch_tokens)
    if model.config.family.global_tokens:
        raise ValueError(
            f"model: {model.config.model_type} may have global tokens, which attend by projections of their "
            "own; no analysis knows these"
        )
    examples.check(model.config)
    device, segments = model.device, model.config.family.segments
    for groups in pack_batches(examples.lengths.reshape(-1, in_a_row).sum(1), batch_tokens):
        numbers = (groups[:, None] * in_a_row + np.arange(in_a_row)).ravel()
        rows = examples.rows(numbers)
        ends = np.concatenate([[0], np.cumsum(examples.lengths[numbers])])
        cu_seqlens = torch.from_numpy(ends.astype(np.int32))
        inputs = Inputs.from_packed(
            model.config,
            device,
            torch.from_numpy(examples.ids[rows]),
            cu_seqlens,
            None,
            torch.from_numpy(examples.types[rows]) if segments else None,
        ).to(device)
        places = positions_of(inputs.packing.cu_seqlens, len(rows))
        yield Batch(numbers, rows, inputs, *places)


def encode(
    model: PreTrainedModel, batch: Batch, taps: Taps | None = None, gates: Tensor | None = None
) -> Tensor:
    """The last hidden states of a batch, (total, hidden).

    Args:
        model: an encoder, or a model with a head.
        batch: a batch that `batches` yields.
        taps: see `fastbert.layers.taps`.
        gates: (layers, nheads) factors of the heads' outputs, or None.

    Raises:
        ValueError: the model's numbers are not finite; the message names an example.
    """
    encoder = model.base_model
    if taps is not None:
        check_heads(model)
    with contextlib.nullcontext() if taps is None else tapped(encoder, taps):
        hidden = encoder.encode_inputs(batch.inputs, gates, False, False, False)[0]
    batch.check(hidden.detach())
    return hidden


def check_heads(model: PreTrainedModel) -> None:
    """Raise ValueError if heads were pruned: arrays have one place per head of the config."""
    if any(kept is not None for kept in model.config.kept_heads()):
        raise ValueError(
            "model: expected all heads in all layers, but it has config pruned_heads; "
            "fastbert.compression.shrink.dense(model) has them again, as zeros"
        )


def encoded(model: TaskModel, hidden: Tensor, inputs: Inputs) -> Encoded:
    """The input of a head, from the last hidden states (total, hidden) of `inputs`."""
    first = model.reads_first_only
    return Encoded(inputs.packing.first_rows(hidden) if first else hidden, inputs, None, None, first)


@contextlib.contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """A block with the model in eval mode and its parameters without gradients; the end restores both."""
    modes = {module: module.training for module in model.modules()}
    trained = [p for p in model.parameters() if p.requires_grad]
    model.eval()
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, mode in modes.items():
            module.training = mode


def native(model: nn.Module) -> PreTrainedModel:
    """A model of this package around the tensors of `model`, which is not changed.

    Args:
        model: a model of this package, which is returned unchanged; or a model of transformers, stock or
            accelerated, of a family that this package has.

    Raises:
        TypeError: it is neither.
        ValueError: its config or its head is not supported; the message names it.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if not any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        raise TypeError(f"model: expected a model of fastbert or of transformers, got {type(model).__name__}")
    config = as_config(model.config)
    name = type(model).__name__
    task = name.removeprefix(config.family.class_prefix)
    cls = class_of(config.family, task)
    if cls is None:
        raise ValueError(f"model: {name} has no counterpart in this package")
    state = model.state_dict(keep_vars=True)
    options = {}
    if task == "Model" and config.family.pooler:
        options["add_pooling_layer"] = f"{config.family.pooler}.weight" in state
    with torch.device("meta"):
        ours = cls(config, **options)
    missing, extra = ours.load_state_dict(state, strict=False, assign=True)
    ours.tie_weights()
    lacking = sorted({*missing} - {*ours.tied_weights()})
    if lacking:
        raise ValueError(f"model: {name} has no {lacking[0]}, which {cls.__name__} needs")
    unknown = [key for key in extra if not key.endswith(("position_ids", "token_type_ids"))]
    if unknown:
        raise ValueError(f"model: {name} has {unknown[0]}, which {cls.__name__} does not read")
    return ours.train(model.training)
