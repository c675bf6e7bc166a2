"""Faults of the C++ embedding, and of the LayerNorm rows it shares."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_SIMD = "csrc/cpu/embedding_simd.cpp"
_ROWS = "csrc/cpu/norm_rows.h"
_TASKS = "csrc/cpu/embedding.cpp"
_BINDING = "csrc/bindings/embedding.cpp"
_AVX2, _AVX512 = "csrc/cpu/vec_avx2.h", "csrc/cpu/vec_avx512.h"
_fault = faults_of(_SIMD)

FAULTS = (
    # forward
    _fault("position forgotten", "if (position != nullptr) z = add(z, load(position + j, n));", ""),
    _fault("segment forgotten", "if (segment != nullptr) z = add(z, load(segment + j, n));", ""),
    _fault("ids not looked up", "lookup.ids == nullptr ? token : lookup.ids[token]", "lookup.ids == nullptr ? token : token % lookup.rows"),
    _fault("tables without gaps", "token) * lookup.stride", "token) * (lookup.stride - 1)"),
    _fault("z not saved", "if (z_out != nullptr) store(z_out + j, z, n);", ""),
    _fault("dropout scale missing", "v = kept(mul(v, keep_scale), bits_at(bits, j));", "v = kept(v, bits_at(bits, j));"),
    _fault("bits of the first token for all", "draw_bits(args.dropout, token, hidden, bits);", "draw_bits(args.dropout, begin, hidden, bits);"),
    _fault("bits of the first 64 columns for all", "bits_at(bits, j));\n                      store", "bits_at(bits, j & 63));\n                      store"),
    _fault("mean without its correction", "args.mean[token] = moments.mean + moments.correction;", "args.mean[token] = moments.correction;"),
    # tables of integers
    _fault("scale forgotten", "return mul(load(row + j, n), scale);", "return load(row + j, n);"),
    _fault("scale of the first row", "args.word_scale[row_number(args.word, token)]", "args.word_scale[0]"),
    _fault("scale of 4 bits forgotten", "first(mul(load_nibbles(row + j / 2, n), scale), n)", "first(load_nibbles(row + j / 2, n), n)"),
    _fault("lanes past a row of 4 bits", "first(mul(load_nibbles(row + j / 2, n), scale), n)", "mul(load_nibbles(row + j / 2, n), scale)"),
    _fault("a byte for each integer of 4 bits", "row + j / 2", "row + j"),
    _fault("4 bits read as 8", "args.word_bits == 8", "args.word_bits > 0"),
    _fault("halves of a byte swapped", "_mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));", "_mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), low), _mm_and_si128(bytes, low));", _AVX512),
    _fault("last integer of an odd row lost", "mask_of((n + 1) / 2)", "mask_of(n / 2)", _AVX512),
    _fault("4 bits from 0 to 15", "_mm_sub_epi8(both, _mm_set1_epi8(8))", "both", _AVX2),
    _fault("a number of bits that is none", 'if (word_bits != 0 && word_bits != 4 && word_bits != 8) refuse("word_bits", "0, 4 or 8", word_bits);', "", _BINDING),
    _fault("missing scales", 'if (word_bits != 0) check_given("word_scale", args.word_scale, tokens);', "", _BINDING),
    # the rows of a LayerNorm
    _fault("variance about 0", "first(sub(load(z + j, n), centre), n)", "first(load(z + j, n), n)", _ROWS),
    _fault("lanes past the row in the variance", "first(sub(load(z + j, n), centre), n)", "sub(load(z + j, n), centre)", _ROWS),
    _fault("bias forgotten", "fma(x_hat, load(weight + j, n), load(bias + j, n))", "mul(x_hat, load(weight + j, n))", _ROWS),
    _fault("mean of g forgotten", "kRms ? g : sub(g, broadcast(mean_g[r]))", "g", _ROWS),
    _fault("mean of g x_hat forgotten", "fnma(x_hat, broadcast(mean_gx[r]), ", "fnma(zero(), broadcast(mean_gx[r]), ", _ROWS),
    _fault("means of the first row for all", "row_means<kNorm>(rows, r, upstream, mean_g[r], mean_gx[r])", "row_means<kNorm>(rows, 0, upstream, mean_g[r], mean_gx[r])", _ROWS),
    _fault("dbias overwritten", "store(dbias + j, add(load(dbias + j, n), db), n);", "store(dbias + j, db, n);", _ROWS),
    # backward of a token
    _fault("dropout forgotten in backward", "return dropout ? kept(mul(grad, keep_scale), bits_at(bits + r * bit_words, j)) : grad;", "return grad;"),
    _fault("backward's dropout scale missing", "kept(mul(grad, keep_scale), bits_at(bits + r * bit_words, j))", "kept(grad, bits_at(bits + r * bit_words, j))"),
    _fault("bits of the first row for four", "bits_at(bits + r * bit_words, j)", "bits_at(bits, j)"),
    _fault("rows of dinputs_embeds in one place", "store(dinputs + r * hidden + j, dz[r], n);", "store(dinputs + j, dz[r], n);"),
    _fault("dbias of a chunk not zeroed", "for (std::int64_t j = 0; j < 2 * padded(args.hidden); ++j)", "for (std::int64_t j = 0; j < padded(args.hidden); ++j)"),
    _fault("last tokens of a chunk lost", "for (; token < end; ++token) backward_block<T, 1>(args, weight, token, dz, partial, bits);", ""),
    # sums over tokens
    _fault("tokens past 32 lost", "for (std::int64_t t = 0; t < count; t += kGroup) {", "for (std::int64_t t = 0; t < kGroup; t += kGroup) {"),
    _fault("the last group as long as a whole one", "count - t < kGroup ? count - t : kGroup", "kGroup"),
    _fault("every group the first one", "hidden, tokens + t, count - t", "hidden, tokens, count - t"),
    _fault("all tokens in one float", "constexpr std::int64_t kGroup = 32;", "constexpr std::int64_t kGroup = 1 << 20;"),
    _fault("vectors of a tile all the first", "load(row + v * kLanes, v + 1", "load(row, v + 1"),
    _fault("last columns lost", "for (; j < columns; j += kLanes) {", "for (; j + kLanes <= columns; j += kLanes) {"),
    _fault("a task's columns begin at 0", "row * hidden + column;", "row * hidden;"),
    # tasks
    _fault("padding row not skipped", "v == table.skip ? 0 : starts", "starts", _TASKS),
    _fault("padding row skipped by number of tokens", "v == table.skip ? 0 :", "order[starts[v]] == table.skip ? 0 :", _TASKS),
    _fault("first token lost", "for (std::int64_t t = tokens - 1; t >= 0; --t)", "for (std::int64_t t = tokens - 1; t > 0; --t)", _TASKS),
    _fault("rows without a token not written", "std::memset(static_cast<char*>(table.out) + (v * hidden + column) * item, 0, columns * item);", ";", _TASKS),
    _fault("last row of a block lost", "end = std::min(table.rows, begin + rows);", "end = std::min(table.rows, begin + rows) - 1;", _TASKS),
    _fault("rows past the table", "end = std::min(table.rows, begin + rows);", "end = begin + rows;", _TASKS),
    _fault("last block lost", "parallel_for(blocks * tiles, team,", "parallel_for(blocks * tiles - 1, team,", _TASKS),
    _fault("workers share their scratch", "scratch + worker * 2 * width);", "scratch);", _TASKS),
    _fault("dbias is dweight", "sum_chunks(partial + k * width, chunks", "sum_chunks(partial, chunks", _TASKS),
    _fault("segment's table forgotten", "{&args.word, &args.position, &args.segment}", "{&args.word, &args.position, &args.position}", _TASKS),
    _fault("last tokens of forward lost", "parallel_for((args.tokens + step - 1) / step, threads", "parallel_for(args.tokens / step, threads", _TASKS),
    # the edges
    _fault("id one past the table", "ids[t] < 0 || ids[t] >= rows", "ids[t] < 0 || ids[t] > rows", _BINDING),
    _fault("negative ids", "ids[t] < 0 || ids[t] >= rows", "ids[t] >= rows", _BINDING),
    _fault("gradient's ids not looked at", "    check_given(name, out.ids, tokens);\n    check_ids(name, out.ids, tokens, out.rows);", "", _BINDING),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/cpu/test_embedding.py",
        "tests/cpu/test_integer_tables.py",
        "-k",
        "not error_rule and not repeats and not compiled and not mib and not default",
    ),
    **IN_PLACE,
)
