/* The engine: which thread drives, what waits, and how a group ends.
 *
 * [Note: one driver] Exactly one thread of a process advances a group's operations at a time. A
 * blocking call drives by itself, on the caller's thread; asynchronous ones are driven by the
 * engine's own thread, started with the first of them, which needs no interpreter lock. A thread
 * that finds another one driving waits on `changed`, and takes over if the driver leaves with work
 * undone. Every queue but `submitted` is the driver's alone.
 *
 * Collectives run in order, one at a time; sends and receives run beside them.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>


static size_t round_up(size_t num_bytes, size_t unit)
{
    return (num_bytes + unit - 1) / unit * unit;
}

static size_t rings_offset(int size, size_t slot_bytes)
{
    return (size_t)size * (sizeof(struct ec_control) + EC_SLOTS * slot_bytes);
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

static void release(struct ec_engine *engine)
{
    free(engine->peers);
    free(engine->inboxes);
    free(engine->sends);
    free(engine->receives);
    free(engine->waits);
}

/* Join the group in zeroed memory that all its members map. 0, or -1 if memory is short. */
int ec_open(struct ec_engine *engine, void *memory, int rank, int size, size_t slot_bytes,
            size_t ring_bytes, bool spins, const struct ec_peer *peers)
{
    _Static_assert(sizeof(struct ec_control) % EC_LINE == 0, "slots begin on a cache line");
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
    engine->waits = calloc(2 * (size_t)size + 1, sizeof *engine->waits);
    if (!engine->peers || !engine->inboxes || !engine->sends || !engine->receives ||
        !engine->waits) {
        release(engine);
        return -1;
    }
    memcpy(engine->peers, peers, (size_t)size * sizeof *peers);
    engine->earliest_ns = INT64_MAX;
    init_sync(engine);
    return 0;
}

/* ---- ending operations; all under `lock` ---- */

/* The last touch of an operation: its owner may free it as soon as the lock is gone. */
static void settle(struct ec_engine *engine, struct ec_op *op, enum ec_state state)
{
    engine->num_pending--;
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

static void fail_everything(struct ec_engine *engine)
{
    fail_queue(engine, &engine->submitted);
    fail_queue(engine, &engine->taken);
    fail_queue(engine, &engine->collectives);
    fail_queue(engine, &engine->any_receives);
    for (int rank = 0; rank < engine->size; rank++) {
        fail_queue(engine, &engine->sends[rank]);
        fail_queue(engine, &engine->receives[rank]);
        if (engine->inboxes[rank].op)
            settle(engine, engine->inboxes[rank].op, EC_FAILED);
        engine->inboxes[rank].op = NULL;
    }
}

/* An operation that is in no queue any more is done. */
void ec_finish(struct ec_engine *engine, struct ec_op *op)
{
    pthread_mutex_lock(&engine->lock);
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
    atomic_store(&mine->ended, engine->position);
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
    fail_everything(engine);
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
}

static void kick(struct ec_engine *engine)
{
    atomic_store(&engine->kicked, 1);
    if (atomic_load(&engine->controls[engine->rank].sleeps_on))
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

/* End the group for the reason that the caller of abort or leave gave: peers continue when a member left
 * after its last operation, and fail when it aborted. */
static bool was_ended(struct ec_engine *engine)
{
    struct ec_blame blame = {.fault = (enum ec_fault)atomic_load(&engine->ends_with)};
    if (blame.fault == EC_FINE)
        return false;
    ec_blame_rank(&blame, engine->rank);
    ec_fail(engine, &blame);
    return true;
}

/* Only the driver may end operations, or a thread in its place: else an operation could be freed by
 * its owner while the driver is at work on it. A driver runs no code but the engine's, so it notices
 * at once. The first reason given counts. */
static void end_group(struct ec_engine *engine, enum ec_fault fault)
{
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
        was_ended(engine);
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

/* The same, but in order: peers that need nothing more from this rank continue. */
void ec_leave(struct ec_engine *engine)
{
    end_group(engine, EC_LEFT);
}

/* ---- driving ---- */

/* Move what was submitted since to where only the driver sees it; under `lock`. */
static void take_over(struct ec_engine *engine)
{
    atomic_store_explicit(&engine->kicked, 0, memory_order_relaxed);
    if (!engine->submitted.head)
        return;
    if (engine->taken.tail)
        engine->taken.tail->next = engine->submitted.head;
    else
        engine->taken.head = engine->submitted.head;
    engine->taken.tail = engine->submitted.tail;
    engine->submitted = (struct ec_queue){NULL, NULL};
}

/* An operation is in some queue at all times, so that the end of the group finds it. */
static void begin_taken(struct ec_engine *engine)
{
    struct ec_op *op;
    while ((op = ec_pop(&engine->taken))) {
        if (op->deadline_ns < engine->earliest_ns)
            engine->earliest_ns = op->deadline_ns;
        if (op->kind == EC_SEND)
            ec_begin_send(engine, op);
        else if (op->kind == EC_RECV)
            ec_begin_receive(engine, op);
        else
            ec_append(&engine->collectives, op);
    }
}

static bool step_all(struct ec_engine *engine)
{
    bool moved = ec_step_messages(engine);
    if (engine->collectives.head && ec_step_collective(engine, engine->collectives.head))
        moved = true;
    return moved;
}

static bool is_over(const struct ec_op *op)
{
    return atomic_load_explicit(&op->state, memory_order_acquire) != EC_PENDING;
}

static int collect_waits(struct ec_engine *engine)
{
    int num = ec_message_waits(engine, engine->waits);
    if (engine->collectives.head)
        engine->waits[num++] = engine->collectives.head->wait;
    return num;
}

static int64_t earlier(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

enum { EC_MOVES = 64 }; /* steps between two looks at the clock while everything moves */

/* Advance until `op` is over (NULL: until nothing is pending) or `until` has passed; with `looks`
 * also return after each look at the peers' lives, every 100 ms. */
static void drive(struct ec_engine *engine, const struct ec_op *op, int64_t until, bool looks)
{
    for (unsigned num_moved = 0;;) {
        if (atomic_load(&engine->kicked)) {
            pthread_mutex_lock(&engine->lock);
            take_over(engine);
            pthread_mutex_unlock(&engine->lock);
        }
        if (was_ended(engine))
            return;
        begin_taken(engine);
        bool moved = step_all(engine);
        if (op && is_over(op))
            return;
        if (moved && ++num_moved % EC_MOVES)
            continue;
        int64_t now = ec_now_ns(), end = earlier(engine->look_ns, engine->earliest_ns);
        if (now >= until)
            return;
        if (now >= end) {
            ec_look(engine, now);
            if (looks)
                return;
            continue;
        }
        if (moved)
            continue;
        int num = collect_waits(engine);
        if (!op && !num)
            return;
        ec_sleep(engine, engine->waits, num, earlier(end, until) - now);
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
        take_over(engine);
        pthread_mutex_unlock(&engine->lock);
        drive(engine, NULL, INT64_MAX, false);
        pthread_mutex_lock(&engine->lock);
        engine->driving = false;
        pthread_cond_broadcast(&engine->changed);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

/* Queue an operation, which fails at once if the group has ended; under `lock`. */
static void submit(struct ec_engine *engine, struct ec_op *op)
{
    engine->num_pending++;
    op->number = engine->num_submitted++;
    if (engine->blame.fault != EC_FINE) {
        settle(engine, op, EC_FAILED);
        return;
    }
    ec_append(&engine->submitted, op);
    if (engine->driving)
        kick(engine);
}

/* See ec_wait; enters with the lock held, returns without. */
static int wait_locked(struct ec_engine *engine, struct ec_op *op, int64_t until, ec_check check,
                       void *argument)
{
    int said = 0;
    while (!is_over(op) && !said && (until == INT64_MAX || ec_now_ns() < until)) {
        if (!engine->driving) {
            engine->driving = true;
            take_over(engine);
            pthread_mutex_unlock(&engine->lock);
            drive(engine, op, until, check != NULL);
            pthread_mutex_lock(&engine->lock);
            engine->driving = false;
        } else {
            wait_changed(engine, until);
        }
        if (check && !is_over(op)) {
            if (engine->num_waiting)
                pthread_cond_broadcast(&engine->changed);
            pthread_mutex_unlock(&engine->lock);
            said = check(argument);
            if (said == EC_FORKED)
                return said; /* the lock may be held for good here */
            pthread_mutex_lock(&engine->lock);
        }
    }
    if (engine->num_pending && engine->num_waiting)
        pthread_cond_broadcast(&engine->changed); /* another thread takes over the driving */
    pthread_mutex_unlock(&engine->lock);
    return said;
}

/* Queue an operation for whichever thread waits next, with `needs_thread` for the engine's own at
 * the latest. It fails at once if the group has ended. -1: no thread could be started. */
int ec_submit(struct ec_engine *engine, struct ec_op *op, bool needs_thread)
{
    int result = 0;
    pthread_mutex_lock(&engine->lock);
    if (needs_thread && !engine->has_thread) {
        result = -pthread_create(&engine->thread, NULL, serve, engine);
        engine->has_thread = result == 0;
    }
    if (result)
        atomic_store_explicit(&op->state, EC_FAILED, memory_order_release);
    else
        submit(engine, op);
    if (needs_thread && !engine->driving && engine->num_waiting)
        pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
    return result;
}

/* Wait until `op` is over or `until` has passed; returns what `check` said, 0 otherwise.
 *
 * [Note: signal handlers] `check` runs Python's signal handlers, and those may call this engine: a
 * collective, abort, leave. So the driving is given up for it, with everything in a state in which
 * any thread can take over, this one included. */
int ec_wait(struct ec_engine *engine, struct ec_op *op, int64_t until, ec_check check,
            void *argument)
{
    pthread_mutex_lock(&engine->lock);
    return wait_locked(engine, op, until, check, argument);
}

/* Submit and wait at once: what a blocking call does. */
int ec_run(struct ec_engine *engine, struct ec_op *op, ec_check check, void *argument)
{
    pthread_mutex_lock(&engine->lock);
    submit(engine, op);
    return wait_locked(engine, op, INT64_MAX, check, argument);
}

/* Take back a receive from any rank that has not got a message, so that it never will; false: it has
 * one, or has ended. It ends soon, without a sender. */
bool ec_withdraw(struct ec_engine *engine, struct ec_op *op)
{
    int before = EC_UNCLAIMED;
    pthread_mutex_lock(&engine->lock);
    bool is_free = !is_over(op) && op->kind == EC_RECV && op->root == EC_ANY &&
                   atomic_compare_exchange_strong(&op->claim, &before, EC_WITHDRAWN);
    if (is_free && engine->driving)
        kick(engine);
    pthread_mutex_unlock(&engine->lock);
    return is_free;
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
    release(engine);
    pthread_cond_destroy(&engine->changed);
    pthread_mutex_destroy(&engine->lock);
}
