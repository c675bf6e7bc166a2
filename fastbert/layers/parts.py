"""The modules of a layer in transformers' tree that hold no parameters of ours.

They are called only where something looks at them or at what they hold. Otherwise our ops read the parameters
below them. `AsMade` finds out whether nothing looks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.layers.batch import PackedBatch
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.modules import watched
from fastbert.layers.positions import rotate, rotated, window_bias
from fastbert.ops.activation import activate_eager

HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODULES, _WEIGHT = itemgetter("_modules"), itemgetter("weight")
_P, _TRAINING, _HEADS = attrgetter("p"), attrgetter("training"), methodcaller("heads")


class AsMade:
    """The modules below a root, at a time when nothing looked at any of them.

    `holds` runs for each layer of each call, so C code walks the lists. The object does not refer to the root
    or the root's attributes, which are freed at once. It is neither copied nor pickled with the root.
    """

    def __init__(self, root: nn.Module):
        self.size, self.below = len(vars(root)), list(root._modules.values())
        self.modules = [m for m in root.modules() if m is not root]
        self.classes = list(map(type, self.modules))
        # A new `forward` of an instance is one attribute more
        self.attributes = list(map(vars, self.modules))
        self.sizes = list(map(len, self.attributes))
        self.owners = [own for own in self.attributes if own["_modules"]]
        self.children = list(map(list, map(dict.values, map(_MODULES, self.owners))))
        self.dropouts = [m for m in self.modules if type(m) is nn.Dropout]
        # Kept for `EncoderLayer.look`
        self.parts: Parts | None = None
        # Their modes decide whether something drops: see `PackedLayer.dropout_rates`
        self.attentions = [m for m in self.modules if isinstance(m, SelfAttention)]
        self.droppers = [*self.dropouts, *self.attentions]
        self.heads = list(map(_HEADS, self.attentions))
        self.norms = [m._parameters for m in self.modules if type(m) in (nn.LayerNorm, nn.RMSNorm)]

    def holds(self, root: nn.Module) -> bool:
        """Whether all modules are still there, as they were, without hooks or another forward."""
        own = root.__dict__
        return (
            not any(HOOKS(own))
            and not any(chain.from_iterable(map(HOOKS, self.attributes)))
            and list(own["_modules"].values()) == self.below
            and list(map(list, map(dict.values, map(_MODULES, self.owners)))) == self.children
            and list(map(type, self.modules)) == self.classes
            and list(map(len, self.attributes)) == self.sizes
            and len(own) == self.size
            and max(map(_P, self.dropouts), default=0.0) < 1.0
            and list(map(_HEADS, self.attentions)) == self.heads
            and type(None) not in map(type, map(_WEIGHT, self.norms))
        )

    def drops(self) -> bool:
        """Whether the mode of a module says that something drops."""
        return any(map(_TRAINING, self.droppers))

    def __deepcopy__(self, memo: dict[Any, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Activation(nn.Module):
    """An activation of `fastbert.ops.activation` where transformers has a module."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """act(x)."""
        return activate_eager(x, self.name)

    def extra_repr(self) -> str:
        """Its name."""
        return self.name


def activation_of(module: nn.Module) -> str | None:
    """The name of a plain `Activation`; None if the module must be called."""
    return module.name if type(module) is Activation and not watched(module) else None


class Part(nn.Module):
    """A part of a model in transformers' tree, which calls its children in order, then adds and norms.

    It is called only if something looks at it, or at what it holds. Otherwise our ops read the parameters.

    Args:
        steps: names of the children to call, in order.
        norm: name of the child that is applied to the sum with `input_tensor`; None for neither.
    """

    _modules: dict[str, Any]

    def __init__(self, *steps: str, norm: str | None = None):
        super().__init__()
        self.steps, self.norm = steps, norm

    def forward(self, hidden_states: Tensor, input_tensor: Any = None) -> Tensor:
        """(batch, seqlen, width) -> (batch, seqlen, output width)."""
        for step in self.steps:
            hidden_states = self._modules[step](hidden_states)
        if self.norm is None:
            return hidden_states
        return self._modules[self.norm](hidden_states + input_tensor)


def probabilities(q: Tensor, k: Tensor, scaling: float, attention_mask: Tensor | None) -> Tensor:
    """The attention probabilities of queries and keys, each (batch, nheads, seqlen, head_dim)."""
    return torch.softmax(masked(q @ k.transpose(2, 3) * scaling, attention_mask), -1)


def masked(scores: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The scores under a mask: bool (True = attend), or added; None hides nothing."""
    if attention_mask is None:
        return scores
    if attention_mask.dtype != torch.bool:
        return scores + attention_mask
    return scores.masked_fill(attention_mask.logical_not(), torch.finfo(scores.dtype).min)


class SelfAttention(Part):
    """Self-attention on a padded batch in PyTorch's own operations, as transformers' eager attention.

    Args:
        form: the layer's form.
        steps, norm: what the module does after attention; see `Part`.

    Attributes:
        num_attention_heads, attention_head_size, scaling: as in transformers; a call uses the current values.
    """

    def __init__(self, form: LayerForm, *steps: str, norm: str | None = None):
        super().__init__(*steps, norm=norm)
        self.form = form
        self.num_attention_heads, self.attention_head_size = form.nheads, form.head_dim
        self.scaling = form.softmax_scale
        names = form.names
        self.inputs = tuple(path.rpartition(".")[2] for path in (names.query, names.key, names.value))
        self.drop, self.drops_by_itself = form.paths[3][0][-1], form.stock.attention_drops_by_itself

    def heads(self) -> tuple[int, int, float]:
        """The number of heads, their size, and the factor of the scores."""
        return self.num_attention_heads, self.attention_head_size, self.scaling

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, head_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(output (batch, seqlen, hidden), probabilities (batch, nheads, seqlen, seqlen) after dropout).

        Args:
            hidden_states: (batch, seqlen, hidden).
            attention_mask: broadcasts to the probabilities; bool (True = attend), or added to the scores.
            head_mask: (nheads,) factors of the heads' outputs, or None.
        """
        heads = (-1 if self.num_attention_heads else 0, self.attention_head_size)
        q, k, v = (
            self._modules[name](hidden_states).unflatten(-1, heads).transpose(1, 2) for name in self.inputs
        )
        return self.attended(q, k, v, hidden_states, attention_mask, head_mask)

    def attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        head_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, from query, key and value, each (batch, nheads, seqlen, head_dim)."""
        probs, dropout = probabilities(q, k, self.scaling, attention_mask), self._modules[self.drop]
        if not self.drops_by_itself:
            probs = dropout(probs)
        elif self.training:
            probs = F.dropout(probs, dropout.p)
        context = probs @ v
        if head_mask is not None:
            context = context * head_mask[:, None, None]
        return super().forward(context.transpose(1, 2).flatten(2), hidden_states), probs


class RotaryAttention(SelfAttention):
    """Self-attention that rotates queries and keys, and may have a window.

    Query, key and value are one linear layer or three.

    Args:
        form, steps: see `SelfAttention`.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        grid: PackedBatch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `SelfAttention`.

        Args:
            grid: has the positions (batch · seqlen,) of all tokens, padding included, and the tables.
        """
        assert grid is not None
        size, seqlen = hidden_states.shape[:2]
        if self.form.packed:
            each = rotated(self.form, self._modules[self.inputs[0]](hidden_states).flatten(0, 1), grid)
        else:
            q, k, v = (self._modules[name](hidden_states).flatten(0, 1) for name in self.inputs)
            q, k, v = (t.unflatten(1, (-1, self.form.head_dim)) for t in (q, k, v))
            k, v = (self.form.for_each_head(t, 1) for t in (rotate(self.form, k, grid), v))
            each = rotate(self.form, q, grid), k, v
        q, k, v = (t.unflatten(0, (size, seqlen)).transpose(1, 2) for t in each)
        if self.form.window is not None:
            own = window_bias(replace(grid, max_seqlen=seqlen, bias=None, columns=None), self.form.window)
            attention_mask = own if attention_mask is None else both(attention_mask, own)
        return self.attended(q, k, v, hidden_states, attention_mask, head_mask)


def both(mask: Tensor, bias: Tensor) -> Tensor:
    """A mask of attention, bool (True = attend) or additive, and an additive bias as one."""
    if mask.dtype != torch.bool:
        return mask + bias.to(mask.dtype)
    return mask & (bias == 0)


class GatedPart(Part):
    """A gated feed-forward block: down(dropout(act(a) · b)) with [a, b] = up(x), or a = gate(x), b = up(x).

    Args:
        up, act, steps: names of the children; the steps are called in order after the product.
        gate: name of the child with the activated half, or None.
        norm: name of the child that is applied to the sum with the input; None for neither.
    """

    def __init__(self, up: str, act: str, *steps: str, gate: str | None = None, norm: str | None = None):
        super().__init__(*steps, norm=norm)
        self.halves = gate, up, act

    def forward(self, hidden_states: Tensor, input_tensor: Any = None) -> Tensor:
        """(batch, seqlen, hidden) -> (batch, seqlen, hidden)."""
        gate, up, act = self.halves
        b = self._modules[up](hidden_states)
        a, b = b.chunk(2, -1) if gate is None else (self._modules[gate](hidden_states), b)
        return super().forward(self._modules[act](a) * b, hidden_states)


def two(found: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """(output, probabilities or None) of what an attention module has returned."""
    return found[0], found[1] if len(found) > 1 else None


class Attention(Part):
    """The attention block of a padded batch where transformers has self-attention in a module of its own.

    Args:
        inside: name of the self-attention.
        steps, norm: what the module does with the output of self-attention. Without them the child `output`
            is called with that output and the layer's input.
    """

    def __init__(self, inside: str, *steps: str, norm: str | None = None):
        super().__init__(*steps, norm=norm)
        self.inside = inside

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As `SelfAttention.forward`."""
        attended, probs = two(self._modules[self.inside](hidden_states, *args, **kwargs))
        if self.norm is None:
            return self._modules["output"](attended, hidden_states), probs
        return super().forward(attended, hidden_states), probs


PARTS = frozenset((Part, SelfAttention, Attention, RotaryAttention, GatedPart))
