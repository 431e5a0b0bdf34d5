"""Looks at pages in headless Chromium, as `make page` does: python -m studies.page [--shots FOLDER] PAGE.html ...

Each page is opened on a desktop, light and dark, and on a phone.  A problem is what axe-core calls serious or critical,
a page wider than its screen, a file of 2 MB or more, or a request that leaves the machine.  The exit code is 1 if there
is a problem. playwright, axe-core and Chromium are not among the dependencies: see `make page`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

AXE = Path(__file__).parents[1] / ".page/node_modules/axe-core/axe.min.js"
CHROMIUM = "/usr/bin/chromium"
MOST_BYTES = 2 << 20


class Screen(NamedTuple):
    name: str
    width: int
    height: int
    scheme: str


SCREENS = (
    Screen("light", 1280, 900, "light"),
    Screen("dark", 1280, 900, "dark"),
    Screen("phone", 390, 844, "light"),
    Screen("phone-dark", 390, 844, "dark"),
)

FINDINGS = """async () => (await axe.run(document, {resultTypes: ['violations']})).violations.map(
    found => [found.impact, found.id, found.nodes.length, found.nodes[0].html.slice(0, 200)])"""
WIDER = "() => document.scrollingElement.scrollWidth - window.innerWidth"


def look(browser: Any, path: Path, screen: Screen, shot: Path | None) -> Iterator[str]:
    """Yields the problems of a page on a screen.

    Args:
        shot: File for a picture of the whole page.
    """
    context = browser.new_context(
        viewport={"width": screen.width, "height": screen.height}, color_scheme=screen.scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.resolve().as_uri())
    if shot is not None:
        page.screenshot(path=shot, full_page=True)
    page.add_script_tag(path=AXE)
    for impact, rule, number, first in page.evaluate(FINDINGS):
        if impact in ("serious", "critical"):
            yield f"{impact}: {rule}: {number} elements, first {first}"
        else:
            print(f"{path.name} on {screen.name}: note: {impact}: {rule}: {number} elements, first {first}")
    if (pixels := page.evaluate(WIDER)) > 0:
        yield f"the page is {pixels} pixels wider than the screen"
    yield from (f"the page asks for {url}" for url in asked if not url.startswith(("file:", "data:")))
    context.close()


def main() -> int:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shots", type=Path, help="Keep a picture of each page and screen in this folder.")
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE.html")
    given = parser.parse_args()
    number = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        for path in given.pages:
            name = "-".join(path.with_suffix("").parts[-2:])
            problems = [] if path.stat().st_size < MOST_BYTES else [f"the page has {path.stat().st_size:,} bytes"]
            for screen in SCREENS:
                shot = given.shots and given.shots / f"{name}-{screen.name}.png"
                problems += [f"{screen.name}: {problem}" for problem in look(browser, path, screen, shot)]
            print(f"{path}: {path.stat().st_size:,} bytes, {len(SCREENS)} screens, {len(problems)} problems")
            print("".join(f"  {problem}\n" for problem in problems), end="")
            number += len(problems)
        browser.close()
    return int(number > 0)


if __name__ == "__main__":
    sys.exit(main())
