// Matrix statements of one warp: ldmatrix, stmatrix, mma.sync.
//
// A lane is member `lane % 4` of group `lane / 4`. In an 8 x 8 tile of 16-bit elements its register holds row
// `group`, columns 2 member and 2 member + 1. Larger operands are several such tiles.
#include "elements.h"
#include "memory.h"

namespace ptx {

namespace {

using Row = double __attribute__((vector_size(64)));  // of eight columns

void whole_warp(uint32_t mask, const char* what) {
    if (mask != ALL)
        fail(Kind::divergent_barrier, ~mask, 0, std::string(what) + " is executed by a part of the warp's lanes");
}

// The offsets of the 16-byte rows that `count` matrices have, given by lanes 0 to 8 count - 1.
void row_offsets(Warp& w, const Op& op, int count, uint32_t* at, const char* what) {
    uint64_t address[LANES];
    addresses(w, op, 0, 0, address);
    for (int l = 0; l < 8 * count; ++l) {
        const uint64_t offset = shared_offset(address[l]);
        w.block->shared->check(offset, 16, uint32_t(l), what);
        at[l] = uint32_t(offset);
    }
}

template <int count, bool trans>
void ldmatrix(Warp& w, const Op& op, uint32_t m) {
    whole_warp(m, "ldmatrix");
    uint32_t at[LANES];
    row_offsets(w, op, count, at, "ldmatrix");
    Shared& shared = *w.block->shared;
    for (int l = 0; l < 8 * count; ++l) shared.on_read<16>(w, at[l], uint32_t(l));
    for (int i = 0; i < count; ++i) {
        uint16_t tile[8][8];
        for (int row = 0; row < 8; ++row) std::memcpy(tile[row], shared.data.data() + at[8 * i + row], 16);
        uint32_t* to = w.lane<uint32_t>(op.dst[i]);
        for (int l = 0; l < LANES; ++l) {
            const int group = l / 4, first = l % 4 * 2;
            const uint32_t low = trans ? tile[first][group] : tile[group][first];
            const uint32_t high = trans ? tile[first + 1][group] : tile[group][first + 1];
            to[l] = low | high << 16;
        }
    }
}

template <int count, bool trans>
void stmatrix(Warp& w, const Op& op, uint32_t m) {
    whole_warp(m, "stmatrix");
    uint32_t at[LANES];
    row_offsets(w, op, count, at, "stmatrix");
    Shared& shared = *w.block->shared;
    for (int i = 0; i < count; ++i) {
        uint16_t tile[8][8];
        const uint32_t* from = w.lane<uint32_t>(op.src[1 + i]);
        for (int l = 0; l < LANES; ++l) {
            const int group = l / 4, first = l % 4 * 2;
            (trans ? tile[first][group] : tile[group][first]) = uint16_t(from[l]);
            (trans ? tile[first + 1][group] : tile[group][first + 1]) = uint16_t(from[l] >> 16);
        }
        for (int row = 0; row < 8; ++row) {
            const auto* bytes = reinterpret_cast<const uint8_t*>(tile[row]);
            shared.on_write<16>(w, at[8 * i + row], uint32_t(8 * i + row), 0, valid, bytes);
            std::memcpy(shared.data.data() + at[8 * i + row], bytes, 16);
        }
    }
}

// A product of a 16 x K and a K x 8 matrix. Products are exact in double; they are summed there and the sum is
// rounded once, which is closer to the truth than the tensor cores are.
template <class Element>
struct Product {
    static constexpr int PER = Element::PER, K = 8 * PER;
    static constexpr int A = 4, B = 2;  // registers
    using Sum = decltype(Element::rounded(0.0));

    static void run(Warp& w, const Op& op, uint32_t m) {
        whole_warp(m, "mma");
        double left[16][K];
        alignas(64) double right[K][8];
        // Registers of A: rows group and group + 8 alternate, then come the next 4 PER columns.
        for (int r = 0; r < A; ++r) {
            const uint32_t* from = w.lane<uint32_t>(op.src[r]);
            for (int l = 0; l < LANES; ++l)
                for (int e = 0; e < PER; ++e)
                    left[l / 4 + r % 2 * 8][r / 2 * 4 * PER + l % 4 * PER + e] = Element::value(from[l], e);
        }
        for (int r = 0; r < B; ++r) {
            const uint32_t* from = w.lane<uint32_t>(op.src[A + r]);
            for (int l = 0; l < LANES; ++l)
                for (int e = 0; e < PER; ++e)
                    right[r * 4 * PER + l % 4 * PER + e][l / 4] = Element::value(from[l], e);
        }
        const Sum* added[4];
        Sum* to[4];
        for (int i = 0; i < 4; ++i) {
            added[i] = w.lane<Sum>(op.src[A + B + i]);
            to[i] = w.lane<Sum>(op.dst[i]);
        }
        alignas(64) double sum[16][8];
        for (int row = 0; row < 16; ++row) {
            Row total = {};
            for (int k = 0; k < K; ++k) total += left[row][k] * *reinterpret_cast<const Row*>(right[k]);
            std::memcpy(sum[row], &total, sizeof total);
        }
        Sum out[4][LANES];
        for (int i = 0; i < 4; ++i)
            for (int l = 0; l < LANES; ++l)
                out[i][l] = Element::rounded(sum[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2] + added[i][l]);
        for (int i = 0; i < 4; ++i) std::memcpy(to[i], out[i], sizeof out[i]);
    }
};

template <class Element>
REGISTERS void product(const std::string& type) {
    form("mma.sync.aligned.m16n8k16.row.col.f32." + type + "." + type + ".f32", "=b32*4 b32*4 b32*2 b32*4",
         Product<Element>::run);
}

template <int count>
REGISTERS void tiles() {
    const std::string x = ".x" + std::to_string(count), registers = "b32*" + std::to_string(count);
    form("ldmatrix.sync.aligned.m8n8" + x + ".shared.b16", "=" + registers + " @", ldmatrix<count, false>);
    form("ldmatrix.sync.aligned.m8n8" + x + ".trans.shared.b16", "=" + registers + " @", ldmatrix<count, true>);
    form("stmatrix.sync.aligned.m8n8" + x + ".shared.b16", "@ " + registers, stmatrix<count, false>);
    form("stmatrix.sync.aligned.m8n8" + x + ".trans.shared.b16", "@ " + registers, stmatrix<count, true>);
}

}  // namespace

REGISTERS void matrix_forms() {
    tiles<1>(), tiles<2>(), tiles<4>();
    product<BFloat16>("bf16"), product<Float16>("f16");
    form("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", "=b32*4 b32*4 b32*2 b32*4",
         Product<Int8>::run);
}

}  // namespace ptx
