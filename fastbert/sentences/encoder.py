"""Text to embeddings: tokenise, sort by length, pack into batches, run, pool, put back in order.

A directory is a plain HuggingFace one (config.json, weights, tokenizer.json or vocab.txt), or one saved by
sentence-transformers, whose modules.json, pooling, Dense modules, normalisation, maximum length and default
prompt are used. What is not implemented (several pooling modes at once) is refused by name, not skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from fastbert.layers import packing, quantizing
from fastbert.layers.linear import apply_linear
from fastbert.models.auto import AutoModel
from fastbert.ops import checks
from fastbert.ops.pooling import MODES as POOLINGS
from fastbert.ops.pooling import pooling as pool
from fastbert.sentences.dense import ACTIVATIONS, read_dense, write_dense
from fastbert.sentences.embedder import Embedder, check_similarity
from fastbert.sentences.settings import SentenceSettings, save_settings, sentence_settings
from fastbert.sentences.similarity import PRECISIONS, quantized
from fastbert.sentences.text_model import Text, listed, load_model, opened, packed_tensors
from fastbert.sentences.tokenizer import TokenBatch, load_tokenizer


class SentenceEncoder(Embedder):
    """Model, tokenizer and pooling, loaded once. Many threads may call `encode` at the same time.

    Args:
        model: a fastbert encoder in eval mode, on its device; or any module with `config` and
            `forward_packed`, which is called with CPU tensors, and with first_token_only=True for pooling
            "cls".
        tokenizer: from the `tokenizers` library. Copied, so its padding and truncation do not change.
        pooling: "mean" (over all tokens, special ones included), "cls" (the last layer then computes the
            first tokens only), "max", "lasttoken", "mean_sqrt_len_tokens" or "weightedmean".
        normalize: scale each embedding to length 1; an all-zero one stays zero.
        max_length: most tokens of a sentence, special ones included; None = as many as the model allows.
        lower_case: convert the text to lower case before it is tokenised.
        prompt: text put before every sentence, if a call names no other.
        prompts: name -> prompt, for `encode(…, prompt_name=…)`, `encode_query` and `encode_document`.
        segments: whether token types (which text of a pair a token belongs to) are passed to the model, if
            it has segments.
        include_prompt: must be True where a prompt is used: pooling without the prompt's tokens is not
            implemented.
        similarity_fn_name: what `similarity` computes: "cosine", "dot", "euclidean" or "manhattan".
        dense: linear layers behind the pooling, each with the name of its activation ("tanh", "relu", "gelu",
            "silu") or None. `quantize` leaves them as they are.

    Raises:
        TypeError: no model, or no tokenizer; `from_pretrained` loads both from a directory.
        ValueError: an unknown pooling or similarity, or a max_length too large for the model or too small for
            one token.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        pooling: str = "mean",
        normalize: bool = False,
        max_length: int | None = None,
        lower_case: bool = False,
        prompt: str = "",
        prompts: dict[str, str] | None = None,
        segments: bool = True,
        include_prompt: bool = True,
        similarity_fn_name: str = "cosine",
        dense: Sequence[tuple[nn.Linear, str | None]] = (),
    ) -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"pooling: {pooling!r}; expected one of {', '.join(POOLINGS)}")
        check_similarity(similarity_fn_name)
        super().__init__(model, tokenizer, max_length, lower_case, prompt, prompts, segments)
        self.pooling = pooling
        self.normalize = normalize
        self.include_prompt = include_prompt
        self.similarity_fn_name = similarity_fn_name
        self.dense: list[tuple[nn.Linear, str | None]] = []
        known = [*ACTIVATIONS.values()]
        for place, pair in enumerate(dense):
            match pair:
                case (nn.Linear(in_features=self.width) as linear, activation) if activation in known:
                    self.dense.append((linear, activation))
                case _:
                    raise ValueError(
                        f"dense[{place}]: {pair!r}; expected (nn.Linear with {self.width} inputs, "
                        f"one of {', '.join(map(repr, known))})"
                    )

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
            dtype: the weights' dtype; None = as the directory stores them. Dense modules and pooling compute
                in float32, or in float64 in a float64 model.
            device: None = the first GPU if there is one, else the CPU.

        Raises:
            ValueError, FileNotFoundError: naming the file or argument, and what is wrong with it.
        """
        directory, device = opened(directory, device)
        settings = sentence_settings(
            directory, pooling=pooling, normalize=normalize, prompt=prompt, dense=True
        )
        tokenizer = load_tokenizer(settings.transformer)
        model = load_model(AutoModel, settings.transformer, dtype, device, add_pooling_layer=False)
        return cls.of(model, tokenizer, settings, max_length)

    @classmethod
    def of(cls, model: Any, tokenizer: Tokenizer, settings: SentenceSettings, max_length: int | None) -> Self:
        """The encoder of a model with settings; max_length None = theirs, at most what the model allows."""
        if max_length is None and settings.max_length is not None:
            max_length = min(settings.max_length, model.config.max_tokens)
        width, dense = model.config.hidden_size, []
        for folder in settings.dense:
            linear, activation = read_dense(folder, width)
            linear.to(model.device, torch.promote_types(model.dtype, torch.float32))
            dense.append((linear, activation))
            width = linear.out_features
        return cls(
            model,
            tokenizer,
            pooling=settings.pooling,
            normalize=settings.normalize,
            max_length=max_length,
            lower_case=settings.lower_case,
            prompt=settings.prompt,
            prompts=settings.prompts,
            include_prompt=settings.include_prompt,
            segments=settings.segments,
            similarity_fn_name=settings.similarity,
            dense=dense,
        )

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a directory that `from_pretrained` and sentence-transformers' SentenceTransformer load.

        It holds the model, the tokenizer, and pooling, Dense modules, normalisation, maximum length, prompt
        and similarity in sentence-transformers' files. Only fastbert reads the 8-bit weights of a quantised
        model. A reader finds each file either old or new, never half written.

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
        folders = tuple(directory / f"{2 + place}_Dense" for place in range(len(self.dense)))
        for folder, (linear, activation) in zip(folders, self.dense, strict=True):
            write_dense(folder, linear, activation)
        settings = SentenceSettings(
            directory,
            self.pooling,
            self.normalize,
            self.max_length,
            self.lower_case,
            self.prompt,
            self.similarity_fn_name,
            self.prompts,
            self.include_prompt,
            self.segments,
            folders,
        )
        config = self.model.config
        save_settings(settings, self._tokenizer, config.hidden_size, config.pad_token_id)

    @property
    def width(self) -> int:
        """Numbers in an embedding."""
        return self.dense[-1][0].out_features if self.dense else self.model.config.hidden_size

    def __repr__(self) -> str:
        model = self.model
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        kinds = zip(quantizing.kinds_of(model), ("layers", "words"), strict=True)
        kind = ", ".join(f"{bits} {what}" for bits, what in kinds if bits is not None)
        kind = f"{kind}, the rest " if kind else ""
        steps = "".join(f", Dense {linear.out_features} {name}" for linear, name in self.dense)
        steps += ", normalized" if self.normalize else ""
        return (
            f"{type(self).__name__}({type(model).__name__}, {model.config.num_hidden_layers} layers, "
            f"{self.width} dimensions, pooling {self.pooling}{steps}, "
            f"at most {self.max_length} tokens, {kind}{dtype} on {self.device})"
        )

    def _prompt_of(self, prompt: str | None, prompt_name: str | None) -> str:
        """The text before every sentence: `prompt`, or else `prompt_name`'s prompt, or else the default.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        prompt = super()._prompt_of(prompt, prompt_name)
        if prompt and not self.include_prompt:
            raise ValueError(
                f"prompt: {prompt!r}; the directory's pooling has include_prompt false, which is not "
                "implemented; expected no prompt"
            )
        return prompt

    def encode(
        self,
        sentences: Sequence[Text] | Text,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_tokens: int = 8192,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        precision: str = "float32",
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        on_long: str = "truncate",
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Embed sentences, without gradients, in batches packed without padding. The order is kept.

        Args:
            sentences: a sequence of texts, of pairs of texts, or of {"text": one of the two}. An empty text
                is encoded as its special tokens alone. One text, or one dict, is encoded as one vector.
            prompt_name: name, in `prompts`, of the text to put before every sentence.
            prompt: text put before every sentence (before the first text of a pair); "" for none. If
                neither prompt_name nor prompt is given, the default prompt is used.
            batch_tokens: most tokens in one batch; at least `max_length`.
            batch_size: most sentences in one batch; None = no limit but `batch_tokens`. The embeddings do
                not depend on it beyond rounding.
            show_progress_bar: True shows sentences, their rate and the time left on stderr if that is a
                terminal; False does not; None (sentence-transformers' rule) does if the level of the logger
                "fastbert" is INFO or DEBUG.
            precision: "float32"; "int8" or "uint8", 256 steps from the least to the largest number of each
                dimension over these sentences, at least two; "binary" or "ubinary", eight signs per int8 or
                uint8. As sentence-transformers' `quantize_embeddings`.
            normalize_embeddings: scale each embedding to length 1, after truncation.
            truncate_dim: keep so many leading numbers of each embedding; None = all.
            on_long: what to do with a sentence of more than `max_length` tokens: "truncate" or "error".
            progress: called after each batch with the numbers of its sentences and tokens.

        Returns:
            (len(sentences), width) float32 (float64 from a float64 model), or as `precision` and
            `truncate_dim` say; (width,) for one text.

        Raises:
            EncodingError: a sentence that cannot be encoded, or whose embedding is not finite, by index.
            TypeError: an element that is no text, pair or dict.
            ValueError: an argument out of range, or a model in training mode.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"precision: {precision!r}; expected one of {', '.join(PRECISIONS)}")
        if truncate_dim is not None and (type(truncate_dim) is not int or not 0 < truncate_dim <= self.width):
            raise ValueError(f"truncate_dim: {truncate_dim!r}; expected an integer from 1 to {self.width}")
        prompt = self._prompt_of(prompt, prompt_name)
        single = isinstance(sentences, (str, dict))
        given = [sentences] if single else listed("sentences", sentences)
        out = np.empty((len(given), self.width), self.dtype)
        results = self._embed(
            given, prompt, self._forward, batch_tokens, batch_size, show_progress_bar, on_long, progress
        )
        for batch, rows in results:
            out[batch] = rows
        out = out[:, :truncate_dim]
        if normalize_embeddings:
            out = torch.nn.functional.normalize(torch.from_numpy(out), dim=1).numpy()
        out = quantized(out, precision)
        return out[0] if single else out

    # no_grad, not inference_mode: what the model caches in this call stays usable under autograd
    @torch.no_grad()
    def _forward(self, tokens: TokenBatch) -> np.ndarray:
        ids, cu_seqlens, max_seqlen, types = packed_tensors(tokens)
        # All on the host: the forward needs no GPU sync before its result
        packed = (ids, cu_seqlens, max_seqlen) if types is None else (ids, cu_seqlens, max_seqlen, types)
        if tokens.ids.size == 0:
            # All sentences are empty, and the tokenizer adds no special tokens
            shape = len(tokens.lengths), self.model.config.hidden_size
            rows = torch.from_numpy(np.zeros(shape, self.dtype))
        elif self.pooling == "cls":
            rows = self.model.forward_packed(*packed, first_token_only=True)  # (sentences, hidden)
        else:
            hidden = self.model.forward_packed(*packed)  # (total, hidden)
            rows = pool(hidden, packing.send(cu_seqlens, hidden.device), self.pooling)
        for linear, activation in self.dense:
            rows = apply_linear(linear, rows.to(linear.weight), activation)
        rows = rows.to(checks.compute_dtype(rows))
        if self.normalize:
            rows = torch.nn.functional.normalize(rows, dim=1)
        return rows.cpu().numpy()


def encode(
    model: str | Path | SentenceEncoder,
    sentences: Sequence[Text] | Text,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_tokens: int = 8192,
    batch_size: int | None = None,
    show_progress_bar: bool | None = None,
    precision: str = "float32",
    normalize_embeddings: bool = False,
    truncate_dim: int | None = None,
    on_long: str = "truncate",
) -> np.ndarray:
    """Embed sentences with the model of a directory: (len(sentences), width) float32, in their order.

    Args:
        model: a HuggingFace or sentence-transformers directory, loaded for this one call; or a
            `SentenceEncoder`, which has its own settings, so that none may be passed here.
        pooling, normalize, max_length, dtype, device: as `SentenceEncoder.from_pretrained`.
        sentences, prompt_name, prompt, batch_tokens, batch_size, show_progress_bar, precision,
            normalize_embeddings, truncate_dim, on_long: as `SentenceEncoder.encode`.

    Raises:
        ValueError, TypeError, FileNotFoundError: as those two methods.
    """
    settings = {
        "pooling": pooling,
        "normalize": normalize,
        "max_length": max_length,
        "dtype": dtype,
        "device": device,
    }
    if isinstance(model, SentenceEncoder):
        given = [name for name, value in settings.items() if value is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: settings of a SentenceEncoder belong in its constructor")
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
        prompt_name=prompt_name,
        prompt=prompt,
        batch_tokens=batch_tokens,
        batch_size=batch_size,
        show_progress_bar=show_progress_bar,
        precision=precision,
        normalize_embeddings=normalize_embeddings,
        truncate_dim=truncate_dim,
        on_long=on_long,
    )
