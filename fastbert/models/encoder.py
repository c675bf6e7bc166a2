"""The one encoder loop: dropout's seed, embeddings, projection, layers, the norm after them, hidden states.

`BertModel` and the accelerated models of transformers run it on packed tokens, each with its own embeddings.
`batch.py` has what layers read beside the tokens, `pooler.py` what follows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastbert.execution.call import Call, Step
from fastbert.execution.plan import Plan, plan_of
from fastbert.execution.plan import run as run_steps
from fastbert.layers.batch import PackedBatch
from fastbert.layers.disentangled import beside, conv_dropout
from fastbert.layers.elimination import refuse
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.linear import apply_linear, apply_norm
from fastbert.layers.modules import calls_all, changed, part, watched
from fastbert.layers.packing import Packing
from fastbert.layers.taps import Taps
from fastbert.models.batch import batch_of, padded_of
from fastbert.models.config import EncoderConfig
from fastbert.models.families import Family
from fastbert.models.inputs import Inputs
from fastbert.models.stack import Stack


def dropout_seed(device: torch.device) -> Tensor:
    """A new seed, one per call; every dropout site draws from it with an offset of its own.

    It is a tensor on the device, so that a replayed graph draws a new one.
    """
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


def run_encoder(
    root: nn.Module,
    family: Family,
    layers: list[Any] | Plan,
    embed: Callable[[Tensor | None, dict[str, Any]], Tensor],
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
        embed: makes the embedding output (rows, embedding size) of `inputs`, with the seed of its dropout and
            `Plan.known`.
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
    packed, stack = inputs.packing, cast(Any, root._modules[family.layers.partition(".")[0]])
    own = getattr(root, "layer_class", PackedLayer)
    around: list[Any] = [root._modules[family.embeddings]]
    plan: Any = layers if isinstance(layers, Plan) else plan_of(stack, layers, own, around)
    conv = stack._modules.get("conv") if family.disentangled and start is None else None
    steps = plan.steps
    if layerdrop and root.training:
        if want_attentions:
            raise ValueError("output_attentions: expected False with layerdrop, as a skipped layer has none")
        drawn = (torch.rand(len(steps)) >= layerdrop).tolist()
        steps = [s for s in steps if drawn[s.number] or (conv is not None and s.number == 0)]
    _check_changed(plan, taps, schedule, inputs, causal, want_attentions)
    if not (drops or plan.drops or (conv is not None and conv_dropout(conv))):
        seed = None
    elif seed is None:
        seed = dropout_seed(inputs.device)

    inside = start is None and (family.projection or "").startswith(family.layers.partition(".")[0] + ".")
    hidden = embed(seed, plan.known) if start is None else start
    if start is None and not inside:
        hidden = _project(root, family, packed, hidden)
    watching = stack if type(stack) is Stack and (calls_all() or watched(stack)) else None
    first = (
        first_only
        and not (want_attentions or want_states or taps is not None or watching is not None)
        and hidden.shape[0] > 0
        and _last_may_skip(root, family, steps, conv)
    )

    def run(x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        if inside:
            x = _project(root, family, packed, x)
        batch = batch_of(root, family, steps, inputs, x, seed, causal)
        batch = batch if complete is None else complete(batch)
        call = Call(
            batch,
            steps[-1].number if steps else -1,
            gates,
            want_states,
            want_attentions,
            first,
            recompute_every if root.training and torch.is_grad_enabled() else 0,
            taps,
            None if plan.changed is None else padded_of(root, family, inputs, x, batch),
        )
        if schedule is not None:
            call.eliminate(schedule, packed.known_lengths(), x.device)
        if conv is not None:
            call.after_first = functools.partial(beside, conv, packed, x, seed)
        if want_states:
            call.states.append(x)
        x = plan.run(x, call) if steps is plan.steps else run_steps(steps, x, call)
        x = call.restored(x)
        if want_states and steps is not plan.steps:
            call.states[:] = _with_skipped(call.states, {step.number for step in steps}, len(plan.steps))
        if family.final_norm is not None and ends:
            x = last_norm(root, family, x, None if first else packed)
            if want_states:
                call.states[-1] = x
        return x, call.states, call.attentions

    hidden, states, attentions = run(hidden) if watching is None else watching.around(run, hidden, packed)
    if first_only:
        hidden = packed.keep_first(hidden) if first else packed.first_rows(hidden)
    return hidden, states, attentions


def _check_changed(
    plan: Plan,
    taps: Taps | None,
    schedule: Sequence[float] | None,
    inputs: Inputs,
    causal: bool,
    want_attentions: bool,
) -> None:
    """Raise ValueError for what the layers cannot do; arguments as of `run_encoder`."""
    step = plan.changed
    if taps is not None and step is not None:
        raise ValueError(
            f"model: layer {step.number} shows nothing of what it computes inside, because {step.reason}"
        )
    if schedule is not None:
        asked = {"attention_mask": inputs.bias is not None, "causal": causal}
        asked |= {"output_attentions": want_attentions, "taps": taps is not None}
        refuse(None if step is None else step.number, asked)


def _project(root: nn.Module, family: Family, packed: Packing, x: Tensor) -> Tensor:
    """(rows, embedding size) -> (rows, hidden), if the encoder has a projection."""
    projection = projection_of(root, family)
    if projection is None:
        return x
    if calls_all() or changed(projection):
        return packed.from_grid(projection(packed.grid(x)[0]))
    return apply_linear(projection, x)


def _last_may_skip(root: nn.Module, family: Family, steps: list[Step], conv: nn.Module | None) -> bool:
    """Whether the last layer, and all that follows it, can compute first tokens alone."""
    return (
        len(steps) > (0 if conv is None else 1)
        and (family.final_norm is None or not changed(part(root, family.final_norm)))
        and steps[-1].parts is not None
        and steps[-1].layer.may_skip_rows()
    )


def _with_skipped(states: list[Tensor], numbers: set[int], count: int) -> list[Tensor]:
    """The hidden states of `count` layers, from the embeddings and those of the layers with these numbers."""
    first, *computed = states
    found, left = [first], iter(computed)
    for number in range(count):
        found.append(next(left) if number in numbers else found[-1])
    return found


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


def layers_of(root: nn.Module, config: Any, family: Family) -> list[Any]:
    """The layers of an encoder in execution order; a shared layer appears once per use.

    Args:
        root: the encoder, with its parts under the family's names.
        config: its EncoderConfig or transformers config.
    """
    stack: Any = part(root, family.layers)
    if family.group_layers is None:
        # transformers' configs have none, and take long to say so, or what they are
        groups = config.layer_groups if issubclass(type(config), EncoderConfig) else None
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
