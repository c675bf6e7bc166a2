"""Faults of graph replay."""

from tests.support.mutation import Fault, Suite

_GRAPHS = "fastbert/graphs/model.py"
_BUCKETS = "fastbert/graphs/buckets.py"
_CALLS = "fastbert/graphs/calls.py"
_RECORDER = "fastbert/graphs/recorder.py"
_WEIGHTS = "fastbert/graphs/weights.py"
_PREPARED = "fastbert/runtime/prepared.py"


def _fault(name: str, old: str, new: str, file: str = _GRAPHS) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    _fault("rows behind the tokens left as they were", "        rows[:, total:] = 0\n", ""),
    _fault("unused sequences left as they were", "        ends[batch + 1 :] = total\n", ""),
    _fault(
        "unused sequences end at the bucket's end",
        "        ends[batch + 1 :] = total\n",
        "        ends[batch + 1 :] = rows.shape[1]\n",
    ),
    _fault(
        "inputs' memory not blanked before recording",
        "                self._blank()\n                recording",
        "                recording",
    ),
    _fault(
        "inputs' memory not blanked before deriving", "        self._blank()\n        done", "        done"
    ),
    _fault(
        "a view of the graph's output returned",
        "if bucket.first_token_only else total].clone()",
        "if bucket.first_token_only else total]",
    ),
    _fault("a view of the graph's pooler output returned", "pooled[:batch].clone()", "pooled[:batch]"),
    _fault(
        "all rows of the bucket returned",
        "hidden[: batch if bucket.first_token_only else total]",
        "hidden[: batch if bucket.first_token_only else None]",
    ),
    _fault("next smaller bucket", "if size >= total and room", "if size * 1.25 >= total and room"),
    _fault("a full bucket passed over", "if size >= total and room", "if size > total and room"),
    _fault("too many tokens taken", "if total > self.buckets[-1]:", "if total > 2 * self.buckets[-1]:"),
    _fault(
        "too many sequences taken",
        "if packed.batch > self.max_batch:",
        "if packed.batch > 8 * self.max_batch:",
    ),
    _fault("no tokens replayed", "        if total == 0:\n", "        if total < 0:\n"),
    _fault("holes replayed", "        if inputs.holes:\n", "        if False:\n"),
    _fault("sequences not counted", "and room >= packed.batch\n", "\n"),
    _fault("one sequence too many", "and room >= packed.batch\n", "and room + 1 >= packed.batch\n"),
    _fault("a full room passed over", "and room >= packed.batch\n", "and room > packed.batch\n"),
    _fault(
        "the last bucket no wider than its tokens",
        "for size in buckets[:-1]), max_batch)",
        "for size in buckets),)",
        _BUCKETS,
    ),
    _fault(
        "room beyond max_batch",
        "(min(max_batch, max(_ROOM, size // _ROOM)) for",
        "(max(_ROOM, size // _ROOM) for",
        _BUCKETS,
    ),
    _fault("no room at least", "max(_ROOM, size // _ROOM))", "max(1, size // _ROOM))", _BUCKETS),
    _fault("room of another bucket", "self.rooms[self.buckets.index(bucket.tokens)]", "self.rooms[-1]"),
    _fault(
        "longest length not bounded by the tokens",
        "min(bucket.tokens, model.config.max_tokens)",
        "model.config.max_tokens",
    ),
    _fault(
        "longest length not bounded by the positions",
        "min(bucket.tokens, model.config.max_tokens)",
        "bucket.tokens",
    ),
    _fault(
        "all positions of the table counted",
        "min(bucket.tokens, model.config.max_tokens)",
        "min(bucket.tokens, model.config.max_position_embeddings)",
    ),
    _fault("longer sequences replayed", "and ids.shape[1] > config.max_tokens:", "and False:", _CALLS),
    _fault(
        "the longest sequences not replayed",
        "and ids.shape[1] > config.max_tokens:",
        "and ids.shape[1] >= config.max_tokens:",
        _CALLS,
    ),
    _fault(
        "a dense grid recorded",
        "if (reason := by_grid(self.model)) is not None:",
        "if (reason := None) is not None:",
    ),
    _fault(
        "any attention taken for the kernel", '    if name == "triton":\n', '    if name != "":\n', _CALLS
    ),
    _fault(
        "wide heads taken for the kernel's",
        "model.config.head_dim <= MAX_HEADDIM:",
        "model.config.head_dim <= 256:",
        _CALLS,
    ),
    _fault("fewer graphs kept than buckets", "    max_graphs: int = 64,\n", "    max_graphs: int = 32,\n"),
    _fault(
        "first rows and all rows in one bucket",
        "Bucket(tokens, first_only, pooled,",
        "Bucket(tokens, False, pooled,",
    ),
    _fault(
        "with and without pooler in one bucket",
        "Bucket(tokens, first_only, pooled,",
        "Bucket(tokens, first_only, True,",
    ),
    _fault("pins not in the bucket", "dispatch.pins())", "())"),
    _fault("the newest graph gives way", "popitem(last=False)", "popitem(last=True)"),
    _fault("use does not keep a graph", "        self._recordings.move_to_end(bucket)\n", ""),
    _fault(
        "one graph too many",
        "            while len(self._recordings) >= self.max_graphs:",
        "            while len(self._recordings) > self.max_graphs:",
    ),
    _fault("replaced parameters not looked for", "        if weights.replaced():", "        if False:"),
    _fault(
        "modules' classes not looked at", "list(map(type, self.modules)) != self.classes", "False", _WEIGHTS
    ),
    _fault("new entries not looked for", "list(map(len, self.tables)) != self.sizes", "False", _WEIGHTS),
    _fault(
        "identity not looked at",
        "not all(map(is_, map(dict.get, self.homes, self.names), self.values))",
        "False",
        _WEIGHTS,
    ),
    _fault("places not looked at", "not self.places.same(self.tensors)", "False", _WEIGHTS),
    _fault(
        "old memory let go", "self.memory = [t.detach() for t in self.tensors]", "self.memory = []", _WEIGHTS
    ),
    _fault(
        "versions not looked at", "[t._version for t in self.tensors] != self.versions", "False", _WEIGHTS
    ),
    _fault("cleared derived weights not looked at", "prepared.clear_count() != self.clears or", "", _WEIGHTS),
    _fault("derived weights kept", "        prepared.clear(self.model)\n        weights", "        weights"),
    _fault(
        "one kind of recording alone derives",
        "kind = replace(bucket, tokens=0)",
        "kind = None",
    ),
    _fault(
        "derived weights not overwritten",
        "return all(prepared.update_in_place(*entry) for entry in self._derived.values())",
        "return True",
    ),
    _fault("failed overwriting goes on", "        if not updated:\n            self._drop()\n", ""),
    _fault(
        "an outdated replay returned",
        "                if self._settle():\n",
        "                if self._settle() or True:\n",
    ),
    _fault("hooks not looked for", "        if any(self.hooks):\n", "        if False:\n", _WEIGHTS),
    _fault(
        "hooks of the whole model not looked for",
        "    if is_hooked(model) or _has_any_global_hook():",
        "    if False:",
        _CALLS,
    ),
    _fault(
        "parts in training replayed",
        'if any(map(attrgetter("training"), self.modules)):',
        "if False:",
        _WEIGHTS,
    ),
    _fault("training replayed", "    if model.training:\n", "    if False:\n", _CALLS),
    _fault(
        "gradients lost",
        "if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):",
        "if False:",
        _CALLS,
    ),
    _fault(
        "frozen models not replayed", "and any(p.requires_grad for p in model.parameters()):", ":", _CALLS
    ),
    _fault("autocast ignored", "    if torch.is_autocast_enabled(device.type):", "    if False:", _CALLS),
    _fault(
        "attentions not returned",
        'for name in ("output_attentions", "output_hidden_states"):',
        'for name in ("output_hidden_states",):',
        _CALLS,
    ),
    _fault(
        "the config's wishes ignored", "or (given.get(name) is None and getattr(config, name))", "", _CALLS
    ),
    _fault(
        "a 4-D mask taken for none", "if isinstance(mask, Tensor) and mask.dim() == 4:", "if False:", _CALLS
    ),
    _fault(
        "other arguments ignored",
        "if value is not None and value is not False and name not in _RECORDED:",
        "if False:",
        _CALLS,
    ),
    _fault("a masked first token pooled", "and inputs.first_masked is None", ""),
    _fault(
        "a masked first token returned", "if first_only and inputs.packing.mask is not None:", "if False:"
    ),
    _fault(
        "positional arguments dropped",
        "dict(zip(self._positional, args, strict=False))",
        "dict(zip(self._positional[:2], args, strict=False))",
    ),
    _fault("arguments given twice taken", "or given.keys() & kwargs or", "or"),
    _fault(
        "packed asked for, padded given",
        '        if given.get("packed"):\n            return hidden',
        "        if False:\n            return hidden",
    ),
    _fault(
        "return_dict ignored", 'first_only, given.get("return_dict"), pooled)', "first_only, None, pooled)"
    ),
    _fault(
        "no lock",
        "        with self._lock:\n            for _ in range(_TRIES):",
        "        with contextlib.nullcontext():\n            for _ in range(_TRIES):",
    ),
    _fault(
        "memory made in inference mode",
        "        with torch.inference_mode(False):  # what is made",
        "        with contextlib.nullcontext():  # what is made",
    ),
    _fault(
        "recorded in inference mode",
        "            with torch.inference_mode(False), torch.no_grad():\n                hidden",
        "            with torch.no_grad():\n                hidden",
    ),
    _fault(
        "a failure to record raised",
        "        except Exception as error:",
        "        except MemoryError as error:",
    ),
    _fault("a failed recording tried again", "            self._failed[bucket] = reason\n", ""),
    _fault(
        "another thread's reason told",
        "self._last = threading.local()",
        "self._last = type('Shared', (), {})()",
    ),
    _fault("the inputs' memory not counted", "return self._rows.nbytes + self._ends.nbytes + (", "return ("),
    _fault("no wait for the warm-up", "            current.wait_stream(self._stream)\n", "", _RECORDER),
    _fault("no wait before the warm-up", "            self._stream.wait_stream(current)\n", "", _RECORDER),
    _fault(
        "no warm-up",
        "                function()\n            current",
        "                pass\n            current",
        _RECORDER,
    ),
    _fault(
        "captured on another stream",
        "stream=self._stream, capture_error_mode",
        "stream=current, capture_error_mode",
        _RECORDER,
    ),
    _fault(
        "a pool for each graph",
        "captured, pool=self._pool",
        "captured, pool=torch.cuda.graph_pool_handle and None",
        _RECORDER,
    ),
    _fault(
        "streams not ordered before",
        "            torch.cuda.current_stream().wait_event(self._done)\n",
        "",
        _RECORDER,
    ),
    _fault(
        "streams not ordered after",
        "                self._done.record(torch.cuda.current_stream())",
        "                pass",
        _RECORDER,
    ),
    _fault(
        "an error leaves streams unordered",
        "            try:\n                yield\n            finally:\n                self._done",
        "            yield\n            if True:\n                self._done",
        _RECORDER,
    ),
    _fault(
        "all memory taken for the pool's",
        'if tuple(s["segment_pool_id"]) == tuple(self._pool)',
        "",
        _RECORDER,
    ),
    _fault("overwriting copies nothing", "                a.copy_(b)\n", "                pass\n", _PREPARED),
    _fault(
        "overwritten weights not remembered",
        "            _cache[owner][name] = found._replace(value=value)\n",
        "            pass\n",
        _PREPARED,
    ),
    _fault("clearing not counted", "    _clears += 1\n", "", _PREPARED),
)

SUITE = Suite(
    FAULTS,
    tests=(
        "tests/graphs", "-x", "-q", "-k",
        "not compile and not long_sequences and not test_bad and not sentence_encoder",
    ),
    timeout_s=600.0,
)  # fmt: skip
