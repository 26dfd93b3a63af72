/* Sends and receives: one byte ring for each ordered pair of ranks.
 *
 * A message is a head of one cache line and its body, padded to whole lines. The sender copies
 * while there is room, so a small message is gone at once and a large one streams through. The
 * receiver reads messages in the order in which they were sent; matching.c decides where each goes.
 */
#include "engine.h"

#include <string.h>

enum {
    EC_STRIDE = 64 << 10, /* copied between two announcements */
    EC_STEPS = 64,        /* strides for one peer before the others are served */
};

struct head {
    uint64_t num_bytes;
    int64_t sent_ns;
    int32_t tag;
    uint32_t type_id;
    uint8_t unused[EC_LINE - 24];
};

static size_t padded(size_t num_bytes)
{
    return (num_bytes + EC_LINE - 1) / EC_LINE * EC_LINE;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Copy into or out of the ring at `at`, around its end. */
static void copy_in(struct ec_engine *engine, struct ec_ring *ring, uint64_t at,
                    const uint8_t *bytes, size_t num)
{
    size_t start = at % engine->ring_bytes, first = smaller(num, engine->ring_bytes - start);
    memcpy(ring->bytes + start, bytes, first);
    memcpy(ring->bytes, bytes + first, num - first);
}

static void copy_out(struct ec_engine *engine, const struct ec_ring *ring, uint64_t at,
                     uint8_t *bytes, size_t num)
{
    size_t start = at % engine->ring_bytes, first = smaller(num, engine->ring_bytes - start);
    memcpy(bytes, ring->bytes + start, first);
    memcpy(bytes + first, ring->bytes, num - first);
}

/* ---- sending ---- */

void ec_begin_send(struct ec_engine *engine, struct ec_op *op)
{
    ec_append(&engine->sends[op->root], op);
    engine->num_sends++;
}

static uint64_t room_in(struct ec_engine *engine, struct ec_ring *ring)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed); /* this rank's own */
    return engine->ring_bytes - (tail - atomic_load_explicit(&ring->head, memory_order_acquire));
}

bool ec_can_send(struct ec_engine *engine, int peer)
{
    return room_in(engine, ec_ring_of(engine, engine->rank, peer)) >= EC_LINE;
}

static bool step_send(struct ec_engine *engine, struct ec_op *op)
{
    struct ec_ring *ring = ec_ring_of(engine, engine->rank, op->root);
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint64_t room = room_in(engine, ring);
    if (room < EC_LINE)
        return false;
    if (!op->begun) {
        struct head head = {.num_bytes = op->source_bytes, .sent_ns = ec_now_ns(),
                            .tag = op->tag, .type_id = op->type_id};
        copy_in(engine, ring, tail, (const uint8_t *)&head, sizeof head);
        op->begun = true;
        tail += EC_LINE;
        room -= EC_LINE;
    }
    size_t num = smaller(smaller(op->source_bytes - op->moved, room), EC_STRIDE);
    if (num) {
        copy_in(engine, ring, tail, op->source + op->moved, num);
        op->moved += num;
    }
    ec_announce(engine, &ring->tail, tail + padded(num), op->root);
    if (op->moved == op->source_bytes) {
        ec_unlink(&engine->sends[op->root], op);
        engine->num_sends--;
        ec_finish(engine, op);
    }
    return true;
}

static bool step_sends(struct ec_engine *engine, int peer)
{
    struct ec_op *op;
    int steps = 0;
    while (steps < EC_STEPS && (op = engine->sends[peer].head) && step_send(engine, op))
        steps++;
    return steps > 0;
}

/* ---- receiving ---- */

static uint64_t num_there(struct ec_ring *ring)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed); /* this rank's own */
    return atomic_load_explicit(&ring->tail, memory_order_acquire) - head;
}

/* Whether anything of this peer lies in its ring. */
bool ec_has_come(struct ec_engine *engine, int peer)
{
    return num_there(ec_ring_of(engine, peer, engine->rank)) > 0;
}

static struct head read_head(struct ec_engine *engine, int peer)
{
    struct ec_ring *ring = ec_ring_of(engine, peer, engine->rank);
    struct head head;
    copy_out(engine, ring, atomic_load_explicit(&ring->head, memory_order_relaxed),
             (uint8_t *)&head, sizeof head);
    return head;
}

/* Tag and time of the message that is next in a ring, if its head has arrived. */
bool ec_peek(struct ec_engine *engine, int peer, int *tag, int64_t *sent_ns)
{
    if (peer == engine->rank || engine->inboxes[peer].open || !ec_has_come(engine, peer))
        return false;
    struct head head = read_head(engine, peer);
    *tag = head.tag;
    *sent_ns = head.sent_ns;
    return true;
}

static void close_message(struct ec_engine *engine, int peer)
{
    struct ec_inbox *inbox = &engine->inboxes[peer];
    struct ec_op *op = inbox->op;
    inbox->open = false;
    inbox->op = NULL;
    inbox->stash = NULL;
    if (op) {
        engine->num_receives--;
        ec_finish(engine, op);
    }
}

/* Copy what is there of the open message's body, which begins `skipped` bytes behind the head. */
static void step_body(struct ec_engine *engine, int peer, size_t skipped)
{
    struct ec_ring *ring = ec_ring_of(engine, peer, engine->rank);
    struct ec_inbox *inbox = &engine->inboxes[peer];
    uint64_t at = atomic_load_explicit(&ring->head, memory_order_relaxed) + skipped;
    size_t there = (size_t)num_there(ring) - skipped;
    size_t num = smaller(smaller(inbox->num_bytes - inbox->moved, there), EC_STRIDE);
    if (num) {
        uint8_t *target = inbox->op ? inbox->op->target : inbox->stash->bytes;
        copy_out(engine, ring, at, target + inbox->moved, num);
        inbox->moved += num;
    }
    if (num || skipped)
        ec_announce(engine, &ring->head, at + padded(num), peer);
    if (inbox->moved == inbox->num_bytes)
        close_message(engine, peer);
}

/* Read the head of the message that is next in a ring, and as much of its body as has arrived. */
void ec_open_message(struct ec_engine *engine, int peer)
{
    struct head head = read_head(engine, peer);
    ec_take_message(engine, peer, head.tag, head.type_id, head.sent_ns, head.num_bytes);
    if (engine->blame.fault == EC_FINE)
        step_body(engine, peer, EC_LINE);
}

static bool step_message(struct ec_engine *engine, int peer)
{
    if (!ec_has_come(engine, peer))
        return false;
    if (engine->inboxes[peer].open)
        step_body(engine, peer, 0);
    else
        ec_open_message(engine, peer);
    return true;
}

/* Whether anything waits for what this peer sends. */
static bool is_drained(const struct ec_engine *engine, int peer)
{
    return peer != engine->rank && (engine->receives[peer].head || engine->inboxes[peer].op ||
                                    engine->any_receives.head);
}

/* The rank whose next message was sent first. */
static int first_sender(struct ec_engine *engine)
{
    int64_t sent_ns, first_ns = INT64_MAX;
    int tag, first = -1;
    for (int peer = 0; peer < engine->size; peer++)
        if (ec_peek(engine, peer, &tag, &sent_ns) && sent_ns < first_ns) {
            first_ns = sent_ns;
            first = peer;
        }
    return first;
}

/* With a receive from any rank waiting, messages are opened in the order in which they were sent. */
static bool step_in_order(struct ec_engine *engine)
{
    int steps = 0, peer;
    while (steps < EC_STEPS && engine->any_receives.head && (peer = first_sender(engine)) >= 0) {
        ec_open_message(engine, peer);
        steps++;
    }
    return steps > 0;
}

static bool step_receives(struct ec_engine *engine, int peer)
{
    int steps = 0;
    while (steps < EC_STEPS && is_drained(engine, peer) &&
           (engine->inboxes[peer].open || !engine->any_receives.head) && step_message(engine, peer))
        steps++;
    return steps > 0;
}

bool ec_step_messages(struct ec_engine *engine)
{
    if (!engine->num_sends && !engine->num_receives)
        return false;
    if (engine->any_receives.head)
        ec_drop_withdrawn(engine);
    bool moved = engine->any_receives.head && step_in_order(engine);
    for (int peer = 0; peer < engine->size; peer++) {
        if (engine->num_sends && step_sends(engine, peer))
            moved = true;
        if (is_drained(engine, peer) && step_receives(engine, peer))
            moved = true;
    }
    return moved;
}

/* The counters on which messages wait. */
int ec_message_waits(struct ec_engine *engine, struct ec_wait *waits)
{
    int num = 0;
    if (!engine->num_sends && !engine->num_receives)
        return 0;
    for (int peer = 0; peer < engine->size; peer++) {
        if (engine->sends[peer].head) {
            struct ec_ring *ring = ec_ring_of(engine, engine->rank, peer);
            uint64_t full = atomic_load_explicit(&ring->tail, memory_order_relaxed) + EC_LINE;
            uint64_t value = full > engine->ring_bytes ? full - engine->ring_bytes : 0;
            waits[num++] = (struct ec_wait){&ring->head, value, peer};
        }
        if (is_drained(engine, peer)) {
            struct ec_ring *ring = ec_ring_of(engine, peer, engine->rank);
            uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
            waits[num++] = (struct ec_wait){&ring->tail, head + 1, peer};
        }
    }
    return num;
}
