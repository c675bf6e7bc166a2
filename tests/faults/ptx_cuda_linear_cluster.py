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
    _fault("a slot counts as free when one warp is done", "init_barrier(&empty[i], Tile::kWarps);", "init_barrier(&empty[i], 1);"),
    _fault("a slot is given back while its products run", "            wait_products<1>();\n", ""),
    _fault("the slot of this step is given back", "arrive(&empty[(step - 1) % kSlots]);", "arrive(&empty[step % kSlots]);"),
    _fault("bytes of b alone are expected", "arrive_expecting(&full[slot], Tile::kSlotBytes);", "arrive_expecting(&full[slot], Tile::kTileBytes);"),
    _fault("b where a is", "Tile::kSlotBytes + Tile::kTileBytes, maps.b", "Tile::kSlotBytes, maps.b"),
    _fault("barriers are used before they are there", "        fence_barriers();\n    }\n    __syncthreads();\n", "        fence_barriers();\n    }\n"),
    # products and parts
    _fault("the accumulators are read while products run", "        wait_products<0>();\n", "        wait_products<1>();\n"),
    _fault("each step begins anew", "step + k > 0);", "k > 0);"),
    _fault("the depth of b does not advance", "b + k * kDepthStep", "b"),
    _fault("sums over operands that are still read", "        sync_threads_at(1, kGroupThreads);\n", ""),
    _fault("all parts begin where the first does", "(begin + step) * Tile::kDepth);\n        };\n        const auto copy_b", "step * Tile::kDepth);\n        };\n        const auto copy_b"),
    _fault("steps between parts are lost", "all_steps * (part + 1) / args.parts - begin;", "all_steps / args.parts;"),
    _fault("the other half of a fragment's rows", "own + 8 * half * Tile::kStride + 8 * i", "own + 8 * (1 - half) * Tile::kStride + 8 * i"),
    # the sum
    _fault("parts are read before they are written", "    sync_cluster();\n\n    wait_for_kernels();\n", "    __syncthreads();\n\n    wait_for_kernels();\n"),
    _fault("a block ends while others read its sums", "    // Until no block reads the sums of this one\n    sync_cluster();\n", ""),
    _fault("the own part for every part", "load_from_rank(from + 4 * half, i)", "load_from_rank(from + 4 * half, part)"),
    _fault("rows behind the last one are stored", "args.rows - row < Tile::kRows ? args.rows - row : Tile::kRows;", "Tile::kRows;"),
    _fault("columns behind the last one are stored", "if (column + own_column >= args.columns) continue;", ""),
    _fault("bias of the tile's first columns", "static_cast<const T*>(args.bias) + column + own_column", "static_cast<const T*>(args.bias) + own_column"),
    _fault("chunks between two blocks are lost", "last = chunks * (part + 1) / args.parts;", "last = chunks / args.parts * (part + 1);"),
    _fault("parts of one step", "std::min(most, steps / 2)", "std::min(most, steps)"),
    _fault("nine blocks in a cluster", "kMostParts = 8;", "kMostParts = 9;"),
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
