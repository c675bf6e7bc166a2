"""A one-layer BiLSTM as student: word embeddings, the last state of both directions, ReLU, classes.

A pair of texts is read as one sequence with special tokens; the paper has siamese networks.

Source: Tang et al. 2019, "Distilling Task-Specific Knowledge from BERT into Simple Neural Networks", sec. 3
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastbert.checkpoint.files import CONFIG, SAFETENSORS, read_json, write_json
from fastbert.finetuning.heads import BiLstm
from fastbert.models.outputs import LogitsOutput

MODEL_TYPE = "bilstm"


@dataclass(frozen=True)
class BiLstmConfig:
    """The sizes of a BiLSTM.

    Attributes:
        vocab_size: rows of the table of word embeddings.
        embedding_size: its columns.
        id2label: number -> name of each class; one name for a regression.
        hidden_size: width of each direction.
        inner_size: width of the layer before the classes.
        dropout: probability of dropping an element of the LSTM's input.
        max_tokens: the longest text.
        model_type: "bilstm".
    """

    vocab_size: int
    embedding_size: int
    id2label: dict[int, str] = field(default_factory=dict)
    hidden_size: int = 150
    inner_size: int = 200
    dropout: float = 0.1
    max_tokens: int = 512
    model_type: str = MODEL_TYPE

    @property
    def num_labels(self) -> int:
        """Number of classes."""
        return len(self.id2label)


class BiLstmForSequenceClassification(nn.Module):
    """See the module.

    Args:
        config: its sizes.
    """

    def __init__(self, config: BiLstmConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.embedding_size)
        nn.init.normal_(self.embeddings.weight, std=0.02)
        self.lstm = BiLstm(config.embedding_size, config.hidden_size, config.dropout, layers=1)
        self.dense = nn.Linear(2 * config.hidden_size, config.inner_size)
        self.classifier = nn.Linear(config.inner_size, config.num_labels)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.classifier.weight.device

    def num_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(p.numel() for p in self.parameters())

    def operations(self) -> int:
        """Floating-point operations of the LSTM per token."""
        return 2 * sum(p.numel() for name, p in self.lstm.named_parameters() if "weight" in name)

    def forward(
        self, input_ids: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> LogitsOutput:
        """The scores of the classes.

        Args:
            input_ids: (total,) int64 of packed sequences, or (batch, seqlen) of whole ones.
            cu_seqlens: (batch + 1,) int32, where each sequence starts; with packed sequences.
            max_seqlen: unused; encoders take it.

        Returns:
            logits (batch, classes).
        """
        if cu_seqlens is None:
            cu_seqlens = torch.arange(len(input_ids) + 1, dtype=torch.int32) * input_ids.shape[1]
        ends = self.lstm(self.embeddings(input_ids.flatten()), cu_seqlens)[1]
        return LogitsOutput.of(logits=self.classifier(self.dense(ends).relu()))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()},
            folder / SAFETENSORS,
        )
        write_json(folder / CONFIG, asdict(self.config))

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: torch.device | str | None = None
    ) -> BiLstmForSequenceClassification:
        """Load what `save_pretrained` has written, in eval mode.

        Raises:
            ValueError: config.json is of another kind of model.
        """
        folder = Path(folder)
        values: dict[str, Any] = read_json(folder / CONFIG)
        if values.get("model_type") != MODEL_TYPE:
            raise ValueError(
                f"{folder / CONFIG}: model_type: expected {MODEL_TYPE!r}, got {values.get('model_type')!r}"
            )
        values["id2label"] = {int(number): name for number, name in values["id2label"].items()}
        model = cls(BiLstmConfig(**values))
        model.load_state_dict(load_file(folder / SAFETENSORS))
        return model.to(device).eval()
