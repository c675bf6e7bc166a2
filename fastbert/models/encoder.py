"""The one encoder loop: dropout's seed, embeddings, projection, attention bias, layers, hidden states.

`BertModel` and the accelerated models of transformers run it on packed tokens, each with its own embeddings.
Pooling is not in the loop, for three reasons. Task heads and recorded graphs take the packed tokens and pool
them later, after a check of their own or in other memory, so the loop's result would be thrown away. The
pooler's input is a row of the padded output, which the loop does not make. And an accelerated model calls its
pooler as a module, because FSDP gathers the parameters in that module's hooks. So `pool` is a function of its
own, for every model of this package.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.execution.call import Call, Padded, Step
from fastbert.execution.modules import first_of
from fastbert.execution.plan import Plan, plan_of
from fastbert.execution.plan import run as run_steps
from fastbert.layers import alibi, global_tokens
from fastbert.layers.batch import Distances, Globals, PackedBatch
from fastbert.layers.block_sparse import lengths_of
from fastbert.layers.elimination import Eliminated, kept_of, refuse
from fastbert.layers.embeddings import relative_bias
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.linear import apply_activated, apply_linear, apply_norm
from fastbert.layers.modules import calls_all, changed, part, watched
from fastbert.layers.packing import Packing
from fastbert.layers.parts import Part, activation_of
from fastbert.layers.positions import rotary_tables
from fastbert.layers.taps import Taps
from fastbert.models.families import Family
from fastbert.models.inputs import Inputs
from fastbert.models.outputs import BaseModelOutputWithPooling
from fastbert.ops.attention_places import attention_places
from fastbert.ops.attention_relative import RelativeScores, dense_scores
from fastbert.ops.checks import autocast_dtype
from fastbert.runtime import prepared


def dropout_seed(device: torch.device) -> Tensor:
    """A new seed, one per call; every dropout site draws from it with an offset of its own.

    It is a tensor on the device, so that a replayed graph draws a new one.
    """
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


def run_encoder(
    root: nn.Module,
    family: Family,
    layers: list[Any] | Plan,
    embed: Callable[[Tensor | None], Tensor],
    inputs: Inputs,
    drops: bool,
    *,
    gates: Tensor | None = None,
    want_attentions: bool = False,
    want_states: bool = False,
    first_only: bool = False,
    recompute_every: int = 0,
    layerdrop: float = 0.0,
    causal: bool = False,
    taps: Taps | None = None,
    seed: Tensor | None = None,
    complete: Callable[[PackedBatch], PackedBatch] | None = None,
    schedule: Sequence[float] | None = None,
    start: Tensor | None = None,
    ends: bool = True,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Packed tokens through the embeddings, the projection (if the encoder has one) and all layers.

    Args:
        root: the encoder, with its parts under the family's names.
        layers: the layers in execution order (`layers_of`), or their plan; fastbert/execution runs them. A
            layer with hooks or replaced parts (`gap`) is called on a padded batch, as in transformers.
        embed: makes the embedding output (rows, embedding size) of `inputs`, with the seed of its dropout.
        inputs: the batch, on the model's device.
        drops: whether the embeddings drop. A seed is drawn only if the embeddings or a layer drop, and no
            seed is passed.
        gates: (layers, nheads) factors of the heads' outputs, or None.
        want_attentions, want_states: fill the lists that are returned.
        first_only: only the first token of each sequence is wanted. The last layer then skips the other rows
            if it may, unless states or attentions are asked for.
        recompute_every: in training, recompute every n-th layer in backward; 0 recomputes none.
        layerdrop: in training, the probability that a layer is skipped, drawn by torch's generator per call.
            A skipped layer is not computed; its output is its input. The first layer of a
            family with a convolution beside it always runs.
        causal: whether a token attends only to itself and the tokens before it.
        taps: hooks into what the layers compute inside, or None. With taps no row is skipped.
        seed: (1,) int64, the seed of all dropouts, on the device, or None.
        complete: adds to the batch what layers of the family's own class need; None for nothing.
        schedule: the fraction of each sequence's tokens that each layer keeps; None for all. A token that
            leaves keeps its last state.
        start: (rows, hidden), the output of the layer before `layers`, where these are not the first ones;
            None: the embeddings.
        ends: whether the model's last layer is among `layers`; without it no norm follows.

    Returns:
        (last hidden, hidden states, probabilities). The last hidden is (rows, hidden), with `first_only`
        (batch, hidden). A list that was not asked for is empty.
    """
    packed, container = inputs.packing, family.layers.partition(".")[0]
    stack = part(root, container)
    plan: Any = layers
    if not isinstance(layers, Plan):
        plan = plan_of(stack, layers, getattr(root, "layer_class", PackedLayer))
    beside = stack._modules.get("conv") if family.disentangled and start is None else None
    steps = plan.steps
    if layerdrop and root.training:
        if want_attentions:
            raise ValueError("output_attentions: expected False with layerdrop, as a skipped layer has none")
        drawn = (torch.rand(len(steps)) >= layerdrop).tolist()
        steps = [s for s in steps if drawn[s.number] or (beside is not None and s.number == 0)]
    skipped = len(plan.steps) - len(steps)
    if not (drops or plan.drops or (beside is not None and beside.dropout_rate())):
        seed = None
    elif seed is None:
        seed = dropout_seed(inputs.device)
    hidden = embed(seed) if start is None else start
    changed_one = plan.changed
    if taps is not None and changed_one is not None:
        raise ValueError(
            f"model: layer {changed_one.number} shows nothing of what it computes inside, because "
            f"{changed_one.reason}"
        )
    if schedule is not None:
        asked = {"attention_mask": inputs.bias is not None, "causal": causal}
        asked |= {"output_attentions": want_attentions, "taps": taps is not None}
        refuse(None if changed_one is None else changed_one.number, asked)
    projection, everything = None if start is not None else projection_of(root, family), calls_all()
    inside = (family.projection or "").startswith(f"{container}.")
    around = stack if type(stack) is Stack and (everything or watched(stack)) else None
    recomputes = recompute_every if root.training and torch.is_grad_enabled() else 0

    def project(x: Tensor) -> Tensor:
        if projection is None:
            return x
        if everything or changed(projection):
            return packed.from_grid(projection(packed.grid(x)[0]))
        return apply_linear(projection, x)

    def run(x: Tensor, skips: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        if inside:
            x = project(x)
        lengths = packed.cu_seqlens, packed.max_seqlen
        places = None
        if steps:
            places = attention_places(*lengths, x.shape[0], autocast_dtype(x) or x.dtype)
        batch, padded = PackedBatch(*lengths, inputs.bias, seed, causal, places), None
        if family.relative_bias is not None or family.alibi:
            columns = columns_of(packed) if inputs.holes else None
            longest = packed.max_seqlen if columns is None else packed.seqlen
            batch = replace(batch, relative=shared_scores(root, family, longest, x.device, columns))
        if family.rotary:
            batch = with_positions(batch, steps, inputs, x)
        if family.disentangled:
            columns = columns_of(packed) if inputs.holes else None
            batch = replace(batch, distances=distances_of(part(root, container)), columns=columns)
        if family.block_sparse:
            batch = with_lengths(batch, steps)
        if family.global_tokens:
            columns = columns_of(packed) if inputs.holes else None
            batch = replace(batch, globals=global_tokens.of(inputs.globals, batch), columns=columns)
        if complete is not None:
            batch = complete(batch)
        if changed_one is not None:
            mask = padded_mask(root, family, inputs, x, causal)
            grid = None if batch.distances is None else batch
            if family.block_sparse:
                grid = replace(batch, bias=None, columns=places_of(packed))
            if family.global_tokens:
                flags = None if batch.globals is None else packed.grid(batch.globals.flags)[0]
                grid = replace(batch, globals=None if flags is None else Globals(flags))
            padded = Padded(packed, mask, on_grid(batch, packed) if family.rotary else grid)
        call = Call(
            batch,
            steps[-1].number if steps else -1,
            gates,
            want_states,
            want_attentions,
            skips,
            recomputes,
            taps,
            padded,
        )
        if schedule is not None:
            kept = kept_of(schedule, packed.known_lengths(), x.device)
            call.kept = kept if any(kept[: len(kept) - skips]) else ()
            call.eliminated = None if skips else Eliminated()
        if beside is not None:
            call.after_first = functools.partial(beside.beside, packed, x, seed)
        if want_states:
            call.states.append(x)
        x = run_steps(steps, x, call) if skipped else plan.run(x, call)
        x = x if skips else call.restored(x)
        if want_states and skipped:
            call.states[:] = _with_skipped(call.states, {step.number for step in steps}, len(plan.steps))
        if family.final_norm is not None and ends:
            x = last_norm(root, family, x, None if skips else packed)
            if want_states:
                call.states[-1] = x
        return x, call.states, call.attentions

    if not inside:
        hidden = project(hidden)
    skip = (
        first_only
        and not (want_attentions or want_states or taps is not None or around is not None)
        and hidden.shape[0] > 0
        and bool(steps)
        and (beside is None or len(steps) > 1)
        and (family.final_norm is None or not changed(part(root, family.final_norm)))
        and steps[-1].parts is not None
        and steps[-1].layer.may_skip_rows()
    )
    if around is not None:
        hidden, states, attentions = around.around(lambda x: run(x, False), hidden, packed)
    else:
        hidden, states, attentions = run(hidden, skip)
    if first_only:
        hidden = packed.keep_first(hidden) if skip else packed.first_rows(hidden)
    return hidden, states, attentions


def _with_skipped(states: list[Tensor], numbers: set[int], count: int) -> list[Tensor]:
    """The hidden states of `count` layers, from the embeddings and those of the layers with these numbers."""
    first, *computed = states
    found, left = [first], iter(computed)
    for number in range(count):
        found.append(next(left) if number in numbers else found[-1])
    return found


def with_positions(batch: PackedBatch, steps: list[Step], inputs: Inputs, x: Tensor) -> PackedBatch:
    """The batch with what layers need that rotate queries and keys, or have windows."""
    forms = [step.form for step in steps if step.form is not None]
    sizes = {form.head_dim for form in forms}
    thetas = {form.rotary for form in forms if form.rotary is not None}
    tables = rotary_tables(thetas, sizes.pop(), inputs.table_rows, x) if thetas else {}
    columns = columns_of(inputs.packing) if inputs.holes else None
    return replace(batch, positions=inputs.position_ids, tables=tables, columns=columns)


def with_lengths(batch: PackedBatch, steps: list[Step]) -> PackedBatch:
    """The batch with the lengths of its sequences if one is long enough to be attended by blocks."""
    found = (step.form.blocks for step in steps if step.form is not None)
    blocks = next((each for each in found if each is not None), None)
    return batch if blocks is None else replace(batch, lengths=lengths_of(batch, blocks))


def places_of(packed: Packing) -> Tensor | None:
    """(batch, seqlen): how many kept tokens of its sequence come before each token; None if all are kept."""
    mask = packed.mask
    return None if mask is None else mask.long().cumsum(1) - mask.long()


def distances_of(stack: nn.Module) -> Distances | None:
    """DeBERTa's table of distances, normed if there is a norm of it; None if layers score no distances."""
    embeddings, norm = (stack._modules.get(name) for name in ("rel_embeddings", "LayerNorm"))
    if embeddings is None:
        return None
    rows: Any = embeddings.weight
    watches = norm is not None and (calls_all() or changed(norm))
    if watches or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return Distances(rows if norm is None else apply_norm(norm, rows), ())
    sources = rows, *(() if norm is None else norm.parameters())
    # By PyTorch's own functions, which leave the marks of parameters (runtime/prepared.py)
    normed = prepared.derived(
        stack, "distances", sources, lambda: rows.clone() if norm is None else norm(rows)
    )
    return Distances(normed, sources)


def on_grid(batch: PackedBatch, packed: Packing) -> PackedBatch:
    """The batch with the positions of all tokens of the padded batch."""
    assert batch.positions is not None
    return replace(batch, positions=packed.grid(batch.positions)[0].flatten())


def columns_of(packed: Packing) -> Tensor | None:
    """(batch, max_seqlen): the padded column of each kept token, then those of masked ones."""
    if packed.mask is None:
        return None
    order = torch.argsort(packed.mask.logical_not().to(torch.uint8), dim=1, stable=True)
    return order[:, : packed.max_seqlen].contiguous()


def last_norm(root: nn.Module, family: Family, x: Tensor, packed: Packing | None = None) -> Tensor:
    """The norm after the last layer, if the family has one: (rows, hidden) -> (rows, hidden).

    Args:
        root, family: see `run_encoder`.
        x: the output of the last layer.
        packed: the places of the rows, for a norm that must be called on a padded batch; None if `x` has
            the first token of each sequence alone.
    """
    if family.final_norm is None:
        return x
    norm = part(root, family.final_norm)
    if packed is not None and (calls_all() or changed(norm)):
        return packed.from_grid(norm(packed.grid(x)[0]))
    return apply_norm(norm, x)


def padded_mask(
    root: nn.Module, family: Family, inputs: Inputs, hidden: Tensor, causal: bool
) -> Tensor | None:
    """The mask of attention on the padded batch: (batch, 1, 1, S) bool, or additive with more dimensions.

    Args:
        root, family, inputs, causal: see `run_encoder`.
        hidden: the packed tokens, for their dtype and device.
    """
    packed, bias, lowest = inputs.packing, inputs.bias, torch.finfo(hidden.dtype).min
    kept = packed.grid(hidden[:, :1])[1]
    mask = None if kept is None else kept[:, None, None, :]
    if family.relative_bias is not None or family.alibi:
        relative = shared_scores(root, family, packed.seqlen, hidden.device)
        dense = dense_scores(relative, None, packed.seqlen, hidden)
        bias = dense if bias is None else bias + dense
    if causal:
        earlier = torch.ones(packed.seqlen, packed.seqlen, dtype=torch.bool, device=hidden.device).tril()
        mask = earlier[None, None] if mask is None else mask & earlier
    if bias is None:
        return mask
    bias = bias.to(hidden.dtype).clamp_min(lowest)
    return bias if mask is None else bias.masked_fill(mask.logical_not(), lowest)


class Stack(nn.Module):
    """The module around the layers, whose code is `run_encoder`; called only if it is watched.

    Args:
        by_name: whether its input is passed by name.
    """

    def __init__(self, by_name: bool):
        super().__init__()
        self.by_name = by_name

    def forward(self, hidden_states: Tensor, *, run: Callable[[Tensor], Tensor] | None = None) -> Any:
        """The output of the last layer as `last_hidden_state`, (batch, seqlen, hidden) like the input.

        Raises:
            TypeError: called by anything but its model.
        """
        if run is None:
            raise TypeError(
                "run: missing; only its model calls this module; call the model with inputs_embeds"
            )
        return BaseModelOutputWithPooling(last_hidden_state=run(hidden_states))

    def around(
        self, run: Callable[[Tensor], tuple[Any, ...]], hidden: Tensor, packed: Packing
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """`run(hidden)` as a call of this module on the padded batch."""
        found: list[tuple[Any, ...]] = []

        def run_padded(x: Tensor) -> Tensor:
            found.append(run(packed.from_grid(x)))
            return packed.grid(found[-1][0])[0]

        x = packed.grid(hidden)[0]
        y = self(hidden_states=x, run=run_padded) if self.by_name else self(x, run=run_padded)
        hidden = packed.from_grid(first_of(y))
        # A replaced forward may not have called ours
        _, states, attentions = found[-1] if found else (None, [], [])
        if states:
            states[-1] = hidden
        return hidden, states, attentions


class Pooler(Part):
    """BERT's pooler, tanh(dense(first token)) (Devlin et al. 2018, sec. 3, "C").

    Args:
        dense: False for a pooler that is the first token.
    """

    def __init__(self, dense: bool = True):
        super().__init__(*(("dense", "activation") if dense else ()))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(batch, seqlen, hidden) -> (batch, hidden)."""
        return super().forward(hidden_states[:, 0])


@contextlib.contextmanager
def tapped(encoder: nn.Module, taps: Taps) -> Iterator[None]:
    """Show `taps` what the layers of `encoder` compute in every call inside the block, from any thread.

    Args:
        encoder: a `BertModel`, or the encoder of another family; `model.base_model` of a model with a head.
        taps: the taps; the encoder's previous taps are restored at the end.
    """
    # nn.Module's own would register taps that are a module as a part of the encoder
    put, before = object.__setattr__, encoder.taps
    put(encoder, "taps", taps)
    try:
        yield
    finally:
        put(encoder, "taps", before)


def pooler_activation(family: Family) -> str:
    """The path of the activation of a family's pooler."""
    return family.stock_model.pooler_activation or "pooler.activation"


def pool(root: nn.Module, family: Family, first: Tensor) -> Tensor:
    """The output of an encoder's pooler for first tokens: (batch, hidden) -> (batch, hidden)."""
    assert family.pooler is not None
    module = root._modules.get("pooler")
    if isinstance(module, Pooler) and not module.steps:
        return first
    return apply_activated(part(root, family.pooler), part(root, pooler_activation(family)), first)


def pooler_gap(root: nn.Module, family: Family) -> bool:
    """Whether the pooler must be called on whole sequences: it is watched, or was replaced."""
    above, _, name = (family.pooler or "").rpartition(".")
    if not above:
        return False
    module = part(root, above)
    if calls_all() is not None or type(module) is not Pooler or watched(module):
        return True
    return bool(module.steps) and (
        changed(part(module, name)) is not None
        or activation_of(part(root, pooler_activation(family))) is None
    )


def layers_of(root: nn.Module, config: Any, family: Family) -> list[Any]:
    """The layers of an encoder in execution order; a shared layer appears once per use.

    Args:
        root: the encoder, with its parts under the family's names.
        config: its EncoderConfig or transformers config.
    """
    stack: Any = part(root, family.layers)
    if family.group_layers is None:
        groups = getattr(config, "layer_groups", None)
        return [*stack._modules.values()] if groups is None else [stack[group] for group in groups]
    depth, groups = config.num_hidden_layers, config.num_hidden_groups
    chosen = [stack[int(i / (depth / groups))] for i in range(depth)]
    return [layer for group in chosen for layer in group._modules[family.group_layers]]


def projection_of(root: nn.Module, family: Family) -> nn.Module | None:
    """The linear layer from the embedding to the hidden size after the embeddings; None if there is none."""
    if family.projection is None or family.projects_first:
        return None
    above, _, name = family.projection.rpartition(".")
    return (part(root, above) if above else root)._modules.get(name)


def shared_scores(
    root: Any, family: Family, seqlen: int, device: torch.device, positions: Tensor | None = None
) -> RelativeScores:
    """The scores of distances that all layers of MPNet or jina-v2 share; arguments as `relative_bias`."""
    if family.relative_bias is not None:
        return relative_bias(part(root, family.relative_bias), seqlen, device, positions)
    return alibi.scores(root.config.num_attention_heads, seqlen, device, positions)
