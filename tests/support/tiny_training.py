"""A tiny run of the training loop that knows nothing of pre-training: sequences of two classes."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastbert
from fastbert.training import work
from fastbert.training.draws import Draws, key_of
from fastbert.training.loop import Stage, Trainer
from fastbert.training.module import Losses
from fastbert.training.schedules import Schedule
from fastbert.training.stream import Batch

VOCAB = 53
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}

ROOF = 1e12


@pytest.fixture(autouse=True, scope="module")
def known_roof():
    """To measure the roof takes longer than to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "roof", lambda device, dtype: ROOF)
        yield


def folder_in_memory() -> tempfile.TemporaryDirectory:
    """A folder in memory, if the system has one: checkpoints are flushed, which takes long on a disk."""
    memory = "/dev/shm"
    free = os.statvfs(memory).f_bavail * os.statvfs(memory).f_frsize if os.path.isdir(memory) else 0
    return tempfile.TemporaryDirectory(dir=memory if free > 200e6 else None)


@dataclass
class NumberedPlan:
    lengths: np.ndarray


@dataclass
class Numbered:
    """Random sequences; the class is whether the first token is even. Epochs differ in size."""

    size: int = 37
    seed: int = 5
    longest: int = 12

    @property
    def hash(self) -> str:
        return f"numbered {self.size} {self.seed} {self.longest}"

    def plan(self, epoch: int) -> NumberedPlan:
        size = self.size + epoch % 3
        return NumberedPlan(3 + Draws(key_of(self.hash, "lengths"), epoch, 0).below(self.longest - 2, size))

    def example(self, plan: NumberedPlan, epoch: int, index: int) -> np.ndarray:
        length = int(plan.lengths[index])
        return Draws(key_of(self.hash, "ids"), epoch, index).below(VOCAB, length)

    def collate(self, examples: list[np.ndarray]) -> Batch:
        lengths = np.array([len(ids) for ids in examples], np.int32)
        # the class -100 does not count, so counts differ between micro-batches
        classes = np.array([-100 if ids[0] % 5 == 0 else ids[0] % 2 for ids in examples])
        inputs = {
            "input_ids": np.concatenate(examples),
            "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            "max_seqlen": int(lengths.max()),
            "labels": classes,
        }
        return Batch(inputs, {"class": int((classes >= 0).sum())}, lengths)


class Classes(Losses):
    """A classifier as the loop wants it, with a head of its own that no export has."""

    def __init__(self, dropout: float = 0.1, layers: int = 2) -> None:
        super().__init__()
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = {**CONFIG, **rates, "num_hidden_layers": layers}
        self.model = fastbert.BertForSequenceClassification(fastbert.BertConfig(**config))
        self.scale = nn.Parameter(torch.ones(2))
        self.exports, self.weights = {"model": self.model}, {}

    def forward(self, inputs: dict[str, Any], measure: bool = False):
        labels = inputs["labels"]
        given = {key: value for key, value in inputs.items() if key != "labels"}
        logits = self.model(**given).logits * self.scale
        loss = fastbert.ops.cross_entropy.cross_entropy(logits, labels)
        right = (logits.argmax(-1) == labels).sum()
        return {"class": loss}, ({"class": right} if measure else {})

    def work(self, batch: Batch) -> float:
        return float(batch.lengths.sum())


def stages(steps: int = 6, *, micro_batches: int = 2, dropout: float = 0.1, **options: Any) -> list[Stage]:
    """One stage with batches of 8."""
    size = {} if "tokens" in options else {"sequences": 8 // micro_batches}
    schedule = options.pop("schedule", Schedule("linear", 1e-2, steps, 0.2))
    source = options.pop("source", Numbered())
    return [Stage(steps, source, lambda: Classes(dropout), schedule, micro_batches, **{**size, **options})]


def trainer(output: Path, steps: int = 6, *, seed: int = 3, **options: Any) -> Trainer:
    """A trainer of `stages`; options of both."""
    own = {"save_every": 2, "log_every": 1, "tensorboard": False, "progress": False}
    names = ("micro_batches", "dropout", "sequences", "tokens", "source", "clip", "options", "schedule")
    of_stage = {key: options.pop(key) for key in names if key in options}
    made = options.pop("stages", None) or stages(steps, **of_stage)
    config = options.pop("config", {"steps": steps})
    return Trainer(made, output, config, seed=seed, **{**own, **options})


def digests(run: Path) -> dict[str, str]:
    """What a run has computed: SHA-256 of the log and of the newest checkpoint's weights and moments."""
    newest = max(entry for entry in run.iterdir() if entry.name.startswith("step-"))
    paths = [run / "log.jsonl", *sorted(newest.rglob("*.safetensors"))]
    found = {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}
    return {**found, "step": json.loads((newest / "trainer.json").read_text())["step"]}


def log(run: Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
