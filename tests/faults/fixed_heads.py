"""Faults of fixed attention patterns, and of models whose heads attend by them."""

from tests.support.mutation import Fault, Suite

_PATTERNS = "fastbert/layers/patterns.py"
_LAYER = "fastbert/layers/encoder.py"
_MODEL = "fastbert/models/fixed_heads.py"
_BERT = "fastbert/models/bert.py"
_CONFIG = "fastbert/models/config.py"
_CHECKS = "fastbert/models/config_checks.py"

FAULTS = (
    Fault(
        "the previous token is another sequence's",
        _PATTERNS,
        "torch.maximum(rows.number - 1, rows.first)",
        "(rows.number - 1).clamp_min(0)",
    ),
    Fault(
        "the next token is another sequence's",
        _PATTERNS,
        "torch.minimum(rows.number + 1, rows.last)",
        "(rows.number + 1).clamp_max(len(v) - 1)",
    ),
    Fault("left context with the previous token", _PATTERNS, "rows.position - 2)", "rows.position - 1)"),
    Fault("weights of squares", _PATTERNS, "_column(place**3, v)", "_column(place**2, v)"),
    Fault(
        "running means of the whole batch",
        _PATTERNS,
        "weighted.cumsum(1)",
        "weighted.flatten(0, 1).cumsum(0).view_as(weighted)",
    ),
    Fault(
        "running means in float32",
        _PATTERNS,
        "sums = weighted.cumsum(1)",
        "sums = weighted.float().cumsum(1)",
    ),
    Fault(
        "right context is not turned back",
        _PATTERNS,
        "return found if mirror is None else found.index_select(0, mirror)",
        "return found",
    ),
    Fault(
        "the start is the end",
        _PATTERNS,
        "if pattern in (RIGHT_CONTEXT, START):",
        "if pattern == RIGHT_CONTEXT:",
    ),
    Fault(
        "no separator, no attention",
        _PATTERNS,
        "torch.where(_column(count[rows.sequence] > 0, v), means[rows.sequence], v)",
        "means[rows.sequence]",
    ),
    Fault(
        "rows after the last sequence are in it",
        _PATTERNS,
        "inside = number < ends[-1]",
        "inside = number >= 0",
    ),
    Fault("the gate misses fixed heads", _PATTERNS, "value if gate is None else value * gate[head]", "value"),
    Fault(
        "fixed heads after the learned ones",
        _PATTERNS,
        "return torch.stack([found[head] for head in range(len(self.patterns))], 1)\n\n    def all",
        "return torch.stack(list(found.values()), 1)\n\n    def all",
    ),
    Fault(
        "maps of other heads",
        _PATTERNS,
        "for head in heads:\n                found[head] = grid",
        "for head in heads[:1]:\n                found[(head + 1) % len(self.patterns)] = grid",
    ),
    Fault(
        "values of the first heads",
        _PATTERNS,
        "torch.stack([t.select(dim, head) for head in self.learned], dim)",
        "t.narrow(dim, 0, len(self.learned))",
    ),
    Fault(
        "the first token without patterns",
        _LAYER,
        "if self.form.heads is None:\n                attention_p",
        "if True:\n                attention_p",
    ),
    Fault(
        "one call for the layer",
        "fastbert/layers/fused.py",
        "            or self.form.heads is not None\n",
        "",
    ),
    Fault(
        "taps see other heads", _LAYER, "if taps is not None and type(taps).qkv is not Taps.qkv:", "if False:"
    ),
    Fault(
        "rows of other heads",
        _MODEL,
        "for head in heads.learned for i",
        "for head in range(len(heads.learned)) for i",
    ),
    Fault("a copy of nothing", _MODEL, "found = copy.deepcopy(model)", "found = model"),
    Fault(
        "what was frozen learns",
        _MODEL,
        "own.requires_grad_(whole.requires_grad)",
        "own.requires_grad_(True)",
    ),
    Fault("the patterns of the first layer", _MODEL, "Heads(rows[i % len(rows)])", "Heads(rows[0])"),
    Fault(
        "a new model has the patterns of its first layer",
        _BERT,
        "[(Heads(patterns),) for patterns in heads]",
        "[(Heads(heads[0]),) for patterns in heads]",
    ),
    Fault("a call may look ahead", _BERT, "if causal and config.fixed_heads is not None:", "if False:"),
    Fault("a config may look ahead", _CHECKS, "if config.is_decoder and ahead:", "if False:"),
    Fault("no head needs to be learned", _CHECKS, "if NAMES[LEARNED] not in row:", "if False:"),
    Fault("separators may be named", _CHECKS, "if name != NAMES[SEPARATORS]", "if name"),
    Fault(
        "a file does not say which patterns",
        _CONFIG,
        "if patterns := self.fixed_patterns():",
        "if patterns := None:",
    ),
    Fault(
        "one way to write it",
        _CONFIG,
        'values["fixed_heads"] = names[0] if alike else names',
        'values["fixed_heads"] = self.fixed_heads',
    ),
    Fault(
        "a 4-D mask is ignored",
        "fastbert/models/inputs.py",
        "if config.fixed_heads is not None:",
        "if False:",
    ),
)

SUITE = Suite(FAULTS, tests=("tests/layers/test_patterns.py", "tests/models/test_fixed_heads.py"))
