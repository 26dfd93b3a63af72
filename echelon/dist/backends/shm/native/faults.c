/* Why an operation cannot end: a peer that is late, has left, or is dead; or its time is up. */
#include "engine.h"

#include <string.h>

static bool is_message(const struct ec_op *op)
{
    return op->kind == EC_SEND || op->kind == EC_RECV;
}

static void adopt(struct ec_engine *engine, int rank, enum ec_fault fault, struct ec_blame *blame)
{
    for (int word = 0; word < EC_BLAME_WORDS; word++)
        blame->ranks[word] |= atomic_load(&engine->controls[rank].blamed[word]);
    blame->is_adopted = true;
    if (blame->fault == EC_FINE)
        blame->fault = fault == EC_LEFT || fault == EC_ABORTED ? EC_PEER_LOST : fault;
}

/* Fail if a member has given the group up in this collective, or before, though what we need of it is
 * there: it has told its caller that this one failed. (One that left in order has not, nor one that
 * has finished this one and failed in a later one; a mismatch is found by every rank itself.) */
bool ec_fails_with_others(struct ec_engine *engine, const struct ec_op *op)
{
    struct ec_blame blame = {.fault = EC_FINE, .kind = op->kind, .sequence = op->sequence};
    for (int rank = 0; rank < engine->size; rank++) {
        enum ec_fault fault = atomic_load(&engine->controls[rank].fault);
        if (rank == engine->rank || atomic_load(&engine->controls[rank].ended) > op->base)
            continue;
        if (fault != EC_FINE && fault != EC_LEFT && fault != EC_MISMATCH)
            adopt(engine, rank, fault, &blame);
    }
    if (blame.fault != EC_FINE)
        ec_fail(engine, &blame);
    return blame.fault != EC_FINE;
}

/* One look at everything that is pending; each peer's life is asked for once. */
struct look {
    struct ec_engine *engine;
    int64_t now;
    const struct ec_op *running; /* the collective that may move: others wait behind it */
    int8_t dead[EC_MAX_RANKS];   /* -1: not asked */
};

static bool is_dead(struct look *look, int rank)
{
    if (look->dead[rank] < 0)
        look->dead[rank] = ec_is_dead(&look->engine->peers[rank]);
    return look->dead[rank] > 0;
}

static bool is_late_in_collective(const struct look *look, int rank)
{
    const struct ec_wait *wait = &look->running->wait;
    if (!wait->word)
        return false;
    struct ec_control *control = &look->engine->controls[rank];
    struct ec_control *first = &look->engine->controls[wait->rank];
    _Atomic uint64_t *word = wait->word == &first->published ? &control->published
                             : wait->word == &first->reduced ? &control->reduced
                                                             : &control->consumed;
    return atomic_load(word) < wait->value;
}

/* The ranks that an operation may wait for. */
static int first_of(const struct ec_op *op)
{
    return is_message(op) && op->root != EC_ANY ? op->root : 0;
}

static int end_of(const struct ec_engine *engine, const struct ec_op *op)
{
    return is_message(op) && op->root != EC_ANY ? op->root + 1 : engine->size;
}

/* Whether an operation can only continue once this rank has done something. */
static bool is_late(const struct look *look, const struct ec_op *op, int rank)
{
    struct ec_engine *engine = look->engine;
    if (rank == engine->rank)
        return false;
    if (!is_message(op))
        return is_late_in_collective(look, rank);
    if (op->root == EC_ANY && op->sender >= 0 && rank != op->sender)
        return false;
    return op->kind == EC_SEND ? !ec_can_send(engine, rank) : !ec_has_come(engine, rank);
}

/* Find why the late ones will not come: they gave up themselves, or died. A receive from any rank
 * can do without those that left in order, as long as one stays. */
static struct ec_blame find_fault(struct look *look, const struct ec_op *op)
{
    struct ec_engine *engine = look->engine;
    struct ec_blame blame = {.fault = EC_FINE, .kind = op->kind, .sequence = op->sequence};
    struct ec_blame left = blame;
    bool takes_any = op->kind == EC_RECV && op->root == EC_ANY && op->sender < 0;
    int num_left = 0;
    for (int rank = first_of(op); rank < end_of(engine, op); rank++) {
        if (!is_late(look, op, rank))
            continue;
        enum ec_fault fault = atomic_load(&engine->controls[rank].fault);
        bool gone = fault != EC_FINE || is_dead(look, rank);
        if (!gone || !is_late(look, op, rank)) /* it may have done its part before it went */
            continue;
        if (fault == EC_FINE) {
            ec_blame_rank(&blame, rank);
            blame.fault = EC_PEER_LOST;
        } else {
            num_left += fault == EC_LEFT;
            adopt(engine, rank, fault, fault == EC_LEFT && takes_any ? &left : &blame);
        }
    }
    return takes_any && !op->is_shared && num_left == engine->size - 1 ? left : blame;
}

/* Blame the late ones for an operation whose time is up. One that still moves has a moment more: a
 * message may be on its way through the stash, but a stream of others must not hide the deadline. */
static struct ec_blame time_out(struct look *look, const struct ec_op *op)
{
    struct ec_blame blame = {.fault = EC_FINE, .kind = op->kind, .sequence = op->sequence};
    bool is_final = is_message(op) && look->now >= op->deadline_ns + EC_SLICE_NS;
    for (int rank = first_of(op); rank < end_of(look->engine, op); rank++) {
        if (rank != look->engine->rank && (is_final || is_late(look, op, rank))) {
            ec_blame_rank(&blame, rank);
            blame.fault = EC_TIMED_OUT;
        }
    }
    return blame;
}

/* Returns true if the group has ended: no operation may be touched then. */
static bool look_at(struct look *look, struct ec_op *op)
{
    struct ec_blame blame = {.fault = EC_FINE};
    if (atomic_load(&op->claim) == EC_WITHDRAWN)
        return false; /* it ends in the next step */
    if (is_message(op) || op == look->running)
        blame = find_fault(look, op);
    bool is_running = op == look->running && op->begun;
    if (blame.fault == EC_FINE && is_running && ec_fails_with_others(look->engine, op))
        return true; /* a rank that had arrived gave it up: it fails, even if the late ones come */
    if (blame.fault == EC_FINE && look->now >= op->deadline_ns)
        blame = time_out(look, op);
    if (blame.fault != EC_FINE) {
        ec_fail(look->engine, &blame);
        return true;
    }
    int64_t again = op->deadline_ns > look->now ? op->deadline_ns : look->now + EC_SLICE_NS / 10;
    if (again < look->engine->earliest_ns)
        look->engine->earliest_ns = again;
    return false;
}

static bool look_at_all(struct look *look, const struct ec_queue *queue)
{
    for (struct ec_op *op = queue->head, *next; op; op = next) {
        next = op->next;
        if (look_at(look, op))
            return true;
    }
    return false;
}

/* Look at every operation that the driver holds; end the group if one of them cannot succeed. */
void ec_look(struct ec_engine *engine, int64_t now)
{
    struct look look = {.engine = engine, .now = now, .running = engine->collectives.head};
    memset(look.dead, -1, sizeof look.dead);
    engine->look_ns = now + EC_SLICE_NS;
    engine->earliest_ns = INT64_MAX;
    if (look_at_all(&look, &engine->collectives) || look_at_all(&look, &engine->any_receives))
        return;
    for (int rank = 0; rank < engine->size; rank++) {
        struct ec_op *op = engine->inboxes[rank].op;
        if (look_at_all(&look, &engine->sends[rank]) ||
            look_at_all(&look, &engine->receives[rank]) || (op && look_at(&look, op)))
            return;
    }
}
