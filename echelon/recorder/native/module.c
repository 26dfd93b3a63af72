/* The module: `Writer`, and the protection of mapped files. */
#include "writer.h"

static PyObject *protect(PyObject *Py_UNUSED(module), PyObject *memory)
{
    Py_buffer view;
    bool writable = PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE) == 0;
    PyErr_Clear();
    if (!writable && PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    bool done = bb_faults_protect((uintptr_t)view.buf, (size_t)view.len, writable);
    PyObject *address = done ? PyLong_FromVoidPtr(view.buf) : PyLong_FromLong(0);
    PyBuffer_Release(&view);
    return address;
}

static PyObject *release(PyObject *Py_UNUSED(module), PyObject *address)
{
    void *begin = PyLong_AsVoidPtr(address);
    if (begin)
        bb_faults_release((uintptr_t)begin);
    PyErr_Clear();
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"protect", protect, METH_O,
     "Keep a mapped file that is cut off from ending the process; return what `release` takes."},
    {"release", release, METH_O, "Undo `protect`, before the file is unmapped."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "echelon.recorder._native",
    .m_doc = "Operations and spans into a ring, without the interpreter.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void)
{
    bb_crc32_prepare();
    if (!bb_arguments_prepare() || !bb_operations_prepare() || !bb_prepared_prepare() ||
        PyType_Ready(&bb_writer_type) < 0 || PyType_Ready(&bb_open_span_type) < 0)
        return NULL;
    PyObject *self = PyModule_Create(&module);
    if (!self)
        return NULL;
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
    if (PyModule_AddObject(self, "Writer", Py_NewRef(&bb_writer_type)) < 0) {
        Py_DECREF(&bb_writer_type);
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
