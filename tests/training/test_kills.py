"""Runs that are killed and resumed: the SHA-256 of weights, moments and log are those of the unbroken run."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import resource
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fastbert.training.loop import Interrupted
from tests.support import lives, tiny_training
from tests.support.lives import copied, finished, life, newest_step
from tests.support.tiny_training import Classes, Numbered, trainer

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="cannot fork"), pytest.mark.sweep]


def plain(run: Path):
    return trainer(run, 24, save_every=1, keep=1)


def half(run: Path):
    return trainer(run, 24, save_every=2, dtype="fp16")


def bfloat(run: Path):
    return trainer(run, 24, save_every=2, dtype="bf16", log_every=3)


def ahead(run: Path):
    return trainer(run, 24, save_every=2, workers=2, tokens=40)


def fill(old, new):
    """New layer i is old layer i mod 2; everything else is copied."""
    state, count = dict(old.named_parameters()), len(old.model.bert.encoder.layer)
    for name, p in new.named_parameters():
        parts = name.split(".")
        if "layer" in parts:
            at = parts.index("layer") + 1
            parts[at] = str(int(parts[at]) % count)
        p.data.copy_(state[".".join(parts)])


def grown_stages(first: int, second: int):
    small, grown = (tiny_training.stages(steps)[0] for steps in (first, second))
    grown.build, grown.enter = lambda: Classes(layers=4), fill
    grown.source, grown.first_micro_batch = Numbered(size=11, seed=8), 3
    return [small, grown]


def growth(run: Path):
    return trainer(run, stages=grown_stages(9, 15), save_every=2, keep=3)


KINDS = {f.__name__: f for f in (plain, half, bfloat, ahead, growth)}


def killed_until(run: Path, make, kills: int, seconds: tuple[float, float], draw: random.Random) -> int:
    """Kill lives of a run until it ends or enough have died; how many have."""
    died, step = 0, -1
    while died < kills:
        end = life(run, make, kill_after=draw.uniform(0.0, draw.choice(seconds)))
        if end.code == 0:
            return died
        assert end.code == -signal.SIGKILL, end.said
        died += 1
        before, step = step, newest_step(run) if run.is_dir() else -1
        assert step >= before, "a checkpoint was lost"
    return died


@pytest.mark.parametrize(
    ("kind", "kills"), [("plain", 12), ("half", 6), ("bfloat", 6), ("ahead", 6), ("growth", 8)]
)
def test_kills_at_random_moments(kind, kills, tmp_path):
    make, draw = KINDS[kind], random.Random(kind)
    expected = finished(tmp_path / "unbroken", make)
    begin = time.perf_counter()
    finished(copied(tmp_path / "unbroken", tmp_path / "twice"), make)  # how long it takes to begin
    startup = time.perf_counter() - begin
    begin = time.perf_counter()
    finished(tmp_path / "again", make)
    whole = time.perf_counter() - begin
    died, runs = 0, 0
    while died < kills:
        run = tmp_path / f"run{runs}"
        died += killed_until(run, make, kills - died, (whole, startup + whole / 4), draw)
        assert finished(run, make) == expected
        runs += 1
        # a run that ended was quicker than the measured one, on a machine that others use too
        startup, whole = 0.7 * startup, 0.7 * whole
        assert runs < 4 * kills


def hidden(run: Path) -> list[str]:
    """What was left behind."""
    if not run.is_dir():
        return []
    return [
        entry.name for entry in run.iterdir() if entry.name.startswith((".saving", ".removing", ".config"))
    ]


# every fourth operation; all of them take a minute or two
EVERY = pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
# a checkpoint gets its name
PLACED = re.compile(r"os\.rename \.saving-step-[^/]*$")


def two_saves(run: Path):
    return trainer(run, 2, save_every=1, keep=1)


@EVERY
def test_a_kill_at_every_file_operation(stride, tmp_path):
    """Of a run with two checkpoints, the second of which removes the first, and of the run after the kill."""
    expected = finished(tmp_path / "unbroken", two_saves)
    names = lives.recorded(tmp_path / "counted", two_saves)
    assert tiny_training.digests(tmp_path / "counted") == expected
    kinds = {name.split()[0] for name in names}
    assert kinds == {
        *("open", "write", "append", "truncate", "fsync"),
        *("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod"),
    }
    assert len(names) > 80
    for number in range(1, len(names) + 1, stride):
        run = tmp_path / str(number)
        end = lives.killed_at(run, number, two_saves)
        assert end.code == -signal.SIGKILL, (number, names[number - 1], end.said)
        renamed = [name for name in names[: number - 1] if PLACED.match(name)]
        assert newest_step(run) == (len(renamed) or -1), end.said
        if number % 3 == 0:  # the next life is killed elsewhere, or ends before
            again = lives.killed_at(run, number * 7 % len(names) + 1, two_saves)
            assert again.code in (-signal.SIGKILL, 0), again.said
        assert finished(run, two_saves) == expected, end.said
        assert hidden(run) == []
        shutil.rmtree(run)


@dataclass(frozen=True)
class Signalling:
    """A schedule that sends a signal to this process in the middle of a step."""

    number: int
    step: int = 3

    def __call__(self, step: int) -> float:
        if step == self.step:
            os.kill(os.getpid(), self.number)
        return 1e-3 * (step + 1)


def signalled(number: int, run: Path, **options):
    """A trainer that gets a signal during its fourth step; 0: none."""
    return trainer(run, 7, schedule=Signalling(number), **options)


def quiet(run: Path, **options):
    return signalled(0, run, **options)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_ends_the_run_after_the_step_and_its_checkpoint(name, tmp_path, request):
    number = getattr(signal, name)
    before = signal.signal(number, signal.default_int_handler)  # a shell may have it ignored
    request.addfinalizer(lambda: signal.signal(number, before))
    make = signalled(number, tmp_path / "run", save_every=100)
    with pytest.raises(Interrupted, match=rf"stopped by {name}; saved .*run/step-000004$") as error:
        make.run()
    assert error.value.number == number
    assert signal.getsignal(number) is signal.default_int_handler
    assert newest_step(tmp_path / "run") == 4
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 4
    # the same object can continue too
    made = make.run()
    assert made.step == 7
    assert quiet(tmp_path / "unbroken", save_every=100).run().last == made.last
    assert tiny_training.digests(tmp_path / "run") == tiny_training.digests(tmp_path / "unbroken")


def test_a_signal_before_the_first_step(tmp_path):
    """The run resumes from step 0. Its checkpoint is not written again by a second one."""

    def build():
        os.kill(os.getpid(), signal.SIGTERM)
        return Classes()

    times = []
    for _ in range(2):
        (stage,) = tiny_training.stages()
        stage.build = build
        with pytest.raises(Interrupted, match="SIGTERM"):
            trainer(tmp_path / "run", stages=[stage]).run()
        assert newest_step(tmp_path / "run") == 0
        times.append((tmp_path / "run" / "step-000000").stat().st_ctime_ns)
    assert times[0] == times[1]
    trainer(tmp_path / "run").run(), trainer(tmp_path / "unbroken").run()
    assert tiny_training.digests(tmp_path / "run") == tiny_training.digests(tmp_path / "unbroken")


def test_a_second_signal_does_what_it_did_before(tmp_path):
    """The first one waits for the step; if that never ends, the second one ends the process."""

    def twice(run: Path):
        def build():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            return Classes()

        (stage,) = tiny_training.stages(3)
        stage.build = build
        return trainer(run, stages=[stage])

    assert life(tmp_path / "run", twice).code == -signal.SIGTERM
    assert newest_step(tmp_path / "run") == -1


def long(run: Path):
    return trainer(run, 60, save_every=100, workers=2)


def wait_for_the_log(run: Path) -> None:
    while not (run / "log.jsonl").exists() or not (run / "log.jsonl").stat().st_size:
        time.sleep(0.001)


def test_a_signal_to_the_whole_group_leaves_the_workers_to_the_parent(tmp_path):
    """As torchrun and terminals send it."""
    expected = finished(tmp_path / "unbroken", long)
    for number in (signal.SIGTERM, signal.SIGINT):
        run = tmp_path / str(number)
        pid = lives.begun(run, long)
        wait_for_the_log(run)
        os.killpg(pid, number)
        end = lives.ended(pid, run)
        assert end.code == 128 + number, end.said
        assert 0 < newest_step(run) < 60
        assert finished(run, long) == expected


class Wide(Numbered):
    """Micro-batches that fill a pipe."""

    def collate(self, examples):
        made = super().collate(examples)
        made.padding = np.zeros(1 << 20, np.uint8)
        return made


def wide(run: Path):
    return trainer(run, 24, workers=2, source=Wide())


def alive(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_workers_end_after_a_parent_that_was_killed(tmp_path):
    """Though no process reads what they have made; and they do not hinder the next life."""
    expected, run = finished(tmp_path / "unbroken", wide), tmp_path / "run"
    pid = lives.begun(run, wide)
    wait_for_the_log(run)
    assert len(alive(pid)) >= 3
    os.kill(pid, signal.SIGKILL)
    assert lives.ended(pid, run).code == -signal.SIGKILL
    assert finished(run, wide) == expected
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(pid) == []


@EVERY
def test_a_full_disk_at_every_writing_operation(stride, tmp_path):
    """Each is one line that names a file; what was there stays, nothing is left behind, the run continues."""
    expected = finished(tmp_path / "unbroken", two_saves)
    refused = 0
    for number in itertools.count(1, stride):
        run = tmp_path / str(number)
        end = lives.full_at(run, number, two_saves)
        *told, line = end.said.splitlines() or [""]
        if end.code == 0:  # an older checkpoint could not be removed, or no operation was left
            if not line.startswith("full at"):
                break
            # or a folder of the model, which is flushed again as one of the checkpoint
            assert re.search(r"step-000001|fsync \S*/model(/\.saving-[^/]*)?$", line), line
            continue
        assert end.code == 2, end.said
        refused += 1
        assert len(told) == 1, end.said
        assert "No space left on device" in line
        assert str(run) in line
        assert hidden(run) == []
        step = newest_step(run)
        assert step <= 1 or "fsync ." in told[0]
        assert finished(run, two_saves) == expected, end.said
        shutil.rmtree(run)
    assert refused > 40 // stride


def test_a_limit_of_the_system_on_a_file(tmp_path):
    """A write that fails for real, in the middle of the moments."""

    def before():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    expected, run = finished(tmp_path / "unbroken", two_saves), tmp_path / "run"
    assert lives.killed_at(run, 120, two_saves).code == -signal.SIGKILL
    steps = newest_step(run)
    end = life(run, two_saves, before=before)
    assert end.code == 2, end.said
    assert re.fullmatch(
        r".*step-00000\d: could not be saved, older checkpoints are unchanged: .*\n", end.said
    )
    assert newest_step(run) == steps
    assert hidden(run) == []
    assert finished(run, two_saves) == expected
