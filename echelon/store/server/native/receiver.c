/* `Receiver`: a peer's `data_received` while only plain commands arrive; Python's for the rest. */
#include "executor.h"

#include <structmember.h>
#include <sys/socket.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores SIGPIPE in any case */
#endif

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    ExecutorObject *executor;
    PyObject *promised; /* a dictionary: while it holds anything, Python looks at each command */
    PyObject *receive;  /* the peer's own data_received */
    PyObject *write;    /* the transport's, NULL until there is one */
    PyObject *num_queued; /* the transport's: bytes that it has not handed to the kernel yet */
    int descriptor;     /* the socket's, -1 if replies leave through the transport alone */
    char is_plain;      /* whether the peer is a member between two commands, and reads */
    char is_ours;
    char may_be_queued; /* whether the transport was handed anything since it was seen empty */
} ReceiverObject;

/* Whether nothing lies in the transport's queue: 1, 0, or -1 with an error set. */
static int may_send(ReceiverObject *self)
{
    if (self->descriptor < 0 || !self->num_queued)
        return 0;
    if (!self->may_be_queued)
        return 1;
    PyObject *queued = PyObject_CallNoArgs(self->num_queued);
    if (!queued)
        return -1;
    int is_queued = PyObject_IsTrue(queued);
    Py_DECREF(queued);
    if (is_queued >= 0)
        self->may_be_queued = (char)is_queued;
    return is_queued < 0 ? -1 : !is_queued;
}

/* Hand bytes to the transport. */
static int queue(ReceiverObject *self, const unsigned char *data, Py_ssize_t size)
{
    self->may_be_queued = 1;
    PyObject *rest = PyBytes_FromStringAndSize((const char *)data, size);
    PyObject *written = rest ? PyObject_CallOneArg(self->write, rest) : NULL;
    Py_XDECREF(rest);
    Py_XDECREF(written);
    return written ? 0 : -1;
}

/* Send the replies, past the transport while it has nothing queued: it was the transport that just
 * read from this socket, so it is open. What the kernel does not take, and every error, is left to
 * the transport. */
static int reply(ReceiverObject *self)
{
    const unsigned char *data = self->executor->reply;
    Py_ssize_t size = self->executor->size, sent = 0;
    int may = may_send(self);
    if (may < 0)
        return -1;
    if (may)
        sent = send(self->descriptor, data, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0)
        sent = 0;
    return sent == size ? 0 : queue(self, data + sent, size - sent);
}

/* Execute the start of `data` and send the replies; return where it stopped, -1 with an error. */
static Py_ssize_t receive_plain(ReceiverObject *self, PyObject *data)
{
    Py_ssize_t position = 0, num_replied;
    do {
        position = st_execute(self->executor, data, position, self->is_ours);
        num_replied = self->executor->size;
        if (position < 0 || !num_replied)
            return position;
        if (reply(self) < 0)
            return -1;
    } while (num_replied >= REPLY_BYTES && self->is_plain); /* the write may have filled the peer */
    return position;
}

static PyObject *Receiver_call(
    PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names)
{
    ReceiverObject *self = (ReceiverObject *)object;
    if (PyVectorcall_NARGS(flags) != 1 || names) {
        PyErr_SetString(PyExc_TypeError, "data_received(data: bytes)");
        return NULL;
    }
    PyObject *data = arguments[0];
    if (!self->is_plain || !self->write || PyDict_GET_SIZE(self->promised) ||
        !PyBytes_CheckExact(data))
        return PyObject_CallOneArg(self->receive, data);
    Py_ssize_t position = receive_plain(self, data), size = PyBytes_GET_SIZE(data);
    if (position < 0)
        return NULL;
    if (position == size)
        Py_RETURN_NONE;
    if (!position)
        return PyObject_CallOneArg(self->receive, data);
    PyObject *rest = PyBytes_FromStringAndSize(PyBytes_AS_STRING(data) + position, size - position);
    PyObject *answer = rest ? PyObject_CallOneArg(self->receive, rest) : NULL;
    Py_XDECREF(rest);
    return answer;
}

static int Receiver_init(ReceiverObject *self, PyObject *positional, PyObject *named)
{
    static char *names[] = {"executor", "promised", "receive", NULL};
    PyObject *executor, *promised, *receive;
    if (self->executor) {
        PyErr_SetString(PyExc_TypeError, "a Receiver is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(
            positional, named, "O!O!O", names, &st_executor_type, &executor, &PyDict_Type, &promised,
            &receive))
        return -1;
    self->promised = Py_NewRef(promised);
    self->receive = Py_NewRef(receive);
    self->executor = (ExecutorObject *)Py_NewRef(executor);
    return 0;
}

static PyObject *Receiver_new(PyTypeObject *type, PyObject *positional, PyObject *named)
{
    PyObject *self = PyType_GenericNew(type, positional, named);
    if (self) {
        ((ReceiverObject *)self)->call = Receiver_call;
        ((ReceiverObject *)self)->descriptor = -1;
    }
    return self;
}

static int Receiver_traverse(ReceiverObject *self, visitproc visit, void *arg)
{
    Py_VISIT(self->executor);
    Py_VISIT(self->promised);
    Py_VISIT(self->receive);
    Py_VISIT(self->write);
    Py_VISIT(self->num_queued);
    return 0;
}

static void Receiver_dealloc(ReceiverObject *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->executor);
    Py_XDECREF(self->promised);
    Py_XDECREF(self->receive);
    Py_XDECREF(self->write);
    Py_XDECREF(self->num_queued);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef Receiver_members[] = {
    {"is_plain", T_BOOL, offsetof(ReceiverObject, is_plain), 0,
     "Whether the peer is a member between two commands, and reads."},
    {"is_ours", T_BOOL, offsetof(ReceiverObject, is_ours), 0, "Whether it may send tagged queries."},
    {"may_be_queued", T_BOOL, offsetof(ReceiverObject, may_be_queued), 0,
     "Whether the transport was handed anything since it was seen empty."},
    {"write", T_OBJECT, offsetof(ReceiverObject, write), 0, "The transport's write."},
    {"num_queued", T_OBJECT, offsetof(ReceiverObject, num_queued), 0,
     "The transport's get_write_buffer_size."},
    {"descriptor", T_INT, offsetof(ReceiverObject, descriptor), 0,
     "The socket's, -1 if replies leave through the transport alone."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject st_receiver_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "echelon.store.server._native.Receiver",
    .tp_doc = "A peer's data_received while only plain commands arrive.",
    .tp_basicsize = sizeof(ReceiverObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = Receiver_new,
    .tp_init = (initproc)Receiver_init,
    .tp_dealloc = (destructor)Receiver_dealloc,
    .tp_traverse = (traverseproc)Receiver_traverse,
    .tp_members = Receiver_members,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(ReceiverObject, call),
};
