/* Sends and receives: one byte ring for each ordered pair of ranks.
 *
 * A message is a head of one cache line and its body, padded to whole lines. The sender copies
 * while there is room, so a small message is gone at once and a large one streams through. The
 * receiver reads messages in the order in which they were sent; one whose tag nobody has asked for
 * yet is put aside in private memory.
 */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

enum { EC_STRIDE = 64 << 10 }; /* copied between two announcements */

struct head {
    uint64_t num_bytes;
    int32_t tag;
    uint32_t dtype;
    uint8_t unused[EC_LINE - 16];
};

static size_t padded(size_t num_bytes)
{
    return (num_bytes + EC_LINE - 1) / EC_LINE * EC_LINE;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static struct ec_op *first_of(struct ec_engine *engine, struct ec_queue *queue)
{
    pthread_mutex_lock(&engine->lock);
    struct ec_op *op = queue->head;
    pthread_mutex_unlock(&engine->lock);
    return op;
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

static bool step_send(struct ec_engine *engine, struct ec_op *op)
{
    struct ec_ring *ring = ec_ring_of(engine, engine->rank, op->root);
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed); /* my own */
    uint64_t room = engine->ring_bytes - (tail - atomic_load_explicit(&ring->head, memory_order_acquire));
    op->wait_word = &ring->head;
    op->wait_for = tail + EC_LINE - engine->ring_bytes;
    op->wait_rank = op->root;
    if (tail + EC_LINE < engine->ring_bytes)
        op->wait_for = 0;
    if (room < EC_LINE)
        return false;
    if (!op->begun) {
        struct head head = {.num_bytes = op->source_bytes, .tag = op->tag, .dtype = op->dtype};
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
    if (op->moved == op->source_bytes)
        ec_finish(engine, &engine->sends[op->root], op);
    return true;
}

bool ec_step_sends(struct ec_engine *engine, int peer)
{
    bool moved = false;
    struct ec_op *op;
    while ((op = first_of(engine, &engine->sends[peer])) && step_send(engine, op))
        moved = true;
    return moved;
}

/* ---- receiving ---- */

static bool take_stashed(struct ec_engine *engine, struct ec_op *op, int peer);

/* The two ends of a message differ in dtype or size. */
static void refuse(struct ec_engine *engine, const struct ec_op *op, int peer)
{
    struct ec_blame blame = {
        .fault = EC_MISMATCH, .kind = op->kind, .sequence = op->sequence};
    ec_blame_rank(&blame, peer);
    ec_blame_rank(&blame, engine->rank);
    ec_fail(engine, &blame);
}

static bool fits(const struct ec_op *op, int dtype, size_t num_bytes)
{
    return op->target_bytes == num_bytes && (int)op->dtype == dtype;
}

/* The receive that waits longest for this tag. */
static struct ec_op *wanted(struct ec_engine *engine, int peer, int tag)
{
    pthread_mutex_lock(&engine->lock);
    struct ec_op *op = engine->receives[peer].head;
    while (op && op->tag != tag)
        op = op->next;
    pthread_mutex_unlock(&engine->lock);
    return op;
}

static bool open_message(struct ec_engine *engine, struct ec_ring *ring, uint64_t at, int peer)
{
    struct ec_inbox *inbox = &engine->inboxes[peer];
    struct head head;
    copy_out(engine, ring, at, (uint8_t *)&head, sizeof head);
    inbox->tag = head.tag;
    inbox->dtype = (int)head.dtype;
    inbox->num_bytes = head.num_bytes;
    inbox->moved = 0;
    inbox->stash = NULL;
    inbox->op = wanted(engine, peer, head.tag);
    if (inbox->op) {
        if (!fits(inbox->op, inbox->dtype, inbox->num_bytes)) {
            refuse(engine, inbox->op, peer);
            return false;
        }
    } else {
        inbox->stash = calloc(1, sizeof *inbox->stash);
        if (!inbox->stash)
            abort();
        *inbox->stash = (struct ec_stashed){
            .tag = head.tag, .dtype = (int)head.dtype, .num_bytes = head.num_bytes};
        inbox->stash->bytes = malloc(head.num_bytes + 1);
        if (!inbox->stash->bytes)
            abort();
    }
    inbox->open = true;
    return true;
}

static void close_message(struct ec_engine *engine, int peer)
{
    struct ec_inbox *inbox = &engine->inboxes[peer];
    inbox->open = false;
    if (inbox->op) {
        ec_finish(engine, &engine->receives[peer], inbox->op);
        inbox->op = NULL;
        return;
    }
    if (inbox->last)
        inbox->last->next = inbox->stash;
    else
        inbox->first = inbox->stash;
    inbox->last = inbox->stash;
    inbox->stash = NULL;
    struct ec_op *op = wanted(engine, peer, inbox->last->tag); /* posted while it came in */
    if (op)
        take_stashed(engine, op, peer);
}

static bool step_message(struct ec_engine *engine, int peer, struct ec_op *waiting)
{
    struct ec_ring *ring = ec_ring_of(engine, peer, engine->rank);
    struct ec_inbox *inbox = &engine->inboxes[peer];
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed); /* my own */
    uint64_t there = atomic_load_explicit(&ring->tail, memory_order_acquire) - head;
    waiting->wait_word = &ring->tail;
    waiting->wait_for = head + 1;
    waiting->wait_rank = peer;
    if (!there)
        return false;
    if (!inbox->open) {
        if (!open_message(engine, ring, head, peer))
            return true;
        head += EC_LINE;
        there -= EC_LINE;
    }
    size_t num = smaller(smaller(inbox->num_bytes - inbox->moved, there), EC_STRIDE);
    uint8_t *target = inbox->op ? inbox->op->target : inbox->stash->bytes;
    if (num) {
        copy_out(engine, ring, head, target + inbox->moved, num);
        inbox->moved += num;
    }
    ec_announce(engine, &ring->head, head + padded(num), peer);
    if (inbox->moved == inbox->num_bytes)
        close_message(engine, peer);
    return true;
}

static bool take_stashed(struct ec_engine *engine, struct ec_op *op, int peer)
{
    struct ec_inbox *inbox = &engine->inboxes[peer];
    struct ec_stashed *before = NULL, *here = inbox->first;
    while (here && here->tag != op->tag) {
        before = here;
        here = here->next;
    }
    if (!here)
        return false;
    if (!fits(op, here->dtype, here->num_bytes)) {
        refuse(engine, op, peer);
        return true;
    }
    memcpy(op->target, here->bytes, here->num_bytes);
    if (before)
        before->next = here->next;
    else
        inbox->first = here->next;
    if (inbox->last == here)
        inbox->last = before;
    free(here->bytes);
    free(here);
    ec_finish(engine, &engine->receives[peer], op);
    return true;
}

/* Look once at every receive that has not been compared with what came earlier. */
static bool step_stashed(struct ec_engine *engine, int peer)
{
    if (!engine->inboxes[peer].first)
        return false;
    struct ec_op *op = first_of(engine, &engine->receives[peer]);
    while (op) {
        if (!op->begun && op != engine->inboxes[peer].op) {
            op->begun = true;
            if (take_stashed(engine, op, peer))
                return true;
        }
        pthread_mutex_lock(&engine->lock);
        op = op->next;
        pthread_mutex_unlock(&engine->lock);
    }
    return false;
}

bool ec_step_receives(struct ec_engine *engine, int peer)
{
    bool moved = false;
    struct ec_op *op;
    while ((op = first_of(engine, &engine->receives[peer])) &&
           (step_stashed(engine, peer) || step_message(engine, peer, op)))
        moved = true;
    return moved;
}

void ec_drop_messages(struct ec_engine *engine)
{
    for (int peer = 0; peer < engine->size; peer++) {
        struct ec_inbox *inbox = &engine->inboxes[peer];
        if (inbox->stash) {
            free(inbox->stash->bytes);
            free(inbox->stash);
        }
        while (inbox->first) {
            struct ec_stashed *next = inbox->first->next;
            free(inbox->first->bytes);
            free(inbox->first);
            inbox->first = next;
        }
    }
}
