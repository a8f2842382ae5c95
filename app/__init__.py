"""The studio: a Streamlit shell over the engine.

Six floors, with the pages on top. A part imports from its own floor and from those below, never from above, and no two parts
import each other in a circle; `tests/test_architecture.py` reads this list and holds every import against it.

    6 pages: one task of a person a page, a thin script
    5 main, header, running, sidebar: the frame around every page
    4 affinity, cluster, export, launch, operate, optimise, papers, review, timeline, what_if, workload: a page each
    3 components, failing, kept, layer_hops, model_catalogue, opening, own_model, plan_chooser, samples: shared by pages
    3 studies, uploads, verdict_line, visitor, warm_up, widgets: shared by pages, too
    2 cached, simulations, state: engine calls by content, and the session
    1 charts, tables: engine objects in, figures and tables out; no Streamlit in charts
"""
