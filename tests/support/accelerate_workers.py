"""Checks in two processes of `ranks.in_a_group` that train an accelerated model together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fastbert
from tests.support import accelerated_models
from tests.support.accelerated_models import worst_gradient
from tests.support.hf_models import batch

WORLD = 2
STEPS = 3


def tiny() -> torch.nn.Module:
    """A classifier of transformers in training, the same in every process."""
    return accelerated_models.tiny(num_labels=3).train()


def part(rank: int, step: int) -> dict[str, torch.Tensor]:
    """The batch of a rank. Lengths, words and the number of tokens differ between ranks."""
    inputs = batch("bert", 3 + rank, 18 + 5 * rank, seed=10 * step + rank)
    inputs["attention_mask"][:, 0] = 1  # a sequence without its first token is not packed
    return inputs | {"labels": torch.arange(3 + rank) % 3}


def sharded(model: torch.nn.Module, part: str = "") -> torch.nn.Module:
    """FSDP2 around each layer, or around a part of each, and around the model."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.bert.encoder.layer:
        fully_shard(layer.get_submodule(part), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(model: torch.nn.Module) -> torch.nn.Module:
    """Tensor parallelism inside each feed-forward block."""
    plan = {"intermediate.dense": ColwiseParallel(), "output.dense": RowwiseParallel()}
    for layer in model.bert.encoder.layer:
        parallelize_module(layer, init_device_mesh("cpu", (WORLD,)), plan)
    return model


WRAPPERS = {
    "ddp": lambda: DistributedDataParallel(fastbert.accelerate(tiny())),
    "ddp, accelerated after it": lambda: fastbert.accelerate(DistributedDataParallel(tiny())),
    "fsdp2": lambda: sharded(fastbert.accelerate(tiny())),
    "fsdp2, accelerated after it": lambda: fastbert.accelerate(sharded(tiny())),
    "fsdp2 inside the layers": lambda: sharded(fastbert.accelerate(tiny()), "attention"),
    "tensor parallel": lambda: split(fastbert.accelerate(tiny())),
}


def expected(ranks: Sequence[int] = range(WORLD)) -> tuple[list, list, list]:
    """The truth, by an untouched transformers model in one process.

    The losses of the ranks' batches at each step, the mean gradients, and the logits in eval after the last
    step and after one more of the optimizer.
    """
    model, losses, gradients, logits = tiny(), [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [model(**part(rank, step)).loss for rank in ranks]
        (sum(each) / len(ranks)).backward()
        losses.append([loss.item() for loss in each])
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            logits.append(model(**part(0, STEPS)).logits)
            optimizer.step()
    return losses, gradients, logits


def found(rank: int, model: torch.nn.Module, ranks: list[int]) -> dict:
    """Distances of a wrapped model's losses and gradients from the untouched one's, and which paths ran."""
    losses, gradients, _ = expected(ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loss_error, gradient_error, compared = 0.0, (0.0, ""), 0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**part(ranks[rank % len(ranks)], step)).loss
        loss.backward()
        want = losses[step][rank % len(ranks)]
        loss_error = max(loss_error, abs(loss.item() - want) / abs(want))
        mine = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        gradient_error = max(gradient_error, worst_gradient(mine, gradients[step]))
        compared += len(mine)
        optimizer.step()
    how = fastbert.explain(model)
    return {
        "loss_error": loss_error,
        "gradient_error": gradient_error,
        "compared": compared,
        "fused": [layer.fused for layer in how.layers],
        "fused_calls": [layer.fused_calls for layer in how.layers],
        "stock_calls": [layer.stock_calls for layer in how.layers],
        "packed_calls": [m.packed_calls for m in how.models],
        "padded_calls": [m.padded_calls for m in how.models],
        "explained": str(how),
    }


def results(rank: int) -> dict:
    """What `found` found, by wrapper."""
    result = {}
    for name, wrap in WRAPPERS.items():
        ranks = [0] if name == "tensor parallel" else [0, 1]  # whose batches are read
        result[name] = found(rank, wrap(), ranks)
    return result
