// Samples of tensors' elements, compared with earlier ones: whether memory was written unnoticed.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace fastbert {

// `count` pieces of `bytes` each, `stride` bytes apart; `window` of them are compared per call, in turn.
struct Pieces {
    const char* at;
    std::int64_t stride, count, bytes, window;
};

class Samples {
  public:
    // Copies the pieces. Their memory must exist at every call of differ().
    explicit Samples(std::vector<Pieces> pieces);

    // Whether one of the pieces that this call compares has changed.
    bool differ();

  private:
    std::vector<Pieces> pieces_;
    std::vector<char> kept_;
    std::atomic<std::int64_t> turn_{0};
};

}  // namespace fastbert
