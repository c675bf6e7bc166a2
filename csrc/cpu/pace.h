// What the tiles of a product prefetch. Included by the *_simd.cpp files of products.
#pragma once

#include <cstdint>

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

constexpr std::int64_t kLine = 64;  // bytes of a line of the cache

// While the tiles of a task go over a panel one after the other, they prefetch the panel that comes next.
// Many tiles take a part of a line per row each, so that the requests are spread evenly. Few tiles take whole
// lines, some of them several: otherwise lines are left out, and the processor by itself reads them too late
// (NOTES.md).
class Pace {
  public:
    const char* from;
    std::int64_t step;  // bytes per row of the panel

    // `lines`: that fill a row of the next panel, times how many of its rows there are for a row of this one.
    Pace(const void* next_panel, std::int64_t lines, std::int64_t tiles)
        : from(static_cast<const char*>(next_panel)),
          step((lines * kLine + tiles - 1) / tiles),
          left_(tiles == 1 || tiles > lines ? 0 : lines),
          tiles_(tiles) {
        take();
    }
    // After a tile of `rows` rows.
    void next(std::int64_t rows) {
        from += rows * step;
        take();
    }
    // Which of a kernel's tiles prefetches so many lines per row: 0 for one line, 1 for two, 2 for four.
    int kind() const { return kind_; }

  private:
    void take() {
        if (left_ == 0 || tiles_ == 0) return;
        const std::int64_t share = (left_ + tiles_ - 1) / tiles_, lines = share < 4 ? share : 4;
        step = lines * kLine;
        kind_ = lines == 1 ? 0 : lines == 2 ? 1 : 2;
        left_ -= lines;
        --tiles_;
    }
    std::int64_t left_, tiles_;  // lines that no tile has taken, tiles that have taken none
    int kind_ = 0;
};

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
