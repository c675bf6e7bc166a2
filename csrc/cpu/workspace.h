// Scratch memory of one call: 64-byte aligned floats, freed on return. data() is null if memory is short.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace fastbert {

class Workspace {
  public:
    explicit Workspace(std::int64_t floats)
        : data_(static_cast<float*>(
              std::aligned_alloc(64, (static_cast<std::size_t>(floats) * 4 + 63) / 64 * 64))) {}
    ~Workspace() { std::free(data_); }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    float* data() const { return data_; }

  private:
    float* data_;
};

inline constexpr const char* kOutOfMemory = "out of memory: no scratch space for the kernel";

}  // namespace fastbert
