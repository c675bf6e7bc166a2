"""The checks of `make gpu`, one per call: `python bench/gpu/checks.py correctness --json FILE`.

| check | what must hold |
|---|---|
| `correctness` | the error rule for every GPU kernel, case and dtype, unwritten memory being NaN |
| `determinism` | 250 runs of every kernel are bit-equal, the backward too where there is one |
| `graphs` | a call captured once and replayed on new inputs returns an eager call's bits |
| `stream` | on its own stream, behind a delay, every kernel returns the same bits |
| `memory` | 300 batches of other lengths do not grow memory |
| `sanitizer` | compute-sanitizer's memcheck and racecheck find nothing in the tiny cases |
| `sanitizer-hopper` | the same for the CUDA kernels for compute capability 9.0, backward too |

Each op is checked in its own process with a time limit: a kernel that hangs or destroys the device's
context is a row, and the other ops are still checked. Rows are appended to FILE at once. The exit status is
1 if a check failed. With `--device cpu` the Triton kernels run in Triton's interpreter, on tiny cases.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from bench.gpu import tools
from bench.gpu.engines import graph_of
from bench.lib import lines, workloads
from bench.lib.engines import config_of, encoder_of
from bench.lib.kernels import poisoned
from bench.lib.machine import describe, interpret
from bench.lib.probe_steps import reason_of
from bench.lib.report import Report
from bench.lib.roofs import TAGS
from fastbert import testing
from fastbert.runtime import dispatch
from fastbert.runtime.namespaces import has_backward

BACKENDS = ("triton", "cuda")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
REPEATS, REPLAYS, LENGTHS = 250, 20, 300
GRAPH_ERROR = 1e-2  # of two bf16 encoders that sum in different orders, as a share of the norm
DELAY_CYCLES = 20_000_000  # about 10 ms: what does not wait for its stream comes too early
CASES = 4  # of an op that one process checks for correctness
UNIT_BYTES = 5 << 30  # of a GPU's memory that a process may take, so many run side by side
TRAINING = (512, 300, 500, 257) * 4  # lengths that take the tiles of real work, whole ones and last ones
UNIT_SECONDS = 120.0  # most a unit may take
FAILED = 17  # exit status of a unit's process that has recorded what failed
# Encoders whose graphs are checked beside BERT's; 6 heads leave room for DeBERTa's scores of distances
FAMILIES = {
    name: dataclasses.replace(workloads.MODELS[name], hidden=384, layers=2, heads=6)
    for name in ("modernbert", "deberta-v3")
}
SLACK_BYTES = 8 << 20  # by which memory may move
RSS_BYTES = 96 << 20  # host memory; compiled kernels lie there


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one process checks; with `backend` None, the whole encoder, BERT's or that of a family in `op`.

    Attributes:
        part: (which, of how many) shares of the op's cases; each has a process of its own.
    """

    op: str
    backend: str | None
    dtype: torch.dtype
    part: tuple[int, int] = (0, 1)

    @property
    def name(self) -> str:
        """As rows name it."""
        return "-".join(filter(None, (self.op, self.backend, TAGS[self.dtype])))

    @property
    def process(self) -> str:
        """As rows name its process, where that did not end well."""
        which, count = self.part
        return self.name if count == 1 else f"{self.name}-part-{which + 1}-of-{count}"


def op_units(dtypes: tuple[torch.dtype, ...]) -> list[Unit]:
    """Every op of every GPU backend. Only a unit's own process asks whether it can run here: CUDA must not be
    initialised in the process that forks them.
    """
    units = [
        Unit(op, backend, dtype)
        for dtype in dtypes
        for backend in BACKENDS
        for op in dispatch.OPS
        if op in dispatch.backend_module(backend).DTYPES
    ]
    # by dtype, and of each the longest first
    return sorted(units, key=lambda unit: (dtypes.index(unit.dtype), unit.op not in ("attention", "linear")))


def encoder_units() -> list[Unit]:
    """The encoders whose graphs are checked."""
    return [Unit(name, None, torch.bfloat16) for name in ("encoder", *FAMILIES)]


def shares(units: list[Unit]) -> list[Unit]:
    """The units in parts of a few cases each: kernels compile in as many processes as there are cores."""
    found = []
    for unit in units:
        count = math.ceil(len(cases_of(unit)) / CASES)
        found += [dataclasses.replace(unit, part=(which, count)) for which in range(count)]
    return found


@dataclasses.dataclass
class Check:
    """Where and how large a check runs, and where its rows go."""

    name: str
    device: torch.device
    emit: Callable[[dict], None]
    end: float = math.inf  # time.monotonic() at which the budget is spent

    @property
    def tiny(self) -> bool:
        """Whether the run is a dry run with tiny shapes."""
        return self.device.type == "cpu"

    def left(self) -> float:
        return self.end - time.monotonic()

    def row(self, name: str, status: str, error: str | None = None, **facts) -> None:
        row = {"step": self.name, "name": name, "status": status}
        self.emit(row | ({"error": error[:2000]} if error else {}) | facts)

    def verdict(self, name: str, problem: str | None, **facts) -> None:
        """Hand over a row: `ok`, or `failed` with the problem."""
        self.row(name, "failed" if problem else "ok", problem, **facts)


def gap(check: Check, unit: Unit) -> str | None:
    """Why the unit does not run on this device; None if it does."""
    return dispatch.unsupported_reason(unit.backend, unit.op, check.device.type, unit.dtype)


def cases_of(unit: Unit) -> list[testing.Case]:
    """Every case of the op, those of a self-check on a GPU, what training calls with its dropout, and
    BERT-base's shapes for some SQuAD lengths.
    """
    found = [*testing.cases(unit.op), *testing.gpu_cases(unit.op)]
    found += testing.training_cases(unit.op, TRAINING)
    return [*found, *testing.bench_cases(unit.op, workloads.lengths("squad")[:24])]


def cases(check: Check, unit: Unit) -> list[testing.Case]:
    """The unit's part of the cases of its op; interpreted, a tiny one."""
    if check.tiny:
        return testing.small_cases(unit.op)[:1]
    which, count = unit.part
    return cases_of(unit)[which::count]


def one_case(check: Check, unit: Unit) -> testing.Case:
    """The op's case that looks most like BERT."""
    return cases(check, unit)[-1]


def replayed_case(check: Check, unit: Unit) -> testing.Case:
    """The op's last case with dropout, whose mask must follow the seed's content; `one_case` without any."""
    found = [case for case in cases(check, unit) if getattr(case, "dropout_p", 0.0)]
    return found[-1] if found else one_case(check, unit)


# ---- The checks ----


def correctness(check: Check, unit: Unit) -> None:
    for case in cases(check, unit):
        name = f"{unit.name}-{case.id}"
        with recorded(check, name), poisoned():
            # a trial: calls that the backend hands on start no self-checks, which would take the step's time
            rows = testing.run_case(case, unit.backend, unit.dtype, check.device, pin=dispatch.trial)
            failed = [f"{row.quantity}: {row.reason}" for row in rows if not row.passed]
            worst = max(rows, key=lambda row: row.max_error / max(row.eager_max_error, 1e-300))
            facts = {"quantities": len(rows), "quantity": worst.quantity, "max_error": worst.max_error}
            facts |= {"eager_max_error": worst.eager_max_error, "op": unit.op, "backend": unit.backend}
            check.verdict(name, "; ".join(failed) or None, dtype=TAGS[unit.dtype], **facts)
        gc.collect()


@contextlib.contextmanager
def recorded(check: Check, name: str) -> Iterator[None]:
    """Turn an exception of the body into a failed row."""
    try:
        yield
    except Exception as error:
        check.row(name, "failed", reason_of(error))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits: -0 is not 0, and a NaN is itself."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(sizes[tensor.element_size()])


def equal_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> torch.Tensor:
    """Whether all are bit-equal, as a tensor on the device: the host does not wait."""
    same = [(bits(actual[name]) == bits(value)).all() for name, value in expected.items()]
    return torch.stack(same).all()


def evaluator(
    check: Check, unit: Unit, case: testing.Case, inputs: dict, backward: bool
) -> Callable[[], dict[str, torch.Tensor]]:
    """A call of the op on `inputs`: its outputs, and with `backward` the gradients. Pin the backend."""
    douts = []
    if backward:
        with torch.no_grad():
            outputs = case.call(**inputs)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            generator = torch.Generator().manual_seed(1)
            douts.append(torch.randn(output.shape, generator=generator).to(unit.dtype).to(check.device))
    return lambda: testing.evaluate(case.call, case, inputs, None, backward, douts)


def determinism(check: Check, unit: Unit) -> None:
    case, repeats = one_case(check, unit), 3 if check.tiny else REPEATS
    with recorded(check, unit.name), dispatch.use_backend(**{unit.op: unit.backend}):
        backward = has_backward(unit.backend, unit.op)
        inputs = case.inputs(unit.dtype, check.device)
        call = evaluator(check, unit, case, inputs, backward)
        first = {name: value.clone() for name, value in call().items()}
        same = torch.stack([equal_bits(call(), first) for _ in range(repeats)])
        different = int((~same).sum())
        problem = f"{different} of {repeats} repeats differ from the first run" if different else None
        check.verdict(unit.name, problem, repeats=repeats, case=case.id, backward=backward)


def swapped(case: testing.Case, check: Check, unit: Unit, static: dict, seed: int) -> dict:
    """Copy the floating-point inputs of another seed, and its dropout, into `static`; returns the op's eager
    results for them.
    """
    fresh = case.inputs(unit.dtype, check.device, seed)
    for name, value in fresh.items():
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or name == "seed"):
            static[name].copy_(value)
    return evaluator(check, unit, case, static, False)()


def graphs(check: Check, unit: Unit) -> None:
    """Replays of a captured call."""
    if unit.backend is None:
        encoder_graphs(check, unit)
        return
    if check.tiny:
        check.row(unit.name, "skipped", "CUDA graphs need a GPU")
        return
    case = replayed_case(check, unit)
    with recorded(check, unit.name), dispatch.use_backend(**{unit.op: unit.backend}):
        inputs = case.inputs(unit.dtype, check.device)
        call = evaluator(check, unit, case, inputs, False)
        graph, static = graph_of(call)
        same = []
        for seed in range(1, REPLAYS + 1):
            expected = swapped(case, check, unit, inputs, seed)
            graph.replay()
            same.append(equal_bits(static, expected))
        different = int((~torch.stack(same)).sum())
        problem = f"{different} of {REPLAYS} replays differ from an eager call" if different else None
        check.verdict(unit.name, problem, replays=REPLAYS, case=case.id)


def encoder_graphs(check: Check, unit: Unit) -> None:
    """The whole encoder by fastbert.graphs: as without graphs, bit-equal each time, current weights."""
    from fastbert.graphs import recorder as recorders
    from fastbert.graphs.model import graph

    if check.tiny and unit.op == "deberta-v3":
        reason = "interpreted kernels mark weights as written, from which its tables of distances are made"
        check.row(unit.name, "skipped", reason)
        return
    with recorded(check, unit.name), dispatch.use_backend(**pins(check, unit.dtype)), torch.no_grad():
        module, model = encoder(check, unit.dtype, FAMILIES.get(unit.op))
        recorder = recorders.EagerRecorder if check.tiny else recorders.recorder_for
        graphed = graph(module, max_tokens=4096, max_batch=8, recorder=recorder)
        problems, worst = [], 0.0
        for index in range(2 if check.tiny else REPLAYS):
            inputs = workloads.padded_inputs(
                some_lengths(index, check.tiny), model.vocab, check.device, index
            )
            if not module.family.segments:
                del inputs["token_type_ids"]
            if index == 1:
                for weight in module.layer_list()[0].parameters():
                    weight.mul_(1.5)
            first, again = (graphed(**inputs).last_hidden_state for _ in range(2))
            if graphed.last_fallback is not None:
                problems.append(f"batch {index} was not replayed: {graphed.last_fallback}")
            if not torch.equal(bits(first), bits(again)):
                problems.append(f"batch {index}: two replays differ")
            plain = module(**inputs).last_hidden_state.double()
            worst = max(worst, ((first - plain).norm() / plain.norm()).nan_to_num(nan=math.inf).item())
        if worst > GRAPH_ERROR:  # rows padded to a bucket may be multiplied in another order
            problems.append(f"{worst:.3g} away from the model itself, {GRAPH_ERROR:.3g} allowed")
        facts = {"replays": graphed.replays, "graphs": len(graphed.graphs), "bytes_held": graphed.bytes_held}
        check.verdict(unit.name, "; ".join(problems) or None, relative_error=worst, **facts)


def stream(check: Check, unit: Unit) -> None:
    """The same bits on a stream of its own, where the inputs come late."""
    if check.tiny:
        check.row(unit.name, "skipped", "streams need a GPU")
        return
    case = one_case(check, unit)
    with recorded(check, unit.name), dispatch.use_backend(**{unit.op: unit.backend}):
        inputs = case.inputs(unit.dtype, check.device)
        call = evaluator(check, unit, case, inputs, False)
        expected = {name: value.clone() for name, value in call().items()}
        floating = {
            name: (value, value.clone())
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
        different = 0
        for _ in range(5):
            for value, _ in floating.values():
                value.fill_(float("nan"))
            torch.cuda.synchronize()
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                torch.cuda._sleep(DELAY_CYCLES)
                for value, kept in floating.values():
                    value.copy_(kept)
                different += not bool(equal_bits(call(), expected))
            torch.cuda.synchronize()
        problem = f"{different} of 5 runs on a side stream differ" if different else None
        check.verdict(unit.name, problem, case=case.id)


def encoder(check: Check, dtype: torch.dtype, model: workloads.Model | None = None):
    """Our encoder with random weights on the device; tiny in the dry run, else two of BERT-base's layers."""
    torch.manual_seed(0)
    if model is None:
        model = workloads.TINY if check.tiny else dataclasses.replace(workloads.BASE, layers=2)
    elif check.tiny:
        model = dataclasses.replace(model, hidden=64, heads=2, intermediate=128)
    return encoder_of(config_of(model)).to(check.device, dtype), model


def some_lengths(index: int, tiny: bool) -> tuple[int, ...]:
    """Another mix of lengths for each index."""
    most, batch = (9, 2) if tiny else (384, 1 + index % 7)
    return tuple(1 + (7919 * (index + 1) * (i + 3) + index) % most for i in range(batch))


def pins(check: Check, dtype: torch.dtype) -> dict[str, str]:
    """For every op that CUDA or Triton serves here, the first of the two."""
    found = {}
    for op, backend in itertools.product(dispatch.OPS, reversed(BACKENDS)):
        if dispatch.unsupported_reason(backend, op, check.device.type, dtype) is None:
            found.setdefault(op, backend)
    return found


def host_bytes() -> int:
    """Host memory of this process now (its peak where nothing tells)."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def memory(check: Check, unit: Unit) -> None:
    """After many batches of other lengths, memory is as large as before."""
    count, settled = (6, 2) if check.tiny else (LENGTHS, LENGTHS // 3)
    with recorded(check, unit.name), dispatch.use_backend(**pins(check, unit.dtype)), torch.no_grad():
        module, model = encoder(check, unit.dtype)
        used: list[tuple[int, int]] = []
        for index in range(count):
            lengths = some_lengths(index, check.tiny)
            inputs = workloads.padded_inputs(lengths, model.vocab, check.device, seed=index)
            hidden = module(**inputs).last_hidden_state
            if not hidden.isfinite().all():
                raise RuntimeError(f"batch {index} of lengths {lengths}: NaN or infinity")
            del inputs, hidden
            used.append((0 if check.tiny else torch.cuda.memory_allocated(check.device), host_bytes()))
        gc.collect()
        device, host = (max(side[settled:]) - side[settled] for side in zip(*used, strict=True))
        grown = [f"{device >> 20} MiB on the device"] * (device > SLACK_BYTES)
        grown += [f"{host >> 20} MiB on the host"] * (host > RSS_BYTES)
        problem = f"grew by {' and '.join(grown)}" if grown else None
        facts = {"lengths": count, "settled": settled, "device_growth": device, "host_growth": host}
        check.verdict(unit.name, problem, **facts)


def sanitizer(check: Check, unit: Unit) -> None:
    """compute-sanitizer over tiny cases, one tool after the other."""
    program = tools.program("compute-sanitizer", check.tiny)
    if not Path(program).is_file():
        check.row(check.name, "skipped", program)
        return
    for tool in ("memcheck", "racecheck"):
        seconds = min(check.left() - 3, 50.0)
        if seconds < 8:
            check.row(f"{check.name}-{tool}", "skipped", f"{seconds:.0f} s left of the budget")
            continue
        check.row(f"{check.name}-{tool}", *tools.sanitized(program, tool, SANITIZED[check.name], seconds))


def tiny_cases() -> int:
    """What the sanitizer watches: the tiny cases of every op of a GPU's kernels, forward."""
    for op, backend in itertools.product(dispatch.OPS, BACKENDS):
        if dispatch.unsupported_reason(backend, op, "cuda", torch.bfloat16) is None:
            with dispatch.use_backend(**{op: backend}), torch.no_grad():
                for case in testing.small_cases(op):
                    case.call(**case.inputs(torch.bfloat16, "cuda"))
                    torch.cuda.synchronize()
                    print(f"{op} {backend} {case.id}", flush=True)
    print("tiny cases: done")
    return 0


def hopper_cases() -> int:
    """What the sanitizer watches: small calls of the CUDA kernels for compute capability 9.0, backward too.

    Calls of this size go to other kernels, but for the products of many rows.
    """
    from fastbert.backends.cuda import attention

    attention.hopper_serves = attention.hopper_reads
    cases = {"attention": ("17_0_5x2x64", "70_19x2x64"), "linear": ("1000x200x1000-gelu",)}
    for op, names in cases.items():
        unit = Unit(op, "cuda", torch.bfloat16)
        for case in (*testing.small_cases(op), *testing.gpu_cases(op)):
            if case.id.startswith(names):
                with dispatch.use_backend(**{op: "cuda"}):
                    inputs = case.inputs(torch.bfloat16, "cuda")
                    evaluator(Check("", torch.device("cuda"), print), unit, case, inputs, True)()
                torch.cuda.synchronize()
                print(f"{op} {case.id}", flush=True)
    print("hopper cases: done")
    return 0


# ---- Each unit in a process of its own ----

# A check of the sanitizer -> what runs under it.
SANITIZED = {"sanitizer": "tiny-cases", "sanitizer-hopper": "hopper-cases"}
CHECKS: dict[str, tuple[Callable[[Check, Unit], None], Callable[[bool], list[Unit]]]] = {
    "correctness": (correctness, lambda tiny: op_units(DTYPES[:1]) if tiny else shares(op_units(DTYPES))),
    "determinism": (determinism, lambda tiny: op_units(DTYPES[:1])),
    "graphs": (graphs, lambda tiny: [*encoder_units(), *op_units(DTYPES[:1])]),
    "stream": (stream, lambda tiny: op_units(DTYPES[:1])),
    "memory": (memory, lambda tiny: [Unit("encoder", None, torch.bfloat16)]),
    **dict.fromkeys(SANITIZED, (sanitizer, lambda tiny: [Unit("sanitizer", None, torch.bfloat16)])),
}


def run_unit(check: Check, unit: Unit) -> None:
    """Check one unit; an exception becomes a row. Ends the process, with status `FAILED` if a row is bad."""
    bad = []
    emit = check.emit

    def noting(row: dict) -> None:
        bad.extend([row] * (row["status"] == "failed"))
        emit(row)

    check = dataclasses.replace(check, emit=noting)
    with recorded(check, unit.name):
        reason = gap(check, unit) if unit.backend is not None else None
        if reason is not None:
            check.row(unit.name, "skipped", reason)
        else:
            CHECKS[check.name][0](check, unit)
    sys.stdout.flush()
    if bad:
        sys.exit(FAILED)


def in_processes(check: Check, units: list[Unit], at_once: int, run=run_unit) -> int:
    """Check each unit in its own process; a timeout or a crash is a row. How many units failed."""
    wrong, one = 0, functools.partial(run, check)
    for unit, status in tools.in_processes(units, one, at_once, check.left, UNIT_SECONDS):
        if status == "skipped":
            check.row(unit.process, status, "the budget is spent")
            continue
        if status == "timeout":
            check.row(unit.process, status, "its process did not end in its time")
        elif status not in (0, FAILED):
            check.row(unit.process, "crashed", f"its process ended with {status}")
        wrong += status != 0
    return wrong


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/gpu/checks.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=(*CHECKS, *SANITIZED.values()))
    parser.add_argument("--op", choices=dispatch.OPS, action="append", help="only this op (may be repeated)")
    tags = [TAGS[dtype] for dtype in DTYPES]
    parser.add_argument("--dtype", choices=tags, action="append", help="only this dtype (may be repeated)")
    parser.add_argument("--backend", choices=dispatch.SELF_CHECKED, help="only this backend's kernels")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="a file *.jsonl to append to")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds in all")
    args = parser.parse_args(argv)
    if args.json is not None and args.json.suffix != ".jsonl":
        parser.error(f"--json: got {args.json}, expected a name ending in .jsonl: several processes write it")
    return args


def wanted(units: list[Unit], args: argparse.Namespace) -> list[Unit]:
    """The units that `--op`, `--dtype` and `--backend` leave."""
    ops, tags = args.op or [unit.op for unit in units], args.dtype or list(TAGS.values())
    left = [unit for unit in units if unit.op in ops and TAGS[unit.dtype] in tags]
    return [unit for unit in left if args.backend is None or unit.backend in (None, args.backend)]


def main(argv: list[str] | None = None) -> int:
    """Run one check; its exit status."""
    args = parse(argv)
    end = time.monotonic() + args.budget
    if args.check == "tiny-cases":
        return tiny_cases()
    if args.check == "hopper-cases":
        return hopper_cases()
    if args.device == "cpu":
        interpret()

    def emit(row: dict) -> None:
        if args.json is not None:
            lines.append(args.json, "row", row)
        print(f"{row['status']:8} {row['step']}-{row['name']} {row.get('error', '')[:300]}", flush=True)

    memory = multiprocessing.get_context("fork").Value("q", 0)

    def tell_where(check: Check, unit: Unit) -> None:
        try:
            environment = describe(check.device)
        except Exception as error:
            check.row(unit.name, "failed", reason_of(error))
            sys.exit(FAILED)
        report = Report(args.json, {"device": args.device}, None)
        report.data["environment"] = environment
        report.save()
        memory.value = environment["memory_bytes"]

    check = Check(args.check, torch.device(args.device), emit, end)
    wrong = in_processes(check, [Unit("environment", None, torch.float32)], 1, tell_where)
    fitting = max(1, memory.value // UNIT_BYTES)
    at_once = 1 if check.tiny else min(fitting, len(os.sched_getaffinity(0)))
    wrong += in_processes(check, wanted(CHECKS[args.check][1](check.tiny), args), at_once)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
