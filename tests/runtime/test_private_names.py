"""Private names of PyTorch: which ones this release has, and that results are the same without them."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastbert
from fastbert.runtime import loader

PACKAGE = Path(fastbert.__file__).parent
# Name -> what serves without it
FALLBACKS = {
    "torch._C._data_address": "untyped_storage().data_ptr(), after which weights are compared by samples",
    "torch._C._is_cow_tensor": "samples of the weights, which tell that they were written",
    "torch._lazy_clone": "samples of the weights, which tell that they were written",
    "torch._int_mm": "fp32 products of int8 values, which are exact, in the aten backend",
    "torch._C._cuda_getDevice": "torch.cuda.current_device()",
    "torch._C._cuda_getCurrentRawStream": "torch.cuda.current_stream()",
    "torch._C._cuda_getDriverVersion": "an empty string in the key of verdicts",
    "GOMP_parallel": "one thread",
    **dict.fromkeys(
        ("GOMP_parallel_start", "GOMP_parallel_end", "omp_get_num_threads"),
        "a parallel region per kernel, not one per layer",
    ),
    **dict.fromkeys(loader._TENSOR_FUNCTIONS, "the tensors' places, read in Python"),
    **dict.fromkeys(loader._WRITE_FUNCTIONS.values(), "a graphed model that is watched in Python"),
}


def names_in_the_sources() -> set[str]:
    """What the package calls `torch._...`, and what it asks for by getattr(torch._C, "...")."""
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    direct = re.findall(r"(?<!`)\b(torch\._(?!_)\w+(?:\.\w+)*)(?!\w*`)", text)
    asked = re.findall(r'getattr\(torch\._C, "(\w+)"', text)
    # what comes after `__members__` is Python's
    return {n.partition(".__")[0] for n in direct} | {f"torch._C.{n}" for n in asked}


def is_there(name: str) -> bool:
    """Whether the PyTorch at hand has a Python name, or libtorch_cpu a symbol."""
    if not name.startswith("torch."):
        return bool(loader._functions(name)[name])
    try:
        functools.reduce(getattr, name.split(".")[1:], torch)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(names_in_the_sources() | set(FALLBACKS)))
def test_this_pytorch_has_the_private_names(name):
    if "_cuda_" in name and not torch.backends.cuda.is_built():
        pytest.skip("a PyTorch without CUDA")
    if not is_there(name) and name in FALLBACKS:
        pytest.xfail(f"torch {torch.__version__} lacks {name}; instead: {FALLBACKS[name]}")
    assert is_there(name), f"torch {torch.__version__} lacks {name}, and nothing replaces it"


# --- without them -----------------------------------------------------------------------------------

# Takes names away before fastbert is imported; prints all that the model returns.
WITHOUT = """
import ctypes, sys, torch

names = sys.argv[1:]
for name in names:
    if name.startswith("torch."):
        place, _, last = name.rpartition(".")
        delattr(torch._C if place == "torch._C" else torch, last)

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in names:
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = Library
import fastbert

torch.manual_seed(0)
torch.set_num_threads(2)
sizes = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
sizes |= dict(intermediate_size=512, vocab_size=99)
model = fastbert.BertModel(fastbert.BertConfig(**sizes)).eval()
ids = torch.randint(99, (4, 64))

def show():
    with torch.no_grad():
        print([hash(row.numpy().tobytes()) for row in model(ids).last_hidden_state])

show()
show()
with torch.no_grad():
    model.encoder.layer[0].output.dense.weight.mul_(2)
show()
model.encoder.layer[1].attention.self.query.weight.data = torch.ones(128, 128)
show()
model.quantize()
show()
"""


def printed_without(*names: str) -> str:
    command = [sys.executable, "-c", WITHOUT, *names]
    env = {"PYTHONHASHSEED": "0", "PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env, timeout=300).stdout


@pytest.fixture(scope="module")
def printed():
    return printed_without()


@pytest.mark.parametrize(
    "names",
    (
        ("torch._C._data_address",),
        ("torch._C._is_cow_tensor",),
        ("torch._lazy_clone",),
        ("torch._int_mm",),
        ("GOMP_parallel",),
        ("GOMP_parallel_start",),
        ("GOMP_parallel_end",),
        ("omp_get_num_threads",),
        loader._TENSOR_FUNCTIONS[:1],
        tuple(loader._WRITE_FUNCTIONS.values()),
        tuple(name for name in FALLBACKS if "_cuda_" not in name),
    ),
    ids=lambda names: names[0] if len(names) == 1 else f"{len(names)}-names",
)
@pytest.mark.sweep
def test_results_are_the_same_without_private_names(names, printed):
    present = [name for name in names if is_there(name)]
    assert printed.count("\n") == 5
    assert len(set(printed.splitlines())) == 4  # the second call's results are the first one's
    assert printed_without(*present) == printed
