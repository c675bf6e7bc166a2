"""Faults of the lint of machine code, which its listings by hand must catch."""

from tests.support.mutation import faults_of, interpreted

_flow = faults_of("tests/support/sass.py")
_registers = faults_of("tests/support/sass_registers.py")

FAULTS = (
    # paths
    _flow("branches not followed", "after = [targets[k]] if k in targets else []", "after = []"),
    _flow("a branch by a uniform predicate always taken", "len(i.operands) == 1)", "len(i.operands) >= 1)"),
    _flow("a predicated exit ends all threads", "if not (leaves and i.unconditional)", "if not leaves"),
    _flow("meeting places forgotten", "            own = meeting[i.operands[-1]]", "            own = []"),
    # waits
    _flow("the most waited path counts where two meet", "min(n, states[s].get(j, MOST))", "max(n, states[s].get(j, 0))"),
    _flow("a wait under a predicate waits", '"DEPBAR" in i.parts and i.unconditional', '"DEPBAR" in i.parts'),
    _flow("an ordinary barrier waits", 'i.base == "WARPGROUP" and "DEPBAR" in i.parts', '"DEPBAR" in (i.base, *i.parts)'),
    _flow("groups never end", "if p.closes and", "if p.closes is None and"),
    # rules
    _flow("writes of A forgotten", "(j, writes & other.left)", "(j, 0)"),
    _flow("no sum continues in its registers", "chained = own and", "chained = own and False and"),
    _flow("a sum may be its own left operand", "(own.left if chained else reads)", "(0 if own else reads)"),
    # registers
    _registers("A has two registers", "A_REGISTERS = 4", "A_REGISTERS = 2"),
    _registers("a load writes one register", "        count = _width(parts)", "        count = 1"),
    _registers("an atomic's predicate is its destination", 're.fullmatch(r"P[\\dT]", i.operands[0]) else 0', 're.fullmatch(r"P[\\dT]", "R0") else 0'),
    _registers("uniform registers taken for registers", 're.match(r"[-~!|]*R', 're.match(r"[-~!|U]*R'),
)  # fmt: skip

SUITE = interpreted(FAULTS, "tests/triton/test_sass.py")
