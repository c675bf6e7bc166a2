// Samples of tensors that tell whether their memory was written.
#include "../cpu/samples.h"

#include "bindings.h"

namespace fastbert {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 40;  // bytes to keep

// Tuples (address, stride, count, bytes, window) as fastbert/prepared.py makes them.
std::vector<Pieces> pieces_of(const py::iterable& tuples) {
    std::vector<Pieces> pieces;
    for (const py::handle each : tuples) {
        const auto fields = py::cast<py::tuple>(each);
        if (fields.size() != 5) throw py::value_error("pieces: expected tuples of five numbers");
        const Pieces p{pointer<const char>(fields[0].cast<Address>()), fields[1].cast<std::int64_t>(),
                       fields[2].cast<std::int64_t>(), fields[3].cast<std::int64_t>(),
                       fields[4].cast<std::int64_t>()};
        if (p.at == nullptr || p.count < 1 || p.bytes < 1 || p.window < 1 || p.count > kMost / p.bytes)
            throw py::value_error("pieces: expected an address, and count, bytes and window >= 1");
        pieces.push_back(p);
    }
    return pieces;
}

}  // namespace

void bind_samples(py::module_& m) {
    py::class_<Samples>(m, "Samples")
        .def(py::init([](const py::iterable& pieces) { return new Samples(pieces_of(pieces)); }))
        .def("differ", &Samples::differ);
}

}  // namespace fastbert
