"""The base of the encoders that return one vector per text: `SentenceEncoder` and `SparseEncoder`."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch

from fastbert.sentences.progress import bar
from fastbert.sentences.similarity import SIMILARITIES, Vectors, matrix
from fastbert.sentences.text_model import Text, TextModel, finite_rows
from fastbert.sentences.tokenizer import TokenBatch

_log = logging.getLogger("fastbert")


class Embedder(TextModel):
    """A `TextModel` that makes one vector of `width` numbers per text; `_forward` makes those of a batch."""

    similarity_fn_name: str
    encode: Callable[..., Any]

    @property
    def width(self) -> int:
        """Numbers in an embedding."""
        raise NotImplementedError

    def get_embedding_dimension(self) -> int:
        """Numbers in an embedding; sentence-transformers' name of `width`."""
        return self.width

    def get_sentence_embedding_dimension(self) -> int:
        """Numbers in an embedding; the name of `width` before sentence-transformers 6."""
        return self.width

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the embeddings: float64 from a float64 model, else float32."""
        wide = next(self.model.parameters()).dtype == torch.float64
        return np.dtype(np.float64 if wide else np.float32)

    def quantize(
        self,
        weights: str | None = "int8",
        *,
        embeddings: str | None = None,
        activations: str = "dynamic",
        smooth: float | None = None,
        calibrate: Sequence[str] | None = None,
    ) -> Self:
        """Quantise the model in place, for inference; returns the encoder.

        Do not call it while other threads encode.

        Args:
            weights, embeddings, activations, smooth: see `PreTrainedModel.quantize`.
            calibrate: typical texts, for `smooth` and static activations.
        """
        run = None if calibrate is None else functools.partial(self.encode, calibrate)
        rows = {"activations": activations, "smooth": smooth, "calibrate": run}
        self.model.quantize(weights, embeddings=embeddings, **rows)
        return self

    def _forward(self, tokens: TokenBatch) -> np.ndarray:
        """(texts, width)."""
        raise NotImplementedError

    def encode_tokens(
        self,
        tokens: TokenBatch,
        *,
        batch_tokens: int = 8192,
        batch_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Embeddings of tokenised sentences; arguments as `encode`. Returns (sentences, width)."""
        out = np.empty((len(tokens.full_lengths), self.width), self.dtype)
        for batch, rows in self._batches(tokens, self._forward, batch_tokens, batch_size, progress):
            out[batch] = rows
        return out

    def _embed(
        self,
        given: list[Any],
        prompt: str,
        forward: Callable[[TokenBatch], Any],
        batch_tokens: int,
        batch_size: int | None,
        show_progress_bar: bool | None,
        on_long: str,
        progress: Callable[[int, int], None] | None,
        finite: Callable[[Any], np.ndarray] = finite_rows,
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """`_results` of texts, with a progress bar if it is asked for; see `SentenceEncoder.encode`."""
        if progress is not None and not callable(progress):
            raise TypeError(f"progress: {type(progress).__name__}; expected a function, or None")
        if show_progress_bar is None:
            show_progress_bar = _log.getEffectiveLevel() in (logging.INFO, logging.DEBUG)
        if show_progress_bar and sys.stderr.isatty():
            progress = bar(len(given), progress)
        return self._results(given, prompt, forward, batch_tokens, batch_size, on_long, progress, finite)

    def encode_query(self, sentences: Sequence[Text] | Text, **options: Any) -> Any:
        """`encode` with the prompt "query", or none without such a prompt; `options` may name another."""
        return self._encode_as(("query",), sentences, options)

    def encode_document(self, sentences: Sequence[Text] | Text, **options: Any) -> Any:
        """`encode` with the prompt "document", "passage" or "corpus", as `encode_query`."""
        return self._encode_as(("document", "passage", "corpus"), sentences, options)

    def _encode_as(self, names: Sequence[str], sentences: Any, options: dict[str, Any]) -> Any:
        if options.get("prompt") is None and options.get("prompt_name") is None:
            # Never the default prompt, as in sentence-transformers
            options = {**options, "prompt": next((self.prompts[n] for n in names if n in self.prompts), "")}
        return self.encode(sentences, **options)

    def similarity(self, embeddings1: Vectors, embeddings2: Vectors) -> torch.Tensor:
        """The similarity of every pair of embeddings, by `similarity_fn_name`.

        Args:
            embeddings1: (n, width), or (width,) for one embedding: an array, a tensor or nested lists.
            embeddings2: (m, width) or (width,), likewise.

        Returns:
            (n, m): the cosine of the angle, the dot product, or minus the Euclidean or Manhattan distance.

        Raises:
            ValueError: other shapes, or rows of different widths.
        """
        a, b = matrix("embeddings1", embeddings1), matrix("embeddings2", embeddings2)
        if a.shape[1] != b.shape[1]:
            raise ValueError(
                f"embeddings2: rows of {b.shape[1]} numbers; expected {a.shape[1]}, as in embeddings1"
            )
        dtype = torch.promote_types(a.dtype, b.dtype)
        return SIMILARITIES[self.similarity_fn_name](a.to(dtype), b.to(a.device, dtype))


def check_similarity(name: object) -> None:
    """Raise ValueError unless `name` is a similarity of two vectors."""
    if name not in [*SIMILARITIES]:
        raise ValueError(f"similarity_fn_name: {name!r}; expected one of {', '.join(SIMILARITIES)}")
