"""Triton's types, made quick for its interpreter, say what they said before."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support import processes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

# each line of the output is one observation; every type is made twice, because the second is remembered
OBSERVED = """
import itertools, json, sys
from fastbert.testing import interpreter_types
if sys.argv[1:] == ["quick"]:
    interpreter_types.patch_once()
    interpreter_types.patch_once()
import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

def said(function):
    try:
        return repr(function())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

SCALARS = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64,
           tl.float16, tl.bfloat16, tl.float32, tl.float64]
ELEMENTS = [*SCALARS, tl.pointer_type(tl.float32), tl.pointer_type(tl.bfloat16),
            tl.pointer_type(tl.float32, const=True)]
SHAPES = [[True], [1], [16], (16,), [16, 1], [1, 16], [16, 16], [2, 4, 8], [tl.constexpr(4), 8],
          core.tuple([2, 2]), [], [3], [0], [-2], [2.0], [1 << 21]]
blocks = []
for element, shape in itertools.product(ELEMENTS, SHAPES):
    for _ in range(2):
        def make():
            block = tl.block_type(element, shape)
            blocks.append(block)
            return {name: (type(value).__name__, str(value)) for name, value in sorted(vars(block).items())}
        print(json.dumps(["block", said(make)]))
equal = tl.pointer_type(tl.float32)
print(json.dumps(["block", tl.block_type(equal, [16]).element_ty is equal]))
types = [*ELEMENTS, *blocks]
for a, b in itertools.product(types[::3], types[::4]):
    print(json.dumps(["equal", str(a), str(b), bool(a == b), bool(a != b)]))
for a in types:
    for b in (1, "fp32", None, tl.constexpr(tl.float32)):
        print(json.dumps(["other", str(a), str(b), said(lambda: bool(a == b))]))
    print(json.dumps(["numpy", str(a), said(lambda: interpreter._get_np_dtype(a))]))
    for value in (1, 2):
        handle = interpreter.TensorHandle(np.full((), value, np.int8), tl.int8)
        tensor = core.tensor(handle, a)
        row = [str(tensor), str(tensor.type), str(tensor.dtype), [s.value for s in tensor.shape],
               type(tensor.shape).__name__, tensor.numel.value, int(tensor.handle.data), sorted(vars(tensor))]
        print(json.dumps(["tensor", *row]))
VALUES = [1, 1.5, True, None, "a", [1, tl.constexpr(2)], (tl.constexpr(1), (tl.constexpr(2),)),
          tl.constexpr(3), tl.constexpr("x"), core.tuple([1, tl.constexpr(2)]), tl.float32, blocks[0]]
for value in VALUES:
    unwrapped = core._unwrap_if_constexpr(value)
    print(json.dumps(["unwrapped", type(unwrapped).__name__, str(unwrapped)]))
TUPLES = [core.tuple([]), core.tuple([1]), core.tuple([1, 2]), core.tuple([1, 3]), core.tuple([True, 2]),
          core.tuple([1.0, 2]), core.tuple([tl.constexpr(1), 2]), core.tuple([core.tuple([1]), 2])]
for a, b in itertools.product(TUPLES, [*TUPLES, [], [1], [1, 2], (1, 2), (1.0, 2), [[1], 2], 1, None]):
    print(json.dumps(["tuple", str(a), str(b), said(lambda: a == b), said(lambda: bool(a != b))]))
"""


def test_every_answer_is_tritons():
    """In a process that remembers the answers and in one that does not."""
    plain, quick = (
        processes.python(f"import sys; sys.argv[1:] = {arguments}\n{OBSERVED}", TRITON_INTERPRET="1")
        for arguments in ([], ["quick"])
    )
    assert plain.returncode == 0, plain.stderr
    assert quick.returncode == 0, quick.stderr
    expected, actual = plain.stdout.splitlines(), quick.stdout.splitlines()
    assert len(expected) > 8000
    assert {json.loads(line)[0] for line in expected} == {
        "block", "equal", "other", "numpy", "tensor", "unwrapped", "tuple"
    }  # fmt: skip
    for want, got in zip(expected, actual, strict=True):
        assert got == want
