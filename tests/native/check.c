/* The C core with ranks as threads of one process, for ThreadSanitizer and for other processors.
 *
 *   check ROUNDS          exit code 0: every result was right, every group ended as it must
 *   check ROUNDS RANKS    a barrier and a sum on so many ranks
 *
 * ThreadSanitizer sees nothing across processes; here every rank's engine is a thread, with the
 * engine's own threads beside it for asynchronous operations.
 */
#include "check.h"

_Atomic int num_wrong;
_Atomic uint64_t num_lost_wakes;

void expect(bool right, const char *what, int rank, int round)
{
    if (!right && atomic_fetch_add(&num_wrong, 1) < 10)
        fprintf(stderr, "rank %d, round %d: %s is wrong\n", rank, round, what);
}

struct ec_op operation(enum ec_kind kind, uint64_t sequence, void *source, void *target,
                       size_t source_bytes, size_t target_bytes, int root)
{
    struct ec_op op = {.kind = kind, .dtype = EC_FLOAT32, .reduce_op = EC_SUM, .root = root,
                       .sequence = sequence, .source = source, .target = target,
                       .source_bytes = source_bytes, .target_bytes = target_bytes};
    op.call.sequence = sequence;
    op.call.bytes[0] = (uint8_t)kind;
    op.deadline_ns = ec_now_ns() + INT64_C(120000000000);
    return op;
}

struct ec_op message(enum ec_kind kind, int tag, void *bytes, size_t num_bytes, int peer)
{
    bool is_send = kind == EC_SEND;
    struct ec_op op = operation(kind, 0, is_send ? bytes : NULL, is_send ? NULL : bytes,
                                is_send ? num_bytes : 0, is_send ? 0 : num_bytes, peer);
    op.tag = tag;
    op.type_id = EC_FLOAT32;
    return op;
}

void finish(struct ec_engine *engine, struct ec_op *op, int round)
{
    ec_wait(engine, op, INT64_MAX, NULL, NULL);
    expect(atomic_load(&op->state) == EC_DONE, "state", engine->rank, round);
}

void run(struct ec_engine *engine, struct ec_op *op, int round)
{
    ec_submit(engine, op, false);
    finish(engine, op, round);
}

void open_rank(struct ec_engine *engine, const struct group *group, int rank)
{
    struct ec_peer peers[EC_MAX_RANKS] = {{0}};
    int said = ec_open(engine, group->memory, rank, group->size, group->slot_bytes, RING_BYTES,
                       group->spins, peers);
    if (said < 0)
        abort();
}

void close_rank(struct ec_engine *engine)
{
    ec_leave(engine);
    ec_close(engine);
}

struct member {
    const struct group *group;
    int rank;
    void (*body)(const struct group *group, int rank);
};

static void *be_member(void *argument)
{
    struct member *member = argument;
    member->body(member->group, member->rank);
    return NULL;
}

void on_ranks(int size, size_t slot_bytes, bool spins, int rounds,
              void (*body)(const struct group *group, int rank))
{
    pthread_t threads[EC_MAX_RANKS];
    struct member members[EC_MAX_RANKS];
    size_t num_bytes = ec_segment_bytes(size, slot_bytes, RING_BYTES);
    struct group group = {aligned_alloc(4096, num_bytes), size, slot_bytes, spins, rounds};
    if (!group.memory)
        abort();
    memset(group.memory, 0, num_bytes);
    for (int rank = 0; rank < size; rank++) {
        members[rank] = (struct member){&group, rank, body};
        pthread_create(&threads[rank], NULL, be_member, &members[rank]);
    }
    for (int rank = 0; rank < size; rank++)
        pthread_join(threads[rank], NULL);
    free(group.memory);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 50, size = argc > 2 ? atoi(argv[2]) : SIZE;
    if (argc > 2) {
        on_ranks(size, (size_t)EC_LINE * (size_t)size, false, rounds, check_many_ranks);
    } else {
        on_ranks(SIZE, SLOT_BYTES, false, rounds, check_operations);
        on_ranks(SIZE, SLOT_BYTES, true, rounds / 4 + 1, check_operations);
        check_endings(false, rounds / 20 + 1);
        check_endings(true, rounds / 20 + 1);
    }
    num_lost_wakes = atomic_load(&ec_num_lost_wakes);
    expect(num_lost_wakes == 0, "number of lost wakes", -1, (int)num_lost_wakes);
    printf("%d rounds on %d ranks, %s kernels: %d wrong\n", rounds, size, ec_instructions(),
           atomic_load(&num_wrong));
    return atomic_load(&num_wrong) != 0;
}
