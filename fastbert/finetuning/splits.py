"""The splits of a task as tokens of one model, and what was left out, cut or mended on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastbert.finetuning.encoded import Encoded
from fastbert.finetuning.fit import Split
from fastbert.finetuning.task import Task
from fastbert.models.config import EncoderConfig
from fastbert.sentences.tokenizer import load_tokenizer


class Splits:
    """Makes tokens of the examples of splits, for one model.

    Attributes:
        counts: split -> `Task.counts`.
    """

    def __init__(self, task: Task, place: Path, max_length: int, say: Callable[[str], None]) -> None:
        self.task, self.max_length, self.say = task, max_length, say
        self.config = EncoderConfig.from_pretrained(place)
        self.tokenizer = load_tokenizer(place)
        self.counts: dict[str, dict[str, int]] = {}

    def of(self, name: str, examples: Any, labelled: bool = False) -> Split:
        """The examples of a split and their tokens; says what was left out, cut or mended."""
        found = self.task.encode(examples, self.tokenizer, self.max_length, labelled)
        check_fits(found, self.config, self.tokenizer)
        self.counts[name] = self.task.counts(examples, found)
        # The first count is the number of examples, also if it is 0
        shown = {key: n for i, (key, n) in enumerate(self.counts[name].items()) if n or i == 0}
        words = ", ".join(f"{n:,} {key.replace('_', ' ')}" for key, n in shown.items())
        self.say(f"{name}: {words}" + f" to {self.max_length} tokens" * ("sequences_cut" in shown))
        return Split(examples, found)


def check_fits(examples: Encoded, config: EncoderConfig, tokenizer: Tokenizer) -> None:
    """Refuse tokens that the model does not know, and sequences longer than its positions."""
    if (most := int(examples.ids.max())) >= config.vocab_size:
        token = tokenizer.id_to_token(most)
        raise ValueError(
            f"model: knows {config.vocab_size} tokens, but its tokenizer makes {token!r} with id {most}"
        )
    if (longest := int(np.diff(examples.starts).max())) > config.max_tokens:
        raise ValueError(
            f"max_length: expected at most {config.max_tokens} for this model, got {longest} tokens"
        )
