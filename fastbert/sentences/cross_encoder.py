"""Pairs of texts to scores: a sequence classifier that reads both texts at once (re-ranking, entailment).

A directory is a plain HuggingFace one, or one saved by sentence-transformers, whose activation, maximum
length and prompts are used. Other modules than the classifier are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.checkpoint.files import cause, read_json
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.ops import checks
from fastbert.sentences.settings import prompt_settings, text_settings
from fastbert.sentences.text_model import Text, TextModel, listed, load_model, opened, packed_tensors
from fastbert.sentences.tokenizer import TokenBatch, load_tokenizer

Activation = Callable[[torch.Tensor], torch.Tensor]


class CrossEncoder(TextModel):
    """A sequence classifier and its tokenizer, loaded once. Many threads may call it at the same time.

    Args:
        model: a fastbert sequence classifier in eval mode, on its device.
        tokenizer: from the `tokenizers` library. Copied, so its padding and truncation do not change.
        activation_fn: logits (batch, num_labels) -> scores; None = a sigmoid for one label, else none.
        max_length: most tokens of a pair, special ones included; None = as many as the model allows.
        lower_case: convert the texts to lower case before they are tokenised.
        prompt: text put before the first text of every pair, if a call names no other.
        prompts: name -> prompt, for `prompt_name`.
        segments: whether token types (which text of a pair a token belongs to) are passed to the model, if
            it has segments.

    Raises:
        TypeError: no model, or no tokenizer; `from_pretrained` loads both from a directory.
        ValueError: a max_length too large for the model or too small for one token.
    """

    _result: ClassVar[str] = "score"
    model: BertForSequenceClassification

    def __init__(
        self,
        model: BertForSequenceClassification,
        tokenizer: Tokenizer | None = None,
        *,
        activation_fn: Activation | None = None,
        max_length: int | None = None,
        lower_case: bool = False,
        prompt: str = "",
        prompts: dict[str, str] | None = None,
        segments: bool = True,
    ) -> None:
        super().__init__(model, tokenizer, max_length, lower_case, prompt, prompts, segments)
        if not isinstance(model, BertForSequenceClassification):
            raise TypeError(f"model: {type(model).__name__}; expected a fastbert sequence classifier")
        _check_activation(activation_fn)
        if activation_fn is None:
            activation_fn = torch.nn.Sigmoid() if model.num_labels == 1 else torch.nn.Identity()
        self.activation_fn = activation_fn

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        num_labels: int | None = None,
        activation_fn: Activation | None = None,
        max_length: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Load a HuggingFace or sentence-transformers directory.

        Args:
            directory: the folder (or a hub name, where huggingface_hub is installed).
            num_labels, activation_fn, max_length: override the directory's; None = the directory's.
            dtype: the weights' dtype; None = as the directory stores them.
            device: None = the first GPU if there is one, else the CPU.

        Raises:
            ValueError, FileNotFoundError: naming the file or argument, and what is wrong with it.
        """
        directory, device = opened(directory, device)
        transformer = _transformer_of(directory)
        path = directory / "config_sentence_transformers.json"
        settings = read_json(path) if path.is_file() else {}
        prompt, prompts = prompt_settings(path, settings)
        overrides: dict[str, Any] = {} if num_labels is None else {"num_labels": num_labels}
        model = load_model(AutoModelForSequenceClassification, transformer, dtype, device, **overrides)
        says_length, lower_case, segments = text_settings(transformer)
        if max_length is None and says_length is not None:
            max_length = min(says_length, model.config.max_tokens)
        if activation_fn is None:
            # sentence-transformers 6, 4 and 5, and before 4
            named = (
                settings.get("activation_fn")
                or _older_settings(transformer, model.config).get("activation_fn")
                or model.config.get("sbert_ce_default_activation_function")
            )
            activation_fn = None if named is None else _activation(directory, named, model.num_labels)
        return cls(
            model,
            load_tokenizer(transformer),
            activation_fn=activation_fn,
            max_length=max_length,
            lower_case=lower_case,
            prompt=prompt,
            prompts=prompts,
            segments=segments,
        )

    def __repr__(self) -> str:
        config = self.model.config
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {config.num_hidden_layers} layers, "
            f"{config.num_labels} labels, {self.activation_fn!r}, at most {self.max_length} tokens, "
            f"on {self.device})"
        )

    def predict(
        self,
        pairs: Sequence[Text] | Text | np.ndarray,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        activation_fn: Activation | None = None,
        apply_softmax: bool = False,
        batch_tokens: int = 8192,
        batch_size: int | None = None,
        on_long: str = "truncate",
    ) -> np.ndarray:
        """Score pairs of texts, without gradients, in batches packed without padding. The order is kept.

        Args:
            pairs: a sequence or array of pairs of texts, or of {"text": a pair}; or one pair, or one dict.
            prompt_name: name, in `prompts`, of the text to put before the first text of every pair.
            prompt: that text itself; "" for none. If neither prompt_name nor prompt is given, the default
                prompt is used.
            activation_fn: as in the constructor; None = the constructor's.
            apply_softmax: a softmax over the labels, after the activation; nothing where there is one label.
            batch_tokens: most tokens in one batch; at least `max_length`.
            batch_size: most pairs in one batch; None = no limit but `batch_tokens`.
            on_long: what to do with a pair of more than `max_length` tokens: "truncate" (the longer text
                first) or "error".

        Returns:
            (len(pairs),) float32, or (len(pairs), num_labels) if there are several labels; for one pair its
            entry.

        Raises:
            EncodingError: a pair that cannot be encoded, or whose score is not finite, by index.
            TypeError: an element that is no pair.
            ValueError: an argument out of range, or a model in training mode.
        """
        _check_activation(activation_fn)
        prompt = self._prompt_of(prompt, prompt_name)
        labels = self.model.num_labels
        pairs = pairs.tolist() if isinstance(pairs, np.ndarray) else pairs
        single = isinstance(pairs, dict) or (
            isinstance(pairs, (list, tuple)) and len(pairs) > 0 and isinstance(pairs[0], str)
        )
        given = [pairs] if single else listed("pairs", pairs)
        out = np.empty((len(given),) if labels == 1 else (len(given), labels), np.float32)
        for index, pair in enumerate(given):
            inner = pair.get("text") if isinstance(pair, dict) else pair
            if isinstance(inner, str):
                raise TypeError(f"pairs[{index}]: a str; expected a pair of texts")

        def forward(tokens: TokenBatch) -> np.ndarray:
            return self._forward(tokens, activation_fn or self.activation_fn, apply_softmax)

        results = self._results(given, prompt, forward, batch_tokens, batch_size, on_long)
        for batch, rows in results:
            out[batch] = rows
        return out[0] if single else out

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Sort documents by their score for a query, the highest first.

        Args:
            query: the first text of every pair.
            documents: the second texts.
            top_k: how many to return; None = all.
            return_documents: also return the texts.
            options: as `predict`.

        Returns:
            For each document {"corpus_id": its index, "score": float}, and with return_documents "text".

        Raises:
            TypeError: a query or a document that is no text.
            ValueError: the model has several labels; or as `predict`.
        """
        if self.model.num_labels != 1:
            raise ValueError(
                f"rank: the model has {self.model.num_labels} labels; expected one. Call predict, and sort "
                "by the label that you want"
            )
        if not isinstance(query, str):
            raise TypeError(f"query: {type(query).__name__}; expected str")
        if top_k is not None and (type(top_k) is not int or top_k < 0):
            raise ValueError(f"top_k: {top_k!r}; expected an integer >= 0, or None")
        documents = listed("documents", documents)
        wrong = next((i for i, text in enumerate(documents) if not isinstance(text, str)), None)
        if wrong is not None:
            raise TypeError(f"documents[{wrong}]: {type(documents[wrong]).__name__}; expected str")
        scores = self.predict([(query, document) for document in documents], **options)
        order = np.argsort(-scores, kind="stable")[:top_k].tolist()
        found: list[dict[str, Any]] = [{"corpus_id": i, "score": float(scores[i])} for i in order]
        if return_documents:
            for entry in found:
                entry["text"] = documents[entry["corpus_id"]]
        return found

    # no_grad, not inference_mode: what the model caches in this call stays usable under autograd
    @torch.no_grad()
    def _forward(self, tokens: TokenBatch, activation_fn: Activation, apply_softmax: bool) -> np.ndarray:
        ids, cu_seqlens, max_seqlen, types = packed_tensors(tokens)
        logits = self.model(ids, token_type_ids=types, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen).logits
        scores = _scores(activation_fn, logits.to(checks.compute_dtype(logits)))
        if self.model.num_labels == 1:
            scores = scores.squeeze(-1)
        elif apply_softmax:
            scores = torch.nn.functional.softmax(scores, dim=1)
        return scores.float().cpu().numpy()


def _transformer_of(directory: Path) -> Path:
    """The folder of the classifier; ValueError for other modules beside it."""
    path = directory / "modules.json"
    if not path.is_file():
        return directory
    modules = read_json(path, list)
    kinds = [str(m.get("type")).rpartition(".")[2] if isinstance(m, dict) else repr(m) for m in modules]
    if kinds != ["Transformer"] or modules[0].get("path", "") not in ("", "."):
        raise ValueError(
            f"{path}: modules {', '.join(kinds) or 'none'}; expected one Transformer in the same folder"
        )
    return directory


def _activation(directory: Path, name: object, labels: int) -> Activation:
    """The activation of torch.nn that a file names; no other code is imported."""
    found = getattr(torch.nn, str(name).rpartition(".")[2], None)
    is_module = isinstance(found, type) and issubclass(found, torch.nn.Module)
    if found is None or not is_module or f"{found.__module__}.{found.__name__}" != name:
        raise ValueError(
            f"{directory}: activation_fn {name!r}; expected one of torch.nn's, such as "
            "'torch.nn.modules.activation.Sigmoid'; pass activation_fn="
        )
    try:
        activation = found()
        _scores(activation, torch.zeros(2, labels))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{directory}: activation_fn {name!r}: is no activation ({error})") from error
    return activation


def _check_activation(given: Any) -> None:
    if given is not None and (isinstance(given, type) or not callable(given)):
        raise TypeError(f"activation_fn: {given!r}; expected a function of a tensor, or None")


def _scores(activation_fn: Activation, logits: torch.Tensor) -> torch.Tensor:
    """The scores of logits (batch, num_labels), of the same shape. Raises ValueError for others."""
    try:
        scores = activation_fn(logits)
    except Exception as error:
        raise ValueError(f"activation_fn: {activation_fn!r} failed: {cause(error)}") from error
    if not isinstance(scores, torch.Tensor) or scores.shape != logits.shape:
        what = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise ValueError(f"activation_fn: expected scores {tuple(logits.shape)}, got {what}")
    return scores


def _older_settings(directory: Path, config: EncoderConfig) -> dict[str, Any]:
    """What sentence-transformers before version 6 wrote into config.json."""
    found = config.get("sentence_transformers") or {}
    if not isinstance(found, dict):
        raise ValueError(
            f"{directory / 'config.json'}: sentence_transformers: expected an object, got {found!r}"
        )
    return found
