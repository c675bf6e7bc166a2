"""The recipes: which losses, on which layers, and the numbers of their papers.

    loss        what is compared                                                       mean over
    task        cross-entropy against labels; of a regression the squared error        labelled examples
    kd          T² · KL of the softmax of logits / T; of a regression squared error    examples, or tokens
    logits      squared error of logits                                                examples
    mlm         cross-entropy of masked words                                          masked tokens
    cosine      1 - cos of the last hidden states                                      tokens
    patient     squared error of hidden states of [CLS], scaled to length 1            examples
    embeddings  squared error of the embedding output, mapped by W_e                   tokens
    hidden      squared error of hidden states, mapped by W_h                          tokens
    scores      squared error of attention's scores                                    pairs of tokens
    attention   KL of attention maps                                                   tokens and heads
    queries     KL of the softmax of x xᵀ / √d, x the queries; keys, values: the same  tokens and heads
    vectors     squared error of the vectors of sentences                              sentences
    angles      1 - cos of the vectors of sentences                                    sentences

"patient" is a mean over layers and components, as the authors' code has it, for which β = 500 was chosen.
"embeddings", "hidden" and "scores" are sums over layers. Maps W exist only between models of unequal widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastbert.runtime import expected

# loss -> the kinds of tensors that it reads of both models; see `reading.py`
READS = {
    "task": (),
    "mlm": (),
    "kd": ("logits",),
    "logits": ("logits",),
    "cosine": ("states",),
    "patient": ("first",),
    "embeddings": ("states",),
    "hidden": ("states",),
    "scores": ("queries", "keys"),
    "attention": ("queries", "keys"),
    "queries": ("queries",),
    "keys": ("keys",),
    "values": ("values",),
    "vectors": ("vectors",),
    "angles": ("vectors",),
}
# Losses that a student with another vocabulary can learn by
OF_SENTENCES = ("task", "kd", "logits", "vectors", "angles")
TEXT, TASK, SENTENCES = "text", "labelled examples", "sentences"


@dataclass(frozen=True)
class Phase:
    """A part of a run with losses of its own.

    Attributes:
        weights: loss -> its weight in the sum; a loss of weight 0 is there for those who ask for it.
        lr: the largest learning rate.
        epochs: passes over the data.
        replacing: whether the student's layers replace the teacher's at random (`theseus.py`).
    """

    weights: Mapping[str, float]
    lr: float
    epochs: float
    replacing: bool = False


@dataclass(frozen=True)
class Recipe:
    """A way to distil.

    Attributes:
        source: the paper.
        data: `TEXT`, `TASK` or `SENTENCES`.
        phases: in order; each begins with the student of the previous phase.
        batch_size: examples per step.
        max_length: most tokens of a sequence.
        temperature: T of "kd".
        matched: which layers of the student are matched: "all", "inner" (all but the last) or "last".
        relation_heads: into how many heads "queries", "keys" and "values" divide the width; None: the
            models' own heads.
        masks: whether words are masked.
        published: the papers' rows, a line each.
    """

    source: str
    data: str
    phases: tuple[Phase, ...]
    batch_size: int = 32
    max_length: int = 128
    temperature: float = 1.0
    matched: str = "all"
    relation_heads: int | None = None
    masks: bool = False
    published: tuple[str, ...] = ()

    @property
    def replaces(self) -> bool:
        """Whether the student's layers replace the teacher's in a phase."""
        return any(phase.replacing for phase in self.phases)


# Rogers et al. 2020, "A Primer in BERTology", table 1: times smaller, share of the score, times faster
_PRIMER = "{}: {} x smaller{}, {}% of the score of {} (Rogers et al. 2020)"
_TINYBERT = (
    _PRIMER.format("TinyBERT-4", 7.5, ", 9.4 x faster", 96, "BERT-base"),
    "TinyBERT-4: GLUE 77.0 of 79.5 (Jiao et al. 2019)",
)
_LAYERS = {"embeddings": 1.0, "hidden": 1.0, "scores": 1.0}
RECIPES = {
    "kd": Recipe(
        "Hinton et al. 2015, Distilling the Knowledge in a Neural Network",
        TASK,
        (Phase({"kd": 0.5, "task": 0.5}, 5e-5, 3),),
        temperature=2.0,
        published=(
            _PRIMER.format("PD-6, pre-trained distillation", 1.6, ", 2.5 x faster", 98, "BERT-large"),
        ),
    ),
    "bilstm": Recipe(
        "Tang et al. 2019, Distilling Task-Specific Knowledge from BERT into Simple Neural Networks",
        TASK,
        (Phase({"logits": 1.0}, 1e-3, 20),),
        published=(_PRIMER.format("BiLSTM", 110, ", 434 x faster", 91, "BERT-large"),),
    ),
    "pkd": Recipe(
        "Sun et al. 2019, Patient Knowledge Distillation for BERT Model Compression",
        TASK,
        (Phase({"kd": 0.7, "task": 0.3, "patient": 500.0}, 5e-5, 4),),
        temperature=10.0,
        matched="inner",
        published=(
            _PRIMER.format("PKD-6", 1.6, ", 1.9 x faster", 97, "BERT-base"),
            _PRIMER.format("PKD-3", 2.4, ", 3.7 x faster", 92, "BERT-base"),
        ),
    ),
    "tinybert-task": Recipe(
        "Jiao et al. 2019, TinyBERT, task-specific distillation",
        TASK,
        (Phase(_LAYERS, 5e-5, 10), Phase({"kd": 1.0}, 3e-5, 3)),
        published=_TINYBERT,
    ),
    "theseus": Recipe(
        "Xu et al. 2020, BERT-of-Theseus",
        TASK,
        (Phase({"task": 1.0}, 2e-5, 3, replacing=True), Phase({"task": 1.0}, 2e-5, 3)),
        published=(
            _PRIMER.format("Theseus-6", 1.6, "", 98, "BERT-base"),
            "Theseus-6: MNLI 82.1 of 83.5 (Xu et al. 2020)",
        ),
    ),
    "distilbert": Recipe(
        "Sanh et al. 2019, DistilBERT",
        TEXT,
        (Phase({"kd": 5.0, "mlm": 2.0, "cosine": 1.0}, 5e-4, 3),),
        max_length=512,
        temperature=2.0,
        matched="last",
        masks=True,
        published=(_PRIMER.format("DistilBERT-6", 2.5, ", 1.6 x faster", 90, "BERT-base"),),
    ),
    "tinybert": Recipe(
        "Jiao et al. 2019, TinyBERT, general distillation",
        TEXT,
        (Phase(_LAYERS, 1e-4, 3),),
        batch_size=256,
        published=_TINYBERT,
    ),
    "minilm": Recipe(
        "Wang et al. 2020, MiniLM",
        TEXT,
        (Phase({"attention": 1.0, "values": 1.0}, 5e-4, 3),),
        batch_size=256,
        max_length=512,
        matched="last",
        published=(
            "MiniLM 6 x 384, 22M parameters, 5.3 x faster: MNLI 83.3, SST-2 91.5, QNLI 90.5, CoLA 47.5, "
            "RTE 68.8, MRPC 88.9, QQP 90.6 (Wang et al. 2020)",
        ),
    ),
    "minilmv2": Recipe(
        "Wang et al. 2020, MiniLMv2",
        TEXT,
        (Phase({"queries": 1.0, "keys": 1.0, "values": 1.0}, 6e-4, 3),),
        batch_size=256,
        max_length=512,
        matched="last",
        relation_heads=48,
    ),
    "sentences": Recipe(
        "Reimers and Gurevych 2020, Making Monolingual Sentence Embeddings Multilingual",
        SENTENCES,
        (Phase({"vectors": 1.0, "angles": 0.0}, 2e-5, 5),),
        batch_size=64,
        max_length=512,
    ),
}


def recipe_of(given: str | Recipe | None, student: Any) -> tuple[str, Recipe]:
    """(name, recipe) of the arguments `recipe` and `student` of `distill`."""
    if isinstance(given, Recipe):
        return given.source, given
    name = given or ("bilstm" if isinstance(student, str) and student == "bilstm" else "kd")
    if name not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {given!r}")
    return name, RECIPES[name]


def phases_of(
    recipe: Recipe,
    lr: float | Sequence[float] | None,
    epochs: float | Sequence[float] | None,
    weights: Mapping[str, float] | None,
) -> list[Phase]:
    """The recipe's phases with what the arguments `lr`, `epochs` and `weights` of `distill` override.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    made = list(recipe.phases)
    for field, given in (("lr", lr), ("epochs", epochs)):
        if given is None:
            continue
        numbers = [given] * len(made) if isinstance(given, (int, float)) else list(given)
        if len(numbers) != len(made):
            raise ValueError(f"{field}: expected one number, or {len(made)} for this recipe, got {given!r}")
        made = [replace(phase, **{field: number}) for phase, number in zip(made, numbers, strict=True)]
    known = {name for phase in made for name in phase.weights}
    for name, weight in (weights or {}).items():
        if name not in known:
            raise ValueError(f"weights: {name!r} is no loss of this recipe; expected some of {sorted(known)}")
        expected.numbers(">= 0", **{f"weights: {name}": weight})
    chosen = [{name: (weights or {}).get(name, w) for name, w in phase.weights.items()} for phase in made]
    kept = [{name: weight for name, weight in each.items() if weight} for each in chosen]
    if not all(kept):
        raise ValueError("weights: expected one above 0 in each phase")
    return [replace(phase, weights=each) for phase, each in zip(made, kept, strict=True)]


def layer_pairs(
    matched: str, student: int, teacher: int, layer_map: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """(layer of the student, layer of the teacher) of what is compared; layers count from 1.

    Args:
        matched: see `Recipe`.
        student, teacher: their numbers of layers.
        layer_map: the teacher's layer of each matched layer of the student; None: m · teacher // student for
            layer m, so 3, 6, 9, 12 for 4 layers and a teacher of 12.

    Raises:
        ValueError: naming `layer_map`, or the student if it has more layers than the teacher.
    """
    of = {"all": range(1, student + 1), "inner": range(1, student), "last": range(student, student + 1)}
    own = list(of[matched])
    if layer_map is None:
        if student > teacher:
            raise ValueError(
                f"student: has {student} layers, the teacher {teacher}; expected at most as many, or a "
                "layer_map"
            )
        return [(m, m * teacher // student) for m in own]
    given = list(layer_map)
    if len(given) != len(own):
        raise ValueError(
            f"layer_map: expected {len(own)} layers of the teacher, one for each of the student's "
            f"layers {own}, got {len(given)}"
        )
    for layer in given:
        if type(layer) is not int or not 1 <= layer <= teacher:
            raise ValueError(f"layer_map: expected layers from 1 to {teacher}, got {layer!r}")
    return list(zip(own, given, strict=True))
