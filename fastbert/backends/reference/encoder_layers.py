"""`encoder_layers` by the `reference` backend; contract in fastbert/ops/encoder_layers.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.checks import FLOATS
from fastbert.ops.encoder_layers import LayersInputs, encoder_layers_ref

DTYPES = FLOATS


def encoder_layers_fwd(inputs: LayersInputs) -> list[Tensor]:
    return encoder_layers_ref(*inputs)
