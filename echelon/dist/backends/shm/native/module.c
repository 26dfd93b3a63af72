/* Python's view of the engine: `Engine`, one per group, and `Ticket`, one per asynchronous operation.
 *
 * The interpreter lock is released around everything that may wait. native.py is the only caller and
 * checks its arguments; anything that would corrupt memory is checked here again.
 *
 * [Note: calls inside] Python's signal handlers run inside a waiting call and may do anything: call
 * the engine, end the group, close it. So nothing here waits for the calling thread's own calls: the
 * last call to return frees what a close() from inside left open. A forked child owns nothing of its
 * parent's engine (no thread, perhaps a lock that is held for good): there, only references are
 * dropped.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

/* A call that is on its way, on its thread's stack. */
struct inside {
    pthread_t thread;
    struct inside *next;
};

typedef struct {
    PyObject_HEAD
    struct ec_engine engine;
    Py_buffer memory;
    pid_t pid; /* of the process that made it */
    bool open; /* calls are taken */
    bool held; /* the engine's memory and thread are still there */
    struct inside *inside; /* under the interpreter lock */
} EngineObject;

typedef struct {
    PyObject_HEAD
    EngineObject *owner;
    struct ec_op op;
    Py_buffer source, target;
    uint64_t *splits;
} TicketObject;

static PyTypeObject Engine_Type, Ticket_Type;

static pid_t this_process; /* getpid() without the system call */

static void note_process(void)
{
    this_process = getpid();
}

static bool is_forked(const EngineObject *self)
{
    return self->pid != this_process;
}

/* ---- operations ---- */

struct arguments {
    int kind, reduce_op, root, tag;
    long long dtype; /* of a message: any number that is equal at both ends */
    unsigned long long sequence;
    PyObject *source, *target, *splits, *call;
    double timeout_s;
    bool is_shared;
};

static int parse(PyObject *const *args, Py_ssize_t num, struct arguments *parsed)
{
    if (num != 11 && num != 12) {
        PyErr_Format(PyExc_TypeError, "expected 11 or 12 arguments, got %zd", num);
        return -1;
    }
    parsed->kind = (int)PyLong_AsLong(args[0]);
    parsed->sequence = PyLong_AsUnsignedLongLongMask(args[1]);
    parsed->dtype = PyLong_AsLongLong(args[2]);
    parsed->reduce_op = (int)PyLong_AsLong(args[3]);
    parsed->root = (int)PyLong_AsLong(args[4]);
    parsed->tag = (int)PyLong_AsLong(args[5]);
    parsed->source = args[6];
    parsed->target = args[7];
    parsed->splits = args[8];
    parsed->call = args[9];
    parsed->timeout_s = PyFloat_AsDouble(args[10]);
    parsed->is_shared = num == 12 && args[11] == Py_True;
    return PyErr_Occurred() ? -1 : 0;
}

static int check(const EngineObject *self, const struct arguments *a)
{
    bool is_message = a->kind == EC_SEND || a->kind == EC_RECV;
    bool fine = a->kind >= 0 && a->kind < EC_NUM_KINDS && a->dtype >= 0 &&
                a->dtype < (is_message ? UINT32_MAX : EC_NUM_DTYPES) && a->reduce_op >= 0 &&
                a->reduce_op < EC_NUM_REDUCE_OPS && a->root < self->engine.size &&
                (a->root >= 0 || (a->kind == EC_RECV && a->root == EC_ANY));
    if (!fine)
        PyErr_SetString(PyExc_ValueError, "kind, dtype, reduce op or root out of range");
    return fine ? 0 : -1;
}

/* Whether calls may be made: it is open, and in the process that made it. */
static int check_open(const EngineObject *self)
{
    if (self->open && !is_forked(self))
        return 0;
    PyErr_SetString(PyExc_ValueError, self->open ? "the engine belongs to the parent process"
                                                 : "the engine is closed");
    return -1;
}

/* In place, one view serves both. */
static int take_buffers(const struct arguments *a, Py_buffer *source, Py_buffer *target)
{
    if (a->target != Py_None && PyObject_GetBuffer(a->target, target, PyBUF_WRITABLE) < 0)
        return -1;
    if (a->source != Py_None && a->source == a->target) {
        source->buf = target->buf;
        source->len = target->len;
    } else if (a->source != Py_None && PyObject_GetBuffer(a->source, source, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(target);
        return -1;
    }
    return 0;
}

static bool has_splits(const struct arguments *a)
{
    return a->kind == EC_ALL_TO_ALL ||
           ((a->kind == EC_ALL_GATHER || a->kind == EC_REDUCE_SCATTER) && a->splits != Py_None);
}

/* Whether splits fit the arrays: an all_to_all's halves add up to them; of the others, the whole
 * is in parts and this rank's array is its part. */
static bool do_splits_fit(const EngineObject *self, const struct arguments *a,
                          const uint64_t *splits, uint64_t source, uint64_t target)
{
    size_t size = (size_t)self->engine.size;
    uint64_t sums[2] = {0, 0}, mine = splits[self->engine.rank];
    for (size_t i = 0; i < (a->kind == EC_ALL_TO_ALL ? 2 : 1) * size; i++)
        sums[i / size] += splits[i];
    if (a->kind == EC_ALL_TO_ALL)
        return sums[0] == source && sums[1] == target;
    return a->kind == EC_ALL_GATHER ? sums[0] == target && mine == source
                                    : sums[0] == source && mine == target;
}

/* Copy the splits, numbers of bytes: 2 * size for an all_to_all, else size. */
static uint64_t *take_splits(const EngineObject *self, const struct arguments *a,
                             const Py_buffer *source, const Py_buffer *target)
{
    size_t count = (size_t)self->engine.size * (a->kind == EC_ALL_TO_ALL ? 2 : 1);
    size_t num_bytes = count * sizeof(uint64_t);
    if (!PyBytes_Check(a->splits) || (size_t)PyBytes_GET_SIZE(a->splits) != num_bytes) {
        PyErr_SetString(PyExc_ValueError, "splits are missing, or too few or many");
        return NULL;
    }
    uint64_t *splits = PyMem_Malloc(num_bytes);
    if (!splits) {
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(splits, PyBytes_AS_STRING(a->splits), num_bytes);
    if (!do_splits_fit(self, a, splits, (uint64_t)source->len, (uint64_t)target->len)) {
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
    if (has_splits(a))
        return 0; /* they were held against the sizes */
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

/* Fill in an operation; `drop` releases what it took. */
static int prepare(EngineObject *self, PyObject *const *args, Py_ssize_t num, struct ec_op *op,
                   Py_buffer *source, Py_buffer *target, uint64_t **splits)
{
    struct arguments a;
    if (check_open(self) < 0 || parse(args, num, &a) < 0 || check(self, &a) < 0 ||
        take_buffers(&a, source, target) < 0)
        return -1;
    *splits = NULL;
    if (check_sizes(self, &a, (size_t)source->len, (size_t)target->len) < 0 ||
        (has_splits(&a) && !(*splits = take_splits(self, &a, source, target)))) {
        PyBuffer_Release(source);
        PyBuffer_Release(target);
        return -1;
    }
    memset(op, 0, sizeof *op);
    op->kind = (enum ec_kind)a.kind;
    if (a.kind == EC_SEND || a.kind == EC_RECV)
        op->type_id = (uint32_t)a.dtype;
    else
        op->dtype = (enum ec_dtype)a.dtype;
    op->reduce_op = (enum ec_reduce_op)a.reduce_op;
    op->root = a.root;
    op->tag = a.tag;
    op->is_shared = a.is_shared;
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

/* Run Python's signal handlers while a caller waits; non-zero if one raised. In a child that a
 * handler forked, the call ends: what it waits for is its parent's. */
static int check_signals(void *argument)
{
    PyThreadState **state = argument;
    pid_t process = this_process;
    PyEval_RestoreThread(*state);
    int said = PyErr_CheckSignals();
    if (process != this_process) {
        said = EC_FORKED;
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError,
                            "a forked child cannot continue an operation of its parent");
    }
    *state = PyEval_SaveThread();
    return said;
}

static void free_engine(EngineObject *self)
{
    if (!self->held)
        return;
    self->held = false;
    if (!is_forked(self)) {
        Py_BEGIN_ALLOW_THREADS
        ec_close(&self->engine);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&self->memory);
}

static void enter(EngineObject *self, struct inside *call)
{
    *call = (struct inside){pthread_self(), self->inside};
    self->inside = call;
}

static void leave(EngineObject *self, const struct inside *call)
{
    struct inside **here = &self->inside;
    while (*here != call)
        here = &(*here)->next;
    *here = call->next;
    if (!self->open && !self->inside)
        free_engine(self);
}

/* Wait for an operation, with `is_new` after submitting it; non-zero: an exception is set. */
static int wait_for(EngineObject *self, struct ec_op *op, int64_t until, bool is_new)
{
    struct inside call;
    enter(self, &call);
    PyThreadState *state = PyEval_SaveThread();
    int said = is_new ? ec_run(&self->engine, op, check_signals, &state)
                      : ec_wait(&self->engine, op, until, check_signals, &state);
    if (said && said != EC_FORKED)
        ec_abort(&self->engine); /* the operation may lie on this thread's stack */
    PyEval_RestoreThread(state);
    leave(self, &call);
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
    return Py_BuildValue("(iNiKO)", (int)blame->fault, ranks, (int)blame->kind,
                         (unsigned long long)blame->sequence,
                         blame->is_adopted ? Py_True : Py_False);
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
        EngineObject *owner = self->owner;
        bool is_closing = !owner->open && owner->held && !is_forked(owner); /* it ends all operations */
        if ((!is_closing && check_open(owner) < 0) || wait_for(owner, &self->op, deadline(timeout_s), false))
            return NULL;
    }
    return PyBool_FromLong(atomic_load(&self->op.state) != EC_PENDING);
}

static PyObject *Ticket_withdraw(TicketObject *self, PyObject *unused)
{
    (void)unused;
    bool is_pending = atomic_load(&self->op.state) == EC_PENDING && !is_forked(self->owner);
    return PyBool_FromLong(is_pending && ec_withdraw(&self->owner->engine, &self->op));
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

static PyObject *Ticket_get_source(TicketObject *self, void *closure)
{
    (void)closure;
    bool done = self->op.kind == EC_RECV && atomic_load(&self->op.state) == EC_DONE;
    return PyLong_FromLong(done ? self->op.sender : -1);
}

static PyObject *Ticket_get_fault(TicketObject *self, void *closure)
{
    (void)closure;
    return outcome(self->owner, &self->op);
}

/* Memory that an operation still writes to is leaked rather than freed under it. The group keeps the
 * handle of every pending operation, and closing an engine ends what is pending, so this happens
 * only in a forked child. */
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
    {"withdraw", (PyCFunction)Ticket_withdraw, METH_NOARGS,
     "Take back a receive from any rank; False if it has got a message, or has ended."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Ticket_getset[] = {
    {"done", (getter)Ticket_get_done, NULL, "Whether it has ended.", NULL},
    {"ended_mono_ns", (getter)Ticket_get_ended, NULL, "When it ended.", NULL},
    {"source", (getter)Ticket_get_source, NULL, "The sender of what a receive took; else -1.",
     NULL},
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
    if (self->held) {
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
    self->pid = this_process;
    self->open = self->held = true;
    return 0;
}

static PyObject *Engine_run(EngineObject *self, PyObject *const *args, Py_ssize_t num)
{
    struct ec_op op;
    Py_buffer source = {0}, target = {0};
    uint64_t *splits = NULL;
    if (prepare(self, args, num, &op, &source, &target, &splits) < 0)
        return NULL;
    int said = wait_for(self, &op, INT64_MAX, true);
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
    if (!self->held || self->engine.num_begun == 0)
        return PyList_New(0);
    int turn = (int)((self->engine.num_begun - 1) & 1);
    PyObject *list = PyList_New(self->engine.size);
    for (int rank = 0; list && rank < self->engine.size; rank++) {
        const struct ec_call *call = &self->engine.controls[rank].calls[turn];
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)call, sizeof *call);
        if (!bytes)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, rank, bytes);
    }
    return list;
}

static PyObject *Engine_statistics(EngineObject *self, PyObject *unused)
{
    (void)unused;
    const struct ec_statistics *counts = &self->engine.statistics;
    return Py_BuildValue("{sKsKsKsK}", "sleeps", (unsigned long long)counts->num_sleeps, "spins",
                         (unsigned long long)counts->num_spins, "lost_wakes",
                         (unsigned long long)counts->num_lost_wakes, "stashed",
                         (unsigned long long)counts->num_stashed);
}

static PyObject *Engine_abort(EngineObject *self, PyObject *unused)
{
    struct inside call;
    (void)unused;
    if (self->open && !is_forked(self)) {
        enter(self, &call);
        Py_BEGIN_ALLOW_THREADS
        ec_abort(&self->engine);
        Py_END_ALLOW_THREADS
        leave(self, &call);
    }
    Py_RETURN_NONE;
}

static bool others_inside(const EngineObject *self)
{
    for (const struct inside *call = self->inside; call; call = call->next)
        if (!pthread_equal(call->thread, pthread_self()))
            return true;
    return false;
}

enum { EC_CLOSE_TURNS = 5000 }; /* of 0.2 ms: how long close() waits for other threads' calls */

static void close_engine(EngineObject *self)
{
    struct timespec moment = {0, 200000};
    struct inside call;
    if (!self->open)
        return;
    self->open = false; /* no new calls */
    if (is_forked(self)) {
        free_engine(self);
        return;
    }
    enter(self, &call);
    Py_BEGIN_ALLOW_THREADS
    ec_leave(&self->engine);
    Py_END_ALLOW_THREADS
    for (int turn = 0; turn < EC_CLOSE_TURNS && others_inside(self); turn++) {
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&moment, NULL);
        Py_END_ALLOW_THREADS
    }
    leave(self, &call); /* frees the engine, or a call that is still inside does */
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
    {"calls", (PyCFunction)Engine_calls, METH_NOARGS, "Number and call of what each rank called last."},
    {"statistics", (PyCFunction)Engine_statistics, METH_NOARGS,
     "Counts of waits; lost_wakes must be 0."},
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

static PyObject *lost_wakes(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromUnsignedLongLong(atomic_load(&ec_num_lost_wakes));
}

static PyMethodDef functions[] = {
    {"lost_wakes", lost_wakes, METH_NOARGS, "Wakes that this process's engines lost: always 0."},
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
    note_process();
    pthread_atfork(NULL, NULL, note_process);
    Py_INCREF(&Engine_Type);
    if (PyModule_AddObject(module, "Engine", (PyObject *)&Engine_Type) < 0 ||
        PyModule_AddIntConstant(module, "MAX_RANKS", EC_MAX_RANKS) < 0 ||
        PyModule_AddIntConstant(module, "ANY", EC_ANY) < 0 ||
        PyModule_AddIntConstant(module, "CALL_BYTES", EC_CALL_BYTES) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
