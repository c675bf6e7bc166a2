"""The self-check of a backend at its first use."""

from __future__ import annotations

import threading
import time
import warnings
from unittest import mock

import pytest
import torch

from fastbert import testing
from fastbert.backends import aten, cpu, reference
from fastbert.ops.layer_norm import LayerNormInputs, layer_norm, storage_dtype
from fastbert.ops.linear import linear
from fastbert.runtime import dispatch
from fastbert.testing import checking, error_rule, proving, serving, verdict_keys, verdicts
from fastbert.testing.verdict_keys import Unit
from tests.support.fake_backends import fake_backend, next_process, run

pytestmark = pytest.mark.usefixtures("clean_tables")

# --- what a self-check runs ---------------------------------------------------------------------------------


def test_a_gpus_check_has_cases_of_its_own_and_calls_twice(monkeypatch):
    seen = []
    monkeypatch.setattr(
        error_rule, "run_case", lambda case, *_, calls, **options: seen.append((case, calls)) or []
    )
    for op in dispatch.OPS:
        for device, more, calls in (("cpu", [], 1), ("cuda", testing.gpu_cases(op), 2)):
            seen.clear()
            assert testing.self_check(op, "aten", torch.device(device), torch.float32) is None
            assert seen == [(case, calls) for case in testing.small_cases(op) + more]


@pytest.mark.sweep
@pytest.mark.parametrize("op", [op for op in dispatch.OPS if testing.gpu_cases(op)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_what_a_gpu_is_checked_with_is_fair(op, dtype):
    for case in testing.gpu_cases(op):
        for row in testing.run_case(case, "reference", dtype, backward=op in ("layer_norm", "embedding")):
            assert row.passed, (row.case, row.quantity, row.reason)


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "of_linear"), [((9, 0), 132, 3), ((10, 0), 148, 3), ((8, 6), 28, 2)]
)
def test_a_gpus_check_meets_the_configs_of_real_work(capability, multiprocessors, of_linear):
    pytest.importorskip("triton")
    from fastbert.kernels import attention, feed_forward, linear, tuning

    device = tuning.Device("a GPU without a table", capability, multiprocessors)
    dtype = torch.bfloat16
    cases = testing.small_cases("linear") + testing.gpu_cases("linear")
    met = {linear.heuristic(2 ** tuning.bucket(c.rows), c.out_features, dtype, True, device) for c in cases}
    ladder = linear.ladder(dtype, True, capability)
    assert ladder[0] in met
    assert len(met & set(ladder)) >= of_linear
    cases = testing.small_cases("feed_forward") + testing.gpu_cases("feed_forward")
    met = {feed_forward.heuristic(c.rows, c.inner, dtype, c.inner % 8 == 0, device) for c in cases}
    assert ladder[0] in met
    assert len(met & set(ladder)) >= of_linear
    cases = testing.small_cases("attention") + testing.gpu_cases("attention")
    met = set()
    for c in cases:
        buckets = tuning.bucket(c.max_seqlen), tuning.bucket(c.total * c.nheads)
        kind = attention.extras_of(bool(c.bias), c.dropout_p > 0, c.probs)
        met.add(attention.config_for(c.headdim, dtype, kind, *buckets, device))
    for kind in ("", "dropout"):
        assert set(attention.ladder(64, dtype, kind, capability)) <= met


# --- self-check ---------------------------------------------------------------------------------------------


def counted(monkeypatch):
    """(op, backend) of every self-check that runs."""
    checked, check = [], testing.self_check
    monkeypatch.setattr(error_rule, "self_check", lambda *args: checked.append(args[:2]) or check(*args))
    return checked


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


class TritonError(Exception):
    """It has the name of the base class of the errors of Triton's compiler."""


class OutOfResources(TritonError):
    pass


def changed(change):
    """aten's forward with another output."""

    def fwd(*args):
        y, *rest = aten.layer_norm_fwd(*args)
        return change(y), *rest

    return fwd


no_memory = mock.Mock(side_effect=OutOfResources("shared memory"))
FAULTS = {
    "y: max error": {"layer_norm_fwd": changed(lambda y: y + 0.1)},
    "NaN": {"layer_norm_fwd": changed(lambda y: y * float("nan"))},
    "dx: max error": {"layer_norm_bwd": lambda *args: tuple(t * 1.1 for t in aten.layer_norm_bwd(*args))},
    "OutOfResources: shared memory": {"layer_norm_fwd": no_memory},
    "ZeroDivisionError: by zero": {"layer_norm_fwd": mock.Mock(side_effect=ZeroDivisionError("by zero"))},
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_bad_backend_is_dropped_with_one_warning(monkeypatch, text):
    fake_backend(monkeypatch, **FAULTS[text])
    said = f"triton kernel of 'layer_norm' failed its self-check on cpu in float32.*{text}"
    with pytest.warns(RuntimeWarning, match=said) as caught:
        y = run()
    assert len(caught) == 1
    assert torch.equal(y, aten.layer_norm_fwd(LayerNormInputs(torch.ones(2, 16), torch.ones(16)), False)[0])
    dispatch._resolved.clear()
    with warnings.catch_warnings(action="error"):
        run()  # the verdict is remembered: no second check, no second warning
    line = next(c for c in serving.choices("cpu") if c.op == "layer_norm" and c.dtype == "float32")
    assert line.backend == "aten"
    assert text in line.why
    checked = counted(monkeypatch)
    next_process()
    with pytest.warns(RuntimeWarning, match=said) as caught:
        run()
    assert len(caught) == 1
    if text.startswith("Zero"):  # an error may be the machine's: the next process tries again
        assert len(checked) == 1
    else:
        assert checked == []
        assert "`fastbert warmup --again` checks anew" in str(caught[0].message)


def test_a_failure_in_one_dtype_leaves_the_others(monkeypatch):
    def fault(inputs, save, *rounded):
        if storage_dtype(inputs) == torch.bfloat16:
            raise RuntimeError("no bfloat16 here")
        return aten.layer_norm_fwd(inputs, save, *rounded)

    fake_backend(monkeypatch, layer_norm_fwd=fault)
    with pytest.warns(RuntimeWarning, match="no bfloat16 here"):
        run(torch.bfloat16)
    with warnings.catch_warnings(action="error"):
        run(torch.float32)
    lines = {c.dtype: c.backend for c in serving.choices("cpu") if c.op == "layer_norm"}
    assert lines["bfloat16"] == "aten"
    assert lines["float32"] == "triton"


def test_a_broken_context_is_said_and_kept(monkeypatch):
    fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    fake_backend(monkeypatch, layer_norm_fwd=mock.Mock(side_effect=fault))
    monkeypatch.setattr(checking, "_context_lost", lambda device: True)
    with pytest.raises(dispatch.BackendError, match=r"broke the CUDA context.*illegal memory access.*anew"):
        run()
    monkeypatch.setattr(checking, "_context_lost", lambda device: False)
    next_process()
    checked = counted(monkeypatch)
    with pytest.warns(RuntimeWarning, match="illegal memory access"):
        run()
    assert checked == []


def test_a_context_is_lost_where_waiting_for_the_device_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=RuntimeError("CUDA error")))
    assert checking._context_lost(torch.device("cuda"))
    assert not checking._context_lost(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not checking._context_lost(torch.device("cuda"))


def test_a_check_runs_whatever_state_the_caller_is_in(monkeypatch):
    states = []

    def backward(*args):
        states.append(
            (
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                # else a GPU's backward runs in a thread without the trial
                torch._C._is_multithreading_enabled(),
            )
        )
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
    verdicts.forget(verdict_keys.key_of(Unit("layer_norm", "triton", torch.float32), torch.device("cpu")))
    states.clear()
    w.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        layer_norm(x, w)
    assert states
    assert set(saved) <= {(2, 4), (4,), (2,)}  # tensors of the op, none of the check
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
    assert not dispatch._resolved  # and nothing is cached that could hide the trial
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
    assert (checked, served, dispatch._resolved) == ([], [], {})  # another backend served this one call
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


def test_a_check_that_takes_long_is_told_of(monkeypatch):
    def slow(*args):
        time.sleep(0.05)
        return aten.layer_norm_fwd(*args)

    fake_backend(monkeypatch, layer_norm_fwd=slow)
    monkeypatch.setattr(checking, "SLOW_SECONDS", 0.01)
    with pytest.warns(RuntimeWarning, match="layer_norm.* has run for 0 s. If it hangs, end the process"):
        run()


def test_a_stopped_wait_leaves_the_death_of_a_hanging_kernel(monkeypatch):
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
    key = verdict_keys.key_of(Unit("layer_norm", "triton", torch.float32), torch.device("cpu"))
    assert (verdicts.load(key).outcome, verdicts.load(key).deaths) == ("killed", 1)
    run()  # by another backend, without a second check that would hang too
    line = next(c for c in serving.choices("cpu") if c.op == "layer_norm" and c.dtype == "float32")
    assert (line.backend, line.why) == ("aten", "triton: its self-check was stopped before it ended")
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "fastbert-check-layer_norm":
            join(thread, 20)
    assert verdicts.load(key) is None  # it has ended with an error of the machine's


def test_a_pin_skips_the_check(monkeypatch):
    fake_backend(monkeypatch)
    monkeypatch.setattr(error_rule, "self_check", lambda *args: pytest.fail("checked"))
    with dispatch.use_backend("triton"):
        run()
