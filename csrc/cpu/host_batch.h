// A padded batch of ids in CPU memory, packed as a recorded graph reads it (fastbert/graphs/staging.py). One
// pass each over the mask and the ids, where PyTorch would need ten ops.
#pragma once

#include <cstdint>

namespace fastbert {

// A (rows, cols) matrix of integers, booleans or float32; strides in elements.
struct IdMatrix {
    const void* data;
    std::int64_t rows, cols, row_stride, col_stride;
    std::int32_t dtype;  // PyTorch's code
};

// Whether the tensor (the address of a TensorImpl) is such a matrix, in CPU memory; or, with a `layer` of 0
// or more, whether that layer of it is one.
bool id_matrix(void* tensor, std::int64_t layer, IdMatrix* out);
// Whether it holds int32 or int64.
bool is_integer(const IdMatrix& matrix);

struct Kept {
    std::int64_t total = 0, longest = 0;
    bool first = true;  // every sequence that has kept tokens keeps the one at position 0
};

// The kept tokens (those that are not 0) of a mask.
Kept count_kept(const IdMatrix& mask);

// What ids are legal, and what positions they have.
struct IdRules {
    std::int64_t vocab_size, type_vocab_size;
    // -1: a position is a column. Otherwise an id other than `pad` has the position `pad` + its count in its
    // row so far, and `pad` has the position `pad` (RoBERTa).
    std::int64_t pad;
};

// Where a packed batch goes: `tokens` rows each of ids, positions and types, room + 1 ends, and `tokens`
// flat positions in the padded batch (null: they are not wanted, and all tokens are kept).
struct GraphRows {
    std::int64_t *ids, *positions, *types;
    std::int32_t* ends;
    std::int64_t* indices;
    std::int64_t tokens, room;
};

// Packs a batch. Rows behind the kept tokens are 0, ends behind the sequences are the number of tokens.
// `mask` null: all tokens are kept; `ids` null: the ids are left 0; `types` null: all types are 0. The caller
// checks that shapes are (batch, seqlen), and that tokens and sequences have room. False if an id or type,
// masked or not, is not legal.
bool pack_host_batch(const IdRules& rules, std::int64_t batch, std::int64_t seqlen, const IdMatrix* ids,
                     const IdMatrix* mask, const IdMatrix* types, const GraphRows& out);

}  // namespace fastbert
