// Branches, returns, and the order of kernels.
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
}

void wait_for_kernels(Warp& w, const Op&, uint32_t m) {
    w.waited |= m;
    w.block->launch->waited = true;
}
void let_next_begin(Warp&, const Op&, uint32_t) {}

void ret(Warp& w, const Op&, uint32_t m) { w.exit(m); }

}  // namespace

void control_forms() {
    form("bra", "L", bra);
    form("bra.uni", "L", bra);
    form("ret", "", ret);
    form("griddepcontrol.wait", "", wait_for_kernels);
    form("griddepcontrol.launch_dependents", "", let_next_begin);
}

}  // namespace ptx
