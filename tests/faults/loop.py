"""Faults of the training loop, of its stream of examples, of its checkpoints and of its logs."""

from tests.support.mutation import Fault, Suite

_CHECKPOINTS = "fastbert/training/checkpoints.py"
_LOGS = "fastbert/training/logs.py"
_IDENTITY = "fastbert/training/identity.py"
_LOOP = "fastbert/training/loop.py"
_STATE = "fastbert/training/state.py"
_STREAM = "fastbert/training/stream.py"

FAULTS = (
    # the stream
    Fault(
        "an epoch's remainder is dropped",
        _STREAM,
        "                at += len(places)\n",
        "                at = end\n",
    ),
    Fault("all epochs in one order", _STREAM, '"order", number)', '"order")'),
    Fault("the seed is not in the order", _STREAM, "self.source.hash, self.seed,", "self.source.hash,"),
    Fault("the source is not in the order", _STREAM, "key_of(self.source.hash, ", "key_of("),
    Fault(
        "an example that begins at the end joins too",
        _STREAM,
        "np.searchsorted(epoch.begins, [begin, end])",
        'np.searchsorted(epoch.begins, [begin, end], "right")',
    ),
    Fault(
        "sizes not compared",
        _STREAM,
        "number < len(self.sizes) and self.sizes[number] != size",
        "False",
    ),
    Fault(
        "the parent does not learn sizes",
        _STREAM,
        "            stream.sizes[:] = sizes\n",
        "            pass\n",
    ),
    Fault(
        "a worker's error arrives wrapped",
        _STREAM,
        "            if not _travels(error):",
        "            if True:",
    ),
    Fault(
        "workers end by a signal to the group",
        _STREAM,
        'for name in ("SIGINT", "SIGTERM", "SIGHUP"):\n        if hasattr',
        'for name in ("SIGINT", "SIGHUP"):\n        if hasattr',
    ),
    Fault(
        "workers outlive their parent",
        _STREAM,
        "    threading.Thread(target=_end_with_parent, daemon=True).start()\n",
        "",
    ),
    # a step
    Fault(
        "a mean of the micro-batches' means",
        _LOOP,
        "share = batch.counts[name] * self.parallel.world / max(counts[name], 1)",
        "share = self.parallel.world / self.stages[self._stage].micro_batches",
    ),
    Fault(
        "the log has the mean of one micro-batch",
        _LOOP,
        "value = loss.detach().double() * batch.counts[name]",
        "value = loss.detach().double() * counts[name]",
    ),
    Fault(
        "weights of losses ignored",
        _LOOP,
        "loss * (self.module.weights.get(name, 1.0) * share)",
        "loss * share",
    ),
    Fault("lr_scale ignored", _LOOP, 'lr * group.get("lr_scale", 1.0)', "lr"),
    Fault("not clipped", _LOOP, "if most is not None and value > most:", "if False:"),
    Fault("clipped to twice as much", _LOOP, "most / (value + 1e-6)", "2 * most / (value + 1e-6)"),
    Fault("a gradient that is not finite passes", _LOOP, "if not math.isfinite(value):", "if False:"),
    Fault(
        "gradients of the step before stay",
        _LOOP,
        "        self.optimizer.zero_grad(set_to_none=True)\n        self.totals",
        "        self.totals",
    ),
    Fault(
        "clipped before the scale is taken out", _LOOP, "        self.scaler.unscale_(self.optimizer)\n", ""
    ),
    Fault("a scale that falls for ever", _LOOP, " and self.scaler.get_scale() > _LEAST_SCALE", ""),
    Fault("one mask for all micro-batches", _LOOP, '"step", self.step, j))', '"step", self.step))'),
    Fault("one mask for all steps", _LOOP, '"step", self.step, j))', '"step", j))'),
    Fault(
        "the schedule begins anew with the stage",
        _LOOP,
        "stage.schedule(stage.first_step + self.step",
        "stage.schedule(self.step",
    ),
    # stages
    Fault(
        "a stage begins at its source's first micro-batch",
        _LOOP,
        "begin = stage.first_micro_batch + done",
        "begin = done",
    ),
    Fault(
        "sizes of the source before are saved for the next",
        _LOOP,
        "            self._stream = self._stream_of(number)\n"
        "            if number != self._stage:\n"
        "                self._enter(number)\n"
        "                if self.stages[number].enter is not None:\n"
        "                    saved = self._save(logs)\n",
        "            if number != self._stage:\n"
        "                self._enter(number)\n"
        "                if self.stages[number].enter is not None:\n"
        "                    saved = self._save(logs)\n"
        "            self._stream = self._stream_of(number)\n",
    ),
    Fault(
        "the optimizer never begins anew",
        _LOOP,
        "        elif stage.fresh_optimizer:\n",
        "        elif False:\n",
    ),
    Fault(
        "a resumed stage has groups of its own",
        _LOOP,
        "            number -= 1  # that stage's goes on\n",
        "            break\n",
    ),
    Fault(
        "growth is not saved",
        _LOOP,
        "                    saved = self._save(logs)\n            stage",
        "                    pass\n            stage",
    ),
    Fault("the new module is not filled", _LOOP, "            stage.enter(source, module)\n", ""),
    # resume
    Fault("moments are not loaded", _STATE, "                if own:\n", "                if False:\n"),
    Fault("the scaler is not loaded", _LOOP, 'if state.get("scaler"):', "if False:"),
    Fault("totals begin anew", _LOOP, "key: state.get(key, 0) for key", "key: 0 for key"),
    Fault(
        "heads are not loaded",
        _STATE,
        "value = heads.get(name, values.get(id(p)))",
        "value = values.get(id(p), p.data)",
    ),
    Fault("another seed goes on", _LOOP, "                **self._decisive(),\n", ""),
    Fault("a changed config goes on", _IDENTITY, "        if was != now:", "        if False:"),
    Fault(
        "damage of all checkpoints begins anew",
        _LOOP,
        "if rejected and not found:",
        "if False:",
    ),
    Fault(
        "a signal that is not forgotten",
        _LOOP,
        "        self._signal = None\n        if threading",
        "        if threading",
    ),
    Fault(
        "a second signal waits too",
        _LOOP,
        "            signal.signal(number, before[number])  # a second one does what it did before\n",
        "",
    ),
    Fault(
        "a signal ends the run without a checkpoint",
        _LOOP,
        "if saved is None or saved.name != checkpoints.name_of(self.step):",
        "if False:",
    ),
    Fault(
        "the last line is lost",
        _LOOP,
        "        if not last:  # nothing was left to do\n",
        "        if False:\n",
    ),
    # checkpoints
    Fault(
        "written in its place",
        _CHECKPOINTS,
        'folder = run / f".saving-{place.name}-{own_tag()}"',
        "folder = place",
    ),
    Fault("digests not compared", _CHECKPOINTS, "if _digest(path) != expected:", "if False:"),
    Fault(
        "missing files not seen", _CHECKPOINTS, "            if not path.is_file():", "            if False:"
    ),
    Fault(
        "the manifest of another step",
        _CHECKPOINTS,
        "if type(step) is not int or name_of(step) != folder.name:",
        "if False:",
    ),
    Fault(
        "a damaged one is kept",
        _CHECKPOINTS,
        "for old in steps_in(run) if old < step]",
        "for old in steps_in(run)]",
    ),
    Fault("one too many is kept", _CHECKPOINTS, "len(older) - keep + 1", "len(older) - keep"),
    Fault(
        "older ones go first",
        _CHECKPOINTS,
        "    place = run / name_of(step)\n    folder",
        "    place = run / name_of(step)\n    for old in steps_in(run)[: 1 if keep == 1 else 0]:\n"
        "        _remove(run, old)\n    folder",
    ),
    Fault(
        "files are not flushed",
        _CHECKPOINTS,
        "        os.fsync(file.fileno())\n        return",
        "        return",
    ),
    Fault("the manifest is not flushed", _CHECKPOINTS, "            _flushed(folder / MANIFEST)\n", ""),
    Fault(
        "the name is not flushed",
        _CHECKPOINTS,
        "            os.rename(folder, place)\n            _flush_folder(run)\n",
        "            os.rename(folder, place)\n",
    ),
    Fault(
        "the folders are not flushed",
        _CHECKPOINTS,
        "                _flush_folder(inner)\n",
        "                pass\n",
    ),
    Fault(
        "the run's own name is not flushed",
        _CHECKPOINTS,
        "            _flush_folder(made.parent)\n",
        "            pass\n",
    ),
    Fault(
        "a full disk leaves the folder",
        _CHECKPOINTS,
        "            shutil.rmtree(folder, ignore_errors=True)\n    except",
        "            pass\n    except",
    ),
    Fault(
        "removed in place",
        _CHECKPOINTS,
        "        os.rename(run / name_of(step), hidden)\n",
        "        hidden = run / name_of(step)\n",
    ),
    Fault(
        "a damaged one is in the way",
        _CHECKPOINTS,
        "            if place.exists():  # a damaged one: a whole one would have been read\n"
        "                _remove(run, step)\n",
        "",
    ),
    Fault(
        "leftovers of the living removed",
        _CHECKPOINTS,
        "        if not is_dead(tag) and not tag.endswith(own):",
        "        if False:",
    ),
    Fault("a container's leftovers stay", _CHECKPOINTS, " and not tag.endswith(own)", ""),
    Fault(
        "leftovers stay", _LOOP, "                checkpoints.clear(self.output)\n", "                pass\n"
    ),
    Fault(
        "two runs at once",
        _CHECKPOINTS,
        "            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            pass\n",
    ),
    Fault("two runs of one process at once", _CHECKPOINTS, "    if place in _held:", "    if False:"),
    Fault(
        "only the owner reads",
        _CHECKPOINTS,
        "                path.chmod(readable)\n",
        "                pass\n",
    ),
    # logs
    Fault("lines after the checkpoint stay", _LOGS, "                file.truncate(len(whole))\n", ""),
    Fault(
        "one line too many is cut off",
        _LOGS,
        "file.truncate(len(whole))",
        "file.truncate(max(0, len(whole) - 9))",
    ),
    Fault("a log filled up with zeros", _LOGS, "file.truncate(len(whole))", "file.truncate(kept)"),
    Fault("a line is glued to a stump", _LOGS, 'content[: content.rfind(b"\\n") + 1]', "content"),
    Fault(
        "lines that are missing are not told",
        _LOGS,
        "            if len(content) < kept:",
        "            if False:",
    ),
    Fault(
        "a changed log is not told",
        _LOGS,
        "elif digests and digests.get(path.name) != self._digests[path].hexdigest():",
        "elif False:",
    ),
    Fault("the digest of half a log", _LOGS, "self._digests[path].update(line[:written])", "pass"),
    Fault("a log through a link", _LOGS, "            check_plain(path)\n", ""),
    Fault(
        "half a line written",
        _LOGS,
        "line = line[written:]",
        "line = line[max(written, 1 << 20) :]",
    ),
    Fault("a run begins among other files", _CHECKPOINTS, "    if foreign:\n", "    if False:\n"),
    Fault(
        "files that the manifest does not list",
        _CHECKPOINTS,
        'if path.suffix in (".json", ".safetensors") and name not in {*entries, MANIFEST}:',
        "if False:",
    ),
    Fault("NumPy's version does not matter", _IDENTITY, '        "numpy": np.__version__,\n', ""),
    Fault(
        "any number of processes",
        "fastbert/training/parallel.py",
        "int(text) >= least and",
        "True and",
    ),
    Fault("any state goes on", _LOOP, "            self._check_state(found, state)\n", "            pass\n"),
    Fault(
        "a refused config binds",
        _LOOP,
        "            checkpoints.check_begun(self.output)\n",
        "            checkpoints.check_begun(self.output)\n            replace(path, b'{}')\n",
    ),
    Fault(
        "lines wait in a buffer", _LOGS, "                os.fsync(file.fileno())\n", "                pass\n"
    ),
    Fault("the checkpoint's own step is purged", _LOGS, "purge_step=step + 1)", "purge_step=step or None)"),
    Fault("events wait in a buffer", _LOGS, "            self._board.flush()\n", "            pass\n"),
    Fault(
        "a full disk is not named",
        _LOGS,
        '        raise CheckpointError(f"{path}: could not be written: {cause(error)}") from error',
        "        raise",
    ),
)

SUITE = Suite(
    FAULTS,
    tests=(
        *(f"tests/training/test_{name}.py" for name in ("stream", "logs", "loop", "checkpoints", "kills")),
        *("-k", "not random_moments and not every_file_operation and not every_writing_operation"),
    ),
)
