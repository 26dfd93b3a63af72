/* Spans into their slots, as spans.py writes them, byte for byte: the open ones in places of their
 * own, which a reader sees while they last, the ended ones in a ring.
 */
#include "ring.h"

void bb_ring_prepare(struct bb_ring *ring)
{
    for (int i = 0; i < BB_NUM_OPEN_SPANS; i++)
        ring->places[i] = (uint8_t)i;
    ring->place_to_take = 0;
    ring->place_to_free = BB_NUM_OPEN_SPANS;
}

static int take_place(struct bb_ring *ring)
{
    if (ring->place_to_take == ring->place_to_free)
        return -1;
    return ring->places[ring->place_to_take++ % BB_NUM_OPEN_SPANS];
}

static void write_slot(struct bb_span_slot *slot, uint64_t stamp, const struct bb_span_fixed *fixed)
{
    bb_store(&slot->head, stamp);
    atomic_thread_fence(memory_order_release);
    slot->length = sizeof *fixed;
    slot->crc = bb_crc32(fixed, sizeof *fixed, 0);
    slot->fixed = *fixed;
    atomic_store_explicit(&slot->tail, stamp, memory_order_release);
}

static void write_ended(struct bb_ring *ring, const struct bb_span_fixed *fixed)
{
    uint64_t record = ring->next_ended++;
    write_slot(&ring->spans[record % ring->num_spans], record + 1, fixed);
}

void bb_span_open(struct bb_ring *ring, struct bb_span *span)
{
    struct bb_span_fixed *fixed = &span->fixed;
    span->is_closed = false;
    span->place = take_place(ring);
    fixed->number = ring->next_span++;
    fixed->ended_mono_ns = 0;
    fixed->reserved = 0;
    if (span->place >= 0)
        write_slot(&ring->open_spans[span->place], fixed->number + 1, fixed);
    else
        bb_store(&ring->live[BB_SPANS_REFUSED], bb_load(&ring->live[BB_SPANS_REFUSED]) + 1);
    bb_store(&ring->live[BB_PROGRESS], (uint64_t)fixed->started_mono_ns);
}

void bb_span_close(struct bb_ring *ring, struct bb_span *span, int64_t ended)
{
    if (span->is_closed)
        return; /* its place may be another span's by now */
    span->is_closed = true;
    span->fixed.ended_mono_ns = ended;
    write_ended(ring, &span->fixed);
    if (span->place >= 0) {
        write_slot(&ring->open_spans[span->place], span->fixed.number + 1, &span->fixed);
        ring->places[ring->place_to_free++ % BB_NUM_OPEN_SPANS] = (uint8_t)span->place;
    }
    bb_store(&ring->live[BB_NUM_SPANS], bb_load(&ring->live[BB_NUM_SPANS]) + 1);
    bb_store(&ring->live[BB_PROGRESS], (uint64_t)ended);
}

void bb_span_keep(struct bb_ring *ring, struct bb_span_fixed *fixed)
{
    fixed->number = ring->next_span++;
    fixed->reserved = 0;
    write_ended(ring, fixed);
}
