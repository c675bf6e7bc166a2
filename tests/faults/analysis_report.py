"""Faults of reports: numbers from elsewhere, texts that are read as HTML, figures that disturb each other."""

from tests.support.mutation import Fault, Suite, table

_REPORT = "fastbert/analysis/report.py"
_MAPS = "fastbert/analysis/maps.py"
_COMMAND = "fastbert/cli/analyses/report.py"
_PROBE = "fastbert/cli/analyses/probe.py"

FAULTS = (
    Fault("a text is read as HTML", _REPORT, ">{html.escape(value, quote=False)}</span>", ">{value}</span>"),
    Fault(
        "words between numbers are read as HTML",
        _REPORT,
        "made.append(html.escape(literal, quote=False))",
        "made.append(literal)",
    ),
    Fault("all figures share one id", _REPORT, """f' id="{name}-{found[1]}"'""", """f' id="{found[1]}"'"""),
    Fault(
        "a clip path of another figure",
        _REPORT,
        'tag = tag.replace("url(#", f"url(#{name}-")',
        'tag = tag.replace("url(#", "url(#a-")',
    ),
    Fault("ids of the moment", _REPORT, '"svg.hashsalt": name', '"svg.hashsalt": None'),
    Fault("a figure stays black", _REPORT, 'tag.replace("#000000", "currentColor")', "tag"),
    Fault(
        "what a text says of colours is changed",
        _REPORT,
        'text = re.sub(r"<[^>]+>", lambda tag: _own_tag(tag[0], name, wanted), text)',
        "text = _own_tag(text, name, wanted)",
    ),
    Fault(
        "the low end twice",
        _REPORT,
        '(_shown(value[end], f"{where}/{end}", form) for end in ("low", "high"))',
        '(_shown(value["low"], f"{where}/{end}", form) for end in ("low", "high"))',
    ),
    Fault("a sign before nothing", _REPORT, '        text = text.lstrip("+-")\n', "        pass\n"),
    Fault(
        "maps in the order of the layers",
        _MAPS,
        "[taps.maps[layer] for layer in layers]",
        "[taps.maps[layer] for layer in sorted(layers)]",
    ),
    Fault("rows for columns", _MAPS, "maps[0].float()", "maps[0].mT.float()"),
    Fault("a map of any size", _MAPS, "(q, k, sequences, self.max_bytes)", "(q, k, sequences)"),
    Fault("a head that does it once", _MAPS, "clear * has.mean(0)", "clear"),
    Fault("a map of another pattern", _MAPS, "np.where(has[short], clear", "np.where(True, clear"),
    Fault(
        "a long example",
        _MAPS,
        "(lengths >= SHORT[0]) & (lengths <= SHORT[1])",
        "lengths >= SHORT[0]",
    ),
    Fault(
        "the ablation of another head",
        _COMMAND,
        "without.loss_interval(*place, seed=seed)",
        "without.loss_interval(*place[::-1], seed=seed)",
    ),
    Fault(
        "the loss of all examples for that of one",
        _COMMAND,
        "- without.base_loss[case]",
        "- without.base_loss.mean()",
    ),
    Fault(
        "the pair of another text",
        _COMMAND,
        "case = map_.example * len(without.base_loss) // n",
        "case = min(map_.example, len(without.base_loss) - 1)",
    ),
    Fault(
        "masks of no seed",
        _COMMAND,
        "examples = masked(examples, mask_id(load_tokenizer(args.model), args.model), seed=args.seed)",
        "examples = masked(examples, mask_id(load_tokenizer(args.model), args.model))",
    ),
    Fault(
        "an interval of the first head",
        "fastbert/analysis/intervals.py",
        "values.reshape(n, -1).mean(1)",
        "values.reshape(n, -1)[:, 0]",
    ),
    Fault(
        "heads are counted in every example",
        "fastbert/analysis/attention.py",
        "return (means > 0.5).sum((1, 2))",
        "return means.sum((1, 2))",
    ),
    Fault(
        "heads without a correlation have 0",
        "fastbert/analysis/effective.py",
        "ratio_interval(sums[some], counts[some], seed=seed)",
        "estimate(filled, seed=seed)",
    ),
    Fault(
        "an interval without the baseline",
        "fastbert/analysis/geometry.py",
        '"explained variance": self.explained - self.explained_baseline,',
        '"explained variance": self.explained,',
    ),
    Fault(
        "fixed patterns are scored on texts without masks",
        _COMMAND,
        "fixed.fixed_heads(model, scored, assignment",
        "fixed.fixed_heads(model, masked(examples, 4), assignment",
    ),
    Fault(
        "heads of trees by the report's default seed",
        _COMMAND,
        "best = parsing.best(seed=args.seed)",
        "best = parsing.best()",
    ),
    Fault(
        "the best layer of random weights",
        _PROBE,
        '"random": _named(values[1], found[1].interval),\n        "correlation',
        '"random": _named(values[0], found[0].interval),\n        "correlation',
    ),
    Fault(
        "the worst layer",
        _PROBE,
        "layer = int(np.nanargmax(values))\n    return",
        "layer = int(np.nanargmin(values))\n    return",
    ),
    Fault(
        "the score of the loss",
        "fastbert/cli/analyses/heads.py",
        '"loss": estimate(found.loss_changes(zero=zero)',
        '"loss": estimate(found.score_changes(zero=zero)',
    ),
    Fault(
        "red where it is better",
        "fastbert/analysis/pictures.py",
        '"RdBu" if worse == "low" else "RdBu_r"',
        '"RdBu"',
    ),
)

FAULTS += table(
    "fastbert/analysis",
    """
intervals | sign <= 0) | sign < 0)
pictures | found[:, 1:] - found[:, :1] | found[:, 1:]
results | with files.new_directory(directory) as place: | for place in [os.makedirs(directory) or directory]:
results | examples.types, examples.labels): | examples.types):
sections | (depth[1:], *bands | (depth[:-1], *bands
sections_of_loss | figures/score/highest | figures/score/lowest
""",
)

_PAGES = "tests/cli/test_report.py"
SUITE = Suite(
    FAULTS,
    tests=(
        "tests/analysis/test_intervals.py",
        "tests/analysis/test_result_intervals.py",
        "tests/analysis/test_maps.py",
        "tests/analysis/test_report.py",
        f"{_PAGES}::test_the_numbers_are_the_librarys",
        f"{_PAGES}::test_pairs_of_an_encoder_are_compared",
        f"{_PAGES}::test_a_treebank_of_the_report",
        f"{_PAGES}::test_fixed_heads_of_the_report",
        f"{_PAGES}::test_the_numbers_of_fixed_heads",
        f"{_PAGES}::test_published_numbers_name_their_model",
        "tests/cli/test_analyze.py::test_an_interrupt_leaves_nothing",
    ),
)
