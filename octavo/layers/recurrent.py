"""Recurrent layers, which take the place of attention and keep a state for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.kernels.recurrence_specs import GatedNormSpec
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.linear import Linear
from octavo.layers.module import Module
from octavo.layers.parameter import Parameter
from octavo.layers.recurrence_config import RecurrenceConfig


class Conv1d(Module):
    """Weights of a depthwise causal convolution, as checkpoints store them; a model's factors of
    its input channels are multiplied into them."""

    def __init__(
        self, channels: int, kernel: int, bias: bool = False, scales: float | Sequence[float] = 1.0
    ):
        self.weight = Parameter(channels, 1, kernel, exact=True, times=scales)
        self.bias = Parameter(channels, exact=True) if bias else None


class GatedNorm(Module):
    """The gated norm between a recurrence and the output projection, or the gate alone."""

    def __init__(self, spec: GatedNormSpec):
        self.spec = spec
        self.weight = Parameter(*spec.constants, exact=True) if spec.normed else None

    def forward(self, x: Activations, gate: Activations, ctx: ForwardContext) -> Activations:
        weight = None if self.weight is None else self.weight.value
        return ctx.ops.gated_norm(x, gate, weight, self.spec)


class ShortConv(Module):
    """LFM2's short convolution between two gates."""

    def __init__(self, state_index: int, hidden_size: int, config: RecurrenceConfig):
        self.state_index = state_index
        self.spec = config.conv
        self.in_proj = Linear(hidden_size, 3 * config.conv.channels, config.proj_bias)
        self.conv = Conv1d(config.conv.channels, config.conv.kernel, config.conv_bias)
        self.out_proj = Linear(config.conv.channels, hidden_size, config.proj_bias)

    def forward(self, x: Activations, ctx: ForwardContext) -> Activations:
        """Maps x [T, hidden_size] to [T, hidden_size], as all classes below do."""
        return self.out_proj(_convolve(self, self.conv, self.in_proj(x, ctx), ctx), ctx)


class Mamba2(Module):
    """Mamba 2 (arXiv 2405.21060); one projection gives the gate, the convolution's input, and the
    step sizes."""

    def __init__(self, state_index: int, hidden_size: int, config: RecurrenceConfig):
        scan = config.mamba
        assert scan is not None and config.norm is not None
        self.state_index = state_index
        self.spec, self.scan = config.conv, scan
        width = scan.width + config.conv.channels + scan.heads
        self.in_proj = Linear(hidden_size, width, config.proj_bias)
        self.conv1d = Conv1d(
            config.conv.channels, config.conv.kernel, config.conv_bias, config.channel_scales
        )
        self.dt_bias = Parameter(scan.heads, exact=True)
        self.A_log = Parameter(scan.heads, exact=True)
        self.D = Parameter(scan.heads, exact=True)
        self.norm = GatedNorm(config.norm)
        self.out_proj = Linear(scan.width, hidden_size, config.proj_bias)

    def forward(self, x: Activations, ctx: ForwardContext) -> Activations:
        projected = self.in_proj(x, ctx)
        scanned = ctx.ops.selective_scan(
            _convolve(self, self.conv1d, projected, ctx),
            projected,
            self.A_log.value,
            self.D.value,
            self.dt_bias.value,
            ctx.states(self.state_index),
            self.scan,
        )
        return self.out_proj(self.norm(scanned, projected, ctx), ctx)


class GatedDeltaNet(Module):
    """Linear attention by the gated delta rule (arXiv 2412.06464), as in Qwen3-Next.

    Rows of the projections are in the order in which ops read columns: all queries, all keys, all
    values; and all write strengths, then all decays.
    """

    def __init__(self, state_index: int, hidden_size: int, config: RecurrenceConfig):
        scan = config.delta
        assert scan is not None and config.norm is not None
        self.state_index = state_index
        self.spec, self.scan = config.conv, scan
        self.in_proj_qkv = Linear(hidden_size, config.conv.channels)
        self.in_proj_z = Linear(hidden_size, scan.width)
        self.in_proj_ba = Linear(hidden_size, 2 * scan.value_heads)
        self.conv1d = Conv1d(config.conv.channels, config.conv.kernel, config.conv_bias)
        self.dt_bias = Parameter(scan.value_heads, exact=True)
        self.A_log = Parameter(scan.value_heads, exact=True)
        self.norm = GatedNorm(config.norm)
        self.out_proj = Linear(scan.width, hidden_size)

    def forward(self, x: Activations, ctx: ForwardContext) -> Activations:
        projected, opening = self.in_proj_qkv(x, ctx), self.in_proj_z(x, ctx)
        gates = self.in_proj_ba(x, ctx)
        scanned = ctx.ops.delta_rule(
            _convolve(self, self.conv1d, projected, ctx),
            gates,
            self.A_log.value,
            self.dt_bias.value,
            ctx.states(self.state_index),
            self.scan,
        )
        return self.out_proj(self.norm(scanned, opening, ctx), ctx)


def _convolve(
    mixer: ShortConv | Mamba2 | GatedDeltaNet, conv: Conv1d, x: Activations, ctx: ForwardContext
) -> Activations:
    bias = None if conv.bias is None else conv.bias.value
    states = ctx.states(mixer.state_index)
    return ctx.ops.short_conv(x, conv.weight.value, bias, states, mixer.spec)
