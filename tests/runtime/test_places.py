"""The addresses of tensors by PyTorch's C functions."""

from __future__ import annotations

import pytest
import torch

from fastbert.runtime import loader
from fastbert.runtime.places import _watch


def test_places_are_those_of_the_tensors():
    tensors = [
        torch.zeros(4, 6),
        torch.zeros(3, 4, 5).transpose(0, 2)[1:],
        torch.zeros(()),
        torch.zeros(0, 2),
    ]
    places = loader.extension.TensorPlaces([t._cdata for t in tensors])
    assert places.known()
    expected = [[loader.address(t), t.dim(), *t.shape, *t.stride()] for t in tensors]
    assert places.places() == [n for numbers in expected for n in numbers]
    assert places.same()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.clone(),
        lambda t: t.t(),
        lambda t: t[1:],
        lambda t: t[:3],
        lambda t: t[:, :2],
        lambda t: t.view(2, 2, 4),
        lambda t: t.view(-1)[::2],
        lambda t: t[:, :1].expand(4, 4),  # the last stride alone
        lambda t: t[:1].expand(4, 4),  # the first one alone
    ],
)
@pytest.mark.parametrize("which", (0, 1, 2))
def test_no_other_place_is_the_same(change, which):
    tensors = [torch.zeros(4, 4) for _ in range(3)]
    places = loader.extension.TensorPlaces([t._cdata for t in tensors])
    first = tensors[which].detach()
    tensors[which].data = change(tensors[which].data)
    assert not places.same()
    tensors[which].data = first
    assert places.same()


@pytest.mark.parametrize("missing", (None, *loader._TENSOR_FUNCTIONS))
def test_functions_that_answer_wrong_or_are_missing_are_not_used(missing, monkeypatch):
    found = loader._functions(*loader._TENSOR_FUNCTIONS)
    if missing is None:
        found["aoti_torch_get_sizes"] = found["aoti_torch_get_strides"]
    else:
        found.pop(missing)
    tensor = torch.zeros(3)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(loader, "_functions", lambda *_: found)
            loader._hand_over_tensor_functions(loader.extension)
        places = loader.extension.TensorPlaces([tensor._cdata])
        assert not places.known()
        assert not places.same()
        assert _watch((tensor,), [tensor._cdata]) is None
    finally:
        loader._hand_over_tensor_functions(loader.extension)
    assert loader.extension.TensorPlaces([tensor._cdata]).known()
