"""transformers' XLNet: what its encoder and layers do on packed tokens.

The content stream of packed tokens runs fused, by the mathematics of layers/two_streams.py on transformers'
own parameters. A padded batch, with memories, `perm_mask` or a query stream, runs the stock layers.

A head may read a token that is masked, whose output the stock model computes: the last one in
classification, all if it takes their mean or searches for spans. Then the batch stays padded (`read_by`).
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fastbert.acceleration.classes import Accelerated, swap
from fastbert.acceleration.layer_gaps import AnyLayer, LayerState, gap, knows_activation
from fastbert.acceleration.watching import exporting
from fastbert.layers.asked import NOTHING_MORE, Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.two_streams import FeedForward, RelativeAttention
from fastbert.models.families import FAMILIES
from fastbert.models.inputs import Inputs

# Which outputs a caller reads, whether they are masked or not
Read = Literal["first", "last", "all"]


class _Inside(Accelerated):
    """A part of a layer, which its layer calls on packed tokens by our class, and others by the stock class.

    Attributes:
        fastbert_state: the layer's.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self.fastbert_base.__init__(self, *args, **kwargs)

    @property
    def fuses_norm(self) -> bool:
        """See `RelativeAttention`."""
        return self.fastbert_state.options.layer_norm


class AcceleratedAttention(_Inside, RelativeAttention):
    """Mixin of an XLNetRelativeAttention."""

    @property
    def heads(self) -> tuple[int, int]:
        """The number of heads and their size."""
        return self.q.shape[1], self.q.shape[2]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stock module's call."""
        return self.fastbert_base.forward(self, *args, **kwargs)


class AcceleratedFeed(_Inside, FeedForward):
    """Mixin of an XLNetFeedForward."""

    @property
    def activation(self) -> str | None:
        """The activation's name."""
        return self.fastbert_state.form.activation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stock module's call."""
        return self.fastbert_base.forward(self, *args, **kwargs)


class AcceleratedStream(AnyLayer):
    """Mixin of an XLNetLayer."""

    rel_attn: Any
    ff: Any

    def forward(self, output_h: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The stock layer's call, or with a `PackedBatch` the call of `StreamLayer.forward`.

        Raises:
            RuntimeError: the layer is strict, and the batch is padded.
        """
        state: LayerState | None = self.fastbert_state
        if args and type(args[0]) is PackedBatch:
            return self._packed(output_h, *args)
        if state is not None and not (exporting() or torch.compiler.is_compiling()):
            state.calls.stock += 1
            if state.options.strict:
                reason = gap(self) or "only the stock layer takes a padded batch"
                raise RuntimeError(f"{state.name}: {reason}; it would run as stock (strict=True)")
        return super().forward(output_h, *args, **kwargs)

    def _packed(
        self, x: Tensor, batch: PackedBatch, asked: Asked = NOTHING_MORE
    ) -> tuple[Tensor, Tensor | None]:
        state: LayerState = self.fastbert_state
        self.check_gathered()
        state.calls.fused += 1
        x, probs = RelativeAttention.forward(self.rel_attn, x, batch, asked)
        if state.options.ffn and knows_activation(self, state):
            return FeedForward.forward(self.ff, x, batch.seed, asked, batch), probs
        return self.ff(x), probs


def swap_layer(layer: Any, state: LayerState) -> None:
    """Make a layer an accelerated one, with its parts, unless they were replaced."""
    swap(layer, AcceleratedStream, state)
    for name, mixin in (("rel_attn", AcceleratedAttention), ("ff", AcceleratedFeed)):
        inside = layer._modules.get(name)
        stock = getattr(type(inside).forward, "__module__", None) == FAMILIES[state.model_type].stock_module
        if stock and not isinstance(inside, Accelerated):
            swap(inside, mixin, state)


def read_by(head: nn.Module) -> Read | None:
    """Which outputs a head of XLNet reads, whether they are masked or not; None if it reads kept ones."""
    if "answer_class" in head._modules:
        return "all"
    summary: Any = head._modules.get("sequence_summary")
    if summary is None:
        return None
    reads: dict[str, Read] = {"first": "first", "mean": "all"}
    return reads.get(summary.summary_type, "last")


def reads_masked(read: Read | None, inputs: Inputs) -> bool:
    """Whether a masked output of a sequence that has kept tokens is read.

    The host waits for a GPU once, except for "first".
    """
    mask = inputs.packing.mask
    if read == "first":
        return inputs.first_masked is not None
    if read is None or mask is None:
        return False
    return read == "all" or bool((mask.any(1) & ~mask[:, -1]).any())


def own_gap(model: Any) -> str | None:
    """Why an encoder runs no packed tokens, whatever its arguments; None if it may."""
    if model.bi_data or (model.same_length and model.attn_type == "uni"):
        return "bi_data or same_length needs the padded batch"
    return None


def output(
    model: Any, inputs: Inputs, hidden: Tensor, states: list[Tensor], mems: bool, wants_states: bool
) -> Any:
    """The stock encoder's output.

    Args:
        model: the encoder.
        inputs: of the call.
        hidden: the rows of the last hidden state.
        states: those of all hidden states; may be empty if they are not needed.
        mems, wants_states: whether to return memories, and hidden states.
    """
    family, unpack = FAMILIES[model.fastbert_state.model_type], inputs.packing.unpack
    last = unpack(hidden)
    each = tuple(last if s is hidden else unpack(s) for s in states)
    return getattr(sys.modules[family.stock_module], family.stock_model.output)(
        last_hidden_state=last,
        mems=tuple(model.cache_mem(x.transpose(0, 1), None) for x in each[:-1]) if mems else None,
        hidden_states=each if wants_states else None,
    )


def wants_mems(model: Any, use_mems: Any) -> bool:
    """Whether a call with this argument `use_mems` returns memories."""
    config = model.config
    default = config.use_mems_train if model.training else config.use_mems_eval
    return bool(default if use_mems is None else use_mems)
