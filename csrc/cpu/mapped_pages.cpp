#include "mapped_pages.h"

#include <algorithm>

#ifdef __linux__
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <memory>
#endif

namespace fastbert {

#ifdef __linux__
namespace {

// From Linux' include/uapi/linux/fs.h, which older systems lack.
struct PageRegion {
    std::uint64_t start, end, categories;
};
struct PageScan {
    std::uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    std::uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr std::uint64_t kFile = 1 << 2, kPresent = 1 << 3, kSwapped = 1 << 4;

std::uintptr_t page_size() {
    static const auto size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    return size;
}

// Page faults of all threads so far, and the process's number: a forked process has counts of its own.
std::uint64_t faults() {
    rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
    const auto count =
        static_cast<std::uint64_t>(usage.ru_minflt) + static_cast<std::uint64_t>(usage.ru_majflt);
    return (count << 22) + static_cast<std::uint64_t>(getpid());  // a process has a number below 2^22
}

void append(std::vector<Range>& ranges, std::uintptr_t begin, std::uintptr_t end) {
    if (!ranges.empty() && ranges.back().second == begin)
        ranges.back().second = end;
    else
        ranges.emplace_back(begin, end);
}

// /proc/self/pagemap, opened for one scan: a file opened before a fork would show the parent's memory.
class Pagemap {
  public:
    Pagemap() : file_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}
    ~Pagemap() {
        if (file_ >= 0) close(file_);
    }
    Pagemap(const Pagemap&) = delete;
    Pagemap& operator=(const Pagemap&) = delete;

    // Appends to `copies` the pages of `pages` that are no longer the file's. False if Linux does not report
    // them.
    bool scan(const Range& pages, bool ask, std::vector<Range>& copies) const {
        return file_ >= 0 && ((ask && by_ioctl(pages, copies)) || by_read(pages, copies));
    }

  private:
    bool by_ioctl(const Range& pages, std::vector<Range>& copies) const {
        const std::size_t before = copies.size();
        PageRegion found[64];
        PageScan scan{};
        scan.size = sizeof scan;
        scan.end = pages.second;
        scan.vec = reinterpret_cast<std::uintptr_t>(found);
        scan.vec_len = std::size(found);
        scan.category_inverted = scan.category_mask = kFile;
        scan.category_anyof_mask = kPresent | kSwapped;
        scan.return_mask = kPresent;
        for (scan.start = pages.first; scan.start < pages.second; scan.start = scan.walk_end) {
            const int count = ioctl(file_, _IOWR('f', 16, PageScan), &scan);
            if (count < 0 || scan.walk_end <= scan.start) {
                copies.resize(before);
                return false;
            }
            for (int i = 0; i < count; ++i) append(copies, found[i].start, found[i].end);
        }
        return true;
    }

    bool by_read(const Range& pages, std::vector<Range>& copies) const {
        constexpr std::uint64_t present = std::uint64_t{1} << 63, swapped = std::uint64_t{1} << 62;
        constexpr std::uint64_t file = std::uint64_t{1} << 61;
        std::uint64_t entries[512];
        const std::uintptr_t size = page_size();
        for (std::uintptr_t at = pages.first; at < pages.second;) {
            const std::size_t wanted = std::min((pages.second - at) / size, std::size(entries));
            const auto bytes = static_cast<ssize_t>(wanted * sizeof *entries);
            if (pread(file_, entries, static_cast<std::size_t>(bytes),
                      static_cast<off_t>(at / size * sizeof *entries)) != bytes)
                return false;
            for (std::size_t i = 0; i < wanted; ++i, at += size)
                if ((entries[i] & (present | swapped)) != 0 && (entries[i] & file) == 0)
                    append(copies, at, at + size);
        }
        return true;
    }

    int file_;
};

bool scan(const std::vector<Range>& pages, bool ask, std::vector<Range>& copies) {
    const Pagemap map;
    return std::all_of(pages.begin(), pages.end(),
                       [&](const Range& each) { return map.scan(each, ask, copies); });
}

// The privately mapped files of this process, joined where they touch.
std::vector<Range> private_files() {
    std::vector<Range> found;
    const std::unique_ptr<FILE, int (*)(FILE*)> maps(std::fopen("/proc/self/maps", "re"), &std::fclose);
    if (maps == nullptr) return found;
    char line[8192];  // longer than the longest path
    while (std::fgets(line, sizeof line, maps.get()) != nullptr) {
        std::uintptr_t begin, end;
        std::uint64_t inode;
        char access[5];
        if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %" SCNu64, &begin, &end, access,
                        &inode) == 4 &&
            access[3] == 'p' && inode != 0)
            append(found, begin, end);
    }
    return found;
}

// Whether this system counts the fault of a first write, and shows the page: some sandboxes do not.
bool system_tells() {
    const std::uintptr_t size = page_size();
    const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    close(file);
    if (memory == MAP_FAILED) return false;
    auto* const byte = static_cast<volatile char*>(memory);
    const auto at = reinterpret_cast<std::uintptr_t>(memory);
    const std::vector<Range> page{{at, at + size}};
    std::vector<Range> before, after;
    const char value = *byte;
    bool tells = scan(page, true, before) && before.empty();
    const std::uint64_t count = faults();
    *byte = value;
    tells = tells && faults() != count && scan(page, true, after) && after == page;
    munmap(memory, size);
    return tells;
}

}  // namespace

MappedPages::MappedPages(const std::vector<Range>& ranges, bool ask, const MappedPages* within)
    : ranges_(ranges), ask_(ask), watched_(ranges.size(), false) {
    static const bool tells = system_tells();
    if (!tells) return;
    std::vector<Range> files;
    const auto inside = [&files](const Range& range) {
        return std::any_of(files.begin(), files.end(), [&range](const Range& file) {
            return file.first <= range.first && range.second <= file.second;
        });
    };
    if (within != nullptr)
        for (std::size_t i = 0; i < within->size(); ++i)
            if (within->watched(i)) files.push_back(within->ranges_[i]);
    if (!std::all_of(ranges.begin(), ranges.end(), inside)) files = private_files();
    const std::uintptr_t size = page_size();
    for (std::size_t i = 0; i < ranges.size(); ++i) {
        const auto [begin, end] = ranges[i];
        watched_[i] = begin < end && inside(ranges[i]);
        if (watched_[i]) pages_.emplace_back(begin / size * size, (end + size - 1) / size * size);
    }
    std::sort(pages_.begin(), pages_.end());
    std::vector<Range> merged;
    for (const auto& [begin, end] : pages_) {
        if (!merged.empty() && begin <= merged.back().second)
            merged.back().second = std::max(end, merged.back().second);
        else
            merged.emplace_back(begin, end);
    }
    pages_ = std::move(merged);
    faults_ = faults();  // before the scan: a write after it counts as a new one
    if (!scan(pages_, ask_, written_)) {
        watched_.assign(ranges.size(), false);
        pages_.clear();
    }
}

bool MappedPages::changed() {
    if (pages_.empty()) return false;
    const std::uint64_t count = faults();
    if (count == faults_.load(std::memory_order_relaxed)) return false;
    std::vector<Range> copies;
    if (!scan(pages_, ask_, copies) || copies != written_) return true;
    faults_.store(count, std::memory_order_relaxed);
    return false;
}

#else

MappedPages::MappedPages(const std::vector<Range>& ranges, bool ask, const MappedPages*)
    : ranges_(ranges), ask_(ask), watched_(ranges.size(), false) {}

bool MappedPages::changed() { return false; }

#endif

std::vector<Range> MappedPages::written(std::size_t i) const {
    std::vector<Range> found;
    const auto [begin, end] = ranges_[i];
    if (watched_[i])
        for (const auto& [from, to] : written_)
            if (from < end && begin < to) found.emplace_back(std::max(from, begin), std::min(to, end));
    return found;
}

}  // namespace fastbert
