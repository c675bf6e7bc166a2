"""Sections of a report about a treebank: attention heads as parsers, probes of layers; see `sections`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastbert.analysis import pictures, syntax
from fastbert.analysis.probing import EdgeProbe
from fastbert.analysis.report import Drawing, Published, Section
from fastbert.analysis.sections import TITLES, WIDTH, extremes
from fastbert.analysis.structure import Structure

CLARK_TREES = "bert-base-uncased, Wall Street Journal in Stanford dependencies; Clark et al. 2019"
TENNEY = "BERT-large; Tenney et al. 2019"
HEWITT = "Penn Treebank; Hewitt and Manning 2019"
# most relations in a figure and in a table
RELATIONS = 8


def of_syntax(
    labels: syntax.AttentionByLabel, parsing: syntax.Parsing, best: Sequence[syntax.Best]
) -> Section:
    """Attention to words by their label, and heads as parsers.

    Args:
        labels, parsing: results on the same sentences.
        best: best heads of `parsing`; empty if there are too few arcs.
    """
    accuracy = parsing.accuracy().max(-1)
    numbers, says = extremes("arcs", accuracy, ".1%")
    of_arcs = "arcs: n = {arcs:,}, in {sentences:,} sentences"
    drawings = [
        Drawing(
            "arcs",
            "Arcs that each head finds",
            f"The better of both directions, of all arcs. {says}",
            pictures.heat_maps({"": accuracy}, low=0.0),
            numbers,
            of_arcs,
        )
    ]
    if best:
        groups = {
            each.relation: {"best head": each.accuracy.mean, "fixed offset": each.baseline}
            for each in best[:RELATIONS]
        }
        ends = {each.relation: each.accuracy.ends for each in best[:RELATIONS]}
        picture = pictures.bars(groups, ends, "share of arcs", "", width=WIDTH)
        title = "The best head for a relation"
        says = "Beside the word at one fixed offset. The lines are the 95% intervals over sentences."
        scored = "sentences: n = {best/0/accuracy/n:,}, seed {/seed}"
        drawings.append(Drawing("relations", title, says, picture, sample=scored))
    rows = [
        (
            f"attention to {name}",
            f"{{labels/{name}/share_of_attention:.1%}}; {{labels/{name}/share_of_tokens:.1%}} of the tokens",
        )
        for name, count in zip(syntax.LABELS, labels.counts(), strict=True)
        if count
    ]
    published = []
    for i, each in enumerate(best):
        at = f"best/{i}"
        ours = f"head {{{at}/name}}: {{{at}/accuracy:.1%}}; offset {{{at}/offset:+d}}: {{{at}/baseline:.1%}}"
        if i < RELATIONS:
            rows.append((f"arcs found, {each.relation}", ours))
        theirs = syntax.PUBLISHED.get(each.relation)
        if theirs is not None:
            offset = "" if theirs.offset is None else f"; offset: {theirs.offset:.1%}"
            text = f"head {theirs.head}: {theirs.accuracy:.1%}{offset}"
            published.append(Published(f"arcs found, {theirs.relation}", ours, text, CLARK_TREES))
    if not best:
        rows.append(("heads for relations", "too few arcs in each half of the sentences"))
    brief = [(f"Arcs found, {best[0].relation}", published[0].ours)] if published else []
    return Section(
        "syntax",
        TITLES["syntax"],
        (
            "In a treebank people have drawn, for every sentence, an arc from each word to the one that it "
            "belongs to: from “the” to its noun, from an object to its verb. A head finds an arc if the word "
            "that it looks at most is at the other end. Special tokens do not count.",
            "A head that always looks one word back finds many arcs, since many are that short. So beside "
            "the best head for a relation there is the best fixed offset. The head is chosen on one half of "
            "the sentences and scored on the other.",
            "That a head finds arcs does not say that the model needs it for anything: see the section on "
            "what it loses without.",
        ),
        drawings,
        rows,
        published,
        brief,
    )


def of_probes(edges: Sequence[EdgeProbe], trees: Sequence[Structure]) -> Section:
    """How well layers show parts of speech and trees.

    Args:
        edges: edge probes of the model, and of a model with random weights.
        trees: the same with structural probes.
    """
    best = "{{{0}/best/score:.3f}} from layer {{{0}/best/layer}}, {{{0}/{1}/0:.3f}} from the embeddings"
    random = "{{{0}/random/score:.3f}} from layer {{{0}/random/layer}}"
    depth = np.arange(len(edges[0].counts))
    lines = {
        "this model": (depth, edges[0].scores()),
        "with random weights": (depth, edges[1].scores()),
        "mix of all layers up to it": (depth, edges[0].scores_up_to()),
    }
    drawings = [
        Drawing(
            "edge",
            "Parts of speech predicted from each layer",
            "By a small network that learns from the vectors of a layer alone.",
            pictures.curves(lines, "layer (0: embeddings)", "F1", "", width=WIDTH),
            sample="words tested: n = {edge/tested:,}, seed {/seed}",
        )
    ]
    published = []
    if not np.isnan(edges[0].expected_layer()):
        ours = "{edge/expected_layer:.2f} of {/sections/model/layers:,}"
        theirs = "3.39 of 24, on the Penn Treebank"
        published.append(Published("expected layer, parts of speech", ours, theirs, TENNEY))
    ours = "{edge/centre:.2f} of {/sections/model/layers:,}"
    published.append(Published("centre of the mix of layers", ours, "11.68 of 24", TENNEY))
    depth = np.arange(len(trees[0].found))
    lines = {
        "this model": (depth, trees[0].uuas()),
        "with random weights": (depth, trees[1].uuas()),
        "each word beside the next": (depth, np.full(len(depth), trees[0].linear_uuas())),
    }
    picture = pictures.curves(lines, "layer (0: embeddings)", "share of arcs", "", width=WIDTH)
    drawings.append(
        Drawing(
            "trees",
            "Trees found in each layer",
            "By one linear map, under which words are as far apart as they are in the tree.",
            picture,
            sample="sentences tested: n = {structural/best/score/n:,}, seed {/seed}",
        )
    )
    rows = [
        ("parts of speech (F1)", best.format("edge", "f1")),
        ("the same with random weights", random.format("edge")),
        ("arcs of trees found (UUAS)", best.format("structural", "uuas")),
        ("the same with random weights", random.format("structural")),
        ("the same if each word goes with the next", "{structural/uuas_linear:.3f}"),
    ]
    published.append(
        Published(
            "arcs of trees found (UUAS)",
            "{structural/best/score:.3f} from layer {structural/best/layer}",
            "0.798 from layer 7 of 12, 0.825 from layer 15 of 24",
            f"BERT-base and BERT-large, {HEWITT}",
        )
    )
    brief = [
        ("Parts of speech predicted from a layer (F1)", "{edge/best/score:.3f}"),
        ("Arcs of trees found in a layer (UUAS)", "{structural/best/score:.3f}"),
    ]
    return Section(
        "probe",
        TITLES["probe"],
        (
            "A probe is a small model that learns to predict something, such as a word's part of speech, "
            "from the vectors of one layer. It is tested on sentences that it has not seen. What it predicts "
            "well can be read from that layer.",
            "A probe can learn much by itself. So the same probes read the layers of a model with random "
            "weights, which knows nothing of language, and the embeddings, which know no context. Only a "
            "score above both shows knowledge of the model's.",
        ),
        drawings,
        rows,
        published,
        brief,
    )
