/* Places of a program with the nanoseconds when they were reached: what edgetrain/native/marks.py does in Python, in a
 * quarter of the time. A traced step is marked hundreds of times.
 *
 * Marks(): mark(place) appends the place and CLOCK_MONOTONIC's nanoseconds. bytes(marks) returns all of them as int64s.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    int64_t *values;
    Py_ssize_t length, room; /* in values */
} Marks;

static PyObject *mark(Marks *self, PyObject *place)
{
    const long long number = PyLong_AsLongLong(place);
    if (number == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (self->length + 2 > self->room) {
        const Py_ssize_t room = self->room ? 2 * self->room : 1024;
        int64_t *values = PyMem_Realloc(self->values, room * sizeof(int64_t));
        if (values == NULL) {
            return PyErr_NoMemory();
        }
        self->values = values;
        self->room = room;
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    self->values[self->length++] = number;
    self->values[self->length++] = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    Py_RETURN_NONE;
}

static PyObject *as_bytes(Marks *self, PyObject *unused)
{
    return PyBytes_FromStringAndSize((const char *)self->values, self->length * sizeof(int64_t));
}

static void marks_dealloc(Marks *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->values);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef marks_methods[] = {
    {"mark", (PyCFunction)mark, METH_O, "Append a place, and the time."},
    {"__bytes__", (PyCFunction)as_bytes, METH_NOARGS, "All places and times, as int64s."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot marks_slots[] = {
    {Py_tp_dealloc, marks_dealloc},
    {Py_tp_methods, marks_methods},
    {0, NULL},
};

static PyType_Spec marks_spec = {"edgetrain.native._marks.Marks", sizeof(Marks), 0, Py_TPFLAGS_DEFAULT, marks_slots};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_marks", NULL, -1, NULL};

PyMODINIT_FUNC PyInit__marks(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module == NULL ? NULL : PyType_FromSpec(&marks_spec);
    if (type == NULL || PyModule_AddObject(module, "Marks", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
