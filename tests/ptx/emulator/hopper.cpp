// Forms of sm_90: mbarrier, bulk and tensor copies, wgmma, fences of proxies.
#include "memory.h"

namespace ptx {

void hopper_forms() {}

}  // namespace ptx
