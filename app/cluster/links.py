"""A word on nodes whose GPUs come with NVLink and have no links, and the button that gives it to them."""

import streamlit as st

from app import state
from app.text import plain
from engine import units
from engine.catalogue.links import NodeLinks, nodes_without_links, usual_links, with_usual_links
from engine.cluster import Cluster, Node

MOST_NAMES = 3


def show(cluster: Cluster) -> None:
    """In a row of the page. Nothing where every node has the links that its GPUs come with, or none come with any."""
    lacking = nodes_without_links(cluster)
    if not lacking:
        return
    st.warning(plain(_in_words(lacking)), icon=":material/link_off:")
    st.button("Add NVLink", icon=":material/add_link:", on_click=_add, args=(cluster,))


def _in_words(nodes: list[Node]) -> str:
    """`node 1: 8 H100 without links inside, though they come with NVLink (450 GB/s out of each H100)`"""
    names = ", ".join(node.name for node in nodes[:MOST_NAMES]) + (" …" if len(nodes) > MOST_NAMES else "")
    counts = " or ".join(dict.fromkeys(f"{len(node.gpus)} {node.gpus[0].type}" for node in nodes))
    types = dict.fromkeys(node.gpus[0].type for node in nodes)
    rates = ", ".join(f"{_rate(usual_links([kind, kind]))} out of each {kind}" for kind in types)
    return f"{names}: {counts} without links inside, though they come with NVLink ({rates})"


def _rate(links: NodeLinks) -> str:
    return f"{units.digits(links.bandwidth / 1e9)} GB/s"


def _add(cluster: Cluster) -> None:
    state.open_cluster(with_usual_links(cluster))
    state.notice("NVLink added; its latency of 5 µs is assumed until calibrated")
