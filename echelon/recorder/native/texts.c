/* Names and details of spans: looked up in the caches of texts.py, stored by Python when new. */
#include "writer.h"

static bool read_ref(PyObject *number, uint32_t *ref)
{
    unsigned long value = PyLong_AsUnsignedLong(number);
    *ref = (uint32_t)value;
    return !(value == (unsigned long)-1 && PyErr_Occurred());
}

/* Whether the cache has it; another thread may empty a cache of recent texts at any time. */
static bool is_known(PyObject *cache, PyObject *text, uint32_t *ref)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *known = NULL;
    bool is_found = PyDict_GetItemRef(cache, text, &known) == 1 && read_ref(known, ref);
    Py_XDECREF(known);
#else
    PyObject *known = PyDict_GetItemWithError(cache, text); /* borrowed: the lock is held */
    bool is_found = known && read_ref(known, ref);
#endif
    PyErr_Clear();
    return is_found;
}

static int find(PyObject *cache, PyObject *add, PyObject *text, uint32_t *ref)
{
    bool is_plain = PyUnicode_CheckExact(text) && PyUnicode_GET_LENGTH(text) <= BB_SPAN_CHARS;
    if (is_plain && is_known(cache, text, ref))
        return 0;
    PyObject *made = PyObject_CallOneArg(add, text);
    bool is_read = made && read_ref(made, ref);
    Py_XDECREF(made);
    return is_read ? 0 : -1;
}

int bb_name_find(const struct bb_texts *self, PyObject *text, uint32_t *ref)
{
    return find(self->names, self->add_name, text, ref);
}

int bb_detail_find(const struct bb_texts *self, PyObject *text, uint32_t *ref)
{
    *ref = 0;
    if (PyUnicode_CheckExact(text) && PyUnicode_GET_LENGTH(text) == 0)
        return 0;
    return find(self->recent, self->add_detail, text, ref);
}
