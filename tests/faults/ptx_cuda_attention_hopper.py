"""Faults of attention's forward for compute capability 9.0, in the PTX emulator: masks, waits, rings, rescaling."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_KERNEL = "csrc/cuda/attention_hopper.cuh"
_HOST = "csrc/cuda/attention_hopper.cu"
_fault = faults_of(_KERNEL)

FAULTS = (
    # tails
    _fault("scores behind the end count", "        if (!kLocal) softmax.mask(last - 2 * pair);\n", ""),
    _fault("the mask is one key late", "softmax.mask(last - 2 * pair);", "softmax.mask(last + 1 - 2 * pair);"),
    _fault("odd keys are masked like even ones", "if (8 * n + i % 2 >= most)", "if (8 * n >= most)"),
    _fault("values behind the end stay", "*reinterpret_cast<uint4*>(tile + i * kChunkBytes) = uint4{};", "(void)i;"),
    _fault("a row of values too many is cleared", "for (int i = end * kChunks + thread - first;", "for (int i = (end - 1) * kChunks + thread - first;"),
    _fault("values are cleared before they come", "        values.wait(value);\n        clear_rows", "        clear_rows"),
    _fault("zeros without a fence", "        fence_shared();\n        __syncwarp();\n        if (lane == 0) arrive(&cleared);", "        __syncwarp();\n        if (lane == 0) arrive(&cleared);"),
    _fault("one warp's zeros are waited for", "init_barrier(&cleared, enders * Tile::kWarps);", "init_barrier(&cleared, 1);"),
    _fault("queries behind the end are stored", "        if (warp_row + at < length)\n", ""),
    # windows and shared heads
    _fault("the window hides nothing in the first tile", "    if (kLocal) hide(begin);\n", ""),
    _fault("the window hides nothing in later tiles", "        if (kLocal) hide(tile);\n", ""),
    _fault("a warp's last row decides on the left for none", "first_key >= reach.first_key(warp_row + 15)", "first_key >= reach.first_key(warp_row)"),
    _fault("keys are hidden as if the block began the sequence", "const int first_key = (skipped + tile) * kTileRows;", "const int first_key = tile * kTileRows;"),
    _fault("the second group begins with a tile too many", "const int begin = kLocal ? first_tile(first_row + group * kTileRows) - skipped : 0;", "const int begin = kLocal ? first_tile(first_row + group * kTileRows + kTileRows) - skipped : 0;"),
    _fault("a skipped tile is not given back", "            keys.release(key);\n            values.release(value);\n        }\n        key.next();\n        value.next();\n    }", "        }\n        key.next();\n        value.next();\n    }"),
    _fault("a group ends with the other's tiles", "const int upto = kLocal ? tiles_until(first_row + (group + 1) * kTileRows - 1) - skipped : tiles;", "const int upto = kLocal ? tiles_until(first_row + kTileRows - 1) - skipped : tiles;"),
    _fault("zeros are waited for from a group that makes none", "tiles_until(first_row + kTileRows - 1) < all ? 1 : groups;", "tiles_until(first_row + kTileRows - 1) < all ? groups : groups;"),
    _fault("the second group's zeros begin with its number", "kLocal ? (groups - enders) * kGroupThreads : 0", "0"),
    _fault("keys of the query's own head", "keys.fill(tile, maps.k, first_key_row + tile * kTileRows, kv_column);", "keys.fill(tile, maps.k, first_key_row + tile * kTileRows, column);"),
    # rings
    _fault("keys are read before they come", "        keys.wait(key);\n        values.wait(value);\n        fence_products();", "        values.wait(value);\n        fence_products();"),
    _fault("queries are read before they come", "    wait_phase(&asked, 0);\n", ""),
    _fault("slots are filled while they are read", "        if (turn > 0) wait_phase(&empty[slot], (turn - 1) & 1);\n", ""),
    _fault("a slot counts as free when one warp is done", "init_barrier(&keys.empty[i], groups * Tile::kWarps);", "init_barrier(&keys.empty[i], 1);"),
    _fault("a ring waits for a group that is not there", "init_barrier(&values.empty[i], groups * Tile::kWarps);", "init_barrier(&values.empty[i], 2 * Tile::kWarps);"),
    _fault("values are given back while they are read", "        wait_products<0>();\n        if (lane == 0) {", "        wait_products<1>();\n        if (lane == 0) {"),
    _fault("keys are not given back", "            keys.release(key);\n            values.release(value);\n        }\n        key.next();\n        value.next();\n        //", "            values.release(value);\n        }\n        key.next();\n        value.next();\n        //"),
    _fault("a turn of the ring keeps its parity", "slot = 0, parity ^= 1;", "slot = 0;"),
    _fault("keys are not filled again", "            if (next_keys >= Tile::kSlots && next_keys < tiles) fill_keys(next_keys);\n", ""),
    _fault("values are filled beyond the end", "next_values >= Tile::kSlots && next_values < tiles", "next_values >= Tile::kSlots"),
    _fault("barriers are used before they are there", "            fill_values(tile);\n        }\n    }\n    __syncthreads();\n", "            fill_values(tile);\n        }\n    }\n"),
    _fault("both groups have the first queries", "start + first_row + i * kTileRows,", "start + first_row,"),
    _fault("values of the first head", "values.fill(tile, maps.v, first_key_row + tile * kTileRows, kv_column);", "values.fill(tile, maps.v, first_key_row + tile * kTileRows, 0);"),
    # products
    _fault("the tile before is added to the scores", "q[d], b + d * kDepthStep, d > 0)", "q[d], b + d * kDepthStep, true)"),
    _fault("sums begin anew with each tile", "        start_sums(tile > begin + 1);\n", "        start_sums(false);\n"),
    _fault("the depth of the keys does not advance", "b + d * kDepthStep", "b"),
    _fault("values are stepped like keys", "b + n * kTransposedStep", "b + n * kDepthStep"),
    _fault("values are not transposed", "group_product<T, 1>(softmax.out,", "group_product<T, 0>(softmax.out,"),
    _fault("the first scores are read while they are made", "    wait_products<0>();\n    if (lane == 0) keys.release(key);", "    if (lane == 0) keys.release(key);"),
    _fault("out is read while it is made", "    start_sums(upto - begin > 1);\n    wait_products<0>();\n", "    start_sums(upto - begin > 1);\n"),
    # softmax
    _fault("the maximum of one lane", "        x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));\n", ""),
    _fault("maxima never follow", "sum[0] > kMostSum || sum[1] > kMostSum", "sum[0] > 1e38f && sum[1] > 1e38f"),
    _fault("rows follow their warp's maximum", "most_of_row(sum[r]) > kMostSum ? fmaxf(top[r], base[r]) : base[r]", "fmaxf(top[r], base[r])"),
    _fault("sums are not rescaled", "                    out[4 * n + 2 * r] *= shrink;\n", ""),
    _fault("P keeps its old maximum", "            exponentiate(sum);\n        }\n#pragma", "        }\n#pragma"),
    _fault("a low tile after scores of minus infinity is lost", "constexpr float kNone = -1e30f;", "constexpr float kNone = 0.0f;"),
    _fault("the norm of the last tile alone", "norm[r] += sum[r];", "norm[r] = sum[r];"),
    _fault("lse in units of log 2", "log2f(norm)) * kLn2;", "log2f(norm));"),
    _fault("a row of zeros is divided", "norm == 0.0f ? 0.0f : common / norm", "common / norm"),
    # dropout
    _fault("bits of the tile before", "softmax.drop(draw(tile));", "softmax.drop(draw(tile - 1));"),
    _fault("the first tile is not dropped from", "    if (kDrop) softmax.drop(draw(begin));\n", "    if (kDrop) draw(begin);\n"),
    _fault("bits of the first sequence's rows", "static_cast<std::uint32_t>(start + warp_row)", "static_cast<std::uint32_t>(warp_row)"),
    _fault("words past the row are saved", "if (saved != nullptr && at < words)", "if (saved != nullptr)"),
    _fault("what is kept is not scaled", "args.dropout.scale * (args.gate", "1.0f * (args.gate"),
    _fault("the gate is forgotten", "(args.gate != nullptr ? args.gate[head] : 1.0f)", "1.0f"),
    # host and launcher
    _fault("the map of k is of q", "map_heads(maps.k, args, args.k,", "map_heads(maps.k, args, args.q,", _HOST),
    _fault("rows without a gap", "heads.row_stride,\n                    kTileRows)", "count * args.headdim,\n                    kTileRows)", _HOST),
    _fault("slots of 64 rows", "Tile::kRows<kHeads>)", "kTileRows) / 2", _HOST),
    _fault("a causal mask is forgotten", "if (is_masked(args))", "if (is_local(args))", _HOST),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/ptx/test_cuda_attention_hopper.py",
        "tests/ptx/test_cuda_attention.py",
        "-k",
        "hopper and not error_rule and not gradients and not (test_lengths and torch.float16)",
    ),
    **IN_EMULATOR,
)
