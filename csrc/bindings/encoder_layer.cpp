// A whole encoder layer on the CPU.
#include "../cpu/encoder_layer.h"

#include "bindings.h"

namespace fastbert {
namespace {

// Reads a tuple of numbers in the order of fastbert/backends/cpu/encoder_layer.py.
class Reader {
  public:
    explicit Reader(const py::tuple& from) : from_(from) {}
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
    void end(const char* name) const {
        if (at_ != from_.size()) throw py::value_error(std::string(name) + ": too many numbers");
    }

  private:
    const py::tuple& from_;
    std::size_t at_ = 0;
};

EncoderLayer layer_of(int dtype, const py::tuple& sizes) {
    EncoderLayer args{};
    args.dtype = dtype_of(dtype);
    Reader size(sizes);
    args.batch = size.next<std::int64_t>();
    args.nheads = size.next<std::int64_t>();
    args.headdim = size.next<std::int64_t>();
    args.total = size.next<std::int64_t>();
    args.max_seqlen = size.next<std::int64_t>();
    args.inner = size.next<std::int64_t>();
    args.hidden = size.next<std::int64_t>();
    size.end("sizes");
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

std::int64_t encoder_layer_work(int dtype, const py::tuple& sizes, int threads) {
    check_threads(threads);
    return cpu_encoder_layer_work(layer_of(dtype, sizes), threads);
}

void encoder_layer_fwd(int dtype, const py::tuple& sizes, const py::tuple& weights, Address cu_seqlens,
                       Address x, std::int64_t x_stride, double attention_eps, double output_eps,
                       int activation, float softmax_scale, const py::tuple& bias, Address gate, Address y,
                       int threads, Address work, std::int64_t work_bytes) {
    EncoderLayer args = layer_of(dtype, sizes);
    check_threads(threads);
    args.work = pointer(work);
    if (work != 0 && work_bytes < cpu_encoder_layer_work(args, threads))
        throw py::value_error("work: too few bytes");
    Reader weight(weights);
    for (LayerLinear* linear :
         {&args.query, &args.key, &args.value, &args.attention_output, &args.intermediate, &args.output})
        *linear = weight.linear();
    args.attention_norm = weight.norm();
    args.output_norm = weight.norm();
    weight.end("weights");
    args.attention_norm.eps = attention_eps;
    args.output_norm.eps = output_eps;
    args.cu_seqlens = pointer<const std::int32_t>(cu_seqlens);
    args.x = pointer(x);
    args.x_stride = x_stride;
    args.activation = activation_of(activation);
    args.softmax_scale = softmax_scale;
    Reader strides(bias);
    args.bias.data = strides.address<const float>();
    args.bias.batch_stride = strides.next<std::int64_t>();
    args.bias.head_stride = strides.next<std::int64_t>();
    args.bias.row_stride = strides.next<std::int64_t>();
    strides.end("bias");
    args.gate = pointer<const float>(gate);
    args.y = pointer(y);
    check_lengths(args.cu_seqlens, args.batch, args.total, args.max_seqlen);
    check_rows("x", args.x, args.total, args.hidden, x_stride);
    check_given("y", args.y, args.total);
    check_bias(args.bias, args.batch, args.nheads, args.max_seqlen);
    // With 8 bits, query holds all three.
    const bool joined = args.query.scale != nullptr;
    for (const LayerLinear* linear :
         {&args.query, &args.key, &args.value, &args.attention_output, &args.intermediate, &args.output}) {
        if (joined && (linear == &args.key || linear == &args.value)) continue;
        check_given("weights", linear->panels, 1);
        if ((linear->scale != nullptr) != joined)
            throw py::value_error("weights: expected scales for all linear layers or none");
    }
    run([&] { return cpu_encoder_layer_fwd(args, threads); });
}

}  // namespace

void bind_encoder_layer(py::module_& m) {
    m.def("cpu_encoder_layer_work", &encoder_layer_work);
    m.def("cpu_encoder_layer_fwd", &encoder_layer_fwd);
}

}  // namespace fastbert
