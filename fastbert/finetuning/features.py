"""Feature-based entities: a frozen encoder's hidden states, read by a BiLSTM tagger that alone is trained.

The encoder sees windows with the context of the document, as for `ner`. A word's features are the chosen
layers at its first token. The tagger reads the words of one sentence, and nothing across sentences.

Features of a split are computed once and mapped from a file, which all runs of a grid share. The files are
named by what they depend on, so another model, other data or other layers make new ones. They are removed
when the command ends: they take 12 KB per word of BERT-base, and one pass over the data makes them again.

The paper says nothing of how the tagger learns. Its AdamW starts at 1e-3, Adam's usual rate for an LSTM with
new weights, for 20 epochs of batches of 32 sentences; the epoch with the best dev score is kept.

Source: Devlin et al. 2018, "BERT", sec. 5.3.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.checkpoint.files import digest, own_tag, read_json
from fastbert.finetuning.encoded import Encoded, has_segments
from fastbert.finetuning.heads import BiLstm, Head, Mix
from fastbert.finetuning.settings import Settings
from fastbert.finetuning.tagging import Ner
from fastbert.finetuning.trained import FORM, fill, write_head
from fastbert.models.auto import AutoModel
from fastbert.models.base import PreTrainedModel
from fastbert.models.config import EncoderConfig
from fastbert.models.labels import IGNORED
from fastbert.models.outputs import LogitsOutput
from fastbert.runtime import expected
from fastbert.sentences.tokenizer import pack_batches
from fastbert.tasks import ner_windows
from fastbert.tasks.ner import Sentence
from fastbert.training.stream import Batch

# name -> which of the hidden states, of which the first is the embedding output; of "-sum" a learned mix
LAYERS = {
    "last4-concat": slice(-4, None),
    "embeddings": slice(0, 1),
    "second-to-last": slice(-2, -1),
    "last": slice(-1, None),
    "last4-sum": slice(-4, None),
    "all-sum": slice(1, None),
}


@dataclass(frozen=True)
class Features(Encoded):
    """Sentences of words with features; `ids` are rows of the table.

    Attributes:
        table: (words, layers, hidden) float32.
        key: hash of all that the sentences, labels and features depend on.
    """

    table: Any = None
    key: str = ""

    @property
    def hash(self) -> str:
        """See `key`."""
        return self.key

    def batch(self, numbers: np.ndarray, segments: bool) -> Batch:
        """The inputs of some sentences; see `Encoded.batch`."""
        made = super().batch(numbers, False)
        made.inputs["features"] = np.array(self.table[made.inputs.pop("input_ids")])
        return made


class Tagger(nn.Module):
    """A tag per word, of its features: two bidirectional LSTM layers and a linear layer.

    Each direction of the LSTM is as wide as the model, so 768 for BERT-base.

    Args:
        config: the encoder's.
        layers: a key of `LAYERS`.
    """

    def __init__(self, config: EncoderConfig, layers: str) -> None:
        super().__init__()
        self.config, self.layers = config, layers
        count = len(range(config.num_hidden_layers + 1)[LAYERS[layers]])
        self.mix = Mix(count) if layers.endswith("-sum") else None
        width, dropout_p = config.hidden_size, config.hidden_dropout_prob
        self.lstm = BiLstm(width if self.mix is not None else width * count, width, dropout_p)
        self.dropout = nn.Dropout(dropout_p)
        self.classifier = nn.Linear(2 * width, config.num_labels)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.classifier.weight.device

    def forward(
        self, features: Tensor, cu_seqlens: Tensor, max_seqlen: int, labels: Tensor | None = None
    ) -> LogitsOutput:
        """The scores of each tag per word.

        Args:
            features: (total, layers, hidden) of the words of all sentences.
            cu_seqlens: (sentences + 1,) int32.
            max_seqlen: unused.
            labels: (total,) int64; -100 does not count.

        Returns:
            loss, the mean cross-entropy, if there are labels; logits (total, tags).
        """
        x = features.flatten(1) if self.mix is None else self.mix(features.unbind(1))
        logits = self.classifier(self.dropout(self.lstm(x, cu_seqlens)[0]))
        loss = None if labels is None else F.cross_entropy(logits, labels, ignore_index=IGNORED)
        return LogitsOutput.of(loss=loss, logits=logits)

    def form(self) -> dict[str, str]:
        """For head.json."""
        return {"kind": NerFeatures.name, "layers": self.layers}

    def save_pretrained(self, folder: Path) -> None:
        """Write head.safetensors and head.json; `NerFeatures.complete` writes the encoder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_head(folder, dict(self.named_parameters()), self.form())


class NerFeatures(Ner):
    """Entities from the hidden states of a frozen encoder; see the module.

    Args:
        layers: a key of `LAYERS`; None is last4-concat, or that of a trained tagger.
        context, strict: see `Ner`.
    """

    name = "ner-features"

    def __init__(self, *, layers: str | None = None, context: int = 64, strict: bool = False) -> None:
        super().__init__(context=context, strict=strict)
        if layers is not None:
            expected.one_of(LAYERS, layers=layers)
        self.layers = layers
        self.defaults = {"lr": 1e-3, "epochs": 20, "batch_size": 32, "max_length": 512, "freeze": True}
        self.options = {"strict": strict, "layers": self.chosen}
        self._encoder: Any = None

    @property
    def chosen(self) -> str:
        """The layers that are read."""
        return self.layers or next(iter(LAYERS))

    def check(self, settings: Settings, head: Head) -> None:
        """Refuse an encoder that learns or rounds, and another head than the tagger."""
        if not settings.freeze:
            raise ValueError("freeze: expected True, because ner-features trains the tagger alone, got False")
        if settings.qat is not None:
            raise ValueError(
                f"qat: expected None, because ner-features trains the tagger alone, got {settings.qat!r}"
            )
        if head != Head():
            name = next(name for name, value in vars(head).items() if value)
            raise ValueError(f"{name}: ner-features has a tagger of its own, got {getattr(head, name)!r}")

    def adopt(self, config: EncoderConfig) -> None:
        """Take the order of the tags from a checkpoint, which must have the layers."""
        super().adopt(config)
        least = -min(LAYERS[self.chosen].start, 0)
        if config.num_hidden_layers < least:
            raise ValueError(
                f"layers: {self.chosen} needs a model of {least} layers, got {config.num_hidden_layers}"
            )

    def first(self, place: Path, settings: Settings, head: Head) -> Tagger:
        """The tagger with its first weights; a trained tagger's own if tags and layers are the same."""
        config = EncoderConfig.from_pretrained(place)
        names = config.id2label
        self._name_classes(config)
        tagger = Tagger(config, self.chosen)
        if names == config.id2label and (place / FORM).is_file() and read_json(place / FORM) == tagger.form():
            fill(dict(tagger.named_parameters()), place)
        return tagger

    def _name_classes(self, config: EncoderConfig) -> None:
        config.id2label = dict(enumerate(self.classes))
        config.label2id = {name: i for i, name in config.id2label.items()}

    def complete(self, place: Path, output: Path) -> None:
        """Write the encoder, which no run has changed, with the names of the tags."""
        encoder = _encoder(place, "cpu")
        self._name_classes(encoder.config)
        encoder.save_pretrained(output)

    def load(self, place: Path, device: torch.device | str | None) -> Tagger:
        """A trained tagger, without its encoder."""
        form = read_json(place / FORM) if (place / FORM).is_file() else {}
        if form.get("kind") != self.name:
            raise ValueError(
                f"model: {place} has no trained tagger; fastbert finetune {self.name} trains one"
            )
        if self.layers not in (None, form["layers"]):
            raise ValueError(f"layers: the tagger in {place} reads {form['layers']}, got {self.layers}")
        self.layers = form["layers"]
        tagger = Tagger(EncoderConfig.from_pretrained(place), self.chosen)
        fill(dict(tagger.named_parameters()), place)
        return tagger.to(device).eval()

    def prepared(
        self,
        encoded: Encoded,
        examples: list[Sentence],
        place: Path,
        device: torch.device,
        dtype: torch.dtype,
        batch_tokens: int,
        folder: Path | None = None,
    ) -> Features:
        """The sentences with their features, in memory or mapped from a file in `folder`."""
        words = np.concatenate([window.words for window in encoded.windows])
        count = sum(len(sentence.words) for sentence in examples)
        config = EncoderConfig.from_pretrained(place)
        layers = len(range(config.num_hidden_layers + 1)[LAYERS[self.chosen]])
        shape = count, layers, config.hidden_size
        key = digest(
            repr((encoded.hash, digest(words.tobytes()), self.chosen, dtype, config.mathematics())).encode()
        )

        def fill_table(table: np.ndarray) -> np.ndarray:
            if self._encoder is None or self._encoder[0] != place:
                self._encoder = place, _encoder(place, device)
            unlabelled = replace(encoded, labels={"words": words})
            options = LAYERS[self.chosen], dtype, batch_tokens
            for numbers, states in _states(self._encoder[1], unlabelled, *options):
                table[numbers] = states
            return table

        if folder is None:
            table = fill_table(np.empty(shape, np.float32))
        else:
            path = folder / f"{key}.npy"
            if not path.is_file():
                # Each process may write it: the last to finish renames its own
                folder.mkdir(parents=True, exist_ok=True)
                size, free = 4 * int(np.prod(shape)), shutil.disk_usage(folder).free
                # a mapped file on a full disk would end the process
                if free < size:
                    raise ValueError(f"output: expected {size:,} bytes for features, {folder} has {free:,}")
                new = folder / f"{own_tag()}.new"
                table = np.lib.format.open_memmap(new, "w+", np.float32, shape)
                fill_table(table)
                table.flush()
                os.replace(new, path)
                self._encoder = None
            table = np.load(path, mmap_mode="r")
        starts = np.concatenate([[0], np.cumsum([len(sentence.words) for sentence in examples])])
        labels = {name: values[words >= 0] for name, values in encoded.labels.items()}
        rows = np.arange(count)
        return Features(rows, rows * 0, starts, labels, token_labels=True, table=table, key=key)

    def predictions(
        self, examples: list[Sentence], encoded: Encoded, outputs: Sequence[np.ndarray]
    ) -> list[list[str]]:
        """The most likely tag of each word, per sentence."""
        return ner_windows.tags_of([str(self.classes[i]) for i in outputs[0].argmax(1)], examples)


def _encoder(place: Path, device: torch.device | str) -> PreTrainedModel:
    """The encoder of a checkpoint, whose head is left out, in eval mode."""
    return AutoModel.from_pretrained(place, dtype=torch.float32, device=device, add_pooling_layer=False)


def _states(encoder: Any, windows: Encoded, layers: slice, dtype: torch.dtype, batch_tokens: int) -> Any:
    """(numbers of words, their states (n, layers, hidden)) of some windows at a time.

    Args:
        encoder: in eval mode.
        windows: with the numbers of words as labels.
        layers: see `LAYERS`.
        dtype: float32, or the dtype of autocast.
        batch_tokens: most tokens at a time; a longer window runs alone.

    Raises:
        ValueError: a state is not finite.
    """
    half = torch.autocast(encoder.device.type, dtype, enabled=dtype != torch.float32)
    for group in pack_batches(windows.lengths, batch_tokens):
        batch = windows.batch(group, has_segments(encoder.config))
        numbers = batch.inputs.pop("words")
        with torch.inference_mode(), half:
            states = encoder(**batch.on(encoder.device), output_hidden_states=True, packed=True)[1][layers]
        kept = np.flatnonzero(numbers >= 0)
        rows = torch.from_numpy(kept).to(encoder.device)
        found = torch.stack([state[rows] for state in states], 1).float().cpu().numpy()
        if not np.isfinite(found).all():
            raise ValueError("model: its outputs are not finite: its weights are not, or they are too large")
        yield numbers[kept], found
