"""A HuggingFace directory <-> a module: files, key names, strict checks.

Loading goes through four steps, and the module is touched only by the last:
    files   model.safetensors, pytorch_model.bin or shards of either -> {key as stored: tensor}, memory-mapped
    names   old and foreign spellings -> the module's own key (this is the only place that knows them)
    checks  missing, unexpected, shape, dtype, finite: refused with file, key and cause
    values  copied into the parameters, cast to their dtype

Saving is in `saving.py`. Nothing is unpickled except by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.checkpoint.files import (
    BIN,
    BIN_INDEX,
    CONFIG,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    CheckpointError,
    cause,
    config_of_weights,
    listed,
    parse_json,
    read_json,
    read_stamp,
)
from fastbert.checkpoint.save import save as save
from fastbert.layers import quantized as quantization
from fastbert.models.families import FAMILIES, REFUSED, Family

logger = logging.getLogger(__name__)

# What a hub download brings: first without .bin, which is fetched only where there are no safetensors.
_HUB_FILES = ["*.json", "vocab.txt", "merges.txt", "*.model", SAFETENSORS, "model-*.safetensors"]
_HUB_BIN_FILES = [BIN, "pytorch_model-*.bin"]

# First parts of the keys of every family's task heads.
_HEADS = {
    "cls", "classifier", "pre_classifier", "sop_classifier", "qa_outputs", "lm_head", "predictions",
    "vocab_transform", "vocab_layer_norm", "vocab_projector", "sequence_summary",
    "discriminator_predictions", "generator_predictions", "generator_lm_head",
}  # fmt: skip
# Wrappers that put their own name before every key: DataParallel, torch.compile.
_WRAPPERS = ("module.", "_orig_mod.")
# Buffers that old versions stored and that hold no weights.
_OLD_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_OLD_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class LoadReport:
    """What `load_weights` found.

    Attributes:
        files: the files read.
        missing: the module's keys that no file held (a fresh head); empty for a complete checkpoint.
        unused: keys, as stored, of heads that the module does not have.
        mismatched: (key, shape in the file, shape in the module) of the weights that were left out because
            their shapes differ; those of the module are fresh.
    """

    files: list[Path]
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)


class _Stored(NamedTuple):
    """One tensor of a file."""

    file: Path
    key: str  # as the file spells it
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.file}: {self.key}"


# --- where the files are ------------------------------------------------------------------------------------


def resolve(
    name_or_path: str | os.PathLike,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    force_download: bool = False,
    subfolder: str = "",
) -> Path:
    """The directory of a checkpoint: `name_or_path` itself, or the local copy of a hub repository.

    Args:
        name_or_path: a directory, or a HuggingFace hub name ("bert-base-uncased", "owner/name").
        revision, cache_dir, local_files_only, token, force_download: as in
            `huggingface_hub.snapshot_download`.
        subfolder: the folder in it that holds the checkpoint.

    Raises:
        CheckpointError: it is neither, or the hub cannot be reached.
    """
    path = _local(name_or_path)
    if path.is_dir():
        return _inside(path, subfolder)
    if path.exists():
        raise CheckpointError(f"{path}: is a file; expected the directory that holds it")
    hub = _hub(name_or_path)
    options = {
        "revision": revision,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "token": token,
        "force_download": force_download,
    }
    files, bin_files = (
        [f"{subfolder}/{name}" if subfolder else name for name in names]
        for names in (_HUB_FILES, _HUB_BIN_FILES)
    )
    root = Path(_ask_hub(hub.snapshot_download, name_or_path, allow_patterns=files, **options))
    directory = _inside(root, subfolder)
    if not any((directory / name).exists() for name in (SAFETENSORS, SAFETENSORS_INDEX)):
        _ask_hub(hub.snapshot_download, name_or_path, allow_patterns=bin_files, **options)
    return directory


def _inside(directory: Path, subfolder: str) -> Path:
    if not subfolder:
        return directory
    if not (directory / subfolder).is_dir():
        raise CheckpointError(f"{directory}: has no folder {subfolder!r}, which subfolder names")
    return directory / subfolder


def read_config(name_or_path: str | os.PathLike, subfolder: str = "", **options: Any) -> dict[str, Any]:
    """The content of a checkpoint's config.json.

    In a directory where a save was killed between its two renames, that of the config that belongs to the
    weights (`files.config_of_weights`).

    Args:
        name_or_path: a directory, a JSON file, or a hub name.
        subfolder: the folder in it that holds the file.
        options: revision, cache_dir, local_files_only, token, force_download, as in `resolve`.

    Raises:
        CheckpointError: no such file, or it is not a JSON object.
    """
    path = _local(name_or_path)
    if path.is_dir():
        return _read_own_config(_inside(path, subfolder))
    if not path.exists():
        options |= {"filename": CONFIG, "subfolder": subfolder or None}
        path = Path(_ask_hub(_hub(name_or_path).hf_hub_download, name_or_path, **options))
    return read_json(path)


def _read_own_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    content = config_of_weights(directory)
    if content is not None:
        return parse_json(content, path)
    if path.is_file():
        raise CheckpointError(
            f"{path}: is of a save that was killed before its weights were in place, and there was no "
            "config.json before that save; save again"
        )
    return read_json(path)  # which says what is wrong


def _local(name_or_path: str | os.PathLike) -> Path:
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise TypeError(f"name_or_path: expected a path or a hub name, got {type(name_or_path).__name__}")
    if not os.fspath(name_or_path):
        raise CheckpointError("name_or_path: is empty; expected a directory or a hub name")
    return Path(name_or_path).expanduser()


def _hub(name: str | os.PathLike) -> Any:
    text = os.fspath(name)
    if isinstance(name, Path) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text):
        raise CheckpointError(f"{text}: no such directory")
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{text}: no such directory; to fetch it by that name from the hub, install huggingface_hub"
        ) from error
    return huggingface_hub


def _ask_hub(function: Any, name: str | os.PathLike, **options: Any) -> str:
    try:
        return function(os.fspath(name), **options)
    except Exception as error:  # network, permission, cache, naming: dozens of types, some of other packages
        raise CheckpointError(
            f"{name}: no such directory here, and the HuggingFace hub did not give it: {cause(error)}"
        ) from error


# --- files --------------------------------------------------------------------------------------------------


def _read_weights(
    directory: Path, use_safetensors: bool | None = None
) -> tuple[list[Path], dict[str, _Stored]]:
    """(files read, key as stored -> tensor) of the first of the four layouts that is there; of the first two
    or the last two where `use_safetensors` says so.
    """
    layouts = [(SAFETENSORS, SAFETENSORS_INDEX), (BIN, BIN_INDEX)]
    if use_safetensors is not None:
        layouts = layouts[:1] if use_safetensors else layouts[1:]
    for name, index in layouts:
        if os.path.lexists(directory / name):
            return [directory / name], _open_file(directory / name)
        if os.path.lexists(directory / index):
            return _open_shards(directory / index)
    there = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else None
    if there is None:
        raise CheckpointError(f"{directory}: no such directory")
    hint = "" if use_safetensors is None else f"; use_safetensors is {use_safetensors}"
    if "adapter_model.safetensors" in there:
        hint = "; adapter_model.safetensors is a PEFT adapter: load its base model and merge it first"
    elif foreign := [n for n in there if n.endswith((".h5", ".msgpack", ".onnx", ".gguf", ".ckpt.index"))]:
        hint = f"; {foreign[0]} is of a format that is not read here"
    names = [name for layout in layouts for name in layout]
    raise CheckpointError(f"{directory}: no weights; expected {', '.join(names[:-1])} or {names[-1]}{hint}")


def _open_shards(index: Path) -> tuple[list[Path], dict[str, _Stored]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: expected a non-empty object of key to file name")
    for key, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\0]", name):
            raise CheckpointError(
                f"{index}: weight_map: {key}: expected the name of a file beside it, got {name!r}"
            )
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{index}: missing shards beside it: {listed(absent)}")
    stored: dict[str, _Stored] = {}
    for file in files:
        content = _open_file(file)
        if twice := sorted(stored.keys() & content.keys()):
            raise CheckpointError(f"{file}: also in {stored[twice[0]].file.name}: {listed(twice)}")
        stored.update(content)
    absent = [key for key, name in weight_map.items() if key not in stored or stored[key].file.name != name]
    if absent:
        raise CheckpointError(
            f"{index.parent / weight_map[absent[0]]}: lacks what {index.name} says: {listed(absent)}"
        )
    return files, stored


def _open_file(file: Path) -> dict[str, _Stored]:
    if not file.is_file():
        raise CheckpointError(f"{file}: is not a file, or a link to one that is gone")
    content = _open_safetensors(file) if file.suffix == ".safetensors" else _open_bin(file)
    if not content:
        raise CheckpointError(f"{file}: holds no tensors")
    return {key: _Stored(file, key, tensor) for key, tensor in content.items()}


def _open_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as reader:
            return {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118 - the reader is no dict
    except Exception as error:  # SafetensorError, OSError, and torch's own for dtypes it lacks
        raise CheckpointError(f"{file}: truncated, or not a safetensors file: {cause(error)}") from error


def _open_bin(file: Path) -> dict[str, Tensor]:
    import pickle
    import zipfile

    archive = zipfile.is_zipfile(file)
    if archive:
        _check_archive(file)
    try:  # files older than torch 1.6 are no zip archives and cannot be mapped
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        reason = re.search(r"unsupported (global|class)[^\n]*", str(error), re.IGNORECASE)
        if reason is None:
            problem = "truncated, or not a PyTorch file (pickles of other kinds are not read)"
        else:
            problem = f"refused: its pickle asks for more than tensors, which would run code: {reason[0]}"
        raise CheckpointError(f"{file}: {problem}") from error
    except Exception as error:  # RuntimeError, EOFError, ValueError…: whatever a damaged archive leads to
        raise CheckpointError(f"{file}: truncated, or not a PyTorch file: {cause(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a dictionary of tensors, got {type(content).__name__}")
    for key, value in content.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{file}: expected texts as keys, got {key!r}")
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{file}: {key}: expected a tensor, got {type(value).__name__}")
        if value.is_meta:
            raise CheckpointError(f"{file}: {key}: was saved from the meta device and has no values")
    return content


def _check_archive(file: Path) -> None:
    """Refuse a zip archive that unpacks to more than it holds: PyTorch compresses nothing."""
    import zipfile

    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except Exception as error:  # BadZipFile, OSError, NotImplementedError, and codecs' own for odd names
        raise CheckpointError(f"{file}: truncated, or not a PyTorch file: {cause(error)}") from error
    if unpacked > (size := file.stat().st_size):
        raise CheckpointError(
            f"{file}: is compressed: it unpacks to {unpacked:,} bytes from {size:,}; PyTorch stores its "
            "archives uncompressed, and compressed ones are not read"
        )


# --- names --------------------------------------------------------------------------------------------------


class _Names:
    """The keys of one module, and how a file may spell them."""

    def __init__(self, model: nn.Module):
        self.family = model.config.family
        self.state = model.state_dict(keep_vars=True)  # key -> parameter or buffer
        self.tied = {k: v for k, v in model.tied_weights().items() if k in self.state}  # target -> source
        self.is_base = model.is_base_model
        self.prefix = "" if self.is_base else model.base_model_prefix + "."
        self.stored_prefix = model.base_model_prefix + "."
        self.encoder = [key for key in self.state if key.startswith(self.prefix)]
        # first parts of the encoder's own keys: "embeddings", "encoder", …
        self.roots = {key[len(self.prefix) :].split(".")[0] for key in self.encoder}
        self.pooler = (self.family.pooler or "pooler") + "."
        self.int8 = {  # key -> the module whose 8-bit weight or scales it is
            f"{name}.{leaf}": module
            for name, module in model.named_modules()
            if isinstance(module, quantization.QuantizedLinear)
            for leaf in ("weight", "scale")
        }

    def canonical(self, key: str) -> str:
        """The module's spelling of a stored key."""
        while key.startswith(_WRAPPERS):
            key = key.split(".", 1)[1]
        for old, new in _OLD_SUFFIXES.items():
            if key.endswith(old):
                key = key[: -len(old)] + new
        inside = key.startswith(self.stored_prefix)
        while key.startswith(self.stored_prefix):
            key = key[len(self.stored_prefix) :]
        if inside or key.split(".")[0] in self.roots | {"pooler"}:
            return self.prefix + key
        return key

    def is_pooler(self, key: str) -> bool:
        return key.startswith(self.prefix + self.pooler)

    def may_be_left_over(self, key: str) -> bool:
        """Whether an unexpected key, in our spelling, is part of a head that this module does not have."""
        return key.split(".")[0] in _HEADS or self.is_pooler(key)

    def part(self, key: str) -> str | None:
        """The part of the module that may be absent as a whole and to which the key belongs, or None."""
        if self.is_base:
            return None
        if key.startswith(self.prefix):
            return "pooler" if self.is_pooler(key) else None
        pair = self.family.next_sentence
        return "sentence-pair head" if pair and key.startswith(pair + ".") else "head"


def _rename(names: _Names, stored: dict[str, _Stored]) -> dict[str, _Stored]:
    renamed: dict[str, _Stored] = {}
    for key, item in stored.items():
        if key.endswith(_OLD_BUFFERS):
            continue
        ours = names.canonical(key)
        if ours in renamed:
            raise CheckpointError(f"{item}: the same parameter as {renamed[ours].key}, stored twice")
        renamed[ours] = item
    return renamed


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit (NaN too)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _resolve_ties(names: _Names, found: dict[str, _Stored]) -> None:
    """Drop stored copies of tied weights; use a copy where the original is absent."""
    for target, source in names.tied.items():
        copy = found.pop(target, None)
        if copy is None:
            continue
        original = found.setdefault(source, copy)
        if not _same(copy.tensor, original.tensor):
            raise CheckpointError(
                f"{copy}: differs from {original.key}, to which config tie_word_embeddings = true ties it; "
                f"if the file is right, set tie_word_embeddings to false in config.json"
            )
    # Untied decoders once had their bias tied all the same: one of the two names was stored.
    lm_head = names.family.lm_head
    if lm_head is not None and lm_head.bias is not None:
        pair = lm_head.bias, lm_head.decoder + ".bias"
        for absent, there in (pair, pair[::-1]):
            if absent in names.state and absent not in names.tied and absent not in found and there in found:
                found[absent] = found[there]


# --- checks -------------------------------------------------------------------------------------------------


def _numbered(path: str, keys: Iterable[str]) -> int:
    """How many numbered entries `path` has among the keys."""
    pattern = re.compile(rf"(?:^|\.){re.escape(path)}\.(\d+)\.")
    return 1 + max((int(m[1]) for key in keys if (m := pattern.search(key))), default=-1)


def _spelt(family: Family, key: str) -> str:
    """A config key as the family's config.json spells it."""
    return {ours: theirs for theirs, ours in family.aliases.items()}.get(key, key)


def _is_int8(item: _Stored | None) -> bool:
    return item is not None and item.tensor.dtype == torch.int8


def _why(names: _Names, config: Any, found: dict[str, _Stored]) -> str:
    """The likely cause of missing or unexpected keys, "" where none is plain."""
    scales = any(key.endswith(".scale") and _is_int8(found.get(key[:-5] + "weight")) for key in found)
    if scales and not names.int8:
        return "; the file holds 8-bit weights, but the config has no quantization_config of this package"
    if names.int8 and not scales:
        return "; config quantization_config says that the weights are 8-bit, but those of the file are not"
    count_key = "num_hidden_groups" if names.family.shared_layers else "num_hidden_layers"
    says, holds = getattr(config, count_key), _numbered(names.family.layers, found)
    if holds and says != holds:
        return f"; config {_spelt(names.family, count_key)} says {says}, the file has {holds}"
    if names.family.shared_layers:
        inner = _numbered("albert_layers", found)
        if inner and inner != config.inner_group_num:
            return f"; config inner_group_num says {config.inner_group_num}, the file has {inner}"
    first = {item.key.split(".")[0] for item in found.values()}
    others = {family.prefix for family in FAMILIES.values()} | {name.replace("-", "_") for name in REFUSED}
    if foreign := sorted(first & (others - {names.family.prefix})):
        return (
            f"; config model_type says {config.model_type!r}, but the file's keys begin with {foreign[0]!r}"
        )
    if lm := names.family.lm_head:
        weight = lm.decoder + ".weight"
        if weight in names.state and weight not in names.tied and weight not in found:
            return f"; config tie_word_embeddings is false, so {weight} must be stored"
    return ""


def _check_keys(names: _Names, config: Any, files: list[Path], found: dict[str, _Stored]) -> LoadReport:
    expected = [key for key in names.state if key not in names.tied]
    missing = [key for key in expected if key not in found]
    extra = [key for key in found if key not in names.state]
    unexpected = [key for key in extra if not names.may_be_left_over(key)]
    where = files[0] if len(files) == 1 else files[0].parent

    # a head or a pooler may be absent as a whole
    fresh = []
    for part in ("head", "sentence-pair head", "pooler"):
        keys = [key for key in expected if names.part(key) == part]
        if keys and all(key in missing for key in keys):
            fresh += keys
    refused = [key for key in missing if key not in fresh]
    if refused or unexpected:
        problems = []
        if refused:
            problems.append(f"missing keys: {listed(refused)}")
        if unexpected:
            problems.append(f"unexpected keys: {listed(found[key].key for key in unexpected)}")
        why = _why(names, config, found)
        if refused and all(names.is_pooler(key) for key in refused):
            why = "; the file has no pooler: pass add_pooling_layer=False"
        raise CheckpointError(f"{where}: {'; '.join(problems)}{why}")
    return LoadReport(files, missing=fresh, unused=[found[key].key for key in extra])


def _check_mathematics(config: Any, files: list[Path]) -> None:
    """Refuse a config.json of another save than the weights, where they say with which one they were saved.

    A config that agrees with the weights is right whatever config.json says. So is one that differs from a
    config.json that agrees: the caller has overridden it.
    """
    for file in files:
        stamp = read_stamp(file) if file.suffix == ".safetensors" else None
        if stamp is None or not _differing(config, stamp.mathematics):
            continue
        try:
            stated = type(config).from_dict({"model_type": config.model_type, **read_config(file.parent)})
        except (CheckpointError, TypeError, ValueError):  # none there, or another architecture's
            stated = config
        if differing := _differing(stated, stamp.mathematics):
            says = "; ".join(
                f"{_spelt(stated.family, key)}: {CONFIG} says {ours!r}, the weights are saved with {theirs!r}"
                for key, (ours, theirs) in differing.items()
            )
            raise CheckpointError(
                f"{file.parent / CONFIG}: does not belong to {file.name}: {says}. If one of them was copied "
                "or edited, put it back; to change the mathematics, pass the key to from_pretrained and save"
            )


def _differing(config: Any, stored: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> (the config's value, the stored one) where the two differ."""
    ours = config.mathematics()
    return {k: (ours[k], stored[k]) for k in ours if k in stored and ours[k] != stored[k]}


def _size_key(names: _Names, key: str, axis: int) -> str | None:
    """The config key that sets the size of one axis of a parameter."""
    family, layer = names.family, names.family.layer
    hidden = "embedding_size" if family.projection and ".embeddings." in "." + key else "hidden_size"
    lm = family.lm_head
    decoders = () if lm is None else (lm.decoder + ".weight", lm.decoder + ".bias", lm.bias)
    for suffixes, sizes in (
        (("word_embeddings.weight",), ("vocab_size", hidden)),
        (("position_embeddings.weight",), ("max_position_embeddings", hidden)),
        (("token_type_embeddings.weight",), ("type_vocab_size", hidden)),
        (("relative_attention_bias.weight",), ("relative_attention_num_buckets", "num_attention_heads")),
        (tuple(d for d in decoders if d), ("vocab_size", hidden)),
        (tuple(f".{layer.intermediate}.{leaf}" for leaf in ("weight", "scale", "bias")),
         ("intermediate_size", hidden)),
        ((f".{layer.output}.weight",), (hidden, "intermediate_size")),
        (("classifier.weight", "classifier.bias", "classifier.out_proj.weight", "classifier.out_proj.bias",
          "qa_outputs.weight", "qa_outputs.bias"), ("num_labels", hidden)),
        (("embeddings_project.weight", "hidden_mapping_in.weight"), ("hidden_size", "embedding_size")),
    ):  # fmt: skip
        if key.endswith(suffixes) and not key.endswith("pre_classifier.weight"):
            return sizes[axis]
    return hidden


def _check_shapes(
    names: _Names, config: Any, found: dict[str, _Stored], ignore_mismatched: bool
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Refuse tensors of another shape; or take them out of `found` and return them, as `LoadReport` does."""
    wrong, left_out = [], []
    for key, param in names.state.items():
        item = found.get(key)
        if item is None or item.tensor.shape == param.shape:
            continue
        if ignore_mismatched and key not in names.int8:
            left_out.append((key, tuple(found.pop(key).tensor.shape), tuple(param.shape)))
            continue
        text = f"{item}: shape {tuple(item.tensor.shape)}, but the config makes it {tuple(param.shape)}"
        if item.tensor.dim() == param.dim():
            axis = next(
                i for i, (a, b) in enumerate(zip(item.tensor.shape, param.shape, strict=True)) if a != b
            )
            size_key = _size_key(names, key, axis)
            if getattr(config, size_key, None) == param.shape[axis]:
                size = item.tensor.shape[axis]
                says = f"{_spelt(names.family, size_key)} says {param.shape[axis]}"
                text += f" (config {says}, the file has {size})"
        wrong.append(text)
    if wrong:
        more = f" … and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError("; ".join(wrong[:5]) + more)
    return left_out


def _check_values(names: _Names, key: str, item: _Stored) -> None:
    tensor, dtype = item.tensor, names.state[key].dtype
    if key in names.int8:
        problem = names.int8[key].problem(key.rpartition(".")[2], tensor)
        if problem:
            raise CheckpointError(f"{item}: {problem}")
        return
    if tensor.dtype not in _FLOATS or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
        raise CheckpointError(
            f"{item}: dtype {kind}; expected float32, float64, float16 or bfloat16 (no quantised weights)"
        )
    if tensor.numel() == 0:
        return
    low, high = (float(v) for v in torch.aminmax(tensor))  # NaN where there is one; one pass, no copy
    if not (abs(low) < float("inf") and abs(high) < float("inf")):
        raise CheckpointError(f"{item}: holds {'NaN' if low != low else 'infinity'}; expected finite weights")
    if max(-low, high) > torch.finfo(dtype).max:
        raise CheckpointError(f"{item}: {max(-low, high):.3g} is too large for {dtype}, the model's dtype")


# --- loading ------------------------------------------------------------------------------------------------


def load_weights(
    model: nn.Module,
    directory: str | os.PathLike,
    *,
    allow_missing_head: bool = True,
    ignore_mismatched_sizes: bool = False,
    use_safetensors: bool | None = None,
    state_dict: dict[str, Tensor] | None = None,
) -> LoadReport:
    """Load a checkpoint's weights into a model, cast to the dtypes of its parameters.

    Parameters on the meta device are replaced by parameters on the CPU, others are written in place. Nothing
    is changed if anything is refused.

    Args:
        model: a model of this package (of it are used: `config`, `base_model_prefix`, `is_base_model`,
            `tied_weights()`).
        directory: holds model.safetensors, pytorch_model.bin or shards of either with their index.
        allow_missing_head: a head (or the pooler under one) of which the files hold no key keeps its fresh
            values, with one warning; False refuses that too.
        ignore_mismatched_sizes: a weight of another shape than the model's is left out and the model's one
            initialised, with one warning that names it; False refuses it.
        use_safetensors: True reads safetensors only, False .bin only, None whichever is there.
        state_dict: tensors to load instead of those of the files, of which none is read.

    Returns:
        LoadReport: files read, fresh keys, keys of other heads left over.

    Raises:
        CheckpointError: naming file, key and cause.
    """
    config = model.config
    foreign = config.get("quantization_config")
    if foreign and not quantization.in_config(config):
        method = foreign.get("quant_method", foreign.get("format")) if isinstance(foreign, dict) else foreign
        raise CheckpointError(
            f"{Path(directory) / CONFIG}: quantization_config: quantised weights are not read but those of "
            f"this package's quantize(), got {method!r}; load the floating-point checkpoint and quantise that"
        )
    names = _Names(model)
    files, stored = _weights_of(directory, use_safetensors, state_dict)
    where = files[0].parent if state_dict is None else files[0]
    found = _rename(names, stored)
    _resolve_ties(names, found)
    report = _check_keys(names, config, files, found)
    if report.missing and not allow_missing_head:
        raise CheckpointError(f"{where}: missing keys: {listed(report.missing)}")
    report.mismatched = _check_shapes(names, config, found, ignore_mismatched_sizes)
    if state_dict is None:
        _check_mathematics(config, files)
    for key in names.state:
        if key in found:
            _check_values(names, key, found[key])

    _assign(model, names, found, fresh={*report.missing, *(key for key, _, _ in report.mismatched)})
    problems = []
    if report.missing:
        problems.append(f"has no weights for {listed(report.missing)}")
    if report.mismatched:
        shapes = (f"{key} {stored}, here {own}" for key, stored, own in report.mismatched)
        problems.append(f"has weights of other shapes, left out: {listed(shapes)}")
    if problems:
        text = "; ".join(problems) + ": freshly initialised, train them before use"
        warnings.warn(f"{where}: {text}", UserWarning, stacklevel=3)
    if report.unused:
        logger.info("%s: left over, of heads not in this model: %s", where, listed(report.unused))
    if state_dict is not None:
        report.files = []
    return report


def _weights_of(
    directory: str | os.PathLike | None, use_safetensors: bool | None, state_dict: dict[str, Tensor] | None
) -> tuple[list[Path], dict[str, _Stored]]:
    """What `_read_weights` returns, or the like of it for tensors that the caller has."""
    if state_dict is None:
        return _read_weights(Path(directory), use_safetensors)
    where = Path("state_dict")
    return [where], _given(where, state_dict)


def _given(where: Path, state_dict: dict[str, Tensor]) -> dict[str, _Stored]:
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict: expected a dictionary of tensors, got {type(state_dict).__name__}")
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"state_dict: expected texts as keys, got {key!r}")
        if not isinstance(value, Tensor) or value.is_meta:
            kind = "a tensor on meta" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"state_dict: {key}: expected a tensor with values, got {kind}")
    return {key: _Stored(where, key, tensor.detach()) for key, tensor in state_dict.items()}


_FEW_LAYERS = 100  # are made on the meta device in no time


def check_depth(
    config: Any,
    directory: str | os.PathLike | None,
    *,
    use_safetensors: bool | None = None,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Refuse a config of far more layers than the weights have, before anything is built for them.

    Args:
        config: the EncoderConfig.
        directory, use_safetensors, state_dict: where the weights are, as in `load_weights`; `directory` may
            be None where `state_dict` is given.

    Raises:
        CheckpointError: naming the config key, or what is wrong with the files.
        TypeError: `state_dict` is no dictionary of tensors.
    """
    family, layers, keys = config.family, config.num_hidden_layers, ["num_hidden_layers"]
    if family.shared_layers:
        layers, keys = (
            config.num_hidden_groups * config.inner_group_num,
            ["num_hidden_groups", "inner_group_num"],
        )
    if layers <= _FEW_LAYERS:
        return
    files, stored = _weights_of(directory, use_safetensors, state_dict)
    holds = _numbered(family.layers, stored)
    if family.shared_layers:
        holds *= _numbered("albert_layers", stored)
    if layers > holds:
        says = " * ".join(_spelt(family, key) for key in keys)
        raise CheckpointError(f"{files[0]}: config {says} says {layers}, the file has {holds}")


def stored_dtype(directory: str | os.PathLike, use_safetensors: bool | None = None) -> torch.dtype:
    """The dtype of the first floating-point weight in the files, chosen as `load_weights` does.

    Raises:
        CheckpointError: the files cannot be read, or hold no such weight.
    """
    files, stored = _read_weights(Path(directory), use_safetensors)
    for item in stored.values():
        if item.tensor.dtype in _FLOATS:
            return item.tensor.dtype
    raise CheckpointError(f"{files[0]}: no float weights; expected float32, float64, float16 or bfloat16")


@torch.no_grad()
def _assign(model: nn.Module, names: _Names, found: dict[str, _Stored], fresh: set[str]) -> None:
    made: dict[int, Tensor] = {}  # id of the parameter on meta -> the one that takes its place
    for key, param in names.state.items():
        if not param.is_meta or id(param) in made or key in names.tied:
            continue
        value = torch.empty(param.shape, dtype=param.dtype, device="cpu")
        if key in fresh:
            _initialise(key, value, model.config.initializer_range)
        else:
            value.copy_(found[key].tensor)
        is_parameter = isinstance(param, nn.Parameter)
        made[id(param)] = nn.Parameter(value, param.requires_grad) if is_parameter else value
    for key, param in names.state.items():
        if not param.is_meta:
            if key in found:
                param.copy_(found[key].tensor)
            continue
        source = names.state[names.tied.get(key, key)]
        owner, _, name = key.rpartition(".")
        module = model.get_submodule(owner)
        (module._parameters if name in module._parameters else module._buffers)[name] = made[id(source)]


def _initialise(key: str, value: Tensor, std: float) -> None:
    """What every family does to a new head: normal weights, zero biases, LayerNorm at identity."""
    if key.endswith("bias"):
        value.zero_()
    elif value.dim() == 1:
        value.fill_(1.0)
    else:
        value.normal_(0.0, std)
