import pytest

from kdcli.deploy.old_machines import measure_encoders


@pytest.fixture
def at_once(monkeypatch):
    """Nothing is warmed up by time."""
    monkeypatch.setattr(measure_encoders, "WARM_SECONDS", 0.0)


@pytest.fixture
def times(monkeypatch):
    """`times(first, second)`: measurements find these seconds by call; what was asked of each."""

    def give(*measurements):
        asked, remaining = [], iter(measurements)

        def interleaved(calls, device, runs, seconds, is_warm=False):
            asked.append((list(calls), runs, seconds, is_warm))
            return next(remaining)

        monkeypatch.setattr(measure_encoders, "interleaved", interleaved)
        return asked

    return give
