"""Checks in two processes of `ranks.in_a_group` that train a native model together."""

from __future__ import annotations

import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastbert
from fastbert.ops.linear import linear
from tests.support.accelerate_workers import STEPS, WORLD, expected, part, tiny
from tests.support.accelerated_models import full, worst_gradient
from tests.support.numbered_text import relative_error


def native(checkpointing: bool = False) -> fastbert.BertForSequenceClassification:
    """Our model with the weights of the transformers one that every worker starts from."""
    hf = tiny()
    model = fastbert.BertForSequenceClassification(fastbert.EncoderConfig.from_hf(hf.config))
    model.load_state_dict(hf.state_dict(), strict=True)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


def sharded(model: torch.nn.Module, inside: bool = False, **options) -> torch.nn.Module:
    """FSDP2 around each layer and around the model; with `inside` around each attention block too."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.bert.encoder.layer:
        if inside:
            fully_shard(layer.attention, mesh=mesh, **options)
        fully_shard(layer, mesh=mesh, **options)
    # the root is not resharded after forward by default, and would not see a step between two calls in eval
    return fully_shard(model, mesh=mesh, reshard_after_forward=True, **options)


def half() -> MixedPrecisionPolicy:
    """bfloat16 parameters and activations, gradients reduced in float32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


WRAPPERS = {
    "ddp": lambda: DistributedDataParallel(native()),
    "ddp, micro-batches": lambda: DistributedDataParallel(native()),
    "ddp, checkpointing": lambda: DistributedDataParallel(native(checkpointing=True)),
    "fsdp2": lambda: sharded(native()),
    "fsdp2, inside": lambda: sharded(native(), inside=True),
    "fsdp2, checkpointing": lambda: sharded(native(checkpointing=True)),
    "fsdp2, bf16": lambda: sharded(native(), mp_policy=half()),
    "transformers, fsdp2, bf16": lambda: sharded(tiny(), mp_policy=half()),
}


def backward(model: torch.nn.Module, inputs: dict[str, torch.Tensor], cuts: int) -> float:
    """The loss of a batch and its gradients, in `micro` micro-batches; only the last one is reduced."""
    count, total = len(inputs["labels"]), 0.0
    rows = torch.arange(count).tensor_split(cuts)
    for i, some in enumerate(rows):
        quiet = model.no_sync() if i < cuts - 1 else contextlib.nullcontext()
        with quiet:
            loss = model(**{key: value[some] for key, value in inputs.items()}).loss * len(some) / count
            loss.backward()
        total += loss.item()
    return total


def found(rank: int, model: torch.nn.Module, cuts: int, truth: tuple) -> dict:
    """How far a wrapped native model is from `truth`."""
    losses, gradients, logits = truth
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    result = {"loss": 0.0, "gradient": (0.0, ""), "gradients": 0.0, "compared": 0, "logits": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, want = backward(model, part(rank, step), cuts), losses[step][rank]
        mine = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        result["loss"] = max(result["loss"], abs(loss - want) / abs(want))
        result["gradient"] = max(result["gradient"], worst_gradient(mine, gradients[step]))
        whole = {name: full(gradient) for name, gradient in mine.items()}
        result["gradients"] = max(result["gradients"], relative_error(whole, gradients[step]))
        result["compared"] += len(mine)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for want in logits:  # the second time after a step that no call of `train` or `eval` announced
            error = (model(**part(0, STEPS)).logits.float() - want).norm() / want.norm()
            result["logits"].append(error.item())
            optimizer.step()
    return result


def refusal() -> str:
    """The error of an op that gets a weight that is not gathered."""
    layer = sharded(native()).bert.encoder.layer[0]
    try:
        linear(torch.ones(1, layer.output.dense.in_features), layer.output.dense.weight)
    except TypeError as error:
        return str(error)
    return "nothing"


def results(rank: int) -> dict:
    """What `found` found, by wrapper, and what was refused."""
    truth = expected()
    result = {}
    for name, wrap in WRAPPERS.items():
        result[name] = found(rank, wrap(), 3 if "micro" in name else 1, truth)
    return result | {"refused": refusal()}
