"""CUDA-graph replay for inference: a whole forward enqueued by one call.

    graphed = fastbert.graph(model, max_tokens=8192, max_batch=64)
    with torch.inference_mode():
        output = graphed(input_ids, attention_mask)  # takes and returns what the model does

Tokens are packed before the recorded part begins, so that a graph is bound to no lengths: one serves every
batch, of whatever mix of lengths, whose number of tokens fits its `Bucket`. Rows from the last token to the
bucket's end hold token 0; `cu_seqlens` of the sequences that are not there repeat the number of tokens. By
the contracts of packing.py and ops/attention.py nothing reads those rows and nothing returns from them.

Four buckets to a doubling: from 32 tokens on at most a fifth of the rows is padding. Two sizes follow from
the tokens:
    sequences  one for 8 tokens, at least 8, at most `max_batch` (`sequence_rooms`); a batch of more and
               shorter ones goes to the next bucket that holds them. A sequence that is not there costs the
               attention one program a head, which returns at once. Where there is room for more than 64,
               tiles start in the batch's order instead of the longest first: a `max_batch` of 64 avoids that.
               The pooler has a row for each and so, with `first_token_only`, has most of the last layer.
    longest    as many tokens as the bucket or the model's positions allow. The attention kernel's grid is of
               tokens and sequences, but its tiles are those chosen for this length: higher than short
               sequences need. MPNet's bias has longest² elements a head, made once a replay.
Attention on a dense grid, as all but the kernel has it on a GPU, would compute sequences x longest² scores.
Where it serves, nothing is recorded.

At most `max_graphs` are kept; the one that was used longest ago gives way.

Memory: all graphs share one pool. Of what lies between input and output it holds as much as the largest graph
needs, of outputs one for each graph; `GraphedModel.bytes_held` is what it holds now.

Weights: a graph reads the model's parameters where they are, so that an optimizer step, `copy_` or
`load_state_dict` hold for the next call; weights derived from them (prepared.py) are then made anew, in
place. So they are after a write through `parameter.data`: marks of the storages, which are on the host, tell
of it without waiting for the device. A parameter or module that was replaced (`.to()`,
`load_state_dict(assign=True)`, LoRA) is noticed, and everything recorded anew. Not noticed are changes of
other things that were read while recording: attributes of modules such as `eps`, settings of PyTorch. After
those, call `GraphedModel.clear`.

What a graph cannot do, the model does itself, with the same result: `GraphedModel.last_fallback` says why.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.layers.linear import pool_first
from fastbert.layers.modules import is_hooked, part
from fastbert.layers.packing import Packing, send
from fastbert.models.base import PreTrainedModel
from fastbert.models.bert import BertModel
from fastbert.models.inputs import Inputs, check_inputs
from fastbert.models.outputs import BaseModelOutputWithPooling
from fastbert.runtime import dispatch, prepared
from fastbert.runtime.native import storage_address

_capturing = threading.Lock()  # PyTorch captures one graph at a time
_TRIES = 3  # replays of one call while its weights change under it
_HOOKED = "a hook watches the model"
_SMALLEST = 32  # smallest default bucket
_ROOM = 8  # sequences that each bucket holds, and tokens for each further one
# What a recorded forward knows of the arguments of `BertModel.forward`; with any other, the model itself runs
_RECORDED = frozenset(
    ("input_ids", "attention_mask", "token_type_ids", "position_ids", "return_dict", "first_token_only",
     "packed")
)  # fmt: skip


@dataclass(frozen=True)
class Bucket:
    """What one graph serves.

    Attributes:
        tokens: of a batch, at most.
        first_token_only, pooled: what it computes: one row a sequence; the pooler's output.
        pins: the backends that `use_backend` pinned.
    """

    tokens: int
    first_token_only: bool
    pooled: bool
    pins: tuple[tuple[str, str], ...] = ()


# --- recorders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recording:
    """Work that can be repeated: `replay` writes into `outputs` what the inputs' memory holds by then."""

    outputs: tuple[Tensor | None, ...]
    replay: Callable[[], None]


class Recorder(Protocol):
    """What makes recordings on one device; all of them share memory, and run one after the other."""

    def record(self, function: Callable[[], tuple[Tensor | None, ...]]) -> Recording:
        """`function`, which must read and write the same memory at every call, as a recording."""

    def in_order(self) -> contextlib.AbstractContextManager:
        """Around each use of inputs, recordings and outputs: what is enqueued inside runs after what was
        enqueued in earlier blocks, on whichever streams.
        """

    def wait(self) -> None:
        """Return when nothing that was enqueued in earlier blocks is still running."""

    def bytes_held(self) -> int:
        """Memory of the recordings."""


class CudaRecorder:
    """Recordings that are CUDA graphs. Each is captured after one run on the capture's own stream, in which
    kernels are compiled, checked (dispatch.py) and get their workspaces.
    """

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._done = torch.cuda.Event()
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], tuple[Tensor | None, ...]]) -> Recording:
        """See `Recorder`."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()
            current.wait_stream(self._stream)
            captured = torch.cuda.CUDAGraph()
            # Other threads may go on using the GPU: their allocations are no fault of this capture
            with (
                _capturing,
                torch.cuda.graph(
                    captured, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                outputs = function()
        return Recording(outputs, captured.replay)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """See `Recorder`."""
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(torch.cuda.current_stream())

    def wait(self) -> None:
        """See `Recorder`."""
        self._done.synchronize()

    def bytes_held(self) -> int:
        """See `Recorder`: the pool's segments, as the caching allocator counts them."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))


class EagerRecorder:
    """Recordings that call their function again: the same use of memory without a GPU, for tests."""

    def __init__(self, device: torch.device):
        self.device = device
        self._made: weakref.WeakSet[Recording] = weakref.WeakSet()

    def record(self, function: Callable[[], tuple[Tensor | None, ...]]) -> Recording:
        """See `Recorder`."""
        outputs = function()

        def replay() -> None:
            for old, new in zip(outputs, function(), strict=True):
                if old is not None:
                    old.copy_(new)

        recording = Recording(outputs, replay)
        self._made.add(recording)
        return recording

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """See `Recorder`: a CPU has no streams."""
        yield

    def wait(self) -> None:
        """See `Recorder`: nothing runs behind the host's back."""

    def bytes_held(self) -> int:
        """See `Recorder`: the outputs."""
        return sum(t.nbytes for made in self._made for t in made.outputs if t is not None)


def recorder_for(device: torch.device) -> Recorder | None:
    """The recorder of a device, None where there is none."""
    return CudaRecorder(device) if device.type == "cuda" else None


# --- what recordings depend on ------------------------------------------------------------------------------


class _Weights:
    """The modules and tensors that recordings read, and whether they still are what they were.

    Asked at every call, while the GPU works: hence lists that C code walks, rather than `model.modules()`.
    """

    def __init__(self, model: nn.Module):
        self.modules = list(model.modules())
        self.tables = [t for m in self.modules for t in (m._parameters, m._buffers, m._modules)]
        self.classes = list(map(type, self.modules))
        self.sizes = list(map(len, self.tables))
        entries = [(table, name, value) for table in self.tables for name, value in table.items()]
        self.homes = [table for table, _, _ in entries]
        self.names = [name for _, name, _ in entries]
        self.values = [value for _, _, value in entries]
        self.tensors = [value for value in self.values if isinstance(value, Tensor)]
        self.hooks = [
            hooks
            for m in self.modules
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        # Recordings read this memory, even one that is found outdated only afterwards: so it must stay
        self.memory = [t.detach() for t in self.tensors]
        self.pointers = self.places()
        self.accept()

    def accept(self) -> None:
        """What stands in the tensors now is what recordings and derived weights have."""
        self.clears = prepared.clears()
        self.versions = [t._version for t in self.tensors]

    def places(self) -> list[tuple[int, int]]:
        """Where the tensors lie: (begin of the storage, offset in it)."""
        return list(
            zip(map(storage_address, self.tensors), map(Tensor.storage_offset, self.tensors), strict=True)
        )

    def replaced(self) -> bool:
        """Whether a module or tensor is another one, or elsewhere."""
        return (
            list(map(type, self.modules)) != self.classes
            or list(map(len, self.tables)) != self.sizes
            or not all(map(is_, map(dict.get, self.homes, self.names), self.values))
            or self.places() != self.pointers
        )

    def changed(self) -> bool:
        """Whether elements may have changed in place."""
        return prepared.clears() != self.clears or [t._version for t in self.tensors] != self.versions

    def watched(self) -> str | None:
        """Why the model's code must run: someone hooks it, or a part of it is in training."""
        if any(self.hooks):
            return _HOOKED
        if any(map(attrgetter("training"), self.modules)):
            return "a part of the model is in training mode"
        return None


# --- the model ----------------------------------------------------------------------------------------------


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """The default buckets of tokens: 32, and from there four to a doubling, the last one `max_tokens`."""
    sizes, size = [], _SMALLEST
    while size < max_tokens:
        sizes += [size * quarters // 4 for quarters in (4, 5, 6, 7)]
        size *= 2
    return (*(s for s in sizes if s < max_tokens), max_tokens)


def sequence_rooms(buckets: Sequence[int], max_batch: int) -> tuple[int, ...]:
    """How many sequences each bucket of tokens holds: one for 8 tokens and at least 8, but no more than
    `max_batch`, for which the last one has room whatever its size.
    """
    return (*(min(max_batch, max(_ROOM, size // _ROOM)) for size in buckets[:-1]), max_batch)


def by_grid(model: BertModel) -> str | None:
    """Why the model's attention would cost what a bucket has room for, not what it holds; else None."""
    if model.device.type != "cuda":  # a CPU's reads the lengths
        return None
    name, _ = dispatch._serving("attention_fwd", model.device, model.dtype)
    if name == "triton":
        from fastbert.kernels.attention import MAX_HEADDIM  # not with `fastbert`: it imports Triton

        if model.config.head_dim <= MAX_HEADDIM:
            return None
        name = "aten"
    return f"attention is served by {name}, on a grid of all sequences that a graph has room for"


def graph(
    model: BertModel,
    *,
    max_tokens: int = 16384,
    max_batch: int = 512,
    buckets: Sequence[int] | None = None,
    max_graphs: int = 64,
    recorder: Callable[[torch.device], Recorder | None] = recorder_for,
) -> GraphedModel:
    """The model with its inference forward replayed from CUDA graphs, which are recorded as they are needed.

    Args:
        model: an encoder (of a model with a head: `model.base_model`). Shared, not copied.
        max_tokens: kept tokens of a batch, at most; larger batches are computed by the model itself.
        max_batch: sequences of a batch, at most; likewise. No graph has room for more.
        buckets: sizes of a batch in tokens, rising, for each of which there may be graphs; the last one
            stands instead of `max_tokens`. By default `token_buckets(max_tokens)`.
        max_graphs: graphs kept at a time; by default those of all default buckets for one kind of call.
        recorder: makes the recorder for the model's device, or None where there is none: `recorder_for`, by
            which models that are not on a CUDA device are never recorded.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    return GraphedModel(model, max_tokens, max_batch, buckets, max_graphs, recorder)


class GraphedModel:
    """A model whose inference forward is replayed from CUDA graphs where it can be; made by `graph`.

    Calls take and return what the model's do. Any thread may call, on any stream; replays run one after the
    other. A call whose batch no graph has served before records one: it takes as long as two forwards and
    the capture, and waits for the GPU.

    Attributes:
        model: the model.
        buckets: sizes of a batch in tokens.
        rooms: how many sequences each of them holds.
        max_batch, max_graphs: see `graph`.
        replays: how many calls were replayed.
        fallbacks: how many were not, by reason.
    """

    def __init__(
        self,
        model: BertModel,
        max_tokens: int,
        max_batch: int,
        buckets: Sequence[int] | None,
        max_graphs: int,
        recorder: Callable[[torch.device], Recorder | None],
    ):
        if not isinstance(model, BertModel):
            hint = ""
            if isinstance(model, PreTrainedModel):
                hint = "; give model.base_model, its encoder"
            elif isinstance(model, nn.Module) and any(
                c.__module__.startswith("transformers.") for c in type(model).__mro__
            ):
                hint = (
                    " of transformers; save it, and load that folder by fastbert.AutoModel.from_pretrained. "
                    "(torch.compile takes models of transformers, accelerated or not)"
                )
            raise TypeError(f"model: expected a fastbert encoder, got {type(model).__name__}{hint}")
        for name, value in (("max_tokens", max_tokens), ("max_batch", max_batch), ("max_graphs", max_graphs)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        if buckets is None:
            buckets = token_buckets(max_tokens)
        elif (
            not buckets
            or any(type(size) is not int or size < 1 for size in buckets)
            or any(a >= b for a, b in pairwise(buckets))
        ):
            raise ValueError(f"buckets: expected integers >= 1, each above the one before, got {buckets!r}")
        self.model, self.buckets = model, tuple(buckets)
        self.rooms = sequence_rooms(self.buckets, max_batch)
        self.max_batch, self.max_graphs = max_batch, max_graphs
        self.replays, self.fallbacks = 0, Counter()
        self._make_recorder = recorder
        parameters = inspect.signature(model.forward).parameters.values()
        self._names = frozenset(p.name for p in parameters)
        self._positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._last = threading.local()
        self._lock = threading.Lock()  # for all that follows
        self._recordings: OrderedDict[Bucket, tuple[Recording, Callable]] = OrderedDict()
        self._recorder: Recorder | None = None
        self._weights: _Weights | None = None
        self._derived: dict[tuple, tuple[nn.Module, Hashable, object]] = {}
        self._failed: dict[Bucket, str] = {}
        self._rows = self._ends = torch.empty(0)

    # -- what is asked from outside --------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling | tuple:
        """`BertModel.forward`, by a graph where one can serve."""
        if torch.compiler.is_compiling():
            return self.model(*args, **kwargs)
        given = dict(zip(self._positional, args, strict=False))
        if len(args) > len(self._positional) or given.keys() & kwargs or not kwargs.keys() <= self._names:
            return self.model(*args, **kwargs)  # raises the TypeError
        given |= kwargs
        reason = self._unfit() or self._unfit_arguments(given)
        if reason is not None:
            self._note(reason)
            return self.model(*args, **kwargs)
        model, first_only = self.model, bool(given.get("first_token_only"))
        inputs = check_inputs(
            model.config, model.device, given.get("input_ids"), given.get("attention_mask"),
            given.get("token_type_ids"), given.get("position_ids"), None,
        )  # fmt: skip
        pooled_here = model.has_pooler and not given.get("packed") and inputs.headless is None
        hidden, pooled = self._encode(inputs, first_only, pooled_here)
        inputs = inputs.to(model.device)
        if first_only and inputs.packing.mask is not None:
            hidden = inputs.packing.keep_first(hidden)
        if given.get("packed"):
            return hidden, None, None, inputs
        return model._output(inputs, hidden, None, None, first_only, given.get("return_dict"), pooled)

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
        """`BertModel.forward_packed`, by a graph where one can serve."""
        model = self.model
        given = (input_ids, cu_seqlens, max_seqlen, token_type_ids, position_ids)
        compiling = torch.compiler.is_compiling()
        if compiling or (reason := self._unfit()) is not None:
            if not compiling:
                self._note(reason)
            return model.forward_packed(*given, first_token_only=first_token_only)
        inputs = Inputs.from_packed(model.config, model.device, *given)
        return self._encode(inputs, first_token_only, False)[0]

    @property
    def config(self):
        """The model's."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.model.dtype

    @property
    def training(self) -> bool:
        """The model's; in training nothing is replayed."""
        return self.model.training

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's."""
        return self.model.parameters()

    @property
    def last_fallback(self) -> str | None:
        """Why this thread's last call was not replayed; None if it was."""
        return getattr(self._last, "reason", None)

    @property
    def graphs(self) -> list[Bucket]:
        """The buckets that have a graph now, the one used longest ago first."""
        with self._lock:
            return list(self._recordings)

    @property
    def bytes_held(self) -> int:
        """Memory that the graphs and their inputs take now, beside the model's weights."""
        with self._lock:
            recorder = self._recorder
            return self._rows.nbytes + self._ends.nbytes + (0 if recorder is None else recorder.bytes_held())

    def clear(self) -> None:
        """Forget all graphs and free their memory; they are recorded anew as they are needed."""
        with self._lock:
            self._drop()

    # -- which calls are replayed ----------------------------------------------------------------------------

    def _unfit(self) -> str | None:
        """Why no graph can serve now, whatever the arguments."""
        model = self.model
        if model.training:
            return "the model is in training mode"
        if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
            return "gradients are on: call under torch.inference_mode() or torch.no_grad()"
        device = model.device
        if torch.is_autocast_enabled(device.type):
            return "autocast is on"
        if is_hooked(model) or _has_any_global_hook():
            return _HOOKED
        if "forward" in vars(model):
            return "the model's forward was replaced"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph"
        return None

    def _unfit_arguments(self, given: dict[str, Any]) -> str | None:
        """Why no graph can serve these arguments."""
        config, ids, mask = self.model.config, given.get("input_ids"), given.get("attention_mask")
        for name in ("output_attentions", "output_hidden_states"):
            if given.get(name) or (given.get(name) is None and getattr(config, name)):
                return f"{name} is asked for"
        for name, value in given.items():
            if value is not None and value is not False and name not in _RECORDED:
                return f"{name} is given"
        if isinstance(mask, Tensor) and mask.dim() == 4:
            return "attention_mask has four dimensions"
        # with position_ids of the caller's a sequence may be longer than a graph reckons with
        if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > config.max_tokens:
            return f"input_ids are more than {config.max_tokens} a sequence"
        return None

    def _note(self, reason: str | None) -> None:
        self._last.reason = reason
        with self._lock:
            if reason is None:
                self.replays += 1
            else:
                self.fallbacks[reason] += 1

    def _encode(self, inputs: Inputs, first_only: bool, pooled: bool) -> tuple[Tensor, Tensor | None]:
        """(hidden, the pooler's output or None) of packed inputs, which may still be on the host."""
        reason, *outputs = self._replay(inputs, first_only, pooled)
        self._note(reason)
        if reason is None:
            return tuple(outputs)
        inputs = inputs.to(self.model.device)
        return self.model._encode(inputs, None, False, False, first_only)[0], None

    # -- replay ----------------------------------------------------------------------------------------------

    def _bucket(self, inputs: Inputs, first_only: bool, pooled: bool) -> Bucket | str:
        """The bucket of a batch, or why it has none."""
        total, packed = inputs.position_ids.shape[0], inputs.packing
        if total == 0:
            return "there are no tokens"
        if total > self.buckets[-1]:
            return f"there are more than {self.buckets[-1]} tokens"
        if packed.batch > self.max_batch:
            return f"there are more than {self.max_batch} sequences"
        if inputs.holes:
            return "the mask has holes, which this family's attention bias depends on"
        tokens = next(
            size
            for size, room in zip(self.buckets, self.rooms, strict=True)
            if size >= total and room >= packed.batch
        )
        return Bucket(tokens, first_only, pooled, tuple(sorted(dict(dispatch._pins).items())))

    def _replay(
        self, inputs: Inputs, first_only: bool, pooled: bool
    ) -> tuple[str | None, Tensor | None, Tensor | None]:
        """(None, hidden, pooled), both of them the caller's own; or (why not, None, None)."""
        bucket = self._bucket(inputs, first_only, pooled)
        if isinstance(bucket, str):
            return bucket, None, None
        with self._lock:
            for _ in range(_TRIES):
                if self._weights is not None and bucket not in self._recordings:
                    self._settle()
                if self._weights is None and (reason := self._begin()) is not None:
                    return reason, None, None
                if bucket not in self._recordings:
                    reason = self._weights.watched() or self._record(bucket)
                    if reason is not None:
                        return reason, None, None
                with self._recorder.in_order():
                    outputs = self._run(bucket, inputs)
                # Whether all is as it was recorded is asked while the GPU already works: mostly it is
                reason = self._weights.watched()
                if reason is not None:
                    return reason, None, None
                if self._settle():
                    return None, *outputs
        return "the model changed during the call", None, None

    def _begin(self) -> str | None:
        """Get ready to record the model as it now is, or say why it cannot be."""
        device = self.model.device
        recorder = self._make_recorder(device)
        if recorder is None:
            return f"the model is on {device}, where there are no graphs"
        if any(p.is_inference() for p in self.model.parameters()):
            return "the model was made in inference mode: changes of its weights would not be noticed"
        self._recorder, self._weights = recorder, _Weights(self.model)
        with torch.inference_mode(False):  # what is made in that mode cannot be written outside it
            self._rows = torch.zeros(3 * self.buckets[-1], dtype=torch.int64, device=device)
            self._ends = torch.zeros(self.max_batch + 1, dtype=torch.int32, device=device)
        return None

    def _drop(self) -> None:
        """Forget all recordings and what they depend on."""
        if self._recorder is not None:
            self._recorder.wait()
        self._recordings.clear()
        self._failed.clear()
        self._recorder = self._weights = None
        self._derived = {}
        self._rows = self._ends = torch.empty(0)

    def _settle(self) -> bool:
        """Whether the recordings are up to date; brings what was changed in place into them, and forgets them
        where that is not enough.
        """
        weights = self._weights
        if weights.replaced():
            self._drop()
            return False
        if not weights.changed() and all(starmap(prepared.current, self._derived.values())):
            return True
        prepared.clear(self.model)
        weights.accept()
        with self._recorder.in_order():
            current = self._derive()
        if not current:
            self._drop()
        return False

    def _derive(self) -> bool:
        """Make all derived weights anew, in the place where recordings read them; False where one is gone."""
        self._blank()
        done = set()
        for bucket in sorted(self._recordings, key=attrgetter("tokens")):  # one of each kind, the smallest
            kind = replace(bucket, tokens=0)
            if kind not in done:
                done.add(kind)
                self._recordings[bucket][1]()
        return all(prepared.overwrite(*entry) for entry in self._derived.values())

    def _record(self, bucket: Bucket) -> str | None:
        """Record the graph of a bucket, or say why it cannot be."""
        if bucket in self._failed:
            return self._failed[bucket]
        if (reason := by_grid(self.model)) is not None:
            return reason
        if len(self._recordings) >= self.max_graphs:
            self._recorder.wait()
            while len(self._recordings) >= self.max_graphs:
                self._recordings.popitem(last=False)
        function = self._function(bucket)
        try:
            with self._recorder.in_order(), prepared.used() as derived:
                self._blank()
                recording = self._recorder.record(function)
        except Exception as error:  # whatever cannot be captured, the model computes
            reason = f"recording failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._failed[bucket] = reason
            warnings.warn(f"fastbert: {bucket} has no graph: {reason}", RuntimeWarning, stacklevel=5)
            return reason
        self._recordings[bucket] = recording, function
        self._derived |= {(id(owner), name): (owner, name, value) for owner, name, value in derived}
        return None

    def _blank(self) -> None:
        """No tokens: what stands in the inputs' memory is another bucket's and makes no sense in this one."""
        self._rows.zero_()
        self._ends.zero_()

    def _views(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """(ids, positions and types (3, tokens); cu_seqlens (room + 1,)) that the bucket's graph reads."""
        room = self.rooms[self.buckets.index(bucket.tokens)]
        return self._rows[: 3 * bucket.tokens].view(3, -1), self._ends[: room + 1]

    def _function(self, bucket: Bucket) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """What is recorded: the model on the memory of `_views`."""
        model, (rows, ends) = self.model, self._views(bucket)
        longest = min(bucket.tokens, model.config.max_tokens)
        packed = Packing(ends.shape[0] - 1, longest, ends, longest)
        types = rows[2] if model.family.segments else None
        inputs = Inputs(rows[0], rows[1], types, None, None, packed)

        def function() -> tuple[Tensor, Tensor | None]:
            with torch.inference_mode(False), torch.no_grad():
                hidden = model._encode(inputs, None, False, False, bucket.first_token_only)[0]
                if not bucket.pooled:
                    return hidden, None
                first = hidden if bucket.first_token_only else packed.first_rows(hidden)
                return hidden, pool_first(part(model, model.family.pooler), first)

        return function

    def _run(self, bucket: Bucket, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Put a batch where the bucket's graph reads it, replay, and copy the result."""
        rows, ends = self._views(bucket)
        given = [t for t in (inputs.input_ids, inputs.position_ids, inputs.token_type_ids) if t is not None]
        total, batch = given[0].shape[0], inputs.packing.batch
        rows[: len(given), :total] = send(torch.stack(given), rows.device)
        rows[:, total:] = 0
        ends[: batch + 1] = send(inputs.packing.cu_seqlens, ends.device)
        ends[batch + 1 :] = total
        self._recordings.move_to_end(bucket)
        recording, _ = self._recordings[bucket]
        recording.replay()
        hidden, pooled = recording.outputs
        hidden = hidden[: batch if bucket.first_token_only else total].clone()
        return hidden, None if pooled is None else pooled[:batch].clone()
