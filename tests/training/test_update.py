"""Steps without a host sync have the bits of steps with one, and a bad step ends the run at the right place.

`waits` makes the loop take the path of a GPU on the CPU. tests/support/host_waits.py counts what waits.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert.training import update
from fastbert.training.loop import TrainingError
from fastbert.training.parallel import Parallel
from tests.support import parallel_training as runs
from tests.support import tiny_training
from tests.support.tiny_training import Classes, digests, trainer
from tests.training.test_loop import weighted
from tests.training.test_parallel import ends, train

NOT_FINITE = r"^step 3: the gradient of model\.classifier\.bias is not finite; nothing was updated$"


def waiting(waits: bool = True) -> Parallel:
    """One process that waits for its device, or does not."""
    made = Parallel("none", "cpu")
    made.waits = waits
    return made


def norms(run) -> list[float | None]:
    return [json.loads(line)["grad_norm"] for line in (run / "log.jsonl").read_text().splitlines()]


# -- the same bits -------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("clip", [None, 0.7, 100.0])
@pytest.mark.parametrize("kind", ["adamw", "adamw-google", "lamb"])
def test_the_bits_of_a_host_that_waits(kind, clip, tmp_path):
    """Weights, moments, counts of steps and log, where some steps, all or none are clipped."""
    for name, waits in (("a", False), ("b", True)):
        options = {"clip": clip, "options": {"kind": kind}, "parallel": waiting(waits)}
        trainer(tmp_path / name, 12, **options).run()
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    if clip == 0.7:
        assert min(norms(tmp_path / "a")) < clip < max(norms(tmp_path / "a"))


@pytest.mark.sweep
@pytest.mark.parametrize("log_every", [1, 5])
def test_the_bits_of_fp16_that_skips(log_every, tmp_path):
    """The count of skips and the scale of the gradients too; a resumed run has them."""
    options = {"dtype": "fp16", "save_every": 5, "log_every": log_every, "keep": 9}
    for name, waits in (("a", False), ("b", True)):
        trainer(tmp_path / name, stages=weighted(300.0, 12), parallel=waiting(waits), **options).run()
    states = [json.loads((tmp_path / name / "step-000012" / "trainer.json").read_text()) for name in "ab"]
    assert states[0]["skipped"] == states[1]["skipped"] >= 2
    assert states[0]["scaler"] == states[1]["scaler"]
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


@pytest.mark.parametrize(("name", "dtype"), [("ddp2", "fp16"), ("fsdp2", "fp32")])
def test_the_bits_of_several_processes(name, dtype, tmp_path):
    for folder, waits in (("a", False), ("b", True)):
        options = {"dtype": dtype, "clip": 0.5, "waits": waits}
        assert set(ends(train(tmp_path / folder, name, **options))) == {"done"}
    assert runs.bits(tmp_path / "a") == runs.bits(tmp_path / "b")


# -- what is not finite --------------------------------------------------------------------------------------


class Spoiled(Classes):
    """The gradient of one bias is NaN in the step that comes after two."""

    def __init__(self) -> None:
        super().__init__()
        calls = []
        bias = self.model.classifier.bias
        bias.register_hook(lambda g: calls.append(1) or (g * float("nan") if len(calls) in (5, 6) else g))


def state_of(made) -> list[torch.Tensor]:
    """The weights and the optimizer's state."""
    parameters = list(made.module.parameters())
    moments = [made.optimizer.state[p][key] for p in parameters for key in ("step", "exp_avg", "exp_avg_sq")]
    return [value.detach().clone() for value in (*parameters, *moments)]


def spoiled(folder, kind, **options):
    """(a trainer whose third step is bad, its state after each step that it reports)."""
    kept = {}
    (stage,) = tiny_training.stages(8, options={"kind": kind})
    stage.build = Spoiled
    options |= {"parallel": waiting(), "on_step": lambda step: kept.update({step: state_of(made)})}
    made = trainer(folder, stages=[stage], **options)
    return made, kept


@pytest.mark.parametrize("kind", ["adamw", "adamw-google"])
@pytest.mark.parametrize(
    ("noticed", "log_every", "save_every"), [(3, 3, 100), (5, 5, 100), (4, 100, 4), (8, 100, 100), (4, 4, 4)]
)
def test_a_bad_step_changes_nothing_and_is_named_later(noticed, log_every, save_every, kind, tmp_path):
    """By the next log, checkpoint or end. Later gradients are finite, and change nothing either."""
    begun = []
    made, kept = spoiled(tmp_path, kind, log_every=log_every, save_every=save_every)
    step = made._step
    made._step = lambda *args: begun.append(1) or step(*args)
    with pytest.raises(TrainingError, match=NOT_FINITE):
        made.run()
    assert len(begun) == noticed
    assert not list(tmp_path.glob("step-*"))
    assert not (tmp_path / "log.jsonl").exists() or norms(tmp_path) == []
    assert all(map(torch.equal, state_of(made), kept[2]))
    assert not all(map(torch.equal, kept[1], kept[2]))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_bad_step_before_another_stage(fresh, tmp_path):
    """It ends the run before the stage's new optimizer could forget it."""
    stages = [tiny_training.stages(4)[0] for _ in range(2)]
    stages[0].build, stages[1].fresh_optimizer = Spoiled, fresh
    options = {"log_every": 100, "save_every": 100, "parallel": waiting()}
    with pytest.raises(TrainingError, match=NOT_FINITE):
        trainer(tmp_path, stages=stages, **options).run()
    assert not list(tmp_path.glob("step-*"))


def test_an_optimizer_that_cannot_skip_is_waited_for(tmp_path):
    """Its bad step is not taken, and ends the run at once."""
    made, kept = spoiled(tmp_path, "lamb", log_every=100, save_every=100)
    with pytest.raises(TrainingError, match=NOT_FINITE):
        made.run()
    assert list(kept) == [1, 2]
    assert all(map(torch.equal, state_of(made), kept[2]))


# -- the update alone ----------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts the numbers that the host takes from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("most", [None, 0.5, 50.0])
def test_a_step_reads_no_number(enabled, most):
    """And clips as a host that reads the norm."""
    torch.manual_seed(0)
    weights = [torch.randn(n, requires_grad=True) for n in (3, 5, 7)]
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    adam = torch.optim.AdamW(weights, lr=0.1, fused=True)
    made = update.Update(adam, scaler, 2.0**-24, torch.device("cpu"))
    assert made.read() is None
    for number in (1, 2):
        scaler.scale(sum((w * w).sum() for w in weights[: number + 1])).backward()
        scaler.unscale_(adam)
        grads = [w.grad for w in weights if w.grad is not None]
        expected = torch.nn.utils.get_total_norm(grads).item()
        factor = most / (expected + 1e-6) if most is not None and expected > most else 1.0
        clipped = [grad * factor for grad in grads]
        with Reads() as reads:
            made.step(number, most)
        assert reads.count == 0
        assert all(map(torch.equal, grads, clipped))
        found = made.read()
        assert (found.norm, found.skipped, found.step, found.wrong) == (expected, 0, None, [False] * 3)
        adam.zero_grad()


def test_a_scaler_at_its_least_scale_takes_no_step_after_a_bad_one():
    weight = torch.ones(3, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-24)
    adam = torch.optim.AdamW([weight], lr=0.1, fused=True)
    made = update.Update(adam, scaler, 2.0**-24, torch.device("cpu"))
    for number, factor in ((1, float("nan")), (2, 1.0)):
        scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(adam)
        made.step(number, None)
        adam.zero_grad()
    assert made.read().step == 1
    assert weight.tolist() == [1.0] * 3
