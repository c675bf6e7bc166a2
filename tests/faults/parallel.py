"""Faults of training by several processes: what they exchange, and where the loop depends on it."""

from tests.support.mutation import Fault, Suite

_LOOP = "fastbert/training/loop.py"
_PARALLEL = "fastbert/training/parallel.py"
_STATE = "fastbert/training/state.py"


def _fault(name: str, old: str, new: str, file: str = _LOOP) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    _fault(
        "a loss is divided by the number of processes",
        "batch.counts[name] * self.parallel.world / max",
        "batch.counts[name] / max",
    ),
    _fault("dropout by the process's own number of a micro-batch", "j = self.parallel.rank + i *", "j = i *"),
    _fault(
        "all processes read the same",
        "numbers = range(begin + self.parallel.rank, end, self.parallel.world)",
        "numbers = range(begin, end, self.parallel.world)",
    ),
    _fault(
        "a process reads neighbours",
        "numbers = range(begin + self.parallel.rank, end, self.parallel.world)",
        "numbers = range(begin + self.parallel.rank * (stage.micro_batches // self.parallel.world), end)",
    ),
    _fault(
        "counts of one process", "        dist.all_reduce(values, group=self._host)\n", "", file=_PARALLEL
    ),
    _fault("losses of one process", "            dist.all_reduce(values)\n", "            pass\n", _PARALLEL),
    _fault(
        "a share of a weight is saved",
        "            tensor = tensor.full_tensor()\n",
        "            tensor = tensor.to_local()\n",
        _PARALLEL,
    ),
    _fault(
        "a share's gradients are not exchanged",
        "wrapped.set_requires_gradient_sync(exchange)",
        "wrapped.set_requires_gradient_sync(False)",
        _PARALLEL,
    ),
    _fault(
        "ddp never exchanges",
        'if self.kind == "ddp" and not exchange:',
        'if self.kind == "ddp":',
        _PARALLEL,
    ),
    _fault(
        "each process looks for a checkpoint itself",
        "        dist.broadcast_object_list(values, src=0, group=self._host)\n",
        "",
        _PARALLEL,
    ),
    _fault(
        "an error of another process is not raised",
        "                error = next((kind(text) for kind, text in filter(None, told)), None)\n",
        "                pass\n",
        _PARALLEL,
    ),
    _fault(
        "no discarded backward",
        "self.parallel.world > 1 and not self._warm:",
        "self.parallel.world > 1 and self.step < 0:",
    ),
    _fault(
        "the discarded backward counts",
        "            self.optimizer.zero_grad(set_to_none=True)\n        self._warm = True\n",
        "        self._warm = True\n",
    ),
    _fault(
        "a process sees its own signal only",
        "stop = next((number for number, count in zip(_SIGNALS, signals, strict=True) if count), 0)",
        "stop = self._signal or 0",
    ),
    _fault(
        "each process names its own gradient",
        "enumerate(self.parallel.summed([int(each) for each in wrong]))",
        "enumerate(wrong)",
    ),
    _fault(
        "the clipped norm is that of a share",
        "gradients = [p.grad for p in parameters if p.grad is not None]",
        "gradients = [local(p.grad) for p in parameters if p.grad is not None]",
    ),
    _fault(
        "an error outside a step is raised at once",
        "            self._failure = self._failure or error\n",
        "            raise error\n",
    ),
    _fault("the scaler begins anew", 'self.scaler.load_state_dict(state["scaler"])', "pass"),
    _fault(
        "moments are not shared out",
        "self.parallel.like(value, p) if value.shape == p.shape and value.dim() else value",
        "value",
        _STATE,
    ),
    _fault(
        "LAMB's norms are those of a share",
        'return norm.full_tensor() if hasattr(norm, "full_tensor") else norm',
        'return norm.to_local() if hasattr(norm, "full_tensor") else norm',
        "fastbert/training/optimizers.py",
    ),
    _fault(
        "a signal to all ends the workers",
        "            signal.signal(getattr(signal, name), signal.SIG_IGN)\n",
        "            signal.signal(getattr(signal, name), signal.SIG_DFL)\n",
        "fastbert/training/stream.py",
    ),
)

_TESTS = (
    "test_ranks_and_workers_read_the_same[2-3]",
    "test_processes_equal_one[ddp2]",
    "test_processes_equal_one[fsdp2]",
    "test_other_optimizers[lamb-fsdp2]",
    "test_a_gradient_of_one_process_is_not_finite[fsdp2]",
    "test_float16_and_its_scaler[inf-fsdp2]",
    "test_a_signal_to_one_or_all[SIGTERM-ranks1-ddp2]",
    "test_an_error_of_one_process_outside_a_step_ends_all[1]",
    "test_resumed_bits_equal[raise-ddp3]",
    "test_torchrun_is_terminated",
)

SUITE = Suite(
    FAULTS, tests=tuple(f"tests/training/test_parallel.py::{name}" for name in _TESTS), timeout_s=600.0
)
