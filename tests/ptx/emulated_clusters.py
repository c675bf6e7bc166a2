"""What Triton and Gluon compile for clusters, in the PTX emulator: one JSON object per kernel and run.

    python -m tests.ptx.emulated_clusters

Sums over both axes and a transposition, cut among the blocks of a cluster, exchange parts through its shared
memory; a tile comes to all blocks by multicast. Results are integers, compared with NumPy's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import cluster, mbarrier, tma

from tests.ptx.emulated_launches import only_ptx
from tests.ptx.emulator import Program, tensor_map

# (schedule of copies, seed of the order of warps)
RUNS = (("late", 0), ("early", 1), ("late", 2))
FORMS = re.compile(
    r"mapa|ld\.shared::cluster|st\.shared::cluster|barrier\.cluster\.arrive|multicast::cluster"
)


@triton.jit
def sums_kernel(x_ptr, columns_ptr, rows_ptr, turned_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i * N + j)
    tl.store(columns_ptr + tl.arange(0, N), tl.sum(x, 0))
    tl.store(rows_ptr + tl.arange(0, N), tl.sum(x, 1))
    tl.store(turned_ptr + i * N + j, tl.trans(x))


@gluon.jit
def multicast_kernel(desc, out_ptr, TURNS: gl.constexpr, SHARED: gl.constexpr, HELD: gl.constexpr):
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, SHARED)
    barrier = mbarrier.allocate_mbarrier()
    mbarrier.init(barrier, count=1)
    i = gl.arange(0, 64, gl.SliceLayout(1, HELD))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, HELD))[None, :]
    for turn in range(TURNS):
        mbarrier.expect(barrier, desc.nbytes_per_cta)
        tma.async_load(desc, [turn * 64, 0], barrier, tile, multicast=True)
        mbarrier.wait(barrier, turn % 2)
        held = tile.load(HELD)
        cluster.barrier()
        gl.store(out_ptr + (turn * 64 + i) * 64 + j, held)
    mbarrier.invalidate(barrier)


def rows(
    source, ctas: int, memory: Sequence[np.ndarray], arguments: Sequence, wanted: Sequence
) -> Iterator[dict]:
    """A row for each run of a kernel; `wanted` has pairs of an output and its truth."""
    options = {"num_ctas": ctas, "num_warps": 4}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    program = Program(made.asm["ptx"])
    (name,) = program.kernels
    for schedule, seed in RUNS:
        for found, _ in wanted:
            found.fill(-1)
        program.launch(
            name,
            (ctas,),
            (128,),
            [*arguments, None, None],
            shared_bytes=made.metadata.shared,
            memory=memory,
            schedule=schedule,
            seed=seed,
            check_overlap=False,  # a result that both blocks have is stored by both
        )
        right = all(np.array_equal(found, truth) for found, truth in wanted)
        forms = sorted(set(FORMS.findall(made.asm["ptx"])))
        yield {"kernel": name, "ctas": ctas, "run": (schedule, seed), "right": right, "forms": forms}


def sums(ctas: int, size: int = 64) -> Iterator[dict]:
    """Sums over both axes, and a transposition."""
    x = np.random.default_rng(0).integers(-8, 9, (size, size)).astype(np.int32)
    columns, across = (np.zeros(size, np.int32) for _ in range(2))
    turned = np.zeros_like(x)
    signature = dict.fromkeys(("x_ptr", "columns_ptr", "rows_ptr", "turned_ptr"), "*i32")
    wanted = (columns, x.sum(0)), (across, x.sum(1)), (turned, x.T)
    source = ASTSource(sums_kernel, signature | {"N": "constexpr"}, {(4,): size})
    yield from rows(source, ctas, [], [x, columns, across, turned], wanted)


def multicast(ctas: int, turns: int = 3) -> Iterator[dict]:
    """A tile per turn for all blocks of a cluster."""
    x = np.random.default_rng(1).integers(-999, 999, (64 * turns, 64)).astype(np.float16)
    out = np.zeros_like(x)
    copies = [[0, 0]] * (ctas.bit_length() - 1)  # every block of a cluster has the whole tile
    shared = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=copies)
    held = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=copies)
    signature = {"desc": f"tensordesc<fp16[64, 64],{shared!r}>", "out_ptr": "*fp16"}
    signature |= dict.fromkeys(("TURNS", "SHARED", "HELD"), "constexpr")
    source = GluonASTSource(multicast_kernel, signature, {(2,): turns, (3,): shared, (4,): held})
    tiles = tensor_map(x.ctypes.data, 2, x.shape, (64, 1), (64, 64), 128)
    yield from rows(source, ctas, [x], [tiles, *x.shape, 64, 1, out], [(out, x)])


def main() -> None:
    """Compile and run every kernel."""
    only_ptx()
    for made in (sums(2), sums(4), multicast(2), multicast(4)):
        for row in made:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
