"""Faults of left-to-right, word-order, permutation and staged objectives."""

from tests.support.mutation import Fault, Suite

_LEFT = "fastbert/pretraining/objectives/left_to_right.py"
_MASKED = "fastbert/pretraining/objectives/masked.py"
_ORDER = "fastbert/pretraining/objectives/word_order.py"
_PERMUTATION = "fastbert/pretraining/objectives/permutation.py"
_STAGES = "fastbert/pretraining/objectives/entities.py"

FAULTS = (
    Fault("a token tells itself", _LEFT, "labels[:-1] = ids[1:]", "labels[:-1] = ids[:-1]"),
    Fault(
        "attention in both directions",
        _LEFT,
        "causal: ClassVar[bool] = True",
        "causal: ClassVar[bool] = False",
    ),
    Fault(
        "causal in training alone",
        _LEFT,
        "model.config.is_decoder = True",
        "model.config.is_decoder = before",
    ),
    Fault("a new model is no decoder", _LEFT, ".to_dict(), is_decoder=True)", ".to_dict())"),
    Fault("pairs accepted", _LEFT, "        if self.format.num_labels:", "        if False:"),
    Fault(
        "a refused model stays a decoder",
        _LEFT,
        "            model.config.is_decoder = before\n            raise",
        "            raise",
    ),
    Fault("the losses are not causal", _MASKED, "*lengths, causal)", "*lengths, False)"),
    Fault("work of both directions", _MASKED, ".sum() / 2 if self.causal else None", ".sum() / 1"),
    Fault(
        "the hash leaves out what an objective adds",
        _MASKED,
        "for f in fields(self) if f.name not in told",
        'for f in fields(self) if f.name in ("seed", "static")',
    ),
    Fault("the first rows counted alone", _MASKED, "torch.stack(right).sum()", "right[0]"),
    Fault("trigrams overlap", _ORDER, "if not taken[begin : begin + SIZE].any():", "if True:"),
    Fault("masked tokens shuffled", _ORDER, " & (masked.labels == IGNORED)", ""),
    Fault("special tokens shuffled", _ORDER, "~np.isin(ids, self.vocabulary.special) & ", "(ids >= 0) & "),
    Fault(
        "always the same order",
        _ORDER,
        "np.take_along_axis(places, shuffled, axis=1)",
        "np.roll(places, 1, axis=1)",
    ),
    Fault(
        "the label is shuffled too",
        _ORDER,
        "labels[places] = masked.ids[places]",
        "labels[places] = masked.ids[places[:, ::-1]]",
    ),
    Fault(
        "a share of all tokens", _ORDER, "self.shuffled_share * len(starts)", "self.shuffled_share * len(ids)"
    ),
    Fault(
        "no trigram of a short sequence",
        _ORDER,
        "max(1, round(self.shuffled_share * len(starts)))",
        "round(self.shuffled_share * len(starts))",
    ),
    Fault("the first trigrams", _ORDER, "starts[draws.shuffled(len(starts))].tolist()", "starts.tolist()"),
    Fault(
        "half the weight of the order",
        _ORDER,
        'losses["order"] = self.model.lm_loss(*labelled)',
        'losses["order"] = self.model.lm_loss(*labelled) / 2',
    ),
    Fault(
        "masked tokens told twice",
        _ORDER,
        'inputs["order_labels"], inputs["order_labelled"]',
        'inputs["labels"], inputs["labelled"]',
    ),
    Fault(
        "the count of the masked tokens",
        _ORDER,
        'batch.counts["order"] = count',
        'batch.counts["order"] = batch.counts["mlm"]',
    ),
    Fault("work without the order", _ORDER, 'batch.counts["order"], config', "0, config"),
    Fault(
        "a query sees its target",
        _PERMUTATION,
        "np.concatenate([ranks, order])",
        "np.concatenate([ranks, order + 1])",
    ),
    Fault(
        "a target does not see itself",
        _PERMUTATION,
        "np.concatenate([ranks, order])",
        "np.concatenate([np.maximum(ranks - 1, 0), order])",
    ),
    Fault(
        "context sees targets",
        _PERMUTATION,
        "np.concatenate([ranks, order])",
        "np.concatenate([np.where(ranks > 0, ranks, len(targets)), order])",
    ),
    Fault("queries are seen", _PERMUTATION, "np.full(len(targets), _QUERY)", "1 + order"),
    Fault(
        "queries have places of their own",
        _PERMUTATION,
        "np.concatenate([np.arange(length), targets])",
        "np.arange(length + len(targets))",
    ),
    Fault(
        "targets from left to right", _PERMUTATION, "draws.shuffled(len(targets))", "np.arange(len(targets))"
    ),
    Fault(
        "spans of one length",
        _PERMUTATION,
        "1 + draws.below(self.max_span, count // self.k + 1)",
        "np.full(count // self.k + 1, self.max_span)",
    ),
    Fault(
        "no span at a piece's end",
        _PERMUTATION,
        "draws.below(pieces - sizes + 1, whole + 1)",
        "draws.below(np.maximum(pieces - sizes, 1), whole + 1)",
    ),
    Fault("the rest rounded down", _PERMUTATION, "(2 * rest + self.k) // (2 * self.k)", "rest // self.k"),
    Fault(
        "no target in a short sequence",
        _PERMUTATION,
        "max(last, 1) if whole == 0 and count else last",
        "last",
    ),
    Fault(
        "special tokens predicted",
        _PERMUTATION,
        "np.flatnonzero(~np.isin(ids, self.vocabulary.special))",
        "np.arange(len(ids))",
    ),
    Fault(
        "all queries of the first segment",
        _PERMUTATION,
        "np.asarray(example.token_types)[rows.places]",
        "np.append(example.token_types, np.zeros(len(targets), np.int64))",
    ),
    Fault(
        "query rows show the target",
        _PERMUTATION,
        "np.append(ids, np.full(len(targets), self.vocabulary.mask))",
        "np.append(ids, ids[targets])",
    ),
    Fault("RoBERTa's positions from 0 on", _PERMUTATION, "config.pad_token_id + 1 if config", "0 if config"),
    Fault(
        "lengths of all rows",
        _PERMUTATION,
        "return Batch(batch.inputs, batch.counts, content)",
        "return batch",
    ),
    Fault(
        "work of the content alone",
        _PERMUTATION,
        "int(batch.lengths.sum()) + targets",
        "int(batch.lengths.sum())",
    ),
    Fault(
        "relative positions accepted", _PERMUTATION, "if model.family.relative_bias is not None:", "if False:"
    ),
    Fault("the first stage for ever", _STAGES, "if first <= epoch", "if first <= 0"),
    Fault(
        "the stage of the draws",
        _STAGES,
        "self.stage(epoch).example(",
        "self.stage(self._epoch(epoch)).example(",
    ),
    Fault("the seed dropped", _STAGES, "rule, self.seed, self.static", "rule, 0, self.static"),
    Fault("two stages of one epoch", _STAGES, "any(a >= b for", "any(a > b for"),
    Fault("a unit beside the stages", _STAGES, "if self.masking.unit != Masking.unit:", "if False:"),
    Fault(
        "a bad stage is found hours later",
        _STAGES,
        "            replace(self.masking, unit=unit)  #",
        "            pass  #",
    ),
)

_TESTS = ("left_to_right", "word_order", "permutation", "entities")
SUITE = Suite(FAULTS, tests=(*(f"tests/pretraining/test_{name}.py" for name in _TESTS), "-k", "not learn"))
