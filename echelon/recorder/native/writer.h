/* What the C core knows of Python: its caches of what Python stored.
 *
 * The core writes operations and spans and nothing else. Whatever is met for the first time (a text,
 * a signature, a call site) is stored by Python, and its reference is cached here.
 */
#ifndef ECHELON_WRITER_H
#define ECHELON_WRITER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ring.h"

/* Free-threaded builds lock the writer where the interpreter's lock is enough otherwise. Either may
 * be released while Python code runs, so caches are looked up again after each call into Python. */
#ifdef Py_BEGIN_CRITICAL_SECTION
#define BB_BEGIN(self) Py_BEGIN_CRITICAL_SECTION(self)
#define BB_END() Py_END_CRITICAL_SECTION()
#else
#define BB_BEGIN(self) {
#define BB_END() }
#endif

enum {
    BB_MAX_SIGNATURES = 4096,
    BB_MAX_SITES = 1 << 14,
    BB_STACK_FRAMES = 4,
    BB_MAX_WALK = 64,
};

typedef struct bb_writer WriterObject;

/* ---- arguments.c: the keywords of `begin` ---- */

enum bb_argument {
    SEQUENCE, P2P_SEQUENCE, DTYPE, SHAPES, INPUT_SPLITS, OUTPUT_SPLITS, NUM_BYTES, REDUCE_OP, ROOT,
    PEER, TAG, COALESCED, TIMEOUT_S, FLAGS, DEPTH, IS_STARTED, NUM_ARGUMENTS,
};

bool bb_arguments_prepare(void);
/* Sort keyword values into `values`; -1 for a name that `begin` does not have. */
int bb_sort_keywords(PyObject *keywords, PyObject *const *from, PyObject **values);
/* Read a whole number, brought into its range; -1 with an exception if it is not one. */
int bb_read_i64(PyObject *value, int64_t *to);
int bb_read_u32(PyObject *value, uint32_t *to);
/* Read the numbers of an operation. */
int bb_read_fixed(PyObject *group, PyObject **values, struct bb_fixed *fixed);
/* Read those that differ from one call of a prepared operation to the next. */
int bb_read_varying(PyObject **values, struct bb_fixed *fixed);

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

/* ---- texts.c: names and details of spans ---- */

struct bb_texts {
    PyObject *names, *recent;         /* the caches of texts.py: text -> reference */
    PyObject *add_name, *add_detail;  /* what fills them */
};

enum { BB_SPAN_CHARS = 600 };

/* Return the reference of a span's name or detail; -1 with an exception if there is none. */
int bb_name_find(const struct bb_texts *self, PyObject *text, uint32_t *ref);
int bb_detail_find(const struct bb_texts *self, PyObject *text, uint32_t *ref);

/* ---- writer.c: the type, its memory, its clock ---- */

struct bb_writer {
    PyObject_HEAD
    Py_buffer memory;
    struct bb_ring ring;
    uint64_t generation; /* numbers the writers of this process */
    struct bb_signatures signatures;
    struct bb_sites sites;
    struct bb_site_calls site_calls;
    struct bb_texts texts;
    PyObject *add_signature, *now, *keep_pause;
    int64_t collecting_since, long_pause_ns;
};

extern PyTypeObject bb_writer_type;

static inline bool bb_is_closed(const WriterObject *self)
{
    return self->ring.slots == NULL;
}

int64_t bb_clock_ns(const WriterObject *self);
uint32_t bb_thread_id(const WriterObject *self);

/* ---- the methods: METH_FASTCALL, with keywords in `begin` ---- */

bool bb_operations_prepare(void);
PyObject *bb_begin(WriterObject *self, PyObject *const *args, Py_ssize_t num, PyObject *keywords);
PyObject *bb_started(WriterObject *self, PyObject *const *args, Py_ssize_t num);
PyObject *bb_completed(WriterObject *self, PyObject *const *args, Py_ssize_t num);
PyObject *bb_failed(WriterObject *self, PyObject *const *args, Py_ssize_t num);

extern PyTypeObject bb_prepared_type;
bool bb_prepared_prepare(void);
PyObject *bb_prepare(WriterObject *self, PyObject *const *args, Py_ssize_t num);
PyObject *bb_begin_prepared(WriterObject *self, PyObject *const *args, Py_ssize_t num);

extern PyTypeObject bb_open_span_type;
PyObject *bb_open_span(WriterObject *self, PyObject *const *args, Py_ssize_t num);
PyObject *bb_close_span(WriterObject *self, PyObject *const *args, Py_ssize_t num);
PyObject *bb_keep_span(WriterObject *self, PyObject *const *args, Py_ssize_t num);

#endif
