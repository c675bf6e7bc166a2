// Whether a model is as it was: its modules, their tables, hooks and modes, and its tensors.
//
// fastbert/runtime/model_state.py asks this at every call of a recorded graph, and of a kept plan. Python
// would read a thousand dictionaries and attributes for it. Here each is one comparison of pointers or sizes.
// What has changed is not reported: Python finds that out.
//
// References are borrowed: the caller keeps all objects alive, so that Python's garbage collector sees them.
#include <cstring>
#include <vector>

#include "../cpu/tensor_places.h"
#include "bindings.h"

namespace fastbert {
namespace {

void* impl_at(PyObject* object, Py_ssize_t offset) {
    void* impl;
    std::memcpy(&impl, reinterpret_cast<const char*>(object) + offset, sizeof impl);
    return impl;
}

// The offset, in the Python objects of tensors, of the pointer to the TensorImpl; -1 if it is not the same in
// all of them.
Py_ssize_t impl_offset(const std::vector<PyObject*>& objects, const std::vector<void*>& impls) {
    constexpr Py_ssize_t kWord = sizeof(void*);
    for (Py_ssize_t at = sizeof(PyObject); at + kWord <= Py_TYPE(objects.front())->tp_basicsize;
         at += kWord) {
        std::size_t i = 0;
        while (i < objects.size() && at + kWord <= Py_TYPE(objects[i])->tp_basicsize &&
               impl_at(objects[i], at) == impls[i])
            ++i;
        if (i == objects.size()) return at;
    }
    return -1;
}

class ModelWatch {
  public:
    // See the binding below.
    ModelWatch(const py::iterable& modules, const py::iterable& tables, const py::iterable& empty,
               const py::iterable& attributes, const py::iterable& tensors, const py::iterable& sources,
               const py::iterable& marked_storages)
        : training_(py::reinterpret_steal<py::str>(PyUnicode_InternFromString("training"))),
          impls_(addresses(tensors)),
          places_(impls_),
          writes_(has_write_functions() ? addresses(sources) : std::vector<void*>(),
                  has_write_functions() ? addresses(marked_storages) : std::vector<void*>()) {
        for (const py::handle each : modules) modules_.push_back({each.ptr(), Py_TYPE(each.ptr())});
        for (const py::handle each : tables) remember_table(dict_of(each));
        for (const py::handle each : empty) empty_.push_back(dict_of(each));
        for (const py::handle each : attributes) attributes_.push_back(dict_of(each));
        for (const py::handle each : tensors) tensors_.push_back(each.ptr());
        if (!tensors_.empty()) impl_offset_ = impl_offset(tensors_, impls_);
    }

    bool known() const { return places_.known() && impl_offset_ > 0 && has_write_functions(); }

    bool same() const {
        if (!known()) return false;
        for (const Module& module : modules_)
            if (Py_TYPE(module.object) != module.type) return false;
        for (const Table& table : tables_)
            if (!same_table(table)) return false;
        for (PyObject* const hooks : empty_)
            if (PyDict_GET_SIZE(hooks) != 0) return false;
        for (PyObject* const attributes : attributes_)
            if (PyDict_GetItemWithError(attributes, training_.ptr()) != Py_False) return false;
        for (std::size_t i = 0; i < tensors_.size(); ++i)
            if (impl_at(tensors_[i], impl_offset_) != impls_[i]) return false;
        return places_.same() && writes_.none();
    }

  private:
    struct Table {
        PyObject* dict;
        std::size_t first, count;  // of pairs_
        mutable std::uint64_t version;
    };
    struct Pair {
        PyObject *name, *value;
    };
    struct Module {
        PyObject* object;
        PyTypeObject* type;
    };

    static std::vector<void*> addresses(const py::iterable& objects) {
        std::vector<void*> found;
        for (const py::handle each : objects) {
            if (!py::hasattr(each, "_cdata"))
                throw py::type_error("expected tensors and storages, got " + std::string(py::repr(each)));
            found.push_back(pointer(number<Address>(each.attr("_cdata"))));
        }
        return found;
    }

    static PyObject* dict_of(const py::handle& object) {
        if (!PyDict_Check(object.ptr()))
            throw py::type_error("expected dictionaries, got " + std::string(py::repr(object)));
        return object.ptr();
    }

    void remember_table(PyObject* dict) {
        Table table{dict, pairs_.size(), 0, version_of(dict)};
        PyObject *name, *value;
        for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &name, &value) != 0; ++table.count)
            pairs_.push_back({name, value});
        tables_.push_back(table);
    }

    // What changes with every change of a dictionary, as far as Python has it; else 0.
    static std::uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
        return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
        static_cast<void>(dict);
        return 0;
#endif
    }

    bool same_table(const Table& table) const {
        const std::uint64_t version = version_of(table.dict);
        if (version != 0 && version == table.version) return true;
        if (static_cast<std::size_t>(PyDict_GET_SIZE(table.dict)) != table.count) return false;
        if (table.count == 0) return true;
        const Pair* pair = pairs_.data() + table.first;
        PyObject *name, *value;
        for (Py_ssize_t at = 0; PyDict_Next(table.dict, &at, &name, &value) != 0; ++pair)
            if (name != pair->name || value != pair->value) return false;
        table.version = version;
        return true;
    }

    py::str training_;
    std::vector<void*> impls_;
    TensorPlaces places_;
    TensorWrites writes_;
    Py_ssize_t impl_offset_ = -1;
    // borrowed
    std::vector<Module> modules_;
    std::vector<PyObject*> empty_, attributes_, tensors_;
    std::vector<Table> tables_;
    std::vector<Pair> pairs_;
};

}  // namespace

void bind_model_watch(py::module_& m) {
    py::class_<ModelWatch>(m, "ModelWatch", py::module_local())
        .def(
            py::init<const py::iterable&, const py::iterable&, const py::iterable&, const py::iterable&,
                     const py::iterable&, const py::iterable&, const py::iterable&>(),
            py::arg("modules"), py::arg("tables"), py::arg("empty"), py::arg("attributes"),
            py::arg("tensors"), py::arg("sources"), py::arg("marked_storages"),
            "Remembers the types of modules; the names and objects in tables; dictionaries that are empty; "
            "dictionaries of attributes in which `training` is False; where tensors lie; the versions of the "
            "sources; and that storages are marked (csrc/cpu/tensor_places.h)")
        .def("known", &ModelWatch::known, "Whether PyTorch returned all of these")
        .def("same", &ModelWatch::same);
}

}  // namespace fastbert
