"""The ops that capture itself treats unlike others, each with the reason; all else it asks of their entries (ops/)."""

from __future__ import annotations

import torch

aten = torch.ops.aten

# Autograd asks where a tensor is, several times at each of its nodes: no work of the step.
DEVICE = torch.ops.prim.device.default
# A constant that the model's code makes comes in by these: the graph carries its value.
LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
# Another object for the same tensor: a number of its own, and no op.
SAME = (aten.detach.default, aten.alias.default)
ALIAS = aten.alias.default
# The same in place: the object stays what it is.
DETACH_IN_PLACE = aten.detach_.default
# Gives a tensor the memory of another one, which a step could not do again.
EXCHANGES = aten.set_
# Random numbers fill memory in its order: what these make is contiguous, also where activations are not.
LIKE = (aten.empty_like.default, aten.rand_like.default, aten.randn_like.default)
# Asked of a fake tensor, about its memory.
IS_DENSE = aten.is_non_overlapping_and_dense.default
# Autograd clones before it changes an activation in place, which a graph has no need of.
CLONE = aten.clone.default
# Split in gradient of weight and bias, and gradient of input: then the layer's input can go before the latter comes.
CONVOLUTION_BACKWARD = aten.convolution_backward.default
# Its backward can read the result in place of the input, which then need not be kept.
HARDTANH, HARDTANH_BACKWARD = str(aten.hardtanh.default), str(aten.hardtanh_backward.default)
# In the backward pass these carry the tag of ops that draw random numbers, and draw none.
NO_DRAWS = "dropout"
