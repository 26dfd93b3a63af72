/* The collectives, as steps that never block.
 *
 * Data moves in chunks through slots. Chunks are numbered through the life of the group, equally
 * on all ranks; chunk c of a rank lies in its slot c % EC_SLOTS. A rank
 *     writes  its part of a chunk, once every rank has read the chunk EC_SLOTS before it;
 *     folds   (large all_reduce and reduce) its share of every rank's parts, in rank order;
 *     reads   what it needs of the others' parts.
 * Every operation has at least one chunk, and no rank reads before every rank has written its first
 * one and all calls have been found equal: a mismatch never touches a result.
 */
#include "engine.h"

#include <string.h>

enum { EC_SMALL_BYTES = 16 << 10, EC_AHEAD = EC_SLOTS };

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t lines(size_t num_bytes)
{
    return num_bytes / EC_LINE * EC_LINE;
}

/* Bytes of the `number`-th piece of `total` bytes. */
static size_t piece_at(const struct ec_op *op, size_t total, uint64_t number)
{
    size_t start = (size_t)number * op->piece;
    return start >= total ? 0 : smaller(op->piece, total - start);
}

static uint64_t pieces(size_t total, size_t piece)
{
    return total ? (total + piece - 1) / piece : 1;
}

/* Where the share of `rank` in a chunk of `num_bytes` begins: whole cache lines. */
static size_t share_start(const struct ec_engine *engine, size_t num_bytes, int rank)
{
    if (rank == engine->size)
        return num_bytes;
    return lines(num_bytes / (size_t)engine->size * (size_t)rank);
}

/* The parts of an all_gather or reduce_scatter: `equal` bytes each, or as the splits say. */
static size_t part_bytes(const struct ec_op *op, size_t equal, int rank)
{
    return op->splits ? (size_t)op->splits[rank] : equal;
}

static size_t part_start(const struct ec_op *op, size_t equal, int rank)
{
    size_t start = 0;
    for (int before = 0; before < rank; before++)
        start += part_bytes(op, equal, before);
    return start;
}

static size_t longest_part(const struct ec_engine *engine, const struct ec_op *op, size_t equal)
{
    size_t longest = 0;
    for (int rank = 0; rank < engine->size; rank++)
        if (part_bytes(op, equal, rank) > longest)
            longest = part_bytes(op, equal, rank);
    return longest;
}

/* ---- how an operation is cut ---- */

static void begin_reduction(struct ec_engine *engine, struct ec_op *op)
{
    op->writes = true;
    op->piece = engine->slot_bytes;
    op->num_chunks = pieces(op->source_bytes, op->piece);
    op->reads = op->kind == EC_ALL_REDUCE || op->root == engine->rank;
    op->folds = engine->size > 2 && op->source_bytes > EC_SMALL_BYTES;
}

static void begin_rows(struct ec_engine *engine, struct ec_op *op)
{
    bool is_root = op->root == engine->rank;
    size_t row = op->source_bytes;
    if (op->kind == EC_REDUCE_SCATTER || op->kind == EC_SCATTER ||
        (op->kind == EC_BROADCAST && !is_root))
        row = op->target_bytes;
    if (op->splits)
        row = longest_part(engine, op, row);
    op->piece = engine->slot_bytes;
    if (op->kind == EC_REDUCE_SCATTER || op->kind == EC_SCATTER)
        op->piece = lines(engine->slot_bytes / (size_t)engine->size);
    op->num_chunks = pieces(row, op->piece);
    op->writes = op->kind == EC_ALL_GATHER || op->kind == EC_REDUCE_SCATTER ||
                 (op->kind == EC_GATHER && !is_root) ||
                 ((op->kind == EC_BROADCAST || op->kind == EC_SCATTER) && is_root);
    op->reads = op->kind == EC_ALL_GATHER || op->kind == EC_REDUCE_SCATTER ||
                (op->kind == EC_GATHER && is_root) || op->kind == EC_SCATTER ||
                (op->kind == EC_BROADCAST && !is_root);
}

/* Its first chunk holds every rank's splits; how many follow is known once all have arrived. */
static void begin_all_to_all(struct ec_engine *engine, struct ec_op *op)
{
    op->piece = lines(engine->slot_bytes / (size_t)engine->size);
    op->num_chunks = 1;
    op->writes = op->reads = true;
}

static void begin(struct ec_engine *engine, struct ec_op *op)
{
    op->begun = true;
    op->base = engine->position;
    op->turn = (int)(engine->num_begun++ & 1);
    engine->controls[engine->rank].calls[op->turn] = op->call;
    if (op->kind == EC_ALL_REDUCE || op->kind == EC_REDUCE)
        begin_reduction(engine, op);
    else if (op->kind == EC_ALL_TO_ALL)
        begin_all_to_all(engine, op);
    else if (op->kind == EC_BARRIER)
        op->num_chunks = 1;
    else
        begin_rows(engine, op);
}

/* ---- writing ---- */

static void write_rows(struct ec_engine *engine, struct ec_op *op, uint64_t number, uint8_t *slot)
{
    size_t equal = op->source_bytes / (size_t)engine->size;
    const uint8_t *source = op->source + (size_t)number * op->piece;
    for (int rank = 0; rank < engine->size; rank++) {
        size_t width = piece_at(op, part_bytes(op, equal, rank), number);
        if (rank != engine->rank && width)
            memcpy(slot + (size_t)rank * op->piece, source, width);
        source += part_bytes(op, equal, rank);
    }
}

static void write_all_to_all(struct ec_engine *engine, struct ec_op *op, uint64_t number,
                             uint8_t *slot)
{
    if (number == 0) {
        memcpy(slot, op->splits, 2 * (size_t)engine->size * sizeof *op->splits);
        return;
    }
    const uint8_t *source = op->source;
    for (int rank = 0; rank < engine->size; source += op->splits[rank], rank++)
        if (rank != engine->rank)
            memcpy(slot + (size_t)rank * op->piece, source + (size_t)(number - 1) * op->piece,
                   piece_at(op, op->splits[rank], number - 1));
}

/* When folding, only this rank reads its own share of its part. */
static void write_part(struct ec_engine *engine, struct ec_op *op, uint64_t number, uint8_t *slot)
{
    size_t width = piece_at(op, op->source_bytes, number);
    const uint8_t *source = op->source + (size_t)number * op->piece;
    if (!op->folds) {
        memcpy(slot, source, width);
        return;
    }
    size_t first = share_start(engine, width, engine->rank);
    size_t next = share_start(engine, width, engine->rank + 1);
    memcpy(slot, source, first);
    memcpy(slot + next, source + next, width - next);
}

static void write_chunk(struct ec_engine *engine, struct ec_op *op, uint64_t number)
{
    uint8_t *slot = ec_slot(engine, engine->rank, op->base + number);
    if (op->kind == EC_REDUCE_SCATTER || op->kind == EC_SCATTER)
        write_rows(engine, op, number, slot);
    else if (op->kind == EC_ALL_TO_ALL)
        write_all_to_all(engine, op, number, slot);
    else
        write_part(engine, op, number, slot);
}

/* ---- folding ---- */

/* Sum this rank's share of every rank's part in rank order, into its own part. */
static void fold_chunk(struct ec_engine *engine, struct ec_op *op, uint64_t number)
{
    const void *parts[EC_MAX_RANKS];
    size_t width = piece_at(op, op->source_bytes, number);
    size_t first = share_start(engine, width, engine->rank);
    size_t next = share_start(engine, width, engine->rank + 1);
    uint8_t *mine = ec_slot(engine, engine->rank, op->base + number);
    for (int rank = 0; rank < engine->size; rank++)
        parts[rank] = ec_slot(engine, rank, op->base + number) + first;
    parts[engine->rank] = op->source + (size_t)number * op->piece + first;
    ec_reduce(mine + first, parts, engine->size, next - first, op->dtype, op->reduce_op);
}

/* ---- reading ---- */

static void read_reduction(struct ec_engine *engine, struct ec_op *op, uint64_t number)
{
    size_t width = piece_at(op, op->source_bytes, number);
    uint8_t *target = op->target + (size_t)number * op->piece;
    const void *parts[EC_MAX_RANKS];
    for (int rank = 0; rank < engine->size; rank++)
        parts[rank] = ec_slot(engine, rank, op->base + number);
    if (!op->folds) {
        parts[engine->rank] = op->source + (size_t)number * op->piece;
        ec_reduce(target, parts, engine->size, width, op->dtype, op->reduce_op);
        return;
    }
    for (int rank = 0; rank < engine->size; rank++) {
        size_t first = share_start(engine, width, rank);
        memcpy(target + first, (const uint8_t *)parts[rank] + first,
               share_start(engine, width, rank + 1) - first);
    }
}

static void read_gathered(struct ec_engine *engine, struct ec_op *op, uint64_t number)
{
    size_t equal = op->source_bytes, start = (size_t)number * op->piece;
    uint8_t *target = op->target + start;
    for (int rank = 0; rank < engine->size; rank++) {
        size_t width = piece_at(op, part_bytes(op, equal, rank), number);
        const uint8_t *part = rank == engine->rank ? op->source + start
                                                   : ec_slot(engine, rank, op->base + number);
        if (width)
            memmove(target, part, width);
        target += part_bytes(op, equal, rank);
    }
}

static void read_reduce_scatter(struct ec_engine *engine, struct ec_op *op, uint64_t number)
{
    const void *parts[EC_MAX_RANKS];
    size_t mine = (size_t)engine->rank * op->piece, start = (size_t)number * op->piece;
    size_t width = piece_at(op, op->target_bytes, number);
    if (!width)
        return;
    for (int rank = 0; rank < engine->size; rank++)
        parts[rank] = ec_slot(engine, rank, op->base + number) + mine;
    parts[engine->rank] = op->source + part_start(op, op->target_bytes, engine->rank) + start;
    ec_reduce(op->target + start, parts, engine->size, width, op->dtype, op->reduce_op);
}

static void read_scattered(struct ec_engine *engine, struct ec_op *op, uint64_t number)
{
    size_t start = (size_t)number * op->piece, width = piece_at(op, op->target_bytes, number);
    const uint8_t *part =
        op->root == engine->rank
            ? op->source + (size_t)engine->rank * op->target_bytes + start
            : ec_slot(engine, op->root, op->base + number) + (size_t)engine->rank * op->piece;
    memmove(op->target + start, part, width);
}

/* Compare what each rank sends with what its peers expect; find the number of chunks. */
static bool agree_on_splits(struct ec_engine *engine, struct ec_op *op)
{
    struct ec_blame blame = {
        .fault = EC_MISMATCH, .kind = op->kind, .sequence = op->sequence};
    size_t longest = 0;
    bool same = true;
    for (int from = 0; from < engine->size; from++) {
        const uint64_t *sent = (const uint64_t *)ec_slot(engine, from, op->base);
        for (int to = 0; to < engine->size; to++) {
            const uint64_t *wanted = (const uint64_t *)ec_slot(engine, to, op->base);
            if (sent[to] != wanted[engine->size + from]) {
                ec_blame_rank(&blame, from);
                ec_blame_rank(&blame, to);
                same = false;
            }
            if (sent[to] > longest)
                longest = sent[to];
        }
    }
    if (!same) {
        ec_fail(engine, &blame);
        return false;
    }
    op->num_chunks = 1 + (longest ? pieces(longest, op->piece) : 0);
    return true;
}

static void read_all_to_all(struct ec_engine *engine, struct ec_op *op, uint64_t number)
{
    if (number == 0)
        return;
    const uint64_t *wanted = op->splits + engine->size;
    uint8_t *target = op->target;
    for (int rank = 0; rank < engine->size; target += wanted[rank], rank++) {
        size_t start = (size_t)(number - 1) * op->piece;
        size_t width = piece_at(op, wanted[rank], number - 1);
        const uint8_t *part =
            ec_slot(engine, rank, op->base + number) + (size_t)engine->rank * op->piece;
        if (rank == engine->rank) {
            part = op->source + start;
            for (int before = 0; before < rank; before++)
                part += op->splits[before];
        }
        if (width)
            memmove(target + start, part, width);
    }
}

static void read_chunk(struct ec_engine *engine, struct ec_op *op, uint64_t number)
{
    switch (op->kind) {
    case EC_ALL_REDUCE:
    case EC_REDUCE:
        read_reduction(engine, op, number);
        break;
    case EC_ALL_GATHER:
    case EC_GATHER:
        read_gathered(engine, op, number);
        break;
    case EC_REDUCE_SCATTER:
        read_reduce_scatter(engine, op, number);
        break;
    case EC_BROADCAST:
        memcpy(op->target + (size_t)number * op->piece,
               ec_slot(engine, op->root, op->base + number),
               piece_at(op, op->target_bytes, number));
        break;
    case EC_SCATTER:
        read_scattered(engine, op, number);
        break;
    case EC_ALL_TO_ALL:
        read_all_to_all(engine, op, number);
        break;
    default:
        break;
    }
}

/* ---- advancing ---- */

enum counter { PUBLISHED, REDUCED, CONSUMED };

static _Atomic uint64_t *counter_of(struct ec_engine *engine, enum counter which, int rank)
{
    struct ec_control *control = &engine->controls[rank];
    return which == PUBLISHED ? &control->published
           : which == REDUCED ? &control->reduced
                              : &control->consumed;
}

/* Whether every other rank's counter has reached `value`; else note on whom we wait. */
static bool all_reached(struct ec_engine *engine, struct ec_op *op, enum counter which,
                        uint64_t value)
{
    for (int rank = 0; rank < engine->size; rank++) {
        if (rank == engine->rank)
            continue;
        _Atomic uint64_t *counter = counter_of(engine, which, rank);
        if (atomic_load_explicit(counter, memory_order_acquire) < value) {
            op->wait = (struct ec_wait){counter, value, rank};
            return false;
        }
    }
    return true;
}

static bool calls_agree(struct ec_engine *engine, struct ec_op *op)
{
    for (int rank = 0; rank < engine->size; rank++) {
        const struct ec_call *call = &engine->controls[rank].calls[op->turn];
        if (memcmp(call, &op->call, sizeof *call) != 0) {
            struct ec_blame blame = {/* whom it names is Python's vote */
                .fault = EC_MISMATCH, .kind = op->kind, .sequence = op->sequence};
            ec_fail(engine, &blame);
            return false;
        }
    }
    if (ec_fails_with_others(engine, op))
        return false;
    return op->kind != EC_ALL_TO_ALL || agree_on_splits(engine, op);
}

static bool step_writing(struct ec_engine *engine, struct ec_op *op)
{
    struct ec_control *mine = &engine->controls[engine->rank];
    bool moved = false;
    if (!op->writes && op->published < op->num_chunks) {
        op->published = op->num_chunks;
        ec_announce(engine, &mine->published, op->base + op->published, -1);
        return true;
    }
    while (op->published < op->num_chunks) {
        uint64_t done = op->reads ? op->consumed : op->published;
        uint64_t chunk = op->base + op->published;
        if (op->published >= done + EC_AHEAD)
            break;
        if (chunk >= EC_SLOTS && !all_reached(engine, op, CONSUMED, chunk - EC_SLOTS + 1))
            break;
        write_chunk(engine, op, op->published);
        op->published++;
        ec_announce(engine, &mine->published, op->base + op->published, -1);
        moved = true;
    }
    return moved;
}

static bool step_folding(struct ec_engine *engine, struct ec_op *op)
{
    struct ec_control *mine = &engine->controls[engine->rank];
    bool moved = false;
    while (op->reduced < op->published &&
           all_reached(engine, op, PUBLISHED, op->base + op->reduced + 1)) {
        fold_chunk(engine, op, op->reduced);
        op->reduced++;
        ec_announce(engine, &mine->reduced, op->base + op->reduced, -1);
        moved = true;
    }
    return moved;
}

static bool step_reading(struct ec_engine *engine, struct ec_op *op)
{
    struct ec_control *mine = &engine->controls[engine->rank];
    uint64_t ready = op->folds ? op->reduced : op->published;
    bool moved = false;
    while (op->consumed < ready &&
           all_reached(engine, op, op->folds ? REDUCED : PUBLISHED, op->base + op->consumed + 1)) {
        read_chunk(engine, op, op->consumed);
        op->consumed++;
        ec_announce(engine, &mine->consumed, op->base + op->consumed, -1);
        moved = true;
    }
    return moved;
}

static bool is_over(const struct ec_op *op)
{
    return op->agreed && op->published == op->num_chunks &&
           (!op->folds || op->reduced == op->num_chunks) &&
           (!op->reads || op->consumed == op->num_chunks);
}

static void end(struct ec_engine *engine, struct ec_op *op)
{
    struct ec_control *mine = &engine->controls[engine->rank];
    engine->position = op->base + op->num_chunks;
    if (!op->folds) /* no rank waits on it between operations, so none is woken */
        atomic_store_explicit(&mine->reduced, engine->position, memory_order_release);
    if (!op->reads)
        ec_announce(engine, &mine->consumed, engine->position, -1);
    ec_unlink(&engine->collectives, op);
    ec_finish(engine, op);
}

/* A rank that reads nothing of a chunk must not hold up those that write. */
static void step_not_reading(struct ec_engine *engine, struct ec_op *op)
{
    struct ec_control *mine = &engine->controls[engine->rank];
    uint64_t done = op->folds ? op->reduced : op->published;
    if (op->consumed < done) {
        op->consumed = done;
        ec_announce(engine, &mine->consumed, op->base + done, -1);
    }
}

bool ec_step_collective(struct ec_engine *engine, struct ec_op *op)
{
    if (!op->begun)
        begin(engine, op);
    bool moved = step_writing(engine, op);
    if (!op->agreed) {
        if (!all_reached(engine, op, PUBLISHED, op->base + 1))
            return moved;
        if (!calls_agree(engine, op))
            return true;
        op->agreed = moved = true;
    }
    if (op->folds && step_folding(engine, op))
        moved = true;
    if (op->reads && step_reading(engine, op))
        moved = true;
    else if (!op->reads)
        step_not_reading(engine, op);
    if (is_over(op)) {
        end(engine, op);
        return true;
    }
    return moved;
}
