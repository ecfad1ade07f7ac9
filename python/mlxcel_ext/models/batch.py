"""What one step of the model needs to know about its requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..ops import AttentionPlan, PageTable


@dataclass(frozen=True)
class AttentionBatch:
    """The requests of one step; built once and used by every layer."""

    #: int32 [nnz], absolute position of each new token.
    positions: mx.array
    #: Pages of each request; lengths include the tokens of this step.
    table: PageTable
    #: int32 [batch + 1], new tokens of each request; None for one token a request.
    qo_indptr: npt.NDArray[np.int32] | None
    #: Made for `table` and `qo_indptr`.
    plan: AttentionPlan
    #: int32, rows of the packed tokens whose logits are wanted; None for all.
    logit_rows: mx.array | None = None
