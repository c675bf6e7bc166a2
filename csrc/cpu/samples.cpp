#include "samples.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fastbert {

Samples::Samples(std::vector<Pieces> pieces) : pieces_(std::move(pieces)) {
    std::size_t size = 0;
    for (const Pieces& p : pieces_) size += static_cast<std::size_t>(p.count * p.bytes);
    kept_.resize(size);
    char* to = kept_.data();
    for (const Pieces& p : pieces_)
        for (std::int64_t i = 0; i < p.count; ++i, to += p.bytes)
            std::memcpy(to, p.at + i * p.stride, static_cast<std::size_t>(p.bytes));
}

bool Samples::differ() {
    const std::int64_t turn = turn_.fetch_add(1, std::memory_order_relaxed);
    const char* kept = kept_.data();
    // All pieces are compared, even after a difference: the loads of different tensors overlap.
    int differences = 0;
    for (const Pieces& p : pieces_) {
        const std::int64_t turns = (p.count + p.window - 1) / p.window;
        const std::int64_t first = turn % turns * p.window;
        const std::int64_t last = std::min(first + p.window, p.count);
        for (std::int64_t i = first; i < last; ++i)
            differences |= std::memcmp(p.at + i * p.stride, kept + i * p.bytes, p.bytes);
        kept += p.count * p.bytes;
    }
    return differences != 0;
}

}  // namespace fastbert
