"""The kernels of self-checks are compiled side by side before them, without memory of a GPU.

Whatever goes wrong there, the checks go on.

Triton compiles only with its interpreter off, so each of these runs a process of its own, for an H100.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from fastbert.testing import compiling, stand_in
from tests.support.processes import python

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.device("cuda", 0)
H100 = ("NVIDIA H100 80GB HBM3", 9, 0, 132)

# A check's process as far as it asks for kernels; `LATER` is what happens to compilations.
BEGIN = f"""
import json, os, signal, sys, time
import torch
from fastbert.testing import compiling
H100, GPU = {H100!r}, torch.device("cuda", 0)
compile, server = compiling.Launch.compile, []
def name(launch):
    return launch.kernel.__name__
def is_fork():
    return os.getppid() != main
main = os.getpid()
"""
ASK = """
compiler = compiling.started(GPU, H100, 2)
progress = []
units = [("packing", "triton", "float16"), ("cross_entropy", "triton", "float16")]
compiler.ask(units)
begin = time.monotonic()
notes = compiler.wait(units, lambda *counts: progress.append(counts), seconds=SECONDS)
print(json.dumps({"notes": notes, "progress": progress, "done": len(compiler.done)}))
"""


def asked(tmp_path, planted="", seconds=60.0):
    """What a process finds that asks for the kernels of two checks."""
    code = BEGIN + planted + ASK.replace("SECONDS", str(seconds))
    done = python(code, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compiled(tmp_path):
    """Names of the kernels in Triton's cache."""
    return sorted(path.stem for path in (tmp_path / "triton").glob("*/*.cubin"))


# --- what a check launches ----------------------------------------------------------------------------------

ALL = f"""
import json, torch
from fastbert.runtime import dispatch
from fastbert.testing import compiling, proving, speed, stand_in
recorder = compiling.Recorder(torch.device("cuda", 0), stand_in.Facts(*{H100!r}))
torch.cuda.is_available, capability = lambda: True, torch.cuda.get_device_capability
torch.cuda.get_device_capability = lambda *_: (9, 0)
units = [
    compiling.Unit(op, name, str(dtype).removeprefix("torch."))
    for op in dispatch.OPS for name, dtype in proving.to_check(op, "cuda")
    if name == "triton" and dtype.is_floating_point and dtype != torch.float64
]
found = {{"-".join(unit): sorted({{name for name, _ in recorder.record(unit)}}) for unit in units}}
attention = compiling.Unit("attention", "triton", "bfloat16")
counts = [len(recorder.found), len(recorder.record(attention))]
speed.timed_calls = lambda *_: []
counts.append(len(recorder.record(attention)))
print(json.dumps([found, recorder.problems, counts]))
"""


@pytest.mark.sweep
def test_what_the_checks_launch_is_known_without_a_gpu():
    done = python(ALL, TRITON_INTERPRET="0", FASTBERT_CACHE="")
    assert done.returncode == 0, done.stderr
    found, problems, (count, of_attention, checked_alone) = json.loads(done.stdout)
    assert problems == []
    assert len(found) == 11 + 11 + 7
    # each kernel that is launched anywhere, but for those of rows that no check has, backward and all
    names = {name.rpartition(".")[2] for names in found.values() for name in names}
    texts = (path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    launched = {name for text in texts for name in re.findall(r"\blaunch\(\s*(_\w+)\s*,", text)}
    assert len(launched) > 25
    assert launched - names == {name for name in launched if name.startswith("_wide_")}
    of_layer_norm = {name.rpartition(".")[2] for name in found["layer_norm-triton-bfloat16"]}
    assert of_layer_norm == {"_layer_norm_fwd_kernel", "_layer_norm_bwd_kernel", "_sum_partials_kernel"}
    assert count > 300
    assert of_attention > checked_alone  # what is timed has other configs


# A launch of real tensors, at every alignment, beside one of what stands for them.
KERNEL = """
import triton
@triton.jit
def kernel(x_ptr, y_ptr, rows, eps):
    pass
"""
SAME = """
import json, sys, torch
sys.path.insert(0, FOLDER)
from triton import knobs
from fastbert.testing import compiling, stand_in
from one_kernel import kernel
recorder = compiling.Recorder(torch.device("cuda", 0), stand_in.Facts(*H100))
keys = []
knobs.runtime.jit_cache_hook = lambda key=None, **_: keys.append(str(key)) or True
memory = torch.zeros(64, dtype=torch.float16)
for at in range(10):
    for rows in (1, 2, 16, 2**31):
        x = memory[at:]
        for each in (x, stand_in.Pointer(x)):
            kernel.warmup(each, None, rows, 0.5, grid=(1,))
with stand_in.gpu(torch.device("cuda", 0), recorder.facts, None):
    x = torch.randn(4, 8, generator=torch.Generator()).to(torch.float16).to("cuda")
    y = torch.empty_like(x, requires_grad=True)
    facts = [str(x.device), x.is_cuda, x.is_meta, str((x + 1).device), str(torch.zeros(2).device)]
    addresses = [(t.data_ptr() - x.data_ptr(), t.data_ptr() % 16) for t in (x, x[1:], x[:, 3:])]
    apart = x.data_ptr() != y.data_ptr()
print(json.dumps([keys[::2] == keys[1::2], len(set(keys)), facts, addresses, apart, str(x.device)]))
"""


def test_what_stands_for_a_tensor_is_specialized_as_the_tensor(tmp_path):
    (tmp_path / "one_kernel.py").write_text(KERNEL)
    done = python(f"FOLDER, H100 = {str(tmp_path)!r}, {H100!r}\n" + SAME, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    same, kinds, facts, addresses, apart, after = json.loads(done.stdout)
    assert same
    assert kinds == 8
    assert facts == ["cuda:0", True, False, "cuda:0", "cpu"]
    assert addresses == [[0, 0], [16, 0], [6, 6]]
    assert apart
    assert after == "meta"


# --- compiling ----------------------------------------------------------------------------------------------

# What a check does after it: the same launches, compiled in its own process.
HITS = f"""
import json, torch
from triton import knobs
from fastbert.testing import compiling, stand_in
recorder = compiling.Recorder(torch.device("cuda", 0), stand_in.Facts(*{H100!r}))
hits = []
knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
for op in ("packing", "cross_entropy"):
    for key in recorder.record(compiling.Unit(op, "triton", "float16")):
        recorder.found[key].compile()
print(json.dumps([len(hits), all(hits)]))
"""


@pytest.mark.sweep
def test_a_check_finds_its_kernels_compiled(tmp_path):
    found = asked(tmp_path)
    assert (found["notes"], found["done"]) == ([], 2)
    count = len(compiled(tmp_path))
    assert found["progress"][-1] == [count, count]
    assert len(found["progress"]) == count
    done = python(HITS, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path / "triton"), FASTBERT_CACHE="")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [count, True]


@pytest.mark.sweep
def test_a_process_that_dies_costs_one_kernel(tmp_path):
    found = asked(
        tmp_path,
        "def dies(launch):\n"
        "    if name(launch) == '_cross_entropy_bwd_kernel':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    compile(launch)\n"
        "compiling.Launch.compile = lambda launch: compile(launch) if recording() else dies(launch)\n"
        + RECORDING,
    )
    assert found["done"] == 2
    assert found["notes"]
    for note in found["notes"]:
        assert note == (
            "fastbert.kernels.cross_entropy._cross_entropy_bwd_kernel was not compiled before its check: "
            "its process ended by SIGKILL"
        )
    assert "_cross_entropy_bwd_kernel" not in compiled(tmp_path)
    assert "_cross_entropy_fwd_kernel" in compiled(tmp_path)


RECORDING = """
from triton import knobs
def recording():
    return knobs.runtime.jit_cache_hook is not None
"""


@pytest.mark.sweep
def test_code_that_does_not_compile_is_noted(tmp_path):
    found = asked(
        tmp_path,
        "def refused(launch):\n"
        "    if name(launch) == '_cross_entropy_bwd_kernel':\n"
        "        raise RuntimeError('out of registers')\n"
        "    compile(launch)\n"
        "compiling.Launch.compile = lambda launch: compile(launch) if recording() else refused(launch)\n"
        + RECORDING,
    )
    assert found["done"] == 2
    assert set(found["notes"]) == {
        "fastbert.kernels.cross_entropy._cross_entropy_bwd_kernel was not compiled before its check: "
        "RuntimeError: out of registers"
    }


@pytest.mark.sweep
def test_a_compilation_that_hangs_is_ended(tmp_path):
    found = asked(
        tmp_path,
        "compiling.KERNEL_SECONDS = 1.0\n"
        "def hangs(launch):\n"
        "    if name(launch) == '_cross_entropy_bwd_kernel':\n"
        "        time.sleep(600)\n"
        "    compile(launch)\n"
        "compiling.Launch.compile = lambda launch: compile(launch) if recording() else hangs(launch)\n"
        + RECORDING,
    )
    assert found["done"] == 2
    assert any("_cross_entropy_bwd_kernel" in note and "SIGKILL" in note for note in found["notes"])


@pytest.mark.sweep
def test_what_is_damaged_in_the_cache_is_made_anew(tmp_path):
    assert asked(tmp_path)["notes"] == []
    metadata = [path for path in (tmp_path / "triton").glob("*/_*.json") if "__grp__" not in path.name]
    assert metadata
    for path in metadata:
        path.write_bytes(path.read_bytes()[:20])
    found = asked(tmp_path)
    assert (found["notes"], found["done"]) == ([], 2)
    for path in metadata:
        json.loads(path.read_text())


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fault", "note"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process that compiles ended by SIGKILL"),
        ("os._exit(3)", "the process that compiles ended by status 3"),
        ("raise MemoryError", "the process that compiles ended by status 1"),
    ],
)
def test_without_the_process_the_checks_compile(tmp_path, fault, note):
    planted = f"def ends(self):\n    {fault}\ncompiling._Server._begin = ends\n"
    found = asked(tmp_path, planted)
    assert found["notes"] == [f"kernels are compiled one after the other: {note}"]
    assert found["done"] == 0


def test_a_process_that_does_nothing_is_not_waited_for(tmp_path):
    found = asked(tmp_path, "compiling._Server._begin = lambda self: time.sleep(600)\n", seconds=1.0)
    assert found["notes"] == ["no kernel was compiled for 1 s: the checks compile the rest"]


def test_a_call_that_cannot_be_recorded_is_noted(tmp_path):
    found = asked(
        tmp_path,
        "from fastbert.testing import error_rule\n"
        "from fastbert.testing.op_cases.packing import PackingCase\n"
        "def fails(*args): raise NotImplementedError('no such call')\n"
        "PackingCase.inputs = fails\n",
    )
    assert found["done"] == 2
    assert all("NotImplementedError: no such call" in note for note in found["notes"])
    assert found["notes"][0].startswith("packing float16 ")
    assert any(name.startswith("_cross_entropy") for name in compiled(tmp_path))


AHEAD = """
compiler = compiling.started(GPU, H100, 2)
compiler.hold(True)
compiler.ask([], [("packing", "triton", "float16")])
compiler.ask([("cross_entropy", "triton", "float16")])
notes = compiler.wait([("cross_entropy", "triton", "float16")])
held = set(os.listdir(os.environ["TRITON_CACHE_DIR"]))
time.sleep(1)
still = set(os.listdir(os.environ["TRITON_CACHE_DIR"]))
compiler.hold(False)
end = time.monotonic() + 60
while set(os.listdir(os.environ["TRITON_CACHE_DIR"])) <= held and time.monotonic() < end:
    time.sleep(0.05)
more = set(os.listdir(os.environ["TRITON_CACHE_DIR"])) - held
compiler.ask([("packing", "triton", "float16")])
notes += compiler.wait([("packing", "triton", "float16")])
os.close(compiler.requests)
print(json.dumps([notes, held == still, bool(more), os.waitpid(compiler.pid, 0)[1]]))
"""


@pytest.mark.sweep
def test_in_spare_time_what_is_next_is_compiled_but_not_while_something_is_timed(tmp_path):
    done = python(BEGIN + AHEAD, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], True, True, 0]


# --- where it is not worth it -------------------------------------------------------------------------------


@pytest.mark.parametrize(("facts", "count", "started"), [(None, 8, False), (H100, 1, False), (H100, 8, True)])
def test_where_nothing_is_started(monkeypatch, facts, count, started):
    if not started:
        assert compiling.started(GPU, facts, count) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert compiling.started(GPU, facts, count) is None  # it cannot be forked any more


def test_in_the_interpreter_nothing_is_compiled(tmp_path):
    code = BEGIN + ASK.replace("SECONDS", "30.0")
    done = python(code, TRITON_INTERPRET="1", TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["notes"] == [
        "kernels are compiled one after the other: the process that compiles ended by status 0"
    ]
    assert compiled(tmp_path) == []


def test_how_many_processes_compile(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    assert 1 <= compiling.processes_here() <= cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(200)))
    monkeypatch.setattr(compiling.Path, "read_text", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compiling.processes_here()
    texts = {"cpu.max": "max 100000", "meminfo": "MemAvailable: 99000000 kB", "memory.max": "max"}
    monkeypatch.setattr(compiling.Path, "read_text", lambda path: texts.get(path.name, "0"))
    assert compiling.processes_here() == compiling.MOST_PROCESSES
    texts["cpu.max"] = "450000 100000"
    assert compiling.processes_here() == 4
    texts["memory.max"] = str(2 * compiling.PROCESS_BYTES + 7)
    assert compiling.processes_here() == 2
    texts["meminfo"] = "MemAvailable: 1000 kB"
    assert compiling.processes_here() == 1


def test_the_facts_are_those_of_a_gpu_alone():
    assert stand_in.facts_of(torch.device("cpu")) is None
