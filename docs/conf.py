"""Configuration of the documentation site: `sphinx-build -W docs build/docs`."""

import shutil
import sys
from pathlib import Path

import flaxzoo

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project, author, copyright = "flaxzoo", "the flaxzoo authors", "the flaxzoo authors"
version = release = flaxzoo.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
]
exclude_patterns = ["**/.ipynb_checkpoints"]

suppress_warnings = ["ref.python"]  # a field may have the name of a field elsewhere

# Notebooks are shown with their stored outputs.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Docstrings follow the Google style; single backticks are code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # `Attributes:` describes members that autodoc also lists
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "undoc-members": True, "inherited-members": False}
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "sphinx_book_theme"
html_title = "flaxzoo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {
    "repository_url": "https://github.com/flaxzoo/flaxzoo",
    "use_repository_button": True,
    "show_navbar_depth": 1,
    "collapse_navbar": True,  # only the current section; else every page has links to all pages
    "show_toc_level": 2,
    "home_page_in_toc": False,
    # The sidebar has the search field and the name.
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
}


def _make_pages(app):
    """Writes the pages that are generated from the code, and copies the notebooks."""
    import generate

    generate.write_all(HERE)
    notebooks = HERE / "notebooks"
    notebooks.mkdir(exist_ok=True)
    for path in sorted((HERE.parent / "colab").glob("*.ipynb")):
        shutil.copy(path, notebooks / path.name)


def setup(app):
    """Connects the generation of pages to the start of a build."""
    app.connect("config-inited", lambda app, _config: _make_pages(app))
