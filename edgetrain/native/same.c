/* Do the same objects stand at the same places? What edgetrain/native/same.py does in Python, in a quarter of the time.
 *
 * items(rows, first): rows are (mapping, key, object). Gives the place of the first row, from `first` on, whose mapping
 *     has another object there, or none; -1 where there is no such row.
 * functions(rows): rows are (function, code, defaults, named defaults). Whether each function has these objects.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* 1: there it is; 0: something else, or nothing; -1: an exception is set. */
static int stands_at(PyObject *mapping, PyObject *key, PyObject *object)
{
    if (PyDict_CheckExact(mapping)) {
        PyObject *found = PyDict_GetItemWithError(mapping, key);
        return found == NULL && PyErr_Occurred() ? -1 : found == object;
    }
    PyObject *found = PyObject_GetItem(mapping, key);
    if (found == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(found);
    return found == object;
}

/* The row at a place, a tuple of that length; NULL with an exception where it is none. */
static PyObject *row_at(PyObject *rows, Py_ssize_t place, Py_ssize_t length)
{
    PyObject *row = PyList_GET_ITEM(rows, place);
    if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != length) {
        PyErr_Format(PyExc_TypeError, "row %zd is no tuple of %zd", place, length);
        return NULL;
    }
    return row;
}

static PyObject *items(PyObject *module, PyObject *arguments)
{
    PyObject *rows;
    Py_ssize_t place;
    if (!PyArg_ParseTuple(arguments, "O!n", &PyList_Type, &rows, &place)) {
        return NULL;
    }
    for (; place < PyList_GET_SIZE(rows); place++) {
        PyObject *row = row_at(rows, place, 3);
        if (row == NULL) {
            return NULL;
        }
        Py_INCREF(row); /* a mapping of the user's may do anything */
        const int same = stands_at(PyTuple_GET_ITEM(row, 0), PyTuple_GET_ITEM(row, 1), PyTuple_GET_ITEM(row, 2));
        Py_DECREF(row);
        if (same < 0) {
            return NULL;
        }
        if (!same) {
            return PyLong_FromSsize_t(place);
        }
    }
    return PyLong_FromLong(-1);
}

static int is_same(PyObject *now, PyObject *then)
{
    return (now == NULL ? Py_None : now) == then;
}

static PyObject *functions(PyObject *module, PyObject *rows)
{
    if (!PyList_Check(rows)) {
        PyErr_SetString(PyExc_TypeError, "a list is expected");
        return NULL;
    }
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(rows); place++) {
        PyObject *row = row_at(rows, place, 4);
        if (row == NULL) {
            return NULL;
        }
        PyObject *function = PyTuple_GET_ITEM(row, 0);
        if (!PyFunction_Check(function)) {
            PyErr_Format(PyExc_TypeError, "row %zd holds no function", place);
            return NULL;
        }
        if (PyFunction_GetCode(function) != PyTuple_GET_ITEM(row, 1) ||
            !is_same(PyFunction_GetDefaults(function), PyTuple_GET_ITEM(row, 2)) ||
            !is_same(PyFunction_GetKwDefaults(function), PyTuple_GET_ITEM(row, 3))) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"items", items, METH_VARARGS, "The place of the first row, from one on, where something else stands; or -1."},
    {"functions", functions, METH_O, "Whether each function has its code and its defaults."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_same", NULL, -1, methods};

PyMODINIT_FUNC PyInit__same(void)
{
    return PyModule_Create(&definition);
}
