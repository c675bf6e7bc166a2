"""Memory of a training step on a GPU, counted without one: `python bench/footprint.py [--model base]`.

Forward and backward run on fake tensors, which have a shape and a dtype but no data, so BERT-large takes
seconds and no memory. The counts:

- `saved_mib`: what autograd keeps from forward for backward, each storage once. It excludes parameters and
  the batch, and includes their half-precision copies under autocast.
- `peak_mib`: the most memory alive at one time in a step: parameters, both moments of AdamW, gradients, saved
  tensors and all temporaries of forward and backward. It excludes the scratch inside a kernel.

As on a GPU, PyTorch's dropout keeps one byte per element and ours nothing; attention keeps its output and
the logarithm of its sums, and ours also one bit per probability; ours computes query, key and value as one
product. Ours takes the path of `torch.compile`, which reads no tensor values, and gets the number of
labelled tokens. There the logits of the vocabulary are inside an op, so their memory is added as
`ops/linear_cross_entropy.py` states it. Batches have no padding.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.lib import training, workloads
from bench.lib.probe_steps import reason_of
from bench.lib.report import row_line
from fastbert.models.heads import masked_lm, pretraining
from fastbert.ops.linear_cross_entropy import CHUNK_BYTES

CANDIDATES = ("fastbert", "transformers")
WORKLOAD = "full"
GOAL = 0.6  # of transformers' peak
# AdamW's moments; each has as many bytes as the parameters
MOMENTS = 2
MIB = 2.0**20


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are alive and were made while this mode is on.

    Attributes:
        now, peak: bytes alive, and the most so far.
    """

    def __init__(self, old: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata: 0 for tensor in old}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.known:
            return
        self.known[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self.known.pop(key)


class Saved:
    """Collects what autograd saves, each storage once, without the storages of `old` tensors.

    Attributes:
        found: dtype and shape of the first saved tensor, and bytes, per storage that is alive.
    """

    def __init__(self, old: Iterable[torch.Tensor]):
        self.old = {tensor.untyped_storage()._cdata for tensor in old}
        self.found: dict[int, tuple[str, tuple[int, ...], int]] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called with each tensor that is saved; returns it to be saved."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.old and key not in self.found:
            self.found[key] = _name(tensor.dtype), tuple(tensor.shape), storage.nbytes()
            weakref.finalize(storage, self.found.pop, key)
        return tensor

    def total(self) -> int:
        return sum(size for _, _, size in self.found.values())

    def largest(self, kinds: int) -> list[dict]:
        """The kinds of tensors (dtype and shape) that take the most memory, in order: how many, and MiB."""
        rows = [
            {"what": f"{dtype} {'x'.join(map(str, shape))}", "tensors": n, "mib": n * size / MIB}
            for (dtype, shape, size), n in Counter(self.found.values()).items()
        ]
        return sorted(rows, key=lambda row: -row["mib"])[:kinds]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FusedDropout(TorchFunctionMode):
    """F.dropout as on a GPU: its mask has one byte per element; on a CPU the mask has `x`'s dtype."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _dropout(input, p=0.5, training=True, inplace=False):
        return torch.native_dropout(input, p, True)[0] if training else input


@contextlib.contextmanager
def _as_on_a_gpu(labelled: int) -> Iterator[None]:
    """Fake tensors say that they are CUDA's, and our code sees that it is being compiled, with `labelled`
    tokens that have a label.
    """
    is_compiling, check_classes = torch.compiler.is_compiling, masked_lm.check_classes
    torch.compiler.is_compiling = lambda: True
    masked_lm.check_classes = pretraining.check_classes = lambda *_: labelled
    FakeTensor.is_cuda = True
    try:
        yield
    finally:
        torch.compiler.is_compiling = is_compiling
        masked_lm.check_classes = pretraining.check_classes = check_classes
        del FakeTensor.is_cuda


def head_bytes(model: workloads.Model, labelled: int, itemsize: int) -> tuple[int, int]:
    """(kept for backward, most at one time) of the labelled tokens' logits and their gradient, in ours."""
    both = 2 * labelled * model.vocab * itemsize
    most = CHUNK_BYTES["cuda"]
    return (both // 2, both) if both <= most else (0, most)


def count(
    candidate: str,
    model: workloads.Model,
    lengths: tuple[int, ...],
    head: str = "pretraining",
    tag: str = "bf16",
    fake: bool = True,
) -> dict:
    """The figures of one training step; see the module.

    Args:
        candidate: one of CANDIDATES.
        model, lengths: the encoder's sizes and a batch whose sequences are equally long.
        head: one of training.HEADS.
        tag: "fp32", or "bf16" for autocast over fp32 parameters.
        fake: count on fake tensors. False: on real ones, as this machine computes them.

    Raises:
        ValueError: naming the argument.
    """
    if candidate not in CANDIDATES:
        raise ValueError(f"candidate: got {candidate!r}, expected one of {', '.join(CANDIDATES)}")
    if len(set(lengths)) != 1:
        raise ValueError(f"lengths: got {lengths}, expected sequences of one length")
    inputs, labelled = training.batch(lengths, model.vocab, head)
    kind = FakeTensorMode() if fake else contextlib.nullcontext()
    with kind, FusedDropout():
        if fake:
            inputs = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in inputs.items()}
        probs = 0.1 if candidate == "fastbert" else 0.0  # on a CPU, where SDPA keeps the probabilities
        module = training.modules(model, head, (candidate,), attention_probs_dropout_prob=probs)[candidate]
        if isinstance(module, str):
            raise RuntimeError(module)
        module.train()
        old = [*module.parameters(), *module.buffers(), *inputs.values()]
        weights = sum(
            {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in module.parameters()}.values()
        )
        ours = fake and candidate == "fastbert"
        path = _as_on_a_gpu(labelled) if ours else contextlib.nullcontext()
        with path, Live(old) as live:
            saved = Saved(old)
            with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                loss = training.loss_of(module, inputs, tag == "bf16")
            total, largest = saved.total(), saved.largest(8)
            loss.backward()
    kept, most = head_bytes(model, labelled, 2 if tag == "bf16" else 4) if ours else (0, 0)
    # the latter is AdamW's own step
    peak = max(live.peak + most + (1 + MOMENTS) * weights, (2 + MOMENTS) * weights)
    return {
        "saved_mib": (total + kept) / MIB,
        "peak_mib": peak / MIB,
        "parameters_mib": weights / MIB,
        "labelled": labelled,
        "largest": largest,
    }


def rows(
    model: workloads.Model,
    workload: str = WORKLOAD,
    head: str = "pretraining",
    tag: str = "bf16",
    candidates: tuple[str, ...] = CANDIDATES,
) -> Iterator[dict]:
    """A row for each candidate; one that cannot be counted is a row with the reason."""
    lengths = workloads.lengths(workload)
    for candidate in candidates:
        row = {"step": "footprint", "name": f"footprint-{candidate}-{tag}-{model.name}-{workload}-{head}"}
        facts = {"model": model.name, "workload": workload, "candidate": f"{candidate}-{tag}", "head": head}
        try:
            counted = count(candidate, model, lengths, head, tag)
            yield {**row, "status": "ok", **counted, "tokens": sum(lengths), **facts}
        except Exception as error:
            yield {**row, "status": "error", "error": reason_of(error), **facts}


def main(argv: list[str] | None = None) -> int:
    """Print a line for each head and candidate, with what is saved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(workloads.MODELS), default="base")
    parser.add_argument("--workload", choices=tuple(workloads.FIXED), default=WORKLOAD)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    args = parser.parse_args(argv)
    for head in training.HEADS:
        for row in rows(workloads.MODELS[args.model], args.workload, head, args.dtype):
            print(row_line(row), flush=True)
            for kind in row.get("largest", ()):
                print(f"    {kind['mib']:8,.0f} MiB in {kind['tensors']:3} x {kind['what']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
