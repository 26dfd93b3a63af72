/* The methods that record spans, and the object that stands for one that is open. */
#include "writer.h"

typedef struct {
    PyObject_HEAD
    struct bb_span span;
    uint64_t generation; /* of its writer */
} OpenSpanObject;

/* How many spans this thread has open. Few writers live at a time: of a process, mostly one. */
static uint32_t *open_depth(const WriterObject *self)
{
    enum { NUM_WRITERS = 4 };
    static _Thread_local struct {
        uint64_t generation;
        uint32_t depth;
    } known[NUM_WRITERS];
    uint64_t generation = self->generation;
    if (known[generation % NUM_WRITERS].generation != generation) {
        known[generation % NUM_WRITERS].generation = generation;
        known[generation % NUM_WRITERS].depth = 0;
    }
    return &known[generation % NUM_WRITERS].depth;
}

/* Fill in a span that begins; false if it cannot be recorded. */
static bool describe(WriterObject *self, PyObject *const *args, struct bb_span_fixed *fixed)
{
    int64_t depth = 1;
    uint32_t stack;
    fixed->started_mono_ns = bb_clock_ns(self);
    if (bb_name_find(&self->texts, args[0], &fixed->name) < 0 ||
        bb_detail_find(&self->texts, args[1], &fixed->detail) < 0 ||
        bb_read_i64(args[2], &depth) < 0)
        return false;
    bb_site_find(&self->sites, &self->site_calls, (long)depth, &fixed->site, &stack);
    if (bb_is_closed(self))
        return false;
    fixed->step = (int64_t)bb_load(&self->ring.live[BB_STEP]) - 1;
    fixed->thread = bb_thread_id(self);
    return true;
}

static bool open(WriterObject *self, PyObject *const *args, OpenSpanObject *span)
{
    struct bb_span_fixed *fixed = &span->span.fixed;
    if (bb_is_closed(self) || !describe(self, args, fixed))
        return false;
    fixed->depth = (*open_depth(self))++;
    bb_span_open(&self->ring, &span->span);
    return true;
}

PyObject *bb_open_span(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    bool is_open;
    if (num != 3)
        return PyErr_Format(PyExc_TypeError, "open_span(name, detail, depth)");
    OpenSpanObject *span = PyObject_New(OpenSpanObject, &bb_open_span_type);
    if (span) {
        span->generation = self->generation;
        BB_BEGIN(self)
        is_open = open(self, args, span);
        BB_END()
        PyErr_Clear();
        if (is_open)
            return (PyObject *)span;
        Py_DECREF(span);
    }
    PyErr_Clear();
    Py_RETURN_NONE;
}

PyObject *bb_close_span(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    if (num != 1)
        return PyErr_Format(PyExc_TypeError, "close_span(span)");
    OpenSpanObject *span = (OpenSpanObject *)args[0];
    if (!Py_IS_TYPE(args[0], &bb_open_span_type) || span->generation != self->generation)
        Py_RETURN_NONE;
    if (span->span.is_closed)
        Py_RETURN_NONE;
    int64_t now = bb_clock_ns(self);
    BB_BEGIN(self)
    if (!bb_is_closed(self)) {
        if (span->span.fixed.thread == bb_thread_id(self))
            *open_depth(self) = span->span.fixed.depth;
        bb_span_close(&self->ring, &span->span, now);
    }
    BB_END()
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* Called at any point of any thread, also inside this writer: it stores no text. */
PyObject *bb_keep_span(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    struct bb_span_fixed fixed = {0};
    if (num != 4)
        return PyErr_Format(PyExc_TypeError, "keep_span(name, detail, began, ended)");
    bool is_read = bb_read_u32(args[0], &fixed.name) == 0 &&
                   bb_read_u32(args[1], &fixed.detail) == 0 &&
                   bb_read_i64(args[2], &fixed.started_mono_ns) == 0 &&
                   bb_read_i64(args[3], &fixed.ended_mono_ns) == 0;
    BB_BEGIN(self)
    if (is_read && !bb_is_closed(self)) {
        fixed.step = (int64_t)bb_load(&self->ring.live[BB_STEP]) - 1;
        fixed.thread = bb_thread_id(self);
        fixed.depth = *open_depth(self);
        bb_span_keep(&self->ring, &fixed);
    }
    BB_END()
    PyErr_Clear();
    Py_RETURN_NONE;
}

PyTypeObject bb_open_span_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "echelon.recorder._native.OpenSpan",
    .tp_doc = "A span that has begun; for `close_span`.",
    .tp_basicsize = sizeof(OpenSpanObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
};
