/* The recorder's C core by itself: a writer, a heartbeat, and a reader of another mapping.
 *
 * The reader maps the same file a second time, as another process would: sanitizers then see the
 * writer's threads and not the seqlock, whose races are resolved by its stamps and checksums. What
 * the reader takes for whole is compared with what the writer must have stored. Writers in several
 * threads take turns by a lock, as the interpreter's critical sections do.
 */
#define _GNU_SOURCE
#include "ring.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    NUM_SLOTS = 32,
    NUM_SPANS = 16,
    NUM_KEPT = 8,
    NUM_WRITERS = 3,
    HELD_EVERY = 37, /* an operation that stays pending while the ring goes round several times */
    BYTES = 1 << 20,
};

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                       \
            abort();                                                                              \
        }                                                                                         \
    } while (0)

static struct bb_ring written, seen;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int num_running;
static long num_operations;

/* Without the lock, ThreadSanitizer must report it: else it looks at nothing. */
#ifdef BB_WITHOUT_LOCK
static const bool is_unlocked = true;
#else
static const bool is_unlocked = false;
#endif

static void take_turn(void)
{
    if (!is_unlocked)
        pthread_mutex_lock(&turn);
}

static void end_turn(void)
{
    if (!is_unlocked)
        pthread_mutex_unlock(&turn);
}

static void place(struct bb_ring *ring, char *memory)
{
    *ring = (struct bb_ring){
        .live = (void *)(memory + BB_LIVE_OFFSET),
        .open_spans = (void *)(memory + (64 << 10)),
        .spans = (void *)(memory + (96 << 10)),
        .slots = (void *)(memory + (128 << 10)),
        .kept = (void *)(memory + (192 << 10)),
        .recent = (void *)(memory + (256 << 10)),
        .num_slots = NUM_SLOTS,
        .num_spans = NUM_SPANS,
        .num_kept_places = NUM_KEPT,
    };
    bb_ring_prepare(ring);
}

static void map_twice(void)
{
    int file = memfd_create("ring", MFD_CLOEXEC);
    CHECK(file >= 0 && ftruncate(file, BYTES) == 0);
    char *one = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    char *other = mmap(NULL, BYTES, PROT_READ, MAP_SHARED, file, 0);
    CHECK(one != MAP_FAILED && other != MAP_FAILED);
    close(file);
    place(&written, one);
    place(&seen, other);
}

/* ---- what is written: each field follows from the number in `tag` ---- */

static struct bb_fixed call(int number)
{
    return (struct bb_fixed){
        .sequence = 3 * (int64_t)number, .num_bytes = 7919 * (int64_t)number, .tag = number,
        .root = number % 1009, .created_mono_ns = 1 + number, .signature = 1,
    };
}

static void check_call(const struct bb_fixed *fixed)
{
    struct bb_fixed expected = call(fixed->tag);
    CHECK(fixed->sequence == expected.sequence && fixed->num_bytes == expected.num_bytes);
    CHECK(fixed->root == expected.root && fixed->created_mono_ns == expected.created_mono_ns);
}

static void store_signature(unsigned char byte)
{
    unsigned char *entry = (unsigned char *)written.recent + 16;
    uint32_t head[4] = {1, 600, 0, 0};
    memcpy(entry, head, sizeof head);
    memset(entry + 16, byte, 600);
}

static void *write_operations(void *unused)
{
    int64_t held[NUM_KEPT] = {0};
    int num_held = 0;
    for (long i = 0; i < num_operations; i++) {
        take_turn();
        struct bb_fixed fixed = call((int)(written.next & 0xFFFFFF));
        int64_t record = bb_operation_begin(&written, &fixed, i % 2);
        CHECK(record >= 0);
        bb_operation_started(&written, record, fixed.created_mono_ns + 1);
        if (i % HELD_EVERY == 0 && num_held < NUM_KEPT / NUM_WRITERS)
            held[num_held++] = record;
        else
            bb_operation_ended(&written, record, fixed.created_mono_ns + 2, 0, BB_COMPLETED);
        if (i % 211 == 0 && num_held)
            bb_operation_ended(&written, held[--num_held], 9, 0, BB_FAILED);
        end_turn();
    }
    take_turn();
    while (num_held)
        bb_operation_ended(&written, held[--num_held], 9, 0, BB_COMPLETED);
    end_turn();
    atomic_fetch_sub(&num_running, 1);
    return unused;
}

static void *write_spans(void *unused)
{
    struct bb_span spans[BB_NUM_OPEN_SPANS + 2];
    memset(spans, 0, sizeof spans);
    for (long i = 0; i < num_operations / 8; i++) {
        int depth = (int)(i % (BB_NUM_OPEN_SPANS + 2)) + 1;
        if (depth > 3 && i % 97)
            depth = 3;
        take_turn();
        for (int k = 0; k < depth; k++) {
            spans[k].fixed.started_mono_ns = i + 1;
            spans[k].fixed.step = 5 * i;
            spans[k].fixed.depth = (uint32_t)k;
            bb_span_open(&written, &spans[k]);
        }
        end_turn();
        take_turn();
        for (int k = depth - 1; k >= 0; k--) {
            bb_span_close(&written, &spans[k], i + 2);
            bb_span_close(&written, &spans[k], 77); /* changes nothing */
        }
        end_turn();
    }
    atomic_fetch_sub(&num_running, 1);
    return unused;
}

/* ---- the reader, which knows only stamps and checksums ---- */

static int read_slot(const struct bb_slot *slot, struct bb_slot *copy)
{
    memcpy(copy, slot, sizeof *copy);
    uint64_t head = copy->head;
    if (!head || head != copy->tail || copy->fixed.record != head - 1 ||
        copy->crc != bb_crc32(&copy->fixed, sizeof copy->fixed, 0))
        return 0;
    check_call(&copy->fixed);
    struct bb_state *state = &copy->state;
    if (state->head != head || state->tail != head ||
        state->crc != bb_crc32(&state->started_mono_ns, 24, (uint32_t)head))
        return 1;
    CHECK(state->state >= BB_STARTED && state->state <= BB_FAILED);
    CHECK(state->started_mono_ns >= copy->fixed.created_mono_ns);
    return 1;
}

static int read_kept(const struct bb_kept *place)
{
    struct bb_kept copy;
    struct bb_slot slot;
    memcpy(&copy, place, sizeof copy);
    if (!read_slot(&copy.slot, &slot) || copy.length != 600 ||
        copy.crc != bb_crc32(copy.signature, copy.length, (uint32_t)slot.head))
        return 0;
    for (int i = 1; i < 600; i++)
        CHECK(copy.signature[i] == copy.signature[0]);
    return 1;
}

static int read_span(const struct bb_span_slot *slot)
{
    struct bb_span_slot copy;
    memcpy(&copy, slot, sizeof copy);
    if (!copy.head || copy.head != copy.tail || copy.crc != bb_crc32(&copy.fixed, 56, 0))
        return 0;
    CHECK(copy.fixed.step == 5 * (copy.fixed.started_mono_ns - 1));
    CHECK(!copy.fixed.ended_mono_ns ||
          copy.fixed.ended_mono_ns == copy.fixed.started_mono_ns + 1);
    return 1;
}

static long read_all(void)
{
    struct bb_slot slot;
    long num_whole = 0;
    for (int i = 0; i < NUM_SLOTS; i++)
        num_whole += read_slot(&seen.slots[i], &slot);
    for (int i = 0; i < NUM_KEPT; i++)
        num_whole += read_kept(&seen.kept[i]);
    for (int i = 0; i < NUM_SPANS; i++)
        num_whole += read_span(&seen.spans[i]);
    for (int i = 0; i < BB_NUM_OPEN_SPANS; i++)
        num_whole += read_span(&seen.open_spans[i]);
    return num_whole;
}

static void check_end(void)
{
    CHECK(bb_load(&seen.live[BB_NUM_KEPT]) == 0 && bb_load(&seen.live[BB_KEPT_REFUSED]) == 0);
    CHECK(bb_load(&seen.live[BB_NUM_OPERATIONS]) == (uint64_t)(NUM_WRITERS * num_operations));
    for (int i = 0; i < NUM_SLOTS; i++) {
        struct bb_slot slot;
        CHECK(read_slot(&seen.slots[i], &slot) && slot.state.state >= BB_COMPLETED);
    }
    for (int i = 0; i < BB_NUM_OPEN_SPANS; i++)
        CHECK(!seen.open_spans[i].head || seen.open_spans[i].fixed.ended_mono_ns);
}

static void check_heartbeat(void)
{
    uint64_t beat = 0;
    for (int i = 0; i < 3; i++) { /* starts and stops, each time with a new stamp */
        CHECK(bb_heartbeat_start(&written.live[BB_NATIVE_HEARTBEAT], 1000000));
        CHECK(!bb_heartbeat_start(&written.live[BB_NATIVE_HEARTBEAT], 1000000));
        for (long k = 0; bb_load(&seen.live[BB_NATIVE_HEARTBEAT]) == beat; k++) {
            CHECK(k < 100000);
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        }
        bb_heartbeat_stop(&written.live[BB_NATIVE_HEARTBEAT]);
        beat = bb_load(&seen.live[BB_NATIVE_HEARTBEAT]);
    }
}

int main(int argc, char **argv)
{
    pthread_t threads[NUM_WRITERS + 1];
    long num_whole = 0, num_reads = 0;
    num_operations = argc > 1 ? atol(argv[1]) : 20000;
    bb_crc32_prepare();
    CHECK(bb_crc32("123456789", 9, 0) == 0xCBF43926u);
    map_twice();
    store_signature(7);
    atomic_store(&num_running, NUM_WRITERS + 1);
    for (int i = 0; i < NUM_WRITERS; i++)
        CHECK(pthread_create(&threads[i], NULL, write_operations, NULL) == 0);
    CHECK(pthread_create(&threads[NUM_WRITERS], NULL, write_spans, NULL) == 0);
    while (atomic_load(&num_running)) {
        num_whole += read_all();
        num_reads++;
    }
    for (int i = 0; i <= NUM_WRITERS; i++)
        pthread_join(threads[i], NULL);
    check_end();
    check_heartbeat();
    printf("%ld reads beside the writers, %ld slots whole\n", num_reads, num_whole);
    return 0;
}
