"""The documents' Markdown, written for a forge, becomes that of the site."""

from __future__ import annotations

import pytest

from harness import pages

PLACES = {
    "docs/guide/updates.md": "guide/updates.md",
    "docs/pictures/reward.png": "pictures/reward.png",
    "patches/README.md": "patches/README.md",
    "sglang_inflight/extensions/saves/README.md": "sglang_inflight/extensions/saves/README.md",
}


def prepared(text: str, name: str, repo_url: str | None = None) -> str:
    return pages.prepared(text, name, PLACES, repo_url)


@pytest.mark.parametrize(
    ("name", "link", "to"),
    [
        ("docs/guide/updates.md", "[x](#kv-by-age)", "[x](#kv-by-age)"),
        ("docs/guide/updates.md", "[x](https://a.org/b#c)", "[x](https://a.org/b#c)"),
        ("docs/guide/updates.md", "[x](../../patches/README.md#a)", "[x](../patches/README.md#a)"),
        ("docs/guide/updates.md", "[`x/`](../../patches)", "[`x/`](../patches/README.md)"),
        ("docs/guide/updates.md", "![x](../pictures/reward.png)", "![x](../pictures/reward.png)"),
        ("patches/README.md", "[x](../docs/guide/updates.md)", "[x](../guide/updates.md)"),
        (
            "sglang_inflight/extensions/saves/README.md",
            "[x](../../../docs/guide/updates.md#y)",
            "[x](../../../guide/updates.md#y)",
        ),
        ("docs/guide/updates.md", "[a](../../Makefile), [`b`](../../examples)", "a, `b`"),
        # mkdocs warns of what is nowhere, and make docs fails
        ("docs/guide/updates.md", "[x](../gone.md)", "[x](../gone.md)"),
    ],
)
def test_link_leads_to_another_place_of_the_site(name: str, link: str, to: str) -> None:
    assert prepared(f"See {link}.", name) == f"See {to}."
    assert prepared(f"```\n{link}\n```\n", name) == f"```\n{link}\n```\n"


def test_link_to_a_source_leads_elsewhere_than_to_the_forge() -> None:
    text = prepared(
        "[a](../../Makefile#L3), [b](../../examples)", "docs/guide/updates.md", "h://r/"
    )
    assert text == "[a](h://r/blob/HEAD/Makefile#L3), [b](h://r/tree/HEAD/examples)"


def test_list_or_table_of_the_forge_is_a_paragraph_of_the_site() -> None:
    name = "docs/guide/updates.md"
    assert prepared("words:\n- one\n- two\n  goes on\n- three\n", name) == (
        "words:\n\n- one\n- two\n  goes on\n- three\n"
    )
    assert prepared("<!-- gpu -->\n| a |\n|---|\n", name) == "<!-- gpu -->\n\n| a |\n|---|\n"


@pytest.mark.parametrize(
    ("html", "marked"),
    [
        ("<code>--pp-size 2</code>", '<code><span class="flag">--pp-size</span> 2</code>'),
        ("--pp-size", "--pp-size"),
        ("<pre><code>--pp-size</code></pre>", "<pre><code>--pp-size</code></pre>"),
        (f"<code>--{'long-' * 9}</code>", f"<code>--{'long-' * 9}</code>"),
    ],
)
def test_browser_breaks_a_short_flag(html: str, marked: str) -> None:
    assert pages.on_page_content(html, None, None, None) == marked
