"""Choosing backends: the table, pins, gaps, `explain`."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch

from fastbert import testing
from fastbert.backends import aten, cpu, reference
from fastbert.ops import linear_norm as linear_norm_op
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.ops.linear_norm import linear_norm
from fastbert.runtime import dispatch
from fastbert.runtime.table import INFERENCE_ONLY, ROWS, TABLE, call_kinds, rows_kind
from fastbert.testing import serving
from tests.support.fake_backends import FLOATS, fake_backend, run

pytestmark = pytest.mark.usefixtures("clean_tables")

FIRST = next(
    b
    for b in TABLE["cpu"]["linear"]
    if dispatch.unsupported_reason(b, "linear", "cpu", torch.float32) is None
)


@pytest.fixture
def calls(monkeypatch):
    """Names of the launchers called, in order, as "backend.function"."""
    seen = []
    for backend in (aten, cpu, reference):
        for function in ("linear_fwd", "linear_bwd", "layer_norm_fwd"):
            launch = getattr(backend, function)

            label = f"{backend.__name__.rsplit('.', 1)[1]}.{function}"

            def spy(*args, launch=launch, label=label):
                seen.append(label)
                return launch(*args)

            monkeypatch.setattr(backend, function, spy)
    dispatch._resolved.clear()
    return seen


# --- the table ----------------------------------------------------------------------------------------------


def test_every_line_of_the_table_is_of_known_ops_and_backends_and_ends_in_reference():
    for lines in TABLE.values():
        assert {name for name in lines if " " not in name} == set(dispatch.OPS)
        for line, names in lines.items():
            assert line.split()[0] in dispatch.OPS
            kind = " ".join(line.split()[1:]).removesuffix("half").strip()
            words = kind.split()
            assert kind == "" or words[-1] in ("activation", "gated", "relative", "training", *ROWS)
            assert words[:-1] in ([], ["activation"])
            if words and words[-1] in ROWS:
                # a call of fewer rows must not fall back to the line of all
                assert all(line.replace(words[-1], word) in lines for word in ROWS)
            assert names[-1] == "reference"
            assert set(names) <= set(dispatch.BACKENDS)
            # `proving.to_check` counts on it
            own = [name for name in reversed(dispatch.SELF_CHECKED) if name in names]
            assert [name for name in names if name in own] == own
            for name in names:
                assert line.split()[0] in dispatch.backend_module(name).DTYPES


def test_the_narrowest_line_counts(monkeypatch, calls):
    x, w = torch.ones(1, 2), torch.ones(3, 2)
    lines = {"linear": ("cpu", "aten", "reference"), "linear half": ("aten", "reference")}
    monkeypatch.setitem(TABLE, "cpu", lines | {"linear activation": ("reference",)})
    assert call_kinds("linear", "cpu") == ("", "activation")
    assert call_kinds("packing", "cpu") == ("",)
    kinds = "", "activation", "activation few", "activation some", "activation training", "training"
    assert call_kinds("linear", "cuda") == (*kinds[:5], "gated", kinds[5])
    assert call_kinds("attention", "cuda") == ("", "relative", "training")
    assert dispatch.ranking("linear_fwd", "cpu", torch.float16) == ("aten", "reference")
    assert dispatch.ranking("linear_fwd activation", "cpu", torch.float16) == ("reference",)
    # a call in training, or of few rows, has the line of one in inference where there is none of its own
    assert dispatch.ranking("linear_fwd activation few", "cpu", torch.float16) == ("reference",)
    assert dispatch.ranking("linear_fwd activation training", "cpu", torch.float16) == ("reference",)
    assert dispatch.ranking("linear_fwd training", "cpu", torch.float16) == ("aten", "reference")
    monkeypatch.setitem(TABLE["cpu"], "linear activation training", ("cpu", "reference"))
    assert dispatch.ranking("linear_bwd activation training", "cpu", torch.float16) == ("cpu", "reference")
    del TABLE["cpu"]["linear activation training"]
    # a device without a table
    assert dispatch.ranking("linear_fwd", "xpu", torch.float16) == ("aten", "reference")
    linear(x.half(), w.half())
    linear(x.half(), w.half(), activation="gelu")
    linear(x, w, activation="gelu")
    y = linear(x.requires_grad_(), w, activation="gelu")
    z = linear(x, w)
    y.sum().backward()
    z.sum().backward()
    first = "cpu" if FIRST == "cpu" else "aten"
    assert calls == [
        "aten.linear_fwd",
        "reference.linear_fwd",
        "reference.linear_fwd",
        "reference.linear_fwd",
        f"{first}.linear_fwd",
        "reference.linear_bwd",
        f"{first}.linear_bwd",
    ]
    rows = {(c.op, c.dtype): c.backend for c in serving.choices("cpu")}
    assert rows["linear", "bfloat16"] == "aten"
    assert rows["linear activation", "bfloat16"] == "reference"


@pytest.mark.parametrize(
    ("rows", "word"), [(0, " few"), (1, " few"), (32, " few"), (33, " some"), (256, " some"), (257, "")]
)
@pytest.mark.parametrize("training", [False, True])
def test_few_rows_are_told_in_inference(noted, rows, word, training):
    asked = noted(dispatch, "_serving", lambda call, *rest: call)
    assert rows_kind(rows) == word
    x, w = torch.ones(rows, 1, 2, requires_grad=training), torch.ones(3, 2)
    linear(x, w, activation="relu")
    linear(x, w)
    assert asked == [f"linear_fwd activation{' training' if training else word}", "linear_fwd"]
    asked.clear()
    linear_norm(x.detach(), w, None, torch.ones(rows, 1, 3), torch.ones(3))
    linear_norm_op.pays(x.detach().flatten(1).half(), 3)
    assert asked == [f"linear_norm_fwd{word}"] * 2


def test_the_next_function_is_that_of_the_backend_behind(monkeypatch):
    """For calls that a kernel cannot take; neither a pin nor a self-check under way changes it."""
    monkeypatch.setitem(TABLE["cpu"], "linear", ("cpu", "aten", "reference"))
    cpu_device, key = torch.device("cpu"), ("linear_fwd", "cpu", torch.device("cpu"), torch.float32)
    with dispatch.trial(linear="cpu"):
        assert dispatch.next_function("cpu", "linear_bwd", cpu_device, torch.float32) is aten.linear_bwd
    with dispatch.use_backend(linear="cpu"):
        assert dispatch.next_function("cpu", "linear_fwd", cpu_device, torch.float32) is aten.linear_fwd
        assert dispatch._resolved[key] is aten.linear_fwd
    first = dispatch.next_function("aten", "linear_fwd activation", cpu_device, torch.float32)
    assert first is dispatch.backend_module(FIRST if FIRST != "aten" else "reference").linear_fwd
    monkeypatch.setitem(TABLE["cpu"], "linear", ("cpu",))
    with pytest.raises(dispatch.BackendError, match="no backend serves op 'linear'"):
        dispatch.next_function("cpu", "linear_fwd", cpu_device, torch.float16)


def test_a_pin_holds_for_every_part_of_an_op(calls, monkeypatch):
    monkeypatch.setitem(TABLE["cpu"], "linear activation", ("reference",))
    with dispatch.use_backend(linear="aten"):
        linear(torch.ones(1, 2), torch.ones(3, 2), activation="relu")
    assert calls == ["aten.linear_fwd"]


def test_a_forward_only_kernel_trains_through_the_next_backend(monkeypatch):
    served = []
    module = fake_backend(
        monkeypatch, layer_norm_fwd=lambda *args: served.append("triton") or aten.layer_norm_fwd(*args)
    )
    del module.layer_norm_bwd
    x = torch.randn(2, 4, requires_grad=True)
    layer_norm(x.detach(), torch.ones(4))  # the check
    served.clear()
    monkeypatch.setattr(
        aten, "layer_norm_bwd", lambda *args, bwd=aten.layer_norm_bwd: served.append("aten") or bwd(*args)
    )
    layer_norm(x, torch.ones(4)).square().sum().backward()
    assert served == ["triton", "aten"]
    assert x.grad is not None


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_reference_and_aten_have_every_op_in_every_dtype(backend):
    module = dispatch.backend_module(backend)
    assert set(module.DTYPES) == set(dispatch.OPS)
    for op in dispatch.OPS:
        assert set(FLOATS) <= set(module.DTYPES[op])
        assert dispatch.unsupported_reason(backend, op, "cpu", torch.float32) is None
        functions = (f"{op}_fwd", f"{op}_bwd")
        for function in functions[:1] if op in INFERENCE_ONLY else functions:
            assert callable(getattr(module, function))


@pytest.mark.sweep
def test_the_table_of_gpus_trains_a_model(monkeypatch):
    """In Triton's interpreter: its kernels where the table has them, else aten's backward."""
    from fastbert import BertModel, EncoderConfig
    from fastbert.backends import triton

    monkeypatch.setitem(TABLE, "cpu", TABLE["cuda"])
    if triton.available("cpu") is not None:
        pytest.skip(f"no interpreter here: {triton.available('cpu')}")
    served = []
    for name in ("attention_fwd", "embedding_fwd", "layer_norm_fwd", "layer_norm_bwd", "packing_fwd"):
        launch = getattr(triton, name)
        monkeypatch.setattr(triton, name, lambda *args, f=launch, n=name: served.append(n) or f(*args))
    torch.manual_seed(0)
    config = dict(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config |= dict(intermediate_size=48, max_position_embeddings=16, hidden_dropout_prob=0.0)
    model = BertModel(EncoderConfig(**config, attention_probs_dropout_prob=0.0)).train()
    ids = torch.randint(1, 50, (3, 9))
    mask, weights = torch.arange(9) < torch.tensor([9, 1, 5])[:, None], torch.randn(3, 9, 32)

    def gradients():
        model.zero_grad()
        (model(ids, attention_mask=mask).last_hidden_state * weights).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastbert")  # every self-check passes
        ours = gradients()
    assert {"attention_fwd", "embedding_fwd", "layer_norm_fwd", "layer_norm_bwd"} <= set(served)
    with dispatch.use_backend("reference"):
        theirs = gradients()
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        # the gradient of the key's bias is only rounding
        torch.testing.assert_close(
            ours[name], grad, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


# --- pins ---------------------------------------------------------------------------------------------------


def test_pins_nest_and_an_op_stands_before_all(calls):
    x, w = torch.ones(1, 2), torch.ones(3, 2)
    with dispatch.use_backend("aten"):
        with dispatch.use_backend(linear="reference"):
            linear(x, w)
            layer_norm(x, torch.ones(2))
            with dispatch.use_backend("aten"):  # the pin of one op still wins
                linear(x, w)
            with contextlib.suppress(KeyError), dispatch.use_backend("reference", linear="aten"):
                linear(x, w)
                layer_norm(x, torch.ones(2))
                raise KeyError
        linear(x, w)
    linear(x, w)
    assert dispatch._pins == {}
    assert calls == [
        "reference.linear_fwd",
        "aten.layer_norm_fwd",
        "reference.linear_fwd",
        "aten.linear_fwd",
        "reference.layer_norm_fwd",
        "aten.linear_fwd",
        f"{FIRST}.linear_fwd",
    ]


def test_a_pin_reaches_the_thread_that_runs_backward(calls):
    x, w = torch.ones(1, 2, requires_grad=True), torch.ones(3, 2)
    with dispatch.use_backend("reference"):
        y = linear(x, w).sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert calls == ["reference.linear_fwd", "reference.linear_bwd"]


def test_unknown_names():
    for args, per_op, message in (
        (("cudnn",), {}, "unknown backend 'cudnn'; expected one of reference, aten"),
        ((), {"linear": "mkl"}, "unknown backend 'mkl'"),
        ((), {"softmax": "aten"}, "unknown op 'softmax'; expected one of attention"),
        (("",), {}, "unknown backend ''"),
    ):
        with pytest.raises(ValueError, match=message), dispatch.use_backend(*args, **per_op):
            pass
    assert dispatch._pins == {}
    with pytest.raises(ValueError, match="backend: unknown name 'os'"):
        dispatch.backend_module("os")
    with pytest.raises(ValueError, match="op: unknown op 'gemm'"):
        testing.cases("gemm")


def test_a_pinned_gap_names_op_backend_reason_and_alternatives(monkeypatch):
    module = fake_backend(monkeypatch)
    module.DTYPES = {"layer_norm": (torch.float32,)}
    x = torch.ones(2, 4, requires_grad=True)
    with dispatch.use_backend("triton"):
        with pytest.raises(dispatch.BackendError, match="alternatives: reference, aten") as error:
            run(torch.float64)
        text = "use_backend('triton'): op 'layer_norm' cannot run on cpu in float64: does not store float64"
        assert text in str(error.value)
        with pytest.raises(dispatch.BackendError, match="has no kernel for this op"):
            linear(torch.ones(1, 2), torch.ones(3, 2))
        del module.layer_norm_bwd
        y = layer_norm(x, torch.ones(4)).sum()
        with pytest.raises(dispatch.BackendError, match="has no layer_norm_bwd"):
            y.backward()
        module.available = lambda device_type: "no compiler"
        with pytest.raises(dispatch.BackendError, match="no compiler"):
            run()


# --- explain ------------------------------------------------------------------------------------------------


def test_explain_says_what_is_missing_and_what_is_unverified(monkeypatch):
    module = fake_backend(monkeypatch)

    def why():
        return next(c for c in serving.choices("cpu") if c.op == "layer_norm" and c.dtype == "float32")

    assert why().backend == "aten"
    assert why().why == "triton: to be self-checked at first use"
    run()
    assert (why().backend, why().why) == ("triton", "first in the table")
    module.available = lambda device_type: "not installed"
    assert (why().backend, why().why) == ("aten", "triton: not installed")


def test_autocast_is_off_inside_a_backend(noted):
    serving = dispatch.backend_module(FIRST)
    states = noted(serving, "linear_fwd", lambda *args: torch.is_autocast_enabled("cpu"))
    dispatch._resolved.clear()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(torch.ones(1, 2), torch.ones(3, 2))
        assert torch.is_autocast_enabled("cpu")
    assert states == [False]
    assert y.dtype == torch.bfloat16
