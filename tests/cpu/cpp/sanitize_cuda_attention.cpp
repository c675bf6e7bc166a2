// Runs the CUDA attention on the host, on buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined: an access past an end, an overflow or a misaligned access ends it. Rows are
// compared with plain loops, and repeated calls, whose threads run in other orders, bit for bit. Prints the
// number of calls.
#include <cmath>

#include "cuda/attention.h"
#include "cuda/common.cuh"
#include "sanitize.h"

using namespace fastbert;

namespace {

float wide(const Buffer& buffer, std::int64_t i, DType dtype) {
    const std::uint16_t bits = buffer.data<std::uint16_t>()[i];
    return dtype == DType::kBFloat16 ? cuda::widen(bf16{bits}) : cuda::widen(fp16{bits});
}

struct Shape {
    std::vector<std::int32_t> lengths;
    std::int64_t nheads, headdim, capacity;
    DType dtype;
    // bias, gate, dropout, and gaps of 16 bytes between the rows of heads
    bool options;
    bool causal;
};

int check(const Shape& s) {
    const std::int64_t batch = static_cast<std::int64_t>(s.lengths.size());
    const Buffer ends((batch + 1) * 4, 0);
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < batch; ++b) {
        const std::int32_t n = s.lengths[static_cast<std::size_t>(b)];
        ends.data<std::int32_t>()[b + 1] = ends.data<std::int32_t>()[b] + n;
        longest = n > longest ? n : longest;
    }
    const std::int64_t end = ends.data<std::int32_t>()[batch], total = end + s.capacity;
    const std::int64_t head_stride = s.headdim + (s.options ? 8 : 0), row_stride = s.nheads * head_stride;
    // No row after the last sequence is there to be read, and nothing after the last head.
    const std::int64_t span =
        end == 0 ? 0 : (end - 1) * row_stride + (s.nheads - 1) * head_stride + s.headdim;
    const Buffer q = random_buffer(span, s.dtype), k = random_buffer(span, s.dtype),
                 v = random_buffer(span, s.dtype);
    const std::int64_t size = longest, words = (size + 31) / 32;
    const Buffer bias = random_buffer(s.options ? s.nheads * size * size : 0, DType::kFloat32);
    const Buffer gate = random_buffer(s.nheads, DType::kFloat32);
    const std::unique_ptr<std::uint64_t> seed(new std::uint64_t(0x123456789abcdefull));
    AttentionFwd args{};
    args.dtype = s.dtype;
    args.batch = batch;
    args.nheads = s.nheads;
    args.headdim = s.headdim;
    args.total = total;
    args.max_seqlen = size;
    args.cu_seqlens = ends.data<const std::int32_t>();
    args.q = {q.data(), row_stride, head_stride};
    args.k = {k.data(), row_stride, head_stride};
    args.v = {v.data(), row_stride, head_stride};
    args.softmax_scale = 0.125f;
    args.causal = s.causal;
    args.dropout = {nullptr, 0, 0, 1.0f};
    if (s.options) {
        args.bias = {bias.data<const float>(), 0, size * size, size};
        args.gate = gate.data<const float>();
    }
    if (s.options || s.headdim == 64) args.dropout = {seed.get(), 5, 1u << 30, 4.0f / 3.0f};
    std::unique_ptr<Buffer> first;
    for (int repeat = 0; repeat < 2; ++repeat) {
        const Buffer out(total * s.nheads * s.headdim * 2), lse(s.nheads * total * 4);
        const Buffer bits(s.nheads * total * words * 4);
        args.out = out.data();
        args.lse = lse.data<float>();
        args.keep_bits = args.dropout.seed != nullptr ? bits.data<std::int32_t>() : nullptr;
        require_none(cuda_attention_fwd(args, 0, 0));
        for (std::int64_t row = end; row < total; ++row)
            for (std::int64_t h = 0; h < s.nheads; ++h) {
                require(lse.data<float>()[h * total + row] == 0.0f, "lse after the sequences");
                for (std::int64_t d = 0; d < s.headdim; ++d)
                    require(wide(out, (row * s.nheads + h) * s.headdim + d, s.dtype) == 0.0f,
                            "out after the sequences");
            }
        for (std::int64_t b = 0; repeat == 0 && b < batch; ++b) {
            const std::int64_t start = ends.data<std::int32_t>()[b],
                               n = ends.data<std::int32_t>()[b + 1] - start;
            for (std::int64_t h = 0; h < s.nheads; ++h)
                for (std::int64_t i = 0; i < n; i += 3) {
                    double sum = 0.0;
                    for (std::int64_t j = 0; j < (s.causal ? i + 1 : n); ++j) {
                        double score = 0.0;
                        for (std::int64_t d = 0; d < s.headdim; ++d)
                            score += static_cast<double>(
                                         wide(q, (start + i) * row_stride + h * head_stride + d, s.dtype)) *
                                     wide(k, (start + j) * row_stride + h * head_stride + d, s.dtype);
                        score *= 0.125;
                        if (s.options) score += bias.data<float>()[(h * size + i) * size + j];
                        sum += std::exp(score);
                    }
                    const float found = lse.data<float>()[h * total + start + i];
                    require(std::fabs(found - std::log(sum)) <= 1e-5 * (1.0 + std::fabs(std::log(sum))),
                            "lse");
                }
        }
        if (first != nullptr) {
            require(*first == out, "every order of threads gives the same bits");
        } else {
            first.reset(new Buffer(static_cast<std::int64_t>(out.size)));
            std::memcpy(first->bytes.get(), out.bytes.get(), out.size);
        }
    }
    return 2;
}

}  // namespace

int main() {
    int calls = 0;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
        for (const std::int64_t headdim : {32, 64, 128})
            for (const bool options : {false, true}) {
                calls += check({{1, 0, 63, 65}, 1, headdim, 0, dtype, options, false});
                calls += check({{70}, 2, headdim, 3, dtype, options, true});
                calls += check({{0, 0}, 1, headdim, 65, dtype, options, false});
                calls += check({{17, 130}, 1, headdim, 0, dtype, options, options});
            }
    calls += check({{}, 2, 64, 1, DType::kFloat16, false, false});
    calls += check({{64, 64}, 1, 32, 0, DType::kBFloat16, false, true});
    std::printf("%d calls\n", calls);
    return 0;
}
