"""Faults of attention's forward over short sequences, compiled by nvcc and run in the PTX emulator."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_ENTRY = "csrc/cuda/attention.cu"
_fault = faults_of("csrc/cuda/attention_short.cu")

FAULTS = (
    # waits and barriers
    _fault("keys are read before they come", "    wait_copies<1>();\n    __syncthreads();", "    __syncthreads();"),
    _fault("no barrier before the keys are read", "    wait_copies<1>();\n    __syncthreads();", "    wait_copies<1>();"),
    _fault("values are read before they come", "    wait_copies<0>();\n    __syncthreads();", "    __syncthreads();"),
    _fault("no barrier before the values are read", "    wait_copies<0>();\n    __syncthreads();", "    wait_copies<0>();"),
    _fault("keys come with the values", "    copy(args.k, kv_head, keys);\n    commit_copies();\n", "    copy(args.k, kv_head, keys);\n"),
    _fault("all warps stage in the same rows", "                                  queries + 16 * warp * kRowBytes);", "                                  queries);"),
    # places
    _fault("a lane without a sequence has the first row of all", "lane < kWarp - 1 && first + lane < batch ? first + lane : batch]", "lane < kWarp - 1 && first + lane < batch ? first + lane : 0]"),
    _fault("the block's first sequence by the rows", "slot * (kTileRows >> shift);", "slot << (shift - 4);"),
    _fault("rows behind a sequence's end are copied", "? row : -1;", "? row : row;"),
    _fault("a row too many", "row < __shfl_sync(kAllLanes, bound, which + 1)", "row <= __shfl_sync(kAllLanes, bound, which + 1)"),
    _fault("rows of the block's first sequence", "__shfl_sync(kAllLanes, bound, which) + in_tile - (which << shift);", "__shfl_sync(kAllLanes, bound, 0) + in_tile - (which << shift);"),
    _fault("rows after the sequences keep what they had", "        zero_rows<T, kHeadDim>(args, row, head);\n", "        (void)row;\n"),
    _fault("every second block's rows after the sequences", "static_cast<std::int64_t>(gridDim.y * gridDim.z) * kTileRows;", "static_cast<std::int64_t>(2 * gridDim.y * gridDim.z) * kTileRows;"),
    _fault("a warp begins at the block's row", "warp_row = 16 * warp - (which << shift);", "warp_row = 16 * warp;"),
    _fault("keys of the block's first sequence", "(which << shift) * kRowBytes;", "0 * kRowBytes;"),
    _fault("heads of k as many as of q", "kAny ? kv_head_of(args, head) : head;", "head;"),
    _fault("values of the query's own head", "copy(args.v, kv_head, values);", "copy(args.v, head, values);"),
    # softmax
    _fault("a group of keys too few", "if (8 * n >= length) break;", "if (8 * n + 16 > length) break;"),
    _fault("a group of values too few", "        if (16 * n >= length) break;\n#pragma unroll\n        for (int d = 0; d < kHeadDim / 16; ++d) {\n            std::uint32_t b[4];\n            load_matrices_transposed", "        if (16 * n + 16 > length) break;\n#pragma unroll\n        for (int d = 0; d < kHeadDim / 16; ++d) {\n            std::uint32_t b[4];\n            load_matrices_transposed"),
    _fault("one key too many", "at >= most[r])", "at > most[r])"),
    _fault("one key too few before the window", "at < least[r]", "at <= least[r]"),
    _fault("P of a group too few", "            if (16 * n >= length) break;\n            exponentiate", "            if (16 * n + 16 > length) break;\n            exponentiate"),
    _fault("the maximum of half a row's lanes", "            top[r] = fmaxf(top[r], __shfl_xor_sync(kAllLanes, top[r], 2));\n", ""),
    _fault("the maximum without the scale", "if (!kAny) top[r] *= args.softmax_scale * kLog2E;", "if (!kAny) top[r] *= kLog2E;"),
    _fault("minus infinity less minus infinity", "top[r] == -INFINITY ? 0.0f : top[r];", "top[r];"),
    _fault("one sequence's bias for all", "(first + which) * args.bias.batch_stride", "which * args.bias.batch_stride"),
    _fault("bias of the lane's first row", "(row + 8 * r < length ? row + 8 * r : 0) * args.bias.row_stride", "(row + 8 * r < length ? row : 0) * args.bias.row_stride"),
    # host
    _fault("room for 16 rows up to 17", "args.max_seqlen <= 16 ? 4", "args.max_seqlen <= 17 ? 4"),
    _fault("blocks that are full alone", "(args.batch + room - 1) / room;", "args.batch / room;"),
    _fault("no block without a sequence", "count > 0 ? count : 1", "count"),
    _fault("the scale folded though it is negative", "!(args.softmax_scale > 0.0f) || is_local(args)", "is_local(args)"),
    _fault("windows by the kernel with a folded scale", "|| is_local(args)\n", "\n"),
    _fault("longer sequences", "args.max_seqlen <= cuda::kTileRows && args.headdim <= 64", "args.max_seqlen <= cuda::kTileRows + 1 && args.headdim <= 64", _ENTRY),
    _fault("dropout left out", "args.headdim <= 64 && args.dropout.seed == nullptr)", "args.headdim <= 64)", _ENTRY),
)  # fmt: skip

SUITE = Suite(faults=FAULTS, tests=("tests/ptx/test_cuda_attention_short.py",), **IN_EMULATOR)
