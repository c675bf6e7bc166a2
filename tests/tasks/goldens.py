"""Make goldens.json: what transformers 4.57.6 computes, which has what transformers 5 dropped.

    python tests/tasks/goldens.py FOLDER     in an environment with transformers==4.57.6

FOLDER has the vocab.txt of all-MiniLM-L6-v2. Tests import the constants and functions above `main`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SQUAD = FOLDER / "squad.json"
GOLDENS = FOLDER / "goldens.json"
WINDOWS = dict(max_length=48, doc_stride=16, max_query=12)
THRESHOLD = 0.5
# Question -> an answer, and how much no answer is preferred to it
SCORED = {
    "q1": ("in 1684.", -3.0),
    "q2": ("The Bishop of   Carrow!", -2.0),
    "q3": ("Anna Vell", -1.5),
    "q4": ("nine metres", 0.25),
    "q5": ("half of a fish market", -0.5),
    "q6": ("", 0.0),
    "q7": ("rainfall", 0.75),
    "q8": ("tank tea", 0.5),
    "q9": ("an autumn", 0.625),
    "q10": ("Pell Sons", 0.6),
    "q11": ("", 0.5),
    "q12": ("the", 4.0),
}


def logits(name: str, window: int, length: int) -> tuple[list[float], list[float]]:
    """The start and end scores of a window; in steps of 0.1, so that some are equal."""
    draw = random.Random(f"{name} {window}")
    # Position 0 is that of no answer
    return tuple(
        [round(draw.uniform(2, 5) if i == 0 else draw.uniform(-3, 3), 1) for i in range(length)]
        for _ in range(2)
    )


def main(folder: str) -> None:
    import numpy
    import tokenizers
    import transformers
    from transformers.data.metrics import squad_metrics
    from transformers.data.processors import squad

    tokenizer = transformers.BertTokenizer(f"{folder}/vocab.txt")
    squad.squad_convert_example_to_features_init(tokenizer)
    processor = squad.SquadV2Processor()
    found = {
        "versions": {m.__name__: m.__version__ for m in (transformers, tokenizers, numpy)},
        "squad.json": hashlib.sha256(SQUAD.read_bytes()).hexdigest(),
        "windows": {},
    }
    for example in processor.get_train_examples(FOLDER, SQUAD.name):
        found["windows"][example.qas_id] = [
            {
                "ids": feature.input_ids,
                "context": sum(feature.token_type_ids),
                "max_context": "".join(str(int(v)) for v in feature.token_is_max_context.values()),
                "answer": [feature.start_position, feature.end_position],
            }
            for feature in _features(squad, example, True)
        ]
    examples = processor.get_dev_examples(FOLDER, SQUAD.name)
    texts, odds = ({name: value[i] for name, value in SCORED.items()} for i in range(2))
    evaluate = squad_metrics.squad_evaluate
    found["scores"] = [evaluate(examples, texts), evaluate(examples, texts, odds, THRESHOLD)]
    found["1.1"] = _answers(squad, squad_metrics, tokenizer, [e for e in examples if e.answers], False)
    found["2.0"] = _answers(squad, squad_metrics, tokenizer, examples, True)
    GOLDENS.write_text(json.dumps(found, separators=(",", ":")).replace('"q', '\n"q') + "\n")


def _features(squad, example, train):
    sizes = WINDOWS["max_length"], WINDOWS["doc_stride"], WINDOWS["max_query"]
    return squad.squad_convert_example_to_features(example, *sizes, "do_not_pad", train)


def _answers(squad, squad_metrics, tokenizer, examples, null):
    features, results = [], []
    for number, example in enumerate(examples):
        for window, feature in enumerate(_features(squad, example, False)):
            feature.example_index, feature.unique_id = number, len(features)
            start, end = logits(example.qas_id, window, len(feature.input_ids))
            features.append(feature)
            results.append(squad.SquadResult(len(results), start, end))
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{name}" for name in ("predictions", "nbest", "null")]
        squad_metrics.compute_predictions_logits(
            *(examples, features, results, 20, 30, True, *paths, False, null, THRESHOLD, tokenizer)
        )
        texts, nbest, odds = (
            json.loads(Path(path).read_text()) if Path(path).exists() else None for path in paths
        )
    return {
        "texts": texts,
        "nbest": {name: [[e["text"], round(e["probability"], 6)] for e in v] for name, v in nbest.items()},
        "null_odds": odds,
    }


if __name__ == "__main__":
    main(sys.argv[1])
