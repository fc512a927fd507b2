"""Tools and reasoning of chats: fields of requests, and parsers of what models write."""
