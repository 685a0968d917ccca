"""The documentation site: ``make site`` builds it into build/site, with warnings as errors.

Sphinx, because the docstrings are reStructuredText with equations and cross-references, and it reads them as they are.
MyST lets the pages stay Markdown that is readable without the site too. The theme, furo, loads nothing from elsewhere.
"""

import sys
from pathlib import Path

import pfl_ext

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "pfl_ext"
author = "pfl_ext developers"
copyright = "pfl_ext developers"
version = release = pfl_ext.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "mathml",
    "repository_links",
    "reference",
    "short_names",
]
root_doc = "index"
exclude_patterns = ["_ext"]

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4
# GitHub's alert blocks and the like are not used; a page that looks fine there must be fine here.
suppress_warnings: list[str] = []

# pfl_ext.flower is documented where Flower is not installed too.
autodoc_mock_imports = ["flwr"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
viewcode_line_numbers = True

html_theme = "furo"
html_title = "pfl_ext"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
# It would fetch the pages found, which browsers do not do for a site that is opened from a disk.
html_show_search_summary = False
html_theme_options = {"top_of_page_buttons": [], "navigation_with_keys": True}
