// Rows of a batch are copied in runs: the kept tokens of a sequence are mostly neighbours, and one memcpy
// moves them all. Rows of one element (ids, labels) are moved element by element, because a call per run
// would cost more.
#include "packing.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace fastbert {
namespace {

constexpr std::int64_t kGrain = 1 << 17;  // bytes of a task

std::int64_t rows_per_task(std::int64_t width) { return std::max<std::int64_t>(1, kGrain / width); }

// The number of elements of indices[t … end), from t on, that follow each other without a gap.
std::int64_t run_of(const std::int64_t* indices, std::int64_t t, std::int64_t end) {
    std::int64_t run = 1;
    while (t + run < end && indices[t + run] == indices[t] + run) ++run;
    return run;
}

void copy_rows(const char* from, std::int64_t stride, std::int64_t width, std::int64_t count, char* to) {
    if (stride == width) {
        std::memcpy(to, from, static_cast<std::size_t>(count * width));
        return;
    }
    for (std::int64_t i = 0; i < count; ++i)
        std::memcpy(to + i * width, from + i * stride, static_cast<std::size_t>(width));
}

template <class T>
void gather_elements(const Gather& args, const char* x, char* y, std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
        std::memcpy(y + t * sizeof(T), x + args.indices[t] * args.stride, sizeof(T));
}

template <class T>
void scatter_elements(const Gather& args, const char* x, char* y, std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
        std::memcpy(y + args.indices[t] * sizeof(T), x + t * args.stride, sizeof(T));
}

// Whether the rows are single elements, and so f(T()) was called for their type.
template <class F>
bool one_element(const Gather& args, const F& f) {
    const auto of = [&](auto element) {
        if (args.width != sizeof(element)) return false;
        f(element);
        return true;
    };
    return of(std::uint8_t()) || of(std::uint16_t()) || of(std::uint32_t()) || of(std::uint64_t());
}

}  // namespace

const char* cpu_packing_fwd(const Gather& args, void* out, int threads) {
    if (args.total == 0 || args.width == 0) return nullptr;
    const char* const x = static_cast<const char*>(args.x);
    char* const y = static_cast<char*>(out);
    const std::int64_t step = rows_per_task(args.width);
    parallel_for((args.total + step - 1) / step, threads, [&](std::int64_t task, int) {
        const std::int64_t end = std::min(args.total, (task + 1) * step);
        const auto elements = [&](auto element) {
            gather_elements<decltype(element)>(args, x, y, task * step, end);
        };
        if (one_element(args, elements)) return;
        for (std::int64_t t = task * step; t < end;) {
            const std::int64_t run = run_of(args.indices, t, end);
            copy_rows(x + args.indices[t] * args.stride, args.stride, args.width, run, y + t * args.width);
            t += run;
        }
    });
    return nullptr;
}

const char* cpu_packing_bwd(const Gather& args, std::int64_t rows, void* out, int threads) {
    if (rows == 0 || args.width == 0) return nullptr;
    const char* const x = static_cast<const char*>(args.x);
    char* const y = static_cast<char*>(out);
    const std::int64_t *const first = args.indices, *const last = args.indices + args.total;
    const std::int64_t step = rows_per_task(args.width);
    parallel_for((rows + step - 1) / step, threads, [&](std::int64_t task, int) {
        std::int64_t row = task * step;  // the next one to write
        const std::int64_t end_row = std::min(rows, row + step);
        std::int64_t t = std::lower_bound(first, last, row) - first;
        const std::int64_t end = std::lower_bound(first + t, last, end_row) - first;
        const auto elements = [&](auto element) {
            std::memset(y + row * args.width, 0, static_cast<std::size_t>((end_row - row) * args.width));
            scatter_elements<decltype(element)>(args, x, y, t, end);
        };
        if (one_element(args, elements)) return;
        while (row < end_row) {
            const std::int64_t next = t < end ? first[t] : end_row;
            std::memset(y + row * args.width, 0, static_cast<std::size_t>((next - row) * args.width));
            row = next;
            if (t == end) continue;
            const std::int64_t run = run_of(first, t, end);
            copy_rows(x + t * args.stride, args.stride, args.width, run, y + row * args.width);
            t += run;
            row += run;
        }
    });
    return nullptr;
}

}  // namespace fastbert
