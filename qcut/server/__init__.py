"""A server with OpenAI's interface over `qcut.Scheduler`. Needs the extra ``serve``.

`qcut.server.application` maps requests to the scheduler; `qcut.server.running` runs it on a socket.
"""
