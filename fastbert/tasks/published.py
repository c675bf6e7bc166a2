"""Published scores, in percent, to set beside a user's own of the same split and metric.

Source: Devlin et al. 2018, "BERT", tables 1 to 5 and 7; for GLUE's dev sets Clark et al. 2020, "ELECTRA",
table 2, where STS-B is Spearman, CoLA is Matthews and all else is accuracy. A paper also quotes
the figures of earlier models. For the starts Kovaleva et al. 2019, "Revealing the Dark Secrets of BERT",
table 1. That table calls the score of STS-B accuracy, so it does not say which correlation it is.
"""

from __future__ import annotations

from typing import NamedTuple

# What the weights are before fine-tuning: frozen weights stay as they are
STARTS = FROZEN, RANDOM, PRETRAINED = ("frozen", "random weights", "pre-trained")


class Published(NamedTuple):
    """One model's scores on one split.

    Attributes:
        task: a key of `fastbert.tasks.glue_tasks.TASKS`, or squad, squad2, swag, ner or ner-features.
        split: dev or test; of MNLI dev_matched, test_matched or test_mismatched.
        model: as the paper names it.
        scores: metric -> percent. Metrics are named as the functions and keys of this folder name them.
        start: one of `STARTS`.
    """

    task: str
    split: str
    model: str
    scores: dict[str, float]
    start: str = PRETRAINED


# split -> the columns of GLUE's rows below: (task, what follows the split in its name, metric)
_COLUMNS = {
    "test": (
        ("mnli", "_matched", "accuracy"),
        ("mnli", "_mismatched", "accuracy"),
        ("qqp", "", "f1"),
        ("qnli", "", "accuracy"),
        ("sst2", "", "accuracy"),
        ("cola", "", "matthews"),
        ("stsb", "", "spearman"),
        ("mrpc", "", "f1"),
        ("rte", "", "accuracy"),
    ),
    "dev": (
        ("mnli", "_matched", "accuracy"),
        ("qnli", "", "accuracy"),
        ("qqp", "", "accuracy"),
        ("rte", "", "accuracy"),
        ("sst2", "", "accuracy"),
        ("mrpc", "", "accuracy"),
        ("cola", "", "matthews"),
        ("stsb", "", "spearman"),
    ),
}
_GLUE = (
    ("Pre-OpenAI SOTA", "test", (80.6, 80.1, 66.1, 82.3, 93.2, 35.0, 81.0, 86.0, 61.7)),
    ("BiLSTM+ELMo+Attn", "test", (76.4, 76.1, 64.8, 79.8, 90.4, 36.0, 73.3, 84.9, 56.8)),
    ("OpenAI GPT", "test", (82.1, 81.4, 70.3, 87.4, 91.3, 45.4, 80.0, 82.3, 56.0)),
    ("BERT base", "test", (84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4)),
    ("BERT large", "test", (86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1)),
    ("BERT large", "dev", (86.6, 92.3, 91.3, 70.4, 93.2, 88.0, 60.6, 90.0)),
    ("RoBERTa large", "dev", (90.2, 94.7, 92.2, 86.6, 96.4, 90.9, 68.0, 92.4)),
)
_ABLATED = (
    ("mnli", "dev_matched", "accuracy"),
    ("qnli", "dev", "accuracy"),
    ("mrpc", "dev", "accuracy"),
    ("sst2", "dev", "accuracy"),
    ("squad", "dev", "f1"),
)
# SQuAD's table has the first model's F1 too, with the exact match
_ABLATION = (
    ("BERT base", (84.4, 88.4, 86.7, 92.7, None)),
    ("BERT base, no NSP", (83.9, 84.9, 86.5, 92.6, 87.9)),
    ("BERT base, left-to-right, no NSP", (82.1, 84.3, 77.5, 92.1, 77.8)),
    ("BERT base, left-to-right, no NSP, + BiLSTM", (82.1, 84.1, 75.7, 91.6, 84.9)),
)
# The mean of the nine columns of a row of the test sets, as the paper prints it
GLUE_AVERAGES = {
    "Pre-OpenAI SOTA": 74.0,
    "BiLSTM+ELMo+Attn": 71.0,
    "OpenAI GPT": 75.1,
    "BERT base": 79.6,
    "BERT large": 82.1,
}
# (task, split, model, exact, F1)
_SQUAD = (
    ("squad", "test", "human", 82.3, 91.2),
    ("squad", "dev", "BERT base", 80.8, 88.5),
    ("squad", "dev", "BERT large", 84.1, 90.9),
    ("squad", "dev", "BERT large, ensemble", 85.8, 91.8),
    ("squad", "dev", "BERT large + TriviaQA", 84.2, 91.1),
    ("squad", "test", "BERT large + TriviaQA", 85.1, 91.8),
    ("squad", "dev", "BERT large + TriviaQA, ensemble", 86.2, 92.2),
    ("squad", "test", "BERT large + TriviaQA, ensemble", 87.4, 93.2),
    ("squad2", "dev", "human", 86.3, 89.0),
    ("squad2", "test", "human", 86.9, 89.5),
    ("squad2", "dev", "BERT large", 78.7, 81.9),
    ("squad2", "test", "BERT large", 80.0, 83.1),
)
# (task, metric, model, dev, test)
_OTHERS = (
    ("swag", "accuracy", "ESIM+GloVe", 51.9, 52.7),
    ("swag", "accuracy", "ESIM+ELMo", 59.1, 59.2),
    ("swag", "accuracy", "OpenAI GPT", None, 78.0),
    ("swag", "accuracy", "BERT base", 81.6, None),
    ("swag", "accuracy", "BERT large", 86.6, 86.3),
    ("swag", "accuracy", "human, expert", None, 85.0),
    ("swag", "accuracy", "human, 5 annotations", None, 88.0),
    ("ner", "f1", "ELMo", 95.7, 92.2),
    ("ner", "f1", "CVT", None, 92.6),
    ("ner", "f1", "CSE", None, 93.1),
    ("ner", "f1", "BERT large", 96.6, 92.8),
    ("ner", "f1", "BERT base", 96.4, 92.4),
    ("ner-features", "f1", "BERT base, embeddings", 91.0, None),
    ("ner-features", "f1", "BERT base, second to last hidden", 95.6, None),
    ("ner-features", "f1", "BERT base, last hidden", 94.9, None),
    ("ner-features", "f1", "BERT base, weighted sum of last four", 95.9, None),
    ("ner-features", "f1", "BERT base, concatenated last four", 96.1, None),
    ("ner-features", "f1", "BERT base, weighted sum of all 12", 95.5, None),
)
# (task, split, metric -> scores of bert-base-uncased in the order of `STARTS`). The first is BERT "without
# fine-tuning": the paper does not say whether its head has learned, and most of these scores are chance.
OF_STARTS = (
    ("mrpc", "dev", {"f1": (0.0, 81.2, 87.9), "accuracy": (31.6, 68.3, 82.3)}),
    ("stsb", "dev", {"spearman": (33.1, 2.9, 82.7)}),
    ("sst2", "dev", {"accuracy": (49.1, 80.5, 92.0)}),
    ("qqp", "dev", {"f1": (0.0, 0.0, 65.2), "accuracy": (60.9, 63.2, 78.6)}),
    ("rte", "dev", {"accuracy": (52.7, 52.7, 64.6)}),
    ("qnli", "dev", {"accuracy": (52.8, 49.5, 84.4)}),
    ("mnli", "dev_matched", {"accuracy": (31.7, 61.0, 78.6)}),
)

PUBLISHED = (
    *(
        Published(task, split + kind, model, {metric: score})
        for model, split, scores in _GLUE
        for (task, kind, metric), score in zip(_COLUMNS[split], scores, strict=True)
    ),
    *(
        Published(task, split, model, {metric: score})
        for model, scores in _ABLATION
        for (task, split, metric), score in zip(_ABLATED, scores, strict=True)
        if score is not None
    ),
    *(Published(task, split, model, {"exact": exact, "f1": f1}) for task, split, model, exact, f1 in _SQUAD),
    *(
        Published(task, split, model, {metric: score}, FROZEN if task == "ner-features" else PRETRAINED)
        for task, metric, model, *scores in _OTHERS
        for split, score in zip(("dev", "test"), scores, strict=True)
        if score is not None
    ),
    *(
        Published(
            task,
            split,
            f"BERT base, {name}, Kovaleva et al. 2019" + ", perhaps Pearson" * (task == "stsb"),
            {metric: of_starts[i] for metric, of_starts in scores.items()},
            start,
        )
        for task, split, scores in OF_STARTS
        for i, (start, name) in enumerate(zip(STARTS, ("not fine-tuned", RANDOM, PRETRAINED), strict=True))
    ),
)
