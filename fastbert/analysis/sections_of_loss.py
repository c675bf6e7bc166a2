"""Sections of a report about a model's loss without heads, or with fixed heads; see `sections`."""

from __future__ import annotations

import numpy as np

from fastbert.analysis import fixed as patterns
from fastbert.analysis import pictures
from fastbert.analysis.fixed import FixedHeads
from fastbert.analysis.heads import Ablation, Importance, PruningCurve
from fastbert.analysis.intervals import bands
from fastbert.analysis.measures import UNRATED
from fastbert.analysis.report import Drawing, Published, Section
from fastbert.analysis.sections import KOVALEVA, TITLES, WIDTH, heat

MICHEL = "Michel et al. 2019"
RAGANATO = "translation models of 6 layers, trained so; Raganato et al. 2020"
# number of cases, which is below the number of examples if pairs are compared
CASES = "examples: n = {cases:,}, seed {/seed}"
_UNRATED = (
    "These pairs have no labels, so all that is measured is how alike the vectors of their texts are. A "
    "model that makes all texts alike has the largest cosine. So nothing here says how good the model is: to "
    "learn how well it distinguishes texts, add the cosine that each pair should have (--labels)."
)


def ablation(found: Ablation, loss: str, *, seed: int) -> Section:
    """What the model loses without each head."""
    change = found.loss - found.base_loss[:, None, None]
    of_score = found.score - found.base_score[:, None, None]
    score, unrated = found.score_name, found.score_name == UNRATED
    red = "Red: the texts of a pair are less alike." if unrated else "Red: the model is worse without it."
    out = (
        "The output of one head is set to 0" if found.mode == "zero" else "One head looks at all tokens alike"
    )
    drawings = (
        heat(
            "loss",
            "Change of the loss without each head",
            change,
            "+.4f",
            seed,
            red,
            CASES,
            diverging=True,
            worse="high",
        ),
        heat(
            "score",
            f"Change of the {score} without each head",
            of_score,
            "+.4f",
            seed,
            red,
            CASES,
            diverging=True,
        ),
    )
    rows = [
        ("loss of the whole model", "{intervals/loss:.4f}"),
        (f"{score} of the whole model", "{intervals/score:.4f}"),
    ]
    if not unrated:
        rows.append(("heads without which the loss falls", "{loss falls without:,} of {count:,}"))
    first = "the head without which the loss rises most" if unrated else "the head most needed"
    ranks = (first, "the second", "the third", "the fourth", "the fifth")
    rows += [
        (rank, f"{{worst/{i}/name}}: loss {{worst/{i}/loss:+.4f}}, {score} {{worst/{i}/score:+.4f}}")
        for i, rank in enumerate(ranks[: change[0].size])
    ]
    published = []
    if len(change) > 1 and not unrated:
        published = [
            Published(
                f"heads without which the {score} changes (p < 0.01)",
                "{significant:,} of {count:,}",
                "8 of 96, 4 of them for the better",
                f"encoder of a WMT translation model; {MICHEL}",
            )
        ]
    if found.mode == "uniform":
        published.append(
            Published(
                f"largest gain of the {score} with one uniform head",
                "{figures/score/highest/value:+.4f}",
                "+0.1 (STS-B) to +1.2 (MRPC) points",
                KOVALEVA,
            )
        )
    says = f"The loss says how wrong the model is: {loss}."
    brief = [
        ("The head most needed", "{worst/0/name}: loss {worst/0/loss:+.4f}"),
        ("Heads without which the loss falls", "{loss falls without:,} of {count:,}"),
    ]
    if unrated:
        says = f"The loss is 1 minus the cosine. {_UNRATED}"
        brief = [("What the heads are worth", "not known: these pairs have no labels (--labels)")]
    return Section(
        "heads",
        TITLES["heads"],
        (
            f"{out}, and the model is run again. {says} The maps show, for each head, the loss and the score "
            "without it, minus those of the whole model.",
            "Other heads can do the work of one that is missing. So a change near 0 says that the model can "
            "do without this head, not that the head does nothing.",
        ),
        drawings,
        rows,
        published,
        brief,
    )


def importance(found: Importance, curves: dict[str, PruningCurve], *, seed: int) -> Section:
    """How much the loss depends on each head, and how many heads can be removed."""
    count = found.values().size
    lines = {}
    for name, curve in curves.items():
        ends = () if name.startswith("random") else bands(curve.score.T, seed=seed)[1:]
        lines[name] = (curve.removed / count, curve.score.mean(1), *ends)
    score = curves["by importance"].score_name
    drawings = (
        heat(
            "importance",
            "Importance of each head",
            np.abs(found.derivatives),
            ".3g",
            seed,
            "How fast the loss of an example changes, up or down, as the head's output is scaled.",
            CASES,
        ),
        Drawing(
            "pruning",
            f"The {score} while heads go",
            "The least important heads go first; grey: in random orders. Shaded: the 95% interval.",
            pictures.curves(lines, "share of heads taken out", score, "", width=WIDTH),
            sample=CASES,
        ),
    )
    last = len(curves["by importance"].removed) - 1
    rows = [
        ("the most important head", "{most/name}: {most/importance:.3g}"),
        (f"{score} with all heads, and without any", f"{{curve/0:.4f}} and {{curve/{last}:.4f}}"),
    ]
    unrated = score == UNRATED
    brief = [] if unrated else [("The most important head", rows[0][1])]
    published = []
    if found.derivatives.shape[0] > 1 and not unrated:
        rows.append((f"heads that can go before the {score} drops (p < 0.01)", "{removable:,} of {count:,}"))
        brief.append(("Heads that can go", rows[-1][1]))
        published = [
            Published(
                "share of heads that can go",
                "{removable share:.0%}",
                "MNLI 40%, CoLA 50%, MRPC 50%, SST-2 60%",
                f"BERT, fine-tuned; {MICHEL}",
            ),
            Published(
                "the same of a translation model", "{removable share:.0%}", "20%", f"WMT model; {MICHEL}"
            ),
        ]
    return Section(
        "importance",
        TITLES["importance"],
        (
            "Importance asks each example how much its loss would change if a head spoke a little louder or "
            "lower. All heads are measured at once, so this is quick and approximate, while the section "
            "above takes them out one by one.",
            _UNRATED
            if unrated
            else "The curve takes out more and more heads, the least important first. Where it stays flat, "
            "the model does not need them. If it lies above the grey ones, the order is better than chance.",
        ),
        drawings,
        rows,
        published,
        brief,
    )


def fixed(found: FixedHeads, *, seed: int) -> Section:
    """What is lost if heads attend by fixed patterns."""
    score = found.score_name
    shown = {
        "with the patterns": found.score_changes(),
        "with those heads at 0": found.score_changes(zero=True),
    }
    ends = {name: tuple(map(float, bands(values, seed=seed))) for name, values in shown.items()}
    grid = pictures.classes(found.assignment, patterns.NAMES, "", pictures.MORE_COLORS)
    drawings = [
        Drawing(
            "assignment",
            "The pattern that each head gets",
            "{count:,} of {heads:,} heads; the rest stay unchanged.",
            grid,
        )
    ]
    if found.count:
        picture = pictures.intervals(ends, f"change of the {score}", "", width=WIDTH)
        title = f"Change of the {score}"
        says = "Beside that of the whole model. The lines are the 95% intervals."
        drawings.append(Drawing("change", title, says, picture, sample=CASES))
    counts = found.counts()
    rows = [(f"heads: {name}", f"{{counts/{name}:,}}") for name in patterns.NAMES if counts[name]]
    for name, key in (("with the patterns", "patterns"), ("with those heads at 0", "zero")):
        changes = f"{score} {{{key}/intervals/score:+.4f}}, loss {{{key}/intervals/loss:+.4f}}"
        rows.append((name, changes))
    return Section(
        "fixed",
        TITLES["fixed"],
        (
            "Some heads look at places and not at words: always at the previous token, say, or at the "
            "separators. Such a head needs no learned queries and keys. Here every head that mostly does so "
            "gets the pattern that it comes nearest to, on every text, and keeps its values.",
            _UNRATED
            if score == UNRATED
            else "If the model stays as good as it was, that pattern was all that these heads did. The "
            "second bar shows what they are worth at all: there their output is 0.",
        ),
        drawings,
        rows,
        (
            Published(
                "fixed heads",
                "{count:,} of {heads:,}, put in after training",
                "7 of 8 in each layer, before training: up to +3 BLEU with little data",
                RAGANATO,
            ),
        ),
        ()
        if score == UNRATED
        else (
            (f"Change of the {score} with heads that know places only", "{patterns/intervals/score:+.4f}"),
        ),
    )
