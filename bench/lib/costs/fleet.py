"""Data-parallel training on several GPUs: the all-reduce of the gradients, memory, how many GPUs are enough.

    step = compute + all-reduce - what of it backward hides
    all-reduce = 2 (N - 1) / N x bytes of the gradients / bandwidth of a link       (a ring)

Gradients are fp32, as the parameters are. Each GPU gets the same number of sequences, the last one perhaps
fewer; the fullest one sets the pace. A batch that does not fit is computed in several micro-batches.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from bench.lib.costs import counts as costs
from bench.lib.costs.counts import BACKWARD, OPTIMIZER, STATE_BYTES
from bench.lib.costs.devices import GIB, Device
from bench.lib.workloads import Model

# of the all-reduce that can run beside backward: the word table's gradient, 9% of large and 21% of base, is
# ready last. Assumed, not measured.
OVERLAP = 0.8
# of a link's bandwidth that a ring reaches. Assumed, not measured.
LINK_SHARE = 0.8
# GPUs that share NVLink, and GB/s of the network per GPU beyond them: one 400 Gbit/s port each
NODE, NETWORK = 8, 50.0
# of a GPU's memory that the counted tensors may fill
USABLE = 0.9
MOST_GPUS = 4096


@dataclass(frozen=True)
class Run:
    """What to train, and how.

    Attributes:
        device: one of the GPUs.
        model, tag, head: as for `costs.training`.
        lengths: the batch of one GPU.
        link: GB/s of a GPU's link in one direction; None: the device's own.
    """

    device: Device
    model: Model
    lengths: tuple[int, ...]
    tag: str
    head: str
    link: float | None = None

    def batch(self, sequences: int) -> tuple[int, ...]:
        """That many lengths: the workload's, again and again."""
        return tuple(itertools.islice(itertools.cycle(self.lengths), sequences))


@dataclass(frozen=True)
class Plan:
    """One step on `gpus` GPUs; times in seconds, memory in bytes of one GPU.

    Attributes:
        sequences: of the fullest GPU.
        micro_batches: into how many its sequences are cut, so that they fit; 0: not even one fits.
        all_reduce, exposed: its whole time, and what backward does not hide.
        per_s: sequences per second of all GPUs.
        efficiency: `per_s` over what the GPUs would do if each one worked alone.
        memory: of one GPU, by what it is for.
    """

    gpus: int
    global_batch: int
    sequences: int
    micro_batches: int
    compute: float
    all_reduce: float
    exposed: float
    per_s: float
    efficiency: float
    memory: dict[str, int]

    @property
    def step(self) -> float:
        """Seconds of one step."""
        return self.compute + self.exposed


def all_reduce(nbytes: float, gpus: int, gbytes: float) -> float:
    """Seconds of a ring all-reduce of `nbytes` over links of `gbytes` GB/s."""
    return 2 * (gpus - 1) / gpus * nbytes / (gbytes * 1e9)


def exposed(whole: float, backward: float) -> float:
    """Seconds of an all-reduce that a backward of that many seconds does not hide."""
    return whole - min(OVERLAP * whole, backward)


def link_of(run: Run, gpus: int) -> float:
    """GB/s that a ring of that many GPUs reaches. Raises ValueError if no link is known."""
    link = run.link
    if link is None:
        if run.device.link is None:
            raise ValueError(f"link_gbs: {run.device.name} has no NVLink figure; name the link's GB/s")
        # a node's ports carry one ring each, so together they are its link to the others
        link = run.device.link if gpus <= NODE else min(run.device.link, NODE * NETWORK)
    return link * LINK_SHARE


def micro_batches(run: Run, sequences: int) -> int:
    """The fewest equal parts of a GPU's sequences that fit into its memory; 0 if one sequence does not."""
    if run.device.memory_gib is None:
        return 1
    for parts in range(1, sequences + 1):
        lengths = run.batch(math.ceil(sequences / parts))
        needed = costs.training_memory(run.model, lengths, run.tag, on_gpu=True, head=run.head)
        if sum(needed.values()) <= USABLE * run.device.memory_gib * GIB:
            return parts
    return 0


def plan(run: Run, gpus: int, global_batch: int | None = None) -> Plan:
    """The step of `gpus` GPUs.

    Args:
        run: what is trained.
        gpus: how many.
        global_batch: sequences of all GPUs; None: each has `run.lengths`.

    Raises:
        ValueError: naming the argument.
    """
    if run.device.kind != "gpu":
        raise ValueError(f"gpus: got {gpus} of {run.device.name}, expected a GPU as device")
    if gpus < 1:
        raise ValueError(f"gpus: got {gpus}, expected at least 1")
    total = gpus * len(run.lengths) if global_batch is None else global_batch
    if total < gpus:
        raise ValueError(f"global_batch: got {total}, expected at least one sequence for each of {gpus} GPUs")
    sequences = math.ceil(total / gpus)
    parts = micro_batches(run, sequences)
    lengths = run.batch(math.ceil(sequences / max(1, parts)))
    works = costs.training(run.model, lengths, run.tag, on_gpu=True, head=run.head)
    once = run.device.seconds(work for work in works if work.which == OPTIMIZER)
    each = run.device.seconds(work for work in works if work.which != OPTIMIZER)
    # of the last micro-batch: its gradients are the sums that are sent
    backward = run.device.seconds(work for work in works if work.which == BACKWARD)
    compute = max(1, parts) * each + once
    gradients = STATE_BYTES["gradients"] * costs.parameters(run.model, run.head)
    whole = all_reduce(gradients, gpus, link_of(run, gpus)) if gpus > 1 else 0.0
    left = exposed(whole, backward)
    return Plan(
        gpus=gpus,
        global_batch=total,
        sequences=sequences,
        micro_batches=parts,
        compute=compute,
        all_reduce=whole,
        exposed=left,
        per_s=total / (compute + left),
        efficiency=compute / (compute + left) * total / (gpus * sequences),
        memory=costs.training_memory(run.model, lengths, run.tag, on_gpu=True, head=run.head),
    )


def enough(run: Run, want: float, global_batch: int | None = None) -> Plan | None:
    """The plan with the fewest GPUs that trains `want` sequences per second; None if no count does."""
    if not want > 0:
        raise ValueError(f"want: got {want:g}, expected a positive number of sequences per second")
    most = MOST_GPUS if global_batch is None else min(MOST_GPUS, global_batch)
    # with a batch for each, N GPUs do at most N times what one does
    first = 1 if global_batch is not None else math.ceil(want / plan(run, 1).per_s)
    for gpus in range(first, most + 1):
        # one more GPU that leaves the fullest one as full cannot be faster
        if global_batch and gpus > 1 and -(-global_batch // gpus) == -(-global_batch // (gpus - 1)):
            continue
        found = plan(run, gpus, global_batch)
        if not found.micro_batches:
            # one sequence does not fit, on however many GPUs
            return None
        if found.per_s >= want:
            return found
    return None
