"""Small models that tests share, each with what makes it worth testing in its name."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Given(nn.Module):
    """One parameter, handed out as it is: its gradient is what backward is given."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(elements, dtype=dtype))

    def forward(self) -> Tensor:
        return self.parameter.view_as(self.parameter)


class GivenGradients(nn.Module):
    """Parameters whose gradients are exactly what the forward call is given.

    A forward call takes a coefficient for some of the parameters, by name. Their gradients
    arrive in the reverse of the order in which the call names them; the others get none.
    """

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, coefficients: Mapping[str, Tensor]) -> Tensor:
        device = next((coefficient.device for coefficient in coefficients.values()), None)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for name, coefficient in coefficients.items():
            term = (self.get_parameter(name) * coefficient.conj()).sum()
            total = total + (term.real if term.is_complex() else term).double()
        return total


class MixedDtypes(nn.Module):
    """A chain of linear layers, each computed in its own dtype."""

    def __init__(self, dtypes: Sequence[torch.dtype], width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.double()


class OddLayouts(nn.Module):
    """Parameters that are transposed, sliced, channels_last, scalar and empty."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.sliced = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.permuted = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.expanded = nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        # x: rows x 4
        y = (x @ self.transposed) @ self.sliced * self.scalar
        y = y + torch.einsum("ri,iaj->rj", x, self.permuted).sum(1, keepdim=True)
        image = torch.stack([x, y], 1).unsqueeze(3).expand(-1, -1, -1, 3)
        pixels: Tensor = self.convolution(image)
        # Gradients that reach these parameters are expanded, with strides of 0.
        return pixels.flatten(1) + self.expanded.sum() + self.empty.sum()


class Tied(nn.Module):
    """A language model whose output layer shares the embedding's weight, and a layer used twice."""

    def __init__(self, tokens: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.hidden = nn.Linear(width, width)
        self.output = nn.Linear(width, tokens, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.hidden(self.hidden(self.embedding(tokens)).tanh())
        y: Tensor = self.output(x)
        return y


class Recurrent(nn.Module):
    """An LSTM: one flat block of memory behind several parameters, each used many times."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y


def mlp(*widths: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _image_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1, bias=False),
        nn.Flatten(),
        nn.Linear(64, 3),
    ).to(memory_format=torch.channels_last)


def _draw_normal(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape, dtype=dtype)


@dataclass(frozen=True)
class Case:
    """A model, and how to draw a batch for it.

    Attributes:
        make: returns a new model.
        batch: returns a batch of the given number of rows; the loss is the mean over rows.
        rounding: how far, relative to the largest element, gradients of the whole batch may be
            from those of its parts, because 16-bit layers round them differently.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    rounding: float = 0


CASES = {
    "mlp": Case(lambda: mlp(5, 7, 7, 3), _draw_normal(5, dtype=torch.float64)),
    "channels_last": Case(_image_net, _draw_normal(3, 4, 4)),
    "attention": Case(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True),
        _draw_normal(5, 8),
    ),
    "recurrent": Case(Recurrent, _draw_normal(6, 5)),
    "tied": Case(Tied, lambda rows: torch.randint(11, (rows, 4))),
    "odd layouts": Case(OddLayouts, _draw_normal(4)),
    "mixed dtypes": Case(
        lambda: MixedDtypes(
            [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float32]
        ),
        _draw_normal(6),
        rounding=0.05,
    ),
    "complex": Case(
        lambda: mlp(4, 5, 2, dtype=torch.complex128), _draw_normal(4, dtype=torch.complex128)
    ),
    "complex64": Case(
        lambda: mlp(4, 5, 2, dtype=torch.complex64), _draw_normal(4, dtype=torch.complex64)
    ),
}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a loss that is a mean over the batch."""
    output: Tensor = model(batch)
    return output.abs().square().mean()
