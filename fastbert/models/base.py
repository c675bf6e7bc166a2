"""All that models share apart from their mathematics: construction, initialisation, ties, small accessors.

Reading and writing files is in `loading.py`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn

from fastbert.layers import float8, quantized, quantizing
from fastbert.layers.factored import FactoredTable
from fastbert.layers.modules import OwnMatrices, attach, part
from fastbert.layers.smoothing import Calibration
from fastbert.models.config import EncoderConfig, as_config
from fastbert.models.config_values import MAX_SIZE
from fastbert.models.families import FAMILIES, Family
from fastbert.models.loading import Loadable
from fastbert.models.lookalike import Lookalike
from fastbert.models.outputs import ModelOutput
from fastbert.runtime import expected, prepared


class PreTrainedModel(Loadable, Lookalike, nn.Module):
    """Construction, loading, saving and the small accessors that every model shares.

    Attributes:
        config: the EncoderConfig.
        base_model_prefix: name of the encoder inside a model with a head ("bert").
        accepts_loss_kwargs, main_input_name, input_modalities, supports_gradient_checkpointing, model_tags:
            read by transformers' Trainer and pipelines.
    """

    looks_like = ("transformers.modeling_utils", "PreTrainedModel")
    task: ClassVar[str] = "Model"  # last part of HuggingFace's class name
    # The loss is a mean over the batch, so the Trainer divides it by the steps that it accumulates
    accepts_loss_kwargs: ClassVar[bool] = False
    main_input_name: ClassVar[str] = "input_ids"
    input_modalities: ClassVar[str] = "text"
    supports_gradient_checkpointing: ClassVar[bool] = True
    model_tags: list[str] | None = None
    # In an encoder: the class around it whose head also has one row per token of the vocabulary
    _vocabulary_owner: str | None = None
    # The children: of the family's own classes, or of others that a caller has put there
    _modules: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a family's class take by position only what transformers has in BERT's order."""
        super().__init_subclass__(**kwargs)
        family = FAMILIES.get(vars(cls).get("model_type", ""))
        if family is not None and "forward" not in vars(cls):
            count = family.positional.get(cls.task, family.positional.get(""))
            if count is not None:
                cls.forward = _by_name_after(cls.forward, count, cls.__name__)

    def __init__(self, config: EncoderConfig):
        super().__init__()
        config = as_config(config)
        if self.model_type is not None and config.model_type != self.model_type:
            raise ValueError(
                f"config model_type: {type(self).__name__} is for {self.model_type!r}, "
                f"got {config.model_type!r}; "
                "AutoModel chooses the class by model_type"
            )
        self.config = config
        self.checkpoint_every = 0  # recompute each n-th layer in backward, 0 for none
        self._layerdrop = 0.0

    @property
    def family(self) -> Family:
        """What this model's family changes against BERT."""
        return self.config.family

    @property
    def base_model_prefix(self) -> str:
        """Name of the encoder inside a model with a head."""
        return self.family.prefix

    @property
    def base_model(self) -> Any:
        """The encoder, a `BertModel`."""
        return self._modules[self.base_model_prefix]

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return _first_parameter(self).device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the parameters."""
        return _first_parameter(self).dtype

    def as_output(self, output: ModelOutput, return_dict: bool | None) -> Any:
        """`output`, or its tuple if `return_dict` is False; None takes the config's value."""
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of elements in parameters and 8-bit weights (which are buffers); tied ones count once.

        Args:
            only_trainable: count only parameters that require a gradient.
            exclude_embeddings: do not count the tables of embeddings.
        """
        tables = (m.weight for m in self.modules() if isinstance(m, nn.Embedding))
        left_out = {id(table) for table in tables} if exclude_embeddings else ()
        count = sum(
            p.numel()
            for p in self.parameters()
            if (p.requires_grad or not only_trainable) and id(p) not in left_out
        )
        return count if only_trainable else count + quantized.num_weights(self, not exclude_embeddings)

    def quantize(
        self,
        weights: str | None = "int8",
        *,
        embeddings: str | None = None,
        activations: str = "dynamic",
        smooth: float | None = None,
        calibrate: Calibration | None = None,
    ) -> Self:
        """Quantise the encoder layers' linear layers, the table of words or both in place, for inference;
        returns the model.

        One range per token and one scale per output channel, without calibration by default. The model is put
        in eval mode and its parameters are frozen: it cannot be trained afterwards. `save_pretrained` and
        `from_pretrained` keep the integers. See `fastbert.layers.quantized`.

        Args:
            weights: "int8", for speed on a CPU and for memory on a GPU; "int4", which files store in 4 bits
                and which runs as int8; "fp8", for a bfloat16 model on a GPU of compute capability 9.0,
                without further arguments; or None.
            embeddings: "int8", "int4" or None: the table of words, and a decoder that is tied to it.
            activations: "dynamic": inputs of linear layers in 8 bits, one range per token; "static": one per
                layer, from `calibrate`; "float": in floating point, so that weights alone are integers.
            smooth, calibrate: SmoothQuant's alpha, such as 0.5, for models whose outliers cost accuracy, and
                typical inputs; see `fastbert.layers.quantizing.quantize`. A static range is of the rows that
                these calls compute: first tokens alone in the last layer, if the head reads no others.

        Raises:
            TypeError, ValueError: naming the argument or the layer; the model is unchanged.
        """
        if weights == "fp8":
            float8.check_alone(activations, embeddings=embeddings, smooth=smooth, calibrate=calibrate)
            return float8.quantize(self)
        rows = {"activations": activations, "smooth": smooth, "calibrate": calibrate}
        return quantizing.quantize(self, weights, embeddings=embeddings, **rows)

    @torch.no_grad()
    def init_weights(self, module: nn.Module | None = None) -> None:
        """Initialise `module` (default: the model) as transformers does: normal(0, initializer_range) or what
        the family has (`EncoderConfig.draw_`), zero biases, unit norms.
        """
        quantized.check_trainable(self if module is None else module, "init_weights")
        names = {child: name for name, child in self.named_modules()}
        for child in (self if module is None else module).modules():
            if isinstance(child, (nn.Linear, nn.Embedding, nn.Conv1d)):
                self.config.draw_(names.get(child, ""), child.weight)
                if isinstance(child, nn.Embedding) and child.padding_idx is not None:
                    child.weight[child.padding_idx].zero_()
            elif isinstance(child, (nn.LayerNorm, nn.RMSNorm)):
                child.weight.fill_(1.0)
            elif isinstance(child, OwnMatrices):
                child.draw_own_(self.config.initializer_range)
            if (bias := getattr(child, "bias", None)) is not None:
                bias.zero_()

    def post_init(self) -> None:
        """Initialise (not on the meta device) and tie; every constructor ends with it."""
        if self.device.type != "meta":
            self.init_weights()
        self.tie_weights()

    def tied_weights(self) -> dict[str, str]:
        """Tied parameter -> the parameter it shares, both by name; empty if none is tied."""
        return {}

    def tie_weights(self) -> None:
        """Make tied parameters one object again, after loading, `to_empty` or a replaced embedding."""
        for target, source in self.tied_weights().items():
            (*target_path, target_name), (*source_path, source_name) = target.split("."), source.split(".")
            parameter = getattr(self.get_submodule(".".join(source_path)), source_name)
            setattr(self.get_submodule(".".join(target_path)), target_name, parameter)

    # -- accessors -------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embeddings."""
        return part(self.base_model, self.family.word_table)

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings; tied weights follow.

        Raises:
            TypeError, ValueError: `value` is no table of this width; or this is the encoder of a model whose
                decoder is tied to the word embeddings.
        """
        self._check_float_words("set_input_embeddings")
        if self.config.tie_word_embeddings:
            self._check_owns_vocabulary("set_input_embeddings")
        if not isinstance(value, nn.Module):
            raise TypeError(f"value: expected a torch.nn.Embedding, got {type(value).__name__}")
        if self.config.word_embedding_rank is not None and not isinstance(value, FactoredTable):
            raise ValueError(
                f"value: expected a FactoredTable (config word_embedding_rank), got {type(value).__name__}"
            )
        width = self.get_input_embeddings().weight.shape[1]
        if isinstance(value, nn.Embedding) and value.embedding_dim != width:
            raise ValueError(f"value: expected rows of {width} numbers, got {value.embedding_dim}")
        attach(self.base_model, self.family.word_table, value)
        self.tie_weights()

    def get_output_embeddings(self) -> nn.Module | None:
        """The layer that computes one logit per token of the vocabulary; None if there is none."""
        return None

    def vocabulary_parameters(self) -> list[str]:
        """Names of the parameters with one row per token of the vocabulary."""
        prefix = "" if self.is_base_model else f"{self.base_model_prefix}."
        return [f"{prefix}{self.family.word_table}.weight"]

    @torch.no_grad()
    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Change the size of the vocabulary: of the word embeddings, the decoder and its bias.

        The old values are kept. The parameters are new objects, so create the optimizer afterwards.

        Args:
            new_num_tokens: the new size; None keeps it.
            pad_to_multiple_of: round the size up to a multiple of this.
            mean_resizing: True draws new rows from a normal distribution with the old rows' mean and 1e-9
                times their covariance; new biases are 0, or the mean bias if the decoder is untied. False
                draws rows from normal(0, initializer_range), and new biases are 0.

        Returns:
            The word embeddings.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected; or this is the
                encoder of a model whose head also has one row per token.

        Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models".
        """
        if not isinstance(mean_resizing, bool):
            raise TypeError(f"mean_resizing: expected True or False, got {mean_resizing!r}")
        self._check_float_words("resize_token_embeddings")
        self._check_owns_vocabulary("resize_token_embeddings")
        config = self.config
        size = config.vocab_size if new_num_tokens is None else new_num_tokens
        for name, value in (("new_num_tokens", size), ("pad_to_multiple_of", pad_to_multiple_of)):
            integer = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (integer and 1 <= value <= MAX_SIZE):
                raise ValueError(f"{name}: expected an integer from 1 to {MAX_SIZE}, got {value!r}")
        size = -(-size // pad_to_multiple_of) * pad_to_multiple_of if pad_to_multiple_of else size
        if config.pad_token_id is not None and size <= config.pad_token_id:
            raise ValueError(f"new_num_tokens: {size} leaves out pad_token_id {config.pad_token_id}")
        tied = self.tied_weights()
        for name in self.vocabulary_parameters():
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            if name not in tied:
                old = getattr(module, leaf)
                # transformers leaves the bias of a tied decoder at 0
                like_old = mean_resizing and (old.dim() > 1 or not config.tie_word_embeddings)
                setattr(module, leaf, resized(old, size, None if like_old else config.initializer_range))
            if isinstance(module, nn.Embedding):
                module.num_embeddings = size
            elif isinstance(module, nn.Linear):
                module.out_features = size
        config.vocab_size = size
        self.tie_weights()
        return self.get_input_embeddings()

    def _check_float_words(self, method: str) -> None:
        if quantizing.kinds_of(self)[1] is not None:
            raise ValueError(
                f"{method}: the table of words is quantised; change the floating-point model, and quantise "
                "it afterwards"
            )

    def _check_owns_vocabulary(self, method: str) -> None:
        if self._vocabulary_owner is not None:
            raise ValueError(
                f"{method}: this encoder is a part of a {self._vocabulary_owner}, whose head also has one "
                f"row per token; call {method} of the whole model"
            )

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
            every_n_layers: recompute only every n-th layer, starting with layer 0.
            offload: must be False; activations stay on the model's device.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        for name, value in (activation_checkpointing_kwargs or {}).items():
            fixed = {"use_reentrant": False, "preserve_rng_state": True}
            if name not in fixed:
                raise TypeError(
                    f"activation_checkpointing_kwargs: {name!r} is not supported; "
                    f"expected one of {', '.join(fixed)}"
                )
            if value is not fixed[name]:
                raise ValueError(
                    f"activation_checkpointing_kwargs: {name}={value!r} is not supported; "
                    f"expected {fixed[name]}"
                )
        expected.integers(1, every_n_layers=every_n_layers)
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

    @property
    def layerdrop(self) -> float:
        """In training, the probability that a layer is skipped; drawn by torch's generator in each call.

        A skipped layer is not computed, and its parameters have no gradient. It is not part of the config.

        Raises:
            ValueError: on setting: no number in [0, 1), or a model whose layers cannot be skipped.

        Source: Fan, Grave and Joulin 2019, "Reducing Transformer Depth on Demand with Structured Dropout".
        """
        return self.base_model._layerdrop

    @layerdrop.setter
    def layerdrop(self, p: float) -> None:
        expected.numbers("in [0, 1)", layerdrop=p)
        if p and self.family.two_streams:
            raise ValueError(
                f"layerdrop: expected 0 for {self.config.model_type}, whose layers have two streams"
            )
        self.base_model._layerdrop = float(p)

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

    # -- for transformers' Trainer and pipelines -------------------------------------------------------------

    @property
    def name_or_path(self) -> str:
        """What `from_pretrained` loaded, "" for a fresh model."""
        return self.config.name_or_path

    @property
    def _keys_to_ignore_on_save(self) -> list[str] | None:
        # The Trainer ties the weights again if a checkpoint lacks exactly these
        return list(self.tied_weights()) or None

    def is_custom_code(self) -> bool:
        """Whether the class is outside transformers, so that peft does not rename its keys."""
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
            NotImplementedError: always; the message explains how to upload.
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

    @prepared.plain_train
    def train(self, mode: bool = True) -> Self:
        """Set training mode; if a module's mode changes, drop what was derived from the weights.

        Raises:
            RuntimeError: training mode for a quantised model, which is unchanged.
        """
        if mode:
            quantized.check_trainable(self, "train")
        return super().train(mode) if prepared.before_mode(self, mode) else self


def _first_parameter(module: nn.Module) -> Any:
    """`next(module.parameters())`, without the names that take most of its time; None if there is none."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        found = None if child is None else _first_parameter(child)
        if found is not None:
            return found
    return None


@torch.no_grad()
def resized(old: nn.Parameter, rows: int, std: float | None, dim: int = 0) -> nn.Parameter:
    """`old` with another number of rows: new rows are drawn by `std`, or like the old rows if it is None.

    The rows are along the dimension `dim`.
    """
    source = old.transpose(0, dim)
    new = source.new_zeros(rows, *source.shape[1:])
    added = new[source.shape[0] :]
    if std is None:
        added.copy_(_like(source.to(torch.promote_types(old.dtype, torch.float32)), len(added)))
    elif old.dim() > 1:
        added.normal_(0.0, std)
    new[: source.shape[0]] = source[:rows]
    return nn.Parameter(new.transpose(0, dim).contiguous(), old.requires_grad)


def _like(old: Tensor, count: int) -> Tensor:
    """`count` rows with the old rows' mean, and 1e-9 times their covariance if it is positive definite."""
    mean = old.mean(0).expand(count, *old.shape[1:])
    if old.dim() == 1 or old.is_meta:
        return mean
    centred = old - old.mean(0)
    factor, failed = torch.linalg.cholesky_ex(1e-9 * (centred.T @ centred) / len(old))
    return mean if failed else mean + torch.randn_like(mean) @ factor.T


def _by_name_after(forward: Callable[..., Any], count: int, name: str) -> Callable[..., Any]:
    """`forward` with at most `count` positional arguments: transformers orders the rest differently."""
    signature = inspect.signature(forward)
    own, *parameters = signature.parameters.values()
    named = [p for p in parameters[count:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    shown = [p.replace(kind=p.KEYWORD_ONLY) if p in named else p for p in parameters]

    @functools.wraps(forward)
    def limited(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if len(args) > count:
            raise TypeError(
                f"{name}.forward: expected at most {count} positional arguments, got {len(args)}; pass "
                f"{', '.join(p.name for p in shown[count : len(args)])} by name"
            )
        return forward(self, *args, **kwargs)

    vars(limited)["__signature__"] = signature.replace(parameters=[own, *shown])
    return limited


def class_of(family: Family, task: str) -> type[PreTrainedModel] | None:
    """A family's class for a task; None if the family has none.

    The class is looked up by name in the family's module, and in `heads/`, which has BERT's own heads. These
    modules are imported only here, because they import this one.

    Args:
        task: the last part of HuggingFace's class names ("Model", "ForMaskedLM").
    """
    for module in (family.module, "heads"):
        home = importlib.import_module(f"fastbert.models.{module}")
        found = vars(home).get(family.class_prefix + family.class_names.get(task, task))
        if found is not None:
            return found
    return None
