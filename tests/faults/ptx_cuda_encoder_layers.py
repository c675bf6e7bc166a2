"""Faults of encoder layers in one call: wrong operands, overlapping memory, arguments of cuBLASLt."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_LT = "csrc/cuda/cublas_lt.cu"
_BACKEND = "fastbert/backends/cuda/encoder_layers.py"
_fault = faults_of("csrc/cuda/encoder_layers.cu")

FAULTS = (
    _fault("keys for values", "args.k = heads(1), args.v = heads(2)", "args.k = heads(1), args.v = heads(1)"),
    _fault("heads of another row", "3 * width, w.headdim}", "2 * width, w.headdim}"),
    _fault("no causal mask", "args.causal = call_.causal", "args.causal = false"),
    _fault("no scale", "1.0 / std::sqrt(static_cast<double>(w.headdim))", "1.0 + 0.0 * std::sqrt(static_cast<double>(w.headdim))"),
    _fault("the first norm's eps for the last", "w.last, w.last_bias, w.last_eps, y}", "w.last, w.last_bias, w.eps, y}"),
    _fault("the input as the last residual", "w.down, w.down_bias, memory_.normed, end)", "w.down, w.down_bias, x, end)"),
    _fault("every layer reads the input", "            x = own;\n", ""),
    _fault("first rows of the input forgotten", "x = memory_.first, context", "context"),
    _fault("first rows by number", "row = start < rows ? start : rows - 1", "row = start < rows ? blockIdx.x : rows - 1"),
    _fault("first rows past the last", "row = start < rows ? start : rows - 1", "row = start"),
    _fault("the last chunk of a row stays behind", "i < chunks; i += kThreads", "i + 1 < chunks; i += kThreads"),
    _fault("the last pack without its activation", "if (at >= packs) return;", "if (at + 1 >= packs) return;"),
    _fault("the norm where the sum is", "found.normed = scratch.take(columns(std::max(rows, batch), hidden));", "found.normed = found.sum;"),
    _fault("inner columns over the norm", "    feeding.take(shared);\n", "    feeding.take(kLtWork);\n"),
    _fault("no room for parts", "found.partial = scratch.take(partial * sizeof(float));", "found.partial = scratch.take(0);"),
    _fault("a refused map ends the call", "            if (!refused) return error;", "            return error;"),
    _fault("the residual added twice", "error : this->norm(rows, nullptr, nullptr, norm);", "error : this->norm(rows, residual, nullptr, norm);"),
    _fault("a residual and no bias", "depth, a, b, bias, sum, residual);", "depth, a, b, nullptr, sum, residual);"),
    _fault("no residual", "adds ? args.residual : args.c", "args.c", _LT),
    _fault("the weight as it lies", "constexpr std::int32_t kTransposed = 1;", "constexpr std::int32_t kTransposed = 0;", _LT),
    _fault("no bias", "constexpr std::uint32_t kAddBias = 4;", "constexpr std::uint32_t kAddBias = 1;", _LT),
    _fault("parts added in half precision", "constexpr std::uint32_t kSumsOfComputeType = 2;", "constexpr std::uint32_t kSumsOfComputeType = 7;", _LT),
    _fault("addresses on 256 bytes", "constexpr std::uint32_t kAlignment = 16;", "constexpr std::uint32_t kAlignment = 256;", _LT),
    _fault("one algorithm for all rows", "args.bias != nullptr, args.rows, args.columns", "args.bias != nullptr, 0, args.columns", _LT),
    _fault("asked for at every call", "if (found != plans->end()) return found->second;", "if (found == plans->begin()) return found->second;", _LT),
    _fault("a copied weight's address", "address(t) if t.is_contiguous() else 0", "address(t)", _BACKEND),
    _fault("first tokens in memory for all", "batch if first_only else rows", "rows", _BACKEND),
)  # fmt: skip

SUITE = Suite(faults=FAULTS, tests=("tests/ptx/test_cuda_encoder_layers.py",), **IN_EMULATOR)
