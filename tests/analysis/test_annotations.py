"""Files that name patterns of heads; a classifier for such labels against scikit-learn's own predictions."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from fastbert.analysis.annotations import check_labels, fit, read_patterns
from fastbert.analysis.attention import PATTERNS
from tests.support.analysis import statistics

NAMES = ("a", "b", "c")
COUNTS = {"example": 2, "layer": 3, "head": 4}


def test_a_file(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text(
        '{"example": 0, "layer": 2, "head": 1, "pattern": "b", "note": "whatever"}\n\n'
        '{"example": 1, "layer": 0, "head": 3, "pattern": "a"}\n'
    )
    found = read_patterns(file, NAMES, COUNTS)
    assert {name: values.tolist() for name, values in found.items()} == (
        {"example": [0, 1], "layer": [2, 0], "head": [1, 3], "pattern": [1, 0]}
    )
    assert read_patterns(file, NAMES, {"head": 4})["head"].tolist() == [1, 3]


def line(example=1, layer=1, head=1, pattern="a"):
    return json.dumps({"example": example, "layer": layer, "head": head, "pattern": pattern})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"example": 1, "layer": 1, "pattern": "a"}', "line 2: expected an object with 'head'"),
        (line(example=2), "line 2: example: expected an integer from 0 to 1, got 2"),
        (line(layer=-1), "layer: expected an integer from 0 to 2, got -1"),
        (line(head=True), "head: expected an integer from 0 to 3, got True"),
        (line(pattern=[1]), r"pattern: expected one of a, b, c, got \[1\]"),
        (line(0, 0, 0), "line 2: example 0, layer 0, head 0 again; line 1 has it too"),
    ],
)
def test_a_mistake_names_its_line(tmp_path, text, expected):
    file = tmp_path / "labels.jsonl"
    file.write_text(f"{line(0, 0, 0)}\n{text}\n")
    with pytest.raises(ValueError, match=expected) as error:
        read_patterns(file, NAMES, COUNTS)
    assert str(file) in str(error.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="expected one pattern at least, found none"):
        read_patterns(tmp_path / "empty", NAMES, COUNTS)


# -- a classifier --------------------------------------------------------------------------------------------

N, LAYERS, HEADS, LENGTH = 8, 3, 4, 20


def statistics_of(classes, noise, seed=0):
    """Statistics of maps of these classes, (n, layers, nheads) indices into PATTERNS, with noise."""
    draw = np.random.default_rng(seed)
    v, d, b, u = np.array(
        # vertical, diagonal, both, block, heterogeneous
        [
            [0.8, 0.1, 0.5, 0.1, 0.2],
            [0.1, 0.8, 0.5, 0.1, 0.2],
            [0.2, 0.5, 0.3, 0.9, 0.3],
            [0.1, 0.1, 0.1, 0.8, 0.3],
        ]
    )[:, classes] + noise * draw.normal(size=(4, *classes.shape))
    return statistics(classes.shape, LENGTH, itself=d, own_text=b, most_received=v, spread=u)


def labels_of(classes, share=1.0, seed=0):
    places = np.argwhere(np.random.default_rng(seed).random(classes.shape) < share)
    named = dict(zip(("example", "layer", "head"), places.T, strict=True))
    return named | {"pattern": classes[tuple(places.T)].astype(np.int64)}


@pytest.fixture
def classes():
    return np.random.default_rng(3).integers(0, 5, (N, LAYERS, HEADS))


@pytest.mark.parametrize("kinds", [5, 2])
def test_as_scikit_learn(classes, kinds):
    """Predictions and folds, with scikit-learn's own pipeline and an F1 by hand."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # of two classes, some other than the first two
    classes = classes if kinds == 5 else np.array([1, 4])[classes % 2]
    made, labels = statistics_of(classes, 0.25), labels_of(classes)
    features = np.stack(list(made.features().values()), -1).reshape(-1, 4)
    patterns = classes.ravel()

    def model():
        return make_pipeline(StandardScaler(), linear_model.LogisticRegression(max_iter=1000))

    found = fit(made, labels, folds=4, seed=7)
    expected = model().fit(features, patterns).predict(features)
    assert np.array_equal(found.patterns(made).ravel(), expected)
    predicted = np.empty_like(patterns)
    for rows, others in StratifiedKFold(4, shuffle=True, random_state=7).split(features, patterns):
        predicted[others] = model().fit(features[rows], patterns[rows]).predict(features[others])
    scores = []
    for kind in np.unique(patterns):
        right = ((predicted == kind) & (patterns == kind)).sum()
        scores.append(2 * right / ((predicted == kind).sum() + (patterns == kind).sum()))
    assert found.macro_f1 == pytest.approx(np.mean(scores))
    assert 0.5 < found.macro_f1 < 1
    assert found.counts == {name: int((patterns == i).sum()) for i, name in enumerate(PATTERNS)}
    # the whole fit has seen its own maps
    assert (expected == patterns).mean() > (predicted == patterns).mean()
    assert found.classes.tolist() == ([0, 1, 2, 3, 4] if kinds == 5 else [1, 4])


def test_too_few_labels(classes):
    pytest.importorskip("sklearn")
    one = np.zeros_like(classes)
    with pytest.raises(ValueError, match="annotations: expected two patterns at least, got vertical alone"):
        fit(statistics_of(one, 0.1), labels_of(one))
    one[0, 0, 0] = 3
    one[1, 0, :3] = 3
    with pytest.raises(ValueError, match=r"annotations: expected 5 maps of each pattern .*; block has 4"):
        fit(statistics_of(one, 0.1), labels_of(one))
    check_labels(labels_of(one), folds=4)


def test_without_scikit_learn(classes, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    words = r"annotations need scikit-learn: pip install 'fastbert-kernels\[analysis"
    with pytest.raises(ImportError, match=words):
        check_labels(labels_of(classes))
