"""The base of what encodes texts: a model, its tokenizer, prompts, batches of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.checkpoint import hub
from fastbert.models.base import PreTrainedModel
from fastbert.runtime.devices import device_of
from fastbert.sentences.tokenizer import EncodingError, TokenBatch, pack_batches, tokenize

# Texts tokenised at a time: bounds the memory of the token ids
SLICE = 32_768

# A text, a pair of texts, or {"text": one of the two}
Text = str | Sequence[str] | dict[str, Any]


def finite_rows(rows: np.ndarray) -> np.ndarray:
    """(texts, …) -> (texts,) bool: whether all numbers of a row are finite."""
    return np.asarray(np.isfinite(rows).reshape(len(rows), -1).all(axis=1))


class TextModel:
    """A model and its tokenizer, loaded once. Many threads may call it at the same time.

    Args:
        model: a fastbert model in eval mode, on its device.
        tokenizer: from the `tokenizers` library. Copied, so its padding and truncation do not change.
        max_length: most tokens of a text, special ones included; None = as many as the model allows.
        lower_case: convert the text to lower case before it is tokenised.
        prompt: text put before every text, if a call names no other.
        prompts: name -> prompt, for `prompt_name`.
        segments: whether token types (which text of a pair a token belongs to) are passed to the model, if
            it has segments.

    Raises:
        TypeError: no model, or no tokenizer.
        ValueError: a max_length too large for the model or too small for one token.
    """

    # What is computed per text
    _result: ClassVar[str] = "embedding"
    model: Any

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer | None,
        max_length: int | None,
        lower_case: bool,
        prompt: str,
        prompts: dict[str, str] | None,
        segments: bool,
    ) -> None:
        loads = f"{type(self).__name__}.from_pretrained(directory) loads both"
        if not hasattr(model, "config"):
            raise TypeError(f"model: {type(model).__name__}; expected a fastbert model; {loads}")
        if not isinstance(tokenizer, Tokenizer):
            raise TypeError(
                f"tokenizer: {type(tokenizer).__name__}; expected a tokenizers.Tokenizer; {loads}"
            )
        if not isinstance(prompt, str):
            raise TypeError(f"prompt: {type(prompt).__name__}; expected str")
        if prompts is not None and not are_prompts(prompts):
            raise TypeError(f"prompts: {prompts!r}; expected a dict of texts, or None")
        self.model = model
        limit = self.model.config.max_tokens
        max_length = limit if max_length is None else max_length
        special = tokenizer.num_special_tokens_to_add(False)
        if type(max_length) is not int or not special < max_length <= limit:
            raise ValueError(
                f"max_length: {max_length!r}; expected an integer from {special + 1} ({special} special "
                f"tokens and one more) to {limit} (what the model has positions for)"
            )
        self.max_length = max_length
        self.lower_case = lower_case
        self.prompt = prompt
        self.prompts = dict(prompts or {})
        self.segments: bool = segments and self.model.config.family.segments
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length)  # keeps the special tokens

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        return next(self.model.parameters()).device

    def _prompt_of(self, prompt: str | None, prompt_name: str | None) -> str:
        """The prompt before every text: `prompt`, or else `prompt_name`'s, or else the default.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        if prompt is not None and prompt_name is not None:
            raise ValueError(f"prompt, prompt_name: {prompt!r} and {prompt_name!r}; expected one of the two")
        if prompt_name is not None:
            if not isinstance(prompt_name, str) or prompt_name not in self.prompts:
                names = ", ".join(self.prompts) or "none"
                raise ValueError(f"prompt_name: {prompt_name!r}; expected one of the directory's: {names}")
            prompt = self.prompts[prompt_name]
        if prompt is not None and not isinstance(prompt, str):
            raise TypeError(f"prompt: {type(prompt).__name__}; expected str or None")
        return self.prompt if prompt is None else prompt

    def tokenize(self, sentences: Sequence[Any], prompt: str | None = None) -> TokenBatch:
        """Token ids, truncated to `max_length`; white space around a text is ignored.

        Args:
            sentences: texts, pairs of texts, or {"text": one of the two}.
            prompt: text put before every text (before the first text of a pair); None = the default.

        Raises:
            EncodingError: text that is not valid Unicode, or a token that the model has no embedding for.
            TypeError: no sequence, or an element that is no text, pair or dict.
        """
        prompt = self._prompt_of(prompt, None)
        texts = []
        for index, given in enumerate(listed("sentences", sentences)):
            first, *second = _parts(index, given)
            parts = [text.strip() for text in (prompt + first, *second)]
            parts = [text.lower() for text in parts] if self.lower_case else parts
            texts.append(tuple(parts) if second else parts[0])
        tokens = tokenize(self._tokenizer, texts, self.model.config.vocab_size)
        if not self.segments:
            return replace(tokens, types=None)
        known, types = self.model.config.type_vocab_size, tokens.types
        if types is not None and types.size and types.max() >= known:
            raise ValueError(
                f"config type_vocab_size: the model knows {known} token types, but the tokenizer makes type "
                f"{types.max()} in a pair"
            )
        return tokens

    def _results(
        self,
        given: list[Any],
        prompt: str,
        forward: Callable[[TokenBatch], Any],
        batch_tokens: int,
        batch_size: int | None,
        on_long: str,
        progress: Callable[[int, int], None] | None = None,
        finite: Callable[[Any], np.ndarray] = finite_rows,
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """(indices of texts in `given`, what `forward` returns for them) per packed batch.

        The arguments are checked at once, the texts batch by batch.

        Raises:
            EncodingError: a text that cannot be encoded, or whose result is not finite, by index.
            ValueError: an argument out of range, or a model in training mode.
        """
        if on_long not in ("truncate", "error"):
            raise ValueError(f"on_long: {on_long!r}; expected 'truncate' or 'error'")
        self.check_batch_tokens(batch_tokens)
        check_batch_size(batch_size)

        def results() -> Iterator[tuple[np.ndarray, Any]]:
            for first in range(0, len(given), SLICE):
                try:
                    tokens = self.tokenize(given[first : first + SLICE], prompt)
                    if on_long == "error" and tokens.truncated.size:
                        raise self.too_long(tokens)
                    batches = self._batches(tokens, forward, batch_tokens, batch_size, progress, finite)
                    for batch, rows in batches:
                        yield first + batch, rows
                except EncodingError as error:
                    raise EncodingError(first + error.index, error.problem) from None

        return results()

    def _batches(
        self,
        tokens: TokenBatch,
        forward: Callable[[TokenBatch], Any],
        batch_tokens: int,
        batch_size: int | None,
        progress: Callable[[int, int], None] | None = None,
        finite: Callable[[Any], np.ndarray] = finite_rows,
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """(indices of texts, what `forward` returns for them) per packed batch.

        Args:
            finite: what `forward` returns -> (texts,) bool.

        Raises:
            EncodingError: a text whose result is not finite, by index.
            ValueError: an argument out of range, or a model in training mode.
        """
        self.check_batch_tokens(batch_tokens)
        check_batch_size(batch_size)
        lengths = tokens.lengths
        for batch in pack_batches(lengths, batch_tokens, batch_size):
            rows = forward(tokens.select(batch))
            bad = ~finite(rows)
            if bad.any():
                raise EncodingError(int(batch[bad].min()), f"the {self._result} is not finite")
            yield batch, rows
            if progress is not None:
                progress(len(batch), int(lengths[batch].sum()))

    def too_long(self, tokens: TokenBatch) -> EncodingError:
        """The error for the first text that lost tokens."""
        index = int(tokens.truncated[0])
        return EncodingError(index, f"{tokens.full_lengths[index]} tokens; at most {self.max_length} fit")

    def check_batch_tokens(self, batch_tokens: int) -> None:
        """Raise ValueError for `batch_tokens` out of range, or a model in training mode."""
        # Switching the mode here would race with other threads
        if self.model.training:
            raise ValueError("model: in training mode, where dropout acts; call model.eval() first")
        if type(batch_tokens) is not int or batch_tokens < self.max_length:
            raise ValueError(
                f"batch_tokens: {batch_tokens!r}; expected an integer >= max_length = {self.max_length}"
            )


def opened(directory: str | Path, device: Any) -> tuple[Path, torch.device]:
    """(folder, device) of `from_pretrained`; see `SentenceEncoder.from_pretrained`."""
    device = device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return hub.resolve(directory), device


def load_model(auto: type[PreTrainedModel], folder: Path, dtype: Any, device: Any, **options: Any) -> Any:
    """The model of a folder; see `SentenceEncoder.from_pretrained`."""
    return auto.from_pretrained(folder, dtype="auto" if dtype is None else dtype, device=device, **options)


def listed(name: str, given: Any) -> list[Any]:
    """The elements of a sequence of texts.

    Raises:
        TypeError: no sequence, or one text, bytes or a dict.
    """
    elements = None
    if not isinstance(given, (str, bytes, dict)):
        with contextlib.suppress(TypeError):
            elements = iter(given)
    if elements is None:
        raise TypeError(f"{name}: {type(given).__name__}; expected a sequence of texts")
    return list(elements)


def are_prompts(given: Any) -> bool:
    """Whether `given` is a dict of name -> prompt."""
    return isinstance(given, dict) and all(isinstance(text, str) for pair in given.items() for text in pair)


def check_batch_size(batch_size: int | None) -> None:
    """Raise ValueError unless `batch_size` is a positive integer or None."""
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(f"batch_size: {batch_size!r}; expected an integer >= 1, or None")


def packed_tensors(tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
    """(ids, cu_seqlens, max_seqlen, token_type_ids) on the CPU, as models take packed sequences."""
    types = None if tokens.types is None else torch.from_numpy(tokens.types)
    cu_seqlens = torch.from_numpy(tokens.starts.astype(np.int32))
    return torch.from_numpy(tokens.ids), cu_seqlens, int(tokens.lengths.max()), types


def _parts(index: int, given: Any) -> Iterable[str]:
    """The one or two texts of an element."""
    value = given
    if isinstance(value, dict):
        if set(value) != {"text"}:
            raise TypeError(
                f"sentences[{index}]: a dict of {sorted(map(str, value))}; expected {{'text': …}}"
            )
        value = value["text"]
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(t, str) for t in value):
        return value
    kind = f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else None
    raise TypeError(
        f"sentences[{index}]: {kind or type(value).__name__}; expected str, a pair of them, "
        "or {'text': one of these}"
    )
