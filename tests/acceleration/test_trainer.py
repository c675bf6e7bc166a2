"""Accelerated and native models under the Trainer; accelerated ones in several processes (DDP, FSDP2)."""

from __future__ import annotations

import pytest
import torch

import fastbert
from tests.support import accelerate_workers, ranks
from tests.support.accelerated_models import HEAD, assert_close, assert_fused, first_kept, relative, tiny
from tests.support.checkpoints import assert_same_state
from tests.support.model_pairs import native
from tests.support.trainers import logged, trainer_of

# --- Trainer ------------------------------------------------------------------------------------------------

SETTINGS = {
    "fp32": ({}, 1e-3),
    "checkpointing": ({"gradient_checkpointing": True}, 1e-3),
    "bf16": ({"bf16": True}, 0.08),
    "accumulation": ({"gradient_accumulation_steps": 2}, 1e-3),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["native", "accelerated"])
@pytest.mark.parametrize("which", SETTINGS)
def test_trainer_follows_the_stock_loss_curve(tmp_path, fresh_accelerator, tokenizer, which, kind):
    settings, tolerance = SETTINGS[which]
    stock = tiny(num_labels=3)
    model = native(stock) if kind == "native" else fastbert.accelerate(tiny(num_labels=3))
    expected, trainer = (
        trainer_of(m, tmp_path / type(m).__module__, tokenizer, max_steps=20, **settings)
        for m in (stock, model)
    )
    expected.train()
    trainer.train()
    losses, wanted = logged(trainer), logged(expected)
    norms, stock_norms = logged(trainer, "grad_norm"), logged(expected, "grad_norm")
    assert len(losses) == 20
    assert losses[-4:].mean() < 0.7 * losses[:4].mean()  # it learns
    if kind == "accelerated":
        assert_fused(model)
    else:
        assert trainer.label_names == ["labels"]
        assert not trainer.model_accepts_loss_kwargs
        assert model.is_gradient_checkpointing is (which == "checkpointing")
        # stock says that its loss is scaled for accumulation and does not scale it: of a sum
        steps = settings.get("gradient_accumulation_steps", 1)
        wanted, stock_norms = wanted / steps, stock_norms / steps
    assert (losses - wanted).abs().max() <= tolerance
    assert ((norms - stock_norms).abs() / stock_norms).max() <= tolerance
    predictions, stock_predictions = (one.predict(one.eval_dataset) for one in (trainer, expected))
    assert predictions.predictions.shape == (12, 3)
    assert predictions.predictions.dtype == "float32"
    assert abs(predictions.predictions - stock_predictions.predictions).max() <= max(20 * tolerance, 1e-2)
    assert predictions.label_ids.tolist() == [i % 3 for i in range(12)]
    # what the trainer saves is a vanilla model with these weights
    trainer.save_model(str(tmp_path / "saved"))
    vanilla = HEAD.from_pretrained(tmp_path / "saved")
    assert_same_state(vanilla, model)


@pytest.mark.parametrize("first", ("accelerate", "prepare"))
def test_prepared_by_an_accelerator_in_bf16(fresh_accelerator, first):
    accelerator = fresh_accelerator.Accelerator(cpu=True, mixed_precision="bf16")
    model = tiny(num_labels=3)
    if first == "accelerate":
        model = accelerator.prepare_model(fastbert.accelerate(model))
    else:
        model = fastbert.accelerate(accelerator.prepare_model(model))
    stock = accelerator.prepare_model(tiny(num_labels=3))
    inputs = first_kept("bert")
    with torch.no_grad():
        logits, expected = model(**inputs).logits, stock(**inputs).logits
        exact = tiny(num_labels=3)(**inputs).logits
    assert_fused(model)
    assert logits.dtype == expected.dtype == torch.float32
    assert relative(logits, exact) <= 2 * relative(expected, exact)
    assert relative(logits, exact) > 1e-4  # the products are really in bf16
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with torch.no_grad():
        assert_close(plain(**inputs).logits, exact)


# --- several processes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_processes():
    """Results of two processes that train together: by rank, by wrapper."""
    return ranks.in_a_group(2, accelerate_workers.results)


@pytest.mark.sweep
@pytest.mark.parametrize("order", ("", ", accelerated after it"))
@pytest.mark.parametrize("kind", ("ddp", "fsdp2"))
def test_data_parallel_training(two_processes, kind, order):
    for found in (rank[kind + order] for rank in two_processes):
        assert found["compared"] == 3 * 41
        assert found["loss_error"] <= 1e-5
        assert found["gradient_error"][0] <= 1e-5, found["gradient_error"]
        assert found["fused"] == [True, True], found["explained"]
        assert found["fused_calls"] == [3, 3], found["explained"]
        assert found["stock_calls"] == [0, 0], found["explained"]
        assert (found["packed_calls"], found["padded_calls"]) == ([3], [0]), found["explained"]


@pytest.mark.sweep
@pytest.mark.parametrize("wrapper", ("fsdp2 inside the layers", "tensor parallel"))
def test_weights_that_only_their_own_module_may_read_keep_the_layer_stock(two_processes, wrapper):
    for found in (rank[wrapper] for rank in two_processes):
        assert found["compared"] == 3 * 41
        assert found["loss_error"] <= 1e-5
        assert found["gradient_error"][0] <= 1e-5, found["gradient_error"]
        assert found["fused"] == [False, False], found["explained"]
        assert found["fused_calls"] == [0, 0], found["explained"]
        assert found["stock_calls"] == [3, 3], found["explained"]
