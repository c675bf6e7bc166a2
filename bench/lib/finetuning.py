"""Fine-tuning end to end: our loop beside transformers' Trainer, on the same examples and machine.

A turn is an epoch of some batches, from the tasks' official files. Their texts are prose of Python's
docstrings. `squad` has the lengths of the windows of SQuAD v1.1's development set. `mrpc` has pairs of 53
tokens on average with a deviation of 12, about MRPC's. A turn has all that training does, loading included,
without evaluation and checkpoints.

`transformers` pads our batches to their longest example. `transformers_grouped` has batches of examples of
nearly one length, the stronger peer: from a pool as large as those within which
`train_sampling_strategy="group_by_length"` sorts, it has batches evenly over all lengths.

Each candidate has its own process, and turns are interleaved. Before, all train four steps without dropout,
and their losses and norms of gradients must agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pickle
import random
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

import fastbert
from bench.lib import texts, training, workloads
from bench.lib.encode import MISSING
from bench.lib.engines import MINILM, config_of, minilm_directory
from bench.lib.finetuning_engine import EXAMPLES, GROUPED, JOB, MODEL, SIDES, WARM_UP, Job
from bench.lib.load import Engine
from bench.lib.roofs import Roofs
from bench.lib.timing import summarise
from fastbert.finetuning.encoded import Encoded
from fastbert.finetuning.run import TOKENIZER_FILES
from fastbert.finetuning.tasks import task_of
from fastbert.sentences.tokenizer import load_tokenizer

CANDIDATES = tuple(SIDES)
LR = 2e-5
TURN = 4  # steps of a turn
# how far a loss or a norm may be from transformers'
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}
PAIR_MEAN, PAIR_DEVIATION, LEAST_PAIR = 53.0, 12.0, 20.0


class Prose:
    """Words of Python's docstrings, in texts of a wanted number of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        plain = (sentence for text in texts.docstrings() for sentence in texts.split(text))
        self.words = [word for sentence in plain for word in sentence.split()]
        counts = [len(each.ids) for each in tokenizer.encode_batch(self.words, add_special_tokens=False)]
        self.ends = np.cumsum(counts)

    def text(self, draw: random.Random, tokens: float) -> list[str]:
        """Consecutive words of about `tokens` tokens, rarely more by over one."""
        first = draw.randrange(len(self.words) // 2)
        last = int(np.searchsorted(self.ends, self.ends[first] + tokens + 1, side="right"))
        return self.words[first + 1 : last]


def write_mrpc(folder: Path, prose: Prose, count: int) -> None:
    """MRPC's file of training pairs: the second text is the first with its halves swapped, or another."""
    draw, normal = random.Random(0), statistics.NormalDist(PAIR_MEAN, PAIR_DEVIATION)
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for i in range(count):
        tokens = (max(normal.inv_cdf((i + 0.5) / count), LEAST_PAIR) - 3) / 2
        first = prose.text(draw, tokens)
        middle, label = len(first) // 2, int(i % 3 > 0)
        second = [*first[middle:], *first[:middle]] if label else prose.text(draw, tokens)
        lines.append(f"{label}\t{i}\t{i}\t{' '.join(first)}\t{' '.join(second)}")
    (folder / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_squad(folder: Path, prose: Prose, count: int) -> None:
    """SQuAD's file of training questions: which words follow some words of the context?"""
    draw, paragraphs = random.Random(0), []
    for i, length in enumerate(workloads.draw_squad(count)):
        words = prose.text(draw, min(length - 12, 366))
        at = draw.randrange(len(words) - 6)
        question = f"Which words come after {' '.join(words[at : at + 3])} ?"
        start = len(" ".join(words[: at + 3])) + 1
        answer = {"text": " ".join(words[at + 3 : at + 6]), "answer_start": start}
        entry = {"id": str(i), "question": question, "answers": [answer]}
        paragraphs.append({"context": " ".join(words), "qas": [entry]})
    data = {"version": "1.1", "data": [{"title": "docstrings", "paragraphs": paragraphs}]}
    (folder / "train-v1.1.json").write_text(json.dumps(data), encoding="utf-8")


@dataclass(frozen=True)
class Workload:
    """A task and how it is trained.

    Attributes:
        write: writes the task's file with a number of examples.
        head: the model's class.
        batch_size: examples per step: the paper's for GLUE, google-research/bert's for SQuAD.
        max_length: most tokens per sequence.
        pool: batches that are sorted together by length: of MRPC's 3,668 pairs a quarter, of SQuAD 50.
        checked: examples per step where losses are compared. transformers counts the scores of [PAD] in
            SQuAD's loss, and ours does not, so SQuAD's losses are compared without padding.
    """

    write: Callable[[Path, Prose, int], None]
    head: str
    batch_size: int
    max_length: int
    pool: int
    checked: int


WORKLOADS = {
    "mrpc": Workload(write_mrpc, "BertForSequenceClassification", 32, 128, 28, 4),
    "squad": Workload(write_squad, "BertForQuestionAnswering", 12, 384, 50, 1),
}


def prepared(folder: Path, model: workloads.Model, task: str, samples: int) -> tuple[Encoded, Encoded]:
    """Write what all candidates read: the model, the examples as tokens and the job.

    Args:
        folder: an empty one.
        model: its sizes; MiniLM has its own weights, other models random ones. All have its vocabulary.
        task: a key of WORKLOADS.
        samples: turns.

    Returns:
        The examples of a turn: in no order, and as grouped batches.
    """
    directory, form, made = minilm_directory(), WORKLOADS[task], task_of(task)
    tokenizer = load_tokenizer(directory)
    form.write(folder, Prose(tokenizer), form.pool * form.batch_size)
    pool = made.encode(made.read(folder, "train"), tokenizer, form.max_length, True)
    by_length = np.argsort(pool.lengths, kind="stable")
    batches = by_length[_evenly(form.pool * form.batch_size, len(pool))].reshape(form.pool, -1)
    mixed = _part(pool, by_length[_evenly(TURN * form.batch_size, len(pool))])
    grouped = _part(pool, batches[_evenly(TURN, form.pool)].ravel())
    (folder / EXAMPLES).write_bytes(pickle.dumps(mixed))
    (folder / GROUPED).write_bytes(pickle.dumps(grouped))
    torch.manual_seed(0)
    kind = getattr(fastbert, form.head)
    if model == MINILM:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the head is new
            module = kind.from_pretrained(directory)
    else:
        module = kind(config_of(model, vocab_size=tokenizer.get_vocab_size()))
    module.save_pretrained(folder / MODEL)
    for name in TOKENIZER_FILES:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, folder / MODEL / name)
    job = Job(task, form.batch_size, TURN, samples * TURN + WARM_UP + 1, LR, form.checked)
    (folder / JOB).write_text(json.dumps(dataclasses.asdict(job)))
    return mixed, grouped


def _evenly(count: int, total: int) -> np.ndarray:
    """`count` indices, evenly from `total`."""
    return ((np.arange(count) + 0.5) * total / count).astype(int)


def _part(examples: Encoded, numbers: np.ndarray) -> Encoded:
    found = examples.batch(numbers, segments=True).inputs
    starts, labels = found["cu_seqlens"].astype(np.int64), {name: found[name] for name in examples.labels}
    return Encoded(found["input_ids"], found["token_type_ids"], starts, labels)


@functools.cache
def measured(
    model: workloads.Model, task: str, wanted: tuple[str, ...], samples: int, threads: int
) -> dict[str, dict]:
    """candidate, precision included -> {"checked", "turns", "lengths"}, or {"error"}.

    Speed and memory are of one measurement, which is kept. Arguments are those of `bench_finetuning`.
    """
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as held:
        mixed, grouped = prepared(Path(place), model, task, samples)
        sides = {name: Engine(name, place, threads, module="finetuning_engine") for name in wanted}
        for name, side in sides.items():
            held.callback(side.close)
            lengths = (grouped if "grouped" in name else mixed).lengths
            found[name] = {"lengths": tuple(map(int, lengths)), "turns": []}

        def answer(name: str) -> dict:
            try:
                return {} if "error" in found[name] else sides[name].answer()
            except RuntimeError as error:
                found[name] = {"error": str(error)}
                return {}

        for name in wanted:
            found[name] |= answer(name)
            answer(name)  # it is warm
        for _ in range(samples):
            for name in wanted:
                if "error" not in found[name]:
                    sides[name].ask()
                    found[name].get("turns", []).append(answer(name))
    return found


def told_wrong(candidate: str, found: dict[str, dict]) -> str | None:
    """Why a candidate's first losses and norms of gradients are not transformers', or None."""
    name, tag = candidate.split("-")
    truth = found.get(f"transformers-{tag}", {}).get("checked")
    if truth is None or name == "transformers":
        return None
    ours = np.array(found[candidate]["checked"])
    error = float(np.abs(ours / np.array(truth) - 1).max())
    if error <= TOLERANCE[tag]:
        return None
    return f"losses and gradients are off by {error:.2g}, at most {TOLERANCE[tag]} expected"


def bench_finetuning(
    model: workloads.Model,
    task: str,
    *,
    wanted: tuple[str, ...],
    samples: int = 3,
    threads: int = 1,
    roofs: Roofs | None = None,
    memory: bool = False,
) -> Iterator[dict]:
    """A row for each candidate; one that fails or is missing is a row with the reason.

    Args:
        model: the encoder's sizes.
        task: a key of WORKLOADS.
        wanted: names out of CANDIDATES, each with "-fp32" or "-bf16".
        samples: turns of each candidate.
        threads: threads of each.
        roofs: the machine's, for the floor.
        memory: whether the rows are of peak memory, not of speed.

    Yields:
        Rows as bench/results/README.md says. The peak of memory is that of the process, over all turns.
    """
    step = "finetuning_memory" if memory else "finetuning"
    found: dict[str, dict] = {}
    if minilm_directory() is not None:
        for tag, names in training.by_dtype(wanted):
            of_tag = tuple(f"{name}-{tag}" for name in names)
            found |= measured(model, task, of_tag, samples, threads)
    for name in wanted:
        tag = name.rpartition("-")[2]
        row = {"step": step, "name": f"{step}-{name}-{model.name}-{task}"}
        facts = {"candidate": name, "model": model.name, "workload": task}
        if not found:
            yield {**row, "status": "skipped", "error": MISSING, **facts}
            continue
        if "error" in found[name]:
            yield {**row, "status": "error", "error": found[name]["error"], **facts}
            continue
        lengths, told = found[name]["lengths"], found[name]["turns"]
        if wrong := told_wrong(name, found):
            facts["incorrect"] = wrong
        if memory:
            peak, loaded = told[-1]["peak_mib"], told[-1]["loaded_mib"]
            above = {"above_mib": peak - loaded, "loaded_mib": loaded}
            by = {"measured_by": told[-1]["measured_by"]}
            yield {**row, "status": "ok", "peak_mib": peak, **above, **by, **facts}
            continue
        timing = summarise(
            [each["seconds"] * 1e3 for each in told], 1, "wall", [each["cpu_seconds"] * 1e3 for each in told]
        )
        flops = workloads.training_flops(lengths, model, 0)
        floor = None if roofs is None else roofs.seconds(flops, 0.0, tag)
        rates = workloads.rates(lengths, flops, timing.median_ms, floor)
        yield {
            **row,
            "status": "ok",
            **timing.facts(),
            **{key: value for key, value in rates.items() if key != "padded_tokens"},
            "sequences": len(lengths),
            "samples_per_s": len(lengths) / timing.median_ms * 1e3,
            **facts,
        }
