/* The call site: the nearest frame of the user's code and its callers.
 *
 * A site is known by where its innermost frames stand: (code object, instruction) of up to four.
 * Only public calls of CPython are used, so that every version from 3.10 works alike.
 */
#include "writer.h"

#include <string.h>

#if PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#define LASTI(frame) ((frame)->f_lasti)
#else
#define LASTI(frame) PyFrame_GetLasti(frame)
#endif

static size_t hash_of(const struct bb_frames *frames)
{
    uint64_t hash = 0;
    for (int i = 0; i < BB_STACK_FRAMES; i++) {
        hash = (hash ^ frames->code[i] >> 4 ^ (uint64_t)frames->lasti[i] << 40) *
               0x9E3779B97F4A7C15u;
        hash ^= hash >> 31;
    }
    return (size_t)hash;
}

static struct bb_site *place_of(const struct bb_sites *self, const struct bb_frames *frames)
{
    for (size_t i = hash_of(frames);; i++) {
        struct bb_site *one = &self->table[i & (self->size - 1)];
        if (!one->frames.code[0] || memcmp(&one->frames, frames, sizeof *frames) == 0)
            return one;
    }
}

static bool grow_sites(struct bb_sites *self)
{
    struct bb_sites wider = {.size = self->size ? 2 * self->size : 256};
    wider.table = PyMem_Calloc(wider.size, sizeof *wider.table);
    if (!wider.table)
        return false;
    for (size_t i = 0; i < self->size; i++)
        if (self->table[i].frames.code[0])
            *place_of(&wider, &self->table[i].frames) = self->table[i];
    PyMem_Free(self->table);
    self->table = wider.table;
    self->size = wider.size;
    return true;
}

static uintptr_t *code_place(uintptr_t *codes, size_t size, uintptr_t code)
{
    for (size_t i = (code >> 4) * 0x9E3779B97F4A7C15u >> 20;; i++) {
        uintptr_t *one = &codes[i & (size - 1)];
        if (!*one || (*one & ~(uintptr_t)1) == code)
            return one;
    }
}

static bool grow_codes(struct bb_sites *self)
{
    size_t size = self->codes_size ? 2 * self->codes_size : 512;
    uintptr_t *codes = PyMem_Calloc(size, sizeof *codes);
    if (!codes)
        return false;
    for (size_t i = 0; i < self->codes_size; i++)
        if (self->codes[i])
            *code_place(codes, size, self->codes[i] & ~(uintptr_t)1) = self->codes[i];
    PyMem_Free(self->codes);
    self->codes = codes;
    self->codes_size = size;
    return true;
}

/* Keep a code object alive; false if there are too many already, or no memory. */
static bool keep_alive(struct bb_sites *self, PyObject *code)
{
    if (self->codes_used >= BB_MAX_SITES)
        return false;
    if (2 * (self->codes_used + 1) > self->codes_size && !grow_codes(self))
        return false;
    if (!self->alive && !(self->alive = PyList_New(0)))
        return false;
    return PyList_Append(self->alive, code) == 0;
}

/* Whether a code object is the user's. */
static bool is_user(struct bb_sites *self, const struct bb_site_calls *calls, PyCodeObject *code)
{
    if (self->codes) {
        uintptr_t known = *code_place(self->codes, self->codes_size, (uintptr_t)code);
        if (known)
            return known & 1;
    }
    PyObject *answer = PyObject_CallOneArg(calls->is_user_code, (PyObject *)code);
    bool is_own = answer == Py_True;
    Py_XDECREF(answer);
    if (answer && keep_alive(self, (PyObject *)code)) {
        uintptr_t *place = code_place(self->codes, self->codes_size, (uintptr_t)code);
        if (!*place) {
            *place = (uintptr_t)code | (uintptr_t)is_own;
            self->codes_used++;
        }
    }
    PyErr_Clear();
    return is_own;
}

/* Whether all code objects of a key are kept alive, so that it can never mean another place. */
static bool are_alive(const struct bb_sites *self, const struct bb_frames *frames)
{
    for (int i = 0; i < BB_STACK_FRAMES; i++)
        if (frames->code[i] && !*code_place(self->codes, self->codes_size, frames->code[i]))
            return false;
    return true;
}

static void call_python(PyObject *function, PyFrameObject *frame, uint32_t *site, uint32_t *stack)
{
    PyObject *refs = PyObject_CallOneArg(function, (PyObject *)frame);
    if (refs && PyTuple_Check(refs) && PyTuple_GET_SIZE(refs) == 2) {
        *site = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(refs, 0));
        *stack = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(refs, 1));
    }
    Py_XDECREF(refs);
    PyErr_Clear();
}

static void step_out(PyFrameObject **frame)
{
    PyFrameObject *back = PyFrame_GetBack(*frame);
    Py_DECREF(*frame);
    *frame = back;
}

/* Fill in where a frame and its callers stand. */
static void read_frames(PyFrameObject *frame, struct bb_frames *frames)
{
    memset(frames, 0, sizeof *frames);
    Py_INCREF(frame);
    for (int i = 0; i < BB_STACK_FRAMES && frame; i++) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        frames->code[i] = (uintptr_t)code;
        frames->lasti[i] = LASTI(frame);
        Py_DECREF(code); /* the frame holds it */
        step_out(&frame);
    }
    Py_XDECREF(frame);
}

/* Return the nearest frame of the user's code at or above `frame`, or NULL; takes `frame`. */
static PyFrameObject *user_frame(struct bb_sites *self, const struct bb_site_calls *calls,
                                 PyFrameObject *frame)
{
    for (int i = 0; i < BB_MAX_WALK && frame; i++) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        bool is_own = is_user(self, calls, code);
        Py_DECREF(code);
        if (is_own)
            return frame;
        step_out(&frame);
    }
    Py_XDECREF(frame);
    return NULL;
}

static void add_site(struct bb_sites *self, const struct bb_site_calls *calls,
                     PyFrameObject *frame, const struct bb_frames *frames, uint32_t *site,
                     uint32_t *stack)
{
    call_python(calls->add_site, frame, site, stack);
    PyFrameObject *here = (PyFrameObject *)Py_NewRef(frame);
    for (int i = 0; i < BB_STACK_FRAMES && here; i++) {
        PyCodeObject *code = PyFrame_GetCode(here);
        is_user(self, calls, code);
        Py_DECREF(code);
        step_out(&here);
    }
    Py_XDECREF(here);
    if (!self->codes || !are_alive(self, frames) || self->used >= BB_MAX_SITES)
        return;
    if (2 * (self->used + 1) > self->size && !grow_sites(self))
        return;
    struct bb_site *place = place_of(self, frames);
    if (!place->frames.code[0])
        self->used++;
    *place = (struct bb_site){*frames, *site, *stack};
}

void bb_site_find(struct bb_sites *self, const struct bb_site_calls *calls, long depth,
                  uint32_t *site, uint32_t *stack)
{
    *site = *stack = 0;
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    for (; depth > 1 && frame; depth--)
        step_out(&frame);
    if (!frame)
        return;
    PyFrameObject *nearest = (PyFrameObject *)Py_NewRef(frame);
    frame = user_frame(self, calls, frame);
    if (!frame) /* none of it is the user's: rare, so Python looks, also on the main thread */
        call_python(calls->find_site, nearest, site, stack);
    Py_DECREF(nearest);
    if (!frame)
        return;
    struct bb_frames frames;
    read_frames(frame, &frames);
    struct bb_site *known = self->table ? place_of(self, &frames) : NULL;
    if (known && known->frames.code[0]) {
        *site = known->site;
        *stack = known->stack;
    } else {
        add_site(self, calls, frame, &frames, site, stack);
    }
    Py_DECREF(frame);
}

void bb_sites_clear(struct bb_sites *self)
{
    PyMem_Free(self->table);
    PyMem_Free(self->codes);
    self->table = NULL;
    self->codes = NULL;
    self->size = self->used = self->codes_size = self->codes_used = 0;
    Py_CLEAR(self->alive);
}
