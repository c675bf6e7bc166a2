"""Time the configs of the Triton kernels on this GPU, and write the fastest to kernels/tuned/<gpu>.json.

    python bench/tune.py [--op OP] [--dtype bfloat16] [--model base] [--budget 240] [--json FILE]
    python bench/tune.py --jobs 16                     compile by so many processes first; default: all cores
    python bench/tune.py --merge FILE                  add what --json FILE recorded, here or elsewhere
    python bench/tune.py --device cpu --out FILE       tries the code, tiny, in Triton's interpreter

One entry for each kernel, shape of BERT-base and -large, dtype and bucket of rows, or of the longest sequence
(attention): `linear`, `attention` and `layer_norm`, forward and backward, the gradient between the two
products of `feed_forward`, and `linear_norm`. Kernels that dispatch.py's table gives to Triton come first, in
the first dtype, and of these the large batches. The candidates are those of the kernel's own module, which
tests/support/triton_compile.py compiles for other GPUs: without spills, within shared memory.

At most 12 candidates per entry are timed. The config that the module's heuristic chooses is the first. The
others are pruned by a count: a tile is left out where the busiest multiprocessor would have more than 1.5
times the work that it has with the best tile (products; see `work` of kernels/linear.py, and of
kernels/linear_norm.py, where each number of parts counts as a tile of its own). The tiles that are left are
tried in the order of their work, and each in several depths, stages and orders: the first 6 tiles, the second
form of the first 4, and the third of the first 2, where there are so many.

A candidate that does not compile, or breaks the error rule at the shape that is timed, is recorded and left
out. Of a kernel of backward all gradients are compared. The others are timed turn by turn. The heuristic's
config stays unless another is 1% faster. The two kernels of attention's backward are entries of their own,
timed as all of that backward.

The table is written after every entry, merged into what the file held. When the budget is spent, the other
entries stay as they were. At run time nothing is timed: kernels/tuning.py reads the table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.lib.machine import describe  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402
from bench.lib.report import Report, write_atomically  # noqa: E402
from bench.lib.timing import interleave, rotations, synchronize  # noqa: E402
from bench.lib.tuned import merge, read_table, with_entry  # noqa: E402
from bench.lib.workloads import MODELS  # noqa: E402
from fastbert import testing  # noqa: E402
from fastbert.kernels import tuning  # noqa: E402
from fastbert.runtime import dispatch  # noqa: E402
from fastbert.testing.error_rule import with_grad  # noqa: E402
from fastbert.testing.op_cases.attention import AttentionCase  # noqa: E402
from fastbert.testing.op_cases.feed_forward import FeedForwardCase  # noqa: E402
from fastbert.testing.op_cases.layer_norm import LayerNormCase  # noqa: E402
from fastbert.testing.op_cases.linear import LinearCase  # noqa: E402
from fastbert.testing.op_cases.linear_norm import LinearNormCase  # noqa: E402

BUDGET_SECONDS = 240.0
TOKENS = {0.0: 16_384, 0.1: 4096}  # by dropout_p: batches that fill the GPU; the oracle's bits take memory
AHEAD = 0.35  # of the budget, at most, to compile before anything is timed
WORTH = 0.99  # of the heuristic's time: a smaller gain is noise
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
        dtype: of the case.
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


# ---- What is tuned ----


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
    """`linear_norm` in one launch, as models call it."""

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
        if dtype not in testing.HALF:
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
        found.values(),
        key=lambda t: (dtypes.index(t.dtype), is_later(t), t.rank, order.index(t.op)),
    )


def is_later(task: Task) -> bool:
    """Whether the task can come later: another backend serves its case by default."""
    return KINDS[task.op].later(task.case)


def candidates(task: Task, device: tuning.Device) -> list[Any]:
    """The configs to time, the heuristic's first, at most MOST; in the same order on every run.

    The others are ranked by the place of their tile, of those with the least work, and twice their place
    among the configs of that tile.
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


# ---- One entry ----


def trains(task: Task) -> bool:
    """Whether the case runs as in training, where forward saves what backward needs."""
    return KINDS[task.op].backward or getattr(task.case, "dropout_p", 0.0) > 0


@contextlib.contextmanager
def launcher_of(task: Task, launcher: Callable[..., Any]) -> Iterator[None]:
    """`launcher`, which gets the real one before its arguments, in the place of the task's."""
    module, name = module_of(task.op), KINDS[task.op].launcher
    real = getattr(module, name)
    setattr(module, name, functools.partial(launcher, real))
    try:
        with dispatch.use_backend(**{KINDS[task.op].op: "triton"}):
            yield
    finally:
        setattr(module, name, real)


def evaluate(task: Task, function: Callable, inputs: dict, dtype: torch.dtype | None = None) -> dict:
    """What the error rule compares of `function`: the first output; of a kernel of backward the gradients."""
    case, kind = task.case, KINDS[task.op]
    if not kind.backward:
        wanted = case.grad_inputs if trains(task) and function == case.call else ()
        with torch.set_grad_enabled(bool(wanted)):
            output = first(function(**with_grad(inputs, wanted, dtype)))
        return {case.output_names[0]: output.detach()}
    randn = torch.randn(kind.shape(case), generator=torch.Generator().manual_seed(1))
    dout = randn.to(task.dtype).to(device_of(inputs))
    found = testing.evaluate(function, case, inputs, dtype, True, [dout])
    return {name: value for name, value in found.items() if name not in case.output_names}


def device_of(inputs: dict) -> torch.device:
    """Where the inputs are."""
    return next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))


def launches(task: Task, sets: list[dict]) -> list[Callable[[Any], Any]]:
    """For each set of inputs a function from a config to a launch, without the op around it."""
    kind, seen = KINDS[task.op], []

    def record(real: Callable, default: Any, *args: Any) -> Any:
        seen.append(functools.partial(launch, real, default, args))
        return real(default, *args)

    def launch(real: Callable, default: Any, args: tuple, config: Any) -> Any:
        return real(kind.launched(config, task, default), *args)

    with launcher_of(task, record):
        for inputs in sets:
            evaluate(task, task.case.call, inputs)
    if len(seen) != len(sets):
        raise RuntimeError(
            f"{task.op}: its public op does not reach kernels/{kind.module}.{kind.launcher} once a call"
        )
    return seen


def computed(task: Task, config: Any, inputs: dict) -> dict[str, torch.Tensor]:
    """What the public op computes where the task's kernel runs with `config`."""

    def chosen(real: Callable, default: Any, *args: Any) -> Any:
        return real(KINDS[task.op].launched(config, task, default), *args)

    with launcher_of(task, chosen):
        return evaluate(task, task.case.call, inputs)


def first(output: Any) -> torch.Tensor:
    """The op's main output."""
    return output[0] if isinstance(output, tuple) else output


def expected(task: Task, inputs: dict) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(plain PyTorch in the dtype, the truth in float32, which is exact compared with half precision)."""
    wide = torch.float32 if task.dtype in testing.HALF else torch.float64
    return evaluate(task, task.case.eager, inputs), evaluate(task, task.case.eager, inputs, wide)


def wrong(task: Task, config: Any, inputs: dict, eager: dict, truth: dict) -> str:
    """Which result of a config breaks the error rule, and how; "" where none does."""
    for name, actual in computed(task, config, inputs).items():
        floor = task.case.floor(inputs, name) if task.dtype not in testing.HALF else 0.0
        *_, reason = testing.compare(actual, eager[name], truth[name], task.dtype, floor)
        if reason:
            return f"{name}: {reason}" if KINDS[task.op].backward else reason
    return ""


def tune(task: Task, device: torch.device, tiny: bool, left: Callable[[], float]) -> Iterator[dict]:
    """Rows of one entry: each candidate, then the choice, which has `config` and `entry`: its place."""
    facts = tuning.device_of(device)
    entry = {"step": "tuning", "name": task.name, "entry": [task.op, task.key, task.bucket]}
    usual = heuristic(task, facts)
    configs = candidates(task, facts)
    count = 1 if tiny else rotations(task.case.bytes(task.dtype), device, limit=8)
    sets = [task.case.inputs(task.dtype, device, seed) for seed in range(count)]
    runs = launches(task, sets)
    eager, truth = expected(task, sets[0])
    good, tried = {}, 0
    for config in configs:
        if good and left() <= 0:
            break
        tried += 1
        row = {"step": "tuning", "name": f"{task.name} {label(config)}", "status": "ok"}
        try:
            reason = wrong(task, config, sets[0], eager, truth)
            synchronize(device)
        except Exception as error:
            yield row | {"status": "error", "error": reason_of(error)}
            synchronize(device)  # raises where nothing runs on the GPU any more
            continue
        if reason:
            yield row | {"status": "error", "error": f"wrong: {reason}"}
        else:
            good[config] = [functools.partial(run, config) for run in runs]
    if not good:
        yield entry | {"status": "error", "error": "no config works here"}
        return
    options = {"samples": (1, 1), "warmup": 0} if tiny else {"samples": (7, 40), "seconds": 0.05}
    times = interleave(good, device, **options)
    for config, timing in times.items():
        facts_of = {key: value for key, value in asdict(timing).items() if value is not None}
        yield {"step": "tuning", "name": f"{task.name} {label(config)}", "status": "ok", **facts_of}
    best = min(times, key=lambda config: times[config].median_ms)
    if usual in times and times[best].median_ms > WORTH * times[usual].median_ms:
        best = usual
    gain = times[usual].median_ms / times[best].median_ms if usual in times else None
    chosen = {"config": best._asdict(), "usual": usual._asdict(), "gain": gain}
    yield entry | {"status": "ok", **chosen, "tried": tried, "of": len(configs)}


def tuned(task: Task, device: torch.device, tiny: bool, left: Callable[[], float]) -> Iterator[dict]:
    """`tune`; an entry that cannot be prepared, for example for lack of memory, is a row."""
    try:
        yield from tune(task, device, tiny, left)
    except Exception as error:
        entry = {"step": "tuning", "name": task.name, "entry": [task.op, task.key, task.bucket]}
        yield entry | {"status": "error", "error": reason_of(error)}
        synchronize(device)  # raises where nothing runs on the GPU any more: the run ends here


# ---- Compiling ahead ----


def signature(task: Task) -> tuple:
    """What decides which kernels the task's configs compile to; the number of rows does not."""
    return task.op, task.dtype, *KINDS[task.op].constants(task.case)


def compile_units(todo: list[Task], device: tuning.Device) -> list[tuple[Task, Any]]:
    """(task, config) of every kernel that the tasks need, each once, by the task with the fewest rows.

    In the order of the tasks: where time is short, what is timed first is compiled.
    """
    least: dict[tuple, Task] = {}
    for task in sorted(todo, key=lambda task: task.bucket):
        least.setdefault((*signature(task), part_of(task)), task)
    units = [(least[*signature(t), part_of(t)], config) for t in todo for config in candidates(t, device)]
    return list(dict.fromkeys(units))


def compile_slice(units: list[tuple[Task, Any]], device: torch.device) -> int:
    """Launch each config once, so that Triton's cache on the disk holds it; how many work."""
    good, runs = 0, {}
    for task, config in units:
        try:
            if task.name not in runs:
                runs = {task.name: launches(task, [task.case.inputs(task.dtype, device)])[0]}
            runs[task.name](config)
            synchronize(device)
            good += 1
        except Exception as error:
            # the row of this config will say so
            print(f"  {task.name} {label(config)}: {reason_of(error)[:140]}", flush=True)
    return good


def compile_ahead(argv: list[str], jobs: int, seconds: float) -> None:
    """Compile all configs in `jobs` processes of this script, each a share of them, for at most `seconds`."""
    begin = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), *argv]
    running = [subprocess.Popen([*command, "--slice", f"{i}/{jobs}"]) for i in range(jobs)]
    for process in running:
        try:
            process.wait(max(0.1, seconds - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    statuses = [process.returncode for process in running]
    print(f"# compiled ahead for {time.monotonic() - begin:.0f} s, {jobs} at once; {statuses}", flush=True)


def slice_of(text: str) -> tuple[int, int]:
    """ "2/16": the third of 16 shares."""
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise argparse.ArgumentTypeError(f"got {text}, expected such as 0/16")
    return int(first), int(count)


def label(config: Any) -> str:
    """A config in a row's name; "n" for None."""
    return "_".join("n" if value is None else str(int(value)) for value in config)


# ---- The command ----


def line(row: dict) -> str:
    """The printed form of a row."""
    if row["status"] != "ok":
        return f"  {row['name']}: {row['error'].splitlines()[0][:140]}"
    if "entry" not in row:
        return f"  {row['name']}: {row['median_ms'] * 1e3:,.1f} us, spread {row['spread']:.0%}"
    gain = "" if row["gain"] is None else f", {row['gain']:.2f} x the heuristic's"
    values = label(row["config"].values())
    return f"{row['name']}: {values}{gain}, {row['tried']} of {row['of']} configs"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--op", choices=OPS, action="append", help="only this op (may be repeated)")
    parser.add_argument("--model", choices=("base", "large"), action="append", help="may be repeated; both")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        action="append",
        help="may be repeated; default: bfloat16, then float16",
    )
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds in all (240)")
    parser.add_argument("--out", type=Path, help="the table; default: kernels/tuned/<gpu>.json")
    parser.add_argument("--json", type=Path, help="record every candidate here too, *.json or *.jsonl")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="time nothing; take over this record")
    parser.add_argument("--jobs", type=int, help="processes that compile ahead; default: the cores, on a GPU")
    parser.add_argument("--slice", type=slice_of, metavar="I/N", help="only compile a share of the configs")
    args = parser.parse_args(argv)
    if not args.budget > 0:
        parser.error(f"--budget {args.budget}: expected seconds above 0")
    if args.jobs is None:
        args.jobs = len(os.sched_getaffinity(0)) if args.device == "cuda" else 0
    if args.jobs < 0:
        parser.error(f"--jobs {args.jobs}: expected a number of processes, or 0 for none")
    if args.merge is not None:
        return args
    if args.device == "cpu" and args.out is None:
        parser.error("--device cpu: tries the code only, and needs --out FILE for what it finds")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    return args


def main(argv: list[str] | None = None) -> int:
    """Tune what the arguments name; the exit status is 1 where an entry found no config that works."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        return run(args, argv)
    except ValueError as error:
        print(f"tune: error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """What `main` does after the arguments are read."""
    if args.merge is not None:
        path, count = merge(args.merge, args.out)
        print(f"# {count} entries of {args.merge} are in {path}")
        return 0
    begin = time.monotonic()
    tiny = args.device == "cpu"
    if tiny:
        os.environ["TRITON_INTERPRET"] = "1"
        from fastbert.testing import triton_interpreter  # without it the interpreter computes bfloat16 wrong

        triton_interpreter.choose()
        torch.set_num_threads(1)
    device = (
        torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    )
    name = tuning.device_of(device).name
    path = args.out or tuning.file_of(name)
    table = read_table(path, name)
    dtypes = [getattr(torch, each) for each in args.dtype or ("bfloat16", "float16")]
    todo = tasks(args.op or OPS, args.model or ["base", "large"], dtypes, tiny)
    if args.slice is not None:
        first, count = args.slice
        units = compile_units(todo, tuning.device_of(device))[first::count]
        print(f"# slice {first}/{count}: {compile_slice(units, device)} of {len(units)} work", flush=True)
        return 0
    settings = {key: str(value) for key, value in vars(args).items() if value is not None}
    report = Report(args.json, settings, None, line)
    report.data["environment"] = describe(device)
    report.save()
    print(f"# {name}: {len(todo)} entries of {path}", flush=True)
    if args.jobs > 1:
        compile_ahead(argv, args.jobs, AHEAD * args.budget)

    def left() -> float:
        return args.budget - (time.monotonic() - begin)

    done, failed = 0, 0
    for task in todo:
        if left() <= 0:
            print(f"# the budget is spent: {len(todo) - done} entries are left as they were", flush=True)
            break
        for row in tuned(task, device, tiny, left):
            report.row(row)
            failed += "entry" in row and row["status"] != "ok"
            if "config" in row:
                table = with_entry(table, row["entry"], row["config"])
                write_atomically(path, table)
        done += 1
    report.data["finished"] = done == len(todo)
    report.save()
    print(f"# {done} of {len(todo)} entries in {time.monotonic() - begin:.0f} s, {failed} without a config")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
