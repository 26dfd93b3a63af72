/* What the C core shares: the ring's structures as schema.py declares them, and its caches.
 *
 * The core writes operations and nothing else. Whatever is met for the first time (a text, a
 * signature, a call site) is stored by Python, and its reference is cached here.
 */
#ifndef ECHELON_BLACK_BOX_H
#define ECHELON_BLACK_BOX_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Free-threaded builds lock the writer where the interpreter's lock is enough otherwise. Either may
 * be released while Python code runs, so caches are looked up again after each call into Python. */
#ifdef Py_BEGIN_CRITICAL_SECTION
#define BB_BEGIN(self) Py_BEGIN_CRITICAL_SECTION(self)
#define BB_END() Py_END_CRITICAL_SECTION()
#else
#define BB_BEGIN(self) {
#define BB_END() }
#endif

enum { BB_STARTED = 2, BB_COMPLETED = 3, BB_FAILED = 4 };

/* Indices of the live words. */
enum {
    BB_PROGRESS = 1,
    BB_NUM_OPERATIONS = 2,
    BB_STEP = 4,
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
    BB_MAX_SIGNATURES = 4096,
    BB_MAX_SITES = 1 << 14,
    BB_STACK_FRAMES = 4,
    BB_MAX_WALK = 64,
    BB_MAX_TRIES = 64,
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

/* ---- signatures.c: what operations are called with -> their entry in `recent` ---- */

struct bb_call {
    PyObject *operation, *dtype, *reduce_op; /* borrowed */
    PyObject *shapes, *inputs, *outputs;     /* borrowed */
};

struct bb_signature {
    PyObject *operation, *dtype, *reduce_op; /* owned; NULL: an empty place */
    uint64_t hash;
    uint32_t ref, tail_bytes;
    unsigned char *tail;
};

struct bb_signatures {
    struct bb_signature *table; /* open addressing, a power of two */
    size_t size, used;
    uint64_t part; /* of `recent`, in which the table was last emptied */
};

/* Return the position of a signature, by the cache or by calling `add`; 0 if that failed. */
uint32_t bb_signature_find(struct bb_signatures *self, const struct bb_call *call, uint64_t part,
                           PyObject *add);
void bb_signatures_clear(struct bb_signatures *self);

/* ---- sites.c: where operations are called ---- */

struct bb_frames {
    uintptr_t code[BB_STACK_FRAMES];
    int32_t lasti[BB_STACK_FRAMES];
};

struct bb_site {
    struct bb_frames frames; /* code[0] == 0: an empty place */
    uint32_t site, stack;
};

struct bb_sites {
    struct bb_site *table; /* open addressing, a power of two */
    size_t size, used;
    uintptr_t *codes; /* of known code objects; the lowest bit: it is the user's */
    size_t codes_size, codes_used;
    PyObject *alive; /* a list: keeps them alive, so that no address is used twice */
};

struct bb_site_calls {
    PyObject *is_user_code, *add_site, *find_site;
};

void bb_site_find(struct bb_sites *self, const struct bb_site_calls *calls, long depth,
                  uint32_t *site, uint32_t *stack);
void bb_sites_clear(struct bb_sites *self);

#endif
