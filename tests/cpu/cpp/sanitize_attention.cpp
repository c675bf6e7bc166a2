// Runs the attention kernels on buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined (or thread): an access past an end, an overflow or a misaligned access ends
// it. The instruction sets are compared with each other, numbers of threads bit for bit. Prints the number of
// calls.
#include "cpu/attention.h"
#include "cpu/isa.h"
#include "sanitize.h"

using namespace fastbert;

namespace {

struct Outputs {
    Buffer out, lse, probs, dq, dk, dv, ds, dgate, bits;
    Outputs(std::int64_t elements, std::int64_t rows, std::int64_t cells, std::int64_t planes,
            std::int64_t words, std::int64_t item)
        : out(elements * item),
          lse(rows * 4),
          probs(cells * item, 0),
          dq(elements * item),
          dk(elements * item),
          dv(elements * item),
          ds(cells * 4, 0),
          dgate(planes * 8),
          bits(words * 4) {}
    // all but the bits, of which some are unspecified
    std::vector<const Buffer*> all() const { return {&out, &lse, &probs, &dq, &dk, &dv, &ds, &dgate}; }
};

// Each gradient of `all` with the others not wanted: the same bits.
int check_each_alone(const AttentionBwd& all, const Outputs& expected, int threads) {
    const std::vector<const Buffer*> wanted = {&expected.dq, &expected.dk, &expected.dv};
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        const Buffer alone(static_cast<std::int64_t>(wanted[i]->size));
        AttentionBwd bwd = all;
        bwd.dq = i == 0 ? alone.data() : nullptr;
        bwd.dk = i == 1 ? alone.data() : nullptr;
        bwd.dv = i == 2 ? alone.data() : nullptr;
        bwd.ds = nullptr;
        bwd.dgate = nullptr;
        require_none(cpu_attention_bwd(bwd, threads));
        require_same(alone, *wanted[i], "a gradient alone has the same bits");
    }
    return static_cast<int>(wanted.size());
}

int check(const std::vector<std::int32_t>& lengths, std::int64_t nheads, std::int64_t headdim, DType dtype,
          bool options) {
    const std::int64_t item = item_size(dtype);
    const std::int64_t batch = static_cast<std::int64_t>(lengths.size());
    std::unique_ptr<std::int32_t[]> ends(new std::int32_t[lengths.size() + 1]);
    ends[0] = 0;
    std::int32_t longest = 0;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
        ends[b + 1] = ends[b] + lengths[b];
        longest = lengths[b] > longest ? lengths[b] : longest;
    }
    const std::int64_t total = ends[batch], size = longest;
    // strided: a row holds q, k and v of one token and three elements more, and the last row ends at its v
    const std::int64_t head_stride = headdim + (options ? 1 : 0);
    const std::int64_t row_stride = 3 * nheads * head_stride + (options ? 3 : 0);
    const std::int64_t span = (total - 1) * row_stride + (3 * nheads - 1) * head_stride + headdim;
    const Buffer qkv = random_buffer(total > 0 ? span : 0, dtype);
    const Buffer dout = random_buffer(total * nheads * headdim, dtype);
    const Buffer bias = random_buffer(options ? batch * nheads * size * size : 0, DType::kFloat32);
    const Buffer gate = random_buffer(nheads, DType::kFloat32);
    const std::unique_ptr<std::uint64_t> seed(new std::uint64_t(0x123456789abcdefull));
    const auto heads = [&](std::int64_t which) {
        const std::int64_t first = which * nheads * head_stride * item;
        return Heads{total > 0 ? qkv.data<char>() + first : nullptr, row_stride, head_stride};
    };
    Attention common{};
    common.dtype = dtype;
    common.batch = batch;
    common.nheads = nheads;
    common.headdim = headdim;
    common.total = total;
    common.max_seqlen = size;
    common.cu_seqlens = ends.get();
    common.q = heads(0);
    common.k = heads(1);
    common.v = heads(2);
    common.softmax_scale = 0.25f;
    common.causal = options && headdim % 2 == 1;
    if (options) {
        common.bias = {bias.data<const float>(), nheads * size * size, size * size, size};
        common.gate = gate.data<const float>();
        common.dropout = {seed.get(), 5, 1u << 30, 4.0f / 3.0f};
    }
    int calls = 0;
    std::unique_ptr<Outputs> first;
    for (const char* isa : {"avx2", "avx512", "avx512_bf16"}) {
        if (!set_isa(isa)) continue;
        std::unique_ptr<Outputs> one_thread;
        for (const int threads : {1, 3}) {
            std::unique_ptr<Outputs> now(new Outputs(total * nheads * headdim, nheads * total,
                                                     batch * nheads * size * size, batch * nheads,
                                                     nheads * total * ((size + 31) / 32), item));
            AttentionFwd fwd{};
            static_cast<Attention&>(fwd) = common;
            fwd.out = now->out.data();
            fwd.lse = now->lse.data<float>();
            fwd.probs = options ? now->probs.data() : nullptr;
            fwd.keep_bits = options ? now->bits.data<std::int32_t>() : nullptr;
            require_none(cpu_attention_fwd(fwd, threads));
            AttentionBwd bwd{};
            static_cast<Attention&>(bwd) = common;
            bwd.dout = dout.data();
            bwd.keep_bits = fwd.keep_bits;
            bwd.dq = now->dq.data();
            bwd.dk = now->dk.data();
            bwd.dv = now->dv.data();
            bwd.ds = options ? now->ds.data<float>() : nullptr;
            bwd.dgate = options ? now->dgate.data<double>() : nullptr;
            require_none(cpu_attention_bwd(bwd, threads));
            calls += 2;
            if (lengths.size() > 1) calls += check_each_alone(bwd, *now, threads);
            if (one_thread == nullptr) {
                one_thread = std::move(now);
                continue;
            }
            for (std::size_t i = 0; i < now->all().size(); ++i)
                require_same(*one_thread->all()[i], *now->all()[i], "numbers of threads give the same bits");
        }
        if (first == nullptr) {
            first = std::move(one_thread);
            continue;
        }
        require_close(first->lse, one_thread->lse, 1e-4f, 1.0f, "instruction sets agree");
    }
    return calls;
}

}  // namespace

int main() {
    use_team();
    int calls = 0;
    calls += check({}, 2, 8, DType::kFloat32, true);
    calls += check({0, 0}, 2, 8, DType::kFloat32, true);
    for (const std::int64_t headdim : {1, 16, 33, 64})
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
            for (const bool options : {false, true}) {
                for (const std::int32_t n : {1, 5, 17, 31, 64, 65})
                    calls += check({n}, 1, headdim, dtype, options);
                calls += check({3, 0, 26, 1, 70}, 2, headdim, dtype, options);
            }
    // one sequence and head is cut for several threads
    for (const std::int32_t n : {119, 120, 121, 250}) calls += check({n}, 1, 20, DType::kFloat32, true);
    std::printf("%d calls\n", calls);
    return 0;
}
