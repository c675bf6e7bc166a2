"""`SentenceTransformer.encode` with batches measured in tokens.

Stock `encode` sorts its texts by characters, cuts them into batches of `batch_size` and tokenises each batch.
Without padding, a batch is better measured in tokens. So `_TOKENISED` texts at a time are tokenised, sorted
by tokens, and cut into batches of about equally many tokens. From the tokens to the embeddings the model's
own call runs.

A tokenizer of transformers keeps its padding setting between calls, for all threads. So it is called with the
setting of stock `encode`, which changes nothing for other threads, and the attention mask marks the padding.

sentence-transformers has the loop in a private method. So `fits` checks the version and the exact arguments.
If they differ, stock `encode` runs, in which only the encoder is accelerated.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fastbert.acceleration.classes import Accelerated
from fastbert.sentences.tokenizer import pack_batches

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
else:
    SentenceTransformer = object

# Versions of sentence-transformers, (least, first that is too new)
TESTED = ("6", "7")
_HOME = "sentence_transformers.sentence_transformer.model"
_ARGUMENTS = (
    "self",
    "inputs",
    "prompt",
    "batch_size",
    "show_progress_bar",
    "output_value",
    "save_to_cpu",
    "normalize_embeddings",
    "truncate_dim",
    "device",
    "kwargs",
)
# Texts that are tokenised at a time: enough to fill batches, and they fit in memory
_TOKENISED = 4096
# Tokens in a batch on a CPU: more do not stay in its caches, and gain nothing
_CPU_TOKENS = 1024
# Texts that the tokenizer pads together: few texts of about one length have little padding
_PADDED = 128
# Options of the tokenizer
_LISTS = {"common": {"return_tensors": None}, "text": {"return_attention_mask": True}}


def fits(module: nn.Module) -> bool:
    """Whether a module is a SentenceTransformer whose loop is the one that this file replaces."""
    cls = next((c for c in type(module).__mro__ if "_inference" in vars(c)), None)
    if cls is None or cls.__module__ != _HOME or cls.__name__ != "SentenceTransformer":
        return False
    version = sys.modules["sentence_transformers"].__version__.split(".")[0]
    known = tuple(inspect.signature(cls._inference).parameters) == _ARGUMENTS
    return known and int(TESTED[0]) <= int(version) < int(TESTED[1])


class AcceleratedSentences(Accelerated, SentenceTransformer):
    """Mixin of a SentenceTransformer."""

    @torch.inference_mode()
    def _inference(self, inputs: list[Any], **given: Any) -> Any:
        """Embeddings of texts; for anything else stock `_inference` runs."""
        device = self._resolve_inference_device(given.get("device"))
        usual = (
            given["output_value"] == "sentence_embedding"
            and len(inputs) > 0
            and all(isinstance(text, str) for text in inputs)
            and "processing_kwargs" not in given
            and device.type != "hpu"
            and self.__dict__.get("_compiled_call_impl") is None
            and self._reads_plain_text()
        )
        found = self._by_tokens(inputs, device, given) if usual else None
        return super()._inference(inputs, **given) if found is None else found

    def _reads_plain_text(self) -> bool:
        """Whether the first module is sentence-transformers' own, and pads rows of tokens on the right."""
        first: Any = self[0]
        kind, tokenizer = type(first), getattr(first, "tokenizer", None)
        return (
            (kind.__module__, kind.__name__)
            == ("sentence_transformers.base.modules.transformer", "Transformer")
            and not self._can_flatten_inputs()
            and first.query_expansion is None
            and tokenizer is not None
            and getattr(tokenizer, "padding_side", None) == "right"
            and tokenizer.pad_token_id is not None
        )

    def _by_tokens(self, inputs: list[str], device: torch.device, given: dict[str, Any]) -> Tensor | None:
        """(texts, width) embeddings; None if the tokenizer did not return rows of tokens."""
        from tqdm.autonotebook import tqdm  # as sentence-transformers does

        if any(module.training for module in self.modules()):
            self.eval()
        passed = {name: value for name, value in given.items() if name not in _ARGUMENTS}
        order = np.argsort([-len(text) for text in inputs], kind="stable")
        rows, places = [], []
        with tqdm(total=len(inputs), desc="Texts", disable=not given["show_progress_bar"]) as bar:
            for first in range(0, len(order), _TOKENISED):
                some = order[first : first + _TOKENISED]
                texts = Texts.of(self, [inputs[i] for i in some], given["prompt"], passed)
                if texts is None:
                    return None
                longest = int(texts.lengths.max(initial=1))
                room = given["batch_size"] * longest  # what stock's first batch holds
                if device.type == "cpu":
                    room = max(longest, min(room, _CPU_TOKENS))
                for batch in pack_batches(texts.lengths, room):
                    out = self(texts.features(batch, device), **passed)["sentence_embedding"]
                    out = out[..., : given["truncate_dim"]]
                    if given["normalize_embeddings"]:
                        out = torch.nn.functional.normalize(out, p=2, dim=1)
                    rows.append(out.cpu() if given["save_to_cpu"] else out)
                    places.append(some[batch])
                    bar.update(len(batch))
        out = torch.cat(rows)
        return out[torch.from_numpy(np.argsort(np.concatenate(places))).to(out.device)]


@dataclass(frozen=True)
class Texts:
    """Tokenised texts, concatenated.

    Attributes:
        lengths: (texts,) number of tokens of each text.
        tokens: name -> (all tokens,) int64, for each feature with one number per token.
        fill: name -> the number at padding.
        others: name -> value, for each feature that is the same for all texts.
    """

    lengths: np.ndarray
    tokens: dict[str, np.ndarray]
    fill: dict[str, int]
    others: dict[str, Any]

    @classmethod
    def of(cls, model: Any, texts: list[str], prompt: str | None, passed: dict[str, Any]) -> Texts | None:
        """The texts, tokenised by `model`; None if a feature is not one number per token."""
        others: dict[str, Any] = {}
        lists: dict[str, list[Any]] = {}
        for first in range(0, len(texts), _PADDED):
            some = texts[first : first + _PADDED]
            found = model.preprocess(some, prompt=prompt, processing_kwargs=_LISTS, **passed)
            for name, value in found.items():
                if isinstance(value, (str, int)):
                    others[name] = value
                elif isinstance(value, list) and len(value) == len(some):
                    lists.setdefault(name, []).extend(value)
                else:
                    return None
        ids, masks = lists.get("input_ids"), lists.get("attention_mask")
        if (
            ids is None
            or masks is None
            or not set(lists) <= {"input_ids", "attention_mask", "token_type_ids"}
        ):
            return None
        widths = list(map(len, ids))
        if any(list(map(len, rows)) != widths for rows in lists.values()):
            return None
        total = sum(widths)
        kept = np.fromiter(chain.from_iterable(masks), bool, total)
        row = np.repeat(np.arange(len(texts)), widths)
        lengths = np.bincount(row[kept], minlength=len(texts))
        tokens = {
            name: np.fromiter(chain.from_iterable(rows), np.int64, total)[kept]
            for name, rows in lists.items()
        }
        tokenizer = model[0].tokenizer
        fill = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0}
        fill["token_type_ids"] = tokenizer.pad_token_type_id
        return cls(lengths, tokens, fill, others)

    def features(self, batch: np.ndarray, device: torch.device) -> dict[str, Any]:
        """The features of some texts, each (texts, tokens of the longest), as `preprocess` returns them."""
        lengths = self.lengths[batch]
        ends = np.cumsum(self.lengths)[batch]
        column = np.arange(lengths.max(initial=1))
        kept = column < lengths[:, None]
        place = ((ends - lengths)[:, None] + column)[kept]
        found = {}
        for name, values in self.tokens.items():
            padded = np.full(kept.shape, self.fill[name], np.int64)
            padded[kept] = values[place]
            found[name] = torch.from_numpy(padded).to(device)
        return found | self.others
