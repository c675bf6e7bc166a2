"""Clusters: shared memory of other blocks, the barrier of all, mbarriers; and what is reported of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.emulator import Deadlock, DivergentBarrier, OutOfBounds, Program, SharedRace, UninitialisedRead
from tests.ptx.emulator.reports import BadLaunch
from tests.ptx.texts import kernel

pytestmark = pytest.mark.filterwarnings("error")

SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
# %r0 thread, %r1 rank, %r2 own memory, %r3 the other block's, %r4 and %r5 this thread's word in both,
# %rd1 this thread's word of the target; %p0 the first thread, %p1 rank 0
START = """
mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, memory;
setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r1, 0; and.pred %p2, %p0, %p1;
xor.b32 %r6, %r1, 1; mapa.shared::cluster.u32 %r3, %r2, %r6;
mad.lo.u32 %r4, %r0, 4, %r2; mad.lo.u32 %r5, %r0, 4, %r3;
ld.param.u64 %rd0, [target]; mad.lo.u32 %r7, %r1, 64, %r0; mul.wide.u32 %rd1, %r7, 4;
add.s64 %rd1, %rd0, %rd1;
"""


def run(
    body: str, *, cluster=(2,), grid=(2,), threads: int = 64, seed: int = 0, **more: object
) -> np.ndarray:
    """The target, a word for each of 64 threads of each block of a cluster, after the kernel."""
    target = np.full((2, 64), -1, np.int32)
    text = kernel(START + body, ".param .u64 target", shared=1024, target="sm_90a")
    Program(text).launch("k", grid, (threads,), [target], cluster=cluster, seed=seed, limit=200_000, **more)
    return target


def both(error, sound: str, defect: str, match: str | None = None, **more: object) -> None:
    """The second body raises, whatever the order of warps; the first does not."""
    for seed in range(6):
        run(sound, seed=seed, **more)
        with pytest.raises(error, match=match):
            run(defect, seed=seed, **more)


# ---- geometry


@pytest.mark.parametrize("form", ("text", "launch"))
def test_places_in_a_grid_of_clusters(form):
    """Every special register, against the grid cut into boxes; blocks of a cluster are its box."""
    names = [f"%{n}.{a}" for n in ("ctaid", "cluster_ctaid", "clusterid") for a in "xyz"]
    names += [f"%{n}.{a}" for n in ("nctaid", "cluster_nctaid", "nclusterid") for a in "xyz"]
    names += ["%cluster_ctarank", "%cluster_nctarank"]
    grid, cluster = np.array((4, 6, 3)), np.array((2, 3, 1))
    target = np.zeros((72, len(names)), np.int32)
    lines = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z;"
    lines += "mad.lo.u32 %r4, %r3, 6, %r2; mad.lo.u32 %r4, %r4, 4, %r1;"
    lines += (
        f"ld.param.u64 %rd0, [target]; mul.wide.u32 %rd1, %r4, {4 * len(names)}; add.s64 %rd0, %rd0, %rd1;"
    )
    for i, name in enumerate(names):
        lines += f"mov.u32 %r5, {name}; st.global.u32 [%rd0+{4 * i}], %r5;"
    text = kernel(lines, ".param .u64 target", target="sm_90")
    given = {"cluster": tuple(cluster)}
    if form == "text":
        text = text.replace(
            "(.param .u64 target)", "(.param .u64 target)\n.explicitcluster\n.reqnctapercluster 2, 3"
        )
        given = {}
    Program(text).launch("k", tuple(grid), (1,), [target], **given)
    for number, found in enumerate(target):
        at = np.array((number % 4, number // 4 % 6, number // 24))
        x, y, z = within = at % cluster
        want = [*at, *within, *(at // cluster), *grid, *cluster, *(grid // cluster), x + 2 * (y + 3 * z), 6]
        assert found.tolist() == want


def test_clusters_that_do_not_fit():
    for grid, cluster in (((3,), (2,)), ((2, 3), (1, 2))):
        with pytest.raises(ValueError, match="cluster"):
            run("", grid=grid, cluster=cluster)
    text = kernel("", "", target="sm_90").replace("k()", "k()\n.reqnctapercluster 2")
    Program(text).launch("k", (2,), (1,))
    with pytest.raises(ValueError, match="requires"):
        Program(text).launch("k", (4,), (1,), cluster=(4,))


# ---- shared memory of other blocks


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", ("cluster", "generic"))
def test_what_another_block_wrote(form, seed):
    """Read there, or written from here; atomics; several clusters."""
    load, store, add = (f"{op}.shared::cluster" for op in ("ld", "st", "red"))
    at, first = "%r5", "%r3"
    ready = f"st.shared.u32 [%r4], %r7; {SYNC}"
    if form == "generic":
        ready += "cvt.u64.u32 %rd2, %r2; cvta.shared.u64 %rd2, %rd2; mapa.u64 %rd2, %rd2, %r6;"
        ready += "mul.wide.u32 %rd3, %r0, 4; add.s64 %rd3, %rd2, %rd3;"
        load, store, at = "ld", "st", "%rd3"
    found = run(f"{ready} {load}.u32 %r8, [{at}]; st.global.u32 [%rd1], %r8; {SYNC}", seed=seed)
    assert found.ravel().tolist() == [*range(64, 128), *range(64)]
    moved = f"{ready} {SYNC} {store}.u32 [{at}+256], %r7; {SYNC} ld.shared.u32 %r8, [%r4+256];"
    found = run(moved + "st.global.u32 [%rd1], %r8;", seed=seed)
    assert found.ravel().tolist() == [*range(64, 128), *range(64)]
    count = f"mov.u32 %r9, 0; @%p0 st.shared.u32 [%r2], %r9; {SYNC} mov.u32 %r9, 1;"
    count += f"{add}.add.u32 [{first}], %r9; red.shared.add.u32 [%r2], %r9; {SYNC} ld.shared.u32 %r8, [%r2];"
    found = run(count + "st.global.u32 [%rd1], %r8;", seed=seed, grid=(6,), check_overlap=False)
    assert set(found.ravel()) == {128}


STORED = "st.shared.u32 [%r4], %r7; "
READ = "ld.shared::cluster.u32 %r8, [%r5];"
WRITE = "st.shared::cluster.u32 [%r5], %r7;"


def test_races_between_blocks():
    """The barrier of the cluster orders; that of the block does not."""
    for access in (READ, WRITE, "mov.u32 %r9, 0; red.shared::cluster.add.u32 [%r5], %r9;"):
        sound = f"{SYNC} {STORED} {SYNC} {access} {SYNC}"
        both((SharedRace, UninitialisedRead), sound, f"{SYNC} {STORED} bar.sync 0; {access} {SYNC}")
    both(
        SharedRace,
        f"{STORED} {SYNC} {READ} {SYNC} {STORED}",
        f"{STORED} {SYNC} {READ} bar.sync 0; {STORED} {SYNC}",
    )


def test_a_relaxed_arrival_orders_nothing_but_mbarriers():
    relaxed = SYNC.replace("release", "relaxed")
    both(
        (SharedRace, UninitialisedRead),
        f"{SYNC} {STORED} {SYNC} {READ} {SYNC}",
        f"{SYNC} {STORED} {relaxed} {READ} {SYNC}",
    )


def test_a_block_may_not_have_begun():
    both(SharedRace, f"{SYNC} {WRITE} {SYNC}", f"{WRITE} {SYNC}", "have begun")


def test_a_block_ends_while_another_accesses_its_memory():
    begun = f"{STORED} {SYNC}"
    for access in (READ, WRITE.replace("[%r5]", "[%r5+512]")):
        both(SharedRace, f"{begun} {access} {SYNC}", f"{begun} {access}", "ended|the block ends")
    both(
        SharedRace,
        f"{begun} @%p1 bra $L__end; {READ} $L__end: {SYNC}",
        f"{begun} @%p1 ret; {READ}",
        "end",
        threads=32,
    )


def test_addresses_of_no_block():
    with pytest.raises(BadLaunch, match="does not have"):
        run("mov.u32 %r8, 2; mapa.shared::cluster.u32 %r8, %r2, %r8;")
    for address in (1024, 3 << 24):
        with pytest.raises(OutOfBounds):
            run(f"{SYNC} add.u32 %r8, %r3, {address}; ld.shared::cluster.u32 %r9, [%r8]; {SYNC}")
    with pytest.raises(OutOfBounds):  # an address of the cluster as one of the block
        run(f"{SYNC} ld.shared::cta.u32 %r9, [%r3]; {SYNC}")
    with pytest.raises(BadLaunch, match="does not have"):
        run("", cluster=(1,))


# ---- the barrier of a cluster


def test_a_barrier_waits_for_all_that_have_not_ended():
    run(f"setp.lt.u32 %p3, %r0, 32; @%p3 ret; {SYNC} {SYNC}")
    run(f"@%p1 ret; {SYNC}")
    both(Deadlock, SYNC, f"@%p1 bra $L__wait; bar.sync 1, 128; $L__wait: {SYNC}", "cluster's barrier")


@pytest.mark.parametrize(
    ("body", "match"),
    (
        ("setp.lt.u32 %p3, %r0, 40; @%p3 barrier.cluster.arrive.aligned;", "some of the warp's threads"),
        ("barrier.cluster.wait.aligned;", "without having arrived"),
        ("barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;", "twice"),
        (f"{SYNC} barrier.cluster.wait.aligned;", "without having arrived"),
    ),
)
def test_wrong_use_of_the_barrier(body, match):
    with pytest.raises(DivergentBarrier, match=match):
        run(body)
    run("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;")


def test_work_between_arrival_and_wait():
    """What a warp stores after it has arrived is not ordered."""
    text = f"{SYNC} FIRST barrier.cluster.arrive.aligned; THEN barrier.cluster.wait.aligned; {READ} {SYNC}"
    sound, defect = text.replace("FIRST", STORED), text.replace("THEN", STORED)
    both((SharedRace, UninitialisedRead), sound.replace("THEN", ""), defect.replace("FIRST", ""))


# ---- mbarriers


INIT = "@%p0 mbarrier.init.shared::cta.b64 [%r2+512], {count}; fence.mbarrier_init.release.cluster;"
RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
REMOTE = "mbarrier.arrive.shared::cluster.b64 _, [%r3+512];"


def wait(parity: int, at: str = "%r2+512") -> str:
    return f"{{ again: mbarrier.try_wait.parity.shared::cta.b64 %p3, [{at}], {parity}; @!%p3 bra again; }}\n"


@pytest.mark.parametrize("sync", (SYNC, RELAXED))
def test_arrivals_from_another_block(sync):
    """All threads of one block arrive at the other's mbarrier; its waiters see what they wrote before."""
    start = INIT.format(count=64) + sync
    sound = f"{start} {WRITE} {REMOTE} {wait(0)} ld.shared.u32 %r8, [%r4]; st.global.u32 [%rd1], %r8; {SYNC}"
    for seed in range(4):
        assert run(sound, seed=seed).ravel().tolist() == [*range(64, 128), *range(64)]
    both((SharedRace, UninitialisedRead), sound, sound.replace(wait(0), ""))
    both(Deadlock, sound, sound.replace(REMOTE, "@%p0 " + REMOTE))
    # nothing says that the other block still waits for the arrival, or has waited
    both(SharedRace, sound, f"{start} {REMOTE} @%p1 ret; {wait(0)}", "ends")


def test_an_mbarrier_is_there_before_another_block_arrives():
    sound = f"{INIT.format(count=64)} {SYNC} {REMOTE} {wait(0)} {SYNC}"
    both((SharedRace, UninitialisedRead), sound, sound.replace(SYNC, "bar.sync 0;", 1))
    without = sound.replace(SYNC, RELAXED, 1).replace("fence.mbarrier_init.release.cluster;", "")
    both((SharedRace, UninitialisedRead), sound, without)
    orders = {"arrive.shared::cluster": "arrive.release.cluster.shared::cluster"}
    orders |= {"parity.shared": "parity.acquire.cluster.shared"}
    for old, new in orders.items():
        run(sound.replace(old, new))
