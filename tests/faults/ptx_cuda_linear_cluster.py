"""Faults of products by clusters and of chained launches, in the PTX emulator."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_fault = faults_of("csrc/cuda/linear_cluster_hopper.cu")
_RUN = "csrc/cuda/encoder_layers.cu"

FAULTS = (
    # the ring
    _fault("a slot is filled while it is read", "            wait_phase(&empty[step % kSlots], (step / kSlots - 1) & 1);\n", ""),
    _fault("the producer waits for the phase to come", "(step / kSlots - 1) & 1)", "(step / kSlots) & 1)"),
    _fault("a slot is read before it is filled", "            wait_phase(&full[step % kSlots], step / kSlots & 1);\n", ""),
    _fault("every turn of the ring has parity 0", "step / kSlots & 1);", "0);"),
    _fault("a slot counts as free when one warp is done", "init_barrier(&empty[i], Tile::kConsumers / kWarp);", "init_barrier(&empty[i], 1);"),
    _fault("a slot is given back while its products run", "            wait_products<1>();\n", ""),
    _fault("the slot of this step is given back", "arrive(&empty[(step - 1) % kSlots]);", "arrive(&empty[step % kSlots]);"),
    _fault("bytes of b alone are expected", "arrive_expecting(&full[slot], Tile::kSlotBytes);", "arrive_expecting(&full[slot], Tile::kTileBytes);"),
    _fault("b where a is", "Tile::kSlotBytes + Tile::kTileBytes, maps.b", "Tile::kSlotBytes, maps.b"),
    _fault("barriers are used before they are there", "        fence_barriers();\n    }\n    __syncthreads();\n", "        fence_barriers();\n    }\n"),
    # products and parts
    _fault("the accumulators are read while products run", "        wait_products<0>();\n", "        wait_products<1>();\n"),
    _fault("each step begins anew", "step + k > 0);", "k > 0);"),
    _fault("the depth of b does not advance", "b + k * kDepthStep", "b"),
    _fault("sums over operands that are still read", "        // No product reads the ring any more.\n        sync_threads_at(1, Tile::kConsumers);\n", ""),
    _fault("all parts begin where the first does", "(begin + step) * Tile::kDepth);\n        };\n        const auto copy_b", "step * Tile::kDepth);\n        };\n        const auto copy_b"),
    _fault("steps between parts are lost", "all_steps * (part + 1) / args.parts - begin;", "all_steps / args.parts;"),
    _fault("the other half of a fragment's rows", "to + 8 * half * Tile::kStride + 8 * i", "to + 8 * (1 - half) * Tile::kStride + 8 * i"),
    # the sum
    _fault("parts are read before they are written", "    sync_cluster();\n\n    wait_for_kernels();\n", "    __syncthreads();\n\n    wait_for_kernels();\n"),
    _fault("a block ends while others read its sums", "    // Until no block reads the sums of this one\n    sync_cluster();\n", ""),
    _fault("the own part for every part", "load_from_rank(from + 4 * half, i)", "load_from_rank(from + 4 * half, part)"),
    _fault("rows behind the last one are stored", "rows - row < Tile::kRows ? rows - row : Tile::kRows;", "Tile::kRows;"),
    _fault("columns behind the last one are stored", "if (inside) store_pack(", "store_pack("),
    _fault("bias of the tile's first columns", "static_cast<const T*>(args.bias) + column + own_column", "static_cast<const T*>(args.bias) + own_column"),
    _fault("chunks between two blocks are lost", "last = down * (part + 1) / args.parts * kAcross;", "last = down / args.parts * (part + 1) * kAcross;"),
    _fault("parts of one step", "std::min(most, steps / 2)", "std::min(most, steps)"),
    _fault("nine blocks in a cluster", "kMostParts = 8;", "kMostParts = 9;"),
    # moments of the sum
    _fault("no residual", "z[i] += widen(residual.item[i]);", "z[i] += 0.0f;"),
    _fault("the residual of the tile's first columns", "args.residual_stride +\n                                 column + own_column);", "args.residual_stride + own_column);"),
    _fault("a mean of 64 columns, however many there are", "min(kTile, columns - column)", "kTile"),
    _fault("a mean of half the lanes", "warp_sum<8>(total, lanes)", "warp_sum<4>(total, lanes)"),
    _fault("squares that are not centred", "square += (z[i] - mean) * (z[i] - mean);", "square += z[i] * z[i];"),
    _fault("squares of columns behind the last one", "inside ? square : 0.0f", "square"),
    _fault("moments of the first tile alone", "+ column / kTile] = {mean, square};", "] = {mean, square};"),
    # the norm
    _fault("moments are read before they are there", "            load_params(0);\n            wait_for_kernels();\n", "            load_params(0);\n"),
    _fault("statistics of the tile's first row", "{row + (at < down ? at : 0)} * all_steps", "{row} * all_steps"),
    _fault("statistics of the first tile of rows", "{row + (at < down ? at : 0)} * all_steps", "{at < down ? at : 0} * all_steps"),
    _fault("each moment counts for 64 columns", "min(kTile, hidden - (first + 4 * i) * kTile)", "kTile"),
    _fault("sixteen moments of a row", "first += 16)", "first += 1 << 20)"),
    _fault("differences between means are left out", "own[i].square + columns * apart * apart;", "own[i].square;"),
    _fault("the variance around another mean", "/ count - mean * mean;", "/ count;"),
    _fault("the mean of the first columns", "make_float2(around + mean,", "make_float2(around,"),
    _fault("no eps", "(variance < 0.0f ? 0.0f : variance) + eps)", "(variance < 0.0f ? 0.0f : variance))"),
    _fault("products that may not see normed rows", "                fence_shared();\n", ""),
    _fault("no bias of the norm", "* weight[k] + bias[k];", "* weight[k];"),
    _fault("a row's statistics are used before they are there", "            sync_threads_at(1, Tile::kConsumers);\n        }\n        float c[32]", "        }\n        float c[32]"),
    _fault("products of rows that are not normed yet", "                sync_threads_at(1, Tile::kConsumers);\n            }\n", "            }\n"),
    _fault("weights of the step before", "load_params(step + 1);", "load_params(step);"),
    _fault("half of the rows are normed", "if (i >= down) break;", "if (half > 0) break;"),
    _fault("another row's statistics", "own = statistics[i];", "own = statistics[first];"),
    _fault("every tile stores the rows", "                if (column == 0)\n", ""),
    _fault("normed rows behind the last one are stored", "                if (i >= down) break;\n", ""),
    _fault("both groups have the same columns", "slot + (1 + group) * Tile::kTileBytes", "slot + Tile::kTileBytes"),
    _fault("both groups' sums in one place", " + group * kTile + 2 * (lane % 4)", " + 2 * (lane % 4)"),
    _fault("columns behind the last one are normed", "            if (at >= depth) return;\n            float weight[8]", "            float weight[8]"),
    _fault("a product of what is not normed", "args.a = memory_.sum, args.norm = pending_;", "args.norm = pending_;", _RUN),
    _fault("rows are normed twice", "        pending_ = {};\n", "", _RUN),
    _fault("the last norm is left out", "        return norm_sum(call_.first_only ? call_.batch : call_.rows);", "        return nullptr;", _RUN),
    _fault("a refused map leaves out a norm", "        if (refused) error = norm_sum(args.rows);\n", "", _RUN),
    _fault("moments where the norm is", "found.moments = static_cast<Moments*>(", "found.moments = static_cast<Moments*>(found.sum), static_cast<void>(", _RUN),
    # chained kernels
    _fault("a, too, comes before the wait", "        wait_for_kernels();\n        for (int step = 0; step < steps && step < kSlots; ++step) copy_a(step);\n", "        for (int step = 0; step < steps && step < kSlots; ++step) copy_a(step);\n        wait_for_kernels();\n"),
    _fault("c is stored without a wait", "    sync_cluster();\n\n    wait_for_kernels();\n", "    sync_cluster();\n\n"),
    _fault("the norm does not wait", "    if (row >= args.rows) return;\n    wait_for_kernels();\n", "    if (row >= args.rows) return;\n", "csrc/cuda/layer_norm.cu"),
    _fault("attention of short texts does not wait", "    wait_for_kernels();\n", "", "csrc/cuda/attention_short.cu"),
    _fault("attention does not wait", "    wait_for_kernels();\n", "", "csrc/cuda/attention_forward.cuh"),
    _fault("first rows do not wait", "    wait_for_kernels();\n", "", _RUN),
    _fault("the next call is chained too", "    ~Run() { chained = false; }\n", "", _RUN),
    _fault("kernels of others are chained", "chained = few_ && device_.chained;", "chained = device_.chained;", _RUN),
    _fault("launches are never chained", "chained = few_ && device_.chained;", "chained = false;", _RUN),
    _fault("any number of rows is few", "call.rows <= kFewRows)", "call.rows <= 1000)", _RUN),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/ptx/test_cuda_linear_cluster.py",
        "tests/ptx/test_cuda_encoder_layers.py",
        "-k",
        "not activations and not of_base",
    ),
    **IN_EMULATOR,
)
