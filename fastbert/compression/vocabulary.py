"""A vocabulary without the word pieces that a corpus never uses, and the tokenizer that goes with it.

A text of the corpus keeps its word pieces: WordPiece takes the longest piece that fits, and those that a text
has never taken do not change that. Special tokens and single characters stay, so another text may be cut into
more pieces, but no known character becomes unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

# Texts that are cut at a time
_TEXTS = 1024


def used_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> list[int]:
    """The ids to keep, ascending: those of the texts, of special tokens and of single characters.

    Args:
        tokenizer: as `fastbert.sentences.tokenizer.load_tokenizer` returns it.
        texts: the corpus.

    Raises:
        ValueError: the tokenizer is not WordPiece.
    """
    kept = {*_content(tokenizer)[1], *_characters(tokenizer)}
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _TEXTS:
            kept.update(*(each.ids for each in tokenizer.encode_batch(batch)))
            batch = []
    kept.update(*(each.ids for each in tokenizer.encode_batch(batch)))
    return sorted(kept)


def without(tokenizer: Tokenizer, ids: list[int]) -> Tokenizer:
    """A tokenizer whose vocabulary has these ids alone, numbered from 0 in their order.

    Args:
        tokenizer: a WordPiece tokenizer.
        ids: ascending, with those of all special tokens.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    content, special = _content(tokenizer)
    places = {old: new for new, old in enumerate(ids)}
    if missing := [token for i, token in special.items() if i not in places]:
        raise ValueError(f"ids: expected that of the special token {missing[0]!r} among them")
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {token: places[i] for token, i in vocab.items() if i in places}
    for token in content["added_tokens"]:
        token["id"] = places[token["id"]]
    if content["padding"] is not None:
        content["padding"]["pad_id"] = places[content["padding"]["pad_id"]]
    _renumber(content.get("post_processor"), places)
    return Tokenizer.from_str(json.dumps(content))


def _content(tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[int, str]]:
    """(the content of tokenizer.json, the tokens that must stay, by id)."""
    content = json.loads(tokenizer.to_str())
    if content["model"]["type"] != "WordPiece":
        raise ValueError(
            f"tokenizer: expected WordPiece, got {content['model']['type']}, whose pieces are made of others"
        )
    special = {each["id"]: each["content"] for each in content["added_tokens"]}
    if (padding := content["padding"]) is not None:
        special[padding["pad_id"]] = padding["pad_token"]
    unknown = content["model"]["unk_token"]
    if (number := content["model"]["vocab"].get(unknown)) is not None:
        special[number] = unknown
    return content, special


def _characters(tokenizer: Tokenizer) -> list[int]:
    prefix = json.loads(tokenizer.to_str())["model"]["continuing_subword_prefix"]
    return [i for token, i in tokenizer.get_vocab().items() if len(token.removeprefix(prefix)) == 1]


def _renumber(processor: Any, places: dict[int, int]) -> None:
    """Replace the ids in a post-processor: lists "ids" of special tokens, or pairs (token, id)."""
    if not isinstance(processor, dict):
        return
    for name in ("cls", "sep"):
        if name in processor:
            processor[name] = [processor[name][0], places[processor[name][1]]]
    for token in (processor.get("special_tokens") or {}).values():
        token["ids"] = [places[i] for i in token["ids"]]
    for each in processor.get("processors") or ():
        _renumber(each, places)
