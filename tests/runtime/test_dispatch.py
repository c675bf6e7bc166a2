"""Choosing backends: the table, pins, gaps, self-checks, `explain`."""

from __future__ import annotations

import threading
import time
import types
import warnings

import pytest
import torch

from fastbert import testing
from fastbert.backends import aten, cpu, reference
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.runtime import dispatch
from fastbert.testing import error_rule, proving, serving, verdicts

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FIRST = next(
    b
    for b in dispatch.TABLE["cpu"]["linear"]
    if dispatch.unsupported_reason(b, "linear", "cpu", torch.float32) is None
)


@pytest.fixture(autouse=True)
def clean_tables(tmp_path, monkeypatch):
    """Verdicts and resolved launchers of these tests must not outlive them."""
    monkeypatch.setenv("FASTBERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "_warned", False)
    known = dict(proving._verdicts)
    dispatch._resolved.clear()
    yield
    proving._verdicts.clear()
    proving._verdicts.update(known)
    dispatch._resolved.clear()


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


def fake_backend(monkeypatch, name="triton", **functions):
    """A module that stands for GPU backend `name`, first in the CPU's table for layer_norm."""
    module = types.ModuleType(f"fastbert.backends.{name}")
    module.DTYPES = {"layer_norm": FLOATS}
    module.available = lambda device_type: None
    module.layer_norm_fwd, module.layer_norm_bwd = aten.layer_norm_fwd, aten.layer_norm_bwd
    for key, value in functions.items():
        setattr(module, key, value)
    real = dispatch.backend_module
    monkeypatch.setattr(dispatch, "backend_module", lambda n: module if n == name else real(n))
    monkeypatch.setitem(dispatch.TABLE["cpu"], "layer_norm", (name, "aten", "reference"))
    dispatch._resolved.clear()
    return module


def run(dtype=torch.float32):
    return layer_norm(torch.ones(2, 16, dtype=dtype), torch.ones(16, dtype=dtype))


# --- the table ----------------------------------------------------------------------------------------------


def test_every_line_of_the_table_is_of_known_ops_and_backends_and_ends_in_reference():
    for lines in dispatch.TABLE.values():
        assert {name for name in lines if " " not in name} == set(dispatch.OPS)
        for line, names in lines.items():
            assert line.split()[0] in dispatch.OPS
            assert " ".join(line.split()[1:]) in ("", "half", "activation", "activation half")
            assert names[-1] == "reference"
            assert set(names) <= set(dispatch.BACKENDS)
            for name in names:
                assert line.split()[0] in dispatch.backend_module(name).DTYPES


@pytest.mark.parametrize(
    ("function", "dtype", "first"),
    [
        ("linear_fwd", torch.bfloat16, "aten"),
        ("linear_fwd activation", torch.bfloat16, "triton"),
        ("linear_fwd activation", torch.float16, "triton"),
        ("linear_fwd activation", torch.float32, "aten"),
        ("linear_bwd", torch.bfloat16, "aten"),
        ("linear_bwd activation", torch.bfloat16, "triton"),
        ("linear_bwd activation", torch.float32, "aten"),
        ("attention_fwd", torch.float32, "triton"),
        ("packing_fwd", torch.int64, "triton"),
        ("packing_bwd", torch.bool, "triton"),
        ("embedding_fwd", torch.float32, "triton"),
        ("cross_entropy_fwd", torch.float32, "triton"),
    ],
)
def test_the_line_of_a_call_on_a_gpu(function, dtype, first):
    assert dispatch.ranking(function, "cuda", dtype)[0] == first
    assert dispatch.ranking(function, "xpu", dtype) == ("aten", "reference")


def test_the_narrowest_line_counts(monkeypatch, calls):
    x, w = torch.ones(1, 2), torch.ones(3, 2)
    lines = {"linear": ("cpu", "aten", "reference"), "linear half": ("aten", "reference")}
    monkeypatch.setitem(dispatch.TABLE, "cpu", lines | {"linear activation": ("reference",)})
    assert dispatch.call_kinds("linear", "cpu") == ("", "activation")
    assert dispatch.call_kinds("packing", "cpu") == ("",)
    assert dispatch.ranking("linear_fwd", "cpu", torch.float16) == ("aten", "reference")
    assert dispatch.ranking("linear_fwd activation", "cpu", torch.float16) == ("reference",)
    linear(x.half(), w.half())
    linear(x.half(), w.half(), activation="gelu")
    linear(x, w, activation="gelu")
    y = linear(x.requires_grad_(), w, activation="gelu")
    z = linear(x, w)
    y.sum().backward()
    z.sum().backward()
    first = "cpu" if FIRST == "cpu" else "aten"
    assert calls == [
        "aten.linear_fwd", "reference.linear_fwd", "reference.linear_fwd", "reference.linear_fwd",
        f"{first}.linear_fwd", "reference.linear_bwd", f"{first}.linear_bwd",
    ]  # fmt: skip
    rows = {(c.op, c.dtype): c.backend for c in serving.choices("cpu")}
    assert rows["linear", "bfloat16"] == "aten"
    assert rows["linear activation", "bfloat16"] == "reference"


def test_a_pin_holds_for_every_part_of_an_op(calls, monkeypatch):
    monkeypatch.setitem(dispatch.TABLE["cpu"], "linear activation", ("reference",))
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
        for function in functions[:1] if op in dispatch.INFERENCE_ONLY else functions:
            assert callable(getattr(module, function))


def test_every_op_has_cases_and_small_cases():
    for op in dispatch.OPS:
        cases = testing.cases(op)
        assert len({case.id for case in cases}) == len(cases)
        assert all(case.op == op for case in cases)
        assert 1 <= len(testing.small_cases(op)) <= 4


def test_the_table_of_gpus_trains_a_model(monkeypatch):
    """In Triton's interpreter: its kernels where the table has them, backward by aten where there is none."""
    from fastbert import BertModel, EncoderConfig
    from fastbert.backends import triton

    monkeypatch.setitem(dispatch.TABLE, "cpu", dispatch.TABLE["cuda"])
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
        # the key's bias has no gradient but for rounding
        torch.testing.assert_close(
            ours[name], grad, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


# --- pins ---------------------------------------------------------------------------------------------------


def test_use_backend_pins_and_restores(calls):
    x, w = torch.ones(1, 2), torch.ones(3, 2)
    linear(x, w)
    with dispatch.use_backend("reference"):
        linear(x, w)
        with dispatch.use_backend("aten"):
            linear(x, w)
        linear(x, w)
    linear(x, w)
    assert calls == [f"{b}.linear_fwd" for b in (FIRST, "reference", "aten", "reference", FIRST)]


def test_pins_nest_and_an_op_stands_before_all(calls):
    x, w = torch.ones(1, 2), torch.ones(3, 2)
    with dispatch.use_backend("aten"):
        with dispatch.use_backend(linear="reference"):
            linear(x, w)
            layer_norm(x, torch.ones(2))
            with dispatch.use_backend("aten"):  # the pin of one op still stands before
                linear(x, w)
            with dispatch.use_backend("reference", linear="aten"):
                linear(x, w)
                layer_norm(x, torch.ones(2))
        linear(x, w)
    assert calls == [
        "reference.linear_fwd", "aten.layer_norm_fwd", "reference.linear_fwd", "aten.linear_fwd",
        "reference.layer_norm_fwd", "aten.linear_fwd",
    ]  # fmt: skip


def test_pins_are_undone_by_an_exception():
    with pytest.raises(KeyError), dispatch.use_backend("reference"):
        raise KeyError
    assert dispatch._pins == {}


def test_a_pin_reaches_the_thread_that_runs_backward(calls):
    x, w = torch.ones(1, 2, requires_grad=True), torch.ones(3, 2)
    with dispatch.use_backend("reference"):
        y = linear(x, w).sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert calls == ["reference.linear_fwd", "reference.linear_bwd"]


@pytest.mark.parametrize(
    ("args", "per_op", "message"),
    [
        (("cudnn",), {}, "unknown backend 'cudnn'; expected one of reference, aten"),
        ((), {"linear": "mkl"}, "unknown backend 'mkl'"),
        ((), {"softmax": "aten"}, "unknown op 'softmax'; expected one of attention"),
        (("",), {}, "unknown backend ''"),
    ],
)
def test_unknown_names(args, per_op, message):
    with pytest.raises(ValueError, match=message), dispatch.use_backend(*args, **per_op):
        pass
    assert dispatch._pins == {}


def test_unknown_names_elsewhere():
    with pytest.raises(ValueError, match="backend: unknown name 'os'"):
        dispatch.backend_module("os")
    with pytest.raises(ValueError, match="op: unknown op 'gemm'"):
        testing.cases("gemm")


def test_a_pinned_gap_names_op_backend_reason_and_alternatives(monkeypatch):
    module = fake_backend(monkeypatch)
    module.DTYPES = {"layer_norm": (torch.bfloat16,)}
    with (
        dispatch.use_backend("triton"),
        pytest.raises(dispatch.BackendError) as error,
    ):
        run(torch.float64)
    text = str(error.value)
    assert (
        "use_backend('triton'): op 'layer_norm' cannot run on cpu in float64: does not store float64" in text
    )
    assert "alternatives: reference, aten" in text
    module.available = lambda device_type: "no compiler"
    with dispatch.use_backend("triton"), pytest.raises(dispatch.BackendError, match="no compiler"):
        run(torch.bfloat16)


def test_a_pinned_backend_without_the_op_or_the_function(monkeypatch):
    module = fake_backend(monkeypatch)
    with (
        dispatch.use_backend("triton"),
        pytest.raises(dispatch.BackendError, match="has no kernel for this op"),
    ):
        linear(torch.ones(1, 2), torch.ones(3, 2))
    del module.layer_norm_bwd
    x = torch.ones(2, 4, requires_grad=True)
    with dispatch.use_backend("triton"):
        y = layer_norm(x, torch.ones(4)).sum()
        with pytest.raises(dispatch.BackendError, match="has no layer_norm_bwd"):
            y.backward()


# --- what a self-check runs ---------------------------------------------------------------------------------


def test_a_gpus_check_has_cases_of_its_own(monkeypatch):
    seen = []
    monkeypatch.setattr(error_rule, "run_case", lambda case, *args, **options: seen.append(case) or [])
    for op in dispatch.OPS:
        seen.clear()
        assert testing.self_check(op, "aten", torch.device("cpu"), torch.float32) is None
        assert seen == testing.small_cases(op)
        seen.clear()
        testing.self_check(op, "aten", torch.device("cuda", 0), torch.float32)
        assert seen == testing.small_cases(op) + testing.gpu_cases(op)


@pytest.mark.parametrize("op", [op for op in dispatch.OPS if testing.gpu_cases(op)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_gpu_is_checked_with_is_fair(op, dtype):
    for case in testing.gpu_cases(op):
        for row in testing.run_case(case, "reference", dtype, backward=op in ("layer_norm", "embedding")):
            assert row.passed, (row.case, row.quantity, row.reason)


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "of_linear"),
    [
        ((9, 0), 132, 3),
        ((9, 0), 78, 2),
        ((10, 0), 148, 3),
        ((8, 0), 108, 2),
        ((8, 6), 28, 2),
        ((12, 0), 170, 2),
    ],
)
def test_a_gpus_check_meets_the_configs_of_real_work(capability, multiprocessors, of_linear):
    pytest.importorskip("triton")
    from fastbert.kernels import attention, linear, tuning

    device = tuning.Device("a GPU without a table", capability, multiprocessors)
    dtype = torch.bfloat16
    cases = testing.small_cases("linear") + testing.gpu_cases("linear")
    met = {linear.heuristic(2 ** tuning.bucket(c.rows), c.out_features, dtype, True, device) for c in cases}
    ladder = linear.ladder(dtype, True, capability)
    assert ladder[0] in met
    assert len(met & set(ladder)) >= of_linear
    cases = testing.small_cases("attention") + testing.gpu_cases("attention")
    met = set()
    for c in cases:
        buckets = tuning.bucket(c.max_seqlen), tuning.bucket(c.total * c.nheads)
        met.add(attention.config_for(c.headdim, dtype, bool(c.bias or c.dropout_p), *buckets, device))
    assert set(attention.ladder(64, dtype, False, capability)) <= met


# --- self-check ---------------------------------------------------------------------------------------------


def counted(monkeypatch):
    """(op, backend) of every self-check that runs."""
    checked, check = [], testing.self_check
    monkeypatch.setattr(error_rule, "self_check", lambda *args: checked.append(args[:2]) or check(*args))
    return checked


def next_process():
    """What a new process knows: nothing but what is on disk."""
    proving._verdicts.clear()
    dispatch._resolved.clear()


def test_a_good_backend_serves_after_its_check_and_is_checked_once(monkeypatch):
    served = []

    def good(*args):
        served.append(1)
        return aten.layer_norm_fwd(*args)

    fake_backend(monkeypatch, layer_norm_fwd=good)
    checked = counted(monkeypatch)
    run()
    assert served, "the backend was not used"
    before = len(served)
    dispatch._resolved.clear()
    run()
    assert len(served) == before + 1
    assert checked == [("layer_norm", "triton")]
    next_process()
    run()
    assert len(served) == before + 2
    assert len(checked) == 1  # the verdict is on disk


def test_without_a_disk_every_process_checks(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTBERT_CACHE", str(tmp_path / "file"))
    fake_backend(monkeypatch)
    checked = counted(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
        run(torch.bfloat16)
        next_process()
        run()
    (one,) = caught
    assert "GPU kernels are checked again in every process" in str(one.message)
    assert len(checked) == 3


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            lambda *args: (aten.layer_norm_fwd(*args)[0] + 0.1, *aten.layer_norm_fwd(*args)[1:]),
            "y: max error",
        ),
        (
            lambda *args: (aten.layer_norm_fwd(*args)[0] * float("nan"), *aten.layer_norm_fwd(*args)[1:]),
            "NaN",
        ),
        (lambda *args: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
    ids=["wrong", "nan", "crash"],
)
def test_a_bad_backend_is_dropped_with_one_warning(monkeypatch, fault, text):
    fake_backend(monkeypatch, layer_norm_fwd=fault)
    with pytest.warns(
        RuntimeWarning, match="triton kernel of 'layer_norm' failed its self-check on cpu in float32"
    ) as caught:
        y = run()
    assert len(caught) == 1
    assert text in str(caught[0].message)
    assert torch.equal(
        y, aten.layer_norm_fwd(torch.ones(2, 16), torch.ones(16), *(None,) * 3, 1e-12, 0.0, None, 0, False)[0]
    )
    dispatch._resolved.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()  # the verdict is remembered: no second check, no second warning
    line = next(c for c in serving.choices("cpu") if c.op == "layer_norm" and c.dtype == "float32")
    assert line.backend == "aten"
    assert text in line.why
    checked = counted(monkeypatch)
    next_process()
    with pytest.warns(RuntimeWarning, match="failed its self-check on cpu in float32") as caught:
        run()
    assert len(caught) == 1
    assert text in str(caught[0].message)
    if text.startswith("Zero"):  # an error may be the machine's: the next process tries again
        assert len(checked) == 1
    else:
        assert checked == []
        assert "`fastbert warmup --again` checks anew" in str(caught[0].message)


def test_a_bad_backward_drops_the_backend_too(monkeypatch):
    fake_backend(monkeypatch, layer_norm_bwd=lambda *args: tuple(t * 1.1 for t in aten.layer_norm_bwd(*args)))
    with pytest.warns(RuntimeWarning, match="dx: max error"):
        run()


def test_a_failure_in_one_dtype_leaves_the_others(monkeypatch):
    def fault(x, *args):
        if x.dtype == torch.bfloat16:
            raise RuntimeError("no bfloat16 here")
        return aten.layer_norm_fwd(x, *args)

    fake_backend(monkeypatch, layer_norm_fwd=fault)
    with pytest.warns(RuntimeWarning, match="no bfloat16 here"):
        run(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(torch.float32)
    lines = {c.dtype: c.backend for c in serving.choices("cpu") if c.op == "layer_norm"}
    assert lines["bfloat16"] == "aten"
    assert lines["float32"] == "triton"


class TritonError(Exception):
    """By its name the base class of what Triton's compiler raises."""


def test_code_that_does_not_compile_is_not_compiled_again(monkeypatch):
    class OutOfResources(TritonError):
        pass

    def fault(*args):
        raise OutOfResources("shared memory, Required: 300000")

    fake_backend(monkeypatch, layer_norm_fwd=fault)
    checked = counted(monkeypatch)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="OutOfResources: shared memory"):
            run()
        next_process()
    assert len(checked) == 1


def test_a_broken_context_is_said_and_kept(monkeypatch):
    def fault(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    fake_backend(monkeypatch, layer_norm_fwd=fault)
    monkeypatch.setattr(proving, "_context_lost", lambda device: True)
    with pytest.raises(dispatch.BackendError, match=r"broke the CUDA context.*illegal memory access.*anew"):
        run()
    monkeypatch.setattr(proving, "_context_lost", lambda device: False)
    next_process()
    checked = counted(monkeypatch)
    with pytest.warns(RuntimeWarning, match="illegal memory access"):
        run()
    assert checked == []


def test_a_context_is_lost_where_waiting_for_the_device_fails(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert proving._context_lost(torch.device("cuda"))
    assert not proving._context_lost(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not proving._context_lost(torch.device("cuda"))


def test_a_check_runs_whatever_state_the_caller_is_in(monkeypatch):
    states = []

    def backward(*args):
        states.append((
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch._C._is_multithreading_enabled(),  # else a GPU's backward runs in a thread without the trial
        ))  # fmt: skip
        return aten.layer_norm_bwd(*args)

    fake_backend(monkeypatch, layer_norm_bwd=backward)
    saved = []
    x, w = torch.ones(2, 4), torch.ones(4)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        layer_norm(x, w)
    assert states
    assert set(states) == {(False, False, False)}
    next_process()
    verdicts.forget(verdicts.key_of("layer_norm", "triton", torch.device("cpu"), torch.float32))
    states.clear()
    w.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        layer_norm(x, w)
    assert states
    assert set(saved) <= {(2, 4), (4,), (2,)}  # the op's own, none of the check's
    assert torch._C._is_multithreading_enabled()


def test_other_threads_never_meet_the_backend_on_trial(monkeypatch):
    inside, go_on, served = threading.Event(), threading.Event(), []

    def slow(*args):
        served.append(threading.current_thread().name)
        inside.set()
        assert go_on.wait(20)
        return aten.layer_norm_fwd(*args)

    fake_backend(monkeypatch, layer_norm_fwd=slow)
    done = []
    first = threading.Thread(target=lambda: done.append(run()))
    first.start()
    assert inside.wait(20)
    linear(torch.ones(1, 2), torch.ones(3, 2))  # another op does not wait
    assert not dispatch._resolved  # and nothing is kept that could hide the trial
    with dispatch.use_backend(layer_norm="aten"):
        run()  # a pin does not wait either
        assert set(served) == {"fastbert-check-layer_norm"}
    second = threading.Thread(target=lambda: done.append(run()), name="second")
    second.start()
    second.join(0.2)
    assert second.is_alive()  # waits for the verdict
    assert "second" not in served
    go_on.set()
    for thread in (first, second):
        thread.join(20)
    assert len(done) == 2
    assert "second" in served


def test_what_was_chosen_before_a_pin_is_not_kept_after_it(monkeypatch):
    real = dispatch._first_proven

    def pinned_meanwhile(*args):
        found = real(*args)
        with dispatch.use_backend("reference"):
            pass
        return found

    monkeypatch.setattr(dispatch, "_first_proven", pinned_meanwhile)
    run()
    assert dispatch._resolved == {}


def test_several_functions_are_those_of_the_one_backend_that_serves():
    key = (torch.device("cpu"), torch.float32)
    names, ops = ("layer_norm_fwd", "linear_fwd"), ("layer_norm", "linear")
    with dispatch.use_backend("aten"):
        assert dispatch.serving_functions(names, ops, *key) == (aten.layer_norm_fwd, aten.linear_fwd)
        assert dispatch.serving_functions(("linear_fwd", "no_such"), ops, *key) is None
    with dispatch.use_backend("aten", linear="reference"):
        assert dispatch.serving_functions(names, ops, *key) is None
        assert dispatch.serving_functions(names, ops[:1], *key) == (aten.layer_norm_fwd, aten.linear_fwd)
    with dispatch.use_backend("reference"):
        assert dispatch.serving_functions(names, ops, *key) == (
            reference.layer_norm_fwd,
            reference.linear_fwd,
        )


def test_a_devices_function_is_the_first_ranked_backends_whoever_serves(monkeypatch):
    def of(function, device="cpu"):
        return dispatch.device_function(function, "attention", torch.device(device), torch.float32)

    assert of("sequence_blocks") is cpu.sequence_blocks
    with dispatch.use_backend("aten"):
        assert of("sequence_blocks") is cpu.sequence_blocks
    assert of("no_such") is None
    assert of("sequence_blocks", "cuda") is None
    monkeypatch.setattr(reference, "own", len, raising=False)
    assert of("own") is len
    dispatch._resolved.clear()
    monkeypatch.setattr(aten, "own", max, raising=False)
    assert of("own") is max


def test_in_a_graph_capture_only_verdicts_that_are_known_count(monkeypatch):
    served = []
    fake_backend(monkeypatch, layer_norm_fwd=lambda *args: served.append(1) or aten.layer_norm_fwd(*args))
    checked = counted(monkeypatch)
    monkeypatch.setattr(proving, "_capturing", lambda device: True)
    run()
    assert (checked, served, dispatch._resolved) == ([], [], {})  # another backend served, for this once
    monkeypatch.setattr(proving, "_capturing", lambda device: False)
    run()
    assert checked
    assert served
    next_process()
    served.clear()
    monkeypatch.setattr(proving, "_capturing", lambda device: True)
    run()  # the verdict on disk counts
    assert len(checked) == 1
    assert served == [1]


def test_what_a_capture_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert proving._capturing(torch.device("cuda", 0))
    assert not proving._capturing(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not proving._capturing(torch.device("cuda", 0))


def test_a_check_that_takes_long_is_told_of(monkeypatch):
    def slow(*args):
        time.sleep(0.05)
        return aten.layer_norm_fwd(*args)

    fake_backend(monkeypatch, layer_norm_fwd=slow)
    monkeypatch.setattr(proving, "_SLOW_SECONDS", 0.01)
    with pytest.warns(RuntimeWarning, match="layer_norm.* has run for 0 s. If it hangs, end the process"):
        run()


def test_a_stopped_wait_leaves_the_marker_of_a_hanging_kernel(monkeypatch, tmp_path):
    go_on = threading.Event()
    fake_backend(monkeypatch, layer_norm_fwd=lambda *args: go_on.wait(20) and 1 / 0)
    join, waits = threading.Thread.join, []

    def interrupted(thread, timeout=None):
        if thread.name == "fastbert-check-layer_norm" and not waits:
            waits.append(timeout)
            raise KeyboardInterrupt
        join(thread, 0.01)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert len(list(tmp_path.glob("cache/self_checks/*.running"))) == 1
    run()  # by another backend, without a second check that would hang too
    line = next(c for c in serving.choices("cpu") if c.op == "layer_norm" and c.dtype == "float32")
    assert (line.backend, line.why) == ("aten", "triton: its self-check was stopped before it ended")
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "fastbert-check-layer_norm":
            join(thread, 20)
    assert not list(tmp_path.glob("cache/self_checks/*.running"))


def test_a_pin_skips_the_check(monkeypatch):
    fake_backend(monkeypatch)
    monkeypatch.setattr(error_rule, "self_check", lambda *args: pytest.fail("checked"))
    with dispatch.use_backend("triton"):
        run()


# --- explain ------------------------------------------------------------------------------------------------


def test_explain_has_a_line_for_every_op_and_dtype():
    lines = serving.choices("cpu")
    assert [(c.op, c.dtype) for c in lines] == [
        (op, str(dtype).removeprefix("torch.")) for op in dispatch.OPS for dtype in FLOATS
    ]
    for line in lines:
        assert line.device == "cpu"
        assert dispatch.unsupported_reason(line.backend, line.op, "cpu", getattr(torch, line.dtype)) is None
        assert line.why


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


def test_autocast_is_off_inside_a_backend(monkeypatch):
    states, serving = [], dispatch.backend_module(FIRST)
    launch = serving.linear_fwd
    monkeypatch.setattr(
        serving, "linear_fwd", lambda *args: states.append(torch.is_autocast_enabled("cpu")) or launch(*args)
    )
    dispatch._resolved.clear()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(torch.ones(1, 2), torch.ones(3, 2))
        assert torch.is_autocast_enabled("cpu")
    assert states == [False]
    assert y.dtype == torch.bfloat16
