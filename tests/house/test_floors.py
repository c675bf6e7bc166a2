"""An import goes to the same room or to a floor below, never up; no modules import each other in a circle.

A room is a folder or a file of `fastbert/`. FLOORS lists the rooms, the lowest floor first; docs/floors.md
shows them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.imports import Arrow, arrows, circles, modules

ROOT = Path(__file__).resolve().parents[2]

FLOORS = (
    ("runtime",),
    ("ops",),
    # above the ops, whose contracts they implement
    ("kernels",),
    ("backends",),
    ("testing",),
    ("layers",),
    ("checkpoint", "execution"),
    ("models",),
    ("graphs", "sentences", "tasks"),
    ("acceleration", "training"),
    ("finetuning", "pretraining"),
    ("analysis",),
    ("compression",),
    ("cli",),
    ("__init__", "__main__"),
)

# Rooms that may import less than what is below them.
ONLY = {"layers": ("runtime", "ops", "layers")}

# Arrows up that are allowed, because the module is loaded by name when it is first needed: (file, module).
# They lead to the backends of the table, and to what proves a kernel on the user's device.
BY_NAME = {
    ("fastbert/runtime/namespaces.py", "fastbert.backends"),
    ("fastbert/runtime/dispatch.py", "fastbert.testing.proving"),
}

# Known faults: (file, module) of arrows. These only ever shrink.
# The sizes of attention's table belong to the ops. They lie beside the kernels, whose files shipped proofs
# hash: the next proofs may move them.
KNOWN_ARROWS = {("fastbert/ops/attention_places.py", "fastbert.kernels.attention_slots")}


def height(module: str) -> int:
    """The floor of a module of the package, from 0."""
    room = room_of(module)
    (floor,) = (i for i, rooms in enumerate(FLOORS) if room in rooms)
    return floor


def room_of(module: str) -> str:
    """`ops` for fastbert.ops.linear; `__init__` for fastbert itself."""
    return module.split(".")[1] if "." in module else "__init__"


def faults_of(arrow: Arrow) -> str | None:
    """What is wrong with an import, or None."""
    if arrow.target.startswith("<"):
        return f"{arrow.file}:{arrow.line}: imports a module of unknown name, {arrow.target}"
    top = arrow.target.split(".")[0]
    if top in ("bench", "tests", "kernels"):
        return f"{arrow}, which is outside the package"
    if top != "fastbert" or arrow.target == "fastbert._C":
        return None
    if arrow.by_name and (arrow.file, arrow.target) in BY_NAME:
        return None
    source, target = room_of(arrow.source), room_of(arrow.target)
    if source == target:
        return None
    low, high = height(arrow.source), height(arrow.target)
    if high >= low:
        way = "up" if high > low else "sideways"
        return f"{arrow}, {way} from floor {low} ({source}) to floor {high} ({target})"
    if source in ONLY and target not in ONLY[source]:
        return f"{arrow}; {source} imports from {', '.join(ONLY[source])} only"
    return None


def inspect(root: Path) -> tuple[dict[tuple[str, str], str], list[tuple[str, ...]]]:
    """(arrow -> what is wrong with it, circles) of the package under `root`."""
    found = arrows(root, "fastbert")
    wrong = {(a.file, a.target): fault for a in found if (fault := faults_of(a)) is not None}
    inside = [a for a in found if (a.file, a.target) not in BY_NAME]
    return wrong, [tuple(group) for group in circles(inside)]


def test_every_room_is_on_one_floor():
    rooms = {room_of(name) for name in modules(ROOT, "fastbert")}
    listed = [room for floor in FLOORS for room in floor]
    assert sorted(listed) == sorted(rooms)


def test_no_import_goes_up():
    wrong, _ = inspect(ROOT)
    new = [text for arrow, text in wrong.items() if arrow not in KNOWN_ARROWS]
    assert not new, "\n".join(["imports that no floor allows:", *new])
    gone = KNOWN_ARROWS - set(wrong)
    assert not gone, f"no longer there, remove them from KNOWN_ARROWS: {gone}"


def test_no_modules_import_each_other_in_a_circle():
    _, groups = inspect(ROOT)
    assert not groups, "\n".join(["modules that reach each other:", *map(" ".join, groups)])


def test_wanted_arrows_are_there():
    """An exception that no import needs must be removed."""
    found = {(a.file, a.target) for a in arrows(ROOT, "fastbert") if a.by_name}
    assert set(BY_NAME) <= found


BENCH = ("lib", "scripts", "gpu", "suite")


def bench_floor(module: str) -> int:
    """The floor of a module of bench/: `scripts` are the files on top."""
    room = (
        module.split(".")[1] if module.count(".") > 1 or module in ("bench.lib", "bench.gpu") else "scripts"
    )
    return BENCH.index(room)


def bench_faults(root: Path) -> list[str]:
    """Imports of bench/ that go up, or to the tests."""
    found = []
    for arrow in arrows(root, "bench"):
        top = arrow.target.split(".")[0]
        if top == "tests":
            found.append(f"{arrow}, which benchmarks may not")
        elif top == "bench" and bench_floor(arrow.target) > bench_floor(arrow.source):
            found.append(f"{arrow}, up to {BENCH[bench_floor(arrow.target)]}")
    return found


def test_benchmarks_import_what_is_below_them():
    assert not bench_faults(ROOT)


# --- the rule is shown to fail ------------------------------------------------------------------------


def plant(root: Path, file: str, text: str) -> None:
    """Append `text` to `file`, which may be new."""
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{path.read_text() if path.exists() else ''}\n{text}\n")


@pytest.fixture
def package(tmp_path):
    """A package of empty modules."""
    for folder in ("backends", "graphs", "layers", "models", "ops", "sentences"):
        plant(tmp_path, f"fastbert/{folder}/__init__.py", "")
    for file in ("__init__", "backends/cpu", "graphs/model", "models/bert"):
        plant(tmp_path, f"fastbert/{file}.py", "")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    (
        "import fastbert.models.bert",
        "from ..models import bert",
        "if TYPE_CHECKING:\n    from fastbert.models import bert",
        "def planted(): from fastbert.models.bert import BertModel",
        "import importlib; importlib.import_module('fastbert.models.bert')",
    ),
)
def test_a_planted_arrow_up_is_named(package, text):
    plant(package, "fastbert/ops/linear.py", text)
    found, _ = inspect(package)
    (arrow,) = found
    assert arrow == ("fastbert/ops/linear.py", "fastbert.models.bert")
    assert found[arrow].startswith(f"fastbert/ops/linear.py:{2 + text.count(chr(10))}: ")
    assert found[arrow].endswith("up from floor 1 (ops) to floor 7 (models)")


def test_planted_faults_are_named(package):
    plant(package, "fastbert/sentences/encoder.py", "from fastbert.graphs import model")
    plant(package, "fastbert/layers/encoder.py", "from fastbert.backends import cpu")
    plant(package, "fastbert/ops/linear.py", "import importlib; importlib.import_module(input())")
    plant(package, "fastbert/ops/packing.py", "from bench import lib\nimport tests.support")
    plant(package, "fastbert/ops/pooling.py", "from kernels import linear")
    plant(package, "fastbert/ops/planted_a.py", "def late(): from fastbert.ops import planted_b")
    plant(package, "fastbert/ops/planted_b.py", "from fastbert.ops import planted_c")
    plant(package, "fastbert/ops/planted_c.py", "from fastbert.ops.planted_a import late")
    annotations = "if TYPE_CHECKING:\n    from fastbert.ops import planted_{}"
    plant(package, "fastbert/ops/planted_d.py", annotations.format("e"))
    plant(package, "fastbert/ops/planted_e.py", annotations.format("d"))
    wrong, circles = inspect(package)
    assert {arrow: text.split(", ", 1)[-1] for arrow, text in wrong.items()} == {
        ("fastbert/sentences/encoder.py", "fastbert.graphs.model"): (
            "sideways from floor 8 (sentences) to floor 8 (graphs)"
        ),
        ("fastbert/layers/encoder.py", "fastbert.backends.cpu"): "ops, layers only",
        ("fastbert/ops/linear.py", "<input()>"): "<input()>",
        ("fastbert/ops/packing.py", "bench"): "which is outside the package",
        ("fastbert/ops/packing.py", "tests.support"): "which is outside the package",
        ("fastbert/ops/pooling.py", "kernels"): "which is outside the package",
    }
    planted = {tuple(f"fastbert.ops.planted_{letter}" for letter in letters) for letters in ("abc", "de")}
    assert set(circles) == planted
