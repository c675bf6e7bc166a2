"""The sections of a report: each is a function from a result to plain sentences and figures.

Sections about a loss are in `sections_of_loss`, sections about a treebank in `sections_of_trees`.

A published number names its model and its source. It is no target for another model or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastbert.analysis import pictures
from fastbert.analysis.attention import PATTERNS, AttentionStatistics
from fastbert.analysis.change import Change
from fastbert.analysis.effective import EffectiveAttention
from fastbert.analysis.geometry import Geometry
from fastbert.analysis.intervals import bands, resampled_means
from fastbert.analysis.maps import ExampleMap
from fastbert.analysis.report import Drawing, Published, Section

CLARK = "bert-base-uncased, Wikipedia; Clark et al. 2019"
KOVALEVA = "bert-base-uncased, fine-tuned on GLUE; Kovaleva et al. 2019"
BRUNNER = "BERT; Brunner et al. 2020, fig. 1"
ETHAYARAJH = "BERT; Ethayarajh 2019"
TITLES = {
    "model": "What was analysed",
    "attention": "Where the heads look",
    "patterns": "Five patterns of attention",
    "maps": "Maps to look at",
    "heads": "What the model loses without a head",
    "importance": "Which heads matter, and how many can go",
    "fixed": "What a head could do without words",
    "change": "What differs in the second model",
    "effective": "The part of attention that reaches the output",
    "geometry": "How much a word's vector depends on its text",
    "syntax": "Which heads find what a word belongs to",
    "probe": "What each layer knows about grammar",
}
# inches, the width of a phone's column
WIDTH = 3.5


def missing(name: str, reason: str) -> Section:
    """A section for an analysis that was not computed, with the reason."""
    return Section(name, TITLES[name], missing=reason)


def head_name(layer: int, head: int) -> str:
    """A name such as "3-7" for layer 2 and head 6: names count from 1, numbers and arrays from 0."""
    return f"{layer + 1}-{head + 1}"


def extremes(name: str, means: np.ndarray, form: str) -> tuple[dict[Any, Any], str]:
    """(numbers, template) of the lowest and the highest head of (layers, nheads) means."""
    found = {}
    for word, at in (("lowest", np.nanargmin(means)), ("highest", np.nanargmax(means))):
        layer, head = (int(i) for i in np.unravel_index(at, means.shape))
        value = float(means[layer, head])
        found[word] = {"name": head_name(layer, head), "layer": layer, "head": head, "value": value}
    says = ", ".join(
        f"{word} {{figures/{name}/{word}/value:{form}}} (head {{figures/{name}/{word}/name}})"
        for word in found
    )
    return found, f"L{says[1:]}."


def heat(
    name: str,
    title: str,
    values: np.ndarray,
    form: str,
    seed: int,
    says: str = "",
    sample: str = Drawing.sample,
    **options: Any,
) -> Drawing:
    """A heat map of the means of (n, layers, nheads) values; options of `pictures.heat_maps`."""
    means = np.asarray(values, np.float64).mean(0)
    numbers, of_extremes = extremes(name, means, form)
    says = f"{says} {of_extremes}".strip()
    if len(values) > 1:
        low, high = np.percentile(resampled_means(values, seed=seed), [2.5, 97.5], axis=0)
        half = (high - low) / 2
        numbers["half width of intervals"] = {"median": float(np.median(half)), "largest": float(half.max())}
        widths = (
            f"{{figures/{name}/half width of intervals/{of}:{form.lstrip('+')}}}"
            for of in ("median", "largest")
        )
        says += " 95% interval of a head: ±{} in the median, ±{} at most.".format(*widths)
    return Drawing(name, title, says, pictures.heat_maps({"": means}, **options), numbers, sample)


def model() -> Section:
    """What was analysed."""
    return Section(
        "model",
        TITLES["model"],
        ("The same version of this program makes the same numbers of the same model and the same texts.",),
        rows=(
            ("model", "{/model} of {directory}, {family}, {dtype}"),
            ("size", "{layers} layers of {heads} heads; vectors of {hidden size:,} numbers"),
            ("texts", "{/n:,} examples of {texts}"),
            (
                "tokens",
                "{/tokens:,}: {lengths/least:,} to {lengths/most:,} per example, in the median "
                "{lengths/median:g}",
            ),
            ("seed", "{/seed}"),
            ("versions", "fastbert {/fastbert}, numpy {/numpy}, torch {/torch}"),
            ("SHA-256 of the config", "{/config_sha256}"),
            ("SHA-256 of the tokens", "{/examples_sha256}"),
        ),
        brief=(("Heads", "{layers} layers of {heads}"), ("Examples", "{/n:,}, of {/tokens:,} tokens")),
    )


def attention(found: AttentionStatistics, *, seed: int) -> Section:
    """Where the heads look."""
    shares = found.looked_at()
    drawings = [
        heat(
            "entropy",
            "Entropy of attention, in nats",
            found.entropy,
            ".3f",
            seed,
            "Low: a head looks at few tokens; high: at many.",
        )
    ]
    drawings += [
        heat(name.replace(" ", "-"), f"Attention {name}", values, ".1%", seed, low=0.0)
        for name, values in shares.items()
    ]
    names = ("entropy", "entropy of a uniform head")
    rows = [(f"{name}, in nats", f"{{intervals/{name}:.3f}}") for name in names]
    rows += [(name, f"{{intervals/{name}:.1%}}") for name in (*shares, "to the own text")]
    of_all, of_layers = " of {/sections/model/count:,}", " of {/sections/model/layers:,}"
    over = {name: f"heads over half on the {name} token" for name in ("previous", "next")}
    return Section(
        "attention",
        TITLES["attention"],
        (
            "Each map has a row per layer and a column per head. Its colour is the mean share of attention "
            "from the tokens of a text to one kind of token: to the special token at the start, to the "
            "separators at the end of texts, to punctuation, to words, and to their own neighbours.",
            "Heads often look at a special token, which has no meaning. The usual reading is that such a "
            "head has nothing to add about the token that looks.",
        ),
        drawings,
        rows,
        (
            Published(over["previous"], f"{{intervals/{over['previous']}:,.0f}}{of_all}", "4 of 144", CLARK),
            Published(over["next"], f"{{intervals/{over['next']}:,.0f}}{of_all}", "5 of 144", CLARK),
            Published(
                "layers over half on separators",
                "{layers over half on separators}" + of_layers,
                "6 to 10 of 12",
                CLARK,
            ),
            Published(
                "the layer that looks at the first token most",
                "{layer with most to/the first token}" + of_layers,
                "1 and 2 of 12",
                CLARK,
            ),
            Published(
                "the layer that looks at periods and commas most",
                "{layer with most to/periods and commas}" + of_layers,
                "11 and 12 of 12",
                CLARK,
            ),
        ),
        (
            ("Attention to separators", "{intervals/to separators:.1%}"),
            ("Attention to words", "{intervals/to words:.1%}"),
        ),
    )


def patterns(found: AttentionStatistics) -> Section:
    """The five patterns of Kovaleva et al."""
    bars = pictures.stacked_bars({"": found.shares()}, "", width=WIDTH)
    grid = pictures.classes(found.commonest(), PATTERNS, "")
    return Section(
        "patterns",
        TITLES["patterns"],
        (
            "Drawn as a picture, the attention of most heads is one of a few shapes. Vertical: all tokens "
            "look at one token, mainly a special one. Diagonal: each looks at itself or its neighbours. "
            "Block: each looks at all of its own text alike. Heterogeneous is all else, and the only one "
            "that could follow grammar or meaning.",
            "Here thresholds of this program's own separate the patterns, while the published shares come "
            "from a network trained on maps that people labelled. So compare them with care.",
        ),
        (
            Drawing("shares", "Share of each pattern", "Over all examples, layers and heads.", bars),
            Drawing("commonest", "The commonest pattern of each head", "Over the examples.", grid),
        ),
        [
            (
                name,
                f"{{intervals/{name}:.1%}}; commonest in {{heads/{name}:,}} of "
                "{/sections/model/count:,} heads",
            )
            for name in PATTERNS
        ],
        (Published("heterogeneous", "{intervals/heterogeneous:.1%}", "32% (MRPC) to 61% (QQP)", KOVALEVA),),
        (("Heads whose pattern could be linguistic", "{intervals/heterogeneous:.1%}"),),
    )


def maps(found: Sequence[ExampleMap], tokens: Sequence[Sequence[str]], *, no_loss: str) -> Section:
    """A map per pattern, with the change of the loss without that head.

    Args:
        found: what `example_maps` returns.
        tokens: the names of the tokens of each map.
        no_loss: why there is no loss; "" if the numbers have "loss" and "loss here" for each map.
    """
    drawings = []
    for map_, names in zip(found, tokens, strict=True):
        at = f"maps/{map_.name}"
        says = f"Head {{{at}/name}} on example {{{at}/number:,}}. "
        says += f"The head has this pattern on {{{at}/share:.0%}} of the examples. "
        if no_loss:
            says += "Without this head: not known, since there is no loss."
        else:
            says += f"Without this head the loss changes by {{{at}/loss:+.4f}}, "
            says += f"on this example by {{{at}/loss here:+.4f}}."
        picture = pictures.token_map(map_.probabilities, names)
        of_change = f"examples of the change: n = {{{at}/loss/n:,}}, seed {{/seed}}"
        sample = "1 example of {/n:,}" if no_loss else of_change
        title = PATTERNS[map_.pattern].capitalize()
        drawings.append(Drawing(map_.name, title, says, picture, sample=sample))
    says = [
        "For each pattern, the attention of one head on one short example, the clearest that was found. A "
        "row is a token that looks, a column a token that is looked at. The brighter, the more attention.",
        "A picture of attention is no evidence that the model uses it. So each has beside it what the "
        "model's loss does when this head is taken out. A change near 0: this loss does not depend on it.",
    ]
    if no_loss:
        says.append("Here that is not known, so whether the model uses what is seen stays open.")
    return Section("maps", TITLES["maps"], says, drawings)


def change(found: Change, *, seed: int) -> Section:
    """How a second model differs."""
    depth = np.arange(found.hidden.shape[1])
    lines = {
        "hidden states": (depth, *bands(found.hidden, seed=seed)),
        "attention": (depth[1:], *bands(found.attention.mean(2), seed=seed)),
    }
    drawings = (
        heat(
            "attention",
            "How alike a head's attention is in both models",
            found.attention,
            ".3f",
            seed,
            "Cosine of its two maps: 1 is the same.",
            high=1.0,
        ),
        Drawing(
            "layers",
            "How alike the layers are",
            "Mean cosines. Shaded: the 95% interval.",
            pictures.curves(lines, "layer (0: embeddings)", "cosine", "", width=WIDTH),
        ),
    )
    return Section(
        "change",
        TITLES["change"],
        (
            "Both models read the same texts. The map shows how alike the attention of each head is in the "
            "two, the curve how alike the vectors of the tokens are after each layer. Fine-tuning a model "
            "for a task mostly changes its last layers.",
        ),
        drawings,
        (
            ("the second model", "{against}"),
            ("cosine of attention", "{intervals/attention:.4f}"),
            ("cosine of the last hidden states", "{intervals/last hidden states:.4f}"),
            ("relative change of the weights per layer", "{weights:.3g}"),
        ),
        (
            Published(
                "the two layers whose attention changes most",
                "{layers changed most} of {/sections/model/layers:,}",
                "the last two of 12, except on QQP",
                KOVALEVA,
            ),
        ),
        (("Cosine of attention in both models", "{intervals/attention:.4f}"),),
    )


def effective(found: EffectiveAttention) -> Section:
    """The part of attention that reaches the output."""
    means, by_length = found.means(), found.by_length()
    drawings = []
    if len(by_length[0]):
        numbers, says = extremes("correlation", means, ".3f")
        picture = pictures.heat_maps({"": means}, low=float(np.nanmin(means)), high=1.0)
        title = "Correlation of attention and effective attention"
        drawings.append(
            Drawing("correlation", title, f"1: all of it reaches the output. {says}", picture, numbers)
        )
        picture = pictures.curves({"all heads": by_length}, "tokens", "correlation", "", width=WIDTH)
        says = "The mean over heads and over the examples of that length."
        drawings.append(Drawing("lengths", "The same by the length of the text", says, picture))
    kinds = ("the first token", "separators", "periods and commas", "words")
    return Section(
        "effective",
        TITLES["effective"],
        (
            "What a head brings back is a mean of the tokens' values, vectors of a certain width. If a text "
            "has more tokens than that, different attention can bring back the same mean, and part of what "
            "a map shows has no effect at all. Effective attention is the map without that part.",
            "Up to as many tokens as that width, {head width:,} here, it is as a rule the map itself.",
        ),
        drawings,
        [
            ("correlation of attention and effective attention", "{intervals/correlation:.4f}"),
            *(
                (
                    f"attention to {kind}",
                    f"{{intervals/to {kind}:.1%}} effective, {{attention/to {kind}:.1%}} in all",
                )
                for kind in kinds
            ),
        ],
        (
            Published(
                "correlation",
                "{intervals/correlation:.4f}",
                "1 up to the width of a head, and falling beyond",
                BRUNNER,
            ),
            Published(
                "attention to separators",
                "{intervals/to separators:.1%} effective, {attention/to separators:.1%} in all",
                "that to [CLS], [SEP] and punctuation is the smaller one",
                BRUNNER,
            ),
        ),
        (("Correlation of attention and effective attention", "{intervals/correlation:.4f}"),),
    )


def geometry(found: Geometry, *, seed: int) -> Section:
    """How contextual words are."""
    depth = np.arange(len(found.anisotropy))
    lines = {
        name: (depth, *(np.array(end) for end in zip(*((i.mean, i.low, i.high) for i in each), strict=True)))
        for name, each in found.intervals(seed=seed).items()
    }
    lines = {name: line if line[2].dtype != object else line[:2] for name, line in lines.items()}
    lines["any two words"] = depth, found.anisotropy
    picture = pictures.curves(lines, "layer (0: embeddings)", "cosine, or share", "", width=WIDTH)
    names = ("self similarity", "intra-sentence similarity", "explained variance")
    last = len(depth) - 1
    trend = f"{{{{layers/{{0}}/0:.3f}}}} in the embeddings, {{{{layers/{{0}}/{last}:.3f}}}} in the last layer"
    rows = [
        ("the same word in two texts (self similarity)", trend.format(names[0])),
        ("a word and the mean of its sentence (intra-sentence similarity)", trend.format(names[1])),
        ("share of a word's vectors along one direction (explained variance)", trend.format(names[2])),
        ("any two words (anisotropy)", trend.format("anisotropy")),
    ]
    source = (("falls with depth", 0), ("falls, but stays above 0", 1), ("below 5%", 2))
    published = [Published(rows[i][0], rows[i][1], theirs, ETHAYARAJH) for theirs, i in source]
    published.append(Published(rows[3][0], rows[3][1], "grows with depth", ETHAYARAJH))
    return Section(
        "geometry",
        TITLES["geometry"],
        (
            "In the embeddings a word has one vector, whatever its text. Layer by layer it takes in its "
            "context, and the vectors of one word in two texts grow apart. The curves show how alike they "
            "stay.",
            "In many models any two words are alike, since all vectors lie in a narrow cone. That is the "
            "last curve, and it is subtracted from the other curves, so that they show what context does.",
        ),
        (
            Drawing(
                "layers",
                "Words in context, minus any two words",
                "Shaded: the 95% interval over words, or over sentences.",
                picture,
                sample="words: n = {words:,} in {contexts:,} contexts, examples: n = {/n:,}, seed {/seed}",
            ),
        ),
        (),
        published,
        (("Likeness of a word to itself in the last layer", f"{{layers/self similarity/{last}:.3f}}"),),
    )
