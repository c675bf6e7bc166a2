#include "samples.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "parallel.h"

namespace fastbert {
namespace {

constexpr std::int64_t kPart = 512;           // pieces of a part
constexpr std::int64_t kWorthThreads = 1024;  // pieces; each of another page takes about 20 ns

}  // namespace

Samples::Samples(const std::vector<Pieces>& pieces) {
    for (const Pieces& p : pieces) {
        for (std::int64_t i = 0; i < p.count; i += kPart) {
            const Pieces some{p.at + i * p.stride, p.stride, std::min(kPart, p.count - i), p.bytes};
            parts_.push_back({some, kept_.size()});
            for (std::int64_t j = 0; j < some.count; ++j) {
                const char* const from = some.at + j * some.stride;
                kept_.insert(kept_.end(), from, from + some.bytes);
            }
        }
        count_ += p.count;
    }
}

bool Samples::differs(const Part& part, const char* kept) {
    const Pieces& p = part.pieces;
    kept += part.kept;
    // All pieces are compared, even after a difference: their loads overlap.
    int differences = 0;
    for (std::int64_t i = 0; i < p.count; ++i)
        differences |=
            std::memcmp(p.at + i * p.stride, kept + i * p.bytes, static_cast<std::size_t>(p.bytes));
    return differences != 0;
}

void Samples::fetch() const {
    for (const Part& part : parts_)
        if (part.pieces.count == 1) __builtin_prefetch(part.pieces.at);
}

bool Samples::differ(int threads) const {
    std::atomic<bool> found{false};
    parallel_for(static_cast<std::int64_t>(parts_.size()), count_ < kWorthThreads ? 1 : threads,
                 [&](std::int64_t i, int) {
                     if (differs(parts_[static_cast<std::size_t>(i)], kept_.data()))
                         found.store(true, std::memory_order_relaxed);
                 });
    return found.load(std::memory_order_relaxed);
}

}  // namespace fastbert
