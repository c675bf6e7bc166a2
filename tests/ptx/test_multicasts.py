"""Tiles that come to all blocks of a cluster by multicast, and what is reported of them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from tests.ptx.emulator import Deadlock, DivergentBarrier, Program, SharedRace, UninitialisedRead, tensor_map
from tests.ptx.emulator.reports import BadLaunch
from tests.ptx.test_clusters import START, SYNC, wait
from tests.ptx.texts import kernel

pytestmark = pytest.mark.filterwarnings("error")

UNORDERED = (SharedRace, UninitialisedRead)
TILE = 1024  # bytes
CAST = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
LOADED = f"""
mov.b64 %rd4, map; cvta.param.u64 %rd5, %rd4; mov.b16 %h0, MASK; add.u32 %r10, %r2, 2048; mov.u32 %r12, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p0 mbarrier.init.shared::cta.b64 [%r2+8], 2;
fence.mbarrier_init.release.cluster;
{SYNC}
mov.u32 %r11, 0;
$L__again:
FREE
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], BYTES;
mad.lo.u32 %r13, %r1, {TILE}, %r10; shl.b32 %r14, %r1, 3; mad.lo.u32 %r14, %r11, 16, %r14;
ISSUER
{CAST} [%r13], [%rd5, {{%r12, %r14}}], [%r2], %h0;
and.b32 %r15, %r11, 1;
{{ again: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], %r15; @!%p3 bra again; }}
mad.lo.u32 %r16, %r0, 32, %r10;
ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r16];
ld.shared.v4.u32 {{%r24, %r25, %r26, %r27}}, [%r16+16];
mad.lo.u32 %r17, %r11, 128, %r7; mul.wide.u32 %rd6, %r17, 32; add.s64 %rd6, %rd0, %rd6;
st.global.v4.u32 [%rd6], {{%r20, %r21, %r22, %r23}}; st.global.v4.u32 [%rd6+16], {{%r24, %r25, %r26, %r27}};
bar.sync 0;
RELEASE
add.u32 %r11, %r11, 1; setp.lt.u32 %p4, %r11, 4; @%p4 bra $L__again;
END
"""
SOUND = {
    "MASK": "3",
    "BYTES": str(2 * TILE),
    "ISSUER": "@%p0",
    # all threads of both blocks have read the tiles before
    "FREE": "and.b32 %r15, %r11, 1; xor.b32 %r15, %r15, 1;"
    "{ again: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2+8], %r15; @!%p3 bra again; }",
    "RELEASE": "setp.lt.u32 %p5, %r0, 2; mapa.shared::cluster.u32 %r18, %r2, RANK;"
    "@%p5 mbarrier.arrive.shared::cluster.b64 _, [%r18+8];",
    "RANK": "%r19",
    "END": SYNC,
}


def program(body: str) -> Program:
    parameters = ".param .align 64 .b8 map[128], .param .u64 target"
    return Program(kernel(START + body, parameters, shared=4096, target="sm_90a"))


def tiles(source: np.ndarray) -> bytes:
    """The map of a matrix with rows of 64 in tiles of 8 x 64."""
    return tensor_map(source.ctypes.data, 2, source.shape, (64, 1), (8, 64), 0)


def cast(schedule: str = "late", seed: int = 0, **changes: str) -> None:
    """Four times two tiles of 8 x 64: each block loads one for both, and copies both to the target."""
    source = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    body = "and.b32 %r19, %r0, 1;" + LOADED
    for name, value in (SOUND | changes).items():
        body = body.replace(name, value)
    target = np.zeros((4, 2, 16, 64), np.uint16)
    options = {"cluster": (2,), "memory": [source], "limit": 200_000}
    program(body).launch("k", (2,), (64,), [tiles(source), target], schedule=schedule, seed=seed, **options)
    want = source.reshape(4, 1, 16, 64)
    np.testing.assert_array_equal(target, np.broadcast_to(want, target.shape))


@pytest.mark.parametrize("schedule", ("late", "early"))
def test_multicasts(schedule):
    for seed in range(6):
        cast(schedule, seed)


@pytest.mark.parametrize(
    ("error", "changes"),
    (
        # the other block's half never comes, or comes twice
        ((Deadlock, UninitialisedRead), {"MASK": "1"}),
        ((Deadlock, UninitialisedRead, SharedRace), {"ISSUER": "@%p2"}),
        (BadLaunch, {"MASK": "7"}),
        (BadLaunch, {"MASK": "0"}),
        (Deadlock, {"BYTES": str(2 * TILE + 16)}),
        # a tile comes before the other block's mbarrier is there, or its block
        (UNORDERED, {f"cluster;\n{SYNC}": "cluster;\nbar.sync 0;"}),
        (UNORDERED, {f"cluster;\n{SYNC}": "cluster;\nbar.sync 0;", "mov.b64 %rd4": f"{SYNC} mov.b64 %rd4"}),
        # a tile comes while the other block reads the previous one
        (UNORDERED, {"FREE": ""}),
        ((SharedRace, UninitialisedRead, DivergentBarrier, Deadlock), {"RANK": "%r1"}),
        ((SharedRace, UninitialisedRead, Deadlock), {"RELEASE": ""}),
        # the other block's last arrival comes when this one has ended
        (SharedRace, {"END": ""}),
    ),
    ids=str,
)
def test_multicasts_that_are_wrong(error, changes):
    for seed in range(6):
        with pytest.raises(error):
            cast(seed=seed, **changes)


@pytest.mark.parametrize(
    ("end", "error"),
    ((wait(0, "%r2") + SYNC, None), (f"@!%p1 bra $L__end; {wait(0, '%r2')} $L__end:", SharedRace)),
    ids=("both wait", "the issuer waits"),
)
def test_a_multicast_is_waited_for_before_the_end_of_each_block(end, error):
    body = LOADED.split("and.b32 %r15, %r11, 1;\n{")[0]
    for name, value in {**SOUND, "FREE": "", "BYTES": str(TILE), "ISSUER": "@%p2"}.items():
        body = body.replace(name, value)
    source = np.zeros((64, 64), np.uint16)
    with pytest.raises(error, match="ends") if error else contextlib.nullcontext():
        program(body + end).launch("k", (2,), (64,), [tiles(source), source], cluster=(2,), limit=200_000)
