"""A whole layer in one call of the backend, for inference on a CPU (fastbert/ops/encoder_layer.py).

Also here: large batches in blocks of sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastbert.layers.form import LayerForm
from fastbert.layers.linear import INT8, LINEAR_KINDS, LinearKind
from fastbert.layers.modules import is_hooked, is_plain, part
from fastbert.layers.quantized import QuantizedLinear
from fastbert.layers.sequences import Sequences
from fastbert.ops import checks
from fastbert.ops.encoder_layer import encoder_layer, launchers, sequence_blocks
from fastbert.runtime import prepared


class FusedLayer:
    """The part of `LayerMath` that runs a whole layer in one call, or in blocks.

    Attributes:
        form, int8, label: see `LayerMath`.
    """

    form: LayerForm
    int8 = False
    label = "layer"

    def _forward_fused(
        self,
        launch: Callable,
        weights: object,
        hidden: Tensor,
        sequences: Sequences,
        gate: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        names = self.form.names
        return encoder_layer(
            launch,
            hidden,
            weights,
            sequences.cu_seqlens,
            sequences.max_seqlen,
            nheads=self.form.nheads,
            inner=part(self, names.intermediate).out_features,
            softmax_scale=self.form.head_dim**-0.5,
            bias=sequences.bias,
            gate=gate,
            activation=self.form.activation,
            eps=(part(self, names.attention_norm).eps, part(self, names.output_norm).eps),
            out=out,
        )

    def _fused(self, x: Tensor, sequences: Sequences) -> tuple[Callable, object] | None:
        """The serving backend's function for a whole layer, and the layer's weights as it takes them.

        None if the layer must run op by op. It need not in inference on a CPU, if all its parts are plain and
        have parameters of `x`'s dtype.
        """
        if (
            self.training
            or any(self.dropout_rates())
            or torch.is_grad_enabled()
            or x.shape[0] == 0
            or x.device.type != "cpu"
            or sequences.causal
            or sequences.return_probs
            or sequences.taps is not None
            or self.form.heads is not None
            or torch.compiler.is_compiling()
            or checks.autocast_dtype(x) is not None
        ):
            return None
        names, int8, parts = self.form.names, self.int8, self._plain_parts(sequences)
        if parts is None:
            return None
        dense, norms = parts
        kind = INT8 if int8 else LINEAR_KINDS[type(dense[0])]
        found = launchers(x.device, x.dtype, kind.op)
        if found is None:
            return None
        make, launch, keeps_panels = found
        if not keeps_panels(kind.op, x.shape[0]):
            weights = self._layer_weights(kind, make, dense, norms, x, sequences.scratch)
        else:
            tables = [d for m in (*dense, *norms) for d in (m._parameters, m._buffers) if d]
            sources = tuple([t for d in tables for t in d.values() if t is not None])

            def build() -> object | None:
                if not int8:
                    return self._layer_weights(kind, make, dense, norms, x)
                # Temporary copies: only their panels are kept
                named = zip(dense, names.linears, strict=True)
                copies = [QuantizedLinear.from_linear(m, f"{self.label}.{path}") for m, path in named]
                return self._layer_weights(kind, make, copies, norms, x)

            weights = prepared.derived(self, ("layer", kind.op, x.dtype, launch), sources, build)
        return None if weights is None else (launch, weights)

    def _plain_parts(self, sequences: Sequences) -> tuple[list[nn.Module], list[nn.Module]] | None:
        """The linear layers, all of one kind, and the norms; None if one is not plain."""
        dense = [part(self, path) for path in self.form.names.linears]
        norms = [part(self, path) for path in self.form.names.norms]
        own = type(dense[0])
        plain = own in LINEAR_KINDS and all(is_plain(m, own) for m in dense)
        return (dense, norms) if plain and all(is_plain(m, nn.LayerNorm) for m in norms) else None

    def _layer_weights(
        self,
        kind: LinearKind,
        make: Callable,
        dense: list[nn.Module],
        norms: list[nn.Module],
        x: Tensor,
        scratch: list[Tensor] | None = None,
    ) -> object | None:
        """The layer's weights as `make` prepares them.

        None if a parameter has another dtype or device than `x`: the single ops then cast it, or say what is
        wrong.
        """
        for module in (*dense, *norms):
            for name, t in module._parameters.items():
                if t is not None:
                    checks.own_elements(name, t)
        vectors = [m.bias for m in dense] + [t for m in norms for t in (m.weight, m.bias)]
        if any(t is not None and (t.dtype != x.dtype or t.device != x.device) for t in vectors):
            return None
        # The first argument after `x` keeps what is derived. For temporary copies that must not be the layer.
        linears = kind.layer_operands(x, dense[0] if self.int8 else self, dense)
        return None if linears is None else make(linears, [(m.weight, m.bias) for m in norms], scratch)

    def _blocks(self, x: Tensor, sequences: Sequences, fused: bool) -> list[tuple[int, int]]:
        """(first, last) sequence of each block of a large batch; empty if all rows run at once.

        The blocks run one after the other. So q, k, v and the feed-forward rows of a large batch, which take
        most of its memory, never exist as a whole. There are no blocks in training, nor under a hook, which
        would see one call per block.

        Args:
            fused: whether `_fused` has found a function for the layer. It does in inference only.
        """
        known = sequences.blocks
        if sequences.bias is not None or sequences.taps is not None or (fused in known and not known[fused]):
            return []
        if not fused and (
            self.training
            or sequences.return_probs
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or any(self.dropout_rates())
        ):
            return []
        if fused not in known:
            known[fused] = sequence_blocks(sequences.cu_seqlens, x, fused)
        return known[fused] if known[fused] and self.may_skip_rows() else []

    def may_skip_rows(self) -> bool:
        """Whether `forward` may skip rows that nobody asked for.

        Not if a hook watches the layer or a part of it, because it would miss tokens. A replaced part (LoRA,
        quantised) is called on fewer rows. It cannot mix rows, which belong to different sequences anyway.
        """
        return not any(is_hooked(module) for module in self.modules())
