import pytest
import torch

from nanovllm.kernels.pointwise.embedding import embed_shard, embed_shard_reference


@pytest.mark.parametrize("hidden", [64, 96, 1000])
@pytest.mark.parametrize(("start", "num_valid"), [(0, 40), (40, 40), (80, 21), (120, 0), (48, 1)])
def test_equals_its_twin(
    hidden: int, start: int, num_valid: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Ids of this rank's first and last row, of its neighbours' and of padded rows; and no ids."""
    weight = torch.randn(40, hidden, dtype=dtype, device=device)
    edges = [0, start - 1, start, start + num_valid - 1, start + num_valid, start + 39, start + 40, 100]
    ids = torch.tensor([token for token in edges if token >= 0], dtype=torch.int32, device=device)
    expected = embed_shard_reference(ids, weight, start, num_valid)
    assert torch.equal(embed_shard(ids, weight, start, num_valid), expected)
    assert embed_shard(ids[:0], weight, start, num_valid).shape == (0, hidden)
    mine = (ids >= start) & (ids < start + num_valid)
    assert (expected.abs().sum(1) > 0).equal(mine)
