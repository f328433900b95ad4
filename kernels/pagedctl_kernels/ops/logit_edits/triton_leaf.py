"""The Hopper leaf of the edits: in place, one launch for the rows and one for barred tokens."""

from __future__ import annotations

import torch
import triton

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.interfaces import EditedRows
from pagedctl_kernels.ops.logit_edits import programs
from pagedctl_kernels.ops.logit_edits.torch_reference import check_edits
from pagedctl_kernels.ops.logit_edits.triton_kernel import bar_kernel, edit_kernel
from pagedctl_kernels.ops.torch_checks import expect
from pagedctl_kernels.ops.triton_rows import expect_contiguous, expect_device, row_stride


class TritonLogitEdits:
    def __call__(self, logits: torch.Tensor, edits: EditedRows) -> None:
        """Edit logits float32[R, V] in place; rows that *edits* does not name keep their bits.

        Nothing waits for the device: how many rows and tokens there are is in the shapes of
        *edits*, and row numbers and token ids are not looked at on the host.
        """
        expect("logit_edits: logits", logits, torch.float32, ("R", "V"))
        stride = row_stride("logit_edits: logits", logits)
        vocab = logits.shape[1]
        check_edits(edits, vocab, torch.float32)
        for name, column in vars(edits).items():
            expect_contiguous(f"logit_edits: {name}", column)
            expect_device(f"logit_edits: {name}", column, logits.device)
        edited, barred = len(edits.row), len(edits.barred_row)
        if edited:
            edit_kernel[(triton.cdiv(vocab, programs.BLOCK) * edited,)](
                logits,
                stride,
                edits.row,
                edits.slot,
                edits.repetition,
                edits.presence,
                edits.frequency,
                edits.bias,
                edits.in_prompt.view(torch.uint8),
                edits.counts,
                vocab,
                BLOCK=programs.BLOCK,
                num_warps=programs.WARPS,
                enable_fp_fusion=False,
            )
        if barred:
            bar_kernel[(triton.cdiv(barred, programs.BARRED_BLOCK),)](
                logits,
                stride,
                edits.barred_row,
                edits.barred_token,
                len(logits),
                vocab,
                barred,
                BLOCK=programs.BARRED_BLOCK,
                num_warps=programs.WARPS,
                enable_fp_fusion=False,
            )


def build(site: CallSite, machine: Machine) -> TritonLogitEdits:
    return TritonLogitEdits()
