// Whole encoder layers on the CPU.
#include "../cpu/encoder_layer.h"

#include <utility>
#include <vector>

#include "bindings.h"

namespace fastbert {
namespace {

// Reads a tuple of numbers in the order of fastbert/backends/cpu/encoder_layer.py.
class Reader {
  public:
    explicit Reader(py::tuple from) : from_(std::move(from)) {}
    template <class T>
    T next() {
        // Raises IndexError after the end.
        return number<T>(from_[at_++]);
    }
    template <class T>
    T* address() {
        return pointer<T>(next<Address>());
    }
    Param vector() {
        const Address data = next<Address>();
        return param(data, next<int>());
    }
    LayerLinear linear() {
        const void* const panels = address<const void>();
        const float* const scale = address<const float>();
        return {panels, scale, vector()};
    }
    LayerNormParams norm() {
        const Param weight = vector();
        return {weight, vector(), 0.0};
    }
    py::tuple tuple() { return py::object(from_[at_++]).cast<py::tuple>(); }
    void end(const char* name) const {
        if (at_ != from_.size()) throw py::value_error(std::string(name) + ": too many numbers");
    }

  private:
    const py::tuple from_;
    std::size_t at_ = 0;
};

// A layer without its weights. `batch_sizes` is of the call, `layer_sizes` of the layer.
EncoderLayer layer_of(int dtype, const py::tuple& batch_sizes, const py::tuple& layer_sizes) {
    EncoderLayer args{};
    args.dtype = dtype_of(dtype);
    Reader batch(batch_sizes);
    args.batch = batch.next<std::int64_t>();
    args.total = batch.next<std::int64_t>();
    args.max_seqlen = batch.next<std::int64_t>();
    args.hidden = batch.next<std::int64_t>();
    batch.end("batch sizes");
    Reader size(layer_sizes);
    args.nheads = size.next<std::int64_t>();
    args.headdim = size.next<std::int64_t>();
    args.inner = size.next<std::int64_t>();
    size.end("layer sizes");
    check_size("nheads", args.nheads, 1);
    check_size("headdim", args.headdim, 1);
    const std::int64_t width = elements_of("width", {args.nheads, args.headdim});
    for (const std::int64_t columns : {width, args.inner}) {
        check_shape(args.total, columns);
        check_shape(args.hidden, columns);
    }
    check_shape(args.total, args.hidden);
    check_size("batch", args.batch);
    check_size("max_seqlen", args.max_seqlen);
    return args;
}

std::int64_t encoder_layer_work(int dtype, const py::tuple& batch_sizes, const py::tuple& layer_sizes,
                                int threads) {
    check_threads(threads);
    return cpu_encoder_layer_work(layer_of(dtype, batch_sizes, layer_sizes), threads);
}

void read_weights(EncoderLayer& args, const py::tuple& weights) {
    Reader weight(weights);
    LayerLinear* const linears[] = {&args.query,        &args.key,   &args.value, &args.attention_output,
                                    &args.intermediate, &args.output};
    for (LayerLinear* linear : linears) *linear = weight.linear();
    args.attention_norm = weight.norm();
    args.output_norm = weight.norm();
    weight.end("weights");
    // With 8 bits, query holds all three.
    const bool joined = args.query.scale != nullptr;
    for (const LayerLinear* linear : linears) {
        if (joined && (linear == &args.key || linear == &args.value)) continue;
        check_given("weights", linear->panels, 1);
        if ((linear->scale != nullptr) != joined)
            throw py::value_error("weights: expected scales for all linear layers or none");
    }
}

// Layers one after the other; each is (sizes, weights, eps of both norms, activation, softmax_scale). All but
// the first write over what they read.
void encoder_layer_fwd(int dtype, const py::tuple& batch_sizes, const py::tuple& layers, Address cu_seqlens,
                       Address x, std::int64_t x_stride, const py::tuple& bias, Address gate, Address y,
                       int threads, Address work, std::int64_t work_bytes) {
    check_threads(threads);
    Bias shared{};
    Reader strides(bias);
    shared.data = strides.address<const float>();
    shared.batch_stride = strides.next<std::int64_t>();
    shared.head_stride = strides.next<std::int64_t>();
    shared.row_stride = strides.next<std::int64_t>();
    strides.end("bias");
    std::vector<EncoderLayer> all;
    for (const py::handle each : layers) {
        Reader layer(each.cast<py::tuple>());
        EncoderLayer args = layer_of(dtype, batch_sizes, layer.tuple());
        read_weights(args, layer.tuple());
        args.attention_norm.eps = layer.next<double>();
        args.output_norm.eps = layer.next<double>();
        args.activation = activation_of(layer.next<int>());
        args.softmax_scale = layer.next<float>();
        layer.end("layer");
        args.work = pointer(work);
        if (work != 0 && work_bytes < cpu_encoder_layer_work(args, threads))
            throw py::value_error("work: too few bytes");
        args.cu_seqlens = pointer<const std::int32_t>(cu_seqlens);
        args.x = pointer(all.empty() ? x : y);
        args.x_stride = all.empty() ? x_stride : args.hidden;
        args.bias = shared;
        args.gate = pointer<const float>(gate);
        args.y = pointer(y);
        if (all.empty()) {
            check_lengths(args.cu_seqlens, args.batch, args.total, args.max_seqlen);
            check_rows("x", args.x, args.total, args.hidden, x_stride);
            check_given("y", args.y, args.total);
        }
        check_bias(args.bias, args.batch, args.nheads, args.max_seqlen);
        all.push_back(args);
    }
    run([&]() -> const char* {
        const char* failed = nullptr;
        for (std::size_t i = 0; i < all.size() && failed == nullptr; ++i)
            failed = cpu_encoder_layer_fwd(all[i], threads);
        return failed;
    });
}

}  // namespace

void bind_encoder_layer(py::module_& m) {
    m.def("cpu_encoder_layer_work", &encoder_layer_work);
    m.def("cpu_encoder_layer_fwd", &encoder_layer_fwd);
}

}  // namespace fastbert
