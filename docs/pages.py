"""Pages of the site that are made from other files: README, CHANGELOG, CONTRIBUTING as they stand, settings from the code."""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
AS_THEY_STAND = {
    "index.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CITATION.cff": "CITATION.cff",
    "examples/tabular.py": "examples/tabular.py",
    "examples/adapters.py": "examples/adapters.py",
}
SECTIONS = {  # of a recipe, in its order; the classes that hold them
    "": "Recipe",
    "data": "DataSettings",
    "model": "ModelSettings",
    "training": "ClientSettings",
    "server": "ServerSettings",
    "fedmix": "FedmixSettings",
    "local_global": "LocalGlobalSettings",
    "privacy": "PrivacySettings",
    "evaluation": "EvaluationSettings",
    "checkpoint": "CheckpointSettings",
}
SOURCES = (
    "src/fedmix/settings/recipe.py",
    "src/fedmix/core/settings.py",
    "src/fedmix/methods/fedmix_settings.py",
    "src/fedmix/methods/local_global.py",
)
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
    classes = {
        node.name: (node, text.splitlines())
        for text in ((ROOT / source).read_text() for source in SOURCES)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    }
    page = [ABOUT]
    for section, name in SECTIONS.items():
        node, lines = classes[name]
        page += [f"## {f'[{section}]' if section else 'Of the recipe itself'}", "", ast.get_docstring(node) or "", ""]
        page += ["| setting | default | meaning |", "|---|---|---|"]
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and field.value and ast.unparse(field.target) not in SECTIONS:
                default = ast.unparse(field.value)
                default = {"field(default_factory=list)": "[]", "field(default_factory=dict)": "{}"}.get(
                    default, default
                )
                remark = " ".join(lines[field.lineno - 1 : field.end_lineno]).partition("# ")[2].rstrip(" )")
                remark = " ".join(remark.replace("|", "\\|").split())
                full = f"{section}.{ast.unparse(field.target)}".lstrip(".")
                page.append(f"| `{full}` | `{default}` | {remark} |")
        page.append("")
    return "\n".join(page)
