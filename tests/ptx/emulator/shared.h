// Shared memory of one block, and what is known of each byte: whether it holds a value, who wrote it and when,
// and when each warp read it last. The times are those of the warps' clocks.
#pragma once

#include <cstring>

#include "engine.h"

namespace ptx {

enum Byte : uint8_t { empty = 0, valid = 1, in_flight = 2 };
constexpr uint16_t ATOMIC = 0x8000, ASYNC = 0x4000, ACTOR = 0x3FFF;  // a writer: flags, and its number in the cluster

struct Shared {
    uint32_t bytes;
    std::vector<uint8_t> data, state;
    std::vector<uint16_t> writer;
    std::vector<uint16_t> readers;  // per 16 bytes: asynchronous operations in flight that read them
    std::vector<uint32_t> write_time;
    std::vector<std::vector<uint32_t>> read_time;  // by warp; made when a warp first reads
    std::vector<uint32_t> visits;  // by warp of another block: when it last accessed this one's memory
    // The lane of the last load or store, and when: `now_of` its warp. MANY: several lanes have read.
    std::vector<uint32_t> lane_read_at, lane_wrote_at;
    std::vector<uint8_t> lane_read, lane_wrote;
    static constexpr uint8_t MANY = 0xFF;

    Shared(uint32_t size, uint32_t warps)
        : bytes(size), data(size, 0xFF), state(size, empty), writer(size, 0), readers(size / 16 + 1, 0),
          write_time(size, 0), read_time(warps),
          visits(warps, 0), lane_read_at(size, 0), lane_wrote_at(size, 0), lane_read(size, 0),
          lane_wrote(size, 0) {}

    void preset(const uint8_t* image, uint32_t count) {
        std::memcpy(data.data(), image, count);
        std::memset(state.data(), valid, count);
    }
    void copy(uint8_t* result, uint32_t count) const { std::memcpy(result, data.data(), count); }

    // Bounds and alignment of one lane's access.
    void check(uint64_t at, uint32_t size, uint32_t lane, const char* what) const {
        if (at + size > bytes || at + size < at) outside(at, size, lane, what);
        if (at & (size - 1)) misaligned(at, size, lane, what);
    }
    [[noreturn]] void outside(uint64_t at, uint32_t size, uint32_t lane, const char* what) const;
    [[noreturn]] static void misaligned(uint64_t at, uint32_t size, uint32_t lane, const char* what);

    // One lane reads `size` bytes (1 to 16), which must hold values that no other warp writes meanwhile.
    template <uint32_t size>
    void on_read(const Warp& w, uint32_t at, uint32_t lane) {
        auto& times = read_time[w.actor];
        if (times.empty()) times.resize(bytes, 0);
        uint8_t bad = 0;
        uint8_t late = 0;
        for (uint32_t i = 0; i < size; ++i) {
            bad |= uint8_t(state[at + i] != valid);
            late |= uint8_t(write_time[at + i] >= w.earliest);
        }
        if (bad) explain_empty(at, size, lane);
        if (late) check_writers(w, at, size, lane, "reads", false, nullptr);
        const uint32_t now = w.block->cluster->now;
        for (uint32_t i = 0; i < size; ++i) times[at + i] = now;
    }

    // Before one lane writes; `flag` is ATOMIC for an atomic update. Two warps may write the same `value`: Triton
    // lets warps that hold copies of a tile all store them.
    template <uint32_t size>
    void on_write(const Warp& w, uint32_t at, uint32_t lane, uint16_t flag = 0, uint8_t becomes = valid,
                  const uint8_t* value = nullptr) {
        uint8_t late = 0, flying = 0;
        for (uint32_t i = 0; i < size; ++i) {
            late |= uint8_t(write_time[at + i] >= w.earliest);
            flying |= uint8_t(state[at + i] == in_flight);
        }
        if (flying && becomes != in_flight) explain_flying(at, size, lane);
        if (readers[at >> 4])
            fail(Kind::shared_race, 1u << lane, at,
                 "writes shared memory while an asynchronous operation in flight reads it");
        if (late) check_writers(w, at, size, lane, "writes", (flag & ATOMIC) != 0, value);
        for (size_t v = 0; v < read_time.size(); ++v) {
            if (int(v) == w.actor || read_time[v].empty()) continue;
            const uint32_t* times = read_time[v].data() + at;
            const uint32_t seen = w.clock.seen[v];
            uint8_t raced = 0;
            for (uint32_t i = 0; i < size; ++i) raced |= uint8_t(times[i] >= seen);
            if (raced) explain_race(at, lane, "writes", "read", v);
        }
        for (uint32_t i = 0; i < size; ++i) {
            state[at + i] = becomes;
            writer[at + i] = uint16_t(w.actor) | flag;
            write_time[at + i] = w.block->cluster->now;
        }
    }

    static uint32_t now_of(const Warp& w) { return w.meetings << 9 | uint32_t(w.actor); }

    // A lane's load and store: no other lane of its warp may have written, or read, since the two met.
    template <uint32_t size>
    void lane_reads(const Warp& w, uint32_t at, uint32_t lane) {
        const uint32_t now = now_of(w);
        uint8_t raced = 0;
        for (uint32_t i = at; i < at + size; ++i) {
            raced |= uint8_t((lane_wrote_at[i] == now) & (lane_wrote[i] != lane));
            lane_read[i] = (lane_read_at[i] == now) & (lane_read[i] != lane) ? MANY : uint8_t(lane);
            lane_read_at[i] = now;
        }
        if (raced) explain_lanes(at, lane, "reads", "written");
    }
    template <uint32_t size>
    void lane_writes(const Warp& w, uint32_t at, uint32_t lane) {
        const uint32_t now = now_of(w);
        uint8_t raced = 0;
        for (uint32_t i = at; i < at + size; ++i) {
            raced |= uint8_t((lane_read_at[i] == now) & (lane_read[i] != lane));
            lane_wrote[i] = uint8_t(lane);
            lane_wrote_at[i] = now;
        }
        if (raced) explain_lanes(at, lane, "writes", "read");
    }

   private:
    [[noreturn]] void explain_lanes(uint32_t at, uint32_t lane, const char* what, const char* did);
    void check_writers(const Warp& w, uint32_t at, uint32_t size, uint32_t lane, const char* what, bool atomic,
                       const uint8_t* value);
    [[noreturn]] void explain_race(uint32_t at, uint32_t lane, const char* what, const char* did, size_t other);
    [[noreturn]] void explain_empty(uint32_t at, uint32_t size, uint32_t lane);
    [[noreturn]] void explain_flying(uint32_t at, uint32_t size, uint32_t lane);
};

}  // namespace ptx
