"""Files of requests in OpenAI's batch format, and what carries them out."""
