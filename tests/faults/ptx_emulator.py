"""Faults of the PTX emulator's instructions, which the tests of single instructions must catch.

Those of its engine (warps, barriers, races) are in `ptx_engine.py`.
"""

import sys

from tests.support.mutation import Fault, Suite, faults_of

_HERE = "tests/ptx/emulator/"


def _matrix(name: str, old: str, new: str, file: str = "matrix.cpp") -> Fault:
    return Fault(name, _HERE + file, old, new)


def _wgmma(name: str, old: str, new: str) -> Fault:
    return Fault(f"wgmma: {name}", _HERE + "wgmma.cpp", old, new)


_hopper = faults_of(_HERE + "hopper.cpp")
_cluster = faults_of(_HERE + "cluster.cpp")


def _in(file: str, name: str, old: str, new: str) -> Fault:
    return Fault(name, _HERE + file, old, new)


FAULTS = (
    # fragments
    _matrix("ldmatrix: .trans ignored", "const uint32_t low = trans ? tile[first][group] : tile[group][first];", "const uint32_t low = tile[group][first];"),
    _matrix("ldmatrix reads unwritten memory", "    for (int l = 0; l < 8 * count; ++l) shared.on_read<16>(w, at[l], uint32_t(l));\n", ""),
    _matrix("a part of a warp", "    if (mask != ALL)\n", "    if (mask == 0)\n"),
    _matrix("mma: A's registers in another order", "left[l / 4 + r % 2 * 8][r / 2 * 4 * PER + l % 4 * PER + e]", "left[l / 4 + r * 2 / A * 8][r * 2 % A / 2 * 4 * PER + l % 4 * PER + e]"),
    _matrix("mma: C forgotten", "l % 4 * 2 + i % 2] + added[i][l]);", "l % 4 * 2 + i % 2] + 0 * added[i][l]);"),
    _matrix("mma: subnormal f16 are zeros", "float(fraction) * 0x1p-24f", "float(fraction) * 0", "elements.h"),
    # wgmma
    _wgmma("no swizzle", "return at ^ (at >> 3 & mask);", "return at ^ (0 & mask);"),
    _wgmma("offsets of the major axis swapped", "at += mn / width * leading + k / 8 * stride + k % 8", "at += mn / width * stride + k / 8 * leading + k % 8"),
    _wgmma("B transposed as A", "op.imm[registers ? 2 : 3] == 0", "op.imm[2] == 0"),
    _wgmma("rows of another warp", "uint32_t(w.index) % 4 * 16", "uint32_t(w.index) % 2 * 16"),
    _wgmma("a wait one group early", "int64_t(p.group) < int64_t(state.products_committed) - op.imm[0]", "int64_t(p.group) <= int64_t(state.products_committed) - op.imm[0]"),
    _wgmma("A free in flight", "uint32_t(registers ? b_slot(op) : sums_)", "uint32_t(sums_)"),
    _wgmma("signs ignored", "double(op.imm[0] * op.imm[1])", "double(op.imm[0] * op.imm[0])"),
    _wgmma("a continued sum counts as done", "    for (const Product& p : left) set_written(w, p, 0);\n", ""),
    _wgmma("descriptors read late", "Descriptor::of(product.b), 0, columns(op), b, [&]", "Descriptor::of(uniform(w, op.src[b_slot(op)])), 0, columns(op), b, [&]"),
    # mbarriers and tiles
    _hopper("the other parity", "if (b.phase != parity[l]) {", "if (b.phase == parity[l]) {"),
    _hopper("a wait orders nothing", "            w.block->acquire(w, b.done);\n", ""),
    _hopper("a phase that waits for no bytes", "if (b.pending != 0 || b.bytes != 0) return;", "if (b.pending != 0) return;"),
    _hopper("the second phase waits for no warp", "    b.pending = b.expected;\n", "    b.pending = 1;\n"),
    _hopper("rows before the tensor", "inside = inside && at >= 0 && at <", "inside = inside && at <"),
    _hopper("no zeros outside", "               std::memset(at, 0, count);\n", "               (void)count;\n"),
    _hopper("tiles are there at once", "on_write<16>(w, to, l, ASYNC, in_flight);", "on_write<16>(w, to, l, ASYNC, valid);"),
    _hopper("ends with a store in flight", "if (w.hopper_state && !hopper(w).stores.empty()) {", "if (w.hopper_state && hopper(w).stores.size() > 99) {"),
    _hopper("only the reader's fence counts", "std::max(own, hopper(writer).fenced)", "std::max(own, 0 * hopper(writer).fenced)"),
    # clusters
    _cluster("another block's memory is one's own", "Block& block = blocks[size_t(number - 1)];", "Block& block = *w.block;"),
    _cluster("a block that has ended is visited", "    if (block.done())\n", "    if (false)\n"),
    _cluster("every block has begun", "seen[size_t(other.actor)] > 1;", "seen[size_t(other.actor)] > 0;"),
    _cluster("visits leave no trace", "    block.shared->visits[size_t(w.actor)] = w.block->cluster->now;\n", ""),
    _cluster("a block ends before it has heard of a visit", "own.clock.seen[v] > visits[v];", "own.clock.seen[v] > 0;"),
    _cluster("mapa takes any block", "if (rank[l] >= w.block->cluster->blocks.size())", "if (false)"),
    _cluster("warps that have exited are waited for", "else if (w.state != State::exited)", "else"),
    _cluster("a phase without end", "    ++phase;\n", "    phase += any ? 0 : 1;\n"),
    _cluster("the barrier does not wait", "    if (cluster.phase < w.cluster_waits) return false;\n", ""),
    _cluster("the barrier orders nothing", "    w.block->acquire(w, cluster.done_clock);\n", ""),
    _cluster("what comes after an arrival is ordered", "    ++w.cluster_arrivals;\n", "    ++w.cluster_arrivals;\n    if (!relaxed) cluster.clock.seen[size_t(w.actor)] += 5;\n"),
    _cluster("a relaxed arrival orders all", "relaxed ? w.inits : w.block->release(w)", "relaxed ? w.block->release(w) : w.block->release(w)"),
    _cluster("the fence of mbarriers does nothing", "{ w.inits = w.block->release(w); }", "{ w.block->release(w); }"),
    _cluster("two arrivals are one", "if (w.cluster_arrivals > w.cluster_waits)", "if (false)"),
    _cluster("a wait without arrival", "if (w.cluster_waits == w.cluster_arrivals)", "if (false)"),
    _cluster("a part of a warp at the barrier", "    if (m != w.live)\n", "    if (m != w.live && m == 0)\n"),
    _hopper("a multicast for the issuer alone", "if (to >> block.rank & 1) issue", "if (block.rank == w.block->rank) issue"),
    _hopper("a multicast to no block", "if (to == 0 || to >> blocks.size())", "if (to >> blocks.size())"),
    _hopper("a multicast counts on the issuer's mbarrier", "    for (Barrier& b : hopper(block).barriers)\n        if (b.offset == copy.barrier) {", "    for (Barrier& b : hopper(*copy.warp->block).barriers)\n        if (b.offset == copy.barrier) {"),
    _hopper("another block's mbarrier needs no order", "    if (&block != w.block) on_barrier(w, block, copy.barrier, l, ATOMIC);\n", ""),
    _hopper("arrivals stay in the block", "arrived(w, barrier_at(block, uint32_t(offset), l), l);", "arrived(w, barrier_at(*w.block, uint32_t(offset), l), l);"),
    _in("engine.cpp", "blocks of a cluster from all over the grid", "block.index[d] += cluster.index[d] * launch.cluster[d];", "block.index[d] += cluster.index[d];"),
    _in("engine.cpp", "clusters along y first", "index[0] = at % sizes[0], index[1] = at / sizes[0] % sizes[1],", "index[0] = at / sizes[1] % sizes[0], index[1] = at % sizes[1],"),
    _in("program.py", "the text's clusters are ignored", "triple(cluster or required or ())", "triple(cluster or ())"),
    # copies and lanes
    _in("copies.cpp", "copies of no group waited for", "wait(w, m, uint32_t(op.imm[0]), false);", "wait(w, m, uint32_t(op.imm[0]), true);"),
    _in("warps.cpp", "shfl: segments of 16", "segment = c[l] >> 8 & 31;", "segment = c[l] >> 8 & 15;"),
    # values
    _in("floats.cpp", "min: a NaN wins", "const float kept = a != a ? b : b != b ? a : least;", "const float kept = a != a ? a : b != b ? b : least;"),
    _in("floats.cpp", "fma rounded twice", "std::fma(flushed<z>(a), flushed<z>(b), flushed<z>(c))", "flushed<z>(a) * flushed<z>(b) + flushed<z>(c)"),
    _in("bits.cpp", "shl by the amount's low bits", "return n < 8 * sizeof(T) ? T(a << n) : T(0);", "return T(a << (n & (8 * sizeof(T) - 1)));"),
    _in("bits.cpp", "prmt without signs", "if (s & 8) byte = byte & 0x80 ? 0xFF : 0;", ""),
    _in("halves.h", "bf16: ties away from zero", "(uint64_t(bits) + 0x7FFF + (bits >> 16 & 1)) >> 16", "(uint64_t(bits) + 0x8000) >> 16"),
    _in("compare.cpp", "ne of a NaN", "return a < b || a > b; } };  // false", "return a != b; } };  // false"),
    # text
    _in("parse.py", "labels in braces are everyone's", "                local(kernel, first, labels, number)\n", ""),
)  # fmt: skip

TESTS = (
    "test_matrices",
    "test_warps",
    "test_memory_forms",
    "test_copies",
    "test_hopper",
    "test_clusters",
    "test_multicasts",
    "test_instructions",
)
SUITE = Suite(
    FAULTS,
    tuple(f"tests/ptx/{name}.py" for name in TESTS),
    build=(sys.executable, "-c", "from tests.ptx.emulator import library; library.engine()"),
    environment={"FASTBERT_EMULATOR_OPTIMIZE": "-O0"},
    quick="built and not slow",
    timeout_s=1200.0,
)
