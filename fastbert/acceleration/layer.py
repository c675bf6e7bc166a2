"""One transformers encoder layer on our kernels.

`run_encoder` runs the layer on packed tokens. All other code calls it like the stock layer, with a padded
batch and a mask; `layer_gaps.py` says why the stock layer must run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastbert.acceleration import blocks
from fastbert.acceleration.layer_gaps import AnyLayer, gap, int8_gap, knows_activation
from fastbert.acceleration.watching import HARMLESS, exporting, uncompiled
from fastbert.execution.call import Call
from fastbert.execution.plan import run as run_layers
from fastbert.execution.plan import survey
from fastbert.layers import dense_norm, pre_norm
from fastbert.layers.asked import NOTHING_MORE
from fastbert.layers.batch import PackedBatch
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.modules import is_hooked, part
from fastbert.models.families import FAMILIES

# Arguments of a layer with which it may run fused
_SERVED = HARMLESS | {
    "attention_mask",
    "position_bias",
    "position_embeddings",
    "output_hidden_states",
    "relative_pos",
    "rel_embeddings",
    "is_index_masked",
    "is_index_global_attn",
    "is_global_attn",
}


class AcceleratedLayer(PackedLayer, AnyLayer):
    """Mixin of an accelerated encoder layer."""

    @property
    def form(self) -> LayerForm:
        """See `PackedLayer`."""
        return blocks.form_of(self, self.fastbert_state.form)

    @property
    def fuses_norm(self) -> bool:
        """See `PackedLayer`."""
        return self.fastbert_state.options.layer_norm

    @property
    def int8(self) -> bool:
        """See `PackedLayer`."""
        return self.fastbert_state.options.int8 and int8_gap(self) is None

    @property
    def label(self) -> str:
        """See `PackedLayer`."""
        return self.fastbert_state.name

    def look(self, everything: str | None) -> Parts:
        """See `PackedLayer`. The model's `gap`, or `forward`, has checked the layer."""
        return self.parts()

    def options(self) -> list[dict[str, Any]]:
        """See `PackedLayer`."""
        return [vars(self.fastbert_state)]

    def is_called(self) -> bool:
        """See `PackedLayer`. The call of transformers' class recomputes activations in backward."""
        return is_hooked(self) or (self.training and getattr(self, "gradient_checkpointing", False))

    def may_skip_rows(self) -> bool:
        """See `PackedLayer`. `gap` has checked for hooks."""
        return True

    def dropout_rates(self) -> tuple[float, ...]:
        """See `PackedLayer`."""
        rates = super().dropout_rates()
        if self.form.blocks is None or not part(self, "attention.self").training:
            return rates
        return (blocks.rate_of_short_texts(self.attention), *rates[1:])

    def fuses_ffn(self) -> bool:
        """Whether our ops compute the feed-forward block, and not its stock modules, on packed rows too."""
        state = self.fastbert_state
        return state.options.ffn and knows_activation(self, state)

    def parts(self) -> Parts:
        """See `PackedLayer`."""
        parts = super().parts()
        return parts if self.fuses_ffn() else parts._replace(feed=self.feed_by_modules)

    def begin(self, hidden: Tensor) -> None:
        """See `PackedLayer`.

        Raises:
            RuntimeError: 8-bit weights were asked for and cannot serve the call, which needs a gradient, or
                with `strict` would run in floating point.
        """
        state = self.fastbert_state
        # A counter would be a constant of the compiled code
        if not torch.compiler.is_compiling():
            state.calls.fused += 1
        if not state.options.int8:
            return
        gradients = torch.is_grad_enabled()
        reason = int8_gap(self) if state.options.strict or gradients else None
        if reason is not None and state.options.strict:
            raise RuntimeError(f"{state.name}: {reason}; it would run in floating point (strict=True)")
        if not gradients or reason is not None:
            return
        parameters = (p for _, dotted in state.form.paths[1] for p in part(self, dotted).parameters())
        if hidden.requires_grad or any(p.requires_grad for p in parameters):
            raise RuntimeError(
                f"{state.name}: runs on 8-bit weights, which have no gradient. For inference call the model "
                'under torch.no_grad(); to train it, call fastbert.accelerate(model) without dtype="int8" '
                "first, and with it afterwards"
            )

    def _attends_as_stock(self) -> bool:
        """Whether attention runs as stock on a padded batch, with the caller's distances or global tokens."""
        family = FAMILIES[self.fastbert_state.model_type]
        return family.disentangled or family.global_tokens

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The stock layer's call, or with a `PackedBatch` the call of `EncoderLayer.forward`."""
        if args and type(args[0]) is PackedBatch:
            self.check_gathered()
            self.begin(hidden_states)
            return self.on_packed(hidden_states, *args)
        if exporting() or self.fastbert_state is None:
            return super().forward(hidden_states, *args, **kwargs)
        state = self.fastbert_state
        if state.options.int8 and torch.compiler.is_compiling():
            return uncompiled(self, hidden_states, *args, **kwargs)
        stock = state.form.stock
        given = dict(zip(stock.positional, args, strict=False)) | kwargs
        reason = gap(self)
        form, places = state.form, {}
        if reason is None:
            bias, reason = self._bias(hidden_states, given)
        if reason is None and form.rotary is not None:
            places, reason = self._places(hidden_states, given)
            if form.window is not None and not self._has_window(given):
                form = replace(form, window=None)
        if reason is not None or len(args) > len(stock.positional):
            if not torch.compiler.is_compiling():
                state.calls.stock += 1
            if state.options.strict:
                raise RuntimeError(f"{state.name}: {reason}; it would run as stock (strict=True)")
            return super().forward(hidden_states, *args, **kwargs)
        seed = None
        if any(self.dropout_rates()):
            seed = torch.randint(2**62, (1,), dtype=torch.int64, device=hidden_states.device)
        batch, seqlen, width = hidden_states.shape
        rows = hidden_states.reshape(batch * seqlen, width)
        ends = torch.arange(batch + 1, dtype=torch.int32, device=hidden_states.device) * seqlen
        packed = PackedBatch(ends, seqlen, bias, seed, **places)
        as_stock = self._attends_as_stock()
        if state.options.attention and not as_stock:
            steps = [step._replace(form=form) for step in survey([self], inside=True)]
            out = run_layers(steps, rows, Call(packed, 0))
        else:
            if form.rotary is None and not as_stock:
                attended = self.attend_by_modules(hidden_states, *args, **kwargs)[0]
            else:
                # transformers' attention takes them in another order
                attended = self.attend_by_modules(hidden_states, **given)[0]
            self.begin(rows)
            feed = (pre_norm if form.pre_norm else dense_norm).feed_forward
            out = feed(self.form, self.parts(), attended.reshape(rows.shape), packed, NOTHING_MORE)
        out = out.reshape(hidden_states.shape)
        return (out, *[None] * (stock.tuple_size - 1)) if stock.tuple_size else out

    def _bias(self, hidden: Tensor, given: dict[str, Any]) -> tuple[Tensor | None, str | None]:
        """(additive attention bias or None, None), or (None, why these arguments need the stock layer)."""
        mask, relative = given.get("attention_mask"), given.get("position_bias")
        if self.form.blocks is not None:
            return None, "only the stock layer attends by blocks of a padded batch"
        for name, value in given.items():
            if value is None or value is False or name in _SERVED:
                continue
            return None, f"{name} is asked for" if name.startswith("output_") else f"{name} is given"
        if hidden.dim() != 3:
            return None, f"the hidden states have {hidden.dim()} dimensions"
        batch, seqlen, _ = hidden.shape
        if batch * seqlen == 0:
            return None, "there are no tokens"
        if self._attends_as_stock():
            # With this mask
            return None, "int8 is for packed tokens alone" if self.fastbert_state.options.int8 else None
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] != seqlen:
                return None, "the attention mask is of a kind that only the stock layer knows"
            if mask.dim() == 2:
                mask = mask.bool()[:, None, None, :]
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, device=mask.device).masked_fill(mask.logical_not(), -torch.inf)
            elif not mask.is_floating_point():
                return None, "the attention mask is of integers in four dimensions"
            if mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, self.form.nheads):
                return None, "the attention mask is of a kind that only the stock layer knows"
            mask = mask.expand(-1, -1, seqlen, -1)
        if relative is not None:
            # The encoder repeats the bias for each sequence
            relative = relative[:1]
            mask = relative if mask is None else mask + relative
        return mask, None

    def _places(self, hidden: Tensor, given: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """(positions and tables of a `PackedBatch`, None), or ({}, why only the stock layer knows these).

        The tables have the cosines and sines of each token that the stock model passes.
        """
        batch, seqlen, _ = hidden.shape
        passed, width = given.get("position_embeddings"), self.form.head_dim
        pair = [t for t in passed if isinstance(t, Tensor)] if isinstance(passed, (tuple, list)) else []
        shapes = [tuple(t.shape) for t in pair]
        known = (1, seqlen, width), (batch, seqlen, width)
        if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0] not in known:
            return {}, "the position embeddings are of a kind that only the stock layer knows"
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # Both halves are alike
        tables = tuple(t.flatten(0, 1)[:, : width // 2].to(dtype).contiguous() for t in pair)
        positions = torch.arange(shapes[0][0] * seqlen, device=hidden.device)
        if shapes[0][0] != batch:
            positions = positions.repeat(batch)
        return {"positions": positions, "tables": {self.form.rotary: tables}}, None

    def _has_window(self, given: dict[str, Any]) -> bool:
        """Whether attention must apply the window, as in FlashAttention; a mask of four dimensions has it."""
        mask, attention = given.get("attention_mask"), part(self, self.form.stock.containers[0])
        flash = "flash" in str(getattr(attention.config, "_attn_implementation", None))
        return flash and (mask is None or mask.dim() == 2)
