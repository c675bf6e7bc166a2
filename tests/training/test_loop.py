"""The loop on one process: a step is the published mathematics, however its batch is cut."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import threading
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fastbert
from fastbert.testing.error_rule import compare
from fastbert.training import identity, loop, work
from fastbert.training.draws import Draws, key_of
from fastbert.training.loop import Stage, Trainer, TrainingError
from fastbert.training.module import Losses
from fastbert.training.optimizers import decay_groups
from fastbert.training.parallel import Parallel
from fastbert.training.schedules import Schedule
from fastbert.training.stream import Batch, Stream
from tests.support import tiny_training
from tests.support.tiny_training import ROOF, Classes, Numbered, NumberedPlan, digests, trainer

VOCAB, WIDTH, STEPS = 11, 5, 6
HALVES = {"enter": lambda old, new: [nn.init.constant_(p, 0.5) for p in new.parameters()]}
WEIGHTS = {"class": 0.5, "size": 2.0}
OPTIONS = {"kind": "adamw", "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}


class Bags:
    """Bags of numbers; some have a class, some a size, so each loss has counts of its own, 0 among them."""

    hash = "bags"

    def plan(self, epoch: int) -> NumberedPlan:
        return NumberedPlan(1 + Draws(key_of("bags"), epoch, 0).below(7, 29))

    def example(self, plan: NumberedPlan, epoch: int, index: int) -> np.ndarray:
        return Draws(key_of("bag"), epoch, index).below(VOCAB, int(plan.lengths[index]))

    def collate(self, bags: list[np.ndarray]) -> Batch:
        lengths = np.array([len(bag) for bag in bags])
        classes = np.array([bag[0] % 3 if bag[0] % 2 else -1 for bag in bags])
        sizes = np.array([len(bag) if bag[-1] < 4 else -1 for bag in bags], np.float64)
        inputs = {
            "ids": np.concatenate(bags),
            "bag": np.repeat(np.arange(len(bags)), lengths),
            "classes": classes,
            "sizes": sizes,
        }
        return Batch(inputs, {"class": int((classes >= 0).sum()), "size": int((sizes >= 0).sum())}, lengths)


def sums_of(inputs: dict[str, Any], table, head, bias) -> dict[str, Any]:
    """The sum of each loss over a batch, in plain PyTorch."""
    features = torch.zeros(len(inputs["classes"]), WIDTH, dtype=table.dtype)
    features = features.index_add(0, inputs["bag"], table[inputs["ids"]]).tanh()
    scores = features @ head.T + bias
    labelled, sized = inputs["classes"] >= 0, inputs["sizes"] >= 0
    chosen, classes = scores[labelled, :3], inputs["classes"][labelled]
    negative = chosen.logsumexp(1) - chosen.gather(1, classes[:, None])[:, 0]
    distance = (scores[sized, 3] - inputs["sizes"][sized].to(table.dtype)).square()
    right = int((chosen.argmax(1) == classes).sum())
    return {"class": negative.sum(), "size": distance.sum(), "right": right}


def first_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"table": (VOCAB, WIDTH), "head": (4, WIDTH), "bias": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Bagged(Losses):
    """What the loop trains: means over a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in first_weights().items():
            setattr(self, name, nn.Parameter(value))
        self.exports, self.weights = {}, WEIGHTS
        self.gradients: list[dict[str, torch.Tensor]] = []

    def forward(self, inputs: dict[str, Any], measure: bool = False):
        found = sums_of(inputs, self.table, self.head, self.bias)
        right = torch.tensor(found.pop("right"))
        counts = {"class": (inputs["classes"] >= 0).sum(), "size": (inputs["sizes"] >= 0).sum()}
        return (
            {name: found[name] / counts[name].clamp_min(1) for name in found},
            {"class": right} if measure else {},
        )


def groups_of(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    """The head moves at a tenth of the rate, and the bias does not decay."""
    return [
        {"params": [module.table], "weight_decay": decay},
        {"params": [module.bias], "weight_decay": 0.0},
        {"params": [module.head], "weight_decay": decay, "lr_scale": 0.1},
    ]


def transcription(dtype: torch.dtype, clip: float | None, schedule: Schedule):
    """The same training in plain PyTorch: one batch per step, each loss over its count.

    Returns:
        (gradients of each step before clipping, last weights, lines of the log)
    """
    w = {name: value.to(dtype).requires_grad_() for name, value in first_weights().items()}
    decays = {"table": OPTIONS["weight_decay"], "bias": 0.0, "head": OPTIONS["weight_decay"]}
    made = torch.optim.AdamW(
        [{"params": [w[name]], "weight_decay": decay} for name, decay in decays.items()],
        betas=OPTIONS["betas"],
        eps=OPTIONS["eps"],
    )
    gradients, lines, tokens = [], [], 0
    stream = Stream(Bags(), 3, sequences=8)
    for step in range(STEPS):
        batch = stream.batch(step)
        inputs = {key: torch.from_numpy(value) for key, value in batch.inputs.items()}
        found = sums_of(inputs, **w)
        means = {name: found[name] / batch.counts[name] for name in WEIGHTS}
        total = sum(WEIGHTS[name] * mean for name, mean in means.items())
        made.zero_grad()
        total.backward()
        gradients.append({name: p.grad.clone() for name, p in w.items()})
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in w.values()))
        if clip is not None and norm > clip:
            for p in w.values():
                p.grad.mul_(clip / (norm + 1e-6))
        for group, scale in zip(made.param_groups, (1.0, 1.0, 0.1), strict=True):
            group["lr"] = schedule(step) * scale
        made.step()
        tokens += int(batch.lengths.sum())
        lines.append(
            {
                "step": step + 1,
                "loss": total.item(),
                **{f"{name}_loss": mean.item() for name, mean in means.items()},
                "class_accuracy": found["right"] / batch.counts["class"],
                "lr": schedule(step),
                "grad_norm": norm,
                "tokens": tokens,
                "sequences": 8 * (step + 1),
            }
        )
    return gradients, {name: p.detach() for name, p in w.items()}, lines


def assert_as_exact(actual, eager, oracle, what: str) -> None:
    """The project's error rule; the floor is a rounding step of the largest value."""
    floor = 2.0**-23 * oracle.abs().max().item()
    *_, reason = compare(actual, eager, oracle, torch.float32, floor)
    assert not reason, f"{what}: {reason}"


@pytest.mark.parametrize("clip", [None, 0.5, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_a_step_is_the_mean_over_its_whole_batch(micro_batches, clip, tmp_path):
    """Gradients, weights and log of six steps, against float64."""
    schedule, made = Schedule("linear", 0.1, STEPS, 2), []

    def build() -> Bagged:
        made.append(Bagged())
        for name, p in made[0].named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: made[0].gradients.append((name, p.grad.clone()))
            )
        return made[0]

    stage = Stage(
        *(STEPS, Bags(), build, schedule, micro_batches, 8 // micro_batches),
        **{"options": OPTIONS, "groups": groups_of},
        **({} if clip == 1.0 else {"clip": clip}),  # 1 is the default
    )
    options = {"log_every": 1, "tensorboard": False, "progress": False}
    result = Trainer([stage], tmp_path, seed=3, **options).run()

    stream = Stream(Bags(), 3, sequences=8 // micro_batches)
    counts = [stream.batch(number).counts["class"] for number in range(STEPS * micro_batches)]
    if micro_batches > 1:  # a mean of means would be another one
        assert len(set(counts)) > 1
    if micro_batches == 8:
        assert 0 in counts
    oracle, eager = (transcription(dtype, clip, schedule) for dtype in (torch.float64, torch.float32))
    for step in range(STEPS):
        for name in first_weights():
            seen = [gradient for key, gradient in made[0].gradients if key == name]
            assert len(seen) == STEPS * micro_batches
            actual = seen[(step + 1) * micro_batches - 1]  # the last micro-batch's, which completes the sum
            assert_as_exact(actual, eager[0][step][name], oracle[0][step][name], f"{step} {name}")
    for name, p in made[0].named_parameters():
        assert_as_exact(p.detach(), eager[1][name], oracle[1][name], name)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    for line, expected in zip(lines, oracle[2], strict=True):
        assert list(line) == list(expected)
        assert line == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert result.last == lines[-1]
    if clip is not None:
        assert any(line["grad_norm"] > clip for line in lines)


def test_a_step_without_any_label(tmp_path):
    """The loss is 0, and the run continues."""

    class Unlabelled(Numbered):
        def collate(self, examples):
            made = super().collate(examples)
            made.inputs["labels"][:] = -100
            made.counts = {"class": 0}
            return made

    last = trainer(tmp_path, 2, source=Unlabelled()).run().last
    assert (last["loss"], last["class_accuracy"], last["grad_norm"]) == (0.0, 0.0, 0.0)


class Drawing(Classes):
    """Says what its forwards draw."""

    def forward(self, inputs, measure=False):
        self.drawn.append(torch.rand(1).item())
        return super().forward(inputs, measure)


def drawn(run, seed=3, **options) -> list[float]:
    found: list[float] = []

    def build():
        module = Drawing()
        module.drawn = found
        return module

    (stage,) = tiny_training.stages(4, **options)
    stage.build = build
    trainer(run, stages=[stage], save_every=2, seed=seed).run()
    return found


def test_draws_depend_on_seed_step_and_micro_batch_alone(tmp_path):
    """Not on what other code draws between, and not on whether the run was interrupted."""
    expected = drawn(tmp_path / "a")
    assert len(set(expected)) == 8

    class Noisy(Numbered):
        def collate(self, examples):
            torch.rand(3)
            return super().collate(examples)

    torch.manual_seed(99)
    assert drawn(tmp_path / "b", source=Noisy()) == expected
    shutil.rmtree(tmp_path / "a" / "step-000004")
    assert drawn(tmp_path / "a") == expected[4:]
    assert not set(drawn(tmp_path / "c", seed=4)) & set(expected)


# --- precision ----------------------------------------------------------------------------------------------


def test_half_precision_follows_float32(tmp_path):
    losses = {}
    for dtype in ("fp32", "bf16", "fp16"):
        run = tmp_path / dtype
        trainer(run, 6, dtype=dtype, dropout=0.0).run()
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        losses[dtype] = [line["loss"] for line in lines]
        assert ("skipped" in lines[0]) == (dtype == "fp16")
        saved = load_file(run / "step-000006" / "model" / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float32}
        scaler = json.loads((run / "step-000006" / "trainer.json").read_text())["scaler"]
        assert bool(scaler) == (dtype == "fp16")
    for dtype, limit in (("bf16", 2e-2), ("fp16", 2e-3)):
        assert losses[dtype] == pytest.approx(losses["fp32"], abs=limit)
        assert losses[dtype] != losses["fp32"]


def weighted(weight: float, steps: int, **options) -> list[Stage]:
    def build():
        module = Classes()
        module.weights = {"class": weight}
        return module

    (stage,) = tiny_training.stages(steps, schedule=Schedule("constant", 1e-2, steps), **options)
    stage.build = build
    return [stage]


def test_fp16_skips_a_step_whose_gradients_overflow(tmp_path):
    """Its scale is halved until they do not; the log counts the skips; a resumed run has the scale."""
    trainer(tmp_path / "run", stages=weighted(300.0, 12), dtype="fp16", save_every=1, keep=20).run()
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    skips = [line["skipped"] for line in lines]
    assert skips == sorted(skips)
    assert 2 <= skips[-1] < 12
    assert [line["grad_norm"] is None for line in lines] == [
        b > a for a, b in zip([0, *skips], skips, strict=False)
    ]
    for step in range(1, 12):
        before, after = (
            load_file(tmp_path / "run" / f"step-{s:06d}" / "heads.safetensors")["scale"]
            for s in (step, step + 1)
        )
        skipped = skips[step] > skips[step - 1]
        assert torch.equal(before, after) == skipped
    expected = digests(tmp_path / "run")
    for step in range(2, 13):
        shutil.rmtree(tmp_path / "run" / f"step-{step:06d}")
    trainer(tmp_path / "run", stages=weighted(300.0, 12), dtype="fp16", save_every=1, keep=20).run()
    assert digests(tmp_path / "run") == expected


def test_fp16_whose_gradients_are_finite_at_no_scale(tmp_path):
    words = r"step 41: the gradient of .* is not finite; nothing was updated"
    with pytest.raises(TrainingError, match=words):
        trainer(tmp_path, stages=weighted(1e38, 60), dtype="fp16", save_every=100).run()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_stops_before_the_update(dtype, tmp_path):
    """It names the parameter; the weights are the previous step's; a healthy run resumes from there."""
    steps, modules = [], []

    def build():
        modules.append(Classes())
        modules[-1].model.classifier.bias.register_hook(
            lambda g: steps.append(1) or (g * float("nan") if len(steps) > 4 else g)
        )
        return modules[-1]

    (stage,) = tiny_training.stages(6)
    stage.build = build
    match = r"^step 3: the gradient of model\.classifier\.bias is not finite; nothing was updated$"
    with pytest.raises(TrainingError, match=match):
        trainer(tmp_path / "run", stages=[stage], dtype=dtype, save_every=2).run()
    saved = load_file(tmp_path / "run" / "step-000002" / "model" / "model.safetensors")
    state = modules[0].model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in saved.items())
    trainer(tmp_path / "run", dtype=dtype).run(), trainer(tmp_path / "unbroken", dtype=dtype).run()
    assert digests(tmp_path / "run") == digests(tmp_path / "unbroken")


def test_gradients_whose_norm_overflows(tmp_path):
    class Huge(Bagged):
        def forward(self, inputs, measure=False):
            losses, right = super().forward(inputs, measure)
            return {name: loss + self.table.sum() * 3e38 for name, loss in losses.items()}, right

    made = Huge()
    made.weights = {"class": 1.0, "size": 0.0}
    stage = Stage(2, Bags(), lambda: made, Schedule("constant", 0.1, 2), sequences=8)
    with pytest.raises(TrainingError, match="the gradient of all parameters together is not finite"):
        Trainer([stage], tmp_path, tensorboard=False).run()


# --- stages -------------------------------------------------------------------------------------------------


def two_stages(**second: Any) -> list[Stage]:
    first, other = (tiny_training.stages(3, schedule=Schedule("linear", 1e-2, 6, 2))[0] for _ in range(2))
    return [first, dataclasses.replace(other, **second)]


def test_a_stage_has_its_own_source_and_begins_where_it_says(tmp_path, noted):
    found = noted(Trainer, "_backward", lambda self, batch, *_, **__: batch.inputs["input_ids"])
    other = Numbered(size=9, seed=6)
    result = trainer(
        tmp_path, stages=two_stages(source=other, first_micro_batch=4, first_step=3, sequences=2)
    ).run()
    expected = [Stream(Numbered(), 3, sequences=4).batch(m).inputs["input_ids"] for m in range(6)]
    expected += [Stream(other, 3, sequences=2).batch(m).inputs["input_ids"] for m in range(4, 10)]
    assert len(found) == 12
    assert all(map(np.array_equal, found, expected))
    rates = [json.loads(line)["lr"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rates == [Schedule("linear", 1e-2, 6, 2)(step) for step in range(6)]
    assert result.last["sequences"] == 3 * 8 + 3 * 4


@pytest.mark.parametrize("second", [{}, {"fresh_optimizer": True}, HALVES], ids=["same", "fresh", "enter"])
def test_the_optimizer_goes_on_or_begins_anew(second, tmp_path):
    """A stage that fills another module saves it before its first step."""
    trainer(tmp_path, stages=two_stages(**second), save_every=9, keep=9).run()
    saved = sorted(folder.name for folder in tmp_path.glob("step-*"))
    assert saved == (["step-000003"] if "enter" in second else []) + ["step-000006"]
    model = load_file(tmp_path / saved[0] / "model" / "model.safetensors")
    assert all((value == 0.5).all() for value in model.values()) == ("enter" in second)
    moments = load_file(tmp_path / "step-000006" / "optimizer.safetensors")
    steps = {value.item() for key, value in moments.items() if key.endswith("/step")}
    assert steps == {3.0 if second else 6.0}
    assert {key.rpartition("/")[2] for key in moments} == {"step", "exp_avg", "exp_avg_sq"}


def groups_at_rest(module, decay):
    return [{**group, "lr_scale": 0.5} for group in decay_groups(module, decay)]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "second",
    [
        {},
        {"fresh_optimizer": True, "options": {"kind": "lamb"}},
        {"groups": groups_at_rest},  # of a continued optimizer the groups stay too
        {"groups": groups_at_rest, "fresh_optimizer": True},
        {"source": Numbered(size=9), "tokens": 24, "sequences": None},
    ],
)
@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_stages_resume(second, step, tmp_path):
    """From every step, also that between the stages."""
    trainer(tmp_path, stages=two_stages(**second), save_every=1, keep=9).run()
    expected = digests(tmp_path)
    for later in range(step + 1, 7):
        shutil.rmtree(tmp_path / f"step-{later:06d}")
    trainer(tmp_path, stages=two_stages(**second), save_every=1, keep=9).run()
    assert digests(tmp_path) == expected


# --- what is written ----------------------------------------------------------------------------------------


def test_a_checkpoint_is_a_model_that_loads(tmp_path):
    """The model's directory alone, with files of the caller; and all is in the manifest."""
    result = trainer(
        tmp_path, 3, finish=lambda folder: (folder / "model" / "vocab.txt").write_text("a")
    ).run()
    assert result.checkpoint == tmp_path / "step-000003"
    model = fastbert.BertForSequenceClassification.from_pretrained(result.checkpoint / "model")
    saved = load_file(result.checkpoint / "model" / "model.safetensors")
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items() if key in saved)
    manifest = json.loads((result.checkpoint / "manifest.json").read_text())["sha256"]
    files = {str(p.relative_to(result.checkpoint)) for p in result.checkpoint.rglob("*") if p.is_file()}
    assert files == {*manifest, "manifest.json"}
    assert "model/vocab.txt" in files
    assert list(load_file(result.checkpoint / "heads.safetensors")) == ["scale"]  # in no export
    state = json.loads((result.checkpoint / "trainer.json").read_text())
    assert [state[key] for key in ("step", "seed", "dtype")] == [3, 3, "float32"]
    assert state["sources"] == [Numbered().hash]
    assert json.loads((tmp_path / "config.json").read_text()) == {"steps": 3}


@pytest.mark.parametrize(("save_every", "steps"), [(2, [2, 4, 5]), (3, [3, 5]), (5, [5]), (9, [5])])
def test_when_checkpoints_are_written(save_every, steps, tmp_path):
    trainer(tmp_path, 5, save_every=save_every, keep=9).run()
    assert sorted(int(p.name[5:]) for p in tmp_path.glob("step-*")) == steps


def test_log_every_and_the_last_step(tmp_path):
    trainer(tmp_path / "a", 7, log_every=3).run(), trainer(tmp_path / "b", 7).run()
    some, all_ = ((tmp_path / run / "log.jsonl").read_text().splitlines() for run in "ab")
    assert [json.loads(line)["step"] for line in some] == [3, 6, 7]
    assert some == [all_[2], all_[5], all_[6]]  # totals count the steps between too


def test_each_version_that_computes_is_compared(tmp_path, monkeypatch):
    trainer(tmp_path, 2).run()
    found, said = identity.versions(), []
    assert list(found) == ["fastbert", "torch", "numpy", "python"]
    assert found["torch"] == torch.__version__
    monkeypatch.setattr(loop, "versions", lambda: dict.fromkeys(found, "9.9"))
    trainer(tmp_path, 2, say=said.append).run()
    changes = ", ".join(f"{name} {version} -> 9.9" for name, version in found.items())
    assert said[1] == f"versions have changed, bits may differ: {changes}"


def test_mfu_where_a_peak_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "peak", lambda device, dtype: ROOF / 4)
    trainer(tmp_path, 2).run()
    line = json.loads((tmp_path / "speed.jsonl").read_text().splitlines()[0])
    assert line["mfu"] == pytest.approx(4 * line["of_roof"])


def test_in_a_thread_signals_are_left_alone(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(trainer(tmp_path, 2).run().step))
    thread.start()
    thread.join()
    assert found == [2]


# --- what is refused ----------------------------------------------------------------------------------------


def test_a_count_without_a_loss_is_that_of_a_share(tmp_path):
    class Counted(Numbered):
        def collate(self, examples):
            made = super().collate(examples)
            made.counts["long"] = 8
            return made

    class Shares(Classes):
        def forward(self, inputs, measure=False):
            losses, correct = super().forward(inputs, measure)
            return losses, {**correct, "long": torch.tensor(3)} if measure else {}

    made = tiny_training.stages(2, source=Counted())
    made[0].build = Shares
    last = trainer(tmp_path, 2, stages=made).run().last
    assert last["long_share"] == 3 / 8
    assert last["loss"] == last["class_loss"]


def test_a_loss_without_a_count(tmp_path):
    class Renamed(Numbered):
        def collate(self, examples):
            made = super().collate(examples)
            made.counts = {}
            return made

    with pytest.raises(TrainingError, match="losses: class: a loss without a count"):
        trainer(tmp_path, source=Renamed()).run()


def test_bad_arguments_are_named(tmp_path):
    for values, match in (
        ({"steps": 0}, "steps: expected an integer >= 1, got 0"),
        ({"first_step": -1}, "first_step: expected an integer >= 0, got -1"),
        ({"clip": 0.0}, "clip: expected a number > 0, or None, got 0.0"),
        ({"sequences": None}, "sequences, tokens: expected one of the two"),
        ({"options": {"kind": "sgd"}}, "kind: expected one of adamw, adamw-google, lamb, got 'sgd'"),
    ):
        base = {"steps": 1, "source": Numbered(), "build": Classes, "schedule": Schedule("constant", 1, 1)}
        with pytest.raises(ValueError, match=match):
            Stage(**{**base, "sequences": 4, **values})
    for values, match in (
        ({"dtype": "int8"}, "dtype: expected one of fp32, bf16, fp16, got 'int8'"),
        ({"workers": -1}, "workers: expected an integer >= 0, got -1"),
        ({"seed": "3"}, "seed: expected an integer, got '3'"),
        ({"config": {"lr": float("nan")}}, "config: expected values of JSON: .*not JSON compliant"),
        ({"stages": two_stages(options={"kind": "lamb"})}, "options: expected those of the previous stage"),
    ):
        with pytest.raises(ValueError, match=match):
            trainer(tmp_path / "run", **values)
    first = dataclasses.replace(two_stages()[0], enter=print)
    with pytest.raises(ValueError, match="enter: expected None in the first stage"):
        trainer(tmp_path / "run", stages=[first])
    with pytest.raises(ValueError, match="stages: expected at least one"):
        Trainer([], tmp_path / "run")
    parallel = Parallel()
    parallel.world = 3
    with pytest.raises(ValueError, match="micro_batches: 2 per step cannot be shared equally by 3 processes"):
        trainer(tmp_path / "run", parallel=parallel)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_module(tmp_path):
    """The config is what tells two runs apart; without it the shapes do."""
    trainer(tmp_path, 2).run()
    (stage,) = tiny_training.stages(2)
    stage.build = lambda: Classes(layers=3)
    match = r"step-000002: model\.bert\.encoder\.layer\.2\..*: expected shape \(16, 16\), got None"
    with pytest.raises(ValueError, match=match):
        trainer(tmp_path, stages=[stage], config={"steps": 2}).run()


def test_contexts_are_closed_when_a_step_fails(tmp_path):
    """The next run can lock the directory, and the log is closed."""

    class Failing(Numbered):
        def collate(self, examples):
            raise OSError("the disk of the corpus is gone")

    for _ in range(2):
        with pytest.raises(OSError, match="corpus"):
            trainer(tmp_path, source=Failing()).run()
    trainer(tmp_path).run()
