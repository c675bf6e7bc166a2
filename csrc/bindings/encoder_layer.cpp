// Whole encoder layers on the CPU.
#include "../cpu/encoder_layer.h"

#include <algorithm>
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
        const Param bias = vector();
        const float* const smooth = address<const float>();
        const float* const range = address<const float>();
        return {panels, scale, bias, smooth, range, next<bool>()};
    }
    LayerNormParams norm() {
        const Param weight = vector();
        return {weight, vector(), 0.0};
    }
    bool ended() const { return at_ == from_.size(); }
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
    args.bottleneck.width = size.next<std::int64_t>();
    args.kv_heads = size.next<std::int64_t>();
    size.end("layer sizes");
    check_size("nheads", args.nheads, 1);
    check_size("headdim", args.headdim, 1);
    check_size("kv_heads", args.kv_heads, 1);
    if (args.nheads % args.kv_heads != 0)
        refuse("kv_heads", "a divisor of " + std::to_string(args.nheads) + " heads", args.kv_heads);
    const std::int64_t width = elements_of("width", {args.nheads, args.headdim});
    for (const std::int64_t columns : {width, args.inner}) {
        check_shape(args.total, columns);
        check_shape(args.hidden, columns);
    }
    check_shape(args.total, args.hidden);
    elements_of("bottleneck", {args.total, args.bottleneck.width});
    elements_of("bottleneck", {std::max(args.hidden, args.inner), args.bottleneck.width});
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
    LayerLinear* const linears[] = {&args.query,        &args.key,    &args.value,    &args.attention_output,
                                    &args.intermediate, &args.output, &args.activated};
    for (LayerLinear* linear : linears) *linear = weight.linear();
    args.attention_norm = weight.norm();
    args.output_norm = weight.norm();
    weight.end("weights");
    // Without panels of key, query holds all three. Only some layers have `activated`.
    const bool joined = args.key.panels == nullptr, int8 = args.query.scale != nullptr;
    if (int8 && !joined && args.bottleneck.width == 0)
        throw py::value_error("weights: expected one product of three with scales");
    for (const LayerLinear* linear : linears) {
        if (joined && (linear == &args.key || linear == &args.value)) continue;
        if (linear == &args.activated && linear->panels == nullptr) continue;
        check_given("weights", linear->panels, 1);
        if ((linear->scale != nullptr) != int8)
            throw py::value_error("weights: expected scales for all linear layers or none");
    }
}

// What a layer with bottlenecks has beside `weights`, which end with its last feed-forward block.
void read_bottleneck(EncoderLayer& args, const py::tuple& numbers) {
    Reader number(numbers);
    LayerBottleneck& own = args.bottleneck;
    own.narrow_keys = number.next<bool>();
    own.narrow_values = number.next<bool>();
    own.residual = number.linear();
    own.residual_norm = number.norm();
    own.output = number.linear();
    own.output_norm = number.norm();
    own.keys = number.linear();
    own.keys_norm = number.norm();
    while (!number.ended()) {
        const LayerLinear up = number.linear(), down = number.linear();
        own.feeds.push_back({up, down, number.norm()});
    }
    own.feeds.push_back({args.intermediate, args.output, args.output_norm});
    const bool int8 = args.query.scale != nullptr;
    const auto check = [&](const LayerLinear& linear, const LayerNormParams& norm) {
        check_given("bottleneck", linear.panels, 1);
        check_given("bottleneck", norm.weight.data, 1);
        check_given("bottleneck", norm.bias.data, 1);
        if ((linear.scale != nullptr) != int8 || norm.weight.dtype != args.dtype ||
            norm.bias.dtype != args.dtype)
            throw py::value_error(
                "bottleneck: expected scales as the layer has them, and norms of its dtype");
    };
    check(args.attention_output, args.attention_norm);
    check(own.residual, own.residual_norm);
    check(own.output, own.output_norm);
    if (own.narrow_keys) check(own.keys, own.keys_norm);
    for (const LayerFeed& feed : own.feeds) {
        check(feed.up, feed.norm);
        check(feed.down, feed.norm);
    }
    if (own.narrow_values && !own.narrow_keys)
        throw py::value_error("bottleneck: expected keys where values are narrow");
    if (args.key.panels == nullptr || args.pre_norm || args.rms || args.gated != Gate::kNone ||
        args.activated.panels != nullptr || args.tables.cos != nullptr || args.kv_heads != args.nheads)
        throw py::value_error(
            "bottleneck: expected three products of as many heads, no pre_norm, no gate and no tables");
}

// Addresses of the tables, and their (positions, half). `checked`: the positions are known to lie below it.
void read_tables(EncoderLayer& args, const py::tuple& tables, std::int64_t& checked) {
    Reader table(tables);
    args.tables.cos = table.address<const float>();
    args.tables.sin = table.address<const float>();
    const std::int64_t rows = table.next<std::int64_t>();
    args.tables.half = table.next<std::int64_t>();
    table.end("tables");
    if (args.tables.cos == nullptr) {
        if (rows != 0 || args.tables.half != 0) throw py::value_error("tables: expected an address of cos");
        return;
    }
    if (args.tables.half < 1 || args.tables.half > args.headdim / 2)
        refuse("half", "1 to " + std::to_string(args.headdim / 2) + " pairs per head", args.tables.half);
    check_given("sin", args.tables.sin, elements_of("rows * half", {rows, args.tables.half}));
    check_given("positions", args.positions, args.total);
    for (std::int64_t t = 0; rows < checked && t < args.total; ++t) check_position(args.positions[t], rows);
    checked = std::min(checked, rows);
}

// Panels of the tables of distances of queries and keys, their rows, and the first row that has a column.
void read_distances(EncoderLayer& args, const py::tuple& distances) {
    Reader table(distances);
    args.distances.query = table.address<const void>();
    args.distances.key = table.address<const void>();
    args.distances.rows = table.next<std::int64_t>();
    args.distances.first = table.next<std::int64_t>();
    table.end("distances");
    check_size("first", args.distances.first);
    check_size("distances", args.distances.rows);
    if (args.distances.query == nullptr && args.distances.key == nullptr) return;
    if (args.relative.columns == nullptr || given(args.relative))
        throw py::value_error("relative: expected columns alone beside tables of distances");
    check_size("distances", args.distances.rows, args.distances.first + args.relative.ncolumns);
    elements_of("distances", {args.distances.rows + kPanel, args.nheads, args.headdim + 1});
}

// Where the kept tokens of each sequence end, and memory for their rows: `kept` is () or these addresses.
void read_kept(EncoderLayer& args, const py::tuple& kept) {
    if (kept.empty()) return;
    Reader number(kept);
    args.kept = number.address<const std::int32_t>();
    args.kept_rows = number.address<std::int64_t>();
    number.end("kept");
    if (args.bottleneck.width > 0) throw py::value_error("kept: expected () in a layer with bottlenecks");
    if (args.kv_heads != args.nheads) throw py::value_error("kept: expected () with fewer heads of keys");
    if (args.relative.columns != nullptr || args.bias.data != nullptr || args.window.left >= 0 ||
        args.window.right >= 0)
        throw py::value_error("kept: expected () with a bias, a window or scores of distances");
    if (args.cu_seqlens[args.batch] != args.total)
        refuse("cu_seqlens", "to end at the last of " + std::to_string(args.total) + " rows",
               args.cu_seqlens[args.batch]);
    check_lengths(args.kept, args.batch, args.total, args.max_seqlen);
    check_given("kept rows", args.kept_rows, args.kept[args.batch]);
    for (std::int64_t b = 0; b < args.batch; ++b) {
        const std::int64_t n = args.cu_seqlens[b + 1] - args.cu_seqlens[b];
        const std::int64_t count = args.kept[b + 1] - args.kept[b];
        if (count > n || (n > 0 && count == 0))
            refuse("kept", "1 to " + std::to_string(n) + " tokens of a sequence", count);
    }
}

// Layers one after the other; each is (sizes, weights, eps of both norms, activation, softmax_scale,
// pre_norm, gated half, both sides of the window, tables, bottleneck, distances). All but the first write
// over what they read.
void encoder_layer_fwd(int dtype, const py::tuple& batch_sizes, const py::tuple& layers, Address cu_seqlens,
                       Address x, std::int64_t x_stride, const py::tuple& bias, Address gate,
                       Address positions, Address y, int threads, Address work, std::int64_t work_bytes,
                       const py::tuple& relative, const py::tuple& kept) {
    check_threads(threads);
    Bias shared{};
    Reader strides(bias);
    shared.data = strides.address<const float>();
    shared.batch_stride = strides.next<std::int64_t>();
    shared.head_stride = strides.next<std::int64_t>();
    shared.row_stride = strides.next<std::int64_t>();
    strides.end("bias");
    std::vector<EncoderLayer> all;
    std::int64_t checked = kMostElements;
    std::vector<std::uint8_t> runs;  // of the same distances in each layer
    for (const py::handle each : layers) {
        Reader layer(each.cast<py::tuple>());
        EncoderLayer args = layer_of(dtype, batch_sizes, layer.tuple());
        read_weights(args, layer.tuple());
        args.attention_norm.eps = layer.next<double>();
        args.output_norm.eps = layer.next<double>();
        args.activation = activation_of(layer.next<int>());
        args.softmax_scale = layer.next<float>();
        args.pre_norm = layer.next<bool>();
        args.rms = layer.next<bool>();
        args.head_major = layer.next<bool>();
        args.interleaved = layer.next<bool>();
        args.gated = gate_of(layer.next<int>());
        args.window.left = layer.next<std::int64_t>();
        args.window.right = layer.next<std::int64_t>();
        check_size("window", args.window.left, -1);
        check_size("window", args.window.right, -1);
        args.positions = pointer<const std::int64_t>(positions);
        read_tables(args, layer.tuple(), checked);
        const py::tuple bottleneck = layer.tuple();
        if (args.bottleneck.width > 0) read_bottleneck(args, bottleneck);
        args.relative = relative_of(relative, args.batch, args.nheads, args.total, args.max_seqlen, runs);
        read_distances(args, layer.tuple());
        layer.end("layer");
        if (args.head_major && (args.key.panels != nullptr || args.kv_heads != args.nheads))
            throw py::value_error("head_major: expected one product of as many heads of keys as of queries");
        if (args.output_norm.eps < 0.0 || (args.attention_norm.eps < 0.0 && !args.pre_norm))
            throw py::value_error("eps: expected a norm");
        if (args.activated.panels != nullptr && args.gated != Gate::kNone)
            throw py::value_error("gated: expected no halves beside a gate of its own");
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
        read_kept(args, kept);
        if (args.kept != nullptr && !all.empty())
            throw py::value_error("kept: expected () for several layers");
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
