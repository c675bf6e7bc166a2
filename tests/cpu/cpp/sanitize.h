// What the sanitize_<op>.cpp drivers share: threads the sanitizers know, buffers with nothing behind them.
#pragma once

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

// n bytes from malloc, and nothing behind them.
struct Buffer {
    std::unique_ptr<char[]> bytes;
    std::size_t size;
    explicit Buffer(std::int64_t n, int fill = 0xff)
        : bytes(new char[static_cast<std::size_t>(n)]), size(static_cast<std::size_t>(n)) {
        std::memset(bytes.get(), fill, size);
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

inline std::mt19937& generator() {
    static std::mt19937 instance(1);
    return instance;
}

inline std::int64_t item_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline Buffer random_buffer(std::int64_t elements, DType dtype) {
    Buffer out(elements * item_size(dtype));
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
    Buffer out(count * 8);
    for (std::int64_t i = 0; i < count; ++i)
        out.data<std::int64_t>()[i] = static_cast<std::int64_t>(generator()()) % limit;
    return out;
}

}  // namespace fastbert
