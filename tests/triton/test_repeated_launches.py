"""Repeated launches: distinguished as by Triton, and run as by Triton."""

from __future__ import annotations

import random
import types

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from fastbert.kernels import launch as launches
from fastbert.runtime import streams

CUDA = types.SimpleNamespace(type="cuda", index=0)
NUMBERS = (0, 1, 2, 3, 15, 16, 17, 32, 48, -1, -16, -3, 2**31 - 1, 2**31, 2**31 + 16, -(2**31))
NUMBERS += (-(2**31) - 1, -(2**31) - 16, 2**40, 2**40 + 1, 2**62)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


def _many(a_ptr, b_ptr, c_ptr, stride, other, rows, eps, N: tl.constexpr, FLAG: tl.constexpr):
    pass


def _double(x_ptr, y_ptr, rows, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < rows) * factor, mask=at < rows)


def kernel(function=_many) -> JITFunction:
    """Compiled, not interpreted, whatever the environment says."""
    return JITFunction(function, do_not_specialize=("rows",))


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Forget earlier launches; the device is 0, its stream 7."""
    assert triton.__version__.startswith(launches.REPEATED), (
        "look at this Triton's JITFunction.run, then add it"
    )
    monkeypatch.setattr(launches, "_forms", {})
    monkeypatch.setattr(streams, "current_device", lambda: 0)
    monkeypatch.setattr(launches, "current_stream", lambda index: 7 + index)


# --- keys ---------------------------------------------------------------------------------------------------


def random_argument(rng: random.Random, memory: dict) -> object:
    if rng.random() < 0.4:
        return memory[rng.choice(DTYPES)][rng.choice((0, 1, 2, 4, 8, 16)) :]
    return rng.choice((None, 0.5, 1.0, True, False, *NUMBERS))


@pytest.mark.sweep
def test_a_key_tells_apart_what_triton_does():
    rng, function = random.Random(0), kernel()
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    memory = {dtype: torch.zeros(64, dtype=dtype) for dtype in DTYPES}
    ours, theirs, launched = {}, set(), 0
    for _ in range(6000):
        # around one call: few differences between launches are the hard case
        args = [memory[torch.float32], memory[torch.bfloat16], None, 16, 1, 8, 0.5]
        for i in rng.sample(range(7), rng.choice((0, 1, 1, 2))):
            args[i] = random_argument(rng, memory)
        if rng.random() < 0.3:
            args.append(rng.choice((1, 2)))
        config = dict(N=rng.choice((16, 32)), FLAG=rng.choice((True, False)), num_warps=rng.choice((4, 8)))
        if len(args) == 8:
            del config["N"]
        form = launches._form(function, tuple(args), config)
        assert form.split is not None
        key, values = form.split(0, *args)
        told = (*map(type, args), *config, *config.values(), *key)
        bound, specialization, options = bind(*args, **config)
        truth = (tuple(specialization), tuple(options.items()))
        assert ours.setdefault(told, truth) == truth
        theirs.add(truth)
        launched += 1
        # what the compiled kernel gets: Triton's arguments, tensors by their address
        expected = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in bound.values()]
        assert [*values, *form.tail] == expected
    # keys may be finer, but not so fine that nothing is ever known
    assert len(theirs) <= len(ours) < 2 * len(theirs) < launched


@pytest.mark.parametrize(
    "argument",
    [torch.nn.Parameter, lambda t: t.as_subclass(type("Mine", (torch.Tensor,), {})), lambda t: (1, 2)],
)
def test_what_is_not_a_plain_tensor_or_number_goes_to_triton(argument):
    """Parameters are plain."""
    value = argument(torch.zeros(4))
    form = launches._form(kernel(), (value, None, None, 1, 1, 1, 0.5), {"N": 1, "FLAG": True})
    assert (form.split is not None) == (type(value) is torch.nn.Parameter)


# --- launches -----------------------------------------------------------------------------------------------


class Driver:
    """The place of Triton's driver without a GPU: compiles for sm_90, and records what would be launched."""

    def __init__(self):
        self.launched = []
        self.launcher_cls = self._launcher
        self.utils = self

    def _launcher(self, source, metadata):
        return lambda *args: self.launched.append((source.constants, args))

    def get_current_device(self):
        return 0

    def get_current_stream(self, index):
        return 7 + index

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def load_binary(self, *args):
        return 1, 2, 0, 0, 1024

    def get_device_properties(self, index):
        return {"max_shared_mem": 232448}

    def unload_module(self, module):
        pass


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return driver


def as_passed(arguments: tuple) -> list:
    """What a launcher got, without hooks, which Triton passes on even where they do nothing."""
    constants, args = arguments
    kernel_args = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args[9:]]
    return [sorted(constants), *args[:6], *kernel_args]


def test_a_repeated_launch_is_what_triton_launches(driver):
    """The same function on the same grid and stream with the same arguments."""
    function, x = kernel(_double), torch.zeros(70)
    calls = [
        ((5,), (x, x, 70, 0.5)),
        ((5, 2), (x, x, 71, 0.25)),
        ((5, 2, 3), (x[1:], x, 70, 2.0)),
        ((4,), (x, x[1:], 70, 2.0)),
        ((4,), (x.half(), x, 16, 2.0)),
    ]
    for _ in range(2):
        for grid, args in calls:
            function[grid](*args, BLOCK=16, num_warps=2, enable_fp_fusion=True)
    expected, driver.launched = driver.launched, []
    for _ in range(2):
        for grid, args in calls:
            launches.launch(function, grid, CUDA, *args, BLOCK=16, num_warps=2)
    assert len(driver.launched) == len(expected) == 10
    assert list(map(as_passed, driver.launched)) == list(map(as_passed, expected))
    # the second round, and the second launch of round one, were not Triton's: no hooks at all
    own = [args[7] is None and args[8] is None for _, args in driver.launched]
    assert own == [False, True, False, False, False, *[True] * 5]


class StandIn:
    """A compiled kernel that records its launches."""

    function, packed_metadata = 2, (4, 1, 0)

    def __init__(self):
        self.launched = []

    def run(self, *args):
        self.launched.append(args)


@pytest.fixture
def repeated(monkeypatch):
    """(launch once, how often Triton launched, the stand-in), after a first launch."""
    function, stand_in, by_triton = kernel(), StandIn(), []
    monkeypatch.setattr(launches, "CompiledKernel", StandIn)

    def run(*args, grid, warmup, **config):
        by_triton.append(grid)
        return stand_in

    function.run = run
    x = torch.zeros(4)

    def once(device=CUDA):
        launches.launch(function, (3,), device, x, x, None, 1, 1, 1, 0.5, N=1, FLAG=True)
        return len(by_triton), len(stand_in.launched)

    assert once() == (1, 0)
    assert once() == (1, 1)
    return once, function


def test_hooks_see_every_launch(repeated, monkeypatch):
    once, function = repeated
    function.add_pre_run_hook(lambda *args, **config: None)
    assert once() == (2, 1)
    function.pre_run_hooks.clear()
    assert once() == (2, 2)
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook = lambda metadata: None  # noqa: E731
        chain.add(hook)
        before = once()
        chain.remove(hook)
        after = once()
        assert after == (before[0], before[1] + 1)
    assert once() == (4, 5)
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
        assert once() == (5, 5)


def test_what_changes_kernels_goes_to_triton(repeated, monkeypatch):
    """Knobs, another version of Triton, and another device."""
    once, _ = repeated
    for place, name, value in (
        (knobs.runtime, "debug", True),
        (knobs.runtime, "add_stages_inspection_hook", lambda *args: None),
        (launches, "_is_repeated", False),
    ):
        by_triton, repeats = once()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert once() == (by_triton + 1, repeats)
    by_triton = once()[0]
    monkeypatch.setattr(streams, "current_device", lambda: 1)
    other = types.SimpleNamespace(type="cuda", index=1)
    assert [once(other)[0], once(other)[0]] == [by_triton + 1] * 2


def test_what_is_kept_has_an_end(monkeypatch):
    monkeypatch.setattr(launches, "CompiledKernel", StandIn)
    monkeypatch.setattr(launches, "MOST_KEPT", 3)
    function = kernel()
    function.run = lambda *args, grid, warmup, **config: StandIn()
    for rows in range(10):
        launches.launch(function, (3,), CUDA, None, None, None, 1, 1, rows << 31, 0.5, N=1, FLAG=True)
        launches.launch(function, (3,), CUDA, None, None, None, 1, 1, 1, 0.5, N=rows, FLAG=True)
        assert len(launches._forms) <= 3
        assert all(len(form.known) <= 3 for form in launches._forms.values())
