"""Layers of a student that replace groups of the teacher's layers at random (BERT-of-Theseus).

    y = r · student's layer i (x) + (1 - r) · teacher's layers g(i-1)+1 … g(i) (x),   r ~ Bernoulli(p)
    p = min(1, k t + b), t the number of steps taken

r is drawn per micro-batch and layer. If all are 0, one layer is drawn that replaces its group. Meanwhile only
the student's layers learn; its embeddings and head stay. The teacher's layers do not drop. With p = 1 the
student runs alone. The default k and b are those of the authors' command.

Source: Xu et al. 2020, "BERT-of-Theseus", sec. 3.1 and 3.3; JetRunner/BERT-of-Theseus.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fastbert.layers.modules import part

REPLACING = (6e-4, 0.3)


class Replacing:
    """The layers of a call during the replacing.

    Args:
        student, teacher: models of one family and one width.
        ends: the last layer of the teacher in each group, from 1; the last is the teacher's last layer.
        k, b: see the module.

    Attributes:
        optimizer: counts the steps; None: t is 0.
    """

    def __init__(self, student: Any, teacher: Any, ends: Sequence[int], k: float, b: float) -> None:
        layers = teacher.base_model.layer_list()
        self.encoder = student.base_model
        self.groups = [layers[begin:end] for begin, end in itertools.pairwise([0, *ends])]
        self.k, self.b = k, b
        self.optimizer: torch.optim.Optimizer | None = None
        student.requires_grad_(False)
        for layer in self.encoder.layer_list():
            layer.requires_grad_(True)

    @property
    def rate(self) -> float:
        """p of the next step."""
        states = () if self.optimizer is None else self.optimizer.state.values()
        steps = max((float(state["step"]) for state in states if "step" in state), default=0.0)
        return min(1.0, self.k * steps + self.b)

    @contextlib.contextmanager
    def mixed(self) -> Iterator[None]:
        """A block in which the student's encoder runs layers of both models, drawn by torch's generator."""
        stack: Any = part(self.encoder, self.encoder.family.layers)
        own = list(stack._modules.values())
        replaced = torch.rand(len(own)) < self.rate
        if not replaced.any():
            replaced[torch.randint(len(own), ())] = True
        chosen = [
            [layer] if is_new else group
            for layer, group, is_new in zip(own, self.groups, replaced.tolist(), strict=True)
        ]
        try:
            self._put(stack, [layer for group in chosen for layer in group])
            yield
        finally:
            self._put(stack, own)

    def _put(self, stack: Any, layers: list[Any]) -> None:
        stack._modules.clear()
        stack._modules.update({str(number): layer for number, layer in enumerate(layers)})
