/* Every collective, and every way of a message through rings and stash. */
#include "check.h"

#define ALL(condition)                                                                            \
    ({                                                                                            \
        bool all_ = true;                                                                         \
        for (size_t i = 0; i < count; i++)                                                        \
            all_ = all_ && (condition);                                                           \
        all_;                                                                                     \
    })

static _Thread_local float x[SIZE * MAX_COUNT], y[SIZE * MAX_COUNT];

/* What rank `rank` puts at place i of its input. */
static float value(int rank, int round, size_t i)
{
    return (float)((rank + 1) * 1000 + (int)((i * 7 + (size_t)round) % 13));
}

static float sum_at(int size, int round, size_t i)
{
    float sum = 0;
    for (int rank = 0; rank < size; rank++)
        sum += value(rank, round, i);
    return sum;
}

static void fill(int rank, int round, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        x[i] = value(rank, round, i);
        y[i] = -1;
    }
}

static void check_reductions(struct ec_engine *engine, uint64_t *sequence, size_t count, int round,
                             bool is_async)
{
    int me = engine->rank, root = round % SIZE;
    fill(me, round, count);
    struct ec_op op = operation(EC_ALL_REDUCE, (*sequence)++, x, x, 4 * count, 4 * count, 0);
    ec_submit(engine, &op, is_async);
    finish(engine, &op, round);
    expect(ALL(x[i] == sum_at(SIZE, round, i)), "all_reduce", me, round);

    fill(me, round, count);
    op = operation(EC_REDUCE, (*sequence)++, x, me == root ? y : NULL, 4 * count,
                   me == root ? 4 * count : 0, root);
    run(engine, &op, round);
    expect(ALL(y[i] == (me == root ? sum_at(SIZE, round, i) : -1)), "reduce", me, round);

    size_t row = count / SIZE;
    fill(me, round, SIZE * row);
    op = operation(EC_REDUCE_SCATTER, (*sequence)++, x, y, SIZE * 4 * row, 4 * row, 0);
    ec_submit(engine, &op, is_async);
    finish(engine, &op, round);
    count = row;
    expect(ALL(y[i] == sum_at(SIZE, round, (size_t)me * row + i)), "reduce_scatter", me, round);
}

static void check_movement(struct ec_engine *engine, uint64_t *sequence, size_t count, int round)
{
    int me = engine->rank, root = round % SIZE;
    bool is_root = me == root, right = true;
    fill(me, round, count);
    struct ec_op op = operation(EC_ALL_GATHER, (*sequence)++, x, y, 4 * count, SIZE * 4 * count, 0);
    run(engine, &op, round);
    for (int rank = 0; rank < SIZE; rank++)
        right = right && ALL(y[(size_t)rank * count + i] == value(rank, round, i));
    expect(right, "all_gather", me, round);

    fill(me, round, count);
    op = operation(EC_GATHER, (*sequence)++, x, is_root ? y : NULL, 4 * count,
                   is_root ? SIZE * 4 * count : 0, root);
    run(engine, &op, round);
    for (int rank = 0; is_root && rank < SIZE; rank++)
        right = right && ALL(y[(size_t)rank * count + i] == value(rank, round, i));
    expect(right, "gather", me, round);

    fill(me, round, count);
    op = operation(EC_BROADCAST, (*sequence)++, is_root ? x : NULL, is_root ? NULL : y,
                   is_root ? 4 * count : 0, is_root ? 0 : 4 * count, root);
    run(engine, &op, round);
    expect(is_root || ALL(y[i] == value(root, round, i)), "broadcast", me, round);

    fill(me, round, SIZE * count);
    op = operation(EC_SCATTER, (*sequence)++, is_root ? x : NULL, y,
                   is_root ? SIZE * 4 * count : 0, 4 * count, root);
    run(engine, &op, round);
    expect(ALL(y[i] == value(root, round, (size_t)me * count + i)), "scatter", me, round);
}

/* Rank r sends `rows(r, to)` elements to each rank. */
static size_t rows(int from, int to, size_t count)
{
    return (from + 2 * to) % 3 == 0 ? 0 : count * (size_t)(1 + (from + to) % 2);
}

static void check_all_to_all(struct ec_engine *engine, uint64_t *sequence, size_t count, int round)
{
    int me = engine->rank;
    uint64_t splits[2 * SIZE];
    size_t sent = 0, taken = 0;
    for (int rank = 0; rank < SIZE; rank++) {
        splits[rank] = 4 * rows(me, rank, count);
        splits[SIZE + rank] = 4 * rows(rank, me, count);
        sent += splits[rank];
        taken += splits[SIZE + rank];
    }
    fill(me, round, sent / 4);
    struct ec_op op = operation(EC_ALL_TO_ALL, (*sequence)++, x, y, sent, taken, 0);
    op.splits = splits;
    run(engine, &op, round);
    bool right = true;
    size_t at = 0;
    for (int rank = 0; rank < SIZE; rank++) {
        size_t from = 0;
        for (int before = 0; before < me; before++)
            from += rows(rank, before, count);
        for (size_t i = 0; i < rows(rank, me, count); i++)
            right = right && y[at++] == value(rank, round, from + i);
    }
    expect(right, "all_to_all", me, round);
}

/* Send to the next rank and receive from the one before, both by the engine's own thread. */
static void check_exchange(struct ec_engine *engine, size_t count, int round)
{
    int me = engine->rank, next = (me + 1) % SIZE, before = (me + SIZE - 1) % SIZE;
    fill(me, round, count);
    struct ec_op sent = message(EC_SEND, 0, x, 4 * count, next);
    struct ec_op came = message(EC_RECV, 0, y, 4 * count, before);
    ec_submit(engine, &came, true);
    ec_submit(engine, &sent, true);
    finish(engine, &sent, round);
    finish(engine, &came, round);
    expect(ALL(y[i] == value(before, round, i)), "message", me, round);
}

/* Two tags, received in the other order, twice each: through the stash, and in order per tag. */
static void check_stash(struct ec_engine *engine, size_t count, int round)
{
    static _Thread_local float parts[4][MAX_COUNT], got[4][MAX_COUNT];
    static const int sent_tags[4] = {5, 9, 5, 9}, got_tags[4] = {9, 5, 9, 5};
    static const int got_parts[4] = {1, 0, 3, 2};
    int me = engine->rank, next = (me + 1) % SIZE, before = (me + SIZE - 1) % SIZE;
    struct ec_op sends[4], came;
    for (int turn = 0; turn < 4; turn++) {
        for (size_t i = 0; i < count; i++)
            parts[turn][i] = value(me, round + turn, i);
        sends[turn] = message(EC_SEND, sent_tags[turn], parts[turn], 4 * count, next);
        ec_submit(engine, &sends[turn], true);
    }
    for (int turn = 0; turn < 4; turn++) {
        came = message(EC_RECV, got_tags[turn], got[turn], 4 * count, before);
        ec_submit(engine, &came, turn == 2);
        finish(engine, &came, round);
        expect(ALL(got[turn][i] == value(before, round + got_parts[turn], i)), "tagged message", me,
               round);
    }
    for (int turn = 0; turn < 4; turn++)
        finish(engine, &sends[turn], round);
}

/* Everybody sends twice to rank 0, which takes from any: in order per sender. */
static void check_any_source(struct ec_engine *engine, size_t count, int round)
{
    int me = engine->rank, num_seen[SIZE] = {0};
    for (int turn = 0; me != 0 && turn < 2; turn++) {
        fill(me, round + turn, count);
        struct ec_op sent = message(EC_SEND, 3, x, 4 * count, 0);
        run(engine, &sent, round);
    }
    for (int turn = 0; me == 0 && turn < 2 * (SIZE - 1); turn++) {
        struct ec_op came = message(EC_RECV, 3, y, 4 * count, EC_ANY);
        ec_submit(engine, &came, turn % 2);
        finish(engine, &came, round);
        int from = came.sender;
        if (from < 1 || from >= SIZE) {
            expect(false, "sender", me, round);
            return;
        }
        int nth = num_seen[from]++;
        expect(ALL(y[i] == value(from, round + nth, i)), "message of any rank", me, round);
    }
}

/* Rank 0 takes back a receive from any rank while rank 1 sends to it: the message goes to that
 * receive or to the next one, and to one of them only. */
static void check_withdrawal(struct ec_engine *engine, size_t count, int round)
{
    if (engine->rank == 1) {
        fill(1, round, count);
        struct ec_op sent = message(EC_SEND, 4, x, 4 * count, 0);
        run(engine, &sent, round);
    }
    if (engine->rank != 0)
        return;
    struct ec_op first = message(EC_RECV, 4, y, 4 * count, EC_ANY), second = first;
    ec_submit(engine, &first, true);
    bool is_withdrawn = ec_withdraw(engine, &first);
    expect(!ec_withdraw(engine, &first) || !is_withdrawn, "second withdrawal", 0, round);
    finish(engine, &first, round);
    expect((first.sender < 0) == is_withdrawn, "sender of a withdrawn receive", 0, round);
    if (is_withdrawn)
        run(engine, &second, round);
    expect(ALL(y[i] == value(1, round, i)), "message beside a withdrawal", 0, round);
}

void check_operations(const struct group *group, int rank)
{
    struct ec_engine engine;
    uint64_t sequence = 0;
    open_rank(&engine, group, rank);
    for (int round = 0; round < group->rounds; round++) {
        size_t count = (size_t)(round * 7919 % MAX_COUNT);
        check_reductions(&engine, &sequence, count, round, round % 2);
        check_movement(&engine, &sequence, count / 3, round);
        check_all_to_all(&engine, &sequence, count / 4, round);
        check_exchange(&engine, count, round);
        check_stash(&engine, count / 2, round);
        check_any_source(&engine, count / 2, round);
        check_withdrawal(&engine, count / 2, round);
    }
    struct ec_op last = operation(EC_BARRIER, sequence, NULL, NULL, 0, 0, 0);
    run(&engine, &last, group->rounds);
    close_rank(&engine);
}

void check_many_ranks(const struct group *group, int rank)
{
    struct ec_engine engine;
    size_t count = 1;
    open_rank(&engine, group, rank);
    for (int round = 0; round < group->rounds; round++) {
        struct ec_op op = operation(EC_BARRIER, 2 * (uint64_t)round, NULL, NULL, 0, 0, 0);
        run(&engine, &op, round);
        x[0] = (float)rank;
        op = operation(EC_ALL_REDUCE, 2 * (uint64_t)round + 1, x, x, 4, 4, 0);
        run(&engine, &op, round);
        expect(ALL(x[i] == (float)(group->size * (group->size - 1) / 2)), "sum", rank, round);
    }
    close_rank(&engine);
}
