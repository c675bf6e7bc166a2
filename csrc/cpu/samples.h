// Elements of tensors, compared with what they were: whether memory was written that nobody watches.
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
    // Copies the pieces, whose memory must be there at every call of differ().
    explicit Samples(std::vector<Pieces> pieces);

    // Whether a piece that this call looks at is another one than it was.
    bool differ();

  private:
    std::vector<Pieces> pieces_;
    std::vector<char> kept_;
    std::atomic<std::int64_t> turn_{0};
};

}  // namespace fastbert
