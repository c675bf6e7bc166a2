"""Weights that are written in place in eval, without PyTorch's version counter: the next output uses them."""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from torch import nn

import fastbert
from fastbert.execution import cpu
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.modules import part
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from fastbert.runtime import loader, prepared
from fastbert.runtime import places as places_of_tensors
from tests.support.hf_models import batch, hf_config, hf_model

needs_pages = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages were written")
FLOAT, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = {FLOAT: "fp32", BF16: "bf16", FP16: "fp16", torch.int8: "int8"}
BITS = {1: numpy.int8, 2: numpy.int16, 4: numpy.int32}


def native(dtype=FLOAT, name="bert"):
    torch.manual_seed(0)
    model = AutoModel.from_config(EncoderConfig.from_hf(hf_config(name))).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3)
    return model.quantize() if dtype == torch.int8 else model.to(dtype)


def accelerated(dtype=FLOAT, name="bert"):
    torch.manual_seed(0)
    return fastbert.accelerate(hf_model(name).to(dtype)).requires_grad_(False)


def run(model):
    with torch.inference_mode():
        return model(**batch(model.config.model_type)).last_hidden_state


def fresh(model):
    """The expected output, by a copy, which derives its own weights."""
    return run(copy.deepcopy(model))


def check_next(model, change, tensor, name=""):
    """After `change(tensor)` the next output differs and is right."""
    before = run(model)
    assert torch.equal(run(model), before), name
    change(tensor)
    after = run(model)
    assert not torch.equal(after, before), name
    assert torch.equal(after, fresh(model)), name


def twice_of(weight):
    """A function that asks for something derived from the weight."""
    owner = nn.Module()
    return lambda: prepared.derived(owner, "twice", (weight,), lambda: weight * 2)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, PackedLayer)]


def dense(model, name="intermediate"):
    layer = layers_of(model)[-1]
    return part(layer, getattr(layer.form.names, name))


def array(t):
    """A NumPy array of the tensor's memory, as integers where NumPy lacks the dtype."""
    return t.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[t.itemsize]).numpy()


def teacher(p):
    student = torch.ones_like(p)
    p.data.mul_(0.5).add_(0.5 * student) if p.is_floating_point() else p.data.neg_().add_(student)


IDIOMS = {
    "mul_": lambda p: p.data.mul_(-1),
    "copy_": lambda p: p.data.copy_(p.flip(0)),
    "teacher": teacher,
    "detached": lambda p: p.detach().neg_(),
    "foreach": lambda p: torch._foreach_mul_([p.data], -1),
    "out": lambda p: torch.neg(p, out=p.data),
    "row": lambda p: p.data[-1].neg_(),
    "row set": lambda p: p.data.__setitem__(5, 1),
    "column": lambda p: p.data[:, 3].neg_(),
    "element": lambda p: p.data[1, 2].neg_(),
    "flat view": lambda p: p.data.view(-1)[70:75].neg_(),
    "numpy": lambda p: numpy.copyto(array(p), array(p)[::-1].copy()),
    "numpy row": lambda p: array(p).__setitem__(3, 0),
    "numpy element": lambda p: array(p).__setitem__((3, 4), 0),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).neg_(),
    "dlpack numpy": lambda p: numpy.from_dlpack(p.detach().view(torch.uint8)).fill(0),
    "address": lambda p: ctypes.memset(p.data_ptr(), 0, p.nbytes),
}


@pytest.fixture(params=["fused", "op by op"])
def layers(request, monkeypatch):
    if request.param == "op by op":
        monkeypatch.setattr(cpu, "serves", lambda *_: "off")
    return request.param


MODELS = [
    pytest.param(
        make, dtype, id=f"{make.__name__}-{KINDS[dtype]}", marks=[pytest.mark.slow] * (dtype == FP16)
    )
    for make in (native, accelerated)
    for dtype in KINDS
    if make is native or dtype.is_floating_point
]


@pytest.mark.parametrize(("make", "dtype"), MODELS)
def test_a_write_in_place_changes_the_next_output(make, dtype, layers):
    model = make(dtype)
    weight = dense(model).weight
    original = weight.clone()
    few = "teacher", "row", "element", "numpy", "numpy element", "address"
    for name in IDIOMS if (make, dtype) == (native, FLOAT) else few:
        weight.data.copy_(original)
        check_next(model, IDIOMS[name], weight, name)


@pytest.mark.parametrize(("make", "dtype"), MODELS)
def test_every_weight_of_a_layer_counts(make, dtype, layers):
    model = make(dtype)
    layer = layers_of(model)[-1]
    for tensor in (*layer.parameters(), *layer.buffers()):
        run(model)
        before = run(model)
        tensor.data.view(-1)[::2].add_(1)  # not to all elements, which a norm would cancel
        after = run(model)
        assert torch.equal(after, fresh(model))
        # softmax does not see what is added to all scores of a query
        assert not torch.equal(after, before) or tensor is part(layer, layer.form.names.key).bias


def test_weights_of_layers_that_share_them():
    """ALBERT's layers are one layer, two models share layers, and a view of the storage is written."""
    albert = native(name="albert")
    check_next(albert, IDIOMS["row"], dense(albert).weight)
    first, second = native(), native()
    inner = dense(first)
    dense(second).weight, dense(second).bias = inner.weight, inner.bias
    for write in (lambda: inner.weight.data[3:5].neg_(), lambda: inner.bias.data.add_(1)):
        outputs = [run(model) for model in (first, second)]
        write()
        for model, before in zip((first, second), outputs, strict=True):
            after = run(model)
            assert not torch.equal(after, before)
            assert torch.equal(after, fresh(model))


def test_one_way_through_a_layer_finds_what_another_must_know(monkeypatch):
    """The fused layer and the single ops use the same packed weights."""
    model = native()
    run(model)
    dense(model).weight.data[3].neg_()  # not among the samples
    run(model)
    monkeypatch.setattr(cpu, "serves", lambda *_: "off")
    assert torch.equal(run(model), fresh(model))


def test_what_the_samples_of_one_find_another_finds():
    weight = in_numpy(torch.zeros(1000, 40))
    asks = twice_of(weight), twice_of(weight)
    for row in (0, 700):
        weight.data[row] = 1
        for ask in asks:
            assert torch.equal(ask(), weight * 2)


def in_numpy(weight):
    return torch.from_numpy(weight.numpy().copy())


def shared_between_processes(weight):
    return weight.clone().share_memory_()


def unmarked(dtype, home, rows=96):
    """(a model, one of its weights, whose memory cannot have a mark)."""
    model = native(dtype)
    inner = dense(model, "intermediate" if rows == 96 else "output")
    inner.weight.data = home(inner.weight.data.clone())
    assert not prepared._mark(inner.weight)
    return model, inner.weight


@pytest.mark.sweep
@pytest.mark.parametrize("home", (in_numpy, shared_between_processes))
def test_a_weight_whose_memory_has_no_mark(home, layers):
    """Writes to whole tensors are noticed, and to rows of matrices that are not large."""
    model, weight = unmarked(FLOAT, home)
    for name in ("mul_", "copy_", "teacher", "detached", "out", "row", "row set", "numpy", "dlpack"):
        check_next(model, IDIOMS[name], weight, name)


def map_file(folder, tensor, access=mmap.ACCESS_COPY):
    """The tensor in a mapped file."""
    path = folder / f"{len(list(folder.iterdir()))}.bin"
    path.write_bytes(tensor.numpy().tobytes())
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0, access=access)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def watched(*tensors, ask=True):
    return loader.extension.MappedPages([(t.data_ptr(), t.nbytes) for t in tensors], ask)


@needs_pages
def test_any_element_of_a_mapped_weight_counts(tmp_path):
    weight = map_file(tmp_path, torch.zeros(3000, 40))
    assert not prepared._mark(weight)
    ask = twice_of(weight)
    assert ask() is ask()
    for row, column in ((0, 0), (70, 39), (1500, 3), (2999, 39)):
        weight.data[row, column] = row + 1
        assert torch.equal(ask(), weight * 2), (row, column)
        for value in (7, 8):  # pages that were written already: a row
            weight.data[row] = value
            assert torch.equal(ask(), weight * 2), (row, value)
    weight.data.mul_(3)  # all pages
    assert torch.equal(ask(), weight * 2)
    weight.data[2000] = 5
    assert torch.equal(ask(), weight * 2)
    # rows apart in memory are not one range, and a scalar is none: all is compared
    columns, scalar = weight[:, 10:20], weight[0, 0]
    for weight_of in (columns, scalar):
        ask = twice_of(weight_of)
        for row in (0, 1500, 2999):
            ask()
            columns.data[row] += 1
            assert torch.equal(ask(), weight_of * 2), row


@needs_pages
def test_weights_share_a_page_of_a_mapped_file(tmp_path):
    """A write to one may cost the other a build, and is never taken for no write to the other."""
    halves = map_file(tmp_path, torch.zeros(2, 100, 10)).unbind(0)
    asks = [*map(twice_of, halves)]
    for row in (0, 50, 99):
        for i in (0, 1):
            for ask in asks:
                ask()
            halves[i].data[row] += 1
            for j in (1 - i, i):
                assert torch.equal(asks[j](), halves[j] * 2)


@needs_pages
@pytest.mark.parametrize("ask", (True, False))
def test_pages_that_were_written(tmp_path, ask):
    page = mmap.PAGESIZE
    weight = map_file(tmp_path, torch.zeros(40 * page, dtype=torch.uint8))
    weight[3 * page] = weight[4 * page + 7] = weight[6 * page + 1] = 1
    inner = weight[page // 2 : 39 * page + page // 2]
    half = page // 2
    pages = watched(inner, weight[:page], weight[4 * page : 7 * page], ask=ask)
    assert pages.written(0) == [(3 * page - half, 5 * page - half), (6 * page - half, 7 * page - half)]
    assert pages.written(1) == []
    assert pages.written(2) == [(0, page), (2 * page, 3 * page)]
    assert not pages.changed()
    weight[3 * page + 5] = 2  # no first write
    keep = [torch.zeros(1 << 20) for _ in range(20)]  # page faults that have nothing to do with it
    assert not pages.changed()
    assert int(weight[30 * page]) == 0  # a read
    assert not pages.changed()
    weight[39 * page + half] = 0  # the same value, outside the range, on its last page
    assert pages.changed()
    assert pages.changed()
    assert watched(inner, ask=ask).written(0)[-1] == (39 * page - half, 39 * page)
    for place in (page, 5 * page):  # on the first page before the range; between two that were written
        pages = watched(inner, ask=ask)
        assert not pages.changed()
        weight[place] = 1
        assert pages.changed(), place
    del keep


@needs_pages
@pytest.mark.parametrize("ask", (True, False))
def test_many_pages_that_were_written(tmp_path, ask):
    page = mmap.PAGESIZE
    weight = map_file(tmp_path, torch.zeros(1200 * page, dtype=torch.uint8))
    places = [*range(100, 300, 2), 511, 512, 1023, 1024, 1199]
    for place in places:
        weight[place * page] = 1
    parts = watched(weight, ask=ask).written(0)
    assert [i for begin, end in parts for i in range(begin // page, end // page)] == places
    assert len(parts) == 103


@needs_pages
def test_only_private_mapped_files_are_watched(tmp_path):
    page = mmap.PAGESIZE
    zeros = torch.zeros(8 * page, dtype=torch.uint8)
    private, shared = map_file(tmp_path, zeros), map_file(tmp_path, zeros, mmap.ACCESS_WRITE)
    pages = watched(zeros, shared, private)
    assert [pages.written(i) for i in range(3)] == [None, None, []]
    inner = [(tensor.data_ptr() + page, page) for tensor in (private, zeros)]
    within = loader.extension.MappedPages(inner, within=pages)
    assert [within.written(i) for i in range(2)] == [[], None]
    within = loader.extension.MappedPages(inner[:1], within=pages)
    assert within.written(0) == []
    private[page] = 1
    assert within.changed()
    other = map_file(tmp_path, zeros)
    assert watched(other).written(0) == []
    outside = loader.extension.MappedPages([(other.data_ptr(), page)], within=pages)
    assert outside.written(0) == []
    past = loader.extension.MappedPages([(private.data_ptr(), 2**33)])
    assert past.written(0) is None
    assert not past.changed()
    with pytest.raises(IndexError, match="range: expected one of 3"):
        pages.written(3)


@needs_pages
def test_a_fork_watches_its_own_pages(tmp_path):
    weight = map_file(tmp_path, torch.zeros(8 * mmap.PAGESIZE, dtype=torch.uint8))
    pages = watched(weight)
    child = os.fork()
    if child == 0:
        before = pages.changed()
        weight[3 * mmap.PAGESIZE] = 1
        os._exit(0 if not before and pages.changed() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not pages.changed()
    weight[5 * mmap.PAGESIZE] = 1
    assert pages.changed()


@pytest.mark.parametrize("rows", (257, 319, 1023, 1024, 1025, 2048, 4095, 5000))
def test_every_row_counts_whatever_their_number(rows):
    """Many rows are compared by several threads, in parts of 1,024."""
    weight = in_numpy(torch.zeros(rows, 4))
    assert not prepared._mark(weight)
    ask = twice_of(weight)
    ask()
    for row in {0, 1, rows // 2, *range(1023, rows, 1024), *range(1024, rows, 1024), rows - 2, rows - 1}:
        weight.data[row] += 1
        assert torch.equal(ask(), weight * 2), row


def test_without_marks_a_whole_tensor_is_noticed(monkeypatch):
    """Another version of PyTorch may have no marks."""
    monkeypatch.setattr(prepared, "_is_marked", prepared._never_marked)
    model = native()
    for name in ("mul_", "row", "numpy"):
        check_next(model, IDIOMS[name], dense(model).weight, name)


@pytest.mark.parametrize("dtype", (FLOAT, BF16, torch.int8))
def test_an_array_that_was_taken_before(dtype):
    """PyTorch does not see writes through it, but a write of the whole tensor is noticed."""
    model = native(dtype)
    for name in ("intermediate", "output", "query"):
        weight = dense(model, name).weight
        memory = array(weight)
        check_next(model, lambda _, memory=memory: numpy.copyto(memory, memory[::-1].copy()), weight)


def test_nothing_moves():
    """The user's aliases and arrays stay valid."""
    model = native()
    weight = dense(model).weight
    place, alias, memory = weight.data_ptr(), weight.data, array(weight)
    run(model)
    for write in (IDIOMS["mul_"], IDIOMS["row"], IDIOMS["teacher"]):
        write(weight)
        run(model)
        assert weight.data_ptr() == place
        run(model)
        assert torch.equal(alias, weight)
        assert (memory == array(weight)).all()


@pytest.mark.parametrize("elsewhere", (False, True))
def test_written_while_it_is_built(elsewhere):
    """Values that were read before the write are not kept, although another finds the write meanwhile.

    Nor does a write elsewhere excuse it.
    """
    owner, other = nn.Module(), nn.Module()
    weight, foreign = (nn.Parameter(torch.ones(3), requires_grad=False) for _ in range(2))
    finding = False

    def written():
        value = weight * 2
        for each in (weight, foreign) if elsewhere else (weight,):
            each.data.add_(1)
            if finding:  # which sets the mark again
                prepared.derived(other, id(each), (each,), lambda each=each: each * 3)
        return value

    for name, found in (("a", False), ("c", True)):
        finding, before = found, weight.clone()
        assert torch.equal(prepared.derived(owner, name, (weight,), written), before * 2)
        assert torch.equal(prepared.derived(owner, name, (weight,), lambda: weight * 2), weight * 2)
    assert torch.equal(prepared.derived(other, id(weight), (weight,), lambda: weight * 5), weight * 3)
    assert not prepared._building


def test_a_build_that_fails_leaves_nothing():
    owner, weight = nn.Module(), nn.Parameter(torch.ones(3))
    with pytest.raises(ZeroDivisionError):
        prepared.derived(owner, "a", (weight,), lambda: 1 / 0)
    assert not prepared._building
    assert prepared.remembered(owner) == []


def of_another(model):
    """A weight of another model, with a mark of its own."""
    other = native()
    dense(other).weight.data.neg_()
    run(other)
    return dense(other).weight


def swapped(model):
    dense(model).weight.data = dense(model).weight.data.neg()


def swapped_for_a_marked_one(model):
    dense(model).weight.data = of_another(model).data


def shifted(model):
    """Another view of one storage."""
    weight = dense(model).weight
    both = torch.stack([weight.data, weight.data.neg()])
    weight.data = both[0]
    run(model)
    weight.data = both[1]


def transposed(model):
    """The same elements of one storage."""
    weight = dense(model, "query").weight
    weight.data = weight.data.t()


def replaced(model):
    """Another parameter in the same memory."""
    weight = dense(model).weight
    dense(model).weight = nn.Parameter(weight.detach().neg_(), requires_grad=False)


def exchanged(model):
    """While the first parameter lives on."""
    model.kept = [dense(model).weight]
    dense(model).weight = of_another(model)


@pytest.mark.parametrize("one_by_one", (False, True))
@pytest.mark.parametrize(
    "change", (swapped, swapped_for_a_marked_one, shifted, transposed, replaced, exchanged)
)
def test_other_memory_is_noticed(change, one_by_one, monkeypatch):
    if one_by_one:  # as for a PyTorch without the C functions
        monkeypatch.setattr(places_of_tensors, "_watch", lambda *_: None)
    model = native()
    check_next(model, lambda _: change(model), None)


@pytest.mark.parametrize(
    ("make", "dtype"), [(native, FLOAT), (native, torch.int8), (accelerated, FLOAT), (accelerated, BF16)]
)
def test_what_changes_nothing_costs_no_build(make, dtype, layers, monkeypatch):
    """If a reader removed the mark, or a server's `model.eval()`, everything would be packed at each call."""
    model = make(dtype)
    long = {"input_ids": torch.ones(70, 30, dtype=torch.long)}  # beyond what is packed once for all calls

    def calls():
        run(model)
        with torch.inference_mode():
            model(**long)
            if make is native:
                model(**batch("bert"), first_token_only=True)
        copy.deepcopy(model)
        model.state_dict()
        sum(float(p.sum()) for p in model.parameters())

    calls()
    calls()
    assert prepared.remembered(model)
    monkeypatch.setattr(prepared, "_build", lambda *_: pytest.fail("built again"))
    calls()
    for change in (
        nn.Module.eval,
        lambda m: m.train(False),
        lambda m: m.to("cpu"),
        lambda m: m.to(next(m.parameters()).dtype),
        lambda m: m.requires_grad_(True).requires_grad_(False),
        lambda m: m.register_forward_hook(print).remove(),
    ):
        change(model)
        run(model)


@pytest.mark.parametrize("make", (native, accelerated))
def test_a_mode_that_all_modules_have_is_not_set_again(make, monkeypatch):
    """And a change of one module's mode forgets what was derived."""
    model = make()
    run(model)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__setattr__", lambda *_: pytest.fail("set"))
        assert model.eval() is model
    assert model.eval() is model
    asked = []
    dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    dropout.train = lambda mode: asked.append(mode)  # a train() of one's own is called all the same
    model.eval()
    assert asked == [False]
    dense(model).train()
    assert prepared.remembered(model)
    model.eval()
    assert prepared.remembered(model) == []


def test_clear_takes_what_accelerate_takes_and_makes_single_elements_count():
    """As documented: no check sees single elements written through an array that was taken before."""
    model = accelerated()
    weight = dense(model).weight
    memory = array(weight)
    run(model)
    assert prepared.remembered(model)
    assert prepared._is_marked(weight)
    memory[7, 1] ^= 1 << 30
    fastbert.clear(type("Pipeline", (), {"model": model})())
    assert prepared.remembered(model) == []
    assert not prepared._is_marked(weight)
    assert torch.equal(run(model), fresh(model))
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module or a pipeline, got int"):
        fastbert.clear(3)


def test_training_has_plain_storages():
    model = accelerated().requires_grad_()
    run(model)
    assert prepared._is_marked(dense(model).weight)
    model.train()
    assert not any(map(prepared._is_marked, model.parameters()))


def test_threads_that_call_while_one_writes():
    """Each output belongs to the weights of some moment; the last one is right."""
    model = native()
    weight, stop = dense(model).weight, threading.Event()

    def call(_):
        while not stop.is_set():
            assert torch.isfinite(run(model)).all()

    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(call, i) for i in range(3)]
        for _ in range(30):
            weight.data.neg_()
            weight.data.mul_(0.99)
        stop.set()
        for each in calls:
            each.result()
    assert torch.equal(run(model), fresh(model))


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_samples_compare_what_they_are_told_to(threads):
    """By several threads, where there are more than 4,096."""
    memory = torch.zeros(4 * 6000, dtype=torch.uint8)
    where = memory.data_ptr()
    pieces = [(where, 4, 3000, 2), (where + 12000, 4, 3000, 3), (where + 3, 1, 1, 1)]
    samples = loader.extension.Samples(pieces)
    assert not samples.differ(threads)
    for place in (0, 1, 3, 4096, 4097, 11996, 12002, 4 * 5998 + 2, 4 * 5999 + 2):
        memory[place] = 1
        assert samples.differ(threads), place
        memory[place] = 0
    memory[11999] = memory[4 * 5999 + 3] = 1
    assert not samples.differ(threads)
    with pytest.raises(ValueError, match="pieces: expected"):
        loader.extension.Samples([(64, 1, 2**40, 2)])
    with pytest.raises(ValueError, match="ranges: expected"):
        loader.extension.MappedPages([(64, 2**41)])


def test_a_version_that_is_counted_by_hand():
    """Code that writes without PyTorch's knowledge can announce it."""
    weight = torch.zeros(50, 40)
    memory, ask = array(weight), twice_of(weight)
    ask()
    memory[3, 1] = 1 << 29
    torch.autograd.graph.increment_version(weight)
    assert torch.equal(ask(), weight * 2)
    assert weight[3, 1] != 0


def test_a_write_that_another_finds_meanwhile(monkeypatch):
    """A write between the look-up and the check of the marks, which are set again by then."""
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    ask, other = twice_of(weight), twice_of(weight)
    ask(), other()
    holds = prepared._Seal.holds

    def late(seal, sources):
        monkeypatch.setattr(prepared._Seal, "holds", holds)
        weight.data.add_(1)
        other()
        return seal.holds(sources)

    monkeypatch.setattr(prepared._Seal, "holds", late)
    assert torch.equal(ask(), weight * 2)
