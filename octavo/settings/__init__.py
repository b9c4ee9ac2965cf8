"""What a user says of an engine: settings with their and what each is resolved to."""
