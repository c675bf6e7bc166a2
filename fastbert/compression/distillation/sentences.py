"""Sentence encoders as teachers and students: the vectors of packed texts, with gradients.

A student that is a folder of sentence-transformers keeps its own pooling and normalisation. Any other student
takes those of the teacher, and its prompt. A student of another width learns the teacher's vectors in its own
width: a narrower one their principal components over the texts, a wider one zeros besides.

Source: Reimers and Gurevych 2020, "Making Monolingual Sentence Embeddings Multilingual using Knowledge
Distillation", sec. 3.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.layers.packing import send
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from fastbert.ops.pooling import pooling
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.settings import SentenceSettings, modules_of, sentence_settings
from fastbert.sentences.tokenizer import load_tokenizer


class SentenceVectors(nn.Module):
    """An encoder and its pooling.

    Args:
        model: an encoder of this package.
        settings: how it encodes sentences; their folder has the tokenizer.

    Attributes:
        projection: (width, student's width), of the teacher of a student of another width; else None.
    """

    model: Any
    projection: Tensor | None = None

    def __init__(self, model: Any, settings: SentenceSettings) -> None:
        super().__init__()
        self.model, self.settings = model, settings

    @property
    def config(self) -> EncoderConfig:
        """The encoder's."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The encoder's."""
        return self.model.device

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """(total,) ids of packed texts -> (texts, width) in float32."""
        hidden = self.model(input_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, packed=True)[0]
        rows = pooling(hidden, send(cu_seqlens, hidden.device), self.settings.pooling)
        return F.normalize(rows, dim=1) if self.settings.normalize else rows

    def targets(self, vectors: Tensor) -> Tensor:
        """What a student learns of the vectors (texts, width): (texts, student's width)."""
        if self.projection is None:
            return vectors
        with torch.autocast(vectors.device.type, enabled=False):
            rows = vectors @ self.projection.to(vectors)
        return F.normalize(rows, dim=1) if self.settings.normalize else rows

    def encoder(self, max_length: int | None = None) -> SentenceEncoder:
        """The model as users call it and as it is saved.

        Args:
            max_length: most tokens of a text; None: as the settings say, and at most as the model allows.
        """
        tokenizer = load_tokenizer(self.settings.transformer)
        return SentenceEncoder.of(self.model, tokenizer, self.settings, max_length)


def projection_to(vectors: Tensor, width: int) -> Tensor:
    """What brings vectors (texts, own width) to another width: (own width, width)."""
    if width > vectors.shape[1]:
        return torch.eye(vectors.shape[1], width)
    if len(vectors) < width:
        raise ValueError(f"data: expected at least {width} texts, the student's width, got {len(vectors)}")
    centred = vectors.double() - vectors.double().mean(0)
    return torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :width].float()


def teacher_vectors(place: Path, device: torch.device) -> SentenceVectors:
    """The sentence encoder of a directory, in float32."""
    settings = sentence_settings(place)
    options = {"dtype": torch.float32, "device": device, "add_pooling_layer": False}
    return SentenceVectors(AutoModel.from_pretrained(settings.transformer, **options), settings)


def student_settings(place: Path, teacher: SentenceSettings) -> SentenceSettings:
    """How the student of a directory encodes sentences; see the module."""
    if modules_of(place) is not None or (place / "1_Pooling").is_dir():
        return sentence_settings(place)
    options = {"pooling": teacher.pooling, "normalize": teacher.normalize, "prompt": teacher.prompt}
    own, same = sentence_settings(place, **options), ("prompts", "similarity", "include_prompt")
    return replace(own, **{name: getattr(teacher, name) for name in same})
