"""Faults of graph replay."""

from tests.support.mutation import Fault, Suite

_GRAPHS = "fastbert/graphs/model.py"
_BUCKETS = "fastbert/graphs/buckets.py"
_CALLS = "fastbert/graphs/calls.py"
_RECORDER = "fastbert/graphs/recorder.py"
_WEIGHTS = "fastbert/graphs/weights.py"
_PREPARED = "fastbert/runtime/prepared.py"
_STAGING = "fastbert/graphs/staging.py"
_PLANS = "fastbert/graphs/plans.py"
_OUTPUTS = "fastbert/models/outputs.py"


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
    _fault(
        "next smaller bucket", "bisect_left(self.buckets, total)", "bisect_left(self.buckets, total * 0.8)"
    ),
    _fault(
        "a full bucket passed over",
        "bisect_left(self.buckets, total)",
        "bisect_left(self.buckets, total + 1)",
    ),
    _fault("too many tokens taken", "if total > self.buckets[-1]:", "if total > 2 * self.buckets[-1]:"),
    _fault(
        "too many sequences taken",
        "if packed.batch > self.max_batch:",
        "if packed.batch > 8 * self.max_batch:",
    ),
    _fault("no tokens replayed", "        if total == 0:\n", "        if total < 0:\n"),
    _fault("holes replayed", "        if inputs.holes:\n", "        if False:\n"),
    _fault("sequences not counted", "while self.rooms[first] < batch:", "while False:"),
    _fault(
        "one sequence too many", "while self.rooms[first] < batch:", "while self.rooms[first] < batch - 1:"
    ),
    _fault(
        "a full room passed over", "while self.rooms[first] < batch:", "while self.rooms[first] <= batch:"
    ),
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
    _fault(
        "room of another bucket",
        "tokens, room = self.buckets[first], self.rooms[first]",
        "tokens, room = self.buckets[first], self.rooms[-1]",
    ),
    _fault("room for long sequences alone", "few if batch <= few else room", "few"),
    _fault("no graphs for long sequences", "few if batch <= few else room", "room"),
    _fault(
        "as many long sequences have the other graph",
        "few if batch <= few else room",
        "few if batch < few else room",
    ),
    _fault(
        "the memory of another room",
        "        sizes = bucket.tokens, bucket.sequences\n        if",
        "        sizes = bucket.tokens, self.rooms[self.buckets.index(bucket.tokens)]\n        if",
    ),
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
        "head_dim <= MAX_HEADDIM:",
        "head_dim <= 256:",
        _CALLS,
    ),
    _fault("fewer graphs kept than buckets", "    max_graphs: int = 128,\n", "    max_graphs: int = 64,\n"),
    _fault(
        "first rows and all rows in one bucket",
        "packed.batch), first_only, pooled,",
        "packed.batch), False, pooled,",
    ),
    _fault(
        "with and without pooler in one bucket",
        "packed.batch), first_only, pooled,",
        "packed.batch), first_only, True,",
    ),
    _fault("pins not in the bucket", "first_only, pooled, dispatch.pins())", "first_only, pooled, ())"),
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
        "kind = bucket._replace(tokens=0, sequences=0)",
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
        "    if _has_any_global_hook():",
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
        'if value is not None and (value is not False or name == "causal") and name not in _RECORDED:',
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
    _fault("arguments given twice taken", "if given.keys() & kwargs or not", "if not"),
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
    _fault("the inputs' memory not counted", "return self._memory.nbytes + (", "return ("),
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
    _fault("bad ids of replays not told", "        raise_bad_ids(self.model.device)\n", ""),
    _fault("bad ids of quick replays not told", "        raise_bad_ids(stage.device)\n", ""),
    # the quick calls
    _fault(
        "a quick call not watched",
        "            if not self._weights.untouched():\n",
        "            if False:\n",
    ),
    _fault("a plan of a dropped recording", "if self._plans.get(key) is not plan or", "if"),
    _fault(
        "pins not in the plan",
        "key = batch.shape, first_only, dispatch.pins()",
        "key = batch.shape, first_only, ()",
    ),
    _fault(
        "first tokens by the plan of all",
        "key = batch.shape, first_only, dispatch.pins()",
        "key = batch.shape, False, dispatch.pins()",
    ),
    _fault("quick use does not keep a graph", "            self._recordings.move_to_end(plan.bucket)\n", ""),
    _fault("plans without end", "            if len(self._plans) >= _PLANS:\n", "            if False:\n"),
    _fault(
        "plans outlive an evicted recording",
        "            self._plans.clear()\n            while",
        "            while",
    ),
    _fault(
        "plans outlive all recordings",
        "        self._inputs.clear()\n        self._plans.clear()\n",
        "        self._inputs.clear()\n",
    ),
    _fault(
        "memory of before",
        "        self._inputs.clear()\n        self._plans.clear()\n",
        "        self._plans.clear()\n",
    ),
    _fault(
        "new derived weights not watched",
        "        self._weights.follow(None)  # it does not watch what this recording derives\n",
        "",
    ),
    _fault(
        "the state taken after it was found right",
        "                if self._settle():\n                    self._weights.follow(state)\n",
        "                if self._settle():\n"
        "                    state = self._weights.candidate(self._derived.values())\n"
        "                    self._weights.follow(state)\n",
    ),
    _fault(
        "ids on a device not copied",
        "                    plan.ids.copy_(ids)\n",
        "                    pass\n",
    ),
    _fault(
        "types on a device not copied",
        "                        plan.types.copy_(types)\n",
        "                        pass\n",
    ),
    _fault("more tokens than planned for", "if not 0 < total <= self.buckets[-1] or", "if not 0 < total or"),
    _fault(
        "more sequences than planned for", "self.buckets[-1] or size > self.max_batch:", "self.buckets[-1]:"
    ),
    _fault(
        "attentions asked of a quick call",
        "not (config.output_attentions or config.output_hidden_states)",
        "not config.output_attentions",
        _CALLS,
    ),
    _fault("any argument usual", "        given.keys() <= _USUAL\n", "        True\n", _CALLS),
    _fault("gradients in a quick call", "        and _unfit_around(model, device) is None\n", "", _CALLS),
    _fault("modules not compared", "            and self.extension.same()\n", "", _WEIGHTS),
    _fault(
        "unmarked memory not compared",
        "            and not any(written() for written in self.sources.written)\n",
        "",
        _WEIGHTS,
    ),
    _fault("samples forgotten", "not old.sources.written and ", "", _WEIGHTS),
    _fault("marks not compared", "marked_storages=storages", "marked_storages=[]", _WEIGHTS),
    _fault("hooks not compared", "empty=self.hooks", "empty=[]", _WEIGHTS),
    _fault("modes not compared", "attributes=self.attributes", "attributes=[]", _WEIGHTS),
    _fault(
        "long sequences taken", "if shape is None or shape[1] > self._longest:", "if shape is None:", _STAGING
    ),
    _fault(
        "padding beside ids on a device",
        "if self._host.measure(memory, mask, None) != whole:",
        "if False:",
        _STAGING,
    ),
    _fault(
        "RoBERTa's ids not looked at",
        "if has_lengths and self._by_column and self._kernel_tells():",
        "if has_lengths and self._kernel_tells():",
        _STAGING,
    ),
    _fault(
        "ids that no kernel looks at stay on the device",
        "if has_lengths and self._by_column and self._kernel_tells():",
        "if has_lengths and self._by_column:",
        _STAGING,
    ),
    _fault(
        "ids without a mask are copied to the host",
        "has_lengths = type(mask) is not Tensor or is_on_host(mask)",
        "has_lengths = mask is not None and (type(mask) is not Tensor or is_on_host(mask))",
        _STAGING,
    ),
    _fault(
        "types of a family without segments taken",
        "            self._segments\n            and type(types)",
        "            type(types)",
        _STAGING,
    ),
    _fault(
        "what is packed without ids is packed again",
        "same = None if batch.with_ids else",
        "same = None if True else",
    ),
    _fault(
        "another shape's positions left",
        "same = None if batch.with_ids else (key, types is None)",
        "same = None if batch.with_ids else (types is None,)",
    ),
    _fault(
        "types of the call before left",
        "same = None if batch.with_ids else (key, types is None)",
        "same = None if batch.with_ids else (key,)",
    ),
    _fault(
        "what a call with ids wrote left",
        "                    self._packed = None\n"
        "                    plan.inputs.copy_(packed, non_blocking=True)\n"
        "                    self._packed = same\n",
        "                    plan.inputs.copy_(packed, non_blocking=True)\n"
        "                    self._packed = same or self._packed\n",
    ),
    _fault(
        "what another recording wrote left",
        "        self._packed = None\n        self._memory.zero_()\n",
        "        self._memory.zero_()\n",
    ),
    _fault(
        "what a replay wrote left",
        "        self._packed = None\n        _, rows, ends, _ = self._rows(bucket)\n",
        "        _, rows, ends, _ = self._rows(bucket)\n",
    ),
    _fault("ends where indices are", "ends = memory[3 * tokens :", "ends = memory[4 * tokens :", _STAGING),
    _fault(
        "MPNet's holes packed",
        "extension is not None and family.relative_bias is None and",
        "extension is not None and",
        _STAGING,
    ),
    _fault(
        "the mask taken for types",
        "((ids, types), 1) if mask is None",
        "((ids, types), 0) if mask is None",
        _STAGING,
    ),
    _fault(
        "a view of a quick output",
        "*self.shape) if padded else self.hidden.clone()",
        "*self.shape) if padded else self.hidden",
        _PLANS,
    ),
    _fault(
        "a view of a quick pooler output",
        "None if self.pooled is None else self.pooled.clone()",
        "self.pooled",
        _PLANS,
    ),
    _fault(
        "padding not put back", "padded = self.indices is not None and not", "padded = False and not", _PLANS
    ),
    _fault(
        "indices not sent",
        "words = rows.whole.shape[0] - (rows.indices.shape[0] if dense else 0)",
        "words = rows.whole.shape[0] - rows.indices.shape[0]",
        _PLANS,
    ),
    _fault(
        "fields that are None are items",
        "            if value is not None:\n                attributes[name]",
        "            if True:\n                attributes[name]",
        _OUTPUTS,
    ),
)

SUITE = Suite(
    FAULTS,
    tests=(
        "tests/graphs", "-x", "-q", "-k",
        "not compile and not long_sequences and not test_bad and not sentence_encoder",
    ),
    timeout_s=600.0,
)  # fmt: skip
