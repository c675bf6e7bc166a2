"""XLNet's encoder and heads: BERT's under the family's names, with a second stream and memories.

What differs from BERT is data in `families/`, and the mathematics of `layers/two_streams.py`.

A usual call is packed. A call with `mems`, `perm_mask` or `target_mapping`, or of a model with config bi_data
or same_length, computes the padded batch as transformers does, masked tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers import packing
from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.embeddings import WordEmbeddings
from fastbert.layers.form import SITES
from fastbert.layers.linear import apply_activated, apply_linear, apply_norm, dropped
from fastbert.layers.modules import attach
from fastbert.layers.parts import Activation
from fastbert.layers.two_streams import (
    LAST_SITE,
    TABLE_SITE,
    OwnMatrices,
    Pairs,
    StreamLayer,
    rate,
    sinusoids,
    sinusoids_of,
)
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.models.encoder import columns_of, dropout_seed, run_encoder
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.task_model import Encoded, TaskModel, without_masked
from fastbert.models.heads.token_classification import BertForTokenClassification
from fastbert.models.inputs import Inputs, head_gates
from fastbert.models.labels import check_classes, check_tensor
from fastbert.models.outputs import LogitsOutput, ModelOutput, QuestionAnsweringOutput
from fastbert.ops import checks
from fastbert.ops.attention_grid import to_grid
from fastbert.ops.cross_entropy import cross_entropy

_ABSENT: Any = None


@dataclass
class XLNetModelOutput(ModelOutput):
    """last_hidden_state (batch, seqlen or predictions, hidden); mems: per layer (tokens, batch, hidden);
    hidden_states and attentions as of `BertModel`, per stream if there are two."""

    last_hidden_state: Tensor = _ABSENT
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None


@dataclass
class XLNetLogitsOutput(ModelOutput):
    """logits of a vocabulary, sequence, token or choice head; the model's class states their shape."""

    loss: Tensor | None = None
    logits: Tensor = _ABSENT
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None


@dataclass
class XLNetSpanOutput(ModelOutput):
    """start_logits, end_logits (batch, seqlen)."""

    loss: Tensor | None = None
    start_logits: Tensor = _ABSENT
    end_logits: Tensor = _ABSENT
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None


@dataclass
class XLNetForQuestionAnsweringOutput(ModelOutput):
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


class StreamEmbeddings(WordEmbeddings):
    """Word embeddings whose row of padding is trained.

    Args:
        config: the model's `EncoderConfig`.
    """

    def __init__(self, config: Any):
        size, width = config.vocab_size, config.hidden_size
        nn.Embedding.__init__(self, size, width, _weight=torch.empty(size, width))


class XLNetModel(BertModel, OwnMatrices):
    """XLNet's encoder; see `BertModel`, and `forward` for the arguments that only XLNet has.

    Source: Yang et al. 2019, "XLNet: Generalized Autoregressive Pretraining for Language Understanding".
    """

    model_type = "xlnet"
    embeddings_class = StreamEmbeddings
    layer_class = StreamLayer

    def draw_own_(self, std: float) -> None:
        """See `OwnMatrices`."""
        self.mask_emb.normal_(0.0, std)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        perm_mask: Tensor | None = None,
        target_mapping: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        input_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_mems: bool | None = None,
        *,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool | None = None,
        first_token_only: bool = False,
        packed: bool = False,
    ) -> XLNetModelOutput | tuple[Any, ...]:
        """Encode a padded or packed batch; see `BertModel.forward`.

        Args:
            mems: per layer (M, batch, hidden), `mems` of a previous call: further tokens before these, all of
                which are seen.
            perm_mask: (batch, seqlen, seqlen), non-zero where the first token does not see the second. In the
                content stream a token always sees itself.
            target_mapping: (batch, predictions, seqlen), which token each prediction is at. With it the
                query stream is returned.
            input_mask: (batch, seqlen), in place of attention_mask: non-zero at padding.
            use_mems: whether to return `mems`; None: config use_mems_train or use_mems_eval. Packed tokens
                have none.
            position_ids: (batch, seqlen), from which distances are counted; by default the padded columns.

        Returns:
            last_hidden_state, mems, hidden_states, attentions. Memories of masked tokens are zeros in a usual
            call. With target_mapping hidden_states has both streams of each layer in turn, and attentions a
            pair per layer.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        config = self.config
        attention_mask = kept_mask(attention_mask, input_mask)
        if use_mems is None:
            use_mems = config.use_mems_train if self.training else config.use_mems_eval
        use_mems = use_mems and cu_seqlens is None
        causal = config.attn_type == "uni" if causal is None else causal
        wants_probs = config.output_attentions if output_attentions is None else output_attentions
        wants_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        tokens = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        inputs = self.checked(*tokens, cu_seqlens, max_seqlen)
        special = {"mems": mems, "perm_mask": perm_mask, "target_mapping": target_mapping}
        if self.whole_batch(causal) or any(t is not None for t in special.values()):
            for name, value in {
                "cu_seqlens": cu_seqlens,
                "position_ids": position_ids,
                "head_mask": head_mask,
            }.items():
                if value is not None:
                    raise ValueError(
                        f"{name}: expected None beside mems, perm_mask, target_mapping, config bi_data and "
                        "config same_length"
                    )
            both = self.both_streams(*tokens[:3], inputs_embeds, mems, perm_mask, target_mapping, causal)
            hidden, states, probs, inputs = both
            if first_token_only:
                hidden = inputs.packing.first_rows(hidden)
            contents = states[:: 1 if target_mapping is None else 2]
        else:
            gates = None if head_mask is None else head_gates(config, head_mask, inputs.device)
            wanted = wants_probs, wants_states or use_mems
            hidden, states, probs = self.encode_inputs(inputs, gates, *wanted, first_token_only, causal)
            contents = [inputs.packing.unpack(s) for s in states[:-1]] if use_mems else []
        new = self._memories(contents[: config.num_hidden_layers], mems) if use_mems else None
        states, probs = states if wants_states else None, probs if wants_probs else None
        if packed:
            return hidden, states, probs, inputs, new
        found = Encoded(hidden, inputs, states, probs, first_token_only)
        last = inputs.packing.unpack(hidden)
        if first_token_only:
            last = hidden if inputs.packing.flat else hidden.unsqueeze(1)
        padded = found.hidden_states
        if padded is not None and not first_token_only and states[-1] is hidden:
            padded = *padded[:-1], last
        output = XLNetModelOutput.of(
            last_hidden_state=last, mems=new, hidden_states=padded, attentions=found.attentions
        )
        return self.as_output(output, return_dict)

    def whole_batch(self, causal: bool) -> bool:
        """Whether the config alone asks for the padded batch."""
        return self.config.bi_data or (self.config.same_length and causal)

    def _memories(self, contents: Sequence[Tensor], before: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """The memories of the layers' inputs, each (batch, seqlen, hidden)."""
        config, new = self.config, []
        for i, x in enumerate(contents):
            x = x.transpose(0, 1)[: config.reuse_len or None]
            x = x if before is None else torch.cat([before[i].to(x.dtype), x])
            new.append(x[-(config.mem_len or 0) :].detach())
        return tuple(new)

    def encode_inputs(
        self,
        inputs: Inputs,
        gates: Tensor | None,
        want_attentions: bool,
        want_states: bool,
        first_only: bool,
        causal: bool | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """See `BertModel`."""
        config, drops = self.config, rate(self.dropout)
        causal = config.attn_type == "uni" if causal is None else causal
        if self.whole_batch(causal):
            raise ValueError("cu_seqlens: expected None with config bi_data or same_length")
        if drops and seed is None:
            seed = dropout_seed(inputs.device)

        def embed(seed: Tensor | None) -> Tensor:
            x = inputs.inputs_embeds
            x = self._modules[self.family.embeddings](inputs.input_ids) if x is None else x
            return dropped(x, drops, seed, 0) if drops else x

        def complete(batch: PackedBatch) -> PackedBatch:
            reach = batch.max_seqlen
            if inputs.last_position is not None:
                positions = to_grid(inputs.position_ids, batch.cu_seqlens, batch.max_seqlen)
                batch, reach = replace(batch, columns=positions), inputs.last_position + 1
            elif inputs.holes:
                batch, reach = replace(batch, columns=columns_of(inputs.packing)), inputs.packing.seqlen
            more = config.hidden_size, config.clamp_len, inputs.token_type_ids, drops
            return replace(batch, sinusoids=sinusoids_of(batch, reach, *more))

        hidden, states, probs = run_encoder(
            self,
            self.family,
            self.layer_list(),
            embed,
            inputs,
            drops > 0,
            gates=gates,
            want_attentions=want_attentions,
            want_states=want_states,
            first_only=first_only,
            recompute_every=self.checkpoint_every,
            causal=causal,
            taps=self.taps,
            seed=seed,
            complete=complete,
        )
        return (dropped(hidden, drops, seed, LAST_SITE) if drops else hidden), states, probs

    def both_streams(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        mems: Sequence[Tensor] | None,
        perm_mask: Tensor | None,
        target_mapping: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, list[Tensor], list[Any], Inputs]:
        """The padded batch, masked tokens included; see `forward`.

        Returns:
            (rows of the last stream, hidden states, probabilities, the places of the rows).
        """
        device, drops = self.device, rate(self.dropout)
        h = self._modules[self.family.embeddings](input_ids) if inputs_embeds is None else inputs_embeds
        batch, seqlen, width = h.shape
        kept = None if attention_mask is None else (attention_mask != 0).to(device)
        if kept is not None:
            checks.shape("attention_mask", kept, (batch, seqlen))
        if perm_mask is not None:
            check_tensor("perm_mask", perm_mask)
            checks.shape("perm_mask", perm_mask, (batch, seqlen, seqlen))
        if target_mapping is not None:
            check_tensor("target_mapping", target_mapping)
            if target_mapping.dim() != 3 or target_mapping.shape[::2] != (batch, seqlen):
                raise ValueError(
                    f"target_mapping: expected shape ({batch}, predictions, {seqlen}), "
                    f"got {tuple(target_mapping.shape)}"
                )
            target_mapping = target_mapping.to(device, h.dtype)
        earlier = self._checked_memories(mems, batch)
        past = 0 if earlier is None else earlier[0].shape[1]
        hides = self._hidden_pairs(batch, seqlen, past, kept, perm_mask, causal)
        seeds = [dropout_seed(device) if self.training else None for _ in "hg"]

        def drop(x: Tensor, seed: Tensor | None, site: int) -> Tensor:
            return dropped(x.flatten(0, 1), drops, seed, site).view_as(x) if drops else x

        segments = None
        if token_type_ids is not None:
            keys = torch.nn.functional.pad(token_type_ids, (past, 0))
            segments = (token_type_ids[:, :, None] != keys[:, None, :])[:, None]
        table = drop(self._sinusoids(batch, seqlen, past), seeds[0], TABLE_SITE)
        g = None
        if target_mapping is not None:
            g = drop(self.mask_emb.expand(batch, target_mapping.shape[1], width), seeds[1], 0)
        h, states, probs = drop(h, seeds[0], 0), [], []
        given = Pairs(table, segments, hides, target_mapping)
        for i, layer in enumerate(self.layer_list()):
            states += [h] if g is None else [h, g]
            asked = Asked(site=1 + i * SITES)
            h, g, seen = layer.streams(h, g, None if earlier is None else earlier[i], given, asked, seeds)
            probs.append(seen[0] if g is None else seen)
        states += [h] if g is None else [h, g]
        last = drop(h, seeds[0], LAST_SITE) if g is None else drop(g, seeds[1], LAST_SITE)
        places = packing.dense(batch, last.shape[1], device)
        positions = torch.arange(last.shape[1], device=device).repeat(batch)
        return last.flatten(0, 1), states, probs, Inputs(None, positions, None, None, None, places)

    def _checked_memories(self, mems: Sequence[Tensor] | None, batch: int) -> list[Tensor] | None:
        """(batch, M, hidden) per layer."""
        if mems is None:
            return None
        config = self.config
        if len(mems) != config.num_hidden_layers:
            raise ValueError(f"mems: expected {config.num_hidden_layers} tensors, got {len(mems)}")
        for each in mems:
            check_tensor("mems", each)
            checks.shape("mems", each, (len(mems[0]), batch, config.hidden_size))
        return [each.transpose(0, 1).to(self.device) for each in mems]

    def _hidden_pairs(
        self,
        batch: int,
        seqlen: int,
        past: int,
        kept: Tensor | None,
        perm_mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What each stream does not see; see `Pairs`."""
        device = self.device
        query = torch.arange(seqlen, device=device)[:, None]
        distance = query - torch.arange(-past, seqlen, device=device)
        hidden = torch.zeros(1, 1, seqlen, past + seqlen, dtype=torch.bool, device=device)
        if causal:
            hidden = hidden | (distance < 0)
            if self.config.same_length:
                hidden = hidden | (distance > past)
        later = hidden[..., past:]
        if kept is not None:
            later = later | kept.logical_not()[:, None, None, :]
        if perm_mask is not None:
            later = later | (perm_mask != 0).to(device)[:, None]
        whole = torch.cat([hidden[..., :past].expand(*later.shape[:3], -1), later], -1)
        if not causal and kept is None and perm_mask is None:
            return None, None
        return whole & (distance != 0), whole

    def _sinusoids(self, batch: int, seqlen: int, past: int) -> Tensor:
        """The table of sinusoids: (1, rows, hidden), or with config bi_data one per sequence."""
        config = self.config
        distances = torch.arange(past + seqlen, -seqlen, -1, device=self.device)
        if config.clamp_len > 0:
            distances = distances.clamp(-config.clamp_len, config.clamp_len)
        table = sinusoids(distances, config.hidden_size)[None]
        if not config.bi_data:
            return table
        if batch % 2:
            raise ValueError(
                f"input_ids: expected an even number of sequences with config bi_data, got {batch}"
            )
        # The second half of the batch is read from its end
        other = sinusoids(-distances, config.hidden_size)[None]
        return torch.cat([table.expand(batch // 2, -1, -1), other.expand(batch // 2, -1, -1)])


def kept_mask(attention_mask: Tensor | None, input_mask: Tensor | None) -> Tensor | None:
    """The attention mask that either of the two is.

    Raises:
        TypeError, ValueError: both are given, or `input_mask` is no tensor.
    """
    if input_mask is None:
        return attention_mask
    check_tensor("input_mask", input_mask)
    if attention_mask is not None:
        raise ValueError("input_mask: expected None beside attention_mask, whose opposite it is")
    return input_mask == 0


_OUTPUTS: dict[Any, Any] = {LogitsOutput: XLNetLogitsOutput, QuestionAnsweringOutput: XLNetSpanOutput}


class _WithMemories(TaskModel):
    """A head whose output has the memories."""

    def _output(
        self, output_class: Any, values: tuple[Any, ...], encoded: Encoded, return_dict: bool | None
    ) -> Any:
        output = _OUTPUTS.get(output_class, output_class)
        return self.as_output(
            output(*values, encoded.mems, encoded.hidden_states, encoded.attentions), return_dict
        )


class XLNetLMHeadModel(_WithMemories, BertForMaskedLM):
    """Predicts tokens: those of `target_mapping`, labels (batch, predictions); without it as
    `BertForMaskedLM`, from a content stream that sees the tokens themselves."""

    model_type = "xlnet"
    task = "LMHeadModel"


class XLNetForSequenceClassification(_WithMemories, BertForSequenceClassification):
    """See `BertForSequenceClassification`. The last kept token is read, or what config summary_type says."""

    model_type = "xlnet"


class XLNetForMultipleChoice(_WithMemories, BertForMultipleChoice):
    """See `BertForMultipleChoice`, and `XLNetForSequenceClassification`."""

    model_type = "xlnet"

    def encode(self, *given: Any, input_mask: Tensor | None = None, **more: Any) -> Encoded:
        """See `TaskModel`; input_mask is (batch, choices, seqlen)."""
        if input_mask is not None:
            more["input_mask"] = input_mask.flatten(0, 1)
        return super().encode(*given, **more)


class XLNetForTokenClassification(_WithMemories, BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "xlnet"


class XLNetForQuestionAnsweringSimple(_WithMemories, BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "xlnet"
    task = "ForQuestionAnsweringSimple"


class XLNetForQuestionAnswering(_WithMemories):
    """Finds the spans that answer a question, and whether there is an answer; the ends depend on the start.

    In training, with start_positions and end_positions (batch,), only the loss is returned: the mean of both
    cross-entropies, the ends scored for the right start; with cls_index and is_impossible (batch,) plus half
    the binary cross-entropy of having no answer. Otherwise the best starts and the best ends of each.

    Source: Yang et al. 2019, "XLNet", sec. 3.3; its code for SQuAD.
    """

    model_type = "xlnet"
    task = "ForQuestionAnswering"

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

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
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
    ) -> XLNetForQuestionAnsweringOutput | tuple[Any, ...]:
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
            return self._output(XLNetForQuestionAnsweringOutput, (loss, *[None] * 5), encoded, return_dict)
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
        return self._output(XLNetForQuestionAnsweringOutput, values, encoded, return_dict)

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
