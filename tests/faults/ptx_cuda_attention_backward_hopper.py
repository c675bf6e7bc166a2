"""Faults of attention's backward for compute capability 9.0, in the PTX emulator: waits, fences, tails, masks."""

# ruff: noqa: E501 (a table)

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
    _fault("dq: each tile of keys begins anew", "keys + slot * kTileStep, first_key > 0);", "keys + slot * kTileStep, false);"),
    _fault("dk: each tile of queries begins anew", "of_ds, queries + slot * kTileStep, first_row > 0);", "of_ds, queries + slot * kTileStep, false);", _DKDV),
    _fault("the depth of a transposed tile does not advance", "b + k * kTransposedStep", "b", _SHARED),
    # tails
    _fault("dq: the next sequence's keys stay", "                zero_rest(shared.key[slot], length - first_key);\n", ""),
    _fault("dq: zeros without a fence", "                fence_shared();\n", ""),
    _fault("dq: keys behind the end have a probability", "if (i / 4 * 8 + i % 2 >= left) p[i] = 0.0f;", "if (i / 4 * 8 + i % 2 > left) p[i] = 0.0f;"),
    _fault("dkdv: the next sequence's queries stay", "            zero_rest(shared.query[slot], length - first_row);\n", "", _DKDV),
    _fault("one row too few is zero", ">= left) store_pack", "> left) store_pack", _SHARED),
    _fault("rows after the sequences are not zero", "            zero_rows<T, kD>(dv, args.grad_stride, first, args.total);\n", "", _DKDV),
    # delta, bits, factors
    _fault("delta is not corrected", "delta[half] += rest[half] /", "delta[half] += 0.0f * rest[half] /"),
    _fault("no second walk", "if (rough) shared.rough = 1;", "if (rough) shared.rough = 0;"),
    _fault("the second walk adds to the first", "        norm[0] = norm[1] = 0.0f;\n", ""),
    _fault("delta with dropout's factor", "delta[half] / factor;", "delta[half];"),
    _fault("dq: bits of the next row", "[word * kOwned + warp_row + group + 8 * half] >>", "[word * kOwned + warp_row + group + 1 + 8 * half] >>"),
    _fault("dq: bits of the first keys", "inside ? bits + first_key / 32 : args.keep_bits", "inside ? bits : args.keep_bits"),
    _fault("dkdv: bits of the first keys", "plane * words + first / 32 + thread / kGroupTile;", "plane * words + thread / kGroupTile;", _DKDV),
    _fault("dk without dropout's factor", "of_k[2] = {factor * scale, factor * scale}", "of_k[2] = {scale, scale}", _DKDV),
)  # fmt: skip

_QUICK = (
    "hopper and (test_lengths and (65 or 129 or 193) or places or order or (nan and not inf) or one_key or among"
    " or exact or definitions or side_by_side or serve)"
)

SUITE = Suite(faults=FAULTS, tests=("tests/ptx/test_cuda_attention_backward.py", "-k", _QUICK), **IN_EMULATOR)
