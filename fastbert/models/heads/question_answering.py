"""Extractive question answering: a start and an end per sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastbert.models.calls import SpanCall
from fastbert.models.config import EncoderConfig
from fastbert.models.families import families_with
from fastbert.models.heads.task_model import Encoded, TaskModel, without_masked
from fastbert.models.labels import check_one_per_sequence, check_positions
from fastbert.models.outputs import QuestionAnsweringOutput
from fastbert.ops.cross_entropy import cross_entropy


class BertForQuestionAnswering(TaskModel):
    """Finds the span of tokens that answers a question.

    Labels: start_positions and end_positions, (batch,). A position below 0 counts as 0, and a position from
    seqlen on does not count. Loss: the mean of both cross-entropies over the kept tokens, only if both are
    given. start_logits and end_logits: (batch, seqlen), half the lowest finite number at masked tokens.

    Source: Devlin et al. 2018, "BERT", sec. 4.2.
    """

    task = "ForQuestionAnswering"
    model_types = families_with(task)
    __call__: SpanCall

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        if self.num_labels != 2:
            raise ValueError(f"config num_labels: expected 2, start and end, got {self.num_labels}")
        self.attach_classifier(self.family.spans, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool | None = None,
        **more: Any,
    ) -> QuestionAnsweringOutput | tuple[Any, ...]:
        """Encode a padded or packed batch and score every token as start and as end; see the class.

        With `cu_seqlens` the logits are (total,). Positions are counted from the sequence's start, and a
        position from its length on does not count. `more` is what the family's encoder takes besides.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        positions = self._positions(start_positions, end_positions, attention_mask)
        encoded = self.encode(
            *(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, head_mask),
            *(output_attentions, output_hidden_states, cu_seqlens, max_seqlen, causal),
            **more,
        )
        return self._spans(self.logits(encoded)[0], positions, encoded, return_dict)

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """(rows, 2), the scores of each token as start and as end, twice."""
        scores = encoded.by_token(lambda x: self.classes_of(self.family.spans, x))
        return scores, scores

    @staticmethod
    def _positions(
        start: Tensor | None, end: Tensor | None, attention_mask: Tensor | None
    ) -> dict[str, Tensor | None]:
        """The labels by their names, checked."""
        positions = {"start_positions": start, "end_positions": end}
        for name, p in positions.items():
            if p is not None:
                check_positions(name, p, attention_mask)
        return positions

    def _spans(
        self, logits: Tensor, positions: dict[str, Tensor | None], encoded: Encoded, return_dict: bool | None
    ) -> QuestionAnsweringOutput | tuple[Any, ...]:
        """The output from the scores (rows, 2) of each token as start and as end."""
        packing = encoded.inputs.packing
        padded, kept = packing.grid(logits)
        scores = [s.contiguous() for s in padded.unbind(-1)]
        if kept is not None:
            scores = [without_masked(s, kept) for s in scores]
        seqlen = packing.seqlen
        losses = []
        for (name, p), s in zip(positions.items(), scores, strict=True):
            if p is not None:
                check_one_per_sequence(name, p, packing.batch, s)
                p = p.reshape(-1).clamp(0, seqlen)
                if packing.flat:
                    p = p.masked_fill(p >= packing.cu_seqlens.diff(), seqlen)
                losses.append(cross_entropy(s, p, ignore_index=seqlen))
        loss = (losses[0] + losses[1]) / 2 if len(losses) == 2 else None
        if packing.flat:
            scores = [s.contiguous() for s in logits.unbind(-1)]
        return self._output(QuestionAnsweringOutput, (loss, *scores), encoded, return_dict)
