"""What the kernels of a GPU computed, kept with the code that ran: golden vectors for an emulator.

    python bench/gpu/checks.py golden --json DIR/checks.jsonl      records DIR/golden.zip (part c of make gpu)
    python bench/gpu/golden.py DIR/golden.zip                      holds it against this machine

A unit is an op, a backend and a dtype. The archive has

    <unit>/<case>/call.json       dtypes and shapes, the arguments that are no tensors, and the kernels in the
                                  order of their launches, each with its grid
    <unit>/<case>/in/<name>.npy   inputs, gradients of the outputs among them (`dout-0`, …)
    <unit>/<case>/out/<name>.npy  outputs and gradients
    kernels/<kernel>/             code.cubin, code.ptx, metadata.json: what Triton launched

Tensors are arrays of bits: int16 for bfloat16, and so on. The second command computes the same calls again by
the same backend (Triton's in its interpreter), says which results are equal to the bit, and fails where a
recorded one breaks the error rule.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from fastbert import testing  # noqa: E402
from fastbert.runtime import dispatch  # noqa: E402

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def array(tensor: torch.Tensor) -> bytes:
    """A tensor's bits as the bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, tensor.detach().contiguous().view(BITS[tensor.element_size()]).cpu().numpy())
    return file.getvalue()


def tensor(data: bytes, dtype: str) -> torch.Tensor:
    """The tensor that `array` made the bytes of."""
    return torch.from_numpy(np.load(io.BytesIO(data))).view(getattr(torch, dtype))


# ---- Recording ----


@contextlib.contextmanager
def launches() -> Iterator[list[tuple[tuple[int, ...], Any]]]:
    """(grid, compiled kernel) of each launch by Triton in the block; none in the interpreter."""
    found: list[tuple[tuple[int, ...], Any]] = []
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield found
        return
    real = JITFunction.run

    def run(self, *args, grid, **kwargs):
        kernel = real(self, *args, grid=grid, **kwargs)
        found.append((tuple(grid), kernel))
        return kernel

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = real


def code_of(kernel: Any) -> tuple[str, dict[str, bytes]]:
    """(the kernel's folder in the archive, its files)."""
    folder = f"kernels/{kernel.name}-{kernel.hash[:16]}"
    files = {f"{folder}/metadata.json": json.dumps(kernel.metadata._asdict(), default=str).encode()}
    for kind in ("cubin", "ptx"):
        code = kernel.asm[kind]
        files[f"{folder}/code.{kind}"] = code.encode() if isinstance(code, str) else bytes(code)
    return folder, files


def record(case: testing.Case, backend: str, dtype: torch.dtype, device: torch.device) -> dict[str, bytes]:
    """Run one case by one backend, forward and (where it can) backward; the files of the archive."""
    inputs = case.inputs(dtype, device)
    backward = dtype.is_floating_point and dispatch.has_backward(backend, case.op)
    with dispatch.use_backend(**{case.op: backend}):
        with torch.no_grad():
            outputs = case.call(**inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        douts = [torch.randn(o.shape, generator=generator).to(dtype).to(device) for o in outputs]
        with launches() as launched:
            results = testing.evaluate(case.call, case, inputs, None, backward, douts)
    files: dict[str, bytes] = {}
    kernels = []
    for grid, kernel in launched:
        folder, code = code_of(kernel)
        files |= code
        kernels.append({"kernel": folder, "grid": grid})
    given = inputs | {f"dout-{i}": dout for i, dout in enumerate(douts)}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    call: dict[str, Any] = {"op": case.op, "backend": backend, "dtype": name_of(dtype), "case": case.id}
    call |= {"backward": backward, "kernels": kernels, "tensors": {}}
    call["arguments"] = {name: repr(value) for name, value in inputs.items() if name not in tensors}
    at = f"{case.op}-{backend}-{name_of(dtype)}/{case.id}"
    for folder, found in (("in", tensors), ("out", results)):
        for name, value in found.items():
            files[f"{at}/{folder}/{name}.npy"] = array(value)
            facts = {"dtype": name_of(value.dtype), "stride": value.stride()}
            call["tensors"][f"{folder}/{name}"] = facts
    return files | {f"{at}/call.json": json.dumps(call, indent=1).encode()}


def write(path: Path, files: dict[str, bytes]) -> None:
    """Write an archive in one step; the same files make the same bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    os.replace(temporary, path)


def read(path: Path) -> dict[str, bytes]:
    """The files of an archive."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def join(parts: Path, path: Path) -> int:
    """Put the archives in the folder `parts` into one, and remove them; how many calls it has."""
    files: dict[str, bytes] = {}
    for part in sorted(parts.glob("*.zip")):
        files |= read(part)
    write(path, files)
    for part in parts.iterdir():
        part.unlink()
    parts.rmdir()
    return sum(name.endswith("/call.json") for name in files)


# ---- Holding it against this machine ----


def check(files: dict[str, bytes]) -> Iterator[tuple[str, bool | None, str]]:
    """(the call's quantity, whether this machine computes the same bits, why the error rule is broken).

    The second is None where the backend does not run here.
    """
    for name in sorted(files):
        if not name.endswith("/call.json"):
            continue
        at, call = name.removesuffix("/call.json"), json.loads(files[name])
        cases = {case.id: case for case in testing.small_cases(call["op"])}
        if call["case"] not in cases:
            yield at, False, "this checkout has no such case"
            continue
        case, dtype = cases[call["case"]], getattr(torch, call["dtype"])
        kept = {
            each: tensor(files[f"{at}/{each}.npy"], facts["dtype"]) for each, facts in call["tensors"].items()
        }
        inputs = case.inputs(dtype, "cpu")
        for each, value in inputs.items():
            if isinstance(value, torch.Tensor):
                # in place: views of one tensor stay views
                value.copy_(kept[f"in/{each}"])
        douts = [kept[each] for each in sorted(kept) if each.startswith("in/dout-")]
        backward = call["backward"]
        truth = testing.evaluate(case.oracle, case, inputs, torch.float64, backward, douts)
        eager = testing.evaluate(case.eager, case, inputs, None, backward, douts)
        here: dict[str, torch.Tensor] = {}
        if dispatch.unsupported_reason(call["backend"], call["op"], "cpu", dtype) is None:
            with dispatch.use_backend(**{call["op"]: call["backend"]}):
                here = testing.evaluate(case.call, case, inputs, None, backward, douts)
        for each in truth:
            there = kept[f"out/{each}"]
            floor = case.floor(inputs, each) if dtype not in testing.HALF else 0.0
            *_, reason = testing.compare(there, eager[each], truth[each], dtype, floor)
            equal = array(there) == array(here[each]) if here else None
            yield f"{at} {each}", equal, reason


def main(argv: list[str] | None = None) -> int:
    """Hold an archive against this machine; the exit status is 1 where a recorded result is wrong."""
    parser = argparse.ArgumentParser(
        prog="golden", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="golden.zip of a run")
    args = parser.parse_args(argv)
    try:
        files = read(args.file)
    except (OSError, zipfile.BadZipFile) as error:
        parser.error(f"{args.file}: cannot be read: {error}")
    os.environ["TRITON_INTERPRET"] = "1"
    from fastbert.testing import triton_interpreter  # without it the interpreter computes bfloat16 wrong

    triton_interpreter.choose()
    count = same = wrong = 0
    for name, equal, reason in check(files):
        count, same, wrong = count + 1, same + bool(equal), wrong + bool(reason)
        state = "wrong" if reason else {True: "equal", False: "near", None: "right"}[equal]
        print(f"{state:6} {name} {reason}".rstrip())
    print(f"# {count} results: {same} equal to this machine's to the bit, {wrong} wrong")
    return int(wrong > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
