// A stand-in for cuBLASLt: the products that csrc/cuda/cublas_lt.cu asks for, played in double on the host.
//
// It takes only what that file passes, and refuses anything else, so that a wrong number there is seen.
#include <cstddef>
#include <cstdint>
#include <cstring>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

enum Status { kSuccess = 0, kInvalid = 7, kUnsupported = 15 };
enum Type { kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14 };

struct Desc {
    int trans_a = 0;
    std::uint32_t epilogue = 1;
    const void* bias = nullptr;
};
struct Layout {
    int type;
    std::uint64_t rows, columns;
    std::int64_t stride;
};
struct Preference {
    std::uint64_t work = 0;
    std::uint32_t reductions = 7, alignment[4] = {256, 256, 256, 256};
};
struct Heuristic {
    std::uint64_t algorithm[8];
    std::size_t work;
    int status;
    float waves;
    int reserved[4];
};

enum Mode { kNothing, kPlay, kRefuse } mode = kPlay;
int asked = 0;

float read(const void* data, int type, std::int64_t at) {
    if (type == kFloat32) return static_cast<const float*>(data)[at];
    if (type == kFloat16) return static_cast<float>(static_cast<const _Float16*>(data)[at]);
    const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(data)[at]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

void write(void* data, int type, std::int64_t at, float value) {
    if (type == kFloat32) {
        static_cast<float*>(data)[at] = value;
    } else if (type == kFloat16) {
        static_cast<_Float16*>(data)[at] = static_cast<_Float16>(value);
    } else {
        std::uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        bits += 0x7fff + (bits >> 16 & 1);
        static_cast<std::uint16_t*>(data)[at] = static_cast<std::uint16_t>(bits >> 16);
    }
}

bool on_16_bytes(const void* p) { return p != nullptr && reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

}  // namespace

// 0: products do nothing; 1: they are played; 2: there is no algorithm. Returns how often one was asked for.
EXPORTED int emulator_products(int wanted) {
    mode = static_cast<Mode>(wanted);
    return asked;
}

EXPORTED int cublasLtCreate(void** handle) {
    static char own;
    *handle = &own;
    return kSuccess;
}

EXPORTED int cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
    if ((compute != 68 && compute != 77) || scale != kFloat32) return kInvalid;
    *desc = new Desc;
    return kSuccess;
}
EXPORTED int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value, std::size_t bytes) {
    auto* const own = static_cast<Desc*>(desc);
    if (attribute == 3 && bytes == 4)
        std::memcpy(&own->trans_a, value, bytes);
    else if (attribute == 7 && bytes == 4)
        std::memcpy(&own->epilogue, value, bytes);
    else if (attribute == 8 && bytes == 8)
        std::memcpy(&own->bias, value, bytes);
    else
        return kInvalid;
    return kSuccess;
}
EXPORTED int cublasLtMatmulDescDestroy(void* desc) {
    delete static_cast<Desc*>(desc);
    return kSuccess;
}

EXPORTED int cublasLtMatrixLayoutCreate(void** layout, int type, std::uint64_t rows, std::uint64_t columns,
                                        std::int64_t stride) {
    if ((type != kFloat32 && type != kFloat16 && type != kBFloat16) ||
        stride < static_cast<std::int64_t>(rows))
        return kInvalid;
    *layout = new Layout{type, rows, columns, stride};
    return kSuccess;
}
EXPORTED int cublasLtMatrixLayoutDestroy(void* layout) {
    delete static_cast<Layout*>(layout);
    return kSuccess;
}

EXPORTED int cublasLtMatmulPreferenceCreate(void** preference) {
    *preference = new Preference;
    return kSuccess;
}
EXPORTED int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value,
                                                  std::size_t bytes) {
    auto* const own = static_cast<Preference*>(preference);
    if (attribute == 1 && bytes == 8)
        std::memcpy(&own->work, value, bytes);
    else if (attribute == 3 && bytes == 4)
        std::memcpy(&own->reductions, value, bytes);
    else if (attribute >= 5 && attribute <= 8 && bytes == 4)
        std::memcpy(&own->alignment[attribute - 5], value, bytes);
    else
        return kInvalid;
    return kSuccess;
}
EXPORTED int cublasLtMatmulPreferenceDestroy(void* preference) {
    delete static_cast<Preference*>(preference);
    return kSuccess;
}

EXPORTED int cublasLtMatmulAlgoGetHeuristic(void*, void*, void* a, void*, void* c, void*, void* preference,
                                            int wanted, Heuristic* found, int* count) {
    const auto* const wishes = static_cast<const Preference*>(preference);
    ++asked;
    *count = 0;
    // adding parts in the output's type, or in any order, is not as exact, or not always the same
    if (mode == kRefuse || wanted != 1 || wishes->reductions != 2 || wishes->work == 0) return kUnsupported;
    for (const std::uint32_t each : wishes->alignment)
        if (each > 16) return kUnsupported;
    *found = {};
    found->algorithm[0] = static_cast<const Layout*>(a)->columns;
    found->algorithm[1] = static_cast<const Layout*>(c)->columns;
    found->work = wishes->work;
    *count = 1;
    return kSuccess;
}

EXPORTED int cublasLtMatmul(void*, void* desc, const float* alpha, const void* a, void* a_layout,
                            const void* b, void* b_layout, const float* beta, const void* c, void* c_layout,
                            void* d, void* d_layout, const std::uint64_t* algorithm, void* work,
                            std::size_t work_bytes, void*) {
    const auto& op = *static_cast<const Desc*>(desc);
    const auto &la = *static_cast<const Layout*>(a_layout), &lb = *static_cast<const Layout*>(b_layout),
               &ld = *static_cast<const Layout*>(d_layout);
    // aᵀ b: all in columns
    const bool fits = op.trans_a == 1 && la.rows == lb.rows && la.columns == ld.rows &&
                      lb.columns == ld.columns && c_layout == d_layout && *alpha == 1.0f &&
                      *beta == (c == d ? 0.0f : 1.0f) && algorithm[0] == la.columns &&
                      algorithm[1] == ld.columns && la.type == lb.type && la.type == ld.type;
    if (!fits || !on_16_bytes(a) || !on_16_bytes(b) || !on_16_bytes(c) || !on_16_bytes(d) ||
        !on_16_bytes(work) || (op.epilogue != 1 && (op.epilogue != 4 || !on_16_bytes(op.bias))))
        return kInvalid;
    if (mode == kNothing) return kSuccess;
    // what an algorithm may write there
    std::memset(work, 0xff, work_bytes < 4096 ? work_bytes : 4096);
    for (std::uint64_t j = 0; j < ld.columns; ++j)
        for (std::uint64_t i = 0; i < ld.rows; ++i) {
            double sum = op.epilogue == 4 ? read(op.bias, ld.type, i) : 0.0f;
            if (c != d) sum += read(c, ld.type, j * ld.stride + i);
            for (std::uint64_t k = 0; k < la.rows; ++k)
                sum += static_cast<double>(read(a, la.type, i * la.stride + k)) *
                       read(b, lb.type, j * lb.stride + k);
            write(d, ld.type, j * ld.stride + i, static_cast<float>(sum));
        }
    return kSuccess;
}
