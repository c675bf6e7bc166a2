// csrc/cpu/pace.h, to be called from Python: which lines the tiles of a task prefetch.
#include "cpu/pace.h"

using namespace fastbert::FASTBERT_ISA;

// How often each of `count` lines of memory is asked for while `tiles` tiles go over `rows` rows of a panel.
extern "C" void pace_lines(std::int64_t lines, std::int64_t tiles, std::int64_t rows, int* asked,
                           std::int64_t count) {
    static char memory[1 << 16];
    Pace pace(memory, lines, tiles);
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
        const int width = pace.kind() == 0 ? 1 : pace.kind() == 1 ? 2 : 4;
        for (std::int64_t row = 0; row < rows; ++row)
            for (int i = 0; i < width; ++i) {
                const std::int64_t line = (pace.from + row * pace.step - memory) / kLine + i;
                if (line < count) ++asked[line];
            }
        pace.next(rows);
    }
}
