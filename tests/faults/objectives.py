"""Faults of the objectives: replaced tokens and span boundaries."""

from tests.support.mutation import Fault, Suite

_REPLACED = "fastbert/pretraining/objectives/replaced_tokens.py"
_SPAN = "fastbert/pretraining/objectives/span_boundary.py"

FAULTS = (
    Fault(
        "the embedding blocks are two",
        _REPLACED,
        "        self.generator.base_model.embeddings = model.base_model.embeddings\n",
        "",
    ),
    Fault(
        "only the word embeddings are one",
        _REPLACED,
        "self.generator.base_model.embeddings = model.base_model.embeddings",
        "self.generator.base_model.embeddings.word_embeddings = model.base_model.embeddings.word_embeddings",
    ),
    Fault("the decoder keeps its first weight", _REPLACED, "        self.generator.tie_weights()\n", ""),
    Fault(
        "the likeliest token instead of a draw",
        _REPLACED,
        "tokens.append(drawn(logits))",
        "tokens.append(logits.argmax(-1))",
    ),
    Fault(
        "noise of another sign",
        _REPLACED,
        "torch.sub(logits, noise, out=noise)",
        "torch.add(logits, noise, out=noise)",
    ),
    Fault("noise that is no Gumbel's", _REPLACED, ".exponential_().log_()", ".uniform_().log_()"),
    Fault(
        "one noise for all rows",
        _REPLACED,
        "torch.empty_like(logits, dtype=checks.compute_dtype(logits)).exponential_().log_()",
        "torch.empty_like(logits[:1]).exponential_().log_().expand_as(logits).clone()",
    ),
    Fault(
        "noise in the logits' own dtype",
        _REPLACED,
        "dtype=checks.compute_dtype(logits)",
        "dtype=logits.dtype",
    ),
    Fault(
        "every predicted token counts as replaced",
        _REPLACED,
        "replaced = predicted & (filled != labels)",
        "replaced = predicted",
    ),
    Fault(
        "tokens that are not predicted count as replaced",
        _REPLACED,
        "replaced = predicted & (filled != labels)",
        "replaced = filled != labels",
    ),
    Fault(
        "the label compares with the masked text",
        _REPLACED,
        "predicted & (filled != labels)",
        'predicted & (filled != inputs["input_ids"])',
    ),
    Fault(
        "the discriminator reads the masked text",
        _REPLACED,
        '{**inputs, "input_ids": filled}',
        "inputs",
    ),
    Fault("weight 1", _REPLACED, 'self.weights = {"rtd": weight}', "self.weights = {}"),
    Fault(
        "the generator is not exported",
        _REPLACED,
        '{"model": self.model, "generator": self.generator}',
        '{"model": self.model}',
    ),
    Fault("all logits at a time", _REPLACED, "rows = max(1, budget //", "rows = max(1 << 30, budget //"),
    Fault(
        "a head's size shrinks with the width",
        _REPLACED,
        "heads = max(1, hidden // config.head_dim)",
        "heads = config.num_attention_heads",
    ),
    Fault(
        "the generator's embeddings are as wide as itself",
        _REPLACED,
        "embedding_size=config.embedding_width",
        "embedding_size=hidden",
    ),
    Fault(
        "the intermediate size stays",
        _REPLACED,
        "round(config.intermediate_size * share)",
        "config.intermediate_size",
    ),
    Fault("any width passes", _REPLACED, "hidden % config.head_dim)", "False)"),
    Fault(
        "a mean over the predicted tokens", _REPLACED, '"rtd": int(batch.lengths.sum())', '"rtd": predicted'
    ),
    Fault("random tokens for the generator", _REPLACED, "random_share=0.0", "random_share=0.1"),
    Fault("80% masks", _REPLACED, "mask_share=0.85", "mask_share=0.8"),
    Fault("a pair's class is forgotten", _REPLACED, "if self.format.num_labels:", "if False:"),
    Fault(
        "the accuracy counts what is wrong",
        _REPLACED,
        "((logits > 0) == replaced)",
        "((logits < 0) == replaced)",
    ),
    Fault("the projections are not counted", _REPLACED, "if width != hidden else 0.0", "if False else 0.0"),
    Fault("the left neighbour is within the span", _SPAN, "return begins[span] - 1,", "return begins[span],"),
    Fault(
        "the right neighbour is within the span",
        _SPAN,
        "ends[span], place, begins",
        "ends[span] - 1, place, begins",
    ),
    Fault("places count from 1", _SPAN, "place, begins[span] + place", "place + 1, begins[span] + place"),
    Fault(
        "spans that touch are two",
        _SPAN,
        "        left, right, place, rows = boundaries(labels != IGNORED, self.max_targets)\n",
        "        units = [e.masked.spans + s for e, s in zip(examples, ends - batch.lengths)]\n"
        "        units = np.concatenate(units).astype(np.int64)\n"
        "        sizes = np.minimum(units[:, 1] - units[:, 0], self.max_targets)\n"
        "        span = np.repeat(np.arange(len(sizes)), sizes)\n"
        "        place = np.arange(len(span)) - (np.cumsum(sizes) - sizes)[span]\n"
        "        left, right = units[span, 0] - 1, units[span, 1]\n"
        "        rows = left + 1 + place\n",
    ),
    Fault(
        "a longer span's targets pass the table",
        _SPAN,
        "np.minimum(ends - begins, max_targets)",
        "ends - begins",
    ),
    Fault("targets of the wrong rows", _SPAN, "labels[rows]", "np.roll(labels[rows], 1)"),
    Fault(
        "a neighbour may be missing", _SPAN, "np.concatenate([ends - batch.lengths, ends - 1])", "ends - 1"
    ),
    Fault(
        "left and right change places",
        _SPAN,
        "F.embedding(left, hidden), F.embedding(right, hidden)",
        "F.embedding(right, hidden), F.embedding(left, hidden)",
    ),
    Fault("no place", _SPAN, "self.places(place).to", "(0 * self.places(place)).to"),
    Fault(
        "tanh's GELU",
        _SPAN,
        'apply_linear(self.second, apply_norm(self.first_norm, x), "gelu")',
        'apply_linear(self.second, apply_norm(self.first_norm, x), "gelu_tanh")',
    ),
    Fault("no norm between the layers", _SPAN, "apply_norm(self.first_norm, x)", "x"),
    Fault(
        "the decoder's bias is the masked LM's",
        _SPAN,
        "linear_cross_entropy(x, words, self.boundary.bias,",
        "linear_cross_entropy(x, words, self.model.get_output_embeddings().bias,",
    ),
    Fault(
        "the decoder is not trained by it",
        _SPAN,
        "self.model.get_input_embeddings().weight",
        "self.model.get_input_embeddings().weight.detach()",
    ),
    Fault("the table keeps PyTorch's first values", _SPAN, "        model.init_weights(self.boundary)\n", ""),
    Fault(
        "all vectors are of the left neighbour",
        _SPAN,
        "F.embedding(right, hidden)",
        "F.embedding(left, hidden)",
    ),
    Fault(
        "the hash forgets the targets",
        "fastbert/pretraining/objectives/masked.py",
        '("format", "masking", *self.of_model)',
        '("format", "masking", "max_targets", *self.of_model)',
    ),
    Fault("token masks instead of spans", _SPAN, 'Masking("span")', "Masking()"),
    Fault(
        "the first layer is not counted",
        _SPAN,
        "linear_work(targets, 2 * hidden + PLACE_WIDTH, hidden)",
        "linear_work(targets, hidden, hidden)",
    ),
)

SUITE = Suite(
    FAULTS,
    tests=(
        "tests/pretraining/test_replaced_tokens.py",
        "tests/pretraining/test_span_boundary.py",
        "-k",
        "not learns",
    ),
)
