from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.exact import GRAIN_SIZE, align_activations, aligned_map, aligned_size, is_aligned


@pytest.mark.parametrize(
    "num_elements,dtype,num_threads,aligned",
    [
        (32, torch.float32, 1, True),
        (33, torch.float32, 1, False),
        (32, torch.bfloat16, 1, False),
        (64, torch.bfloat16, 1, True),
        (0, torch.float32, 4, True),
        (2 * GRAIN_SIZE, torch.float32, 2, True),
        (2 * GRAIN_SIZE + 32, torch.float32, 2, False),  # each thread's chunk ends inside a step
        (2 * GRAIN_SIZE + 64, torch.float32, 2, True),
        (2 * GRAIN_SIZE + 32, torch.float32, 1, True),
    ],
)
def test_is_aligned(num_elements: int, dtype: torch.dtype, num_threads: int, aligned: bool) -> None:
    assert is_aligned(num_elements, dtype, num_threads) is aligned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 2904), (1, 7), (0, 4), (77, 4304)])
def test_bits_do_not_hang_on_the_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for activation in (nn.SiLU(), nn.GELU(approximate="tanh"), nn.Sigmoid()):
        whole = aligned_map(activation, x)
        rows = [aligned_map(activation, row) for row in x]
        assert whole.shape == x.shape
        assert torch.equal(whole, torch.stack(rows) if rows else whole)
        torch.testing.assert_close(whole, activation(x), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("num_threads", [3, 4, 6, 8, 16])
def test_bits_do_not_hang_on_the_number_of_threads(num_threads: int) -> None:
    """SiLU has one chunk per grain, GELU one per thread; there may be fewer grains than threads."""
    before = torch.get_num_threads()
    try:
        for rows in (1, 60, 128, 345):
            x = torch.randn(rows, 1436, generator=torch.Generator().manual_seed(rows))
            assert is_aligned(aligned_size(x.numel(), x.dtype, num_threads), x.dtype, num_threads)
            for activation in (nn.SiLU(), nn.GELU(approximate="tanh"), nn.Sigmoid(), nn.Mish()):
                torch.set_num_threads(1)
                want = aligned_map(activation, x)
                torch.set_num_threads(num_threads)
                assert torch.equal(aligned_map(activation, x), want)
    finally:
        torch.set_num_threads(before)


def test_only_activations_are_wrapped() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.SiLU(), nn.Softmax(-1))
    align_activations(module)
    assert ["forward" in vars(child) for child in module] == [False, True, False]
