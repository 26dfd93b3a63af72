/* What the files of the store's core share. */
#ifndef ECHELON_STORE_EXECUTOR_H
#define ECHELON_STORE_EXECUTOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define REPLY_BYTES (256 << 10)  /* replies gathered in one call, plus the last one */
#define JOINED_BYTES 4096        /* values from here on are passed on by reference */
#define FRAME_BYTES 13

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *values, *queues, *waiting, *present_by; /* dictionaries */
    PyObject *watched;                                /* a set */
    Py_ssize_t key_bytes, value_bytes, num_keys;
    Py_ssize_t size;                                  /* of the reply so far */
    unsigned char reply[REPLY_BYTES + JOINED_BYTES + FRAME_BYTES + 8];
} ExecutorObject;

/* Execute from `position` on, into `self->reply`; return where it stopped, -1 with an error set. */
Py_ssize_t st_execute(ExecutorObject *self, PyObject *bytes, Py_ssize_t position, bool is_ours);

extern PyTypeObject st_executor_type, st_receiver_type;

#endif
