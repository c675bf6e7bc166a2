"""Faults of the CUDA attention's backward, compiled by nvcc and run in the PTX emulator."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_TILES = "csrc/cuda/attention_backward.cuh"
_DQ = "csrc/cuda/attention_backward_dq.cu"
_DKDV = "csrc/cuda/attention_backward_dkdv.cu"
_WINDOW = "csrc/cuda/attention_tiles.cuh"
_DBIAS = "csrc/cuda/attention_backward_dbias.cu"
_fault = faults_of(_DQ)

FAULTS = (
    # barriers and waits
    _fault("dq: no barrier before a tile is read", "            wait_copies<0>();\n            __syncthreads();\n            if (first_key", "            wait_copies<0>();\n            if (first_key"),
    _fault("dq: a tile is not waited for", "            wait_copies<0>();\n            __syncthreads();\n            if (first_key", "            wait_copies<1>();\n            __syncthreads();\n            if (first_key"),
    _fault("dq: no barrier between delta and its readers", "first, length);\n    __syncthreads();\n\n    // This thread's", "first, length);\n\n    // This thread's"),
    _fault("dq: no barrier before the stage is written", "    __syncthreads();\n    const float factors[2]", "    const float factors[2]"),
    _fault("dq: the next tile into the slot in use", "fetch(first_key + kKeys, slot ^ 1)", "fetch(first_key + kKeys, slot)"),
    _fault("dkdv: no barrier before a tile is read", "        wait_copies<0>();\n        __syncthreads();\n        const float factor", "        wait_copies<0>();\n        const float factor", _DKDV),
    _fault("dkdv: the next tile into the slot in use", "fetch(next_row, slot ^ 1)", "fetch(next_row, slot)", _DKDV),
    _fault("dbias: no barrier before the tiles are overwritten", "                __syncthreads();\n                copy_rows", "                copy_rows", _DBIAS),
    _fault("dbias: no barrier before the warps' sums are added", "    __syncthreads();\n    if (warp > 0) return;", "    if (warp > 0) return;", _DBIAS),
    _fault("the stage is read before the warp has written it", "    __syncwarp();\n#pragma unroll\n    for (int i = 0; i < 16 * kChunks", "#pragma unroll\n    for (int i = 0; i < 16 * kChunks", _TILES),
    # layouts
    _fault("rows of the left operand exchanged", "row + lane % 16, 2 * step + lane / 16", "row + lane % 8, 2 * step + lane / 16", _TILES),
    _fault("two products of keys exchanged", "row + 16 * pair + lane / 16 * 8 + lane % 8", "row + 16 * pair + (1 - lane / 16) * 8 + lane % 8", _TILES),
    _fault("rows after the sequence copied", "const bool inside = row + i < left;", "const bool inside = row + i < left + 1;", _TILES),
    _fault("rows after the sequence stored", "if (row < length - first)\n            *reinterpret", "if (row < length - first + 1)\n            *reinterpret", _TILES),
    _fault("the tail not zeroed", "if (first + i / kChunks < end)", "if (first + i / kChunks < 0)", _TILES),
    # dropout
    _fault("bits of the row in its sequence", "static_cast<std::uint32_t>(first_row + drawn_row)", "static_cast<std::uint32_t>(row + drawn_row)", _TILES),
    _fault("saved bits of another word", "const std::int64_t words = (args.max_seqlen + 31) / 32, word = column / 32;", "const std::int64_t words = (args.max_seqlen + 31) / 32, word = 0 * column;", _TILES),
    _fault("dP of all P in dq", "if ((word & (1u << (8 * n + i))) == 0) dp", "if (false) dp"),
    _fault("dv of all P", "dropped[n][i] = kept ? p[n][i] * weight : 0.0f;", "dropped[n][i] = p[n][i] * weight;", _DKDV),
    # mathematics
    _fault("keys past the sequence seen", "key < end_key(row);", "key <= end_key(row);", _WINDOW),
    # windows and shared heads
    _fault("a key too few on the left", "return key >= first_key(row) &&", "return key > first_key(row) &&", _WINDOW),
    _fault("dq: the walk ends with the first row's keys", "end = reach.end_key(first + kOwned - 1);", "end = reach.end_key(first);"),
    _fault("dq: a tile on the left not visited", "begin = reach.first_key(first) / kKeys * kKeys", "begin = (reach.first_key(first) + kKeys - 1) / kKeys * kKeys"),
    _fault("dq: tiles on the left not masked", "first_key + kKeys > seen || first_key < whole;", "first_key + kKeys > seen;"),
    _fault("dq: tiles on the right not masked", "seen = reach.end_key(first);", "seen = length;"),
    _fault("dq: all tiles visited", "begin = reach.first_key(first) / kKeys * kKeys", "begin = 0 * reach.first_key(first)"),
    _fault("dq: values of the query's own head", "v = row_of<T>(args.v, kv_head, start);", "v = row_of<T>(args.v, head, start);"),
    _fault("dkdv: the sides of the window exchanged", "reach({args.window.right, args.window.left}, length)", "reach({args.window.left, args.window.right}, length)", _DKDV),
    _fault("dkdv: the walk ends with the first key's queries", "end = reach.end_key(last);", "end = reach.end_key(first);", _DKDV),
    _fault("dkdv: the walk begins with the last key's queries", "begin = reach.first_key(first),", "begin = reach.first_key(last),", _DKDV),
    _fault("dkdv: tiles before all see the keys not masked", "edge = first_row < whole ||", "edge = first_row < 0 * whole ||", _DKDV),
    _fault("dkdv: tiles after all see the keys not masked", "(seen < length && first_row + kTile > seen);", "(seen < 0 && first_row + kTile > seen);", _DKDV),
    _fault("dkdv: one head of a group", "last_head = head + heads - 1;", "last_head = head;", _DKDV),
    _fault("dkdv: the next head with the first one's queries", "            q += args.q.head_stride;\n", "", _DKDV),
    _fault("dkdv: the next head with the first one's dout", "            dout += kD;\n", "", _DKDV),
    _fault("dkdv: the next head with the first one's gate", "args.gate[head] : 1.0f);", "args.gate[kv_head * heads] : 1.0f);", _DKDV),
    _fault("dkdv: heads of dv in the reverse order", "static_cast<T*>(args.dv) + kv_head * kD;", "static_cast<T*>(args.dv) + (args.kv_heads - 1 - kv_head) * kD;", _DKDV),
    _fault("dbias: hidden keys on the left counted", "at >= least[i / 2] && at", "at >= 0 * least[i / 2] && at", _DBIAS),
    _fault("dbias: keys of the query's own head", "k = row_of<T>(args.k, kv_head, start);", "k = row_of<T>(args.k, head, start);", _DBIAS),
    _fault("rows without a key not guarded", "lse == -INFINITY ? 0.0f : lse;\n    }", "lse;\n    }"),
    _fault("delta's error left in it", "delta[half] += rest[half] / divisor;", "delta[half] += 0.0f * rest[half] / divisor;"),
    _fault("sums of the first walk kept", "        norm[0] = norm[1] = 0.0f;\n", ""),
    _fault("dq not normalised", "{inverse[0] * scale, inverse[1] * scale}", "{scale, scale}"),
    _fault("gate not in dv", "drop(factor);", "drop(1.0f);", _DKDV),
    _fault("gate not in dP of dk", "p[n][i] *= fmaf(dp[n][i], factor,", "p[n][i] *= fmaf(dp[n][i], args.dropout.scale,", _DKDV),
    _fault("bias of the first row", "bias[row * args.bias.row_stride + key + i / 2 * 8]", "bias[0 * row * args.bias.row_stride + key + i / 2 * 8]", _DKDV),
    _fault("dbias of one part", "shared_by += args.parts)", "shared_by += 1)", _DBIAS),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/ptx/test_cuda_attention_backward.py",
        "-k",
        "not hopper and not error_rule and not long_sequences",
    ),
    **IN_EMULATOR,
)
