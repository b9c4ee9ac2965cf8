"""HTTP/1.1, down to the bytes: connections, who may ask how much, bodies, errors, streams."""
