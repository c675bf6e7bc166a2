"""Learning rates as pure functions of the step.

With s the step from 0 on, W the warm-up, T all steps and f the final share:

    constant        lr · s / W, then lr
    linear          lr · s / W, then lr · (f + (1 - f) (T - s) / (T - W)): transformers', if f is 0
    linear-google   lr · s / W, then lr · (1 - s / T), a jump at W: google-research/bert's
    poly            lr · t / W, then lr · (1 - t / T)^power with t = s + 1, a jump: NVIDIA's for LAMB
"""

from __future__ import annotations

from dataclasses import dataclass

from fastbert.runtime import expected

KINDS = ("constant", "linear", "linear-google", "poly")


@dataclass(frozen=True)
class Schedule:
    """A learning rate for each step; see the module.

    Attributes:
        kind: one of `KINDS`.
        lr: the largest learning rate.
        steps: T, >= 1.
        warmup: W, in steps; a number below 1 is a share of T.
        final_share: `linear` only: the share of `lr` at the end.
        power: `poly` only.

    Raises:
        ValueError: naming the attribute.
    """

    kind: str
    lr: float
    steps: int
    warmup: float = 0
    final_share: float = 0.0
    power: float = 0.5

    def __post_init__(self) -> None:
        expected.one_of(KINDS, kind=self.kind)
        expected.integers(1, steps=self.steps)
        expected.numbers(">= 0", lr=self.lr)
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(
                f"warmup: expected steps in [0, {self.steps}], or a share below 1, got {self.warmup!r}"
            )
        expected.numbers("in [0, 1]", final_share=self.final_share)
        if self.final_share and self.kind != "linear":
            raise ValueError(f"final_share: only linear has it, got kind {self.kind!r}")
        expected.numbers("> 0", power=self.power)
        if self.power != 0.5 and self.kind != "poly":
            raise ValueError(f"power: only poly has it, got kind {self.kind!r}")

    @property
    def warmup_steps(self) -> float:
        """W: `warmup` itself, or its share of all steps."""
        return self.warmup * self.steps if self.warmup < 1 else self.warmup

    def __call__(self, step: int) -> float:
        """The learning rate of a step, counted from 0; from `steps` on, the final rate."""
        if step < 0:
            raise ValueError(f"step: expected an integer >= 0, got {step!r}")
        warm, last = self.warmup_steps, self.steps
        s = step + 1 if self.kind == "poly" else step
        if s < warm:
            return self.lr * s / warm
        if self.kind == "constant":
            return self.lr
        s = min(s, last)
        if self.kind == "linear":
            left = (last - s) / max(last - warm, 1e-300) if last > warm else 0.0
            return self.lr * (self.final_share + (1 - self.final_share) * left)
        return self.lr * (1 - s / last) ** (self.power if self.kind == "poly" else 1)
