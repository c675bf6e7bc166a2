"""Times of a GPU without the host's share, on a stream in simulated time."""

from __future__ import annotations

import pytest

from fastbert.testing import speed
from fastbert.testing.device_time import MOST_SPIN_MS, TRIES, DeviceClock
from tests.support.stand_in_stream import Stream


def row(stream, host_ms, device_ms):
    """Calls of one kernel each, as `DeviceClock` wants them, and how many were made each time."""
    made = []

    def run(count):
        made.append(count)
        for _ in range(count):
            stream.kernel(host_ms, device_ms)

    return run, made


@pytest.mark.parametrize("cycles_per_ms", [0.3e6, 2e6, 2.9e6])
@pytest.mark.parametrize(("host_ms", "device_ms"), [(0.1, 0.01), (0.01, 0.2), (0.1, 0.0999)])
def test_the_time_is_the_devices_at_any_clock(monkeypatch, cycles_per_ms, host_ms, device_ms):
    stream = Stream(cycles_per_ms).install(monkeypatch)
    run, made = row(stream, host_ms, device_ms)
    found = DeviceClock().sample(run, 40)
    assert found.ms == pytest.approx(device_ms)
    assert found.host_ms == pytest.approx(host_ms)
    assert (found.count, found.launch_bound) == (40, False)
    assert set(made) == {40}


def test_the_spin_is_kept_for_the_next_sample(monkeypatch):
    stream = Stream().install(monkeypatch)
    run, made = row(stream, 0.1, 0.01)
    clock = DeviceClock()
    assert clock.once(run, 40).launch_bound
    assert not clock.once(run, 4).launch_bound  # which are enqueued within the shortest spin
    stream.spins.clear(), made.clear()
    clock.sample(run, 40)
    assert len(made) == 2
    clock.sample(run, 40)
    assert len(made) == 3
    assert stream.spins == pytest.approx([0.5, 6.0, 6.0])
    ready = DeviceClock()
    ready.spin_for(4.0)
    ready.sample(run, 40)
    assert len(made) == 4


def test_a_full_queue_makes_fewer_calls(monkeypatch):
    stream = Stream(room=100).install(monkeypatch)
    run, made = row(stream, 0.005, 0.002)
    clock = DeviceClock()
    clock.spin_ms = MOST_SPIN_MS
    found = clock.sample(run, 300)
    assert made == [300, 150, 75]
    assert (found.count, found.launch_bound) == (75, False)
    assert found.ms == pytest.approx(0.002)
    fixed = clock.sample(run, 300, fewer=False)
    assert (fixed.count, fixed.launch_bound) == (300, True)


def test_calls_that_wait_for_the_device_are_tried_a_few_times(monkeypatch):
    stream = Stream().install(monkeypatch)
    calls = []

    def run(count):
        calls.append(count)
        for _ in range(count):
            stream.kernel(0.1, 0.01)
            stream.wait()

    clock = DeviceClock()
    clock.spin_for(MOST_SPIN_MS)
    found = clock.sample(run, 2)
    assert found.launch_bound
    assert calls == [2, 1]
    assert clock.sample(run, 1).launch_bound
    assert calls == [2, 1, 1]
    calls.clear()
    assert DeviceClock().sample(run, 1000).launch_bound
    assert len(calls) == TRIES
    clock.spin_for(1e6)
    clock.once(lambda count: None, 1)
    assert max(stream.spins) == MOST_SPIN_MS


def test_a_self_check_times_the_device_and_keeps_the_hosts_time(monkeypatch):
    stream = Stream().install(monkeypatch)
    made = []
    timed = speed._Timed(lambda: made.append(1) or stream.kernel(0.1, 0.01), {"layer_norm": "aten"}, False)
    assert len(made) == 5
    assert timed.count == int(speed.ENQUEUE_MS / 0.1)
    for _ in range(3):
        timed.sample()
    assert timed.medians() == (pytest.approx(0.01), pytest.approx(0.1))
    # the spin is right at the first sample
    assert len(made) == 5 + 3 * timed.count
    slow = speed._Timed(lambda: stream.kernel(0.01, 1.5), {"layer_norm": "aten"}, False)
    assert slow.count == 2
    slow.sample()
    assert slow.medians() == (pytest.approx(1.5), pytest.approx(0.01))
