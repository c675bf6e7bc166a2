"""Models whose weights accelerate keeps in CPU memory or on disk."""

from __future__ import annotations

import pytest
import torch
import transformers

import fastbert
from tests.support.accelerated_models import HEAD, assert_close, assert_stock, first_kept, tiny


@pytest.mark.parametrize("order", ("offload-first", "accelerate-first"))
@pytest.mark.parametrize("auto", (HEAD, transformers.AutoModel), ids=("head", "bare"))
def test_an_offloaded_model_takes_the_stock_path(fresh_accelerator, auto, order):
    if order == "offload-first":
        model = fastbert.accelerate(fresh_accelerator.cpu_offload(tiny(auto)))
    else:
        model = fresh_accelerator.cpu_offload(fastbert.accelerate(tiny(auto)))
    assert all(p.device.type == "meta" for p in model.parameters())
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool() if auto is not HEAD else ...
    with torch.no_grad():
        expected = tiny(auto)(**inputs)[0][kept]
        assert_close(model(**inputs)[0][kept], expected)
    assert_stock(model)
    # after the hooks are removed the weights are back, and everything is fused again
    fresh_accelerator.hooks.remove_hook_from_submodules(model)
    before = {layer.name: layer.stock_calls for layer in fastbert.explain(model).layers}
    with torch.no_grad():
        assert_close(model(**inputs)[0][kept], expected)
    how = fastbert.explain(model)
    assert all(layer.fused and layer.fused_calls == 1 for layer in how.layers), str(how)
    assert before == {layer.name: layer.stock_calls for layer in how.layers}
    assert [part.packed_calls for part in how.models] == [1], str(how)


@pytest.mark.parametrize("auto", (HEAD, transformers.AutoModel), ids=("head", "bare"))
def test_an_offloaded_model_can_be_restored(fresh_accelerator, auto):
    model = fastbert.restore(fresh_accelerator.cpu_offload(fastbert.accelerate(tiny(auto))))
    inputs = first_kept("bert")
    with torch.no_grad():
        expected = tiny(auto)(**inputs)[0]
        assert torch.equal(model(**inputs)[0], expected)
        fresh_accelerator.hooks.remove_hook_from_submodules(model)
        assert torch.equal(model(**inputs)[0], expected)


def test_strict_refuses_an_offloaded_model(fresh_accelerator):
    model = fresh_accelerator.cpu_offload(tiny())
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"layer\.0"):
        fastbert.accelerate(model, strict=True)
    assert [type(module) for module in model.modules()] == classes
    model = fresh_accelerator.cpu_offload(fastbert.accelerate(tiny(), strict=True))
    with torch.no_grad(), pytest.raises(RuntimeError, match="layer"):
        model(**first_kept("bert"))
