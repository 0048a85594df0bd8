"""The networks that the papers train, one file each, written from their papers.

Every builder takes `classes`, `input_size` and `width` by name and returns an `nn.Module` in training mode
with fresh weights. An argument that means nothing to a network, or that it cannot work with, is refused with
a UserError.
"""
