"""`enfold serve`: OpenAI's routes in front, ranks behind. Needs the extra `server`."""
