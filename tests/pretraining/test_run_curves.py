"""Thirty steps of a run beside transformers' own classes, on the same batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.run import model_of, stages
from fastbert.training.optimizers import decay_groups, optimizer
from fastbert.training.stream import Stream
from tests.support.numbered_text import padded, relative_error
from tests.support.objectives import tensors
from tests.support.small_runs import config, small

STEPS = 30
# float64 on both sides: rounding is 1e-16, and thirty steps of Adam may enlarge it
BOUND = 1e-9


def stock(folder, name: str) -> torch.nn.Module:
    """transformers' class with our first weights."""
    made = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager")
    return made.double().train()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("family", "recipe", "name"),
    [
        ("bert", "bert", "BertForPreTraining"),
        ("albert", "albert", "AlbertForPreTraining"),
        ("roberta", "roberta", "RobertaForMaskedLM"),
    ],
)
def test_thirty_steps_are_those_of_transformers(family, recipe, name, text_file, tokenizer_dir, tmp_path):
    """Losses, gradients and weights of each step; packed here, padded there."""
    corpus = Corpus.write([text_file], tokenizer_dir, tmp_path / "corpus")
    chosen = small(recipe, STEPS, dropout=0, micro_batch=4)
    more = {"classifier_dropout_prob": 0.0} if family == "albert" else {}
    model, _ = model_of(config(corpus, family, max_position_embeddings=52, **more), corpus, chosen)
    stage = stages(corpus, model, None, chosen, 0)[0]
    torch.manual_seed(0)
    ours = stage.build().train()
    assert type(ours.model).__name__ == name
    ours.model.save_pretrained(tmp_path / "first")
    theirs, ours = stock(tmp_path / "first", name), ours.double()
    made = [optimizer("adamw", decay_groups(m, 0.01), 1e-3, (0.9, 0.999), 1e-6, 0.01) for m in (ours, theirs)]
    stream, curve = Stream(stage.source, 0, sequences=4), []
    label = {"bert": "next_sentence_label", "albert": "sentence_order_label"}.get(family)
    for step in range(STEPS):
        batch = stream.batch(step)
        inputs = tensors(batch)
        losses, _ = ours(inputs)
        mine = sum(losses.values())
        given = padded(inputs)
        assert given["attention_mask"].sum() == batch.lengths.sum()
        if label is not None:
            given[label] = inputs["sentence_labels"]
        else:
            given.pop("token_type_ids")
        expected = theirs(**given).loss
        for loss in (mine, expected):
            loss.backward()
        curve.append((mine.item(), expected.item()))
        assert abs(mine.item() - expected.item()) < BOUND * expected.item(), step
        assert relative_error(gradients(ours.model), gradients(theirs)) < BOUND, step
        for each, module in zip(made, (ours, theirs), strict=True):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            each.step()
            each.zero_grad()
    mine = np.array(curve)[:, 0]
    assert mine[-5:].mean() < mine[:5].mean() - 0.2  # it has learnt, so the curves are no constants
    saved = theirs.state_dict()
    for key, value in ours.model.state_dict().items():
        if value.is_floating_point():
            assert (value - saved[key]).norm() <= BOUND * saved[key].norm() + 1e-12, key
