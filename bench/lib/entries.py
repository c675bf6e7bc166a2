"""The entries of the tables of tuned configs: what `bench/tune.py` times for each, and which candidates.

A `Task` is an entry: a kernel, a shape of BERT-base or -large, a dtype and a bucket. A `Kind` has, for one
op of the tables, its cases, the candidate configs and the work of each.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from bench.lib.workloads import MODELS
from fastbert import testing
from fastbert.kernels import tuning
from fastbert.runtime.table import HALF
from fastbert.testing.op_cases.attention import AttentionCase
from fastbert.testing.op_cases.feed_forward import FeedForwardCase
from fastbert.testing.op_cases.layer_norm import LayerNormCase
from fastbert.testing.op_cases.linear import LinearCase
from fastbert.testing.op_cases.linear_norm import LinearNormCase

TOKENS = {0.0: 16_384, 0.1: 4096}  # by dropout_p: batches that fill the GPU; the oracle's bits take memory
MOST = 12  # candidates per entry
NEAR = 1.5  # times the least work: a tile with more is not tried
# Buckets of rows and of the longest sequence, those that matter most first
ROWS = (14, 12, 10, 8, 7, 6, 13, 5, 4, 0)
TRAINED = (14, 12, 13, 10)
FEW_ROWS = (8, 7, 6, 4, 0)
SEQLENS = (9, 7, 8, 6, 5)


@dataclass(frozen=True)
class Task:
    """One entry of the table.

    Attributes:
        op: the entry's, a key of KINDS.
        key, bucket: the entry's place.
        case: what is timed.
        dtype: the case's dtype.
        rank: the place of the bucket among those of its kind, 0 for the one that matters most.
    """

    op: str
    key: str
    bucket: int
    case: testing.Case
    dtype: torch.dtype
    rank: int = 0

    @property
    def name(self) -> str:
        """As rows name it."""
        return f"{self.op} {self.key} {self.bucket}"


def module_of(op: str) -> ModuleType:
    """The module of kernels/ that reads the entries of `op`."""
    return importlib.import_module(f"fastbert.kernels.{KINDS[op].module}")


def facts_of(device: tuning.Device) -> tuning.Device:
    """A device like this one that has no table."""
    return device._replace(name="no such device")


class Kind:
    """How the entries of one op of the tables are tuned; a subclass per op.

    Attributes:
        op: the op of dispatch.py whose kernel it is.
        module: the kernel's, in kernels/.
        launcher: its function (config, *args) in that module.
        tiny: cases of a dry run.
        backward: whether the kernel runs in backward.
        later: whether another backend serves it by default.
    """

    op: str
    module: str
    launcher: str
    tiny: tuple[testing.Case, ...]
    backward = False

    def cases(self, model: str) -> Iterator[tuple[int, testing.Case]]:
        """(rank, case) of a model's layer."""
        raise NotImplementedError

    def keys(self, case: Any, dtype: torch.dtype) -> tuple[str, ...]:
        """The keys of the entries that `case` times."""
        raise NotImplementedError

    def bucket(self, case: Any) -> int:
        """The bucket that run time looks up for `case`."""
        return tuning.bucket(case.rows)

    def shape(self, case: Any) -> tuple[int, ...]:
        """The first output's, of a kernel of backward."""
        raise NotImplementedError

    def later(self, case: Any) -> bool:
        """Whether dispatch.py's table gives the case to another backend."""
        return False

    def candidates(self, task: Task, device: tuning.Device) -> tuple[Any, ...]:
        """All that the module may run, its own first."""
        raise NotImplementedError

    def heuristic(self, task: Task, device: tuning.Device) -> Any:
        """The config that the module chooses; `device` has no table."""
        raise NotImplementedError

    def work(self, config: Any, task: Task, device: tuning.Device) -> float:
        """A counted time; 0 for all where nothing is counted, which keeps their order."""
        return 0.0

    def tile(self, config: Any) -> tuple:
        """What the config has in common with those that differ in details only, such as stages."""
        return config[:2]

    def launched(self, config: Any, task: Task, default: Any) -> Any:
        """The launcher's config; `default`: the one that it would run with."""
        return config

    def constants(self, case: Any) -> tuple:
        """What decides, beside the config and the dtype, which kernel is compiled."""
        raise NotImplementedError


def shape_of(case: LinearCase) -> tuple:
    """What linear's configs tell apart."""
    return case.in_features, case.out_features, case.activation, case.residual


class Linear(Kind):
    """The product of `linear`."""

    op, module, launcher = "linear", "linear", "linear_fwd_with"
    tiny = (LinearCase(40, 48, 96, "gelu"), LinearCase(9, 48, 96, "gelu"), LinearCase(40, 96, 48))

    def cases(self, model):
        gemms = MODELS[model].gemms()
        for name in ("ffn1", "qkv", "proj", "ffn2"):
            out, k = gemms[name]
            # the bias of the products before a norm goes into the norm
            options = {"activation": "gelu" if name == "ffn1" else None, "bias": name in ("ffn1", "qkv")}
            for rank, bucket in enumerate(ROWS):
                yield rank, LinearCase(2**bucket, k, out, **options)

    def keys(self, case, dtype):
        return (module_of("linear").tuning_key(*shape_of(case), dtype),)

    def later(self, case):
        return case.activation is None

    def candidates(self, task, device):
        return module_of("linear").candidates(task.dtype, device.capability)

    def heuristic(self, task, device):
        rows = 2**task.bucket
        return module_of("linear").config_for(rows, *shape_of(task.case), task.dtype, True, device)

    def work(self, config, task, device):
        return module_of("linear").work(config, 2**task.bucket, task.case.out_features, device)

    def constants(self, case):
        return *shape_of(case), case.bias


class LinearBackward(Kind):
    """The pass of `linear`'s backward."""

    op, module, launcher, backward = "linear", "linear_backward", "activation_bwd_with", True
    tiny = (LinearCase(20, 16, 264, "gelu"),)

    def cases(self, model):
        out, k = MODELS[model].gemms()["ffn1"]
        yield from ((rank, LinearCase(2**bucket, k, out, "gelu")) for rank, bucket in enumerate(TRAINED))

    def keys(self, case, dtype):
        return (module_of("linear_bwd").tuning_key(case.out_features, case.activation, dtype),)

    def shape(self, case):
        return case.rows, case.out_features

    def later(self, case):
        # in training feed_forward serves it
        return True

    def candidates(self, task, device):
        return module_of("linear_bwd").candidates(task.case.out_features)

    def heuristic(self, task, device):
        return module_of("linear_bwd").heuristic(task.case.out_features)

    def constants(self, case):
        return case.out_features, case.activation


class LinearNorm(Kind):
    """`linear_norm` in one launch, which models' calls take where `in_one_launch` counts that it pays."""

    op, module, launcher = "linear_norm", "linear_norm", "linear_norm_fwd_with"
    tiny = (LinearNormCase(20, 48, 40), LinearNormCase(5, 48, 40, arrivals=False))

    def cases(self, model):
        gemms = MODELS[model].gemms()
        # the larger weight first
        for name, bucket in itertools.product(("ffn2", "proj"), FEW_ROWS):
            out, k = gemms[name]
            # beside the same rows of other products
            yield ROWS.index(bucket), LinearNormCase(2**bucket, k, out)

    def keys(self, case, dtype):
        if dtype not in HALF:
            # no kernel
            return ()
        return (module_of("linear_norm").tuning_key(*self.facts(case), dtype),)

    def facts(self, case: LinearNormCase) -> tuple:
        """(in, out, one launch): what the configs tell apart."""
        return case.in_features, case.out_features, case.arrivals

    def candidates(self, task, device):
        return module_of("linear_norm").candidates(task.case.in_features, device.capability)

    def heuristic(self, task, device):
        return module_of("linear_norm").heuristic(2**task.bucket, *self.facts(task.case), device)

    def work(self, config, task, device):
        return module_of("linear_norm").work(config, 2**task.bucket, *self.facts(task.case), device)

    def tile(self, config):
        # parts are work
        return config.block_m, config.block_n, config.split_k

    def constants(self, case):
        return *self.facts(case), case.bias, case.norm_bias


class FeedForwardBackward(Kind):
    """The gradient between the two products of `feed_forward`."""

    op, module, launcher, backward = "feed_forward", "feed_forward", "inner_gradient_with", True
    tiny = (FeedForwardCase(40, 48, 96, 48),)

    def cases(self, model):
        sizes = MODELS[model].hidden, MODELS[model].intermediate, MODELS[model].hidden
        yield from ((rank, FeedForwardCase(2**bucket, *sizes)) for rank, bucket in enumerate(TRAINED))

    def keys(self, case, dtype):
        return (module_of("feed_forward_bwd").tuning_key(case.out, case.inner, case.activation, dtype),)

    def shape(self, case):
        return case.rows, case.out

    def candidates(self, task, device):
        return module_of("feed_forward_bwd").candidates(task.dtype, device.capability)

    def heuristic(self, task, device):
        case = task.case
        sizes = 2**task.bucket, case.out, case.inner, case.activation
        return module_of("feed_forward_bwd").config_for(*sizes, task.dtype, True, device)

    def work(self, config, task, device):
        return module_of("linear").work(config, 2**task.bucket, task.case.inner, device)

    def constants(self, case):
        return case.out, case.inner, case.activation


class LayerNorm(Kind):
    """`layer_norm` after a product, in inference and in training."""

    op, module, launcher = "layer_norm", "layer_norm", "layer_norm_fwd_with"
    tiny = (
        LayerNormCase(12, 264, residual=True, x_bias=True),
        LayerNormCase(5, 264, residual=True, x_bias=True, dropout_p=0.1),
    )

    def cases(self, model):
        for dropout_p in (0.0, 0.1):
            for rank, bucket in enumerate(TRAINED if dropout_p else ROWS[:6]):
                case = LayerNormCase(2**bucket, MODELS[model].hidden, residual=True, x_bias=True)
                yield rank, replace(case, dropout_p=dropout_p)

    def keys(self, case, dtype):
        return (module_of("layer_norm").tuning_key(case.hidden, case.dropout_p > 0, dtype),)

    def candidates(self, task, device):
        return module_of("layer_norm").candidates(task.case.hidden)

    def heuristic(self, task, device):
        return module_of("layer_norm").heuristic(task.case.hidden)

    def constants(self, case):
        return case.hidden, case.dropout_p > 0


class LayerNormBackward(LayerNorm):
    """Its backward, in training."""

    launcher, backward = "layer_norm_bwd_with", True
    tiny = (LayerNormCase(12, 264, residual=True, x_bias=True, dropout_p=0.1),)

    def cases(self, model):
        return (each for each in super().cases(model) if each[1].dropout_p)

    def shape(self, case):
        return case.rows, case.hidden

    def candidates(self, task, device):
        return module_of("layer_norm").bwd_candidates(task.case.hidden)

    def heuristic(self, task, device):
        return module_of("layer_norm").bwd_heuristic(task.case.hidden)


def extras_of(case: AttentionCase) -> str:
    """What the case has beside the products, as attention's configs tell it."""
    return module_of("attention").extras_of(bool(case.bias), case.dropout_p > 0, case.probs)


class Attention(Kind):
    """`attention` over equal lengths, in inference and in training, and with a bias per key."""

    op, module, launcher = "attention", "attention", "attention_fwd_with"
    tiny = (
        AttentionCase((17, 17), 2, 16, packed_qkv=True),
        AttentionCase((20, 20), 2, 16, packed_qkv=True, dropout_p=0.1),
    )

    def cases(self, model):
        sizes = MODELS[model]
        for dropout_p, bias in ((0.0, ""), (0.1, ""), (0.1, "keys")):
            for rank, bucket in enumerate(SEQLENS):
                lengths = (2**bucket,) * (TOKENS[dropout_p] >> bucket)
                heads = sizes.heads, sizes.hidden // sizes.heads
                yield rank, AttentionCase(lengths, *heads, packed_qkv=True, dropout_p=dropout_p, bias=bias)

    def keys(self, case, dtype):
        return (module_of("attention").tuning_key(case.headdim, dtype, extras_of(case)),)

    def bucket(self, case):
        return tuning.bucket(case.max_seqlen)

    def later(self, case):
        # models pack their batches: they pass no bias
        return bool(case.bias)

    def candidates(self, task, device):
        facts = task.case.headdim, task.dtype, extras_of(task.case), device.capability
        return module_of("attention").candidates(*facts)

    def heuristic(self, task, device):
        case, rows = task.case, tuning.bucket(task.case.total * task.case.nheads)
        facts = case.headdim, task.dtype, extras_of(case), task.bucket, rows
        return module_of("attention").config_for(*facts, device)

    def constants(self, case):
        return case.headdim, extras_of(case)


class AttentionBackward(Attention):
    """One kernel of attention's backward; all of them are timed, one with another config."""

    module, launcher, backward = "attention_backward", "attention_bwd_with", True
    tiny = (
        AttentionCase((40, 33), 2, 16, packed_qkv=True, dropout_p=0.1),
        AttentionCase((40, 33), 2, 16, packed_qkv=True),
    )

    def cases(self, model):
        return ((rank, case) for rank, case in super().cases(model) if not case.bias)

    def shape(self, case):
        return case.total, case.nheads, case.headdim

    def facts(self, case: AttentionCase, dtype: torch.dtype) -> tuple:
        """(headdim, dtype, extras, saved): what the configs tell apart."""
        # in half precision forward saves the bits: fastbert.ops.dropout.SAVED_ON
        return case.headdim, dtype, False, case.dropout_p > 0

    def keys(self, case, dtype):
        if dtype == torch.float32:
            # one config each
            return ()
        backward = module_of("attention_bwd")
        return tuple(backward.tuning_key(part, *self.facts(case, dtype)) for part in backward.TUNED_PARTS)

    def candidates(self, task, device):
        facts = self.facts(task.case, task.dtype)
        return module_of("attention_bwd").candidates(part_of(task), *facts, device.capability)

    def heuristic(self, task, device):
        rows = tuning.bucket(task.case.total * task.case.nheads)
        facts = *self.facts(task.case, task.dtype), task.bucket, rows
        return getattr(module_of("attention_bwd").configs_for(*facts, device), part_of(task))

    def launched(self, config, task, default):
        return default._replace(**{part_of(task): config})

    def constants(self, case):
        return case.headdim, case.dropout_p > 0


def part_of(task: Task) -> str:
    """The kernel of attention's backward: the last word of the key."""
    return task.key.split()[-1]


# In order of importance where their ranks are equal.
KINDS: dict[str, Kind] = {
    "linear": Linear(),
    "attention": Attention(),
    "layer_norm": LayerNorm(),
    "linear_norm": LinearNorm(),
    "feed_forward_bwd": FeedForwardBackward(),
    "attention_bwd": AttentionBackward(),
    "layer_norm_bwd": LayerNormBackward(),
    "linear_bwd": LinearBackward(),
}
OPS = tuple(dict.fromkeys(kind.op for kind in KINDS.values()))


def tasks_of(op: str, case: testing.Case, dtype: torch.dtype, rank: int = 0) -> list[Task]:
    """The entries of `op` that `case` times."""
    kind = KINDS[op]
    return [Task(op, key, kind.bucket(case), case, dtype, rank) for key in kind.keys(case, dtype)]


def tasks(ops: Iterable[str], models: list[str], dtypes: list[torch.dtype], tiny: bool) -> list[Task]:
    """All entries of the tables of dispatch's `ops`, each once, those that matter most first.

    That is by dtype, then what the table of dispatch.py gives to Triton, then large batches before small
    ones, then KINDS, then models.
    """
    found: dict[str, Task] = {}
    for dtype, (op, kind) in itertools.product(dtypes, KINDS.items()):
        if kind.op in ops:
            ranked = [(0, c) for c in kind.tiny] if tiny else [r for m in models for r in kind.cases(m)]
            for rank, case in ranked:
                for task in tasks_of(op, case, dtype, rank):
                    found.setdefault(task.name, task)
    order = list(KINDS)
    return sorted(
        found.values(), key=lambda t: (dtypes.index(t.dtype), is_later(t), t.rank, order.index(t.op))
    )


def is_later(task: Task) -> bool:
    """Whether the task can come later: another backend serves its case by default."""
    return KINDS[task.op].later(task.case)


def candidates(task: Task, device: tuning.Device) -> list[Any]:
    """The configs to time, the heuristic's first, at most MOST; in the same order on every run.

    The other configs are ranked by the place of their tile among those with the least work, plus twice their
    place among the configs of that tile.
    """
    kind, device = KINDS[task.op], facts_of(device)
    rivals: dict[tuple, list[Any]] = {}
    for config in kind.candidates(task, device):
        rivals.setdefault(kind.tile(config), []).append(config)
    works = {tile: min(kind.work(c, task, device) for c in configs) for tile, configs in rivals.items()}
    near = [tile for tile in sorted(rivals, key=works.get) if works[tile] <= NEAR * min(works.values())]
    places = {c: place + 2 * at for place, tile in enumerate(near) for at, c in enumerate(rivals[tile])}
    return list(dict.fromkeys([heuristic(task, device), *sorted(places, key=places.get)]))[:MOST]


def heuristic(task: Task, device: tuning.Device) -> Any:
    """The config that the module chooses without a table."""
    return KINDS[task.op].heuristic(task, facts_of(device))
