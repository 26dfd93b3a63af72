/* Python's view of the engine: `Engine`, one a group, and `Ticket`, one an asynchronous operation.
 *
 * The interpreter lock is given up around everything that may wait. Arguments come checked from
 * native.py, which is the only caller; what would corrupt memory is checked here all the same.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine.h"

#include <string.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    struct ec_engine engine;
    Py_buffer memory;
    bool open;
    int num_inside; /* calls that are on their way; under the interpreter lock */
} EngineObject;

typedef struct {
    PyObject_HEAD
    EngineObject *owner;
    struct ec_op op;
    Py_buffer source, target;
    uint64_t *splits;
} TicketObject;

static PyTypeObject Engine_Type, Ticket_Type;

/* ---- operations ---- */

struct arguments {
    int kind, dtype, reduce_op, root, tag;
    unsigned long long sequence;
    PyObject *source, *target, *splits, *call;
    double timeout_s;
};

static int parse(PyObject *const *args, Py_ssize_t num, struct arguments *parsed)
{
    if (num != 11) {
        PyErr_Format(PyExc_TypeError, "expected 11 arguments, got %zd", num);
        return -1;
    }
    parsed->kind = (int)PyLong_AsLong(args[0]);
    parsed->sequence = PyLong_AsUnsignedLongLongMask(args[1]);
    parsed->dtype = (int)PyLong_AsLong(args[2]);
    parsed->reduce_op = (int)PyLong_AsLong(args[3]);
    parsed->root = (int)PyLong_AsLong(args[4]);
    parsed->tag = (int)PyLong_AsLong(args[5]);
    parsed->source = args[6];
    parsed->target = args[7];
    parsed->splits = args[8];
    parsed->call = args[9];
    parsed->timeout_s = PyFloat_AsDouble(args[10]);
    return PyErr_Occurred() ? -1 : 0;
}

static int check(const EngineObject *self, const struct arguments *a)
{
    bool fine = a->kind >= 0 && a->kind < EC_NUM_KINDS && a->dtype >= 0 &&
                a->dtype < EC_NUM_DTYPES && a->reduce_op >= 0 &&
                a->reduce_op < EC_NUM_REDUCE_OPS && a->root >= 0 && a->root < self->engine.size;
    if (!fine)
        PyErr_SetString(PyExc_ValueError, "kind, dtype, reduce op or root out of range");
    return fine ? 0 : -1;
}

static int take_buffers(const struct arguments *a, Py_buffer *source, Py_buffer *target)
{
    if (a->source != Py_None && PyObject_GetBuffer(a->source, source, PyBUF_SIMPLE) < 0)
        return -1;
    if (a->target != Py_None && PyObject_GetBuffer(a->target, target, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(source);
        return -1;
    }
    return 0;
}

/* Copy the splits: 2 * size numbers of bytes whose halves add up to the arrays' sizes. */
static uint64_t *take_splits(const EngineObject *self, const struct arguments *a,
                             const Py_buffer *source, const Py_buffer *target)
{
    size_t size = (size_t)self->engine.size, num_bytes = 2 * size * sizeof(uint64_t);
    if (!PyBytes_Check(a->splits) || (size_t)PyBytes_GET_SIZE(a->splits) != num_bytes) {
        PyErr_SetString(PyExc_ValueError, "all_to_all needs 2 * size splits");
        return NULL;
    }
    uint64_t *splits = PyMem_Malloc(num_bytes), sums[2] = {0, 0};
    if (!splits) {
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(splits, PyBytes_AS_STRING(a->splits), num_bytes);
    for (size_t i = 0; i < 2 * size; i++)
        sums[i / size] += splits[i];
    if (sums[0] != (uint64_t)source->len || sums[1] != (uint64_t)target->len) {
        PyMem_Free(splits);
        PyErr_SetString(PyExc_ValueError, "splits do not add up to the arrays");
        return NULL;
    }
    return splits;
}

static int check_sizes(const EngineObject *self, const struct arguments *a, size_t source,
                       size_t target)
{
    size_t size = (size_t)self->engine.size;
    bool is_root = a->root == self->engine.rank, fine = true;
    if (a->kind == EC_ALL_REDUCE)
        fine = source == target;
    else if (a->kind == EC_REDUCE)
        fine = !is_root || source == target;
    else if (a->kind == EC_ALL_GATHER)
        fine = target == size * source;
    else if (a->kind == EC_GATHER)
        fine = !is_root || target == size * source;
    else if (a->kind == EC_REDUCE_SCATTER)
        fine = source == size * target;
    else if (a->kind == EC_SCATTER)
        fine = !is_root || source == size * target;
    if (!fine)
        PyErr_SetString(PyExc_ValueError, "the arrays' sizes do not fit the operation");
    return fine ? 0 : -1;
}

static int64_t deadline(double timeout_s)
{
    if (timeout_s < 0 || timeout_s > 1e9)
        return INT64_MAX;
    return ec_now_ns() + (int64_t)(timeout_s * 1e9);
}

/* Fill in an operation; what it took is given back with `drop`. */
static int prepare(EngineObject *self, PyObject *const *args, Py_ssize_t num, struct ec_op *op,
                   Py_buffer *source, Py_buffer *target, uint64_t **splits)
{
    struct arguments a;
    if (!self->open) {
        PyErr_SetString(PyExc_ValueError, "the engine is closed");
        return -1;
    }
    if (parse(args, num, &a) < 0 || check(self, &a) < 0 || take_buffers(&a, source, target) < 0)
        return -1;
    *splits = NULL;
    if (check_sizes(self, &a, (size_t)source->len, (size_t)target->len) < 0 ||
        (a.kind == EC_ALL_TO_ALL && !(*splits = take_splits(self, &a, source, target)))) {
        PyBuffer_Release(source);
        PyBuffer_Release(target);
        return -1;
    }
    memset(op, 0, sizeof *op);
    op->kind = (enum ec_kind)a.kind;
    op->dtype = (enum ec_dtype)a.dtype;
    op->reduce_op = (enum ec_reduce_op)a.reduce_op;
    op->root = a.root;
    op->tag = a.tag;
    op->sequence = a.sequence;
    op->source = source->buf;
    op->source_bytes = (size_t)source->len;
    op->target = target->buf;
    op->target_bytes = (size_t)target->len;
    op->splits = *splits;
    op->call.sequence = a.sequence;
    if (PyBytes_Check(a.call)) {
        size_t length = (size_t)PyBytes_GET_SIZE(a.call);
        memcpy(op->call.bytes, PyBytes_AS_STRING(a.call),
               length < EC_CALL_BYTES ? length : EC_CALL_BYTES);
    }
    op->deadline_ns = deadline(a.timeout_s);
    return 0;
}

static void drop(Py_buffer *source, Py_buffer *target, uint64_t *splits)
{
    PyBuffer_Release(source);
    PyBuffer_Release(target);
    PyMem_Free(splits);
}

/* Run Python's signal handlers while a caller waits; true if one raised. */
static int check_signals(void *argument)
{
    PyThreadState **state = argument;
    PyEval_RestoreThread(*state);
    int said = PyErr_CheckSignals();
    *state = PyEval_SaveThread();
    return said;
}

static int wait_for(EngineObject *self, struct ec_op *op, int64_t until)
{
    self->num_inside++;
    PyThreadState *state = PyEval_SaveThread();
    int said = ec_wait(&self->engine, op, until, check_signals, &state);
    if (said)
        ec_abort(&self->engine); /* the operation may lie on this thread's stack */
    PyEval_RestoreThread(state);
    self->num_inside--;
    return said;
}

static PyObject *blame_tuple(const EngineObject *self, const struct ec_blame *blame)
{
    PyObject *ranks = PyList_New(0);
    if (!ranks)
        return NULL;
    for (int rank = 0; rank < self->engine.size; rank++) {
        if (!ec_is_blamed(blame, rank))
            continue;
        PyObject *number = PyLong_FromLong(rank);
        if (!number || PyList_Append(ranks, number) < 0) {
            Py_XDECREF(number);
            Py_DECREF(ranks);
            return NULL;
        }
        Py_DECREF(number);
    }
    return Py_BuildValue("(iNiK)", (int)blame->fault, ranks, (int)blame->kind,
                         (unsigned long long)blame->sequence);
}

static PyObject *outcome(const EngineObject *self, const struct ec_op *op)
{
    if (atomic_load(&op->state) == EC_FAILED)
        return blame_tuple(self, &op->blame);
    Py_RETURN_NONE;
}

/* ---- Ticket ---- */

static PyObject *Ticket_wait(TicketObject *self, PyObject *argument)
{
    double timeout_s = PyFloat_AsDouble(argument);
    if (PyErr_Occurred())
        return NULL;
    if (atomic_load(&self->op.state) == EC_PENDING) {
        if (!self->owner->open) {
            PyErr_SetString(PyExc_ValueError, "the engine is closed");
            return NULL;
        }
        if (wait_for(self->owner, &self->op, deadline(timeout_s)))
            return NULL;
    }
    return PyBool_FromLong(atomic_load(&self->op.state) != EC_PENDING);
}

static PyObject *Ticket_get_done(TicketObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(atomic_load(&self->op.state) != EC_PENDING);
}

static PyObject *Ticket_get_ended(TicketObject *self, void *closure)
{
    (void)closure;
    bool over = atomic_load(&self->op.state) != EC_PENDING;
    return PyLong_FromLongLong(over ? self->op.ended_ns : 0);
}

static PyObject *Ticket_get_fault(TicketObject *self, void *closure)
{
    (void)closure;
    return outcome(self->owner, &self->op);
}

/* Memory that an operation still writes to is leaked rather than freed under it. native.py keeps
 * every pending ticket, and closing an engine ends what is pending, so this does not happen. */
static void Ticket_dealloc(TicketObject *self)
{
    if (atomic_load(&self->op.state) == EC_PENDING)
        return;
    drop(&self->source, &self->target, self->splits);
    Py_XDECREF(self->owner);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef Ticket_methods[] = {
    {"wait", (PyCFunction)Ticket_wait, METH_O, "Wait at most so many seconds (negative: any)."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Ticket_getset[] = {
    {"done", (getter)Ticket_get_done, NULL, "Whether it has ended.", NULL},
    {"ended_mono_ns", (getter)Ticket_get_ended, NULL, "When it ended.", NULL},
    {"fault", (getter)Ticket_get_fault, NULL, "None, or (fault, [ranks], kind, sequence) of what failed first.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Ticket_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "echelon.dist.backends.shm._native.Ticket",
    .tp_basicsize = sizeof(TicketObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "An asynchronous operation.",
    .tp_dealloc = (destructor)Ticket_dealloc,
    .tp_methods = Ticket_methods,
    .tp_getset = Ticket_getset,
};

/* ---- Engine ---- */

static int take_peers(PyObject *list, int size, struct ec_peer *peers)
{
    for (int rank = 0; rank < size; rank++) {
        PyObject *item = PySequence_GetItem(list, rank);
        unsigned long long ticks = 0;
        int fine = item && PyArg_ParseTuple(item, "iiK", &peers[rank].pid, &peers[rank].pidfd,
                                            &ticks);
        peers[rank].start_ticks = ticks;
        Py_XDECREF(item);
        if (!fine)
            return -1;
    }
    return 0;
}

static int Engine_init(EngineObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory",     "offset", "rank",  "size", "slot_bytes",
                            "ring_bytes", "spins", "peers", NULL};
    PyObject *memory, *list;
    Py_ssize_t offset, slot_bytes, ring_bytes;
    int rank, size, spins;
    struct ec_peer peers[EC_MAX_RANKS];
    if (self->open) {
        PyErr_SetString(PyExc_ValueError, "the engine is open already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OniinnpO", names, &memory, &offset, &rank,
                                     &size, &slot_bytes, &ring_bytes, &spins, &list))
        return -1;
    if (size < 1 || size > EC_MAX_RANKS || rank < 0 || rank >= size || offset < 0 ||
        offset % EC_LINE || slot_bytes < EC_LINE * size || slot_bytes % EC_LINE ||
        slot_bytes < 16 * size || ring_bytes < 2 * EC_LINE || ring_bytes % EC_LINE) {
        PyErr_SetString(PyExc_ValueError, "bad rank, size or layout");
        return -1;
    }
    if (take_peers(list, size, peers) < 0 ||
        PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0)
        return -1;
    size_t needed = ec_segment_bytes(size, (size_t)slot_bytes, (size_t)ring_bytes);
    if ((size_t)self->memory.len < (size_t)offset + needed ||
        ec_open(&self->engine, (char *)self->memory.buf + offset, rank, size, (size_t)slot_bytes,
                (size_t)ring_bytes, spins != 0, peers) < 0) {
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "the memory is too small");
        return -1;
    }
    self->open = true;
    return 0;
}

static PyObject *Engine_run(EngineObject *self, PyObject *const *args, Py_ssize_t num)
{
    struct ec_op op;
    Py_buffer source = {0}, target = {0};
    uint64_t *splits = NULL;
    if (prepare(self, args, num, &op, &source, &target, &splits) < 0)
        return NULL;
    ec_submit(&self->engine, &op, false);
    int said = wait_for(self, &op, INT64_MAX);
    drop(&source, &target, splits);
    return said ? NULL : outcome(self, &op);
}

static PyObject *Engine_start(EngineObject *self, PyObject *const *args, Py_ssize_t num)
{
    TicketObject *ticket = PyObject_New(TicketObject, &Ticket_Type);
    if (!ticket)
        return NULL;
    memset((char *)ticket + sizeof(PyObject), 0, sizeof *ticket - sizeof(PyObject));
    atomic_store(&ticket->op.state, EC_DONE);
    if (prepare(self, args, num, &ticket->op, &ticket->source, &ticket->target,
                &ticket->splits) < 0) {
        ticket->source = ticket->target = (Py_buffer){0};
        atomic_store(&ticket->op.state, EC_DONE);
        Py_DECREF(ticket);
        return NULL;
    }
    Py_INCREF(self);
    ticket->owner = self;
    if (ec_submit(&self->engine, &ticket->op, true) < 0) {
        Py_DECREF(ticket);
        PyErr_SetString(PyExc_RuntimeError, "can't start new thread");
        return NULL;
    }
    return (PyObject *)ticket;
}

static PyObject *Engine_calls(EngineObject *self, PyObject *unused)
{
    (void)unused;
    if (!self->open)
        return PyList_New(0);
    int turn = (int)((self->engine.num_begun - 1) & 1);
    PyObject *list = PyList_New(self->engine.size);
    for (int rank = 0; list && rank < self->engine.size; rank++) {
        const struct ec_call *call = &self->engine.controls[rank].calls[turn];
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)call->bytes, EC_CALL_BYTES);
        if (!bytes)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, rank, bytes);
    }
    return list;
}

static PyObject *Engine_abort(EngineObject *self, PyObject *unused)
{
    (void)unused;
    if (self->open) {
        self->num_inside++;
        Py_BEGIN_ALLOW_THREADS
        ec_abort(&self->engine);
        Py_END_ALLOW_THREADS
        self->num_inside--;
    }
    Py_RETURN_NONE;
}

static void close_engine(EngineObject *self)
{
    struct timespec moment = {0, 200000};
    if (!self->open)
        return;
    self->open = false; /* no new calls */
    bool in_use = self->num_inside > 0;
    Py_BEGIN_ALLOW_THREADS
    if (in_use)
        ec_leave(&self->engine);
    Py_END_ALLOW_THREADS
    while (self->num_inside > 0) {
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&moment, NULL);
        Py_END_ALLOW_THREADS
    }
    Py_BEGIN_ALLOW_THREADS
    ec_close(&self->engine);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&self->memory);
}

static PyObject *Engine_close(EngineObject *self, PyObject *unused)
{
    (void)unused;
    close_engine(self);
    Py_RETURN_NONE;
}

static void Engine_dealloc(EngineObject *self)
{
    close_engine(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef Engine_methods[] = {
    {"run", (PyCFunction)(void (*)(void))Engine_run, METH_FASTCALL,
     "Carry out an operation; None, or its fault."},
    {"start", (PyCFunction)(void (*)(void))Engine_start, METH_FASTCALL,
     "Queue an operation; a Ticket."},
    {"calls", (PyCFunction)Engine_calls, METH_NOARGS, "What each rank called last."},
    {"abort", (PyCFunction)Engine_abort, METH_NOARGS, "End the group on this rank."},
    {"close", (PyCFunction)Engine_close, METH_NOARGS, "Leave the group and free what it holds."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Engine_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "echelon.dist.backends.shm._native.Engine",
    .tp_basicsize = sizeof(EngineObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "One group's engine over memory that its members share.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Engine_init,
    .tp_dealloc = (destructor)Engine_dealloc,
    .tp_methods = Engine_methods,
};

/* ---- the module ---- */

static PyObject *segment_bytes(PyObject *module, PyObject *args)
{
    (void)module;
    int size;
    Py_ssize_t slot_bytes, ring_bytes;
    if (!PyArg_ParseTuple(args, "inn", &size, &slot_bytes, &ring_bytes))
        return NULL;
    return PyLong_FromSize_t(ec_segment_bytes(size, (size_t)slot_bytes, (size_t)ring_bytes));
}

/* reduce(target, parts, dtype, op): the kernels alone, for tests and other backends. */
static PyObject *reduce(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer target = {0}, parts[EC_MAX_RANKS];
    const void *pointers[EC_MAX_RANKS];
    PyObject *out, *list;
    int dtype, op, num = 0;
    bool fine = true;
    if (!PyArg_ParseTuple(args, "OO!ii", &out, &PyList_Type, &list, &dtype, &op))
        return NULL;
    if (dtype < 0 || dtype >= EC_NUM_DTYPES || op < 0 || op >= EC_NUM_REDUCE_OPS ||
        PyList_GET_SIZE(list) < 1 || PyList_GET_SIZE(list) > EC_MAX_RANKS)
        return PyErr_Format(PyExc_ValueError, "dtype, op or number of parts out of range");
    if (PyObject_GetBuffer(out, &target, PyBUF_WRITABLE) < 0)
        return NULL;
    for (; fine && num < PyList_GET_SIZE(list); num += fine) {
        fine = PyObject_GetBuffer(PyList_GET_ITEM(list, num), &parts[num], PyBUF_SIMPLE) == 0;
        if (fine && parts[num].len != target.len) {
            PyErr_SetString(PyExc_ValueError, "parts and target differ in size");
            PyBuffer_Release(&parts[num]);
            fine = false;
        } else if (fine) {
            pointers[num] = parts[num].buf;
        }
    }
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        ec_reduce(target.buf, pointers, num, (size_t)target.len, (enum ec_dtype)dtype,
                  (enum ec_reduce_op)op);
        Py_END_ALLOW_THREADS
    }
    while (num > 0)
        PyBuffer_Release(&parts[--num]);
    PyBuffer_Release(&target);
    if (!fine)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *instructions(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_FromString(ec_instructions());
}

static PyMethodDef functions[] = {
    {"segment_bytes", segment_bytes, METH_VARARGS, "Bytes of (size, slot_bytes, ring_bytes)."},
    {"reduce", reduce, METH_VARARGS, "Reduce parts into a target in rank order."},
    {"instructions", instructions, METH_NOARGS, "The instruction set in use."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The shared-memory engine's C core.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void)
{
    if (PyType_Ready(&Engine_Type) < 0 || PyType_Ready(&Ticket_Type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    Py_INCREF(&Engine_Type);
    if (PyModule_AddObject(module, "Engine", (PyObject *)&Engine_Type) < 0 ||
        PyModule_AddIntConstant(module, "MAX_RANKS", EC_MAX_RANKS) < 0 ||
        PyModule_AddIntConstant(module, "CALL_BYTES", EC_CALL_BYTES) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
