// Runs the CPU's LayerNorm kernels on heap buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined (or thread): an access past an end, an overflow or a misaligned access ends
// it. Instruction sets are compared with each other as well. Prints the number of calls.
#include "cpu/isa.h"
#include "cpu/layer_norm.h"
#include "sanitize.h"

using namespace fastbert;

namespace {

struct Outputs {
    Buffer y, z, mean, rstd, dx, dresidual, dweight, dbias, dx_bias;
    Outputs(std::int64_t rows, std::int64_t hidden, std::int64_t item, bool dropout)
        : y(rows * hidden * item),
          z(rows * hidden * item),
          mean(rows * 4),
          rstd(rows * 4),
          dx(rows * hidden * item),
          dresidual(dropout ? rows * hidden * item : 0),
          dweight(hidden * 4),
          dbias(hidden * 4),
          dx_bias(hidden * 4) {}
};

template <class Forward, class Backward>
Outputs run(LayerNormFwd fwd, LayerNormBwd bwd, std::int64_t item, Forward forward, Backward backward) {
    Outputs out(fwd.rows, fwd.hidden, item, fwd.dropout.seed != nullptr);
    fwd.y = out.y.data();
    fwd.z = out.z.data();
    fwd.mean = out.mean.data<float>();
    fwd.rstd = out.rstd.data<float>();
    require_none(forward(fwd));
    bwd.z = out.z.data();
    bwd.z_stride = fwd.hidden;
    bwd.mean = fwd.mean;
    bwd.rstd = fwd.rstd;
    bwd.dx = out.dx.data();
    bwd.dresidual = out.dresidual.data();
    bwd.dweight = out.dweight.data<float>();
    bwd.dbias = out.dbias.data<float>();
    bwd.dx_bias = out.dx_bias.data<float>();
    require_none(backward(bwd));

    const Buffer dweight(4 * fwd.hidden), dbias(4 * fwd.hidden), dx_bias(4 * fwd.hidden);
    bwd.dx = bwd.dresidual = nullptr;
    bwd.dweight = dweight.data<float>();
    bwd.dbias = dbias.data<float>();
    bwd.dx_bias = dx_bias.data<float>();
    require_none(backward(bwd));
    require_same(out.dweight, dweight, "dweight without dx");
    require_same(out.dbias, dbias, "dbias without dx");
    require_same(out.dx_bias, dx_bias, "dx_bias without dx");
    return out;
}

int check(std::int64_t rows, std::int64_t hidden, DType dtype, bool options) {
    const std::int64_t item = item_size(dtype);
    const std::int64_t stride = hidden + (options ? 3 : 0);
    const std::int64_t span = (rows - 1) * stride + hidden;
    const DType param_dtype = options ? DType::kFloat32 : dtype;
    const Buffer x = random_buffer(span, dtype), residual = random_buffer(span, dtype);
    const Buffer dy = random_buffer(rows * hidden, dtype);
    const Buffer weight = random_buffer(hidden, param_dtype), bias = random_buffer(hidden, dtype);
    const Buffer x_bias = random_buffer(hidden, param_dtype);
    const std::unique_ptr<std::uint64_t> seed(new std::uint64_t(0x123456789abcdefull));
    const DropoutArgs dropout{options ? seed.get() : nullptr, 5, 1u << 30, 4.0f / 3.0f};
    const Param none{nullptr, DType::kFloat32};
    const LayerNormFwd fwd{dtype,
                           rows,
                           hidden,
                           x.data(),
                           options ? residual.data() : nullptr,
                           stride,
                           stride,
                           {weight.data(), param_dtype},
                           {bias.data(), dtype},
                           options ? Param{x_bias.data(), param_dtype} : none,
                           1e-5,
                           dropout,
                           nullptr,
                           nullptr,
                           nullptr,
                           nullptr};
    const LayerNormBwd bwd{
        dtype,   rows,    hidden,  dy.data(), nullptr, hidden,  hidden,  {weight.data(), param_dtype},
        nullptr, nullptr, dropout, nullptr,   nullptr, nullptr, nullptr, nullptr};
    int calls = 0;
    std::unique_ptr<Outputs> first;
    for (const char* isa : {"avx2", "avx512"}) {
        if (!set_isa(isa)) continue;
        for (const int threads : {1, 3}) {
            Outputs out = run(
                fwd, bwd, item, [&](const LayerNormFwd& a) { return cpu_layer_norm_fwd(a, threads); },
                [&](const LayerNormBwd& a) { return cpu_layer_norm_bwd(a, threads); });
            calls += 3;
            if (first == nullptr)
                first.reset(new Outputs(std::move(out)));
            else
                require_close(first->dweight, out.dweight, 1e-3f, 1.0f, "instruction sets agree");
        }
    }
    return calls;
}

}  // namespace

int main() {
    use_team();
    int calls = 0;
    for (const std::int64_t hidden : {1, 7, 8, 17, 31, 64, 100, 768})
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
            for (const std::int64_t rows : {1, 2, 5})
                for (const bool options : {false, true}) calls += check(rows, hidden, dtype, options);
    calls += check(2, 8200, DType::kBFloat16, true);
    calls += check(3000, 40, DType::kFloat32, true);  // several tasks and chunks a thread
    std::printf("%d calls\n", calls);
    return 0;
}
