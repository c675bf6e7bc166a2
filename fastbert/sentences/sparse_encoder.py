"""Text to sparse embeddings over the vocabulary (SPLADE): the masked-LM head, activated and pooled.

With the logits l_t of the tokens t of a text, and f(l) = log(1 + max(l, 0)), applied log(1 + f(l)) by
activation "log1p_relu":

    max  y = max_t f(l_t)
    sum  y = Σ_t f(l_t)

The head reads `chunk_tokens` packed tokens at a time, and each chunk is pooled into the texts that it has
tokens of. So the logits of all tokens never exist at once. f never decreases, so "max" applies it last.

Source: Formal et al. 2021, "SPLADE v2" (max) and "SPLADE" (sum); Geng et al. 2024 (log1p_relu).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from fastbert.checkpoint.files import CheckpointError, read_json
from fastbert.layers import packing
from fastbert.models.auto import AutoModelForMaskedLM
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.ops.pooling import pooling as pool
from fastbert.sentences.embedder import Embedder, check_similarity
from fastbert.sentences.settings import (
    choice,
    expect_modules,
    module_settings,
    modules_of,
    positive,
    prompt_settings,
    text_settings,
)
from fastbert.sentences.similarity import SIMILARITIES, Vectors
from fastbert.sentences.text_model import Text, listed, load_model, opened, packed_tensors
from fastbert.sentences.tokenizer import TokenBatch, load_tokenizer

STRATEGIES = ("max", "sum")
ACTIVATIONS = ("relu", "log1p_relu")


class SparseEncoder(Embedder):
    """A masked-LM model, its tokenizer and SPLADE pooling, loaded once. Many threads may call `encode`.

    Args:
        model: a fastbert masked-LM model in eval mode, on its device.
        tokenizer: from the `tokenizers` library. Copied, so its padding and truncation do not change.
        pooling_strategy: "max" or "sum", over the tokens of a text.
        activation_function: "relu", or "log1p_relu" for a second logarithm.
        chunk_tokens: most tokens whose logits exist at once.
        max_active_dims: keep so many of the largest numbers of each embedding; None = all.
        similarity_fn_name: what `similarity` computes: "cosine", "dot", "euclidean" or "manhattan".
        max_length, lower_case, prompt, prompts, segments: as `SentenceEncoder`.

    Raises:
        TypeError: no masked-LM model, or no tokenizer; `from_pretrained` loads both from a directory.
        ValueError: an argument out of range.
    """

    model: BertForMaskedLM

    def __init__(
        self,
        model: BertForMaskedLM,
        tokenizer: Tokenizer | None = None,
        *,
        pooling_strategy: str = "max",
        activation_function: str = "relu",
        chunk_tokens: int = 1024,
        max_active_dims: int | None = None,
        max_length: int | None = None,
        lower_case: bool = False,
        prompt: str = "",
        prompts: dict[str, str] | None = None,
        segments: bool = True,
        similarity_fn_name: str = "dot",
    ) -> None:
        if not isinstance(model, BertForMaskedLM):
            raise TypeError(f"model: {type(model).__name__}; expected a fastbert masked-LM model")
        for name, value, known in (
            ("pooling_strategy", pooling_strategy, STRATEGIES),
            ("activation_function", activation_function, ACTIVATIONS),
        ):
            if value not in known:
                raise ValueError(f"{name}: {value!r}; expected one of {', '.join(known)}")
        check_similarity(similarity_fn_name)
        if type(chunk_tokens) is not int or chunk_tokens < 1:
            raise ValueError(f"chunk_tokens: {chunk_tokens!r}; expected an integer >= 1")
        _check_active(max_active_dims)
        super().__init__(model, tokenizer, max_length, lower_case, prompt, prompts, segments)
        self.pooling_strategy = pooling_strategy
        self.activation_function = activation_function
        self.chunk_tokens = chunk_tokens
        self.max_active_dims = max_active_dims
        self.similarity_fn_name = similarity_fn_name

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        max_active_dims: int | None = None,
        max_length: int | None = None,
        prompt: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Load a directory of sentence-transformers' SparseEncoder with SPLADE pooling.

        A directory without modules.json is read as a plain masked-LM model with the constructor's defaults.

        Args:
            directory: the folder (or a hub name, where huggingface_hub is installed).
            max_active_dims, max_length, prompt: override the directory's; None = the directory's.
            dtype: the weights' dtype; None = as the directory stores them.
            device: None = the first GPU if there is one, else the CPU.

        Raises:
            ValueError, FileNotFoundError: naming the file or argument, and what is wrong with it.
        """
        directory, device = opened(directory, device)
        transformer, pooling = directory, {}
        path = directory / "modules.json"
        modules = modules_of(directory)
        if modules is not None:
            first, second = expect_modules(
                path, modules, [("MLMTransformer", "SpladePooling"), ("Transformer", "SpladePooling")]
            )
            transformer, path = first.folder, second.folder / "config.json"
            pooling = read_json(path)
            task_path, own = module_settings(transformer)
            default = "fill-mask" if first.kind == "MLMTransformer" else "feature-extraction"
            choice(task_path, own, "transformer_task", ("fill-mask",), default)
        strategy = choice(path, pooling, "pooling_strategy", STRATEGIES, "max")
        activation = choice(path, pooling, "activation_function", ACTIVATIONS, "relu")
        chunk_tokens = positive(path, pooling, "chunk_size") or 1024
        settings_path = directory / "config_sentence_transformers.json"
        settings = read_json(settings_path) if settings_path.is_file() else {}
        says_prompt, prompts = prompt_settings(settings_path, settings)
        similarity = choice(settings_path, settings, "similarity_fn_name", [*SIMILARITIES], "dot")
        says_active = positive(settings_path, settings, "max_active_dims")
        tokenizer = load_tokenizer(transformer)
        says_length, lower_case, segments = text_settings(transformer)
        model, info = load_model(AutoModelForMaskedLM, transformer, dtype, device, output_loading_info=True)
        if info["missing_keys"]:
            raise CheckpointError(
                f"{transformer}: no weights for {', '.join(sorted(info['missing_keys']))}; "
                "expected a masked-LM model"
            )
        for key in ("embedding_dimension", "word_embedding_dimension"):
            width = positive(path, pooling, key)
            if width not in (None, model.config.vocab_size):
                raise ValueError(
                    f"{path}: {key} {width}; expected {model.config.vocab_size}, the model's vocab_size"
                )
        if max_length is None and says_length is not None:
            max_length = min(says_length, model.config.max_tokens)
        return cls(
            model,
            tokenizer,
            pooling_strategy=strategy,
            activation_function=activation,
            chunk_tokens=chunk_tokens,
            max_active_dims=says_active if max_active_dims is None else max_active_dims,
            max_length=max_length,
            lower_case=lower_case,
            prompt=says_prompt if prompt is None else prompt,
            prompts=prompts,
            segments=segments,
            similarity_fn_name=similarity,
        )

    @property
    def width(self) -> int:
        """Numbers in an embedding, one per token of the vocabulary."""
        return self.model.config.vocab_size

    def __repr__(self) -> str:
        config = self.model.config
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {config.num_hidden_layers} layers, "
            f"{self.width} dimensions, {self.pooling_strategy} of {self.activation_function}, at most "
            f"{self.max_length} tokens, on {self.device})"
        )

    def encode(
        self,
        sentences: Sequence[Text] | Text,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_tokens: int = 8192,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        max_active_dims: int | None = None,
        convert_to_sparse_tensor: bool = False,
        on_long: str = "truncate",
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray | Tensor:
        """Embed sentences, without gradients, in batches packed without padding. The order is kept.

        Args:
            max_active_dims: as in the constructor; None = the constructor's.
            convert_to_sparse_tensor: return a sparse tensor; only one batch is then ever dense.
            sentences, prompt_name, prompt, batch_tokens, batch_size, show_progress_bar, on_long, progress: as
                `SentenceEncoder.encode`.

        Returns:
            (len(sentences), vocab_size) float32 (float64 from a float64 model), (vocab_size,) for one text:
            an array, or a coalesced tensor in COO layout on the CPU.

        Raises:
            EncodingError: a sentence that cannot be encoded, or whose embedding is not finite, by index.
            TypeError: an element that is no text, pair or dict.
            ValueError: an argument out of range, or a model in training mode.
        """
        _check_active(max_active_dims)
        most = self.max_active_dims if max_active_dims is None else max_active_dims
        prompt = self._prompt_of(prompt, prompt_name)
        single = isinstance(sentences, (str, dict))
        given = [sentences] if single else listed("sentences", sentences)
        results = self._embed(
            given,
            prompt,
            lambda tokens: self._rows(tokens, most),
            batch_tokens,
            batch_size,
            show_progress_bar,
            on_long,
            progress,
            lambda rows: rows.isfinite().all(dim=1).cpu().numpy(),
        )
        shape = len(given), self.width
        if not convert_to_sparse_tensor:
            out = np.empty(shape, self.dtype)
            for batch, rows in results:
                out[batch] = rows.cpu().numpy()
            return out[0] if single else out
        places, values = [torch.empty((2, 0), dtype=torch.int64)], [torch.from_numpy(np.empty(0, self.dtype))]
        for batch, rows in results:
            text, token = rows.nonzero(as_tuple=True)
            values.append(rows[text, token].cpu())
            places.append(torch.stack([torch.from_numpy(batch)[text.cpu()], token.cpu()]))
        found = torch.sparse_coo_tensor(
            torch.cat(places, 1), torch.cat(values), shape, check_invariants=False
        ).coalesce()
        return found[0] if single else found

    def similarity(self, embeddings1: Vectors, embeddings2: Vectors) -> Tensor:
        """As `SentenceEncoder.similarity`; sparse tensors are made dense first."""
        dense = (
            x.to_dense() if isinstance(x, Tensor) and x.layout != torch.strided else x
            for x in (embeddings1, embeddings2)
        )
        return super().similarity(*dense)

    def _forward(self, tokens: TokenBatch) -> np.ndarray:
        return self._rows(tokens, self.max_active_dims).cpu().numpy()

    # no_grad, not inference_mode: what the model caches in this call stays usable under autograd
    @torch.no_grad()
    def _rows(self, tokens: TokenBatch, most: int | None) -> Tensor:
        """(texts, vocab_size) on the model's device, at most `most` numbers per row other than 0."""
        starts, device = tokens.starts, self.device
        compute = torch.float64 if self.dtype == np.float64 else torch.float32
        # f(l) >= 0, so 0 changes neither a maximum nor a sum
        out = torch.zeros((len(tokens.lengths), self.width), dtype=compute, device=device)
        if tokens.ids.size == 0:
            return out
        ids, cu_seqlens, max_seqlen, types = packed_tensors(tokens)
        hidden = self.model.base_model.forward_packed(ids, cu_seqlens, max_seqlen, types)  # (total, hidden)
        for first in range(0, hidden.shape[0], self.chunk_tokens):
            last = min(first + self.chunk_tokens, hidden.shape[0])
            logits = self.model.lm_logits(hidden[first:last])  # (chunk, vocab)
            # The texts that have tokens in the chunk
            begin = int(np.searchsorted(starts, first, side="right")) - 1
            end = int(np.searchsorted(starts, last, side="left"))
            ends = torch.from_numpy((starts[begin : end + 1].clip(first, last) - first).astype(np.int32))
            ends = packing.send(ends, device)
            rows = out[begin:end]
            if self.pooling_strategy == "max":
                torch.maximum(rows, pool(logits, ends, "max"), out=rows)
            else:
                rows += pool(self._activated(logits.to(compute)), ends, "mean") * ends.diff()[:, None]
        if self.pooling_strategy == "max":
            out = self._activated(out)
        if most is not None and most < self.width:
            top = out.topk(most, dim=1)
            out = torch.zeros_like(out).scatter_(1, top.indices, top.values)
        return out

    def _activated(self, x: Tensor) -> Tensor:
        """f(x), in place."""
        x = x.relu_().log1p_()
        return x.log1p_() if self.activation_function == "log1p_relu" else x


def _check_active(most: Any) -> None:
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"max_active_dims: {most!r}; expected an integer >= 1, or None")
