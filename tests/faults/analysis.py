"""Faults of analysis: taps, identities, who is looked at, ablation, importance, resamples."""

from tests.support.mutation import Fault, Suite, table

_TAPS = "fastbert/layers/encoder.py"
_IDENTITIES = "fastbert/analysis/identities.py"
_ATTENTION = "fastbert/analysis/attention.py"
_HEADS = "fastbert/analysis/heads.py"
_EXAMPLES = "fastbert/analysis/examples.py"
_MEASURES = "fastbert/analysis/measures.py"
_FIXED = "fastbert/analysis/fixed.py"
_ANNOTATIONS = "fastbert/analysis/annotations.py"
_INTERVALS = "fastbert/analysis/intervals.py"
_WALK = "fastbert/analysis/walk.py"
_TREEBANK = "fastbert/analysis/treebank.py"
_SYNTAX = "fastbert/analysis/syntax.py"
_STARTS = "fastbert/analysis/starts.py"
_LINKS = "fastbert/analysis/links.py"


def _fault(name: str, file: str, old: str, new: str) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    _fault(
        "layers are numbered from 1",
        _TAPS,
        "return (site - 1) // self.SITES",
        "return site // self.SITES + 1",
    ),
    _fault(
        "a tapped layer runs as one call",
        "fastbert/layers/fused.py",
        "            or sequences.taps is not None\n",
        "",
    ),
    _fault(
        "the tap's bias is lost",
        _TAPS,
        "            bias=bias,\n            gate=gate,\n            dropout_p=self",
        "            bias=sequences.bias,\n            gate=gate,\n            dropout_p=self",
    ),
    _fault(
        "the inner tap's result is lost",
        "fastbert/layers/linear.py",
        "        inner = tap(inner)\n",
        "        tap(inner)\n",
    ),
    _fault(
        "tapped rows are skipped",
        "fastbert/models/encoder.py",
        "(want_attentions or want_states or taps is not None or around)",
        "(want_attentions or want_states or around)",
    ),
    _fault(
        "taps stay set",
        "fastbert/models/encoder.py",
        '        put(encoder, "taps", before)\n',
        "        pass\n",
    ),
    _fault(
        "a graph is replayed under taps",
        "fastbert/graphs/calls.py",
        "    if model.taps is not None:\n",
        "    if False:\n",
    ),
    _fault(
        "twice the scale without twice the bias",
        _IDENTITIES,
        "bias=None if self.bias is None else 2 * self.bias",
        "bias=self.bias",
    ),
    _fault(
        "entropy without the scale",
        _IDENTITIES,
        "return (lse - self.scale * (self.q * keys).sum(-1))",
        "return (lse - (self.q * keys).sum(-1))",
    ),
    _fault(
        "offsets by one",
        _IDENTITIES,
        "(self.q[rows] * self.k[keys]).sum(-1)",
        "(self.q[rows] * self.k[keys].roll(1, 0)).sum(-1)",
    ),
    _fault(
        "an offset into the next sequence",
        _IDENTITIES,
        "torch.where(alike, (scores - self.lse[rows]).exp(), 0.0)",
        "(scores - self.lse[rows]).exp()",
    ),
    _fault(
        "columns for rows",
        _IDENTITIES,
        "        found = []\n        for part in weights.to(self.q.dtype)",
        "        return self.of_values(weights)\n        for part in weights.to(self.q.dtype)",
    ),
    _fault(
        "overlap of one model's scale",
        _IDENTITIES,
        "other.q * other.scale], -1)",
        "other.q * self.scale], -1)",
    ),
    _fault(
        "divergence the other way",
        _IDENTITIES,
        "        others = self.of_values(other.k)\n",
        "        others = other._keys_and_lse[0]\n",
    ),
    _fault(
        "uniform heads know positions",
        _IDENTITIES,
        "bias = torch.where(bias == -math.inf, bias, 0.0)",
        "bias = bias",
    ),
    _fault(
        "the separator is a word",
        _EXAMPLES,
        "kinds[i] = FIRST if i == 0 and encoding.ids[i] == first else SEPARATOR",
        "kinds[i] = FIRST if i == 0 and encoding.ids[i] == first else WORD",
    ),
    _fault("every text is the first", _EXAMPLES, "segment, base = sequence, last + 1", "base = last + 1"),
    _fault(
        "masks depend on the place in the file",
        _EXAMPLES,
        "draw = np.random.default_rng((seed, number))",
        "draw = np.random.default_rng(seed)",
    ),
    _fault(
        "a special token is masked",
        _EXAMPLES,
        "usual = start + np.flatnonzero(examples.words[start:end] >= 0)",
        "usual = np.arange(start, end)",
    ),
    _fault(
        "own text is the other one",
        _ATTENTION,
        "torch.where(self.second[:, None], to_second, 1 - to_second)",
        "torch.where(self.second[:, None], 1 - to_second, to_second)",
    ),
    _fault(
        "the excess of nothing", _ATTENTION, "np.divide(share - of_uniform, room,", "np.divide(share, room,"
    ),
    _fault("statistics keep panels", _ATTENTION, "at_rest(model), passing_panels(), ", "at_rest(model), "),
    _fault("the mean row for the largest column", _ATTENTION, '"amax")', '"mean")'),
    _fault(
        "both is never asked first",
        _ATTENTION,
        "conditions = [both, v >= thresholds.vertical,",
        "conditions = [v > 9, v >= thresholds.vertical,",
    ),
    _fault(
        "the head before",
        _HEADS,
        '"head": heads == torch.from_numpy(some).to(heads)[:, None]',
        '"head": heads + 1 == torch.from_numpy(some).to(heads)[:, None]',
    ),
    _fault("all but one is one", _HEADS, '"all-but-one": heads != ', '"all-but-one": heads == '),
    _fault(
        "variants start a layer too late",
        _HEADS,
        "for i in range(layer + 1, len(layers)):",
        "for i in range(layer + 2, len(layers)):",
    ),
    _fault(
        "the sequences of a variant run into the next",
        _HEADS,
        "ends = torch.cat([ends[:1], (ends[1:] + steps).flatten()])",
        "ends = torch.cat([ends[:1], (ends[1:] + steps - 1).flatten()])",
    ),
    _fault(
        "absolute value of the batch",
        _HEADS,
        "return context * factors[self.case][:, :, None]",
        "return context * factors.mean(0)[None, :, None]",
    ),
    _fault(
        "the absolute value of the mean",
        _HEADS,
        "found = np.abs(self.derivatives).mean(0)",
        "found = np.abs(self.derivatives.mean(0))",
    ),
    _fault(
        "the most important heads go first",
        _HEADS,
        "return np.argsort(self.values(normalized=normalized).ravel(), kind=",
        "return np.argsort(-self.values(normalized=normalized).ravel(), kind=",
    ),
    _fault(
        "one head more goes",
        _HEADS,
        "gates[torch.from_numpy(order[:count].astype(np.int64))] = 0",
        "gates[torch.from_numpy(order[: count + 1].astype(np.int64))] = 0",
    ),
    _fault(
        "the point after the drop",
        _HEADS,
        "return int(self.removed[max(first - 1, 0)])",
        "return int(self.removed[min(first, len(self.removed) - 1)])",
    ),
    _fault(
        "a sum for the mean of tokens",
        _MEASURES,
        "values.new_zeros(inputs.packing.batch).index_add(0, sequence, values) / count",
        "values.new_zeros(inputs.packing.batch).index_add(0, sequence, values)",
    ),
    _fault(
        "labels of the batch's order",
        _MEASURES,
        "firsts = batch.numbers[:: self.per_case]",
        "firsts = np.arange(0, len(batch), self.per_case)",
    ),
    _fault(
        "pad tokens compete for the answer",
        _MEASURES,
        "scores.masked_fill(~kept[..., None], -torch.inf)",
        "scores * 1.0",
    ),
    _fault(
        "one end of an answer is enough",
        _MEASURES,
        "(scores.argmax(-1) == labels).all(1)",
        "(scores.argmax(-1) == labels).any(1)",
    ),
    _fault("the sum of both ends", _MEASURES, "return loss.mean(1), ", "return loss.sum(1), "),
    _fault(
        "vectors of the first texts and of the second",
        _MEASURES,
        "vectors.unflatten(0, (-1, 2)).unbind(1)",
        "vectors.unflatten(0, (2, -1)).unbind(0)",
    ),
    _fault("pairs are parted", _MEASURES, "batch_tokens, self.per_case):", "batch_tokens):"),
    _fault(
        "a factor per text of a pair",
        _HEADS,
        "taps = _Factors(batch, measure.per_case)",
        "taps = _Factors(batch, 1)",
    ),
    _fault(
        "means of every pooling",
        _MEASURES,
        "pool(hidden, inputs.packing.cu_seqlens, self.pooling)",
        'pool(hidden, inputs.packing.cu_seqlens, "mean")',
    ),
    _fault(
        "a rating is left out",
        _MEASURES,
        "(cosine - labels.to(cosine.dtype)).square()",
        "(cosine - 1).square()",
    ),
    _fault(
        "a pair in another order",
        _WALK,
        "(groups[:, None] * in_a_row + np.arange(in_a_row)).ravel()",
        "(groups[:, None] * in_a_row + np.arange(in_a_row)).ravel()[::-1].copy()",
    ),
    _fault(
        "an answer in the question",
        _EXAMPLES,
        "owner = int(pairs is not None)",
        "owner = 0",
    ),
    _fault(
        "an answer's last token is left out",
        _EXAMPLES,
        "if offsets[i][0] < end and offsets[i][1] > start]",
        "if offsets[i][0] < end - 1 and offsets[i][1] > start]",
    ),
    _fault(
        "half an answer",
        _EXAMPLES,
        "or offsets[places[-1]][1] < end):",
        "or offsets[places[-1]][1] < start):",
    ),
    _fault(
        "pairs side by side",
        _EXAMPLES,
        "both = [text for pair in zip(texts, pairs, strict=True) for text in pair]",
        "both = [*texts, *pairs]",
    ),
    _fault(
        "values of the layer before",
        _FIXED,
        "        self._values = v\n        return q",
        "        self._values = self._values if layer else v\n        return q",
    ),
    _fault(
        "a causal model looks ahead",
        _FIXED,
        "if sequences.causal and ahead:",
        "if sequences.causal and False:",
    ),
    _fault(
        "previous for current",
        _FIXED,
        "np.array([CURRENT, PREVIOUS, NEXT])",
        "np.array([PREVIOUS, CURRENT, NEXT])",
    ),
    _fault(
        "any vertical head gets a pattern",
        _FIXED,
        "(classes == VERTICAL) & (special.max(0) >= thresholds.vertical)",
        "classes == VERTICAL",
    ),
    _fault(
        "heads at 0 are the others",
        _FIXED,
        "from_numpy(assignment == LEARNED)",
        "from_numpy(assignment != LEARNED)",
    ),
    _fault(
        "folds that have seen their maps",
        _ANNOTATIONS,
        "_regression(features[rows], patterns[rows])",
        "_regression(features, patterns)",
    ),
    _fault(
        "of two classes the other one",
        _ANNOTATIONS,
        "(np.concatenate([np.zeros_like(t), t]) for t in (weights, bias))",
        "(np.concatenate([t, np.zeros_like(t)]) for t in (weights, bias))",
    ),
    _fault(
        "weights of the scaled features",
        _ANNOTATIONS,
        "weights = found.coef_ / scale",
        "weights = found.coef_",
    ),
    _fault(
        "classes by their places",
        _ANNOTATIONS,
        "self.classes[scores.argmax(-1)].astype(np.int8)",
        "scores.argmax(-1).astype(np.int8)",
    ),
    _fault("the first fold is full", _ANNOTATIONS, "if counts.min() < folds:", "if counts.max() < folds:"),
    _fault(
        "a head is named twice",
        _ANNOTATIONS,
        "if first != where:",
        "if first > where:",
    ),
    _fault(
        "resamples without replacement",
        _INTERVALS,
        "counts = draw.multinomial(n, np.full(n, 1 / n), size=resamples)",
        "counts = np.ones((resamples, n))",
    ),
    _fault(
        "a one-sided p",
        _INTERVALS,
        "np.clip(2 * against, 1 / resamples, 1.0)",
        "np.clip(against, 1 / resamples, 1.0)",
    ),
    _fault(
        "means by the batch's largest length",
        _WALK,
        "return self.sums(values) / self.lengths.view(",
        "return self.sums(values) / self.lengths.max().expand_as(self.lengths).view(",
    ),
    _fault(
        "the model stays in eval mode", _WALK, "            module.training = mode\n", "            pass\n"
    ),
    _fault(
        "the bias of other sequences",
        _IDENTITIES,
        "bias = bias[first:last] if bias.shape[0] > 1 else bias",
        "bias = bias[: last - first] if bias.shape[0] > 1 else bias",
    ),
    _fault(
        "maps of one sequence too many",
        _IDENTITIES,
        "if (last + 1 - first) * longer**2 * cell",
        "if (last - first) * longer**2 * cell",
    ),
    _fault(
        "a circle of heads is a tree",
        _TREEBANK,
        "circle = np.flatnonzero(above[1:])",
        "circle = np.flatnonzero(above[1:] < 0)",
    ),
    _fault(
        "circles are looked for in few steps",
        _TREEBANK,
        "for _ in range(count.bit_length()):",
        "for _ in range(2):",
    ),
    _fault("an empty node is a word", _TREEBANK, "[0-9]+[-.][0-9]+", "[0-9]+-[0-9]+"),
    _fault(
        "a byte-level word without its space",
        _TREEBANK,
        'return step.get("type") == "ByteLevel" or',
        'return step.get("type") == "None" or',
    ),
    _fault(
        "words of one number in neighbours are one",
        _TREEBANK,
        "(words[1:] != words[:-1]) | (example[1:] != example[:-1])",
        "words[1:] != words[:-1]",
    ),
    _fault(
        "a word ends at its last token",
        _TREEBANK,
        "return rows[first], rows[last] + 1",
        "return rows[first], rows[last]",
    ),
    _fault(
        "subtypes of a relation are others",
        _SYNTAX,
        'kind = relation.split(":")[0]',
        "kind = relation",
    ),
    _fault(
        "a word's own attention is received",
        _SYNTAX,
        "own = probabilities.at_offset(0) * self.of_rows",
        "own = 0.0",
    ),
    _fault(
        "the mean for the largest score",
        _SYNTAX,
        'some, "amax")',
        'some, "mean", include_self=False)',
    ),
    _fault(
        "examples without the label count",
        _SYNTAX,
        "return (self.share > 0).sum(1)",
        "return (self.share >= 0).sum(1)",
    ),
    _fault(
        "attention from tokens is summed, to them averaged",
        _SYNTAX,
        "clamp_min(1)[:, None, :, None]",
        "clamp_min(1)[:, None, None, :]",
    ),
    _fault(
        "a sum for the mean of a word's rows",
        _SYNTAX,
        "return sums / pieces.sum(1)",
        "return sums / pieces.sum(1).clamp_max(1)",
    ),
    _fault(
        "special tokens are of the last word",
        _SYNTAX,
        "rows = (inside & (self.words >= 0)).nonzero()[:, 0]",
        "rows = inside.nonzero()[:, 0]",
    ),
    _fault(
        "a word may be its own head",
        _SYNTAX,
        " | (place[:, None] == place)\n",
        "\n",
    ),
    _fault("the directions are changed over", _SYNTAX, "for axis in (-1, -2)]", "for axis in (-2, -1)]"),
    _fault(
        "the offset is off by one",
        _SYNTAX,
        "offset=heads[arcs] - 1 - word[arcs]",
        "offset=heads[arcs] - word[arcs]",
    ),
    _fault(
        "the sentences are the batch's",
        _SYNTAX,
        "counts[batch.numbers], dependants",
        "counts[: len(batch)], dependants",
    ),
    _fault(
        "heads are chosen where they are scored",
        _SYNTAX,
        "accuracy = self.right[first].mean(0)",
        "accuracy = self.right[second].mean(0)",
    ),
    _fault(
        "the offset is chosen where it is scored",
        _SYNTAX,
        "np.unique(self.offset[first], return_counts=True)",
        "np.unique(self.offset[second], return_counts=True)",
    ),
    _fault(
        "the interval is of the half that chooses",
        _SYNTAX,
        "self.chooses(seed)\n        chooses, scored = half[self.sentence], np.flatnonzero(~half)",
        "self.chooses(seed)\n        chooses, scored = half[self.sentence], np.flatnonzero(half)",
    ),
    _fault(
        "the frozen start learns all",
        _STARTS,
        "requires_grad_(pooler is not None and name.startswith(pooler))",
        "requires_grad_(True)",
    ),
    _fault("random weights are the model's", _STARTS, "if number != RANDOM:", "if True:"),
    _fault("the model's own head goes on", _STARTS, "model.state_dict() | head", "model.state_dict()"),
    _fault(
        "no start has the model's weights", _STARTS, "model.state_dict() | head", "head | fresh.state_dict()"
    ),
    _fault(
        "scored on what it has learned from", _STARTS, "Measure.of(one, held_out)", "Measure.of(one, known)"
    ),
    _fault(
        "the baseline knows what is held out",
        _STARTS,
        "np.unique(known, return_counts=True)",
        "np.unique(held_out, return_counts=True)",
    ),
    _fault("a cut batch is a step", _STARTS, "micro_batches=parts", "micro_batches=1"),
    _fault(
        "an epoch less", _STARTS, "-(-recipe.epochs * count // size)", "-(-recipe.epochs * count // size) - 1"
    ),
    _fault("no warm-up", _STARTS, "warmup=0.1 if steps > 1 else 0", "warmup=0"),
    _fault("a lone step with a rate of 0", _STARTS, "warmup=0.1 if steps > 1 else 0", "warmup=0.1"),
    _fault(
        "labels of other examples",
        _STARTS,
        "self.examples.labels[numbers],",
        "self.examples.labels[: len(numbers)],",
    ),
    _fault(
        "the caller's random numbers are spent",
        _STARTS,
        "torch.random.fork_rng(devices=devices)",
        "__import__('contextlib').nullcontext()",
    ),
    _fault(
        "the start stays in training mode", _STARTS, "    model.eval()\n    return steps", "    return steps"
    ),
    _fault(
        "links in one direction",
        _LINKS,
        "found.setdefault(int(example), []).extend(both)",
        "found.setdefault(int(example), []).append(both[0])",
    ),
    _fault("a token is its own link", _LINKS, "one, other = one[one != other], other[one != other]", "pass"),
    _fault("the mean link", _LINKS, 'values, "amax")', 'values, "mean")'),
    _fault(
        "links move out of the text",
        _LINKS,
        "examples.words[start:end] >= 0",
        "examples.words[start:end] >= -1",
    ),
    _fault(
        "links that do not move",
        _LINKS,
        "for shift in range(low, high + 1) if shift]",
        "for shift in range(low, high + 1)]",
    ),
    _fault(
        "scored where it was chosen",
        _LINKS,
        "np.sort(order[(n + 1) // 2 :])",
        "np.sort(order[: (n + 1) // 2])",
    ),
    _fault(
        "a pair without its bias",
        _IDENTITIES,
        "position[rows], position[keys])",
        "position[rows], position[rows])",
    ),
    _fault(
        "a causal pair looks ahead",
        _IDENTITIES,
        "torch.where((keys > rows)[:, None], 0.0, found) if self.causal else found",
        "found",
    ),
)

FAULTS += table(
    "fastbert/analysis",
    """
measures | ends, at, right=True) - 1 | ends, at) - 1
measures | (logits > 0) == | (logits > 0.5) ==
measures | (logits - labels).square().mean(-1) | (logits - labels).square().sum(-1)
attention | ** 2) / lengths**2) | ** 2) / lengths)
effective | * eps * sigma[:, :1] | * eps
heads | bias.repeat(count, 1, 1, 1) | bias.repeat_interleave(count, 0)
identities | where((keys > rows) | where((keys >= rows)
""",
)

SUITE = Suite(FAULTS, tests=("tests/layers/test_taps.py", "tests/graphs/test_fallbacks.py", "tests/analysis"))
