"""Everything the papers train, by name: models and the tasks they are trained for.

    zoo.get("lenet")                      what it is, and what others have printed about it
    zoo.build("lenet", input_size=8)      the module
    zoo.get("lenet").example(32)          a random batch (x, y)
    zoo.count(model, x)                   parameters and multiply-adds

Data sets are in `edgetrain.zoo.datasets`.
"""

from edgetrain.zoo.registry import MODELS, Counts, ZooModel, build, count, get, require_room_for_batch
from edgetrain.zoo.tasks import TASKS, Task

__all__ = ["MODELS", "TASKS", "Counts", "Task", "ZooModel", "build", "count", "get", "require_room_for_batch"]
