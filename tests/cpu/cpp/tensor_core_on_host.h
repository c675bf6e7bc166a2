// csrc/cuda/tensor_core.cuh's instructions of a whole warp, on the host: written out from the fragments'
// layout in the PTX ISA. An asynchronous copy lands at once, or when it is waited for (cuda_on_host::late);
// until then its target holds NaN.
#pragma once

#include "cuda_on_host.h"

namespace fastbert {
namespace cuda {
namespace on_host {

using cuda_on_host::fail;
using cuda_on_host::give;
using cuda_on_host::given_by;
using cuda_on_host::lane_index;
using cuda_on_host::Together;

template <class T>
float element(std::uint64_t word, int half) {
    T x;
    x.bits = static_cast<std::uint16_t>(word >> (16 * half));
    return widen(x);
}

inline void matrices(std::uint32_t (&words)[4], const void* row, bool transposed) {
    if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) fail("ldmatrix: an address that 16 does not divide");
    const std::uint64_t address = reinterpret_cast<std::uintptr_t>(row);
    give(transposed ? Together::kMatricesTransposed : Together::kMatrices, &address, 1);
    const int group = lane_index() / 4, pair = lane_index() % 4;
    const auto at = [&](int matrix, int i, int j) {
        return reinterpret_cast<const std::uint16_t*>(given_by(8 * matrix + i)[0])[j];
    };
    for (int m = 0; m < 4; ++m) {
        const std::uint32_t low = transposed ? at(m, 2 * pair, group) : at(m, group, 2 * pair);
        const std::uint32_t high = transposed ? at(m, 2 * pair + 1, group) : at(m, group, 2 * pair + 1);
        words[m] = low | high << 16;
    }
    // A lane that goes on may write to what others still read.
    give(Together::kSync, nullptr, 0);
}

inline void land(const cuda_on_host::Copy& copy) {
    if (copy.source == nullptr)
        std::memset(copy.target, 0, copy.bytes);
    else
        std::memcpy(copy.target, copy.source, copy.bytes);
}

}  // namespace on_host

template <class T>
void mma(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    using namespace on_host;
    const std::uint64_t words[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    give(Together::kProduct, words, 6);
    const int group = lane_index() / 4, pair = lane_index() % 4;
    for (int i = 0; i < 4; ++i) {
        const int column = 2 * pair + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            // A's word: rows from 8 on are the odd ones, columns from 8 on the later two.
            const float x = element<T>(given_by(4 * group + k % 8 / 2)[i / 2 + 2 * (k / 8)], k % 2);
            const float y = element<T>(given_by(4 * column + k % 8 / 2)[4 + k / 8], k % 2);
            sum += static_cast<double>(x) * y;
        }
        c[i] = static_cast<float>(sum);
    }
}

inline void load_matrices(std::uint32_t (&words)[4], const void* row) {
    on_host::matrices(words, row, false);
}
inline void load_matrices_transposed(std::uint32_t (&words)[4], const void* row) {
    on_host::matrices(words, row, true);
}

inline void copy_bytes(void* shared, const void* global, bool inside, std::size_t bytes) {
    using namespace cuda_on_host;
    if (reinterpret_cast<std::uintptr_t>(shared) % bytes != 0 ||
        (inside && reinterpret_cast<std::uintptr_t>(global) % bytes != 0))
        fail("cp.async: an address that is no multiple of its bytes");
    const Copy copy{shared, inside ? global : nullptr, bytes};
    if (!late) return on_host::land(copy);
    std::memset(shared, 0xff, bytes);
    fibers[current].copies.back().push_back(copy);
}
inline void copy_chunk(void* shared, const void* global, bool inside) {
    copy_bytes(shared, global, inside, 16);
}
inline void copy_word(void* shared, const void* global, bool inside) {
    copy_bytes(shared, global, inside, 4);
}
inline void commit_copies() {
    using namespace cuda_on_host;
    fibers[current].copies.emplace_back();
}
template <int kPending>
void wait_copies() {
    using namespace cuda_on_host;
    auto& groups = fibers[current].copies;
    // The last group is the open one.
    while (groups.size() > kPending + 1u) {
        for (const Copy& copy : groups.front()) on_host::land(copy);
        groups.erase(groups.begin());
    }
}

inline float exp2_fast(float x) {
    const float y = std::exp2(x);
    return y < 0x1p-126f ? 0.0f : y;
}
inline float tanh_fast(float x) { return std::tanh(x); }

}  // namespace cuda
}  // namespace fastbert
