"""Faults of the corpus, of draws and orders, and of the masking rules."""

from tests.support.mutation import Fault, Suite

_CORPUS = "fastbert/pretraining/corpus.py"
_DOCUMENTS = "fastbert/pretraining/documents.py"
_DRAWS = "fastbert/training/draws.py"
_FILES = "fastbert/checkpoint/files.py"
_FORMATS = "fastbert/pretraining/formats.py"
_DRAWS = "fastbert/training/draws.py"
_GROWTH = "fastbert/pretraining/growth.py"
_MASKING = "fastbert/pretraining/masking.py"
_PLANS = "fastbert/pretraining/plans.py"
_ROWS = "fastbert/pretraining/rows.py"
_SPANS = "fastbert/pretraining/spans.py"
_VOCABULARY = "fastbert/pretraining/vocabulary.py"

FAULTS = (
    Fault("the epoch is not in the counter", _DRAWS, "int(epoch) << 64 | ", ""),
    Fault("the low half of a product dropped", _DRAWS, "* limit + low >>", "* limit >>"),
    Fault("one round", _DRAWS, "_ROUNDS = 6", "_ROUNDS = 1"),
    Fault(
        "no cycle walking",
        _DRAWS,
        "            outside = found >= self.size\n",
        "            found %= np.uint64(self.size)\n            outside[:] = False\n",
    ),
    Fault(
        "the order ignores its key",
        _DRAWS,
        "np.random.Philox(key=key).random_raw(_ROUNDS)",
        "np.random.Philox(key=1).random_raw(_ROUNDS)",
    ),
    Fault(
        "special tokens are candidates",
        _MASKING,
        "candidate = ~np.isin(ids, vocabulary.special)",
        "candidate = np.ones(len(ids), bool)",
    ),
    Fault("specials not stepped over", _MASKING, "            found += found >= i\n", "            pass\n"),
    Fault(
        "the share of the candidates alone",
        _MASKING,
        "len(begins) if by_words else len(candidate)",
        "len(begins)",
    ),
    Fault(
        "no prediction in a short sequence",
        _MASKING,
        "max(1, round(self.share * length))",
        "round(self.share * length)",
    ),
    Fault("rounded down", _MASKING, "round(self.share * length)", "int(self.share * length)"),
    Fault("max_predictions ignored", _MASKING, "budget = min(budget, self.max_predictions)", "pass"),
    Fault(
        "random tokens where [MASK] belongs", _MASKING, "fate < self.mask_share]", "fate < self.random_share]"
    ),
    Fault("a fate per token in a span", _MASKING, 'together = self.unit == "span" or', "together ="),
    Fault(
        "a fate per token in a word of the word budget",
        _MASKING,
        'self.unit == "span" or self.word_budget == "words"',
        'self.unit == "span"',
    ),
    Fault(
        "the label is what the model sees",
        _MASKING,
        "labels[chosen] = ids[chosen]",
        "labels[chosen] = vocabulary.mask",
    ),
    Fault(
        "a word that exceeds the budget is cut",
        _MASKING,
        "taken[word : last + 1].any() or",
        "taken[word : last + 1].any() and",
    ),
    Fault("units overlap", _MASKING, "            taken[word : last + 1] = True\n", ""),
    Fault(
        "a unit crosses a special token",
        _MASKING,
        "np.append(begins[1:] == ends[:-1], False)",
        "np.append(begins[1:] > 0, False)",
    ),
    Fault(
        "n-grams of equal chance",
        _MASKING,
        "1.0 / np.arange(1, self.max_ngram + 1)",
        "np.ones(self.max_ngram)",
    ),
    Fault(
        "spans clipped, not cut",
        _MASKING,
        "limits = np.cumsum(weights / weights.sum())[:-1]",
        "limits = np.cumsum(weights)[:-1]",
    ),
    Fault("a word goes on past a special token", _MASKING, "        starts[1:] |= ~candidate[:-1]\n", ""),
    Fault(
        "special text becomes a special token",
        _CORPUS,
        "        tokenizer.encode_special_tokens = True",
        "        pass",
    ),
    Fault("words of two sentences run on", _CORPUS, "        begins[(ends - lengths)[filled]] = True\n", ""),
    Fault("an empty sentence kept", _CORPUS, "filled = lengths > 0", "filled = lengths >= 0"),
    Fault("bits between two chunks dropped", _CORPUS, "        self._bits = bits[whole:]\n", ""),
    Fault("bits from the byte's start", _CORPUS, "bits[a % 8 : a % 8 + b - a]", "bits[: b - a]"),
    Fault("sizes not compared", _CORPUS, '    if size != entry["bytes"]:', "    if False:"),
    Fault(
        "digests not compared", _CORPUS, '    if whole.hexdigest() != entry.get("sha256"):', "    if False:"
    ),
    Fault("a changed index passes", _CORPUS, 'index.get("hash") != _hash_of(index):', "False:"),
    Fault(
        "the hash is of the arrays alone",
        _CORPUS,
        'cut = ("hash", "files", "shard_tokens")',
        'cut = ("hash", "files", "shard_tokens", "vocab_size", "special_ids", "longest_sentence")',
    ),
    Fault(
        "digests of files that are of no array",
        _CORPUS,
        'if parts[-1].get("sha256") != index["arrays"].get(array):',
        "if False:",
    ),
    Fault("sentence starts may fall", _CORPUS, " or (found[1:] <= found[:-1]).any():", ":"),
    Fault("ids of 17 bits in 16", _CORPUS, "vocab_size <= 1 << 16", "vocab_size <= 1 << 17"),
    Fault(
        "what was there is lost if the text is bad",
        _FILES,
        "        new.mkdir()\n",
        "        new.mkdir()\n        shutil.rmtree(place, ignore_errors=True)\n",
    ),
    Fault(
        "a directory written in its place",
        _FILES,
        "            yield new\n",
        "            yield new.rename(place)\n",
    ),
    Fault(
        "what killed processes left stays", _FILES, "        if kind not in", "        if kind or kind not in"
    ),
    Fault(
        "an old directory that was taken away is removed",
        _FILES,
        'if kind == "old" and not os.path.lexists(place):',
        "if False:",
    ),
    Fault("other files are replaced too", _FILES, "    if foreign:\n", "    if False:\n"),
    Fault(
        "the last word goes on before the bracket",
        _DOCUMENTS,
        "line[begin - 1].isspace() or line[begin - 1] in _OPENING",
        "line[begin - 1].isspace()",
    ),
    Fault(
        "a vocabulary without most words",
        _VOCABULARY,
        "    if 2 * unknown > words.total():\n",
        "    if False:\n",
    ),
    Fault("any index.json is a corpus", _CORPUS, 'or read_json(path).get("format") != FORMAT:', "or False:"),
    Fault(
        "documents run together", _DOCUMENTS, "        elif document:\n", "        elif len(document) > 3:\n"
    ),
    Fault(
        "abbreviations end sentences",
        _DOCUMENTS,
        "_ABBREVIATION.fullmatch(_last_word(line, start, end.start()))",
        "False",
    ),
    Fault("a BOM is text", _DOCUMENTS, 'line.removeprefix("\\ufeff") if number == 1 else line', "line"),
    Fault(
        "ties by the order of words",
        _VOCABULARY,
        "return -pairs[pair], pieces[pair[0]], pieces[pair[1]], pair",
        "return -pairs[pair], pair[1], pair[0], pair",
    ),
    Fault("counts of merged pairs stay", _VOCABULARY, "                    pairs[old] -= count\n", ""),
    Fault(
        "a span crosses sentences",
        _SPANS,
        "len(self) + count) <= self.stops",
        "len(self) + count) <= len(self)",
    ),
    Fault(
        "equal hashes are equal words",
        _SPANS,
        "            same[maybe] = np.logical_and.reduceat(theirs == ours, starts)\n",
        "",
    ),
    Fault("one entry per hash", _SPANS, "left, at = left[~same], at[~same] + 1", "break"),
    Fault("the shortest entry", _SPANS, "(longest[words] == 0) &", ""),
    Fault("spans overlap", _SPANS, "        if begin >= last:\n", "        if True:\n"),
    Fault("sources overlap", _SPANS, "            free &= np.cumsum(edges[:-1]) == 0\n", ""),
    Fault("the last kind wins", _SPANS, "max(kinds[i], same.get(ids, kinds[i]))", "kinds[i]"),
    Fault(
        "unknown words are searched for",
        _SPANS,
        "if ids and not any(each in ids for each in special)",
        "if ids",
    ),
    Fault("no word behind a space", _SPANS, '(batch, [f" {text}" for text in batch])', "(batch,)"),
    Fault("three words apart not looked at", _SPANS, "np.minimum(score, apart) >= least", "score >= least"),
    Fault("a phrase and its last word not looked at", _SPANS, "(pairs[pair] * words[third])", "pairs[last]"),
    Fault(
        "a word and its last phrase not looked at",
        _SPANS,
        "triples * total / (words[first] * pairs[last]),",
        "np.inf,",
    ),
    Fault("rarer phrases", _SPANS, "return keys[counts >= least]", "return keys[counts >= least - 1]"),
    Fault("punctuation counts as words", _SPANS, "total += len(words)", "total += len(part)"),
    Fault("counts of two runs not added", _SPANS, "np.concatenate([counts, others])", "1"),
    Fault("a span that ends outside", _CORPUS, "return found[found[:, 1] <= end]", "return found"),
    Fault(
        "the number of spans not in the hash",
        _CORPUS,
        'cut = ("hash",',
        'cut = ("spans", "arrays", "hash",',
    ),
    Fault(
        "a corpus without spans has none", _CORPUS, "        if not self.span_kinds:\n", "        if False:\n"
    ),
    Fault("entities and phrases alike", _MASKING, '"entity": (ENTITY,)', '"entity": (PHRASE, ENTITY)'),
    Fault("an entity is no phrase", _MASKING, '"phrase": (PHRASE, ENTITY)', '"phrase": (PHRASE,)'),
    Fault("two words of a phrase", _MASKING, "starts[begin + 1 : end]", "starts[begin + 1 : begin + 2]"),
    Fault("a special token in a phrase", _MASKING, " & (special[begins] == special[ends])", ""),
    Fault(
        "a fate per phrase",
        _MASKING,
        'together = self.unit == "span"',
        'together = self.unit in ("span", "phrase")',
    ),
    Fault("each layer twice in a row", _GROWTH, "old[i % len(old)]", "old[i * len(old) // len(new)]"),
    Fault("layer 1 for layer 10", _GROWTH, 'name.startswith(f"{prefix}.")', "name.startswith(prefix)"),
    Fault(
        "a shared layer has the first one's weights",
        _GROWTH,
        "if sources.setdefault(name, source) != source:",
        "if sources.setdefault(name, source) is None:",
    ),
    Fault("any number of layers", _GROWTH, "if not old or len(new) % len(old):", "if not old:"),
    Fault("widths not compared", _GROWTH, 'key != "num_hidden_layers" and ours[key] != theirs[key]', "False"),
    Fault("moments shared by layers", _GROWTH, "v.clone() if isinstance(v, Tensor) else v", "v"),
    Fault("moments of the old layers alone", _GROWTH, "if names[name] in moments", "if name in moments"),
    Fault(
        "embeddings train",
        _GROWTH,
        "model.base_model.parameters()}",
        "model.base_model.layers()[0].parameters()}",
    ),
    Fault("the pooler is frozen", _GROWTH, " - new - above", " - new"),
    Fault("heads are frozen", _GROWTH, "if id(parameter) not in frozen", "if id(parameter) in new | above"),
    Fault("no growth from stage to stage", _GROWTH, "layers == before or ", ""),
    Fault(
        "two ends of the training",
        _GROWTH,
        "(steps is None) != (number == len(parts))",
        "steps is None and number < len(parts)",
    ),
    Fault("## kept inside a piece", _VOCABULARY, 'left + right.removeprefix("##")', "left + right"),
    Fault("a random segment of the same document", _FORMATS, "        chosen += chosen >= document\n", ""),
    Fault(
        "a random segment starts with its document",
        _FORMATS,
        "begin = begin + draws.below",
        "begin = begin + 0 * draws.below",
    ),
    Fault(
        "a random segment runs on into the next document",
        _FORMATS,
        "np.minimum(np.searchsorted(sentences, first + wanted), end)",
        "np.searchsorted(sentences, first + wanted).clip(0, len(sentences) - 1)",
    ),
    Fault(
        "a random segment as long as a whole pair",
        _FORMATS,
        "np.maximum(target[found] - first_size, 1)",
        "np.maximum(target[found], 1)",
    ),
    Fault("unused sentences lost", _FORMATS, "np.where(label == other, cut, stop)", "stop"),
    Fault("a sentence alone has a next one", _FORMATS, "            label[alone] = other\n", ""),
    Fault("the label of a swap the other way", _FORMATS, "swapped = label ==", "swapped = label !="),
    Fault("no swap", _FORMATS, "first, second = np.where(swapped, second, first), ", "_ = "),
    Fault(
        "one sentence is enough for an order",
        _FORMATS,
        "np.minimum(np.maximum(stop, here + 2), last)",
        "np.minimum(stop, last)",
    ),
    Fault(
        "a pair of nothing and a sentence",
        _FORMATS,
        "            found = found[~alone[found]]\n",
        "            pass\n",
    ),
    Fault(
        "A is half of the sentences",
        _FORMATS,
        "draws.below(np.maximum(stop - here - 1, 1), count)",
        "(stop - here) // 2 - (stop - here > 1)",
    ),
    Fault(
        "pairs cross documents",
        _FORMATS,
        "np.minimum(np.searchsorted(tokens, tokens[:count] + target), last)",
        "np.minimum(np.searchsorted(tokens, tokens[:count] + target), len(tokens) - 1)",
    ),
    Fault(
        "a sentence more than the target",
        _FORMATS,
        "tokens[:count] + target)",
        "tokens[:count] + target, 'right')",
    ),
    Fault(
        "a target of one token", _FORMATS, "2 + draws.below(most - 1, count)", "1 + draws.below(most, count)"
    ),
    Fault(
        "more short targets",
        _FORMATS,
        "draws.chance(self.short_share, count)",
        "draws.chance(1.1 * self.short_share, count)",
    ),
    Fault("pairs of all epochs alike", _FORMATS, 'self._key("pairs"), epoch,', 'self._key("pairs"), 0,'),
    Fault("blocks of sentences with the same draws", _FORMATS, "epoch, begin // BLOCK)", "epoch, 0)"),
    Fault("pairs cut with the same draws", _FORMATS, "plan.epoch, index)", "plan.epoch, 0)"),
    Fault("segments cut at the back alone", _FORMATS, "draws.chance(0.5, sizes", "draws.chance(0.0, sizes"),
    Fault("segments cut to halves", _FORMATS, "max(room - sizes[1], (room + 1) // 2)", "(room + 1) // 2"),
    Fault("the odd token is B's", _FORMATS, "(room + 1) // 2)", "room // 2)"),
    Fault("one document is enough", _FORMATS, "corpus.num_documents < 2", "corpus.num_documents < 1"),
    Fault("the corpus does not matter", _PLANS, "key_of(self.corpus.hash, self.seed,", "key_of(self.seed,"),
    Fault("the separator is of the second segment", _PLANS, "types[at:] = 1", "types[at - 1 :] = 1"),
    Fault(
        "word starts of the tokens before",
        _PLANS,
        "starts[at : at + end - begin]",
        "starts[at - 1 : at - 1 + end - begin]",
    ),
    Fault("a number after the last", _PLANS, "0 <= index < len(plan)", "0 <= index <= len(plan)"),
    Fault("separators take no room", _ROWS, "separator=1)", "separator=0)"),
    Fault("rows cross documents", _ROWS, "separator=room)", "separator=1)"),
    Fault("a separator before the first document", _ROWS, " - before[found] + 2", " + 2"),
    Fault("rows end with a block", _ROWS, "len(after) if stop == ends[-1] else", "len(after) if True else"),
    Fault(
        "the rest of a long sentence is lost",
        _ROWS,
        "count = -(-size // room)",
        "count = np.maximum(size // room, 1)",
    ),
    Fault("one order of documents", _ROWS, '"documents", epoch))', '"documents"))'),
    Fault(
        "the next document of the text",
        _ROWS,
        "documents[plan.order[place]]",
        "documents[plan.order[place - 1] + 1]",
    ),
    Fault("rare pairs merged", _VOCABULARY, "        if -negative < min_frequency:", "        if False:"),
)

SUITE = Suite(
    FAULTS,
    tests=(
        *("tests/pretraining", "tests/checkpoint/test_directories.py"),
        *("-k", "not another_process and not full_disk and not threads"),
    ),
)
