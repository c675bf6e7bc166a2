// What detects that tensors' memory was written or changed: samples of it, the pages of mapped files, and
// places.
#include "../cpu/samples.h"

#include "../cpu/mapped_pages.h"
#include "../cpu/tensor_places.h"
#include "bindings.h"

namespace fastbert {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 40;  // bytes to keep

// Tuples (address, stride, count, bytes), as in fastbert/runtime/prepared.py.
std::vector<Pieces> pieces_of(const py::iterable& tuples) {
    std::vector<Pieces> pieces;
    for (const py::handle each : tuples) {
        const auto fields = py::cast<py::tuple>(each);
        if (fields.size() != 4) throw py::value_error("pieces: expected tuples of four numbers");
        const Pieces p{pointer<const char>(number<Address>(fields[0])), number<std::int64_t>(fields[1]),
                       number<std::int64_t>(fields[2]), number<std::int64_t>(fields[3])};
        if (p.at == nullptr || p.count < 1 || p.bytes < 1 || p.count > kMost / p.bytes || p.stride < 0 ||
            p.stride > kMost / p.count)
            throw py::value_error(
                "pieces: expected an address, a stride >= 0, count and bytes >= 1, and no more than 2^40 "
                "bytes");
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
        .def("fetch", &Samples::fetch)
        .def("differ", &Samples::differ, py::arg("threads") = 1);
    py::class_<MappedPages>(m, "MappedPages", py::module_local())
        .def(py::init([](const py::iterable& ranges, bool ask, const MappedPages* within) {
                 return new MappedPages(ranges_of(ranges), ask, within);
             }),
             py::arg("ranges"), py::arg("ask") = true, py::arg("within") = nullptr)
        .def("written", &written, py::arg("range"))
        .def("changed", &MappedPages::changed);
    py::class_<TensorPlaces>(m, "TensorPlaces", py::module_local())
        .def(py::init([](const py::iterable& tensors) {
            std::vector<void*> impls;
            for (const py::handle each : tensors) impls.push_back(pointer(number<Address>(each)));
            return new TensorPlaces(std::move(impls));
        }))
        .def("known", &TensorPlaces::known)
        .def("places",
             [](const TensorPlaces& self) {
                 py::list numbers;
                 for (const std::int64_t n : self.places()) numbers.append(n);
                 return numbers;
             })
        .def("same", &TensorPlaces::same);
    m.def(
        "set_tensor_functions",
        [](Address data, Address dim, Address sizes, Address strides, Address dtype, Address device_type) {
            check_functions({data, dim, sizes, strides, dtype, device_type});
            set_tensor_functions({data, dim, sizes, strides, dtype, device_type});
        },
        py::arg("torch_get_const_data_ptr"), py::arg("aoti_torch_get_dim"), py::arg("aoti_torch_get_sizes"),
        py::arg("aoti_torch_get_strides"), py::arg("aoti_torch_get_dtype"),
        py::arg("aoti_torch_get_device_type"), "Hand over the addresses of PyTorch's C functions");
    m.def(
        "set_write_functions",
        [](Address version_counter, Address has_simple_data_ptr) {
            check_functions({version_counter, has_simple_data_ptr});
            set_write_functions(version_counter, has_simple_data_ptr);
        },
        py::arg("version_counter"), py::arg("has_simple_data_ptr"),
        "Hand over the addresses of two of PyTorch's C++ functions");
    m.def(
        "tensor_codes",
        [](Address tensor) -> py::object {
            TensorFacts facts;
            if (!facts_of(pointer(tensor), &facts)) return py::none();
            return py::make_tuple(facts.dtype, facts.device_type);
        },
        py::arg("tensor"), "PyTorch's codes of a tensor's dtype and device; None if unknown");
    m.def(
        "tensor_write_state",
        [](Address tensor, Address storage) -> py::object {
            if (!has_write_functions()) return py::none();
            if (tensor == 0 || storage == 0)
                throw py::value_error("tensor, storage: expected addresses, got 0");
            const TensorWrites writes({pointer(tensor)}, {pointer(storage)});
            return py::make_tuple(writes.versions().front(), writes.none());
        },
        py::arg("tensor"), py::arg("storage"),
        "(version, whether the storage is marked) by the addresses of a TensorImpl and a StorageImpl; None "
        "if unknown");
}

}  // namespace fastbert
