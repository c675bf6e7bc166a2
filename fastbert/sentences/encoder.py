"""Text to embeddings: tokenise, sort by length, pack into batches, run, pool, put back in order.

A directory may be a plain HuggingFace one (config.json, weights, tokenizer.json or vocab.txt) or one saved by
sentence-transformers, whose modules.json, pooling, normalisation, maximum length and default prompt are
obeyed. What is not implemented there (a Dense module, a pooling mode) is refused by name, not skipped.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from fastbert.checkpoint import load as checkpoint
from fastbert.checkpoint.files import read_json
from fastbert.layers import packing
from fastbert.layers import quantized as quantization
from fastbert.models.bert import AutoModel
from fastbert.models.config import MAX_SIZE
from fastbert.ops import checks
from fastbert.ops.pooling import MODES as POOLINGS
from fastbert.ops.pooling import pooling as pool

if TYPE_CHECKING:
    from typing_extensions import Self

    Vectors = torch.Tensor | np.ndarray[Any, np.dtype[Any]] | Sequence[Sequence[float]] | Sequence[float]

_log = logging.getLogger("fastbert")

_SLICE = 32_768  # sentences tokenised at a time: bounds the memory that token ids take

# sentence-transformers' names of the file with the maximum length, in the order in which it looks for them
_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Usual spellings of the special tokens, for those who read a saved tokenizer by transformers
_SPECIAL_TOKENS = {
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "unk_token": ("[UNK]", "<unk>"),
    "mask_token": ("[MASK]", "<mask>"),
}


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def _minus_distance(a: torch.Tensor, b: torch.Tensor, p: float) -> torch.Tensor:
    # by products the distance of equal rows would not be 0
    return -torch.cdist(a, b, p, compute_mode="donot_use_mm_for_euclid_dist")


# sentence-transformers' names: (n, width), (m, width) -> (n, m)
SIMILARITIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": lambda a, b: _normalized(a) @ _normalized(b).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: _minus_distance(a, b, 2.0),
    "manhattan": lambda a, b: _minus_distance(a, b, 1.0),
}


class EncodingError(ValueError):
    """A sentence that cannot be encoded: `index`, its 0-based place, and `problem`, what is wrong with it."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(f"sentences[{index}]: {problem}")
        self.index = index
        self.problem = problem


@dataclass(frozen=True)
class SentenceSettings:
    """How a directory wants its sentences encoded.

    Attributes:
        transformer: folder with config.json, weights and tokenizer.
        pooling: "mean", "cls" or "max".
        normalize: scale each embedding to length 1.
        max_length: tokens a sentence may have, special ones included; None if the directory does not say.
        lower_case: lower the text before the tokenizer sees it.
        prompt: text put before every sentence.
        similarity: "cosine", "dot", "euclidean" or "manhattan".
    """

    transformer: Path
    pooling: str = "mean"
    normalize: bool = False
    max_length: int | None = None
    lower_case: bool = False
    prompt: str = ""
    similarity: str = "cosine"


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of many sentences, one after the other.

    Attributes:
        ids: (total,) int64, special tokens included.
        starts: (sentences + 1,) int64; sentence i is ids[starts[i]:starts[i + 1]].
        full_lengths: (sentences,) int64, tokens before truncation.
    """

    ids: np.ndarray
    starts: np.ndarray
    full_lengths: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """(sentences,) int64, tokens kept."""
        return np.diff(self.starts)

    @property
    def truncated(self) -> np.ndarray:
        """Indices of the sentences that lost tokens."""
        return np.flatnonzero(self.full_lengths > self.lengths)


def _pooling_of(folder: Path, override: str | None) -> tuple[str, dict[str, Any]]:
    """The pooling mode that `folder`/config.json asks for (or the override), and the file's content."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing, though the directory asks for a Pooling module")
    config = read_json(path)
    if override is not None:
        return override, config
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        modes = list(named) if isinstance(named, (list, tuple)) else [named]
    else:
        modes = [
            _POOLING_KEYS.get(k, k)
            for k, on in config.items()
            if k.startswith("pooling_mode_") and on is True
        ]
    if len(modes) == 1 and modes[0] in POOLINGS:
        return modes[0], config
    asked = " + ".join(map(str, modes)) or "none"
    raise ValueError(
        f"{path}: pooling {asked} is not implemented; implemented: {', '.join(POOLINGS)} (one of them). "
        "Give pooling= (--pooling) to choose one"
    )


def sentence_settings(
    directory: str | Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
) -> SentenceSettings:
    """Read how `directory` wants its sentences encoded; the keywords stand before what the directory says.

    Without sentence-transformers' files: mean pooling, no normalisation, no prompt.

    Raises:
        ValueError: a module or pooling mode that is not implemented (by name), or a file that makes no sense.
        FileNotFoundError: a file that another one names is missing.
    """
    directory = Path(directory)
    if pooling is not None and pooling not in POOLINGS:
        raise ValueError(f"pooling: {pooling!r}; expected one of {', '.join(POOLINGS)}")
    transformer, pooling_folder, says_normalize = directory, None, False
    modules_path = directory / "modules.json"
    if modules_path.is_file():
        kinds = []
        for place, module in enumerate(read_json(modules_path, list)):
            if not isinstance(module, dict) or not isinstance(module.get("type"), str):
                raise ValueError(f"{modules_path}: entry {place} has no type")
            kind = module["type"].rsplit(".", 1)[-1]
            folder = directory / _module_folder(modules_path, place, module.get("path", ""))
            kinds.append(kind)
            if kind == "Transformer":
                transformer = folder
            elif kind == "Pooling":
                pooling_folder = folder
            elif kind == "Normalize":
                says_normalize = True
            else:
                raise ValueError(
                    f"{modules_path}: module {kind!r} ({module['type']}) is not implemented; "
                    "implemented: Transformer, Pooling, Normalize"
                )
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise ValueError(
                f"{modules_path}: modules {', '.join(kinds) or 'none'}; "
                "expected Transformer, Pooling and perhaps Normalize"
            )
    elif (directory / "1_Pooling" / "config.json").is_file():
        pooling_folder = directory / "1_Pooling"

    mode, pooling_config = pooling or "mean", {}
    if pooling_folder is not None:
        mode, pooling_config = _pooling_of(pooling_folder, pooling)

    says_prompt, similarity = _defaults(directory / "config_sentence_transformers.json")
    prompt = says_prompt if prompt is None else prompt
    if prompt and pooling_config.get("include_prompt", True) is False:
        raise ValueError(
            f"{pooling_folder / 'config.json'}: include_prompt false is not implemented "
            f"(the prompt is {prompt!r})"
        )

    max_length, lower_case = None, False
    for name in _LENGTH_FILES:
        if (transformer / name).is_file():
            config = read_json(transformer / name)
            max_length, lower_case = config.get("max_seq_length"), bool(config.get("do_lower_case", False))
            if max_length is not None and (type(max_length) is not int or max_length < 1):
                raise ValueError(
                    f"{transformer / name}: max_seq_length {max_length!r}; expected a positive integer"
                )
            break
    if max_length is None and (transformer / "tokenizer_config.json").is_file():
        says = read_json(transformer / "tokenizer_config.json").get("model_max_length")
        if isinstance(says, (int, float)) and 0 < says < 1e9:  # 1e30 stands for no limit
            max_length = int(says)
    return SentenceSettings(
        transformer,
        mode,
        says_normalize if normalize is None else bool(normalize),
        max_length,
        lower_case,
        prompt,
        similarity,
    )


def _module_folder(modules_path: Path, place: int, name: object) -> str:
    """The name of a folder beside modules.json, "" for its own; a file may not lead anywhere else."""
    plain = name.rstrip("/") if isinstance(name, str) and name[:1] != "/" else None
    if plain is None or plain in (".", "..") or re.search(r"[/\\\0]", plain):
        raise ValueError(
            f"{modules_path}: entry {place}: path: expected the name of a folder beside it, got {name!r}"
        )
    return plain


def _defaults(path: Path) -> tuple[str, str]:
    """The default prompt and the similarity function that config_sentence_transformers.json asks for."""
    config = read_json(path) if path.is_file() else {}
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise ValueError(
            f"{path}: similarity_fn_name {similarity!r}; expected one of {', '.join(SIMILARITIES)}"
        )
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if name is None:
        return "", similarity
    if not isinstance(prompts, dict) or not isinstance(prompts.get(name), str):
        raise ValueError(f"{path}: default_prompt_name {name!r} is not among the prompts")
    return prompts[name], similarity


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a HuggingFace directory: tokenizer.json, or a WordPiece one made from vocab.txt.

    Padding and truncation baked into tokenizer.json are switched off. vocab.txt is read as BERT's, with
    do_lower_case, strip_accents, tokenize_chinese_chars and the special tokens of tokenizer_config.json.

    Raises:
        FileNotFoundError: neither file is there.
        ValueError: a file that is not what its name says.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises a bare Exception
            raise ValueError(f"{path}: not a tokenizer of the tokenizers library ({error})") from None
        _check_ids(path, tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer
    if (directory / "vocab.txt").is_file():
        return _wordpiece(directory)
    others = ("vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model")
    found = [name for name in others if (directory / name).is_file()]
    hint = f" ({', '.join(found)} is there: save it once with transformers' fast tokenizer)" if found else ""
    raise FileNotFoundError(f"{directory}: no tokenizer.json and no vocab.txt{hint}")


def _check_ids(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse ids that no vocabulary reaches: a copy of the tokenizer takes memory for every id up to them."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    if highest >= MAX_SIZE:
        raise ValueError(f"{path}: token {token!r} has id {highest}; expected ids below {MAX_SIZE}")


def _wordpiece(directory: Path) -> Tokenizer:
    path = directory / "vocab.txt"
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    try:
        words = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from None
    if words and not words[-1]:
        words.pop()
    vocab = {word.rstrip("\r"): i for i, word in enumerate(words)}

    special = {}
    for name in ("unk", "sep", "pad", "cls", "mask"):
        token = config.get(f"{name}_token") or f"[{name.upper()}]"
        special[name] = token.get("content") if isinstance(token, dict) else token
        if not isinstance(special[name], str):
            raise ValueError(f"{config_path}: {name}_token: expected a text, got {special[name]!r}")
        if special[name] not in vocab and name in ("unk", "sep", "cls"):
            raise ValueError(
                f"{path}: has no {name}_token {special[name]!r}; expected a BERT WordPiece vocabulary"
            )
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=special["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = special["cls"], special["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in special.values() if t in vocab]
    )
    return tokenizer


def pack_batches(
    lengths: np.ndarray, batch_tokens: int, batch_size: int | None = None
) -> Iterator[np.ndarray]:
    """Split sentences into batches of at most `batch_tokens` tokens and `batch_size` sentences, the longest
    first.

    Yields:
        indices into `lengths`; a sentence longer than `batch_tokens` is a batch of its own.
    """
    order = np.argsort(-lengths, kind="stable")  # longest first: what does not fit in memory fails at once
    first, tokens = 0, 0
    for place, index in enumerate(order):
        length = int(lengths[index])
        if place > first and (tokens + length > batch_tokens or place - first == batch_size):
            yield order[first:place]
            first, tokens = place, 0
        tokens += length
    if first < len(order):
        yield order[first:]


class SentenceEncoder:
    """Model, tokenizer and pooling, loaded once. Many threads may call `encode` at the same time.

    Args:
        model: a fastbert encoder in eval mode (anything with `config` and `forward_packed`, which gets CPU
            tensors, and from pooling "cls" first_token_only=True), on its device.
        tokenizer: of the `tokenizers` library. Copied, so that its padding and truncation stay as they are.
        pooling: "mean" (over all tokens, special ones included), "cls" (the last layer is then computed for
            the first tokens alone) or "max".
        normalize: scale each embedding to length 1; an all-zero one stays zero.
        max_length: tokens a sentence may have, special ones included; None = as many as the model can.
        lower_case: lower the text before the tokenizer sees it.
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
            pooling, normalize, max_length, prompt: None = what the directory says (see `sentence_settings`).
            dtype: of the weights; None = as the directory stores them.
            device: None = the first GPU if there is one, else the CPU.

        Raises:
            ValueError, FileNotFoundError: what is wrong, naming the file or the argument.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        directory = checkpoint.resolve(directory)
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
        as sentence-transformers spells them. A quantised model's 8-bit weights are read by fastbert alone.
        Each file replaces an old one whole.

        Args:
            directory: the folder; made if it is missing.

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
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.no_truncation()
        known = {
            name: next((s for s in spellings if tokenizer.token_to_id(s) is not None), None)
            for name, spellings in _SPECIAL_TOKENS.items()
        }
        pad = self.model.config.pad_token_id
        known["pad_token"] = None if pad is None else tokenizer.id_to_token(pad)
        modules = ["Transformer", "Pooling", *(["Normalize"] if self.normalize else [])]
        files = {
            "tokenizer.json": tokenizer.to_str(pretty=True),
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": self.max_length,
                "model_input_names": ["input_ids", "attention_mask"],
                **{name: token for name, token in known.items() if token is not None},
            },
            "sentence_bert_config.json": {
                "max_seq_length": self.max_length,
                "do_lower_case": self.lower_case,
            },
            "1_Pooling/config.json": {
                "word_embedding_dimension": self.width,
                **{key: mode == self.pooling for key, mode in _POOLING_KEYS.items()},
            },
            "config_sentence_transformers.json": {
                "prompts": {"default": self.prompt} if self.prompt else {},
                "default_prompt_name": "default" if self.prompt else None,
                "similarity_fn_name": self.similarity_fn_name,
            },
            # last: without it the directory is a plain one of HuggingFace's
            "modules.json": [
                {
                    "idx": i,
                    "name": str(i),
                    "path": f"{i}_{kind}" if i else "",
                    "type": f"sentence_transformers.models.{kind}",
                }
                for i, kind in enumerate(modules)
            ],
        }
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            _replace_text(path, content if isinstance(content, str) else json.dumps(content, indent=2) + "\n")

    def quantize(self, dtype: str = "int8") -> Self:
        """Quantise the model in place, for inference on a CPU (layers/quantized.py); returns the encoder.

        Not while other threads encode.
        """
        self.model.quantize(dtype)
        return self

    @property
    def width(self) -> int:
        """Numbers in an embedding."""
        return self.model.config.hidden_size

    def get_embedding_dimension(self) -> int:
        """Numbers in an embedding, by sentence-transformers' name."""
        return self.width

    def get_sentence_embedding_dimension(self) -> int:
        """Numbers in an embedding, by the name before sentence-transformers 6."""
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
        """Where the model runs."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> np.dtype:
        """Of the embeddings: float64 from a float64 model, else float32."""
        wide = next(self.model.parameters()).dtype == torch.float64
        return np.dtype(np.float64 if wide else np.float32)

    def tokenize(self, sentences: Sequence[str]) -> TokenBatch:
        """Token ids, truncated to `max_length`; white space around a sentence does not count.

        Raises:
            EncodingError: text that is no valid Unicode, or a token that the model has no embedding for.
            TypeError: something that is no str.
        """
        for index, text in enumerate(sentences):
            if not isinstance(text, str):
                raise TypeError(f"sentences[{index}]: {type(text).__name__}; expected str")
        texts = [(self.prompt + text).strip() for text in sentences]
        if self.lower_case:
            texts = [text.lower() for text in texts]
        try:
            encoded = self._tokenizer.encode_batch_fast(texts)
        except Exception as error:
            for index, text in enumerate(texts):
                if re.search("[\ud800-\udfff]", text):
                    raise EncodingError(index, "half of a surrogate pair is no valid Unicode") from None
            raise ValueError(f"the tokenizer failed: {error}") from error
        lengths = np.fromiter((len(e) for e in encoded), np.int64, len(encoded))
        full_lengths = lengths.copy()
        for index, one in enumerate(encoded):
            for rest in one.overflowing:  # repeats the special tokens
                full_lengths[index] += len(rest) - sum(rest.special_tokens_mask)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.fromiter((i for e in encoded for i in e.ids), np.int64, int(starts[-1]))
        vocab_size = self.model.config.vocab_size
        if ids.size and ids.max() >= vocab_size:
            place = int(np.argmax(ids >= vocab_size))
            index = int(np.searchsorted(starts, place, side="right")) - 1
            token = self._tokenizer.id_to_token(int(ids[place]))
            problem = f"token {token!r} has id {ids[place]}, but the model knows {vocab_size} tokens"
            raise EncodingError(index, problem)
        return TokenBatch(ids, starts, full_lengths)

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
        """Embed sentences. Runs without gradients, in batches packed without padding; the order is kept.

        Args:
            sentences: texts. An empty one is encoded as its special tokens alone.
            batch_tokens: tokens in one batch at most; at least `max_length`.
            batch_size: sentences in one batch at most; None leaves it to `batch_tokens`. A batch ends at the
                limit it meets first. The embeddings do not depend on it beyond rounding.
            show_progress_bar: True shows sentences, their rate and the time left on stderr, while it is a
                terminal; False does not; None does so if the logger "fastbert" is at INFO or DEBUG, which is
                sentence-transformers' rule.
            on_long: a sentence of more than `max_length` tokens: "truncate" or "error".
            progress: called after each batch with the sentences and tokens it held.

        Returns:
            (len(sentences), width) float32 (float64 from a float64 model).

        Raises:
            EncodingError: a sentence that cannot be encoded, by index; an embedding that is not finite.
            TypeError: a lone str instead of a sequence, or something that is no str in it.
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
            progress = _bar(len(sentences), progress)
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
        """How similar each of some embeddings is to each of others, by `similarity_fn_name`.

        Args:
            embeddings1: (n, width), or (width,) for one: an array, a tensor or nested lists.
            embeddings2: (m, width), or (width,), likewise.

        Returns:
            (n, m): the cosine of the angle, the dot product, or minus the Euclidean or Manhattan distance.

        Raises:
            ValueError: other shapes, or rows of different widths.
        """
        a, b = _matrix("embeddings1", embeddings1), _matrix("embeddings2", embeddings2)
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
        """Raise ValueError if `encode` would refuse `batch_tokens`, or the model's mode."""
        if self.model.training:  # switching it here would race with other threads
            raise ValueError("model: in training mode, where dropout acts; call model.eval() first")
        if type(batch_tokens) is not int or batch_tokens < self.max_length:
            raise ValueError(
                f"batch_tokens: {batch_tokens!r}; expected an integer >= max_length = {self.max_length}"
            )

    # no_grad rather than inference_mode: what the model caches on the way stays usable under autograd
    @torch.no_grad()
    def _forward(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        if ids.size == 0:  # a tokenizer without special tokens, and only empty sentences
            return np.zeros((len(lengths), self.width), self.dtype)
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        # both on the host, so that a GPU is not waited for before its result
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


def _matrix(name: str, vectors: Vectors) -> torch.Tensor:
    """(rows, width) of a floating-point dtype; a single vector becomes one row."""
    if isinstance(vectors, (list, tuple)) and vectors and isinstance(vectors[0], (torch.Tensor, np.ndarray)):
        vectors = torch.stack([torch.as_tensor(row) for row in vectors])
    elif not isinstance(vectors, torch.Tensor):
        vectors = torch.tensor(vectors)
    if vectors.dim() not in (1, 2):
        raise ValueError(f"{name}: shape {tuple(vectors.shape)}; expected (rows, width) or (width,)")
    vectors = vectors.to(checks.compute_dtype(vectors)) if vectors.is_floating_point() else vectors.float()
    return torch.atleast_2d(vectors)


def _replace_text(path: Path, text: str) -> None:
    """Write a file; a reader finds the old one or the new one whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _bar(total: int, also: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
    """Show on stderr, in one line, how many of `total` sentences are done."""
    start, last, done = time.perf_counter(), 0.0, 0

    def progress(sentences: int, tokens: int) -> None:
        nonlocal last, done
        done += sentences
        if also is not None:
            also(sentences, tokens)
        now = time.perf_counter()
        if done == total or now - last > 0.2:
            last, rate = now, done / max(now - start, 1e-9)
            left = round((total - done) / rate)
            line = f"{done:,} of {total:,} sentences, {rate:,.0f}/s, {left // 60:02d}:{left % 60:02d} left"
            print(f"\r{line:<78}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return progress


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
        model: a HuggingFace or sentence-transformers directory (loaded for this one call), or a
            `SentenceEncoder`; that one has its settings already, and none may be given here.
        sentences, batch_tokens, batch_size, show_progress_bar, on_long: as `SentenceEncoder.encode`.
        pooling, normalize, max_length, prompt, dtype, device: as `SentenceEncoder.from_pretrained`.

    Raises:
        ValueError, TypeError, FileNotFoundError: as those two.
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
