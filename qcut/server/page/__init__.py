"""The chat page: one document without external resources, built from the files of this folder."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from functools import cache
from importlib import resources

_INCLUDED = re.compile(r'<link rel="stylesheet" href="([\w.]+)">|<script src="([\w.]+)"></script>')


@cache
def document() -> tuple[str, dict[str, str]]:
    """The page as HTML, and its response headers.

    The headers allow only the page's own styles and scripts, by digest, and calls to this server. Text of a model can
    become neither script nor markup: the browser refuses to parse strings as HTML.
    """
    folder = resources.files("qcut.server").joinpath("page")
    digests: dict[str, list[str]] = {"style": [], "script": []}

    def included(match: re.Match[str]) -> str:
        kind = "style" if match[1] else "script"
        text = folder.joinpath(match[1] or match[2]).read_text(encoding="utf-8")
        digests[kind].append(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{kind}>{text}</{kind}>"

    text = _INCLUDED.sub(included, folder.joinpath("page.html").read_text(encoding="utf-8"))
    policy = (
        f"default-src 'none'; style-src {' '.join(digests['style'])}; script-src {' '.join(digests['script'])}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return text, headers
