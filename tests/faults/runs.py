"""Faults of recipes, of the stages that a run makes of them, and of the command."""

from tests.support.mutation import Fault, Suite

_RECIPE = "fastbert/pretraining/recipe.py"
_RUN = "fastbert/pretraining/run.py"
_COMMAND = "fastbert/cli/pretrain.py"
_CURVES = "fastbert/training/curves.py"
_RECIPES = "fastbert/pretraining/recipes"

FAULTS = (
    Fault("RoBERTa's other beta", f"{_RECIPES}/roberta.json", "0.98", "0.999"),
    Fault("LAMB's second phase as the first", f"{_RECIPES}/bert-lamb.json", "32768", "65536"),
    Fault(
        "warm-ups keep their steps",
        _RECIPE,
        "                warmup = round(warmup * share)\n",
        "",
    ),
    Fault(
        "a fresh phase's warm-up keeps the share of all phases",
        _RECIPE,
        "share = (end - ended) / phase.steps if self.fresh_optimizer else steps / whole",
        "share = steps / whole",
    ),
    Fault("options of any type", _RECIPE, "                if not right:\n", "                if False:\n"),
    Fault(
        "a table without rows is found after the run",
        _RECIPE,
        "        if not isinstance(rows, dict) or not rows:\n",
        "        if False:\n",
    ),
    Fault(
        "layers with other fixed heads are grown", _RUN, "if growth is not None and any(", "if False and any("
    ),
    Fault(
        "the last phase gets no step",
        _RECIPE,
        "            end = min(end, steps - (len(self.phases) - 1 - number))\n",
        "",
    ),
    Fault(
        "one schedule for phases with an optimizer each",
        _RECIPE,
        "        steps = phase.steps if self.fresh_optimizer else self.steps\n",
        "        steps = self.steps\n",
    ),
    Fault(
        "a phase's predictions without a limit",
        _RECIPE,
        "Masking(**{**limit, **self.masking})",
        "Masking(**self.masking)",
    ),
    Fault(
        "micro-batches larger than wanted",
        _RECIPE,
        "min(phase.batch_size, most) + 1)",
        "phase.batch_size + 1)",
    ),
    Fault(
        "a change of all phases is one of the first",
        _RECIPE,
        'in values["phases"]:',
        'in values["phases"][:1]:',
    ),
    Fault(
        "an unknown field is passed over",
        _RECIPE,
        "        if unknown:\n            raise",
        "        if False:\n            raise",
    ),
    Fault(
        "the change is made in the recipe itself",
        _RECIPE,
        "        return json.loads(json.dumps(asdict(self)))",
        "        return dict(vars(self), phases=[vars(phase) for phase in self.phases])",
    ),
    Fault(
        "the optimizer's options are not checked",
        _RECIPE,
        "_optimizer(groups=[torch.zeros(1)], **{",
        "dict(**{",
    ),
    Fault(
        "layers are added where their stage ends",
        _RUN,
        "if at <= begin][-1]",
        "if at < begin or at == 0][-1]",
    ),
    Fault(
        "the examples begin anew with each depth",
        _RUN,
        "first_micro_batch=done * micro_batches",
        "first_micro_batch=0",
    ),
    Fault(
        "the learning rate begins anew with each phase",
        _RUN,
        "first_step=done if recipe.fresh_optimizer else part.begin",
        "first_step=done",
    ),
    Fault("the optimizer goes on through phases", _RUN, "fresh_optimizer=fresh", "fresh_optimizer=False"),
    Fault("the second phase has the first one's examples", _RUN, "objectives[part.phase]", "objectives[0]"),
    Fault(
        "the last depth stays frozen",
        _RUN,
        "        last = part.layers == parts[-1].layers\n",
        "        last = part is parts[-1]\n",
    ),
    Fault(
        "nothing is frozen",
        _RUN,
        "requires_grad_(name in trained and parameter.requires_grad)",
        "requires_grad_(parameter.requires_grad)",
    ),
    Fault(
        "heads are new after growth",
        _RUN,
        "                parameter.copy_(own[name])",
        "                pass",
    ),
    Fault("moments of heads are lost", _RUN, "{**by_name, **grown}", "grown"),
    Fault(
        "moments are copied into a fresh optimizer",
        _RUN,
        'growth.moments == "copied" and not fresh',
        'growth.moments == "copied"',
    ),
    Fault(
        "the directory's weights are left aside",
        _RUN,
        "model = kind.from_pretrained(weights, config=sized)",
        "model = kind(sized)",
    ),
    Fault(
        "weights in shards are not seen",
        _RUN,
        "WEIGHTS = (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX)",
        "WEIGHTS = (SAFETENSORS,)",
    ),
    Fault(
        "dropout is the config's", _RUN, "            values[name] = recipe.dropout\n", "            pass\n"
    ),
    Fault("DistilBERT's dropout is the config's", _RUN, "            values.pop(other, None)\n", ""),
    Fault("padding is the family's", _RUN, '        values["pad_token_id"] = pad\n', "        pass\n"),
    Fault("another tokenizer will do", _RUN, "            _check_tokenizer(path, corpus)\n", ""),
    Fault("too few positions will do", _RUN, "    if most is not None and longest > most:", "    if False:"),
    Fault("any corpus has phrases", _RUN, "if units & SPAN_UNITS.keys() and", "if False and"),
    Fault("the seed may change", _RUN, '        "seed": seed,\n', ""),
    Fault(
        "the first weights may change",
        _RUN,
        "found.update(hashlib.file_digest(file",
        "found.copy().update(hashlib.file_digest(file",
    ),
    Fault("no tokenizer is saved", _RUN, "        (config.parent / TOKENIZER).write_bytes(content)\n", ""),
    Fault(
        "the tokenizer has no special tokens",
        _RUN,
        "for name, i in sorted(corpus.special_ids.items())",
        "for name, i in ()",
    ),
    Fault("masks are never static", _RUN, "seed, recipe.static, **_as", "seed, None, **_as"),
    Fault("batches of packed rows by sequences", _RECIPE, 'self.format["kind"] == "doc-sentences"', "False"),
    Fault(
        "a signal's status is lost", _COMMAND, "        return 128 + stopped.number\n", "        return 0\n"
    ),
    Fault(
        "all processes read the corpus", _COMMAND, "args.verify and is_first and not", "args.verify and not"
    ),
    Fault(
        "longer sequences are left as they are",
        _COMMAND,
        "        if args.max_length > longest:\n",
        "        if False:\n",
    ),
    Fault(
        "later options lose",
        _COMMAND,
        "    return recipe.with_changes(changes)",
        "    return recipe.with_changes(changes[::-1])",
    ),
    Fault(
        "the steps of the recipe",
        _COMMAND,
        "        recipe = recipe.with_steps(args.steps)\n",
        "        pass\n",
    ),
    Fault("moments are never copied", _COMMAND, '"copied" if args.grow_moments else "fresh"', '"fresh"'),
    Fault("a line that is being written", _CURVES, 'split(b"\\n")[:-1]', "splitlines()"),
    Fault("the mean of what comes", _CURVES, "sums[width:] - sums[:-width]", "sums[-1] - sums[:-width]"),
)

SUITE = Suite(
    FAULTS,
    tests=(
        "tests/pretraining/test_recipe.py",
        "tests/training/test_curves.py",
        "tests/cli/test_pretrain.py",
        "tests/pretraining/test_run.py",
    ),
    timeout_s=600.0,
)
