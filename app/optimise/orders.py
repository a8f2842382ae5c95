"""What the Optimise page says of send orders before anything is planned."""

from engine.network import Network


def in_words(network: Network) -> str:
    """A sentence where ports always reach their whole rate, with a space after it; else nothing."""
    if network.contended or network.gpus < 3:
        return ""
    relays = "" if network.direct else ", but for orders in which the GPUs of a node relay for each other"
    return (
        f"Sending everything at once is then nearly as fast as the best order{relays}. What-if shows how much contention "
        "makes ordering pay. "
    )
