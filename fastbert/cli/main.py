"""The `fastbert` command: encode, env, verify, warmup, bench.

Exit status: 0 done; 1 a check failed; 2 a mistake in the call or its input, told in one line
(FASTBERT_LOG=debug adds the traceback); 128 + n stopped by signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

import fastbert
from fastbert import testing
from fastbert.checkpoint import files
from fastbert.ops.pooling import MODES as POOLINGS
from fastbert.runtime import dispatch
from fastbert.runtime import native as _native
from fastbert.sentences.encoder import EncodingError, SentenceEncoder
from fastbert.testing import serving, verdicts, warmup

_log = logging.getLogger("fastbert")

_INT8 = "int8"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHUNK_BYTES = 16 << 20  # text held in memory at a time, beside --chunk-lines


class UsageError(Exception):
    """A mistake in the call or its input; the message is the one line that the user sees."""


class _Stopped(BaseException):
    """A signal asked the process to end; not an Exception, so that nothing on the way swallows it."""

    def __init__(self, number: int) -> None:
        self.number = number


# ---------------------------------------------------------------------------------------------------- encode


def _encode(args: argparse.Namespace) -> int:
    device = _device(args.device)
    if args.dtype == _INT8 and device.type != "cpu":
        raise UsageError(f"--dtype {_INT8}: runs on a CPU, not on {device}; add --device cpu")
    if args.chunk_lines < 1:
        raise UsageError(f"--chunk-lines {args.chunk_lines}: expected at least 1")
    output = Path(args.output)
    kind = output.suffix.lower()
    if kind not in _WRITERS:
        raise UsageError(f"--output {output}: unknown kind {kind!r}; expected {', '.join(_WRITERS)}")
    with contextlib.ExitStack() as stack:
        if args.threads is not None:
            stack.enter_context(_threads(args.threads))
        name, stream = stack.enter_context(_input(args.input))
        if args.input != "-" and output.exists() and os.path.samefile(args.input, output):
            raise UsageError(f"--output {output}: is the input file")
        file = stack.enter_context(_replacing(output, args.overwrite))  # a bad path fails at once
        encoder = SentenceEncoder.from_pretrained(
            args.model,
            pooling=args.pooling,
            normalize=args.normalize,
            max_length=args.max_length,
            prompt=args.prompt,
            dtype=_DTYPES.get(args.dtype),
            device=device,
        )
        if args.dtype == _INT8:
            encoder.quantize(_INT8)
        batch_tokens = max(8192, encoder.max_length) if args.batch_tokens is None else args.batch_tokens
        encoder.check_batch_tokens(batch_tokens)
        with _told(output):
            writer = _WRITERS[kind](file, encoder.width)
        progress = _Progress(name, stream, sys.stderr.isatty() if args.progress is None else args.progress)
        stack.callback(progress.close)
        line, truncated, first_truncated = 0, 0, 0  # lines done so far
        for texts, size in _chunks(name, stream, args.chunk_lines):
            try:
                tokens = encoder.tokenize(texts)
                if tokens.truncated.size:
                    if args.on_long == "error":
                        raise encoder.too_long(tokens)
                    truncated += tokens.truncated.size
                    first_truncated = first_truncated or line + int(tokens.truncated[0]) + 1
                progress.chunk(size, len(tokens.ids))
                rows = encoder.encode_tokens(tokens, batch_tokens=batch_tokens, progress=progress.batch)
            except EncodingError as error:
                raise UsageError(f"{name}: line {line + error.index + 1}: {error.problem}") from error
            with _told(output):
                writer.write(texts, rows)
            line += len(texts)
        with _told(output):
            writer.close()
        progress.close()
        if truncated:
            _say(
                f"{truncated} of {line} lines held more than {encoder.max_length} tokens and were cut there "
                f"(the first: line {first_truncated})"
            )
        if line == 0:
            _say(f"{name}: no lines; {output} holds no embeddings")
    return 0


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    most = 4 * (os.cpu_count() or 1)  # far more than help; many more than the system can start
    if not 1 <= count <= most:
        raise UsageError(f"--threads {count}: expected 1 to {most}, four per CPU of this machine")
    before, rayon = torch.get_num_threads(), os.environ.get("RAYON_NUM_THREADS")
    torch.set_num_threads(count)
    os.environ["RAYON_NUM_THREADS"] = str(count)  # the tokenizer's threads; read at its first use
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if rayon is None:
            del os.environ["RAYON_NUM_THREADS"]
        else:
            os.environ["RAYON_NUM_THREADS"] = rayon


@contextlib.contextmanager
def _input(path: str) -> Iterator[tuple[str, BinaryIO]]:
    if path == "-":
        yield "stdin", sys.stdin.buffer
        return
    with open(path, "rb") as stream:
        yield path, stream


def _chunks(name: str, stream: BinaryIO, lines: int) -> Iterator[tuple[list[str], int]]:
    """Lists of at most `lines` texts, and the bytes took. Lines end in LF or CRLF; a BOM is dropped."""
    texts: list[str] = []
    size = 0
    for number, raw in enumerate(stream, 1):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{name}: line {number}: not UTF-8 (byte {error.start + 1} is 0x{raw[error.start]:02x})"
            ) from error
        if number == 1:
            text = text.removeprefix("\ufeff")
        texts.append(text.removesuffix("\n").removesuffix("\r"))
        size += len(raw)
        if len(texts) == lines or size >= _CHUNK_BYTES:
            yield texts, size
            texts, size = [], 0
    if texts:
        yield texts, size


@contextlib.contextmanager
def _replacing(path: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """A file to write; it takes the place of `path` if the block ends well, and disappears if it does not."""
    target = Path(os.path.realpath(path))  # through a link: the file it points to is replaced, not the link
    if path.is_symlink() and not target.exists() and not overwrite:
        raise UsageError(f"--output {path}: is a link to {target}, which is not there; --overwrite makes it")
    if not target.parent.is_dir():
        raise UsageError(f"--output {path}: the folder {target.parent} does not exist")
    mode = None
    if target.exists():
        if not target.is_file():
            raise UsageError(f"--output {path}: exists and is no plain file")
        if not overwrite:
            raise UsageError(f"--output {path}: exists; --overwrite replaces it")
        mode = stat.S_IMODE(target.stat().st_mode)
    _remove_leftovers(target)
    temporary = target.with_name(f".{target.name}.{files.own_tag()}.tmp")
    try:
        with _told(path):
            file = open(temporary, "xb")  # noqa: SIM115 - closed below, where a full disk is passed over
        try:
            yield file
            with _told(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):  # a full disk again
                file.close()
        with _told(path):
            if mode is not None:
                os.chmod(temporary, mode)
            if overwrite:
                os.replace(temporary, target)
            else:
                _publish(temporary, target, path)
        _sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _told(output: Path) -> Iterator[None]:
    """Name the output in what writing it raises."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--output {output}: could not be written ({error}); what was there is unchanged"
        ) from error


def _remove_leftovers(target: Path) -> None:
    """Remove what runs that were killed left of this output: of this machine, their process gone."""
    begin, end = f".{target.name}.", ".tmp"
    with contextlib.suppress(OSError):  # nothing depends on it
        for entry in target.parent.iterdir():
            name = entry.name
            if name.startswith(begin) and name.endswith(end) and files.is_dead(name[len(begin) : -len(end)]):
                entry.unlink()


def _publish(temporary: Path, target: Path, path: Path) -> None:
    """Rename without replacing a file that came into being meanwhile."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise UsageError(f"--output {path}: came into being meanwhile; --overwrite replaces it") from None
    except OSError:  # a file system without links
        if target.exists():
            raise UsageError(f"--output {path}: came into being meanwhile; --overwrite replaces it") from None
        os.replace(temporary, target)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _RawWriter:
    """Rows as little-endian float32 behind a header of fixed size, filled in when their number is known."""

    def __init__(self, file: BinaryIO, width: int) -> None:
        self._file, self._width, self._rows = file, width, 0
        file.write(self.header(0, width))

    def write(self, texts: Sequence[str], rows: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(rows, "<f4").data)
        self._file.flush()
        self._rows += len(rows)

    def close(self) -> None:
        self._file.seek(0)
        self._file.write(self.header(self._rows, self._width))

    @staticmethod
    def header(rows: int, width: int) -> bytes:
        raise NotImplementedError


class _NpyWriter(_RawWriter):
    @staticmethod
    def header(rows: int, width: int) -> bytes:
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}"
        return (
            b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"
        )  # 128 bytes


class _SafetensorsWriter(_RawWriter):
    @staticmethod
    def header(rows: int, width: int) -> bytes:
        tensor = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, 4 * rows * width]}
        return (152).to_bytes(8, "little") + json.dumps({"embeddings": tensor}).ljust(
            152
        ).encode()  # 160 bytes


class _JsonlWriter:
    def __init__(self, file: BinaryIO, width: int) -> None:
        self._file = file
        self._numbers = ",".join(["%.9g"] * width)  # nine digits bring the same float32 back

    def write(self, texts: Sequence[str], rows: np.ndarray) -> None:
        for text, row in zip(texts, rows.tolist(), strict=True):
            quoted = json.dumps(text, ensure_ascii=False)
            line = f'{{"text": {quoted}, "embedding": [{self._numbers % tuple(row)}]}}\n'
            self._file.write(line.encode())
        self._file.flush()

    def close(self) -> None:
        """Nothing to fill in: the lines say it all."""


_WRITERS: dict[str, Callable[[BinaryIO, int], Any]] = {
    ".npy": _NpyWriter,
    ".safetensors": _SafetensorsWriter,
    ".jsonl": _JsonlWriter,
}


class _Progress:
    """One line on stderr: sentences, rates and, for a file, the time left."""

    def __init__(self, name: str, stream: BinaryIO, shown: bool) -> None:
        self._shown = shown
        self._total = 0  # bytes of input; 0 = not known
        with contextlib.suppress(OSError, ValueError):
            info = os.fstat(stream.fileno())
            self._total = info.st_size if stat.S_ISREG(info.st_mode) else 0
        self._bytes_before = self._chunk_bytes = self._chunk_tokens = self._chunk_done = 0
        self._sentences = self._tokens = self._printed = 0
        self._start: float | None = None
        self._last = 0.0
        self._in_place = sys.stderr.isatty()

    def chunk(self, size: int, tokens: int) -> None:
        self._bytes_before += self._chunk_bytes
        self._chunk_bytes, self._chunk_tokens, self._chunk_done = size, tokens, 0
        if self._start is None:
            self._start = time.perf_counter()

    def batch(self, sentences: int, tokens: int) -> None:
        self._sentences += sentences
        self._tokens += tokens
        self._chunk_done += tokens
        if self._shown and time.perf_counter() - self._last > 0.2:
            self._print("\r" if self._in_place else "\n")

    def close(self) -> None:
        if self._shown and self._start is not None and (self._in_place or self._printed != self._sentences):
            self._print("\n")
        self._shown = False

    def _print(self, end: str) -> None:
        self._last = now = time.perf_counter()
        self._printed = self._sentences
        seconds = max(now - (self._start or now), 1e-9)
        rates = f"{self._sentences / seconds:,.0f} sentences/s, {self._tokens / seconds:,.0f} tokens/s"
        left = ""
        if self._total:
            share = self._chunk_done / self._chunk_tokens if self._chunk_tokens else 1.0
            done = min((self._bytes_before + share * self._chunk_bytes) / self._total, 1.0)
            if done > 0:
                remaining = round(seconds * (1 - done) / done)
                minutes = f"{remaining // 60 % 60:02d}:{remaining % 60:02d}"
                left = f", {done:.0%}, {remaining // 3600}:{minutes} left"
        line = f"{self._sentences:,} sentences, {rates}{left}"
        print(line.ljust(79) if self._in_place else line, end=end, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------- env


_PACKAGES = ("triton", "numpy", "tokenizers", "safetensors", "transformers", "sentence-transformers")


def environment() -> dict[str, Any]:
    """What `fastbert env --json` prints: versions, extension, devices, and who serves each op and dtype."""
    cpu = {"device": "cpu", "name": _cpu_name(), "threads": torch.get_num_threads()}
    devices: list[dict[str, Any]] = [cpu]
    for index in range(torch.cuda.device_count()):
        info = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": info.name,
                "capability": f"{info.major}.{info.minor}",
                "memory_bytes": info.total_memory,
                "multiprocessors": info.multi_processor_count,
            }
        )
    return {
        "versions": {
            "fastbert": fastbert.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            **{name: _version(name) for name in _PACKAGES},
        },
        "extension": _extension(),
        "devices": devices,
        "backends": [vars(row) for entry in devices for row in serving.choices(entry["device"])],
        "gpu_kernels": [vars(row) for entry in devices for row in serving.proofs(entry["device"])],
        "verdicts": None if (where := verdicts.folder()) is None else str(where),
    }


def _extension() -> dict[str, Any]:
    extension = _native.extension
    if extension is None:
        return {"built": False, "reason": _native.missing}
    return {
        "built": True,
        "compiler": getattr(extension, "compiler", None),
        "cpu_isa": extension.cpu_isa(),
        "best_cpu_isa": extension.best_cpu_isa(),
        "preferred_cpu_isa": extension.preferred_cpu_isa(),
        "cuda_archs": extension.cuda_archs or None,
        "path": extension.__file__,
    }


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _env(args: argparse.Namespace) -> int:
    report = environment()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for title in ("versions", "extension"):
        print(title)
        for key, value in report[title].items():
            print(f"  {key:<21} {'none' if value is None else value}")
    print("devices")
    for entry in report["devices"]:
        print("  " + ", ".join(f"{key} {value}" for key, value in entry.items()))
    print("backends")
    _table(("op", "device", "dtype", "backend", "why"), report["backends"])
    print(f"GPU kernels (verdicts in {report['verdicts'] or 'no folder: FASTBERT_CACHE is empty'})")
    if report["gpu_kernels"]:
        _table(("op", "device", "dtype", "backend", "state", "detail"), report["gpu_kernels"])
    else:
        print("  no GPU to run them")
    return 0


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    widths = [max([len(c), *(len(str(row[c])) for row in rows)]) for c in columns[:-1]] + [0]
    print("  " + "  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)))
    for row in rows:
        print("  " + "  ".join(str(row[c]).ljust(w) for c, w in zip(columns, widths, strict=True)).rstrip())


# ---------------------------------------------------------------------------------------------------- verify


def _verify(args: argparse.Namespace) -> int:
    device = _device(args.device)
    ops, backends = args.op or list(dispatch.OPS), args.backend or list(dispatch.BACKENDS)
    rows: list[testing.Row] = []
    gaps: list[str] = []
    if not args.json:
        print(_VERIFY_LINE.format("op", "backend", "dtype", "checks", "max error", "eager's", "result"))
    for op in ops:
        for backend in backends:
            for dtype_name in args.dtype or list(_DTYPES):
                reason = dispatch.unsupported_reason(backend, op, device.type, _DTYPES[dtype_name])
                if reason is not None:
                    gaps.append(f"{op} by {backend} in {dtype_name}: {reason}")
                    continue
                group = _verify_group(op, backend, dtype_name, device)
                rows += group
                if not args.json:
                    _print_group(op, backend, dtype_name, group, args.all)
    if not rows:
        raise UsageError(f"nothing to verify on {device.type}: {'; '.join(gaps[:3])}")
    passed = all(row.passed for row in rows)
    if args.json:
        report = {"device": str(device), "passed": passed, "rows": [_finite(row.as_dict()) for row in rows]}
        print(json.dumps(report, indent=1))
    else:
        failed = sum(not row.passed for row in rows)
        print(f"{len(rows)} checks on {device}, {failed} failed")
    return 0 if passed else 1


_VERIFY_LINE = "{:<14}{:<11}{:<10}{:>7}  {:>10}  {:>10}  {}"


def _verify_group(op: str, backend: str, dtype_name: str, device: torch.device) -> list[testing.Row]:
    rows: list[testing.Row] = []
    try:
        rows.extend(testing.verify([op], [backend], [_DTYPES[dtype_name]], device))
    except Exception as error:  # a kernel that raises has failed; the other ones are still of interest
        _log.debug("verify: %s by %s in %s", op, backend, dtype_name, exc_info=True)
        infinite = (float("inf"),) * 4
        reason = f"{type(error).__name__}: {error}"
        rows.append(testing.Row(op, "-", backend, dtype_name, str(device), "-", *infinite, False, reason))
    return rows


def _print_group(op: str, backend: str, dtype_name: str, group: list[testing.Row], every: bool) -> None:
    if not group:
        print(_VERIFY_LINE.format(op, backend, dtype_name, 0, "-", "-", "no cases"))
        return
    worst = max(group, key=lambda row: row.max_error)
    result = "pass" if all(row.passed for row in group) else "FAIL"
    errors = (f"{worst.max_error:.3g}", f"{worst.eager_max_error:.3g}")
    print(_VERIFY_LINE.format(op, backend, dtype_name, len(group), *errors, result), flush=True)
    for row in group:
        if every or not row.passed:
            verdict = "pass" if row.passed else f"FAIL: {row.reason}"
            errors = f"{row.max_error:.3g}, eager's {row.eager_max_error:.3g}"
            print(f"    {row.case} {row.quantity}: {errors}  {verdict}")


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: null."""
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()}


# ---------------------------------------------------------------------------------------------------- warmup

_WARMUP_LINE = "{:<14}{:<11}{:<10}{:>10}  {}"


def _warmup(args: argparse.Namespace) -> int:
    device = _device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if not 0 < args.timeout < float("inf"):
        raise UsageError(f"--timeout {args.timeout}: expected a number of seconds above 0")
    dtypes = [_DTYPES[name] for name in args.dtype] if args.dtype else None
    rows: list[warmup.Result] = []
    where = verdicts.folder()
    if not args.json and warmup.wanted(device, args.op, dtypes):
        print(
            f"verdicts on {device} are kept in {where}" if where else "verdicts are not kept: FASTBERT_CACHE="
        )
        print(_WARMUP_LINE.format("op", "backend", "dtype", "ms", "verdict"), flush=True)
    for row in warmup.run(device, args.op, dtypes, again=args.again, seconds=args.timeout):
        rows.append(row)
        if not args.json:
            verdict = "pass" if row.passed else f"FAIL: {row.reason}"
            kept = f" (of {row.date})" if row.kept else ""
            ms = f"{row.seconds * 1e3:,.0f}"
            print(_WARMUP_LINE.format(row.op, row.backend, row.dtype, ms, verdict + kept), flush=True)
    passed = all(row.passed for row in rows)
    if args.json:
        folder = None if where is None else str(where)
        report = {
            "device": str(device),
            "verdicts": folder,
            "passed": passed,
            "rows": [vars(r) for r in rows],
        }
        print(json.dumps(report, indent=1))
    elif not rows:
        print(f"nothing needs a check on {device}: {_no_check(device, args.op or dispatch.OPS)}")
    else:
        failed = sum(not row.passed for row in rows)
        print(f"{len(rows)} kernels on {device}, {failed} failed")
    return 0 if passed else 1


def _no_check(device: torch.device, ops: Sequence[str]) -> str:
    """Why no kernel of these ops has to pass a check."""
    if device.type == "cpu":
        return "only GPU kernels are checked before they serve"
    pairs = [(op, name) for name in dispatch.SELF_CHECKED for op in ops]
    having = [(op, name) for op, name in pairs if op in dispatch.backend_module(name).DTYPES]
    gaps = [(name, dispatch.unsupported_reason(name, op, device.type, None)) for op, name in having]
    told = dict.fromkeys(f"{name}: {reason}" for name, reason in gaps if reason)
    return "; ".join(told) or "no GPU kernel of theirs is in the table"


# ----------------------------------------------------------------------------------------------------- bench


def _bench(args: argparse.Namespace) -> int:
    folder = Path(fastbert.__file__).resolve().parent.parent / "bench"
    runnable = [p for p in sorted(folder.glob("*.py")) if "__main__" in p.read_text(encoding="utf-8")]
    scripts = {path.stem: path for path in runnable}
    if not scripts:
        raise UsageError(f"bench: the benchmarks are in the source checkout, and {folder} has none")
    if args.name is None:
        for name, path in scripts.items():
            print(f"fastbert bench {name:<16} {path}")
        return 0
    path = scripts.get(args.name) or scripts.get(f"bench_{args.name}")
    if path is None:
        raise UsageError(f"bench {args.name}: not among {', '.join(scripts)}")
    return subprocess.run([sys.executable, str(path), *args.arguments], check=False).returncode


# ------------------------------------------------------------------------------------------------------ main


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # one line instead of the usage
        raise UsageError(f"{message} (see {self.prog} --help)")


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine shows torch {torch.cuda.device_count()} GPUs")
    return device


def build_parser() -> argparse.ArgumentParser:
    """The command line, as argparse knows it."""
    parser = _Parser(
        prog="fastbert", description="BERT encoders: embed text, look at the set-up, check the numerics."
    )
    parser.add_argument("--version", action="version", version=f"fastbert {fastbert.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")

    encode = commands.add_parser(
        "encode",
        help="embed the lines of a text file",
        description="Embed each line of a UTF-8 text file. Row i of the output belongs to line i; an empty "
        "line is encoded as the empty sentence. The output appears whole at the end, or not at all.",
    )
    encode.add_argument(
        "--model", required=True, metavar="DIR", help="HuggingFace or sentence-transformers directory"
    )
    encode.add_argument(
        "--input", required=True, metavar="FILE", help="text, one sentence a line; - for stdin"
    )
    encode.add_argument(
        "--output", required=True, metavar="FILE", help="kind by ending: .npy, .safetensors or .jsonl"
    )
    encode.add_argument("--overwrite", action="store_true", help="replace the output file if it exists")
    encode.add_argument("--pooling", choices=POOLINGS, help="default: what the directory says, else mean")
    encode.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale to length 1; default: what the directory says",
    )
    encode.add_argument(
        "--prompt", metavar="TEXT", help="text before each line; default: what the directory says"
    )
    encode.add_argument(
        "--batch-tokens", type=int, metavar="N", help="tokens in one batch at most (default 8192)"
    )
    encode.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens of one line at most, special ones included; default: what the directory says, else as "
        "many as the model has positions for",
    )
    encode.add_argument(
        "--on-long",
        choices=("truncate", "error"),
        default="truncate",
        help="what a line over --max-length is: cut there (default), or an error",
    )
    encode.add_argument(
        "--dtype",
        choices=("auto", *_DTYPES, _INT8),
        default="auto",
        help="of the weights; auto (default): as stored; int8: quantised, on a CPU",
    )
    encode.add_argument("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    encode.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of the model and the tokenizer; default: PyTorch's number, one per core or "
        "OMP_NUM_THREADS",
    )
    encode.add_argument(
        "--chunk-lines",
        type=int,
        default=32_768,
        metavar="N",
        help="lines held in memory at a time, at most (default 32768)",
    )
    encode.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="on stderr; default: if stderr is a terminal",
    )
    encode.set_defaults(run=_encode)

    env = commands.add_parser("env", help="versions, devices, and which backend serves which op and why")
    env.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    env.set_defaults(run=_env)

    verify = commands.add_parser(
        "verify", help="the numerics table: each op, backend and dtype beside eager PyTorch"
    )
    verify.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    verify.add_argument("--op", action="append", choices=dispatch.OPS, help="may be repeated; default: all")
    verify.add_argument(
        "--backend", action="append", choices=dispatch.BACKENDS, help="may be repeated; default: all"
    )
    verify.add_argument(
        "--dtype", action="append", choices=tuple(_DTYPES), help="may be repeated; default: all"
    )
    verify.add_argument("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    verify.add_argument("--all", action="store_true", help="print every check, not the worst of each group")
    verify.set_defaults(run=_verify)

    warm = commands.add_parser(
        "warmup",
        help="run the self-checks of the GPU kernels now, and keep their verdicts",
        description="A GPU kernel serves on a device only after a self-check there, which otherwise runs at "
        "its first use. Verdicts are kept in $FASTBERT_CACHE (~/.cache/fastbert); a kernel that failed, "
        "crashed or hung is not tried again before something it depends on changes, or --again.",
    )
    warm.add_argument("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    warm.add_argument("--op", action="append", choices=dispatch.OPS, help="may be repeated; default: all")
    warm.add_argument(
        "--dtype", action="append", choices=tuple(_DTYPES), help="may be repeated; default: all"
    )
    warm.add_argument("--again", action="store_true", help="check also what has a verdict")
    warm.add_argument(
        "--timeout",
        type=float,
        default=warmup.SECONDS,
        metavar="S",
        help="seconds for one check (default 300)",
    )
    warm.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    warm.set_defaults(run=_warmup)

    bench = commands.add_parser("bench", help="list or run the benchmarks of a source checkout")
    bench.add_argument("name", nargs="?", help="such as kernels; none: list them")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the benchmark")
    bench.set_defaults(run=_bench)
    return parser


def _say(text: str) -> None:
    print(f"fastbert: {text}", file=sys.stderr)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Turn signals that end a process into an exception, so that what was begun is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        raise _Stopped(number)

    before: dict[int, Any] = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays in force
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_USER_ERRORS = (
    UsageError,
    ValueError,
    TypeError,
    OSError,
    ImportError,
    dispatch.BackendError,
    torch.OutOfMemoryError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. `argv` has no program name; default: sys.argv[1:]."""
    level = os.environ.get("FASTBERT_LOG", "warning")
    debug = level.lower() == "debug"
    try:
        if level.lower() not in ("debug", "info", "warning", "error"):
            raise UsageError(f"FASTBERT_LOG={level}: expected debug, info, warning or error")
        logging.basicConfig(level=level.upper(), format="%(name)s: %(levelname)s: %(message)s")
        args = build_parser().parse_args(argv)
        with _signals():
            return args.run(args)
    except _Stopped as stopped:
        _say(f"stopped by {signal.Signals(stopped.number).name}")
        return 128 + stopped.number
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + 13
    except _USER_ERRORS as error:
        if debug:
            traceback.print_exc()
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"fastbert: error: {message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
