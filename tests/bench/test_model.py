"""The cost model: its counts, its sums, and its predictions beside the committed rows."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from bench import model as cost_model
from bench.lib import results, roofs, training, workloads
from bench.lib.costs import committed, devices, fleet, published
from bench.lib.costs import counts as costs
from bench.lib.costs.counts import BACKWARD, FORWARD, OPTIMIZER
from bench.lib.encoder import floor_seconds
from bench.lib.engines import MINILM
from bench.lib.workloads import BASE, LARGE, TINY, Model
from fastbert import testing

LENGTHS = (9, 2, 14)
SMALL = Model("small", 4, 1, 2, 8, vocab=10)
XEON = devices.RESULTS / "cpu-intel-xeon-processor-family-6-model-207-2c"
# 100 GFLOP/s, 10 GB/s, every share 1, no launches: times can be worked out by hand
PLAIN = devices.Device(
    "plain", "cpu", dict.fromkeys(costs.ITEMSIZE, 100.0), 10.0, True, "here", None, None,
    dict.fromkeys(devices.CPU, 1.0) | {"launch us": 0.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def compared() -> list[committed.Compared]:
    return committed.read(cost_model.results_of(devices.RESULTS))[0]


def flops(works, *kinds: str, which: str | None = None) -> float:
    return sum(w.flops for w in works if w.kind in kinds and which in (None, w.which))


def named(works, op: str, which: str = FORWARD) -> costs.Work:
    return next(work for work in works if (work.op, work.which) == (op, which))


# ---- counts ----


@pytest.mark.parametrize("tag", costs.ITEMSIZE)
@pytest.mark.parametrize("model", [BASE, LARGE, MINILM, TINY], ids=lambda model: model.name)
def test_a_forward_has_the_benchmarks_operations(model, tag):
    works = costs.forward(model, LENGTHS, tag, on_gpu=True)
    assert flops(works, "product", "attention") == workloads.encoder_flops(LENGTHS, model)


@pytest.mark.parametrize("lengths", [LENGTHS, (128,) * 8])
def test_a_step_has_two_more_products_for_each(lengths):
    works = costs.training(BASE, lengths, "bf16", on_gpu=True, head="pretraining")
    labelled, h = round(0.15 * sum(lengths)), BASE.hidden
    pairs = sum(n * n for n in lengths)
    heads = 2 * labelled * h * (h + BASE.vocab) + 2 * len(lengths) * h * h
    products = workloads.encoder_flops(lengths, BASE) - 4 * h * pairs * BASE.layers + heads
    assert flops(works, "product", which=FORWARD) == products
    assert flops(works, "product", which=BACKWARD) == 2 * products
    assert flops(works, "attention") == 3.5 * 4 * h * pairs * BASE.layers
    # training_flops counts attention's backward twice, and no pooler
    whole = workloads.training_flops(lengths, BASE, labelled)
    extra = 0.5 * 4 * h * pairs * BASE.layers + 6 * len(lengths) * h * h
    assert flops(works, "product", "attention") == whole + extra


@pytest.mark.parametrize("tag", ["fp32", "bf16"])
def test_the_bytes_are_those_of_the_cases(tag):
    lengths, dtype = (128,) * 8, {"fp32": torch.float32, "bf16": torch.bfloat16}[tag]
    works = costs.forward(BASE, lengths, tag, on_gpu=False)
    products = dict(zip(("qkv", "attention output", "FFN1 + GELU", "FFN2"), range(4), strict=True))
    for op, i in products.items():
        case = testing.bench_cases("linear", lengths)[i]
        assert named(works, op).moved == BASE.layers * case.bytes(dtype)
        assert named(works, op).flops == BASE.layers * case.flops()
    cases = {"attention": "attention", "embedding": "embedding", "residual + LayerNorm": "layer_norm"}
    for op, name in cases.items():
        case = testing.bench_cases(name, lengths)[-1]  # LayerNorm: with a residual
        times = {"attention": 12, "embedding": 1, "layer_norm": 24}[name]
        assert (named(works, op).flops, named(works, op).moved) == (
            times * case.flops(),
            times * case.bytes(dtype),
        )


def test_the_bytes_of_8_bit_products_are_those_of_the_cases():
    lengths = (128,) * 8
    for on_gpu, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        works = costs.forward(BASE, lengths, "int8", on_gpu=on_gpu)
        for op, case in zip(
            ("qkv", "attention output", "FFN1 + GELU", "FFN2"),
            testing.bench_cases("linear_int8", lengths),
            strict=True,
        ):
            assert named(works, op).moved == 12 * case.bytes(dtype)


def test_a_small_forward_by_hand():
    # hidden 4, one layer, inner 8, sequences of 2 and 1 tokens, fp32
    works = costs.forward(SMALL, (2, 1), "fp32", on_gpu=True, pooling=True)
    assert {work.op: (work.flops, work.moved, work.calls) for work in works} == {
        "embedding": (10 * 12, 3 * 24 + (4 * 12 + 8) * 4, 1),
        "qkv": (2 * 3 * 4 * 12, (12 + 36 + 12 + 48) * 4, 1),
        "attention": (4 * 5 * 4, 4 * 12 * 4, 1),
        "attention output": (2 * 3 * 4 * 4, (12 + 12 + 16) * 4, 1),
        "residual + LayerNorm": (16 * 12, 2 * (3 * 12 + 8) * 4, 2),
        "FFN1 + GELU": (2 * 3 * 4 * 8, (12 + 24 + 8 + 32) * 4, 1),
        "FFN2": (2 * 3 * 4 * 8, (24 + 12 + 32) * 4, 1),
        # 3 rows are read, 2 x 2 written
        "packing": (0, 12 * 4 + 16 * 4 + 16 * 3, 1),
        "pooling": (12, 12 * 4 + 2 * (16 + 4), 1),
    }


def test_what_training_adds_by_hand():
    works = costs.training(SMALL, (2, 1), "fp32", on_gpu=True, head="pretraining")
    parameters = (10 + 512 + 2) * 4 + 8 + (64 + 64 + 16 + 12 + 16) + (16 + 4 + 10) + (16 + 4 + 8 + 10)
    assert costs.parameters(SMALL, "pretraining") == parameters
    assert named(works, "AdamW", OPTIMIZER).moved == 28 * parameters
    # of the embedding; of 2 heads x 5 pairs and two hidden states
    drawn = [work.flops for work in works if work.op == "dropout" and work.which == FORWARD]
    assert drawn == [20 * 12, 20 * (2 * 5 + 2 * 12)]
    # x and dy read, weight read, both gradients written; the activation's input read
    assert named(works, "FFN1 + GELU", BACKWARD).moved == (2 * 12 + 2 * 24 + 2 * 32) * 4
    # fp32 converts nothing; a GPU joins three matrices
    assert [work.moved for work in works if work.op == "weights"] == [2 * 4 * 48, 0]
    half = costs.training(SMALL, (2, 1), "bf16", on_gpu=True, head="pretraining")
    assert [work.moved for work in half if work.op == "weights"] == [2 * 2 * 48 + 6 * 128, 6 * 128]


@pytest.mark.parametrize("head", costs.HEADS)
def test_the_parameters_are_the_models(head):
    module = training.modules(TINY, head, ("fastbert",))["fastbert"]
    assert costs.parameters(TINY, head) == sum(p.numel() for p in module.parameters())


def test_a_classifiers_last_layer_computes_first_tokens_only():
    lengths = (128,) * 8
    full = costs.training(BASE, lengths, "fp32", on_gpu=False, head="pretraining")
    first = costs.training(BASE, lengths, "fp32", on_gpu=False, head="classification")
    ffn = [sum(w.flops for w in works if w.op == "FFN2" and w.which == FORWARD) for works in (full, first)]
    assert ffn[1] == ffn[0] * (11 + 8 / 1024) / 12


def test_whose_arithmetic_a_cpus_products_have():
    def tags(tag: str, which: str) -> set[str]:
        works = costs.training(BASE, LENGTHS, tag, on_gpu=False, head="classification")
        return {work.tag for work in works if work.kind == "product" and work.which == which}

    # bf16 has a roof of its own; the gradients of fp32 are left to torch's library, and so is a vocabulary
    assert (tags("bf16", FORWARD), tags("bf16", BACKWARD)) == ({costs.PAIRS}, {costs.PAIRS})
    assert (tags("fp32", FORWARD), tags("fp32", BACKWARD)) == ({"fp32"}, {costs.LIBRARY})
    works = costs.training(BASE, LENGTHS, "fp32", on_gpu=False, head="pretraining")
    vocabulary = [work for work in works if work.flops == 2 * 4 * 768 * 30522]
    assert [work.tag for work in vocabulary] == [costs.LIBRARY]
    assert costs.precision("bf16", True, True).gradients == "bf16"
    p = costs.precision("bf16", False, False)
    assert devices.share_names(costs.product("x", 1, 1, 1, p)) == ("product half", "product memory")


# ---- time ----


def test_a_cpu_adds_what_a_gpu_does_at_once():
    work = costs.Work("x", "product", "fp32", "fp32", flops=3e9, moved=2e8, calls=5)
    assert PLAIN.parts(work) == (pytest.approx(0.03 + 0.02), "arithmetic")
    gpu = replace(PLAIN, kind="gpu", shares=PLAIN.shares | {"product fp32": 0.5, "launch us": 1000.0})
    assert gpu.parts(work) == (pytest.approx(0.06 + 0.005), "arithmetic")
    assert gpu.parts(replace(work, calls=100)) == (pytest.approx(0.06 + 0.1), "launch")
    assert gpu.parts(replace(work, moved=1e9)) == (pytest.approx(0.1 + 0.005), "memory")


def test_row_wise_work_costs_its_bytes():
    work = costs.rows("x", costs.precision("fp32", False, False), flops=1e12, moved=1e8)
    assert PLAIN.parts(work) == (pytest.approx(0.01), "memory")


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["h100", str(XEON / "bench_cpu.json")], ids=["gpu", "cpu"])
def test_more_work_takes_longer_and_higher_roofs_less(name, train):
    device = devices.find(name)

    def seconds(model=BASE, lengths=(128,) * 8, device=device, tag="bf16"):
        return cost_model.predict(device, model, lengths, tag, train=train).seconds

    assert seconds() < seconds(lengths=(128,) * 9) < seconds(lengths=(129,) * 9)
    assert seconds() < seconds(model=replace(BASE, layers=13)) < seconds(model=replace(BASE, layers=14))
    assert seconds() < seconds(model=replace(BASE, intermediate=4096))
    assert seconds(lengths=(512,)) > seconds(lengths=(128,) * 4)  # attention
    faster = replace(device, gflops={tag: 2 * rate for tag, rate in device.gflops.items()})
    assert seconds(device=faster) < seconds()
    assert seconds(device=replace(device, gbytes=2 * device.gbytes)) < seconds()
    assert seconds(tag="bf16") != seconds(tag="fp32")


@pytest.mark.parametrize("name", ["h200", str(XEON / "bench_cpu.json")], ids=["gpu", "cpu"])
@pytest.mark.parametrize("workload", ["latency-128", "full"])
def test_the_floor_is_the_benchmarks(name, workload):
    device, lengths = devices.find(name), workloads.lengths(workload)
    found = cost_model.predict(device, BASE, lengths, "bf16")
    measured = roofs.Roofs(device.gflops, device.gbytes)
    whole = device.kind == "gpu"
    assert found.floor == pytest.approx(floor_seconds(BASE, lengths, measured, "bf16", whole))


def test_a_prediction_is_above_its_floor():
    for tag in ("bf16", "fp8"):
        for train in (False, True):
            found = cost_model.predict(
                devices.find("h200"), LARGE, workloads.lengths("train"), tag, train=train
            )
            assert 1.2 < found.seconds / found.floor < 3


# ---- beside the committed rows ----


def test_every_committed_forward_and_step_is_within_a_quarter(compared):
    held = [row for row in compared if row.held]
    assert {row.step for row in held} == {"forward", "training"}
    scripts = {"bench_cpu.json", "bench_accelerate.json", "bench_training.json"}
    assert {row.file for row in held} == scripts | {committed.SUITE}
    off = {row.key: round(row.error, 3) for row in held if not abs(row.error) <= 0.25}
    # the only ones, and none that has come to fit or that a new run has replaced
    assert set(off) == set(committed.KNOWN), off
    assert len(committed.KNOWN) == 4
    assert len(held) - len(off) >= 57


def test_a_row_of_the_suite_is_the_newest_of_its_machine(compared):
    folders = {folder: results.read_all(folder) for folder in results.RESULTS.glob("*")}
    found = list(committed.newest(run for runs in folders.values() for run in runs))
    assert len({(run.path.parent, row["name"]) for row, run in found}) == len(found)
    for row, run in found:
        runs = folders[run.path.parent]
        later = runs[runs.index(run) + 1 :]
        measured = {f"{b.group}-{b.candidate}" for other in later for b in other.benchmarks}
        assert row["name"] not in measured
    steps = [row["name"] for row, _ in found if row["step"] == "training"]
    held = [row.name for row in compared if row.file == committed.SUITE and row.step == "training"]
    assert sorted(steps) == sorted(held)
    assert len(held) >= 4


def test_bf16_on_a_cpu_has_the_roof_of_pairs_where_they_are_fast():
    def rate(bf16: float) -> float:
        found = devices._of_cpu({"fp32": 500.0, "bf16": bf16})
        return replace(devices.of_datasheet("h100"), kind="cpu", gflops=found).rate(costs.PAIRS)

    assert (rate(980.0), rate(250.0), rate(600.0)) == (980.0, 500.0, 500.0)


def test_no_forward_and_no_step_was_fitted(compared):
    fitted = [row for row in compared if row.fitted]
    assert {row.step for row in fitted} == {
        "op, product", "op, attention", "op, rows", "attention", OPTIMIZER
    }  # fmt: skip
    assert {row.workload for row in fitted} == {"1x512", "8x128"}
    assert {row.file for row in fitted} == {"bench_cpu.json", "bench_training_attention.json"}


def test_the_constants_are_the_fit(compared):
    fit = committed.fit(compared)
    assert {*fit, "product memory", "launch us"} == set(devices.CPU)
    for name, value in fit.items():
        assert devices.CPU[name] == pytest.approx(value, rel=0.01), name


def test_the_fit_finds_the_shares_that_made_the_times(compared):
    shares = devices.CPU | {"product fp32": 0.5, "rows half": 0.9, "attention memory": 0.3, "optimizer": 1.2}
    made = []
    for row in compared:
        if row.step != "attention":
            seconds = replace(row.device, shares=shares).seconds(row.works)
            made.append(replace(row, measured=seconds * 1e3) if row.works else row)
    with_draws = [replace(row.device, shares=shares).seconds(row.works) * 1e3 for row in compared]
    made += [
        replace(r, measured=ms) for r, ms in zip(compared, with_draws, strict=True) if r.step == "attention"
    ]
    found = committed.fit(made)
    for name, value in found.items():
        # the files with and without dropout have slightly different roofs
        assert value == pytest.approx(shares[name], rel=0.35 if name == "draw" else 1e-6), name


def test_memory_is_that_of_the_footprint(compared):
    rows = [row for row in compared if row.step == "footprint"]
    assert len(rows) == 4
    assert max(abs(row.error) for row in rows) < 0.05


def test_the_readme_quotes_the_errors(compared):
    text = (devices.RESULTS.parent / "README.md").read_text()
    mine = (row for row in compared if row.file != committed.SUITE and row.device.kind == "cpu")
    found = committed.summary(mine)
    for step, rows in {
        "forward": "forward: base and MiniLM, four workloads, three dtypes (28)",
        "training": "training step: base, two heads, two dtypes (12)",
        "op, rows": "work row by row: LayerNorm, embedding, packing, loss (48)",
        "optimizer": "AdamW, in another run (8)",
        "footprint": "memory of a step (4)",
    }.items():
        assert f"({found[step]['rows']})" in rows
        assert f"| {rows} | {found[step]['median']:.0%} | {found[step]['worst']:.0%}" in text, step


def planted(folder, factor: float):
    """A copy of one machine's results with arithmetic roofs `factor` times as high."""
    target = folder / XEON.name
    target.mkdir()
    shutil.copy(XEON / "bench_training_attention.json", target)
    for name in ("bench_cpu.json", "bench_training.json"):
        data = json.loads((XEON / name).read_text())
        data["roofs"]["gflops"] = {tag: factor * rate for tag, rate in data["roofs"]["gflops"].items()}
        (target / name).write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (2.0, 1), (0.5, 1)])
def test_check_fails_where_the_roofs_are_wrong(tmp_path, capsys, factor, status):
    path = tmp_path / "check.json"
    folder = tmp_path / "results"
    folder.mkdir()
    planted(folder, factor)
    assert cost_model.main(["check", "--results", str(folder), "--json", str(path)]) == status
    printed = capsys.readouterr().out
    assert ("OFF" in printed) == bool(status)
    assert f"not held: {next(iter(committed.KNOWN))[1]}" in printed
    data = json.loads(path.read_text())
    assert any(row["failed"] for row in data["rows"]) == bool(status)
    assert data["summary"]["training"]["rows"] == 12


def test_check_prints_every_row_and_says_what_it_leaves_out(capsys, compared):
    assert cost_model.main(["check"]) == 0
    printed = capsys.readouterr().out
    for row in compared:
        assert cost_model.check_line(row) in printed
    assert "bench_load.json: no roofs recorded" in printed
    for figure in published.figures():
        assert f"{figure.value:,.4g} {figure.unit}" in printed


def test_a_gpus_rows_are_shown_and_not_held():
    device = devices.find("h200")
    row = {"step": "encoder", "candidate": "fastbert-bf16", "model": "base", "workload": "full"}
    row |= {"name": "encoder-fastbert-bf16-base-full", "median_ms": 100.0}
    (found,) = committed.compare("encoder.json", row, device)
    assert found.error < -0.5
    assert not found.held
    assert not found.fitted


def test_torchs_own_ops_and_other_engines_are_not_predicted():
    kernel = {"step": "kernels", "serves": True, "backend": "aten", "median_ms": 1.0}
    assert not committed.of_ours(kernel)
    assert committed.of_ours(kernel | {"backend": "cpu"})
    assert not committed.of_ours(kernel | {"backend": "cpu", "serves": False})
    assert not committed.of_ours({"step": "encoder", "candidate": "openvino-fp32", "median_ms": 1.0})


# ---- published figures ----


def test_the_gpus_constants_give_the_figures_they_come_from():
    found = list(published.beside())
    fitted = [f for f in found if f.figure.fitted]
    assert len(fitted) == 4
    for f in fitted:
        assert f.predicted == pytest.approx(f.figure.value, rel=0.02), f.figure.source
    # the others, from a half to twice
    assert all(0.5 < f.predicted / f.figure.value < 2 for f in found)


def test_a_figure_beyond_the_floor_is_said_to_be():
    found = {(f.figure.value, f.figure.tag): f for f in published.beside()}
    assert "cannot meet it" in found[8165, "bf16"].verdict
    assert found[8165, "bf16"].floor == pytest.approx(7092, rel=0.01)
    assert found[8165, "fp8"].verdict == "faster than the model predicts"
    assert found[9.22, "fp16"].verdict == "slower than the model predicts"
    assert found[5.8, "bf16"].verdict == "faster than the model predicts"
    assert found[340, "bf16"].verdict == "what constants were fitted to"


# ---- devices ----


def test_a_datasheet_is_projected_and_a_probe_wins(tmp_path):
    sheet = devices.find("H200", tmp_path)
    assert (sheet.measured, sheet.word) == (False, "projected from a datasheet")
    assert sheet.gflops["bf16"] == pytest.approx(791_200)
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    rows = [
        {"step": "matrix", "status": "ok", "name": f"matmul-torch-{tag}-8192x8192x8192", "gflops": rate}
        for tag, rate in (("bf16", 7e5), ("fp32", 5e4), ("fp16", 6e5), ("int8", 1e6))
    ]
    rows.append(rows[0] | {"name": "matmul-scaled_mm-fp8_rowwise-8192x8192x8192", "gflops": 1.3e6})
    rows.append({"step": "bandwidth", "status": "ok", "name": "copy", "gbs": 4000.0})
    environment = {"device_type": "cuda", "device": "NVIDIA H200", "memory_bytes": 140 * 2**30}
    (folder / "probe.json").write_text(json.dumps({"environment": environment, "rows": rows}))
    probed = devices.find("h200", tmp_path)
    assert (probed.measured, probed.word) == (True, "predicted from measured roofs")
    assert probed.gflops == {"bf16": 7e5, "fp32": 5e4, "fp16": 6e5, "int8": 1e6, "fp8": 1.3e6}
    assert (probed.gbytes, probed.link, probed.memory_gib) == (4000.0, 450.0, 140.0)
    assert not devices.find("h100", tmp_path).measured


def test_the_roofs_of_a_file_are_its_own():
    data = json.loads((XEON / "bench_cpu.json").read_text())
    found = devices.find(str(XEON / "bench_cpu.json"))
    library = next(r for r in data["rows"] if r["name"] == "matmul-torch-fp32-2048x2048x2048")["gflops"]
    widened = data["roofs"]["gflops"]["fp32"]  # pairs are slow on that processor
    assert found.gflops == data["roofs"]["gflops"] | {costs.LIBRARY: library, costs.PAIRS: widened}
    assert found.gbytes == data["roofs"]["gbytes"]
    # the probe's file has rows only
    probed = devices.find(str(XEON / "probe.json"))
    assert probed.gbytes == roofs.of_file(XEON / "probe.json").gbytes
    assert (probed.kind, probed.link) == ("cpu", None)


def test_every_datasheet_names_its_source():
    assert set(devices.DATASHEETS) == {"a100", "h100", "h200", "b200"}
    for sheet in devices.DATASHEETS.values():
        assert "datasheet" in sheet.source
        assert sheet.tflops["int8"] / sheet.tflops["bf16"] == pytest.approx(2, rel=0.01)
        assert sheet.tflops.get("fp8", sheet.tflops["int8"]) == sheet.tflops["int8"]


# ---- fleets ----


def run_of(**changes) -> fleet.Run:
    made = fleet.Run(devices.find("h100"), LARGE, workloads.lengths("train"), "bf16", "pretraining", None)
    return replace(made, **changes)


def test_the_ring_by_hand():
    # each of 8 GPUs sends 2 x 7/8 of 1 GB at 100 GB/s
    assert fleet.all_reduce(1e9, 8, 100.0) == pytest.approx(0.0175)
    assert fleet.all_reduce(1e9, 2, 100.0) == pytest.approx(0.01)
    assert fleet.all_reduce(1e9, 1, 100.0) == 0
    assert fleet.exposed(0.0175, backward=1.0) == pytest.approx(0.2 * 0.0175)
    # a short backward hides no more than itself
    assert fleet.exposed(0.0175, backward=0.001) == pytest.approx(0.0165)


def test_a_plan_by_hand():
    run = run_of(link=100.0)
    one, eight = fleet.plan(run, 1), fleet.plan(run, 8)
    alone = cost_model.predict(run.device, LARGE, run.lengths, "bf16", train=True).seconds
    assert one.compute == eight.compute == pytest.approx(alone)
    assert (one.exposed, one.efficiency) == (0.0, 1.0)
    gradients = 4 * costs.parameters(LARGE, "pretraining")
    assert eight.all_reduce == pytest.approx(2 * 7 / 8 * gradients / 80e9)
    assert eight.exposed == pytest.approx(0.2 * eight.all_reduce)
    assert eight.per_s == pytest.approx(8 * 48 / (alone + eight.exposed))
    assert eight.efficiency == pytest.approx(alone / (alone + eight.exposed))
    assert sum(one.memory.values()) == sum(eight.memory.values())


def test_a_links_default_is_the_gpus_and_the_network_beyond_a_node():
    run = run_of()
    assert fleet.link_of(run, 8) == pytest.approx(0.8 * 450)
    assert fleet.link_of(run, 9) == pytest.approx(0.8 * 400)
    with pytest.raises(ValueError, match="link_gbs"):
        fleet.link_of(replace(run, device=replace(run.device, link=None)), 2)


def test_a_batch_that_does_not_fit_is_cut():
    whole, cut = fleet.plan(run_of(), 1), fleet.plan(run_of(), 1, global_batch=480)
    assert whole.micro_batches == 1
    assert cut.micro_batches > 1
    assert sum(cut.memory.values()) <= 0.9 * run_of().device.memory_gib * 2**30
    # a little faster: AdamW runs once for all ten batches
    assert 1 < cut.per_s / whole.per_s < 1.1
    huge = Model("huge", 16384, 100, 128, 65536)
    assert fleet.plan(run_of(model=huge), 1).micro_batches == 0
    assert fleet.enough(run_of(model=huge), 1.0) is None


def test_the_fullest_gpu_sets_the_pace():
    nine = fleet.plan(run_of(), 8, global_batch=9)
    assert nine.sequences == 2
    assert nine.efficiency < 9 / 16


@pytest.mark.parametrize("batch", [None, 96])
def test_no_fewer_gpus_are_enough(batch):
    want = 1000.0
    found = fleet.enough(run_of(), want, batch)
    assert found.gpus > 1
    assert found.per_s >= want
    assert all(fleet.plan(run_of(), n, batch).per_s < want for n in range(1, found.gpus))
    assert fleet.enough(run_of(), 1e9, batch) is None


# ---- the command ----


def test_the_command_predicts_beside_the_measured_row(tmp_path, capsys):
    path = tmp_path / "p.json"
    arguments = ["--workload", "8x128", "--dtype", "fp32", "--device", str(XEON / "bench_cpu.json")]
    assert cost_model.main([*arguments, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "predicted from measured roofs" in printed
    assert "projected" not in printed
    data = json.loads(path.read_text())
    (measured,) = data["measured"]
    assert measured["name"] == "encoder-fastbert-fp32-base-8x128"
    assert measured["error"] == pytest.approx(data["seconds"] * 1e3 / measured["ms"] - 1)
    assert sum(row["seconds"] for row in data["rows"]) == pytest.approx(data["seconds"])


def test_the_command_plans_a_fleet(tmp_path, capsys):
    path = tmp_path / "p.json"
    arguments = "--model large --workload train --device h200 --train --gpus 12 --want 3000"
    assert cost_model.main([*arguments.split(), "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "predicted from measured roofs" in printed
    assert "measured:" not in printed
    plans = json.loads(path.read_text())["fleet"]
    assert [plan["gpus"] for plan in plans["plans"]] == [1, 2, 4, 8, 12]
    assert f"{plans['enough']['gpus']} GPUs are enough" in printed


def test_replicas_need_no_all_reduce(tmp_path):
    path = tmp_path / "p.json"
    arguments = "--lengths 128,97,30 --dtype int8 --device h100 --gpus 3 --want 9999"
    assert cost_model.main([*arguments.split(), "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["fleet"]["sequences_per_s"] == pytest.approx(3 * data["sequences_per_s"])
    assert data["fleet"]["enough"] == math.ceil(9999 / data["sequences_per_s"])


def test_an_own_models_sizes():
    found = cost_model.model_of("3,96,4")
    assert (found.layers, found.hidden, found.heads, found.intermediate) == (3, 96, 4, 384)
    assert cost_model.model_of("minilm") == MINILM
    assert cost_model.lengths_of("5x77", None) == (77,) * 5


WRONG = {
    "--device nope --workload full": "device: got 'nope'",
    "--device h100 --workload full --model 12,768,11": "model: got '12,768,11'",
    "--device h100 --workload full --model huge": "model: got 'huge'",
    "--device h100 --workload nope": "workload: got 'nope'",
    "--device h100 --workload 0x128": "lengths: got ()",
    "--device h100 --workload 2x513": "lengths: got 513",
    "--device h100 --lengths 1,x": "lengths: got '1,x'",
    "--device h100 --lengths 1,0": "lengths: got (1, 0)",
    "--device h100": "workload: expected either",
    "--device h100 --workload full --lengths 3": "workload: expected either",
    "--workload full": "device: expected --device",
    "--device a100 --workload full --dtype fp8": "dtype: got 'fp8', which A100 has no roof",
    "--device h100 --workload full --dtype int8 --train": "dtype: got 'int8'",
    "--device CPU --workload full --dtype fp8": "dtype: got 'fp8'",
    "--device CPU --workload full --dtype fp8 --train": "dtype: got 'fp8'",
    "--device CPU --workload full --gpus 2": "gpus: got 2",
    "--device CPU --workload full --want 2": "want: got 2.0",
    "--device h100 --workload full --gpus 0": "gpus: got 0",
    "--device h100 --workload full --want -1": "want: got -1",
    "--device h100 --workload full --want nan": "want: got nan",
    "--device h100 --workload full --global-batch 3": "global_batch: got 3",
    "--device h100 --workload full --train --global-batch 3": "global_batch: got 3",
    "--device h100 --workload full --train --gpus 8 --global-batch 3": "global_batch: got 3",
    "--device h100 --workload full --train --gpus 8 --link-gbs 0": "link_gbs: got 0",
    "--device h100 --workload full --head pretraining": "head: got pretraining",
    "--device h100 --workload full --train --pooling": "pooling: got True",
    "check --train": "train: got True",
    "check --device h100": "device: got h100",
    "check --results /nowhere": "results: got '/nowhere'",
    "--device README --workload full": "device: got",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_argument_is_named(arguments, capsys):
    places = {"CPU": str(XEON / "bench_cpu.json"), "README": str(devices.RESULTS / "README.md")}
    argv = [places.get(word, word) for word in arguments.split()]
    assert cost_model.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"model: {WRONG[arguments]}")
    assert printed.out == ""


def test_a_results_file_without_roofs_is_no_device(tmp_path):
    path = tmp_path / "x.json"
    for text in ("{}", "[]", '{"rows": [], "environment": {"device_type": "cpu", "device": "x"}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"device: got .*x\.json.* no roofs"):
            devices.find(str(path))
