"""Text whose ids say where each token belongs, padded copies of packed batches, and errors of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastbert.pretraining.formats import Example
from fastbert.pretraining.masking import IGNORED
from fastbert.testing import compare

CLS, SEP, MASK = 2, 3, 4
FIRST, STEP = 5, 40  # place i of sequence s has the id FIRST + STEP * s + i
LENGTHS = (31, 12, 40, 3, 25)
VOCAB = 208
# of a tiny model
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=80,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


class Numbered:
    """A format without files: [CLS], numbered tokens, [SEP]. Words have one to three tokens.

    Args:
        lengths: with special tokens, at most `STEP`.
        num_labels: classes of a pair.
    """

    def __init__(self, lengths: Sequence[int] = LENGTHS, num_labels: int = 0) -> None:
        special = {"pad": 0, "unk": 1, "cls": CLS, "sep": SEP, "mask": MASK}
        self.corpus = SimpleNamespace(hash="numbered", vocab_size=VOCAB, special_ids=special)
        self.lengths, self.num_labels = tuple(lengths), num_labels

    def plan(self, epoch: int) -> SimpleNamespace:
        """The same in every epoch."""
        return SimpleNamespace(lengths=np.array(self.lengths))

    def build(self, plan: SimpleNamespace, index: int) -> Example:
        """One sequence; the second half of its tokens has type 1."""
        length = self.lengths[index]
        ids = FIRST + STEP * index + np.arange(length)
        ids[[0, -1]] = CLS, SEP
        places = np.arange(length)
        return Example(ids, places % 4 != 2, (places > length // 2).astype(np.int64), -100)


def originals(format: Numbered) -> np.ndarray:
    """(total,) the ids before masking, packed."""
    plan = format.plan(0)
    return np.concatenate([format.build(plan, i).ids for i in range(len(format.lengths))])


def padded(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Packed inputs as transformers takes them: input_ids, token_type_ids, attention_mask, labels."""
    cuts = inputs["cu_seqlens"].diff().tolist()
    pads = {"input_ids": 0, "token_type_ids": 0, "labels": IGNORED}

    def pad(t: Tensor, value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(t.split(cuts), batch_first=True, padding_value=value)

    mask = pad(torch.ones_like(inputs["input_ids"]), 0)
    return {**{key: pad(inputs[key], value) for key, value in pads.items()}, "attention_mask": mask}


def at_unit_scale(module: torch.nn.Module) -> torch.nn.Module:
    """The module with other weights, so that every part matters; in training."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 1.2 / parameter.shape[-1] ** 0.5)
        else:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return module.train()


def assert_as_papers(own: dict, eager: dict, wide: dict, truth: dict) -> None:
    """Our tensors in float32, by the error rule, and in float64, to rounding."""
    largest = max(value.abs().max().item() for value in truth.values())
    for name, value in truth.items():
        floor = 8 * torch.finfo(torch.float32).eps * largest
        *_, reason = compare(own[name], eager[name], value, torch.float32, floor)
        assert not reason, f"{name}: {reason}"
        assert (wide[name] - value).abs().max() <= 1e-10 * largest, name


def relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The relative error of all gradients as one vector."""
    assert actual.keys() == expected.keys()
    wrong = torch.stack([(actual[name].double() - g).norm() for name, g in expected.items()])
    return (wrong.norm() / torch.stack([g.norm() for g in expected.values()]).norm()).item()
