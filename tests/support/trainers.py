"""A tokenizer of words, rows of token ids, and transformers' Trainer on them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def word_tokenizer(words: Iterable[str], max_length: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that splits at spaces; the words' ids begin at 5."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *dict.fromkeys(words)])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {f"{word[1:-1].lower()}_token": word for word in SPECIAL}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=max_length,
        padding_side="right",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    )


def rows(count: int, seed: int = 3) -> list[dict]:
    """Sequences of several lengths; the first word decides the label."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        ids = torch.randint(8, 120, (int(torch.randint(3, 20, (), generator=g)),), generator=g)
        made.append({"input_ids": [2, 5 + i % 3, *ids.tolist(), 3], "labels": i % 3, "text": "left out"})
    return made


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer_of(
    model: torch.nn.Module, folder: Path, tokenizer: transformers.PreTrainedTokenizerFast, **settings
) -> transformers.Trainer:
    """A Trainer of a classifier of three labels, or of a masked-LM model."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=5,
        learning_rate=1e-3,
        logging_steps=1,
        **{"max_steps": 8, "save_strategy": "no", **settings},
    )
    mlm = type(model).__name__.endswith("ForMaskedLM")
    collate = (
        transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4)
        if mlm
        else transformers.DataCollatorWithPadding(tokenizer)
    )
    data = [{"input_ids": r["input_ids"]} if mlm else r for r in rows(24)]
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data[:12],
        processing_class=tokenizer,
        data_collator=collate,
        compute_metrics=None if mlm else accuracy,
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return trainer


def logged(trainer: transformers.Trainer, key: str = "loss") -> torch.Tensor:
    """What the Trainer logged of each step."""
    return torch.tensor([float(entry[key]) for entry in trainer.state.log_history if "grad_norm" in entry])
