/* The engine: who drives, what waits, and how a group ends.
 *
 * [Note: one driver] Exactly one thread of a process advances a group's operations at a time. A
 * blocking call drives by itself, on the caller's thread; asynchronous ones are driven by the
 * engine's own thread, started with the first of them, which needs no interpreter lock. Whoever
 * finds somebody driving waits on `changed`, and takes over if the driver leaves with work undone.
 *
 * Collectives run in order, one at a time; sends and receives run beside them.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EC_SLICE_NS INT64_C(100000000) /* longest sleep without a look at the peers' lives */

static size_t round_up(size_t num_bytes, size_t unit)
{
    return (num_bytes + unit - 1) / unit * unit;
}

static size_t rings_offset(int size, size_t slot_bytes)
{
    return (size_t)size * (EC_CONTROL_BYTES + EC_SLOTS * slot_bytes);
}

size_t ec_segment_bytes(int size, size_t slot_bytes, size_t ring_bytes)
{
    size_t rings = (size_t)size * (size_t)size * (sizeof(struct ec_ring) + ring_bytes);
    return round_up(rings_offset(size, slot_bytes) + rings, 4096);
}

static void init_sync(struct ec_engine *engine)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&engine->lock, NULL);
}

/* Join the group in zeroed memory that all its members map. 0, or -1 if memory is short. */
int ec_open(struct ec_engine *engine, void *memory, int rank, int size, size_t slot_bytes,
            size_t ring_bytes, bool spins, const struct ec_peer *peers)
{
    _Static_assert(sizeof(struct ec_control) <= EC_CONTROL_BYTES, "a control block is one page");
    memset(engine, 0, sizeof *engine);
    engine->rank = rank;
    engine->size = size;
    engine->spins = spins;
    engine->slot_bytes = slot_bytes;
    engine->ring_bytes = ring_bytes;
    engine->controls = memory;
    engine->slots = (uint8_t *)memory + (size_t)size * sizeof(struct ec_control);
    engine->rings = (uint8_t *)memory + rings_offset(size, slot_bytes);
    engine->peers = calloc((size_t)size, sizeof *engine->peers);
    engine->inboxes = calloc((size_t)size, sizeof *engine->inboxes);
    engine->sends = calloc((size_t)size, sizeof *engine->sends);
    engine->receives = calloc((size_t)size, sizeof *engine->receives);
    if (!engine->peers || !engine->inboxes || !engine->sends || !engine->receives)
        return -1;
    memcpy(engine->peers, peers, (size_t)size * sizeof *peers);
    init_sync(engine);
    return 0;
}

/* ---- ending operations; all under `lock` ---- */

static void append(struct ec_queue *queue, struct ec_op *op)
{
    op->next = NULL;
    if (queue->tail)
        queue->tail->next = op;
    else
        queue->head = op;
    queue->tail = op;
}

static void unlink_op(struct ec_queue *queue, struct ec_op *op)
{
    struct ec_op *before = NULL, *here = queue->head;
    while (here && here != op) {
        before = here;
        here = here->next;
    }
    if (!here)
        return;
    if (before)
        before->next = op->next;
    else
        queue->head = op->next;
    if (queue->tail == op)
        queue->tail = before;
}

static bool is_message(const struct ec_op *op)
{
    return op->kind == EC_SEND || op->kind == EC_RECV;
}

/* The last touch of an operation: its owner may free it as soon as the lock is gone. */
static void settle(struct ec_engine *engine, struct ec_op *op, enum ec_state state)
{
    engine->num_pending--;
    engine->num_messages -= is_message(op);
    op->ended_ns = ec_now_ns();
    op->blame = engine->blame;
    atomic_store_explicit(&op->state, state, memory_order_release);
}

static void fail_queue(struct ec_engine *engine, struct ec_queue *queue)
{
    for (struct ec_op *op = queue->head, *next; op; op = next) {
        next = op->next;
        settle(engine, op, EC_FAILED);
    }
    queue->head = queue->tail = NULL;
}

void ec_finish(struct ec_engine *engine, struct ec_queue *queue, struct ec_op *op)
{
    pthread_mutex_lock(&engine->lock);
    unlink_op(queue, op);
    settle(engine, op, EC_DONE);
    if (engine->num_waiting)
        pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
}

/* ---- the end of a group ---- */

static void publish_blame(struct ec_engine *engine, const struct ec_blame *blame)
{
    struct ec_control *mine = &engine->controls[engine->rank];
    if (atomic_load(&mine->fault) != EC_FINE)
        return;
    for (int word = 0; word < EC_BLAME_WORDS; word++)
        atomic_store(&mine->blamed[word], blame->ranks[word]);
    atomic_store(&mine->fault, blame->fault);
    for (int rank = 0; rank < engine->size; rank++)
        if (rank != engine->rank)
            ec_tell(engine, rank);
}

/* End the group on this rank: every operation fails, and the others learn whom we blame. */
void ec_fail(struct ec_engine *engine, const struct ec_blame *blame)
{
    pthread_mutex_lock(&engine->lock);
    if (engine->blame.fault == EC_FINE)
        engine->blame = *blame;
    publish_blame(engine, &engine->blame);
    fail_queue(engine, &engine->collectives);
    for (int rank = 0; rank < engine->size; rank++) {
        fail_queue(engine, &engine->sends[rank]);
        fail_queue(engine, &engine->receives[rank]);
    }
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
}

static void kick(struct ec_engine *engine)
{
    atomic_store(&engine->kicked, 1);
    ec_ring_bell(&engine->controls[engine->rank]);
}

static void wait_changed(struct ec_engine *engine, int64_t until)
{
    int64_t end = ec_now_ns() + EC_SLICE_NS;
    if (until < end)
        end = until;
    struct timespec at = {end / 1000000000, end % 1000000000};
    engine->num_waiting++;
    pthread_cond_timedwait(&engine->changed, &engine->lock, &at);
    engine->num_waiting--;
}

/* Only the driver may end operations, or somebody in its place: else an operation could be freed
 * by its owner while the driver is at work on it. */
static void end_group(struct ec_engine *engine, enum ec_fault fault)
{
    struct ec_blame blame = {.fault = fault};
    ec_blame_rank(&blame, engine->rank);
    uint32_t nothing = EC_FINE;
    atomic_compare_exchange_strong(&engine->ends_with, &nothing, fault);
    pthread_mutex_lock(&engine->lock);
    while (engine->blame.fault == EC_FINE) {
        if (engine->driving) {
            kick(engine);
            wait_changed(engine, INT64_MAX);
            continue;
        }
        engine->driving = true;
        pthread_mutex_unlock(&engine->lock);
        ec_fail(engine, &blame);
        pthread_mutex_lock(&engine->lock);
        engine->driving = false;
    }
    pthread_mutex_unlock(&engine->lock);
}

/* End the group on this rank, from any thread; pending operations have failed on return. */
void ec_abort(struct ec_engine *engine)
{
    end_group(engine, EC_ABORTED);
}

/* The same, but in order: peers that need nothing more from us go on. */
void ec_leave(struct ec_engine *engine)
{
    end_group(engine, EC_LEFT);
}

/* ---- looking around ---- */

static bool is_late(struct ec_engine *engine, const struct ec_op *op, int rank)
{
    if (rank == engine->rank)
        return false;
    if (is_message(op))
        return rank == op->root;
    struct ec_control *control = &engine->controls[rank];
    struct ec_control *first = &engine->controls[op->wait_rank];
    _Atomic uint64_t *word = op->wait_word == &first->published ? &control->published
                             : op->wait_word == &first->reduced ? &control->reduced
                                                                : &control->consumed;
    return atomic_load(word) < op->wait_for;
}

static void adopt(struct ec_engine *engine, int rank, enum ec_fault fault, struct ec_blame *blame)
{
    for (int word = 0; word < EC_BLAME_WORDS; word++)
        blame->ranks[word] |= atomic_load(&engine->controls[rank].blamed[word]);
    if (blame->fault == EC_FINE)
        blame->fault = fault == EC_LEFT || fault == EC_ABORTED ? EC_PEER_LOST : fault;
}

/* Fail if a member has given the group up already, though what we need of it is there: it has told
 * its caller that this operation failed. (One that left in order has not, and a mismatch is found by
 * every rank itself.) */
bool ec_fails_with_others(struct ec_engine *engine, const struct ec_op *op)
{
    struct ec_blame blame = {.fault = EC_FINE, .kind = op->kind, .sequence = op->sequence};
    for (int rank = 0; rank < engine->size; rank++) {
        enum ec_fault fault = atomic_load(&engine->controls[rank].fault);
        if (rank != engine->rank && fault != EC_FINE && fault != EC_LEFT && fault != EC_MISMATCH)
            adopt(engine, rank, fault, &blame);
    }
    if (blame.fault != EC_FINE)
        ec_fail(engine, &blame);
    return blame.fault != EC_FINE;
}

/* Find why the late ones will not come: they gave up themselves, or died. */
static struct ec_blame find_fault(struct ec_engine *engine, const struct ec_op *op)
{
    struct ec_blame blame = {.fault = EC_FINE, .kind = op->kind, .sequence = op->sequence};
    for (int rank = 0; rank < engine->size; rank++) {
        if (!is_late(engine, op, rank))
            continue;
        enum ec_fault fault = atomic_load(&engine->controls[rank].fault);
        if (fault != EC_FINE && is_late(engine, op, rank)) {
            adopt(engine, rank, fault, &blame);
        } else if (ec_is_dead(&engine->peers[rank]) && is_late(engine, op, rank)) {
            ec_blame_rank(&blame, rank);
            blame.fault = EC_PEER_LOST;
        }
    }
    return blame;
}

static bool is_blocked_message_moving(const struct ec_op *op)
{
    return is_message(op) && atomic_load(op->wait_word) >= op->wait_for;
}

/* Returns true if the group has ended: no operation may be touched then. */
static bool look_at(struct ec_engine *engine, struct ec_op *op)
{
    if (is_blocked_message_moving(op))
        return false;
    struct ec_blame blame = find_fault(engine, op);
    if (blame.fault == EC_FINE && ec_now_ns() >= op->deadline_ns) {
        for (int rank = 0; rank < engine->size; rank++)
            if (is_late(engine, op, rank)) {
                ec_blame_rank(&blame, rank);
                blame.fault = EC_TIMED_OUT;
            }
    }
    if (blame.fault == EC_FINE || is_blocked_message_moving(op))
        return false;
    ec_fail(engine, &blame);
    return true;
}

/* ---- driving ---- */

enum { EC_MAX_BLOCKED = 64 };

static int collect(struct ec_engine *engine, struct ec_op **ops)
{
    int num = 0;
    pthread_mutex_lock(&engine->lock);
    if (engine->collectives.head)
        ops[num++] = engine->collectives.head;
    for (int rank = 0; engine->num_messages && rank < engine->size; rank++) {
        if (engine->sends[rank].head && num < EC_MAX_BLOCKED)
            ops[num++] = engine->sends[rank].head;
        if (engine->receives[rank].head && num < EC_MAX_BLOCKED)
            ops[num++] = engine->receives[rank].head;
    }
    pthread_mutex_unlock(&engine->lock);
    return num;
}

static bool step_all(struct ec_engine *engine)
{
    bool moved = false;
    pthread_mutex_lock(&engine->lock);
    struct ec_op *collective = engine->collectives.head;
    bool messages = engine->num_messages > 0;
    pthread_mutex_unlock(&engine->lock);
    if (collective && ec_step_collective(engine, collective))
        moved = true;
    for (int rank = 0; messages && rank < engine->size; rank++) {
        if (ec_step_sends(engine, rank))
            moved = true;
        if (ec_step_receives(engine, rank))
            moved = true;
    }
    return moved;
}

static bool is_over(const struct ec_op *op)
{
    return atomic_load_explicit(&op->state, memory_order_acquire) != EC_PENDING;
}

static int64_t slice(struct ec_engine *engine, struct ec_op *const *ops, int num, int64_t until)
{
    int64_t now = ec_now_ns(), end = engine->looked_ns + EC_SLICE_NS;
    if (until < end)
        end = until;
    for (int i = 0; i < num; i++)
        if (ops[i]->deadline_ns < end)
            end = ops[i]->deadline_ns;
    return end > now + 1000 ? end - now : 1000;
}

static bool is_time_to_look(struct ec_engine *engine, struct ec_op *const *ops, int num)
{
    int64_t now = ec_now_ns();
    bool due = now >= engine->looked_ns + EC_SLICE_NS;
    for (int i = 0; i < num; i++)
        due = due || now >= ops[i]->deadline_ns;
    if (due)
        engine->looked_ns = now;
    return due;
}

/* It says why, as who asked for it did: peers go on when a member left after its last operation, and
 * fail when it aborted. */
static bool was_ended(struct ec_engine *engine)
{
    struct ec_blame blame = {.fault = (enum ec_fault)atomic_load(&engine->ends_with)};
    if (blame.fault == EC_FINE)
        return false;
    ec_blame_rank(&blame, engine->rank);
    ec_fail(engine, &blame);
    return true;
}

/* Advance until `op` is over (NULL: until nothing is pending), `until` has passed, or `check`
 * says stop. Returns what `check` said. */
static int drive(struct ec_engine *engine, struct ec_op *op, int64_t until, ec_check check,
                 void *argument)
{
    struct ec_op *ops[EC_MAX_BLOCKED];
    engine->looked_ns = ec_now_ns();
    for (;;) {
        atomic_store(&engine->kicked, 0);
        if (was_ended(engine))
            return 0;
        bool moved = step_all(engine);
        if (op && is_over(op))
            return 0;
        if (moved)
            continue;
        int num = collect(engine, ops);
        if (!op && !num)
            return 0;
        ec_sleep(engine, ops, num, slice(engine, ops, num, until));
        if (is_time_to_look(engine, ops, num)) {
            int said = check ? check(argument) : 0;
            if (said)
                return said;
            for (int i = 0; i < num && !look_at(engine, ops[i]); i++)
                continue;
        }
        if (until != INT64_MAX && ec_now_ns() >= until)
            return 0;
    }
}

static void *serve(void *argument)
{
    struct ec_engine *engine = argument;
    pthread_mutex_lock(&engine->lock);
    while (!engine->stopping) {
        if (engine->driving || !engine->num_pending) {
            engine->num_waiting++;
            pthread_cond_wait(&engine->changed, &engine->lock);
            engine->num_waiting--;
            continue;
        }
        engine->driving = true;
        pthread_mutex_unlock(&engine->lock);
        drive(engine, NULL, INT64_MAX, NULL, NULL);
        pthread_mutex_lock(&engine->lock);
        engine->driving = false;
        pthread_cond_broadcast(&engine->changed);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

/* Queue an operation. It fails at once if the group has ended. -1: no thread could be started. */
int ec_submit(struct ec_engine *engine, struct ec_op *op, bool needs_thread)
{
    int result = 0;
    pthread_mutex_lock(&engine->lock);
    if (needs_thread && !engine->has_thread) {
        result = -pthread_create(&engine->thread, NULL, serve, engine);
        engine->has_thread = result == 0;
    }
    engine->num_pending++;
    engine->num_messages += is_message(op);
    if (engine->blame.fault != EC_FINE || result) {
        settle(engine, op, EC_FAILED);
    } else {
        op->wait_word = &engine->controls[engine->rank].published; /* free to move */
        op->wait_rank = engine->rank;
        append(op->kind == EC_SEND   ? &engine->sends[op->root]
               : op->kind == EC_RECV ? &engine->receives[op->root]
                                     : &engine->collectives,
               op);
        if (engine->driving)
            kick(engine);
        else if (needs_thread && engine->num_waiting)
            pthread_cond_broadcast(&engine->changed);
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

/* Wait until `op` is over or `until` has passed; returns what `check` said, 0 otherwise. */
int ec_wait(struct ec_engine *engine, struct ec_op *op, int64_t until, ec_check check,
            void *argument)
{
    int said = 0;
    pthread_mutex_lock(&engine->lock);
    while (!is_over(op) && !said && (until == INT64_MAX || ec_now_ns() < until)) {
        if (!engine->driving) {
            engine->driving = true;
            pthread_mutex_unlock(&engine->lock);
            said = drive(engine, op, until, check, argument);
            pthread_mutex_lock(&engine->lock);
            engine->driving = false;
        } else {
            wait_changed(engine, until);
            if (check && !is_over(op)) {
                pthread_mutex_unlock(&engine->lock);
                said = check(argument);
                pthread_mutex_lock(&engine->lock);
            }
        }
    }
    if (engine->num_pending && engine->num_waiting)
        pthread_cond_broadcast(&engine->changed); /* somebody else takes over the driving */
    pthread_mutex_unlock(&engine->lock);
    return said;
}

/* Leave the group. What is pending fails; no other thread may be in a call any more when this
 * frees what the engine holds, so `ec_leave` comes first where there may be one. */
void ec_close(struct ec_engine *engine)
{
    ec_leave(engine);
    pthread_mutex_lock(&engine->lock);
    engine->stopping = true;
    pthread_cond_broadcast(&engine->changed);
    bool has_thread = engine->has_thread;
    pthread_mutex_unlock(&engine->lock);
    if (has_thread)
        pthread_join(engine->thread, NULL);
    ec_drop_messages(engine);
    free(engine->peers);
    free(engine->inboxes);
    free(engine->sends);
    free(engine->receives);
    pthread_cond_destroy(&engine->changed);
    pthread_mutex_destroy(&engine->lock);
}
