"""Faults of first self-checks: their process, their verdicts, their times."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_PROVING = "fastbert/testing/proving.py"
_PROCESSES = "fastbert/testing/processes.py"
_CHECKING = "fastbert/testing/checking.py"
_SPEED = "fastbert/testing/speed.py"
_CLOCK = "fastbert/testing/device_time.py"
_VERDICTS = "fastbert/testing/verdicts.py"
_KEYS = "fastbert/testing/verdict_keys.py"
_SERVING = "fastbert/testing/serving.py"
_WARMUP = "fastbert/testing/warmup.py"


def _fault(file: str, name: str, old: str, new: str) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # first what is caught fastest: `make test` plants one
    _fault(_VERDICTS, "a death overrides a verdict", "if found is not None and found.outcome != KILLED:\n        return found", "if found is not None and found.passed:\n        return found"),
    # who checks, and when
    _fault(_PROVING, "a death is tried again for ever", "verdict.deaths < MOST_DEATHS and apart", "apart"),
    _fault(_PROVING, "a death is tried again inside", "verdict.deaths < MOST_DEATHS and apart", "verdict.deaths < MOST_DEATHS"),
    _fault(_PROVING, "a death counts as a failure", "return verdict.outcome == KILLED and", "return False and"),
    _fault(_PROVING, "what is undecided counts", "if verdict.outcome != UNDECIDED:", "if verdict is not None:"),
    _fault(_PROVING, "a device that admits no process tried again", "            _alone.add(device)\n", "            pass\n"),
    _fault(_PROVING, "what the process found is forgotten", "found = _verdicts.get(key) or _found.get(key)", "found = _verdicts.get(key)"),
    _fault(_PROVING, "a slower kernel is warned of", "if not verdict.passed and verdict.outcome != SLOWER:", "if not verdict.passed:"),
    _fault(_PROVING, "only the kernel in use is checked", "                units += [each for each in (*_lower(unit, device), unit) if each not in units]\n", "                pass\n"),
    _fault(_PROVING, "kernels of all dtypes are checked", "if dtype != first.dtype or unit in units:", "if unit in units:"),
    _fault(_PROVING, "known kernels are checked again", "if is_due(known_verdict(name, op, device, dtype), device):", "if True:"),
    _fault(_PROVING, "told every second", "if seconds > checking.SLOW_SECONDS and not told:", "if seconds > checking.SLOW_SECONDS:"),
    _fault(_PROVING, "the lower kernel is checked after", "units = [*_lower(first, device), first]", "units = [first, *_lower(first, device)]"),
    _fault(_PROVING, "the lower kernel is not checked here", "        _verdict(lower.backend, lower.op, device, lower.dtype)\n", "        pass\n"),
    _fault(_PROVING, "what ranks higher is checked before", "ranking.index(name) > ranking.index(other)", "ranking.index(name) != ranking.index(other)"),
    _fault(_PROVING, "a known lower kernel is checked again", "and below and is_due(known_verdict(name, unit.op, device, dtype), device):", "and below:"),
    _fault("fastbert/runtime/dispatch.py", "the next function is its own", "        if name == without:\n            continue\n", ""),
    # the process
    _fault(_PROCESSES, "a process that checks starts another", "and not frozen and _MARK not in os.environ", "and not frozen"),
    _fault(_PROCESSES, "a frozen program is started again", "and python and not frozen and", "and python and"),
    _fault(_PROCESSES, "any program taken for Python", "and python and not frozen and", "and not frozen and"),
    _fault(_PROCESSES, "a kill counts as the kernel's failure", '"outside": -self.end() in _FROM_OUTSIDE', '"outside": False'),
    _fault(_PROCESSES, "a crash counts as a kill", '"outside": -self.end() in _FROM_OUTSIDE', '"outside": True'),
    _fault(_PROCESSES, "deaths are not counted", "found = verdicts.load(key) or replace(found, outcome=KILLED, deaths=1)", "found = replace(found, outcome=KILLED, deaths=1)"),
    _fault(_PROCESSES, "a crash is not kept", "            verdicts.forget(key)\n            verdicts.store(key, found)\n", "            verdicts.forget(key)\n"),
    _fault(_PROCESSES, "the kernel is not compared", 'if message is None or message.get("key") != verdicts.stem(key):', "if message is None:"),
    _fault(_PROCESSES, "the device is not compared", 'if _uuid(device) != wanted["uuid"]:', "if False:"),
    _fault(_PROCESSES, "the process outlives its parent", "    _end_with(os.getppid())\n", ""),
    _fault(_PROCESSES, "Ctrl-C blames the kernel", "            verdicts.forget(self.begun)\n\n    def end", "            pass\n\n    def end"),
    _fault(_PROCESSES, "a failure found meanwhile is overridden", "if found.passed and kept is not None and kept.outcome in (FAILED, SLOWER):", "if False:"),
    _fault(_PROCESSES, "times are lost on the way", 'times=verdicts.times_of(message["times"])', "times=()"),
    _fault(_PROCESSES, "the user's folder shadows modules", "sys.path[:1] = []; ", ""),
    _fault(_PROCESSES, "a broken process goes on", 'return found, not message["broken"]', "return found, True"),
    # the verdict
    _fault(_CHECKING, "a slower kernel passes", "reason = speed.why_never(op, device.type, times)", "reason = None"),
    _fault(_CHECKING, "slower is taken for wrong", 'outcome = SLOWER if reason else ""', 'outcome = ""'),
    _fault(_CHECKING, "an error of the machine is kept", "outcome = UNDECIDED if compiled and not lost else FAILED", "outcome = FAILED"),
    _fault(_CHECKING, "a broken context is not kept", "outcome = UNDECIDED if compiled and not lost else FAILED", "outcome = UNDECIDED if compiled else FAILED"),
    _fault(_VERDICTS, "a death is final", "if found is not None and not found.passed and found.outcome != KILLED:", "if found is not None and not found.passed:"),
    _fault(_VERDICTS, "deaths begin anew", "deaths = len(dead) + (found.deaths if found else 0)", "deaths = len(dead)"),
    _fault(_VERDICTS, "any outcome believed", "or outcome not in OUTCOMES:", "or outcome is None:"),
    _fault(_VERDICTS, "an outcome that contradicts believed", "    if (outcome == PASSED) is not (reason is None):\n        return None\n", ""),
    _fault(_VERDICTS, "a mean of ratios", "return math.exp(sum(logs) / len(logs)) if logs else None", "return sum(map(math.exp, logs)) / len(logs) if logs else None"),
    _fault(_KEYS, "tuned configs do not count", '"tuned": _tuned(op, backend, name, dtype),', '"tuned": "",'),
    _fault("kernels/tuning.py", "tuned configs of other dtypes count", "if key.split()[0] == first}", "if first}"),
    _fault("kernels/tuning.py", "tuned configs of other ops count", "for kernel in KERNELS.get(op, ())}", "for kernels in KERNELS.values() for kernel in kernels}"),
    # the times
    _fault(_SPEED, "only one backend is timed", "with dispatch.trial(**self.pins), torch", "with dispatch.trial(), torch"),
    _fault(_SPEED, "other calls are timed", "    if backend not in ranking:\n        return None\n", "    if backend not in ranking:\n        ranking = (backend, *ranking)\n"),
    _fault(_SPEED, "kernels are timed beside aten alone", "if verdict is None or why_not(verdict, case.op, kind, device.type) is not None:", "if True:"),
    _fault(_SPEED, "timed beside a kernel that does not serve", "if verdict is None or why_not(verdict, case.op, kind, device.type) is not None:", "if verdict is None:"),
    _fault(_SPEED, "timed beside a kernel that serves in inference alone", "if verdict is None or why_not(verdict, case.op, kind, device.type) is not None:", "if verdict is None or not verdict.passed:"),
    _fault(_SPEED, "a lack of memory is a failure", "with contextlib.suppress(torch.OutOfMemoryError):", "with contextlib.nullcontext():"),
    _fault(_SPEED, "backward is not timed", "            yield case, True\n", "            yield case, False\n"),
    _fault(_SPEED, "compilation is timed", "        self._timed(self.clock.once, 2)\n", ""),
    _fault(_SPEED, "the host's time is taken for the device's", "DeviceClock() if self.on_gpu else _HostClock()", "_HostClock()"),
    _fault(_SPEED, "more calls than the host enqueues in time", "            wanted.append(int(ENQUEUE_MS / max(warm.host_ms, 1e-6)))\n", "            pass\n"),
    _fault(_SPEED, "the first spin is the shortest", "        self.clock.spin_for(warm.host_ms * self.count)\n", ""),
    _fault(_SPEED, "the host's time is of no use", "if self.on_gpu else None\n        return", "if not self.on_gpu else None\n        return"),
    # what is judged apart
    _fault(_VERDICTS, "all times count for each kind of calls", "for t in times if passes in (\"\", t.passes)]", "for t in times]"),
    _fault(_SPEED, "every op is judged in training apart", "if apart else (\"\",)", "if True else (\"\",)"),
    _fault(_SPEED, "no op is judged in training apart", "if apart else (\"\",)", "if False else (\"\",)"),
    _fault(_SPEED, "training is judged by forward", "TRAINING if word == TRAINING else _of_rows(word) for word", "_of_rows(word) for word"),
    _fault(_SPEED, "training with an activation is judged by forward", "TRAINING if word == TRAINING else _of_rows(word) for word", "TRAINING if kind == TRAINING else _of_rows(word) for word"),
    _fault("fastbert/ops/linear.py", "linear's forward of training is served as in inference", "forward_of(args[3], args[5], args[0]", "forward_of(args[3], False, args[0]"),
    _fault("fastbert/ops/linear.py", "linear's backward is served as inference", "else \"linear_bwd activation training\"", "else \"linear_bwd activation\""),
    _fault("fastbert/ops/feed_forward.py", "feed_forward's forward of training is served as in inference", "dispatch.call(_FORWARD_OF_TRAINING, args[0]", "dispatch.call(\"feed_forward_fwd\", args[0]"),
    _fault("fastbert/ops/layer_norm.py", "layer_norm's forward of training is served as in inference", "dispatch.call(_FORWARD_OF_TRAINING, key", "dispatch.call(\"layer_norm_fwd\", key"),
    _fault("fastbert/ops/layer_norm.py", "layer_norm's compiled forward of training is served as in inference", "_FORWARD_OF_TRAINING if save else", "_FORWARD_OF_TRAINING if False else"),
    _fault("fastbert/runtime/dispatch.py", "a kind is one word", "return \"\", *sorted({\" \".join(word for word in words if word != \"half\") for words in keys} - {\"\"})", "return \"\", *sorted({word for words in keys for word in words if word != \"half\"})"),
    _fault("fastbert/runtime/dispatch.py", "training is ranked by a line of its own alone", "range(len(words), -1, -1)", "(len(words), 0)"),
    # few rows apart
    _fault("fastbert/runtime/dispatch.py", "32 rows are not few", "        if rows <= most:\n", "        if rows < most:\n"),
    _fault("fastbert/ops/linear.py", "linear's few rows are not told", "f\"linear_fwd activation{dispatch.rows_kind(rows)}\"", "\"linear_fwd activation\""),
    _fault("fastbert/ops/linear_norm.py", "linear_norm's few rows are not told to pays", "op = f\"linear_norm{dispatch.rows_kind(x.shape[0])}\"", "op = \"linear_norm\""),
    _fault("fastbert/ops/linear_norm.py", "linear_norm's few rows are not told", "f\"linear_norm_fwd{dispatch.rows_kind(inputs.x.shape[0])}\"", "\"linear_norm_fwd\""),
    _fault(_SPEED, "few rows are judged with the rest", "apart = [_of_rows(word) for word in dispatch.ROWS if word in words]", "apart = []"),
    _fault(_SPEED, "few rows are not timed", "(FEWEST, *SIZES) if by_rows else SIZES", "SIZES"),
    _fault(_SPEED, "few rows are timed for every op", "(FEWEST, *SIZES) if by_rows else SIZES", "(FEWEST, *SIZES)"),
    _fault(_SPEED, "a case is timed twice", "if (case.id, passes) in found or (training", "if (training"),
    _fault(_SPEED, "few rows are timed in training", "or (training and lengths is FEWEST):", "or False:"),
    _fault(_SPEED, "what models call instead is not timed", "if case.parts and not training:", "if False:"),
    _fault(_SPEED, "what models call instead is the op", "functools.partial(case.in_parts, **inputs)", "functools.partial(case.call, **inputs)"),
    _fault(_PROVING, "what models call instead is checked after", "for op in error_rule.parts(unit.op):", "for op in ():"),
    _fault(_SPEED, "slower once is slower", "if reasons and None not in reasons else None", "if any(reasons) else None"),
    _fault(_PROVING, "the kind of call is not asked", "speed.why_not(verdict, op, kind, device.type) is None", "verdict.passed"),
    _fault(_SERVING, "the kind of call is not shown", "UNCHECKED if due else speed.why_not(verdict, op, kind, device.type)", "UNCHECKED if due else verdict.reason"),
    _fault(_SERVING, "what does not serve is not told", "            found += \" (does not serve)\"\n", "            pass\n"),
    _fault("fastbert/runtime/dispatch.py", "the kind is not told to the prover", ".is_proven(name, op, device, dtype, kind)", ".is_proven(name, op, device, dtype)"),
    _fault("fastbert/runtime/dispatch.py", "a function's kind of call is lost", "_serving(f\"{op}_fwd {kind}\".rstrip(), device, dtype)", "_serving(f\"{op}_fwd\", device, dtype)"),
    _fault("fastbert/ops/attention.py", "forward of training is served as in inference", "dispatch.call(_FORWARD_OF_TRAINING, inputs.q", "dispatch.call(\"attention_fwd\", inputs.q"),
    _fault("fastbert/ops/attention.py", "a compiled forward of training is served as in inference", "save_bits, table, differentiable)", "save_bits, table, False)"),
    _fault("fastbert/ops/attention.py", "backward is served as inference", "_FORWARD_OF_TRAINING, _BACKWARD = \"attention_fwd training\", \"attention_bwd training\"", "_FORWARD_OF_TRAINING, _BACKWARD = \"attention_fwd training\", \"attention_bwd\""),
    _fault("fastbert/ops/attention_places.py", "places of inference in training", "\"attention training\" if torch.is_grad_enabled() else \"attention\"", "\"attention\""),
    # the device's clock
    _fault(_CLOCK, "launches are timed", "launch_bound = begin.query()", "launch_bound = False"),
    _fault(_CLOCK, "asked before the calls are enqueued", "        run(count)\n        host_ms = (time.perf_counter() - start) * 1e3\n        launch_bound = begin.query()\n", "        launch_bound = begin.query()\n        run(count)\n        host_ms = (time.perf_counter() - start) * 1e3\n"),
    _fault(_CLOCK, "the spin does not grow", "self.spin_ms = min(MOST_SPIN_MS, max(2 * self.spin_ms, MARGIN * host_ms))", "pass"),
    _fault(_CLOCK, "the spin grows without end", "min(MOST_SPIN_MS, max(LEAST_SPIN_MS, MARGIN * host_ms))", "max(LEAST_SPIN_MS, MARGIN * host_ms)"),
    _fault(_CLOCK, "as many calls although the queue is full", "                count //= 2\n", "                pass\n"),
    _fault(_CLOCK, "fewer calls than asked for", "elif fewer and count > 1:", "elif count > 1:"),
    _fault(_CLOCK, "the spin counts", "        torch.cuda._sleep(int(self.spin_ms * CYCLES_PER_MS))\n        begin.record()\n", "        begin.record()\n        torch.cuda._sleep(int(self.spin_ms * CYCLES_PER_MS))\n"),
    _fault(_CLOCK, "cycles of a clock ten times as slow", "CYCLES_PER_MS = 2_000_000", "CYCLES_PER_MS = 200_000"),
    _fault(_SPEED, "slower is faster", "if ratio is None or ratio <= SLOWER:", "if ratio is None or ratio >= SLOWER:"),
    _fault(_SPEED, "every difference counts", "SLOWER = 1.03", "SLOWER = 1.0"),
    # what users see
    _fault(_SERVING, "a slower kernel is shown as failed", "verdict.outcome if verdict.outcome in (SLOWER, KILLED)", "verdict.outcome if verdict.outcome in (KILLED,)"),
    _fault(_SERVING, "a death is shown as final", "due = proving.is_due(verdict, device)", "due = verdict is None"),
    _fault(_WARMUP, "warmup does not try a death again", "if proving.is_due(found, device):", "if found is None:"),
    _fault("fastbert/cli/warmup.py", "a slower kernel fails the command", "row.outcome in (PASSED, SLOWER) for row", "row.outcome == PASSED for row"),
    _fault("fastbert/runtime/dispatch.py", "a trial keeps another trial's choice", "        if before is None:\n            del _trial.pins, _trial.resolved\n        else:\n            _trial.pins, _trial.resolved = before, {}", "        if before is None:\n            del _trial.pins\n        else:\n            _trial.pins = before"),
)  # fmt: skip

SUITE = Suite(
    FAULTS,
    (
        *(
            f"tests/testing/test_{name}.py"
            for name in ("verdicts", "processes", "warmup", "speed", "device_time", "error_rule")
        ),
        "tests/runtime/test_first_use.py",
        "tests/runtime/test_dispatch.py",
    ),
    timeout_s=600.0,
)
