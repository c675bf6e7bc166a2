// csrc/cpu/linear_int8.cpp as on a processor with AVX-512 but without VNNI, to be called from Python.
#define __builtin_cpu_supports(name) false
#include "cpu/linear_int8.cpp"

using namespace fastbert;

extern "C" bool pairs_start(std::uintptr_t gomp_parallel) {
    set_team_start(gomp_parallel);
    return set_isa("avx512");
}

extern "C" std::int64_t pairs_panels_size(std::int64_t depth, std::int64_t columns, bool gated) {
    return int8_panels_size(depth, columns, gated);
}

extern "C" const char* pairs_panels(std::int64_t depth, std::int64_t columns, const std::int8_t* weight,
                                    std::uint8_t* panels, int threads, bool gated) {
    return cpu_linear_int8_panels({depth, columns, weight, panels, gated}, threads);
}

extern "C" const char* pairs_product(int dtype, std::int64_t rows, std::int64_t columns, std::int64_t depth,
                                     const void* x, std::int64_t x_stride, const std::uint8_t* panels,
                                     const float* scale, const void* bias, int bias_dtype, int activation,
                                     void* y, int threads, int gate, const float* smooth, const float* range,
                                     bool) {
    return cpu_linear_int8({static_cast<DType>(dtype),
                            rows,
                            columns,
                            depth,
                            x,
                            x_stride,
                            panels,
                            scale,
                            {bias, static_cast<DType>(bias_dtype)},
                            static_cast<Activation>(activation),
                            y,
                            static_cast<Gate>(gate),
                            Onto::kNone,
                            nullptr,
                            nullptr,
                            smooth,
                            range},
                           threads);
}
