/* Ranks as threads of one process over one mapping, for ThreadSanitizer and for other processors.
 *
 *   check ROUNDS   exit code 0: every result was right
 *
 * ThreadSanitizer sees nothing across processes; here every rank's engine is a thread, with the
 * engine's own threads beside it for asynchronous operations.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 3, SLOT_BYTES = 4096, RING_BYTES = 2048, MAX_COUNT = 9000 };

static void *memory;
static int rounds;
static _Atomic int num_wrong;

static void expect(bool right, const char *what, int rank, int round)
{
    if (!right && atomic_fetch_add(&num_wrong, 1) < 10)
        fprintf(stderr, "rank %d, round %d: %s is wrong\n", rank, round, what);
}

static struct ec_op operation(enum ec_kind kind, uint64_t sequence, void *source, void *target,
                              size_t source_bytes, size_t target_bytes, int root)
{
    struct ec_op op = {.kind = kind, .dtype = EC_FLOAT32, .reduce_op = EC_SUM, .root = root,
                       .sequence = sequence, .source = source, .target = target,
                       .source_bytes = source_bytes, .target_bytes = target_bytes};
    op.call.sequence = sequence;
    op.call.bytes[0] = (uint8_t)kind;
    op.deadline_ns = ec_now_ns() + INT64_C(60000000000);
    return op;
}

static void finish(struct ec_engine *engine, struct ec_op *op, int round)
{
    ec_wait(engine, op, INT64_MAX, NULL, NULL);
    expect(atomic_load(&op->state) == EC_DONE, "state", engine->rank, round);
}

static void run(struct ec_engine *engine, struct ec_op *op, int round)
{
    ec_submit(engine, op, false);
    finish(engine, op, round);
}

static void check_sum(struct ec_engine *engine, uint64_t sequence, size_t count, int round,
                      bool is_async)
{
    static _Thread_local float x[MAX_COUNT];
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(engine->rank + 1) * (float)(i % 7);
    struct ec_op op = operation(EC_ALL_REDUCE, sequence, x, x, 4 * count, 4 * count, 0);
    ec_submit(engine, &op, is_async);
    finish(engine, &op, round);
    bool right = true;
    for (size_t i = 0; i < count; i++)
        right = right && x[i] == (float)(SIZE * (SIZE + 1) / 2) * (float)(i % 7);
    expect(right, "all_reduce", engine->rank, round);
}

static void check_gather(struct ec_engine *engine, uint64_t sequence, size_t count, int round)
{
    static _Thread_local float x[MAX_COUNT], out[SIZE * MAX_COUNT];
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(engine->rank * 1000 + round);
    struct ec_op op = operation(EC_ALL_GATHER, sequence, x, out, 4 * count, SIZE * 4 * count, 0);
    run(engine, &op, round);
    bool right = true;
    for (int rank = 0; rank < SIZE; rank++)
        for (size_t i = 0; i < count; i++)
            right = right && out[(size_t)rank * count + i] == (float)(rank * 1000 + round);
    expect(right, "all_gather", engine->rank, round);
}

/* Send to the next rank and receive from the one before, both by the engine's own thread. */
static void check_messages(struct ec_engine *engine, size_t count, int round)
{
    static _Thread_local float x[MAX_COUNT], out[MAX_COUNT];
    int next = (engine->rank + 1) % SIZE, before = (engine->rank + SIZE - 1) % SIZE;
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(engine->rank + round);
    struct ec_op sent = operation(EC_SEND, (uint64_t)round, x, NULL, 4 * count, 0, next);
    struct ec_op came = operation(EC_RECV, (uint64_t)round, NULL, out, 0, 4 * count, before);
    ec_submit(engine, &came, true);
    ec_submit(engine, &sent, true);
    finish(engine, &sent, round);
    finish(engine, &came, round);
    bool right = true;
    for (size_t i = 0; i < count; i++)
        right = right && out[i] == (float)(before + round);
    expect(right, "message", engine->rank, round);
}

static void *be_rank(void *argument)
{
    struct ec_engine engine;
    struct ec_peer peers[SIZE] = {{0}};
    int rank = (int)(intptr_t)argument;
    uint64_t sequence = 0;
    ec_open(&engine, memory, rank, SIZE, SLOT_BYTES, RING_BYTES, false, peers);
    for (int round = 0; round < rounds; round++) {
        size_t count = (size_t)(round * 7919 % MAX_COUNT);
        check_sum(&engine, sequence++, count, round, false);
        check_gather(&engine, sequence++, count / 3, round);
        check_sum(&engine, sequence++, count / 2, round, true);
        check_messages(&engine, count, round);
    }
    struct ec_op last = operation(EC_BARRIER, sequence, NULL, NULL, 0, 0, 0);
    run(&engine, &last, rounds);
    ec_close(&engine);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[SIZE];
    size_t num_bytes = ec_segment_bytes(SIZE, SLOT_BYTES, RING_BYTES);
    rounds = argc > 1 ? atoi(argv[1]) : 50;
    memory = aligned_alloc(4096, num_bytes);
    if (!memory)
        return 2;
    memset(memory, 0, num_bytes);
    for (intptr_t rank = 0; rank < SIZE; rank++)
        pthread_create(&threads[rank], NULL, be_rank, (void *)rank);
    for (int rank = 0; rank < SIZE; rank++)
        pthread_join(threads[rank], NULL);
    free(memory);
    printf("%d rounds on %d ranks, %s kernels: %d wrong\n", rounds, SIZE, ec_instructions(),
           atomic_load(&num_wrong));
    return atomic_load(&num_wrong) != 0;
}
