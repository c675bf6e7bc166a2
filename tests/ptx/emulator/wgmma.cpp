// wgmma: products of a group of four warps, whose operands lie in shared memory (A also in registers).
//
// Each warp makes its 16 of the 64 rows. "late": when it waits; "early": at issue. Until it has waited, the
// accumulators and A's registers count as never written, and no warp may write the shared memory that is read.
#include "elements.h"
#include "hopper.h"

#include <algorithm>
#include <cstring>

namespace ptx {

namespace {

using Row = double __attribute__((vector_size(64)));

constexpr int K = 16;

struct Descriptor {
    uint32_t start, leading, stride, swizzle;  // in bytes; swizzle 0, 32, 64 or 128

    static Descriptor of(uint64_t bits) {
        const auto field = [&](int shift) { return uint32_t(bits >> shift & 0x3FFF) << 4; };
        const uint32_t widths[] = {0, 128, 64, 32};
        if (bits >> 49 & 7) fail(Kind::bad_launch, ALL, bits, "a matrix descriptor with a base offset");
        return {field(0), field(16), field(32), widths[bits >> 62]};
    }

    // Where eight elements lie that begin at (major, minor): along k if `along_k`, else along m or n.
    uint32_t piece(uint32_t mn, uint32_t k, bool along_k) const {
        uint32_t at = start;
        if (along_k) {
            at += mn / 8 * stride;
            at += swizzle ? mn % 8 * swizzle + k * 2 : k / 8 * leading + mn % 8 * 16;
        } else if (swizzle) {
            const uint32_t width = swizzle / 2;
            at += mn / width * leading + k / 8 * stride + k % 8 * swizzle + mn % width * 2;
        } else {
            at += mn / 8 * stride + k / 8 * leading + k % 8 * 16;
        }
        const uint32_t mask = swizzle ? swizzle - 16 : 0;
        return at ^ (at >> 3 & mask);
    }
};

void whole_warp(uint32_t mask, const char* what) {
    if (mask != ALL)
        fail(Kind::divergent_barrier, ~mask, 0, std::string(what) + " is executed by a part of the warp's lanes");
}

uint64_t uniform(Warp& w, uint32_t slot) {
    const uint64_t* v = w.lane<uint64_t>(slot);
    for (int l = 1; l < LANES; ++l)
        if (v[l] != v[0]) fail(Kind::divergent_barrier, 1u << l, v[l], "lanes name different matrix descriptors");
    return v[0];
}

// The operands of a statement: accumulators, A's four registers or its descriptor, B's, the predicate.
template <class Element, bool registers>
struct Wgmma {
    static int sums(const Op& op) { return int(op.src.size()) - (registers ? 6 : 3); }
    static int b_slot(const Op& op) { return sums(op) + (registers ? 4 : 1); }
    static uint32_t columns(const Op& op) { return uint32_t(sums(op)) * 2; }
    // immediates: signs of A and B, then which operands are transposed
    static bool along_k_a(const Op& op) { return op.imm[2] == 0; }
    static bool along_k_b(const Op& op) { return op.imm[registers ? 2 : 3] == 0; }

    static uint32_t first_row(const Warp& w) { return uint32_t(w.index) % 4 * 16; }

    // f(offset of a piece, row or column it begins at, k it begins at)
    template <class F>
    static void pieces_of(const Descriptor& d, uint32_t from, uint32_t count, bool along_k, F f) {
        if (along_k) {
            for (uint32_t i = from; i < from + count; ++i)
                for (uint32_t k = 0; k < K; k += 8) f(d.piece(i, k, true), i, k);
        } else {
            for (uint32_t i = from; i < from + count; i += 8)
                for (uint32_t k = 0; k < K; ++k) f(d.piece(i, k, false), i, k);
        }
    }

    static void run(Warp& w, const Op& op, uint32_t m) {
        whole_warp(m, "wgmma.mma_async");
        for (int i = 0; i < 2; ++i)
            if (op.imm[i] != 1 && op.imm[i] != -1)
                fail(Kind::bad_launch, m, 0, "wgmma.mma_async by another factor than 1 and -1");
        const int sums_ = sums(op), a_slot = sums_;
        for (int i = a_slot; i < int(op.src.size()); ++i) need(w, op, i);
        const uint32_t add = w.predicate(op.src.back());
        if (add != 0 && add != ALL) fail(Kind::divergent_barrier, add, 0, "lanes disagree whether wgmma adds");
        Product product;
        product.op = &op;
        product.added = add != 0;
        product.group = hopper(w).products_committed;
        product.registers = uint32_t(registers ? b_slot(op) : sums_);
        if (product.added)
            for (int i = 0; i < sums_; ++i) need(w, op, i);
        Shared& shared = *w.block->shared;
        const auto touch = [&](uint32_t at, uint32_t, uint32_t) {
            shared.check(at, 16, 0, "wgmma.mma_async");
            shared.on_read<16>(w, at, 0);
            product.rows.push_back(at);
        };
        const bool b = along_k_b(op);
        product.b = uniform(w, op.src[b_slot(op)]);
        pieces_of(Descriptor::of(product.b), 0, columns(op), b, touch);
        if constexpr (!registers) {
            product.a = uniform(w, op.src[a_slot]);
            pieces_of(Descriptor::of(product.a), first_row(w), 16, along_k_a(op), touch);
        }
        for (uint32_t at : product.rows) {
            async_read(w, at, 16, "wgmma.mma_async");
            ++shared.readers[at >> 4];
        }
        if (!w.block->launch->late) multiply(w, product);
        for (uint32_t i = 0; i < product.registers; ++i) w.written[op.src[i]] = 0;
        hopper(w).products.push_back(std::move(product));
    }

    // A register must hold a value, or belong to a product in flight in the same role.
    static void need(Warp& w, const Op& op, int i) {
        const uint32_t slot = op.src[i];
        if (w.written[slot] == ALL) return;
        for (const Product& p : hopper(w).products) {
            const Op& other = *p.op;
            if (i < int(p.registers) && other.src.size() == op.src.size() && other.run == op.run &&
                other.src[i] == slot)
                return;
        }
        fail(Kind::uninitialised_read, ~w.written[slot], slot,
             "wgmma.mma_async reads a register that was never written or is in flight");
    }

    static void multiply(Warp& w, const Product& product) {
        const Op& op = *product.op;
        const uint8_t* data = w.block->shared->data.data();
        static thread_local double left[16][K];
        alignas(64) static thread_local double right[K][256];
        const int a_slot = sums(op), width = int(columns(op));
        const auto value = [](const uint8_t* at) {
            uint16_t bits;
            std::memcpy(&bits, at, 2);
            return double(Element::value(bits, 0));
        };
        const bool b = along_k_b(op);
        pieces_of(Descriptor::of(product.b), 0, columns(op), b, [&](uint32_t at, uint32_t n, uint32_t k) {
            for (uint32_t e = 0; e < 8; ++e) right[b ? k + e : k][b ? n : n + e] = value(data + at + 2 * e);
        });
        if constexpr (registers) {
            for (int r = 0; r < 4; ++r) {
                const uint32_t* from = w.lane<uint32_t>(op.src[a_slot + r]);
                for (int l = 0; l < LANES; ++l)
                    for (int e = 0; e < 2; ++e)
                        left[l / 4 + r % 2 * 8][r / 2 * 8 + l % 4 * 2 + e] = double(Element::value(from[l], e));
            }
        } else {
            const bool a = along_k_a(op);
            const uint32_t first = first_row(w);
            pieces_of(Descriptor::of(product.a), first, 16, a, [&](uint32_t at, uint32_t i, uint32_t k) {
                for (uint32_t e = 0; e < 8; ++e)
                    left[a ? i - first : i - first + e][a ? k + e : k] = value(data + at + 2 * e);
            });
        }
        const double sign = double(op.imm[0] * op.imm[1]);
        alignas(64) double sum[16][8];
        for (int n = 0; n < width; n += 8) {
            for (int row = 0; row < 16; ++row) {
                Row total = {};
                for (int k = 0; k < K; ++k) total += left[row][k] * *reinterpret_cast<const Row*>(right[k] + n);
                std::memcpy(sum[row], &total, sizeof total);
            }
            for (int i = 0; i < 4; ++i) {
                float* to = w.lane<float>(op.src[n / 2 + i]);
                for (int l = 0; l < LANES; ++l) {
                    const double found = sign * sum[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
                    to[l] = float(product.added ? found + to[l] : found);
                }
            }
        }
    }

    // Called when a wait names the product.
    static void finish(Warp& w, const Product& product) {
        const Op& op = *product.op;
        Shared& shared = *w.block->shared;
        for (uint32_t i = 0; i < product.registers; ++i)
            if (w.written[op.src[i]] != 0)
                fail(Kind::uninitialised_read, w.written[op.src[i]], op.src[i],
                     std::string("a register of a wgmma.mma_async in flight, line ") + std::to_string(op.line) +
                         ", was written before the wait");
        if (w.block->launch->late) multiply(w, product);
        for (uint32_t at : product.rows) {
            --shared.readers[at >> 4];
            shared.on_read<16>(w, at, 0);
        }
    }
};

using Finish = void (*)(Warp&, const Product&);
std::vector<std::pair<Run, Finish>>& kinds() {
    static std::vector<std::pair<Run, Finish>> all;
    return all;
}

void finish(Warp& w, const Product& product) {
    for (const auto& [run, function] : kinds())
        if (run == product.op->run) function(w, product);
}

template <class Element, bool registers>
REGISTERS void every_width(const std::string& type) {
    using W = Wgmma<Element, registers>;
    for (int n = 8; n <= 256; n += 8) {
        const std::string sums = "b32*" + std::to_string(n / 2);
        raw_form("wgmma.mma_async.sync.aligned.m64n" + std::to_string(n) + "k16.f32." + type + "." + type,
                 sums + (registers ? " b32*4 b64 p # # #" : " b64 b64 p # # # #"), W::run);
    }
    kinds().push_back({W::run, W::finish});
}

void fence(Warp&, const Op&, uint32_t m) { whole_warp(m, "wgmma.fence"); }

void commit(Warp& w, const Op&, uint32_t m) {
    whole_warp(m, "wgmma.commit_group");
    ++hopper(w).products_committed;
}

void set_written(Warp& w, const Product& product, uint32_t lanes) {
    for (uint32_t i = 0; i < product.registers; ++i) w.written[product.op->src[i]] = lanes;
}

void wait(Warp& w, const Op& op, uint32_t m) {
    whole_warp(m, "wgmma.wait_group");
    HopperWarp& state = hopper(w);
    std::vector<Product> done, left;
    for (Product& p : state.products) {
        const bool named = int64_t(p.group) < int64_t(state.products_committed) - op.imm[0];
        (named ? done : left).push_back(std::move(p));
    }
    for (const Product& p : done) finish(w, p);
    // Registers of a product that is done may be those of one that is not.
    for (const Product& p : done) set_written(w, p, ALL);
    for (const Product& p : left) set_written(w, p, 0);
    state.products = std::move(left);
}

}  // namespace

REGISTERS void wgmma_forms() {
    every_width<BFloat16, false>("bf16"), every_width<BFloat16, true>("bf16");
    every_width<Float16, false>("f16"), every_width<Float16, true>("f16");
    form("wgmma.fence.sync.aligned", "", fence);
    form("wgmma.commit_group.sync.aligned", "", commit);
    form("wgmma.wait_group.sync.aligned", "#", wait);
}

}  // namespace ptx
