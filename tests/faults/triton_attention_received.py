"""Faults of the Triton attention_received."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_fault = faults_of("kernels/attention_received.py")

FAULTS = (
    # scores
    _fault("scale forgotten", "softmax_scale * LOG2_E", "LOG2_E"),
    _fault("exp for exp2", "softmax_scale * LOG2_E", "softmax_scale"),
    _fault("lse in units of log 2", "(lse * UNIT)[None, :]", "lse[None, :]"),
    _fault("lse of the first head", "lse_ptr += wide_head * total + wide_start", "lse_ptr += wide_start"),
    _fault("lse of the first sequence", "lse_ptr += wide_head * total + wide_start", "lse_ptr += wide_head * total"),
    _fault("queries of the first sequence", "q_ptr += wide_start * q_stride +", "q_ptr +="),
    _fault("queries of the first head", "q_stride + wide_head * q_head_stride", "q_stride"),
    _fault("keys of the first sequence", "k_ptr += wide_start * k_stride +", "k_ptr +="),
    _fault("a head of k for each of q", "_key_head(head, GROUP).to(tl.int64) * k_head_stride", "wide_head * k_head_stride"),
    _fault("keys of the first head", "_key_head(head, GROUP).to(tl.int64) * k_head_stride", "0"),
    _fault("keys at the queries' stride", "*k.stride()[:2])", "*q.stride()[:2])"),
    _fault("32-bit heads", "wide_head = head.to(tl.int64)", "wide_head = head"),
    _fault("32-bit rows", "wide_start = start.to(tl.int64)", "wide_start = start"),
    # which pairs count
    _fault("queries past the sequence give too", "mask=rows < length, other=float(\"-inf\")", "mask=rows < length, other=0.0"),
    _fault("lse read past the sequence", "tl.load(lse_ptr + rows, mask=rows < length, other=float(\"-inf\"))", "tl.load(lse_ptr + rows)"),
    _fault("a blind query's NaN", "tl.where(sees, tl.exp2(scores * unit - (lse * UNIT)[None, :]), 0.0)", "tl.exp2(scores * unit - tl.where(sees, (lse * UNIT)[None, :], float(\"inf\")))"),
    _fault("an infinite lse is blind, NaN too", "sees = (lse != float(\"-inf\"))[None, :]", "sees = (lse > float(\"-inf\"))[None, :]"),
    _fault("later queries overwrite", "acc += tl.sum(", "acc = tl.sum("),
    _fault("the first queries left out", "tl.range(0, length, BLOCK_M,", "tl.range(BLOCK_M, length, BLOCK_M,"),
    _fault("the last queries left out", "tl.range(0, length, BLOCK_M,", "tl.range(0, length - 1, BLOCK_M,"),
    _fault("the sum over keys", "(lse * UNIT)[None, :]), 0.0), 1)", "(lse * UNIT)[None, :]), 0.0), 0)"),
    # what is stored
    _fault("a head's sums in the first one's", "received_ptr += wide_head * total", "received_ptr += wide_head * 0"),
    _fault("sums of the first sequence", "received_ptr + wide_start + keys", "received_ptr + keys"),
    _fault("keys of the next sequence", "acc, mask=keys < length)", "acc, mask=wide_start + keys < total)"),
    _fault("the first tile of keys in each", "keys = first_key + tl.arange(0, BLOCK_N)", "keys = tl.arange(0, BLOCK_N)"),
    _fault("the tail not zeroed", "tl.store(received_ptr + rows, tl.zeros((BLOCK_N,), tl.float32), mask=rows < total)", "pass"),
    _fault("zeros past the tail", "mask=rows < total)", "mask=rows <= total)"),
    _fault("a part of the tail", "range(start + first_key, total, length)", "range(start + first_key, total - BLOCK_N, length)"),
    # how the work is cut
    _fault("a tile per sequence too few", "n_tiles = max(1, cdiv(max_seqlen, config.block_n))", "n_tiles = max(1, max_seqlen // config.block_n)"),
    _fault("no slot for the tail", "in_planes(n_tiles * (batch + 1))", "in_planes(n_tiles * batch)"),
    _fault("tiles that no sequence fills", "if enough and config.block_n <= 2**seqlen:", "if enough:"),
    _fault("too few programs", "enough = 4 * cdiv(2**rows, config.block_n) >= 3 * multiprocessors", "enough = True"),
    _fault("one head alone", "return received.sum(0)", "return received[0]"),
    _fault("wide heads not passed on", "if fits else aten", "if True else aten", "fastbert/backends/triton/attention_received.py"),
)  # fmt: skip

SUITE = of_op(FAULTS, "attention_received")
