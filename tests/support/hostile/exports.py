"""The door `fastbert._C`: the calls that launchers make, with a hostile number in place of each number.

While a custom op or a fused layer runs on fenced memory, each function of the module that it calls is called
once more for every number that it got, and for every wrong value in an integer operand. Only what the
launchers never call needs a row in OTHERS.
"""

from __future__ import annotations

import contextlib
from functools import partial

import torch

from fastbert.backends.cpu.attention import table_panels, table_scores
from fastbert.runtime import dispatch, loader
from tests.support.hostile.custom_ops import OPS, fenced_call
from tests.support.hostile.public_ops import layer_call, layer_operands, narrow_operands
from tests.support.hostile.values import DIM, ENDS, HEADS, SIZES, TOTAL, WRONG_ENDS, floats, ints

_C = loader.extension
WORDS = "expected|too few|out of range|incompatible (function|constructor) arguments|no SIMD"
UNFIT = (2**70, None, "4", 1.5)  # no number of 64 bits
KEPT = torch.zeros(8)  # alive as long as its address is used
OF_FUNCTIONS = ("set_write_functions", "set_tensor_functions", "set_team_start")
NO_FUNCTIONS = (1, 64, 2**47, 2**64 - 1)  # addresses


class Owned:
    """Has the address of a tensor; the fence would copy the tensor itself."""

    _cdata = KEPT._cdata


class Stored:
    """Has the address of the tensor's storage."""

    _cdata = KEPT.untyped_storage()._cdata


OWNED, STORED = Owned(), Stored()


def others():
    """name -> (arguments that are taken, lists of arguments that are refused)."""
    at, tensor, storage = KEPT.data_ptr(), KEPT._cdata, KEPT.untyped_storage()._cdata
    watch = (OWNED,), ({},), ({},), ({"training": False},), (OWNED,), (OWNED,), (STORED,)
    return {
        "Samples": ((((at, 8, 3, 4),),), [(((0, 8, 3, 4),),)]),
        "MappedPages": ((((at, 32),),), [(((0, 32),),)]),
        "TensorPlaces": (((tensor,),), []),
        "ModelWatch": (watch, []),
        "HostBatch": ((5, 2, -1, torch.Tensor), [(5, 2, -2, torch.Tensor), (5, 2, 2**62, torch.Tensor)]),
        "tensor_codes": ((tensor,), []),
        "tensor_write_state": ((tensor, storage), [(0, storage), (tensor, 0)]),
        "set_write_functions": ((0,) * len(loader._WRITE_FUNCTIONS), []),
        "set_tensor_functions": ((0,) * len(loader._TENSOR_FUNCTIONS), []),
        "set_team_start": ((0,) * len(loader._runtime()), []),
        "set_cpu_isa": ((_C.cpu_isa(),), [(n,) for n in ("", "avx1024", "x" * 10**6, "best\0", "AVX2")]),
        "set_may_be_alone": ((True,), []),
        "set_always_alone": ((False, 1000), [(False, -1)]),
        "open_team": ((2,), [(0,), (2**20,), (2**31 - 1,)]),
        "cpu_encoder_layer_work": ((0, (3, 9, 5, 15), (3, 5, 7, 4), 2), []),
        "cpu_linear_panels_size": ((5, 3), [(2**40, 2**40)]),
        **{name: ((), []) for name in ("best_cpu_isa", "cpu_isa", "preferred_cpu_isa", "has_team")},
        "close_team": ((), []),
    }


# (function, place of the argument) that takes more than the numbers of its calls here
FREE = {
    *((f"cpu_cross_entropy_{way}", (at,)) for way in ("fwd", "bwd") for at in (4, 6)),  # one row; ignored
    *(("cpu_embedding_bwd", (at, 2)) for at in (13, 14, 15)),  # the id whose row stays zero
    ("cpu_linear_product", (15,)),  # the stride of no residual
    ("cpu_encoder_layer_fwd", (12,)),  # the bytes of no memory
    # a side of a window without a limit
    *((f"cpu_attention_{way}", (0, side)) for way in ("fwd", "bwd") for side in (18, 19)),
    *(("cpu_encoder_layer_fwd", (2, 0, side)) for side in (11, 12)),
    # those of a window and of a bias that are not read
    *(("cpu_attention_received", (0, at)) for at in (18, 19, 21, 22, 23)),
    ("set_always_alone", (1,)),
    ("HostBatch", (2,)),
}
TOGETHER = {("cpu_embedding_fwd", (18,))}  # rstd, which is not without mean


def numbers(args, at=()):
    """(where, value) of every number among arguments, those in tuples included."""
    for i, a in enumerate(args):
        if isinstance(a, tuple):
            yield from numbers(a, (*at, i))
        elif type(a) is int:
            yield (*at, i), a


def replaced(args, where, value):
    first, *rest = where
    return (*args[:first], replaced(args[first], rest, value) if rest else value, *args[first + 1 :])


def try_numbers(tried, name, function, args, addresses=(0,), more=()):
    """Each number of a call that is taken, made hostile."""
    for where, known in numbers(args):
        address, absent = known >= 2**32, known == 0  # or a code
        if (name, where) in TOGETHER:
            continue
        for value in (*UNFIT, *more, *(addresses if address else SIZES[:1] if absent else SIZES)):
            free = address or (name, where) in FREE
            tried.one(
                f"{name} {where} = {value!r} for {known}",
                partial(function, *replaced(args, where, value)),
                WORDS,
                None if free else True,
                within=True,
            )


def try_operands(tried, name, function, args):
    """Each integer operand of a call, with wrong values. A single one, a seed or a count, may be any."""
    given = {known for _, known in numbers(args)}
    for t in tried.fence.tensors:
        if t.data_ptr() not in given:
            continue
        before = t.clone()
        if t.dtype == torch.int64 and t.numel() > 1:  # labels, ids or positions
            wrong = [before.index_fill(0, torch.tensor([1]), value) for value in (99, -1, 2**62, -(2**63))]
        elif t.tolist() == list(ENDS):
            wrong = [ints(*ends, dtype=t.dtype) for ends, _ in WRONG_ENDS]
        else:
            continue
        for values in wrong:
            t.copy_(values)
            tried.one(f"{name} on {values.tolist()}", partial(function, *args), WORDS, within=True)
        t.copy_(before)


@contextlib.contextmanager
def tried_by_number(tried, seen):
    """Within it, every call of a function of the module is followed by its hostile ones."""

    def watched(name, function):
        def call(*args):
            result = function(*args)
            seen.add(name)
            try_numbers(tried, name, function, args)
            try_operands(tried, name, function, args)
            function(*args)
            return result

        return call

    real = {name: getattr(_C, name) for name in dir(_C) if name.startswith("cpu_") and name != "cpu_isa"}
    try:
        for name, function in real.items():
            setattr(_C, name, watched(name, function))
        yield
    finally:
        for name, function in real.items():
            setattr(_C, name, function)


def try_native(tried):
    seen = set()
    with tried_by_number(tried, seen), dispatch.use_backend("cpu"):
        for name, op in OPS.items():
            if "cpu" in op.backends and "pooling" not in name:
                fenced_call(tried.fence, getattr(torch.ops.fastbert, name), op.args())
                tried.fence.forget()
        for kind in ("linear", "linear_int8"):
            for operands in (layer_operands(kind), narrow_operands(kind)):
                call = lambda *v, n=tuple(operands): layer_call(**dict(zip(n, v, strict=True)))  # noqa: E731
                fenced_call(tried.fence, call, operands)
        scored = {"x": floats(TOTAL, HEADS, DIM), "panels": table_panels(floats(7, HEADS, DIM))}
        fenced_call(tried.fence, lambda x, panels: table_scores(x, panels, 7, 2, 3), scored)
    for name, (args, refused) in others().items():
        function = getattr(_C, name)
        seen.add(name)
        tried.one(f"{name}: as it should be", partial(function, *args), refused=None)
        for wrong in refused:
            tried.one(f"{name}{wrong}"[:100], partial(function, *wrong), WORDS)
        try_numbers(tried, name, function, args, (), NO_FUNCTIONS if name in OF_FUNCTIONS else ())
    exported = {n for n in dir(_C) if callable(getattr(_C, n)) and not n.startswith(("__", "cuda_"))}
    tried.fault(f"never tried: {exported - seen}" if exported - seen else "")
    _C.set_team_start(**loader._runtime())
    loader._hand_over_tensor_functions(_C)
