// What the sanitize_<op>.cpp drivers share: threads the sanitizers know, buffers with nothing behind them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cpu/parallel.h"
#include "dtype.h"

namespace fastbert {

// GOMP_parallel with threads of our own: the sanitizers know those.
inline void team(void (*work)(void*), void* argument, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(work, argument);
    work(argument);
    for (std::thread& other : others) other.join();
}

inline void use_team() { set_team_start(reinterpret_cast<std::uintptr_t>(&team)); }

inline void require(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

inline void require_none(const char* reason) { require(reason == nullptr, reason); }

struct Release {
    std::size_t length;  // of the pages; 0: from new
    void operator()(char* bytes) const {
        if (length == 0)
            delete[] bytes;
        else  // which end with a page that may not be read
            munmap(bytes - (reinterpret_cast<std::uintptr_t>(bytes) % sysconf(_SC_PAGESIZE)), length);
    }
};

// n bytes and nothing behind them. Outputs are from new. Inputs end where a page ends that the next one may
// not be read from: the sanitizers do not see what a masked vector load reads.
struct Buffer {
    std::unique_ptr<char[], Release> bytes;
    std::size_t size;
    Buffer(char* start, std::size_t n, Release release) : bytes(start, release), size(n) {}
    explicit Buffer(std::int64_t n, int fill = 0xff)
        : Buffer(new char[static_cast<std::size_t>(n)], static_cast<std::size_t>(n), Release{0}) {
        std::memset(bytes.get(), fill, size);
    }
    static Buffer input(std::int64_t n) {
        const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t used = (static_cast<std::size_t>(n) + page - 1) / page * page, length = used + page;
        void* pages = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        require(pages != MAP_FAILED, "memory for the inputs");
        char* end = static_cast<char*>(pages) + used;
        require(mprotect(end, page, PROT_NONE) == 0, "a page that may not be read");
        return Buffer(end - n, static_cast<std::size_t>(n), Release{length});
    }
    // null where it is empty
    template <class T = void>
    T* data() const {
        return size == 0 ? nullptr : reinterpret_cast<T*>(bytes.get());
    }
    bool operator==(const Buffer& other) const {
        return size == other.size && std::memcmp(bytes.get(), other.bytes.get(), size) == 0;
    }
};

inline void require_same(const Buffer& a, const Buffer& b, const char* what) { require(a == b, what); }

// Floats: every element was written (what was not is NaN) and, with another instruction set's result, close.
inline void require_close(const Buffer& a, const Buffer& b, float relative, float scale, const char* what) {
    for (std::size_t i = 0; i < a.size / 4; ++i) {
        const float x = a.data<float>()[i], y = b.data<float>()[i];
        require(std::fabs(x - y) <= relative * (scale + std::fabs(x)), what);
    }
}

inline std::mt19937& generator() {
    static std::mt19937 instance(1);
    return instance;
}

inline std::int64_t item_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline Buffer random_buffer(std::int64_t elements, DType dtype) {
    Buffer out = Buffer::input(elements * item_size(dtype));
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < elements; ++i) {
        const float x = normal(generator());
        std::uint32_t bits;
        std::memcpy(&bits, &x, 4);
        // as fp16 the upper half of a float is some finite number below 2 in size as well, once bit 14 is off
        const std::uint16_t half =
            static_cast<std::uint16_t>(dtype == DType::kFloat16 ? (bits >> 16) & 0xbfff : bits >> 16);
        if (dtype == DType::kFloat32)
            std::memcpy(out.bytes.get() + 4 * i, &bits, 4);
        else
            std::memcpy(out.bytes.get() + 2 * i, &half, 2);
    }
    return out;
}

// Numbers below `limit`, in any order.
inline Buffer random_ids(std::int64_t count, std::int64_t limit) {
    Buffer out = Buffer::input(count * 8);
    for (std::int64_t i = 0; i < count; ++i)
        out.data<std::int64_t>()[i] = static_cast<std::int64_t>(generator()()) % limit;
    return out;
}

}  // namespace fastbert
