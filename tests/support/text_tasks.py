"""Eight tasks about the text of installed packages, in the official formats.

The text is sentences of docstrings and of the language reference. A module belongs to one split, and a
sentence is used once, so that no text of a dev file is in a training file.
"""

from __future__ import annotations

import ast
import builtins
import csv
import inspect
import json
import random
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.processes import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import python_text

LEAST, MOST = 6, 20  # words of a sentence
DEV_SHARE = 4  # one of so many modules belongs to dev
CODE = re.compile(r"::|>>>|\.\. |^[-=~*+]|^\S+ ?:|  +", re.MULTILINE)
SENTENCE = re.compile(r"[A-Z][a-z]*\b[^|<>{}=\\\t]*[a-z)]\.")
COMMON = {*("a", "an", "as", "by", "for", "from", "in", "is", "of", "on", "or", "that", "the", "to", "with")}
Rows = list[list[object]]


class Passage(NamedTuple):
    """The sentences of one docstring, or of one topic of the language reference.

    Attributes:
        module: the name of the file.
        name: of the function or class; "" for a module.
        sentences: one at least.
    """

    module: str
    name: str
    sentences: list[str]


def sentences(text: str) -> list[str]:
    """The sentences of the paragraphs that are prose."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.startswith(" ") and not CODE.search(paragraph.strip()):
            found += re.split(r"(?<=[a-z)]\.)\s+(?=[A-Z])", " ".join(paragraph.split()))
    return [text for text in found if SENTENCE.fullmatch(text) and LEAST <= len(text.split()) <= MOST]


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(the name, the docstring) of what a source file defines."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in strings
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield getattr(node, "name", ""), ast.get_docstring(node) or ""


def modules() -> Iterator[tuple[str, Iterable[tuple[str, str]]]]:
    """(the module, its docstrings by name), in an order that depends on the modules' names alone."""
    from pydoc_data.topics import topics

    found: dict[str, Path | str] = {f"topics/{name}": inspect.cleandoc(text) for name, text in topics.items()}
    for folder in python_text.folders():
        if folder.name != "torch":  # its files are large, and much of their text is code
            paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
            # the library's folder is named after the version of Python
            found |= {
                f"{folder.name.rstrip('.0123456789')}/{path}": folder / path
                for path in paths
                if not {"site-packages", "models"} & {*path.parts} and "test" not in str(path)
            }
    for name in sorted(found, key=lambda name: zlib.crc32(name.encode())):
        content = found[name]
        yield name, [("", content)] if isinstance(content, str) else docstrings(content)


def passages(counts: dict[str, int], suits: Callable[[Passage], bool]) -> dict[str, list[Passage]]:
    """Split -> passages, those of a module one after the other.

    Args:
        counts: split, train and dev -> how many passages it needs.
        suits: whether a passage is of use.
    """
    found: dict[str, list[Passage]] = {split: [] for split in counts}
    seen: set[str] = set()
    for i, (module, texts) in enumerate(modules()):
        split = "train" if i % DEV_SHARE else "dev"
        if len(found[split]) >= counts[split]:
            continue
        for name, text in texts:
            fresh = [each for each in dict.fromkeys(sentences(text)) if each not in seen]
            passage = Passage(module, name, fresh)
            if fresh and suits(passage):
                seen.update(fresh)
                found[split].append(passage)
        if all(len(found[each]) >= counts[each] for each in counts):
            break
    return {split: found[split][: counts[split]] for split in counts}


def another(draw: random.Random, given: list[Passage], i: int) -> Passage:
    """A passage other than number i, of the same module if that has one."""
    near = [each for each in given[max(i - 8, 0) : i + 8] if each is not given[i]]
    return draw.choice([each for each in near if each.module == given[i].module] or near)


def words(sentence: str) -> list[str]:
    """The words of a sentence, without its full stop."""
    return sentence.removesuffix(".").split()


def clauses(passage: Passage) -> list[str]:
    """The parts of a passage's first sentence, if it has two or more of three words or more."""
    parts = re.split(r", (?:and |or )?| (?:and|or|if|that|which|when|for) ", passage.sentences[0][:-1])
    return parts if len(parts) > 1 and all(len(part.split()) > 2 for part in parts) else []


def tsv(path: Path, header: list[str], rows: Rows) -> None:
    lines = [*([header] if header else []), *rows]
    path.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines), encoding="utf-8")


def first_of(passage: Passage) -> str:
    """The first sentence."""
    return passage.sentences[0]


def swaps(text: list[str]) -> list[tuple[int, int]]:
    """Pairs of places, one of a short common word: no sentence is as good with the two swapped."""
    common = [word in COMMON for word in text]
    return [(a, b) for a in range(len(text)) for b in range(a) if common[a] != common[b]]


def cola(folder: Path, split: str, given: list[Passage], draw: random.Random) -> None:
    """Two words of the sentence are swapped where the label is 0."""
    rows: Rows = []
    for i, passage in enumerate(given):
        text = words(first_of(passage))
        if i % 2 == 0:
            a, b = draw.choice(swaps(text))
            text[a], text[b] = text[b], text[a]
        rows.append(["x", i % 2, "*", " ".join(text)])
    tsv(folder / f"{split}.tsv", [], rows)


def stsb(folder: Path, split: str, given: list[Passage], draw: random.Random) -> None:
    """The two texts have some words in common; their share is the score."""
    rows: Rows = []
    for i, passage in enumerate(given):
        text, rest = words(first_of(passage)), words(first_of(another(draw, given, i)))
        kept = draw.randint(0, len(text))
        chosen = {*draw.sample(range(len(text)), kept)}
        second = [word if j in chosen else draw.choice(rest) for j, word in enumerate(text)]
        rows.append([*[i] * 7, " ".join(text), " ".join(second), f"{5 * kept / len(text):.3f}"])
    header = ["index", "genre", "filename", "year", "old_index", "source1", "source2"]
    tsv(folder / f"{split}.tsv", [*header, "sentence1", "sentence2", "score"], rows)


def mrpc(folder: Path, split: str, given: list[Passage], draw: random.Random) -> None:
    """The second text has the clauses of the first in another order, or is another sentence."""
    rows: Rows = []
    for i, passage in enumerate(given):
        parts = clauses(passage if i % 3 else another(draw, given, i))
        rows.append([int(i % 3 > 0), i, i, first_of(passage), ", ".join([*parts[1:], parts[0]])])
    tsv(folder / f"{split}.tsv", ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], rows)


def rte(folder: Path, split: str, given: list[Passage], draw: random.Random) -> None:
    """The second text is a clause cut from its sentence, or from another sentence."""
    rows: Rows = []
    for i, passage in enumerate(given):
        parts = clauses(passage if i % 2 else another(draw, given, i))
        label = "entailment" if i % 2 else "not_entailment"
        rows.append([i, first_of(passage), draw.choice(parts), label])
    tsv(folder / f"{split}.tsv", ["index", "sentence1", "sentence2", "label"], rows)


def qnli(folder: Path, split: str, given: list[Passage], draw: random.Random) -> None:
    """Whether the sentence documents the name in the question; if not, it is of another module."""
    rows: Rows = []
    for i, passage in enumerate(given):
        far = [each for each in given if each.module != passage.module]
        other = passage if i % 2 else draw.choice(far)
        label = "entailment" if i % 2 else "not_entailment"
        name = re.sub(r"_+|(?<=[a-z])(?=[A-Z])", " ", passage.name).strip()
        rows.append([i, f"What does {name} do?", first_of(other), label])
    tsv(folder / f"{split}.tsv", ["index", "question", "sentence", "label"], rows)


def squad2(folder: Path, split: str, given: list[Passage], draw: random.Random) -> None:
    """What a name does. The context tells it of two names; a third of the questions have another name."""
    articles = []
    for i, passage in enumerate(given):
        near = [each for each in given[max(i - 4, 0) : i + 5] if each.name != passage.name]
        others = draw.sample(near, 2)
        told = draw.sample([passage, others[0]], 2) if i % 3 else others
        context, answers = "", []
        for each in told:
            context += f"{each.name}: "
            if each is passage:
                answers = [{"text": first_of(each), "answer_start": len(context)}]
            context += f"{first_of(each)} "
        question = {"id": f"{split}-{i}", "question": f"What does {passage.name} do?"}
        question |= {"is_impossible": not answers, "answers": answers}
        articles.append({"title": passage.module, "paragraphs": [{"context": context, "qas": [question]}]})
    content = {"version": "v2.0", "data": articles}
    (folder / f"{split}-v2.0.json").write_text(json.dumps(content), encoding="utf-8")


def swag(folder: Path, split: str, given: list[Passage], draw: random.Random) -> None:
    """Which sentence comes next; the wrong ones are second sentences of other docstrings."""
    header = ["", "video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source"]
    header += [*(f"ending{k}" for k in range(4)), "label"]
    with open(
        folder / f"{'val' if split == 'dev' else split}.csv", "w", encoding="utf-8", newline=""
    ) as file:
        table = csv.writer(file)
        table.writerow(header)
        for i, passage in enumerate(given):
            others = draw.sample([each for each in given if each is not passage], 3)
            endings = [each.sentences[1] for each in others]
            endings.insert(i % 4, passage.sentences[1])
            start = first_of(passage)
            table.writerow([i, "v", i, start, start, "", "gold", *endings, i % 4])


BUILTINS = {name: value for name, value in vars(builtins).items() if name[0] != "_"}
EXCEPTIONS = {
    name for name, value in BUILTINS.items() if isinstance(value, type) and issubclass(value, BaseException)
}


def entities(sentence: str) -> dict[int, str]:
    """First character -> kind, of the names of modules, exceptions and builtins that are meant as such."""
    found = {}
    for at in re.finditer(r"\w+", sentence):
        before, name, after = sentence[: at.start()], at[0], sentence[at.end() :]
        if name in EXCEPTIONS:
            found[at.start()] = "EXC"
        elif name in sys.stdlib_module_names:
            if re.match(r"\.\w| module", after) or before.endswith("module "):
                found[at.start()] = "MOD"
        elif name in BUILTINS and (after.startswith(("(", " object")) or (before[-1:] == after[:1] == "`")):
            found[at.start()] = "FUN"
    return found


def ner(folder: Path, split: str, given: list[Passage], draw: random.Random) -> None:
    """A document per docstring, in CoNLL's columns."""
    lines = []
    for passage in given:
        lines.append("-DOCSTART- O\n\n")
        for sentence in passage.sentences:
            kinds = entities(sentence)
            for token in re.finditer(r"\w+|[^\w\s]", sentence):
                kind = kinds.get(token.start())
                lines.append(f"{token[0]} {f'B-{kind}' if kind else 'O'}\n")
            lines.append("\n")
    (folder / f"{'valid' if split == 'dev' else split}.txt").write_text("".join(lines), encoding="utf-8")


def is_named(passage: Passage) -> bool:
    """Whether a function or class has a name of its own."""
    return len(passage.name) > 3 and not passage.name.startswith("__")


# task -> writes a split's file, and whether a passage is of use
TASKS: dict[str, tuple[Callable[..., None], Callable[[Passage], bool]]] = {
    "cola": (cola, lambda passage: bool(swaps(words(first_of(passage))))),
    "stsb": (stsb, lambda passage: True),
    "mrpc": (mrpc, lambda passage: bool(clauses(passage))),
    "rte": (rte, lambda passage: bool(clauses(passage))),
    "qnli": (qnli, is_named),
    "squad2": (squad2, is_named),
    "swag": (swag, lambda passage: len(passage.sentences) > 1),
    "ner": (ner, lambda passage: any(map(entities, passage.sentences))),
}


def written(task: str, folder: Path, train: int, dev: int) -> Path:
    """A folder with the files of a task."""
    folder.mkdir(parents=True, exist_ok=True)
    write, suits = TASKS[task]
    for split, given in passages({"train": train, "dev": dev}, suits).items():
        write(folder, split, given, random.Random(split))
    return folder
