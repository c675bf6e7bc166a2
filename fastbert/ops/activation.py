r"""The activations: one table that every other file reads.

With Φ and φ the normal distribution and density, and σ the logistic function:

    name         act(z)                          act'(z)
    "gelu"       z Φ(z) = 0.5 z erfc(-z / √2)    Φ(z) + z φ(z)
    "gelu_tanh"  0.5 z (1 + t)                   0.5 (1 + t) + 0.5 z (1 - t²) √(2/π) (1 + 0.134145 z²)
                 with t = tanh(√(2/π) (z + 0.044715 z³))
    "relu"       max(z, 0)                       0 where z <= 0, else 1
    "silu"       z σ(z)                          σ(z) (1 + z (1 - σ(z)))
    "tanh"       tanh(z)                         1 - tanh²(z) = 4 σ(2z) σ(-2z)

`None` means no activation wherever a name is expected.

A gated activation (a gated linear unit) multiplies two halves of its columns, of which one is activated: with
(a, b) the halves of z, "first" is act(a) b and "second" is a act(b). For the gradient dy of "first",

    da = dy b act'(a),  db = dy act(a)

To add an activation:

1. an entry in `ACTIVATIONS` below, with the spellings of configs and of transformers' modules;
2. its code in the enum of csrc/cpu/linear.h and in the lists of kinds in csrc/cpu/linear_simd.cpp and
   csrc/cpu/linear_int8_simd.cpp, a branch each in `activate` and `activate_bwd` of csrc/cpu/activation.h, and
   the largest code in `activation_of` of csrc/bindings/bindings.h;
3. a branch each in `activate` and `slope` of kernels/activation.py;
4. a branch each in `with_activation` and `with_slope` of csrc/cuda/activation.cuh.

The `reference` and `aten` backends, the checks, the configs and `accelerate` read the table.
tests/ops/test_activation.py fails where one of the lists above differs from it, or a Case is missing;
docs/add-an-activation.md has the rest.

Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"; Ramachandran et al. 2017, "Searching for
Activation Functions" (silu); Shazeer 2020, "GLU Variants Improve Transformer" (gated).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Activation:
    """One activation.

    Attributes:
        code: its number in the enum `Activation` of csrc/cpu/linear.h.
        reference: act(z) in `z`'s own dtype, by the formula above.
        slope: act'(z) in `z`'s own dtype, by the formula above.
        eager: PyTorch's own function, differentiable.
        spellings: what `hidden_act` of a config calls it.
        modules: what transformers' and PyTorch's modules and functions of it are called.
    """

    code: int
    reference: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    eager: Callable[[Tensor], Tensor]
    spellings: tuple[str, ...]
    modules: tuple[str, ...]


def _gelu(z: Tensor) -> Tensor:
    return 0.5 * z * torch.erfc(-z * math.sqrt(0.5))


def _gelu_slope(z: Tensor) -> Tensor:
    density = torch.exp(-0.5 * z * z) * (1.0 / math.sqrt(2.0 * math.pi))
    return 0.5 * torch.erfc(-z * math.sqrt(0.5)) + z * density


def _gelu_tanh(z: Tensor) -> Tensor:
    return 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z * z * z)))


def _gelu_tanh_slope(z: Tensor) -> Tensor:
    c = math.sqrt(2.0 / math.pi)
    z = z.clamp(-1e4, 1e4)  # beyond, the slope is 0 or 1, and powers of z overflow
    t = torch.tanh(c * (z + 0.044715 * z * z * z))
    return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * c * (1.0 + 3 * 0.044715 * z * z)


def _gelu_tanh_eager(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _relu_slope(z: Tensor) -> Tensor:
    return (~(z <= 0)).to(z.dtype)  # 1 for NaN, as PyTorch has it


def _silu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z)


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


def _tanh_slope(z: Tensor) -> Tensor:
    return 4.0 * torch.sigmoid(2.0 * z) * torch.sigmoid(-2.0 * z)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(
        code=1,
        reference=_gelu,
        slope=_gelu_slope,
        eager=F.gelu,
        spellings=("gelu", "gelu_python"),
        modules=("GELUActivation", "gelu"),
    ),
    "gelu_tanh": Activation(
        code=2,
        reference=_gelu_tanh,
        slope=_gelu_tanh_slope,
        eager=_gelu_tanh_eager,
        spellings=("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"),
        modules=("NewGELUActivation", "GELUTanh", "PytorchGELUTanh", "FastGELUActivation"),
    ),
    "relu": Activation(
        code=3,
        reference=torch.relu,
        slope=_relu_slope,
        eager=F.relu,
        spellings=("relu",),
        modules=("ReLU", "relu"),
    ),
    "silu": Activation(
        code=4,
        reference=_silu,
        slope=_silu_slope,
        eager=F.silu,
        spellings=("silu", "swish"),
        modules=("SiLUActivation", "SiLU", "silu"),
    ),
    "tanh": Activation(
        code=5,
        reference=torch.tanh,
        slope=_tanh_slope,
        eager=torch.tanh,
        spellings=("tanh",),
        modules=("Tanh", "tanh"),
    ),
}

# Their codes in the C++ kernels.
CODES: dict[str | None, int] = {None: 0, **{name: a.code for name, a in ACTIVATIONS.items()}}
# A config's spelling -> our name.
SPELLINGS: dict[str, str] = {s: name for name, a in ACTIVATIONS.items() for s in a.spellings}
# The name of a module's class, or of a function -> our name.
MODULES: dict[str, str] = {m: name for name, a in ACTIVATIONS.items() for m in a.modules}

# Which half of a gated activation's argument is activated: "first" is act(a) b, "second" is a act(b).
GATES = ("first", "second")
# Their codes in the C++ kernels.
GATE_CODES: dict[str | None, int] = {None: 0, "first": 1, "second": 2}


def halves(z: Tensor, gated: str) -> tuple[Tensor, Tensor]:
    """(the half of the columns that is activated, the half that multiplies it): views of `z`."""
    a, b = z.tensor_split(2, dim=-1)
    return (a, b) if gated == "first" else (b, a)


def joined(active: Tensor, other: Tensor, gated: str) -> Tensor:
    """The tensor whose `halves` have these values."""
    return torch.cat((active, other) if gated == "first" else (other, active), dim=-1)


def activate_ref(z: Tensor, activation: str | None, gated: str | None = None) -> Tensor:
    """The activation of `z`, gated or not, in `z`'s own dtype, by its formula."""
    if gated is not None:
        active, other = halves(z, gated)
        return activate_ref(active, activation) * other
    return z if activation is None else ACTIVATIONS[activation].reference(z)


def slope_ref(z: Tensor, activation: str) -> Tensor:
    """The derivative of the activation at `z`, in `z`'s own dtype, by its formula."""
    return ACTIVATIONS[activation].slope(z)


def gradient_ref(dy: Tensor, z: Tensor, activation: str, gated: str | None = None) -> Tensor:
    """The gradient at `z` for the gradient `dy` of the activation, in their own dtype, by the formula."""
    if gated is None:
        return dy * slope_ref(z, activation)
    active, other = halves(z, gated)
    return joined(dy * other * slope_ref(active, activation), dy * activate_ref(active, activation), gated)


def activate_eager(z: Tensor, activation: str | None, gated: str | None = None) -> Tensor:
    """The activation of `z`, gated or not, by PyTorch's own functions."""
    if gated is not None:
        active, other = halves(z, gated)
        return activate_eager(active, activation) * other
    return z if activation is None else ACTIVATIONS[activation].eager(z)


def check_activation(activation: str | None, name: str = "activation") -> None:
    """Raise ValueError, which names the argument `name`, unless it is None or a name of `ACTIVATIONS`."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{name}: expected None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def activated_columns(columns: int, activation: str | None, gated: str | None, weight: str = "weight") -> int:
    """How many columns the activation makes of so many: half of them where it is gated.

    Args:
        columns: the rows of the weight.
        activation: None or a name of `ACTIVATIONS`.
        gated: None or one of `GATES`.
        weight: the argument that error messages name.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    check_activation(activation)
    if gated is None:
        return columns
    if gated not in GATES:
        raise ValueError(f"gated: expected None, 'first' or 'second', got {gated!r}")
    if activation is None:
        raise ValueError(f"activation: expected the name of one with gated={gated!r}, got None")
    if columns % 2:
        raise ValueError(f"{weight}: expected an even number of rows with gated={gated!r}, got {columns}")
    return columns // 2
