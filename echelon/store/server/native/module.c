/* The module: its types and nothing else. */
#include "executor.h"

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "echelon.store.server._native",
    .m_doc = "Plain commands of the store, without the interpreter.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__native(void)
{
    if (PyType_Ready(&st_executor_type) < 0 || PyType_Ready(&st_receiver_type) < 0)
        return NULL;
    PyObject *self = PyModule_Create(&module);
    if (!self)
        return NULL;
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
    if (PyModule_AddObjectRef(self, "Executor", (PyObject *)&st_executor_type) < 0 ||
        PyModule_AddObjectRef(self, "Receiver", (PyObject *)&st_receiver_type) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
