"""Faults of the product for compute capability 9.0, in the PTX emulator: barriers, waits, fences, swizzles."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_KERNEL = "csrc/cuda/linear_hopper.cuh"
_INSTRUCTIONS = "csrc/cuda/hopper.cuh"
_HOST = "csrc/cuda/linear_hopper.cu"
_DEVICES = "csrc/cuda/hopper_host.cuh"
_fault = faults_of(_KERNEL)

FAULTS = (
    # the ring
    _fault("a slot is filled while it is read", "                wait_phase(&empty[place.slot], place.parity ^ 1);\n", ""),
    _fault("a slot is read before it is filled", "            wait_phase(&full[place.slot], place.parity);\n", ""),
    _fault("the producer waits for the phase to come", "wait_phase(&empty[place.slot], place.parity ^ 1)", "wait_phase(&empty[place.slot], place.parity)"),
    _fault("a slot counts as free when one warp is done", "init_barrier(&empty[i], Tile::kWarps);", "init_barrier(&empty[i], 1);"),
    _fault("a slot is given back while its products run", "            wait_products<1>();\n", ""),
    _fault("the slot of this step is given back", "if (step > 0 && lane == 0) arrive(&empty[previous]);\n            previous = place.slot;", "previous = place.slot;\n            if (step > 0 && lane == 0) arrive(&empty[previous]);"),
    _fault("the other group's steps are not skipped", "        // The other group's tile\n        place.advance(steps);\n", ""),
    _fault("the second group begins where the first does", "    place.advance(group * steps);\n", ""),
    _fault("a turn of the ring keeps its parity", "slot = 0, parity ^= 1;", "slot = 0;"),
    _fault("bytes of a alone are expected", "arrive_expecting(&full[place.slot], Tile::kSlotBytes);", "arrive_expecting(&full[place.slot], Tile::kRows * Tile::kRowBytes);"),
    # turns
    _fault("both groups at the tensor cores", "        if (turn > 0) sync_threads_at(kTurn + group, 2 * kGroupThreads);\n", ""),
    _fault("the turn is not handed over", "        if (tile + static_cast<int>(gridDim.x) < tiles) arrive_at(kTurn + (group ^ 1), 2 * kGroupThreads);\n", ""),
    _fault("barriers are used before they are there", "        fence_barriers();\n    }\n    __syncthreads();\n", "        fence_barriers();\n    }\n"),
    # products
    _fault("the accumulators are read while products run", "        wait_products<0>();\n", "        wait_products<1>();\n"),
    _fault("the tile before is added", "step + k > 0);", "true);"),
    _fault("each step begins anew", "step + k > 0);", "k > 0);"),
    _fault("the second 64 rows are the first", "a + half * kHalf + k * kDepthStep", "a + k * kDepthStep"),
    _fault("the depth of a does not advance", "a + half * kHalf + k * kDepthStep", "a + half * kHalf"),
    _fault("operands without a swizzle", "kSwizzle128 = 1,", "kSwizzle128 = 0,", _INSTRUCTIONS),
    _fault("eight rows are half as far", "kBytesOfEightRows = 8 * kSwizzled * 2;", "kBytesOfEightRows = 8 * kSwizzled;", _INSTRUCTIONS),
    _fault("the ring begins anywhere", "dynamic_shared();\n    char* const ring = start + (0u - shared_address(start)) % 1024;", "dynamic_shared();\n    char* const ring = start;"),
    # the epilogue
    _fault("a part is overwritten while it leaves", "    if (lane == 0) wait_stores();\n    __syncwarp();\n    // Matrices", "    __syncwarp();\n    // Matrices"),
    _fault("a part leaves without a fence", "    fence_shared();\n    __syncwarp();\n    if (lane == 0) store_tile", "    __syncwarp();\n    if (lane == 0) store_tile"),
    _fault("the block ends before its parts have left", "    if (lane == 0) wait_stores();\n#endif", "#endif"),
    _fault("chunks of a part in plain order", "(chunk ^ (row & 7)) * kChunkBytes", "chunk * kChunkBytes", _INSTRUCTIONS),
    _fault("all warps have one part", "(group * Tile::kWarps + warp) * Tile::kParts;", "group * Tile::kWarps * Tile::kParts;"),
    _fault("pre is not stored", "    if (args.save) store_part<T, kAt>(part, c, maps.pre, row, column + across);\n", ""),
    _fault("bias of the tile's first columns", "static_cast<const T*>(args.bias), column + across, args.columns", "static_cast<const T*>(args.bias), column, args.columns"),
    _fault("bias read past its end", "if (column + 8 * i < columns) word =", "word ="),
    # tiles
    _fault("tiles of the last group too high", "row_tiles - first < Tile::kGroupRows ? row_tiles - first : Tile::kGroupRows;", "Tile::kGroupRows;"),
    _fault("the last columns have no tile", "const int column_tiles = (args.columns + kColumns - 1) / kColumns;", "const int column_tiles = (args.columns + kColumns - 9) / kColumns;"),
    # gated tiles
    _fault("the partners are the activated columns", "args.other + column, depth", "args.active + column, depth"),
    _fault("the partners over the activated columns", "load_tile(b + kColumns * Tile::kRowBytes,", "load_tile(b,"),
    _fault("always the first half is activated", "second ? across : 0,", "0,", _HOST),
    _fault("the partner's bias is the activated one's", "finish_pre(std::integral_constant<int, kHalf>(), args.other, maps.other);", "finish_pre(std::integral_constant<int, kHalf>(), args.active, maps.other);"),
    _fault("both halves of pre in one place", "args.other, maps.other);", "args.other, maps.pre);"),
    _fault("the last columns of pre are not stored", "if (both) store_part<T, kAt + kMiddle>(part, c, map,", "if (false) store_part<T, kAt + kMiddle>(part, c, map,"),
    _fault("the last columns of c are not stored", "if (!both) return;", "return;"),
    _fault("a second part where there are no columns", "const bool both = column + kSwizzled < args.columns;", "const bool both = column + 2 * kSwizzled < args.columns;"),
    _fault("the last columns are not activated", "for (int i = 2 * kMiddle; i < kHalf; ++i)", "for (int i = 2 * kMiddle; i < 2 * kMiddle; ++i)"),
    _fault("c's second part where the first one is", "store_part<T, kMiddle>(part, c, maps.c, row, column + 2 * kMiddle);", "store_part<T, kMiddle>(part, c, maps.c, row, column);"),
    _fault("bias of 64 of the 96 columns", "add_bias<T, kAt, kHalf / 4>", "add_bias<T, kAt>"),
    _fault("the partner is not multiplied", "for (int i = 0; i < 2 * kMiddle; ++i) c[i] = Function::template of<T>(c[i]) * c[kHalf + i];", "for (int i = 0; i < 2 * kMiddle; ++i) c[i] = Function::template of<T>(c[i]);"),
    _fault("rows of the weight's first half alone", "slope ? args.depth : halves * args.columns", "slope ? args.depth : args.columns", _HOST),
    _fault("halves of pre the wrong way round", "make_pre(maps.pre, second) &&", "make_pre(maps.pre, !second) &&", _HOST),
    _fault("rows of pre as short as c's", "args.rows, args.columns, halves * args.columns,", "args.rows, args.columns, args.columns,", _HOST),
    _fault("gated silu is gelu-tanh", "if (activation == Activation::kSilu) return hopper_kernel<T, Silu, true>;", "if (activation == Activation::kSilu) return hopper_kernel<T, GeluTanh, true>;", _HOST),
    # host and launcher
    _fault("pre's map is c's", "static_cast<const T*>(pre) + (behind", "static_cast<const T*>(args.c) + (behind", _HOST),
    _fault("rows of x without a gap", "args.rows, args.depth, args.a_stride, Tile::kRows)", "args.rows, args.depth, args.depth, Tile::kRows)", _HOST),
    _fault("a misaligned bias is taken", "if (reinterpret_cast<std::uintptr_t>(args.bias) % 4 != 0) return", "if (false) return", _HOST),
    _fault("every device has it", "return known && major == 9", "return !known || major == 9", _DEVICES),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=("tests/ptx/test_cuda_linear_hopper.py", "-k", "not error_rule and not 2100"),
    **IN_EMULATOR,
)
