"""Files that name patterns of heads, a JSON object per line; and a classifier fitted to such labels.

`fit` is a logistic regression on the four features of `fastbert.analysis.attention`. It replaces that
module's thresholds. Its quality is the macro-F1 of predictions for held-out maps, over all folds together.
Kovaleva et al. 2019 fitted a convolutional network to about 400 maps of their own, and report 0.86.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastbert.analysis.attention import PATTERNS, AttentionStatistics
from fastbert.tasks.files import filled_lines, parsed

FOLDS = 5
# macro-F1 of Kovaleva et al.'s network, on their maps
PUBLISHED_F1 = 0.86


def read_patterns(path: str | Path, names: Sequence[str], counts: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The patterns that a file names.

    Args:
        path: JSON lines, objects with the keys of `counts` and a "pattern".
        names: names of the patterns.
        counts: key -> number of places, such as {"layer": 12, "head": 12}. Numbers count from 0.

    Returns:
        Each key and "pattern" -> (lines,) int64; a pattern is its index into `names`.

    Raises:
        ValueError, OSError: naming the file, the line, what came and what was expected.
    """
    path = Path(path)
    found: list[list[int]] = []
    lines: dict[tuple[int, ...], str] = {}
    for where, line in filled_lines(path):
        *place, pattern = _numbers(where, line, names, counts)
        first = lines.setdefault(tuple(place), where)
        if first != where:
            what = ", ".join(f"{key} {i}" for key, i in zip(counts, place, strict=True))
            raise ValueError(f"{where}: {what} again; {first.removeprefix(f'{path}, ')} has it too")
        found.append([*place, pattern])
    if not found:
        raise ValueError(f"{path}: expected one pattern at least, found none")
    columns = np.array(found, np.int64).T
    return dict(zip((*counts, "pattern"), columns, strict=True))


def _numbers(where: str, line: str, names: Sequence[str], counts: Mapping[str, int]) -> list[int]:
    values = parsed(where, line)
    missing = next((k for k in (*counts, "pattern") if not isinstance(values, dict) or k not in values), None)
    if missing is not None:
        raise ValueError(f"{where}: expected an object with {missing!r}")
    for key, count in counts.items():
        if type(values[key]) is not int or not 0 <= values[key] < count:
            raise ValueError(
                f"{where}: {key}: expected an integer from 0 to {count - 1}, got {values[key]!r}"
            )
    if values["pattern"] not in names:
        raise ValueError(f"{where}: pattern: expected one of {', '.join(names)}, got {values['pattern']!r}")
    return [*(values[key] for key in counts), names.index(values["pattern"])]


@dataclass(frozen=True)
class Classifier:
    """Finds patterns as labels have them, by the features v, d, b and u.

    Attributes:
        classes: (k,) indices into `PATTERNS` of the patterns with labels; only these are found.
        weights: (k, 4); a map has the class with the largest weights · features + bias.
        bias: (k,).
        counts: pattern -> number of maps with that label.
        folds: number of folds of the cross-validation.
        macro_f1: the mean of the classes' F1 in the cross-validation.
        seed: seed of the folds.
    """

    classes: np.ndarray
    weights: np.ndarray
    bias: np.ndarray
    counts: dict[str, int]
    folds: int
    macro_f1: float
    seed: int

    def patterns(self, statistics: AttentionStatistics) -> np.ndarray:
        """(n, layers, nheads) int8, indices into `PATTERNS`."""
        scores = _features(statistics) @ self.weights.T + self.bias
        return self.classes[scores.argmax(-1)].astype(np.int8)


def _features(statistics: AttentionStatistics) -> np.ndarray:
    """(n, layers, nheads, 4) in float64."""
    return np.stack([values.astype(np.float64) for values in statistics.features().values()], -1)


def check_labels(labels: Mapping[str, np.ndarray], folds: int = FOLDS) -> None:
    """Raise unless `fit` can use these labels.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: there are fewer than two patterns, or a pattern has fewer maps than folds.
    """
    _scikit_learn()
    found, counts = np.unique(labels["pattern"], return_counts=True)
    if len(found) < 2:
        raise ValueError(f"annotations: expected two patterns at least, got {PATTERNS[found[0]]} alone")
    if counts.min() < folds:
        few = int(counts.argmin())
        raise ValueError(
            f"annotations: expected {folds} maps of each pattern at least, one for each fold of the "
            f"cross-validation; {PATTERNS[found[few]]} has {counts[few]}"
        )


def fit(
    statistics: AttentionStatistics, labels: Mapping[str, np.ndarray], *, folds: int = FOLDS, seed: int = 0
) -> Classifier:
    """A classifier of patterns from labelled maps; see the module.

    Args:
        statistics: statistics of the examples that the labels name.
        labels: as `read_patterns` returns them for "example", "layer" and "head".
        folds: number of folds of the cross-validation, stratified by pattern.
        seed: seed of the folds.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: there are fewer than two patterns, or a pattern has fewer maps than folds.
    """
    check_labels(labels, folds)
    _, metrics, model_selection = _scikit_learn()
    features = _features(statistics)[labels["example"], labels["layer"], labels["head"]]
    patterns = labels["pattern"]
    predicted = np.empty_like(patterns)
    parts = model_selection.StratifiedKFold(folds, shuffle=True, random_state=seed)
    for rows, others in parts.split(features, patterns):
        classes, weights, bias = _regression(features[rows], patterns[rows])
        predicted[others] = classes[(features[others] @ weights.T + bias).argmax(1)]
    f1 = float(metrics.f1_score(patterns, predicted, average="macro"))
    counts = {name: int((patterns == i).sum()) for i, name in enumerate(PATTERNS)}
    return Classifier(*_regression(features, patterns), counts, folds, f1, seed)


def _regression(features: np.ndarray, patterns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(classes, weights, bias), fitted to features of unit variance and converted to the given features."""
    linear_model, _, _ = _scikit_learn()
    mean, deviation = features.mean(0), features.std(0)
    scale = np.where(deviation > 0, deviation, 1.0)
    found = linear_model.LogisticRegression(max_iter=1000).fit((features - mean) / scale, patterns)
    weights = found.coef_ / scale
    bias = found.intercept_ - weights @ mean
    if len(weights) == 1:
        # with two classes scikit-learn has the score of the second class alone
        weights, bias = (np.concatenate([np.zeros_like(t), t]) for t in (weights, bias))
    return found.classes_, weights, bias


def _scikit_learn() -> tuple[Any, Any, Any]:
    try:
        from sklearn import linear_model, metrics, model_selection
    except ImportError as error:
        raise ImportError(
            "annotations need scikit-learn: pip install 'fastbert-kernels[analysis]'"
        ) from error
    return linear_model, metrics, model_selection
