/* `Executor`: the commands of `commands.c` as an object that Python calls. */
#include "executor.h"

/* executor(data, position, is_ours) -> (where it stopped, the replies) */
static PyObject *Executor_call(
    PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names)
{
    ExecutorObject *self = (ExecutorObject *)object;
    if (PyVectorcall_NARGS(flags) != 3 || names || !PyBytes_CheckExact(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "executor(data: bytes, position: int, is_ours: bool)");
        return NULL;
    }
    Py_ssize_t position = PyLong_AsSsize_t(arguments[1]);
    if (position == -1 && PyErr_Occurred())
        return NULL;
    Py_ssize_t size = PyBytes_GET_SIZE(arguments[0]);
    if (position < 0 || position > size) {
        PyErr_Format(PyExc_ValueError, "position %zd of %zd bytes", position, size);
        return NULL;
    }
    Py_ssize_t end = st_execute(self, arguments[0], position, arguments[2] == Py_True);
    return end < 0 ? NULL : Py_BuildValue("(ny#)", end, (char *)self->reply, self->size);
}

static int Executor_init(ExecutorObject *self, PyObject *positional, PyObject *named)
{
    static char *names[] = {
        "values", "queues", "waiting", "present_by", "watched", "key_bytes", "value_bytes",
        "num_keys", NULL,
    };
    PyObject *values, *queues, *waiting, *present_by, *watched;
    if (self->values) {
        PyErr_SetString(PyExc_TypeError, "an Executor is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(
            positional, named, "O!O!O!O!O!nnn", names, &PyDict_Type, &values, &PyDict_Type,
            &queues, &PyDict_Type, &waiting, &PyDict_Type, &present_by, &PySet_Type, &watched,
            &self->key_bytes, &self->value_bytes, &self->num_keys))
        return -1;
    self->values = Py_NewRef(values);
    self->queues = Py_NewRef(queues);
    self->waiting = Py_NewRef(waiting);
    self->present_by = Py_NewRef(present_by);
    self->watched = Py_NewRef(watched);
    return 0;
}

static PyObject *Executor_new(PyTypeObject *type, PyObject *positional, PyObject *named)
{
    PyObject *self = PyType_GenericNew(type, positional, named);
    if (self)
        ((ExecutorObject *)self)->call = Executor_call;
    return self;
}

static int Executor_traverse(ExecutorObject *self, visitproc visit, void *arg)
{
    Py_VISIT(self->values);
    Py_VISIT(self->queues);
    Py_VISIT(self->waiting);
    Py_VISIT(self->present_by);
    Py_VISIT(self->watched);
    return 0;
}

static void Executor_dealloc(ExecutorObject *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->values);
    Py_XDECREF(self->queues);
    Py_XDECREF(self->waiting);
    Py_XDECREF(self->present_by);
    Py_XDECREF(self->watched);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject st_executor_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "echelon.store.server._native.Executor",
    .tp_doc = "Executes plain commands on the dictionaries of a store's state.",
    .tp_basicsize = sizeof(ExecutorObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = Executor_new,
    .tp_init = (initproc)Executor_init,
    .tp_dealloc = (destructor)Executor_dealloc,
    .tp_traverse = (traverseproc)Executor_traverse,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(ExecutorObject, call),
};
