// Samples of tensors, to detect that their memory was written.
#include "../cpu/samples.h"

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

}  // namespace

void bind_samples(py::module_& m) {
    py::class_<Samples>(m, "Samples", py::module_local())
        .def(py::init([](const py::iterable& pieces) { return new Samples(pieces_of(pieces)); }))
        .def("differ", &Samples::differ);
}

}  // namespace fastbert
