/* Copy buffers into one target and compute its CRC-32 in the same pass.
 *
 * A copy that is larger than the caches is bound by memory. So each source is read once, the target is
 * written without being read first (non-temporal stores), and the CRC is computed in between. The CRC
 * is zlib's, so that zlib can check what this module wrote, and the reverse. No interpreter lock is
 * held while bytes are copied.
 *
 * The module is empty on processors without carry-less multiplication; filling.py then uses zlib.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "fold.h"

struct piece {
    Py_buffer source;
    size_t offset; /* in the target */
};

static void release(struct piece *pieces, Py_ssize_t num)
{
    while (num > 0)
        PyBuffer_Release(&pieces[--num].source);
    PyMem_Free(pieces);
}

static int take_piece(PyObject *item, struct piece *piece, size_t first, size_t length)
{
    Py_ssize_t offset;
    PyObject *source;
    if (!PyArg_ParseTuple(item, "nO;a piece is (offset, buffer)", &offset, &source) ||
        PyObject_GetBuffer(source, &piece->source, PyBUF_SIMPLE) < 0)
        return -1;
    piece->offset = (size_t)offset;
    if (offset >= 0 && piece->offset >= first && piece->offset <= length &&
        (size_t)piece->source.len <= length - piece->offset)
        return 0;
    PyBuffer_Release(&piece->source);
    PyErr_SetString(PyExc_ValueError, "a piece overlaps the one before, or exceeds the target");
    return -1;
}

/* Take the buffers of a list's pieces; they must lie within the target, in order. */
static struct piece *take(PyObject *list, size_t length)
{
    Py_ssize_t num = PyList_GET_SIZE(list);
    struct piece *pieces = PyMem_Calloc((size_t)num + 1, sizeof *pieces);
    size_t first = 0;
    if (!pieces) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < num; i++) {
        if (take_piece(PyList_GET_ITEM(list, i), &pieces[i], first, length) < 0) {
            release(pieces, i);
            return NULL;
        }
        first = pieces[i].offset + (size_t)pieces[i].source.len;
    }
    return pieces;
}

static uint32_t fill_all(unsigned char *target, size_t length, const struct piece *pieces,
                         Py_ssize_t num, uint32_t crc)
{
    size_t at = 0;
    for (Py_ssize_t i = 0; i < num; i++) {
        crc = cp_zeros(target + at, pieces[i].offset - at, crc);
        at = pieces[i].offset + (size_t)pieces[i].source.len;
        crc = cp_copy(target + pieces[i].offset, pieces[i].source.buf,
                      (size_t)pieces[i].source.len, crc);
    }
    return cp_zeros(target + at, length - at, crc);
}

static PyObject *fill(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer target;
    PyObject *list;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "w*O!|I", &target, &PyList_Type, &list, &crc))
        return NULL;
    struct piece *pieces = take(list, (size_t)target.len);
    if (!pieces) {
        PyBuffer_Release(&target);
        return NULL;
    }
    Py_ssize_t num = PyList_GET_SIZE(list);
    Py_BEGIN_ALLOW_THREADS
    crc = fill_all(target.buf, (size_t)target.len, pieces, num, crc);
    Py_END_ALLOW_THREADS
    release(pieces, num);
    PyBuffer_Release(&target);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *crc32(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer data;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "y*|I", &data, &crc))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = cp_crc(data.buf, (size_t)data.len, crc);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *widen(PyObject *module, PyObject *wanted)
{
    (void)module;
    int is_wanted = PyObject_IsTrue(wanted);
    return is_wanted < 0 ? NULL : PyBool_FromLong(cp_widen(is_wanted));
}

static PyMethodDef functions[] = {
    {"fill", fill, METH_VARARGS, "Fill (target, [(offset, buffer), ...], crc); return its CRC-32."},
    {"crc32", crc32, METH_VARARGS, "The CRC-32 of a buffer, after that of what precedes."},
    {"widen", widen, METH_O, "Whether to use 256-bit instructions; return whether they are used."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "echelon.dist.resilient.copies._native",
    .m_doc = "Copies with a CRC in one pass.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    if (cp_prepare() && PyModule_AddFunctions(module, functions) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
