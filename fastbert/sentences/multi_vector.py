"""Texts to one vector per token (ColBERT), scored by MaxSim: `similarity.maxsim`.

A query and a document each have a prompt, a maximum length, and tokens that are left out. A query is
lengthened to a fixed number of tokens by [MASK], whose vectors count too (query expansion). Unless the
directory has `attend`, no token attends to these: such a batch runs on a grid of queries and tokens with a
mask of the keys. All other batches are packed without padding.

A directory is one of sentence-transformers' MultiVectorEncoder, or one saved by PyLate.

Source: Khattab and Zaharia 2020, "ColBERT", sec. 3.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn

from fastbert.checkpoint.files import read_json
from fastbert.layers import packing
from fastbert.layers.linear import apply_linear
from fastbert.models.auto import AutoModel
from fastbert.models.bert import BertModel
from fastbert.ops import checks
from fastbert.sentences.dense import IDENTITY, read_dense
from fastbert.sentences.settings import (
    MASK_TOKENS,
    Module,
    choice,
    expect_modules,
    module_settings,
    modules_of,
    positive,
    prompt_settings,
    switch,
    text_settings,
)
from fastbert.sentences.similarity import Vectors, maxsim
from fastbert.sentences.text_model import TextModel, listed, load_model, opened, packed_tensors
from fastbert.sentences.tokenizer import TokenBatch, load_tokenizer, tokenize

SIMILARITIES = ("maxsim", "meanmaxsim")
TASKS = ("query", "document")
_MODULES = [
    ("Transformer", "Dense", "MultiVectorMask", "Normalize"),
    ("Transformer", "Dense", "MultiVectorMask"),
    ("Transformer", "Dense"),
]
# Keys that PyLate writes into config_sentence_transformers.json
_PYLATE_KEYS = {
    "attend_to_expansion_tokens",
    "do_query_expansion",
    "document_length",
    "document_prefix",
    "query_length",
    "query_prefix",
    "skiplist_words",
}


@dataclass(frozen=True)
class QueryExpansion:
    """How queries are lengthened.

    Attributes:
        length: tokens that a query has at least.
        attend: whether all tokens attend to the added ones, too.
        fixed: whether longer queries are cut to `length`.
        token: the added token; None = the tokenizer's [MASK].
    """

    length: int = 32
    attend: bool = False
    fixed: bool = True
    token: str | None = None


class MultiVectorEncoder:
    """A model, its tokenizer and a projection, loaded once. Many threads may encode at the same time.

    Args:
        model: a fastbert encoder in eval mode, on its device.
        tokenizer: from the `tokenizers` library. Copied, so its padding and truncation do not change.
        projection: hidden size -> numbers of a vector; of the model's dtype, on its device.
        normalize: scale each vector to length 1.
        query_prompt, document_prompt: text put before every query or document.
        query_length, document_length: most tokens of one, special ones included; None = as many as the model
            allows.
        expansion: how queries are lengthened; None = not at all.
        skiplist_words: tokens without a vector. A word that is no token is ignored.
        skiplist_tasks: which of "query" and "document" leave them out.
        lower_case: convert the text to lower case before it is tokenised.
        similarity_fn_name: what `similarity` computes: "maxsim", or "meanmaxsim", which divides by the number
            of the query's vectors.

    Raises:
        TypeError: no model, tokenizer or projection; `from_pretrained` loads them from a directory.
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        model: BertModel,
        tokenizer: Tokenizer | None = None,
        projection: nn.Linear | None = None,
        *,
        normalize: bool = True,
        query_prompt: str = "",
        document_prompt: str = "",
        query_length: int | None = None,
        document_length: int | None = None,
        expansion: QueryExpansion | None = None,
        skiplist_words: Sequence[str] = (),
        skiplist_tasks: Sequence[str] = ("document",),
        lower_case: bool = False,
        similarity_fn_name: str = "maxsim",
    ) -> None:
        if not isinstance(model, BertModel):
            raise TypeError(f"model: {type(model).__name__}; expected a fastbert encoder without a head")
        hidden = model.config.hidden_size
        if not isinstance(projection, nn.Linear) or projection.in_features != hidden:
            raise TypeError(f"projection: {projection!r}; expected nn.Linear with {hidden} inputs")
        if similarity_fn_name not in SIMILARITIES:
            raise ValueError(
                f"similarity_fn_name: {similarity_fn_name!r}; expected one of {', '.join(SIMILARITIES)}"
            )
        if wrong := [task for task in skiplist_tasks if task not in TASKS]:
            raise ValueError(f"skiplist_tasks: {wrong[0]!r}; expected one of {', '.join(TASKS)}")
        if expansion is not None:
            query_length = expansion.length if expansion.fixed else query_length
            if query_length is not None and query_length < expansion.length:
                raise ValueError(
                    f"query_length: {query_length}; expected at least the {expansion.length} of expansion"
                )
        skip = dict.fromkeys(TASKS, ()) | dict.fromkeys(skiplist_tasks, skiplist_words)
        self.projection = projection.eval()
        self.normalize = normalize
        self.similarity_fn_name = similarity_fn_name
        self._query = _Side(
            model, tokenizer, self, query_length, lower_case, query_prompt, skip["query"], expansion
        )
        self._document = _Side(
            model, tokenizer, self, document_length, lower_case, document_prompt, skip["document"], None
        )

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        query_length: int | None = None,
        document_length: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Load a directory of sentence-transformers' MultiVectorEncoder, or of PyLate's ColBERT.

        Args:
            directory: the folder (or a hub name, where huggingface_hub is installed).
            query_length, document_length: override the directory's; None = the directory's. A fixed query
                expansion keeps its length.
            dtype: the weights' dtype; None = as the directory stores them.
            device: None = the first GPU if there is one, else the CPU.

        Raises:
            ValueError, FileNotFoundError: naming the file or argument, and what is wrong with it.
        """
        directory, device = opened(directory, device)
        modules_path = directory / "modules.json"
        modules = modules_of(directory)
        if modules is None:
            raise FileNotFoundError(f"{modules_path}: missing; expected a directory of a ColBERT model")
        transformer, dense, *rest = expect_modules(modules_path, modules, _MODULES)
        path = directory / "config_sentence_transformers.json"
        settings = read_json(path) if path.is_file() else {}
        own_path, own = module_settings(transformer.folder)
        pylate = settings.get("model_type") == "ColBERT" or not _PYLATE_KEYS.isdisjoint(settings)
        if not rest and not pylate:
            raise ValueError(
                f"{path}: no model_type 'ColBERT', and {modules_path} has no MultiVectorMask; "
                "expected a directory of a ColBERT model"
            )
        max_length, lower_case, _ = text_settings(transformer.folder)
        lengths = {"query_length": query_length, "document_length": document_length}
        for key, given in lengths.items():
            if given is None:
                lengths[key] = positive(own_path, own, key) or positive(path, settings, key) or max_length
        expansion = _expansion(own_path, own, path, settings, pylate)
        prompts = _prompts(path, settings)
        words, tasks = _skiplist(path, settings, rest)
        tokenizer = load_tokenizer(transformer.folder)
        for key in ("query_prefix", "document_prefix"):
            _keep_whole(tokenizer, settings.get(key) or "")
        model = load_model(AutoModel, transformer.folder, dtype, device, add_pooling_layer=False)
        hidden = model.config.hidden_size
        projection, _ = read_dense(dense.folder, hidden, "token_embeddings", (IDENTITY,))
        limit = model.config.max_tokens
        return cls(
            model,
            tokenizer,
            projection.to(model.device, model.dtype),
            normalize="Normalize" in [module.kind for module in rest] or not rest,
            query_prompt=prompts[0],
            document_prompt=prompts[1],
            expansion=expansion,
            skiplist_words=words,
            skiplist_tasks=tasks,
            lower_case=lower_case,
            similarity_fn_name="meanmaxsim"
            if settings.get("similarity_fn_name") == "meanmaxsim"
            else "maxsim",
            **{key: None if length is None else min(length, limit) for key, length in lengths.items()},
        )

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return self.projection.out_features

    def __repr__(self) -> str:
        model = self._query.model
        return (
            f"{type(self).__name__}({type(model).__name__}, {model.config.num_hidden_layers} layers, "
            f"{self.width} dimensions, queries of at most {self._query.max_length} tokens, documents of "
            f"{self._document.max_length}, on {self._query.device})"
        )

    def encode_query(
        self,
        queries: Sequence[str] | str,
        *,
        prompt: str | None = None,
        batch_tokens: int = 8192,
        batch_size: int | None = None,
        on_long: str = "truncate",
    ) -> list[np.ndarray] | np.ndarray:
        """The vectors of the tokens of queries, without gradients. The order is kept.

        Args:
            queries: texts, or one text.
            prompt: text put before each; None = the directory's.
            batch_tokens, batch_size, on_long: as `SentenceEncoder.encode`.

        Returns:
            For each text (tokens, width) float32 (float64 from a float64 model); for one text that array.

        Raises:
            EncodingError: a text that cannot be encoded, or whose vectors are not finite, by index.
            TypeError: an element that is no text.
            ValueError: an argument out of range, or a model in training mode.
        """
        return self._query.encode(queries, prompt, batch_tokens, batch_size, on_long)

    def encode_document(
        self,
        documents: Sequence[str] | str,
        *,
        prompt: str | None = None,
        batch_tokens: int = 8192,
        batch_size: int | None = None,
        on_long: str = "truncate",
    ) -> list[np.ndarray] | np.ndarray:
        """The vectors of the tokens of documents; see `encode_query`."""
        return self._document.encode(documents, prompt, batch_tokens, batch_size, on_long)

    def similarity(
        self, queries: Sequence[Vectors] | Vectors, documents: Sequence[Vectors] | Vectors
    ) -> Tensor:
        """(queries, documents): `maxsim` of all pairs, by `similarity_fn_name`."""
        return maxsim(queries, documents, mean=self.similarity_fn_name == "meanmaxsim")


class _Side(TextModel):
    """The queries or the documents of a `MultiVectorEncoder`, which is `owner`."""

    def __init__(
        self,
        model: BertModel,
        tokenizer: Tokenizer | None,
        owner: MultiVectorEncoder,
        max_length: int | None,
        lower_case: bool,
        prompt: str,
        skip: Sequence[str],
        expansion: QueryExpansion | None,
    ) -> None:
        super().__init__(model, tokenizer, max_length, lower_case, prompt, None, False)
        self.owner = owner
        ids = [self._tokenizer.token_to_id(word) for word in skip]
        self.skip = np.array([i for i in ids if i is not None], np.int64)
        self.expansion = expansion
        if expansion is not None:
            names = MASK_TOKENS if expansion.token is None else (expansion.token,)
            found = [i for i in map(self._tokenizer.token_to_id, names) if i is not None]
            if not found:
                raise ValueError(f"expansion: the tokenizer has no token {' or '.join(names)}")
            self.added_id = found[0]

    def encode(
        self, given: Any, prompt: str | None, batch_tokens: int, batch_size: int | None, on_long: str
    ) -> list[np.ndarray] | np.ndarray:
        """The vectors of each text, or of one text."""
        single = isinstance(given, str)
        texts = [given] if single else listed("sentences", given)
        out: list[Any] = [None] * len(texts)
        results = self._results(
            texts,
            self._prompt_of(prompt, None),
            self._forward,
            batch_tokens,
            batch_size,
            on_long,
            finite=lambda rows: np.array([np.isfinite(row).all() for row in rows]),
        )
        for batch, rows in results:
            for index, row in zip(batch, rows, strict=True):
                out[index] = row
        return out[0] if single else out

    def tokenize(self, sentences: Sequence[Any], prompt: str | None = None) -> TokenBatch:
        """Token ids, truncated to `max_length` and then lengthened by the expansion.

        `full_lengths` are those before both, so that a text's own tokens are the first
        min(full_lengths, lengths).
        """
        prompt = self._prompt_of(prompt, None)
        for index, text in enumerate(sentences):
            if not isinstance(text, str):
                raise TypeError(f"sentences[{index}]: {type(text).__name__}; expected str")
        # White space around a text stays: PyLate's prefixes may end in it
        texts = [prompt + (text.lower() if self.lower_case else text) for text in sentences]
        tokens = tokenize(self._tokenizer, texts, self.model.config.vocab_size)
        if self.expansion is None:
            return tokens
        lengths = np.maximum(tokens.lengths, self.expansion.length)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.full(starts[-1], self.added_id, np.int64)
        ids[_place(starts) < np.repeat(tokens.lengths, lengths)] = tokens.ids
        return TokenBatch(ids, starts, tokens.full_lengths)

    # no_grad, not inference_mode: what the model caches in this call stays usable under autograd
    @torch.no_grad()
    def _forward(self, tokens: TokenBatch) -> list[np.ndarray]:
        """(tokens, width) of each text."""
        kept = np.flatnonzero(~np.isin(tokens.ids, self.skip))
        hidden = self._hidden(tokens)  # (total, hidden)
        rows = hidden[packing.send(torch.from_numpy(kept), hidden.device)]
        rows = apply_linear(self.owner.projection, rows)  # (kept, width)
        rows = rows.to(checks.compute_dtype(rows))
        if self.owner.normalize:
            rows = nn.functional.normalize(rows, dim=1)
        return np.split(rows.cpu().numpy(), np.searchsorted(kept, tokens.starts[1:-1]))

    def _hidden(self, tokens: TokenBatch) -> Tensor:
        """(total, hidden)."""
        device, lengths = self.device, tokens.lengths
        if tokens.ids.size == 0:
            dtype = next(self.model.parameters()).dtype
            return torch.empty((0, self.model.config.hidden_size), dtype=dtype, device=device)
        ids, cu_seqlens, max_seqlen, _ = packed_tensors(tokens)
        own = np.minimum(tokens.full_lengths, lengths)
        if self.expansion is None or self.expansion.attend or (own == lengths).all():
            return self.model.forward_packed(ids, cu_seqlens, max_seqlen)
        column = np.arange(max_seqlen)
        inside = torch.from_numpy(column < lengths[:, None])  # (texts, max_seqlen)
        grid = torch.zeros(inside.shape, dtype=torch.int64)
        grid[inside] = ids
        keys = torch.from_numpy(column < own[:, None])[:, None, None]  # (texts, 1, 1, max_seqlen)
        hidden = self.model(packing.send(grid, device), attention_mask=packing.send(keys, device))
        return hidden.last_hidden_state[packing.send(inside, device)]


def _place(starts: np.ndarray) -> np.ndarray:
    """(total,): where a token is in its text, from 0."""
    return np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))


def _expansion(
    own_path: Path, own: dict[str, Any], path: Path, settings: dict[str, Any], pylate: bool
) -> QueryExpansion | None:
    """The query expansion of the transformer's settings, else of PyLate's keys."""
    if "query_expansion" in own or not pylate:
        found = own.get("query_expansion")
        if found is None:
            return None
        if not isinstance(found, dict) or not isinstance(found.get("token"), str | None):
            raise ValueError(f"{own_path}: query_expansion {found!r}; expected an object of settings")
        length = positive(own_path, found, "length")
        if length is None:
            raise ValueError(f"{own_path}: query_expansion {found!r}; expected a length")
        strategy = choice(own_path, found, "strategy", ("fixed", "min"), "")
        attend = switch(own_path, found, "attend", False)
        return QueryExpansion(length, attend, strategy == "fixed", found.get("token"))
    if not switch(path, settings, "do_query_expansion", True):
        return None
    attend = switch(path, settings, "attend_to_expansion_tokens", False)
    return QueryExpansion(positive(path, settings, "query_length") or 32, attend)


def _prompts(path: Path, settings: dict[str, Any]) -> tuple[str, str]:
    """(query, document): PyLate's prefix, and then the prompt."""
    prompts = {k: v for k, v in (settings.get("prompts") or {}).items() if v is not None}
    _, prompts = prompt_settings(path, {"prompts": prompts})
    found = []
    for prefix_key, names in (
        ("query_prefix", ["query"]),
        ("document_prefix", ["document", "passage", "corpus"]),
    ):
        prefix = settings.get(prefix_key) or ""
        if not isinstance(prefix, str):
            raise ValueError(f"{path}: {prefix_key} {prefix!r}; expected a text")
        prompt = next((prompts[name] for name in names if name in prompts), "")
        found.append(prefix + prompt.removeprefix(prefix))
    return found[0], found[1]


def _skiplist(path: Path, settings: dict[str, Any], rest: list[Module]) -> tuple[list[str], list[str]]:
    """(words, tasks that leave them out); without a MultiVectorMask PyLate's, by default punctuation."""
    tasks: Any = ["document"]
    if rest:
        path = rest[0].folder / "config.json"
        settings = read_json(path)
        if settings.get("keep_only_token_ids"):
            raise ValueError(f"{path}: keep_only_token_ids is not implemented; expected null")
        tasks = settings.get("skiplist_tasks") or tasks
        tasks = [tasks] if isinstance(tasks, str) else tasks
        if not isinstance(tasks, list) or not all(task in TASKS for task in tasks):
            raise ValueError(f"{path}: skiplist_tasks {tasks!r}; expected some of {', '.join(TASKS)}")
    words = settings.get("skiplist_words")
    if words is None:
        words = [] if rest else list(string.punctuation)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{path}: skiplist_words {words!r}; expected a list of texts")
    return words, tasks


def _keep_whole(tokenizer: Tokenizer, prefix: str) -> None:
    """Make the tokenizer find PyLate's prefix, or its first word, as the one token that it is in training."""
    for token in (prefix, *prefix.split()[:1]) if prefix.strip() else ():
        if tokenizer.token_to_id(token) is not None:
            if tokenizer.encode(token, add_special_tokens=False).tokens != [token]:
                tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
            return
