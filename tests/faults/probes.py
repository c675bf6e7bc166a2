"""Faults of probes: what they see, how they learn, splits, codes, control tasks, trees."""

from tests.support.mutation import Fault, Suite, table

_FEATURES = "fastbert/analysis/features.py"
_PROBES = "fastbert/analysis/probes.py"
_PROBING = "fastbert/analysis/probing.py"
_TARGETS = "fastbert/analysis/targets.py"
_STRUCTURE = "fastbert/analysis/structure.py"
_INTERVALS = "fastbert/analysis/intervals.py"

FAULTS = (
    Fault(
        "the embeddings are left out",
        _FEATURES,
        "found[layer, target] = ",
        "found[max(layer - 1, 0), target] = ",
    ),
    Fault(
        "a mix sees all layers",
        _PROBES,
        "self.mix.masked_fill(self.hidden_from, -math.inf).softmax(1)",
        "self.mix.softmax(1)",
    ),
    Fault(
        "weights of a span do not add up to 1",
        _PROBES,
        "        weight = weight / total[:, owner]\n",
        "",
    ),
    Fault(
        "both spans are the first",
        _PROBES,
        "lengths = bounds[:, slot, 1] - bounds[:, slot, 0]",
        "slot = 0\n            lengths = bounds[:, slot, 1] - bounds[:, slot, 0]",
    ),
    Fault(
        "probes keep the last epoch",
        _PROBES,
        "                value.copy_(kept[name])\n",
        "                pass\n",
    ),
    Fault(
        "all probes keep the epoch of the best one",
        _PROBES,
        "        better = found < best\n",
        "        better = (found < best).any().expand_as(best)\n",
    ),
    Fault(
        "sigmoid losses are means over classes",
        _PROBES,
        'reduction="none").sum(-1)',
        'reduction="none").mean(-1)',
    ),
    Fault(
        "examples are in two parts of a split",
        _TARGETS,
        "        of_target = part[self.example]\n",
        "        of_target = np.random.default_rng(seed).permutation(part[self.example])\n",
    ),
    Fault(
        "a control label is of the occurrence",
        _TARGETS,
        "drawn[self.types]",
        "drawn[np.arange(len(self)) % len(drawn)]",
    ),
    Fault(
        "the head is the next word",
        _TARGETS,
        "pieces[base + sentence.heads[i] - 1]",
        "pieces[base + sentence.heads[i] % len(sentence)]",
    ),
    Fault(
        "a span ends at the first piece of its last word",
        _TARGETS,
        "ends[base + last - 1]",
        "starts[base + last - 1] + 1",
    ),
    Fault(
        "layers are counted from 0",
        _PROBING,
        "np.arange(1, len(added) + 1)",
        "np.arange(len(added))",
    ),
    Fault(
        "a code in nats",
        _PROBING,
        '"softmax").numpy() / math.log(2)',
        '"softmax").numpy()',
    ),
    Fault(
        "the first block costs nothing",
        _PROBING,
        "    bits[:, of_target < ends[0]] = math.log2(classes)\n",
        "",
    ),
    Fault(
        "a code by a probe that knows the block",
        _PROBING,
        "targets.spans(known[~late])",
        "targets.spans(np.concatenate([known[~late], coded]))",
    ),
    Fault(
        "the control task is the task",
        _PROBING,
        "for task in (targets, targets.control(seed)):",
        "for task in (targets, targets):",
    ),
    Fault(
        "losses over the length, not its square",
        _STRUCTURE,
        "of_distance.sum((-1, -2)) / lengths.square()",
        "of_distance.sum((-1, -2)) / lengths",
    ),
    Fault(
        "a word is the sum of its pieces",
        _STRUCTURE,
        "total / counts[None, :, None]",
        "total",
    ),
    Fault(
        "punctuation counts",
        _STRUCTURE,
        'tag != "PUNCT"',
        'tag != "none"',
    ),
    Fault(
        "a spanning tree of the longest edges",
        _STRUCTURE,
        "closer = distances[each, new] < nearest",
        "closer = distances[each, new] > nearest",
    ),
    Fault(
        "equal values have ranks of their own",
        _STRUCTURE,
        "return below + (alike - 1) / 2",
        "return below.astype(float)",
    ),
    Fault(
        "the root is the deepest word",
        _STRUCTURE,
        "depth[:, usual].argmin(1)",
        "depth[:, usual].argmax(1)",
    ),
    Fault(
        "a mean of ratios",
        _INTERVALS,
        "mean = float(of(values.mean(0)[None])[0])",
        "mean = float(of(values).mean())",
    ),
)

FAULTS += table(
    "fastbert/analysis",
    """
probes | since = 0 if better.any() | since = 0 if better.all()
probing | of_target < begin) | of_target <= begin)
structure | range(5, 51) | range(5, 50)
structure | plain[i] and plain[h - 1] | plain[i]
targets | word.lower() for | word for
targets | p=share / share.sum() | p=np.full(len(share), 1 / len(share))
""",
)

SUITE = Suite(FAULTS, tests=("tests/analysis/test_probes.py", "tests/analysis/test_structure.py"))
