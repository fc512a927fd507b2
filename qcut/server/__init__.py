"""A server with OpenAI's interface over `qcut.Scheduler`. Needs the extra ``serve``.

`qcut.server.app` answers, `qcut.server.runner` listens.
"""
