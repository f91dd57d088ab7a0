"""Build the documentation site from the Markdown of this clone: `python docs/site.py OUT`.

    python docs/site.py OUT              # this clone, in OUT/site
    python docs/site.py OUT --versions   # the same as OUT/site/dev, beside a folder for each released version

Needs `pip install -e '.[docs]'`. The pages are those of docs/ and the top folder. Links to files outside the site point
to the repository, if it has an address. The build is strict: a dead link stops it. `--pages` only writes the pages and
the configuration, for another generator.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Set by tools/set_address.py at a release. Until then, links to files outside the site are plain text.
REPOSITORY = ""
# Pages from outside docs/, by their path in the site.
MORE = {
    "start.md": "README.md",
    "zh-CN/start.md": "README.zh-CN.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/security.md": "SECURITY.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/results.md": "benchmarks/RESULTS.md",
}
# The groups of the navigation in reading order, each with its pages by section; "" is the top of a group. A name with *
# stands for all pages with this beginning. Titles of pages are their first headings.
NAVIGATION: dict[str, dict[str, str]] = {
    "Start": {"": "index start by-symptom from-your-old-script platforms README"},
    "Guide": {"": "guide/README guide/0* guide/1* guide/2*"},
    "How to": {
        "Find a desync": "formats options nodes watch live integrations testing ci scale diagnosis-trials",
        "Prove a conversion": "same-model conversion-trials",
    },
    "Findings": {
        "": "reference/findings",
        "Replicas: files and settings": "reference/findings/syn1*",
        "Replicas: causes": "reference/findings/syn2*",
        "Two models": "reference/findings/syn3*",
        "Watched runs and parity": "reference/findings/syn4*",
    },
    "Reference": {
        "": "reference/commands reference/configuration reference/exit-codes reference/layouts reference/other-tools",
        "JSON": "reference/json*",
        "Python": "reference/api*",
        "Code": "reference/architecture reference/syncheck-code reference/doors-code reference/trainer-code",
        "Project": "upgrading project/*",
    },
    "Trainer": {
        "": "methods modifiers matrix launchers running data tasks resume stopping operations faults bench",
    },
    "中文": {"": "zh-CN/start zh-CN/README zh-CN/0* zh-CN/1* zh-CN/2* zh-CN/from-your-old-script zh-CN/glossary"},
}
# Languages with the folder of their first page and their code.
LANGUAGES = (("English", "./", "en"), ("中文", "zh-CN/", "zh"))
# Pages with a shorter title in the navigation than their heading.
TITLES = {"README.md": "The tool on one page", "README.zh-CN.md": "简介", "docs/README.md": "All pages"}
# A block of code with a file name: the generator wants quotes.
_TITLE = re.compile(r"^(```\w+ title=)([^\s\"]+)$", re.MULTILINE)
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]*)(#[^)]*)?\)")


def list_pages() -> dict[str, Path]:
    """Return the Markdown, pictures and styles of the site, by their path in it."""
    docs = ROOT / "docs"
    pages = {str(p.relative_to(docs)): p for p in docs.rglob("*") if p.suffix in (".md", ".svg", ".png", ".css")}
    return pages | {name: ROOT / path for name, path in MORE.items()}


def rewrite_links(text: str, name: str, source: Path, names: dict[Path, str]) -> str:
    """Return a page with links for the site. name: of the page; names: of all pages, by their file in the clone."""

    def rewrite(found: re.Match[str]) -> str:
        start, target, anchor = found[1], found[2], found[3] or ""
        if not target or ":" in target:
            return found[0]
        path = (source.parent / target).resolve()
        if path.is_dir() and path / "README.md" in names:
            path /= "README.md"
        if path in names:
            return f"{start}{os.path.relpath(names[path], Path(name).parent)}{anchor})"
        if not path.exists():
            raise SystemExit(f"{source}: dead link {target}; correct the page")
        if not REPOSITORY:
            return start.removeprefix("[").removesuffix("](")
        kind = "tree" if path.is_dir() else "blob"
        return f"{start}{REPOSITORY}/{kind}/main/{path.relative_to(ROOT)}{anchor})"

    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    blocks[::2] = [_LINK.sub(rewrite, block) for block in blocks[::2]]
    return _TITLE.sub(r'\1"\2"', "".join(blocks))


def write_pages(out: Path) -> None:
    """Write all pages and the configuration of the generator."""
    pages = list_pages()
    names = {path.resolve(): name for name, path in pages.items()}
    shutil.rmtree(out, ignore_errors=True)
    for name, path in pages.items():
        target = out / "pages" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(rewrite_links(path.read_text(encoding="utf-8"), name, path, names), encoding="utf-8")
        else:
            shutil.copy(path, target)
    (out / "mkdocs.yml").write_text(configure(pages), encoding="utf-8")


def configure(pages: dict[str, Path]) -> str:
    """Return the configuration: navigation, search, versions, copy buttons, and light and dark colors.

    pages: the files by their path in the site.
    """
    palette = [("light", "default", "weather-night", "dark"), ("dark", "slate", "weather-sunny", "light")]
    features = (
        "content.code.copy, navigation.tabs, navigation.tabs.sticky, navigation.sections, navigation.top, "
        "search.highlight, search.suggest, toc.integrate"
    )
    lines = [
        "site_name: syncheck",
        *([f"repo_url: {REPOSITORY}"] if REPOSITORY else []),
        "docs_dir: pages",
        "extra_css: [site.css]",
        "theme:",
        "  name: material",
        "  font: false",  # pages load nothing from other hosts
        f"  features: [{features}]",
        "  palette:",
    ]
    for scheme, name, icon, other in palette:
        lines += [f"    - media: '(prefers-color-scheme: {scheme})'", f"      scheme: {name}"]
        lines += [f"      toggle: {{icon: material/{icon}, name: {other}}}"]
    lines += [
        # The theme lists the versions of ../versions.json, whose format is that of the program mike.
        "extra:",
        "  version: {provider: mike}",
        # A menu in the header of every page, because most pages have no translation of their own.
        "  alternate:",
        *[f"    - {{name: {name}, link: {link}, lang: {lang}}}" for name, link, lang in LANGUAGES],
        "markdown_extensions:",
        "  - tables",
        "  - attr_list",
        "  - pymdownx.highlight",
        "  - pymdownx.superfences",
        "  - toc: {permalink: true, slugify: !!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}}",
        "nav:",
        *navigate(pages),
    ]
    return "\n".join(lines) + "\n"


def navigate(pages: dict[str, Path]) -> list[str]:
    """Return the lines of the navigation. Raises SystemExit for a page that no group has."""
    lines, missing = [], {name for name in pages if name.endswith(".md")}
    for group, sections in NAVIGATION.items():
        lines.append(f"  - {json.dumps(group, ensure_ascii=False)}:")
        for section, patterns in sections.items():
            if section:
                lines.append(f"      - {json.dumps(section)}:")
            indent = "          " if section else "      "
            for pattern in patterns.split():
                for name in sorted(fnmatch.filter(pages, f"{pattern}.md")):
                    lines.append(f"{indent}- {json.dumps(read_title(pages[name]), ensure_ascii=False)}: {name}")
                    missing.discard(name)
    if missing:
        raise SystemExit(f"{', '.join(sorted(missing))}: in no group; add to NAVIGATION of docs/site.py")
    return lines


def read_title(page: Path) -> str:
    """Return the first heading of a page without marks of code."""
    heading = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return TITLES.get(page.relative_to(ROOT).as_posix(), heading[1].replace("`", "") if heading else page.stem)


def build(out: Path) -> int:
    """Build the site of this clone in OUT/site, and return the exit code."""
    write_pages(out)
    beside = Path(sys.executable).with_name("zensical")  # an environment need not be active
    command = [str(beside) if beside.exists() else "zensical", "build", "--strict", "-f", str(out / "mkdocs.yml")]
    return subprocess.run(command, check=False).returncode


def list_releases() -> dict[str, str]:
    """Return the newest tag vX.Y.Z of each released X.Y, newest first. Tags without this program are skipped."""
    tags = subprocess.run(["git", "tag"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    numbers = sorted((tuple(map(int, tag[1:].split("."))), tag) for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag))
    found = {f"{number[0]}.{number[1]}": tag for number, tag in numbers}
    has_site = ["git", "cat-file", "-e"]
    return {
        name: tag
        for name, tag in reversed(found.items())
        if not subprocess.run([*has_site, f"{tag}:docs/site.py"], cwd=ROOT, capture_output=True, check=False).returncode
    }


def build_versions(out: Path) -> int:
    """Build this clone as `dev` and each release in a folder of its own; `latest` is the newest release.

    Returns the exit code of the first failed build, or 0.
    """
    whole = out / "site"
    shutil.rmtree(out, ignore_errors=True)
    if code := build(out / "dev"):
        return code
    shutil.copytree(out / "dev" / "site", whole / "dev")
    releases = list_releases()
    for name, tag in releases.items():
        tree = out / f"tree-{name}"
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), tag], cwd=ROOT, check=True, capture_output=True
        )
        try:
            command = [sys.executable, "docs/site.py", str(out / name)]
            if code := subprocess.run(command, cwd=tree, check=False).returncode:
                return code
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
        shutil.copytree(out / name / "site", whole / name)
    latest = next(iter(releases), "dev")
    shutil.copytree(whole / latest, whole / "latest")
    rows = [{"version": name, "title": name, "aliases": ["latest"] * (name == latest)} for name in (*releases, "dev")]
    (whole / "versions.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    redirect = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=latest/">'
    (whole / "index.html").write_text(f'{redirect}<a href="latest/">syncheck</a>\n', encoding="utf-8")
    return 0


def main() -> int:
    """Write the pages, and build the site."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pages", action="store_true", help="write the pages and the configuration only")
    parser.add_argument("--versions", action="store_true", help="also build the released versions, from their tags")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if arguments.versions:
        return build_versions(out)
    if arguments.pages:
        write_pages(out)
        return 0
    return build(out)


if __name__ == "__main__":
    sys.exit(main())
