"""SQuAD against transformers 4.57.6 on a hand-made file (goldens.py), and properties of windows."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks import squad, squad_answers
from tests.tasks.goldens import GOLDENS, SCORED, SQUAD, THRESHOLD, WINDOWS, logits

golden = json.loads(GOLDENS.read_text())


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return load_tokenizer(minilm)


@pytest.fixture(scope="module")
def questions():
    return squad.read(SQUAD, train=False).questions


@pytest.fixture(scope="module")
def found(tokenizer, questions):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(squad, "_CHUNK", 5)
        return squad.windows(questions, tokenizer, **WINDOWS)


def test_the_goldens_are_of_this_file():
    assert hashlib.sha256(SQUAD.read_bytes()).hexdigest() == golden["squad.json"]


def test_windows_are_those_of_transformers(tokenizer, questions, found):
    assert found.inexact == ["q7"]
    most = WINDOWS["max_query"]
    asked = {each.id: tokenizer.encode(each.question, add_special_tokens=False).ids for each in questions}
    assert found.cut == [name for name, ids in asked.items() if len(ids) > most] != []
    windows = {question.id: [] for question in questions}
    for window in found.windows:
        windows[questions[window.question].id].append(
            {
                "ids": window.ids.tolist(),
                "context": int(window.types.sum()),
                "max_context": "".join(map(str, window.max_context.astype(int))),
                "answer": [window.start, window.end],
            }
        )
    assert windows == golden["windows"]


@pytest.mark.parametrize("version", ("1.1", "2.0"))
def test_predictions_are_those_of_transformers(questions, found, tmp_path, version):
    null = version == "2.0"
    if not null:
        numbers = [i for i, question in enumerate(questions) if question.answers]
        windows = [
            w._replace(question=numbers.index(w.question)) for w in found.windows if w.question in numbers
        ]
        questions = [questions[i] for i in numbers]
    else:
        windows = found.windows
    scores, counts = [], [0] * len(questions)
    for window in windows:
        scores.append(logits(questions[window.question].id, counts[window.question], len(window.ids)))
        counts[window.question] += 1
    predicted = squad_answers.predict(questions, windows, *zip(*scores, strict=True), null=null)
    squad_answers.write(tmp_path, predicted, THRESHOLD)
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    expected = golden[version]
    assert _joined(files["predictions"].values()) == list(expected["texts"].values())
    assert files.get("null_odds") == (pytest.approx(expected["null_odds"]) if null else None)
    for name, entries in expected["nbest"].items():
        texts, probabilities = zip(*entries, strict=True)
        own = files["nbest_predictions"][name]
        # run_squad.py does not cut a word in two, but returns it whole
        for ours, theirs in zip(_joined(entry["text"] for entry in own), texts, strict=True):
            assert ours in theirs
            assert len(ours.split()) == len(theirs.split())
        assert [entry["probability"] for entry in own] == pytest.approx(probabilities, abs=1e-6)
        assert sum(entry["probability"] for entry in own) == pytest.approx(1)


def _joined(texts):
    """With a plain space between words, as Google joins them; ours are slices of the context."""
    return [" ".join(text.split()) for text in texts]


def test_scores_are_those_of_transformers(questions):
    texts, odds = ({name: value[i] for name, value in SCORED.items()} for i in range(2))
    plain, with_odds = golden["scores"]
    assert squad_answers.evaluate(questions, texts, odds, THRESHOLD) == pytest.approx(with_odds)
    found = squad_answers.evaluate(questions, texts)
    assert found == pytest.approx({name: plain[name] for name in found})
    assert len(found) == 9


TEXTS = st.lists(st.sampled_from(("the", "An", "owl", "owls", "Owl.", "'", "a", "½", "\u00a0")), max_size=5)


@pytest.mark.sweep
@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(TEXTS, min_size=1, max_size=3), TEXTS), min_size=1, max_size=4))
def test_scores_are_those_of_torchmetrics(rows):
    """Each gold answer has a word: answers of articles alone differ between the scripts of both versions."""
    from torchmetrics.functional.text import squad as theirs  # takes seconds

    questions, answers, golds, said = [], {}, [], []
    for name, (texts, answer) in zip("abcd", rows, strict=False):
        texts = [" ".join([*words, "owl"]) for words in texts]
        questions.append(squad.Question(name, "", "", tuple(squad.Answer(text, 0) for text in texts)))
        answers[name] = " ".join(answer)
        golds.append({"id": name, "answers": {"text": texts, "answer_start": []}})
        said.append({"id": name, "prediction_text": answers[name]})
    found = squad_answers.evaluate(questions, answers)
    expected = [float(value) for value in theirs(said, golds).values()]
    assert [found["exact"], found["f1"]] == pytest.approx(expected)


WORDS = st.sampled_from(
    ("rain", "café", "unaffable", "4,500", "Pell's", "\u202f", "(low)", "Zürich", "雨水", "😀", "𝒳", "\n")
)


@settings(deadline=None)
@given(
    words=st.lists(WORDS, max_size=10).map(lambda words: 5 * words),
    query=st.integers(0, 12),
    stride=st.integers(1, 12),
    data=st.data(),
)
def test_windows_cover_the_context(tokenizer, words, query, stride, data):
    context = " ".join(words)
    offsets = tokenizer.encode(context, add_special_tokens=False).offsets
    answers = ()
    if offsets:
        # Of at most as many tokens as two windows share
        first = data.draw(st.integers(0, len(offsets) - 1))
        last = min(first + data.draw(st.integers(0, 12 - stride)), len(offsets) - 1)
        start, end = offsets[first][0], offsets[last][1]
        answers = (squad.Answer(context[start:end], start),)
    question = squad.Question("q", "rain " * query, context, answers)
    found = squad.windows([question], tokenizer, max_length=23, doc_stride=stride, max_query=8)
    # [CLS], the question, [SEP] and [SEP] take the rest
    room = 20 - min(query, 8)
    assert len(found.windows) == 1 + max(0, -((room - len(offsets)) // stride))
    seen, best = np.zeros(len(offsets), int), np.zeros(len(offsets), int)
    for window in found.windows:
        assert len(window.ids) <= 23
        for i, (start, end) in enumerate(window.offsets):
            token = tokenizer.id_to_token(window.ids[window.first + i]).removeprefix("##")
            assert token in (tokenizer.normalizer.normalize_str(context[start:end]).strip(), "[UNK]")
            place = offsets.index((start, end))
            seen[place] += 1
            best[place] += window.max_context[i]
    assert (seen >= 1).all()
    assert (best == 1).all()
    ends = [
        w.offsets[[w.start - w.first, w.end - w.first], [0, 1]].tolist() for w in found.windows if w.start
    ]
    assert not answers or ends
    assert all(context[start:end] == answers[0].text for start, end in ends)


def test_a_longer_window_has_more_context():
    """A hundred tokens more count as one token more on the shorter side."""
    assert squad.best_windows([0, 128], [316, 330])[[221, 222, 223]].tolist() == [0, 0, 1]


def test_white_space_around_an_answer_does_not_count(tokenizer):
    answers = squad.Answer(" ran ", 4), squad.Answer("home", 9)
    question = squad.Question("a", "Who?", "Anna ran home.", answers)
    found = squad.windows([question], tokenizer)
    assert (found.windows[0].start, found.windows[0].end, found.inexact) == (5, 5, [])


def test_too_long_a_stride_loses_text(tokenizer, questions, minilm):
    with pytest.raises(
        ValueError, match="doc_stride: 318 leaves context tokens unread; expected at most 317"
    ):
        squad.windows(questions, tokenizer, doc_stride=318)
    with pytest.raises(ValueError, match="tokenizer: expected one without truncation"):
        squad.windows(questions, Tokenizer.from_file(str(minilm / "tokenizer.json")))


def one(**entry):
    """A file with one question."""
    qas = [{"id": "a", "question": "Who?", **entry}]
    return {"data": [{"paragraphs": [{"context": "😀Anna ran.", "qas": qas}]}]}


ANNA = {"text": "Anna", "answer_start": 1}


def test_version_1_has_one_answer_to_train_on(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps(one(answers=[ANNA, ANNA])))
    assert squad.read(path, train=False).questions[0].answers == (("Anna", 1), ("Anna", 1))
    with pytest.raises(ValueError, match=r"qas\[0\]: expected one answer to train on, got 2"):
        squad.read(path, train=True)
    for wrong in ({"text": "Anna", "answer_start": 0}, {"text": " ", "answer_start": 5}):
        content = one(answers=[wrong])
        for more in (one(id="b", answers=[ANNA], is_impossible=True), one(id="c", answers=[ANNA])):
            content["data"] += more["data"]
        path.write_text(json.dumps(content))
        found = squad.read(path, train=True)
        expected = [(name, "Who?", "😀Anna ran.", gold) for name, gold in (("b", ()), ("c", (("Anna", 1),)))]
        assert (found.questions, found.misplaced) == (expected, ["a"])


@pytest.mark.parametrize(
    ("content", "message"),
    (
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        (r'{"data": "\ud800"}', "a text has half of a surrogate pair"),
        ([], "expected an object with 'data'"),
        ({"data": []}, "expected one question at least"),
        ({"data": [{"paragraphs": {}}]}, r"data\[0\]: expected 'paragraphs' to be of list"),
        (one(id=7), r"data\[0\].paragraphs\[0\].qas\[0\]: expected 'id' to be of str, got 7"),
        (one(answers=[{"text": "A"}]), r"qas\[0\].answers\[0\]: expected an object with 'answer_start'"),
        ({"data": one()["data"] * 2}, r"data\[1\].*one question per id, got 'a' again"),
    ),
)
def test_defects_name_file_and_place(tmp_path, content, message):
    path = tmp_path / "dev.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
        squad.read(path, train=False)


NOTHING = {"text": "", "probability": 1.0, "start_logit": 0.0, "end_logit": 0.0}


def test_without_a_valid_span_there_is_no_answer(tokenizer):
    question = squad.Question("a", "Who?", " ", ())
    (window,) = squad.windows([question], tokenizer).windows
    zeros, ones = [np.zeros(len(window.ids))], [np.ones(len(window.ids))]
    found = squad_answers.predict([question], [window], zeros, zeros, null=True)
    assert (found.texts(), found.null_odds) == ({"a": ""}, {"a": 0.0})
    assert squad_answers.predict([question], [window], zeros, zeros, null=False).nbest == {"a": [NOTHING]}
    # Nor is white space an answer, which some tokenizers give a token of its own
    blank = window._replace(first=4, offsets=np.array([[0, 1]]), max_context=np.array([True]))
    assert squad_answers.predict([question], [blank], ones, ones, null=False).nbest == {"a": [NOTHING]}
    with pytest.raises(ValueError, match=r"ends\[0\]: expected shape \(5,\), one per token, got \(4,\)"):
        squad_answers.predict([question], [window], zeros, [np.zeros(4)], null=True)
    with pytest.raises(ValueError, match="starts: expected 1, one per window, got 0"):
        squad_answers.predict([question], [window], [], zeros, null=True)


def test_the_best_threshold_reaches_its_score_below_zero():
    """evaluate-v2.0.py says 0 here, which would answer both."""
    questions = [squad.Question(name, "", "", ()) for name in "ab"]
    texts, odds = {"a": "x", "b": "y"}, {"a": -2.0, "b": -1.0}
    assert squad_answers.Predictions(texts, {}, odds).texts(-2.0) == {"a": "x", "b": ""}
    found = squad_answers.evaluate(questions, texts, odds)
    assert (found["exact"], found["best_exact"]) == (0.0, 100.0)
    again = squad_answers.evaluate(questions, texts, odds, found["best_exact_thresh"])
    assert again["exact"] == found["best_exact"]
    with pytest.raises(ValueError, match="answers: expected one per question, got none of 'b'"):
        squad_answers.evaluate(questions, {"a": ""})


def test_a_gold_answer_of_articles_does_not_count():
    golds = tuple(squad.Answer(text, 0) for text in ("the", "an owl", "a fox fox"))
    question = squad.Question("a", "", "", golds)
    assert squad_answers.evaluate([question], {"a": ""})["exact"] == 0.0
    # Articles are dropped after punctuation
    assert squad_answers.evaluate([question], {"a": "A.n Owl"})["exact"] == 100.0
    assert squad_answers.evaluate([question], {"a": "fox fox owl"})["f1"] == pytest.approx(80.0)
