"""What a head may read besides the last layer's output, and the files of a model with such a head.

    OUT/                    the encoder, a HuggingFace directory
      head.safetensors      all other weights
      head.json             which head: what `Head` asks for, and the class of the model
      beside/               the second encoder, if there is one

`above` of a `TaskModel` is between its encoder and its head. It turns hidden states into what the head reads,
of the same width. So losses, metrics and outputs are those of the usual head.

A head for sequences reads the token at position 0. A causal model's first token attends only to itself, so of
a causal model the head reads the last token; with a BiLSTM it reads both ends, in every model.

Source: Devlin et al. 2018, "BERT", sec. 5.1 and 5.3; the mix: Peters et al. 2018, "Deep contextualized word
representations", eq. 1.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from fastbert.checkpoint import hub
from fastbert.checkpoint.files import read_json
from fastbert.checkpoint.files import replace as write
from fastbert.checkpoint.read import weights_digest
from fastbert.finetuning.settings import Settings
from fastbert.finetuning.start import first_model
from fastbert.layers.packing import Packing, positions_of
from fastbert.models.auto import AutoModel
from fastbert.models.base import PreTrainedModel
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.task_model import Encoded
from fastbert.models.inputs import Inputs
from fastbert.sentences.tokenizer import load_tokenizer

WEIGHTS, FORM, BESIDE = "head.safetensors", "head.json", "beside"
# the config's key of a model that reads each sequence from its last token to its first
REVERSED = "right_to_left"
# Adam moves each parameter by the learning rate, which is made for weights near 0.02
_MIX_SPEED = 10.0


@dataclass(frozen=True)
class Head:
    """What the head reads.

    Attributes:
        head_mix: whether a learned mix of all layers, the embedding output included.
        head_layers: new encoder layers on top of the encoder.
        head_bilstm: whether two bidirectional LSTM layers on top, as wide together as the model.
        beside: the directory of a second encoder of the same family and tokenizer. Its last layer is
            concatenated, and it is trained too.

    Raises:
        ValueError: naming the attribute.
    """

    head_mix: bool = False
    head_layers: int = 0
    head_bilstm: bool = False
    beside: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("head_mix", "head_bilstm"):
            if type(value := getattr(self, name)) is not bool:
                raise ValueError(f"{name}: expected True or False, got {value!r}")
        if type(self.head_layers) is not int or self.head_layers < 0:
            raise ValueError(f"head_layers: expected an integer >= 0, got {self.head_layers!r}")
        if not (self.beside is None or isinstance(self.beside, (str, Path))):
            raise ValueError(f"beside: expected a directory or None, got {self.beside!r}")
        if self.head_layers and (self.head_mix or self.beside):
            other = "head_mix" if self.head_mix else "beside"
            raise ValueError(
                f"head_layers: expected 0 with {other}, which reads the layers of the checkpoint"
            )

    def check(self, settings: Settings) -> None:
        """Raise a ValueError that names a setting which this head has no use for."""
        usual = {each.name: each.default for each in fields(Settings)}
        of_one = ("reinit", "random_init", "layer_decay", "decay_to_start", "mixout", "freelb", "smart")
        for name in of_one if self.beside else ("reinit", "random_init") if self.head_layers else ():
            if getattr(settings, name) != usual[name]:
                why = (
                    "beside, as it is for one encoder"
                    if self.beside
                    else "head_layers, which are new already"
                )
                raise ValueError(f"{name}: expected {usual[name]!r} with {why}")

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file: what differs from the usual head; of `beside` the hash of its weights."""
        found = {name: value for name, value in asdict(self).items() if value}
        return found | ({BESIDE: weights_digest(self.beside)} if self.beside else {})


class Mix(nn.Module):
    """γ Σ_l s_l h_l with s = softmax(a); γ and a are learned, and a mix begins as the mean of its layers.

    Args:
        layers: number of layers.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(layers))
        self.scale = nn.Parameter(torch.ones(1))

    def weights(self) -> Tensor:
        """s, (layers,)."""
        return (_MIX_SPEED * self.scores).softmax(0)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """The layers' outputs, each (rows, hidden), as one."""
        first, *others = (weight * h for weight, h in zip(self.weights(), states, strict=True))
        return self.scale * sum(others, first)


class BiLstm(nn.Module):
    """Two bidirectional LSTM layers over packed sequences, with dropout before each.

    They compute in the parameters' dtype. Dropout is a module of its own, because cuDNN's generator cannot be
    resumed.

    Args:
        inputs: width of the input.
        width: width of each direction.
        dropout_p: probability of dropping an input of a layer.
    """

    def __init__(self, inputs: int, width: int, dropout_p: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout_p)
        self.layers = nn.ModuleList(nn.LSTM(n, width, bidirectional=True) for n in (inputs, 2 * width))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of the last layer, and its last state of each direction.

        Args:
            x: (total, inputs).
            cu_seqlens: (sequences + 1,) int32; no sequence is empty.

        Returns:
            (total, 2 · width) and (sequences, 2 · width).
        """
        ends = x
        # autocast has no LSTM on a CPU
        with torch.autocast(x.device.type, enabled=False):
            rows = x.to(next(self.parameters()).dtype).split(cu_seqlens.diff().tolist())
            packed = pack_sequence(list(rows), enforce_sorted=False)
            for layer in self.layers:
                packed, (ends, _) = layer(packed._replace(data=self.dropout(packed.data)))
        return torch.cat(unpack_sequence(packed)), ends.transpose(0, 1).flatten(1)


class Above(nn.Module):
    """Between the encoder and the head; see the module.

    Args:
        config: the encoder's.
        head: what the head reads.
        sequences: whether the head reads one vector per sequence, not one per token.
        beside: the second encoder, or None.
    """

    def __init__(
        self, config: EncoderConfig, head: Head, sequences: bool, beside: PreTrainedModel | None
    ) -> None:
        super().__init__()
        width, self.sequences, self.causal = config.hidden_size, sequences, bool(config.is_decoder)
        self.mix = Mix(config.num_hidden_layers + 1) if head.head_mix else None
        self.beside: Any = beside
        inputs = width if beside is None else width + beside.config.hidden_size
        self.lstm = self.narrow = None
        if head.head_bilstm:
            if width % 2:
                raise ValueError(f"head_bilstm: expected a model of even width, got {width}")
            self.lstm = BiLstm(inputs, width // 2, config.hidden_dropout_prob)
        elif beside is not None:
            self.narrow = nn.Linear(inputs, width)

    @property
    def reads_states(self) -> bool:
        """Whether all hidden states are read."""
        return self.mix is not None

    def form(self) -> dict[str, bool]:
        """For head.json."""
        parts = {"head_mix": self.mix, "head_bilstm": self.lstm, BESIDE: self.beside}
        return {name: part is not None for name, part in parts.items()}

    def forward(self, encoded: Encoded) -> Encoded:
        """What the head reads: (rows, hidden), or (sequences, hidden)."""
        packing = encoded.inputs.packing
        x = encoded.hidden if self.mix is None else self.mix(encoded.states or ())
        if self.beside is not None:
            x = torch.cat([x, states_of(self.beside, encoded.inputs)], -1)
        if self.lstm is not None:
            rows, ends = self.lstm(x, packing.cu_seqlens)
            x = ends if self.sequences else rows
        elif self.sequences:
            parts = x.split([encoded.hidden.shape[1], x.shape[1] - encoded.hidden.shape[1]], 1)
            last = self.causal, self.beside is not None and _reads_last(self.beside.config)
            x = torch.cat([_ends(part, packing, end) for part, end in zip(parts, last, strict=True)], 1)
        if self.narrow is not None:
            x = self.narrow(x)
        return replace(encoded, hidden=x, first_only=self.sequences, pooled=None)


def _reads_last(config: EncoderConfig) -> bool:
    """Whether the last token, and not the first, has seen the whole sequence."""
    return bool(config.is_decoder) and not config.get(REVERSED)


def _ends(x: Tensor, packing: Packing, last: bool) -> Tensor:
    """(rows, width) -> (sequences, width): the last or the first token of each sequence."""
    return x.index_select(0, packing.cu_seqlens[1:].long() - 1) if last else packing.first_rows(x)


def states_of(encoder: Any, inputs: Inputs) -> Tensor:
    """The last hidden states of another model's inputs, (rows, hidden), in the order of the inputs."""
    if not encoder.config.get(REVERSED):
        return encoder.encode_inputs(inputs, None, False, False, False)[0]
    ends = inputs.packing.cu_seqlens.long()
    sequence, position = positions_of(ends, inputs.position_ids.shape[0])
    order = ends[1:][sequence] - 1 - position
    given = {name: getattr(inputs, name) for name in ("input_ids", "token_type_ids", "inputs_embeds")}
    backward = replace(inputs, **{name: None if t is None else t[order] for name, t in given.items()})
    return encoder.encode_inputs(backward, None, False, False, False)[0][order]


# -- a run's first model, and its files ----------------------------------------------------------------------


def asked(head: Head, place: Path) -> Head:
    """The head of a run: what is asked for, else that of the checkpoint.

    Raises:
        ValueError: the model reads from right to left, as only `beside` does.
    """
    if EncoderConfig.from_pretrained(place).get(REVERSED):
        raise ValueError(f"model: {place} reads from right to left; expected it as beside")
    if head.beside is not None:
        other = hub.resolve(head.beside)
        if load_tokenizer(other).get_vocab() != load_tokenizer(place).get_vocab():
            raise ValueError(f"beside: expected the tokenizer of the model, got another in {other}")
        head = replace(head, beside=other)
    if head != Head() or not (place / FORM).is_file():
        return head
    stored = read_json(place / FORM)
    beside = place / BESIDE if stored.get(BESIDE) else None
    return Head(stored.get("head_mix", False), 0, stored.get("head_bilstm", False), beside)


def first(
    kind: Any, place: Path, settings: Settings, classes: Sequence[str], labels: int, head: Head
) -> PreTrainedModel:
    """The model of a run, on the CPU in float32, as `start.first_model` makes it, with its head.

    A checkpoint's own head is kept if it is of the same form, for the same kind of task and the same classes.

    Raises:
        ValueError: the model does not fit the head.
    """
    names = EncoderConfig.from_pretrained(place).id2label
    model = first_model(kind, place, settings, classes, labels)
    if head.head_layers:
        model = _deeper(model, head.head_layers)
    _attach(model, kind, head)
    above: Any = model._modules.get("above")
    if above is None:
        return model
    if settings.freeze and above.beside is not None:
        above.beside.requires_grad_(False)
    stored = read_json(place / FORM) if (place / FORM).is_file() else {}
    same = model.config.id2label == names and not settings.random_init
    if same and stored == _described(model):
        fill(_own(model), place)
    return model


def _attach(model: PreTrainedModel, kind: Any, head: Head) -> None:
    """Give a model the `above` that its head needs, if it needs one."""
    sequences = bool(kind.reads_first_only)
    beside = None
    if head.beside is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*freshly initialised|.*left over")
            beside = AutoModel.from_pretrained(head.beside, dtype=torch.float32, add_pooling_layer=False)
        if beside.config.model_type != model.config.model_type:
            raise ValueError(
                f"beside: expected {model.config.model_type} as the model is, got {beside.config.model_type}"
            )
        if beside.config.max_tokens < model.config.max_tokens:
            raise ValueError(
                f"beside: expected {model.config.max_tokens} positions as the model has, "
                f"got {beside.config.max_tokens}"
            )
        beside.train(model.training)
    if head.head_mix or head.head_bilstm or beside or (sequences and model.config.is_decoder):
        model.above = Above(model.config, head, sequences, beside)


def _deeper(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The model with new layers on top of its encoder, which learn also if the others are frozen."""
    config = model.config
    if config.family.shared_layers:
        raise ValueError(f"head_layers: expected 0, because {config.model_type} shares its layers")
    values = {**config.to_dict(), config.family.spelt("num_hidden_layers"): config.num_hidden_layers + count}
    deep = type(model)(EncoderConfig.from_dict(values))
    deep.load_state_dict(model.state_dict(), strict=False)
    learns = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, parameter in deep.named_parameters():
        parameter.requires_grad_(learns.get(name, True))
    return deep.train(model.training)


def exports(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Folder of a checkpoint -> what it has as a HuggingFace directory; all else are heads."""
    above: Any = model._modules.get("above")
    if above is None:
        return {"model": model}
    return {"model": model.base_model, **({} if above.beside is None else {BESIDE: above.beside})}


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a trained model; see the module. A usual model is one HuggingFace directory."""
    if model._modules.get("above") is None:
        model.save_pretrained(folder)
        return
    for name, encoder in exports(model).items():
        encoder.save_pretrained(folder if name == "model" else folder / name)
    write_head(folder, _own(model), _described(model))


def write_head(folder: Path, weights: dict[str, Tensor], form: dict[str, Any]) -> None:
    """Write head.safetensors and head.json."""
    save_file({name: p.detach().cpu().contiguous() for name, p in weights.items()}, folder / WEIGHTS)
    write(folder / FORM, (json.dumps(form, indent=1) + "\n").encode())


def load(kind: Any, place: Path, device: torch.device | str | None, task: str) -> PreTrainedModel:
    """A trained model with its head, in eval mode.

    Args:
        kind: an Auto class.
        place: a HuggingFace directory, with head.json or with the head of the class.
        device: where to put the model.
        task: for messages.

    Raises:
        ValueError: there is no trained head of this kind.
    """
    with warnings.catch_warnings():
        # Refused below, by name
        warnings.filterwarnings("ignore", message=".*freshly initialised")
        model = kind.from_pretrained(place, device=device)
    missing = f"model: {place} has no trained head for {task}; fastbert finetune trains one"
    if not (place / FORM).is_file():
        if model.load_report.missing:
            raise ValueError(missing)
        return model
    form = read_json(place / FORM)
    beside = place / BESIDE if form.get(BESIDE) else None
    _attach(model, kind, Head(form.get("head_mix", False), 0, form.get("head_bilstm", False), beside))
    if model._modules.get("above") is None or form != _described(model):
        raise ValueError(missing)
    fill(_own(model), place)
    return model.to(model.device).eval()


def _described(model: PreTrainedModel) -> dict[str, Any]:
    above: Any = model._modules["above"]
    return {"kind": model.task, **above.form()}


def _own(model: PreTrainedModel) -> dict[str, Tensor]:
    """Name -> each parameter that no export has."""
    exported = _identities(exports(model).values())
    return {name: p for name, p in model.named_parameters() if id(p) not in exported}


def _identities(models: Iterable[nn.Module]) -> set[int]:
    return {id(p) for each in models for p in each.parameters()}


@torch.no_grad()
def fill(own: dict[str, Tensor], place: Path) -> None:
    """Load head.safetensors into parameters.

    Raises:
        ValueError: the file has other names or shapes.
    """
    stored = load_file(place / WEIGHTS)
    for name in sorted({*own, *stored}):
        shapes = [tuple(of[name].shape) if name in of else None for of in (own, stored)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{place / WEIGHTS}: {name}: expected shape {shapes[0]}, got {shapes[1]}")
        own[name].copy_(stored[name])
