"""The page in which the programs run step by step: docs/web.md."""

from formats.interpreter import check

check("web")
