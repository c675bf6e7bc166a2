// What is wrong with an access to shared memory, once its fast checks have found that something may be.
#include "shared.h"

namespace ptx {

void Shared::outside(uint64_t at, uint32_t size, uint32_t lane, const char* what) const {
    fail(Kind::out_of_bounds, 1u << lane, at,
         std::string(what) + " of " + std::to_string(size) + " bytes outside the block's " + std::to_string(bytes) +
             " bytes of shared memory");
}

void Shared::misaligned(uint64_t at, uint32_t size, uint32_t lane, const char* what) {
    fail(Kind::misaligned, 1u << lane, at,
         std::string(what) + " of " + std::to_string(size) + " bytes at an address that is no multiple");
}

// Whether another warp wrote one of the bytes in no order with this access.
void Shared::check_writers(const Warp& w, uint32_t at, uint32_t size, uint32_t lane, const char* what, bool atomic,
                           const uint8_t* value) {
    for (uint32_t i = at; i < at + size; ++i) {
        const int other = writer[i] & ACTOR;
        if (write_time[i] == 0 || other == w.actor || write_time[i] < w.clock.seen[other]) continue;
        if (atomic && (writer[i] & ATOMIC)) continue;
        if (value && value[i - at] == data[i]) continue;
        explain_race(i, lane, what, "written", size_t(other));
    }
}

void Shared::explain_race(uint32_t at, uint32_t lane, const char* what, const char* did, size_t other) {
    fail(Kind::shared_race, 1u << lane, at,
         std::string(what) + " a byte of shared memory that warp " + std::to_string(other) + " has " + did +
             " since the last barrier that orders the two");
}

void Shared::explain_lanes(uint32_t at, uint32_t lane, const char* what, const char* did) {
    fail(Kind::shared_race, 1u << lane, at,
         std::string(what) + " a byte of shared memory that another lane of its warp has " + did +
             " since the last barrier or bar.warp.sync");
}

void Shared::explain_empty(uint32_t at, uint32_t size, uint32_t lane) {
    uint32_t i = at;
    while (i < at + size && state[i] == valid) ++i;
    fail(Kind::uninitialised_read, 1u << lane, i,
         state[i] == in_flight ? "reads shared memory while an asynchronous copy to it is in flight"
                               : "reads shared memory that was never written");
}

void Shared::explain_flying(uint32_t at, uint32_t size, uint32_t lane) {
    uint32_t i = at;
    while (i < at + size && state[i] != in_flight) ++i;
    fail(Kind::shared_race, 1u << lane, i, "writes shared memory while an asynchronous copy to it is in flight");
}

}  // namespace ptx
