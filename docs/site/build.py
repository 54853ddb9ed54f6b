"""`make docs`: README, guides, decisions and a gallery of recipes as pages that need no network.

The documents stay as GitHub shows them. Here they are copied into one folder with their links changed, each recipe is
planned by `plait plan`, Zensical makes pages of it (in an environment of its own, .docs-env), and every link of the
result is followed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "docs" / "site"
BUILD, ENVIRONMENT, SITE = ROOT / ".docs-site", ROOT / ".docs-env", ROOT / "site"
SOURCE = BUILD / "source"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "docs/README.md": "guides.md",
    **{f"docs/{path.name}": path.name for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "README.md"},
    **{f"docs/decisions/{path.name}": f"decisions/{path.name}" for path in (ROOT / "docs" / "decisions").glob("*.md")},
    "docs/decisions": "decisions/index.md",
    "recipes": "recipes.md",
    **{f"recipes/{path.name}": f"recipes/{path.stem}.md" for path in sorted((ROOT / "recipes").glob("*.toml"))},
}
"""Where each document of the repository is a page of the site."""
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
ITEM = re.compile(r"([-*]|\d+\.) +")


def main() -> None:
    zensical = environment()
    shutil.rmtree(BUILD, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    shutil.copy(HERE / "zensical.toml", BUILD)
    extra: dict[Path, str] = {}
    for document, page in PAGES.items():
        if document.endswith(".md"):
            write_page(page, page_text((ROOT / document).read_text(encoding="utf-8"), Path(document), page, extra))
    write_page("decisions/index.md", decisions_text())
    write_gallery(extra)
    copied: set[Path] = set()
    while missing := extra.keys() - copied:  # a document among them may link to more
        for path in sorted(missing):
            copy_linked(path, SOURCE / extra[path], extra)
        copied |= missing
    subprocess.run([zensical, "build", "--clean"], cwd=BUILD, check=True)
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(BUILD / "site", SITE)
    load_nothing_from_elsewhere(SITE)
    problems = sorted(set(broken_links(SITE)))
    if problems:
        sys.exit("docs: these links lead nowhere, or off the site:\n  " + "\n  ".join(problems))
    print(f"docs: {sum(1 for _ in SITE.rglob('*.html'))} pages, begin with {(SITE / 'index.html').relative_to(ROOT)}")


def environment() -> str:
    """Zensical's program, from an environment that is made where it is missing or of another version."""
    wanted, noted = (HERE / "requirements.txt").read_text(), ENVIRONMENT / "installed.txt"
    if not noted.is_file() or noted.read_text() != wanted:
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        pip = [ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", HERE / "requirements.txt"], check=True)
        noted.write_text(wanted)
    return str(ENVIRONMENT / "bin" / "zensical")


def write_page(page: str, text: str) -> None:
    path = SOURCE / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# Documents as Python-Markdown reads them.


def page_text(text: str, document: Path, page: str, extra: dict[Path, str]) -> str:
    """A document's text with links as they are on the site. What it links to that is no page is noted in `extra` with
    its place there."""

    def moved(found: re.Match[str]) -> str:
        words, link = found.groups()
        file, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or not file:
            return found.group()
        target = Path(os.path.normpath(document.parent / file))
        place = PAGES.get(str(target))
        if place is None:
            place = extra.setdefault(target, str(Path("files") / target))
            if (ROOT / target).is_dir():
                place = f"{place}/index.md"
        relative = os.path.relpath(place, Path(page).parent)
        return f"{words}({relative}{'#' + anchor if anchor else ''})"

    lines = [line if line.startswith("    ") else LINK.sub(moved, line) for line in text.split("\n")]
    return "\n".join(with_wide_lists(lines))


def with_wide_lists(lines: list[str]) -> Iterator[str]:
    """GitHub indents what belongs to an item by the width of its mark; Python-Markdown wants four columns, and a blank
    line before a list that follows a paragraph."""
    width, before = 0, ""
    for line in lines:
        item = ITEM.match(line)
        if item:
            if before.strip() and not width:
                yield ""
            width = item.end()
        elif line.strip() and not line.startswith(" "):
            width = 0
        indent = len(line) - len(line.lstrip(" "))
        if width and line.strip() and indent >= width:
            line = " " * max(0, 4 - width) + line
        yield line
        before = line


def decisions_text() -> str:
    rows = []
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")
        rows.append(f"- [{title}]({path.name})")
    return "# Decisions\n\nWhy plait is as it is, one page a decision.\n\n" + "\n".join(rows) + "\n"


def copy_linked(path: Path, place: Path, extra: dict[Path, str]) -> None:
    """A file that a document links to; a folder as a page that lists its files."""
    if not (ROOT / path).exists():
        return  # the link check says so
    if not (ROOT / path).is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text, page = (ROOT / path).read_text(encoding="utf-8"), str(place.relative_to(SOURCE))
            place.write_text(page_text(text, path, page, extra), encoding="utf-8")
        else:
            shutil.copy(ROOT / path, place)
        return
    place.mkdir(parents=True, exist_ok=True)
    files = sorted(one for one in (ROOT / path).iterdir() if one.is_file())
    for one in files:
        shutil.copy(one, place)
    (place / "index.md").write_text(f"# {path}\n\n" + "".join(f"- [{one.name}]({one.name})\n" for one in files))


# The gallery.


def write_gallery(extra: dict[Path, str]) -> None:
    """A page for each recipe, with its plan as `plait plan` prints and draws it now; and the page that lists them."""
    machines = tomllib.loads((HERE / "gallery.toml").read_text(encoding="utf-8"))
    rows = []
    for recipe in sorted((ROOT / "recipes").glob("*.toml")):
        comment = first_comment(recipe)
        summary = re.split(r"(?<=[.!?]) ", comment)[0]
        rows.append(f"| [{recipe.stem}](recipes/{recipe.stem}.md) | {summary} |")
        write_page(f"recipes/{recipe.stem}.md", recipe_text(recipe, machines[recipe.stem], comment))
    text = (
        "# Recipes\n\nEach of them is a file in `recipes/` and runs as it is: `plait train recipes/NAME.toml`. The "
        "models of two papers are there to be planned. Every page has the plan of its recipe, in words and drawn.\n\n"
    )
    write_page("recipes.md", text + "| recipe | what it does |\n|---|---|\n" + "\n".join(rows) + "\n")


def first_comment(recipe: Path) -> str:
    """The words at the head of a recipe, up to the first command among them."""
    words: list[str] = []
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.startswith("#  "):
            break
        words.append(line.lstrip("# "))
    return " ".join(words)


def recipe_text(recipe: Path, clusters: list[str], comment: str) -> str:
    command = ["plan", f"recipes/{recipe.name}", *(word for one in clusters for word in ("--cluster", one))]
    drawn = SOURCE / "recipes" / f"{recipe.stem}-plan.html"
    drawn.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [ROOT / ".venv" / "bin" / "plait", *command, "--html", drawn],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    train = [] if recipe.stem.startswith("paper-") else [f"    plait train recipes/{recipe.name}"]
    parts = [f"# {recipe.stem}", comment, *train, "## The recipe"]
    parts.append(indented(recipe.read_text(encoding="utf-8")))
    parts += ["## Its plan", f"    plait {' '.join(command)}"]
    if done.returncode == 0:
        parts.append(indented(re.sub(r"^working .*\n", "", done.stdout, flags=re.MULTILINE)))
        parts.append("## Its picture")
        parts.append(f"[The plan's own page]({drawn.name}) draws it: layout, time, memory and the other layouts.")
        parts.append(f'<iframe src="{drawn.name}" title="The plan of {recipe.stem}" style="{FRAME}"></iframe>')
    else:
        print(f"docs: {recipe.name} has no plan: {done.stderr.strip().removeprefix('plait: ')}")
        parts.append(
            "The model or the chats that this recipe begins with were missing when these pages were made, so it was "
            "not planned. `make pairs docs` brings them and makes the pages again."
        )
    return "\n\n".join(parts) + "\n"


FRAME = "width:100%;height:40rem;border:1px solid var(--md-default-fg-color--lightest)"


def indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines())


def load_nothing_from_elsewhere(site: Path) -> None:
    """Zensical's pages load one script from a CDN, with which search works on pages opened from a folder; ours does."""
    script = shutil.copy(HERE / "file-worker.js", site / "assets")
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(FILE_WORKER, os.path.relpath(script, page.parent)), encoding="utf-8")


FILE_WORKER = "https://unpkg.com/iframe-worker/shim"


# The check of the result.


class Links(HTMLParser):
    """What a page links to and loads, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "a" and (link := values.get("href")):
            self.links.append(link)
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.loaded.append(values.get("href") or "")
        elif tag in ("script", "img", "iframe", "source") and (link := values.get("src")):
            self.loaded.append(link)


def links_of(page: Path) -> Links:
    found = Links()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def broken_links(site: Path) -> Iterator[str]:
    """Every link of the site that leads to no file or anchor of it, and everything that is loaded from elsewhere."""
    pages = {page: links_of(page) for page in site.rglob("*.html") if page.name != "404.html"}
    for page, found in pages.items():
        name = page.relative_to(site)
        yield from (f"{name} loads {link}" for link in found.loaded if re.match(r"([a-z]+:)?//", link))
        for link in (*found.links, *found.loaded):
            if re.match(r"([a-z]+:|//)", link):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (page.parent / file.partition("?")[0]).resolve() if file else page
            if not target.exists():
                yield f"{name}: {link}"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name}: {link} (no such heading)"


if __name__ == "__main__":
    main()
