"""Faults of the lint of machine code, which its listings by hand must catch."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite


def _flow(name: str, old: str, new: str) -> Fault:
    return Fault(name, "tests/support/sass.py", old, new)


def _registers(name: str, old: str, new: str) -> Fault:
    return Fault(name, "tests/support/sass_registers.py", old, new)


FAULTS = (
    # paths
    _flow("branches not followed", "after = [targets[k]] if k in targets else []", "after = []"),
    _flow("what follows a branch not looked at", "            after.append(k + 1)\n        found", "            after = after or [k + 1]\n        found"),
    _flow("a branch by a uniform predicate always taken", "len(i.operands) == 1)", "len(i.operands) >= 1)"),
    _flow("a predicated exit ends all threads", "if not (leaves and i.unconditional)", "if not leaves"),
    _flow("meeting places forgotten", "            own = meeting[i.operands[-1]]", "            own = []"),
    _flow("meeting places of another barrier", "            own = meeting[i.operands[-1]]", "            own = [t for ts in meeting.values() for t in ts]"),
    _flow("every region of a barrier closed", "after += [k + 1] if k + 1 in own else own", "after += own"),
    _flow("returns forgotten", "            after += returns", "            after += []"),
    _flow("jumps to nowhere passed over", "            if int(jump, 16) not in places:", "            if int(jump, 16) not in places and False:"),
    _flow("functions run into each other", "kernels.append((named[1], []))", "kernels.append((named[1], [] if not kernels else kernels[-1][1]))"),
    # waits
    _flow("the most waited path counts where two meet", "min(n, states[s].get(j, MOST))", "max(n, states[s].get(j, 0))"),
    _flow("a wait under a predicate waits", '"DEPBAR" in i.parts and i.unconditional', '"DEPBAR" in i.parts'),
    _flow("an ordinary barrier waits", 'i.base == "WARPGROUP" and "DEPBAR" in i.parts', '"DEPBAR" in (i.base, *i.parts)'),
    _flow("every wait waits for all", "if n <= may_run}", "if n <= 0}"),
    _flow("a wait waits for open groups too", "if n <= may_run}", "if 0 < n <= may_run}"),
    _flow("groups never end", "if p.closes and", "if p.closes is None and"),
    _registers("other barriers count as gsb0", 'not in (None, "gsb0")', "is False"),
    # rules
    _flow("writes of A forgotten", "(j, writes & other.left)", "(j, 0)"),
    _flow("no sum goes on in its registers", "chained = own and", "chained = own and False and"),
    _flow("sums of another shape go on", "(own.accumulators, own.shape) == (other.accumulators, other.shape)", "own.accumulators & other.accumulators"),
    _flow("a sum may be its own left operand", "(own.left if chained else reads)", "(0 if own else reads)"),
    _flow("only the first product's registers named", "                    every |= registers", "                    every = every or registers"),
    # registers
    _registers("A has two registers", "A_REGISTERS = 4", "A_REGISTERS = 2"),
    _registers("A has eight registers", "A_REGISTERS = 4", "A_REGISTERS = 8"),
    _registers("float16 accumulators as wide as float32's", 'if i.parts[2] == "F16"', 'if i.parts[2] == "F64"'),
    _registers("a load writes one register", "        count = _width(parts)", "        count = 1"),
    _registers("LDSM writes one register", "    elif base == \"LDSM\":\n        count = _matrices(parts)", "    elif base == \"LDSM\":\n        count = 1"),
    _registers("an atomic's predicate is its destination", 're.fullmatch(r"P[\\dT]", i.operands[0]) else 0', 're.fullmatch(r"P[\\dT]", "R0") else 0'),
    _registers("an address is one register", "2 if wide else 1)", "1)"),
    _registers("uniform registers taken for registers", 're.match(r"[-~!|]*R', 're.match(r"[-~!|U]*R'),
    _registers("CS2R.32 writes two registers", 'count = 1 if "32" in parts else 2', "count = 2"),
    _registers("a conversion's source taken for its result", "count = _converted(parts)[0]", "count = _converted(parts)[1]"),
    _registers("a wide product writes one register", 'or (base == "IMAD" and "WIDE" in parts):', "or False:"),
    _registers("a store of 16 bytes reads one register", "    if base in _STORES | _ATOMICS:\n        return _width(parts)", "    if base in _STORES | _ATOMICS:\n        return 1"),
)  # fmt: skip

BY_HAND = (
    "left_operand or shared_memory or paths or waits or accumulators or jump or finding or listing or unknown"
)
SUITE = Suite(FAULTS, ("tests/triton/test_sass.py", "-k", f"({BY_HAND}) and not wait_that and not its_waits"))
