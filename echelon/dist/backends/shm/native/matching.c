/* Which receive a message goes to.
 *
 * [Note: one matching step] Waiting receives and stashed messages are the driver's alone. A receive
 * is compared with the stash when the driver takes it over, and waits only if nothing is there for
 * it; a message is compared with the waiting receives when its head is read, and is stashed only if
 * none wants it. So a waiting receive and a stashed message of one (peer, tag) never exist at the
 * same time, and messages of one (peer, tag) go to receives in the order in which they were sent.
 *
 * While any receive of a peer waits, everything that this peer sends is taken out of its ring, into
 * the stash if need be. A sender is therefore held up by a full ring only while its receiver asks
 * for nothing, whatever the order of tags on both sides, and the stash holds no more than was sent
 * while a receive of another tag waited.
 *
 * A receive from any peer takes the message that was sent first, by the senders' clock: it is one
 * clock, since all ranks are on one host.
 */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

/* ---- the stash ---- */

static struct ec_stashed *find_stashed(struct ec_engine *engine, int peer, int tag)
{
    struct ec_stashed *here = engine->inboxes[peer].first;
    while (here && here->tag != tag)
        here = here->next;
    return here;
}

static void drop_stashed(struct ec_inbox *inbox, struct ec_stashed *stashed)
{
    struct ec_stashed *before = NULL, *here = inbox->first;
    while (here != stashed) {
        before = here;
        here = here->next;
    }
    if (before)
        before->next = here->next;
    else
        inbox->first = here->next;
    if (inbox->last == here)
        inbox->last = before;
    free(here->bytes);
    free(here);
}

static void fail(struct ec_engine *engine, const struct ec_op *op, enum ec_fault fault, int peer)
{
    struct ec_blame blame = {.fault = fault, .kind = op->kind, .sequence = op->sequence};
    if (peer >= 0)
        ec_blame_rank(&blame, peer);
    ec_blame_rank(&blame, engine->rank);
    ec_fail(engine, &blame);
}

static struct ec_stashed *new_stashed(size_t num_bytes)
{
    struct ec_stashed *stashed = calloc(1, sizeof *stashed);
    if (stashed && !(stashed->bytes = malloc(num_bytes + 1))) {
        free(stashed);
        return NULL;
    }
    return stashed;
}

/* The operation during which memory ran out: any that waits, since what it waits for is behind. */
static const struct ec_op *waiting_for(struct ec_engine *engine, int peer)
{
    const struct ec_op *op = engine->receives[peer].head;
    return op ? op : engine->any_receives.head;
}

static void stash(struct ec_engine *engine, int peer, int tag, uint32_t type_id, int64_t sent_ns,
                  size_t num_bytes)
{
    struct ec_inbox *inbox = &engine->inboxes[peer];
    struct ec_stashed *stashed = new_stashed(num_bytes);
    if (!stashed) {
        fail(engine, waiting_for(engine, peer), EC_NO_MEMORY, -1);
        return;
    }
    stashed->tag = tag;
    stashed->type_id = type_id;
    stashed->sent_ns = sent_ns;
    stashed->num_bytes = num_bytes;
    if (inbox->last)
        inbox->last->next = stashed;
    else
        inbox->first = stashed;
    inbox->last = inbox->stash = stashed;
    engine->statistics.num_stashed++;
}

/* ---- a message meets its receive ---- */

static struct ec_queue *queue_of(struct ec_engine *engine, const struct ec_op *op)
{
    return op->root == EC_ANY ? &engine->any_receives : &engine->receives[op->root];
}

/* Take a waiting receive for a message of `peer`; false: they differ, and the group has ended. */
static bool match(struct ec_engine *engine, struct ec_op *op, int peer, uint32_t type_id,
                  size_t num_bytes)
{
    if (op->target_bytes != num_bytes || op->type_id != type_id) {
        fail(engine, op, EC_MISMATCH, peer);
        return false;
    }
    ec_unlink(queue_of(engine, op), op);
    op->sender = peer;
    return true;
}

/* What is in the stash already is copied; what is still coming in goes to its place directly. */
static void deliver(struct ec_engine *engine, struct ec_op *op, int peer,
                    struct ec_stashed *stashed)
{
    struct ec_inbox *inbox = &engine->inboxes[peer];
    bool whole = stashed != inbox->stash;
    if (!match(engine, op, peer, stashed->type_id, stashed->num_bytes))
        return;
    size_t num = whole ? stashed->num_bytes : inbox->moved;
    if (num)
        memcpy(op->target, stashed->bytes, num);
    drop_stashed(inbox, stashed);
    if (whole) {
        engine->num_receives--;
        ec_finish(engine, op);
        return;
    }
    inbox->stash = NULL;
    inbox->op = op;
}

static struct ec_op *first_with(struct ec_queue *queue, int tag)
{
    struct ec_op *op = queue->head;
    while (op && op->tag != tag)
        op = op->next;
    return op;
}

/* Decide that a receive from any rank gets a message; false: it was withdrawn before. */
static bool claim(struct ec_op *op)
{
    int before = EC_UNCLAIMED;
    return atomic_compare_exchange_strong(&op->claim, &before, EC_HAS_MESSAGE) ||
           before == EC_HAS_MESSAGE;
}

/* The receive that has waited longest for this tag of this peer, or of any. */
static struct ec_op *wanted(struct ec_engine *engine, int peer, int tag)
{
    struct ec_op *op = first_with(&engine->receives[peer], tag);
    for (struct ec_op *any = engine->any_receives.head; any; any = any->next) {
        if (op && op->number < any->number)
            break;
        if (any->tag == tag && claim(any))
            return any;
    }
    return op;
}

/* Open the message whose head was read: find where its body goes. */
void ec_take_message(struct ec_engine *engine, int peer, int tag, uint32_t type_id, int64_t sent_ns,
                     size_t num_bytes)
{
    struct ec_inbox *inbox = &engine->inboxes[peer];
    struct ec_op *op = wanted(engine, peer, tag);
    inbox->open = true;
    inbox->num_bytes = num_bytes;
    inbox->moved = 0;
    inbox->op = NULL;
    inbox->stash = NULL;
    if (!op)
        stash(engine, peer, tag, type_id, sent_ns, num_bytes);
    else if (match(engine, op, peer, type_id, num_bytes))
        inbox->op = op;
}

/* ---- a receive meets the stash ---- */

/* The stashed message of this tag that was sent first; `front`: a rank whose ring holds an earlier
 * one as its next, or -1. */
static struct ec_stashed *find_oldest(struct ec_engine *engine, int tag, int *from, int *front)
{
    struct ec_stashed *oldest = NULL;
    int64_t sent_ns;
    int front_tag;
    for (int peer = 0; peer < engine->size; peer++) {
        struct ec_stashed *stashed = find_stashed(engine, peer, tag);
        if (stashed && (!oldest || stashed->sent_ns < oldest->sent_ns)) {
            oldest = stashed;
            *from = peer;
        }
    }
    *front = -1;
    for (int peer = 0; oldest && peer < engine->size; peer++)
        if (*front < 0 && ec_peek(engine, peer, &front_tag, &sent_ns) && front_tag == tag &&
            sent_ns < oldest->sent_ns)
            *front = peer;
    return oldest;
}

static void begin_any_receive(struct ec_engine *engine, struct ec_op *op)
{
    struct ec_stashed *stashed;
    int peer, front;
    while ((stashed = find_oldest(engine, op->tag, &peer, &front))) {
        if (front < 0) {
            if (claim(op))
                deliver(engine, op, peer, stashed);
            return;
        }
        bool is_its_own = wanted(engine, front, op->tag) == op;
        ec_open_message(engine, front); /* may be the end of the operation, or of the group */
        if (is_its_own || engine->blame.fault != EC_FINE)
            return;
    }
}

/* Take over a receive. */
void ec_begin_receive(struct ec_engine *engine, struct ec_op *op)
{
    op->sender = -1;
    engine->num_receives++;
    ec_append(queue_of(engine, op), op);
    if (op->root == EC_ANY) {
        begin_any_receive(engine, op);
        return;
    }
    struct ec_stashed *stashed = find_stashed(engine, op->root, op->tag);
    if (stashed)
        deliver(engine, op, op->root, stashed);
}

/* End the receives that were withdrawn, without a message. */
void ec_drop_withdrawn(struct ec_engine *engine)
{
    for (struct ec_op *op = engine->any_receives.head, *next; op; op = next) {
        next = op->next;
        if (atomic_load(&op->claim) != EC_WITHDRAWN)
            continue;
        ec_unlink(&engine->any_receives, op);
        engine->num_receives--;
        ec_finish(engine, op);
    }
}

void ec_drop_messages(struct ec_engine *engine)
{
    for (int peer = 0; peer < engine->size; peer++)
        while (engine->inboxes[peer].first)
            drop_stashed(&engine->inboxes[peer], engine->inboxes[peer].first);
}
