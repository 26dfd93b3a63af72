/* The plain commands of a member, executed on the dictionaries of `StoreState`.
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
#include "executor.h"

/* As in wire/protocol.py. */
enum query {
    SET = 0x01, GET = 0x03, ADD = 0x04, CHECK = 0x05, WAIT = 0x06,
    ACK_SET = 0x81, GET_IF = 0x83, ACK_ADD = 0x84, CHECK_EACH = 0x85, AWAIT = 0x86,
    TAGGED = 0x80, AWAIT_GET = 0xC7,
};
enum status { OK = 0, NOTHING = 3 };

#define NUMBER_BYTES 24 /* of a decimal int64 with its sign */

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

Py_ssize_t st_execute(ExecutorObject *self, PyObject *bytes, Py_ssize_t position, bool is_ours)
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
