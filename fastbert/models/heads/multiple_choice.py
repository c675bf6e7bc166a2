"""Multiple choice: several sequences per example, one of which is right."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastbert.models.calls import ChoicesCall
from fastbert.models.config import EncoderConfig
from fastbert.models.families import Family, families_with
from fastbert.models.heads.task_model import TaskModel
from fastbert.models.labels import check_classes, check_tensor, sequence_loss
from fastbert.models.outputs import LogitsOutput


class BertForMultipleChoice(TaskModel):
    """Chooses among several sequences.

    Inputs have a dimension more: input_ids, attention_mask, token_type_ids and position_ids (batch, choices,
    seqlen), inputs_embeds (batch, choices, seqlen, embedding size). Labels: (batch,), the right choice; loss:
    mean cross-entropy. Logits: (batch, choices). hidden_states and attentions have batch x choices sequences,
    and so have packed inputs (`cu_seqlens`).

    Source: Devlin et al. 2018, "BERT", sec. 4.4.
    """

    task = "ForMultipleChoice"
    model_types = families_with(task)
    reads_first_only = True
    __call__: ChoicesCall

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        _check_fixed(self.config, self.family.choice.fixed)
        self.attach_classifier(self.family.choice, 1)
        self.post_init()

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """If the head has no dense layer of its own."""
        return family.choice.dense is None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool | None = None,
        choices: int | None = None,
        **more: Any,
    ) -> LogitsOutput | tuple[Any, ...]:
        """Encode all choices as one batch and compare them; see the class.

        Args:
            choices: with `cu_seqlens`, how many sequences in a row belong to each example; None otherwise.
            more: what the family's encoder takes besides.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        named = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        if cu_seqlens is None:
            if choices is not None:
                raise ValueError(f"choices: expected None without cu_seqlens, got {choices!r}")
            named, choices = _flattened(named)
        else:
            choices = _checked_choices(choices, cu_seqlens)
        if labels is not None and choices:
            check_classes("labels", labels, choices)
        encoded = self.encode(
            **named,
            head_mask=head_mask,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            causal=causal,
            **more,
        )
        logits = self.classify(self.family.choice, encoded).reshape(-1, choices)
        loss = None if labels is None else sequence_loss("labels", logits, labels)
        return self._output(LogitsOutput, (loss, logits), encoded, return_dict)


def _flattened(named: dict[str, Tensor | None]) -> tuple[dict[str, Tensor | None], int]:
    """The inputs as one batch of all choices, and the number of choices; 0 if there are no tokens."""
    choices = 0
    flat: dict[str, Tensor | None] = dict.fromkeys(named)
    for name, t in named.items():
        if t is not None:
            check_tensor(name, t)
            dims = 4 if name == "inputs_embeds" else 3
            if t.dim() != dims or t.shape[1] == 0:
                shape = "(batch, choices, seqlen" + (", embedding size)" if dims == 4 else ")")
                raise ValueError(f"{name}: expected shape {shape} with choices >= 1, got {tuple(t.shape)}")
            if name in ("input_ids", "inputs_embeds"):
                choices = t.shape[1]
            flat[name] = t.flatten(0, 1)
    return flat, choices


def _checked_choices(choices: object, cu_seqlens: object) -> int:
    if not isinstance(choices, int) or isinstance(choices, bool) or choices < 1:
        raise ValueError(f"choices: expected an integer >= 1 beside cu_seqlens, got {choices!r}")
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 and (cu_seqlens.shape[0] - 1) % choices:
        raise ValueError(f"choices: {choices} do not divide the {cu_seqlens.shape[0] - 1} packed sequences")
    return choices


def _check_fixed(config: EncoderConfig, fixed: dict[str, Any]) -> None:
    """Refuse config values that this head does not implement; no published checkpoint has them."""
    for key, expected in fixed.items():
        value = config.get(key, expected)
        if value != expected and (value is not None or expected):
            raise ValueError(f"config {key}: only {expected!r} is supported in this head, got {value!r}")
