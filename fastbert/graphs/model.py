"""CUDA-graph replay for inference: one call enqueues a whole forward.

    graphed = fastbert.graph(model, max_tokens=8192, max_batch=64)
    with torch.inference_mode():
        output = graphed(input_ids, attention_mask)  # takes and returns what the model does

Tokens are packed before the recorded part begins, so a graph does not depend on lengths. It serves every
batch whose number of tokens fits its `Bucket`. Rows after the last token hold token 0. Absent sequences are
empty: their entries of `cu_seqlens` repeat the number of tokens. By the contracts of ops/packing.py and
ops/attention.py nothing reads those rows, and they change no result.

`buckets.py` has the sizes of the buckets, and what an absent sequence costs. Some backends of attention on a
GPU have a dense grid, and would compute sequences x longest² scores. If one of them serves, nothing is
recorded (`calls.by_grid`). The same holds for large buckets of DeBERTa and jina-v2, if their scores of
distances become a dense bias (`calls.dense_scores`).

Positions are inputs of a graph. Its tables of rotary positions have a row per position of the config, and its
windows and distances are counted from each sequence's start, so a mask must have no holes where they matter.

At most `max_graphs` graphs are kept; a new graph replaces the least recently used.

Memory: all graphs share one pool. It holds one set of intermediate results, as large as the largest graph
needs, and one set of outputs per graph. `GraphedModel.bytes_held` is its present size.

Weights: a graph reads the model's parameters at their addresses. So the next call sees an optimizer step,
`copy_` or `load_state_dict`, and weights derived from them (runtime/prepared.py) are derived again, in place.
The same holds after a write through `parameter.data`, which marks of the storages on the host show without
waiting for the device. If a parameter or module was replaced (`.to()`, `load_state_dict(assign=True)`,
LoRA), everything is recorded again. Changes of anything else that was read while recording are not noticed,
such as attributes of modules (`eps`) and settings of PyTorch. After such a change call `GraphedModel.clear`.

A usual call whose graph exists takes the host two calls of the extension. The first packs the batch. The
second, while the GPU works, finds that nothing has changed (`GraphedModel._quickly`). Any other call takes
more steps.

What a graph cannot do, the model does itself, with the same result; `GraphedModel.last_fallback` says why.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise, starmap
from operator import attrgetter
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from fastbert.graphs.buckets import Bucket, long_room, sequence_rooms, token_buckets
from fastbert.graphs.calls import (
    RECORDED,
    by_grid,
    dense_scores,
    is_usual,
    longest_text,
    raise_bad_ids,
    unfit,
    unfit_arguments,
    unfit_inputs,
)
from fastbert.graphs.recorder import EagerRecorder, Recorder, recorder_for
from fastbert.graphs.staging import Plan, Rows, Stage, make_plan, rows_in, words
from fastbert.graphs.task import Around, GraphedTask
from fastbert.graphs.weights import Weights
from fastbert.layers.packing import Packing, send
from fastbert.models.bert import BertModel
from fastbert.models.heads.task_model import TaskModel
from fastbert.models.inputs import Inputs, check_inputs
from fastbert.models.outputs import BaseModelOutputWithPooling
from fastbert.models.pooler import pool
from fastbert.runtime import dispatch, prepared

# Replays of one call, while another thread changes the weights
_TRIES = 3
# The most plans that are kept
_PLANS = 1024


class Options(TypedDict, total=False):
    """The keyword arguments of `graph`."""

    max_tokens: int
    max_batch: int
    buckets: Sequence[int] | None
    max_graphs: int
    recorder: Callable[[torch.device], Recorder | None]


@overload
def graph(model: BertModel, **options: Unpack[Options]) -> GraphedModel: ...
@overload
def graph(model: TaskModel, **options: Unpack[Options]) -> GraphedTask: ...
@overload
def graph(model: nn.Module, **options: Unpack[Options]) -> GraphedModel | GraphedTask: ...
def graph(
    model: nn.Module,
    *,
    max_tokens: int = 16384,
    max_batch: int = 512,
    buckets: Sequence[int] | None = None,
    max_graphs: int = 128,
    recorder: Callable[[torch.device], Recorder | None] = recorder_for,
) -> GraphedModel | GraphedTask:
    """The model, with its inference forward replayed from CUDA graphs that are recorded when first needed.

    Args:
        model: an encoder, or a model with a head, which runs after the graph; a model of fastbert, or of
            transformers after `fastbert.accelerate`. It is shared, not copied.
        max_tokens: most tokens of a batch, padding not counted; the model itself computes larger batches.
        max_batch: most sequences of a batch; the model itself computes larger batches.
        buckets: sizes of a batch in tokens, ascending; the last one overrides `max_tokens`. Default:
            `token_buckets(max_tokens)`.
        max_graphs: graphs kept at a time; the default holds all of the default buckets, for long and for
            short sequences, for one kind of call.
        recorder: makes the recorder for the model's device, or returns None if the device has none. With the
            default, `recorder_for`, only models on a CUDA device are recorded.

    Returns:
        A `GraphedModel`, or for a model with a head or of transformers a `GraphedTask`, to be called like the
        model.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    encoder = getattr(model, "base_model", None)
    # An accelerated model of transformers has one
    encoder = getattr(encoder, "fastbert_packed", encoder)
    if encoder is None or not hasattr(encoder, "encode_inputs"):
        raise TypeError(
            "model: expected a model of fastbert, or a model of transformers that runs on packed tokens "
            f"after fastbert.accelerate (see fastbert.explain), got {type(model).__name__}"
        )
    graphed = GraphedModel(encoder, max_tokens, max_batch, buckets, max_graphs, recorder)
    return graphed if encoder is model else GraphedTask(model, graphed)


class GraphedModel(Around):
    """A model whose inference forward is replayed from CUDA graphs if possible; made by `graph`.

    Calls take and return what the model's calls do. Any thread may call, on any stream; replays run one after
    another. The first call of a bucket records its graph, which waits for the GPU and takes as long as two
    forwards and the capture.

    Attributes:
        model: the model.
        buckets: sizes of a batch in tokens.
        rooms: how many sequences each bucket holds; a batch of long sequences has a graph with less room.
        max_batch, max_graphs: see `graph`.
        replays: how many calls were replayed.
        fallbacks: reason -> how many calls were not replayed.
    """

    # What a call may ask for
    _arguments = RECORDED

    def __init__(
        self,
        model: BertModel,
        max_tokens: int,
        max_batch: int,
        buckets: Sequence[int] | None,
        max_graphs: int,
        recorder: Callable[[torch.device], Recorder | None],
    ):
        for name, value in (("max_tokens", max_tokens), ("max_batch", max_batch), ("max_graphs", max_graphs)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        if buckets is None:
            buckets = token_buckets(max_tokens)
        elif (
            not isinstance(buckets, Sequence)
            or not all(type(size) is int for size in buckets)
            or not buckets
            or any(a >= b for a, b in pairwise([0, *buckets]))
        ):
            raise ValueError(f"buckets: expected integers >= 1, in rising order, got {buckets!r}")
        self.model, self.buckets = model, tuple(buckets)
        self.rooms = sequence_rooms(self.buckets, max_batch)
        self.max_batch, self.max_graphs = max_batch, max_graphs
        self.replays, self.fallbacks = 0, Counter()
        self._make_recorder = recorder
        parameters = inspect.signature(model.forward).parameters.values()
        self._names = frozenset(p.name for p in parameters)
        self._positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._last = threading.local()
        # Guards what `_drop` makes
        self._lock = threading.Lock()
        self._recorder: Recorder = EagerRecorder(model.device)
        self._drop()

    def __call__(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling | tuple[Any, ...]:
        """`BertModel.forward`, by a graph if one can serve."""
        if torch.compiler.is_compiling():
            return self.model(*args, **kwargs)
        given = dict(zip(self._positional, args, strict=False))
        wrong = given.keys() & kwargs or not kwargs.keys() <= self._names
        if wrong or len(args) > len(self._positional):
            # Raises the TypeError
            return self.model(*args, **kwargs)
        given |= kwargs
        model, stage = self.model, self._stage
        first_only = bool(given.get("first_token_only"))
        if stage is not None and is_usual(model, stage.device, given):
            outputs = self._quickly(stage, given, first_only)
            if outputs is not None:
                last, pooled = outputs
                output = BaseModelOutputWithPooling.of(last_hidden_state=last, pooler_output=pooled)
                return model.as_output(output, given.get("return_dict"))
        reason = self._unfit() or unfit_arguments(model.config, given, self._arguments)
        if reason is not None:
            self._note(reason)
            return model(*args, **kwargs)
        inputs = self._checked(given)
        pooled_here = model.has_pooler and not given.get("packed") and inputs.first_masked is None
        hidden, pooled = self._encode(inputs, first_only, pooled_here, given.get("causal"))
        inputs = inputs.to(model.device)
        if first_only and inputs.packing.mask is not None:
            hidden = inputs.packing.keep_first(hidden)
        if given.get("packed"):
            return hidden, None, None, inputs
        return model.padded_output(inputs, hidden, None, None, first_only, given.get("return_dict"), pooled)

    def forward_packed(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        first_token_only: bool = False,
    ) -> Tensor:
        """`BertModel.forward_packed`, by a graph if one can serve."""
        model = self.model
        given = (input_ids, cu_seqlens, max_seqlen, token_type_ids, position_ids)
        if torch.compiler.is_compiling():
            return model.forward_packed(*given, first_token_only=first_token_only)
        return self.encode_inputs(Inputs.from_packed(model.config, model.device, *given), first_token_only)

    def encode_inputs(self, inputs: Inputs, first_token_only: bool = False) -> Tensor:
        """The last hidden states of checked and packed inputs, packed, by a graph if one can serve."""
        if (reason := self._unfit()) is not None:
            return self._itself(reason, inputs, first_token_only)
        return self._encode(inputs, first_token_only, False)[0]

    @property
    def last_fallback(self) -> str | None:
        """Why this thread's last call was not replayed; None if it was."""
        return getattr(self._last, "reason", None)

    @property
    def graphs(self) -> list[Bucket]:
        """The buckets that have a graph now, the least recently used first."""
        with self._lock:
            return list(self._recordings)

    @property
    def bytes_held(self) -> int:
        """Bytes of the graphs and their inputs now, without the model's weights."""
        with self._lock:
            return self._recorder.bytes_held() + sum(t.nbytes for t in self._held())

    def _held(self) -> list[Tensor]:
        """The memory that recordings share."""
        return [self._memory]

    def clear(self) -> None:
        """Forget all graphs and free their memory; they are recorded again when needed."""
        with self._lock:
            self._drop()

    def _note(self, reason: str | None) -> None:
        self._last.reason = reason
        with self._lock:
            if reason is None:
                self.replays += 1
            else:
                self.fallbacks[reason] += 1

    def _unfit(self) -> str | None:
        """Why no graph can serve the model now, whatever the arguments."""
        return unfit(self.model)

    def _checked(self, given: dict[str, Any]) -> Inputs:
        """The checked inputs of a call, of a padded batch where the caller has them."""
        names = "input_ids", "attention_mask", "token_type_ids", "position_ids"
        tensors, model = [*map(given.get, names), None], self.model
        if given.get("cu_seqlens") is None and given.get("max_seqlen") is None:
            return check_inputs(model.config, model.device, *tensors)
        return model.checked(*tensors, given.get("cu_seqlens"), given.get("max_seqlen"))

    def _itself(self, reason: str, inputs: Inputs, *asked: bool | None) -> Tensor:
        """The last hidden states by the model itself; `reason` is counted."""
        self._note(reason)
        return self.model.encode_inputs(inputs.to(self.model.device), None, False, False, *asked)[0]

    def _encode(
        self, inputs: Inputs, first_only: bool, pooled: bool, causal: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden, the pooler's output or None) of packed inputs, on the host or the device."""
        raise_bad_ids(self.model.device)
        found = self._replay(inputs, first_only, pooled)
        if isinstance(found, str):
            return self._itself(found, inputs, first_only), None
        self._note(None)
        return found

    # -- replay ----------------------------------------------------------------------------------------------

    def _bucket(self, inputs: Inputs, first_only: bool, pooled: bool) -> Bucket | str:
        """The bucket of a batch, or why it has none."""
        total, packed = inputs.position_ids.shape[0], inputs.packing
        if (reason := unfit_inputs(self.model.config, inputs)) is not None:
            return reason
        if (sizes := self._sizes(total, packed.batch)) is None:
            tokens = f"{self.buckets[-1]} tokens"
            return (
                f"there are more than {tokens if total > self.buckets[-1] else f'{self.max_batch} sequences'}"
            )
        return Bucket(*sizes, first_only, pooled, dispatch.pins())

    def _sizes(self, total: int, batch: int, longest: int = 0) -> tuple[int, int] | None:
        """(tokens, sequences) of the smallest graph for a batch; None if no graph holds it.

        With `longest` the graph also holds the padding, as sequences of at most `longest` tokens.
        """
        first = bisect_left(self.buckets, total)
        for tokens, room in zip(self.buckets[first:], self.rooms[first:], strict=True):
            needed = batch - (total - tokens) // min(tokens, longest) if longest else batch
            if needed <= room:
                few = long_room(tokens, room)
                return tokens, few if needed <= few else room
        return None

    def _quickly(
        self, stage: Stage, given: dict[str, Any], first_only: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """(last_hidden_state, pooler_output) of a usual call that a recording serves as it is.

        None if the call is not usual, or if something has changed; then `_replay` must run. Here two calls of
        the extension, one of them while the GPU works, do what `_replay` does in many small steps.
        """
        raise_bad_ids(stage.device)
        ids, types = given.get("input_ids"), given.get("token_type_ids")
        if ids is None or (batch := stage.batch(ids, given.get("attention_mask"), types)) is None:
            return None
        key = batch.shape, first_only, dispatch.pins()
        plan = self._plans.get(key) or self._plan(*key)
        if plan is None:
            return None
        # Without ids the packed batch is the same at each call of this kind
        same = None if batch.ids is not None else (key, types is None)
        packed = None
        if same is None or self._packed != same:
            packed = torch.empty(plan.inputs.shape, dtype=torch.int64, pin_memory=plan.inputs.is_cuda)
            sizes = plan.bucket.tokens, plan.bucket.sequences
            if not stage.pack(batch, *sizes, plan.indices is not None, packed):
                return None
        with self._lock:
            # The plan was dropped in the meantime, or there is no state to compare with afterwards
            weights = self._weights
            if weights is None or weights.state is None or self._plans.get(key) is not plan:
                return None
            if packed is None and self._packed != same:
                return None
            self._recordings.move_to_end(plan.bucket)
            with self._recorder.in_order():
                if packed is not None:
                    self._packed = None
                    plan.inputs.copy_(packed, non_blocking=True)
                    self._packed = same
                if batch.ids is None and plan.ids is not None and plan.types is not None:
                    plan.ids.copy_(ids)
                    if types is not None:
                        plan.types.copy_(types)
                plan.replay()
                outputs = plan.copy_outputs(*batch.shape[:2])
            if not weights.untouched():
                return None
            self._last.reason = None
            self.replays += 1
        return outputs

    def _plan(self, shape: tuple[int, int, int], first_only: bool, pins: tuple[Any, ...]) -> Plan | None:
        """How to serve padded batches of a shape (see `Batch`); None if no recording can."""
        size, _, total = shape
        if total == 0 or (sizes := self._sizes(total, size)) is None:
            return None
        with self._lock:
            bucket = Bucket(*sizes, first_only, self.model.has_pooler, pins)
            if bucket not in self._recordings:
                return None
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            # See `_allocate`
            with torch.inference_mode(False):
                plan = make_plan(bucket, self._recordings[bucket][0], self._rows(bucket), shape)
            self._plans[shape, first_only, pins] = plan
        return plan

    def _replay(self, inputs: Inputs, first_only: bool, pooled: bool) -> tuple[Tensor, Tensor | None] | str:
        """(hidden, pooled), copies that the caller owns; or why no graph can serve."""
        bucket = self._bucket(inputs, first_only, pooled)
        if isinstance(bucket, str):
            return bucket
        with self._lock:
            for _ in range(_TRIES):
                if self._weights is not None and bucket not in self._recordings:
                    self._settle()
                weights = self._weights or self._begin()
                if isinstance(weights, str):
                    return weights
                if bucket not in self._recordings:
                    reason = weights.watched() or self._record(bucket)
                    if reason is not None:
                        return reason
                    # The state does not cover what this recording derives
                    weights.state = None
                with self._recorder.in_order():
                    outputs = self._run(bucket, inputs)
                # Checked while the GPU already works
                if weights.untouched():
                    return outputs
                if (reason := weights.watched()) is not None:
                    return reason
                # Taken before the recordings are found right, so that no change is missed
                state = weights.candidate(self._derived.values())
                if self._settle():
                    weights.state = state
                    return outputs
        return "the model changed during the call"

    def _begin(self) -> Weights | str:
        """Prepare to record the model as it is now, or return why it cannot be recorded."""
        model = self.model
        if any(p.is_inference() for p in model.parameters()):
            return "the model was made in inference mode: changes of its weights would not be noticed"
        if (reason := self._allocate()) is not None:
            return reason
        self._weights, self._stage = Weights(model), Stage(model.config, model.device, model.dtype)
        return self._weights

    def _allocate(self) -> str | None:
        """Make the recorder and the memory of the inputs, or return why the device has no graphs."""
        device = self.model.device
        recorder = self._make_recorder(device)
        if recorder is None:
            return f"the model is on {device}, where there are no graphs"
        self._recorder = recorder
        # Tensors of inference mode cannot be written to outside it
        with torch.inference_mode(False):
            most = max(starmap(words, zip(self.buckets, self.rooms, strict=True)))
            self._memory = torch.zeros(most, dtype=torch.int64, device=device)
        return None

    def _drop(self) -> None:
        """Forget all recordings and what they depend on."""
        self._recorder.wait()
        # Until `_allocate` makes one, a recorder without recordings
        self._recorder = EagerRecorder(self.model.device)
        # Bucket -> (recording, what was recorded)
        self._recordings: OrderedDict[Bucket, Any] = OrderedDict()
        self._weights: Weights | None = None
        self._derived: dict[tuple[Any, ...], tuple[nn.Module, Hashable, object]] = {}
        self._failed: dict[Bucket, str] = {}
        self._stage: Stage | None = None
        self._memory = torch.empty(0)
        # The kind of quick call that wrote the memory; a call of that kind need only write its ids
        self._packed: tuple[Any, ...] | None = None
        self._inputs: dict[tuple[int, int], Rows] = {}
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def _settle(self) -> bool:
        """Whether the recordings are up to date.

        If not, changes in place are brought into them; they are forgotten if that is not enough.
        """
        weights = self._weights
        if weights is None or weights.replaced():
            self._drop()
            return False
        if not weights.changed() and all(starmap(prepared.is_current, self._derived.values())):
            return True
        prepared.clear(self.model)
        weights.accept()
        with self._recorder.in_order():
            updated = self._derive()
        if not updated:
            self._drop()
        return False

    def _derive(self) -> bool:
        """Derive all weights again, at the addresses that recordings read; False if a weight is gone."""
        self._blank()
        done = set()
        # The smallest bucket of each kind
        for bucket in sorted(self._recordings, key=attrgetter("tokens")):
            kind = bucket._replace(tokens=0, sequences=0)
            if kind not in done:
                done.add(kind)
                self._recordings[bucket][1]()
        return all(prepared.update_in_place(*entry) for entry in self._derived.values())

    def _record(self, bucket: Bucket) -> str | None:
        """Record the graph of a bucket, or return why it cannot be recorded."""
        if bucket in self._failed:
            return self._failed[bucket]
        if (reason := by_grid(self.model) or dense_scores(self.model, bucket)) is not None:
            return reason
        self._make_room()
        function = self._function(bucket)
        try:
            with self._recorder.in_order(), prepared.collect_used() as derived:
                self._blank()
                recording = self._recorder.record(function)
        # The model computes what cannot be captured
        except Exception as error:
            return self._refused(bucket, error)
        self._recordings[bucket] = recording, function
        self._derived |= {(id(owner), name): (owner, name, value) for owner, name, value in derived}
        return None

    def _make_room(self) -> None:
        """Free recordings, so that there is room for a new one."""
        if len(self._recordings) >= self.max_graphs:
            self._recorder.wait()
            self._plans.clear()
            while len(self._recordings) >= self.max_graphs:
                self._recordings.popitem(last=False)

    def _refused(self, bucket: Bucket, error: Exception) -> str:
        """Keep, warn of and return the reason why the bucket's graph cannot be recorded."""
        reason = f"recording failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self._failed[bucket] = reason
        warnings.warn(f"fastbert: {bucket} has no graph: {reason}", RuntimeWarning, stacklevel=6)
        return reason

    def _blank(self) -> None:
        """Clear the inputs' memory, whose values of one bucket are no ids or lengths in another."""
        self._packed = None
        self._memory.zero_()

    def _rows(self, bucket: Bucket) -> Rows:
        """The inputs that graphs of the bucket's sizes read; all buckets share the memory."""
        sizes = bucket.tokens, bucket.sequences
        if sizes not in self._inputs:
            # See `_allocate`
            with torch.inference_mode(False):
                self._inputs[sizes] = rows_in(self._memory, *sizes)
        return self._inputs[sizes]

    def _inputs_in(self, where: Rows, bucket: Bucket) -> Inputs:
        """A batch that fills the bucket, as views of the memory."""
        _, rows, ends, _ = where
        config = self.model.config
        longest = min(bucket.tokens, longest_text(config))
        packed = Packing(bucket.sequences, longest, ends, longest)
        given = rows[0], rows[1], rows[2] if config.has_segments else None, None, None, packed
        # A token's padded column may be beyond the bucket's tokens; so tables have a row per position
        return Inputs(*given, last_position=config.max_tokens - 1 if config.family.unlimited else None)

    def _fill(self, where: Rows, bucket: Bucket, inputs: Inputs) -> tuple[int, int]:
        """Write a batch where the bucket's graph reads it; returns its numbers of tokens and sequences."""
        _, rows, ends, _ = where
        given = [t for t in (inputs.input_ids, inputs.position_ids, inputs.token_type_ids) if t is not None]
        total, batch = given[0].shape[0], inputs.packing.batch
        rows[: len(given), :total] = send(torch.stack(given), rows.device)
        rows[:, total:] = 0
        ends[: batch + 1] = send(inputs.packing.cu_seqlens, ends.device)
        ends[batch + 1 :] = total
        return total, batch

    def _function(self, bucket: Bucket) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """The function that is recorded, the model's forward on the memory of `_rows`."""
        model, inputs = self.model, self._inputs_in(self._rows(bucket), bucket)

        def function() -> tuple[Tensor, Tensor | None]:
            with torch.inference_mode(False), torch.no_grad():
                hidden = model.encode_inputs(inputs, None, False, False, bucket.first_token_only)[0]
                if not bucket.pooled:
                    return hidden, None
                first = hidden if bucket.first_token_only else inputs.packing.first_rows(hidden)
                return hidden, pool(model, model.family, first)

        return function

    def _run(self, bucket: Bucket, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Copy a batch to where the bucket's graph reads it, replay, and copy the result."""
        self._packed = None
        total, batch = self._fill(self._rows(bucket), bucket, inputs)
        self._recordings.move_to_end(bucket)
        recording, _ = self._recordings[bucket]
        recording.replay()
        hidden, pooled = recording.outputs
        hidden = hidden[: batch if bucket.first_token_only else total].clone()
        return hidden, None if pooled is None else pooled[:batch].clone()
