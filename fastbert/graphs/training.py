"""CUDA-graph replay for training: one call enqueues the encoder's forward, another its backward.

    graphed = fastbert.graph_training(model)
    loss = graphed(input_ids, attention_mask, labels=labels).loss  # takes and returns what the model does
    loss.backward()
    optimizer.step()

The encoder, which takes most of the host's time, is recorded once per bucket of tokens (`buckets.py`). The
head and the loss run as always, on the batch's own tokens. Gradients reach `parameter.grad` through autograd,
so they accumulate, and hooks of parameters run. The seed of all dropouts is drawn before a replay, as the
model draws it.

Rows after the batch's last token are separate sequences of token 0, whose output has gradient 0. So they add
0 to a parameter's gradient.

A backward replay reads what the forward replay of its bucket has left in the graphs' memory. So one forward
at a time waits for its backward, and until then further calls run the model itself.

Memory: all graphs share one pool, as large as the largest graph needs; there is one more copy of the
gradients. The first call after a change of the model (a module, a parameter, its `requires_grad`, an
attribute such as `p` of a dropout) is computed as it will be recorded, and the next call records. Changes in
place, such as an optimizer's step, need no new recording. A new recording is replayed once beside the model
itself, and serves only if the results agree. What a graph cannot do, the model does itself, with the same
result; `last_fallback` says why.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _autograd

from fastbert.graphs.buckets import Bucket
from fastbert.graphs.calls import (
    RECORDED,
    by_grid,
    dense_scores,
    longest_text,
    raise_bad_ids,
    unfit_inputs,
    unknown,
)
from fastbert.graphs.model import GraphedModel
from fastbert.graphs.recorder import Recorder, Recording, recorder_for
from fastbert.graphs.staging import Rows, rows_in, words
from fastbert.graphs.task import GraphedTask
from fastbert.graphs.weights import HOOKED
from fastbert.layers.embeddings import (
    DroppedEmbeddings,
    Embeddings,
    TokenEmbeddings,
    TrigramEmbeddings,
    WordEmbeddings,
)
from fastbert.layers.modules import calls_all, watched
from fastbert.layers.packing import send
from fastbert.models.bert import BertModel
from fastbert.models.encoder import dropout_seed
from fastbert.models.heads.task_model import TaskModel, served_by
from fastbert.models.inputs import Inputs
from fastbert.ops import checks, derivatives
from fastbert.runtime import dispatch, prepared
from fastbert.runtime.loader import extension
from fastbert.runtime.model_state import hooks_of


def graph_training(
    model: BertModel | TaskModel,
    *,
    max_tokens: int = 16384,
    max_batch: int = 512,
    buckets: Sequence[int] | None = None,
    max_graphs: int = 128,
    recorder: Callable[[torch.device], Recorder | None] = recorder_for,
) -> GraphedTraining | GraphedTask:
    """The model, with the forward and backward of its encoder in training replayed from CUDA graphs.

    Args:
        model: an encoder, or a model with a head, which runs after the graph. It is shared, not copied.
        max_tokens, max_batch, buckets, max_graphs, recorder: see `fastbert.graph`.

    Returns:
        A `GraphedTraining`, or for a model with a head a `GraphedTask`, to be called like the model.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    encoder = model.base_model if isinstance(model, TaskModel) else model
    if not isinstance(encoder, BertModel):
        kind = f"{type(model).__module__}.{type(model).__name__}"
        raise TypeError(
            f"model: expected a model of fastbert, got {kind}; save a model of transformers, and load it by "
            "an Auto class of fastbert"
        )
    graphed = GraphedTraining(encoder, max_tokens, max_batch, buckets, max_graphs, recorder)
    return graphed if encoder is model else GraphedTask(model, graphed)


def encoders_of(module: nn.Module) -> list[GraphedTraining]:
    """A `GraphedTraining` of each encoder below a module whose device has graphs, for `serving`."""
    encoders = [m for m in module.modules() if isinstance(m, BertModel)]
    sizes = 65536, 4096, None, 128
    return [GraphedTraining(m, *sizes, recorder_for) for m in encoders if recorder_for(m.device)]


@contextlib.contextmanager
def serving(graphed: Iterable[GraphedTraining]) -> Iterator[None]:
    """A context in which `graphed` serve in place of the encoders of models with a head."""
    token = served_by.set({**served_by.get(), **{each.model: each for each in graphed}})
    try:
        yield
    finally:
        served_by.reset(token)


# A replay's error may be _SAME of each gradient's norm, or of _NOISE times the largest norm if that is more
_SAME, _NOISE = 1e-2, 1e-3
# Embeddings that may be recorded
_EMBEDDINGS = Embeddings, DroppedEmbeddings, TokenEmbeddings, TrigramEmbeddings, WordEmbeddings


class _Step(NamedTuple):
    """The two recordings of a bucket, and the numbers of the parameters that get a gradient."""

    forward: Recording
    backward: Recording
    used: list[int]


class _Turn:
    """A forward that waits for its backward; it lives as long as autograd may run the backward."""

    def __init__(self, step: _Step, parameters: list[Tensor]):
        self.step, self.parameters = step, parameters
        self.versions = [p._version for p in parameters]


class _Replayed(torch.autograd.Function):
    """The two recordings of a step as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, graphed: GraphedTraining, turn: _Turn, rows: int, *parameters: Tensor) -> Tensor:
        ctx.graphed, ctx.turn = graphed, turn
        return graphed._forward(turn, rows)

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.graphed._backward(ctx.turn, dout)


class GraphedTraining(GraphedModel):
    """An encoder whose forward and backward in training are replayed; made by `graph_training`.

    See `GraphedModel` for what can be called and read.
    """

    _arguments = RECORDED | {"causal"}

    def _held(self) -> list[Tensor]:
        return [*super()._held(), *self._grads, *self._douts.values()]

    # -- which calls -----------------------------------------------------------------------------------------

    def _unfit(self) -> str | None:
        model = self.model
        if not model.training:
            return "the model is not in training mode"
        if not torch.is_grad_enabled():
            return "gradients are off"
        if model.checkpoint_every:
            return "layers are computed again in backward"
        if model.layerdrop:
            return "layers are skipped at random"
        if model.taps is not None:
            return "taps are set"
        if torch._C._are_functorch_transforms_active():
            return "a transform of torch.func is active"
        if torch.is_anomaly_enabled() or _autograd._top_saved_tensors_default_hooks(False):
            return "autograd looks at what is saved"
        if model.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph"
        return None

    def _state(self) -> str | None:
        """Why the model itself must run because of what it is now; None if it may be recorded."""
        if (reason := calls_all()) is not None:
            return reason
        if self._watch is not None and self._watch.same():
            return None
        if self._turn() is not None:
            return "the model has changed before a backward"
        self._drop()
        model = self.model
        if watched(model):
            return HOOKED
        if (reason := model.gap()) is not None:
            return reason
        if (reason := unknown(model.config)) is not None:
            return reason
        embeddings = model._modules[model.family.embeddings]
        if type(embeddings) not in _EMBEDDINGS or any(m.is_called() for m in model.layer_list()):
            return "the embeddings or a layer have code of their own"
        if (reason := by_grid(model)) is not None:
            return reason
        self._watch, self._is_new = watch_of(model), True
        reason = "changes would not be noticed" if self._watch is None else self._start(self._watch)
        if reason is not None:
            self._drop()
        return reason

    # -- replay ----------------------------------------------------------------------------------------------

    def _encode(
        self, inputs: Inputs, first_only: bool, pooled: bool, causal: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        raise_bad_ids(self.model.device)
        inputs, asked = inputs.to(self.model.device), (first_only, causal)
        with self._lock:
            found = self._begun(inputs, *asked)
        if isinstance(found, str):
            return self._itself(found, inputs, *asked), None
        bucket, turn = found
        rows = inputs.packing.batch if first_only else inputs.position_ids.shape[0]
        if isinstance(turn, _Turn):
            hidden = _Replayed.apply(self, turn, rows, *turn.parameters)
            self._note(None)
            return hidden, None
        # As a replay computes it, so that a run's bits do not depend on when recording began
        self._note(turn)
        memory = inputs.position_ids.new_zeros(words(bucket.tokens, bucket.sequences))
        where = rows_in(memory, bucket.tokens, bucket.sequences)
        self._fill(where, bucket, inputs)
        return self._function_of(where, bucket, None)()[:rows], None

    def _begun(
        self, inputs: Inputs, first_only: bool, causal: bool | None
    ) -> tuple[Bucket, _Turn | str] | str:
        """The bucket of a batch, and a turn whose inputs are in place or why nothing is replayed.

        Without a bucket, why the model itself must run, on the batch without padding.
        """
        if (reason := self._state()) is not None:
            return reason
        packed = inputs.packing
        if inputs.bias is not None or inputs.inputs_embeds is not None:
            return "the batch has more than ids"
        total, most = inputs.position_ids.shape[0], longest_text(self.model.config)
        if (reason := unfit_inputs(self.model.config, inputs)) is not None:
            return reason
        if (sizes := self._sizes(total, packed.batch, most)) is None:
            return f"there are more than {self.buckets[-1]} tokens or {self.max_batch} sequences"
        half = checks.autocast_dtype(self._leaves[0])
        bucket = Bucket(*sizes, first_only, False, dispatch.pins(), half, causal)
        if (reason := dense_scores(self.model, bucket)) is not None:
            return reason
        if self._is_new:
            self._is_new = False
            return bucket, "the model is new, or has changed"
        if self._turn() is not None:
            return bucket, "another forward waits for its backward"
        if bucket not in self._recordings and (reason := self._record_step(bucket, inputs)) is not None:
            return bucket, reason
        self._recordings.move_to_end(bucket)
        step = self._recordings[bucket]
        turn = _Turn(step, [self._leaves[i] for i in step.used])
        with self._recorder.in_order():
            self._fill(self._rows(bucket), bucket, inputs)
            if self._draws:
                self._seed.copy_(dropout_seed(inputs.device))
        self._turn = weakref.ref(turn)
        return bucket, turn

    def _fill(self, where: Rows, bucket: Bucket, inputs: Inputs) -> tuple[int, int]:
        total, batch = super()._fill(where, bucket, inputs)
        longest = min(bucket.tokens, longest_text(self.model.config))
        # Where sequences of padding begin, and where the last of them ends
        ends = torch.arange(
            total, total + longest * (bucket.sequences - batch) + 1, longest, dtype=torch.int32
        )
        where.ends[batch:] = send(ends.clamp_(max=bucket.tokens), where.ends.device)
        return total, batch

    def _forward(self, turn: _Turn, rows: int) -> Tensor:
        with self._lock, self._recorder.in_order():
            turn.step.forward.replay()
            return turn.step.forward.outputs[0][:rows].clone()

    def _backward(self, turn: _Turn, dout: Tensor) -> Sequence[Tensor]:
        """Gradients of the turn's parameters.

        Raises:
            RuntimeError: backward ran already, or a parameter was changed since the forward.
        """
        with self._lock:
            if self._turn() is not turn:
                raise RuntimeError(
                    "backward: a recorded step has one backward, which has run already; call the model itself"
                )
            if turn.versions != [p._version for p in turn.parameters]:
                raise RuntimeError("backward: a parameter was changed in place since the recorded forward")
            self._turn = _none
            target = self._dout_of(turn.step.forward.outputs[0])
            with self._recorder.in_order():
                target[: dout.shape[0]] = dout
                target[dout.shape[0] :] = 0
                turn.step.backward.replay()
                grads = [self._grads[i] for i in turn.step.used]
                return torch._foreach_mul(grads, 1)  # pyright: ignore[reportPrivateImportUsage]

    # -- recording -------------------------------------------------------------------------------------------

    def _start(self, watch: Watch) -> str | None:
        """Make the memory that recordings share, or return why nothing can be recorded."""
        model, device = self.model, self.model.device
        self._leaves = [p for p in watch.leaves if p.requires_grad]
        if (reason := self._allocate()) is not None or not self._leaves:
            return reason or "no parameter needs a gradient"
        self._grads = [torch.zeros_like(p) for p in self._leaves]
        self._seed = torch.zeros(1, dtype=torch.int64, device=device)
        self._draws = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in model.modules())
        return None

    def _record_step(self, bucket: Bucket, inputs: Inputs) -> str | None:
        """Record the graphs of a bucket on a batch, or return why they cannot be recorded."""
        if bucket in self._failed:
            return self._failed[bucket]
        self._make_room()
        used: list[int] = []
        where = self._rows(bucket)
        forward = self._function_of(where, bucket, self._seed)
        try:
            with self._recorder.in_order(), prepared.collect_used() as derived:
                self._memory.zero_()
                self._fill(where, bucket, inputs)
                step = _Step(*self._recorder.record_pair(forward, partial(self._gradients, used)), used)
                if not derived:
                    self._check(step, forward)
        # The model computes what cannot be captured or repeated
        except Exception as error:
            # The model itself needs the memory
            if isinstance(error, torch.OutOfMemoryError):
                self._drop()
            return self._refused(bucket, error)
        if derived:
            self._failed[bucket] = "weights are derived from parameters"
            return self._failed[bucket]
        self._recordings[bucket] = step
        return None

    def _check(self, step: _Step, forward: Callable[[], Tensor]) -> None:
        """Replay a step once, and compare it with the function that was recorded.

        Raises:
            RuntimeError: the output or a gradient differs.
        """
        hidden = forward()
        dout = self._dout_of(hidden)
        # Any numbers serve
        dout.copy_(hidden.detach())
        wanted = torch.autograd.grad(hidden, [self._leaves[i] for i in step.used], dout)
        step.forward.replay()
        step.backward.replay()
        found = [step.forward.outputs[0], *(self._grads[i] for i in step.used)]
        wanted = [hidden.detach(), *wanted]
        norms = torch.stack([t.float().norm() for t in wanted])
        far = torch.stack([(a - b).float().norm() for a, b in zip(found, wanted, strict=True)])
        # The gradient of the keys' biases is rounding alone; NaN is not near
        near = far <= _SAME * torch.maximum(norms, _NOISE * norms.max())
        if not bool(near.all()):
            raise RuntimeError("a replay computes something else than the model")

    def _function_of(self, where: Rows, bucket: Bucket, seed: Tensor | None) -> Callable[[], Tensor]:
        """The forward of a batch that fills a bucket; it draws a seed if `seed` is None and it drops."""
        model, inputs, half = self.model, self._inputs_in(where, bucket), bucket.autocast is not None

        def function() -> Tensor:
            # Without autocast's cache, which holds casts of the weights' earlier values
            with (
                torch.enable_grad(),
                torch.autocast(model.device.type, bucket.autocast, enabled=half, cache_enabled=False),
            ):
                asked = None, False, False, bucket.first_token_only, bucket.causal
                return model.encode_inputs(inputs, *asked, seed)[0]

        return function

    def _gradients(self, used: list[int], hidden: Tensor) -> None:
        """Write the leaves' gradients to `_grads` and their numbers to `used`; this backward is recorded."""
        found = torch.autograd.grad(hidden, self._leaves, self._dout_of(hidden), allow_unused=True)
        used[:] = [i for i, grad in enumerate(found) if grad is not None]
        targets, grads = [self._grads[i] for i in used], [found[i] for i in used]
        torch._foreach_copy_(targets, grads)  # pyright: ignore[reportPrivateImportUsage]

    def _dout_of(self, hidden: Tensor) -> Tensor:
        """Where a recorded backward reads the gradient of its output; shared, in powers of two rows."""
        rows = 1 << (hidden.shape[0] - 1).bit_length()
        key = hidden.dtype, rows
        if key not in self._douts:
            self._douts[key] = hidden.new_zeros(rows, hidden.shape[1], requires_grad=False)
        return self._douts[key][: hidden.shape[0]]

    def _drop(self) -> None:
        super()._drop()
        self._watch: Watch | None = None
        self._turn: Callable[[], _Turn | None] = _none
        self._leaves: list[nn.Parameter] = []
        self._grads: list[Tensor] = []
        self._douts: dict[tuple[torch.dtype, int], Tensor] = {}
        self._seed, self._draws, self._is_new = torch.empty(0), False, False


def _none() -> None:
    """The reference to a turn that is over."""


class Watch(NamedTuple):
    """A model in training as it was, but for elements of its tensors.

    Attributes:
        extension: compares the model with it; borrows all objects, which the other attributes keep.
        leaves: the parameters.
        flags: whether each parameter needs a gradient.
        held: what else is borrowed.
    """

    extension: Any
    leaves: list[nn.Parameter]
    flags: list[bool]
    held: tuple[Any, ...]

    def same(self) -> bool:
        """Whether the model is as it was."""
        return self.extension.same() and self.flags == [p.requires_grad for p in self.leaves]


def watch_of(model: nn.Module) -> Watch | None:
    """The present state of a model in training; None if the extension cannot compare it."""
    if extension is None:
        return None
    modules = list(model.modules())
    tables = [t for m in modules for t in (m._parameters, m._buffers, m._modules, vars(m))]
    leaves, hooks = list(model.parameters()), hooks_of(modules)
    tensors = [*leaves, *model.buffers()]
    watch = extension.ModelWatch(modules, tables, hooks, [], tensors, [], [])
    flags = [p.requires_grad for p in leaves]
    return Watch(watch, leaves, flags, (modules, tables, hooks, tensors)) if watch.known() else None
