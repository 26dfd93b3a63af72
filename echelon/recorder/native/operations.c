/* The methods that record operations. None raises: what cannot be recorded is not. */
#include "writer.h"

static PyObject *no_text, *no_tuple;

bool bb_operations_prepare(void)
{
    return (no_text || (no_text = PyUnicode_InternFromString(""))) &&
           (no_tuple || (no_tuple = PyTuple_New(0)));
}

static PyObject *or_else(PyObject *value, PyObject *otherwise)
{
    return value ? value : otherwise;
}

static int64_t begin(WriterObject *self, PyObject *const *args, PyObject **values)
{
    struct bb_fixed fixed;
    int64_t depth = 1;
    fixed.created_mono_ns = bb_clock_ns(self);
    if (bb_read_fixed(args[0], values, &fixed) < 0 || bb_read_i64(values[DEPTH], &depth) < 0)
        return -1;
    struct bb_call call = {
        args[1],
        or_else(values[DTYPE], no_text),
        or_else(values[REDUCE_OP], no_text),
        or_else(values[SHAPES], no_tuple),
        or_else(values[INPUT_SPLITS], no_tuple),
        or_else(values[OUTPUT_SPLITS], no_tuple),
    };
    bool is_started = values[IS_STARTED] && PyObject_IsTrue(values[IS_STARTED]) == 1;
    if (bb_is_closed(self)) /* by Python code that reading the arguments ran */
        return -1;
    uint64_t part = bb_load(&self->ring.live[BB_RECENT_UNITS]) / BB_RECENT_PART_UNITS;
    fixed.signature = bb_signature_find(&self->signatures, &call, part, self->add_signature);
    if (!fixed.signature && PyErr_Occurred())
        return -1;
    bb_site_find(&self->sites, &self->site_calls, (long)depth, &fixed.site, &fixed.stack);
    if (bb_is_closed(self))
        return -1;
    fixed.step = (int64_t)bb_load(&self->ring.live[BB_STEP]) - 1;
    fixed.thread = bb_thread_id(self);
    return bb_operation_begin(&self->ring, &fixed, is_started);
}

PyObject *bb_begin(WriterObject *self, PyObject *const *args, Py_ssize_t num, PyObject *keywords)
{
    int64_t record = -1;
    PyObject *values[NUM_ARGUMENTS] = {NULL};
    if (num != 2 || (keywords && bb_sort_keywords(keywords, args + num, values) < 0)) {
        PyErr_SetString(PyExc_TypeError, "begin(group, operation, *, ...): unexpected arguments");
        return NULL; /* our own mistake, met by the first test */
    }
    BB_BEGIN(self)
    if (!bb_is_closed(self))
        record = begin(self, args, values);
    BB_END()
    PyErr_Clear();
    return PyLong_FromLongLong(record);
}

/* Read `record, at_mono_ns=None`; a stamp that is not one counts as now. */
static int64_t read_record(PyObject *const *args, Py_ssize_t num, int64_t *at)
{
    int64_t record = -1, stamp = 0;
    if (num == 2 && args[1] != Py_None && bb_read_i64(args[1], &stamp) == 0 && stamp != 0)
        *at = stamp;
    PyErr_Clear();
    return bb_read_i64(args[0], &record) < 0 ? -1 : record;
}

PyObject *bb_started(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    int64_t began = bb_clock_ns(self);
    if (num < 1 || num > 2)
        return PyErr_Format(PyExc_TypeError, "started(record, at_mono_ns=None)");
    int64_t record = read_record(args, num, &began);
    BB_BEGIN(self)
    if (!bb_is_closed(self))
        bb_operation_started(&self->ring, record, began);
    BB_END()
    PyErr_Clear();
    Py_RETURN_NONE;
}

PyObject *bb_completed(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    int64_t now = bb_clock_ns(self), ended = now;
    if (num < 1 || num > 2)
        return PyErr_Format(PyExc_TypeError, "completed(record, at_mono_ns=None)");
    int64_t record = read_record(args, num, &ended);
    BB_BEGIN(self)
    if (!bb_is_closed(self)) {
        bb_operation_ended(&self->ring, record, ended, 0, BB_COMPLETED);
        bb_store(&self->ring.live[BB_PROGRESS], (uint64_t)now);
    }
    BB_END()
    PyErr_Clear();
    Py_RETURN_NONE;
}

PyObject *bb_failed(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    int64_t now = bb_clock_ns(self);
    uint32_t error = 0;
    if (num != 2)
        return PyErr_Format(PyExc_TypeError, "failed(record, error)");
    int64_t unused = 0, record = read_record(args, 1, &unused);
    bool is_read = bb_read_u32(args[1], &error) == 0;
    BB_BEGIN(self)
    if (!bb_is_closed(self) && is_read) {
        bb_operation_ended(&self->ring, record, now, error, BB_FAILED);
        bb_store(&self->ring.live[BB_PROGRESS], (uint64_t)now);
    }
    BB_END()
    PyErr_Clear();
    Py_RETURN_NONE;
}
