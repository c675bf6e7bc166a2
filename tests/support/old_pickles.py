"""Write small pickles of public objects, and what their models answer.

    PYTHONPATH=<checkout> python tests/support/old_pickles.py FOLDER

tests/house/pickles/ holds what commit 5d50b9a wrote, the last one before the modules moved into rooms. The
weights are random.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import zlib
from pathlib import Path

import torch

import fastbert

TINY = {
    "vocab_size": 12,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
    "type_vocab_size": 1,
}
NAMES = (
    "BertModel",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "RobertaForSequenceClassification",
    "DistilBertForTokenClassification",
    "AlbertModel",
    "ElectraForPreTraining",
    "MPNetForMaskedLM",
    "BertForMultipleChoice",
)
IDS = torch.tensor([[2, 5, 7, 3], [2, 9, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


def answer(model: torch.nn.Module) -> torch.Tensor:
    """The first output for a batch of two sequences."""
    ids, mask = (IDS[None], MASK[None]) if "MultipleChoice" in type(model).__name__ else (IDS, MASK)
    with torch.no_grad():
        return model.eval()(ids, attention_mask=mask)[0]


def objects() -> dict[str, object]:
    """Name -> what is pickled: models, a config, an output, a list of classes."""
    found: dict[str, object] = {}
    for name in NAMES:
        torch.manual_seed(0)
        cls = getattr(fastbert, name)
        kinds = ("distilbert", "bert", "roberta", "albert", "electra", "mpnet")
        kind = next(kind for kind in kinds if name.lower().startswith(kind))
        found[name] = cls(fastbert.EncoderConfig(model_type=kind, **TINY)).eval()
    found["config"] = fastbert.EncoderConfig(**TINY)
    found["output"] = found["BertModel"](IDS, attention_mask=MASK)
    found["error"] = fastbert.CheckpointError("no such file")
    found["classes"] = [v for n in fastbert.__all__ if isinstance(v := getattr(fastbert, n), type)]
    return found


def main(folder: Path) -> None:
    """Write `<name>.txt` each (a compressed pickle in base64) and answers.json."""
    folder.mkdir(parents=True, exist_ok=True)
    answers = {}
    for name, value in objects().items():
        data = base64.b64encode(zlib.compress(pickle.dumps(value, protocol=4), 9)).decode()
        (folder / f"{name}.txt").write_text(
            "\n".join(data[i : i + 100] for i in range(0, len(data), 100)) + "\n"
        )
        if isinstance(value, torch.nn.Module):
            answers[name] = answer(value).tolist()
    (folder / "answers.json").write_text(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
