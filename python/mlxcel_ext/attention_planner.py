"""The attention plan of each step: shared prefixes where that pays, and the last plan as long as it serves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import env
from .ops import (
    AttentionPlan,
    PageTable,
    SharedPrefixTree,
    detect_shared_prefix,
    plan_attention,
    plan_cascade,
)
from .ops.cascade import default_costs
from .outcomes import CascadeDeclined, CascadeFailed, FusedCascade, Outcomes

if TYPE_CHECKING:
    from .models.config import ModelConfig

Int32 = npt.NDArray[np.int32]

_logger = logging.getLogger("mlxcel_ext")


class AttentionPlanner:
    """Makes one plan a step, which all layers share.

    A cascade plan where requests begin with the same pages and reading them together is estimated to pay. An
    error in that is counted, and costs nothing but the gain.
    """

    def __init__(self, config: ModelConfig, attention_path: str, *, batch_invariant: bool) -> None:
        windows = set(config.windows)
        self._options: dict[str, Any] = {
            "num_qo_heads": config.num_qo_heads,
            "num_kv_heads": config.num_kv_heads,
            "window_left": windows.pop() if len(windows) == 1 else -1,
            "batch_invariant": batch_invariant,
        }
        self._path = attention_path
        self._declined = _reason_to_decline(attention_path, mixed_windows=bool(windows))
        self._costs = default_costs() if self._declined is None else None
        self._tree: SharedPrefixTree | None = None
        self._plan: AttentionPlan | None = None
        self._planned: tuple[Int32 | None, ...] = (
            None,
            None,
            None,
            None,
        )  # what the plan and the tree are of
        self._outcome: FusedCascade | CascadeDeclined | CascadeFailed | None = self._declined

    def plan(self, table: PageTable, qo_indptr: Int32 | None, outcomes: Outcomes) -> AttentionPlan:
        """The plan for this table; counts how it came about."""
        plan, tree = self._plan, self._tree
        if self._declined is None and not self._is_planned(table, qo_indptr):
            try:
                tree = detect_shared_prefix(table, qo_indptr, previous=tree)
            except Exception as error:
                plan = tree = None
                self._fail(error)
        if plan is not None and tree is self._tree and plan.matches(table, qo_indptr):
            outcomes.count("mlxcel_attention_plans_total", "reused")
        else:
            outcomes.count("mlxcel_attention_plans_total", "made")
            plan = self._plan = self._make(table, qo_indptr, tree)
        self._tree = tree
        self._planned = (table.kv_indptr, table.kv_indices, table.first_page_offset, qo_indptr)
        self._count(outcomes)
        return plan

    def _is_planned(self, table: PageTable, qo_indptr: Int32 | None) -> bool:
        """Whether the table is the last one, or that one advanced: nothing can have changed."""
        indptr, indices, offset, queries = self._planned
        return (
            table.kv_indptr is indptr
            and table.kv_indices is indices
            and table.first_page_offset is offset
            and qo_indptr is queries
        )

    @property
    def decode_path(self) -> str:
        """The label of the last plan's decode launches."""
        return "cascade" if isinstance(self._outcome, FusedCascade) else self._path

    def _make(
        self, table: PageTable, qo_indptr: Int32 | None, tree: SharedPrefixTree | None
    ) -> AttentionPlan:
        if tree is not None:
            try:
                plan = plan_cascade(table, qo_indptr, tree=tree, costs=self._costs, **self._options)
            except Exception as error:
                self._fail(error)
            else:
                self._outcome = plan.cascade
                return plan
        return plan_attention(table, qo_indptr, **self._options)

    def _fail(self, error: Exception) -> None:
        _logger.warning("cascade planning failed, this step is flat: %s: %s", type(error).__name__, error)
        self._outcome = CascadeFailed(type(error).__name__)

    def _count(self, outcomes: Outcomes) -> None:
        match self._outcome:
            case FusedCascade(members=members, shared_tokens=tokens):
                outcomes.count("mlxcel_cascade_shared_tokens_total", amount=tokens)
                outcomes.count("mlxcel_cascade_member_sequences_total", amount=members)
            case CascadeDeclined(reason):
                outcomes.count("mlxcel_cascade_declined_total", reason)
            case CascadeFailed(reason):
                outcomes.count("mlxcel_cascade_failures_total", reason)


def _reason_to_decline(attention_path: str, *, mixed_windows: bool) -> CascadeDeclined | None:
    """Why no step of this model can share, here and now; None where some can."""
    if not env.switch("MLXCEL_CASCADE_ATTENTION"):
        return CascadeDeclined("switched_off")
    if attention_path != "fused_v2":
        return CascadeDeclined("path")
    return CascadeDeclined("windows") if mixed_windows else None
