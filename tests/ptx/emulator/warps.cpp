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

enum Mode { up, down, butterfly, index };

template <Mode mode, bool with_predicate>
void shuffle(Warp& w, const Op& op, uint32_t m) {
    together(w, m, op.src[3]);
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
            case up: j = l - by, valid = j >= most; break;
            case down: j = l + by, valid = j <= most; break;
            case butterfly: j = l ^ by, valid = j <= most; break;
            case index: j = least | (by & ~segment), valid = j <= most; break;
        }
        if (!valid) j = l;
        from_other |= uint32_t(valid) << l;
        missing |= uint32_t(!(m >> j & 1)) << l;
        out[l] = a[j];
    }
    if (missing & m) fail(Kind::uninitialised_read, missing & m, 0, "a shuffle reads a thread that is not in it");
    each(m, w.lane<uint32_t>(op.dst[0]), [](uint32_t v) { return v; }, out);
    if (with_predicate) set_predicate(w.predicate(op.dst[1]), m, from_other);
}

template <Mode mode>
void shuffles(const std::string& name) {
    form("shfl.sync." + name + ".b32", "=b32 b32 b32 b32 b32", shuffle<mode, false>);
    form("shfl.sync." + name + ".b32", "=b32 =p b32 b32 b32 b32", shuffle<mode, true>);
}

struct Add { template <class T> T operator()(T a, T b) const { return T(uint32_t(a) + uint32_t(b)); } };
struct Min { template <class T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <class T> T operator()(T a, T b) const { return a < b ? b : a; } };
struct And { template <class T> T operator()(T a, T b) const { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) const { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) const { return a ^ b; } };

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

enum Vote { all_true, any_true, uniform, ballot };

template <Vote vote>
void votes(Warp& w, const Op& op, uint32_t m) {
    together(w, m, op.src[1]);
    const uint32_t p = w.predicate(op.src[0]);
    const uint32_t* named = w.lane<uint32_t>(op.src[1]);
    uint32_t truth = 0, out[LANES] = {};
    for (int l = 0; l < LANES; ++l) {
        const uint32_t group = named[l] & m, yes = p & group;
        out[l] = yes;
        const bool holds = vote == all_true ? yes == group : vote == any_true ? yes != 0 : yes == 0 || yes == group;
        truth |= uint32_t(holds) << l;
    }
    if (vote == ballot)
        each(m, w.lane<uint32_t>(op.dst[0]), [](uint32_t v) { return v; }, out);
    else
        set_predicate(w.predicate(op.dst[0]), m, truth);
}

template <class T>
void match_any(Warp& w, const Op& op, uint32_t m) {
    together(w, m, op.src[1]);
    const T* a = w.lane<T>(op.src[0]);
    uint32_t out[LANES] = {};
    for (int l = 0; l < LANES; ++l)
        for (int k = 0; k < LANES; ++k)
            if ((m >> k & 1) && a[k] == a[l]) out[l] |= 1u << k;
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

void active_mask(Warp& w, const Op& op, uint32_t m) {
    uint32_t out[LANES];
    for (uint32_t& v : out) v = m;
    each(m, w.lane<uint32_t>(op.dst[0]), [](uint32_t v) { return v; }, out);
}

}  // namespace

void warp_forms() {
    shuffles<up>("up"), shuffles<down>("down"), shuffles<butterfly>("bfly"), shuffles<index>("idx");
    const char* two = "=b32 b32 b32";
    form("redux.sync.add.s32", two, reduce<Add, int32_t>), form("redux.sync.add.u32", two, reduce<Add, uint32_t>);
    form("redux.sync.min.s32", two, reduce<Min, int32_t>), form("redux.sync.min.u32", two, reduce<Min, uint32_t>);
    form("redux.sync.max.s32", two, reduce<Max, int32_t>), form("redux.sync.max.u32", two, reduce<Max, uint32_t>);
    form("redux.sync.and.b32", two, reduce<And, uint32_t>), form("redux.sync.or.b32", two, reduce<Or, uint32_t>);
    form("redux.sync.xor.b32", two, reduce<Xor, uint32_t>);
    form("vote.sync.all.pred", "=p p b32", votes<all_true>);
    form("vote.sync.any.pred", "=p p b32", votes<any_true>);
    form("vote.sync.uni.pred", "=p p b32", votes<uniform>);
    form("vote.sync.ballot.b32", "=b32 p b32", votes<ballot>);
    form("match.any.sync.b32", two, match_any<uint32_t>);
    form("match.any.sync.b64", "=b32 b64 b32", match_any<uint64_t>);
    form("elect.sync", "=b32 =p b32", elect);
    form("activemask.b32", "=b32", active_mask);
}

}  // namespace ptx
