import pytest

from kdcli.data.text import shards


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of a few dozen documents."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 600)
