"""Every backend takes the arguments of the contract, and the contract those of the custom op."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from fastbert.backends import reference
from fastbert.ops.attention import AttentionInputs
from fastbert.ops.embedding import EmbeddingInputs, EmbeddingSaved
from fastbert.ops.layer_norm import LayerNormInputs, LayerNormSaved
from fastbert.ops.linear_cross_entropy import LossInputs
from fastbert.ops.linear_distillation import DistillationInputs
from fastbert.ops.linear_fp8 import LinearFp8Inputs
from fastbert.ops.linear_int8 import LinearInt8Inputs
from fastbert.runtime import dispatch

LAUNCHERS = [
    f"{op}_{which}" for op in dispatch.OPS for which in ("fwd", "bwd") if hasattr(reference, f"{op}_{which}")
]


def arguments(launcher) -> list[tuple[str, object]]:
    """(name, default) of each argument."""
    return [(p.name, p.default) for p in inspect.signature(launcher).parameters.values()]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_backends_take_the_same_arguments(launcher):
    expected = arguments(getattr(reference, launcher))
    for name in dispatch.BACKENDS:
        backend = dispatch.backend_module(name)
        found = getattr(backend, launcher, None)
        if getattr(found, "__name__", "") == "<lambda>":  # it calls its namesake: the next test
            continue
        of_distances = {"relative", "need_scores"} if hasattr(backend, "reads_relative") else set()
        taken = [] if found is None else [a for a in arguments(found) if a[0] not in of_distances]
        assert found is None or taken == expected, name


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_triton_launchers_take_the_same_arguments(launcher):
    pytest.importorskip("triton")
    op = launcher.rsplit("_", 1)[0]
    parts = "feed_forward", "linear_cross_entropy", "linear_fp8"
    if op not in dispatch.backend_module("triton").DTYPES or op in parts:
        pytest.skip("there is no kernel of this op's own")
    module = {"attention_bwd": "attention_backward", "linear_bwd": "linear_backward"}.get(launcher, op)
    found = getattr(importlib.import_module(f"fastbert.kernels.{module}"), launcher)
    taken = [a for a in arguments(found) if a[0] not in ("relative", "need_scores")]
    assert taken == arguments(getattr(reference, launcher))


def schema(name: str) -> list[str]:
    """The names of a custom op's arguments."""
    return [a.name for a in getattr(torch.ops.fastbert, name).default._schema.arguments]


@pytest.mark.parametrize(
    ("inputs", "name", "rest"),
    [
        (AttentionInputs, "attention_fwd", ["return_probs", "save_bits", "places", "training"]),
        (EmbeddingInputs, "embedding_fwd", ["save"]),
        (LayerNormInputs, "layer_norm_fwd", ["save"]),
        (LinearFp8Inputs, "linear_fp8_fwd", []),
        (LinearInt8Inputs, "linear_int8_fwd", []),
        (LossInputs, "linear_cross_entropy_fwd", []),
        (DistillationInputs, "linear_distillation_fwd", []),
    ],
)
def test_inputs_are_the_arguments_of_the_custom_op(inputs, name, rest):
    """`torch.ops` takes them one by one, in this order."""
    assert [*inputs._fields, *rest] == schema(name)


@pytest.mark.parametrize(
    ("saved", "name"), [(EmbeddingSaved, "embedding_bwd"), (LayerNormSaved, "layer_norm_bwd")]
)
def test_what_backward_gets_is_in_the_order_of_the_custom_op(saved, name):
    assert schema(name)[1 : 1 + len(saved._fields)] == list(saved._fields)
