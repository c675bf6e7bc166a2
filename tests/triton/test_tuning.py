"""The tables of tuned configs, their look-up, and `bench/tune.py`, which writes them."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from fastbert.testing import triton_interpreter

pytest.importorskip("triton")

from bench import tune
from bench.timing import Timing
from fastbert.kernels import attention, linear, tuning
from fastbert.testing.op_cases.linear import LinearCase

H200 = tuning.Device("NVIDIA H200", (9, 0), 132)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
MODULES = {"attention": attention, "linear": linear}

interpreted = pytest.mark.skipif(
    not triton_interpreter.interpreting(), reason="tries the dry run, which interprets: there is a GPU here"
)


@pytest.fixture(autouse=True)
def no_look_up_outlives_a_test():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)  # the dry run takes one
    tuning._table.cache_clear()
    for module in MODULES.values():
        module.config_for.cache_clear()


# --- tables -------------------------------------------------------------------------------------------------


def problems(table, name):
    """What is wrong with a table in the file `name`."""
    if tuning.file_of(str(table.get("device"))).name != name:
        yield f"device {table.get('device')!r}"
    for op, keys in table.items():
        if op == "device":
            continue
        if op not in MODULES:
            yield f"op {op!r}"
            continue
        fields = MODULES[op].Config._fields
        for key, buckets in keys.items():
            if key.split()[0] not in ("bfloat16", "float16", "float32"):
                yield f"key {key!r}"
            for bucket, config in buckets.items():
                if not bucket.isdigit() or int(bucket) > 24:
                    yield f"bucket {bucket!r}"
                if tuple(config) != fields or not all(type(v) in (int, bool) for v in config.values()):
                    yield f"config {config}"


FIRST = linear.ladder(BF16, True, (9, 0))[0]._asdict()
GOOD = {"device": "NVIDIA H200", "linear": {"bfloat16 768x3072 gelu": {"14": FIRST}}}


def test_committed_tables_are_well_formed():
    for path in sorted(tuning.TUNED.glob("*")):
        assert path.suffix == ".json"
        assert list(problems(json.loads(path.read_text()), path.name)) == []


def test_what_is_wrong_with_a_table_is_found():
    assert list(problems(GOOD, "nvidia-h200.json")) == []
    assert list(problems(GOOD, "nvidia-h100.json")) == ["device 'NVIDIA H200'"]
    config = GOOD["linear"]["bfloat16 768x3072 gelu"]["14"]
    for keys, problem in (
        ({"int7 1x1": {"14": config}}, "key"),
        ({"bfloat16 1x1": {"x": config}}, "bucket"),
        ({"bfloat16 1x1": {"14": config | {"extra": 1}}}, "config"),
        ({"bfloat16 1x1": {"14": config | {"block_m": "128"}}}, "config"),
    ):
        (found,) = problems(GOOD | {"linear": keys}, "nvidia-h200.json")
        assert found.startswith(problem)
    assert list(problems(GOOD | {"softmax": {}}, "nvidia-h200.json")) == ["op 'softmax'"]


def test_look_up(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    assert tuning.tuned(H200, "linear", "bfloat16 1x1", 3) is None  # no file
    tuning._table.cache_clear()
    buckets = {str(n): {"at": n} for n in (4, 8, 10)}
    (tmp_path / "nvidia-h200.json").write_text(json.dumps({"device": H200.name, "linear": {"k": buckets}}))
    found = [tuning.tuned(H200, "linear", "k", n)["at"] for n in range(13)]
    assert found == [4, 4, 4, 4, 4, 4, 4, 8, 8, 8, 10, 10, 10]  # of two as near the smaller
    assert tuning.tuned(H200, "linear", "other", 4) is None
    assert tuning.tuned(H200, "attention", "k", 4) is None
    assert tuning.tuned(H200._replace(name="NVIDIA H100"), "linear", "k", 4) is None


def test_buckets_and_files():
    assert [tuning.bucket(n) for n in (0, 1, 2, 3, 4, 5, 512, 513, 2**31)] == [0, 0, 1, 2, 2, 3, 9, 10, 31]
    assert tuning.file_of("NVIDIA RTX 6000 Ada (Max-Q)").name == "nvidia-rtx-6000-ada-max-q.json"
    assert tuning.device_of(CPU) == ("cpu", (0, 0), 2)


# --- what is tuned ------------------------------------------------------------------------------------------


def test_entries_come_once_and_what_triton_serves_first():
    tasks = tune.tasks(["linear", "attention"], ["base", "large"], [BF16, FP16], False)
    assert len({task.name for task in tasks}) == len(tasks)
    assert [task.dtype for task in tasks] == sorted((t.dtype for t in tasks), key=[BF16, FP16].index)
    half = [task for task in tasks if task.dtype == BF16]
    assert [tune.is_later(task.case) for task in half] == sorted(tune.is_later(task.case) for task in half)
    keys = list(dict.fromkeys(task.key for task in half))
    assert keys[:3] == ["bfloat16 768x3072 gelu", "bfloat16 1024x4096 gelu", "bfloat16 64"]
    assert set(keys[3:]) == {
        "bfloat16 768x2304",
        "bfloat16 768x768",
        "bfloat16 3072x768",
        "bfloat16 1024x3072",
        "bfloat16 1024x1024",
        "bfloat16 4096x1024",
        "bfloat16 64 dropout",
    }
    for task in tasks:
        rows = task.case.rows if task.op == "linear" else task.case.max_seqlen
        assert tuning.bucket(rows) == task.bucket


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_an_entry_is_what_run_time_looks_up(monkeypatch, tmp_path, capability, dtype):
    """`config_for` of the kernel finds a config that was written for a task, at the shapes of that task."""
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    device = tuning.Device("GPU", capability, 100)
    for task in tune.tasks(["linear", "attention"], ["base"], [dtype], False):
        configs = tune.candidates(task, device)
        assert len(configs) == len(set(configs))
        assert tune.heuristic(task, device) in configs
        assert all(config.num_stages >= 1 for config in configs)
        chosen = configs[-1]
        table = tune.with_entry({"device": "GPU"}, [task.op, task.key, task.bucket], chosen._asdict())
        assert list(problems(table, "gpu.json")) == []
        tuning.file_of("GPU").write_text(json.dumps(table))
        tuning._table.cache_clear()
        MODULES[task.op].config_for.cache_clear()
        case = task.case
        if task.op == "linear":
            options = case.in_features, case.out_features, case.activation, case.residual
            found = linear.config_for(case.rows, *options, dtype, True, device)
        else:
            buckets = tuning.bucket(case.max_seqlen), tuning.bucket(case.total * case.nheads)
            found = attention.config_for(case.headdim, dtype, tune.extras_of(case), *buckets, device)
        assert found == chosen


def test_candidates_begin_with_the_modules_own():
    (task, *_) = tune.tasks(["linear"], ["base"], [BF16], False)
    configs = tune.candidates(task, H200)
    ladder = linear.ladder(BF16, True, (9, 0))
    assert tuple(configs[: len(ladder)]) == ladder
    assert {config.group_m for config in configs} == {8, 4, 16}
    assert {c.num_stages for c in configs if c[:3] == ladder[0][:3]} == {2, 3, 4}
    assert configs == tune.candidates(task, H200)


@pytest.mark.parametrize(("major", "most"), [(8, 64), (9, 128), (10, 96), (12, 64)])
def test_attention_candidates_fit_a_threads_registers(major, most):
    for headdim in (16, 32, 64):
        configs = attention.candidates(headdim, BF16, "", (major, 0))
        ladder = attention.ladder(headdim, BF16, "", (major, 0))
        assert configs[: len(ladder)] == ladder
        floats = [c.block_m * (c.block_n + headdim) / (32 * c.num_warps) for c in configs[len(ladder) :]]
        assert max(floats) <= most
    assert max(floats) == most  # the rule is not tighter than it says either
    assert len(set(configs)) == len(configs)


# --- one entry ----------------------------------------------------------------------------------------------


def timing(ms):
    return Timing(ms, ms, 0.0, 3, 1, "wall")


@pytest.fixture
def task():
    return tune.linear_task(LinearCase(40, 48, 96, "gelu"), FP32)


@pytest.fixture
def few(monkeypatch):
    """Four candidates, the heuristic's first; and a function that sets their times, in order."""
    base = linear.ladder(FP32, True, (0, 0))[-1]
    configs = [base._replace(group_m=group) for group in (1, 2, 3, 4)]
    monkeypatch.setattr(tune, "candidates", lambda task, device: configs)
    monkeypatch.setattr(tune, "heuristic", lambda task, device: configs[0])

    def times(*ms):
        chosen = dict(zip(configs, ms, strict=True))
        monkeypatch.setattr(
            tune, "interleave", lambda calls, *a, **o: {c: timing(chosen[c]) for c in calls if chosen[c]}
        )
        return configs

    return times


def plant(monkeypatch, config, fault):
    """Make the kernel of one config wrong."""
    real = linear.linear_fwd_with

    def planted(which, *args):
        y, pre = real(which, *args)
        return (fault(y) if which == config else y), pre

    monkeypatch.setattr(linear, "linear_fwd_with", planted)


def run_one(task, left=lambda: 100.0):
    *rows, entry = tune.tuned(task, CPU, True, left)
    assert entry["entry"] == [task.op, task.key, task.bucket]
    return {row["name"].split()[-1]: row for row in rows}, entry


@interpreted
def test_the_fastest_wins(task, few):
    configs = few(1.0, 0.9, 0.5, 0.7)
    rows, entry = run_one(task)
    assert entry["config"] == configs[2]._asdict()
    assert entry["usual"] == configs[0]._asdict()
    assert (entry["gain"], entry["tried"], entry["of"]) == (2.0, 4, 4)
    assert [row["median_ms"] for row in rows.values()] == [1.0, 0.9, 0.5, 0.7]


@interpreted
def test_noise_does_not_move_the_heuristic(task, few):
    configs = few(1.0, 0.995, 1.1, 1.2)
    _, entry = run_one(task)
    assert entry["config"] == configs[0]._asdict()
    assert entry["gain"] == 1.0


def raising(error):
    def fault(y):
        raise error

    return fault


@interpreted
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda y: y + 0.01, "wrong: max error"),
        (lambda y: y.index_fill(0, torch.tensor([39]), float("nan")), "wrong: NaN"),
        (lambda y: y[:-1], "wrong: shape"),
        (raising(RuntimeError("out of resource: shared memory")), "RuntimeError: out of resource"),
    ],
)
def test_what_is_wrong_or_does_not_run_cannot_win(task, few, monkeypatch, fault, text):
    configs = few(1.0, 0.9, 0.5, 0.7)
    plant(monkeypatch, configs[2], fault)
    rows, entry = run_one(task)
    assert entry["config"] == configs[3]._asdict()
    bad = [row for row in rows.values() if row["status"] == "error"]
    assert len(bad) == 1
    assert bad[0]["error"].startswith(text)


@interpreted
def test_where_the_heuristics_config_does_not_run_another_is_taken(task, few, monkeypatch):
    configs = few(0.1, 0.9, 0.8, 0.7)
    plant(monkeypatch, configs[0], raising(RuntimeError("no")))
    monkeypatch.setattr(linear, "heuristic", lambda *args: configs[1])  # the public op must run once
    linear.config_for.cache_clear()
    _, entry = run_one(task)
    assert entry["config"] == configs[3]._asdict()
    assert entry["gain"] is None


@interpreted
def test_no_config_works(task, few, monkeypatch):
    few(1.0, 0.9, 0.5, 0.7)
    real = linear.linear_fwd_with
    monkeypatch.setattr(linear, "linear_fwd_with", lambda *args: (real(*args)[0] + 1, None))
    _, entry = run_one(task)
    assert (entry["status"], entry["error"]) == ("error", "no config works here")
    assert "config" not in entry


@interpreted
def test_an_entry_that_cannot_be_prepared_is_a_row(task, monkeypatch):
    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LinearCase, "inputs", no_memory)
    rows, entry = run_one(task)
    assert rows == {}
    assert entry["error"] == "OutOfMemoryError: CUDA out of memory"


@interpreted
def test_an_op_that_goes_another_way_is_told(task, monkeypatch):
    monkeypatch.setattr(LinearCase, "call", lambda self, **inputs: None)
    _, entry = run_one(task)
    assert "does not reach kernels/linear.linear_fwd_with" in entry["error"]


@interpreted
def test_the_budget_ends_an_entry_after_its_first_good_config(task, few):
    few(1.0, 0.9, 0.5, 0.7)
    left = itertools.chain([5.0], itertools.repeat(-1.0))
    rows, entry = run_one(task, lambda: next(left))
    assert (entry["tried"], entry["of"]) == (2, 4)
    assert len(rows) == 2
    _, entry = run_one(task, lambda: -1.0)
    assert entry["tried"] == 1


# --- the command --------------------------------------------------------------------------------------------


@interpreted
def test_a_dry_run_writes_a_table_that_serves(tmp_path, monkeypatch, capsys):
    out, record = tmp_path / "cpu.json", tmp_path / "tuning.jsonl"
    arguments = ["--device", "cpu", "--dtype", "bfloat16", "--out", str(out), "--json", str(record)]
    assert tune.main(arguments) == 0
    table = json.loads(out.read_text())
    assert list(problems(table, "cpu.json")) == []
    assert list(table) == ["device", "attention", "linear"]
    assert set(table["linear"]) == {"bfloat16 48x96 gelu", "bfloat16 96x48"}
    assert list(table["linear"]["bfloat16 48x96 gelu"]) == ["4", "6"]
    assert set(table["attention"]) == {"bfloat16 16", "bfloat16 16 dropout"}
    text = capsys.readouterr().out
    assert "# 5 of 5 entries in" in text
    from bench import lines

    data = lines.read(record)
    assert data["finished"] is True
    assert data["environment"]["device_type"] == "cpu"
    chosen = {tuple(row["entry"]): row["config"] for row in data["rows"] if "entry" in row}
    assert chosen["linear", "bfloat16 48x96 gelu", 6] == table["linear"]["bfloat16 48x96 gelu"]["6"]
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    tuning._table.cache_clear()
    linear.config_for.cache_clear()
    found = linear.config_for(64, 48, 96, "gelu", False, BF16, True, tuning.device_of(CPU))
    assert found._asdict() == table["linear"]["bfloat16 48x96 gelu"]["6"]


def only_one_task(monkeypatch, task):
    monkeypatch.setattr(tune, "tasks", lambda *args: [task])


@interpreted
def test_entries_are_merged_into_what_the_file_held(tmp_path, monkeypatch, task, few):
    out = tmp_path / "cpu.json"
    before = {"device": "cpu", "linear": {"float32 9x9": {"3": {"kept": 1}}, task.key: {"2": {"kept": 2}}}}
    out.write_text(json.dumps(before))
    configs = few(1.0, 0.9, 0.5, 0.7)
    only_one_task(monkeypatch, task)
    assert tune.main(["--device", "cpu", "--out", str(out)]) == 0
    table = json.loads(out.read_text())
    assert table["linear"]["float32 9x9"] == {"3": {"kept": 1}}
    assert table["linear"][task.key] == {"2": {"kept": 2}, "6": configs[2]._asdict()}
    text = out.read_text()
    assert tune.main(["--device", "cpu", "--out", str(out)]) == 0
    assert out.read_text() == text


@interpreted
def test_a_spent_budget_leaves_entries_as_they_were(tmp_path, monkeypatch, task, few, capsys):
    few(1.0, 0.9, 0.5, 0.7)
    only_one_task(monkeypatch, task)
    out = tmp_path / "cpu.json"
    assert tune.main(["--device", "cpu", "--out", str(out), "--budget", "1e-9"]) == 0
    assert not out.exists()
    assert "the budget is spent: 1 entries are left as they were" in capsys.readouterr().out


@interpreted
def test_an_entry_without_a_config_is_an_exit_status(tmp_path, monkeypatch, task, few):
    few(1.0, 0.9, 0.5, 0.7)
    only_one_task(monkeypatch, task)
    monkeypatch.setattr(tune.testing, "compare", lambda *args: (0, 0, 0, 0, "never right"))
    out = tmp_path / "cpu.json"
    assert tune.main(["--device", "cpu", "--out", str(out)]) == 1
    assert not out.exists()


@interpreted
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"device": "NVIDIA H200"}), "is the table of 'NVIDIA H200', not of 'cpu'"),
        ("[]", "is the table of None, not of 'cpu'"),
        ("{", "is no JSON"),
    ],
)
def test_a_table_that_is_not_ours_is_not_touched(tmp_path, capsys, content, message):
    out = tmp_path / "cpu.json"
    out.write_text(content)
    assert tune.main(["--device", "cpu", "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert out.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "--device cpu: tries the code only, and needs --out FILE"),
        (["--device", "cpu", "--out", "x", "--budget", "0"], "--budget 0.0: expected seconds above 0"),
        (["--device", "cpu", "--out", "x", "--budget", "nan"], "--budget nan"),
        (["--op", "softmax"], "invalid choice: 'softmax'"),
    ],
)
def test_mistakes_in_the_call(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        tune.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_record_from_another_machine_is_merged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "tuned")
    config = linear.ladder(BF16, True, (9, 0))[1]._asdict()
    row = {"step": "tuning", "name": "n", "status": "ok"}
    rows = [
        row | {"entry": ["linear", "bfloat16 768x3072 gelu", 14], "config": {"older": 1}},
        row | {"entry": ["linear", "bfloat16 768x3072 gelu", 14], "config": config},
        row | {"entry": ["linear", "bfloat16 768x3072 gelu", 7], "status": "error", "error": "none"},
        row | {"median_ms": 1.0},
    ]
    record = tmp_path / "tuning.jsonl"
    head = {"environment": {"device_type": "cuda", "device": "NVIDIA H200"}}
    record.write_text("\n".join(json.dumps(each) for each in ({"head": head}, *({"row": r} for r in rows))))
    assert tune.main(["--merge", str(record)]) == 0
    assert "# 2 entries of" in capsys.readouterr().out
    table = json.loads((tmp_path / "tuned" / "nvidia-h200.json").read_text())
    assert table == {"device": "NVIDIA H200", "linear": {"bfloat16 768x3072 gelu": {"14": config}}}
    plain = tmp_path / "tuning.json"
    plain.write_text(json.dumps(head | {"rows": rows[1:2]}))
    assert tune.merge(plain, tmp_path / "other.json") == (tmp_path / "other.json", 1)
    plain.write_text(json.dumps({"environment": {"device_type": "cpu", "device": "x"}, "rows": rows}))
    assert tune.main(["--merge", str(plain)]) == 2
    assert "is of no run on a GPU" in capsys.readouterr().err


def test_the_printed_lines():
    entry = {"name": "e", "status": "ok", "entry": [], "config": {"a": 1, "b": True}, "gain": 1.5}
    assert tune.line(entry | {"tried": 2, "of": 3}) == "e: 1_1, 1.50 x the heuristic's, 2 of 3 configs"
    assert tune.line({"name": "c", "status": "error", "error": "no\nmore"}) == "  c: no"
    assert (
        tune.line({"name": "c", "status": "ok", "median_ms": 0.5, "spread": 0.1})
        == "  c: 500.0 us, spread 10%"
    )
    assert tune.label((128, True)) == "128_1"
