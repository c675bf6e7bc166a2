"""How one fine-tuning run learns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fastbert.runtime import expected
from fastbert.training.loop import DTYPES
from fastbert.training.optimizers import KINDS

# Mosbach et al. 2020, "On the stability of fine-tuning BERT": longer, and with a small rate
STABLE = {"lr": 2e-5, "epochs": 20, "batch_size": 16, "warmup": 0.1, "eps": 1e-6}
# `Settings.qat` -> bits of the weights
ROUNDINGS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class FreeLB:
    """FreeLB's perturbations; see `finetuning.losses`.

    Attributes:
        steps: passes per step of the optimizer.
        lr: how far the embeddings of a sequence move per pass.
        init: first size; each embedding begins uniform in ±init / √(tokens · width).
        ball: largest Euclidean norm of a sequence's perturbation; None: no limit.
    """

    steps: int = 3
    lr: float = 0.1
    init: float = 1.0
    ball: float | None = None

    def __post_init__(self) -> None:
        expected.integers(1, **{"freelb steps": self.steps})
        expected.numbers(">= 0", **{"freelb lr": self.lr, "freelb init": self.init})
        if self.ball is not None:
            expected.numbers("> 0", **{"freelb ball": self.ball})


@dataclass(frozen=True)
class Smart:
    """SMART's smoothness; see `finetuning.losses`.

    Attributes:
        weight: of the divergence in the loss.
        lr: largest step of the perturbation along its gradient.
        noise: deviation of the noise that it begins with.
        momentum: of the running mean of the weights, whose divergence is a third part of the loss; 0: no such
            part. The paper has 0.99.
    """

    weight: float = 1.0
    lr: float = 1e-3
    noise: float = 1e-5
    momentum: float = 0.0

    def __post_init__(self) -> None:
        expected.numbers(">= 0", **{"smart lr": self.lr, "smart momentum": self.momentum})
        expected.numbers("> 0", **{"smart weight": self.weight, "smart noise": self.noise})
        if self.momentum >= 1:
            raise ValueError(f"smart momentum: expected a number below 1, got {self.momentum!r}")


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
        optimizer: adamw; or adamw-google, without the correction of bias, to replicate papers.
        warmup: share of the steps.
        weight_decay: of AdamW; biases and LayerNorm do not decay.
        eps: of AdamW.
        layer_decay: factor of the learning rate per layer below the head, in (0, 1].
        reinit: so many top layers, and the pooler, begin anew.
        freeze: whether the head and the pooler alone learn.
        random_init: whether the encoder begins with random weights, not with those of the checkpoint.
        decay_to_start: whether the encoder's weights decay to those of the checkpoint, not to 0.
        layerdrop: the probability that a layer of the encoder is skipped, drawn for each micro-batch.
        mixout: probability that a linear layer of the encoder has a weight of the checkpoint, in place of
            dropout; 0: dropout as usual.
        mixout_mask: "column": one draw per input of a layer, as published; "element": one per weight.
        freelb: perturbations against the loss, a FreeLB or its fields; None: none, True: the defaults.
        smart: smoothness beside the loss, a Smart or its fields; None: none, True: the defaults.
        qat: "int8" or "int4": the encoder's linear layers round as they will when the model is quantised, and
            the scores are those of the quantised model; see `fastbert.compression.qat`. None: no rounding.

    Raises:
        ValueError: naming the attribute.
    """

    lr: float
    epochs: float
    batch_size: int
    max_length: int
    seed: int = 0
    dtype: str = "fp32"
    optimizer: str = "adamw"
    warmup: float = 0.1
    weight_decay: float = 0.01
    eps: float = 1e-8
    layer_decay: float = 1.0
    reinit: int = 0
    freeze: bool = False
    random_init: bool = False
    decay_to_start: bool = False
    layerdrop: float = 0.0
    mixout: float = 0.0
    mixout_mask: str = "column"
    freelb: FreeLB | None = None
    smart: Smart | None = None
    qat: str | None = None

    def __post_init__(self) -> None:
        expected.integers(1, batch_size=self.batch_size)
        expected.integers(3, max_length=self.max_length)
        expected.integers(0, reinit=self.reinit, seed=self.seed)
        expected.numbers(">= 0", weight_decay=self.weight_decay, eps=self.eps)
        expected.numbers("> 0", lr=self.lr, epochs=self.epochs)
        expected.numbers("in [0, 1)", warmup=self.warmup, layerdrop=self.layerdrop, mixout=self.mixout)
        expected.numbers("in (0, 1]", layer_decay=self.layer_decay)
        for name in ("freeze", "random_init", "decay_to_start"):
            if type(value := getattr(self, name)) is not bool:
                raise ValueError(f"{name}: expected True or False, got {value!r}")
        for name, known in (
            ("dtype", DTYPES),
            ("optimizer", [kind for kind in KINDS if kind.startswith("adamw")]),
            ("mixout_mask", ("column", "element")),
            ("qat", (None, *ROUNDINGS)),
        ):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, got {value!r}")
        for name, kind in (("freelb", FreeLB), ("smart", Smart)):
            value = getattr(self, name)
            if value in (True, False):
                object.__setattr__(self, name, kind() if value else None)
            elif isinstance(value, dict):  # as `to_dict` has it
                object.__setattr__(self, name, kind(**value))
            elif not isinstance(value, kind | None):
                raise ValueError(f"{name}: expected True, None or a {kind.__name__}, got {value!r}")
        self._check_together()

    def _check_together(self) -> None:
        """Refuse settings that exclude each other."""
        if self.freeze:
            names = ("reinit", "random_init", "decay_to_start", "layerdrop", "mixout", "freelb", "smart")
            for name in names:
                if getattr(self, name):
                    raise ValueError(f"freeze: a frozen encoder has no use for {name}")
            if self.layer_decay != 1:
                raise ValueError("freeze: a frozen encoder has no use for layer_decay")
        if self.random_init and self.reinit:
            raise ValueError("reinit: expected 0 with random_init, which begins all layers anew")
        for name in ("mixout", "decay_to_start"):
            if self.random_init and getattr(self, name):
                raise ValueError(
                    f"{name}: keeps to the checkpoint's weights, which random_init does not load"
                )
        if self.freelb and self.smart:
            raise ValueError("smart: expected None with freelb, which moves the embeddings in its own way")
        if self.smart and self.dtype != "fp32":
            raise ValueError(
                f"dtype: expected fp32 with smart, whose noise is below the resolution of {self.dtype}"
            )

    @property
    def name(self) -> str:
        """Of the run's folder: what differs between the runs of one grid."""
        return f"lr-{float(self.lr)!r}-seed-{self.seed}"

    @property
    def cost(self) -> str:
        """What a step costs besides one forward and one backward; "" for nothing."""
        if self.freelb:
            return f"freelb: {self.freelb.steps} forwards and backwards per step"
        if self.smart:
            return f"smart: {4 if self.smart.momentum else 3} forwards and 3 backwards per step"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)
