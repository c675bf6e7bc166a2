"""Encoder layers in one call: host code and kernels as nvcc compiled them, cuBLASLt played by a stand-in.

The stand-in (cuda/cublas_lt.cpp) refuses what csrc/cuda/cublas_lt.cu should not pass, and fills the scratch
memory with NaN.
"""

from __future__ import annotations

import pytest
import torch

from fastbert import testing
from fastbert.execution import launchers
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from fastbert.ops.encoder_layers import LayerStack, gap
from fastbert.runtime import dispatch
from fastbert.testing import error_rule
from fastbert.testing.op_cases.encoder_layers import CASES, LayersCase
from tests.ptx.emulator.cudart import extension


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_error_rule(case, dtype, emulated):
    rows = testing.run_case(case, "cuda", dtype)
    assert all(row.passed for row in rows), rows
    assert len(emulated.launches) > 0


def run(case, dtype=torch.bfloat16, **changes):
    with dispatch.use_backend("cuda"), torch.no_grad():
        return case.call(**case.inputs(dtype, "cpu") | changes)


# Many rows: the pass of an activation behind cuBLASLt's product, and the kernels for compute capability 9.0.
LARGE = [
    LayersCase((400, 150), 1, 64, 64, layers=1, activation="relu"),
    LayersCase((520, 30), 4, 64, 128, first_only=True),
]


@pytest.mark.parametrize("case", LARGE, ids=repr)
def test_many_rows_on_tensor_cores_of_warp_groups(case, emulated, monkeypatch):
    monkeypatch.setattr(emulated.backend.device, "has_group_products", lambda device: True)
    (row,) = testing.run_case(case, "cuda", torch.bfloat16)
    assert row.passed, row
    kernels = " ".join(launch.kernel for launch in emulated.launches)
    hopper = case.activation == "gelu"
    assert ("activation_kernel" in kernels) is not hopper
    assert ("attention_hopper" in kernels, "13hopper_kernel" in kernels) == (True, hopper)
    if hopper:  # the driver refuses every tensor map
        with emulated.without_maps():
            (row,) = testing.run_case(case, "cuda", torch.bfloat16)
        assert row.passed, row


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_products_that_add_residuals(case, dtype, emulated, monkeypatch):
    monkeypatch.setattr(emulated.backend.encoder_layers, "ADDS", True)
    rows = testing.run_case(case, "cuda", dtype)
    assert all(row.passed for row in rows), rows


@pytest.fixture
def clusters(emulated, monkeypatch):
    """Few rows have products by clusters, on a device of 132 multiprocessors."""
    monkeypatch.setattr(emulated.backend.encoder_layers, "CLUSTERS", True)
    monkeypatch.setattr(emulated.backend.device, "multiprocessors", lambda device: 132)


FEW = [case for case in CASES if case.headdim != 32 or case.layers > 1]
# several tiles of rows, and of columns; more of both; parts and rows' moments of all lengths
FEW += [
    LayersCase((70, 3), 2, 64, 520, layers=1),
    LayersCase((190, 66), 1, 32, 8, hidden=72, states=True),
    LayersCase((9,), 1, 64, 136, hidden=1096, last_eps=0.1),
]


@pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("case", FEW, ids=repr)
def test_few_rows_are_chained(case, dtype, emulated, clusters, monkeypatch):
    """All kernels but a call's first begin early. The bits are those of launches one after the other."""
    rows = testing.run_case(case, "cuda", dtype)
    assert all(row.passed for row in rows), rows
    emulated.launches.clear()
    found = run(case, dtype)
    assert [launch.chained for launch in emulated.launches] == [
        i > 0 for i in range(5 * case.layers + 1 + 2 * case.first_only)
    ]
    assert sum("cluster_hopper_kernel" in launch.kernel for launch in emulated.launches) == 4 * case.layers
    monkeypatch.setattr(emulated.backend.encoder_layers, "CHAINED", False)
    emulated.schedule, emulated.seed = "early", 1
    for one, other in zip(run(case, dtype), found, strict=True):
        assert torch.equal(one, other)
    assert not emulated.launches[-1].chained


@pytest.mark.parametrize("multiprocessors", (132, 1))
def test_norms_of_few_rows(multiprocessors, emulated, clusters, monkeypatch):
    """Rows far from zero whose sums are exact: their norm has LayerNorm's own error, in any parts."""
    monkeypatch.setattr(emulated.backend.device, "multiprocessors", lambda device: multiprocessors)
    case, dtype = LayersCase((5, 61), 1, 32, 8, hidden=1096, layers=1, eps=0.1, last_eps=3.0), torch.float16
    inputs = case.inputs(dtype, "cpu")
    for name in ("out_weight_0", "out_bias_0", "down_weight_0"):
        inputs[name].zero_()
    inputs["x"] = (torch.arange(66 * 1096).view(66, 1096) % 137 // 13 + 2030).to(dtype)
    inputs["x"][3] = 2047
    (found,), (eager,) = run(case, dtype, **inputs), case.eager(**inputs)
    (truth,) = case.oracle(**error_rule.with_grad(inputs, (), torch.float64))
    assert error_rule.compare(found, eager, truth, dtype)[-1] == ""


def test_few_rows_where_others_have_to(emulated, clusters):
    """Refused tensor maps; more rows than 256; float32; and the next call is not chained."""
    few = LayersCase((3, 8), 1, 32, 48)
    for after in (8, 4, 2, 0):  # two per product: the second layer's first, the first layer's third, …
        emulated.launches.clear()
        with emulated.without_maps(after):
            (row,) = testing.run_case(few, "cuda", torch.bfloat16)
        assert row.passed, row
    for case, dtype in ((few, torch.float32), (LayersCase((257,), 1, 32, 8, layers=1), torch.bfloat16)):
        run(case, dtype)
    assert not any("cluster" in launch.kernel or launch.chained for launch in emulated.launches)


def test_the_same_bits_in_every_order(emulated):
    case = LayersCase((7, 0, 21), 2, 32, 72, hidden=40, first_only=True, states=True)
    expected = run(case)
    for emulated.schedule, emulated.seed in (("early", 1), ("late", 2)):
        for one, other in zip(run(case), expected, strict=True):
            assert torch.equal(one, other)


def test_an_algorithm_is_asked_for_once_per_shape(emulated):
    products = extension().set_products
    case = LayersCase((3, 8), 1, 32, 48, layers=3)
    run(case)
    asked = products(1)
    run(case)
    assert products(1) == asked
    run(LayersCase((3, 9), 1, 32, 48, layers=3))
    assert products(1) == asked + 3  # 48 columns are a product of our own
    products(2)
    try:
        with pytest.raises(RuntimeError, match="cuBLASLt: has no algorithm for a product"):
            run(LayersCase((3, 10), 1, 32, 48))
    finally:
        products(1)


def test_what_the_kernels_do_not_have(emulated):
    def reason(case, **changes):
        given = {n: t for n, t in (case.inputs(torch.bfloat16, "cpu") | changes).items() if n[-1].isdigit()}
        with dispatch.use_backend("cuda"):
            return gap(case._stack(given), torch.device("cpu"))

    fine = LayersCase((3,), 1, 32, 48)
    assert reason(fine) is None
    assert "another size than 32, 64" in reason(LayersCase((3,), 1, 48, 48))
    assert "hidden size" in reason(LayersCase((3,), 1, 32, 48, hidden=36))
    assert "feed-forward" in reason(LayersCase((3,), 1, 32, 44))
    odd = torch.randn(33).to(torch.bfloat16)[1:]
    assert "on 16 bytes" in reason(fine, out_bias_1=odd)
    assert "on 16 bytes" in reason(fine, down_weight_0=torch.zeros(48, 32).bfloat16().T)
    with dispatch.use_backend("reference"):
        assert "no backend" in gap(fine._stack(fine.inputs(torch.bfloat16, "cpu")), torch.device("cpu"))


def test_a_model_by_kept_plans(emulated, monkeypatch, noted):
    """Its layers, with the outputs of all of them, and with first tokens alone; three calls of each."""
    monkeypatch.setattr(launchers, "on_gpu", lambda device: True)
    torch.manual_seed(0)
    config = EncoderConfig(
        model_type="bert",
        hidden_size=64,
        num_attention_heads=2,
        intermediate_size=96,
        num_hidden_layers=2,
        vocab_size=50,
    )
    model = AutoModel.from_config(config).eval().bfloat16()
    wide = AutoModel.from_config(config).eval().double()
    wide.load_state_dict(model.state_dict())
    eager = AutoModel.from_config(config).eval().bfloat16()
    eager.load_state_dict(model.state_dict())
    ids, mask = torch.randint(50, (3, 9)), torch.arange(9) < torch.tensor([[9], [2], [5]])
    called = noted(emulated.backend, "encoder_layers_fwd")
    dispatch._resolved.clear()
    for options in ({}, {"output_hidden_states": True}, {"first_token_only": True}):
        with torch.no_grad():
            with dispatch.use_backend("aten"):
                truth, other = (m(ids, mask, **options) for m in (wide, eager))
            for _ in range(3):
                with dispatch.use_backend(encoder_layers="cuda"):
                    found = model(ids, mask, **options)
                names = ("last_hidden_state", "pooler_output", "hidden_states")
                for one, two, three in (
                    triple
                    for name in names
                    for triple in zip(*(listed(getattr(o, name)) for o in (found, other, truth)), strict=True)
                ):
                    assert error_rule.compare(one, two, three, torch.bfloat16)[-1] == ""
    assert len(called) == 9


def listed(value):
    return [] if value is None else list(value) if isinstance(value, tuple) else [value]


def test_a_stack_of_other_layers_is_refused():
    (one, other) = (LayersCase((3,), 1, size, 48, layers=1) for size in (32, 64))
    stacks = [case._stack(case.inputs(torch.bfloat16, "cpu")) for case in (one, other)]
    assert len(LayerStack.joined([stacks[0], stacks[0]]).layers) == 2
    with pytest.raises(ValueError, match="stacks: expected 32 columns"):
        LayerStack.joined(stacks)
