// Samples of tensors' elements, compared with earlier ones: whether memory was written unnoticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastbert {

// `count` pieces of `bytes` each, `stride` bytes apart.
struct Pieces {
    const char* at;
    std::int64_t stride, count, bytes;
};

class Samples {
  public:
    // Copies the pieces. Their memory must exist at every call of differ().
    explicit Samples(const std::vector<Pieces>& pieces);

    // Fetches single pieces into the cache: a caller who has something else to do first need not wait for
    // them.
    void fetch() const;

    // Whether one of the pieces has changed; compared by several threads if there are many.
    bool differ(int threads) const;

  private:
    struct Part {
        Pieces pieces;
        std::size_t kept;  // where their copy begins
    };
    static bool differs(const Part& part, const char* kept);

    std::vector<Part> parts_;  // of a bounded number of pieces each
    std::int64_t count_ = 0;
    std::vector<char> kept_;
};

}  // namespace fastbert
