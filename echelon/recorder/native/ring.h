/* The ring's structures as schema.py declares them, and what writes them without the interpreter.
 *
 * Nothing here knows Python: tests/native compiles it by itself, under sanitizers and for ARM. Only
 * one thread writes at a time (the interpreter's lock, or the writer's critical section); readers
 * are other processes.
 */
#ifndef ECHELON_RING_H
#define ECHELON_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { BB_STARTED = 2, BB_COMPLETED = 3, BB_FAILED = 4 };

/* Indices of the live words. */
enum {
    BB_PROGRESS = 1,
    BB_NUM_OPERATIONS = 2,
    BB_NUM_SPANS = 3,
    BB_STEP = 4,
    BB_SPANS_REFUSED = 8,
    BB_RECENT_UNITS = 13,
    BB_NUM_KEPT = 14,
    BB_KEPT_REFUSED = 15,
    BB_NUM_PAUSES = 11,
    BB_PAUSES_NS = 12,
    BB_NATIVE_HEARTBEAT = 16,
};

enum {
    BB_LIVE_OFFSET = 4096,
    BB_RECENT_UNITS_ROUND = (1 << 19) / 16,
    BB_RECENT_PART_UNITS = BB_RECENT_UNITS_ROUND / 4,
    BB_MAX_TENSORS = 8,
    BB_MAX_DIMS = 8,
    BB_MAX_SPLITS = 64,
    BB_MAX_TAIL_BYTES = 8 + BB_MAX_TENSORS + 8 * BB_MAX_TENSORS * BB_MAX_DIMS + 8 * BB_MAX_SPLITS,
    BB_MAX_SIGNATURE_BYTES = 16 + BB_MAX_TAIL_BYTES,
    BB_MAX_TRIES = 64,
    BB_NUM_OPEN_SPANS = 64,
};

struct bb_fixed {
    uint64_t record;
    int64_t sequence, p2p_sequence, created_mono_ns, step, num_bytes, timeout_ms;
    uint32_t group, signature, site, stack;
    int32_t root, peer, tag, coalesced;
    uint32_t thread, flags;
};

struct bb_state {
    _Atomic uint64_t head;
    int64_t started_mono_ns, completed_mono_ns;
    uint32_t error, state, crc, reserved;
    _Atomic uint64_t tail;
};

struct bb_slot {
    _Atomic uint64_t head;
    uint32_t length, crc;
    struct bb_fixed fixed;
    uint64_t reserved;
    _Atomic uint64_t tail;
    struct bb_state state;
    uint64_t padding[2];
};

struct bb_kept {
    struct bb_slot slot;
    uint32_t length, crc;
    unsigned char signature[BB_MAX_SIGNATURE_BYTES];
    unsigned char padding[88];
};

struct bb_span_fixed {
    uint64_t number;
    int64_t started_mono_ns, ended_mono_ns, step;
    uint32_t name, detail, site, thread, depth, reserved;
};

struct bb_span_slot {
    _Atomic uint64_t head;
    uint32_t length, crc;
    struct bb_span_fixed fixed;
    _Atomic uint64_t tail;
};

_Static_assert(sizeof(struct bb_span_fixed) == 56, "schema.py: SPAN_FIXED");
_Static_assert(sizeof(struct bb_span_slot) == 80, "schema.py: SPAN_SLOT");
_Static_assert(sizeof(struct bb_kept) == 1344, "schema.py: KEPT_OPERATION");
_Static_assert(sizeof(struct bb_fixed) == 96, "schema.py: OPERATION_FIXED");
_Static_assert(sizeof(struct bb_state) == 48, "schema.py: OPERATION_STATE");
_Static_assert(sizeof(struct bb_slot) == 192, "schema.py: OPERATION_SLOT");
_Static_assert(offsetof(struct bb_slot, state) == 128, "schema.py: OPERATION_SLOT");

/* ---- faults.c: the last words of a process that a signal ends ---- */

enum { BB_FAULT_OFFSET = 4096 + 1024, BB_FAULT_FRAMES = 24 };

struct bb_fault_frame {
    uint64_t address, offset; /* in memory, and in the file */
    char file[104];           /* the end of its path */
};

struct bb_fault {
    _Atomic uint64_t stamp; /* 0: none; 1: without frames; 2: whole */
    uint32_t signal;
    int32_t code;
    uint64_t address;
    int64_t mono_ns;
    uint32_t thread, num_frames;
    uint64_t reserved[3];
    struct bb_fault_frame frames[BB_FAULT_FRAMES];
};

_Static_assert(sizeof(struct bb_fault) == 64 + 24 * 120, "schema.py: FAULT");

/* Keep a mapped file that is cut off from ending the process; false if that is not possible. */
bool bb_faults_protect(uintptr_t begin, size_t length, bool writable);
/* Undo that, before the file is unmapped. */
void bb_faults_release(uintptr_t begin);
/* Write there what ends the process. Handlers of others stay, unless they are known to chain. */
void bb_faults_write_to(struct bb_fault *fault, bool also_over_others);

/* ---- heartbeat.c ---- */

bool bb_heartbeat_start(_Atomic uint64_t *to, int64_t period_ns);
void bb_heartbeat_stop(_Atomic uint64_t *to);

/* ---- checksum.c ---- */

void bb_crc32_prepare(void);
uint32_t bb_crc32(const void *data, size_t length, uint32_t before);

/* ---- slots.c: operations, and those that outlive their slots ---- */

struct bb_ring {
    struct bb_slot *slots; /* NULL once closed */
    struct bb_kept *kept;
    struct bb_span_slot *spans, *open_spans;
    const unsigned char *recent;
    _Atomic uint64_t *live;
    uint64_t num_slots, num_spans, num_kept_places;
    uint64_t next;                          /* number of the next operation */
    uint64_t next_span, next_ended;         /* of the next span, and of the next one that ends */
    uint8_t places[BB_NUM_OPEN_SPANS];      /* a queue of the free ones of `open_spans` */
    uint64_t place_to_take, place_to_free;  /* positions in that queue */
};

/* Prepare the queue of places; the other fields are the caller's. */
void bb_ring_prepare(struct bb_ring *ring);
/* Store an operation; return its number, -1 if pending ones hold every slot. */
int64_t bb_operation_begin(struct bb_ring *ring, struct bb_fixed *fixed, bool is_started);
void bb_operation_started(struct bb_ring *ring, int64_t record, int64_t began);
void bb_operation_ended(struct bb_ring *ring, int64_t record, int64_t ended, uint32_t error,
                        uint32_t state);

/* ---- spans.c ---- */

struct bb_span {
    struct bb_span_fixed fixed;
    int place; /* in `open_spans`; -1: none was free */
    bool is_closed;
};

/* Store a span that begins; its number and its place are filled in. */
void bb_span_open(struct bb_ring *ring, struct bb_span *span);
/* Store its end; once. */
void bb_span_close(struct bb_ring *ring, struct bb_span *span, int64_t ended);
/* Store a span that was never open, such as a pause. */
void bb_span_keep(struct bb_ring *ring, struct bb_span_fixed *fixed);

/* ---- words ---- */

static inline uint64_t bb_load(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static inline void bb_store(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_relaxed);
}

#endif
