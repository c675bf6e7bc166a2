// Runs attention's backward for GPUs, emulated, on heap buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined: an access past an end, an overflow or a misaligned access ends it. Repeats
// must be bit-equal under every order of threads. Prints the number of calls.
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/attention_backward.h"
#include "cuda_on_host.h"
#include "sanitize.h"

using namespace fastbert;

namespace {

int calls = 0;

struct Options {
    std::vector<std::int32_t> lengths;
    std::int64_t nheads, headdim, capacity;
    DType dtype;
    bool causal, biased, gated, dropout, saved;
};

void check(const Options& options) {
    std::vector<std::int32_t> ends{0};
    std::int64_t longest = 0;
    for (const std::int32_t length : options.lengths) {
        ends.push_back(ends.back() + length);
        longest = length > longest ? length : longest;
    }
    const std::int64_t batch = static_cast<std::int64_t>(options.lengths.size());
    const std::int64_t total = ends.back() + options.capacity, width = options.nheads * options.headdim;
    Buffer lengths(4 * (batch + 1));
    std::memcpy(lengths.bytes.get(), ends.data(), lengths.size);
    const Buffer qkv = random_buffer(total * 3 * width, options.dtype);
    const Buffer dout = random_buffer(total * width, options.dtype);
    const Buffer out = random_buffer(total * width, options.dtype);
    const Buffer lse = random_buffer(options.nheads * total, DType::kFloat32);
    const Buffer bias =
        random_buffer(options.biased ? options.nheads * longest * longest : 0, DType::kFloat32);
    const Buffer gate = random_buffer(options.gated ? options.nheads : 0, DType::kFloat32);
    const Buffer seed(8, 0x5a);
    const bool saved = options.dropout && options.saved;
    const Buffer bits(saved ? 4 * options.nheads * total * ((longest + 31) / 32) : 0, 0xa5);

    CudaAttentionBwd args{};
    args.dtype = options.dtype;
    args.batch = batch;
    args.nheads = options.nheads;
    args.headdim = options.headdim;
    args.total = total;
    args.max_seqlen = longest;
    args.cu_seqlens = lengths.data<const std::int32_t>();
    const auto part = [&](int i) {
        return Heads{qkv.bytes.get() + 2 * i * width, 3 * width, options.headdim};
    };
    args.q = part(0);
    args.k = part(1);
    args.v = part(2);
    args.softmax_scale = 0.125f;
    args.causal = options.causal;
    args.bias = {bias.data<const float>(), 0, longest * longest, longest};
    args.gate = gate.data<const float>();
    args.dropout = {options.dropout ? seed.data<const std::uint64_t>() : nullptr, 7, 0x40000000u, 1.25f};
    args.keep_bits = bits.data<const std::int32_t>();
    args.dout = dout.data();
    args.out = out.data();
    args.lse = lse.data<const float>();
    args.slots = cuda_attention_bwd_slots(batch, total, longest);
    // dq, dk and dv apart, or side by side where q, k and v are
    const bool apart = options.gated;
    args.grad_stride = apart ? width : 3 * width;
    args.parts = 1;
    args.bias_batch = 1;
    args.bias_heads = options.nheads;
    args.bias_has_rows = args.bias_has_keys = longest > 1;
    std::vector<std::vector<Buffer>> results;
    for (std::uint64_t order = 0; order < 2; ++order) {
        cuda_on_host::reseed(order + 11);
        std::vector<Buffer> grads;
        for (int i = 0; i < 3; ++i) grads.emplace_back(apart || i == 0 ? 2 * total * args.grad_stride : 0);
        for (int i = 0; i < 3; ++i) grads.emplace_back(4 * options.nheads * total);
        grads.emplace_back(options.biased ? 4 * options.nheads * longest * longest : 0);
        args.dq = grads[0].data();
        args.dk = apart ? grads[1].data() : grads[0].bytes.get() + 2 * width;
        args.dv = apart ? grads[2].data() : grads[0].bytes.get() + 4 * width;
        args.delta = grads[3].data<float>();
        args.norm = grads[4].data<float>();
        args.dgate = options.gated ? grads[5].data<float>() : nullptr;
        args.dbias = grads[6].data<float>();
        require_none(cuda_attention_bwd(args, 0, 0));
        ++calls;
        results.push_back(std::move(grads));
    }
    for (std::size_t i = 0; i < results[0].size(); ++i)
        require(results[0][i] == results[1][i], "two orders of threads give other bits");
}

}  // namespace

int main() {
    int which = 0;
    for (const std::int64_t headdim : {32, 64, 128})
        for (const auto& lengths :
             std::vector<std::vector<std::int32_t>>{{1}, {0, 3, 64}, {65, 0, 31}, {130}}) {
            for (const bool dropout : {false, true}) {
                ++which;
                check({lengths, 1 + which % 2, headdim, which % 3 == 0 ? 70 : 0,
                       which % 2 != 0 ? DType::kBFloat16 : DType::kFloat16, which % 5 < 2, which % 4 < 2,
                       which % 3 < 2, dropout, which % 2 != 0});
            }
        }
    std::printf("%d calls\n", calls);
}
