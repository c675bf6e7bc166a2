"""Faults of the C++ code that packs batches for graphs and watches models."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_BATCH = "csrc/cpu/host_batch.cpp"
_BATCH_DOOR = "csrc/bindings/host_batch.cpp"
_WATCH = "csrc/bindings/model_watch.cpp"
_PLACES = "csrc/cpu/tensor_places.cpp"
_fault = faults_of(_BATCH)

FAULTS = (
    _fault("ids below zero are legal", "seen |= id | (static_cast<std::uint64_t>(size - 1) - id);", "seen |= static_cast<std::uint64_t>(size - 1) - id;"),
    _fault("ids behind the table are legal", "seen |= id | (static_cast<std::uint64_t>(size - 1) - id);", "seen |= id;"),
    _fault("kept ids follow one another", "rows.indices == nullptr ? t - start : rows.indices[t] - first", "t - start"),
    _fault("ids in the padding not checked", "for (std::int64_t c = 0; c < from.cols; ++c) {", "for (std::int64_t c = 0; c < (rows.indices == nullptr ? from.cols : from.cols - 1); ++c) {"),
    _fault("indices by rows of another length", "first = r * from.cols;", "first = r * from.rows;"),
    _fault("RoBERTa: padding counted", "count += real;", "++count;"),
    _fault("RoBERTa: positions of padding", "real ? pad + count : pad;", "pad + count;"),
    _fault("RoBERTa: the count never restarts", "            std::int64_t count = 0;\n", "            static std::int64_t count = 0;\n"),
    _fault("a device's memory read", "facts.device_type != 0 || ", ""),
    _fault("any layer taken", "if (before == 1 && layer >= facts.sizes[0]) return false;", ""),
    _fault("the first layer taken", "layer * facts.strides[0] * bytes", "0 * bytes"),
    _fault("rows and columns swapped", "facts.strides[before],\n            facts.strides[before + 1],", "facts.strides[before + 1],\n            facts.strides[before],"),
    _fault("booleans refused", "        case kBool:\n", ""),
    _fault("masked first tokens taken", "kept.first &= length == 0 || at(r, 0) != 0;", ""),
    _fault("empty sequences refused", "kept.first &= length == 0 || at(r, 0) != 0;", "kept.first &= at(r, 0) != 0;"),
    _fault("indices of another row", "out.indices[total] = r * seqlen + c;", "out.indices[total] = r * batch + c;"),
    _fault("ends begin at their sequence", "out.ends[r + 1] = static_cast<std::int32_t>(total);", "out.ends[r + 1] = static_cast<std::int32_t>(total - 1);"),
    _fault("absent sequences end at 0", "std::fill(out.ends + batch + 1, out.ends + out.room + 1, static_cast<std::int32_t>(total));", "std::fill(out.ends + batch + 1, out.ends + out.room + 1, 0);"),
    _fault("the last end not written", "out.ends + out.room + 1, static_cast", "out.ends + out.room, static_cast"),
    _fault("ids behind the tokens left", "    std::fill(out.ids + first_free, out.ids + out.tokens, 0);\n", ""),
    _fault("types checked as ids", "gather(*types, rules.type_vocab_size", "gather(*types, rules.vocab_size"),
    _fault("other classes of tensors read", "if (reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())) != tensor_type_.ptr()) return false;", "if (!PyObject_HasAttr(tensor.ptr(), cdata_.ptr())) return false;", _BATCH_DOOR),
    _fault("float ids taken", "&batch.ids) && is_integer(batch.ids) &&", "&batch.ids) &&", _BATCH_DOOR),
    _fault("other shapes taken", "return found && out->rows == like.rows && out->cols == like.cols;", "return found;", _BATCH_DOOR),
    _fault("types of a family without", "rules_.type_vocab_size > 0 && ", "", _BATCH_DOOR),
    _fault("tokens without room", 'if (total > tokens) refuse("tokens"', 'if (false) refuse("tokens"', _BATCH_DOOR),
    _fault("indices not asked for", "if (total < size * seqlen && !with_indices)", "if (false)", _BATCH_DOOR),
    _fault("a masked first token measured", "if (!kept.first) return py::none();", "", _BATCH_DOOR),
    _fault("ends where types are", "reinterpret_cast<std::int32_t*>(rows + 3 * tokens)", "reinterpret_cast<std::int32_t*>(rows + 2 * tokens)", _BATCH_DOOR),
    _fault("classes not watched", "if (Py_TYPE(module.object) != module.type) return false;", "if (module.type == nullptr) return false;", _WATCH),
    _fault("sizes of tables not watched", "if (static_cast<std::size_t>(PyDict_GET_SIZE(table.dict)) != table.count) return false;", "if (static_cast<std::size_t>(PyDict_GET_SIZE(table.dict)) > table.count) return false;", _WATCH),
    _fault("hooks not watched", "if (PyDict_GET_SIZE(hooks) != 0) return false;", "if (hooks == nullptr) return false;", _WATCH),
    _fault("modes not watched", "!= Py_False) return false;", "== Py_None) return false;", _WATCH),
    _fault("swapped tensors not watched", "if (impl_at(tensors_[i], impl_offset_) != impls_[i]) return false;", "if (impls_[i] == nullptr) return false;", _WATCH),
    _fault("places not watched", "return places_.same() && writes_.none();", "return writes_.none();", _WATCH),
    _fault("writes not watched", "return places_.same() && writes_.none();", "return places_.same();", _WATCH),
    _fault("versions not compared", "if (version_of(tensors_[i]) != versions_[i]) return false;", "if (tensors_[i] == nullptr) return false;", _PLACES),
    _fault("marks not compared", "return g_torch.has_simple_data_ptr(storage);", "return storage == nullptr;", _PLACES),
    _fault("sizes elsewhere taken for inside", "return offset > 0 && offset < kImplBytes ? numbers : nullptr;", "return offset != 0 ? numbers : nullptr;", _PLACES),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=("tests/graphs/test_quick.py", "tests/graphs/test_model_watch.py"),
    **IN_PLACE,
    timeout_s=120.0,
)
