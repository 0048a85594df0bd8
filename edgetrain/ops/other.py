"""Linear algebra, geometry of images, and what else has little to be said of."""

from __future__ import annotations

from edgetrain.ops.entry import Entry, of_torch, own
from edgetrain.ops.work import moves

# Decompositions, which fail for some matrices, and histograms, which do for some numbers.
of_torch(
    Entry(raises="for values"),
    "_linalg_eigh _linalg_svd linalg_eig linalg_inv_ex linalg_cholesky_ex cholesky cholesky_inverse lu_unpack histc",
)
of_torch(Entry(one_type=True), "_cdist_forward grid_sampler_2d grid_sampler_3d linalg_cross")
of_torch(Entry(category="copy and layout", work=moves), "upsample_nearest2d upsample_nearest2d_backward")
# Not an op: the time that a step waits for a transfer, in a timeline.
WAIT = "edgetrain.page.wait"
own(Entry(kernels=(), category="wait for storage"), WAIT.removeprefix("edgetrain."))
