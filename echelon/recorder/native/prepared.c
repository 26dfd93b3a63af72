/* Calls that a group makes again and again: read once, recorded by one short call each time. */
#include "writer.h"

typedef struct {
    PyObject_HEAD
    uint64_t generation;                 /* of its writer */
    struct bb_fixed fixed;               /* what is the same each time */
    PyObject *operation, *dtype, *reduce_op, *shapes;
    uint64_t part;                       /* of `recent`, in which the signature was found; plus 1 */
} PreparedObject;

static PyObject *no_tuple;

/* Find the signature again once `recent` has moved on: its entry may be overwritten. */
static int find_signature(WriterObject *self, PreparedObject *call)
{
    uint64_t part = bb_load(&self->ring.live[BB_RECENT_UNITS]) / BB_RECENT_PART_UNITS;
    if (call->part == part + 1)
        return 0;
    struct bb_call asked = {
        call->operation, call->dtype, call->reduce_op, call->shapes, no_tuple, no_tuple,
    };
    uint32_t found = bb_signature_find(&self->signatures, &asked, part, self->add_signature);
    if (!found && PyErr_Occurred())
        return -1;
    call->fixed.signature = found;
    call->part = found ? part + 1 : 0;
    return 0;
}

static bool read_call(PyObject *const *args, PreparedObject *call)
{
    PyObject *values[NUM_ARGUMENTS] = {NULL};
    values[NUM_BYTES] = args[4];
    values[ROOT] = args[6];
    values[TIMEOUT_S] = args[7];
    call->operation = Py_NewRef(args[1]);
    call->dtype = Py_NewRef(args[2]);
    call->shapes = Py_NewRef(args[3]);
    call->reduce_op = Py_NewRef(args[5]);
    return bb_read_fixed(args[0], values, &call->fixed) == 0;
}

PyObject *bb_prepare(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    if (num != 8)
        return PyErr_Format(PyExc_TypeError, "prepare(group, operation, dtype, shapes, num_bytes, "
                                             "reduce_op, root, timeout_s)");
    PreparedObject *call = PyObject_New(PreparedObject, &bb_prepared_type);
    if (call) {
        call->generation = self->generation;
        call->part = 0;
        if (read_call(args, call))
            return (PyObject *)call;
        Py_DECREF(call);
    }
    PyErr_Clear();
    Py_RETURN_NONE;
}

static int64_t begin(WriterObject *self, PyObject *const *args)
{
    PreparedObject *call = (PreparedObject *)args[0];
    PyObject *values[NUM_ARGUMENTS] = {NULL};
    int64_t depth = 1, now = bb_clock_ns(self);
    struct bb_fixed varying;
    values[SEQUENCE] = args[1];
    values[COALESCED] = args[2];
    values[FLAGS] = args[3];
    if (bb_read_varying(values, &varying) < 0 || bb_read_i64(args[4], &depth) < 0)
        return -1;
    bool is_started = PyObject_IsTrue(args[5]) == 1;
    if (bb_is_closed(self) || find_signature(self, call) < 0) /* a number's Python code closed it */
        return -1;
    struct bb_fixed fixed = call->fixed;
    fixed.created_mono_ns = now;
    fixed.sequence = varying.sequence;
    fixed.coalesced = varying.coalesced;
    fixed.flags = varying.flags;
    bb_site_find(&self->sites, &self->site_calls, (long)depth, &fixed.site, &fixed.stack);
    if (bb_is_closed(self))
        return -1;
    fixed.step = (int64_t)bb_load(&self->ring.live[BB_STEP]) - 1;
    fixed.thread = bb_thread_id(self);
    return bb_operation_begin(&self->ring, &fixed, is_started);
}

PyObject *bb_begin_prepared(WriterObject *self, PyObject *const *args, Py_ssize_t num)
{
    int64_t record = -1;
    if (num != 6)
        return PyErr_Format(PyExc_TypeError, "begin_prepared(call, sequence, coalesced, flags, "
                                             "depth, is_started)");
    BB_BEGIN(self)
    if (!bb_is_closed(self) && Py_IS_TYPE(args[0], &bb_prepared_type) &&
        ((PreparedObject *)args[0])->generation == self->generation)
        record = begin(self, args);
    BB_END()
    PyErr_Clear();
    return PyLong_FromLongLong(record);
}

static void Prepared_dealloc(PreparedObject *self)
{
    Py_DECREF(self->operation);
    Py_DECREF(self->dtype);
    Py_DECREF(self->reduce_op);
    Py_DECREF(self->shapes);
    PyObject_Free(self);
}

bool bb_prepared_prepare(void)
{
    return (no_tuple || (no_tuple = PyTuple_New(0))) && PyType_Ready(&bb_prepared_type) == 0;
}

PyTypeObject bb_prepared_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "echelon.recorder._native.Prepared",
    .tp_doc = "A call that is made again and again; for `begin_prepared`.",
    .tp_basicsize = sizeof(PreparedObject),
    .tp_dealloc = (destructor)Prepared_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
};
