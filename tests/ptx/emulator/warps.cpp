// What lanes of one warp exchange: shuffles, reductions, votes.
#include "lanes.h"

namespace ptx {
namespace {

// All threads that the statement names must be here.
void together(Warp& w, uint32_t m, uint32_t slot) {
    const uint32_t* named = w.lane<uint32_t>(slot);
    for (int l = 0; l < LANES; ++l) {
        if (!(m >> l & 1)) continue;
        if (!(named[l] >> l & 1))
            fail(Kind::divergent_barrier, 1u << l, named[l], "a thread is not among those that its statement names");
        if (named[l] & w.live & ~m)
            fail(Kind::divergent_barrier, m, named[l], "names threads that do not reach the statement together");
    }
}

enum Mode { butterfly, index };

template <Mode mode, bool with_predicate>
void shuffle(Warp& w, const Op& op, uint32_t m) {
    for (int i = 1; i < 4; ++i)
        if (m & ~w.written[op.src[i]])
            fail(Kind::uninitialised_read, m & ~w.written[op.src[i]], op.src[i], "a shuffle by an undefined number");
    together(w, m, op.src[3]);
    // A value may be undefined: then it is so where it arrives.
    const uint32_t defined = w.written[op.src[0]];
    uint32_t known = 0;
    uint32_t a[LANES], out[LANES];
    std::memcpy(a, w.lane<uint32_t>(op.src[0]), sizeof a);
    const uint32_t *b = w.lane<uint32_t>(op.src[1]), *c = w.lane<uint32_t>(op.src[2]);
    uint32_t from_other = 0, missing = 0;
    for (int l = 0; l < LANES; ++l) {
        const int by = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
        const int most = (l & segment) | (clamp & ~segment), least = l & segment;
        int j = l;
        bool valid = false;
        switch (mode) {
            case butterfly: j = l ^ by, valid = j <= most; break;
            case index: j = least | (by & ~segment), valid = j <= most; break;
        }
        if (!valid) j = l;
        from_other |= uint32_t(valid) << l;
        missing |= uint32_t(!(m >> j & 1)) << l;
        known |= (defined >> j & 1) << l;
        out[l] = a[j];
    }
    if (missing & m) fail(Kind::uninitialised_read, missing & m, 0, "a shuffle reads a thread that is not in it");
    each(m, w.lane<uint32_t>(op.dst[0]), [](uint32_t v) { return v; }, out);
    w.written[op.dst[0]] = (w.written[op.dst[0]] & ~m) | (known & m);
    if (with_predicate) {
        set_predicate(w.predicate(op.dst[1]), m, from_other);
        w.written[op.dst[1]] |= m;
    }
}

template <Mode mode>
void shuffles(const std::string& name) {
    raw_form("shfl.sync." + name + ".b32", "=b32 b32 b32 b32 b32", shuffle<mode, false>);
    raw_form("shfl.sync." + name + ".b32", "=b32 =p b32 b32 b32 b32", shuffle<mode, true>);
}

struct Add { template <class T> T operator()(T a, T b) const { return T(uint32_t(a) + uint32_t(b)); } };
struct Min { template <class T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <class T> T operator()(T a, T b) const { return a < b ? b : a; } };
// Over the lanes that the second source names.
template <class F, class T>
void reduce(Warp& w, const Op& op, uint32_t m) {
    together(w, m, op.src[1]);
    const T* a = w.lane<T>(op.src[0]);
    const uint32_t* named = w.lane<uint32_t>(op.src[1]);
    T out[LANES] = {};
    for (int l = 0; l < LANES; ++l) {
        if (!(m >> l & 1)) continue;
        const uint32_t group = named[l] & m;
        const int first = __builtin_ctz(group);
        T sum = a[first];
        for (int k = first + 1; k < LANES; ++k)
            if (group >> k & 1) sum = F{}(sum, a[k]);
        out[l] = sum;
    }
    each(m, w.lane<T>(op.dst[0]), [](T v) { return v; }, out);
}

// Which lanes of those named have a true predicate, or whether any has.
template <bool any>
void votes(Warp& w, const Op& op, uint32_t m) {
    together(w, m, op.src[1]);
    const uint32_t p = w.predicate(op.src[0]);
    const uint32_t* named = w.lane<uint32_t>(op.src[1]);
    uint32_t truth = 0, out[LANES] = {};
    for (int l = 0; l < LANES; ++l) {
        out[l] = p & named[l] & m;
        truth |= uint32_t(out[l] != 0) << l;
    }
    if (any)
        set_predicate(w.predicate(op.dst[0]), m, truth);
    else
        each(m, w.lane<uint32_t>(op.dst[0]), [](uint32_t v) { return v; }, out);
}

// One lane of those named: the lowest, as a GPU does.
void elect(Warp& w, const Op& op, uint32_t m) {
    together(w, m, op.src[0]);
    const uint32_t leader = uint32_t(__builtin_ctz(m));
    uint32_t out[LANES];
    for (uint32_t& v : out) v = leader;
    each(m, w.lane<uint32_t>(op.dst[0]), [](uint32_t v) { return v; }, out);
    set_predicate(w.predicate(op.dst[1]), m, 1u << leader);
}

}  // namespace

void warp_forms() {
    shuffles<butterfly>("bfly"), shuffles<index>("idx");
    const char* two = "=b32 b32 b32";
    form("redux.sync.add.s32", two, reduce<Add, int32_t>), form("redux.sync.add.u32", two, reduce<Add, uint32_t>);
    form("redux.sync.min.s32", two, reduce<Min, int32_t>), form("redux.sync.min.u32", two, reduce<Min, uint32_t>);
    form("redux.sync.max.s32", two, reduce<Max, int32_t>), form("redux.sync.max.u32", two, reduce<Max, uint32_t>);
    form("vote.sync.any.pred", "=p p b32", votes<true>);
    form("vote.sync.ballot.b32", "=b32 p b32", votes<false>);
    form("elect.sync", "=b32 =p b32", elect);
}

}  // namespace ptx
