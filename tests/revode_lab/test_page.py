"""The self-contained page: everything escaped, nothing requested, nothing left to chance."""

from __future__ import annotations

import os
import re
import xml.dom.minidom

import pytest

from revode_lab.charts import INK, chart_style, svg
from revode_lab.page import Page

NASTY = "<script>alert('x')</script> & \"quotes\""


def make_figure(colour: str = "C0"):
    from matplotlib.figure import Figure

    with chart_style():
        figure = Figure()
        axes = figure.subplots()
        axes.plot([1, 2, 3], [3, 1, 2], color=colour, label="loss")
        axes.imshow([[0.0, 1.0], [1.0, 0.0]])
        axes.set(xlabel="step", ylabel="loss")
        axes.legend()
    return figure


def make_page() -> Page:
    page = Page(NASTY, NASTY)
    page.heading(NASTY)
    page.text(NASTY)
    page.cards([(NASTY, NASTY, NASTY)])
    page.table([NASTY, "n"], [[NASTY, 3]], NASTY)
    page.figure(svg(make_figure()), NASTY, NASTY)
    page.figure(svg(make_figure()), "again", "the same figure a second time")
    page.details(NASTY, NASTY)
    return page


def test_every_text_is_escaped():
    text = make_page().render()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert 'aria-label="&lt;script&gt;' in text


def test_page_requests_nothing():
    text = make_page().render()
    links = re.findall(r"""(?:\b(?:src|href|action)=|url\()["']?([^"')\s>]+)""", text)
    assert links
    assert all(link.startswith(("#", "data:")) for link in links), links
    assert "http://" not in text
    assert "https://" not in text
    assert "Content-Security-Policy" in text


def test_ids_are_unique_even_for_a_figure_shown_twice():
    text = make_page().render()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert ids
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:url\(#|href="#)([^")]+)', text)
    assert references
    assert set(references) <= set(ids)


def test_the_same_figure_gives_the_same_markup():
    assert svg(make_figure()) == svg(make_figure())
    assert svg(make_figure()) != svg(make_figure("C1"))


def test_figure_is_well_formed_and_takes_the_colour_of_the_page():
    markup = svg(make_figure())
    assert INK not in markup
    assert "currentColor" in markup
    assert "<style" not in markup
    assert "<metadata" not in markup
    xml.dom.minidom.parseString(markup.replace("<svg ", '<svg xmlns:xlink="x" ', 1))


def test_neighbouring_figures_share_a_grid():
    assert make_page().render().count('<div class="figures">') == 1


def test_numbers_stand_at_the_right():
    page = Page("t")
    page.table(["name", "value", "mixed"], [["a", "1.5 %", 1], ["b", 20, "x"]])
    text = page.render()
    assert text.count("class=number") == 3
    with pytest.raises(ValueError, match="2 columns"):
        page.table(["a", "b"], [[1]])


def test_write_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    make_page().write(path)
    before = path.read_text()
    assert before.startswith("<!DOCTYPE html>")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ValueError, match="disk full"):
        Page("other").write(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_table_of_ten_columns_is_seen_whole_on_a_laptop(tmp_path):
    from browser import Visit

    heads = [
        "network",
        "layers",
        "paper's theory",
        "largest Re λ",
        "max abs Re λ / max abs λ",
        "h in use, of its bound",
    ]
    heads += [f"growth of {what}" for what in ("perturbations", "the signal", "the gradient")]
    page = Page("wide")
    page.table(
        [*heads, "reconstruction error, float32"],
        [["hamiltonian-74", 18, "stability not guaranteed", *7 * ["1.8e-08"]]],
    )
    measure = (
        "<script>for (const e of document.querySelectorAll('.scroll')) e.id = e.scrollWidth - e.clientWidth</script>"
    )
    text = re.sub(r"<meta http-equiv.*?>", "", page.render()).replace("</body>", f"{measure}</body>")
    (tmp_path / "wide.html").write_text(text)
    hidden = re.findall(r'class="scroll" id="(\d+)"', Visit(tmp_path / "wide.html", "1280,900").document)
    assert hidden == ["0"]
