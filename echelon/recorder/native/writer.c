/* `Writer`: records into a ring's memory what operations.py and spans.py would, byte for byte. */
#include "writer.h"

#include <stddef.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

/* ---- the clock, the thread ---- */

int64_t bb_clock_ns(const WriterObject *self)
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

static _Atomic uint64_t num_writers;

/* The native id of this thread. A forked child has its own writer, and so asks again. */
uint32_t bb_thread_id(const WriterObject *self)
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

/* ---- the collector's pauses: pauses.py ---- */

/* Called by the collector: `callback("start" or "stop", info)`. */
static PyObject *Writer_on_collection(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    int64_t now = bb_clock_ns(self);
    if (num != 2 || !PyUnicode_Check(args[0]) || PyUnicode_GET_LENGTH(args[0]) < 3)
        Py_RETURN_NONE;
    if (PyUnicode_READ_CHAR(args[0], 2) == 'a') {
        self->collecting_since = now;
        Py_RETURN_NONE;
    }
    int64_t began = self->collecting_since;
    self->collecting_since = 0;
    if (!began || !self->ring.live)
        Py_RETURN_NONE;
    atomic_fetch_add_explicit(&self->ring.live[BB_NUM_PAUSES], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&self->ring.live[BB_PAUSES_NS], (uint64_t)(now - began),
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
    if (bb_read_i64(period_ns, &period) < 0)
        return NULL;
    bool started = self->ring.live && period > 0 &&
                   bb_heartbeat_start(&self->ring.live[BB_NATIVE_HEARTBEAT], period);
    return PyBool_FromLong(started);
}

static void stop_heartbeat(WriterObject *self)
{
    if (!self->ring.live)
        return;
    _Atomic uint64_t *word = &self->ring.live[BB_NATIVE_HEARTBEAT];
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
    if (self->ring.live)
        bb_faults_write_to((void *)((char *)self->memory.buf + BB_FAULT_OFFSET),
                           PyObject_IsTrue(over_others) == 1);
    Py_RETURN_NONE;
}

static PyObject *Writer_close(WriterObject *self, PyObject *Py_UNUSED(unused))
{
    stop_heartbeat(self);
    BB_BEGIN(self)
    self->ring.slots = NULL;
    self->ring.live = NULL;
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

/* What a writer is made of, as Python passes it. */
struct parts {
    PyObject *memory, *now;
    unsigned long long slots, num_slots, spans, num_spans, open_spans, kept, num_kept, recent;
};

static bool are_inside(const WriterObject *self, const struct parts *parts)
{
    return parts->num_slots != 0 && parts->num_spans != 0 &&
           lies_inside(self, parts->slots, parts->num_slots, sizeof(struct bb_slot)) &&
           lies_inside(self, parts->kept, parts->num_kept, sizeof(struct bb_kept)) &&
           lies_inside(self, parts->spans, parts->num_spans, sizeof(struct bb_span_slot)) &&
           lies_inside(self, parts->open_spans, BB_NUM_OPEN_SPANS, sizeof(struct bb_span_slot)) &&
           lies_inside(self, parts->recent, 1, BB_RECENT_UNITS_ROUND * 16);
}

static void place_ring(WriterObject *self, const struct parts *parts)
{
    char *begin = self->memory.buf;
    self->ring = (struct bb_ring){
        .slots = (void *)(begin + parts->slots),
        .kept = (void *)(begin + parts->kept),
        .spans = (void *)(begin + parts->spans),
        .open_spans = (void *)(begin + parts->open_spans),
        .recent = (void *)(begin + parts->recent),
        .live = (void *)(begin + BB_LIVE_OFFSET),
        .num_slots = parts->num_slots,
        .num_spans = parts->num_spans,
        .num_kept_places = parts->num_kept,
    };
    bb_ring_prepare(&self->ring);
}

/* Read the arguments; the objects are borrowed. */
static bool read_parts(WriterObject *self, PyObject *args, PyObject *keywords, struct parts *parts)
{
    static char *const known[] = {
        "memory", "operations_offset", "num_operations", "spans_offset", "num_spans",
        "open_spans_offset", "kept_offset", "num_kept", "recent_offset", "add_signature",
        "is_user_code", "add_site", "find_site", "names", "recent", "add_name", "add_detail",
        "now", NULL,
    };
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "OKKKKKKKKOOOOO!O!OOO", (char **)known, &parts->memory, &parts->slots,
            &parts->num_slots, &parts->spans, &parts->num_spans, &parts->open_spans, &parts->kept,
            &parts->num_kept, &parts->recent, &self->add_signature, &self->site_calls.is_user_code,
            &self->site_calls.add_site, &self->site_calls.find_site, &PyDict_Type,
            &self->texts.names, &PyDict_Type, &self->texts.recent, &self->texts.add_name,
            &self->texts.add_detail, &parts->now))
        return false;
    return PyObject_GetBuffer(parts->memory, &self->memory, PyBUF_WRITABLE) == 0;
}

/* The objects that a writer owns. */
enum { NUM_OWNED = 8 };

static void list_owned(WriterObject *self, PyObject **owned[NUM_OWNED])
{
    owned[0] = &self->add_signature;
    owned[1] = &self->site_calls.is_user_code;
    owned[2] = &self->site_calls.add_site;
    owned[3] = &self->site_calls.find_site;
    owned[4] = &self->texts.names;
    owned[5] = &self->texts.recent;
    owned[6] = &self->texts.add_name;
    owned[7] = &self->texts.add_detail;
}

static int Writer_init(WriterObject *self, PyObject *args, PyObject *keywords)
{
    struct parts parts;
    PyObject **owned[NUM_OWNED];
    list_owned(self, owned);
    if (self->generation) {
        PyErr_SetString(PyExc_ValueError, "a Writer is made once");
        return -1;
    }
    bool is_read = read_parts(self, args, keywords, &parts);
    if (is_read && !are_inside(self, &parts)) {
        PyErr_SetString(PyExc_ValueError, "a part of the ring lies outside the memory");
        PyBuffer_Release(&self->memory);
        is_read = false;
    }
    for (int i = 0; i < NUM_OWNED; i++)
        *owned[i] = is_read ? Py_NewRef(*owned[i]) : NULL;
    if (!is_read)
        return -1;
    self->now = parts.now == Py_None ? NULL : Py_NewRef(parts.now);
    self->generation = atomic_fetch_add(&num_writers, 1) + 1;
    place_ring(self, &parts);
    return 0;
}

static int Writer_traverse(WriterObject *self, visitproc visit, void *arg)
{
    PyObject **owned[NUM_OWNED];
    list_owned(self, owned);
    for (int i = 0; i < NUM_OWNED; i++)
        Py_VISIT(*owned[i]);
    Py_VISIT(self->memory.obj);
    Py_VISIT(self->sites.alive);
    Py_VISIT(self->now);
    Py_VISIT(self->keep_pause);
    return 0;
}

static int Writer_clear(WriterObject *self)
{
    PyObject **owned[NUM_OWNED];
    list_owned(self, owned);
    stop_heartbeat(self);
    self->ring.slots = NULL;
    self->ring.live = NULL;
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    bb_signatures_clear(&self->signatures);
    bb_sites_clear(&self->sites);
    for (int i = 0; i < NUM_OWNED; i++)
        Py_CLEAR(*owned[i]);
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
    {"begin", (PyCFunction)(void (*)(void))bb_begin, METH_FASTCALL | METH_KEYWORDS,
     "Record that an operation was called; return its number."},
    {"prepare", (PyCFunction)(void (*)(void))bb_prepare, METH_FASTCALL,
     "Read what a call passes each time; return what `begin_prepared` takes, None if it cannot be "
     "recorded."},
    {"begin_prepared", (PyCFunction)(void (*)(void))bb_begin_prepared, METH_FASTCALL,
     "Record that a prepared operation was called; return its number."},
    {"started", (PyCFunction)(void (*)(void))bb_started, METH_FASTCALL,
     "Record that the backend started the operation, now or at a time already past."},
    {"completed", (PyCFunction)(void (*)(void))bb_completed, METH_FASTCALL,
     "Record that the operation is done on this rank."},
    {"failed", (PyCFunction)(void (*)(void))bb_failed, METH_FASTCALL,
     "Record that the operation ended in an error."},
    {"open_span", (PyCFunction)(void (*)(void))bb_open_span, METH_FASTCALL,
     "Record that a phase begins; return what `close_span` takes, None if it cannot be recorded."},
    {"close_span", (PyCFunction)(void (*)(void))bb_close_span, METH_FASTCALL,
     "Record that a phase ended."},
    {"keep_span", (PyCFunction)(void (*)(void))bb_keep_span, METH_FASTCALL,
     "Record a phase that was never open, by the references of its texts."},
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

PyTypeObject bb_writer_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "echelon.recorder._native.Writer",
    .tp_doc = "Writes operations and spans into a ring.",
    .tp_basicsize = sizeof(WriterObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Writer_init,
    .tp_dealloc = (destructor)Writer_dealloc,
    .tp_traverse = (traverseproc)Writer_traverse,
    .tp_clear = (inquiry)Writer_clear,
    .tp_methods = Writer_methods,
};
