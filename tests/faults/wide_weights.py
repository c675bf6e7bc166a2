"""Faults of wide weights (fastbert/ops/linear.py), and of the memory that training keeps."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_LINEAR = "fastbert/ops/linear.py"
_LOSS = "fastbert/ops/linear_cross_entropy.py"
_CHUNKS = "fastbert/backends/reference/linear_cross_entropy.py"
_MEMORY = "fastbert/training/memory.py"
_LOOP = "fastbert/training/loop.py"

FAULTS = (
    Fault("frozen weights stay wide", _LINEAR, "        and weight.requires_grad\n", ""),
    Fault("x stays in float32", _LINEAR, "return x.to(dtype), weight, bias", "return x, weight, bias"),
    Fault("no weight stays wide", _LINEAR, "return found is not None and found()", "return False"),
    Fault("every backend reads wide weights", _LINEAR, "return found is not None and found()", "return True"),
    Fault(
        "a wide weight is not kept where dx is not needed",
        _LINEAR,
        "weight if need[0] or is_wide(weight, x) else None,",
        "weight if need[0] else None,",
    ),
    Fault("another backend gets a wide weight", _LINEAR, "            weight = weight.to(dy.dtype)\n", "            pass\n"),
    Fault(
        "the loss's wide weight is not kept",
        _LOSS,
        "if again or need_dx or is_wide(inputs.weight, inputs.x) else None",
        "if again or need_dx else None",
    ),
    Fault("the loss's wide weight for another backend", _LOSS, "if wide and not reads_wide(", "if False and not reads_wide("),
    Fault("the loss forgets a wide weight without dx", _CHUNKS, "weight if need_dx or wide else None", "weight if need_dx else None"),
    Fault("the loss asks for linear's backend", _LOSS, 'operands(x, weight, bias, "linear_cross_entropy")', "operands(x, weight, bias)"),
    Fault("sums of chunks rounded", _CHUNKS, "_first(t, classes).to(weight.dtype)", "_first(t, classes).to(x.dtype)"),
    Fault("a view of all classes", _CHUNKS, "return t if t.shape[0] <= classes else t[:classes]", "return t[:classes]"),
    Fault("nothing is kept", _MEMORY, "    _limit(library, _KEPT)\n", ""),
    Fault("large blocks are not kept", _MEMORY, "_KEPT = dict.fromkeys(_USUAL, 2**31 - 1)", "_KEPT = {_TRIM_THRESHOLD: 2**31 - 1}"),
    Fault("kept for ever", _MEMORY, "        _limit(library, _USUAL)\n", ""),
    Fault("not returned at the end", _MEMORY, "        library.malloc_trim(0)\n", ""),
    Fault("the user's limits replaced", _MEMORY, " and not own else None", " else None"),
    Fault("older variables not looked for", _MEMORY, " or any(name in os.environ for name in limits)", ""),
    Fault("the loop keeps nothing", _LOOP, "                held.enter_context(kept_memory())\n", "                pass\n"),
    Fault("the loop keeps on every device", _LOOP, 'if self.parallel.device.type == "cpu":\n                held', "if True:\n                held"),
)  # fmt: skip

SUITE = Suite(
    FAULTS,
    tests=(
        "tests/ops/test_linear.py",
        "tests/ops/test_linear_cross_entropy.py",
        "tests/training/test_memory.py",
        "-k",
        "autocast or another_backend or test_memory",
    ),
)
