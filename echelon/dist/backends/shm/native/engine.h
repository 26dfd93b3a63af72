/* The shared-memory engine: collectives and messages between processes of one host.
 *
 * Pure C11 and Linux, no Python: module.c binds it, tests/native runs it with ranks as threads.
 *
 * [Note: the memory model]
 * Everything that ranks share is either one of the atomics below or plain bytes (slots, calls,
 * message rings). Plain bytes have one writer at a time, and a reader may look only after a
 * counter of that writer says so:
 *
 *     writer: plain stores ... then  counter.store(n, release)
 *     reader: counter.load(acquire) >= n ... then plain loads
 *
 * and a writer reuses bytes only after the readers' own counters (`consumed`, a ring's `head`)
 * say, by the same pair, that they are done reading. Nothing relies on x86's store order; with one
 * release weakened (-DEC_WEAKEN_PUBLISH) ThreadSanitizer reports a race.
 *
 * Sleeping is Dekker's pattern: the sleeper stores `sleeps_on` and then looks at the counter once
 * more; who moves a counter stores it and then looks at `sleeps_on`. Both stores and both loads
 * are sequentially consistent, so at least one of the two sees the other, and no wake is lost.
 */
#ifndef ECHELON_SHM_ENGINE_H
#define ECHELON_SHM_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    EC_MAX_RANKS = 256,
    EC_SLOTS = 4, /* chunks a rank may be ahead of the slowest reader */
    EC_LINE = 64,
    EC_CALL_BYTES = 240,
    EC_CONTROL_BYTES = 4096,
    EC_BLAME_WORDS = EC_MAX_RANKS / 64,
};

enum ec_kind {
    EC_ALL_REDUCE,
    EC_REDUCE,
    EC_ALL_GATHER,
    EC_REDUCE_SCATTER,
    EC_BROADCAST,
    EC_ALL_TO_ALL,
    EC_GATHER,
    EC_SCATTER,
    EC_BARRIER,
    EC_SEND,
    EC_RECV,
    EC_NUM_KINDS,
};

enum ec_dtype {
    EC_BOOL,
    EC_INT8,
    EC_INT16,
    EC_INT32,
    EC_INT64,
    EC_UINT8,
    EC_UINT16,
    EC_UINT32,
    EC_UINT64,
    EC_FLOAT16,
    EC_BFLOAT16,
    EC_FLOAT32,
    EC_FLOAT64,
    EC_NUM_DTYPES,
};

enum ec_reduce_op {
    EC_SUM,
    EC_AVG,
    EC_MIN,
    EC_MAX,
    EC_PROD,
    EC_BAND,
    EC_BOR,
    EC_BXOR,
    EC_NUM_REDUCE_OPS,
};

/* Why a group ended. Also what a rank leaves in shared memory for the others. */
enum ec_fault {
    EC_FINE,
    EC_LEFT,       /* closed in order */
    EC_TIMED_OUT,  /* the blamed ranks did not come */
    EC_PEER_LOST,  /* the blamed ranks died */
    EC_MISMATCH,   /* the blamed ranks called something else */
    EC_ABORTED,    /* abort() or a signal handler's exception, on the blamed rank */
};

/* What a rank called: `bytes` are compared between ranks, whatever they mean. */
struct ec_call {
    uint64_t sequence;
    uint8_t bytes[EC_CALL_BYTES];
};

/* One per rank, one page. Each line is written by its owner only, except the bell. */
struct ec_control {
    _Alignas(EC_LINE) _Atomic uint64_t published; /* chunks written since the group began */
    _Alignas(EC_LINE) _Atomic uint64_t reduced;   /* chunks whose share this rank has summed */
    _Alignas(EC_LINE) _Atomic uint64_t consumed;  /* chunks this rank has done reading */
    _Alignas(EC_LINE) _Atomic uint32_t bell;      /* the futex on which this rank sleeps */
    _Atomic uint32_t sleeps_on;                   /* 0, peer + 1, or EC_ANYONE */
    _Alignas(EC_LINE) _Atomic uint32_t fault;     /* enum ec_fault */
    _Atomic uint64_t blamed[EC_BLAME_WORDS];
    _Alignas(EC_LINE) struct ec_call calls[2]; /* this collective's and the one's before, in turns */
};

#define EC_ANYONE UINT32_MAX

/* A byte ring from one rank to another. `tail` is the sender's, `head` the receiver's. */
struct ec_ring {
    _Alignas(EC_LINE) _Atomic uint64_t tail;
    _Alignas(EC_LINE) _Atomic uint64_t head;
    _Alignas(EC_LINE) uint8_t bytes[];
};

struct ec_blame {
    enum ec_fault fault;
    enum ec_kind kind; /* of the operation that failed first ... */
    uint64_t sequence; /* ... and its number, if it is a collective */
    uint64_t ranks[EC_BLAME_WORDS];
};

enum ec_state { EC_PENDING, EC_DONE, EC_FAILED };

struct ec_op {
    enum ec_kind kind;
    enum ec_dtype dtype;
    enum ec_reduce_op reduce_op;
    int root; /* or the peer of a send or receive */
    int tag;
    uint64_t sequence;
    const uint8_t *source;
    uint8_t *target;
    size_t source_bytes;
    size_t target_bytes;
    const uint64_t *splits; /* all_to_all: bytes to each rank, then bytes from each rank */
    struct ec_call call;
    int64_t deadline_ns;

    /* Where it stands: the driver's alone until `state` is final. */
    bool begun, agreed, writes, reads, folds;
    int turn;      /* which of the two calls is its own */
    uint64_t base; /* number of its first chunk */
    uint64_t num_chunks, published, reduced, consumed;
    size_t piece; /* bytes of a chunk, or of one rank's part of it */
    size_t moved; /* bytes of a message */
    _Atomic uint64_t *wait_word; /* blocked until *wait_word >= wait_for, which wait_rank moves */
    uint64_t wait_for;
    int wait_rank;
    int64_t ended_ns;
    struct ec_blame blame;
    _Atomic int state; /* enum ec_state */
    struct ec_op *next;
};

struct ec_queue {
    struct ec_op *head, *tail;
};

/* A message that came before its receive was posted. */
struct ec_stashed {
    struct ec_stashed *next;
    int tag;
    int dtype;
    size_t num_bytes;
    uint8_t *bytes;
};

/* What has been read of the message that is coming in from one peer. */
struct ec_inbox {
    bool open; /* a message's head is read, its body is not yet all here */
    int tag;
    int dtype;
    size_t num_bytes, moved;
    struct ec_op *op;          /* where its body goes, or NULL and ... */
    struct ec_stashed *stash;  /* ... here */
    struct ec_stashed *first, *last;
};

struct ec_peer {
    int pid; /* 0: not watched */
    int pidfd; /* -1: denied; then by start time */
    uint64_t start_ticks;
};

struct ec_engine {
    int rank, size;
    bool spins; /* a core for each rank: wait a moment before sleeping */
    size_t slot_bytes, ring_bytes;
    struct ec_control *controls;
    uint8_t *slots;
    uint8_t *rings;
    struct ec_peer *peers;

    /* The driver's. */
    uint64_t num_begun; /* collectives: equal on all ranks between them, with or without gaps in
                         * their sequence numbers */
    uint64_t position; /* chunks of all finished collectives: equal on all ranks between them */
    int64_t looked_ns;
    int64_t spin_ns; /* how long to spin before the next sleep */
    unsigned num_slept;
    struct ec_inbox *inboxes;

    /* Under `lock`. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct ec_queue collectives;
    struct ec_queue *sends, *receives; /* per peer */
    int num_pending, num_messages, num_waiting;
    bool driving, has_thread, stopping;
    pthread_t thread;
    struct ec_blame blame; /* of the first fault; fault == EC_FINE while the group works */

    _Atomic uint32_t kicked;  /* something was submitted while the driver may be asleep */
    _Atomic uint32_t ends_with; /* enum ec_fault: set where the driver is to end the group */
};

/* Called every 100 ms while a caller's own thread waits; non-zero: stop. */
typedef int (*ec_check)(void *argument);

/* engine.c */
size_t ec_segment_bytes(int size, size_t slot_bytes, size_t ring_bytes);
int ec_open(struct ec_engine *engine, void *memory, int rank, int size, size_t slot_bytes,
            size_t ring_bytes, bool spins, const struct ec_peer *peers);
void ec_close(struct ec_engine *engine);
int ec_submit(struct ec_engine *engine, struct ec_op *op, bool needs_thread);
int ec_wait(struct ec_engine *engine, struct ec_op *op, int64_t until_ns, ec_check check,
            void *argument);
void ec_abort(struct ec_engine *engine);
void ec_leave(struct ec_engine *engine);
void ec_fail(struct ec_engine *engine, const struct ec_blame *blame);
bool ec_fails_with_others(struct ec_engine *engine, const struct ec_op *op);
void ec_finish(struct ec_engine *engine, struct ec_queue *queue, struct ec_op *op);

/* collectives.c, messages.c: advance as far as possible; true if anything moved. */
bool ec_step_collective(struct ec_engine *engine, struct ec_op *op);
bool ec_step_sends(struct ec_engine *engine, int peer);
bool ec_step_receives(struct ec_engine *engine, int peer);
void ec_drop_messages(struct ec_engine *engine);

/* waiting.c */
int64_t ec_now_ns(void);
void ec_announce(struct ec_engine *engine, _Atomic uint64_t *counter, uint64_t value, int peer);
void ec_ring_bell(struct ec_control *control);
void ec_tell(struct ec_engine *engine, int peer);
void ec_sleep(struct ec_engine *engine, struct ec_op *const *blocked, int num, int64_t slice_ns);
bool ec_is_dead(struct ec_peer *peer);

/* reduce.c */
void ec_reduce(void *target, const void *const *parts, int num_parts, size_t num_bytes,
               enum ec_dtype dtype, enum ec_reduce_op op);
size_t ec_item_bytes(enum ec_dtype dtype);
const char *ec_instructions(void);

static inline void ec_blame_rank(struct ec_blame *blame, int rank)
{
    blame->ranks[rank / 64] |= UINT64_C(1) << (rank % 64);
}

static inline bool ec_is_blamed(const struct ec_blame *blame, int rank)
{
    return blame->ranks[rank / 64] >> (rank % 64) & 1;
}

static inline uint8_t *ec_slot(struct ec_engine *engine, int rank, uint64_t chunk)
{
    return engine->slots + ((size_t)rank * EC_SLOTS + chunk % EC_SLOTS) * engine->slot_bytes;
}

static inline struct ec_ring *ec_ring_of(struct ec_engine *engine, int from, int to)
{
    size_t stride = sizeof(struct ec_ring) + engine->ring_bytes;
    return (struct ec_ring *)(engine->rings + ((size_t)from * engine->size + to) * stride);
}

#endif
