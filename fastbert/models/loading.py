"""`from_pretrained` and `save_pretrained`: a model <-> a HuggingFace directory.

`fastbert.checkpoint` reads and writes the files; `arguments.py` lists the arguments of transformers that are
accepted.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, overload

import torch
from torch import Tensor, nn

from fastbert.checkpoint import hub, load, save
from fastbert.checkpoint.files import CONFIG
from fastbert.layers import float8, quantizing
from fastbert.models import arguments
from fastbert.models.config import EncoderConfig, as_config
from fastbert.models.config_checks import DEFAULTS
from fastbert.models.families import FAMILIES, family_of
from fastbert.runtime.devices import check_there


class Loadable(nn.Module):
    """The part of `PreTrainedModel` that creates a model from a config or files, and writes it to files.

    Attributes:
        model_type: the family that the class is for; None means any.
        is_base_model: whether the model is the encoder itself, so that its keys have no prefix.
        load_report: what `from_pretrained` found in the files.
    """

    model_type: ClassVar[str | None] = None
    is_base_model: ClassVar[bool] = False
    load_report: load.LoadReport
    tie_weights: Callable[[], None]

    @classmethod
    def from_config(cls, config: EncoderConfig, **kwargs: Any) -> Self:
        """A freshly initialised model; `kwargs` go to the constructor (`add_pooling_layer`)."""
        config = as_config(config)
        return cls.class_for(config)(config, **kwargs)

    @classmethod
    def class_for(cls, config: EncoderConfig) -> type[Self]:
        """The class to construct for `config`: this one, or for an Auto class the family's."""
        return cls

    @overload
    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path | None, *, output_loading_info: Literal[True], **options: Any
    ) -> tuple[Self, dict[str, Any]]: ...

    @overload
    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | None,
        *,
        config: EncoderConfig | str | Path | None = None,
        dtype: torch.dtype | str | None = "auto",
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        device_map: Any = None,
        state_dict: dict[str, Tensor] | None = None,
        ignore_mismatched_sizes: bool = False,
        use_safetensors: bool | None = None,
        strict: bool = True,
        output_loading_info: Literal[False] = False,
        subfolder: str = "",
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        **overrides: Any,
    ) -> Self: ...

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | None,
        *,
        config: EncoderConfig | str | Path | None = None,
        dtype: torch.dtype | str | None = "auto",
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        device_map: Any = None,
        state_dict: dict[str, Tensor] | None = None,
        ignore_mismatched_sizes: bool = False,
        use_safetensors: bool | None = None,
        strict: bool = True,
        output_loading_info: bool = False,
        subfolder: str = "",
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        **overrides: Any,
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Load a HuggingFace directory, or a hub name if huggingface_hub and a network are there.

        The model is in eval mode.

        Args:
            name_or_path: directory with config.json and weights (safetensors or .bin, sharded or not), or a
                hub name; None if both `config` and `state_dict` are given.
            config: replaces the directory's config.json; an EncoderConfig, or a path or hub name to read.
            dtype: the parameters' dtype; "auto" means the dtype in config.json or in the file, None float32.
                Weights that were saved as 8-bit integers stay 8-bit.
            torch_dtype: `dtype` under its older name.
            device: where to put the model; the CPU by default.
            device_map: `device` under transformers' name, or a mapping to one device. "auto" is the GPU if
                there is one, else the CPU.
            state_dict: weights to load in place of the files'.
            ignore_mismatched_sizes: initialise weights whose shape differs from the file's (a head with
                another number of labels); a warning names these weights.
            use_safetensors: True reads only safetensors, False only .bin, None safetensors or else .bin.
            strict: False leaves out weights under unknown keys, with one warning; True refuses them. Heads
                that the model lacks are left out either way, and missing weights of the encoder are refused
                either way.
            output_loading_info: return (model, info) as transformers does: info has missing_keys,
                unexpected_keys, mismatched_keys and error_msgs.
            subfolder: the folder in `name_or_path` that holds config.json and the weights.
            revision, cache_dir, force_download, local_files_only, token: for hub names.
            overrides: config keys that override the file's (num_labels, hidden_dropout_prob, …), and the
                constructor's own (add_pooling_layer). An encoder whose file has no pooler is made without
                one, with one warning, unless add_pooling_layer=True asks for it.

        Further arguments of transformers are accepted if they ask for what is done anyway:

            =====================  ===========  ============================================================
            argument               taken        otherwise
            =====================  ===========  ============================================================
            attn_implementation    eager, sdpa  refused: attention is this package's own
            low_cpu_mem_usage      True, False  (loading never holds the weights twice)
            trust_remote_code      False        refused: no code of a checkpoint is ever run
            weights_only           True         refused: a pickle is read for its tensors only
            from_tf, from_flax     False        refused: weights are read from safetensors and .bin files
            gguf_file, variant     None         refused: likewise, under their usual names
            quantization_config,   None, False  refused: load the floating-point file, call `quantize()`
            load_in_8bit, _4bit
            max_memory, offload_*  None, False  refused: the whole model is on one device
            tp_plan, device_mesh
            =====================  ===========  ============================================================

        `fastbert.models.arguments` has the whole list.

        Returns:
            The model; with `output_loading_info` (model, info).

        Raises:
            fastbert.CheckpointError: naming file, key and cause, where the weights do not fit.
            TypeError: for an override that is no config key.
            ValueError: naming an argument whose value is refused, and why.
        """
        known = {name: overrides.pop(name) for name in arguments.LOADING if name in overrides}
        arguments.check_loading(known)
        dtype = _one_dtype(dtype, torch_dtype)
        place = arguments.single_device(device, device_map)
        hub_options = {
            "revision": revision,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
            "token": token,
        }
        if name_or_path is not None:
            directory = hub.resolve(name_or_path, subfolder=subfolder, **hub_options)
        elif config is None or state_dict is None:
            raise TypeError(
                "name_or_path: expected a path or a hub name, got NoneType; "
                "None needs both config= and state_dict="
            )
        else:
            directory = None
        own = {k: overrides.pop(k) for k in ("add_pooling_layer",) if k in overrides}
        if config is not None and overrides:
            raise TypeError(f"from_pretrained: overrides {sorted(overrides)} cannot go with config=")
        if config is None:
            assert directory is not None
            config = cls._read_config(directory, overrides)
            config.name_or_path = str(name_or_path)
        elif isinstance(config, (str, Path)):
            path = config
            config = cls._read_config(path, {}, **hub_options)
            config.name_or_path = path
        else:
            config = as_config(config)
        int8 = quantizing.in_config(config)
        if float8.in_config(config):
            float8.check_place("device", place)
        check_there(place, "device" if device_map is None else "device_map")
        load.check_depth(config, directory, use_safetensors=use_safetensors, state_dict=state_dict)
        built = cls.class_for(config)
        without_pooler = (
            built.is_base_model
            and config.family.pooler is not None
            and not config.family.pooler_asked
            and "add_pooling_layer" not in own
            and not load.has_pooler(config, directory, use_safetensors=use_safetensors, state_dict=state_dict)
        )
        if without_pooler:
            own["add_pooling_layer"] = False
        with torch.device("meta"):
            model = built(config, **own)
        if int8:
            quantizing.prepare(model, config)
        elif float8.in_config(config):
            float8.prepare(model)
        model.to(_resolve_dtype(dtype, config, directory, use_safetensors, state_dict))
        report = model.load_report = load.load_weights(
            model,
            directory,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            use_safetensors=use_safetensors,
            state_dict=state_dict,
            strict=strict,
        )
        if without_pooler:
            warnings.warn(
                f"{name_or_path or 'state_dict'}: has no pooler: pooler_output is None "
                "(add_pooling_layer=False says so without this warning)",
                stacklevel=2,
            )
        model.tie_weights()
        model.to(place).eval()
        if not output_loading_info:
            return model
        return model, {
            "missing_keys": set(report.missing),
            "unexpected_keys": set(report.unused),
            "mismatched_keys": set(report.mismatched),
            "error_msgs": [],
        }

    @classmethod
    def _read_config(cls, place: str | Path, overrides: dict[str, Any], **hub_options: Any) -> EncoderConfig:
        """The config of a directory, a file or a hub name.

        The class supplies a missing model_type: files of 2018 have none.
        """
        content = hub.read_config(place, **hub_options)
        if "model_type" not in {**content, **overrides}:
            content = {**content, "model_type": cls._only_model_type(place)}
        _check_overrides(overrides, content)
        return EncoderConfig.from_dict(content, **overrides)

    @classmethod
    def _only_model_type(cls, place: str | Path) -> str:
        """The family of this class.

        Raises:
            ValueError: this class serves any family.
        """
        if cls.class_for.__func__ is Loadable.class_for.__func__:
            return cls.model_type or "bert"
        names = []
        for model_type in FAMILIES:
            # A family without such a head raises
            with contextlib.suppress(ValueError):
                names.append(cls.class_for(EncoderConfig(model_type)).__name__)
        where = Path(place) / CONFIG if Path(place).is_dir() else place
        raise ValueError(
            f"{where}: model_type: missing, and {cls.__name__} chooses the class by it; call from_pretrained "
            f"of the class itself ({', '.join(names)}), or pass model_type="
        )

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *,
        max_shard_size: int | str = "5GB",
        save_function: Callable[..., object] | None = None,
        **options: Any,
    ) -> None:
        """Write config.json and model.safetensors, as transformers does; an interrupted save leaves the old
        files.

        Args:
            save_directory: created if it is missing.
            is_main_process: False writes nothing, because another process does.
            state_dict: values to save instead of the model's own, such as those that accelerate has gathered.
            max_shard_size: bytes, or text such as "500MB" or "5GB"; larger checkpoints are split.
            save_function: not called. transformers uses it for pickles, which are not written here.
            options: further arguments of transformers, accepted if they ask for what is done anyway:
                safe_serialization=True, push_to_hub=False, variant=None (`fastbert.models.arguments`).

        Raises:
            fastbert.CheckpointError: a file could not be written, or a weight is not finite.
            TypeError: for an unknown argument.
            ValueError: naming an argument whose value is refused, and why.
        """
        if unknown := sorted(options.keys() - arguments.SAVING.keys()):
            raise TypeError(f"save_pretrained: unexpected arguments {unknown}")
        arguments.check_saving(options)
        if save_function is not None and not callable(save_function):
            raise TypeError(f"save_function: expected a function, got {type(save_function).__name__}")
        if is_main_process:
            save.save(self, save_directory, max_shard_size=max_shard_size, state_dict=state_dict)


def _check_overrides(overrides: dict[str, Any], content: dict[str, Any]) -> None:
    family = family_of(overrides.get("model_type", content.get("model_type")))
    known = {"fixed_heads", "pruned_heads", "intermediate_sizes", "model_type", "num_labels", "id2label"}
    known |= {"label2id", "token_schedule", "word_embedding_rank", "layer_groups"}
    known |= {*DEFAULTS, *content, *family.aliases, *family.defaults}
    known |= {"layer_types", "rope_parameters"} if family.rotary else set()
    unknown = sorted(overrides.keys() - known)
    if unknown:
        raise TypeError(
            f"from_pretrained: unexpected arguments {unknown}: no argument and no config key of this model"
        )


def _one_dtype(dtype: torch.dtype | str | None, torch_dtype: torch.dtype | str | None) -> Any:
    if torch_dtype is None:
        return dtype
    if dtype not in ("auto", None, torch_dtype):
        raise ValueError(f"dtype, torch_dtype: expected one of the two, got {dtype!r} and {torch_dtype!r}")
    return torch_dtype


def _resolve_dtype(
    dtype: torch.dtype | str | None,
    config: EncoderConfig,
    directory: Path | None,
    use_safetensors: bool | None,
    state_dict: dict[str, Tensor] | None,
) -> torch.dtype:
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype")
        if dtype is None:
            dtype = load.stored_dtype(directory, use_safetensors, state_dict)
    if dtype is None:
        return torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"dtype: expected float32, bfloat16, float16, float64, 'auto' or None, got {dtype!r}"
        )
    return dtype
