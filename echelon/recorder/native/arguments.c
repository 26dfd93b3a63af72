/* The keywords of `begin`: sorted by name, and read as what the ring's fields hold. */
#include "writer.h"

#include <string.h>

static const char *const NAMES[NUM_ARGUMENTS] = {
    "sequence", "p2p_sequence", "dtype", "shapes", "input_splits", "output_splits", "num_bytes",
    "reduce_op", "root", "peer", "tag", "coalesced", "timeout_s", "flags", "depth", "is_started",
};

static PyObject *names[NUM_ARGUMENTS]; /* interned */

/* Where the values of a call's keywords belong. Each call site passes the same tuple of names. */
struct layout {
    PyObject *keywords; /* owned */
    signed char places[NUM_ARGUMENTS];
};

enum { NUM_LAYOUTS = 16 };
static struct layout layouts[NUM_LAYOUTS];

static int place_of(PyObject *keyword)
{
    for (int i = 0; i < NUM_ARGUMENTS; i++)
        if (names[i] == keyword)
            return i;
    for (int i = 0; i < NUM_ARGUMENTS; i++)
        if (PyUnicode_Compare(names[i], keyword) == 0)
            return i;
    return -1;
}

int bb_sort_keywords(PyObject *keywords, PyObject *const *from, PyObject **values)
{
    Py_ssize_t count = PyTuple_GET_SIZE(keywords);
#ifndef Py_GIL_DISABLED
    struct layout *known = &layouts[(uintptr_t)keywords >> 4 & (NUM_LAYOUTS - 1)];
    if (known->keywords == keywords) {
        for (Py_ssize_t i = 0; i < count; i++)
            values[known->places[i]] = from[i];
        return 0;
    }
#endif
    signed char places[NUM_ARGUMENTS];
    if (count > NUM_ARGUMENTS)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        int place = place_of(PyTuple_GET_ITEM(keywords, i));
        if (place < 0)
            return -1;
        places[i] = (signed char)place;
        values[place] = from[i];
    }
#ifndef Py_GIL_DISABLED
    Py_XSETREF(known->keywords, Py_NewRef(keywords));
    memcpy(known->places, places, sizeof places);
#endif
    return 0;
}

int bb_read_i64(PyObject *value, int64_t *to)
{
    if (!value)
        return 0;
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow)
        number = overflow > 0 ? INT64_MAX : INT64_MIN;
    else if (number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        PyObject *whole = PyNumber_Long(value);
        if (!whole)
            return -1;
        number = PyLong_AsLongLongAndOverflow(whole, &overflow);
        Py_DECREF(whole);
        if (overflow)
            number = overflow > 0 ? INT64_MAX : INT64_MIN;
    }
    *to = number;
    return 0;
}

static int read_i32(PyObject *value, int32_t *to)
{
    int64_t number = *to;
    if (bb_read_i64(value, &number) < 0)
        return -1;
    *to = (int32_t)(number < INT32_MIN ? INT32_MIN : number > INT32_MAX ? INT32_MAX : number);
    return 0;
}

int bb_read_u32(PyObject *value, uint32_t *to)
{
    int64_t number = *to;
    if (bb_read_i64(value, &number) < 0)
        return -1;
    *to = (uint32_t)(number < 0 ? 0 : number > UINT32_MAX ? UINT32_MAX : number);
    return 0;
}

static int read_timeout(PyObject *value, int64_t *timeout_ms)
{
    *timeout_ms = 0;
    if (!value)
        return 0;
    double seconds = PyFloat_AsDouble(value);
    if (seconds == -1.0 && PyErr_Occurred())
        return -1;
    if (seconds >= 0 && seconds <= 1e9)
        *timeout_ms = (int64_t)(seconds * 1000);
    return 0;
}

int bb_read_varying(PyObject **values, struct bb_fixed *fixed)
{
    fixed->sequence = fixed->coalesced = -1;
    fixed->flags = 0;
    return bb_read_i64(values[SEQUENCE], &fixed->sequence) ||
                   read_i32(values[COALESCED], &fixed->coalesced) ||
                   bb_read_u32(values[FLAGS], &fixed->flags)
               ? -1
               : 0;
}

int bb_read_fixed(PyObject *group, PyObject **values, struct bb_fixed *fixed)
{
    fixed->p2p_sequence = -1;
    fixed->root = fixed->peer = fixed->tag = -1;
    fixed->num_bytes = 0;
    fixed->group = 0;
    return bb_read_u32(group, &fixed->group) || bb_read_varying(values, fixed) ||
                   bb_read_i64(values[P2P_SEQUENCE], &fixed->p2p_sequence) ||
                   bb_read_i64(values[NUM_BYTES], &fixed->num_bytes) ||
                   read_i32(values[ROOT], &fixed->root) || read_i32(values[PEER], &fixed->peer) ||
                   read_i32(values[TAG], &fixed->tag) ||
                   read_timeout(values[TIMEOUT_S], &fixed->timeout_ms)
               ? -1
               : 0;
}

bool bb_arguments_prepare(void)
{
    for (int i = 0; i < NUM_ARGUMENTS; i++)
        if (!names[i] && !(names[i] = PyUnicode_InternFromString(NAMES[i])))
            return false;
    return true;
}
