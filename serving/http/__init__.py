"""The HTTP front end: OpenAI's endpoints, health, metrics and the page."""
