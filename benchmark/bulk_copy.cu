// A trial: pages copied by Hopper's bulk copy engine (TMA) through shared memory, driven by one thread a block.
//
//   source --bulk load--> stage of shared memory --bulk store--> destination      STAGES loads are under way at once
//
// It shares out chunks as the Triton kernel in cuda/page_kernel.py does, and reads the same tables.
#include <cstdint>

#ifndef STAGES
#define STAGES 8
#endif

struct Item {
    uint64_t source, destination;
    uint32_t bytes;
};

// The chunks of one block: every gridDim.x-th over all rows of the map table.
struct Items {
    const int64_t *maps, *pairs;
    int row, end, kinds, to_device;
    uint32_t chunk_bytes, taken, item, total, chunks, step;
    int64_t first, page_bytes;

    __device__ void enter_row() {
        const int64_t *entry = maps + row * 5;
        page_bytes = entry[4] * 8;
        first = pairs[2 * (row % kinds)];
        chunks = max((uint32_t)((page_bytes + chunk_bytes - 1) / chunk_bytes), 1u);
        step = ((uint32_t)(page_bytes + chunks - 1) / chunks + 127) / 128 * 128;
        total = page_bytes ? (uint32_t)pairs[2 * (row % kinds) + 1] * chunks : 0;
        item = (blockIdx.x + gridDim.x - taken) % gridDim.x;
    }

    __device__ bool next(Item &found) {
        while (row < end && item >= total) {
            taken = (taken + total) % gridDim.x;
            if (++row < end) enter_row();
        }
        if (row >= end) return false;
        const int64_t *entry = maps + row * 5;
        const int64_t *pair = pairs + 2 * (kinds + first + item / chunks);
        uint32_t start = (item % chunks) * step;
        uint64_t host = entry[0] + pair[0] * entry[1] + start;
        uint64_t device = entry[2] + pair[1] * entry[3] + start;
        found.source = to_device ? host : device;
        found.destination = to_device ? device : host;
        found.bytes = start < page_bytes ? min(step, (uint32_t)page_bytes - start) : 0;
        item += gridDim.x;
        return true;
    }
};

__device__ uint32_t shared_address(const void *pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }

__device__ void load(uint32_t stage, uint32_t barrier, const Item &item) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(item.bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage),
                 "l"(item.source), "r"(item.bytes), "r"(barrier)
                 : "memory");
}

__device__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n .reg .pred done;\n again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @!done bra again;\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

extern "C" __global__ void bulk_copy_pages(const int64_t *maps, const int64_t *pairs, int first_map, int maps_end,
                                           int kinds, int to_device, int chunk_bytes) {
    extern __shared__ __align__(128) uint8_t stages[];
    __shared__ __align__(8) uint64_t barriers[STAGES];
    __shared__ uint64_t destinations[STAGES];
    __shared__ uint32_t sizes[STAGES];
    if (threadIdx.x) return;
    for (int stage = 0; stage < STAGES; ++stage)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[stage])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    Items items{maps, pairs, first_map, maps_end, kinds, to_device, (uint32_t)chunk_bytes};
    items.taken = 0;
    items.enter_row();
    uint32_t loaded = 0, stored = 0;
    bool more = true;
    auto fill = [&]() {
        Item item;
        do {
            more = items.next(item);
        } while (more && item.bytes == 0);
        if (!more) return;
        uint32_t stage = loaded % STAGES;
        destinations[stage] = item.destination;
        sizes[stage] = item.bytes;
        load(shared_address(stages) + stage * chunk_bytes, shared_address(&barriers[stage]), item);
        ++loaded;
    };
    while (more && loaded < STAGES) fill();
    while (stored < loaded) {
        uint32_t stage = stored % STAGES;
        wait(shared_address(&barriers[stage]), (stored / STAGES) & 1);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destinations[stage]),
                     "r"(shared_address(stages) + stage * chunk_bytes), "r"(sizes[stage])
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        ++stored;
        // The store before this one has read its stage: fill that again. In the end nothing is left to fill.
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        if (more && loaded < stored - 1 + STAGES) fill();
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
