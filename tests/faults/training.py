"""Faults of the optimizers and of the schedules."""

from tests.support.mutation import Fault, Suite

_OPTIMIZERS = "fastbert/training/optimizers.py"
_SCHEDULES = "fastbert/training/schedules.py"


def _fault(name: str, old: str, new: str, file: str = _OPTIMIZERS) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    _fault("LayerNorm decays", 'name == "bias" or isinstance(module, nn.LayerNorm)', 'name == "bias"'),
    _fault(
        "biases decay",
        'name == "bias" or isinstance(module, nn.LayerNorm)',
        "isinstance(module, nn.LayerNorm)",
    ),
    _fault(
        "frozen parameters optimized", "            if parameter.requires_grad:\n", "            if True:\n"
    ),
    _fault("the mean is not corrected", "[1 - beta1**t for t in steps]", "[1.0 for t in steps]"),
    _fault("the square is not corrected", "[1 - beta2**t for t in steps]", "[1.0 for t in steps]"),
    _fault("the ratio upside down", "of_weight / of_update, 1.0", "of_update / of_weight, 1.0"),
    _fault(
        "no ratio where a norm is 0",
        "(of_weight > 0) & (of_update > 0), of_weight",
        "of_update > 0, of_weight",
    ),
    _fault("the ratio also without decay", '        if not group["weight_decay"]:', "        if False:"),
    _fault(
        "the square's mean by the other beta",
        "torch._foreach_mul_(squares, beta2)",
        "torch._foreach_mul_(squares, beta1)",
    ),
    _fault(
        "no decay in Google's AdamW",
        "        super().__init__(params, **options, fused=True)",
        '        super().__init__(params, **{**options, "weight_decay": 0.0}, fused=True)',
    ),
    _fault("Google's AdamW corrects the bias", "_LATE = 2.0**30", "_LATE = 0.0"),
    _fault("the closure's loss is lost", "                loss = closure()", "                closure()"),
    _fault("steps are not counted", '                self.state[p]["step"] += 1\n', ""),
    _fault(
        "google's warm-up without a jump",
        "(1 - s / last) **",
        "(1 - (s - warm) / (last - warm)) **",
        _SCHEDULES,
    ),
    _fault("poly counts from 0", 's = step + 1 if self.kind == "poly" else step', "s = step", _SCHEDULES),
    _fault(
        "the warm-up's share of nothing",
        "self.warmup * self.steps if self.warmup < 1 else self.warmup",
        "self.warmup",
        _SCHEDULES,
    ),
    _fault("past the end below 0", "        s = min(s, last)\n", "", _SCHEDULES),
    _fault("linear to 0", "self.final_share + (1 - self.final_share) * left", "left", _SCHEDULES),
    _fault(
        "the warm-up one step late",
        "return self.lr * s / warm",
        "return self.lr * (s - 1) / warm",
        _SCHEDULES,
    ),
)

SUITE = Suite(FAULTS, tests=("tests/training",))
