"""Faults of attention's backward for compute capability 9.0, in the PTX emulator: waits, fences, tails, masks."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_DQ = "csrc/cuda/attention_backward_dq_hopper.cu"
_DKDV = "csrc/cuda/attention_backward_dkdv_hopper.cu"
_SHARED = "csrc/cuda/attention_backward_hopper.cuh"
_fault = faults_of(_DQ)

FAULTS = (
    # tiles come and go
    _fault("dq: a tile is used before it is there", "            wait_phase(&shared.full[slot], parity);\n", ""),
    _fault("dq: a turn of the ring keeps its parity", "            parity ^= next == 0;\n", ""),
    _fault("dq: bits are not waited for", "            wait_copies<0>();\n", ""),
    _fault("dq: no barrier before the next tile comes", "            __syncthreads();\n            // The products", "            // The products"),
    _fault("dq: the next tile into the slot in use", "fetch(first_key + kGroupTile, next);", "fetch(first_key + kGroupTile, slot);"),
    _fault("dq: the queries are not waited for", "    wait_phase(&shared.own, 0);\n", ""),
    _fault("dkdv: a tile is used before it is there", "        wait_phase(&shared.full[slot], parity);\n", "", _DKDV),
    _fault("dkdv: a turn of the ring keeps its parity", "        parity ^= slot;\n", "", _DKDV),
    _fault("dkdv: numbers and bits are not waited for", "        wait_copies<0>();\n", "", _DKDV),
    _fault("dkdv: a slot is filled while its products run", "        wait_products<0>();\n        parity ^= slot;", "        parity ^= slot;", _DKDV),
    _fault("dkdv: numbers are not committed", "        commit_copies();\n    };", "    };", _DKDV),
    _fault("bytes of one tile are expected", "arrive_expecting(barrier, 2 * kTileBytes);", "arrive_expecting(barrier, kTileBytes);", _SHARED),
    # products
    _fault("dq: S is read while its product runs", "            wait_products<1>();\n", "            wait_products<2>();\n"),
    _fault("dq: the sum is read while it grows", "        wait_products<0>();\n        settle(grad);", "        settle(grad);"),
    _fault("dq: each tile of keys begins anew", "keys + slot * kTileStep, first_key > begin);", "keys + slot * kTileStep, false);"),
    _fault("dk: each tile of queries begins anew", "of_ds, queries + slot * kTileStep, add);", "of_ds, queries + slot * kTileStep, false);", _DKDV),
    _fault("the depth of a transposed tile does not advance", "b + k * kTransposedStep", "b", _SHARED),
    # tails
    _fault("dq: the next sequence's keys stay", "                zero_rest(shared.key[slot], length - first_key);\n", ""),
    _fault("dq: zeros without a fence", "                fence_shared();\n", ""),
    _fault("dq: keys behind the end have a probability", " || at >= most[i / 2 % 2]) c[i]", " || at > most[i / 2 % 2]) c[i]", _SHARED),
    _fault("dkdv: the next sequence's queries stay", "            zero_rest(shared.query[slot], length - first_row);\n", "", _DKDV),
    _fault("one row too few is zero", ">= left) store_pack", "> left) store_pack", _SHARED),
    _fault("rows after the sequences are not zero", "            zero_rows<T, kD>(dv, args.kv_grad_stride, first, args.total);\n", "", _DKDV),
    # windows and shared heads
    _fault("a key too many on the left", "(kLocal && at < least[i / 2 % 2])", "(kLocal && at + 1 < least[i / 2 % 2])", _SHARED),
    _fault("dq: the walk ends with the first row's keys", "end = reach.end_key(first + kOwned - 1);", "end = reach.end_key(first);"),
    _fault("dq: a tile on the left not visited", "begin = reach.first_key(first) / kGroupTile * kGroupTile", "begin = (reach.first_key(first) / kGroupTile + 1) * kGroupTile"),
    _fault("dq: tiles on the left not masked", "(kLocal && first_key < whole);", "(kLocal && first_key < 0);"),
    _fault("dq: all tiles visited", "begin = reach.first_key(first) / kGroupTile * kGroupTile", "begin = 0"),
    _fault("dq: keys of the query's own head", "kv_column = kLocal ? kv_head_of(args, static_cast<int>(head)) * kD : column;", "kv_column = column;"),
    _fault("dkdv: the sides of the window exchanged", "reach({args.window.right, args.window.left}, length)", "reach({args.window.left, args.window.right}, length)", _DKDV),
    _fault("dkdv: the walk ends with the first key's queries", "end = kLocal ? reach.end_key(last) : length;", "end = kLocal ? reach.end_key(first) : length;", _DKDV),
    _fault("dkdv: the walk begins with the last key's queries", "begin = kLocal ? reach.first_key(first) : 0", "begin = kLocal ? reach.first_key(last) : 0", _DKDV),
    _fault("dkdv: tiles before all see the keys not masked", "(first_row < whole ||", "(first_row < 0 ||", _DKDV),
    _fault("dkdv: tiles after all see the keys not masked", "(seen < length && first_row + kGroupTile > seen)", "(seen < 0 && first_row + kGroupTile > seen)", _DKDV),
    _fault("dkdv: one head of a group", "head + 1 < end_head) next_row", "head + 2 < end_head) next_row", _DKDV),
    _fault("dkdv: each head begins anew", "(kLocal && head > first_head);", "(kLocal && head < first_head);", _DKDV),
    _fault("dkdv: the next head with the first one's numbers", "(kLocal ? (head - first_head) * args.total : 0)", "(kLocal ? 0 * (head - first_head) * args.total : 0)", _DKDV),
    _fault("causal masks by the kernels without", "own.local = cuda::is_masked(args);", "own.local = cuda::is_local(args);", _DKDV),
    _fault("windows by the kernels without", "own.local = cuda::is_masked(args);", "own.local = false;", _DKDV),
    # delta, bits, factors
    _fault("delta is not corrected", "delta[half] += rest[half] /", "delta[half] += 0.0f * rest[half] /"),
    _fault("no second walk", "if (rough) shared.rough = 1;", "if (rough) shared.rough = 0;"),
    _fault("the second walk adds to the first", "        norm[0] = norm[1] = 0.0f;\n", ""),
    _fault("delta with dropout's factor", "delta[half] / factor;", "delta[half];"),
    _fault("dq: bits of the next row", "[word * kOwned + warp_row + group + 8 * half] >>", "[word * kOwned + warp_row + group + 1 + 8 * half] >>"),
    _fault("dq: bits of the first keys", "inside ? bits + first_key / 32 : args.keep_bits", "inside ? bits : args.keep_bits"),
    _fault("dkdv: bits of the first keys", "plane * words + first / 32 + thread / kGroupTile;", "plane * words + thread / kGroupTile;", _DKDV),
    _fault("dq: the gate forgotten", "(args.gate != nullptr ? args.gate[head] : 1.0f)", "1.0f"),
    _fault("dq: the first head's gate", "args.gate[head]", "args.gate[0]"),
    _fault("dkdv: the gate forgotten", "(args.gate != nullptr ? args.gate[kv_head] : 1.0f)", "1.0f", _DKDV),
    _fault("delta of a closed gate", "factor == 0.0f ? 0.0f : ", ""),
    _fault("dgate without dropout's factor", "* inverse[half] * args.dropout.scale;", "* inverse[half];"),
    _fault("dgate counts the walk's second half alone", "gate[i / 2 % 2] = fmaf(p[i], ds[i], gate[i / 2 % 2]);", "gate[i / 2 % 2] = p[i] * ds[i];"),
    _fault("dgate of rows after the sequences", "args.dgate[head * args.total + row] = 0.0f;", ";"),
    _fault("dk without dropout's factor", "of_k[2] = {factor * scale, factor * scale}", "of_k[2] = {scale, scale}", _DKDV),
)  # fmt: skip

_QUICK = (
    "hopper and (test_lengths and (65 or 129 or 193) or places or order or (nan and not inf) or one_key or among"
    " or exact or closed or definitions or side_by_side or serve or windows or identity or not_read or shared_heads)"
)

SUITE = Suite(faults=FAULTS, tests=("tests/ptx/test_cuda_attention_backward.py", "-k", _QUICK), **IN_EMULATOR)
