"""Attention by the Triton kernels whose sums have one order (kernels/attention/fixed_order.py)."""

from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.kernels.attention.fixed_order_decode import FixedOrderDecode
from nanovllm.kernels.attention.fixed_order_plan import FixedOrderPlan
from nanovllm.kernels.attention.fixed_order_prefill import FixedOrderPrefill, fixed_order_config


class FixedOrderTritonBackend(TritonBackend):
    """TritonBackend by kernels that give a token the same bits in every step."""

    _plan, _decode, _prefill = FixedOrderPlan, FixedOrderDecode, FixedOrderPrefill
    _prefill_config = staticmethod(fixed_order_config)
