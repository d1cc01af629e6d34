from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from enfold.blocks import pack_rows, split_rows, unpack_rows


@given(num_rows=st.integers(2, 40), num_shares=st.integers(2, 9), per_row=st.integers(1, 3))
def test_unpack_undoes_split(num_rows: int, num_shares: int, per_row: int) -> None:
    x = torch.arange(num_rows * per_row * 2).view(num_rows * per_row, 2)
    packing = pack_rows(num_rows, num_shares)
    assert packing is not None
    shares = [split_rows(x, packing, share) for share in range(num_shares)]
    assert {len(share) for share in shares} == {packing.share_size * per_row}
    assert torch.equal(unpack_rows(torch.cat(shares), packing), x)


@given(num_rows=st.integers(2, 40), num_shares=st.integers(2, 9))
def test_padding_rows_are_copies_of_the_last_row(num_rows: int, num_shares: int) -> None:
    packing = pack_rows(num_rows, num_shares)
    assert packing is not None
    rows = torch.arange(num_rows)
    padded = torch.cat([split_rows(rows, packing, share) for share in range(num_shares)])
    assert torch.equal(padded[num_rows:], rows[-1:].expand(len(padded) - num_rows))


def test_other_dimensions() -> None:
    packing = pack_rows(5, 2)
    assert packing is not None
    planes = torch.arange(30).view(3, 5, 2)
    parts = [split_rows(planes, packing, share, dim=1) for share in range(2)]
    assert torch.equal(torch.cat(parts, 1)[:, :5], planes)


def test_a_split_that_can_not_help_is_declined() -> None:
    assert pack_rows(1, 4) is None
    assert pack_rows(5, 1) is None
