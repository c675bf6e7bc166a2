"""Small tasks that a rule makes, in the official formats, and a tiny model that learns them in seconds."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fastbert
from fastbert.finetuning.run import Result, finetune
from fastbert.training.loop import Interrupted, Trainer

NOUNS = ["cat", "dog", "fox", "hen", "cow", "owl", "rat", "bee", "elk", "yak"]
VERBS = ["sees", "likes", "hears", "finds", "meets", "leads", "hides", "calls"]
COLOURS = ["red", "blue", "green", "white", "black", "brown"]
NAMES = ["anna", "bert", "carl", "dora", "emil", "fred", "gina", "hugo"]
PLACES = ["paris", "tokyo", "lima", "cairo", "oslo", "delhi"]
OTHERS = ["the", "in", "lives", "where", "does", "live", "?", ".", "and", "is"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, *NOUNS, *VERBS, *COLOURS, *NAMES, *PLACES, *OTHERS]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    # a task of few examples needs first weights of a size that lets a tiny model learn
    "initializer_range": 0.1,
}
# what differs between equal runs: times, a picture, and what a killed write leaves
UNEQUAL = (".lock", ".tmp", "speed.jsonl", "curves.png")
# options that every test passes
QUIET = {"progress": False}


def tiny_model(folder: Path, *, seed: int = 0, kind: str = "BertModel", **config: object) -> Path:
    """A HuggingFace directory of a model with random weights, whose vocabulary has each word whole."""
    torch.manual_seed(seed)
    cls = getattr(fastbert, kind)
    model = cls(fastbert.EncoderConfig(**{"model_type": cls.model_type or "bert", **SIZES, **config}))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder


def _sentence(draw: random.Random) -> list[str]:
    first, second = draw.sample(NOUNS, 2)
    return ["the", draw.choice(COLOURS), first, draw.choice(VERBS), second]


def _tsv(path: Path, header: list[str] | None, rows: list[list[object]]) -> None:
    lines = [*([header] if header else []), *rows]
    path.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines), encoding="utf-8")


def cola(draw: random.Random, count: int) -> list[tuple[str, int]]:
    """Sentences; a verb and the noun before it are swapped where the label is 0."""
    made = []
    for i in range(count):
        words = _sentence(draw)
        if i % 2 == 0:
            words[2], words[3] = words[3], words[2]
        made.append((" ".join(words), i % 2))
    return made


def write_cola(folder: Path, draw: random.Random, train: int, dev: int) -> None:
    """CoLA's files: no header but in the test file."""
    for split, count in (("train", train), ("dev", dev)):
        rows = [["x", label, "*", text] for text, label in cola(draw, count)]
        _tsv(folder / f"{split}.tsv", None, rows)
    rows = [[i, text] for i, (text, _) in enumerate(cola(draw, 7))]
    _tsv(folder / "test.tsv", ["index", "sentence"], rows)


def _pairs_tsv(
    folder: Path,
    splits: dict[str, int],
    header: list[str],
    places: tuple[int, int, int],
    make: Callable[[int], tuple[str, str, object]],
) -> None:
    """Tables with two texts and a label at `places`; other columns have numbers, and a test has no label."""
    for split, count in splits.items():
        rows = []
        for i in range(count):
            row: list[object] = [i] * len(header)
            first, second, label = make(i)
            row[places[0]], row[places[1]], row[places[2]] = first, second, label
            rows.append(row)
        kept = [j for j in range(len(header)) if split != "test" or j != places[2]]
        _tsv(folder / f"{split}.tsv", [header[j] for j in kept], [[row[j] for j in kept] for row in rows])


def write_stsb(folder: Path, draw: random.Random, train: int, dev: int) -> None:
    """STS-B's files; the score is the number of words that two texts of five words share."""

    def make(i: int) -> tuple[str, str, object]:
        words = draw.sample([*NOUNS, *VERBS], 10)
        common = i % 6
        second = [*words[:common], *words[5 : 10 - common]]
        draw.shuffle(second)
        return " ".join(words[:5]), " ".join(second), f"{common:.3f}"

    header = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1"]
    splits = {"train": train, "dev": dev, "test": 7}
    _pairs_tsv(folder, splits, [*header, "sentence2", "score"], (7, 8, 9), make)


def write_mrpc(folder: Path, draw: random.Random, train: int, dev: int) -> None:
    """MRPC's files; the second text has the same words in another order, or other words."""

    def make(i: int) -> tuple[str, str, object]:
        words = draw.sample([*NOUNS, *VERBS], 8)
        second = words[:4] if i % 3 else words[4:]
        return " ".join(words[:4]), " ".join(draw.sample(second, 4)), int(i % 3 > 0)

    splits = {"train": train, "dev": dev}
    header = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    _pairs_tsv(folder, splits, header, (3, 4, 0), make)
    rows = [[i, i, i, *make(i)[:2]] for i in range(7)]
    _tsv(folder / "test.tsv", ["index", *header[1:]], rows)


def write_mnli(folder: Path, draw: random.Random, train: int, dev: int) -> None:
    """MNLI's files and the diagnostic file; the colour of the second text decides."""
    colours = {"entailment": "red", "neutral": "blue", "contradiction": "green"}
    names = list(colours)

    def make(i: int) -> tuple[str, str, object]:
        label = names[i % 3]
        return " ".join(_sentence(draw)), f"the {colours[label]} {draw.choice(NOUNS)}", label

    header = [*map(str, range(8)), "sentence1", "sentence2", "gold_label"]
    for kind in ("matched", "mismatched"):
        _pairs_tsv(folder, {"train": train, f"dev_{kind}": dev}, header, (8, 9, 10), make)
        rows = [[i] * 8 + list(make(i)[:2]) for i in range(5)]
        _tsv(folder / f"test_{kind}.tsv", ["index", *header[1:10]], rows)
    rows = [[i, *make(i)[:2]] for i in range(4)]
    _tsv(folder / "diagnostic.tsv", ["index", "sentence1", "sentence2"], rows)


def write_squad2(folder: Path, draw: random.Random, train: int, dev: int) -> None:
    """SQuAD 2.0's files: where a person lives; a third of the contexts do not say it."""
    for split, count in (("train", train), ("dev", dev), ("test", 7)):
        articles = []
        for i in range(count):
            name, place, impossible = draw.choice(NAMES), " ".join(draw.sample(PLACES, 2)), i % 3 == 0
            verb = draw.choice(VERBS) if impossible else "lives"
            texts = [f"{name} {verb} in {place} .", f"{' '.join(_sentence(draw))} ."]
            context = " ".join(draw.sample(texts, 2))
            entry: dict[str, object] = {"id": f"{split}-{i}", "question": f"where does {name} live ?"}
            if split != "test":
                at = context.index(place)
                answers = [{"text": place, "answer_start": at}]
                entry |= {"is_impossible": impossible, "answers": [] if impossible else answers}
            articles.append({"title": "x", "paragraphs": [{"context": context, "qas": [entry]}]})
        text = json.dumps({"version": "v2.0", "data": articles})
        (folder / f"{split}-v2.0.json").write_text(text)


def write_swag(folder: Path, draw: random.Random, train: int, dev: int) -> None:
    """SWAG's files; the right ending has the noun of the start."""
    header = ["", "video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source"]
    header += [f"ending{k}" for k in range(4)]
    for split, count in (("train", train), ("val", dev), ("test", 7)):
        with open(folder / f"{split}.csv", "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow([*header, *(["label"] if split != "test" else [])])
            for i in range(count):
                nouns = draw.sample(NOUNS, 4)
                right = i % 4
                start = f"the {draw.choice(COLOURS)} {nouns[right]}"
                endings = [f"{draw.choice(VERBS)} the {noun}" for noun in nouns]
                row = [i, "v", i, f"{start} and", start, "and", "gold", *endings]
                rows.writerow([*row, *([right] if split != "test" else [])])


def write_ner(folder: Path, draw: random.Random, train: int, dev: int) -> None:
    """CoNLL's files: names are PER, places LOC, of two words now and then; documents of three sentences."""
    for file, count in (("train.txt", train), ("valid.txt", dev), ("test.txt", 7)):
        lines = []
        for i in range(count):
            if i % 3 == 0:
                lines.append("-DOCSTART- O\n\n")
            words = [(word, "O") for word in _sentence(draw)]
            person = [(name, "I-PER") for name in draw.sample(NAMES, draw.choice([1, 2]))]
            words += [*person, ("in", "O"), (draw.choice(PLACES), "I-LOC"), (".", "O")]
            lines += [f"{word} {tag}\n" for word, tag in words] + ["\n"]
        (folder / file).write_text("".join(lines))


def write_csv(folder: Path, draw: random.Random, train: int, dev: int) -> None:
    """A user's own table: which of three colours a text has."""
    for split, count in (("train", train), ("dev", dev), ("test", 7)):
        with open(folder / f"{split}.csv", "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            for i in range(count):
                words = _sentence(draw)
                words[1] = COLOURS[i % 3]
                rows.writerow([" ".join(words), COLOURS[i % 3] if split != "test" else ""])


# task -> writes its files
WRITERS: dict[str, Callable[..., None]] = {
    "cola": write_cola,
    "stsb": write_stsb,
    "mrpc": write_mrpc,
    "mnli": write_mnli,
    "squad2": write_squad2,
    "swag": write_swag,
    "ner": write_ner,
    "csv": write_csv,
}


def written(task: str, folder: Path, train: int = 48, dev: int = 24, *, seed: int = 0) -> Path:
    """A folder with the files of a task."""
    folder.mkdir(parents=True, exist_ok=True)
    WRITERS[task](folder, random.Random(seed), train, dev)
    return folder


def quick(task: object, model: Path, data: Path, output: Path, **options: object) -> Result:
    """Fine-tune with small batches and without a progress bar."""
    given = {"lr": 1e-3, "epochs": 2, "batch_size": 16, "max_length": 32, **QUIET, **options}
    return finetune(task, model, data, output, **given)


def stopped(patch: pytest.MonkeyPatch, step: int, call: Callable[[], object]) -> None:
    """Call with a SIGTERM after so many steps."""
    counted = Trainer._counted

    def stops(self: Trainer, micro: object) -> object:
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return counted(self, micro)

    with patch.context() as inner:
        inner.setattr(Trainer, "_counted", stops)
        with pytest.raises(Interrupted):
            call()


def logged(output: Path) -> list[dict[str, float]]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (output / "run" / "log.jsonl").read_text().splitlines()]


def resumes(
    patch: pytest.MonkeyPatch, step: int, folder: Path, run: Callable[[Path], object], times: int = 1
) -> dict[str, str]:
    """Check that a run that is stopped after so many steps ends with a whole one's bytes; its digests."""
    run(folder / "whole")
    stopped(patch, step, lambda: run(folder / "part"))
    assert not (folder / "part" / "results.json").exists()
    # These have sizes of epochs that a run happens to know, or hash them
    apart, found = ("trainer.json", "manifest.json"), {}
    for _ in range(times):
        run(folder / "part")
        both = (digests(folder / name) for name in ("part", "whole"))
        found, expected = ({k: v for k, v in each.items() if not k.endswith(apart)} for each in both)
        assert found == expected
    return found


def digests(output: Path) -> dict[str, str]:
    """File -> SHA-256, of all that a result depends on."""
    return {
        path.relative_to(output).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files(output)
        if not path.name.endswith(UNEQUAL)
    }


def files(folder: Path) -> Iterator[Path]:
    """All files below a folder, sorted."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
