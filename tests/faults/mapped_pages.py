"""Faults of the C++ code that watches the pages of mapped files and compares samples."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_PAGES = "csrc/cpu/mapped_pages.cpp"
_SAMPLES = "csrc/cpu/samples.cpp"
_PLACES = "csrc/cpu/tensor_places.cpp"
_fault = faults_of(_PAGES)

FAULTS = (
    _fault("pages never looked at", "if (count == faults_.load(std::memory_order_relaxed)) return false;", "if (count != 0) return false;"),
    _fault("pages of the file taken for copies", "scan.category_inverted = scan.category_mask = kFile;", "scan.category_mask = 0;"),
    _fault("pages of the file read as copies", " && (entries[i] & file) == 0)", ")"),
    _fault("one reading of the page map", "static_cast<off_t>(at / size", "static_cast<off_t>(pages.first / size"),
    _fault("64 runs at most", "scan.start = scan.walk_end) {", "scan.start = pages.second) {"),
    _fault("shared files watched", "access[3] == 'p'", "true"),
    _fault("memory without a file watched", " && inode != 0", ""),
    _fault("memory behind the file watched", "file.first <= range.first && range.second <= file.second", "file.first <= range.first && range.first < file.second"),
    _fault("all ranges taken for those of the outer one", "if (!std::all_of(ranges.begin(), ranges.end(), inside)) files", "if (within == nullptr) files"),
    _fault("what the outer one does not watch counts", "if (within->watched(i)) files", "files"),
    _fault("the last page left out", "(end + size - 1) / size * size", "end / size * size"),
    _fault("only more runs are a change", "copies != written_", "copies.size() > written_.size()"),
    _fault("only pages from the range's first on", "std::max(from, begin)", "from"),
    _fault("written pages of all ranges", "if (from < end && begin < to) found", "found"),
    _fault("places: address forgotten", "if (static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(address)) != *place++ ||", "if (*place++ == -1 ||", _PLACES),
    _fault("places: strides forgotten", " || now_strides[d] != place[dim]", "", _PLACES),
    _fault("places: the last stride forgotten", "now_strides[d] != place[dim]", "(d + 1 < dim && now_strides[d] != place[dim])", _PLACES),
    _fault("places: the first tensor only", "i < tensors_.size(); ++i) {\n        void* const& tensor", "i < (tensors_.empty() ? 0u : 1u); ++i) {\n        void* const& tensor", _PLACES),
    _fault("samples: rows of a part skipped", "const Pieces some{p.at + i * p.stride", "const Pieces some{p.at + i", _SAMPLES),
    _fault("samples: the copy of another part", "kept += part.kept;", "", _SAMPLES),
    _fault("samples: the last part not compared", "parallel_for(static_cast<std::int64_t>(parts_.size())", "parallel_for(static_cast<std::int64_t>(parts_.size()) - (count_ > kPart)", _SAMPLES),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/runtime/test_places.py",
        "tests/runtime/test_stale.py",
        "-k",
        "mapped or pages or page or row or samples or watched or place or other_memory or element or functions",
    ),
    **IN_PLACE,
    timeout_s=120.0,
)
