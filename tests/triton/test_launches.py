"""How many kernels an encoder layer launches on a GPU in inference: counted by the dispatch table of GPUs.

In the interpreter: each launch of a Triton kernel, and each of PyTorch's operations that computes or copies.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fastbert.backends.aten import linear as aten_linear
from fastbert.execution import gpu, launchers
from fastbert.execution.call import Call
from fastbert.layers import float_linear
from fastbert.layers import linear as linear_layers
from fastbert.layers.batch import PackedBatch
from fastbert.layers.encoder_layer import EncoderLayer
from fastbert.models.config import EncoderConfig
from fastbert.ops import attention_autograd
from fastbert.ops import attention_places as places_op
from fastbert.runtime import dispatch
from fastbert.runtime.table import TABLE
from fastbert.testing import proving
from tests.support.layer_calls import through
from tests.support.triton_fixtures import DEVICE, HALF, interpreted, kernels_of

pytestmark = [interpreted, pytest.mark.sweep]
MODULES = ("attention", "attention_places", "layer_norm", "linear", "linear_norm")
KERNELS = {name: kernels_of(name) for name in MODULES}
# Operations that launch nothing: views, and memory without values.
NOTHING = {
    *("alias", "as_strided", "detach", "expand", "reshape", "select", "slice", "split", "squeeze", "t"),
    *("transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "empty", "empty_like", "empty_strided"),
    "new_empty",
}


class Counted(TorchDispatchMode):
    """`launches` grows by a name for each kernel."""

    def __init__(self):
        super().__init__()
        self.launches: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in NOTHING:
            self.launches.append(name)
        return func(*args, **kwargs or {})


@pytest.fixture(params=["op by op", "directly"])
def counted(monkeypatch, request):
    """The table of GPUs serves this device, all kernels are proven, and launches are counted."""
    monkeypatch.setattr(launchers, "on_gpu", lambda device: request.param == "directly")
    monkeypatch.setattr(gpu, "serves", lambda x, call: "its kernels are CUDA's")
    monkeypatch.setitem(TABLE, DEVICE.type, TABLE["cuda"])
    monkeypatch.setattr(dispatch, "_resolved", {})
    monkeypatch.setattr(proving, "is_proven", lambda *unit: True)
    joined = linear_layers.FLOAT._replace(joins=lambda x, modules: True)  # as on a GPU
    monkeypatch.setattr(linear_layers, "FLOAT", joined)
    monkeypatch.setitem(linear_layers.LINEAR_KINDS, torch.nn.Linear, joined)
    monkeypatch.setattr(aten_linear, "_widened", lambda *_: False)  # a GPU multiplies bfloat16
    for module in (attention_autograd, places_op):  # on a GPU its values are not looked at
        monkeypatch.setattr(module, "check_table", lambda *args: None)
    mode = Counted()

    def counting(launch):
        def count(kernel, *args, **options):
            mode.launches.append(kernel.fn.__name__)
            with _disable_current_modes():
                launch(kernel, *args, **options)

        return count

    for module in KERNELS.values():
        monkeypatch.setattr(module, "launch", counting(module.launch))
    return mode


def layer_of(dtype):
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = EncoderConfig(model_type="bert", vocab_size=100, **sizes)
    return EncoderLayer(config).to(dtype).to(DEVICE).eval()


def one_sequence(rows, dtype, **modes):
    """As a model's forward has it: with the table of attention's places, which all layers share."""
    ends = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    return PackedBatch(ends, rows, places=places_op.attention_places(ends, rows, rows, dtype), **modes)


def forward(layer, counted, rows=128, **modes):
    """(y of two layers alike, the launches of the second)."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 64, generator=g).to(next(layer.parameters()).dtype).to(DEVICE)
    sequences = one_sequence(rows, x.dtype, **modes)
    with counted:
        call = Call(sequences, 1)
        x = through(layer, x, sequences, call=call)
        counted.launches.clear()
        return through(layer, x, sequences, call=call), list(counted.launches)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_layer_of_few_rows_is_five_launches(dtype, counted):
    """The joined projections, attention, and three for output, FFN1 and FFN2 with all that follows them."""
    layer = layer_of(dtype)
    with torch.no_grad():
        y, launches = forward(layer, counted)
        product = [name for name in launches if not name.startswith("_")]
        assert len(product) == 1
        assert product[0] in ("addmm", "mm", "linear")
        assert [name for name in launches if name.startswith("_")] == [
            "_attention_fwd_kernel",
            "_linear_norm_kernel",
            "_linear_fwd_kernel",
            "_linear_norm_kernel",
        ]
        with dispatch.use_backend("reference"):
            expected = layer.float()
            rounded = forward(expected, counted)[0]
    assert (y.float() - rounded).norm() < 0.01 * rounded.norm()


@torch.no_grad()
def test_more_rows_are_seven_launches(counted):
    """As few rows were before: products by cuBLAS, and LayerNorm's own kernel."""
    launches = forward(layer_of(torch.bfloat16), counted, rows=257)[1]
    assert len(launches) == 7
    assert launches.count("_layer_norm_fwd_kernel") == 2
    assert "_linear_norm_kernel" not in launches


@torch.no_grad()
def test_counters_are_made_once_per_forward(counted):
    """By the first layer that needs them; what they are made by is the one launch more."""
    layer = layer_of(torch.bfloat16)
    sequences = one_sequence(5, torch.bfloat16)
    call = Call(sequences, 1)
    x = torch.randn(5, 64, device=DEVICE).bfloat16()
    forward(layer, counted, rows=5)  # joins the projections' weights
    with counted:
        for more in (1, 0, 0):
            counted.launches.clear()
            through(layer, x, sequences, call=call)
            assert len(counted.launches) == 5 + more
            assert ("zeros" in counted.launches or "zero_" in counted.launches) == bool(more)
    assert len(call.arrivals) == 1
    assert not call.arrivals[0].any()


@pytest.mark.parametrize("why", ["gradients", "dropout", "hooked", "autocast", "float32", "norm", "pinned"])
def test_what_keeps_a_layer_in_two_ops(why, counted, monkeypatch):
    layer = layer_of(torch.float32 if why in ("float32", "autocast") else torch.bfloat16)
    called = []
    monkeypatch.setattr(float_linear, "linear_norm", lambda *args, **options: called.append(args))
    scope, modes = torch.no_grad(), {}
    if why == "gradients":
        scope = torch.enable_grad()
    elif why == "dropout":
        layer.train()
        modes = {"seed": torch.tensor([3], device=DEVICE)}
    elif why == "hooked":
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda *_: None)
    elif why == "autocast":
        scope = torch.autocast(DEVICE.type, torch.bfloat16)
    elif why == "norm":
        for parent in list(layer.modules()):
            for name, module in parent.named_children():
                if isinstance(module, torch.nn.LayerNorm):
                    own = type("OwnNorm", (torch.nn.LayerNorm,), {})(64).bfloat16()
                    setattr(parent, name, own)
    with scope, torch.set_grad_enabled(why == "gradients"):
        if why == "pinned":
            with dispatch.use_backend(linear_norm="aten"):
                forward(layer, counted, rows=9, **modes)
        else:
            forward(layer, counted, rows=9, **modes)
    assert called == []
