"""`fastbert.EarlyExit`: a text leaves a classifier at the first layer whose own branch is certain.

A branch after layer i reads what the model's head reads of the last layer, x (batch, hidden):

    logits = classifier(dropout(tanh(dense(x))))        p = softmax(logits)        N classes
    "deebert"    leave when  -Σ p log p < threshold;             loss: cross-entropy with the labels
    "fastbert"   leave when  Σ p log p / log(1/N) < threshold;   loss: KL(p ‖ the last layer's p), no labels

The model itself is frozen: the branches alone are trained, together, by the sum of their losses. In inference
the rows of texts that leave are taken out, so the packed batch shrinks. A GPU waits once per branch.

Source: Xin et al. 2020, "DeeBERT: Dynamic Early Exiting for Accelerating BERT Inference"; Liu et al. 2020,
"FastBERT: a Self-distilling BERT with Adaptive Inference Time", sec. 3, whose branches also have
self-attention.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from fastbert.checkpoint.files import CheckpointError, cause, read_json, replace, write_json
from fastbert.compression.exit_training import KINDS, Learns, checked
from fastbert.execution.plan import plan_of
from fastbert.layers.linear import apply_linear
from fastbert.layers.packing import send
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.models.config import EncoderConfig
from fastbert.models.encoder import last_norm, run_encoder
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.task_model import Encoded
from fastbert.models.inputs import Inputs
from fastbert.models.labels import sequence_loss
from fastbert.models.outputs import ModelOutput
from fastbert.runtime import expected

WEIGHTS, FORM = "exits.safetensors", "exits.json"
_REQUIRED: Any = None


@dataclass
class ExitOutput(ModelOutput):
    """logits (batch, num_labels); layers (batch,) int64: how many layers each text went through."""

    logits: Tensor = _REQUIRED
    layers: Tensor = _REQUIRED


class Branch(nn.Module):
    """The classifier after a layer: (batch, hidden) -> (batch, num_labels).

    Args:
        config: the model's.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        hidden, rate = config.hidden_size, config.classifier_dropout
        self.dense = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(config.hidden_dropout_prob if rate is None else rate)
        self.classifier = nn.Linear(hidden, config.num_labels)
        for linear in (self.dense, self.classifier):
            nn.init.normal_(linear.weight, 0.0, config.initializer_range)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return apply_linear(self.classifier, self.dropout(apply_linear(self.dense, x, "tanh")))


class EarlyExit(Learns):
    """A sequence classifier whose texts leave at the first layer that is certain.

    Args:
        model: a trained `…ForSequenceClassification` of this package, float or 8-bit, with two classes or
            more. It is used as it is, and put in eval mode.
        kind: "fastbert" or "deebert"; see the module.
        every: there is a branch after each `every`-th layer, but none after the last one.

    Attributes:
        model: the model.
        branches: the branches, drawn anew; `fit`, or a loop of your own over `loss`, trains them.
        exits: the number of layers before each branch.
        threshold: of calls that pass none; 0 at first, at which no text leaves early.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """

    def __init__(self, model: BertForSequenceClassification, kind: str = "fastbert", every: int = 1):
        super().__init__()
        if not isinstance(model, BertForSequenceClassification):
            raise TypeError(f"model: expected a sequence classifier of fastbert, got {type(model).__name__}")
        config = model.config
        if config.family.two_streams or model._modules.get("above") is not None:
            why = f"a {config.model_type}" if config.family.two_streams else "one with a head of more layers"
            raise ValueError(f"model: expected another classifier, got {why}")
        if config.num_labels < 2 or config.problem_type not in (None, "single_label_classification"):
            raise ValueError(
                f"model: expected one of several classes per text, got num_labels {config.num_labels} and "
                f"problem_type {config.problem_type!r}"
            )
        expected.one_of(KINDS, kind=kind)
        depth = len(model.base_model.layer_list())
        if type(every) is not int or not 1 <= every < depth:
            raise ValueError(f"every: expected an integer from 1 to {depth - 1}, got {every!r}")
        self.model, self.kind, self.every, self.threshold = model.eval(), kind, every, 0.0
        self.exits = list(range(every, depth, every))
        self.branches = nn.ModuleList(Branch(config) for _ in self.exits).to(model.device, model.dtype)
        # In a list, so that they are no children: the layers are the model's
        self._spans: list[nn.ModuleList] = []

    @property
    def config(self) -> EncoderConfig:
        """The model's config."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the branches; the model is frozen."""
        self.training = mode
        self.branches.train(mode)
        return self

    # -- inference -------------------------------------------------------------------------------------------

    # Which texts leave is known on the host alone
    @torch.compiler.disable
    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        threshold: float | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> ExitOutput:
        """Classify a padded or packed batch, without gradients; the arguments are those of the model.

        Args:
            threshold: a text leaves where its uncertainty is below it, >= 0. 0: never, and the logits are
                the model's own, bit for bit. None: the attribute.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        limit = checked(self.threshold if threshold is None else threshold)
        given = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        inputs, x = self._inputs(*given, cu_seqlens, max_seqlen), None
        here, lengths = list(range(inputs.packing.batch)), []
        left: list[int] = []
        layers, parts = torch.zeros(len(here), dtype=torch.int64), []
        for number, (depth, span) in enumerate(self._spans_now()):
            last = number == len(self.exits)
            first_only = last and self.model.reads_first()
            x = self._run(inputs, span, x, last, first_only)
            if last:
                logits, gone = self.model.logits(Encoded(x, inputs, None, None, first_only))[0], here
            else:
                logits = self.branches[number](self._vectors(x, inputs))
                found = self.uncertainty(logits) < limit
                # One wait for the lengths too
                found = found if lengths else torch.cat([found, inputs.packing.cu_seqlens.diff()])
                flags = found.tolist()
                lengths = lengths or flags[len(here) :]
                gone = [i for i, flag in zip(here, flags, strict=False) if flag]
            if not gone and not last:
                continue
            layers[gone] = depth
            left += gone
            if len(gone) == len(here):
                parts.append(logits)
                break
            leave, stay = ([j for j in range(len(here)) if bool(flags[j]) is flag] for flag in (True, False))
            at = send(torch.tensor(leave), self.device)
            parts.append(logits.index_select(0, at))
            inputs, rows = inputs.chosen(stay, lengths)
            x = x.index_select(0, rows)
            here, lengths = ([each[j] for j in stay] for each in (here, lengths))
        order = send(torch.tensor(left, dtype=torch.int64).argsort(), self.device)
        return ExitOutput(torch.cat(parts).index_select(0, order), layers)

    def uncertainty(self, logits: Tensor) -> Tensor:
        """(batch, classes) -> (batch,), >= 0: the entropy in nats; for "fastbert" over its largest value."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        entropy = torch.special.entr(wide.softmax(-1)).sum(-1)
        return entropy / math.log(logits.shape[-1]) if self.kind == "fastbert" else entropy

    # -- training --------------------------------------------------------------------------------------------

    def loss(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """The sum of the branches' losses, each a mean over texts: a scalar with gradients for the branches.

        Args:
            labels: (batch,) integers, for "deebert"; "fastbert" reads none.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        if self.kind == "deebert":
            if labels is None:
                raise ValueError("labels: expected (batch,) integers for kind 'deebert', got None")
            self.model.check_labels(labels, attention_mask)
        given = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        with torch.no_grad():
            inputs = self._inputs(*given, cu_seqlens, max_seqlen)
            hidden, states, _ = self.model.base_model.encode_inputs(inputs, None, False, True, False)
            vectors = [self._vectors(states[depth], inputs) for depth in self.exits]
            teacher = self.model.logits(Encoded(hidden, inputs, None, None, False))[0].float().log_softmax(-1)
        losses = []
        for branch, x in zip(self.branches, vectors, strict=True):
            logits = branch(x).float()
            if labels is not None and self.kind == "deebert":
                losses.append(sequence_loss("labels", logits, labels))
            else:
                student = logits.log_softmax(-1)
                losses.append((student.exp() * (student - teacher)).sum(-1).mean())
        return torch.stack(losses).sum()

    # -- files -----------------------------------------------------------------------------------------------

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model as its own `save_pretrained` does, with exits.safetensors and exits.json beside it.

        Raises:
            fastbert.CheckpointError: a file could not be written.
        """
        self.model.save_pretrained(directory)
        state = {key: t.detach().cpu().contiguous() for key, t in self.branches.state_dict().items()}
        replace(Path(directory) / WEIGHTS, to_bytes(state))
        form = {"kind": self.kind, "every": self.every, "threshold": self.threshold}
        write_json(Path(directory) / FORM, form)

    @classmethod
    def from_pretrained(cls, directory: str | Path, **options: Any) -> Self:
        """Load what `save_pretrained` wrote, in eval mode.

        Args:
            directory: the directory.
            options: of the model's `from_pretrained`, such as device and dtype.

        Raises:
            fastbert.CheckpointError: naming the file and the cause.
        """
        place = Path(directory)
        form = read_json(place / FORM)
        model = AutoModelForSequenceClassification.from_pretrained(directory, **options)
        try:
            found = cls(model, form["kind"], form["every"])
            found.threshold = checked(form["threshold"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{place / FORM}: {cause(error)}") from None
        try:
            found.branches.load_state_dict(load_file(place / WEIGHTS))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{place / WEIGHTS}: does not fit {FORM}: {cause(error)}") from None
        return found.eval()

    # -- parts -----------------------------------------------------------------------------------------------

    def _inputs(self, *given: Any) -> Inputs:
        """The checked inputs of a call."""
        if self.model.training:
            raise ValueError("model: expected eval mode, got training mode")
        if self.config.token_schedule is not None:
            raise ValueError("model: expected no config token_schedule, as whole texts leave")
        ids, mask, types, positions, embeds, cu_seqlens, longest = given
        model: Any = self.model
        if self.config.family.global_tokens:
            mask = model.merged(None, ids, mask, embeds, cu_seqlens, longest)
        return model.base_model.checked(ids, mask, types, positions, embeds, cu_seqlens, longest)

    def _spans_now(self) -> list[tuple[int, nn.ModuleList]]:
        """(number of layers up to its end, its layers) of each span, which a branch or the head follows."""
        layers = self.model.base_model.layer_list()
        ends = [*self.exits, len(layers)]
        spans = [layers[a:b] for a, b in itertools.pairwise([0, *ends])]
        if [list(kept) for kept in self._spans] != spans:
            self._spans = [nn.ModuleList(span) for span in spans]
        return list(zip(ends, self._spans, strict=True))

    def _run(
        self, inputs: Inputs, span: nn.ModuleList, x: Tensor | None, last: bool, first_only: bool
    ) -> Tensor:
        """The output of some layers; `x` is that of the layer before, None for the embeddings."""
        encoder = self.model.base_model
        plan = plan_of(span, list(span), encoder.layer_class)
        assert plan is not None
        return run_encoder(
            encoder,
            encoder.family,
            plan,
            lambda seed, known: encoder.embed_inputs(inputs),
            inputs,
            False,
            first_only=first_only,
            causal=bool(self.config.is_decoder),
            start=x,
            ends=last,
        )[0]

    def _vectors(self, x: Tensor, inputs: Inputs) -> Tensor:
        """What a branch reads of the output of a layer: (batch, hidden)."""
        encoder = self.model.base_model
        x = last_norm(encoder, encoder.family, x, inputs.packing)
        return self.model.sequence_vectors(Encoded(x, inputs, None, None, False))
