// Fresh memory in large pieces: the pages of an output are asked for in batches.
//
// malloc takes a large output from the system anew at every call, and the first write to each of its pages is
// a fault that costs several times the write. Asked for in batches they cost about half of that (Linux 5.14
// and up; elsewhere nothing happens).
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace fastbert {

// From this size on glibc never keeps a freed piece.
inline constexpr std::int64_t kFreshBytes = 32 << 20;

// To be called right before all of [begin, begin + bytes), a part of an output of `total` bytes, is written.
inline void populate(void* begin, std::int64_t bytes, std::int64_t total) {
#ifdef MADV_POPULATE_WRITE
    if (total < kFreshBytes || bytes == 0) return;
    static const std::uintptr_t page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(begin) / page * page;
    const std::uintptr_t to = (reinterpret_cast<std::uintptr_t>(begin) + bytes + page - 1) / page * page;
    madvise(reinterpret_cast<void*>(from), to - from, MADV_POPULATE_WRITE);  // advice: a refusal is no error
#else
    (void)begin, (void)bytes, (void)total;
#endif
}

}  // namespace fastbert
