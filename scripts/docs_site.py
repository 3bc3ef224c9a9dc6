"""Hooks for the documentation site, which generate pages from the repository and write every page as Markdown.

The generated pages are below `repository/`, `reference/commands.md` and `llms.txt`, with a `.md` file next to each
page. `mkdocs.yml` has the site's settings.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)#\s]+)(?=[)#])")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".jsonl": "json"}
GENERATED = ("CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
"""Repository files in the navigation."""

_texts: dict[str, str] = {}
"""Markdown of each page by its path in the site, for `llms.txt` and the `.md` files."""
_titles: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the command reference, and a page for each file of the repository that a page links to."""
    files.append(File.generated(config, "reference/commands.md", content=command_reference()))
    waiting = [(ROOT / name) for name in GENERATED]
    for file in files.documentation_pages():
        if file.abs_src_path:
            waiting += linked_files(Path(file.abs_src_path))
    done = set[Path]()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        uri = page_of(path)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            waiting += linked_files(path)
        else:
            name = path.relative_to(ROOT).as_posix()
            text = f"# {name}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n```\n"
        generated = File.generated(config, uri, content=text)
        generated.inclusion = generated.inclusion.NOT_IN_NAV
        files.append(generated)
    return files


def linked_files(page: Path) -> list[Path]:
    """Return the files outside `docs/` that a page links to."""
    links = LINK.findall(page.read_text(encoding="utf-8"))
    targets = [(page.parent / link).resolve() for link in links]
    return [path for path in targets if path.is_file() and not path.is_relative_to(ROOT / "docs")]


def page_of(path: Path) -> str:
    """Return the path in the site for a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    return f"repository/{name}" if path.suffix == ".md" else f"repository/{name}.md"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages generated for files of the repository."""
    uri = page.file.src_uri
    page.meta.setdefault("search", search_rank(uri))
    # A generated page has a different path in the site from its file in the repository.
    origin = ROOT / uri.removeprefix("repository/") if uri.startswith("repository/") else ROOT / "docs" / uri

    def target(link: re.Match[str]) -> str:
        path = (origin.parent / link[1]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            to = path.relative_to(ROOT / "docs").as_posix()
        elif path.is_file() and path.is_relative_to(ROOT):
            to = page_of(path)
        else:
            return link[1]
        return posixpath.relpath(to, posixpath.dirname(uri) or ".")

    text = LINK.sub(target, markdown)
    text = re.sub(r"^<!-- not run: .* -->\n", "", text, flags=re.M)
    _texts[uri] = text
    return text


def search_rank(uri: str) -> dict[str, float | bool]:
    """Return how the search ranks a page: guides first, reference pages below, source files not at all."""
    if uri.startswith("repository/"):
        return {"boost": 0.3} if uri.removeprefix("repository/") in GENERATED else {"exclude": True}
    if uri.startswith(("reference/api", "reference/commands", "design/")):
        return {"boost": 0.3}
    return {"boost": 1.0 if uri.startswith(("reference/", "background/")) else 2.0}


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Record the order of the pages for `llms.txt`."""
    _titles.clear()
    for page in nav.pages:
        _titles[page.file.src_uri] = ""


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Record the title of a page."""
    _titles[page.file.src_uri] = str(page.title)


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt`, and every page as Markdown next to its HTML."""
    site = Path(config.site_dir)
    for uri, text in _texts.items():
        target = site / uri
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    lines += [f"- [{title}]({uri})" for uri, title in _titles.items() if uri in _texts]
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def command_reference() -> str:
    """Return the page of all commands with their arguments and options, as the command itself declares them."""
    from penstock.cli.main import add_commands

    lines = [
        "# Commands",
        "",
        "This page is generated from the command line itself. [The guide](../cli.md) explains when to use what.",
        "",
    ]
    _describe(typer.main.get_command(add_commands()), "penstock", lines)
    return "\n".join(lines) + "\n"


def _describe(command: Any, name: str, lines: list[str]) -> None:
    if hasattr(command, "commands"):
        for child in sorted(command.commands):
            _describe(command.commands[child], f"{name} {child}", lines)
        return
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join(
        [name, *(["[OPTIONS]"] if options else []), *(str(a.metavar or a.name).upper() for a in arguments)]
    )
    lines += [f"## `{name}`", "", (command.help or "").strip(), "", "```text", usage, "```", ""]
    if options:
        lines += ["| option | default | meaning |", "|---|---|---|"]
        for option in options:
            names = ", ".join(f"`{text}`" for text in [*option.opts, *option.secondary_opts])
            default = (
                "" if option.default in (None, (), []) or callable(option.default) else f"`{_text(option.default)}`"
            )
            lines.append(f"| {names} | {default} | {(option.help or '').replace('|', '&#124;')} |")
        lines.append("")


def _text(value: object) -> str:
    return str(getattr(value, "value", value))
