"""`encoder_layers` by the `cuda` backend: csrc/cuda/encoder_layers.cu; contract in ops/encoder_layers.py.

The products are cuBLASLt's, which PyTorch has loaded. Layers whose heads, sizes or addresses the kernels do
not take go to no other backend here: `encoder_layers_gap` returns the reason, and models call the ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.cuda import attention, device, linear
from fastbert.backends.extension import DTYPE_CODES, STORED, bias_args
from fastbert.ops.activation import CODES
from fastbert.ops.encoder_layers import LayersInputs, LayerStack
from fastbert.runtime.loader import address
from fastbert.runtime.streams import on

DTYPES = STORED
# On compute capability 9.0, at most 256 rows in half precision: products by clusters of blocks, and launches
# that begin before the kernel before them has ended. Off until `bench/gpu/queue/latency.py` has timed both.
CLUSTERS, CHAINED = False, True
# More rows: whether cuBLASLt adds the residual before a norm, which then reads half as much. Off until the
# same script has timed it.
ADDS = False


def _made(stack: LayerStack):
    """The extension's own stack: the addresses of the parameters, which `stack` keeps."""
    made = stack.made.get("cuda")
    if made is None:
        numbers = [
            (
                *(layer.nheads, layer.headdim, layer.up_weight.shape[0], CODES[layer.activation]),
                *(linear.EXACT_GELU, layer.eps, layer.last_eps),
                *(address(t) if t.is_contiguous() else 0 for t in layer[5:]),
            )
            for layer in stack.layers
        ]
        made = device.extension.CudaEncoderLayers(DTYPE_CODES[stack.dtype], stack.hidden, numbers)
        stack.made["cuda"] = made
    return made


def encoder_layers_gap(stack: LayerStack) -> str | None:
    """Why the kernels do not take these layers; None if they do."""
    return device.extension.cuda_encoder_layers_gap(_made(stack))


def encoder_layers_fwd(inputs: LayersInputs) -> list[Tensor]:
    x, stack, cu_seqlens, max_seqlen, bias, causal, first_only, states = inputs
    made, count = _made(stack), len(stack.layers)
    (rows, hidden), batch, nheads = x.shape, cu_seqlens.shape[0] - 1, stack.layers[0].nheads
    outputs = [x.new_empty(rows, hidden) for _ in range(count - 1 if states else 0)]
    outputs.append(x.new_empty(batch if first_only else rows, hidden))
    cu_seqlens = cu_seqlens.contiguous()
    bias, bias_numbers = bias_args(bias, batch, nheads, max_seqlen)
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    where = x.device
    index, stream = device.place(where)
    facts = (
        *(index, device.multiprocessors(where), attention.HOPPER and device.is_hopper(where)),
        *(device.has_group_products(where), tf32, CLUSTERS and device.is_hopper(where), ADDS, CHAINED),
    )
    size = device.extension.cuda_encoder_layers_work(made, rows, batch, first_only, *facts)
    work = torch.empty(size, dtype=torch.uint8, device=where)
    addresses = [0] * (count - len(outputs)) + [out.data_ptr() for out in outputs]
    with on(where):
        device.extension.cuda_encoder_layers_fwd(
            *(made, rows, batch, max_seqlen, cu_seqlens.data_ptr(), causal, *bias_numbers, first_only),
            *(x.data_ptr(), addresses, work.data_ptr(), size, *facts, stream),
        )
    return outputs
