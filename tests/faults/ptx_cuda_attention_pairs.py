"""Faults of attention for compute capability 9.0 where two heads of 32 share a block, in the PTX emulator."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_HOST = "csrc/cuda/attention_hopper.cu"
_fault = faults_of("csrc/cuda/attention_hopper.cuh")

FAULTS = (
    _fault("a block has as many queries as with heads of 64", "kRows = kGroups / kHeads * kTileRows;", "kRows = kGroups * kTileRows;"),
    _fault("rows after the sequences of one head", "i < kHeads && i < heads_left; ++i)", "i < 1 && i < heads_left; ++i)"),
    _fault("rows after the sequences of a head that is not there", "i < kHeads && i < heads_left; ++i)", "i < kHeads; ++i)"),
    _fault("a last head has another", "length - first_row > kTileRows : heads_left > 1) ? 2 : 1;", "length - first_row > kTileRows : heads_left > 0) ? 2 : 1;"),
    _fault("heads share only if there are many rows", "(kHeads == 1 ? length - first_row > kTileRows : heads_left > 1)", "(length - first_row > kTileRows)"),
    _fault("more queries are waited for than come", "arrive_expecting(&asked, query_tiles * Tile::kTileBytes);", "arrive_expecting(&asked, groups * Tile::kTileBytes);"),
    _fault("the second head has later queries", "const int query_tile = kHeads == 1 ? group : 0,", "const int query_tile = group,"),
    _fault("both groups have the first head", "part = kHeads == 1 ? 0 : group;", "part = 0;"),
    _fault("queries of the first head", "first_chunk + 2 * d + lane / 16)", "2 * d + lane / 16)"),
    _fault("keys of the first head", "+ part * (kHeadDim / 16) * kDepthStep", "+ 0 * part * (kHeadDim / 16) * kDepthStep"),
    _fault("sums of the first head", "part == 0 ? softmax.out[at] :", "part >= 0 ? softmax.out[at] :"),
    _fault("both heads staged in one place", "swizzled_chunk(lane / 4 + 8 * r, first_chunk + n)", "swizzled_chunk(lane / 4 + 8 * r, n)"),
    _fault("out of the first head", "swizzled_chunk(at, first_chunk + chunk)", "swizzled_chunk(at, chunk)"),
    _fault("columns as of heads of 64", "const int column = first_head * kHeadDim;", "const int column = first_head * Tile::kColumns;"),
    _fault("a last head has no block", "(args.nheads + kHeads - 1) / kHeads", "args.nheads / kHeads", _HOST),
    _fault("heads of 32 as if of 64", "if (args.headdim < AttentionTile::kColumns)", "if (false)", _HOST),
    _fault("dropout left out", "const bool plain = args.dropout.seed == nullptr && !cuda::is_masked(args);", "const bool plain = !cuda::is_masked(args);", _HOST),
    _fault("a causal mask is forgotten", "const bool plain = args.dropout.seed == nullptr && !cuda::is_masked(args);", "const bool plain = args.dropout.seed == nullptr && !cuda::is_local(args);", _HOST),
    _fault("keys are read before they come", "        keys.wait(key);\n        values.wait(value);\n        fence_products();", "        values.wait(value);\n        fence_products();"),
    _fault("queries are read before they come", "    wait_phase(&asked, 0);\n", ""),
    _fault("a slot counts as free when one warp is done", "init_barrier(&keys.empty[i], groups * Tile::kWarps);", "init_barrier(&keys.empty[i], 1);"),
    _fault("one warp's zeros are waited for", "init_barrier(&cleared, enders * Tile::kWarps);", "init_barrier(&cleared, 1);"),
    _fault("short texts in rooms for long ones", "total >= kRows * batch && max_seqlen >= kRows", "total >= kRows * batch", _HOST),
    _fault("blocks of heads of 64 suffice", "total * nheads * headdim >= kRows * Tile::kColumns * multiprocessors", "total * nheads * 64 >= kRows * Tile::kColumns * multiprocessors", _HOST),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/ptx/test_cuda_attention_hopper.py",
        "tests/ptx/test_cuda_attention.py",
        *("-k", "hopper and (pairs or 32)"),
    ),
    **IN_EMULATOR,
)
