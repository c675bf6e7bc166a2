"""Text to embeddings: tokenise, sort by length, pack into batches, run, pool, put back in order.

A directory is a plain HuggingFace one (config.json, weights, tokenizer.json or vocab.txt), or one saved by
sentence-transformers: then its modules.json, pooling, normalisation, maximum length and default prompt are
obeyed. What is not implemented (a Dense module, some pooling modes) is refused by name, not skipped.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.checkpoint import hub
from fastbert.layers import packing
from fastbert.layers import quantized as quantization
from fastbert.models.auto import AutoModel
from fastbert.ops import checks
from fastbert.ops.pooling import MODES as POOLINGS
from fastbert.ops.pooling import pooling as pool
from fastbert.sentences.progress import bar
from fastbert.sentences.settings import SentenceSettings, save_settings, sentence_settings
from fastbert.sentences.similarity import SIMILARITIES, matrix
from fastbert.sentences.tokenizer import (
    EncodingError,
    TokenBatch,
    load_tokenizer,
    pack_batches,
    tokenize,
)

if TYPE_CHECKING:
    from typing import Self

    from fastbert.sentences.similarity import Vectors

_log = logging.getLogger("fastbert")

# Sentences tokenised at a time: bounds the memory of the token ids
_SLICE = 32_768


class SentenceEncoder:
    """Model, tokenizer and pooling, loaded once. Many threads may call `encode` at the same time.

    Args:
        model: a fastbert encoder in eval mode, on its device; or any module with `config` and
            `forward_packed`. That is called with CPU tensors, for pooling "cls" with first_token_only=True.
        tokenizer: of the `tokenizers` library. Copied, so its padding and truncation do not change.
        pooling: "mean" (over all tokens, special ones included), "cls" (the last layer then computes the
            first tokens only) or "max".
        normalize: scale each embedding to length 1; an all-zero one stays zero.
        max_length: most tokens of a sentence, special ones included; None = as many as the model allows.
        lower_case: convert the text to lower case before it is tokenised.
        prompt: text put before every sentence.
        similarity_fn_name: what `similarity` computes: "cosine", "dot", "euclidean" or "manhattan".

    Raises:
        ValueError: an unknown pooling or similarity, or a max_length too large for the model or too small for
            one token.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        *,
        pooling: str = "mean",
        normalize: bool = False,
        max_length: int | None = None,
        lower_case: bool = False,
        prompt: str = "",
        similarity_fn_name: str = "cosine",
    ) -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"pooling: {pooling!r}; expected one of {', '.join(POOLINGS)}")
        if similarity_fn_name not in SIMILARITIES:
            raise ValueError(
                f"similarity_fn_name: {similarity_fn_name!r}; expected one of {', '.join(SIMILARITIES)}"
            )
        limit = model.config.max_tokens
        max_length = limit if max_length is None else max_length
        special = tokenizer.num_special_tokens_to_add(False)
        if type(max_length) is not int or not special < max_length <= limit:
            raise ValueError(
                f"max_length: {max_length!r}; expected an integer from {special + 1} ({special} special "
                f"tokens and one more) to {limit} (what the model has positions for)"
            )
        self.model = model
        self.pooling = pooling
        self.normalize = normalize
        self.max_length = max_length
        self.lower_case = lower_case
        self.prompt = prompt
        self.similarity_fn_name = similarity_fn_name
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length)  # keeps the special tokens

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        max_length: int | None = None,
        prompt: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Load a HuggingFace or sentence-transformers directory.

        Args:
            directory: the folder (or a hub name, where huggingface_hub is installed).
            pooling, normalize, max_length, prompt: override the directory's; None = the directory's (see
                `sentence_settings`).
            dtype: of the weights; None = as the directory stores them.
            device: None = the first GPU if there is one, else the CPU.

        Raises:
            ValueError, FileNotFoundError: naming the file or argument, and what is wrong with it.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        directory = hub.resolve(directory)
        settings = sentence_settings(directory, pooling=pooling, normalize=normalize, prompt=prompt)
        tokenizer = load_tokenizer(settings.transformer)
        model = AutoModel.from_pretrained(
            settings.transformer,
            dtype="auto" if dtype is None else dtype,
            device=device,
            add_pooling_layer=False,
        )
        if max_length is None and settings.max_length is not None:
            max_length = min(settings.max_length, model.config.max_tokens)
        return cls(
            model,
            tokenizer,
            pooling=settings.pooling,
            normalize=settings.normalize,
            max_length=max_length,
            lower_case=settings.lower_case,
            prompt=settings.prompt,
            similarity_fn_name=settings.similarity,
        )

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a directory that `from_pretrained` and sentence-transformers' SentenceTransformer load.

        It holds the model, the tokenizer, and pooling, normalisation, maximum length, prompt and similarity
        in sentence-transformers' files. Only fastbert reads the 8-bit weights of a quantised model. A reader
        finds each file either old or new, never half written.

        Args:
            directory: the folder; created if it is missing.

        Raises:
            TypeError: the model cannot be saved.
            OSError: naming the file that cannot be written.
        """
        if not hasattr(self.model, "save_pretrained"):
            raise TypeError(
                f"model: {type(self.model).__name__} has no save_pretrained; expected a fastbert model"
            )
        directory = Path(directory)
        self.model.save_pretrained(directory)
        settings = SentenceSettings(
            directory,
            self.pooling,
            self.normalize,
            self.max_length,
            self.lower_case,
            self.prompt,
            self.similarity_fn_name,
        )
        save_settings(settings, self._tokenizer, self.width, self.model.config.pad_token_id)

    def quantize(self, dtype: str = "int8") -> Self:
        """Quantise the model in place, for inference on a CPU; returns the encoder.

        Do not call it while other threads encode.
        """
        self.model.quantize(dtype)
        return self

    @property
    def width(self) -> int:
        """Numbers in an embedding."""
        return self.model.config.hidden_size

    def get_embedding_dimension(self) -> int:
        """Numbers in an embedding; sentence-transformers' name of `width`."""
        return self.width

    def get_sentence_embedding_dimension(self) -> int:
        """Numbers in an embedding; the name of `width` before sentence-transformers 6."""
        return self.width

    def __repr__(self) -> str:
        model = self.model
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        kind = "int8 layers, the rest " if quantization.is_quantized(model) else ""
        return (
            f"{type(self).__name__}({type(model).__name__}, {model.config.num_hidden_layers} layers, "
            f"{self.width} dimensions, pooling {self.pooling}{', normalized' if self.normalize else ''}, "
            f"at most {self.max_length} tokens, {kind}{dtype} on {self.device})"
        )

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the embeddings: float64 from a float64 model, else float32."""
        wide = next(self.model.parameters()).dtype == torch.float64
        return np.dtype(np.float64 if wide else np.float32)

    def tokenize(self, sentences: Sequence[str]) -> TokenBatch:
        """Token ids, truncated to `max_length`; white space around a sentence is ignored.

        Raises:
            EncodingError: text that is not valid Unicode, or a token that the model has no embedding for.
            TypeError: an element that is no str.
        """
        for index, text in enumerate(sentences):
            if not isinstance(text, str):
                raise TypeError(f"sentences[{index}]: {type(text).__name__}; expected str")
        texts = [(self.prompt + text).strip() for text in sentences]
        if self.lower_case:
            texts = [text.lower() for text in texts]
        return tokenize(self._tokenizer, texts, self.model.config.vocab_size)

    def encode_tokens(
        self,
        tokens: TokenBatch,
        *,
        batch_tokens: int = 8192,
        batch_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Embeddings of tokenised sentences; arguments as `encode`. Returns (sentences, width)."""
        self.check_batch_tokens(batch_tokens)
        _check_batch_size(batch_size)
        out = np.empty((len(tokens.full_lengths), self.width), self.dtype)
        lengths = tokens.lengths
        for batch in pack_batches(lengths, batch_tokens, batch_size):
            pieces = [tokens.ids[tokens.starts[i] : tokens.starts[i + 1]] for i in batch]
            rows = self._forward(np.concatenate(pieces), lengths[batch])
            bad = ~np.isfinite(rows).all(axis=1)
            if bad.any():
                raise EncodingError(int(batch[bad].min()), "the embedding is not finite")
            out[batch] = rows
            if progress is not None:
                progress(len(batch), int(lengths[batch].sum()))
        return out

    def encode(
        self,
        sentences: Sequence[str],
        *,
        batch_tokens: int = 8192,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        on_long: str = "truncate",
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Embed sentences, without gradients, in batches packed without padding. The order is kept.

        Args:
            sentences: texts. An empty one is encoded as its special tokens alone.
            batch_tokens: most tokens in one batch; at least `max_length`.
            batch_size: most sentences in one batch; None = no limit but `batch_tokens`. The embeddings do
                not depend on it beyond rounding.
            show_progress_bar: True shows sentences, their rate and the time left on stderr if that is a
                terminal; False does not; None (sentence-transformers' rule) does if the level of the logger
                "fastbert" is INFO or DEBUG.
            on_long: what to do with a sentence of more than `max_length` tokens: "truncate" or "error".
            progress: called after each batch with the numbers of its sentences and tokens.

        Returns:
            (len(sentences), width) float32 (float64 from a float64 model).

        Raises:
            EncodingError: a sentence that cannot be encoded, or whose embedding is not finite, by index.
            TypeError: `sentences` is a str, or an element is no str.
            ValueError: an argument out of range, or a model in training mode.
        """
        if isinstance(sentences, str):
            raise TypeError("sentences: a str; expected a sequence of str")
        if on_long not in ("truncate", "error"):
            raise ValueError(f"on_long: {on_long!r}; expected 'truncate' or 'error'")
        self.check_batch_tokens(batch_tokens)
        _check_batch_size(batch_size)
        sentences = list(sentences)
        out = np.empty((len(sentences), self.width), self.dtype)
        if show_progress_bar is None:
            show_progress_bar = _log.getEffectiveLevel() in (logging.INFO, logging.DEBUG)
        if show_progress_bar and sys.stderr.isatty():
            progress = bar(len(sentences), progress)
        for first in range(0, len(sentences), _SLICE):
            try:
                tokens = self.tokenize(sentences[first : first + _SLICE])
                if on_long == "error" and tokens.truncated.size:
                    raise self.too_long(tokens)
                rows = self.encode_tokens(
                    tokens, batch_tokens=batch_tokens, batch_size=batch_size, progress=progress
                )
                out[first : first + _SLICE] = rows
            except EncodingError as error:
                raise EncodingError(first + error.index, error.problem) from None
        return out

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

    def too_long(self, tokens: TokenBatch) -> EncodingError:
        """The error for the first sentence that lost tokens."""
        index = int(tokens.truncated[0])
        return EncodingError(index, f"{tokens.full_lengths[index]} tokens; at most {self.max_length} fit")

    def check_batch_tokens(self, batch_tokens: int) -> None:
        """Raise ValueError if `encode` would refuse `batch_tokens` or the model's mode."""
        # Switching the mode here would race with other threads
        if self.model.training:
            raise ValueError("model: in training mode, where dropout acts; call model.eval() first")
        if type(batch_tokens) is not int or batch_tokens < self.max_length:
            raise ValueError(
                f"batch_tokens: {batch_tokens!r}; expected an integer >= max_length = {self.max_length}"
            )

    # no_grad, not inference_mode: what the model caches in this call stays usable under autograd
    @torch.no_grad()
    def _forward(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        # The tokenizer has no special tokens, and all sentences are empty
        if ids.size == 0:
            return np.zeros((len(lengths), self.width), self.dtype)
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        # both on the host: nothing waits for a GPU before its result
        packed = (torch.from_numpy(ids), cu_seqlens, int(lengths.max()))
        if self.pooling == "cls":
            rows = self.model.forward_packed(*packed, first_token_only=True)  # (sentences, hidden)
            rows = rows.to(checks.compute_dtype(rows))
        else:
            hidden = self.model.forward_packed(*packed)  # (total, hidden)
            rows = pool(hidden, packing.send(cu_seqlens, hidden.device), self.pooling)
        if self.normalize:
            rows = torch.nn.functional.normalize(rows, dim=1)
        return rows.cpu().numpy()


def _check_batch_size(batch_size: int | None) -> None:
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(f"batch_size: {batch_size!r}; expected an integer >= 1, or None")


def encode(
    model: str | Path | SentenceEncoder,
    sentences: Sequence[str],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    prompt: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    batch_tokens: int = 8192,
    batch_size: int | None = None,
    show_progress_bar: bool | None = None,
    on_long: str = "truncate",
) -> np.ndarray:
    """Embed sentences with the model of a directory: (len(sentences), width) float32, in their order.

    Args:
        model: a HuggingFace or sentence-transformers directory, loaded for this one call; or a
            `SentenceEncoder`, which has its settings already: then none may be given here.
        sentences, batch_tokens, batch_size, show_progress_bar, on_long: as `SentenceEncoder.encode`.
        pooling, normalize, max_length, prompt, dtype, device: as `SentenceEncoder.from_pretrained`.

    Raises:
        ValueError, TypeError, FileNotFoundError: as those two methods.
    """
    settings = {
        "pooling": pooling,
        "normalize": normalize,
        "max_length": max_length,
        "prompt": prompt,
        "dtype": dtype,
        "device": device,
    }
    if isinstance(model, SentenceEncoder):
        given = [name for name, value in settings.items() if value is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: settings of a SentenceEncoder are given when it is made")
        encoder = model
    elif isinstance(model, (str, Path)):
        encoder = SentenceEncoder.from_pretrained(model, **settings)
    else:
        raise TypeError(
            f"model: {type(model).__name__}; expected a directory or a SentenceEncoder "
            "(make one of a module and its tokenizer: SentenceEncoder(module, tokenizer))"
        )
    return encoder.encode(
        sentences,
        batch_tokens=batch_tokens,
        batch_size=batch_size,
        show_progress_bar=show_progress_bar,
        on_long=on_long,
    )
