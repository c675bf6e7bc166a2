"""Read and write sentence-transformers' files: modules, pooling, length, prompt, similarity."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from fastbert.checkpoint.files import read_json, replace
from fastbert.ops.pooling import MODES as POOLINGS
from fastbert.sentences.similarity import SIMILARITIES

# sentence-transformers' names of the file with the maximum length, in its search order
_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MASK_TOKENS = ("[MASK]", "<mask>")
# Usual spellings of the special tokens; transformers needs them named to load a saved tokenizer
_SPECIAL_TOKENS = {
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "unk_token": ("[UNK]", "<unk>"),
    "mask_token": MASK_TOKENS,
}


@dataclass(frozen=True)
class SentenceSettings:
    """How to encode sentences with the model of a directory.

    Attributes:
        transformer: folder with config.json, weights and tokenizer.
        pooling: a mode of `fastbert.ops.pooling.pooling`.
        normalize: scale each embedding to length 1.
        max_length: most tokens of a sentence, special ones included; None if the directory sets none.
        lower_case: convert the text to lower case before it is tokenised.
        prompt: text put before every sentence.
        similarity: "cosine", "dot", "euclidean" or "manhattan".
        prompts: name -> prompt.
        include_prompt: whether pooling reads the prompt's tokens, too.
        segments: whether token types (which text of a pair a token belongs to) are passed to the model.
        dense: the folders of the Dense modules behind the pooling, in their order.
    """

    transformer: Path
    pooling: str = "mean"
    normalize: bool = False
    max_length: int | None = None
    lower_case: bool = False
    prompt: str = ""
    similarity: str = "cosine"
    prompts: dict[str, str] = field(default_factory=dict)
    include_prompt: bool = True
    segments: bool = True
    dense: tuple[Path, ...] = ()


class Module(NamedTuple):
    """An entry of modules.json.

    Attributes:
        kind: the last part of `name`.
        name: the class, as the file spells it.
        folder: the module's folder.
    """

    kind: str
    name: str
    folder: Path


def modules_of(directory: Path) -> list[Module] | None:
    """The entries of `directory`/modules.json; None if there is no such file."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    modules = []
    for place, module in enumerate(read_json(path, list)):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ValueError(f"{path}: entry {place} has no type")
        folder = directory / _module_folder(path, place, module.get("path", ""))
        modules.append(Module(module["type"].rpartition(".")[2], module["type"], folder))
    return modules


def reader_of(modules: list[Module] | None) -> str:
    """The class of fastbert that reads a directory with these modules."""
    kinds = [module.kind for module in modules or []]
    if "SpladePooling" in kinds:
        return "SparseEncoder"
    return "MultiVectorEncoder" if kinds[:2] == ["Transformer", "Dense"] else "SentenceEncoder"


def expect_modules(path: Path, modules: list[Module], known: Sequence[tuple[str, ...]]) -> list[Module]:
    """The modules, whose kinds must be one of the sequences in `known`.

    Args:
        path: modules.json, for the error.

    Raises:
        ValueError: naming a module that is not implemented, or all modules.
    """
    implemented = dict.fromkeys(kind for kinds in known for kind in kinds)
    reader = reader_of(modules)
    hint = f"; fastbert.{reader} reads this directory" if reader != "SentenceEncoder" else ""
    for kind, name, _ in modules:
        if kind not in implemented:
            raise ValueError(
                f"{path}: module {kind!r} ({name}) is not implemented; "
                f"implemented: {', '.join(implemented)}{hint}"
            )
    kinds = tuple(module.kind for module in modules)
    if kinds not in known:
        expected = " or ".join(", ".join(one) for one in known)
        raise ValueError(f"{path}: modules {', '.join(kinds) or 'none'}; expected {expected}{hint}")
    return modules


def choice(path: Path, config: dict[str, Any], key: str, known: Sequence[str], default: str) -> str:
    """config[key], or the default where it is missing or null; ValueError unless it is one of `known`."""
    value = default if config.get(key) is None else config[key]
    if value not in [*known]:
        raise ValueError(f"{path}: {key} {value!r}; expected one of {', '.join(known)}")
    return value


def positive(path: Path, config: dict[str, Any], key: str) -> int | None:
    """config[key], a positive integer; None where it is missing or null; else ValueError."""
    value = config.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{path}: {key} {value!r}; expected a positive integer")
    return value


def switch(path: Path, config: dict[str, Any], key: str, default: bool) -> bool:
    """config[key], true or false; the default where it is missing or null; else ValueError."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, bool):
        raise ValueError(f"{path}: {key} {value!r}; expected true or false")
    return value


def _pooling_of(folder: Path, override: str | None) -> tuple[str, dict[str, Any]]:
    """(the pooling mode of `folder`/config.json or the override, the content of that file)."""
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
        "Pass pooling= (--pooling) to choose one"
    )


def sentence_settings(
    directory: str | Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    dense: bool = False,
) -> SentenceSettings:
    """Read the settings of `directory`; keywords that are not None override them.

    Without sentence-transformers' files: mean pooling, no normalisation, no prompt.

    Args:
        dense: whether the caller runs Dense modules; otherwise a directory that has them is refused.

    Raises:
        ValueError: naming a module or pooling mode that is not implemented, or what is wrong in a file.
        FileNotFoundError: a file that another file requires is missing.
    """
    directory = Path(directory)
    if pooling is not None and pooling not in POOLINGS:
        raise ValueError(f"pooling: {pooling!r}; expected one of {', '.join(POOLINGS)}")
    transformer, pooling_folder, says_normalize, folders = directory, None, False, ()
    modules = modules_of(directory)
    if modules is not None:
        path = directory / "modules.json"
        folders = tuple(module.folder for module in modules if module.kind == "Dense")
        known = ("Transformer", "Pooling", *["Dense"] * len(folders))
        first, second, *_ = expect_modules(path, modules, [known, (*known, "Normalize")])
        if folders and not dense:
            raise ValueError(f"{path}: has Dense modules, which only SentenceEncoder and `encode` run")
        transformer, pooling_folder = first.folder, second.folder
        says_normalize = modules[-1].kind == "Normalize"
    elif (directory / "1_Pooling" / "config.json").is_file():
        pooling_folder = directory / "1_Pooling"

    mode, pooling_config = pooling or "mean", {}
    if pooling_folder is not None:
        mode, pooling_config = _pooling_of(pooling_folder, pooling)

    says_prompt, prompts, similarity = _defaults(directory / "config_sentence_transformers.json")
    prompt = says_prompt if prompt is None else prompt
    include_prompt = pooling_config.get("include_prompt", True) is not False
    if prompt and pooling_folder is not None and not include_prompt:
        raise ValueError(
            f"{pooling_folder / 'config.json'}: include_prompt false is not implemented "
            f"(the prompt is {prompt!r})"
        )
    max_length, lower_case, segments = text_settings(transformer)
    return SentenceSettings(
        transformer,
        mode,
        says_normalize if normalize is None else bool(normalize),
        max_length,
        lower_case,
        prompt,
        similarity,
        prompts,
        include_prompt,
        segments,
        folders,
    )


def module_settings(transformer: Path) -> tuple[Path, dict[str, Any]]:
    """(path, content) of sentence-transformers' settings of a model's folder; {} if there are none."""
    paths = [transformer / name for name in _LENGTH_FILES]
    path = next((path for path in paths if path.is_file()), None)
    return (paths[0], {}) if path is None else (path, read_json(path))


def text_settings(transformer: Path) -> tuple[int | None, bool, bool]:
    """(max_length, lower_case, segments) of a model's folder; see `SentenceSettings`."""
    path = transformer / "tokenizer_config.json"
    config_of_tokenizer = read_json(path) if path.is_file() else {}
    own_path, own = module_settings(transformer)
    max_length = positive(own_path, own, "max_seq_length")
    lower_case = switch(own_path, own, "do_lower_case", False)
    if max_length is None:
        says = config_of_tokenizer.get("model_max_length")
        if isinstance(says, (int, float)) and 0 < says < 1e9:  # 1e30 means no limit
            max_length = int(says)
    inputs = config_of_tokenizer.get("model_input_names")
    if inputs is not None and not isinstance(inputs, list):
        raise ValueError(f"{path}: model_input_names {inputs!r}; expected a list of names")
    return max_length, lower_case, inputs is None or "token_type_ids" in inputs


def _module_folder(modules_path: Path, place: int, name: object) -> str:
    """The name of a folder beside modules.json, or "" for the same folder; other places are refused."""
    plain = name.rstrip("/") if isinstance(name, str) and name[:1] != "/" else None
    if plain is None or plain in (".", "..") or re.search(r"[/\\\0]", plain):
        raise ValueError(
            f"{modules_path}: entry {place}: path: expected the name of a folder beside it, got {name!r}"
        )
    return plain


def prompt_settings(path: Path, config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """(default prompt, name -> prompt) in the content of config_sentence_transformers.json."""
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{path}: prompts: expected an object of texts")
    prompts = {key: text or "" for key, text in prompts.items()}
    if name is not None and name not in [*prompts]:
        raise ValueError(f"{path}: default_prompt_name {name!r} is not among the prompts")
    return "" if name is None else prompts[name], prompts


def _defaults(path: Path) -> tuple[str, dict[str, str], str]:
    """(default prompt, name -> prompt, similarity) of config_sentence_transformers.json."""
    config = read_json(path) if path.is_file() else {}
    similarity = choice(path, config, "similarity_fn_name", [*SIMILARITIES], "cosine")
    return *prompt_settings(path, config), similarity


def save_settings(
    settings: SentenceSettings, tokenizer: Tokenizer, width: int, pad_token_id: int | None
) -> None:
    """Write the tokenizer and the settings into `settings.transformer`, as sentence-transformers spells them.

    Each file replaces an old one whole; modules.json is the last.

    Args:
        settings: what to write, and where.
        tokenizer: saved without its truncation.
        width: numbers that are pooled.
        pad_token_id: the model's; None if it has none.

    Raises:
        CheckpointError: naming the file that cannot be written.
    """
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_truncation()
    known = {
        name: next((s for s in spellings if tokenizer.token_to_id(s) is not None), None)
        for name, spellings in _SPECIAL_TOKENS.items()
    }
    known["pad_token"] = None if pad_token_id is None else tokenizer.id_to_token(pad_token_id)
    # A default prompt without a name gets one
    default = next((name for name, text in settings.prompts.items() if text == settings.prompt), "default")
    default = default if settings.prompt else None
    prompts = settings.prompts | ({default: settings.prompt} if default else {})
    modules = ["Transformer", "Pooling", *["Dense"] * len(settings.dense)]
    modules += ["Normalize"] if settings.normalize else []
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": settings.max_length,
            "model_input_names": [
                "input_ids",
                *(["token_type_ids"] if settings.segments else []),
                "attention_mask",
            ],
            **{name: token for name, token in known.items() if token is not None},
        },
        "sentence_bert_config.json": {
            "max_seq_length": settings.max_length,
            "do_lower_case": settings.lower_case,
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": width,
            **{key: mode == settings.pooling for key, mode in _POOLING_KEYS.items()},
            "include_prompt": settings.include_prompt,
        },
        "config_sentence_transformers.json": {
            "prompts": prompts,
            "default_prompt_name": default,
            "similarity_fn_name": settings.similarity,
        },
        # Last: without modules.json the folder is read as a plain HuggingFace one
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
        path = settings.transformer / name
        path.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        replace(path, text.encode())
