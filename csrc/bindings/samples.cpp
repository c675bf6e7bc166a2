// What detects that tensors' memory was written: samples of it, and the pages of mapped files.
#include "../cpu/samples.h"

#include "../cpu/mapped_pages.h"
#include "bindings.h"

namespace fastbert {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 40;  // bytes to keep

// Tuples (address, stride, count, bytes, window), as in fastbert/runtime/prepared.py.
std::vector<Pieces> pieces_of(const py::iterable& tuples) {
    std::vector<Pieces> pieces;
    for (const py::handle each : tuples) {
        const auto fields = py::cast<py::tuple>(each);
        if (fields.size() != 5) throw py::value_error("pieces: expected tuples of five numbers");
        const Pieces p{pointer<const char>(number<Address>(fields[0])), number<std::int64_t>(fields[1]),
                       number<std::int64_t>(fields[2]), number<std::int64_t>(fields[3]),
                       number<std::int64_t>(fields[4])};
        if (p.at == nullptr || p.count < 1 || p.bytes < 1 || p.window < 1 || p.window > p.count ||
            p.count > kMost / p.bytes || p.stride < 0 || p.stride > kMost / p.count)
            throw py::value_error(
                "pieces: expected an address, a stride >= 0, and count, bytes and window >= 1, no window "
                "over "
                "the count and no more than 2^40 bytes");
        pieces.push_back(p);
    }
    return pieces;
}

// Pairs (address, bytes).
std::vector<Range> ranges_of(const py::iterable& pairs) {
    std::vector<Range> ranges;
    for (const py::handle each : pairs) {
        const auto fields = py::cast<py::tuple>(each);
        if (fields.size() != 2) throw py::value_error("ranges: expected pairs of numbers");
        const auto begin = number<Address>(fields[0]);
        const auto bytes = number<std::int64_t>(fields[1]);
        if (begin == 0 || bytes < 1 || bytes > kMost || begin > (Address{1} << 62))
            throw py::value_error("ranges: expected an address, and 1 to 2^40 bytes");
        ranges.emplace_back(begin, begin + static_cast<Address>(bytes));
    }
    return ranges;
}

// The ranges as pairs (bytes from the start of ranges[i] to the begin, and to the end); None if not watched.
py::object written(const MappedPages& pages, std::size_t i) {
    if (i >= pages.size()) throw py::index_error("range: expected one of " + std::to_string(pages.size()));
    if (!pages.watched(i)) return py::none();
    py::list found;
    for (const auto& [begin, end] : pages.written(i))
        found.append(py::make_tuple(begin - pages.begin(i), end - pages.begin(i)));
    return found;
}

}  // namespace

void bind_samples(py::module_& m) {
    py::class_<Samples>(m, "Samples", py::module_local())
        .def(py::init([](const py::iterable& pieces) { return new Samples(pieces_of(pieces)); }))
        .def("differ", &Samples::differ);
    py::class_<MappedPages>(m, "MappedPages", py::module_local())
        .def(py::init([](const py::iterable& ranges, bool ask, const MappedPages* within) {
                 return new MappedPages(ranges_of(ranges), ask, within);
             }),
             py::arg("ranges"), py::arg("ask") = true, py::arg("within") = nullptr)
        .def("written", &written, py::arg("range"))
        .def("changed", &MappedPages::changed);
}

}  // namespace fastbert
