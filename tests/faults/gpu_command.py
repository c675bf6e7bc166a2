"""Faults of `make gpu`: its parts, its archive, what is merged, and who served a row."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_GPU = "bench/gpu/prove.py"
_RESULTS = "bench/gpu/records.py"
_SERVED = "bench/lib/served.py"
_PRECOMPILE = "bench/gpu/precompile.py"
_TOOLS = "bench/gpu/tools.py"
_CHECKS = "bench/gpu/checks.py"
_GOLDEN = "bench/gpu/golden.py"
_VERDICTS = "fastbert/testing/verdicts.py"


def _fault(file: str, name: str, old: str, new: str) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    _fault(_GPU, "a part of more seconds than its budget", 'Step("training", 140, 40,', 'Step("training", 160, 40,'),
    _fault(_GPU, "the first part without its proof", '        Step("correctness", 120, 30, check("correctness")),\n', ""),
    _fault(_GPU, "tuned kernels timed unchecked", '        Step("selfcheck-tuned", 45, 10, selfcheck),\n', ""),
    _fault(_GPU, "always part a", "return list(PARTS[part])", 'return list(PARTS["a"])'),
    _fault(_GPU, "archives in the archive", ' and path.suffix != ".tar":', ":"),
    _fault(_GPU, "an archive at the end only", '        log.say(summary(record))\n        pack(run.out, f"run-{part}.tar")\n', "        log.say(summary(record))\n"),
    _fault(_GPU, "an archive without the end", '    pack(run.out, f"run-{part}.tar")\n    return', "    return"),
    _fault(_GPU, "the extension not built", '[] if run.tiny else ["--build"]', "[]"),
    _fault(_RESULTS, "a dry run of a later part merged", "        for each in environments:\n", "        for each in environments[:1]:\n"),
    _fault(_RESULTS, "two devices mixed", "        if len(devices) > 1:\n", "        if False:\n"),
    _fault(_RESULTS, "rows of the last part alone", 'name: found[name] + run[name] for name in ("rows", "steps", "torn")', 'name: run[name] for name in ("rows", "steps", "torn")'),
    _fault(_RESULTS, "the first part's date", "found |= run | {", "found = run | found | {"),
    _fault(_RESULTS, "archives not opened", "            if path.is_file():\n                folder", "            if False:\n                folder"),
    _fault(_RESULTS, "rows of other backends not marked", 'return " †" if served.others', 'return "" if served.others'),
    _fault(_RESULTS, "the mark not explained", "return [f\"† not by the first backend of every op: {others}.\", \"\"] if others else []", "return []"),
    _fault(_RESULTS, "kernels of a CPU's run taken for proven", '        runs = [(path, data) for path, data in runs if data["environment"]["device_type"] == "cuda"]\n'.lstrip(), ""),
    _fault(_RESULTS, "the matrix not written", "made = {args.readme: sections(args.results), args.matrix: proven(args.results)}", "made = {args.readme: sections(args.results)}"),
    _fault(_VERDICTS, "one good case proves a kernel", 'return mine == {"ok"}', 'return "ok" in mine'),
    _fault(_VERDICTS, "any check proves a kernel", 'if row.get("step") == "correctness" and', "if"),
    _fault(_VERDICTS, "another dtype's rows prove a kernel", "{backend}-{_TAGS.get(name, name)}-\"", "{backend}-\""),
    _fault(_SERVED, "peers have backends", "    if not candidate.startswith(OURS):\n        return {}\n", ""),
    _fault(_SERVED, "kinds of calls not told apart", "for kind in dispatch.call_kinds(op, device.type):", 'for kind in ("",):'),
    _fault(_SERVED, "the last backend taken for the first", "device_type, dtypes[tag])[0]", "device_type, dtypes[tag])[-1]"),
    _fault(_SERVED, "any backend counts as the first", "and not {backend, first} <= set(dispatch.SELF_CHECKED)", "and not {first} <= set(dispatch.SELF_CHECKED)"),
    _fault(_SERVED, "the kernel behind is told of", "        if backend != first and not {backend, first} <= set(dispatch.SELF_CHECKED):", "        if backend != first:"),
    _fault(_SERVED, "float32 checked while timed", "dtypes=(torch.bfloat16, torch.float32)", "dtypes=(torch.bfloat16,)"),
    _fault(_SERVED, "autocast's float32 ops not told", '"bf16 autocast": (BF16, FP32)', '"bf16 autocast": (BF16,)'),
    _fault(_PRECOMPILE, "training not compiled", "loss_of(module, inputs, autocast=True).backward()", "loss_of(module, inputs, autocast=True)"),
    _fault(_PRECOMPILE, "the large model not compiled", 'for model in ("base", "large") for batch', 'for model in ("base",) for batch'),
    _fault(_PRECOMPILE, "a unit's failure not told", "            bad += process.exitcode != 0\n", ""),
    _fault(_PRECOMPILE, "a failed build not told", "        bad += status != 0\n", ""),
    _fault(_PRECOMPILE, "a unit that hangs is waited for", "if process.exitcode is None and time.monotonic() < end:", "if process.exitcode is None:"),
    _fault(_TOOLS, "nanoseconds taken for microseconds", '"nsecond": 1e-3', '"nsecond": 1.0'),
    _fault(_TOOLS, "units taken for values", "table[start : start + 3], strict=False", "table[start : start + 2] + [table[start + 1]], strict=False"),
    _fault(_TOOLS, "forbidden counters not told", 'if "ERR_NVGPUCTRPERM" in text:', "if False:"),
    _fault(_GOLDEN, "the recorded inputs not taken", '                value.copy_(kept[f"in/{each}"])\n', "                pass\n"),
    _fault(_GOLDEN, "gradients not recorded", "dispatch.has_backward(backend, case.op)\n    with", "False\n    with"),
    _fault(_GOLDEN, "this machine held against itself", '*_, reason = testing.compare(there,', '*_, reason = testing.compare(here.get(each, there),'),
    _fault(_GOLDEN, "bits not compared", "array(there) == array(here[each])", "True"),
    _fault(_GOLDEN, "launches in no order", "        found.append((tuple(grid), kernel))", "        found.insert(0, (tuple(grid), kernel))"),
    _fault(_GOLDEN, "the hook stays", "        JITFunction.run = real\n", "        pass\n"),
    _fault(_GOLDEN, "a case that is gone is passed over", '            yield at, False, "this checkout has no such case"\n', ""),
    _fault(_GOLDEN, "code of one kind for both", 'files[f"{folder}/code.{kind}"] =', 'files[f"{folder}/code.ptx"] ='),
    _fault(_CHECKS, "the profiler goes on without time", "        if seconds < 6:\n", "        if False:\n"),
)  # fmt: skip

SUITE = Suite(
    FAULTS,
    (
        "tests/bench/test_gpu_command.py",
        "tests/bench/test_gpu_results.py",
        "tests/bench/test_golden.py",
        "tests/bench/test_served.py",
        "tests/bench/test_gpu_checks.py",
        "tests/testing/test_warmup.py",
        "-k",
        "(gpu_command and not dry and not hang and not interrupted) or gpu_results or golden or served or profil "
        "or known_of_each_kernel",
    ),
)
