"""Faults of the CUDA C++ linear, compiled by nvcc and run in the PTX emulator."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_TILES = "csrc/cuda/linear_tiles.cuh"
_PLAN = "csrc/cuda/linear.cu"
_PASSES = "csrc/cuda/linear_passes.cu"
_ACTIVATION = "csrc/cuda/activation.cuh"
_fault = faults_of(_TILES)

FAULTS = (
    # barriers and waits
    _fault("no barrier before the first fragments", "    wait_copies<kSlots - 2>();\n    __syncthreads();\n    load(0, 0, 0);", "    wait_copies<kSlots - 2>();\n    load(0, 0, 0);"),
    _fault("first wait a group late", "    wait_copies<kSlots - 2>();\n    __syncthreads();\n    load(0, 0, 0);", "    wait_copies<kSlots - 1>();\n    __syncthreads();\n    load(0, 0, 0);"),
    _fault("no barrier in the loop", "                wait_copies<kSlots - 2>();\n                __syncthreads();\n            }", "                wait_copies<kSlots - 2>();\n            }"),
    _fault("no wait in the loop", "                wait_copies<kSlots - 2>();\n                __syncthreads();\n            }", "                __syncthreads();\n            }"),
    _fault("copies are not committed", "        commit_copies();\n", ""),
    _fault("slot reused while it is read", "if (step == 0) copy(spare);", "if (step == 0) copy(slot);"),
    _fault("slot of the next step overwritten", "if (step == 0) copy(spare);", "if (step == 0) copy(following);"),
    _fault("copies before the barrier that frees their slot", "        spare = slot;\n        slot = following;", "        slot = following;\n        spare = slot;"),
    _fault("no barrier before the epilogue", "return store_partials<kGated>(args, own);\n    __syncthreads();\n", "return store_partials<kGated>(args, own);\n"),
    _fault("a warp reads its part before all lanes wrote", "        __syncwarp();\n        const Walk walk(*this);\n        T* line", "        const Walk walk(*this);\n        T* line"),
    _fault("y written over pre's part", "        // The part may be written again.\n        __syncwarp();\n", ""),
    _fault("residual read before all lanes loaded", "        __syncwarp();\n    }\n\n    // Another matrix's elements to acc", "    }\n\n    // Another matrix's elements to acc"),
    _fault("no barrier between the warps' sums of g", "sum[half][i];\n        __syncthreads();\n", "sum[half][i];\n", _PASSES),
    # tiles, fragments, tails
    _fault("a's fragments in b's order", "A::template load<false>", "A::template load<true>"),
    _fault("turned tiles read as they lie", "            load_matrices_transposed(words,", "            load_matrices(words,"),
    _fault("a chunk's place not exchanged", "        at = chunk_of<T, kColumns>(row, chunk);", "        at = row * kColumns + chunk * kChunk;"),
    _fault("second half of the fragments twice", "const int lane = static_cast<int>(threadIdx.x) % kWarp;\n        const int first = lane % 8, second = lane / 8 % 2 * 8", "const int lane = static_cast<int>(threadIdx.x) % kWarp;\n        const int first = lane % 8, second = 8"),
    _fault("the depth's tail read past its end", "inside = depth + (kTurned ? i * kRowsAtOnce : 0) < left;", "inside = depth + (kTurned ? i * kRowsAtOnce : 0) < left + kChunk;"),
    _fault("turned rows behind the end", "(kTurned ? i * kRowsAtOnce : 0) < left;", "0 < left;"),
    _fault("the last line forgotten", "rows - (kLayout == Layout::kWeights ? kChunk : 1)", "rows - (kLayout == Layout::kWeights ? kChunk : 2)"),
    _fault("columns past the last one", "return up_to(across.of(own), last) + across.partner(own);", "return across.of(own) + 0 * last + across.partner(own);"),
    _fault("the second tile of the depth again", "            from[i] += step;\n", "            from[i] += i == 0 ? step : 0;\n"),
    _fault("steps of depth by a's own tile", "step = kTurned ? kDepth * stride : kDepth;", "step = kTurned ? kLines * stride : kDepth;"),
    _fault("parts start at the first step", "    int depth = begin * Shape::kDepth;", "    int depth = 0 * begin;"),
    _fault("parts read to the end", "const int last = end * Shape::kDepth < all_depth ? end * Shape::kDepth : all_depth;", "const int last = end * Shape::kDepth;"),
    _fault("groups of row tiles overlap", "const int first = static_cast<int>(index / wide) * kGroup,", "const int first = static_cast<int>(index / wide) * (kGroup - 1),"),
    # the epilogue
    _fault("bias in every part", "bias != nullptr && blockIdx.y == 0 && column < columns", "bias != nullptr && column < columns"),
    _fault("bias of the tile's first columns", "first = widen(bias[column + across.partner(within)]);", "first = widen(bias[column - own.column + across.partner(within)]);"),
    _fault("pre behind the activation", "        if (args.pre != nullptr) tile.store(shared, args.pre, args.columns, whole.pre);\n        if (args.activation != Activation::kNone) tile.apply([](float z) { return cheap_gelu<T>(z); });\n", "        if (args.activation != Activation::kNone) tile.apply([](float z) { return cheap_gelu<T>(z); });\n        if (args.pre != nullptr) tile.store(shared, args.pre, args.columns, whole.pre);\n"),
    _fault("residual's high half twice", "            low += first;\n", "            low += second;\n"),
    _fault("residual's stride forgotten", " tile.add(shared, args.residual, args.residual_stride, whole.residual);", " tile.add(shared, args.residual, args.columns, whole.residual);"),
    _fault("rows stored past the last", "if (walk.row + i * kRowsAtOnce < rows)\n                    *reinterpret", "if (walk.row + i * kRowsAtOnce <= rows)\n                    *reinterpret"),
    _fault("copies of the last row summed", "        tile.clear_rows_behind();\n", ""),
    _fault("column sums of half of the rows", "sum += acc[i][j][e] + acc[i][j][e + 2];", "sum += acc[i][j][e];"),
    _fault("parts share their scratch", "(static_cast<std::int64_t>(blockIdx.y) * rows + row) * stride;", "static_cast<std::int64_t>(row) * stride;"),
    # the passes
    _fault("first part twice", "++part, from += stride) {", "++part, from += part > 1 ? stride : 0) {", _PASSES),
    _fault("activation of each part's sum forgotten", "for (int i = 0; i < kChunk; ++i) sum[i] = function(sum[i]);", "for (int i = 0; i < kChunk; ++i) function(sum[i]);", _PASSES),
    _fault("g not times the slope", "g[0][i] *= slope(y[i]);", "slope(y[i]);", _PASSES),
    _fault("a warp's sums left out", "for (int i = 0; i < kPassWarps; ++i) total += slots[i][threadIdx.x];", "for (int i = 1; i < kPassWarps; ++i) total += slots[i][threadIdx.x];", _PASSES),
    # activations
    _fault("cheap gelu's third coefficient", "few ? -0.47983377f : -0.472460395f", "few ? -0.49983377f : -0.492460395f", _ACTIVATION),
    _fault("fp16 with bf16's polynomial", "template <class T>\nconstexpr bool kFewDigits = false;", "template <class T>\nconstexpr bool kFewDigits = true;", _ACTIVATION),
    _fault("cheap gelu swallows NaN", "const float u = least(fabsf(z), few ? 16.0f : 15.0f);", "const float u = fminf(fabsf(z), few ? 16.0f : 15.0f);", _ACTIVATION),
    _fault("relu swallows NaN", "[](float z) { return greatest(z, 0.0f); }", "[](float z) { return fmaxf(z, 0.0f); }", _ACTIVATION),
    _fault("gelu's slope without its sign", "return z > 0.0f ? 1.0f + d : -d;", "return 1.0f + d;", _ACTIVATION),
    _fault("tanh's slope of its half", "return 4.0f * product;", "return 2.0f * product;", _ACTIVATION),
    # gated products
    _fault("partners are the activated columns again", "!= second ? columns : 0;", "!= second ? 0 : 0;"),
    _fault("always the first half is activated", "(own / (kWarpColumns / 2) % 2 == 1) != second", "(own / (kWarpColumns / 2) % 2 == 1)"),
    _fault("a tile's columns as without a gate", "first + (kGated ? own / kWarpColumns * kHalf + own % kHalf : own)", "first + own"),
    _fault("warps share their gated columns", "own / kWarpColumns * kHalf + own % kHalf", "own % kHalf"),
    _fault("gated tiles overlap", "constexpr int kOwnColumns = kGated ? kTileColumns / 2 : kTileColumns;", "constexpr int kOwnColumns = kGated ? kTileColumns / 4 : kTileColumns;"),
    _fault("bias of the first half alone", "bias[column + across.partner(within)]", "bias[column]"),
    _fault("partners of the tile's first columns", "tile.acc[i][j + kColumns / 16][e]", "tile.acc[i][j][e]"),
    _fault("the partner is not multiplied", "y = function(y) * halves.other.acc[i][j][e];", "y = function(y);"),
    _fault("the other half activated", "y = function(y) * halves.other.acc[i][j][e];", "y = y * function(halves.other.acc[i][j][e]);"),
    _fault("halves of pre the wrong way round", "pre + (second ? args.columns : 0)", "pre + (second ? 0 : args.columns)"),
    _fault("rows of pre as short as c's", "halves.other.store(shared, pre + (second ? 0 : args.columns), 2 * args.columns,", "halves.other.store(shared, pre + (second ? 0 : args.columns), args.columns,"),
    _fault("silu by gelu-tanh's formula", "else if (args.activation == Activation::kSilu)", "else if (args.activation == Activation::kNone)"),
    _fault("a gated residual's stride forgotten", "halves.active.add(shared, args.residual, args.residual_stride, whole.residual);", "halves.active.add(shared, args.residual, args.columns, whole.residual);"),
    _fault("halves of a part over each other", "halves.other.store_partial(args.partial + stride, 2 * stride);", "halves.other.store_partial(args.partial, 2 * stride);"),
    _fault("half as many gated tiles", "args.gate == Gate::kNone ? kTileColumns : kTileColumns / 2;", "args.gate == Gate::kNone ? kTileColumns : kTileColumns;"),
    _fault("the pass adds the activated half twice", "add_floats(partial + stride,", "add_floats(partial,", _PASSES),
    _fault("the pass forgets the partner", "sum[i] *= other[i];", "sum[i] *= 1.0f;", _PASSES),
    _fault("the pass keeps the halves' order", "store(sum, second ? pre + columns : pre, whole.pre);", "store(sum, pre, whole.pre);", _PASSES),
    _fault("gradient without the partner", "g[0][i] *= z[i];", "g[0][i] *= 1.0f;", _PASSES),
    _fault("gradient of the partner from itself", "g[1][i] = g[0][i] * function(y[i]);", "g[1][i] = g[0][i] * function(z[i]);", _PASSES),
    _fault("gradient's halves exchanged", "starts[2] = {second ? args.columns : 0,", "starts[2] = {kGated && !second ? args.columns : 0,", _PASSES),
    _fault("no barrier between the halves' sums", "        if (half == 1) __syncthreads();\n", "", _PASSES),
    _fault("the halves' sums in one place", "blockIdx.x * width + starts[half] + own", "blockIdx.x * width + starts[0] + own", _PASSES),
    _fault("partners are not summed", "sum[1][i] += g[1][i];", "sum[1][i] = g[1][i];", _PASSES),
    _fault("scratch of one half", "const int halves = gate == Gate::kNone ? 1 : 2;", "const int halves = gate == Gate::kNone ? 1 : 1;", _PLAN),
    # host and launcher
    _fault("scratch without the last columns", "return halves * parts * rows * ((columns + cuda::kChunk - 1) / cuda::kChunk * cuda::kChunk);", "return halves * parts * rows * columns;", _PLAN),
    _fault("the parts are not added", "return error != nullptr || whole ? error : add_parts<T>(args, stream);", "return error != nullptr || args.parts > 0 || whole ? error : add_parts<T>(args, stream);", _PLAN),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/ptx/test_cuda_linear.py",
        "tests/ptx/test_cuda_linear_gated.py",
        *("-k", "not test_error_rule"),
    ),
    **IN_EMULATOR,
)
