/* Are the same objects at the same places? What edgetrain/native/same.py does in Python, in a quarter of the time.
 *
 * Places(rows): rows are (mapping, size or None, keys, objects), the mapping a dict, a class or another mapping;
 *     without keys it may be any container.
 *     changed(first) returns the number of the first row, from `first` on, whose mapping has another size, or another
 *     object or none at one of the keys; -1 if there is no such row. A dict that was not written to since the last call
 *     is known by its version and not read: before a step all of this memory is cold. Python 3.13 has no versions:
 *     there each row is read.
 * functions(rows): rows are (function, code, defaults, named defaults). Whether each function has these objects.
 * objects(rows): rows are (object, class, dict or None). Whether each object has this class, and this __dict__.
 * orders(rows): rows are (class, tuple). Whether each class has these bases, in this order.
 * lists(rows), sets(rows): rows are (list or set, tuple). Whether each holds the objects of the tuple in this order.
 * dicts(rows, versions): the same for dicts; the tuple has each key and its value in turn. versions is a bytearray with
 *     eight bytes a row, at first all zero: it keeps the version of each dict that is unchanged.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if PY_VERSION_HEX < 0x030D0000
#define HAS_VERSIONS 1
#else
#define HAS_VERSIONS 0
#endif

/* The row at a place, a tuple of that length; NULL with an exception if it is not. */
static PyObject *row_at(PyObject *rows, Py_ssize_t place, Py_ssize_t length)
{
    PyObject *row = PyList_GET_ITEM(rows, place);
    if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != length) {
        PyErr_Format(PyExc_TypeError, "row %zd is no tuple of %zd", place, length);
        return NULL;
    }
    return row;
}

typedef struct {
    PyObject *dict; /* borrowed from the row; NULL: another mapping */
    uint64_t version; /* of the dict when the row was last checked; 0: none */
} Place;

typedef struct {
    PyObject_HEAD
    PyObject *rows;
    Place *places;
} Places;

/* The dict itself, or that of a class; NULL for other mappings. */
static PyObject *dict_of(PyObject *mapping)
{
    if (PyDict_CheckExact(mapping) || PyODict_CheckExact(mapping)) {
        return mapping;
    }
    if (!PyType_Check(mapping)) {
        return NULL;
    }
#if PY_VERSION_HEX < 0x030C0000
    return ((PyTypeObject *)mapping)->tp_dict;
#else
    PyObject *dict = PyType_GetDict((PyTypeObject *)mapping);
    Py_XDECREF(dict); /* the class holds a reference */
    return dict;
#endif
}

static uint64_t version_of(PyObject *dict)
{
#if HAS_VERSIONS
    return dict == NULL ? 0 : ((PyDictObject *)dict)->ma_version_tag;
#else
    return 0;
#endif
}

/* 1: the object is there; 0: another one or none; -1: an exception is set. */
static int is_at(PyObject *dict, PyObject *mapping, PyObject *key, PyObject *object)
{
    if (dict != NULL) {
        PyObject *now = PyDict_GetItemWithError(dict, key);
        return now == NULL && PyErr_Occurred() ? -1 : now == object;
    }
    PyObject *now = PyObject_GetItem(mapping, key);
    if (now == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(now);
    return now == object;
}

/* As stands_at, of a whole row. */
static int row_is_same(PyObject *dict, PyObject *row)
{
    PyObject *mapping = PyTuple_GET_ITEM(row, 0), *size = PyTuple_GET_ITEM(row, 1);
    PyObject *keys = PyTuple_GET_ITEM(row, 2), *objects = PyTuple_GET_ITEM(row, 3);
    if (size != Py_None) {
        const Py_ssize_t then = PyLong_AsSsize_t(size);
        const Py_ssize_t now = then == -1 && PyErr_Occurred() ? -1 : PyObject_Size(dict == NULL ? mapping : dict);
        if (now < 0) {
            return -1;
        }
        if (now != then) {
            return 0;
        }
    }
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(keys); at++) {
        const int same = is_at(dict, mapping, PyTuple_GET_ITEM(keys, at), PyTuple_GET_ITEM(objects, at));
        if (same != 1) {
            return same;
        }
    }
    return 1;
}

static PyObject *places_new(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    PyObject *rows;
    if (!PyArg_ParseTuple(arguments, "O!", &PyList_Type, &rows)) {
        return NULL;
    }
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(rows); number++) {
        PyObject *row = row_at(rows, number, 4);
        if (row == NULL) {
            return NULL;
        }
        PyObject *keys = PyTuple_GET_ITEM(row, 2), *objects = PyTuple_GET_ITEM(row, 3);
        if (!PyTuple_Check(keys) || !PyTuple_Check(objects) || PyTuple_GET_SIZE(keys) != PyTuple_GET_SIZE(objects)) {
            PyErr_Format(PyExc_TypeError, "row %zd has not as many objects as keys", number);
            return NULL;
        }
    }
    Places *self = (Places *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->rows = PyList_GetSlice(rows, 0, PyList_GET_SIZE(rows)); /* a copy, which nobody else can change */
    self->places = self->rows == NULL ? NULL : PyMem_Calloc(PyList_GET_SIZE(rows) + 1, sizeof(Place));
    if (self->places == NULL) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(self->rows); number++) {
        self->places[number].dict = dict_of(PyTuple_GET_ITEM(PyList_GET_ITEM(self->rows, number), 0));
    }
    return (PyObject *)self;
}

static int places_traverse(Places *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->rows);
    return 0;
}

static int places_clear(Places *self)
{
    PyMem_Free(self->places);
    self->places = NULL;
    Py_CLEAR(self->rows);
    return 0;
}

static void places_dealloc(Places *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    places_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *changed(Places *self, PyObject *argument)
{
    const Py_ssize_t first = PyLong_AsSsize_t(argument);
    if (first == -1 && PyErr_Occurred()) {
        return NULL;
    }
    PyObject *rows = self->rows;
    if (rows == NULL || first < 0) {
        PyErr_SetString(PyExc_ValueError, "no such row");
        return NULL;
    }
    for (Py_ssize_t number = first; number < PyList_GET_SIZE(rows); number++) {
        Place *place = &self->places[number];
        const uint64_t version = version_of(place->dict);
        if (version != 0 && version == place->version) {
            continue;
        }
        const int same = row_is_same(place->dict, PyList_GET_ITEM(rows, number));
        if (same < 0) {
            return NULL;
        }
        if (!same) {
            return PyLong_FromSsize_t(number);
        }
        place->version = version;
    }
    return PyLong_FromLong(-1);
}

static PyMethodDef places_methods[] = {
    {"changed", (PyCFunction)changed, METH_O, "The number of the first changed row, from the given one on; or -1."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot places_slots[] = {
    {Py_tp_new, places_new},
    {Py_tp_traverse, places_traverse},
    {Py_tp_clear, places_clear},
    {Py_tp_dealloc, places_dealloc},
    {Py_tp_methods, places_methods},
    {0, NULL},
};

static PyType_Spec places_spec = {
    "edgetrain.native._same.Places", sizeof(Places), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, places_slots,
};

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

static PyObject *objects(PyObject *module, PyObject *rows)
{
    if (!PyList_Check(rows)) {
        PyErr_SetString(PyExc_TypeError, "a list is expected");
        return NULL;
    }
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(rows); place++) {
        PyObject *row = row_at(rows, place, 3);
        if (row == NULL) {
            return NULL;
        }
        PyObject *object = PyTuple_GET_ITEM(row, 0), *then = PyTuple_GET_ITEM(row, 2);
        if ((PyObject *)Py_TYPE(object) != PyTuple_GET_ITEM(row, 1)) {
            Py_RETURN_FALSE;
        }
        if (then == Py_None) {
            continue;
        }
        PyObject *now = PyObject_GenericGetDict(object, NULL);
        if (now == NULL) {
            return NULL;
        }
        Py_DECREF(now); /* the object holds a reference */
        if (now != then) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

static PyObject *orders(PyObject *module, PyObject *rows)
{
    if (!PyList_Check(rows)) {
        PyErr_SetString(PyExc_TypeError, "a list is expected");
        return NULL;
    }
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(rows); place++) {
        PyObject *row = row_at(rows, place, 2);
        if (row == NULL) {
            return NULL;
        }
        if (!PyType_Check(PyTuple_GET_ITEM(row, 0))) {
            PyErr_Format(PyExc_TypeError, "row %zd holds no class", place);
            return NULL;
        }
        if (((PyTypeObject *)PyTuple_GET_ITEM(row, 0))->tp_mro != PyTuple_GET_ITEM(row, 1)) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

static int list_holds(PyObject *list, PyObject *then, uint64_t *version)
{
    if (PyList_GET_SIZE(list) != PyTuple_GET_SIZE(then)) {
        return 0;
    }
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(then); at++) {
        if (PyList_GET_ITEM(list, at) != PyTuple_GET_ITEM(then, at)) {
            return 0;
        }
    }
    return 1;
}

static int set_holds(PyObject *set, PyObject *then, uint64_t *version)
{
    const PySetObject *table = (PySetObject *)set;
    if (table->used != PyTuple_GET_SIZE(then)) {
        return 0;
    }
    /* A removed member leaves a dummy, with a hash that no member has. */
    Py_ssize_t at = 0;
    for (const setentry *entry = table->table; entry <= table->table + table->mask; entry++) {
        if (entry->key == NULL || entry->hash == -1) {
            continue;
        }
        if (at == PyTuple_GET_SIZE(then) || entry->key != PyTuple_GET_ITEM(then, at++)) {
            return 0;
        }
    }
    return at == PyTuple_GET_SIZE(then);
}

static int dict_holds(PyObject *dict, PyObject *then, uint64_t *version)
{
    const uint64_t now = version_of(dict);
    if (now != 0 && now == *version) {
        return 1;
    }
    if (2 * PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(then)) {
        return 0;
    }
    Py_ssize_t position = 0;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &position, &key, &value); at += 2) {
        if (key != PyTuple_GET_ITEM(then, at) || value != PyTuple_GET_ITEM(then, at + 1)) {
            return 0;
        }
    }
    *version = now;
    return 1;
}

/* versions: one for each row, or NULL. */
static PyObject *each_holds(PyObject *rows, int (*is_kind)(PyObject *),
                            int (*holds)(PyObject *, PyObject *, uint64_t *), uint64_t *versions)
{
    if (!PyList_Check(rows)) {
        PyErr_SetString(PyExc_TypeError, "a list is expected");
        return NULL;
    }
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(rows); place++) {
        PyObject *row = row_at(rows, place, 2);
        if (row == NULL) {
            return NULL;
        }
        PyObject *container = PyTuple_GET_ITEM(row, 0), *then = PyTuple_GET_ITEM(row, 1);
        if (!is_kind(container) || !PyTuple_Check(then)) {
            PyErr_Format(PyExc_TypeError, "row %zd holds another kind of container", place);
            return NULL;
        }
        if (!holds(container, then, versions == NULL ? NULL : versions + place)) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

static int is_list(PyObject *object)
{
    return PyList_CheckExact(object);
}

static int is_dict(PyObject *object)
{
    return PyDict_CheckExact(object);
}

static int is_set(PyObject *object)
{
    return Py_IS_TYPE(object, &PySet_Type);
}

static PyObject *lists(PyObject *module, PyObject *rows)
{
    return each_holds(rows, is_list, list_holds, NULL);
}

static PyObject *sets(PyObject *module, PyObject *rows)
{
    return each_holds(rows, is_set, set_holds, NULL);
}

static PyObject *dicts(PyObject *module, PyObject *arguments)
{
    PyObject *rows, *versions;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &rows, &PyByteArray_Type, &versions)) {
        return NULL;
    }
    if (PyByteArray_GET_SIZE(versions) != PyList_GET_SIZE(rows) * (Py_ssize_t)sizeof(uint64_t)) {
        PyErr_SetString(PyExc_TypeError, "eight bytes of versions for each row are expected");
        return NULL;
    }
    return each_holds(rows, is_dict, dict_holds, (uint64_t *)PyByteArray_AS_STRING(versions));
}

static PyMethodDef methods[] = {
    {"functions", functions, METH_O, "Whether each function has its code and its defaults."},
    {"objects", objects, METH_O, "Whether each object has its class and its __dict__."},
    {"orders", orders, METH_O, "Whether each class has its bases in their order."},
    {"lists", lists, METH_O, "Whether each list holds the same objects in the same order."},
    {"sets", sets, METH_O, "Whether each set holds the same objects in the same order."},
    {"dicts", dicts, METH_VARARGS, "Whether each dict holds the same keys and values in the same order."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_same", NULL, -1, methods};

PyMODINIT_FUNC PyInit__same(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module == NULL ? NULL : PyType_FromSpec(&places_spec);
    if (type == NULL || PyModule_AddObject(module, "Places", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
