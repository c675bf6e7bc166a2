// Runs the kernels of linear and linear_int8 on heap buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined (or thread): an access past an end, an overflow or a misaligned access ends
// it. Results of the instruction sets and of the ways to lay out a product are compared as well. Prints the
// number of calls.
#include <algorithm>

#include "cpu/isa.h"
#include "cpu/linear.h"
#include "cpu/linear_int8.h"
#include "cpu/widened.h"
#include "sanitize.h"

using namespace fastbert;

namespace fastbert {
namespace avx512 {
extern const LinearInt8Kernels linear_int8_kernels;  // those for processors without VNNI
}
}  // namespace fastbert

namespace {

int g_calls = 0;

void run(const char* reason) {
    require_none(reason);
    ++g_calls;
}

struct Options {
    Activation activation;
    bool bias, residual, pre;
    std::int64_t gap;  // behind each row that may have one
};

// The same values in float32.
Buffer widened(const Buffer& from, DType dtype) {
    Buffer out(static_cast<std::int64_t>(from.size) / item_size(dtype) * 4);
    const Param values{from.data(), dtype};
    for (std::size_t i = 0; i < out.size / 4; ++i)
        out.data<float>()[i] = fastbert::widened(values, static_cast<std::int64_t>(i));
    return out;
}

// One product, b in panels, as it lies, and in float32: the same bits. The result in float32, too, if nothing
// is added to it.
Buffer product(DType dtype, std::int64_t rows, std::int64_t depth, std::int64_t columns, const Buffer& a,
               std::int64_t row_stride, std::int64_t depth_stride, const Buffer& b, std::int64_t b_stride,
               bool b_by_rows, const Buffer& bias, const Buffer& residual, const Options& options,
               int threads) {
    const Buffer panels(panels_size(depth, columns) * item_size(dtype));
    run(cpu_linear_panels(
        {dtype, depth, columns, b.data(), b_by_rows ? b_stride : 1, b_by_rows ? 1 : b_stride, panels.data()},
        threads));
    Buffer first(rows * columns * item_size(dtype)),
        pre(options.pre ? static_cast<std::int64_t>(first.size) : 0);
    Product args{dtype,
                 rows,
                 columns,
                 depth,
                 a.data(),
                 row_stride,
                 depth_stride,
                 panels.data(),
                 nullptr,
                 b_by_rows ? b_stride : 1,
                 b_by_rows ? 1 : b_stride,
                 {options.bias ? bias.data() : nullptr, dtype},
                 options.activation,
                 options.residual ? residual.data() : nullptr,
                 columns + options.gap,
                 first.data(),
                 options.pre ? pre.data() : nullptr,
                 false,
                 false};
    run(cpu_linear_product(args, threads));
    args.panels = nullptr;
    const Buffer wide = widened(b, dtype);
    for (const bool wide_b : {false, true}) {
        const Buffer second(static_cast<std::int64_t>(first.size));
        args.b = wide_b ? wide.data() : b.data();
        args.wide_b = wide_b && dtype != DType::kFloat32;
        args.c = second.data();
        run(cpu_linear_product(args, threads));
        require_same(first, second, "panels and b as it lies");
    }
    if (!options.residual && !options.pre) {
        const Buffer in_float(rows * columns * 4);
        args.wide_c = dtype != DType::kFloat32;
        args.c = in_float.data();
        run(cpu_linear_product(args, threads));
        const Buffer rounded = widened(first, dtype);
        for (std::size_t i = 0; i < in_float.size / 4; ++i) {
            const float x = in_float.data<float>()[i], y = rounded.data<float>()[i];
            require(std::fabs(x - y) <= std::fabs(x) / 256.0f + 1e-6f, "c in float32");
        }
    }
    return first;
}

void check(std::int64_t rows, std::int64_t depth, std::int64_t columns, DType dtype, const Options& options) {
    const std::int64_t gap = options.gap;
    const auto matrix = [&](std::int64_t m, std::int64_t n) {
        return random_buffer((m - 1) * (n + gap) + n, dtype);
    };
    const Buffer x = matrix(rows, depth), weight = matrix(columns, depth), residual = matrix(rows, columns);
    const Buffer bias = random_buffer(columns, dtype);
    const Buffer dy = random_buffer(rows * columns, dtype), pre = random_buffer(rows * columns, dtype);
    const Options plain{Activation::kNone, false, false, false, gap};
    std::vector<Buffer> first;
    for (const char* isa : {"avx2", "avx512", "avx512_bf16"}) {
        if (!set_isa(isa)) continue;
        for (const int threads : {1, 3}) {
            std::vector<Buffer> results;
            results.push_back(product(dtype, rows, depth, columns, x, depth + gap, 1, weight, depth + gap,
                                      false, bias, residual, options, threads));
            const Buffer g(rows * columns * item_size(dtype)), dbias(columns * 4);
            run(cpu_linear_activation_bwd({dtype, rows, columns, dy.data(),
                                           options.activation == Activation::kNone ? nullptr : pre.data(),
                                           options.activation, g.data(), dbias.data<float>()},
                                          threads));
            // dx = g weight, dweight = gᵀ x
            results.push_back(product(dtype, rows, columns, depth, g, columns, 1, weight, depth + gap, true,
                                      bias, residual, plain, threads));
            results.push_back(product(dtype, columns, rows, depth, g, 1, columns, x, depth + gap, true, bias,
                                      residual, plain, threads));
            results.emplace_back(columns * 4);
            std::memcpy(results.back().data(), dbias.data(), dbias.size);
            if (first.empty()) first = std::move(results);
            for (std::size_t i = 0; i < results.size(); ++i) {
                const float sums = 4.0f * std::sqrt(static_cast<float>(std::max({rows, depth, columns})));
                if (dtype == DType::kFloat32 || i == 3)
                    require_close(first[i], results[i], 1e-5f, sums, "linear");
            }
        }
    }
}

std::int64_t padded(std::int64_t columns) { return (columns + kPanel - 1) / kPanel * kPanel; }

// AVX-512 without VNNI is not chosen where there is VNNI: its kernels, one after the other.
Buffer product_by_pairs(const ProductInt8& args, const std::int8_t* weight) {
    const LinearInt8Kernels& simd = avx512::linear_int8_kernels;
    const std::int64_t count = groups_of(args.depth, simd.group), wide = padded(args.columns);
    const Buffer panels(wide * 4 * (count + 1)), groups(args.rows * count * 4);
    Buffer y(args.rows * args.columns * 4);
    const ToPanelsInt8 made{args.depth, args.columns, weight, panels.data<std::uint8_t>()};
    for (std::int64_t panel = 0; panel < wide / kPanel; ++panel)
        simd.make_panel(made, panel, reinterpret_cast<std::int32_t*>(panels.data<char>() + wide * 4 * count));
    std::vector<QuantizedRow> quantized;
    for (std::int64_t row = 0; row < args.rows; ++row)
        quantized.push_back(simd.quantize(args, row, groups.data<std::uint32_t>() + row * count));
    std::vector<float> scale(args.scale, args.scale + args.columns);
    scale.resize(static_cast<std::size_t>(wide));
    ProductInt8 own = args;
    own.panels = panels.data<std::uint8_t>();
    own.y = y.data();
    simd.product(own, groups.data<std::uint32_t>(), quantized.data(), scale.data(), nullptr, 0, args.rows, 0,
                 args.columns, 0);
    ++g_calls;
    return y;
}

void check_int8(std::int64_t rows, std::int64_t depth, std::int64_t columns, DType dtype,
                const Options& options) {
    const std::int64_t stride = depth + options.gap;
    const Buffer x = random_buffer((rows - 1) * stride + depth, dtype), weight(depth * columns);
    for (std::size_t i = 0; i < weight.size; ++i)
        weight.data<std::int8_t>()[i] = static_cast<std::int8_t>(static_cast<int>(generator()() % 255) - 127);
    const DType bias_dtype = options.gap > 0 ? DType::kFloat32 : dtype;
    const Buffer scale = random_buffer(columns, DType::kFloat32), bias = random_buffer(columns, bias_dtype);
    std::unique_ptr<Buffer> first;
    for (const char* isa : {"avx2", "avx512"}) {
        if (!set_isa(isa)) continue;
        const Buffer panels(int8_panels_size(depth, columns));
        for (const int threads : {1, 3}) {
            run(cpu_linear_int8_panels(
                {depth, columns, weight.data<std::int8_t>(), panels.data<std::uint8_t>()}, threads));
            std::unique_ptr<Buffer> y(new Buffer(rows * columns * item_size(dtype)));
            const ProductInt8 args{dtype,
                                   rows,
                                   columns,
                                   depth,
                                   x.data(),
                                   stride,
                                   panels.data<std::uint8_t>(),
                                   scale.data<float>(),
                                   {options.bias ? bias.data() : nullptr, bias_dtype},
                                   options.activation,
                                   y->data()};
            run(cpu_linear_int8(args, threads));
            const bool plain = options.activation == Activation::kNone;
            if (plain && std::strcmp(isa, "avx512") == 0 && !options.bias && dtype == DType::kFloat32)
                require_same(*y, product_by_pairs(args, weight.data<std::int8_t>()), "with and without VNNI");
            if (first == nullptr)
                first = std::move(y);
            else if (plain)
                require_same(*first, *y, "linear_int8: integers");
            else if (dtype == DType::kFloat32)
                require_close(*first, *y, 1e-5f, 1.0f, "linear_int8");
        }
    }
}

}  // namespace

int main() {
    use_team();
    const Options options[] = {{Activation::kNone, false, false, false, 0},
                               {Activation::kGelu, true, true, true, 3},
                               {Activation::kSilu, false, true, false, 1},
                               {Activation::kGeluTanh, true, false, true, 0},
                               {Activation::kRelu, true, false, false, 2}};
    int turn = 0;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        for (const std::int64_t rows : {1, 5, 6, 7, 17})
            for (const std::int64_t depth : {1, 3, 8, 17, 33})
                for (const std::int64_t columns : {1, 7, 16, 63, 65}) {
                    check(rows, depth, columns, dtype, options[turn % 5]);
                    check_int8(rows, depth, columns, dtype, options[turn++ % 5]);
                }
        // several tasks a thread, blocks of rows, passes over the depth, groups of columns
        check(330, 40, 200, dtype, options[1]);
        check(200, 70, 40, dtype, options[3]);
        check(9, 1100, 1100, dtype, options[1]);
        check(1100, 9, 70, dtype, options[2]);
        check_int8(500, 70, 200, dtype, options[0]);
        check_int8(3, 1030, 1100, dtype, options[1]);
    }
    check_int8(2, 65536, 3, DType::kFloat32, options[0]);
    std::printf("%d calls\n", g_calls);
    return 0;
}
