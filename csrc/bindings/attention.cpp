// attention: CPU and CUDA take the same arguments.
#include "../cpu/attention.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>

#include "../cpu/attention_received.h"
#include "bindings.h"
#if FASTBERT_CUDA
#include "../cuda/attention.h"
#include "../cuda/attention_backward.h"
#endif

namespace fastbert {
namespace {

// The arguments of both forward and backward, in the order of `attention` in fastbert/backends/extension.py.
// Returns how many rows of q, k and v are read. On a GPU the host cannot read cu_seqlens.
std::int64_t fill(Attention& out, const py::tuple& common, bool on_device) {
    if (common.size() != 29) throw py::value_error("attention: expected 29 common arguments");
    std::size_t next = 0;
    const auto address = [&] { return number<Address>(common[next++]); };
    const auto size = [&] { return number<std::int64_t>(common[next++]); };
    const auto heads = [&] {
        const Address data = address();
        const std::int64_t row = size();
        return Heads{pointer(data), row, size()};
    };
    out.dtype = dtype_of(number<int>(common[next++]));
    out.batch = size();
    out.nheads = size();
    out.headdim = size();
    out.total = size();
    out.max_seqlen = size();
    out.kv_heads = size();
    out.cu_seqlens = pointer<const std::int32_t>(address());
    out.q = heads();
    out.k = heads();
    out.v = heads();
    out.softmax_scale = number<float>(common[next++]);
    out.window.left = size();
    out.window.right = size();
    out.causal = out.window.left < 0 && out.window.right == 0;
    out.bias.data = pointer<const float>(address());
    out.bias.batch_stride = size();
    out.bias.head_stride = size();
    out.bias.row_stride = size();
    out.gate = pointer<const float>(address());
    out.dropout.seed = pointer<const std::uint64_t>(address());
    out.dropout.offset = number<std::uint32_t>(common[next++]);
    out.dropout.threshold = number<std::uint32_t>(common[next++]);
    out.dropout.scale = number<float>(common[next++]);
    check_size("nheads", out.nheads, 1);
    check_size("kv_heads", out.kv_heads, 1);
    if (out.nheads % out.kv_heads != 0)
        refuse("kv_heads", "a divisor of the " + std::to_string(out.nheads) + " heads of q", out.kv_heads);
    check_size("window", out.window.left, -1);
    check_size("window", out.window.right, -1);
    check_size("headdim", out.headdim, 1);
    check_size("batch", out.batch);
    check_size("total", out.total);
    check_size("max_seqlen", out.max_seqlen);
    check_given("cu_seqlens", out.cu_seqlens, 1);
    const std::int64_t end =
        on_device ? out.total : check_lengths(out.cu_seqlens, out.batch, out.total, out.max_seqlen);
    elements_of("q", {out.total, out.nheads, out.headdim});
    const Heads* const tensors[] = {&out.q, &out.k, &out.v};
    const char* const names[] = {"q", "k", "v"};
    const std::int64_t heads_of[] = {out.nheads, out.kv_heads, out.kv_heads};
    for (int i = 0; i < 3; ++i) {
        check_given(names[i], tensors[i]->data, end);
        check_strides(
            names[i],
            {{out.total, tensors[i]->row_stride}, {heads_of[i], tensors[i]->head_stride}, {out.headdim, 1}});
    }
    check_bias(out.bias, out.batch, out.nheads, out.max_seqlen);
    return end;
}

// Tensors with one matrix per sequence and head.
void check_matrices(const char* name, const Attention& args, const void* data) {
    if (data != nullptr) elements_of(name, {args.batch, args.nheads, args.max_seqlen, args.max_seqlen});
}

void check_bits(const Attention& args, const void* data) {
    if (data != nullptr) elements_of("keep_bits", {args.nheads, args.total, args.max_seqlen / 32 + 1});
}

AttentionFwd fwd_args(const py::tuple& common, Address out, Address lse, Address probs, Address keep_bits,
                      bool on_device) {
    AttentionFwd args{};
    const std::int64_t end = fill(args, common, on_device);
    args.out = pointer(out);
    args.lse = pointer<float>(lse);
    args.probs = pointer(probs);
    args.keep_bits = pointer<std::int32_t>(keep_bits);
    check_given("out", args.out, end);
    check_matrices("probs", args, args.probs);
    check_bits(args, args.keep_bits);
    return args;
}

void attention_fwd(const py::tuple& common, Address out, Address lse, Address probs, Address keep_bits,
                   int threads, const py::tuple& relative) {
    const AttentionFwd args = fwd_args(common, out, lse, probs, keep_bits, false);
    check_threads(threads);
    std::vector<std::uint8_t> runs;
    const Relative scores = relative_of(relative, args.batch, args.nheads, args.total, args.max_seqlen, runs);
    run([&] { return cpu_attention_fwd(args, threads, scores); });
}

void attention_received(const py::tuple& common, Address lse, Address out, int threads) {
    AttentionReceived args{};
    const std::int64_t end = fill(args, common, false);
    args.lse = pointer<const float>(lse);
    args.out = pointer<float>(out);
    check_given("lse", args.lse, end);
    check_given("out", args.out, args.total);
    elements_of("scores", {args.max_seqlen, args.max_seqlen});
    check_threads(threads);
    run([&] { return cpu_attention_received(args, threads); });
}

void attention_bwd(const py::tuple& common, Address keep_bits, Address dout, Address dq, Address dk,
                   Address dv, Address ds, Address dgate, int threads, const py::tuple& relative,
                   Address dquery, Address dkey, Address ddistance) {
    AttentionBwd args{};
    const std::int64_t end = fill(args, common, false);
    args.keep_bits = pointer<const std::int32_t>(keep_bits);
    args.dout = pointer(dout);
    args.dq = pointer(dq);
    args.dk = pointer(dk);
    args.dv = pointer(dv);
    args.ds = pointer<float>(ds);
    args.dgate = pointer<double>(dgate);
    check_threads(threads);
    check_given("dout", args.dout, end);
    check_matrices("ds", args, args.ds);
    check_bits(args, args.keep_bits);
    std::vector<std::uint8_t> runs;
    const Relative scores = relative_of(relative, args.batch, args.nheads, args.total, args.max_seqlen, runs);
    RelativeGrads grads;
    grads.query = pointer<float>(dquery);
    grads.key = pointer<float>(dkey);
    grads.bias = pointer<double>(ddistance);
    if (wanted(grads) && scores.columns == nullptr)
        throw py::value_error("relative: expected scores, got ()");
    run([&] { return cpu_attention_bwd(args, threads, scores, grads); });
}

// Scores by a table per head, as `table_scores` in fastbert/backends/cpu/attention.py passes them.
void table_scores(int dtype, std::int64_t rows, std::int64_t nheads, std::int64_t headdim, Address x,
                  std::int64_t row_stride, std::int64_t head_stride, Address panels, std::int64_t table_rows,
                  std::int64_t first, std::int64_t count, Address out, int threads) {
    check_size("nheads", nheads, 1);
    check_size("headdim", headdim, 1);
    check_size("count", count, 1);
    check_size("first", first);
    check_size("table_rows", table_rows, first + count);
    check_strides("x", {{rows, row_stride}, {nheads, head_stride}, {headdim, 1}});
    elements_of("table", {table_rows + kPanel, nheads, headdim + 1});
    const std::int64_t scores = elements_of("out", {rows, nheads, count + 2 * kPanel});
    const TableScores args{
        dtype_of(dtype), rows,       nheads, headdim, {pointer(x), row_stride, head_stride},
        pointer(panels), table_rows, first,  count,   pointer(out)};
    check_given("x", args.x.data, rows);
    check_given("panels", args.panels, 1);
    check_given("out", args.out, scores);
    check_threads(threads);
    run([&] { return cpu_table_scores(args, threads); });
}

#if FASTBERT_CUDA
void attention_fwd_on_device(const py::tuple& common, Address out, Address lse, Address keep_bits, int device,
                             Address stream) {
    const AttentionFwd args = fwd_args(common, out, lse, 0, keep_bits, true);
    run([&] { return cuda_attention_fwd(args, device, stream); });
}

void attention_hopper_fwd(const py::tuple& common, Address out, Address lse, Address keep_bits, int device,
                          Address stream) {
    const AttentionFwd args = fwd_args(common, out, lse, 0, keep_bits, true);
    run([&] { return cuda_attention_hopper_fwd(args, device, stream); });
}

void attention_bwd_on_device(const py::tuple& common, Address keep_bits, Address dout, Address out,
                             Address lse, Address places, std::int64_t slots, Address dq, Address dk,
                             Address dv, std::int64_t grad_stride, std::int64_t kv_grad_stride, Address rows,
                             bool need_dgate, Address dbias, const std::array<std::int64_t, 5>& dbias_shape,
                             bool hopper, int device, Address stream) {
    CudaAttentionBwd args{};
    const std::int64_t end = fill(args, common, true);
    args.keep_bits = pointer<const std::int32_t>(keep_bits);
    args.dout = pointer(dout);
    args.out = pointer(out);
    args.lse = pointer<const float>(lse);
    args.places = pointer<const std::int32_t>(places);
    args.slots = slots;
    args.dq = pointer(dq);
    args.dk = pointer(dk);
    args.dv = pointer(dv);
    args.grad_stride = grad_stride;
    args.kv_grad_stride = kv_grad_stride;
    args.delta = pointer<float>(rows);
    args.norm = args.delta + args.nheads * args.total;
    args.dgate = need_dgate ? args.norm + args.nheads * args.total : nullptr;
    args.dbias = pointer<float>(dbias);
    args.parts = dbias_shape[0];
    args.bias_batch = dbias_shape[1];
    args.bias_heads = dbias_shape[2];
    args.bias_has_rows = dbias_shape[3] > 1;
    args.bias_has_keys = dbias_shape[4] > 1;
    check_size("slots", args.slots);
    check_strides("grads", {{args.total, args.grad_stride}, {args.nheads * args.headdim, 1}});
    check_strides("grads", {{args.total, args.kv_grad_stride}, {args.kv_heads * args.headdim, 1}});
    check_given("dout", args.dout, end);
    check_given("out", args.out, end);
    check_given("lse", args.lse, end);
    check_given("rows", args.delta, end);
    check_bits(args, args.keep_bits);
    if (args.dbias != nullptr) {
        elements_of("dbias",
                    {dbias_shape[0], dbias_shape[1], dbias_shape[2], dbias_shape[3], dbias_shape[4]});
        check_size("dbias", args.parts, 1);
        check_size("dbias", args.bias_batch, 1);
        check_size("dbias", args.bias_heads, 1);
        check_given("bias", args.bias.data, args.batch * args.max_seqlen);
    }
    run([&] {
        return hopper ? cuda_attention_bwd_hopper(args, device, stream)
                      : cuda_attention_bwd(args, device, stream);
    });
}
#endif

}  // namespace

Relative relative_of(const py::tuple& given, std::int64_t batch, std::int64_t nheads, std::int64_t total,
                     std::int64_t max_seqlen, std::vector<std::uint8_t>& runs) {
    Relative out;
    if (given.empty()) return out;
    if (given.size() != 11) throw py::value_error("relative: expected 11 numbers");
    std::size_t next = 0;
    const auto size = [&] { return number<std::int64_t>(given[next++]); };
    const auto* const columns = pointer<const std::int32_t>(number<Address>(given[next++]));
    const std::int64_t count = size();
    out.ncolumns = size();
    out.half = size() != 0;
    for (Heads* scores : {&out.query, &out.key}) {
        scores->data = pointer(number<Address>(given[next++]));
        scores->row_stride = size();
        scores->head_stride = size();
        if (scores->data == nullptr) continue;
        check_strides("relative",
                      {{total, scores->row_stride}, {nheads, scores->head_stride}, {out.ncolumns, 1}});
    }
    const auto* const bias = pointer<const float>(number<Address>(given[next++]));
    check_given("columns", columns, count);
    check_size("columns", count, 2 * max_seqlen - 1);
    check_size("ncolumns", out.ncolumns, out.half ? 2 : 1);
    elements_of("relative", {total + 1, nheads, out.ncolumns});
    elements_of("relative", {batch + 1, nheads, count});
    for (std::int64_t i = 0; i < count; ++i)
        if (columns[i] < 0 || columns[i] >= out.ncolumns)
            refuse("columns", "columns of the scores", columns[i]);
    // a vector's indices are ints
    if (out.key.row_stride > (1 << 26)) refuse("key", "a row stride of at most 2^26", out.key.row_stride);
    runs.resize(static_cast<std::size_t>(count));
    for (std::int64_t i = count - 1; i >= 0; --i) {
        const bool rises = i + 1 < count && columns[i + 1] == columns[i] + 1;
        const int run = rises ? runs[static_cast<std::size_t>(i + 1)] + 1 : 1;
        runs[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(std::min(run, 255));
    }
    out.reach = count / 2;
    out.columns = columns + out.reach;
    out.runs = runs.data() + out.reach;
    if (bias != nullptr) out.bias = bias + out.reach;
    return out;
}

void bind_attention(py::module_& m) {
    m.def("cpu_attention_fwd", &attention_fwd, py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
          py::arg(), py::arg("relative") = py::tuple());
    m.def("cpu_attention_received", &attention_received);
    m.def("cpu_attention_bwd", &attention_bwd, py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
          py::arg(), py::arg(), py::arg(), py::arg(), py::arg("relative") = py::tuple(),
          py::arg("dquery") = 0, py::arg("dkey") = 0, py::arg("ddistance") = 0);
    m.def("cpu_table_scores", &table_scores);
#if FASTBERT_CUDA
    m.def("cuda_attention_fwd", &attention_fwd_on_device);
    m.def("cuda_attention_hopper", &cuda_attention_hopper,
          "Whether the device runs attention's kernel for compute capability 9.0");
    m.def("cuda_attention_fills_hopper", &cuda_attention_fills_hopper,
          "Whether (batch, total, max_seqlen, nheads, headdim) are enough for it, with so many "
          "multiprocessors");
    m.def("cuda_attention_hopper_fwd", &attention_hopper_fwd);
    m.def("cuda_attention_bwd", &attention_bwd_on_device);
    m.def("cuda_attention_bwd_slots", &cuda_attention_bwd_slots,
          "Blocks per head for (batch, total, max_seqlen), without a table of places");
#endif
}

}  // namespace fastbert
