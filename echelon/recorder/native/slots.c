/* Operations into their slots, as operations.py writes them, byte for byte.
 *
 * A slot is a seqlock whose reader does not rely on it: the stores are fenced, and a checksum
 * decides (schema.py, [Note: what makes a slot readable]). An operation that has not ended when its
 * slot is needed again moves out, with its signature: kept.py.
 */
#include "ring.h"

#include <string.h>

static void write_state(struct bb_state *cell, uint64_t stamp, int64_t started, int64_t ended,
                        uint32_t error, uint32_t state)
{
    struct {
        int64_t started, ended;
        uint32_t error, state;
    } body = {started, ended, error, state};
    bb_store(&cell->head, stamp);
    atomic_thread_fence(memory_order_release);
    memcpy(&cell->started_mono_ns, &body, sizeof body);
    cell->crc = bb_crc32(&body, sizeof body, (uint32_t)stamp);
    cell->reserved = 0;
    atomic_store_explicit(&cell->tail, stamp, memory_order_release);
}

static void write_slot(struct bb_slot *slot, const struct bb_fixed *fixed)
{
    uint64_t stamp = fixed->record + 1;
    bb_store(&slot->head, stamp);
    atomic_thread_fence(memory_order_release);
    slot->length = sizeof *fixed;
    slot->crc = bb_crc32(fixed, sizeof *fixed, 0);
    slot->fixed = *fixed;
    atomic_store_explicit(&slot->tail, stamp, memory_order_release);
}

static bool has_ended(const struct bb_slot *slot, uint64_t stamp)
{
    return bb_load(&slot->state.head) == stamp && slot->state.state >= BB_COMPLETED;
}

static bool is_open(const struct bb_slot *slot)
{
    uint64_t stamp = bb_load(&slot->head);
    return stamp && !has_ended(slot, stamp);
}

static struct bb_kept *kept_place(const struct bb_ring *ring, uint64_t stamp)
{
    for (uint64_t i = 0; i < ring->num_kept_places; i++)
        if (bb_load(&ring->kept[i].slot.head) == stamp)
            return &ring->kept[i];
    return NULL;
}

/* Copy the signature that `ref` points to; return its length, 0 if it was overwritten. */
static uint32_t copy_signature(const struct bb_ring *ring, uint32_t ref, unsigned char *to)
{
    const unsigned char *entry = ring->recent + (uint64_t)(ref % BB_RECENT_UNITS_ROUND) * 16;
    uint32_t head[4];
    memcpy(head, entry, sizeof head);
    if (head[0] != ref || head[1] > BB_MAX_SIGNATURE_BYTES)
        return 0;
    memcpy(to, entry + sizeof head, head[1]);
    return head[1];
}

/* Let an operation that has not ended move out of its slot; false if no place is free. */
static bool make_room(struct bb_ring *ring, const struct bb_slot *slot)
{
    struct bb_kept *place = kept_place(ring, 0);
    if (!place)
        return false;
    uint64_t stamp = bb_load(&slot->head);
    place->length = copy_signature(ring, slot->fixed.signature, place->signature);
    place->crc = bb_crc32(place->signature, place->length, (uint32_t)stamp);
    memcpy((char *)&place->slot + 8, (const char *)slot + 8, sizeof *slot - 8);
    atomic_store_explicit(&place->slot.head, stamp, memory_order_release);
    bb_store(&ring->live[BB_NUM_KEPT], bb_load(&ring->live[BB_NUM_KEPT]) + 1);
    return true;
}

/* Take the next number whose slot is free; NULL if there is none among the next ones. */
static struct bb_slot *take_slot(struct bb_ring *ring, uint64_t *record)
{
    for (int i = 0; i < BB_MAX_TRIES; i++) {
        *record = ring->next++;
        struct bb_slot *slot = &ring->slots[*record % ring->num_slots];
        if (!is_open(slot) || make_room(ring, slot))
            return slot;
    }
    bb_store(&ring->live[BB_KEPT_REFUSED], bb_load(&ring->live[BB_KEPT_REFUSED]) + 1);
    return NULL;
}

int64_t bb_operation_begin(struct bb_ring *ring, struct bb_fixed *fixed, bool is_started)
{
    struct bb_slot *slot = take_slot(ring, &fixed->record);
    if (!slot)
        return -1;
    write_slot(slot, fixed);
    bb_store(&ring->live[BB_NUM_OPERATIONS], fixed->record + 1);
    bb_store(&ring->live[BB_PROGRESS], (uint64_t)fixed->created_mono_ns);
    if (is_started)
        write_state(&slot->state, fixed->record + 1, fixed->created_mono_ns, 0, 0, BB_STARTED);
    return (int64_t)fixed->record;
}

/* Find where an operation is that has not ended; NULL: it has, or never was. */
static struct bb_slot *find(const struct bb_ring *ring, int64_t record, bool *is_kept)
{
    uint64_t stamp = (uint64_t)record + 1;
    *is_kept = false;
    if (record < 0)
        return NULL;
    struct bb_slot *slot = &ring->slots[(uint64_t)record % ring->num_slots];
    if (bb_load(&slot->head) == stamp)
        return has_ended(slot, stamp) ? NULL : slot;
    struct bb_kept *kept = bb_load(&ring->live[BB_NUM_KEPT]) ? kept_place(ring, stamp) : NULL;
    *is_kept = kept != NULL;
    return kept ? &kept->slot : NULL;
}

void bb_operation_started(struct bb_ring *ring, int64_t record, int64_t began)
{
    bool is_kept;
    struct bb_slot *slot = find(ring, record, &is_kept);
    if (slot)
        write_state(&slot->state, (uint64_t)record + 1, began, 0, 0, BB_STARTED);
}

void bb_operation_ended(struct bb_ring *ring, int64_t record, int64_t ended, uint32_t error,
                        uint32_t state)
{
    bool is_kept;
    struct bb_slot *slot = find(ring, record, &is_kept);
    if (is_kept) {
        bb_store(&slot->head, 0);
        bb_store(&ring->live[BB_NUM_KEPT], bb_load(&ring->live[BB_NUM_KEPT]) - 1);
    } else if (slot) {
        uint64_t stamp = (uint64_t)record + 1;
        int64_t started = bb_load(&slot->state.head) == stamp ? slot->state.started_mono_ns : 0;
        write_state(&slot->state, stamp, started, ended, error, state);
    }
}
