// What Python calls through ctypes.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "lanes.h"

namespace ptx {
void run_blocks(Launch& launch);
}

using namespace ptx;

extern "C" {

struct LaunchRequest {
    uint32_t grid[3], threads[3], cluster[3];
    uint32_t dynamic_shared_bytes;
    uint32_t late, check_overlap, seed;
    int64_t limit;
    const uint8_t* parameters;
    uint64_t parameter_bytes;
    const uint64_t* allocations;  // pairs of start and end, sorted and apart
    uint64_t allocation_count;
    const uint8_t* shared_image;
    uint8_t* shared_result;
    uint64_t image_bytes;
    uint32_t chained;
    const uint64_t* constant;  // as allocations: what a chained launch may read early
    uint64_t constant_count;
};

struct Report {
    int32_t kind;
    uint32_t line, block, warp, lanes;
    uint64_t address;
    int64_t executed;
    char text[400];
};

// One line per form: its name, a tab, its signature. The number of the line is the form's.
const char* ptx_forms() {
    static std::string text;
    if (text.empty()) {
        control_forms(), integer_forms(), bit_forms(), float_forms(), half_forms(), compare_forms();
        convert_forms(), memory_forms(), atomic_forms(), copy_forms(), barrier_forms(), warp_forms();
        cluster_forms(), matrix_forms(), hopper_forms();
        for (const Form& f : forms()) text += f.name + "\t" + f.signature + "\n";
    }
    return text.c_str();
}

// `stream`: per statement form, guard or -1, negated, line, and the lists dst, src, imm, each with its length.
// `constants`: triples of slot, bytes, value. `specials`: pairs of slot and number.
Kernel* ptx_kernel(const int64_t* stream, uint64_t length, const uint64_t* constants, uint64_t constant_count,
                   const uint32_t* specials, uint64_t special_count, uint32_t constant_slots, uint32_t slots,
                   uint32_t shared_bytes, uint32_t local_bytes, uint32_t waits) {
    auto* kernel = new Kernel;
    const int64_t* end = stream + length;
    while (stream < end) {
        Op op;
        const Form& form = forms()[size_t(*stream++)];
        op.run = form.run, op.raw = form.raw, op.pure = form.pure;
        op.guard = *stream < 0 ? NONE : uint32_t(*stream);
        ++stream;
        op.negated = *stream++ != 0;
        op.line = uint32_t(*stream++);
        for (auto* list : {&op.dst, &op.src}) {
            const int64_t n = *stream++;
            for (int64_t i = 0; i < n; ++i) list->push_back(uint32_t(*stream++));
        }
        const int64_t n = *stream++;
        op.imm.assign(stream, stream + n);
        stream += n;
        kernel->ops.push_back(std::move(op));
    }
    kernel->constants.resize(size_t(constant_slots) * 64);
    for (uint64_t i = 0; i < constant_count; ++i) {
        const uint64_t slot = constants[3 * i], bytes = constants[3 * i + 1], value = constants[3 * i + 2];
        uint8_t* at = kernel->constants.data() + slot * 64;
        for (int l = 0; l < LANES; ++l) std::memcpy(at + bytes * l, &value, bytes);
    }
    for (uint64_t i = 0; i < special_count; ++i) kernel->specials.push_back({specials[2 * i], specials[2 * i + 1]});
    kernel->slots = slots;
    kernel->shared_bytes = shared_bytes;
    kernel->local_bytes = local_bytes;
    kernel->waits_for_blocks = waits != 0;
    return kernel;
}

// Warnings of this thread's last launch: a line for each, the number of the line in the text before a tab.
const char* ptx_warnings() {
    static thread_local std::string text;
    text.clear();
    for (const std::string& warning : warnings()) text += warning + "\n";
    return text.c_str();
}

void ptx_kernel_free(Kernel* kernel) { delete kernel; }

int ptx_launch(const Kernel* kernel, const LaunchRequest* request, Report* report) {
    Launch launch;
    launch.kernel = kernel;
    std::copy_n(request->grid, 3, launch.grid);
    std::copy_n(request->threads, 3, launch.threads);
    std::copy_n(request->cluster, 3, launch.cluster);
    launch.shared_bytes = kernel->shared_bytes + request->dynamic_shared_bytes;
    launch.parameters = request->parameters;
    launch.parameter_bytes = uint32_t(request->parameter_bytes);
    launch.late = request->late != 0;
    launch.check_overlap = request->check_overlap != 0;
    launch.limit = request->limit;
    launch.random.seed(request->seed);
    launch.shared_image = request->shared_image;
    launch.shared_result = request->shared_result;
    launch.image_bytes = uint32_t(request->image_bytes);
    launch.chained = request->chained != 0;
    for (uint64_t i = 0; i < request->constant_count; ++i)
        launch.constant.push_back({request->constant[2 * i], request->constant[2 * i + 1]});
    // Writers of bytes: pages that exist once they are touched, for tensors may be larger than memory.
    const auto pages = [](const Allocation& a) { return (a.end - a.start) * sizeof(uint32_t); };
    for (uint64_t i = 0; i < request->allocation_count; ++i) {
        Allocation a{request->allocations[2 * i], request->allocations[2 * i + 1], nullptr};
        if (launch.check_overlap) {
            void* p = mmap(nullptr, pages(a), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) launch.check_overlap = false;
            else a.writers = static_cast<uint32_t*>(p);
        }
        launch.allocations.push_back(a);
    }
    std::memset(report, 0, sizeof *report);
    warnings().clear();
    try {
        run_blocks(launch);
        if (launch.chained && !launch.waited)
            fail(Kind::early_access, 0, 0, "a chained kernel that does not wait for those before it");
    } catch (const Fault& fault) {
        report->kind = int(fault.kind);
        report->lanes = fault.lanes;
        report->address = fault.address;
        std::strncpy(report->text, fault.text.c_str(), sizeof report->text - 1);
        report->line = fault.line;
        report->block = fault.block;
        report->warp = fault.warp;
    }
    for (const Allocation& a : launch.allocations)
        if (a.writers) munmap(a.writers, pages(a));
    return report->kind;
}

}  // extern "C"
