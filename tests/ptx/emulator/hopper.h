// State that the asynchronous statements of sm_90 keep per block and per warp.
#pragma once

#include "memory.h"

namespace ptx {

// What the harness puts in the place of a CUtensorMap: 128 bytes. Sizes are in elements, strides in bytes.
struct TensorMap {
    static constexpr uint64_t MAGIC = 0x70616D726F736E65;
    uint64_t magic;
    uint64_t base;
    uint32_t rank, element_bytes, swizzle;  // bytes of a swizzled row, 0 without
    uint32_t size[5], box[5];
    uint32_t padding;
    uint64_t stride[5];  // of axis d; that of axis 0 is one element
    uint64_t unused[2];

    uint32_t bytes() const {
        uint32_t all = element_bytes;
        for (uint32_t d = 0; d < rank; ++d) all *= box[d];
        return all;
    }
};
static_assert(sizeof(TensorMap) == 128);

// A copy of a tile, between a tensor and shared memory.
struct TileCopy {
    TensorMap map;
    int32_t coordinates[5];
    uint32_t shared, barrier, lane, group;
    Warp* warp;  // that issued it; a multicast is one copy per block
    Clock clock;
};

struct Barrier {
    uint32_t offset = 0, expected = 0, pending = 0, phase = 0;
    int64_t bytes = 0;  // that copies still have to bring
    Clock clock, done;  // of those who have arrived; of phases that are over
};

struct HopperBlock {
    std::vector<Barrier> barriers;
    std::vector<TileCopy> copies;
};

// A warp's part of a product of its group.
struct Product {
    const Op* op;
    bool added;  // to the accumulators; else they are written
    uint32_t group;
    uint64_t a, b;               // descriptors
    uint32_t registers;          // so many of the statement's first operands are in flight
    std::vector<uint32_t> rows;  // offsets of the pieces of 16 bytes that are read
};

struct HopperWarp {
    uint32_t committed[LANES] = {};
    std::vector<TileCopy> stores;
    uint32_t fenced = 0;  // when it last made generic writes known to asynchronous operations

    uint32_t products_committed = 0;
    std::vector<Product> products;
};

HopperWarp& hopper(Warp& w);
HopperBlock& hopper(Block& block);
bool land_copies(Cluster& cluster);
void async_read(Warp& w, uint32_t at, uint32_t size, const char* what);
void warn(Warp& w, const std::string& text);
void wgmma_forms();

}  // namespace ptx
