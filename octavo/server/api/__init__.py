"""What clients speak: a room for each API, and what all of them share."""
