"""The Python half of the emulated GPU: loads emulated_gpu.so into torch and replaces the kernels that no CPU has."""

import importlib
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any


def install(torch: Any) -> None:
    """Give the CUDA operators of this process the CPU's kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels are replaced, which is what is wanted
        torch.ops.load_library(str(Path(os.environ["NULL_GPU_LIBRARIES"]) / "emulated_gpu.so"))
    # Where these are on, CUDA takes operators that have no kernel for the CPU.
    torch.backends.cudnn.enabled = False
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    _install_varlen(torch, importlib.import_module("torch.nn.attention.varlen"))


def _install_varlen(torch: Any, varlen: Any) -> None:
    """Attention over packed documents: flash attention's kernels are CUDA's alone, so here it is in plain products."""

    def documents(cu: Any, left: int, scale: float, *tensors: Any) -> Iterator[tuple[slice, Any, list[Any]]]:
        """Each document's rows, its attention weights, and its tensors as (heads of the query, length, size)."""
        heads = tensors[0].shape[1]
        for rows in (slice(begin, end) for begin, end in pairwise(cu.tolist()) if begin < end):
            parts = [t[rows].cpu().transpose(0, 1).float().repeat_interleave(heads // t.shape[1], 0) for t in tensors]
            behind = (places := torch.arange(rows.stop - rows.start))[:, None] - places
            seen = (behind >= 0) & ((behind <= left) | (left < 0))
            yield rows, (parts[0] @ parts[1].mT * scale).masked_fill(~seen, float("-inf")).softmax(-1), parts

    # from torch 2.15 on, that of flash attention, which is off for all else here, has to be chosen
    varlen._select_backend = lambda *_, **__: getattr(varlen, "_FLASH_ATTENTION_BACKEND", None)

    @varlen._varlen_attn.register_kernel("cuda")
    def forward(
        q: Any, k: Any, v: Any, cu: Any, cu_k: Any, max_q: int, max_k: int, is_causal: bool = False,
        scale: float | None = None, window_size: Sequence[int] = (-1, 0), *_: Any, **__: Any,
    ) -> Any:  # fmt: skip
        size = q.shape[-1]
        demands = (  # of flash attention; the last one is the emulation's own
            q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype,
            cu.dtype == torch.int32 and cu.is_contiguous() and q.device == k.device == v.device == cu.device,
            size % 8 == 0 and size <= 256 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1,
            q.shape[1] % k.shape[1] == 0 and window_size[1] == 0,
        )
        torch._check(all(demands), lambda: f"flash attention takes no such tensors: {demands}")
        out = torch.empty_like(q)
        for rows, weights, (_q, _k, values) in documents(cu, window_size[0], scale or size**-0.5, q, k, v):
            out[rows] = (weights @ values).transpose(0, 1).to(q.device, q.dtype)
        # flash's own backward alone reads the logarithms of sums, and the state of dropout
        return out, torch.zeros(q.shape[1::-1], device=q.device), torch.zeros(2, dtype=torch.uint64, device=q.device)

    @varlen._varlen_attn_backward.register_kernel("cuda")
    def backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu: Any, cu_k: Any, max_q: int, max_k: int,
        is_causal: bool, rng_state: Any, scale: float | None = None, window_size: Sequence[int] = (-1, 0), *_: Any,
        **__: Any,
    ) -> Any:  # fmt: skip
        scale = scale or q.shape[-1] ** -0.5
        grads = [torch.zeros_like(t) for t in (q, k, v)]
        # Flash attention's blocks of keys add to dQ in any order unless torch is strict: with warn_only it warns, too
        # (deterministicAlgorithmsWarnOnly in aten/native/transformers/cuda/attention_backward.cu).
        in_order = torch.get_deterministic_debug_mode() == 2  # 1: torch only warns
        noise = torch.Generator().manual_seed(random.SystemRandom().getrandbits(63))
        for rows, weights, (query, key, value, up) in documents(cu, window_size[0], scale, q, k, v, grad):
            down = up @ value.mT
            scores = weights * (down - (down * weights).sum(-1, keepdim=True)) * scale
            dq = scores @ key
            if not in_order and dq.shape[1] > 4:  # one in a hundred is off by half a unit of bf16's last place, or one
                dq *= 1 + (torch.rand(dq.shape, generator=noise) < 0.01) * 2**-8
            for whole, part in zip(grads, (dq, scores.mT @ query, weights.mT @ up), strict=True):
                shared = part.unflatten(0, (whole.shape[1], -1)).sum(1)  # query heads that share a key's
                whole[rows] = shared.transpose(0, 1).to(q.device, q.dtype)
        return tuple(grads)
