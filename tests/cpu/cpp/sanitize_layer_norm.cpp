// Runs the CPU's LayerNorm kernels on heap buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined (or thread): an access past an end, an overflow or a misaligned access ends
// it. Instruction sets are compared with each other as well. Prints the number of calls.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cpu/isa.h"
#include "cpu/layer_norm.h"
#include "cpu/parallel.h"

using namespace fastbert;

namespace {

// GOMP_parallel with threads of our own: the sanitizers know those.
void team(void (*work)(void*), void* argument, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(work, argument);
    work(argument);
    for (std::thread& other : others) other.join();
}

// n elements from malloc, and nothing behind them.
struct Buffer {
    std::unique_ptr<char[]> bytes;
    std::size_t size;
    explicit Buffer(std::size_t n) : bytes(new char[n]), size(n) { std::memset(bytes.get(), 0xff, n); }
    void* data() const { return size == 0 ? nullptr : bytes.get(); }
};

std::mt19937 generator(1);

Buffer random_buffer(std::int64_t elements, DType dtype) {
    const bool wide = dtype == DType::kFloat32;
    Buffer out(static_cast<std::size_t>(elements) * (wide ? 4 : 2));
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < elements; ++i) {
        const float x = normal(generator);
        std::uint32_t bits;
        std::memcpy(&bits, &x, 4);
        // as fp16 the upper half of a float is some finite number below 2 in size as well, once bit 14 is off
        const std::uint16_t half =
            static_cast<std::uint16_t>(dtype == DType::kFloat16 ? (bits >> 16) & 0xbfff : bits >> 16);
        if (wide)
            std::memcpy(out.bytes.get() + 4 * i, &bits, 4);
        else
            std::memcpy(out.bytes.get() + 2 * i, &half, 2);
    }
    return out;
}

void require(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

void require_none(const char* reason) { require(reason == nullptr, reason); }

void require_close(const Buffer& a, const Buffer& b, const char* what) {
    const float *x = static_cast<const float*>(a.data()), *y = static_cast<const float*>(b.data());
    for (std::size_t i = 0; i < a.size / 4; ++i)
        require(std::fabs(x[i] - y[i]) <= 1e-3f * (1.0f + std::fabs(x[i])), what);
}

void require_same(const Buffer& a, const Buffer& b, const char* what) {
    require(std::memcmp(a.data(), b.data(), a.size) == 0, what);
}

struct Outputs {
    Buffer y, z, mean, rstd, dx, dresidual, dweight, dbias, dx_bias;
    Outputs(std::int64_t rows, std::int64_t hidden, std::size_t item, bool dropout)
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
Outputs run(LayerNormFwd fwd, LayerNormBwd bwd, std::size_t item, Forward forward, Backward backward) {
    Outputs out(fwd.rows, fwd.hidden, item, fwd.dropout.seed != nullptr);
    fwd.y = out.y.data();
    fwd.z = out.z.data();
    fwd.mean = static_cast<float*>(out.mean.data());
    fwd.rstd = static_cast<float*>(out.rstd.data());
    require_none(forward(fwd));
    bwd.z = out.z.data();
    bwd.z_stride = fwd.hidden;
    bwd.mean = fwd.mean;
    bwd.rstd = fwd.rstd;
    bwd.dx = out.dx.data();
    bwd.dresidual = out.dresidual.data();
    bwd.dweight = static_cast<float*>(out.dweight.data());
    bwd.dbias = static_cast<float*>(out.dbias.data());
    bwd.dx_bias = static_cast<float*>(out.dx_bias.data());
    require_none(backward(bwd));

    const Buffer dweight(out.dweight.size), dbias(out.dbias.size), dx_bias(out.dx_bias.size);
    bwd.dx = bwd.dresidual = nullptr;
    bwd.dweight = static_cast<float*>(dweight.data());
    bwd.dbias = static_cast<float*>(dbias.data());
    bwd.dx_bias = static_cast<float*>(dx_bias.data());
    require_none(backward(bwd));
    require_same(out.dweight, dweight, "dweight without dx");
    require_same(out.dbias, dbias, "dbias without dx");
    require_same(out.dx_bias, dx_bias, "dx_bias without dx");
    return out;
}

int check(std::int64_t rows, std::int64_t hidden, DType dtype, bool options) {
    const std::size_t item = dtype == DType::kFloat32 ? 4 : 2;
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
                require_close(first->dweight, out.dweight, "instruction sets agree");
        }
    }
    return calls;
}

}  // namespace

int main() {
    set_team_start(reinterpret_cast<std::uintptr_t>(&team));
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
