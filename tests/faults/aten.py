"""Faults of the aten backend, and of what the ops do for narrow rows in every backend."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_ATTENTION = "fastbert/backends/aten/attention.py"
_LAYER_NORM = "fastbert/backends/aten/layer_norm.py"
_LINEAR = "fastbert/backends/aten/linear.py"
_NARROW = "fastbert/ops/layer_norm.py"
_EMBEDDING = "fastbert/ops/embedding.py"


def _fault(file: str, name: str, old: str, new: str) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # scores that are NaN or infinite
    _fault(_ATTENTION, "every score left to the fused kernel", "if fused and not _finite_scores(", "if False and not _finite_scores("),
    _fault(_ATTENTION, "keys not looked at", "most = most * torch.linalg.vector_norm(k, math.inf, dtype=compute) * q.shape[-1]", "pass"),
    _fault(_ATTENTION, "infinite bias not looked at", "if bias is not None and bias.numel() > 0:", "if False:"),
    _fault(_ATTENTION, "lse not repaired", "fused_lse.copy_(torch.where(agree, fused_lse, run_lse))", "pass"),
    _fault(_ATTENTION, "rows that were right replaced", "torch.where(agree.unsqueeze(-1), fused_out, o.to(out.dtype))", "o.to(out.dtype)"),
    # variances that overflow, narrow rows
    _fault(_LAYER_NORM, "variance that overflows left to PyTorch", 'if x.device.type == "cpu" and not', "if False and not"),
    _fault(_LAYER_NORM, "bias forgotten in repaired rows", "repaired if shift is None else repaired + shift", "repaired"),
    _fault(_LAYER_NORM, "narrow gradients by PyTorch", "    if z.shape[1] <= NARROW:\n", "    if False:\n"),
    _fault(_NARROW, "narrow rows saved in half precision", "if x.shape[-1] > NARROW or", "if True or"),
    _fault(_NARROW, "rows of two columns not narrow", "NARROW = 8\n", "NARROW = 1\n"),
    _fault(_EMBEDDING, "narrow tables summed in half precision", "trainable = widened(source, inputs_embeds,", "trainable = (inputs_embeds,"),
    # activations at their ends
    _fault(_LINEAR, "far GELU left to PyTorch", " or _is_far(pre)", ""),
    _fault(_LINEAR, "NaN hides what is far", "not pre.amax() < 0.25 *", "pre.amax() >= 0.25 *"),
    _fault(_LINEAR, "far slope of tanh GELU left to PyTorch", "pre.clamp(-1e4, 1e4)", "pre"),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/ops/test_attention.py",
        "tests/ops/test_attention_layouts.py",
        "tests/ops/test_layer_norm.py",
        "tests/ops/test_embedding.py",
        "tests/ops/test_linear.py",
        "-k",
        "aten and (nan or numbers_that_are_none or overflows or one_column or ends or (error_rule and (x1- or x2- or x3- or x2)))",
    ),
    timeout_s=300.0,
)
