// Pages of privately mapped files: which of them this process has written. Only Linux can watch them.
//
// Math      The first write to such a page makes the kernel copy it: a page fault of this process. While the
//           count of faults does not change, no page has been written for the first time. After a fault the
//           kernel reports which pages are copies (ioctl PAGEMAP_SCAN, else /proc/self/pagemap).
// Limits    A page that is a copy already is written without a fault. `written` lists these, for the caller
//           to compare in another way. A page that another process changes in the file is not seen.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fastbert {

// Begin and end of memory, as addresses.
using Range = std::pair<std::uintptr_t, std::uintptr_t>;

class MappedPages {
  public:
    // Watches those ranges that lie wholly in privately mapped files; the ranges must stay mapped.
    // With `ask` PAGEMAP_SCAN is used where Linux has it. What `within` watches is known to be mapped, which
    // saves reading the list of all mappings: a millisecond.
    MappedPages(const std::vector<Range>& ranges, bool ask, const MappedPages* within);

    std::size_t size() const { return ranges_.size(); }
    std::uintptr_t begin(std::size_t i) const { return ranges_[i].first; }

    // Whether ranges[i] is watched.
    bool watched(std::size_t i) const { return watched_[i]; }

    // The parts of ranges[i] that lie on pages written before it was watched, from low to high.
    std::vector<Range> written(std::size_t i) const;

    // Whether a page was written for the first time since the ranges are watched.
    bool changed();

  private:
    std::vector<Range> ranges_;
    bool ask_;
    std::vector<bool> watched_;
    std::vector<Range> pages_;    // what is watched, in whole pages
    std::vector<Range> written_;  // pages in it that were copies at the start
    std::atomic<std::uint64_t> faults_{0};
};

}  // namespace fastbert
