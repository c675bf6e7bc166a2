"""One instruction, or a few, in a warp or in several: for tests of what each form computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tests.ptx.emulator.parse import BYTES, REGISTERS
from tests.ptx.emulator.program import Program

LANES = 32
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def widths(lines: Sequence[str]) -> dict[str, int]:
    """Name, or prefix of names, -> bytes, as `.reg` declares them; 0 for predicates."""
    found = {}
    for kind, names in REGISTERS.findall("\n".join(lines)):
        for name in names.split(","):
            found[name.strip().partition("<")[0]] = BYTES[kind]
    return found


def run_instruction(
    lines: Sequence[str],
    inputs: Mapping[str, object],
    outputs: Sequence[str],
    *,
    shared: bytes | None = None,
    target: str = "sm_80",
) -> dict[str, np.ndarray]:
    """Run statements in one warp, or in as many as there are 32 values of inputs.

    Args:
        lines: PTX, with the `.reg` declarations of every register that it names. `smem` is the shared memory.
        inputs: register -> values of its width, 32 for each warp; floats of that width keep their bits.
        outputs: registers whose values are returned as unsigned numbers; predicates as bool.
        shared: what shared memory holds at first; the key "shared" of the result is what it holds afterwards.
        target: target in the header.
    """
    sizes = widths(lines)
    warps = -(-max((np.size(values) for values in inputs.values()), default=1) // LANES)
    lanes = (LANES * warps,)

    def size_of(name: str) -> int:
        return sizes[name] if name in sizes else sizes[name.rstrip("0123456789")]

    loads, stores, arrays = [], [], []

    def at(array: np.ndarray) -> int:
        arrays.append(array)
        return len(arrays) - 1

    for name, values in inputs.items():
        size = size_of(name)
        values = np.asarray(values)
        if size == 0:
            column = np.broadcast_to(values, lanes).astype(np.uint32)
        elif values.dtype.kind == "f" and values.dtype.itemsize == size:
            column = np.broadcast_to(values, lanes).copy().view(UNSIGNED[size])
        else:
            bits = [int(v) & (2 ** (8 * size) - 1) for v in np.broadcast_to(values, lanes)]
            column = np.array(bits, UNSIGNED[size])
        k = at(column)
        loads += [f"ld.param.u64 %runaddress, [run_param_{k}];"]
        loads += [f"mad.wide.u32 %runaddress, %runlane, {column.itemsize}, %runaddress;"]
        if size == 0:
            loads += ["ld.global.u32 %runword, [%runaddress];", f"setp.ne.u32 {name}, %runword, 0;"]
        else:
            loads += [f"ld.global.b{8 * size} {name}, [%runaddress];"]
    results = {}
    for name in outputs:
        size = size_of(name) or 4
        results[name] = np.zeros(lanes, UNSIGNED[size])
        k = at(results[name])
        stores += [f"ld.param.u64 %runaddress, [run_param_{k}];"]
        stores += [f"mad.wide.u32 %runaddress, %runlane, {size}, %runaddress;"]
        if size_of(name) == 0:
            stores += [f"selp.b32 %runword, 1, 0, {name};", "st.global.u32 [%runaddress], %runword;"]
        else:
            stores += [f"st.global.b{8 * size} [%runaddress], {name};"]
    parameters = ",\n".join(f".param .u64 run_param_{k}" for k in range(len(arrays)))
    given = "\n".join(lines)
    declared = "\n".join(m.group() for m in REGISTERS.finditer(given))
    body = "\n".join([*loads, REGISTERS.sub("", given), *stores])
    smem = f".shared .align 1024 .b8 smem[{len(shared)}];" if shared else ""
    text = (
        f".version 8.8\n.target {target}\n.address_size 64\n.visible .entry run(\n{parameters}\n)\n{{\n"
        f"{smem}\n.reg .b64 %runaddress;\n.reg .b32 %runlane, %runword;\n{declared}\n"
        f"mov.u32 %runlane, %ctaid.x;\nmad.lo.u32 %runlane, %runlane, 32, %laneid;\n{body}\nret;\n}}\n"
    )
    after = Program(text).launch("run", (warps,), (LANES,), arrays, shared=shared)
    found = {name: values != 0 if size_of(name) == 0 else values for name, values in results.items()}
    return found | ({"shared": after} if shared else {})
