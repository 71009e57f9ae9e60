"""Pages of the site that are made from other files: README, CHANGELOG, CONTRIBUTING as they stand, settings from the code."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from fedmix.settings.explain import about_section, sections, settings_of

ROOT = Path(__file__).parent.parent
AS_THEY_STAND = {
    "index.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CITATION.cff": "CITATION.cff",
    "examples/tabular.py": "examples/tabular.py",
    "examples/adapters.py": "examples/adapters.py",
}
SHIM = (
    "https://unpkg.com/iframe-worker/shim"  # what the theme asks a content network for, so that search works from disk
)
ABOUT = """# Settings

Every setting of a recipe with its default. On the command line `--set fedmix.eta=0.5`, in Python `fedmix={"eta": 0.5}`, in a
TOML file a line in the section's table. A recipe's `[scales.X]`, `[methods.X]` and `[sides.X]` are exceptions for a scale, a
method or a kind of side information.
"""


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The site makes no request to anybody: the shim comes from the site itself."""
    return output.replace(SHIM, "../" * page.url.count("/") + "assets/iframe-worker.js")


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """404.html, which may be served from any depth: it needs no search from disk."""
    return re.sub(rf'<script[^>]*src="?{re.escape(SHIM)}"?[^>]*></script>', "", output_content)


def on_files(files: Any, config: Any) -> Any:
    for name, source in AS_THEY_STAND.items():
        text = (ROOT / source).read_text()
        if name.endswith(".md"):
            text = re.sub(r"\]\(docs/", "](", text)
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "settings.md", content=settings_page()))
    return files


def settings_page() -> str:
    page = [ABOUT]
    for section in sections():
        page += [f"## {f'[{section}]' if section else 'Of the recipe itself'}", "", about_section(section), ""]
        page += ["| setting | default | meaning |", "|---|---|---|"]
        for setting in settings_of(section):
            meaning = setting.meaning.replace("|", "\\|")
            page.append(f"| `{setting.name}` | `{setting.default}` | {meaning} |")
        page.append("")
    return "\n".join(page)
