"""Write throughput and what a million texts cost, at the price per hour that the user gave."""

from kdcli.deploy.measurements import UNSTABLE_PHRASE, LatencyRow
from kdcli.report.schema import Throughput


def price_columns(batch: Throughput | LatencyRow | None) -> dict[str, str]:
    """Return the throughput and the cost of a million texts, with empty texts without a cost.

    A throughput is `1,234` or, if it is unstable, `≥1,234, unstable`.
    """
    rate = text = ""
    if batch is not None and batch.cost_per_million is not None:
        number = batch.texts_per_second or 0.0
        rate = f"{number:,.0f}" if number >= 100 else f"{number:#.3g}".rstrip(".")
        rate = f"≥{rate}, unstable" if batch.unstable else rate
        text = cost(batch.cost_per_million, unstable=batch.unstable)
    return {"texts/s": rate, "cost/M texts": text}


def cost(value: float, *, unstable: bool = False) -> str:
    """Write a price in a currency without a name: `0.29` or, if unstable, `≤0.29, unstable`."""
    text = f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"
    return f"≤{text}, unstable" if unstable else text


def price_sentence(
    price_per_hour: float | None, model: Throughput | None, baseline: Throughput | None
) -> str:
    """State the cost of a million texts next to the baseline's.

    The result is empty without a price or a measurement.
    """
    if price_per_hour is None or model is None or model.cost_per_million is None:
        return ""
    text = f"At {price_per_hour:g} an hour, a million texts cost "
    if model.unstable:
        text += f"at most {cost(model.cost_per_million)} ({UNSTABLE_PHRASE})"
    else:
        text += cost(model.cost_per_million)
    # A cost that is only a bound says little next to another one.
    if baseline is not None and baseline.cost_per_million is not None and not baseline.unstable:
        text += f" instead of {cost(baseline.cost_per_million)}"
    return f"{text}, in batches of {model.batch_size} × {model.seq_len} tokens."


def price_note(price_per_hour: float | None) -> str:
    """Explain the column of costs; empty without a price."""
    if price_per_hour is None:
        return ""
    return (
        f"cost/M texts: the cost of a million texts, if an hour of this machine costs "
        f"{price_per_hour:g} and it does nothing else."
    )
