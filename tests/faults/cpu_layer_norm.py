"""Faults of the C++ RMSNorm, NoNorm and returned sum; cpu_embedding.py has those of LayerNorm's rows."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_SIMD = "csrc/cpu/layer_norm_simd.cpp"
_ROWS = "csrc/cpu/norm_rows.h"
_fault = faults_of(_SIMD)

FAULTS = (
    # RMSNorm
    _fault("values summed, not squares", "kNorm == Norm::kRms ? fma(z, z, total) : add(total, z)", "add(total, z)", _ROWS),
    _fault("mean subtracted", "moments = rms_of(hidden, total, args.eps)", "moments = moments_of(z, hidden, plain_sum<Norm::kLayer>(z, hidden), args.eps)"),
    _fault("mean of the squares not taken", "square_sum / static_cast<double>(hidden)", "square_sum", _ROWS),
    _fault("eps forgotten", "square_sum / static_cast<double>(hidden) + eps", "square_sum / static_cast<double>(hidden)", _ROWS),
    _fault("rstd saved only beside a mean", "if (args.rstd != nullptr)", "if (args.mean != nullptr)"),
    _fault("mean of g subtracted", "kRms ? g : sub(g, broadcast(mean_g[r]))", "sub(g, broadcast(mean_gx[r]))", _ROWS),
    _fault("z not scaled in backward", "mul(kRms ? z : sub(z, broadcast(rows.mean[r])), scale)", "kRms ? z : mul(sub(z, broadcast(rows.mean[r])), scale)", _ROWS),
    # NoNorm
    _fault("NoNorm's row scaled", "Moments moments{0.0f, 0.0f, 1.0f};", "Moments moments{0.0f, 0.0f, 0.5f};"),
    _fault("NoNorm normalised", "if (kNorm == Norm::kRms) moments", "if (kNorm != Norm::kLayer) moments"),
    _fault("NoNorm's weight forgotten in backward", "            dz[r] = g;\n", "            dz[r] = grad;\n", _ROWS),
    _fault("NoNorm's z forgotten in dweight", "            Vec x_hat = z;\n", "            Vec x_hat = w;\n", _ROWS),
    _fault("gradient of a norm for NoNorm", "            if (!kNone) {\n", "            if (true) {\n", _ROWS),
    _fault("NoNorm taken for RMSNorm", "args.none  ? forward_rows<T, Norm::kNone>", "args.none  ? forward_rows<T, Norm::kRms>"),
    _fault("NoNorm's backward taken for RMSNorm's", "args.none  ? backward_rows<T, Norm::kNone>", "args.none  ? backward_rows<T, Norm::kRms>"),
    # the returned sum
    _fault("statistics from the rounded sum", "store(row_z + j, z, n);", "if (z_out != nullptr) z = load(z_out + j, n);\n        store(row_z + j, z, n);"),
    _fault("x_bias not in the sum", "if (z_out != nullptr) store(z_out + j, z, n);", "if (z_out != nullptr) store(z_out + j, x_bias != nullptr ? sub(z, load(x_bias + j, n)) : z, n);"),
    _fault("gradient of the sum forgotten", "if (dsum != nullptr) out = add(out, load(dsum + r * hidden + j, n));", ""),
    _fault("gradient of the sum doubled", "if (dsum != nullptr) out = add(out, load(dsum + r * hidden + j, n));", "if (dsum != nullptr) out = add(add(out, load(dsum + r * hidden + j, n)), load(dsum + r * hidden + j, n));"),
    _fault("gradient of the first row's sum for four", "load(dsum + r * hidden + j, n)", "load(dsum + j, n)"),
    _fault("gradient of the sum not in dresidual", "store(dresidual + r * hidden + j, out, n);", "store(dresidual + r * hidden + j, dz[r], n);"),
    _fault("gradient of the sum not in dx_bias", "dxb = add(dxb, out);", "dxb = add(dxb, dropout ? out : dz[r]);"),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=("tests/ops/test_layer_norm.py", "tests/ops/test_error_rule.py", "-k", "cpu or layer_norm-av"),
    **IN_PLACE,
)
