// Runs the embedding kernels on heap buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined (or thread): an access past an end, an overflow or a misaligned access ends
// it. Numbers of threads are compared bit for bit. Prints the number of calls.
#include "cpu/embedding.h"
#include "cpu/isa.h"
#include "sanitize.h"

using namespace fastbert;

namespace {

struct Shape {
    std::int64_t tokens, hidden, words, types;
};

int check(const Shape& shape, DType dtype, bool options) {
    const auto [tokens, hidden, words, types] = shape;
    const std::int64_t item = item_size(dtype), stride = hidden + (options ? 3 : 0), positions = 6;
    const auto table = [&](std::int64_t rows) { return random_buffer((rows - 1) * stride + hidden, dtype); };
    const DType param_dtype = options ? DType::kFloat32 : dtype;
    const Buffer word = table(options ? tokens : words), position = table(positions), segment = table(types);
    const Buffer ids = random_ids(tokens, words), position_ids = random_ids(tokens, positions);
    const Buffer type_ids = random_ids(tokens, types), dy = random_buffer(tokens * hidden, dtype);
    const Buffer weight = random_buffer(hidden, param_dtype), bias = random_buffer(hidden, param_dtype);
    const Buffer seed(8, 0x35);
    int calls = 0;
    for (const char* isa : {"avx2", "avx512"}) {
        if (!set_isa(isa)) continue;
        std::vector<Buffer> first;
        for (const int threads : {1, 3}) {
            const std::int64_t all = tokens * hidden * item;
            std::vector<Buffer> out;
            for (const std::int64_t size :
                 {all, all, tokens * 4, tokens * 4, words * hidden * item, positions * hidden * item,
                  types * hidden * item, all, hidden * 4, hidden * 4})
                out.emplace_back(size);
            const Param norm_weight{weight.data(), param_dtype};
            const DropoutArgs dropout{options ? seed.data<std::uint64_t>() : nullptr, 5, 1u << 30,
                                      4.0f / 3.0f};
            const std::int64_t* word_ids = ids.data<std::int64_t>();
            const EmbeddingFwd fwd{
                dtype,
                tokens,
                hidden,
                {word.data(), stride, options ? tokens : words, options ? nullptr : word_ids},
                {position.data(), stride, positions, position_ids.data<std::int64_t>()},
                {options ? nullptr : segment.data(), stride, types, type_ids.data<std::int64_t>()},
                norm_weight,
                {bias.data(), param_dtype},
                1e-5,
                dropout,
                out[0].data(),
                out[1].data(),
                out[2].data<float>(),
                out[3].data<float>()};
            require_none(cpu_embedding_fwd(fwd, threads));
            const EmbeddingBwd bwd{dtype,
                                   tokens,
                                   hidden,
                                   dy.data(),
                                   out[1].data(),
                                   norm_weight,
                                   out[2].data<float>(),
                                   out[3].data<float>(),
                                   dropout,
                                   {out[4].data(), words, options ? 1 : -1, word_ids},
                                   {out[5].data(), positions, -1, position_ids.data<std::int64_t>()},
                                   {out[6].data(), types, -1, type_ids.data<std::int64_t>()},
                                   out[7].data(),
                                   out[8].data<float>(),
                                   out[9].data<float>()};
            require_none(cpu_embedding_bwd(bwd, threads));
            calls += 2;
            if (first.empty())
                first = std::move(out);
            else
                require(first == out, "1 and 3 threads agree");
        }
    }
    return calls;
}

}  // namespace

int main() {
    use_team();
    int calls = 0;
    for (const std::int64_t hidden : {1, 7, 8, 17, 31, 64, 100, 768})
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
            for (const std::int64_t tokens : {0, 1, 5, 40})
                for (const bool options : {false, true}) {
                    if (tokens == 0 && options) continue;  // no table to take rows from
                    calls += check({tokens, hidden, 11, 2}, dtype, options);
                }
    for (const bool options : {false, true}) calls += check({2000, 40, 3000, 1}, DType::kFloat32, options);
    calls += check({3, 1024, 20000, 2}, DType::kBFloat16, false);  // a table asked for in batches
    std::printf("%d calls\n", calls);
    return 0;
}
