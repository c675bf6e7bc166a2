#include "host_batch.h"

#include <algorithm>

#include "tensor_places.h"

namespace fastbert {
namespace {

// codes of c10::ScalarType
constexpr std::int32_t kUint8 = 0, kInt32 = 3, kInt64 = 4, kFloat32 = 6, kBool = 11;

template <class T>
struct Reader {
    const T* data;
    std::int64_t row_stride, col_stride;

    explicit Reader(const IdMatrix& m)
        : data(static_cast<const T*>(m.data)), row_stride(m.row_stride), col_stride(m.col_stride) {}

    T operator()(std::int64_t row, std::int64_t col) const {
        return data[row * row_stride + col * col_stride];
    }
};

// Calls f with the matrix's reader.
template <class F>
auto with_mask(const IdMatrix& m, const F& f) {
    switch (m.dtype) {
        case kInt32:
            return f(Reader<std::int32_t>(m));
        case kInt64:
            return f(Reader<std::int64_t>(m));
        case kFloat32:
            return f(Reader<float>(m));
        default:  // a byte each
            return f(Reader<std::uint8_t>(m));
    }
}

template <class F>
auto with_ids(const IdMatrix& m, const F& f) {
    return m.dtype == kInt32 ? f(Reader<std::int32_t>(m)) : f(Reader<std::int64_t>(m));
}

// Copies the kept elements of a matrix to `out`; they are those of `rows`. False if an element, kept or not,
// is outside [0, size).
bool gather(const IdMatrix& from, std::int64_t size, const GraphRows& rows, std::int64_t* out) {
    return with_ids(from, [&](const auto& at) {
        std::uint64_t seen = 0;  // the highest bit: an element, or size - 1 less the element, was negative
        for (std::int64_t r = 0; r < from.rows; ++r) {
            for (std::int64_t c = 0; c < from.cols; ++c) {
                const auto id = static_cast<std::uint64_t>(at(r, c));
                seen |= id | (static_cast<std::uint64_t>(size - 1) - id);
            }
            const std::int64_t start = rows.ends[r], first = r * from.cols;
            for (std::int64_t t = start; t < rows.ends[r + 1]; ++t)
                out[t] = at(r, rows.indices == nullptr ? t - start : rows.indices[t] - first);
        }
        return seen >> 63 == 0;
    });
}

// Positions of kept tokens as RoBERTa counts them.
void padded_positions(const IdMatrix& ids, std::int64_t pad, const GraphRows& rows) {
    with_ids(ids, [&](const auto& at) {
        std::int64_t t = 0;
        for (std::int64_t r = 0; r < ids.rows; ++r) {
            std::int64_t count = 0;
            for (std::int64_t c = 0; c < ids.cols; ++c) {
                const bool real = at(r, c) != pad;
                count += real;
                if (rows.indices == nullptr || (t < rows.ends[r + 1] && rows.indices[t] == r * ids.cols + c))
                    rows.positions[t++] = real ? pad + count : pad;
            }
        }
    });
}

}  // namespace

bool is_integer(const IdMatrix& matrix) { return matrix.dtype == kInt32 || matrix.dtype == kInt64; }

bool id_matrix(void* tensor, std::int64_t layer, IdMatrix* out) {
    TensorFacts facts;
    const std::int64_t before = layer >= 0;  // dimensions before the rows
    if (!facts_of(tensor, &facts) || facts.device_type != 0 || facts.dim != before + 2) return false;
    // no elements, or zeros without memory
    if (facts.data == nullptr) return false;
    if (before == 1 && layer >= facts.sizes[0]) return false;
    std::int64_t bytes;
    switch (facts.dtype) {
        case kUint8:
        case kBool:
            bytes = 1;
            break;
        case kInt32:
        case kFloat32:
            bytes = 4;
            break;
        case kInt64:
            bytes = 8;
            break;
        default:
            return false;
    }
    const std::int64_t skipped = before == 1 ? layer * facts.strides[0] * bytes : 0;
    *out = {static_cast<const char*>(facts.data) + skipped,
            facts.sizes[before],
            facts.sizes[before + 1],
            facts.strides[before],
            facts.strides[before + 1],
            facts.dtype};
    return true;
}

Kept count_kept(const IdMatrix& mask) {
    return with_mask(mask, [&](const auto& at) {
        Kept kept;
        for (std::int64_t r = 0; r < mask.rows; ++r) {
            std::int64_t length = 0;
            for (std::int64_t c = 0; c < mask.cols; ++c) length += at(r, c) != 0;
            kept.total += length;
            kept.longest = std::max(kept.longest, length);
            kept.first &= length == 0 || at(r, 0) != 0;
        }
        return kept;
    });
}

bool pack_host_batch(const IdRules& rules, std::int64_t batch, std::int64_t seqlen, const IdMatrix* ids,
                     const IdMatrix* mask, const IdMatrix* types, const GraphRows& out) {
    std::int64_t total = 0;
    out.ends[0] = 0;
    const auto keep = [&](std::int64_t r, std::int64_t c) {
        if (out.indices != nullptr) out.indices[total] = r * seqlen + c;
        out.positions[total++] = c;
    };
    for (std::int64_t r = 0; r < batch; ++r) {
        if (mask == nullptr) {
            for (std::int64_t c = 0; c < seqlen; ++c) keep(r, c);
        } else {
            with_mask(*mask, [&](const auto& at) {
                for (std::int64_t c = 0; c < seqlen; ++c)
                    if (at(r, c) != 0) keep(r, c);
            });
        }
        out.ends[r + 1] = static_cast<std::int32_t>(total);
    }
    std::fill(out.ends + batch + 1, out.ends + out.room + 1, static_cast<std::int32_t>(total));
    bool legal = true;
    std::int64_t first_free = 0, first_free_type = 0;
    if (ids != nullptr) {
        legal &= gather(*ids, rules.vocab_size, out, out.ids);
        if (rules.pad >= 0) padded_positions(*ids, rules.pad, out);
        first_free = total;
    }
    if (types != nullptr) {
        legal &= gather(*types, rules.type_vocab_size, out, out.types);
        first_free_type = total;
    }
    std::fill(out.ids + first_free, out.ids + out.tokens, 0);
    std::fill(out.types + first_free_type, out.types + out.tokens, 0);
    std::fill(out.positions + total, out.positions + out.tokens, 0);
    if (out.indices != nullptr) std::fill(out.indices + total, out.indices + out.tokens, 0);
    return legal;
}

}  // namespace fastbert
