"""Fine-tuning's ways on a GPU: do their losses equal the CPU's, and what does a step of each cost?

    python bench/gpu/queue/finetuning.py --json FILE [--budget SECONDS] [--device cpu]

Classes of sequences by four layers of BERT-base, in fp32, by the loop of `fastbert finetune`: plain, with
decay to the first weights, mixout, FreeLB, SMART. A row has the losses of four steps without dropout, on the
device and on the CPU, and whether a second run has the same ones, bit by bit. On 32 x 128 tokens it has the
time of the third step; the fourth ends with a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import numpy as np
import torch

import fastbert
from bench.gpu import groups
from bench.lib import report, workloads
from bench.lib.engines import config_of
from bench.lib.probe_steps import reason_of
from fastbert.finetuning.encoded import Encoded, Source
from fastbert.finetuning.losses import losses_of
from fastbert.finetuning.settings import Settings
from fastbert.training.loop import Trainer
from fastbert.training.parallel import Parallel
from fastbert.training.schedules import Schedule
from fastbert.training.stages import Stage

STEPS, LAYERS = 4, 4
# mixout draws its masks by the device's generator, so its losses are the device's own
WAYS = {
    "plain": {},
    "decay_to_start": {"decay_to_start": True},
    "freelb": {"freelb": {"init": 0.0}},
    "smart": {"smart": {"noise": 1e-30}},
    "mixout": {"mixout": 0.7},
}


def examples_of(lengths: Sequence[int], vocabulary: int) -> Encoded:
    """Random tokens in two classes."""
    draw, starts = np.random.default_rng(0), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    labels = {"labels": np.arange(len(lengths)) % 2}
    ids = draw.integers(5, vocabulary, starts[-1])
    return Encoded(ids, np.zeros_like(ids), starts, labels)


def trained(
    model: workloads.Model, way: str, lengths: Sequence[int], device: str
) -> tuple[list[float], list[float]]:
    """The losses of the steps, and the seconds of each."""
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2}
    config = fastbert.BertConfig(**{**config_of(model).to_dict(), **options})
    settings = Settings(lr=1e-5, epochs=1, batch_size=len(lengths), max_length=max(lengths), **WAYS[way])
    stage = Stage(
        STEPS,
        Source(examples_of(lengths, model.vocab), True),
        lambda: losses_of(fastbert.BertForSequenceClassification(config), settings, ("logits",)),
        Schedule("linear", settings.lr, STEPS),
        sequences=len(lengths),
    )
    ends = [time.perf_counter()]

    def note(step: int) -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        quiet = {"tensorboard": False, "progress": False, "log_every": 1, "save_every": STEPS}
        run = Trainer(
            [stage],
            folder,
            parallel=Parallel("none", device),
            graphs=not settings.mixout,
            on_step=note,
            **quiet,
        )
        run.run()
        lines = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines], np.diff(ends).tolist()


def measured(way: str, device: str) -> dict:
    tiny = device == "cpu"
    model = workloads.TINY if tiny else dataclasses.replace(workloads.BASE, layers=LAYERS)
    few, many = ((3, 4, 5), (4,) * 4) if tiny else ((9, 40, 17, 70), (128,) * 32)
    try:
        losses, again, there = (trained(model, way, few, where)[0] for where in (device, device, "cpu"))
        _, seconds = trained(model, way, many, device)
    except Exception as error:
        return {"status": "failed", "error": reason_of(error)}
    compared = {"losses": losses, "cpu_losses": there, "same_bits": losses == again}
    return {"status": "ok", "model": model.name, **compared, "step_ms": 1e3 * seconds[-2]}


def line(row: dict) -> str:
    if row["status"] != "ok":
        return report.row_line(row)
    apart = max(abs(a - b) for a, b in zip(row["losses"], row["cpu_losses"], strict=True))
    same = "the same bits again" if row["same_bits"] else "OTHER BITS AGAIN"
    return f"{row['name']}: losses {apart:.1e} from the CPU's, {same}, {row['step_ms']:.1f} ms per step"


def main(argv: list[str] | None = None) -> int:
    args = groups.parsed(groups.options(__doc__, samples=1), argv)
    rows = groups.begun(args, line)
    for way in WAYS:
        rows.row({"step": "finetuning", "name": f"finetuning-{way}"} | measured(way, args.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
