"""Question answering by a search: the best starts, the best ends of each, and whether there is an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.linear import apply_activated, apply_linear, apply_norm
from fastbert.layers.modules import attach
from fastbert.layers.parts import Activation
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES
from fastbert.models.heads.task_model import TaskModel, without_masked
from fastbert.models.labels import check_classes
from fastbert.models.outputs import ModelOutput
from fastbert.ops import checks
from fastbert.ops.cross_entropy import cross_entropy


@dataclass
class SpanSearchOutput(ModelOutput):
    """The best starts (batch, start_n_top), the best ends of each (batch, end_n_top · start_n_top), and
    cls_logits (batch,), whether there is no answer."""

    loss: Tensor | None = None
    start_top_log_probs: Tensor | None = None
    start_top_index: Tensor | None = None
    end_top_log_probs: Tensor | None = None
    end_top_index: Tensor | None = None
    cls_logits: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None


class SpanSearch(TaskModel):
    """Finds the spans that answer a question, ends by their start, and whether there is an answer.

    In training, with start_positions and end_positions (batch,), only the loss is returned: the mean of both
    cross-entropies, the ends scored for the right start; with cls_index and is_impossible (batch,) plus half
    the binary cross-entropy of having no answer. Otherwise the best starts and the best ends of each.

    Source: Yang et al. 2019, "XLNet", sec. 3.3; its code for SQuAD.
    """

    task = "ForQuestionAnswering"
    model_types = tuple(name for name, family in FAMILIES.items() if family.two_streams)

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        width = self.config.hidden_size
        attach(self, "start_logits.dense", nn.Linear(width, 1))
        for name, bias in (("end_logits", True), ("answer_class", False)):
            attach(self, f"{name}.dense_0", nn.Linear(2 * width, width))
            attach(self, f"{name}.activation", Activation("tanh"))
            attach(self, f"{name}.dense_1", nn.Linear(width, 1, bias))
        attach(self, "end_logits.LayerNorm", self.config.norm(width))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        is_impossible: Tensor | None = None,
        cls_index: Tensor | None = None,
        p_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **more: Any,
    ) -> SpanSearchOutput | tuple[Any, ...]:
        """Encode a padded or packed batch and search for spans; see the class.

        Args:
            cls_index: (batch,), the token that says whether there is an answer; the last kept one by default.
            p_mask: (batch, seqlen), non-zero at tokens that are in no answer. Masked tokens never are.
            more: what `XLNetModel.forward` takes besides.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        wanted = output_attentions, output_hidden_states, cu_seqlens, max_seqlen, None
        encoded = self.encode(
            *(input_ids, attention_mask, token_type_ids, None, inputs_embeds, None), *wanted, **more
        )
        hidden, kept = encoded.inputs.packing.grid(encoded.hidden)
        batch, seqlen, width = hidden.shape
        if p_mask is not None:
            checks.shape("p_mask", p_mask, (batch, seqlen))
            kept = p_mask == 0 if kept is None else kept & (p_mask == 0)
        starts = self._masked(apply_linear(self.head_part("start_logits.dense"), hidden).squeeze(-1), kept)
        labels = {"start_positions": start_positions, "end_positions": end_positions, "cls_index": cls_index}
        for name, label in labels.items():
            if label is not None:
                check_classes(name, label, seqlen)
        classed = encoded.last()
        if cls_index is not None:
            classed = hidden[torch.arange(batch, device=hidden.device), cls_index.reshape(-1)]
        if start_positions is not None and end_positions is not None:
            start, end = start_positions.reshape(-1), end_positions.reshape(-1)
            state = hidden[torch.arange(batch, device=hidden.device), start]
            ends = self._masked(self._ends(hidden, state[:, None]), kept)
            loss = (cross_entropy(starts, start) + cross_entropy(ends, end)) / 2
            if cls_index is not None and is_impossible is not None:
                answer = self._answer(state, classed)
                target = is_impossible.reshape(-1).to(answer.dtype)
                loss = loss + nn.functional.binary_cross_entropy_with_logits(answer, target) * 0.5
            return self._output(SpanSearchOutput, (loss, *[None] * 5), encoded, return_dict)
        first, each = self.config.start_n_top, self.config.end_n_top
        if max(first, each) > seqlen:
            raise ValueError(
                f"input_ids: expected at least {max(first, each)} tokens per sequence, got {seqlen}"
            )
        probs = starts.softmax(-1)
        top, at = probs.topk(first, -1)
        states = hidden.gather(1, at[..., None].expand(-1, -1, width))
        ends = self._masked(
            self._ends(hidden[:, :, None], states[:, None]), None if kept is None else kept[..., None]
        )
        end_top, end_at = (t.flatten(1) for t in ends.softmax(1).topk(each, 1))
        answer = self._answer(torch.einsum("blh,bl->bh", hidden, probs), classed)
        values = None, top, at, end_top, end_at, answer
        return self._output(SpanSearchOutput, values, encoded, return_dict)

    @staticmethod
    def _masked(scores: Tensor, kept: Tensor | None) -> Tensor:
        return scores if kept is None else without_masked(scores, kept)

    def _pair(self, name: str, first: Tensor, second: Tensor) -> Tensor:
        """tanh(dense_0([first, second]))."""
        x = torch.cat(torch.broadcast_tensors(first, second), -1)
        dense, act = (self.head_part(f"{name}.{part}") for part in ("dense_0", "activation"))
        return apply_activated(dense, act, x)

    def _ends(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Scores of ends, (batch, seqlen) or (batch, seqlen, starts)."""
        x = apply_norm(self.head_part("end_logits.LayerNorm"), self._pair("end_logits", hidden, states))
        return apply_linear(self.head_part("end_logits.dense_1"), x).squeeze(-1)

    def _answer(self, state: Tensor, classed: Tensor) -> Tensor:
        """(batch,)."""
        x = self._pair("answer_class", state, classed)
        return apply_linear(self.head_part("answer_class.dense_1"), x).squeeze(-1)
