"""Train neural networks on small devices inside a budget, and measure what training really costs.

The public names, one by one. Each arrow of the pipeline is one function and one plain dataclass:
`capture` → Graph → `measure_costs` → Costs → `plan` under a Budget → Plan → `compile` → a step that one calls.
`prepare` does all of it. `model_costs` takes the place of `measure_costs` for a device that is not here.
`profile` measures a step, op by op.
`ops` is the door for ops of your own (docs/adding.md).
For firmware: `lower_for_firmware` → Graph → `plan` → Plan → `export` → a C project.
"""

# ruff: noqa: E402  # Ctrl-C is in order before the imports that take seconds

from edgetrain import interrupts

interrupts.starting()

from edgetrain import ops
from edgetrain.costs.measured import measure_costs
from edgetrain.costs.model import model_costs
from edgetrain.costs.table import Costs
from edgetrain.devices.device import Device
from edgetrain.errors import EdgetrainError, Infeasible, InternalError, UserError
from edgetrain.firmware.export import Project, export
from edgetrain.firmware.lower import lower_for_firmware
from edgetrain.graph.capture.training import capture, capture_inference
from edgetrain.graph.files import Graph
from edgetrain.graph.verify import verify
from edgetrain.measure.profile import Profile, profile
from edgetrain.plan.budget import Budget
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.plan import Plan
from edgetrain.plan.planning import plan
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.compiled import compile_step as compile  # noqa: A004  # et.compile is the stage's name
from edgetrain.run.memory import MemoryTrace
from edgetrain.run.step import Step, prepare

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "CompiledStep",
    "Costs",
    "Device",
    "EdgetrainError",
    "Graph",
    "Infeasible",
    "InternalError",
    "MemoryTrace",
    "Plan",
    "Profile",
    "Project",
    "Step",
    "UserError",
    "__version__",
    "capture",
    "capture_inference",
    "compile",
    "export",
    "keep_all",
    "lower_for_firmware",
    "measure_costs",
    "model_costs",
    "ops",
    "plan",
    "prepare",
    "profile",
    "verify",
]
