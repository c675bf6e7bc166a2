"""`fastbert.accelerate` under the Trainer, and in several processes (DDP, FSDP2)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import fastbert
from tests.support import processes
from tests.support.stock_models import CLASSIFIER, assert_close, assert_fused, ragged, relative, tiny

# --- Trainer ------------------------------------------------------------------------------------------------


def examples(count: int = 24) -> list[dict]:
    g = torch.Generator().manual_seed(3)
    rows = []
    for i in range(count):
        length = int(torch.randint(3, 30, (), generator=g))
        ids = torch.randint(5, 120, (length,), generator=g)
        rows.append({"input_ids": ids, "labels": i % 3, "text": "Trainer leaves this column out"})
    return rows


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    assert all(row.keys() == {"input_ids", "labels"} for row in rows)  # chosen by the signature of forward
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def train(model: torch.nn.Module, folder: Path, **settings):
    """(the trainer after 20 steps, loss and gradient norm of each step)."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=5,
        **settings,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=examples(), data_collator=collate)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(steps) == 20
    return trainer, *(torch.tensor([float(s[key]) for s in steps]) for key in ("loss", "grad_norm"))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    (
        ({}, 1e-3),
        ({"gradient_checkpointing": True}, 1e-3),
        ({"bf16": True}, 0.08),
    ),
    ids=("fp32", "fp32-checkpointing", "bf16"),
)
def test_trainer_follows_the_stock_loss_curve(tmp_path, fresh_accelerator, settings, tolerance):
    model = fastbert.accelerate(tiny(num_labels=3))
    _, stock_losses, stock_norms = train(tiny(num_labels=3), tmp_path, **settings)
    trainer, losses, norms = train(model, tmp_path, **settings)
    assert_fused(model)
    assert losses[-4:].mean() < 0.7 * losses[:4].mean()  # it learns
    assert (losses - stock_losses).abs().max() <= tolerance
    assert ((norms - stock_norms).abs() / stock_norms).max() <= tolerance

    # what the trainer saves is a vanilla model with these weights
    trainer.save_model(str(tmp_path / "saved"))
    vanilla = CLASSIFIER.from_pretrained(tmp_path / "saved")
    for name, tensor in model.state_dict().items():
        assert torch.equal(vanilla.state_dict()[name], tensor), name
    inputs = collate([{k: row[k] for k in ("input_ids", "labels")} for row in examples(5)])
    with torch.no_grad():
        plain = trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()
        assert_close(plain(**inputs).logits, vanilla(**inputs).logits)


@pytest.mark.parametrize("first", ("accelerate", "prepare"))
def test_prepared_by_an_accelerator_in_bf16(fresh_accelerator, first):
    accelerator = fresh_accelerator.Accelerator(cpu=True, mixed_precision="bf16")
    model = tiny(num_labels=3)
    if first == "accelerate":
        model = accelerator.prepare_model(fastbert.accelerate(model))
    else:
        model = fastbert.accelerate(accelerator.prepare_model(model))
    stock = accelerator.prepare_model(tiny(num_labels=3))
    inputs = ragged("bert")
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
def two_processes(tmp_path_factory):
    """Results of two processes that train together: by rank, by wrapper."""
    return processes.ranks("accelerate_workers.py", tmp_path_factory.mktemp("two-processes"))


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
