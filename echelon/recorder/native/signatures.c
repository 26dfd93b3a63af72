/* A call's signature: kind, dtype, reduce op, shapes and splits, found again by their contents.
 *
 * Shapes are new tuples at each call, so they are encoded as operations.py does it and compared as
 * bytes; the three texts mostly are the same objects as before.
 */
#include "writer.h"

#include <string.h>

static bool put_numbers(PyObject *tuple, unsigned char **to)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        int overflow = 0;
        if (!PyLong_Check(item))
            return false;
        int64_t value = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow)
            return false;
        memcpy(*to, &value, 8);
        *to += 8;
    }
    return true;
}

/* Encode shapes and splits as `encode_signature` does; 0 if Python must do it. */
static size_t encode(const struct bb_call *call, unsigned char *tail)
{
    PyObject *shapes = call->shapes, *inputs = call->inputs, *outputs = call->outputs;
    if (!PyTuple_Check(shapes) || !PyTuple_Check(inputs) || !PyTuple_Check(outputs))
        return 0;
    Py_ssize_t num_shapes = PyTuple_GET_SIZE(shapes);
    uint32_t counts[2] = {(uint32_t)PyTuple_GET_SIZE(inputs), (uint32_t)PyTuple_GET_SIZE(outputs)};
    if (num_shapes > BB_MAX_TENSORS ||
        PyTuple_GET_SIZE(inputs) + PyTuple_GET_SIZE(outputs) > BB_MAX_SPLITS)
        return 0;
    memcpy(tail, counts, 8);
    unsigned char *to = tail + 8 + num_shapes;
    for (Py_ssize_t i = 0; i < num_shapes; i++) {
        PyObject *shape = PyTuple_GET_ITEM(shapes, i);
        if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) > BB_MAX_DIMS)
            return 0;
        tail[8 + i] = (unsigned char)PyTuple_GET_SIZE(shape);
        if (!put_numbers(shape, &to))
            return 0;
    }
    if (!put_numbers(inputs, &to) || !put_numbers(outputs, &to))
        return 0;
    return (size_t)(to - tail);
}

static uint64_t mixed(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

static uint64_t hash_of(const struct bb_call *call, const unsigned char *tail, size_t tail_bytes)
{
    uint64_t hash = mixed(tail_bytes, (uint64_t)PyObject_Hash(call->operation));
    hash = mixed(hash, (uint64_t)PyObject_Hash(call->dtype));
    hash = mixed(hash, (uint64_t)PyObject_Hash(call->reduce_op));
    for (; tail_bytes >= 8; tail_bytes -= 8, tail += 8) {
        uint64_t word;
        memcpy(&word, tail, 8);
        hash = mixed(hash, word);
    }
    uint64_t rest = 0;
    memcpy(&rest, tail, tail_bytes);
    return mixed(hash, rest);
}

static bool same(PyObject *a, PyObject *b)
{
    return a == b || (PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b) &&
                      PyUnicode_GET_LENGTH(a) == PyUnicode_GET_LENGTH(b) &&
                      PyUnicode_Compare(a, b) == 0);
}

static struct bb_signature *place_of(struct bb_signatures *self, const struct bb_call *call,
                                     uint64_t hash, const unsigned char *tail, size_t tail_bytes)
{
    for (size_t i = hash;; i++) {
        struct bb_signature *one = &self->table[i & (self->size - 1)];
        if (!one->operation)
            return one;
        if (one->hash == hash && one->tail_bytes == tail_bytes &&
            same(one->operation, call->operation) && same(one->dtype, call->dtype) &&
            same(one->reduce_op, call->reduce_op) && memcmp(one->tail, tail, tail_bytes) == 0)
            return one;
    }
}

void bb_signatures_clear(struct bb_signatures *self)
{
    struct bb_signature *table = self->table;
    size_t size = self->size;
    self->table = NULL; /* dropping a reference may run Python code */
    self->size = self->used = 0;
    for (size_t i = 0; i < size; i++)
        if (table[i].operation) {
            Py_DECREF(table[i].operation);
            Py_DECREF(table[i].dtype);
            Py_DECREF(table[i].reduce_op);
            PyMem_Free(table[i].tail);
        }
    PyMem_Free(table);
}

static void keep(struct bb_signatures *self, const struct bb_call *call, uint64_t hash,
                 const unsigned char *tail, size_t tail_bytes, uint32_t ref)
{
    if (self->used >= BB_MAX_SIGNATURES)
        bb_signatures_clear(self);
    if (!self->table) {
        self->table = PyMem_Calloc(2 * BB_MAX_SIGNATURES, sizeof *self->table);
        if (!self->table)
            return;
        self->size = 2 * BB_MAX_SIGNATURES;
    }
    struct bb_signature *one = place_of(self, call, hash, tail, tail_bytes);
    if (one->operation)
        return; /* another thread was faster */
    unsigned char *copy = PyMem_Malloc(tail_bytes);
    if (!copy)
        return;
    memcpy(copy, tail, tail_bytes);
    *one = (struct bb_signature){
        Py_NewRef(call->operation), Py_NewRef(call->dtype), Py_NewRef(call->reduce_op),
        hash, ref, (uint32_t)tail_bytes, copy,
    };
    self->used++;
}

static uint32_t add_by_python(const struct bb_call *call, PyObject *add)
{
    PyObject *args[] = {call->operation, call->dtype,  call->reduce_op,
                        call->shapes,    call->inputs, call->outputs};
    PyObject *ref = PyObject_Vectorcall(add, args, 6, NULL);
    if (!ref)
        return 0;
    unsigned long value = PyLong_AsUnsignedLong(ref);
    Py_DECREF(ref);
    return PyErr_Occurred() ? 0 : (uint32_t)value;
}

uint32_t bb_signature_find(struct bb_signatures *self, const struct bb_call *call, uint64_t part,
                           PyObject *add)
{
    unsigned char tail[BB_MAX_TAIL_BYTES];
    bool are_texts = PyUnicode_CheckExact(call->operation) && PyUnicode_CheckExact(call->dtype) &&
                     PyUnicode_CheckExact(call->reduce_op);
    size_t tail_bytes = are_texts ? encode(call, tail) : 0;
    PyErr_Clear();
    if (!tail_bytes)
        return add_by_python(call, add);
    if (self->part != part) {
        bb_signatures_clear(self);
        self->part = part;
    }
    uint64_t hash = hash_of(call, tail, tail_bytes);
    if (self->table) {
        struct bb_signature *known = place_of(self, call, hash, tail, tail_bytes);
        if (known->operation)
            return known->ref;
    }
    uint32_t ref = add_by_python(call, add);
    if (ref)
        keep(self, call, hash, tail, tail_bytes, ref);
    return ref;
}
