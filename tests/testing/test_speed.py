"""A kernel that is right but slower than the next backend does not serve, and the times are kept."""

from __future__ import annotations

import warnings

import pytest
import torch

from fastbert.backends import aten
from fastbert.ops.attention import attention
from fastbert.ops.feed_forward import feed_forward
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.runtime import dispatch
from fastbert.runtime.table import INFERENCE_ONLY, ROWS, TABLE, rows_kind
from fastbert.testing import checking, error_rule, proving, serving, speed, verdict_keys, verdicts
from fastbert.testing.device_time import Sample
from fastbert.testing.op_cases.layer_norm import LayerNormCase
from fastbert.testing.op_cases.linear import LinearCase
from fastbert.testing.verdict_keys import Unit
from fastbert.testing.verdicts import Time, Verdict
from tests.support.fake_backends import FLOATS, fake_backend, next_process, run

CPU = torch.device("cpu")
REAL = {name: getattr(aten, name) for name in ("layer_norm_fwd", "layer_norm_bwd")}
ATTENTION = {name: getattr(aten, name) for name in ("attention_fwd", "attention_bwd")}


class Clock:
    """A clock that only work on it moves, in seconds."""

    def __init__(self):
        self.now = 0.0

    def lasting(self, function, seconds):
        """`function`, which lasts so long."""

        def call(*args):
            self.now += seconds
            return function(*args)

        return call

    # what `DeviceClock` does; the host is not timed

    def spin_for(self, host_ms):
        pass

    def once(self, run, count):
        begin = self.now
        run(count)
        return Sample((self.now - begin) * 1e3 / count, 0.0, count, False)

    sample = once


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time on a CPU by a clock on which every pass of aten lasts a millisecond; no verdict is known."""
    clock = Clock()
    monkeypatch.setattr(checking, "TIMED", ("cuda", "cpu"))
    monkeypatch.setattr(speed, "SIZES", ((2,), (3, 4), (8,)))
    monkeypatch.setattr(speed, "SAMPLES", 1)
    monkeypatch.setattr(speed, "DeviceClock", lambda: clock)
    monkeypatch.setattr(verdicts, "found", {})
    monkeypatch.setattr(dispatch, "_resolved", {})
    for name in ("layer_norm_fwd", "layer_norm_bwd"):
        monkeypatch.setattr(aten, name, clock.lasting(REAL[name], 1e-3))
    return clock


def serving_now(call="layer_norm_fwd"):
    return dispatch.serving_backend(call, CPU, torch.float32)


def verdict_of(name, op="layer_norm"):
    return verdicts.load(verdict_keys.key_of(Unit(op, name, torch.float32), CPU))


def planted(monkeypatch, clock, forward, backward):
    """A kernel whose passes last so many milliseconds."""
    return fake_backend(
        monkeypatch,
        layer_norm_fwd=clock.lasting(REAL["layer_norm_fwd"], forward * 1e-3),
        layer_norm_bwd=clock.lasting(REAL["layer_norm_bwd"], backward * 1e-3),
    )


@pytest.mark.parametrize(
    ("forward", "backward", "ratio"),
    [(4, 1, (4 * 4 * 2.5) ** (1 / 3)), (1, 7, 4 ** (1 / 3)), (1.1, 1, (1.1 * 1.1 * 1.05) ** (1 / 3))],
)
def test_a_slower_kernel_does_not_serve_and_nobody_is_warned(monkeypatch, clock, forward, backward, ratio):
    planted(monkeypatch, clock, forward, backward)
    with warnings.catch_warnings(action="error"):
        run()
        next_process()
        run()  # nor by the verdict on disk
    assert serving_now() == "aten"
    found = verdict_of("triton")
    assert found.outcome == "slower"
    assert found.reason.startswith(f"slower than aten: {ratio:.2f} x its time (geometric mean of 9)")
    assert verdicts.ratio_of(found.times) == pytest.approx(ratio, rel=1e-3)
    # two cases forward, one in training, three sizes
    assert [t.passes for t in found.times] == ["forward", "forward", "training"] * 3
    assert len({t.case for t in found.times}) == 9
    for t in found.times:
        ms = (forward, 1.0) if t.passes == "forward" else (forward + backward, 2.0)
        assert (t.ms, t.other, t.other_ms) == (pytest.approx(ms[0]), "aten", pytest.approx(ms[1]))
    line = next(c for c in serving.choices("cpu") if c.op == "layer_norm" and c.dtype == "float32")
    assert (line.backend, line.why) == ("aten", f"triton: {found.reason}")


def test_a_faster_kernel_serves_with_its_times(monkeypatch, clock):
    planted(monkeypatch, clock, 0.5, 0.5)
    run()
    assert serving_now() == "triton"
    found = verdict_of("triton")
    assert found.passed
    assert verdicts.ratio_of(found.times) == pytest.approx(0.5)
    assert serving.beside(found, "layer_norm", "cpu") == ", 0.50 x the time of aten"
    assert {(t.host_ms, t.other_host_ms) for t in found.times} == {(0.0, 0.0)}


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    fake_backend(monkeypatch, layer_norm_fwd=lambda *args: tuple(t + 1 for t in aten.layer_norm_fwd(*args)))
    monkeypatch.setattr(speed, "compare", lambda *args: pytest.fail("timed"))
    with pytest.warns(RuntimeWarning, match="y: max error"):
        run()


def test_a_size_that_does_not_fit_is_left_out(monkeypatch):
    def fwd(inputs, save, *rounded):
        if inputs.x.shape == (7, 768):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return aten.layer_norm_fwd(inputs, save, *rounded)

    fake_backend(monkeypatch, layer_norm_fwd=fwd)
    times = speed.compare("layer_norm", "triton", CPU, torch.float32)
    assert {t.case.split("x")[0] for t in times} == {"2", "8"}


def test_only_calls_that_the_table_gives_to_the_kernel_are_timed():
    def other(case, training=False, dtype=torch.bfloat16, backend="triton"):
        return speed._next(backend, case, torch.device("cuda", 0), dtype, training)

    assert other(LinearCase(4, 8, 8)) is None
    assert other(LinearCase(4, 8, 8, "gelu")) == "aten"
    assert other(LinearCase(4, 8, 8, "gelu"), dtype=torch.float32) is None
    assert other(LayerNormCase(4, 8)) == "aten"
    assert other(LayerNormCase(4, 8), training=True) == "aten"
    assert other(LayerNormCase(4, 8), backend="cuda") == "aten"
    assert other(LinearCase(4, 8, 8), backend="cuda") is None
    assert other(LayerNormCase(4, 8), dtype=torch.float64) == "aten"


def test_without_a_backward_training_is_not_timed(monkeypatch):
    monkeypatch.delattr(fake_backend(monkeypatch), "layer_norm_bwd")
    times = speed.compare("layer_norm", "triton", CPU, torch.float32)
    assert {t.passes for t in times} == {"forward"}


def test_every_kernel_of_a_gpu_has_something_to_time(monkeypatch):
    from fastbert.backends import triton

    monkeypatch.setattr(triton, "available", lambda device_type: None)
    gpu, other = torch.device("cuda", 0), speed._next
    for op in dispatch.OPS:
        for _, backend, dtype in proving.to_check(gpu, [op]):
            calls = speed._calls(op, (128,), dtype)
            passes = {training for case, training in calls if other(backend, case, gpu, dtype, training)}
            trains = dtype.is_floating_point and op not in INFERENCE_ONLY
            assert passes == ({False, True} if trains else {False}), (op, dtype)


def both_kernels(monkeypatch, clock, cuda, triton):
    """CUDA's kernel ranks before Triton's; each pass lasts so many milliseconds. Returns who is checked."""
    for name, ms in (("triton", triton), ("cuda", cuda)):
        passes = {each: clock.lasting(REAL[each], ms * 1e-3) for each in REAL}
        fake_backend(monkeypatch, name, **passes)
    monkeypatch.setitem(TABLE["cpu"], "layer_norm", ("cuda", "triton", "aten", "reference"))
    checked, check = [], checking.check
    monkeypatch.setattr(
        checking, "check", lambda unit, *args: (checked.append(unit.backend), check(unit, *args))[1]
    )
    return checked


@pytest.mark.parametrize(
    ("cuda", "triton", "beside", "serves"),
    [
        (0.4, 0.5, "triton", "cuda"),
        (0.6, 0.5, "triton", "triton"),  # faster than aten is not enough
        (0.6, 2.0, "aten", "cuda"),  # Triton's is slower than aten: it would not serve
        (1.5, 2.0, "aten", "aten"),
    ],
)
def test_a_kernel_is_timed_beside_the_one_that_serves_without_it(
    monkeypatch, clock, cuda, triton, beside, serves
):
    checked = both_kernels(monkeypatch, clock, cuda, triton)
    run()
    assert checked == ["triton", "cuda"]
    found = verdict_of("cuda")
    assert {t.other for t in found.times} == {beside}
    assert verdicts.ratio_of(found.times) == pytest.approx(cuda / (triton if beside == "triton" else 1.0))
    assert serving_now() == serves
    # a second process finds both verdicts
    next_process()
    assert serving_now() == serves
    assert checked == ["triton", "cuda"]


def test_a_wrong_kernel_is_nothing_to_be_timed_beside(monkeypatch, clock):
    both_kernels(monkeypatch, clock, 0.9, 0.5)
    wrong = lambda *args: tuple(t + 1 for t in REAL["layer_norm_fwd"](*args))  # noqa: E731
    monkeypatch.setattr(dispatch.backend_module("triton"), "layer_norm_fwd", wrong)
    run()
    assert "y: max error" in verdict_of("triton").reason
    assert {t.other for t in verdict_of("cuda").times} == {"aten"}
    assert serving_now() == "cuda"


def test_a_process_of_its_own_checks_the_lower_kernel_first(monkeypatch, clock):
    both_kernels(monkeypatch, clock, 0.4, 0.5)
    lower, unit = (Unit("layer_norm", name, torch.float32) for name in ("triton", "cuda"))
    due = proving._due(torch.float32, CPU)
    assert due[:2] == [lower, unit]
    assert due.count(lower) == 1
    verdicts.store(verdict_keys.key_of(Unit("layer_norm", "triton", torch.float32), CPU), Verdict(None))
    assert proving._due(torch.float32, CPU)[0] == unit


def test_what_slower_means():
    for times, slower in (
        ([], False),
        ([(1.02, 1.0)], False),
        ([(1.04, 1.0)], True),
        ([(2.0, 1.0), (0.5, 1.0)], False),
        ([(2.0, 1.0), (0.6, 1.0)], True),
        ([(0.2, 1.0), (4.0, 1.0)], False),
    ):
        found = tuple(Time("x", "forward", ms, "aten", other) for ms, other in times)
        assert (speed.why_slower(found) is not None) is slower
        assert speed.why_slower(found, "training") is None
        assert speed.why_never("packing", "cuda", found) == speed.why_slower(found)


# --- calls in training are judged apart where the table has a line for them ---------------------------------


def attention_kernels(monkeypatch, clock, cuda, triton):
    """(forward, backward) milliseconds of each kernel of attention; each pass of aten lasts 10."""
    monkeypatch.setattr(aten, "attention_fwd", clock.lasting(ATTENTION["attention_fwd"], 10e-3))
    monkeypatch.setattr(aten, "attention_bwd", clock.lasting(ATTENTION["attention_bwd"], 10e-3))
    served = []
    for name, times in (("triton", triton), ("cuda", cuda)):
        module = fake_backend(monkeypatch, name)
        module.DTYPES = {"attention": FLOATS}
        for launcher, ms in zip(ATTENTION, times, strict=True):
            lasting = clock.lasting(ATTENTION[launcher], ms * 1e-3)
            noting = lambda *args, call=(name, launcher), f=lasting: served.append(call) or f(*args)  # noqa: E731
            setattr(module, launcher, noting)
    ranking = ("cuda", "triton", "aten", "reference")
    monkeypatch.setitem(TABLE["cpu"], "attention", ranking)
    monkeypatch.setitem(TABLE["cpu"], "attention training", ranking)
    monkeypatch.setitem(TABLE["cpu"], "layer_norm", ("aten", "reference"))
    return served


def attend(grad):
    qkv = torch.ones(4, 3, 1, 8, requires_grad=grad)
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    return attention(*qkv.unbind(1), cu_seqlens, 4)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("cuda", "triton", "inference", "training"),
    [
        ((1, 5), (2, 2), "cuda", "triton"),
        ((3, 1), (2, 5), "triton", "cuda"),
        # forward and backward together count
        ((3, 2), (2, 5), "triton", "cuda"),
        ((1, 2), (2, 2), "cuda", "cuda"),
        ((3, 3), (2, 2), "triton", "triton"),
        # faster than Triton's in training, which is slower than aten there; and nothing is faster than aten
        ((1, 15), (2, 22), "cuda", "cuda"),
        ((1, 25), (2, 22), "cuda", "aten"),
        ((1, 21), (2, 22), "cuda", "aten"),
    ],
)
def test_a_kernel_may_serve_in_inference_alone_or_in_training_alone(
    monkeypatch, clock, cuda, triton, inference, training
):
    served = attention_kernels(monkeypatch, clock, cuda, triton)
    for _ in range(2):
        with warnings.catch_warnings(action="error"):
            attend(grad=False)
            served.clear()
            attend(grad=False)
            assert served == ([] if inference == "aten" else [(inference, "attention_fwd")])
            served.clear()
            attend(grad=True).sum().backward()
        assert served == ([] if training == "aten" else [(training, launcher) for launcher in ATTENTION])
        with torch.no_grad():
            served.clear()
            attend(grad=True)
            assert served == ([] if inference == "aten" else [(inference, "attention_fwd")])
        rows = {c.op: c for c in serving.choices("cpu") if c.dtype == "float32" and "attention" in c.op}
        assert rows["attention"].backend == inference
        assert rows["attention training"].backend == training
        if "cuda" in (inference, training) and inference != training:
            slow = "attention" if training == "cuda" else "attention training"
            assert rows[slow].why.startswith(
                f"cuda: slower in {'forward' if slow == 'attention' else 'train'}"
            )
        # once more by the verdicts on disk
        next_process()


def test_the_places_are_those_of_the_backend_that_serves(monkeypatch, clock):
    from fastbert.ops.attention_places import attention_places

    attention_kernels(monkeypatch, clock, (1, 5), (2, 2))
    asked = []
    table = lambda cu_seqlens, *rest: asked.append(rest) or cu_seqlens  # noqa: E731
    monkeypatch.setattr(dispatch.backend_module("triton"), "attention_places", table, raising=False)
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    assert attention_places(cu_seqlens, 4, 4, torch.float32) is not None
    assert asked == [(4, 4)]
    with torch.no_grad():
        # CUDA's kernels have none here
        assert attention_places(cu_seqlens, 4, 4, torch.float32) is None


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("op", ["feed_forward", "layer_norm", "linear"])
def test_both_passes_of_training_ask_for_one_backend(noted, op, compiled):
    """Forward and backward are passed to `dispatch` as training, and a forward alone is not."""
    asked = noted(dispatch, "_serving", lambda call, *rest: call)
    x, w = torch.randn(3, 8), torch.randn(8, 8)
    call = {
        "feed_forward": lambda x: feed_forward(x, w, None, w, "gelu"),
        "layer_norm": lambda x: layer_norm(x, w[0], w[1]),
        "linear": lambda x: linear(x, w, activation="gelu"),
    }[op]
    call = torch.compile(call, backend="aot_eager") if compiled else call
    kind, few = (" activation", " few") if op == "linear" else ("", "")
    training = [f"{op}_{name}{kind} training" for name in ("fwd", "bwd")]
    for grad, expected in ((False, [f"{op}_fwd{kind}{few}"]), (True, training)):
        asked.clear()
        dispatch._resolved.clear()
        y = call(x.clone().requires_grad_(grad))
        if grad:
            y.sum().backward()
        assert [each for each in asked if each.startswith(f"{op}_")] == expected


# --- calls of few rows are judged apart where the table has lines for them ----------------------------------

LINEAR = {name: getattr(aten, name) for name in ("linear_fwd", "linear_norm_fwd")}


def few_rows_kernel(monkeypatch, clock, op, milliseconds, aten_ms=1.0):
    """A kernel of `op` that lasts as `milliseconds(rows)` says, in a table with lines for few rows."""
    launcher = f"{op}_fwd"

    def rows_of(args):
        return (args[0].x if isinstance(args[0], tuple) else args[0]).shape[0]

    def fwd(*args):
        clock.now += milliseconds(rows_of(args)) * 1e-3
        return LINEAR[launcher](*args)

    monkeypatch.setattr(aten, launcher, clock.lasting(LINEAR[launcher], aten_ms * 1e-3))
    module = fake_backend(monkeypatch)
    module.DTYPES = {op: FLOATS}
    setattr(module, launcher, fwd)
    kind = " activation" if op == "linear" else ""
    for line in (f"{op}{kind}", *(f"{op}{kind} {word}" for word in ROWS)):
        monkeypatch.setitem(TABLE["cpu"], line, ("triton", "aten", "reference"))
    monkeypatch.setitem(TABLE["cpu"], "layer_norm", ("aten", "reference"))
    monkeypatch.setattr(speed, "SIZES", ((128,), (300, 4)))
    return module


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("few", "some", "many"), [(0.5, 2, 2), (2, 0.5, 2), (2, 2, 0.5), (0.5, 0.5, 0.5), (2, 2, 2)]
)
def test_a_kernel_may_serve_for_some_numbers_of_rows_alone(monkeypatch, clock, few, some, many):
    few_rows_kernel(
        monkeypatch, clock, "linear", lambda rows: few if rows <= 32 else some if rows <= 256 else many
    )
    served = {}
    for _ in range(2):
        for rows, ms in ((1, few), (32, few), (33, some), (256, some), (257, many)):
            x, w = torch.ones(rows, 8), torch.ones(8, 8)
            linear(x, w, activation="gelu")
            before = clock.now
            linear(x, w, activation="gelu")
            served[rows] = "triton" if ms < 1 else "aten"
            assert clock.now - before == pytest.approx(min(ms, 1.0) * 1e-3)
            call = f"linear_fwd activation{rows_kind(rows)}"
            assert serving_now(call) == served[rows]
        # once more by the verdict on disk
        next_process()
    found = verdict_of("triton", "linear")
    assert found.outcome == ("slower" if (few, some, many) == (2, 2, 2) else "passed")
    passes = [t.passes for t in found.times if t.case.endswith("768x3072-gelu")]
    assert passes == ["forward of few rows", "forward of some rows", "forward"]
    words = dict(zip(passes, (few, some, many), strict=True))
    order = ("forward", "forward of few rows", "forward of some rows")
    assert speed.judged_passes("linear", "cpu") == order
    marks = {name: " (does not serve)" if found.passed and words[name] > 1 else "" for name in order}
    assert serving.beside(found, "linear", "cpu") == "".join(
        f", {name} {words[name]:.2f} x the time of aten{marks[name]}" for name in order
    )
    rows = {c.op: c.backend for c in serving.choices("cpu") if c.dtype == "float32"}
    for word, most in ((" few", 32), (" some", 256), ("", 257)):
        assert rows[f"linear activation{word}"] == served[most]


def test_an_op_that_stands_for_others_is_timed_beside_those(monkeypatch, clock):
    """A model would call a product and LayerNorm, each by what serves it, and not the op's next backend."""
    few_rows_kernel(monkeypatch, clock, "linear_norm", lambda rows: 2.4 if rows <= 32 else 2.6, aten_ms=9.0)
    monkeypatch.setattr(speed, "SIZES", ((128,), (300, 4), (700,)))
    monkeypatch.setattr(aten, "linear_fwd", clock.lasting(LINEAR["linear_fwd"], 1.5e-3))
    monkeypatch.setitem(TABLE["cpu"], "linear", ("aten", "reference"))
    for rows, pays in ((32, True), (33, False), (200, False)):
        kind = f"linear_norm_fwd{rows_kind(rows)}"
        expected = "triton" if pays else "aten"
        assert serving_now(kind) == expected, rows
    found = verdict_of("triton", "linear_norm")
    # two products of each size; 304 and 700 tokens are timed as 256, once
    assert [(t.case.split("x")[0], t.other) for t in found.times] == [
        (rows, "linear + layer_norm") for rows in ("32", "32", "128", "128", "256", "256")
    ]
    assert [t.other_ms for t in found.times] == [pytest.approx(2.5)] * 6


def test_what_an_op_stands_for_is_checked_before_it(monkeypatch, clock):
    module = few_rows_kernel(monkeypatch, clock, "linear_norm", lambda rows: 1.0)
    module.DTYPES = {"linear_norm": FLOATS, "layer_norm": FLOATS}
    monkeypatch.setitem(TABLE["cpu"], "layer_norm", ("triton", "aten", "reference"))
    unit, norm = (Unit(op, "triton", torch.float32) for op in ("linear_norm", "layer_norm"))
    assert (proving._lower(unit, CPU), proving._lower(norm, CPU)) == ([norm], [])
    verdicts.store(verdict_keys.key_of(Unit("layer_norm", "triton", torch.float32), CPU), Verdict(None))
    assert proving._lower(unit, CPU) == []


def test_what_an_op_stands_for_computes_the_same():
    for case in (c for op in dispatch.OPS for c in error_rule.cases(op) if c.parts):
        inputs = case.inputs(torch.float64, CPU)
        torch.testing.assert_close(case.in_parts(**inputs), case.oracle(**inputs))


@pytest.mark.parametrize("op", dispatch.OPS)
def test_what_is_timed_on_a_gpu_is_drawn_there(op):
    """The host takes seconds for all of it. Tensors of the meta device cannot be mixed with the host's."""
    for case, _ in speed._calls(op, (5, 3), torch.bfloat16):
        with speed.DrawnThere(torch.device("meta")):
            assert torch.randn(1).device.type == "meta"
            inputs = case.inputs(torch.bfloat16, torch.device("meta"))
        tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
        assert {tensor.device.type for tensor in tensors} == {"meta"}
