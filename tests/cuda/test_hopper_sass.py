"""What nvcc makes of csrc/cuda/*_hopper.cu for sm_90a: products that run beside the warp."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.cuda.test_spills import compiled
from tests.support import sass

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*_hopper.cu"))

pytestmark = pytest.mark.sweep


def listing(source: Path, folder: Path) -> str:
    """The SASS of a source; fails where ptxas spills, or says that it makes products wait for each other."""
    triton = pytest.importorskip("triton")
    cubin = folder / "object.cubin"
    spills = compiled(source, cubin, "90a", "-cubin")
    assert {name: count for name, count in spills.items() if count > 0} == {}
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout


# Source -> of each of its kernels: how many instructions begin so, and the waits for products in order.
# linear: stores for c and for pre, per 64 x 64 of a tile; a gated tile loads both halves of the weight. With
# a derivative it loads the weight's three tiles, and three parts of pre before the products and three after.
# attention: the first scores; the next ones with the sums before; the last sums. Copies of a loop and of what
# comes before it. Heads of 32 have half as many products for scores.
EXPECTED = {
    "linear_hopper": (
        {"HGMMA.64x192x16.F32": 8, "HGMMA": 8, "UTMALDG.2D": 2, "UTMASTG.2D": 12},
        ["0x1", "0x0"],
    ),
    # the copies ahead of the ring's first turn, and those of its loop
    "linear_cluster_hopper": (
        {"HGMMA.64x64x16.F32": 4, "HGMMA": 4, "UTMALDG.2D": 4, "ACQBULK": 2, "PREEXIT": 1},
        ["0x1", "0x0"],
    ),
    "attention_hopper": (
        {"HGMMA.64x64x16.F32": 16, "HGMMA": 16, "UTMALDG.2D": 5},
        ["0x0", "0x0", "0x0"],
    ),
    # backward: S and dP, dS k; then S and dP transposed, dropout(P) dout and dS q
    "attention_backward_dq_hopper": (
        {"HGMMA.64x64x16.F32": 12, "HGMMA": 12, "UTMALDG.2D": 8},
        ["0x1", "0x0", "0x0"],
    ),
    "attention_backward_dkdv_hopper": (
        {"HGMMA.64x64x16.F32": 16, "HGMMA": 16, "UTMALDG.2D": 6},
        ["0x1", "0x0", "0x0"],
    ),
}


def test_every_source_is_expected():
    assert EXPECTED.keys() == {source.stem for source in SOURCES}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_products_run_beside_the_rest(source, tmp_path):
    """No register of a product is touched before its wait, and products run beside the warp."""
    text = listing(source, tmp_path)
    counts, waits = EXPECTED[source.stem]
    assert sass.hazards(text) == []
    for kernel, code in sass.parsed(text):
        opcodes = [".".join(i.parts) for i in code]
        found = {start: sum(o.startswith(start) for o in opcodes) for start in counts}
        own = {"UTMALDG.2D": 3} if source.stem == "linear_hopper" and "ELb1E" in kernel else {}
        if "SlopeEL" in kernel:
            own = {"UTMALDG.2D": 10, "UTMASTG.2D": 6}
        if source.stem == "linear_cluster_hopper" and "ELb1E" in kernel:
            own = {"ACQBULK": 3}  # moments are waited for, too
        if source.stem == "attention_hopper" and "ELi2E" in kernel:
            own = {"HGMMA.64x64x16.F32": 12, "HGMMA": 12}
        assert found == counts | own, kernel
        assert [i.operands[-1] for i in code if i.base == "WARPGROUP" and "DEPBAR" in i.parts] == waits, (
            kernel
        )


def test_products_that_wait_for_each_other_are_seen(tmp_path):
    """A step of the products whose sums are touched before they have been waited for."""
    text = (ROOT / "csrc" / "cuda" / "linear_hopper.cuh").read_text()
    wait = "            wait_products<1>();\n"
    assert text.count(wait) == 1
    text = text.replace(wait, f"            c[0][0] *= 2.0f;\n{wait}")
    source = (ROOT / "csrc" / "cuda" / "linear_hopper.cu").read_text()
    for name, content in (("linear_hopper.cuh", text), ("planted_hopper.cu", source)):
        found = re.sub(r'#include "(?!linear_hopper\.cuh)', f'#include "{ROOT}/csrc/cuda/', content)
        (tmp_path / name).write_text(found)
    with pytest.raises(AssertionError, match="Performance Loss"):
        listing(tmp_path / "planted_hopper.cu", tmp_path)
