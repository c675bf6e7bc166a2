"""BertModel and what every model shares: what goes in and out, by HuggingFace's contract.

`BertModel` is the encoder of every family in `families.py`; `RobertaModel`, `DistilBertModel`, … are the
same class under the family's name. `AutoModel.from_pretrained` chooses by `model_type`. Task heads are in
`heads.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from fastbert.checkpoint import load as checkpoint
from fastbert.layers import quantized as quantization
from fastbert.layers.encoder import (
    Embeddings,
    EncoderLayer,
    Sequences,
    apply_linear,
    attach,
    part,
    pool_first,
    relative_bias,
    table,
    together,
)
from fastbert.models import arguments
from fastbert.models.config import DEFAULTS, EncoderConfig
from fastbert.models.families import FAMILIES, Family, family_of
from fastbert.models.inputs import Inputs, check_inputs, head_gates
from fastbert.models.lookalike import Lookalike
from fastbert.models.outputs import BaseModelOutputWithPooling
from fastbert.runtime import prepared

if TYPE_CHECKING:
    from typing_extensions import Self

    from fastbert.models.calls import EncoderCall


class PreTrainedModel(Lookalike, nn.Module):
    """Construction, loading, saving and the small accessors that every model shares.

    Attributes:
        config: the EncoderConfig.
        model_type: the family the class stands for, None for any.
        base_model_prefix: name of the encoder inside a model with a head ("bert").
        is_base_model: the model is the encoder itself, its keys carry no prefix.
        accepts_loss_kwargs, main_input_name, input_modalities, supports_gradient_checkpointing, model_tags:
            what transformers' Trainer and pipelines ask a model for.
    """

    looks_like = ("transformers.modeling_utils", "PreTrainedModel")
    model_type: ClassVar[str | None] = None
    is_base_model: ClassVar[bool] = False
    task: ClassVar[str] = "Model"  # last part of HuggingFace's class name
    # the loss is a mean over the batch: the Trainer divides it by the steps it accumulates
    accepts_loss_kwargs: ClassVar[bool] = False
    main_input_name: ClassVar[str] = "input_ids"
    input_modalities: ClassVar[str] = "text"
    supports_gradient_checkpointing: ClassVar[bool] = True
    model_tags: ClassVar[list[str] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a family's class take by position only what transformers has in BERT's order."""
        super().__init_subclass__(**kwargs)
        family = FAMILIES.get(vars(cls).get("model_type"))
        if family is not None and "forward" not in vars(cls):
            count = family.positional.get(cls.task, family.positional.get(""))
            if count is not None:
                cls.forward = _by_name_after(cls.forward, count, cls.__name__)

    def __init__(self, config: EncoderConfig):
        super().__init__()
        config = _as_config(config)
        if self.model_type is not None and config.model_type != self.model_type:
            raise ValueError(
                f"config model_type: {type(self).__name__} is for {self.model_type!r}, "
                f"got {config.model_type!r}; "
                "AutoModel chooses the class by model_type"
            )
        self.config = config
        self.checkpoint_every = 0  # recompute each n-th layer in backward, 0 for none

    @property
    def family(self) -> Family:
        """What this model's family changes against BERT."""
        return self.config.family

    @property
    def base_model_prefix(self) -> str:
        """Name of the encoder inside a model with a head."""
        return self.family.prefix

    @property
    def base_model(self) -> BertModel:
        """The encoder."""
        return self if self.is_base_model else self._modules[self.base_model_prefix]

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the parameters."""
        return next(self.parameters()).dtype

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many numbers the parameters hold, tied ones once, and 8-bit weights, which are buffers; without
        those of nn.Embedding where they are to be excluded.
        """
        tables = (m.weight for m in self.modules() if isinstance(m, nn.Embedding))
        left_out = {id(table) for table in tables} if exclude_embeddings else ()
        count = sum(
            p.numel()
            for p in self.parameters()
            if (p.requires_grad or not only_trainable) and id(p) not in left_out
        )
        return count if only_trainable else count + quantization.num_weights(self)

    # -- construction and files ------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: EncoderConfig, **kwargs: Any) -> Self:
        """A freshly initialised model; `kwargs` go to the constructor (`add_pooling_layer`)."""
        config = _as_config(config)
        return cls.class_for(config)(config, **kwargs)

    @classmethod
    def class_for(cls, config: EncoderConfig) -> type[PreTrainedModel]:
        """The class that serves `config`: this one, or for an Auto class the family's."""
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
        output_loading_info: bool = False,
        subfolder: str = "",
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        **overrides: Any,
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Load a HuggingFace directory, or a hub name where huggingface_hub and a network are there; in eval
        mode.

        Args:
            name_or_path: directory with config.json and weights (safetensors or .bin, sharded or not), or a
                hub name; None where both `config` and `state_dict` are given.
            config: used instead of the directory's config.json; a path or a hub name is read.
            dtype: parameters' dtype; "auto" takes the one config.json or the file states, None is float32.
                Weights that were saved as 8-bit integers stay so.
            torch_dtype: `dtype` under its older name.
            device: where to put the model; CPU by default.
            device_map: `device` under transformers' name, or a mapping to one device. "auto" is the GPU
                where there is one and the CPU where there is none.
            state_dict: weights to load instead of the files'.
            ignore_mismatched_sizes: leave out weights whose shape differs from the model's (a head with
                another number of labels). The model's are initialised, and a warning names them.
            use_safetensors: True reads safetensors only, False .bin only, None whichever is there.
            output_loading_info: return (model, info) as transformers does: info has missing_keys,
                unexpected_keys, mismatched_keys and error_msgs.
            subfolder: the folder in `name_or_path` that holds config.json and the weights.
            revision, cache_dir, force_download, local_files_only, token: for hub names.
            overrides: config keys that override the file's (num_labels, hidden_dropout_prob, …), and the
                constructor's own (add_pooling_layer).

        Further arguments of transformers are taken where they ask for what happens anyway:

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
        hub = {
            "revision": revision,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
            "token": token,
        }
        if name_or_path is not None:
            directory = checkpoint.resolve(name_or_path, subfolder=subfolder, **hub)
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
            config = cls._read_config(directory, overrides)
            config.name_or_path = name_or_path
        elif isinstance(config, (str, Path)):
            path = config
            config = cls._read_config(path, {}, **hub)
            config.name_or_path = path
        else:
            config = _as_config(config)
        int8 = quantization.in_config(config)
        if int8 and place.type != "cpu":
            raise ValueError(
                f"device: {place}, but the checkpoint is quantised to 8 bits, which is for a CPU; "
                "pass device='cpu', or load the floating-point checkpoint"
            )
        checkpoint.check_depth(config, directory, use_safetensors=use_safetensors, state_dict=state_dict)
        with torch.device("meta"):
            model = cls.class_for(config)(config, **own)
        if int8:
            quantization.prepare(model)
        model.to(_resolve_dtype(dtype, config, directory, use_safetensors, state_dict))
        report = model.load_report = checkpoint.load_weights(
            model,
            directory,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            use_safetensors=use_safetensors,
            state_dict=state_dict,
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
    def _read_config(cls, place: str | Path, overrides: dict[str, Any], **hub: Any) -> EncoderConfig:
        """The config of a directory, a file or a hub name; the class supplies a model_type that is missing,
        as it is in files of 2018.
        """
        content = checkpoint.read_config(place, **hub)
        if "model_type" not in {**content, **overrides}:
            content = {**content, "model_type": cls._only_model_type(place)}
        _check_overrides(overrides, content)
        return EncoderConfig.from_dict(content, **overrides)

    @classmethod
    def _only_model_type(cls, place: str | Path) -> str:
        """The family whose class this is.

        Raises:
            ValueError: this class serves any family.
        """
        if cls.class_for.__func__ is PreTrainedModel.class_for.__func__:
            return cls.model_type or "bert"
        names = []
        for model_type in FAMILIES:
            with contextlib.suppress(ValueError):  # the family has no such head
                names.append(cls.class_for(EncoderConfig(model_type)).__name__)
        where = Path(place) / checkpoint.CONFIG if Path(place).is_dir() else place
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
            save_directory: made if absent.
            is_main_process: False writes nothing: another process does.
            state_dict: values to save instead of the model's own, such as those that accelerate has gathered.
            max_shard_size: bytes, or text such as "500MB" or "5GB"; larger checkpoints are split.
            save_function: only pickles ever went through it; none are written.
            options: further arguments of transformers, taken where they ask for what happens anyway:
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
            checkpoint.save(self, save_directory, max_shard_size=max_shard_size, state_dict=state_dict)

    def quantize(self, dtype: str = "int8") -> Self:
        """Quantise the encoder layers' linear layers in place, for inference on a CPU; returns the model.

        One range a token and one scale an output channel, without calibration. The model is put in eval mode
        and its parameters are frozen: it cannot be trained afterwards. `save_pretrained` and
        `from_pretrained` keep the integers. See `fastbert.layers.quantized`.

        Args:
            dtype: "int8".

        Raises:
            TypeError, ValueError: naming the argument or the layer; nothing is changed then.
        """
        return quantization.quantize(self, dtype)

    @torch.no_grad()
    def init_weights(self, module: nn.Module | None = None) -> None:
        """BERT's initialisation of `module` (default: all): normal(0, initializer_range), zero biases, unit
        norms.
        """
        quantization.check_trainable(self if module is None else module, "init_weights")
        for child in (self if module is None else module).modules():
            if isinstance(child, (nn.Linear, nn.Embedding)):
                child.weight.normal_(0.0, self.config.initializer_range)
                if isinstance(child, nn.Embedding) and child.padding_idx is not None:
                    child.weight[child.padding_idx].zero_()
            elif isinstance(child, nn.LayerNorm):
                child.weight.fill_(1.0)
            if getattr(child, "bias", None) is not None:
                child.bias.zero_()

    def post_init(self) -> None:
        """Initialise (not on the meta device) and tie; every constructor ends with it."""
        if self.device.type != "meta":
            self.init_weights()
        self.tie_weights()

    def tied_weights(self) -> dict[str, str]:
        """Tied parameter -> the parameter it shares, both by name; empty where nothing is tied."""
        return {}

    def tie_weights(self) -> None:
        """Make the tied parameters one object again (after loading, `to_empty`, or replacing an
        embedding).
        """
        for target, source in self.tied_weights().items():
            (*target_path, target_name), (*source_path, source_name) = target.split("."), source.split(".")
            parameter = getattr(self.get_submodule(".".join(source_path)), source_name)
            setattr(self.get_submodule(".".join(target_path)), target_name, parameter)

    # -- accessors -------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embeddings."""
        return self.base_model.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings; tied weights follow."""
        self.base_model.embeddings.word_embeddings = value
        self.tie_weights()

    def get_output_embeddings(self) -> nn.Module | None:
        """The layer that gives one logit a token of the vocabulary; None where there is none."""
        return None

    def vocabulary_parameters(self) -> list[str]:
        """Names of the parameters with one row a token of the vocabulary."""
        prefix = "" if self.is_base_model else f"{self.base_model_prefix}."
        return [f"{prefix}{self.family.word_table}.weight"]

    @torch.no_grad()
    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None
    ) -> nn.Embedding:
        """Change the size of the vocabulary: of the word embeddings, and of the decoder and its bias where
        there is one.

        New rows are drawn from normal(0, initializer_range), new biases are 0; the old ones stay. The
        parameters are new objects: make an optimizer afterwards.

        Args:
            new_num_tokens: the new size; None keeps it.
            pad_to_multiple_of: round the size up to a multiple of this.

        Returns:
            The word embeddings.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        config = self.config
        size = config.vocab_size if new_num_tokens is None else new_num_tokens
        for name, value in (("new_num_tokens", size), ("pad_to_multiple_of", pad_to_multiple_of)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        size = -(-size // pad_to_multiple_of) * pad_to_multiple_of if pad_to_multiple_of else size
        if config.pad_token_id is not None and size <= config.pad_token_id:
            raise ValueError(f"new_num_tokens: {size} leaves out pad_token_id {config.pad_token_id}")
        tied = self.tied_weights()
        for name in self.vocabulary_parameters():
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            if name not in tied:
                setattr(module, leaf, _resized(getattr(module, leaf), size, config.initializer_range))
            if isinstance(module, nn.Embedding):
                module.num_embeddings = size
            elif isinstance(module, nn.Linear):
                module.out_features = size
        config.vocab_size = size
        self.tie_weights()
        return self.get_input_embeddings()

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute layers in backward instead of keeping their activations (non-reentrant, bit-equal).

        Args:
            activation_checkpointing_kwargs: `use_reentrant`, which must be False, and `preserve_rng_state`,
                which must be True.
            every_n_layers: recompute each n-th layer, beginning with the first; the others keep theirs.
            offload: must be False; activations stay on the model's device.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        for name, value in (activation_checkpointing_kwargs or {}).items():
            expected = {"use_reentrant": False, "preserve_rng_state": True}
            if name not in expected:
                raise TypeError(
                    f"activation_checkpointing_kwargs: {name!r} is not supported; "
                    f"expected one of {', '.join(expected)}"
                )
            if value is not expected[name]:
                raise ValueError(
                    f"activation_checkpointing_kwargs: {name}={value!r} is not supported; "
                    f"expected {expected[name]}"
                )
        if not isinstance(every_n_layers, int) or isinstance(every_n_layers, bool) or every_n_layers < 1:
            raise ValueError(f"every_n_layers: expected an integer >= 1, got {every_n_layers!r}")
        if offload:
            raise ValueError("offload: True is not supported; activations stay on the model's device")
        self.base_model.checkpoint_every = every_n_layers

    def activation_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self.base_model.checkpoint_every = 0

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether layers are recomputed in backward."""
        return self.base_model.checkpoint_every > 0

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """`activation_checkpointing_enable` under its older name."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, every_n_layers, offload)

    def gradient_checkpointing_disable(self) -> None:
        """`activation_checkpointing_disable` under its older name."""
        self.activation_checkpointing_disable()

    @property
    def is_gradient_checkpointing(self) -> bool:
        """`is_activation_checkpointing` under its older name."""
        return self.is_activation_checkpointing

    # -- what transformers' Trainer and pipelines ask for ----------------------------------------------------

    @property
    def name_or_path(self) -> str:
        """What `from_pretrained` loaded, "" for a fresh model."""
        return self.config.name_or_path

    @property
    def _keys_to_ignore_on_save(self) -> list[str] | None:
        # the Trainer ties the weights again where a checkpoint lacks exactly these
        return list(self.tied_weights()) or None

    def is_custom_code(self) -> bool:
        """Whether the class is none of transformers' own: peft asks before it renames keys."""
        return True

    def can_generate(self) -> bool:
        """Whether the model generates text: an encoder does not."""
        return False

    def add_model_tags(self, tags: str | list[str]) -> None:
        """Add to `model_tags`, which the Trainer writes into the model card."""
        new = [tags] if isinstance(tags, str) else list(tags)
        self.model_tags = list(dict.fromkeys([*(self.model_tags or ()), *new]))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: uploading is huggingface_hub's.

        Raises:
            NotImplementedError: always, saying how to upload.
        """
        raise NotImplementedError(
            "push_to_hub: not part of this package; call save_pretrained(directory), then "
            "huggingface_hub.upload_folder(repo_id=…, folder_path=directory)"
        )

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """What PyTorch calls in place of `forward` while torch.jit traces.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{type(self).__name__}: fastbert's own models cannot be traced (torch.jit.trace, or "
            "torch.onnx.export with dynamo=False); load the checkpoint by transformers, which "
            "fastbert.accelerate makes fast and which traces and exports as before. torch.export and "
            "torch.compile do take this model"
        )

    def train(self, mode: bool = True) -> Self:
        """Set training mode; what was derived from the weights is forgotten.

        Raises:
            RuntimeError: training mode for a quantised model; nothing is changed then.
        """
        if mode:
            quantization.check_trainable(self, "train")
        prepared.clear(self)
        return super().train(mode)


def _resized(old: nn.Parameter, rows: int, std: float) -> nn.Parameter:
    new = old.new_zeros(rows, *old.shape[1:])
    if old.dim() > 1:
        new[old.shape[0] :].normal_(0.0, std)
    new[: old.shape[0]] = old[:rows]
    return nn.Parameter(new, old.requires_grad)


def _as_config(config: Any) -> EncoderConfig:
    if isinstance(config, EncoderConfig):
        return config
    if not hasattr(config, "to_dict"):
        raise TypeError(f"config: expected an EncoderConfig, got {type(config).__name__}")
    return EncoderConfig.from_hf(config)


def _check_overrides(overrides: dict[str, Any], content: dict[str, Any]) -> None:
    family = family_of(overrides.get("model_type", content.get("model_type")))
    known = {*DEFAULTS, *content, "model_type", "num_labels", "id2label", "label2id"}
    known |= {*family.aliases, *family.defaults}
    unknown = sorted(set(overrides) - known)
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
        if dtype is None and state_dict is not None:
            dtype = next((t.dtype for t in state_dict.values() if t.is_floating_point()), None)
        elif dtype is None:
            dtype = checkpoint.stored_dtype(directory, use_safetensors)
    if dtype is None:
        return torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"dtype: expected float32, bfloat16, float16, float64, 'auto' or None, got {dtype!r}"
        )
    return dtype


class BertModel(PreTrainedModel):
    """The encoder: embeddings, layers and (where the family has one) the pooler.

    Args:
        config: an EncoderConfig, or a transformers config object.
        add_pooling_layer: make the pooler; families without one have none either way.

    Source: Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers", sec. 3.
    """

    is_base_model = True
    __call__: EncoderCall

    def __init__(self, config: EncoderConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        config, family = self.config, self.family
        self.embeddings = Embeddings(config)
        self.has_projection = bool(family.projection) and (
            family.projection_always or config.embedding_width != config.hidden_size
        )
        if self.has_projection:
            attach(self, family.projection, nn.Linear(config.embedding_width, config.hidden_size))
        elif config.embedding_width != config.hidden_size:
            raise ValueError(
                f"config embedding_size: {config.embedding_width} differs from hidden_size "
                f"{config.hidden_size}, and "
                f"{config.model_type} has no projection between them"
            )
        attach(self, family.layers, _layer_list(config))
        if family.relative_bias:
            attach(self, family.relative_bias, table(32, config.num_attention_heads))
        if family.pooler and add_pooling_layer:
            attach(self, family.pooler, nn.Linear(config.hidden_size, config.hidden_size))
        self.has_pooler = bool(family.pooler) and add_pooling_layer
        self.post_init()

    def extra_repr(self) -> str:
        """How many layers run fused, as an accelerated model says it."""
        count = sum(isinstance(module, EncoderLayer) for module in self.modules())
        return f"fastbert: {count} of {count} layers run fused, padding taken out"

    def layers(self) -> list[EncoderLayer]:
        """The layers in the order in which they run; a shared one stands there as often as it runs."""
        return layers_of(self, self.config, self.family)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        first_token_only: bool = False,
        packed: bool = False,
    ) -> BaseModelOutputWithPooling | tuple:
        """Encode a padded batch; the padding itself is never computed.

        Args:
            input_ids: (batch, seqlen) int64 or int32; or give `inputs_embeds` (batch, seqlen, embedding
                size).
            attention_mask: (batch, seqlen) bool, int or float, non-zero = keep, holes legal; or 4-D
                (batch or 1, nheads or 1, seqlen or 1, seqlen), bool (True = attend) or additive, used as it
                is: it hides keys, and all tokens are computed.
            token_type_ids, position_ids: (batch, seqlen); position_ids may be (1, seqlen).
            encoder_hidden_states, encoder_attention_mask, past_key_values, use_cache: refused if given; this
                is no decoder.
            head_mask: (nheads,) or (layers, nheads): each head's output is multiplied by its entry.
            output_attentions: return the probabilities of every layer, (batch, nheads, seqlen, seqlen).
            output_hidden_states: return the embedding output and every layer's output.
            return_dict: False gives a tuple.
            first_token_only: only position 0 of each sequence is wanted (CLS pooling, pooler_output):
                last_hidden_state is (batch, 1, hidden). The last layer is then computed for those rows
                alone, in training too, unless hidden states or attentions are asked for, or a hook watches
                that layer or a part of it.
            packed: for the task heads: return (hidden, hidden states, probabilities, Inputs), all of them
                packed, the second and third None if not asked for. hidden is (rows, hidden), with
                `first_token_only` (batch, hidden); the hidden states are (rows, hidden) either way.

        Returns:
            last_hidden_state (batch, seqlen, hidden), pooler_output (batch, hidden) or None, hidden_states,
            attentions. Rows of masked tokens are zeros, and so are their rows and columns of the attentions.
            The pooler reads position 0; a batch of no sequences gives empty tensors.

        A call on a GPU waits for it once: for the smallest and largest ids, which are checked, and for the
        number of kept tokens. It does not wait where that number is given on the host:
            - all inputs are CPU tensors: checked and packed there, then sent to the GPU;
            - input_ids on the GPU and a 2-D attention_mask that is a CPU tensor: the ids are not looked at,
              and one out of range is the caller's own fault, as in `torch.nn.functional.embedding`.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        for name, value in (
            ("encoder_hidden_states", encoder_hidden_states),
            ("encoder_attention_mask", encoder_attention_mask),
            ("past_key_values", past_key_values),
            ("use_cache", use_cache or None),
        ):
            if value is not None:
                raise ValueError(
                    f"{name}: not supported; this is an encoder without cross attention or cache"
                )
        config = self.config
        inputs = check_inputs(
            config, self.device, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        ).to(self.device)
        gates = head_gates(config, head_mask, self.device)
        want_attentions = config.output_attentions if output_attentions is None else output_attentions
        want_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states

        hidden, states, attentions = self._encode(
            inputs, gates, want_attentions, want_states, first_token_only
        )
        states, attentions = states if want_states else None, attentions if want_attentions else None
        if packed:
            return hidden, states, attentions, inputs
        return self._output(inputs, hidden, states, attentions, first_token_only, return_dict)

    def _output(
        self,
        inputs: Inputs,
        hidden: Tensor,
        states: list[Tensor] | None,
        attentions: list[Tensor] | None,
        first_token_only: bool,
        return_dict: bool | None,
        pooled: Tensor | None = None,
    ) -> BaseModelOutputWithPooling | tuple:
        """What `forward` returns, from packed tokens; `states` and `attentions` None where not asked for,
        `pooled` the pooler's output where it has run already.
        """
        packing = inputs.packing
        last = hidden.unsqueeze(1) if first_token_only else packing.unpack(hidden)
        if states is not None:
            whole = packing.unpack(states[-1]) if first_token_only else last
            states = (*(packing.unpack(s) for s in states[:-1]), whole)
        if self.has_pooler and pooled is None:
            pooled = pool_first(part(self, self.family.pooler), last[:, 0])
        output = BaseModelOutputWithPooling(
            last_hidden_state=last,
            pooler_output=pooled,
            hidden_states=states,
            attentions=None if attentions is None else tuple(packing.unpack_scores(p) for p in attentions),
        )
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()

    def forward_packed(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        first_token_only: bool = False,
    ) -> Tensor:
        """Encode sequences that are packed already.

        Args:
            input_ids: (total,) ids of all sequences, one after another.
            cu_seqlens: (batch + 1,) int32, where each sequence starts; the last entry is total.
            max_seqlen: the longest length, or more.
            token_type_ids, position_ids: (total,); by default 0, and counted from each sequence's start.
            first_token_only: only the first token of each sequence is wanted; see `forward`.

        All of them on the model's device, which a GPU is waited for once to check; or all of them CPU
        tensors; or `cu_seqlens` alone a CPU tensor. Then there is no waiting; see `forward`.

        Returns:
            (total, hidden) on the model's device; with `first_token_only` (batch, hidden), zeros where a
            sequence is empty.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        inputs = Inputs.from_packed(
            self.config, self.device, input_ids, cu_seqlens, max_seqlen, token_type_ids, position_ids
        ).to(self.device)
        return self._encode(inputs, None, False, False, first_token_only)[0]

    def _encode(
        self,
        inputs: Inputs,
        gates: Tensor | None,
        want_attentions: bool,
        want_states: bool,
        first_only: bool,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Packed tokens through all layers: (last hidden, all hidden states, probabilities), the last hidden
        (batch, hidden) with `first_only`.
        """
        packed, seed = inputs.packing, self._dropout_seed()
        hidden = self.embeddings(
            inputs.input_ids, inputs.position_ids, inputs.token_type_ids, inputs.inputs_embeds, seed
        )
        if self.has_projection:
            hidden = apply_linear(part(self, self.family.projection), hidden)
        sequences = Sequences(packed.cu_seqlens, packed.max_seqlen, self._bias(inputs), seed, want_attentions)
        layers, attentions = self.layers(), []
        states = [hidden] if want_states else []
        skip = (
            first_only
            and not (want_attentions or want_states)
            and hidden.shape[0] > 0
            and len(layers) > 0
            and type(layers[-1]) is EncoderLayer
            and layers[-1].may_skip_rows()
        )
        with together(layers, hidden):
            for i, layer in enumerate(layers):
                arguments = (
                    hidden,
                    sequences,
                    None if gates is None else gates[i],
                    1 + i * EncoderLayer.SITES,
                )
                only = {"first_only": True} if skip and i == len(layers) - 1 else {}
                every = self.checkpoint_every
                if every and i % every == 0 and self.training and torch.is_grad_enabled():
                    hidden, probs = recompute(layer, *arguments, **only, use_reentrant=False)
                else:
                    hidden, probs = layer(*arguments, **only)
                if want_states:
                    states.append(hidden)
                if want_attentions:
                    attentions.append(probs)
        if first_only:
            hidden = packed.keep_first(hidden) if skip else packed.first_rows(hidden)
        return hidden, states, attentions

    def _dropout_seed(self) -> Tensor | None:
        """One seed a call, from which every dropout site draws by its own offset; a device tensor, so that a
        replayed graph draws anew."""
        config = self.config
        if not self.training or not (config.hidden_dropout_prob or config.attention_probs_dropout_prob):
            return None
        return torch.randint(2**62, (1,), dtype=torch.int64, device=self.device)

    def _bias(self, inputs: Inputs) -> Tensor | None:
        return attention_bias(self, self.family, inputs, self.device)


def layers_of(root: nn.Module, config: Any, family: Family) -> list[nn.Module]:
    """The layers of an encoder in the order in which they run; a shared one stands there as often as it
    runs.

    Args:
        root: the encoder, its parts under the family's names.
        config: its EncoderConfig or transformers config.
    """
    stack = part(root, family.layers)
    if not family.shared_layers:
        return list(stack)
    depth, groups = config.num_hidden_layers, config.num_hidden_groups
    chosen = [stack[int(i / (depth / groups))] for i in range(depth)]
    return [layer for group in chosen for layer in group.albert_layers]


def attention_bias(root: nn.Module, family: Family, inputs: Inputs, device: torch.device) -> Tensor | None:
    """The additive attention bias of a call: the caller's 4-D mask, MPNet's relative bias, their sum, or
    None.
    """
    bias, packed = inputs.bias, inputs.packing
    if family.relative_bias is None or packed.max_seqlen == 0:
        return bias
    positions = None
    if inputs.holes:
        order = torch.argsort(packed.mask.logical_not().to(torch.uint8), dim=1, stable=True)
        positions = order[:, : packed.max_seqlen]
    relative = relative_bias(part(root, family.relative_bias), packed.max_seqlen, device, positions)
    return relative if bias is None else bias + relative


def _layer_list(config: EncoderConfig) -> nn.ModuleList:
    if not config.family.shared_layers:
        return nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))
    groups = []
    for _ in range(config.num_hidden_groups):
        group = nn.Module()
        group.albert_layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.inner_group_num))
        groups.append(group)
    return nn.ModuleList(groups)


class AutoModel(BertModel):
    """Chooses the family's class by `model_type`: `AutoModel.from_pretrained(path)`,
    `AutoModel.from_config(config)`.
    """

    @classmethod
    def class_for(cls, config: EncoderConfig) -> type[PreTrainedModel]:
        """The class of `config`'s family."""
        return globals()[f"{config.family.class_prefix}Model"]


def _by_name_after(forward: Callable, count: int, name: str) -> Callable:
    """`forward` taking no more than `count` positional arguments: transformers has the others in another
    order.
    """
    signature = inspect.signature(forward)
    own, *parameters = signature.parameters.values()
    shown = [p.replace(kind=p.KEYWORD_ONLY) if i >= count else p for i, p in enumerate(parameters)]

    @functools.wraps(forward)
    def limited(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if len(args) > count:
            raise TypeError(
                f"{name}.forward: expected at most {count} positional arguments, got {len(args)}; give "
                f"{', '.join(p.name for p in shown[count : len(args)])} by name"
            )
        return forward(self, *args, **kwargs)

    limited.__signature__ = signature.replace(parameters=[own, *shown])
    return limited


# -- the families' encoders: BertModel, bound to a model_type ------------------------------------------------


class RobertaModel(BertModel):
    """RoBERTa's encoder; see `BertModel`."""

    model_type = "roberta"


class XLMRobertaModel(BertModel):
    """XLM-RoBERTa's encoder; see `BertModel`."""

    model_type = "xlm-roberta"


class CamembertModel(BertModel):
    """CamemBERT's encoder; see `BertModel`."""

    model_type = "camembert"


class DistilBertModel(BertModel):
    """DistilBERT's encoder; see `BertModel`."""

    model_type = "distilbert"


class ElectraModel(BertModel):
    """ELECTRA's encoder; see `BertModel`."""

    model_type = "electra"


class AlbertModel(BertModel):
    """ALBERT's encoder; see `BertModel`."""

    model_type = "albert"


class ErnieModel(BertModel):
    """ERNIE's encoder; see `BertModel`."""

    model_type = "ernie"


class MPNetModel(BertModel):
    """MPNet's encoder; see `BertModel`."""

    model_type = "mpnet"
