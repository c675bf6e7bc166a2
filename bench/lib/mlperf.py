"""MLPerf's two BERT workloads in a size that a CPU can run, as rows with their rate."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

from bench.lib import encoder, mlperf_records, training, workloads
from bench.lib.engines import Bank
from bench.lib.roofs import Roofs

WINDOWS, PACKS = 4, 2


def with_rate(rows: Iterator[dict], workload: str, sequences: int) -> Iterator[dict]:
    """The rows, those with a time also with the rate that the records have, and all with the remarks."""
    asked = mlperf_records.WORKLOADS[workload]
    for row in rows:
        row["remarks"] = asked.remarks()
        if row["status"] == "ok":
            row |= {"sequences": sequences, asked.key: sequences / row["median_ms"] * 1e3}
        yield row


def bench_squad(
    model: workloads.Model,
    wanted: tuple[str, ...],
    threads: int,
    folder: Path,
    roofs: Roofs,
    *,
    windows: int = WINDOWS,
    samples: int = 7,
) -> Iterator[dict]:
    """A row for each engine: the forward of a batch of windows with SQuAD's lengths, in samples per second.

    Args:
        model: the encoder's sizes; the record's is BERT-large.
        wanted: names of bench/lib/engines.py.
        threads: threads per engine.
        folder: folder of the engines' exports.
        roofs: the machine's.
        windows: how many are drawn, one from each of as many equally likely strata of SQuAD's lengths.
        samples: calls of each engine that count.
    """
    lengths = workloads.draw_squad(windows)
    forwards = encoder.build(Bank(model, threads, folder), wanted)
    options = {"samples": samples, "lengths": lengths}
    rows = encoder.bench_encoder(model, "squad", forwards, roofs, **options)
    return with_rate(rows, "squad", windows)


def bench_train(
    model: workloads.Model,
    wanted: tuple[str, ...],
    roofs: Roofs,
    *,
    lengths: tuple[int, ...] = (512,) * PACKS,
    samples: int = 7,
) -> Iterator[dict]:
    """A row for each candidate: a step of pretraining on packs of 512 tokens, in packs per second.

    Args:
        model: the encoder's sizes; the record's is BERT-large.
        wanted: such as "fastbert-bf16", which is autocast.
        roofs: the machine's.
        lengths: tokens of each sequence of each pack.
        samples: steps of each candidate that count.
    """
    for tag, names in training.by_dtype(wanted):
        options = {"wanted": names, "head": "pretraining", "samples": samples, "lengths": lengths}
        rows = training.bench_training(model, "train", tag, roofs=roofs, **options)
        yield from with_rate(rows, "train", len(lengths))
        gc.collect()
