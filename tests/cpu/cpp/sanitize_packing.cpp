// Runs pack and unpack on heap buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined (or thread): an access past an end or a misaligned access ends it. What was
// packed must come back. Prints the number of calls.
#include "cpu/packing.h"
#include "sanitize.h"

using namespace fastbert;

namespace {

int check(std::int64_t rows, std::int64_t width, std::int64_t gap, unsigned share) {
    const std::int64_t stride = width + gap;
    const Buffer x(rows == 0 ? 0 : (rows - 1) * stride + width);
    for (std::size_t i = 0; i < x.size; ++i) x.bytes[i] = static_cast<char>(generator()());
    std::vector<std::int64_t> kept;
    for (std::int64_t row = 0; row < rows; ++row)
        if (generator()() % 100 < share) kept.push_back(row);
    const std::int64_t total = static_cast<std::int64_t>(kept.size());
    const Buffer indices(8 * total);
    if (total > 0) std::memcpy(indices.data(), kept.data(), indices.size);
    for (const int threads : {1, 3}) {
        const Buffer packed(total * width), padded(rows * width);
        const std::int64_t* const at = indices.data<std::int64_t>();
        require_none(cpu_packing_fwd({x.data(), stride, width, at, total}, packed.data(), threads));
        require_none(cpu_packing_bwd({packed.data(), width, width, at, total}, rows, padded.data(), threads));
        Buffer expected(rows * width, 0);
        for (const std::int64_t row : kept)
            std::memcpy(expected.bytes.get() + row * width, x.bytes.get() + row * stride,
                        static_cast<std::size_t>(width));
        require(padded == expected, "what was packed comes back");
    }
    return 4;
}

}  // namespace

int main() {
    use_team();
    int calls = 0;
    for (const std::int64_t width : {1, 2, 3, 4, 6, 8, 10, 64, 3072})
        for (const std::int64_t gap : {0, 5})
            for (const std::int64_t rows : {0, 1, 9, 100})
                for (const unsigned share : {0u, 40u, 100u}) calls += check(rows, width, gap, share);
    calls += check(200000, 4, 0, 70);
    calls += check(3000, 300, 0, 70);
    std::printf("%d calls\n", calls);
    return 0;
}
