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
 * Sleeping is Dekker's pattern: the sleeper stores `sleeps_on` and then loads the counter once
 * more; the rank that moves a counter stores it and then loads `sleeps_on`. Both stores and both
 * loads are sequentially consistent, so at least one of the two sees the other, and no wake is
 * lost. A sleep that ends by time although its counter moved is counted (`num_lost_wakes`).
 */
#ifndef ECHELON_SHM_ENGINE_H
#define ECHELON_SHM_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EC_SLICE_NS INT64_C(100000000) /* longest wait without a look at the peers' lives */
#define EC_ANY (-1) /* the peer of a receive that takes a message of any rank */

enum {
    EC_MAX_RANKS = 256,
    EC_SLOTS = 4, /* chunks a rank may be ahead of the slowest reader */
    EC_LINE = 64,
    EC_CALL_BYTES = 240,
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
    EC_NO_MEMORY,  /* the blamed rank could not keep a message that it has not asked for yet */
};

/* What a rank called: `bytes` are compared between ranks, whatever they mean. */
struct ec_call {
    uint64_t sequence;
    uint8_t bytes[EC_CALL_BYTES];
};

/* One per rank, side by side, in whole cache lines. Each line is written by its owner only, except
 * the bell's. */
struct ec_control {
    _Alignas(EC_LINE) _Atomic uint64_t published; /* chunks written since the group began */
    _Alignas(EC_LINE) _Atomic uint64_t reduced;   /* chunks whose share this rank has summed */
    _Alignas(EC_LINE) _Atomic uint64_t consumed;  /* chunks this rank has done reading */
    _Alignas(EC_LINE) _Atomic uint32_t bell;      /* the futex on which this rank sleeps */
    _Atomic uint32_t sleeps_on;                   /* 0, peer + 1, or EC_ANYONE */
    _Alignas(EC_LINE) _Atomic uint32_t tells; /* between moving a counter and the last bell rung */
    _Alignas(EC_LINE) _Atomic uint32_t fault; /* enum ec_fault */
    _Atomic uint64_t ended; /* with `fault`: chunks of the collectives that it had finished */
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
    bool is_adopted; /* another rank found it, perhaps in another operation */
};

enum ec_state { EC_PENDING, EC_DONE, EC_FAILED };

/* Of a receive from any rank: what decides between a message and `ec_withdraw`. */
enum ec_claim { EC_UNCLAIMED, EC_HAS_MESSAGE, EC_WITHDRAWN };

/* A counter that some rank moves: the wait is over once *word >= value. */
struct ec_wait {
    _Atomic uint64_t *word;
    uint64_t value;
    int rank;
};

struct ec_op {
    enum ec_kind kind;
    enum ec_dtype dtype;
    enum ec_reduce_op reduce_op;
    int root; /* or the peer of a send or receive, EC_ANY: any */
    int tag;
    uint32_t type_id; /* of a message: equal at both ends, whatever it means */
    bool is_shared; /* a receive from any rank that ranks outside this group may answer, too */
    uint64_t sequence;
    const uint8_t *source;
    uint8_t *target;
    size_t source_bytes;
    size_t target_bytes;
    /* all_to_all: bytes to each rank, then bytes from each rank. all_gather, reduce_scatter: bytes
     * of each rank's part, the same on all ranks; NULL where all parts are equal. */
    const uint64_t *splits;
    struct ec_call call;
    int64_t deadline_ns;

    /* Where it stands: the driver's alone until `state` is final. */
    bool begun, agreed, writes, reads, folds;
    int turn;      /* which of the two calls is its own */
    uint64_t base; /* number of its first chunk */
    uint64_t num_chunks, published, reduced, consumed;
    size_t piece; /* bytes of a chunk, or of one rank's part of it */
    size_t moved; /* bytes of a message */
    int sender;   /* of a receive: the rank whose message it takes; -1: none */
    _Atomic int claim; /* enum ec_claim */
    uint64_t number;     /* in the order of submission */
    struct ec_wait wait; /* what a collective that cannot move is blocked on */
    int64_t ended_ns;
    struct ec_blame blame;
    _Atomic int state; /* enum ec_state */
    struct ec_op *next;
};

struct ec_queue {
    struct ec_op *head, *tail;
};

/* A message for which no receive was posted when it came in. */
struct ec_stashed {
    struct ec_stashed *next;
    int tag;
    uint32_t type_id;
    int64_t sent_ns;
    size_t num_bytes;
    uint8_t *bytes;
};

/* One peer's messages. While `open`, a head is read and its body is not yet all here: it goes to
 * `op`, or else to `stash`, the last entry of the list. */
struct ec_inbox {
    bool open;
    size_t num_bytes, moved;
    struct ec_op *op;
    struct ec_stashed *stash;
    struct ec_stashed *first, *last; /* in the order in which they were sent */
};

struct ec_peer {
    int pid; /* 0: not watched */
    int pidfd; /* -1: denied; then by start time */
    uint64_t start_ticks;
};

struct ec_statistics {
    uint64_t num_sleeps;     /* waits that ended in the kernel */
    uint64_t num_spins;      /* waits that ended while spinning */
    uint64_t num_lost_wakes; /* sleeps that ended by time although their counter had moved: 0 */
    uint64_t num_stashed;    /* messages that came before their receive */
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
    int64_t look_ns;     /* when to look at the peers' lives next */
    int64_t earliest_ns; /* no operation's deadline is before this */
    int64_t spin_ns; /* how long to spin before the next sleep */
    unsigned num_slept;
    struct ec_queue taken; /* taken over from `submitted`, not yet begun */
    struct ec_queue collectives;
    struct ec_queue *sends, *receives; /* per peer; receives that wait for a message */
    struct ec_queue any_receives;
    int num_sends, num_receives; /* begun and not finished */
    struct ec_inbox *inboxes; /* per peer */
    struct ec_wait *waits;    /* room for every counter that may be slept on at once */
    struct ec_statistics statistics;

    /* Under `lock`. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct ec_queue submitted; /* what the driver has not yet taken over */
    uint64_t num_submitted;
    int num_pending, num_waiting;
    bool driving, has_thread, stopping;
    pthread_t thread;
    struct ec_blame blame; /* of the first fault; fault == EC_FINE while the group works */

    _Atomic uint32_t kicked;  /* something was submitted while the driver may be asleep */
    _Atomic uint32_t ends_with; /* enum ec_fault: set where the driver is to end the group */
};

/* Called every 100 ms while a caller's own thread waits; non-zero: stop; EC_FORKED: return at once,
 * this is another process now. The thread does not drive during this call: it may call anything but
 * ec_close. */
typedef int (*ec_check)(void *argument);

enum { EC_FORKED = 2 };

/* engine.c */
size_t ec_segment_bytes(int size, size_t slot_bytes, size_t ring_bytes);
int ec_open(struct ec_engine *engine, void *memory, int rank, int size, size_t slot_bytes,
            size_t ring_bytes, bool spins, const struct ec_peer *peers);
void ec_close(struct ec_engine *engine);
int ec_submit(struct ec_engine *engine, struct ec_op *op, bool needs_thread);
int ec_run(struct ec_engine *engine, struct ec_op *op, ec_check check, void *argument);
int ec_wait(struct ec_engine *engine, struct ec_op *op, int64_t until_ns, ec_check check,
            void *argument);
bool ec_withdraw(struct ec_engine *engine, struct ec_op *op);
void ec_abort(struct ec_engine *engine);
void ec_leave(struct ec_engine *engine);
void ec_finish(struct ec_engine *engine, struct ec_op *op);
void ec_fail(struct ec_engine *engine, const struct ec_blame *blame);

/* queue.c */
void ec_append(struct ec_queue *queue, struct ec_op *op);
struct ec_op *ec_pop(struct ec_queue *queue);
void ec_unlink(struct ec_queue *queue, struct ec_op *op);

/* faults.c: who is late, gone or dead. */
bool ec_fails_with_others(struct ec_engine *engine, const struct ec_op *op);
void ec_look(struct ec_engine *engine, int64_t now);

/* collectives.c: advance as far as possible; true if anything moved. */
bool ec_step_collective(struct ec_engine *engine, struct ec_op *op);

/* messages.c: the same, a bounded part at a time. */
bool ec_step_messages(struct ec_engine *engine);
void ec_begin_send(struct ec_engine *engine, struct ec_op *op);
int ec_message_waits(struct ec_engine *engine, struct ec_wait *waits);
bool ec_can_send(struct ec_engine *engine, int peer);
bool ec_has_come(struct ec_engine *engine, int peer);
bool ec_peek(struct ec_engine *engine, int peer, int *tag, int64_t *sent_ns);
void ec_open_message(struct ec_engine *engine, int peer);

/* matching.c: which receive a message goes to. */
void ec_begin_receive(struct ec_engine *engine, struct ec_op *op);
void ec_take_message(struct ec_engine *engine, int peer, int tag, uint32_t type_id, int64_t sent_ns,
                     size_t num_bytes);
void ec_drop_withdrawn(struct ec_engine *engine);
void ec_drop_messages(struct ec_engine *engine);

/* waiting.c */
extern _Atomic uint64_t ec_num_lost_wakes; /* of all engines of this process: 0 */
int64_t ec_now_ns(void);
void ec_announce(struct ec_engine *engine, _Atomic uint64_t *counter, uint64_t value, int peer);
void ec_ring_bell(struct ec_control *control);
void ec_tell(struct ec_engine *engine, int peer);
void ec_sleep(struct ec_engine *engine, const struct ec_wait *waits, int num, int64_t slice_ns);
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
