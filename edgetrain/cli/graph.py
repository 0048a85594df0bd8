"""`edgetrain graph`: a captured training step as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgetrain.cli.models_and_data import build_alone, choose, told_of_batch
from edgetrain.cli.optimizers import make_optimizer
from edgetrain.cli.options import Batch, Classes, Optimizer, Side, Width
from edgetrain.cli.output import Json, notes, print_json
from edgetrain.graph.capture.training import capture, capture_inference
from edgetrain.graph.ir import Graph, to_json
from edgetrain.graph.show import show, summary


def graph(
    model: Annotated[str, typer.Argument(help="A name from the zoo, or file.py:function.")],
    batch: Batch = 1,
    classes: Classes = None,
    input_size: Side = None,
    width: Width = None,
    optimizer: Optimizer = "sgd",
    inference: Annotated[
        bool, typer.Option("--inference", help="Show the prediction in evaluation mode, not a training step.")
    ] = False,
    views: Annotated[bool, typer.Option("--views", help="List views too; they compute nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="Save the graph to this file.")] = None,
    json: Json = False,
) -> None:
    """Show what one training step does, op by op: forward, backward and update.

    Example: edgetrain graph lenet --batch 4
    """
    chosen = choose(model)
    net, task, example = build_alone(chosen, classes=classes, input_size=input_size, width=width, batch=batch)
    captured: Graph
    with told_of_batch(model, "a random batch", example):
        if inference:
            captured = capture_inference(net, example[:1])
        else:
            captured = capture(net, task.loss, make_optimizer(optimizer, net, model), example)
    if out is not None:
        captured.save(out)
        notes.print(f"saved to {out}", soft_wrap=True, markup=False)
    if json:
        print_json(to_json(captured))
    elif out is None:
        print(show(captured, views=views))
    else:
        print("\n".join(summary(captured)))
