"""`model.h`: what a user's own program needs.

In:  a program. Out: the text of the file.
"""

from __future__ import annotations

from edgetrain.firmware.program import Program
from edgetrain.ops.c import Scene


def header(program: Program, scene: Scene) -> str:
    """scene: that of train_step, for counts as products with BATCH."""
    inputs = program.inputs
    lines = [
        "#ifndef MODEL_H", "#define MODEL_H", "", "#include <stdint.h>", "",
        f'#include "kernels/{program.update.file}.h"', "",
        f"enum {{ BATCH = {program.batch}, MODEL_TENSORS = {len(program.trained)}, MODEL_INPUTS = {len(inputs)} }};",
        f"enum {{ MODEL_BATCH_BYTES = {sum(item.n_bytes for item in inputs)} }};",
        "enum { MODEL_OK = 0, MODEL_BAD_LABEL = 1 };",
        f"#define MODEL_PREDICTS {int(program.predict is not None)}",
        "/* Steps between two checkpoints in flash (checkpoint.h); 0: none. */",
        f"#define MODEL_KEEPS_EVERY {program.keep_every}", "",
        "/* The batch: fill it before train_step and predict. */",
        *(f"extern {item.c_type} {item.c_name}[{scene.count(item.n_elements)}];" for item in inputs),
        "typedef struct {", "    void *data;", "    uint32_t n_bytes;", "} model_input;",
        "extern const model_input model_inputs[MODEL_INPUTS];", "",
        "/* The optimizer's settings, by parameter group, and the seed of dropout: may be changed. */",
        f"extern {program.update.file}_settings settings[{len(program.groups)}];",
        "extern uint32_t model_seed;",
        "/* Steps done, with the current one. */",
        "extern uint32_t step_number;", "",
        "/* Sets everything that a step changes to its initial value. Call it first. */",
        "void model_init(void);",
        "/* One step on the batch: forward, backward, update.",
        " * MODEL_BAD_LABEL: a label is no class; nothing was changed. */",
        "int train_step(float *loss_value);",
    ]  # fmt: skip
    if program.predict is not None:
        result = program.predict.graph.tensors[program.predict.graph.outputs[0]]
        lines += [
            f"/* The model's outputs for the batch, {list(result.shape)}: valid until the next call. */",
            f"enum {{ MODEL_RESULTS = {result.n_elements} }};",
            "const float *predict(void);",
        ]
    return "\n".join(lines) + "\n" + _TABLE


_TABLE = """
/* Everything that a step changes, by its name in the model. */
typedef struct {
    const char *name;
    void *data;
    uint32_t n_bytes;
    const unsigned char *first_value; /* NULL: zeros */
} model_tensor;
extern const model_tensor model_tensors[MODEL_TENSORS];
extern const unsigned char model_weights[];
void model_arena(void **data, uint32_t *n_bytes);

/* A debug build (make debug) reports each gradient as soon as it is computed; of a ReLU or clamp, on which side of its
 * bounds each element lies; of a max pool, the argmax of each window. */
#ifdef DEBUG_TENSORS
void show_tensor(const char *name, const void *data, uint32_t n_bytes);
void show_sides(const float *y, uint32_t n, float low, float high);
void show_places(const uint8_t *argmax, uint32_t n);
#else
#define show_tensor(name, data, n_bytes) ((void)0)
#define show_sides(y, n, low, high) ((void)0)
#define show_places(argmax, n) ((void)0)
#endif

#endif
"""
