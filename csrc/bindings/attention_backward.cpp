// attention's backward on a GPU. None of the addresses is read here.
#include "bindings.h"
#if FASTBERT_CUDA
#include "../cuda/attention_backward.h"
#endif

namespace fastbert {

#if FASTBERT_CUDA
namespace {

// Takes the arguments one after another, in the order of fastbert/backends/cuda/attention.py.
struct Numbers {
    const py::tuple& from;
    std::size_t next = 0;
    template <class T>
    T take() {
        return number<T>(from[next++]);
    }
    std::int64_t size() { return take<std::int64_t>(); }
    template <class T = void>
    T* address() {
        return pointer<T>(take<Address>());
    }
    Heads heads() {
        const void* const data = address();
        const std::int64_t row = size();
        return {data, row, size()};
    }
};

void attention_bwd(const py::tuple& common, const py::tuple& own, int device, std::uintptr_t stream) {
    if (common.size() != 27 || own.size() != 16)
        throw py::value_error("attention_bwd: expected 27 common and 16 own arguments");
    CudaAttentionBwd args{};
    Numbers from{common};
    args.dtype = dtype_of(from.take<int>());
    args.batch = from.size();
    args.nheads = from.size();
    args.headdim = from.size();
    args.total = from.size();
    args.max_seqlen = from.size();
    args.cu_seqlens = from.address<const std::int32_t>();
    args.q = from.heads();
    args.k = from.heads();
    args.v = from.heads();
    args.softmax_scale = from.take<float>();
    args.causal = from.take<bool>();
    args.bias.data = from.address<const float>();
    args.bias.batch_stride = from.size();
    args.bias.head_stride = from.size();
    args.bias.row_stride = from.size();
    args.gate = from.address<const float>();
    args.dropout.seed = from.address<const std::uint64_t>();
    args.dropout.offset = from.take<std::uint32_t>();
    args.dropout.threshold = from.take<std::uint32_t>();
    args.dropout.scale = from.take<float>();

    Numbers mine{own};
    args.keep_bits = mine.address<const std::int32_t>();
    args.dout = mine.address();
    args.out = mine.address();
    args.lse = mine.address<const float>();
    args.places = mine.address<const std::int32_t>();
    args.slots = mine.size();
    args.dq = mine.address();
    args.dk = mine.address();
    args.dv = mine.address();
    float* const rows = mine.address<float>();
    const bool need_dgate = mine.take<bool>();
    args.dbias = mine.address<float>();
    args.parts = mine.size();
    args.bias_batch = mine.size();
    args.bias_heads = mine.size();
    const int has = mine.take<int>();
    args.bias_has_rows = (has & 1) != 0;
    args.bias_has_keys = (has & 2) != 0;

    check_size("batch", args.batch);
    check_size("max_seqlen", args.max_seqlen);
    check_size("slots", args.slots);
    check_size("nheads", args.nheads, 1);
    check_size("parts", args.parts, 1);
    const std::int64_t elements = elements_of("q", {args.total, args.nheads, args.headdim});
    const Heads* const tensors[] = {&args.q, &args.k, &args.v};
    const char* const names[] = {"q", "k", "v"};
    for (int i = 0; i < 3; ++i) {
        check_given(names[i], tensors[i]->data, elements);
        check_strides(
            names[i],
            {{args.total, tensors[i]->row_stride}, {args.nheads, tensors[i]->head_stride}, {args.headdim, 1}});
    }
    check_bias(args.bias, args.batch, args.nheads, args.max_seqlen);
    check_given("cu_seqlens", args.cu_seqlens, 1);
    check_given("dout", args.dout, elements);
    check_given("out", args.out, elements);
    check_given("lse", args.lse, elements);
    check_given("rows", rows, elements);
    if (args.dbias != nullptr) {
        check_size("bias_batch", args.bias_batch, 1);
        check_size("bias_heads", args.bias_heads, 1);
        check_given("bias", args.bias.data, 1);
    }
    const std::int64_t plane = args.nheads * args.total;
    args.delta = rows;
    args.norm = rows + plane;
    args.dgate = need_dgate ? rows + 2 * plane : nullptr;
    run([&] { return cuda_attention_bwd(args, device, stream); });
}

}  // namespace
#endif

void bind_attention_backward([[maybe_unused]] py::module_& m) {
#if FASTBERT_CUDA
    m.def("cuda_attention_bwd", &attention_bwd);
    m.def("cuda_attention_bwd_slots", &cuda_attention_bwd_slots,
          "Blocks per head for (batch, total, max_seqlen), without a table of places");
#endif
}

}  // namespace fastbert
