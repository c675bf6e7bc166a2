// Branches and returns.
#include <algorithm>

#include "lanes.h"

namespace ptx {
namespace {

// Lanes that take the branch and lanes that do not go separate ways until they meet.
void bra(Warp& w, const Op& op, uint32_t m) {
    const uint32_t target = uint32_t(op.imm[0]);
    const uint32_t others = w.mask & ~m;
    if (others) {
        w.waiting.push_back({w.pc + 1, others});
        w.meet = std::min(w.meet, w.pc + 1);
        w.mask = m;
    }
    w.next = target;
    if (w.next > w.meet) w.meet = 0;  // the others go first
}

// brx.idx: a table of labels, which `imm` lists.
void brx(Warp& w, const Op& op, uint32_t m) {
    const uint32_t* index = w.lane<uint32_t>(op.src[0]);
    if (w.mask != m) w.waiting.push_back({w.pc + 1, w.mask & ~m});
    for (size_t i = 0; i < op.imm.size(); ++i) {
        uint32_t lanes = 0;
        for (uint32_t l = 0; l < LANES; ++l)
            if ((m >> l & 1) && index[l] == i) lanes |= 1u << l;
        if (lanes) w.waiting.push_back({uint32_t(op.imm[i]), lanes});
        m &= ~lanes;
    }
    if (m) fail(Kind::out_of_bounds, m, 0, "brx.idx past the end of its table");
    w.mask = 0;
    w.meet = 0;
}

void ret(Warp& w, const Op&, uint32_t m) { w.exit(m); }

void trap(Warp&, const Op&, uint32_t m) { fail(Kind::bad_launch, m, 0, "the kernel traps"); }

void nothing(Warp&, const Op&, uint32_t) {}

void yield_turn(Warp& w, const Op&, uint32_t) { w.stop(); }

}  // namespace

void control_forms() {
    form("bra", "L", bra);
    form("bra.uni", "L", bra);
    form("brx.idx", "b32 L*", brx);
    form("ret", "", ret);
    form("ret.uni", "", ret);
    form("exit", "", ret);
    form("trap", "", trap);
    form("nop", "", nothing);
    form("nanosleep.u32", "b32", yield_turn);
    for (const char* name : {"membar.cta", "membar.gl", "membar.sys", "fence.sc.cta", "fence.sc.gpu", "fence.sc.sys",
                             "fence.sc.cluster", "fence.acq_rel.cta", "fence.acq_rel.gpu", "fence.acq_rel.sys",
                             "fence.acq_rel.cluster"})
        form(name, "", nothing);
}

}  // namespace ptx
