/* `Executor`: the plain commands of a member, executed on the dictionaries of `StoreState`.
 *
 * It takes whole commands from the start of what was received and stops at the first that it does
 * not know, that is cut in two, that breaks a limit, or that concerns anything but plain keys: a
 * waiter, a watch, a lease, a value that is passed on by reference. The parser and the handlers in
 * Python take over from there, byte for byte where this stopped, so nothing is refused here and no
 * rule of theirs is repeated that a peer could slip past. They are the oracle: with or without
 * this file every reply is the same.
 *
 * Runs on the server's loop alone, as the dictionaries do, which is why borrowed references to
 * their values are safe, without the interpreter lock too.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores SIGPIPE in any case */
#endif

/* As in wire/protocol.py. */
enum query {
    SET = 0x01, GET = 0x03, ADD = 0x04, CHECK = 0x05, WAIT = 0x06,
    ACK_SET = 0x81, GET_IF = 0x83, ACK_ADD = 0x84, CHECK_EACH = 0x85, AWAIT = 0x86,
    TAGGED = 0x80, AWAIT_GET = 0xC7,
};
enum status { OK = 0, NOTHING = 3 };

#define REPLY_BYTES (256 << 10)  /* replies gathered in one call, plus the last one */
#define JOINED_BYTES 4096        /* values from here on are passed on by reference */
#define FRAME_BYTES 13
#define NUMBER_BYTES 24          /* of a decimal int64 with its sign */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *values, *queues, *waiting, *present_by; /* dictionaries */
    PyObject *watched;                                /* a set */
    Py_ssize_t key_bytes, value_bytes, num_keys;
    Py_ssize_t size;                                  /* of the reply so far */
    unsigned char reply[REPLY_BYTES + JOINED_BYTES + FRAME_BYTES + 8];
} ExecutorObject;

/* What became of one command. */
enum outcome { DONE, LEFT, FAILED };

/* Unread bytes. */
struct cursor {
    const unsigned char *at, *end;
};

/* Integers travel in little-endian order. */
static uint64_t little_endian(uint64_t number)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap64(number);
#else
    return number;
#endif
}

/* ---- reading ---- */

static bool take_u64(struct cursor *from, uint64_t *number)
{
    if (from->end - from->at < 8)
        return false;
    memcpy(number, from->at, 8);
    *number = little_endian(*number);
    from->at += 8;
    return true;
}

static bool take_u32(struct cursor *from, uint32_t *number)
{
    if (from->end - from->at < 4)
        return false;
    *number = (uint32_t)from->at[0] | (uint32_t)from->at[1] << 8 | (uint32_t)from->at[2] << 16 |
              (uint32_t)from->at[3] << 24;
    from->at += 4;
    return true;
}

/* The bytes of a string, inside what was received; false if it is cut or longer than `limit`. */
static bool take_string(struct cursor *from, Py_ssize_t limit, struct cursor *string)
{
    uint64_t size;
    if (!take_u64(from, &size) || size > (uint64_t)limit)
        return false;
#ifndef ST_WITHOUT_BOUNDS /* tests/native/check.sh shows that it would notice */
    if (size > (uint64_t)(from->end - from->at))
        return false;
#endif
    string->at = from->at;
    string->end = from->at += size;
    return true;
}

/* A list of exactly one key. */
static bool take_only_key(struct cursor *from, Py_ssize_t limit, struct cursor *key)
{
    uint64_t count;
    return take_u64(from, &count) && count == 1 && take_string(from, limit, key);
}

static PyObject *bytes_of(const struct cursor *string)
{
    return PyBytes_FromStringAndSize((const char *)string->at, string->end - string->at);
}

/* ---- replying ---- */

static void put(ExecutorObject *self, const void *data, Py_ssize_t size)
{
    memcpy(self->reply + self->size, data, (size_t)size);
    self->size += size;
}

static void put_u64(ExecutorObject *self, uint64_t number)
{
    number = little_endian(number);
    put(self, &number, 8);
}

static void put_byte(ExecutorObject *self, int byte)
{
    self->reply[self->size++] = (unsigned char)byte;
}

static void put_frame(ExecutorObject *self, enum status status, uint32_t tag, Py_ssize_t size)
{
    put_byte(self, status);
    for (int i = 0; i < 4; i++, tag >>= 8)
        put_byte(self, (int)(tag & 0xFF));
    put_u64(self, (uint64_t)size);
}

/* ---- the commands ---- */

static bool is_joined(PyObject *value)
{
    return PyBytes_CheckExact(value) && PyBytes_GET_SIZE(value) < JOINED_BYTES;
}

/* Whether more than the value changes when this key is set: 1, 0, or -1 with an error set. */
static int has_followers(ExecutorObject *self, PyObject *key)
{
    int found = 0;
    if (PyDict_GET_SIZE(self->waiting))
        found = PyDict_Contains(self->waiting, key);
    if (!found && PySet_GET_SIZE(self->watched))
        found = PySet_Contains(self->watched, key);
    if (!found && PyDict_GET_SIZE(self->present_by))
        found = PyDict_Contains(self->present_by, key);
    return found;
}

static bool has_room(const ExecutorObject *self)
{
    return PyDict_GET_SIZE(self->values) + PyDict_GET_SIZE(self->queues) < self->num_keys;
}

static enum outcome store(ExecutorObject *self, PyObject *key, PyObject *value)
{
    int followed = has_followers(self, key);
    if (followed)
        return followed < 0 ? FAILED : LEFT;
    return PyDict_SetItem(self->values, key, value) < 0 ? FAILED : DONE;
}

static enum outcome set(ExecutorObject *self, struct cursor *from)
{
    struct cursor name, data;
    if (!take_string(from, self->key_bytes, &name) ||
        !take_string(from, self->value_bytes, &data) || !has_room(self))
        return LEFT;
    PyObject *key = bytes_of(&name), *value = key ? bytes_of(&data) : NULL;
    enum outcome outcome = value ? store(self, key, value) : FAILED;
    Py_XDECREF(key);
    Py_XDECREF(value);
    return outcome;
}

/* Find the value of a key, borrowed; DONE with NULL if there is none. */
static enum outcome find(ExecutorObject *self, const struct cursor *name, PyObject **value)
{
    PyObject *key = bytes_of(name);
    if (!key)
        return FAILED;
    *value = PyDict_GetItemWithError(self->values, key);
    Py_DECREF(key);
    return !*value && PyErr_Occurred() ? FAILED : DONE;
}

static enum outcome get(ExecutorObject *self, struct cursor *from)
{
    struct cursor name;
    PyObject *value;
    if (!take_string(from, self->key_bytes, &name))
        return LEFT;
    enum outcome outcome = find(self, &name, &value);
    if (outcome != DONE)
        return outcome;
    if (value && !is_joined(value))
        return LEFT;
    Py_ssize_t size = value ? PyBytes_GET_SIZE(value) : 0;
    put_u64(self, (uint64_t)size);
    if (size)
        put(self, PyBytes_AS_STRING(value), size);
    return DONE;
}

/* Answer with a value; what a key without one means depends on the query. */
static enum outcome get_tagged(ExecutorObject *self, struct cursor *from, bool may_wait)
{
    uint32_t tag;
    struct cursor name;
    PyObject *value;
    if (!take_u32(from, &tag) || !tag || !take_string(from, self->key_bytes, &name))
        return LEFT;
    enum outcome outcome = find(self, &name, &value);
    if (outcome != DONE)
        return outcome;
    if (value ? !is_joined(value) : may_wait)
        return LEFT;
    Py_ssize_t size = value ? PyBytes_GET_SIZE(value) : 0;
    put_frame(self, value ? OK : NOTHING, tag, size);
    if (size)
        put(self, PyBytes_AS_STRING(value), size);
    return DONE;
}

static enum outcome set_tagged(ExecutorObject *self, struct cursor *from)
{
    uint32_t tag;
    if (!take_u32(from, &tag))
        return LEFT;
    enum outcome outcome = set(self, from);
    if (outcome == DONE && tag)
        put_frame(self, OK, tag, 0);
    return outcome;
}

/* The number in a value that is written as this server writes one; false if it is not. */
static bool parse_number(PyObject *value, int64_t *number)
{
    const char *at = PyBytes_AS_STRING(value), *end = at + PyBytes_GET_SIZE(value);
    bool is_negative = at < end && *at == '-';
    at += is_negative;
    if (at == end || end - at > 18) /* of 18 digits every number fits */
        return false;
    int64_t sum = 0;
    for (; at < end; at++) {
        if (*at < '0' || *at > '9')
            return false;
        sum = 10 * sum + (*at - '0');
    }
    *number = is_negative ? -sum : sum;
    return true;
}

/* A number in decimal. By hand: printf's thousands of instructions are not in the processor's cache
 * after each visit of the kernel, and cost more than the rest of an ADD. */
static PyObject *format_number(int64_t number)
{
    char text[NUMBER_BYTES], *const end = text + sizeof text, *at = end;
    uint64_t rest = number < 0 ? -(uint64_t)number : (uint64_t)number;
    do
        *--at = (char)('0' + rest % 10);
    while (rest /= 10);
    if (number < 0)
        *--at = '-';
    return PyBytes_FromStringAndSize(at, end - at);
}

static enum outcome add_to(ExecutorObject *self, PyObject *key, int64_t amount, int64_t *total)
{
    int64_t held = 0;
    PyObject *value = PyDict_GetItemWithError(self->values, key);
    if (!value && PyErr_Occurred())
        return FAILED;
    if (value && (!PyBytes_CheckExact(value) || !parse_number(value, &held)))
        return LEFT;
    if (__builtin_add_overflow(held, amount, total))
        return LEFT;
    PyObject *sum = format_number(*total);
    enum outcome outcome = sum ? store(self, key, sum) : FAILED;
    Py_XDECREF(sum);
    return outcome;
}

static enum outcome add(ExecutorObject *self, struct cursor *from, int64_t *total)
{
    struct cursor name;
    uint64_t amount;
    if (!take_string(from, self->key_bytes, &name) || !take_u64(from, &amount) || !has_room(self))
        return LEFT;
    PyObject *key = bytes_of(&name);
    enum outcome outcome = key ? add_to(self, key, (int64_t)amount, total) : FAILED;
    Py_XDECREF(key);
    return outcome;
}

static enum outcome add_plain(ExecutorObject *self, struct cursor *from)
{
    int64_t total;
    enum outcome outcome = add(self, from, &total);
    if (outcome == DONE)
        put_u64(self, (uint64_t)total);
    return outcome;
}

static enum outcome add_tagged(ExecutorObject *self, struct cursor *from)
{
    uint32_t tag;
    int64_t total;
    if (!take_u32(from, &tag) || !tag)
        return LEFT;
    enum outcome outcome = add(self, from, &total);
    if (outcome == DONE) {
        put_frame(self, OK, tag, 8);
        put_u64(self, (uint64_t)total);
    }
    return outcome;
}

/* Whether a list's only key has a value, or (with `of_queues`) a queue with an item. */
static enum outcome look(ExecutorObject *self, struct cursor *from, bool of_queues, int *found)
{
    struct cursor name;
    if (!take_only_key(from, self->key_bytes, &name))
        return LEFT;
    PyObject *key = bytes_of(&name);
    if (!key)
        return FAILED;
    *found = PyDict_Contains(self->values, key);
    if (!*found && of_queues && PyDict_GET_SIZE(self->queues))
        *found = PyDict_Contains(self->queues, key);
    Py_DECREF(key);
    return *found < 0 ? FAILED : DONE;
}

static enum outcome check(ExecutorObject *self, struct cursor *from)
{
    int found;
    enum outcome outcome = look(self, from, true, &found);
    if (outcome == DONE)
        put_byte(self, !found); /* 0 says that it is there */
    return outcome;
}

static enum outcome check_tagged(ExecutorObject *self, struct cursor *from)
{
    int found;
    uint32_t tag;
    if (!take_u32(from, &tag) || !tag)
        return LEFT;
    enum outcome outcome = look(self, from, true, &found);
    if (outcome == DONE) {
        put_frame(self, OK, tag, 1);
        put_byte(self, found);
    }
    return outcome;
}

/* Only a wait that is over at once. */
static enum outcome wait_plain(ExecutorObject *self, struct cursor *from)
{
    int found;
    enum outcome outcome = look(self, from, false, &found);
    if (outcome == DONE && !found)
        return LEFT;
    if (outcome == DONE)
        put_byte(self, 0);
    return outcome;
}

static enum outcome wait_tagged(ExecutorObject *self, struct cursor *from)
{
    int found;
    uint32_t tag;
    if (!take_u32(from, &tag) || !tag)
        return LEFT;
    enum outcome outcome = look(self, from, false, &found);
    if (outcome == DONE && !found)
        return LEFT;
    if (outcome == DONE)
        put_frame(self, OK, tag, 0);
    return outcome;
}

static enum outcome execute_tagged(ExecutorObject *self, int query, struct cursor *from)
{
    switch (query) {
    case ACK_SET: return set_tagged(self, from);
    case GET_IF: return get_tagged(self, from, false);
    case ACK_ADD: return add_tagged(self, from);
    case CHECK_EACH: return check_tagged(self, from);
    case AWAIT: return wait_tagged(self, from);
    case AWAIT_GET: return get_tagged(self, from, true);
    default: return LEFT;
    }
}

static enum outcome execute(ExecutorObject *self, struct cursor *from, bool is_ours)
{
    int query = *from->at++;
    switch (query) {
    case SET: return set(self, from);
    case GET: return get(self, from);
    case ADD: return add_plain(self, from);
    case CHECK: return check(self, from);
    case WAIT: return wait_plain(self, from);
    default: return is_ours && query >= TAGGED ? execute_tagged(self, query, from) : LEFT;
    }
}

/* ---- the types ---- */

/* Execute from `position` on, into `self->reply`; return where it stopped, -1 with an error set. */
static Py_ssize_t run(ExecutorObject *self, PyObject *bytes, Py_ssize_t position, bool is_ours)
{
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(bytes);
    struct cursor done = {data + position, data + PyBytes_GET_SIZE(bytes)};
    self->size = 0;
    while (done.at < done.end && self->size < REPLY_BYTES) {
        struct cursor next = done;
        enum outcome outcome = execute(self, &next, is_ours);
        if (outcome == FAILED)
            return -1;
        if (outcome == LEFT)
            break;
        done = next;
    }
    return done.at - data;
}

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
    Py_ssize_t end = run(self, arguments[0], position, arguments[2] == Py_True);
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

static PyTypeObject Executor_Type = {
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

/* `Receiver`: a peer's `data_received` while only plain commands arrive; Python's for the rest. */
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
        position = run(self->executor, data, position, self->is_ours);
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
            positional, named, "O!O!O", names, &Executor_Type, &executor, &PyDict_Type, &promised,
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

static PyTypeObject Receiver_Type = {
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

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "echelon.store.server._native",
    .m_doc = "Plain commands of the store, without the interpreter.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__native(void)
{
    if (PyType_Ready(&Executor_Type) < 0 || PyType_Ready(&Receiver_Type) < 0)
        return NULL;
    PyObject *self = PyModule_Create(&module);
    if (!self)
        return NULL;
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
    if (PyModule_AddObjectRef(self, "Executor", (PyObject *)&Executor_Type) < 0 ||
        PyModule_AddObjectRef(self, "Receiver", (PyObject *)&Receiver_Type) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
