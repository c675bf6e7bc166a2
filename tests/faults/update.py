"""Faults of steps that the host does not wait for."""

from tests.support.mutation import Fault, Suite

_LOOP = "fastbert/training/loop.py"
_UPDATE = "fastbert/training/update.py"


def _fault(name: str, old: str, new: str, file: str = _UPDATE) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    _fault(
        "a bad step updates",
        "            self.optimizer.found_inf = self._stopped.float()\n",
        "            self.optimizer.found_inf = torch.zeros_like(norm)\n",
    ),
    _fault(
        "only the bad step is skipped",
        "            self._stopped |= bad\n",
        "            self._stopped = bad\n",
    ),
    _fault("the last step is named", "torch.where(self._stopped, self._record, record)", "record"),
    _fault("the host reads the norm", "bad = finite.logical_not()", "bad = torch.tensor(not finite)"),
    _fault("not clipped", "if most is not None:", "if False:"),
    _fault(
        "all steps are clipped",
        "torch.where(finite & (wide > most), factor, torch.ones_like(wide))",
        "factor",
    ),
    _fault("skips are counted again", "        self._skipped.zero_()\n", ""),
    _fault("a scale that falls for ever", " & (before <= self.least_scale)", " & (before < 0)"),
    _fault("fp16 stops at its first skip", " & (before <= self.least_scale)", ""),
    _fault(
        "a bad step is saved",
        '        """Write a checkpoint of the current step."""\n        self._read_update()\n',
        '        """Write a checkpoint of the current step."""\n',
        _LOOP,
    ),
    _fault(
        "a new stage forgets a bad step",
        '        """Go over to the next stage."""\n        self._read_update()\n',
        '        """Go over to the next stage."""\n',
        _LOOP,
    ),
    _fault(
        "skipped steps count",
        "            if skipped is not None:\n",
        "            if False:\n",
        "fastbert/training/optimizers.py",
    ),
    _fault("the norm is that of a share", "vector_norm(gradient)", "vector_norm(local(gradient))"),
)

SUITE = Suite(FAULTS, tests=("tests/training/test_update.py",), timeout_s=600.0)
