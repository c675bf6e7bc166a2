"""`extension.ModelWatch`: whether a model is as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastbert.runtime import loader, prepared

pytestmark = pytest.mark.skipif(loader.extension is None, reason="the extension is not built")


class Other(nn.Linear):
    """Another class."""


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4))).eval()
    return model.requires_grad_(False)


class Watched:
    """A model and a watch of all of it, with derived values of its first weight."""

    def __init__(self):
        self.model = make()
        self.modules = list(self.model.modules())
        self.tables = [t for m in self.modules for t in (m._parameters, m._buffers, m._modules)]
        self.hooks = [h for m in self.modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        self.attributes = [vars(m) for m in self.modules]
        self.tensors = [*self.model.parameters(), *self.model.buffers()]
        self.memory = [t.detach() for t in self.tensors]
        weight = self.model[0].weight
        prepared.derived(self.model[0], "twice", (weight,), lambda: weight * 2)
        self.storage = weight.untyped_storage()
        self.watch = loader.extension.ModelWatch(
            self.modules, self.tables, self.hooks, self.attributes, self.tensors, self.tensors, [self.storage]
        )
        assert self.watch.known()
        assert self.watch.same()


def swap(model):
    torch.utils.swap_tensors(model[1][0].weight, nn.Parameter(torch.ones(4), requires_grad=False))


CHANGES = {
    "a class": lambda m: setattr(m[0], "__class__", Other),
    "a parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "no bias": lambda m: setattr(m[0], "bias", None),
    "one parameter more": lambda m: m[0].register_parameter("third", nn.Parameter(torch.ones(1))),
    "one parameter less": lambda m: m[0]._parameters.pop("bias"),
    "a parameter's name": lambda m: m[0]._parameters.update(scale=m[0]._parameters.pop("bias")),
    "a buffer": lambda m: setattr(m[1][1], "running_mean", torch.ones(4)),
    "a module": lambda m: m.__setitem__(0, Other(4, 4).eval()),
    "one module more": lambda m: m.append(nn.Identity().eval()),
    "a hook": lambda m: m[1][0].register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m[1].register_forward_pre_hook(lambda *_: None),
    "a part in training": lambda m: m[1][1].train(),
    "no mode": lambda m: m[1].__dict__.pop("training"),
    "data": lambda m: setattr(m[0].weight, "data", torch.ones(4, 4)),
    "a transposed weight": lambda m: setattr(m[0].weight, "data", m[0].weight.data.t()),
    "more dimensions": lambda m: setattr(m[0].weight, "data", m[0].weight.data.view(1, 1, 1, 2, 2, 4)),
    "fewer rows": lambda m: setattr(m[0].weight, "data", m[0].weight.data[:3]),
    "swapped tensors": swap,
    "a write": lambda m: m[1][0].weight.mul_(2),
    "a write to a buffer": lambda m: m[1][1].running_var.mul_(2),
    "a write through data": lambda m: m[0].weight.data.mul_(2),
    "a write through NumPy": lambda m: m[0].weight.numpy().__imul__(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change):
    watched = Watched()
    with torch.no_grad():
        CHANGES[change](watched.model)
    assert not watched.watch.same()


def test_what_changes_nothing():
    watched = Watched()
    with torch.no_grad():
        watched.model(torch.ones(3, 4))
        watched.model.state_dict()
        _ = watched.model[0].weight + watched.model[0].weight.data
    list(watched.model.named_parameters())
    watched.model.eval()
    assert watched.watch.same()
    hook = watched.model[0].register_forward_hook(lambda *_: None)
    assert not watched.watch.same()
    hook.remove()
    assert watched.watch.same()


def test_sizes_that_pytorch_keeps_elsewhere():
    """PyTorch allocates the sizes of more than five dimensions."""
    tensor = torch.zeros(1, 2, 1, 2, 1, 3)
    watch = loader.extension.ModelWatch([], [], [], [], [tensor], [tensor], [])
    memory = tensor.detach()
    assert watch.known()
    assert watch.same()
    tensor.data = tensor.data.transpose(1, 3)
    assert not watch.same()
    tensor.data = memory
    assert watch.same()
    tensor.data = memory.view(2, 2, 3)
    assert not watch.same()
    # PyTorch has freed that memory; other tensors take it, and this one gets its sizes at another place
    others = [torch.zeros(2, 1, 3, 1, 2, 1) for _ in range(64)]
    tensor.data = memory
    assert watch.same()
    del others


@pytest.mark.parametrize("lacks", ["functions", "marks"])
def test_a_pytorch_that_does_not_tell_of_writes(lacks, monkeypatch):
    find, tensor = loader._functions, torch.zeros(3)

    def found(*asked):
        return {asked[0]: 0} if set(asked) == set(loader._WRITE_FUNCTIONS.values()) else find(*asked)

    try:
        with monkeypatch.context() as patched:
            if lacks == "functions":
                patched.setattr(loader, "_functions", found)
            else:
                patched.setattr(torch.Tensor, "_lazy_clone", lambda t: t)
            loader._hand_over_tensor_functions(loader.extension)
        watch = loader.extension.ModelWatch([], [], [], [], [tensor], [tensor], [])
        assert not watch.known()
        assert not watch.same()
        assert loader.extension.tensor_write_state(tensor._cdata, tensor.untyped_storage()._cdata) is None
        assert loader.extension.tensor_codes(tensor._cdata) == (6, 0)
    finally:
        loader._hand_over_tensor_functions(loader.extension)
    assert loader.extension.ModelWatch([], [], [], [], [tensor], [tensor], []).known()
