"""What the Optimise page says of send orders before anything is planned."""

from engine.network import Network


def in_words(network: Network) -> str:
    """A sentence where ports always reach their whole rate, with a space after it; else nothing."""
    if network.contended or network.gpus < 3:
        return ""
    relays = "" if network.direct else ", relays inside nodes aside"
    return (
        f"So all sends at once take hardly longer than the best order{relays}; What-if shows from which contention on ordering "
        "pays. "
    )
