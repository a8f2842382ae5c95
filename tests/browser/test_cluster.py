"""The drawing board as a person uses it: a mixed cluster from nothing with mouse and keyboard; in `make everything` also by the
table, and a plan on it."""

import contextlib
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from app.state.stored import Session, write
from engine import store
from tests import everything
from tests.browser.conftest import go, run_systems, settle, visit
from tests.cases.samples import sample, sample_model

ROOT = Path(__file__).parents[2]


class Board:
    """The board through the parts of it that a person sees."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.drawing = page.get_by_role("application")
        self.palette = page.get_by_role("group", name="GPU types to add")
        self.inspector = page.get_by_role("group", name="Inspector of what is selected")

    def item(self, name: str | re.Pattern) -> Locator:
        return self.drawing.get_by_role("button", name=name)

    def type(self, name: str) -> Locator:
        return self.palette.get_by_role("button", name=name, exact=True)

    def field(self, label: str) -> Locator:
        return self.inspector.get_by_label(label)

    def edit(self, label: str, value: str) -> None:
        self.field(label).fill(value)
        self.page.keyboard.press("Enter")
        settle(self.page)

    @property
    def free(self) -> tuple[float, float]:
        """A place on the board that no node covers."""
        box = self.drawing.bounding_box()
        return box["x"] + box["width"] - 10, box["y"] + 10

    def drag(self, what: Locator, to: Locator | tuple[float, float]) -> None:
        """With the mouse, from the middle of one thing to another."""
        mouse = self.page.mouse
        mouse.move(*middle(what))
        mouse.down()
        x, y = to if isinstance(to, tuple) else middle(to)
        mouse.move(x - 30, y + 20, steps=3)
        mouse.move(x, y, steps=3)
        mouse.up()  # and on: a person does not wait for the server either

    def expect_ranks(self, *gpus: str) -> None:
        """`H100 in node 1`, in rank order."""
        named = [f"GPU {rank}, {gpu.replace(' in ', ', in ')}" for rank, gpu in enumerate(gpus)]
        labels = [gpu.get_attribute("aria-label") for gpu in self.item(re.compile("^GPU")).all()]
        assert labels == named


def middle(locator: Locator) -> tuple[float, float]:
    box = locator.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    """True if two boxes of the page overlap."""
    sides = (("x", "width"), ("y", "height"))
    return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in sides)


NODE, TYPE, SEND = 1, 2, 3


def cells(page: Page, column: int) -> Locator:
    """A column of the table below, which draws on a canvas and keeps its texts as elements for screen readers."""
    table = page.get_by_test_id("stDataFrame").first
    return table.locator(f'table [role="gridcell"][aria-colindex="{column}"]')


@pytest.fixture
def board(page: Page, studio: str, shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    """The Cluster page of a session that has a recording and a model, but no cluster."""
    monkeypatch.setenv("SWITCHYARD_DATA", str(shared_folder))
    digest = store.save_workload(sample("alpha-code"))
    inputs = Session(workloads={digest: "alpha-code"}, workload=digest, model=sample_model(layers=8))
    store.save_session("without-cluster", write(inputs))
    go(page, f"{studio}/cluster?session=without-cluster")
    board = Board(page)
    board.drawing.scroll_into_view_if_needed()  # below the gallery
    settle(page)
    return board


def test_a_mixed_cluster_is_drawn_from_nothing(board: Board) -> None:
    page, keys = board.page, board.page.keyboard
    # Nodes with the mouse, which grow; a wrong one goes back to where it came from.
    board.drag(board.type("H200"), board.free)
    expect(page.get_by_role("button", name="Presets")).to_be_visible()  # the gallery has gone
    settle(page)
    board.drawing.scroll_into_view_if_needed()
    board.drag(board.item("GPU 0,"), board.palette)
    expect(page.get_by_text("Nothing drawn yet")).to_be_visible()
    settle(page)  # the elements below the board go, and the window may scroll
    place = board.drawing.bounding_box()
    board.drag(board.type("H100"), board.free)
    board.drag(board.type("A100-80"), board.item("Node node 1"))
    board.drag(board.type("V100-32"), board.free)
    board.drag(board.type("H100"), board.free)
    board.expect_ranks("H100 in node 1", "A100-80 in node 1", "V100-32 in node 2", "H100 in node 3")
    settle(page)
    assert board.drawing.bounding_box() == place, "it stays where it was while a person draws"
    # A GPU between nodes, and out of its node.
    board.drag(board.item("GPU 1,"), board.item("Node node 2"))
    board.expect_ranks("H100 in node 1", "V100-32 in node 2", "A100-80 in node 2", "H100 in node 3")
    board.drag(board.item("GPU 1,"), board.free)
    board.expect_ranks("H100 in node 1", "A100-80 in node 2", "H100 in node 3", "V100-32 in node 4")
    # Several at once, with the numbers of a link, a node and a GPU.
    for node in (1, 2, 3, 4):
        board.item(f"GPU {node - 1},").click(modifiers=["Shift"] if node > 1 else [])
    board.inspector.get_by_role("button", name="more GPUs like this").click()
    expect(page.get_by_text("8 GPUs in 4 nodes")).to_be_visible()
    board.item("Links of node 2 to").click()
    board.edit("Send, Gb/s per GPU", "40")
    expect(board.item("Links of node 2 to the fabric, 80 Gb/s out, 400 Gb/s in together")).to_be_visible()
    board.item("Node node 1").click(position={"x": 20, "y": 14})
    expect(board.field("Links inside, GB/s per GPU")).to_have_value("450")  # H100 come with it
    board.edit("Name", "fast")
    board.item("GPU 7,").click()
    board.edit("Memory, GiB", "-1")
    expect(page.get_by_text("Memory, GiB: give a number above 0. The old one stays.")).to_be_visible()
    expect(board.field("Memory, GiB")).to_have_value("32")
    # The table and the summary follow.
    nodes = ["node 2"] * 2 + ["node 3"] * 2 + ["node 4"] * 2
    expect(cells(page, NODE)).to_have_text(["fast", "fast", *nodes])
    expect(cells(page, TYPE)).to_have_text(["H100"] * 2 + ["A100-80"] * 2 + ["H100"] * 2 + ["V100-32"] * 2)
    expect(cells(page, SEND)).to_have_text(["400", "400", "40", "40", "400", "400", "50", "50"])
    expect(page.get_by_test_id("stMetric").filter(has_text="GPUs")).to_contain_text("8")
    expect(page.get_by_test_id("stMetric").filter(has_text="Memory")).to_contain_text("544 GiB")

    # Undo and redo, by key and by button, are seen by all.
    keys.press("Escape")
    keys.press("Control+z")
    expect(cells(page, NODE)).to_have_text(["node 1", "node 1", *nodes])
    page.get_by_role("button", name="Redo").click()
    expect(cells(page, NODE)).to_have_text(["fast", "fast", *nodes])

    # The keyboard alone: a GPU from the palette into a node of its own, named, and taken away again.
    board.type("L40S").focus()
    keys.press("Shift+Enter")
    settle(page)
    board.item("GPU 8,").focus()
    keys.press("ArrowLeft")
    expect(board.item("Node node 1, 1 GPU")).to_be_focused()
    keys.press("Enter")
    expect(board.field("Name")).to_be_focused()
    keys.press("Control+a")
    keys.type("spare")
    keys.press("Tab")
    expect(cells(page, NODE)).to_have_text(["fast", "fast", *nodes, "spare"])
    settle(page)
    expect(board.field("Links inside")).to_be_focused()
    keys.press("Escape")
    keys.press("Delete")
    settle(page)
    expect(page.get_by_text("8 GPUs in 4 nodes")).to_be_visible()
    expect(board.drawing.locator(":focus")).to_have_count(1)

    if everything.WANTED:
        edit_below(board)
        plan_and_lay_over(board)


def edit_below(board: Board) -> None:
    """The table, and the field below it, are followed by the board."""
    page, keys = board.page, board.page.keyboard
    latency = page.get_by_label("Latency per send over the fabric")
    expect(latency).to_have_count(1)  # every edit of the board brings a new one
    latency.fill("7")
    keys.press("Enter")
    expect(board.item("Fabric of my cluster, latency 7 µs")).to_be_visible()
    settle(page)  # the table is drawn anew after the board
    table = page.get_by_test_id("stDataFrame").first
    table.scroll_into_view_if_needed()
    table.click(position={"x": 60, "y": 52})
    keys.press("Enter")
    page.locator("#portal textarea").fill("first")
    keys.press("Enter")
    expect(board.item("Node first, 1 GPU, links 3.6 Tb/s per GPU")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    settle(page)
    expect(board.item("Node first")).to_have_count(0)


def plan_and_lay_over(board: Board) -> None:
    """A plan on the drawn cluster, laid over it, also in a narrow window."""
    page = board.page
    visit(page, "Optimise")
    run_systems(page)
    visit(page, "Cluster")
    page.get_by_text("Overlay the open plan").click()
    expect(page.get_by_text(re.compile(r"^Bars: .* busy longest, sending, .* \(simulated"))).to_be_visible()
    expect(board.item(re.compile("^GPU .* experts, .* of the tokens"))).to_have_count(8)
    expect(board.item(re.compile("^GPU .* busy longest, sending"))).to_have_count(1)
    arrow = board.drawing.locator(".arrow").bounding_box()
    for name in board.drawing.locator(".type").all():
        assert not overlap(arrow, name.bounding_box()), "the mark leaves the type's name free"

    # A narrow window has all types in sight next to the board, the fastest first.
    page.set_viewport_size({"width": 1024, "height": 768})
    settle(page)
    assert board.palette.evaluate("types => types.scrollHeight <= types.clientHeight")
    last, drawn = (part.bounding_box() for part in (board.palette.get_by_role("button").last, board.drawing))
    assert last["y"] + last["height"] <= drawn["y"] + drawn["height"]
    names = board.palette.get_by_role("button").all_inner_texts()
    assert names.index("B200") < names.index("H100") < names.index("A100-80") and names[-1] == "RTX 2080 Ti"


def test_edits_in_any_order_keep_the_drawing_whole_and_can_all_be_undone(browser: Browser) -> None:
    files = ROOT / "app" / "components" / "cluster_canvas" / "board.js", Path(__file__).with_name("random_edits.js")
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    with contextlib.closing(browser.new_page()) as page:
        assert page.evaluate(f"() => {{ {code} }}") == []
