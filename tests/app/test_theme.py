"""What the pages and charts are drawn with: contrasts of WCAG AA in both themes, and fonts that are files of ours."""

import colorsys
import tomllib
from pathlib import Path

import plotly.graph_objects as go
import pytest

from app.charts import theme

APP = Path(theme.__file__).parents[1]
CONFIG = tomllib.loads((APP / ".streamlit" / "config.toml").read_text())
TOKENS = {name: CONFIG["theme"][name] for name in ("light", "dark")}
TEXT, GRAPHICS = 4.5, 3.0
"""Least contrasts of text, and of lines and bars that carry a meaning."""
CAPTION = 0.6
"""Opacity of Streamlit's captions."""


def channels(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [channel / 255 for channel in channels(colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(colour: str, ground: str) -> float:
    dark, light = sorted((luminance(colour), luminance(ground)))
    return (light + 0.05) / (dark + 0.05)


def over(colour: str, page: str, opacity: float) -> str:
    mixed = (opacity * top + (1 - opacity) * under for top, under in zip(channels(colour), channels(page), strict=True))
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def test_the_contrast_of_black_and_white_is_21():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("name", TOKENS)
def test_texts_have_the_contrast_of_aa_on_the_page_and_on_what_lies_on_it(name):
    tokens = TOKENS[name]
    for page in (
        tokens["backgroundColor"],
        tokens["secondaryBackgroundColor"],
        tokens["dataframeHeaderBackgroundColor"],
    ):
        texts = {token: colour for token, colour in tokens.items() if token.endswith("TextColor")}
        texts |= {token: tokens[token] for token in ("textColor", "linkColor")}
        for token in ("textColor", "codeTextColor"):
            texts[f"{token} of a caption"] = over(tokens[token], page, CAPTION)
        for token, colour in texts.items():
            assert contrast(colour, page) >= TEXT, (token, page)


@pytest.mark.parametrize("name", TOKENS)
def test_the_primary_colour_is_read_on_the_page_and_white_on_it(name):
    tokens = TOKENS[name]
    assert contrast("#FFFFFF", tokens["primaryColor"]) >= TEXT
    assert contrast(tokens["primaryColor"], tokens["backgroundColor"]) >= TEXT


def test_the_name_on_an_open_popover_of_the_dark_sidebar_is_read():
    """Streamlit writes it in the primary colour, darker by a quarter of all lightness."""
    hue, lightness, saturation = colorsys.rgb_to_hls(
        *(part / 255 for part in channels(TOKENS["dark"]["sidebar"]["primaryColor"]))
    )
    darker = colorsys.hls_to_rgb(hue, lightness - 0.25, saturation)
    name = "#" + "".join(f"{round(255 * part):02x}" for part in darker)
    assert contrast(name, TOKENS["dark"]["secondaryBackgroundColor"]) >= TEXT


def test_the_dark_page_is_as_light_as_its_primary_colour_allows():
    """The least grey step up, and no primary colour has both contrasts any more."""
    lighter = "#" + "".join(f"{part + 1:02x}" for part in channels(TOKENS["dark"]["backgroundColor"]))
    most_light_under_white = 1.05 / TEXT - 0.05
    assert (most_light_under_white + 0.05) / (luminance(lighter) + 0.05) < TEXT


@pytest.mark.parametrize("name", TOKENS)
def test_lines_and_marks_of_charts_stand_out_from_the_page(name):
    page = TOKENS[name]["backgroundColor"]
    for colour in (theme.TEAL, theme.MARK, theme.SECOND, theme.ink(name == "dark")):
        assert contrast(colour, page) >= GRAPHICS, colour


@pytest.mark.parametrize("name", TOKENS)
def test_what_is_written_beside_a_plot_is_read(name):
    dark = name == "dark"
    figure = go.Figure(go.Heatmap(z=[[1]], colorbar={"title": "unit"})).add_annotation(text="note", font_size=14)
    theme.legible(figure, dark)
    fonts = [figure.layout.xaxis.tickfont, figure.layout.yaxis.title.font, figure.layout.legend.font]
    fonts += [figure.data[0].colorbar.tickfont, figure.layout.annotations[0].font]
    for font in fonts:
        assert font.size >= 12 and contrast(font.color, TOKENS[name]["backgroundColor"]) >= TEXT
    assert figure.layout.annotations[0].font.size == 14
    theme.legible(go.Figure(go.Bar(y=[1])).add_scatter(y=[1]), dark)


def test_each_face_is_a_file_beside_its_licence():
    static = APP / "static"
    assert CONFIG["server"]["enableStaticServing"]
    faces = CONFIG["theme"]["fontFaces"]
    for face in faces:
        file = APP / face["url"].removeprefix("app/")
        assert file.read_bytes()[:4] == b"wOF2", file
        licence = next(file.parent.glob(f"{face['family'].replace(' ', '')}-OFL.txt")).read_text()
        assert "SIL OPEN FONT LICENSE Version 1.1" in licence
    families = {face["family"] for face in faces}
    assert {CONFIG["theme"][use].split(",")[0] for use in ("font", "headingFont")} == families
    # Everybody who reaches the studio may read this folder: fonts and their licences alone.
    assert {path.suffix for path in static.rglob("*") if path.is_file()} == {".woff2", ".txt"}


def test_the_wordmark_needs_no_font():
    """A browser lends a picture none of the page's."""
    assert "<text" not in (APP / "wordmark.svg").read_text()
