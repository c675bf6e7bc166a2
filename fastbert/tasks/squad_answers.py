"""SQuAD: answers from the scores of windows, the official evaluation, the official prediction files.

An answer is a slice of the context from the first character of its first token to the last of its last.
google-research/bert aligns normalized text with the context by a heuristic, and can differ on rare spans.

Source: Rajpurkar et al. 2018, "Know What You Don't Know", with its evaluate-v2.0.py; Devlin et al. 2018,
"BERT", sec. 4.2 and 4.3; google-research/bert's run_squad.py.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastbert.tasks.squad import Question, Window

# The characters of no answer
_NOTHING = (-1, -1)


class Predictions(NamedTuple):
    """Answers per question id.

    Attributes:
        answers: the best text; "" only if no span is valid.
        nbest: the best texts, the best first: dicts of text, probability, start_logit and end_logit. With
            `null`, "" for no answer is among them.
        null_odds: score of no answer less score of the best text, in logits; empty without `null`.
    """

    answers: dict[str, str]
    nbest: dict[str, list[dict[str, Any]]]
    null_odds: dict[str, float]

    def texts(self, threshold: float = 0.0) -> dict[str, str]:
        """The answers, "" where `null_odds` is above the threshold."""
        none = {name for name, odds in self.null_odds.items() if odds > threshold}
        return {name: "" if name in none else text for name, text in self.answers.items()}


def predict(
    questions: Sequence[Question],
    windows: Sequence[Window],
    starts: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    *,
    null: bool,
    n_best: int = 20,
    max_answer: int = 30,
) -> Predictions:
    """Turn the scores of windows into answers.

    A window's spans are the pairs of its `n_best` best starts and ends in which both are of the context, the
    start has its max context in this window, and the end is 0 to `max_answer` - 1 tokens further. Of the
    spans of all windows, the `n_best` texts of highest start + end are kept. Probabilities are the softmax
    over these texts.

    Args:
        questions: as `squad.read` returns them.
        windows: as `squad.windows` returns them.
        starts: per window (n,) logits of the answer's first token.
        ends: per window (n,) logits of its last token.
        null: whether a question may have no answer (version 2.0). Its score is the least start + end at
            position 0 of any window.
        n_best: starts, ends and texts to keep.
        max_answer: most tokens of an answer.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    for name, scores in (("starts", starts), ("ends", ends)):
        if len(scores) != len(windows):
            raise ValueError(f"{name}: expected {len(windows)}, one per window, got {len(scores)}")
    spans: list[list[np.ndarray]] = [[] for _ in questions]
    nulls: list[list[tuple[float, float]]] = [[] for _ in questions]
    for i, window in enumerate(windows):
        start, end = (_checked(f"starts[{i}]", starts[i], window), _checked(f"ends[{i}]", ends[i], window))
        spans[window.question].append(_spans(window, start, end, n_best, max_answer))
        nulls[window.question].append((start[0], end[0]))
    found = Predictions({}, {}, {})
    for question, of_question, of_null in zip(questions, spans, nulls, strict=True):
        if not of_null:
            raise ValueError(f"windows: expected one at least per question, got none of {question.id!r}")
        none = min(of_null, key=sum)
        if null:
            of_question.append(np.array([[*none, *_NOTHING]]))
        best = _best(np.concatenate(of_question), question.context, n_best)
        text = next(filter(None, best), "")
        if null:
            best.setdefault("", none)
            # Without a valid span any threshold leads to "", because the answer is "" too
            found.null_odds[question.id] = float(sum(none) - sum(best[text] if text else (0.0, 0.0)))
        found.answers[question.id] = text
        found.nbest[question.id] = _with_probabilities(best or {"": (0.0, 0.0)})
    return found


def _checked(name: str, scores: Any, window: Window) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    if scores.shape != window.ids.shape:
        raise ValueError(f"{name}: expected shape {window.ids.shape}, one per token, got {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError(f"{name}: expected finite logits, got {scores[~np.isfinite(scores)][0]}")
    return scores


def _spans(window: Window, start: np.ndarray, end: np.ndarray, n_best: int, max_answer: int) -> np.ndarray:
    """(k, 4): start logit, end logit, first character and the one after the last, of each valid span."""
    # Stable, so that of equal scores the first token comes first, as in run_squad.py
    firsts, lasts = (np.argsort(-scores, kind="stable")[:n_best] for scores in (start, end))
    firsts, lasts = np.repeat(firsts, len(lasts)), np.tile(lasts, len(firsts))
    until = window.first + len(window.offsets)
    valid = (window.first <= firsts) & (firsts <= lasts) & (lasts < until) & (lasts < firsts + max_answer)
    firsts, lasts = firsts[valid], lasts[valid]
    best = window.max_context[firsts - window.first]
    firsts, lasts = firsts[best], lasts[best]
    characters = window.offsets[firsts - window.first, 0], window.offsets[lasts - window.first, 1]
    return np.column_stack([start[firsts], end[lasts], *characters])


def _best(spans: np.ndarray, context: str, n_best: int) -> dict[str, tuple[float, float]]:
    """Text -> (start logit, end logit) of the best spans; of equal scores the earlier."""
    found: dict[str, tuple[float, float]] = {}
    for start, end, first, last in spans[np.argsort(-(spans[:, 0] + spans[:, 1]), kind="stable")]:
        if len(found) == n_best:
            break
        # Some tokenizers count the space before a word to its token
        text = context[int(first) : int(last)].strip()
        if text or (first, last) == _NOTHING:
            found.setdefault(text, (start, end))
    return found


def _with_probabilities(best: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
    scores = np.array([sum(logits) for logits in best.values()])
    shares = np.exp(scores - scores.max())
    return [
        {"text": text, "probability": float(share), "start_logit": float(start), "end_logit": float(end)}
        for (text, (start, end)), share in zip(best.items(), shares / shares.sum(), strict=True)
    ]


def write(folder: str | Path, predictions: Predictions, threshold: float = 0.0) -> None:
    """Write predictions.json, nbest_predictions.json and, of version 2.0, null_odds.json.

    Args:
        folder: is made if it is missing.
        predictions: as `predict` returns them.
        threshold: of `Predictions.texts`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        "predictions.json": predictions.texts(threshold),
        "nbest_predictions.json": predictions.nbest,
    }
    if predictions.null_odds:
        files["null_odds.json"] = predictions.null_odds
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


def normalized(text: str) -> str:
    """A text in small letters without ASCII punctuation, articles and repeated white space."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_and_f1(gold: str, answer: str) -> tuple[float, float]:
    """(1 if both are equal, else 0; F1 of their words), both normalized."""
    words = [normalized(text).split() for text in (gold, answer)]
    equal = float(words[0] == words[1])
    if not all(words):
        return equal, equal
    common = (Counter(words[0]) & Counter(words[1])).total()
    return equal, 2 * common / (len(words[0]) + len(words[1]))


def evaluate(
    questions: Sequence[Question],
    answers: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    threshold: float = 0.0,
) -> dict[str, float]:
    """The official scores, in percent.

    Args:
        questions: as `squad.read` returns them; without gold answers a question is unanswerable.
        answers: question id -> text.
        null_odds: question id -> score of no answer less score of the text. Above the threshold "" is scored
            in place of the text. None scores `answers` as they are.
        threshold: see `null_odds`.

    Returns:
        exact, f1 and total of all questions; the same with HasAns_ and NoAns_ before the name where there are
        such questions; with `null_odds` also best_exact, best_exact_thresh, best_f1 and best_f1_thresh. These
        are the best scores that any threshold reaches, and the threshold.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    for name, given in (("answers", answers), ("null_odds", null_odds)):
        missing = next((q.id for q in questions if given is not None and q.id not in given), None)
        if missing is not None:
            raise ValueError(f"{name}: expected one per question, got none of {missing!r}")
    if not questions:
        raise ValueError("questions: expected one at least, got none")
    raw = np.array([_scores(question, answers[question.id]) for question in questions])  # (questions, 2)
    answerable = np.array([bool(question.answers) for question in questions])
    scores = raw
    if null_odds is not None:
        odds = np.array([null_odds[question.id] for question in questions])
        scores = np.where((odds > threshold)[:, None], ~answerable[:, None], raw)
    found: dict[str, float] = {}
    for prefix, chosen in (("", answerable | True), ("HasAns_", answerable), ("NoAns_", ~answerable)):
        if chosen.any():
            exact, f1 = 100 * scores[chosen].mean(0)
            found |= {f"{prefix}exact": float(exact), f"{prefix}f1": float(f1)}
            found[f"{prefix}total"] = int(chosen.sum())
    if null_odds is not None:
        answered = np.array([bool(answers[question.id]) for question in questions])
        for i, name in enumerate(("best_exact", "best_f1")):
            gains = np.where(answerable, raw[:, i], -1.0 * answered)
            found[name], found[f"{name}_thresh"] = _best_threshold(gains, answerable, odds)
    return found


def _scores(question: Question, answer: str) -> tuple[float, ...]:
    """The best exact match and the best F1 of an answer."""
    golds = [gold.text for gold in question.answers if normalized(gold.text)] or [""]
    return tuple(max(column) for column in zip(*(exact_and_f1(gold, answer) for gold in golds), strict=True))


def _best_threshold(gains: np.ndarray, answerable: np.ndarray, odds: np.ndarray) -> tuple[float, float]:
    """(best score in percent, its threshold): questions are answered one by one from the lowest odds."""
    order = np.argsort(odds, kind="stable")
    totals = np.sum(~answerable) + np.concatenate([[0.0], np.cumsum(gains[order])])
    best = int(np.argmax(totals))
    if best:
        threshold = float(odds[order[best - 1]])
    else:
        # evaluate-v2.0.py takes 0, below which no probability is; log-odds are
        threshold = min(0.0, float(np.nextafter(odds.min(), -np.inf)))
    return float(100 * totals[best] / len(gains)), threshold
