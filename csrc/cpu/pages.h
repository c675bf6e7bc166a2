// Fresh memory in large pieces: the pages of an output are asked for in batches.
//
// malloc takes a large output from the system anew at every call, and the first write to each of its pages is
// a fault that costs several times the write. Asked for in batches they cost about half of that (Linux 5.14
// and up; elsewhere nothing happens).
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace fastbert {

// From this size on glibc never keeps a freed piece.
inline constexpr std::int64_t kFreshBytes = 32 << 20;

// Smaller ones it keeps up to the size of the largest that was ever freed, and twice that at the top of its
// heap. A piece of nearly kFreshBytes, freed unused, takes a process there at once: for training, where every
// step takes and frees the same pieces.
inline void keep_freed_pieces() {
    static const bool once = [] {
        void* volatile piece = std::malloc(kFreshBytes - (1 << 14));
        std::free(piece);
        return true;
    }();
    (void)once;
}

// To be called before an output of `total` bytes is written: it may lie in huge pages. One such fault costs
// a fifth of what those of its small pages do.
inline void expect_writes(void* begin, std::int64_t total) {
#ifdef MADV_HUGEPAGE
    if (total < kFreshBytes) return;
    const std::uintptr_t page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t from = (reinterpret_cast<std::uintptr_t>(begin) + page - 1) / page * page;
    const std::uintptr_t to = (reinterpret_cast<std::uintptr_t>(begin) + total) / page * page;
    madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);  // advice: a refusal is no error
#else
    (void)begin, (void)total;
#endif
}

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
