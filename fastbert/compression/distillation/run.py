"""`fastbert.distill`: a student learns what a teacher computes.

    OUTPUT/                 the student as a HuggingFace directory, with its tokenizer
      results.json          the settings, the last losses, and the scores of teacher and student
      run/                  log.jsonl, config.json and checkpoints of the training
      corpus/               the tokens of a file of text

The same call resumes where it was interrupted, to the same bits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastbert.checkpoint import hub
from fastbert.checkpoint.files import digest, read_json, write_json
from fastbert.checkpoint.read import weights_digest
from fastbert.compression.distillation import data as reading
from fastbert.compression.distillation.cache import FILE, Cached, gathered, starts_of, write_cache
from fastbert.compression.distillation.objective import Distilled, reads, wanted
from fastbert.compression.distillation.reading import SPANS, rows_of
from fastbert.compression.distillation.recipes import SENTENCES, Phase, Recipe, phases_of, recipe_of
from fastbert.compression.distillation.sentences import SentenceVectors, projection_to
from fastbert.compression.distillation.students import (
    Student,
    check_pair,
    same_words,
    student_of,
    task_of,
    teacher_of,
)
from fastbert.compression.distillation.theseus import REPLACING
from fastbert.finetuning.encoded import Encoded, Source
from fastbert.finetuning.fit import micro_batches
from fastbert.finetuning.run import TOKENIZER_FILES, copy_files
from fastbert.finetuning.sequences import SequenceTask
from fastbert.finetuning.settings import Settings
from fastbert.finetuning.start import check_floats
from fastbert.finetuning.task import Task
from fastbert.models.base import PreTrainedModel
from fastbert.models.labels import IGNORED
from fastbert.runtime import expected
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.training.loop import DTYPES, Trainer
from fastbert.training.parallel import Parallel
from fastbert.training.schedules import Schedule
from fastbert.training.stages import Stage

RESULTS, RUN, TOKENIZER_CONFIG = "results.json", "run", "tokenizer_config.json"
# Settings of a run besides lr and epochs, which may differ between phases
SETTINGS = ("batch_size", "max_length", "seed", "dtype", "optimizer", "warmup", "weight_decay", "eps")
# The number of texts that show how a teacher's vectors vary
VARIED = 20_000


@dataclass(frozen=True)
class Result:
    """What distillation has made.

    Attributes:
        output: the student's directory.
        recipe: its name.
        student, teacher: the models, in eval mode; of the recipe "sentences" `SentenceEncoder`s.
        last: the last line of the log, with each loss.
        scores: "teacher" and "student" -> split -> metric -> score, in fractions of 1; empty without dev
            files.
    """

    output: Path
    recipe: str
    student: Any
    teacher: Any
    last: dict[str, Any]
    scores: dict[str, dict[str, dict[str, float]]]


def distill(
    teacher: str | Path,
    student: Any,
    data: str | Path,
    output: str | Path,
    recipe: str | Recipe | None = None,
    *,
    student_family: str | None = None,
    task: str | Task | None = None,
    lr: float | Sequence[float] | None = None,
    epochs: float | Sequence[float] | None = None,
    weights: Mapping[str, float] | None = None,
    layer_map: Sequence[int] | None = None,
    temperature: float | None = None,
    relation_heads: int | None = None,
    replacing: tuple[float, float] = REPLACING,
    cache: str | Path | None = None,
    cache_words: int | None = None,
    parallel: Parallel | None = None,
    save_every: int = 1000,
    workers: int = 0,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Result:
    """Train a student to compute what a teacher computes; see the module for the files.

    Args:
        teacher: a HuggingFace directory, or a name on the hub; of recipes with labelled examples one that is
            fine-tuned for the task; "sentences" reads a sentence encoder.
        student: a directory; a config or its path, for a new model; a model; a list of the teacher's layers,
            from 0, of which the student begins as a copy; or "bilstm".
        data: text, labelled examples or sentences, as the recipe reads; see `distillation.data`.
        output: the directory to write; a run that is there resumes.
        recipe: a name of `distillation.recipes.RECIPES`, or a recipe; None: "kd", of a BiLSTM "bilstm".
        student_family: of a student of the teacher's layers: "distilbert" or "bert"; see
            `distillation.families`. None: the teacher's.
        task: of a directory of labelled examples, see `fastbert.finetuning.tasks`: labels of texts, tokens
            ("ner") or spans ("squad", "squad2"). None: "csv", where the recipe reads labelled examples.
        lr, epochs: one number, or one per phase of the recipe; None: the recipe's.
        weights: loss -> its weight in all phases, in place of the recipe's; 0 leaves it out.
        layer_map: the teacher's layer, from 1, for each layer of the student that is compared; None: in equal
            steps.
        temperature, relation_heads: in place of the recipe's.
        replacing: (k, b) of "theseus".
        cache: a directory for the teacher's outputs, which are computed once; None: in every step. Words are
            then masked once, for all epochs.
        cache_words: of how many words, the teacher's likeliest, a cache has the scores per token; None: 32,
            where a recipe compares words.
        parallel: the processes; None: those of torchrun, or this one.
        save_every: steps between checkpoints.
        workers, progress, say: see `fastbert.training.loop.Trainer`.
        settings: batch_size, max_length, seed, dtype, optimizer, warmup, weight_decay or eps, as
            `fastbert.finetuning.settings` describes them; default: the recipe's.

    Raises:
        TypeError, ValueError: naming the argument, or the file and the line.
        Interrupted: a signal came; the same call resumes.
    """
    name, made = recipe_of(recipe, student)
    unknown = next((each for each in settings if each not in SETTINGS), None)
    if unknown is not None:
        raise TypeError(f"unknown option {unknown!r}: expected one of {', '.join(SETTINGS)}")
    phases = phases_of(made, lr, epochs, weights)
    output, data, place = Path(output), Path(data), hub.resolve(teacher)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: expected a directory or a new path; {output} is a file")
    if output.resolve() in (place.resolve(), Path(str(student)).resolve()):
        raise ValueError(f"output: expected another directory than that of a model, got {output}")
    if not data.exists():
        raise ValueError(f"data: {data} does not exist")
    heads = made.relation_heads if relation_heads is None else relation_heads
    degree = made.temperature if temperature is None else temperature
    _check_numbers(heads, degree, replacing)
    with contextlib.ExitStack() as held:
        if parallel is None:
            parallel = Parallel()
            held.callback(parallel.close)
        if parallel.kind == "fsdp" or (parallel.world > 1 and made.replaces):
            fitting = "one process" if made.replaces else "one process or ddp"
            raise ValueError(f"parallel: expected {fitting} for {name}, got {parallel.kind}")
        learned = task_of(made, task)
        of_teacher = teacher_of(made, learned, place, parallel.device)
        if isinstance(of_teacher, SentenceVectors):
            place = of_teacher.settings.transformer
        begun = student_of(student, made, learned, of_teacher, student_family)
        first, same = begun.make(), same_words(begun, place)
        check_floats(first, "student")
        names = [phase.weights for phase in phases]
        pairs = check_pair(made, names, first, of_teacher, same, layer_map, heads)
        vectors = isinstance(first, SentenceVectors)
        # Each sentence encoder cuts its own tokens
        limit = min(model.config.max_tokens for model in ([first] if vectors else [first, of_teacher]))
        length = made.max_length
        if learned is not None and not isinstance(learned, SequenceTask):
            # Windows of a context need room
            length = int(learned.defaults["max_length"])
        length = first.encoder().max_length if vectors else length
        given = {"batch_size": made.batch_size, "max_length": min(length, limit), **settings}
        how, *_ = (Settings(phase.lr, phase.epochs, **given) for phase in phases)
        if how.max_length > limit:
            raise ValueError(f"max_length: expected at most {limit} for these models, got {how.max_length}")
        compares = made.masks and any("kd" in weights for weights in names)
        words = _cache_words(cache_words, cache is not None and compares, of_teacher)
        top = None if words is None else (words, degree)
        job = _Job(made, phases, of_teacher, place, begun, first, same, how, parallel, cache is not None)
        source, dev = _source(job, data, learned, output / "corpus")
        tokenizers = [digest(load_tokenizer(each).to_str().encode()) for each in job.places]
        described = {
            "teacher": weights_digest(place),
            "student": begun.described,
            "tokenizers": tokenizers,
            "data": source.hash,
            "recipe": name,
            "phases": [asdict(phase) for phase in phases],
            "pairs": pairs,
            "temperature": degree,
            "relation_heads": heads,
            "replacing": list(replacing),
            "settings": {each: getattr(how, each) for each in SETTINGS},
        }
        if vectors:
            own = of_teacher.settings
            described["teacher_pooling"] = [own.pooling, own.normalize]
        if words is not None:
            described["cache_words"] = words
        if cache is not None:
            key = {
                each: described[each]
                for each in ("teacher", "teacher_pooling", "cache_words")
                if each in described
            }
            key |= {"max_length": how.max_length, "dtype": how.dtype}
            key |= {} if words is None else {"temperature": degree}
            wants = set().union(*(wanted(each, pairs, first, of_teacher)[1] for each in names))
            source = replaced(source, cached=_cached(job, Path(cache), key, source, wants, top))
        if vectors and first.config.hidden_size != of_teacher.config.hidden_size:
            of_teacher.projection = parallel.broadcast(_projection(job, source))
        stages, built = _stages(job, source, replacing, pairs, degree, heads)
        trainer = Trainer(
            stages,
            output / RUN,
            described,
            seed=how.seed,
            dtype=how.dtype,
            parallel=parallel,
            save_every=save_every,
            keep=1,
            log_every=1 if sum(stage.steps for stage in stages) < 200 else 10,
            # Graphs replay an encoder, and do not show what is inside it
            graphs=False,
            workers=workers,
            progress=progress,
            say=say,
        )
        last = trainer.run().last
        trained = built[len(phases) - 1].student.requires_grad_(True).eval()
        scores: dict[str, Any] = {}
        with parallel.alike():
            if parallel.is_first:
                if dev.dev:
                    sides = ("teacher", of_teacher, -1), ("student", trained, 0)
                    scores = {who: _scores(model, slot, dev, how.dtype) for who, model, slot in sides}
                _write(output, job, trained, {**described, "last": last, "scores": scores})
        scores = parallel.broadcast(scores)
    if vectors:
        trained, of_teacher = trained.encoder(how.max_length), of_teacher.encoder()
    return Result(output, name, trained, of_teacher, last, scores)


@dataclass(frozen=True)
class _Job:
    """What a run is made of.

    Attributes:
        recipe, phases: what is learned by; `phases` with what the arguments override.
        teacher, place: the teacher and its directory.
        begun, first: how the student begins, and a student that has begun.
        same: whether both read the same tokens.
        how: the settings, without lr and epochs.
        parallel: the processes.
        cached: whether the teacher's outputs are cached.
    """

    recipe: Recipe
    phases: list[Phase]
    teacher: Any
    place: Path
    begun: Student
    first: Any
    same: bool
    how: Settings
    parallel: Parallel
    cached: bool

    @property
    def places(self) -> tuple[Path, Path]:
        """The directories of the teacher's and of the student's tokenizer."""
        return self.place, self.begun.place or self.place


def _check_numbers(relation_heads: Any, temperature: Any, replacing: Any) -> None:
    if relation_heads is not None and (type(relation_heads) is not int or relation_heads < 1):
        raise ValueError(f"relation_heads: expected an integer >= 1, got {relation_heads!r}")
    expected.numbers("> 0", temperature=temperature)
    numbers = list(replacing) if isinstance(replacing, (list, tuple)) else []
    if len(numbers) != 2 or not all(map(_is_number, numbers)):
        raise ValueError(f"replacing: expected two finite numbers >= 0, got {replacing!r}")


def _cache_words(given: int | None, cached: bool, teacher: Any) -> int | None:
    """How many words a cache has per token; None if it has none."""
    if not cached:
        if given is not None:
            raise ValueError(f"cache_words: expected None, as no scores of words are cached, got {given!r}")
        return None
    most = teacher.config.vocab_size - 1
    count = min(32, most) if given is None else given
    if type(count) is not int or not 1 <= count <= most:
        raise ValueError(f"cache_words: expected an integer from 1 to {most}, got {count!r}")
    return count


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number >= 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _source(
    job: _Job, data: Path, task: Task | None, corpus: Path
) -> tuple[reading.Taught, reading.Labelled]:
    """What the recipe reads, and the dev examples."""
    recipe, how, rows = job.recipe, job.how, rows_of(job.teacher)
    if recipe.data == SENTENCES:
        sides = job.first.encoder(how.max_length), job.teacher.encoder()
        own, other = reading.sentences_of(data, *sides)
        return reading.Taught(Source(own, False), (), rows, other), reading.Labelled([], {})
    if task is None:
        options = how.max_length, how.seed, recipe.masks, job.parallel, 1 if job.cached else None
        inner = reading.text_of(data, job.place, corpus, *options)
        return reading.Taught(inner, (), rows), reading.Labelled([], {})
    readers = [(load_tokenizer(job.places[1]), job.first.config)]
    if not job.same:
        readers.append((load_tokenizer(job.place), job.teacher.config))
    found = reading.labelled_of(data, task, job.teacher.config, readers, how.max_length)
    unlabelled = all((labels == IGNORED).all() for labels in found.train[0].labels.values())
    if any({*phase.weights} == {"task"} for phase in job.phases) and unlabelled:
        raise ValueError(f"data: {data} has no labels, by which alone this recipe learns")
    other = None if job.same else replaced(found.train[1], labels={})
    return reading.Taught(Source(found.train[0], True), (), rows, other), found


def _cached(
    job: _Job,
    folder: Path,
    key: Mapping[str, Any],
    source: reading.Taught,
    names: set[str],
    words: tuple[int, float] | None,
) -> Cached:
    """The cached outputs of the teacher for all phases."""
    if not names and words is None:
        raise ValueError("cache: expected None, because no loss of this recipe reads the teacher's outputs")
    inner = source.inner if source.other is None else Source(source.other, True)
    with job.parallel.alike():
        if job.parallel.is_first:
            # Of what the teacher reads
            key = {**key, "data": inner.hash}
            write_cache(folder, key, job.teacher, inner, names, DTYPES[job.how.dtype], words)
    return Cached(folder / FILE, starts_of(inner))


def _projection(job: _Job, source: reading.Taught) -> torch.Tensor:
    """What brings the teacher's vectors to the student's width, by texts from all of the data."""
    assert source.other is not None
    numbers = np.arange(0, len(source.other), -(-len(source.other) // VARIED))
    if source.cached is not None:
        found = source.cached.rows(numbers)
    else:
        some = source.other.batch(numbers, True).inputs
        texts = Encoded(some["input_ids"], some["token_type_ids"], some["cu_seqlens"].astype(np.int64), {})
        found = gathered(job.teacher, Source(texts, True), ["vectors"], DTYPES[job.how.dtype])
    return projection_to(found["vectors"], job.first.config.hidden_size)


def _stages(
    job: _Job, source: reading.Taught, replacing: tuple[float, float], *options: Any
) -> tuple[list[Stage], dict[int, Distilled]]:
    """The stages of the training loop, and the modules that they will have made, by phase."""
    built: dict[int, Distilled] = {}
    how, lengths = job.how, np.asarray(source.plan(0).lengths)
    parts = micro_batches(lengths, how.batch_size, job.parallel.world)

    def builder(number: int, phase: Phase) -> Callable[[], Distilled]:
        def build() -> Distilled:
            student, rate = job.begun.make().train(), replacing if phase.replacing else None
            built[number] = Distilled(student, job.teacher, phase.weights, *options, replacing=rate)
            return built[number]

        return build

    stages = []
    for number, phase in enumerate(job.phases):
        steps = max(1, math.ceil(phase.epochs * len(lengths) / how.batch_size))
        stages.append(
            Stage(
                steps,
                replaced(source, losses=tuple(phase.weights)),
                builder(number, phase),
                Schedule("linear", phase.lr, steps, warmup=how.warmup if steps > 1 else 0),
                micro_batches=parts,
                sequences=how.batch_size // parts,
                enter=_fill if number else None,
                options={"kind": how.optimizer, "weight_decay": how.weight_decay, "eps": how.eps},
            )
        )
    return stages, built


@torch.no_grad()
def _fill(before: Any, after: Any) -> None:
    """A phase begins with the student of the previous phase."""
    after.student.load_state_dict(before.student.state_dict())


def _scores(model: Any, side: int, data: reading.Labelled, dtype: str) -> dict[str, dict[str, float]]:
    """Split -> scores of a model on the dev examples; `side` is the place of its tokens."""
    found, kinds = {}, reads("kd", rows_of(model))
    for name, sides in data.dev.items():
        split, task = sides[side], data.task
        assert task is not None
        (logits,) = gathered(model, Source(split.encoded, True), kinds, DTYPES[dtype]).values()
        rows = logits.float().numpy()
        outputs = list(rows.T) if rows_of(model) == SPANS else [rows]
        said = task.predictions(split.examples, split.encoded, outputs)
        task.tune(split.examples, said)
        found[name] = task.scores(split.examples, said)
    return found


def _write(output: Path, job: _Job, student: Any, content: Mapping[str, Any]) -> None:
    """Write the student, its tokenizer and results.json."""
    whole = student.encoder(job.how.max_length) if isinstance(student, SentenceVectors) else student
    whole.save_pretrained(output)
    if whole is student:
        copy_files(job.places[-1], output, TOKENIZER_FILES)
    path = output / TOKENIZER_CONFIG
    if path.is_file() and isinstance(student, PreTrainedModel) and not student.config.family.segments:
        # transformers' DistilBERT refuses the token types that BERT's tokenizer makes
        write_json(path, {**read_json(path), "model_input_names": ["input_ids", "attention_mask"]}, 2)
    write_json(output / RESULTS, content)
