"""What a head may read besides the last layer's output.

`above` of a `TaskModel` is between its encoder and its head. It turns hidden states into what the head reads,
of the same width. So losses, metrics and outputs are those of the usual head.

A head for sequences reads the token at position 0. A causal model's first token attends only to itself, so of
a causal model the head reads the last token; with a BiLSTM it reads both ends, in every model.

Source: Devlin et al. 2018, "BERT", sec. 5.1 and 5.3; the mix: Peters et al. 2018, "Deep contextualized word
representations", eq. 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from fastbert.checkpoint.read import weights_digest
from fastbert.finetuning.settings import Settings
from fastbert.layers.packing import Packing, positions_of
from fastbert.models.base import PreTrainedModel
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.task_model import Encoded
from fastbert.models.inputs import Inputs
from fastbert.runtime import expected

BESIDE = "beside"
# Adam moves each parameter by the learning rate, which suits weights near 0.02. A mix needs larger steps.
_MIX_SPEED = 10.0


@dataclass(frozen=True)
class Head:
    """What the head reads.

    Attributes:
        head_mix: whether a learned mix of all layers, the embedding output included.
        head_layers: new encoder layers on top of the encoder; `layer_decay` counts them as its own.
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
        expected.integers(0, head_layers=self.head_layers)
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
        of_one = ("reinit", "random_init", "layer_decay", "decay_to_start")
        of_one += ("layerdrop", "mixout", "freelb", "smart", "qat")
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
    """Bidirectional LSTM layers over packed sequences, with dropout before each.

    They compute in the parameters' dtype. Dropout is a module of its own, because cuDNN's generator cannot be
    resumed.

    Args:
        inputs: width of the input.
        width: width of each direction.
        dropout_p: probability of dropping an input of a layer.
        layers: number of layers.
    """

    def __init__(self, inputs: int, width: int, dropout_p: float, layers: int = 2) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout_p)
        sizes = (inputs, *[2 * width] * (layers - 1))
        self.layers = nn.ModuleList(nn.LSTM(n, width, bidirectional=True) for n in sizes)

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
    return bool(config.is_decoder) and not config.right_to_left


def _ends(x: Tensor, packing: Packing, last: bool) -> Tensor:
    """(rows, width) -> (sequences, width): the last or the first token of each sequence."""
    return x.index_select(0, packing.cu_seqlens[1:].long() - 1) if last else packing.first_rows(x)


def states_of(encoder: Any, inputs: Inputs) -> Tensor:
    """The last hidden states of another model's inputs, (rows, hidden), in the order of the inputs.

    Raises:
        ValueError: the inputs are the other model's embeddings.
    """
    if inputs.input_ids is None:
        raise ValueError("inputs_embeds: expected input_ids with beside, which has embeddings of its own")
    if not encoder.config.right_to_left:
        return encoder.encode_inputs(inputs, None, False, False, False)[0]
    ends = inputs.packing.cu_seqlens.long()
    sequence, position = positions_of(ends, inputs.position_ids.shape[0])
    order = ends[1:][sequence] - 1 - position
    types = inputs.token_type_ids
    backward = replace(
        inputs, input_ids=inputs.input_ids[order], token_type_ids=None if types is None else types[order]
    )
    return encoder.encode_inputs(backward, None, False, False, False)[0][order]
