"""A server with OpenAI's interface over `qcut.Scheduler`. Needs the extra ``serve``.

`qcut.server.application` answers, `qcut.server.running` listens.
"""
