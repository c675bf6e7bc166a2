"""Faults of the CUDA layer_norm: races, guards, alignment, launch limits, multiply-adds."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_FORWARD = "csrc/cuda/layer_norm.cu"
_BACKWARD = "csrc/cuda/layer_norm_backward.cu"
_ROWS = "csrc/cuda/layer_norm_rows.cuh"
_COMMON = "csrc/cuda/common.cuh"
_fault = faults_of(_FORWARD)

FAULTS = (
    # a slot written while another warp may still read it
    _fault("slots of the mean reused", "row_sum<kThreads>(first, slots[1])", "row_sum<kThreads>(first, slots[0])", _FORWARD),
    _fault("slots of the correction reused", "rstd_of(row_sum<kThreads>(second, slots[2])", "rstd_of(row_sum<kThreads>(second, slots[1])", _FORWARD),
    _fault("looped: slots of the mean reused", "row_sum<kRowThreads>(first, slots[1])", "row_sum<kRowThreads>(first, slots[0])", _FORWARD),
    _fault("looped: slots of the correction reused", "rstd_of(row_sum<kRowThreads>(second, slots[2])", "rstd_of(row_sum<kRowThreads>(second, slots[1])", _FORWARD),
    _fault("the next row takes the same slots", "base += step, turn ^= 1)", "base += step, turn ^= 0)", _BACKWARD),
    _fault("slots that overlap", "__shared__ float slots[3][kRowThreads / kWarp];", "__shared__ float slots[3][kRowThreads / kWarp - 1];", _FORWARD),
    # shared memory that was never written
    _fault("totals of no column not written", "    totals[y][x] = total;", "    if (column < hidden) totals[y][x] = total;", _BACKWARD),
    # reads beyond a tensor, of values that nothing uses
    _fault("a row past the last fetched", "if (!active || row >= args.rows) return;", "if (!active) return;", _BACKWARD),
    _fault("a mean past the last read", "row < args.rows && !args.rms ? args.mean[row]", "!args.rms ? args.mean[row]", _BACKWARD),
    _fault("partial sums of no column read", "    if (column < hidden)\n        for (std::int64_t part", "        for (std::int64_t part", _BACKWARD),
    # RMSNorm and the returned sum
    _fault("rms: mean subtracted", "args.rms ? 0.0f : row_sum<kThreads>(total", "row_sum<kThreads>(total"),
    _fault("rms: its correction subtracted", "args.rms ? 0.0f : row_sum<kThreads>(first", "row_sum<kThreads>(first"),
    _fault("rms looped: mean subtracted", "args.rms ? 0.0f : row_sum<kRowThreads>(total", "row_sum<kRowThreads>(total"),
    _fault("rms: mean stored", "if (args.rstd != nullptr && thread == 0) {\n        if (!args.rms) ", "if (args.rstd != nullptr && thread == 0) {\n        "),
    _fault("rms: mean read", "row < args.rows && !args.rms ?", "row < args.rows ?", _BACKWARD),
    _fault("gradient of the sum forgotten", "for (int i = 0; i < kColumns; ++i) dz[i] += dsum[i];", ";", _BACKWARD),
    _fault("gradient of the sum after dresidual", "if (args.dsum != nullptr) dz += widen(static_cast<const T*>(args.dsum)[row * args.hidden + j]);\n            const float dx = args.dropout.seed != nullptr ? drop_one(args.dropout, row, j, dz) : dz;", "const float dx = args.dropout.seed != nullptr ? drop_one(args.dropout, row, j, dz) : dz;\n            if (args.dsum != nullptr) dz += widen(static_cast<const T*>(args.dsum)[row * args.hidden + j]);", _BACKWARD),
    _fault("gradient of the sum at any address", "cuda::aligned(args.dsum) && ", "", _BACKWARD),
    # addresses that 16-byte accesses cannot have
    _fault("rows of any address in registers", "return cuda::aligned(p) && (p == nullptr", "return (p == nullptr", _ROWS),
    _fault("rows of any stride in registers", "(p == nullptr || stride % kPack<T> == 0)", "(p == nullptr || stride != 0)", _ROWS),
    _fault("8 bytes are aligned enough", "reinterpret_cast<std::uintptr_t>(p) % 16 == 0", "reinterpret_cast<std::uintptr_t>(p) % 8 == 0", _COMMON),
    # what ptxas may make of a product and a sum
    _fault("g in a multiply-add", "return __fmul_rn(a, b);", "return a * b;", _COMMON),
    # launches that no device takes
    _fault("bounds below the launch: looped", "__global__ void __launch_bounds__(kRowThreads) forward_looped_kernel", "__global__ void __launch_bounds__(kRowThreads / 2) forward_looped_kernel", _FORWARD),
    _fault("bounds below the launch: looped backward", "__launch_bounds__(kRowThreads)\n    backward_looped_kernel", "__launch_bounds__(kWarp)\n    backward_looped_kernel", _BACKWARD),
    _fault("bounds below the launch: a warp per row", "kThreads == kWarp ? kWarp * kWarpsPerBlock : kThreads,\n", "kThreads == kWarp ? kWarp : kThreads,\n", _FORWARD),
    _fault("more shared memory than a block gets", "__shared__ float others[kColumns * kBlockThreads<T>];", "__shared__ float others[4 * kColumns * kBlockThreads<T>];", _BACKWARD),
    _fault("more rows than a block's threads", "return {threads, kBlockThreads<T> / threads};", "return {threads, kBlockThreads<T> / threads + 1};", _BACKWARD),
    _fault("no block for the last rows", "const std::int64_t most = (rows + block_rows - 1) / block_rows;", "const std::int64_t most = rows / block_rows;", _BACKWARD),
    # rows of a block, each on its own
    _fault("one barrier for all rows", "sync_threads_at(static_cast<int>(threadIdx.y) + 1,", "sync_threads_at(1,", _BACKWARD),
    _fault("no barrier in a row", "    sync_threads_at(static_cast<int>(threadIdx.y) + 1, static_cast<int>(blockDim.x));\n", "", _BACKWARD),
    _fault("statistics of the row that is fetched", "const float mean = next_mean, rstd = next_rstd;", "fetch(row + step);\n        const float mean = next_mean, rstd = next_rstd;", _BACKWARD),
    _fault("sums overwritten before they are read", "        if (k > 0) __syncthreads();\n", "", _BACKWARD),
    _fault("sums read before they are written", "        __syncthreads();\n        float* out", "        float* out", _BACKWARD),
    _fault("sums of one row of the block", "for (int y = 0; y < static_cast<int>(blockDim.y); ++y)", "for (int y = 0; y < 1; ++y)", _BACKWARD),
    _fault("sums in the threads' order", "out[x * kColumns + i] = total;", "out[j] = total;", _BACKWARD),
    _fault("sums of columns past the last", "if (x * kColumns < args.hidden) out", "out", _BACKWARD),
    _fault("some columns not summed", "for (int j = own; j < kColumns * width; j += threads)", "for (int j = own; j < kColumns * width; j += kColumns * width)", _BACKWARD),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/ptx/test_cuda_layer_norm.py",
        "-k",
        "width or order or gaps or addresses or wanted or rows or contracted",
    ),
    **IN_EMULATOR,
)
