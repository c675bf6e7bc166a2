"""Faults of the CUDA attention's backward, compiled by nvcc and run in the PTX emulator."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_TILES = "csrc/cuda/attention_backward.cuh"
_DQ = "csrc/cuda/attention_backward_dq.cu"
_DKDV = "csrc/cuda/attention_backward_dkdv.cu"
_DBIAS = "csrc/cuda/attention_backward_dbias.cu"
_fault = faults_of(_DQ)

FAULTS = (
    # barriers and waits
    _fault("dq: no barrier before a tile is read", "            wait_copies<0>();\n            __syncthreads();\n            if (first_key", "            wait_copies<0>();\n            if (first_key"),
    _fault("dq: a tile is not waited for", "            wait_copies<0>();\n            __syncthreads();\n            if (first_key", "            wait_copies<1>();\n            __syncthreads();\n            if (first_key"),
    _fault("dq: no barrier between delta and its readers", "first, length);\n    __syncthreads();\n\n    // This thread's", "first, length);\n\n    // This thread's"),
    _fault("dq: no barrier before the stage is written", "    __syncthreads();\n    const float factors[2]", "    const float factors[2]"),
    _fault("dq: the next tile into the slot in use", "fetch(first_key + kKeys, slot ^ 1)", "fetch(first_key + kKeys, slot)"),
    _fault("dkdv: no barrier before a tile is read", "        wait_copies<0>();\n        __syncthreads();\n        if (first_row", "        wait_copies<0>();\n        if (first_row", _DKDV),
    _fault("dkdv: the next tile into the slot in use", "fetch(first_row + kTile, slot ^ 1)", "fetch(first_row + kTile, slot)", _DKDV),
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
    _fault("dv of all P", "dropped[n][i] = kept ? p[n][i] : 0.0f;", "dropped[n][i] = p[n][i];", _DKDV),
    # mathematics
    _fault("keys past the sequence seen", "if (key + 8 * n + i % 2 >= last[i / 2]) p", "if (key + 8 * n + i % 2 > last[i / 2]) p"),
    _fault("causal leaves dq too early", "first + kOwned < length ? first + kOwned : length", "first + 32 < length ? first + 32 : length"),
    _fault("causal dropped in dkdv", "if (key + i / 2 * 8 > first_row + query", "if (key > 1000000 + first_row + query", _DKDV),
    _fault("rows without a key not guarded", "lse == -INFINITY ? 0.0f : lse;\n    }", "lse;\n    }"),
    _fault("delta's error left in it", "delta[half] += rest[half] / divisor;", "delta[half] += 0.0f * rest[half] / divisor;"),
    _fault("sums of the first walk kept", "        norm[0] = norm[1] = 0.0f;\n", ""),
    _fault("dq not normalised", "{inverse[0] * scale, inverse[1] * scale}", "{scale, scale}"),
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
