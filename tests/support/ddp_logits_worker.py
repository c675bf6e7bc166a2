"""What DDP makes of a model with deferred logits, in a process of `ranks.in_a_group`."""

from __future__ import annotations

import torch

from tests.support.model_pairs import build, inputs_for, labels_for


def found(find_unused: bool) -> dict[str, object]:
    """The output's type, when its logits are computed, whether they are the model's. Gradients must be."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    _, model = build("bert", "ForMaskedLM", num_hidden_layers=2, **no_dropout)
    model.train()
    inputs = inputs_for("bert", "ForMaskedLM")
    inputs |= labels_for(model, inputs)
    expected = model(**inputs, output_logits=True)
    expected.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused)
    output = ddp(**inputs)
    said = {"type": type(output).__name__, "computed_by_forward": output.logits.is_computed}
    output.loss.backward()
    said["computed_by_backward"] = output.logits.is_computed
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    return said | {"logits_equal": torch.equal(output.logits, expected.logits)}


def results(rank: int) -> dict:
    """`found`, by whether unused parameters are searched."""
    return {find_unused: found(find_unused) for find_unused in (False, True)}
