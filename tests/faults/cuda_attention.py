"""Faults of the CUDA attention's forward, compiled by nvcc and run in the PTX emulator."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_KERNEL = "csrc/cuda/attention_forward.cuh"
_TILES = "csrc/cuda/attention_tiles.cuh"
_ENTRY = "csrc/cuda/attention.cu"
_FLOAT = "csrc/cuda/attention_float.cu"
_fault = faults_of(_KERNEL)

FAULTS = (
    # barriers, waits and the ring
    _fault("no barrier before a tile is read", "        wait_copies<kSlots - 2>();\n        __syncthreads();\n    };", "        wait_copies<kSlots - 2>();\n    };"),
    _fault("no wait for a tile", "        wait_copies<kSlots - 2>();\n        __syncthreads();\n    };", "        __syncthreads();\n    };"),
    _fault("a wait one group short", "        wait_copies<kSlots - 2>();\n        __syncthreads();\n    };", "        wait_copies<kSlots - 1>();\n        __syncthreads();\n    };"),
    _fault("no barrier before q is read", "    wait_copies<kSlots - 2>();\n    __syncthreads();\n    if", "    wait_copies<kSlots - 2>();\n    if"),
    _fault("groups only of tiles that are there", "        if (copies.left > 0) copies.next(ring + slot);\n        commit_copies();", "        if (copies.left <= 0) return;\n        copies.next(ring + slot);\n        commit_copies();"),
    _fault("values into the tile of the keys", "copy_next(kSlots == 4 ? values : keys, before);", "copy_next(kSlots == 4 ? values : keys, slot);"),
    _fault("a copy before the barrier", "        advance();\n        copy_next(kSlots == 4 ? keys : values, before);", "        copy_next(kSlots == 4 ? keys : values, slot);\n        advance();"),
    _fault("out staged where others still read v", "ring + (slot + kTile == kSlots * kTile ? 0 : slot + kTile);", "ring + slot;"),
    _fault("staged rows read before they are written", "    __syncwarp();\n", ""),
    _fault("an idle warp leaves the barriers", "    // A vote, so that", "    if (warp_row >= length) return;\n    // A vote, so that"),
    # places
    _fault("a sequence's tiles in one slot less", "return total / rows + batch + 1;", "return total / rows + batch;", _TILES),
    _fault("a search that stops one early", "const int before = __popc(__ballot_sync(kAllLanes, reached) >> 1) * step;", "const int before = __popc(__ballot_sync(kAllLanes, reached) >> 2) * step;", _TILES),
    _fault("rows after the sequences keep what they had", "        zero_rows<T, kHeadDim>(args, start + first_row, head);\n", ""),
    _fault("lse after the sequences unset", "if (i % kChunks == 0 && args.lse != nullptr) args.lse[head * args.total + row] = 0.0f;", ""),
    # copies and tiles
    _fault("a tile's last rows from the next sequence", "row() + i * kRowsAtOnce < left);", "row() + i * kRowsAtOnce <= left);", _TILES),
    _fault("one tile again and again", "copy_chunk(to + i * kStep, from, true);", "copy_chunk(to + i * kStep, from - (i == 3) * step, true);", _TILES),
    _fault("rows that are left not counted down", "        left -= kTileRows;\n", "", _TILES),
    _fault("heads of keys one apart from those of q", "return static_cast<const T*>(heads.data) + start * heads.row_stride + head * heads.head_stride;", "return static_cast<const T*>(heads.data) + start * heads.row_stride + head * args.q.head_stride;"),
    _fault("keys' upper and lower rows exchanged", "8 * (across ? upper : second), across ? second : upper)", "8 * (across ? second : upper), across ? upper : second)", _TILES),
    _fault("values not transposed", "load_matrices_transposed(b, ring", "load_matrices(b, ring"),
    _fault("P's halves exchanged", "p[n / 2][n % 2 * 2 + r] = pack_pair<T>(scores[n][2 * r], scores[n][2 * r + 1]);", "p[n / 2][n % 2 + 2 * r] = pack_pair<T>(scores[n][2 * r], scores[n][2 * r + 1]);"),
    # softmax
    _fault("one key too many", "if (8 * n + i >= most ||", "if (8 * n + i > most ||"),
    _fault("a query that does not see itself", "const int after = row + 8 * r + 1;", "const int after = row + 8 * r;"),
    _fault("causal ends one tile early", "first_row + kTileRows < length ? first_row + kTileRows : length;", "first_row + kTileRows < length ? first_row : length;"),
    _fault("the diagonal's tile not masked", "seen = args.causal && first_row + 1 < length ? first_row + 1 : length;", "seen = args.causal && first_row + 64 < length ? first_row + 64 : length;"),
    # windows and shared heads
    _fault("a tile on the left not copied", "begin = reach.first_key(first_row) / kTileRows * kTileRows;", "begin = reach.first_key(first_row + 1) / kTileRows * kTileRows;"),
    _fault("the walk ends with the first row's keys", "end = reach.end_key(first_row + kTileRows - 1);", "end = reach.end_key(first_row);"),
    _fault("tiles on the left not masked", "(kLocal && first_key < whole)", "(kLocal && first_key < begin)"),
    _fault("tiles on the right not masked", "seen = reach.end_key(first_row);", "seen = length;"),
    _fault("one key too many on the left", "(kLocal && 8 * n + i < least)", "(kLocal && 8 * n + i + 1 < least)"),
    _fault("one key too few on the right", "row + right < length ? row + right + 1 : length", "row + right < length ? row + right : length", _TILES),
    _fault("no limit is a limit of 0", "return side < 0 || side > length ? length", "return side > length ? length", _TILES),
    _fault("heads share by their remainder", "return head / (static_cast<int>(args.nheads) / static_cast<int>(args.kv_heads));", "return head % static_cast<int>(args.kv_heads);", _TILES),
    _fault("values of the query's own head", "values(rows_of(args.v, kv_head)", "values(rows_of(args.v, head)"),
    _fault("shared heads without a window as if not shared", "args.kv_heads != args.nheads || args.window.left", "args.window.left", _TILES),
    _fault("out not rescaled", "                        out[n][2 * r] *= shrink;\n", ""),
    _fault("norm not rescaled", "                    rows.norm[r] *= shrink;\n", ""),
    _fault("a row's maximum by half its lanes", "top[r] = fmaxf(top[r], __shfl_xor_sync(kAllLanes, top[r], 2));", ""),
    _fault("a first maximum that shrinks nothing to NaN", "grown ? (first ? 0.0f : exp2_fast(less)) : 1.0f;", "grown ? exp2_fast(less) : 1.0f;"),
    _fault("any slack", "constexpr float kSlack = 8.0f;", "constexpr float kSlack = 800.0f;"),
    _fault("lse in units of log 2", "(rows.base[r] + log2f(norm)) * kLn2;", "rows.base[r] + log2f(norm);"),
    _fault("an empty row divides by 0", "const float factor = norm == 0.0f ? 0.0f : common / norm;", "const float factor = common / norm;"),
    _fault("the scale folded though it is negative", "if (args.bias.data != nullptr || !(args.softmax_scale > 0.0f))", "if (args.bias.data != nullptr)"),
    _fault("bias of the rows' first", "(row + 8 * r < length ? row + 8 * r : first_row)", "(row + 8 * r < length ? row : first_row)"),
    _fault("one sequence's bias for all", "args.bias.data + place.sequence * args.bias.batch_stride +", "args.bias.data +"),
    _fault("gate forgotten", "(args.gate != nullptr ? args.gate[head] : 1.0f);", "1.0f;"),
    # dropout
    _fault("what is kept not scaled", "const float common = args.dropout.scale *", "const float common = 1.0f *"),
    _fault("rows of the sequence, not of the pack", "static_cast<std::uint32_t>(start + warp_row),", "static_cast<std::uint32_t>(warp_row),"),
    _fault("halves that borrow", "const std::uint32_t low = (word | 0x80008000u) - t.low15;", "const std::uint32_t low = word - t.low15;", _TILES),
    _fault("thresholds from one half on", "return {low | low << 16, threshold >> 31 ? 0u : 0xffffffffu};", "return {low | low << 16, 0xffffffffu};", _TILES),
    _fault("a neighbour's columns", "low[i] = bytes << (7 - 2 * pair);", "low[i] = bytes << (5 - 2 * pair & 7);", _TILES),
    _fault("saved words of lanes not exchanged", "lane / 2 == 0 ? 0x5410 : 0x3276);", "0x5410);", _TILES),
    _fault("saved past a row's words", "if (saved != nullptr && at < words) saved[at]", "if (saved != nullptr) saved[at]"),
    _fault("saved rows past the length", "args.keep_bits != nullptr && saved_row < length\n", "args.keep_bits != nullptr\n"),
    # out, and the choice of a kernel
    _fault("out of rows past the length", "        if (warp_row + at < length)\n", ""),
    _fault("any stride", "heads.row_stride % pack == 0", "heads.row_stride % 2 == 0", _ENTRY),
    # float32
    _fault("float32: one key too many", "if (8 * j >= most || (kLocal", "if (8 * j > most || (kLocal", _FLOAT),
    _fault("float32: out not rescaled", "out[i][d] *= shrink;", "out[i][d] *= 1.0f;", _FLOAT),
    _fault("float32: norm not rescaled", "                norm[i] *= shrink;\n", "", _FLOAT),
    _fault("float32: no barrier before a tile is read", "        wait_copies<0>();\n        __syncthreads();\n", "        wait_copies<0>();\n", _FLOAT),
    _fault("float32: no wait for a tile", "        wait_copies<0>();\n        __syncthreads();\n", "        __syncthreads();\n", _FLOAT),
    _fault("float32: the next tile into the slot in use", "ring + next % 2 * Tile::kSize", "ring + step % 2 * Tile::kSize", _FLOAT),
    _fault("float32: one half of wide heads twice", "args.v, kv_head, next % kParts, first", "args.v, kv_head, 0, first", _FLOAT),
    _fault("float32: bias of the lane's first row", "row + 4 * i < length ? row + 4 * i : first_row;", "row + 4 * i < length ? row : first_row;", _FLOAT),
    _fault("float32: one sequence's bias for all", "args.bias.data + place.sequence * args.bias.batch_stride +", "args.bias.data +", _FLOAT),
    _fault("float32: the last tile of keys unmasked", "if (first_key + kTileRows > seen || (kLocal && first_key < whole)) {", "if ((args.causal && first_key + kTileRows > seen) || (kLocal && first_key < whole)) {", _FLOAT),
    _fault("float32: the diagonal's tile unmasked", "first_row + 1 < length ? first_row + 1 : length;", "first_row + 64 < length ? first_row + 64 : length;", _FLOAT),
    _fault("float32: P v ends eight keys early", "first_key + 8 * g < end", "first_key + 8 * g + 8 < end", _FLOAT),
    _fault("float32: a row by half its lanes", "lane < 16; lane *= 2", "lane < 8; lane *= 2", _FLOAT),
    _fault("float32: -inf less -inf", "const float less = top == -INFINITY ? 0.0f : top;", "const float less = top;", _FLOAT),
    _fault("float32: one key too many before the window", "kLocal && 8 * j < least", "kLocal && 8 * j + 8 < least", _FLOAT),
    _fault("float32: one key too few before the window", "kLocal && 8 * j < least", "kLocal && 8 * j <= least", _FLOAT),
    _fault("float32: a window's first tile unmasked", "|| (kLocal && first_key < whole)) {", ") {", _FLOAT),
    _fault("float32: a window's last tile unmasked", "seen = reach.end_key(first_row);", "seen = reach.end_key(first_row + kTileRows - 1);", _FLOAT),
    _fault("float32: tiles before the window from anywhere", "reach.first_key(first_row) / kTileRows * kTileRows;", "reach.first_key(first_row + kTileRows - 1) / kTileRows * kTileRows;", _FLOAT),
    _fault("float32: a window ends with the tile's first row", "reach.end_key(first_row + kTileRows - 1);", "reach.end_key(first_row);", _FLOAT),
    _fault("float32: the first tile of keys is the sequence's", "copy(args.k, kv_head, 0, begin, end, ring);", "copy(args.k, kv_head, 0, 0, end, ring);", _FLOAT),
    _fault("float32: heads of k as many as of q", "kLocal ? kv_head_of(args, head) : head;", "head;", _FLOAT),
    _fault("float32: windows by the kernel without", "is_local(args) ? attention_forward_float_kernel<kHeadDim, true>", "is_local(args) && false ? attention_forward_float_kernel<kHeadDim, true>", _FLOAT),
    _fault("float32: an idle warp leaves the barriers", "    // A vote, so that", "    if (first_row + 16 * warp >= length) return;\n    // A vote, so that", _FLOAT),
    _fault("float32: strides as in half precision", "kFloat32 ? 4 : 8", "kFloat32 ? 8 : 8", _ENTRY),
    _fault("float32: dropout left out", "if (wide && (args", "if (false && (args", _ENTRY),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/ptx/test_cuda_attention.py",
        "-k",
        "not hopper and not error_rule and not sequences[sm_80-10",
    ),
    **IN_EMULATOR,
)
