"""The tables of tuned configs, their look-up, and `bench/tune.py`, which writes them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from unittest import mock

import pytest
import torch

from fastbert.testing import triton_interpreter

pytest.importorskip("triton")

from bench import tune
from bench.lib import entries
from bench.lib.timing import Timing
from fastbert.kernels import (
    attention,
    attention_backward,
    attention_slots,
    feed_forward,
    layer_norm,
    linear,
    linear_backward,
    linear_norm,
    tuning,
)
from fastbert.testing.op_cases.attention import AttentionCase
from fastbert.testing.op_cases.feed_forward import FeedForwardCase
from fastbert.testing.op_cases.layer_norm import LayerNormCase
from fastbert.testing.op_cases.linear import LinearCase
from fastbert.testing.op_cases.linear_norm import LinearNormCase

H200 = tuning.Device("NVIDIA H200", (9, 0), 132)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.sweep
CPU = torch.device("cpu")
# Kernel -> the fields of its entries.
CONFIGS = {
    "attention": attention.Config,
    "attention_bwd": attention_backward.Config,
    "feed_forward_bwd": linear.Config,
    "layer_norm": layer_norm.Config,
    "layer_norm_bwd": layer_norm.BackwardConfig,
    "linear": linear.Config,
    "linear_bwd": linear_backward.Config,
    "linear_norm": linear_norm.Config,
}

interpreted = pytest.mark.skipif(
    not triton_interpreter.interpreting(), reason="tries the dry run, which interprets: there is a GPU here"
)


@pytest.fixture(autouse=True)
def no_look_up_outlives_a_test():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)  # the dry run takes one
    forget()


def forget():
    """Read tables anew."""
    tuning._table.cache_clear()
    tuned = attention, attention_backward, feed_forward, layer_norm, linear, linear_backward, linear_norm
    for module in tuned:
        for name in ("config_for", "configs_for", "bwd_config_for"):
            if hasattr(module, name):
                getattr(module, name).cache_clear()


# --- tables -------------------------------------------------------------------------------------------------


def problems(table, name):
    """What is wrong with a table in the file `name`."""
    if tuning.file_of(str(table.get("device"))).name != name:
        yield f"device {table.get('device')!r}"
    for op, keys in table.items():
        if op == "device":
            continue
        if op not in CONFIGS:
            yield f"op {op!r}"
            continue
        fields = CONFIGS[op]._fields
        for key, buckets in keys.items():
            if key.split()[0] not in ("bfloat16", "float16", "float32"):
                yield f"key {key!r}"
            for bucket, config in buckets.items():
                if not bucket.isdigit() or int(bucket) > 24:
                    yield f"bucket {bucket!r}"
                if tuple(config) != fields or not all(type(v) in (int, bool) for v in config.values()):
                    yield f"config {config}"


def test_committed_tables_are_well_formed():
    for path in sorted(tuning.TUNED.glob("*")):
        assert path.suffix == ".json"
        assert list(problems(json.loads(path.read_text()), path.name)) == []


def test_look_up(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    assert tuning.tuned(H200, "linear", "bfloat16 1x1", 3) is None  # no file
    tuning._table.cache_clear()
    buckets = {str(n): {"at": n} for n in (4, 8, 10)}
    (tmp_path / "nvidia-h200.json").write_text(json.dumps({"device": H200.name, "linear": {"k": buckets}}))
    found = [tuning.tuned(H200, "linear", "k", n)["at"] for n in range(13)]
    assert found == [4, 4, 4, 4, 4, 4, 4, 8, 8, 8, 10, 10, 10]  # of two as near the smaller
    assert tuning.tuned(H200, "linear", "k", 3, below=False) is None
    assert tuning.tuned(H200, "linear", "k", 4, below=False) == {"at": 4}
    assert tuning.tuned(H200, "linear", "other", 4) is None
    assert tuning.tuned(H200, "attention", "k", 4) is None
    assert tuning.tuned(H200._replace(name="NVIDIA H100"), "linear", "k", 4) is None


def test_a_gpu_without_a_table_reads_that_of_its_processor(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    tuning._table.cache_clear()
    other = {"device": "NVIDIA H100 80GB HBM3", "linear": {"bfloat16 k": {"4": {"at": 4}}}}
    (tmp_path / "nvidia-h100-80gb-hbm3.json").write_text(json.dumps(other))
    assert tuning.tuned(H200, "linear", "bfloat16 k", 4) == {"at": 4}
    assert tuning.entries(H200.name, "linear", BF16) == {"linear": other["linear"]}
    for name in ("NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB"):
        assert tuning.tuned(H200._replace(name=name), "linear", "bfloat16 k", 4) is None
    own = {"device": H200.name, "linear": {}}
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(own))
    assert tuning.tuned(H200, "linear", "bfloat16 k", 4) is None
    assert tuning.file_of(H200.name).name == "nvidia-h200.json"  # where a tuner writes
    tuning._table.cache_clear()


# --- what is tuned ------------------------------------------------------------------------------------------


def all_tasks(dtypes=(BF16,), models=("base", "large")):
    return tune.tasks(tune.OPS, list(models), list(dtypes), False)


def test_entries_come_once_and_what_matters_most_first():
    tasks = all_tasks([BF16, FP16])
    assert len({task.name for task in tasks}) == len(tasks)
    assert [task.dtype for task in tasks] == sorted((t.dtype for t in tasks), key=[BF16, FP16].index)
    half = [task for task in tasks if task.dtype == BF16]
    order = [(entries.is_later(task), task.rank) for task in half]
    assert order == sorted(order)
    assert {task.op for task in half} == set(tune.KINDS) == {k for ks in tuning.KERNELS.values() for k in ks}


def looked_up(task, device):
    """What run time finds for the case of a task."""
    case, dtype = task.case, task.dtype
    if task.op == "linear":
        options = case.in_features, case.out_features, case.activation, case.residual
        return linear.config_for(case.rows, *options, dtype, True, device)
    if task.op == "linear_bwd":
        facts = tuning.bucket(case.rows), case.out_features, case.activation
        return linear_backward.config_for(*facts, dtype, device)
    if task.op == "feed_forward_bwd":
        facts = case.rows, case.out, case.inner, case.activation
        return feed_forward.config_for(*facts, dtype, True, device)
    if task.op == "linear_norm":
        facts = tuning.bucket(case.rows), case.in_features, case.out_features, case.arrivals
        return linear_norm.config_for(*facts, dtype, device)
    if task.op.startswith("layer_norm"):
        look_up = layer_norm.config_for if task.op == "layer_norm" else layer_norm.bwd_config_for
        return look_up(tuning.bucket(case.rows), case.hidden, case.dropout_p > 0, dtype, device)
    buckets = tuning.bucket(case.max_seqlen), tuning.bucket(case.total * case.nheads)
    if task.op == "attention":
        kind = attention.extras_of(bool(case.bias), case.dropout_p > 0, case.probs)
        return attention.config_for(case.headdim, dtype, kind, *buckets, device)
    configs = attention_backward.configs_for(case.headdim, dtype, False, case.dropout_p > 0, *buckets, device)
    return getattr(configs, task.key.split()[-1])


def write_table(path, entries):
    """A table of (task, config) for the device "GPU"; nothing of an older one is remembered."""
    table = {"device": "GPU"}
    for task, config in entries:
        table = tune.with_entry(table, [task.op, task.key, task.bucket], config._asdict())
    (path / "gpu.json").write_text(json.dumps(table))
    forget()
    return table


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_an_entry_is_what_run_time_looks_up(monkeypatch, tmp_path, capability, dtype):
    """The kernel's look-up finds each config that was written for a task, at the shapes of that task."""
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    device = tuning.Device("GPU", capability, 100)
    tasks = all_tasks([dtype], ["base"])
    chosen = {}
    for task in tasks:
        configs = tune.KINDS[task.op].candidates(task, device)
        assert len(configs) == len(set(configs))
        assert tune.heuristic(task, device) in configs
        chosen[task] = configs[-1]
    table = write_table(tmp_path, chosen.items())
    assert list(problems(table, "gpu.json")) == []
    assert {task: looked_up(task, device) for task in tasks} == chosen
    for case in (task.case for task in tasks if task.op == "linear"):
        options = case.in_features, case.out_features, case.activation, case.residual
        assert not linear.config_for(case.rows, *options, dtype, False, device).tma  # not aligned


def test_attention_looks_up_where_there_is_work_for_the_gpu(monkeypatch, tmp_path):
    """One sequence wants more, lower tiles than those that were timed."""
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    device = tuning.Device("GPU", (9, 0), 132)
    (task,) = (t for t in all_tasks() if (t.key, t.bucket) == ("bfloat16 64 saved dq", 9))
    other = attention_backward.Config(16, 16, 64, 4, 1)
    (forward,) = (t for t in all_tasks() if (t.op, t.key, t.bucket) == ("attention", "bfloat16 64", 9))
    tall = attention.Config(64, 128, 64, True, 8, 2)
    write_table(tmp_path, [(task, other), (forward, tall)])
    found = [attention.config_for(64, BF16, "", 9, rows, device) for rows in (18, 12)]
    assert [config == tall for config in found] == [True, False]
    found = [attention_backward.configs_for(64, BF16, False, True, 9, rows, device).dq for rows in (18, 12)]
    assert [config == other for config in found] == [True, False]
    for facts in ((32, BF16, False, True), (64, FP16, False, True), (64, BF16, True, False)):
        assert attention_backward.configs_for(*facts, 9, 18, device).dq != other


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
def test_attentions_table_of_places_has_every_height(capability):
    """Of the tiles that a kernel owns, whatever the heuristic or a table chooses."""
    dtypes, headdims = (BF16, FP16, FP32), (16, 32, 64, 80, 128)
    heights = set()
    for dtype, headdim in itertools.product(dtypes, headdims):
        for kind in ("", "dropout", "extras"):
            heights |= {c.block_m for c in attention.candidates(headdim, dtype, kind, capability)}
        for extras, saved in ((False, False), (True, False), (False, True)):
            facts = headdim, dtype, extras, saved, capability
            heights |= {c.block_m for c in attention_backward.candidates("dq", *facts)}
            heights |= {c.block_n for c in attention_backward.candidates("dkdv", *facts)}
    assert heights <= set(attention_slots.HEIGHTS)
    assert capability == (0, 0) or max(heights) == attention_slots.HEIGHTS[-1]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
def test_few_candidates_are_timed_the_heuristics_first(capability):
    device = tuning.Device("GPU", capability, 132)
    for task in all_tasks([BF16, FP32]):
        configs = tune.candidates(task, device)
        kind = tune.KINDS[task.op]
        assert configs[0] == tune.heuristic(task, device)
        assert len(configs) == len(set(configs)) <= entries.MOST
        assert set(configs) <= set(kind.candidates(task, device))
        works = [kind.work(c, task, device) for c in kind.candidates(task, device)]
        assert all(kind.work(c, task, device) <= 1.5 * min(works) for c in configs[1:])
        # the tiles with least work are among them
        best = [c for c, work in zip(kind.candidates(task, device), works, strict=True) if work == min(works)]
        assert best[0] in configs


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("module", [linear, feed_forward], ids=["linear", "feed_forward"])
def test_all_candidates_begin_with_the_modules_own_and_fit(module, capability):
    ladder, configs = linear.ladder(BF16, True, capability), module.candidates(BF16, capability)
    assert configs[: len(ladder)] == ladder
    assert set(configs) <= set(linear.candidates(BF16, capability))
    assert {c.tma for c in configs} == {capability[0] >= 9}
    room = linear.most_shared(capability)
    assert all(module.shared_memory(c, BF16, capability) <= room for c in configs)
    # a thread's accumulators and, with pointers or on capability 12, its operands
    most = max(c.block_m * c.block_n // (32 * c.num_warps) for c in configs)
    assert most == (128 if capability[0] in (9, 10) else 64)


# --- one entry ----------------------------------------------------------------------------------------------


def timing(ms):
    return Timing(ms, ms, 0.0, 3, 1, "wall")


@pytest.fixture
def task():
    return entries.tasks_of("linear", LinearCase(40, 48, 96, "gelu"), FP32)[0]


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
def test_the_fastest_wins_unless_it_is_noise(task, few):
    configs = few(1.0, 0.995, 1.1, 1.2)
    _, entry = run_one(task)
    assert (entry["config"], entry["gain"]) == (configs[0]._asdict(), 1.0)
    configs = few(1.0, 0.9, 0.5, 0.7)
    rows, entry = run_one(task)
    assert entry["config"] == configs[2]._asdict()
    assert entry["usual"] == configs[0]._asdict()
    assert (entry["gain"], entry["tried"], entry["of"]) == (2.0, 4, 4)
    assert [row["median_ms"] for row in rows.values()] == [1.0, 0.9, 0.5, 0.7]


@interpreted
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda y: y + 0.01, "wrong: max error"),
        (lambda y: y.index_fill(0, torch.tensor([39]), float("nan")), "wrong: NaN"),
        (lambda y: y[:-1], "wrong: shape"),
        (mock.Mock(side_effect=RuntimeError("out of resource")), "RuntimeError: out of resource"),
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


# Cases whose shapes have few tiles, and every candidate of real GPUs.
DRAWN = {
    "attention": (
        AttentionCase((70, 33), 2, 64, packed_qkv=True),
        AttentionCase((70, 33), 2, 64, packed_qkv=True, dropout_p=0.1),
        AttentionCase((70, 33), 2, 64, packed_qkv=True, dropout_p=0.1, bias="keys"),
    ),
    "attention_bwd": (
        AttentionCase((70, 33), 2, 64, packed_qkv=True),
        AttentionCase((70, 33), 2, 64, packed_qkv=True, dropout_p=0.1),
    ),
    "feed_forward_bwd": (FeedForwardCase(150, 72, 272, 72),),
    "layer_norm": (
        LayerNormCase(9, 768, residual=True, x_bias=True),
        LayerNormCase(9, 768, residual=True, x_bias=True, dropout_p=0.1),
    ),
    "layer_norm_bwd": (LayerNormCase(30, 768, residual=True, x_bias=True, dropout_p=0.1),),
    "linear": (LinearCase(150, 72, 272, "gelu"), LinearCase(3, 200, 72)),
    "linear_bwd": (LinearCase(70, 24, 600, "gelu"),),
    "linear_norm": (LinearNormCase(70, 520, 136), LinearNormCase(33, 520, 136, arrivals=False)),
}
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (12, 0))


def drawn(op, dtype):
    """(task, config) of every config that a table may hold for the tasks of DRAWN, each once."""
    for case in DRAWN[op]:
        for task in entries.tasks_of(op, case, dtype):
            devices = [tuning.Device("GPU", capability, 100) for capability in CAPABILITIES]
            configs = [c for device in devices for c in tune.KINDS[op].candidates(task, device)]
            yield from ((task, config) for config in dict.fromkeys(configs))


@interpreted
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", DRAWN)
def test_fuzz_every_config_that_a_table_may_hold_computes_the_same(op, every):
    found = list(drawn(op, BF16))
    results = {}
    for task, config in found if every else random.Random(3).sample(found, 2):
        inputs = task.case.inputs(BF16, CPU)
        if task not in results:
            results[task] = tune.expected(task, inputs)
        assert tune.wrong(task, config, inputs, *results[task]) == "", (task.name, config)


@interpreted
@pytest.mark.parametrize("op", tune.KINDS)
def test_the_launcher_runs_what_the_table_says(monkeypatch, tmp_path, op):
    """A config that no heuristic chooses, in the table, reaches the launch of the public op."""
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    monkeypatch.setattr(tuning, "device_of", lambda _: tuning.Device("GPU", (0, 0), 2))
    for case in tune.KINDS[op].tiny:
        marked, others = {}, {}
        for task in entries.tasks_of(op, case, BF16):
            usual = tune.heuristic(task, tuning.device_of(CPU))
            # warps count for nothing in the interpreter
            marked[task] = usual._replace(num_warps=2 * usual.num_warps)
            for bucket in (task.bucket - 1, task.bucket + 1):
                others[dataclasses.replace(task, bucket=bucket)] = usual._replace(num_warps=32)
        write_table(tmp_path, {**others, **marked}.items())
        taken, warps, module = [], [], tune.module_of(op)
        launch = module.launch

        def record(real, config, *args, taken=taken, warps=warps, module=module, launch=launch):
            def recorded(*args, **options):
                warps.append(options["num_warps"])
                launch(*args, **options)

            taken.append(config)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "launch", recorded)
                return real(config, *args)

        with tune.launcher_of(task, record):
            tune.evaluate(task, case.call, case.inputs(BF16, CPU))
        assert len(taken) == 1
        assert {config.num_warps for config in marked.values()} <= set(warps)
        for task, config in marked.items():
            assert tune.KINDS[op].launched(config, task, taken[0]) == taken[0]
            assert config in (taken[0], *taken[0])


@interpreted
@pytest.mark.parametrize("op", ["attention_bwd", "feed_forward_bwd", "layer_norm_bwd", "linear_bwd"])
def test_a_wrong_gradient_cannot_win(monkeypatch, op):
    task = entries.tasks_of(op, tune.KINDS[op].tiny[0], BF16)[0]
    usual = tune.heuristic(task, tuning.device_of(CPU))
    configs = [usual, usual._replace(num_warps=8)]
    monkeypatch.setattr(tune, "candidates", lambda task, device: configs)
    module, name = tune.module_of(op), tune.KINDS[op].launcher
    real = getattr(module, name)

    def planted(config, *args):
        found = real(config, *args)
        if configs[1] in (config, *config):
            # the last gradient that there is
            next(t for t in reversed(found) if t.numel()).mul_(1.1)
        return found

    monkeypatch.setattr(module, name, planted)
    rows, entry = run_one(task)
    assert entry["config"] == usual._asdict()
    (bad,) = (row for row in rows.values() if row["status"] == "error")
    assert bad["error"].startswith("wrong: d")


# --- the command --------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("every", [False, True])
def test_a_dry_run_writes_a_table_that_serves(tmp_path, monkeypatch, capsys, every):
    out, record = tmp_path / "cpu.json", tmp_path / "tuning.jsonl"
    arguments = ["--device", "cpu", "--dtype", "bfloat16", "--out", str(out), "--json", str(record)]
    assert tune.main(arguments + ["--op", "linear"] * (not every)) == 0
    table = json.loads(out.read_text())
    assert list(problems(table, "cpu.json")) == []
    assert not every or set(table) == {"device", *tune.KINDS}
    assert " entries in" in capsys.readouterr().out
    from bench.lib import lines

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


@interpreted
def test_entries_are_merged_into_what_the_file_held(tmp_path, monkeypatch, task, few):
    out = tmp_path / "cpu.json"
    before = {"device": "cpu", "linear": {"float32 9x9": {"3": {"kept": 1}}, task.key: {"2": {"kept": 2}}}}
    out.write_text(json.dumps(before))
    configs = few(1.0, 0.9, 0.5, 0.7)
    monkeypatch.setattr(tune, "tasks", lambda *args: [task])
    assert tune.main(["--device", "cpu", "--out", str(out)]) == 0
    table = json.loads(out.read_text())
    assert table["linear"]["float32 9x9"] == {"3": {"kept": 1}}
    assert table["linear"][task.key] == {"2": {"kept": 2}, "6": configs[2]._asdict()}
    text = out.read_text()
    assert tune.main(["--device", "cpu", "--out", str(out)]) == 0
    assert out.read_text() == text
