// Encoder layers on a GPU, all in one call: the kernels of the other files and cuBLASLt, enqueued one after
// the other. Contract: fastbert/ops/encoder_layers.py.
//
// Math       q, k, v = x Wᵀ + b;  a = norm(x + attention(q, k, v) Woᵀ + bo)
//            y = norm(a + act(a Wiᵀ + bi) Wfᵀ + bf)
// Launches   Seven per layer, or eight where an activation is a pass of its own. Nothing waits for the host's
//            Python, which takes longer than the device does for a short text. On compute capability 9.0 few
//            rows have products of our own, which norm their rows: five per layer, and the last norm. Their
//            kernels are chained (common.cuh).
// Memory     One block of scratch: queries, keys, values and attention's output, where later the inner
//            columns are; the sum before a norm; the norm after attention. A layer may write over its input,
//            which nothing reads after the first norm.
// First      Where first tokens alone are wanted, the last layer attends with all rows and then continues
//            with the first rows.
// Precision  Each result is rounded once to the dtype of the tensors, as by the ops one after the other.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "activation.cuh"
#include "attention.h"
#include "common.cuh"
#include "cublas_lt.h"
#include "encoder_layers.h"
#include "layer_norm.h"

namespace fastbert {
namespace cuda {
namespace {

constexpr int kThreads = 256;
// At most so many rows are few: cuBLASLt's tiles of more of them fill the device.
constexpr std::int64_t kFewRows = 256;

// An activation in the precision of T.
template <class T>
__device__ __forceinline__ void activate(Activation activation, bool exact, float (&z)[kPack<T>]) {
    if (std::is_same_v<T, float> && activation == Activation::kGelu) {
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) z[i] = 0.5f * z[i] * (1.0f + erff(z[i] * 0.70710678118654752f));
        return;
    }
    with_activation<T>(activation, exact, [&](auto function) {
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) z[i] = function(z[i]);
    });
}

// `packs` packs in place.
template <class T>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(T* x, std::int64_t packs, Activation activation, bool exact) {
    const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= packs) return;
    float z[kPack<T>];
    widen_pack(load_pack(x + at * kPack<T>), z);
    activate<T>(activation, exact, z);
    store_pack(x + at * kPack<T>, z);
}

template <class T>
const char* launch_activation(void* x, std::int64_t elements, Activation activation, bool exact,
                              std::uintptr_t stream) {
    const std::int64_t packs = elements / kPack<T>, blocks = (packs + kThreads - 1) / kThreads;
    if (blocks > 0x7fffffff) return "rows * inner: too many";
    return launch(activation_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), stream,
                  static_cast<T*>(x), packs, activation, exact);
}

// The first row of each sequence, of rows of `chunks` 16 bytes; of an empty one any row.
__global__ void __launch_bounds__(kThreads)
    first_rows_kernel(const uint4* from, uint4* to, int chunks, std::int64_t rows,
                      const std::int32_t* cu_seqlens) {
    let_next_begin();
    wait_for_kernels();
    const std::int64_t start = cu_seqlens[blockIdx.x], row = start < rows ? start : rows - 1;
    for (int i = static_cast<int>(threadIdx.x); i < chunks; i += kThreads)
        to[static_cast<std::int64_t>(blockIdx.x) * chunks + i] = from[row * chunks + i];
}

std::size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The parts of the scratch memory; `at` null: only their sizes count.
class Scratch {
  public:
    explicit Scratch(void* at) : at_(static_cast<char*>(at)) {}
    void* take(std::size_t bytes) {
        void* const found = at_ + used_;
        used_ += (bytes + 255) / 256 * 256;
        return found;
    }
    std::size_t used() const { return used_; }

  private:
    char* at_;
    std::size_t used_ = 0;
};

struct Memory {
    void *lt, *hidden, *sum, *normed, *qkv, *context, *inner, *partial, *first, *first_context;
    Moments* moments;  // of few rows' sum
    std::size_t bytes;
};

// Whether the tiles of linear.h make the product with its activation; else cuBLASLt does, and a pass follows.
bool by_tiles(const LayerStack& stack, const LayerWeights& layer, std::int64_t rows,
              const CudaDevice& device) {
    return stack.dtype != DType::kFloat32 && (rows < kManyRows || !device.groups || layer.exact);
}

bool by_hopper(const LayerStack& stack, const LayerWeights& layer, std::int64_t rows,
               const CudaDevice& device) {
    return stack.dtype != DType::kFloat32 && device.hopper &&
           cuda_linear_takes_hopper(rows, layer.inner, stack.hidden, layer.activation, layer.exact,
                                    Gate::kNone);
}

LinearPlan plan_of(const LayerStack& stack, const LayerWeights& layer, std::int64_t rows,
                   const CudaDevice& device) {
    return cuda_linear_plan(Layout::kForward, rows, layer.inner, stack.hidden, device.multiprocessors);
}

Memory layout(const LayerStack& stack, void* work, std::int64_t rows, std::int64_t batch, bool first_only,
              const CudaDevice& device) {
    const std::size_t size = size_of(stack.dtype);
    std::size_t width = 0, inner = 0, partial = 0;
    for (std::size_t i = 0; i < stack.layers.size(); ++i) {
        const LayerWeights& layer = stack.layers[i];
        const bool first = first_only && i + 1 == stack.layers.size();
        const std::int64_t own = first ? batch : rows;
        width = std::max(width, static_cast<std::size_t>(layer.nheads * layer.headdim));
        inner = std::max(inner, static_cast<std::size_t>(layer.inner));
        if (!by_tiles(stack, layer, own, device)) continue;
        const int parts = plan_of(stack, layer, own, device).parts;
        partial = std::max<std::size_t>(
            partial,
            cuda_linear_partial(own, layer.inner, parts, layer.activation, layer.exact, Gate::kNone));
    }
    const auto columns = [&](std::int64_t count, std::size_t of) { return count * of * size; };
    const std::size_t hidden = stack.hidden;
    Memory found{};
    Scratch scratch(work);
    found.lt = scratch.take(kLtWork);
    found.hidden = scratch.take(first_only ? columns(rows, hidden) : 0);
    found.sum = scratch.take(columns(std::max(rows, batch), hidden));
    found.moments = static_cast<Moments*>(
        scratch.take(device.clusters ? std::max(rows, batch) * ((hidden + 63) / 64) * sizeof(Moments) : 0));
    found.normed = scratch.take(columns(std::max(rows, batch), hidden));
    found.partial = scratch.take(partial * sizeof(float));
    found.first = scratch.take(first_only ? columns(batch, hidden) : 0);
    found.first_context = scratch.take(first_only ? columns(batch, width) : 0);
    const std::size_t shared = scratch.used();
    found.qkv = scratch.take(columns(rows, 3 * width));
    found.context = scratch.take(columns(rows, width));
    const std::size_t attending = scratch.used();
    // later in the same place
    Scratch feeding(work);
    feeding.take(shared);
    found.inner = feeding.take(columns(std::max(rows, batch), inner));
    found.bytes = std::max(attending, feeding.used());
    return found;
}

class Run {
  public:
    Run(const LayerStack& stack, const LayersCall& call, const CudaDevice& device, std::uintptr_t stream)
        : stack_(stack),
          call_(call),
          device_(device),
          stream_(stream),
          few_(device.clusters && stack.dtype != DType::kFloat32 && call.rows <= kFewRows),
          memory_(layout(stack, call.work, call.rows, call.batch, call.first_only, device)) {}

    ~Run() { chained = false; }

    const char* all() {
        const void* x = call_.x;
        const std::size_t count = stack_.layers.size();
        void* const all_rows = call_.first_only ? memory_.hidden : call_.out[count - 1];
        for (std::size_t i = 0; i < count; ++i) {
            const bool last = i + 1 == count;
            void* const own = call_.out[i] != nullptr ? call_.out[i] : all_rows;
            if (const char* error = layer(stack_.layers[i], x, own, last && call_.first_only)) return error;
            x = own;
        }
        return norm_sum(call_.first_only ? call_.batch : call_.rows);
    }

  private:
    const char* layer(const LayerWeights& w, const void* x, void* y, bool first) {
        const std::int64_t hidden = stack_.hidden, width = w.nheads * w.headdim;
        std::int64_t rows = call_.rows;
        const void* context = memory_.context;
        const char* error = product(rows, 3 * width, hidden, x, w.qkv, w.qkv_bias, memory_.qkv);
        if (error == nullptr) error = attention(w);
        if (error == nullptr && first) {
            error = first_rows(context, memory_.first_context, width);
            if (error == nullptr) error = first_rows(x, memory_.first, hidden);
            x = memory_.first, context = memory_.first_context, rows = call_.batch;
        }
        const RowNorm mid{memory_.moments, w.norm, w.norm_bias, w.eps, memory_.normed};
        const RowNorm end{memory_.moments, w.last, w.last_bias, w.last_eps, y};
        if (error == nullptr) error = add(rows, width, context, w.out, w.out_bias, x, mid);
        if (error == nullptr) error = feed(w, rows);
        if (error == nullptr)
            error = add(rows, w.inner, memory_.inner, w.down, w.down_bias, memory_.normed, end);
        return error;
    }

    LinearProduct forward(std::int64_t rows, std::int64_t columns, std::int64_t depth, const void* a,
                          const void* b, const void* bias, void* c) const {
        LinearProduct args{};
        args.dtype = stack_.dtype, args.layout = Layout::kForward;
        args.rows = rows, args.columns = columns, args.depth = depth;
        args.a = a, args.b = b, args.a_stride = args.b_stride = depth;
        args.bias = bias, args.c = c;
        return args;
    }

    // Whether clusters took the product, after the norm of its rows that is still to do, or that norm failed.
    bool by_clusters(LinearProduct args, const char*& error) {
        if (!few_) return false;
        if (pending_.y != nullptr) args.a = memory_.sum, args.norm = pending_;
        bool refused = false;
        error = cuda_linear_cluster_product(args, device_.multiprocessors, device_.index, stream_, refused);
        few_ = !refused;
        // The first kernel of a call is not chained, so that weights and lengths are there for all others.
        chained = few_ && device_.chained;
        if (refused) error = norm_sum(args.rows);
        pending_ = {};
        return few_ || error != nullptr;
    }

    const char* product(std::int64_t rows, std::int64_t columns, std::int64_t depth, const void* a,
                        const void* b, const void* bias, void* c, const void* residual = nullptr) {
        const char* error = nullptr;
        if (by_clusters(forward(rows, columns, depth, a, b, bias, c), error)) return error;
        const LtProduct args{stack_.dtype, rows, columns, depth, a, b, bias, residual, c, device_.tf32};
        return lt_product(args, memory_.lt, device_.index, stream_);
    }

    const char* attention(const LayerWeights& w) {
        const std::int64_t width = w.nheads * w.headdim;
        const auto heads = [&](std::int64_t part) {
            const char* const data = static_cast<const char*>(memory_.qkv);
            return Heads{data + part * width * size_of(stack_.dtype), 3 * width, w.headdim};
        };
        AttentionFwd args{};
        args.dtype = stack_.dtype;
        args.batch = call_.batch, args.nheads = args.kv_heads = w.nheads;
        args.headdim = w.headdim;
        args.total = call_.rows, args.max_seqlen = call_.max_seqlen, args.cu_seqlens = call_.cu_seqlens;
        args.q = heads(0), args.k = heads(1), args.v = heads(2);
        args.softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(w.headdim)));
        args.window.right = call_.causal ? 0 : -1;
        args.causal = call_.causal, args.bias = call_.bias;
        args.dropout.scale = 1.0f;
        args.out = memory_.context;
        const bool hopper = !few_ && device_.hopper && stack_.dtype != DType::kFloat32 &&
                            args.bias.data == nullptr &&
                            (w.headdim == 64 || (w.headdim == 32 && !args.causal)) &&
                            cuda_attention_fills_hopper(args.batch, args.total, args.max_seqlen, args.nheads,
                                                        args.headdim, device_.multiprocessors);
        return hopper ? cuda_attention_hopper_fwd(args, device_.index, stream_)
                      : cuda_attention_fwd(args, device_.index, stream_);
    }

    const char* first_rows(const void* from, void* to, std::int64_t columns) {
        const int chunks = static_cast<int>(columns * size_of(stack_.dtype) / 16);
        if (call_.batch > 0x7fffffff) return "batch: at most 2**31 - 1";
        return launch(first_rows_kernel, dim3(static_cast<unsigned>(call_.batch)), dim3(kThreads), stream_,
                      static_cast<const uint4*>(from), static_cast<uint4*>(to), chunks, call_.rows,
                      call_.cu_seqlens);
    }

    // The norm of residual + a bᵀ + bias. Of few rows it remains to be done, by the product that reads it.
    const char* add(std::int64_t rows, std::int64_t depth, const void* a, const void* b, const void* bias,
                    const void* residual, const RowNorm& norm) {
        LinearProduct args = forward(rows, stack_.hidden, depth, a, b, bias, memory_.sum);
        args.residual = residual, args.residual_stride = stack_.hidden, args.moments = memory_.moments;
        const char* error = nullptr;
        if (by_clusters(args, error)) {
            pending_ = norm;
            return error;
        }
        void* const sum = memory_.sum;
        if (device_.adds) {
            error = product(rows, stack_.hidden, depth, a, b, bias, sum, residual);
            return error != nullptr ? error : this->norm(rows, nullptr, nullptr, norm);
        }
        error = product(rows, stack_.hidden, depth, a, b, nullptr, sum);
        return error != nullptr ? error : this->norm(rows, residual, bias, norm);
    }

    // The norm that remains to be done
    const char* norm_sum(std::int64_t rows) {
        return pending_.y == nullptr ? nullptr : norm(rows, nullptr, nullptr, pending_);
    }

    // norm(residual + sum + x_bias)
    const char* norm(std::int64_t rows, const void* residual, const void* x_bias, const RowNorm& norm) {
        LayerNormFwd args{};
        args.dtype = stack_.dtype, args.rows = rows, args.hidden = stack_.hidden;
        args.x = memory_.sum, args.residual = residual;
        args.x_stride = args.residual_stride = stack_.hidden;
        args.weight = {norm.weight, stack_.dtype}, args.bias = {norm.bias, stack_.dtype};
        args.x_bias = {x_bias, stack_.dtype};
        args.eps = norm.eps, args.dropout.scale = 1.0f, args.y = norm.y;
        return cuda_layer_norm_fwd(args, static_cast<int>(stack_.dtype), 0, device_.index, stream_);
    }

    // inner = act(normed Wiᵀ + bi)
    const char* feed(const LayerWeights& w, std::int64_t rows) {
        LinearProduct args =
            forward(rows, w.inner, stack_.hidden, memory_.normed, w.up, w.up_bias, memory_.inner);
        args.activation = w.activation, args.exact = w.exact;
        args.partial = static_cast<float*>(memory_.partial);
        const char* error = nullptr;
        if (by_clusters(args, error)) return error;
        if (by_hopper(stack_, w, rows, device_)) {
            bool refused = false;
            error =
                cuda_linear_hopper_product(args, device_.multiprocessors, device_.index, stream_, refused);
            if (!refused) return error;
        }
        if (by_tiles(stack_, w, rows, device_)) {
            const LinearPlan plan = plan_of(stack_, w, rows, device_);
            args.tile_rows = plan.tile_rows, args.parts = plan.parts;
            return cuda_linear_product(args, device_.index, stream_);
        }
        error = product(rows, w.inner, stack_.hidden, memory_.normed, w.up, w.up_bias, memory_.inner);
        if (error != nullptr) return error;
        const auto pass = stack_.dtype == DType::kFloat32    ? launch_activation<float>
                          : stack_.dtype == DType::kBFloat16 ? launch_activation<bf16>
                                                             : launch_activation<fp16>;
        return pass(memory_.inner, rows * w.inner, w.activation, w.exact, stream_);
    }

    const LayerStack& stack_;
    const LayersCall& call_;
    const CudaDevice& device_;
    std::uintptr_t stream_;
    bool few_;
    Memory memory_;
    RowNorm pending_{};  // of the sum
};

}  // namespace
}  // namespace cuda

std::size_t cuda_encoder_layers_work(const LayerStack& stack, std::int64_t rows, std::int64_t batch,
                                     bool first_only, const CudaDevice& device) {
    return cuda::layout(stack, nullptr, rows, batch, first_only, device).bytes;
}

const char* cuda_encoder_layers_gap(const LayerStack& stack) {
    if (!cuda::has_cublas_lt()) return "cuBLASLt is not loaded in this process";
    if (stack.layers.empty()) return "there are no layers";
    if (stack.hidden < 8 || stack.hidden % 8 != 0) return "the hidden size is no multiple of 8";
    for (const LayerWeights& w : stack.layers) {
        if (w.nheads < 1 || (w.headdim != 32 && w.headdim != 64 && w.headdim != 128))
            return "heads are of another size than 32, 64 and 128";
        if (w.inner < 8 || w.inner % 8 != 0)
            return "the columns of a feed-forward block are no multiple of 8";
        for (const void* p : {w.qkv, w.qkv_bias, w.out, w.out_bias, w.norm, w.norm_bias, w.up, w.up_bias,
                              w.down, w.down_bias, w.last, w.last_bias})
            if (p == nullptr || !cuda::aligned(p)) return "a parameter does not lie on 16 bytes";
    }
    return nullptr;
}

const char* cuda_encoder_layers(const LayerStack& stack, const LayersCall& call, const CudaDevice& device,
                                std::uintptr_t stream) {
    if (call.rows == 0 || call.batch == 0) return nullptr;
    if (const char* const gap = cuda_encoder_layers_gap(stack)) return gap;
    if (!cuda::aligned(call.x)) return "x: expected a start on 16 bytes";
    return cuda::Run(stack, call, device, stream).all();
}

}  // namespace fastbert
