// Packing of batches in CPU memory for recorded graphs.
#include "../cpu/host_batch.h"

#include <optional>

#include "bindings.h"

namespace fastbert {
namespace {

class HostBatch {
  public:
    HostBatch(std::int64_t vocab_size, std::int64_t type_vocab_size, std::int64_t pad, py::type tensor_type)
        : rules_{vocab_size, type_vocab_size, pad},
          tensor_type_(std::move(tensor_type)),
          cdata_(py::reinterpret_steal<py::str>(PyUnicode_InternFromString("_cdata"))) {
        check_size("vocab_size", vocab_size);
        check_size("type_vocab_size", type_vocab_size);
        if (pad < -1 || pad > kMostElements) refuse("pad", "-1 to 2**48", pad);
    }

    py::object measure(const py::handle& ids, const py::handle& mask, const py::handle& types) const {
        const Batch batch = batch_of(ids, mask, types);
        if (!batch.usable) return py::none();
        Kept kept;
        kept.total = batch.ids.rows * batch.ids.cols;
        if (batch.mask) kept = count_kept(*batch.mask);
        if (!kept.first) return py::none();
        return py::make_tuple(batch.ids.rows, batch.ids.cols, kept.total);
    }

    bool pack(const py::handle& ids, const py::handle& mask, const py::handle& types, Address out,
              std::int64_t tokens, std::int64_t room, bool with_ids, bool with_indices) const {
        check_size("tokens", tokens);
        check_size("room", room);
        check_given("out", pointer(out), 1);
        const Batch batch = batch_of(ids, mask, types);
        if (!batch.usable) return false;
        const std::int64_t size = batch.ids.rows, seqlen = batch.ids.cols;
        const std::int64_t total = batch.mask ? count_kept(*batch.mask).total : size * seqlen;
        if (total > tokens) refuse("tokens", "at least " + std::to_string(total), tokens);
        if (size > room) refuse("room", "at least " + std::to_string(size), room);
        if (total < size * seqlen && !with_indices) throw py::value_error("with_indices: expected True");
        auto* const rows = pointer<std::int64_t>(out);
        const GraphRows places{rows,
                               rows + tokens,
                               rows + 2 * tokens,
                               reinterpret_cast<std::int32_t*>(rows + 3 * tokens),
                               with_indices ? rows + 3 * tokens + (room + 2) / 2 : nullptr,
                               tokens,
                               room};
        const IdMatrix* const kept = total < size * seqlen ? &*batch.mask : nullptr;
        return pack_host_batch(rules_, size, seqlen, with_ids ? &batch.ids : nullptr, kept,
                               batch.types ? &*batch.types : nullptr, places);
    }

  private:
    struct Batch {
        IdMatrix ids;
        std::optional<IdMatrix> mask, types;
        bool usable;
    };

    // The matrices that a tensor holds, in CPU memory; `layer`: of a three-dimensional tensor, which one.
    bool matrix(const py::handle& tensor, std::int64_t layer, IdMatrix* out) const {
        if (reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())) != tensor_type_.ptr()) return false;
        const auto cdata = py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor.ptr(), cdata_.ptr()));
        if (!cdata) throw py::error_already_set();
        return id_matrix(pointer(number<Address>(cdata)), layer, out);
    }

    // A matrix beside the ids: a tensor, or the number of a layer of `ids`.
    bool beside(const py::handle& ids, const py::handle& other, const IdMatrix& like, IdMatrix* out) const {
        const bool found = PyLong_Check(other.ptr()) ? matrix(ids, number<std::int64_t>(other), out)
                                                     : matrix(other, -1, out);
        return found && out->rows == like.rows && out->cols == like.cols;
    }

    Batch batch_of(const py::handle& ids, const py::handle& mask, const py::handle& types) const {
        Batch batch;
        const bool layers = PyLong_Check(mask.ptr()) || PyLong_Check(types.ptr());
        batch.usable = matrix(ids, layers ? 0 : -1, &batch.ids) && is_integer(batch.ids) &&
                       batch.ids.rows > 0 && batch.ids.cols > 0;
        IdMatrix found;
        if (batch.usable && !mask.is_none()) {
            batch.usable = beside(ids, mask, batch.ids, &found);
            batch.mask = found;
        }
        if (batch.usable && !types.is_none()) {
            batch.usable =
                rules_.type_vocab_size > 0 && beside(ids, types, batch.ids, &found) && is_integer(found);
            batch.types = found;
        }
        return batch;
    }

    IdRules rules_;
    py::type tensor_type_;
    py::str cdata_;
};

}  // namespace

void bind_host_batch(py::module_& m) {
    py::class_<HostBatch>(m, "HostBatch", py::module_local())
        .def(py::init<std::int64_t, std::int64_t, std::int64_t, py::type>(), py::arg("vocab_size"),
             py::arg("type_vocab_size"), py::arg("pad"), py::arg("tensor_type"),
             "See IdRules in csrc/cpu/host_batch.h")
        .def(
            "measure", &HostBatch::measure, py::arg("ids"), py::arg("mask"), py::arg("types"),
            "(sequences, columns, kept tokens) of matrices in CPU memory; None if they are none of one shape "
            "and of the usual dtypes, or a sequence has kept tokens but not its first one. `mask` and "
            "`types` "
            "may be None, or numbers of layers of (layers, sequences, columns) `ids`, whose layer 0 has the "
            "ids")
        .def("pack", &HostBatch::pack, py::arg("ids"), py::arg("mask"), py::arg("types"), py::arg("out"),
             py::arg("tokens"), py::arg("room"), py::arg("with_ids"), py::arg("with_indices"),
             "Write `tokens` ids, positions and types, room + 1 ends (int32, in whole int64) and, "
             "with_indices, "
             "`tokens` indices, all int64, to the address `out`. False if an id is not legal or `measure` "
             "returns None");
}

}  // namespace fastbert
