// attention on the CPU.
#include "../cpu/attention.h"

#include "bindings.h"

namespace fastbert {
namespace {

// What forward and backward share, in the order in which fastbert/backends/cpu/attention.py hands it over.
void fill(Attention& out, const py::tuple& common) {
    if (common.size() != 27) throw py::value_error("attention: expected 27 common arguments");
    std::size_t next = 0;
    const auto address = [&] { return common[next++].cast<Address>(); };
    const auto size = [&] { return common[next++].cast<std::int64_t>(); };
    const auto heads = [&] {
        const Address data = address();
        const std::int64_t row = size();
        return Heads{pointer(data), row, size()};
    };
    out.dtype = dtype_of(common[next++].cast<int>());
    out.batch = size();
    out.nheads = size();
    out.headdim = size();
    out.total = size();
    out.max_seqlen = size();
    out.cu_seqlens = pointer<const std::int32_t>(address());
    out.q = heads();
    out.k = heads();
    out.v = heads();
    out.softmax_scale = common[next++].cast<float>();
    out.causal = common[next++].cast<bool>();
    out.bias.data = pointer<const float>(address());
    out.bias.batch_stride = size();
    out.bias.head_stride = size();
    out.bias.row_stride = size();
    out.gate = pointer<const float>(address());
    out.dropout.seed = pointer<const std::uint64_t>(address());
    out.dropout.offset = common[next++].cast<std::uint32_t>();
    out.dropout.threshold = common[next++].cast<std::uint32_t>();
    out.dropout.scale = common[next++].cast<float>();
    check_shape(out.batch, out.headdim);
}

void attention_fwd(const py::tuple& common, Address out, Address lse, Address probs, Address keep_bits,
                   int threads) {
    AttentionFwd args{};
    fill(args, common);
    args.out = pointer(out);
    args.lse = pointer<float>(lse);
    args.probs = pointer(probs);
    args.keep_bits = pointer<std::int32_t>(keep_bits);
    run([&] { return cpu_attention_fwd(args, threads); });
}

void attention_bwd(const py::tuple& common, Address keep_bits, Address dout, Address dq, Address dk,
                   Address dv, Address ds, Address dgate, int threads) {
    AttentionBwd args{};
    fill(args, common);
    args.keep_bits = pointer<const std::int32_t>(keep_bits);
    args.dout = pointer(dout);
    args.dq = pointer(dq);
    args.dk = pointer(dk);
    args.dv = pointer(dv);
    args.ds = pointer<float>(ds);
    args.dgate = pointer<double>(dgate);
    run([&] { return cpu_attention_bwd(args, threads); });
}

}  // namespace

void bind_attention(py::module_& m) {
    m.def("cpu_attention_fwd", &attention_fwd);
    m.def("cpu_attention_bwd", &attention_bwd);
}

}  // namespace fastbert
