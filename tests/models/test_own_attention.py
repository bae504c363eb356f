"""q, k and v of attention that own code computes itself, next to float64 arithmetic."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from scipy.special import softmax
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from kdcli.errors import UsageError
from kdcli.losses import build_objective
from kdcli.models.capture import capture
from kdcli.models.layout import Layout
from kdcli.types import ModelShape, Needs

ROWS, LENGTH, HEADS, EACH = 2, 7, 4, 6
WIDTH = HEADS * EACH
LAYOUT = Layout(layers="layers", interface=False, products=True)
ALL = Needs(*(frozenset({1, 2}) for _ in range(3)))


def by_torch(q, k, v, **settings):
    return F.scaled_dot_product_attention(q, k, v, **settings)


def spelled_out(q, k, v):
    scores = q @ k.transpose(-1, -2)
    scores = scores / math.sqrt(EACH)
    return F.dropout(scores.softmax(-1), 0.5, training=False) @ v


def scaled_before(q, k, v):
    return torch.softmax(torch.matmul(q / EACH**0.5, k.mT), -1).matmul(v)


def in_place(q, k, v):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores *= EACH**-0.5
    scores.masked_fill_(hidden()[:, None, None], -1e9)
    return nn.Softmax(dim=-1)(scores.float()) @ v


def flat(q, k, v):
    bias = torch.zeros(ROWS * HEADS, LENGTH, LENGTH)
    q, k, v = (x.reshape(ROWS * HEADS, LENGTH, EACH) for x in (q, k, v))
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=EACH**-0.5)
    scores = scores.view(ROWS, HEADS, LENGTH, LENGTH).float()
    weights = scores.softmax(-1).view(ROWS * HEADS, LENGTH, LENGTH)
    return torch.bmm(weights, v).view(ROWS, HEADS, LENGTH, EACH)


def by_einsum(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("blhd,bmhd->bhlm", q, k) * EACH**-0.5).softmax(-1)
    return torch.einsum("bhlm,bmhd->blhd", weights, v).transpose(1, 2)


def grouped(q, k, v):
    q = q.view(ROWS, 2, 2, LENGTH, EACH)
    scores = q @ k[:, :, None].transpose(-1, -2) * EACH**-0.5
    return (scores.softmax(-1) @ v[:, :, None]).view(ROWS, HEADS, LENGTH, EACH)


def hidden():
    return torch.arange(LENGTH)[None] >= torch.tensor([LENGTH, 4])[:, None]


SEEN = ~hidden()[:, None, None]
EARLIER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
WAYS = {
    "torch": (by_torch, HEADS, None),
    "boolean mask": (lambda *qkv: by_torch(*qkv, attn_mask=SEEN), HEADS, SEEN),
    "additive mask": (
        lambda *qkv: by_torch(*qkv, attn_mask=torch.zeros(SEEN.shape).masked_fill(~SEEN, -1e30)),
        HEADS,
        SEEN,
    ),
    "causal": (lambda *qkv: by_torch(*qkv, is_causal=True), HEADS, EARLIER),
    "own scale": (lambda q, k, v: by_torch(q / EACH**0.5, k, v, scale=1.0), HEADS, None),
    "grouped heads": (lambda *qkv: by_torch(*qkv, enable_gqa=True), 2, None),
    "dropout": (lambda *qkv: by_torch(*qkv, dropout_p=0.3), HEADS, None),
    "spelled out": (spelled_out, HEADS, None),
    "scaled before": (scaled_before, HEADS, None),
    "in place": (in_place, HEADS, SEEN),
    "flat": (flat, HEADS, None),
    "einsum": (by_einsum, HEADS, None),
    "grouped by broadcast": (grouped, 2, None),
}


class Block(nn.Module):
    """An attention with a residual connection, which may be checkpointed or fail."""

    def __init__(self, attend, key_heads):
        super().__init__()
        self.attend, self.key_heads = attend, key_heads
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, key_heads * EACH) for _ in range(2))

    def forward(self, x):
        q, k, v = (self.by_head(linear, x) for linear in (self.q, self.k, self.v))
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)

    def by_head(self, linear, x):
        return linear(x).unflatten(-1, (-1, EACH)).transpose(1, 2)


class Network(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, attend=by_torch, key_heads=HEADS, reentrant=None):
        sizes = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "hidden_size": WIDTH}
        super().__init__(PreTrainedConfig(**sizes))
        torch.manual_seed(0)
        self.table = nn.Embedding(30, WIDTH)
        self.layers = nn.ModuleList(Block(attend, key_heads) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, input_ids):
        x = self.table(input_ids)
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return BaseModelOutput(x)


def batch():
    ids = torch.randint(30, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids}


def exact(block, x):
    """q, k and v of a block in float64, with each head of k and v as often as it is read."""
    found = []
    for linear, heads in ((block.q, HEADS), (block.k, block.key_heads), (block.v, block.key_heads)):
        y = x.double() @ linear.weight.double().T + linear.bias.double()
        y = torch.stack(
            [y[..., n * EACH : (n + 1) * EACH] for n in range(heads) for _ in range(HEADS // heads)]
        )
        found.append(y.transpose(0, 1))
    return found


def attention(q, k, seen):
    scores = torch.stack([a @ b.T for a, b in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True)])
    scores = scores.view(ROWS, HEADS, LENGTH, LENGTH) / EACH**0.5
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_captured_signals_are_those_of_the_attention(way):
    attend, key_heads, seen = WAYS[way]
    network = Network(attend, key_heads)
    signals = capture(network, ALL, layout=LAYOUT)(batch())
    states = network.table(batch()["input_ids"])
    q, k, v = exact(network.layers[0], states)
    for captured, wanted in ((signals.q[1], q), (signals.k[1], k), (signals.v[1], v)):
        # Where q is scaled is up to the network; its product with k is not.
        torch.testing.assert_close(captured.double(), wanted, atol=1e-5, rtol=1e-5)
    own = attention(signals.q[1].double(), signals.k[1].double(), seen)
    torch.testing.assert_close(own, attention(q, k, seen), atol=1e-6, rtol=1e-5)
    assert signals.q[2].shape == signals.k[2].shape == signals.v[2].shape
    if way != "dropout":
        second = network.layers[0](states)
        q, k, _ = exact(network.layers[1], second)
        torch.testing.assert_close(
            attention(signals.q[2].double(), signals.k[2].double(), seen),
            attention(q, k, seen),
            atol=1e-6,
            rtol=1e-4,
        )


def losses(network, way="minilm"):
    shape = ModelShape(2, WIDTH, 4 * WIDTH, HEADS)
    objective = build_objective(way, {}, shape, shape)
    with torch.no_grad():
        wanted = capture(Network(spelled_out), objective.teacher_needs, layout=LAYOUT)(batch())
    own = capture(network, objective.student_needs, layout=LAYOUT)(batch())
    return sum(objective.terms(wanted, own).values())


def other_weights(network):
    with torch.no_grad():
        for n, parameter in enumerate(network.parameters()):
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(n)
            )
    return network


def gradients(network):
    loss = losses(other_weights(network))
    assert loss > 0.001
    network.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "way", ["torch", "spelled out", "scaled before", "einsum", "grouped heads"]
)
def test_a_checkpointed_network_gets_the_same_gradients(way):
    attend, key_heads, _ = WAYS[way]
    plain = gradients(Network(attend, key_heads))
    again = gradients(Network(attend, key_heads, reentrant=False))
    assert plain.keys() == again.keys()
    assert {"layers.1.q.weight", "layers.1.v.weight", "layers.0.k.bias"} <= plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient)


def test_layers_that_run_without_gradients_are_refused():
    network = Network(reentrant=True)
    with pytest.raises(UsageError, match="runs its layers without gradients") as caught:
        losses(network)
    assert "use_reentrant=False" in (caught.value.hint or "")
    with torch.no_grad():
        assert losses(network) >= 0


def test_attention_in_a_function_that_is_not_torchs_is_refused():
    def by_numpy(q, k, v):
        q, k, v = (x.numpy() for x in (q, k, v))
        return torch.from_numpy(softmax(q @ k.swapaxes(-1, -2), axis=-1) @ v)

    network = Network(by_numpy)
    with torch.no_grad(), pytest.raises(UsageError, match="that is not torch's") as caught:
        capture(network, ALL, layout=LAYOUT)(batch())
    assert "config.json" in (caught.value.hint or "")


def test_under_autocast_signals_are_close():
    exact_signals = capture(Network(spelled_out), ALL, layout=LAYOUT)(batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = capture(Network(spelled_out), ALL, layout=LAYOUT)(batch())
    for kind in ("q", "k", "v"):
        one, two = getattr(exact_signals, kind)[2], getattr(rough, kind)[2].float()
        assert 0 < (one - two).norm() < 0.03 * one.norm()


def test_a_failing_layer_leaves_nothing_behind():
    calls = []

    def failing(q, k, v):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("own code")
        return by_torch(q, k, v)

    network = Network(failing)
    watch = capture(network, ALL, layout=LAYOUT)
    with pytest.raises(KeyError, match="own code"):
        watch(batch())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    # Torch's functions are its own again, and the next pass is complete.
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert torch._C._len_torch_function_stack() == 0
    assert set(watch(batch()).q) == {1, 2}


def test_threads_capture_their_own_networks():
    networks = [Network(by_torch), other_weights(Network(by_torch))]
    wanted = [capture(network, ALL, layout=LAYOUT)(batch()).q[2] for network in networks]
    found: list[list[torch.Tensor]] = [[], []]

    def work(n):
        run = capture(networks[n], ALL, layout=LAYOUT)
        for _ in range(20):
            found[n].append(run(batch()).q[2])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(2):
        assert len(found[n]) == 20
        assert all(torch.equal(each, wanted[n]) for each in found[n])
    assert not torch.equal(*wanted)
