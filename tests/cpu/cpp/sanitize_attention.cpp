// Runs the attention kernels on buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined (or thread): an access past an end, an overflow or a misaligned access ends
// it. The instruction sets are compared with each other, numbers of threads bit for bit. Prints the number of
// calls.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cpu/attention.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

using namespace fastbert;

namespace {

// GOMP_parallel with threads of our own: the sanitizers know those.
void team(void (*work)(void*), void* argument, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(work, argument);
    work(argument);
    for (std::thread& other : others) other.join();
}

void require(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

struct Release {
    char* pages;  // null: from new
    std::size_t length;
    void operator()(char* bytes) const {
        if (pages == nullptr)
            delete[] bytes;
        else
            munmap(pages, length);
    }
};

// n bytes and nothing behind them. Outputs are from new. Inputs end where a page ends that the next one may
// not be read from: the sanitizers do not see what a masked vector load reads.
struct Buffer {
    std::unique_ptr<char[], Release> bytes;
    std::size_t size;
    Buffer(char* start, std::size_t n, Release release) : bytes(start, release), size(n) {}
    explicit Buffer(std::size_t n, int fill = 0xff) : Buffer(new char[n], n, Release{nullptr, 0}) {
        std::memset(bytes.get(), fill, n);
    }
    static Buffer input(std::size_t n) {
        const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t used = (n + page - 1) / page * page, length = used + page;
        void* pages = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        require(pages != MAP_FAILED, "memory for the inputs");
        char* start = static_cast<char*>(pages);
        require(mprotect(start + used, page, PROT_NONE) == 0, "a page that may not be read");
        return Buffer(start + used - n, n, Release{start, length});
    }
    template <class T = void>
    T* data() const {
        return reinterpret_cast<T*>(bytes.get());
    }
};

std::mt19937 generator(1);

Buffer random_buffer(std::int64_t elements, DType dtype) {
    const bool wide = dtype == DType::kFloat32;
    Buffer out = Buffer::input(static_cast<std::size_t>(elements) * (wide ? 4 : 2));
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < elements; ++i) {
        const float x = normal(generator);
        std::uint32_t bits;
        std::memcpy(&bits, &x, 4);
        // as fp16 the upper half of a float is some finite number below 2 in size as well, once bit 14 is off
        const std::uint16_t half =
            static_cast<std::uint16_t>(dtype == DType::kFloat16 ? (bits >> 16) & 0xbfff : bits >> 16);
        if (wide)
            std::memcpy(out.bytes.get() + 4 * i, &bits, 4);
        else
            std::memcpy(out.bytes.get() + 2 * i, &half, 2);
    }
    return out;
}

void require_none(const char* reason) { require(reason == nullptr, reason); }

struct Outputs {
    Buffer out, lse, probs, dq, dk, dv, ds, dgate, bits;
    Outputs(std::int64_t elements, std::int64_t rows, std::int64_t cells, std::int64_t planes,
            std::int64_t words, std::size_t item)
        : out(elements * item),
          lse(rows * 4),
          probs(cells * item, 0),
          dq(elements * item),
          dk(elements * item),
          dv(elements * item),
          ds(cells * 4, 0),
          dgate(planes * 8),
          bits(words * 4) {}
    // all but the bits, of which some are unspecified
    std::vector<const Buffer*> all() const { return {&out, &lse, &probs, &dq, &dk, &dv, &ds, &dgate}; }
};

// Each gradient of `all` with the others not wanted: the same bits.
int check_each_alone(const AttentionBwd& all, const Outputs& expected, int threads) {
    const std::vector<const Buffer*> wanted = {&expected.dq, &expected.dk, &expected.dv};
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        const Buffer alone(wanted[i]->size);
        AttentionBwd bwd = all;
        bwd.dq = i == 0 ? alone.data() : nullptr;
        bwd.dk = i == 1 ? alone.data() : nullptr;
        bwd.dv = i == 2 ? alone.data() : nullptr;
        bwd.ds = nullptr;
        bwd.dgate = nullptr;
        require_none(cpu_attention_bwd(bwd, threads));
        require(std::memcmp(alone.bytes.get(), wanted[i]->bytes.get(), alone.size) == 0,
                "a gradient alone has the same bits");
    }
    return static_cast<int>(wanted.size());
}

int check(const std::vector<std::int32_t>& lengths, std::int64_t nheads, std::int64_t headdim, DType dtype,
          bool options) {
    const std::size_t item = dtype == DType::kFloat32 ? 4 : 2;
    const std::int64_t batch = static_cast<std::int64_t>(lengths.size());
    std::unique_ptr<std::int32_t[]> ends(new std::int32_t[lengths.size() + 1]);
    ends[0] = 0;
    std::int32_t longest = 0;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
        ends[b + 1] = ends[b] + lengths[b];
        longest = lengths[b] > longest ? lengths[b] : longest;
    }
    const std::int64_t total = ends[batch], size = longest;
    // strided: a row holds q, k and v of one token and three elements more, and the last row ends at its v
    const std::int64_t head_stride = headdim + (options ? 1 : 0);
    const std::int64_t row_stride = 3 * nheads * head_stride + (options ? 3 : 0);
    const std::int64_t span = (total - 1) * row_stride + (3 * nheads - 1) * head_stride + headdim;
    const Buffer qkv = random_buffer(total > 0 ? span : 0, dtype);
    const Buffer dout = random_buffer(total * nheads * headdim, dtype);
    const Buffer bias = random_buffer(options ? batch * nheads * size * size : 0, DType::kFloat32);
    const Buffer gate = random_buffer(nheads, DType::kFloat32);
    const std::unique_ptr<std::uint64_t> seed(new std::uint64_t(0x123456789abcdefull));
    const auto heads = [&](std::int64_t which) {
        const std::size_t first = static_cast<std::size_t>(which * nheads * head_stride) * item;
        return Heads{total > 0 ? qkv.data<char>() + first : nullptr, row_stride, head_stride};
    };
    Attention common{};
    common.dtype = dtype;
    common.batch = batch;
    common.nheads = nheads;
    common.headdim = headdim;
    common.total = total;
    common.max_seqlen = size;
    common.cu_seqlens = ends.get();
    common.q = heads(0);
    common.k = heads(1);
    common.v = heads(2);
    common.softmax_scale = 0.25f;
    common.causal = options && headdim % 2 == 1;
    if (options) {
        common.bias = {bias.data<const float>(), nheads * size * size, size * size, size};
        common.gate = gate.data<const float>();
        common.dropout = {seed.get(), 5, 1u << 30, 4.0f / 3.0f};
    }
    int calls = 0;
    std::unique_ptr<Outputs> first;
    for (const char* isa : {"avx2", "avx512", "avx512_bf16"}) {
        if (!set_isa(isa)) continue;
        std::unique_ptr<Outputs> one_thread;
        for (const int threads : {1, 3}) {
            std::unique_ptr<Outputs> now(new Outputs(total * nheads * headdim, nheads * total,
                                                     batch * nheads * size * size, batch * nheads,
                                                     nheads * total * ((size + 31) / 32), item));
            AttentionFwd fwd{};
            static_cast<Attention&>(fwd) = common;
            fwd.out = now->out.data();
            fwd.lse = now->lse.data<float>();
            fwd.probs = options ? now->probs.data() : nullptr;
            fwd.keep_bits = options ? now->bits.data<std::int32_t>() : nullptr;
            require_none(cpu_attention_fwd(fwd, threads));
            AttentionBwd bwd{};
            static_cast<Attention&>(bwd) = common;
            bwd.dout = dout.data();
            bwd.keep_bits = fwd.keep_bits;
            bwd.dq = now->dq.data();
            bwd.dk = now->dk.data();
            bwd.dv = now->dv.data();
            bwd.ds = options ? now->ds.data<float>() : nullptr;
            bwd.dgate = options ? now->dgate.data<double>() : nullptr;
            require_none(cpu_attention_bwd(bwd, threads));
            calls += 2;
            if (lengths.size() > 1) calls += check_each_alone(bwd, *now, threads);
            if (one_thread == nullptr) {
                one_thread = std::move(now);
                continue;
            }
            for (std::size_t i = 0; i < now->all().size(); ++i)
                require(std::memcmp(one_thread->all()[i]->bytes.get(), now->all()[i]->bytes.get(),
                                    now->all()[i]->size) == 0,
                        "numbers of threads give the same bits");
        }
        if (first == nullptr) {
            first = std::move(one_thread);
            continue;
        }
        const float *x = first->lse.data<float>(), *y = one_thread->lse.data<float>();
        for (std::int64_t i = 0; i < nheads * total; ++i)
            require(std::fabs(x[i] - y[i]) <= 1e-4f * (1.0f + std::fabs(x[i])), "instruction sets agree");
    }
    return calls;
}

}  // namespace

int main() {
    set_team_start(reinterpret_cast<std::uintptr_t>(&team));
    int calls = 0;
    calls += check({}, 2, 8, DType::kFloat32, true);
    calls += check({0, 0}, 2, 8, DType::kFloat32, true);
    for (const std::int64_t headdim : {1, 16, 33, 64})
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
            for (const bool options : {false, true}) {
                for (const std::int32_t n : {1, 5, 17, 31, 64, 65})
                    calls += check({n}, 1, headdim, dtype, options);
                calls += check({3, 0, 26, 1, 70}, 2, headdim, dtype, options);
            }
    // one sequence and head is cut for several threads
    for (const std::int32_t n : {119, 120, 121, 250}) calls += check({n}, 1, 20, DType::kFloat32, true);
    std::printf("%d calls\n", calls);
    return 0;
}
