// Fresh memory in large pieces: the pages of an output are requested in batches.
//
// At every call malloc takes a large output from the system again, and the first write to each of its pages
// is a fault that costs several times the write. Requested in batches they cost about half of that
// (Linux 5.14 and later; elsewhere nothing happens).
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace fastbert {

// From this size on glibc never keeps a freed piece.
inline constexpr std::int64_t kFreshBytes = 32 << 20;

// glibc keeps smaller pieces up to the size of the largest one ever freed, and twice that at the top of its
// heap. Freeing one unused piece of nearly kFreshBytes reaches that state at once. Training wants it: every
// step takes and frees the same pieces.
inline void keep_freed_pieces() {
    static const bool once = [] {
        void* volatile piece = std::malloc(kFreshBytes - (1 << 14));
        std::free(piece);
        return true;
    }();
    (void)once;
}

// Call this before writing an output of `total` bytes: it may then be in huge pages. The fault of a huge page
// costs a fifth of the faults of its small pages.
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

// Call this right before writing all of [begin, begin + bytes), a part of an output of `total` bytes.
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
