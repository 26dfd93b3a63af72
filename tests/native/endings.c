/* Every way in which a group ends: all ranks fail, for the right reason, in time. */
#include "check.h"

static void expect_fault(const struct ec_op *op, enum ec_fault fault, int blamed, const char *what,
                         int rank)
{
    expect(atomic_load(&op->state) == EC_FAILED, what, rank, -1);
    expect(op->blame.fault == fault, what, rank, (int)op->blame.fault);
    expect(blamed < 0 || ec_is_blamed(&op->blame, blamed), what, rank, -3);
}

static void wait_for(struct ec_engine *engine, struct ec_op *op)
{
    ec_wait(engine, op, INT64_MAX, NULL, NULL);
}

static struct ec_op sum(uint64_t sequence, float *data, size_t count)
{
    return operation(EC_ALL_REDUCE, sequence, data, data, 4 * count, 4 * count, 0);
}

/* Rank 1 calls something else: all see it, and no result is touched. */
static void mismatch(const struct group *group, int rank)
{
    struct ec_engine engine;
    float data[100] = {7};
    open_rank(&engine, group, rank);
    struct ec_op op = sum(0, data, 100);
    op.call.bytes[1] = rank == 1;
    ec_submit(&engine, &op, rank == 2);
    wait_for(&engine, &op);
    expect_fault(&op, EC_MISMATCH, -1, "mismatch", rank);
    expect(data[0] == 7, "data of a mismatch", rank, -1);
    close_rank(&engine);
}

/* The two ends of a message differ in size. */
static void message_mismatch(const struct group *group, int rank)
{
    struct ec_engine engine;
    float data[100] = {7};
    open_rank(&engine, group, rank);
    struct ec_op op = message(rank ? EC_RECV : EC_SEND, 1, data, rank ? 40 : 80, rank ? 0 : 1);
    if (rank < 2) {
        ec_submit(&engine, &op, false);
        wait_for(&engine, &op);
    }
    if (rank == 1)
        expect_fault(&op, EC_MISMATCH, 0, "message mismatch", rank);
    close_rank(&engine);
}

static void *abort_soon(void *argument)
{
    struct timespec moment = {0, 20000000};
    nanosleep(&moment, NULL);
    ec_abort(argument);
    return NULL;
}

/* Rank 1 aborts from another thread while everything is under way, one message half-way. */
static void abortion(const struct group *group, int rank)
{
    struct ec_engine engine;
    static _Thread_local float data[MAX_COUNT], out[MAX_COUNT];
    pthread_t other;
    open_rank(&engine, group, rank);
    struct ec_op sent = message(EC_SEND, 1, data, sizeof data, (rank + 1) % SIZE);
    struct ec_op came = message(EC_RECV, 2, out, sizeof out, (rank + 2) % SIZE);
    struct ec_op any = message(EC_RECV, 3, out, sizeof out, EC_ANY);
    struct ec_op op = sum(0, data, 100);
    ec_submit(&engine, &sent, true);
    ec_submit(&engine, &came, true);
    ec_submit(&engine, &any, true);
    if (rank == 1)
        pthread_create(&other, NULL, abort_soon, &engine);
    else
        ec_submit(&engine, &op, false);
    wait_for(&engine, &came);
    wait_for(&engine, &any);
    wait_for(&engine, &sent);
    expect_fault(&any, rank == 1 ? EC_ABORTED : EC_PEER_LOST, 1, "abort", rank);
    if (rank == 1)
        pthread_join(other, NULL);
    else
        wait_for(&engine, &op);
    struct ec_op late = sum(1, data, 100);
    ec_submit(&engine, &late, false);
    expect(atomic_load(&late.state) == EC_FAILED, "operation of an ended group", rank, -1);
    close_rank(&engine);
}

/* Rank 1 leaves after the first operation, for which no rank needs it any more; the second fails. */
static void leaving(const struct group *group, int rank)
{
    struct ec_engine engine;
    float data[100] = {1};
    open_rank(&engine, group, rank);
    struct ec_op op = sum(0, data, 100);
    ec_submit(&engine, &op, false);
    wait_for(&engine, &op);
    expect(atomic_load(&op.state) == EC_DONE, "operation before leaving", rank, -1);
    expect(data[0] == SIZE, "sum before leaving", rank, 0);
    op = sum(1, data, 100);
    if (rank != 1) {
        ec_submit(&engine, &op, rank == 2);
        wait_for(&engine, &op);
        expect_fault(&op, EC_PEER_LOST, 1, "leave", rank);
    }
    close_rank(&engine);
}

static bool advance(struct ec_engine *engine, struct ec_op *op)
{
    ec_wait(engine, op, ec_now_ns() + 100000, NULL, NULL); /* drives once at least */
    return atomic_load(&op->state) == EC_DONE;
}

/* Rank 0 is slow to notice that the first operation is done; by then rank 1 has left and rank 2 has
 * failed in the second. The first is done all the same. All ranks on one thread, in this order. */
static void lagging(const struct group *group, int rank)
{
    struct ec_engine engines[SIZE];
    float data[SIZE][1] = {{1}, {1}, {1}};
    struct ec_op ops[SIZE], next = sum(1, data[2], 1);
    if (rank != 0)
        return;
    for (int one = 0; one < SIZE; one++) {
        open_rank(&engines[one], group, one);
        ops[one] = sum(0, data[one], 1);
        ec_submit(&engines[one], &ops[one], false);
        advance(&engines[one], &ops[one]);
    }
    wait_for(&engines[1], &ops[1]);
    wait_for(&engines[2], &ops[2]);
    ec_leave(&engines[1]);
    ec_submit(&engines[2], &next, false);
    wait_for(&engines[2], &next);
    expect_fault(&next, EC_PEER_LOST, 1, "second operation", 2);
    wait_for(&engines[0], &ops[0]);
    expect(atomic_load(&ops[0].state) == EC_DONE, "operation that all took part in", 0, -1);
    expect(data[0][0] == SIZE, "sum that is read late", 0, (int)data[0][0]);
    for (int one = 0; one < SIZE; one++)
        close_rank(&engines[one]);
}

static int stop_at_once(void *argument)
{
    (void)argument;
    return 1;
}

/* Rank 1 never comes: the others name it, with what waits beside. */
static void lateness(const struct group *group, int rank)
{
    struct ec_engine engine;
    float data[100] = {1};
    if (rank == 1)
        return;
    open_rank(&engine, group, rank);
    struct ec_op op = sum(0, data, 100);
    struct ec_op came = message(EC_RECV, 1, data, 4, 1);
    ec_submit(&engine, &came, true);
    op.deadline_ns = ec_now_ns() + INT64_C(300000000);
    ec_submit(&engine, &op, rank == 2);
    wait_for(&engine, &op);
    expect_fault(&op, EC_TIMED_OUT, 1, "timeout", rank);
    expect(!ec_is_blamed(&op.blame, 0) && !ec_is_blamed(&op.blame, 2), "blame", rank, -1);
    wait_for(&engine, &came);
    expect_fault(&came, EC_TIMED_OUT, 1, "receive beside a timeout", rank);
    close_rank(&engine);
}

/* The caller's check says stop: it gets its thread back with the operation still pending. */
static void stopping(const struct group *group, int rank)
{
    struct ec_engine engine;
    float data[100] = {1};
    if (rank != 0)
        return;
    open_rank(&engine, group, rank);
    struct ec_op op = sum(0, data, 100);
    ec_submit(&engine, &op, false);
    int said = ec_wait(&engine, &op, INT64_MAX, stop_at_once, NULL);
    expect(said == 1 && atomic_load(&op.state) == EC_PENDING, "stopped wait", rank, said);
    ec_abort(&engine);
    expect_fault(&op, EC_ABORTED, 0, "abort after a stopped wait", rank);
    close_rank(&engine);
}

void check_endings(bool spins, int rounds)
{
    for (int round = 0; round < rounds; round++) {
        on_ranks(SIZE, SLOT_BYTES, spins, 1, mismatch);
        on_ranks(SIZE, SLOT_BYTES, spins, 1, message_mismatch);
        on_ranks(SIZE, SLOT_BYTES, spins, 1, abortion);
        on_ranks(SIZE, SLOT_BYTES, spins, 1, leaving);
    }
    on_ranks(SIZE, SLOT_BYTES, spins, 1, lateness);
    on_ranks(SIZE, SLOT_BYTES, spins, 1, stopping);
    on_ranks(SIZE, SLOT_BYTES, spins, 1, lagging);
}
