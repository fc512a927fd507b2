"""A server with OpenAI's interface over `qcut.Scheduler`. Needs ``qcut[serve]``.

`qcut.server.application` answers, `qcut.server.running` listens.
"""
