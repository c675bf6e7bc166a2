"""The one encoder loop: dropout's seed, embeddings, projection, attention bias, layers, hidden states.

`BertModel` and the accelerated models of transformers run it on packed tokens, each with its own embeddings.
Pooling is not in it, for three reasons. Task heads and recorded graphs take the packed tokens and pool them
later, after a check of their own or in other memory, so the loop would pool what nobody reads. The pooler's
input is a row of the padded output, which the loop does not make. And an accelerated model calls its pooler
as a module, because FSDP gathers the parameters in that module's hooks. So `pool` is beside the loop, for
every model of this package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from fastbert.layers.embeddings import relative_bias
from fastbert.layers.encoder import EncoderLayer, LayerMath, Sequences, together
from fastbert.layers.linear import apply_linear, pool_first
from fastbert.layers.modules import part
from fastbert.layers.taps import Taps
from fastbert.models.families import Family
from fastbert.models.inputs import Inputs
from fastbert.ops.attention_places import attention_places
from fastbert.ops.checks import autocast_dtype


def dropout_seed(device: torch.device) -> Tensor:
    """A new seed, one per call; every dropout site draws from it with an offset of its own.

    It is a tensor on the device, so that a replayed graph draws a new one.
    """
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


def run_encoder(
    root: nn.Module,
    family: Family,
    layers: Sequence[nn.Module],
    embed: Callable[[Tensor | None], Tensor],
    inputs: Inputs,
    drops: bool,
    *,
    gates: Tensor | None = None,
    want_attentions: bool = False,
    want_states: bool = False,
    first_only: bool = False,
    recompute_every: int = 0,
    causal: bool = False,
    taps: Taps | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Packed tokens through the embeddings, the projection (if the encoder has one) and all layers.

    Args:
        root: the encoder, with its parts under the family's names.
        layers: in execution order (`layers_of`). Each is called with (hidden, Sequences, gate, first dropout
            site) and returns (hidden, attention probabilities or None).
        embed: makes the embedding output (rows, embedding size) of `inputs`, with the seed of its dropout.
        inputs: the batch, on the model's device.
        drops: whether some dropout site of the call drops. Only then is a seed drawn.
        gates: (layers, nheads) factors of the heads' outputs, or None.
        want_attentions, want_states: fill the lists that are returned.
        first_only: only the first token of each sequence is wanted. The last layer then skips the other rows
            if it may, unless states or attentions are asked for.
        recompute_every: in training, recompute every n-th layer in backward; 0 recomputes none.
        causal: whether a token sees only those up to itself.
        taps: who sees what the layers compute inside, or None. Then no row is skipped.

    Returns:
        (last hidden, hidden states, probabilities). The last hidden is (rows, hidden), with `first_only`
        (batch, hidden). A list that was not asked for is empty.
    """
    seed = dropout_seed(inputs.device) if drops else None
    hidden = embed(seed)
    projection = projection_of(root, family)
    if projection is not None:
        hidden = apply_linear(projection, hidden)
    packed = inputs.packing
    bias = attention_bias(root, family, inputs, hidden.device)
    lengths = packed.cu_seqlens, packed.max_seqlen
    places = None
    if len(layers) > 0:
        places = attention_places(*lengths, hidden.shape[0], autocast_dtype(hidden) or hidden.dtype)
    sequences = Sequences(*lengths, bias, seed, want_attentions, places=places, causal=causal, taps=taps)
    attentions: list[Tensor] = []
    states = [hidden] if want_states else []
    skip = (
        first_only
        and not (want_attentions or want_states or taps is not None)
        and hidden.shape[0] > 0
        and len(layers) > 0
        and type(layers[-1]) is EncoderLayer
        and layers[-1].may_skip_rows()
    )
    recomputes = recompute_every > 0 and root.training and torch.is_grad_enabled()
    last = len(layers) - 1
    with together(layers, hidden):
        for i, layer in enumerate(layers):
            arguments = (hidden, sequences, None if gates is None else gates[i], 1 + i * LayerMath.SITES)
            only = {"first_only": True} if skip and i == last else {}
            if recomputes and i % recompute_every == 0:
                hidden, probs = recompute(layer, *arguments, **only, use_reentrant=False)
            else:
                hidden, probs = layer(*arguments, **only)
            if want_states:
                states.append(hidden)
            if want_attentions:
                attentions.append(probs)
    if first_only:
        hidden = packed.keep_first(hidden) if skip else packed.first_rows(hidden)
    return hidden, states, attentions


@contextlib.contextmanager
def tapped(encoder: nn.Module, taps: Taps) -> Iterator[None]:
    """Show `taps` what the layers of `encoder` compute in every call inside the block, from any thread.

    Args:
        encoder: a `BertModel`, or one of its family's; of a model with a head: `model.base_model`.
        taps: the taps; those that are set already come back at the end.
    """
    # not nn.Module's own: it would take taps that are a module for a part of the encoder
    put, before = object.__setattr__, encoder.taps
    put(encoder, "taps", taps)
    try:
        yield
    finally:
        put(encoder, "taps", before)


def pool(root: nn.Module, family: Family, first: Tensor) -> Tensor:
    """The output of an encoder's pooler for first tokens: (batch, hidden) -> (batch, hidden)."""
    return pool_first(part(root, family.pooler), first)


def layers_of(root: nn.Module, config: Any, family: Family) -> list[nn.Module]:
    """The layers of an encoder in execution order; a shared layer appears once per use.

    Args:
        root: the encoder, with its parts under the family's names.
        config: its EncoderConfig or transformers config.
    """
    stack = part(root, family.layers)
    if family.group_layers is None:
        return list(stack)
    depth, groups = config.num_hidden_layers, config.num_hidden_groups
    chosen = [stack[int(i / (depth / groups))] for i in range(depth)]
    return [layer for group in chosen for layer in group._modules[family.group_layers]]


def projection_of(root: nn.Module, family: Family) -> nn.Module | None:
    """The linear layer from the embedding to the hidden size; None if the encoder has none."""
    if family.projection is None:
        return None
    above, _, name = family.projection.rpartition(".")
    return (part(root, above) if above else root)._modules.get(name)


def attention_bias(root: nn.Module, family: Family, inputs: Inputs, device: torch.device) -> Tensor | None:
    """The additive attention bias of a call: the caller's 4-D mask, MPNet's relative bias, or their sum.

    None if there is neither.
    """
    bias, packed = inputs.bias, inputs.packing
    if family.relative_bias is None or packed.max_seqlen == 0:
        return bias
    positions = None
    if inputs.holes:
        order = torch.argsort(packed.mask.logical_not().to(torch.uint8), dim=1, stable=True)
        positions = order[:, : packed.max_seqlen]
    relative = relative_bias(part(root, family.relative_bias), packed.max_seqlen, device, positions)
    return relative if bias is None else bias + relative
