"""The picture of a GPU's time: kernels by kind, nothing lost, a bar per row."""

from __future__ import annotations

import pytest

from bench.lib.charts import gpu

KERNELS = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>": "products",
    "_linear_norm_kernel": "products",
    "void fastbert::cuda::attention_forward_kernel<fastbert::bf16, 64>": "attention",
    "void fastbert::cuda::(anonymous namespace)::dq_kernel<fastbert::bf16, 64>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>": (
        "norms and embeddings"
    ),
    "_embedding_fwd_kernel": "norms and embeddings",
    "void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl>": "activation",
    "_cross_entropy_bwd_kernel": "loss",
    "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizer>": "optimizer",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy>": "casts, copies, sums",
    "something else": gpu.OTHER,
}


@pytest.mark.parametrize(("kernel", "kind"), KERNELS.items())
def test_kernels_are_known_by_their_names(kernel, kind):
    assert gpu.kind_of(kernel) == kind


def row(passes: str, candidate: str, wall: float, busy: float) -> dict:
    kernels = [{"kernel": name, "us": 100.0, "launches": 1.0} for name in KERNELS]
    facts = {"status": "ok", "pass": passes, "model": "base", "workload": "full", "candidate": candidate}
    return facts | {"wall_ms": wall, "busy_ms": busy, "kernels": kernels}


def test_the_parts_of_a_bar_add_up_to_the_call():
    found = gpu.shares(row("forward", "fastbert-bf16", 3.0, 2.0))
    assert sum(found.values()) == pytest.approx(3.0)
    assert found[gpu.IDLE] == pytest.approx(1.0)
    assert found["products"] == pytest.approx(0.3)
    assert found[gpu.OTHER] == pytest.approx(2.0 - 0.1 * (len(KERNELS) - 1))
    # kernels that overlap take longer than the call
    assert gpu.shares(row("forward", "fastbert-bf16", 1.0, 1.3))[gpu.IDLE] == 0.0


def test_every_row_has_a_bar_that_names_it():
    pytest.importorskip("matplotlib")
    rows = [
        row(passes, who, 3.0, 2.0)
        for passes in ("forward", "training")
        for who in ("fastbert-bf16", "transformers-bf16")
    ]
    rows.append({"status": "error", "name": "breakdown-training-large-train"})
    environment = {"device": "GPU X", "torch": "2", "triton": "3"}
    figure = gpu.breakdown(
        {"rows": rows, "environment": environment, "commit": "a" * 40, "date": "2026-11-26"}
    )
    for axes in figure.axes:
        labels = [text.get_text() for text in axes.get_yticklabels()]
        assert labels == ["base full, fastbert", "base full, transformers"]
        assert sum(text.get_text() == "3 ms" for text in axes.texts) == 2
    assert "GPU X" in figure.get_suptitle()
