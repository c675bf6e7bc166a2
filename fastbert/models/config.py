"""EncoderConfig: HuggingFace's config.json keys, checked.

Keys this package acts on are validated; keys it does not know are kept and written back.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fastbert.checkpoint import files, hub
from fastbert.layers.batch import Blocks, Relative, Rotary
from fastbert.layers.patterns import NAMES
from fastbert.models import arguments, config_rope, config_windows
from fastbert.models.config_checks import DEFAULTS, MAX_LABELS, Keys, check_config
from fastbert.models.config_values import brief
from fastbert.models.families import FAMILIES, family_of
from fastbert.models.paths import LMHead
from fastbert.ops.activation import SPELLINGS

# Values in transformers of keys that a config.json may lack
_ABSENT: dict[str, Any] = {
    "architectures": None,
    "bos_token_id": None,
    "dtype": None,
    "eos_token_id": None,
    "fixed_heads": None,
    "intermediate_sizes": None,
    "is_encoder_decoder": False,
    "layer_groups": None,
    "pruned_heads": None,
    # No key of transformers: whether the model was trained on reversed sequences
    "right_to_left": False,
    "sep_token_id": None,
    "token_schedule": None,
    "torch_dtype": None,
    "word_embedding_rank": None,
}


class EncoderConfig(Keys):
    """Configuration of one encoder. Its attributes have the names of HuggingFace's config.json keys.

    Args:
        model_type: the family ("bert", "roberta", "distilbert", …); see `fastbert.models.families`.
        num_labels: number of classes of a task head; kept in `id2label` / `label2id` as HuggingFace does.
        id2label, label2id: names of the classes.
        kwargs: any further key, also in a family's own spelling (DistilBERT's `dim`, `n_layers`, …).

    Raises:
        TypeError, ValueError: naming the key, what came and what was expected.
    """

    def __init__(
        self,
        /,  # so that a key "self" is a key like any other
        model_type: str = "bert",
        *,
        num_labels: int | None = None,
        id2label: dict[int, str] | None = None,
        label2id: dict[str, int] | None = None,
        **kwargs: Any,
    ):
        family = family_of(model_type, kwargs)
        if shadowing := sorted(key for key in kwargs if callable(getattr(type(self), key, None))):
            raise ValueError(
                f"config {shadowing[0]}: is a method of {type(self).__name__} and cannot be a config key"
            )
        values = {**DEFAULTS, **family.defaults}
        if family.windows:
            kwargs = config_windows.respelt(kwargs)
        for key, value in kwargs.items():
            # Real files have `layer_norm_eps` beside `norm_eps`, which counts
            if family.spelt(key) == key or family.spelt(key) not in kwargs:
                values[family.aliases.get(key, key)] = value
        if family.disentangled and isinstance(values["pos_att_type"], str):
            values["pos_att_type"] = [term.strip() for term in values["pos_att_type"].lower().split("|")]
        if family.rotary and not family.windows:
            config_rope.settle(values, kwargs, family.defaults["rope_parameters"]["rope_theta"])
        sizes = values["hidden_size"], values["num_attention_heads"]
        if family.two_streams and values["head_dim"] is None and all(type(n) is int and n > 0 for n in sizes):
            values["head_dim"] = sizes[0] // sizes[1]
        self.__dict__.update(values)
        self.model_type = family.model_type
        self._set_labels(num_labels, id2label, label2id)
        self.validate()

    # -- labels ----------------------------------------------------------------------------------------------

    def _set_labels(
        self, num_labels: int | None, id2label: dict[Any, Any] | None, label2id: dict[Any, Any] | None
    ) -> None:
        if num_labels is not None and (not isinstance(num_labels, int) or num_labels < 1):
            raise ValueError(f"num_labels: expected an integer >= 1, got {brief(num_labels)}")
        if num_labels is not None and num_labels > MAX_LABELS:
            raise ValueError(f"num_labels: expected at most {MAX_LABELS}, got {brief(num_labels)}")
        for key, value in (("id2label", id2label), ("label2id", label2id)):
            if value is not None and not isinstance(value, dict):
                raise TypeError(f"config {key}: expected an object, got {brief(value)}")
        if id2label is None or (num_labels is not None and num_labels != len(id2label)):
            id2label = {i: f"LABEL_{i}" for i in range(2 if num_labels is None else num_labels)}
            label2id = None
        if wrong := [name for name in id2label.values() if not isinstance(name, (str, int, float))]:
            raise TypeError(f"config id2label: expected a text per class, got {brief(wrong[0])}")
        self.id2label = {_class_id(i): name for i, name in id2label.items()}
        self.label2id = dict(label2id) if label2id else {name: i for i, name in self.id2label.items()}

    @property
    def num_labels(self) -> int:
        """Number of classes of a task head."""
        return len(self.id2label)

    @num_labels.setter
    def num_labels(self, value: int) -> None:
        self._set_labels(value, None, None)

    # -- derived ---------------------------------------------------------------------------------------------

    @property
    def head_dim(self) -> int:
        """Size of one attention head: the family's key, or the heads' equal share of `hidden_size`."""
        own = self.__dict__.get("head_dim") if "head_dim" in self.family.defaults else None
        return self.block_width // self.num_attention_heads if own is None else own

    @property
    def activation_name(self) -> str:
        """`hidden_act` as `fastbert.ops.linear` spells it."""
        return SPELLINGS[self.hidden_act]

    @property
    def lm_head(self) -> LMHead:
        """The paths of the masked-LM head."""
        new = self.family.new_lm_head
        return self.family.lm_head if new is None or self.legacy else new

    @property
    def head_activation(self) -> str:
        """The activation of heads whose family names none, spelt likewise: the config's."""
        return SPELLINGS[self.__dict__.get("classifier_activation") or self.hidden_act]

    def has_bias(self, path: str) -> bool:
        """Whether the linear layer at a path of its layer, or of the model, has a bias."""
        key = self.family.biases.get(path)
        return path not in self.family.unbiased and (key is None or bool(self.get(key)))

    @property
    def embedding_width(self) -> int:
        """Size of the embedding tables' rows: `embedding_size` if the family has one, else `hidden_size`."""
        return getattr(self, "embedding_size", None) or self.hidden_size

    @property
    def projected_width(self) -> int:
        """Inputs of the linear layer from the embedding to the hidden size: one token's, or three tokens'."""
        return self.embedding_width * (3 if self.get("trigram_input") else 1)

    @property
    def norm_eps(self) -> float:
        """eps of every LayerNorm."""
        return self.layer_norm_eps if self.family.norm_eps is None else self.family.norm_eps

    def draw_(self, path: str, weight: Tensor) -> None:
        """Draw the first values of a matrix, as transformers does.

        Args:
            path: the path of its linear layer or table in the model, or the end of the path.
            weight: written in place.
        """
        std, cutoff = self.initializer_range, self.get("initializer_cutoff_factor")
        head = self.family.classifier
        place = "embedding" if path.endswith(self.family.word_table) else "decoder"
        spread = self.get(f"{place}_init_range")
        if spread is not None and path not in (head.dense, head.out):
            weight.uniform_(-spread, spread)
            return
        if self.family.out_layers and path.endswith(self.family.out_layers):
            std /= (2 * max(self.num_hidden_layers, 1)) ** 0.5
        elif self.family.out_layers and path == self.family.classifier.out:
            std = self.hidden_size**-0.5
        if cutoff is None:
            weight.normal_(0.0, std)
        else:
            nn.init.trunc_normal_(weight, 0.0, std, -cutoff * std, cutoff * std)

    @property
    def kv_heads(self) -> int | None:
        """The number of heads of keys and values; None if it is that of queries."""
        own = self.__dict__.get("num_key_value_heads") if self.family.shares_keys else None
        return None if own == self.num_attention_heads else own

    def norm(self, width: int) -> nn.LayerNorm | nn.RMSNorm:
        """A new norm as the config has it."""
        if self.family.rms_norm:
            return nn.RMSNorm(width, eps=self.norm_eps)
        return nn.LayerNorm(width, eps=self.norm_eps, bias=self.get("norm_bias", True))

    def window(self, layer: int) -> tuple[int, int] | None:
        """How many tokens before and after its own a token of the layer sees; None for all."""
        if self.family.global_tokens:
            half = self._attention_windows()[layer] // 2
            return half, half
        return config_windows.window(self, layer) if self.family.windows else None

    def _attention_windows(self) -> list[int]:
        """`attention_window` of each layer; a token is in the middle of it."""
        given = self.attention_window
        return [given] * self.num_hidden_layers if isinstance(given, int) else list(given)

    def rotary(self, layer: int) -> Rotary:
        """By which angles the layer rotates queries and keys."""
        return config_windows.rotary(self, layer) if self.family.windows else config_rope.rotary(self)

    def relative(self) -> Relative | None:
        """How layers score the distance between two tokens; None if they do not."""
        if not (self.family.disentangled and self.relative_attention):
            return None
        farthest = self.max_relative_positions
        farthest = self.max_position_embeddings if farthest < 1 else farthest
        buckets = max(self.position_buckets, 0)
        terms = tuple(sorted(set(self.pos_att_type or ())))
        return Relative(buckets or farthest, buckets, farthest, terms, self.share_att_key)

    def blocks(self, layer: int) -> Blocks | None:
        """By which blocks the layer attends; None if all tokens see all tokens."""
        if not self.family.block_sparse or self.attention_type != "block_sparse":
            return None
        sizes = self.block_size, self.num_random_blocks
        return Blocks(*sizes, layer, self.num_attention_heads, self.max_position_embeddings)

    def fixed_patterns(self) -> list[tuple[int, ...]] | None:
        """`fixed_heads` as indices into `fastbert.layers.patterns.NAMES`, per layer and head; None if unset.

        The key is a list with one name per head, the same for all layers, or a list of such lists, one per
        layer.
        """
        given = self.fixed_heads
        if given is None:
            return None
        rows = [given] * self.num_hidden_layers if isinstance(given[0], str) else given
        return [tuple(NAMES.index(name) for name in row) for row in rows]

    def kept_heads(self) -> list[tuple[int, ...] | None]:
        """The heads that each layer has, ascending; None for a layer that has all.

        The key `pruned_heads` maps a layer's number to the heads that the layer lacks, as transformers up to
        version 4 wrote it. A layer may have no head left.
        """
        gone = {int(layer): heads for layer, heads in (self.pruned_heads or {}).items() if heads}
        every = range(self.num_attention_heads)
        layers = range(self.num_hidden_layers)
        return [tuple(h for h in every if h not in gone[i]) if i in gone else None for i in layers]

    @property
    def shares_layers(self) -> bool:
        """Whether layers share weights, by the family or by the key `layer_groups` (the group per layer)."""
        return self.family.shared_layers or self.layer_groups is not None

    def inner_sizes(self) -> list[int]:
        """The columns of each layer's feed-forward block: `intermediate_sizes`, or by `intermediate_size`."""
        return list(
            self.intermediate_sizes or [self.family.inner(self.intermediate_size)] * self.num_hidden_layers
        )

    def elimination(self) -> list[float] | None:
        """The fraction of each text's tokens that each layer keeps; None if all layers keep all tokens."""
        schedule = self.token_schedule
        return None if schedule is None or all(f == 1 for f in schedule) else list(schedule)

    def mathematics(self) -> dict[str, Any]:
        """The values that change the result of a forward in eval mode and that no weight's shape shows.

        A save writes them beside the weights, and loading compares them with config.json. Sizes are left out,
        because the weights' shapes are checked against them. Dropout, labels, the problem type, the dtype and
        the form of outputs are left out too, because they may be edited by hand.
        """
        values = {
            "model_type": self.model_type,
            # No file holds the number of shared layers
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "hidden_act": self.activation_name,
            "layer_norm_eps": self.norm_eps,
        }
        if self.family.pad_positions:
            values["pad_token_id"] = self.pad_token_id
        if self.family.rotary and not self.family.windows:
            values["rope_parameters"] = self.rope_parameters
        if self.family.windows:
            values["layer_types"] = config_windows.layer_types(self)
            for key in ("global_rope_theta", "local_rope_theta", "local_attention"):
                values[key] = self.get(key)
        if self.family.global_tokens:
            values["attention_window"] = self._attention_windows()
        if self.family.disentangled:
            values["pos_att_type"] = sorted(self.pos_att_type or ())
            for key in ("max_relative_positions", "position_buckets", "position_biased_input", "conv_act"):
                values[key] = self.get(key)
        if self.family.bottleneck:
            # The weights of both kinds of norm have the same names and shapes
            for key in ("normalization_type", "use_bottleneck_attention"):
                values[key] = self.get(key)
        if self.family.block_sparse:
            for key in ("attention_type", "block_size", "num_random_blocks", "rescale_embeddings"):
                values[key] = self.get(key)
        if self.family.two_streams:
            for key in ("attn_type", "bi_data", "clamp_len", "same_length"):
                values[key] = self.get(key)
        if self.family.may_be_causal:
            values["is_decoder"] = bool(self.is_decoder)
        if patterns := self.fixed_patterns():
            alike = all(row == patterns[0] for row in patterns)
            names = [[NAMES[pattern] for pattern in row] for row in patterns]
            values["fixed_heads"] = names[0] if alike else names
        if self.layer_groups is not None:
            values["layer_groups"] = list(self.layer_groups)
        if any(kept is not None for kept in self.kept_heads()):
            values["kept_heads"] = [None if kept is None else list(kept) for kept in self.kept_heads()]
        if (schedule := self.elimination()) is not None:
            values["token_schedule"] = schedule
        return values

    # -- checks ----------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every key that this package acts on.

        Raises:
            TypeError, ValueError: naming the key, what came and what was expected.
        """
        check_config(self)

    # -- in and out ------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, values: dict[str, Any], **overrides: Any) -> EncoderConfig:
        """A config from config.json's content; `overrides` override its keys."""
        if not isinstance(values, dict):
            raise TypeError(f"config: expected a JSON object, got {type(values).__name__}")
        left_out = {"num_labels"} if "id2label" in values else set()
        if "num_labels" in overrides and "id2label" not in overrides:
            left_out |= {"id2label", "label2id"}
        merged = {key: copy.deepcopy(value) for key, value in values.items() if key not in left_out}
        model_type = overrides.get("model_type", merged.get("model_type"))
        if model_type is None:
            raise ValueError(f"config model_type: missing; expected one of {', '.join(FAMILIES)}")
        family = family_of(model_type)
        if family.windows:
            merged, overrides = config_windows.overridden(merged, overrides)
        elif family.rotary and "rope_parameters" in overrides:
            merged = {key: value for key, value in merged.items() if key not in config_rope.OLD}
        # In any spelling
        replaced = {family.aliases.get(key, key) for key in overrides}
        merged = {k: v for k, v in merged.items() if family.aliases.get(k, k) not in replaced}
        return cls(**{**merged, **overrides})

    @classmethod
    def from_hf(cls, config: Any) -> EncoderConfig:
        """A config from a transformers config object (anything with `to_dict()`)."""
        return cls.from_dict(config.to_dict())

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        subfolder: str = "",
        trust_remote_code: bool | None = None,
        **overrides: Any,
    ) -> EncoderConfig:
        """Read `path`/config.json (or `path` itself if it is a file), or the config of a hub name.

        Args:
            path: a directory, a JSON file, or a hub name.
            revision, cache_dir, force_download, local_files_only, token: for hub names.
            subfolder: the folder inside `path` or the hub's repository that holds config.json.
            trust_remote_code: must not be True: no code of a checkpoint is ever run.
            overrides: config keys that override the file's.

        Raises:
            fastbert.CheckpointError: naming the file and the cause.
            TypeError, ValueError: naming the key or the argument, what came and what was expected.
        """
        arguments.check_loading({"trust_remote_code": trust_remote_code})
        content = hub.read_config(
            path,
            revision=revision,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
            subfolder=subfolder,
        )
        config = cls.from_dict(content, **overrides)
        config.name_or_path = str(path)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json, with the family's own spellings."""
        spelt = self.family.spelt
        values = {spelt(k): copy.deepcopy(v) for k, v in self.__dict__.items() if k != "_name_or_path"}
        values["model_type"] = self.family.stored_type
        values["id2label"] = {str(i): name for i, name in self.id2label.items()}
        if self.family.windows:
            values["layer_types"] = config_windows.layer_types(self)
            values["rope_parameters"] = config_windows.rope_parameters(self)
        if self.family.two_streams:
            # A config of transformers that has no limit refuses the key
            del values["max_position_embeddings"]
        return values

    def to_diff_dict(self) -> dict[str, Any]:
        """`to_dict()` without the keys that have their family's default."""
        usual = type(self)(self.model_type).to_dict()
        values = self.to_dict().items()
        return {k: v for k, v in values if k == "model_type" or k not in usual or v != usual[k]}

    def to_json_string(self, use_diff: bool = False) -> str:
        """`to_dict()`, with `use_diff` `to_diff_dict()`, as JSON, keys sorted."""
        values = self.to_diff_dict() if use_diff else self.to_dict()
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | Path, use_diff: bool = False) -> None:
        """Write `to_json_string(use_diff)` to a file, in one step.

        Raises:
            fastbert.CheckpointError: it cannot be written; what was there is unchanged.
        """
        files.replace(Path(json_file_path), self.to_json_string(use_diff).encode())

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False) -> None:
        """Write `save_directory`/config.json, in one step.

        Raises:
            fastbert.CheckpointError: it cannot be written; what was there is unchanged.
            ValueError: `push_to_hub` is True.
        """
        arguments.check_saving({"push_to_hub": push_to_hub})
        path = Path(save_directory)
        path.mkdir(parents=True, exist_ok=True)
        self.to_json_file(path / files.CONFIG)

    # -- for transformers' Trainer, pipelines and accelerate -------------------------------------------------

    @property
    def name_or_path(self) -> str:
        """What the config was loaded from, "" if it was not loaded; never saved."""
        return self.__dict__.get("_name_or_path", "")

    @name_or_path.setter
    def name_or_path(self, value: str | Path) -> None:
        self.__dict__["_name_or_path"] = str(value)

    @property
    def use_return_dict(self) -> bool:
        """`return_dict` under transformers' other name."""
        return self.return_dict

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> EncoderConfig:
        """The config of the text model, which is this one."""
        return self

    def update(self, config_dict: dict[str, Any]) -> None:
        """Set several keys and check them together. If one is refused, nothing is changed.

        Raises:
            TypeError, ValueError: naming the key, what came and what was expected.
        """
        new = type(self).from_dict(self.to_dict(), **config_dict)
        path = self.name_or_path
        self.__dict__.clear()
        self.__dict__.update(new.__dict__)
        self.name_or_path = path

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            return _ABSENT[name]
        if not name.startswith("__") and "model_type" in self.__dict__:
            family = self.family
            if (alias := family.aliases.get(name)) is not None:
                return self.__dict__[alias]
            if family.windows and name in ("layer_types", "rope_parameters"):
                return getattr(config_windows, name)(self)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` if the config has none."""
        return getattr(self, key, default)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncoderConfig) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.to_json_string()}"


def _class_id(key: Any) -> int:
    try:
        return int(key)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config id2label: expected class numbers as keys, got {brief(key)}") from error


def as_config(config: Any) -> EncoderConfig:
    """An EncoderConfig as it is, or made from a transformers config object."""
    if isinstance(config, EncoderConfig):
        return config
    if not hasattr(config, "to_dict"):
        more = "; from_pretrained(path) loads a directory" if isinstance(config, (str, Path)) else ""
        raise TypeError(f"config: expected an EncoderConfig, got {type(config).__name__}{more}")
    return EncoderConfig.from_hf(config)
