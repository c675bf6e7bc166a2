"""Pre-training: `prepare` beside `datasets`, and a step of the whole loop beside transformers.

The loop's step is everything that a run does: making the batch in a worker, forward, backward, clipping, the
optimizer and the log. It is interleaved with the peers. They get the same sequences, padded, from memory, in
a plain loop, so their step has no loading.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.lib import texts, training, workloads
from bench.lib.encode import MISSING
from bench.lib.engines import config_of, minilm_directory, needed
from bench.lib.probe_steps import reason_of
from bench.lib.roofs import Roofs
from bench.lib.timing import interleave, summarise
from fastbert.pretraining import run
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.recipe import Recipe
from fastbert.training.loop import Trainer
from fastbert.training.stream import Stream

PREPARE = ("fastbert-tokens", "datasets-tokens")
LOOP = ("fastbert", "transformers", "torch_compile")
LENGTH, SEQUENCES = 128, 8


DOCUMENT_WORDS = 2000


def write_text(path: Path, most: int) -> None:
    """Docstrings of Python's library as JSONL, documents of about 2,000 words, `most` words in all."""
    words, document = 0, []
    with path.open("w", encoding="utf-8") as file:
        for text in texts.docstrings():
            if len(text.split()) >= 8:
                document += text.split()
            if len(document) >= DOCUMENT_WORDS:
                file.write(json.dumps({"text": " ".join(document)}) + "\n")
                words, document = words + len(document), []
            if words >= most:
                return


def bench_prepare(words: int, *, wanted: tuple[str, ...] = PREPARE, samples: int = 5) -> Iterator[dict]:
    """A row for each candidate: text to token ids on disk, in tokens per second. Both use all threads.

    Args:
        words: number of words of the text.
        wanted: names out of PREPARE.
        samples: calls of each that count.
    """
    facts = {"workload": f"{words // 1000}k-words"}
    names = {name: {"step": "prepare", "name": f"prepare-{name}-{facts['workload']}"} for name in wanted}
    directory = minilm_directory()
    if directory is None:
        for name in wanted:
            yield {**names[name], "status": "skipped", "error": MISSING, "candidate": name, **facts}
        return
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.jsonl")
        write_text(text, words)
        calls: dict[str, Callable[[], int]] = {}
        failed, tokens = {}, {}
        for name in wanted:
            make = _prepare_ours if name.startswith("fastbert") else _prepare_by_datasets
            try:
                call = make(text, directory, Path(folder, name))
                tokens[name] = call()  # also warms up
                calls[name] = call
            except Exception as error:
                failed[name] = reason_of(error)
        options = {"seconds": 0.0, "samples": (samples, samples), "warmup": 0, "inner": 1}
        timed = interleave(calls, "cpu", **options)
        size = text.stat().st_size
    for name in wanted:
        if name in failed:
            yield {**names[name], "status": "error", "error": failed[name], "candidate": name, **facts}
            continue
        seconds = timed[name].median_ms * 1e-3
        yield {
            **names[name],
            "status": "ok",
            **timed[name].facts(),
            "tokens": tokens[name],
            "tokens_per_s": tokens[name] / seconds,
            "text_mb_per_s": size / seconds / 1e6,
            "candidate": name,
            **facts,
        }


def _prepare_ours(text: Path, tokenizer: Path, place: Path) -> Callable[[], int]:
    return lambda: Corpus.write([text], tokenizer, place, overwrite=True).num_tokens


def _prepare_by_datasets(text: Path, tokenizer: Path, place: Path) -> Callable[[], int]:
    """As transformers' run_mlm.py: load, tokenize in batches, save. It splits no sentences."""
    datasets, transformers = needed("datasets"), needed("transformers")
    made = transformers.AutoTokenizer.from_pretrained(str(tokenizer))

    def call() -> int:
        with tempfile.TemporaryDirectory() as cache:
            options = {"data_files": str(text), "split": "train", "cache_dir": cache}
            loaded = datasets.load_dataset("json", **options)
            done = loaded.map(
                lambda batch: made(batch["text"], add_special_tokens=False, return_special_tokens_mask=True),
                batched=True,
                remove_columns=["text"],
            )
            done.save_to_disk(str(place))
            return sum(map(len, done["input_ids"]))

    return call


def bench_loop(
    model: workloads.Model,
    tag: str,
    *,
    wanted: tuple[str, ...] = LOOP,
    samples: int = 5,
    roofs: Roofs | None = None,
    workers: int = 1,
) -> Iterator[dict]:
    """A row for each candidate: a step of BERT's recipe on 8 pairs of at most 128 tokens.

    Args:
        model: the encoder's sizes.
        tag: "fp32", or "bf16" for autocast.
        wanted: names out of LOOP.
        samples: steps of each that count.
        roofs: the machine's, for the floor.
        workers: workers of our loop.
    """
    facts = {"model": model.name, "workload": f"{SEQUENCES}x{LENGTH}", "head": "pretraining"}
    names = {n: {"step": "loop", "name": f"loop-{n}-{tag}-{model.name}-{facts['workload']}"} for n in wanted}
    directory = minilm_directory()
    if directory is None:
        for n in wanted:
            facts_of = {**names[n], "candidate": f"{n}-{tag}", **facts}
            yield {**facts_of, "status": "skipped", "error": MISSING}
        return
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.jsonl")
        write_text(text, 60_000)
        corpus = Corpus.write([text], directory, Path(folder, "shards"))
        times, failed, told = _turns(corpus, model, tag, wanted, samples, Path(folder, "run"), workers)
    for n in wanted:
        row = {**names[n], "candidate": f"{n}-{tag}", **facts}
        if n in failed:
            yield {**row, "status": "error", "error": failed[n]}
            continue
        timing = summarise(times[n], 1, "wall")
        lengths, labelled = told["lengths"], told["labelled"]
        flops = workloads.training_flops(lengths, model, labelled)
        floor = None if roofs is None else roofs.seconds(flops, 0.0, tag)
        yield {
            **row,
            "status": "ok",
            **timing.facts(),
            **workloads.rates(lengths, flops, timing.median_ms, floor),
            "padded_tokens": SEQUENCES * LENGTH,
            **({"data_wait": told["data_wait"]} if n == "fastbert" else {}),
        }


def _turns(
    corpus: Corpus,
    model: workloads.Model,
    tag: str,
    wanted: tuple[str, ...],
    samples: int,
    place: Path,
    workers: int,
) -> tuple[dict[str, list[float]], dict[str, str], dict]:
    """(candidate -> milliseconds of each step, candidate -> why not, facts of the batches)."""
    steps = samples + 3  # the first two warm up, and the last one also saves a checkpoint
    recipe = Recipe.load("bert").changed("phases.max_length", LENGTH).changed("phases.batch_size", SEQUENCES)
    recipe = replace(recipe, phases=(replace(recipe.phases[0], steps=steps, warmup=0),))
    config = config_of(model, vocab_size=max(model.vocab, corpus.vocab_size))
    stages = run.stages(corpus, config, None, recipe, 0)
    source = stages[0].source
    peers, failed = _peers(model, config, tag, tuple(n for n in wanted if n != "fastbert"))
    stream = Stream(source, 0, sequences=SEQUENCES)
    times: dict[str, list[float]] = {n: [] for n in (*peers, "fastbert")}
    lengths: list[np.ndarray] = []
    labelled: list[int] = []
    begin = 0.0

    def turn(step: int) -> None:
        """After a step of ours: its time, and the peers' steps on the same sequences."""
        nonlocal begin
        times["fastbert"].append((time.perf_counter() - begin) * 1e3)
        batch = stream.batch(step - 1)
        lengths.append(batch.lengths)
        labelled.append(batch.counts["mlm"])
        padded = _padded(batch.inputs)
        for name, peer in peers.items():
            peer.inputs = padded
            start = time.perf_counter()
            peer()
            times[name].append((time.perf_counter() - start) * 1e3)
        begin = time.perf_counter()

    options = {"save_every": steps + 1, "log_every": 1, "tensorboard": False, "progress": False}
    dtype = {"dtype": tag, "workers": workers}
    trainer = Trainer(stages, place, {}, on_step=turn, **options, **dtype)
    with contextlib.chdir(place.parent):
        begin = time.perf_counter()
        trainer.run()
    speed = [json.loads(line) for line in (place / "speed.jsonl").read_text().splitlines()][2:-1]
    waits = [line["data_wait"] * line["step_ms"] for line in speed]
    kept = {name: found[2:-1] for name, found in times.items()}
    wait = float(np.median(waits) / np.median(kept["fastbert"]))
    middle = sorted(range(2, steps - 1), key=lambda i: int(lengths[i].sum()))[samples // 2]
    facts = {"data_wait": wait, "lengths": tuple(map(int, lengths[middle])), "labelled": labelled[middle]}
    gc.collect()
    return kept, failed, facts


def _peers(
    model: workloads.Model, config, tag: str, wanted: tuple[str, ...]
) -> tuple[dict[str, training.Step], dict[str, str]]:
    """(peer -> its step, peer -> why there is none)."""
    overrides = {"vocab_size": config.vocab_size}
    found = training.modules(model, "pretraining", (*wanted, "fastbert"), **overrides) if wanted else {}
    steps, failed, optimizers = {}, {}, {}
    for name in wanted:
        module = found[name]
        if isinstance(module, str):
            failed[name] = module
            continue
        own = id(next(module.parameters()))
        if own not in optimizers:
            optimizers[own] = training.optimizer_of(module)
        nothing = {"input_ids": torch.zeros(1)}
        steps[name] = training.Step(module.train(), optimizers[own], nothing, tag == "bf16")
    return steps, failed


def _padded(inputs: dict) -> dict[str, torch.Tensor]:
    """A packed batch as transformers takes it, always of one shape."""
    ends = inputs["cu_seqlens"]
    shape = (len(ends) - 1, LENGTH)
    made = {key: np.zeros(shape, np.int64) for key in ("input_ids", "token_type_ids", "attention_mask")}
    made["labels"] = np.full(shape, -100)
    for row in range(shape[0]):
        part = slice(int(ends[row]), int(ends[row + 1]))
        size = part.stop - part.start
        for key in ("input_ids", "token_type_ids", "labels"):
            made[key][row, :size] = inputs[key][part]
        made["attention_mask"][row, :size] = 1
    made["next_sentence_label"] = inputs["sentence_labels"]
    return {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in made.items()}
