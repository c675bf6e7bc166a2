"""How one fine-tuning run learns."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fastbert.training.loop import DTYPES


@dataclass(frozen=True)
class Settings:
    """The settings of a run; a task has its own defaults for the first four.

    Attributes:
        lr: the largest learning rate; it rises over `warmup` and falls linearly to 0.
        epochs: passes over the training examples; a fraction is allowed.
        batch_size: examples per step.
        max_length: most tokens per sequence.
        seed: of the new head, dropout and the order of the examples.
        dtype: fp32, or bf16 or fp16 by autocast.
        warmup: share of the steps.
        weight_decay: of AdamW; biases and LayerNorm do not decay.
        layer_decay: factor of the learning rate per layer below the head, in (0, 1].
        reinit: so many top layers, and the pooler, begin anew.
        freeze: whether the head and the pooler alone learn.
        random_init: whether the encoder begins with random weights, not with those of the checkpoint.

    Raises:
        ValueError: naming the attribute.
    """

    lr: float
    epochs: float
    batch_size: int
    max_length: int
    seed: int = 0
    dtype: str = "fp32"
    warmup: float = 0.1
    weight_decay: float = 0.01
    layer_decay: float = 1.0
    reinit: int = 0
    freeze: bool = False
    random_init: bool = False

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 1), ("max_length", 3), ("reinit", 0), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ValueError(f"{name}: expected an integer >= {low}, got {value!r}")
        for name, low, high in (
            ("lr", 0.0, math.inf),
            ("epochs", 0.0, math.inf),
            ("warmup", -1e-300, 1.0),
            ("weight_decay", -1e-300, math.inf),
            ("layer_decay", 0.0, 1.0 + 1e-12),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value < high:
                least = 0 if low == 0 else "0 or more"
                raise ValueError(f"{name}: expected a number above {least} and below {high:g}, got {value!r}")
        for name in ("freeze", "random_init"):
            if type(value := getattr(self, name)) is not bool:
                raise ValueError(f"{name}: expected True or False, got {value!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.freeze and (self.reinit or self.random_init or self.layer_decay != 1):
            raise ValueError("freeze: a frozen encoder has no use for reinit, random_init or layer_decay")
        if self.random_init and self.reinit:
            raise ValueError("reinit: expected 0 with random_init, which begins all layers anew")

    @property
    def name(self) -> str:
        """Of the run's folder: what differs between the runs of one grid."""
        return f"lr-{float(self.lr)!r}-seed-{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)
