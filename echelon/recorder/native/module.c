/* `Writer`: operations into a ring's memory, as operations.py writes them, byte for byte.
 *
 * No method raises: what cannot be recorded is not. The slot is a seqlock whose reader does not
 * rely on it: the stores are fenced, and a checksum decides (schema.py, [Note: what makes a slot
 * readable]).
 */
#include "black_box.h"

#include <stddef.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    struct bb_slot *slots; /* NULL once closed */
    struct bb_kept *kept;
    const unsigned char *recent;
    _Atomic uint64_t *live;
    uint64_t num_slots, next, num_kept_places, generation;
    struct bb_signatures signatures;
    struct bb_sites sites;
    struct bb_site_calls site_calls;
    PyObject *add_signature, *now, *keep_pause;
    int64_t collecting_since, long_pause_ns;
} WriterObject;

static PyTypeObject Writer_Type;

/* ---- the clock, the thread ---- */

static int64_t clock_ns(const WriterObject *self)
{
    if (self->now) { /* tests bring their own clock */
        PyObject *answer = PyObject_CallNoArgs(self->now);
        int64_t value = answer ? PyLong_AsLongLong(answer) : 0;
        Py_XDECREF(answer);
        PyErr_Clear();
        return value;
    }
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static uint64_t num_writers;

/* The native id of this thread. A forked child has its own writer, and so asks again. */
static uint32_t thread_id(const WriterObject *self)
{
    static _Thread_local uint64_t asked_by;
    static _Thread_local uint32_t id;
    if (asked_by != self->generation) {
#ifdef __linux__
        id = (uint32_t)syscall(SYS_gettid);
#else
        id = (uint32_t)PyThread_get_thread_native_id();
#endif
        asked_by = self->generation;
    }
    return id;
}

/* ---- arguments ---- */

enum argument {
    SEQUENCE, P2P_SEQUENCE, DTYPE, SHAPES, INPUT_SPLITS, OUTPUT_SPLITS, NUM_BYTES, REDUCE_OP, ROOT,
    PEER, TAG, COALESCED, TIMEOUT_S, FLAGS, DEPTH, IS_STARTED, NUM_ARGUMENTS,
};

static const char *const NAMES[NUM_ARGUMENTS] = {
    "sequence", "p2p_sequence", "dtype", "shapes", "input_splits", "output_splits", "num_bytes",
    "reduce_op", "root", "peer", "tag", "coalesced", "timeout_s", "flags", "depth", "is_started",
};

static PyObject *names[NUM_ARGUMENTS]; /* interned */
static PyObject *no_text, *no_tuple;

/* Where the values of a call's keywords belong. Each call site passes the same tuple of names. */
struct layout {
    PyObject *keywords; /* owned */
    signed char places[NUM_ARGUMENTS];
};

enum { NUM_LAYOUTS = 16 };
static struct layout layouts[NUM_LAYOUTS];

static int place_of(PyObject *keyword)
{
    for (int i = 0; i < NUM_ARGUMENTS; i++)
        if (names[i] == keyword)
            return i;
    for (int i = 0; i < NUM_ARGUMENTS; i++)
        if (PyUnicode_Compare(names[i], keyword) == 0)
            return i;
    return -1;
}

/* Sort keyword values into `values`; -1 for a name that `begin` does not have. */
static int sort_keywords(PyObject *keywords, PyObject *const *from, PyObject **values)
{
    Py_ssize_t count = PyTuple_GET_SIZE(keywords);
#ifndef Py_GIL_DISABLED
    struct layout *known = &layouts[(uintptr_t)keywords >> 4 & (NUM_LAYOUTS - 1)];
    if (known->keywords == keywords) {
        for (Py_ssize_t i = 0; i < count; i++)
            values[known->places[i]] = from[i];
        return 0;
    }
#endif
    signed char places[NUM_ARGUMENTS];
    if (count > NUM_ARGUMENTS)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        int place = place_of(PyTuple_GET_ITEM(keywords, i));
        if (place < 0)
            return -1;
        places[i] = (signed char)place;
        values[place] = from[i];
    }
#ifndef Py_GIL_DISABLED
    Py_XSETREF(known->keywords, Py_NewRef(keywords));
    memcpy(known->places, places, sizeof places);
#endif
    return 0;
}

/* Read a whole number, brought into its range; -1 with an exception if it is not one. */
static int read_i64(PyObject *value, int64_t *to)
{
    if (!value)
        return 0;
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow)
        number = overflow > 0 ? INT64_MAX : INT64_MIN;
    else if (number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        PyObject *whole = PyNumber_Long(value);
        if (!whole)
            return -1;
        number = PyLong_AsLongLongAndOverflow(whole, &overflow);
        Py_DECREF(whole);
        if (overflow)
            number = overflow > 0 ? INT64_MAX : INT64_MIN;
    }
    *to = number;
    return 0;
}

static int read_i32(PyObject *value, int32_t *to)
{
    int64_t number = *to;
    if (read_i64(value, &number) < 0)
        return -1;
    *to = (int32_t)(number < INT32_MIN ? INT32_MIN : number > INT32_MAX ? INT32_MAX : number);
    return 0;
}

static int read_u32(PyObject *value, uint32_t *to)
{
    int64_t number = *to;
    if (read_i64(value, &number) < 0)
        return -1;
    *to = (uint32_t)(number < 0 ? 0 : number > UINT32_MAX ? UINT32_MAX : number);
    return 0;
}

static int read_timeout(PyObject *value, int64_t *timeout_ms)
{
    *timeout_ms = 0;
    if (!value)
        return 0;
    double seconds = PyFloat_AsDouble(value);
    if (seconds == -1.0 && PyErr_Occurred())
        return -1;
    if (seconds >= 0 && seconds <= 1e9)
        *timeout_ms = (int64_t)(seconds * 1000);
    return 0;
}

static int read_fixed(PyObject *group, PyObject **values, struct bb_fixed *fixed)
{
    fixed->sequence = fixed->p2p_sequence = -1;
    fixed->root = fixed->peer = fixed->tag = fixed->coalesced = -1;
    fixed->num_bytes = 0;
    fixed->group = fixed->flags = 0;
    return read_u32(group, &fixed->group) || read_i64(values[SEQUENCE], &fixed->sequence) ||
                   read_i64(values[P2P_SEQUENCE], &fixed->p2p_sequence) ||
                   read_i64(values[NUM_BYTES], &fixed->num_bytes) ||
                   read_i32(values[ROOT], &fixed->root) || read_i32(values[PEER], &fixed->peer) ||
                   read_i32(values[TAG], &fixed->tag) ||
                   read_i32(values[COALESCED], &fixed->coalesced) ||
                   read_u32(values[FLAGS], &fixed->flags) ||
                   read_timeout(values[TIMEOUT_S], &fixed->timeout_ms)
               ? -1
               : 0;
}

/* ---- slots ---- */

static uint64_t load(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void store(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_relaxed);
}

static void write_state(struct bb_state *cell, uint64_t stamp, int64_t started, int64_t ended,
                        uint32_t error, uint32_t state)
{
    struct {
        int64_t started, ended;
        uint32_t error, state;
    } body = {started, ended, error, state};
    store(&cell->head, stamp);
    atomic_thread_fence(memory_order_release);
    memcpy(&cell->started_mono_ns, &body, sizeof body);
    cell->crc = bb_crc32(&body, sizeof body, (uint32_t)stamp);
    cell->reserved = 0;
    atomic_store_explicit(&cell->tail, stamp, memory_order_release);
}

static void write_slot(struct bb_slot *slot, const struct bb_fixed *fixed)
{
    uint64_t stamp = fixed->record + 1;
    store(&slot->head, stamp);
    atomic_thread_fence(memory_order_release);
    slot->length = sizeof *fixed;
    slot->crc = bb_crc32(fixed, sizeof *fixed, 0);
    slot->fixed = *fixed;
    atomic_store_explicit(&slot->tail, stamp, memory_order_release);
}

static bool is_open(const struct bb_slot *slot)
{
    uint64_t stamp = load(&slot->head);
    return stamp && !(load(&slot->state.head) == stamp && slot->state.state >= BB_COMPLETED);
}

/* ---- operations that outlive their slots: kept.py ---- */

static struct bb_kept *kept_place(const WriterObject *self, uint64_t stamp)
{
    for (uint64_t i = 0; i < self->num_kept_places; i++)
        if (load(&self->kept[i].slot.head) == stamp)
            return &self->kept[i];
    return NULL;
}

/* Copy the signature that `ref` points to; return its length, 0 if it was overwritten. */
static uint32_t copy_signature(const WriterObject *self, uint32_t ref, unsigned char *to)
{
    const unsigned char *entry = self->recent + (uint64_t)(ref % BB_RECENT_UNITS_ROUND) * 16;
    uint32_t head[4];
    memcpy(head, entry, sizeof head);
    if (head[0] != ref || head[1] > BB_MAX_SIGNATURE_BYTES)
        return 0;
    memcpy(to, entry + sizeof head, head[1]);
    return head[1];
}

/* Let an operation that has not ended move out of its slot; false if no place is free. */
static bool make_room(WriterObject *self, const struct bb_slot *slot)
{
    struct bb_kept *place = kept_place(self, 0);
    if (!place)
        return false;
    place->length = copy_signature(self, slot->fixed.signature, place->signature);
    place->crc = bb_crc32(place->signature, place->length, 0);
    memcpy((char *)&place->slot + 8, (const char *)slot + 8, sizeof *slot - 8);
    atomic_store_explicit(&place->slot.head, load(&slot->head), memory_order_release);
    store(&self->live[BB_NUM_KEPT], load(&self->live[BB_NUM_KEPT]) + 1);
    return true;
}

/* Take the next number whose slot is free; NULL if there is none among the next ones. */
static struct bb_slot *take_slot(WriterObject *self, uint64_t *record)
{
    for (int i = 0; i < BB_MAX_TRIES; i++) {
        *record = self->next++;
        struct bb_slot *slot = &self->slots[*record % self->num_slots];
        if (!is_open(slot) || make_room(self, slot))
            return slot;
    }
    store(&self->live[BB_KEPT_REFUSED], load(&self->live[BB_KEPT_REFUSED]) + 1);
    return NULL;
}

static struct bb_kept *kept_operation(const WriterObject *self, uint64_t stamp)
{
    return load(&self->live[BB_NUM_KEPT]) ? kept_place(self, stamp) : NULL;
}

/* ---- methods ---- */

static int64_t begin(WriterObject *self, PyObject *const *args, PyObject **values)
{
    struct bb_fixed fixed;
    int64_t depth = 1;
    fixed.created_mono_ns = clock_ns(self);
    if (read_fixed(args[0], values, &fixed) < 0 || read_i64(values[DEPTH], &depth) < 0)
        return -1;
    struct bb_call call = {
        args[1],
        values[DTYPE] ? values[DTYPE] : no_text,
        values[REDUCE_OP] ? values[REDUCE_OP] : no_text,
        values[SHAPES] ? values[SHAPES] : no_tuple,
        values[INPUT_SPLITS] ? values[INPUT_SPLITS] : no_tuple,
        values[OUTPUT_SPLITS] ? values[OUTPUT_SPLITS] : no_tuple,
    };
    uint64_t part = load(&self->live[BB_RECENT_UNITS]) / BB_RECENT_PART_UNITS;
    fixed.signature = bb_signature_find(&self->signatures, &call, part, self->add_signature);
    if (!fixed.signature && PyErr_Occurred())
        return -1;
    bb_site_find(&self->sites, &self->site_calls, (long)depth, &fixed.site, &fixed.stack);
    if (!self->slots) /* closed meanwhile */
        return -1;
    fixed.step = (int64_t)load(&self->live[BB_STEP]) - 1;
    fixed.thread = thread_id(self);
    struct bb_slot *slot = take_slot(self, &fixed.record);
    if (!slot)
        return -1;
    write_slot(slot, &fixed);
    store(&self->live[BB_NUM_OPERATIONS], fixed.record + 1);
    store(&self->live[BB_PROGRESS], (uint64_t)fixed.created_mono_ns);
    if (values[IS_STARTED] && PyObject_IsTrue(values[IS_STARTED]) == 1)
        write_state(&slot->state, fixed.record + 1, fixed.created_mono_ns, 0, 0, BB_STARTED);
    return (int64_t)fixed.record;
}

static PyObject *Writer_begin(WriterObject *self, PyObject *const *args, Py_ssize_t num,
                              PyObject *keywords)
{
    int64_t record = -1;
    PyObject *values[NUM_ARGUMENTS] = {NULL};
    if (num != 2 || (keywords && sort_keywords(keywords, args + num, values) < 0)) {
        PyErr_SetString(PyExc_TypeError, "begin(group, operation, *, ...): unexpected arguments");
        return NULL; /* our own mistake, met by the first test */
    }
    BB_BEGIN(self)
    if (self->slots)
        record = begin(self, args, values);
    BB_END()
    PyErr_Clear();
    return PyLong_FromLongLong(record);
}

/* Return the slot of an operation that is still there; NULL with `stamp` set for a kept one. */
static struct bb_slot *slot_of(WriterObject *self, PyObject *record, uint64_t *stamp)
{
    int64_t number = -1;
    *stamp = 0;
    if (!self->slots || read_i64(record, &number) < 0 || number < 0)
        return NULL;
    *stamp = (uint64_t)number + 1;
    struct bb_slot *slot = &self->slots[(uint64_t)number % self->num_slots];
    return load(&slot->head) == *stamp ? slot : NULL;
}

static void mark_ended(WriterObject *self, PyObject *record, int64_t ended, uint32_t error,
                       uint32_t state)
{
    uint64_t stamp;
    struct bb_slot *slot = slot_of(self, record, &stamp);
    struct bb_kept *kept = !slot && stamp ? kept_operation(self, stamp) : NULL;
    if (kept) {
        store(&kept->slot.head, 0);
        store(&self->live[BB_NUM_KEPT], load(&self->live[BB_NUM_KEPT]) - 1);
    } else if (slot) {
        struct bb_state *cell = &slot->state;
        int64_t started = load(&cell->head) == stamp ? cell->started_mono_ns : 0;
        write_state(cell, stamp, started, ended, error, state);
    }
}

static PyObject *Writer_started(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    int64_t now = clock_ns(self), began = now;
    uint64_t stamp;
    if (num < 1 || num > 2)
        return PyErr_Format(PyExc_TypeError, "started(record, at_mono_ns=None)");
    if (num == 2 && args[1] != Py_None) {
        if (read_i64(args[1], &began) < 0 || began == 0)
            began = now;
    }
    BB_BEGIN(self)
    struct bb_slot *slot = slot_of(self, args[0], &stamp);
    struct bb_kept *kept = !slot && stamp ? kept_operation(self, stamp) : NULL;
    if (slot || kept)
        write_state(slot ? &slot->state : &kept->slot.state, stamp, began, 0, 0, BB_STARTED);
    BB_END()
    PyErr_Clear();
    Py_RETURN_NONE;
}

static PyObject *Writer_completed(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    int64_t now = clock_ns(self), ended = now;
    if (num < 1 || num > 2)
        return PyErr_Format(PyExc_TypeError, "completed(record, at_mono_ns=None)");
    if (num == 2 && args[1] != Py_None) {
        if (read_i64(args[1], &ended) < 0 || ended == 0)
            ended = now;
    }
    BB_BEGIN(self)
    if (self->slots) {
        mark_ended(self, args[0], ended, 0, BB_COMPLETED);
        if (self->slots)
            store(&self->live[BB_PROGRESS], (uint64_t)now);
    }
    BB_END()
    PyErr_Clear();
    Py_RETURN_NONE;
}

static PyObject *Writer_failed(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    int64_t now = clock_ns(self);
    uint32_t error = 0;
    if (num != 2)
        return PyErr_Format(PyExc_TypeError, "failed(record, error)");
    BB_BEGIN(self)
    if (self->slots && read_u32(args[1], &error) == 0) {
        mark_ended(self, args[0], now, error, BB_FAILED);
        if (self->slots)
            store(&self->live[BB_PROGRESS], (uint64_t)now);
    }
    BB_END()
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* ---- the collector's pauses: pauses.py ---- */

/* Called by the collector: `callback("start" or "stop", info)`. */
static PyObject *Writer_on_collection(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    int64_t now = clock_ns(self);
    if (num != 2 || !PyUnicode_Check(args[0]) || PyUnicode_GET_LENGTH(args[0]) < 3)
        Py_RETURN_NONE;
    if (PyUnicode_READ_CHAR(args[0], 2) == 'a') {
        self->collecting_since = now;
        Py_RETURN_NONE;
    }
    int64_t began = self->collecting_since;
    self->collecting_since = 0;
    if (!began || !self->live)
        Py_RETURN_NONE;
    atomic_fetch_add_explicit(&self->live[BB_NUM_PAUSES], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&self->live[BB_PAUSES_NS], (uint64_t)(now - began),
                              memory_order_relaxed);
    if (now - began >= self->long_pause_ns && self->keep_pause) {
        PyObject *kept = PyObject_CallFunction(self->keep_pause, "LLO", (long long)began,
                                               (long long)now, args[1]);
        Py_XDECREF(kept);
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

static PyObject *Writer_keep_pauses(WriterObject *self, PyObject *args)
{
    PyObject *keep;
    long long from;
    if (!PyArg_ParseTuple(args, "OL", &keep, &from))
        return NULL;
    Py_XSETREF(self->keep_pause, Py_NewRef(keep));
    self->long_pause_ns = from;
    Py_RETURN_NONE;
}

/* ---- the heartbeat, and the last words of a process that a signal ends ---- */

static PyObject *Writer_start_heartbeat(WriterObject *self, PyObject *period_ns)
{
    int64_t period = 0;
    if (read_i64(period_ns, &period) < 0)
        return NULL;
    bool started = self->live && period > 0 &&
                   bb_heartbeat_start(&self->live[BB_NATIVE_HEARTBEAT], period);
    return PyBool_FromLong(started);
}

static void stop_heartbeat(WriterObject *self)
{
    if (!self->live)
        return;
    _Atomic uint64_t *word = &self->live[BB_NATIVE_HEARTBEAT];
    Py_BEGIN_ALLOW_THREADS
    bb_heartbeat_stop(word);
    Py_END_ALLOW_THREADS
}

static PyObject *Writer_stop_heartbeat(WriterObject *self, PyObject *Py_UNUSED(unused))
{
    stop_heartbeat(self);
    Py_RETURN_NONE;
}

static PyObject *Writer_write_faults(WriterObject *self, PyObject *over_others)
{
    if (self->live)
        bb_faults_write_to((void *)((char *)self->memory.buf + BB_FAULT_OFFSET),
                           PyObject_IsTrue(over_others) == 1);
    Py_RETURN_NONE;
}

static PyObject *protect(PyObject *Py_UNUSED(module), PyObject *memory)
{
    Py_buffer view;
    bool writable = PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE) == 0;
    PyErr_Clear();
    if (!writable && PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    bool done = bb_faults_protect((uintptr_t)view.buf, (size_t)view.len, writable);
    PyObject *address = done ? PyLong_FromVoidPtr(view.buf) : PyLong_FromLong(0);
    PyBuffer_Release(&view);
    return address;
}

static PyObject *release(PyObject *Py_UNUSED(module), PyObject *address)
{
    void *begin = PyLong_AsVoidPtr(address);
    if (begin)
        bb_faults_release((uintptr_t)begin);
    PyErr_Clear();
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"protect", protect, METH_O,
     "Keep a mapped file that is cut off from ending the process; return what `release` takes."},
    {"release", release, METH_O, "Undo `protect`, before the file is unmapped."},
    {NULL, NULL, 0, NULL},
};

static PyObject *Writer_close(WriterObject *self, PyObject *Py_UNUSED(unused))
{
    stop_heartbeat(self);
    BB_BEGIN(self)
    self->slots = NULL;
    self->live = NULL;
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    BB_END()
    Py_RETURN_NONE;
}

/* ---- the type ---- */

static bool lies_inside(const WriterObject *self, uint64_t offset, uint64_t count, uint64_t size)
{
    uint64_t room = (uint64_t)self->memory.len;
    return offset % 64 == 0 && offset > BB_LIVE_OFFSET && offset <= room &&
           count <= (room - offset) / size;
}

static int Writer_init(WriterObject *self, PyObject *args, PyObject *keywords)
{
    static char *const known[] = {
        "memory", "operations_offset", "num_operations", "kept_offset", "num_kept",
        "recent_offset", "add_signature", "is_user_code", "add_site", "find_site", "now", NULL,
    };
    unsigned long long slots, num_slots, kept, num_kept, recent;
    PyObject *memory, *calls[5] = {NULL};
    if (self->memory.obj) {
        PyErr_SetString(PyExc_ValueError, "a Writer is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OKKKKKOOOOO", (char **)known, &memory,
                                     &slots, &num_slots, &kept, &num_kept, &recent, &calls[0],
                                     &calls[1], &calls[2], &calls[3], &calls[4]))
        return -1;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0)
        return -1;
    if (num_slots == 0 || !lies_inside(self, slots, num_slots, sizeof(struct bb_slot)) ||
        !lies_inside(self, kept, num_kept, sizeof(struct bb_kept)) ||
        !lies_inside(self, recent, 1, BB_RECENT_UNITS_ROUND * 16)) {
        PyErr_SetString(PyExc_ValueError, "a part of the ring lies outside the memory");
        PyBuffer_Release(&self->memory);
        return -1;
    }
    char *begin = self->memory.buf;
    self->live = (void *)(begin + BB_LIVE_OFFSET);
    self->kept = (void *)(begin + kept);
    self->recent = (void *)(begin + recent);
    self->num_slots = num_slots;
    self->num_kept_places = num_kept;
    self->generation = ++num_writers;
    self->add_signature = Py_NewRef(calls[0]);
    self->site_calls.is_user_code = Py_NewRef(calls[1]);
    self->site_calls.add_site = Py_NewRef(calls[2]);
    self->site_calls.find_site = Py_NewRef(calls[3]);
    self->now = calls[4] == Py_None ? NULL : Py_NewRef(calls[4]);
    self->slots = (void *)(begin + slots);
    return 0;
}

static int Writer_traverse(WriterObject *self, visitproc visit, void *arg)
{
    Py_VISIT(self->memory.obj);
    Py_VISIT(self->sites.alive);
    Py_VISIT(self->add_signature);
    Py_VISIT(self->site_calls.is_user_code);
    Py_VISIT(self->site_calls.add_site);
    Py_VISIT(self->site_calls.find_site);
    Py_VISIT(self->now);
    Py_VISIT(self->keep_pause);
    return 0;
}

static int Writer_clear(WriterObject *self)
{
    stop_heartbeat(self);
    self->slots = NULL;
    self->live = NULL;
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    bb_signatures_clear(&self->signatures);
    bb_sites_clear(&self->sites);
    Py_CLEAR(self->add_signature);
    Py_CLEAR(self->site_calls.is_user_code);
    Py_CLEAR(self->site_calls.add_site);
    Py_CLEAR(self->site_calls.find_site);
    Py_CLEAR(self->now);
    Py_CLEAR(self->keep_pause);
    return 0;
}

static void Writer_dealloc(WriterObject *self)
{
    PyObject_GC_UnTrack(self);
    Writer_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef Writer_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))Writer_begin, METH_FASTCALL | METH_KEYWORDS,
     "Record that an operation was called; return its number."},
    {"started", (PyCFunction)(void (*)(void))Writer_started, METH_FASTCALL,
     "Record that the backend started the operation, now or at a time already past."},
    {"completed", (PyCFunction)(void (*)(void))Writer_completed, METH_FASTCALL,
     "Record that the operation is done on this rank."},
    {"failed", (PyCFunction)(void (*)(void))Writer_failed, METH_FASTCALL,
     "Record that the operation ended in an error."},
    {"on_collection", (PyCFunction)(void (*)(void))Writer_on_collection, METH_FASTCALL,
     "Count a pause of the garbage collector; for gc.callbacks."},
    {"keep_pauses", (PyCFunction)Writer_keep_pauses, METH_VARARGS,
     "Have `keep(began, ended, info)` called for pauses from a length on."},
    {"start_heartbeat", (PyCFunction)Writer_start_heartbeat, METH_O,
     "Start a thread that stamps a live word every so many nanoseconds."},
    {"stop_heartbeat", (PyCFunction)Writer_stop_heartbeat, METH_NOARGS, "Stop that thread."},
    {"write_faults", (PyCFunction)Writer_write_faults, METH_O,
     "Write the signal that ends this process into the ring."},
    {"close", (PyCFunction)Writer_close, METH_NOARGS, "Release the memory; record no more."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Writer_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "echelon.recorder._native.Writer",
    .tp_doc = "Writes operations into a ring.",
    .tp_basicsize = sizeof(WriterObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Writer_init,
    .tp_dealloc = (destructor)Writer_dealloc,
    .tp_traverse = (traverseproc)Writer_traverse,
    .tp_clear = (inquiry)Writer_clear,
    .tp_methods = Writer_methods,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "echelon.recorder._native",
    .m_doc = "Operations into a ring, without the interpreter.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void)
{
    bb_crc32_prepare();
    for (int i = 0; i < NUM_ARGUMENTS; i++)
        if (!names[i] && !(names[i] = PyUnicode_InternFromString(NAMES[i])))
            return NULL;
    if ((!no_text && !(no_text = PyUnicode_InternFromString(""))) ||
        (!no_tuple && !(no_tuple = PyTuple_New(0))) || PyType_Ready(&Writer_Type) < 0)
        return NULL;
    PyObject *self = PyModule_Create(&module);
    if (!self)
        return NULL;
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
    if (PyModule_AddObject(self, "Writer", Py_NewRef(&Writer_Type)) < 0) {
        Py_DECREF(&Writer_Type);
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
