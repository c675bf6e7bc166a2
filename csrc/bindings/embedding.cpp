// embedding on the CPU.
#include "../cpu/embedding.h"

#include "bindings.h"

namespace fastbert {
namespace {

// Under torch.compile the op cannot read the ids, so they are checked here, before anything is written.
void check_ids(const char* name, const std::int64_t* ids, std::int64_t tokens, std::int64_t rows) {
    for (std::int64_t t = 0; t < tokens; ++t)
        if (ids[t] < 0 || ids[t] >= rows)
            throw py::value_error(std::string(name) + ": id " + std::to_string(ids[t]) +
                                  " is out of range for a table of " + std::to_string(rows));
}

void check_four(const char* name, const py::tuple& from) {
    if (from.size() != 4) refuse(name, "a tuple of 4 numbers", static_cast<std::int64_t>(from.size()));
}

// (address, stride, rows, address of the ids), as in fastbert/backends/cpu/embedding.py.
Lookup lookup(const char* name, const py::tuple& from, std::int64_t tokens, std::int64_t hidden) {
    check_four(name, from);
    const Lookup out{pointer(number<Address>(from[0])), number<std::int64_t>(from[1]),
                     number<std::int64_t>(from[2]), pointer<const std::int64_t>(number<Address>(from[3]))};
    if (out.table == nullptr) return out;
    elements_of(name, {out.rows, hidden});
    check_strides(name, {{out.rows, out.stride}, {hidden, 1}});
    if (out.ids != nullptr)
        check_ids(name, out.ids, tokens, out.rows);
    else if (out.rows < tokens)  // token t takes row t
        refuse(name, "a row for each of " + std::to_string(tokens) + " tokens", out.rows);
    return out;
}

// (address, rows, row to skip, address of the ids)
TableGrad table_grad(const char* name, const py::tuple& from, std::int64_t tokens, std::int64_t hidden) {
    check_four(name, from);
    const TableGrad out{pointer(number<Address>(from[0])), number<std::int64_t>(from[1]),
                        number<std::int64_t>(from[2]), pointer<const std::int64_t>(number<Address>(from[3]))};
    if (out.out == nullptr) return out;
    elements_of(name, {out.rows, hidden});
    check_given(name, out.ids, tokens);
    check_ids(name, out.ids, tokens, out.rows);
    return out;
}

void embedding_fwd(int dtype, std::int64_t tokens, std::int64_t hidden, const py::tuple& word,
                   const py::tuple& position, const py::tuple& segment, Address weight, int weight_dtype,
                   Address bias, int bias_dtype, double eps, Address seed, std::uint32_t offset,
                   std::uint32_t threshold, float scale, Address y, Address z, Address mean, Address rstd,
                   int word_bits, Address word_scale, int threads) {
    check_shape(tokens, hidden);
    if (word_bits != 0 && word_bits != 4 && word_bits != 8) refuse("word_bits", "0, 4 or 8", word_bits);
    const std::int64_t columns = word_bits == 4 ? (hidden + 1) / 2 : hidden;
    const EmbeddingFwd args{dtype_of(dtype),
                            tokens,
                            hidden,
                            lookup("input_ids", word, tokens, columns),
                            lookup("position_ids", position, tokens, hidden),
                            lookup("token_type_ids", segment, tokens, hidden),
                            word_bits,
                            pointer<const float>(word_scale),
                            param(weight, weight_dtype),
                            param(bias, bias_dtype),
                            eps,
                            {pointer<const std::uint64_t>(seed), offset, threshold, scale},
                            pointer(y),
                            pointer(z),
                            pointer<float>(mean),
                            pointer<float>(rstd)};
    check_threads(threads);
    check_given("word", args.word.table, tokens);
    if (word_bits != 0) check_given("word_scale", args.word_scale, tokens);
    check_given("y", args.y, tokens);
    run([&] { return cpu_embedding_fwd(args, threads); });
}

void embedding_bwd(int dtype, std::int64_t tokens, std::int64_t hidden, Address dy, Address z, Address weight,
                   int weight_dtype, Address mean, Address rstd, Address seed, std::uint32_t offset,
                   std::uint32_t threshold, float scale, const py::tuple& word, const py::tuple& position,
                   const py::tuple& segment, Address dinputs_embeds, Address dweight, Address dbias,
                   int threads) {
    check_shape(tokens, hidden);
    const EmbeddingBwd args{dtype_of(dtype),
                            tokens,
                            hidden,
                            pointer(dy),
                            pointer(z),
                            param(weight, weight_dtype),
                            pointer<const float>(mean),
                            pointer<const float>(rstd),
                            {pointer<const std::uint64_t>(seed), offset, threshold, scale},
                            table_grad("input_ids", word, tokens, hidden),
                            table_grad("position_ids", position, tokens, hidden),
                            table_grad("token_type_ids", segment, tokens, hidden),
                            pointer(dinputs_embeds),
                            pointer<float>(dweight),
                            pointer<float>(dbias)};
    check_threads(threads);
    check_given("dy", args.dy, tokens);
    check_given("z", args.z, tokens);
    check_given("mean", args.mean, tokens);
    check_given("rstd", args.rstd, tokens);
    run([&] { return cpu_embedding_bwd(args, threads); });
}

}  // namespace

void bind_embedding(py::module_& m) {
    m.def("cpu_embedding_fwd", &embedding_fwd);
    m.def("cpu_embedding_bwd", &embedding_bwd);
}

}  // namespace fastbert
